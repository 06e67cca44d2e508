"""Whether the model's layout fits the parallel sizes and options of prefill and decode. Pure.

What the options alone decide is refused when the plan is made (``pdctl.plan_compat``, ``pdctl.plan_args``); here is
what needs the model's config.json, and what only push mode's connector asks for. Rules are those of vLLM 0.32:
``ModelConfig.verify_with_parallel_config``, ``_validate_remote_agent_handshake`` and ``add_remote_agent`` of the NIXL
workers, and pdctl's connector (docs/connector.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.checks.model_known import RoleShape, role_shape
from pdctl.doctor.checks.versions import at_least
from pdctl.doctor.context import Context
from pdctl.doctor.findings import Check, Result, Severity, failed, passed
from pdctl.doctor.package_versions import WANTED_ROUTER
from pdctl.doctor.pythons import planned_pythons
from pdctl.doctor.role_options import is_on, option, size_of, variable, whole
from pdctl.plan_seats import role_of
from pdctl.spec import ROLES, Role

_TP = "tensor_parallel"


def _where(context: Context, key: str) -> str:
    line = context.spec.line(key)
    file = context.spec.file or "the cluster file"
    return f"`{key}` ({file}:{line})" if line is not None else f"`{key}`"


def _hosts(context: Context) -> tuple[str, ...]:
    return context.vllm_hosts


# --- MOD004


def _heads_divide(context: Context) -> Iterator[Result]:
    for role in ROLES:
        known = role_shape(context, role)
        shape, tensor = known.shape, role_of(context.spec, role).tensor_parallel
        if shape is None:
            yield known.unknown
            continue
        heads, kv_heads = shape.attention_heads, None if shape.latent else shape.kv_heads
        key = _where(context, f"{role}.{_TP}")
        if heads is not None and heads % tensor:
            yield failed(
                *known.hosts,
                message=f"{role}: {heads} attention heads of the model do not divide by {_TP} {tensor}",
                evidence=key,
                fix=f"choose one of {_divisors(heads)} as {key}",
            )
        elif kv_heads is not None and kv_heads % tensor and tensor % kv_heads:
            yield failed(
                *known.hosts,
                message=f"{role}: {kv_heads} KV heads can be neither split nor repeated evenly over {_TP} {tensor}",
                evidence=key,
                fix=f"choose one of {_divisors(kv_heads)}, or a multiple of {kv_heads}, as {key}",
            )
        else:
            kv = f"{kv_heads or 'unknown'} KV heads" if not shape.latent else "a latent cache on every rank"
            message = f"{role}: the model's attention heads divide by {_TP} {tensor}"
            yield passed(*known.hosts, message=message, evidence=f"{heads or 'unknown'} attention heads, {kv}")


def _divisors(number: int) -> str:
    found = [divisor for divisor in range(1, min(number, 1024) + 1) if number % divisor == 0]
    return ", ".join(map(str, found))


# --- MOD005


def _ratio_fits(context: Context) -> Iterator[Result]:
    prefill, decode = context.spec.prefill.tensor_parallel, context.spec.decode.tensor_parallel
    if prefill == decode:
        return
    known = role_shape(context, "prefill")
    shape = known.shape
    if shape is None:
        yield known.unknown
        return
    # The side that moves the blocks judges the other one's layout: prefill when it pushes, decode when it pulls.
    push = context.spec.transfer.mode == "push"
    mover, other = (("prefill", prefill), ("decode", decode)) if push else (("decode", decode), ("prefill", prefill))
    hosts = _hosts(context)
    evidence = f"{_where(context, f'prefill.{_TP}')} {prefill}, {_where(context, f'decode.{_TP}')} {decode}"
    if shape.latent or shape.states or other[1] < mover[1]:
        yield passed(*hosts, message="the parallel sizes of prefill and decode fit the model", evidence=evidence)
    elif shape.kv_heads is None:
        yield failed(
            *hosts,
            message=f"{other[0]} has a larger {_TP} than {mover[0]}, and the model's number of KV heads is not known",
            evidence=evidence,
            fix=f"{_TP} of {other[0]} must not exceed the number of KV heads then; look it up in config.json",
            severity=Severity.INFO,
        )
    elif other[1] > shape.kv_heads:
        mode = context.spec.transfer.mode
        yield failed(
            *hosts,
            message=(
                f"in {mode} mode {_TP} {other[1]} of {other[0]} must not exceed the model's {shape.kv_heads} KV heads "
                f"when {mover[0]} has the smaller {mover[1]}: the handshake is refused"
            ),
            evidence=evidence,
            fix=f"give both the same {_TP}, or at most {shape.kv_heads} to {other[0]}, or the larger one to {mover[0]}",
        )
    else:
        yield passed(
            *hosts,
            message="the parallel sizes of prefill and decode fit the model",
            evidence=f"{shape.kv_heads} KV heads; {evidence}",
        )


# --- MOD006


def _attention_supported(context: Context) -> Iterator[Result]:
    known = role_shape(context, "prefill")
    shape = known.shape
    if shape is None:
        yield known.unknown
        return
    hosts = _hosts(context)
    pipeline = size_of(context.spec, "prefill", "pipeline-parallel-size")
    prefill, decode = context.spec.prefill.tensor_parallel, context.spec.decode.tensor_parallel
    push = context.spec.transfer.mode == "push"
    # Switched off, windows are kept as if they were full attention.
    hybrid = shape.windowed and not _hybrid_off(context)
    change_pipeline = f"remove `pipeline-parallel-size` from prefill and use `{_TP}`"
    if shape.encoder_decoder:
        yield failed(
            *hosts,
            message="this model has an encoder and a decoder, which vLLM does not serve with any KV connector",
            evidence=f"is_encoder_decoder in config.json of {context.spec.model}",
            fix="serve it without prefill/decode disaggregation",
        )
    elif pipeline > 1 and shape.states:
        yield failed(
            *hosts,
            message="vLLM's NIXL connectors do not transfer state layers (Mamba) with pipeline parallelism",
            evidence=f"{shape.attention}; pipeline-parallel-size {pipeline}",
            fix=change_pipeline,
        )
    elif pipeline > 1 and hybrid and not push:
        yield failed(
            *hosts,
            message="in pull mode vLLM does not transfer sliding windows with pipeline parallelism",
            evidence=f"{shape.attention}; pipeline-parallel-size {pipeline}",
            fix=f"{change_pipeline}, or use `transfer: {{mode: push}}`",
        )
    elif pipeline > 1 and hybrid and decode > prefill and not shape.latent:
        yield failed(
            *hosts,
            message=(
                f"with sliding windows and pipeline parallelism {_TP} {decode} of decode must not exceed {prefill} of "
                "prefill"
            ),
            evidence=f"{shape.attention}; pipeline-parallel-size {pipeline}",
            fix=f"raise {_TP} of prefill, or {change_pipeline}",
        )
    elif shape.states and (wrong := _wrong_state_layout(context)):
        yield failed(
            *wrong,
            message="VLLM_SSM_CONV_STATE_LAYOUT is not DS, the only layout in which NIXL transfers state layers",
            evidence=f"{shape.attention}; set under `env`",
            fix="remove VLLM_SSM_CONV_STATE_LAYOUT from `env`: pdctl sets it",
        )
    else:
        heads = "" if shape.latent or shape.kv_heads is None else f", {shape.kv_heads} KV heads of {shape.key_size}"
        evidence = f"{shape.model_type or 'unknown type'}: {shape.attention}{heads}"
        yield passed(*hosts, message="the model's kind of attention can be transferred", evidence=evidence)


def _hybrid_off(context: Context) -> bool:
    return any(option(context.spec, role, "disable-hybrid-kv-cache-manager") is True for role in ROLES)


def _wrong_state_layout(context: Context) -> list[str]:
    if context.spec.accelerator == "neuron":
        return []
    instances = (*context.plan.prefill, *context.plan.decode)
    wrong = (one.host for one in instances if one.env.get("VLLM_SSM_CONV_STATE_LAYOUT", "DS") != "DS")
    return list(dict.fromkeys(wrong))


# --- MOD007


def _pipeline_fits(context: Context) -> Iterator[Result]:
    spec = context.spec
    pipeline = size_of(spec, "prefill", "pipeline-parallel-size")
    context_parallel = size_of(spec, "prefill", "prefill-context-parallel-size")
    push = spec.transfer.mode == "push"
    known = role_shape(context, "prefill")
    if push and context_parallel > 1:
        yield failed(
            *known.hosts,
            message="prefill context parallelism is not supported in push mode: several ranks would write the same KV",
            evidence=_where(context, "prefill.vllm_args.prefill-context-parallel-size"),
            fix=f"remove `prefill-context-parallel-size` and use `{_TP}`, or use `transfer: {{mode: pull}}`",
        )
    if pipeline == 1:
        return
    evidence = f"{_where(context, 'prefill.vllm_args.pipeline-parallel-size')} {pipeline}"
    if known.shape is not None and known.shape.layers is not None and known.shape.layers < pipeline:
        yield failed(
            *known.hosts,
            message=f"the model has {known.shape.layers} layers, fewer than {pipeline} pipeline stages of prefill",
            evidence=evidence,
            fix="lower `pipeline-parallel-size`",
        )
    elif push:
        yield _router_and_pipeline(context, known, evidence)


def _router_and_pipeline(context: Context, known: RoleShape, evidence: str) -> Result:
    pythons = [python for python in planned_pythons(context, "router") if python.facts is not None]
    version = pythons[0].facts.packages.get("vllm-router", "") if pythons and pythons[0].facts is not None else ""
    newer = at_least(version, WANTED_ROUTER) is True and at_least(WANTED_ROUTER, version) is False
    drops = f"vllm-router {WANTED_ROUTER} does not tell decode of prefill's pipeline stages"
    return failed(
        *known.hosts,
        message=f"{drops}: decode registers with the first stage alone, and requests fail or hang",
        evidence=f"{evidence}; vllm-router {version or 'of unknown version'}",
        fix=f"remove `pipeline-parallel-size` from prefill and use `{_TP}`, or use `transfer: {{mode: pull}}`",
        # A newer one may pass it on.
        severity=Severity.WARNING if newer or not version else Severity.ERROR,
    )


# --- MOD008


def _block_sizes_equal(context: Context) -> Iterator[Result]:
    if context.spec.transfer.mode != "push":
        return
    hosts = _hosts(context)
    sizes: dict[Role, int | None] = {role: whole(option(context.spec, role, "block-size")) for role in ROLES}
    prefill, decode = sizes["prefill"], sizes["decode"]
    if prefill == decode:
        shown = "as vLLM chooses it" if prefill is None else str(prefill)
        yield passed(*hosts, message="prefill and decode have the same KV block size", evidence=shown)
        return
    fix = "give both roles the same `vllm_args: {block-size: N}`"
    if prefill is not None and decode is not None:
        yield failed(
            *hosts,
            message=f"the KV block size is {prefill} on prefill and {decode} on decode: push mode needs the same",
            evidence=", ".join(_where(context, f"{role}.vllm_args.block-size") for role in ROLES),
            fix=fix,
        )
        return
    role: Role = "decode" if prefill is None else "prefill"
    other = "prefill" if prefill is None else "decode"
    if sizes[role] == _usual_block_size(context):
        yield passed(
            *hosts, message="prefill and decode have the same KV block size", evidence=f"{sizes[role]}, the usual"
        )
        return
    yield failed(
        *hosts,
        message=(
            f"only {role} gives a KV block size ({sizes[role]}), and {other} may take another: push mode needs the same"
        ),
        evidence=_where(context, f"{role}.vllm_args.block-size"),
        fix=fix,
        severity=Severity.WARNING,
    )


def _usual_block_size(context: Context) -> int | None:
    """What vLLM 0.32 takes for most models (``platforms/cpu.py``, ``CacheConfig``)."""
    return {"cpu": 128, "cuda": 16}.get(context.spec.accelerator)


# --- MOD009


def _handshake_agrees(context: Context) -> Iterator[Result]:
    hosts = _hosts(context)
    enforced = context.spec.transfer.extra.get("enforce_handshake_compat", True) is not False
    shapes = {role: role_shape(context, role) for role in ROLES}
    prefill, decode = shapes["prefill"].shape, shapes["decode"].shape
    problem = False
    if prefill is None or decode is None:
        yield shapes["prefill"].unknown
    else:
        used = {
            "prefill": prefill.dtype_in_use(option(context.spec, "prefill", "dtype")),
            "decode": decode.dtype_in_use(option(context.spec, "decode", "dtype")),
        }
        if None not in used.values() and used["prefill"] != used["decode"]:
            problem = True
            yield failed(
                *hosts,
                message=(
                    f"prefill computes in {used['prefill']} and decode in {used['decode']}: the handshake is refused, "
                    "or the KV cache misread"
                ),
                evidence=f"config.json says {prefill.dtype}; a role without `dtype` takes that",
                fix="give both roles the same `vllm_args: {dtype: ...}`",
            )
    if enforced and (reason := _backends_may_differ(context)):
        problem = True
        yield failed(
            *hosts,
            message=f"{reason}: the handshake is refused if the attention backends differ",
            fix="give both roles the same `vllm_args: {attention-backend: ...}`",
            severity=Severity.WARNING,
        )
    if not problem and prefill is not None and decode is not None:
        yield passed(*hosts, message="prefill and decode compute in the same type and attention backend")


def _backends_may_differ(context: Context) -> str:
    given = {role: option(context.spec, role, "attention-backend") for role in ROLES}
    one_sided = [role for role in ROLES if given[role] is not None]
    if len(one_sided) == 2:
        # That they are the same was checked when the plan was made.
        return ""
    if len(one_sided) == 1:
        return f"only {one_sided[0]} gives an attention backend ({given[one_sided[0]]}), the other side chooses its own"
    names: dict[str, set[str]] = {"prefill": set(), "decode": set()}
    if context.spec.accelerator == "cuda":
        for instance in (*context.plan.prefill, *context.plan.decode):
            facts = context.facts.get(instance.host)
            if facts is not None and facts.nvidia is not None:
                gpus = {gpu.index: gpu.name for gpu in facts.nvidia.gpus}
                names[instance.role] |= {gpus[device] for device in instance.devices if device in gpus}
    if names["prefill"] and names["decode"] and names["prefill"] != names["decode"]:
        kinds = [", ".join(sorted(names[role])) for role in ROLES]
        return f"prefill has {kinds[0]} and decode {kinds[1]}, for which vLLM may choose different attention backends"
    return ""


# --- MOD010, MOD011


def _lengths_agree(context: Context) -> Iterator[Result]:
    lengths: dict[Role, int | None] = {}
    for role in ROLES:
        given = whole(option(context.spec, role, "max-model-len"))
        shape = role_shape(context, role).shape
        fitted = (given is not None and given < 1) or _is_auto(option(context.spec, role, "max-model-len"))
        lengths[role] = None if fitted else given or (shape.default_length if shape is not None else None)
    prefill, decode = lengths["prefill"], lengths["decode"]
    if prefill is None or decode is None:
        return
    hosts = _hosts(context)
    if prefill == decode:
        yield passed(
            *hosts, message="prefill and decode take requests of the same length", evidence=f"{prefill} tokens"
        )
        return
    smaller: Role = "prefill" if prefill < decode else "decode"
    yield failed(
        *hosts,
        message=(
            f"prefill takes requests of up to {prefill} tokens and decode of up to {decode}: longer ones than "
            f"{min(prefill, decode)} are refused by {smaller} alone"
        ),
        evidence=_where(context, f"{smaller}.vllm_args.max-model-len"),
        fix="give both roles the same `vllm_args: {max-model-len: N}`",
    )


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("auto", "-1")


def _length_allowed(context: Context) -> Iterator[Result]:
    for role in ROLES:
        given = whole(option(context.spec, role, "max-model-len"))
        if given is None or given < 1:
            continue
        known = role_shape(context, role)
        if known.shape is None:
            yield known.unknown
        elif known.shape.positions is None:
            continue
        elif given <= known.shape.positions[0]:
            message = f"{role}: max-model-len {given} is within what the model allows"
            yield passed(
                *known.hosts, message=message, evidence=f"{known.shape.positions[1]} {known.shape.positions[0]}"
            )
        else:
            length, name = known.shape.positions
            instances = context.plan.prefill if role == "prefill" else context.plan.decode
            forced = all(is_on(variable(context, one, "VLLM_ALLOW_LONG_MAX_MODEL_LEN")) for one in instances)
            yield failed(
                *known.hosts,
                message=f"{role}: max-model-len {given} is more than the {length} tokens that the model allows",
                evidence=f"{name} {length} in config.json; {_where(context, f'{role}.vllm_args.max-model-len')}",
                fix=f"lower `max-model-len` to {length}, or extend the model with `hf-overrides` (rope scaling)",
                severity=Severity.WARNING if forced else Severity.ERROR,
            )


_VLLM_SOURCE = "https://github.com/vllm-project/vllm/tree/main/vllm/distributed/kv_transfer/kv_connector/v1/nixl"
_CONNECTOR_DOCUMENT = "docs/connector.md"

LAYOUT_CHECKS: tuple[Check, ...] = (
    Check(
        id="MOD004",
        title="The model's heads divide by tensor_parallel",
        severity=Severity.ERROR,
        what=(
            "The number of attention heads in config.json is a multiple of `tensor_parallel` of each role, and KV "
            "heads can be split or repeated evenly (not for MLA, where every rank has the whole latent cache)."
        ),
        why="vLLM ends at start: `Total number of attention heads must be divisible by tensor parallel size`.",
        fix="Choose a `tensor_parallel` that divides the number of heads.",
        run=_heads_divide,
        blocking=True,
    ),
    Check(
        id="MOD005",
        title="tensor_parallel of prefill against decode fits the KV heads",
        severity=Severity.ERROR,
        what=(
            "Where the sizes differ and the side that does not move the blocks (decode in push mode, prefill in pull "
            "mode) has the larger `tensor_parallel`, that must not exceed the model's KV heads. MLA and models with "
            "state layers are free of this. That one divides the other is checked when the plan is made."
        ),
        why="The NIXL handshake ends in an assertion, so that instances start and every request fails.",
        fix="Give both the same, or the larger one to the side that moves the blocks.",
        run=_ratio_fits,
        sources=(_VLLM_SOURCE,),
        blocking=True,
    ),
    Check(
        id="MOD006",
        title="The model's kind of attention can be transferred",
        severity=Severity.ERROR,
        what=(
            "By config.json: full attention, MLA, sliding windows and state layers (Mamba, linear attention) can be "
            "transferred; encoder-decoder models cannot, nor state layers with pipeline parallelism."
        ),
        why="vLLM or the connector ends at start, or the handshake is refused.",
        fix="See the finding: mostly it is to leave out pipeline parallelism.",
        run=_attention_supported,
        sources=(_VLLM_SOURCE, _CONNECTOR_DOCUMENT),
        blocking=True,
    ),
    Check(
        id="MOD007",
        title="Pipeline and context parallelism on prefill work in push mode",
        severity=Severity.ERROR,
        what=(
            "Push mode: no `prefill-context-parallel-size` above 1; `pipeline-parallel-size` above 1 needs a router "
            f"that passes on `pp_size`, which vllm-router {WANTED_ROUTER} does not."
        ),
        why="The connector refuses the first at start. With the second decode waits for stages it does not know of.",
        fix="Use `tensor_parallel`.",
        run=_pipeline_fits,
        sources=(_CONNECTOR_DOCUMENT,),
        blocking=True,
    ),
    Check(
        id="MOD008",
        title="The same KV block size on prefill and decode",
        severity=Severity.ERROR,
        what="Push mode: `block-size` is the same on both sides, or left to vLLM on both.",
        why="Every registration is refused: each request fails, or decode computes the prompt by itself.",
        fix="Give both roles the same `block-size`, or none.",
        run=_block_sizes_equal,
        sources=(_CONNECTOR_DOCUMENT,),
    ),
    Check(
        id="MOD009",
        title="What the handshake compares is the same",
        severity=Severity.ERROR,
        what=(
            "The type of numbers that each side computes in (its `dtype`, else that of config.json), and whether both "
            "choose the same attention backend: given by one side only, or other GPUs on the other side, is a warning."
        ),
        why="`NIXL compatibility hash mismatch`: instances start, and every request fails.",
        fix="Give both roles the same `dtype` and `attention-backend`.",
        run=_handshake_agrees,
        sources=(_VLLM_SOURCE,),
    ),
    Check(
        id="MOD010",
        title="Prefill and decode take requests of the same length",
        severity=Severity.WARNING,
        what="`max-model-len` of both sides, or what the model has where it is not given.",
        why="One side refuses what the other one accepts: the request fails after it has been computed, or at once.",
        fix="Give both roles the same `max-model-len`.",
        run=_lengths_agree,
    ),
    Check(
        id="MOD011",
        title="max-model-len is within what the model allows",
        severity=Severity.ERROR,
        what=(
            "`max-model-len` is not above the length in config.json (max_position_embeddings and its like). Not judged "
            "where config.json scales it in ways that depend on more."
        ),
        why="vLLM ends at start: `User-specified max_model_len is greater than the derived max_model_len`.",
        fix="Lower it, or extend the model with `hf-overrides`.",
        run=_length_allowed,
        blocking=True,
    ),
)
