"""HOST007 and 008: the clocks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from pdctl.doctor.checks.per_host import all_hosts, each_host, not_reached
from pdctl.doctor.context import Context
from pdctl.doctor.facts import ClockFacts, HostFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped

SKEW_LIMIT_S = 1.0


def _clocks(context: Context) -> Iterator[Result]:
    offsets: dict[str, tuple[float, float]] = {}
    for host in context.plan.hosts:
        facts = context.facts.get(host)
        if facts is None:
            yield not_reached(host)
            continue
        offset, error = facts.clock_offset_s, facts.clock_error_s
        if offset is None or error is None or not math.isfinite(offset) or not math.isfinite(error):
            yield skipped(host, message=f"not checked: {facts.why_missing('clock')}")
        else:
            offsets[host] = (offset, abs(error))
    if not offsets:
        return
    reference = _reference({host: offset for host, (offset, _) in offsets.items()})
    for host, (offset, error) in offsets.items():
        difference = offset - offsets[reference][0]
        uncertain = error + offsets[reference][1]
        seen = f"{difference:+.3f} s against {reference}, give or take {uncertain:.3f} s"
        clock = context.facts[host].clock
        unkept = clock is not None and clock.synchronized is False
        if host != reference and abs(difference) - uncertain > SKEW_LIMIT_S:
            yield failed(
                host,
                message=f"its clock differs from the other hosts' by more than {SKEW_LIMIT_S:g} s",
                evidence=seen,
                fix="start a time service, which sets the clock: none keeps it (see HOST008); on EC2 its server is "
                "169.254.169.123"
                if unkept
                else "let the time service set it: `sudo chronyc makestep` with chrony, `sudo systemctl restart "
                "systemd-timesyncd` with that; on EC2 its server is 169.254.169.123",
            )
        else:
            yield passed(host, message="its clock agrees with the others", evidence="" if host == reference else seen)


def _reference(offsets: dict[str, float]) -> str:
    """The host whose clock is in the middle; of two in the middle the one nearer to the operator's clock."""
    ordered = sorted(offsets, key=lambda host: offsets[host])
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    return min(middle, key=lambda host: abs(offsets[host]))


def _synchronized(context: Context, facts: HostFacts, clock: ClockFacts) -> Iterable[Result]:
    del context
    if clock.synchronized is None:
        yield skipped(facts.host, message="not checked: the kernel does not say whether its clock is synchronized")
    elif clock.synchronized:
        yield passed(facts.host, message="the clock is kept by a time service")
    else:
        yield failed(
            facts.host,
            message="the kernel says that no time service keeps the clock",
            fix="install and start chrony, or systemd-timesyncd (`timedatectl set-ntp true`)",
            commands=("sudo timedatectl set-ntp true",),
        )


CHECKS: tuple[Check, ...] = (
    Check(
        id="HOST007",
        title="The clocks agree",
        severity=Severity.WARNING,
        what=f"Each host's clock against the middle one of all, measured over SSH. More than {SKEW_LIMIT_S:g} s beyond "
        "the measurement's own error fails.",
        why="Logs of prefill and decode cannot be put side by side, metrics of different hosts do not line up, and "
        "from minutes on TLS and AWS signatures fail.",
        fix="Run chrony or systemd-timesyncd; on EC2 with the server 169.254.169.123.",
        run=_clocks,
        sources=("https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/set-time.html",),
    ),
    Check(
        id="HOST008",
        title="A time service keeps the clock",
        severity=Severity.INFO,
        what="What the kernel says of its clock (adjtimex).",
        why="A clock that nothing keeps drifts by seconds a day; see HOST007 for how far it is off now.",
        fix="`sudo timedatectl set-ntp true`, or install chrony.",
        run=each_host("clock", _synchronized, hosts=all_hosts),
        sources=("https://man7.org/linux/man-pages/man2/adjtimex.2.html",),
    ),
)
