"""FAB006 to 010: driver and libraries of EFA, their versions, and the same on every host. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from pdctl.doctor.checks.collected import collect
from pdctl.doctor.checks.efa_facts import (
    AMAZON,
    USE_INSTALLERS,
    distribution_instead,
    efa_devices,
    get_installer,
    user_space,
)
from pdctl.doctor.checks.instance_facts import instance_type
from pdctl.doctor.checks.per_host import (
    all_of,
    each_host,
    hosts_by_value,
    odd_ones_out,
    on_fabric,
    with_accelerator,
)
from pdctl.doctor.checks.versions import at_least, numbers
from pdctl.doctor.checks.wording import listing
from pdctl.doctor.context import Context
from pdctl.doctor.facts import EfaFacts, HostFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped

LIBFABRIC_LEAST = "1.21.0"
"""NIXL's LIBFABRIC plugin needs this one."""
LIBFABRIC_WANTED = "2.1"
LIBFABRIC_ARM_GPU = "2.5"
"""CUDA memory on arm64 with 64 KiB pages (GB200) cannot be registered by older ones."""
DRIVER_LEAST = "2.4.0"
"""First driver with RDMA WRITE."""

_EFA = on_fabric("efa")
_INSTALL = "install the current EFA installer (in an image with --skip-kmod), the same on all hosts"


def _installed(context: Context, facts: HostFacts, efa: EfaFacts) -> Iterable[Result]:
    del context
    host = facts.host
    if efa.fi_info_path is None:
        yield failed(
            host,
            severity=Severity.ERROR,
            message="EFA's libraries are not installed here",
            evidence="no fi_info in /opt/amazon/efa/bin or on the PATH",
            fix=f"{_INSTALL}; in a container they must be inside the image",
            commands=get_installer(facts),
        )
        return
    mixed = _packages_disagree(efa)
    seen = f"{user_space(facts)}; installer {efa.installer_version or 'not found'}"
    if not efa.fi_info_path.startswith(AMAZON):
        yield failed(
            host,
            message="the libfabric that comes first is not that of the EFA installer",
            evidence=seen,
            fix=f"put {AMAZON}lib (or lib64) first in LD_LIBRARY_PATH (`env`) and {AMAZON}bin first on the PATH, or "
            "remove the distribution's libfabric" + ("" if efa.installer_version else f"; {_INSTALL}"),
        )
    elif mixed:
        yield failed(
            host,
            message="the installed EFA packages are not those that are in use: two installations are mixed",
            evidence=f"{seen}; packages: {listing(mixed)}",
            fix="remove one of the two; run one EFA installer over the other's files",
        )
    else:
        yield passed(host, message="the EFA installer's libfabric is in use", evidence=seen)


def _packages_disagree(efa: EfaFacts) -> list[str]:
    """Packages of libfabric in the installer's list that are of another version than the ``fi_info`` that answered."""
    have = numbers(efa.libfabric_version)
    packages = [name for name in efa.installed_packages if re.match(r"libfabric[0-9a-z-]*_", name)]
    versions = [numbers(name.split("_")[1]) for name in packages]
    return packages if have and versions and all(version and version != have for version in versions) else []


def _libfabric(context: Context, facts: HostFacts, efa: EfaFacts) -> Iterable[Result]:
    host, version = facts.host, efa.libfabric_version
    if efa.fi_info_path is None:
        yield skipped(host, message="not checked: there is no fi_info (see FAB006)")
        return
    if numbers(version) is None:
        yield skipped(host, message="not checked: fi_info did not say its version", evidence=efa.fi_info_path)
        return
    arm_gpu = context.spec.accelerator == "cuda" and facts.system is not None and facts.system.machine == "aarch64"
    seen, other = user_space(facts), distribution_instead(efa)
    if not at_least(version, LIBFABRIC_LEAST):
        yield failed(
            host,
            message=f"libfabric {version} is too old: NIXL needs {LIBFABRIC_LEAST}",
            evidence=seen,
            fix=USE_INSTALLERS if other else _INSTALL,
            commands=() if other else get_installer(facts),
        )
    elif arm_gpu and not at_least(version, LIBFABRIC_ARM_GPU):
        yield failed(
            host,
            message=f"libfabric {version} cannot register GPU memory on arm64: {LIBFABRIC_ARM_GPU} is needed",
            evidence=seen,
            fix=USE_INSTALLERS if other else f"{_INSTALL}: 1.50.0 or newer brings 2.6",
            commands=() if other else get_installer(facts),
        )
    elif not at_least(version, LIBFABRIC_WANTED):
        yield failed(
            host,
            severity=Severity.WARNING,
            message=f"libfabric {version} is old: from {LIBFABRIC_WANTED} on it has efa-direct, the shortest way",
            evidence=seen,
            fix=USE_INSTALLERS if other else f"{_INSTALL} (1.41.0 or newer)",
            commands=() if other else get_installer(facts),
        )
    else:
        yield passed(host, message="libfabric is new enough", evidence=seen)


