"""Watching over real SSH: links that are cut, servers that go away, and what stays behind on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdctl.plan import ClusterPlan
from pdctl.watch.poller import Poller
from pdctl.watch.snapshot import HostView, Snapshot
from tests.integration.conftest import MakeFleet
from tests.support.plans import changed, planned
from tests.testbed.hosts import Testbed
from tests.testbed.sshd import Sshd

PATIENCE_S = 90.0


def plan_of(prefill: str, decode: str) -> ClusterPlan:
    def host(name: str) -> dict[str, str]:
        return {"name": name, "address": "127.0.0.1"}

    return planned(
        changed(
            accelerator="cpu",
            python="/usr/bin/python3",
            prefill={"hosts": [{**host(prefill), "port": 15100, "telemetry_port": 15150, "side_channel_port": 15160}]},
            decode={"hosts": [{**host(decode), "port": 15200, "telemetry_port": 15250, "side_channel_port": 15260}]},
            router={"host": prefill, "address": "127.0.0.1", "port": 15000, "metrics_port": 15001},
        )
    )


def host_of(snapshot: Snapshot, name: str) -> HostView:
    return next(host for host in snapshot.hosts if host.name == name)


def until(poller: Poller, holds: Callable[[Snapshot], Any]) -> Snapshot:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        snapshot = poller.poll()
        if holds(snapshot):
            return snapshot
        assert time.monotonic() < deadline, snapshot.hosts
        time.sleep(0.1)


def scripts_of(marker: bytes) -> set[int]:
    """Watch scripts on this machine, in all its namespaces, that are not of another test."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.1)


@pytest.mark.sshd
def test_one_connection_is_enough_and_nothing_stays(sshd: Sshd, fleet_of: MakeFleet) -> None:
    fleet = fleet_of(["box"], sshd.ssh_config)
    before = scripts_of(b"pdctl-script")
    with Poller(plan_of("box", "box"), fleet, interval_s=0.5) as poller:
        snapshot = poller.poll()
        assert host_of(snapshot, "box").error == ""
        assert snapshot.instances[0].ranks[0].error == "prefill-0 rank 0: nothing listens on port 15150"
        assert snapshot.instances[0].health_error == "prefill-0: nothing listens on port 15100"
        started = scripts_of(b"pdctl-script") - before
        assert started
    wait_until_gone(started)


@pytest.mark.sshd
def test_a_server_that_goes_away_and_comes_back(sshd: Sshd, fleet_of: MakeFleet) -> None:
    fleet = fleet_of(["box"], sshd.ssh_config)
    with Poller(plan_of("box", "box"), fleet, interval_s=0.5) as poller:
        assert host_of(poller.poll(), "box").error == ""
        sshd.stop()
        snapshot = until(poller, lambda snapshot: host_of(snapshot, "box").error)
        assert snapshot.instances[0].error.startswith("prefill-0: its host gives nothing: box: ")
        sshd.start()
        until(poller, lambda snapshot: not host_of(snapshot, "box").error)


@pytest.mark.root
def test_a_link_is_cut_and_heals_and_the_other_host_does_not_care(bed: Testbed, fleet_of: MakeFleet) -> None:
    away, here = bed.name(1), bed.name(2)
    fleet = fleet_of([away, here], bed.ssh_config)
    before = scripts_of(b"pdctl-script")
    with Poller(plan_of(away, here), fleet, interval_s=0.5) as poller:
        snapshot = poller.poll()
        assert [host.error for host in snapshot.hosts] == ["", ""]
        scripts = scripts_of(b"pdctl-script") - before
        assert scripts
        bed.call("cut", "root", away)
        snapshot = until(poller, lambda snapshot: host_of(snapshot, away).error)
        assert host_of(snapshot, away).error.startswith(f"{away}: nothing was heard of it for")
        # Its script ends by itself, since nobody shows that he listens.
        deadline = time.monotonic() + PATIENCE_S
        while all(Path(f"/proc/{pid}").exists() for pid in scripts):
            assert time.monotonic() < deadline
            snapshot = poller.poll()
            assert host_of(snapshot, here).error == ""
            age = host_of(snapshot, here).age_s
            assert age is not None
            assert age < 10
            time.sleep(0.2)
        bed.call("heal", "root", away)
        until(poller, lambda snapshot: not host_of(snapshot, away).error)
    wait_until_gone(scripts)


@pytest.mark.root
def test_a_host_that_is_off_is_found_again_when_it_boots(bed: Testbed, fleet_of: MakeFleet) -> None:
    away, here = bed.name(3), bed.name(4)
    fleet = fleet_of([away, here], bed.ssh_config, connect_timeout_s=5.0)
    with Poller(plan_of(away, here), fleet, interval_s=0.5) as poller:
        assert host_of(poller.poll(), away).error == ""
        bed.call("off", away)
        snapshot = until(poller, lambda snapshot: host_of(snapshot, away).error)
        assert host_of(snapshot, here).error == ""
        bed.up(8)
        until(poller, lambda snapshot: not host_of(snapshot, away).error)
