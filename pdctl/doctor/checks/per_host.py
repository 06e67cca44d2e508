"""Judging each host by itself, or all hosts against each other, so that none is left out in silence. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts
from pdctl.doctor.findings import CheckFunction, Result, skipped

Judge = Callable[[Context, HostFacts, Any], Iterable[Result]]
"""Looks at one part of one host's facts; the third argument is that part."""

RDMA_FABRICS = ("efa", "infiniband", "roce")
"""The fabrics of the cluster file on which a network card reads and writes memory by itself."""

_T = TypeVar("_T", bound=Hashable)


def always(context: Context) -> bool:
    """A check that applies to every cluster."""
    del context
    return True


def on_fabric(*fabrics: str) -> Callable[[Context], bool]:
    """A check that applies to clusters with one of these fabrics."""
    return lambda context: context.spec.fabric in fabrics


def with_accelerator(*accelerators: str) -> Callable[[Context], bool]:
    """A check that applies to clusters with one of these accelerators."""
    return lambda context: context.spec.accelerator in accelerators


def all_of(*conditions: Callable[[Context], bool]) -> Callable[[Context], bool]:
    """A check that applies where all these do."""
    return lambda context: all(condition(context) for condition in conditions)


def vllm_hosts(context: Context) -> tuple[str, ...]:
    """The hosts of prefill and decode."""
    return context.vllm_hosts


def all_hosts(context: Context) -> tuple[str, ...]:
    """The hosts of prefill, decode and router."""
    return context.plan.hosts


def each_host(
    part: str,
    judge: Judge,
    *,
    applies: Callable[[Context], bool] = always,
    hosts: Callable[[Context], tuple[str, ...]] = vllm_hosts,
) -> CheckFunction:
    """Make a check's function out of a judgement of one part of one host's facts.

    A host that was not reached, or that lacks the part, gives *skipped* with the reason.

    Args:
        part: name of the part in :class:`~pdctl.doctor.facts.HostFacts`.
        judge: is called with context, facts and that part.
        applies: whether the check has anything to say about this cluster.
        hosts: which hosts are looked at.
    """

    def run(context: Context) -> Iterator[Result]:
        if not applies(context):
            return
        for host in hosts(context):
            facts = context.facts.get(host)
            if facts is None:
                yield not_reached(host)
                continue
            value = getattr(facts, part)
            if value is None:
                yield skipped(host, message=f"not checked: {facts.why_missing(part)}")
            else:
                yield from judge(context, facts, value)

    return run


def not_reached(host: str) -> Result:
    """What a check says of a host without facts; the area SSH says why there are none."""
    return skipped(host, message="not checked: the host reported no facts (see the findings of the area SSH)")


def odd_ones_out(values: Mapping[str, _T]) -> tuple[_T, dict[str, _T]] | None:
    """Find the hosts that differ from most others.

    Args:
        values: by host, in the order of the plan. The most common value is the reference; of equally common ones that
            of the earlier host.

    Returns:
        the reference, and the values of the hosts that differ from it; None if there are no values.
    """
    if not values:
        return None
    # most_common() keeps the order of first appearance among equals.
    reference = Counter(values.values()).most_common(1)[0][0]
    return reference, {host: value for host, value in values.items() if value != reference}


def hosts_by_value(values: Mapping[str, object]) -> str:
    """``A on p1, p2; B on d1``: who has what, for evidence."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(str(value), []).append(host)
    return "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in groups.items())
