"""What opening the planned ports between the hosts for real showed: connections, and the size of packets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdctl.doctor.checks.wording import listing
from pdctl.doctor.context import Context
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.network_facts import PathMtu, Reach
from pdctl.plan_devices import device_ranges

NOT_OPENED = "not checked: no ports were opened between the hosts in this run"


@dataclass(frozen=True)
class _Cause:
    """What an outcome means.

    Attributes:
        text: what was seen, behind *"connections to the side channel"*.
        fix: what to do; ``{ports}``, ``{source}`` and ``{target}`` are filled in.
    """

    text: str
    fix: str


_CAUSES = {
    "timeout": _Cause(
        "get no answer: something on the way drops the packets",
        "let TCP port {ports} of {target} be reached from {source}: in the security group on EC2, and in the firewall "
        "of {target} (nft, iptables, firewalld or ufw)",
    ),
    "refused": _Cause(
        "are refused, although a listener was waiting",
        "look for a firewall with REJECT rules on {target} or on the way (TCP port {ports}), and whether the address "
        "belongs to {target}",
    ),
    "unreachable": _Cause(
        "fail: the network knows no way there",
        "check the address of {target} in the cluster file (`address`), its interface, and the routes on {source}",
    ),
    "wrong-peer": _Cause(
        "are answered by somebody else than the host that was meant",
        "check `address` of {target} in the cluster file: two machines with one address, NAT, or a proxy in between",
    ),
}
_OTHER = _Cause("fail", "see the evidence; TCP port {ports} of {target} has to be reached from {source}")


def pair_and_direction(context: Context, source: str, target: str) -> tuple[tuple[str, str], str]:
    """Two hosts as findings name them, prefill first, and the direction in words."""
    pairs = set(context.pairs())
    if (source, target) in pairs:
        return (source, target), "prefill to decode"
    if (target, source) in pairs:
        return (target, source), "decode to prefill"
    if source == context.plan.router.host:
        return (source, target), "router to instance"
    return (source, target), "from the first host to the second"


# --- NET009


def _ports_reached(context: Context) -> Iterator[Result]:
    if context.network is None:
        yield skipped(message=NOT_OPENED)
        return
    by_hosts: dict[tuple[str, str], list[Reach]] = {}
    for reach in context.network.reaches:
        by_hosts.setdefault((reach.source, reach.target), []).append(reach)
    for (source, target), reaches in by_hosts.items():
        yield from _judge_reaches(context, source, target, reaches)
    for prefill, decode in context.pairs():
        for source, target in ((prefill, decode), (decode, prefill)):
            if source != target and (source, target) not in by_hosts:
                hosts, direction = pair_and_direction(context, source, target)
                yield skipped(*hosts, message=f"{direction}: not checked: no connection was tried")


def _judge_reaches(context: Context, source: str, target: str, reaches: list[Reach]) -> Iterator[Result]:
    hosts, direction = pair_and_direction(context, source, target)
    outcomes: dict[str, list[Reach]] = {}
    for reach in reaches:
        outcomes.setdefault(reach.outcome, []).append(reach)
    opened = outcomes.pop("open", [])
    for outcome in ("not-tried", "no-listener"):
        left_out = outcomes.pop(outcome, [])
        if left_out:
            reason = "the target could not listen on it" if outcome == "no-listener" else "it was not tried"
            message = f"{direction}: {_purposes(left_out)} not checked: {reason}"
            yield skipped(*hosts, message=message, evidence=_seen(left_out))
    for outcome, failing in outcomes.items():
        cause = _CAUSES.get(outcome, _OTHER)
        ports = device_ranges(sorted({reach.port for reach in failing}))
        what = "all planned ports" if not opened and len(outcomes) == 1 else _purposes(failing)
        yield failed(
            *hosts,
            message=f"{direction}: connections to {what} {cause.text}",
            evidence=_seen(failing),
            fix=cause.fix.format(ports=ports, source=source, target=target),
        )
    if opened and not outcomes:
        times = [reach.connect_ms for reach in opened if reach.connect_ms is not None]
        slowest = f", connected within {max(times):.1f} ms" if times else ""
        ports = device_ranges(sorted({reach.port for reach in opened}))
        yield passed(*hosts, message=f"{direction}: all planned ports were reached", evidence=f"ports {ports}{slowest}")


def _purposes(reaches: Iterable[Reach]) -> str:
    return listing(sorted({reach.purpose or f"port {reach.port}" for reach in reaches}))


def _seen(reaches: list[Reach]) -> str:
    parts = [
        f"{reach.source} to {_endpoint(reach)} ({reach.purpose}): {reach.outcome}"
        + (f", {reach.detail}" if reach.detail else "")
        for reach in reaches[:4]
    ]
    return "; ".join(parts) + (f"; and {len(reaches) - 4} more" if len(reaches) > 4 else "")


def _endpoint(reach: Reach) -> str:
    return f"[{reach.address}]:{reach.port}" if ":" in reach.address else f"{reach.address}:{reach.port}"


# --- NET010


def _packets_pass(context: Context) -> Iterator[Result]:
    if context.network is None:
        yield skipped(message=NOT_OPENED)
        return
    for one in context.network.mtus:
        yield _judge_mtu(context, one)


def _judge_mtu(context: Context, one: PathMtu) -> Result:
    hosts, direction = pair_and_direction(context, one.source, one.target)
    if one.path_mtu is None or one.interface_mtu is None:
        return skipped(*hosts, message=f"{direction}: the size of packets was not found out", evidence=one.detail)
    evidence = f"{one.source} to {one.address}: interface {one.interface_mtu}, path {one.path_mtu} bytes"
    if one.path_mtu >= one.interface_mtu:
        message = f"{direction}: packets of the interface's full size arrive"
        return passed(*hosts, message=message, evidence=evidence)
    return failed(
        *hosts,
        message=(
            f"{direction}: the interface sends packets of {one.interface_mtu} bytes, the path takes {one.path_mtu} only"
        ),
        evidence=f"{evidence}. {one.detail}" if one.detail else evidence,
        fix=(
            f"set the MTU of the interface on {one.source} to {one.path_mtu}, or raise it on the way (switches, "
            "tunnels); on EC2 allow inbound ICMP `fragmentation needed` (type 3, code 4) in the security group"
        ),
    )


REACH_CHECKS: tuple[Check, ...] = (
    Check(
        id="NET009",
        title="The planned ports are reached, in both directions",
        severity=Severity.ERROR,
        what=(
            "On each host of prefill and decode a listener is opened on the planned ports for a moment, and the other "
            "side (and the router) connects to it and checks that it is the right one."
        ),
        why=(
            "Decode asks prefill's side channel for its connection data and the other way round, and the router sends "
            "requests to both: a port that is blocked shows as requests that hang or fail."
        ),
        fix="Open the ports in the security group and the hosts' firewalls; check `address` of the hosts.",
        run=_ports_reached,
    ),
    Check(
        id="NET010",
        title="Packets of full size arrive",
        severity=Severity.WARNING,
        what=("The largest packet of the sender's interface is sent with *don't fragment*; the path must take it."),
        why=(
            "Connections are made, and small messages arrive, but the first large one is lost: a transfer over TCP "
            "hangs for no visible reason (a black hole), or is slow."
        ),
        fix="Use one MTU on the interfaces and on everything between them.",
        run=_packets_pass,
        sources=("https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/network_mtu.html",),
    ),
)
