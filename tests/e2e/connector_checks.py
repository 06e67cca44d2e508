"""The connector's two sides on the installed vLLM's own classes, with stand-ins for NIXL, the KV cache and the writer.

Run by test_connector_contract.py in a process of its own, since importing vLLM leaves handlers and threads behind.
"""

from __future__ import annotations

import pickle
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pdctl_connector import wire, worker
from pdctl_connector.bookkeeping import Bookkeeping, Geometry
from pdctl_connector.cache_groups import cut_to_tail
from pdctl_connector.connections import Address, Connections
from pdctl_connector.decode_side import Settled
from pdctl_connector.nixl_guard import NixlGuard
from pdctl_connector.scheduler import Fences, PdPushScheduler
from pdctl_connector.step import Step
from pdctl_connector.worker import PdPushWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import RequestStatus

ENGINE = "engine-d"


class Agent:
    """NIXL: handles are numbers."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.messages: list[bytes] = []
        self.refuses: set[int] = set()
        self.states: dict[int, Any] = {}
        self.stays: set[int] = set()
        self.released: list[int] = []
        self.asked = 0
        self.sent: list[tuple[str, bytes]] = []
        self.send_fails: Exception | None = None
        self.calls: list[str] = []

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes) -> int:
        self.made.append(args)
        self.messages.append(notif_msg)
        return len(self.made)

    def transfer(self, handle: int) -> str:
        if handle in self.refuses:
            raise RuntimeError("not posted")
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        self.asked += 1
        state = self.states.get(handle, "PROC")
        if isinstance(state, Exception):
            raise state
        return state

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=1e6, postDuration=1.0, totalBytes=64, descCount=2)

    def release_xfer_handle(self, handle: int) -> None:
        if handle in self.stays:
            raise RuntimeError("still active")
        self.released.append(handle)

    def send_notif(self, name: str, data: bytes) -> None:
        if self.send_fails is not None:
            raise self.send_fails
        self.sent.append((name, data))

    def deregister_memory(self, descs: Any) -> None:
        self.calls.append("deregister_memory")

    def release_dlist_handle(self, handle: Any) -> None:
        self.calls.append("release_dlist_handle")

    def remove_remote_agent(self, name: str) -> None:
        self.calls.append("remove_remote_agent")


class FakeWriter:
    def __init__(self) -> None:
        self.alive = True
        self.results: tuple[list[str], list[Settled], list[str]] = ([], [], [])
        self.steps: list[Step] = []
        self.ends = True
        self.stopped = 0
        self.lost: list[tuple[str, str]] = []
        self.prefill = SimpleNamespace(
            busy_engines=set,
            engine_of=lambda handle: ENGINE,
            engine_lost=lambda engine, detail, now, gone=False: self.lost.append(("prefill", engine)),
        )
        self.decode = SimpleNamespace(peer_lost=lambda engine, detail, now: self.lost.append(("decode", engine)))

    def take(self) -> Any:
        results, self.results = self.results, ([], [], [])
        return results

    def hand_over(self, step: Step) -> None:
        self.steps.append(step)

    def stop(self, deadline_s: float) -> bool:
        self.stopped += 1
        return self.ends


class Topology:
    def __init__(self, **info: int) -> None:
        self.info = SimpleNamespace(
            **{
                "remote_tp_size": 1,
                "remote_block_size": 16,
                "remote_physical_blocks_per_logical": 1,
                "remote_block_len": 64,
                **info,
            }
        )

    def get_engine_info(self, engine_id: str) -> Any:
        return self.info

    def block_size_ratio(self, remote_block_size: int) -> int:
        return 1

    def unregister_remote_engine(self, engine_id: str) -> None:
        pass


def made(**attributes: Any) -> Any:
    """A worker as its constructor leaves it, as far as these checks need it."""
    one: Any = object.__new__(PdPushWorker)
    one._guard = one.nixl_wrapper = NixlGuard(Agent())
    one.agent = one._guard.agent
    one.writer = FakeWriter()
    one.engine_id = "engine-p"
    one.tp_rank, one.world_size, one.pp_size, one._pp_rank = 0, 1, 1, 0
    one.block_size, one._physical_blocks_per_logical_kv_block = 16, 1
    one._cut_to_tail = False
    one.transfer_topo = Topology()
    one.dst_num_blocks = {ENGINE: 100}
    one._remote_agents = {ENGINE: {(0, 0): "agent-0", (0, 1): "agent-1"}}
    one._engine_clock_offset = {}
    one.xfer_stats = NixlKVConnectorStats()
    one._recving_metadata, one._recving_transfers = {}, {}
    one._failed_recv_reqs, one._invalid_block_ids = queue.Queue(), queue.Queue()
    one._recv_failures, one._replicated_pcp_done_sending, one._reqs_to_send = set(), set(), {}
    one._pending_recv_notifs = {}
    one._sending_transfers, one._send_failures, one._sending_transfers_lock = {}, set(), threading.Lock()
    one.use_host_buffer = one.enable_permute_local_kv = one.enable_heterogeneous_attn_post_process = False
    one._is_hma_required = one._has_mamba = one.use_mla = False
    one._geometry, one._in_use, one._in_use_lock = threading.RLock(), {}, threading.Lock()
    one._handshake_lock = threading.RLock()
    one._quarantined, one._fenced_now, one._unfenced_now = set(), [], []
    one._unreleased, one._statistics = {}, queue.SimpleQueue()
    one._handshake_initiation_executor = ThreadPoolExecutor(2)
    one.connections = Connections(
        worker._ConnectionTransport(one), worker._ConnectionListener(one), patience_s=30, unused_s=3600
    )
    for name in ("dst_xfer_side_handles", "kv_caches_base_addr", "dst_region_num_blocks", "dst_region_group_ids"):
        setattr(one, name, {})
    for name in ("dst_uses_region_group_mapping", "dst_region_mem_types", "tp_mappings", "draft_tp_mappings"):
        setattr(one, name, {})
    for name in ("_engine_by_address", "_engine_last_active"):
        setattr(one, name, {})
    one._failed_remote_engines, one._invalid_remote_engines = set(), set()
    one.src_xfer_handles_by_block_size, one.src_xfer_handles_by_tp_ratio = {16: "list"}, {}
    one._dram_src_handles_by_tp_ratio, one._dram_src_handles_by_block_size = {}, {}
    one._registered_descs, one._kv_unregistered = ["descs"], False
    for name, value in attributes.items():
        setattr(one, name, value)
    return one


@pytest.fixture
def one() -> Any:
    one = made()
    yield one
    one._ended = True
    one._handshake_initiation_executor.shutdown(wait=False, cancel_futures=True)


def step_with(*names: str, step: Step | None = None) -> NixlConnectorMetadata:
    metadata = NixlConnectorMetadata()
    for name in names:
        metadata.add_new_req_to_recv(
            name,
            ([1, 2, 3],),
            {
                "remote_block_ids": (),
                "remote_engine_id": ENGINE,
                "remote_request_id": name,
                "remote_host": "h",
                "remote_port": 1,
            },
        )
    if step is not None:
        metadata.pdctl = step
    return metadata


def register(**more: Any) -> wire.Register:
    values: dict[str, Any] = {
        "key": "k", "attempt": 0, "engine_id": ENGINE, "request_id": "d", "host": "h", "port": 1, "tp_size": 1,
        "tp_rank": 0, "block_ids": [[7, 8]], "first_block": [1], "prompt_tokens": 48, "token_hash": b"",
    }  # fmt: skip
    return wire.Register(**{**values, **more})


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_reach_the_engine(one: Any) -> None:
    step = Step()
    one.take_step(step_with("good", "bad", "late", step=step))
    assert one.writer.steps == [step]
    assert one._in_use == {"good": ENGINE, "bad": ENGINE, "late": ENGINE}
    one.writer.results = (
        ["sent"],
        [
            Settled("good", ok=True, fenced=True, bytes=4096, took_s=0.5),
            Settled("bad", ok=False, fenced=True),
            Settled("late", ok=False, fenced=False),
        ],
        [],
    )
    results = one.get_transfer_results()
    assert results.finished_sending == {"sent"}
    assert results.finished_recving == {"good", "bad", "late"}
    assert results.failed_recving == {"bad", "late"}
    assert one.get_block_ids_with_load_errors() == set()
    assert one._in_use == {}
    assert one.take_fences() == (["late"], [])
    assert one.take_fences() == ([], [])
    assert one.xfer_stats.data["bytes_transferred"] == [4096]
    assert one.xfer_stats.data["num_descriptors"] == [3]
    assert len(one.xfer_stats.data["num_failed_transfers"]) == 2
    one.writer.results = ([], [], ["late", "of nobody"])
    results = one.get_transfer_results()
    assert results.finished_sending | results.finished_recving | results.failed_recving == set()
    assert one.take_fences() == ([], ["late"])


def test_a_result_for_an_unknown_request_does_not_reach_the_engine(one: Any) -> None:
    one.writer.results = ([], [Settled("x", ok=True, fenced=True), Settled("y", ok=False, fenced=False)], [])
    results = one.get_transfer_results()
    assert results.finished_recving | results.failed_recving == set()
    assert one.take_fences() == ([], [])


def test_a_dead_writer_fails_what_waits_for_it_once(one: Any) -> None:
    one.take_step(step_with("a", "b"))
    one.writer.results = ([], [Settled("b", ok=True, fenced=True)], [])
    one.writer.alive = False
    results = one.get_transfer_results()
    assert results.finished_recving == {"a", "b"}
    assert results.failed_recving == {"a"}
    assert one.take_fences() == (["a"], [])
    assert not one.get_transfer_results().finished_recving


def test_the_engines_thread_waits_for_neither_nixl_nor_a_handshake(one: Any) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with one._guard._lock, one._geometry, one._handshake_lock:
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    try:
        begun = time.monotonic()
        one.take_step(step_with("a", step=Step()))
        one.start_load_kv(None)
        one.writer.results = (["s"], [Settled("a", ok=True, fenced=True)], [])
        assert one.get_transfer_results().finished_recving == {"a"}
        one.get_block_ids_with_load_errors()
        one.get_kv_connector_stats()
        one.take_fences()
        assert time.monotonic() - begun < 5
    finally:
        release.set()
        holder.join(10)


def test_before_and_after_there_is_a_writer_steps_and_results_are_harmless(one: Any) -> None:
    one.writer = None
    one.take_step(step_with(step=Step()))
    assert not one.get_transfer_results().finished_recving


# --- WRITEs -----------------------------------------------------------------------------------------------------------


def upstream_writes(one: Any, ranks: int, *, fails_at: int | None = None) -> None:
    """Do as upstream's `_xfer_blocks_for_req` and `_xfer_blocks` do, for so many decode ranks."""

    def xfer_blocks_for_req(req_id: str, meta: Any) -> None:
        one.meta = meta
        handles = []
        for rank in range(ranks):
            if rank == fails_at:
                raise AssertionError("push block-count mismatch")
            handle = one.nixl_wrapper.make_prepped_xfer("WRITE", "l", [0] * 4, f"r{rank}", [0] * 4, notif_msg=b"theirs")
            try:
                one.nixl_wrapper.transfer(handle)
            except Exception:
                one._send_failures.add(req_id)
                if not one._handle_failed_transfer(req_id, handle):
                    handles.append(handle)
                continue
            handles.append(handle)
        if handles:
            one._sending_transfers[req_id] = handles

    one._xfer_blocks_for_req = xfer_blocks_for_req


