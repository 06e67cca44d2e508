"""1 prefill and 1 decode on two hosts over SSH, with real vLLM, NIXL and the router: the whole life of a cluster.

One cluster for the whole file (booting takes most of a minute); the tests run in the order they are written.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from pdctl.bench.results import read_results
from tests.e2e.cluster import Cluster, complete, complete_all, marked_processes, metric, post

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]

MODEL = "demo"


def prompts(count: int, seed: int, words: int) -> list[str]:
    chooser = random.Random(seed)
    vocabulary = ["prefill", "decode", "block", "router", "writer", "window", "signal", "letter", "garden", "stone"]
    return [f"case {seed}-{i}: " + " ".join(chooser.choices(vocabulary, k=words)) for i in range(count)]


@pytest.fixture(scope="module")
def up(ssh_cluster: Cluster):
    """The cluster, launched; taken down at the end of the file whatever happened."""
    result = ssh_cluster.pdctl("up", "--json", timeout=400)
    try:
        assert result.code == 0, result.err
        yield result.json()
    finally:
        ssh_cluster.pdctl("down", "--force", timeout=120)


def urls(up: dict) -> dict[str, str]:
    return {instance["name"]: instance["url"] for instance in up["instances"]}


def test_up_proves_a_real_transfer(up: dict) -> None:
    facts = up["proof"]["facts"]
    assert up["proof"]["proven"]
    assert up["proof"]["unchecked"] == []
    assert facts["answer"] == "equal text"
    assert facts["nixl_bytes"] >= facts["expected_bytes"] > 0
    assert facts["received_tokens"] >= facts["prompt_tokens"] - 1
    assert {instance["action"] for instance in up["instances"]} == {"started"}
    print(up["timings_s"])


def test_concurrent_completions_equal_a_monolithic_run(up: dict) -> None:
    cases = prompts(20, seed=1, words=120)
    moved = metric(urls(up)["prefill-0"], "vllm:nixl_bytes_transferred_sum")
    received = metric(urls(up)["decode-0"], "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    routed = complete_all(up["endpoint"], cases, model=MODEL, at_once=20)
    alone = complete_all(urls(up)["prefill-0"], cases, model=MODEL, at_once=4)
    assert routed == alone
    assert len(set(alone)) > 15  # the answers depend on the prompts, so equality means something
    time.sleep(1)
    assert metric(urls(up)["prefill-0"], "vllm:nixl_bytes_transferred_sum") - moved >= 20 * 2**19
    got = metric(urls(up)["decode-0"], "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") - received
    assert got > 20 * 120


def test_streaming_chat(up: dict) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompts(1, seed=2, words=80)[0]}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{up['endpoint']}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, chunks = "", 0
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
                chunks += 1
            elif line.startswith(b"data: [DONE]"):
                break
    whole = post(f"{urls(up)['prefill-0']}/v1/chat/completions", {**body, "stream": False})
    assert chunks > 2
    assert text == whole["choices"][0]["message"]["content"]


def test_status_shows_a_healthy_cluster(up: dict, ssh_cluster: Cluster) -> None:
    result = ssh_cluster.pdctl("status", "--json")
    assert result.code == 0
    status = result.json()
    assert [i["state"] for i in status["instances"]] == ["ready"] * 3
    assert all(i["rss_bytes"] > 2**20 and i["pid"] and not i["plan_changed"] for i in status["instances"])
    assert status["instances"][0]["requests_running"] == 0
    text = ssh_cluster.pdctl("status").out
    assert "3 of 3 instances ready" in text
    assert "\x1b" not in text


def test_logs_show_the_end_and_follow(up: dict, ssh_cluster: Cluster) -> None:
    result = ssh_cluster.pdctl("logs", "decode-0", "-n", "400")
    assert result.code == 0
    assert "PdPushConnector" in result.out
    assert len(ssh_cluster.pdctl("logs", "prefill-0", "-n", "3").out.splitlines()) == 3
    with subprocess.Popen(
        ssh_cluster.command("logs", "prefill-0", "-n", "0", "-f"),
        env=ssh_cluster.environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as follower:
        try:
            time.sleep(2)
            complete(urls(up)["prefill-0"], "follow me", model=MODEL)
            assert follower.stdout is not None
            # The router asks for its health in between.
            assert any("/v1/completions" in line for line in follower.stdout)
        finally:
            follower.terminate()
            assert follower.wait(timeout=15) == 130


def test_a_second_up_changes_nothing(up: dict, ssh_cluster: Cluster) -> None:
    before = [i["pid"] for i in ssh_cluster.pdctl("status", "--json").json()["instances"]]
    result = ssh_cluster.pdctl("up", "--json", timeout=120)
    assert result.code == 0
    assert {i["action"] for i in result.json()["instances"]} == {"already-running"}
    assert [i["pid"] for i in ssh_cluster.pdctl("status", "--json").json()["instances"]] == before


def test_a_changed_plan_is_reported_and_left_alone(up: dict, ssh_cluster: Cluster, tmp_path) -> None:
    changed = Cluster(tmp_path / "changed.yaml", ssh_cluster.env)
    text = ssh_cluster.file.read_text()
    changed.file.write_text(re.sub(r"(?m)^( *max-num-seqs:) *\d+", r"\1 17", text))
    assert changed.file.read_text() != text
    result = changed.pdctl("up", "--json", timeout=120)
    assert result.code == 1
    actions = {i["name"]: i["action"] for i in result.json()["instances"]}
    assert actions["decode-0"] == "changed"
    status = changed.pdctl("status", "--json").json()
    assert next(i for i in status["instances"] if i["name"] == "decode-0")["plan_changed"]


def test_a_bench_of_which_an_instance_dies_keeps_what_it_has(
    up: dict, ssh_cluster: Cluster, testbed, tmp_path: Path
) -> None:
    instances = ssh_cluster.pdctl("status", "--json").json()["instances"]
    decode = next(instance for instance in instances if instance["name"] == "decode-0")
    out = tmp_path / "out"
    words = ("bench", "run", "--prompt-tokens", "128", "--output-tokens", "8", "--concurrency", "2", "--rate", "20")
    more = ("--requests", "12", "--rounds", "1", "--warmup", "2", "--answers", "2", "--out", str(out))
    bench = subprocess.Popen(
        ssh_cluster.command(*words, *more),
        env=ssh_cluster.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        # The first cell is written; the second one is under way or about to begin.
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and not (out / "results.json").exists() and bench.poll() is None:
            time.sleep(0.05)
        # A host has process ids of its own.
        testbed.call("exec", decode["host"], "kill", "-9", str(decode["pid"]))
        said, _ = bench.communicate(timeout=200)
    finally:
        bench.kill()
    print(said)
    results = read_results(out / "results.json")
    assert bench.returncode == 1
    assert not results.complete
    assert results.incomplete_because
    first, *later = results.runs
    assert len(first.good) == 12
    assert first.answers is not None
    assert first.answers.different == ()
    assert not any(run.complete for run in later)
    assert "PARTIAL" in said
    assert "PARTIAL" in (out / "report.html").read_text()


def test_a_dead_instance_is_seen_and_up_mends_it_while_the_router_stays(up: dict, ssh_cluster: Cluster) -> None:
    """The one that the test before killed."""
    status = ssh_cluster.pdctl("status", "--json")
    assert status.code == 1
    before = {i["name"]: i for i in status.json()["instances"]}
    assert before["decode-0"]["state"] == "exited"
    result = ssh_cluster.pdctl("up", "--json", timeout=300)
    assert result.code == 0, result.err
    after = {i["name"]: i["pid"] for i in ssh_cluster.pdctl("status", "--json").json()["instances"]}
    assert after["decode-0"] != before["decode-0"]["pid"]
    assert after["router"] == before["router"]["pid"]
    assert after["prefill-0"] == before["prefill-0"]["pid"]
    cases = prompts(4, seed=5, words=100)
    assert complete_all(up["endpoint"], cases, model=MODEL, at_once=2) == complete_all(
        urls(up)["prefill-0"], cases, model=MODEL, at_once=2
    )


def test_down_leaves_no_process_no_port_no_lock(up: dict, ssh_cluster: Cluster, testbed) -> None:
    assert marked_processes("e2e-ssh")
    result = ssh_cluster.pdctl("down", "--json", timeout=120)
    assert result.code == 0, result.err
    assert sorted(result.json()["stopped"]) == ["decode-0", "prefill-0", "router"]
    assert marked_processes("e2e-ssh") == []
    for host in testbed.names(2):
        listening = testbed.call("exec", host, "ss", "-Hltn")
        assert not re.search(r":(8000|81\d\d|82\d\d|56\d\d|57\d\d)\b", listening), listening
        held = testbed.call("exec", host, "sh", "-c", "lslocks --noheadings -o PATH | grep pdctl || true")
        assert held.strip() == ""
    assert ssh_cluster.pdctl("status").code == 1
    again = ssh_cluster.pdctl("down", "--json")
    assert again.code == 0
    assert again.json()["stopped"] == []
