"""The security group evaluator: against a model that tries packets, and the shapes that people trip over."""

from __future__ import annotations

import ipaddress
import itertools
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.ec2_shapes import Group, Rule, interfaces_of, read_group, read_groups
from pdctl.doctor.security_group_rules import (
    AwsCommands,
    Endpoint,
    MissingRule,
    efa_between,
    joined,
    tcp_between,
    unread_groups,
    world_open_ports,
    world_rules,
)
from tests.unit.doctor.ec2_cases import recorded

# Time limits of single examples fail on a busy machine, and say nothing about the code.
UNHURRIED = settings(deadline=None)
VPC = "vpc-1"
PREFIX_LISTS = {"pl-inside": ["10.0.0.0/24", "10.0.1.0/24"], "pl-world": ["0.0.0.0/0"]}


# --- a model of packets, which knows nothing of the code under test


@dataclass(frozen=True)
class Wire:
    """One rule as a person would write it down."""

    owner: str
    outbound: bool
    protocol: str
    ports: tuple[int, int] | None
    peer: tuple[str, str]  # ("group" | "peered" | "cidr" | "list", value)


@dataclass(frozen=True)
class Card:
    """One network interface."""

    groups: tuple[str, ...]
    ip: str


def matches(rule: Wire, other: Card, protocol: str, port: int, is_efa: bool) -> bool:
    kind, value = rule.peer
    if is_efa:
        return rule.protocol == "-1" and kind == "group" and value in other.groups
    if rule.protocol not in ("-1", protocol):
        return False
    if rule.ports is not None and not rule.ports[0] <= port <= rule.ports[1]:
        return False
    if kind in ("group", "peered"):
        return value in other.groups
    networks = PREFIX_LISTS[value] if kind == "list" else [value]
    address = ipaddress.ip_address(other.ip)
    return any(address in network for network in map(ipaddress.ip_network, networks))


def passes(rules: Sequence[Wire], source: Card, target: Card, protocol: str, port: int, *, is_efa: bool) -> bool:
    """Whether a packet gets out of one card and into the other."""
    out = any(
        rule.outbound and rule.owner in source.groups and matches(rule, target, protocol, port, is_efa)
        for rule in rules
    )
    into = any(
        not rule.outbound and rule.owner in target.groups and matches(rule, source, protocol, port, is_efa)
        for rule in rules
    )
    return out and into


def efa_works(rules: Sequence[Wire], one: Card, other: Card) -> bool:
    return passes(rules, one, other, "-1", 0, is_efa=True) and passes(rules, other, one, "-1", 0, is_efa=True)


def as_documented(rules: Sequence[Wire], one: Card, other: Card) -> bool:
    """Whether some common group alone would do for two cards that are in it and in nothing else."""
    for group in set(one.groups) & set(other.groups):
        own = [rule for rule in rules if rule.owner == group]
        alone = Card((group,), "10.0.0.1")
        if efa_works(own, alone, alone):
            return True
    return False


def described(rules: Iterable[Wire], groups: Iterable[str], *, merged: bool) -> dict[str, dict[str, Any]]:
    """The rules in the API's shape. Merged, as the API does it: one entry for each protocol and range of ports."""
    found: dict[str, dict[str, Any]] = {
        group: {"GroupId": group, "GroupName": group, "VpcId": VPC, "IpPermissions": [], "IpPermissionsEgress": []}
        for group in groups
    }
    for rule in rules:
        permissions = found[rule.owner]["IpPermissionsEgress" if rule.outbound else "IpPermissions"]
        head: dict[str, Any] = {"IpProtocol": rule.protocol}
        if rule.ports is not None:
            head |= {"FromPort": rule.ports[0], "ToPort": rule.ports[1]}
        same = [
            one for one in permissions if all(one.get(k) == head.get(k) for k in ("IpProtocol", "FromPort", "ToPort"))
        ]
        entry = same[0] if merged and same else {**head}
        if not (merged and same):
            permissions.append(entry)
        kind, value = rule.peer
        if kind == "group":
            entry.setdefault("UserIdGroupPairs", []).append({"GroupId": value, "UserId": "111122223333"})
        elif kind == "peered":
            pair = {"GroupId": value, "VpcId": "vpc-9", "VpcPeeringConnectionId": "pcx-1", "PeeringStatus": "active"}
            entry.setdefault("UserIdGroupPairs", []).append(pair)
        elif kind == "list":
            entry.setdefault("PrefixListIds", []).append({"PrefixListId": value})
        elif ":" in value:
            entry.setdefault("Ipv6Ranges", []).append({"CidrIpv6": value})
        else:
            entry.setdefault("IpRanges", []).append({"CidrIp": value})
    return found


