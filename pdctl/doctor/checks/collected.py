"""One part of the facts of several hosts, to compare; hosts without it become *skipped*, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdctl.doctor.checks.per_host import not_reached
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts
from pdctl.doctor.findings import Result, skipped

T = TypeVar("T")


@dataclass(frozen=True)
class Collected(Generic[T]):
    """What was collected of some hosts.

    Attributes:
        found: by host name.
        skipped: one result for each host without it.
    """

    found: dict[str, T]
    skipped: tuple[Result, ...]


def collect(context: Context, hosts: Iterable[str], part: str, get: Callable[[HostFacts], T | None]) -> Collected[T]:
    """Get a part of the facts of some hosts.

    Args:
        context: where the facts are.
        hosts: names of the hosts.
        part: name of the part, for the reason why it is missing.
        get: takes it out of a host's facts; None if it is not there.
    """
    found: dict[str, T] = {}
    missing: list[Result] = []
    for host in dict.fromkeys(hosts):
        facts = context.facts.get(host)
        value = None if facts is None else get(facts)
        if facts is None:
            missing.append(not_reached(host))
        elif value is None:
            missing.append(skipped(host, message=f"not checked: {facts.why_missing(part)}"))
        else:
            found[host] = value
    return Collected(found, tuple(missing))
