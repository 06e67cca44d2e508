"""Whatever is in a cluster file, reading it ends with a spec or with an explanation, and tells no secret."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from pdctl.errors import ClusterFileError, UsageError
from pdctl.spec import ClusterSpec, load, parse

# Derived examples are slow to make on a busy machine; a slow one is no failure.
WILD = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

VALID = """\
cluster: qwen3
model: ${MODEL:-Qwen/Qwen3-32B}
accelerator: cuda
fabric: efa
transfer: {mode: push, timeout_s: 12.5, lease_s: 10, extra: {backends: [LIBFABRIC], nested: {a: null}}}
ssh: {user: ubuntu, port: 2222, identity_file: ~/.ssh/k, host_keys: accept-new, max_parallel: 8}
python: /opt/vllm/bin/python
env: &env {HF_TOKEN: {from_env: HF_TOKEN}, RATE: 1e3}
prefill: &role
  hosts: [p1, {name: p2, address: 10.0.0.2, devices: [4, 5], env: {A: b}, ssh_user: root, port: 8100}]
  tensor_parallel: 2
  vllm_args: {max_num_batched_tokens: 8192, --enforce-eager: true, compilation-config: {level: 3}, m: [a.b, 1]}
  env: {<<: *env, B: "c"}
decode:
  <<: *role
  hosts: [d1, p1]
router: {host: p1, port: 9000, args: {request-timeout-secs: 600}, env: {C: $$d}}
aws: {region: us-east-2}
"""
DATA: dict[str, Any] = YAML(typ="safe", pure=True).load(VALID)
ENVIRONMENT = {"HF_TOKEN": "hf_sesame", "A": "1", "B": "", "PORT": "8000", "C": "x\ny"}

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**60), 10**60)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["${A}", "${HF_TOKEN}", "${B:-c}", "${PORT}", "$", "${", "$A", "local", "p1", "::1", "-x", "\0", "\ud800"]
    )
)
KNOWN_KEYS = ["hosts", "name", "address", "devices", "vllm_args", "from_env", "HF_TOKEN", "<<", "PDCTL_FAULT"]
keys = st.text(max_size=8) | st.sampled_from([*ClusterSpec.model_fields, *KNOWN_KEYS])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
SIGNS = [
    *"a:[]{},'\"|>!#\\~@`$é😀",
    "|9",
    "&x ",
    "*x ",
    "!!",
    "!<",
    "<<: ",
    "\\x",
    "\\U00110000",
    "${",
    ".nan",
    "0o7",
    "0x",
]
WORDS = ["1e999", "prefill", "hosts", "env", "null", "true"]
SPACES = [" ", "  ", "\t", "\n", "\r", "- ", "? ", ": ", "---\n", "...\n", "%YAML 1.1\n", "%TAG ! x\n"]
ODDITIES = ["\x85", "\u2028", "\ufeff", "\0", "\x7f", "\ud800", "9" * 5000]
yaml_pieces = st.sampled_from([*SIGNS, *WORDS, *SPACES, *ODDITIES])


def refusal_of(text: str) -> ClusterFileError | None:
    """Read a text; what is raised but a refusal fails the test."""
    try:
        parse(text, file="c.yaml", environ=ENVIRONMENT)
    except ClusterFileError as error:
        return error
    return None


def read(text: str) -> ClusterSpec | None:
    """Read a text; None if it was refused with an explanation that is fit to be shown."""
    error = refusal_of(text)
    if error is None:
        return parse(text, file="c.yaml", environ=ENVIRONMENT)
    shown = str(error)
    shown.encode()
    assert error.problems
    assert "hf_sesame" not in shown
    for problem in error.problems:
        assert problem.message
        assert problem.line is None or 1 <= problem.line <= len(text.splitlines()) + 1
    for word in ("pydantic", "Input should", "validation error", "ruamel"):
        assert word not in shown or word in text
    return None


def as_yaml(value: Any) -> str:
    """JSON is YAML, but for what json writes of numbers that JSON does not have."""
    return json.dumps(value).replace("NaN", ".nan").replace("Infinity", ".inf")


def test_the_valid_file_is_valid():
    assert read(VALID) is not None
    assert read(as_yaml(DATA)) is not None


@WILD
@given(values)
def test_any_document(document: Any):
    read(as_yaml(document))


@pytest.mark.slow
@WILD
@given(st.dictionaries(st.sampled_from(list(ClusterSpec.model_fields)), values, min_size=3))
def test_any_values_behind_the_right_keys(document: dict[str, Any]):
    read(as_yaml(document))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value."""
    if isinstance(value, dict):
        return [place for key, item in value.items() for place in [(value, key), *_places(item)]]
    if isinstance(value, list):
        return [place for index, item in enumerate(value) for place in [(value, index), *_places(item)]]
    return []


