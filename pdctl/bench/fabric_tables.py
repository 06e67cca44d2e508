"""The results of ``pdctl bench fabric`` as tables and sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pdctl.bench.fabric import FabricPair, FabricPoint, FabricResults, size_text, speed_text, time_text

_MOST_REASONS = 3


def fabric_tables(results: FabricResults) -> list[RenderableType]:
    """For each pair a grid of block size by descriptors in GB/s, what one small block takes, and what went wrong."""
    parts: list[RenderableType] = []
    for pair in results.pairs:
        points = results.of(pair)
        if points:
            parts += [Text(_heading(pair), style="bold"), _grid(pair, points), Text(latency_line(pair, points))]
        parts += [Text(line, style="red" if line.startswith("failed") else "") for line in pair_notes(pair)]
        parts.append(Text(""))
    if not results.complete:
        parts.append(Text(f"PARTIAL: {results.incomplete_because or 'not all was measured'}", style="bold yellow"))
    if results.beside_cluster:
        parts.append(
            Text(f"instances of the cluster that ran meanwhile and shared the fabric: {results.beside_cluster}")
        )
    return parts


def _heading(pair: FabricPair) -> str:
    over = (pair.transport, pair.backend, f"{pair.memory} memory" if pair.memory else "")
    return f"{pair.name} ({', '.join(part for part in over if part)}), GB/s"


def _grid(pair: FabricPair, points: Sequence[FabricPoint]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("BLOCK", justify="right")
    counts = sorted({point.descriptors for point in points})
    for count in counts:
        table.add_column(f"x{count}", justify="right")
    at = {(point.block_bytes, point.descriptors): point for point in points}
    own = pair.model_block.piece_bytes if pair.model_block is not None else None
    for block in sorted({point.block_bytes for point in points}):
        row = [size_text(block) + ("*" if block == own else "")]
        for count in counts:
            found = at.get((block, count))
            row.append("" if found is None else f"{found.bandwidth / 1e9:.3g}")
        table.add_row(*row)
    return table


def latency_line(pair: FabricPair, points: Sequence[FabricPoint]) -> str:
    """What the smallest WRITE and a notification take."""
    small = min(points, key=lambda point: (point.bytes, point.descriptors))
    times = f"p50 {time_text(small.p50_s)}, p99 {time_text(small.p99_s)}, fastest {time_text(small.min_s)}"
    what = f"{small.descriptors} x {size_text(small.block_bytes)}" if small.descriptors > 1 else size_text(small.bytes)
    notified = (
        "" if pair.notification_s is None else f"; a notification there and back: {time_text(pair.notification_s)}"
    )
    return f"one WRITE of {what}: {times} (of {small.writes}){notified}"


def pair_notes(pair: FabricPair) -> list[str]:
    """What a reader must know of a pair, and what went wrong."""
    lines = []
    if pair.model_block is not None:
        block = pair.model_block
        whose = "the model's" if block.known else "a common model's, because this model's layout is not known here"
        lines.append(
            f"* what one layer has of a KV block ({whose}: {block.layers} layers, so that a block is {block.layers} "
            "descriptors)"
        )
    if pair.left_out:
        reasons: dict[str, list[str]] = {}
        for one in pair.left_out:
            reasons.setdefault(one.because, []).append(f"{size_text(one.block_bytes)} x{one.descriptors}")
        for because, which in reasons.items():
            more = f" and {len(which) - _MOST_REASONS} more" if len(which) > _MOST_REASONS else ""
            lines.append(f"left out: {', '.join(which[:_MOST_REASONS])}{more}: {because}")
    lines += [f"note: {note}" for note in pair.notes]
    if pair.error:
        lines.append(f"failed: {pair.name}: {pair.error} (step: {pair.stage})")
    return lines


def best_line(results: FabricResults) -> str:
    """The fastest point of all; empty if there is none."""
    if not results.points:
        return ""
    best = max(results.points, key=lambda point: point.bandwidth)
    return f"fastest: {speed_text(best.bandwidth)}, {best.pair}, {best.descriptors} x {size_text(best.block_bytes)}"
