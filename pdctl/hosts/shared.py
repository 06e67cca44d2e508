"""One thing that is slow to make, shared by all who need it: made by the first, waited for by the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from pdctl.hosts.base import Deadline


class Closable(Protocol):
    """What can be shared."""

    def close(self) -> None:
        """Give it up."""


T = TypeVar("T", bound=Closable)


class Shared(Generic[T]):
    """Holds the thing while it is good. Who waited for one that could not be made gets the same exception, at once.

    Args:
        is_good: whether a thing made earlier can still be used.
    """

    def __init__(self, is_good: Callable[[T], bool]) -> None:
        self._is_good = is_good
        self._lock = threading.Lock()
        self._current: Future[T] | None = None
        self._closed = False

    def peek(self) -> T | None:
        """The thing, if there is a good one now."""
        with self._lock:
            return self._ready()

    def get(self, make: Callable[[], T], deadline: Deadline) -> T | None:
        """The thing; made by this call if there is none and nobody else is making it. None if that took too long.

        Raises:
            Exception: what ``make`` raised, here or in the thread that was waited for.
        """
        with self._lock:
            ready = self._ready()
            if ready is not None:
                return ready
            waiting = self._current
            if waiting is None:
                mine: Future[T] = Future()
                self._current = mine
        if waiting is not None:
            try:
                return waiting.result(timeout=deadline.remaining_s)
            except FutureTimeout:
                return None
        return self._make(make, mine)

    def discard(self, thing: T) -> bool:
        """Forget the thing if it is still the current one; closing it is up to the caller. True if it was."""
        with self._lock:
            if self._current is not None and self._current.done() and self._ready() is thing:
                self._current = None
                return True
            return False

    def close(self) -> None:
        """Close the thing; one that is still being made is closed as soon as it is there."""
        with self._lock:
            self._closed = True
            current = self._current
        if current is not None and current.done():
            with suppress(Exception):
                current.result().close()

    def _make(self, make: Callable[[], T], mine: Future[T]) -> T:
        try:
            thing = make()
        except BaseException as error:
            with self._lock:
                self._current = None
            mine.set_exception(error)
            raise
        with self._lock:
            closed = self._closed
        if closed:
            thing.close()
        mine.set_result(thing)
        return thing

    def _ready(self) -> T | None:
        # Called with the lock held. A thing that went bad is forgotten.
        if self._current is None or not self._current.done():
            return None
        thing = self._current.result()
        if self._is_good(thing):
            return thing
        self._current = None
        return None
