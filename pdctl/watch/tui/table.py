"""A pane of rows: a title line, and a table of which only the lines that changed are drawn anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Static

from pdctl.watch.tui import format as show
from pdctl.watch.tui.format import Cell
from pdctl.watch.tui.place import Column, PaneName, columns_for
from pdctl.watch.tui.rows import COLUMNS, Order, Row
from pdctl.watch.tui.theme import as_text, tone_style

_TITLES: dict[PaneName, str] = {"prefill": "PREFILL", "decode": "DECODE", "transfers": "TRANSFERS", "alerts": "ALERTS"}
_SCROLLBAR = 1
_HEADING = 1


class RowTable(ScrollView, can_focus=True):
    """Rows with a heading and a cursor.

    Only what is in view is made into text, and only lines that differ from what is on the screen are drawn anew.

    Rows come, go and change places with every frame, hundreds at a time. A DataTable measures and renders each cell
    through rich, which costs ten times as much; here all widths are given and each row is one line.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"row-table--heading", "row-table--cursor"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "move(-1000000000)", "first", show=False),
        Binding("end", "move(1000000000)", "last", show=False),
        Binding("enter", "open", "details", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row."""

    class Opened(Message):
        """Details of the row under the cursor are asked for."""

    class HeadingClicked(Message):
        """The heading of a column was clicked."""

        def __init__(self, pane: PaneName, column: str) -> None:
            super().__init__()
            self.pane = pane
            self.column = column

    def __init__(self, pane: PaneName) -> None:
        super().__init__(id=f"{pane}-table")
        self.pane = pane
        self.lines_drawn = 0
        self.cursor_row = 0
        self._key: str | None = None
        # Until a person moves it, the cursor stays at the top, where the worst and the newest are.
        self._held = False
        self._columns: tuple[Column, ...] = ()
        self._rows: list[Row] = []
        self._on_screen: dict[int, tuple[Cell, ...]] = {}

    @property
    def row_models(self) -> Sequence[Row]:
        """The rows that are shown, in order."""
        return self._rows

    @property
    def shown_columns(self) -> tuple[Column, ...]:
        """The columns that fit."""
        return self._columns

    def selected(self) -> Row | None:
        """The row under the cursor."""
        return self._rows[self.cursor_row] if 0 <= self.cursor_row < len(self._rows) else None

    def place(self, width: int) -> None:
        """Take the columns that fit into this width."""
        columns = columns_for(COLUMNS[self.pane], max(1, width - _SCROLLBAR))
        if columns != self._columns:
            self._columns = columns
            self._on_screen.clear()
            self.refresh()

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Show these rows. A cursor that was moved stays on its row, wherever that goes; else it stays at the top."""
        self._rows = list(rows)
        size = Size(1, len(self._rows) + _HEADING)
        if size != self.virtual_size:
            self.virtual_size = size
        place = next((number for number, row in enumerate(self._rows) if row.key == self._key), None)
        if not self._held:
            place = 0
        self._put_cursor(place if place is not None else min(self.cursor_row, len(self._rows) - 1))
        height, width = self.size.height, self.size.width
        changed = [y for y in range(_HEADING, height) if self._on_screen.get(y) != self._cells_at(y)]
        if len(changed) > height // 2:
            self.refresh()
        else:
            for y in changed:
                self.refresh(Region(0, y, width, 1))

    def _put_cursor(self, place: int) -> None:
        place = max(0, place)
        moved = place != self.cursor_row
        if moved:
            self._refresh_row(self.cursor_row)
            self.cursor_row = place
            self._refresh_row(place)
        row = self.selected()
        self._key = row.key if row is not None else None
        if moved:
            self._into_view()

    def _refresh_row(self, number: int) -> None:
        y = number + _HEADING - round(self.scroll_y)
        if _HEADING <= y < self.size.height:
            self.refresh(Region(0, y, self.size.width, 1))

    def _into_view(self) -> None:
        room = max(1, self.size.height - _HEADING)
        top = round(self.scroll_y)
        if self.cursor_row < top:
            self.scroll_to(y=self.cursor_row, animate=False, force=True)
        elif self.cursor_row >= top + room:
            self.scroll_to(y=self.cursor_row - room + 1, animate=False, force=True)

    def on_resize(self) -> None:
        """Keep the cursor in view."""
        self.call_after_refresh(self._into_view)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Every line shows another row."""
        super().watch_scroll_y(old_value, new_value)
        self._on_screen.clear()

    def select_key(self, key: str) -> bool:
        """Put the cursor on that row, if it is shown."""
        place = next((number for number, row in enumerate(self._rows) if row.key == key), None)
        if place is None:
            return False
        self._held = True
        self._put_cursor(place)
        return True

    def _cells_at(self, y: int) -> tuple[Cell, ...]:
        number = y - _HEADING + round(self.scroll_y)
        if not 0 <= number < len(self._rows):
            return ()
        cells = self._rows[number].cells
        return tuple(cells[column.key] for column in self._columns)

    def render_line(self, y: int) -> Strip:
        """One line of the screen."""
        width = self.size.width
        base = self.rich_style
        if y < _HEADING:
            heading = self.get_component_rich_style("row-table--heading")
            labels = tuple(Cell(column.label) for column in self._columns)
            return self._strip(labels, heading, width)
        cells = self._cells_at(y)
        self._on_screen[y] = cells
        self.lines_drawn += 1
        if not cells:
            return Strip.blank(width, base)
        if y - _HEADING + round(self.scroll_y) == self.cursor_row:
            base = self.get_component_rich_style("row-table--cursor")
        return self._strip(cells, base, width)

    def _strip(self, cells: tuple[Cell, ...], base: Style, width: int) -> Strip:
        segments = []
        for column, cell in zip(self._columns, cells, strict=True):
            text = (show.fit_left if column.right else show.fit_right)(cell.text, column.width)
            segments.append(Segment(text + " ", base + tone_style(cell.tone)))
        length = sum(column.width + 1 for column in self._columns)
        return Strip(segments, length).adjust_cell_length(width, base)

    def action_move(self, step: int) -> None:
        """Move the cursor by so many rows."""
        before = self.cursor_row
        self._put_cursor(max(0, min(len(self._rows) - 1, before + step)))
        self._held = self.cursor_row > 0
        if self.cursor_row != before:
            self.post_message(self.Moved())

    def action_page(self, pages: int) -> None:
        """Move the cursor by so many screens."""
        self.action_move(pages * max(1, self.size.height - _HEADING))

    def action_open(self) -> None:
        """Ask for details."""
        if self.selected() is not None:
            self.post_message(self.Opened())

    def on_click(self, event: events.Click) -> None:
        """A click selects, on the selected row it opens, on a heading it sorts."""
        event.stop()
        if event.y < _HEADING:
            right = 0
            for column in self._columns:
                right += column.width + 1
                if event.x < right:
                    self.post_message(self.HeadingClicked(self.pane, column.key))
                    return
            return
        number = event.y - _HEADING + round(self.scroll_y)
        if number >= len(self._rows):
            return
        if number == self.cursor_row and event.chain > 1:
            self.action_open()
        else:
            self.action_move(number - self.cursor_row)


class PaneTitle(Static):
    """The title line; a click brings its pane into focus."""

    class Clicked(Message):
        """The title of a pane was clicked."""

        def __init__(self, pane: PaneName) -> None:
            super().__init__()
            self.pane = pane

    def __init__(self, pane: PaneName) -> None:
        super().__init__(classes="pane-title")
        self.pane = pane
        self.said: tuple[Cell, ...] = ()

    def say(self, cells: tuple[Cell, ...]) -> None:
        """Show this, if it is new."""
        if cells != self.said:
            self.said = cells
            self.update(as_text([cells]), layout=False)

    def on_click(self, event: events.Click) -> None:
        """Tell the application."""
        event.stop()
        self.post_message(self.Clicked(self.pane))


class Pane(Vertical):
    """A title line and its table."""

    def __init__(self, pane: PaneName) -> None:
        super().__init__(id=pane, classes="pane")
        self.pane = pane
        self.title_line = PaneTitle(pane)
        self.table = RowTable(pane)

    def compose(self) -> ComposeResult:
        """The two parts."""
        yield self.title_line
        yield self.table

    def show_rows(self, rows: Sequence[Row], of: int, order: Order | None, note: str = "") -> None:
        """Show some of the ``of`` rows that there are."""
        faulty = sum(1 for row in rows if row.faulty)
        number = f"{len(rows)}" if len(rows) == of else f"{len(rows)} of {of}"
        focused = self.table.has_focus
        cells = [Cell("▸ " if focused else "  ", "accent"), Cell(_TITLES[self.pane], "accent" if focused else "title")]
        cells.append(Cell(f"  {number}" if of else "  none", "dim"))
        if faulty and self.pane != "alerts":
            cells.append(Cell(f"  ▲ {faulty} with a fault", "warn"))
        if order is not None and (order.column or order.reverse):
            label = next((one.label for one in COLUMNS[self.pane] if one.key == order.column), "urgency")
            cells.append(Cell(f"  by {label} {'▼' if order.reverse else '▲'}", "accent"))
        if note:
            cells.append(Cell(f"  {note}", "warn"))
        self.title_line.say(tuple(cells))
        self.table.show_rows(rows)

    def place(self, height: int, width: int) -> None:
        """Take this much room."""
        self.display = height > 0
        self.styles.height = height
        self.table.styles.height = max(0, height - 1)
        self.table.place(width)


class Body(Container):
    """Holds panes and details; says when its own size has changed, which is later than the screen's."""

    class Resized(Message):
        """There is more or less room."""

    def on_resize(self) -> None:
        """Tell the application."""
        self.post_message(self.Resized())
