"""The dashboard as a person uses it: keys, mouse, dialogs, replay, failing sources, resizing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot

from pdctl.errors import HostUnreachable
from pdctl.watch.acting import ActionEvent, Because
from pdctl.watch.tui import feed
from pdctl.watch.tui.app import Dashboard, make_dashboard
from pdctl.watch.tui.dialogs import ConfirmDialog, TextDialog
from pdctl.watch.tui.help import ACTING, KEYS, REPLAYING
from pdctl.watch.tui.place import PANES, PaneName
from pdctl.watch.tui.source import Frame
from tests.unit.watch.tui import made_frames as made

Use = Callable[[Dashboard, "Pilot[None]"], Awaitable[None]]
LONGEST_S = 20.0
# Each starts a whole application: half a minute together.
pytestmark = pytest.mark.slow


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the dashboard work until something holds."""
    deadline = asyncio.get_running_loop().time() + LONGEST_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never came to that"
        await pilot.pause(0.01)
    await pilot.pause()


def use(app: Dashboard, what: Use, size: tuple[int, int] = (120, 40), frames: int = 1) -> None:
    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.frames_drawn >= frames and bool(app._boxes))
            await pilot.pause(0.05)
            await what(app, pilot)

    asyncio.run(run())


def dashboard(*frames: Frame | Exception, read_only: bool = False, clock: made.Clock | None = None) -> Dashboard:
    return make_dashboard(
        made.Scripted(frames), read_only=read_only, actions=made.Acting(), clock=clock or made.Clock()
    )


def acting(app: Dashboard) -> made.Acting:
    actions = app._actions
    assert isinstance(actions, made.Acting)
    return actions


def source_of(app: Dashboard) -> made.Scripted:
    source = app._source
    assert isinstance(source, made.Scripted)
    return source


def screen_text(app: Dashboard) -> str:
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def keys_of(app: Dashboard, pane: PaneName) -> list[str]:
    return [row.key for row in app.table(pane).row_models]


def notices(app: Dashboard) -> str:
    return " | ".join(notice.message for notice in app._notifications)


def test_every_pane_is_shown_on_the_smallest_usual_screen() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        for word in ("PREFILL", "DECODE", "TRANSFERS", "ALERTS", "cmpl-stalled", "prefill-0", "T002", "q quit"):
            assert word in text

    use(dashboard(made.stalled_frame(8)), what, (80, 24))


def test_tab_goes_round_the_panes_and_the_details() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        seen = [app.pane]
        for _ in range(3):
            await pilot.press("tab")
            seen.append(app.pane)
        assert seen == list(PANES)
        await pilot.press("tab")
        assert app.focused is app.query_one("#details-scroll")
        await pilot.press("tab")
        assert app.focused is app.table("prefill")
        await pilot.press("shift+tab", "shift+tab")
        assert app.focused is app.table("alerts")

    use(dashboard(made.stalled_frame(2)), what, (200, 60))


def test_the_cursor_stays_on_its_row_when_rows_move() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("tab", "tab", "down", "down")
        selected = app.table("transfers").selected()
        assert selected is not None
        moved = app.shown
        assert moved is not None
        snapshot = replace(moved.snapshot, at=2000.0, transfers=moved.snapshot.transfers[::-1])
        source_of(app).give(Frame(snapshot, moved.alerts))
        await until(pilot, lambda: app.frames_drawn == 2)
        after = app.table("transfers").selected()
        assert after is not None
        assert after.key == selected.key

    use(dashboard(made.frame(2)), what)


def test_a_cursor_that_nobody_moved_stays_at_the_top() -> None:
    """Where the worst and the newest are: transfers that sink must not take the view with them."""

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        first = app.table("transfers").selected()
        moved = app.shown
        assert first is not None
        assert moved is not None
        snapshot = replace(moved.snapshot, at=2000.0, transfers=moved.snapshot.transfers[::-1])
        source_of(app).give(Frame(snapshot, moved.alerts))
        await until(pilot, lambda: app.frames_drawn == 2)
        assert app.table("transfers").cursor_row == 0
        assert app.table("transfers").selected() != first

    use(dashboard(made.frame(2)), what)


