"""One cluster to break, for all files of this folder; the hosts are too small for it beside another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.faulty import LEASE_S, TIMEOUT_S, Faulty
from tests.testbed.hosts import Testbed


@pytest.fixture(scope="package")
def faulty(
    runtime: str, demo_model: Path, testbed: Testbed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faults")
    file = folder / "cluster.yaml"
    # pdctl does not pass PDCTL_FAULTS on, so the interpreter sets it; the files of faults are empty for most tests.
    pythons = []
    for number in (1, 2):
        python = folder / f"python-{number}"
        python.write_text(f'#!/bin/sh\nPDCTL_FAULTS=@{folder}/faults-{number} exec {runtime} "$@"\n')
        python.chmod(0o755)
        pythons.append(python)
    options = "enforce-eager: true, dtype: float32, max-model-len: 4096, served-model-name: demo"
    file.write_text(
        f"""\
cluster: e2e-faults
model: {demo_model}
accelerator: cpu
fabric: tcp
python: {runtime}
transfer: {{timeout_s: {TIMEOUT_S}, lease_s: {LEASE_S}}}
env: {{VLLM_CPU_KVCACHE_SPACE: "1", VLLM_CPU_OMP_THREADS_BIND: nobind, OMP_NUM_THREADS: "1"}}
prefill:
  hosts: [{{name: {testbed.name(1)}, address: {testbed.address(1)}}}]
  python: {pythons[0]}
  vllm_args: {{{options}, num-gpu-blocks-override: 200}}
decode:
  python: {pythons[1]}
  hosts: [{{name: {testbed.name(2)}, address: {testbed.address(2)}}}]
  vllm_args: {{{options}, num-gpu-blocks-override: 60}}
router: {{host: {testbed.name(1)}, port: 8000}}
"""
    )
    cluster = Cluster(file, {"PDCTL_SSH_CONFIG": str(testbed.ssh_config)})
    made = Faulty(cluster, testbed, folder)
    result = cluster.pdctl("up", "--json", timeout=400)
    try:
        assert result.code == 0, result.err
        yield made
    finally:
        cluster.pdctl("down", "--force", timeout=120)
