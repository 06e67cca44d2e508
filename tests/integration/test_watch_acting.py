"""``pdctl watch --on-stall`` on a cluster of stand-ins whose processes really run on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.integration.test_launch_stand_in import Bench, bench, free_ports  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(240)


def until(condition: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


class Watch:
    """A running ``pdctl watch --json`` that may act."""

    def __init__(self, cluster: Cluster, folder: Path, *words: str, stderr: int | None = None) -> None:
        self.out, self.err = folder / "watch.out", folder / "watch.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                cluster.command(
                    "watch", "--json", "--interval", "0.3", "--skip", "E004,E005", *words, *self.at_once(words)
                ),
                env=cluster.environment(),
                stdout=out,
                stderr=err if stderr is None else stderr,
                stdin=subprocess.DEVNULL,
            )

    @staticmethod
    def at_once(words: tuple[str, ...]) -> tuple[str, ...]:
        """The clusters here are young, and what was started within the cool-down is left alone."""
        return ("--on-stall-cool-down", "0") if "--on-stall-cool-down" not in words else ()

    def lines(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["kind"] == kind]

    def action(self, outcome: str) -> dict[str, Any] | None:
        assert self.process.poll() is None, self.err.read_text()
        return next((one for one in self.lines("action") if one["outcome"] == outcome), None)

    def end(self) -> str:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(90)
        return self.err.read_text()


@pytest.fixture
def writer(tmp_path: Path) -> Path:
    """Its content is the state of prefill's writer, until prefill is started anew."""
    return tmp_path / "writer"


@pytest.fixture
def cluster(bench: Bench, writer: Path) -> Iterator[Cluster]:  # noqa: F811
    made = bench.cluster(prefill={"STAND_IN_WRITER_FILE": str(writer)})
    assert made.pdctl("up").code == 0
    return made


def pids(cluster: Cluster) -> dict[str, int]:
    return {one["name"]: one["pid"] for one in cluster.pdctl("status", "--json").json()["instances"]}


def test_a_dead_writer_is_healed_by_a_restart_of_its_instance(cluster: Cluster, writer: Path, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    heard = tmp_path / "heard"
    before = pids(cluster)
    words = ("--on-stall", "restart-writer-side", "--exporter", f"127.0.0.1:{port}", "--on-alert")
    watch = Watch(cluster, tmp_path, *words, f"sh -c 'cat >> {heard}'")
    try:
        until(lambda: "metrics on" in watch.err.read_text())
        writer.write_text("dead")
        begun = until(lambda: watch.action("begun"))
        assert begun["instances"] == ["prefill-0"]
        assert begun["because"]["code"] == "W001"
        assert "dead" in begun["because"]["evidence"]
        done = until(lambda: watch.action("done") or watch.action("failed"))
        assert done["outcome"] == "done", done
        assert done["took_s"] > 0
        assert not writer.exists()
        until(lambda: any(one["event"] == "closed" for one in watch.lines("alert")))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            scraped = response.read().decode()
        for outcome in ("begun", "done"):
            assert f'action="restart-writer-side",cluster="{cluster_name(scraped)}",outcome="{outcome}"' in scraped
        # What the restart itself caused is part of it.
        told = [one["alert"]["code"] for one in watch.lines("alert") if one["event"] == "opened"]
        assert told == ["W001"]
        until(lambda: heard.exists() and '"outcome": "done"' in heard.read_text())
    finally:
        watch.end()
    after = pids(cluster)
    assert {name for name in after if after[name] != before[name]} == {"prefill-0"}


def cluster_name(scraped: str) -> str:
    return scraped.partition('pdctl_watch_polls_total{cluster="')[2].partition('"')[0]


def test_a_dry_run_and_a_refused_drain_change_nothing(cluster: Cluster, writer: Path, tmp_path: Path) -> None:
    before = pids(cluster)
    for words, outcome in ((("drain",), "refused"), (("restart-pair", "--on-stall-dry-run"), "dry-run")):
        writer.write_text("dead")
        watch = Watch(cluster, tmp_path, "--on-stall", *words)
        try:
            told = until(lambda watch=watch, outcome=outcome: watch.action(outcome))
            assert told["instances"] == ["prefill-0"]
            assert ("last prefill" in told["detail"]) is (outcome == "refused")
        finally:
            watch.end()
    assert pids(cluster) == before


def test_what_has_just_been_started_is_left_alone(cluster: Cluster, writer: Path, tmp_path: Path) -> None:
    before = pids(cluster)
    writer.write_text("dead")
    watch = Watch(cluster, tmp_path, "--on-stall", "restart-writer-side", "--on-stall-cool-down", "300")
    try:
        told = until(lambda: watch.action("refused"))
        assert "prefill-0 was started" in told["detail"]
    finally:
        watch.end()
    assert pids(cluster) == before


def test_a_reader_that_goes_away_leaves_no_instance_stopped(cluster: Cluster, writer: Path, tmp_path: Path) -> None:
    before = pids(cluster)
    watch = Watch(cluster, tmp_path, "--on-stall", "restart-writer-side", stderr=subprocess.PIPE)
    try:
        time.sleep(2)
        writer.write_text("dead")
        until(lambda: watch.action("begun"))
        # As `2>&1 | tee` does at Ctrl-C.
        assert watch.process.stderr is not None
        watch.process.stderr.close()
    finally:
        watch.end()
    until(lambda: cluster.pdctl("status").code == 0)
    assert pids(cluster)["prefill-0"] != before["prefill-0"]


def test_ctrl_c_in_the_middle_of_a_restart_leaves_a_cluster_that_comes_up(
    cluster: Cluster, writer: Path, tmp_path: Path
) -> None:
    before = pids(cluster)
    watch = Watch(cluster, tmp_path, "--on-stall", "restart-writer-side")
    try:
        time.sleep(2)
        writer.write_text("dead")
        until(lambda: watch.action("begun"))
    finally:
        told = watch.end()
    assert "is under way" in told
    assert "goes on by itself" in told or "done after" in told
    until(lambda: cluster.pdctl("status").code == 0)
    assert pids(cluster)["prefill-0"] != before["prefill-0"]
