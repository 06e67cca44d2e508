"""HOST0xx: limits, memory, disks, clocks and kernel settings of the hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdctl.doctor.checks import host_clocks, host_disks, host_memory
from pdctl.doctor.checks.collected import collect
from pdctl.doctor.checks.instance_facts import ranks_of
from pdctl.doctor.checks.per_host import (
    RDMA_FABRICS,
    all_hosts,
    each_host,
    hosts_by_value,
    odd_ones_out,
    on_fabric,
    with_accelerator,
)
from pdctl.doctor.checks.versions import at_least
from pdctl.doctor.checks.wording import GIB, listing, plural, size
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, KernelSettings, LimitFacts, SystemFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped

MEMLOCK_LEAST = 8 * GIB
"""Locked memory below this is an error on RDMA fabrics: NIXL registers bounce buffers and host-side KV with the NIC."""
NOFILE_WANTED = 65535
"""What vLLM raises its soft limit to by itself (``set_ulimit``, vLLM 0.32)."""
CORES_PER_RANK = 4
"""Below this the scheduler's groups matter: they starved ranks on 2 cores (observed), not on many."""

_MEMLOCK_COMMAND = (
    "printf '* soft memlock unlimited\\n* hard memlock unlimited\\n' | sudo tee /etc/security/limits.d/99-memlock.conf"
)


def _memlock(context: Context, facts: HostFacts, limits: LimitFacts) -> Iterable[Result]:
    soft, hard = limits.memlock_soft_bytes, limits.memlock_hard_bytes
    seen = f"ulimit -l: {size(soft)}, hard limit {size(hard)}"
    if soft is None:
        yield passed(facts.host, message="locked memory is unlimited", evidence=seen)
    elif context.spec.fabric not in RDMA_FABRICS:
        yield passed(facts.host, message="locked memory is limited, which TCP does not mind", evidence=seen)
    else:
        low = soft < MEMLOCK_LEAST
        container = facts.system is not None and facts.system.container
        yield failed(
            facts.host,
            severity=Severity.ERROR if low else Severity.WARNING,
            message=f"locked memory is limited to {size(soft)}; RDMA wants unlimited"
            + (f", at least {size(MEMLOCK_LEAST)}" if low else ""),
            evidence=seen,
            fix="start the container with `--ulimit memlock=-1`"
            if container
            else "set memlock to unlimited in /etc/security/limits.d, then log in anew (a running sshd session keeps "
            "the old limit); if sshd runs under a limit of its own: `LimitMEMLOCK=infinity` in its systemd unit",
            commands=() if container else (_MEMLOCK_COMMAND,),
        )


def _open_files(context: Context, facts: HostFacts, limits: LimitFacts) -> Iterable[Result]:
    del context
    hard = limits.nofile_hard
    seen = f"soft {limits.nofile_soft if limits.nofile_soft is not None else 'unlimited'}, hard {hard or 'unlimited'}"
    if hard is None or hard >= NOFILE_WANTED:
        yield passed(facts.host, message="enough open files allowed", evidence=seen)
    else:
        yield failed(
            facts.host,
            message=f"at most {hard} open files are allowed; vLLM wants {NOFILE_WANTED}",
            evidence=seen,
            fix="raise `nofile` in /etc/security/limits.d (hard limit too) and log in anew; in a container "
            "`--ulimit nofile=1048576`",
            commands=("echo '* - nofile 1048576' | sudo tee /etc/security/limits.d/99-nofile.conf",),
        )


def _autogroup(context: Context, facts: HostFacts, kernel: KernelSettings) -> Iterable[Result]:
    enabled = kernel.sched_autogroup_enabled
    if facts.system is None:
        yield skipped(facts.host, message=f"not checked: {facts.why_missing('system')}")
        return
    ranks = sum(map(ranks_of, context.instances_on(facts.host)))
    cores = facts.system.cpus
    seen = f"kernel.sched_autogroup_enabled={enabled}, {plural(cores, 'core')}, {plural(ranks, 'rank')}"
    if enabled and enabled > 0 and cores < CORES_PER_RANK * ranks:
        yield failed(
            facts.host,
            message="with few cores, the kernel's automatic task groups can starve an instance for seconds",
            evidence=seen,
            fix="switch them off before the instances are started (they keep their group until they end)",
            commands=(
                "sudo sysctl -w kernel.sched_autogroup_enabled=0",
                "echo 'kernel.sched_autogroup_enabled = 0' | sudo tee /etc/sysctl.d/99-pdctl.conf",
            ),
        )
    else:
        yield passed(facts.host, message="task groups do no harm here", evidence=seen)


