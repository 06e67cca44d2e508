"""One run of the doctor: collect what the chosen checks need, then judge it. No terminal, no command line here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pdctl.doctor.aws import ask_ec2, match_hosts
from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.collect import collect
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts
from pdctl.doctor.findings import Check
from pdctl.doctor.network import check_network
from pdctl.doctor.network_facts import NetworkFacts
from pdctl.doctor.outcome import Outcome, count, judge
from pdctl.doctor.probe import probe
from pdctl.doctor.probe_facts import ProbeFacts
from pdctl.errors import PdctlError
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan

T = TypeVar("T")

FACTS_TIMEOUT_S = 15.0
"""How long one host may take to tell its facts."""
NETWORK_TIMEOUT_S = 30.0
"""How long opening the planned ports may take."""
EC2_TIMEOUT_S = 20.0
"""How long all calls of the EC2 API may take together."""
PROBE_TIMEOUT_S = 120.0
"""How long the NIXL WRITE of one pair may take."""

# What checks look at beside the facts of the hosts: by id, or by area where that holds for all of it.
NEEDS_NETWORK = frozenset({"NET009", "NET010"})
NEEDS_PROBE = frozenset({"XFER"})
NEEDS_EC2 = frozenset({"AWS", "SG"})


class Progress(Protocol):
    """Receives what the doctor is doing. Called from the thread that runs it."""

    def step(self, text: str) -> None:
        """A new stage has begun."""

    def detail(self, text: str) -> None:
        """How far the present stage is."""


@dataclass(frozen=True)
class Options:
    """What the user may choose.

    Attributes:
        checks: the checks to run, in the order of the registry. A stage that none of them needs is not run.
        probe: whether to make NIXL WRITEs; None: when NIXL can be imported on the hosts.
        probe_pairs: most pairs to probe; None leaves the choice to the probe.
        ec2: whether the EC2 API may be asked.
        timeout_s: limit of each stage, in seconds; None: a limit that suits it.
        aws: recorded answers of the EC2 API, instead of asking it.
    """

    checks: tuple[Check, ...]
    probe: bool | None = None
    probe_pairs: int | None = None
    ec2: bool = True
    timeout_s: float | None = None
    aws: AwsFacts | None = None


def examine(plan: ClusterPlan, fleet: Fleet, progress: Progress, options: Options) -> Outcome:
    """Collect facts and run the checks. Changes nothing on the hosts.

    Raises:
        PdctlError: the doctor itself could not work. What is wrong with a host is a finding, not an exception.
    """
    return _Examination(plan, fleet, progress, options).run()


class _Examination:
    def __init__(self, plan: ClusterPlan, fleet: Fleet, progress: Progress, options: Options) -> None:
        self.plan, self.fleet, self.progress, self.options = plan, fleet, progress, options
        self.timings: dict[str, float] = {}

    def run(self) -> Outcome:
        begin = time.monotonic()
        facts, unreachable = self._facts()
        ec2 = _Background(lambda: self._timed("ec2", lambda: self._ec2(facts)))
        network = self._timed("network", lambda: self._network(facts))
        probed, probe_skipped = self._timed("probe", lambda: self._probe(facts))
        if ec2.running:
            self.progress.step("asking EC2")
        aws, aws_skipped = ec2.result()
        context = Context(
            self.plan,
            facts,
            unreachable,
            network=network,
            probe=probed,
            aws=aws,
            probe_skipped=probe_skipped,
            aws_skipped=aws_skipped,
        )
        outcome = judge(context, self.options.checks, self.timings)
        self.timings["total"] = time.monotonic() - begin
        return outcome

    def _facts(self) -> tuple[dict[str, HostFacts], dict[str, PdctlError]]:
        hosts = self.plan.hosts
        self.progress.step(f"collecting facts of {count(len(hosts), 'host')}")
        return self._timed(
            "facts",
            lambda: collect(self.fleet, self.plan, timeout_s=self._limit(FACTS_TIMEOUT_S), on_done=self._ticks(hosts)),
        )

    def _network(self, facts: Mapping[str, HostFacts]) -> NetworkFacts | None:
        if not self._wants(NEEDS_NETWORK) or not facts:
            return None
        self.progress.step("opening the planned ports between the hosts")
        return check_network(
            self.fleet,
            self.plan,
            facts,
            timeout_s=self._limit(NETWORK_TIMEOUT_S),
            on_done=self._ticks(tuple(facts)),
        )

    def _probe(self, facts: Mapping[str, HostFacts]) -> tuple[ProbeFacts | None, str]:
        if not self._wants(NEEDS_PROBE):
            return None, "its checks were left out"
        reason = why_no_probe(self.plan, facts, self.options.probe)
        if reason:
            return None, reason
        self.progress.step("writing over NIXL from prefill to decode")
        return probe(
            self.fleet,
            self.plan,
            facts,
            pairs=self.options.probe_pairs,
            timeout_s=self._limit(PROBE_TIMEOUT_S),
            on_done=self._ticks(()),
        ), ""

    def _ec2(self, facts: Mapping[str, HostFacts]) -> tuple[AwsFacts | None, str]:
        if self.options.aws is not None:
            return match_hosts(self.options.aws, self.plan, facts), ""
        if not self._wants(NEEDS_EC2):
            return None, "its checks were left out"
        reason = why_not_ask_ec2(self.plan, facts) if self.options.ec2 else "it was not to be asked"
        if reason:
            return None, reason
        return ask_ec2(self.plan, facts, timeout_s=self._limit(EC2_TIMEOUT_S)), ""

    def _wants(self, names: frozenset[str]) -> bool:
        return any(check.id in names or check.area in names for check in self.options.checks)

    def _limit(self, usual_s: float) -> float:
        return usual_s if self.options.timeout_s is None else self.options.timeout_s

    def _ticks(self, names: tuple[str, ...]) -> Callable[..., None]:
        """A function to call with each name that is done; tells how many are, and who is waited for."""
        waiting = dict.fromkeys(names)

        def on_done(name: str, *_: object) -> None:
            waiting.pop(name, None)
            few = ", ".join(list(waiting)[:3]) + (", ..." if len(waiting) > 3 else "")
            done = f"{len(names) - len(waiting)} of {len(names)}" if names else f"{name} done"
            self.progress.detail(f"{done}, waiting for {few}" if waiting else done)

        return on_done

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        begin = time.monotonic()
        try:
            return work()
        finally:
            self.timings[name] = time.monotonic() - begin


class _Background(Generic[T]):
    """Work in a daemon thread, so that it never keeps the interpreter alive after Ctrl-C."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="doctor: EC2", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._result.append(work())
        except BaseException as error:  # handed to the thread that asks for the result
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> T:
        while self._thread.is_alive():
            # In slices: a plain join would not be interrupted by a signal.
            self._thread.join(0.2)
        if self._error is not None:
            raise self._error
        return self._result[0]


