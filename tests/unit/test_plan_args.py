"""Command lines: what pdctl passes, what of the user's options wins, and what would break the cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdctl.plan_args import words
from tests.support.plans import BASE, changed, planned, refused, transfer_config


def options(argv: tuple[str, ...]) -> dict[str, list[str]]:
    """Words behind every option of a command line; an option that is there twice fails."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for word in argv[3:]:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            assert name not in found
            current = found[name] = [value] if equals else []
        else:
            current.append(word)
    return found


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("seed", 0, ["--seed", "0"]),
        ("gpu-memory-utilization", 0.85, ["--gpu-memory-utilization", "0.85"]),
        ("enforce-eager", True, ["--enforce-eager"]),
        ("enforce-eager", False, ["--no-enforce-eager"]),
        ("no-enforce-eager", True, ["--no-enforce-eager"]),
        ("no-enforce-eager", False, ["--enforce-eager"]),
        ("max-model-len", -1, ["--max-model-len=-1"]),
        ("served-model-name", "-odd", ["--served-model-name=-odd"]),
        ("chat-template", "", ["--chat-template", ""]),
        ("chat-template", "a b\n$(x)", ["--chat-template", "a b\n$(x)"]),
        ("served-model-name", ["a", "b"], ["--served-model-name", "a", "b"]),
        ("long-prefill", [-1], ["--long-prefill=-1"]),
        ("rope-config", {"mode": 3, "a": {"é": None}}, ["--rope-config", '{"mode":3,"a":{"\\u00e9":null}}']),
        ("hf-overrides.rope_theta", 1.5, ["--hf-overrides.rope_theta=1.5"]),
        ("hf-overrides.flag", True, ["--hf-overrides.flag=true"]),
        ("hf-overrides.list", [1, "a"], ['--hf-overrides.list=[1,"a"]']),
        ("hf-overrides.name", "x", ["--hf-overrides.name=x"]),
        # The options of vLLM that take a list in a way of their own.
        ("middleware", ["a.b", "c.d"], ["--middleware", "a.b", "--middleware", "c.d"]),
        ("allowed-origins", ["*"], ["--allowed-origins", '["*"]']),
        ("allowed-origins", '["*"]', ["--allowed-origins", '["*"]']),
        ("disable-access-log-for-endpoints", ["/a", "/b"], ["--disable-access-log-for-endpoints", "/a,/b"]),
        ("kv-event-source", ["a=b", "c=d"], ["--kv-event-source", "a=b", "--kv-event-source", "c=d"]),
    ],
)  # fmt: skip
def test_one_option(name: str, value: Any, expected: list[str]) -> None:
    assert words(name, value) == expected


def test_what_pdctl_passes() -> None:
    plan = planned(changed(prefill={"hosts": [{"name": "p1", "address": "10.0.0.1"}], "tensor_parallel": 8}))
    argv = plan.prefill[0].argv
    assert argv[:3] == ("python3", "-m", "vllm.entrypoints.openai.api_server")
    found = options(argv)
    found.pop("--kv-transfer-config")
    assert found == {
        "--model": ["Qwen/Qwen3-32B"],
        "--host": ["10.0.0.1"],
        "--port": ["8100"],
        "--tensor-parallel-size": ["8"],
    }
    assert options(planned(changed(decode={"data_parallel": 2})).decode[0].argv)["--data-parallel-size"] == ["2"]


def test_options_of_the_user_follow() -> None:
    arguments = {"seed": 1, "enable_prefix_caching": False, "port_range": "x"}
    found = options(planned(changed(prefill={"vllm_args": arguments})).prefill[0].argv)
    assert (found["--seed"], found["--no-enable-prefix-caching"], found["--port-range"]) == (["1"], [], ["x"])
    assert "--seed" not in planned(changed(prefill={"vllm_args": arguments})).decode[0].argv


