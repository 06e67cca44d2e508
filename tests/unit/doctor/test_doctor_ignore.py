from __future__ import annotations

import pytest

from pdctl.doctor.ignore import check_ignore_list
from pdctl.errors import ClusterFileError, HostUnreachable
from pdctl.plan import ClusterPlan, make_plan
from pdctl.spec import parse
from tests.support.outcomes import check, finding, outcome_of
from tests.support.plans import DIGEST

FILE = """\
cluster: qwen3
model: m
accelerator: cpu
fabric: tcp
prefill: {hosts: [p1, p2]}
decode: {hosts: [d1]}
router: {host: p1}
doctor:
  ignore:
"""


def plan_of(*entries: str) -> ClusterPlan:
    text = FILE + "".join(f"    - {entry}\n" for entry in entries)
    return make_plan(parse(text, file="c.yaml", environ={}), environ={}, connector_digest=DIGEST)


class TestNames:
    def test_an_unknown_id_has_its_line_and_a_near_one(self) -> None:
        with pytest.raises(ClusterFileError) as caught:
            check_ignore_list(plan_of("{id: HOST003, reason: r}", "{id: HOST008, reason: r}"), [check("HOST003")])
        (problem,) = caught.value.problems
        assert (problem.line, problem.key) == (11, "doctor.ignore[1].id")
        assert problem.hint == "did you mean `HOST003`?"
        assert caught.value.exit_code == 2

    def test_an_unknown_host(self) -> None:
        with pytest.raises(ClusterFileError) as caught:
            check_ignore_list(plan_of("{id: HOST003, hosts: [d1, p3], reason: r}"), [check("HOST003")])
        (problem,) = caught.value.problems
        assert (problem.line, problem.key) == (10, "doctor.ignore[0].hosts[1]")
        assert "p" in problem.hint

    def test_all_problems_at_once(self) -> None:
        with pytest.raises(ClusterFileError) as caught:
            check_ignore_list(plan_of("{id: ABC001, hosts: [x], reason: r}"), [check("HOST003")])
        assert len(caught.value.problems) == 2

    def test_a_good_list(self) -> None:
        check_ignore_list(plan_of("{id: HOST003, hosts: [p1], reason: r}"), [check("HOST003")])


class TestEffect:
    def test_an_ignored_error_does_not_fail_the_command(self) -> None:
        outcome = outcome_of(
            [finding("HOST003", "fail", "p1"), finding("HOST003", "pass", "p2")],
            plan=plan_of("{id: HOST003, hosts: [p1], reason: as it is}"),
        )
        assert outcome.exit_code == 0
        assert [one.ignored for one in outcome.findings] == ["as it is", ""]
        assert outcome.unused_ignores == ()

    def test_other_hosts_still_count(self) -> None:
        found = [finding("HOST003", "fail", "p1"), finding("HOST003", "fail", "p2")]
        outcome = outcome_of(found, plan=plan_of("{id: HOST003, hosts: [p1], reason: r}"))
        assert [one.hosts for one in outcome.errors] == [("p2",)]
        assert outcome.exit_code == 1

    def test_a_pair_is_about_both_hosts(self) -> None:
        outcome = outcome_of(
            [finding("NET002", "fail", "p1", "d1"), finding("NET002", "fail", "p2", "d1")],
            plan=plan_of("{id: NET002, hosts: [p2], reason: r}"),
        )
        assert [one.hosts for one in outcome.errors] == [("p1", "d1")]

    def test_a_finding_about_the_whole_cluster_needs_an_entry_without_hosts(self) -> None:
        found = [finding("SW002", "fail")]
        assert outcome_of(found, plan=plan_of("{id: SW002, hosts: [p1], reason: r}")).exit_code == 1
        assert outcome_of(found, plan=plan_of("{id: SW002, reason: r}")).exit_code == 0

    def test_an_unreachable_host_can_be_ignored(self) -> None:
        gone = {"d1": HostUnreachable("d1", "gone")}
        found = [finding("SSH001", "fail", "d1")]
        assert outcome_of(found, unreachable=gone, plan=plan_of("{id: SSH002, reason: r}")).exit_code == 3
        assert outcome_of(found, unreachable=gone, plan=plan_of("{id: SSH001, reason: r}")).exit_code == 0

    def test_ignoring_another_finding_of_the_area_does_not_excuse_an_unreachable_host(self) -> None:
        gone = {"d1": HostUnreachable("d1", "gone")}
        found = [finding("SSH001", "fail", "d1"), finding("SSH004", "fail", "d1")]
        assert outcome_of(found, unreachable=gone, plan=plan_of("{id: SSH004, reason: r}")).exit_code == 3


class TestUnused:
    def test_an_entry_that_matches_nothing_is_named_with_its_line(self) -> None:
        plan = plan_of("{id: HOST003, hosts: [p1], reason: r}", "{id: HOST003, hosts: [p2], reason: r}")
        outcome = outcome_of([finding("HOST003", "pass", "p1"), finding("HOST003", "fail", "p2")], plan=plan)
        assert [(one.id, one.hosts, one.where) for one in outcome.unused_ignores] == [("HOST003", ("p1",), "c.yaml:10")]

    def test_a_check_that_has_nothing_to_say_here(self) -> None:
        assert outcome_of([], plan=plan_of("{id: FAB001, reason: r}"), checks=["FAB001"]).unused_ignores

    def test_skipped_and_left_out_checks_prove_nothing(self) -> None:
        plan = plan_of("{id: HOST003, reason: r}")
        assert outcome_of([finding("HOST003", "skipped", "p1")], plan=plan).unused_ignores == ()
        assert outcome_of([], plan=plan).unused_ignores == ()
