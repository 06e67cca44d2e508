"""What kind of KV cache this is, judged in the same way by the scheduler side and the worker side."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec


def cut_to_tail(kv_cache_config: Any) -> bool:
    """Whether some group holds less than every block of the prompt: a sliding window, or a state.

    Upstream's two sides each have an answer of their own (``_is_hma_required``), which differ for groups that wrap the
    specifications of their layers; ours decide how blocks are aligned, so they must be one.
    """
    for group in kv_cache_config.transfer_groups:
        wrapped = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for spec in wrapped.values() if wrapped else (group.kv_cache_spec,):
            if not isinstance(spec, FullAttentionSpec):
                return True
    return False
