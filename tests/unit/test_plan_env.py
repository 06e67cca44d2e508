"""Environment of the instances: what is set, what a user may set, and what would break the cluster."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.plans import DIGEST, changed, planned, refused

CONNECTOR = f"@HOME@/.pdctl/connector/{DIGEST}"


def environment(accelerator: str = "cuda", fabric: str = "tcp", **sections: Any) -> dict[str, str]:
    return planned(changed(accelerator=accelerator, fabric=fabric, **sections)).prefill[0].env


def test_what_every_instance_gets() -> None:
    env = environment(prefill={"hosts": [{"name": "p1", "address": "10.0.0.1"}], "tensor_parallel": 2})
    assert env == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": CONNECTOR,
        "PYTHONUNBUFFERED": "1",
        "UCX_TLS": "tcp,cuda_copy",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    }
    assert list(env) == sorted(env)


def test_the_router_gets_nothing_of_the_data_plane() -> None:
    data = changed(env={"A": "global", "B": "global"}, router={"env": {"A": "router"}}, prefill={"env": {"C": "x"}})
    assert planned(data).router.env == {
        "A": "router",
        "B": "global",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.parametrize(
    ("accelerator", "fabric", "expected"),
    [
        ("cpu", "tcp", {"UCX_TLS": "tcp"}),
        ("cuda", "tcp", {"UCX_TLS": "tcp,cuda_copy"}),
        ("cuda", "infiniband", {"UCX_TLS": "^tcp"}),
        ("cuda", "roce", {"UCX_TLS": "^tcp"}),
        ("cuda", "efa", {"FI_PROVIDER": "efa"}),
        ("neuron", "efa", {"FI_PROVIDER": "efa"}),
    ],
)
def test_fabrics(accelerator: str, fabric: str, expected: dict[str, str]) -> None:
    env = environment(accelerator, fabric)
    assert {name: value for name, value in env.items() if name.startswith(("UCX_", "FI_"))} == expected


def test_devices_by_accelerator() -> None:
    role = {"tensor_parallel": 4, "devices": [0, 1, 2, 6]}
    assert environment("cuda", prefill=role)["CUDA_VISIBLE_DEVICES"] == "0,1,2,6"
    neuron = environment("neuron", "efa", prefill=role)
    assert neuron["NEURON_RT_VISIBLE_CORES"] == "0-2,6"
    assert "CUDA_VISIBLE_DEVICES" not in neuron
    assert not {"CUDA_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES"} & set(environment("cpu"))


def test_cpu_instances_bind_no_threads_when_they_share_a_machine() -> None:
    name = "VLLM_CPU_OMP_THREADS_BIND"
    assert name not in environment("cpu")
    assert environment("cpu", decode={"hosts": ["p1"]})[name] == "nobind"
    assert environment("cpu", prefill={"instances_per_host": 2})[name] == "nobind"
    assert environment("cpu", decode={"hosts": ["p1"]}, env={name: "0-1"})[name] == "0-1"
    assert name not in environment("cuda", decode={"hosts": ["p1"]})


def test_layers() -> None:
    data = changed(
        env={"A": "global", "B": "global", "C": "global", "UCX_TLS": "rc"},
        prefill={"hosts": ["p1", {"name": "p2", "env": {"C": "host"}}], "env": {"B": "role", "C": "role"}},
    )
    first, second = planned(data).prefill
    assert [first.env[name] for name in ("A", "B", "C", "UCX_TLS")] == ["global", "role", "role", "rc"]
    assert [second.env[name] for name in ("A", "B", "C")] == ["global", "role", "host"]


def test_the_connector_comes_before_the_path_of_the_user() -> None:
    assert environment(env={"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"{CONNECTOR}:/a:/b"
    assert environment(env={"PYTHONPATH": ""})["PYTHONPATH"] == CONNECTOR
    pull = {"mode": "pull"}
    assert environment(env={"PYTHONPATH": "/a"}, transfer=pull)["PYTHONPATH"] == "/a"
    assert "PYTHONPATH" not in environment(transfer=pull)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "`address`"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "`side_channel_port`"),
        ("CUDA_VISIBLE_DEVICES", "`devices`"),
        ("VLLM_DP_SIZE", "`data_parallel`"),
        ("VLLM_PORT", "remove it"),
    ],
)
@pytest.mark.parametrize("layer", ["env", "prefill.env", "prefill.hosts[0].env"])
def test_variables_that_would_break_the_cluster(name: str, use: str, layer: str) -> None:
    sections: dict[str, Any] = {
        "env": {"env": {name: "1"}},
        "prefill.env": {"prefill": {"env": {name: "1"}}},
        "prefill.hosts[0].env": {"prefill": {"hosts": [{"name": "p1", "env": {name: "1"}}]}},
    }[layer]
    problems = refused(changed(**sections))
    assert list(problems) == [f"{layer}.{name}"]
    assert use in problems[f"{layer}.{name}"]


def test_what_is_refused_depends_on_the_accelerator() -> None:
    assert environment("cpu", env={"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == ""
    data = changed(accelerator="neuron", decode={"env": {"NEURON_RT_VISIBLE_CORES": "0"}})
    assert list(refused(data)) == ["decode.env.NEURON_RT_VISIBLE_CORES"]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_moves_cannot_be_registered(name: str) -> None:
    env = {name: "garbage_collection_threshold:0.8, expandable_segments:True"}
    assert list(refused(changed(env=env))) == [f"env.{name}"]
    sleep = {"vllm_args": {"enable-sleep-mode": True}}
    planned(changed(env=env, prefill=sleep, decode=sleep))
    planned(changed(env={name: "expandable_segments:False"}))
    planned(changed(accelerator="cpu", env=env))


def test_a_path_cannot_be_secret() -> None:
    problems = refused(changed(env={"PYTHONPATH": {"from_env": "TEST_TOKEN"}}))
    assert list(problems) == ["env.PYTHONPATH"]


def test_pdctl_s_own_variables_never_get_in() -> None:
    ambient = {"PDCTL_FAULT": "1", "PDCTL_FAULT_TRANSFER": "1", "HOME": "/x"}
    plan = planned(changed(), environ=ambient)
    assert not any(name.startswith("PDCTL_") or name == "HOME" for i in plan.instances for name in i.env)
    assert list(refused_by_spec()) == ["env.PDCTL_FAULT"]


def refused_by_spec() -> dict[str, str]:
    return refused(changed(env={"PDCTL_FAULT": "1"}))