def test_the_same_value_as_the_key_is_no_problem_and_is_passed_once() -> None:
    arguments = {"model": "Qwen/Qwen3-32B", "tensor-parallel-size": 2, "data_parallel_size": "1"}
    found = options(planned(changed(prefill={"tensor_parallel": 2, "vllm_args": arguments})).prefill[0].argv)
    assert found["--tensor-parallel-size"] == ["2"]
    assert "--data-parallel-size" not in found


def test_an_instance_may_listen_everywhere() -> None:
    instance = planned(changed(prefill={"vllm_args": {"host": "0.0.0.0"}})).prefill[0]
    assert options(instance.argv)["--host"] == ["0.0.0.0"]
    assert instance.url == "http://p1:8100"
    assert {use.address for use in instance.ports if use.purpose == "API"} == {"0.0.0.0"}


@pytest.mark.parametrize(
    ("arguments", "use"),
    [
        ({"model": "other"}, "`model`"),
        ({"tensor-parallel-size": 2}, "`prefill.tensor_parallel`"),
        ({"data-parallel-size": 2}, "`prefill.data_parallel`"),
        ({"port": 8100}, "`prefill.port`"),
        ({"host": "10.0.0.1"}, "`address`"),
        ({"kv-transfer-config": {}}, "`transfer`"),
        ({"kv-transfer-config.kv_role": "kv_both"}, "`transfer`"),
        ({"device-ids": [1]}, "`devices`"),
        ({"headless": True}, "`hosts`"),
        ({"nnodes": 2}, "`hosts`"),
        ({"node-rank": 1}, "`hosts`"),
        ({"data-parallel-hybrid-lb": True}, "remove it"),
        ({"data-parallel-external-lb": True}, "remove it"),
        ({"data-parallel-rank": 0}, "remove it"),
        ({"data-parallel-size-local": 1}, "remove it"),
        ({"data-parallel-backend": "ray"}, "one host"),
        ({"distributed-executor-backend": "ray"}, "one host"),
        ({"ssl-keyfile": "/k"}, "TLS"),
        ({"uds": "/s"}, "TCP"),
        ({"config": "/c.yaml"}, "vllm_args"),
        ({"enable-return-routed-experts": True}, "disaggregation"),
        ({"decode-context-parallel-size": 2}, "pull"),
        # argparse takes a beginning for the whole name, and `-tp` has one dash.
        ({"tensor-parallel": 4}, "tensor-parallel-size"),
        ({"kv-transfer": "{}"}, "kv-transfer-config"),
        ({"tp": 4}, "`tensor_parallel`"),
        ({"x": ["a", "-b"]}, "dash"),
        ({"hf-overrides": {}, "hf-overrides.a": 1}, "one mapping"),
    ],
)
def test_options_that_would_break_the_cluster(arguments: dict[str, Any], use: str) -> None:
    # hf-overrides must be the same on both sides, and is wrong on neither for that reason.
    data = changed(prefill={"vllm_args": arguments})
    if "hf-overrides" in arguments:
        data["decode"]["vllm_args"] = {"hf-overrides": {"a": 1}}
    problems = refused(data)
    (key,) = problems
    assert key.startswith("prefill.vllm_args.")
    assert use in problems[key]


@pytest.mark.parametrize(
    "arguments",
    [
        {"headless": False},
        {"nnodes": 1, "node-rank": 0},
        {"data-parallel-backend": "mp", "distributed-executor-backend": "mp"},
        {"enable-return-routed-experts": False},
        {"decode-context-parallel-size": 1},
        {"pipeline-parallel-size": 2, "prefill-context-parallel-size": 2},
        {"tokenizer": "Qwen/Qwen3-32B"},
        {"middleware": ["a", "-b"]},
    ],
)
def test_options_that_break_nothing(arguments: dict[str, Any]) -> None:
    planned(changed(prefill={"vllm_args": arguments}))


@pytest.mark.parametrize("name", ["pipeline-parallel-size", "prefill-context-parallel-size"])
def test_parallelism_that_decode_cannot_have(name: str) -> None:
    assert list(refused(changed(decode={"vllm_args": {name: 2}}))) == [f"decode.vllm_args.{name}"]


