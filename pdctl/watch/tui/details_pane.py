"""The pane that tells all about one row."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from pdctl.watch.tui.format import Cell, Line
from pdctl.watch.tui.theme import as_text


class DetailsPane(Vertical):
    """A title and lines to scroll."""

    def __init__(self) -> None:
        super().__init__(id="details")
        self._title = Static(id="details-title")
        self._scroll = VerticalScroll(id="details-scroll")
        self._body = Static(id="details-body")
        self._lines: list[Line] | None = None
        self._titled: tuple[bool, str] | None = None

    def compose(self) -> ComposeResult:
        """The parts."""
        yield self._title
        with self._scroll:
            yield self._body

    @property
    def scroll(self) -> VerticalScroll:
        """What takes the focus."""
        return self._scroll

    @property
    def text(self) -> str:
        """What it shows, without colours."""
        return as_text(self._lines or []).plain

    def show_lines(self, name: str, lines: list[Line], *, new_subject: bool) -> None:
        """Draw anew, if anything differs. Another subject is shown from its beginning."""
        titled = (self._scroll.has_focus, name)
        if titled != self._titled:
            self._titled = titled
            mark = "▸ " if titled[0] else "  "
            self._title.update(
                as_text([(Cell(f"{mark}DETAILS", "accent" if titled[0] else "title"), Cell(f"  {name}"))])
            )
        if lines != self._lines:
            # Placing anew costs a drawing of the whole screen: only where a line may need more or less room.
            before = self._lines or []
            same = [sum(len(cell.text) for cell in line) for line in before] == [
                sum(len(cell.text) for cell in line) for line in lines
            ]
            self._lines = lines
            self._body.update(as_text(lines), layout=not same)
        if new_subject:
            self._scroll.scroll_home(animate=False)
