"""Whether the model and one request of full length fit into memory: GPUs, host memory, Neuron. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdctl.doctor.checks.model_known import hosts_of
from pdctl.doctor.checks.per_host import not_reached
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, MemoryFacts, ModelFacts, NvidiaFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.memory_fit import CUDA_OVERHEAD_BYTES, GIB, Fit, fit, gib, longest_request, weights_share
from pdctl.doctor.model_shape import DTYPE_BYTES, ModelShape, read_shape
from pdctl.doctor.role_options import (
    DEFAULT_MEMORY_SHARE,
    config_overrides,
    number,
    option,
    size_of,
    variable,
    whole,
)
from pdctl.plan import InstancePlan
from pdctl.plan_seats import role_of
from pdctl.spec import ROLES, ClusterSpec, Role


@dataclass(frozen=True)
class _Model:
    """The model as one role of one host runs it.

    Attributes:
        weights: all of them, in bytes, at the least.
        weights_text: where that figure is from.
        request: KV cache of one request of full length on one rank, in bytes; None if not known.
        tokens: that length; None if vLLM chooses it by the room there is, or if it is not known.
        number_bytes: bytes of a number in the KV cache; None if not known.
    """

    shape: ModelShape
    weights: int
    weights_text: str
    tensor: int
    pipeline: int
    expert_ranks: int
    number_bytes: int | None
    tokens: int | None

    @property
    def share(self) -> int:
        """Weights of one rank, in bytes."""
        return weights_share(self.weights, tensor=self.tensor, pipeline=self.pipeline, expert_ranks=self.expert_ranks)

    def kv_bytes(self, tokens: int) -> int | None:
        """KV cache of a request on one rank, in bytes."""
        if self.number_bytes is None:
            return None
        return self.shape.kv_bytes(tokens, tensor=self.tensor, pipeline=self.pipeline, number_bytes=self.number_bytes)

    @property
    def request(self) -> int | None:
        """KV cache of one request of full length on one rank, in bytes; None if not known."""
        return None if self.tokens is None else self.kv_bytes(self.tokens)


def _memory(context: Context) -> Iterator[Result]:
    for role in ROLES:
        for host in hosts_of(context, role):
            yield from _memory_on(context, role, host)
    if context.spec.accelerator == "cpu":
        for host in context.vllm_hosts:
            yield from _host_memory(context, host)


def _memory_on(context: Context, role: Role, host: str) -> Iterator[Result]:
    facts = context.facts.get(host)
    if facts is None:
        yield not_reached(host)
        return
    model = _read_model(context.spec, role, facts)
    if isinstance(model, str):
        yield skipped(host, message=f"{role}: not checked: {model}")
        return
    instances = [one for one in context.instances_on(host) if one.role == role]
    if context.spec.accelerator == "cuda":
        yield from _gpu(context, role, facts, model, instances)
    elif context.spec.accelerator == "cpu":
        yield from _cpu(context, role, facts, model, instances)
    else:
        yield from _neuron(role, facts, model, instances)


# --- what is needed


def _read_model(spec: ClusterSpec, role: Role, facts: HostFacts) -> _Model | str:
    """The model, or why it cannot be judged."""
    if facts.model is None:
        return facts.why_missing("model")
    if not facts.model.config:
        return "the model's config.json is not known here (MOD001)"
    shape = read_shape(facts.model.config, config_overrides(spec, role))
    if not shape.quantized and option(spec, role, "quantization") not in (None, "None", ""):
        return "vLLM quantises the weights when it loads them, and how small they become is not known"
    if any(name.startswith(("cpu-offload", "offload-")) for name in role_of(spec, role).vllm_args):
        return "weights are offloaded to the host, and how many is not known"
    weights, text = _weights(spec, role, facts.model, shape)
    experts = size_of(spec, role, "prefill-context-parallel-size") * role_of(spec, role).data_parallel
    return _Model(
        shape=shape,
        weights=weights,
        weights_text=text,
        tensor=role_of(spec, role).tensor_parallel,
        pipeline=size_of(spec, role, "pipeline-parallel-size"),
        expert_ranks=experts if option(spec, role, "enable-expert-parallel") is True else 1,
        number_bytes=_number_bytes(spec, role, shape, facts.model),
        tokens=_tokens(spec, role, shape),
    )


def _weights(spec: ClusterSpec, role: Role, model: ModelFacts, shape: ModelShape) -> tuple[int, str]:
    """Weights in memory, in bytes, at the least: those on disk in the type that vLLM computes in, or by config.json."""
    used = _computes_in(spec, role, shape)
    on_disk = model.weights_bytes or 0
    if not shape.quantized and shape.dtype is not None and option(spec, role, "load-format") != "dummy":
        on_disk = on_disk * used // DTYPE_BYTES[shape.dtype]
        if shape.parameters is not None and on_disk > 2 * shape.parameters * used:
            # Larger files than config.json tells, which vLLM brings down to its own type.
            on_disk //= 2
    estimate = 0 if shape.quantized or shape.parameters is None else shape.parameters * used
    if estimate > on_disk:
        return estimate, "at the least, by config.json"
    return on_disk, "files" if model.weights_complete else "files that are there so far"


def _computes_in(spec: ClusterSpec, role: Role, shape: ModelShape) -> int:
    """Bytes of a number that vLLM computes in, at the least."""
    return DTYPE_BYTES.get(shape.dtype_in_use(option(spec, role, "dtype")) or "", 2)


def _number_bytes(spec: ClusterSpec, role: Role, shape: ModelShape, model: ModelFacts) -> int | None:
    """Bytes of a number in the KV cache, at the least; None for types that pack several into a byte."""
    given = str(option(spec, role, "kv-cache-dtype") or "auto")
    if given == "auto":
        # A checkpoint may ask for an 8-bit cache, and sparse MLA takes one by itself.
        small = shape.quantized or "index_topk" in model.config
        return 1 if small else _computes_in(spec, role, shape)
    if given.startswith(("fp8", "int8")):
        return 1
    return DTYPE_BYTES.get(given)


def _tokens(spec: ClusterSpec, role: Role, shape: ModelShape) -> int | None:
    given = option(spec, role, "max-model-len")
    if given is None:
        return shape.default_length
    length = whole(given)
    return length if length is not None and length > 0 else None


# --- GPUs


def _gpu(
    context: Context, role: Role, facts: HostFacts, model: _Model, instances: list[InstancePlan]
) -> Iterator[Result]:
    if facts.nvidia is None:
        yield skipped(facts.host, message=f"{role}: not checked: {facts.why_missing('nvidia')}")
        return
    memory = _smallest_gpu(facts.nvidia, instances)
    if memory is None:
        yield skipped(facts.host, message=f"{role}: not checked: the memory of the planned GPUs is not known")
        return
    share = number(option(context.spec, role, "gpu-memory-utilization"))
    if share is None:
        share = number(option(context.spec, role, "device-memory-utilization"))
    share = DEFAULT_MEMORY_SHARE if share is None or not 0 < share <= 1 else share
    cache = whole(option(context.spec, role, "kv-cache-memory-bytes"))
    # Set by hand, the cache is taken as it is, and the utilisation does not count.
    room = memory if cache is not None else int(memory * share)
    found = fit(room, weights=model.share, overhead=CUDA_OVERHEAD_BYTES, request=model.request, cache=cache)
    limit = f"GPU {gib(memory)}" + ("" if cache is not None else f" x {share:g} = {gib(room)}")
    evidence = _arithmetic(model, limit, found, f"{gib(CUDA_OVERHEAD_BYTES)} for CUDA")
    yield from _judge(role, facts.host, model, found, evidence, "GPU", by_hand=cache is not None)


def _smallest_gpu(nvidia: NvidiaFacts, instances: list[InstancePlan]) -> int | None:
    wanted = {device for instance in instances for device in instance.devices}
    sizes = [gpu.memory_bytes for gpu in nvidia.gpus if gpu.index in wanted and gpu.memory_bytes]
    return min(sizes, default=None)


def _arithmetic(model: _Model, limit: str, found: Fit, overhead: str) -> str:
    ranks = f"TP {model.tensor}" + (f" x PP {model.pipeline}" if model.pipeline > 1 else "")
    ranks += f" x experts over {model.expert_ranks}" if model.expert_ranks > 1 else ""
    parts = [f"weights {gib(model.weights)} ({model.weights_text}) / {ranks} = {gib(model.share)}"]
    if found.request is not None and model.tokens is not None:
        parts.append(f"KV cache of {model.tokens} tokens: {gib(found.request)} per rank")
    elif model.tokens is None:
        parts.append("the length of a request is left to vLLM or not known")
    else:
        parts.append("the size of this model's KV cache is not known")
    return f"{limit}; {'; '.join(parts)}; {overhead}; left for the KV cache: {gib(found.left)}"


def _judge(
    role: Role, host: str, model: _Model, found: Fit, evidence: str, unit: str, *, by_hand: bool = False
) -> Iterator[Result]:
    if found.left <= 0:
        yield failed(
            host,
            message=f"{role}: the weights alone, {gib(model.share)} per {unit}, do not fit into its memory",
            evidence=evidence,
            fix="raise `tensor_parallel`, take devices with more memory, or a quantised model",
        )
    elif by_hand and found.cache > found.left:
        yield failed(
            host,
            message=f"{role}: the KV cache set by hand, {gib(found.cache)}, does not fit beside the weights",
            evidence=evidence,
            fix=f"lower `kv-cache-memory-bytes` to less than {gib(found.left)}, or remove it",
        )
    elif found.requests is None or found.request is None or model.tokens is None:
        yield passed(host, message=f"{role}: the weights fit; the KV cache was not judged", evidence=evidence)
    elif found.requests < 1:
        longest = longest_request(found.cache, model.kv_bytes, model.tokens)
        yield failed(
            host,
            message=(
                f"{role}: one request of {model.tokens} tokens needs {gib(found.request)} of KV cache per {unit}, but "
                f"only {gib(max(0, found.cache))} are there"
            ),
            evidence=evidence,
            fix=f"set `vllm_args: {{max-model-len: {longest}}}` or less, or give the KV cache more room",
        )
    elif found.requests < 2:
        yield failed(
            host,
            message=f"{role}: the KV cache has room for one request of full length ({model.tokens} tokens) only",
            evidence=evidence,
            fix="lower `max-model-len` if no request is that long, or give the KV cache more room",
            severity=Severity.WARNING,
        )
    else:
        yield passed(
            host,
            message=f"{role}: weights and KV cache fit",
            evidence=f"about {found.requests:.1f} requests of {model.tokens} tokens; {evidence}",
        )


# --- host memory


def _host_limit(memory: MemoryFacts) -> int:
    return min(memory.total_bytes, memory.cgroup_limit_bytes or memory.total_bytes)


def _cpu_cache(context: Context, role: Role, instance: InstancePlan) -> int | None:
    """KV cache of each rank as it is set, in bytes; None if vLLM is left to choose."""
    space = whole(variable(context, instance, "VLLM_CPU_KVCACHE_SPACE"))
    return space * GIB if space else whole(option(context.spec, role, "kv-cache-memory-bytes"))


def _cpu_share(spec: ClusterSpec, role: Role) -> float:
    share = number(option(spec, role, "gpu-memory-utilization"))
    return share if share is not None and 0 < share <= 1 else DEFAULT_MEMORY_SHARE


def _cpu(
    context: Context, role: Role, facts: HostFacts, model: _Model, instances: list[InstancePlan]
) -> Iterator[Result]:
    if facts.memory is None:
        yield skipped(facts.host, message=f"{role}: not checked: {facts.why_missing('memory')}")
        return
    limit = _host_limit(facts.memory)
    caches = {_cpu_cache(context, role, instance) for instance in instances}
    # Those of one host may differ only by its own `env`, so there is one.
    cache = next(iter(caches))
    share = 1.0 if cache is not None else _cpu_share(context.spec, role)
    room = int(limit * share)
    found = fit(room, weights=model.share, overhead=0, request=model.request, cache=cache)
    source = f"KV cache set to {gib(cache)} per rank" if cache is not None else f"x {share:g} = {gib(room)}"
    evidence = _arithmetic(
        model, f"host memory {gib(limit)}, {source}", found, "nothing counted for the process itself"
    )
    yield from _judge(role, facts.host, model, found, evidence, "rank")


def _host_memory(context: Context, host: str) -> Iterator[Result]:
    """All instances of a host together."""
    facts = context.facts.get(host)
    if facts is None or facts.memory is None:
        # Said above, for each role.
        return
    limit = _host_limit(facts.memory)
    total = 0
    greedy = 0
    parts = []
    for instance in context.instances_on(host):
        if instance.role == "router":
            continue
        model = _read_model(context.spec, instance.role, facts)
        if isinstance(model, str):
            return
        engines = role_of(context.spec, instance.role).data_parallel
        ranks = engines * model.tensor * model.pipeline
        cache = _cpu_cache(context, instance.role, instance)
        weights = model.weights * (1 if model.expert_ranks > 1 else engines)
        if cache is None:
            greedy += ranks
            total += weights
            parts.append(f"{instance.name} {gib(weights)} + KV cache by share of memory")
        else:
            total += weights + ranks * cache
            parts.append(f"{instance.name} {gib(weights)} + {ranks} x {gib(cache)}")
    evidence = f"host memory {gib(limit)}; {'; '.join(parts)}"
    if total > limit:
        yield failed(
            host,
            message=f"weights and KV caches of all instances together need {gib(total)}, and the host has {gib(limit)}",
            evidence=evidence,
            fix="lower VLLM_CPU_KVCACHE_SPACE (GiB per rank) in `env`, or spread the instances over more hosts",
        )
    elif greedy > 1:
        yield failed(
            host,
            message=f"each of {greedy} ranks on this host would reserve most of its memory for its KV cache",
            evidence=evidence,
            fix="set VLLM_CPU_KVCACHE_SPACE (GiB per rank) in `env`",
            severity=Severity.WARNING,
        )


# --- Neuron


def _neuron(role: Role, facts: HostFacts, model: _Model, instances: list[InstancePlan]) -> Iterator[Result]:
    if facts.neuron is None:
        yield skipped(facts.host, message=f"{role}: not checked: {facts.why_missing('neuron')}")
        return
    sizes = [device.memory_bytes for device in facts.neuron.devices]
    known = [size for size in sizes if size]
    if not known or len(known) < len(sizes):
        yield skipped(facts.host, message=f"{role}: not checked: the memory of the Neuron devices is not known")
        return
    total = model.weights * len(instances)
    evidence = f"{len(known)} devices with {gib(sum(known))}; {len(instances)} x weights {gib(model.weights)}"
    if total > sum(known):
        yield failed(
            facts.host,
            message=f"{role}: the weights alone, {gib(total)}, do not fit into the memory of all Neuron devices",
            evidence=evidence,
            fix="take a larger instance type, or a smaller or quantised model",
        )
    else:
        message = f"{role}: the weights fit; the KV cache was not judged (Neuron lays it out by its own rules)"
        yield passed(facts.host, message=message, evidence=evidence)


MEMORY_CHECKS: tuple[Check, ...] = (
    Check(
        id="MOD012",
        title="Weights and KV cache fit into memory",
        severity=Severity.ERROR,
        what=(
            "Per rank: weights / (tensor x pipeline parallel), plus the KV cache of one request of `max-model-len` by "
            "config.json (layers x KV heads per rank x size of key and value x bytes of a number; one latent vector "
            "for MLA; windows only as long as they are), against GPU memory x `gpu-memory-utilization` (vLLM takes "
            f"{DEFAULT_MEMORY_SHARE:g}) less {CUDA_OVERHEAD_BYTES / GIB:g} GiB. On CPUs: against "
            "VLLM_CPU_KVCACHE_SPACE and the memory of the host. All needs are lower bounds: what is found not to fit "
            "does not fit. Room for fewer than two requests of full length is a warning."
        ),
        why=(
            "vLLM ends after loading for minutes: out of memory, `No available memory for the cache blocks`, or `To "
            "serve at least one request ... KV cache is needed`."
        ),
        fix="Raise `tensor_parallel`, lower `max-model-len`, quantise the model; on CPUs set VLLM_CPU_KVCACHE_SPACE.",
        run=_memory,
        sources=("https://docs.vllm.ai/en/latest/configuration/conserving_memory/",),
        blocking=True,
    ),
)
