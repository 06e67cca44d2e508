"""The writer: the one thread of a rank that talks to NIXL about transfers. Beats twice a second, whatever happens."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from . import wire
from .decode_side import DecodeSide, Settled
from .prefill_side import PrefillSide
from .step import Step

logger = logging.getLogger("vllm.pdctl_connector.writer")

# While a WRITE is in flight: its notification leaves when we poll (UCX), so this is added to D's first token.
IN_FLIGHT_S: Final = 0.0005
# While something is expected: a registration, a completion, a connection.
EXPECTING_S: Final = 0.001
# Otherwise: new work wakes the writer; a message of a peer that was not expected may wait for so long.
IDLE_S: Final = 0.02
# A gap between two rounds beyond this means that the process was stopped (or NIXL was stuck): deadlines move with it.
STOPPED_S: Final = 2.0


class Link(Protocol):
    """What the writer needs beside the two sides."""

    def notifications(self) -> list[bytes]:
        """Everything that arrived, taken out."""

    def housekeeping(self, now: float) -> None:
        """Connections: take finished handshakes in, drop what is replaced or broken."""


class Writer:
    """Runs both sides of a rank. The engine's threads hand it steps and take results; they never wait for it.

    Args:
        prefill: the prefill side.
        decode: the decode side.
        link: notifications and connections.
        name: of the thread.
    """

    def __init__(self, prefill: PrefillSide, decode: DecodeSide, link: Link, *, name: str = "pdctl-writer") -> None:
        self.prefill, self.decode = prefill, decode
        self._link = link
        self._inbox: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._sent: list[str] = []
        self._settled: list[Settled] = []
        self._fenced: list[str] = []
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._errors = 0
        self._last_error: str | None = None
        self._seen_errors: set[str] = set()
        self._loops = 0
        self._last_round: float | None = None
        self._told_shutdown = False
        self._beat = time.monotonic()
        self._engine_at = time.monotonic()
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    # The engine's side: called from its main thread.

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def hand_over(self, step: Step) -> None:
        """Give work to the writer. Does not wait."""
        self._engine_at = time.monotonic()
        self._inbox.put(step)
        self._wake.set()

    def take(self) -> tuple[list[str], list[Settled], list[str]]:
        """Sent, settled and fenced requests since the last call. The engine calls this with every step."""
        self._engine_at = time.monotonic()
        if not (self._sent or self._settled or self._fenced):
            return [], [], []
        with self._lock:
            taken = self._sent, self._settled, self._fenced
            self._sent, self._settled, self._fenced = [], [], []
        return taken

    def stop(self, deadline_s: float) -> bool:
        """Stop intake, tell the peers, wait for WRITEs in flight at most ``deadline_s``. True if it ended in time."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # For telemetry: read from any thread.

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    @property
    def beat_age_s(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._beat

    @property
    def loops(self) -> int:
        """Rounds so far."""
        return self._loops

    @property
    def errors(self) -> int:
        """Exceptions so far; the loop survives them."""
        return self._errors

    @property
    def last_error(self) -> str | None:
        """The latest of them."""
        return self._last_error

    @property
    def busy(self) -> bool:
        """True while a WRITE is in flight or something is expected."""
        return self.prefill.in_flight or self.decode.expecting

    def outcomes(self) -> Mapping[tuple[str, str], int]:
        """Received messages: (kind, what became of it) to count."""
        return dict(self._outcomes)

    # The thread.

    def run(self) -> None:
        """The loop. An exception in one part is counted, logged once with its traceback, and does not end it."""
        while True:
            self._beat = time.monotonic()
            self._loops += 1
            if not self.round(self._beat):
                return
            self._beat = time.monotonic()
            if self.prefill.in_flight:
                self._wake.wait(IN_FLIGHT_S)
            elif self.prefill.expecting or self.decode.expecting:
                self._wake.wait(EXPECTING_S)
            else:
                self._wake.wait(IDLE_S)
            self._wake.clear()

    def round(self, now: float) -> bool:
        """One round of the loop, which raises nothing.

        Args:
            now: monotonic seconds.

        Returns:
            False if it was the last one: the writer was stopped, and no WRITE is in flight.
        """
        if self._last_round is not None and now - self._last_round > STOPPED_S:
            # Before what comes in now: its time counts from now.
            self._postpone(now - self._last_round, now)
        self._last_round = now
        # Messages before deadlines: after a pause the answer may be there already.
        self._guarded("inbox", self._take_in, now)
        self._guarded("connections", self._link.housekeeping, now)
        self._guarded("notifications", self._read, now)
        self.prefill.engine_at = self._engine_at
        self._guarded("prefill", self.prefill.tick, now)
        self._guarded("decode", self.decode.tick, now)
        stopping = self._stop.is_set()
        if stopping and not self._told_shutdown:
            self._told_shutdown = True
            self._guarded("shutdown", self.prefill.shut_down, now)
            self._guarded("shutdown", self.decode.shut_down, now)
        self._guarded("results", self._hand_out, now)
        return not stopping or self.prefill.in_flight

    def _guarded(self, part: str, work: Callable[[float], Any], now: float) -> None:
        try:
            work(now)
        except Exception as error:
            self._errors += 1
            self._last_error = f"{part}: {type(error).__name__}: {error}"
            signature = f"{part}:{type(error).__name__}"
            if signature not in self._seen_errors:
                self._seen_errors.add(signature)
                logger.exception("the writer goes on after an error in %s (logged once)", part)

    def _postpone(self, seconds: float, now: float) -> None:
        self._guarded("prefill", lambda _: self.prefill.postpone(seconds), now)
        self._guarded("decode", lambda _: self.decode.postpone(seconds), now)

    def _take_in(self, now: float) -> None:
        while True:
            try:
                step = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._take_step(step, now)

    def _take_step(self, step: Step, now: float) -> None:
        # What has ended makes room for a new try under the same key, and is told first. What came and went within this
        # step must begin before it ends.
        begun = {event.request_id for event in step.prefilling}
        for ended in step.ended:
            if ended.request_id not in begun:
                self._guarded("ended", partial(self.prefill.on_ended, ended), now)
        for prefilling in step.prefilling:
            self._guarded("prefilling", partial(self.prefill.on_prefilling, prefilling), now)
        for ended in step.ended:
            if ended.request_id in begun:
                self._guarded("ended", partial(self.prefill.on_ended, ended), now)
        for ready in step.ready:
            self._guarded("ready", partial(self.prefill.on_ready, ready), now)
        begun = {event.request_id for event in step.receive}
        for given_up in step.given_up:
            if given_up.request_id not in begun:
                self._guarded("given up", partial(self.decode.on_given_up, given_up), now)
        for receive in step.receive:
            self._guarded("receive", partial(self.decode.on_receive, receive), now)
        for given_up in step.given_up:
            if given_up.request_id in begun:
                self._guarded("given up", partial(self.decode.on_given_up, given_up), now)
        self.decode.on_waiting(step.waiting)

    def _read(self, now: float) -> None:
        for data in self._link.notifications():
            self._guarded("a notification", partial(self._dispatch, data), now)

    def _dispatch(self, data: bytes, now: float) -> None:
        try:
            message = wire.decode(data)
        except wire.WireError as error:
            self._outcomes[error.message_kind or "?", error.fault] += 1
            return
        if message is None:
            self._outcomes["?", "foreign"] += 1
            return
        if isinstance(message, wire.Done | wire.Failed | wire.CancelAck | wire.Alive):
            result = self.decode.on_message(message, now)
        else:
            result = self.prefill.on_message(message, now)
        self._outcomes[message.kind, result] += 1

    def _hand_out(self, now: float) -> None:
        del now
        sent, settled, fenced = self.prefill.take_sent(), self.decode.take_settled(), self.decode.take_fenced()
        if sent or settled or fenced:
            with self._lock:
                self._sent += sent
                self._settled += settled
                self._fenced += fenced