def test_a_request_is_posted_to_every_rank_with_our_message(one: Any) -> None:
    upstream_writes(one, 2)
    posted = one.post("p", ([4, 5, 6],), register())
    assert posted.handles == (1, 2)
    assert posted.descriptors == 8
    assert posted.failed == ""
    assert one.meta.local_physical_block_ids == ([5, 6],)
    assert one.meta.remote.block_ids == ([7, 8],)
    for message in one.agent.messages:
        done = wire.decode(message)
        assert isinstance(done, wire.Done)
        assert (done.key, done.attempt, done.writer, done.writers) == ("k", 0, 0, 1)
    assert one._sending_transfers == {}


def test_a_write_in_flight_is_known_when_a_later_one_raises(one: Any) -> None:
    upstream_writes(one, 2, fails_at=1)
    posted = one.post("p", ([4, 5, 6],), register())
    assert posted.handles == (1,)
    assert posted.failed == "AssertionError: push block-count mismatch"


def test_a_rank_that_cannot_be_written_to_is_told_and_the_others_go_on(one: Any) -> None:
    one.agent.refuses = {1}
    upstream_writes(one, 2)
    posted = one.post("p", ([4, 5, 6],), register())
    assert posted.handles == (2,)
    assert posted.failed == "not every rank could be written to"
    assert one._send_failures == set()


