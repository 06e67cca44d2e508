"""The doctor's NIXL WRITE between two hosts of the test bed: real sshd, real NIXL over UCX TCP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.doctor.facts import HostFacts
from pdctl.doctor.probe import probe
from pdctl.doctor.probe_facts import ProbeFacts
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan, make_plan
from pdctl.spec import parse
from tests.e2e.cluster import REPOSITORY, RUNTIME_PYTHON
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.e2e, pytest.mark.root]

TIMEOUT_S = 120


@pytest.fixture(scope="module")
def nixl_python() -> str:
    """A Python that has NIXL; vLLM is not needed here."""
    found = "import importlib.util as u, sys; sys.exit(u.find_spec('nixl') is None)"
    if subprocess.run([RUNTIME_PYTHON, "-c", found], check=False, timeout=60).returncode != 0:
        pytest.skip(f"{RUNTIME_PYTHON} has no NIXL: make setup")
    return RUNTIME_PYTHON


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    made = Testbed.for_tests()
    made.down()
    try:
        made.up(4)
        yield made
    finally:
        made.down()


@pytest.fixture(autouse=True)
def nothing_is_left(bed: Testbed) -> Iterator[None]:
    """Neither processes nor ports stay on the hosts, whatever happened."""
    yield
    for name in bed.names(4):
        bed.call("heal", "root", name)
        bed.call("fast", name)
        for other in bed.names(4):
            if other != name:
                bed.call("heal", name, other)
    for number in range(1, 5):
        for _ in range(200):
            left = leftovers(bed, number)
            if not left:
                break
            time.sleep(0.05)
        assert not left


def leftovers(bed: Testbed, number: int) -> list[str]:
    """Processes of the probe on a host, and ports that listen there besides sshd's."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null; echo; done; cat /proc/net/tcp"
    lines = bed.call("exec", bed.name(number), "sh", "-c", script).splitlines()
    processes = [line for line in lines if "pdctl-script" in line or "pdctl-probe" in line]
    rows = [line.split() for line in lines if line.strip()[:1].isdigit() and ": " in line]
    ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3:4] == ["0A"]}
    return [*processes, *(f"port {port}" for port in ports - {22})]


@pytest.fixture
def plan_of(bed: Testbed, nixl_python: str, tmp_path: Path) -> Callable[..., ClusterPlan]:
    def hosts(numbers: tuple[int, ...], more: dict[int, dict[str, str]]) -> list[dict[str, str]]:
        return [{"name": bed.name(n), "address": bed.address(n), **more.get(n, {})} for n in numbers]

    def make(
        prefill: tuple[int, ...] = (1,), decode: tuple[int, ...] = (2,), more: dict[int, dict[str, str]] | None = None
    ) -> ClusterPlan:
        data = {
            "cluster": "probe",
            "model": "demo",
            "accelerator": "cpu",
            "fabric": "tcp",
            "python": nixl_python,
            "env": {"UCX_NET_DEVICES": "eth0"},
            "prefill": {"hosts": hosts(prefill, more or {})},
            "decode": {"hosts": hosts(decode, more or {})},
            "router": {"host": bed.name(prefill[0])},
            "ssh": {"config_file": str(bed.ssh_config), "connect_timeout_s": 5},
        }
        spec = parse(json.dumps(data), file=str(tmp_path / "cluster.yaml"), environ={})
        return make_plan(spec, environ={}, connector_digest="0" * 64)

    return make


def run(plan: ClusterPlan, *, pairs: int | None = None, on_done: Callable[..., None] | None = None) -> ProbeFacts:
    with Fleet(plan.spec) as fleet:
        facts = probe(
            fleet,
            plan,
            {name: HostFacts(name) for name in plan.hosts},
            pairs=pairs,
            timeout_s=TIMEOUT_S,
            on_done=on_done,
        )
    for result in facts.results:
        print(result)
    return facts


def baseline(bed: Testbed, number: int, name: str) -> dict[str, Any]:
    # Each host has a ~/.pdctl of its own.
    file = bed.folder / bed.name(number) / "pdctl-home/probe" / name
    assert file.stat().st_mode & 0o777 == 0o600
    value: dict[str, Any] = json.loads(file.read_text())
    return value


