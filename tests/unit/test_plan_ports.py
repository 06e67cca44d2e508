"""Ports and devices: derived without a clash, kept where the file sets them, refused where that clashes."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pdctl.errors import ClusterFileError
from pdctl.plan import ClusterPlan, make_plan
from pdctl.plan_devices import device_ranges
from pdctl.spec import is_local, parse
from tests.support.plans import BASE, DIGEST, changed, planned, refused


def ports_by_name(plan: ClusterPlan) -> dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
    return {i.name: (i.port, i.side_channel_ports, i.telemetry_ports) for i in plan.instances}


def test_defaults() -> None:
    assert ports_by_name(planned(BASE)) == {
        "prefill-0": (8100, (5600,), (18100,)),
        "decode-0": (8200, (5700,), (18200,)),
        "router": (8000, (), ()),
    }


def test_hosts_do_not_share_a_counter() -> None:
    plan = planned(changed(prefill={"hosts": ["p1", "p2"], "instances_per_host": 2}))
    assert [i.port for i in plan.prefill] == [8100, 8101, 8100, 8101]


def test_one_side_channel_for_each_engine_and_telemetry_for_each_rank() -> None:
    data = changed(prefill={"tensor_parallel": 2, "data_parallel": 3, "instances_per_host": 2})
    data["prefill"]["vllm_args"] = {"pipeline-parallel-size": 2}
    first, second = planned(data).prefill
    assert first.side_channel_ports == (5600, 5601, 5602)
    assert second.side_channel_ports == (5603, 5604, 5605)
    assert first.telemetry_ports == tuple(range(18100, 18112))
    assert second.telemetry_ports == tuple(range(18112, 18124))
    assert second.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5603"


def test_no_telemetry_in_pull_mode() -> None:
    assert planned(changed(transfer={"mode": "pull"})).prefill[0].telemetry_ports == ()


@pytest.mark.parametrize(
    "decode",
    [
        {"name": "d1", "address": "p1"},  # p1 has no address of its own, so its name is the address
        {"name": "p1"},
        {"name": "p1", "address": "10.0.0.9"},
    ],
)
def test_derived_ports_avoid_others_of_the_same_machine(decode: dict[str, Any]) -> None:
    plan = planned(changed(prefill={"port": 8200}, decode={"hosts": [decode]}, router={"host": "d9", "address": "p1"}))
    assert plan.prefill[0].port == 8200
    assert plan.decode[0].port == 8201


def test_hosts_of_one_address_are_one_machine_across_names() -> None:
    hosts = [{"name": "a", "address": "10.0.0.1"}, {"name": "b", "address": "10.0.0.1"}]
    plan = planned(changed(prefill={"hosts": hosts, "port": 9000}))
    assert [i.port for i in plan.prefill] == [9000, 9001]
    assert [i.devices for i in plan.prefill] == [(0,), (1,)]


def test_base_ports_of_a_host_win_over_those_of_the_role() -> None:
    host = {"name": "p2", "port": 9100, "side_channel_port": 9200, "telemetry_port": 9300}
    role = {"port": 9000, "side_channel_port": 9010, "telemetry_port": 9020}
    plan = planned(changed(prefill={"hosts": ["p1", host], "instances_per_host": 2, **role}))
    assert list(ports_by_name(plan).values())[:4] == [
        (9000, (9010,), (9020,)),
        (9001, (9011,), (9021,)),
        (9100, (9200,), (9300,)),
        (9101, (9201,), (9301,)),
    ]


def test_metrics_port_of_the_router_is_derived_around_others() -> None:
    assert "29001" in planned(changed(prefill={"telemetry_port": 29000})).router.argv
    assert "29000" in planned(changed(decode={"telemetry_port": 29000})).router.argv


def test_an_instance_elsewhere_moves_no_port() -> None:
    few, many = planned(BASE), planned(changed(decode={"hosts": ["d1", "d2", "d3"], "instances_per_host": 4}))
    assert ports_by_name(few)["prefill-0"] == ports_by_name(many)["prefill-0"]


def test_a_clash_names_both_lines_once() -> None:
    text = """\
cluster: qwen3
model: m
accelerator: cpu
fabric: tcp
prefill:
  hosts: [p1, p2]
  port: 9000
decode:
  hosts: [p1, p2]
  side_channel_port: 9000