def test_a_refused_write_that_cannot_be_released_counts_as_in_flight(one: Any) -> None:
    one.agent.refuses, one.agent.stays = {1}, {1}
    upstream_writes(one, 1)
    assert one.post("p", ([4, 5, 6],), register()).handles == (1,)


def test_nothing_in_flight_is_an_exception(one: Any) -> None:
    upstream_writes(one, 1, fails_at=0)
    with pytest.raises(AssertionError, match="mismatch"):
        one.post("p", ([4, 5, 6],), register())
    one.agent.refuses = {1}
    upstream_writes(one, 1)
    with pytest.raises(RuntimeError, match="NIXL refused"):
        one.post("p", ([4, 5, 6],), register())
    with pytest.raises(ValueError, match="2 blocks from number 2 are asked for"):
        one.post("p", ([4, 5, 6],), register(first_block=[2]))


def test_states_of_a_write(one: Any) -> None:
    assert one.poll(1) == "active"
    one.agent.states[1] = "DONE"
    assert one.poll(1) == "done"
    assert one.agent.released == [1]
    one.agent.states[2] = "ERR"
    assert one.poll(2) == "failed"
    one.agent.states[3] = RuntimeError("backend")
    assert one.poll(3) == "failed"
    one.get_transfer_results()
    assert one.xfer_stats.data["transfer_duration"] == [1.0]
    assert len(one.xfer_stats.data["num_failed_transfers"]) == 2


