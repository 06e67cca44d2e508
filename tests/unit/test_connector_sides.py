"""The prefill and the decode side of a transfer, one fault at a time. F-numbers are those of the list of known faults.

Each side is alone here, with a transport that does what the test says. See test_connector_machine.py for both together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import pytest
from pdctl_connector import decode_side, prefill_side, wire
from pdctl_connector.decode_side import DecodeSide, Settled
from pdctl_connector.ledger import Ledger
from pdctl_connector.prefill_side import Posted, PrefillSide
from pdctl_connector.step import Ended, GivenUp, Peer, Prefilling, Ready, Receive

State = Literal["ready", "connecting", "failed"]

LEASE_S = 30.0
PARKED_S = 60.0
TIMEOUT_S = 30.0
HASH = wire.token_hash(range(32))


class PrefillNixl:
    """What the prefill side sees of NIXL; WRITEs are active until the test says otherwise."""

    def __init__(self) -> None:
        self.states: dict[str, State] = {}
        self.writer_of = (0, 1)
        self.bad_blocks = ""
        self.post_error: Exception | None = None
        self.post_failed = ""
        self.handles_each = 1
        self.posts: list[tuple[str, tuple[list[int], ...], wire.Register]] = []
        self.handles: dict[int, str] = {}
        self.sent: list[tuple[str, wire.Message]] = []
        self.lossy: set[str] = set()
        self.poll_errors: dict[int, Exception] = {}
        self.connect_error: Exception | None = None

    def connect(self, registration: wire.Register | wire.Cancel) -> State:
        if self.connect_error is not None:
            raise self.connect_error
        return self.states.get(registration.engine_id, "ready")

    def send(self, engine_id: str, message: wire.Message) -> bool:
        wire.encode(message)
        if engine_id in self.lossy:
            return False
        self.sent.append((engine_id, message))
        return True

    def writers(self, tp_size: int) -> tuple[int, int]:
        return self.writer_of

    def refusal(self, registration: wire.Register) -> str:
        return self.bad_blocks

    def post(self, request_id: str, block_ids: tuple[list[int], ...], registration: wire.Register) -> Posted:
        if self.post_error is not None:
            raise self.post_error
        self.posts.append((request_id, block_ids, registration))
        made = tuple(range(len(self.handles), len(self.handles) + self.handles_each))
        self.handles.update(dict.fromkeys(made, "active"))
        return Posted(made, 2 * len(made), 100 * len(made), self.post_failed)

    def poll(self, handle: int) -> Any:
        if handle in self.poll_errors:
            raise self.poll_errors[handle]
        return self.handles[handle]

    def take(self, kind: str = "") -> list[wire.Message]:
        """What was sent since the last call, but ALIVE unless asked for."""
        taken = [m for _, m in self.sent if (m.kind == kind if kind else m.kind != "ALIVE")]
        self.sent.clear()
        return taken


class Prefill:
    """A prefill side, its transport, and the time."""

    def __init__(self, *, lease_s: float = LEASE_S, tp_size: int | None = None) -> None:
        self.now = 1000.0
        self.nixl = PrefillNixl()
        self.ledger = Ledger(clock=lambda: self.now)
        self.side = PrefillSide(self.nixl, self.ledger, lease_s=lease_s, parked_s=PARKED_S, tp_size=tp_size)

    def begins(self, request_id: str = "P1", key: str = "k") -> None:
        self.side.on_prefilling(Prefilling(request_id, key, 32), self.now)

    def ready(self, request_id: str = "P1", key: str = "k", tokens: int = 32, hashed: bytes = HASH) -> None:
        self.side.on_ready(Ready(request_id, key, ([5, 6],), tokens, hashed), self.now)

    def ended(self, request_id: str = "P1", key: str = "k", reason: str = "aborted") -> None:
        self.side.on_ended(Ended(request_id, key, reason), self.now)

    def gets(self, message: wire.Message) -> str:
        return self.side.on_message(message, self.now)

    def passes(self, seconds: float, step: float = 0.5) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + step, until)
            self.side.tick(self.now)

    @property
    def idle(self) -> bool:
        return not (self.side.expecting or self.side.in_flight)


class DecodeNixl:
    """What the decode side sees of NIXL."""

    def __init__(self) -> None:
        self.states: dict[str, State] = {}
        self.sent: list[wire.Message] = []
        self.told_to: list[str] = []
        self.lossy = False
        self.gone_engines: set[str] = set()
        self.on_loss: Any = None

    def reach(self, peer: Peer) -> State:
        return self.states.get(peer.engine_id, "ready")

    def why_failed(self, peer: Peer) -> str:
        return "refused"

    def tell(self, peer: Peer, message: wire.Message) -> bool:
        wire.encode(message)
        if self.lossy:
            if self.on_loss is not None:
                self.on_loss()
            return False
        self.sent.append(message)
        self.told_to.append(peer.engine_id)
        return True

    def gone(self, peer: Peer) -> bool:
        return peer.engine_id in self.gone_engines

    def take(self, *kinds: str) -> list[wire.Message]:
        """What was sent since the last call, but heartbeats unless asked for."""
        taken = [m for m in self.sent if (kind_of(m) in kinds if kinds else kind_of(m) != "HB")]
        self.sent.clear()
        return taken


class Decode:
    """A decode side, its transport, and the time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.nixl = DecodeNixl()
        self.ledger = Ledger(clock=lambda: self.now)
        self.side = DecodeSide(
            self.nixl,
            self.ledger,
            engine_id="D",
            host="d",
            port=5600,
            tp_size=1,
            tp_rank=0,
            timeout_s=TIMEOUT_S,
        )

    def wants(self, request_id: str = "D1", key: str = "k", attempt: int = 0, blocks: list[int] | None = None) -> None:
        wanted = [1, 2] if blocks is None else blocks
        self.side.on_receive(Receive(request_id, key, attempt, PEER, (wanted,), (0,), 32, HASH), self.now)

    def gives_up(self, request_id: str = "D1", key: str = "k", attempt: int = 0) -> None:
        self.side.on_given_up(GivenUp(request_id, key, attempt, PEER), self.now)

    def gets(self, message: wire.Message) -> str:
        return self.side.on_message(message, self.now)

    def passes(self, seconds: float, step: float = 0.5) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + step, until)
            self.side.tick(self.now)

    def settled(self) -> list[tuple[str, bool, bool]]:
        return [(entry.request_id, entry.ok, entry.fenced) for entry in self.side.take_settled()]


PEER = Peer("P", "p", 5600, 1)


def kind_of(message: wire.Message) -> str:
    return type(message).kind if hasattr(type(message), "kind") else "HB"


def register(key: str = "k", attempt: int = 0, engine: str = "D", **changes: Any) -> wire.Register:
    values: dict[str, Any] = {
        "key": key,
        "attempt": attempt,
        "engine_id": engine,
        "request_id": f"{engine}-{key}-{attempt}",
        "host": engine.lower(),
        "port": 5600,
        "tp_size": 1,
        "tp_rank": 0,
        "block_ids": [[1, 2]],
        "first_block": [0],
        "prompt_tokens": 32,
        "token_hash": HASH,
    }
    return wire.Register(**values | changes)


def cancel(key: str = "k", attempt: int = 0, engine: str = "D", tp_size: int = 1) -> wire.Cancel:
    return wire.Cancel(key=key, attempt=attempt, engine_id=engine, host=engine.lower(), port=5600, tp_size=tp_size)


def zero(key: str = "k", attempt: int = 0, engine: str = "D") -> wire.RegisterZero:
    return wire.RegisterZero(key=key, attempt=attempt, engine_id=engine, request_id="d")


def done(key: str = "k", attempt: int = 0, writer: int = 0, writers: int = 1) -> wire.Done:
    return wire.Done(key=key, attempt=attempt, writer=writer, writers=writers, bytes=10)


def fail(reason: str = "aborted", attempt: int = 0, writer: int = 0, writers: int = 1) -> wire.Failed:
    return wire.Failed(key="k", attempt=attempt, writer=writer, writers=writers, reason=reason)


