"""The report for people, against small expected files. `PDCTL_WRITE_EXPECTED=1` writes them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from pdctl.doctor.outcome import Outcome
from pdctl.doctor.probe_facts import ProbeFacts, ProbeResult
from pdctl.doctor.report import Style, fix_commands, report
from pdctl.doctor.styled_text import ASCII, UNICODE, glyphs_for, plain_text
from pdctl.errors import HostUnreachable
from pdctl.plan import ClusterPlan
from tests.support.outcomes import finding, outcome_of
from tests.support.plans import changed, planned

COMMAND = (
    "aws ec2 describe-instances --instance-ids i-0123456789abcdef0 "
    "--query 'Reservations[].Instances[].NetworkInterfaces[].InterfaceType'"
)
EXPECTED = Path(__file__).with_name("expected")


def same_as_expected(text: str, name: str) -> None:
    path = EXPECTED / f"{name}.txt"
    if os.environ.get("PDCTL_WRITE_EXPECTED"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def text_of(outcome: Outcome, **style: Any) -> str:
    return plain_text(report(outcome, Style(**style)))


def plan_of(prefill: int, decode: int, **more: Any) -> ClusterPlan:
    return planned(
        changed(
            prefill={"hosts": [f"p{n}" for n in range(1, prefill + 1)]},
            decode={"hosts": [f"d{n}" for n in range(1, decode + 1)]},
            **more,
        )
    )


def mixed() -> Outcome:
    plan = plan_of(
        12,
        1,
        doctor={"ignore": [{"id": "SG001", "reason": "opened on Monday"}, {"id": "SW002", "reason": "long mended"}]},
    )
    prefill = [host for host in plan.hosts if host.startswith("p")]
    return outcome_of(
        [
            *(finding("SSH001", "pass", host) for host in plan.hosts),
            *(
                finding(
                    "HOST003",
                    "fail",
                    host,
                    severity="warning",
                    message="only 64 KiB may be locked; NIXL wants to lock all of the KV cache",
                    evidence=f"ulimit -l on {host}: 65536",
                    fix="raise `memlock` in /etc/security/limits.conf and log in again",
                )
                for host in prefill
            ),
            finding("HOST003", "pass", "d1"),
            finding(
                "FAB003",
                "fail",
                "p3",
                message="15 EFA devices, but a p5en.48xlarge has 16",
                evidence="rdmap79s0\nrdmap80s0",
                fix="attach the missing EFA interface, or stop and start the instance",
                commands=[COMMAND],
            ),
            *(finding("FAB003", "pass", host) for host in plan.hosts if host != "p3"),
            finding("FAB007", "skipped", "d1", message="not checked: fi_info is not installed"),
            finding("FAB008", "skipped", "d1", message="not checked: fi_info is not installed"),
            finding("FAB009", "pass", "p1"),
            finding("SG001", "fail", "p1", message="no rule lets the group itself in"),
            finding("SW002", "pass", message="0.33.0 everywhere"),
        ],
        plan=plan,
    )


def test_a_mixed_run() -> None:
    same_as_expected(text_of(mixed(), file_option=" -f my.yaml"), "mixed")


def test_a_good_run_is_short() -> None:
    plan = plan_of(2, 1)
    found = [finding(name, "pass", host) for name in ("SSH001", "HOST003", "FAB003") for host in plan.hosts]
    probe = ProbeFacts(
        (
            ProbeResult("p1", "d1", True, "done", backend="UCX", transport="tcp", memory="host", block_p50_us=120.4,
                        block_p99_us=300, bandwidth_mb_s=1180.2, notification_us=88),
            ProbeResult("p2", "d1", True, "done", backend="UCX", transport="tcp", memory="host", block_p50_us=125.0,
                        block_p99_us=300, bandwidth_mb_s=1210.9, notification_us=88),
        )
    )  # fmt: skip
    found.append(finding("XFER001", "pass", "p1", "d1"))
    same_as_expected(text_of(outcome_of(found, plan=plan, probe=probe)), "good")


def test_verbose_shows_what_passed_and_everything_seen() -> None:
    same_as_expected(text_of(mixed(), verbose=True), "verbose")


def pairs() -> Outcome:
    plan = plan_of(32, 8)
    bad = {("p5", "d7"): "fail", ("p9", "d1"): "skipped"}
    words = {"fail": "port 5700 of the side channel does not answer", "skipped": "not checked: d1 could not listen"}
    return outcome_of(
        [
            finding(
                "NET002",
                bad.get((f"p{p}", f"d{d}"), "pass"),
                f"p{p}",
                f"d{d}",
                message=words.get(bad.get((f"p{p}", f"d{d}"), "pass"), "fine"),
            )
            for p in range(1, 33)
            for d in range(1, 9)
        ],
        plan=plan,
    )


def test_many_pairs_are_a_table_with_like_hosts_together() -> None:
    text = text_of(pairs())
    same_as_expected(text, "pairs")
    assert len(text.splitlines()) < 16


def test_without_unicode() -> None:
    text = text_of(pairs(), glyphs=ASCII) + text_of(mixed(), glyphs=ASCII)
    assert text.isascii()
    assert "x error NET002" in text


def test_an_unreachable_host_is_named_when_the_area_that_says_so_was_left_out() -> None:
    gone = {"d1": HostUnreachable("d1", "nothing answers on port 22", hint="is it up?")}
    text = text_of(outcome_of([finding("SW002", "skipped", "d1", message="no facts")], unreachable=gone))
    assert "! not reached: d1: nothing answers on port 22 (is it up?)" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_is_wrapped_and_commands_are_not(width: int) -> None:
    command = "sudo sh -c " + "'echo a-rather-long-line >> /etc/security/limits.conf' && true" * 3
    long = "word " * 80
    found = finding("HOST003", "fail", "p1", message=long, fix=long, evidence=long, commands=[command])
    lines = text_of(outcome_of([found]), width=width).splitlines()
    assert f"        $ {command}" in lines
    assert all(len(line) <= max(width, 28) for line in lines[1:-4] if command not in line)


def test_what_a_host_says_cannot_drive_the_terminal() -> None:
    found = finding("HOST003", "fail", "p1", message="m\x1b[31m", evidence="\x1b]0;x\x07\nb\r", fix="f\x9b")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text_of(outcome_of([found])))


def test_evidence_that_differs_is_shown_for_a_few_hosts() -> None:
    found = [finding("HOST003", "fail", f"p{n}", message="same", evidence=f"value {n}") for n in range(1, 10)]
    text = text_of(outcome_of(found))
    assert text.count("seen (p") == 3
    assert "on 6 more (--verbose)" in text


def test_a_fix_that_messages_share_is_told_once() -> None:
    found = [
        finding("HOST003", "fail", "p1", message="one", fix="do it", commands=["sudo a"]),
        finding("HOST003", "fail", "p2", message="two", fix="do it", commands=["sudo b"]),
        finding("HOST003", "fail", "p3", message="three", fix="do that"),
    ]
    text = text_of(outcome_of(found))
    assert text.count("do it") == 1
    order = ["p1: one", "p2: two", "fix (p1, p2): do it", "$ sudo b", "p3: three", "fix: do that"]
    assert sorted(order, key=text.index) == order


def test_what_is_the_matter_comes_before_what_should_hold() -> None:
    """A title alone reads as if all were well."""
    text = text_of(outcome_of([finding("HOST003", "fail", "p1", message="64 KiB")]))
    assert "error HOST003 on p1: 64 KiB\n      expected: memory may be locked without limit\n" in text


def test_what_was_not_checked_everywhere_has_not_passed() -> None:
    found = [finding("HOST003", "pass", "p1"), finding("HOST003", "skipped", "d1", message="no answer")]
    text = text_of(outcome_of(found))
    assert "passed\n" not in text
    assert "\n0 passed, 1 skipped" in text
    assert "passed HOST003" in text_of(outcome_of(found), verbose=True)


def test_warnings_alone_have_a_next_step_too() -> None:
    found = finding("HOST003", "fail", "p1", severity="warning", message="low")
    assert "next: pdctl doctor explain HOST003" in text_of(outcome_of([found]))


def test_what_to_do_next_is_apart_from_its_meaning_however_long_the_command_is() -> None:
    found = finding("HOST003", "fail", "p1", commands=["x"])
    text = text_of(outcome_of([found]), file_option=f" -f {'a/long/way/' * 4}cluster.yaml")
    assert "cluster.yaml --fix-commands  only the commands" in text


def test_only_failures() -> None:
    text = text_of(mixed(), only_failures=True)
    assert "FAB003" in text
    assert "SSH001" not in text
    assert "skipped FAB" not in text


class TestFixCommands:
    def test_in_order_and_each_once_with_what_it_is_for(self) -> None:
        found = [
            finding("HOST003", "fail", "p1", message="little memory", commands=["sudo a", "sudo b"]),
            finding("HOST003", "fail", "p2", message="little memory", commands=["sudo a"]),
            finding("SG001", "fail", message="no rule", commands=["aws ec2 x", "aws ec2 y"]),
            finding("SW002", "fail", "p1", message="other", commands=["sudo a"]),
        ]
        assert fix_commands(outcome_of(found)) == [
            "# HOST003 on p1, p2: little memory",
            "# SW002 on p1: other",
            "sudo a",
            "# HOST003 on p1: little memory",
            "sudo b",
            "# SG001: no rule",
            "aws ec2 x",
            "aws ec2 y",
        ]

    def test_a_message_of_several_lines_stays_a_comment(self) -> None:
        found = finding("HOST003", "fail", "p1", message="one\nrm -rf /\r\x0bthree\u2028four", commands=["true"])
        lines = "\n".join(fix_commands(outcome_of([found]))).splitlines()
        assert [line for line in lines if not line.startswith("#")] == ["true"]

    def test_what_is_ignored_needs_no_mending(self) -> None:
        plan = planned(changed(doctor={"ignore": [{"id": "HOST003", "reason": "r"}]}))
        assert fix_commands(outcome_of([finding("HOST003", "fail", "p1", commands=["x"])], plan=plan)) == []


@pytest.mark.parametrize(
    ("encoding", "glyphs"),
    [("utf-8", UNICODE), ("ascii", ASCII), ("latin-1", ASCII), (None, ASCII), ("nonsense", ASCII)],
)
def test_the_signs_fit_the_output(encoding: str | None, glyphs: object) -> None:
    assert glyphs_for(encoding) is glyphs