router: {host: r1}
"""
    with pytest.raises(ClusterFileError) as caught:
        make_plan(parse(text, file="c.yaml", environ={}), environ={}, connector_digest=DIGEST)
    (problem,) = caught.value.problems
    assert (problem.line, problem.key) == (10, "decode.side_channel_port")
    assert "`prefill.port` in line 7" in problem.message
    assert "9000" in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"prefill": {"port": 8000}}, "prefill.port"),
        ({"router": {"metrics_port": 8000}}, "router.metrics_port"),
        ({"prefill": {"port": 65535, "instances_per_host": 2}}, "prefill.port"),
        ({"prefill": {"telemetry_port": 65530, "tensor_parallel": 8}}, "prefill.telemetry_port"),
        ({"prefill": {"port": 5600, "side_channel_port": 5600}}, "prefill.side_channel_port"),
        ({"prefill": {"side_channel_port": 7990, "data_parallel": 11}}, "prefill.side_channel_port"),
        ({"prefill": {"hosts": [{"name": "p1", "telemetry_port": 8000}]}}, "prefill.hosts[0].telemetry_port"),
    ],
)
def test_ports_that_cannot_be(sections: dict[str, Any], key: str) -> None:
    assert list(refused(changed(**sections))) == [key]


@pytest.mark.parametrize("size", [0, -1, "x", 1.5, True, 2000, 10**30])
def test_a_parallel_size_that_is_none(size: Any) -> None:
    assert list(refused(changed(prefill={"vllm_args": {"pipeline-parallel-size": size}}))) == [
        "prefill.vllm_args.pipeline-parallel-size"
    ]


def test_more_ranks_than_a_machine_can_hold() -> None:
    problems = refused(changed(prefill={"tensor_parallel": 32, "data_parallel": 33}, decode={"tensor_parallel": 32}))
    assert list(problems) == ["prefill.hosts[0]"]
    assert "1056 ranks" in problems["prefill.hosts[0]"]


# --- devices -----------------------------------------------------------------------------------------------------


def devices(**sections: Any) -> dict[str, tuple[int, ...]]:
    return {i.name: i.devices for i in planned(changed(**sections)).instances if i.role != "router"}


def test_devices_are_split_over_the_roles_of_a_machine() -> None:
    found = devices(prefill={"tensor_parallel": 2, "instances_per_host": 2}, decode={"hosts": ["p1"]})
    assert found == {"prefill-0": (0, 1), "prefill-1": (2, 3), "decode-0": (4,)}


def test_a_role_without_devices_avoids_those_of_the_other() -> None:
    found = devices(prefill={"tensor_parallel": 2}, decode={"hosts": ["p1"], "devices": [1]})
    assert found == {"prefill-0": (2, 3), "decode-0": (1,)}


def test_devices_of_a_host_win_and_a_large_pool_gives_from_its_rest() -> None:
    found = devices(
        prefill={"tensor_parallel": 2, "devices": [0, 1, 2, 3]},
        decode={"hosts": [{"name": "p1", "devices": [0, 1]}], "devices": [9], "tensor_parallel": 2},
    )
    assert found == {"prefill-0": (2, 3), "decode-0": (0, 1)}


def test_devices_that_overlap_name_both_lists() -> None:
    text = """\
cluster: qwen3
model: m
accelerator: cuda
fabric: tcp
prefill:
  hosts: [p1]
  devices: [0]
decode:
  hosts: [p1]
  devices: [0]