def ack(state: Any, attempt: int = 0, writer: int = 0, writers: int = 1) -> wire.CancelAck:
    return wire.CancelAck(key="k", attempt=attempt, writer=writer, writers=writers, state=state)


def alive(stage: Any = "prefilling", attempt: int = 0) -> wire.Alive:
    return wire.Alive(key="k", attempt=attempt, stage=stage)


def outcome(ledger: Ledger, position: int = 0) -> str:
    record = ledger.recent()[position]
    return str(record["outcome"])


def reasons(messages: list[wire.Message]) -> list[tuple[str, int, str]]:
    return [(m.key, m.attempt, m.reason) for m in messages if isinstance(m, wire.Failed)]


@pytest.fixture
def prefill() -> Any:
    made = Prefill()
    yield made
    assert not made.ledger.counts().illegal


@pytest.fixture
def decode() -> Any:
    made = Decode()
    yield made
    assert not made.ledger.counts().illegal


# --- prefill: the way it should go -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["registration", "prefill", "blocks"])
def test_prefill_writes_whatever_comes_first(prefill: Prefill, first: str) -> None:
    if first == "registration":
        assert prefill.gets(register()) == "accepted"
    if first != "blocks":
        prefill.begins()
    if first == "prefill":
        assert prefill.gets(register()) == "accepted"
    prefill.ready()
    if first == "blocks":
        assert prefill.nixl.posts == []
        assert prefill.gets(register()) == "accepted"
    assert [(request_id, blocks) for request_id, blocks, _ in prefill.nixl.posts] == [("P1", ([5, 6],))]
    assert prefill.side.in_flight
    assert prefill.side.busy_engines() == {"D"}
    assert prefill.side.engine_of(0) == "D"
    prefill.passes(100)
    assert prefill.side.take_sent() == [], "a lease does not end a WRITE (F08)"
    prefill.nixl.handles[0] = "done"
    prefill.passes(0.1)
    assert prefill.side.take_sent() == ["P1"]
    assert prefill.side.take_sent() == []
    assert prefill.idle
    assert outcome(prefill.ledger) == "completed"
    assert prefill.nixl.take() == [], "DONE travels with the WRITE"
    assert prefill.side.written == {"posted": 2, "completed": 2, "failed": 0, "bytes": 100}


def test_prefill_waits_for_all_handles_of_a_request(prefill: Prefill) -> None:
    """F34: one failed handle is reported while another still reads."""
    prefill.nixl.handles_each = 2
    prefill.gets(register())
    prefill.ready()
    prefill.nixl.handles[0] = "failed"
    prefill.passes(1)
    assert prefill.side.take_sent() == []
    assert prefill.nixl.take() == []
    prefill.nixl.handles[1] = "done"
    prefill.passes(1)
    assert prefill.side.take_sent() == ["P1"]
    assert reasons(prefill.nixl.take()) == [("k", 0, "transfer")]


def test_prefill_says_done_itself_when_there_was_nothing_to_write(prefill: Prefill) -> None:
    """F32: no WRITE, so no message that travels with it."""
    prefill.nixl.handles_each = 0
    prefill.gets(register())
    prefill.ready()
    assert prefill.nixl.take() == [wire.Done("k", 0, 0, 1, 0)]
    assert prefill.side.take_sent() == ["P1"]


def test_matched_is_a_stage_of_its_own_while_the_connection_is_made(prefill: Prefill) -> None:
    prefill.nixl.states["D"] = "connecting"
    prefill.gets(register())
    prefill.ready()
    assert prefill.ledger.stage("prefill", "k", 0) == "matched"
    prefill.nixl.states["D"] = "ready"
    prefill.passes(0.1)
    assert prefill.ledger.stage("prefill", "k", 0) == "posted"


def test_ready_twice_changes_nothing(prefill: Prefill) -> None:
    prefill.gets(register())
    prefill.ready()
    prefill.ready()
    assert len(prefill.nixl.posts) == 1


# --- prefill: the request ends without KV ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["registered first", "ended first", "never began"])
def test_prefill_that_ends_without_kv_tells_decode(prefill: Prefill, order: str) -> None:
    """F04: P's leg is aborted or refused, and D waits."""
    if order == "ended first":
        prefill.begins()
        prefill.ended()
    prefill.gets(register())
    if order == "registered first":
        prefill.begins()
    if order != "ended first":
        prefill.ended()
    assert reasons(prefill.nixl.take()) == [("k", 0, "aborted")]
    assert prefill.side.take_sent() == [], "its blocks were never ours"
    assert prefill.idle


def test_ended_after_ready_changes_nothing(prefill: Prefill) -> None:
    prefill.ready()
    prefill.ended()
    assert prefill.gets(register()) == "accepted"
    assert len(prefill.nixl.posts) == 1


def test_the_end_of_one_request_is_not_the_end_of_a_live_one_with_its_key(prefill: Prefill) -> None:
    """F13: a retry that is refused at once, while the first one is being computed."""
    prefill.begins("P1")
    prefill.ended("P2")
    prefill.gets(register())
    prefill.ready("P1")
    assert len(prefill.nixl.posts) == 1


def test_a_new_try_makes_the_end_of_the_former_one_forgotten(prefill: Prefill) -> None:
    prefill.begins("P1")
    prefill.ended("P1")
    prefill.begins("P2")
    prefill.gets(register(attempt=1))
    prefill.ready("P2")
    assert len(prefill.nixl.posts) == 1


def test_a_reason_that_is_no_word_of_the_protocol_still_reaches_decode(prefill: Prefill) -> None:
    prefill.gets(register())
    prefill.ended(reason="NO SUCH REASON " * 50)
    assert reasons(prefill.nixl.take()) == [("k", 0, "internal")]


# --- prefill: leases -------------------------------------------------------------------------------------------------


def test_a_registration_after_the_lease_is_refused_at_once(prefill: Prefill) -> None:
    """F10: D was full, and comes when P has given the blocks up."""
    prefill.ready()
    prefill.passes(LEASE_S - 1)
    assert prefill.side.take_sent() == []
    prefill.passes(2)
    assert prefill.side.take_sent() == ["P1"]
    assert prefill.side.expired == 1
    assert outcome(prefill.ledger) == "expired"
    assert prefill.gets(register()) == "refused"
    assert reasons(prefill.nixl.take()) == [("k", 0, "expired")]
    assert prefill.nixl.posts == []


def test_a_connection_that_takes_longer_than_the_lease_does_not_lose_the_blocks() -> None:
    """F09: the lease runs out during the handshake back, and the WRITE would read blocks of somebody else."""
    prefill = Prefill(lease_s=1.0)
    prefill.nixl.states["D"] = "connecting"
    prefill.gets(register())
    prefill.ready()
    prefill.passes(5)
    assert prefill.side.take_sent() == []
    prefill.nixl.states["D"] = "ready"
    prefill.passes(0.1)
    assert len(prefill.nixl.posts) == 1


def test_a_connection_that_is_never_made_gives_the_blocks_back(prefill: Prefill) -> None:
    """F23: P cannot reach D's side channel; it neither hangs nor writes later."""
    prefill.nixl.states["D"] = "connecting"
    prefill.gets(register())
    prefill.ready()
    prefill.passes(PARKED_S + 1)
    assert prefill.side.take_sent() == ["P1"]
    prefill.nixl.states["D"] = "ready"
    prefill.passes(0.1)
    assert prefill.nixl.posts == []
    assert reasons(prefill.nixl.take()) == [("k", 0, "handshake")]


@pytest.mark.parametrize("lease_s", [1.0, 30.0])
def test_heartbeats_renew_by_the_shared_key(lease_s: float) -> None:
    """F11: D knows the router's id, P's table had the internal one. Short leases outlive the pause between beats."""
    prefill = Prefill(lease_s=lease_s)
    prefill.ready("internal-id-of-P")
    prefill.gets(wire.Heartbeat(["other", "k"]))
    for _ in range(50):
        prefill.passes(decode_side.HEARTBEAT_S)
        assert prefill.gets(wire.Heartbeat(["k"])) == "accepted"
    assert prefill.side.take_sent() == []
    prefill.passes(lease_s + 10)
    assert prefill.side.take_sent() == ["internal-id-of-P"]


