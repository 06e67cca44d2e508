"""scripts/make_demo_model.py on a small variant of the model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "make_demo_model.py"

# torch, safetensors and tokenizers come with the CPU run time.
pytestmark = pytest.mark.e2e

SMALL = {"layers": 1, "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1, "head_size": 16, "vocabulary": 300}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_demo_model"] = module
    spec.loader.exec_module(module)
    return module


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_bytes_in_another_process(script: ModuleType, tmp_path: Path) -> None:
    script.make_model(tmp_path / "one", script.Shape(**SMALL))
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import make_demo_model as m\n"
        f"from pathlib import Path; m.make_model(Path({str(tmp_path / 'two')!r}), m.Shape(**{SMALL!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_another_seed_gives_other_weights(script: ModuleType, tmp_path: Path) -> None:
    script.make_model(tmp_path / "one", script.Shape(**SMALL))
    script.make_model(tmp_path / "two", script.Shape(**SMALL, seed=1))

    name = "model.safetensors"
    assert contents(tmp_path / "one")[name] != contents(tmp_path / "two")[name]


def test_a_complete_model_is_left_alone_and_a_damaged_one_is_replaced(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shape = script.Shape(**SMALL)
    assert script.make_model(folder, shape)
    whole = contents(folder)
    assert not script.make_model(folder, shape)

    weights = bytearray(whole["model.safetensors"])
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(weights))

    assert script.make_model(folder, shape)
    assert contents(folder) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_shape_replaces_the_model(script: ModuleType, tmp_path: Path) -> None:
    script.make_model(tmp_path / "model", script.Shape(**SMALL))

    assert script.make_model(tmp_path / "model", script.Shape(**{**SMALL, "layers": 2}))


def test_a_folder_that_holds_no_model_is_left_alone(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(FileExistsError, match="leaving it alone"):
        script.make_model(tmp_path, script.Shape(**SMALL))

    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_failure_leaves_nothing_behind(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(script, "write_weights", fail)

    with pytest.raises(OSError, match="disk full"):
        script.make_model(tmp_path / "model", script.Shape(**SMALL))

    assert list(tmp_path.iterdir()) == []


def test_every_token_of_the_real_model_has_a_text(script: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    shape = script.Shape()
    script.write_tokenizer(tmp_path, shape)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    assert tokenizer.get_vocab_size() == shape.vocabulary
    assert all(tokenizer.id_to_token(number) is not None for number in range(shape.vocabulary))
    text = "Blocks, 0 to 2048: ünïcode 🚀\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_reads_the_chat_template(script: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    script.make_model(tmp_path / "model", script.Shape(**SMALL))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")

    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )

    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert AutoConfig.from_pretrained(tmp_path / "model").max_position_embeddings == 8192


def test_the_weights_are_what_makes_a_comparison_of_texts_able_to_fail(script: ModuleType, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    script.make_model(tmp_path / "model", script.Shape(**SMALL))
    weights = load_file(tmp_path / "model" / "model.safetensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text())

    for name, tensor in weights.items():
        if tensor.ndim == 2:
            assert tensor.std().item() == pytest.approx(0.06, rel=0.1), name
        else:
            assert set(tensor.tolist()) == {2.0 if "_norm" in name and "self_attn" in name else 1.0}, name
    assert not config["tie_word_embeddings"]
    assert config["torch_dtype"] == "float32"
