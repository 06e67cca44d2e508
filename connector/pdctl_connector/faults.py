"""Faults on purpose, for tests alone: the n-th call of a NIXL operation raises, waits, or answers something else.

`PDCTL_FAULTS` is never set by pdctl's launcher, which also refuses to pass it on. Its value is a comma-separated list of
``operation:n:action``; ``n`` counts from 1, or is ``*``. Actions: ``raise`` (a NIXL backend error), ``disconnect`` (a
remote disconnect), ``sleep=SECONDS``, ``return=VALUE``, ``drop`` (a notification is not sent), ``twice`` (it is sent
twice). ``operation`` is a method of the NIXL agent, or ``send_notif/KIND`` for notifications of one kind (REG, DONE...).
The variable may name a file instead, as ``@/path``: it is read again at every call, so faults can come and go.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import wire

VARIABLE = "PDCTL_FAULTS"


def from_environment() -> Callable[[str, tuple[Any, ...], Callable[..., Any]], Any] | None:
    """The faults that the environment asks for; None for none, which is always so outside tests."""
    text = os.environ.get(VARIABLE)
    return Faults(text) if text else None


class Faults:
    """Decides at every operation whether to interfere."""

    def __init__(self, text: str) -> None:
        self._source = Path(text[1:]) if text.startswith("@") else None
        self._text = "" if self._source else text
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, operation: str, args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
        """Run an operation, or what a fault makes of it."""
        names = [operation]
        if operation == "send_notif":
            names.append(f"send_notif/{_kind(args, run)}")
        for action in self._actions(names):
            word, _, value = action.partition("=")
            if word == "sleep":
                time.sleep(float(value))
            elif word == "raise":
                raise _error("nixlBackendError")
            elif word == "disconnect":
                raise _error("nixlRemoteDisconnectError")
            elif word == "return":
                return value
            elif word == "drop":
                return None
            elif word == "twice":
                run()
        return run()

    def _actions(self, names: list[str]) -> list[str]:
        text = self._text
        if self._source is not None:
            try:
                text = self._source.read_text()
            except OSError:
                return []
        wanted = []
        with self._lock:
            for name in names:
                self._calls[name] += 1
            for entry in text.replace("\n", ",").split(","):
                parts = entry.strip().split(":", 2)
                if len(parts) == 3 and parts[0] in names and parts[1] in ("*", str(self._calls[parts[0]])):
                    wanted.append(parts[2])
        return wanted


def _kind(args: tuple[Any, ...], run: Callable[..., Any]) -> str:
    data = args[1] if len(args) > 1 else getattr(run, "notification", b"")
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
