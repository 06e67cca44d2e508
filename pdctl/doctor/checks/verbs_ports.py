"""FAB020 to 025: RDMA devices and ports on InfiniBand and RoCE. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdctl.doctor.checks.addresses import Address, parse_address, planned_addresses
from pdctl.doctor.checks.collected import collect
from pdctl.doctor.checks.efa_facts import other_devices
from pdctl.doctor.checks.instance_facts import environment_of
from pdctl.doctor.checks.per_host import each_host, hosts_by_value, odd_ones_out, on_fabric
from pdctl.doctor.checks.ucx_environment import named_ports
from pdctl.doctor.checks.wording import listing, plural
from pdctl.doctor.context import Context
from pdctl.doctor.facts import GidFacts, HostFacts, RdmaDevice, RdmaFacts, RdmaPort
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped

RDMA_MTU_WHOLE = 4200
"""Ethernet MTU from which RDMA packets of 4096 bytes fit."""

_VERBS = on_fabric("infiniband", "roce")
_INFINIBAND = on_fabric("infiniband")
_ROCE = on_fabric("roce")
_LINK = {"infiniband": "InfiniBand", "roce": "Ethernet"}
_UNASSIGNED_LIDS = (0, 65535)
_NO_PORT = "not checked: no port is active (see FAB021)"


@dataclass(frozen=True)
class _Rail:
    """One port of one device."""

    device: RdmaDevice
    port: RdmaPort

    @property
    def name(self) -> str:
        return f"{self.device.name}:{self.port.number}"

    @property
    def is_active(self) -> bool:
        return self.port.state.upper() == "ACTIVE"


def _rails(context: Context, facts: HostFacts) -> list[_Rail]:
    """Ports of the fabric's link layer; if UCX_NET_DEVICES names some, those alone."""
    rails = [
        _Rail(device, port)
        for device in other_devices(facts)
        for port in device.ports
        if port.link_layer == _LINK[context.spec.fabric]
    ]
    names = _named(context, facts)
    return [rail for rail in rails if rail.name in names or rail.device.name in names] if names else rails


def _named(context: Context, facts: HostFacts) -> frozenset[str]:
    found: set[str] = set()
    for instance in context.instances_on(facts.host):
        if instance.role != "router":
            found |= named_ports(environment_of(facts, instance))
    return frozenset(found)


def _active(context: Context, facts: HostFacts) -> list[_Rail]:
    return [rail for rail in _rails(context, facts) if rail.is_active]


