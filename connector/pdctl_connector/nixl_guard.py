"""The NIXL agent behind one lock. vLLM creates it without synchronization and several threads use it.

Besides, it knows which operation is running since when, so that a writer that is stuck in NIXL can be told from an idle
one; it puts our message in place of upstream's on a WRITE, and keeps book of the WRITEs made; and, for tests alone, it
makes operations fail.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import descriptor_sizes

logger = logging.getLogger("vllm.pdctl_connector.nixl_guard")

Fault = Callable[[str, tuple[Any, ...], Callable[..., Any]], Any]
"""Called instead of an operation with its name, arguments and the operation itself."""

LOCAL_NAMES = ("NIXL_INIT_AGENT", "")
"""What NIXL calls the agent itself when descriptors are prepared."""


@dataclass
class Write:
    """A WRITE that was made inside `NixlGuard.message`.

    Attributes:
        handle: NIXL's.
        descriptors: how many, before NIXL merges neighbours.
        bytes: what they cover.
        posted: NIXL took it: it may be in flight, whatever happened afterwards.
    """

    handle: Any
    descriptors: int
    bytes: int
    posted: bool = False


@dataclass
class _Message:
    make: Callable[[int], bytes]
    made: list[Write]


class NixlGuard:
    """Stands in for the agent: same methods, one at a time.

    Args:
        agent: the agent.
        fault: interferes with operations; for tests alone.
    """

    def __init__(self, agent: Any, *, fault: Fault | None = None) -> None:
        self._agent = agent
        self._fault = fault
        self._lock = threading.RLock()
        self._operation: tuple[str, float] | None = None
        self._thread = threading.local()
        self._sizes: dict[Any, descriptor_sizes.Runs] = {}

    @property
    def agent(self) -> Any:
        """The agent itself."""
        return self._agent

    @property
    def operation(self) -> tuple[str, float] | None:
        """The operation that is running now and the monotonic second it began at, or None. Never waits."""
        return self._operation

    # --- WRITEs -------------------------------------------------------------------------------------------------------

    @contextmanager
    def message(self, make: Callable[[int], bytes]) -> Iterator[list[Write]]:
        """WRITEs that this thread makes inside carry a message of ours.

        Args:
            make: gives the message of a WRITE, from the bytes that it covers.

        Yields:
            a list that the WRITEs are added to. It is complete whatever is raised inside.
        """
        current = _Message(make, [])
        self._thread.message = current
        try:
            yield current.made
        finally:
            self._thread.message = None

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> Any:
        """As the agent's, with the message of `message`."""
        current: _Message | None = getattr(self._thread, "message", None)
        if current is None:
            return self._call("make_prepped_xfer", *args, **kwargs)
        # operation, local list, local numbers, remote list, remote numbers
        numbers = args[2]
        size = self._size_of(args[1], numbers)
        kwargs["notif_msg"] = current.make(size)
        handle = self._call("make_prepped_xfer", *args, **kwargs)
        current.made.append(Write(handle, len(numbers), size))
        return handle

    def transfer(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        """As the agent's. Upstream may fail between two WRITEs of a request: the first one is in flight by then."""
        state = self._call("transfer", handle, *args, **kwargs)
        current: _Message | None = getattr(self._thread, "message", None)
        for write in current.made if current is not None else ():
            write.posted = write.posted or write.handle is handle
        return state

    def _size_of(self, local: Any, numbers: Any) -> int:
        try:
            return descriptor_sizes.total(self._sizes[local], numbers)
        except (KeyError, ValueError):
            # Only a number for people: no reason to fail a transfer.
            return 0

    # --- prepared lists -----------------------------------------------------------------------------------------------

    def get_xfer_descs(self, descs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the agent's. vLLM 0.32 makes NIXL's list first, which does not show its sizes any more."""
        made = self._call("get_xfer_descs", descs, *args, **kwargs)
        self._thread.descs = (made, descs)
        return made

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, *args: Any, **kwargs: Any) -> Any:
        """As the agent's."""
        made, rows = getattr(self._thread, "descs", (None, None))
        self._thread.descs = (None, None)
        handle = self._call("prep_xfer_dlist", agent_name, xfer_list, *args, **kwargs)
        if agent_name in LOCAL_NAMES:
            try:
                self._sizes[handle] = descriptor_sizes.runs_of(rows if made is xfer_list else xfer_list)
            except Exception as error:
                # Another form than vLLM's known ones: transfers work, their bytes are shown as 0.
                logger.warning("bytes of transfers are unknown: %s: %s", type(error).__name__, error)
        return handle

    # --- releasing: what is gone already is what was wanted -----------------------------------------------------------

    def release_dlist_handle(self, handle: Any) -> None:
        """As the agent's, except that an error is logged alone: upstream would leave the rest of its state in place."""
        self._sizes.pop(handle, None)
        self._release("release_dlist_handle", handle)

    def remove_remote_agent(self, agent: str) -> None:
        """As the agent's, except that an error is only logged, such as for an agent that NIXL dropped by itself."""
        self._release("remove_remote_agent", agent)

    def _release(self, name: str, what: Any) -> None:
        try:
            self._call(name, what)
        except Exception as error:
            logger.info("NIXL: %s: %s: %s", name, type(error).__name__, error)

    # --- everything ---------------------------------------------------------------------------------------------------

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._agent, name)
        with self._lock:
            outer = self._operation
            self._operation = (name, time.monotonic())
            try:
                if self._fault is not None:
                    return self._fault(name, args, lambda *other: method(*(other or args), **kwargs))
                return method(*args, **kwargs)
            finally:
                self._operation = outer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_agent" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self._agent, name)
        if not callable(value):
            return value

        def locked(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, *args, **kwargs)

        locked.__name__ = name
        # Found by the instance from now on, without coming through here.
        self.__dict__[name] = locked
        return locked
