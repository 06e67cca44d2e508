"""The prefill side of transfers as a state machine: events in, transport calls and results out. No thread, no vLLM.

What holds whatever happens (docs/protocol.md): a WRITE is posted only for a request whose blocks are held here and whose
registration stands; blocks are given back only when no WRITE of the request is in flight; every registration that will
get no KV is told so.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from . import wire
from .ledger import Ledger, Outcome
from .step import BlockIds, Ended, Prefilling, Ready

logger = logging.getLogger("vllm.pdctl_connector.prefill_side")

PARKED_LIMIT: Final = 4096
TOMBSTONE_LIMIT: Final = 8192
TOMBSTONE_S: Final = 600.0
ALIVE_S: Final = 2.0

PeerState = Literal["ready", "connecting", "failed"]
HandleState = Literal["active", "done", "failed"]
DecodeRank = wire.Register | wire.Cancel
"""A message that says where its decode engine is."""
Identity = tuple[str, str, int]
"""Key, decode engine, attempt."""


@dataclass(frozen=True)
class Posted:
    """WRITEs that were handed to NIXL. ``failed`` is why some could not be, if so; the others are in flight all the same."""

    handles: tuple[int, ...]
    descriptors: int
    bytes: int
    failed: str = ""


class Transport(Protocol):
    """What the prefill side needs of NIXL. Nothing here waits."""

    def connect(self, registration: DecodeRank) -> PeerState:
        """State of the connection for WRITEs to a decode engine; begins one if there is none."""

    def send(self, engine_id: str, message: wire.Message) -> bool:
        """Send to the ranks of a connected engine; False if that failed."""

    def writers(self, tp_size: int) -> tuple[int, int]:
        """This rank, and how many ranks write to each decode rank of an engine of that size."""

    def refusal(self, registration: wire.Register) -> str:
        """Why the block ids cannot be those of that engine; empty if they can. For a connected engine."""

    def post(self, request_id: str, block_ids: BlockIds, registration: wire.Register) -> Posted:
        """Post the WRITEs of a request to a connected engine. Raises whatever goes wrong before the first one."""

    def poll(self, handle: int) -> HandleState:
        """State of a WRITE; a finished one is released."""


@dataclass
class _Request:
    """A request that this engine prefills for another."""

    request_id: str
    key: str
    tokens: int
    ready_at: float | None = None
    block_ids: BlockIds = ()
    token_hash: bytes = b""
    lease_until: float | None = None
    registration: wire.Register | None = None
    active: list[int] = field(default_factory=list)
    posted: bool = False
    failed: str = ""
    failed_reason: str = "transfer"
    unwanted: str = ""
    duplicate: bool = False
    told_alive_at: float = 0.0
    cancelled: bool = False
    descriptors: int = 0
    bytes: int = 0


@dataclass
class _Tomb:
    outcome: Literal["cancelled", "completed", "failed"]
    reason: str
    detail: str
    bytes: int
    until: float


class PrefillSide:
    """All transfers out of this rank.

    Args:
        transport: NIXL.
        ledger: told of every stage.
        lease_s: how long finished blocks wait for a registration.
        parked_s: how long a registration waits for its prefill request before it is forgotten.
    """

    def __init__(self, transport: Transport, ledger: Ledger, *, lease_s: float, parked_s: float) -> None:
        self._transport = transport
        self._ledger = ledger
        self._lease_s = lease_s
        self._parked_s = parked_s
        self._requests: dict[str, _Request] = {}
        self._by_key: dict[str, list[_Request]] = {}
        self._parked: dict[str, tuple[wire.Register, float]] = {}
        self._ended_keys: OrderedDict[str, _Tomb] = OrderedDict()
        self._tombs: OrderedDict[Identity, _Tomb] = OrderedDict()
        self._outbox: dict[str, list[tuple[DecodeRank, wire.Message]]] = {}
        self._sent: list[str] = []
        self.expired = 0
        self.written: dict[str, int] = {"posted": 0, "completed": 0, "failed": 0, "bytes": 0}

    # What the writer asks.

    def take_sent(self) -> list[str]:
        """Requests whose blocks may be freed now; each is named once."""
        sent, self._sent = self._sent, []
        return sent

    @property
    def in_flight(self) -> bool:
        """True while a WRITE is in flight: poll often."""
        return any(request.active for request in self._requests.values())

    @property
    def expecting(self) -> bool:
        """True while something may happen soon: a request without registration, a registration, a connection."""
        return bool(self._requests or self._parked or self._outbox)

    # Events from the engine.

    def on_prefilling(self, event: Prefilling, now: float) -> None:
        """A request is in a batch for the first time."""
        if event.request_id in self._requests:
            return
        request = _Request(event.request_id, event.key, event.tokens)
        self._requests[event.request_id] = request
        same = self._by_key.setdefault(event.key, [])
        same.append(request)
        self._ledger.open("prefill", event.key, 0, "prefilling", request_id=event.request_id, tokens=event.tokens)
        if len(same) > 1:
            # Two live requests that a registration cannot tell apart: serving either may be the wrong one.
            for twin in same:
                twin.duplicate = True
                if twin.registration is not None and not twin.posted:
                    self._refuse(twin.registration, "duplicate", "two live requests have this id", now)
                    twin.registration = None
                if twin.ready_at is not None and not twin.posted:
                    self._finish(twin, "failed", "duplicate", "two live requests have this id", now)
        parked = self._parked.pop(event.key, None)
        if parked is not None:
            self._attach(parked[0], now)

    def on_ready(self, event: Ready, now: float) -> None:
        """A request's blocks are finished and held for us."""
        if event.request_id not in self._requests:
            self.on_prefilling(Prefilling(event.request_id, event.key, event.tokens), now)
        request = self._requests.get(event.request_id)
        if request is None:
            return
        request.ready_at = now
        request.block_ids = event.block_ids
        request.tokens = event.tokens
        request.token_hash = event.token_hash
        request.lease_until = now + self._lease_s
        self._ledger.advance("prefill", request.key, 0, "ready")
        if request.duplicate:
            self._finish(request, "failed", "duplicate", "two live requests have this id", now)
        elif request.unwanted:
            self._finish(request, "cancelled", "aborted", request.unwanted, now)
        else:
            self._try_post(request, now)

    def on_ended(self, event: Ended, now: float) -> None:
        """A request ended without KV: whoever waits for it is told."""
        request = self._requests.get(event.request_id)
        if request is None:
            self._bury_key(event.key, event.reason, event.detail, now)
            parked = self._parked.pop(event.key, None)
            if parked is not None:
                self._refuse(parked[0], event.reason, event.detail, now)
            return
        if request.ready_at is None:
            self._finish(request, "failed", event.reason, event.detail, now, held=False)

    # Events from decode.

    def on_message(self, message: wire.Message, now: float) -> str:
        """Take a message from decode. Returns what became of it, for counters."""
        if isinstance(message, wire.Register):
            return self._on_register(message, now)
        if isinstance(message, wire.RegisterZero):
            return self._on_zero(message, now)
        if isinstance(message, wire.Cancel):
            return self._on_cancel(message, now)
        if isinstance(message, wire.Heartbeat):
            extended = now + max(self._lease_s * 2 / 3, 1.0)
            for key in message.keys:
                for request in self._by_key.get(key, ()):
                    if request.lease_until is not None:
                        request.lease_until = max(request.lease_until, extended)
            return "accepted"
        return "misplaced"

    def _on_register(self, message: wire.Register, now: float) -> str:
        identity = _identity(message)
        tomb = self._tombs.get(identity)
        if tomb is not None:
            self._answer(message, self._last_word(message, tomb))
            return "repeated"
        known = [r.registration for r in self._by_key.get(message.key, ()) if r.registration is not None]
        parked = self._parked.get(message.key)
        if parked is not None:
            known.append(parked[0])
        for other in known:
            if _identity(other) == identity:
                # Every rank of the decode engine registers; the first one speaks for all.
                return "repeated"
        if known:
            self._refuse(message, "duplicate", "another registration has this id", now)
            return "refused"
        if message.key in self._by_key:
            self._attach(message, now)
            return "accepted"
        ended = self._ended_keys.get(message.key)
        if ended is not None:
            self._refuse(message, ended.reason, ended.detail, now)
            return "refused"
        if len(self._parked) >= PARKED_LIMIT:
            self._refuse(message, "overloaded", f"{PARKED_LIMIT} registrations wait already", now)
            return "refused"
        self._parked[message.key] = (message, now)
        # Early, so that the handshake is over when prefill is.
        self._transport.connect(message)
        return "accepted"

    def _attach(self, registration: wire.Register, now: float) -> None:
        requests = self._by_key[registration.key]
        if len(requests) > 1 or requests[0].duplicate:
            self._refuse(registration, "duplicate", "two live requests have this id", now)
            return
        request = requests[0]
        if request.registration is not None or request.posted:
            self._refuse(registration, "duplicate", "another registration has this id", now)
            return
        request.registration = registration
        request.told_alive_at = 0.0
        self._transport.connect(registration)
        if request.ready_at is not None:
            self._try_post(request, now)

    def _on_zero(self, message: wire.RegisterZero, now: float) -> str:
        requests = self._by_key.get(message.key, ())
        if not requests:
            return "unknown"
        for request in list(requests):
            if request.registration is not None or request.posted or request.duplicate:
                continue
            if request.ready_at is None:
                request.unwanted = "decode has the whole prompt"
            else:
                self._ledger.advance("prefill", request.key, 0, "matched", peer=message.engine_id)
                self._finish(request, "completed", "", "", now)
        return "accepted"

    def _on_cancel(self, message: wire.Cancel, now: float) -> str:
        identity = (message.key, message.engine_id, message.attempt)
        tomb = self._tombs.get(identity)
        if tomb is not None:
            self._answer(message, self._ack(message, tomb.outcome))
            return "repeated"
        parked = self._parked.get(message.key)
        if parked is not None and _identity(parked[0]) == identity:
            del self._parked[message.key]
        for request in list(self._by_key.get(message.key, ())):
            registration = request.registration
            if registration is None or _identity(registration) != identity:
                continue
            if request.posted:
                # The answer is sent when the WRITE is over.
                request.cancelled = True
                return "accepted"
            request.registration = None
            request.unwanted = "cancelled by decode"
            self._bury(identity, "cancelled", "aborted", "cancelled by decode", 0, now)
            self._answer(message, self._ack(message, "cancelled"))
            if request.ready_at is not None:
                self._finish(request, "cancelled", "aborted", "cancelled by decode", now)
            return "accepted"
        self._bury(identity, "cancelled", "aborted", "cancelled by decode", 0, now)
        self._answer(message, self._ack(message, "cancelled"))
        # A client that left both sides: its prefill request need not wait for a registration that will not come.
        for request in list(self._by_key.get(message.key, ())):
            if request.registration is None and not request.posted and not request.duplicate:
                request.unwanted = "cancelled by decode"
                if request.ready_at is not None:
                    self._finish(request, "cancelled", "aborted", "cancelled by decode", now)
        return "accepted"

    # Time.

    def tick(self, now: float) -> None:
        """Poll WRITEs, follow connections, and judge deadlines. Call after the messages that have arrived."""
        self._flush(now)
        for request in list(self._requests.values()):
            if request.active:
                self._poll(request, now)
            elif request.ready_at is not None and request.registration is not None and not request.posted:
                self._try_post(request, now)
            elif request.ready_at is not None and request.lease_until is not None and now > request.lease_until:
                self.expired += 1
                self._finish(request, "expired", "expired", f"no registration within {self._lease_s:.0f} s", now)
        self._tell_alive(now)
        for key, (registration, since) in list(self._parked.items()):
            if now - since > self._parked_s:
                del self._parked[key]
                self._refuse(registration, "aborted", "no prefill request with this id came", now)
        for tombs in (self._tombs, self._ended_keys):
            while tombs and (len(tombs) > TOMBSTONE_LIMIT or next(iter(tombs.values())).until < now):
                tombs.popitem(last=False)

    def postpone(self, seconds: float) -> None:
        """This process was stopped for so long: nobody's deadline may pass because of it."""
        for request in self._requests.values():
            if request.lease_until is not None:
                request.lease_until += seconds
        self._parked = {key: (reg, since + seconds) for key, (reg, since) in self._parked.items()}

    def engine_lost(self, engine_id: str, detail: str, now: float) -> None:
        """An engine cannot be connected to, or was replaced: nothing can be written to it any more."""
        for request in list(self._requests.values()):
            registration = request.registration
            if registration is not None and registration.engine_id == engine_id and not request.posted:
                self._refuse(registration, "handshake", detail, now)
                self._finish(request, "failed", "handshake", detail, now)
        for key, (registration, _) in list(self._parked.items()):
            if registration.engine_id == engine_id:
                del self._parked[key]
                self._bury(_identity(registration), "failed", "handshake", detail, 0, now)
        self._outbox.pop(engine_id, None)

    def busy_engines(self) -> set[str]:
        """Engines that a WRITE is in flight to."""
        return {r.registration.engine_id for r in self._requests.values() if r.active and r.registration is not None}

    def engine_of(self, handle: int) -> str:
        """The engine that a WRITE goes to; empty if it is none of ours."""
        for request in self._requests.values():
            if handle in request.active and request.registration is not None:
                return request.registration.engine_id
        return ""

    def shut_down(self, now: float) -> None:
        """Stop intake: every registration without a WRITE in flight is told; WRITEs in flight go on."""
        for key, (registration, _) in list(self._parked.items()):
            del self._parked[key]
            self._refuse(registration, "shutdown", "", now)
        for request in list(self._requests.values()):
            if not request.posted:
                self._finish(request, "failed", "shutdown", "this instance is stopping", now)

    # Inside.

    def _try_post(self, request: _Request, now: float) -> None:
        registration = request.registration
        if registration is None or request.posted:
            return
        refusal = ("", "")
        if registration.prompt_tokens != request.tokens:
            refusal = "mismatch", f"prefill has {request.tokens} prompt tokens, decode {registration.prompt_tokens}"
        elif registration.token_hash and request.token_hash and registration.token_hash != request.token_hash:
            refusal = "mismatch", "the two sides have different prompt tokens"
        if not refusal[0]:
            state = self._transport.connect(registration)
            if state == "connecting":
                return
            if state == "failed":
                refusal = "handshake", "the decode engine cannot be reached from here"
            elif why := self._transport.refusal(registration):
                refusal = "invalid", why
        if refusal[0]:
            self._refuse(registration, *refusal, now)
            self._finish(request, "failed", *refusal, now)
            return
        self._ledger.advance("prefill", request.key, 0, "matched", peer=registration.engine_id)
        try:
            posted = self._transport.post(request.request_id, request.block_ids, registration)
        except Exception as error:
            logger.exception("transfer %s: the WRITE could not be posted", request.key)
            detail = wire.clip(f"{type(error).__name__}: {error}")
            self._refuse(registration, "transfer", detail, now)
            self._finish(request, "failed", "transfer", detail, now)
            return
        # Only now: until here the pair stands, so that nothing is lost to an exception.
        request.posted = True
        request.lease_until = None
        request.active = list(posted.handles)
        request.failed = posted.failed
        request.descriptors, request.bytes = posted.descriptors, posted.bytes
        self.written["posted"] += posted.descriptors
        _, writers = self._transport.writers(registration.tp_size)
        self._ledger.note(
            "prefill",
            request.key,
            0,
            blocks=sum(map(len, registration.block_ids)),
            descriptors=posted.descriptors,
            bytes=posted.bytes,
            writers=writers,
        )
        self._ledger.advance("prefill", request.key, 0, "posted")
        self._transport.send(
            registration.engine_id, wire.Alive(key=request.key, attempt=registration.attempt, stage="posted")
        )
        self._poll(request, now)

    def _poll(self, request: _Request, now: float) -> None:
        still = []
        for handle in request.active:
            state = self._transport.poll(handle)
            if state == "active":
                still.append(handle)
            elif state == "failed":
                request.failed = request.failed or "NIXL could not complete the WRITE"
        request.active = still
        if still:
            return
        registration = request.registration
        assert registration is not None
        if request.failed:
            self.written["failed"] += request.descriptors
            self._finish(request, "failed", "transfer", request.failed, now)
        else:
            self.written["completed"] += request.descriptors
            self.written["bytes"] += request.bytes
            # The message attached to the WRITE has told decode already.
            self._finish(request, "completed", "", "", now)

    def _finish(
        self, request: _Request, outcome: Outcome, reason: str, detail: str, now: float, *, held: bool = True
    ) -> None:
        """End a request: its blocks are given back, and a registration that gets nothing is told."""
        assert not request.active
        self._requests.pop(request.request_id, None)
        same = self._by_key.get(request.key, [])
        if request in same:
            same.remove(request)
        if not same:
            self._by_key.pop(request.key, None)
        self._ledger.advance("prefill", request.key, 0, outcome, reason=detail or reason)
        if held and request.ready_at is not None:
            self._sent.append(request.request_id)
        registration = request.registration
        if registration is not None and _identity(registration) not in self._tombs:
            if outcome == "completed":
                self._bury(_identity(registration), "completed", "", "", request.bytes, now)
            else:
                self._refuse(registration, reason or "internal", detail, now)
        if registration is not None and request.cancelled:
            tomb = self._tombs[_identity(registration)]
            self._answer(registration, self._ack(registration, tomb.outcome))
        if outcome != "completed" and registration is None and not same:
            self._bury_key(request.key, reason or "aborted", detail, now)

    def _refuse(self, registration: wire.Register, reason: str, detail: str, now: float) -> None:
        identity = _identity(registration)
        if identity in self._tombs:
            return
        self._bury(identity, "failed", reason, detail, 0, now)
        self._answer(registration, self._last_word(registration, self._tombs[identity]))

    def _last_word(self, registration: wire.Register, tomb: _Tomb) -> wire.Message:
        rank, writers = self._transport.writers(registration.tp_size)
        head = {"key": registration.key, "attempt": registration.attempt, "writer": rank, "writers": writers}
        if tomb.outcome == "completed":
            return wire.Done(**head, bytes=tomb.bytes)
        if tomb.outcome == "cancelled":
            return wire.CancelAck(**head, state="cancelled")
        return wire.Failed(**head, reason=tomb.reason or "internal", detail=wire.clip(tomb.detail))

    def _ack(self, registration: DecodeRank, outcome: str) -> wire.Message:
        rank, writers = self._transport.writers(registration.tp_size)
        return wire.CancelAck(
            key=registration.key,
            attempt=registration.attempt,
            writer=rank,
            writers=writers,
            state="completed" if outcome == "completed" else "failed" if outcome == "failed" else "cancelled",
        )

    def _answer(self, registration: DecodeRank, message: wire.Message) -> None:
        """Send, or keep until the engine is connected; an engine that cannot be reached has a deadline of its own."""
        state = self._transport.connect(registration)
        if state == "ready":
            self._transport.send(registration.engine_id, message)
        elif state == "connecting":
            waiting = self._outbox.setdefault(registration.engine_id, [])
            if len(waiting) < PARKED_LIMIT:
                waiting.append((registration, message))

    def _flush(self, now: float) -> None:
        for engine_id, waiting in list(self._outbox.items()):
            state = self._transport.connect(waiting[0][0])
            if state == "connecting":
                continue
            del self._outbox[engine_id]
            if state == "ready":
                for _, message in waiting:
                    self._transport.send(engine_id, message)
        del now

    def _tell_alive(self, now: float) -> None:
        for request in self._requests.values():
            registration = request.registration
            if registration is None or request.posted or now - request.told_alive_at < ALIVE_S:
                continue
            if self._transport.connect(registration) == "ready":
                request.told_alive_at = now
                stage: Literal["prefilling", "ready"] = "prefilling" if request.ready_at is None else "ready"
                self._transport.send(
                    registration.engine_id, wire.Alive(key=request.key, attempt=registration.attempt, stage=stage)
                )

    def _bury(
        self,
        identity: Identity,
        outcome: Literal["cancelled", "completed", "failed"],
        reason: str,
        detail: str,
        size: int,
        now: float,
    ) -> None:
        self._tombs[identity] = _Tomb(outcome, reason, detail, size, now + TOMBSTONE_S)

    def _bury_key(self, key: str, reason: str, detail: str, now: float) -> None:
        self._ended_keys.pop(key, None)
        self._ended_keys[key] = _Tomb("failed", reason, detail, 0, now + TOMBSTONE_S)


def _identity(registration: wire.Register) -> Identity:
    return registration.key, registration.engine_id, registration.attempt
