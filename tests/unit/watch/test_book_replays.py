"""Recorded incidents: what the watchdog must say, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
from replay_cases import CASES, REPLAYS, Case

from pdctl.watch.book import Watchdog
from pdctl.watch.recording import read_recording
from pdctl.watch.rules import CODES


def play(case: Case, path: Path) -> tuple[list[str], list[str]]:
    """Events as the files have them, and all messages."""
    watchdog = Watchdog(case.settings)
    events, messages = [], []
    for snapshot in read_recording(path):
        _, changes = watchdog.look(snapshot)
        for change in changes:
            symptom = change.alert.symptom
            if change.kind != "updated":
                events.append(
                    f"{snapshot.tick} {change.kind} {symptom.code} {symptom.subject} {symptom.severity.value}"
                )
            messages.append(symptom.message)
    return events, messages


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replay(case: Case) -> None:
    events, _ = play(case, case.path)
    assert events == case.events_path.read_text(encoding="utf-8").splitlines()


def test_every_code_has_a_replay() -> None:
    assert {code for case in CASES for code in case.codes} == set(CODES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_files_are_those_of_the_builder(case: Case) -> None:
    assert list(read_recording(case.path)) == case.snapshots()
    assert case.events_path.read_text(encoding="utf-8").splitlines() == list(case.events)


def test_no_file_is_left_over() -> None:
    assert set(REPLAYS.glob("*.jsonl*")) == {case.path for case in CASES}
    assert set(REPLAYS.glob("*.events")) == {case.events_path for case in CASES}
