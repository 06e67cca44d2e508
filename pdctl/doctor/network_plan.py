"""Which ports are opened on which host, and who connects to them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from pdctl.doctor.facts import HostFacts
from pdctl.plan import ClusterPlan, InstancePlan

DATA_PURPOSE = "KV data over TCP (any free port)"
"""UCX takes ports that the kernel chooses (``UCX_TCP_PORT_RANGE`` is 0): one such port stands for all of them."""

_SIDE_CHANNEL, _API = "side channel", "API"


@dataclass(frozen=True)
class Listener:
    """A port to be opened.

    Attributes:
        id: unique in the plan.
        host: name of the host.
        bind: address that it binds, as the instance would.
        address: where others reach it.
        port: 0 for any free one.
        purpose: what the plan uses it for.
        ours: an instance of this cluster holds it already, so it is only connected to.
    """

    id: str
    host: str
    bind: str
    address: str
    port: int
    purpose: str
    ours: bool


@dataclass(frozen=True)
class Attempt:
    """A connection to be made. ``mtu``: whether the path's MTU is measured over it."""

    source: str
    listener: Listener
    mtu: bool

    @property
    def id(self) -> str:
        """Unique among the attempts of its source."""
        return self.listener.id


@dataclass(frozen=True)
class NetworkPlan:
    """All of one run."""

    listeners: tuple[Listener, ...]
    attempts: tuple[Attempt, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that listen or connect, each once."""
        return tuple(dict.fromkeys([*(one.host for one in self.listeners), *(one.source for one in self.attempts)]))


def plan_network(plan: ClusterPlan, facts: Mapping[str, HostFacts]) -> NetworkPlan:
    """Side channels from prefill to decode and back, APIs from the router, and a port for data where that is TCP.

    Each listener is opened once, however many connect. Ports that are bound to loopback are nobody else's business.

    Args:
        plan: the plan.
        facts: which ports instances of this cluster hold already.
    """
    side_channels = {name: list(_uses(plan, name, facts, _SIDE_CHANNEL)) for name in ("prefill", "decode")}
    apis = [listener for name in ("prefill", "decode") for listener in _uses(plan, name, facts, _API)]
    data = {name: _data_listeners(plan, name) for name in ("prefill", "decode")}
    attempts: dict[tuple[str, str], Attempt] = {}
    for source_role, target_role in (("prefill", "decode"), ("decode", "prefill")):
        sources = dict.fromkeys(instance.host for instance in _instances(plan, source_role))
        for source in sources:
            measured = set()
            for listener in (*side_channels[target_role], *data[target_role]):
                able = source != listener.host and not listener.ours
                mtu = able and listener.host not in measured
                if mtu:
                    measured.add(listener.host)
                attempts.setdefault((source, listener.id), Attempt(source, listener, mtu))
    for listener in apis:
        attempts.setdefault((plan.router.host, listener.id), Attempt(plan.router.host, listener, mtu=False))
    listeners = {attempt.listener.id: attempt.listener for attempt in attempts.values()}
    return NetworkPlan(tuple(listeners.values()), tuple(attempts.values()))


def _instances(plan: ClusterPlan, role: str) -> tuple[InstancePlan, ...]:
    return plan.prefill if role == "prefill" else plan.decode


def _uses(plan: ClusterPlan, role: str, facts: Mapping[str, HostFacts], purpose: str) -> Iterator[Listener]:
    for instance in _instances(plan, role):
        for use in instance.ports:
            if use.purpose == purpose and (not _is_loopback(use.address) or use.address == instance.address):
                yield Listener(
                    id=f"{instance.host} {use.purpose} {use.port}",
                    host=instance.host,
                    bind=use.address,
                    address=instance.address,
                    port=use.port,
                    purpose=use.purpose,
                    ours=_is_ours(facts.get(instance.host), use.port),
                )


def _data_listeners(plan: ClusterPlan, role: str) -> list[Listener]:
    if plan.spec.fabric != "tcp":
        return []
    addresses = dict.fromkeys((instance.host, instance.address) for instance in _instances(plan, role))
    return [
        Listener(f"{host} data {address}", host, address, address, 0, DATA_PURPOSE, ours=False)
        for host, address in addresses
    ]


def _is_ours(facts: HostFacts | None, port: int) -> bool:
    if facts is None:
        return False
    return any(one.ours and not one.free and one.port == port for one in facts.ports or ())


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
