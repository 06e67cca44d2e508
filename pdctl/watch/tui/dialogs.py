"""What lies over the panes: a question, a text to scroll, and the line that is typed into."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from pdctl.watch.tui import format as show
from pdctl.watch.tui.format import Line
from pdctl.watch.tui.theme import as_text


class ConfirmDialog(ModalScreen[bool]):
    """Asks before anything is done to the cluster. The safe answer has the focus."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
        Binding("left,right", "app.focus_next", "other button", show=False),
    ]

    def __init__(self, question: str, consequence: str, verb: str) -> None:
        super().__init__()
        self.question = question
        self._consequence = consequence
        self._verb = verb

    def compose(self) -> ComposeResult:
        """Question, consequence, two buttons."""
        with Vertical(id="confirm"):
            yield Static(Text(self.question, style="bold"), id="question")
            yield Static(Text(self._consequence), id="consequence")
            with Horizontal(id="answers"):
                yield Button("Cancel (n)", id="cancel", compact=True)
                yield Button(f"{self._verb} (y)", id="confirm-yes", variant="error", compact=True)

    def on_mount(self) -> None:
        """The safe answer first."""
        self.query_one("#cancel").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """An answer by mouse or enter."""
        event.stop()
        self.dismiss(event.button.id == "confirm-yes")

    def action_answer(self, answer: bool) -> None:
        """An answer by key."""
        self.dismiss(answer)


class TextDialog(ModalScreen[None]):
    """A text to read and to scroll: help, a log, a report.

    Args:
        title: of the dialog.
        lines: the text; ``load`` may replace it.
        load: called when the dialog opens and when ``r`` is pressed, to have the text fetched anew.
        at_end: whether to show the end of the text first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "close", "close"),
        Binding("r", "load", "read again"),
        Binding("j", "scroll('down')", show=False),
        Binding("k", "scroll('up')", show=False),
    ]

    def __init__(
        self,
        title: str,
        lines: list[Line],
        *,
        load: Callable[[TextDialog], None] | None = None,
        at_end: bool = False,
    ) -> None:
        super().__init__()
        self._title = title
        self._lines = lines
        self._load = load
        self._at_end = at_end

    def compose(self) -> ComposeResult:
        """Title, text, a reminder of the keys."""
        again = "  r read again" if self._load else ""
        with Vertical(id="text-dialog"):
            yield Static(Text(self._title, style="bold"), id="text-title")
            with VerticalScroll(id="text-scroll"):
                yield Static(as_text(self._lines), id="text-body")
            yield Static(Text(f"esc close  ↑ ↓ scroll{again}", style="dim"), id="text-keys")

    def on_mount(self) -> None:
        """Ask for the text, if it is to come."""
        self.query_one("#text-scroll").focus()
        self.action_load()

    def action_load(self) -> None:
        """Have the text fetched again."""
        if self._load:
            self._load(self)

    def action_scroll(self, where: str) -> None:
        """One line up or down."""
        scroll = self.query_one("#text-scroll", VerticalScroll)
        scroll.scroll_relative(y=1 if where == "down" else -1, animate=False)

    def action_close(self) -> None:
        """Go back."""
        self.dismiss(None)

    def set_lines(self, lines: list[Line]) -> None:
        """Show another text."""
        self._lines = lines
        if self.is_mounted:
            self.query_one("#text-body", Static).update(as_text(lines))
            if self._at_end:
                self.query_one("#text-scroll", VerticalScroll).scroll_end(animate=False)

    @property
    def text(self) -> str:
        """What it shows, without colours."""
        return as_text(self._lines).plain


class Prompt(Input):
    """The line for a filter or a command, shown while it is typed into."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.leave_prompt", "leave", show=False)]

    def __init__(self) -> None:
        super().__init__(id="prompt", compact=True, select_on_focus=False)
        self.kind = ""
        self.display = False

    def open(self, kind: str, value: str = "") -> None:
        """Begin to type: kind is ``/`` or ``:``."""
        self.kind = kind
        self.placeholder = (
            "filter all panes; !word leaves out" if kind == "/" else "goto INSTANCE | T002 | TRANSFER  (or: quit)"
        )
        self.border_title = None
        self.value = value
        self.cursor_position = len(value)
        self.display = True
        self.focus()

    def close_prompt(self) -> None:
        """Hide it."""
        self.kind = ""
        self.display = False


def plain_lines(text: str, limit: int = 2000) -> list[Line]:
    """A foreign text of several lines, made safe to show, the last ``limit`` of them."""
    return [(show.Cell(show.clean(line.expandtabs(4), 2000)),) for line in text.splitlines()[-limit:]]
