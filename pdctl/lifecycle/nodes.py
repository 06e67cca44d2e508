"""The node agent's commands as typed calls. The only place that knows the shape of its requests and replies."""

from __future__ import annotations

import base64
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdctl.errors import NodeError
from pdctl.hosts.agent import call
from pdctl.hosts.base import Host
from pdctl.plan import ClusterPlan, InstancePlan

# How much longer than the work on the node itself a call may take: connecting, Python's start, a loaded machine.
_CALL_MARGIN_S = 30.0


@dataclass(frozen=True)
class Exit:
    """How an instance ended. Both fields are None if its supervisor did not live to see it."""

    code: int | None
    signal: int | None

    @property
    def words(self) -> str:
        """``exit status 1`` or ``ended by SIGKILL``."""
        if self.signal is not None:
            return f"ended by {_signal_name(self.signal)}"
        return f"exit status {self.code}" if self.code is not None else "exit status unknown"


@dataclass(frozen=True)
class Started:
    """Answer to a start: ``started``, ``already-running`` or ``changed`` (runs an older plan and was left alone)."""

    action: str
    pid: int | None
    digest: str


@dataclass(frozen=True)
class Stopped:
    """Answer to a stop: ``stopped`` or ``not-running``."""

    action: str
    took_s: float


@dataclass(frozen=True)
class Observation:
    """What changed about an instance since the last look."""

    process: str
    exit: Exit | None
    ready: bool
    log: str
    offset: int


@dataclass(frozen=True)
class NodeInstance:
    """One instance as its host sees it. Sizes in bytes, times in seconds; None where nothing is running."""

    name: str
    process: str
    pid: int | None
    uptime_s: float | None
    rss_bytes: int | None
    cpu_s: float | None
    processes: int
    exit: Exit | None
    digest: str | None
    log_tail: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request that the node makes on its own network."""

    method: str
    url: str
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 10.0

    def as_request(self) -> dict[str, Any]:
        """As the node agent wants it."""
        body = {} if self.json is None else {"json": self.json}
        return {
            "method": self.method,
            "url": self.url,
            "headers": dict(self.headers),
            "timeout_s": self.timeout_s,
            **body,
        }


@dataclass(frozen=True)
class HttpResponse:
    """Its answer. ``error`` is set (and ``status`` None) if there was none."""

    status: int | None
    body: str
    duration_s: float
    error: str | None

    @property
    def ok(self) -> bool:
        """True for a 2xx answer."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def trouble(self) -> str:
        """One line for people: why this answer is not a good one."""
        if self.error is not None:
            return self.error
        return f"HTTP {self.status}: {' '.join(self.body.split())[:300]}"


@dataclass(frozen=True)
class NodeStatus:
    """What one host says of a cluster's instances.

    Attributes:
        known: the instances that were asked for.
        unknown: others found in the cluster's folder.
        answers: answers to the HTTP requests, by instance; none for one that does not run.
    """

    known: Mapping[str, NodeInstance]
    unknown: Sequence[NodeInstance]
    answers: Mapping[str, Sequence[HttpResponse]]


class ConnectHost(Protocol):
    """What is needed of a fleet: a connected host by name."""

    def host(self, name: str) -> Host:
        """The host of that name."""


