"""The prefill side of transfers as a state machine: events in, transport calls and results out. No thread, no vLLM.

What holds whatever happens (docs/protocol.md): a WRITE is posted only for a request whose blocks are held here and
whose registration stands; blocks are given back only when no WRITE of the request is in flight; every registration
that will get no KV is told so.

A method that raises has met a bug, here or in the transport: the request it was about is failed or left to its
deadline, every other one has been served, and the caller counts the exception.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from . import wire
from .ledger import Ledger, Outcome
from .rounds import Round
from .step import BlockIds, Ended, Prefilling, Ready

logger = logging.getLogger("vllm.pdctl_connector.prefill_side")

PARKED_LIMIT: Final = 4096
"""Registrations that wait for their prefill request; as many messages of REG_ZERO; answers that wait, per engine."""
ENGINES_LIMIT: Final = 256
"""Engines that answers wait for."""
TOMBSTONE_LIMIT: Final = 8192
TOMBSTONE_S: Final = 600.0
ALIVE_S: Final = 2.0
ANSWER_S: Final = 30.0
"""How long an answer waits for a connection; about when decode gives up by itself."""
RENEWAL_S: Final = 6.0
"""A heartbeat renews a lease for so long at least: three heartbeats, so that one may be lost."""
SWEEP_S: Final = 0.05
"""Leases and other slow deadlines are looked at so often, since thousands of requests may wait."""

PeerState = Literal["ready", "connecting", "failed"]
HandleState = Literal["active", "done", "failed"]
DecodeRank = wire.Register | wire.Cancel
"""A message that says where its decode engine is."""
Identity = tuple[str, str, int]
"""Key, decode engine, attempt."""
_End = Literal["cancelled", "completed", "failed"]

_DUPLICATE: Final = "two live requests have this id"
_CANCELLED: Final = "cancelled by decode"
_STOPPING: Final = "this instance is stopping"


@dataclass(frozen=True)
class Posted:
    """WRITEs that were handed to NIXL.

    Attributes:
        handles: what is in flight.
        descriptors: of all handles together.
        bytes: of all handles together.
        failed: why some WRITEs could not be posted, if so; those of ``handles`` are in flight all the same.
    """

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


@dataclass(frozen=True)
class _Verdict:
    """How a request will end whatever it computes, since nobody wants its blocks."""

    outcome: Outcome
    reason: str
    detail: str
    peer: str


@dataclass
class _Request:
    """A request that this engine prefills for another.

    Attributes:
        number: tells it from other live requests of the same key in the ledger.
        lease_until: when its blocks are given back if no registration has come; set once they are finished.
        connect_until: when they are given back if there is a registration, but a rank or the connection is missing.
        ranks: decode ranks that have registered.
        retired: set when nobody wants it any more; it no longer stands for its key, and ends as soon as it can.
        asked_again: decode registered again while the WRITE was in flight; it may have missed what came with the WRITE.
        cancelled: decode asked while the WRITE was in flight.
    """

    request_id: str
    key: str
    number: int
    tokens: int
    ready_at: float | None = None
    block_ids: BlockIds = ()
    token_hash: bytes = b""
    lease_until: float = math.inf
    connect_until: float = math.inf
    registration: wire.Register | None = None
    ranks: set[int] = field(default_factory=set)
    matched: bool = False
    posted: bool = False
    active: list[int] = field(default_factory=list)
    failed: str = ""
    duplicate: bool = False
    retired: _Verdict | None = None
    told_alive_at: float = -math.inf
    asked_again: bool = False
    cancelled: bool = False
    descriptors: int = 0
    bytes: int = 0


@dataclass
class _Parked:
    """A registration whose prefill request is not known yet, and the decode ranks that have sent it."""

    registration: wire.Register
    ranks: set[int]
    since: float


@dataclass(frozen=True)
class _Tomb:
    outcome: _End
    reason: str
    detail: str
    bytes: int
    until: float
    fingerprint: int | None


@dataclass(frozen=True)
class _Answer:
    to: DecodeRank
    message: wire.Message
    until: float


class PrefillSide:
    """All transfers out of this rank.

    Args:
        transport: NIXL.
        ledger: told of every stage.
        lease_s: how long finished blocks wait for a registration.
        parked_s: how long a registration waits for its prefill request, and finished blocks for a connection.
        tp_size: tensor-parallel ranks of this engine. If the decode engine has more, this rank writes to several of
            its ranks, and waits until all of these have registered: one that has not may use the blocks for something
            else. None takes the first registration for all.
    """

    def __init__(
        self,
        transport: Transport,
        ledger: Ledger,
        *,
        lease_s: float,
        parked_s: float,
        tp_size: int | None = None,
    ) -> None:
        self._transport = transport
        self._ledger = ledger
        self._lease_s = lease_s
        self._parked_s = parked_s
        self._tp_size = tp_size
        self._requests: dict[str, _Request] = {}
        # Those that a message with this key may mean; all of them in `_requests`.
        self._by_key: dict[str, list[_Request]] = {}
        self._numbers: dict[str, set[int]] = {}
        # Matched and not posted yet; posted and not over yet. So that a round costs nothing for the others.
        self._unposted: dict[str, _Request] = {}
        self._posted: dict[str, _Request] = {}
        self._parked: dict[str, _Parked] = {}
        self._parked_zero: dict[str, tuple[wire.RegisterZero, float]] = {}
        self._ended_keys: OrderedDict[str, _Tomb] = OrderedDict()
        self._tombs: OrderedDict[Identity, _Tomb] = OrderedDict()
        self._outbox: dict[str, deque[_Answer]] = {}
        self._sent: list[str] = []
        self._swept_at = -math.inf
        self._stopping = False
        self._logged: set[str] = set()
        # When the engine's main thread last gave a sign of life: set by the caller before `tick`.
        self.engine_at = math.inf
        self.expired = 0
        self.written: dict[str, int] = {"posted": 0, "completed": 0, "failed": 0, "bytes": 0}

    # What the writer asks.

    def take_sent(self) -> list[str]:
        """Requests whose blocks may be freed now; each is named once."""
        sent, self._sent = self._sent, []
        return sent

    @property
    def in_flight(self) -> bool:
        """True while a WRITE is in flight: poll often. May be asked from any thread."""
        return bool(self._posted)

    @property
    def expecting(self) -> bool:
        """True while something may happen soon: a request without registration, a registration, a connection."""
        return bool(self._requests or self._parked or self._outbox)

    # Events from the engine.

    def on_prefilling(self, event: Prefilling, now: float) -> None:
        """A request is queued here, or in a batch."""
        if event.request_id in self._requests:
            return
        numbers = self._numbers.setdefault(event.key, set())
        number = next(candidate for candidate in range(len(numbers) + 1) if candidate not in numbers)
        numbers.add(number)
        request = _Request(event.request_id, event.key, number, event.tokens)
        self._requests[event.request_id] = request
        same = self._by_key.setdefault(event.key, [])
        same.append(request)
        # What ended before says nothing about a registration that comes from now on.
        self._ended_keys.pop(event.key, None)
        self._ledger.open("prefill", event.key, number, "prefilling", request_id=event.request_id, tokens=event.tokens)
        if self._stopping:
            self._retire(request, _Verdict("failed", "shutdown", _STOPPING, ""))
            return
        if len(same) > 1:
            # Two live requests that a registration cannot tell apart: serving either may be the wrong one.
            self._all_duplicates(list(same), now)
            return
        zero = self._parked_zero.pop(event.key, None)
        parked = self._parked.pop(event.key, None)
        if parked is not None:
            self._attach(parked.registration, parked.ranks, now)
        elif zero is not None:
            self._bury_zero(zero[0], now)
            self._retire(request, _unneeded(zero[0].engine_id))

    def on_ready(self, event: Ready, now: float) -> None:
        """A request's blocks are finished and held for us."""
        if event.request_id not in self._requests:
            self.on_prefilling(Prefilling(event.request_id, event.key, event.tokens), now)
        request = self._requests[event.request_id]
        if request.ready_at is not None:
            return
        request.ready_at = now
        request.block_ids = event.block_ids
        request.tokens = event.tokens
        request.token_hash = event.token_hash
        request.lease_until = now + self._lease_s
        request.connect_until = now + self._parked_s
        self._advance(request, "ready")
        if request.retired is not None:
            self._end_retired(request, request.retired, now)
        elif request.duplicate:
            self._finish(request, "failed", "duplicate", _DUPLICATE, now)
        else:
            self._try_post(request, now)

    def on_ended(self, event: Ended, now: float) -> None:
        """A request ended without KV: whoever waits for it is told."""
        request = self._requests.get(event.request_id)
        if request is not None:
            if request.ready_at is None:
                self._finish(request, "failed", event.reason, event.detail, now)
            return
        if event.key in self._by_key:
            # Another request has this key, and is alive.
            return
        self._bury_key(event.key, event.reason, event.detail, now)
        self._parked_zero.pop(event.key, None)
        parked = self._parked.pop(event.key, None)
        if parked is not None:
            self._refuse(parked.registration, event.reason, event.detail, now)

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
            extended = now + max(self._lease_s * 2 / 3, RENEWAL_S)
            for key in message.keys:
                for request in self._by_key.get(key, ()):
                    request.lease_until = max(request.lease_until, extended)
            return "accepted"
        return "misplaced"

    def _on_register(self, message: wire.Register, now: float) -> str:
        tomb = self._tombs.get(_identity(message))
        if tomb is not None:
            self._answer(message, self._last_word(message, tomb), now)
            return "repeated"
        # Every rank of the decode engine registers.
        for request in self._by_key.get(message.key, ()):
            if request.registration is not None and _identity(request.registration) == _identity(message):
                if _fingerprint(request.registration) != _fingerprint(message):
                    # Decode never uses an attempt twice: this is no message of its.
                    return "refused"
                if message.tp_rank in request.ranks:
                    request.asked_again = request.asked_again or request.posted
                    return "repeated"
                request.ranks.add(message.tp_rank)
                self._try_post(request, now)
                return "accepted"
        parked = self._parked.get(message.key)
        if parked is not None and _identity(parked.registration) == _identity(message):
            if _fingerprint(parked.registration) != _fingerprint(message):
                return "refused"
            if message.tp_rank in parked.ranks:
                return "repeated"
            parked.ranks.add(message.tp_rank)
            return "accepted"
        if self._stopping:
            self._refuse(message, "shutdown", _STOPPING, now)
            return "refused"
        if parked is not None:
            self._refuse(message, "duplicate", "another registration has this id", now)
            return "refused"
        if message.key in self._by_key:
            return self._attach(message, {message.tp_rank}, now)
        ended = self._ended_keys.get(message.key)
        if ended is not None:
            self._refuse(message, ended.reason, ended.detail, now)
            return "refused"
        if len(self._parked) >= PARKED_LIMIT:
            self._refuse(message, "overloaded", f"{PARKED_LIMIT} registrations wait already", now)
            return "refused"
        self._parked[message.key] = _Parked(message, {message.tp_rank}, now)
        # Early, so that the handshake is over when prefill is.
        self._transport.connect(message)
        return "accepted"

    def _attach(self, registration: wire.Register, ranks: set[int], now: float) -> str:
        requests = self._by_key[registration.key]
        request = requests[0]
        if len(requests) > 1 or request.duplicate:
            self._refuse(registration, "duplicate", _DUPLICATE, now)
            return "refused"
        if request.registration is not None:
            self._refuse(registration, "duplicate", "another registration has this id", now)
            return "refused"
        request.registration = registration
        request.ranks = set(ranks)
        request.connect_until = now + self._parked_s
        if request.ready_at is not None:
            self._try_post(request, now)
        else:
            self._transport.connect(registration)
        return "accepted"

    def _on_zero(self, message: wire.RegisterZero, now: float) -> str:
        if _identity(message) in self._tombs:
            return "repeated"
        requests = self._by_key.get(message.key, ())
        if not requests:
            # The legs race, and decode has nothing to compute: usually it is first.
            if message.key in self._ended_keys or message.key in self._parked or self._stopping:
                return "unknown"
            if message.key not in self._parked_zero and len(self._parked_zero) >= PARKED_LIMIT:
                return "refused"
            self._parked_zero.setdefault(message.key, (message, now))
            return "accepted"
        request = requests[0]
        if len(requests) > 1 or request.duplicate or request.registration is not None:
            return "refused"
        self._bury_zero(message, now)
        self._drop(request, _unneeded(message.engine_id), now)
        return "accepted"

    def _on_cancel(self, message: wire.Cancel, now: float) -> str:
        identity = _identity(message)
        tomb = self._tombs.get(identity)
        if tomb is not None:
            self._answer(message, self._ack(message, tomb.outcome), now)
            return "repeated"
        for request in self._by_key.get(message.key, ()):
            if request.registration is not None and _identity(request.registration) == identity and request.posted:
                # The answer is sent when the WRITE is over.
                request.cancelled = True
                return "accepted"
        parked = self._parked.get(message.key)
        if parked is not None and _identity(parked.registration) == identity:
            del self._parked[message.key]
        self._bury(identity, "cancelled", "aborted", _CANCELLED, 0, now, None)
        for request in list(self._by_key.get(message.key, ())):
            registration = request.registration
            # Without a registration: its client left both sides before decode had blocks. It need not wait.
            if registration is None or _identity(registration) == identity:
                request.registration = None
                if not request.duplicate:
                    self._drop(request, _Verdict("cancelled", "aborted", _CANCELLED, message.engine_id), now)
        self._answer(message, self._ack(message, "cancelled"), now)
        return "accepted"

    # Time.

    def tick(self, now: float) -> None:
        """Poll WRITEs, follow connections, and judge deadlines. Call after the messages that have arrived."""
        with Round() as served:
            served.each(self._posted.values(), lambda request: self._poll(request, now))
            served.each(self._unposted.values(), lambda request: self._try_post(request, now))
            served.each(self._outbox, lambda engine_id: self._flush(engine_id, now))
            if now - self._swept_at < SWEEP_S:
                return
            self._swept_at = now
            served.each(self._requests.values(), lambda request: self._judge(request, now))
            served.each(self._parked, lambda key: self._judge_parked(key, now))
            for key in [key for key, (_, since) in self._parked_zero.items() if now - since > self._parked_s]:
                del self._parked_zero[key]
            _trim(self._tombs, now)
            _trim(self._ended_keys, now)

    def postpone(self, seconds: float) -> None:
        """This process was stopped for so long: nobody's deadline may pass because of it. Call before the messages."""
        for request in self._requests.values():
            request.lease_until += seconds
            request.connect_until += seconds
        for parked in self._parked.values():
            parked.since += seconds
        self._parked_zero = {key: (message, since + seconds) for key, (message, since) in self._parked_zero.items()}
        for waiting in self._outbox.values():
            moved = [_Answer(answer.to, answer.message, answer.until + seconds) for answer in waiting]
            waiting.clear()
            waiting.extend(moved)

    def engine_lost(self, engine_id: str, detail: str, now: float, *, gone: bool = False) -> None:
        """An engine cannot be connected to, or was replaced: nothing can be written to it any more.

        Args:
            engine_id: which.
            detail: why, for people.
            now: monotonic seconds.
            gone: it does not exist any more, so there is nobody to tell.
        """
        for request in list(self._requests.values()):
            registration = request.registration
            if registration is None or registration.engine_id != engine_id or request.posted:
                continue
            if request.ready_at is not None:
                self._finish(request, "failed", "handshake", detail, now, tell=not gone)
            else:
                self._retire(request, _Verdict("failed", "handshake", detail, engine_id))
                self._dismiss(request, "handshake", detail, now, tell=not gone)
        for key, parked in list(self._parked.items()):
            if parked.registration.engine_id == engine_id:
                del self._parked[key]
                self._refuse(parked.registration, "handshake", detail, now, tell=not gone)
        if gone:
            self._outbox.pop(engine_id, None)

    def busy_engines(self) -> set[str]:
        """Engines that a WRITE is in flight to."""
        return {request.registration.engine_id for request in self._posted.values() if request.registration is not None}

    def engine_of(self, handle: int) -> str:
        """The engine that a WRITE goes to; empty if it is none of ours."""
        for request in self._posted.values():
            if handle in request.active and request.registration is not None:
                return request.registration.engine_id
        return ""

    def shut_down(self, now: float) -> None:
        """Stop intake: every registration without a WRITE in flight is told; WRITEs in flight go on."""
        self._stopping = True
        for key, parked in list(self._parked.items()):
            del self._parked[key]
            self._refuse(parked.registration, "shutdown", _STOPPING, now)
        self._parked_zero.clear()
        for request in list(self._requests.values()):
            if request.posted:
                continue
            if request.ready_at is not None:
                self._finish(request, "failed", "shutdown", _STOPPING, now)
            elif request.retired is None:
                self._retire(request, _Verdict("failed", "shutdown", _STOPPING, ""))
                self._dismiss(request, "shutdown", _STOPPING, now)

    # Inside: a request on its way.

    def _all_duplicates(self, requests: list[_Request], now: float) -> None:
        for request in requests:
            request.duplicate = True
            if request.posted:
                continue
            if request.ready_at is not None:
                self._finish(request, "failed", "duplicate", _DUPLICATE, now)
            else:
                self._dismiss(request, "duplicate", _DUPLICATE, now)

    def _try_post(self, request: _Request, now: float) -> None:
        """Post the WRITE as soon as there are blocks, a registration and a connection."""
        if request.registration is None or request.ready_at is None or request.posted:
            return
        if not self._complete(request.registration, request.ranks):
            return
        self._unposted[request.request_id] = request
        try:
            self._post(request, request.registration, now)
        except Exception as error:
            # Once posted, a request is followed to the end of its WRITE, whatever else went wrong.
            if not request.posted and request.request_id in self._requests:
                self._finish(request, "failed", "internal", f"{type(error).__name__}: {error}", now)
            raise

    def _post(self, request: _Request, registration: wire.Register, now: float) -> None:
        self._match(request, registration.engine_id)
        refusal = ("", "")
        if registration.prompt_tokens != request.tokens:
            refusal = "mismatch", f"prefill has {request.tokens} prompt tokens, decode {registration.prompt_tokens}"
        elif registration.token_hash and request.token_hash and registration.token_hash != request.token_hash:
            refusal = "mismatch", "the two sides have different prompt tokens"
        else:
            state = self._transport.connect(registration)
            if state == "connecting":
                return
            if state == "failed":
                refusal = "handshake", "the decode engine cannot be reached from here"
            elif why := self._transport.refusal(registration):
                refusal = "invalid", why
        if refusal[0]:
            self._finish(request, "failed", *refusal, now)
            return
        _, writers = self._transport.writers(registration.tp_size)
        try:
            posted = self._transport.post(request.request_id, request.block_ids, registration)
        except Exception as error:
            self._log_once(f"transfer {request.key}: the WRITE could not be posted", error)
            self._finish(request, "failed", "transfer", f"{type(error).__name__}: {error}", now)
            return
        # Only now: until here the pair stands, so that nothing is lost to an exception.
        request.posted = True
        request.active = list(posted.handles)
        request.failed = posted.failed
        request.descriptors, request.bytes = posted.descriptors, posted.bytes
        del self._unposted[request.request_id]
        self._posted[request.request_id] = request
        self.written["posted"] += posted.descriptors
        self._ledger.note(
            "prefill",
            request.key,
            request.number,
            blocks=sum(map(len, registration.block_ids)),
            descriptors=posted.descriptors,
            bytes=posted.bytes,
            writers=writers,
        )
        self._advance(request, "posted")
        # Without a handle there is no WRITE for DONE to travel with.
        request.asked_again = not posted.handles
        self._transport.send(
            registration.engine_id, wire.Alive(key=request.key, attempt=registration.attempt, stage="posted")
        )
        self._poll(request, now)

    def _poll(self, request: _Request, now: float) -> None:
        for handle in list(request.active):
            state = self._transport.poll(handle)
            if state == "active":
                continue
            request.active.remove(handle)
            if state == "failed":
                request.failed = request.failed or "NIXL could not complete the WRITE"
        if request.active:
            return
        if request.failed:
            self.written["failed"] += request.descriptors
            self._finish(request, "failed", "transfer", request.failed, now)
        else:
            self.written["completed"] += request.descriptors
            self.written["bytes"] += request.bytes
            self._finish(request, "completed", "", "", now)

    def _drop(self, request: _Request, verdict: _Verdict, now: float) -> None:
        """Nobody wants the request any more: end it now, or when its blocks are finished."""
        if request.ready_at is None:
            self._retire(request, verdict)
        else:
            self._end_retired(request, verdict, now)

    def _end_retired(self, request: _Request, verdict: _Verdict, now: float) -> None:
        request.retired = verdict
        if verdict.outcome == "completed":
            self._match(request, verdict.peer)
        self._finish(request, verdict.outcome, verdict.reason, verdict.detail, now)

    def _retire(self, request: _Request, verdict: _Verdict) -> None:
        request.retired = verdict
        self._leave_key(request)

    def _dismiss(self, request: _Request, reason: str, detail: str, now: float, *, tell: bool = True) -> None:
        """Part a request from its registration, which gets nothing."""
        registration, request.registration = request.registration, None
        if registration is not None:
            self._refuse(registration, reason, detail, now, tell=tell)

    def _leave_key(self, request: _Request) -> None:
        same = self._by_key.get(request.key, [])
        if request in same:
            same.remove(request)
            if not same:
                del self._by_key[request.key]

    def _finish(
        self, request: _Request, outcome: Outcome, reason: str, detail: str, now: float, *, tell: bool = True
    ) -> None:
        """End a request: its blocks are given back, and a registration that gets nothing is told."""
        assert not request.active
        for table in (self._requests, self._unposted, self._posted):
            table.pop(request.request_id, None)
        self._leave_key(request)
        numbers = self._numbers[request.key]
        numbers.discard(request.number)
        if not numbers:
            del self._numbers[request.key]
        self._advance(request, outcome, reason=detail or reason)
        if request.ready_at is not None:
            self._sent.append(request.request_id)
        registration = request.registration
        if registration is None:
            if outcome != "completed" and request.retired is None and request.key not in self._by_key:
                # A registration may still come. Who retired the request has been told, or told us.
                self._bury_key(request.key, reason, detail, now)
            return
        end: _End = "completed" if outcome == "completed" else "failed"
        tomb = self._bury(_identity(registration), end, reason, detail, request.bytes, now, _fingerprint(registration))
        # The message that travelled with the WRITE has told decode of a completion already.
        if tell and (end == "failed" or request.asked_again):
            self._answer(registration, self._last_word(registration, tomb), now)
        if tell and request.cancelled:
            self._answer(registration, self._ack(registration, end), now)

    def _match(self, request: _Request, peer: str) -> None:
        if not request.matched:
            request.matched = True
            self._ledger.advance("prefill", request.key, request.number, "matched", peer=peer)

    def _advance(self, request: _Request, stage: Literal["ready", "posted"] | Outcome, reason: str = "") -> None:
        self._ledger.advance("prefill", request.key, request.number, stage, reason=reason)

    # Inside: deadlines.

    def _judge(self, request: _Request, now: float) -> None:
        registration = request.registration
        if request.posted:
            return
        if registration is None:
            if now > request.lease_until:
                self.expired += 1
                self._finish(request, "expired", "expired", f"no registration within {self._lease_s:.0f} s", now)
            return
        if request.ready_at is not None and now > request.connect_until:
            missing = "no connection to the decode engine"
            if not self._complete(registration, request.ranks):
                missing = f"only ranks {sorted(request.ranks)} of the decode engine have registered"
            self._finish(request, "failed", "handshake", f"{missing} within {self._parked_s:.0f} s", now)
        elif (
            now - request.told_alive_at >= ALIVE_S
            # It is not getting on while a rank is missing: the others will have their deadline.
            and self._complete(registration, request.ranks)
            # Nor while this engine hangs in a step: its writer lives on, and would keep decode waiting for ever.
            and (request.ready_at is not None or now - self.engine_at <= self._parked_s / 2)
            and self._transport.connect(registration) == "ready"
        ):
            request.told_alive_at = now
            stage: Literal["prefilling", "ready"] = "prefilling" if request.ready_at is None else "ready"
            self._transport.send(
                registration.engine_id, wire.Alive(key=request.key, attempt=registration.attempt, stage=stage)
            )

    def _judge_parked(self, key: str, now: float) -> None:
        parked = self._parked[key]
        if now - parked.since > self._parked_s:
            del self._parked[key]
            self._refuse(parked.registration, "aborted", "no prefill request with this id came", now)

    def _complete(self, registration: wire.Register, ranks: set[int]) -> bool:
        wanted = 1 if self._tp_size is None else max(1, registration.tp_size // self._tp_size)
        return len(ranks) >= wanted

    # Inside: answers.

    def _refuse(self, registration: wire.Register, reason: str, detail: str, now: float, *, tell: bool = True) -> None:
        fingerprint = _fingerprint(registration)
        tomb = self._bury(_identity(registration), "failed", reason, detail, 0, now, fingerprint)
        if tell:
            self._answer(registration, self._last_word(registration, tomb), now)

    def _last_word(self, registration: wire.Register, tomb: _Tomb) -> wire.Message:
        key, attempt = registration.key, registration.attempt
        rank, writers = self._transport.writers(registration.tp_size)
        if tomb.outcome == "cancelled":
            return wire.CancelAck(key=key, attempt=attempt, writer=rank, writers=writers, state="cancelled")
        if tomb.outcome == "completed":
            if tomb.fingerprint == _fingerprint(registration):
                return wire.Done(key=key, attempt=attempt, writer=rank, writers=writers, bytes=tomb.bytes)
            # The same name for other blocks, which nothing was written to.
            tomb = _Tomb("failed", "duplicate", "another registration had this id", 0, tomb.until, None)
        reason = tomb.reason if tomb.reason in wire.FAIL_REASONS else "internal"
        return wire.Failed(
            key=key, attempt=attempt, writer=rank, writers=writers, reason=reason, detail=wire.clip(tomb.detail)
        )

    def _ack(self, to: DecodeRank, outcome: _End) -> wire.Message:
        rank, writers = self._transport.writers(to.tp_size)
        return wire.CancelAck(key=to.key, attempt=to.attempt, writer=rank, writers=writers, state=outcome)

    def _answer(self, to: DecodeRank, message: wire.Message, now: float) -> None:
        """Send, or keep for a while until the engine is connected."""
        waiting = self._outbox.get(to.engine_id)
        if waiting is None and self._transport.connect(to) == "ready" and self._transport.send(to.engine_id, message):
            return
        if waiting is None:
            if len(self._outbox) >= ENGINES_LIMIT:
                return
            waiting = self._outbox[to.engine_id] = deque()
        # What is lost here decode asks for again, or runs into its deadline.
        if len(waiting) < PARKED_LIMIT:
            waiting.append(_Answer(to, message, now + ANSWER_S))

    def _flush(self, engine_id: str, now: float) -> None:
        waiting = self._outbox.get(engine_id)
        while waiting:
            answer = waiting[0]
            if now <= answer.until and not (
                self._transport.connect(answer.to) == "ready" and self._transport.send(engine_id, answer.message)
            ):
                return
            waiting.popleft()
        self._outbox.pop(engine_id, None)

    # Inside: memory of what is over.

    def _bury(
        self,
        identity: Identity,
        outcome: _End,
        reason: str,
        detail: str,
        size: int,
        now: float,
        fingerprint: int | None,
    ) -> _Tomb:
        tomb = _Tomb(outcome, reason, detail, size, now + TOMBSTONE_S, fingerprint)
        self._tombs.pop(identity, None)
        self._tombs[identity] = tomb
        return tomb

    def _bury_zero(self, message: wire.RegisterZero, now: float) -> None:
        self._bury(_identity(message), "failed", "duplicate", "decode had the whole prompt", 0, now, None)

    def _bury_key(self, key: str, reason: str, detail: str, now: float) -> None:
        self._ended_keys.pop(key, None)
        self._ended_keys[key] = _Tomb("failed", reason, detail, 0, now + TOMBSTONE_S, None)

    def _log_once(self, what: str, error: Exception) -> None:
        """An error, with its traceback the first time that this kind of exception is met."""
        kind = type(error).__name__
        logger.error("%s: %s: %s", what, kind, error, exc_info=None if kind in self._logged else error)
        self._logged.add(kind)


def _unneeded(engine_id: str) -> _Verdict:
    return _Verdict("completed", "", "decode has the whole prompt", engine_id)


def _identity(message: wire.Register | wire.RegisterZero | wire.Cancel) -> Identity:
    return message.key, message.engine_id, message.attempt


def _fingerprint(registration: wire.Register) -> int:
    """Equal for the same registration from any rank of an engine."""
    return hash(
        (
            registration.request_id,
            registration.prompt_tokens,
            registration.token_hash,
            tuple(registration.first_block),
            tuple(map(tuple, registration.block_ids)),
        )
    )


def _trim(tombs: OrderedDict[str, _Tomb] | OrderedDict[Identity, _Tomb], now: float) -> None:
    while tombs and (len(tombs) > TOMBSTONE_LIMIT or next(iter(tombs.values())).until < now):
        tombs.popitem(last=False)
