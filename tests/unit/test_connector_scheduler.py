"""What the scheduler side decides, on stand-ins for vLLM's requests, blocks and block pool."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from pdctl_connector import wire
from pdctl_connector.bookkeeping import ATTEMPTS, WAITING_AGAIN_S, Bookkeeping, Geometry, Quarantine, peer_in
from pdctl_connector.step import Ended, Peer, Step

SIZE = 16
PEER = Peer("engine-p", "10.0.0.1", 5600, tp_size=2, pp_size=1)
SUFFIX = "-0123abcd"


def decode_params(**more: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-p",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        **more,
    }


def prefill_params(**more: Any) -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, **more}


@dataclass
class Request:
    name: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int = 40
    status: Any = field(default_factory=lambda: SimpleNamespace(name="FINISHED_LENGTH_CAPPED"))
    computed: int | None = None
    embeddings: bool = False

    @property
    def request_id(self) -> str:
        return self.name + SUFFIX

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens if self.computed is None else self.computed

    @property
    def prompt_token_ids(self) -> list[int] | None:
        return None if self.embeddings else list(range(self.num_prompt_tokens))

    def ended(self, status: str) -> Request:
        return dataclasses.replace(self, status=SimpleNamespace(name=status))


@dataclass(eq=False)
class Block:
    block_id: int
    cached: bool = False
    is_null: bool = False


@dataclass
class Blocks:
    """As vLLM's ``KVCacheBlocks``."""

    blocks: tuple[list[Block], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        return [[block.block_id for block in group if not (block.cached or block.is_null)] for group in self.blocks]


class Pool:
    """As vLLM's ``BlockPool``: counts users."""

    def __init__(self) -> None:
        self.users: Counter[int] = Counter()

    def touch(self, blocks: Sequence[Block]) -> None:
        self.users.update(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        self.users.subtract(block.block_id for block in ordered_blocks)

    @property
    def held(self) -> list[int]:
        assert all(count >= 0 for count in self.users.values())
        return sorted(block_id for block_id, count in self.users.items() if count)


def row(*ids: int, cached: int = 0) -> Blocks:
    return Blocks(([Block(block_id, cached=index < cached) for index, block_id in enumerate(ids)],))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock | None = None, **more: Any) -> Bookkeeping:
    geometry = Geometry(**{"block_sizes": (SIZE,), "hybrid": False, "blocks": 100, "clip": tuple, **more})
    return Bookkeeping(geometry, waiting_share=0.7, randomized=True, clock=clock or Clock())


@pytest.fixture
def book(clock: Clock) -> Bookkeeping:
    return make(clock)


def step_of(book: Bookkeeping) -> Step:
    step = book.take_step()
    assert step is not None
    return step


def results(book: Bookkeeping, pool: Pool | None = None, **more: Any) -> None:
    book.results(**{"received": (), "sent": (), "unfenced": {}, "fenced": {}, "pool": pool, **more})


def waiting(book: Bookkeeping, name: str, ids: Sequence[int] = (1, 2, 3), **more: Any) -> Request:
    """A decode request whose blocks are set aside."""
    request = Request(name, decode_params(**more), num_prompt_tokens=len(ids) * SIZE)
    book.arrived(request)
    assert book.allocated(request, row(*ids), len(ids) * SIZE, len(ids) * SIZE) == (list(ids),)
    return request


# --- decode: what is registered ---------------------------------------------------------------------------------------


def test_a_whole_prompt_is_registered(book: Bookkeeping) -> None:
    request = Request("cmpl-1", decode_params())
    book.arrived(request)
    assert book.allocated(request, row(7, 8, 9), 40, 40) == ([7, 8, 9],)
    (receive,) = step_of(book).receive
    assert receive.request_id == "cmpl-1" + SUFFIX
    assert receive.key == "cmpl-1"
    assert (receive.attempt, receive.peer, receive.tokens) == (0, PEER, 40)
    assert (receive.block_ids, receive.first_block) == (([7, 8, 9],), (0,))
    assert receive.token_hash == wire.token_hash(range(40))
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params["do_remote_prefill"] is False
    assert book.pending


def test_a_partial_prefix_hit_registers_from_the_first_missing_block(book: Bookkeeping) -> None:
    request = Request("cmpl-1", decode_params())
    # A block more than the prompt needs (room for the answer) is nothing to be filled.
    assert book.allocated(request, row(7, 8, 9, 10, cached=2), 40, 8) == ([9],)
    (receive,) = step_of(book).receive
    assert (receive.block_ids, receive.first_block) == (([9],), (2,))


def test_a_full_prefix_hit_is_told_with_no_blocks_and_nothing_is_awaited(book: Bookkeeping) -> None:
    request = Request("cmpl-1", decode_params())
    book.arrived(request)
    assert book.allocated(request, row(7, 8, 9, cached=3), 40, 0) is None
    (receive,) = step_of(book).receive
    assert not any(receive.block_ids)
    assert receive.peer == PEER
    assert not book.pending
    assert not book.finished(request, [[7, 8, 9]])
    assert book.take_step() is None


def test_a_hybrid_cache_registers_what_is_not_cached_and_aligns_at_the_end() -> None:
    def clip(block_ids: Any) -> tuple[list[int], ...]:
        return block_ids[0], block_ids[1][-2:]

    book = make(block_sizes=(SIZE, SIZE), hybrid=True, clip=clip)
    blocks = Blocks(
        (
            [Block(1, cached=True), Block(2), Block(3), Block(4)],
            [Block(0, is_null=True), Block(5), Block(6), Block(7)],
        )
    )
    wanted = book.allocated(Request("r", decode_params(), 64), blocks, 64, 48)
    assert wanted == ([2, 3, 4], [6, 7])
    assert step_of(book).receive[0].first_block == (0, 0)


def test_every_try_of_a_key_has_its_own_number(book: Bookkeeping) -> None:
    for _ in range(3):
        waiting(book, "same")
        results(book, received=["same" + SUFFIX])
    waiting(book, "other")
    assert [(r.key, r.attempt) for r in step_of(book).receive] == [("same", 0), ("same", 1), ("same", 2), ("other", 3)]


def test_attempt_numbers_start_again_after_very_many(book: Bookkeeping) -> None:
    book._attempt = ATTEMPTS - 2
    for number in range(3):
        waiting(book, f"r{number}")
    assert [r.attempt for r in step_of(book).receive] == [ATTEMPTS - 1, 0, 1]


def test_prefill_announces_a_request_when_it_is_queued_and_only_once(book: Bookkeeping) -> None:
    request = Request("cmpl-1", {"do_remote_decode": True})
    book.arrived(request)
    assert [(p.request_id, p.tokens) for p in step_of(book).prefilling] == [("cmpl-1" + SUFFIX, 40)]
    # Blocks, more chunks, a second beginning after a preemption: nothing that the writer does not know.
    assert book.allocated(request, Blocks(([Block(1)],)), 40, 0) is None
    assert book.take_step() is None
    assert not book.finished(request.ended("FINISHED_ABORTED"), [])
    assert [ended.reason for ended in step_of(book).ended] == ["aborted"]


def test_the_routers_transfer_id_is_the_key(book: Bookkeeping) -> None:
    waiting(book, "cmpl-1", transfer_id="t-9")
    assert step_of(book).receive[0].key == "t-9"


@pytest.mark.parametrize(
    "lacking",
    [
        {"remote_engine_id": None},
        {"remote_host": ""},
        {"remote_port": "none"},
        {"remote_port": 0},
        {"remote_port": 70000},
        {"tp_size": None},
        {"tp_size": 0},
        {"pp_size": -1},
    ],
)
def test_params_without_a_prefill_engine_mean_a_local_prompt(
    book: Bookkeeping, caplog: pytest.LogCaptureFixture, lacking: dict[str, Any]
) -> None:
    request = Request("cmpl-1", decode_params(**lacking))
    book.arrived(request)
    assert request.kv_transfer_params is not None
    assert request.kv_transfer_params["do_remote_prefill"] is False
    assert "its prompt is computed here" in caplog.text
    assert book.allocated(request, row(1, 2, 3), 40, 40) is None
    assert not book.finished(request, [[1, 2, 3]])
    assert book.take_step() is None


def test_missing_params_are_as_good_as_none() -> None:
    assert peer_in({}) is None
    assert peer_in(decode_params(pp_size=None)) == PEER
    assert peer_in(decode_params(pp_size=2)) == dataclasses.replace(PEER, pp_size=2)
    params = decode_params()
    del params["remote_port"]
    assert peer_in(params) is None


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
def test_an_ordinary_request_leaves_no_trace(book: Bookkeeping, params: dict[str, Any] | None) -> None:
    request = Request("cmpl-1", params)
    book.arrived(request)
    assert book.allocated(request, row(1, 2, 3), 40, 0) is None
    assert not book.finished(request, [[1, 2, 3]])
    assert book.take_step() is None
    assert not book.pending


def test_a_second_allocation_after_a_failed_transfer_is_a_local_one(book: Bookkeeping) -> None:
    request = waiting(book, "cmpl-1")
    step_of(book)
    results(book, received=[request.request_id])
    assert book.allocated(request, row(1, 2, 3), 48, 48) is None
    assert book.take_step() is None


# --- decode: how it ends ----------------------------------------------------------------------------------------------


def test_a_client_that_leaves_before_blocks_are_set_aside_is_told(book: Bookkeeping) -> None:
    request = Request("cmpl-1", decode_params())
    book.arrived(request)
    assert step_of(book).waiting == {"cmpl-1": PEER}
    assert not book.finished(request.ended("FINISHED_ABORTED"), [])
    step = step_of(book)
    assert [(g.request_id, g.key, g.attempt, g.peer) for g in step.given_up] == [("cmpl-1" + SUFFIX, "cmpl-1", 0, PEER)]
    assert step.waiting == {}
    assert not book.pending


def test_a_client_that_leaves_while_the_transfer_is_awaited_is_told_with_its_attempt(book: Bookkeeping) -> None:
    waiting(book, "cmpl-1")
    results(book, received=["cmpl-1" + SUFFIX])
    request = waiting(book, "cmpl-1")
    step_of(book)
    assert not book.finished(request.ended("FINISHED_ABORTED"), [[1, 2, 3]])
    (given_up,) = step_of(book).given_up
    assert (given_up.request_id, given_up.attempt) == (request.request_id, 1)
    assert book.pending
    results(book, received=[request.request_id])
    assert not book.pending


def test_a_request_that_failed_by_our_word_is_not_given_up_on_top(book: Bookkeeping) -> None:
    request = waiting(book, "cmpl-1")
    step_of(book)
    assert not book.finished(request.ended("FINISHED_ERROR"), [[1, 2, 3]])
    results(book, received=[request.request_id])
    assert book.take_step() is None
    assert not book.pending


def test_a_request_that_was_received_ends_like_any_other(book: Bookkeeping) -> None:
    request = waiting(book, "cmpl-1")
    step_of(book)
    results(book, received=[request.request_id])
    assert not book.finished(request, [[1, 2, 3]])
    assert book.take_step() is None


# --- decode: requests that wait ---------------------------------------------------------------------------------------


def test_waiting_requests_are_told_when_they_change_and_now_and_then(book: Bookkeeping, clock: Clock) -> None:
    book.arrived(Request("a", decode_params()))
    book.arrived(Request("b", decode_params(remote_engine_id="engine-q")))
    assert step_of(book).waiting == {"a": PEER, "b": dataclasses.replace(PEER, engine_id="engine-q")}
    assert book.take_step() is None
    clock.now += WAITING_AGAIN_S + 0.1
    assert set(step_of(book).waiting) == {"a", "b"}
    waiting(book, "a")
    assert set(step_of(book).waiting) == {"b"}


def test_the_last_waiting_request_leaves_an_empty_list_behind(book: Bookkeeping) -> None:
    request = Request("a", decode_params())
    book.arrived(request)
    step_of(book)
    assert request.kv_transfer_params is not None
    book.allocated(request, row(1, 2, 3), 40, 40)
    assert step_of(book).waiting == {}


def test_back_pressure_and_one_is_always_admitted(book: Bookkeeping) -> None:
    assert book.has_room_for(10_000 * SIZE)
    waiting(book, "big", range(200))
    assert not book.has_room_for(1)
    results(book, received=["big" + SUFFIX])
    waiting(book, "small", range(30))
    assert book.has_room_for(40 * SIZE)
    assert not book.has_room_for(40 * SIZE + 1)
    results(book, received=["small" + SUFFIX])
    assert book.has_room_for(10_000 * SIZE)


def test_back_pressure_counts_every_group() -> None:
    book = make(block_sizes=(SIZE, SIZE), hybrid=True)
    blocks = Blocks(([Block(1), Block(2)], [Block(3)]))
    book.allocated(Request("r", decode_params(), 32), blocks, 32, 32)
    assert book.has_room_for(33 * SIZE)
    assert not book.has_room_for(34 * SIZE)


# --- prefill ----------------------------------------------------------------------------------------------------------


def test_prefill_is_told_once_and_its_blocks_are_kept_until_they_are_sent(book: Bookkeeping) -> None:
    request = Request("cmpl-1", prefill_params())
    book.arrived(request)
    (prefilling,) = step_of(book).prefilling
    assert (prefilling.request_id, prefilling.key, prefilling.tokens) == (request.request_id, "cmpl-1", 40)
    assert book.finished(request, [[4, 5, 6]])
    (ready,) = step_of(book).ready
    assert (ready.request_id, ready.key, ready.tokens) == (request.request_id, "cmpl-1", 40)
    assert ready.block_ids == ([4, 5, 6],)
    assert ready.token_hash == wire.token_hash(range(40))
    assert book.pending
    results(book, sent=[request.request_id])
    assert not book.pending


def test_both_sides_agree_on_key_and_hash() -> None:
    prefill, decode = make(), make()
    prefill.finished(dataclasses.replace(Request("cmpl-1", prefill_params())), [[4, 5, 6]])
    decode.allocated(Request("cmpl-1", decode_params()), row(1, 2, 3), 40, 40)
    ready, receive = step_of(prefill).ready[0], step_of(decode).receive[0]
    assert (ready.key, ready.token_hash, ready.tokens) == (receive.key, receive.token_hash, receive.tokens)


def test_embeddings_have_no_hash(book: Bookkeeping) -> None:
    assert book.finished(Request("cmpl-1", prefill_params(), embeddings=True), [[4, 5, 6]])
    assert step_of(book).ready[0].token_hash == b""


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_blocks_beyond_the_prompt_are_not_offered(book: Bookkeeping, blocks: int) -> None:
    """Prefill with max_tokens above 1: upstream aligns at the end of what it has, and so shifts everything."""
    request = Request("cmpl-1", prefill_params(), num_prompt_tokens=SIZE * blocks - 3, computed=SIZE * 4)
    assert book.finished(request, [[4, 5, 6, 7]])
    assert step_of(book).ready[0].block_ids == ([4, 5, 6, 7][:blocks],)


def test_groups_of_several_block_sizes_are_cut_each_by_its_own() -> None:
    book = make(block_sizes=(SIZE, 2 * SIZE))
    assert book.finished(
        Request("r", prefill_params(), num_prompt_tokens=40, computed=90), [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    )
    assert step_of(book).ready[0].block_ids == ([1, 2, 3], [7, 8])


def test_a_hybrid_cache_that_went_beyond_the_prompt_is_not_offered_at_all() -> None:
    book = make(block_sizes=(SIZE, SIZE), hybrid=True)
    request = Request("r", prefill_params(), num_prompt_tokens=40, computed=43)
    assert not book.finished(request, [[1, 2, 3], [0, 4, 5]])
    (ended,) = step_of(book).ended
    assert ended.reason == "mismatch"
    assert ended.reason in wire.FAIL_REASONS
    assert "3 tokens beyond the prompt" in ended.detail
    assert book.finished(Request("s", prefill_params(), num_prompt_tokens=40), [[1, 2, 3], [0, 4, 5]])
    assert step_of(book).ready[0].block_ids == ([1, 2, 3], [0, 4, 5])


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR", "FINISHED_REPETITION"])
def test_prefill_that_ends_without_kv_is_told(book: Bookkeeping, status: str) -> None:
    request = Request("cmpl-1", prefill_params())
    book.arrived(request)
    assert not book.finished(request.ended(status), [[4, 5, 6]])
    assert step_of(book).ended == [Ended(request.request_id, "cmpl-1", "aborted", status.lower())]
    assert not book.pending


def test_prefill_that_never_began_is_told_too(book: Bookkeeping) -> None:
    assert not book.finished(Request("cmpl-1", prefill_params()).ended("FINISHED_ABORTED"), [])
    assert [ended.key for ended in step_of(book).ended] == ["cmpl-1"]


@pytest.mark.parametrize("block_ids", [[], [[]], [[], []]])
def test_prefill_without_blocks_has_nothing_to_give(book: Bookkeeping, block_ids: list[list[int]]) -> None:
    assert not book.finished(Request("cmpl-1", prefill_params()), block_ids)
    assert step_of(book).ended[0].detail == "no blocks"


def test_a_stopped_prefill_counts_as_complete(book: Bookkeeping) -> None:
    assert book.finished(Request("cmpl-1", prefill_params()).ended("FINISHED_STOPPED"), [[1, 2, 3]])


# --- quarantine -------------------------------------------------------------------------------------------------------


def test_one_rank_without_a_fence_keeps_the_blocks_until_it_has_one(book: Bookkeeping) -> None:
    pool = Pool()
    request = waiting(book, "cmpl-1", [5, 6, 7])
    step_of(book)
    results(book, pool, received=[request.request_id], unfenced={request.request_id: 1})
    assert pool.held == [5, 6, 7]
    assert book.pending
    results(book, pool)
    assert pool.held == [5, 6, 7]
    results(book, pool, fenced={request.request_id: 1})
    assert pool.held == []
    assert not book.pending


def test_several_ranks_free_only_when_the_last_has_its_fence(book: Bookkeeping) -> None:
    pool = Pool()
    request = waiting(book, "cmpl-1", [5, 6])
    step_of(book)
    # Two of four ranks have no fence; the others settled well.
    results(book, pool, unfenced={request.request_id: 1})
    results(book, pool, unfenced={request.request_id: 1}, received=[request.request_id])
    results(book, pool, fenced={request.request_id: 1})
    assert pool.held == [5, 6]
    results(book, pool, fenced={request.request_id: 1})
    assert pool.held == []


def test_the_failure_may_come_later_than_the_note(book: Bookkeeping) -> None:
    """vLLM holds a failure back until the last rank has settled; what a rank says beside it comes at once."""
    pool = Pool()
    request = waiting(book, "cmpl-1", [5, 6])
    step_of(book)
    results(book, pool, unfenced={request.request_id: 1})
    assert pool.held == []
    results(book, pool, received=[request.request_id])
    assert pool.held == [5, 6]


def test_a_fence_that_comes_before_the_failure_leaves_nothing_kept(book: Bookkeeping) -> None:
    pool = Pool()
    request = waiting(book, "cmpl-1", [5, 6])
    step_of(book)
    results(book, pool, unfenced={request.request_id: 1})
    results(book, pool, fenced={request.request_id: 1})
    results(book, pool, received=[request.request_id])
    assert pool.held == []
    assert not book.pending


def test_blocks_of_the_prefix_cache_are_not_kept(book: Bookkeeping) -> None:
    pool = Pool()
    request = Request("cmpl-1", decode_params())
    book.allocated(request, row(7, 8, 9, cached=2), 40, 8)
    step_of(book)
    results(book, pool, received=[request.request_id], unfenced={request.request_id: 1})
    assert pool.held == [9]


def test_a_request_with_a_fence_keeps_nothing(book: Bookkeeping) -> None:
    pool = Pool()
    request = waiting(book, "cmpl-1")
    step_of(book)
    results(book, pool, received=[request.request_id])
    assert pool.users == {}
    # A fence that nobody waits for.
    results(book, pool, fenced={request.request_id: 1, "unknown": 3})
    assert pool.users == {}
    assert not book.pending


def test_two_lives_of_one_id_are_both_given_back(book: Bookkeeping) -> None:
    """With ids of the client's, without a random suffix, an id may come again while the first is still kept."""
    pool = Pool()
    for ids in ([5, 6], [8, 9]):
        request = waiting(book, "cmpl-1", ids)
        step_of(book)
        results(book, pool, received=[request.request_id], unfenced={request.request_id: 1})
    results(book, pool, fenced={request.request_id: 1})
    assert pool.held == [5, 6, 8, 9]
    results(book, pool, fenced={request.request_id: 1})
    assert pool.held == []
    assert not book.pending


def test_without_a_pool_the_error_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    quarantine = Quarantine()
    quarantine.note({"r": 1}, {})
    quarantine.settled("r", [Block(1)], None)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    quarantine.release(None)
    assert not quarantine
