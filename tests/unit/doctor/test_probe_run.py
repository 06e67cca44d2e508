"""A whole probe on this machine, with a NIXL that does what a test wants; the real one is in tests/e2e."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pdctl_connector.probe_supervisor import end_in_words

from pdctl.doctor import probe as probe_module
from pdctl.doctor import probe_plan
from pdctl.doctor.facts import HostFacts
from pdctl.doctor.probe import probe
from pdctl.doctor.probe_facts import ProbeFacts, ProbeResult, from_json
from pdctl.doctor.probe_script import probe_source
from pdctl.hosts.fleet import Fleet
from tests.support.fake_nixl import NIXL
from tests.support.plans import changed, planned


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a probe on this machine and returns its only result."""
    monkeypatch.setenv("PDCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(probe_plan, "BATCH_BYTES", 8 << 20)
    (tmp_path / "fake/nixl").mkdir(parents=True)
    (tmp_path / "fake/nixl/__init__.py").touch()
    (tmp_path / "fake/nixl/_api.py").write_text(NIXL)
    (tmp_path / "mail/box").mkdir(parents=True)

    def call(fault: str = "", *, limits: dict[str, float] | None = None, timeout_s: float = 60, **sections: Any):
        monkeypatch.setattr(probe_plan, "LIMITS_S", {**probe_plan.LIMITS_S, **(limits or {})})
        variables = {
            "PYTHONPATH": str(tmp_path / "fake"),
            "FAKE_NIXL": str(tmp_path / "mail/box"),
            "FAKE_FAULT": fault,
        }
        one = {"hosts": ["local"]}
        data = changed(
            **{
                "accelerator": "cpu",
                "python": sys.executable,
                "prefill": one,
                "decode": one,
                "env": variables,
                **sections,
            }
        )
        plan = planned({**data, "router": {"host": "local"}})
        told: list[str] = []
        with Fleet(plan.spec) as fleet:
            facts = probe(
                fleet,
                plan,
                {"local": HostFacts("local")},
                pairs=None,
                timeout_s=timeout_s,
                on_done=lambda name, _: told.append(name),
            )
        assert told == ["local -> local"]
        assert isinstance(facts, ProbeFacts)
        (result,) = facts.results
        return result

    return call


def processes() -> list[str]:
    """Command lines of probes on this machine that were started by this process."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if (
                b"pdctl-probe" in file.read_bytes()
                and f"FAKE_NIXL={os.environ['PDCTL_HOME'][:-5]}".encode() in (file.parent / "environ").read_bytes()
            ):
                found.append(file.read_bytes().decode())
        except OSError:
            continue
    return found


def soon(condition) -> bool:
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_all_goes_well(run, tmp_path: Path) -> None:
    result: ProbeResult = run()
    assert (result.ok, result.stage, result.error) == (True, "done", "")
    assert (result.backend, result.transport, result.memory) == ("UCX", "tcp", "host")
    assert "UCX: inter-node write 0..inf: zero-copy, tcp/eth0" in result.transport_evidence
    assert result.block_bytes == 32 * 65536
    assert result.batch_bytes == 4 * 32 * 65536
    assert result.block_p50_us is not None
    assert result.block_p99_us is not None
    assert 0 < result.block_p50_us <= result.block_p99_us
    assert result.bandwidth_mb_s is not None
    assert result.bandwidth_mb_s > 0
    assert result.notification_us is not None
    # Handles of the lists, the memory and the other agent; the WRITEs themselves.
    released = (tmp_path / "mail/released").read_text().split()
    assert len([name for name in released if "prefill" in name]) >= 200 + 4
    assert soon(lambda: not processes())


@pytest.mark.slow
def test_the_baseline_is_kept_on_both_hosts(run, tmp_path: Path) -> None:
    result = run()
    folder = tmp_path / "home/probe"
    assert sorted(path.name for path in folder.iterdir()) == ["from-local.json", "to-local.json"]
    for path in folder.iterdir():
        record = json.loads(path.read_text())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert abs(record.pop("at") - time.time()) < 120
        assert record == {
            "schema": 1,
            "prefill": "local",
            "decode": "local",
            "backend": "UCX",
            "transport": "tcp",
            "memory": "host",
            "block_bytes": result.block_bytes,
            "block_p50_us": result.block_p50_us,
            "block_p99_us": result.block_p99_us,
            "batch_bytes": result.batch_bytes,
            "bandwidth_mb_s": result.bandwidth_mb_s,
            "notification_us": result.notification_us,
        }


@pytest.mark.slow
def test_a_baseline_that_cannot_be_kept_is_no_failure(run, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    result = run()
    assert result.ok
    assert "the baseline was not kept" in result.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stage", "error"),
    [
        ("no backend", "backend", r"NIXL has no usable plugin UCX on this host; it has: POSIX"),
        ("abort", "backend", r"its process was ended by SIGABRT in the step `backend`"),
        ("register", "register", r"RuntimeError: NIXL_ERR_BACKEND: cannot register"),
        ("hang", "handshake", r"NIXL got no answer from local within 1 s \(UCX takes free TCP ports"),
        ("write", "write", r"RuntimeError: NIXL_ERR_REMOTE_DISCONNECT"),
        ("stuck", "write", r"WRITE 1, of one block, was not complete within 1 s"),
        ("lose", "verify", r"pieces are wrong \(\d+ missing\): layer 3 of block \d+ holds nothing"),
        ("no notification", "notify", r"only 0 of 201 notifications of complete WRITEs arrived"),
    ],
)
def test_what_fails_is_said_and_nothing_stays(run, tmp_path: Path, fault: str, stage: str, error: str) -> None:
    result = run(fault, limits={"handshake": 1, "write": 1 if fault == "stuck" else 20, "notify": 2})
    assert (result.ok, result.stage) == (False, stage)
    assert re.search(error, result.error), result.error
    assert result.error.startswith("local: ")
    assert not (tmp_path / "home").exists()
    assert soon(lambda: not processes())


@pytest.mark.slow
def test_no_nixl(run, tmp_path: Path) -> None:
    (tmp_path / "fake/nixl/_api.py").write_text("raise ImportError('libfabric.so.1: cannot open shared object file')")
    result = run()
    assert result.stage == "import"
    assert f"this Python ({sys.executable}) cannot import NIXL: libfabric.so.1" in result.error


@pytest.mark.slow
def test_no_such_python(run) -> None:
    result = run(python="/no/such/python")
    assert result.stage == "start"
    assert "/no/such/python does not exist on this host" in result.error


@pytest.mark.slow
def test_it_takes_no_longer_than_it_may(run) -> None:
    started = time.monotonic()
    result = run("hang", limits={"handshake": 100}, timeout_s=3)
    assert time.monotonic() - started < 30
    assert result.stage in ("handshake", "timeout")
    assert soon(lambda: not processes())


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        if soon(processes):
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run("stuck", limits={"write": 100})
    assert soon(lambda: not processes())


def test_pairs_without_a_common_host_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    running: set[str] = set()
    most: list[int] = []
    lock = threading.Lock()

    class Fake:
        def __init__(self, pair: tuple[str, str]) -> None:
            self.pair = pair

        def run(self) -> ProbeResult:
            with lock:
                assert not running & set(self.pair)
                running.update(self.pair)
                most.append(len(running))
            time.sleep(0.02)
            with lock:
                running.difference_update(self.pair)
            return ProbeResult(*self.pair, ok=True, stage="done")

        def close(self) -> None:
            raise AssertionError("it had ended")

    pairs = probe_plan.choose_pairs(
        ["p0", "p1", "p2"], ["d0", "d1", "d2"], ["p0", "p1", "p2", "d0", "d1", "d2"], 9
    ).probed
    results = probe_module._run_all(pairs, Fake, None)
    assert set(results) == set(pairs)
    assert max(most) == 6


def test_ends_in_words() -> None:
    message = {"peer": "d1", "backends": ["UCX"]}
    assert "killed after 20 s" in end_in_words(-signal.SIGALRM, "write", 20, message)
    assert end_in_words(-signal.SIGSEGV, "write", 20, message) == "its process was ended by SIGSEGV in the step `write`"
    assert "signal 99" in end_in_words(-99, "write", 20, message)
    assert "exit status 3" in end_in_words(3, "write", 20, message)


def test_the_script_is_written_for_python_3_8() -> None:
    texts = ast.literal_eval(probe_source().decode().splitlines()[0].partition(" = ")[2])
    assert list(texts)[-1] == "probe_supervisor"
    for text in (*texts.values(), probe_source().decode()):
        ast.parse(text, feature_version=(3, 8))


def test_results_are_what_the_bundle_keeps() -> None:
    facts = ProbeFacts((ProbeResult("p", "d", ok=True, stage="done"),), (("p", "e"),))
    assert from_json(json.loads(json.dumps(facts.to_json()))) == facts
