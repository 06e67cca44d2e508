"""Small pieces of work that run beside each other and hand back what they raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


class Background:
    """Work in a daemon thread, so that it never keeps the interpreter alive; :meth:`result` raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # handed to the thread that asks for the result
            self._error = error

    def join(self) -> None:
        """Wait for the end. Ctrl-C ends the waiting, not the work."""
        while self._thread.is_alive():
            # In slices: a plain join would not be interrupted by a signal.
            self._thread.join(0.2)

    def result(self) -> None:
        """Wait for the end and raise what the work raised."""
        self.join()
        if self._error is not None:
            raise self._error


def run_all(works: Iterable[Callable[[], object]]) -> None:
    """Run all at once, wait for all, then raise the first exception, if any."""
    threads = [Background(work) for work in works]
    for thread in threads:
        thread.join()
    for thread in threads:
        thread.result()
