"""The dashboard: takes frames, draws them, and does what keys and the mouse ask for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.screen import ModalScreen
from textual.widgets import Footer, Input

from pdctl.watch.acting import action_words
from pdctl.watch.snapshot import InstanceView, TransferView
from pdctl.watch.tui import details, targets
from pdctl.watch.tui import format as show
from pdctl.watch.tui.ascii_only import AsciiOnly, shows_unicode
from pdctl.watch.tui.details_pane import DetailsPane
from pdctl.watch.tui.dialogs import ConfirmDialog, Prompt, TextDialog, plain_lines
from pdctl.watch.tui.feed import Feed, explain
from pdctl.watch.tui.format import Cell, Line
from pdctl.watch.tui.help import help_lines
from pdctl.watch.tui.place import PANES, Area, Box, PaneName, boxes
from pdctl.watch.tui.rows import Order, RateHistory, Row, View, chosen_rows, known_sum, make_rows, sortable
from pdctl.watch.tui.source import Actions, Frame, PacedSource, ReplaySource, SnapshotSource
from pdctl.watch.tui.summary import Status
from pdctl.watch.tui.table import Body, Pane, PaneTitle, RowTable
from pdctl.watch.tui.theme import THEME
from pdctl.watch.tui.topbar import TopBar

PACES_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between two drawings; 0 draws every frame. For a source whose own pace cannot be changed."""
POLLS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between two polls of a source whose pace can be changed."""
SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Of a replay."""
OVERDUE_S = 3.0
_OVERDUE_TICKS = 3
_LOG_LINES = 40


def _no_rows() -> dict[PaneName, list[Row]]:
    return {pane: [] for pane in PANES}