def test_a_finished_write_is_done_whatever_its_release_says(one: Any) -> None:
    one.agent.states[1], one.agent.stays = "DONE", {1}
    assert one.poll(1) == "done"
    one.agent.get_xfer_telemetry = lambda handle: 1 / 0
    one.agent.states[2] = "DONE"
    assert one.poll(2) == "done"
    assert one.agent.released == [2]
    one.get_transfer_results()


def test_a_failed_write_that_is_not_released_stays_active_without_a_flood(
    one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(worker.logger, "error", lambda text, *args: logged.append(text % args))
    one.agent.states[1], one.agent.stays = RuntimeError("backend"), {1}
    for _ in range(100):
        assert one.poll(1) == "active"
    assert one.agent.asked == 1
    assert len(logged) == 2
    one.get_transfer_results()
    assert len(one.xfer_stats.data["num_failed_transfers"]) == 1
    one.agent.stays = set()
    one._unreleased[1] = 0.0
    assert one.poll(1) == "failed"
    assert one._unreleased == {}


def test_a_disconnect_breaks_the_connection(one: Any) -> None:
    class nixlRemoteDisconnectError(Exception):
        pass

    one._nixl_handshake = lambda **_: ({(0, 0): "a"}, 0.0)
    address = Address(ENGINE, "h", 1, 1, 1, full=True)
    while one.connections.state(address) != "ready":
        one.connections.tick(time.monotonic())
    one.agent.states[1] = nixlRemoteDisconnectError("reset")
    assert one.poll(1) == "failed"
    assert one.writer.lost == [("decode", ENGINE)]
    assert "nixlRemoteDisconnectError: reset" in one.connections.why(ENGINE)


# --- what a registration must fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "more", "word"),
    [
        ({}, {}, ""),
        ({}, {"block_ids": [[99]]}, ""),
        ({}, {"block_ids": [[100]]}, "block 100 is outside the decode engine's 100 blocks"),
        ({}, {"tp_size": 2}, "tensor parallel size 2, but 1 at the handshake"),
        ({"remote_block_size": 32}, {}, "KV blocks of 1 x 32 tokens"),
        ({"remote_physical_blocks_per_logical": 2}, {}, "KV blocks of 2 x 16 tokens"),
    ],
)
def test_refusals(info: dict[str, int], more: dict[str, Any], word: str) -> None:
    refusal = made(transfer_topo=Topology(**info)).refusal(register(**more))
    assert word in refusal
    assert bool(refusal) == bool(word)


def test_blocks_are_counted_as_the_scheduler_counts_them() -> None:
    one = made(
        transfer_topo=Topology(remote_physical_blocks_per_logical=4),
        _physical_blocks_per_logical_kv_block=4,
    )
    assert one.refusal(register(block_ids=[[24]])) == ""
    assert "block 25 is outside the decode engine's 25 blocks" in one.refusal(register(block_ids=[[25]]))


