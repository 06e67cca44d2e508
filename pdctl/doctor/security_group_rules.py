"""What security groups let through: EFA between interfaces, TCP between addresses, ports open to the world. Pure.

EFA is matched by rules for *all traffic* that name a *security group*, and by nothing else: its packets have neither
IPv4 nor IPv6 addresses, so ``0.0.0.0/0``, ``::/0`` and prefix lists never cover them, in neither direction
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html, open-mpi/ompi#6795,
gardener/gardener-extension-provider-aws#1832). AWS documents one form: one group with an inbound and an outbound
all-traffic rule that name the group itself. Whether replies are implied is not documented, so both directions are
wanted on both sides. EFA does not leave its VPC, so a rule that names a group of another VPC does not count.

TCP is the ordinary case: stateful, several groups of an interface add up, nothing denies.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import TypeVar

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.ec2_shapes import ALL_PROTOCOLS, Group, Rule, address, interfaces_of, network, read_groups

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

WORLD_PREFIX = {4: 7, 6: 15}
"""A network with a prefix this short (by IP version) is the internet, not somebody's own addresses."""
# Unique local addresses of IPv6 (fc00::/7) are a large network too.
_PUBLIC = {4: ip_network("0.0.0.0/0"), 6: ip_network("2000::/3")}


@dataclass(frozen=True)
class AwsCommands:
    """Writes command lines for the AWS CLI, quoted for a POSIX shell.

    Attributes:
        region: for ``--region``; left out if empty.
        profile: for ``--profile``; left out if empty.
    """

    region: str = ""
    profile: str = ""

    def ec2(self, action: str, *arguments: str) -> str:
        """``aws ec2 ACTION ...``."""
        line = ["aws", "ec2", action, *arguments]
        if self.region:
            line += ["--region", self.region]
        if self.profile:
            line += ["--profile", self.profile]
        return shlex.join(line)

    def set_groups(self, interface: str, groups: Iterable[str]) -> str:
        """Give an interface these groups and no others. Takes effect at once, without a restart."""
        return self.ec2(
            "modify-network-interface-attribute", "--network-interface-id", interface, "--groups", *groups
        )  # fmt: skip

    def revoke(self, rule: Rule) -> str:
        """Remove one rule."""
        action = f"revoke-security-group-{'egress' if rule.egress else 'ingress'}"
        return self.ec2(action, "--group-id", rule.group, "--ip-permissions", _permission(rule))

    def authorize(self, rule: Rule) -> str:
        """Add one rule."""
        action = f"authorize-security-group-{'egress' if rule.egress else 'ingress'}"
        return self.ec2(action, "--group-id", rule.group, "--ip-permissions", _permission(rule))


def _permission(rule: Rule) -> str:
    """A rule in the shorthand of ``--ip-permissions``."""
    parts = [f"IpProtocol={rule.protocol}"]
    if not rule.all_traffic and rule.first is not None and rule.last is not None:
        parts += [f"FromPort={rule.first}", f"ToPort={rule.last}"]
    if rule.peer_group:
        parts.append(f"UserIdGroupPairs=[{{GroupId={rule.peer_group}}}]")
    elif rule.prefix_list:
        parts.append(f"PrefixListIds=[{{PrefixListId={rule.prefix_list}}}]")
    elif ":" in rule.cidr:
        parts.append(f"Ipv6Ranges=[{{CidrIpv6={rule.cidr}}}]")
    else:
        parts.append(f"IpRanges=[{{CidrIp={rule.cidr}}}]")
    return ",".join(parts)


@dataclass(frozen=True)
class MissingRule:
    """A rule that has to be added.

    Attributes:
        rule: what to add; ``rule.group`` is the group to change.
        found: what is there instead, in words.
    """

    rule: Rule
    found: str = ""

    def __str__(self) -> str:
        rule = self.rule
        peer = "itself" if rule.peer_group == rule.group else rule.peer
        way = f"outbound rule for {rule.traffic} to" if rule.egress else f"inbound rule for {rule.traffic} from"
        return f"{rule.group} has no {way} {peer}"


# --- EFA


@dataclass(frozen=True)
class EfaAnswer:
    """Whether EFA traffic passes between two interfaces.

    Attributes:
        reachable: rules exist in all four places: out of each, into each.
        documented: and one group that both have holds them, which is the form AWS documents.
        missing: rules that would make it pass; when it passes in another form than the documented one and both have
            a group in common, rules that would bring the documented form. Else empty.
        unreadable: groups of the two that could not be read. With such a group nothing is certain.
        without_self_rules: groups of the two that lack the rules while another group of the same interface has them.
    """

    reachable: bool
    documented: bool
    missing: tuple[MissingRule, ...] = ()
    unreadable: tuple[str, ...] = ()
    without_self_rules: tuple[str, ...] = ()