def _ptrace(context: Context, facts: HostFacts, kernel: KernelSettings) -> Iterable[Result]:
    roles = {one.role for one in context.instances_on(facts.host)}
    if not {"prefill", "decode"} <= roles:
        return
    if kernel.ptrace_scope is None:
        yield skipped(facts.host, message="not checked: the kernel has no Yama ptrace setting, or it cannot be read")
    elif kernel.ptrace_scope > 0:
        yield failed(
            facts.host,
            message="processes may not read each other's memory, so EFA's short way inside a host is off",
            evidence=f"kernel.yama.ptrace_scope={kernel.ptrace_scope}",
            fix="nothing for transfers between hosts; between instances of one host: "
            "`sudo sysctl -w kernel.yama.ptrace_scope=0`, if your rules allow it",
            commands=("sudo sysctl -w kernel.yama.ptrace_scope=0",),
        )
    else:
        yield passed(facts.host, message="the short way inside a host is open")


def _alike(context: Context) -> Iterator[Result]:
    collected = collect(context, context.vllm_hosts, "system", lambda facts: facts.system)
    yield from collected.skipped
    systems = collected.found
    machines = {host: system.machine for host, system in systems.items()}
    software = {host: (system.os, system.kernel) for host, system in systems.items()}
    odd_machines = odd_ones_out(machines)
    odd_software = odd_ones_out(software)
    if odd_machines is None or odd_software is None:
        return
    for host in systems:
        if host in odd_machines[1]:
            yield failed(
                host,
                message=f"the processor architecture is not that of the other hosts ({odd_machines[0]})",
                evidence=hosts_by_value(machines),
                fix="use one architecture for prefill and decode: builds of vLLM, NIXL and drivers differ between them",
            )
        elif host in odd_software[1]:
            yield failed(
                host,
                severity=Severity.INFO,
                message="operating system or kernel are not those of the other hosts",
                evidence=hosts_by_value({name: " with Linux ".join(value) for name, value in software.items()}),
                fix="nothing, if all else passes; start all hosts from one image when you can",
            )
        else:
            yield passed(host, message="the same machine and system as the others", evidence=" ".join(software[host]))


def _container(context: Context, facts: HostFacts, system: SystemFacts) -> Iterable[Result]:
    if not system.container:
        return
    lacks, flags = [], ["--network=host", "--ipc=host", "--ulimit memlock=-1"]
    limits, rdma, efa, modules = facts.limits, facts.rdma, facts.efa, facts.modules
    if limits is not None and limits.memlock_soft_bytes is not None:
        lacks.append("unlimited locked memory")
    if rdma is not None and not any(device.verbs_open for device in rdma.devices):
        lacks.append("an RDMA device that can be opened (/dev/infiniband/uverbs*)")
        flags.append("--device=/dev/infiniband")
    if context.spec.fabric == "efa" and efa is not None and efa.fi_info_path is None:
        lacks.append("EFA's libraries inside the image (installer with --skip-kmod)")
    if (
        context.spec.accelerator == "cuda"
        and modules is not None
        and "gdrdrv" in modules.loaded
        and not modules.gdrdrv_open
    ):
        lacks.append("/dev/gdrdrv")
        flags.append("--device=/dev/gdrdrv")
    if lacks:
        yield failed(
            facts.host,
            message=f"this {system.container} container lacks {listing(lacks)}",
            evidence=f"in {system.container}: {system.os}",
            fix=f"start it with {' '.join(flags)}; on Kubernetes request `vpc.amazonaws.com/efa` (or the RDMA device "
            "plugin's resource) and run with hostNetwork; if GPU memory still cannot be registered, try `--privileged`",
        )
    else:
        yield passed(facts.host, message="the container has what RDMA needs", evidence=system.container)


def _python(context: Context, facts: HostFacts, system: SystemFacts) -> Iterable[Result]:
    del context
    enough = at_least(system.python, "3.8")
    if enough is None:
        yield skipped(facts.host, message="not checked: the version of the host's Python was not reported")
    elif enough:
        yield passed(facts.host, message="Python is new enough for pdctl's scripts", evidence=system.python)
    else:
        yield failed(
            facts.host,
            message=f"Python {system.python} is too old for pdctl's scripts, which need 3.8",
            fix="install a newer python3, or name the one of vLLM with `python` in the cluster file",
        )


_EFA_GUIDE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html"
_EFA_CONTAINERS = "https://github.com/ai-dynamo/dynamo/blob/main/docs/kubernetes/cloud-providers/eks/efa.md"

