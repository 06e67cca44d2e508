"""HOST003, 004, 010: memory, shared memory and huge pages. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pdctl.doctor.checks.instance_facts import argument_of, environment_of, is_running, ranks_of
from pdctl.doctor.checks.per_host import each_host, on_fabric
from pdctl.doctor.checks.wording import GIB, MIB, plural, size
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, MemoryFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.plan import InstancePlan

MEMORY_PER_INSTANCE = 3 * GIB
"""Observed per CPU instance besides weights and KV cache (vLLM 0.32)."""
MEMORY_PER_RANK = 2 * GIB
"""Host memory of a worker process with an accelerator: interpreter, libraries, driver context."""
SHM_LEAST = 64 * MIB
"""What a container gets unless told otherwise; too little for NCCL and vLLM's queues between ranks."""
SHM_WANTED = 1 * GIB
HOST_CACHE_MOST = 88 * GIB
"""About 95 GB: what was seen to register with 4 KiB pages (libfabric issue 9739)."""


def _memory(context: Context, facts: HostFacts, memory: MemoryFacts) -> Iterable[Result]:
    group = memory.cgroup_limit_bytes
    limit = memory.total_bytes if group is None else min(memory.total_bytes, group)
    instances = _vllm_instances(context, facts)
    # What this cluster's own instances hold now will be theirs after a restart as well.
    running = any(is_running(facts, instance) for instance in instances)
    free = limit if running else min(limit, memory.available_bytes)
    if context.spec.accelerator == "cpu":
        yield _cpu_memory(facts, instances, limit, free)
        return
    ranks = sum(map(ranks_of, instances))
    wanted = ranks * MEMORY_PER_RANK
    seen = f"available {size(free)} of {size(limit)}"
    if free < wanted:
        processes = plural(ranks, "worker process", "worker processes")
        yield failed(
            facts.host,
            severity=Severity.WARNING,
            message=f"little host memory is free: {size(wanted)} are wanted for {processes}",
            evidence=seen,
            fix="see what holds it (`ps aux --sort=-rss | head`), or raise the container's memory limit",
        )
    else:
        yield passed(facts.host, message="enough host memory", evidence=seen)


def _cpu_memory(facts: HostFacts, instances: list[InstancePlan], limit: int, free: int) -> Result:
    """Weights, KV cache and processes of all instances against the host's memory."""
    host = facts.host
    weights = facts.model.weights_bytes if facts.model is not None else None
    wanted, shares = 0, 0.0
    for instance in instances:
        engines = len(instance.side_channel_ports) or 1
        cache = _cache_space(facts, instance)
        if cache is None:
            shares += _utilization(argument_of(instance, "gpu-memory-utilization"))
        wanted += (MEMORY_PER_INSTANCE + (weights or 0)) * engines + (cache or 0) * ranks_of(instance)
    seen = f"available {size(free)} of {size(limit)}; weights {size(weights) if weights else 'of unknown size'}"
    if shares * limit > free:
        return failed(
            host,
            message=f"the instances take {shares:.2f} of the host's memory for themselves, and that much is not free",
            evidence=f"{seen}; without a size of its KV cache an instance takes gpu-memory-utilization (0.92) of all",
            fix="give the KV cache a size that leaves room for the weights: VLLM_CPU_KVCACHE_SPACE in `env`, in GiB "
            "for each instance (2 is enough to try), or a smaller gpu-memory-utilization in `vllm_args`",
        )
    if wanted > limit:
        return failed(
            host,
            message=f"the host's memory is too small: {size(wanted)} are wanted",
            evidence=seen,
            fix="use a larger machine, fewer instances, or a smaller VLLM_CPU_KVCACHE_SPACE",
        )
    if wanted > free:
        return failed(
            host,
            severity=Severity.WARNING,
            message=f"too little memory is free: {size(wanted)} are wanted",
            evidence=seen,
            fix="see what holds it (`ps aux --sort=-rss | head`) and end it",
        )
    if weights is None:
        why = facts.why_missing("model") if facts.model is None else "the model is not on the host yet"
        return skipped(host, message=f"the size of the weights is unknown: {why}", evidence=seen)
    return passed(host, message="enough memory for weights and KV cache", evidence=f"{seen}; wanted {size(wanted)}")


def _cache_space(facts: HostFacts, instance: InstancePlan) -> int | None:
    """Bytes of KV cache of each rank, if they are set by hand; vLLM reads both settings (``CpuPlatform``, 0.32)."""
    gibibytes = _whole(environment_of(facts, instance).get("VLLM_CPU_KVCACHE_SPACE", ("", ""))[0])
    if gibibytes is not None:
        return gibibytes * GIB
    return _whole(argument_of(instance, "kv-cache-memory-bytes") or "")


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _utilization(value: str | None) -> float:
    try:
        share = float(value or "")
    except ValueError:
        return 0.92
    return share if 0 < share <= 1 else 0.92


