"""The decode side of transfers as a state machine: events in, transport calls and results out. No thread, no vLLM.

A request is *settled* when the engine may go on with it (KV received, or failed), and *fenced* when it is certain that
no WRITE can touch its blocks any more. Usually both at once. When prefill does not answer, a request is settled first
and its blocks stay out of use until it is fenced.

A method that raises has met a bug, here or in the transport: the request it was about is failed or left to its
deadline, every other one has been served, and the caller counts the exception.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from . import wire
from .ledger import Ledger, Outcome
from .rounds import Round
from .step import GivenUp, Peer, Receive

logger = logging.getLogger("vllm.pdctl_connector.decode_side")

HEARTBEAT_S: Final = 2.0
CANCEL_AGAIN_S: Final = 2.0
GONE_CHECK_S: Final = 2.0
REGISTER_AGAIN_S: Final = 5.0
"""A registration that nothing is heard of for so long is sent again: it, or the answer, may be lost."""
NOTICES_LIMIT: Final = 4096
"""Messages without an answer that wait for a connection. Beyond, prefill's lease does what they would have."""
HEARTBEAT_KEYS: Final = wire.MAX_HEARTBEAT_KEYS // 2
"""Keys in one heartbeat: as long as they may be, they fit into a message."""

_UNFIT: Final = "this transfer cannot be registered"

PeerState = Literal["ready", "connecting", "failed"]


class Transport(Protocol):
    """What the decode side needs of NIXL. Nothing here waits."""

    def reach(self, peer: Peer) -> PeerState:
        """State of the connection for messages to a prefill engine; begins one if there is none."""

    def why_failed(self, peer: Peer) -> str:
        """Why the connection failed, for people."""

    def tell(self, peer: Peer, message: wire.Message) -> bool:
        """Send to the ranks of a connected engine; False if it is lost.

        Raises:
            wire.WireError: the message is outside its limits; it was sent to nobody.
        """

    def gone(self, peer: Peer) -> bool:
        """True when it is certain that the engine's process does not exist any more. Begins looking; does not wait."""


@dataclass(frozen=True)
class Settled:
    """The engine may go on with a request.

    Attributes:
        request_id: vLLM's id here.
        ok: its KV is here.
        fenced: its blocks may be reused.
        reason: why not, for people.
        bytes: what was received.
        took_s: from the registration to now.
    """

    request_id: str
    ok: bool
    fenced: bool
    reason: str = ""
    bytes: int = 0
    took_s: float = 0.0


@dataclass
class _Record:
    """A request with blocks that a WRITE may touch, or may be asked to.

    Attributes:
        want: what the engine asked for.
        begun: when.
        progress_at: when something was last heard that is progress.
        told_at: when the registration was last sent.
        registered: whether it was ever sent; from then on only a fence frees the blocks.
        settled: whether the engine was told to go on.
        given_up: whether the client left.
        cancel_told_at: when prefill was last asked to cancel.
        spoken: prefill rank -> how it ended.
        writers: how many prefill ranks there are to hear of, as they say.
        bytes: written by those that are done.
        reason: why one of them failed.
    """

    want: Receive
    begun: float
    progress_at: float
    told_at: float = -math.inf
    registered: bool = False
    settled: bool = False
    given_up: bool = False
    cancel_told_at: float = -math.inf
    spoken: dict[int, str] = field(default_factory=dict)
    writers: int | None = None
    bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class _Notice:
    peer: Peer
    message: wire.Message
    until: float


