"""The scheduler side of PdPushConnector: between vLLM's scheduler and `bookkeeping`, which decides."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler

from . import side_channel
from .bookkeeping import Bookkeeping, Geometry
from .cache_groups import cut_to_tail
from .settings import Settings

logger = logging.getLogger("vllm.pdctl_connector.scheduler")

LISTENER_ENDS_S = 0.2


@dataclass
class Fences(KVConnectorWorkerMetadata):
    """From the workers: requests settled without a fence, and requests fenced since; each with its number of ranks."""

    unfenced: dict[str, int]
    fenced: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Fences:
        """Add up what two ranks say."""
        assert isinstance(other, Fences)
        return Fences(_added(self.unfenced, other.unfenced), _added(self.fenced, other.fenced))


class PdPushScheduler(NixlPushConnectorScheduler):
    """Both roles: prefill hands finished requests to the writer, decode registers blocks and fences them."""

    # What the router looks for in an answer of prefill.
    _TRANSFER_MODE = "push"
    # Guarded, where upstream's dies of one bad message.
    _nixl_handshake_listener = staticmethod(side_channel.serve)

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        settings = Settings.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        self._block_pool: Any = None
        self._book = Bookkeeping(
            Geometry(
                block_sizes=tuple(group.kv_cache_spec.block_size for group in kv_cache_config.transfer_groups),
                hybrid=cut_to_tail(kv_cache_config),
                blocks=int(kv_cache_config.num_blocks),
                clip=self.get_exchange_clipped_blocks,
            ),
            waiting_share=settings.waiting_share,
            randomized=not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION,
        )

    def bind_block_pool(self, pool: Any) -> None:
        """The pool whose blocks are kept out of use while a WRITE may still touch them."""
        self._block_pool = pool

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """As upstream's; a side channel that cannot listen ends the start, instead of leaving an engine without peers.

        Raises:
            RuntimeError: its port cannot be bound.
        """
        super().set_xfer_handshake_metadata(metadata)
        listener = self._nixl_handshake_listener_t
        # It tells that it is ready as its last act if it could not bind.
        listener.join(LISTENER_ENDS_S)
        if not listener.is_alive():
            raise RuntimeError(
                f"the NIXL side channel cannot listen on {self.side_channel_host} port {self.side_channel_port}; the "
                "log says why. Set VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT to what is free"
            )

    # --- requests come and go ----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Remember a request that will want KV, so that prefill keeps it while it queues here."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            self._truncate_request_for_prefill(request)
        self._book.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens will come, or None to try again later while waiting requests hold too much memory."""
        count, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count and not self._book.has_room_for(count):
            return None, False
        return count, asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated: decode registers them, or prefill will copy them to the host's memory."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode") and self.use_host_buffer:
            self._reqs_need_save[request.request_id] = request
            return
        tokens = self._get_remote_prefill_token_count(request.num_prompt_tokens)
        wanted = self._book.allocated(request, blocks, tokens, num_external_tokens)
        if wanted is not None:
            # Upstream builds its own record from these; it knows no blocks of prefill in push mode.
            params["remote_block_ids"] = ()
            params.setdefault("remote_request_id", request.request_id)
            self._reqs_need_recv[request.request_id] = (request, wanted, (), False)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request ended here: whether its blocks are kept, and what the client hands to decode."""
        kept = self._book.finished(request, block_ids)
        if not kept:
            self._reqs_need_save.pop(request.request_id, None)
            return False, None
        transfer_id = request.kv_transfer_params.get("transfer_id")
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
            **({"transfer_id": transfer_id} if transfer_id else {}),
        }

    # --- steps -------------------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Upstream's metadata, with our step in it."""
        meta = super().build_connector_meta(scheduler_output)
        step = self._book.take_step()
        if step is not None:
            meta.pdctl = step
        return meta

    def has_pending_push_work(self) -> bool:
        """True while the engine must go on stepping: results of the writer reach it with a step alone."""
        return self._book.pending

    def update_connector_output(self, connector_output: Any) -> None:
        """Before vLLM frees blocks of finished transfers: keep those in use that are not fenced."""
        fences = connector_output.kv_connector_worker_meta
        if not isinstance(fences, Fences):
            fences = Fences({}, {})
        self._book.results(
            received=connector_output.finished_recving or (),
            sent=connector_output.finished_sending or (),
            unfenced=fences.unfenced,
            fenced=fences.fenced,
            pool=self._block_pool,
        )


def _added(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in left.keys() | right.keys()}
