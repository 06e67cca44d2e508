"""Connections to other engines: when a handshake is made, when it is made again, and when an engine is certainly gone.

For the writer thread alone. Handshakes and looks at side channels run elsewhere (`Transport.submit`) and are taken in
by `Connections.tick`. What NIXL does is behind `Transport`, so this knows no vLLM.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol

from .side_channel import Presence

logger = logging.getLogger("vllm.pdctl_connector.connections")

BACKOFF_FIRST_S: Final = 0.5
BACKOFF_LAST_S: Final = 15.0
HEALTHY_S: Final = 60.0
"""A connection that held so long starts again with the first pause when it breaks."""
PROBE_S: Final = 3.0
"""How long a side channel has to answer, and how often it is asked."""
FORGET_S: Final = 600.0
"""An engine without a connection that nobody asks for is forgotten after so long."""

State = Literal["ready", "connecting", "failed"]


@dataclass(frozen=True)
class Address:
    """An engine and where its side channel is.

    Attributes:
        full: whether it is to be written to, and not only to get messages: more is exchanged and checked then.
    """

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int
    full: bool


class Transport(Protocol):
    """What is needed of NIXL and of threads."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Run something in another thread."""

    def handshake(self, address: Address) -> Any:
        """Exchange memory registrations with an engine. In another thread; raises whatever goes wrong."""

    def adopt(self, engine_id: str, result: Any) -> None:
        """From now on the engine can be sent to."""

    def release(self, engine_id: str) -> bool:
        """Drop all NIXL state of an engine. Does not wait: False if it cannot be done just now."""

    def busy(self) -> set[str]:
        """Engines whose state is in use: a WRITE is in flight, or a result is being taken."""

    def presence(self, host: str, port: int, engine_id: str, timeout_s: float) -> Presence:
        """Who answers on a side channel. In another thread."""


class Listener(Protocol):
    """Told of what happens to connections."""

    def connected(self, engine_id: str) -> None:
        """A handshake succeeded."""

    def not_connected(self, engine_id: str, detail: str, now: float) -> None:
        """A handshake failed."""

    def broke(self, engine_id: str, detail: str, now: float) -> None:
        """A connection broke: what was agreed over it is lost."""

    def replaced(self, engine_id: str, detail: str, now: float) -> None:
        """Another engine answers on its address: it does not exist any more."""


@dataclass
class _Connection:
    address: Address
    state: Literal["connecting", "ready", "failed", "broken"]
    last_used: float
    backoff_s: float = BACKOFF_FIRST_S
    retry_at: float = 0.0
    error: str = ""
    ready_at: float = 0.0
    # Since when it is not what it was: set when it breaks, and kept over failed tries until one succeeds.
    lost_at: float | None = None
    # Who answered, and when that was asked; then when the last question was begun.
    presence: Presence | None = None
    presence_at: float = 0.0
    probed_at: float = -PROBE_S
    probe: Future[Presence] | None = None


