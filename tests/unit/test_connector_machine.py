"""Both sides of transfers against a simulated world, driven by hypothesis: whatever happens, the five invariants hold.

One prefill engine and two decode engines with one or two ranks each run the real `Writer` rounds, `PrefillSide`,
`DecodeSide`, `Ledger` and `wire`. Simulated are time, the network (loses, doubles, reorders, delays, breaks), NIXL
(WRITEs that take as long as they like, fail, or are posted in part), the memory on both ends, and vLLM's schedulers,
which reuse a block as soon as they may. Keys are few, so that they collide.

`PDCTL_HYPOTHESIS_EXAMPLES` sets the number of runs. There are two kinds: those that hypothesis chooses are short, and
it makes a failure of theirs shorter; those of `long_run` go far, and their seed repeats them.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pdctl_connector import wire
from pdctl_connector.decode_side import DecodeSide, Settled
from pdctl_connector.ledger import Ledger
from pdctl_connector.prefill_side import Posted, PrefillSide
from pdctl_connector.step import Ended, GivenUp, Peer, Prefilling, Ready, Receive, Step
from pdctl_connector.writer import STOPPED_S, Writer

TIMEOUT_S = 6.0
LEASE_S = 5.0
PARKED_S = 12.0
BACKOFF_S = 1.5
# Longer than any retry or deadline in the code, so that what is left after it is left for ever.
QUIET_S = 100
EXAMPLES = int(os.environ.get("PDCTL_HYPOTHESIS_EXAMPLES", "50"))
BLOCK = 4
BLOCKS = 12
KEYS = ("one", "two", "three")
# Number, tokens: the first two differ in their hash alone.
PROMPTS = ((0, 2 * BLOCK), (1, 2 * BLOCK), (2, 3 * BLOCK))

PickedRank = st.integers(0, 5)
Some = st.integers(0, 1 << 10)


@dataclass
class Connection:
    state: Literal["connecting", "ready", "failed"] = "connecting"
    begun: float = 0.0
    retry_at: float = 0.0
    # Both ends will find out when they use it.
    doomed: bool = False


@dataclass
class Packet:
    to: Rank
    data: bytes
    at: float


@dataclass
class Write:
    """One WRITE: the blocks of a prefill rank into those of a decode rank."""

    rank: Rank
    source: PrefillRequest
    target: DecodeRequest
    to: Rank
    pairs: list[tuple[int, int]]
    registration: wire.Register
    landed: bool = False
    broken: bool = False
    over: bool = False

    @property
    def may_land(self) -> bool:
        return not (self.landed or self.broken or self.over) and self.rank.engine.alive


@dataclass
class PrefillRequest:
    id: str
    key: str
    prompt: tuple[int, int]
    blocks: list[int]
    state: Literal["prefilling", "ready", "ended"] = "prefilling"
    sent: set[int] = field(default_factory=set)


@dataclass
class DecodeRequest:
    id: str
    key: str
    prompt: tuple[int, int]
    peer: Peer
    attempt: int = -1
    first: int = 0
    blocks: list[int] = field(default_factory=list)
    state: Literal["waiting", "receiving", "quarantined", "over"] = "waiting"
    given_up: bool = False
    settled: dict[int, Settled] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    # Rank -> when it last heard something that counts as progress, in the world's eyes.
    heard: dict[int, float] = field(default_factory=dict)


class Rank:
    """A rank with the real writer on top of a simulated NIXL; its transport for both sides, and its link."""

    def __init__(self, world: World, engine: Engine, tp_rank: int) -> None:
        self.world, self.engine, self.tp_rank = world, engine, tp_rank
        self.connections: dict[str, Connection] = {}
        self.arrived: list[bytes] = []
        self.replaced: set[str] = set()
        self.suspected: set[str] = set()
        self.paused = False
        self.last_round: float | None = None
        self.handed: list[Step] = []
        self.ledger = Ledger(clock=lambda: world.now, wall_clock=lambda: world.now)
        prefill = PrefillSide(self, self.ledger, lease_s=LEASE_S, parked_s=PARKED_S, tp_size=len(world.prefill_ranks))
        decode = DecodeSide(
            self,
            self.ledger,
            engine_id=engine.id,
            host=engine.slot,
            port=1,
            tp_size=world.decode_tp,
            tp_rank=tp_rank,
            timeout_s=TIMEOUT_S,
        )
        self.writer = Writer(prefill, decode, self)

    # Connections.

    def _state(self, engine_id: str) -> Literal["connecting", "ready", "failed"]:
        known = self.connections.get(engine_id)
        if known is None:
            known = self.connections[engine_id] = Connection(begun=self.world.now)
        elif known.state == "failed" and self.world.now >= known.retry_at:
            if any(w.rank is self and w.registration.engine_id == engine_id and not w.over for w in self.world.writes):
                return "failed"
            self.connections[engine_id] = known = Connection(begun=self.world.now)
        return known.state

    def connect(self, registration: wire.Register | wire.Cancel) -> Literal["connecting", "ready", "failed"]:
        return self._state(registration.engine_id)

    def reach(self, peer: Peer) -> Literal["connecting", "ready", "failed"]:
        return self._state(peer.engine_id)

    def why_failed(self, peer: Peer) -> str:
        return "simulated"

    def gone(self, peer: Peer) -> bool:
        engine = self.world.engines[peer.engine_id]
        if peer.engine_id in self.replaced:
            return True
        if engine.alive or self.world.is_cut(self.engine, engine):
            return False
        # The answer of a probe that was sent before.
        known = peer.engine_id in self.suspected
        self.suspected.add(peer.engine_id)
        return known

    def send(self, engine_id: str, message: wire.Message) -> bool:
        data = wire.encode(message)
        known, engine = self.connections.get(engine_id), self.world.engines[engine_id]
        if known is None or known.state != "ready":
            return False
        if known.doomed or not engine.alive:
            self._broke(engine_id)
            return False
        if not self.world.is_cut(self.engine, engine):
            self.world.network += [Packet(to, data, self.world.now) for to in self.world.linked(self, engine)]
        return True

    def tell(self, peer: Peer, message: wire.Message) -> bool:
        return self.send(peer.engine_id, message)

    def _broke(self, engine_id: str) -> None:
        self.connections[engine_id] = Connection("failed", retry_at=self.world.now + BACKOFF_S)
        self.writer.decode.peer_lost(engine_id, "disconnected", self.world.now)

    # Writer's link.

    def notifications(self) -> list[bytes]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def housekeeping(self, now: float) -> None:
        for engine_id, known in list(self.connections.items()):
            if known.state != "connecting" or now - known.begun < self.world.handshake_s:
                continue
            engine = self.world.engines[engine_id]
            if not engine.alive or self.world.is_cut(self.engine, engine):
                self.connections[engine_id] = Connection("failed", retry_at=now + BACKOFF_S)
                self.writer.prefill.engine_lost(engine_id, "no answer", now)
                continue
            known.state = "ready"
            for other_id, other in list(self.connections.items()):
                if other_id != engine_id and self.world.engines[other_id].slot == engine.slot:
                    self.replaced.add(other_id)
                    if other.state == "ready":
                        self.connections[other_id] = Connection("failed", retry_at=now + BACKOFF_S)
                        self.writer.decode.peer_lost(other_id, "replaced", now)
                        self.writer.prefill.engine_lost(other_id, "replaced", now, gone=True)

    # WRITEs.

    def writers(self, tp_size: int) -> tuple[int, int]:
        return self.tp_rank, max(1, len(self.world.prefill_ranks) // tp_size)

    def refusal(self, registration: wire.Register) -> str:
        return "simulated" if self.world.fault() == "refuse" else ""

    def post(self, request_id: str, block_ids: tuple[list[int], ...], registration: wire.Register) -> Posted:
        fault = self.world.fault()
        if fault == "raise":
            raise RuntimeError("simulated")
        targets = self.world.linked(self, self.world.engines[registration.engine_id])
        if fault == "part":
            targets = targets[:-1]
            if not targets:
                raise RuntimeError("simulated")
        made = [self.world.post(self, request_id, block_ids, registration, to) for to in targets]
        return Posted(tuple(made), len(made), 100 * len(made), "simulated" if fault == "part" else "")

    def poll(self, handle: int) -> Literal["active", "done", "failed"]:
        write = self.world.writes[handle]
        self.world.check(not write.over, "a handle is polled after its end")
        if write.broken or not write.to.engine.alive:
            write.over = True
            return "failed"
        if not write.landed:
            return "active"
        write.over = True
        # UCX sends the message of a WRITE when the poll finds it complete.
        reg = write.registration
        rank, writers = self.writers(reg.tp_size)
        done = wire.Done(key=reg.key, attempt=reg.attempt, writer=rank, writers=writers, bytes=100)
        if not self.world.is_cut(self.engine, write.to.engine):
            self.world.network.append(Packet(write.to, wire.encode(done), self.world.now))
        return "done"


class Engine:
    """An instance: its ranks, its block pool, and what its scheduler knows."""

    def __init__(self, world: World, engine_id: str, slot: str, ranks: int) -> None:
        self.id, self.slot, self.alive = engine_id, slot, True
        self.owner: dict[int, str] = {}
        self.step = Step()
        self.prefills: dict[str, PrefillRequest] = {}
        self.receives: dict[str, DecodeRequest] = {}
        self.ranks = [Rank(world, self, tp_rank) for tp_rank in range(ranks)]
        # Rank, block -> what is in it, by prefill rank on the decode side.
        self.content: dict[tuple[int, int], Any] = {}

    def allocate(self, owner: str, count: int) -> list[int] | None:
        free = [block for block in range(BLOCKS) if block not in self.owner][:count]
        if len(free) < count:
            return None
        self.owner.update(dict.fromkeys(free, owner))
        return free

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            del self.owner[block]
            for rank in self.ranks:
                self.content.pop((rank.tp_rank, block), None)


class World:
    """Everything outside the two sides, and the judgement over them."""

    def __init__(self, prefill_tp: int, decode_tp: int) -> None:
        self.now = 1000.0
        self.decode_tp = decode_tp
        self.prefill_ranks = range(prefill_tp)
        self.network: list[Packet] = []
        self.writes: list[Write] = []
        self.engines: dict[str, Engine] = {}
        self.slots: dict[str, Engine] = {}
        self.cut: set[str] = set()
        self.faults: list[str] = []
        self.handshake_s = 0.0
        self.attempts: dict[tuple[str, str], int] = {}
        self.ids = 0
        self.violations: list[str] = []
        # What happened to receives, to see that a run reaches it.
        self.seen: Counter[str] = Counter()
        for slot in ("p", "d0", "d1"):
            self.start(slot)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(f"at {self.now:.1f}: {what}")

    def fresh(self, prefix: str) -> str:
        self.ids += 1
        return f"{prefix}{self.ids}"

    def fault(self) -> str:
        return self.faults.pop() if self.faults else ""

    # Engines.

    def start(self, slot: str) -> None:
        engine = Engine(self, self.fresh(f"{slot}-"), slot, len(self.prefill_ranks) if slot == "p" else self.decode_tp)
        self.engines[engine.id] = self.slots[slot] = engine

    def restart(self, slot: str) -> None:
        former = self.slots[slot]
        former.alive = False
        for write in self.writes:
            if write.rank.engine is former:
                write.broken = write.over = True
        self.network = [packet for packet in self.network if packet.to.engine is not former]
        self.start(slot)

    @property
    def prefill(self) -> Engine:
        return self.slots["p"]

    @property
    def decodes(self) -> list[Engine]:
        return [self.slots["d0"], self.slots["d1"]]

    def ranks(self) -> list[Rank]:
        return [rank for engine in self.slots.values() for rank in engine.ranks]

    def linked(self, rank: Rank, engine: Engine) -> list[Rank]:
        """Ranks of the other engine that a rank deals with, as vLLM's TransferTopology says."""
        here, there = len(rank.engine.ranks), len(engine.ranks)
        if here >= there:
            return [engine.ranks[rank.tp_rank // (here // there)]]
        ratio = there // here
        return engine.ranks[rank.tp_rank * ratio : (rank.tp_rank + 1) * ratio]

    def is_cut(self, one: Engine, other: Engine) -> bool:
        return one.slot in self.cut or other.slot in self.cut

    def break_connections(self, slot: str) -> None:
        for engine in self.engines.values():
            for rank in engine.ranks:
                for engine_id, known in rank.connections.items():
                    if slot in (engine.slot, self.engines[engine_id].slot):
                        known.doomed = True
        self.network = [p for p in self.network if p.to.engine.slot != "p" and p.to.engine.slot != slot]
        for write in self.writes:
            if write.to.engine.slot == slot and not write.over:
                write.broken = True

    # Rounds.

    def round(self, rank: Rank) -> None:
        if rank.paused or not rank.engine.alive:
            return
        gap = self.now - rank.last_round if rank.last_round is not None else 0.0
        rank.last_round = self.now
        receives = rank.engine.receives.values()
        for request in receives:
            if gap > STOPPED_S and rank.tp_rank in request.heard:
                request.heard[rank.tp_rank] += gap
        for step in rank.handed:
            for receive in step.receive:
                if receive.request_id in rank.engine.receives:
                    rank.engine.receives[receive.request_id].heard[rank.tp_rank] = self.now
            for given_up in step.given_up:
                if given_up.request_id in rank.engine.receives:
                    rank.engine.receives[given_up.request_id].heard[rank.tp_rank] = self.now
        rank.handed.clear()
        for data in rank.arrived:
            message = wire.decode(data)
            for request in receives:
                if isinstance(message, wire.Done | wire.Failed | wire.CancelAck | wire.Alive) and (
                    (message.key, message.attempt) == (request.key, request.attempt)
                ):
                    request.heard[rank.tp_rank] = self.now
        rank.writer.round(self.now)
        self.check(rank.writer.errors == 0, f"the writer met an error: {rank.writer.last_error}")
        sent, settled, fenced = rank.writer.take()
        for request_id in sent:
            self.on_sent(rank, request_id)
        for entry in settled:
            self.on_settled(rank, entry)
        for request_id in fenced:
            request = rank.engine.receives[request_id]
            entry = request.settled.get(rank.tp_rank)
            self.check(entry is not None and not entry.fenced, f"{request_id} is fenced without need")
            self.on_fenced(rank, request)
        for request in receives:
            if request.state == "receiving" and rank.tp_rank in request.heard and rank.tp_rank not in request.settled:
                age = self.now - request.heard[rank.tp_rank]
                self.check(age <= TIMEOUT_S, f"{request.id} has waited {age:.1f} s for a transfer that does not move")

    def engine_step(self, engine: Engine) -> None:
        """The scheduler: takes what all ranks have finished, then tells them what is new."""
        if not engine.alive:
            return
        for request in list(engine.receives.values()):
            self.conclude(engine, request)
        for prefill in list(engine.prefills.values()):
            if prefill.state == "ready" and len(prefill.sent) == len(engine.ranks):
                engine.free(prefill.blocks)
                del engine.prefills[prefill.id]
        engine.step.waiting = {r.key: r.peer for r in engine.receives.values() if r.state == "waiting"}
        for rank in engine.ranks:
            rank.writer.hand_over(engine.step)
            rank.handed.append(engine.step)
        engine.step = Step()

    def conclude(self, engine: Engine, request: DecodeRequest) -> None:
        if request.state == "receiving" and len(request.settled) == len(engine.ranks):
            if all(entry.ok for entry in request.settled.values()):
                request.state = "over"
            else:
                request.state = "quarantined"
        if request.state == "quarantined" and len(request.fenced) == len(engine.ranks):
            request.state = "over"
        if request.state == "over":
            engine.free(request.blocks)
            del engine.receives[request.id]

    # What the sides report.

    def on_sent(self, rank: Rank, request_id: str) -> None:
        request = rank.engine.prefills.get(request_id)
        if request is None or request.state != "ready" or rank.tp_rank in request.sent:
            self.check(False, f"{request_id} is reported as sent, which the engine does not expect")
            return
        busy = [w for w in self.writes if w.rank is rank and w.source is request and not w.over]
        self.check(not busy, f"blocks of {request_id} are given back while a WRITE reads them")
        request.sent.add(rank.tp_rank)

    def on_settled(self, rank: Rank, entry: Settled) -> None:
        request = rank.engine.receives.get(entry.request_id)
        if request is None or rank.tp_rank in request.settled:
            self.check(False, f"{entry.request_id} is settled, which the engine does not expect")
            return
        request.settled[rank.tp_rank] = entry
        self.check(entry.fenced or not entry.ok, f"{request.id} is received and not fenced")
        kind = "received" if entry.ok else entry.reason.split(":")[0].split(" (")[0].rstrip(" 0123456789")
        self.seen[kind + ("" if entry.fenced else ", blocks kept")] += 1
        if entry.ok:
            self.check(not request.given_up or True, "")
            for offset, block in enumerate(request.blocks):
                there = rank.engine.content.get((rank.tp_rank, block), {})
                wanted = dict.fromkeys(
                    (writer.tp_rank for writer in self.linked(rank, self.engines[request.peer.engine_id])),
                    (request.prompt[0], request.first + offset),
                )
                self.check(there == wanted, f"{request.id} is received, but block {block} holds {there}, not {wanted}")
        if entry.fenced:
            self.on_fenced(rank, request)

    def on_fenced(self, rank: Rank, request: DecodeRequest) -> None:
        self.check(rank.tp_rank not in request.fenced, f"{request.id} is fenced twice")
        request.fenced.add(rank.tp_rank)
        busy = [w for w in self.writes if w.target is request and w.to is rank and w.may_land]
        self.check(not busy, f"{request.id} is fenced while a WRITE may touch its blocks")

    # Memory.

    def post(self, rank: Rank, request_id: str, block_ids: tuple[list[int], ...], reg: wire.Register, to: Rank) -> int:
        source = rank.engine.prefills.get(request_id)
        target = to.engine.receives.get(reg.request_id)
        if source is None or source.state != "ready" or rank.tp_rank in source.sent:
            self.check(False, f"a WRITE is posted for {request_id}, whose blocks are not held")
            return -1
        pairs: list[tuple[int, int]] = []
        if to.engine.alive:
            held = target is not None and target.state in ("receiving", "quarantined")
            self.check(held, f"a WRITE is posted into {reg.request_id}, whose blocks are free")
            fenced = target is not None and to.tp_rank in target.fenced
            self.check(not fenced, f"a WRITE is posted into {reg.request_id}, which is fenced")
        if target is not None:
            first = reg.first_block[0]
            pairs = [(block_ids[0][first + n], block) for n, block in enumerate(reg.block_ids[0])]
            self.writes.append(Write(rank, source, target, to, pairs, reg))
        else:
            self.writes.append(Write(rank, source, DecodeRequest("", "", (0, 0), Peer("", "", 1, 1)), to, [], reg))
        return len(self.writes) - 1

    def land(self, write: Write) -> None:
        if not write.may_land or not write.to.engine.alive or self.is_cut(write.rank.engine, write.to.engine):
            return
        write.landed = True
        held = write.source.state == "ready" and write.rank.tp_rank not in write.source.sent
        self.check(held, f"a WRITE reads blocks of {write.source.id}, which were given back")
        self.touch(write, good=True)

    def touch(self, write: Write, *, good: bool) -> None:
        engine, rank = write.to.engine, write.rank
        for here, there in write.pairs:
            owner = engine.owner.get(there)
            self.check(owner == write.target.id, f"a WRITE for {write.target.id} lands in block {there} of {owner}")
            tag = rank.engine.content.get((rank.tp_rank, here)) if good else "garbage"
            engine.content.setdefault((write.to.tp_rank, there), {})[rank.tp_rank] = tag

    def fail(self, write: Write) -> None:
        if not write.may_land or not write.to.engine.alive:
            return
        # Part of it may be there.
        if write.pairs and not self.is_cut(write.rank.engine, write.to.engine):
            self.touch(write, good=False)
        write.broken = True

    # Requests.

    def new_prefill(self, key: str, prompt: tuple[int, int]) -> None:
        request_id, engine = self.fresh("P"), self.prefill
        blocks = engine.allocate(request_id, prompt[1] // BLOCK)
        if blocks is None:
            return
        engine.prefills[request_id] = PrefillRequest(request_id, key, prompt, blocks)
        for number, block in enumerate(blocks):
            for rank in engine.ranks:
                engine.content[rank.tp_rank, block] = (prompt[0], number)
        engine.step.prefilling.append(Prefilling(request_id, key, prompt[1]))

    def finish_prefill(self, request: PrefillRequest, *, ready: bool) -> None:
        engine = self.prefill
        if ready:
            request.state = "ready"
            number, tokens = request.prompt
            engine.step.ready.append(
                Ready(request.id, request.key, (list(request.blocks),), tokens, wire.token_hash([number] * tokens))
            )
            return
        request.state = "ended"
        engine.free(request.blocks)
        del engine.prefills[request.id]
        engine.step.ended.append(Ended(request.id, request.key, "aborted"))

    def new_decode(self, engine: Engine, key: str, prompt: tuple[int, int], peer_id: str) -> None:
        request_id = self.fresh("D")
        peer = Peer(peer_id, "p", 1, len(self.prefill_ranks))
        engine.receives[request_id] = DecodeRequest(request_id, key, prompt, peer)

    def next_attempt(self, engine: Engine, key: str) -> int:
        self.attempts[engine.id, key] = attempt = self.attempts.get((engine.id, key), -1) + 1
        return attempt

    def receive(self, engine: Engine, request: DecodeRequest, hit: int) -> None:
        number, tokens = request.prompt
        request.first = min(hit, tokens // BLOCK)
        blocks = engine.allocate(request.id, tokens // BLOCK - request.first)
        if blocks is None:
            return
        request.blocks, request.attempt = blocks, self.next_attempt(engine, request.key)
        engine.step.receive.append(
            Receive(
                request.id,
                request.key,
                request.attempt,
                request.peer,
                (list(blocks),),
                (request.first,),
                tokens,
                wire.token_hash([number] * tokens),
            )
        )
        request.state = "receiving"
        if not blocks:
            del engine.receives[request.id]

    def give_up(self, engine: Engine, request: DecodeRequest) -> None:
        request.given_up = True
        attempt = request.attempt
        if request.state == "waiting":
            attempt = self.next_attempt(engine, request.key)
            del engine.receives[request.id]
        engine.step.given_up.append(GivenUp(request.id, request.key, attempt, request.peer))

    # Time.

    def deliver(self, packet: Packet) -> None:
        if packet.to.engine.alive:
            packet.to.arrived.append(packet.data)

    def pass_second(self, *, deliver: bool, land: bool) -> None:
        self.now += 1.0
        if deliver:
            packets, self.network = self.network, []
            for packet in packets:
                self.deliver(packet)
        if land:
            for write in self.writes:
                self.land(write)
        for engine in self.slots.values():
            self.engine_step(engine)
        for rank in self.ranks():
            self.round(rank)

    def settle(self) -> None:
        """Everything heals, what is open comes to its end, and time passes."""
        self.cut.clear()
        self.faults.clear()
        self.handshake_s = 0.0
        for rank in self.ranks():
            rank.paused = False
        for number, prefill in enumerate(list(self.prefill.prefills.values())):
            if prefill.state == "prefilling":
                self.finish_prefill(prefill, ready=number % 2 == 0)
        for engine in self.decodes:
            for number, request in enumerate(list(engine.receives.values())):
                if request.state == "waiting":
                    self.receive(engine, request, 0)
                if request.state == "waiting" or (number % 3 == 0 and not request.given_up):
                    self.give_up(engine, request)
        for _ in range(QUIET_S):
            self.pass_second(deliver=True, land=True)

    def leftovers(self) -> Iterator[str]:
        """What is still there after everything has healed and time has passed."""
        for engine in self.slots.values():
            yield from (f"blocks of {engine.id}: {engine.owner}" for _ in [0] if engine.owner)
            yield from (f"{engine.id} waits for {name}" for name in (*engine.prefills, *engine.receives))
        for rank in self.ranks():
            for side, tables in (
                (rank.writer.prefill, "_requests _by_key _numbers _unposted _posted _parked _parked_zero _outbox"),
                (rank.writer.decode, "_records _by_key _notices _waiting"),
            ):
                for table in tables.split():
                    left = getattr(side, table)
                    yield from (f"{rank.engine.id} {table}: {left}" for _ in [0] if left)
            inflight = {at: n for at, n in rank.ledger.counts().inflight.items() if n}
            yield from (f"{rank.engine.id} ledger: {inflight}" for _ in [0] if inflight)
        yield from (f"in the network: {packet.data!r}" for packet in self.network)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Thousands of transfers fail here on purpose."""
    logger = logging.getLogger("vllm.pdctl_connector")
    before, logger.disabled = logger.level, False
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def pick(items: Any, number: int) -> Any:
    listed = list(items)
    return listed[number % len(listed)] if listed else None


class Transfers(RuleBasedStateMachine):
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.quiet = contextlib.ExitStack()
        self.quiet.enter_context(quiet())

    @initialize(shape=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    def begin(self, shape: tuple[int, int]) -> None:
        self.world = World(*shape)

    # The engines.

    @rule(key=st.sampled_from(KEYS), prompt=st.sampled_from(PROMPTS), d=st.integers(0, 1), hit=st.integers(0, 2))
    def both_legs(self, key: str, prompt: tuple[int, int], d: int, hit: int) -> None:
        world = self.world
        engine = world.decodes[d]
        world.new_decode(engine, key, prompt, world.prefill.id)
        world.new_prefill(key, prompt)
        world.receive(engine, list(engine.receives.values())[-1], hit % 2)

    @rule(key=st.sampled_from(KEYS), prompt=st.sampled_from(PROMPTS))
    def prefill_leg(self, key: str, prompt: tuple[int, int]) -> None:
        self.world.new_prefill(key, prompt)

    @rule(key=st.sampled_from(KEYS), prompt=st.sampled_from(PROMPTS), d=st.integers(0, 1), stale=st.booleans())
    def decode_leg(self, key: str, prompt: tuple[int, int], d: int, stale: bool) -> None:
        prefills = [engine.id for engine in self.world.engines.values() if engine.slot == "p"]
        self.world.new_decode(self.world.decodes[d], key, prompt, prefills[0] if stale else prefills[-1])

    @rule(key=st.sampled_from(KEYS))
    def prefill_never_begins(self, key: str) -> None:
        self.world.prefill.step.ended.append(Ended(self.world.fresh("P"), key, "aborted"))

    @rule(n=Some, ready=st.sampled_from([True, True, True, False]))
    def prefill_finishes(self, n: int, ready: bool) -> None:
        request = pick((r for r in self.world.prefill.prefills.values() if r.state == "prefilling"), n)
        if request is not None:
            self.world.finish_prefill(request, ready=ready)

    @rule(n=Some)
    def prefill_resumes(self, n: int) -> None:
        request = pick((r for r in self.world.prefill.prefills.values() if r.state == "prefilling"), n)
        if request is not None:
            self.world.prefill.step.prefilling.append(Prefilling(request.id, request.key, request.prompt[1]))

    @rule(d=st.integers(0, 1), n=Some, hit=st.sampled_from([0, 0, 1, 9]))
    def decode_allocates(self, d: int, n: int, hit: int) -> None:
        engine = self.world.decodes[d]
        request = pick((r for r in engine.receives.values() if r.state == "waiting"), n)
        if request is not None:
            self.world.receive(engine, request, hit)

    @rule(d=st.integers(0, 1), n=Some)
    def decode_gives_up(self, d: int, n: int) -> None:
        engine = self.world.decodes[d]
        live = (r for r in engine.receives.values() if r.state in ("waiting", "receiving") and not r.given_up)
        request = pick(live, n)
        if request is not None:
            self.world.give_up(engine, request)

    @rule(slot=st.sampled_from(["p", "d0", "d1"]))
    def engine_step(self, slot: str) -> None:
        self.world.engine_step(self.world.slots[slot])

    @rule(n=PickedRank)
    def one_round(self, n: int) -> None:
        self.world.now += 0.06
        self.world.round(pick(self.world.ranks(), n))

    # The network and NIXL.

    @rule(n=Some)
    def one_packet(self, n: int) -> None:
        packet = pick(self.world.network, n)
        if packet is not None:
            self.world.network.remove(packet)
            self.world.deliver(packet)
            self.world.round(packet.to)

    @rule(n=Some)
    def lose(self, n: int) -> None:
        packet = pick(self.world.network, n)
        if packet is not None:
            self.world.network.remove(packet)

    @rule(n=Some)
    def double(self, n: int) -> None:
        packet = pick(self.world.network, n)
        if packet is not None:
            self.world.network.insert(n % len(self.world.network), Packet(packet.to, packet.data, packet.at))

    @rule(n=Some)
    def land(self, n: int) -> None:
        write = pick((w for w in self.world.writes if w.may_land), n)
        if write is not None:
            self.world.land(write)

    @rule(n=Some)
    def write_fails(self, n: int) -> None:
        write = pick((w for w in self.world.writes if w.may_land), n)
        if write is not None:
            self.world.fail(write)

    @rule(fault=st.sampled_from(["raise", "part", "refuse"]))
    def next_post_fails(self, fault: str) -> None:
        self.world.faults = [fault]

    @rule(slot=st.sampled_from(["d0", "d1"]), broken=st.booleans())
    def cut(self, slot: str, broken: bool) -> None:
        if broken:
            self.world.break_connections(slot)
        else:
            self.world.cut.add(slot)

    @precondition(lambda self: self.world.cut)
    @rule()
    def heal(self) -> None:
        self.world.cut.clear()

    @rule(seconds=st.sampled_from([0.0, 3.0, 20.0]))
    def handshakes_take(self, seconds: float) -> None:
        self.world.handshake_s = seconds

    @rule(slot=st.sampled_from(["p", "d0", "d1"]))
    def restart(self, slot: str) -> None:
        self.world.restart(slot)

    @rule(n=PickedRank)
    def pause(self, n: int) -> None:
        pick(self.world.ranks(), n).paused = True

    @rule()
    def resume(self) -> None:
        for rank in self.world.ranks():
            rank.paused = False

    @rule(n=PickedRank, data=st.binary(max_size=8), kind=st.sampled_from(b"RZDFCALHX"))
    def nonsense(self, n: int, data: bytes, kind: int) -> None:
        rank = pick(self.world.ranks(), n)
        before = self.snapshot(rank)
        foreign = wire.Done(key="none", attempt=0, writer=0, writers=1, bytes=1)
        for junk in (data, wire.PREFIX + bytes((wire.WIRE_VERSION, kind)) + data, wire.encode(foreign)):
            with contextlib.suppress(wire.WireError):
                if isinstance(wire.decode(junk), wire.RegisterZero | wire.Heartbeat):
                    continue
            rank.writer._dispatch(junk, self.world.now)
        assert self.snapshot(rank) == before

    @rule(n=PickedRank, attempt=st.integers(0, 3), key=st.sampled_from(KEYS))
    def misplaced(self, n: int, attempt: int, key: str) -> None:
        """A message to the wrong side, or about an attempt that was never made."""
        rank = pick(self.world.ranks(), n)
        before = self.snapshot(rank)
        if rank.engine.slot == "p":
            rank.writer._dispatch(wire.encode(wire.Done(key, attempt, 0, 1, 1)), self.world.now)
            rank.writer._dispatch(wire.encode(wire.Alive(key, attempt, "ready")), self.world.now)
        else:
            rank.writer._dispatch(wire.encode(wire.Done(key, 1000 + attempt, 0, 1, 1)), self.world.now)
            rank.writer._dispatch(wire.encode(wire.Failed(key, 1000 + attempt, 0, 1, "aborted")), self.world.now)
        assert self.snapshot(rank) == before

    def snapshot(self, rank: Rank) -> Any:
        sides = [vars(side) for side in (rank.writer.prefill, rank.writer.decode)]
        return repr((sides, len(self.world.network), len(self.world.writes), rank.ledger.counts().inflight))

    # Time.

    @rule(seconds=st.sampled_from([1, 1, 3, 8]), deliver=st.sampled_from([True, True, False]), land=st.booleans())
    def time_passes(self, seconds: int, deliver: bool, land: bool) -> None:
        for _ in range(seconds):
            self.world.pass_second(deliver=deliver, land=land)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        assert not self.world.violations, "\n".join(self.world.violations)
        for engine in self.world.engines.values():
            for rank in engine.ranks:
                counts = rank.ledger.counts()
                assert not counts.illegal, f"{engine.id}: {counts.illegal}"

    def finish(self) -> None:
        try:
            if hasattr(self, "world") and not self.world.violations:
                self.world.settle()
                self.holds()
                assert not list(self.world.leftovers()), "\n".join(self.world.leftovers())
        finally:
            self.quiet.close()

    def teardown(self) -> None:
        self.finish()


Transfers.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestTransfers = Transfers.TestCase


# What a long run does, and how often; faults are left out of some runs, so that others get far.
WORK = {
    "both_legs": 8,
    "prefill_leg": 1,
    "decode_leg": 1,
    "prefill_finishes": 16,
    "decode_allocates": 4,
    "decode_gives_up": 2,
    "engine_step": 10,
    "one_round": 10,
    "one_packet": 12,
    "land": 6,
    "time_passes": 5,
}
FAULTS = {
    "prefill_never_begins": 1,
    "prefill_resumes": 1,
    "lose": 3,
    "double": 3,
    "write_fails": 2,
    "next_post_fails": 1,
    "cut": 1,
    "heal": 3,
    "handshakes_take": 1,
    "restart": 0.4,
    "pause": 1,
    "resume": 1,
    "nonsense": 0.3,
    "misplaced": 0.3,
}


def arguments(name: str, random: Random, keys: list[str]) -> dict[str, Any]:
    """Values for a rule of `Transfers`, as its strategies would give."""
    every: dict[str, Any] = {
        "n": random.randrange(1 << 10),
        "key": random.choice(keys),
        "prompt": random.choice(PROMPTS),
        "d": random.randrange(2),
        "hit": random.choice([0, 0, 1, 9]),
        "stale": random.random() < 0.1,
        "ready": random.random() < 0.8,
        "slot": random.choice(["d0", "d1"] if name == "cut" else ["p", "d0", "d1"]),
        "fault": random.choice(["raise", "part", "refuse"]),
        "broken": random.random() < 0.7,
        "seconds": random.choice([0.0, 0.0, 3.0, 20.0] if name == "handshakes_take" else [1, 1, 1, 3, 8]),
        "data": random.randbytes(random.randrange(8)),
        "kind": random.choice(b"RZDFCALHX"),
        "attempt": random.randrange(4),
        "deliver": random.random() < 0.7,
        "land": random.random() < 0.5,
    }
    names = inspect.signature(getattr(Transfers, name)).parameters
    return {name: value for name, value in every.items() if name in names}


def long_run(seed: int, *, steps: int = 250) -> Counter[str]:
    """A run of weighted chance; the same for the same seed. Returns what happened."""
    random = Random(seed)
    machine = Transfers()
    machine.begin(random.choice([(1, 1), (2, 1), (1, 2), (2, 2)]))
    weights = WORK | {name: weight for name, weight in FAULTS.items() if random.random() < 0.5}
    keys = [f"key {number}" for number in range(random.choice([3, 10, 40]))]
    try:
        for name in random.choices(list(weights), list(weights.values()), k=steps):
            getattr(machine, name)(**arguments(name, random, keys))
            machine.holds()
    except BaseException:
        machine.quiet.close()
        raise
    machine.finish()
    return machine.world.seen


def test_long_runs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(2 * EXAMPLES):
        try:
            seen += long_run(seed)
        except Exception as error:
            raise AssertionError(f"long_run({seed}): {error}") from error
    # Each run reaches what it is for, on average.
    wanted = {
        "received": 2.0,
        "the client left": 2.0,
        "the client left; prefill does not answer, blocks kept": 0.1,
        "no progress for 6 s": 0.1,
        "no progress for 6 s, blocks kept": 1.0,
        "duplicate": 1.0,
        "mismatch": 0.1,
        "expired": 0.05,
        "transfer": 0.05,
        "invalid": 0.05,
        "aborted": 1.0,
        "cannot reach the prefill engine p-": 0.2,
        "lost the prefill engine p-, blocks kept": 0.2,
    }
    assert {kind: seen[kind] for kind, least in wanted.items() if seen[kind] < least * 2 * EXAMPLES} == {}


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_simulation_moves_kv_when_nothing_goes_wrong(shape: tuple[int, int]) -> None:
    world = World(*shape)
    for number, engine in enumerate(world.decodes):
        world.new_decode(engine, KEYS[number], PROMPTS[number], world.prefill.id)
        world.receive(engine, next(iter(engine.receives.values())), number)
        world.new_prefill(KEYS[number], PROMPTS[number])
    requests = [request for engine in world.decodes for request in engine.receives.values()]
    for _ in range(3):
        world.pass_second(deliver=True, land=True)
    for prefill in list(world.prefill.prefills.values()):
        world.finish_prefill(prefill, ready=True)
    for _ in range(5):
        world.pass_second(deliver=True, land=True)
    assert not world.violations
    assert [all(entry.ok for entry in request.settled.values()) for request in requests] == [True, True]
    assert not list(world.leftovers())