NAMES = ("sg-a", "sg-b", "sg-c")
PEERS = st.one_of(
    st.tuples(st.just("group"), st.sampled_from(NAMES)),
    st.tuples(st.just("peered"), st.sampled_from(NAMES)),
    st.tuples(st.just("cidr"), st.sampled_from(["0.0.0.0/0", "::/0", "10.0.0.0/16", "10.0.0.7/32", "fd00::/8"])),
    st.tuples(st.just("list"), st.sampled_from(sorted(PREFIX_LISTS))),
)
TRAFFIC = st.sampled_from(
    [("-1", None), ("-1", None), ("tcp", (0, 65535)), ("tcp", (5600, 5607)), ("tcp", (22, 22)), ("udp", (0, 65535))]
)
RULES = st.lists(
    st.builds(
        lambda owner, outbound, traffic, peer: Wire(owner, outbound, traffic[0], traffic[1], peer),
        st.sampled_from(NAMES),
        st.booleans(),
        TRAFFIC,
        PEERS,
    ),
    max_size=12,
)
CARDS = st.builds(
    Card,
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple),
    st.sampled_from(["10.0.0.7", "10.0.1.9", "10.1.0.1", "fd00::7"]),
)


def with_rules(groups: dict[str, Group], missing: Iterable[MissingRule]) -> dict[str, Group]:
    changed = dict(groups)
    for one in missing:
        old = changed[one.rule.group]
        changed[old.id] = Group(old.id, old.name, old.vpc_id, (*old.rules, one.rule))
    return changed


@given(rules=RULES, one=CARDS, other=CARDS, merged=st.booleans())
@UNHURRIED
def test_efa_is_judged_as_a_model_of_packets_does(rules: list[Wire], one: Card, other: Card, merged: bool) -> None:
    groups = read_groups(described(rules, NAMES, merged=merged))

    answer = efa_between(one.groups, other.groups, groups)

    assert answer.reachable is efa_works(rules, one, other)
    assert answer.documented is as_documented(rules, one, other)
    assert answer.unreadable == ()
    assert answer.reachable or answer.missing


@given(rules=RULES, one=CARDS, other=CARDS)
@UNHURRIED
def test_the_missing_rules_are_enough_and_none_is_there_already(rules: list[Wire], one: Card, other: Card) -> None:
    groups = read_groups(described(rules, NAMES, merged=True))

    missing = efa_between(one.groups, other.groups, groups).missing

    assert all(rule.rule not in groups[rule.rule.group].rules for rule in missing)
    after = efa_between(one.groups, other.groups, with_rules(groups, missing))
    assert after.reachable
    assert after.documented or not set(one.groups) & set(other.groups)


@given(rules=RULES, one=CARDS, other=CARDS, port=st.sampled_from([21, 22, 5599, 5600, 5607, 5608]))
@UNHURRIED
def test_tcp_is_judged_as_a_model_of_packets_does(rules: list[Wire], one: Card, other: Card, port: int) -> None:
    groups = read_groups(described(rules, NAMES, merged=True))
    source, target = Endpoint(one.groups, one.ip), Endpoint(other.groups, other.ip)

    answer = tcp_between(source, target, port, groups, PREFIX_LISTS)

    assert answer.allowed is passes(rules, one, other, "tcp", port, is_efa=False)
    assert bool(answer.missing) is not answer.allowed
    after = tcp_between(source, target, port, with_rules(groups, answer.missing), PREFIX_LISTS)
    assert after.allowed is True


