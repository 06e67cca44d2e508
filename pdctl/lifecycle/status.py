"""`pdctl status`: one look at every instance. Works when hosts are down, and says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdctl.errors import PdctlError
from pdctl.hosts.base import Host
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.diagnose import diagnose, last_lines
from pdctl.lifecycle.nodes import HttpRequest, HttpResponse, NodeInstance, Nodes
from pdctl.lifecycle.phases import LogReader
from pdctl.lifecycle.ranks import RankHealth, has_telemetry, read_health, telemetry_requests, worst
from pdctl.plan import ClusterPlan, InstancePlan
from pdctl.prometheus_text import read_samples, total

_HTTP_S = 4.0
_HOST_S = 30.0
_RUNNING, _WAITING, _KV_USE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"


@dataclass(frozen=True)
class InstanceStatus:
    """One instance.

    Attributes:
        name: its name.
        role: prefill, decode, router, or unknown (found on the host, not in the plan).
        host: where it belongs.
        url: its API.
        state: ``ready``, ``booting``, ``unhealthy`` (runs, but its health check fails), ``exited``, ``absent``, or
            ``unreachable`` (its host cannot be asked).
        detail: one line: the boot phase, the cause of an exit, why a host cannot be reached.
        pid: process id on its host.
        uptime_s: seconds since its process was made.
        rss_bytes: memory of all its processes.
        plan_changed: True if it runs an older plan than the cluster file asks for; None if it does not run.
        requests_running: requests that the engine works on now; None: not known.
        requests_waiting: requests in its queue.
        kv_cache_usage: share of KV blocks in use, 0 to 1.
        writer: state of the transfer writer of the worst rank: idle, busy, stuck, dead, silent; None if there is none.
        heartbeat_age_s: seconds since that writer's last beat.
        transfers_inflight: transfers in flight, all ranks together.
        oldest_transfer_s: how long the oldest of them is in its stage.
    """

    name: str
    role: str
    host: str
    url: str
    state: str
    detail: str = ""
    pid: int | None = None
    uptime_s: float | None = None
    rss_bytes: int | None = None
    plan_changed: bool | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_cache_usage: float | None = None
    writer: str | None = None
    heartbeat_age_s: float | None = None
    transfers_inflight: int | None = None
    oldest_transfer_s: float | None = None


@dataclass(frozen=True)
class ClusterStatus:
    """All instances, and the hosts that could not be asked."""

    cluster: str
    instances: tuple[InstanceStatus, ...]
    unreachable: Mapping[str, str]

    @property
    def healthy(self) -> bool:
        """True if every planned instance is ready and nothing unplanned runs."""
        return all(i.state == "ready" and i.role != "unknown" for i in self.instances)

    @property
    def exit_code(self) -> int:
        """0 healthy, 3 a host could not be reached, 1 anything else."""
        return 3 if self.unreachable else 0 if self.healthy else 1


def status(plan: ClusterPlan, fleet: Fleet) -> ClusterStatus:
    """Ask every host once. Never raises for a host that is down."""
    nodes = Nodes(plan, fleet)
    by_host: dict[str, list[InstancePlan]] = {name: [] for name in plan.hosts}
    for instance in plan.instances:
        by_host[instance.host].append(instance)

    def ask(host: Host) -> tuple[list[InstanceStatus], list[InstanceStatus]]:
        return _ask(nodes, host.name, by_host[host.name])

    results = fleet.map(ask, list(by_host), timeout_s=_HOST_S)
    entries: dict[str, InstanceStatus] = {}
    unknown: list[InstanceStatus] = []
    unreachable: dict[str, str] = {}
    for host, result in results.items():
        if isinstance(result, PdctlError):
            unreachable[host] = result.message
            for instance in by_host[host]:
                entries[instance.name] = _unreachable(instance, result.message)
        else:
            entries.update({entry.name: entry for entry in result[0]})
            unknown.extend(result[1])
    ordered = [entries[instance.name] for instance in plan.instances]
    return ClusterStatus(plan.spec.cluster, (*ordered, *unknown), unreachable)


def _ask(
    nodes: Nodes, host: str, instances: Sequence[InstancePlan]
) -> tuple[list[InstanceStatus], list[InstanceStatus]]:
    questions: dict[str, list[HttpRequest]] = {}
    for instance in instances:
        questions[instance.name] = [HttpRequest("GET", f"{instance.url}/health", timeout_s=_HTTP_S)]
        if instance.role != "router":
            questions[instance.name].append(HttpRequest("GET", f"{instance.url}/metrics", timeout_s=_HTTP_S))
        if has_telemetry(instance):
            questions[instance.name] += telemetry_requests(instance, "/healthz")
    found = nodes.status(host, [instance.name for instance in instances], questions)
    statuses = []
    for instance in instances:
        answers = list(found.answers.get(instance.name, ()))
        health, metrics = ([*answers, None, None])[:2]
        statuses.append(judge(instance, found.known[instance.name], health, metrics, answers[2:]))
    return statuses, [_unknown(host, entry) for entry in found.unknown if entry.process != "absent"]


def judge(
    instance: InstancePlan,
    node: NodeInstance,
    health: HttpResponse | None,
    metrics: HttpResponse | None,
    telemetry: Sequence[HttpResponse] = (),
) -> InstanceStatus:
    """Make one status out of what the node, the instance's API and its ranks say. Pure."""
    state, detail = _state(node, health)
    ranks = [read_health(rank, response) for rank, response in enumerate(telemetry)]
    writer = worst(ranks)
    if state == "ready" and writer is not None and not writer.well:
        # vLLM's own health check says nothing of the writer: without it every transfer waits for its time-out.
        state, detail = "unhealthy", writer.trouble
    samples = read_samples(metrics.body, (_RUNNING, _WAITING, _KV_USE)) if metrics is not None and metrics.ok else []
    running, waiting = total(samples, _RUNNING), total(samples, _WAITING)
    usages = [sample.value for sample in samples if sample.name == _KV_USE]
    alive = node.process == "running"
    return InstanceStatus(
        name=instance.name,
        role=instance.role,
        host=instance.host,
        url=instance.url,
        state=state,
        detail=detail,
        pid=node.pid if alive else None,
        uptime_s=node.uptime_s if alive else None,
        rss_bytes=node.rss_bytes if alive else None,
        plan_changed=node.digest != instance.digest if alive else None,
        requests_running=None if running is None else int(running),
        requests_waiting=None if waiting is None else int(waiting),
        kv_cache_usage=max(usages) if usages else None,
        writer=writer.state if writer is not None and alive else None,
        heartbeat_age_s=writer.heartbeat_age_s if writer is not None else None,
        transfers_inflight=_sum(ranks),
        oldest_transfer_s=max((r.oldest_s for r in ranks if r.oldest_s is not None), default=None),
    )