def why_no_probe(plan: ClusterPlan, facts: Mapping[str, HostFacts], asked: bool | None) -> str:
    """Why no NIXL WRITE is made between the hosts; empty if it is."""
    if asked is False:
        return "it was switched off with --no-probe"
    sides = (("prefill", plan.prefill), ("decode", plan.decode))
    for role, instances in sides:
        if not any(instance.host in facts for instance in instances):
            return f"no {role} host could be reached"
    if asked:
        return ""
    for role, instances in sides:
        reasons = [
            why_no_nixl(facts[instance.host], instance.argv[0]) for instance in instances if instance.host in facts
        ]
        if all(reasons):
            return f"NIXL cannot be imported on any {role} host ({reasons[0]})"
    return ""


def why_no_nixl(facts: HostFacts, python: str) -> str:
    """Why NIXL cannot be imported by a Python of the plan on a host; empty if it can."""
    if facts.interpreters is None:
        return f"{facts.host}: {facts.why_missing('interpreters')}"
    interpreter = facts.interpreter(python)
    if interpreter is None:
        return f"{facts.host}: nothing is known of {python}"
    if not interpreter.ok:
        return f"{facts.host}: {interpreter.error}"
    if interpreter.nixl is None or interpreter.nixl.version is None:
        return f"{facts.host}: {(interpreter.nixl and interpreter.nixl.error) or 'it is not installed'}"
    return ""


def why_not_ask_ec2(plan: ClusterPlan, facts: Mapping[str, HostFacts]) -> str:
    """Why EC2 is not asked; empty if it is. Missing credentials are no reason: the answer then says so."""
    if plan.spec.aws is not None or any(one.cloud is not None and one.cloud.is_ec2 for one in facts.values()):
        return ""
    return "no host is known to be an EC2 instance, and the cluster file has no `aws:` section"
