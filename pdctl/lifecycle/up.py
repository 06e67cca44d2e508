"""`pdctl up`: ship, start, wait, warm up, route, prove. Idempotent; a failure stops what this launch started."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from pdctl.connector_package import connector_digest, connector_files
from pdctl.errors import HostError, NodeError, PdctlError
from pdctl.hosts.base import Host
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.background import Background, run_all
from pdctl.lifecycle.boot import wait_ready
from pdctl.lifecycle.completions import completion_request, read_completion, served_model, unique_prompt
from pdctl.lifecycle.failure import Aftermath, InstanceFailure, Interrupted, LaunchFailed
from pdctl.lifecycle.nodes import HttpRequest, Nodes
from pdctl.lifecycle.proof import Verdict
from pdctl.lifecycle.prove import is_float32, prove
from pdctl.lifecycle.ranks import read_health, telemetry_requests
from pdctl.lifecycle.reporter import Reporter
from pdctl.lifecycle.router_health import router_health
from pdctl.lifecycle.stop import Target, stop_instances
from pdctl.lifecycle.warmup import in_rounds, warm_instance, warm_pair
from pdctl.plan import ClusterPlan, InstancePlan

T = TypeVar("T")

_ROUTER_READY_S = 90.0
# A router that ran before takes an instance back only after its own checks; this much longer than they need.
_ROUTER_MARGIN_S = 30.0
_LEARN_REQUEST_S = 60.0
# A start that was under way when Ctrl-C came: wait this long for it, so that it can be undone.
_IN_FLIGHT_S = 15.0
_HEALTH_S = 5.0


@dataclass(frozen=True)
class UpOptions:
    """What the user may choose.

    Attributes:
        apply: restart instances that run an older plan (they are only reported otherwise).
        keep: on failure leave everything as it is, for a look at it.
        timeout_s: limit for the boot of the slowest instance, in seconds.
        grace_s: how long an instance may take to end after SIGTERM when it must be stopped again.
        prove: send the proof request at the end.
        only: names of instances: start these, wait for them and check them, and nothing else; empty for all. What
            another instance does then fails nothing; see :attr:`UpResult.unproven`.
    """

    apply: bool = False
    keep: bool = False
    timeout_s: float = 1800.0
    grace_s: float = 20.0
    prove: bool = True
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class InstanceResult:
    """One instance after ``up``: ``action`` is ``started``, ``already-running`` or ``changed``."""

    plan: InstancePlan
    action: str
    ready_after_s: float | None


@dataclass(frozen=True)
class UpResult:
    """A cluster that is up.

    Attributes:
        instances: every instance, router last.
        verdict: the proof's outcome; None if it was not asked for, or could not be had.
        model: the model name that requests must carry.
        timings: seconds per stage, and ``total`` and ``added`` (all but the slowest instance's own boot).
        unproven: with ``only``, why there is no proof though it was asked for: others that are out, in words.
    """

    instances: tuple[InstanceResult, ...]
    verdict: Verdict | None
    model: str
    timings: dict[str, float] = field(default_factory=dict)
    unproven: str = ""

    @property
    def changed(self) -> list[str]:
        """Instances that run an older plan and were left alone."""
        return [result.plan.name for result in self.instances if result.action == "changed"]

    @property
    def started(self) -> list[str]:
        """Instances that this launch started."""
        return [result.plan.name for result in self.instances if result.action == "started"]


def up(plan: ClusterPlan, fleet: Fleet, reporter: Reporter, options: UpOptions) -> UpResult:
    """Bring the cluster up and prove that KV travels. Running it again changes nothing.

    Raises:
        LaunchFailed: something did not come up; what this launch had started is stopped again (unless ``keep``).
        Interrupted: Ctrl-C, after the same cleaning up.
        HostError: a host could not be reached before anything was started.
    """
    return _Launch(plan, fleet, reporter, options).run()


class _Disproved(LaunchFailed):
    """A request came through, and its KV cache did not travel, or the answer was wrong."""


class _Launch:
    """One run of ``up``. Remembers what it started, so that it can undo exactly that."""

    def __init__(self, plan: ClusterPlan, fleet: Fleet, reporter: Reporter, options: UpOptions) -> None:
        self.plan, self.fleet, self.reporter, self.options = plan, fleet, reporter, options
        self.nodes = Nodes(plan, fleet)
        self.launch_id = secrets.token_hex(8)
        wanted = [one for one in plan.instances if not options.only or one.name in options.only]
        self.instances = tuple(wanted)
        self.engines = tuple(one for one in wanted if one.role != "router")
        self.hosts = tuple(dict.fromkeys(one.host for one in wanted))
        self.unproven = ""
        self.actions: dict[str, str] = {}
        self.attempted: dict[str, InstancePlan] = {}
        self.in_flight = threading.Semaphore(0)
        self.lock = threading.Lock()
        self.busy = 0
        self.ready_after: dict[str, float] = {}
        self.timings: dict[str, float] = {}

    def run(self) -> UpResult:
        begin = time.monotonic()
        try:
            self._timed("ship", self._ship)
            self._timed("start", lambda: self._start(self.instances))
            if self.engines:
                self._timed("boot", lambda: self._wait(self.engines, self.options.timeout_s))
            verdict = self._serve_some() if self.options.only else self._serve()
        except KeyboardInterrupt:
            raise Interrupted(self._clean_up()) from None
        except LaunchFailed as error:
            error.aftermath = self._clean_up()
            raise
        except PdctlError as error:
            if not self.attempted:
                raise
            raise LaunchFailed(error.message, hint=error.hint, aftermath=self._clean_up()) from error
        total = time.monotonic() - begin
        self.timings["total"] = total
        self.timings["added"] = total - max(self.ready_after.values(), default=0.0)
        return UpResult(
            instances=tuple(
                InstanceResult(i, self.actions.get(i.name, "started"), self.ready_after.get(i.name))
                for i in self.instances
            ),
            verdict=verdict,
            model=served_model(self.plan, self.plan.router),
            timings={name: round(value, 3) for name, value in self.timings.items()},
            unproven=self.unproven,
        )

    # Stages, in order.

    def _ship(self) -> None:
        self.reporter.step(f"reaching {_count(len(self.hosts), 'host')}")
        own = self.plan.spec.transfer.own_connector
        files = connector_files() if own else {}
        digest = connector_digest(files)
        need = {engine.host for engine in self.engines} if own else set()

        def reach(host: Host) -> None:
            # Also one that needs nothing: none is started while another cannot be reached.
            if host.name in need:
                self.nodes.ship(host.name, digest, files)
            else:
                self.nodes.status(host.name, [])

        self._fan_out(self.fleet.map(reach, list(self.hosts), timeout_s=90))

    def _start(self, instances: Sequence[InstancePlan]) -> None:
        self.reporter.step(f"starting what does not run of {', '.join(i.name for i in instances)}")
        by_host: dict[str, list[InstancePlan]] = {}
        for instance in instances:
            by_host.setdefault(instance.host, []).append(instance)

        def start_on(host: Host) -> None:
            run_all(partial(self._start_one, instance) for instance in by_host[host.name])

        self._fan_out(self.fleet.map(start_on, list(by_host), timeout_s=180))

    def _start_one(self, instance: InstancePlan) -> None:
        with self.lock:
            self.attempted[instance.name] = instance
            self.busy += 1
        try:
            started = self.nodes.start(instance, restart_changed=self.options.apply, launch_id=self.launch_id)
        finally:
            with self.lock:
                self.busy -= 1
        with self.lock:
            self.actions[instance.name] = started.action
            if started.action != "started":
                del self.attempted[instance.name]
        if started.action == "changed":
            self.reporter.warning(
                f"{instance.name} runs an older plan and was left alone; pdctl up --apply restarts it"
            )

    def _wait(self, instances: Sequence[InstancePlan], timeout_s: float, *, reason: str = "") -> None:
        waiting = [i for i in instances if self.actions[i.name] == "started"]
        self.reporter.step(f"waiting for {', '.join(i.name for i in instances)}{reason}")
        booted, failures = wait_ready(self.nodes, self.fleet, instances, self.reporter, timeout_s=timeout_s)
        if failures:
            raise _launch_failed(failures)
        for entry in booted:
            if entry.instance in waiting:
                self.ready_after[entry.instance.name] = entry.after_s

    def _check_writers(self) -> None:
        """vLLM's health check says nothing of the writer: ask every rank."""
        if not self.plan.spec.transfer.own_connector:
            return
        by_host: dict[str, list[InstancePlan]] = {}
        for engine in self.engines:
            by_host.setdefault(engine.host, []).append(engine)

        def ask(host: Host) -> list[InstanceFailure]:
            failures = []
            for engine in by_host[host.name]:
                answers = self.nodes.http(host.name, telemetry_requests(engine, "/healthz"), parallel=True)
                for health in (read_health(rank, answer) for rank, answer in enumerate(answers)):
                    if not health.well:
                        failures.append(InstanceFailure(engine.name, engine.host, health.trouble))
            return failures

        results = self.fleet.map(ask, list(by_host), timeout_s=60)
        self._fan_out(results)
        failures = [failure for result in results.values() if isinstance(result, list) for failure in result]
        if failures:
            raise LaunchFailed(
                f"{failures[0].instance} serves, but its KV transfers do not work: {failures[0].summary}",
                hint=f"look for pdctl_connector in its log: pdctl logs {failures[0].instance} -n 500",
                failures=failures,
            )

    def _serve(self) -> Verdict | None:
        fresh = [i for i in self.engines if self.actions[i.name] == "started"]
        writers = Background(self._check_writers)
        if fresh:
            self._timed("warm_up", lambda: self._warm_instances(fresh))
        writers.result()
        # The router may open while the pairs warm up: no engine is cold any more.
        pairs = Background(lambda: self._warm_pairs(fresh)) if fresh else None
        try:
            self._timed("router", self._router)
        finally:
            if pairs is not None:
                pairs.join()
        if pairs is not None:
            self._timed("warm_pairs", pairs.result)
        if fresh or self.actions[self.plan.router.name] == "started":
            self._timed("learn", self._teach_router)
        return self._prove() if self.options.prove else None

    def _serve_some(self) -> Verdict | None:
        """What ``_serve`` does, for some instances among others that may be out, or fail meanwhile."""
        fresh = [i for i in self.engines if self.actions[i.name] == "started"]
        if fresh:
            self._timed("warm_up", lambda: self._warm_instances(fresh))
        self._check_writers()
        router = self.plan.router
        if router in self.instances:
            self._timed("router", self._router)
        if not self.options.prove:
            return None
        if fresh:
            self._timed("warm_pairs", lambda: self._meet_partners(fresh))
        if self.unproven:
            return None
        try:
            # It has to take in again what was away; whom else it misses is no fault of what was started here.
            if router not in self.instances:
                running = self.nodes.status(router.host, [router.name]).known[router.name]
                if running.process != "running":
                    self.unproven = "the router does not run"
                    return None
                self.actions[router.name] = "changed" if running.digest != router.digest else "already-running"
                self._timed("router", lambda: self._wait_for_router(router))
            self._timed("learn", self._teach_router)
            return self._prove()
        except _Disproved:
            raise
        except PdctlError as error:
            self.unproven = error.message
            return None

    def _meet_partners(self, fresh: Sequence[InstancePlan]) -> None:
        """Send a request over each pair of what was started and what is well. Each must work with one partner."""
        well = self._healthy([i for i in (*self.plan.prefill, *self.plan.decode) if i not in fresh])
        there = {*well, *(i.name for i in fresh)}
        names = {i.name for i in fresh}
        done: set[str] = set()
        errors: dict[str, PdctlError] = {}

        def meet(prefill: InstancePlan, decode: InstancePlan) -> None:
            try:
                warm_pair(self.nodes, self.plan, prefill, decode)
            except PdctlError as error:
                with self.lock:
                    errors.update({prefill.name: error, decode.name: error})
            else:
                with self.lock:
                    done.update((prefill.name, decode.name))

        for pairs in in_rounds(self.plan.prefill, self.plan.decode):
            wanted = [(p, d) for p, d in pairs if names & {p.name, d.name} and {p.name, d.name} <= there]
            run_all(partial(meet, p, d) for p, d in wanted)
        for one in fresh:
            if one.name in done:
                continue
            if one.name in errors:
                raise errors[one.name]
            other = "decode" if one.role == "prefill" else "prefill"
            self.unproven = f"no {other} instance answers its health check"

    def _healthy(self, engines: Sequence[InstancePlan]) -> set[str]:
        """Those that answer their health check now."""
        by_host: dict[str, list[InstancePlan]] = {}
        for engine in engines:
            by_host.setdefault(engine.host, []).append(engine)

        def ask(host: Host) -> list[str]:
            asked = by_host[host.name]
            requests = [HttpRequest("GET", f"{one.url}/health", timeout_s=_HEALTH_S) for one in asked]
            answers = self.nodes.http(host.name, requests, parallel=True)
            return [one.name for one, answer in zip(asked, answers, strict=True) if answer.ok]

        results = self.fleet.map(ask, list(by_host), timeout_s=60)
        return {name for result in results.values() if isinstance(result, list) for name in result}

    def _prove(self) -> Verdict:
        verdict = self._timed("prove", lambda: prove(self.nodes, self.fleet, self.plan, self.reporter))
        if not verdict.proven:
            raise _Disproved(
                "the cluster is up, but a request through the router did not prove the KV transfer:\n  "
                + "\n  ".join(verdict.failures),
                hint="pdctl up --keep leaves it running for a look; pdctl logs decode-0 tells what decode received",
            )
        return verdict

    def _warm_instances(self, fresh: Sequence[InstancePlan]) -> None:
        self.reporter.step("warming up: one completion per instance")
        by_host: dict[str, list[InstancePlan]] = {}
        for instance in fresh:
            by_host.setdefault(instance.host, []).append(instance)
        exact = is_float32(self.plan)

        def warm_on(host: str) -> None:
            run_all(
                partial(warm_instance, self.nodes, self.plan, instance, logprobs=not exact)
                for instance in by_host[host]
            )

        self._fan_out(self.fleet.map(lambda host: warm_on(host.name), list(by_host), timeout_s=400))

    def _warm_pairs(self, fresh: Sequence[InstancePlan]) -> None:
        names = {i.name for i in fresh}
        for pairs in in_rounds(self.plan.prefill, self.plan.decode):
            wanted = [(p, d) for p, d in pairs if p.name in names or d.name in names]
            run_all(partial(warm_pair, self.nodes, self.plan, p, d) for p, d in wanted)

    def _router(self) -> None:
        router = self.plan.router
        self.nodes.open_gate(router)
        if self.actions[router.name] == "started":
            self._wait([router], _ROUTER_READY_S)
            return
        self._wait_for_router(router)

    def _wait_for_router(self, router: InstancePlan) -> None:
        """Wait until a router that ran before has taken in again what was away."""
        health = router_health(self._argv_that_runs(router))
        try:
            self._wait(
                [router],
                min(health.notices_within_s + _ROUTER_MARGIN_S, self.options.timeout_s),
                reason=f", which ran before and {health.words}",
            )
        except LaunchFailed as error:
            if not any(failure.diagnoses or failure.error for failure in error.failures):
                error.hint = "if pdctl status shows the others ready: pdctl restart router; else pdctl logs router"
            raise

    def _argv_that_runs(self, router: InstancePlan) -> Sequence[str]:
        """The router's command line: with an older plan not that of this plan."""
        if self.actions[router.name] != "changed":
            return router.argv
        return self.nodes.status(router.host, [router.name]).known[router.name].argv

    def _teach_router(self) -> None:
        """Let the router meet every prefill instance twice: to learn its identity, then to use it."""
        router = self.plan.router
        self.reporter.step("warming up: the router learns each prefill instance")
        requests = [
            completion_request(self.plan, router, unique_prompt(12), max_tokens=2, timeout_s=_LEARN_REQUEST_S)
            for _ in range(2 * len(self.plan.prefill))
        ]
        for attempt, response in enumerate(self.nodes.http(router.host, requests)):
            try:
                read_completion(response)
            except ValueError as error:
                # A router that outlived a prefill instance sends one request with the old identity: it is lost.
                survivor = self.actions[router.name] != "started"
                if survivor and attempt < len(self.plan.prefill):
                    continue
                raise NodeError(
                    router.host,
                    "router-failed",
                    f"the router answers, but a completion through it failed: {error}",
                    hint="look at its log: pdctl logs router",
                ) from error

    # Helpers.

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        begin = time.monotonic()
        try:
            return work()
        finally:
            self.timings[name] = time.monotonic() - begin

    def _fan_out(self, results: dict[str, T | PdctlError]) -> None:
        errors = {host: result for host, result in results.items() if isinstance(result, PdctlError)}
        if not errors:
            return
        first = next(iter(errors.values()))
        if len(errors) == 1:
            raise first
        kind = HostError if all(isinstance(error, HostError) for error in errors.values()) else PdctlError
        message = "\n  ".join(f"{error.message}{f' ({error.hint})' if error.hint else ''}" for error in errors.values())
        if kind is HostError:
            raise HostError(f"{len(errors)} of {len(results)} hosts", f"failed:\n  {message}")
        raise PdctlError(f"{len(errors)} of {len(results)} hosts failed:\n  {message}")

    def _clean_up(self) -> Aftermath:
        with self.lock:
            attempted = dict(self.attempted)
        if self.options.keep or not attempted:
            return Aftermath(left_running=tuple(attempted))
        deadline = time.monotonic() + _IN_FLIGHT_S
        while self.busy and time.monotonic() < deadline:
            time.sleep(0.05)
        with self.lock:
            attempted = dict(self.attempted)
        self.reporter.step(f"stopping what this launch started: {', '.join(attempted)}")
        try:
            return stop_instances(
                self.nodes,
                self.fleet,
                [Target(instance.name, instance.host) for instance in attempted.values()],
                grace_s=self.options.grace_s,
                only_launch_id=self.launch_id,
            )
        except KeyboardInterrupt:
            # A second Ctrl-C. The hosts go on with what they were told.
            return Aftermath(stopping=tuple(attempted))


def _launch_failed(failures: Sequence[InstanceFailure]) -> LaunchFailed:
    first = failures[0]
    cause = first.diagnoses[0] if first.diagnoses else None
    message = f"{first.instance} on {first.host} did not come up: {cause.cause if cause else first.summary}"
    return LaunchFailed(message, hint=cause.fix if cause else f"pdctl logs {first.instance}", failures=failures)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
