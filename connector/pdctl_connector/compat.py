"""What this connector relies on inside vLLM, and the check that it is there.

The connector builds on private members of upstream's NIXL push connector, which may change in any release. So they are
listed here, once, and checked at start: a vLLM that does not fit is refused with a sentence instead of failing in the
middle of a transfer. ``scripts/record_upstream_signatures.py`` records the same members of a given vLLM for the tests.

Importing this module imports neither vLLM nor NIXL.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SUPPORTED_VERSIONS = ("0.32", "0.33")
"""The vLLM release lines this connector is written for and tested with."""

KNOWN_NIXL_CONNECTOR_VERSIONS = frozenset({14, 15})
"""Values of upstream's ``NIXL_CONNECTOR_VERSION`` in those releases. It changes with the wire format or the layout."""

# Under "vllm", because vLLM gives handlers to that logger alone.
logger = logging.getLogger("vllm.pdctl_connector.compat")

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_NIXL = f"{_V1}.nixl"


class UnsupportedVllm(RuntimeError):
    """The vLLM of this process is not one this connector can work with. The message says what to install."""


@dataclass(frozen=True)
class UpstreamClass:
    """What is relied on of one upstream class. Parameter names are given without ``self``, separated by spaces.

    Attributes:
        module: where it is imported from.
        name: its name there.
        called: methods that this connector calls (or a constructor), with the parameters it passes. A new parameter
            with a default does no harm.
        overridden: methods that this connector replaces, or that upstream calls on it: the parameters must be the same.
        attributes: attributes of an instance after construction.
        constants: class attributes and the value they must have.
    """

    module: str
    name: str
    called: Mapping[str, str] = field(default_factory=dict)
    overridden: Mapping[str, str] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)


CONNECTOR = UpstreamClass(
    module=f"{_NIXL}.connector",
    name="NixlPushConnector",
    called={
        # By vLLM; its default hands the pool on to bind_gpu_block_pool.
        "bind_kv_cache_manager": "kv_cache_manager",
    },
    overridden={
        "__init__": "vllm_config role kv_cache_config",
        "bind_connector_metadata": "connector_metadata",
        "bind_gpu_block_pool": "gpu_block_pool",
        "build_connector_worker_meta": "",
        # Not overridden: they hand these to the two sides.
        "build_connector_meta": "scheduler_output",
        "get_block_ids_with_load_errors": "",
        "get_num_new_matched_tokens": "request num_computed_tokens",
        "get_transfer_results": "finished_req_ids",
        "has_pending_push_work": "",
        "on_new_request": "request",
        "request_finished_all_groups": "request block_ids",
        "set_xfer_handshake_metadata_pp_aware": "metadata",
        "shutdown": "",
        "start_load_kv": "forward_context kwargs",
        "update_connector_output": "connector_output",
        "update_state_after_alloc": "request blocks num_external_tokens",
    },
    attributes=("connector_scheduler", "connector_worker", "engine_id", "kv_transfer_config", "kv_cache_config"),
)

SCHEDULER = UpstreamClass(
    module=f"{_NIXL}.push_scheduler",
    name="NixlPushConnectorScheduler",
    called={
        "get_exchange_clipped_blocks": "block_ids",
        "_get_remote_prefill_token_count": "num_prompt_tokens",
        "_truncate_request_for_prefill": "request",
    },
    overridden={
        "__init__": "vllm_config engine_id kv_cache_config",
        "build_connector_meta": "scheduler_output",
        "get_num_new_matched_tokens": "request num_computed_tokens",
        "has_pending_push_work": "",
        "on_new_request": "request",
        "request_finished": "request block_ids",
        "set_xfer_handshake_metadata": "metadata",
        "update_connector_output": "connector_output",
        "update_state_after_alloc": "request blocks num_external_tokens",
        "_nixl_handshake_listener": "encoded_data ready_event stop_event host port",
    },
    attributes=(
        "engine_id",
        "side_channel_host",
        "side_channel_port",
        "transfer_tp_size",
        "use_host_buffer",
        "vllm_config",
        "_nixl_handshake_listener_t",
        "_reqs_need_recv",
        "_reqs_need_save",
    ),
    # vllm-router recognises a push instance by it.
    constants={"_TRANSFER_MODE": "push"},
)

