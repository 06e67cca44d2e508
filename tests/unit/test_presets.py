"""The presets can be read as they are, and take any value without becoming something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl import presets
from pdctl.errors import PdctlError, UsageError
from pdctl.plan import make_plan
from pdctl.presets import preset_names, preset_text, preset_values
from pdctl.spec import ClusterSpec, parse

NAMES = ["2p2d", "local", "p5en-efa", "ssh-tcp", "trn2"]


def read(name: str, **values: str) -> ClusterSpec:
    return parse(preset_text(name, values), file=f"{name}.yaml", environ={})


def test_names():
    assert preset_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_can_be_read_with_its_examples(name: str):
    assert read(name).cluster == preset_values(name)["cluster"]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_can_be_made_of_a_preset(name: str):
    plan = make_plan(read(name), environ={}, connector_digest="0" * 64)
    assert len(plan.instances) == (5 if name == "2p2d" else 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_template_itself_is_the_same_cluster_file(name: str):
    template = (Path(__file__).parents[2] / "templates" / "presets" / f"{name}.yaml").read_text()
    assert parse(template, file="t", environ={}).model_dump() == read(name).model_dump()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_to_fill_in(name: str):
    assert ":-" not in preset_text(name, {})


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_explains_itself(name: str):
    lines = preset_text(name, {}).splitlines()
    assert sum("#" in line for line in lines) > len(lines) / 3
    assert max(len(line) for line in lines) <= 120
    assert "docs/cluster-file.md" in "\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_arrives(name: str):
    for key, example in preset_values(name).items():
        value = str(int(example) + 1) if example.isdigit() else "cpu" if key == "accelerator" else example + "0"
        changed, before = read(name, **{key: value}).model_dump(), read(name).model_dump()
        assert changed != before, key


def test_what_the_presets_are_for():
    local = read("local")
    assert (local.accelerator, local.fabric, local.router.port) == ("cpu", "tcp", 8000)
    assert local.prefill.hosts[0].is_local
    assert local.decode.hosts[0].is_local
    assert local.env == {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    for role in (local.prefill, local.decode):
        assert role.vllm_args == {
            "served-model-name": "demo",
            "enforce-eager": True,
            "dtype": "float32",
            "max-model-len": 4096,
        }
    efa = read("p5en-efa")
    assert (efa.model, efa.accelerator, efa.fabric) == ("Qwen/Qwen3-32B", "cuda", "efa")
    assert (efa.prefill.tensor_parallel, efa.decode.tensor_parallel) == (8, 8)
    assert efa.aws is not None
    assert efa.aws.region == "us-east-2"
    assert read("trn2").accelerator == "neuron"
    tcp = read("ssh-tcp")
    assert (tcp.fabric, len(tcp.prefill.hosts), len(tcp.decode.hosts)) == ("tcp", 1, 1)
    pairs = read("2p2d")
    assert (pairs.fabric, pairs.accelerator) == ("infiniband", "cuda")
    assert (len(pairs.prefill.hosts), len(pairs.decode.hosts)) == (2, 2)


def test_the_router_follows_its_host():
    assert read("ssh-tcp", prefill_1="gpu-7").router.host == "gpu-7"


@pytest.mark.slow
@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
        lambda text: text.isprintable() and text == text.strip() and not text.startswith("-")
    )
)
def test_any_text_reads_back_as_itself(value: str):
    assert read("local", model=value).model == value


@pytest.mark.parametrize(
    "value", ["true", "5", "1e3", "null", "~", "a: b", "[x]", "#x", "a #b", "$HOME", "${HOME}", '"', "\\"]
)
def test_values_that_yaml_or_we_would_take_for_something_else(value: str):
    assert read("local", model=value).model == value


@pytest.mark.parametrize("value", ["a\nb", "a\tb", "\x1b[1m", "a\u2028b"])
def test_control_characters_are_refused(value: str):
    with pytest.raises(UsageError, match="one line"):
        preset_text("local", {"model": value})


@pytest.mark.parametrize("value", ["eighty", "", "80,81", "true"])
def test_a_number_must_be_one(value: str):
    with pytest.raises(UsageError, match="must be a number, as in router_port=8000"):
        preset_text("local", {"router_port": value})


def test_unknown_names():
    with pytest.raises(UsageError, match="there is no preset 'loca'") as caught:
        preset_text("loca", {})
    assert caught.value.hint == "did you mean local?"
    with pytest.raises(UsageError) as caught:
        preset_text("../presets/local", {})
    assert caught.value.hint
    with pytest.raises(UsageError, match="nothing called 'modell'") as caught:
        preset_text("local", {"modell": "x"})
    assert caught.value.hint == "did you mean model?"


def test_the_package_is_looked_at_before_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "pdctl"
    package.mkdir()
    monkeypatch.setattr(presets, "__file__", str(package / "presets.py"))
    with pytest.raises(PdctlError, match="not installed"):
        preset_names()
    for folder, name in ((tmp_path, "beside"), (package, "inside")):
        (folder / "templates" / "presets").mkdir(parents=True)
        (folder / "templates" / "presets" / f"{name}.yaml").write_text("cluster: x1\n")
        assert preset_names() == [name]
