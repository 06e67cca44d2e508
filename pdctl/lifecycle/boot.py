"""Wait until instances serve, following each one's log meanwhile."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pdctl.errors import HostError, PdctlError
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.diagnose import diagnose, last_lines
from pdctl.lifecycle.failure import InstanceFailure
from pdctl.lifecycle.nodes import HttpRequest, Nodes, Observation
from pdctl.lifecycle.phases import LogReader, Phase
from pdctl.lifecycle.reporter import Reporter
from pdctl.plan import InstancePlan

# A long poll this long: short enough that a failure elsewhere, or Ctrl-C, ends the wait soon.
_POLL_S = 2.0
# A dropped SSH connection changes nothing for the instances; look again for this long before calling the host lost.
_PATIENCE_S = 45.0
_RETRY_PAUSE_S = 1.0
_LOG_KEPT = 256 * 1024
_LAST_LINES = 12
# Only to say why an instance that answers is not ready: a look, not a wait.
_ASK_WHY_S = 5.0


@dataclass(frozen=True)
class Booted:
    """An instance that serves, ``after_s`` seconds from the beginning of the wait."""

    instance: InstancePlan
    after_s: float


class _Progress:
    """What is known of one instance while it boots."""

    def __init__(self, instance: InstancePlan) -> None:
        self.instance = instance
        self.seen: Observation | None = None
        self.reader = LogReader()
        self.log = ""

    def take(self, news: Observation) -> None:
        self.seen = news
        self.log = (self.log + news.log)[-_LOG_KEPT:]
        self.reader.feed(news.log)

    def failure(self, summary: str, error: PdctlError | None = None) -> InstanceFailure:
        ended = self.seen.exit if self.seen else None
        return InstanceFailure(
            instance=self.instance.name,
            host=self.instance.host,
            summary=summary,
            diagnoses=diagnose(self.log, ended.code if ended else None, ended.signal if ended else None),
            last_lines=last_lines(self.log, _LAST_LINES),
            error=error,
        )


def wait_ready(
    nodes: Nodes, fleet: Fleet, instances: Iterable[InstancePlan], reporter: Reporter, *, timeout_s: float
) -> tuple[list[Booted], list[InstanceFailure]]:
    """Wait until every instance answers its health check, one fails, or ``timeout_s`` is over.

    The first failure ends the wait for the others: they are neither in the first list nor in the second.
    """
    by_host: dict[str, list[_Progress]] = defaultdict(list)
    for instance in instances:
        by_host[instance.host].append(_Progress(instance))
    begin = time.monotonic()
    failed = threading.Event()
    booted: list[Booted] = []
    failures: list[InstanceFailure] = []

    def follow(host: str) -> None:
        pending = {p.instance.name: p for p in by_host[host]}
        lost_since: float | None = None
        while pending and not failed.is_set():
            elapsed = time.monotonic() - begin
            if elapsed > timeout_s:
                for progress in pending.values():
                    why = _unwell(nodes, progress)
                    failures.append(progress.failure(f"not ready after {timeout_s:.0f} s, {why}"))
                failed.set()
                return
            try:
                news = nodes.observe(
                    host,
                    {name: p.seen for name, p in pending.items()},
                    {name: f"{p.instance.url}/health" for name, p in pending.items()},
                    timeout_s=min(_POLL_S, max(0.1, timeout_s - elapsed)),
                )
                lost_since = None
            except HostError as error:
                now = time.monotonic()
                lost_since = lost_since or now
                if now - lost_since > _PATIENCE_S:
                    failures.extend(p.failure(error.message, error) for p in pending.values())
                    failed.set()
                    return
                failed.wait(_RETRY_PAUSE_S)
                continue
            elapsed = time.monotonic() - begin
            for name, observation in news.items():
                progress = pending[name]
                progress.take(observation)
                if observation.ready:
                    reporter.progress(name, Phase.READY.value, "", elapsed)
                    booted.append(Booted(progress.instance, elapsed))
                    del pending[name]
                elif observation.process != "running":
                    words = observation.exit.words if observation.exit else "its process is gone"
                    reporter.progress(name, "failed", words, elapsed)
                    failures.append(progress.failure(f"{words} while {_where(progress)}"))
                    failed.set()
                else:
                    reporter.progress(name, progress.reader.phase.value, progress.reader.detail, elapsed)

    results = fleet.map(lambda host: follow(host.name), list(by_host), timeout_s=timeout_s + 2 * _PATIENCE_S)
    for host, result in results.items():
        if isinstance(result, PdctlError):
            failures.extend(p.failure(result.message, result) for p in by_host[host])
    return booted, failures


def _unwell(nodes: Nodes, progress: _Progress) -> str:
    """Where a boot is stuck and, if its health check answers, what that says: a router's names who is missing."""
    where = f"still {_where(progress)}"
    instance = progress.instance
    try:
        [answer] = nodes.http(instance.host, [HttpRequest("GET", f"{instance.url}/health", timeout_s=_ASK_WHY_S)])
    except PdctlError:
        return where
    return where if answer.status is None or answer.ok else f"{where}; its health check says {answer.trouble}"


def _where(progress: _Progress) -> str:
    detail = f" ({progress.reader.detail})" if progress.reader.detail else ""
    return f"{progress.reader.phase.value}{detail}"
