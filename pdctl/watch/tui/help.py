"""The help text. A test holds it against the bindings."""

from __future__ import annotations

from pdctl.watch.tui.details import heading
from pdctl.watch.tui.format import Cell, Line

KEYS: tuple[tuple[str, str], ...] = (
    ("?", "this help"),
    ("q", "quit"),
    ("tab  shift+tab", "next pane, previous pane"),
    ("↑ ↓  j k", "move in a pane"),
    ("enter", "details of the row, with the end of its log"),
    ("esc", "close details, then take filters away"),
    ("/", "filter all panes by a word; !word leaves out what has it"),
    (":", "go to an instance, an alert's code or a transfer; quit"),
    ("s  S", "sort by the next column; turn the order around. A click on a heading does both"),
    ("f", "faults only"),
    ("l", "log of the instance; r reads it again"),
    ("p", "pause drawing; polling, alerts and recording go on"),
    ("d", "doctor for the pair of prefill and decode that the row is about"),
    ("+  -", "poll more often, less often; of a replay: play faster, slower"),
)
ACTING: tuple[tuple[str, str], ...] = (
    ("R", "restart the instance"),
    ("D", "drain the instance: no new requests go to it"),
)
REPLAYING: tuple[tuple[str, str], ...] = (
    ("← →  with shift", "one snapshot back, forward; with shift ten"),
    ("home  end", "first, last snapshot"),
    ("space", "play, stop"),
)


def _keys(keys: tuple[tuple[str, str], ...]) -> list[Line]:
    return [(Cell(f"  {key:<16} ", "accent"), Cell(what)) for key, what in keys]


def help_lines(read_only: bool, replaying: bool) -> list[Line]:
    """All keys, and what the signs mean."""
    off = "  (off: read only)" if read_only else "  (each asks first)"
    return [
        *_keys(KEYS),
        (Cell("Changing the cluster", "title"), Cell(off, "dim")),
        *_keys(ACTING),
        (Cell("In a replay", "title"), Cell("" if replaying else "  (this is none)", "dim")),
        *_keys(REPLAYING),
        heading("Signs"),
        (
            Cell("  ● well  ", "good"),
            Cell("▲ look at it  ", "warn"),
            Cell("✖ broken  ", "bad"),
            Cell("○ not of now", "dim"),
        ),
        (
            Cell("  -  was not read: that is not zero.   "),
            Cell("stale 7 s", "dim"),
            Cell("  is the last reading, 7 s old."),
        ),
        (
            Cell("  ≥  some ranks did not say.   "),
            Cell("▸ stage 1/4", "accent"),
            Cell("  1 of 4 ranks is still in flight."),
        ),
    ]
