"""The results of `pdctl bench fabric`: their file, tables, and transfers set against them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pdctl.bench.fabric import (
    FabricPair,
    FabricPoint,
    FabricResults,
    HostVersions,
    LeftOut,
    ModelBlock,
    fabric_json,
    read_fabric,
    size_text,
    speed_text,
    time_text,
    write_fabric,
)
from pdctl.bench.fabric_compare import against_transfers, nearest
from pdctl.bench.fabric_lines import best_line, latency_line
from pdctl.bench.results import Cell, CellRun, Environment, InstanceFacts, Results, Settings, Transfers
from pdctl.cli.bench_fabric_tables import fabric_tables
from pdctl.errors import UsageError

KIB, MIB = 1 << 10, 1 << 20


def point(block: int, descriptors: int, seconds: float, *, prefill: str = "p1", decode: str = "d1") -> FabricPoint:
    return FabricPoint(
        prefill=prefill,
        decode=decode,
        block_bytes=block,
        descriptors=descriptors,
        writes=20,
        p50_s=seconds,
        p99_s=2 * seconds,
        min_s=seconds / 2,
        transport="tcp",
    )


POINTS = (
    point(64 * KIB, 1, 100e-6),
    point(64 * KIB, 64, 4 * MIB / 2e9),
    point(4 * MIB, 1, 4 * MIB / 5e9),
    point(4 * MIB, 64, 256 * MIB / 8e9),
)
PAIR = FabricPair(
    prefill="p1",
    decode="d1",
    backend="UCX",
    memory="host",
    transport="tcp",
    notification_s=60e-6,
    model_block=ModelBlock(32, 64 * KIB, known=True),
)


def fabric(points: tuple[FabricPoint, ...] = POINTS, **more: Any) -> FabricResults:
    values: dict[str, Any] = {
        "schema": 1,
        "kind": "fabric",
        "cluster": "qwen3",
        "model": "Qwen/Qwen3-32B",
        "accelerator": "cuda",
        "fabric": "efa",
        "created_unix": 1.8e9,
        "command": "pdctl bench fabric",
        "pdctl": "1.0",
        "repeats": 20,
        "hosts": (HostVersions("p1", {"nixl": "1.5.1"}),),
        "pairs": (PAIR,),
        "points": points,
        "complete": True,
    }
    return FabricResults(**{**values, **more})


CELL = Cell(prompt_tokens=2048, output_tokens=16, concurrency=4)


def bench(*transfers: Transfers, mode: str = "push", **environment: Any) -> Results:
    facts: dict[str, Any] = {
        "model": "Qwen/Qwen3-32B",
        "accelerator": "cuda",
        "fabric": "efa",
        "instances": (InstanceFacts("prefill-0", "prefill", "p1"), InstanceFacts("decode-0", "decode", "d1")),
        "pdctl": "1.0",
    }
    return Results(
        schema=1,
        kind="run",
        cluster="qwen3",
        created_unix=1.8e9,
        command="pdctl bench run",
        settings=Settings(modes=(mode,), cells=(CELL,)),
        environment=Environment(**{**facts, **environment}),
        runs=tuple(
            CellRun(mode=mode, round=number, cell=CELL, duration_s=1, samples=(), transfers=one)
            for number, one in enumerate(transfers, 1)
        ),
    )


def shown(results: FabricResults) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=120, highlight=False)
    for part in fabric_tables(results):
        console.print(part)
    return stream.getvalue()


# --- the file


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "fabric.json"
    write_fabric(path, fabric())
    assert read_fabric(path) == fabric()
    plain = json.loads(path.read_text())
    assert plain == fabric_json(fabric())
    assert plain["points"][1]["bytes"] == 4 * MIB
    assert plain["points"][1]["bandwidth"] == pytest.approx(2e9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no result"),
        ('{"kind": "run", "schema": 1}', "is no result"),
        ('{"kind": "fabric", "schema": 2}', "has schema 2"),
        ('{"kind": "fabric", "schema": 1}', "cluster: Field required"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "fabric.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_fabric(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_fabric(tmp_path / "none.json")


def test_a_point_that_took_no_time_is_refused(tmp_path: Path) -> None:
    plain = fabric_json(fabric())
    plain["points"][0]["p50_s"] = 0
    (tmp_path / "fabric.json").write_text(json.dumps(plain))
    with pytest.raises(UsageError, match=r"points.0.p50_s"):
        read_fabric(tmp_path / "fabric.json")


# --- tables


def test_a_grid_for_each_pair() -> None:
    lines = shown(fabric()).splitlines()
    assert lines[0] == "p1 -> d1 (tcp, UCX, host memory), GB/s"
    assert lines[1].split() == ["BLOCK", "x1", "x64"]
    assert lines[2].split() == ["64", "KiB*", "0.655", "2"]
    assert lines[3].split() == ["4", "MiB", "5", "8"]
    assert latency_line(PAIR, POINTS) in shown(fabric())
    assert "PARTIAL" not in shown(fabric())
    assert best_line(fabric()) == "fastest: 8 GB/s, p1 -> d1, 64 x 4 MiB"


def test_what_one_small_block_takes() -> None:
    assert latency_line(PAIR, POINTS) == (
        "one WRITE of 64 KiB: p50 100 us, p99 200 us, fastest 50 us (of 20); a notification there and back: 60 us"
    )


def test_what_was_not_measured_is_empty_and_said() -> None:
    left_out = tuple(LeftOut(4 * MIB, count, "one WRITE would take about 9 s") for count in (60, 61, 62, 64))
    pair = replace(PAIR, left_out=left_out, error="d1: it hung", stage="write", notes=("a batch of only 64 MiB",))
    text = shown(fabric(POINTS[:3], pairs=(pair,), complete=False, incomplete_because="p1 -> d1 failed"))
    assert text.splitlines()[3].split() == ["4", "MiB", "5"]
    assert "left out: 4 MiB x60, 4 MiB x61, 4 MiB x62 and 1 more: one WRITE would take about 9 s" in text
    assert "note: a batch of only 64 MiB" in text
    assert "failed: p1 -> d1: d1: it hung (step: write)" in text
    assert "PARTIAL: p1 -> d1 failed" in text


def test_a_pair_without_any_point() -> None:
    pair = replace(PAIR, error="no answer", stage="handshake", model_block=None)
    text = shown(fabric((), pairs=(pair,), complete=False))
    assert text.startswith("failed: p1 -> d1: no answer (step: handshake)")
    assert best_line(fabric(())) == ""


def test_what_hosts_say_cannot_move_the_cursor() -> None:
    text = shown(fabric((), pairs=(replace(PAIR, error="d1: \x1b[2Jgone"),), complete=False))
    assert "gone" in text
    assert "\x1b" not in text


def test_a_running_cluster_is_named() -> None:
    assert "ran meanwhile and shared the fabric: 3" in shown(fabric(beside_cluster=3))
    assert "meanwhile" not in shown(fabric(beside_cluster=0))
    assert "meanwhile" not in shown(fabric(beside_cluster=None))


def test_sizes_and_times_for_people() -> None:
    assert [size_text(size) for size in (8, 1024, 1.5 * MIB, 1 << 30)] == ["8 B", "1 KiB", "1.5 MiB", "1 GiB"]
    assert [time_text(s) for s in (74.2e-6, 1.25e-3, 2.1)] == ["74.2 us", "1.25 ms", "2.1 s"]
    assert speed_text(48.7e9) == "48.7 GB/s"


# --- transfers against it


def test_transfers_against_the_point_nearest_to_them() -> None:
    # 4 MiB a transfer is 64 descriptors of this model: the point of 64 x 64 KiB, not that of 1 x 4 MiB.
    (line,) = against_transfers(
        fabric(),
        bench(
            Transfers(completed=10, bytes=40 * MIB, seconds=40 * MIB / 1e9),
            Transfers(completed=10, bytes=40 * MIB, seconds=40 * MIB / 1e9),
        ),
    )
    assert line == (
        "push, 2048+16 x4: your transfers reach 50 % of the fabric: 20 transfers of 4 MiB on average at 1 GB/s, beside "
        "2 GB/s of 64 x 64 KiB (p1 -> d1, tcp)"
    )


def test_a_model_that_is_not_known_is_beside_the_fastest_of_that_size() -> None:
    pair = replace(PAIR, model_block=ModelBlock(32, 64 * KIB, known=False))
    (line,) = against_transfers(
        fabric(pairs=(pair,)), bench(Transfers(completed=1, bytes=4 * MIB, seconds=4 * MIB / 1e9))
    )
    assert "20 % of the fabric: 1 transfer of 4 MiB" in line
    assert "5 GB/s of 1 x 4 MiB" in line


@pytest.mark.parametrize(
    "transfers",
    [
        Transfers(),
        Transfers(completed=3),
        Transfers(completed=3, bytes=5),
        Transfers(completed=0, bytes=0, seconds=0),
        Transfers(completed=3, bytes=5, seconds=0),
    ],
)
def test_what_was_not_counted_is_not_compared(transfers: Transfers) -> None:
    assert against_transfers(fabric(), bench(transfers)) == ["push, 2048+16 x4: its transfers were not counted"]


def test_rounds_that_were_not_counted_are_left_out_whole() -> None:
    (line,) = against_transfers(
        fabric(),
        bench(Transfers(completed=10, bytes=40 * MIB, seconds=40 * MIB / 1e9), Transfers(completed=90, bytes=9 * MIB)),
    )
    assert "50 % of the fabric: 10 transfers of 4 MiB" in line


def test_what_does_not_match_is_said_first() -> None:
    one = Transfers(completed=1, bytes=4 * MIB, seconds=1)
    instances = (InstanceFacts("decode-0", "decode", "d9"), InstanceFacts("router", "router", "r1"))
    lines = against_transfers(fabric(), bench(one, mode="pull", model="other", instances=instances))
    assert lines[0] == "care: the bench had model other, the fabric was measured with Qwen/Qwen3-32B"
    assert lines[1] == "care: the fabric was not measured at d9, where the bench ran"
    assert lines[2].startswith("pull reads from prefill's memory")
    assert len(lines) == 4


def test_nothing_to_compare_with() -> None:
    lines = against_transfers(fabric(()), bench(Transfers(completed=1, bytes=1, seconds=1)))
    assert lines == ["nothing of the fabric was measured, so the transfers have nothing to be compared with"]


def test_of_several_pairs_the_one_in_the_middle() -> None:
    points = [point(MIB, 1, seconds, decode=f"d{number}") for number, seconds in enumerate((3e-3, 1e-3, 2e-3))]
    assert nearest(points, MIB, 1).decode == "d2"
    assert nearest(points[:2], MIB, 1).decode == "d0"


@given(st.floats(1, 1e15), st.none() | st.floats(1, 1e9))
def test_the_nearest_is_always_one_of_them(size: float, descriptors: float | None) -> None:
    assert nearest(POINTS, size, descriptors) in POINTS