_OWN: tuple[Check, ...] = (
    Check(
        id="HOST001",
        title="Memory may be locked",
        severity=Severity.ERROR,
        what=f"`ulimit -l` of the login that launches vLLM. On RDMA fabrics: unlimited passes, below "
        f"{size(MEMLOCK_LEAST)} is an error, a limit above that a warning. TCP locks nothing.",
        why="RDMA pins the memory it reads and writes. With 64 MiB the registration fails with `Cannot allocate "
        "memory` (-12) or EFA's error 4112, often only under load.",
        fix="`* soft memlock unlimited` and `* hard memlock unlimited` in /etc/security/limits.d, then log in anew; in "
        "Docker `--ulimit memlock=-1`; for services `LimitMEMLOCK=infinity`.",
        run=each_host("limits", _memlock),
        sources=("https://github.com/awslabs/awsome-distributed-ai/issues/647", _EFA_GUIDE),
        blocking=True,
    ),
    Check(
        id="HOST002",
        title="Enough files may be open",
        severity=Severity.WARNING,
        what=f"The hard limit of open files. vLLM raises its soft limit to {NOFILE_WANTED} by itself, if the hard "
        "limit lets it.",
        why="Every client, rank and peer holds sockets: `Too many open files` under load.",
        fix="Raise `nofile` in /etc/security/limits.d and log in anew.",
        run=each_host("limits", _open_files),
        sources=("https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/utils/system_utils.py",),
    ),
    Check(
        id="HOST009",
        title="The kernel shares few cores fairly",
        severity=Severity.WARNING,
        what=f"On CPU clusters with fewer than {CORES_PER_RANK} cores per rank: whether "
        "`kernel.sched_autogroup_enabled` is 0.",
        why="Threads that poll take whole cores, and the kernel then shares by session, not by need: on two cores a "
        "process that was ready waited up to 16 s, and requests hung for 30 s (observed with vLLM 0.32 and NIXL "
        "1.5.1).",
        fix="`sudo sysctl -w kernel.sched_autogroup_enabled=0` before the instances are started.",
        run=each_host("kernel", _autogroup, applies=with_accelerator("cpu")),
        sources=("https://man7.org/linux/man-pages/man7/sched.7.html",),
    ),
    Check(
        id="HOST011",
        title="EFA's short way inside a host is open",
        severity=Severity.INFO,
        what="On EFA hosts that run both prefill and decode: `kernel.yama.ptrace_scope` 0.",
        why="libfabric copies between processes of one host directly only if they may read each other's memory; else "
        "the bytes go through the network card. Nothing fails.",
        fix="`sudo sysctl -w kernel.yama.ptrace_scope=0`, if your security rules allow it.",
        run=each_host("kernel", _ptrace, applies=on_fabric("efa")),
        sources=("https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html",),
    ),
    Check(
        id="HOST012",
        title="Prefill and decode hosts are alike",
        severity=Severity.WARNING,
        what="Processor architecture (a warning), operating system and kernel (an information) of all prefill and "
        "decode hosts against those of most.",
        why="Different images bring different drivers and libraries, and with them failures on one pair of hosts only.",
        fix="Start all hosts from one image.",
        run=_alike,
    ),
    Check(
        id="HOST013",
        title="The container has what RDMA needs",
        severity=Severity.WARNING,
        what="In a container, on RDMA fabrics: unlimited locked memory, RDMA device nodes that can be opened, EFA's "
        "libraries in the image, /dev/gdrdrv if the host has it.",
        why="/sys shows all devices of the host even if the container may not open them: the transfer then goes over "
        "TCP or fails, while lists of devices look right.",
        fix="`docker run --network=host --ipc=host --ulimit memlock=-1 --device=/dev/infiniband ...`.",
        run=each_host("system", _container, applies=on_fabric(*RDMA_FABRICS)),
        sources=(
            "https://github.com/aws-samples/aws-efa-nccl-baseami-pipeline/issues/2",
            "https://github.com/vllm-project/vllm/pull/42075",
            _EFA_CONTAINERS,
        ),
    ),
    Check(
        id="HOST014",
        title="Python is new enough for pdctl's scripts",
        severity=Severity.ERROR,
        what="The version of the Python that ran the script of the facts: 3.8 or newer.",
        why="The node agent, which starts and stops the instances, needs it. vLLM's own Python is a matter of SW.",
        fix="Install a newer python3, or name one with `python` in the cluster file.",
        run=each_host("system", _python, hosts=all_hosts),
        blocking=True,
    ),
)

CHECKS: tuple[Check, ...] = tuple(
    sorted((*_OWN, *host_memory.CHECKS, *host_disks.CHECKS, *host_clocks.CHECKS), key=lambda check: check.id)
)
