"""FAB001 to 005 and 014: EFA devices, whether they can be used, and what they can do. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pdctl.doctor.checks.efa_facts import (
    USE_INSTALLERS,
    answered,
    distribution_instead,
    efa_devices,
    get_installer,
    has_counter,
    other_devices,
    user_space,
)
from pdctl.doctor.checks.instance_facts import instance_type, instance_type_name
from pdctl.doctor.checks.per_host import RDMA_FABRICS, each_host, on_fabric
from pdctl.doctor.checks.versions import at_least
from pdctl.doctor.checks.wording import listing, plural
from pdctl.doctor.context import Context
from pdctl.doctor.facts import EfaFacts, HostFacts, RdmaDevice, RdmaFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.instance_table import TABLE_DATE, InstanceType

EFA_DIRECT_SINCE = "2.1"
"""First libfabric that tells native RDMA WRITE apart (fabric ``efa-direct``)."""
OPENED_AROUND = "an RDMA device of another kind, which this login may not open, hides EFA from libfabric"

_EFA = on_fabric("efa")
_START = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html"
_NO_DEVICE = "not checked: there is no EFA device (see FAB001)"


def _present(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    del context
    host, devices = facts.host, efa_devices(facts)
    if devices:
        yield passed(host, message="there are EFA devices", evidence=listing(device.name for device in devices))
        return
    container = facts.system.container if facts.system is not None else None
    others = listing(f"{device.name} ({device.driver or 'software'})" for device in rdma.devices)
    row = instance_type(facts)
    loaded = facts.efa.driver_loaded if facts.efa is not None else None
    if row is not None and row.efa_interfaces == 0:
        fix = f"{row.name} has no EFA at all: use another instance type, or `fabric: tcp`"
    elif container:
        fix = "pass the devices into the container (`--device=/dev/infiniband`, on Kubernetes the resource "
        fix += "`vpc.amazonaws.com/efa`), and let it see /sys; `ls /sys/class/infiniband` on the host must list them"
    elif loaded is False:
        fix = f"install EFA's software with the driver ({_START}), or load it: `sudo modprobe efa`; then see whether "
        fix += "the instance has EFA interfaces (AWS checks)"
    else:
        fix = "an ordinary launch attaches no EFA interface: stop the instance and attach interfaces of type efa or "
        fix += "efa-only, or launch it anew with one per network card"
    yield failed(
        host,
        message=f"no EFA device in this {container} container" if container else "no EFA device",
        evidence=f"/sys/class/infiniband: {others or 'empty'}; driver efa "
        f"{'loaded' if loaded else 'not loaded' if loaded is False else 'unknown'}",
        fix=fix,
    )


def _count(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    del context, rdma
    host, count = facts.host, len(efa_devices(facts))
    name, row = instance_type_name(facts), instance_type(facts)
    if count == 0:
        yield skipped(host, message=_NO_DEVICE)
    elif row is None:
        what = f"{name} is not in the table of {TABLE_DATE}" if name else "the instance type is not known"
        yield skipped(host, message=f"not checked: {what}", evidence=plural(count, "EFA device"))
    elif count < row.efa_interfaces:
        yield failed(
            host,
            message=f"{count} of {row.efa_interfaces} EFA devices that {row.name} can have",
            evidence=listing((device.name for device in efa_devices(facts)), 16),
            fix="right after boot wait half a minute and look again; else attach an EFA interface to every network "
            "card (the instance must be stopped for that, or launched anew)",
        )
    else:
        yield passed(host, message="as many EFA devices as the type can have", evidence=f"{count} on {row.name}")


def _write(context: Context, facts: HostFacts, efa: EfaFacts) -> Iterable[Result]:
    host = facts.host
    if facts.rdma is not None and not efa_devices(facts):
        yield skipped(host, message=_NO_DEVICE)
        return
    row = instance_type(facts)
    seen = _write_evidence(facts, row)
    if efa.direct_rma is not None and efa.direct_rma.domains:
        yield passed(host, message="RDMA WRITE by the device itself", evidence=seen)
    elif context.spec.transfer.mode == "pull":
        yield _read_verdict(facts, row, seen)
    elif row is not None and row.rdma_write is False:
        yield _without_write(host, row.name, row.rdma_read, seen)
    elif efa.rdm is not None and answered(efa.rdm) and not efa.rdm.domains:
        yield skipped(host, message="not checked: libfabric finds no EFA device (see FAB005)", evidence=seen)
    elif answered(efa.direct_rma) and at_least(efa.libfabric_version, EFA_DIRECT_SINCE):
        if (row is not None and row.rdma_write) or has_counter(facts, "rdma_write_bytes"):
            yield failed(
                host,
                message="the device can do RDMA WRITE, but this driver, rdma-core and libfabric do not use it",
                evidence=seen,
                fix="install one current EFA installer (it brings driver, rdma-core and libfabric that fit together) "
                "and reboot; RDMA WRITE needs the driver 2.4.0 or newer",
                commands=get_installer(facts),
            )
        else:
            read = True if has_counter(facts, "rdma_read_bytes") else None if row is None else row.rdma_read
            yield _without_write(host, instance_type_name(facts) or "this machine", read, seen)
    elif has_counter(facts, "rdma_write_bytes"):
        yield passed(host, message="RDMA WRITE by the device itself", evidence=seen)
    else:
        yield skipped(host, message="not known whether the device does RDMA WRITE", evidence=seen)


def _without_write(host: str, name: str, read: bool | None, seen: str) -> Result:
    if read:
        return failed(
            host,
            severity=Severity.WARNING,
            message=f"no RDMA WRITE on {name}: push is emulated (more CPU, less bandwidth); pull is native there",
            evidence=f"{seen}; from 64 KiB on the prefill side asks, and the decode side's device READs; smaller "
            "writes travel as messages",
            fix="take `transfer: {mode: pull}`, or a type with RDMA WRITE (p5, p5e, p5en, p6, "
            "trn1, trn2); with push keep NIXL's progress thread on the decode side (transfer.extra.pdctl."
            "progress_thread), without which nothing moves",
        )
    return failed(
        host,
        message=f"neither RDMA WRITE nor READ on {name}: KV would go through the host's memory in messages",
        evidence=seen,
        fix="use an instance type with RDMA WRITE (p5, p5e, p5en, p6, trn1, trn2), or `fabric: tcp` for trying",
    )


def _read_verdict(facts: HostFacts, row: InstanceType | None, seen: str) -> Result:
    """Pull mode READs: devices with READ alone will do."""
    if has_counter(facts, "rdma_read_bytes") or (row is not None and row.rdma_read):
        return passed(facts.host, message="RDMA READ by the device itself, which pull mode needs", evidence=seen)
    if row is not None and row.rdma_read is False:
        return _without_write(facts.host, row.name, False, seen)
    return skipped(facts.host, message="not known whether the device does RDMA READ", evidence=seen)


def _write_evidence(facts: HostFacts, row: InstanceType | None) -> str:
    efa = facts.efa
    direct = efa.direct_rma if efa is not None else None
    words = {True: "yes", False: "no", None: "unknown"}
    parts = [user_space(facts)]
    if direct is None or direct.exit_code is None:
        parts.append("fi_info for efa-direct gave no answer")
    else:
        parts.append(f"fi_info for efa-direct: {plural(len(direct.domains), 'device')}")
    name = instance_type_name(facts)
    if name:
        parts.append(
            f"{name}: RDMA READ {words[row.rdma_read]}, WRITE {words[row.rdma_write]}"
            if row is not None
            else f"{name} is not in the table of {TABLE_DATE}"
        )
    return "; ".join(parts)


def _openable(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    del rdma
    host = facts.host
    on_efa = context.spec.fabric == "efa"
    devices = efa_devices(facts) if on_efa else other_devices(facts)
    if not devices:
        yield skipped(host, message=f"not checked: there is no RDMA device (see {'FAB001' if on_efa else 'FAB020'})")
        return
    closed = [device for device in devices if device.verbs_open is False or not device.verbs_path]
    container = facts.system.container if facts.system is not None else None
    if closed:
        yield failed(
            host,
            message="RDMA devices are listed, but cannot be opened"
            + (f" in this {container} container" if container else ""),
            evidence=listing(_why_closed(device) for device in closed),
            fix="pass /dev/infiniband into the container (`--device=/dev/infiniband`)"
            if container
            else "make /dev/infiniband/uverbs* readable and writable for all (mode 0666, by a udev rule: "
            'KERNEL=="uverbs*", '
            'MODE="0666"); without any: `sudo modprobe ib_uverbs`',
        )
    elif all(device.verbs_open is None for device in devices):
        yield skipped(host, message="not checked: opening the devices was not tried")
    else:
        count = plural(len(devices), "device")
        yield passed(host, message="the RDMA devices can be opened", evidence=count)


def _why_closed(device: RdmaDevice) -> str:
    if not device.verbs_path:
        return f"{device.name}: no device node"
    return f"{device.name}: {device.verbs_error or f'{device.verbs_path} cannot be opened'}"


def _provider(context: Context, facts: HostFacts, efa: EfaFacts) -> Iterable[Result]:
    del context
    host, devices = facts.host, efa_devices(facts)
    if facts.rdma is not None and not devices:
        yield skipped(host, message=_NO_DEVICE)
        return
    if efa.fi_info_path is None or efa.rdm is None:
        yield skipped(host, message="not checked: there is no fi_info (see FAB006)")
        return
    if efa.rdm.exit_code is None:
        yield skipped(host, message="not checked: fi_info did not end in time", evidence=efa.rdm.error)
        return
    if devices and all(device.verbs_open is False for device in devices):
        yield skipped(
            host, message="not checked: the EFA devices cannot be opened (see FAB004)", evidence=efa.rdm.error
        )
        return
    found = len(efa.rdm.domains)
    seen = f"{user_space(facts)}; fi_info: {plural(found, 'device')}; /sys: {plural(len(devices), 'device')}"
    if efa.rdm.error:
        seen += f"; {efa.rdm.error.strip()}"
    hiding = [device for device in other_devices(facts) if device.verbs_open is False]
    if "couldn't load driver" in efa.rdm.error and "efa" in efa.rdm.error:
        yield failed(
            host,
            message="libibverbs does not find its EFA provider: two versions of rdma-core are mixed",
            evidence=seen,
            fix="let one installer own rdma-core: run the EFA installer again (in an image with --skip-kmod), and "
            "remove the distribution's ibverbs-providers of another version",
        )
    elif found == 0 and hiding:
        yield failed(
            host,
            message=OPENED_AROUND,
            evidence=f"{seen}; {listing(_why_closed(device) for device in hiding)}",
            fix=f"let the login open {listing(device.name for device in hiding)} too (readable and writable "
            "/dev/infiniband/uverbs*, or in a container `--device=/dev/infiniband`), or hide it from the container, or "
            "use libfabric newer than 2.4",
        )
    elif found == 0:
        yield failed(
            host,
            message="libfabric finds no EFA device, although there are some",
            evidence=seen,
            fix=USE_INSTALLERS
            if distribution_instead(efa)
            else "see `FI_LOG_LEVEL=warn fi_info -p efa -t FI_EP_RDM`; usual causes: a libfabric of the distribution "
            "(FAB006), devices that cannot be opened (FAB004), a variable such as FI_PROVIDER or FI_EFA_IFACE in the "
            "login's environment",
        )
    elif facts.rdma is not None and found < len(devices):
        # Slower, but no reason not to launch.
        names = {device.name for device in devices} - set(efa.rdm.domains)
        yield failed(
            host,
            severity=Severity.WARNING,
            message=f"libfabric uses {found} of {len(devices)} EFA devices",
            evidence=f"{seen}; not used: {listing(sorted(names))}",
            fix="see FI_EFA_IFACE (FAB011) and whether all devices can be opened (FAB004)",
        )
    else:
        yield passed(host, message="libfabric uses all EFA devices", evidence=seen)


def _registrations(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    del context, rdma
    devices = efa_devices(facts)
    if not devices:
        yield skipped(facts.host, message=_NO_DEVICE)
        return
    failures = {
        device.name: count
        for device in devices
        if (
            count := max(
                [device.counters.get("reg_mr_err", 0), *(port.counters.get("reg_mr_err", 0) for port in device.ports)]
            )
        )
    }
    if failures:
        yield failed(
            facts.host,
            message="EFA devices refused to register memory since the host was started",
            evidence=listing(f"{name}: reg_mr_err {count}" for name, count in failures.items()),
            fix="see `sudo dmesg | grep REG_MR`: -12 means too many pages or regions; use huge pages for host memory, "
            "fewer processes, or reboot if an earlier program left its regions behind",
        )
    elif not any(device.counters or any(port.counters for port in device.ports) for device in devices):
        yield skipped(facts.host, message="not checked: this driver shows no counters")
    else:
        yield passed(facts.host, message="no refused registration since the host was started")


_GUIDE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html"

CHECKS: tuple[Check, ...] = (
    Check(
        id="FAB001",
        title="There are EFA devices",
        severity=Severity.ERROR,
        what="Devices in /sys/class/infiniband whose driver is efa. Names and link layers do not tell.",
        why="Without one NIXL falls back to TCP, or fails at start: an instance launched the ordinary way has none, "
        "and a container sees none unless they are passed to it.",
        fix="Attach EFA interfaces (at launch, or with the instance stopped), install the driver, pass the devices "
        "into the container.",
        run=each_host("rdma", _present, applies=_EFA),
        sources=(
            _START,
            "https://github.com/aws-samples/aws-efa-nccl-baseami-pipeline/issues/2",
            "https://github.com/vllm-project/vllm/pull/42075",
            "https://github.com/ai-dynamo/nixl/pull/2205",
        ),
        blocking=True,
    ),
    Check(
        id="FAB002",
        title="All EFA interfaces are attached",
        severity=Severity.ERROR,
        what="The number of EFA devices against what the instance type can have, by pdctl's table.",
        why="Bandwidth grows with the number of cards: one of 16 gives a sixteenth of it. Some types bring their "
        "devices up late after boot.",
        fix="Attach one EFA interface for every network card; that takes a stopped instance, or a new one. If fewer "
        "are attached on purpose, ignore this check in the cluster file, with the reason.",
        run=each_host("rdma", _count, applies=_EFA),
        sources=(_GUIDE, "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html"),
    ),
    Check(
        id="FAB003",
        title="The EFA devices do RDMA WRITE",
        severity=Severity.ERROR,
        what="First the host itself: `fi_info -p efa -f efa-direct -t FI_EP_RDM -c FI_RMA` lists devices with both "
        "READ and WRITE (libfabric 2.1 and newer); the counter rdma_write_bytes, which is there only where device and "
        "driver can. Then pdctl's table of instance types. READ without WRITE (p4d, p4de) is a warning, neither of "
        "them an error. In pull mode READ is what is asked for.",
        why="Push mode WRITEs. Where the device cannot, libfabric emulates it: the other side READs, or KV goes "
        "through memory copies, with more CPU and less bandwidth, and without any error.",
        fix="Another instance type, or pull mode on p4d.",
        run=each_host("efa", _write, applies=_EFA),
        sources=(
            _GUIDE,
            "https://github.com/ofiwg/libfabric/blob/main/prov/efa/src/efa_prov_info.c",
            "https://github.com/ai-dynamo/nixl/pull/817",
            "https://github.com/aws/deep-learning-containers/pull/6113",
        ),
        blocking=True,
    ),
    Check(
        id="FAB004",
        title="The RDMA devices can be opened",
        severity=Severity.ERROR,
        what="Whether the login can open /dev/infiniband/uverbs* of each device that the fabric uses, for reading and "
        "writing.",
        why="A container may list devices in /sys that its device rules forbid; with mode 0600 everything works as "
        "root only. libfabric and UCX then see no device, and say nothing.",
        fix="`--device=/dev/infiniband` for containers; mode 0666 for the device nodes on a host.",
        run=each_host("rdma", _openable, applies=on_fabric(*RDMA_FABRICS)),
        sources=(
            "https://github.com/ofiwg/libfabric/issues/12708",
            "https://github.com/aws-samples/aws-efa-nccl-baseami-pipeline/issues/2",
        ),
        blocking=True,
    ),
    Check(
        id="FAB005",
        title="libfabric finds all EFA devices",
        severity=Severity.ERROR,
        what="`fi_info -p efa -t FI_EP_RDM` lists as many devices as /sys has.",
        why="NIXL's LIBFABRIC backend uses what libfabric finds. A foreign RDMA device that cannot be opened hid all "
        "EFA devices in older versions; mixed rdma-core packages keep the provider from loading.",
        fix="Read the evidence: FI_LOG_LEVEL=warn makes fi_info talk. One EFA installer for all of it is the usual "
        "cure.",
        run=each_host("efa", _provider, applies=_EFA),
        sources=(
            "https://github.com/ofiwg/libfabric/issues/12708",
            "https://github.com/ai-dynamo/modelexpress/pull/259",
        ),
        blocking=True,
    ),
    Check(
        id="FAB014",
        title="EFA registered all memory so far",
        severity=Severity.WARNING,
        what="The counter reg_mr_err of the EFA devices, since boot.",
        why="A device registers a limited number of pages and regions. It was exceeded once already, so it may be "
        "again when vLLM registers its KV cache.",
        fix="Huge pages for host memory, fewer processes; a reboot clears what a killed program left.",
        run=each_host("rdma", _registrations, applies=_EFA),
        sources=("https://github.com/NVIDIA/nccl/issues/563", "https://github.com/ofiwg/libfabric/issues/9739"),
    ),
)
