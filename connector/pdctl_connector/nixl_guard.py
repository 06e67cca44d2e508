"""The NIXL agent behind one lock. vLLM creates it without synchronization and several threads use it.

Besides, it knows which operation is running since when, so that a writer that is stuck in NIXL can be told from an idle
one; it puts our message in place of upstream's on a WRITE; and, for tests alone, it makes operations fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Fault = Callable[[str, tuple[Any, ...], Callable[..., Any]], Any]
"""Called instead of an operation with its name, arguments and the operation itself."""


class NixlGuard:
    """Stands in for the agent: same methods, one at a time."""

    def __init__(self, agent: Any, *, fault: Fault | None = None) -> None:
        self._agent = agent
        self._fault = fault
        self._lock = threading.RLock()
        self._operation: tuple[str, float] | None = None
        self._message = threading.local()
        self._made: list[Any] | None = None

    @property
    def agent(self) -> Any:
        """The agent itself."""
        return self._agent

    @property
    def operation(self) -> tuple[str, float] | None:
        """The operation that is running now and the monotonic second it began at, or None."""
        return self._operation

    @contextmanager
    def message(self, message: bytes) -> Iterator[list[tuple[Any, int]]]:
        """WRITEs that this thread makes inside carry ``message``. Yields a list that they are added to, with their
        number of descriptors."""
        made: list[tuple[Any, int]] = []
        self._message.value = (message, made)
        try:
            yield made
        finally:
            self._message.value = None

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> Any:
        """As the agent's, with the message of `message`."""
        current = getattr(self._message, "value", None)
        if current is not None:
            kwargs["notif_msg"] = current[0]
        handle = self._call("make_prepped_xfer", *args, **kwargs)
        if current is not None:
            current[1].append((handle, len(args[2]) if len(args) > 2 else 0))
        return handle

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._agent, name)
        with self._lock:
            outer = self._operation
            self._operation = (name, time.monotonic())
            try:
                if self._fault is not None:
                    return self._fault(name, args, lambda: method(*args, **kwargs))
                return method(*args, **kwargs)
            finally:
                self._operation = outer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._agent, name)
        if not callable(value):
            return value

        def locked(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, *args, **kwargs)

        locked.__name__ = name
        # Found by the instance from now on, without coming through here.
        self.__dict__[name] = locked
        return locked
