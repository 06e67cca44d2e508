"""What the dashboard may do to a cluster, done to one of stand-ins."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pdctl.cli.options import load_plan
from pdctl.cli.watch_actions import ClusterActions
from pdctl.errors import PdctlError, UsageError
from pdctl.hosts.fleet import Fleet
from pdctl.watch.tui.source import Actions
from tests.e2e.cluster import Cluster
from tests.integration.test_launch_stand_in import Bench, bench  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def cluster(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Cluster:  # noqa: F811
    made = bench.cluster()
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    assert made.pdctl("up").code == 0
    return made


@pytest.fixture
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    with Fleet(load_plan(cluster.file).spec) as made:
        yield made


def test_an_instance_is_restarted_and_its_log_read(cluster: Cluster, fleet: Fleet) -> None:
    actions: Actions = ClusterActions(load_plan(cluster.file), cluster.file, fleet, read_only=False)
    before = {one["name"]: one["pid"] for one in cluster.pdctl("status", "--json").json()["instances"]}
    assert actions.restart("decode-0").startswith("decode-0 was restarted, and is ready")
    after = {one["name"]: one["pid"] for one in cluster.pdctl("status", "--json").json()["instances"]}
    assert {name for name in after if after[name] != before[name]} == {"decode-0"}
    assert "Starting to load model" in actions.logs("decode-0")
    report = actions.doctor_pair("prefill-0", "decode-0")
    assert "\x1b" not in report
    assert "XFER" in report or "NET" in report
    with pytest.raises(UsageError, match="decode-7"):
        actions.logs("decode-7")
    with pytest.raises(PdctlError, match="last decode instance"):
        actions.drain("decode-0")


def processes(cluster: Cluster) -> dict[str, tuple[int | None, str]]:
    seen = cluster.pdctl("status", "--json").json()["instances"]
    return {one["name"]: (one["pid"], one["state"]) for one in seen}


def test_a_restart_starts_nothing_else_and_fails_for_nothing_else(cluster: Cluster, fleet: Fleet) -> None:
    actions = ClusterActions(load_plan(cluster.file), cluster.file, fleet, read_only=False)
    before = processes(cluster)
    pid = before["decode-0"][0]
    assert pid is not None
    # Somebody has stopped it, and has a reason.
    os.kill(pid, signal.SIGKILL)
    words = actions.restart("prefill-0")
    assert words.startswith("prefill-0 was restarted, and is ready")
    assert words.endswith("not proven by a request: no decode instance answers its health check")
    after = processes(cluster)
    assert after["prefill-0"][0] not in (None, before["prefill-0"][0])
    assert after["decode-0"] == (None, "exited")
    assert after["router"][0] == before["router"][0]


def test_a_proof_that_fails_stops_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    made = bench.cluster(decode={"STAND_IN_WRONG_TEXT": "1"})
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    assert made.pdctl("up", "--keep").code == 1
    before = processes(made)
    with Fleet(load_plan(made.file).spec) as fleet:
        actions = ClusterActions(load_plan(made.file), made.file, fleet, read_only=False)
        with pytest.raises(PdctlError, match=r"did not prove[\s\S]*left running: prefill-0"):
            actions.restart("prefill-0")
    after = processes(made)
    assert after["prefill-0"][1] == "ready"
    assert after["prefill-0"][0] != before["prefill-0"][0]


def test_nothing_is_changed_when_read_only(cluster: Cluster, fleet: Fleet) -> None:
    actions = ClusterActions(load_plan(cluster.file), cluster.file, fleet, read_only=True)
    for change in (actions.restart, actions.drain):
        with pytest.raises(UsageError, match="--read-only"):
            change("decode-0")
    assert "Starting to load model" in actions.logs("decode-0")
