"""Many hosts at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pdctl.errors import CommandTimeout, HostUnreachable, PdctlError, UsageError
from pdctl.hosts.base import FleetSettings, Login, SshSettings
from pdctl.hosts.fleet import Fleet, settings_from_spec
from pdctl.spec import parse

NAMES = [f"h{number}" for number in range(10)]


class FakeHost:
    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeFleet(Fleet):
    """A fleet whose hosts are made of nothing."""

    def __init__(self, max_parallel: int = 32) -> None:
        settings = FleetSettings({name: Login() for name in NAMES}, SshSettings(max_parallel=max_parallel))
        super().__init__(settings, environ={})
        self.made: list[FakeHost] = []

    def _make(self, name: str) -> FakeHost:
        self.made.append(FakeHost(name))
        return self.made[-1]


class TestMap:
    def test_results_come_in_the_order_of_the_names(self) -> None:
        def work(host) -> str:
            time.sleep(0.02 * (10 - int(host.name[1:])) / 10)
            return host.name.upper()

        names = [*reversed(NAMES), NAMES[0]]
        results = FakeFleet().map(work, names, timeout_s=20)
        assert list(results.items()) == [(name, name.upper()) for name in reversed(NAMES)]

    def test_no_hosts(self) -> None:
        assert FakeFleet().map(lambda host: host.name, [], timeout_s=1) == {}

    def test_errors_stand_for_their_host_alone(self) -> None:
        def work(host) -> str:
            if host.name == "h3":
                raise HostUnreachable(host.name, "is gone")
            return host.name

        told: dict[str, object] = {}
        results = FakeFleet().map(work, NAMES, timeout_s=20, on_done=told.__setitem__)
        assert isinstance(results["h3"], HostUnreachable)
        assert [name for name, result in results.items() if result == name] == [n for n in NAMES if n != "h3"]
        assert told == results

    def test_a_host_that_hangs_holds_up_nobody(self) -> None:
        release = threading.Event()

        def work(host) -> str:
            if host.name in ("h0", "h1"):
                release.wait(60)
            return host.name

        try:
            started = time.monotonic()
            results = FakeFleet(max_parallel=2).map(work, NAMES, timeout_s=0.2)
            assert time.monotonic() - started < 20
        finally:
            release.set()
        assert isinstance(results["h0"], CommandTimeout)
        assert isinstance(results["h1"], CommandTimeout)
        assert "h0: no result within 0.2 s" in str(results["h0"])
        assert all(results[name] == name for name in NAMES[2:])

    def test_a_late_result_is_not_taken(self) -> None:
        release = threading.Event()
        told: list[str] = []

        def work(host) -> str:
            if host.name == "h0":
                release.wait(60)
                return "late"
            if host.name == "h1":
                # Starts only once h0 was given up.
                release.set()
                time.sleep(0.1)
            return "in time"

        results = FakeFleet(max_parallel=1).map(
            work, ["h0", "h1"], timeout_s=0.3, on_done=lambda name, _: told.append(name)
        )
        assert isinstance(results["h0"], CommandTimeout)
        assert results["h1"] == "in time"
        assert told == ["h0", "h1"]

    @pytest.mark.parametrize("limit", [1, 3])
    def test_no_more_at_once_than_allowed(self, limit: int) -> None:
        lock = threading.Lock()
        running, most = 0, 0

        def work(_host) -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.01)
            with lock:
                running -= 1

        FakeFleet(max_parallel=limit).map(work, NAMES, timeout_s=20)
        assert most == limit

    def test_a_bug_is_raised(self) -> None:
        def work(host) -> None:
            if host.name == "h5":
                raise ZeroDivisionError("a bug")

        with pytest.raises(ZeroDivisionError, match="a bug"):
            FakeFleet().map(work, NAMES, timeout_s=20)

    def test_what_on_done_raises_is_raised(self) -> None:
        def stop(name: str, result: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            FakeFleet().map(lambda host: host.name, NAMES, timeout_s=20, on_done=stop)


class TestHosts:
    def test_a_host_is_made_once(self) -> None:
        fleet = FakeFleet()
        assert fleet.host("h1") is fleet.host("h1")
        assert len(fleet.made) == 1

    def test_an_unknown_name(self) -> None:
        with (
            Fleet(FleetSettings({"a": Login(), "b": Login()}), environ={}) as fleet,
            pytest.raises(UsageError, match="no host x in the cluster file") as caught,
        ):
            fleet.host("x")
        assert caught.value.hint == "it has: a, b"

    def test_closing(self) -> None:
        with FakeFleet() as fleet:
            host = fleet.host("h1")
        assert host.closed
        fleet.close()
        with pytest.raises(PdctlError, match="closed"):
            fleet.host("h1")

    def test_local_hosts_need_no_ssh(self) -> None:
        with Fleet(FleetSettings({"local": Login()}), environ={"PDCTL_SSH_CONFIG": "/no/such"}) as fleet:
            assert fleet.host("local").run(["echo", "here"], timeout_s=20).stdout == b"here\n"

    def test_a_bad_ssh_configuration_is_an_error_of_the_user(self) -> None:
        with Fleet(FleetSettings({"box": Login()}), environ={"PDCTL_SSH_CONFIG": "/no/such"}) as fleet:
            results = fleet.map(lambda host: host.name, ["box"], timeout_s=20)
        assert isinstance(results["box"], UsageError)


CLUSTER = """
cluster: demo
model: a/b
accelerator: cpu
fabric: tcp
ssh: {{user: me, identity_file: {identity}, host_keys: accept-new, max_parallel: 7{more}}}
prefill: {{hosts: [p1, {{name: both, ssh_user: own, ssh_port: 5}}]}}
decode: {{hosts: [{{name: both, ssh_user: own, ssh_port: 5}}, d1]}}
router: {{host: gate}}
"""


class TestSettings:
    def read(self, identity: str = "keys/id", more: str = "") -> FleetSettings:
        text = CLUSTER.format(identity=identity, more=more)
        return settings_from_spec(parse(text, file="/clusters/demo.yaml", environ={}))

    def test_from_a_cluster_file(self) -> None:
        settings = self.read(more=", config_file: ~/cfg, port: 9, connect_timeout_s: 4")
        assert list(settings.logins) == ["p1", "both", "d1", "gate"]
        assert settings.logins["both"] == Login(user="own", port=5)
        assert settings.ssh == SshSettings(
            user="me",
            port=9,
            identity_file="/clusters/keys/id",
            config_file="~/cfg",
            accept_new_keys=True,
            connect_timeout_s=4.0,
            max_parallel=7,
        )

    def test_what_is_not_given_is_left_to_ssh(self) -> None:
        assert self.read().ssh.connect_timeout_s is None
        assert self.read("~/id").ssh.identity_file == "~/id"
        assert self.read("/abs/id").ssh.identity_file == "/abs/id"


def test_nothing_heavy_is_imported_without_ssh_hosts() -> None:
    program = (
        "import sys; from pdctl.hosts.base import *; from pdctl.hosts.fleet import Fleet; import pdctl.hosts.agent\n"
        "Fleet(FleetSettings({'local': Login()})).host('local')\n"
        "print([m for m in ('paramiko', 'fabric', 'invoke', 'cryptography', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"
