"""The first lines of the screen."""

from __future__ import annotations

from textual.widgets import Static

from pdctl.watch.tui.format import Line
from pdctl.watch.tui.source import Frame
from pdctl.watch.tui.summary import Status, top_lines
from pdctl.watch.tui.theme import as_text


class TopBar(Static):
    """Draws :func:`top_lines`."""

    _lines: list[Line] | None = None

    def show_status(self, frame: Frame | None, status: Status) -> int:
        """Draw anew if anything differs, and say how many lines that takes."""
        lines = top_lines(frame, status, self.app.size.width)
        if lines != self._lines:
            taller = self._lines is None or len(lines) != len(self._lines)
            self._lines = lines
            if taller:
                self.styles.height = len(lines)
            self.update(as_text(lines), layout=taller)
        return len(lines)
