#!/usr/bin/env python3
"""Make the tiny model that the demo and the tests serve: random weights, but real files that vLLM loads.

    .venv/bin/python scripts/make_demo_model.py .demo/model

It has the shape of Qwen3 (4 layers, 10 MB). The text that it writes is noise, on purpose of a certain kind: weights
with a standard deviation of 0.06 and attention norms of 2.0 make every answer depend on the whole prompt, so a damaged
KV cache shows as another text. (With the tiny weights of vLLM's `--load-format dummy` the answer hardly depends on the
prompt, and a comparison of texts passes on damaged caches too.) For equal texts serve it with `--dtype float32`.

The same bytes come out at each run on one kind of machine. A complete model that is there already is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the tokenizer is trained on: ordinary English about this field, so that prompts take about a token a word.
TRAINING_TEXT = (
    "A prefill instance reads the whole prompt and fills the blocks of its key and value cache.",
    "A decode instance takes over from there and writes one token after the other.",
    "In push mode the decode instance announces its blocks early, and the prefill instance writes into them.",
    "A background thread prepares the descriptors and posts the transfer the moment the blocks are ready.",
    "The router sends each request to a prefill instance and to a decode instance.",
    "A notification tells the other side that the transfer is complete, has failed or was cancelled.",
    "What is the capital of the country, and which river runs through it?",
    "Once upon a time there was a small machine that wanted to learn how to read and write.",
    "The quick brown fox jumps over the lazy dog while the engineers watch their dashboards.",
    "Explain in simple words how memory, network and processor work together when a model answers a question.",
    "Every host has a name, an address, a few ports and a number of devices.",
    "The first request takes longer than the others, since connections are made and kernels are compiled.",
    "Latency is the time until the first token; throughput is how many tokens come out in a second.",
    "Please write a short summary of the following text and list the three most important points.",
    "When something goes wrong, say what is wrong, where it is, and what to do about it.",
    "She opened the window, looked at the rain over the harbour and thought about the long way home.",
    "0 1 2 3 4 5 6 7 8 9 10 16 32 64 128 256 512 1024 2048 4096",
)


@dataclass(frozen=True)
class Shape:
    """The size of the model; the defaults are what the demo and the tests use."""

    layers: int = 4
    hidden: int = 256
    intermediate: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    vocabulary: int = 512
    positions: int = 8192
    weight_std: float = 0.06
    attention_norm: float = 2.0
    seed: int = 0


def recipe_digest(shape: Shape) -> str:
    """A hash of all that decides the model's content."""
    source = Path(__file__).read_bytes()
    return hashlib.sha256(source + json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The sha256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_complete(folder: Path, shape: Shape) -> bool:
    """Whether the folder holds this very model, undamaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["recipe"] != recipe_digest(shape):
            return False
        return all(file_digest(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that people can read too."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, shape: Shape, text: Iterable[str] = TRAINING_TEXT) -> None:
    """Train and write the tokenizer. Raises ValueError when the text has too few merges for the vocabulary.

    Every token id of the model must be a token: the model picks any of them, and an unknown one has no text.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread, one order
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(text, trainer)
    size = tokenizer.get_vocab_size()
    if size != shape.vocabulary:
        raise ValueError(
            f"the tokenizer has {size} tokens, the model {shape.vocabulary}: the training text is too short"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[0],
            "pad_token": SPECIAL_TOKENS[0],
            "model_max_length": shape.positions,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_config(folder: Path, shape: Shape) -> None:
    """Write the configuration files that describe the model to vLLM."""
    write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_size,
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": shape.positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 0,
            "attention_bias": False,
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": 0})


def write_weights(folder: Path, shape: Shape) -> None:
    """Draw and write the weights."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(shape.seed)

    def normal(*size: int) -> Any:
        return torch.randn(*size, generator=generator, dtype=torch.float32) * shape.weight_std

    def constant(size: int, value: float) -> Any:
        return torch.full((size,), value, dtype=torch.float32)

    queries = shape.heads * shape.head_size
    keys = shape.kv_heads * shape.head_size
    # The order of these lines is part of the recipe: each draws from the same generator.
    weights = {
        "model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden),
        "lm_head.weight": normal(shape.vocabulary, shape.hidden),
        "model.norm.weight": constant(shape.hidden, 1.0),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "self_attn.q_proj.weight"] = normal(queries, shape.hidden)
        weights[prefix + "self_attn.k_proj.weight"] = normal(keys, shape.hidden)
        weights[prefix + "self_attn.v_proj.weight"] = normal(keys, shape.hidden)
        weights[prefix + "self_attn.o_proj.weight"] = normal(shape.hidden, queries)
        weights[prefix + "self_attn.q_norm.weight"] = constant(shape.head_size, shape.attention_norm)
        weights[prefix + "self_attn.k_norm.weight"] = constant(shape.head_size, shape.attention_norm)
        weights[prefix + "mlp.gate_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[prefix + "mlp.up_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[prefix + "mlp.down_proj.weight"] = normal(shape.hidden, shape.intermediate)
        weights[prefix + "input_layernorm.weight"] = constant(shape.hidden, 1.0)
        weights[prefix + "post_attention_layernorm.weight"] = constant(shape.hidden, 1.0)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def make_model(folder: Path, shape: Shape | None = None) -> bool:
    """Make the model in `folder`, all or nothing; returns False when it was there already. Raises OSError."""
    shape = shape or Shape()
    folder = folder.absolute()
    if is_complete(folder, shape):
        return False
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise FileExistsError(f"{folder} holds something that is no model; leaving it alone")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh = temporary / "new"
        fresh.mkdir()
        write_tokenizer(fresh, shape)
        write_config(fresh, shape)
        write_weights(fresh, shape)
        # The library makes this file readable for its owner alone; the login that serves the model may be another.
        (fresh / "model.safetensors").chmod(0o644)
        files = {path.name: file_digest(path) for path in sorted(fresh.iterdir())}
        write_json(fresh / MANIFEST, {"recipe": recipe_digest(shape), "files": files})
        if folder.exists():
            folder.rename(temporary / "old")
        fresh.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write the model")
    folder: Path = parser.parse_args(arguments).folder
    try:
        made = make_model(folder)
    except ImportError as error:
        print(f"error: {error.name} is missing here; run this with the environment that `make demo` makes")
        return 1
    except OSError as error:
        print(f"error: cannot write the model: {error}")
        return 1
    print(f"model: {folder} ({'written' if made else 'there already'})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
