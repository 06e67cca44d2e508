"""``PdPushConnector``: the class that vLLM loads.

vLLM resolves it with ``kv_connector="PdPushConnector"`` and ``kv_connector_module_path="pdctl_connector.connector"`` in
several processes: the API server, the engine core and every worker. So importing this module starts no thread and
imports no more than upstream's own connector does. NIXL in particular is imported by vLLM, which sets UCX variables
just before that (``vllm/distributed/nixl_utils.py``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import compat
from .version import __version__

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPushConnector
except ImportError as error:
    raise compat.import_failed(error) from error

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Under "vllm", because vLLM gives handlers to that logger alone.
logger = logging.getLogger("vllm.pdctl_connector.connector")


class PdPushConnector(NixlPushConnector):
    """Upstream's NIXL push connector, loaded by pdctl after a check that this vLLM fits.

    Raises:
        UnsupportedVllm: this vLLM is not supported, or differs from its release in a member relied on.
        ValueError: the configuration cannot be served in push mode.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # First, so that a vLLM that does not fit is refused before threads and NIXL agents exist.
        compat.check()
        _refuse_what_upstream_refuses_by_name(vllm_config)
        # Upstream's constructor would make its own scheduler or worker, with an agent and threads: one level up then.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        _refuse_what_cannot_be_transferred(vllm_config)
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        try:
            if role == KVConnectorRole.SCHEDULER:
                from .scheduler import PdPushScheduler as Side
            else:
                from .worker import PdPushWorker as Side
        except ImportError as error:
            raise compat.import_failed(error) from error
        side: Any = Side(vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = side
        else:
            self.connector_worker = side
        compat.check_instance(self, compat.CONNECTOR)
        compat.check_instance(side, compat.SCHEDULER if role == KVConnectorRole.SCHEDULER else compat.WORKER)
        # pdctl looks for this line in the instance's log.
        logger.info("PdPushConnector %s (pdctl) role=%s engine=%s", __version__, role.name.lower(), self.engine_id)

    # --- scheduler side ----------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Blocks that a late WRITE may touch are kept out of use in this pool."""
        super().bind_gpu_block_pool(gpu_block_pool)
        if self.connector_scheduler is not None:
            self.connector_scheduler.bind_block_pool(gpu_block_pool)

    # --- worker side -------------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Hand the step's news to the writer before the forward: on CPU, `start_load_kv` comes only after it."""
        super().bind_connector_metadata(connector_metadata)
        if self.connector_worker is not None:
            self.connector_worker.take_step(connector_metadata)

    def build_connector_worker_meta(self) -> Any:
        """What the scheduler side must know about blocks that are not fenced."""
        if self.connector_worker is None:
            return None
        unfenced, fenced = self.connector_worker.take_fences()
        if not unfenced and not fenced:
            return None
        from .scheduler import Fences

        return Fences(dict.fromkeys(unfenced, 1), dict.fromkeys(fenced, 1))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Refuse vLLM's sleep mode: peers keep the registration of this instance's KV cache. Asked since vLLM 0.33."""
        del kv_transfer_config
        return False


def _refuse_what_cannot_be_transferred(vllm_config: VllmConfig) -> None:
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        raise ValueError("PdPushConnector does not support decode_context_parallel_size > 1, as upstream's push mode.")
    if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        # Ranks that hold the same KV would all write it, and decode could not tell when the last one is done.
        raise ValueError("PdPushConnector does not support prefill_context_parallel_size > 1.")


def _refuse_what_upstream_refuses_by_name(vllm_config: VllmConfig) -> None:
    # vLLM's own check (`_verify_aux_output_compatibility` in vllm/config/vllm.py) compares connector names, so it
    # does not see this one.
    aux_output = getattr(vllm_config, "aux_output_config", None)
    if getattr(aux_output, "enable_return_routed_experts", False):
        raise ValueError(
            "--enable-return-routed-experts does not work with PdPushConnector: the experts chosen on the prefill side "
            "are not transferred. Leave the option out."
        )
