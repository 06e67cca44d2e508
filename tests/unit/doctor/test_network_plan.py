"""Which ports are opened where, and who connects to them."""

from __future__ import annotations

from typing import Any

from pdctl.doctor.facts import HostFacts, PlannedPort
from pdctl.doctor.network import _facts_of, _Ports
from pdctl.doctor.network_facts import Reach
from pdctl.doctor.network_plan import DATA_PURPOSE, NetworkPlan, plan_network
from pdctl.errors import HostUnreachable
from tests.support.plans import changed, planned


def network(facts: dict[str, HostFacts] | None = None, **sections: Any) -> NetworkPlan:
    return plan_network(planned(changed(**sections)), facts or {})


def connections(plan: NetworkPlan) -> set[tuple[str, str, int, str]]:
    return {
        (one.source, one.listener.host, one.listener.port, one.listener.purpose.split(" (")[0]) for one in plan.attempts
    }


def test_side_channels_both_ways_apis_from_the_router_and_data_where_that_is_tcp() -> None:
    assert connections(network(router={"host": "r1"})) == {
        ("p1", "d1", 5700, "side channel"),
        ("d1", "p1", 5600, "side channel"),
        ("p1", "d1", 0, "KV data over TCP"),
        ("d1", "p1", 0, "KV data over TCP"),
        ("r1", "p1", 8100, "API"),
        ("r1", "d1", 8200, "API"),
    }


def test_no_data_port_where_data_does_not_travel_over_tcp() -> None:
    assert DATA_PURPOSE not in {one.listener.purpose for one in network(fabric="efa").attempts}


def test_every_rank_and_instance() -> None:
    plan = network(fabric="efa", decode={"data_parallel": 2, "instances_per_host": 2, "tensor_parallel": 1})
    ports = [one.port for one in plan.listeners if one.host == "d1" and one.purpose == "side channel"]
    assert ports == [5700, 5701, 5702, 5703]


def test_many_hosts_open_each_port_once() -> None:
    plan = network(
        prefill={"hosts": [f"p{n}" for n in range(16)]},
        decode={"hosts": [f"d{n}" for n in range(16)]},
        router={"host": "p0"},
    )
    assert len(plan.listeners) == 3 * 32
    assert len(plan.hosts) == 32
    assert len(plan.attempts) == 2 * 2 * 256 + 32
    # Once for each pair of hosts and direction.
    measured = [(one.source, one.listener.host) for one in plan.attempts if one.mtu]
    assert len(measured) == len(set(measured)) == 2 * 256


def test_what_listens_on_all_interfaces_is_reached_at_the_address_of_its_host() -> None:
    plan = network(prefill={"hosts": [{"name": "p1", "address": "10.0.0.1"}], "vllm_args": {"host": "0.0.0.0"}})
    (api,) = [one for one in plan.listeners if one.host == "p1" and one.purpose == "API"]
    assert (api.bind, api.address) == ("0.0.0.0", "10.0.0.1")


def test_a_running_instance_is_only_connected_to_and_sizes_are_measured_elsewhere() -> None:
    held = PlannedPort(port=5700, address="d1", purpose="side channel", free=False, ours=True)
    plan = network({"d1": HostFacts("d1", ports=(held,))})
    to_d1 = [one for one in plan.attempts if (one.source, one.listener.host) == ("p1", "d1")]
    assert [(one.listener.purpose.split(" (")[0], one.listener.ours, one.mtu) for one in to_d1] == [
        ("side channel", True, False),
        ("KV data over TCP", False, True),
        ("API", False, False),
    ]


def test_on_one_host_nothing_is_measured() -> None:
    plan = network(prefill={"hosts": ["local"]}, decode={"hosts": ["local"]}, router={"host": "local"})
    assert plan.hosts == ("local",)
    assert not any(one.mtu for one in plan.attempts)


class TestResults:
    def results(self, listening: Any, connected: Any, opened: Any = None) -> dict[tuple[str, str, str], Reach]:
        plan = network(fabric="efa")
        ports = _Ports(plan, dict.fromkeys(plan.hosts, "n"), listening, opened or listening)
        facts = _facts_of(plan, ports, connected)
        return {(one.source, one.target, one.purpose): one for one in facts.reaches}

    def test_a_port_that_could_not_be_opened(self) -> None:
        held = {"error": "in-use", "detail": "another process holds port 5700"}
        listening = {
            "p1": {"p1 side channel 5600": {"port": 5600}, "p1 API 8100": {"port": 8100}},
            "d1": {"d1 side channel 5700": held, "d1 API 8200": {"port": 8200}},
        }
        opened = {"outcome": "open", "detail": "", "connect_ms": 1, "mtu": {"interface_mtu": 9001, "path_mtu": 1500}}
        connected = {"p1": {"d1 API 8200": opened}, "d1": {"p1 side channel 5600": opened}}
        found = self.results(listening, connected)
        assert found["p1", "d1", "side channel"].outcome == "no-listener"
        assert found["p1", "d1", "side channel"].detail == "another process holds port 5700"
        assert found["p1", "d1", "API"].outcome == "open"
        assert found["d1", "p1", "side channel"].connect_ms == 1.0

    def test_a_host_where_nothing_could_be_run(self) -> None:
        error = HostUnreachable("d1", "no connection within 10 s")
        listening = {"p1": {"p1 side channel 5600": {"port": 5600}, "p1 API 8100": {"port": 8100}}}
        found = self.results(listening, {"p1": {}}, {**listening, "d1": error})
        assert found["p1", "d1", "side channel"].outcome == "not-tried"
        assert found["p1", "d1", "side channel"].detail == "d1: no connection within 10 s"
        assert found["d1", "p1", "side channel"].detail == "d1: no connection within 10 s"