def test_heartbeats_of_others_renew_nothing(prefill: Prefill) -> None:
    prefill.ready()
    for _ in range(20):
        prefill.gets(wire.Heartbeat(["other"]))
        prefill.passes(2)
    assert prefill.side.take_sent() == ["P1"]


def test_a_stopped_process_does_not_let_leases_expire(prefill: Prefill) -> None:
    """F45: P is stopped for longer than its leases; on waking the answers are there already."""
    prefill.ready("P1", "k")
    prefill.gets(register("early"))
    prefill.nixl.states["F"] = "connecting"
    prefill.ready("P2", "far")
    prefill.gets(register("far", engine="F"))
    prefill.gets(zero("nothing"))
    prefill.now += 1000
    prefill.side.postpone(1000)
    prefill.side.tick(prefill.now)
    assert prefill.side.take_sent() == []
    assert prefill.nixl.take() == []
    prefill.gets(register())
    assert [request_id for request_id, *_ in prefill.nixl.posts] == ["P1"]
    prefill.begins("P3", "early")
    prefill.ready("P3", "early")
    assert [request_id for request_id, *_ in prefill.nixl.posts] == ["P1", "P3"]
    prefill.ready("P4", "nothing")
    assert prefill.side.take_sent() == ["P4"]
    prefill.passes(PARKED_S + 1)
    assert prefill.side.take_sent() == ["P2"]


# --- prefill: cancels ------------------------------------------------------------------------------------------------


def test_cancel_of_an_unknown_registration_refuses_it_later(prefill: Prefill) -> None:
    """F03, F12: the registration comes after its cancel, and must never match."""
    assert prefill.gets(cancel()) == "accepted"
    assert prefill.nixl.take() == [ack("cancelled")]
    assert prefill.gets(register()) == "repeated"
    assert prefill.nixl.take() == [ack("cancelled")]
    prefill.ready()
    assert prefill.nixl.posts == []
    # Another try is another matter.
    assert prefill.gets(register(attempt=1)) == "accepted"
    assert len(prefill.nixl.posts) == 1


def test_cancel_of_a_parked_registration(prefill: Prefill) -> None:
    """F02: D gives up before P has begun."""
    prefill.gets(register())
    assert prefill.gets(cancel()) == "accepted"
    assert prefill.nixl.take() == [ack("cancelled")]
    assert prefill.idle
    assert prefill.gets(cancel()) == "repeated"
    assert prefill.nixl.take() == [ack("cancelled")]
    prefill.ready()
    assert prefill.nixl.posts == []


def test_cancel_while_prefilling_frees_the_blocks_as_soon_as_they_are_ours(prefill: Prefill) -> None:
    """F02: D gives up while P computes."""
    prefill.begins()
    prefill.gets(register())
    prefill.gets(cancel())
    assert prefill.nixl.take() == [ack("cancelled")]
    prefill.ready()
    assert prefill.nixl.posts == []
    assert prefill.side.take_sent() == ["P1"]
    assert outcome(prefill.ledger) == "cancelled"
    assert prefill.idle


def test_cancel_while_the_connection_is_made(prefill: Prefill) -> None:
    prefill.nixl.states["D"] = "connecting"
    prefill.gets(register())
    prefill.ready()
    prefill.gets(cancel())
    assert prefill.side.take_sent() == ["P1"]
    prefill.nixl.states["D"] = "ready"
    prefill.passes(1)
    assert prefill.nixl.posts == []
    assert prefill.nixl.take() == [ack("cancelled")], "the answer waits for the connection"


@pytest.mark.parametrize(("state", "answer"), [("done", "completed"), ("failed", "failed")])
def test_cancel_of_a_posted_write_is_answered_when_it_is_over(prefill: Prefill, state: str, answer: str) -> None:
    """F03: while the WRITE may touch D's blocks there is no answer."""
    prefill.gets(register())
    prefill.ready()
    for _ in range(3):
        assert prefill.gets(cancel()) == "accepted"
        prefill.passes(2)
    assert prefill.nixl.take() == []
    prefill.nixl.handles[0] = state
    prefill.passes(0.1)
    assert ack(answer) in prefill.nixl.take()
    assert prefill.gets(cancel()) == "repeated"
    assert prefill.nixl.take() == [ack(answer)], "DONE may be lost: the cancel learns of it"
    assert prefill.side.take_sent() == ["P1"]


def test_cancel_before_decode_had_blocks_frees_prefill(prefill: Prefill) -> None:
    """F30: the client leaves while D queues; nobody will register."""
    prefill.ready()
    prefill.gets(cancel())
    assert prefill.side.take_sent() == ["P1"]
    assert prefill.nixl.take() == [ack("cancelled")]
    assert prefill.idle


def test_a_cancelled_request_does_not_stand_in_the_way_of_the_next_try(prefill: Prefill) -> None:
    """F12: the client tries again under its id before the first try has ended on P."""
    prefill.begins("P1")
    prefill.gets(register(attempt=0))
    prefill.gets(cancel(attempt=0))
    prefill.gets(register(attempt=1))
    prefill.begins("P2")
    prefill.ended("P1")
    prefill.nixl.take()
    prefill.ready("P2")
    assert [(request_id, reg.attempt) for request_id, _, reg in prefill.nixl.posts] == [("P2", 1)]
    assert prefill.nixl.take() == []


def test_cancel_of_one_engine_leaves_the_registration_of_another(prefill: Prefill) -> None:
    prefill.begins()
    prefill.gets(register(engine="D"))
    prefill.gets(cancel(engine="E"))
    prefill.ready()
    assert [reg.engine_id for _, _, reg in prefill.nixl.posts] == ["D"]


# --- prefill: nothing needed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["unknown", "prefilling", "ready"])
def test_decode_that_needs_nothing_frees_prefill(prefill: Prefill, stage: str) -> None:
    """F31: a full prefix hit on D; P's blocks would stay to the end of their lease, and count as expired."""
    if stage != "unknown":
        prefill.begins()
    if stage == "ready":
        prefill.ready()
    assert prefill.gets(zero()) == "accepted"
    if stage != "ready":
        prefill.ready()
    assert prefill.side.take_sent() == ["P1"]
    assert outcome(prefill.ledger) == "completed"
    assert prefill.side.expired == 0
    assert prefill.nixl.take() == [], "no answer is expected"
    # The other ranks of the engine say so too, and a repetition must not free the next request of this key.
    assert prefill.gets(zero()) == "repeated"
    prefill.ready("P2")
    assert prefill.side.take_sent() == []


def test_nothing_needed_does_not_end_a_write_for_somebody(prefill: Prefill) -> None:
    prefill.gets(register(engine="D"))
    prefill.ready()
    assert prefill.gets(zero(engine="E")) == "refused"
    assert prefill.side.in_flight
    prefill.nixl.handles[0] = "done"
    prefill.passes(0.1)
    assert outcome(prefill.ledger) == "completed"


def test_nothing_needed_does_not_take_a_registered_request(prefill: Prefill) -> None:
    prefill.begins()
    prefill.gets(register(engine="D"))
    assert prefill.gets(zero(engine="E")) == "refused"
    prefill.ready()
    assert len(prefill.nixl.posts) == 1


def test_nothing_needed_is_forgotten_when_prefill_does_not_come(prefill: Prefill) -> None:
    prefill.gets(zero())
    prefill.passes(PARKED_S + 1)
    prefill.ready()
    assert prefill.side.take_sent() == []
    prefill.ended("P9", "other")
    assert prefill.gets(zero("other")) == "unknown"


def test_a_registration_under_the_name_of_a_full_hit_gets_no_done(prefill: Prefill) -> None:
    prefill.gets(zero())
    prefill.ready()
    prefill.gets(register())
    assert reasons(prefill.nixl.take()) == [("k", 0, "duplicate")]


