"""Checks of the model: there, the same, its layout and its memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.doctor.checks.model import CHECKS
from pdctl.doctor.facts import MemoryFacts, ModelFacts, NeuronDevice, NeuronFacts
from pdctl.errors import ClusterFileError
from tests.unit.doctor.builders import (
    CONFIG,
    ERROR,
    GIB,
    WARNING,
    all_pass,
    cluster,
    context,
    everywhere,
    failure,
    findings,
    gpus,
    interpreter,
    model,
    spoiled,
    unreachable,
    verdicts,
    without,
)
from tests.unit.doctor.test_model_shape import DEEPSEEK, GEMMA3, QWEN3_NEXT, configs

PULL = {"mode": "pull"}


def roles(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **sections: Any) -> Any:
    """A cluster with these options of vLLM."""
    return cluster(
        prefill={"vllm_args": prefill or {}},
        decode={"vllm_args": decode or {}},
        **sections,
    )


def sizes(prefill: int, decode: int, **sections: Any) -> Any:
    return cluster(prefill={"tensor_parallel": prefill}, decode={"tensor_parallel": decode}, **sections)


def with_config(data: Any, config: dict[str, Any], **fields: Any) -> Any:
    facts = ModelFacts(found="cache", config=config, weights_bytes=GIB, weights_complete=True, **fields)
    return everywhere(context(data), model=facts)


def only(check_id: str, given_context: Any) -> str:
    """The one verdict that a check gives to all hosts."""
    found = set(verdicts(CHECKS, check_id, given_context).values())
    assert len(found) == 1, found
    return found.pop()


def test_a_healthy_cluster_passes() -> None:
    for data in (cluster(), sizes(8, 8), sizes(4, 8), sizes(8, 2), cluster(transfer=PULL)):
        assert all_pass(CHECKS, context(data)) == {}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_nothing_is_judged_without_facts(check: Any) -> None:
    data = cluster(
        prefill={"tensor_parallel": 2, "vllm_args": {"max-model-len": 1000}},
        decode={"tensor_parallel": 4, "vllm_args": {"max-model-len": 1000}},
    )
    found = findings(CHECKS, check.id, without(context(data), "model", "the disk hangs"))
    # These need no more than the cluster file.
    if check.id in ("MOD007", "MOD008", "MOD010"):
        assert {one.verdict.value for one in found} <= {"pass"}
    else:
        assert found
        assert {one.verdict.value for one in found} == {"skipped"}
    assert set(verdicts(CHECKS, check.id, unreachable(context(data), "d1")).values()) <= {"pass", "skipped"}


# --- MOD001, MOD002: there, and whole


@pytest.mark.parametrize(
    ("name", "sections", "verdict", "word"),
    [
        ("Qwen/Qwen3-32B", {}, "warning", "downloaded"),
        ("Qwen/Qwen3-32B", {"env": {"HF_HUB_OFFLINE": "1"}}, "error", "HF_HUB_OFFLINE"),
        ("Qwen/Qwen3-32B", {"env": {"HF_HUB_OFFLINE": "0"}}, "warning", "downloaded"),
        ("/models/qwen", {}, "error", "/models/qwen"),
    ],
)
def test_a_model_that_is_not_there(name: str, sections: dict[str, Any], verdict: str, word: str) -> None:
    given_context = spoiled(context(cluster(model=name, **sections)), "d1", model=ModelFacts(found="no", path="/x"))
    found = failure(CHECKS, "MOD001", given_context)
    assert (found.hosts, found.severity.value) == (("d1",), verdict)
    assert word in found.message
    assert verdicts(CHECKS, "MOD002", given_context)[("d1",)] == "skipped"


def test_offline_by_the_login_counts_too() -> None:
    given_context = spoiled(context(), "d1", model=ModelFacts(found="no"), environment={"TRANSFORMERS_OFFLINE": "yes"})
    assert failure(CHECKS, "MOD001", given_context).severity == ERROR


def test_a_token_is_mentioned_unless_it_is_given() -> None:
    absent = ModelFacts(found="no")
    assert "HF_TOKEN" in failure(CHECKS, "MOD001", spoiled(context(), "d1", model=absent)).fix
    data = cluster(env={"HF_TOKEN": {"from_env": "TEST_TOKEN"}})
    assert "HF_TOKEN" not in failure(CHECKS, "MOD001", spoiled(context(data), "d1", model=absent)).fix


def test_a_config_that_cannot_be_read() -> None:
    broken = ModelFacts(found="folder", path="/m", error="config.json cannot be read: Permission denied")
    found = failure(CHECKS, "MOD001", spoiled(context(cluster(model="/m")), "d1", model=broken))
    assert "Permission denied" in found.evidence


def test_a_model_from_elsewhere_is_not_looked_for() -> None:
    given_context = everywhere(context(cluster(model="s3://bucket/qwen")), model=ModelFacts(found="no"))
    assert findings(CHECKS, "MOD001", given_context) == []
    assert findings(CHECKS, "MOD002", given_context) == []
    dummy = context(roles({"load-format": "dummy"}, {"load-format": "dummy"}))
    assert findings(CHECKS, "MOD002", spoiled(dummy, "d1", model=model(weights_complete=False))) == []


def test_files_are_missing() -> None:
    torn = model(weights_complete=False, error="1 of 17 files of weights are missing or empty: model-00003")
    found = failure(CHECKS, "MOD002", spoiled(context(), "d1", model=torn))
    assert (found.severity, found.commands) == (WARNING, ("hf download Qwen/Qwen3-32B",))
    offline = cluster(env={"HF_HUB_OFFLINE": 1})
    assert failure(CHECKS, "MOD002", spoiled(context(offline), "d1", model=torn)).severity == ERROR
    folder = model(found="folder", weights_complete=False, error="1 of 17 files")
    found = failure(CHECKS, "MOD002", spoiled(context(cluster(model="/m")), "d1", model=folder))
    assert found.severity == ERROR
    assert "1 of 17 files" in found.evidence
    unknown = model(weights_complete=None)
    assert verdicts(CHECKS, "MOD002", spoiled(context(), "d1", model=unknown))[("d1",)] == "skipped"


# --- MOD003: the same


def test_another_config_is_an_error_that_says_what_differs() -> None:
    found = failure(CHECKS, "MOD003", spoiled(context(), "d1", model=model(config={"rms_norm_eps": 1e-5})))
    assert (found.hosts, found.severity) == (("d1",), ERROR)
    assert found.evidence == "rms_norm_eps: 1e-05 here, not given there"


def test_keys_without_meaning_are_passed_over() -> None:
    same = model(config={"transformers_version": "4.57.1", "_name_or_path": "/elsewhere"})
    assert only("MOD003", spoiled(context(), "d1", model=same)) == "pass"


def test_other_revisions_and_sizes_are_warnings() -> None:
    found = failure(CHECKS, "MOD003", spoiled(context(), "d1", model=model(revision="abc")))
    assert found.severity == WARNING
    assert "9216db5 on p1; abc on d1" in found.evidence
    found = failure(CHECKS, "MOD003", spoiled(context(), "d1", model=model(weights_bytes=5)))
    assert found.severity == WARNING
    # A download that is not over has another size, which MOD002 says.
    part = model(weights_bytes=5, weights_complete=False)
    assert only("MOD003", spoiled(context(), "d1", model=part)) == "pass"


# --- MOD004, MOD005: heads and ranks


@pytest.mark.parametrize(
    ("config", "tensor", "verdict"),
    [
        ({}, 64, "pass"),
        ({}, 16, "pass"),
        ({"num_attention_heads": 40}, 16, "error"),
        ({"num_attention_heads": 48, "num_key_value_heads": 6}, 4, "error"),
        ({"num_attention_heads": 48, "num_key_value_heads": 6}, 12, "pass"),
        ({"num_attention_heads": 48, "num_key_value_heads": 6}, 16, "error"),
    ],
)
def test_heads_divide(config: dict[str, Any], tensor: int, verdict: str) -> None:
    given_context = everywhere(context(sizes(tensor, tensor)), model=model(config=config))
    assert set(verdicts(CHECKS, "MOD004", given_context).values()) == {verdict}


def test_sizes_that_would_do_are_named() -> None:
    given_context = everywhere(context(sizes(1, 3)), model=model())
    found = failure(CHECKS, "MOD004", given_context)
    assert found.hosts == ("d1",)
    assert "choose one of 1, 2, 4, 8, 16, 32, 64" in found.fix
    # Every rank has the whole latent cache, whatever the number of ranks.
    assert set(verdicts(CHECKS, "MOD004", with_config(sizes(16, 16), DEEPSEEK)).values()) == {"pass"}


@pytest.mark.parametrize(
    ("prefill", "decode", "mode", "verdict"),
    [
        (4, 8, "push", "pass"),
        (4, 16, "push", "error"),
        (16, 4, "push", "pass"),
        (4, 16, "pull", "pass"),
        (16, 4, "pull", "error"),
        (8, 4, "pull", "pass"),
    ],
)
def test_more_ranks_than_kv_heads_on_the_other_side(prefill: int, decode: int, mode: str, verdict: str) -> None:
    given_context = context(sizes(prefill, decode, transfer={"mode": mode}))
    assert only("MOD005", given_context) == verdict
    if verdict == "error":
        found = failure(CHECKS, "MOD005", given_context)
        assert found.hosts == ("p1", "d1")
        assert "8 KV heads" in found.message


def test_ratios_that_do_not_matter() -> None:
    assert findings(CHECKS, "MOD005", context(sizes(16, 16))) == []
    assert only("MOD005", with_config(sizes(4, 16), DEEPSEEK)) == "pass"
    assert only("MOD005", with_config(sizes(4, 16), {**QWEN3_NEXT})) == "pass"
    assert only("MOD005", with_config(sizes(4, 16), {**CONFIG, "num_key_value_heads": [1]})) == "info"


# --- MOD006, MOD007: kinds of attention, pipeline parallelism

STAGES = {"pipeline-parallel-size": 2}


@pytest.mark.parametrize(
    ("config", "prefill", "sections", "verdict"),
    [
        (CONFIG, {}, {}, "pass"),
        (DEEPSEEK, STAGES, {}, "pass"),
        (GEMMA3, {}, {}, "pass"),
        (QWEN3_NEXT, {}, {}, "pass"),
        ({**CONFIG, "is_encoder_decoder": True}, {}, {}, "error"),
        (QWEN3_NEXT, STAGES, {}, "error"),
        (GEMMA3, STAGES, {}, "pass"),
        (GEMMA3, STAGES, {"transfer": PULL}, "error"),
        (QWEN3_NEXT, {}, {"env": {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}}, "error"),
        (CONFIG, {}, {"env": {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}}, "pass"),
    ],
)
def test_kinds_of_attention(config: dict[str, Any], prefill: Any, sections: Any, verdict: str) -> None:
    assert only("MOD006", with_config(roles(prefill, **sections), config)) == verdict


def test_windows_with_stages_and_more_decode_ranks() -> None:
    data = cluster(
        prefill={"tensor_parallel": 1, "vllm_args": dict(STAGES)},
        decode={"tensor_parallel": 2},
    )
    assert only("MOD006", with_config(data, GEMMA3)) == "error"
    assert only("MOD006", with_config(data, CONFIG)) == "pass"


@pytest.mark.parametrize(
    ("version", "mode", "verdict"),
    [
        ("0.1.17", "push", "error"),
        ("0.1.16", "push", "error"),
        ("0.1.18", "push", "warning"),
        (None, "push", "warning"),
        ("0.1.17", "pull", None),
    ],
)
def test_stages_behind_the_router(version: str | None, mode: str, verdict: str | None) -> None:
    python = interpreter(packages={"vllm-router": version})
    given_context = everywhere(context(roles(STAGES, transfer={"mode": mode})), interpreters=(python,))
    assert list(verdicts(CHECKS, "MOD007", given_context).values()) == ([verdict] if verdict else [])


def test_other_sizes_of_prefill() -> None:
    found = failure(CHECKS, "MOD007", context(roles({"prefill-context-parallel-size": 2})))
    assert found.severity == ERROR
    assert "context parallelism" in found.message
    assert findings(CHECKS, "MOD007", context(roles({"prefill-context-parallel-size": 2}, transfer=PULL))) == []
    many = context(roles({"pipeline-parallel-size": 65}))
    assert "64 layers" in failure(CHECKS, "MOD007", many).message
    assert findings(CHECKS, "MOD007", context()) == []


# --- MOD008, MOD009: what both sides must agree in


@pytest.mark.parametrize(
    ("prefill", "decode", "sections", "verdict"),
    [
        ({}, {}, {}, "pass"),
        ({"block-size": 32}, {"block-size": 32}, {}, "pass"),
        ({"block-size": 32}, {"block-size": 16}, {}, "error"),
        ({"block-size": 32}, {}, {}, "warning"),
        ({"block-size": 16}, {}, {}, "pass"),
        ({}, {"block-size": 16}, {"accelerator": "cpu"}, "warning"),
        ({}, {"block-size": 128}, {"accelerator": "cpu"}, "pass"),
    ],
)
def test_block_sizes(prefill: Any, decode: Any, sections: Any, verdict: str) -> None:
    assert only("MOD008", context(roles(prefill, decode, **sections))) == verdict


def test_pull_mode_takes_other_block_sizes() -> None:
    data = roles({"block-size": 16}, {"block-size": 32}, transfer=PULL)
    assert findings(CHECKS, "MOD008", context(data)) == []


@pytest.mark.parametrize(
    ("prefill", "decode", "dtype", "verdict"),
    [
        ({}, {}, "bfloat16", "pass"),
        ({"dtype": "float16"}, {}, "bfloat16", "error"),
        ({"dtype": "bfloat16"}, {}, "bfloat16", "pass"),
        ({}, {"dtype": "half"}, "float16", "pass"),
        # What the platform makes of float32 is not known here.
        ({"dtype": "bfloat16"}, {}, "float32", "pass"),
        ({"dtype": "bfloat16"}, {}, None, "pass"),
    ],
)
def test_types_of_numbers(prefill: Any, decode: Any, dtype: str | None, verdict: str) -> None:
    given_context = everywhere(context(roles(prefill, decode)), model=model(config={"torch_dtype": dtype}))
    assert only("MOD009", given_context) == verdict


def test_attention_backends_that_may_differ() -> None:
    one_sided = context(roles({"attention-backend": "FLASHINFER"}))
    assert only("MOD009", one_sided) == "warning"
    unlike = spoiled(context(), "d1", nvidia=gpus(46068 * 2**20, name="NVIDIA L40S"))
    found = failure(CHECKS, "MOD009", unlike)
    assert "NVIDIA L40S" in found.message
    given_by_both = roles({"attention-backend": "FLASH_ATTN"}, {"attention-backend": "FLASH_ATTN"})
    assert only("MOD009", spoiled(context(given_by_both), "d1", nvidia=gpus(name="NVIDIA L40S"))) == "pass"
    relaxed = cluster(transfer={"extra": {"enforce_handshake_compat": False}})
    assert only("MOD009", spoiled(context(relaxed), "d1", nvidia=gpus(name="NVIDIA L40S"))) == "pass"


# --- MOD010, MOD011: lengths


@pytest.mark.parametrize(
    ("prefill", "decode", "verdict"),
    [
        ({}, {}, "pass"),
        ({"max-model-len": 8192}, {"max-model-len": "8K"}, "pass"),
        ({"max-model-len": 8192}, {"max-model-len": "8k"}, "warning"),
        ({"max-model-len": 8192}, {}, "warning"),
        ({"max-model-len": 40960}, {}, "pass"),
        ({"max-model-len": -1}, {"max-model-len": 8192}, None),
        ({"max-model-len": "auto"}, {}, None),
    ],
)
def test_lengths_of_both_sides(prefill: Any, decode: Any, verdict: str | None) -> None:
    given_context = context(roles(prefill, decode))
    assert list(verdicts(CHECKS, "MOD010", given_context).values()) == ([verdict] if verdict else [])


@pytest.mark.parametrize(
    ("length", "config", "sections", "verdict"),
    [
        (40960, {}, {}, "pass"),
        ("41k", {}, {}, "error"),
        (40961, {}, {}, "error"),
        (40961, {}, {"env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}, "warning"),
        (40961, {"rope_scaling": {"type": "linear", "factor": 2}}, {}, None),
        (-1, {}, {}, None),
    ],
)
def test_lengths_that_the_model_allows(length: Any, config: Any, sections: Any, verdict: str | None) -> None:
    data = roles({"max-model-len": length}, {"max-model-len": length}, **sections)
    given_context = everywhere(context(data), model=model(config=config))
    assert set(verdicts(CHECKS, "MOD011", given_context).values()) == ({verdict} if verdict else set())


def test_overrides_change_what_the_model_allows() -> None:
    options = {"max-model-len": 100000, "hf-overrides": {"max_position_embeddings": 131072}}
    assert set(verdicts(CHECKS, "MOD011", context(roles(options, options))).values()) == {"pass"}
    dotted = {"max-model-len": 100000, "hf-overrides.max_position_embeddings": 131072}
    assert set(verdicts(CHECKS, "MOD011", context(roles(dotted, dotted))).values()) == {"pass"}


# --- MOD012: memory


@pytest.mark.parametrize(
    ("memory_gib", "tensor", "options", "verdict"),
    [
        # 61 GiB of weights, 10 GiB for 40960 tokens.
        (141, 1, {}, "pass"),
        (80, 1, {}, "warning"),
        (48, 1, {}, "error"),
        (48, 2, {}, "pass"),
        (24, 4, {}, "pass"),
        (80, 1, {"max-model-len": 8192}, "pass"),
        (80, 1, {"gpu-memory-utilization": 0.85}, "error"),
        (80, 1, {"max-model-len": -1}, "pass"),
        (80, 1, {"kv-cache-dtype": "fp8"}, "pass"),
        (80, 1, {"kv-cache-dtype": "nvfp4"}, "pass"),
        (80, 1, {"kv-cache-memory-bytes": "4G"}, "error"),
        (80, 1, {"kv-cache-memory-bytes": "12G"}, "warning"),
        (80, 1, {"kv-cache-memory-bytes": "30G"}, "error"),
        (48, 1, {"quantization": "fp8"}, "skipped"),
        (48, 1, {"cpu-offload-gb": 40}, "skipped"),
        (141, 1, {"dtype": "float32"}, "error"),
    ],
)
def test_memory_of_gpus(memory_gib: int, tensor: int, options: dict[str, Any], verdict: str) -> None:
    data = cluster(
        prefill={"tensor_parallel": tensor, "vllm_args": options},
        decode={"tensor_parallel": tensor, "vllm_args": options},
    )
    given_context = everywhere(context(data), nvidia=gpus(memory_gib * GIB))
    assert set(verdicts(CHECKS, "MOD012", given_context).values()) == {verdict}


def test_the_arithmetic_is_shown_and_the_fix_fits() -> None:
    data = roles({"gpu-memory-utilization": 0.85}, {"gpu-memory-utilization": 0.85})
    given_context = spoiled(context(data), "d1", nvidia=gpus(80 * GIB))
    found = failure(CHECKS, "MOD012", given_context)
    assert found.hosts == ("d1",)
    assert found.message == (
        "decode: one request of 40960 tokens needs 10.0 GiB of KV cache per GPU, but only 6.5 GiB are there"
    )
    assert found.evidence == (
        "GPU 80.0 GiB x 0.85 = 68.0 GiB; weights 61.0 GiB (files) / TP 1 = 61.0 GiB; KV cache of 40960 tokens: 10.0 "
        "GiB per rank; 0.5 GiB for CUDA; left for the KV cache: 6.5 GiB"
    )
    length = int(found.fix.split("max-model-len: ")[1].split("}")[0])
    assert 26000 < length < 40960
    shorter = {"gpu-memory-utilization": 0.85, "max-model-len": length}
    again = spoiled(context(roles(shorter, shorter)), "d1", nvidia=gpus(80 * GIB))
    assert failure(CHECKS, "MOD012", again).severity == WARNING


def test_only_the_planned_gpus_count() -> None:
    nvidia = gpus(141 * GIB)
    mixed = nvidia.model_copy(
        update={"gpus": (*nvidia.gpus[:7], nvidia.gpus[7].model_copy(update={"memory_bytes": 16 * GIB}))}
    )
    assert only("MOD012", everywhere(context(), nvidia=mixed)) == "pass"
    data = cluster(prefill={"devices": [7]}, decode={"devices": [7]})
    assert only("MOD012", everywhere(context(data), nvidia=mixed)) == "error"
    unknown = everywhere(context(), nvidia=gpus(count=0))
    assert only("MOD012", unknown) == "skipped"


def test_weights_that_are_not_there_yet_are_estimated() -> None:
    absent = model(weights_bytes=0, weights_complete=False)
    assert only("MOD012", everywhere(context(), model=absent, nvidia=gpus(141 * GIB))) == "pass"
    assert only("MOD012", everywhere(context(), model=absent, nvidia=gpus(40 * GIB))) == "error"
    # Files in a larger type than config.json says are brought down to it.
    large = model(weights_bytes=131 * 10**9)
    assert only("MOD012", everywhere(context(), model=large, nvidia=gpus(141 * GIB))) == "pass"


def test_experts_are_spread_over_data_parallel_ranks() -> None:
    options = {"enable-expert-parallel": True}
    data = cluster(
        prefill={"data_parallel": 4, "vllm_args": options}, decode={"data_parallel": 4, "vllm_args": options}
    )
    config = {**DEEPSEEK, "n_routed_experts": 256, "max_position_embeddings": 4096}
    facts = ModelFacts(found="cache", config=config, weights_bytes=400 * GIB, weights_complete=True)
    assert only("MOD012", everywhere(context(data), model=facts, nvidia=gpus(141 * GIB))) == "pass"
    plain = cluster(prefill={"data_parallel": 4}, decode={"data_parallel": 4})
    assert only("MOD012", everywhere(context(plain), model=facts, nvidia=gpus(141 * GIB))) == "error"


SMALL = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 2048,
    "intermediate_size": 8192, "vocab_size": 60000, "max_position_embeddings": 65536, "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "total_gib", "verdict"),
    [
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": 1}}, 16, "pass"),
        # 65536 tokens x 4 layers x 2 heads x 128 numbers x 4 bytes are 0.25 GiB; of 8 times as many 2 GiB.
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": 1}, "length": 65536 * 8}, 16, "error"),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": 20}}, 16, "error"),
        ({}, 16, "pass"),
        ({}, 1, "error"),
    ],
)
def test_memory_of_hosts(sections: dict[str, Any], total_gib: int, verdict: str) -> None:
    length = sections.get("length", 65536)
    options = {"dtype": "float32"}
    data = roles(options, options, accelerator="cpu", env=sections.get("env", {}))
    facts = ModelFacts(
        found="folder",
        config={**SMALL, "max_position_embeddings": length},
        weights_bytes=GIB,
        weights_complete=True,
    )
    memory = MemoryFacts(total_bytes=total_gib * GIB, available_bytes=total_gib * GIB)
    given_context = everywhere(context(data), model=facts, memory=memory)
    assert set(verdicts(CHECKS, "MOD012", given_context).values()) == {verdict}


def test_instances_of_one_host_share_its_memory() -> None:
    facts = ModelFacts(found="folder", config=SMALL, weights_bytes=GIB, weights_complete=True)
    one_host = {"hosts": ["local"], "vllm_args": {"dtype": "float32"}}
    data = cluster(
        accelerator="cpu",
        env={"VLLM_CPU_KVCACHE_SPACE": 4},
        prefill={**one_host, "instances_per_host": 2},
        decode=one_host,
        router={"host": "local"},
    )
    memory = MemoryFacts(total_bytes=64 * GIB, available_bytes=60 * GIB)
    roomy = everywhere(context(data), model=facts, memory=memory)
    assert only("MOD012", roomy) == "pass"
    # Three times 4 GiB and 1 GiB of weights do not go into 14 GiB.
    tight = everywhere(roomy, memory=MemoryFacts(total_bytes=64 * GIB, available_bytes=60, cgroup_limit_bytes=14 * GIB))
    found = failure(CHECKS, "MOD012", tight)
    assert "15.0 GiB" in found.message
    assert "14.0 GiB" in found.message
    greedy = everywhere(context({**data, "env": {}}), model=facts, memory=memory)
    assert failure(CHECKS, "MOD012", greedy).severity == WARNING


def test_memory_of_neuron_devices() -> None:
    devices = tuple(NeuronDevice(index=index, cores=8, memory_bytes=96 * GIB) for index in range(16))
    given_context = everywhere(
        context(cluster(accelerator="neuron")), neuron=NeuronFacts(present=True, devices=devices)
    )
    assert only("MOD012", given_context) == "pass"
    few = everywhere(
        given_context,
        neuron=NeuronFacts(present=True, devices=(devices[0].model_copy(update={"memory_bytes": 32 * GIB}),)),
    )
    assert only("MOD012", few) == "error"
    none = everywhere(given_context, neuron=NeuronFacts(present=True))
    assert only("MOD012", none) == "skipped"


# --- wild facts


@given(
    config=configs,
    base=st.sampled_from([{}, CONFIG, DEEPSEEK, GEMMA3, QWEN3_NEXT]),
    weights=st.one_of(st.none(), st.integers(-(2**60), 2**60)),
    found=st.text(max_size=6),
    accelerator=st.sampled_from(["cuda", "cpu", "neuron"]),
)
def test_no_model_makes_a_check_fail_itself(
    config: dict[str, Any], base: dict[str, Any], weights: int | None, found: str, accelerator: str
) -> None:
    facts = ModelFacts(found=found, config={**base, **config}, weights_bytes=weights)
    data = sizes(2, 4, accelerator=accelerator)
    given_context = spoiled(context(data), "p1", model=facts)
    for check in CHECKS:
        findings(CHECKS, check.id, given_context)


@given(
    options=st.dictionaries(
        st.sampled_from(
            [
                "max-model-len",
                "block-size",
                "gpu-memory-utilization",
                "kv-cache-memory-bytes",
                "kv-cache-dtype",
                "load-format",
                "pipeline-parallel-size",
            ]
        ),
        st.one_of(st.integers(1, 10**6), st.floats(0, 2), st.text("0123456789kKgG.-e", max_size=6), st.booleans()),
        max_size=4,
    )
)
def test_no_option_makes_a_check_fail_itself(options: dict[str, Any]) -> None:
    stages = options.get("pipeline-parallel-size")
    if stages is not None and not (isinstance(stages, int) and not isinstance(stages, bool) and stages <= 8):
        options = {name: value for name, value in options.items() if name != "pipeline-parallel-size"}
    decode = {
        name: value for name, value in options.items() if name not in ("pipeline-parallel-size", "kv-cache-dtype")
    }
    prefill = {name: value for name, value in options.items() if name != "kv-cache-dtype"}
    try:
        given_context = context(roles(prefill, decode))
    except ClusterFileError:  # The doctor never sees it.
        return
    for check in CHECKS:
        findings(CHECKS, check.id, given_context)
