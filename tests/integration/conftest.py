"""Real SSH servers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdctl.hosts.base import FleetSettings, Login, SshSettings
from pdctl.hosts.fleet import Fleet
from tests.testbed.hosts import Testbed
from tests.testbed.sshd import Sshd

BED_SIZE = 8


@pytest.fixture(scope="session")
def bed_session() -> Iterator[Testbed]:
    """Hosts in network namespaces, for all tests together."""
    bed = Testbed.for_tests()
    # What a killed run left behind.
    bed.down()
    try:
        bed.up(BED_SIZE)
        yield bed
    finally:
        bed.down()


@pytest.fixture
def bed(bed_session: Testbed) -> Iterator[Testbed]:
    """Hosts in network namespaces, all of them up and connected, before and after."""
    yield bed_session
    for name in bed_session.names(BED_SIZE):
        bed_session.call("heal", "root", name)
    bed_session.up(BED_SIZE)


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    """A server on loopback, known to its client as `box`."""
    server = Sshd(tmp_path / "sshd")
    server.start()
    try:
        yield server
    finally:
        server.stop()


MakeFleet = Callable[..., Fleet]


@pytest.fixture
def fleet_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MakeFleet]:
    """Makes fleets, closed at the end. They see nothing of the login that runs the tests: no agent, no ~/.ssh."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("PDCTL_SSH_CONFIG", raising=False)
    (tmp_path / "home").mkdir()
    fleets: list[Fleet] = []

    def make(names: list[str], config: Path, **settings: object) -> Fleet:
        fleet = Fleet(
            FleetSettings(
                {name: Login() for name in names},
                SshSettings(**{"connect_timeout_s": 15.0, **settings, "config_file": str(config)}),
            )
        )
        fleets.append(fleet)
        return fleet

    yield make
    for fleet in fleets:
        fleet.close()