@pytest.mark.parametrize(
    ("ranks", "decode_ranks", "expected"),
    [
        # tensor ranks, pipeline stages, this rank's of each -> its number, writers per decode rank
        ((1, 1, 0, 0), 1, (0, 1)),
        ((4, 1, 3, 0), 2, (3, 2)),
        ((2, 1, 1, 0), 8, (1, 1)),
        ((2, 3, 1, 2), 1, (5, 6)),
    ],
)
def test_writers(ranks: tuple[int, int, int, int], decode_ranks: int, expected: tuple[int, int]) -> None:
    world, stages, tensor_rank, stage = ranks
    assert made(world_size=world, pp_size=stages, tp_rank=tensor_rank, _pp_rank=stage).writers(decode_ranks) == expected


def test_ranks_of_all_engines_of_an_instance_have_ports_of_their_own() -> None:
    found = [
        made(
            world_size=2,
            pp_size=2,
            tp_rank=tensor_rank,
            _pp_rank=stage,
            _vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=index)),
        )._rank_in_instance()
        for index in range(2)
        for stage in range(2)
        for tensor_rank in range(2)
    ]
    assert found == list(range(8))


# --- messages and connections -----------------------------------------------------------------------------------------


def test_a_message_goes_to_every_rank(one: Any) -> None:
    assert one.send(ENGINE, wire.Heartbeat(["k"]))
    assert [name for name, _ in one.agent.sent] == ["agent-0", "agent-1"]
    assert not one.send("engine-x", wire.Heartbeat(["k"]))
    one.agent.send_fails = RuntimeError("gone")
    assert not one.send(ENGINE, wire.Heartbeat(["k"]))
    one.get_transfer_results()
    assert len(one.xfer_stats.data["num_failed_notifications"]) == 2


def test_an_engine_is_busy_until_the_engines_thread_is_done_with_it(one: Any) -> None:
    transport = worker._ConnectionTransport(one)
    one.take_step(step_with("a"))
    assert transport.busy() == {ENGINE}
    one.writer.prefill.busy_engines = lambda: {"engine-x"}
    assert transport.busy() == {ENGINE, "engine-x"}
    one.writer.results = ([], [Settled("a", ok=True, fenced=True)], [])
    one.get_transfer_results()
    assert transport.busy() == {"engine-x"}


def test_state_is_not_dropped_while_a_handshake_is_under_way_and_nobody_waits(one: Any) -> None:
    transport = worker._ConnectionTransport(one)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with one._geometry:
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    assert not transport.release(ENGINE)
    assert ENGINE in one._remote_agents
    release.set()
    holder.join(10)
    assert transport.release(ENGINE)
    assert one._remote_agents == {}
    assert one.agent.calls == ["remove_remote_agent"] * 2
    assert transport.release(ENGINE)


def test_an_agent_that_nixl_has_dropped_by_itself_is_dropped_here_too(one: Any) -> None:
    def gone(name: str) -> None:
        raise KeyError("nixlNotFoundError")

    one.agent.remove_remote_agent = gone
    one.dst_xfer_side_handles[ENGINE] = {0: "list"}
    one.agent.release_dlist_handle = gone
    assert worker._ConnectionTransport(one).release(ENGINE)
    assert one._remote_agents == {}
    assert one.dst_num_blocks == {}


# --- the end ----------------------------------------------------------------------------------------------------------


def test_shutdown_stops_the_writer_and_then_releases_nixl() -> None:
    one = made()
    one.shutdown()
    assert one.agent.calls == [
        "release_dlist_handle",
        "remove_remote_agent",
        "remove_remote_agent",
        "deregister_memory",
    ]
    assert one.writer is None
    one.shutdown()
    one.__del__()
    assert one.agent.calls.count("deregister_memory") == 1


def test_a_writer_that_does_not_end_keeps_its_memory() -> None:
    one = made()
    one.writer.ends = False
    one.shutdown()
    one.__del__()
    assert one.agent.calls == []


def test_a_handshake_that_does_not_end_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SHUTDOWN_S", 0.05)
    one = made()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with one._geometry:
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    one.shutdown()
    assert one.agent.calls == []
    release.set()
    holder.join(10)


