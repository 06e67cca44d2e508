"""The scheduler side of PdPushConnector: what it tells the workers with each step, and who may free which blocks."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.v1.request import RequestStatus

from . import side_channel, wire
from .settings import Settings
from .step import BlockIds, Ended, GivenUp, Peer, Prefilling, Ready, Receive, Step

logger = logging.getLogger("vllm.pdctl_connector.scheduler")

WAITING_AGAIN_S = 5.0
ATTEMPTS_KEPT = 4096


@dataclass
class Fences(KVConnectorWorkerMetadata):
    """From the workers: requests settled without a fence, and requests fenced since; each with its number of ranks."""

    unfenced: dict[str, int]
    fenced: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Fences:
        """Add up what two ranks say."""
        assert isinstance(other, Fences)
        return Fences(_added(self.unfenced, other.unfenced), _added(self.fenced, other.fenced))


@dataclass
class _Quarantine:
    blocks: list[Any]
    ranks: int
    touched: bool = False
    since: float = 0.0


class PdPushScheduler(NixlPushConnectorScheduler):
    """Both roles: as prefill it hands finished requests to the writer, as decode it registers blocks and fences them."""

    # What the router looks for in an answer of prefill.
    _TRANSFER_MODE = "push"
    # Guarded, where upstream's dies of one bad message.
    _nixl_handshake_listener = staticmethod(side_channel.serve)

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.settings = Settings.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        self._randomized = os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("1", "true", "True")
        self._step = Step()
        self._block_pool: Any = None
        self._blocks_total = int(kv_cache_config.num_blocks)
        # Decode: requests that wait for a transfer, with the blocks they hold.
        self._receiving: dict[str, tuple[Receive, list[Any]]] = {}
        self._waiting: dict[str, tuple[str, Peer]] = {}
        self._waiting_told = 0.0
        self._waiting_changed = False
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._unfenced: dict[str, int] = {}
        self._fenced_early: dict[str, int] = {}
        self._quarantine: dict[str, _Quarantine] = {}
        # Prefill: requests whose blocks the writer holds.
        self._sending: set[str] = set()

    def bind_block_pool(self, pool: Any) -> None:
        """The pool whose blocks are kept out of use while a WRITE may still touch them."""
        self._block_pool = pool

    def key_of(self, request: Any) -> str:
        """What both sides call a request."""
        return wire.transfer_key(request.request_id, request.kv_transfer_params, randomized=self._randomized)

    # --- requests come and go ------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Decode: remember a request that will want KV, so that prefill keeps it while it queues here."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            self._truncate_request_for_prefill(request)
        if not params or not params.get("do_remote_prefill"):
            return
        peer = _peer(params)
        if peer is None:
            # Upstream would fail later with a KeyError in the engine; computing the prompt here is always right.
            logger.warning("request %s names no prefill engine: its prompt is computed here", request.request_id)
            params["do_remote_prefill"] = False
            return
        self._waiting[request.request_id] = (self.key_of(request), peer)
        self._waiting_changed = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Decode: how many tokens will come, or None to try again later while waiting requests hold too much memory."""
        count, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count and self._receiving:
            held = sum(_count(entry[0].block_ids) for entry in self._receiving.values())
            wanted = -(-count // self.block_size)
            if held + wanted > self.settings.waiting_share * self._blocks_total:
                return None, False
        return count, asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated: prefill begins, or decode registers them."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            if request.request_id not in self._reqs_in_batch and request.request_id not in self._sending:
                self._reqs_in_batch.add(request.request_id)
                self._step.prefilling.append(
                    Prefilling(request.request_id, self.key_of(request), request.num_prompt_tokens)
                )
            if self.use_host_buffer:
                self._reqs_need_save[request.request_id] = request
                return
        if not params.get("do_remote_prefill"):
            return
        key, peer = self._waiting.pop(request.request_id, (self.key_of(request), _peer(params)))
        self._waiting_changed = True
        params["do_remote_prefill"] = False
        if peer is None:
            return
        tokens = self._get_remote_prefill_token_count(request.num_prompt_tokens)
        receive = Receive(
            request_id=request.request_id,
            key=key,
            attempt=self._next_attempt(key),
            peer=peer,
            block_ids=tuple([] for _ in blocks.blocks),
            first_block=tuple(0 for _ in blocks.blocks),
            tokens=tokens,
            token_hash=_hash(request, tokens),
        )
        if num_external_tokens <= 0:
            # The whole prompt is in the prefix cache here: prefill need not keep its blocks.
            self._step.receive.append(receive)
            return
        wanted, first = self._blocks_to_fill(blocks, tokens, num_external_tokens)
        receive = Receive(receive.request_id, key, receive.attempt, peer, wanted, first, tokens, receive.token_hash)
        params["remote_block_ids"] = ()
        params.setdefault("remote_request_id", request.request_id)
        self._reqs_need_recv[request.request_id] = (request, wanted, (), False)
        held = [block for group in blocks.blocks for block in group if not getattr(block, "is_null", False)]
        self._receiving[request.request_id] = (receive, held)
        self._step.receive.append(receive)

    def _blocks_to_fill(self, blocks: Any, tokens: int, num_external_tokens: int) -> tuple[BlockIds, tuple[int, ...]]:
        """The logical blocks that prefill is to fill, and the index in the prompt of the first one, per group."""
        if len(blocks.blocks) == 1 and not self._is_hma_required:
            first = (tokens - num_external_tokens) // self.block_size
            last = -(-tokens // self.block_size)
            return (list(blocks.get_block_ids()[0][first:last]),), (first,)
        clipped = self.get_exchange_clipped_blocks(blocks.get_unhashed_block_ids_all_groups())
        return tuple(list(group) for group in clipped), tuple(0 for _ in clipped)

    def request_finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """A request ended here. Prefill with KV: keep its blocks for the writer. Decode without: tell prefill."""
        params = request.kv_transfer_params
        if not params:
            return False, None
        if waiting := self._waiting.pop(request.request_id, None):
            # It never got blocks here.
            self._waiting_changed = True
            params["do_remote_prefill"] = False
            key, peer = waiting
            self._step.given_up.append(GivenUp(request.request_id, key, self._next_attempt(key), peer))
            return False, None
        if entry := self._receiving.get(request.request_id):
            receive = entry[0]
            self._step.given_up.append(GivenUp(request.request_id, receive.key, receive.attempt, receive.peer))
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        key = self.key_of(request)
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            self._reqs_need_save.pop(request.request_id, None)
            self._step.ended.append(Ended(request.request_id, key, "aborted", f"{request.status.name.lower()}"))
            return False, None
        if not any(len(group) for group in block_ids):
            self._step.ended.append(Ended(request.request_id, key, "aborted", "no blocks"))
            return False, None
        tokens = request.num_prompt_tokens
        offered: BlockIds = tuple(list(group) for group in self.get_exchange_clipped_blocks(block_ids))
        if len(offered) == 1 and not self._is_hma_required:
            # What a longer answer computed beyond the prompt is not asked for.
            offered = (offered[0][: -(-tokens // self.block_size)],)
        self._sending.add(request.request_id)
        self._step.ready.append(Ready(request.request_id, key, offered, tokens, _hash(request, tokens)))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": block_ids,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "tp_size": self.transfer_tp_size,
            "dcp_size": self.vllm_config.parallel_config.decode_context_parallel_size,
            "pp_size": self.vllm_config.parallel_config.pipeline_parallel_size,
            "remote_num_tokens": request.num_computed_tokens,
            "transfer_mode": self._TRANSFER_MODE,
            **({"transfer_id": params["transfer_id"]} if params.get("transfer_id") else {}),
        }

    # --- steps -----------------------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Upstream's metadata, with our step in it."""
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, NixlConnectorMetadata)
        now = time.monotonic()
        if self._waiting_changed or (self._waiting and now - self._waiting_told > WAITING_AGAIN_S) or self._step:
            self._step.waiting = dict(self._waiting.values())
            self._waiting_told, self._waiting_changed = now, False
            meta.pdctl = self._step  # type: ignore[attr-defined]
            self._step = Step()
        return meta

    def has_pending_push_work(self) -> bool:
        """True while the engine must go on stepping: results of the writer reach it with a step alone."""
        return bool(self._sending or self._step or self._waiting_changed or self._quarantine)

    def update_connector_output(self, connector_output: Any) -> None:
        """Before vLLM frees blocks of finished transfers: take those out of use that are not fenced."""
        fences = connector_output.kv_connector_worker_meta
        if isinstance(fences, Fences):
            for request_id, ranks in fences.unfenced.items():
                self._unfenced[request_id] = self._unfenced.get(request_id, 0) + ranks
            for request_id, ranks in fences.fenced.items():
                self._fenced_early[request_id] = self._fenced_early.get(request_id, 0) + ranks
        for request_id in connector_output.finished_recving or ():
            entry = self._receiving.pop(request_id, None)
            ranks = self._unfenced.get(request_id, 0)
            if entry is None or not ranks:
                continue
            if self._block_pool is None:
                logger.error("no block pool: blocks of %s cannot be kept out of use", request_id)
                continue
            self._block_pool.touch(entry[1])
            self._quarantine[request_id] = _Quarantine(entry[1], ranks, True, time.monotonic())
            logger.warning("%d blocks of %s stay out of use until prefill answers", len(entry[1]), request_id)
        for request_id in list(self._fenced_early):
            held = self._quarantine.get(request_id)
            if held is not None and self._fenced_early[request_id] >= held.ranks:
                del self._quarantine[request_id], self._fenced_early[request_id]
                self._unfenced.pop(request_id, None)
                self._block_pool.free_blocks(held.blocks)
                logger.info("%d blocks of %s may be used again", len(held.blocks), request_id)
        for request_id in connector_output.finished_sending or ():
            self._sending.discard(request_id)

    def _next_attempt(self, key: str) -> int:
        attempt = self._attempts.pop(key, -1) + 1
        self._attempts[key] = attempt
        while len(self._attempts) > ATTEMPTS_KEPT:
            self._attempts.popitem(last=False)
        return attempt


def _peer(params: dict[str, Any]) -> Peer | None:
    try:
        return Peer(
            engine_id=str(params["remote_engine_id"]),
            host=str(params["remote_host"]),
            port=int(params["remote_port"]),
            tp_size=int(params["tp_size"]),
            pp_size=int(params.get("pp_size") or 1),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _hash(request: Any, tokens: int) -> bytes:
    return wire.token_hash(request.prompt_token_ids[:tokens]) if request.prompt_token_ids else b""


def _count(block_ids: BlockIds) -> int:
    return sum(len(group) for group in block_ids)


def _added(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in left.keys() | right.keys()}