def test_the_filter_narrows_while_it_is_typed_and_escape_takes_it_away() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"prefill-1")
        assert keys_of(app, "prefill") == ["prefill-1"]
        await pilot.press("enter")
        assert keys_of(app, "prefill") == ["prefill-1"]
        assert app.focused is app.table("prefill")
        assert "/prefill-1" in screen_text(app)
        await pilot.press("escape")
        assert len(keys_of(app, "prefill")) == 3
        await pilot.press("slash", *"q!", "escape")
        assert len(keys_of(app, "prefill")) == 3

    use(dashboard(made.frame(3)), what)


def test_sorting_goes_through_the_columns_and_turns_around() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("s")
        assert "by instance ▲" in screen_text(app)
        await pilot.press("S")
        assert keys_of(app, "prefill") == ["prefill-2", "prefill-1", "prefill-0"]
        for _ in range(len(app.table("prefill").shown_columns) - 1):
            await pilot.press("s")
        assert "by " not in screen_text(app).split("DECODE")[0].split("PREFILL")[1].split("\n")[0]
        assert keys_of(app, "prefill") == ["prefill-0", "prefill-1", "prefill-2"]

    use(dashboard(made.frame(3)), what)


def test_faults_only() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("f")
        assert keys_of(app, "prefill") == ["prefill-0"]
        assert keys_of(app, "transfers") == ["cmpl-stalled"]
        assert "faults only" in screen_text(app)
        await pilot.press("f")
        assert len(keys_of(app, "prefill")) == 3

    use(dashboard(made.stalled_frame(3)), what)


@pytest.mark.parametrize(
    ("typed", "pane", "key"),
    [
        ("goto decode-1", "decode", "decode-1"),
        ("W003", "alerts", "W003\ndecode-0/rank 0"),
        ("cmpl-stalled", "transfers", "cmpl-stalled"),
    ],
)
def test_commands_go_to_a_row(typed: str, pane: PaneName, key: str) -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"zzz", "enter", "colon")
        app.query_one("#prompt").value = typed  # type: ignore[attr-defined]
        await pilot.press("enter")
        await pilot.pause()
        selected = app.table(pane).selected()
        assert selected is not None
        assert (app.pane, selected.key) == (pane, key)
        assert app.focused is app.table(pane)

    use(dashboard(made.stalled_frame(2)), what)


def test_a_command_for_what_does_not_exist_says_so() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("colon", *"nobody", "enter")
        assert "no instance, alert or transfer nobody" in notices(app)

    use(dashboard(made.frame(1)), what)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_details_of_a_transfer_and_back(size: tuple[int, int]) -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("tab", "tab", "enter")
        await pilot.pause()
        assert app.details_open
        for word in ("posted        7.2 s…", "registered    7.4 s…", "next: Look at the link"):
            assert word in app.details_text
        assert "matched" in screen_text(app)
        await pilot.press("escape")
        assert not app.details_open
        assert app.focused is app.table("transfers")

    use(dashboard(made.stalled_frame(1)), what, size)


def test_details_of_an_instance_have_the_end_of_its_log_as_it_is() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: "line one" in app.details_text)
        assert "[red]not markup[/red] \\x1b[31mescape" in app.details_text
        assert acting(app).calls == [("logs", "prefill-0")]

    use(dashboard(made.frame(1)), what)


def test_details_of_an_alert() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("shift+tab", "enter")
        assert "8 more with the same cause" in app.details_text

    use(dashboard(made.down_frame()), what)


def test_logs_open_in_a_dialog_and_are_read_again() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("tab", "l")
        dialog = app.screen
        assert isinstance(dialog, TextDialog)
        await until(pilot, lambda: "[red]not markup[/red]" in dialog.text)
        await pilot.press("r")
        await until(pilot, lambda: acting(app).calls == [("logs", "decode-0")] * 2)
        await pilot.press("escape")
        assert app.screen is not dialog

    use(dashboard(made.frame(1)), what)


def test_the_doctor_checks_the_pair_of_a_transfer() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("tab", "tab", "d")
        dialog = app.screen
        assert isinstance(dialog, TextDialog)
        await until(pilot, lambda: "XFER001 pass" in dialog.text)
        assert acting(app).calls == [("doctor", "prefill-0", "decode-0")]

    use(dashboard(made.stalled_frame(2)), what)


def test_an_action_that_fails_says_why() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        def broken(instance: str) -> str:
            raise HostUnreachable("h1", "no route", hint="is it on?")

        acting(app).restart = broken  # type: ignore[method-assign]
        await pilot.press("R", "y")
        await until(pilot, lambda: "h1: no route  (is it on?)" in notices(app))

    use(dashboard(made.frame(1)), what)


