"""Real vLLM on CPU, real NIXL over UCX TCP, the real router; on this machine, or on two hosts of the test bed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import REPOSITORY, RUNTIME_PYTHON, Cluster
from tests.testbed.hosts import Testbed

AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")

_OPTIONS = """
  vllm_args:
    enforce-eager: true
    dtype: float32
    max-model-len: 4096
    max-num-seqs: 32
    served-model-name: demo
"""

_ENV = """
env:
  VLLM_CPU_KVCACHE_SPACE: "1"
  VLLM_CPU_OMP_THREADS_BIND: nobind
  OMP_NUM_THREADS: "1"
"""


def _has_runtime() -> bool:
    probe = (
        "import importlib.util as u, sys; sys.exit(not all(u.find_spec(n) for n in ('vllm', 'nixl', 'vllm_router')))"
    )
    return subprocess.run([RUNTIME_PYTHON, "-c", probe], check=False, timeout=60).returncode == 0


@pytest.fixture(scope="session")
def runtime() -> str:
    """The Python that has vLLM, NIXL and the router."""
    if not _has_runtime():
        pytest.skip(f"{RUNTIME_PYTHON} has no vLLM, NIXL and vllm-router: make setup")
    # With it on, NIXL's busy threads keep other processes off the CPU for seconds on a machine with few cores.
    if AUTOGROUP.exists() and AUTOGROUP.read_text().strip() == "1":
        try:
            AUTOGROUP.write_text("0")
        except OSError:
            pytest.skip("kernel.sched_autogroup_enabled is 1 and cannot be changed here (needs root)")
    return RUNTIME_PYTHON


@pytest.fixture(scope="session")
def demo_model(runtime: str) -> Path:
    """The tiny model in which the KV cache decides the answer."""
    folder = REPOSITORY / ".demo" / "model"
    done = subprocess.run(
        [runtime, str(REPOSITORY / "scripts" / "make_demo_model.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """Two hosts of their own, each with its sshd; not those of the integration tests."""
    made = Testbed(Path("/tmp/pd-testbed-e2e"), bridge="pdv0", net="10.80.0", prefix="v")
    made.up(2)
    yield made
    made.down()


@pytest.fixture(scope="session")
def ssh_cluster(runtime: str, demo_model: Path, testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The cluster file of 1 prefill and 1 decode on two hosts of the test bed, reached over SSH."""
    file = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    file.write_text(
        f"""\
cluster: e2e-ssh
model: {demo_model}
accelerator: cpu
fabric: tcp
python: {runtime}
{_ENV}
prefill:
  hosts: [{{name: {testbed.name(1)}, address: {testbed.address(1)}}}]
{_OPTIONS}
decode:
  hosts: [{{name: {testbed.name(2)}, address: {testbed.address(2)}}}]
{_OPTIONS}
router: {{host: {testbed.name(1)}, port: 8000}}
"""
    )
    return Cluster(file, {"PDCTL_SSH_CONFIG": str(testbed.ssh_config)})


@pytest.fixture(scope="session")
def local_cluster(runtime: str, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The `local` preset, as the demo runs it, in a pdctl home of its own."""
    folder = tmp_path_factory.mktemp("local")
    cluster = Cluster(folder / "cluster.yaml", {})
    made = cluster.pdctl(
        "init",
        "--preset",
        "local",
        "-o",
        str(cluster.file),
        "--set",
        f"model={demo_model}",
        "--set",
        f"python={runtime}",
    )
    assert made.code == 0, made.err
    text = cluster.file.read_text().replace("cluster: local", "cluster: e2e-local")
    cluster.file.write_text(text.replace("port: 8000", "port: 8010"))
    yield cluster
    cluster.pdctl("down", "--force")
