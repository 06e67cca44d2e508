"""Does what :mod:`pdctl.watch.acting` decides, in a thread of its own, beside the polling thread that asks it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from pdctl.errors import PdctlError
from pdctl.watch.acting import ActingSettings, ActionEvent, Decider, Decision, Fold
from pdctl.watch.alerts import AlertEvent
from pdctl.watch.tui.source import Frame
from pdctl.watch.wording import plain

CLOSE_S = 60.0
"""A restart stops before it starts: so long its second half is waited for when the watch ends."""
_DETAIL_LIMIT = 1000


class Progress:
    """How far an action has come; what carries it out says so, from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._step = "begun"
        self._safe = False
        self._leaving = False

    @property
    def step(self) -> str:
        """What is being done, in words."""
        return self._step

    def at(self, step: str) -> None:
        """Begin a step."""
        with self._changed:
            self._step = step

    def safe(self) -> None:
        """From here on the cluster comes to a good end even if nobody looks after it."""
        with self._changed:
            self._safe = True
            self._changed.notify_all()

    def go_on(self) -> bool:
        """Begin another part that must not be left in the middle; False, and it must not begin, once we leave."""
        with self._changed:
            if self._leaving:
                return False
            self._safe = False
            return True

    def wait_safe(self, timeout_s: float) -> bool:
        """Leave: have no other part begun, and wait until it is safe; False if that took too long."""
        with self._changed:
            self._leaving = True
            return self._changed.wait_for(lambda: self._safe, timeout_s)


class Performer(Protocol):
    """Carries a decision out. Called in a thread of its own."""

    def __call__(self, decision: Decision, progress: Progress) -> str:
        """Do it, and say in a sentence how it went.

        Raises:
            PdctlError: it did not work.
        """


def leave(
    what: str, progress: Progress, note: Callable[[str], None], *, timeout_s: float, result: Callable[[], str]
) -> None:
    """Wait until what is under way can be left alone, and say what state it is in.

    Args:
        what: is under way, in words.
        progress: of it.
        note: told; whatever it raises (nobody reads any more) ends nothing here.
        timeout_s: how long to wait.
        result: how it ended, in words; empty if it has not.
    """

    def say(text: str) -> None:
        with contextlib.suppress(Exception):
            note(text)

    say(f"{what} is under way ({progress.step}): waiting until it can be left")
    try:
        safe = progress.wait_safe(timeout_s)
    except KeyboardInterrupt:
        say(f"{what} was left in the middle ({progress.step}): pdctl status shows what runs, pdctl up")
        raise
    ended = result()
    if ended:
        say(f"{what} {ended}")
    elif safe:
        say(f"{what} goes on by itself, unproven ({progress.step}): see pdctl status")
    else:
        say(f"{what} hangs ({progress.step}): pdctl status shows what runs, pdctl up starts the rest")


class ActingThread:
    """Goes over every frame of a live source, in its polling thread; never waits there.

    Args:
        settings: what is allowed.
        perform: carries a decision out.
        note: told what state things are in when the watch ends in the middle of an action.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: ActingSettings,
        perform: Performer,
        *,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decider = Decider(settings)
        self._perform = perform
        self._note = note
        self._clock = clock
        self._fold = Fold()
        self._lock = threading.Lock()
        self._closed = False
        self._progress = Progress()
        self._began = 0.0
        # The end of what runs: outcome, words, seconds. Put there by the thread, taken by the next frame.
        self._result: tuple[bool, str, float] | None = None
        self._thread: threading.Thread | None = None

    def set_interval(self, interval_s: float) -> None:
        """Frames come at another pace from now on."""
        with self._lock:
            self._decider.set_interval(interval_s)

    def __call__(self, frame: Frame) -> Frame:
        """The frame with what was done, and without the alerts that are part of it."""
        events = self._collect(frame.snapshot.at)
        frame = self._folded(frame)
        with self._lock:
            if not self._closed:
                decision, told = self._decider.decide(frame.snapshot, frame.alerts)
                events += told
                if decision is not None:
                    self._begin(decision)
        # An alert about what is touched from now on is the action's.
        return replace(frame, actions=tuple(events), acting=self._words(frame.snapshot.at))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Begin nothing more, and wait until what is under way can be left alone. Says what state it is in."""
        with self._lock:
            self._closed = True
            decision, thread = self._decider.running, self._thread
        if decision is None or thread is None or not thread.is_alive():
            return
        what = f"--on-stall {decision.action} of {', '.join(decision.instances)}"

        def result() -> str:
            thread.join(0.2)
            with self._lock:
                ended = self._result
            return "" if ended is None else f"{'done' if ended[0] else 'failed'} after {ended[2]:.1f} s: {ended[1]}"

        leave(what, self._progress, self._note, timeout_s=timeout_s, result=result)

    def _begin(self, decision: Decision) -> None:
        self._progress, self._result, self._began = Progress(), None, self._clock()
        self._fold.begin()
        self._thread = threading.Thread(target=self._run, args=(decision, self._progress), name="on-stall", daemon=True)
        self._thread.start()

    def _run(self, decision: Decision, progress: Progress) -> None:
        began = self._clock()
        try:
            succeeded, words = True, self._perform(decision, progress)
        except PdctlError as error:
            succeeded, words = False, f"{error.message} ({error.hint})" if error.hint else error.message
        except Exception as error:  # the watch must live on, and say what happened
            succeeded, words = False, f"{type(error).__name__}: {error}"
        with self._lock:
            self._result = (succeeded, plain(" ".join(words.split()), _DETAIL_LIMIT), self._clock() - began)
        progress.safe()

    def _collect(self, now: float) -> list[ActionEvent]:
        with self._lock:
            decision, result = self._decider.running, self._result
            if decision is None or result is None:
                return []
            self._result = None
            succeeded, words, took_s = result
            self._decider.ended(now, succeeded=succeeded)
        return [
            ActionEvent(
                decision.action,
                decision.instances,
                decision.because,
                "done" if succeeded else "failed",
                words,
                took_s,
                self._fold.take(),
            )
        ]

    def _folded(self, frame: Frame) -> Frame:
        # After a drain or a dry run there is nothing that the action itself would have caused.
        restarts = self._decider.settings.action != "drain" and not self._decider.settings.dry_run
        covered = self._decider.covered(frame.snapshot.at) if restarts else frozenset()
        running = {one.name for one in frame.snapshot.instances if one.role == "router" and one.process == "running"}
        # vllm-router's health check fails while it misses an instance. That its process ends is no part of it.
        routers = frozenset(running) if covered else frozenset()
        kept: list[AlertEvent] = []
        for event in frame.events:
            if event.kind == "opened":
                told = self._fold.opened(event.alert, covered, routers)
            elif event.kind == "closed":
                told = self._fold.closed(event.alert)
            else:
                told = self._fold.tells(event.alert)
            if told:
                kept.append(event)
        kept += [AlertEvent("opened", alert) for alert in self._fold.surfacing(frame.alerts, covered, routers)]
        alerts = tuple(alert for alert in frame.alerts if self._fold.tells(alert))
        return replace(frame, alerts=alerts, events=tuple(kept))

    def _words(self, now: float) -> str:
        """For the dashboard's top lines."""
        decision, settings = self._decider.running, self._decider.settings
        if decision is not None:
            took_s = self._clock() - self._began
            return f"{decision.action} of {', '.join(decision.instances)} for {took_s:.0f} s: {self._progress.step}"
        dry = " (dry run)" if settings.dry_run else ""
        return f"on stall: {settings.action}{dry}, {self._decider.spent(now)} of {settings.limit} this hour"
