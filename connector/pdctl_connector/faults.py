"""Faults on purpose, for tests alone: the n-th call of a NIXL operation raises, waits, or answers something else.

`PDCTL_FAULTS` is never set by pdctl's launcher. Its value is a comma-separated list of ``operation:n:action``; ``n``
counts from 1, or is ``*``. Actions: ``raise`` (a NIXL backend error), ``disconnect`` (a remote disconnect),
``sleep=SECONDS``, ``return=VALUE``, ``drop`` (nothing is done), ``twice`` (it is done twice), ``reverse`` (of
``make_prepped_xfer``: the blocks go out in the wrong order, so that the KV cache is damaged). ``operation`` is a method
of the NIXL agent, or ``send_notif/KIND`` for notifications of one kind (REG, FAIL...; not the DONE of a WRITE).
The variable may name a file instead, as ``@/path``: it is read again at every call, so faults can come and go.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import wire

logger = logging.getLogger("vllm.pdctl_connector.faults")

VARIABLE = "PDCTL_FAULTS"


def from_environment() -> Callable[[str, tuple[Any, ...], Callable[..., Any]], Any] | None:
    """The faults that the environment asks for; None for none, which is always so outside tests.

    Raises:
        ValueError: the variable says something that is no fault.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    logger.warning("%s is set: this instance fails on purpose (%s)", VARIABLE, text)
    return Faults(text)


class _Fault(NamedTuple):
    operation: str
    call: int | None  # None for every call
    action: str
    value: str


class Faults:
    """Decides at every operation whether to interfere.

    Raises:
        ValueError: the text is no list of faults. That of a file is judged at the next operation.
    """

    def __init__(self, text: str) -> None:
        self._source = Path(text[1:]) if text.startswith("@") else None
        self._faults = [] if self._source else _parsed(text)
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, operation: str, args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
        """Run an operation, or what a fault makes of it. ``run`` takes other arguments if it is given any."""
        names = [operation]
        if operation == "send_notif":
            names.append(f"send_notif/{_kind(args)}")
        for fault in self._due(names):
            if fault.action == "sleep":
                time.sleep(float(fault.value))
            elif fault.action == "raise":
                raise _error("nixlBackendError")
            elif fault.action == "disconnect":
                raise _error("nixlRemoteDisconnectError")
            elif fault.action == "return":
                return fault.value
            elif fault.action == "drop":
                return None
            elif fault.action == "twice":
                run()
            elif fault.action == "reverse":
                # operation, local list, local numbers, remote list, remote numbers
                return run(*args[:2], args[2][::-1], *args[3:])
        return run()

    def _due(self, names: list[str]) -> list[_Fault]:
        faults = self._faults
        if self._source is not None:
            try:
                faults = _parsed(self._source.read_text(encoding="utf-8"))
            except OSError:
                faults = []
        with self._lock:
            self._calls.update(names)
            return [f for f in faults if f.operation in names and f.call in (None, self._calls[f.operation])]


def _parsed(text: str) -> list[_Fault]:
    faults = []
    for entry in filter(None, (part.strip() for part in text.replace("\n", ",").split(","))):
        operation, _, rest = entry.partition(":")
        call, _, action = rest.partition(":")
        word, _, value = action.partition("=")
        bad = word not in ("sleep", "raise", "disconnect", "return", "drop", "twice", "reverse")
        bad = bad or not (call == "*" or (call.isdecimal() and int(call) > 0))
        bad = bad or (word == "sleep" and not value.replace(".", "", 1).isdecimal())
        if bad:
            raise ValueError(f"{VARIABLE}: {entry!r} is no fault; expected operation:n:action")
        faults.append(_Fault(operation, None if call == "*" else int(call), word, value))
    return faults


def _kind(args: tuple[Any, ...]) -> str:
    data = args[1] if len(args) > 1 else b""
    try:
        message = wire.decode(data)
    except wire.WireError:
        return "?"
    return message.kind if message is not None else "?"


def _error(name: str) -> Exception:
    from nixl import _bindings

    kind = getattr(_bindings, name)
    error: Exception = kind(f"{name}: a fault made on purpose ({VARIABLE})")
    return error
