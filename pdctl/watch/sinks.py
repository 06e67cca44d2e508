"""Who hears of alerts beside the screen: a queue per sink, emptied by threads of its own, so that nothing that a sink
does delays a poll. A full queue drops its oldest event and counts it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pdctl.watch.acting import action_json
from pdctl.watch.headless import event_json
from pdctl.watch.tui.source import Frame

QUEUE_LIMIT = 256

Note = Callable[[str], None]


class Delivery(Protocol):
    """One way to hand an event on. Called from the sink's threads."""

    name: str

    def deliver(self, event: Mapping[str, Any], stop: threading.Event) -> str:
        """Hand one event on, in bounded time; soon after ``stop`` is set.

        Returns:
            a short word for how it went, ``delivered`` or ``failed``, that is counted.
        """

    def kill(self) -> None:
        """End what is under way at once."""


class QueuedSink:
    """A bounded queue before a delivery.

    Args:
        delivery: takes one event after the other, or ``parallel`` at once.
        note: told when events are dropped; must not block.
        parallel: how many threads deliver. Only one keeps the order.
        limit: events that may wait.
    """

    def __init__(self, delivery: Delivery, *, note: Note, parallel: int = 1, limit: int = QUEUE_LIMIT) -> None:
        self._delivery = delivery
        self._note = note
        self._limit = limit
        self._changed = threading.Condition()
        self._waiting: deque[dict[str, Any]] = deque()
        self._busy = 0
        self._closing = False
        self._stop = threading.Event()
        self._counts: Counter[str] = Counter(delivered=0, failed=0, dropped=0)
        self._threads = [
            threading.Thread(target=self._run, name=f"{delivery.name} {number}", daemon=True)
            for number in range(parallel)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def name(self) -> str:
        """Of the sink, for logs and metrics."""
        return self._delivery.name

    @property
    def counts(self) -> dict[str, int]:
        """How many events were ``delivered``, ``failed`` or ``dropped``."""
        with self._changed:
            return dict(self._counts)

    def offer(self, event: dict[str, Any]) -> None:
        """Put an event into the queue. Never waits."""
        with self._changed:
            if self._closing:
                return
            dropped = len(self._waiting) >= self._limit
            if dropped:
                self._waiting.popleft()
                self._counts["dropped"] += 1
            first = dropped and self._counts["dropped"] == 1
            self._waiting.append(event)
            self._changed.notify()
        if first:
            self._note(f"{self.name} is too slow: the oldest of {self._limit} waiting alerts was dropped")

    def close(self, timeout_s: float) -> None:
        """Deliver what waits for as long as ``timeout_s``, then end what is under way."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout=timeout_s)
            left = len(self._waiting)
            self._counts["dropped"] += left
            self._waiting.clear()
        if left:
            self._note(f"{self.name}: {left} alerts were not delivered")
        self._stop.set()
        self._delivery.kill()
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0) + 2.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                event = self._waiting.popleft()
                self._busy += 1
            result = "failed"
            try:
                result = self._delivery.deliver(event, self._stop)
            except Exception as error:  # a sink's thread must live on
                self._note(f"{self.name}: {type(error).__name__}: {error}")
            finally:
                with self._changed:
                    self._counts[result] += 1
                    self._busy -= 1
                    self._changed.notify_all()


class Sinks:
    """All sinks of one watch; a listener of its source."""

    def __init__(self, sinks: Sequence[QueuedSink]) -> None:
        self._sinks = tuple(sinks)

    def __call__(self, frame: Frame) -> None:
        """Offer every event and every action of a frame to every sink."""
        if not self._sinks:
            return
        told = [event_json(event, frame.snapshot) for event in frame.events]
        told += [action_json(event, frame.snapshot) for event in frame.actions]
        for values in told:
            for sink in self._sinks:
                sink.offer(values)

    def counts(self) -> dict[str, dict[str, int]]:
        """Per sink, how many events came to which end."""
        return {sink.name: sink.counts for sink in self._sinks}

    def close(self, timeout_s: float) -> None:
        """Let all sinks end, together within about ``timeout_s``."""
        threads = [threading.Thread(target=sink.close, args=(timeout_s,), daemon=True) for sink in self._sinks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s + 5.0)
