"""The connector as the installed vLLM loads it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]

# In a process of its own: vLLM leaves threads, handlers and variables behind, and importing it takes seconds.
LOAD = """
import json, os, sys, threading
import pdctl_connector
early = sorted(name for name in sys.modules if name.split(".")[0] in ("vllm", "nixl"))
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.func_utils import supports_kw

config = KVTransferConfig(
    kv_connector="PdPushConnector", kv_connector_module_path="pdctl_connector.connector", kv_role="kv_producer"
)
threads = threading.active_count()
cls = KVConnectorFactory.get_connector_class(config)
new_threads = threading.active_count() - threads

from pdctl_connector import compat, scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPushConnector

compat.check()
# What our classes replace of upstream's, by the class that compat lists it under.
sides = ((cls, compat.CONNECTOR), (scheduler.PdPushScheduler, compat.SCHEDULER), (worker.PdPushWorker, compat.WORKER))
unlisted = []
for ours, upstream in sides:
    theirs = getattr(sys.modules[upstream.module], upstream.name)
    known = {*upstream.overridden, *upstream.constants, "__doc__", "__module__", "__annotations__"}
    # Of a class that has an abstract base, by Python.
    known |= {"__abstractmethods__", "_abc_impl", "__firstlineno__", "__static_attributes__"}
    # Refused for all, where upstream's base decides by the back end. Asked since vLLM 0.33.
    known |= {"supports_sleep_mode"}
    unlisted += [f"{ours.__name__}.{name}" for name in vars(ours) if hasattr(theirs, name) and name not in known]
print("\\n" + json.dumps({
    "name": f"{cls.__module__}.{cls.__name__}",
    "early": early,
    "new_threads": new_threads,
    "supports_hma": KVConnectorFactory.supports_hma_config(config),
    "takes_kv_cache_config": supports_kw(cls, "kv_cache_config"),
    "is_push": issubclass(cls, NixlPushConnector),
    "abstract": sorted(cls.__abstractmethods__),
    "sleep_mode": cls.supports_sleep_mode(config),
    "rcache": os.environ.get("UCX_RCACHE_MAX_UNRELEASED"),
    "transfer_modes": [scheduler.PdPushScheduler._TRANSFER_MODE, worker.PdPushWorker._TRANSFER_MODE],
    "unlisted": unlisted,
    "base_in_line": compat.BASE_WORKER.name in [base.__name__ for base in worker.PdPushWorker.__mro__],
}))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "connector")}
    environment.pop("UCX_RCACHE_MAX_UNRELEASED", None)
    done = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_vllm_resolves_the_class_by_module_path(loaded: dict[str, Any]) -> None:
    assert loaded["name"] == "pdctl_connector.connector.PdPushConnector"
    assert loaded["is_push"]
    assert loaded["takes_kv_cache_config"]
    assert loaded["supports_hma"]
    assert loaded["abstract"] == []
    assert loaded["sleep_mode"] is False


def test_each_side_says_the_word_that_is_looked_for(loaded: dict[str, Any]) -> None:
    # The router reads the scheduler's; the worker's is in the handshake, and keeps us apart from upstream's.
    assert loaded["transfer_modes"] == ["push", "push-pdctl-1"]


def test_everything_that_is_replaced_of_upstream_is_listed(loaded: dict[str, Any]) -> None:
    assert loaded["unlisted"] == []
    assert loaded["base_in_line"]


def test_loading_starts_no_thread_and_leaves_nixl_to_vllm(loaded: dict[str, Any]) -> None:
    assert loaded["early"] == []
    assert loaded["new_threads"] == 0
    # vLLM sets it only if NIXL was not imported before.
    assert loaded["rcache"] == "1024"


def test_the_installed_vllm_has_the_recorded_signatures() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    recorder_spec = importlib.util.spec_from_file_location(
        "record_upstream_signatures", REPOSITORY / "scripts" / "record_upstream_signatures.py"
    )
    assert recorder_spec is not None
    assert recorder_spec.loader is not None
    recorder = importlib.util.module_from_spec(recorder_spec)
    recorder_spec.loader.exec_module(recorder)

    found = recorder.record(Path(spec.origin).parents[1])
    line = recorder.compat.release_line(found["vllm"])
    recorded = json.loads((REPOSITORY / "tests" / "unit" / "data" / f"upstream_signatures_{line}.json").read_text())
    assert found["classes"] == recorded["classes"]
    assert found["nixl_connector_version"] == recorded["nixl_connector_version"]


def test_the_two_sides_work_on_upstreams_classes() -> None:
    checks = Path(__file__).with_name("connector_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", str(checks)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "connector")}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