def _driver(context: Context, facts: HostFacts, efa: EfaFacts) -> Iterable[Result]:
    host, version = facts.host, efa.driver_version
    if numbers(version) is None:
        why = "the kernel's own EFA driver has no version" if efa.driver_loaded else "the driver is not loaded (FAB001)"
        yield skipped(host, message=f"not checked: {why}")
        return
    wants = [(DRIVER_LEAST, "RDMA WRITE")]
    if any(device.device == "0xefa3" for device in efa_devices(facts)):
        wants.append(("2.12.0", "this generation of the device"))
    nvidia = facts.nvidia.driver_version if facts.nvidia is not None else None
    if context.spec.accelerator == "cuda" and at_least(nvidia, "580"):
        wants.append(("2.17.3", f"GPU memory with NVIDIA's driver {nvidia}"))
    short = [(minimum, what) for minimum, what in wants if not at_least(version, minimum)]
    if short:
        row = instance_type(facts)
        only_write = short == wants[:1] and row is not None and row.rdma_write is False
        yield failed(
            host,
            # A type without RDMA WRITE loses nothing by a driver without it.
            severity=Severity.WARNING if only_write else Severity.ERROR,
            message=f"the EFA driver {version} is too old: "
            f"{'; '.join(f'{what} needs {least}' for least, what in short)}",
            evidence=f"/sys/module/efa/version: {version}",
            fix="run the current EFA installer and reboot (or, with nothing using EFA: `sudo modprobe -r efa && sudo "
            "modprobe efa`)",
            commands=get_installer(facts),
        )
    else:
        yield passed(host, message="the EFA driver is new enough", evidence=version or "")


def _same(context: Context) -> Iterator[Result]:
    if not _EFA(context):
        return
    collected = collect(context, context.vllm_hosts, "efa", lambda facts: facts.efa)
    yield from collected.skipped
    found = collected.found
    versions = {
        "driver": {host: efa.driver_version for host, efa in found.items() if efa.driver_version},
        "libfabric": {host: efa.libfabric_version for host, efa in found.items() if efa.libfabric_version},
        "rdma-core": {host: core for host, efa in found.items() if (core := _rdma_core(efa))},
        "installer": {host: efa.installer_version for host, efa in found.items() if efa.installer_version},
    }
    for host in found:
        if not any(host in values for values in versions.values()):
            yield skipped(host, message="not checked: no version of EFA's software is known here")
            continue
        wrong = []
        usual: dict[str, str] = {}
        for name, values in versions.items():
            odd = odd_ones_out(values)
            if odd is not None and host in odd[1]:
                wrong.append((name, f"{odd[1][host]} instead of {odd[0]}"))
                usual[name] = odd[0]
        only_other = [name for name, _ in wrong] == ["libfabric"] and distribution_instead(found[host])
        if wrong:
            yield failed(
                host,
                severity=Severity.WARNING if [name for name, _ in wrong] == ["installer"] else Severity.ERROR,
                message="EFA's software is not the same as on the other hosts: "
                + ", ".join(f"{name} {difference}" for name, difference in wrong),
                evidence="; ".join(f"{name}: {hosts_by_value(versions[name])}" for name, _ in wrong),
                fix=USE_INSTALLERS if only_other else _same_fix(usual),
                # The version of the other hosts, where it is known: the newest would make a third one.
                commands=() if only_other else get_installer(context.facts[host], usual.get("installer", "")),
            )
        else:
            yield passed(host, message="the same EFA software as on the other hosts")


def _same_fix(usual: Mapping[str, str]) -> str:
    version = usual.get("installer")
    what = f"install EFA installer {version} as on the other hosts, or the current one on all" if version else _INSTALL
    in_image = " (in an image with --skip-kmod)" if version else ""
    return f"{what}{in_image}; reboot when the driver changed"


def _rdma_core(efa: EfaFacts) -> str | None:
    match = next(
        (re.match(r"rdma-core[_-]([^_]+)", name) for name in efa.installed_packages if "rdma-core" in name), None
    )
    return match[1] if match else None


def _device_memory(context: Context, facts: HostFacts, efa: EfaFacts) -> Iterable[Result]:
    del context
    host, answer = facts.host, efa.device_memory
    if facts.rdma is not None and not efa_devices(facts):
        yield skipped(host, message="not checked: there is no EFA device (see FAB001)")
    elif efa.rdm is not None and efa.rdm.exit_code is not None and not efa.rdm.domains:
        yield skipped(host, message="not checked: libfabric finds no EFA device (see FAB005)")
    elif answer is None or answer.exit_code is None:
        yield skipped(host, message="not checked: fi_info was not asked for device memory, or did not end in time")
    elif not answer.domains:
        yield failed(
            host,
            message="libfabric cannot register accelerator memory with EFA",
            evidence=f"fi_info -p efa -t FI_EP_RDM -c FI_HMEM: {answer.error.strip() or 'nothing'}; "
            f"{user_space(facts)}",
            fix=_device_memory_fix(facts, efa),
        )
    else:
        yield passed(host, message="libfabric registers accelerator memory with EFA", evidence=user_space(facts))


