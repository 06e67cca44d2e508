"""The worker side of PdPushConnector: upstream's geometry, our control plane.

From upstream, called as they are: the registration of KV caches, the handshake and its checks, which ranks and
descriptors a WRITE covers (`_xfer_blocks_for_req`). Ours: when, in which thread, with which message, and what happens
on failure.

Threads, and what keeps them apart:

* The engine's main thread runs the methods that vLLM calls. It never waits for NIXL, for a handshake or for the writer.
* The writer thread (`writer`) runs everything below "The writer thread", and all of `connections`.
* Handshake threads run `_nixl_handshake`, one at a time in the part that changes tables (`_geometry`). What they add
  belongs to an engine that no other thread looks at before the writer has taken the handshake in.
* An engine's tables are dropped by the writer alone, under `_geometry`, and not while the main thread may look at them
  for a result (`_in_use`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.parallel_state import get_pp_group

from . import faults, side_channel, wire
from .alignment import align
from .cache_groups import cut_to_tail
from .connections import Address, Connections
from .decode_side import DecodeSide
from .ledger import Ledger
from .nixl_guard import NixlGuard
from .prefill_side import HandleState, PeerState, Posted, PrefillSide
from .settings import Settings
from .step import BlockIds, Peer, Step
from .telemetry import Telemetry
from .writer import Writer

logger = logging.getLogger("vllm.pdctl_connector.worker")

HANDSHAKE_THREADS = 16
"""Handshakes with engines that do not answer take 5 s each, and must not hold up those with others."""
SHUTDOWN_S = 5.0
RELEASE_AGAIN_S = 1.0
"""How often it is tried to release a WRITE that ended in an error and that NIXL still works on."""


class PdPushWorker(NixlPushConnectorWorker):
    """One rank. See the module's docstring."""

    # Part of the handshake hash: never pairs with upstream's push connector, nor with another protocol version. Base
    # classes only ask whether this is "pull".
    _TRANSFER_MODE = f"push-pdctl-{wire.WIRE_VERSION}"

    # Also for an instance whose construction failed: upstream's __del__ shuts it down.
    writer: Writer | None = None
    telemetry: Telemetry | None = None
    _ended = False

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        config = vllm_config.kv_transfer_config
        self.settings = Settings.from_extra_config(config.kv_connector_extra_config or {})
        with _progress_thread(wanted=self.settings.progress_thread):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        guard = NixlGuard(self.nixl_wrapper, fault=faults.from_environment())
        self.nixl_wrapper: Any = guard
        self._guard = guard
        self._handshake_initiation_executor.shutdown(wait=False)
        self._handshake_initiation_executor: Any = ThreadPoolExecutor(HANDSHAKE_THREADS, "pdctl-handshake")
        self._geometry = threading.RLock()
        self._in_use: dict[str, str] = {}
        self._in_use_lock = threading.Lock()
        self._quarantined: set[str] = set()
        self._fenced_now: list[str] = []
        self._unfenced_now: list[str] = []
        self._unreleased: dict[Any, float] = {}
        self._statistics: queue.SimpleQueue[Callable[[Any], None]] = queue.SimpleQueue()
        self._vllm_config = vllm_config
        self._cut_to_tail = cut_to_tail(kv_cache_config)
        self._pp_rank = get_pp_group().rank_in_group if self.pp_size > 1 else 0
        self._both = config.kv_role == "kv_both"
        self._lease_s = float(config.get_from_extra_config("kv_lease_duration", 30))
        self.connections = Connections(
            _ConnectionTransport(self),
            _ConnectionListener(self),
            patience_s=self.settings.timeout_s,
            unused_s=float(self._engine_ttl),
        )

    # --- set-up and end ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register with NIXL as upstream does, then start our writer in place of upstream's."""
        NixlBaseConnectorWorker.register_kv_caches(self, kv_caches)
        if self._mixed_mem_types:
            raise NotImplementedError("PdPushConnector does not support mixed-memory KV caches")
        if self.writer is not None:
            return
        settings, rank = self.settings, self._rank_in_instance()
        telemetry = Telemetry(
            role=self._vllm_config.kv_transfer_config.kv_role or "",
            engine_id=self.engine_id,
            rank=rank,
            settings=settings,
        )
        ledger = Ledger(observer=telemetry.observe_stage)
        prefill = PrefillSide(
            _PrefillTransport(self),
            ledger,
            lease_s=self._lease_s,
            parked_s=2 * settings.timeout_s,
            tp_size=self.world_size,
        )
        decode = DecodeSide(
            _DecodeTransport(self),
            ledger,
            engine_id=self.engine_id,
            host=envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            port=envs.VLLM_NIXL_SIDE_CHANNEL_PORT + self._vllm_config.parallel_config.data_parallel_index,
            tp_size=self.world_size,
            tp_rank=self.tp_rank,
            timeout_s=settings.timeout_s,
        )
        writer = Writer(prefill, decode, _Link(self))
        telemetry.attach(writer, ledger, self._guard)
        self.telemetry, self.writer = telemetry, writer
        writer.start()
        telemetry.serve()
        logger.info("pdctl writer started (rank %d, telemetry port %s)", rank, telemetry.port)

    def shutdown(self) -> None:
        """Drain, stop our threads, then let upstream release what it registered. Takes seconds at most."""
        if self._ended:
            return
        self._ended = True
        # Still there for the writer while it drains: it must know what is in flight.
        stopped = self.writer is None or self.writer.stop(SHUTDOWN_S)
        if self.telemetry is not None:
            self.telemetry.close()
        if hasattr(self, "_handshake_initiation_executor"):
            self._handshake_initiation_executor.shutdown(wait=False, cancel_futures=True)
        geometry = getattr(self, "_geometry", None) or threading.RLock()
        # A thread that is inside NIXL now uses what would be released.
        if not stopped or not geometry.acquire(timeout=SHUTDOWN_S):
            what = "a handshake" if stopped else "the writer"
            logger.error("%s did not end within %.0f s; NIXL is left to the end of the process", what, SHUTDOWN_S)
            return
        try:
            self.writer = None
            NixlBaseConnectorWorker.shutdown(self)
        finally:
            geometry.release()

    def _rank_in_instance(self) -> int:
        """Over all data-parallel engines of the instance, as pdctl plans telemetry ports."""
        ranks = self.world_size * self.pp_size
        inside = self._pp_rank * self.world_size + self.tp_rank
        return int(self._vllm_config.parallel_config.data_parallel_index * ranks + inside)

    # --- the engine's main thread ------------------------------------------------------------------------------------

    def take_step(self, metadata: Any) -> None:
        """Take an engine step's news before its forward: nothing here waits for the GPU or the network."""
        for request_id, meta in metadata.reqs_to_recv.items():
            meta.local_physical_block_ids = self._logical_to_kernel_block_ids(
                meta.local_block_ids, self._physical_blocks_per_logical_kv_block
            )
            self._recving_metadata[request_id] = meta
            with self._in_use_lock:
                self._in_use[request_id] = meta.remote.engine_id
        step: Step | None = getattr(metadata, "pdctl", None)
        if step is not None and self.writer is not None:
            self.writer.hand_over(step)

    def start_load_kv(self, metadata: Any) -> None:
        """Nothing left to do: `take_step` was before the forward."""
        del metadata

    def _get_new_notifs(self) -> set[str]:
        # Asked by upstream's get_transfer_results. The writer reads notifications.
        return set()

    def get_transfer_results(self) -> Any:
        """What the writer has finished since the last step."""
        sent: list[str] = []
        if self.writer is not None:
            sent, settled, fenced = self.writer.take()
            for entry in settled:
                self._settle(entry.request_id, entry.ok, entry.fenced, entry.bytes, entry.took_s)
            for request_id in fenced:
                if request_id in self._quarantined:
                    self._quarantined.discard(request_id)
                    self._fenced_now.append(request_id)
            if not self.writer.alive:
                self._fail_all()
        while not self._statistics.empty():
            self._statistics.get_nowait()(self.xfer_stats)
        results = NixlBaseConnectorWorker.get_transfer_results(self)
        # Only now: until here upstream looks at the engines of what was received.
        with self._in_use_lock:
            for request_id in results.finished_recving:
                self._in_use.pop(request_id, None)
        results.finished_sending.update(sent)
        return results

    def _settle(self, request_id: str, ok: bool, fenced: bool, size: int, took_s: float) -> None:
        meta = self._recving_metadata.get(request_id)
        if meta is None:
            logger.error("transfer of %s ended, but the engine does not know the request", request_id)
            return
        if ok:
            # Upstream reports a request as received when none of its handles is left.
            self._recving_transfers.setdefault(request_id, [])
            # Upstream counts transfers on the side that owns the handles, so decode saw none in push mode.
            self.xfer_stats.record_transfer(
                SimpleNamespace(
                    xferDuration=took_s * 1e6,
                    postDuration=0.0,
                    totalBytes=size,
                    descCount=sum(len(group) for group in meta.local_block_ids),
                )
            )
        else:
            self._failed_recv_reqs.put(request_id)
            self.xfer_stats.record_failed_transfer()
        if not fenced:
            self._quarantined.add(request_id)
            self._unfenced_now.append(request_id)

    def _fail_all(self) -> None:
        """The writer is dead, which no exception of its parts can cause: no request may wait for it."""
        waiting = [name for name in self._recving_metadata if name not in self._recving_transfers]
        if waiting:
            logger.error("the writer thread is dead: %d transfers fail; restart this instance", len(waiting))
        for request_id in waiting:
            self._settle(request_id, ok=False, fenced=False, size=0, took_s=0.0)

    def take_fences(self) -> tuple[list[str], list[str]]:
        """Requests that were settled without a fence, and requests that got theirs, since the last call."""
        unfenced, self._unfenced_now = self._unfenced_now, []
        fenced, self._fenced_now = self._fenced_now, []
        return unfenced, fenced

    def get_block_ids_with_load_errors(self) -> set[int]:
        """None: failures are reported by request. Named blocks are recomputed in place, where a late WRITE may land."""
        NixlBaseConnectorWorker.get_block_ids_with_load_errors(self)
        return set()

    # --- handshake threads -------------------------------------------------------------------------------------------

    def add_remote_agent(self, *args: Any, **kwargs: Any) -> str:
        """As upstream's, one at a time: it fills tables that engines share."""
        with self._geometry:
            name: str = super().add_remote_agent(*args, **kwargs)
            return name

    def _add_notif_only_remote_agent(self, *args: Any, **kwargs: Any) -> str:
        with self._geometry:
            name: str = super()._add_notif_only_remote_agent(*args, **kwargs)
            return name

    # --- the writer thread: messages ---------------------------------------------------------------------------------

    def send(self, engine_id: str, message: wire.Message) -> bool:
        """Send a message to every rank of a connected engine that this rank deals with."""
        data = wire.encode(message)
        agents = self._remote_agents.get(engine_id)
        sent = bool(agents)
        for name in list(agents.values()) if agents else ():
            try:
                self.nixl_wrapper.send_notif(name, data)
            except Exception as error:
                sent = False
                self._statistics.put(_failed_notification)
                self.connections.broke(engine_id, error)
        if self.telemetry is not None:
            self.telemetry.count_sent(message.kind, sent)
        return sent

    # --- the writer thread: WRITEs -----------------------------------------------------------------------------------

    def writers(self, tp_size: int) -> tuple[int, int]:
        """This rank over all pipeline and tensor ranks, and how many ranks write to each decode rank."""
        rank = self._pp_rank * self.world_size + self.tp_rank
        return rank, self.pp_size * max(1, self.world_size // max(1, tp_size))

    def refusal(self, registration: wire.Register) -> str:
        """Why the registration does not fit what the handshake said; empty if it does. For a connected engine."""
        info = self.transfer_topo.get_engine_info(registration.engine_id)
        if info.remote_tp_size != registration.tp_size:
            return f"tensor parallel size {registration.tp_size}, but {info.remote_tp_size} at the handshake"
        # Upstream's push mode transfers equal blocks only: decode would fail in its own post-processing.
        theirs = info.remote_block_size, info.remote_physical_blocks_per_logical
        ours = self.block_size, self._physical_blocks_per_logical_kv_block
        if theirs != ours:
            return (
                f"KV blocks of {theirs[1]} x {theirs[0]} tokens on the decode side, of {ours[1]} x {ours[0]} here; "
                "use the same --block-size and attention backend on both sides"
            )
        there = self.dst_num_blocks[registration.engine_id] // max(1, theirs[1])
        highest = max((max(group) for group in registration.block_ids if group), default=0)
        if highest >= there:
            return f"block {highest} is outside the decode engine's {there} blocks"
        return ""

    def post(self, request_id: str, block_ids: BlockIds, registration: wire.Register) -> Posted:
        """Post the WRITEs of a request, with DONE as their message.

        Raises:
            Exception: whatever went wrong, when no WRITE is in flight.
        """
        by_index = len(block_ids) == 1 and not self._cut_to_tail
        local = align(block_ids, registration.block_ids, registration.first_block, by_index=by_index)
        meta = ReqMeta(
            local_block_ids=local,
            local_physical_block_ids=self._logical_to_kernel_block_ids(
                local, self._physical_blocks_per_logical_kv_block
            ),
            tp_size=self.world_size,
            remote=RemoteMeta(
                block_ids=tuple(list(group) for group in registration.block_ids),
                host="",
                port=0,
                engine_id=registration.engine_id,
                request_id=registration.request_id,
            ),
        )
        rank, writers = self.writers(registration.tp_size)

        def done(size: int) -> bytes:
            key, attempt = registration.key, registration.attempt
            return wire.encode(wire.Done(key=key, attempt=attempt, writer=rank, writers=writers, bytes=size))

        error: Exception | None = None
        with self._guard.message(done) as made:
            try:
                self._xfer_blocks_for_req(req_id=request_id, meta=meta)
            except Exception as caught:
                error = caught
        with self._sending_transfers_lock:
            kept = self._sending_transfers.pop(request_id, [])
            refused = request_id in self._send_failures
            self._send_failures.discard(request_id)
        # Not only what upstream names: an exception at the second rank leaves the WRITE to the first one in flight.
        writes = [write for write in made if write.posted or any(write.handle is handle for handle in kept)]
        if not writes:
            raise error or RuntimeError("NIXL refused the WRITE; the log above says why")
        failed = ""
        if error is not None:
            failed = f"{type(error).__name__}: {error}"
        elif refused:
            failed = "not every rank could be written to"
        return Posted(
            handles=tuple(write.handle for write in writes),
            descriptors=sum(write.descriptors for write in writes),
            bytes=sum(write.bytes for write in writes),
            failed=failed,
        )

    def poll(self, handle: Any) -> HandleState:
        """State of a WRITE. One that failed and cannot be released is not over: its memory stays in use."""
        if handle in self._unreleased:
            return self._give_back(handle)
        try:
            state = self.nixl_wrapper.check_xfer_state(handle)
        except Exception as error:
            self._engine_of_handle_broke(handle, error)
            return self._give_back(handle, f"{type(error).__name__}: {error}")
        if state == "PROC":
            return "active"
        if state != "DONE":
            return self._give_back(handle, str(state))
        for work in (self._record, self.nixl_wrapper.release_xfer_handle):
            try:
                work(handle)
            except Exception as error:
                # Complete all the same: nothing reads its memory any more.
                logger.warning("after a WRITE: %s: %s", type(error).__name__, error)
        return "done"

    def _record(self, handle: Any) -> None:
        telemetry = self.nixl_wrapper.get_xfer_telemetry(handle)
        self._statistics.put(lambda statistics: statistics.record_transfer(telemetry))

    def _give_back(self, handle: Any, problem: str = "") -> HandleState:
        now = time.monotonic()
        if problem:
            logger.error("a WRITE ended in an error: %s", problem)
            self._statistics.put(_failed_transfer)
        elif now < self._unreleased[handle]:
            return "active"
        try:
            self.nixl_wrapper.release_xfer_handle(handle)
        except Exception as error:
            if handle not in self._unreleased:
                logger.error(
                    "its memory stays in use, for NIXL does not release it: %s: %s", type(error).__name__, error
                )
            self._unreleased[handle] = now + RELEASE_AGAIN_S
            return "active"
        self._unreleased.pop(handle, None)
        return "failed"

    def _engine_of_handle_broke(self, handle: Any, error: Exception) -> None:
        # Other errors may be of this WRITE alone.
        if self.writer is not None and "Disconnect" in type(error).__name__:
            engine_id = self.writer.prefill.engine_of(handle)
            if engine_id:
                self.connections.broke(engine_id, error)


class _ConnectionTransport:
    """What `Connections` needs of the worker."""

    def __init__(self, worker: PdPushWorker) -> None:
        self._worker = worker

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = self._worker._handshake_initiation_executor.submit(work)
        return future

    def handshake(self, address: Address) -> Any:
        return self._worker._nixl_handshake(
            host=address.host,
            port=address.port,
            remote_tp_size=address.tp_size,
            expected_engine_id=address.engine_id,
            remote_dcp_size=1,
            remote_pp_size=address.pp_size,
            notif_agents_only=not address.full,
        )

    def adopt(self, engine_id: str, result: Any) -> None:
        agents, clock_offset = result
        with self._worker._handshake_lock:
            self._worker._remote_agents[engine_id] = agents
            self._worker._engine_clock_offset[engine_id] = clock_offset

    def release(self, engine_id: str) -> bool:
        worker = self._worker
        if engine_id not in worker._remote_agents:
            return True
        # A handshake may be inside NIXL for seconds; the writer has other work meanwhile.
        if not worker._geometry.acquire(blocking=False):
            return False
        try:
            worker._cleanup_remote_engine(engine_id, log_eviction=False)
        finally:
            worker._geometry.release()
        return True

    def busy(self) -> set[str]:
        worker = self._worker
        busy = worker.writer.prefill.busy_engines() if worker.writer is not None else set()
        with worker._in_use_lock:
            return busy.union(worker._in_use.values())

    def presence(self, host: str, port: int, engine_id: str, timeout_s: float) -> side_channel.Presence:
        return side_channel.presence(host, port, engine_id, timeout_s)


class _ConnectionListener:
    """Tells the two sides, the counters and upstream's statistics what happens to connections."""

    def __init__(self, worker: PdPushWorker) -> None:
        self._worker = worker

    def connected(self, engine_id: str) -> None:
        del engine_id
        if self._worker.telemetry is not None:
            self._worker.telemetry.count_handshake("ready")

    def not_connected(self, engine_id: str, detail: str, now: float) -> None:
        self._worker._statistics.put(_failed_handshake)
        if self._worker.telemetry is not None:
            self._worker.telemetry.count_handshake("failed")
        if self._worker.writer is not None:
            self._worker.writer.prefill.engine_lost(engine_id, detail, now)

    def broke(self, engine_id: str, detail: str, now: float) -> None:
        # Prefill's registrations stand until the connection is back, or cannot be made: they came from decode, which
        # fails them itself if it lost prefill too. Its WRITEs in flight end by themselves.
        if self._worker.writer is not None:
            self._worker.writer.decode.peer_lost(engine_id, detail, now)

    def replaced(self, engine_id: str, detail: str, now: float) -> None:
        if self._worker.writer is not None:
            self._worker.writer.decode.peer_lost(engine_id, detail, now)
            self._worker.writer.prefill.engine_lost(engine_id, detail, now, gone=True)


class _PrefillTransport:
    def __init__(self, worker: PdPushWorker) -> None:
        self._connections = worker.connections
        self.writers = worker.writers
        self.send = worker.send
        self.post = worker.post
        self.poll = worker.poll
        self.refusal = worker.refusal

    def connect(self, registration: wire.Register | wire.Cancel) -> PeerState:
        return self._connections.state(
            Address(registration.engine_id, registration.host, registration.port, registration.tp_size, 1, full=True)
        )


class _DecodeTransport:
    def __init__(self, worker: PdPushWorker) -> None:
        self._connections = worker.connections
        self.tell = lambda peer, message: worker.send(peer.engine_id, message)
        # An engine that is written to as well is connected for that at once.
        self._both = worker._both

    def reach(self, peer: Peer) -> PeerState:
        full = self._both and peer.pp_size == 1
        return self._connections.state(
            Address(peer.engine_id, peer.host, peer.port, peer.tp_size, peer.pp_size, full=full)
        )

    def why_failed(self, peer: Peer) -> str:
        return self._connections.why(peer.engine_id)

    def gone(self, peer: Peer) -> bool:
        return self._connections.gone(peer.engine_id)


class _Link:
    def __init__(self, worker: PdPushWorker) -> None:
        self._worker = worker

    def notifications(self) -> list[bytes]:
        return [data for batch in self._worker.nixl_wrapper.get_new_notifs().values() for data in batch]

    def housekeeping(self, now: float) -> None:
        self._worker.connections.tick(now)


def _failed_transfer(statistics: Any) -> None:
    statistics.record_failed_transfer()


def _failed_notification(statistics: Any) -> None:
    statistics.record_failed_notification()


def _failed_handshake(statistics: Any) -> None:
    statistics.record_failed_handshake()


@contextlib.contextmanager
def _progress_thread(*, wanted: bool) -> Iterator[None]:
    """While it lasts, NIXL agents are configured with or without their own progress thread."""
    original = base_worker.nixl_agent_config
    if wanted or original is None:
        yield
        return

    def configured(*args: Any, **kwargs: Any) -> Any:
        return original(*args, enable_prog_thread=False, **kwargs)

    base_worker.nixl_agent_config = configured
    try:
        yield
    finally:
        base_worker.nixl_agent_config = original
