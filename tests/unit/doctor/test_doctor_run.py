"""Which stages a run has, and what it makes of them; with collectors that a test makes up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pdctl.doctor import run
from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, read_facts
from pdctl.doctor.findings import Check, Result, failed, passed, run_check
from pdctl.doctor.network_facts import NetworkFacts
from pdctl.doctor.probe_facts import ProbeFacts
from pdctl.doctor.registry import all_checks
from pdctl.doctor.run import Options, examine, why_no_nixl, why_no_probe, why_not_ask_ec2
from pdctl.doctor.selection import find_check, select
from pdctl.errors import HostUnreachable, NodeError, PdctlError, UsageError
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan
from tests.support.outcomes import check
from tests.support.plans import BASE, changed, planned


def facts_of(host: str, **parts: Any) -> HostFacts:
    return read_facts(host, {"schema": 1, "parts": parts})


def with_nixl(host: str, python: str = "python3") -> HostFacts:
    return facts_of(host, interpreters=[{"python": python, "ok": True, "nixl": {"version": "1.5.1"}}])


class Recorder:
    """Stands for all collectors and for the display."""

    def __init__(self, facts: dict[str, HostFacts], unreachable: Mapping[str, PdctlError] | None = None) -> None:
        self.facts, self.unreachable = facts, dict(unreachable or {})
        self.stages: list[str] = []
        self.limits: dict[str, float] = {}
        self.steps: list[str] = []
        self.details: list[str] = []
        self.pairs: int | None = None

    def step(self, text: str) -> None:
        self.steps.append(text)

    def detail(self, text: str) -> None:
        self.details.append(text)

    def collect(self, fleet: object, plan: ClusterPlan, *, timeout_s: float, on_done: Any) -> Any:
        self.stages.append("facts")
        self.limits["facts"] = timeout_s
        for host, facts in self.facts.items():
            on_done(host, facts)
        return self.facts, self.unreachable

    def check_network(self, fleet: object, plan: object, facts: object, *, timeout_s: float, on_done: Any) -> Any:
        self.stages.append("network")
        self.limits["network"] = timeout_s
        return NetworkFacts()

    def probe(self, fleet: object, plan: object, facts: Any, *, pairs: Any, timeout_s: float, on_done: Any) -> Any:
        self.stages.append("probe")
        self.limits["probe"], self.pairs = timeout_s, pairs
        on_done("p1 -> d1", None)
        return ProbeFacts()

    def ask_ec2(self, plan: object, facts: object, *, timeout_s: float) -> AwsFacts:
        self.stages.append("ec2")
        assert threading.current_thread() is not threading.main_thread()
        self.limits["ec2"] = timeout_s
        return AwsFacts(region="us-east-2")


Use = Any


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    def use(recorder: Recorder) -> Recorder:
        for name in ("collect", "check_network", "probe", "ask_ec2"):
            monkeypatch.setattr(run, name, getattr(recorder, name))
        return recorder

    return use


def examined(recorder: Recorder, *names: str, plan: ClusterPlan | None = None, **options: Any) -> Any:
    plan = plan or planned(BASE)
    checks = tuple(check(name, options.pop("function", lambda context: ())) for name in names)
    with Fleet(plan.spec) as fleet:
        return examine(plan, fleet, recorder, Options(checks, **options))


class TestStages:
    @pytest.mark.parametrize(
        ("names", "stages"),
        [
            (["HOST003", "SW002", "NET001"], {"facts"}),
            (["NET009"], {"facts", "network"}),
            (["NET010"], {"facts", "network"}),
            (["XFER001"], {"facts", "probe"}),
            (["AWS001"], {"facts", "ec2"}),
            (["SG001"], {"facts", "ec2"}),
            (["SG001", "XFER001", "NET009"], {"facts", "ec2", "probe", "network"}),
        ],
    )
    def test_only_what_the_checks_need(self, use: Use, names: list[str], stages: set[str]) -> None:
        recorder = use(Recorder({"p1": with_nixl("p1"), "d1": with_nixl("d1")}))
        examined(recorder, *names, plan=planned(changed(aws={"region": "us-east-2"})))
        assert set(recorder.stages) == stages

    def test_each_stage_has_its_limit_unless_one_is_asked_for(self, use: Use) -> None:
        recorder = use(Recorder({"p1": with_nixl("p1"), "d1": with_nixl("d1")}))
        plan = planned(changed(aws={"region": "us-east-2"}))
        examined(recorder, "NET009", "SG001", "XFER001", plan=plan)
        assert recorder.limits == {
            "facts": run.FACTS_TIMEOUT_S,
            "network": run.NETWORK_TIMEOUT_S,
            "ec2": run.EC2_TIMEOUT_S,
            "probe": run.PROBE_TIMEOUT_S,
        }
        examined(recorder, "NET009", "SG001", "XFER001", plan=plan, timeout_s=7, probe_pairs=3)
        assert set(recorder.limits.values()) == {7}
        assert recorder.pairs == 3

    def test_progress_names_who_is_waited_for(self, use: Use) -> None:
        plan = planned(changed(prefill={"hosts": [f"p{n}" for n in range(1, 6)]}))
        recorder = use(Recorder({"p2": facts_of("p2")}))
        examined(recorder, "HOST003", plan=plan)
        assert recorder.steps == ["collecting facts of 6 hosts"]
        assert recorder.details == ["1 of 6, waiting for p1, p3, p4, ..."]

    def test_the_stages_are_timed(self, use: Use) -> None:
        outcome = examined(use(Recorder({})), "HOST003")
        assert outcome.timings_s.keys() == {"facts", "network", "probe", "ec2", "total"}

    def test_no_host_no_ports(self, use: Use) -> None:
        recorder = use(Recorder({}, {"p1": HostUnreachable("p1", "gone"), "d1": HostUnreachable("d1", "gone")}))
        outcome = examined(recorder, "NET009", "XFER001")
        assert recorder.stages == ["facts"]
        assert outcome.context.network is None
        assert outcome.context.probe_skipped == "no prefill host could be reached"

    def test_recorded_answers_of_ec2_are_taken_instead_of_asking(self, use: Use) -> None:
        recorder = use(Recorder({}))
        aws = AwsFacts(region="eu-west-1", instances={"i-1": {"InstanceId": "i-1", "PrivateDnsName": "p1"}})
        outcome = examined(recorder, "SG001", aws=aws)
        assert recorder.stages == ["facts"]
        assert outcome.context.aws.region == "eu-west-1"

    def test_a_bug_in_a_collector_is_not_swallowed(self, use: Use) -> None:
        recorder = use(Recorder({}))
        recorder.ask_ec2 = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
        use(recorder)
        with pytest.raises(ZeroDivisionError):
            examined(recorder, "SG001", plan=planned(changed(aws={})))


class TestProbe:
    facts = {"p1": with_nixl("p1"), "d1": with_nixl("d1")}  # noqa: RUF012

    def test_it_is_made_when_nixl_can_be_imported_on_both_sides(self) -> None:
        assert why_no_probe(planned(BASE), self.facts, None) == ""

    def test_not_without_nixl_unless_it_is_asked_for(self) -> None:
        facts = {**self.facts, "d1": facts_of("d1", interpreters=[{"python": "python3", "ok": False, "error": "gone"}])}
        reason = why_no_probe(planned(BASE), facts, None)
        assert reason == "NIXL cannot be imported on any decode host (d1: gone)"
        assert why_no_probe(planned(BASE), facts, True) == ""

    def test_one_host_of_a_side_is_enough(self) -> None:
        plan = planned(changed(prefill={"hosts": ["p1", "p2"]}))
        assert why_no_probe(plan, {**self.facts, "p2": facts_of("p2", interpreters=[])}, None) == ""

    def test_not_when_it_is_switched_off(self) -> None:
        assert "--no-probe" in why_no_probe(planned(BASE), self.facts, False)

    def test_not_without_a_host_of_each_side(self) -> None:
        assert why_no_probe(planned(BASE), {"p1": with_nixl("p1")}, True) == "no decode host could be reached"

    @pytest.mark.parametrize(
        ("interpreters", "words"),
        [
            (None, "the host did not report it"),
            ([], "nothing is known of python3"),
            ([{"python": "python3", "ok": False, "error": "no such file"}], "no such file"),
            ([{"python": "python3", "ok": True}], "it is not installed"),
            ([{"python": "python3", "ok": True, "nixl": {"error": "libucp.so: missing"}}], "libucp.so: missing"),
        ],
    )
    def test_why_nixl_cannot_be_imported(self, interpreters: Any, words: str) -> None:
        assert why_no_nixl(facts_of("d1", interpreters=interpreters), "python3") == f"d1: {words}"


class TestEc2:
    def test_asked_when_the_cluster_file_or_a_host_says_so(self) -> None:
        on_ec2 = {"p1": facts_of("p1", cloud={"vendor": "Amazon EC2"})}
        assert why_not_ask_ec2(planned(changed(aws={})), {}) == ""
        assert why_not_ask_ec2(planned(BASE), on_ec2) == ""

    def test_not_otherwise(self) -> None:
        elsewhere = {"p1": facts_of("p1", cloud={"vendor": "Dell Inc."})}
        assert "no host is known to be an EC2 instance" in why_not_ask_ec2(planned(BASE), elsewhere)

    def test_not_when_it_must_not_be(self, use: Use) -> None:
        recorder = use(Recorder({}))
        outcome = examined(recorder, "SG001", plan=planned(changed(aws={})), ec2=False)
        assert recorder.stages == ["facts"]
        assert outcome.context.aws_skipped == "it was not to be asked"


class TestExitCode:
    def outcome(self, use: Use, verdict: Any, gone: Mapping[str, PdctlError] | None = None) -> int:
        def function(context: Context) -> Iterator[Result]:
            yield verdict

        code: int = examined(use(Recorder({}, gone)), "HOST003", function=function).exit_code
        return code

    def test_each(self, use: Use) -> None:
        error = failed("p1", message="m", fix="f")
        assert self.outcome(use, passed("p1", message="m")) == 0
        assert self.outcome(use, error) == 1
        assert self.outcome(use, error, {"d1": HostUnreachable("d1", "gone")}) == 3
        assert self.outcome(use, passed("p1", message="m"), {"d1": HostUnreachable("d1", "gone")}) == 3

    def test_a_host_without_python_was_reached(self, use: Use) -> None:
        error = failed("p1", message="m", fix="f")
        assert self.outcome(use, error, {"d1": NodeError("d1", "no-python", "none")}) == 1


class _Watched(Context):
    """Remembers what a check looked at beside the facts."""

    seen: set[str]

    def __getattribute__(self, name: str) -> Any:
        if name in ("network", "probe", "aws"):
            object.__getattribute__(self, "__dict__").setdefault("seen", set()).add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("one", all_checks(), ids=lambda one: one.id)
def test_a_check_looks_at_no_stage_that_is_not_run_for_it(one: Check) -> None:
    plan = planned(changed(prefill={"hosts": ["p1", "p2"]}))
    context = _Watched(plan, {host: with_nixl(host) for host in plan.hosts})
    list(run_check(one, context))
    seen = context.__dict__.get("seen", set())
    names = {one.id, one.area}
    if "network" in seen:
        assert names & run.NEEDS_NETWORK
    if "probe" in seen:
        assert names & run.NEEDS_PROBE


@pytest.mark.parametrize("name", sorted(run.NEEDS_NETWORK))
def test_the_ids_of_checks_that_need_the_network_exist(name: str) -> None:
    assert find_check(all_checks(), name)


class TestSelection:
    checks = tuple(check(name) for name in ("HOST001", "HOST002", "FAB001", "SG001"))

    def ids(self, **options: list[str]) -> list[str]:
        return [one.id for one in select(self.checks, **options)]

    def test_ids_and_areas_in_comma_lists(self) -> None:
        assert self.ids() == ["HOST001", "HOST002", "FAB001", "SG001"]
        assert self.ids(only=["host", "SG001"]) == ["HOST001", "HOST002", "SG001"]
        assert self.ids(only=["HOST,FAB"], skip=["HOST002, FAB001"]) == ["HOST001"]
        assert self.ids(skip=["HOST"]) == ["FAB001", "SG001"]

    @pytest.mark.parametrize(
        ("name", "hint"),
        [("HOSTS", "did you mean HOST"), ("FAB002", "did you mean FAB001"), ("zzz", "areas are SSH, HOST")],
    )
    def test_an_unknown_name(self, name: str, hint: str) -> None:
        with pytest.raises(UsageError) as caught:
            select(self.checks, only=["HOST", name])
        assert hint in caught.value.hint
        with pytest.raises(UsageError):
            select(self.checks, skip=[name])

    def test_nothing_left(self) -> None:
        with pytest.raises(UsageError, match="no check is left"):
            select(self.checks, only=["SG"], skip=["SG001"])