def _device_memory_fix(facts: HostFacts, efa: EfaFacts) -> str:
    row = instance_type(facts)
    if row is not None and row.gpu_direct is False:
        return (
            f"nothing in the software: EFA of {row.name} has no way into accelerator memory; use another instance type"
        )
    if distribution_instead(efa):
        return USE_INSTALLERS
    look = "`FI_LOG_LEVEL=warn fi_info -p efa -t FI_EP_RDM -c FI_HMEM` says why: a library of the accelerator's driver "
    look += (
        "that is not found (libcuda.so.1, libnrt.so.1), or FI_HMEM or FI_HMEM_DISABLE_P2P in the login's environment"
    )
    if efa.fi_info_path is not None and efa.fi_info_path.startswith(AMAZON):
        return f"{look}; if it says nothing, run the current EFA installer again (in an image with --skip-kmod)"
    return f"{_INSTALL}: a libfabric built without CUDA or Neuron support cannot; else {look}"


_CHANGELOG = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-changelog.html"
_NIXL_GUIDE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nixl.html"
_DRIVER_NOTES = "https://github.com/amzn/amzn-drivers/blob/master/kernel/linux/efa/RELEASENOTES.md"

CHECKS: tuple[Check, ...] = (
    Check(
        id="FAB006",
        title="The EFA installer's libfabric is in use",
        severity=Severity.WARNING,
        what=f"Where fi_info comes from: {AMAZON} is wanted, no fi_info at all is an error. The installer's package "
        "list must agree with the version that answers. (What NIXL's plugin loads is a matter of SW.)",
        why="NIXL's wheel does not contain libfabric. A distribution's one (1.11 on Ubuntu 22.04) is too old or lacks "
        "GPU support; a plugin that was built against another version fails without a word. Images with two EFA "
        "package sets ended in deadlocks.",
        fix=f"{AMAZON}lib first in LD_LIBRARY_PATH, or no other libfabric installed.",
        run=each_host("efa", _installed, applies=_EFA),
        sources=(
            _NIXL_GUIDE,
            "https://github.com/vllm-project/vllm/issues/55635",
            "https://github.com/ai-dynamo/dynamo/issues/12105",
        ),
    ),
    Check(
        id="FAB007",
        title="libfabric is new enough",
        severity=Severity.ERROR,
        what=f"Below {LIBFABRIC_LEAST} is an error (NIXL's minimum), below {LIBFABRIC_WANTED} a warning (no "
        f"efa-direct); with GPUs on arm64 {LIBFABRIC_ARM_GPU} is needed.",
        why="An old libfabric lacks the calls that NIXL makes, or cannot register GPU memory (`Bad address` on GB200).",
        fix="EFA installer 1.41.0 or newer; 1.50.0 or newer on GB200.",
        run=each_host("efa", _libfabric, applies=_EFA),
        sources=(
            _CHANGELOG,
            "https://github.com/ofiwg/libfabric/issues/12019",
            "https://github.com/ai-dynamo/nixl/issues/1609",
        ),
        blocking=True,
    ),
    Check(
        id="FAB008",
        title="The EFA driver is new enough",
        severity=Severity.ERROR,
        what=f"/sys/module/efa/version: {DRIVER_LEAST} for RDMA WRITE, 2.12.0 for devices 0xefa3, 2.17.3 for GPU "
        "memory with NVIDIA's driver 580 and newer. The driver inside the kernel has no version: skipped.",
        why="An old driver hides RDMA WRITE, and writes are emulated; or GPU memory cannot be registered.",
        fix="Run the current EFA installer, reboot.",
        run=each_host("efa", _driver, applies=_EFA),
        sources=(_DRIVER_NOTES,),
    ),
    Check(
        id="FAB009",
        title="The same EFA software on every host",
        severity=Severity.ERROR,
        what="Versions of driver, libfabric and rdma-core on all prefill and decode hosts against those of most. The "
        "installer's version alone is a warning.",
        why="The two ends tell each other what they can. With different versions native writes turned into emulated "
        "ones, and a peer crashed.",
        fix="The same EFA installer on all hosts and in all images.",
        run=_same,
        sources=("https://github.com/ofiwg/libfabric/pull/10657", "https://github.com/ofiwg/libfabric/pull/11626"),
    ),
    Check(
        id="FAB010",
        title="libfabric registers accelerator memory",
        severity=Severity.ERROR,
        what="With accelerators: `fi_info -p efa -t FI_EP_RDM -c FI_HMEM` lists devices.",
        why="NIXL goes on without device memory at first (a line at level INFO), and fails when vLLM registers its KV "
        "cache.",
        fix="The EFA installer's libfabric; no FI_HMEM settings in the environment.",
        run=each_host("efa", _device_memory, applies=all_of(_EFA, with_accelerator("cuda", "neuron"))),
        sources=("https://github.com/aws/aws-ofi-nccl/issues/889",),
        blocking=True,
    ),
)
