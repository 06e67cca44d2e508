"""Where frames come from: a cluster that is polled, or a recording of one that is played.

Both look at every snapshot with the watchdog, in order, and so find the same alerts in a recording as in the cluster
that it was made of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from pdctl.watch.acting import ActionEvent
from pdctl.watch.alerts import Alert, AlertEvent
from pdctl.watch.snapshot import Snapshot
from pdctl.watch.tui.source import Frame, ReplayPosition, SourceClosed

FASTEST_INTERVAL_S = 0.1
SLOWEST_INTERVAL_S = 3600.0
LONGEST_PAUSE_S = 10.0
"""Of a replay: a gap in a recording (the watching machine slept) is not waited for longer."""
_EVENTS_LIMIT = 10_000
_STOP_S = 3.0

Listener = Callable[[Frame], None]
CodeFilter = Callable[[str], bool]


class PollsCluster(Protocol):
    """What :class:`LiveSource` needs of a poller."""

    def poll(self) -> Snapshot:
        """One look at everything, in bounded time."""

    def close(self) -> None:
        """Let go of everything."""


class Looks(Protocol):
    """What a source needs of a watchdog."""

    def look(self, snapshot: Snapshot) -> tuple[list[Alert], list[AlertEvent]]:
        """The alerts that are open now, and what changed since the last look."""


def any_code(code: str) -> bool:
    """Let every alert through."""
    del code
    return True


def make_frame(snapshot: Snapshot, watchdog: Looks, wanted: CodeFilter) -> Frame:
    """Look at a snapshot; alerts whose code is not wanted are left out."""
    alerts, events = watchdog.look(snapshot)
    return Frame(
        snapshot,
        tuple(alert for alert in alerts if wanted(alert.symptom.code)),
        tuple(event for event in events if wanted(event.alert.symptom.code)),
    )


class LiveSource:
    """Polls in a thread of its own. The newest frame wins: a slow reader skips frames, but no events.

    Args:
        poller: asked once per interval; closed with the source.
        watchdog: looks at every snapshot.
        interval_s: from the beginning of one poll to that of the next.
        listeners: called with every frame, in the polling thread, and so must never wait.
        wanted: whether alerts of a code are wanted.
        act: goes over every frame before anybody sees it; must never wait.
        on_interval: told when the pace is changed; must never wait.
    """

    def __init__(
        self,
        poller: PollsCluster,
        watchdog: Looks,
        *,
        interval_s: float = 1.0,
        listeners: Sequence[Listener] = (),
        wanted: CodeFilter = any_code,
        act: Callable[[Frame], Frame] | None = None,
        on_interval: Callable[[float], None] | None = None,
    ) -> None:
        self._poller = poller
        self._watchdog = watchdog
        self._interval_s = interval_s
        self._listeners = tuple(listeners)
        self._wanted = wanted
        self._act = act
        self._on_interval = on_interval
        self._changed = threading.Condition()
        self._frame: Frame | None = None
        self._events: list[AlertEvent] = []
        self._actions: list[ActionEvent] = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def interval_s(self) -> float:
        """Seconds from one poll to the next."""
        return self._interval_s

    def set_interval(self, interval_s: float) -> None:
        """Poll at another pace from now on; within 0.1 s and an hour."""
        with self._changed:
            self._interval_s = min(max(interval_s, FASTEST_INTERVAL_S), SLOWEST_INTERVAL_S)
            self._changed.notify_all()
        if self._on_interval is not None:
            self._on_interval(self._interval_s)

    def next(self) -> Frame:
        """Wait for a frame that was not given yet, and give it with all events since the one before.

        Raises:
            SourceClosed: the source was closed.
            Exception: what polling or a listener raised, which is a bug.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self._error is not None or self._closed)
            if self._frame is not None and not self._closed:
                frame, self._frame = self._frame, None
                events, self._events = tuple(self._events), []
                actions, self._actions = tuple(self._actions), []
                return replace(frame, events=events, actions=actions)
            if self._error is not None and not self._closed:
                raise self._error
            raise SourceClosed

    def close(self) -> None:
        """End polling. Takes a few seconds at most, even if a poll hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_STOP_S / 10)
        # Also what it waits for, such as a host that is being connected to.
        self._poller.close()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._closed:
                began = time.monotonic()
                frame = make_frame(self._poller.poll(), self._watchdog, self._wanted)
                if self._closed:
                    return
                if self._act is not None:
                    frame = self._act(frame)
                for listener in self._listeners:
                    listener(frame)
                with self._changed:
                    self._frame = frame
                    self._events = [*self._events, *frame.events][-_EVENTS_LIMIT:]
                    self._actions = [*self._actions, *frame.actions][-_EVENTS_LIMIT:]
                    self._changed.notify_all()
                    # A poll that took longer than its interval is not caught up with.
                    due = max(due, began - self._interval_s)
                    while not self._closed and (left := due + self._interval_s - time.monotonic()) > 0:
                        self._changed.wait(left)
                    due += self._interval_s
        except BaseException as error:  # handed to the thread that waits for frames
            with self._changed:
                self._error = error
                self._changed.notify_all()


class RecordedSource:
    """Plays a recording. Nothing of it is kept in memory but the frame that is shown.

    Going back reads the recording from its beginning again, since what an alert is depends on all that was before it.

    Args:
        read: opens the recording: gives its snapshots from the first one.
        make_watchdog: a new watchdog, that has seen nothing.
        from_s: where to begin, in seconds from the first snapshot.
        to_s: where to end; None for the end of the recording.
        speed: 1.0 is the pace of the recording; 0 is as fast as frames are taken.
        stop_at_end: whether ``next`` raises SourceClosed after the last frame; otherwise it waits to be moved.
        listeners: called with every frame that is given.
        wanted: whether alerts of a code are wanted.

    Raises:
        UsageError: the recording cannot be read (by ``read``).
        ValueError: there is no snapshot between ``from_s`` and ``to_s``.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Snapshot]],
        make_watchdog: Callable[[], Looks],
        *,
        from_s: float = 0.0,
        to_s: float | None = None,
        speed: float = 1.0,
        stop_at_end: bool = True,
        listeners: Sequence[Listener] = (),
        wanted: CodeFilter = any_code,
    ) -> None:
        self._read = read
        self._make_watchdog = make_watchdog
        self._listeners = tuple(listeners)
        self._wanted = wanted
        self._first, self._end = _range(read, from_s, to_s)
        self._changed = threading.Condition()
        self._target = self._first
        self._playing = True
        self._speed = speed
        self._stop_at_end = stop_at_end
        self._closed = False
        self._moved = True
        # Of the thread that calls next.
        self._shown: Frame | None = None
        self._shown_at = 0.0
        self._rewind()

    @property
    def count(self) -> int:
        """How many snapshots are played."""
        return self._end - self._first

    def next(self) -> Frame:
        """The next frame when its time has come, or the one that was moved to, at once.

        Raises:
            SourceClosed: closed, or the last frame was given and ``stop_at_end`` is set.
        """
        with self._changed:
            while not self._closed and not self._moved:
                if self._playing and self._target + 1 >= self._end:
                    if self._stop_at_end:
                        raise SourceClosed
                    self._playing = False
                if not self._playing:
                    self._changed.wait()
                    continue
                left = self._due() - time.monotonic()
                if left <= 0:
                    self._target += 1
                    break
                self._changed.wait(left)
            if self._closed:
                raise SourceClosed
            self._moved = False
            target, playing, speed = self._target, self._playing, self._speed
        frame = self._at(target)
        # Of the given range, so that the first frame has index 0 wherever the range begins.
        frame = replace(frame, replay=ReplayPosition(target - self._first, self.count, playing, speed))
        for listener in self._listeners:
            listener(frame)
        return frame

    def step(self, count: int) -> None:
        """Go on by so many snapshots, back if negative, and no further than the ends. Stops playing."""
        with self._changed:
            self._move(self._target + count)

    def seek(self, index: int) -> None:
        """Go to that snapshot; -1 is the last. Stops playing."""
        with self._changed:
            self._move(self._end + index if index < 0 else self._first + index)

    def set_playing(self, playing: bool) -> None:
        """Let it go on by itself, or stop it."""
        with self._changed:
            self._playing = playing
            self._moved = True
            self._changed.notify_all()

    def set_speed(self, speed: float) -> None:
        """How many times as fast as it was recorded it plays; 0: as fast as frames are taken."""
        with self._changed:
            self._speed = max(speed, 0.0)
            self._moved = True
            self._changed.notify_all()

    def close(self) -> None:
        """End it; a ``next`` that waits raises SourceClosed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _move(self, index: int) -> None:
        self._target = min(max(index, self._first), self._end - 1)
        self._playing = False
        self._moved = True
        self._changed.notify_all()

    def _due(self) -> float:
        if self._shown is None or self._speed <= 0:
            return 0.0
        if self._upcoming is None:
            return 0.0
        pause = min(max(self._upcoming.at - self._shown.snapshot.at, 0.0), LONGEST_PAUSE_S)
        return self._shown_at + pause / self._speed

    def _rewind(self) -> None:
        self._snapshots: Iterator[Snapshot] = iter(self._read())
        self._watchdog = self._make_watchdog()
        self._read_index = -1
        self._upcoming: Snapshot | None = next(self._snapshots, None)

    def _at(self, index: int) -> Frame:
        if index == self._read_index and self._shown is not None:
            # Shown already: its events happened once.
            return replace(self._shown, events=())
        onward = index > self._read_index >= 0
        if index < self._read_index:
            self._rewind()
        events: list[AlertEvent] = []
        while self._read_index < index and self._upcoming is not None:
            self._shown = make_frame(self._upcoming, self._watchdog, self._wanted)
            events = [*events, *self._shown.events][-_EVENTS_LIMIT:] if onward else list(self._shown.events)
            self._read_index += 1
            self._upcoming = next(self._snapshots, None)
        self._shown_at = time.monotonic()
        if self._shown is None:
            raise SourceClosed
        return replace(self._shown, events=tuple(events))


def _range(read: Callable[[], Iterable[Snapshot]], from_s: float, to_s: float | None) -> tuple[int, int]:
    """The indexes of the first snapshot to play and of the one behind the last."""
    first_at: float | None = None
    first, end, offset = None, 0, 0.0
    for index, snapshot in enumerate(read()):
        first_at = snapshot.at if first_at is None else first_at
        offset = snapshot.at - first_at
        if to_s is not None and offset > to_s:
            break
        if first is None and offset >= from_s:
            first = index
        end = index + 1
    if first is None:
        what = "the recording is empty" if first_at is None else f"it has no snapshot at {from_s:g} s or later"
        if first_at is not None and to_s is not None:
            what = f"it has no snapshot between {from_s:g} s and {to_s:g} s"
        raise ValueError(what)
    return first, end