class DecodeSide:
    """All transfers into this rank.

    Args:
        transport: NIXL.
        ledger: told of every stage.
        engine_id: of this engine.
        host: this engine's side channel, for the handshake back.
        port: its port.
        tp_size: tensor-parallel ranks of this engine.
        tp_rank: this one.
        timeout_s: a transfer that shows no progress for so long has failed.
    """

    def __init__(
        self,
        transport: Transport,
        ledger: Ledger,
        *,
        engine_id: str,
        host: str,
        port: int,
        tp_size: int,
        tp_rank: int,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._ledger = ledger
        self._engine_id, self._host, self._port = engine_id, host, port
        self._tp_size, self._tp_rank = tp_size, tp_rank
        self._timeout_s = timeout_s
        self._records: dict[str, _Record] = {}
        self._by_key: dict[tuple[str, int], _Record] = {}
        self._settled: list[Settled] = []
        self._fenced: list[str] = []
        self._notices: OrderedDict[tuple[str, str], _Notice] = OrderedDict()
        self._waiting: dict[str, Peer] = {}
        self._heartbeat_at = -math.inf
        self._gone_check_at = -math.inf

    # What the writer asks.

    def take_settled(self) -> list[Settled]:
        """Requests that the engine may go on with; each is named once."""
        settled, self._settled = self._settled, []
        return settled

    def take_fenced(self) -> list[str]:
        """Requests that were settled without being fenced, and are fenced now; each is named once."""
        fenced, self._fenced = self._fenced, []
        return fenced

    @property
    def expecting(self) -> bool:
        """True while a message is expected: look often."""
        return bool(self._records or self._notices)

    # Events from the engine.

    def on_receive(self, event: Receive, now: float) -> None:
        """Blocks are set aside (or none are needed): tell prefill."""
        self._waiting.pop(event.key, None)
        if not any(event.block_ids):
            request_id = wire.clip(event.request_id)
            zero = wire.RegisterZero(event.key, event.attempt, self._engine_id, request_id)
            self._notify(event.request_id, event.peer, zero, now)
            return
        if event.request_id in self._records:
            logger.error("request %s is set up for a transfer twice", event.request_id)
            return
        record = _Record(event, begun=now, progress_at=now)
        if (event.key, event.attempt) in self._by_key:
            # Answers could not be told apart, and the other one's DONE would count for this one.
            reason = f"another transfer is attempt {event.attempt} of {event.key}"
            logger.error("request %s: %s", event.request_id, reason)
            self._settled.append(Settled(event.request_id, ok=False, fenced=True, reason=reason))
            return
        self._records[event.request_id] = record
        self._by_key[event.key, event.attempt] = record
        self._ledger.open(
            "decode",
            event.key,
            event.attempt,
            "allocated",
            request_id=event.request_id,
            peer=event.peer.engine_id,
            tokens=event.tokens,
        )
        self._ledger.note("decode", event.key, event.attempt, blocks=sum(map(len, event.block_ids)))
        self._register(record, now)

    def on_given_up(self, event: GivenUp, now: float) -> None:
        """The client left. Nothing is freed before prefill has answered."""
        self._waiting.pop(event.key, None)
        record = self._records.get(event.request_id)
        if record is not None:
            record.given_up = True
            if not record.registered:
                self._settle(record, "aborted", "the client left", now, fenced=True)
            else:
                record.progress_at = now
                self._cancel(record, now)
            return
        # It never had blocks here: prefill may give its own up at once.
        self._notify(event.request_id, event.peer, self._cancel_message(event.key, event.attempt), now)

    def on_waiting(self, waiting: dict[str, Peer]) -> None:
        """Requests that still wait for blocks here."""
        self._waiting = dict(waiting)

    # Events from prefill.

    def on_message(self, message: wire.Message, now: float) -> str:
        """Take a message from prefill. Returns what became of it, for counters."""
        if not isinstance(message, wire.Done | wire.Failed | wire.CancelAck | wire.Alive):
            return "misplaced"
        record = self._by_key.get((message.key, message.attempt))
        if record is None or not record.registered:
            # Nobody can have an answer to what was never asked.
            return "unknown"
        if isinstance(message, wire.Alive):
            if not record.settled and not record.given_up:
                record.progress_at = now
            return "accepted"
        if message.writer in record.spoken:
            return "repeated"
        if record.writers is not None and message.writers != record.writers:
            logger.error(
                "transfer %s: prefill rank %d says that %d ranks write, others said %d",
                message.key,
                message.writer,
                message.writers,
                record.writers,
            )
            return "refused"
        record.writers = message.writers
        record.progress_at = now
        if isinstance(message, wire.Done):
            record.spoken[message.writer] = "done"
            record.bytes += message.bytes
        elif isinstance(message, wire.Failed):
            record.spoken[message.writer] = "failed"
            record.reason = f"{message.reason}: {message.detail}" if message.detail else message.reason
        else:
            record.spoken[message.writer] = "done" if message.state == "completed" else "cancelled"
        self._conclude(record, now)
        return "accepted"

    # Time.

    def tick(self, now: float) -> None:
        """Connections, deadlines, repetitions. Call after the messages that have arrived."""
        with Round() as served:
            served.each(self._notices, lambda name: self._send_notice(name, now))
            served.each(self._records.values(), lambda record: self._look_after(record, now))
            if now - self._heartbeat_at >= HEARTBEAT_S:
                self._heartbeat_at = now
                served.each(self._keys_by_peer().items(), lambda entry: self._heartbeat(*entry))
            if now - self._gone_check_at >= GONE_CHECK_S:
                self._gone_check_at = now
                served.each(self._doubtful().items(), lambda entry: self._check_gone(*entry, now))

    def postpone(self, seconds: float) -> None:
        """This process was stopped for so long: no deadline may pass because of it. Call before the messages."""
        for record in self._records.values():
            record.progress_at += seconds
        for name, notice in self._notices.items():
            self._notices[name] = _Notice(notice.peer, notice.message, notice.until + seconds)

    def peer_lost(self, engine_id: str, detail: str, now: float) -> None:
        """The connection to a prefill engine broke. What was registered there will not come over it."""
        for record in list(self._records.values()):
            if record.want.peer.engine_id == engine_id and not record.settled:
                if record.given_up:
                    continue
                self._settle(
                    record,
                    "failed",
                    f"lost the prefill engine {engine_id}: {detail}",
                    now,
                    fenced=not record.registered,
                )

    def busy_engines(self) -> set[str]:
        """Engines that something here still waits for."""
        return {record.want.peer.engine_id for record in self._records.values()}

    def shut_down(self, now: float) -> None:
        """Tell prefill that nothing here waits any more."""
        for record in list(self._records.values()):
            if record.registered:
                self._cancel(record, now)

    # Inside.

    def _register(self, record: _Record, now: float) -> None:
        want = record.want
        state = self._transport.reach(want.peer)
        if state == "connecting":
            return
        if state == "failed":
            self._settle(
                record,
                "failed",
                f"cannot reach the prefill engine {want.peer.engine_id}: {self._transport.why_failed(want.peer)}",
                now,
                fenced=True,
            )
            return
        try:
            message = self._register_message(want)
        except ValueError as error:
            self._settle(record, "failed", f"{_UNFIT}: {error}", now, fenced=True)
            return
        # Before sending: with several prefill ranks some may have got it even if the sending fails. And a transport
        # that finds the peer lost settles the record at once.
        record.registered = True
        record.told_at = now
        self._ledger.advance("decode", want.key, want.attempt, "registered")
        try:
            told = self._transport.tell(want.peer, message)
        except wire.WireError as error:
            self._settle(record, "failed", f"{_UNFIT}: {error}", now, fenced=True)
            return
        if not told and not record.settled:
            self._settle(
                record, "failed", f"lost the prefill engine {want.peer.engine_id} while registering", now, fenced=False
            )

    def _register_message(self, want: Receive) -> wire.Register:
        return wire.Register(
            key=want.key,
            attempt=want.attempt,
            engine_id=self._engine_id,
            request_id=wire.clip(want.request_id),
            host=self._host,
            port=self._port,
            tp_size=self._tp_size,
            tp_rank=self._tp_rank,
            block_ids=[list(group) for group in want.block_ids],
            first_block=list(want.first_block),
            prompt_tokens=want.tokens,
            token_hash=want.token_hash,
        )

    def _conclude(self, record: _Record, now: float) -> None:
        if record.writers is None or len(record.spoken) < record.writers:
            return
        if record.settled:
            self._fence(record)
        elif record.given_up:
            self._settle(record, "aborted", "the client left", now, fenced=True)
        elif all(word == "done" for word in record.spoken.values()):
            self._settle(record, "received", "", now, fenced=True)
        else:
            self._settle(record, "failed", record.reason or "cancelled by prefill", now, fenced=True)

    def _settle(self, record: _Record, outcome: Outcome, reason: str, now: float, *, fenced: bool) -> None:
        want = record.want
        record.settled = True
        self._ledger.note("decode", want.key, want.attempt, bytes=record.bytes, writers=record.writers)
        self._ledger.advance("decode", want.key, want.attempt, outcome, reason=reason)
        if outcome not in ("received", "aborted"):
            logger.error("transfer %s (request %s) %s: %s", want.key, want.request_id, outcome, reason)
        self._settled.append(
            Settled(
                want.request_id,
                ok=outcome == "received",
                fenced=fenced,
                reason=reason,
                bytes=record.bytes,
                took_s=now - record.begun,
            )
        )
        if fenced:
            self._forget(record)

    def _fence(self, record: _Record) -> None:
        self._fenced.append(record.want.request_id)
        self._forget(record)

    def _forget(self, record: _Record) -> None:
        self._records.pop(record.want.request_id, None)
        if self._by_key.get((record.want.key, record.want.attempt)) is record:
            del self._by_key[record.want.key, record.want.attempt]

    def _look_after(self, record: _Record, now: float) -> None:
        if self._records.get(record.want.request_id) is not record:
            # Over since this round began: another one's message found the peer lost.
            return
        if not record.registered:
            self._register(record, now)
        if self._records.get(record.want.request_id) is not record:
            return
        if record.settled or record.given_up:
            self._chase(record, now)
        elif now - record.progress_at > self._timeout_s:
            stage = "registered" if record.registered else "not yet registered"
            self._settle(
                record,
                "timed_out",
                f"no progress for {self._timeout_s:.0f} s ({stage} with {record.want.peer.engine_id})",
                now,
                fenced=not record.registered,
            )
            if record.registered:
                self._cancel(record, now)
        elif record.registered and now - max(record.progress_at, record.told_at) >= REGISTER_AGAIN_S:
            record.told_at = now
            if self._transport.reach(record.want.peer) == "ready":
                self._transport.tell(record.want.peer, self._register_message(record.want))

    def _chase(self, record: _Record, now: float) -> None:
        """Ask again until prefill has answered; past the deadline the engine need not wait for that."""
        if not record.settled and now - record.progress_at > self._timeout_s:
            self._settle(record, "aborted", "the client left; prefill does not answer", now, fenced=False)
        if now - record.cancel_told_at >= CANCEL_AGAIN_S:
            self._cancel(record, now)

    def _cancel(self, record: _Record, now: float) -> None:
        record.cancel_told_at = now
        if self._transport.reach(record.want.peer) == "ready":
            self._transport.tell(record.want.peer, self._cancel_message(record.want.key, record.want.attempt))

    def _cancel_message(self, key: str, attempt: int) -> wire.Cancel:
        return wire.Cancel(
            key=key,
            attempt=attempt,
            engine_id=self._engine_id,
            host=self._host,
            port=self._port,
            tp_size=self._tp_size,
        )

    def _peer_gone(self, record: _Record, now: float) -> None:
        if record.settled:
            self._fence(record)
        elif record.given_up:
            self._settle(record, "aborted", "the client left; the prefill engine is gone", now, fenced=True)
        else:
            reason = f"the prefill engine {record.want.peer.engine_id} is gone"
            self._settle(record, "failed", reason, now, fenced=True)

    def _doubtful(self) -> dict[Peer, list[_Record]]:
        """By peer, the transfers where something is wrong already: a lost connection, or no answer."""
        doubtful: dict[Peer, list[_Record]] = {}
        for record in self._records.values():
            lost = record.registered and self._transport.reach(record.want.peer) != "ready"
            if lost or record.settled or record.given_up:
                doubtful.setdefault(record.want.peer, []).append(record)
        return doubtful

    def _check_gone(self, peer: Peer, records: list[_Record], now: float) -> None:
        if not self._transport.gone(peer):
            return
        for record in records:
            if self._records.get(record.want.request_id) is record:
                self._peer_gone(record, now)

    def _keys_by_peer(self) -> dict[Peer, list[str]]:
        by_peer: dict[Peer, dict[str, None]] = {}
        for key, peer in self._waiting.items():
            by_peer.setdefault(peer, {})[key] = None
        for record in self._records.values():
            if record.registered and not record.settled and not record.given_up:
                by_peer.setdefault(record.want.peer, {})[record.want.key] = None
        return {peer: list(keys) for peer, keys in by_peer.items()}

    def _heartbeat(self, peer: Peer, keys: list[str]) -> None:
        """Renew leases at prefill; also the probe that finds a dead connection soon."""
        for start in range(0, len(keys), HEARTBEAT_KEYS):
            if self._transport.reach(peer) != "ready":
                return
            self._transport.tell(peer, wire.Heartbeat(keys[start : start + HEARTBEAT_KEYS]))

    def _notify(self, request_id: str, peer: Peer, message: wire.RegisterZero | wire.Cancel, now: float) -> None:
        """Send what needs no answer, as soon as there is a connection."""
        name = (request_id, message.kind)
        self._notices[name] = _Notice(peer, message, now + self._timeout_s)
        while len(self._notices) > NOTICES_LIMIT:
            self._notices.popitem(last=False)
        self._send_notice(name, now)

    def _send_notice(self, name: tuple[str, str], now: float) -> None:
        notice = self._notices.get(name)
        if notice is None:
            return
        try:
            sent = self._transport.reach(notice.peer) == "ready" and self._transport.tell(notice.peer, notice.message)
        except Exception:
            del self._notices[name]
            raise
        if sent or now > notice.until:
            del self._notices[name]