# --- prefill: duplicates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registered", ["no", "before", "between", "after"])
@pytest.mark.parametrize("first_is_ready", [False, True])
def test_two_live_prefill_requests_with_one_key_are_both_refused(
    prefill: Prefill, first_is_ready: bool, registered: str
) -> None:
    """F13: nobody can say whose blocks the registration wants."""
    if registered == "before":
        prefill.nixl.states["D"] = "connecting"
        prefill.gets(register())
    prefill.begins("P1")
    if first_is_ready:
        prefill.ready("P1")
    prefill.begins("P2")
    if registered == "between":
        prefill.gets(register())
    if not first_is_ready:
        prefill.ready("P1")
    prefill.ready("P2")
    if registered == "after":
        prefill.gets(register())
    prefill.nixl.states.clear()
    prefill.passes(0.1)
    assert prefill.nixl.posts == []
    assert sorted(prefill.side.take_sent()) == ["P1", "P2"]
    assert reasons(prefill.nixl.take()) == ([] if registered == "no" else [("k", 0, "duplicate")])
    assert prefill.idle
    assert Counter(record["outcome"] for record in prefill.ledger.recent()) == {"failed": 2}


def test_a_duplicate_does_not_touch_a_posted_write(prefill: Prefill) -> None:
    """F13: the first one is being written; the second one gets nothing."""
    prefill.gets(register())
    prefill.ready("P1")
    prefill.begins("P2")
    prefill.ready("P2")
    assert prefill.side.take_sent() == ["P2"]
    prefill.nixl.handles[0] = "done"
    prefill.passes(0.1)
    assert prefill.side.take_sent() == ["P1"]
    assert Counter(record["outcome"] for record in prefill.ledger.recent()) == {"failed": 1, "completed": 1}


@pytest.mark.parametrize(("attempt", "engine"), [(1, "D"), (0, "E")])
@pytest.mark.parametrize("stage", ["parked", "prefilling", "connecting", "posted"])
def test_two_registrations_with_one_key(prefill: Prefill, stage: str, attempt: int, engine: str) -> None:
    """F13: a second D request under the same id, there or on another engine, is refused; the first one is served."""
    if stage == "connecting":
        prefill.nixl.states["D"] = "connecting"
    prefill.gets(register())
    if stage != "parked":
        prefill.begins()
    if stage in ("connecting", "posted"):
        prefill.ready()
    assert prefill.gets(register(attempt=attempt, engine=engine)) == "refused"
    if engine == "E" or stage != "connecting":
        assert reasons(prefill.nixl.take()) == [("k", attempt, "duplicate")]
    prefill.nixl.states.clear()
    prefill.begins()
    prefill.ready()
    prefill.passes(0.1)
    assert [(reg.engine_id, reg.attempt) for _, _, reg in prefill.nixl.posts] == [("D", 0)]


def test_the_same_registration_again_changes_nothing(prefill: Prefill) -> None:
    assert prefill.gets(register()) == "accepted"
    assert prefill.gets(register()) == "repeated"
    prefill.begins()
    assert prefill.gets(register()) == "repeated"
    prefill.ready()
    assert prefill.gets(register()) == "repeated"
    assert len(prefill.nixl.posts) == 1
    assert prefill.nixl.take() == []
    prefill.nixl.handles[0] = "done"
    prefill.passes(0.1)
    # Asked again while it was in flight: DONE may be lost, so it is said once more, and again at each question.
    assert prefill.nixl.take() == [wire.Done("k", 0, 0, 1, 100)]
    assert prefill.gets(register()) == "repeated"
    assert prefill.nixl.take() == [wire.Done("k", 0, 0, 1, 100)]
    assert len(prefill.nixl.posts) == 1


@pytest.mark.parametrize("stage", ["parked", "prefilling", "posted", "completed"])
def test_another_registration_under_a_used_name_never_gets_done(prefill: Prefill, stage: str) -> None:
    """F12: D counts its tries anew; the former try's completion is none of the new one."""
    prefill.gets(register())
    if stage == "prefilling":
        prefill.begins()
    if stage in ("posted", "completed"):
        prefill.ready()
    if stage == "completed":
        prefill.nixl.handles[0] = "done"
        prefill.passes(0.1)
    prefill.nixl.take()
    answer = prefill.gets(register(request_id="another", block_ids=[[7, 8]]))
    if stage == "completed":
        assert reasons(prefill.nixl.take()) == [("k", 0, "duplicate")]
    else:
        assert answer == "refused"
        assert prefill.nixl.take() == []
    assert all(reg.block_ids == [[1, 2]] for _, _, reg in prefill.nixl.posts)


# --- prefill: contents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"prompt_tokens": 31}, {"token_hash": wire.token_hash(range(1, 33))}])
def test_other_tokens_are_refused(prefill: Prefill, changes: dict[str, Any]) -> None:
    """F15, F16: the legs tokenized differently, or P computed another length."""
    prefill.gets(register(**changes))
    prefill.ready()
    assert prefill.nixl.posts == []
    assert reasons(prefill.nixl.take()) == [("k", 0, "mismatch")]
    assert prefill.side.take_sent() == ["P1"]


def test_prompts_without_token_ids_are_compared_by_length(prefill: Prefill) -> None:
    prefill.gets(register(token_hash=b""))
    prefill.ready()
    assert len(prefill.nixl.posts) == 1


def test_blocks_that_decode_cannot_have_are_refused(prefill: Prefill) -> None:
    """F41: block ids outside the memory that D showed at the handshake."""
    prefill.nixl.bad_blocks = "block 9 is outside"
    prefill.gets(register())
    prefill.ready()
    assert prefill.nixl.posts == []
    assert reasons(prefill.nixl.take()) == [("k", 0, "invalid")]


# --- prefill: NIXL fails ---------------------------------------------------------------------------------------------


def test_a_write_that_cannot_be_posted_fails_at_once(prefill: Prefill) -> None:
    """F06, F18: P logged it, and both sides waited."""
    prefill.nixl.post_error = AssertionError("descriptors")
    prefill.gets(register())
    prefill.ready()
    messages = prefill.nixl.take()
    assert reasons(messages) == [("k", 0, "transfer")]
    assert isinstance(messages[0], wire.Failed)
    assert "descriptors" in messages[0].detail
    assert prefill.side.take_sent() == ["P1"]
    assert prefill.idle
    # A repetition learns the same.
    prefill.gets(register())
    assert reasons(prefill.nixl.take()) == [("k", 0, "transfer")]


def test_a_write_that_is_posted_in_part_is_followed_to_its_end(prefill: Prefill) -> None:
    """F06: what was posted reads the blocks, whatever became of the rest."""
    prefill.nixl.post_failed = "rank 1 could not be written to"
    prefill.gets(register())
    prefill.ready()
    prefill.passes(1)
    assert prefill.side.take_sent() == []
    assert prefill.nixl.take() == []
    prefill.nixl.handles[0] = "done"
    prefill.passes(0.1)
    assert reasons(prefill.nixl.take()) == [("k", 0, "transfer")]
    assert prefill.side.take_sent() == ["P1"]
    assert prefill.side.written == {"posted": 2, "completed": 0, "failed": 2, "bytes": 0}


def test_a_write_that_fails_is_told(prefill: Prefill) -> None:
    """F07: P kept the blocks to the end of the lease, D was not told."""
    prefill.gets(register())
    prefill.ready()
    prefill.nixl.handles[0] = "failed"
    prefill.passes(0.1)
    assert reasons(prefill.nixl.take()) == [("k", 0, "transfer")]
    assert prefill.side.take_sent() == ["P1"]
    assert outcome(prefill.ledger) == "failed"


def test_a_write_that_does_not_move_keeps_its_blocks(prefill: Prefill) -> None:
    """F44: D is stopped, or packets are dropped: NIXL says nothing, and no time proves anything."""
    prefill.gets(register())
    prefill.ready()
    prefill.gets(cancel())
    prefill.passes(2000, step=10)
    assert prefill.side.take_sent() == []
    assert prefill.side.in_flight


