"""Stop instances, many at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from pdctl.errors import NodeError, PdctlError
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.background import run_all
from pdctl.lifecycle.failure import Aftermath
from pdctl.lifecycle.nodes import Nodes


@dataclass(frozen=True)
class Target:
    """An instance to stop: its name, and the host it is on."""

    name: str
    host: str


def stop_instances(
    nodes: Nodes,
    fleet: Fleet,
    targets: Iterable[Target],
    *,
    grace_s: float,
    only_launch_id: str | None = None,
) -> Aftermath:
    """Stop instances in parallel, whatever happens to single ones.

    Args:
        nodes: the cluster's nodes.
        fleet: its hosts.
        targets: what to stop.
        grace_s: time between SIGTERM and SIGKILL.
        only_launch_id: leave alone what another launch started.
    """
    by_host: dict[str, list[str]] = {}
    for target in targets:
        by_host.setdefault(target.host, []).append(target.name)
    stopped: list[str] = []
    left: list[str] = []

    def stop_one(host: str, name: str) -> None:
        try:
            if nodes.stop(host, name, grace_s=grace_s, only_launch_id=only_launch_id).action == "stopped":
                stopped.append(name)
        except NodeError:
            left.append(name)

    def stop_on(host: str) -> None:
        run_all(partial(stop_one, host, name) for name in by_host[host])

    results = fleet.map(lambda host: stop_on(host.name), list(by_host), timeout_s=grace_s + 60)
    unreached = [
        name
        for host, result in results.items()
        if isinstance(result, PdctlError)
        for name in by_host[host]
        if name not in stopped and name not in left
    ]
    return Aftermath(tuple(sorted(stopped)), tuple(sorted(left)), tuple(sorted(unreached)))
