"""SG004, SG005: the planned TCP ports, between the hosts and for the world. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pdctl.doctor.checks.addresses import parse_address
from pdctl.doctor.checks.ec2_view import Ec2View, concerns_ec2, pairs_apart
from pdctl.doctor.checks.wording import listing
from pdctl.doctor.context import Context
from pdctl.doctor.ec2_shapes import Group, Interface, Rule
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.security_group_rules import (
    Endpoint,
    Evaluator,
    MissingRule,
    TcpAnswer,
    joined,
    unread_groups,
    world_open_ports,
)
from pdctl.plan import InstancePlan, PortUse

SSH_PORT = 22


@dataclass(frozen=True)
class _Flow:
    """One TCP connection that the cluster needs. ``about`` are the hosts of the finding."""

    source: str
    target: str
    address: str
    use: PortUse
    about: tuple[str, ...]
    who: str


def _flows(context: Context) -> Iterator[_Flow]:
    """Side channels between prefill and decode in both directions, and the APIs from the router."""
    at: dict[str, dict[str, list[InstancePlan]]] = {"prefill": {}, "decode": {}}
    for instance in (*context.plan.prefill, *context.plan.decode):
        at[instance.role].setdefault(instance.host, []).append(instance)
    for prefill, decode in pairs_apart(context):
        for role, target, source in (("prefill", prefill, decode), ("decode", decode, prefill)):
            who = f"the {'decode' if role == 'prefill' else 'prefill'} host to the {role} host"
            for instance in at[role][target]:
                for use in instance.ports:
                    if use.purpose == "side channel":
                        yield _Flow(source, target, instance.address, use, (prefill, decode), who)
    router = context.plan.router.host
    for instance in (*context.plan.prefill, *context.plan.decode):
        if instance.host != router:
            for use in instance.ports:
                if use.purpose == "API":
                    who = f"the router's host to the {instance.role} host"
                    yield _Flow(router, instance.host, instance.address, use, (instance.host,), who)


@dataclass(frozen=True)
class _Tcp:
    view: Ec2View

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator.of(self.view.aws)

    def _ends(self, flow: _Flow) -> tuple[Endpoint, Endpoint] | str:
        """Both ends of a connection as security groups see them, or why they are not known."""
        for host in (flow.source, flow.target):
            if self.view.instance(host) is None:
                return self.view.why_not(host)
        if "DescribeSecurityGroups" in self.view.aws.refused and not self.evaluator.groups:
            return self.view.why_not(flow.source, action="DescribeSecurityGroups")
        address = self._resolved(flow.source, flow.address)
        target, private = self._at(flow.target, address)
        if target is None:
            return f"no interface of the instance has the planned address {flow.address}"
        source = self._from(flow.source, address)
        if source is None:
            return "the instance has no interface with an address"
        if private:
            seen = next((one for one in source.addresses if (":" in one) == (":" in address)), source.addresses[0])
            return Endpoint(source.groups, seen), Endpoint(target.groups, address)
        if not source.public_addresses:
            return "the planned address is a public one, and under which one the other host comes is unknown (NAT)"
        return Endpoint(source.groups, source.public_addresses[0], False), Endpoint(target.groups, address, False)

    def _resolved(self, source: str, address: str) -> str:
        facts = self.view.context.facts.get(source)
        network = facts.network if facts is not None else None
        known = network.resolved.get(address, ()) if network is not None else ()
        return known[0] if known else address

    def _at(self, host: str, address: str) -> tuple[Interface | None, bool]:
        """The interface that has an address, and whether that is a private one. A name is taken for the primary."""
        interfaces = [one for one in self.view.interfaces(host) if one.addresses]
        for one in interfaces:
            if address in one.addresses:
                return one, True
        for one in interfaces:
            if address in one.public_addresses:
                return one, False
        if parse_address(address) is None and interfaces:
            return next((one for one in interfaces if one.primary), interfaces[0]), True
        return None, True

    def _from(self, host: str, address: str) -> Interface | None:
        """The interface by which a host sends to an address: by its routes, else the primary one."""
        interfaces = [one for one in self.view.interfaces(host) if one.addresses]
        facts = self.view.context.facts.get(host)
        for route in facts.network.routes if facts is not None and facts.network is not None else ():
            if route.address == address:
                for one in interfaces:
                    if route.source in one.addresses:
                        return one
        return next((one for one in interfaces if one.primary), interfaces[0] if interfaces else None)

    def answer(self, flow: _Flow) -> TcpAnswer | str:
        ends = self._ends(flow)
        return ends if isinstance(ends, str) else self.evaluator.tcp(*ends, flow.use.port)

    def missing_without(self, flows: Iterable[_Flow], removed: Iterable[Rule]) -> tuple[MissingRule, ...]:
        """Rules that connections would lack if some were removed."""
        gone = set(removed)
        groups = {
            name: Group(one.id, one.name, one.vpc_id, tuple(rule for rule in one.rules if rule not in gone))
            for name, one in self.evaluator.groups.items()
        }
        left = Evaluator(groups, self.evaluator.prefix_lists)
        found = ((self._ends(flow), flow.use.port) for flow in flows)
        return joined(
            rule for ends, port in found if not isinstance(ends, str) for rule in left.tcp(*ends, port).missing
        )


def _between(context: Context) -> Iterator[Result]:
    if not concerns_ec2(context):
        return
    view = Ec2View(context)
    if context.aws is None:
        yield skipped(message=view.why_not())
        return
    tcp = _Tcp(view)
    together: dict[tuple[tuple[str, ...], str], list[tuple[_Flow, TcpAnswer | str]]] = {}
    for flow in _flows(context):
        together.setdefault((flow.about, flow.who), []).append((flow, tcp.answer(flow)))
    for (about, who), answers in together.items():
        yield _judged(view, about, who, answers)


def _judged(
    view: Ec2View, about: tuple[str, ...], who: str, answers: list[tuple[_Flow, TcpAnswer | str]]
) -> Result:  # fmt: skip
    closed = [(flow, one) for flow, one in answers if isinstance(one, TcpAnswer) and one.allowed is False]
    unknown = [one for _, one in answers if isinstance(one, str)]
    unread = [name for _, one in answers if isinstance(one, TcpAnswer) and one.allowed is None for name in one.unknown]
    if closed:
        ports = listing(f"{flow.use.port} ({flow.use.purpose})" for flow, _ in closed)
        missing = joined(rule for _, one in closed for rule in one.missing)
        return failed(
            *about,
            message=f"security groups block TCP from {who}: {ports}",
            evidence="; ".join(dict.fromkeys(f"{rule}; {rule.found}" for rule in missing)),
            fix="allow these ports between the groups; replies need no rule",
            commands=tuple(view.commands.authorize(rule.rule) for rule in missing),
        )
    if unknown:
        return skipped(*about, message=f"TCP from {who} was not judged: {unknown[0]}")
    if unread:
        reason = view.aws.refused.get("DescribeSecurityGroups") or view.aws.refused.get("GetManagedPrefixListEntries")
        names = listing(dict.fromkeys(unread))
        return skipped(
            *about, message=f"TCP from {who} was not judged: {names} could not be read: {reason or 'EC2 did not tell'}"
        )
    ports = listing(f"{flow.use.port} ({flow.use.purpose})" for flow, _ in answers)
    return passed(*about, message=f"security groups let TCP from {who} pass", evidence=ports)


# --- open to the world


def _open_to_world(context: Context) -> Iterator[Result]:
    if not concerns_ec2(context):
        return
    view = Ec2View(context)
    if context.aws is None:
        yield skipped(message=view.why_not())
        return
    tcp = _Tcp(view)
    flows: dict[str, list[_Flow]] = {}
    for flow in _flows(context):
        flows.setdefault(flow.target, []).append(flow)
    for host in context.plan.hosts:
        if view.instance(host) is None:
            yield skipped(host, message=f"not checked: {view.why_not(host)}")
            continue
        inner, outer = _planned_ports(context.instances_on(host))
        rules = world_open_ports(view.aws, host, (*inner, *outer))
        for ports, severity in ((inner, Severity.ERROR), (outer, Severity.WARNING)):
            found = {port: rules[port] for port in ports if port in rules}
            if found:
                to_host = [flow for flow in flows.get(host, ()) if flow.use.port in found]
                yield _exposed(tcp, host, ports, found, severity, to_host)
        unread = unread_groups(view.aws, host)
        if unread:
            reason = view.aws.refused.get("DescribeSecurityGroups", "EC2 told nothing about it (another owner?)")
            yield skipped(host, message=f"security group {listing(unread)} could not be read: {reason}")
        elif not rules:
            yield passed(
                host, message="no planned port is open to the internet", evidence=listing((*inner, *outer)) or "no port"
            )


def _planned_ports(instances: Iterable[InstancePlan]) -> tuple[dict[int, str], dict[int, str]]:
    """Ports that others can reach, with their purpose: those that nobody outside should, and those of the router."""
    inner: dict[int, str] = {}
    outer: dict[int, str] = {}
    for instance in instances:
        for use in instance.ports:
            bound = parse_address(use.address)
            if bound is not None and bound.is_loopback:
                continue
            if instance.role == "router":
                outer[use.port] = f"router {use.purpose}"
            else:
                inner[use.port] = use.purpose
    return inner, outer


def _exposed(
    tcp: _Tcp,
    host: str,
    ports: Mapping[int, str],
    found: Mapping[int, tuple[Rule, ...]],
    severity: Severity,
    flows: Iterable[_Flow],
) -> Result:
    view = tcp.view
    rules = list(dict.fromkeys(rule for some in found.values() for rule in some))
    public = [address for one in view.interfaces(host) for address in one.public_addresses]
    login = _ssh_port(view.context, host)
    with_login = any(rule.covers_tcp(login) for rule in rules)
    needed = tcp.missing_without(flows, rules)
    lines = [view.commands.authorize(rule.rule) for rule in needed]
    if not with_login:
        lines += [view.commands.revoke(rule) for rule in rules]
    inside = severity is Severity.ERROR
    return failed(
        host,
        message="open to the whole internet: TCP " + listing(f"{port} ({ports[port]})" for port in found),
        evidence="; ".join(f"{rule.group}: {rule.traffic} from {rule.peer}" for rule in rules)
        + ("; public address: " + listing(public) if public else "; the instance has no public address now"),
        fix=(
            "allow these ports for the groups of the other hosts only, and remove the rule"
            if inside
            else "allow the router's ports for the networks of your clients only, and remove the rule"
        )
        + (
            f"; the rule also lets SSH (port {login}) in: first add a rule for your own network, then remove it by hand"
            if with_login
            else ""
        ),
        commands=lines,
        severity=severity,
    )


def _ssh_port(context: Context, host: str) -> int:
    spec: Any = context.spec
    for one in (*spec.prefill.hosts, *spec.decode.hosts):
        if one.name == host and one.ssh_port:
            return int(one.ssh_port)
    return int(spec.ssh.port or SSH_PORT)


_RULES = "https://docs.aws.amazon.com/vpc/latest/userguide/security-group-rules.html"

CHECKS: tuple[Check, ...] = (
    Check(
        id="SG004",
        title="Security groups let the planned TCP ports pass",
        severity=Severity.ERROR,
        what="The NIXL side channel between prefill and decode in both directions, and the API of every instance from "
        "the router's host: an outbound rule where the connection starts and an inbound rule where it ends, by group, "
        "address or prefix list. Telemetry is read through SSH and needs no rule.",
        why="Without the side channel no handshake takes place and every transfer fails; without the API the router "
        "has nobody to ask.",
        fix="Allow the ports between the groups; `pdctl doctor --fix-commands` prints the commands. Whether a port is "
        "really open is tried by the checks of the area NET.",
        run=_between,
        sources=(_RULES,),
    ),
    Check(
        id="SG005",
        title="No planned port is open to the internet",
        severity=Severity.ERROR,
        what="Inbound rules of all groups of the instance that let 0.0.0.0/0 or ::/0 (or a network almost as large, "
        "also by prefix list) connect to a planned port that is not bound to loopback. Side channel, API and telemetry "
        "are an error, the router a warning, with and without a public address: an address or a load balancer is "
        "added sooner than a rule is removed.",
        why="The side channel never asks who is there, and the API only where a key was set. Whoever reaches the side "
        "channel can read the layout of the KV cache and disturb transfers; whoever reaches the API uses the model.",
        fix="Allow the ports for the groups of the other hosts, and the router for your clients' networks.",
        run=_open_to_world,
        sources=(_RULES, "https://docs.vllm.ai/en/latest/usage/security.html"),
    ),
)