def _present(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    host, wanted = facts.host, _LINK[context.spec.fabric]
    layers = {port.link_layer for device in other_devices(facts) for port in device.ports}
    seen = listing(
        f"{device.name} ({device.driver or 'software'}, "
        f"{listing(port.link_layer for port in device.ports) or 'no port'})"
        for device in rdma.devices
    )
    container = facts.system.container if facts.system is not None else None
    if wanted in layers:
        yield passed(host, message="there are RDMA devices", evidence=seen)
    elif layers & set(_LINK.values()):
        other = next(fabric for fabric, layer in _LINK.items() if layer in layers)
        yield failed(
            host,
            message=f"the RDMA devices are not {wanted}, which `fabric: {context.spec.fabric}` asks for",
            evidence=seen,
            fix=f"set `fabric: {other}`, or change the cards' link type (`mlxconfig`: LINK_TYPE_P1)",
        )
    else:
        yield failed(
            host,
            message="no RDMA device" + (f" in this {container} container" if container else ""),
            evidence=f"/sys/class/infiniband: {seen or 'empty'}",
            fix="pass the devices into the container (`--device=/dev/infiniband`) and let it see /sys"
            if container
            else "load the driver (`sudo modprobe mlx5_ib`); see `lspci | grep -i -e mellanox -e infiniband` and "
            "`rdma link`",
        )


def _ports(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    del rdma
    host, rails = facts.host, _rails(context, facts)
    if not rails:
        yield skipped(host, message="not checked: there is no port of this fabric (see FAB020, FAB026)")
        return
    idle = [rail for rail in rails if not rail.is_active]
    seen = listing(f"{rail.name} {rail.port.state} {rail.port.phys_state}".strip() for rail in rails)
    if not idle:
        yield passed(host, message="all RDMA ports are active", evidence=seen)
        return
    states = sorted({rail.port.state.upper() or "UNKNOWN" for rail in idle})
    named = bool(_named(context, facts))
    whole = len(idle) == len(rails) or named
    ports = "RDMA ports that UCX_NET_DEVICES names" if named else "RDMA ports"
    what = (
        f"none of the {ports} is active"
        if len(idle) == len(rails)
        else f"{len(idle)} of {len(rails)} {ports} are not active"
    )
    yield failed(
        host,
        severity=Severity.ERROR if whole else Severity.WARNING,
        message=f"{what} ({listing(states)})",
        evidence=seen,
        fix="; ".join(_state_fix(context, state) for state in states),
    )


def _state_fix(context: Context, state: str) -> str:
    if state == "INIT" and context.spec.fabric == "infiniband":
        return "INIT: the link is up, but no subnet manager answers: start one (`opensm`, or on a switch), see `sminfo`"
    if state in ("DOWN", "DISABLED"):
        up = "; `ip link set dev INTERFACE up`" if context.spec.fabric == "roce" else ""
        return (
            f"{state}: look at cable, transceiver and switch port{up}; or name only active ports in UCX_NET_DEVICES "
            "(`env` of the host or side in the cluster file)"
        )
    return f"{state}: see `rdma link` and `ibstat`"


def _lids(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    del rdma
    rails = _active(context, facts)
    if not rails:
        yield skipped(facts.host, message=_NO_PORT)
        return
    # Bonded devices have LID 0.
    known = [rail for rail in rails if rail.port.lid is not None and "bond" not in rail.device.name]
    without = [rail for rail in known if rail.port.lid in _UNASSIGNED_LIDS]
    if without:
        yield failed(
            facts.host,
            message="an active InfiniBand port has no address (LID)",
            evidence=listing(f"{rail.name}: lid {rail.port.lid}, sm_lid {rail.port.sm_lid}" for rail in without),
            fix="the subnet manager assigns it: `sminfo` must find one; if not, start one (`opensm`, or on a switch), "
            "else look into its log",
        )
    elif not known:
        yield skipped(facts.host, message="not checked: the ports' LIDs were not reported")
    else:
        yield passed(facts.host, message="the InfiniBand ports have addresses (LIDs)")


def _gids(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    del rdma
    host, rails = facts.host, _active(context, facts)
    if not rails:
        yield skipped(host, message=_NO_PORT)
        return
    usable = {rail.name: [gid for gid in rail.port.gids if _routable(gid)] for rail in rails}
    without = [name for name, gids in usable.items() if not gids]
    seen = listing(f"{rail.name}: {_describe(rail.port.gids)}" for rail in rails)
    fix = "give the port's network interface an IP address (`ip addr`), and use RoCE v2 "
    fix += "(`cma_roce_mode -d DEVICE -p 1 -m 2`)"
    if without:
        every = len(without) == len(rails)
        yield failed(
            host,
            severity=Severity.ERROR if every or _named(context, facts) else Severity.WARNING,
            message="no RoCE v2 GID with an address that can be routed"
            + ("" if every else f" on {len(without)} of {len(rails)} ports"),
            evidence=seen,
            fix=fix,
        )
        return
    missing = _data_addresses_without_gid(context, facts, rails)
    fixed = _wrong_index(context, facts, rails)
    if missing:
        yield failed(
            host,
            message="the RDMA port of the data-plane address has no RoCE v2 GID for that address",
            evidence=f"{listing(missing)}; {seen}",
            fix=fix,
        )
    elif fixed:
        yield failed(
            host,
            message="UCX_IB_GID_INDEX points to a GID that is not RoCE v2 with a routable address",
            evidence=f"{listing(fixed)}; {seen}",
            fix="take UCX_IB_GID_INDEX out of `env` in the cluster file and out of the login's environment, then UCX "
            "chooses by itself; or set it for each host to the index of a RoCE v2 line with an IP address (tables "
            "differ between hosts)",
        )
    else:
        yield passed(host, message="the RoCE ports have a RoCE v2 GID that can be routed", evidence=seen)


def _routable(gid: GidFacts) -> bool:
    address = _gid_address(gid)
    return "v2" in gid.type.lower() and address is not None and not address.is_link_local and not address.is_unspecified


def _gid_address(gid: GidFacts) -> Address | None:
    address = parse_address(gid.gid)
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _describe(gids: tuple[GidFacts, ...]) -> str:
    return listing((f"{gid.index} {gid.type or 'unknown type'} {_gid_address(gid)}" for gid in gids), 4) or "no GID"


def _data_addresses_without_gid(context: Context, facts: HostFacts, rails: list[_Rail]) -> list[str]:
    """Addresses of the plan that an RDMA port's own interface has, but none of its RoCE v2 GIDs."""
    network = facts.network
    if network is None:
        return []
    missing = []
    for instance in context.instances_on(facts.host):
        for address in planned_addresses(instance.address, network):
            names = {
                one.name for one in network.interfaces if any(parse_address(text) == address for text in one.addresses)
            }
            own = [rail for rail in rails if rail.port.netdev and rail.port.netdev in names]
            gids = {_gid_address(gid) for rail in own for gid in rail.port.gids if _routable(gid)}
            if own and address not in gids:
                missing.append(f"{address} on {own[0].port.netdev}")
    return list(dict.fromkeys(missing))


def _wrong_index(context: Context, facts: HostFacts, rails: list[_Rail]) -> list[str]:
    wrong = []
    for instance in context.instances_on(facts.host):
        value = environment_of(facts, instance).get("UCX_IB_GID_INDEX", ("", ""))[0].strip()
        if instance.role == "router" or not (value.isascii() and value.isdigit() and len(value) < 6):
            continue
        for rail in rails:
            if not any(gid.index == int(value) and _routable(gid) for gid in rail.port.gids):
                wrong.append(f"{rail.name} index {value}")
    return list(dict.fromkeys(wrong))


def _mtus(context: Context) -> Iterator[Result]:
    if not _ROCE(context):
        return
    with_rdma = collect(context, context.vllm_hosts, "rdma", lambda facts: facts.rdma)
    networks = collect(context, with_rdma.found, "network", lambda facts: facts.network)
    yield from (*with_rdma.skipped, *networks.skipped)
    mtus: dict[str, str] = {}
    for host, network in networks.found.items():
        sizes = {interface.name: interface.mtu for interface in network.interfaces}
        active = _active(context, context.facts[host])
        rails = [sizes[rail.port.netdev] for rail in active if rail.port.netdev in sizes]
        if rails:
            mtus[host] = listing(sorted(set(rails)))
        else:
            yield skipped(host, message="not checked: the RDMA ports' network interfaces are not known")
    odd = odd_ones_out(mtus)
    for host, mtu in mtus.items():
        smallest = int(mtu.split(",")[0])
        if odd is not None and host in odd[1]:
            yield failed(
                host,
                message=f"the MTU of its RoCE interfaces is not that of the other hosts ({mtu} instead of {odd[0]})",
                evidence=hosts_by_value(mtus),
                fix="set one MTU on all hosts and on the switch ports, 9000 where the switches can: `sudo ip link set "
                "dev INTERFACE mtu 9000`",
            )
        elif smallest < RDMA_MTU_WHOLE:
            yield failed(
                host,
                severity=Severity.INFO,
                message=f"the MTU of the RoCE interfaces is {mtu}: RDMA packets stay below 4096 bytes",
                evidence=hosts_by_value(mtus),
                fix=f"an MTU of {RDMA_MTU_WHOLE} or more (9000) on hosts and switches gives more bandwidth for less "
                "work",
            )
        else:
            yield passed(host, message="the same MTU as on the other hosts", evidence=mtu)


def _equal_rails(context: Context) -> Iterator[Result]:
    if not _VERBS(context):
        return
    collected = collect(context, context.vllm_hosts, "rdma", lambda facts: facts.rdma)
    yield from collected.skipped
    rails: dict[str, str] = {}
    for host in collected.found:
        active = _active(context, context.facts[host])
        if not active:
            yield skipped(host, message=_NO_PORT)
            continue
        rates = sorted(f"{rail.port.rate_gbps:g}" if rail.port.rate_gbps is not None else "?" for rail in active)
        counts = {rate: rates.count(rate) for rate in dict.fromkeys(rates)}
        rails[host] = listing(f"{plural(count, 'port')} at {rate} Gbit/s" for rate, count in counts.items())
    odd = odd_ones_out(rails)
    for host in rails:
        if odd is not None and host in odd[1]:
            yield failed(
                host,
                message=f"its RDMA ports are not as many or as fast as on the other hosts ({rails[host]} instead of "
                f"{odd[0]})",
                evidence=hosts_by_value(rails),
                fix="look for a port that is down or trained to a lower rate (`ibstat`, `mlxlink -d DEVICE`); reseat "
                "the cable; or name the same ports on all hosts in UCX_NET_DEVICES",
            )
        else:
            yield passed(host, message="as many and as fast RDMA ports as on the other hosts", evidence=rails[host])


_KERNEL_IB = "https://docs.kernel.org/infiniband/index.html"
_UCX_FAQ = "https://openucx.readthedocs.io/en/master/faq.html"

CHECKS: tuple[Check, ...] = (
    Check(
        id="FAB020",
        title="There are RDMA devices of this fabric",
        severity=Severity.ERROR,
        what="On `fabric: infiniband` a device whose link layer is InfiniBand, on `fabric: roce` one whose link layer "
        "is Ethernet, in /sys/class/infiniband.",
        why="Without one UCX has nothing but TCP; pdctl forbids that (UCX_TLS=^tcp), so NIXL fails at start.",
        fix="Load the driver, pass the devices into the container, or set the `fabric` that the cards have.",
        run=each_host("rdma", _present, applies=_VERBS),
        sources=(_KERNEL_IB, "https://github.com/vllm-project/vllm/pull/42075"),
        blocking=True,
    ),
    Check(
        id="FAB021",
        title="The RDMA ports are active",
        severity=Severity.ERROR,
        what="The state of every port of the fabric, or of those that UCX_NET_DEVICES names. None active, or a named "
        "one not, is an error; some not active a warning.",
        why="DOWN is a cable or a switch port. INIT on InfiniBand means that no subnet manager runs: no address, no "
        "traffic. UCX may still choose such a port and wait.",
        fix="Cable and switch for DOWN; a subnet manager for INIT.",
        run=each_host("rdma", _ports, applies=_VERBS),
        sources=(_KERNEL_IB,),
        blocking=True,
    ),
    Check(
        id="FAB022",
        title="InfiniBand ports have an address",
        severity=Severity.ERROR,
        what="The LID of active InfiniBand ports is neither 0 nor 65535. Bonded devices are left out.",
        why="The subnet manager has not come round to the port: nothing can be sent to it.",
        fix="Look at the subnet manager (`sminfo`, its log).",
        run=each_host("rdma", _lids, applies=_INFINIBAND),
        sources=(_KERNEL_IB,),
        blocking=True,
    ),
    Check(
        id="FAB023",
        title="RoCE ports have a GID that can be routed",
        severity=Severity.ERROR,
        what="Every active port has a GID of the type RoCE v2 whose address is not link-local; if the data-plane "
        "address is that of an RDMA port's interface, the port has a GID for it; UCX_IB_GID_INDEX, if set, points to "
        "such a GID.",
        why="Link-local (fe80) and RoCE v1 GIDs are not routed: connections time out between some hosts and work "
        "between others. The index of the right GID may differ from host to host.",
        fix="An IP address on the interface of the port; leave UCX_IB_GID_INDEX out.",
        run=each_host("rdma", _gids, applies=_ROCE),
        sources=("https://github.com/NVIDIA/nccl/issues/769", "https://github.com/openucx/ucx/issues/7785"),
        blocking=True,
    ),
    Check(
        id="FAB024",
        title="The RoCE interfaces have one MTU",
        severity=Severity.WARNING,
        what=f"The Ethernet MTU of the interfaces of active RoCE ports, on all hosts. Below {RDMA_MTU_WHOLE} on all "
        "of them is an information. InfiniBand's MTU is not in /sys, so it is not looked at.",
        why="Packets that one side sends and the other (or a switch) drops look like a link that is slow or hangs.",
        fix="One MTU everywhere, 9000 where the switches can.",
        run=_mtus,
        sources=(_UCX_FAQ,),
    ),
    Check(
        id="FAB025",
        title="The same RDMA ports on every host",
        severity=Severity.WARNING,
        what="Number and rate of the active ports on all prefill and decode hosts.",
        why="The slower or smaller side sets the pace; a port that trained to a lower rate is a bad cable.",
        fix="`mlxlink`, cable, switch port; or the same UCX_NET_DEVICES everywhere.",
        run=_equal_rails,
        sources=(_UCX_FAQ,),
    ),
)
