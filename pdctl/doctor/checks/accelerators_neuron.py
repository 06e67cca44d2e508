"""ACC020 to 025: AWS Neuron devices (Trainium, Inferentia). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pdctl.doctor.checks.efa_facts import efa_devices
from pdctl.doctor.checks.instance_facts import instance_type, is_running
from pdctl.doctor.checks.per_host import all_of, each_host, on_fabric, with_accelerator
from pdctl.doctor.checks.wording import listing, plural
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, NeuronFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped

_NEURON = with_accelerator("neuron")
_NEURON_EFA = all_of(_NEURON, on_fabric("efa"))


def _driver(context: Context, facts: HostFacts, neuron: NeuronFacts) -> Iterable[Result]:
    del context
    if neuron.present and not neuron.error and neuron.devices:
        seen = f"driver {neuron.driver_version or 'unknown'}, {plural(len(neuron.devices), 'device')}"
        yield passed(facts.host, message="the Neuron driver works", evidence=seen)
    elif not neuron.present:
        yield failed(
            facts.host,
            message="there is no Neuron driver",
            evidence="neither /dev/neuron* nor neuron-ls was found",
            fix="install aws-neuronx-dkms and aws-neuronx-tools (or start from a Neuron AMI); in a container pass "
            "/dev/neuron* (`--device=/dev/neuron0` ...); or is this the wrong host?",
        )
    else:
        yield failed(
            facts.host,
            message="neuron-ls finds no Neuron device",
            evidence=neuron.error or "an empty list",
            fix="see `lsmod | grep neuron` and `sudo dmesg | grep -i neuron`: after a kernel update the driver must be "
            "built again (`sudo apt-get install --reinstall aws-neuronx-dkms`)",
        )


def _runtime(context: Context, facts: HostFacts, neuron: NeuronFacts) -> Iterable[Result]:
    del context
    if neuron.runtime_library is None:
        yield skipped(facts.host, message="not checked: whether libnrt.so.1 can be loaded was not reported")
    elif neuron.runtime_library:
        yield passed(facts.host, message="the Neuron runtime library can be loaded")
    else:
        yield failed(
            facts.host,
            message="libnrt.so.1, the Neuron runtime, cannot be loaded",
            fix="install aws-neuronx-runtime-lib, and add /opt/aws/neuron/lib to the loader's path (LD_LIBRARY_PATH in "
            "`env`, or /etc/ld.so.conf.d)",
        )


def _cores(context: Context, facts: HostFacts, neuron: NeuronFacts) -> Iterable[Result]:
    host = facts.host
    if not neuron.devices:
        yield skipped(host, message="not checked: neuron-ls listed no device (see ACC020)")
        return
    cores = sum(max(0, device.cores) for device in neuron.devices)
    numbers = f" (0 to {cores - 1})" if cores > 1 else ""
    seen = f"{plural(len(neuron.devices), 'device')} with {plural(cores, 'core')}{numbers}"
    beyond: list[str] = []
    for instance in context.instances_on(host):
        absent = [core for core in instance.devices if core >= cores]
        if absent:
            beyond.append(f"{instance.name} is to use what is not there: cores {listing(absent)}")
    if beyond:
        yield failed(
            host,
            message=f"the plan uses NeuronCores that are not there ({plural(cores, 'core')} found)",
            evidence=f"{'; '.join(beyond)}; {seen}",
            fix="lower tensor_parallel, data_parallel or instances_per_host, set `devices`, or check "
            "NEURON_LOGICAL_NC_CONFIG, which joins cores",
        )
    else:
        yield passed(host, message="all planned NeuronCores are there", evidence=seen)


def _free(context: Context, facts: HostFacts, neuron: NeuronFacts) -> Iterable[Result]:
    host = facts.host
    if not neuron.devices:
        yield skipped(host, message="not checked: neuron-ls listed no device (see ACC020)")
        return
    planned = {
        core for instance in context.instances_on(host) if not is_running(facts, instance) for core in instance.devices
    }
    busy, first = [], 0
    # Cores are numbered through the devices, in the order of their indexes.
    for device in sorted(neuron.devices, key=lambda one: one.index):
        cores = max(0, device.cores)
        if device.processes > 0 and any(first <= core < first + cores for core in planned):
            busy.append(f"device {device.index}: {plural(device.processes, 'process', 'processes')}")
        first += cores
    if busy:
        yield failed(
            host,
            message="other processes hold Neuron devices of the plan; a NeuronCore belongs to one process",
            evidence=listing(busy),
            fix="see `neuron-ls` for their pids and end what is left over, or set other `devices`",
        )
    else:
        yield passed(host, message="the planned Neuron devices are free, or used by this cluster itself")


def _cards(context: Context, facts: HostFacts, neuron: NeuronFacts) -> Iterable[Result]:
    del context
    host = facts.host
    if facts.rdma is None:
        yield skipped(host, message=f"not checked: {facts.why_missing('rdma')}")
        return
    if not neuron.devices:
        yield skipped(host, message="not checked: neuron-ls listed no device (see ACC020)")
        return
    cards, devices = len(efa_devices(facts)), len(neuron.devices)
    seen = f"{plural(cards, 'EFA device')}, {plural(devices, 'Neuron device')}"
    row = instance_type(facts)
    if cards >= devices and (row is None or row.gpu_direct is not False):
        yield passed(host, message="an EFA device for each Neuron device", evidence=seen)
    elif row is not None and row.gpu_direct is False:
        yield failed(
            host,
            message=f"on {row.name} NIXL cannot register Neuron device memory",
            evidence=f"{seen}; {row.note}",
            fix="use trn2.48xlarge, or transfer through host memory",
        )
    elif row is not None and 0 < row.efa_interfaces <= cards:
        # trn1.32xlarge has 16 devices and 8 cards: nobody has said whether NIXL takes that.
        yield skipped(
            host, message=f"{row.name} has fewer EFA interfaces than Neuron devices: unknown to NIXL", evidence=seen
        )
    else:
        yield failed(
            host,
            message=f"NIXL wants one EFA device for each Neuron device: there are {cards} for {devices}",
            evidence=seen,
            fix="mend FAB001 or FAB002 first if it failed too: that is the same trouble; else attach an EFA interface "
            "on every network card (while the instance is stopped, or by launching it anew)",
        )


def _peer_memory(context: Context, facts: HostFacts, neuron: NeuronFacts) -> Iterable[Result]:
    del context, neuron
    host = facts.host
    if facts.rdma is None:
        yield skipped(host, message=f"not checked: {facts.why_missing('rdma')}")
        return
    kinds = {device.name: device.peer_memory for device in efa_devices(facts)}
    without = [name for name, kind in kinds.items() if kind is not None and "NEURON" not in kind.upper()]
    if not kinds:
        yield skipped(host, message="not checked: there is no EFA device (see FAB001)")
    elif without:
        yield failed(
            host,
            message="EFA's driver offers no peer memory of Neuron devices",
            evidence=f"device/p2p is not NEURON on {listing(without)}",
            fix="install the EFA installer's driver 2.6.0 or newer and load the Neuron driver before transfers start; "
            "without it KV goes through host memory",
        )
    elif all(kind is None for kind in kinds.values()):
        yield skipped(host, message="not checked: this EFA driver does not say whether it reaches Neuron memory")
    else:
        yield passed(host, message="EFA's driver reaches Neuron memory")


_NEURON_DOCS = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/"

CHECKS: tuple[Check, ...] = (
    Check(
        id="ACC020",
        title="The Neuron driver works",
        severity=Severity.ERROR,
        what="Whether neuron-ls lists devices.",
        why="Nothing runs on Trainium or Inferentia without the driver; a kernel update leaves it behind.",
        fix="Install aws-neuronx-dkms again for the running kernel; in a container pass /dev/neuron*.",
        run=each_host("neuron", _driver, applies=_NEURON),
        sources=(_NEURON_DOCS,),
        blocking=True,
    ),
    Check(
        id="ACC021",
        title="The Neuron runtime can be loaded",
        severity=Severity.ERROR,
        what="Whether the loader finds libnrt.so.1.",
        why="NIXL and libfabric load it to register device memory; without it that fails with `Function not "
        "implemented` (ENOSYS).",
        fix="Install aws-neuronx-runtime-lib; put /opt/aws/neuron/lib on the loader's path.",
        run=each_host("neuron", _runtime, applies=_NEURON),
        sources=(_NEURON_DOCS,),
        blocking=True,
    ),
    Check(
        id="ACC022",
        title="The planned NeuronCores are there",
        severity=Severity.ERROR,
        what="The core numbers of the plan (NEURON_RT_VISIBLE_CORES) against the cores that neuron-ls lists.",
        why="The runtime refuses cores that do not exist, after the model was compiled.",
        fix="Match tensor_parallel x data_parallel x instances_per_host with the cores of the host.",
        run=each_host("neuron", _cores, applies=_NEURON),
        sources=(_NEURON_DOCS,),
        blocking=True,
    ),
    Check(
        id="ACC023",
        title="The planned Neuron devices are free",
        severity=Severity.ERROR,
        what="Processes that neuron-ls shows on devices of the plan, unless this cluster's own instance runs there.",
        why="A NeuronCore belongs to one process: the second one fails with `Logical Neuron Core(s) not available`.",
        fix="End what is left over, or set other `devices`.",
        run=each_host("neuron", _free, applies=_NEURON),
        sources=(_NEURON_DOCS,),
        blocking=True,
    ),
    Check(
        id="ACC024",
        title="Every Neuron device has an EFA device",
        severity=Severity.ERROR,
        what="On EFA: as many EFA devices as Neuron devices. trn1.32xlarge has half as many by design, which is "
        "skipped: no source says whether NIXL takes it.",
        why="NIXL pairs each Neuron device with a card; with fewer cards registering device memory fails with EINVAL. "
        "An instance launched with one ordinary interface has none at all.",
        fix="Launch the instance with one EFA interface on each network card.",
        run=each_host("neuron", _cards, applies=_NEURON_EFA),
        sources=("https://github.com/ai-dynamo/nixl/pull/1994",),
    ),
    Check(
        id="ACC025",
        title="EFA's driver reaches Neuron memory",
        severity=Severity.WARNING,
        what="`device/p2p` of the EFA devices in /sys is NEURON. Drivers before 2.6.0 and those of the kernel have no "
        "such file.",
        why="Without peer memory KV is staged through the host's memory, if it moves at all.",
        fix="EFA installer's driver 2.6.0 or newer.",
        run=each_host("neuron", _peer_memory, applies=_NEURON_EFA),
        sources=("https://github.com/amzn/amzn-drivers/blob/master/kernel/linux/efa/RELEASENOTES.md",),
    ),
)
