"""The results of ``pdctl bench fabric`` in sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdctl.bench.fabric import FabricPair, FabricPoint, FabricResults, size_text, speed_text, time_text
from pdctl.spec_yaml import printable

_MOST_REASONS = 3


def heading(pair: FabricPair) -> str:
    """Above the grid of a pair: who, over what, and the unit."""
    over = (pair.transport, pair.backend, f"{pair.memory} memory" if pair.memory else "")
    return f"{pair.name} ({', '.join(part for part in over if part)}), GB/s"


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
    # What hosts say is shown as text, whatever is in it.
    return [printable(line) for line in lines]


def best_line(results: FabricResults) -> str:
    """The fastest point of all; empty if there is none."""
    if not results.points:
        return ""
    best = max(results.points, key=lambda point: point.bandwidth)
    return f"fastest: {speed_text(best.bandwidth)}, {best.pair}, {best.descriptors} x {size_text(best.block_bytes)}"