def has_self_rules(group: Group) -> bool:
    """Whether a group lets all traffic to and from itself through."""
    return all(_opens_efa([group], egress, {group.id}) for egress in (False, True))


def efa_between(first: Sequence[str], second: Sequence[str], groups: Mapping[str, Group]) -> EfaAnswer:
    """Judge EFA traffic between two interfaces.

    Args:
        first: ids of the groups of one interface.
        second: ids of the groups of the other.
        groups: all groups that could be read, by id.
    """
    unreadable = tuple(group for group in dict.fromkeys((*first, *second)) if group not in groups)
    of_first = [groups[group] for group in first if group in groups]
    of_second = [groups[group] for group in second if group in groups]
    shared = [group for group in of_first if group in of_second]
    reachable = all(
        _opens_efa(own, egress, {group.id for group in other})
        for own, other in ((of_first, of_second), (of_second, of_first))
        for egress in (False, True)
    )
    documented = any(has_self_rules(group) for group in shared)
    if documented:
        lacking = tuple(dict.fromkeys(one.id for one in (*of_first, *of_second) if not has_self_rules(one)))
        return EfaAnswer(True, True, unreadable=unreadable, without_self_rules=lacking)
    missing = _missing_self_rules(shared) if shared else () if reachable else _missing_cross(of_first, of_second)
    return EfaAnswer(reachable, False, missing, unreadable)


def _opens_efa(owners: Iterable[Group], egress: bool, peers: Collection[str]) -> bool:
    return any(_lets_efa(rule, egress, peers) for group in owners for rule in group.rules)


def _lets_efa(rule: Rule, egress: bool, peers: Collection[str]) -> bool:
    return rule.egress is egress and rule.all_traffic and rule.peer_group in peers and not rule.elsewhere


def _missing_self_rules(shared: Sequence[Group]) -> tuple[MissingRule, ...]:
    """What the best common group lacks."""

    def lacking(group: Group) -> list[bool]:
        return [egress for egress in (False, True) if not _opens_efa([group], egress, {group.id})]

    # Nobody wants their VPC's default group changed if there is another.
    best = min(shared, key=lambda group: (len(lacking(group)), group.name == "default"))
    return tuple(_missing([best], egress, [best]) for egress in lacking(best))


def _missing_cross(of_first: Sequence[Group], of_second: Sequence[Group]) -> tuple[MissingRule, ...]:
    """What is missing between interfaces that have no group in common."""
    missing = []
    for own, other in ((of_first, of_second), (of_second, of_first)):
        for egress in (True, False):
            if own and other and not _opens_efa(own, egress, {group.id for group in other}):
                missing.append(_missing(own, egress, other))
    return tuple(missing)


def _missing(own: Sequence[Group], egress: bool, other: Sequence[Group]) -> MissingRule:
    def first(groups: Sequence[Group]) -> Group:
        return min(groups, key=lambda group: group.name == "default")

    rule = Rule(first(own).id, egress, ALL_PROTOCOLS, peer_group=first(other).id)
    return MissingRule(rule, _found_instead(own, egress, {group.id for group in other}))


def _found_instead(own: Iterable[Group], egress: bool, peers: Collection[str]) -> str:
    """Rules that look as if they did it, and why they do not."""
    rules = [rule for group in own for rule in group.rules if rule.egress is egress]
    way = "outbound" if egress else "inbound"
    parts = []
    naming = [rule for rule in rules if rule.peer_group in peers and not rule.elsewhere]
    if naming:
        traffic = ", ".join(dict.fromkeys(rule.traffic for rule in naming))
        parts.append(f"the group is named, but for {traffic} alone, not for all traffic")
    elsewhere = [rule.peer_group for rule in rules if rule.peer_group and rule.elsewhere]
    if elsewhere:
        parts.append(f"{', '.join(dict.fromkeys(elsewhere))} belongs to another VPC, which EFA cannot reach")
    others = [rule.peer_group for rule in rules if rule.peer_group not in ("", *peers) and not rule.elsewhere]
    if others:
        parts.append(f"the rules name {', '.join(dict.fromkeys(others))}")
    ranges = [rule.peer for rule in rules if rule.all_traffic and (rule.cidr or rule.prefix_list)]
    if ranges:
        parts.append(f"all traffic is open for {', '.join(dict.fromkeys(ranges))}, but addresses do not cover EFA")
    return f"{way}: " + ("; ".join(parts) if parts else "no rule for all traffic that names a group")


