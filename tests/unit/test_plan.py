"""The plan as a whole: golden plans, addresses, digests, secrets, and what it does not depend on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pdctl.errors import ClusterFileError
from pdctl.plan import make_plan
from pdctl.plan_text import plan_text
from pdctl.presets import preset_names, preset_text
from pdctl.spec import parse
from tests.support.plans import BASE, DIGEST, ENVIRON, SECRET, changed, planned, refused

DATA = Path(__file__).parent / "data" / "plans"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_golden_plans(path: Path) -> None:
    # Set PDCTL_WRITE_GOLDEN=1 to write the plans anew, and read the difference.
    spec = parse(path.read_text(encoding="utf-8"), file=path.name, environ={})
    plan = make_plan(spec, environ=ENVIRON, connector_digest=DIGEST)
    golden = path.with_suffix(".json")
    if os.environ.get("PDCTL_WRITE_GOLDEN"):
        golden.write_text(json.dumps(plan.to_json(), indent=2) + "\n", encoding="utf-8")
    assert plan.to_json() == json.loads(golden.read_text(encoding="utf-8"))


def test_every_golden_plan_has_its_cluster_file() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == {path.stem for path in DATA.glob("*.yaml")} != set()


def test_instances_are_numbered_over_hosts_and_the_router_is_last() -> None:
    plan = planned(changed(prefill={"hosts": ["p1", "p2"], "instances_per_host": 2}))
    assert [(i.name, i.host) for i in plan.instances] == [
        ("prefill-0", "p1"), ("prefill-1", "p1"), ("prefill-2", "p2"), ("prefill-3", "p2"),
        ("decode-0", "d1"), ("router", "p1"),
    ]  # fmt: skip
    assert plan.hosts == ("p1", "p2", "d1")
    assert [i.index for i in plan.prefill] == [0, 1, 2, 3]
    assert [i.name for i in plan.decode] == ["decode-0"]
    assert plan.router is plan.instances[-1]


@pytest.mark.parametrize(
    ("prefill", "router", "instance_url", "router_url"),
    [
        ("p1", {"host": "p1"}, "http://p1:8100", "http://p1:8000"),
        ({"name": "p1", "address": "10.0.0.1"}, {"host": "p1"}, "http://10.0.0.1:8100", "http://10.0.0.1:8000"),
        ({"name": "p1", "address": "fd00::1"}, {"host": "p1"}, "http://[fd00::1]:8100", "http://[fd00::1]:8000"),
        (
            {"name": "p1", "address": "10.0.0.1"},
            {"host": "p1", "address": "192.168.0.1"},
            "http://10.0.0.1:8100",
            "http://192.168.0.1:8000",
        ),
        ("p1", {"host": "r9"}, "http://p1:8100", "http://r9:8000"),
        ("p1", {"host": "local"}, "http://p1:8100", "http://127.0.0.1:8000"),
    ],
)
def test_addresses(prefill: Any, router: dict[str, Any], instance_url: str, router_url: str) -> None:
    plan = planned(changed(prefill={"hosts": [prefill]}, router=router))
    assert plan.prefill[0].url == instance_url
    assert plan.router.url == router_url
    assert instance_url in plan.router.argv


def test_local_hosts_are_on_loopback() -> None:
    local = changed(prefill={"hosts": ["local"]}, decode={"hosts": ["localhost"]}, router={"host": "localhost"})
    assert {instance.address for instance in planned(local).instances} == {"127.0.0.1"}


def test_a_router_on_a_host_of_both_roles_finds_its_address() -> None:
    data = changed(decode={"hosts": [{"name": "d1", "address": "10.0.0.9"}]}, router={"host": "d1"})
    assert planned(data).router.address == "10.0.0.9"


def test_python_of_the_host_wins_over_that_of_the_role() -> None:
    data = changed(
        prefill={"hosts": [{"name": "p1", "python": "~/v/bin/python"}, "p2"], "python": "/role/python"},
        router={"host": "p1"},
    )
    data["python"] = "/global/python"
    plan = planned(data)
    programs = {instance.name: instance.argv[0] for instance in plan.instances}
    assert programs == {
        "prefill-0": "@HOME@/v/bin/python",
        "prefill-1": "/role/python",
        "decode-0": "/global/python",
        "router": "@HOME@/v/bin/python",
    }


def test_paths_that_would_mean_something_else() -> None:
    data = changed(decode={"python": "venv/bin/python"})
    data["model"] = "~/models/qwen"
    assert set(refused(data)) == {"model", "decode.python"}


# --- digests -----------------------------------------------------------------------------------------------------


def digests(data: dict[str, Any], **arguments: Any) -> dict[str, str]:
    return {instance.name: instance.digest for instance in planned(data, **arguments).instances}


def test_the_same_file_gives_the_same_digests() -> None:
    assert digests(BASE) == digests(json.loads(json.dumps(BASE)))
    assert len(set(digests(BASE).values())) == 3


@pytest.mark.parametrize(
    ("sections", "moved"),
    [
        ({"prefill": {"vllm_args": {"seed": 1}}}, {"prefill-0"}),
        ({"prefill": {"env": {"A": "b"}}}, {"prefill-0"}),
        ({"decode": {"port": 9000}}, {"decode-0", "router"}),
        ({"decode": {"telemetry_port": 9000}}, {"decode-0"}),
        ({"decode": {"devices": [3]}}, {"decode-0"}),
        ({"decode": {"python": "/p"}}, {"decode-0"}),
        ({"router": {"args": {"queue-size": 5}}}, {"router"}),
        ({"router": {"metrics_port": 5}}, {"router"}),
        ({"transfer": {"timeout_s": 5}}, {"prefill-0", "decode-0"}),
        ({"env": {"A": "b"}}, {"prefill-0", "decode-0", "router"}),
        # What only concerns the operator's machine restarts nothing.
        ({"ssh": {"user": "ubuntu"}, "aws": {"region": "us-east-2"}}, set()),
        ({"transfer": {"stall_after_s": 9}}, set()),
    ],
)
def test_a_digest_moves_with_what_its_instance_runs(sections: dict[str, Any], moved: set[str]) -> None:
    before, after = digests(BASE), digests(changed(**sections))
    assert {name for name in before if before[name] != after[name]} == moved


def test_a_new_connector_moves_vllm_but_not_the_router() -> None:
    before, after = digests(BASE), digests(BASE, connector_digest="f" * 64)
    assert {name for name in before if before[name] != after[name]} == {"prefill-0", "decode-0"}


def test_the_order_of_hosts_does_not_matter_to_the_others() -> None:
    one = changed(prefill={"hosts": ["p1", "p2"]}, decode={"hosts": ["d1", "d2"]})
    two = changed(prefill={"hosts": ["p2", "p1"]}, decode={"hosts": ["d1", "d2"]})
    before, after = digests(one), digests(two)
    assert {name for name in before if before[name] != after[name]} == {"prefill-0", "prefill-1"}


def test_the_order_of_options_and_variables_does_not_matter() -> None:
    one = changed(prefill={"vllm_args": {"seed": 1, "max-num-seqs": 2}, "env": {"A": "1", "B": "2"}})
    two = changed(prefill={"vllm_args": {"max_num_seqs": 2, "seed": 1}, "env": {"B": "2", "A": "1"}})
    assert digests(one) == digests(two)


# --- secrets -----------------------------------------------------------------------------------------------------

WITH_SECRET = changed(env={"HF_TOKEN": {"from_env": "TEST_TOKEN"}})


def test_a_secret_is_in_nothing_that_is_shown() -> None:
    plan = planned(WITH_SECRET)
    assert all(instance.secret_env == {"HF_TOKEN": SECRET} for instance in plan.instances)
    assert not any("HF_TOKEN" in instance.env for instance in plan.instances)
    shown = [plan_text(plan), json.dumps(plan.to_json()), repr(plan), str(plan.instances)]
    shown += [text for i in plan.instances for text in (*i.argv, i.launch_script, i.digest, *i.env.values())]
    assert not any(SECRET in text for text in shown)
    assert "HF_TOKEN=***" in shown[0]
    assert plan.to_json()["instances"][0]["env"]["HF_TOKEN"] == "***"


def test_a_digest_covers_the_name_of_a_secret_but_not_its_value() -> None:
    assert digests(WITH_SECRET) == digests(WITH_SECRET, environ={"TEST_TOKEN": "another"})
    assert set(digests(WITH_SECRET).values()).isdisjoint(digests(BASE).values())


@pytest.mark.parametrize("environ", [{}, {"TEST_TOKEN": ""}])
def test_a_missing_secret_is_a_problem_only_to_whoever_starts(environ: dict[str, str]) -> None:
    with pytest.raises(ClusterFileError) as caught:
        planned(WITH_SECRET, environ=environ)
    (problem,) = caught.value.problems
    assert (problem.key, problem.line) == ("env.HF_TOKEN", 1)
    assert "TEST_TOKEN" in problem.message
    plan = planned(WITH_SECRET, environ=environ, require_secrets=False)
    assert plan.prefill[0].secret_env == {}
    assert {i.name: i.digest for i in plan.instances} == digests(WITH_SECRET)
    assert "HF_TOKEN=***" in plan_text(plan)


def test_secrets_are_layered_like_other_variables() -> None:
    secret = {"from_env": "TEST_TOKEN"}
    data = changed(
        env={"A": "global", "B": secret, "C": secret},
        prefill={"hosts": [{"name": "p1", "env": {"C": "host"}}], "env": {"A": secret, "B": "role"}},
    )
    plan = planned(data)
    prefill, decode = plan.prefill[0], plan.decode[0]
    assert (prefill.env["B"], prefill.env["C"], prefill.secret_env) == ("role", "host", {"A": SECRET})
    assert (decode.env["A"], decode.secret_env) == ("global", {"B": SECRET, "C": SECRET})


def test_a_secret_that_is_no_text_is_refused() -> None:
    with pytest.raises(ClusterFileError, match="UTF-8"):
        planned(WITH_SECRET, environ={"TEST_TOKEN": "a\udcff"})


# --- text and JSON -----------------------------------------------------------------------------------------------


def test_the_text_names_every_instance_port_and_device() -> None:
    text = plan_text(planned(changed(prefill={"tensor_parallel": 2, "devices": [0, 1, 4]})))
    for expected in ("prefill-0 on p1: http://p1:8100", "API 8100 at p1", "telemetry 18100-18101", "devices      0-1"):
        assert expected in text
    assert all(instance.digest in text for instance in planned(changed(prefill={"devices": [1]})).decode)
    assert not text.endswith("\n")


def test_the_text_holds_nothing_that_a_terminal_acts_on() -> None:
    text = plan_text(planned(changed(env={"A": "\x1b[31m\r\nx"})))
    assert all(line.isprintable() for line in text.split("\n"))


def test_json_has_stable_keys() -> None:
    document = planned(BASE).to_json()
    assert list(document) == ["cluster", "model", "accelerator", "fabric", "mode", "connector", "hosts", "instances"]
    assert list(document["instances"][0]) == [
        "name", "role", "index", "host", "address", "url", "ports", "devices", "argv", "env", "launch_script", "digest",
    ]  # fmt: skip


def test_all_problems_are_told_at_once_in_the_order_of_the_file() -> None:
    text = """\
cluster: qwen3
model: m
accelerator: cuda
fabric: tcp
prefill:
  hosts: [p1]
  port: 8000
  vllm_args: {headless: true}
decode:
  hosts: [d1]
  env: {CUDA_VISIBLE_DEVICES: "0"}
router: {host: p1}
"""
    with pytest.raises(ClusterFileError) as caught:
        make_plan(parse(text, file="c.yaml", environ={}), environ={}, connector_digest=DIGEST)
    assert [(problem.line, problem.key) for problem in caught.value.problems] == [
        (7, "prefill.port"),
        (8, "prefill.vllm_args.headless"),
        (11, "decode.env.CUDA_VISIBLE_DEVICES"),
    ]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_planned(name: str) -> None:
    spec = parse(preset_text(name, {}), file=name, environ={})
    plan = make_plan(spec, environ={}, connector_digest=DIGEST, require_secrets=False)
    assert plan.prefill
    assert plan.decode