class Nodes:
    """Calls to the node agents of one cluster.

    Every method raises :class:`~pdctl.errors.HostError` when the host cannot be reached and
    :class:`~pdctl.errors.NodeError` when the work fails there.
    """

    def __init__(self, plan: ClusterPlan, fleet: ConnectHost) -> None:
        self._cluster = plan.spec.cluster
        self._fleet = fleet
        self._pythons: dict[str, tuple[str, ...]] = {}
        for instance in plan.instances:
            known = self._pythons.setdefault(instance.host, ("python3",))
            # Only the node knows its home folder; there `python3` has to do for the agent.
            if instance.argv and instance.argv[0] not in known and not instance.argv[0].startswith("@"):
                self._pythons[instance.host] = (*known, instance.argv[0])

    def _call(self, host: str, command: str, request: Mapping[str, Any], *, work_s: float) -> dict[str, Any]:
        return call(
            self._fleet.host(host),
            command,
            {"cluster": self._cluster, **request},
            timeout_s=work_s + _CALL_MARGIN_S,
            pythons=self._pythons.get(host, ("python3",)),
        )

    def ship(self, host: str, digest: str, files: Mapping[str, bytes]) -> bool:
        """Make sure the connector of that digest is on the host. Returns True if it had to be sent."""
        if self._call(host, "ship", {"digest": digest}, work_s=10)["present"]:
            return False
        encoded = {path: base64.b64encode(content).decode() for path, content in files.items()}
        self._call(host, "ship", {"digest": digest, "files": encoded}, work_s=30)
        return True

    def start(self, instance: InstancePlan, *, restart_changed: bool, launch_id: str) -> Started:
        """Start an instance unless it runs.

        Args:
            instance: what to start.
            restart_changed: replace one that runs another plan.
            launch_id: names this launch, so that cleaning up after it (see :meth:`stop`) ends nothing else.
        """
        reply = self._call(
            instance.host,
            "start",
            {
                "instance": instance.name,
                "argv": list(instance.argv),
                "env": dict(instance.env),
                "secret_env": dict(instance.secret_env),
                "launch_script": instance.launch_script,
                "digest": instance.digest,
                "ports": [{"port": p.port, "purpose": p.purpose, "address": p.address} for p in instance.ports],
                "restart_changed": restart_changed,
                "launch_id": launch_id,
            },
            work_s=90,
        )
        state = reply.get("state") or {}
        return Started(action=str(reply["action"]), pid=state.get("pid"), digest=str(state.get("digest") or ""))

    def open_gate(self, instance: InstancePlan) -> None:
        """Let an instance that waits for it (the router) open its port."""
        self._call(instance.host, "open", {"instance": instance.name}, work_s=10)

    def stop(self, host: str, name: str, *, grace_s: float, only_launch_id: str | None = None) -> Stopped:
        """End an instance and every process that belongs to it.

        Args:
            host: where it runs.
            name: its name.
            grace_s: how long it may take to end by itself after SIGTERM, before SIGKILL.
            only_launch_id: leave it alone unless this launch started it.

        Raises:
            NodeError: code ``leftover-processes`` if some process could not be ended.
        """
        reply = self._call(
            host,
            "stop",
            {"instance": name, "grace_s": grace_s, "kill_grace_s": 10, "only_launch_id": only_launch_id},
            work_s=grace_s + 20,
        )
        if leftover := reply.get("leftover"):
            raise NodeError(
                host,
                "leftover-processes",
                f"{name} was stopped, but processes of it are left: {', '.join(str(pid) for pid in leftover)}",
                hint="they do not react to SIGKILL (stuck in the kernel?): look at `ps -o pid,stat,wchan,args -p ...`",
            )
        return Stopped(action=str(reply["action"]), took_s=float(reply.get("took_s") or 0.0))

    def observe(
        self, host: str, seen: Mapping[str, Observation | None], health: Mapping[str, str], *, timeout_s: float
    ) -> dict[str, Observation]:
        """Wait up to ``timeout_s`` for news of instances of one host.

        Args:
            host: the host.
            seen: per instance what the caller knows already (None: nothing; the log is then read from its start).
            health: per instance the health URL to ask.
            timeout_s: when to come back without news.
        """
        reply = self._call(
            host,
            "observe",
            {
                "instances": {
                    name: {
                        "offset": known.offset if known else 0,
                        "ready": known.ready if known else False,
                        "process": known.process if known else None,
                        "http": health[name],
                    }
                    for name, known in seen.items()
                },
                "timeout_s": timeout_s,
            },
            work_s=timeout_s,
        )
        return {
            name: Observation(
                process=str(news["process"]),
                exit=_exit(news.get("exit")),
                ready=bool(news["ready"]),
                log=str(news.get("log") or ""),
                offset=int(news["offset"]),
            )
            for name, news in reply["instances"].items()
        }

    def status(
        self, host: str, names: Sequence[str], questions: Mapping[str, Sequence[HttpRequest]] | None = None
    ) -> NodeStatus:
        """The named instances, those that were not asked for, and what running ones answer to HTTP requests.

        Args:
            host: the host.
            names: the instances to describe.
            questions: requests by instance, made on the host if that instance runs, all at once.
        """
        questions = questions or {}
        reply = self._call(
            host,
            "status",
            {
                "instances": list(names),
                "http": {name: [request.as_request() for request in asked] for name, asked in questions.items()},
            },
            work_s=15 + max((request.timeout_s for asked in questions.values() for request in asked), default=0.0),
        )
        return NodeStatus(
            known={name: _node_instance(name, entry) for name, entry in reply["instances"].items()},
            unknown=[_node_instance(name, entry) for name, entry in sorted((reply.get("unknown") or {}).items())],
            answers={
                name: [_http_response(entry) for entry in entries]
                for name, entries in (reply.get("http") or {}).items()
            },
        )

    def log(self, host: str, name: str, *, lines: int, offset: int | None, inode: int | None, wait_s: float) -> LogPart:
        """The last ``lines`` of a log, or what came after ``offset``, waiting up to ``wait_s`` for something new."""
        reply = self._call(
            host,
            "log",
            {
                "instance": name,
                "lines": lines,
                "offset": offset,
                "inode": inode,
                "max_bytes": 1 << 20,
                "wait_s": wait_s,
            },
            work_s=wait_s + 5,
        )
        return LogPart(text=str(reply["text"]), offset=int(reply["offset"]), inode=reply.get("inode"))

    def http(self, host: str, requests: Sequence[HttpRequest], *, parallel: bool = False) -> list[HttpResponse]:
        """Make HTTP requests from the host. The time-outs of the requests bound the call."""
        times = [request.timeout_s for request in requests]
        reply = self._call(
            host,
            "http",
            {
                "requests": [request.as_request() for request in requests],
                "parallel": parallel,
            },
            work_s=max(times, default=0.0) if parallel else sum(times),
        )
        return [_http_response(entry) for entry in reply["responses"]]


