"""The script of facts: how it finds a model and tells whether its weights are complete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pdctl.node import facts

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def find(home: Path, model: object, revision: str = "main", **environment: str) -> Any:
    return facts.find_model(str(model), revision, environment, str(home))


def make_model(folder: Path, shards: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "text_config": {"hidden_size": 64}}))
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    index = {"weight_map": {f"layer.{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        (folder / name).write_bytes(b"x" * 1000)
    return folder


def make_cache(hub: Path) -> Path:
    """A cache as `huggingface_hub` makes it: files are links to blobs."""
    cached = hub / "models--Qwen--Qwen3-32B"
    blobs = make_model(cached / "blobs")
    snapshot = cached / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    return cached


def test_a_model_in_a_folder(tmp_path: Path) -> None:
    found = find(tmp_path, make_model(tmp_path / "model"))
    assert (found["found"], found["weights_bytes"], found["weights_complete"]) == ("folder", 2000, True)
    assert found["error"] == ""
    assert found["config"]["text_config"] == {"hidden_size": 64}
    assert find(tmp_path, "@HOME@/model")["found"] == "folder"


def test_weights_that_are_missing_or_empty(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"")
    found = find(tmp_path, folder)
    assert (found["weights_bytes"], found["weights_complete"]) == (1000, False)
    assert "2 of 3 files of weights are missing or empty: model-00002-of-00003" in found["error"]


@pytest.mark.parametrize(
    ("files", "size", "complete"),
    [
        ({"model.safetensors": 500}, 500, True),
        ({"model.safetensors": 500, "consolidated.safetensors": 400, "pytorch_model.bin": 300}, 500, True),
        ({"consolidated.safetensors": 400}, 400, True),
        ({"pytorch_model.bin": 300, "training_args.bin": 7}, 300, True),
        ({"model.q4.gguf": 200}, 200, True),
        ({"training_args.bin": 7, "tokenizer.json": 9}, 0, False),
    ],
)
def test_weights_without_an_index(tmp_path: Path, files: dict[str, int], size: int, complete: bool) -> None:
    for name, length in files.items():
        (tmp_path / name).write_bytes(b"x" * length)
    assert facts.weigh(str(tmp_path))[:2] == (size, complete)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"x" * 9999)
    folder = make_model(tmp_path / "model", shards=1)
    index = {"weight_map": {"a": "../secret.safetensors", "b": "model-00001-of-00001.safetensors", "c": ".."}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find(tmp_path, folder)["weights_bytes"] == 1000


def test_models_that_are_damaged(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    (folder / "config.json").write_text("{")
    found = find(tmp_path, folder)
    assert (found["weights_complete"], found["weights_bytes"], found["config"]) == (None, None, {})
    assert "config.json cannot be read" in found["error"]
    assert "index.json cannot be read: it has no weight_map" in found["error"]
    empty = tmp_path / "empty"
    empty.mkdir()
    found = find(tmp_path, empty)
    assert (found["weights_complete"], found["weights_bytes"]) == (False, 0)
    assert "config.json cannot be read: No such file" in found["error"]
    assert find(tmp_path, tmp_path / "none")["found"] == "no"


def test_a_configuration_that_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "no regular file" in find(tmp_path, tmp_path)["error"]
    for text, words in (("[" * 100000, "nested too deeply"), ("[]", "no JSON object"), ("x" * 2000000, "bytes; more")):
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(text)
        assert words in find(tmp_path, tmp_path)["error"]


def test_a_model_in_the_cache(tmp_path: Path) -> None:
    cached = make_cache(tmp_path / ".cache" / "huggingface" / "hub")
    found = find(tmp_path, "Qwen/Qwen3-32B")
    assert (found["found"], found["revision"], found["weights_complete"]) == ("cache", COMMIT, True)
    assert found["weights_bytes"] == 2000
    assert find(tmp_path, "Qwen/Qwen3-32B", COMMIT)["revision"] == COMMIT
    other = find(tmp_path, "Qwen/Qwen3-32B", "v2")
    assert (other["found"], other["error"]) == ("no", "the cache has no snapshot of revision 'v2'")
    assert find(tmp_path, "Qwen/Qwen3-32B", "../../x")["found"] == "no"
    assert find(tmp_path, "Qwen/Qwen3-8B")["found"] == "no"
    (cached / "blobs" / "model-00001-of-00002.safetensors").unlink()
    assert find(tmp_path, "Qwen/Qwen3-32B")["weights_complete"] is False


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/home/me/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "~/hf", "XDG_CACHE_HOME": "/x"}, "/home/me/hf/hub"),
        ({"HF_HUB_CACHE": "@HOME@/cache", "HF_HOME": "/y"}, "/home/me/cache"),
    ],
)
def test_the_folder_of_the_cache(environment: dict[str, str], folder: str) -> None:
    assert facts.hub_folder(environment, "/home/me") == folder


@pytest.mark.parametrize("model", ["../../etc", "a/../b", "a/b/c", "x" * 300, "/etc/passwd", "a\0b", ""])
def test_names_that_lead_elsewhere_are_no_models(tmp_path: Path, model: str) -> None:
    assert find(tmp_path, model)["found"] == "no"
