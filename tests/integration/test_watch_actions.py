"""What the dashboard may do to a cluster, done to one of stand-ins."""

from __future__ import annotations

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


def test_nothing_is_changed_when_read_only(cluster: Cluster, fleet: Fleet) -> None:
    actions = ClusterActions(load_plan(cluster.file), cluster.file, fleet, read_only=True)
    for change in (actions.restart, actions.drain):
        with pytest.raises(UsageError, match="--read-only"):
            change("decode-0")
    assert "Starting to load model" in actions.logs("decode-0")
