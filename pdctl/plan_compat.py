"""Settings in which prefill and decode must agree. Pure.

Two kinds: what the NIXL handshake refuses (vLLM 0.32, ``compute_nixl_compatibility_hash`` and
``_validate_remote_agent_handshake``), and what it does not notice but makes the decode side continue from a KV cache
of other weights or another prompt, which shows as wrong text. What only the model decides is left to the handshake.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdctl.errors import Problem
from pdctl.plan_seats import argument, role_of
from pdctl.spec import ClusterSpec, Role
from pdctl.spec_yaml import describe

_REFUSED = "the NIXL handshake between prefill and decode is refused otherwise"
_WRONG_TEXT = "the KV cache would not fit the request otherwise, and the text would be wrong"


@dataclass(frozen=True)
class _Rule:
    """An option that both roles must give the same.

    Attributes:
        option: name of the vLLM option.
        default: what leaving it out means; None if that depends on the model or platform, and then one side alone
            is no problem.
        hashed: whether the handshake compares it, so that ``enforce_handshake_compat: false`` switches that off.
        normal: brings spellings of one value together.
    """

    option: str
    default: Any = None
    hashed: bool = False
    normal: Callable[[Any], Any] = lambda value: value


def _dtype(value: Any) -> Any:
    return {"half": "float16", "float": "float32", "auto": None}.get(value, value)


def _json_value(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


_RULES = (
    _Rule("dtype", hashed=True, normal=_dtype),
    _Rule("attention-backend", hashed=True, normal=_lower),
    _Rule("kv-cache-dtype", default="auto", hashed=True),
    _Rule("disable-hybrid-kv-cache-manager", default=False, hashed=True),
    _Rule("revision", default="main"),
    _Rule("hf-overrides", default={}, normal=_json_value),
    _Rule("tokenizer-revision", default="main"),
    _Rule("tokenizer-mode", default="auto"),
    _Rule("chat-template", default=""),
    _Rule("chat-template-content-format", default="auto"),
    _Rule("default-chat-template-kwargs", default={}, normal=_json_value),
)

_HIDDEN_STATE_METHODS = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark"})
"""Speculative methods that use hidden states of the model, so that their state travels too (``use_eagle()``)."""
_SPECULATIVE_FACTORS = ("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype")


def check_compatibility(spec: ClusterSpec, problems: list[Problem]) -> None:
    """Report every setting in which prefill and decode differ but must not."""
    enforced = spec.transfer.extra.get("enforce_handshake_compat", True) is not False
    for rule in (*_RULES, _Rule("tokenizer", default=spec.model)):
        if rule.hashed and not enforced:
            continue
        prefill, decode = (_effective(spec, role, rule) for role in ("prefill", "decode"))
        if prefill is not None and decode is not None and prefill != decode:
            _report(spec, rule.option, _REFUSED if rule.hashed else _WRONG_TEXT, problems)
    if enforced and _speculation(spec, "prefill") != _speculation(spec, "decode"):
        _report(spec, "speculative-config", _REFUSED, problems)
    _check_served_names(spec, problems)
    _check_tensor_parallel(spec, problems)
    _check_block_size(spec, problems)


def _effective(spec: ClusterSpec, role: Role, rule: _Rule) -> Any:
    value = _value(spec, role, rule.option)
    return rule.default if value is None else rule.normal(value)


def _value(spec: ClusterSpec, role: Role, option: str) -> Any:
    """Value of an option, with its dotted parts (``hf-overrides.rope_theta``) put together."""
    arguments = role_of(spec, role).vllm_args
    value = argument(arguments, option)
    parts = {name: part for name, part in arguments.items() if name.startswith(f"{option}.")}
    if not parts:
        return value
    whole = _json_value(value)
    merged = dict(whole) if isinstance(whole, Mapping) else {}
    for name, part in parts.items():
        below = merged
        *path, last = name.split(".")[1:]
        for step in path:
            inner = below.get(step)
            below[step] = inner = dict(inner) if isinstance(inner, Mapping) else {}
            below = inner
        below[last] = _json_value(part)
    return merged


def _report(spec: ClusterSpec, option: str, reason: str, problems: list[Problem]) -> None:
    shown = {role: _shown(spec, role, option) for role in ("prefill", "decode")}
    # At the side that gives it; the other may not have it at all.
    role = "decode" if _written(spec, "decode", option) else "prefill"
    other = "prefill" if role == "decode" else "decode"
    message = f"{role} has {shown[role]}, {other} has {shown[other]}; {reason}"
    problems.append(spec.problem(f"{role}.vllm_args.{option}", message, "give both roles the same"))


def _written(spec: ClusterSpec, role: Role, option: str) -> str:
    """Name under which a role gives an option; empty if it does not."""
    arguments = role_of(spec, role).vllm_args
    names = (name for name in arguments if name.partition(".")[0] in (option, f"no-{option}"))
    return next(names, "")


def _shown(spec: ClusterSpec, role: Role, option: str) -> str:
    name = _written(spec, role, option)
    if not name:
        return "none"
    line = spec.line(f"{role}.vllm_args.{name}")
    where = "" if line is None else f" (line {line})"
    return f"{describe(_value(spec, role, option))}{where}"


def _speculation(spec: ClusterSpec, role: Role) -> Any:
    """What of speculative decoding the handshake compares; None if it does not care."""
    value = _json_value(_value(spec, role, "speculative-config"))
    if not isinstance(value, Mapping):
        return None
    config = {str(name).replace("-", "_"): part for name, part in value.items()}
    if config.get("method") not in _HIDDEN_STATE_METHODS:
        return None
    factors = {name: config.get(name) for name in _SPECULATIVE_FACTORS}
    # Left out it is that of the model, which both share.
    factors["model"] = factors["model"] or spec.model
    factors["parallel_drafting"] = bool(factors["parallel_drafting"])
    factors["kv_cache_dtype"] = factors["kv_cache_dtype"] or _value(spec, role, "kv-cache-dtype") or "auto"
    return factors


def _check_served_names(spec: ClusterSpec, problems: list[Problem]) -> None:
    names: dict[Role, list[str]] = {}
    for role in ("prefill", "decode"):
        value = role_of(spec, role).vllm_args.get("served-model-name") or spec.model
        names[role] = [str(name) for name in value] if isinstance(value, (list, tuple)) else [str(value)]
    if not set(names["prefill"]) & set(names["decode"]):
        reason = "the router sends each request to both under one name"
        message = f"prefill serves {', '.join(names['prefill'])}, decode {', '.join(names['decode'])}; {reason}"
        role = "decode" if _written(spec, "decode", "served-model-name") else "prefill"
        problems.append(spec.problem(f"{role}.vllm_args.served-model-name", message, "give both roles the same"))


def _check_tensor_parallel(spec: ClusterSpec, problems: list[Problem]) -> None:
    """Either size may be the larger one, but one must divide the other (``TransferTopology.tp_ratio``)."""
    prefill, decode = spec.prefill.tensor_parallel, spec.decode.tensor_parallel
    if prefill % decode and decode % prefill:
        line = spec.line("prefill.tensor_parallel")
        message = f"{decode} does not divide {prefill} of prefill (line {line}), nor the other way round; {_REFUSED}"
        problems.append(spec.problem("decode.tensor_parallel", message))


def _check_block_size(spec: ClusterSpec, problems: list[Problem]) -> None:
    """The side that moves the blocks must have the larger ones (``TransferTopology.block_size_ratio``)."""
    sizes: dict[Role, int] = {}
    for role in ("prefill", "decode"):
        value = role_of(spec, role).vllm_args.get("block-size")
        text = str(value)
        if isinstance(value, bool) or not text.isdecimal() or int(text) == 0:
            return
        sizes[role] = int(text)
    mover: Role = "prefill" if spec.transfer.mode == "push" else "decode"
    other: Role = "decode" if mover == "prefill" else "prefill"
    if sizes[mover] % sizes[other]:
        message = (
            f"in {spec.transfer.mode} mode the block size of {mover} must be a multiple of that of {other}, but they "
            f"are {sizes[mover]} (line {spec.line(f'{mover}.vllm_args.block-size')}) and {sizes[other]}; {_REFUSED}"
        )
        problems.append(spec.problem(f"{other}.vllm_args.block-size", message, "give both roles the same"))
