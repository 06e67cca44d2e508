"""What a real NIXL WRITE between two hosts showed. Pure data; ``probe.py`` collects it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ProbeResult:
    """One prefill host writing into one decode host's memory.

    Attributes:
        prefill: host name that writes.
        decode: host name that is written to.
        ok: whether every block arrived with the right content.
        stage: where it ended: ``done``, or the step that failed: ``start``, ``import``, ``backend``, ``register``,
            ``handshake``, ``write``, ``verify``, ``notify``, ``timeout``.
        error: in words; empty when ok.
        backend: NIXL backend in use (``UCX``, ``LIBFABRIC``); empty if it never came to that.
        transport: what the bytes really travelled on, as far as it can be told (``tcp``, ``rc_mlx5``, ``efa``,
            ``efa emulated``, ``shm``, ...); empty if unknown.
        transport_evidence: how that is known (counters that moved, a log line).
        memory: ``cuda``, ``neuron`` or ``host``: what was written from and to.
        block_bytes: bytes of one KV block of this model (of one rank).
        block_p50_us: time of a WRITE of one block until the writer sees it complete, median, microseconds.
        block_p99_us: the same, 99th percentile.
        batch_bytes: size of the big batch.
        bandwidth_mb_s: of the big batch, in MB/s (10**6 bytes per second).
        notification_us: round trip of a notification, median, microseconds.
        log: the last lines of the two child processes' output, for evidence.
    """

    prefill: str
    decode: str
    ok: bool
    stage: str
    error: str = ""
    backend: str = ""
    transport: str = ""
    transport_evidence: str = ""
    memory: str = ""
    block_bytes: int | None = None
    block_p50_us: float | None = None
    block_p99_us: float | None = None
    batch_bytes: int | None = None
    bandwidth_mb_s: float | None = None
    notification_us: float | None = None
    log: str = ""


@dataclass(frozen=True)
class ProbeFacts:
    """All probes of one run; ``not_probed`` names the pairs left out by ``--probe-pairs``."""

    results: tuple[ProbeResult, ...] = ()
    not_probed: tuple[tuple[str, str], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """For ``--bundle``; read back by :func:`from_json`."""
        return {"results": [vars(one) for one in self.results], "not_probed": [list(pair) for pair in self.not_probed]}


def from_json(value: dict[str, Any]) -> ProbeFacts:
    """Inverse of ``to_json``.

    Raises:
        ValueError: it does not have that shape.
    """
    try:
        return ProbeFacts(
            tuple(ProbeResult(**one) for one in value["results"]),
            tuple((str(prefill), str(decode)) for prefill, decode in value["not_probed"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no probe facts: {error}") from None
