"""Whether weights and the KV cache of one request of full length fit into the memory of a rank. Pure arithmetic.

All needs are lower bounds and the room is an upper bound: *does not fit* is certain, *fits* is not. vLLM judges in the
same order (``_check_enough_kv_cache_memory``, vLLM 0.32): memory x utilisation - weights - activations, then the KV
cache of one request of ``max_model_len``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GIB = 2**30
CUDA_OVERHEAD_BYTES = GIB // 2
"""What a CUDA context, NCCL and the smallest activations take at the least on each GPU."""


@dataclass(frozen=True)
class Fit:
    """What is left for the KV cache of a rank, and for how many requests that is enough.

    Attributes:
        left: bytes that weights and overhead leave; negative if not even they fit.
        cache: bytes of the KV cache: what is left, or what was set by hand.
        request: KV cache of one request of full length, in bytes; None if the layout is not known.
        requests: requests of full length that fit; None if their size is not known.
    """

    left: int
    cache: int
    request: int | None
    requests: float | None


def fit(room: int, *, weights: int, overhead: int, request: int | None, cache: int | None = None) -> Fit:
    """Compare what a rank needs with what it may use.

    Args:
        room: bytes that vLLM may use on it.
        weights: its share of the weights, in bytes.
        overhead: bytes that are taken beside weights and KV cache.
        request: KV cache of one request of full length, in bytes; None if the layout is not known.
        cache: bytes of the KV cache if they are set by hand; it then need not be what is left.
    """
    left = room - weights - overhead
    size = left if cache is None else cache
    return Fit(left, size, request, max(0, size) / request if request else None)


def weights_share(total: int, *, tensor: int, pipeline: int, expert_ranks: int = 1) -> int:
    """Bytes of the weights on one rank, at the least.

    Args:
        total: all weights, in bytes.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        expert_ranks: data-parallel size, if experts are spread over its ranks too.
    """
    return total // (max(1, tensor) * max(1, pipeline) * max(1, expert_ranks))


def longest_request(cache: int, bytes_of: Callable[[int], int | None], limit: int) -> int:
    """Tokens of the longest request whose KV cache fits.

    Args:
        cache: bytes of the KV cache.
        bytes_of: KV cache of a request of so many tokens, in bytes; grows with them.
        limit: the longest request that is asked for.
    """
    fits, beyond = 0, max(0, limit) + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        size = bytes_of(middle)
        if size is not None and size <= cache:
            fits = middle
        else:
            beyond = middle
    return fits


def gib(size: float) -> str:
    """Bytes for people: ``15.3 GiB``; small ones in MiB."""
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB // 10 else f"{size / 2**20:.1f} MiB"
