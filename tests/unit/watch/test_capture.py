from __future__ import annotations

import json
import stat
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from pdctl.errors import UsageError
from pdctl.plan import make_plan
from pdctl.spec import parse
from pdctl.watch import capture
from pdctl.watch.capture import LOOK_SCRIPT, Archive, about, peers_of
from pdctl.watch.snapshot import TransferView
from tests.unit.watch.frames import DECODE, PREFILL, RECORD, SNAPSHOT

SPEC = """\
cluster: qwen3
model: m
accelerator: cpu
fabric: tcp
prefill: {hosts: [h1, h3]}
decode: {hosts: [h2, h4, h5, h6, h7, h8]}
router: {host: h1}
"""
PLAN = make_plan(parse(SPEC, file="cluster.yaml", environ={}), environ={}, connector_digest="0" * 64)
SHARED = TransferView("key-1", prefill=(RECORD,), decode=(replace(RECORD, instance="decode-4"),))


def names(snapshot, name: str) -> list[str]:
    return [instance.name for instance in peers_of(PLAN, snapshot, name)]


def test_peers_are_those_that_share_a_transfer_and_the_router() -> None:
    snapshot = replace(SNAPSHOT, transfers=(SHARED,))
    assert names(snapshot, "prefill-0") == ["decode-4", "router"]
    assert names(snapshot, "decode-4") == ["prefill-0", "router"]
    assert names(snapshot, "prefill-1") == ["decode-0", "decode-1", "decode-2", "decode-3", "router"]
    assert names(snapshot, "router") == ["prefill-0", "prefill-1", "decode-0", "decode-1"]


def test_of_a_snapshot_what_concerns_the_instance_is_kept() -> None:
    other = TransferView("key-2", decode=(replace(RECORD, instance="decode-0"),))
    part = about(replace(SNAPSHOT, transfers=(SHARED, other)), {"prefill-0"}, "prefill-0")
    assert part.instances == (PREFILL,)
    assert DECODE not in part.instances
    assert [host.name for host in part.hosts] == ["h1"]
    assert part.transfers == (SHARED,)


def archive() -> Archive:
    return Archive("root", redact=lambda text: text.replace("s3cret", "***"), clock=lambda: 1_795_000_000.0)


def read(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar.getmembers()}


def test_an_archive_is_redacted_private_and_lists_what_it_lacks(tmp_path: Path) -> None:
    made = archive()
    made.add("a/log.txt", "token s3cret\ud800")
    made.add_json("plan.json", {"argv": ["s3cret", 1, None], "deep": {"x": ("s3cret",)}})
    made.lacks("b", "no s3cret")
    path = tmp_path / "out.tar.gz"
    made.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    parts = read(path)
    assert set(parts) == {"root/a/log.txt", "root/plan.json", "root/index.json"}
    assert b"s3cret" not in b"".join(parts.values())
    assert json.loads(parts["root/plan.json"]) == {"argv": ["***", 1, None], "deep": {"x": ["***"]}}
    assert json.loads(parts["root/index.json"])["missing"] == {"b": "no ***"}
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.tar.gz"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        archive().write(path)
    assert path.read_text() == "mine"
    with pytest.raises(UsageError, match="cannot write"):
        archive().write(tmp_path / "nowhere" / "out.tar.gz")
    assert list(tmp_path.iterdir()) == [path]


def test_its_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "PART_LIMIT", 100)
    monkeypatch.setattr(capture, "TOTAL_LIMIT", 300)
    made = archive()
    for number in range(4):
        made.add(f"log-{number}", f"{number}" * 1000 + "end")
    assert made.names == ("log-0", "log-1")
    assert made.missing == {"log-2": "the archive is full", "log-3": "the archive is full"}
    made.write(tmp_path / "out.tar.gz")
    log = read(tmp_path / "out.tar.gz")["root/log-0"]
    assert log.startswith(b"[the beginning is left out]\n0")
    assert log.endswith(b"0end")


def test_the_script_shows_processes_versions_and_why_there_are_no_stacks() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        done = subprocess.run(
            ["sh", "-c", LOOK_SCRIPT, "pdctl", sys.executable, "pytest,no-such-package", str(child.pid), "999999999"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": "/usr/bin:/bin"},
        )
    finally:
        child.kill()
        child.wait()
    assert done.returncode == 0, done.stderr
    assert f"pytest {pytest.__version__}" in done.stdout
    assert "no-such-package not installed" in done.stdout
    assert f"== process {child.pid}\nName:\tsleep" in done.stdout
    assert "== process 999999999\ngone" in done.stdout
    assert "-- stacks\n" in done.stdout