class Connections:
    """All connections of a rank.

    Args:
        transport: NIXL.
        listener: is told of changes.
        patience_s: how long a broken connection counts as coming back.
        unused_s: a connection that is not used for so long is dropped; 0 for never.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        transport: Transport,
        listener: Listener,
        *,
        patience_s: float,
        unused_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._listener = listener
        self._patience_s = patience_s
        self._unused_s = unused_s
        self._clock = clock
        self._known: dict[str, _Connection] = {}
        self._finished: queue.SimpleQueue[tuple[_Connection, Future[Any]]] = queue.SimpleQueue()

    def state(self, address: Address) -> State:
        """State of the connection to an engine; begins a handshake if there is none, or if it is time to try again."""
        now = self._clock()
        known = self._known.get(address.engine_id)
        if known is None:
            self._begin(address, now, None)
            return "connecting"
        known.last_used = now
        if known.state == "ready":
            if known.address.full or not address.full:
                return "ready"
            # So far for messages alone. Upstream's handshake adds nothing to an engine that it knows.
            if self._release(known):
                self._begin(address, now, known)
            return "connecting"
        if known.lost_at is not None:
            # Soon, so that requests for a process that is gone do not wait for a handshake's time-out.
            self._look(known, now)
        if known.state == "failed":
            if now < known.retry_at:
                return "failed"
            known = self._begin(address, now, known)
        elif known.state == "broken" and self._try_again(known, address, now):
            known = self._known[address.engine_id]
        hopeless = known.lost_at is not None and (_absent(known) or now - known.lost_at > self._patience_s)
        return "failed" if hopeless else "connecting"

    def _try_again(self, known: _Connection, address: Address, now: float) -> bool:
        if now < known.retry_at or not self._release(known):
            return False
        self._begin(address, now, known)
        return True

    def why(self, engine_id: str) -> str:
        """Why there is no connection to an engine, for people."""
        known = self._known.get(engine_id)
        return "never connected" if known is None else known.error or known.state

    def broke(self, engine_id: str, error: BaseException) -> None:
        """Using a connection failed: what is in flight ends by itself, then it is made anew."""
        known = self._known.get(engine_id)
        if known is None or known.state != "ready":
            return
        now = self._clock()
        detail = f"{type(error).__name__}: {error}"
        logger.warning("connection to engine %s is broken: %s", engine_id, detail)
        self._lose(known, detail, now)
        self._listener.broke(engine_id, detail, now)

    def gone(self, engine_id: str) -> bool:
        """True when the engine's process certainly ended: another engine answers on its address, or nothing listens
        there and NIXL has lost it. Begins to look; does not wait."""
        known = self._known.get(engine_id)
        if known is None:
            return False
        self._look(known, self._clock())
        return _absent(known)

    def _look(self, known: _Connection, now: float) -> None:
        """Take in who answered on the side channel, and ask again when it is time."""
        if known.probe is not None and known.probe.done():
            self._take_probe(known, now)
        if known.probe is None and now - known.probed_at >= PROBE_S:
            known.probed_at = now
            address = known.address
            known.probe = self._transport.submit(
                partial(self._transport.presence, address.host, address.port, address.engine_id, PROBE_S)
            )

    def tick(self, now: float) -> None:
        """Take finished handshakes in; drop what is broken, replaced or unused."""
        while True:
            try:
                made, future = self._finished.get_nowait()
            except queue.Empty:
                break
            if self._known.get(made.address.engine_id) is made:
                self._take_handshake(made, future, now)
        busy: set[str] | None = None
        for engine_id, known in list(self._known.items()):
            idle_s = now - known.last_used
            if known.state == "broken" or (known.state == "ready" and 0 < self._unused_s < idle_s):
                busy = self._transport.busy() if busy is None else busy
                if engine_id in busy or not self._transport.release(engine_id):
                    continue
                if known.state == "ready":
                    logger.info("connection to engine %s dropped: unused for %.0f s", engine_id, idle_s)
                    del self._known[engine_id]
                    continue
            if known.state in ("failed", "broken") and idle_s > FORGET_S:
                del self._known[engine_id]

    # Inside.

    def _begin(self, address: Address, now: float, former: _Connection | None) -> _Connection:
        made = _Connection(address, "connecting", last_used=now)
        if former is not None:
            if former.state != "ready":
                made.backoff_s = min(2 * former.backoff_s, BACKOFF_LAST_S)
            made.lost_at, made.presence, made.presence_at = former.lost_at, former.presence, former.presence_at
            made.probed_at, made.probe = former.probed_at, former.probe
        self._known[address.engine_id] = made
        future = self._transport.submit(partial(self._transport.handshake, address))
        future.add_done_callback(lambda done: self._finished.put((made, done)))
        return made

    def _take_handshake(self, made: _Connection, future: Future[Any], now: float) -> None:
        engine_id = made.address.engine_id
        try:
            self._transport.adopt(engine_id, future.result())
        except Exception as error:
            made.state = "failed"
            made.error = f"{type(error).__name__}: {error}"
            made.retry_at = now + made.backoff_s
            logger.warning(
                "no connection to engine %s at %s port %d: %s",
                engine_id, made.address.host, made.address.port, made.error,
            )  # fmt: skip
            self._listener.not_connected(engine_id, made.error, now)
            return
        made.state, made.error = "ready", ""
        made.ready_at, made.lost_at, made.presence = now, None, None
        self._listener.connected(engine_id)
        for other in list(self._known.values()):
            same_place = (other.address.host, other.address.port) == (made.address.host, made.address.port)
            if other is not made and same_place:
                self._replace(other, f"replaced by {engine_id}", now)

    def _take_probe(self, known: _Connection, now: float) -> None:
        assert known.probe is not None
        probe, known.probe = known.probe, None
        try:
            found = probe.result()
        except Exception as error:
            found = "silent"
            logger.warning("cannot look who answers at %s: %s", known.address.host, type(error).__name__)
        if known.presence == "replaced":
            # Known for certain; only a handshake with the engine itself takes that back.
            return
        known.presence, known.presence_at = found, known.probed_at
        if found == "replaced":
            self._replace(known, "another engine answers on its address", now)

    def _replace(self, known: _Connection, detail: str, now: float) -> None:
        known.presence = "replaced"
        if known.state == "ready":
            logger.warning("engine %s does not exist any more: %s", known.address.engine_id, detail)
            self._lose(known, detail, now)
            self._listener.replaced(known.address.engine_id, detail, now)

    def _lose(self, known: _Connection, detail: str, now: float) -> None:
        if now - known.ready_at > HEALTHY_S:
            known.backoff_s = BACKOFF_FIRST_S
        known.state, known.error, known.lost_at = "broken", detail, now
        known.retry_at = now + known.backoff_s
        if known.probe is None:
            # What was asked before the loss is no answer.
            known.probed_at = -PROBE_S
        self._look(known, now)

    def _release(self, known: _Connection) -> bool:
        engine_id = known.address.engine_id
        return engine_id not in self._transport.busy() and self._transport.release(engine_id)


def _absent(known: _Connection) -> bool:
    """Whether the engine's process certainly ended, as far as is known by now."""
    if known.presence == "replaced":
        return True
    # A look from before the loss says nothing about after it.
    asked_since = known.lost_at is not None and known.presence_at >= known.lost_at
    return known.presence == "refused" and asked_since
