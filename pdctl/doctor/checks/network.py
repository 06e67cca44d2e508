"""The network as each host sees it: ports, addresses, names, routes; who else can reach the instances. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.checks.addresses import Address, local_addresses, parse_address, planned_addresses
from pdctl.doctor.checks.collected import collect
from pdctl.doctor.checks.network_reach import REACH_CHECKS
from pdctl.doctor.checks.per_host import all_hosts, each_host, hosts_by_value
from pdctl.doctor.checks.wording import listing
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, KernelSettings, NetworkView, PlannedPort, RouteFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.security_group_rules import unread_groups, world_open_ports
from pdctl.plan import InstancePlan
from pdctl.plan_devices import device_ranges

_ANY = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


def _instances(context: Context) -> tuple[InstancePlan, ...]:
    """Prefill and decode."""
    return (*context.plan.prefill, *context.plan.decode)


def _several_machines(context: Context) -> bool:
    return len({instance.address for instance in _instances(context)}) > 1 and len(context.vllm_hosts) > 1


def _addresses_of(context: Context, host: str) -> tuple[str, ...]:
    """Data addresses of a host as the plan writes them: IP addresses or names."""
    return tuple(dict.fromkeys(one.address for one in _instances(context) if one.host == host))


def _peers_of(context: Context, host: str) -> tuple[str, ...]:
    """Data addresses that a host talks to, without its own."""
    peers = [decode for prefill, decode in context.pairs() if prefill == host]
    peers += [prefill for prefill, decode in context.pairs() if decode == host]
    if host == context.plan.router.host:
        peers += context.vllm_hosts
    found = dict.fromkeys(address for peer in peers for address in _addresses_of(context, peer))
    own = _addresses_of(context, host)
    return tuple(address for address in found if address not in own)


# --- NET001, NET002


def _ports_free(context: Context, facts: HostFacts, ports: tuple[PlannedPort, ...]) -> Iterator[Result]:
    del context
    # An address of another host is a matter of its own.
    taken = [one for one in ports if not one.free and not one.ours and one.error != "not-local"]
    for one in taken:
        shown = f"{one.address}:{one.port}"
        if one.error == "in-use":
            yield failed(
                facts.host,
                message=f"port {one.port} for the {one.purpose} is taken by another process",
                evidence=f"{shown}: {one.holder or 'the holder cannot be seen by this login'}",
                fix="stop that process, or give the role or host another base port",
            )
        elif one.error == "not-allowed":
            yield failed(
                facts.host,
                message=f"this login may not open port {one.port} for the {one.purpose}",
                evidence=f"{shown}: ports below 1024 are for root (net.ipv4.ip_unprivileged_port_start)",
                fix="choose a port from 1024 on",
            )
        else:
            yield failed(
                facts.host,
                message=f"port {one.port} for the {one.purpose} cannot be opened",
                evidence=f"{shown}: {one.error or 'no reason given'}",
                fix="see the evidence; another base port may do",
            )
    if not taken and ports:
        mine = sum(1 for one in ports if one.ours)
        evidence = f"{device_ranges(sorted({one.port for one in ports}))}"
        running = f"; {mine} held by this cluster's own instances" if mine else ""
        yield passed(facts.host, message="the planned ports are free", evidence=f"{evidence}{running}")


def _address_local(context: Context, facts: HostFacts, ports: tuple[PlannedPort, ...]) -> Iterator[Result]:
    wrong = [one for one in ports if one.error == "not-local"]
    if not wrong:
        addresses = listing(dict.fromkeys(one.address for one in ports))
        yield passed(facts.host, message="the data addresses belong to this host", evidence=addresses)
        return
    own = "not known" if facts.network is None else listing(map(str, sorted(map(str, local_addresses(facts.network)))))
    for address in dict.fromkeys(one.address for one in wrong):
        purposes = listing(dict.fromkeys(one.purpose for one in wrong if one.address == address))
        yield failed(
            facts.host,
            message=f"no interface of this host has the address {address} that the cluster file gives it",
            evidence=f"for {purposes}; its addresses: {own}",
            fix=(
                f"give an address of this host as `address` in {context.spec.file or 'the cluster file'} (on EC2 the "
                "private one: a public address is translated on the way and belongs to no interface)"
            ),
        )


# --- NET003


def _names_resolve(context: Context) -> Iterator[Result]:
    names = tuple(dict.fromkeys(one.address for one in _instances(context) if parse_address(one.address) is None))
    if not names or not _several_machines(context):
        return
    views = collect(context, context.plan.hosts, "network", lambda facts: facts.network)
    yield from views.skipped
    for name in names:
        yield from _judge_name(context, name, views.found)


def _judge_name(context: Context, name: str, views: dict[str, NetworkView]) -> Iterator[Result]:
    known = {
        host: frozenset(planned_addresses(name, view))
        for host, view in views.items()
        if name in view.resolved and (name in _addresses_of(context, host) or name in _peers_of(context, host))
    }
    if not known:
        return
    shown = hosts_by_value({host: listing(map(str, sorted(map(str, found)))) or "-" for host, found in known.items()})
    unresolved = [host for host, found in known.items() if not found]
    looped = [host for host, found in known.items() if any(address.is_loopback for address in found)]
    if unresolved:
        yield failed(
            *unresolved,
            message=f"the name {name} does not resolve here",
            evidence=shown,
            fix=f"put it into DNS or /etc/hosts of this host, or give its IP address as `address` of {name}",
        )
    if looped:
        yield failed(
            *looped,
            message=f"the name {name} means a loopback address here, which no other host reaches",
            evidence=shown,
            fix=(
                "remove that line from /etc/hosts (Debian and Ubuntu put the own name at 127.0.1.1), or give the IP "
                f"address as `address` of {name}"
            ),
        )
    rest = {host: found for host, found in known.items() if host not in unresolved and host not in looped}
    if len(rest) > 1 and not frozenset.intersection(*rest.values()):
        yield failed(
            *rest,
            message=f"the name {name} means different addresses on different hosts",
            evidence=shown,
            fix=f"make DNS and /etc/hosts agree, or give the IP address as `address` of {name}",
            severity=Severity.WARNING,
        )
    elif rest and not unresolved and not looped:
        yield passed(*rest, message=f"the name {name} means the same wherever it is used", evidence=shown)


# --- NET004, NET005, NET006: routes


def _routes(context: Context, facts: HostFacts, network: NetworkView) -> dict[str, RouteFacts]:
    found = {route.address: route for route in network.routes}
    return {peer: found[peer] for peer in _peers_of(context, facts.host) if peer in found}


def _route_exists(context: Context, facts: HostFacts, network: NetworkView) -> Iterator[Result]:
    peers = _peers_of(context, facts.host)
    if not peers:
        return
    routes = _routes(context, facts, network)
    if not routes:
        yield skipped(facts.host, message="not checked: the host told no routes to its peers")
        return
    broken = {peer: route for peer, route in routes.items() if route.error}
    # A name that does not resolve is reported by NET003.
    broken = {peer: route for peer, route in broken.items() if parse_address(peer) is not None}
    if broken:
        yield failed(
            facts.host,
            message="this host has no route to data addresses of its peers",
            evidence="; ".join(f"{peer}: {route.error}" for peer, route in list(broken.items())[:8]),
            fix="check the interface and the routes (`ip route get ADDRESS`), and `address` of the peers",
        )
    else:
        interfaces = listing(sorted({route.interface for route in routes.values() if route.interface}))
        yield passed(
            facts.host, message="this host has a route to each of its peers", evidence=f"by {interfaces or '-'}"
        )


def _route_source(context: Context, facts: HostFacts, network: NetworkView) -> Iterator[Result]:
    own = {found for text in _addresses_of(context, facts.host) for found in planned_addresses(text, network)}
    if not own:
        return
    other: dict[str, RouteFacts] = {}
    checked = 0
    for peer, route in _routes(context, facts, network).items():
        source = parse_address(route.source)
        same_family = {address for address in own if source is not None and address.version == source.version}
        if source is None or source.is_loopback or not same_family:
            continue
        checked += 1
        if source not in same_family:
            other[peer] = route
    if other:
        sources = listing(sorted({route.source for route in other.values()}))
        yield failed(
            facts.host,
            message="packets to peers leave by another address than the data address of this host",
            evidence="; ".join(
                f"to {peer} by {route.interface} from {route.source}" for peer, route in list(other.items())[:8]
            ),
            fix=(
                f"make {listing(map(str, own))} the source of that route (`ip route`), or give {sources} as `address` "
                "if that is the interface for the KV cache; answers may be dropped or take the slow interface otherwise"
            ),
        )
    elif checked:
        yield passed(facts.host, message="packets to peers leave by the data address", evidence=listing(map(str, own)))


def _mtu_same(context: Context) -> Iterator[Result]:
    views = collect(context, context.vllm_hosts, "network", lambda facts: facts.network)
    yield from views.skipped
    for prefill, decode in context.pairs():
        if prefill == decode or prefill not in views.found or decode not in views.found:
            continue
        mtus = [_mtu_to(context, views.found, *hosts) for hosts in ((prefill, decode), (decode, prefill))]
        if mtus[0] is None or mtus[1] is None:
            continue
        evidence = f"prefill {mtus[0]}, decode {mtus[1]} bytes"
        if mtus[0] == mtus[1]:
            yield passed(prefill, decode, message="both ends have the same MTU", evidence=evidence)
        else:
            yield failed(
                prefill,
                decode,
                message=f"the MTU is {mtus[0]} bytes on the prefill host and {mtus[1]} on the decode host",
                evidence=evidence,
                fix="set the same MTU on the interfaces for the KV cache (`ip link set dev IF mtu N`)",
            )


def _mtu_to(context: Context, views: dict[str, NetworkView], source: str, target: str) -> int | None:
    targets = _addresses_of(context, target)
    for route in views[source].routes:
        if route.address in targets and not route.error:
            interfaces = {one.name: one.mtu for one in views[source].interfaces}
            return route.mtu or interfaces.get(route.interface)
    return None


# --- NET007


def _address_kind(context: Context) -> Iterator[Result]:
    if not _several_machines(context):
        return
    for host in context.vllm_hosts:
        wrong = False
        for text in _addresses_of(context, host):
            address = parse_address(text)
            kind = _useless(address) if address is not None else ""
            if kind:
                wrong = True
                yield failed(
                    host,
                    message=f"the data address is {kind}, which other hosts cannot reach",
                    evidence=text,
                    fix=f"give an address of the data network as `address` of {host}",
                )
        if not wrong:
            addresses = listing(_addresses_of(context, host))
            yield passed(host, message="the data address is one that other hosts can reach", evidence=addresses)


def _useless(address: Address) -> str:
    if address.is_loopback:
        return "a loopback address"
    if address.is_link_local:
        return "a link-local address"
    if address.is_unspecified or address.is_multicast:
        return "no address of a host"
    return ""


# --- NET008


def _not_ephemeral(context: Context, facts: HostFacts, kernel: KernelSettings) -> Iterator[Result]:
    ports = sorted({use.port for instance in context.instances_on(facts.host) for use in instance.ports})
    limits = kernel.ip_local_port_range
    if limits is None:
        yield skipped(facts.host, message="not checked: the range of ephemeral ports is not known")
        return
    first, last = limits
    inside = [port for port in ports if first <= port <= last]
    seen = f"net.ipv4.ip_local_port_range {first}-{last}"
    if inside:
        yield failed(
            facts.host,
            message="planned ports lie in the range from which the kernel gives ports to outgoing connections",
            evidence=f"{device_ranges(inside)} of {device_ranges(ports)}; {seen}",
            fix=(
                f"choose base ports below {first}, or reserve them: sysctl -w net.ipv4.ip_local_reserved_ports="
                f"{device_ranges(inside)}"
            ),
        )
    else:
        yield passed(facts.host, message="planned ports lie outside the range of ephemeral ports", evidence=seen)


# --- NET011


def _not_exposed(context: Context) -> Iterator[Result]:
    for host in context.vllm_hosts:
        uses = {
            use.port: (use.purpose, use.address)
            for instance in context.instances_on(host)
            if instance.role != "router"
            for use in instance.ports
            if _reachable_by_others(use.address)
        }
        exposed = {port: use for port, use in uses.items() if _is_wide(use[1])}
        if not exposed:
            yield passed(host, message="the instances listen on private addresses only", evidence=_listen(uses))
        elif context.aws is not None and host in context.aws.instances:
            yield _by_security_groups(context.aws, host, exposed)
        else:
            yield _without_security_groups(context, host, exposed)


_Uses = dict[int, tuple[str, str]]


def _reachable_by_others(text: str) -> bool:
    address = parse_address(text)
    return address is None or not address.is_loopback


def _is_wide(text: str) -> bool:
    """Bound to every interface, or to an address of the internet."""
    address = parse_address(text)
    return text in _ANY or (address is not None and address.is_global)


def _listen(uses: _Uses) -> str:
    return listing(f"{purpose} {address}:{port}" for port, (purpose, address) in sorted(uses.items()))


def _by_security_groups(aws: AwsFacts, host: str, exposed: _Uses) -> Result:
    opened = world_open_ports(aws, host, exposed)
    if opened:
        groups = listing(sorted({rule.group for rules in opened.values() for rule in rules}))
        purposes = listing(sorted({exposed[port][0] for port in opened}))
        return failed(
            host,
            message=f"the whole internet may connect to: {purposes}",
            evidence=f"{_listen({port: exposed[port] for port in opened})}; opened by {groups}",
            fix=(
                "remove the rule that lets 0.0.0.0/0 or ::/0 in, or listen on the private address (`address`, no "
                "`vllm_args: {host: 0.0.0.0}`): neither vLLM nor the side channel asks who is there"
            ),
        )
    unread = unread_groups(aws, host)
    if unread:
        message = f"not checked: security groups could not be read: {listing(unread)}"
        return skipped(host, message=message, evidence=_listen(exposed))
    return passed(host, message="no security group lets the internet in", evidence=_listen(exposed))


def _without_security_groups(context: Context, host: str, exposed: _Uses) -> Result:
    public = {port: use for port, use in exposed.items() if use[1] not in _ANY}
    fix = (
        "give the private address as `address` of this host, and no `vllm_args: {host: 0.0.0.0}`: neither vLLM nor the "
        "side channel asks who is there. If a firewall guards it, say so in the list `doctor: ignore`"
    )
    if public:
        return failed(
            host,
            message=f"{listing(sorted({use[0] for use in public.values()}))} would listen on a public address; whether "
            "a firewall guards it is not known here",
            evidence=f"{_listen(public)}; security groups were not read: {context.aws_skipped or 'not on EC2'}",
            fix=fix,
            # The address is a fact; that strangers get through to it is not.
            severity=Severity.WARNING,
        )
    facts = context.facts.get(host)
    if facts is None or facts.network is None:
        reason = "the host reported no facts" if facts is None else facts.why_missing("network")
        return skipped(host, message=f"not checked: {reason}", evidence=_listen(exposed))
    own = sorted(str(address) for address in local_addresses(facts.network) if address.is_global)
    if own:
        return failed(
            host,
            message=f"{listing(sorted({use[0] for use in exposed.values()}))} would listen on all of this host's "
            "addresses, and one of them is public",
            evidence=f"{_listen(exposed)}; public: {listing(own)}",
            fix=fix,
            severity=Severity.WARNING,
        )
    return passed(host, message="the instances listen on private addresses only", evidence=_listen(exposed))


_CHECKS: tuple[Check, ...] = (
    Check(
        id="NET001",
        title="The planned ports are free",
        severity=Severity.ERROR,
        what=(
            "Each port of the plan is bound for a moment on the host that will use it. Ports that running instances of "
            "this cluster hold are fine."
        ),
        why="The instance would end when it opens its port, after it has loaded the model.",
        fix="Stop what holds the port, or set `port`, `side_channel_port` or `telemetry_port` of the role or host.",
        run=each_host("ports", _ports_free, hosts=all_hosts),
        blocking=True,
    ),
    Check(
        id="NET002",
        title="The data address belongs to the host",
        severity=Severity.ERROR,
        what="The address that the plan gives a host can be bound there.",
        why="The API or the NIXL side channel cannot be opened: `Cannot assign requested address`.",
        fix="Give an address of one of the host's interfaces as `address`; on EC2 the private one.",
        run=each_host("ports", _address_local, hosts=all_hosts),
        blocking=True,
    ),
    Check(
        id="NET003",
        title="Names mean the same on every host",
        severity=Severity.ERROR,
        what=(
            "Names of hosts that are used as data addresses resolve on each host that uses them, to the same address, "
            "and not to loopback. With IP addresses in the cluster file there is nothing to check."
        ),
        why=(
            "The side channel binds what the own name means: at 127.0.1.1, as in /etc/hosts of Debian and Ubuntu, no "
            "other host reaches it."
        ),
        fix="Give IP addresses as `address`, or correct DNS and /etc/hosts.",
        run=_names_resolve,
        blocking=True,
    ),
    Check(
        id="NET004",
        title="There is a route to each peer",
        severity=Severity.ERROR,
        what="The kernel of each host knows how to send to the data addresses that it talks to.",
        why="Every connection fails at once.",
        fix="Check interfaces, routes and `address`.",
        run=each_host("network", _route_exists, hosts=all_hosts),
        blocking=True,
    ),
    Check(
        id="NET005",
        title="Packets to peers leave by the data address",
        severity=Severity.WARNING,
        what="The source that the kernel chooses for each peer is the data address of this host.",
        why=(
            "With several interfaces the way there and back may differ: answers are dropped, security groups that name "
            "the data interface do not match, or all goes over the slow one."
        ),
        fix="Correct the routes or `address`.",
        run=each_host("network", _route_source),
    ),
    Check(
        id="NET006",
        title="The same MTU on both ends",
        severity=Severity.WARNING,
        what="The MTU of the route from prefill to decode is that of the way back.",
        why="Large packets of one side may be lost, or be sent again and again in smaller ones.",
        fix="Set one MTU on all interfaces for the KV cache.",
        run=_mtu_same,
    ),
    Check(
        id="NET007",
        title="The data address can be reached by others",
        severity=Severity.ERROR,
        what="With several hosts no data address is loopback (127.x.x.x, ::1) or link-local (169.254.x.x, fe80::/10).",
        why="Other hosts would talk to themselves, or to nobody.",
        fix="Give an address of the data network as `address`.",
        run=_address_kind,
        sources=("https://github.com/aws-samples/aws-do-eks/pull/54",),
        blocking=True,
    ),
    Check(
        id="NET008",
        title="Planned ports are no ephemeral ports",
        severity=Severity.WARNING,
        what="No planned port lies in net.ipv4.ip_local_port_range of its host. pdctl's own choice does not.",
        why="Any outgoing connection may hold such a port by chance, and the instance does not start, now and then.",
        fix="Choose ports below that range, or reserve them with net.ipv4.ip_local_reserved_ports.",
        run=each_host("kernel", _not_ephemeral, hosts=all_hosts),
    ),
    Check(
        id="NET011",
        title="API and side channel are not open to the internet",
        severity=Severity.ERROR,
        what=(
            "Ports of prefill and decode that are bound to every address or to a public one must not be let in from "
            "the whole internet by a security group. Without answers of the EC2 API it is a warning to listen on a "
            "public address, or on every address if one of them is public. The router is not judged: clients have to "
            "reach it."
        ),
        why=(
            "vLLM's API asks nobody for a password unless told to, and the NIXL side channel never does: strangers "
            "could use the model, or get at memory of the instances."
        ),
        fix="Listen on private addresses, and let only the cluster's own security group in.",
        run=_not_exposed,
        sources=("https://docs.vllm.ai/en/latest/usage/security/",),
    ),
)

CHECKS: tuple[Check, ...] = tuple(sorted((*_CHECKS, *REACH_CHECKS), key=lambda check: check.id))
