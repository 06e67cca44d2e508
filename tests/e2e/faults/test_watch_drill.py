"""The fault drill of `pdctl watch`: real faults of a real cluster, each named by its code in seconds, and closed.

The watch runs as a user runs it, headless with JSON lines, and writes a recording, which must replay to the same codes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faulty import TIMEOUT_S, Faulty

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]

SATURATED_S = float(os.environ.get("PDCTL_SATURATED_S", "40"))
# A stage may last half of timeout_s; then two polls of a second, and what a busy machine of two cores takes to tell.
FLAGGED_S = TIMEOUT_S / 2 + 2 + 6


class Watch:
    """A running `pdctl watch --headless --json`, and what it has said."""

    def __init__(self, faulty: Faulty, *words: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.process = subprocess.Popen(
            faulty.cluster.command("watch", "--json", *words),
            env=faulty.cluster.environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(line, end="")
            with self.changed:
                self.events.append(json.loads(line))
                self.changed.notify_all()

    def told(self, event: str, code: str, *, since: int) -> dict[str, Any] | None:
        return next(
            (e for e in self.events[since:] if e.get("event") == event and e.get("alert", {}).get("code") == code),
            None,
        )

    def expect(self, event: str, code: str, *, since: int, within_s: float) -> dict[str, Any]:
        begin = time.monotonic()
        with self.changed:
            self.changed.wait_for(lambda: self.told(event, code, since=since) is not None, within_s)
            found = self.told(event, code, since=since)
        assert found is not None, f"{code} was not {event} within {within_s:.0f} s"
        print(f"{code} {event} after {time.monotonic() - begin:.1f} s")
        return found["alert"]

    def acted(self, *outcomes: str, within_s: float) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            return next((e for e in self.events if e["kind"] == "action" and e["outcome"] in outcomes), None)

        with self.changed:
            self.changed.wait_for(lambda: found() is not None, within_s)
            told = found()
        assert told is not None, f"no action was {' or '.join(outcomes)} within {within_s:.0f} s"
        return told

    def mark(self) -> int:
        return len(self.events)

    def quiet(self, since: int) -> None:
        """No alert that a person would be woken for."""
        loud = [
            e["alert"] for e in self.events[since:] if e.get("event") == "opened" and e["alert"]["severity"] != "info"
        ]
        assert loud == []

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(20)
        self.reader.join(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watch") / "drill.jsonl.gz"


@pytest.fixture(scope="module")
def watch(faulty: Faulty, recording: Path) -> Iterator[Watch]:
    made = Watch(faulty, "--record", str(recording))
    try:
        # Its first polls, and the calm that a watch of a sound cluster shows.
        time.sleep(8)
        made.quiet(0)
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def sound_afterwards(faulty: Faulty) -> Iterator[None]:
    yield
    for number in (1, 2):
        faulty.testbed.call("fast", faulty.testbed.name(number))
    faulty.testbed.call("heal", faulty.testbed.name(1), faulty.testbed.name(2))
    faulty.calm(60)


@contextmanager
def traffic(faulty: Faulty, prompts: int = 2, words: int = 150) -> Iterator[None]:
    """Requests through the router until the end of the block; what becomes of them does not matter."""
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            faulty.ask(faulty.router, faulty.fresh(words))

    with ThreadPoolExecutor(prompts) as pool:
        for _ in range(prompts):
            pool.submit(client)
        try:
            yield
        finally:
            stop.set()


def test_a_saturated_cluster_is_no_fault(faulty: Faulty, watch: Watch) -> None:
    since = watch.mark()
    with traffic(faulty, prompts=12, words=300):
        time.sleep(SATURATED_S)
    watch.quiet(since)


def test_a_stopped_worker(faulty: Faulty, watch: Watch) -> None:
    since = watch.mark()
    worker = faulty.worker(1)
    os.kill(worker, signal.SIGSTOP)
    try:
        alert = watch.expect("opened", "W003", since=since, within_s=FLAGGED_S)
        assert alert["instances"] == ["prefill-0"]
        assert "stopped" in alert["message"]
    finally:
        os.kill(worker, signal.SIGCONT)
    watch.expect("closed", "W003", since=since, within_s=30)


def test_a_link_that_is_cut_during_a_write(faulty: Faulty, watch: Watch) -> None:
    one, two = faulty.testbed.names(2)
    since = watch.mark()
    faulty.testbed.call("slow", one, "30mbit")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(faulty.legs, faulty.fresh(900), f"cut-{faulty.serial}")
        deadline = time.monotonic() + 20
        while not faulty.posted() and time.monotonic() < deadline:
            time.sleep(0.05)
        faulty.testbed.call("cut", one, two)
        try:
            alert = watch.expect("opened", "T002", since=since, within_s=FLAGGED_S)
            assert alert["instances"] == ["prefill-0", "decode-0"]
        finally:
            faulty.testbed.call("heal", one, two)
            faulty.testbed.call("fast", one)
        answer.result()
    watch.expect("closed", "T002", since=since, within_s=60)


def test_a_lost_registration(faulty: Faulty, watch: Watch) -> None:
    since = watch.mark()
    with faulty.failing(2, "send_notif/REG:*:drop"):
        status, _, _ = faulty.legs(faulty.fresh(), f"lost-{faulty.serial}")
        assert status == 500
        alert = watch.expect("opened", "T001", since=since, within_s=FLAGGED_S)
    assert "decode-0" in alert["instances"]
    watch.expect("closed", "T001", since=since, within_s=60)


def test_a_writer_that_hangs_in_nixl(faulty: Faulty, watch: Watch) -> None:
    since = watch.mark()
    with faulty.failing(1, "get_new_notifs:*:sleep=12"):
        alert = watch.expect("opened", "W002", since=since, within_s=FLAGGED_S)
    assert alert["instances"] == ["prefill-0"]
    assert "get_new_notifs" in alert["message"]
    watch.expect("closed", "W002", since=since, within_s=40)


@pytest.mark.long
def test_a_wedged_writer_is_healed_by_on_stall(faulty: Faulty, watch: Watch) -> None:
    """The writer hangs for longer than anybody waits; only another process can heal it."""
    acting = Watch(faulty, "--on-stall", "restart-writer-side", "--on-stall-cool-down", "0")
    try:
        time.sleep(4)
        since = watch.mark()
        with faulty.failing(1, "get_new_notifs:*:sleep=900"):
            begun = acting.acted("begun", "refused", within_s=FLAGGED_S + 20)
        assert (begun["outcome"], begun["instances"]) == ("begun", ["prefill-0"])
        assert begun["because"]["code"] == "W002"
        done = acting.acted("done", "failed", within_s=240)
        assert done["outcome"] == "done", done
    finally:
        acting.stop()
    faulty.works(5)
    watch.expect("closed", "W002", since=since, within_s=60)


def test_a_killed_prefill(faulty: Faulty, watch: Watch) -> None:
    since = watch.mark()
    faulty.kill_instance(1)
    alert = watch.expect("opened", "E001", since=since, within_s=FLAGGED_S)
    assert "prefill-0" in alert["instances"]
    result = faulty.cluster.pdctl("up", "--json", timeout=300)
    assert result.code == 0, result.err
    watch.expect("closed", "E001", since=since, within_s=30)


def test_the_recording_replays_to_the_same_codes(faulty: Faulty, watch: Watch, recording: Path) -> None:
    """The last one: it ends the watch."""
    watch.stop()
    live = {e["alert"]["code"] for e in watch.events if e.get("event") == "opened"}
    replay = faulty.cluster.pdctl("watch", "--json", "--replay", str(recording))
    assert replay.code == 1, replay.err
    replayed = {e["alert"]["code"] for e in map(json.loads, replay.out.splitlines()) if e.get("event") == "opened"}
    assert live == replayed
    assert {"W002", "W003", "T001", "T002", "E001"} <= live
