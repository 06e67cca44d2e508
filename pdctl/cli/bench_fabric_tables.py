"""The results of ``pdctl bench fabric`` for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pdctl.bench.fabric import FabricPair, FabricPoint, FabricResults, size_text
from pdctl.bench.fabric_lines import heading, latency_line, pair_notes


def fabric_tables(results: FabricResults) -> list[RenderableType]:
    """For each pair a grid of block size by descriptors in GB/s, what one small block takes, and what went wrong."""
    parts: list[RenderableType] = []
    for pair in results.pairs:
        points = results.of(pair)
        if points:
            parts += [Text(heading(pair), style="bold"), _grid(pair, points), Text(latency_line(pair, points))]
        parts += [Text(line, style="red" if line.startswith("failed") else "") for line in pair_notes(pair)]
        parts.append(Text(""))
    if not results.complete:
        parts.append(Text(f"PARTIAL: {results.incomplete_because or 'not all was measured'}", style="bold yellow"))
    if results.beside_cluster:
        parts.append(
            Text(f"instances of the cluster that ran meanwhile and shared the fabric: {results.beside_cluster}")
        )
    return parts


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
