"""`pdctl bench fabric` between two hosts of the test bed: real sshd, real NIXL over UCX TCP, no vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.bench.fabric import FabricResults, read_fabric
from tests.e2e.cluster import REPOSITORY, RUNTIME_PYTHON
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.e2e, pytest.mark.root]

# As the `pdctl` command does, with its errors and exit codes.
_RUN = """
import sys
from pdctl.cli import main
from pdctl.cli.bench_fabric import command
main.cli = command
main.main()
"""
_SIZES = ("--block-sizes", "16K,256K", "--descriptors", "1,3,16", "--repeats", "5")


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    found = "import importlib.util as u, sys; sys.exit(u.find_spec('nixl') is None)"
    if subprocess.run([RUNTIME_PYTHON, "-c", found], check=False, timeout=60).returncode != 0:
        pytest.skip(f"{RUNTIME_PYTHON} has no NIXL: make setup")
    made = Testbed.for_tests()
    made.down()
    try:
        made.up(2)
        yield made
    finally:
        made.down()


@pytest.fixture
def cluster(bed: Testbed, tmp_path: Path) -> Path:
    def host(number: int) -> dict[str, str]:
        return {"name": bed.name(number), "address": bed.address(number)}

    data = {
        "cluster": "fabric",
        "model": "demo",
        "accelerator": "cpu",
        "fabric": "tcp",
        "python": RUNTIME_PYTHON,
        "env": {"UCX_NET_DEVICES": "eth0"},
        "prefill": {"hosts": [host(1)]},
        "decode": {"hosts": [host(2)]},
        "router": {"host": bed.name(1)},
        "ssh": {"config_file": str(bed.ssh_config), "connect_timeout_s": 5},
    }
    (tmp_path / "cluster.yaml").write_text(json.dumps(data))
    return tmp_path / "cluster.yaml"


def start(*words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "connector")])
    return subprocess.Popen(
        [sys.executable, "-c", _RUN, *words],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def shape(results: FabricResults) -> list[tuple[int, int]]:
    return [(point.block_bytes, point.descriptors) for point in results.points]


def test_a_sweep(bed: Testbed, cluster: Path, tmp_path: Path) -> None:
    out = tmp_path / "fabric.json"
    process = start("-f", str(cluster), *_SIZES, "--out", str(out))
    text, progress = process.communicate(timeout=120)
    print(text, progress)
    assert process.returncode == 0
    results = read_fabric(out)
    assert results.complete
    assert shape(results) == [
        (16 << 10, 1),
        (16 << 10, 3),
        (16 << 10, 16),
        (256 << 10, 1),
        (256 << 10, 3),
        (256 << 10, 16),
    ]
    for point in results.points:
        assert (point.prefill, point.decode) == (bed.name(1), bed.name(2))
        assert (point.writes, point.transport) == (5, "tcp")
        assert 1e-6 < point.min_s <= point.p50_s <= point.p99_s < 20
    (pair,) = results.pairs
    assert (pair.backend, pair.memory, pair.error, pair.left_out) == ("UCX", "host", "", ())
    assert "tcp/eth0" in pair.transport_evidence
    assert pair.notification_s is not None
    assert all("nixl" in one.versions for one in results.hosts)
    assert f"{pair.name} (tcp, UCX, host memory), GB/s" in text
    assert "16 x 256 KiB (6 of 6: " in progress


def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing(bed: Testbed, cluster: Path, tmp_path: Path) -> None:
    out = tmp_path / "fabric.json"
    bed.call("slow", bed.name(1), "200mbit")
    process = start(
        "-f", str(cluster), "--block-sizes", "16K,4M", "--descriptors", "1,16", "--repeats", "50", "--out", str(out)
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            print(line, end="")
            if "(2 of 4: " in line:
                break
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=30)
    finally:
        bed.call("fast", bed.name(1))
    assert process.returncode == 130
    assert "PARTIAL: interrupted" in text
    results = read_fabric(out)
    assert not results.complete
    assert shape(results)[:2] == [(16 << 10, 1), (16 << 10, 16)]
    assert len(results.points) < 4
    for name in bed.names(2):
        for _ in range(200):
            left = bed.call("exec", name, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            if "pdctl-probe" not in left:
                break
            time.sleep(0.05)
        assert "pdctl-probe" not in left
