"""Planned ports opened for real between hosts of the test bed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdctl.doctor.facts import HostFacts, PlannedPort
from pdctl.doctor.network import check_network
from pdctl.doctor.network_facts import NetworkFacts, Reach
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan, make_plan
from pdctl.spec import parse
from tests.testbed.hosts import SYSTEM_PATH, Testbed

pytestmark = pytest.mark.root

TIMEOUT_S = 30
DATA = "KV data over TCP (any free port)"
LISTEN = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(sys.argv[3].encode())
    time.sleep(0.2)
    connection.close()
"""


@pytest.fixture
def plan_of(bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ClusterPlan]:
    """Makes plans for numbered hosts of the bed."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / "home").mkdir()

    def make(
        prefill: tuple[int, ...] = (1,), decode: tuple[int, ...] = (2,), addresses: dict[int, str] | None = None
    ) -> ClusterPlan:
        def hosts(numbers: tuple[int, ...]) -> list[dict[str, str]]:
            known = addresses or {}
            return [{"name": bed.name(number), "address": known.get(number, bed.address(number))} for number in numbers]

        data = {
            "cluster": "ports",
            "model": "demo",
            "accelerator": "cpu",
            "fabric": "tcp",
            "prefill": {"hosts": hosts(prefill)},
            "decode": {"hosts": hosts(decode)},
            "router": {"host": bed.name(prefill[0])},
            "ssh": {"config_file": str(bed.ssh_config), "connect_timeout_s": 5},
        }
        spec = parse(json.dumps(data), file=str(tmp_path / "cluster.yaml"), environ={})
        return make_plan(spec, environ={}, connector_digest="0" * 64)

    return make


def check(plan: ClusterPlan, facts: dict[str, HostFacts] | None = None) -> NetworkFacts:
    told: list[str] = []
    known = facts if facts is not None else {name: HostFacts(name) for name in plan.hosts}
    with Fleet(plan.spec) as fleet:
        found = check_network(fleet, plan, known, timeout_s=TIMEOUT_S, on_done=told.append)
    assert sorted(told) == sorted(known)
    return found


def by_way(facts: NetworkFacts) -> dict[tuple[str, str, str], Reach]:
    return {(one.source, one.target, one.purpose): one for one in facts.reaches}


@contextlib.contextmanager
def listener(bed: Testbed, number: int, address: str, port: int, says: str = "") -> Iterator[None]:
    """Somebody else's server on a host."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", bed.name(number), "/usr/bin/env", "python3", "-c", LISTEN, address, str(port), says],
        stdout=subprocess.PIPE,
        env={"PATH": SYSTEM_PATH},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.communicate()


def in_host(bed: Testbed, number: int, *words: str) -> str:
    return bed.call("exec", bed.name(number), *words)


