"""What the cluster file says to vLLM, as the checks need it: options and variables of a role or an instance. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pdctl.doctor.context import Context
from pdctl.plan import InstancePlan
from pdctl.plan_seats import argument, role_of
from pdctl.spec import ClusterSpec, Role

DEFAULT_MEMORY_SHARE = 0.92
"""``gpu_memory_utilization`` that vLLM 0.32 and 0.33 take by themselves (``CacheConfig``)."""

_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HUMAN = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kKmMgGtT]?)")


def option(spec: ClusterSpec, role: Role, name: str) -> Any:
    """Value of a vLLM option as the cluster file gives it; None if it does not."""
    return argument(role_of(spec, role).vllm_args, name)


def whole(value: Any) -> int | None:
    """A whole number as vLLM reads it (``16384``, ``16k``, ``16K``); None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    match = _HUMAN.fullmatch(str(value).strip()) if isinstance(value, (str, float)) else None
    return int(float(match[1]) * _MULTIPLES.get(match[2], 1)) if match else None


def number(value: Any) -> float | None:
    """A number, also as text; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if abs(found) < float("inf") else None


def size_of(spec: ClusterSpec, role: Role, name: str) -> int:
    """A parallel size of a role, such as ``pipeline-parallel-size``; 1 if it is not given."""
    return max(1, whole(option(spec, role, name)) or 1)


def variable(context: Context, instance: InstancePlan, name: str) -> str:
    """A variable as the instance will have it: from the plan, else from the login shell of its host; else empty."""
    if name in instance.env:
        return instance.env[name]
    facts = context.facts.get(instance.host)
    return (facts.environment or {}).get(name, "") if facts is not None else ""


def is_on(value: str) -> bool:
    """Whether a variable is switched on."""
    return value.strip().lower() in ("1", "true", "yes", "on")


def backends(spec: ClusterSpec) -> tuple[str, ...]:
    """NIXL backends that the instances will ask for (``backends`` of the connector; vLLM takes UCX by itself)."""
    given = spec.transfer.extra.get("backends")
    if isinstance(given, list) and given:
        return tuple(str(name) for name in given)
    return ("LIBFABRIC",) if spec.fabric == "efa" else ("UCX",)


def config_overrides(spec: ClusterSpec, role: Role) -> dict[str, Any]:
    """What ``hf-overrides`` puts into the model's config.json, dotted names put together."""
    arguments = role_of(spec, role).vllm_args
    value = arguments.get("hf-overrides")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    merged: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {}
    for name, part in arguments.items():
        if not name.startswith("hf-overrides."):
            continue
        below = merged
        *path, last = name.split(".")[1:]
        for step in path:
            inner = below.get(step)
            below[step] = inner = dict(inner) if isinstance(inner, Mapping) else {}
            below = inner
        below[last] = part
    return merged
