"""Reading config.json: layouts of real models, and files of any shape."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.doctor.memory_fit import CUDA_OVERHEAD_BYTES, fit, gib, longest_request, weights_share
from pdctl.doctor.model_shape import read_shape
from tests.unit.doctor.builders import CONFIG, GIB

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_scaling": {"type": "yarn", "factor": 40},
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 16,
}


def test_full_attention() -> None:
    shape = read_shape(CONFIG)
    assert (shape.layers, shape.attention_heads, shape.kv_heads, shape.key_size) == (64, 64, 8, 128)
    assert (shape.attention, shape.dtype, shape.positions) == (
        "full attention", "bfloat16", (40960, "max_position_embeddings"),
    )  # fmt: skip
    # 64 layers x 8 heads x (128 + 128) numbers x 2 bytes.
    assert shape.kv_bytes(1, tensor=1, pipeline=1, number_bytes=2) == 256 * 1024
    assert shape.kv_bytes(40960, tensor=8, pipeline=2, number_bytes=2) == 40960 * 256 * 1024 // 16
    # More ranks than heads keep one head each.
    assert shape.kv_bytes(1, tensor=16, pipeline=1, number_bytes=2) == 32 * 1024
    # The model has 32.8e9 weights; two thirds of that are known from config.json for sure.
    assert shape.parameters is not None
    assert 16e9 < shape.parameters < 32.8e9


def test_latent_attention_is_on_every_rank() -> None:
    shape = read_shape(DEEPSEEK)
    assert (shape.latent, shape.quantized, shape.parameters) == (True, True, None)
    assert shape.kv_bytes(1, tensor=1, pipeline=1, number_bytes=2) == 61 * 576 * 2
    assert shape.kv_bytes(1, tensor=8, pipeline=1, number_bytes=2) == 61 * 576 * 2
    # YaRN's factor is in the positions already.
    assert shape.positions == (163840, "max_position_embeddings")


def test_windows_stop_growing() -> None:
    shape = read_shape(GEMMA3)
    assert shape.attention == "full and sliding-window attention"
    layer = 8 * 512 * 2
    assert shape.kv_bytes(1000, tensor=1, pipeline=1, number_bytes=2) == 6 * 1000 * layer
    assert shape.kv_bytes(100000, tensor=1, pipeline=1, number_bytes=2) == (100000 + 5 * 1024) * layer


def test_states_have_no_cache_that_grows() -> None:
    shape = read_shape(QWEN3_NEXT)
    assert shape.states
    assert shape.full_layers == 1
    assert shape.attention == "full attention with state layers (Mamba or linear attention)"
    # Which layers have states is not said: nothing is counted.
    unknown = read_shape({name: value for name, value in QWEN3_NEXT.items() if name != "layer_types"})
    assert unknown.states
    assert unknown.kv_bytes(1000, tensor=1, pipeline=1, number_bytes=2) is None


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"num_key_value_heads": None}, 64),
        ({"num_key_value_heads": [8, 4]}, None),
        ({"multi_query": True}, 1),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True}, 8),
        ({"attn_config": {"kv_n_heads": 4}}, 4),
        ({"block_configs": [{}]}, None),
        ({"kv_lora_rank": 512, "model_type": "minicpm3"}, None),
        ({"num_key_value_heads": True}, 64),
        ({"num_key_value_heads": -8}, 64),
    ],
)
def test_kv_heads(changes: dict[str, Any], kv_heads: int | None) -> None:
    assert read_shape({**CONFIG, **changes}).kv_heads == kv_heads


@pytest.mark.parametrize(
    ("changes", "positions", "default_length"),
    [
        ({"max_position_embeddings": 4096, "seq_length": 2048}, (2048, "seq_length"), 2048),
        ({"model_max_length": 128000}, (128000, "model_max_length"), 128000),
        ({"model_max_length": 1e30}, None, None),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, None, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, (40960, "max_position_embeddings"), 40960),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, None, None),
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
            (40960, "max_position_embeddings"),
            4096,
        ),
        ({"max_position_embeddings": "many"}, None, None),
    ],
)
def test_lengths(changes: dict[str, Any], positions: Any, default_length: int | None) -> None:
    shape = read_shape({**CONFIG, **changes})
    assert (shape.positions, shape.default_length) == (positions, default_length)


def test_overrides_win() -> None:
    shape = read_shape(CONFIG, {"num_key_value_heads": 4, "rope_scaling": {"rope_type": "yarn", "factor": 4}})
    assert shape.kv_heads == 4
    nested = read_shape(GEMMA3, {"text_config": {"num_key_value_heads": 2}})
    assert (nested.kv_heads, nested.layers) == (2, 6)


@pytest.mark.parametrize(
    ("dtype", "given", "used"),
    [
        ("bfloat16", None, "bfloat16"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "half", "float16"),
        ("float32", None, None),
        ("float32", "float32", "float32"),
        ("float8_e4m3fn", None, None),
        (None, None, None),
    ],
)
def test_type_in_use(dtype: str | None, given: str | None, used: str | None) -> None:
    assert read_shape({**CONFIG, "torch_dtype": dtype}).dtype_in_use(given) == used


# --- wild files

wild = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just("full_attention")),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)
known_names = st.sampled_from(
    [
        *CONFIG, *DEEPSEEK, *QWEN3_NEXT, "text_config", "thinker_config", "attn_config", "rope_parameters", "dtype",
        "num_kv_shared_layers", "model_max_length", "original_max_position_embeddings", "block_configs",
        "quantization_config", "is_encoder_decoder", "num_experts", "multi_query",
    ]
)  # fmt: skip
configs = st.dictionaries(st.one_of(known_names, st.text(max_size=8)), wild, max_size=12)


@given(config=configs, overrides=configs, base=st.sampled_from([{}, CONFIG, DEEPSEEK, GEMMA3, QWEN3_NEXT]))
def test_no_file_is_too_strange(config: dict[str, Any], overrides: dict[str, Any], base: dict[str, Any]) -> None:
    shape = read_shape({**base, **config}, overrides)
    assert isinstance(shape.attention, str)
    for tensor in (1, 8, 1000):
        size = shape.kv_bytes(10**6, tensor=tensor, pipeline=2, number_bytes=2)
        assert size is None or size >= 0


shapes = st.sampled_from([CONFIG, DEEPSEEK, GEMMA3, QWEN3_NEXT]).map(read_shape)


@given(
    shape=shapes,
    tokens=st.integers(0, 10**6),
    more=st.integers(0, 10**6),
    tensor=st.integers(1, 64),
    number_bytes=st.integers(1, 4),
)
def test_a_longer_request_never_needs_less(shape: Any, tokens: int, more: int, tensor: int, number_bytes: int) -> None:
    short = shape.kv_bytes(tokens, tensor=tensor, pipeline=1, number_bytes=number_bytes)
    long = shape.kv_bytes(tokens + more, tensor=tensor, pipeline=1, number_bytes=number_bytes)
    assert short <= long


# Other numbers of ranks do not divide the heads, which MOD004 refuses.
two_powers = st.sampled_from([1, 2, 4, 8, 16])


@given(shape=shapes, tokens=st.integers(1, 10**6), tensor=two_powers, times=two_powers)
def test_more_ranks_never_need_more_each(shape: Any, tokens: int, tensor: int, times: int) -> None:
    few = shape.kv_bytes(tokens, tensor=tensor, pipeline=1, number_bytes=2)
    many = shape.kv_bytes(tokens, tensor=tensor * times, pipeline=1, number_bytes=2)
    assert many <= few
    # All ranks together never keep less than one.
    assert many * times >= few


@given(total=st.integers(0, 2**45), tensor=st.integers(1, 64), pipeline=st.integers(1, 8), experts=st.integers(1, 8))
def test_shares_of_weights_cover_the_whole(total: int, tensor: int, pipeline: int, experts: int) -> None:
    share = weights_share(total, tensor=tensor, pipeline=pipeline, expert_ranks=experts)
    ranks = tensor * pipeline * experts
    assert total - ranks < share * ranks <= total
    assert weights_share(total, tensor=tensor + 1, pipeline=pipeline, expert_ranks=experts) <= share


@given(
    cache=st.integers(-(2**40), 2**40),
    per_token=st.integers(1, 2**20),
    window=st.integers(0, 2**12),
    limit=st.integers(1, 2**20),
)
def test_the_longest_request_fits_and_the_next_does_not(cache: int, per_token: int, window: int, limit: int) -> None:
    def size(tokens: int) -> int:
        return per_token * tokens + 8 * per_token * min(tokens, window)

    found = longest_request(cache, size, limit)
    assert 0 <= found <= limit
    assert found == 0 or size(found) <= cache
    assert found == limit or size(found + 1) > cache


def test_arithmetic() -> None:
    found = fit(10 * GIB, weights=4 * GIB, overhead=CUDA_OVERHEAD_BYTES, request=2 * GIB)
    assert (found.left, found.requests) == (int(5.5 * GIB), 2.75)
    assert fit(10 * GIB, weights=12 * GIB, overhead=0, request=GIB).requests == 0
    assert fit(10 * GIB, weights=GIB, overhead=0, request=None).requests is None
    by_hand = fit(10 * GIB, weights=4 * GIB, overhead=0, request=2 * GIB, cache=GIB)
    assert (by_hand.left, by_hand.requests) == (6 * GIB, 0.5)
    assert (gib(1.5 * GIB), gib(4096), gib(-GIB)) == ("1.5 GiB", "0.0 MiB", "-1.0 GiB")