def listening_ports(bed: Testbed, number: int) -> set[int]:
    text = in_host(bed, number, "cat", "/proc/net/tcp")
    rows = [line.split() for line in text.splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def test_two_good_hosts(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    facts = check(plan_of())
    found = by_way(facts)
    assert set(found) == {
        (one, two, "side channel"),
        (two, one, "side channel"),
        (one, two, DATA),
        (two, one, DATA),
        (one, one, "API"),
        (one, two, "API"),
    }
    assert {reach.outcome for reach in facts.reaches} == {"open"}
    assert all(reach.connect_ms is not None and reach.port > 0 for reach in facts.reaches)
    assert [(mtu.source, mtu.target, mtu.interface_mtu, mtu.path_mtu, mtu.detail) for mtu in facts.mtus] == [
        (one, two, 1500, 1500, ""),
        (two, one, 1500, 1500, ""),
    ]
    # Nothing stays behind.
    for number in (1, 2):
        for _ in range(100):
            if listening_ports(bed, number) == {22}:
                break
            time.sleep(0.05)
        assert listening_ports(bed, number) == {22}


def test_a_cut_link(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two, three = (bed.name(number) for number in (1, 2, 3))
    bed.call("cut", one, two)
    try:
        started = time.monotonic()
        facts = check(plan_of((1,), (2, 3)))
        took_s = time.monotonic() - started
    finally:
        bed.call("heal", one, two)
    found = by_way(facts)
    assert took_s < TIMEOUT_S
    for way in ((one, two, "side channel"), (two, one, "side channel"), (one, two, DATA), (one, two, "API")):
        assert (found[way].outcome, found[way].connect_ms) == ("timeout", None)
        assert "no answer within 3 s" in found[way].detail
    assert found[one, three, "side channel"].outcome == "open"
    assert {(mtu.source, mtu.target) for mtu in facts.mtus} == {(one, three), (three, one)}


def test_a_port_that_a_firewall_drops(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    bed.call("block", two, "tcp", "5700")
    try:
        found = by_way(check(plan_of()))
    finally:
        bed.call("unblock", two, "tcp", "5700")
    assert found[one, two, "side channel"].outcome == "timeout"
    assert found[one, two, "API"].outcome == "open"


def test_a_port_that_another_process_holds(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    with listener(bed, 2, bed.address(2), 5700):
        found = by_way(check(plan_of()))
    reach = found[one, two, "side channel"]
    assert (reach.outcome, reach.detail, reach.port) == ("no-listener", "another process holds port 5700", 5700)
    assert found[one, two, "API"].outcome == "open"


def test_a_port_that_our_running_instance_holds(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    held = PlannedPort(port=5700, address=bed.address(2), purpose="side channel", free=False, error="in-use", ours=True)
    with listener(bed, 2, bed.address(2), 5700):
        facts = check(plan_of(), {one: HostFacts(one), two: HostFacts(two, ports=(held,))})
    assert by_way(facts)[one, two, "side channel"].outcome == "open"
    # Measured over the data port instead.
    assert (one, two) in {(mtu.source, mtu.target) for mtu in facts.mtus}


def test_an_address_that_is_another_hosts(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    plan = plan_of(addresses={2: bed.address(3)})
    reach = by_way(check(plan))[one, two, "side channel"]
    assert (reach.outcome, reach.detail) == ("no-listener", "the address is none of this host")


def test_somebody_else_answers_at_the_address(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    """Host 1 has the address of host 2 as well: what it sends there goes to itself."""
    one, two = bed.name(1), bed.name(2)
    in_host(bed, 1, "ip", "addr", "add", f"{bed.address(2)}/32", "dev", "lo")
    try:
        with listener(bed, 1, bed.address(2), 5700, "hello\n"), listener(bed, 1, bed.address(2), 8200):
            found = by_way(check(plan_of()))
    finally:
        in_host(bed, 1, "ip", "addr", "del", f"{bed.address(2)}/32", "dev", "lo")
    assert found[one, two, "side channel"].outcome == "wrong-peer"
    assert found[one, two, "API"].outcome == "wrong-peer"
    # Nobody has the data port there.
    assert found[one, two, DATA].outcome == "refused"


def test_large_packets_that_get_lost(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    """What happens with jumbo frames where a switch does not take them, scaled down."""
    one, two = bed.name(1), bed.name(2)
    # The operator's own connection is not to suffer from it.
    rule = f"ip saddr {bed.address(1)} meta length > 1400 drop"
    drop = f"table inet sizes {{ chain in {{ type filter hook input priority 0; {rule}; }}; }}"
    in_host(bed, 2, "nft", drop)
    try:
        facts = check(plan_of())
    finally:
        in_host(bed, 2, "nft", "delete", "table", "inet", "sizes")
    assert {reach.outcome for reach in facts.reaches} == {"open"}
    found = {(mtu.source, mtu.target): mtu for mtu in facts.mtus}
    assert (found[one, two].interface_mtu, found[one, two].path_mtu) == (1500, 1400)
    assert "packets of 1500 bytes do not arrive" in found[one, two].detail
    assert found[two, one].path_mtu == 1500


def test_interfaces_with_different_sizes(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    in_host(bed, 2, "ip", "link", "set", "eth0", "mtu", "1400")
    try:
        facts = check(plan_of())
    finally:
        in_host(bed, 2, "ip", "link", "set", "eth0", "mtu", "1500")
    found = {(mtu.source, mtu.target): (mtu.interface_mtu, mtu.path_mtu) for mtu in facts.mtus}
    assert found[bed.name(1), bed.name(2)] == (1500, 1400)
    assert found[bed.name(2), bed.name(1)] == (1400, 1400)


def test_a_dead_host(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    """Dead since its facts were collected: said, and the others are not held up."""
    one, two, three = (bed.name(number) for number in (1, 2, 3))
    bed.call("off", two)
    try:
        found = by_way(check(plan_of((1,), (2, 3))))
    finally:
        bed.up(8)
    assert found[one, two, "side channel"].outcome == "not-tried"
    assert two in found[one, two, "side channel"].detail
    assert found[two, one, "side channel"].outcome == "not-tried"
    assert found[one, three, "side channel"].outcome == "open"


def test_a_host_without_facts_is_not_bothered(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    found = by_way(check(plan_of(), {one: HostFacts(one)}))
    assert found[one, two, "side channel"].outcome == "not-tried"
    assert found[one, one, "API"].outcome == "open"


def test_many_hosts(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    facts = check(plan_of((1, 2, 3, 4), (5, 6, 7, 8)))
    assert {reach.outcome for reach in facts.reaches} == {"open"}
    assert len(facts.reaches) == 2 * 2 * 16 + 8
    assert len(facts.mtus) == 2 * 16
