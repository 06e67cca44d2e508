"""What opening the planned ports between the hosts for real showed. Pure data; ``network.py`` collects it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reach:
    """One attempt to connect from one host to a port of another.

    Attributes:
        source: host name that connects.
        target: host name that listens.
        address: address of the target that was used.
        port: TCP port.
        purpose: what the plan uses the port for.
        outcome: ``open``, ``refused``, ``timeout``, ``unreachable``, ``no-listener`` (the target could not listen:
            see ``detail``), ``wrong-peer`` (something else answered) or ``not-tried``.
        detail: in words; empty for ``open``.
        connect_ms: how long connecting took, None unless open.
    """

    source: str
    target: str
    address: str
    port: int
    purpose: str
    outcome: str
    detail: str = ""
    connect_ms: float | None = None


@dataclass(frozen=True)
class PathMtu:
    """The largest packet that goes from one host to another unfragmented.

    Attributes:
        interface_mtu: MTU of the interface that the route uses, in bytes; None if unknown.
        path_mtu: what the path really takes, in bytes; None if it could not be found out (``detail`` says why).
    """

    source: str
    target: str
    address: str
    interface_mtu: int | None
    path_mtu: int | None
    detail: str = ""


@dataclass(frozen=True)
class NetworkFacts:
    """All attempts of one run."""

    reaches: tuple[Reach, ...] = ()
    mtus: tuple[PathMtu, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For ``--bundle``; read back by :func:`from_json`."""
        return {"reaches": [vars(one) for one in self.reaches], "mtus": [vars(one) for one in self.mtus]}


def from_json(value: dict[str, Any]) -> NetworkFacts:
    """Inverse of ``to_json``.

    Raises:
        ValueError: it does not have that shape.
    """
    try:
        return NetworkFacts(
            tuple(Reach(**one) for one in value["reaches"]), tuple(PathMtu(**one) for one in value["mtus"])
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no network facts: {error}") from None
