"""The first lines of the screen: cluster, state, figures of now, alerts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdctl.watch.alerts import Severity
from pdctl.watch.tui import format as show
from pdctl.watch.tui import states
from pdctl.watch.tui.format import Cell, Line
from pdctl.watch.tui.source import Frame


@dataclass(frozen=True)
class Status:
    """What the top bar shows beside the frame.

    Attributes:
        paused: whether drawing is.
        age_s: since the frame came; None if none has.
        overdue: whether the next one should have come by now.
        source_error: why there is none; empty if all is well.
        retry_s: until the source is asked again.
        ended: whether the source has no more.
        read_only: whether acting is off.
        pace_s: between two drawings.
        view: what of the rows is left out, in words.
    """

    paused: bool = False
    age_s: float | None = None
    overdue: bool = False
    source_error: str = ""
    retry_s: float = 0.0
    ended: bool = False
    read_only: bool = False
    pace_s: float = 0.0
    view: str = ""


def _mode_cell(frame: Frame | None, status: Status) -> Cell:
    if status.paused:
        return Cell(f"‖ PAUSED {show.whole_seconds(status.age_s)}", "warn")
    if frame is not None and frame.replay is not None:
        replay = frame.replay
        glyph = "▸" if replay.playing else "‖"
        speed = "" if replay.speed == 1 else f" x{replay.speed:g}"
        return Cell(f"{glyph} REPLAY {replay.index + 1}/{replay.count}{speed}", "accent")
    if status.ended:
        return Cell("■ ENDED", "dim")
    if status.overdue:
        return Cell(f"○ {show.stale(status.age_s)}", "warn")
    return Cell("▸ LIVE", "good") if frame is not None else Cell("○ no data yet", "dim")


def _joined(cells: list[Cell], width: int) -> Line:
    """As many of the cells as fit, the first ones first, with two spaces between them."""
    line: list[Cell] = []
    room = width - 1
    for cell in cells:
        if not cell.text:
            continue
        text = show.fit(cell.text, room - 2)
        if len(text) < min(4, len(cell.text)):
            break
        line += [Cell("  " if line else " "), Cell(text, cell.tone)]
        room -= len(text) + 2
    return tuple(line)


def top_lines(frame: Frame | None, status: Status, width: int) -> list[Line]:
    """Two lines, and a third while the source fails."""
    snapshot = frame.snapshot if frame is not None else None
    severities = [alert.symptom.severity for alert in frame.alerts] if frame is not None else []
    counts = [
        Cell(
            f"{states.GLYPHS[states.SEVERITIES[severity]]} {severities.count(severity)} {severity.value}",
            states.SEVERITIES[severity] if severities.count(severity) else "dim",
        )
        for severity in Severity
    ]
    first = [
        states.health_cell(snapshot, severities),
        _mode_cell(frame, status),
        Cell(show.clean(snapshot.cluster) if snapshot else "", "title"),
        *counts,
        Cell(show.clean(snapshot.mode) if snapshot else ""),
        Cell("read only" if status.read_only else "", "dim"),
        Cell(f"every {status.pace_s:g} s" if status.pace_s else "", "dim"),
        Cell(show.model_name(snapshot.model) if snapshot else ""),
        Cell(f"poll took {show.seconds(snapshot.poll_s)}" if snapshot else "", "dim"),
    ]
    second = [
        Cell(f"{show.per_second(snapshot.request_rate if snapshot else None)} req/s"),
        Cell(f"TTFT {show.percentiles(snapshot.ttft if snapshot else None)}"),
        Cell(f"TPOT {show.percentiles(snapshot.tpot if snapshot else None)}"),
        Cell(show.clock_time(snapshot.unix) if snapshot else "", "dim"),
        Cell(show.clean(frame.acting) if frame is not None else "", "accent"),
        Cell(status.view, "accent"),
        Cell(f"{snapshot.poll_errors} readings failed" if snapshot and snapshot.poll_errors else "", "warn"),
    ]
    lines = [_joined(first, width), _joined(second, width)]
    if status.source_error:
        again = f" (trying again in {show.whole_seconds(status.retry_s)})"
        lines.append(_joined([Cell(f"✖ no new data: {show.clean(status.source_error)}{again}", "bad")], width))
    return lines