@pytest.mark.slow
@WILD
@given(st.data())
def test_a_valid_file_with_some_values_changed(data: st.DataObject):
    document = json.loads(json.dumps(DATA))
    for _ in range(data.draw(st.integers(1, 3))):
        places = _places(document)
        container, key = data.draw(st.sampled_from(range(len(places))).map(places.__getitem__))
        change = data.draw(st.sampled_from(["replace", "delete", "rename", "add"]))
        if change == "replace":
            container[key] = data.draw(values)
        elif change == "delete":
            del container[key]
        elif isinstance(container, dict):
            container[data.draw(keys)] = container.pop(key) if change == "rename" else data.draw(values)
        else:
            container.append(data.draw(values))
    spec = read(as_yaml(document))
    if spec is not None:
        # A spec that was accepted can be passed on: to JSON, to arguments, to files.
        spec.model_dump_json().encode()


@WILD
@given(st.integers(0, len(VALID)), st.integers(0, 30), st.lists(yaml_pieces, max_size=4))
def test_a_valid_file_with_some_text_changed(start: int, length: int, pieces: list[str]):
    read(VALID[:start] + "".join(pieces) + VALID[start + length :])


@WILD
@given(st.lists(yaml_pieces | st.text(max_size=5), max_size=30))
def test_pieces_of_yaml(pieces: list[str]):
    read("".join(pieces))


@WILD
@given(st.text())
def test_any_text(text: str):
    read(text)


@WILD
@given(
    content=st.binary(max_size=200) | st.text(max_size=50).map(lambda text: (VALID + text).encode("utf-8", "replace"))
)
def test_any_bytes(content: bytes, tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with contextlib.suppress(UsageError):
        load(path, ENVIRONMENT)


@WILD
@given(st.text())
def test_any_path(name: str):
    with pytest.raises(UsageError):
        load(Path("/nonexistent-folder") / name.lstrip("/.") / "c.yaml", {})


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "&a [", "!x [", "a: [", "['", "- - ? "])
def test_deep_nesting(opening: str):
    assert read(opening * 20_000) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["${" * 100_000, "$" * 100_001, "a: '" + "${A" * 100_000, "*a " * 10_000, "\\" * 100_000]
)
def test_long_repetitions(text: str):
    assert read(f"env: {{A: '{text}'}}\n") is None


@WILD
@given(st.text(min_size=6), st.sampled_from(["T", "HF_TOKEN", "lower_token"]))
def test_a_secret_named_by_from_env_never_shows(secret: str, name: str):
    marked = f"sesame{secret}"
    text = VALID.replace("cuda", "cude").replace("{HF_TOKEN: {from_env: HF_TOKEN}", f"{{{name}: {{from_env: HF_TOKEN}}")
    with pytest.raises(ClusterFileError) as caught:
        parse(text, file="c.yaml", environ={"HF_TOKEN": marked})
    assert "sesame" not in str(caught.value)
    spec = parse(text.replace("cude", "cuda"), file="c.yaml", environ={"HF_TOKEN": marked})
    assert "sesame" not in repr(spec) + spec.model_dump_json()
