"""What of a model's ``config.json`` matters for its layout and memory. Pure; the file is not trusted.

Follows ``transformers_utils/model_arch_config_convertor.py`` and ``v1/kv_cache_interface.py`` of vLLM 0.32. Whatever
is not known for certain is None, and what is judged by it is then not judged. Sizes are lower bounds: what is found
not to fit does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_LARGEST = 2**40

# ModelArchConfigConvertorBase.is_deepseek_mla, vLLM 0.32. Other types with `kv_lora_rank` keep whole heads.
_LATENT_TYPES = frozenset(
    {
        "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "dots3_note",
        "deepseek_mtp", "k3_dspark", "glm5_next", "glm5_next_text", "glm_moe_dsa", "glm4_moe_lite",
        "glm4_moe_lite_mtp", "kimi_k2", "kimi_linear", "longcat_flash", "pangu_ultra_moe", "pangu_ultra_moe_mtp",
        "bailing_hybrid", "bailing_hybrid_mtp", "bailing_hybrid_v3_mtp", "hy_v4", "hy_v4_mtp",
    }
)  # fmt: skip
_STATE_TYPES = frozenset(
    {
        "mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2", "nemotron_h", "qwen3_next", "falcon_h1",
        "granitemoehybrid", "plamo2", "lfm2", "lfm2_moe", "kimi_linear", "minimax", "bailing_hybrid",
    }
)  # fmt: skip
_STATE_KEYS = (
    "mamba_d_state", "mamba_d_conv", "mamba_state_dim", "ssm_state_size", "ssm_cfg", "hybrid_override_pattern",
    "linear_conv_kernel_dim", "linear_num_key_heads", "linear_attn_config", "attn_type_list",
)  # fmt: skip
_STATE_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "linear"})
_WINDOW_LAYERS = frozenset({"sliding_attention", "chunked_attention"})
_FULL_LAYERS = frozenset({"full_attention", "attention"})
# Keys by which layers differ from each other in a way that the sums here do not know: in their heads, in their caches.
_UNEVEN_HEADS = ("block_configs", "per_layer_config", "num_global_key_value_heads", "swa_num_key_value_heads")
_UNEVEN_CACHES = (
    *_UNEVEN_HEADS, "compress_ratios", "attention_chunk_size", "cross_attention_layers", "global_head_dim",
    "swa_head_dim", "swa_v_head_dim",
)  # fmt: skip

DTYPE_BYTES = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}
"""Bytes of a number by vLLM's names of types."""


