"""Which pairs of hosts make a NIXL WRITE, and what each side is asked to be. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.doctor.facts import HostFacts
from pdctl.doctor.model_shape import DTYPE_BYTES, read_shape
from pdctl.doctor.role_options import config_overrides, option, whole
from pdctl.plan import ClusterPlan, InstancePlan
from pdctl.plan_seats import role_of
from pdctl.spec import ClusterSpec, Role

Pair = tuple[str, str]
"""A prefill host and a decode host."""

FEW_PAIRS = 4
"""So many pairs are all probed when the user does not say how many."""
BATCH_BYTES = 256_000_000
WRITES = 200
"""Of one block, so that a 99th percentile means something."""
LIMITS_S = {
    # Loading NIXL from a cold network file system takes long; so does PyTorch, which device memory needs.
    "import": 90.0,
    "backend": 30.0,
    "register": 40.0,
    "handshake": 15.0,
    "write": 20.0,
    "verify": 30.0,
    "notify": 10.0,
}
"""Seconds that a step may take on a host."""

# Of a model whose layout is not known: 32 layers with 8 KV heads of 128 numbers, two bytes each, 16 tokens.
_LAYERS, _PIECE_BYTES = 32, 16 * 8 * 128 * 2 * 2
_WORD = 8
_CPU_BLOCK, _BLOCK = 128, 16
"""Tokens of a block when the file does not say (`platforms/cpu.py` and `CacheConfig`, vLLM 0.32)."""


@dataclass(frozen=True)
class Choice:
    """Pairs to probe, in this order, and those that could be but are left out."""

    probed: tuple[Pair, ...]
    left_out: tuple[Pair, ...]


def choose_pairs(prefill: Sequence[str], decode: Sequence[str], reached: Iterable[str], limit: int | None) -> Choice:
    """Choose pairs so that the first ones take every host once, and neighbours in the list share no host.

    Args:
        prefill: hosts that write; names may come twice.
        decode: hosts that are written to.
        reached: hosts that can take part.
        limit: most pairs; None: all if there are few, else as many as it takes to have every host in one.
    """
    known = set(reached)
    writers = [host for host in dict.fromkeys(prefill) if host in known]
    targets = [host for host in dict.fromkeys(decode) if host in known]
    ordered = _diagonals(writers, targets)
    if limit is None:
        limit = len(ordered) if len(ordered) <= FEW_PAIRS else max(len(writers), len(targets))
    limit = max(0, limit)
    return Choice(tuple(ordered[:limit]), tuple(ordered[limit:]))


def _diagonals(writers: Sequence[str], targets: Sequence[str]) -> list[Pair]:
    if not writers or not targets:
        return []
    count = max(len(writers), len(targets))
    pairs = (
        (writers[number % len(writers)], targets[(number + shift) % len(targets)])
        for shift in range(count)
        for number in range(count)
    )
    return list(dict.fromkeys(pairs))


@dataclass(frozen=True)
class BlockShape:
    """One KV block of one rank.

    Attributes:
        layers: layers that have a piece of it.
        piece_bytes: bytes in one layer, a multiple of 8.
        known: whether it is the model's; else it is that of a common model.
    """

    layers: int
    piece_bytes: int
    known: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of the block."""
        return self.layers * self.piece_bytes


def block_shape(spec: ClusterSpec, role: Role, facts: HostFacts | None) -> BlockShape:
    """Size of a KV block, as far as the host's copy of the model tells it."""
    config = facts.model.config if facts is not None and facts.model is not None else {}
    shape = read_shape(config, config_overrides(spec, role))
    tokens = whole(option(spec, role, "block-size")) or (_CPU_BLOCK if spec.accelerator == "cpu" else _BLOCK)
    layers = (shape.full_layers or 0) + shape.window_layers
    number_bytes = _number_bytes(spec, role, shape.dtype_in_use(option(spec, role, "dtype")))
    total = shape.kv_bytes(tokens, tensor=role_of(spec, role).tensor_parallel, pipeline=1, number_bytes=number_bytes)
    if not total or not layers or total % layers:
        return BlockShape(_LAYERS, _PIECE_BYTES, known=False)
    return BlockShape(layers, -(-total // layers // _WORD) * _WORD, known=True)


def _number_bytes(spec: ClusterSpec, role: Role, dtype: str | None) -> int:
    cache = str(option(spec, role, "kv-cache-dtype") or "auto")
    if cache == "auto":
        return DTYPE_BYTES.get(dtype or "", 2)
    return DTYPE_BYTES.get(cache, 1)


def side_request(
    plan: ClusterPlan, instance: InstancePlan, peer: str, shape: BlockShape, *, seed: int, lifetime_s: float
) -> dict[str, Any]:
    """What one side is asked to be: as the instance would be, with its Python, variables and NIXL options.

    Args:
        plan: the plan.
        instance: a prefill instance writes, a decode instance is written to.
        peer: name of the other host.
        shape: of a block.
        seed: of the content, the same on both sides.
        lifetime_s: how long it may live.
    """
    extra = _connector_options(instance)
    own = extra.get("pdctl")
    backends = extra.get("backends")
    threads = extra.get("num_threads")
    return {
        "do": "start",
        "role": "writer" if instance.role == "prefill" else "target",
        "python": instance.argv[0],
        "env": dict(instance.env),
        "peer": peer,
        "agent": f"pdctl-probe-{instance.role}-{seed:016x}",
        "backends": [str(name) for name in backends] if isinstance(backends, list) and backends else ["UCX"],
        # What vLLM takes by itself (`nixl/base_worker.py`, 0.32).
        "threads": threads if isinstance(threads, int) else 4,
        "progress_thread": bool(own.get("progress_thread", True)) if isinstance(own, Mapping) else True,
        "accelerator": plan.spec.accelerator,
        "layers": shape.layers,
        "piece_bytes": shape.piece_bytes,
        "batch_bytes": BATCH_BYTES,
        "writes": WRITES,
        "seed": seed,
        "limits": {stage: min(limit, lifetime_s) for stage, limit in LIMITS_S.items()},
        "lifetime_s": lifetime_s,
    }


def new_seed() -> int:
    """Of the content of one probe: another each time, so that what an earlier one left is not taken for it."""
    return secrets.randbits(63)


def _connector_options(instance: InstancePlan) -> dict[str, Any]:
    option_name = "--kv-transfer-config"
    config = json.loads(instance.argv[instance.argv.index(option_name) + 1])
    extra = config.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}