@given(rules=RULES, card=CARDS, port=st.sampled_from([22, 5600, 5608]))
@UNHURRIED
def test_open_to_the_world_means_that_a_stranger_gets_in(rules: list[Wire], card: Card, port: int) -> None:
    groups = read_groups(described(rules, NAMES, merged=True))
    strangers = [Card((), "198.51.100.1"), Card((), "2600::1")]

    found = world_rules(card.groups, port, groups, PREFIX_LISTS)

    everything_out = [Wire("out", True, "-1", None, ("cidr", cidr)) for cidr in ("0.0.0.0/0", "::/0")]
    assert bool(found) is any(
        passes([*rules, *everything_out], Card(("out",), stranger.ip), card, "tcp", port, is_efa=False)
        for stranger in strangers
    )


@given(rules=RULES, one=CARDS, other=CARDS, unread=st.sampled_from(NAMES))
@UNHURRIED
def test_a_group_that_could_not_be_read_is_named(rules: list[Wire], one: Card, other: Card, unread: str) -> None:
    groups = read_groups(described(rules, NAMES, merged=True))
    del groups[unread]

    answer = efa_between(one.groups, other.groups, groups)

    assert answer.unreadable == ((unread,) if unread in (*one.groups, *other.groups) else ())
    tcp = tcp_between(Endpoint(one.groups, one.ip), Endpoint(other.groups, other.ip), 5600, groups, PREFIX_LISTS)
    if tcp.allowed is False:
        # Only what cannot depend on the missing group counts as closed.
        known = [rule for rule in rules if rule.owner != unread]
        everything = [
            Wire(unread, outbound, "-1", None, ("cidr", cidr))
            for outbound in (True, False)
            for cidr in ("0.0.0.0/0", "::/0")
        ]
        assert not passes([*known, *everything], one, other, "tcp", 5600, is_efa=False)


@pytest.mark.parametrize("outbound", [True, False])
def test_every_pair_of_one_rule_each_way_for_tiny_universes(outbound: bool) -> None:
    # Exhaustive where it is small: two groups, every set of self and cross rules.
    everything = [Wire(a, way, "-1", None, ("group", b)) for a in NAMES[:2] for b in NAMES[:2] for way in (True, False)]
    cards = [Card(groups, "10.0.0.1") for groups in (("sg-a",), ("sg-b",), ("sg-a", "sg-b"))]
    for chosen in itertools.product([False, True], repeat=len(everything)):
        rules = [rule for rule, taken in zip(everything, chosen, strict=True) if taken]
        groups = read_groups(described(rules, NAMES, merged=outbound))
        for one, other in itertools.combinations_with_replacement(cards, 2):
            answer = efa_between(one.groups, other.groups, groups)
            assert answer.reachable is efa_works(rules, one, other)
            assert answer.documented is as_documented(rules, one, other)


# --- single shapes


def group(*rules: Wire, name: str = "sg-a") -> dict[str, Group]:
    return read_groups(described(rules, (name,), merged=True))


def test_the_second_pair_of_a_permission_counts_as_the_first() -> None:
    good = read_group(recorded("sg-good-merged-permission")["SecurityGroups"][0])

    assert efa_between((good.id,), (good.id,), {good.id: good}).documented


def test_tcp_on_all_ports_is_not_all_traffic() -> None:
    groups = group(*(Wire("sg-a", way, "tcp", (0, 65535), ("group", "sg-a")) for way in (True, False)))

    answer = efa_between(("sg-a",), ("sg-a",), groups)

    assert not answer.reachable
    assert [one.rule.egress for one in answer.missing] == [False, True]
    assert all("named, but for tcp 0-65535 alone" in one.found for one in answer.missing)


