"""`pdctl down`: router first, then let running requests end, then the rest; and show that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdctl.errors import PdctlError
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.failure import Aftermath
from pdctl.lifecycle.nodes import HttpRequest, NodeInstance, Nodes
from pdctl.lifecycle.reporter import Reporter
from pdctl.lifecycle.stop import Target, stop_instances
from pdctl.plan import ClusterPlan
from pdctl.prometheus_text import read_samples, total

_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_DRAIN_PAUSE_S = 0.5
_HOST_S = 45.0


@dataclass(frozen=True)
class DownResult:
    """What ``down`` did.

    Attributes:
        stopped: instances that were ended.
        already_down: instances of the cluster file that did not run.
        left: what still runs, or may: instance name to reason.
        unreachable: hosts that could not be asked: host to reason.
        cut_off: requests that were still running when the grace period was over.
    """

    stopped: tuple[str, ...]
    already_down: tuple[str, ...]
    left: Mapping[str, str]
    unreachable: Mapping[str, str]
    cut_off: int = 0

    @property
    def exit_code(self) -> int:
        """0 nothing is left, 3 a host could not be reached, 1 something is left."""
        return 3 if self.unreachable else 1 if self.left else 0


def down(plan: ClusterPlan, fleet: Fleet, reporter: Reporter, *, grace_s: float, force: bool) -> DownResult:
    """Take the cluster down, with instances that are not in the cluster file any more. Running it again is fine.

    Args:
        plan: the plan.
        fleet: its hosts.
        reporter: told of progress.
        grace_s: how long running requests, and then each instance, may take to end.
        force: no waiting: SIGKILL follows SIGTERM at once.
    """
    nodes = Nodes(plan, fleet)
    reporter.step("looking for running instances")
    running, unreachable = _running(nodes, fleet, plan)
    names = {instance.name for instance in plan.instances}
    routers = [t for t in running if t.name == plan.router.name]
    engines = [t for t in running if t.name != plan.router.name]
    cut_off = 0
    parts: list[Aftermath] = []
    if routers:
        reporter.step("stopping the router")
        # The router ends open requests by itself after SIGTERM; they get the grace period too.
        parts.append(stop_instances(nodes, fleet, routers, grace_s=0 if force else grace_s))
    if engines:
        if not force:
            cut_off = _drain(nodes, fleet, plan, engines, reporter, grace_s)
        reporter.step(f"stopping {', '.join(target.name for target in engines)}")
        parts.append(stop_instances(nodes, fleet, engines, grace_s=0 if force else grace_s))
    reporter.step("checking that nothing is left")
    still, lost = _running(nodes, fleet, plan)
    unreachable = {**unreachable, **lost}
    left = {target.name: f"still running on {target.host}" for target in still}
    for part in parts:
        for name in part.not_reached:
            left.setdefault(name, "its host could not be reached")
        for name in part.left_running:
            left.setdefault(name, "it could not be ended")
    ran = {target.name for target in running}
    hosts_lost = set(unreachable)
    return DownResult(
        stopped=tuple(target.name for target in running if target.name not in left),
        already_down=tuple(
            i.name for i in plan.instances if i.name in names and i.name not in ran and i.host not in hosts_lost
        ),
        left=left,
        unreachable=unreachable,
        cut_off=cut_off,
    )


def _running(nodes: Nodes, fleet: Fleet, plan: ClusterPlan) -> tuple[list[Target], dict[str, str]]:
    by_host: dict[str, list[str]] = {name: [] for name in plan.hosts}
    for instance in plan.instances:
        by_host[instance.host].append(instance.name)

    def ask(host: str) -> list[Target]:
        found = nodes.status(host, by_host[host])
        return [Target(entry.name, host) for entry in (*found.known.values(), *found.unknown) if _has_processes(entry)]

    targets: list[Target] = []
    unreachable: dict[str, str] = {}
    for host, result in fleet.map(lambda host: ask(host.name), list(by_host), timeout_s=_HOST_S).items():
        if isinstance(result, PdctlError):
            unreachable[host] = result.message
        else:
            targets.extend(result)
    return targets, unreachable


def _has_processes(entry: NodeInstance) -> bool:
    # An instance whose main process is gone may have left workers behind.
    return entry.process == "running" or entry.processes > 0


def _drain(
    nodes: Nodes, fleet: Fleet, plan: ClusterPlan, engines: Sequence[Target], reporter: Reporter, grace_s: float
) -> int:
    """Wait until no engine works on a request, at most ``grace_s``. Returns how many requests are left."""
    urls = {instance.name: instance.url for instance in plan.instances}
    deadline = time.monotonic() + grace_s
    told = False
    while True:
        busy = _requests(nodes, fleet, [(target.host, urls[target.name]) for target in engines if target.name in urls])
        if busy == 0 or time.monotonic() >= deadline:
            return busy
        if not told:
            reporter.step(f"waiting up to {grace_s:.0f} s for {busy} running request{'s' if busy > 1 else ''}")
            told = True
        time.sleep(_DRAIN_PAUSE_S)


def _requests(nodes: Nodes, fleet: Fleet, apis: Sequence[tuple[str, str]]) -> int:
    by_host: dict[str, list[str]] = {}
    for host, url in apis:
        by_host.setdefault(host, []).append(url)

    def count(host: str) -> int:
        requests = [HttpRequest("GET", f"{url}/metrics", timeout_s=3) for url in by_host[host]]
        samples = [s for r in nodes.http(host, requests, parallel=True) if r.ok for s in read_samples(r.body, _BUSY)]
        return int(sum(total(samples, name) or 0 for name in _BUSY))

    results = fleet.map(lambda host: count(host.name), list(by_host), timeout_s=_HOST_S)
    return sum(result for result in results.values() if not isinstance(result, PdctlError))