def test_the_writer_knows_what_is_in_flight_while_it_drains() -> None:
    one = made()
    seen = []

    def stop(deadline_s: float) -> bool:
        one.writer.prefill.busy_engines = lambda: {ENGINE}
        seen.append(worker._ConnectionTransport(one).busy())
        return True

    one.writer.stop = stop
    one.shutdown()
    assert seen == [{ENGINE}]


def test_an_instance_whose_construction_failed_can_be_deleted() -> None:
    one: Any = object.__new__(PdPushWorker)
    one.shutdown()
    one.__del__()


def test_a_failed_construction_of_upstream_leaves_the_agents_configuration_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = worker.base_worker.nixl_agent_config = lambda **kwargs: kwargs
    given: list[dict[str, Any]] = []

    def construct(self: Any, *args: Any) -> None:
        given.append(worker.base_worker.nixl_agent_config(num_threads=4, capture_telemetry=True))
        raise RuntimeError("no device")

    monkeypatch.setattr(NixlPushConnectorWorker, "__init__", construct)
    for progress in (True, False):
        extra = {"pdctl": {"progress_thread": progress}}
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
        with pytest.raises(RuntimeError, match="no device"):
            PdPushWorker(config, "e", None)
    assert given == [
        {"num_threads": 4, "capture_telemetry": True},
        {"num_threads": 4, "capture_telemetry": True, "enable_prog_thread": False},
    ]
    assert worker.base_worker.nixl_agent_config is original


# --- the scheduler side -----------------------------------------------------------------------------------------------


def scheduler_side(**attributes: Any) -> Any:
    """A scheduler side as its constructor leaves it, as far as these checks need it."""
    one: Any = object.__new__(PdPushScheduler)
    geometry = Geometry(block_sizes=(16,), hybrid=False, blocks=100, clip=tuple)
    one._book = Bookkeeping(geometry, waiting_share=0.5, randomized=True)
    one._block_pool = None
    one.engine_id, one.side_channel_host, one.side_channel_port = "engine-p", "127.0.0.1", 5600
    one.transfer_tp_size = 2
    one.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1),
        num_prefill_lookahead_tokens=0,
    )
    one.use_host_buffer = one._has_mamba = one._bounded_replay = False
    one._reqs_need_recv, one._reqs_need_save, one._reqs_need_send = {}, {}, {}
    one._reqs_in_batch, one._reqs_not_processed = set(), set()
    one._heartbeat_by_engine, one._heartbeat_req_engine = {}, {}
    one._push_registration_deadlines, one._push_pending_registrations = {}, {}
    one._newly_finished_push_blocks, one._finished_request_blocks = {}, {}
    one._nixl_handshake_listener_t, one._stop_event = None, threading.Event()
    # Of vLLM 0.33.
    one._handshake_data, one._registration_generation = {}, 0
    for name, value in attributes.items():
        setattr(one, name, value)
    return one


def request(name: str, **params: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        num_prompt_tokens=40,
        num_computed_tokens=40,
        prompt_token_ids=list(range(40)),
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        get_skip_reading_prefix_cache=lambda: False,
    )


def decode_request(name: str) -> Any:
    return request(name, do_remote_prefill=True, remote_engine_id="engine-p", remote_host="h", remote_port=1, tp_size=1)


def kv_blocks(*ids: int) -> KVCacheBlocks:
    return KVCacheBlocks(([KVCacheBlock(block_id) for block_id in ids],))


def test_a_finished_prefill_answers_with_what_the_router_looks_for() -> None:
    side = scheduler_side()
    finished = request("cmpl-1-0123abcd", do_remote_decode=True, transfer_id="t-1")
    side.on_new_request(finished)
    side.update_state_after_alloc(finished, kv_blocks(1, 2, 3), 0)
    kept, params = side.request_finished(finished, ([1, 2, 3],))
    assert kept
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": ([1, 2, 3],),
        "remote_engine_id": "engine-p",
        "remote_request_id": "cmpl-1-0123abcd",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 40,
        "transfer_mode": "push",
        "transfer_id": "t-1",
    }
    assert side.has_pending_push_work()
    output = SimpleNamespace(
        kv_connector_worker_meta=None, finished_recving=None, finished_sending={finished.request_id}
    )
    side.build_connector_meta(None)
    side.update_connector_output(output)
    assert not side.has_pending_push_work()


