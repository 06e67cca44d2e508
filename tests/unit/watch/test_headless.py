from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdctl.watch import headless
from pdctl.watch.alerts import AlertEvent, Severity
from pdctl.watch.snapshot import HostView
from pdctl.watch.wording import plain, timestamp
from tests.unit.watch.frames import NOTE, PREFILL, RANK, SNAPSHOT, STALL, alert, frame

DEAD_HOST = replace(SNAPSHOT, hosts=(HostView("h1", age_s=0.1), HostView("h2", error="h2: timed out")))


@pytest.mark.parametrize(
    ("alerts", "snapshot", "code"),
    [
        ([], SNAPSHOT, 0),
        ([alert(NOTE)], SNAPSHOT, 0),
        ([alert(NOTE), alert(replace(STALL, severity=Severity.WARNING))], SNAPSHOT, 1),
        ([alert()], SNAPSHOT, 1),
        ([], DEAD_HOST, 3),
        ([alert()], DEAD_HOST, 3),
    ],
)
def test_the_exit_code_is_that_of_the_worst(alerts, snapshot, code: int) -> None:
    assert headless.exit_code(alerts, snapshot) == code
    assert headless.once_json(frame(*alerts, snapshot=snapshot))["exit_code"] == code


def test_the_line_of_an_event_has_the_documented_keys() -> None:
    shown = json.loads(json.dumps(headless.event_json(AlertEvent("opened", alert()), SNAPSHOT)))
    assert list(shown) == ["schema", "kind", "event", "at", "unix", "cluster", "alert"]
    assert shown["schema"] == 1
    assert shown["at"] == "2026-11-18T11:06:40.000Z"
    assert list(shown["alert"]) == [
        "code", "name", "severity", "subject", "instances", "host", "key", "message", "next_step", "opened_unix",
        "duration_s", "open", "folded",
    ]  # fmt: skip


def test_people_see_what_where_and_what_to_do() -> None:
    folded = alert(folded=(replace(STALL, code="T001"), replace(STALL, code="T001", subject="x"), STALL))
    opened = headless.event_lines(AlertEvent("opened", folded), SNAPSHOT)
    assert opened[0].startswith("2026-11-18T11:06:40.000Z opened: CRITICAL T002 write-stalled prefill-0 -> decode-0: ")
    assert opened[1:] == ["    next: pdctl doctor --only XFER", "    3 more with the same cause: T001 x 2, T002 x 1"]
    closed = headless.event_lines(AlertEvent("closed", alert(open=False, duration_s=12.34)), SNAPSHOT)
    assert len(closed) == 1
    assert "closed after 12.3 s: CRITICAL T002" in closed[0]


def test_nothing_that_a_rank_says_reaches_the_terminal_as_a_command() -> None:
    evil = replace(STALL, message="x\x1b[2J\x9b31m\r\nfake line\u202e\ud800" + "y" * 10_000)
    lines = headless.event_lines(AlertEvent("opened", alert(evil)), SNAPSHOT)
    assert all(line.isprintable() for line in lines)
    assert all(len(line) < 5000 for line in lines)
    assert len(lines) == 2


def test_what_nobody_said_is_not_zero() -> None:
    silent = replace(RANK, age_s=None, error="refused")
    snapshot = replace(
        SNAPSHOT, transfers=(), request_rate=None, instances=(replace(PREFILL, healthy=None, ranks=(silent,)),)
    )
    beat = headless.heartbeat_json(frame(snapshot=snapshot))
    assert beat["transfers_in_flight"] is None
    assert beat["request_rate"] is None
    assert beat["instances_healthy"] == 0
    assert "unknown transfers in flight" in headless.heartbeat_line(frame(snapshot=snapshot))
    assert headless.heartbeat_json(frame())["transfers_in_flight"] == 1


def test_a_look_lists_the_worst_first_and_the_hosts_that_are_gone() -> None:
    lines = headless.once_lines(frame(alert(NOTE), alert(), snapshot=DEAD_HOST))
    assert lines[0].startswith("CRITICAL T002")
    assert "unreachable: h2: h2: timed out" in lines
    assert "1 critical, 1 info" in lines[-1]
    look = headless.once_json(frame(alert(NOTE), alert(), snapshot=DEAD_HOST))
    assert (look["worst"], look["unreachable"]) == ("critical", {"h2": "h2: timed out"})


def test_plain_text_is_cut_and_times_never_fail() -> None:
    assert plain("a\tb\nc") == "a b c"
    assert plain("x" * 11, 10) == "x" * 9 + "…"
    assert timestamp(1e30) == "1e+30"