def test_decode_context_parallelism_is_left_to_vllm_in_pull_mode() -> None:
    planned(changed(transfer={"mode": "pull"}, prefill={"vllm_args": {"decode-context-parallel-size": 2}}))


# --- the connector's configuration -------------------------------------------------------------------------------


def test_push_configuration() -> None:
    transfer = {"timeout_s": 12.5, "lease_s": 9, "load_failure_policy": "recompute"}
    plan = planned(changed(transfer=transfer, prefill={"tensor_parallel": 2, "hosts": ["p1", "p2"]}))
    assert transfer_config(plan.prefill[1]) == {
        "kv_connector": "PdPushConnector",
        "kv_connector_module_path": "pdctl_connector.connector",
        "kv_role": "kv_producer",
        "engine_id": "qwen3-prefill-1-@START_ID@",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kv_lease_duration": 9,
            "pdctl": {
                "timeout_s": 12.5,
                "telemetry_host": "127.0.0.1",
                "progress_thread": False,
                "telemetry_port": 18100,
                "cluster": "qwen3",
                "instance": "prefill-1",
            },
        },
    }
    decode = transfer_config(plan.decode[0])
    assert (decode["kv_role"], decode["engine_id"]) == ("kv_consumer", "qwen3-decode-0-@START_ID@")


def test_pull_configuration_is_that_of_vllm_alone() -> None:
    assert transfer_config(planned(changed(transfer={"mode": "pull"})).decode[0]) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "engine_id": "qwen3-decode-0-@START_ID@",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": 30},
    }


def test_efa_uses_libfabric_unless_told_otherwise() -> None:
    data = changed()
    data["fabric"] = "efa"
    assert transfer_config(planned(data).prefill[0])["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]
    data["transfer"] = {"extra": {"backends": ["UCX"]}}
    assert transfer_config(planned(data).prefill[0])["kv_connector_extra_config"]["backends"] == ["UCX"]


def test_more_connector_options() -> None:
    extra = {"num_threads": 2, "pdctl": {"telemetry_host": "0.0.0.0", "late": 1}}
    instance = planned(changed(transfer={"extra": extra})).prefill[0]
    config = transfer_config(instance)["kv_connector_extra_config"]
    assert config["num_threads"] == 2
    assert config["pdctl"] == {
        "timeout_s": 30.0,
        "telemetry_host": "0.0.0.0",
        "progress_thread": False,
        "late": 1,
        "telemetry_port": 18100,
        "cluster": "qwen3",
        "instance": "prefill-0",
    }
    assert {use.address for use in instance.ports if use.purpose == "telemetry"} == {"0.0.0.0"}


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"bidirectional_kv_xfer": True}, "bidirectional_kv_xfer"),
        ({"kv_lease_duration": 5}, "kv_lease_duration"),
        ({"backends": "UCX"}, "backends"),
        ({"backends": []}, "backends"),
        ({"pdctl": 1}, "pdctl"),
        ({"pdctl": {"instance": "x"}}, "pdctl.instance"),
        ({"pdctl": {"telemetry_port": 1}}, "pdctl.telemetry_port"),
    ],
)
def test_connector_options_that_would_break_the_cluster(extra: dict[str, Any], key: str) -> None:
    assert list(refused(changed(transfer={"extra": extra}))) == [f"transfer.extra.{key}"]


def test_bidirectional_transfer_is_fine_in_pull_mode() -> None:
    planned(changed(transfer={"mode": "pull", "extra": {"bidirectional_kv_xfer": True, "kv_lease_duration": 30}}))


# --- the router --------------------------------------------------------------------------------------------------


