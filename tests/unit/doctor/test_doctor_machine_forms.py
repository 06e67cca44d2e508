"""--json, --junit and the counts."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from pdctl.doctor.junit import junit
from pdctl.doctor.outcome import Outcome
from pdctl.doctor.probe_facts import ProbeFacts, ProbeResult
from pdctl.doctor.report_json import report_json
from pdctl.doctor.summary import Summary, summarize
from pdctl.errors import HostUnreachable
from tests.support.outcomes import finding, outcome_of
from tests.support.plans import changed, planned


def mixed(**more: object) -> Outcome:
    return outcome_of(
        [
            finding("SSH001", "pass", "p1"),
            finding("SSH001", "fail", "d1", message="gone", fix="boot it", evidence="no route", commands=["wake d1"]),
            finding("HOST003", "fail", "p1", message="low", severity="warning", fix="raise it"),
            finding("FAB003", "skipped", "p1", message="no fi_info"),
            finding("SG001", "fail", "p1", message="open to the world"),
            finding("SW002", "pass"),
        ],
        plan=planned(changed(doctor={"ignore": [{"id": "SG001", "reason": "a test"}]})),
        unreachable={"d1": HostUnreachable("d1", "nothing answers", hint="boot it")},
        **more,
    )


class TestSummary:
    def test_counts(self) -> None:
        assert summarize(mixed().findings) == Summary(errors=1, warnings=1, passed=1, skipped=1, ignored=1)

    def test_a_problem_that_hosts_share_counts_once(self) -> None:
        found = [finding("HOST003", "fail", f"p{n}", message="low") for n in range(12)]
        found.append(finding("HOST003", "fail", "d1", message="lower"))
        assert summarize(found).errors == 2

    def test_a_check_that_is_skipped_for_some_hosts_has_not_passed(self) -> None:
        found = [finding("HOST003", "pass", "p1"), finding("HOST003", "skipped", "d1")]
        assert summarize(found) == Summary(skipped=1)


class TestJson:
    def test_schema(self) -> None:
        probe = ProbeFacts((ProbeResult("p1", "d1", True, "done", log="long"),))
        value = json.loads(json.dumps(report_json(mixed(probe=probe, aws_skipped="no aws"))))
        assert list(value) == [
            "schema", "pdctl", "cluster", "ok", "exit_code", "summary", "hosts", "not_reached", "checks", "findings",
            "stages", "probe", "unused_ignores", "timings_s",
        ]  # fmt: skip
        assert value["schema"] == 1
        assert (value["ok"], value["exit_code"]) == (False, 3)
        assert value["summary"] == {"errors": 1, "warnings": 1, "infos": 0, "passed": 1, "skipped": 1, "ignored": 1}
        assert value["not_reached"]["d1"]["kind"] == "HostUnreachable"
        assert value["stages"]["ec2"] == "no aws"
        assert "log" not in value["probe"][0]
        assert value["findings"][1] == {
            "id": "SSH001",
            "area": "SSH",
            "title": "every host can be reached",
            "severity": "error",
            "verdict": "fail",
            "hosts": ["d1"],
            "message": "gone",
            "evidence": "no route",
            "fix": "boot it",
            "commands": ["wake d1"],
            "ignored": "",
        }


def cases(xml: bytes) -> dict[str, ElementTree.Element]:
    return {case.get("name", ""): case for case in ElementTree.fromstring(xml).iter("testcase")}


class TestJunit:
    def test_a_suite_for_each_area_with_its_counts(self) -> None:
        root = ElementTree.fromstring(junit(mixed()))
        assert [suite.get("name", "").split(":")[0] for suite in root] == ["SSH", "HOST", "FAB", "SG", "SW"]
        assert [root.get(key) for key in ("tests", "failures", "skipped", "errors")] == ["6", "1", "2", "0"]
        ssh = root[0]
        assert [ssh.get(key) for key in ("tests", "failures", "skipped")] == ["2", "1", "0"]

    def test_only_errors_fail(self) -> None:
        found = cases(junit(mixed()))
        failure = found["SSH001 every host can be reached [d1]"].find("failure")
        assert failure is not None
        assert failure.get("message") == "gone"
        assert failure.text == "seen: no route\nfix: boot it\n$ wake d1"
        warning = found["HOST003 memory may be locked without limit [p1]"]
        assert [child.tag for child in warning] == ["system-out"]

    def test_skipped_and_ignored(self) -> None:
        found = cases(junit(mixed()))
        skipped = found["FAB003 the EFA devices of the instance type are all there [p1]"].find("skipped")
        ignored = found["SG001 the security group lets itself in [p1]"].find("skipped")
        assert skipped is not None
        assert skipped.get("message") == "no fi_info"
        assert ignored is not None
        assert ignored.get("message") == "ignored (a test): open to the world"

    @given(st.text(), st.text(), st.text())
    def test_whatever_a_host_says_is_valid_xml(self, message: str, evidence: str, command: str) -> None:
        found = [finding("HOST003", "fail", "p1", message=message, evidence=evidence, commands=[command])]
        root = ElementTree.fromstring(junit(outcome_of(found)))
        assert root.get("failures") == "1"

    def test_control_characters_stay_readable(self) -> None:
        found = [finding("HOST003", "fail", "p1", message="\x1b[31mred\x00\ud800")]
        (case,) = cases(junit(outcome_of(found))).values()
        failure = case.find("failure")
        assert failure is not None
        assert failure.get("message") == r"\u001b[31mred\u0000\ud800"
