"""Who gets how much of the screen. Pure: from sizes to sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

PaneName = Literal["prefill", "decode", "transfers", "alerts"]
Area = Literal["prefill", "decode", "transfers", "alerts", "details"]
PANES: tuple[PaneName, ...] = ("prefill", "decode", "transfers", "alerts")
WIDE = 160
"""From this many columns on, alerts and details have a column of their own."""
SIDE_SHARE = 0.38
"""Of the screen, for that column."""
TALL = 30
"""From this many lines on, details lie below the tables and not over them."""
_FIRST_ROWS = 3
_TITLE = 1
_HEADER = 1
_URGENCY: tuple[PaneName, ...] = ("alerts", "transfers", "prefill", "decode")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: of its cells.
        label: its heading.
        width: in columns of the terminal, without the space after it.
        priority: the columns with the lowest numbers are shown where not all fit.
        right: whether its cells stand at its right edge.
        grows: takes what the others leave; ``width`` is then the least that is worth it.
    """

    key: str
    label: str
    width: int
    priority: int
    right: bool = False
    grows: bool = False


@dataclass(frozen=True)
class Box:
    """A rectangle of the screen's body."""

    x: int
    y: int
    width: int
    height: int


def columns_for(columns: Sequence[Column], width: int) -> tuple[Column, ...]:
    """Those that fit into ``width``, by priority, in their own order; the growing one as wide as there is room.

    The first by priority is always there, however narrow the screen is.
    """
    chosen: list[Column] = []
    room = width
    for column in sorted(columns, key=lambda one: one.priority):
        if chosen and column.width + 1 > room:
            continue
        chosen.append(column)
        room -= column.width + 1
    spare = max(0, room)
    return tuple(
        Column(one.key, one.label, one.width + spare, one.priority, one.right, one.grows) if one.grows else one
        for one in columns
        if one in chosen
    )


def side_width(width: int) -> int:
    """Of the column for alerts and details; 0 where the screen is too narrow for one."""
    return round(width * SIDE_SHARE) if width >= WIDE else 0


def heights(available: int, rows: Mapping[PaneName, int], focused: PaneName | None) -> dict[PaneName, int]:
    """Lines for each pane, its title line included; together no more than ``available``.

    Where room is short, the pane in focus comes first, then alerts, transfers, prefill, decode: each gets a few rows
    if there is room for any, and all share what remains, the one in focus twice as much. A pane may be left with its
    title alone (1), and at last with nothing (0). What nobody needs goes to transfers, else to the last.

    Args:
        available: lines in all.
        rows: of each pane that is to be placed.
        focused: the pane in focus, if it is one of them.
    """
    order = [name for name in _URGENCY if name in rows]
    if focused in order:
        order.remove(focused)
        order.insert(0, focused)
    given: dict[PaneName, int] = dict.fromkeys(rows, 0)
    left = max(0, available)

    def raise_to(name: PaneName, wanted: int, least: int) -> None:
        nonlocal left
        grant = min(wanted - given[name], left)
        if grant > 0 and given[name] + grant >= least:
            given[name] += grant
            left -= grant

    for name in order:
        raise_to(name, _TITLE, _TITLE)
    table = _TITLE + _HEADER + 1
    for name in order:  # a few rows for everybody first, then all
        if rows[name]:
            raise_to(name, _TITLE + _HEADER + min(rows[name], _FIRST_ROWS), table)
    while left:  # then line by line, two for the pane in focus
        before = left
        for name in order:
            if given[name] >= table:
                raise_to(name, min(_TITLE + _HEADER + rows[name], given[name] + (2 if name == focused else 1)), table)
        if left == before:
            break
    if left and order:
        last: PaneName = "transfers" if "transfers" in rows else order[-1]
        given[last] += left
    return given


def _stack(boxes: dict[Area, Box], given: Mapping[PaneName, int], x: int, y: int, width: int) -> None:
    for name in PANES:
        if name in given:
            boxes[name] = Box(x, y, width, given[name])
            y += given[name]


def boxes(
    width: int, height: int, rows: Mapping[PaneName, int], focused: PaneName | None, details_open: bool
) -> dict[Area, Box]:
    """Where everything is in a body of this size. What has no height is not shown.

    Args:
        width: of the body.
        height: of the body.
        rows: of each pane.
        focused: the pane in focus.
        details_open: whether a person has asked for details; on a wide screen they are always there.
    """
    placed: dict[Area, Box] = {}
    side = side_width(width)
    if side:
        left = width - side - 1
        alerts_height = min(height, max(3, min(rows.get("alerts", 0) + 2, height * 2 // 5)))
        others: dict[PaneName, int] = {name: count for name, count in rows.items() if name != "alerts"}
        _stack(placed, heights(height, others, focused), 0, 0, left)
        placed["alerts"] = Box(left + 1, 0, side, alerts_height)
        placed["details"] = Box(left + 1, alerts_height, side, height - alerts_height)
        return placed
    details_height = 0
    if details_open:
        details_height = height // 2 if height >= TALL else height
    _stack(placed, heights(height - details_height, rows, focused), 0, 0, width)
    placed["details"] = Box(0, height - details_height, width, details_height)
    return placed