def test_router_command() -> None:
    hosts = [{"name": "b", "address": "10.0.0.2"}, {"name": "a", "address": "10.0.0.1"}]
    data = changed(prefill={"hosts": hosts}, router={"policy": "cache_aware", "args": {"queue-size": 5, "dry": False}})
    argv = planned(data).router.argv
    assert argv[:2] == ("python3", "-c")
    compile(argv[2], "gate", "exec")
    assert argv[3:] == (
        "vllm_router.launch_router", "--host", "p1", "--port", "8000", "--vllm-pd-disaggregation",
        "--prefill", "http://10.0.0.1:8100", "--prefill", "http://10.0.0.2:8100", "--decode", "http://d1:8200",
        "--policy", "cache_aware", "--prometheus-host", "127.0.0.1", "--prometheus-port", "29000",
        "--health-check-interval-secs", "3", "--health-failure-threshold", "3", "--health-success-threshold", "2",
        "--queue-size", "5",
    )  # fmt: skip


def test_health_checks_of_the_router_are_the_users_if_they_say_so() -> None:
    argv = planned(changed(router={"args": {"health-check-interval-secs": 20}})).router.argv
    assert argv.count("--health-check-interval-secs") == 1
    assert argv[argv.index("--health-check-interval-secs") + 1] == "20"


def test_options_of_the_router() -> None:
    arguments = {
        "prometheus-host": "0.0.0.0",
        "disable-retries": True,
        "request-id-headers": ["a", "b"],
        "wasm-middleware-route": ["/a", "/b"],
    }
    router = planned(changed(router={"args": arguments})).router
    assert router.argv[-18:] == (
        "--prometheus-host", "0.0.0.0", "--prometheus-port", "29000", "--disable-retries",
        "--health-check-interval-secs", "3", "--health-failure-threshold", "3", "--health-success-threshold", "2",
        "--request-id-headers", "a", "b", "--wasm-middleware-route", "/a", "--wasm-middleware-route", "/b",
    )  # fmt: skip
    assert [(use.purpose, use.address) for use in router.ports] == [("API", "p1"), ("metrics", "0.0.0.0")]


@pytest.mark.parametrize(
    "name", ["prefill", "decode", "worker-urls", "host", "port", "policy", "prometheus-port", "mini-lb", "kv-connector"]
)
def test_router_options_that_would_break_the_cluster(name: str) -> None:
    assert list(refused(changed(router={"args": {name: "x"}}))) == [f"router.args.{name}"]


def test_the_router_may_be_told_what_it_does_anyway() -> None:
    assert "nixl" in planned(changed(router={"args": {"kv-connector": "nixl", "mini-lb": False}})).router.argv


# --- prefill against decode --------------------------------------------------------------------------------------