@pytest.mark.parametrize(("key", "verb"), [("R", "restart"), ("D", "drain")])
def test_acting_asks_by_name_and_does_nothing_unless_told(key: str, verb: str) -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("down", key)
        dialog = app.screen
        assert isinstance(dialog, ConfirmDialog)
        assert "prefill-1 on h2?" in dialog.question
        await pilot.press("enter")  # the button in focus is the safe one
        await pilot.press(key, "n")
        await pilot.press(key, "escape")
        assert acting(app).calls == []
        await pilot.press(key, "y")
        await until(pilot, lambda: acting(app).calls == [(verb, "prefill-1")])
        await until(pilot, lambda: f"{verb} prefill-1: t" in notices(app))

    use(dashboard(made.frame(2)), what)


def test_lower_case_letters_never_act() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("r", "y")
        assert not isinstance(app.screen, ConfirmDialog)
        assert acting(app).calls == []

    use(dashboard(made.frame(1)), what)


@pytest.mark.parametrize("key", ["R", "D"])
def test_read_only_never_asks_and_says_so(key: str) -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press(key)
        assert not isinstance(app.screen, ConfirmDialog)
        assert "this dashboard is read only" in notices(app)
        assert "read only" in screen_text(app).split("\n")[0]
        await pilot.press("y")
        assert acting(app).calls == []

    use(dashboard(made.frame(1), read_only=True), what)


def test_without_actions_keys_say_that_there_is_no_cluster() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("l", "d", "R")
        assert notices(app).count("no cluster behind a replay") == 3

    use(make_dashboard(made.Scripted([made.frame(1)]), read_only=False, clock=made.Clock()), what)


def test_pause_stops_drawing_but_not_taking_frames() -> None:
    clock = made.Clock()

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("p")
        for tick in (8, 9):
            source_of(app).give(made.frame(1, tick=tick))
        await until(pilot, lambda: app._latest is not None and app._latest.snapshot.tick == 9)
        clock.now += 7
        app._every_second()
        await pilot.pause()
        assert app.shown is not None
        assert app.shown.snapshot.tick == 7
        assert "PAUSED 7 s" in screen_text(app)
        await pilot.press("p")
        assert app.shown.snapshot.tick == 9
        assert "PAUSED" not in screen_text(app)

    use(dashboard(made.frame(1), clock=clock), what)


def test_a_snapshot_that_does_not_advance_is_called_stale() -> None:
    clock = made.Clock()

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        assert "LIVE" in screen_text(app)
        clock.now += 7.2
        app._every_second()
        await pilot.pause()
        assert "stale 7 s" in screen_text(app)
        assert "LIVE" not in screen_text(app)
        assert app.query_one("#body").has_class("-overdue")

    use(dashboard(made.frame(1), clock=clock), what)


def test_a_slower_pace_draws_less_often() -> None:
    clock = made.Clock()

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("minus", "minus")
        assert "every 2 s" in screen_text(app)
        source_of(app).give(made.frame(1, tick=8))
        await until(pilot, lambda: app._latest is not None and app._latest.snapshot.tick == 8)
        assert app.frames_drawn == 1
        clock.now += 2
        app._every_second()
        assert app.frames_drawn == 2
        await pilot.press("plus", "plus", "plus")
        assert "every" not in screen_text(app).split("\n")[0]

    use(dashboard(made.frame(1), clock=clock), what)


class Paced(made.Scripted):
    """A source whose pace can be changed, as a live one's."""

    interval_s = 1.5

    def set_interval(self, interval_s: float) -> None:
        self.interval_s = interval_s


def test_plus_and_minus_change_the_pace_of_polling() -> None:
    source = Paced([made.frame(1)])

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("minus")
        assert source.interval_s == 2.0
        assert "every 2 s" in screen_text(app)
        await pilot.press("plus", "plus")
        assert source.interval_s == 0.5
        await pilot.press(*["plus"] * 5)
        assert source.interval_s == 0.2
        await pilot.press(*["minus"] * 9)
        assert source.interval_s == 30.0
        # What is drawn is every poll, however often that is.
        source.give(made.frame(1, tick=8))
        await until(pilot, lambda: app.frames_drawn == 2)

    use(make_dashboard(source, read_only=False, actions=made.Acting(), clock=made.Clock()), what)


