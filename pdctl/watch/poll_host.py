"""One host's connection: starts ``pdctl/node/watch_facts.py`` there, takes its lines, begins again when it breaks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pdctl.errors import CommandTimeout, PdctlError
from pdctl.hosts.agent import script_source
from pdctl.hosts.base import Host
from pdctl.hosts.conversation import Conversation, talk

PREFIX = b"PDCTL-WATCH-1 "

_SCRIPT = "watch_facts"
_WHAT = "the watch script"
_SEND_S = 10.0
_SIGN_S = 5.0
"""How often the script is shown that somebody listens; it ends after 30 s without."""
_SILENCE_S = 15.0
"""How long a script may say nothing until the connection is given up. A snapshot tells of it long before. More at a
slow pace, see `silence_s`."""
_WAIT_S = 1.0
_LIFETIME_S = 6 * 3600.0
_FIRST_DELAY_S, _LAST_DELAY_S = 1.0, 30.0


def silence_s(interval_s: float) -> float:
    """How long a script may say nothing that says a line every ``interval_s``, in seconds: one may be lost."""
    return max(_SILENCE_S, 2 * interval_s + 5.0)


class Sink(Protocol):
    """Where a host's lines go; called from the host's thread."""

    def connected(self, host: str) -> None:
        """The script was started."""

    def heard(self, host: str, message: Mapping[str, Any]) -> None:
        """A line came."""

    def lost(self, host: str, error: str) -> None:
        """There is no connection, for the reason given."""


def delay_s(failures: int, chance: float) -> float:
    """How long to wait after the n-th failure in a row: 1, 2, 4, ... 30 s, up to a quarter less or more.

    Args:
        failures: counted from 1.
        chance: from 0 to 1, so that hosts that failed together do not come back together.
    """
    return min(_LAST_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(failures - 1, 16)) * (0.75 + 0.5 * chance)


class HostWatch:
    """Keeps one host watched, in a thread of its own.

    Args:
        name: of the host.
        find: gives the host; may raise PdctlError.
        request: for the script.
        pythons: interpreters to try on the host.
        sink: takes what comes.
        slots: bounds how many hosts are connected to at once.
        silence_s: see the function of this name, which is for None; at every pace.
        delay: see `delay_s`.
    """

    def __init__(
        self,
        name: str,
        find: Callable[[str], Host],
        request: Mapping[str, Any],
        pythons: Sequence[str],
        sink: Sink,
        slots: threading.Semaphore,
        *,
        silence_s: float | None = None,
        delay: Callable[[int, float], float] = delay_s,
    ) -> None:
        self._name, self._find, self._request, self._pythons = name, find, request, pythons
        self._sink, self._slots = sink, slots
        self._silence_s, self._delay = silence_s, delay
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._conversation: Conversation | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {name}", daemon=True)

    @property
    def name(self) -> str:
        """Of the host."""
        return self._name

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def ask(self, request: Mapping[str, Any]) -> None:
        """Look at other things, or at another pace, within a second or two: by another script."""
        self._request = request

    def close(self) -> None:
        """End the script. Its end is not waited for; again is fine."""
        self._stop.set()
        with self._lock:
            conversation, self._conversation = self._conversation, None
        if conversation is not None:
            try:
                conversation.close()
            except (PdctlError, OSError, EOFError):
                # The connection broke at the same time; the script ends by itself.
                return

    def join(self, timeout_s: float) -> None:
        """Wait for the thread. One that is connecting may take longer, and ends with the process."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            lines = 0
            try:
                for _ in self._lines():
                    lines, failures = lines + 1, 0
            except PdctlError as error:
                self._fail(error.message)
            except Exception as error:
                # A watcher that a bug of one connection ends would be silent about all hosts.
                self._fail(f"{self._name}: the connection failed in a way that is a bug of pdctl: {error!r}")
            else:
                if lines:
                    # Its time was over, or it is asked for something else; the next one begins.
                    continue
            failures += 1
            self._stop.wait(self._delay(failures, random.random()))  # noqa: S311

    def _fail(self, error: str) -> None:
        if not self._stop.is_set():
            self._sink.lost(self._name, error)

    def _lines(self) -> Iterator[None]:
        """Yield for each line, until it is time for another script."""
        request = self._request
        # Of this script: at another pace there is another one.
        patience_s = silence_s(float(request.get("interval_s", 1.0))) if self._silence_s is None else self._silence_s
        conversation = self._open(request)
        try:
            begun = heard = signed = time.monotonic()
            while not self._stop.is_set() and time.monotonic() - begun < _LIFETIME_S - 60:
                if self._request is not request:
                    return
                if time.monotonic() - signed >= _SIGN_S:
                    conversation.send({}, timeout_s=_SIGN_S)
                    signed = time.monotonic()
                try:
                    message = conversation.receive(timeout_s=_WAIT_S)
                except CommandTimeout:
                    if time.monotonic() - heard > patience_s:
                        raise CommandTimeout(
                            self._name,
                            f"{_WHAT} said nothing for {patience_s:.0f} s",
                            hint="the host or the network to it may be overloaded, or gone",
                        ) from None
                    continue
                heard = time.monotonic()
                self._sink.heard(self._name, message)
                yield
        finally:
            with self._lock:
                self._conversation = None
            conversation.close()

    def _open(self, request: Mapping[str, Any]) -> Conversation:
        with self._slots:
            conversation = talk(
                self._find(self._name),
                script_source(_SCRIPT),
                prefix=PREFIX,
                what=_WHAT,
                lifetime_s=_LIFETIME_S,
                send_timeout_s=_SEND_S,
                pythons=self._pythons,
            )
        with self._lock:
            self._conversation = conversation
        if self._stop.is_set():
            self.close()
        self._sink.connected(self._name)
        conversation.send(request, timeout_s=_SEND_S)
        return conversation