def sides(prefill: dict[str, Any], decode: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return changed(prefill={"vllm_args": prefill}, decode={"vllm_args": decode}, **sections)


EAGLE = {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("prefill", "decode", "key"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "decode.vllm_args.dtype"),
        ({"kv-cache-dtype": "fp8"}, {}, "prefill.vllm_args.kv-cache-dtype"),
        ({}, {"kv-cache-dtype": "fp8"}, "decode.vllm_args.kv-cache-dtype"),
        ({"attention-backend": "A"}, {"attention-backend": "B"}, "decode.vllm_args.attention-backend"),
        (
            {"disable-hybrid-kv-cache-manager": True},
            {},
            "prefill.vllm_args.disable-hybrid-kv-cache-manager",
        ),
        ({}, {"speculative-config": EAGLE}, "decode.vllm_args.speculative-config"),
        (
            {"speculative-config": {**EAGLE, "model": "x"}},
            {"speculative-config": EAGLE},
            "decode.vllm_args.speculative-config",
        ),
        ({"revision": "v1"}, {"revision": "v2"}, "decode.vllm_args.revision"),
        ({"tokenizer": "other"}, {}, "prefill.vllm_args.tokenizer"),
        ({"chat-template": "/t"}, {}, "prefill.vllm_args.chat-template"),
        ({"hf-overrides": {"a": 1}}, {"hf-overrides.a": 2}, "decode.vllm_args.hf-overrides"),
        ({"served-model-name": ["a", "b"]}, {"served-model-name": "c"}, "decode.vllm_args.served-model-name"),
        ({"served-model-name": "a"}, {}, "prefill.vllm_args.served-model-name"),
        ({"block-size": 16}, {"block-size": 32}, "decode.vllm_args.block-size"),
    ],
)  # fmt: skip
def test_settings_that_must_agree(prefill: dict[str, Any], decode: dict[str, Any], key: str) -> None:
    assert list(refused(sides(prefill, decode))) == [key]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        # What the model's own type is, is not known here.
        ({"dtype": "bfloat16"}, {"dtype": "auto"}),
        ({"dtype": "bfloat16"}, {}),
        ({"kv-cache-dtype": "auto"}, {}),
        ({"attention-backend": "FLASHINFER"}, {}),
        ({"attention-backend": "flash_attn"}, {"attention-backend": "FLASH_ATTN"}),
        ({"no-disable-hybrid-kv-cache-manager": True}, {}),
        ({"speculative-config": EAGLE}, {"speculative-config": {**EAGLE, "num_speculative_tokens": 5}}),
        ({"speculative-config": EAGLE}, {"speculative-config": json.dumps(EAGLE)}),
        ({}, {"speculative-config": {"method": "ngram"}}),
        ({"hf-overrides": {"a": {"b": 1}}}, {"hf-overrides.a.b": 1}),
        ({"hf-overrides": '{"a": 1}'}, {"hf-overrides": {"a": 1}}),
        ({"served-model-name": ["a", "b"]}, {"served-model-name": "b"}),
        ({"max-model-len": 1000, "max-num-seqs": 4, "enable-prefix-caching": True}, {"enable-prefix-caching": False}),
        ({"block-size": 32}, {"block-size": 16}),
        ({"block-size": 16}, {}),
        ({"revision": "main"}, {}),
    ],
)
def test_settings_that_may_differ(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    planned(sides(prefill, decode))


def test_a_difference_names_both_lines() -> None:
    problems = refused(sides({"dtype": "float32"}, {"dtype": "bfloat16"}))
    assert "(line 1)" in problems["decode.vllm_args.dtype"]
    assert "float32" in problems["decode.vllm_args.dtype"]
    assert "bfloat16" in problems["decode.vllm_args.dtype"]


def test_the_handshake_check_can_be_switched_off_but_wrong_text_cannot() -> None:
    extra = {"extra": {"enforce_handshake_compat": False}}
    planned(sides({"kv-cache-dtype": "fp8"}, {}, transfer=extra))
    assert refused(sides({"revision": "v1"}, {}, transfer=extra))


def test_block_sizes_the_other_way_round_in_pull_mode() -> None:
    planned(sides({"block-size": 16}, {"block-size": 32}, transfer={"mode": "pull"}))
    assert refused(sides({"block-size": 32}, {"block-size": 16}, transfer={"mode": "pull"}))


@pytest.mark.parametrize(("prefill", "decode"), [(8, 4), (4, 8), (1, 8), (6, 3), (3, 3)])
def test_tensor_parallel_sizes_that_divide(prefill: int, decode: int) -> None:
    planned(changed(prefill={"tensor_parallel": prefill}, decode={"tensor_parallel": decode}))


@pytest.mark.parametrize(("prefill", "decode"), [(4, 3), (6, 4), (4, 6)])
def test_tensor_parallel_sizes_that_do_not(prefill: int, decode: int) -> None:
    problems = refused(changed(prefill={"tensor_parallel": prefill}, decode={"tensor_parallel": decode}))
    assert list(problems) == ["decode.tensor_parallel"]


def test_the_base_of_these_tests_is_fine() -> None:
    planned(BASE)


@pytest.mark.parametrize(("fabric", "wanted"), [("tcp", False), ("efa", True), ("infiniband", True)])
def test_the_progress_thread_is_off_over_tcp_alone(fabric: str, wanted: bool) -> None:
    config = transfer_config(planned(changed(fabric=fabric)).prefill[0])["kv_connector_extra_config"]
    assert config["pdctl"]["progress_thread"] is wanted
    own = {"extra": {"pdctl": {"progress_thread": not wanted}}}
    config = transfer_config(planned(changed(fabric=fabric, transfer=own)).prefill[0])["kv_connector_extra_config"]
    assert config["pdctl"]["progress_thread"] is not wanted