def test_an_aborted_prefill_answers_with_nothing() -> None:
    side = scheduler_side()
    aborted = request("a", do_remote_decode=True)
    aborted.status = RequestStatus.FINISHED_ABORTED
    assert side.request_finished(aborted, ([1, 2, 3],)) == (False, None)


def test_upstreams_metadata_carries_our_step_to_the_workers() -> None:
    side = scheduler_side()
    waiting = decode_request("cmpl-1-0123abcd")
    side.on_new_request(waiting)
    assert side.get_num_new_matched_tokens(waiting, 16) == (24, True)
    side.update_state_after_alloc(waiting, kv_blocks(4, 5, 6), 24)
    metadata = pickle.loads(pickle.dumps(side.build_connector_meta(None)))
    assert metadata.reqs_to_recv[waiting.request_id].local_block_ids == ([5, 6],)
    assert metadata.reqs_to_recv[waiting.request_id].remote.engine_id == "engine-p"
    (receive,) = metadata.pdctl.receive
    assert (receive.block_ids, receive.first_block) == (([5, 6],), (1,))
    assert not hasattr(side.build_connector_meta(None), "pdctl")
    one = made()
    one.take_step(metadata)
    assert one.writer.steps == [metadata.pdctl]


def test_a_request_that_has_no_room_is_asked_about_again() -> None:
    side = scheduler_side()
    for name in ("a", "b"):
        waiting = decode_request(name)
        waiting.num_prompt_tokens, waiting.prompt_token_ids = 30 * 16, list(range(30 * 16))
        answer = side.get_num_new_matched_tokens(waiting, 0)
        if name == "a":
            assert answer == (480, True)
            side.update_state_after_alloc(waiting, kv_blocks(*range(30)), 480)
    assert answer == (None, False)


def test_what_ranks_say_of_fences_is_added_up_and_reaches_the_pool() -> None:
    calls: list[tuple[str, list[int]]] = []
    pool = SimpleNamespace(
        touch=lambda blocks: calls.append(("touch", [block.block_id for block in blocks])),
        free_blocks=lambda blocks: calls.append(("free", [block.block_id for block in blocks])),
    )
    side = scheduler_side()
    side.bind_block_pool(pool)
    waiting = decode_request("r")
    side.update_state_after_alloc(waiting, kv_blocks(4, 5, 6), 40)
    side.build_connector_meta(None)
    ranks = [Fences({"r": 1}, {}), Fences({"r": 1}, {}), Fences({}, {})]
    unfenced = pickle.loads(pickle.dumps(ranks[0].aggregate(ranks[1]).aggregate(ranks[2])))
    assert unfenced == Fences({"r": 2}, {})
    for meta, received in ((unfenced, {"r"}), (Fences({}, {"r": 1}), None), (Fences({}, {"r": 1}), None)):
        side.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=received, finished_sending=None)
        )
    assert calls == [("touch", [4, 5, 6]), ("free", [4, 5, 6])]


def handshake_metadata() -> dict[tuple[int, int], NixlHandshakePayload]:
    return {(0, 0): NixlHandshakePayload(compatibility_hash="h", agent_metadata_bytes=b"")}


def test_the_side_channel_is_served_and_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    side = scheduler_side(side_channel_port=port)
    side.set_xfer_handshake_metadata(handshake_metadata())
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    side.shutdown()
    assert side._nixl_handshake_listener_t is None


def test_a_side_channel_that_cannot_listen_ends_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        side = scheduler_side(side_channel_port=taken.getsockname()[1])
        with pytest.raises(RuntimeError, match="the NIXL side channel cannot listen on"):
            side.set_xfer_handshake_metadata(handshake_metadata())


# --- kinds of caches --------------------------------------------------------------------------------------------------

ATTENTION = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**ATTENTION)
LATENT = MLAAttentionSpec(**ATTENTION)
WINDOW = SlidingWindowSpec(**ATTENTION, sliding_window=32)
STATE = MambaSpec(block_size=16, shapes=((1, 2),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([FULL], False),
        ([LATENT], False),
        ([FULL, FULL], False),
        ([UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": LATENT, "b": LATENT})], False),
        ([WINDOW], True),
        ([FULL, WINDOW], True),
        ([FULL, STATE], True),
        ([UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": WINDOW})], True),
    ],
)
def test_which_caches_are_cut_to_their_tail(specs: list[Any], expected: bool) -> None:
    config = SimpleNamespace(transfer_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    assert cut_to_tail(config) is expected