def test_two_good_hosts(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    (result,) = run(plan_of()).results
    assert (result.ok, result.stage, result.error) == (True, "done", "")
    assert (result.prefill, result.decode) == (one, two)
    assert (result.backend, result.transport, result.memory) == ("UCX", "tcp", "host")
    assert "inter-node write" in result.transport_evidence
    assert "tcp/eth0" in result.transport_evidence
    assert "bytes received by eth0 of the decode host" in result.transport_evidence
    assert result.batch_bytes is not None
    assert result.block_bytes is not None
    assert result.batch_bytes > 100 * result.block_bytes / 2
    assert result.bandwidth_mb_s is not None
    assert result.bandwidth_mb_s > 10
    assert result.block_p50_us is not None
    assert result.block_p99_us is not None
    assert 10 < result.block_p50_us <= result.block_p99_us
    assert result.notification_us is not None
    assert result.notification_us > 1
    for number, name in ((1, f"to-{two}.json"), (2, f"from-{one}.json")):
        kept = baseline(bed, number, name)
        assert (kept["prefill"], kept["decode"], kept["transport"]) == (one, two, "tcp")
        assert kept["bandwidth_mb_s"] == result.bandwidth_mb_s
        assert abs(kept["at"] - time.time()) < 300


def test_pairs_of_different_hosts_at_once(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    facts = run(plan_of((1, 2), (3, 4)), pairs=2)
    assert [(result.prefill, result.decode, result.ok) for result in facts.results] == [
        (bed.name(1), bed.name(3), True),
        (bed.name(2), bed.name(4), True),
    ]
    assert set(facts.not_probed) == {(bed.name(1), bed.name(4)), (bed.name(2), bed.name(3))}


def test_a_slow_link_gets_a_smaller_batch(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    bed.call("slow", bed.name(1), "200mbit")
    (result,) = run(plan_of()).results
    assert result.ok
    assert result.bandwidth_mb_s is not None
    assert 5 < result.bandwidth_mb_s < 40
    assert "for the network is slow" in result.transport_evidence


def test_a_link_that_is_cut_before(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    bed.call("cut", one, two)
    started = time.monotonic()
    (result,) = run(plan_of()).results
    assert time.monotonic() - started < 90
    assert (result.ok, result.stage) == (False, "handshake")
    assert "NIXL got no answer from" in result.error
    assert "does a firewall or security group drop packets?" in result.error
    assert "UCX" in result.log


def test_a_link_that_is_cut_in_the_middle(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    bed.call("slow", one, "100mbit")

    def cut() -> None:
        # As soon as WRITEs are on their way.
        counter = Path(f"/sys/class/net/{bed.bridge}-{one}/statistics/rx_bytes")
        before = int(counter.read_text())
        for _ in range(1200):
            if int(counter.read_text()) - before > 20_000_000:
                break
            time.sleep(0.05)
        bed.call("cut", one, two)

    cutting = threading.Thread(target=cut)
    cutting.start()
    started = time.monotonic()
    (result,) = run(plan_of()).results
    cutting.join(60)
    assert time.monotonic() - started < 110
    assert (result.ok, result.stage) == (False, "write")
    assert "WRITE" in result.error
    assert result.error.startswith(f"{one}: ")
    with contextlib.suppress(FileNotFoundError):
        # No baseline of this one.
        assert baseline(bed, 1, f"to-{two}.json")["at"] < time.time() - 5


def test_a_host_that_dies_in_the_middle(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    one, two = bed.name(1), bed.name(2)
    bed.call("slow", one, "100mbit")

    def kill() -> None:
        counter = Path(f"/sys/class/net/{bed.bridge}-{one}/statistics/rx_bytes")
        before = int(counter.read_text())
        for _ in range(1200):
            if int(counter.read_text()) - before > 20_000_000:
                break
            time.sleep(0.05)
        bed.call("off", two)

    killing = threading.Thread(target=kill)
    killing.start()
    started = time.monotonic()
    (result,) = run(plan_of()).results
    killing.join(60)
    bed.up(4)
    assert time.monotonic() - started < 110
    assert not result.ok
    assert result.stage in ("write", "timeout", "register", "handshake")
    assert result.error


def test_a_decode_host_without_nixl(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    (result,) = run(plan_of(more={2: {"python": "/usr/bin/python3"}})).results
    assert (result.ok, result.stage) == (False, "import")
    assert result.error.startswith(f"{bed.name(2)}: this Python (/usr/bin/python3")
    assert "cannot import NIXL: No module named" in result.error


def test_a_python_that_is_not_there(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    (result,) = run(plan_of(more={1: {"python": "~/no-venv/bin/python"}})).results
    assert (result.ok, result.stage) == (False, "start")
    assert "no-venv/bin/python does not exist on this host" in result.error


def test_the_address_of_decode_leads_elsewhere(bed: Testbed, plan_of: Callable[..., ClusterPlan]) -> None:
    """Host 1 has the address of host 2 as well: what it sends there goes to itself."""
    bed.call("exec", bed.name(1), "ip", "addr", "add", f"{bed.address(2)}/32", "dev", "lo")
    try:
        (result,) = run(plan_of()).results
    finally:
        bed.call("exec", bed.name(1), "ip", "addr", "del", f"{bed.address(2)}/32", "dev", "lo")
    assert (result.ok, result.stage) == (False, "handshake")
    assert result.error


def test_ctrl_c_in_the_middle_leaves_nothing(bed: Testbed, plan_of: Callable[..., ClusterPlan], tmp_path: Path) -> None:
    one = bed.name(1)
    bed.call("slow", one, "100mbit")
    plan = plan_of()
    (tmp_path / "cluster.json").write_text(plan.spec.model_dump_json(exclude_unset=True))
    script = textwrap.dedent(
        f"""
        from pathlib import Path
        from pdctl.doctor.facts import HostFacts
        from pdctl.doctor.probe import probe
        from pdctl.hosts.fleet import Fleet
        from pdctl.plan import make_plan
        from pdctl.spec import load
        spec = load(Path({str(tmp_path / "cluster.json")!r}), {{}})
        plan = make_plan(spec, environ={{}}, connector_digest="0" * 64)
        with Fleet(spec) as fleet:
            probe(fleet, plan, {{name: HostFacts(name) for name in plan.hosts}}, pairs=None, timeout_s=100)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "connector")])},
        stderr=subprocess.PIPE,
    )
    counter = Path(f"/sys/class/net/{bed.bridge}-{one}/statistics/rx_bytes")
    before = int(counter.read_text())
    for _ in range(1200):
        if int(counter.read_text()) - before > 20_000_000:
            break
        time.sleep(0.05)
    assert leftovers(bed, 1)
    assert leftovers(bed, 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert b"KeyboardInterrupt" in errors
