"""Checks of ports, addresses, names, routes, reach and exposure."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.checks.network import CHECKS
from pdctl.doctor.facts import InterfaceFacts, KernelSettings, NetworkView, PlannedPort, RouteFacts
from pdctl.doctor.network_facts import NetworkFacts, PathMtu, Reach
from tests.unit.doctor.builders import (
    ERROR,
    WARNING,
    all_pass,
    cluster,
    context,
    failure,
    findings,
    network,
    spoiled,
    unreachable,
    verdicts,
    with_network,
    without,
)

NAMED = cluster(prefill={"hosts": ["p1"]}, decode={"hosts": ["d1"]})
WIDE = cluster(prefill={"vllm_args": {"host": "0.0.0.0"}}, decode={"vllm_args": {"host": "0.0.0.0"}})
PUBLIC = cluster(
    prefill={"hosts": [{"name": "p1", "address": "52.94.76.1"}]},
    decode={"hosts": [{"name": "d1", "address": "52.94.76.2"}]},
)


def ports(given_context: Any, name: str, **fields: Any) -> Any:
    """The same with the first planned port of a host in another state."""
    first, *rest = given_context.facts[name].ports
    return spoiled(given_context, name, ports=(first.model_copy(update=fields), *rest))


def test_a_healthy_cluster_passes() -> None:
    for data in (cluster(), cluster(fabric="efa"), cluster(router={"host": "d1"})):
        assert all_pass(CHECKS, with_network(context(data))) == {}


def test_one_machine_passes() -> None:
    data = cluster(prefill={"hosts": ["local"]}, decode={"hosts": ["local"]}, router={"host": "local"})
    assert all_pass(CHECKS, with_network(context(data))) == {}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_nothing_is_judged_without_facts(check: Any) -> None:
    empty = context(NAMED)
    for part in ("network", "ports", "kernel"):
        empty = without(empty, part)
    found = {one.verdict.value for one in findings(CHECKS, check.id, empty)}
    # The kind of address, and what is bound where, are known from the plan.
    assert found == ({"pass"} if check.id in ("NET007", "NET011") else {"skipped"})
    assert set(verdicts(CHECKS, check.id, unreachable(context(NAMED), "d1")).values()) <= {"pass", "skipped"}


# --- NET001, NET002: ports and addresses of a host


def test_a_port_of_somebody_else() -> None:
    found = failure(CHECKS, "NET001", ports(context(), "d1", free=False, error="in-use", holder="pid 77: nginx"))
    assert (found.hosts, found.severity) == (("d1",), ERROR)
    assert "8200" in found.message
    assert "API" in found.message
    assert "nginx" in found.evidence
    assert verdicts(CHECKS, "NET002", ports(context(), "d1", free=False, error="in-use"))[("d1",)] == "pass"


def test_ports_of_running_instances_are_fine() -> None:
    running = ports(context(), "d1", free=False, error="in-use", holder="pdctl instance", ours=True)
    assert set(verdicts(CHECKS, "NET001", running).values()) == {"pass"}


@pytest.mark.parametrize(("error", "word"), [("not-allowed", "may not open"), ("no buffer space", "cannot be opened")])
def test_ports_that_cannot_be_opened(error: str, word: str) -> None:
    assert word in failure(CHECKS, "NET001", ports(context(), "d1", free=False, error=error)).message


def test_an_address_of_another_machine() -> None:
    given_context = context()
    wrong = tuple(
        one.model_copy(update={"free": False, "error": "not-local"}) if one.address == "10.0.0.2" else one
        for one in given_context.facts["d1"].ports or ()
    )
    spoilt = spoiled(given_context, "d1", ports=wrong)
    found = failure(CHECKS, "NET002", spoilt)
    assert found.hosts == ("d1",)
    assert "10.0.0.2" in found.message
    assert "API, side channel" in found.evidence
    # It is no port that is taken.
    assert set(verdicts(CHECKS, "NET001", spoilt).values()) == {"pass"}


# --- NET003: names


def named(p1: dict[str, tuple[str, ...]], d1: dict[str, tuple[str, ...]]) -> Any:
    given_context = context(NAMED)
    for name, resolved in (("p1", p1), ("d1", d1)):
        view = network("10.0.0.1" if name == "p1" else "10.0.0.2", ("p1", "d1"))
        given_context = spoiled(given_context, name, network=view.model_copy(update={"resolved": resolved}))
    return given_context


GOOD_NAMES: dict[str, tuple[str, ...]] = {"p1": ("10.0.0.1",), "d1": ("10.0.0.2",)}


def test_names_that_mean_the_same() -> None:
    assert set(verdicts(CHECKS, "NET003", named(GOOD_NAMES, GOOD_NAMES)).values()) == {"pass"}
    also_by_ipv6 = {"p1": ("10.0.0.1", "fd00::1"), "d1": ("10.0.0.2",)}
    assert set(verdicts(CHECKS, "NET003", named(GOOD_NAMES, also_by_ipv6)).values()) == {"pass"}
    assert findings(CHECKS, "NET003", context()) == []


def test_a_name_that_does_not_resolve() -> None:
    found = failure(CHECKS, "NET003", named(GOOD_NAMES, {**GOOD_NAMES, "p1": ()}))
    assert (found.hosts, found.severity) == (("d1",), ERROR)
    assert "p1" in found.message


def test_the_own_name_at_loopback() -> None:
    found = failure(CHECKS, "NET003", named(GOOD_NAMES, {**GOOD_NAMES, "d1": ("127.0.1.1",)}))
    assert (found.hosts, found.severity) == (("d1",), ERROR)
    assert "127.0.1.1" in found.evidence


def test_names_that_differ() -> None:
    found = failure(CHECKS, "NET003", named(GOOD_NAMES, {**GOOD_NAMES, "d1": ("192.168.0.2",)}))
    assert (found.hosts, found.severity) == (("p1", "d1"), WARNING)
    assert found.evidence == "10.0.0.2 on p1; 192.168.0.2 on d1"


# --- NET004, NET005, NET006: routes


def routed(**fields: Any) -> Any:
    """The same with another route from d1 to p1."""
    view = network("10.0.0.2", ("10.0.0.1",))
    route = view.routes[0].model_copy(update=fields)
    return spoiled(context(), "d1", network=view.model_copy(update={"routes": (route,)}))


def test_no_route() -> None:
    found = failure(CHECKS, "NET004", routed(error="Network is unreachable"))
    assert found.hosts == ("d1",)
    assert found.evidence == "10.0.0.1: Network is unreachable"
    none = spoiled(context(), "d1", network=network("10.0.0.2", ()))
    assert verdicts(CHECKS, "NET004", none)[("d1",)] == "skipped"


@pytest.mark.parametrize(
    ("source", "verdict"),
    [("10.0.0.2", "pass"), ("10.9.0.2", "warning"), ("", None), ("127.0.0.1", None), ("fd00::2", None)],
)
def test_the_source_of_packets(source: str, verdict: str | None) -> None:
    assert verdicts(CHECKS, "NET005", routed(source=source)).get(("d1",)) == verdict


def test_the_mtu_of_both_ends() -> None:
    found = failure(CHECKS, "NET006", routed(mtu=1500))
    assert (found.hosts, found.severity) == (("p1", "d1"), WARNING)
    assert "9001 bytes on the prefill host and 1500 on the decode host" in found.message
    # Where the route does not tell it, that of the interface counts.
    assert verdicts(CHECKS, "NET006", routed(mtu=None)) == {("p1", "d1"): "pass"}
    assert findings(CHECKS, "NET006", routed(mtu=None, interface="other")) == []


# --- NET007, NET008


@pytest.mark.parametrize(
    ("address", "verdict"),
    [
        ("169.254.3.4", "error"),
        ("fe80::1", "error"),
        ("127.0.0.2", "error"),
        ("::1", "error"),
        ("10.0.0.9", "pass"),
        ("fd00::9", "pass"),
        ("100.64.0.9", "pass"),
    ],
)
def test_kinds_of_addresses(address: str, verdict: str) -> None:
    data = cluster(decode={"hosts": [{"name": "d1", "address": address}]})
    assert verdicts(CHECKS, "NET007", context(data))[("d1",)] == verdict


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [((32768, 60999), "pass"), ((1024, 65535), "warning"), ((18200, 18200), "warning"), (None, "skipped")],
)
def test_ephemeral_ports(limits: tuple[int, int] | None, verdict: str) -> None:
    given_context = spoiled(context(), "d1", kernel=KernelSettings(ip_local_port_range=limits))
    assert verdicts(CHECKS, "NET008", given_context)[("d1",)] == verdict


# --- NET009: reach


def test_no_ports_were_opened() -> None:
    assert verdicts(CHECKS, "NET009", context()) == {(): "skipped"}
    assert verdicts(CHECKS, "NET010", context()) == {(): "skipped"}


@pytest.mark.parametrize(
    ("outcome", "verdict", "word"),
    [
        ("open", "pass", "were reached"),
        ("timeout", "error", "drops the packets"),
        ("refused", "error", "refused"),
        ("unreachable", "error", "no way there"),
        ("wrong-peer", "error", "somebody else"),
        ("something new", "error", "fail"),
        ("no-listener", "skipped", "could not listen"),
        ("not-tried", "skipped", "not tried"),
    ],
)
def test_outcomes(outcome: str, verdict: str, word: str) -> None:
    given_context = with_network(context(), outcome)
    assert verdicts(CHECKS, "NET009", given_context) == {("p1", "d1"): verdict}
    found = findings(CHECKS, "NET009", given_context)
    assert [one.message.split(":")[0] for one in found] == ["prefill to decode", "decode to prefill"]
    assert all(word in one.message for one in found)


def test_one_port_of_one_direction() -> None:
    def cut(reach: Reach) -> Reach:
        blocked = reach.source == "p1" and reach.purpose == "side channel"
        return dataclasses.replace(reach, outcome="timeout", detail="3 s") if blocked else reach

    found = failure(CHECKS, "NET009", with_network(context(), change=cut))
    assert found.hosts == ("p1", "d1")
    assert found.message.startswith("prefill to decode: connections to side channel get no answer")
    assert found.evidence == "p1 to 10.0.0.2:5700 (side channel): timeout, 3 s"
    assert "TCP port 5700 of d1 be reached from p1" in found.fix
    # The other ports of that direction do not make it pass.
    passed = [
        one for one in findings(CHECKS, "NET009", with_network(context(), change=cut)) if one.verdict.value == "pass"
    ]
    assert [one.message.split(":")[0] for one in passed] == ["decode to prefill"]


def test_the_router_is_told_from_the_pairs() -> None:
    data = cluster(router={"host": "r9"})
    reach = Reach("r9", "d1", "10.0.0.2", 8200, "API", "refused")
    facts = NetworkFacts((reach,), ())
    found = findings(CHECKS, "NET009", context(data, network=facts))
    assert found[0].hosts == ("r9", "d1")
    assert found[0].message.startswith("router to instance: ")
    # Pairs that nobody tried are said.
    assert [one.verdict.value for one in found[1:]] == ["skipped", "skipped"]


# --- NET010: packets


@pytest.mark.parametrize(
    ("interface", "path", "verdict"), [(9001, 9001, "pass"), (9001, 1500, "warning"), (9001, None, "skipped")]
)
def test_sizes_of_packets(interface: int, path: int | None, verdict: str) -> None:
    facts = NetworkFacts((), (PathMtu("p1", "d1", "10.0.0.2", interface, path, "why"),))
    given_context = context(network=facts)
    assert verdicts(CHECKS, "NET010", given_context) == {("p1", "d1"): verdict}
    if verdict == "warning":
        assert "1500" in failure(CHECKS, "NET010", given_context).message


# --- NET011: exposure


def group(cidr: str) -> dict[str, Any]:
    permission = {"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535, "IpRanges": [{"CidrIp": cidr}]}
    return {"GroupId": "sg-1", "VpcId": "vpc-1", "IpPermissions": [permission], "IpPermissionsEgress": []}


def aws(cidr: str, *, readable: bool = True) -> AwsFacts:
    interface = {
        "NetworkInterfaceId": "eni-1",
        "InterfaceType": "interface",
        "Groups": [{"GroupId": "sg-1"}],
        "VpcId": "vpc-1",
        "PrivateIpAddress": "10.0.0.1",
    }
    instance = {"InstanceId": "i-1", "VpcId": "vpc-1", "NetworkInterfaces": [interface]}
    groups = {"sg-1": group(cidr)} if readable else {}
    return AwsFacts(region="us-east-2", instances={"p1": instance, "d1": instance}, security_groups=groups)


@pytest.mark.parametrize(
    ("data", "facts", "verdict"),
    [
        (cluster(), None, "pass"),
        (cluster(), aws("0.0.0.0/0"), "pass"),
        (WIDE, None, "pass"),
        (WIDE, aws("0.0.0.0/0"), "error"),
        (WIDE, aws("10.0.0.0/8"), "pass"),
        (WIDE, aws("0.0.0.0/0", readable=False), "skipped"),
        (PUBLIC, None, "warning"),
        (PUBLIC, aws("0.0.0.0/0"), "error"),
        (PUBLIC, aws("10.0.0.0/8"), "pass"),
    ],
)
def test_who_else_can_reach_the_instances(data: dict[str, Any], facts: AwsFacts | None, verdict: str) -> None:
    assert set(verdicts(CHECKS, "NET011", context(data, aws=facts)).values()) == {verdict}


def test_every_address_with_a_public_one_among_them() -> None:
    given_context = context(WIDE)
    public = InterfaceFacts(name="eth1", mtu=1500, up=True, addresses=("52.94.76.9/24",))
    view = given_context.facts["d1"].network
    assert view is not None
    spoilt = spoiled(given_context, "d1", network=view.model_copy(update={"interfaces": (*view.interfaces, public)}))
    found = failure(CHECKS, "NET011", spoilt)
    assert (found.hosts, found.severity) == (("d1",), WARNING)
    assert "52.94.76.9" in found.evidence
    assert verdicts(CHECKS, "NET011", without(given_context, "network")) == {("p1",): "skipped", ("d1",): "skipped"}


def test_only_what_is_bound_widely_is_named() -> None:
    found = findings(CHECKS, "NET011", context(WIDE, aws=aws("0.0.0.0/0")))
    assert {one.message for one in found} == {"the whole internet may connect to: API"}
    assert "0.0.0.0:8100" in found[0].evidence
    assert "sg-1" in found[0].evidence


# --- wild facts

words = st.one_of(st.text(max_size=12), st.sampled_from(["10.0.0.1", "::1", "127.0.0.1", "fe80::1%eth0", "d1", "p1"]))
views = st.builds(
    NetworkView,
    interfaces=st.lists(
        st.builds(
            InterfaceFacts, name=words, mtu=st.integers(), up=st.booleans(), addresses=st.lists(words, max_size=3)
        ),
        max_size=3,
    ),
    routes=st.lists(
        st.builds(RouteFacts, address=words, interface=words, source=words, mtu=st.none() | st.integers(), error=words),
        max_size=4,
    ),
    resolved=st.dictionaries(words, st.lists(words, max_size=3).map(tuple), max_size=3),
)
planned_ports = st.lists(
    st.builds(
        PlannedPort, port=st.integers(), address=words, purpose=words, free=st.booleans(), error=words, holder=words
    ),
    max_size=4,
).map(tuple)
hosts = st.sampled_from(["p1", "d1"])
reaches = st.lists(
    st.builds(
        Reach, source=hosts, target=hosts, address=words, port=st.integers(), purpose=words, outcome=words, detail=words
    ),
    max_size=4,
).map(tuple)


@given(view=views, found=planned_ports, reach=reaches, limits=st.tuples(st.integers(), st.integers()))
def test_no_facts_make_a_check_fail_itself(
    view: NetworkView, found: tuple[PlannedPort, ...], reach: tuple[Reach, ...], limits: tuple[int, int]
) -> None:
    given_context = spoiled(
        context(NAMED), "d1", network=view, ports=found, kernel=KernelSettings(ip_local_port_range=limits)
    )
    given_context = dataclasses.replace(given_context, network=NetworkFacts(reach))
    for check in CHECKS:
        findings(CHECKS, check.id, given_context)
