"""The speed of a bench's KV transfers set against what the fabric can do. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdctl.bench.fabric import FabricPoint, FabricResults, ModelBlock, size_text, speed_text
from pdctl.bench.results import Cell, CellRun, Mode, Results


def against_transfers(fabric: FabricResults, results: Results) -> list[str]:
    """Sentences: what share of the fabric the transfers of each mode and cell reach, and beside which point.

    A bench counts bytes and the time of transfers, not descriptors. How many a transfer has is worked out from the
    model's KV block, where it is known. Of the pairs that measured the nearest point, the one in the middle is taken.
    """
    lines = list(doubts(fabric, results))
    if not fabric.points:
        return [*lines, "nothing of the fabric was measured, so the transfers have nothing to be compared with"]
    block = next((pair.model_block for pair in fabric.pairs if pair.model_block and pair.model_block.known), None)
    for mode in results.modes:
        for cell in results.cells:
            runs = results.of(cell, mode)
            if runs:
                lines.append(_line(fabric.points, block, mode, cell, runs))
    return lines


def doubts(fabric: FabricResults, results: Results) -> list[str]:
    """Why the two should not be compared, or only with care."""
    found = []
    for what, ours, theirs in (
        ("model", fabric.model, results.environment.model),
        ("accelerator", fabric.accelerator, results.environment.accelerator),
        ("fabric", fabric.fabric, results.environment.fabric),
    ):
        if ours != theirs:
            found.append(f"care: the bench had {what} {theirs}, the fabric was measured with {ours}")
    used = {one.host for one in results.environment.instances if one.role in ("prefill", "decode")}
    measured = {host for point in fabric.points for host in (point.prefill, point.decode)}
    missing = sorted(used - measured)
    if missing and measured:
        found.append(f"care: the fabric was not measured at {', '.join(missing)}, where the bench ran")
    if "pull" in results.modes:
        found.append("pull reads from prefill's memory; the fabric was measured with writes")
    return found


def nearest(points: Sequence[FabricPoint], size: float, descriptors: float | None) -> FabricPoint:
    """The point nearest in bytes, and then in descriptors if their number is known (both by ratio).

    Args:
        points: at least one.
        size: bytes of a transfer, more than 0.
        descriptors: of a transfer; None if not known, then the fastest point of that size.
    """

    def far(value: float, wanted: float) -> float:
        return abs(math.log(value / wanted))

    if descriptors is None:
        chosen = min(points, key=lambda point: (far(point.bytes, size), -point.bandwidth))
    else:
        chosen = min(
            points, key=lambda point: (far(point.bytes, size) + far(point.descriptors, descriptors), point.bytes)
        )
    shape = (chosen.block_bytes, chosen.descriptors)
    alike = sorted(
        (point for point in points if (point.block_bytes, point.descriptors) == shape),
        key=lambda point: point.bandwidth,
    )
    return alike[(len(alike) - 1) // 2]


def _line(
    points: Sequence[FabricPoint], block: ModelBlock | None, mode: Mode, cell: Cell, runs: Sequence[CellRun]
) -> str:
    counted = [one for one in (run.transfers for run in runs) if one.completed and one.bytes and one.seconds]
    if not counted:
        return f"{mode}, {cell.name}: its transfers were not counted"
    # Each was checked above; the sums are over the rounds in which all three were counted.
    completed = sum(one.completed or 0 for one in counted)
    moved = sum(one.bytes or 0 for one in counted)
    seconds = sum(one.seconds or 0.0 for one in counted)
    speed, size = moved / seconds, moved / completed
    point = nearest(points, size, None if block is None else max(1.0, size / block.piece_bytes))
    share = 100 * speed / point.bandwidth
    transfers = "1 transfer" if completed == 1 else f"{completed} transfers"
    return (
        f"{mode}, {cell.name}: your transfers reach {share:.0f} % of the fabric: {transfers} of {size_text(size)} on "
        f"average at {speed_text(speed)}, beside {speed_text(point.bandwidth)} of {point.descriptors} x "
        f"{size_text(point.block_bytes)} ({point.pair}{f', {point.transport}' if point.transport else ''})"
    )