def test_a_failure_is_told_once_the_connection_is_back(prefill: Prefill) -> None:
    """F07, F27: the break that ends the WRITE also ends the way to say so."""
    prefill.gets(register())
    prefill.ready()
    prefill.nixl.lossy.add("D")
    prefill.nixl.handles[0] = "failed"
    prefill.passes(1)
    assert prefill.side.take_sent() == ["P1"]
    assert prefill.nixl.take() == []
    prefill.nixl.lossy.clear()
    prefill.nixl.states["D"] = "failed"
    prefill.passes(1)
    prefill.nixl.states["D"] = "ready"
    prefill.passes(1)
    assert reasons(prefill.nixl.take()) == [("k", 0, "transfer")]
    assert prefill.idle


def test_an_answer_does_not_wait_for_ever(prefill: Prefill) -> None:
    prefill.nixl.states["D"] = "failed"
    prefill.gets(cancel())
    assert prefill.side.expecting
    prefill.passes(prefill_side.ANSWER_S + 1)
    assert prefill.idle
    prefill.nixl.states.clear()
    prefill.passes(1)
    assert prefill.nixl.take() == []


@pytest.mark.parametrize("stage", ["parked", "prefilling", "connecting"])
@pytest.mark.parametrize("gone", [False, True])
def test_an_engine_that_cannot_be_reached_fails_what_waits_for_it(prefill: Prefill, stage: str, gone: bool) -> None:
    """F23, F26: the handshake back failed, or another engine has taken its place."""
    prefill.nixl.states["D"] = "connecting"
    prefill.gets(register())
    if stage != "parked":
        prefill.begins()
    if stage == "connecting":
        prefill.ready()
    prefill.nixl.states["D"] = "failed"
    prefill.side.engine_lost("D", "no answer", prefill.now, gone=gone)
    if stage != "connecting":
        prefill.ready()
    assert prefill.nixl.posts == []
    if stage != "parked":
        assert prefill.side.take_sent() == ["P1"]
        assert outcome(prefill.ledger) == "failed"
    prefill.nixl.states["D"] = "ready"
    prefill.passes(0.1)
    # A passing trouble: the answer follows. One that is gone has nobody to tell.
    assert reasons(prefill.nixl.take()) == ([] if gone else [("k", 0, "handshake")])


def test_a_lost_engine_leaves_posted_writes_and_other_engines_alone(prefill: Prefill) -> None:
    prefill.gets(register("a", engine="D"))
    prefill.ready("P1", "a")
    prefill.gets(register("b", engine="E"))
    prefill.side.engine_lost("D", "no answer", prefill.now)
    assert prefill.side.in_flight, "NIXL says when the WRITE is over"
    prefill.ready("P2", "b")
    assert len(prefill.nixl.posts) == 2


def test_a_bug_with_one_request_does_not_stop_the_others(prefill: Prefill) -> None:
    """F17, F18: what one of them raises must not cost its siblings; it fails, and the caller counts it."""
    for name in ("a", "b"):
        prefill.nixl.states["D"] = "connecting"
        prefill.gets(register(name))
        prefill.ready(f"P-{name}", name)
    prefill.gets(register("c", engine="E"))
    prefill.ready("P-c", "c")
    prefill.nixl.poll_errors[0] = KeyError("handle")
    prefill.nixl.states.clear()
    with pytest.raises(KeyError):
        prefill.side.tick(prefill.now + 0.1)
    assert [request_id for request_id, *_ in prefill.nixl.posts] == ["P-c", "P-a", "P-b"]
    assert prefill.side.take_sent() == []
    prefill.nixl.poll_errors.clear()
    prefill.nixl.handles[0] = "done"
    prefill.passes(0.1)
    assert prefill.side.take_sent() == ["P-c"]


def test_a_bug_before_posting_fails_the_request(prefill: Prefill) -> None:
    """F18: internal error, told and over; the blocks come back."""
    prefill.gets(register())
    prefill.begins()
    prefill.nixl.connect_error = KeyError("engine")
    with pytest.raises(KeyError):
        prefill.ready()
    assert prefill.side.take_sent() == ["P1"]
    prefill.nixl.connect_error = None
    prefill.gets(register())
    assert reasons(prefill.nixl.take()) == [("k", 0, "internal")]


# --- prefill: several ranks ------------------------------------------------------------------------------------------


def test_prefill_says_who_it_is_among_how_many(prefill: Prefill) -> None:
    """F36: D counts what the writers say, never what a router passed on."""
    prefill.nixl.writer_of = (3, 4)
    prefill.gets(register())
    prefill.ended()
    message = prefill.nixl.take()[0]
    assert isinstance(message, wire.Failed)
    assert (message.writer, message.writers) == (3, 4)
    prefill.gets(cancel(attempt=9))
    message = prefill.nixl.take()[0]
    assert isinstance(message, wire.CancelAck)
    assert (message.writer, message.writers) == (3, 4)


@pytest.mark.parametrize("parked", [False, True])
def test_a_write_to_several_ranks_waits_for_all_of_them(parked: bool) -> None:
    """A rank that has not registered may have failed the request already, and freed the blocks (invariant 2)."""
    prefill = Prefill(tp_size=1)
    if not parked:
        prefill.ready()
    assert prefill.gets(register(tp_size=2, tp_rank=1)) == "accepted"
    assert prefill.gets(register(tp_size=2, tp_rank=1)) == "repeated"
    if parked:
        prefill.ready()
    assert prefill.nixl.posts == []
    assert prefill.gets(register(tp_size=2, tp_rank=0)) == "accepted"
    assert len(prefill.nixl.posts) == 1


def test_a_rank_that_never_registers_ends_in_a_failure() -> None:
    prefill = Prefill(tp_size=1)
    prefill.ready()
    prefill.gets(register(tp_size=2, tp_rank=1))
    prefill.passes(PARKED_S - 1)
    assert prefill.nixl.sent == [], "no ALIVE: it is not getting on, and decode's deadline must pass"
    prefill.passes(2)
    assert prefill.side.take_sent() == ["P1"]
    assert reasons(prefill.nixl.take()) == [("k", 0, "handshake")]


def test_one_registration_is_enough_when_prefill_has_more_ranks() -> None:
    prefill = Prefill(tp_size=4)
    prefill.gets(register(tp_size=2, tp_rank=1))
    prefill.ready()
    assert len(prefill.nixl.posts) == 1


# --- prefill: ALIVE --------------------------------------------------------------------------------------------------


def test_alive_is_said_until_the_write_is_posted(prefill: Prefill) -> None:
    """F05: a slow prefill is not a fault; a WRITE that does not move is."""
    prefill.gets(register())
    prefill.passes(10)
    assert prefill.nixl.sent == [], "no such request: nothing to say"
    prefill.begins()
    prefill.passes(60)
    said = prefill.nixl.take("ALIVE")
    assert 60 / prefill_side.ALIVE_S - 2 <= len(said) <= 60 / prefill_side.ALIVE_S + 2
    assert {m.stage for m in said if isinstance(m, wire.Alive)} == {"prefilling"}
    prefill.ready()
    assert prefill.nixl.take("ALIVE") == [alive("posted")]
    prefill.passes(60)
    assert prefill.nixl.sent == []


def test_alive_is_not_said_for_an_engine_that_hangs(prefill: Prefill) -> None:
    """F05: its writer lives on, but nothing is getting on; decode's deadline must pass."""
    prefill.gets(register())
    prefill.begins()
    prefill.side.engine_at = prefill.now
    prefill.passes(PARKED_S / 2)
    assert prefill.nixl.take("ALIVE")
    prefill.passes(60)
    assert prefill.nixl.take("ALIVE") == []
    prefill.side.engine_at = prefill.now
    prefill.passes(4)
    assert prefill.nixl.take("ALIVE")


def test_alive_is_not_said_without_a_registration_or_a_connection(prefill: Prefill) -> None:
    prefill.begins()
    prefill.passes(5)
    prefill.nixl.states["D"] = "connecting"
    prefill.gets(register())
    prefill.passes(5)
    assert prefill.nixl.sent == []


# --- prefill: bounds and the end -------------------------------------------------------------------------------------


def test_a_registration_without_prefill_request_is_forgotten_and_told(prefill: Prefill) -> None:
    """F04, F12: the D leg alone."""
    prefill.gets(register())
    prefill.passes(PARKED_S + 1)
    assert reasons(prefill.nixl.take()) == [("k", 0, "aborted")]
    prefill.ready()
    assert prefill.nixl.posts == []
    prefill.passes(LEASE_S + 1)
    assert prefill.idle


