"""What the checks are built of: versions, words, comparing hosts, the environment of an instance."""

from __future__ import annotations

import pytest

from pdctl.doctor.checks.addresses import local_addresses, parse_address, planned_addresses
from pdctl.doctor.checks.instance_facts import (
    LOGIN,
    PLAN,
    argument_of,
    backends_of,
    environment_of,
    is_running,
    ranks_of,
)
from pdctl.doctor.checks.per_host import hosts_by_value, odd_ones_out
from pdctl.doctor.checks.ucx_environment import named_ports
from pdctl.doctor.checks.versions import at_least, numbers
from pdctl.doctor.checks.wording import listing, plural, size
from pdctl.doctor.facts import HostFacts, NetworkView, PlannedPort
from tests.support.plans import changed, planned


@pytest.mark.parametrize(
    ("version", "minimum", "enough"),
    [
        ("2.6.0amzn1.0", "2.1", True),
        ("2.1", "2.1.0", True),
        ("2.0.9", "2.1", False),
        ("10.0", "9.9", True),
        ("3.3.0g", "2.4.0", True),
        ("6.8.0-1021-aws", "5.12", True),
        ("5.4.0-1103-aws", "5.12", False),
        ("", "1", None),
        (None, "1", None),
        ("unknown", "1", None),
    ],
)
def test_versions(version, minimum, enough):
    assert at_least(version, minimum) is enough


def test_version_numbers():
    assert numbers(" v2.6.0amzn1.0") == (2, 6, 0)
    assert numbers("9" * 5000) == (999999999,)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (None, "unlimited"),
        (0, "0 bytes"),
        (65536, "64 KiB"),
        (67108864, "64 MiB"),
        (1610612736, "1.5 GiB"),
        (-1610612736, "-1.5 GiB"),
        (2**40, "1 TiB"),
    ],
)
def test_sizes(count, words):
    assert size(count) == words


def test_words():
    assert listing(range(10), 3) == "0, 1, 2, and 7 more"
    assert listing([]) == ""
    assert (plural(1, "device"), plural(2, "device"), plural(2, "process", "processes")) == (
        "1 device",
        "2 devices",
        "2 processes",
    )


def test_odd_ones_out():
    assert odd_ones_out({}) is None
    assert odd_ones_out({"p1": 1, "d1": 2}) == (1, {"d1": 2})
    assert odd_ones_out({"p1": 1, "d1": 2, "d2": 2}) == (2, {"p1": 1})
    assert hosts_by_value({"p1": "a", "d1": "b", "d2": "a"}) == "a on p1, d2; b on d1"


def test_environment_of_an_instance():
    """The plan's variables hide the login's; what a secret hides is not shown."""
    plan = planned(changed(env={"A": "plan", "S": {"from_env": "TEST_TOKEN"}}))
    facts = HostFacts("p1", environment={"A": "login", "B": "login", "S": "login"})
    variables = environment_of(facts, plan.prefill[0])
    assert variables["A"] == ("plan", PLAN)
    assert variables["B"] == ("login", LOGIN)
    assert "S" not in variables


def test_options_of_an_instance():
    plan = planned(changed(fabric="efa", prefill={"tensor_parallel": 2}, decode={"data_parallel": 2}))
    prefill, decode = plan.prefill[0], plan.decode[0]
    assert argument_of(prefill, "tensor-parallel-size") == "2"
    assert argument_of(prefill, "no-such-option") is None
    assert backends_of(prefill) == ("LIBFABRIC",)
    assert (ranks_of(prefill), ranks_of(decode), ranks_of(plan.router)) == (2, 2, 0)
    pull = planned(changed(accelerator="cpu", transfer={"mode": "pull"}, decode={"tensor_parallel": 4}))
    assert (ranks_of(pull.decode[0]), backends_of(pull.decode[0])) == (4, ("UCX",))


def test_running_instance():
    plan = planned(changed())
    port = plan.prefill[0].port
    taken = PlannedPort(port=port, address="p1", purpose="API", free=False, ours=True)
    assert is_running(HostFacts("p1", ports=(taken,)), plan.prefill[0])
    assert not is_running(HostFacts("p1", ports=(taken.model_copy(update={"ours": False}),)), plan.prefill[0])
    assert not is_running(HostFacts("p1"), plan.prefill[0])


def test_addresses():
    view = NetworkView.model_validate(
        {
            "interfaces": [
                {"name": "lo", "mtu": 65536, "up": True, "addresses": ["127.0.0.1/8", "::1/128"]},
                {"name": "eth0", "mtu": 1500, "up": True, "addresses": ["10.0.0.1/24", "fe80::1/64", "nonsense"]},
            ],
            "resolved": {"p1": ["10.0.0.1", "nonsense"], "gone": []},
        }
    )
    assert {str(address) for address in local_addresses(view)} == {"10.0.0.1"}
    assert [str(address) for address in planned_addresses("p1", view)] == ["10.0.0.1"]
    assert planned_addresses("gone", view) == planned_addresses("unheard-of", view) == ()
    assert str(parse_address("fe80::1%eth0")) == "fe80::1"
    assert parse_address("p1") is None


@pytest.mark.parametrize(
    ("value", "ports"),
    [
        ("mlx5_0:1,mlx5_1:1", {"mlx5_0:1", "mlx5_1:1"}),
        ("", set()),
        ("all", set()),
        ("mlx5_*", set()),
        ("^mlx5_0", set()),
    ],
)
def test_named_ports(value, ports):
    assert named_ports({"UCX_NET_DEVICES": (value, PLAN)}) == ports
