"""Sweeps of the probe: content of points, and whole sweeps on this machine with a NIXL that does what a test wants."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdctl_connector import probe_sweep as node
from pdctl_connector.probe_content import FILL, Pattern
from pdctl_connector.probe_host import Memory

from pdctl.doctor import probe_plan
from pdctl.doctor.probe_sweep import MeasuredPoint, SweepPoint, SweepResult, sweep
from pdctl.hosts.fleet import Fleet
from tests.support.fake_nixl import NIXL
from tests.support.plans import changed, planned

KIB = 1 << 10


# --- content


@given(st.integers(1, 300))
def test_every_descriptor_goes_to_one_place_and_neighbours_part(descriptors: int) -> None:
    mapping = node.Point(1, 64, descriptors).mapping()
    assert sorted(mapping) == list(range(descriptors))
    assert all(later != earlier + 1 for earlier, later in itertools.pairwise(mapping))


@given(st.integers(1, 300), st.sampled_from([8, 64 * KIB, 4 << 20, 32 << 20]))
def test_chunks_are_all_of_it_and_bounded(descriptors: int, block_bytes: int) -> None:
    chunks = list(node.Point(1, block_bytes, descriptors).chunks())
    assert [number for chunk in chunks for number in chunk] == list(range(descriptors))
    assert all(len(chunk) == 1 or len(chunk) * block_bytes <= node.CHUNK_BYTES for chunk in chunks)


def moved(point: node.Point, pattern: Pattern, room: int) -> Memory:
    """The target's memory when all went well."""
    writer, target = Memory(device=False, size=room), Memory(device=False, size=room)
    node.put_content(writer, pattern, point)
    target.fill()
    for mine, theirs in enumerate(point.mapping()):
        target.put(theirs * point.block_bytes, writer.get(mine * point.block_bytes, point.block_bytes))
    return target


@pytest.mark.parametrize("chunk", [64, 192, 1 << 20])
def test_wrong_content_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(node, "CHUNK_BYTES", chunk)
    point, pattern = node.Point(1, 64, 9), Pattern(7, 1, 64)
    assert node.wrong_content(moved(point, pattern, 1024), pattern, point) == ""
    for block in range(9):
        memory = moved(point, pattern, 1024)
        memory.put(64 * block + 56, memory.get(64 * block + 56, 8) ^ np.uint64(1))
        text = node.wrong_content(memory, pattern, point)
        assert text == f"1 of 9 pieces are wrong (1 damaged): layer 0 of block {block} differs in 8 of 64 bytes"
    memory = moved(point, pattern, 1024)
    memory.put(64, np.full(8, FILL, dtype=np.uint64))
    assert "1 missing" in node.wrong_content(memory, pattern, point)
    # What another probe has left there is not what was sent.
    assert "9 of 9 pieces are wrong" in node.wrong_content(moved(point, Pattern(8, 1, 64), 1024), pattern, point)


@pytest.mark.parametrize("wrong", [{"block_bytes": 12}, {"block_bytes": 0}, {"descriptors": 0}, {"number": "x"}])
def test_a_point_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    message = {"do": "point", "number": 1, "block_bytes": 64, "descriptors": 2}
    assert node.Point.read(message).size == 128
    with pytest.raises(ValueError, match=r"no point|invalid literal"):
        node.Point.read({**message, **wrong})


# --- whole sweeps


class Heard:
    """A listener that remembers, and can interrupt."""

    def __init__(self, interrupt_at: int = 0) -> None:
        self.stages: list[str] = []
        self.numbers: list[int] = []
        self._interrupt_at = interrupt_at

    def stage(self, stage: str) -> None:
        self.stages.append(stage)

    def point(self, number: int, measured: MeasuredPoint) -> None:
        self.numbers.append(number)
        assert measured.p50_s > 0
        if number == self._interrupt_at:
            raise KeyboardInterrupt


POINTS = (SweepPoint(64 * KIB, 8), SweepPoint(16 * KIB, 1), SweepPoint(1 << 20, 2), SweepPoint(16 * KIB, 8))
Call = Callable[..., SweepResult]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Sweeps on this machine."""
    monkeypatch.setenv("PDCTL_HOME", str(tmp_path / "home"))
    (tmp_path / "fake/nixl").mkdir(parents=True)
    (tmp_path / "fake/nixl/__init__.py").touch()
    (tmp_path / "fake/nixl/_api.py").write_text(NIXL)
    (tmp_path / "mail/box").mkdir(parents=True)

    def call(fault: str = "", *, heard: Heard | None = None, timeout_s: float = 60, **limits: float) -> SweepResult:
        monkeypatch.setattr(probe_plan, "LIMITS_S", {**probe_plan.LIMITS_S, **limits})
        variables = {
            "PYTHONPATH": str(tmp_path / "fake"),
            "FAKE_NIXL": str(tmp_path / "mail/box"),
            "FAKE_FAULT": fault,
        }
        one = {"hosts": ["local"]}
        data = changed(accelerator="cpu", python=sys.executable, prefill=one, decode=one, env=variables)
        plan = planned({**data, "router": {"host": "local"}})
        with Fleet(plan.spec) as fleet:
            return sweep(
                fleet,
                plan,
                ("local", "local"),
                POINTS,
                repeats=3,
                timeout_s=timeout_s,
                listener=heard or Heard(),
            )

    return call


@pytest.mark.slow
def test_every_point_is_measured_smaller_ones_first(run: Call, tmp_path: Path) -> None:
    heard = Heard()
    result = run(heard=heard)
    assert (result.ok, result.stage, result.error, result.interrupted) == (True, "done", "", False)
    assert [one.point for one in result.points] == [POINTS[1], POINTS[3], POINTS[0], POINTS[2]]
    assert heard.numbers == [1, 2, 3, 4]
    for one in result.points:
        assert one.writes == 3
        assert 0 < one.min_s <= one.p50_s <= one.p99_s
        assert one.transport == "tcp"
    assert (result.backend, result.memory, result.left_out) == ("UCX", "host", ())
    assert result.notification_s is not None
    # The doctor's baseline is not touched.
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_content_that_does_not_arrive_fails_and_keeps_what_did(run: Call) -> None:
    # The fourth descriptor of each WRITE is lost: points with one are fine.
    result = run("lose")
    assert (result.ok, result.stage) == (False, "verify")
    assert "8 descriptors of 16384 bytes: 1 of 8 pieces are wrong (1 missing)" in result.error
    assert [one.point for one in result.points] == [POINTS[1]]


@pytest.mark.slow
def test_a_write_that_hangs_is_said(run: Call) -> None:
    result = run("stuck", write=1)
    assert (result.ok, result.stage, result.points) == (False, "write", ())
    assert "WRITE 1 of 1 descriptors of 16384 bytes was not complete within 1 s" in result.error


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(run: Call) -> None:
    result = run(heard=Heard(interrupt_at=2))
    assert result.interrupted
    assert [one.point for one in result.points] == [POINTS[1], POINTS[3]]


@pytest.mark.slow
def test_a_point_for_which_no_time_is_left_is_left_out(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdctl.doctor.probe_sweep._RESERVE_S", 1000)
    result = run()
    assert result.ok
    assert [(point, reason) for point, reason in result.left_out if "--timeout" in reason] == list(result.left_out)
    assert len(result.left_out) == 4
