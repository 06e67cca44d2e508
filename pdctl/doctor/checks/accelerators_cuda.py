"""ACC001 to 009: NVIDIA GPUs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pdctl.doctor.checks.collected import collect
from pdctl.doctor.checks.instance_facts import (
    argument_of,
    environment_of,
    instance_type,
    instance_type_name,
    is_running,
)
from pdctl.doctor.checks.per_host import (
    RDMA_FABRICS,
    all_of,
    each_host,
    hosts_by_value,
    odd_ones_out,
    on_fabric,
    with_accelerator,
)
from pdctl.doctor.checks.versions import at_least
from pdctl.doctor.checks.wording import GIB, listing, plural, size
from pdctl.doctor.context import Context
from pdctl.doctor.facts import CloudFacts, GpuFacts, HostFacts, ModuleFacts, NvidiaFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.plan import InstancePlan

USED_LEAST = 1 * GIB
"""Less is what drivers and idle contexts hold."""
MEMORY_SHARE = 0.92
"""``gpu_memory_utilization`` unless set (vLLM 0.32)."""
NVSWITCH_GPUS = 8
"""Boards with this many fully connected GPUs have NVSwitches; four A100 are wired directly."""

_CUDA = with_accelerator("cuda")
_CUDA_RDMA = all_of(_CUDA, on_fabric(*RDMA_FABRICS))
_CUDA_EFA = all_of(_CUDA, on_fabric("efa"))
_SWITCHED = ("A100-SXM", "A800-SXM", "H100 80GB HBM3", "H200", "H800", "H20", "B200", "B300")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def _driver(context: Context, facts: HostFacts, nvidia: NvidiaFacts) -> Iterable[Result]:
    del context
    host = facts.host
    if not nvidia.present:
        yield failed(
            host,
            message="there is no NVIDIA driver",
            evidence="neither a loaded driver nor nvidia-smi was found",
            fix="install NVIDIA's driver (on EC2 start from a Deep Learning AMI); in a container use `--gpus all` with "
            "the NVIDIA container toolkit; or is this the wrong host?",
        )
    elif nvidia.error and "version mismatch" in nvidia.error.lower():
        yield failed(
            host,
            message="the NVIDIA driver was updated, and the old kernel module is still loaded",
            evidence=nvidia.error,
            fix="reboot the host (or stop all GPU processes and load the modules anew: `sudo rmmod nvidia_uvm "
            "nvidia_drm nvidia_modeset nvidia && sudo nvidia-smi`); hold the driver's packages back from automatic "
            "updates",
            commands=("sudo reboot",),
        )
    elif nvidia.error:
        yield failed(
            host,
            message="nvidia-smi does not work",
            evidence=nvidia.error,
            fix="see `sudo dmesg | grep -i nvrm`: after a kernel update the module must be built again (`dkms "
            "status`); a GPU that fell off the bus needs a reboot, or another instance",
        )
    else:
        yield passed(host, message="the NVIDIA driver works", evidence=f"driver {nvidia.driver_version or 'unknown'}")


def _count(context: Context, facts: HostFacts, nvidia: NvidiaFacts) -> Iterable[Result]:
    host = facts.host
    if not nvidia.present or nvidia.error:
        yield skipped(host, message="not checked: nvidia-smi gave no list of GPUs (see ACC001)")
        return
    there = {gpu.index for gpu in nvidia.gpus}
    missing: list[str] = []
    for instance in _instances(context, host):
        absent = [device for device in instance.devices if device not in there]
        if absent:
            missing.append(f"{instance.name} is to use what is not there: GPU {listing(absent)}")
    seen = f"GPUs on the host: {listing(sorted(there), 16) or 'none'}"
    if missing:
        yield failed(
            host,
            message=f"the plan uses GPUs that are not there ({plural(len(there), 'GPU')} found)",
            evidence=f"{'; '.join(missing)}; {seen}",
            fix="lower tensor_parallel, data_parallel or instances_per_host, set `devices`, or use a host with more "
            "GPUs; if the host should have more GPUs: `sudo dmesg | grep -i -e nvrm -e xid` says why, and a reboot may "
            "bring them back",
        )
    else:
        yield passed(host, message="all planned GPUs are there", evidence=seen)


def _free(context: Context, facts: HostFacts, nvidia: NvidiaFacts) -> Iterable[Result]:
    host = facts.host
    if not nvidia.present or nvidia.error:
        yield skipped(host, message="not checked: nvidia-smi gave no list of GPUs (see ACC001)")
        return
    gpus = {gpu.index: gpu for gpu in nvidia.gpus}
    unknown, full, used = [], [], []
    for instance in _instances(context, host):
        if is_running(facts, instance):
            continue
        for gpu in (gpus[device] for device in instance.devices if device in gpus):
            if gpu.memory_bytes is None or gpu.memory_used_bytes is None:
                unknown.append(gpu)
            elif gpu.memory_bytes - gpu.memory_used_bytes < _share(instance) * gpu.memory_bytes:
                full.append(gpu)
            elif gpu.memory_used_bytes > USED_LEAST:
                used.append(gpu)
    fix = "see who uses them (`nvidia-smi`) and end what is left over, or give the instance other `devices`"
    if full:
        yield failed(
            host,
            message="GPU memory that the plan counts on is taken; vLLM refuses to start with that little free",
            evidence=_usage(full),
            fix=f"{fix}; gpu-memory-utilization in `vllm_args` says how much vLLM takes ({MEMORY_SHARE} unless set)",
        )
    elif used:
        yield failed(
            host,
            severity=Severity.WARNING,
            message="another process uses GPUs of the plan",
            evidence=_usage(used),
            fix=fix,
        )
    elif unknown:
        yield skipped(host, message="not checked: nvidia-smi did not say how much memory is used")
    else:
        yield passed(host, message="the planned GPUs are free, or used by this cluster itself")


def _usage(gpus: list[GpuFacts]) -> str:
    return listing(
        f"GPU {gpu.index}: {size(gpu.memory_used_bytes or 0)} of {size(gpu.memory_bytes or 0)} used" for gpu in gpus
    )


def _share(instance: InstancePlan) -> float:
    try:
        share = float(argument_of(instance, "gpu-memory-utilization") or "")
    except ValueError:
        return MEMORY_SHARE
    return share if 0 < share <= 1 else MEMORY_SHARE


def _models(context: Context) -> Iterator[Result]:
    if not _CUDA(context):
        return
    collected = collect(context, context.vllm_hosts, "nvidia", lambda facts: facts.nvidia)
    yield from collected.skipped
    models: dict[str, str] = {}
    for host, nvidia in collected.found.items():
        if not nvidia.gpus:
            yield skipped(host, message="not checked: no GPU was listed")
            continue
        kinds = {(gpu.name, size(gpu.memory_bytes) if gpu.memory_bytes else "?") for gpu in nvidia.gpus}
        models[host] = listing(f"{name} {memory}" for name, memory in sorted(kinds))
    odd = odd_ones_out(models)
    for host in models:
        if odd is not None and host in odd[1]:
            yield failed(
                host,
                message=f"its GPUs are not those of the other hosts ({odd[0]})",
                evidence=hosts_by_value(models),
                fix="nothing, if it is on purpose: prefill and decode may differ, but the slower side sets the pace, "
                "and the attention backend that vLLM chooses may differ with the GPU (MOD009 compares what must be the "
                "same)",
            )
        else:
            yield passed(host, message="the same GPUs as the other hosts", evidence=models[host])


def _peer_memory(context: Context, facts: HostFacts, nvidia: NvidiaFacts) -> Iterable[Result]:
    host = facts.host
    if not nvidia.present:
        yield skipped(host, message="not checked: there is no NVIDIA driver (see ACC001)")
        return
    loaded = facts.modules.loaded if facts.modules is not None else ()
    modules = [name for name in loaded if name in ("nvidia_peermem", "efa_nv_peermem", "nv_peer_mem")]
    devices = facts.rdma.devices if facts.rdma is not None else ()
    peers = sorted({device.peer_memory for device in devices if device.peer_memory})
    kernel = facts.system.kernel if facts.system is not None else ""
    modern = at_least(kernel, "5.12")
    is_open = nvidia.kernel_module == "open"
    seen = (
        f"kernel module: {nvidia.kernel_module or 'unknown'}; Linux {kernel or 'unknown'}; peer memory modules: "
        f"{listing(modules) or 'none'}; the card's driver offers: {listing(peers) or 'nothing'}"
    )
    if modules or peers:
        yield passed(host, message="the network cards reach GPU memory (peer memory)", evidence=seen)
    elif is_open and modern:
        yield passed(host, message="the network cards reach GPU memory (dmabuf)", evidence=seen)
    elif nvidia.kernel_module is None or modern is None or facts.modules is None:
        yield skipped(host, message="not checked: the kind of NVIDIA's kernel module is not known", evidence=seen)
    else:
        why = "NVIDIA's kernel module is the proprietary one" if not is_open else "Linux is older than 5.12"
        # nvidia_peermem serves Mellanox cards; EFA's driver has a way of its own.
        efa = context.spec.fabric == "efa"
        also = " and reboot" if efa else " and reboot; or load the module: `sudo modprobe nvidia_peermem`"
        also += ", with EFA's software of installer 1.29 or newer" if efa else ""
        yield failed(
            host,
            message=f"the network cards have no way into GPU memory: no peer memory, and no dmabuf, because {why}",
            evidence=seen,
            fix=f"install NVIDIA's open kernel modules (the `-open` packages) on Linux 5.12 or newer{also}",
            commands=() if efa else ("sudo modprobe nvidia_peermem",),
        )


def _gpu_direct(context: Context, facts: HostFacts, cloud: CloudFacts) -> Iterable[Result]:
    del context
    name = instance_type_name(facts)
    row = instance_type(facts)
    if name is None:
        yield skipped(facts.host, message="not checked: this is no EC2 instance, or its type is not known")
    elif row is None or row.gpu_direct is None:
        yield skipped(facts.host, message=f"no source says whether EFA reaches GPU memory directly on {name}")
    elif row.gpu_direct:
        yield passed(facts.host, message="EFA and GPU memory are connected on this instance type", evidence=name)
    else:
        yield failed(
            facts.host,
            message=f"on {name} EFA has no direct path to GPU memory: transfers from GPU memory hang or fail",
            evidence=cloud.product or name,
            fix="use a type with GPUDirect RDMA (p5, p5e, p5en, p6, g7e.12xlarge and up), or `fabric: tcp` for trying",
        )


def _gdrcopy(context: Context, facts: HostFacts, modules: ModuleFacts) -> Iterable[Result]:
    del context
    seen = f"gdrdrv {'loaded' if 'gdrdrv' in modules.loaded else 'not loaded'}"
    if modules.gdrdrv_open:
        yield passed(facts.host, message="GDRCopy can be used", evidence=seen)
        return
    exists = modules.gdrdrv_exists
    yield failed(
        facts.host,
        message="GDRCopy's device cannot be opened by this login" if exists else "GDRCopy is not there",
        evidence=f"{seen}; /dev/gdrdrv {'exists' if exists else 'does not exist'}",
        fix="make /dev/gdrdrv readable and writable for the login (in a container `--device=/dev/gdrdrv`)"
        if exists
        else "install gdrcopy with its kernel module (https://github.com/NVIDIA/gdrcopy; release 2.5.1 does not build "
        "on Linux 6.15 and newer), then load it: `sudo modprobe gdrdrv`",
    )


def _fabric_manager(context: Context, facts: HostFacts, nvidia: NvidiaFacts) -> Iterable[Result]:
    del context
    if not _has_switches(nvidia):
        return
    host, state = facts.host, nvidia.fabric_manager
    if state == "active":
        yield passed(host, message="NVIDIA's fabric manager runs")
    elif state is None and facts.system is not None and facts.system.container:
        yield skipped(host, message="not checked: services of the host cannot be seen from a container")
    else:
        yield failed(
            host,
            message="NVIDIA's fabric manager does not run, and these GPUs are connected by NVSwitches",
            evidence=f"nvidia-fabricmanager: {state or 'no such service'}; {nvidia.gpus[0].name} x {len(nvidia.gpus)}",
            fix=f"install the fabric manager of exactly the driver's version ({nvidia.driver_version or 'nvidia-smi'}) "
            "and start it; if it does not stay up, `journalctl -u nvidia-fabricmanager` says why. When all is well, "
            "`nvidia-smi -q -i 0 | grep -A2 Fabric` says Completed",
            commands=("sudo systemctl enable --now nvidia-fabricmanager",),
        )


def _has_switches(nvidia: NvidiaFacts) -> bool:
    if len(nvidia.gpus) < NVSWITCH_GPUS:
        return False
    rows = [line.split() for line in nvidia.topology.splitlines() if re.match(r"\s*GPU[0-9]+\s", line)]
    rows = [row[1 : 1 + len(nvidia.gpus)] for row in rows if any(cell == "X" for cell in row)]
    if rows:
        return all(cell == "X" or re.fullmatch(r"NV[0-9]+", cell) for row in rows for cell in row)
    return all(any(name in gpu.name for name in _SWITCHED) for gpu in nvidia.gpus)


def _allocator(context: Context, facts: HostFacts, environment: object) -> Iterable[Result]:
    del environment
    wrong: dict[str, list[str]] = {}
    for instance in _instances(context, facts.host):
        flags = {"--enable-sleep-mode", "--enable-cumem-allocator"}
        if flags & set(instance.argv):
            continue
        variables = environment_of(facts, instance)
        for name in _ALLOCATOR:
            value, origin = variables.get(name, ("", ""))
            if "expandable_segments:true" in value.replace(" ", "").lower():
                wrong.setdefault(f"{name}={value} from {origin}", []).append(instance.name)
    if wrong:
        yield failed(
            facts.host,
            message="PyTorch is told to use expandable segments: KV blocks would leave the memory that is registered",
            evidence="; ".join(f"{text} ({listing(names)})" for text, names in wrong.items()),
            fix="remove expandable_segments:True where it comes from, or override it: `env: {PYTORCH_CUDA_ALLOC_CONF: "
            "'expandable_segments:False'}`",
        )
    else:
        yield passed(facts.host, message="PyTorch's allocator keeps memory where it is")


def _instances(context: Context, host: str) -> list[InstancePlan]:
    return [instance for instance in context.instances_on(host) if instance.role != "router"]


_EFA_TYPES = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html"

CHECKS: tuple[Check, ...] = (
    Check(
        id="ACC001",
        title="The NVIDIA driver works",
        severity=Severity.ERROR,
        what="Whether a driver is loaded and nvidia-smi answers.",
        why="No CUDA program starts without it. After an automatic update of the driver's packages the loaded module "
        "is the old one (`Driver/library version mismatch`): running processes go on, new ones fail.",
        fix="Install the driver; after an update reboot.",
        run=each_host("nvidia", _driver, applies=_CUDA),
        sources=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
        blocking=True,
    ),
    Check(
        id="ACC002",
        title="The planned GPUs are there",
        severity=Severity.ERROR,
        what="Every device number that the plan gives an instance against the GPUs that nvidia-smi lists.",
        why="vLLM ends with `invalid device ordinal`, or a rank waits for one that never comes.",
        fix="Match tensor_parallel x data_parallel x instances_per_host with the GPUs of the host, or set `devices`.",
        run=each_host("nvidia", _count, applies=_CUDA),
        blocking=True,
    ),
    Check(
        id="ACC003",
        title="The planned GPUs are free",
        severity=Severity.ERROR,
        what=f"Used memory of each planned GPU, unless this cluster's own instance runs there. An error if vLLM's "
        f"share (gpu-memory-utilization, {MEMORY_SHARE} unless set) is not free, a warning above {size(USED_LEAST)}.",
        why="vLLM refuses to start: `Free memory on device ... is less than desired GPU memory utilization`; or both "
        "processes are slow.",
        fix="`nvidia-smi` shows the processes: end what is left over of an earlier run, or choose other `devices`.",
        run=each_host("nvidia", _free, applies=_CUDA),
        blocking=True,
    ),
    Check(
        id="ACC004",
        title="Prefill and decode have the same GPUs",
        severity=Severity.INFO,
        what="Model and memory size of the GPUs of all prefill and decode hosts.",
        why="Different GPUs work together, but the slower side sets the pace, and the attention backend (so the KV "
        "layout) may differ.",
        fix="Nothing, if it is on purpose.",
        run=_models,
    ),
    Check(
        id="ACC005",
        title="The network cards reach GPU memory",
        severity=Severity.ERROR,
        what="On RDMA fabrics, one of: a peer memory module (nvidia_peermem, efa_nv_peermem); EFA's driver with peer "
        "memory (`device/p2p` in /sys); NVIDIA's open kernel modules on Linux 5.12 or newer, for dmabuf. A peer memory "
        "module that is not loaded is normal on new images, which use dmabuf.",
        why="Registering GPU memory fails (`Invalid argument`), or all data is copied through the host's memory. "
        "Kernel updates broke it for the proprietary module, whose symbols became GPL-only.",
        fix="NVIDIA's open kernel modules; on EFA with EFA installer 1.29 or newer; on InfiniBand and RoCE instead of "
        "them `sudo modprobe nvidia_peermem`.",
        run=each_host("nvidia", _peer_memory, applies=_CUDA_RDMA),
        sources=(
            "https://github.com/aws/aws-ofi-nccl/issues/803",
            "https://github.com/aws/aws-parallelcluster/issues/6015",
            "https://github.com/uccl-project/uccl/issues/937",
            "https://github.com/openucx/ucx/issues/10966",
        ),
    ),
    Check(
        id="ACC006",
        title="EFA and GPU memory are connected on this instance type",
        severity=Severity.ERROR,
        what="A table of instance types: whether EFA does GPUDirect RDMA there. Types without a source are skipped.",
        why="On types such as g6 and g6e, GPU memory is offered for RDMA, and transfers then hang.",
        fix="Another instance type; `fabric: tcp` for trying.",
        run=each_host("cloud", _gpu_direct, applies=_CUDA_EFA),
        sources=(
            "https://github.com/ofiwg/libfabric/pull/12409",
            "https://github.com/ofiwg/libfabric/pull/8452",
            _EFA_TYPES,
        ),
    ),
    Check(
        id="ACC007",
        title="GDRCopy can be used",
        severity=Severity.WARNING,
        what="On RDMA fabrics: /dev/gdrdrv exists and the login can open it.",
        why="libfabric and UCX copy small pieces of GPU memory with it; without, small messages are slow. Nothing "
        "fails.",
        fix="Install gdrcopy, `sudo modprobe gdrdrv`; in a container `--device=/dev/gdrdrv`.",
        run=each_host("modules", _gdrcopy, applies=_CUDA_RDMA),
        sources=("https://github.com/NVIDIA/gdrcopy",),
    ),
    Check(
        id="ACC008",
        title="NVIDIA's fabric manager runs",
        severity=Severity.ERROR,
        what=f"On hosts with {NVSWITCH_GPUS} or more GPUs that NVSwitches connect (by `nvidia-smi topo -m`, else by "
        "the GPU's name): the service nvidia-fabricmanager is active.",
        why="CUDA does not start without it: error 802, `system not yet initialized`.",
        fix="Install the package of exactly the driver's version; `sudo systemctl enable --now nvidia-fabricmanager`.",
        run=each_host("nvidia", _fabric_manager, applies=_CUDA),
        sources=("https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",),
        blocking=True,
    ),
    Check(
        id="ACC009",
        title="GPU memory stays where it is registered",
        severity=Severity.ERROR,
        what="`expandable_segments:True` in PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF, in the cluster file or the "
        "login environment of the host, without vLLM's sleep mode.",
        why="PyTorch then maps other memory to the same addresses: registrations point at the old pages. vLLM refuses "
        "to start with a KV connector; libfabric answers EINVAL.",
        fix="Remove it from the host's environment, or override it in `env`.",
        run=each_host("environment", _allocator, applies=_CUDA),
        sources=("https://github.com/ofiwg/libfabric/issues/12853",),
        blocking=True,
    ),
)
