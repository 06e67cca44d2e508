"""The launch script, run by a real ``sh``: whatever is in a command or variable arrives as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdctl.node.agent import format_env_file
from pdctl.plan import InstancePlan
from pdctl.plan_script import launch_script, quote
from tests.support.plans import ENVIRON, SECRET, changed, planned

# Says what it was given, as an interpreter would be given it.
FAKE_PYTHON = """\
#!{python} -IS
import json, os, sys
argv = [word.decode("utf-8") for word in map(os.fsencode, sys.argv[1:])]
env = {{name.decode(): value.decode("utf-8") for name, value in os.environb.items()}}
print(json.dumps({{"argv": argv, "env": env, "folder": os.getcwd()}}))
"""


def run_script(folder: Path, instance: InstancePlan, *, home: str = "/home/a b") -> dict[str, Any]:
    """Write what the node agent writes, and run it from another folder and with another environment."""

    def fill(text: str) -> str:
        return text.replace("@HOME@", home).replace("@START_ID@", "0a1b2c3d4e5f")

    program = Path(fill(instance.argv[0]))
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(FAKE_PYTHON.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    folder.mkdir(exist_ok=True)
    variables = {name: fill(value) for name, value in instance.env.items()} | instance.secret_env
    (folder / "env").write_bytes(format_env_file(variables).encode())
    script = folder / "launch.sh"
    script.write_bytes(fill(instance.launch_script).encode())
    script.chmod(0o700)
    ambient = {"PATH": os.environ["PATH"], "LC_ALL": "C", "CDPATH": "/tmp"}
    done = subprocess.run([str(script)], capture_output=True, timeout=30, cwd="/", env=ambient, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def check_arrival(folder: Path, instance: InstancePlan, home: str) -> None:
    said = run_script(folder, instance, home=home)

    def fill(text: str) -> str:
        return text.replace("@HOME@", home).replace("@START_ID@", "0a1b2c3d4e5f")

    assert said["argv"] == [fill(word) for word in instance.argv[1:]]
    expected = {name: fill(value) for name, value in instance.env.items()} | instance.secret_env
    assert {name: said["env"].get(name) for name in expected} == expected
    assert said["folder"] == os.path.realpath(folder)


WILD_VALUES = [
    "it's",
    'say "hi"',
    "$(touch /tmp/pdctl-was-here) `id` ${HOME} $HOME",
    "line one\nline two\n",
    "back\\slash \\n",
    "grüße 漢字 🚀",
    "*?[a-z]~ ! # & ; | < > ( )",
    "",
    " leading and trailing ",
    "-n",
    "\ttab\rreturn\x07bell\x1b[0m",
    "'\"'\"'",
    "EOF",
]


@pytest.mark.parametrize("value", WILD_VALUES)
def test_a_value_arrives_as_it_is(value: str, tmp_path: Path) -> None:
    home = str(tmp_path / "a home")
    data = changed(
        python="~/venv/bin/python",
        env={"WILD": value, "TOKEN": {"from_env": "TEST_TOKEN"}},
        prefill={"vllm_args": {"chat-template": value, "additional-config": {"a": value}}},
        decode={"vllm_args": {"chat-template": value}},
    )
    plan = planned(data)
    for instance in plan.instances:
        check_arrival(tmp_path / instance.name, instance, home)
    assert run_script(tmp_path / "again", plan.prefill[0], home=home)["env"]["TOKEN"] == SECRET
    assert not Path("/tmp/pdctl-was-here").exists()


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=4),
    secret=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
)
def test_any_value_arrives_as_it_is(values: list[str], secret: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = changed(
            python=f"{folder}/python",
            env={"S": {"from_env": "TEST_TOKEN"}, **{f"V{n}": value for n, value in enumerate(values)}},
            prefill={"vllm_args": {"x": "=".join(values), "y": {"z": values}}},
        )
        instance = planned(data, environ={**ENVIRON, "TEST_TOKEN": secret}).prefill[0]
        check_arrival(Path(folder) / "instance", instance, folder)


def test_placeholders_are_filled_in_within_quotes(tmp_path: Path) -> None:
    data = changed(python="~/venv/bin/python", env={"CACHE": "@HOME@/cache"})
    home = str(tmp_path / "with space & $dollar")
    said = run_script(tmp_path / "x", planned(data).prefill[0], home=home)
    assert said["env"]["CACHE"] == f"{home}/cache"
    assert said["env"]["PYTHONPATH"].startswith(f"{home}/.pdctl/connector/")
    config = json.loads(said["argv"][said["argv"].index("--kv-transfer-config") + 1])
    assert config["engine_id"] == "qwen3-prefill-0-0a1b2c3d4e5f"


def test_without_its_environment_the_server_does_not_start(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(launch_script(cluster="c1", instance="prefill-0", argv=["echo", "started"]), encoding="utf-8")
    done = subprocess.run(["sh", str(script)], capture_output=True, timeout=30, check=False)
    assert done.returncode != 0
    assert done.stdout == b""


def test_the_script_holds_no_environment() -> None:
    plan = planned(changed(env={"A": "visible-value", "T": {"from_env": "TEST_TOKEN"}}))
    assert not any(text in i.launch_script for i in plan.instances for text in ("visible-value", SECRET))


def test_quoting_leaves_nothing_bare() -> None:
    assert quote("plain") == "'plain'"
    assert quote("it's") == "'it'\"'\"'s'"
    assert quote("") == "''"
