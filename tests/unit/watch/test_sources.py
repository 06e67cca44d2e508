from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from pdctl.watch.acting import ActionEvent, Because
from pdctl.watch.sources import LiveSource, RecordedSource
from pdctl.watch.tui.source import Frame, ReplaySource, SourceClosed
from tests.unit.watch.frames import ScriptedPoller, ScriptedWatchdog, snapshots


def until(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def kinds(frames: list[Frame]) -> list[str]:
    return [event.kind for frame in frames for event in frame.events]


def rest(source: RecordedSource) -> list[Frame]:
    frames = []
    while True:
        try:
            frames.append(source.next())
        except SourceClosed:
            return frames


# --- live


def test_a_slow_reader_gets_the_newest_frame_and_every_event() -> None:
    poller = ScriptedPoller()
    source = LiveSource(poller, ScriptedWatchdog(), interval_s=0.01)
    try:
        until(lambda: poller.polls > 8)
        frame = source.next()
        assert frame.snapshot.tick >= 6
        assert [event.kind for event in frame.events] == ["opened", "closed"]
        assert source.next().events == ()
    finally:
        source.close()


def test_listeners_hear_of_every_frame() -> None:
    seen: list[int] = []

    def listen(frame: Frame) -> None:
        seen.append(frame.snapshot.tick)

    source = LiveSource(
        ScriptedPoller(),
        ScriptedWatchdog(),
        interval_s=0.01,
        listeners=[listen],
    )
    until(lambda: len(seen) > 5)
    source.close()
    assert seen == list(range(len(seen)))


def test_closing_ends_a_reader_and_the_thread_even_if_a_poll_hangs() -> None:
    poller = ScriptedPoller(hang_at=1)
    source = LiveSource(poller, ScriptedWatchdog(), interval_s=0.01)
    ended: list[str] = []

    def read() -> None:
        try:
            while True:
                source.next()
        except SourceClosed:
            ended.append("closed")

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: poller.polls == 2)
    source.close()
    source.close()
    reader.join(5)
    assert ended == ["closed"]
    assert poller.closed.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "watch"]


def test_the_pace_can_be_changed_while_it_waits() -> None:
    poller = ScriptedPoller()
    asked: list[float] = []
    source = LiveSource(poller, ScriptedWatchdog(), interval_s=3600, on_interval=asked.append)
    try:
        source.next()
        source.set_interval(0.0)
        assert source.interval_s == 0.1
        assert source.next().snapshot.tick == 1
        source.set_interval(1e9)
        assert source.interval_s == 3600
        assert asked == [0.1, 3600]
    finally:
        source.close()


def test_what_goes_over_the_frames_is_before_everybody_and_no_action_is_lost() -> None:
    event = ActionEvent("drain", ("prefill-0",), Because("W002", "stuck", "prefill-0"), "begun")
    heard: list[int] = []
    source = LiveSource(
        ScriptedPoller(),
        ScriptedWatchdog(),
        interval_s=0.01,
        listeners=[lambda frame: heard.append(len(frame.actions))],
        act=lambda frame: replace(frame, actions=(event,)),
    )
    try:
        until = time.monotonic() + 20
        while len(heard) < 5 and time.monotonic() < until:
            time.sleep(0.01)
        # Frames that nobody took are skipped, their actions are not.
        assert len(source.next().actions) >= 5
        assert set(heard) == {1}
    finally:
        source.close()


def test_a_bug_in_the_poller_reaches_the_reader() -> None:
    source = LiveSource(ScriptedPoller(raise_at=0), ScriptedWatchdog())
    with pytest.raises(ZeroDivisionError):
        source.next()
    source.close()


def test_alerts_that_are_not_wanted_are_left_out() -> None:
    poller = ScriptedPoller()
    source = LiveSource(poller, ScriptedWatchdog(closes=10**9), interval_s=0.01, wanted=lambda code: code == "W001")
    try:
        until(lambda: poller.polls > 4)
        frame = source.next()
        assert frame.snapshot.tick >= 2
        assert (frame.alerts, frame.events) == ((), ())
    finally:
        source.close()


# --- recorded


class Recording:
    """Counts how often it is opened."""

    def __init__(self, count: int = 8, every_s: float = 1.0) -> None:
        self.opened = 0
        self.ticks = snapshots(count, every_s=every_s)

    def __call__(self):
        self.opened += 1
        return iter(self.ticks)


def played(recording: Recording, **more) -> RecordedSource:
    return RecordedSource(recording, ScriptedWatchdog, **{"speed": 0.0, **more})


def test_a_recording_gives_every_frame_once_and_ends() -> None:
    source = played(Recording())
    frames = rest(source)
    assert [frame.snapshot.tick for frame in frames] == list(range(8))
    assert [frame.replay.index for frame in frames] == list(range(8))
    assert {frame.replay.count for frame in frames} == {8}
    assert kinds(frames) == ["opened", "closed"]
    assert isinstance(source, ReplaySource)


def test_going_back_gives_the_same_frames_again() -> None:
    source = played(Recording(), stop_at_end=False)
    first = [source.next() for _ in range(8)]
    source.seek(3)
    again = source.next()
    assert again.alerts == first[3].alerts != ()
    source.step(-1)
    assert source.next().events == first[2].events != ()
    source.step(100)
    last = source.next()
    assert (last.snapshot.tick, last.alerts) == (7, ())
    assert kinds([last]) == ["closed"], "what was jumped over is told"
    source.seek(-1)
    assert source.next().events == ()
    source.step(-100)
    assert source.next().snapshot.tick == 0


def test_a_part_of_a_recording_keeps_alerts_that_opened_before_it() -> None:
    frames = rest(played(Recording(), from_s=3.0, to_s=5.0))
    assert [frame.snapshot.tick for frame in frames] == [3, 4, 5]
    assert [frame.replay.index for frame in frames] == [0, 1, 2]
    assert len(frames[0].alerts) == 1
    assert kinds(frames) == ["closed"]


@pytest.mark.parametrize(
    ("count", "from_s", "to_s", "words"),
    [(0, 0.0, None, "empty"), (3, 9.0, None, "no snapshot at 9 s"), (9, 5.2, 5.4, "between 5.2 s and 5.4 s")],
)
def test_an_empty_part_is_refused(count: int, from_s: float, to_s: float | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        played(Recording(count), from_s=from_s, to_s=to_s)


def test_it_plays_at_the_pace_of_the_recording_times_the_speed() -> None:
    source = played(Recording(4, every_s=0.2), speed=2.0)
    begin = time.monotonic()
    assert len(rest(source)) == 4
    assert time.monotonic() - begin >= 0.29


def test_a_paused_recording_waits_to_be_moved_or_closed() -> None:
    source = played(Recording(), stop_at_end=False)
    source.next()
    source.set_playing(False)
    shown = source.next()
    assert (shown.snapshot.tick, shown.replay.playing, shown.events) == (0, False, ())
    got: list[object] = []

    def read() -> None:
        try:
            while True:
                got.append(source.next().snapshot.tick)
        except SourceClosed:
            got.append("closed")

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.05)
    assert got == []
    source.step(2)
    until(lambda: got == [2])
    source.close()
    reader.join(5)
    assert got == [2, "closed"]


def test_going_on_needs_no_second_reading() -> None:
    recording = Recording()
    source = played(recording)
    rest(source)
    # Once to count, once to play.
    assert recording.opened == 2
