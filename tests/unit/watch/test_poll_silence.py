"""How long a host may say nothing until its connection is given up: longer at a slow pace."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pdctl.errors import CommandTimeout
from pdctl.watch import poll_host
from pdctl.watch.poll_host import HostWatch, silence_s


@pytest.mark.parametrize(("interval_s", "patience_s"), [(0.1, 15.0), (5.0, 15.0), (30.0, 65.0), (3600.0, 7205.0)])
def test_one_line_may_be_lost_at_any_pace(interval_s: float, patience_s: float) -> None:
    assert silence_s(interval_s) == patience_s


class Silent:
    """A conversation in which nobody says anything; each second of waiting passes at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def send(self, message: Any, *, timeout_s: float) -> None:
        del message, timeout_s

    def receive(self, *, timeout_s: float) -> Any:
        self.now_s += timeout_s
        raise CommandTimeout("h1", "nothing")

    def close(self) -> None:
        pass


class Sink:
    """Hears nothing."""

    def connected(self, host: str) -> None:
        del host

    heard = lost = connected  # type: ignore[assignment]


def test_the_patience_is_that_of_the_pace_that_was_asked_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Silent()
    monkeypatch.setattr(poll_host, "talk", lambda *args, **more: silent)
    monkeypatch.setattr(poll_host, "time", SimpleNamespace(monotonic=silent.monotonic))
    host: Any = object()
    slots = threading.Semaphore(1)
    watch = HostWatch("h1", lambda name: host, {"interval_s": 1.0}, ("python3",), Sink(), slots)
    for interval_s, patience_s in ((1.0, 15.0), (30.0, 65.0)):
        watch.ask({"interval_s": interval_s})
        begun_s = silent.now_s
        with pytest.raises(CommandTimeout, match=f"said nothing for {patience_s:.0f} s"):
            list(watch._lines())
        assert patience_s < silent.now_s - begun_s <= patience_s + 2