def _shared_memory(context: Context, facts: HostFacts, memory: MemoryFacts) -> Iterable[Result]:
    host, total, free = facts.host, memory.shm_total_bytes, memory.shm_free_bytes
    if total is None or free is None:
        yield skipped(host, message="not checked: the size of /dev/shm was not reported")
        return
    several = any(ranks_of(instance) > 1 for instance in _vllm_instances(context, facts))
    seen = f"{size(free)} of {size(total)} free"
    fix = "start the container with `--ipc=host` or `--shm-size=16g`; on a host: free it (`ls -la /dev/shm`) or "
    fix += "`sudo mount -o remount,size=50% /dev/shm`"
    if several and free <= SHM_LEAST:
        message = f"too little of /dev/shm is free for several ranks: {size(SHM_WANTED)} are wanted"
        yield failed(host, message=message, evidence=seen, fix=fix)
    elif several and free < SHM_WANTED:
        message = f"little of /dev/shm is free for several ranks: {size(SHM_WANTED)} are wanted"
        yield failed(host, severity=Severity.WARNING, message=message, evidence=seen, fix=fix)
    else:
        yield passed(host, message="shared memory is large enough", evidence=seen)


def _huge_pages(context: Context, facts: HostFacts, memory: MemoryFacts) -> Iterable[Result]:
    host = facts.host
    seen = f"{memory.hugepages_free} of {memory.hugepages_total} free, {size(memory.hugepage_bytes)} each"
    instances = _vllm_instances(context, facts)
    used = [environment_of(facts, one).get("FI_EFA_USE_HUGE_PAGE", ("", ""))[0].lower() for one in instances]
    caches = [cache for cache in (_cache_space(facts, one) for one in instances) if cache is not None]
    if memory.hugepages_total > 0 and memory.hugepages_free <= 0 and not set(used) <= {"0", "no", "false"}:
        yield failed(
            host,
            message="all huge pages are taken: a process that uses EFA then cannot fork (`Cannot allocate memory`)",
            evidence=seen,
            fix="set FI_EFA_USE_HUGE_PAGE: '0' in `env`, or reserve more than there are now (`sudo sysctl -w "
            "vm.nr_hugepages=NUMBER`) before the instances are started",
        )
    elif context.spec.accelerator == "cpu" and memory.hugepages_total == 0 and max(caches, default=0) > HOST_CACHE_MOST:
        yield failed(
            host,
            message="an EFA device registers no more than about 95 GB of host memory in 4 KiB pages",
            evidence=f"no huge pages; KV cache of a rank: {size(max(caches))}",
            fix="reserve huge pages for the KV cache, or make it smaller",
        )
    else:
        yield passed(host, message="huge pages are no trouble", evidence=seen)


def _vllm_instances(context: Context, facts: HostFacts) -> list[InstancePlan]:
    return [instance for instance in context.instances_on(facts.host) if instance.role != "router"]


CHECKS: tuple[Check, ...] = (
    Check(
        id="HOST003",
        title="The host has enough memory",
        severity=Severity.ERROR,
        what=f"With `accelerator: cpu`: weights, KV cache and {size(MEMORY_PER_INSTANCE)} for each instance against "
        "the memory of host and container; and instances without a size for their KV cache, which each take 0.92 of "
        f"it. Else: {size(MEMORY_PER_RANK)} available for each worker process, a warning.",
        why="The kernel kills an instance in the middle of loading (exit by signal 9), or vLLM refuses with `Available "
        "memory on node 0 on startup is less than desired CPU memory utilization`.",
        fix="Free memory, lower VLLM_CPU_KVCACHE_SPACE, run fewer instances on the host, or raise the container's "
        "limit.",
        run=each_host("memory", _memory),
        sources=("https://docs.vllm.ai/en/latest/getting_started/installation/cpu.html",),
    ),
    Check(
        id="HOST004",
        title="Shared memory is large enough",
        severity=Severity.ERROR,
        what=f"Free space of /dev/shm on hosts whose instances have several ranks: {size(SHM_LEAST)} or less (a "
        f"container's default) is an error, below {size(SHM_WANTED)} a warning.",
        why="NCCL and vLLM's queues between ranks live there: `Error while creating shared memory segment`, or a bus "
        "error (signal 7) later.",
        fix="`--ipc=host` or `--shm-size=16g` for containers; else remount /dev/shm larger.",
        run=each_host("memory", _shared_memory),
        sources=("https://docs.vllm.ai/en/latest/deployment/docker.html",),
    ),
    Check(
        id="HOST010",
        title="Huge pages suffice for EFA",
        severity=Severity.WARNING,
        what="On EFA: huge pages that are reserved but all taken; and KV caches in host memory above 90 GiB without "
        "huge pages.",
        why="libfabric takes huge pages where there are some; once they are used up, fork() fails with ENOMEM. An EFA "
        "device registers only a limited number of pages: about 95 GB in 4 KiB pages.",
        fix="FI_EFA_USE_HUGE_PAGE=0 in `env`, or more huge pages (`vm.nr_hugepages`).",
        run=each_host("memory", _huge_pages, applies=on_fabric("efa")),
        sources=(
            "https://github.com/ofiwg/libfabric/issues/9739",
            "https://github.com/ofiwg/libfabric/blob/main/man/fi_efa.7.md",
        ),
    ),
)
