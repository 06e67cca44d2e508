"""The worker side of PdPushConnector: upstream's geometry, our control plane.

From upstream, called as they are: the registration of KV caches, the handshake and its checks, which ranks and descriptors
a WRITE covers (`_xfer_blocks_for_req`). Ours: when, in which thread, with which message, and what happens on failure.
Engine state (agents, prepared lists) changes in the writer thread alone, except inside a handshake, and always under
`_geometry`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from . import faults, side_channel, wire
from .decode_side import DecodeSide
from .ledger import Ledger
from .nixl_guard import NixlGuard
from .prefill_side import HandleState, PeerState, Posted, PrefillSide
from .settings import Settings
from .step import BlockIds, Peer, Step
from .telemetry import Telemetry
from .writer import Writer

logger = logging.getLogger("vllm.pdctl_connector.worker")

HANDSHAKE_THREADS = 4
BACKOFF_FIRST_S = 0.5
BACKOFF_LAST_S = 15.0
GONE_PROBE_S = 3.0
SHUTDOWN_S = 5.0


@dataclass
class _Connection:
    """What is known of a peer engine. `full` has descriptors for WRITEs; the other kind carries messages alone."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int
    full: bool
    state: Literal["connecting", "ready", "failed", "broken"] = "connecting"
    error: str = ""
    retry_at: float = 0.0
    backoff_s: float = BACKOFF_FIRST_S
    broken_at: float | None = None
    future: Future[Any] | None = None
    presence: side_channel.Presence | None = None
    presence_at: float = 0.0
    presence_future: Future[Any] | None = None
    last_used: float = field(default_factory=time.monotonic)