def test_what_on_stall_does_is_shown() -> None:
    event = ActionEvent("drain", ("decode-0",), Because("W002", "stuck", "decode-0"), "done", "it is out", 3.0)
    shown = replace(made.frame(1), actions=(event,), acting="drain of decode-0 for 3 s")

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        assert "drain of decode-0 for 3 s" in screen_text(app)
        await until(pilot, lambda: any("it is out" in str(one.message) for one in app._notifications))

    use(dashboard(shown), what)


def test_a_source_that_fails_is_shown_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FIRST_RETRY_S", 0.2)

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        source_of(app).give(ValueError("[red]bad[/red] \x1b[0m bytes"))
        await until(pilot, lambda: "no new data: ValueError: [red]bad[/red] \\x1b[0m bytes" in screen_text(app))
        assert "prefill-0" in screen_text(app)
        source_of(app).give(made.frame(1, tick=8))
        await until(pilot, lambda: app.frames_drawn == 2)
        assert "no new data" not in screen_text(app)

    use(dashboard(made.frame(1)), what)


def test_an_error_before_the_first_frame_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FIRST_RETRY_S", 30.0)

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "h1: no route" in screen_text(app))
        assert "waiting" in screen_text(app)

    use(dashboard(HostUnreachable("h1", "no route")), what, frames=0)


def test_the_end_of_a_source_is_shown() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        source_of(app).close()
        await until(pilot, lambda: "ENDED" in screen_text(app))

    use(dashboard(made.frame(1)), what)


def test_quitting_closes_the_source_and_its_thread() -> None:
    app = dashboard(made.frame(1))

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("q")

    use(app, what)
    assert source_of(app).closed.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "pdctl-watch-feed"]


def test_a_source_that_hangs_does_not_keep_the_program_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()

    class Hanging(made.Scripted):
        def next(self) -> Frame:
            hang.wait(LONGEST_S)
            return made.frame(1)

    monkeypatch.setattr(feed.Feed.stop, "__defaults__", (0.05,))
    try:
        use(make_dashboard(Hanging(), clock=made.Clock()), lambda app, pilot: asyncio.sleep(0), frames=0)
    finally:
        hang.set()


def test_replay_keys() -> None:
    frames = [made.frame(1, tick=tick) for tick in range(30)]
    source = made.Replaying(frames)
    app = make_dashboard(source, clock=made.Clock())

    def at(index: int) -> Callable[[], bool]:
        return lambda: app.shown is not None and app.shown.replay is not None and app.shown.replay.index == index

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        assert "REPLAY 1/30" in screen_text(app)
        for key, index in (
            ("right", 1),
            ("shift+right", 11),
            ("left", 10),
            ("end", 29),
            ("shift+left", 19),
            ("home", 0),
        ):
            await pilot.press(key)
            await until(pilot, at(index))
        await pilot.press("space")
        await until(pilot, lambda: "▸ REPLAY" in screen_text(app))
        await pilot.press("space")
        await until(pilot, lambda: "‖ REPLAY" in screen_text(app))
        await pilot.press("plus")
        await until(pilot, lambda: "x2" in screen_text(app))
        await pilot.press("slash", *"a b", "left", "home")
        assert app.query_one("#prompt").value == "a b"  # type: ignore[attr-defined]
        assert at(0)()

    use(app, what)


def test_help_names_every_key() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("question_mark")
        dialog = app.screen
        assert isinstance(dialog, TextDialog)
        for key in ("?", "q", "/", ":", "esc", "enter", "tab", "s  S", "f", "l", "p", "d", "+  -", "R", "D", "space"):
            assert f"  {key} " in dialog.text
        await pilot.press("q")
        assert not isinstance(app.screen, TextDialog)

    use(dashboard(made.frame(1)), what)


def test_every_binding_is_in_the_help() -> None:
    words = " ".join(key for key, _ in (*KEYS, *ACTING, *REPLAYING))
    written = {
        "question_mark": "?",
        "slash": "/",
        "colon": ":",
        "escape": "esc",
        "plus": "+",
        "minus": "-",
        "left": "←",
        "right": "→",
        "shift+left": "shift",
        "shift+right": "shift",
    }
    for binding in Dashboard.BINDINGS:
        key = binding.key.split(",")[0]  # type: ignore[union-attr]
        assert key == "ctrl+c" or written.get(key, key) in words.split(), key