# --- TCP


@dataclass(frozen=True)
class Endpoint:
    """One end of a TCP connection.

    Attributes:
        groups: ids of the groups of its interface.
        address: the address the other end sees.
        private: whether that is its private address; rules that name a group match private addresses alone
            (https://docs.aws.amazon.com/vpc/latest/userguide/security-group-rules.html).
    """

    groups: tuple[str, ...]
    address: str
    private: bool = True


@dataclass(frozen=True)
class TcpAnswer:
    """Whether a TCP connection passes.

    Attributes:
        allowed: None if that is unknown.
        missing: rules that would let it pass.
        unknown: groups and prefix lists that could not be read and that it may depend on.
    """

    allowed: bool | None
    missing: tuple[MissingRule, ...] = ()
    unknown: tuple[str, ...] = ()


def tcp_between(
    source: Endpoint,
    target: Endpoint,
    port: int,
    groups: Mapping[str, Group],
    prefix_lists: Mapping[str, Sequence[str]],
) -> TcpAnswer:
    """Judge a TCP connection: it must be let out at the source and in at the target. The replies follow.

    Args:
        source: who connects.
        target: who listens.
        port: where it listens.
        groups: all groups that could be read, by id.
        prefix_lists: networks of the prefix lists that could be read, by id.
    """
    missing: list[MissingRule] = []
    unknown: list[str] = []
    for own, other, egress in ((source, target, True), (target, source, False)):
        known = [groups[group] for group in own.groups if group in groups]
        if any(_lets_tcp(rule, egress, other, port, prefix_lists) for group in known for rule in group.rules):
            continue
        unread = [group for group in own.groups if group not in groups]
        unread += [
            rule.prefix_list
            for group in known
            for rule in group.rules
            if rule.egress is egress and rule.covers_tcp(port) and rule.prefix_list not in ("", *prefix_lists)
        ]
        unknown += unread
        if known and not unread:
            peer, cidr = _peer_for_tcp(other, groups)
            owner = min(known, key=lambda group: group.name == "default")
            rule = Rule(owner.id, egress, "tcp", port, port, peer_group=peer, cidr=cidr)
            missing.append(MissingRule(rule, _tcp_found(known, egress, port)))
    if missing:
        return TcpAnswer(False, tuple(missing), tuple(dict.fromkeys(unknown)))
    if unknown:
        return TcpAnswer(None, (), tuple(dict.fromkeys(unknown)))
    # An interface without any group lets nothing through; the API does not allow one to be.
    return TcpAnswer(bool(source.groups) and bool(target.groups))


def _lets_tcp(
    rule: Rule, egress: bool, peer: Endpoint, port: int, prefix_lists: Mapping[str, Sequence[str]]
) -> bool:  # fmt: skip
    if rule.egress is not egress or not rule.covers_tcp(port):
        return False
    if rule.peer_group:
        return peer.private and rule.peer_group in peer.groups
    cidrs = prefix_lists.get(rule.prefix_list, ()) if rule.prefix_list else (rule.cidr,)
    return any(_contains(cidr, peer.address) for cidr in cidrs)


def _contains(cidr: str, value: str) -> bool:
    net, one = network(cidr), address(value)
    return net is not None and one is not None and net.version == one.version and one in net


def _peer_for_tcp(other: Endpoint, groups: Mapping[str, Group]) -> tuple[str, str]:
    """Group to be named in a rule, or else the network of the single address."""
    named = sorted(other.groups, key=lambda group: group in groups and groups[group].name == "default")
    if named and other.private:
        return named[0], ""
    return "", f"{other.address}/{128 if ':' in other.address else 32}"


def _tcp_found(own: Iterable[Group], egress: bool, port: int) -> str:
    way = "outbound" if egress else "inbound"
    rules = [rule for group in own for rule in group.rules if rule.egress is egress]
    here = [f"{rule.traffic} {'to' if egress else 'from'} {rule.peer}" for rule in rules if rule.covers_tcp(port)]
    if here:
        return f"{way}: this port is open for others only ({', '.join(dict.fromkeys(here))})"
    traffic = ", ".join(dict.fromkeys(rule.traffic for rule in rules))
    return f"{way}: " + (f"only {traffic}" if traffic else "no rule at all")


