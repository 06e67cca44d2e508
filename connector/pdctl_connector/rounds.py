"""One round of work over many transfers, where a bug with one of them must not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


class Round:
    """Serves every item, and raises afterwards what went wrong first.

    A context manager: what `each` caught is raised at the end, with its traceback, so that the caller counts it.
    """

    def __init__(self) -> None:
        self._first: Exception | None = None

    def __enter__(self) -> Round:
        return self

    def each(self, items: Iterable[Item], work: Callable[[Item], None]) -> None:
        """Do ``work`` for each of ``items`` as they are now; they may change meanwhile."""
        for item in list(items):
            try:
                work(item)
            except Exception as error:
                self._first = self._first or error

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self._first is not None:
            raise self._first