def test_the_default_group_lacks_the_outbound_rule() -> None:
    groups = group(
        Wire("sg-a", False, "-1", None, ("group", "sg-a")), Wire("sg-a", True, "-1", None, ("cidr", "0.0.0.0/0"))
    )

    (missing,) = efa_between(("sg-a",), ("sg-a",), groups).missing

    assert str(missing) == "sg-a has no outbound rule for all traffic to itself"
    assert missing.found == "outbound: all traffic is open for 0.0.0.0/0, but addresses do not cover EFA"


def test_another_group_is_changed_rather_than_the_default_one() -> None:
    groups = read_groups(described([], ("sg-default", "sg-own"), merged=True))
    groups["sg-default"] = Group("sg-default", "default", VPC)

    missing = efa_between(("sg-default", "sg-own"), ("sg-default", "sg-own"), groups).missing

    assert {one.rule.group for one in missing} == {"sg-own"}


def test_a_group_that_lacks_the_rules_beside_one_that_has_them_is_told() -> None:
    own = [Wire("sg-a", way, "-1", None, ("group", "sg-a")) for way in (True, False)]
    groups = read_groups(described(own, ("sg-a", "sg-b"), merged=True))

    answer = efa_between(("sg-a", "sg-b"), ("sg-a",), groups)

    assert answer.documented
    assert answer.without_self_rules == ("sg-b",)


def test_a_rule_that_names_a_group_does_not_match_public_addresses() -> None:
    groups = group(*(Wire("sg-a", way, "-1", None, ("group", "sg-a")) for way in (True, False)))

    public = tcp_between(
        Endpoint(("sg-a",), "198.51.100.7", private=False), Endpoint(("sg-a",), "198.51.100.8", False), 80, groups, {}
    )

    assert public.allowed is False
    assert {one.rule.cidr for one in public.missing} == {"198.51.100.7/32", "198.51.100.8/32"}


def test_a_prefix_list_that_could_not_be_read_leaves_tcp_open_to_doubt() -> None:
    groups = group(*(Wire("sg-a", way, "-1", None, ("list", "pl-inside")) for way in (True, False)))
    end = Endpoint(("sg-a",), "10.0.0.7")

    assert tcp_between(end, end, 5600, groups, {}) == tcp_between(end, end, 5601, groups, {})
    assert tcp_between(end, end, 5600, groups, {}).allowed is None
    assert tcp_between(end, end, 5600, groups, {}).unknown == ("pl-inside",)
    assert tcp_between(end, end, 5600, groups, PREFIX_LISTS).allowed is True


@pytest.mark.parametrize(
    ("cidr", "is_world"),
    [("0.0.0.0/0", True), ("0.0.0.0/1", True), ("128.0.0.0/7", True), ("::/0", True), ("2000::/3", True),
     ("10.0.0.0/8", False), ("203.0.113.0/24", False), ("fd00::/16", False), ("nonsense", False)],
)  # fmt: skip
def test_which_networks_are_the_world(cidr: str, is_world: bool) -> None:
    groups = group(Wire("sg-a", False, "tcp", (5600, 5600), ("cidr", cidr)))

    assert bool(world_rules(("sg-a",), 5600, groups, {})) is is_world


def test_groups_of_interfaces_without_an_address_open_nothing_to_the_world() -> None:
    def card(number: int, group: str, address: str) -> dict[str, Any]:
        return {
            "NetworkInterfaceId": f"eni-{number}",
            "InterfaceType": "interface" if address else "efa-only",
            "Groups": [{"GroupId": group}],
            "PrivateIpAddress": address,
        }

    rules = [Wire("sg-b", False, "-1", None, ("cidr", "0.0.0.0/0"))]
    aws = AwsFacts(
        instances={"p1": {"NetworkInterfaces": [card(0, "sg-a", "10.0.0.7"), card(1, "sg-b", "")]}},
        security_groups=described(rules, ("sg-a", "sg-b"), merged=True),
    )

    assert world_open_ports(aws, "p1", [5600]) == {}
    aws.instances["p1"]["NetworkInterfaces"][0]["Groups"].append({"GroupId": "sg-b"})
    assert list(world_open_ports(aws, "p1", [5600])) == [5600]
    del aws.security_groups["sg-b"]
    assert unread_groups(aws, "p1") == ("sg-b",)