router: {host: r1}
"""
    with pytest.raises(ClusterFileError) as caught:
        make_plan(parse(text, file="c.yaml", environ={}), environ={}, connector_digest=DIGEST)
    (problem,) = caught.value.problems
    assert (problem.line, problem.key) == (10, "decode.devices")
    assert "`prefill.devices` in line 7" in problem.message


def test_too_few_devices() -> None:
    problems = refused(changed(prefill={"tensor_parallel": 2, "devices": [3], "hosts": ["p1", "p2"]}))
    assert list(problems) == ["prefill.devices"]
    assert "needs 2 devices" in problems["prefill.devices"]


def test_no_devices_on_cpus() -> None:
    data = changed(prefill={"hosts": ["p1", {"name": "p2", "devices": [0]}], "devices": [1]})
    data["accelerator"] = "cpu"
    assert list(refused(data)) == ["prefill.devices", "prefill.hosts[1].devices"]


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7"), ((2, 1), "2,1")]
)
def test_device_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert device_ranges(numbers) == text


# --- whatever is in the file -------------------------------------------------------------------------------------

ADDRESSES = ["10.0.0.1", "10.0.0.2", "fd00::1", "127.0.0.1"]
PORTS = st.none() | st.sampled_from([8000, 8100, 8101, 5600, 18100, 29000, 65533]) | st.integers(1, 65535)
SMALL = st.integers(1, 4)


def optional(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys).map(lambda d: {k: v for k, v in d.items() if v is not None})


def hosts(ports: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    more = optional(
        address=st.sampled_from(ADDRESSES),
        port=ports,
        side_channel_port=ports,
        telemetry_port=ports,
        devices=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True),
    )
    host = st.builds(lambda name, rest: {"name": name, **rest}, st.sampled_from(["h1", "h2", "h3", "local"]), more).map(
        lambda d: {"address": "127.0.0.1", **d} if d["name"] == "local" else d
    )
    return st.lists(host, min_size=1, max_size=3, unique_by=lambda d: d["name"])


def roles(ports: st.SearchStrategy[Any], devices: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    more = optional(
        tensor_parallel=st.sampled_from([1, 2, 4]),
        data_parallel=SMALL,
        instances_per_host=SMALL,
        port=ports,
        side_channel_port=ports,
        telemetry_port=ports,
        devices=devices,
    )
    return st.builds(lambda h, rest: {"hosts": h, **rest}, hosts(ports), more)


def clusters(ports: st.SearchStrategy[Any], devices: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    router = st.builds(
        lambda host, rest: {"host": host, **rest},
        st.sampled_from(["h1", "h9", "local"]),
        optional(port=ports, metrics_port=ports, address=st.sampled_from(ADDRESSES)),
    )
    return st.builds(
        lambda prefill, decode, router, accelerator, mode: {
            **BASE,
            "prefill": prefill,
            "decode": decode,
            "router": router,
            "accelerator": accelerator,
            "transfer": {"mode": mode},
        },
        roles(ports, devices),
        roles(ports, devices),
        router,
        st.sampled_from(["cuda", "neuron", "cpu"]),
        st.sampled_from(["push", "pull"]),
    )


def check_consistent(plan: ClusterPlan) -> None:
    for instance in plan.instances:
        numbers = [use.port for use in instance.ports]
        assert all(1 <= number <= 65535 for number in numbers)
        assert len(set(numbers)) == len(numbers)
        assert {instance.port, *instance.side_channel_ports, *instance.telemetry_ports} <= set(numbers)
    for one, other in combinations(plan.instances, 2):
        if one.host == other.host or one.address == other.address or (is_local(one.host) and is_local(other.host)):
            assert not {use.port for use in one.ports} & {use.port for use in other.ports}
            assert not set(one.devices) & set(other.devices)
    # The decode side hears of an instance by this name: twice the same would mix their transfers up.
    assert len({instance.name for instance in plan.instances}) == len(plan.instances)


WILD = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
@WILD
@given(clusters(PORTS, st.none() | st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True)))
def test_a_plan_has_no_clash_or_is_refused(data: dict[str, Any]) -> None:
    try:
        plan = planned(data)
    except ClusterFileError:
        event("refused")
        return
    event("planned")
    check_consistent(plan)
    json.dumps(plan.to_json())


def without_choices(value: Any) -> Any:
    if isinstance(value, dict):
        chosen = ("port", "side_channel_port", "telemetry_port", "metrics_port", "devices")
        return {k: without_choices(v) for k, v in value.items() if k not in chosen}
    return [without_choices(v) for v in value] if isinstance(value, list) else value


@pytest.mark.slow
@WILD
@given(clusters(PORTS, st.none()).map(without_choices))
def test_what_is_left_to_pdctl_always_works_out(data: dict[str, Any]) -> None:
    plan = planned(data)
    check_consistent(plan)
    # vLLM's own numbering: the base of each instance, counted up over its engines and ranks.
    for instance in (*plan.prefill, *plan.decode):
        first = int(instance.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        assert instance.side_channel_ports == tuple(range(first, first + len(instance.side_channel_ports)))