@dataclass(frozen=True)
class LogPart:
    """A piece of a log, and where to read on."""

    text: str
    offset: int
    inode: int | None


def _http_response(entry: Mapping[str, Any] | None) -> HttpResponse:
    if entry is None:
        return HttpResponse(None, "", 0.0, "not sent: an earlier request failed")
    return HttpResponse(
        status=entry.get("status"),
        body=str(entry.get("body") or ""),
        duration_s=float(entry.get("duration_s") or 0.0),
        error=_http_error(entry.get("error")),
    )


def _http_error(error: Mapping[str, Any] | None) -> str | None:
    return None if error is None else f"{error.get('kind')}: {error.get('message')}"


def _exit(entry: Mapping[str, Any] | None) -> Exit | None:
    if entry is None:
        return None
    name = str(entry.get("signal"))
    number = signal.Signals[name].value if name in signal.Signals.__members__ else None
    return Exit(code=entry.get("code"), signal=number)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _node_instance(name: str, entry: Mapping[str, Any]) -> NodeInstance:
    return NodeInstance(
        name=name,
        process=str(entry["process"]),
        pid=entry.get("pid"),
        uptime_s=entry.get("uptime_s"),
        rss_bytes=entry.get("rss_bytes"),
        cpu_s=entry.get("cpu_s"),
        processes=len(entry.get("processes") or ()),
        exit=_exit(entry.get("exit")),
        digest=entry.get("digest"),
        log_tail=str(entry.get("log_tail") or ""),
        argv=tuple(str(word) for word in entry.get("argv") or ()),
    )