@dataclass(frozen=True)
class ModelShape:
    """Layout of a model. None is *not known*.

    Attributes:
        model_type: as config.json has it; empty if it has none.
        layers: hidden layers.
        attention_heads: of a layer, over all ranks.
        kv_heads: of a layer, over all ranks.
        key_size: numbers of a key, of one head.
        value_size: numbers of a value, of one head.
        latent: keeps one latent vector per token for all heads (MLA).
        latent_size: its numbers per token and layer.
        states: has layers with a state instead of a KV cache (Mamba, linear attention).
        windowed: has layers with a sliding window.
        full_layers: layers that keep every token. A lower bound.
        window_layers: further layers that keep a window.
        window: its length in tokens.
        encoder_decoder: an encoder and a decoder with cross attention.
        positions: longest context that config.json allows, and the key that says so.
        default_length: context that vLLM takes by itself.
        dtype: type of the weights: ``bfloat16``, ``float16``, ``float32``.
        quantized: config.json describes a quantisation.
        parameters: numbers of weights that there are at the least.
    """

    model_type: str
    layers: int | None
    attention_heads: int | None
    kv_heads: int | None
    key_size: int | None
    value_size: int | None
    latent: bool
    latent_size: int | None
    states: bool
    windowed: bool
    full_layers: int | None
    window_layers: int
    window: int | None
    encoder_decoder: bool
    positions: tuple[int, str] | None
    default_length: int | None
    dtype: str | None
    quantized: bool
    parameters: int | None

    @property
    def attention(self) -> str:
        """The kind of attention, in words."""
        if self.latent:
            kind = "latent attention (MLA)"
        elif self.windowed and self.full_layers:
            kind = "full and sliding-window attention"
        else:
            kind = "sliding-window attention" if self.windowed else "full attention"
        return f"{kind} with state layers (Mamba or linear attention)" if self.states else kind

    def dtype_in_use(self, given: Any) -> str | None:
        """Type that vLLM computes in for ``--dtype``; None if only the platform decides that."""
        name = str(given) if given is not None else "auto"
        name = {"half": "float16", "float": "float32"}.get(name, name)
        if name != "auto":
            return name if name in DTYPE_BYTES else None
        # float32 is brought down to what the platform prefers (`_resolve_auto_dtype`).
        return self.dtype if self.dtype in ("bfloat16", "float16") else None

    def kv_bytes(self, tokens: int, *, tensor: int, pipeline: int, number_bytes: int) -> int | None:
        """KV cache of one request on one rank, in bytes; a lower bound. None if the layout is not known.

        Args:
            tokens: length of the request.
            tensor: tensor-parallel size. More ranks than KV heads keep one head each; a latent is on every rank.
            pipeline: pipeline-parallel size.
            number_bytes: bytes of one number in the cache.
        """
        per_token = self._layer_bytes(tensor, number_bytes)
        if per_token is None or self.full_layers is None:
            return None
        windowed = self.window_layers * min(tokens, self.window or 0)
        return (self.full_layers * tokens + windowed) * per_token // max(1, pipeline)

    def _layer_bytes(self, tensor: int, number_bytes: int) -> int | None:
        if self.latent:
            return None if self.latent_size is None else self.latent_size * number_bytes
        if self.kv_heads is None or self.key_size is None or self.value_size is None:
            return None
        return max(1, self.kv_heads // max(1, tensor)) * (self.key_size + self.value_size) * number_bytes


def read_shape(config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """Read a model's config.json. Never fails; any value may be of any type.

    Args:
        config: the file.
        overrides: ``hf-overrides`` of vLLM.
    """
    whole = _merged(config, overrides or {})
    text = _text_config(whole)
    model_type = next((part["model_type"] for part in (text, whole) if isinstance(part.get("model_type"), str)), "")
    layers = _count(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = _count(text, "num_attention_heads", "n_head", "n_heads")
    key_size = _head_size(text, heads)
    uneven_heads = any(text.get(name) for name in _UNEVEN_HEADS)
    uneven = any(text.get(name) for name in _UNEVEN_CACHES)
    latent = model_type in _LATENT_TYPES and (
        _count(text, "kv_lora_rank") is not None or bool(text.get("compress_ratios"))
    )
    # Of such a model with whole heads the cache has sizes of its own.
    odd_latent = not latent and _count(text, "kv_lora_rank") is not None
    states = model_type in _STATE_TYPES or any(text.get(name) for name in _STATE_KEYS)
    full, windows, window, has_state_layers = _layer_kinds(text, layers, states=states)
    positions = _positions(whole, text)
    return ModelShape(
        model_type=model_type,
        layers=layers,
        attention_heads=heads,
        kv_heads=None if uneven_heads or odd_latent else _kv_heads(text, model_type, heads),
        key_size=key_size,
        value_size=_count(text, "v_head_dim") or key_size,
        latent=latent,
        latent_size=_latent_size(text) if latent and not uneven else None,
        states=states or has_state_layers,
        windowed=windows > 0,
        full_layers=None if uneven else full,
        window_layers=windows,
        window=window,
        encoder_decoder=whole.get("is_encoder_decoder") is True,
        positions=positions,
        default_length=_default_length(whole, text, positions),
        dtype=_dtype(text) or _dtype(whole),
        quantized=any(isinstance(part.get("quantization_config"), Mapping) for part in (whole, text)),
        parameters=_parameters(text, layers, heads, key_size, states=states or has_state_layers),
    )


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = {str(name): value for name, value in config.items()}
    for name, value in overrides.items():
        below = merged.get(str(name))
        merged[str(name)] = {**below, **value} if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    places = [config.get(name) for name in _TEXT_CONFIGS]
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        places.append(thinker.get("text_config"))
    for place in places:
        if isinstance(place, Mapping) and place:
            return {str(name): value for name, value in place.items()}
    return config


def _count(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST:
            return value
    return None


def _head_size(text: Mapping[str, Any], heads: int | None) -> int | None:
    given = _count(text, "head_dim", "attention_head_dim", "hidden_size_per_head")
    if given is not None or heads is None:
        return given
    hidden = _count(text, "hidden_size", "n_embd", "d_model")
    return hidden // heads or None if hidden is not None else None


def _kv_heads(text: Mapping[str, Any], model_type: str, heads: int | None) -> int | None:
    if model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        if text.get("new_decoder_architecture") is not True and text.get("multi_query") is True:
            return 1
    elif text.get("multi_query") is True:
        return 1
    inner = text.get("attn_config")
    if isinstance(inner, Mapping):
        return _count(inner, "kv_n_heads") or heads
    names = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
    if any(isinstance(text.get(name), (list, Mapping)) for name in names):
        # One for each layer.
        return None
    return _count(text, *names) or heads


def _latent_size(text: Mapping[str, Any]) -> int | None:
    rank, rope = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
    return rank + rope if rank is not None and rope is not None else None


def _layer_kinds(
    text: Mapping[str, Any], layers: int | None, *, states: bool
) -> tuple[int | None, int, int | None, bool]:
    """Layers that keep every token, layers with a window, its length, and whether there are layers with a state."""
    window = _count(text, "sliding_window", "sliding_window_size")
    if layers is None:
        return None, 0, None, False
    # Gemma 3n: the last layers use the caches of earlier ones.
    kept = max(0, layers - (_count(text, "num_kv_shared_layers") or 0))
    kinds = text.get("layer_types", text.get("layers_block_type"))
    if isinstance(kinds, (list, tuple)) and len(kinds) == layers and all(isinstance(kind, str) for kind in kinds):
        known = _FULL_LAYERS | _WINDOW_LAYERS | _STATE_LAYERS
        if not set(kinds) <= known:
            return None, 0, None, states
        full = sum(1 for kind in kinds[:kept] if kind in _FULL_LAYERS)
        windows = sum(1 for kind in kinds[:kept] if kind in _WINDOW_LAYERS)
        return full, windows if window else 0, window, any(kind in _STATE_LAYERS for kind in kinds)
    if states:
        return None, 0, None, True
    if window is not None and text.get("use_sliding_window") is not False:
        # Which layers have the window is not said; that all have it is the least.
        return 0, kept, window, False
    return kept, 0, None, False


def _positions(whole: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, str] | None:
    """``derive_max_model_len_and_key`` and the scaling that ``_get_and_verify_max_len`` adds; None if not certain."""
    names = (
        "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
        "max_sequence_length", "max_seq_length", "seq_len",
    )  # fmt: skip
    found = [(length, name) for name in names if (length := _count(text, name)) is not None]
    own = _count(text, "model_max_length")
    if own is not None:
        found = [(own, "model_max_length")]
    if not found:
        return None
    length, name = min(found)
    # Each of these may raise it: taken as no limit, for a false alarm would be worse.
    for part in (text, whole):
        if part.get("model_max_length") is not None and part.get("model_max_length") != own:
            return None
        for scaling in (part.get("rope_scaling"), part.get("rope_parameters")):
            if isinstance(scaling, Mapping) and _may_scale(scaling):
                return None
    return length, name


def _default_length(whole: Mapping[str, Any], text: Mapping[str, Any], positions: tuple[int, str] | None) -> int | None:
    """With LongRoPE vLLM takes the length that the model was trained with."""
    for part in (text, whole):
        for scaling in (part.get("rope_scaling"), part.get("rope_parameters")):
            if isinstance(scaling, Mapping) and "longrope" in (scaling.get("rope_type"), scaling.get("type")):
                return _count(whole, "original_max_position_embeddings")
    return positions[0] if positions is not None else None


_NEVER_SCALE = frozenset({"default", "mrope", "su", "longrope", "llama3", "yarn", "deepseek_yarn"})


def _may_scale(scaling: Mapping[str, Any]) -> bool:
    inner = [value for value in scaling.values() if isinstance(value, Mapping)]
    if inner:
        return any(_may_scale(value) for value in inner)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return not isinstance(kind, str) or kind not in _NEVER_SCALE


def _dtype(config: Mapping[str, Any]) -> str | None:
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        if isinstance(value, str):
            short = value.removeprefix("torch.")
            return {"half": "float16", "float": "float32"}.get(short, short) if short in DTYPE_BYTES else None
    return None


def _parameters(
    text: Mapping[str, Any], layers: int | None, heads: int | None, key_size: int | None, *, states: bool
) -> int | None:
    """Weights that such a model has at the least: one embedding, two projections of attention, two of each MLP.

    There are at most twice as many; for other kinds of models it is None.
    """
    hidden, inner = _count(text, "hidden_size", "n_embd", "d_model"), _count(text, "intermediate_size", "n_inner")
    vocabulary = _count(text, "vocab_size")
    if hidden is None or vocabulary is None or layers is None or heads is None or key_size is None:
        return None
    experts = _count(text, "num_experts", "n_routed_experts", "num_local_experts")
    if experts is not None or inner is None or states or _count(text, "kv_lora_rank") is not None:
        # Which layers have experts or attention, and how large they are, differs too much.
        return None
    return vocabulary * hidden + layers * (2 * hidden * heads * key_size + 2 * hidden * inner)