def joined(missing: Iterable[MissingRule]) -> tuple[MissingRule, ...]:
    """The same rules, those of consecutive ports put into one. For rules of one port each."""

    def order(one: MissingRule) -> tuple[object, ...]:
        rule = one.rule
        return rule.group, rule.egress, rule.peer_group, rule.cidr, rule.first or 0

    kept: list[MissingRule] = []
    for one in sorted(dict.fromkeys(missing), key=order):
        last = kept[-1].rule if kept else None
        if last is not None and last.last is not None and one.rule.first == last.last + 1:
            widened = dataclasses.replace(last, last=one.rule.last)
            if dataclasses.replace(widened, first=one.rule.first) == one.rule:
                kept[-1] = MissingRule(widened, kept[-1].found)
                continue
        kept.append(one)
    return tuple(kept)


# --- open to the world


def world_rules(
    group_ids: Iterable[str], port: int, groups: Mapping[str, Group], prefix_lists: Mapping[str, Sequence[str]]
) -> tuple[Rule, ...]:
    """Inbound rules that let the whole internet connect to a TCP port."""
    return tuple(
        rule
        for group in group_ids
        if group in groups
        for rule in groups[group].rules
        if not rule.egress and rule.covers_tcp(port) and _is_world(rule, prefix_lists)
    )


def _is_world(rule: Rule, prefix_lists: Mapping[str, Sequence[str]]) -> bool:
    cidrs = prefix_lists.get(rule.prefix_list, ()) if rule.prefix_list else (rule.cidr,)
    nets = [net for cidr in cidrs if (net := network(cidr)) is not None]
    return any(net.prefixlen <= WORLD_PREFIX[net.version] and net.overlaps(_PUBLIC[net.version]) for net in nets)


def world_open_ports(aws: AwsFacts, host: str, ports: Iterable[int]) -> dict[int, tuple[Rule, ...]]:
    """Ports of a host that the whole internet may connect to, with the rules that say so.

    The groups of all its interfaces with an address count. A group or prefix list that could not be read says nothing:
    see :func:`unread_groups`.

    Args:
        aws: answers of the EC2 API.
        host: its name in the cluster file.
        ports: TCP ports to look at.
    """
    groups = read_groups(aws.security_groups)
    attached = _groups_with_addresses(aws, host)
    found = {port: world_rules(attached, port, groups, aws.prefix_lists) for port in ports}
    return {port: rules for port, rules in found.items() if rules}


def unread_groups(aws: AwsFacts, host: str) -> tuple[str, ...]:
    """Groups of a host's interfaces that :func:`world_open_ports` could not look into."""
    return tuple(group for group in _groups_with_addresses(aws, host) if group not in aws.security_groups)


def _groups_with_addresses(aws: AwsFacts, host: str) -> tuple[str, ...]:
    # An `efa-only` interface has no address to connect to, whatever its groups say.
    interfaces = [one for one in interfaces_of(aws.instances.get(host, {})) if one.addresses]
    return tuple(dict.fromkeys(group for one in interfaces for group in one.groups))


@dataclass
class Evaluator:
    """Judges many interfaces of a few groups: the same question is answered once.

    Attributes:
        groups: all groups that could be read, by id.
        prefix_lists: networks of the prefix lists that could be read, by id.
    """

    groups: Mapping[str, Group]
    prefix_lists: Mapping[str, Sequence[str]]
    _efa: dict[tuple[tuple[str, ...], tuple[str, ...]], EfaAnswer] = field(default_factory=dict, repr=False)
    _tcp: dict[tuple[Endpoint, Endpoint, int], TcpAnswer] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, aws: AwsFacts) -> Evaluator:
        """One for the answers of the EC2 API."""
        return cls(read_groups(aws.security_groups), aws.prefix_lists)

    def efa(self, first: tuple[str, ...], second: tuple[str, ...]) -> EfaAnswer:
        """See :func:`efa_between`."""
        return _remember(self._efa, (first, second), lambda: efa_between(first, second, self.groups))

    def tcp(self, source: Endpoint, target: Endpoint, port: int) -> TcpAnswer:
        """See :func:`tcp_between`."""
        key = (source, target, port)
        return _remember(self._tcp, key, lambda: tcp_between(source, target, port, self.groups, self.prefix_lists))

    def efa_groups(self, attached: Iterable[str]) -> Iterator[str]:
        """Those of some groups that are what AWS asks for EFA."""
        return (one for one in dict.fromkeys(attached) if one in self.groups and has_self_rules(self.groups[one]))


def _remember(known: dict[_K, _V], key: _K, answer: Callable[[], _V]) -> _V:
    if key not in known:
        known[key] = answer()
    return known[key]
