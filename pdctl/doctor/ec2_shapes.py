"""Reads the shapes of the EC2 API: interfaces of an instance, rules of a security group. Pure.

Nothing here fails: the input may be a file that someone put together, so a value of another type than the API has
counts as absent. Field names are boto3's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

EFA_INTERFACES = frozenset({"efa", "efa-only"})
"""Values of ``InterfaceType`` that carry EFA traffic. ``efa-only`` has no IP address."""

ALL_PROTOCOLS = "-1"


def text(value: object) -> str:
    """A string of the API, or an empty one."""
    return value if isinstance(value, str) else ""


def number(value: object) -> int | None:
    """An integer of the API, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def mapping(value: object) -> Mapping[str, Any]:
    """A structure of the API, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: object) -> Iterator[Mapping[str, Any]]:
    """The structures in a list of the API."""
    if isinstance(value, (list, tuple)):
        yield from (one for one in value if isinstance(one, Mapping))


@dataclass(frozen=True)
class Interface:
    """One network interface of an instance.

    Attributes:
        id: ``eni-...``.
        kind: ``interface`` (ordinary), ``efa`` (with IP) or ``efa-only``; other words for other uses of the cloud.
        groups: ids of its security groups.
        group_names: their names, in the same order; empty where not told.
        card: index of its network card.
        device: device index on that card.
        primary: whether it is the instance's first interface.
        attached: whether it is attached now.
        addresses: its private addresses, IPv4 and IPv6.
        public_addresses: addresses under which the internet reaches it. IPv6 addresses are private and public.
    """

    id: str
    kind: str
    groups: tuple[str, ...]
    group_names: tuple[str, ...] = ()
    vpc_id: str = ""
    subnet_id: str = ""
    card: int | None = None
    device: int | None = None
    primary: bool = False
    attached: bool = True
    addresses: tuple[str, ...] = ()
    public_addresses: tuple[str, ...] = ()

    @property
    def is_efa(self) -> bool:
        """Whether EFA traffic uses it."""
        return self.kind in EFA_INTERFACES


def interfaces_of(instance: Mapping[str, Any]) -> tuple[Interface, ...]:
    """Interfaces of an instance of ``describe_instances``, by card and device."""
    found = [_interface(one) for one in mappings(instance.get("NetworkInterfaces"))]
    return tuple(sorted(found, key=lambda one: (one.card or 0, one.device or 0, one.id)))


def _interface(described: Mapping[str, Any]) -> Interface:
    attachment = mapping(described.get("Attachment"))
    private = [text(described.get("PrivateIpAddress"))]
    public = [text(mapping(described.get("Association")).get("PublicIp"))]
    for one in mappings(described.get("PrivateIpAddresses")):
        private.append(text(one.get("PrivateIpAddress")))
        public.append(text(mapping(one.get("Association")).get("PublicIp")))
    ipv6 = [text(one.get("Ipv6Address")) for one in mappings(described.get("Ipv6Addresses"))]
    groups = {text(one.get("GroupId")): text(one.get("GroupName")) for one in mappings(described.get("Groups"))}
    groups.pop("", None)
    card, device = number(attachment.get("NetworkCardIndex")), number(attachment.get("DeviceIndex"))
    return Interface(
        id=text(described.get("NetworkInterfaceId")),
        # The API leaves the type out in some old answers; then it is an ordinary one.
        kind=text(described.get("InterfaceType")) or "interface",
        groups=tuple(groups),
        group_names=tuple(groups.values()),
        vpc_id=text(described.get("VpcId")),
        subnet_id=text(described.get("SubnetId")),
        card=card,
        device=device,
        primary=device == 0 and not card,
        attached=text(attachment.get("Status")) not in ("detached", "detaching"),
        addresses=_distinct((*private, *ipv6)),
        public_addresses=_distinct((*public, *ipv6)),
    )


def instance_addresses(instance: Mapping[str, Any]) -> frozenset[str]:
    """Every address and DNS name by which an instance is known."""
    names = [text(instance.get(key)) for key in ("PrivateIpAddress", "PublicIpAddress", "Ipv6Address")]
    names += [text(instance.get(key)).lower() for key in ("PrivateDnsName", "PublicDnsName")]
    for interface in interfaces_of(instance):
        names += [*interface.addresses, *interface.public_addresses]
    return frozenset(name for name in names if name)


def state_of(instance: Mapping[str, Any]) -> str:
    """``running``, ``stopped``, ...; empty if it is not told."""
    return text(mapping(instance.get("State")).get("Name"))


@dataclass(frozen=True)
class Rule:
    """One rule of a security group with one source (inbound) or destination (outbound).

    Attributes:
        group: the group that has it.
        egress: outbound, else inbound.
        protocol: ``-1`` for all, ``tcp``, ``udp``, ``icmp``, or a protocol number.
        first: first port; None for all. Of ``icmp`` it is a type, which no check looks at.
        last: last port.
        peer_group: id of the group that it names; empty if it names none.
        elsewhere: the named group belongs to another VPC.
        cidr: network that it names; empty if it names none.
        prefix_list: id of the prefix list that it names; empty if it names none.
    """

    group: str
    egress: bool
    protocol: str
    first: int | None = None
    last: int | None = None
    peer_group: str = ""
    elsewhere: bool = False
    cidr: str = ""
    prefix_list: str = ""

    @property
    def all_traffic(self) -> bool:
        """Whether it is for all protocols, the only kind that covers EFA."""
        return self.protocol == ALL_PROTOCOLS

    def covers_tcp(self, port: int) -> bool:
        """Whether it is for this TCP port."""
        if self.all_traffic:
            return True
        # Port numbers may be left out, or -1 in the API's flat form: all of them.
        first = 0 if self.first in (None, -1) else self.first
        last = 65535 if self.last in (None, -1) else self.last
        return self.protocol in ("tcp", "6") and first is not None and last is not None and first <= port <= last

    @property
    def traffic(self) -> str:
        """What it is for, in words."""
        if self.all_traffic:
            return "all traffic"
        name = {"6": "tcp", "17": "udp", "1": "icmp"}.get(self.protocol, self.protocol)
        if not name.isalpha():
            name = f"protocol {name}"
        if self.first in (None, -1) or self.last in (None, -1):
            return f"all {name}"
        return f"{name} {self.first}" if self.first == self.last else f"{name} {self.first}-{self.last}"

    @property
    def peer(self) -> str:
        """What it names, in words."""
        if self.peer_group:
            return f"{self.peer_group} of another VPC" if self.elsewhere else self.peer_group
        return self.cidr or self.prefix_list


@dataclass(frozen=True)
class Group:
    """One security group with its rules."""

    id: str
    name: str = ""
    vpc_id: str = ""
    rules: tuple[Rule, ...] = ()


def read_group(described: Mapping[str, Any]) -> Group:
    """A group of ``describe_security_groups``. There, rules of the same protocol and ports come merged in one entry."""
    group, vpc = text(described.get("GroupId")), text(described.get("VpcId"))
    rules: list[Rule] = []
    for key, egress in (("IpPermissions", False), ("IpPermissionsEgress", True)):
        for permission in mappings(described.get(key)):
            rules += _rules(group, vpc, egress, permission)
    return Group(group, text(described.get("GroupName")), vpc, tuple(dict.fromkeys(rules)))


def read_groups(described: Mapping[str, Mapping[str, Any]]) -> dict[str, Group]:
    """Groups by id."""
    return {group: read_group(one) for group, one in described.items()}


def _rules(group: str, vpc: str, egress: bool, permission: Mapping[str, Any]) -> Iterator[Rule]:
    protocol = text(permission.get("IpProtocol"))
    all_traffic = protocol == ALL_PROTOCOLS
    first = None if all_traffic else number(permission.get("FromPort"))
    last = None if all_traffic else number(permission.get("ToPort"))
    for pair in mappings(permission.get("UserIdGroupPairs")):
        named = text(pair.get("VpcId"))
        elsewhere = bool(text(pair.get("VpcPeeringConnectionId"))) or bool(named and vpc and named != vpc)
        if peer := text(pair.get("GroupId")):
            yield Rule(group, egress, protocol, first, last, peer_group=peer, elsewhere=elsewhere)
    cidrs = [text(one.get("CidrIp")) for one in mappings(permission.get("IpRanges"))]
    cidrs += [text(one.get("CidrIpv6")) for one in mappings(permission.get("Ipv6Ranges"))]
    yield from (Rule(group, egress, protocol, first, last, cidr=cidr) for cidr in cidrs if cidr)
    for one in mappings(permission.get("PrefixListIds")):
        if prefix := text(one.get("PrefixListId")):
            yield Rule(group, egress, protocol, first, last, prefix_list=prefix)


def groups_of_flat_rules(rules: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Groups in the form of ``describe_security_groups``, from the flat rules of ``describe_security_group_rules``."""
    groups: dict[str, dict[str, Any]] = {}
    for rule in rules:
        group = text(rule.get("GroupId"))
        if not group:
            continue
        described = groups.setdefault(group, {"GroupId": group, "IpPermissions": [], "IpPermissionsEgress": []})
        named = mapping(rule.get("ReferencedGroupInfo"))
        permission: dict[str, Any] = {"IpProtocol": text(rule.get("IpProtocol"))}
        for key in ("FromPort", "ToPort"):
            if permission["IpProtocol"] != ALL_PROTOCOLS and (port := number(rule.get(key))) is not None:
                permission[key] = port
        if named:
            permission["UserIdGroupPairs"] = [dict(named)]
        if cidr := text(rule.get("CidrIpv4")):
            permission["IpRanges"] = [{"CidrIp": cidr}]
        if cidr := text(rule.get("CidrIpv6")):
            permission["Ipv6Ranges"] = [{"CidrIpv6": cidr}]
        if prefix := text(rule.get("PrefixListId")):
            permission["PrefixListIds"] = [{"PrefixListId": prefix}]
        described["IpPermissionsEgress" if rule.get("IsEgress") is True else "IpPermissions"].append(permission)
    return groups


@lru_cache(maxsize=4096)
def network(cidr: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """A network, or None for what is none."""
    try:
        return ipaddress.ip_network(cidr, strict=False)
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def address(value: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, or None for a name."""
    try:
        return ipaddress.ip_address(value)
    except ValueError:
        return None


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if value))