WORKER = UpstreamClass(
    module=f"{_NIXL}.push_worker",
    name="NixlPushConnectorWorker",
    called={
        "_cleanup_remote_engine": "engine_id log_eviction",
        "_logical_to_kernel_block_ids": "block_ids ratio",
        "_nixl_handshake": (
            "host port remote_tp_size expected_engine_id remote_dcp_size remote_pp_size notif_agents_only"
        ),
        "_xfer_blocks_for_req": "req_id meta",
    },
    overridden={
        "__init__": "vllm_config engine_id kv_cache_config",
        "add_remote_agent": "nixl_agent_meta remote_tp_rank remote_tp_size remote_dcp_size",
        "get_block_ids_with_load_errors": "",
        "get_transfer_results": "",
        "register_kv_caches": "kv_caches",
        "shutdown": "",
        "start_load_kv": "metadata",
        "_add_notif_only_remote_agent": "metadata remote_tp_size remote_dcp_size",
        "_get_new_notifs": "",
        # Not overridden: what they do between our call and NIXL is relied on.
        "_handle_failed_transfer": "req_id handle failed_req_ids record_failed_transfer",
        "_pop_done_transfers": "transfers",
        "_xfer_blocks": (
            "read_spec dst_engine_id request_id remote_request_id local_xfer_side_handle remote_xfer_side_handle"
        ),
    },
    attributes=(
        "block_size",
        "dst_num_blocks",
        "engine_id",
        "nixl_wrapper",
        "pp_size",
        "tp_rank",
        "transfer_topo",
        "world_size",
        "xfer_stats",
        "_engine_clock_offset",
        "_engine_ttl",
        "_failed_recv_reqs",
        "_handshake_initiation_executor",
        "_handshake_lock",
        "_mixed_mem_types",
        "_physical_blocks_per_logical_kv_block",
        "_recving_metadata",
        "_recving_transfers",
        "_remote_agents",
        "_send_failures",
        "_sending_transfers",
        "_sending_transfers_lock",
    ),
    # Replaced by ours, which is another word in the handshake's hash; that a word is all it is, is relied on.
    constants={"_TRANSFER_MODE": "push"},
)

BASE_WORKER = UpstreamClass(
    module=f"{_NIXL}.base_worker",
    name="NixlBaseConnectorWorker",
    called={
        "get_block_ids_with_load_errors": "",
        "get_transfer_results": "",
        "register_kv_caches": "kv_caches",
        "shutdown": "",
    },
    # Its clean-up of engines is for this word alone.
    constants={"_TRANSFER_MODE": "pull"},
)

RELIED_ON: tuple[UpstreamClass, ...] = (
    CONNECTOR,
    SCHEDULER,
    WORKER,
    BASE_WORKER,
    UpstreamClass(
        module=f"{_NIXL}.connector",
        name="NixlBaseConnector",
        called={"__init__": "vllm_config role kv_cache_config"},
    ),
    UpstreamClass(
        module=f"{_NIXL}.metadata",
        name="ReqMeta",
        called={"__init__": "local_block_ids local_physical_block_ids tp_size remote"},
    ),
    UpstreamClass(
        module=f"{_NIXL}.metadata",
        name="RemoteMeta",
        called={"__init__": "block_ids host port engine_id request_id"},
    ),
    UpstreamClass(
        module=f"{_NIXL}.metadata",
        name="NixlConnectorMetadata",
        called={"add_new_req_to_recv": "request_id local_block_ids kv_transfer_params"},
        attributes=("reqs_to_recv",),
    ),
    UpstreamClass(
        module=f"{_NIXL}.stats",
        name="NixlKVConnectorStats",
        called={
            "record_failed_handshake": "",
            "record_failed_notification": "",
            "record_failed_transfer": "",
            "record_transfer": "res",
        },
    ),
    UpstreamClass(
        module="vllm.distributed.kv_transfer.kv_connector.utils",
        name="TransferTopology",
        called={"get_engine_info": "remote_engine_id"},
    ),
    UpstreamClass(
        module="vllm.distributed.kv_transfer.kv_connector.utils",
        name="EngineTransferInfo",
        called={
            "__init__": "remote_tp_size remote_block_len remote_block_size remote_physical_blocks_per_logical",
        },
    ),
    UpstreamClass(
        module=f"{_V1}.base",
        name="KVConnectorTransferResults",
        called={"__init__": "finished_sending finished_recving failed_recving"},
    ),
    UpstreamClass(
        module=f"{_V1}.base",
        name="KVConnectorWorkerMetadata",
        overridden={"aggregate": "other"},
    ),
    UpstreamClass(
        module="vllm.v1.core.block_pool",
        name="BlockPool",
        called={"touch": "blocks", "free_blocks": "ordered_blocks"},
    ),
)
"""Everything that is relied on, class by class."""


