"""Faults of a real cluster, as `pdctl watch --record` wrote them: each is named, and closed when it is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdctl.watch.book import Watchdog
from pdctl.watch.recording import read_recording
from pdctl.watch.settings import WatchSettings

FOLDER = Path(__file__).with_name("recordings")
SETTINGS = WatchSettings(timeout_s=8.0, lease_s=5.0)
PAIR = "prefill-0>decode-0"
EXPECTED = {
    # A worker stopped by a signal, and continued.
    "stopped-worker": ["53 opened W003 prefill-0", "55 closed W003 prefill-0"],
    # The link was cut while prefill wrote; decode gave up after 8 s; the WRITE ended after the link had healed.
    "cut-link": [f"63 opened T002 {PAIR}", "65 opened T009 decode-0", f"72 closed T002 {PAIR}"],
    # Decode's registrations were dropped.
    "lost-registration": [f"79 opened T001 {PAIR}", "82 opened T009 decode-0", f"82 closed T001 {PAIR}"],
    # Prefill's writer hung in a call of NIXL.
    "hanging-writer": ["89 opened W002 prefill-0", "96 closed W002 prefill-0"],
    # Prefill was killed, and started again. One transfer failed on the way up.
    "killed-prefill": [
        "98 opened E001 prefill-0",
        "101 opened E002 prefill-0",
        "132 closed E002 prefill-0",
        "137 opened E002 prefill-0",
        "140 closed E001 prefill-0",
        "142 opened T009 decode-0",
    ],
}


def said(name: str) -> list[str]:
    watchdog = Watchdog(SETTINGS)
    lines = []
    for snapshot in read_recording(FOLDER / f"{name}.jsonl.gz"):
        _, events = watchdog.look(snapshot)
        lines += [
            f"{snapshot.tick} {event.kind} {event.alert.symptom.code} {event.alert.symptom.subject}"
            for event in events
            if event.kind != "updated"
        ]
    return lines


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_fault_is_named_and_closed(name: str) -> None:
    assert said(name) == EXPECTED[name]


def test_no_recording_is_left_over() -> None:
    assert {file.name.split(".")[0] for file in FOLDER.glob("*.gz")} == set(EXPECTED)
