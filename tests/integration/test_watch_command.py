"""``pdctl watch`` without a screen, on a cluster of stand-ins that really run on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.cluster import Cluster
from tests.integration.test_launch_stand_in import Bench, bench, free_ports  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(180)

# The stand-in for the router has no metrics.
QUIET = ("--skip", "E004,E005")


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> object:
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


class Watch:
    """A running ``pdctl watch --headless --json``."""

    def __init__(self, cluster: Cluster, folder: Path, *words: str) -> None:
        self.out, self.err = folder / "watch.out", folder / "watch.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                cluster.command("watch", "--headless", "--json", "--interval", "0.2", *QUIET, *words),
                env=cluster.environment(),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
            )

    def events(self) -> list[tuple[str, str, str]]:
        lines = [json.loads(line) for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found = [line for line in lines if line["kind"] == "alert"]
        return [(line["event"], line["alert"]["code"], line["alert"]["subject"]) for line in found]

    def has(self, event: str, code: str) -> bool:
        assert self.process.poll() is None, self.err.read_text()
        return any((kind, found) == (event, code) for kind, found, _ in self.events())

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def cluster(bench: Bench) -> Iterator[Cluster]:  # noqa: F811
    made = bench.cluster()
    assert made.pdctl("up").code == 0
    return made


def watchers(cluster: Cluster) -> list[str]:
    """Command lines of scripts that a watch of this cluster has left on its host."""
    marker = f"HOME={cluster.env['HOME']}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker in (entry / "environ").read_bytes():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found += [line] if "pdctl-agent" in line and "stand-in" not in line else []
        except OSError:
            continue
    return found


def test_a_look_at_a_healthy_cluster_and_at_one_that_is_down(cluster: Cluster) -> None:
    look = cluster.pdctl("watch", "--once", "--json", *QUIET)
    assert look.code == 0, look.out
    assert [one["healthy"] for one in look.json()["instances"]] == [True, True, True]
    assert look.json()["alerts"] == []
    assert cluster.pdctl("down", "--force").code == 0
    down = cluster.pdctl("watch", "--once", *QUIET)
    assert down.code == 1
    assert "E001" in down.out


def test_a_kill_is_told_exported_and_recorded_and_its_mending_too(cluster: Cluster, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    heard = tmp_path / "heard"
    hook = f"sh -c 'cat >> {heard}'"
    record = tmp_path / "incident.jsonl.gz"
    watch = Watch(cluster, tmp_path, "--exporter", f"127.0.0.1:{port}", "--record", str(record), "--on-alert", hook)

    def scrape() -> dict[tuple[str, str, str], float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(s.name, s.labels.get("instance", ""), s.labels.get("code", "")): s.value for s in samples}

    try:
        until(lambda: "metrics on" in watch.err.read_text())
        until(lambda: ("pdctl_instance_up", "decode-0", "") in scrape())
        assert scrape()["pdctl_instance_up", "decode-0", ""] == 1
        assert watch.events() == []
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as response:
            assert response.status == 200

        status = cluster.pdctl("status", "--json").json()
        pid = next(one["pid"] for one in status["instances"] if one["name"] == "decode-0")
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
        until(lambda: watch.has("opened", "E001"))
        until(lambda: scrape().get(("pdctl_alert", "decode-0", "E001")) == 1)
        assert scrape()["pdctl_instance_up", "decode-0", ""] == 0

        assert cluster.pdctl("up").code == 0
        until(lambda: watch.has("closed", "E001"))
        until(lambda: scrape()["pdctl_instance_up", "decode-0", ""] == 1)
    finally:
        code = watch.end()
    assert code == 130
    assert "Traceback" not in watch.err.read_text()
    assert watchers(cluster) == []
    told = [json.loads(line) for line in heard.read_text().splitlines()]
    assert {(one["event"], one["alert"]["code"]) for one in told} >= {("opened", "E001"), ("closed", "E001")}

    first, second = (cluster.pdctl("watch", "--replay", str(record), "--json", *QUIET) for _ in range(2))
    assert first.code == 1
    assert first.out == second.out
    events = [json.loads(line) for line in first.out.splitlines()]
    assert ("opened", "E001", "decode-0") in [(e["event"], e["alert"]["code"], e["alert"]["subject"]) for e in events]


def test_ctrl_c_ends_a_watch_at_once(cluster: Cluster, tmp_path: Path) -> None:
    watch = Watch(cluster, tmp_path)
    until(lambda: "watching" in watch.err.read_text())
    assert watch.end(signal.SIGINT) == 130
    assert "interrupted" in watch.err.read_text()
    assert "Traceback" not in watch.err.read_text()
    assert watchers(cluster) == []


def test_a_reader_that_goes_away_ends_the_watch_quietly(cluster: Cluster) -> None:
    process = subprocess.Popen(
        cluster.command("watch", "--json", "--interval", "0.2", "--heartbeat", "1"),
        env=cluster.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["schema"] == 1
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 141
    assert "Traceback" not in errors
    assert watchers(cluster) == []


def test_a_port_that_is_taken_is_said_before_anything_is_watched(cluster: Cluster) -> None:
    port = int(cluster.pdctl("status", "--json").json()["instances"][0]["url"].rpartition(":")[2])
    result = cluster.pdctl("watch", "--headless", "--exporter", str(port), timeout=60)
    assert result.code == 2
    assert f"cannot serve metrics on 127.0.0.1:{port}" in result.err


def test_a_capture_has_both_sides_and_no_secrets(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "evidence.tar.gz"
    result = cluster.pdctl("capture", "prefill-0", "-o", str(path))
    assert result.code == 0, result.err
    with tarfile.open(path) as tar:
        parts = {name.partition("/")[2] for name in tar.getnames()}
    assert parts >= {"index.json", "plan.json", "snapshot.json", "alerts.json"}
    for name in ("prefill-0", "decode-0"):
        assert parts >= {
            f"{name}/{part}" for part in ("log.txt", "metrics.txt", "processes.txt", "rank-0/healthz.json")
        }
    assert "router/log.txt" in parts
    assert cluster.pdctl("capture", "prefill-0", "-o", str(path)).code == 2
    assert watchers(cluster) == []