def test_commands_are_quoted_and_carry_region_and_profile() -> None:
    commands = AwsCommands("us-east-2", "my profile")
    rule = Rule("sg-a", True, "-1", peer_group="sg-a")

    line = commands.authorize(rule)

    assert shlex.split(line) == [
        "aws", "ec2", "authorize-security-group-egress", "--group-id", "sg-a",
        "--ip-permissions", "IpProtocol=-1,UserIdGroupPairs=[{GroupId=sg-a}]",
        "--region", "us-east-2", "--profile", "my profile",
    ]  # fmt: skip
    assert "'IpProtocol=-1,UserIdGroupPairs=[{GroupId=sg-a}]'" in line


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (Rule("sg-a", False, "tcp", 22, 80, cidr="0.0.0.0/0"),
         "IpProtocol=tcp,FromPort=22,ToPort=80,IpRanges=[{CidrIp=0.0.0.0/0}]"),
        (Rule("sg-a", False, "-1", cidr="::/0"), "IpProtocol=-1,Ipv6Ranges=[{CidrIpv6=::/0}]"),
        (Rule("sg-a", False, "-1", prefix_list="pl-1"), "IpProtocol=-1,PrefixListIds=[{PrefixListId=pl-1}]"),
    ],
)  # fmt: skip
def test_a_rule_is_revoked_as_it_stands(rule: Rule, wanted: str) -> None:
    words = shlex.split(AwsCommands().revoke(rule))

    assert words[2] == "revoke-security-group-ingress"
    assert words[-1] == wanted


def test_missing_rules_for_consecutive_ports_become_one() -> None:
    def missing(port: int, peer: str = "sg-b") -> MissingRule:
        return MissingRule(Rule("sg-a", False, "tcp", port, port, peer_group=peer))

    found = joined([missing(5601), missing(5600), missing(5600, "sg-c"), missing(5603), missing(5600)])

    assert [(one.rule.peer_group, one.rule.first, one.rule.last) for one in found] == [
        ("sg-b", 5600, 5601), ("sg-b", 5603, 5603), ("sg-c", 5600, 5600)
    ]  # fmt: skip


# --- shapes that make no sense

WILD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["IpProtocol", "FromPort", "ToPort", "UserIdGroupPairs", "IpRanges", "CidrIp", "Ipv6Ranges", "CidrIpv6",
             "PrefixListIds", "PrefixListId", "GroupId", "VpcId", "IpPermissions", "IpPermissionsEgress", "Groups",
             "NetworkInterfaces", "Attachment", "PrivateIpAddresses", "Association", "PublicIp", "DeviceIndex"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(permissions=WILD, interfaces=WILD)
@UNHURRIED
def test_mangled_answers_never_crash(permissions: object, interfaces: object) -> None:
    group = {"GroupId": "sg-a", "IpPermissions": permissions, "IpPermissionsEgress": permissions}
    aws = AwsFacts(instances={"p1": {"NetworkInterfaces": interfaces}}, security_groups={"sg-a": group})
    groups = read_groups(aws.security_groups)

    efa_between(("sg-a",), ("sg-a",), groups)
    tcp_between(Endpoint(("sg-a",), "10.0.0.7"), Endpoint(("sg-a",), "x"), 5600, groups, {})
    world_open_ports(aws, "p1", [5600])
    assert all(isinstance(one.groups, tuple) for one in interfaces_of(aws.instances["p1"]))