class Dashboard(App[None]):
    """Shows what a source tells, and lets a person act on it.

    Args:
        source: of frames; closed when the dashboard ends.
        read_only: whether restart and drain are off.
        actions: what may be done; None where nothing can be, as in a replay.
        clock: monotonic seconds, for the age of what is shown.
        encoding: of the terminal; signs that it cannot show are drawn in ASCII.
    """

    CSS_PATH = "dashboard.tcss"
    TITLE = "pdctl watch"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("slash", "prompt('/')", "filter", key_display="/"),
        Binding("colon", "prompt(':')", "goto", key_display=":"),
        Binding("enter", "open_details", "details", show=False),
        Binding("escape", "leave", "back", show=False),
        Binding("tab", "next_pane(1)", "pane", priority=True, show=False),
        Binding("shift+tab", "next_pane(-1)", "pane before", priority=True, show=False),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "turn around", show=False),
        Binding("f", "faults_only", "faults"),
        Binding("l", "logs", "logs"),
        Binding("p", "pause", "pause"),
        Binding("d", "doctor_pair", "doctor"),
        Binding("plus,equals_sign", "faster(1)", "faster", show=False),
        Binding("minus", "faster(-1)", "slower", show=False),
        Binding("R", "restart", "restart", key_display="R"),
        Binding("D", "drain", "drain", key_display="D"),
        Binding("left", "replay_step(-1)", "back", priority=True, show=False),
        Binding("right", "replay_step(1)", "forward", priority=True, show=False),
        Binding("shift+left", "replay_step(-10)", "10 back", priority=True, show=False),
        Binding("shift+right", "replay_step(10)", "10 forward", priority=True, show=False),
        Binding("home", "replay_seek(0)", "first", priority=True, show=False),
        Binding("end", "replay_seek(-1)", "last", priority=True, show=False),
        Binding("space", "replay_play", "play", priority=True, show=False),
    ]

    def __init__(
        self,
        source: SnapshotSource,
        *,
        read_only: bool,
        actions: Actions | None,
        clock: Callable[[], float] = time.monotonic,
        encoding: str | None = "utf-8",
    ) -> None:
        super().__init__()
        self._ascii = [] if shows_unicode(encoding) else [AsciiOnly()]
        self.register_theme(THEME)
        self.theme = THEME.name
        # Shown figures must stand still while they are read, and a slow link must not be kept busy.
        self.animation_level = "none"
        self._source = source
        self._read_only = read_only
        self._actions = actions
        self._clock = clock
        self._feed = Feed(source, on_frame=self._feed_frame, on_error=self._feed_error, on_end=self._feed_end)
        self._newest_lock = threading.Lock()
        self._newest: Frame | None = None
        self._newest_pending = False

        self._latest: Frame | None = None
        self._latest_at = 0.0
        self._interval_s = 0.0
        self._shown: Frame | None = None
        self._shown_at = 0.0
        self._drawn_at: float | None = None
        self.frames_drawn = 0
        self._history = RateHistory()
        self._made = _no_rows()

        self._view = View()
        self._pane: PaneName = "prefill"
        self._details_open = False
        self._details_key: tuple[PaneName, str] | None = None
        self._logs: dict[str, list[Line]] = {}
        self._boxes: Mapping[Area, Box] = {}
        self._paused = False
        self._pace_s = PACES_S[0]
        self._source_error = ""
        self._retry_at = 0.0
        self._ended = False

        self._top = TopBar()
        self._body = Body(id="body")
        self._panes: dict[PaneName, Pane] = {name: Pane(name) for name in PANES}
        self._details = DetailsPane()
        self._prompt = Prompt()

    # --- what tests and the command line look at

    @property
    def shown(self) -> Frame | None:
        """The frame that is drawn."""
        return self._shown

    @property
    def pane(self) -> PaneName:
        """The pane in focus, or that was before the details were."""
        return self._pane

    @property
    def details_open(self) -> bool:
        """Whether details were asked for."""
        return self._details_open

    @property
    def details_text(self) -> str:
        """What the details say."""
        return self._details.text

    @property
    def status(self) -> Status:
        """What the top bar shows."""
        now = self._clock()
        replaying = self._shown is not None and self._shown.replay is not None
        age_s = None if self._shown is None else max(0.0, now - self._shown_at)
        silent_s = 0.0 if self._latest is None else now - self._latest_at
        limit = max(OVERDUE_S, _OVERDUE_TICKS * self._interval_s)
        return Status(
            paused=self._paused,
            age_s=age_s,
            overdue=not replaying and self._latest is not None and silent_s > limit,
            source_error=self._source_error,
            retry_s=max(0.0, self._retry_at - now),
            ended=self._ended,
            read_only=self._read_only,
            pace_s=self._source.interval_s if isinstance(self._source, PacedSource) else self._pace_s,
            view=self._view_words(),
        )

    def table(self, pane: PaneName) -> RowTable:
        """The table of a pane."""
        return self._panes[pane].table

    def get_line_filters(self) -> Sequence[LineFilter]:
        """What goes over all that is drawn."""
        return [*super().get_line_filters(), *self._ascii]

    # --- life

    def compose(self) -> ComposeResult:
        """Top bar, body, prompt, keys."""
        yield self._top
        with self._body:
            yield from self._panes.values()
            yield self._details
        yield self._prompt
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        """Begin to ask for frames."""
        self.set_class(self.no_color, "-no-colour")
        self._focus_pane("prefill")
        self._present()
        self.set_interval(1.0, self._every_second)
        self._feed.start()

    def on_unmount(self) -> None:
        """Let the source go."""
        self._feed.stop()

    @on(Body.Resized)
    def _body_resized(self, event: Body.Resized) -> None:
        event.stop()
        self._present()

    # --- frames

    def _from_thread(self, callback: Callable[..., None], *arguments: object) -> None:
        """Have the event loop call this, from another thread. Once the screen is gone there is nobody to tell."""
        try:
            self.call_later(callback, *arguments)
        except RuntimeError:
            if self.is_running:
                raise

    def _feed_frame(self, frame: Frame) -> None:
        # Several frames that come faster than they can be drawn become one: the newest.
        with self._newest_lock:
            self._newest = frame
            if self._newest_pending:
                return
            self._newest_pending = True
        self._from_thread(self._take_newest)

    def _feed_error(self, text: str, retry_s: float) -> None:
        self._from_thread(self._note_error, text, retry_s)

    def _feed_end(self) -> None:
        self._from_thread(self._note_end)

    def _note_error(self, text: str, retry_s: float) -> None:
        self._source_error = text
        self._retry_at = self._clock() + retry_s
        self._show_top()

    def _note_end(self) -> None:
        self._ended = True
        self._source_error = ""
        self._show_top()

    def _take_newest(self) -> None:
        with self._newest_lock:
            frame, self._newest, self._newest_pending = self._newest, None, False
        if frame is not None:
            self.take(frame)

    def take(self, frame: Frame) -> None:
        """Take a frame in, and draw it unless drawing is paused or it is too soon."""
        now = self._clock()
        if self._latest is not None:
            self._interval_s = max(0.0, min(60.0, frame.snapshot.at - self._latest.snapshot.at))
        self._latest, self._latest_at = frame, now
        self._source_error = ""
        for event in frame.actions:
            level = {"failed": "error", "done": "information"}.get(event.outcome, "warning")
            self._say(show.clean(action_words(event), 600), level)
        self._history.add(frame.snapshot)
        soon = self._drawn_at is not None and now - self._drawn_at < self._pace_s and frame.replay is None
        if not self._paused and not soon:
            self._draw_latest()

    def _draw_latest(self) -> None:
        if self._latest is None:
            return
        self._shown, self._shown_at = self._latest, self._latest_at
        self._drawn_at = self._clock()
        self._made = {**_no_rows(), **make_rows(self._shown, self._history)}
        self.frames_drawn += 1
        self._present()

    def _every_second(self) -> None:
        undrawn = self._latest is not None and self._latest is not self._shown
        if undrawn and not self._paused and self._clock() - (self._drawn_at or 0.0) >= self._pace_s:
            self._draw_latest()
        else:
            self._show_top()

    # --- drawing

    def _view_words(self) -> str:
        words = []
        if self._view.filter:
            words.append(f"/{show.clean(self._view.filter, 40)}")
        if self._view.faults_only:
            words.append("faults only")
        return "  ".join(words)

    def _show_top(self) -> None:
        status = self.status
        self._top.show_status(self._shown, status)
        self._body.set_class(status.overdue or (bool(self._source_error) and not self._paused), "-overdue")

    def _present(self) -> None:
        """Draw the frame that is shown, as it is filtered, sorted and placed now."""
        if not self._top.is_mounted:
            return
        with self.batch_update():
            self._show_top()
            chosen = {name: chosen_rows(self._made[name], self._view, name) for name in PANES}
            self._place({name: len(rows) for name, rows in chosen.items()})
            for name, pane in self._panes.items():
                note = ""
                if name == "transfers" and self._shown is not None and self._shown.snapshot.dropped:
                    note = f"and {show.count(self._shown.snapshot.dropped)} more in flight that are not shown"
                pane.show_rows(chosen[name], len(self._made[name]), self._view.orders.get(name), note)
            self._show_details()

    def _place(self, rows: Mapping[PaneName, int]) -> None:
        width, height = self._body.size
        if not width or not height:
            return
        placed = boxes(width, height, rows, self._pane, self._details_open)
        if placed == self._boxes:
            return
        self._boxes = placed
        for name, pane in self._panes.items():
            box = placed[name]
            pane.styles.offset = (box.x, box.y)
            pane.styles.width = box.width
            pane.place(box.height, box.width)
        box = placed["details"]
        self._details.styles.offset = (box.x, box.y)
        self._details.styles.width = box.width
        self._details.styles.height = box.height
        self._details.display = box.height > 0

    def _selected(self) -> tuple[PaneName, str] | None:
        row = self._panes[self._pane].table.selected()
        return (self._pane, row.key) if row is not None else None

    def _subject(self) -> targets.Subject | None:
        selected = self._selected()
        if self._shown is None or selected is None:
            return None
        return targets.subject_of(self._shown, *selected)

    def _show_details(self) -> None:
        box = self._boxes.get("details")
        if box is None or box.height <= 0:
            return
        selected, subject = self._selected(), self._subject()
        name = "" if selected is None else show.clean(selected[1].replace("\n", " "), 60)
        lines: list[Line] = [(Cell("  nothing is selected", "dim"),)]
        if self._shown is not None and subject is not None:
            if isinstance(subject, InstanceView):
                lines = [*details.instance_lines(subject, self._shown), *self._log_tail(subject.name)]
            elif isinstance(subject, TransferView):
                lines = details.transfer_lines(subject, self._shown, box.width - 2)
            else:
                lines = details.alert_lines(subject)
        self._details.show_lines(name, lines, new_subject=selected != self._details_key)
        self._details_key = selected

    def _log_tail(self, instance: str) -> list[Line]:
        if self._actions is None:
            return []
        tail = self._logs.get(instance)
        if tail is None:
            return [details.heading("log"), (Cell("  enter reads its end", "dim"),)]
        return [details.heading("end of its log"), *tail]

    # --- focus and selection

    def _focus_pane(self, pane: PaneName) -> None:
        self._pane = pane
        self._panes[pane].table.focus()

    @on(events.DescendantFocus)
    def _focus_moved(self, event: events.DescendantFocus) -> None:
        if isinstance(event.widget, RowTable):
            self._pane = event.widget.pane
        self._present()

    @on(RowTable.Moved)
    def _cursor_moved(self, event: RowTable.Moved) -> None:
        event.stop()
        self._show_details()

    @on(RowTable.Opened)
    def _details_asked(self, event: RowTable.Opened) -> None:
        event.stop()
        self.action_open_details()

    @on(RowTable.HeadingClicked)
    def _heading_clicked(self, event: RowTable.HeadingClicked) -> None:
        event.stop()
        self._focus_pane(event.pane)
        if event.column not in sortable(self.table(event.pane).shown_columns):
            return
        order = self._view.orders.setdefault(event.pane, Order())
        order.reverse = not order.reverse if order.column == event.column else False
        order.column = event.column
        self._present()

    @on(PaneTitle.Clicked)
    def _title_clicked(self, event: PaneTitle.Clicked) -> None:
        self._focus_pane(event.pane)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of the replay are those of the tables where nothing is replayed; dialogs have all keys to themselves."""
        del parameters
        if action in ("replay_step", "replay_seek", "replay_play"):
            return self._replay() is not None and not self._typing()
        if action == "next_pane":
            return not self._typing()
        return True

    def _typing(self) -> bool:
        """Whether keys belong to a dialog or to the prompt."""
        return isinstance(self.screen, ModalScreen) or isinstance(self.focused, Input)

    def action_next_pane(self, step: int) -> None:
        """Focus the next of the panes that are there, details among them."""
        ring: list[Area] = [name for name in PANES if self._panes[name].display]
        if self._details.display:
            ring.append("details")
        if not ring:
            return
        here: Area = "details" if self._details.scroll.has_focus else self._pane
        place = ring.index(here) + step if here in ring else 0
        chosen = ring[place % len(ring)]
        if chosen == "details":
            self._details.scroll.focus()
        else:
            self._focus_pane(chosen)

    def action_open_details(self) -> None:
        """Show all about the selected row, with the end of its log."""
        if self._selected() is None:
            return
        self._details_open = True
        self._present()
        if self._panes[self._pane].display is False or self._boxes["details"].height >= self._body.size.height:
            self._details.scroll.focus()
        subject = self._subject()
        if isinstance(subject, InstanceView) and self._actions is not None:
            self._logs[subject.name] = [(Cell("  being read", "dim"),)]
            self._show_details()
            self._fetch_tail(subject.name, self._actions)

    def _fetch_tail(self, instance: str, actions: Actions) -> None:
        def done(text: str, failed: bool) -> None:
            lines = plain_lines(text, _LOG_LINES)
            self._logs[instance] = [(Cell(f"  {text}", "bad"),)] if failed else lines or [(Cell("  empty", "dim"),)]
            self._show_details()

        self._in_background(lambda: actions.logs(instance), done)

    def action_leave(self) -> None:
        """Close the details, else take the filter away, else show all rows again."""
        if self._details_open:
            self._details_open = False
            self._focus_pane(self._pane)
        elif self._view.filter:
            self._view.filter = ""
        else:
            self._view.faults_only = False
        self._present()

    # --- view

    def action_sort(self) -> None:
        """Sort the pane by its next column; after the last one, by urgency again."""
        table = self._panes[self._pane].table
        keys = sortable(table.shown_columns)
        order = self._view.orders.setdefault(self._pane, Order())
        place = keys.index(order.column) if order.column in keys else 0
        order.column = keys[(place + 1) % len(keys)]
        order.reverse = False
        self._present()

    def action_reverse(self) -> None:
        """Turn the order of the pane around."""
        order = self._view.orders.setdefault(self._pane, Order())
        order.reverse = not order.reverse
        self._present()

    def action_faults_only(self) -> None:
        """Show only what has a fault, or all again."""
        self._view.faults_only = not self._view.faults_only
        self._present()

    def action_pause(self) -> None:
        """Stop drawing, or go on with the newest frame."""
        self._paused = not self._paused
        if self._paused:
            self._show_top()
        else:
            self._draw_latest()

    def action_faster(self, step: int) -> None:
        """Poll more or less often; a replay plays faster or slower."""
        replay = self._replay()
        if replay is not None and self._shown is not None and self._shown.replay is not None:
            speed = self._shown.replay.speed
            place = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - speed))
            replay.set_speed(SPEEDS[max(0, min(len(SPEEDS) - 1, place + step))])
            return
        if isinstance(self._source, PacedSource):
            self._poll_at(self._source, step)
            return
        place = PACES_S.index(self._pace_s) - step
        self._pace_s = PACES_S[max(0, min(len(PACES_S) - 1, place))]
        self._show_top()
        self._say(f"draws every {self._pace_s:g} s" if self._pace_s else "draws every poll")

    def _poll_at(self, source: PacedSource, step: int) -> None:
        """The next pace that is faster, or slower, than the present one, which may be any."""
        now = source.interval_s
        faster = [pace for pace in POLLS_S if pace < now]
        slower = [pace for pace in POLLS_S if pace > now]
        chosen = faster[-1:] if step > 0 else slower[:1]
        if chosen:
            source.set_interval(chosen[0])
            # Until it comes at its new pace, the next frame may be as late as the slower one.
            self._interval_s = max(self._interval_s, chosen[0])
        self._show_top()
        self._say(f"polls every {source.interval_s:g} s" + ("" if chosen else ": that is the limit"))

    def action_prompt(self, kind: str) -> None:
        """Begin to type a filter or a command."""
        self._prompt.open(kind, self._view.filter if kind == "/" else "")

    def action_leave_prompt(self) -> None:
        """Stop typing; a filter that was begun is taken away."""
        if self._prompt.kind == "/":
            self._view.filter = ""
        self._leave_prompt()

    def _leave_prompt(self) -> None:
        self._prompt.close_prompt()
        self._focus_pane(self._pane)
        self._present()

    @on(Input.Changed, "#prompt")
    def _prompt_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self._prompt.kind == "/":
            self._view.filter = event.value
            self._present()

    @on(Input.Submitted, "#prompt")
    def _prompt_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        kind, text = self._prompt.kind, event.value.strip()
        self._leave_prompt()
        if kind == ":":
            self._command(text)

    def _command(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        if text in ("q", "quit"):
            self.exit()
            return
        name = rest.strip() if word == "goto" else text
        if name and not self.go_to(name):
            self._say(f"there is no instance, alert or transfer {show.clean(name, 60)}", "warning")

    def go_to(self, name: str) -> bool:
        """Select the row that a name means. A filter that hides it is taken away."""
        alerts = self._shown.alerts if self._shown is not None else ()
        found = targets.find(name, self._made, alerts)
        if found is None:
            return False
        pane, key = found
        if not any(row.key == key for row in chosen_rows(self._made[pane], self._view, pane)):
            self._view.filter, self._view.faults_only = "", False
        self._pane = pane
        self._present()
        self._panes[pane].table.select_key(key)
        self._focus_pane(pane)
        self._present()
        return True

    # --- replay

    def _replay(self) -> ReplaySource | None:
        replaying = self._latest is not None and self._latest.replay is not None
        return self._source if replaying and isinstance(self._source, ReplaySource) else None

    def action_replay_step(self, step: int) -> None:
        """Some snapshots on or back."""
        replay = self._replay()
        if replay is not None:
            replay.step(step)

    def action_replay_seek(self, index: int) -> None:
        """To the first or the last snapshot."""
        replay = self._replay()
        if replay is not None:
            replay.seek(index)

    def action_replay_play(self) -> None:
        """Play, or stop."""
        replay = self._replay()
        if replay is not None and self._latest is not None and self._latest.replay is not None:
            replay.set_playing(not self._latest.replay.playing)

    # --- help, logs, doctor, acting

    def action_help(self) -> None:
        """All keys."""
        self.push_screen(TextDialog("pdctl watch: keys", help_lines(self._read_only, self._replay() is not None)))

    def _say(self, text: str, severity: str = "information") -> None:
        level = "warning" if severity == "warning" else "error" if severity == "error" else "information"
        self.notify(text, severity=level, markup=False)  # type: ignore[arg-type]

    def _instance(self) -> InstanceView | None:
        subject = self._subject()
        if self._shown is None or subject is None:
            return None
        return targets.instance_of(subject, self._shown)

    def _able(self) -> Actions | None:
        if self._actions is None:
            self._say("not possible here: there is no cluster behind a replay", "warning")
        return self._actions

    def _in_background(self, work: Callable[[], str], done: Callable[[str, bool], None]) -> None:
        """Do something that may take long in a thread; ``done`` gets the result, or the error and True."""

        def run() -> None:
            try:
                text, failed = work(), False
            except Exception as error:
                text, failed = explain(error), True
            self._from_thread(done, text, failed)

        threading.Thread(target=run, name="pdctl-watch-action", daemon=True).start()

    def _text_dialog(self, title: str, waiting: str, work: Callable[[], str], *, at_end: bool) -> None:
        def load(dialog: TextDialog) -> None:
            def done(text: str, failed: bool) -> None:
                lines: Sequence[Line] = plain_lines(text) or [(Cell("empty", "dim"),)]
                dialog.set_lines([(Cell(show.clean(text), "bad"),)] if failed else list(lines))

            dialog.set_lines([(Cell(waiting, "dim"),)])
            self._in_background(work, done)

        self.push_screen(TextDialog(title, [], load=load, at_end=at_end))

    def action_logs(self) -> None:
        """The log of the instance that the row is about."""
        actions, instance = self._able(), self._instance()
        if actions is None:
            return
        if instance is None:
            self._say("no instance is selected", "warning")
            return
        name = instance.name
        title = f"log of {show.clean(name)} on {show.clean(instance.host)}"
        self._text_dialog(title, "being read", lambda: actions.logs(name), at_end=True)

    def action_doctor_pair(self) -> None:
        """Check the way between the two instances that the row is about."""
        actions, subject = self._able(), self._subject()
        if actions is None:
            return
        pair = targets.pair_of(subject, self._shown) if subject is not None and self._shown is not None else None
        if pair is None:
            self._say("no pair of prefill and decode is selected", "warning")
            return
        prefill, decode = pair
        title = f"doctor: {show.clean(prefill)} -> {show.clean(decode)}"
        self._text_dialog(title, "checking", lambda: actions.doctor_pair(prefill, decode), at_end=False)

    def action_restart(self) -> None:
        """Restart the instance, after asking."""
        self._act("restart", "Restart", "Its requests end, and transfers to and from it fail.", "R")

    def action_drain(self) -> None:
        """Drain the instance, after asking."""
        self._act("drain", "Drain", "It gets no new requests; those that it has go on.", "D")

    def _act(self, verb: str, capital: str, consequence: str, key: str) -> None:
        if self._read_only:
            self._say(f"{key} ({verb}) is off: this dashboard is read only", "warning")
            return
        actions, instance = self._able(), self._instance()
        if actions is None:
            return
        if instance is None:
            self._say("no instance is selected", "warning")
            return
        name = instance.name
        work: Callable[[str], str] = actions.restart if verb == "restart" else actions.drain
        in_flight = show.count(known_sum(rank.inflight for rank in instance.ranks))

        def done(text: str, failed: bool) -> None:
            self._say(f"{verb} {show.clean(name)}: {show.clean(text)}", "error" if failed else "information")

        def answered(yes: bool | None) -> None:
            if yes:
                self._say(f"{verb} {show.clean(name)}: begun")
                self._in_background(lambda: work(name), done)

        question = f"{capital} {show.clean(name)} on {show.clean(instance.host)}?"
        facts = f"{consequence}\nIn flight there now: {in_flight}."
        self.push_screen(ConfirmDialog(question, facts, capital), answered)


def make_dashboard(
    source: SnapshotSource,
    *,
    read_only: bool = True,
    actions: Actions | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Dashboard:
    """The dashboard over a source, ready to be run. See :class:`Dashboard` for the arguments."""
    return Dashboard(source, read_only=read_only, actions=actions, clock=clock)