def test_parked_registrations_are_bounded(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """F41: a table that anybody can fill."""
    monkeypatch.setattr(prefill_side, "PARKED_LIMIT", 5)
    results = Counter(prefill.gets(register(f"k{number}")) for number in range(20))
    assert results == {"accepted": 5, "refused": 15}
    assert {reason for _, _, reason in reasons(prefill.nixl.take())} == {"overloaded"}
    results = Counter(prefill.gets(zero(f"z{number}")) for number in range(20))
    assert results == {"accepted": 5, "refused": 15}


def test_answers_that_wait_are_bounded(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_side, "ENGINES_LIMIT", 3)
    monkeypatch.setattr(prefill_side, "PARKED_LIMIT", 4)
    for engine in range(10):
        prefill.nixl.states[f"E{engine}"] = "connecting"
        for number in range(10):
            prefill.gets(cancel(f"k{number}", engine=f"E{engine}"))
    prefill.nixl.states.clear()
    prefill.passes(0.1)
    assert len(prefill.nixl.sent) == 12


def test_tombstones_are_bounded_and_end(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_side, "TOMBSTONE_LIMIT", 10)
    for number in range(30):
        prefill.gets(cancel(f"k{number}"))
        prefill.ended(f"P{number}", f"e{number}")
    prefill.passes(0.1)
    prefill.nixl.take()
    assert prefill.gets(cancel("k29")) == "repeated"
    assert prefill.gets(register("e29")) == "refused"
    assert prefill.gets(register("e3")) == "accepted", "forgotten: it waits for its request"
    prefill.passes(prefill_side.TOMBSTONE_S + 1, step=100)
    assert prefill.gets(register("k29")) == "accepted"
    assert prefill.gets(register("e29")) == "accepted"


def test_shutdown_tells_all_that_wait_and_lets_writes_end(prefill: Prefill) -> None:
    """F42: intake stops; what is in flight is followed to its end."""
    prefill.gets(register("flying"))
    prefill.ready("P1", "flying")
    prefill.gets(register("parked"))
    prefill.gets(register("prefilling"))
    prefill.begins("P2", "prefilling")
    prefill.ready("P3", "unmatched")
    prefill.side.shut_down(prefill.now)
    assert sorted(reasons(prefill.nixl.take())) == [("parked", 0, "shutdown"), ("prefilling", 0, "shutdown")]
    assert prefill.side.take_sent() == ["P3"]
    assert prefill.side.in_flight
    # What comes later is refused, and its blocks come back at once.
    assert prefill.gets(register("late")) == "refused"
    prefill.ready("P2", "prefilling")
    prefill.ready("P4", "new")
    assert prefill.side.take_sent() == ["P2", "P4"]
    assert reasons(prefill.nixl.take()) == [("late", 0, "shutdown")]
    prefill.nixl.handles[0] = "done"
    prefill.passes(0.1)
    assert prefill.side.take_sent() == ["P1"]
    assert prefill.idle


def test_messages_for_the_other_side_are_misplaced(prefill: Prefill, decode: Decode) -> None:
    assert prefill.gets(done()) == "misplaced"
    assert decode.gets(cancel()) == "misplaced"
    assert decode.gets(wire.Heartbeat(["k"])) == "misplaced"


def test_a_round_is_cheap_when_thousands_wait(prefill: Prefill) -> None:
    """F39: thousands of blocks held for D cost a round nothing between two sweeps."""
    for number in range(2000):
        prefill.ready(f"P{number}", f"k{number}")
    looked: list[str] = []
    judge = prefill.side._judge
    prefill.side._judge = lambda request, now: (looked.append(request.key), judge(request, now))[1]  # type: ignore
    for _ in range(100):
        prefill.now += 0.001
        prefill.side.tick(prefill.now)
    assert len(looked) <= 2000 * 3


# --- decode: the way it should go ------------------------------------------------------------------------------------


def test_decode_registers_and_receives(decode: Decode) -> None:
    decode.wants()
    (sent,) = decode.nixl.take()
    assert isinstance(sent, wire.Register)
    assert (sent.key, sent.attempt, sent.engine_id, sent.block_ids, sent.first_block, sent.prompt_tokens) == (
        ("k", 0, "D", [[1, 2]], [0], 32)
    )
    assert decode.ledger.stage("decode", "k", 0) == "registered"
    decode.now += 2
    assert decode.gets(alive("posted")) == "accepted"
    assert decode.gets(done()) == "accepted"
    assert decode.side.take_settled() == [Settled("D1", ok=True, fenced=True, bytes=10, took_s=2.0)]
    assert decode.side.take_settled() == []
    assert decode.side.take_fenced() == []
    assert not decode.side.expecting
    assert outcome(decode.ledger) == "received"


def test_decode_registers_when_the_connection_is_made(decode: Decode) -> None:
    decode.nixl.states["P"] = "connecting"
    decode.wants()
    decode.passes(5)
    assert decode.nixl.take() == []
    decode.nixl.states["P"] = "ready"
    decode.passes(0.1)
    assert [kind_of(m) for m in decode.nixl.take()] == ["REG"]


def test_a_full_prefix_hit_is_told(decode: Decode) -> None:
    """F31: nothing to receive, and P may free its blocks."""
    decode.wants(blocks=[])
    assert decode.nixl.take() == [zero().__class__("k", 0, "D", "D1")]
    assert decode.settled() == []
    assert not decode.side.expecting


def test_a_full_prefix_hit_is_told_when_the_connection_is_back(decode: Decode) -> None:
    decode.nixl.states["P"] = "failed"
    decode.wants(blocks=[])
    decode.passes(5)
    assert decode.nixl.take() == []
    decode.nixl.states["P"] = "ready"
    decode.passes(0.1)
    assert [kind_of(m) for m in decode.nixl.take()] == ["REG_ZERO"]
    decode.nixl.states["P"] = "connecting"
    decode.wants("D2", attempt=1, blocks=[])
    decode.passes(TIMEOUT_S + 1)
    assert not decode.side.expecting, "the lease on the other side does the rest"


# --- decode: deadlines -----------------------------------------------------------------------------------------------


def test_nothing_heard_times_out_and_keeps_the_blocks(decode: Decode) -> None:
    """F05, F10: a lost registration, or an answer that never comes."""
    decode.wants()
    decode.passes(TIMEOUT_S - 1)
    assert decode.settled() == []
    decode.passes(2)
    assert decode.settled() == [("D1", False, False)]
    assert outcome(decode.ledger) == "timed_out"
    assert cancel() in decode.nixl.take()
    decode.passes(100)
    assert decode.side.take_fenced() == []
    assert len(decode.nixl.take("CANCEL")) >= 100 / decode_side.CANCEL_AGAIN_S - 1
    assert decode.gets(ack("cancelled")) == "accepted"
    assert decode.side.take_fenced() == ["D1"]
    assert decode.settled() == []
    assert not decode.side.expecting


def test_a_slow_prefill_is_waited_for_and_a_stuck_write_is_not(decode: Decode) -> None:
    """F05, T006: ALIVE keeps a request beyond the deadline; after `posted` only the end does."""
    decode.wants()
    for _ in range(100):
        decode.passes(2)
        decode.gets(alive("prefilling"))
    assert decode.settled() == []
    decode.gets(alive("posted"))
    decode.passes(TIMEOUT_S - 1)
    assert decode.settled() == []
    decode.passes(2)
    assert decode.settled() == [("D1", False, False)]


def test_a_connection_that_is_never_made_times_out_with_the_blocks_free(decode: Decode) -> None:
    """F22: the handshake hangs. Nothing was registered, so nothing can be written."""
    decode.nixl.states["P"] = "connecting"
    decode.wants()
    decode.passes(TIMEOUT_S + 1)
    assert decode.settled() == [("D1", False, True)]
    assert outcome(decode.ledger) == "timed_out"
    assert not decode.side.expecting
    decode.nixl.states["P"] = "ready"
    decode.passes(5)
    assert decode.nixl.take() == []


def test_an_unreachable_prefill_fails_at_once(decode: Decode) -> None:
    """F25: the router names an engine that is no more."""
    decode.nixl.states["P"] = "failed"
    decode.wants()
    (entry,) = decode.side.take_settled()
    assert (entry.ok, entry.fenced) == (False, True)
    assert "refused" in entry.reason
    assert not decode.side.expecting


def test_a_stopped_process_does_not_time_out(decode: Decode) -> None:
    """F45: D was stopped; the answer is in its queue."""
    decode.wants()
    decode.nixl.states["Q"] = "connecting"
    late = replace_peer("Q")
    decode.side.on_given_up(GivenUp("D9", "other", 0, late), decode.now)
    decode.now += 1000
    decode.side.postpone(1000)
    decode.side.tick(decode.now)
    assert decode.settled() == []
    decode.nixl.states.clear()
    decode.passes(0.1)
    assert cancel("other") in decode.nixl.take()
    decode.gets(done())
    assert decode.settled() == [("D1", True, True)]


def replace_peer(engine_id: str) -> Peer:
    return replace(PEER, engine_id=engine_id)


def test_a_registration_that_is_not_heard_of_is_sent_again(decode: Decode) -> None:
    """T001, T003: it, or its answer, was lost; the same registration asks for both."""
    decode.wants()
    (first,) = decode.nixl.take()
    decode.passes(decode_side.REGISTER_AGAIN_S + 0.5)
    assert decode.nixl.take() == [first]
    for _ in range(10):
        decode.passes(2)
        decode.gets(alive())
    assert decode.nixl.take() == [], "it has arrived"
    decode.gives_up()
    decode.passes(20)
    assert {kind_of(m) for m in decode.nixl.take()} == {"CANCEL"}


# --- decode: the client leaves ---------------------------------------------------------------------------------------


def test_given_up_before_it_was_registered(decode: Decode) -> None:
    decode.nixl.states["P"] = "connecting"
    decode.wants()
    decode.gives_up()
    assert decode.settled() == [("D1", False, True)]
    assert outcome(decode.ledger) == "aborted"
    decode.nixl.states["P"] = "ready"
    decode.passes(5)
    assert "REG" not in {kind_of(m) for m in decode.nixl.take()}


@pytest.mark.parametrize("answer", [ack("cancelled"), ack("completed"), ack("failed"), done(), fail()])
def test_given_up_after_it_was_registered_waits_for_the_fence(decode: Decode, answer: wire.Message) -> None:
    """F02, F03: blocks are held until P has said that it will not touch them."""
    decode.wants()
    decode.passes(1)
    decode.nixl.take()
    decode.gives_up()
    assert decode.nixl.take() == [cancel()]
    decode.passes(1)
    decode.gives_up()
    assert decode.settled() == []
    decode.gets(answer)
    assert decode.settled() == [("D1", False, True)], "ok would let a request go on that is gone"
    assert decode.side.take_fenced() == []
    assert outcome(decode.ledger) == "aborted"
    assert not decode.side.expecting


def test_given_up_and_never_answered(decode: Decode) -> None:
    """F02: the engine may go on without the blocks; they stay out of use. ALIVE is no answer."""
    decode.wants()
    decode.gives_up()
    for _ in range(int(TIMEOUT_S / 2) + 1):
        decode.passes(2)
        decode.gets(alive())
    assert decode.settled() == [("D1", False, False)]
    decode.gets(ack("cancelled"))
    assert decode.side.take_fenced() == ["D1"]


def test_given_up_after_it_was_settled(decode: Decode) -> None:
    """The scheduler had not seen the end yet."""
    decode.wants()
    decode.passes(TIMEOUT_S + 1)
    decode.gives_up()
    decode.passes(TIMEOUT_S + 1)
    assert decode.settled() == [("D1", False, False)]
    decode.gets(ack("cancelled"))
    assert decode.side.take_fenced() == ["D1"]
    decode.gives_up()
    decode.passes(1)
    assert decode.settled() == []


def test_given_up_before_it_had_blocks(decode: Decode) -> None:
    """F30: P is told, as soon as it can be reached, and nothing is kept for it here."""
    decode.nixl.states["P"] = "connecting"
    decode.gives_up()
    assert decode.settled() == []
    decode.passes(5)
    decode.nixl.states["P"] = "ready"
    decode.passes(0.1)
    assert decode.nixl.take() == [cancel()]
    assert not decode.side.expecting


def test_messages_without_an_answer_are_bounded(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_side, "NOTICES_LIMIT", 3)
    decode.nixl.states["P"] = "connecting"
    for number in range(10):
        decode.wants(f"D{number}", attempt=number, blocks=[])
    decode.nixl.states["P"] = "ready"
    decode.passes(0.1)
    sent = decode.nixl.take()
    assert [m.attempt for m in sent if isinstance(m, wire.RegisterZero)] == [7, 8, 9]


# --- decode: answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", sorted(wire.FAIL_REASONS))
def test_a_failure_ends_the_wait_at_once(decode: Decode, reason: str) -> None:
    """F04, F06, F07, F46: P says that nothing will come."""
    decode.wants()
    decode.gets(fail(reason))
    (entry,) = decode.side.take_settled()
    assert (entry.ok, entry.fenced, entry.reason) == (False, True, reason)
    assert not decode.side.expecting


def test_answers_to_what_was_never_asked_change_nothing(decode: Decode) -> None:
    """F40 and invariant 5: other attempts, other keys, requests that are over or not yet registered."""
    assert decode.gets(done()) == "unknown"
    decode.nixl.states["P"] = "connecting"
    decode.wants()
    for message in (done(), fail(), ack("completed"), alive()):
        assert decode.gets(message) == "unknown"
    assert decode.settled() == []
    decode.nixl.states["P"] = "ready"
    decode.passes(0.1)
    assert decode.gets(done(attempt=1)) == "unknown"
    assert decode.gets(done(key="other")) == "unknown"
    assert decode.settled() == []
    decode.gets(done())
    assert decode.settled() == [("D1", True, True)]
    for message in (done(), fail(), ack("cancelled"), alive()):
        assert decode.gets(message) == "unknown"
    assert decode.settled() == []


def test_all_writers_must_be_done(decode: Decode) -> None:
    """F36: pipeline stages and tensor ranks; the same one twice counts once."""
    decode.wants()
    assert decode.gets(done(writer=0, writers=3)) == "accepted"
    assert decode.gets(done(writer=0, writers=3)) == "repeated"
    assert decode.gets(fail(writer=0, writers=3)) == "repeated"
    assert decode.gets(done(writer=5, writers=3)) == "accepted"
    assert decode.settled() == []
    assert decode.gets(done(writer=1, writers=3)) == "accepted"
    (entry,) = decode.side.take_settled()
    assert (entry.ok, entry.bytes) == (True, 30)


@pytest.mark.parametrize("bad", [fail("transfer", writer=0, writers=2), ack("cancelled", writer=0, writers=2)])
@pytest.mark.parametrize("bad_first", [False, True])
def test_one_writer_fails_and_the_other_still_writes(decode: Decode, bad: Any, bad_first: bool) -> None:
    """F34: settled only when no writer is left that may touch the blocks."""
    good = done(writer=1, writers=2)
    decode.wants()
    decode.gets(bad if bad_first else good)
    assert decode.settled() == []
    decode.gets(good if bad_first else bad)
    assert decode.settled() == [("D1", False, True)]


def test_writers_that_disagree_are_not_believed(decode: Decode) -> None:
    """Invariant 1: the number decides when blocks are used; the first one stands, and the deadline does the rest."""
    decode.wants()
    assert decode.gets(done(writer=0, writers=2)) == "accepted"
    assert decode.gets(done(writer=1, writers=1)) == "refused"
    assert decode.gets(ack("cancelled", writer=1, writers=3)) == "refused"
    assert decode.settled() == []
    decode.passes(TIMEOUT_S + 1)
    assert decode.settled() == [("D1", False, False)]
    assert decode.gets(ack("cancelled", writer=1, writers=2)) == "accepted"
    assert decode.side.take_fenced() == ["D1"]


def test_a_lost_done_fences_when_the_cancel_is_answered(decode: Decode) -> None:
    """T003: the WRITE was complete; after the deadline that is only good for the fence."""
    decode.wants()
    decode.passes(TIMEOUT_S + 1)
    assert decode.settled() == [("D1", False, False)]
    decode.gets(ack("completed"))
    assert decode.settled() == []
    assert decode.side.take_fenced() == ["D1"]


@pytest.mark.parametrize("late", [done(), fail("expired")])
def test_a_late_answer_fences(decode: Decode, late: wire.Message) -> None:
    """F40: the request is settled long ago, its blocks are free from now on."""
    decode.wants()
    decode.passes(TIMEOUT_S + 1)
    decode.settled()
    decode.gets(late)
    assert decode.side.take_fenced() == ["D1"]
    assert decode.settled() == []


# --- decode: peers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speaks_up", [False, True])
def test_a_peer_lost_while_registering_keeps_the_blocks(decode: Decode, speaks_up: bool) -> None:
    """F25: with several ranks at P one may have got the registration. The transport may say so itself."""
    decode.nixl.lossy = True
    if speaks_up:
        decode.nixl.on_loss = lambda: decode.side.peer_lost("P", "reset", decode.now)
    decode.wants()
    assert decode.settled() == [("D1", False, False)]
    decode.nixl.lossy = False
    decode.passes(3)
    assert cancel() in decode.nixl.take()
    decode.gets(ack("cancelled"))
    assert decode.side.take_fenced() == ["D1"]


def test_a_peer_lost_while_waiting(decode: Decode) -> None:
    """F25, F27: the connection broke; DONE will not come over it, but a WRITE may still land."""
    decode.wants("D1", "k")
    decode.wants("D2", "k2")
    decode.nixl.states["Q"] = "connecting"
    decode.side.on_receive(Receive("D3", "k3", 0, replace_peer("Q"), ([3],), (0,), 32, HASH), decode.now)
    decode.gives_up("D2", "k2")
    decode.side.peer_lost("P", "reset", decode.now)
    decode.side.peer_lost("P", "reset", decode.now)
    assert decode.settled() == [("D1", False, False)], "the one whose client left waits for its fence"
    decode.side.peer_lost("Q", "reset", decode.now)
    assert decode.settled() == [("D3", False, True)], "nothing was registered"


def test_a_prefill_that_is_gone_releases_the_fence(decode: Decode) -> None:
    """F02, F25: P was restarted or killed. A time-out proves nothing; that its process is no more does."""
    decode.wants("D1", "k")
    decode.side.peer_lost("P", "reset", decode.now)
    assert decode.settled() == [("D1", False, False)]
    decode.wants("D2", "k2")
    decode.gives_up("D2", "k2")
    decode.nixl.states["P"] = "failed"
    decode.passes(10)
    assert decode.side.take_fenced() == []
    decode.nixl.gone_engines.add("P")
    decode.passes(3)
    assert decode.side.take_fenced() == ["D1"]
    assert decode.settled() == [("D2", False, True)]
    assert not decode.side.expecting


def test_a_prefill_that_is_gone_fails_what_waits(decode: Decode) -> None:
    decode.wants()
    decode.nixl.gone_engines.add("P")
    decode.passes(5)
    assert decode.settled() == [], "nobody asks while the connection is fine"
    decode.nixl.states["P"] = "connecting"
    decode.passes(3)
    assert decode.settled() == [("D1", False, True)]


# --- decode: heartbeats ----------------------------------------------------------------------------------------------


def test_heartbeats_name_what_still_waits(decode: Decode) -> None:
    """F11: also those that have no blocks yet; and not those that P need not keep any more."""
    decode.wants("D1", "registered")
    decode.wants("D2", "given up")
    decode.gives_up("D2", "given up")
    decode.side.on_waiting({"queued": PEER, "registered": PEER})
    decode.passes(decode_side.HEARTBEAT_S + 0.5)
    beats = decode.nixl.take("HB")
    assert beats[-1] == wire.Heartbeat(["queued", "registered"])
    decode.side.on_waiting({})
    decode.passes(decode_side.HEARTBEAT_S + 0.5)
    assert decode.nixl.take("HB")[-1] == wire.Heartbeat(["registered"])
    decode.side.on_waiting({"allocated": PEER})
    decode.wants("D3", "allocated")
    decode.gets(done("allocated"))
    decode.passes(decode_side.HEARTBEAT_S + 0.5)
    assert decode.nixl.take("HB")[-1] == wire.Heartbeat(["registered"])


def test_heartbeats_fit_whatever_the_keys_are(decode: Decode) -> None:
    keys = [f"{number:06}" + "\U0001f600" * (wire.MAX_KEY - 6) for number in range(2500)]
    decode.side.on_waiting(dict.fromkeys(keys, PEER))
    decode.passes(0.1)
    beats = [m for m in decode.nixl.take("HB") if isinstance(m, wire.Heartbeat)]
    assert [key for beat in beats for key in beat.keys] == keys


def test_heartbeats_only_over_connections(decode: Decode) -> None:
    decode.side.on_waiting({"a": PEER, "b": replace_peer("Q")})
    decode.nixl.states["P"] = "failed"
    decode.passes(0.1)
    assert decode.nixl.told_to == ["Q"]


# --- decode: duplicates, bugs and the end ----------------------------------------------------------------------------


def test_the_same_request_twice_is_one(decode: Decode) -> None:
    decode.wants()
    decode.wants()
    assert len(decode.nixl.take("REG")) == 1


def test_one_attempt_cannot_stand_for_two_requests(decode: Decode) -> None:
    """F12: tries counted anew. The other's DONE would count for it, and it would read blocks that nobody wrote."""
    decode.wants("D1")
    decode.wants("D2", blocks=[3, 4])
    assert decode.settled() == [("D2", False, True)]
    decode.gets(done())
    assert decode.settled() == [("D1", True, True)]


def test_two_requests_with_one_key_are_told_apart(decode: Decode) -> None:
    """F13: the attempt tells them apart here; prefill refuses one of them."""
    decode.wants("D1", attempt=0)
    decode.wants("D2", attempt=1, blocks=[3, 4])
    decode.gets(fail("duplicate", attempt=1))
    decode.gets(done(attempt=0))
    assert decode.settled() == [("D2", False, True), ("D1", True, True)]


@pytest.mark.parametrize("blocks", [[1, 1], list(range(wire.MAX_BLOCKS + 1)), [-1]])
def test_what_cannot_be_registered_fails_alone(decode: Decode, blocks: list[int]) -> None:
    """F17, F18: it raised in each round, and took every other request's deadline with it."""
    decode.wants("D1", "bad", blocks=blocks)
    assert decode.settled() == [("D1", False, True)]
    decode.wants("D2")
    decode.gets(done())
    assert decode.settled() == [("D2", True, True)]
    assert not decode.side.expecting


def test_a_bug_with_one_request_does_not_stop_other_deadlines(decode: Decode) -> None:
    """F17: the round serves the others, then raises."""
    decode.nixl.states.update(P="connecting", Q="connecting")
    decode.side.on_receive(Receive("D1", "a", 0, replace_peer("Q"), ([3],), (0,), 32, HASH), decode.now)
    decode.wants("D2")
    reach = decode.nixl.reach

    def broken(peer: Peer) -> State:
        if peer.engine_id == "Q":
            raise KeyError("Q")
        return reach(peer)

    decode.nixl.reach = broken  # type: ignore[method-assign]
    decode.now += TIMEOUT_S + 1
    with pytest.raises(KeyError):
        decode.side.tick(decode.now)
    assert decode.settled() == [("D2", False, True)]


def test_shutdown_cancels_what_is_registered(decode: Decode) -> None:
    """F42: P need not write to a process that ends."""
    decode.wants("D1", "k")
    decode.nixl.states["Q"] = "connecting"
    decode.side.on_receive(Receive("D2", "b", 0, replace_peer("Q"), ([3],), (0,), 32, HASH), decode.now)
    decode.nixl.take()
    decode.side.shut_down(decode.now)
    assert decode.nixl.take() == [cancel()]