def test_the_mouse_selects_sorts_and_opens() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        table = app.table("decode")
        await pilot.click(table, offset=(3, 2))
        assert app.focused is table
        assert table.cursor_row == 1
        await pilot.click(table, offset=(3, 0))
        await pilot.click(table, offset=(3, 0))
        assert keys_of(app, "decode")[0] == "router"
        await pilot.click(table, offset=(3, 1), times=2)
        await pilot.pause()
        assert app.details_open
        await pilot.click(app.query_one("#alerts .pane-title"))
        assert app.pane == "alerts"

    use(dashboard(made.stalled_frame(2)), what)


def test_resizing_is_safe_at_any_size() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("tab", "tab", "down", "down", "down")
        selected = app.table("transfers").selected()
        assert selected is not None
        for size in ((200, 60), (80, 24), (20, 5), (1, 1), (3, 60), (250, 3), (120, 40)):
            await pilot.resize_terminal(*size)
            await pilot.pause(0.05)
            strips = app.screen._compositor.render_strips()
            assert len(strips) == size[1]
            assert all(strip.cell_length == size[0] for strip in strips)
        after = app.table("transfers").selected()
        assert after is not None
        assert after.key == selected.key
        await until(pilot, lambda: selected.key in screen_text(app))

    use(dashboard(made.stalled_frame(4)), what)


def test_rows_that_come_and_go_in_hundreds() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("tab", "tab", "end")
        assert app.table("transfers").cursor_row == 399
        for number, transfers in enumerate((3, 0, 250, 1)):
            source_of(app).give(made.frame(1, transfers=transfers, tick=10 + number))
            await until(pilot, lambda number=number: app.frames_drawn == number + 2)  # type: ignore[misc]
            assert len(app.table("transfers").row_models) == transfers
        selected = app.table("transfers").selected()
        assert selected is not None
        assert selected.key in screen_text(app)

    use(dashboard(made.frame(1, transfers=400)), what)


def test_only_lines_that_differ_are_drawn_anew() -> None:
    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        before = {pane: app.table(pane).lines_drawn for pane in PANES}
        again = made.frame(4, tick=8)
        changed = replace(again.snapshot.instances[1], requests_waiting=99)
        instances = (again.snapshot.instances[0], changed, *again.snapshot.instances[2:])
        source_of(app).give(Frame(replace(again.snapshot, instances=instances)))
        await until(pilot, lambda: app.frames_drawn == 2)
        assert "/99" in screen_text(app)
        drawn = {pane: app.table(pane).lines_drawn - before[pane] for pane in PANES}
        assert drawn["decode"] == drawn["transfers"] == drawn["alerts"] == 0
        assert 1 <= drawn["prefill"] <= 2

    async def settled(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.pause(0.1)
        await what(app, pilot)

    use(dashboard(made.frame(4)), settled)


HOSTILE = "[red]x[/red]\x1b]0;t\x07\n\u202e界界שלום" * 3


def test_hostile_names_are_shown_as_they_are_and_break_nothing() -> None:
    frame = made.stalled_frame(1)
    snapshot = replace(
        frame.snapshot,
        cluster=HOSTILE,
        model=HOSTILE,
        instances=tuple(
            replace(one, name=HOSTILE, host=HOSTILE, health_error=HOSTILE) for one in frame.snapshot.instances[:1]
        ),
        transfers=tuple(replace(one, key=HOSTILE) for one in frame.snapshot.transfers[:1]),
    )
    wild = made.alert(subject=HOSTILE, message=HOSTILE, instances=(HOSTILE,), key=HOSTILE)

    async def what(app: Dashboard, pilot: Pilot[None]) -> None:
        for keys in (("enter",), ("tab", "tab", "enter"), ("tab", "enter"), ("l",), ("escape",), ("R",), ("y",)):
            await pilot.press(*keys)
            await pilot.pause()
            strips = app.screen._compositor.render_strips()
            assert all(strip.cell_length == 120 for strip in strips)
            assert not any(letter in screen_text(app) for letter in "\x1b\x07\u202e")
        assert "[red]x[/red]" in screen_text(app)

    use(dashboard(Frame(snapshot, (wild,))), what)