class PdPushWorker(NixlPushConnectorWorker):
    """One rank. See the module's docstring."""

    # Part of the handshake hash: never pairs with upstream's push connector, nor with another protocol version. Base
    # classes only ask whether this is "pull".
    _TRANSFER_MODE = f"push-pdctl-{wire.WIRE_VERSION}"

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        config = vllm_config.kv_transfer_config
        self.settings = Settings.from_extra_config(config.kv_connector_extra_config or {})
        with _progress_thread(self.settings.progress_thread):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self.nixl_wrapper = NixlGuard(self.nixl_wrapper, fault=faults.from_environment())
        self._handshake_initiation_executor.shutdown(wait=False)
        self._handshake_initiation_executor = ThreadPoolExecutor(HANDSHAKE_THREADS, "pdctl-handshake")
        self._geometry = threading.RLock()
        self._connections: dict[str, _Connection] = {}
        self._handshaken: queue.SimpleQueue[tuple[_Connection, Future[Any]]] = queue.SimpleQueue()
        self._handle_sizes: dict[Any, tuple[int, int]] = {}
        self._statistics: queue.SimpleQueue[Callable[[Any], None]] = queue.SimpleQueue()
        self._quarantined: set[str] = set()
        self._fenced_now: list[str] = []
        self._unfenced_now: list[str] = []
        self._vllm_config = vllm_config
        self.telemetry: Telemetry | None = None
        parallel = vllm_config.parallel_config
        self._pp_size = parallel.pipeline_parallel_size
        self._lease_s = float(config.get_from_extra_config("kv_lease_duration", 30))
        self.writer: Writer | None = None
        self.ledger: Ledger | None = None
        self._engine_host, self._engine_port = _side_channel_address(vllm_config)

    # --- set-up and end ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register with NIXL as upstream does, then start our writer in place of upstream's."""
        NixlBaseConnectorWorker.register_kv_caches(self, kv_caches)
        if self._mixed_mem_types:
            raise NotImplementedError("PdPushConnector does not support mixed-memory KV caches")
        if self.writer is not None:
            return
        settings = self.settings
        telemetry = Telemetry(
            role=self._vllm_config.kv_transfer_config.kv_role or "",
            engine_id=self.engine_id,
            rank=self._global_rank(),
            settings=settings,
        )
        self.ledger = Ledger(observer=telemetry.observe_stage)
        prefill = PrefillSide(
            _PrefillTransport(self), self.ledger, lease_s=self._lease_s, parked_s=2 * settings.timeout_s
        )
        decode = DecodeSide(
            _DecodeTransport(self),
            self.ledger,
            engine_id=self.engine_id,
            host=self._engine_host,
            port=self._engine_port,
            tp_size=self.world_size,
            tp_rank=self.tp_rank,
            timeout_s=settings.timeout_s,
        )
        self.writer = Writer(prefill, decode, _Link(self))
        telemetry.attach(self.writer, self.ledger, self.nixl_wrapper)
        self.telemetry = telemetry
        telemetry.serve()
        self.writer.start()
        logger.info("pdctl writer started (rank %d, telemetry port %s)", self._global_rank(), telemetry.port)

    def _push_writer_loop(self) -> None:
        raise AssertionError("upstream's writer must not run beside ours")

    def shutdown(self) -> None:
        """Drain, stop our threads, then let upstream release what it registered."""
        writer = getattr(self, "writer", None)
        if writer is not None:
            self.writer = None
            if not writer.stop(SHUTDOWN_S):
                logger.error(
                    "the writer did not end within %.0f s; NIXL state is left to the end of the process", SHUTDOWN_S
                )
                return
        if self.telemetry is not None:
            self.telemetry.close()
        if hasattr(self, "_handshake_initiation_executor"):
            self._handshake_initiation_executor.shutdown(wait=False, cancel_futures=True)
        NixlBaseConnectorWorker.shutdown(self)

    # --- the engine's main thread ------------------------------------------------------------------------------------

    def take_step(self, metadata: Any) -> None:
        """Take an engine step's news before its forward: nothing here waits for the GPU or the network."""
        for request_id, meta in metadata.reqs_to_recv.items():
            meta.local_physical_block_ids = self._logical_to_kernel_block_ids(
                meta.local_block_ids, self._physical_blocks_per_logical_kv_block
            )
            self._recving_metadata[request_id] = meta
        step: Step | None = getattr(metadata, "pdctl", None)
        if step and self.writer is not None:
            self.writer.hand_over(step)

    def start_load_kv(self, metadata: Any) -> None:
        """Nothing left to do: `take_step` was before the forward."""
        del metadata

    def _get_new_notifs(self) -> set[str]:
        return set()

    def get_transfer_results(self) -> Any:
        """What the writer has finished since the last step."""
        if self.writer is None:
            return NixlBaseConnectorWorker.get_transfer_results(self)
        sent, settled, fenced = self.writer.take()
        while not self._statistics.empty():
            self._statistics.get_nowait()(self.xfer_stats)
        for entry in settled:
            if entry.request_id not in self._recving_metadata:
                logger.error("transfer of %s ended, but the engine does not know the request", entry.request_id)
                continue
            if entry.ok:
                self._recving_transfers.setdefault(entry.request_id, [])
                # Upstream counts transfers at the side that owns the handles alone, so decode saw none in push mode.
                self.xfer_stats.record_transfer(
                    SimpleNamespace(
                        xferDuration=entry.took_s * 1e6,
                        postDuration=0.0,
                        totalBytes=entry.bytes,
                        descCount=self._blocks_of(entry.request_id),
                    )
                )
            else:
                self._failed_recv_reqs.put(entry.request_id)
                self.xfer_stats.record_failed_transfer()
            if not entry.fenced:
                self._quarantined.add(entry.request_id)
                self._unfenced_now.append(entry.request_id)
        for request_id in fenced:
            if request_id in self._quarantined:
                self._quarantined.discard(request_id)
                self._fenced_now.append(request_id)
        with self._geometry:
            results = NixlBaseConnectorWorker.get_transfer_results(self)
        results.finished_sending.update(sent)
        return results

    def take_fences(self) -> tuple[list[str], list[str]]:
        """Requests that were settled without a fence, and requests that got theirs, since the last call."""
        unfenced, self._unfenced_now = self._unfenced_now, []
        fenced, self._fenced_now = self._fenced_now, []
        return unfenced, fenced

    def get_block_ids_with_load_errors(self) -> set[int]:
        """None: failures are reported per request. Named blocks would be recomputed in place, where a late WRITE may land."""
        NixlBaseConnectorWorker.get_block_ids_with_load_errors(self)
        return set()

    def _blocks_of(self, request_id: str) -> int:
        meta = self._recving_metadata.get(request_id)
        return sum(len(group) for group in meta.local_block_ids) if meta is not None else 0

    # --- upstream's control plane, which must not run ----------------------------------------------------------------

    def _send_heartbeats(self, metadata: Any) -> None:
        del metadata

    def _evict_stale_engines(self) -> None:
        """Not here: connections are kept or dropped by the writer, which knows what is in flight."""

    # --- geometry under the lock -------------------------------------------------------------------------------------

    def add_remote_agent(self, *args: Any, **kwargs: Any) -> str:
        """As upstream's, one at a time: it fills tables that WRITEs read."""
        with self._geometry:
            name: str = super().add_remote_agent(*args, **kwargs)
            return name

    def _add_notif_only_remote_agent(self, *args: Any, **kwargs: Any) -> str:
        with self._geometry:
            name: str = super()._add_notif_only_remote_agent(*args, **kwargs)
            return name

    def _global_rank(self) -> int:
        parallel = self._vllm_config.parallel_config
        inside = getattr(self, "pp_rank", 0) * self.world_size + self.tp_rank
        data_rank = getattr(parallel, "data_parallel_rank_local", None) or 0
        return int(data_rank * self.world_size * self._pp_size + inside)

    # --- connections: the writer thread alone --------------------------------------------------------------------------

    def connection(
        self, engine_id: str, host: str, port: int, tp_size: int, pp_size: int, *, full: bool
    ) -> _Connection:
        """The connection to an engine; begins a handshake if there is none, or if the last one may be tried again."""
        now = time.monotonic()
        known = self._connections.get(engine_id)
        if known is not None:
            known.last_used = now
            if known.state == "connecting" or (known.state == "ready" and (known.full or not full)):
                return known
            if known.state == "failed" and now < known.retry_at:
                return known
            if known.state in ("ready", "broken"):
                if engine_id in self._busy_engines() or (known.state == "broken" and now < known.retry_at):
                    return known
                self._drop(known)
        made = _Connection(engine_id, host, port, tp_size, pp_size, full)
        if known is not None:
            made.backoff_s = min(2 * known.backoff_s, BACKOFF_LAST_S)
            made.presence, made.presence_at = known.presence, known.presence_at
        self._connections[engine_id] = made
        future = self._handshake_initiation_executor.submit(
            self._nixl_handshake, host, port, tp_size, engine_id, 1, pp_size, not full
        )
        made.future = future
        future.add_done_callback(lambda f, c=made: self._handshaken.put((c, f)))
        return made

    def mark_broken(self, engine_id: str, error: BaseException) -> None:
        """The connection to an engine broke: what is in flight ends by itself, then it is made anew."""
        known = self._connections.get(engine_id)
        if known is None or known.state == "broken":
            return
        logger.warning("connection to engine %s is broken: %s: %s", engine_id, type(error).__name__, error)
        known.state = "broken"
        known.error = f"{type(error).__name__}: {error}"
        known.broken_at = time.monotonic()
        known.retry_at = known.broken_at + known.backoff_s
        if self.writer is not None:
            self.writer.decode.peer_lost(engine_id, known.error, time.monotonic())

    def keep_connections(self, now: float) -> None:
        """Take finished handshakes in; drop engines that were replaced on their address, or are broken and unused."""
        while not self._handshaken.empty():
            made, future = self._handshaken.get_nowait()
            if self._connections.get(made.engine_id) is not made:
                continue
            error = future.exception()
            if error is not None:
                made.state = "failed"
                made.error = f"{type(error).__name__}: {error}"
                made.retry_at = now + made.backoff_s
                logger.warning("no connection to engine %s at %s:%d: %s", made.engine_id, made.host, made.port, error)
                self._statistics.put(lambda stats: stats.record_failed_handshake())
                if self.telemetry is not None:
                    self.telemetry.count_handshake("failed")
                if self.writer is not None:
                    self.writer.prefill.engine_lost(made.engine_id, made.error, now)
                continue
            agents, offset = future.result()
            with self._handshake_lock:
                self._remote_agents[made.engine_id] = agents
                self._engine_clock_offset[made.engine_id] = offset
            made.state = "ready"
            if self.telemetry is not None:
                self.telemetry.count_handshake("ready")
            for other in list(self._connections.values()):
                if other is not made and (other.host, other.port) == (made.host, made.port):
                    # Another engine answers there now: the former one does not exist any more.
                    other.presence, other.presence_at = "replaced", now
                    if other.state == "ready":
                        other.state, other.broken_at = "broken", now
                        other.error = f"replaced by {made.engine_id}"
                        if self.writer is not None:
                            self.writer.decode.peer_lost(other.engine_id, other.error, now)
                            self.writer.prefill.engine_lost(other.engine_id, other.error, now)
        busy: set[str] | None = None
        for known in list(self._connections.values()):
            if known.state == "broken" and known.engine_id in self._remote_agents:
                busy = self._busy_engines() if busy is None else busy
                if known.engine_id not in busy:
                    self._drop(known)
            elif known.state in ("failed", "broken") and now - known.last_used > 600:
                del self._connections[known.engine_id]

    def _drop(self, known: _Connection) -> None:
        if known.engine_id not in self._remote_agents:
            return
        try:
            with self._geometry:
                self._cleanup_remote_engine(known.engine_id, log_eviction=False)
        except Exception:
            logger.exception("NIXL state of engine %s could not be released cleanly", known.engine_id)

    def _busy_engines(self) -> set[str]:
        busy = self.writer.prefill.busy_engines() if self.writer is not None else set()
        # The engine's main thread still looks an engine up for a request that was received.
        for meta in list(self._recving_metadata.values()):
            if meta.remote is not None:
                busy.add(meta.remote.engine_id)
        return busy

    def gone(self, peer: Peer) -> bool:
        """True when the engine's process certainly ended: another engine answers on its address, or nothing listens
        there and NIXL has lost it."""
        known = self._connections.get(peer.engine_id)
        if known is None:
            return False
        if known.presence == "replaced" or (known.presence == "refused" and known.state in ("broken", "failed")):
            return True
        now = time.monotonic()
        if known.presence_future is None and now - known.presence_at > GONE_PROBE_S:
            known.presence_at = now
            future = self._handshake_initiation_executor.submit(
                side_channel.presence, known.host, known.port, known.engine_id, GONE_PROBE_S
            )
            known.presence_future = future
        elif known.presence_future is not None and known.presence_future.done():
            known.presence = known.presence_future.result()
            known.presence_future = None
        return False

    def send(self, engine_id: str, message: wire.Message) -> bool:
        """Send a message to every rank of a connected engine that this rank deals with."""
        data = wire.encode(message)
        agents = self._remote_agents.get(engine_id)
        if not agents:
            return False
        sent = True
        for name in list(agents.values()):
            try:
                self.nixl_wrapper.send_notif(name, data)
            except Exception as error:
                sent = False
                self._statistics.put(lambda stats: stats.record_failed_notification())
                self.mark_broken(engine_id, error)
        if self.telemetry is not None:
            self.telemetry.count_sent(message.kind, sent)
        return sent

    # --- WRITEs: the writer thread alone -----------------------------------------------------------------------------

    def post(self, request_id: str, block_ids: BlockIds, registration: wire.Register) -> Posted:
        """Post the WRITEs of a request, with DONE as their message."""
        rank, writers = self.writers(registration.tp_size)
        info = self.transfer_topo.get_engine_info(registration.engine_id)
        local = align(block_ids, registration, same_block_size=info.remote_block_size == self.block_size)
        remote = tuple(list(group) for group in registration.block_ids)
        bytes_each = self._bytes_of(local)
        done = wire.encode(
            wire.Done(
                key=registration.key,
                attempt=registration.attempt,
                writer=rank,
                writers=writers,
                bytes=bytes_each,
            )
        )
        meta = ReqMeta(
            local_block_ids=local,
            local_physical_block_ids=self._logical_to_kernel_block_ids(
                local, self._physical_blocks_per_logical_kv_block
            ),
            tp_size=self.world_size,
            remote=RemoteMeta(
                block_ids=remote, host="", port=0, engine_id=registration.engine_id, request_id=registration.request_id
            ),
        )
        error: BaseException | None = None
        with self._geometry, self.nixl_wrapper.message(done) as made:
            try:
                self._xfer_blocks_for_req(req_id=request_id, meta=meta)
            except Exception as caught:
                error = caught
        with self._sending_transfers_lock:
            handles = self._sending_transfers.pop(request_id, [])
            could_not_post = request_id in self._send_failures
            self._send_failures.discard(request_id)
        if not handles:
            if error is not None:
                raise error
            raise RuntimeError("NIXL refused the WRITE; the log above says why")
        sizes = dict(made)
        return Posted(
            handles=tuple(handles),
            descriptors=sum(sizes.get(handle, 0) for handle in handles),
            bytes=bytes_each * len(handles),
            failed=f"{error}" if error is not None else "not every rank could be written to" if could_not_post else "",
        )

    def poll(self, handle: Any) -> HandleState:
        """State of a WRITE. A handle that cannot be released is not over: its memory stays pinned."""
        try:
            state = self.nixl_wrapper.check_xfer_state(handle)
        except Exception as error:
            logger.error("a WRITE ended in an error: %s: %s", type(error).__name__, error)
            self._statistics.put(lambda stats: stats.record_failed_transfer())
            self._engine_of_handle_broke(handle, error)
            return "failed" if self._try_release_xfer_handle("", handle) else "active"
        if state == "PROC":
            return "active"
        if state == "DONE":
            try:
                result = self.nixl_wrapper.get_xfer_telemetry(handle)
            except Exception:
                result = None
            self._statistics.put(lambda stats: stats.record_transfer(result))
            if not self._try_release_xfer_handle("", handle):
                return "active"
            return "done"
        self._statistics.put(lambda stats: stats.record_failed_transfer())
        return "failed" if self._try_release_xfer_handle("", handle) else "active"

    def _engine_of_handle_broke(self, handle: Any, error: BaseException) -> None:
        if self.writer is None or "Disconnect" not in type(error).__name__:
            return
        engine_id = self.writer.prefill.engine_of(handle)
        if engine_id:
            self.mark_broken(engine_id, error)

    def writers(self, tp_size: int) -> tuple[int, int]:
        """This rank over all pipeline and tensor ranks, and how many ranks write to each decode rank."""
        rank = getattr(self, "pp_rank", 0) * self.world_size + self.tp_rank
        return rank, self._pp_size * max(1, self.world_size // max(1, tp_size))

    def refusal(self, registration: wire.Register) -> str:
        """Why the registration does not fit what the handshake said; empty if it does."""
        blocks = self.dst_num_blocks.get(registration.engine_id)
        if blocks is None:
            return "the decode engine has not shown its memory"
        info = self.transfer_topo.get_engine_info(registration.engine_id) if self.transfer_topo else None
        per_logical = info.remote_physical_blocks_per_logical if info is not None else 1
        highest = max((max(group) for group in registration.block_ids if group), default=0)
        if (highest + 1) * per_logical > blocks:
            return f"block {highest} is outside the decode engine's {blocks // max(1, per_logical)} blocks"
        return ""

    def _bytes_of(self, block_ids: BlockIds) -> int:
        blocks = sum(len(group) for group in block_ids)
        regions = self.block_len_per_layer if hasattr(self, "block_len_per_layer") else []
        return int(blocks * sum(regions) * self._physical_blocks_per_logical_kv_block)


class _PrefillTransport:
    def __init__(self, worker: PdPushWorker) -> None:
        self._worker = worker
        self.writers = worker.writers
        self.send = worker.send
        self.post = worker.post
        self.poll = worker.poll
        self.refusal = worker.refusal

    def connect(self, registration: wire.Register | wire.Cancel) -> PeerState:
        known = self._worker.connection(
            registration.engine_id, registration.host, registration.port, registration.tp_size, 1, full=True
        )
        return _state(known)


class _DecodeTransport:
    def __init__(self, worker: PdPushWorker) -> None:
        self._worker = worker
        self.gone = worker.gone

    def reach(self, peer: Peer) -> PeerState:
        known = self._worker.connection(peer.engine_id, peer.host, peer.port, peer.tp_size, peer.pp_size, full=False)
        return _state(known)

    def why_failed(self, peer: Peer) -> str:
        known = self._worker._connections.get(peer.engine_id)
        return known.error if known is not None else "never connected"

    def tell(self, peer: Peer, message: wire.Message) -> bool:
        return self._worker.send(peer.engine_id, message)


class _Link:
    def __init__(self, worker: PdPushWorker) -> None:
        self._worker = worker

    def notifications(self) -> list[bytes]:
        return [data for batch in self._worker.nixl_wrapper.get_new_notifs().values() for data in batch]

    def housekeeping(self, now: float) -> None:
        self._worker.keep_connections(now)


def _state(known: _Connection) -> PeerState:
    if known.state == "ready":
        return "ready"
    if known.state == "connecting":
        return "connecting"
    # A broken one is made anew after its pause; until then nothing can be sent.
    return "failed"


def align(block_ids: BlockIds, registration: wire.Register, *, same_block_size: bool) -> BlockIds:
    """The blocks to read here for those of the registration.

    With one full-attention group and equal block sizes both sides count blocks of the prompt alike, and the index
    decides. Other caches (sliding windows, states) are cut to their tail on both sides, and align at their end, as
    upstream does.

    Raises:
        ValueError: the registration asks for blocks that are not here.
    """
    if len(block_ids) != len(registration.block_ids):
        raise ValueError(f"{len(block_ids)} cache groups here, {len(registration.block_ids)} in the registration")
    if not same_block_size:
        return tuple(
            list(group) if wanted else [] for group, wanted in zip(block_ids, registration.block_ids, strict=True)
        )
    local: list[list[int]] = []
    for group, wanted, first in zip(block_ids, registration.block_ids, registration.first_block, strict=True):
        if not wanted:
            here = []
        elif len(block_ids) == 1:
            here = list(group)[first : first + len(wanted)]
        else:
            here = list(group)[-len(wanted) :]
        if len(here) != len(wanted):
            raise ValueError(f"{len(wanted)} blocks from number {first} are asked for, {len(group)} are here")
        local.append(here)
    return tuple(local)


def _side_channel_address(vllm_config: Any) -> tuple[str, int]:
    from vllm import envs

    return envs.VLLM_NIXL_SIDE_CHANNEL_HOST, (
        envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index
    )


class _progress_thread:  # noqa: N801  # reads as a statement: with _progress_thread(False)
    """While it lasts, NIXL agents are configured with or without their own progress thread."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._original: Any = None

    def __enter__(self) -> None:
        if self._wanted:
            return
        self._original = base_worker.nixl_agent_config

        def configured(*args: Any, **kwargs: Any) -> Any:
            return self._original(*args, enable_prog_thread=False, **kwargs)

        base_worker.nixl_agent_config = configured

    def __exit__(self, *exc: object) -> None:
        if self._original is not None:
            base_worker.nixl_agent_config = self._original
