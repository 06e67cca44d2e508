import json

import pytest

from pdctl.connector_package import connector_digest, connector_files
from pdctl.lifecycle.completions import completion_request, read_completion, served_model, unique_prompt
from pdctl.lifecycle.nodes import Exit, HttpResponse, NodeInstance
from pdctl.lifecycle.status import ClusterStatus, InstanceStatus, judge
from pdctl.lifecycle.warmup import in_rounds
from pdctl.plan import ClusterPlan, make_plan
from pdctl.spec import parse

FILE = """\
cluster: small
model: /models/m
accelerator: cpu
fabric: tcp
env: {VLLM_API_KEY: {from_env: KEY}}
prefill: {hosts: [a, b], vllm_args: {served-model-name: [first, second]}}
decode: {hosts: [d, e, f], vllm_args: {served-model-name: [first, second]}}
router: {host: a}
"""


@pytest.fixture
def plan() -> ClusterPlan:
    environ = {"KEY": "the-key"}
    return make_plan(parse(FILE, file="cluster.yaml", environ=environ), environ=environ, connector_digest="0" * 64)


def test_every_pair_is_warmed_once_and_no_instance_twice_in_a_round(plan: ClusterPlan) -> None:
    rounds = in_rounds(plan.prefill, plan.decode)
    pairs = [(p.name, d.name) for pairs in rounds for p, d in pairs]
    assert sorted(pairs) == sorted((p.name, d.name) for p in plan.prefill for d in plan.decode)
    for pairs in rounds:
        names = [instance.name for pair in pairs for instance in pair]
        assert len(names) == len(set(names))


def test_requests_carry_the_served_name_and_the_key(plan: ClusterPlan) -> None:
    request = completion_request(plan, plan.router, "hi", max_tokens=3, timeout_s=5)
    assert request.json["model"] == "first"
    assert request.headers["Authorization"] == "Bearer the-key"
    assert served_model(plan, plan.decode[0]) == "first"


def test_prompts_differ_from_their_first_word_on() -> None:
    first, second = unique_prompt(50), unique_prompt(50)
    assert first.split()[0] != second.split()[0]
    assert len(first.split()) == 51


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (HttpResponse(None, "", 1.0, "timeout: no answer"), "timeout"),
        (HttpResponse(500, '{"error": {"message": "engine dead"}}', 1.0, None), "HTTP 500"),
        (HttpResponse(200, "not json", 1.0, None), "not an answer of vLLM"),
        (HttpResponse(200, '{"choices": []}', 1.0, None), "not an answer of vLLM"),
    ],
)
def test_a_bad_answer_says_why(response: HttpResponse, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_completion(response)


def test_a_good_answer_is_read() -> None:
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.1, -0.2], "top_logprobs": [{"a": -0.1}, {"b": -0.2}]}
    body = {"choices": [{"text": "ab", "logprobs": logprobs}], "usage": {"prompt_tokens": 7}}
    completion = read_completion(HttpResponse(200, json.dumps(body), 1.0, None))
    assert (completion.text, completion.prompt_tokens, completion.logprobs) == ("ab", 7, (-0.1, -0.2))


def node(process: str, **more: object) -> NodeInstance:
    fields: dict[str, object] = {
        "name": "prefill-0",
        "process": process,
        "pid": 7,
        "uptime_s": 5.0,
        "rss_bytes": 9,
        "cpu_s": 1.0,
        "processes": 1,
        "exit": None,
        "digest": "x",
        "log_tail": "",
        "argv": (),
    }
    return NodeInstance(**{**fields, **more})  # type: ignore[arg-type]


OK = HttpResponse(200, "", 0.0, None)
REFUSED = HttpResponse(None, "", 0.0, "refused: connection refused")


@pytest.mark.parametrize(
    ("found", "health", "state", "detail"),
    [
        (node("absent"), None, "absent", ""),
        (node("running"), OK, "ready", ""),
        (
            node("running", log_tail="INFO [cpu_model_runner.py:68] Starting to load model m..."),
            REFUSED,
            "booting",
            "loading",
        ),
        (node("running", log_tail="INFO:     Application startup complete."), REFUSED, "unhealthy", "refused"),
        (node("exited", exit=Exit(1, None)), None, "exited", "exit status 1"),
        (node("exited", exit=Exit(None, 9)), None, "exited", "SIGKILL"),
        (node("exited"), None, "exited", "its process is gone"),
    ],
)
def test_states(plan: ClusterPlan, found: NodeInstance, health: HttpResponse | None, state: str, detail: str) -> None:
    status = judge(plan.prefill[0], found, health, None)
    assert status.state == state
    assert detail in status.detail


def test_missing_readings_are_none_and_not_zero(plan: ClusterPlan) -> None:
    status = judge(plan.prefill[0], node("running"), OK, REFUSED)
    assert (status.requests_running, status.kv_cache_usage, status.writer, status.transfers_inflight) == (None,) * 4


def test_exit_codes_of_a_cluster() -> None:
    ready = InstanceStatus("prefill-0", "prefill", "a", "", "ready")
    assert ClusterStatus("c", (ready,), {}).exit_code == 0
    assert ClusterStatus("c", (ready, InstanceStatus("x", "unknown", "a", "", "ready")), {}).exit_code == 1
    assert ClusterStatus("c", (ready,), {"b": "no route"}).exit_code == 3


def test_the_connector_is_shipped_whole_and_named_by_its_content() -> None:
    files = connector_files()
    assert "pdctl_connector/connector.py" in files
    digest = connector_digest(files)
    changed = {**files, "pdctl_connector/connector.py": files["pdctl_connector/connector.py"] + b"\n"}
    assert connector_digest(changed) != digest
    assert connector_digest(dict(reversed(files.items()))) == digest