def check() -> None:
    """Check the vLLM of this process: its version, and every member relied on. Takes some milliseconds.

    Raises:
        UnsupportedVllm: the version is not supported, or a member is gone or takes other parameters; names them all.
    """
    version = _vllm_version()
    if release_line(version) not in SUPPORTED_VERSIONS:
        raise UnsupportedVllm(
            f"PdPushConnector supports vLLM {_joined(SUPPORTED_VERSIONS)}, but found {version or 'no version number'}. "
            + _ADVICE
        )
    problems = [problem for upstream in RELIED_ON for problem in _class_problems(upstream)]
    if problems:
        raise UnsupportedVllm(_mismatch(version, problems))
    metadata = importlib.import_module(f"{_NIXL}.metadata")
    wire_version = getattr(metadata, "NIXL_CONNECTOR_VERSION", None)
    if wire_version not in KNOWN_NIXL_CONNECTOR_VERSIONS:
        logger.warning(
            "PdPushConnector was tested with NIXL_CONNECTOR_VERSION %s, and this vLLM (%s) has %s: "
            "run the same vLLM on every host, and watch the first transfers",
            _joined(map(str, sorted(KNOWN_NIXL_CONNECTOR_VERSIONS))),
            version,
            wire_version,
        )


def check_instance(instance: object, upstream: UpstreamClass) -> None:
    """Check that a constructed upstream object has the attributes relied on.

    Raises:
        UnsupportedVllm: names every attribute that is missing.
    """
    missing = [f"{upstream.name}.{name} is gone" for name in upstream.attributes if not hasattr(instance, name)]
    if missing:
        raise UnsupportedVllm(_mismatch(_vllm_version(), missing))


def import_failed(error: ImportError) -> UnsupportedVllm:
    """The error to raise when upstream's push connector cannot even be imported."""
    return UnsupportedVllm(
        f"PdPushConnector could not import upstream's NIXL push connector from vLLM {_vllm_version() or '(not found)'}:"
        f" {error}. It supports vLLM {_joined(SUPPORTED_VERSIONS)}. {_ADVICE}"
    )


def release_line(version: str) -> str:
    """Major and minor number of a version, such as ``0.33`` of ``0.33.1.dev3+g1234567``; empty when it has none."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return f"{match[1]}.{match[2]}" if match else ""


def parameter_problem(names: tuple[str, ...], required: frozenset[str], wanted: str, *, exact: bool) -> str:
    """What is wrong with a method's parameters; empty when nothing is.

    Args:
        names: the parameters the method has, without ``self``.
        required: those of them that have no default.
        wanted: the names relied on, separated by spaces.
        exact: the method is overridden, so a new parameter is a problem even when it has a default.
    """
    expected = tuple(wanted.split())
    found = f"takes ({', '.join(names)}), expected ({', '.join(expected)})"
    if exact:
        return "" if names == expected else found
    fits = set(expected) <= set(names) and required <= set(expected)
    return "" if fits else found


_ADVICE = (
    "Install one of them in this Python (the same on every host), such as: pip install 'vllm>=0.32,<0.34'; or use "
    "upstream's own connector: kv_connector=NixlPushConnector without kv_connector_module_path."
)


def _mismatch(version: str, problems: list[str]) -> str:
    return (
        f"PdPushConnector does not fit this vLLM ({version}), which differs from the releases it is written for "
        f"({_joined(SUPPORTED_VERSIONS)}): {'; '.join(problems)}. {_ADVICE}"
    )


def _vllm_version() -> str:
    # Not the distribution's metadata: a CPU build is published under another name.
    try:
        return str(importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError):
        return ""


def _class_problems(upstream: UpstreamClass) -> Iterator[str]:
    try:
        cls = getattr(importlib.import_module(upstream.module), upstream.name)
    except (ImportError, AttributeError) as error:
        yield f"{upstream.module}.{upstream.name} is gone ({error})"
        return
    for methods, exact in ((upstream.called, False), (upstream.overridden, True)):
        for method, wanted in methods.items():
            problem = _method_problem(cls, method, wanted, exact=exact)
            if problem:
                yield f"{upstream.name}.{method} {problem}"
    for constant, value in upstream.constants.items():
        found = getattr(cls, constant, None)
        if found != value:
            yield f"{upstream.name}.{constant} is {found!r}, expected {value!r}"


def _method_problem(cls: type[Any], method: str, wanted: str, *, exact: bool) -> str:
    try:
        static = inspect.getattr_static(cls, method)
    except AttributeError:
        return "is gone"
    function = getattr(cls, method)
    if not callable(function):
        return "is no method any more"
    parameters = list(inspect.signature(function).parameters.values())
    if inspect.isfunction(static):
        parameters = parameters[1:]  # self
    names = tuple(parameter.name for parameter in parameters)
    required = frozenset(
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )
    return parameter_problem(names, required, wanted, exact=exact)


def _joined(words: Iterator[str] | tuple[str, ...]) -> str:
    return " and ".join(words)
