"""Collecting the doctor's facts from real hosts over SSH."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pdctl.doctor.collect import collect
from pdctl.doctor.facts import HostFacts, read_facts
from pdctl.errors import HostError, HostUnreachable, PdctlError
from pdctl.hosts.agent import call
from pdctl.hosts.local import LocalHost
from pdctl.plan import ClusterPlan
from tests.integration.conftest import MakeFleet
from tests.support.plans import changed, planned
from tests.testbed.hosts import Testbed
from tests.testbed.sshd import Sshd

TIMEOUT_S = 40
PYTHON = sys.executable


def plan_for(prefill: list[tuple[str, str]], decode: list[tuple[str, str]], python: str = PYTHON) -> ClusterPlan:
    def hosts(pairs: list[tuple[str, str]]) -> dict[str, Any]:
        return {"hosts": [{"name": name, "address": address} for name, address in pairs]}

    data = changed(accelerator="cpu", python=python, model="/no/such/model", router={"host": prefill[0][0]})
    return planned({**data, "prefill": hosts(prefill), "decode": hosts(decode)})


@pytest.fixture
def pair(bed: Testbed) -> ClusterPlan:
    """A plan for the first two hosts."""
    return plan_for([(bed.name(1), bed.address(1))], [(bed.name(2), bed.address(2))])


@pytest.mark.root
@pytest.mark.sshd
class TestHosts:
    def test_a_good_run(self, bed: Testbed, fleet_of: MakeFleet, pair: ClusterPlan) -> None:
        names = bed.names(2)
        done: list[str] = []
        facts, unreachable = collect(
            fleet_of(names, bed.ssh_config), pair, timeout_s=TIMEOUT_S, on_done=lambda name, _: done.append(name)
        )
        assert unreachable == {}
        assert list(facts) == names
        assert sorted(done) == names
        first, second = facts.values()
        assert "reading it failed" not in str(dict(first.missing))
        assert first.system is not None
        assert second.system is not None
        assert (first.system.hostname, second.system.hostname) == tuple(names)
        # One machine, but two network namespaces: for all that counts here, two hosts.
        assert first.system.machine_id != second.system.machine_id
        assert first.network is not None
        route = first.network.routes[0]
        assert (route.address, route.source, route.mtu, route.error) == (bed.address(2), bed.address(1), 1500, "")
        assert any(f"{bed.address(1)}/24" in one.addresses for one in first.network.interfaces)
        assert any(one.port == 22 and "sshd" in one.process for one in first.network.listeners)
        assert first.ports
        assert all(port.free for port in first.ports)
        assert {port.purpose for port in first.ports} >= {"API", "side channel"}
        assert first.interpreter(PYTHON) is not None
        assert first.interpreter(PYTHON).ok  # type: ignore[union-attr]
        # The same clock: all of the difference is in how long the answer took.
        assert first.clock_offset_s is not None
        assert first.clock_error_s is not None
        assert abs(first.clock_offset_s) <= first.clock_error_s + 0.05

    def test_a_host_that_is_off(self, bed: Testbed, fleet_of: MakeFleet, pair: ClusterPlan) -> None:
        bed.call("off", bed.name(2))
        facts, unreachable = collect(
            fleet_of(bed.names(2), bed.ssh_config, connect_timeout_s=3.0), pair, timeout_s=TIMEOUT_S
        )
        assert list(facts) == [bed.name(1)]
        assert list(unreachable) == [bed.name(2)]
        assert isinstance(unreachable[bed.name(2)], HostUnreachable)

    def test_a_link_that_is_cut(self, bed: Testbed, fleet_of: MakeFleet, pair: ClusterPlan) -> None:
        fleet = fleet_of(bed.names(2), bed.ssh_config, connect_timeout_s=3.0)
        facts, _ = collect(fleet, pair, timeout_s=TIMEOUT_S)
        assert len(facts) == 2
        # The connection stands, and nothing comes through it any more.
        bed.call("cut", "root", bed.name(2))
        facts, unreachable = collect(fleet, pair, timeout_s=4)
        assert list(facts) == [bed.name(1)]
        assert isinstance(unreachable[bed.name(2)], HostError)

    def test_a_host_without_the_interpreter(self, bed: Testbed, fleet_of: MakeFleet) -> None:
        plan = plan_for([(bed.name(1), bed.address(1))], [(bed.name(2), bed.address(2))], python="/opt/no/bin/python")
        facts, unreachable = collect(fleet_of(bed.names(2), bed.ssh_config), plan, timeout_s=TIMEOUT_S)
        assert unreachable == {}
        found = facts[bed.name(2)].interpreter("/opt/no/bin/python")
        assert found is not None
        assert (found.ok, found.error) == (False, "there is no file /opt/no/bin/python")
        assert facts[bed.name(2)].system is not None

    @pytest.mark.parametrize("ours", [False, True])
    def test_a_port_that_is_taken(self, bed: Testbed, fleet_of: MakeFleet, pair: ClusterPlan, ours: bool) -> None:
        port, address = pair.prefill[0].port, bed.address(1)
        marker = "PDCTL_MARKER=qwen3/prefill-0/0123456789ab " if ours else ""
        server = f"{PYTHON} -m http.server {port} --bind {address}"
        bed.call(
            "exec",
            bed.name(1),
            "sh",
            "-c",
            f"cd /; {marker}setsid {server} </dev/null >/dev/null 2>&1 & "
            f"until {PYTHON} -c 'import socket; socket.create_connection((\"{address}\", {port}), 1)'; do sleep 0.1; "
            "done 2>/dev/null",
        )
        # The host's processes end with the host: `up` boots it again.
        try:
            facts, _ = collect(fleet_of(bed.names(2), bed.ssh_config), pair, timeout_s=TIMEOUT_S)
        finally:
            bed.call("off", bed.name(1))
        ports = {entry.port: entry for entry in facts[bed.name(1)].ports or ()}
        taken = ports.pop(port)
        assert (taken.free, taken.error, taken.ours) == (False, "in-use", ours)
        assert taken.holder.endswith("-m http.server")
        assert ("pdctl instance qwen3/prefill-0" in taken.holder) is ours
        assert all(entry.free for entry in ports.values())


@pytest.mark.sshd
class TestAServer:
    """A server on loopback whose logins have an environment of our making."""

    def collect(
        self, tmp_path: Path, fleet_of: MakeFleet, options: list[str], timeout_s: float = TIMEOUT_S
    ) -> tuple[dict[str, HostFacts], dict[str, PdctlError]]:
        server = Sshd(tmp_path / "sshd", options=options)
        server.start()
        try:
            plan = plan_for([("box", "127.0.0.1")], [("box", "127.0.0.1")])
            return collect(fleet_of(["box"], server.ssh_config), plan, timeout_s=timeout_s)
        finally:
            server.stop()

    def test_a_program_that_hangs(self, tmp_path: Path, fleet_of: MakeFleet) -> None:
        programs = tmp_path / "bin"
        programs.mkdir()
        fake = programs / "nvidia-smi"
        fake.write_text(f"#!/bin/sh\ntrap '' TERM INT HUP\necho $$ >>{tmp_path}/pids\nwhile :; do sleep 60; done\n")
        fake.chmod(0o755)
        begin = time.monotonic()
        facts, unreachable = self.collect(
            tmp_path, fleet_of, [f'SetEnv "PATH={programs}:/usr/local/bin:/usr/bin:/bin" FI_PROVIDER=efa']
        )
        assert unreachable == {}
        found = facts["box"]
        assert found.nvidia is None
        assert "nvidia-smi did not end within" in found.missing["nvidia"]
        assert found.took_s is not None
        assert found.took_s < 10
        assert time.monotonic() - begin < TIMEOUT_S
        assert found.system is not None
        assert found.environment is not None
        assert found.environment["FI_PROVIDER"] == "efa"
        for pid in (tmp_path / "pids").read_text().split():
            assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()

    def test_noise_of_the_login_shell(self, tmp_path: Path, fleet_of: MakeFleet) -> None:
        noisy = tmp_path / "noisy"
        noisy.write_text(
            '#!/bin/sh\necho "Welcome to box"; printf "no line break"\nexec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        noisy.chmod(0o755)
        facts, unreachable = self.collect(tmp_path, fleet_of, [f"ForceCommand {noisy}"])
        assert unreachable == {}
        assert facts["box"].system is not None

    def test_a_host_that_runs_nothing(self, tmp_path: Path, fleet_of: MakeFleet) -> None:
        facts, unreachable = self.collect(tmp_path, fleet_of, ["ForceCommand echo This account is disabled."])
        assert facts == {}
        assert "This account is disabled" in unreachable["box"].message


@pytest.mark.e2e
def test_nixl_and_its_plugins_are_really_loaded() -> None:
    request = {
        "pythons": [PYTHON],
        "plugins": ["UCX", "LIBFABRIC", "NO_SUCH"],
        "timeouts": {"interpreters": 30, "total": 30},
    }
    document = call(LocalHost(), "collect", request, timeout_s=60, script="facts")
    found = read_facts("local", document).interpreter(PYTHON)
    assert found is not None
    assert found.packages["nixl"] == importlib.metadata.version("nixl")
    assert found.nixl is not None
    assert found.nixl.error == ""
    assert "UCX" in found.nixl.plugins
    assert found.nixl.failed["NO_SUCH"] == "this NIXL has no such plugin"
    # The wheel has no libfabric: the plugin loads where the system has one, and is explained where it has not.
    if "LIBFABRIC" in found.nixl.plugins:
        assert Path(found.nixl.libfabric_path).name.startswith("libfabric.so")
    else:
        assert "cannot open shared object file" in found.nixl.failed["LIBFABRIC"]
        missing = found.nixl.missing_libraries["libplugin_LIBFABRIC.so"]
        assert missing
        assert not any(name.startswith(("libnixl", "libserdes")) for name in missing)
