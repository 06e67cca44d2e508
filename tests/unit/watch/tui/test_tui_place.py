"""Who gets how much room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdctl.watch.tui.place import PANES, PaneName, boxes, columns_for, heights
from pdctl.watch.tui.rows import COLUMNS

ROWS = st.fixed_dictionaries({name: st.integers(0, 600) for name in PANES})


@given(st.integers(0, 200), ROWS, st.sampled_from([None, *PANES]))
def test_heights_fill_the_room_and_never_more(
    available: int, rows: dict[PaneName, int], focused: PaneName | None
) -> None:
    given_lines = heights(available, rows, focused)

    assert sum(given_lines.values()) == available
    assert all(lines >= 0 for lines in given_lines.values())


@given(st.integers(19, 200), ROWS, st.sampled_from(PANES))
def test_every_pane_that_has_rows_shows_some_on_the_smallest_usual_screen(
    available: int, rows: dict[PaneName, int], focused: PaneName
) -> None:
    given_lines = heights(available, rows, focused)

    for name in PANES:
        assert given_lines[name] >= (2 + min(rows[name], 2) if rows[name] else 1)


def test_where_room_is_short_the_pane_in_focus_and_the_alerts_come_first() -> None:
    rows: dict[PaneName, int] = dict.fromkeys(PANES, 9)

    assert heights(12, rows, "decode") == {"prefill": 1, "decode": 5, "transfers": 1, "alerts": 5}
    assert heights(2, rows, "decode") == {"prefill": 0, "decode": 1, "transfers": 0, "alerts": 1}


@given(st.integers(1, 300), st.integers(1, 100), ROWS, st.sampled_from(PANES), st.booleans())
def test_boxes_lie_within_the_body_and_do_not_overlap(
    width: int, height: int, rows: dict[PaneName, int], focused: PaneName, details_open: bool
) -> None:
    placed = boxes(width, height, rows, focused, details_open)

    covered: set[tuple[int, int]] = set()
    for box in placed.values():
        if box.height <= 0:
            continue
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.width <= width
        assert box.y + box.height <= height
        corners = {(x, y) for x in (box.x, box.x + box.width - 1) for y in range(box.y, box.y + box.height)}
        assert not corners & covered
        covered |= corners


@given(st.integers(1, 300), st.sampled_from(PANES))
def test_columns_fit_and_the_first_is_always_there(width: int, pane: PaneName) -> None:
    columns = columns_for(COLUMNS[pane], width)

    total = sum(column.width + 1 for column in columns)
    assert total <= width or len(columns) == 1
    assert min(COLUMNS[pane], key=lambda one: one.priority).key in [column.key for column in columns]
    if any(column.grows for column in columns):
        assert total == width


def test_on_80_columns_the_figures_that_matter_are_there() -> None:
    shown = {pane: [column.key for column in columns_for(COLUMNS[pane], 79)] for pane in PANES}

    assert {"name", "process", "engine", "queue", "kv", "writer", "flight", "oldest"} <= set(shown["prefill"])
    assert {"key", "p_stage", "d_stage", "age"} <= set(shown["transfers"])
    assert {"severity", "code", "subject", "message"} <= set(shown["alerts"])