def _sum(ranks: Sequence[RankHealth]) -> int | None:
    known = [rank.inflight for rank in ranks if rank.inflight is not None]
    return sum(known) if known else None


def _state(node: NodeInstance, health: HttpResponse | None) -> tuple[str, str]:
    if node.process == "absent":
        return "absent", ""
    if node.process != "running":
        words = node.exit.words if node.exit else "its process is gone"
        code, signal = (node.exit.code, node.exit.signal) if node.exit else (None, None)
        causes = diagnose(node.log_tail, code, signal)
        lines = last_lines(node.log_tail, 1)
        return "exited", f"{words}: {causes[0].cause}" if causes else f"{words}{f': {lines[0]}' if lines else ''}"
    if health is not None and health.ok:
        return "ready", ""
    reader = LogReader()
    reader.feed(node.log_tail + "\n")
    phase = reader.phase.value
    if phase not in ("ready", "serving"):
        return "booting", f"{phase}{f' ({reader.detail})' if reader.detail else ''}"
    return "unhealthy", health.trouble if health is not None else "its health was not asked"


def _unreachable(instance: InstancePlan, message: str) -> InstanceStatus:
    return InstanceStatus(instance.name, instance.role, instance.host, instance.url, "unreachable", message)


def _unknown(host: str, node: NodeInstance) -> InstanceStatus:
    return InstanceStatus(
        name=node.name,
        role="unknown",
        host=host,
        url="",
        state=node.process if node.process != "running" else "ready",
        detail="not in the cluster file; pdctl down ends it",
        pid=node.pid,
        uptime_s=node.uptime_s,
        rss_bytes=node.rss_bytes,
    )
