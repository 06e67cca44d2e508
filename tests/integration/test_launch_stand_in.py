"""The life cycle on this machine with stand-ins for vLLM and the router: failures, Ctrl-C, two launches at once.

What needs the real vLLM is in tests/e2e.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, marked_processes

STAND_IN = Path(__file__).resolve().parents[1] / "support" / "stand_in"

pytestmark = pytest.mark.timeout(120)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class StandInCluster(Cluster):
    """The doctor would miss vLLM, NIXL and the router, which these tests do without."""

    def command(self, *words: str) -> list[str]:
        return super().command(*words, *(["--skip-doctor"] if words[0] == "up" else []))


class Bench:
    """Writes cluster files for stand-ins, each cluster with a name and a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"stand-in-{os.getpid()}-{folder.name[-6:].lower().replace('_', '-').strip('-')}"
        # All of them, so that a demo that runs on this machine is not in the way.
        self.ports = free_ports(8)

    def cluster(
        self, *, prefill: dict[str, str] | None = None, decode: dict[str, str] | None = None, extra="", router=""
    ) -> Cluster:
        def role(name: str, port: int, env: dict[str, str] | None) -> str:
            lines = "".join(f"    {key}: {value!r}\n" for key, value in (env or {}).items())
            block = f"  env:\n{lines}" if env else ""
            options = "  vllm_args: {dtype: float32}\n"
            telemetry = self.ports[3 if name == "prefill" else 4]
            head = f"{name}:\n  hosts: [local]\n  port: {port}\n  telemetry_port: {telemetry}\n"
            head += f"  side_channel_port: {self.ports[5 if name == 'prefill' else 6]}\n"
            return f"{head}{options}{block}{extra if name == 'decode' else ''}"

        file = self.folder / "cluster.yaml"
        file.write_text(
            f"cluster: {self.name}\nmodel: {self.folder}\naccelerator: cpu\nfabric: tcp\npython: {sys.executable}\n"
            f"env: {{PYTHONPATH: {str(STAND_IN)!r}}}\n"
            + role("prefill", self.ports[0], prefill)
            + role("decode", self.ports[1], decode)
            + f"router: {{host: local, port: {self.ports[2]}, metrics_port: {self.ports[7]}, args: {{{router}}}}}\n"
        )
        return StandInCluster(file, {"PDCTL_HOME": str(self.folder / "home"), "HOME": str(self.folder)})


@pytest.fixture
def bench(tmp_path: Path):
    made = Bench(tmp_path)
    yield made
    file = tmp_path / "cluster.yaml"
    if file.exists():
        made.cluster().pdctl("down", "--force")
    assert marked_processes(made.name) == []


def test_up_status_second_up_logs_restart_down(bench: Bench) -> None:
    cluster = bench.cluster()
    first = cluster.pdctl("up", "--json")
    assert first.code == 0, first.err
    result = first.json()
    assert result["proof"]["facts"]["answer"] == "equal text"
    assert {i["action"] for i in result["instances"]} == {"started"}
    status = cluster.pdctl("status", "--json")
    assert status.code == 0
    assert [i["state"] for i in status.json()["instances"]] == ["ready"] * 3
    assert status.json()["instances"][0]["kv_cache_usage"] == 0.25
    pids = {i["name"]: i["pid"] for i in status.json()["instances"]}
    second = cluster.pdctl("up", "--json")
    assert {i["action"] for i in second.json()["instances"]} == {"already-running"}
    assert "Starting to load model" in cluster.pdctl("logs", "prefill-0").out
    assert cluster.pdctl("restart", "--role", "decode").code == 0
    after = {i["name"]: i["pid"] for i in cluster.pdctl("status", "--json").json()["instances"]}
    assert after["decode-0"] != pids["decode-0"]
    assert (after["prefill-0"], after["router"]) == (pids["prefill-0"], pids["router"])
    down = cluster.pdctl("down", "--json")
    assert down.code == 0
    assert sorted(down.json()["stopped"]) == ["decode-0", "prefill-0", "router"]
    assert cluster.pdctl("status").code == 1


def test_the_endpoint_and_a_curl_line_are_printed(bench: Bench) -> None:
    result = bench.cluster().pdctl("up")
    assert result.code == 0
    assert f"http://127.0.0.1:{bench.ports[2]}" in result.out
    assert "curl -s" in result.out
    assert "\x1b" not in result.out + result.err


def test_a_launch_whose_progress_nobody_reads_goes_on(bench: Bench) -> None:
    cluster = bench.cluster()
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            cluster.command("up"), env=cluster.environment(), stdout=subprocess.PIPE, stderr=writes, text=True,
            timeout=90, check=False,
        )  # fmt: skip
    finally:
        os.close(writes)
    assert done.returncode == 0
    assert f"http://127.0.0.1:{bench.ports[2]}" in done.stdout


def test_a_failing_instance_is_named_with_its_cause_and_the_rest_is_stopped(bench: Bench) -> None:
    line = "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8100): address already in use"
    result = bench.cluster(decode={"STAND_IN_FAIL": line}).pdctl("up")
    assert result.code == 1
    assert "decode-0 on local did not come up" in result.err
    assert "port-in-use" in result.err
    assert "address already in use" in result.err
    assert "stopped again: decode-0, prefill-0" in result.err or "stopped again: prefill-0" in result.err
    assert marked_processes(bench.name) == []


def test_keep_leaves_a_failed_launch_as_it_is(bench: Bench) -> None:
    cluster = bench.cluster(decode={"STAND_IN_FAIL": "RuntimeError: no luck"})
    result = cluster.pdctl("up", "--keep", "--json")
    assert result.code == 1
    assert result.json()["error"]["failures"][0]["instance"] == "decode-0"
    states = {i["name"]: i["state"] for i in cluster.pdctl("status", "--json").json()["instances"]}
    assert states["decode-0"] == "exited"
    assert states["prefill-0"] in ("ready", "booting", "unhealthy")


def test_a_boot_that_takes_too_long_ends(bench: Bench) -> None:
    result = bench.cluster(prefill={"STAND_IN_BOOT_S": "60"}).pdctl("up", "--timeout", "2")
    assert result.code == 1
    assert "not ready after 2 s, still loading" in result.err
    assert marked_processes(bench.name) == []


def test_a_silent_local_prefill_is_a_failure(bench: Bench) -> None:
    result = bench.cluster(prefill={"STAND_IN_RECOMPUTE": "1"}, decode={"STAND_IN_RECOMPUTE": "1"}).pdctl("up")
    assert result.code == 1
    assert "silently prefilled" in result.err
    assert marked_processes(bench.name) == []


def test_a_wrong_answer_is_a_failure(bench: Bench) -> None:
    result = bench.cluster(decode={"STAND_IN_WRONG_TEXT": "1"}).pdctl("up")
    assert result.code == 1
    assert "'nonsense' through the router" in result.err


@pytest.mark.parametrize("state", ["dead", "stuck"])
def test_a_writer_without_life_signs_is_a_failure_though_health_is_fine(bench: Bench, state: str) -> None:
    result = bench.cluster(prefill={"STAND_IN_WRITER": state}).pdctl("up", "--keep")
    assert result.code == 1
    assert f"the writer of rank 0 is {state}" in result.err
    status = bench.cluster(prefill={"STAND_IN_WRITER": state}).pdctl("status", "--json")
    prefill = status.json()["instances"][0]
    assert (prefill["state"], prefill["writer"]) == ("unhealthy", state)


def test_a_request_that_is_not_in_the_ledgers_is_a_failure(bench: Bench) -> None:
    result = bench.cluster(decode={"STAND_IN_NO_LEDGER": "1"}).pdctl("up")
    assert result.code == 1
    assert "decode's ledger has no received transfer" in result.err


def test_a_port_that_is_taken_is_named_with_its_holder(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", bench.ports[1])):
        result = bench.cluster().pdctl("up")
    assert result.code == 1
    assert str(bench.ports[1]) in result.err
    assert f"pid {os.getpid()}" in result.err or str(os.getpid()) in result.err
    assert marked_processes(bench.name) == []


def test_two_launches_at_once_start_one_cluster(bench: Bench) -> None:
    cluster = bench.cluster(prefill={"STAND_IN_BOOT_S": "1"}, decode={"STAND_IN_BOOT_S": "1"})
    runs = [
        subprocess.Popen(
            cluster.command("up", "--json"), env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outcomes = [(run.communicate(timeout=90), run.returncode) for run in runs]
    assert [code for _, code in outcomes] == [0, 0], outcomes
    pids = [i["pid"] for i in cluster.pdctl("status", "--json").json()["instances"]]
    assert len(set(pids)) == 3
    mains = [line for line in marked_processes(bench.name) if "supervisor" not in line]
    assert len(mains) == 3


@pytest.mark.parametrize("seconds", [0.2, 0.5, 0.9, 1.4, 2.0, 3.0, 4.5])
def test_ctrl_c_at_any_moment_leaves_nothing(bench: Bench, seconds: float) -> None:
    cluster = bench.cluster(
        prefill={"STAND_IN_BOOT_S": "1", "STAND_IN_SLOW_COMPLETION_S": "0.5"}, decode={"STAND_IN_BOOT_S": "1.5"}
    )
    run = subprocess.Popen(
        cluster.command("up"), env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(seconds)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert "Traceback" not in err
    if run.returncode != 0:  # it may have been done already
        # -SIGINT, which shells show as 130 too: on a busy machine Python itself had not begun.
        assert run.returncode in (130, -signal.SIGINT), err
        assert marked_processes(bench.name) == []
    assert cluster.pdctl("down").code == 0


def test_sigkill_of_up_leaves_something_that_status_and_down_handle(bench: Bench) -> None:
    cluster = bench.cluster(prefill={"STAND_IN_BOOT_S": "1"}, decode={"STAND_IN_BOOT_S": "30"})
    run = subprocess.Popen(
        cluster.command("up"), env=cluster.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 20
    while len(marked_processes(bench.name)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    run.kill()
    run.wait()
    states = {i["name"]: i["state"] for i in cluster.pdctl("status", "--json").json()["instances"]}
    assert states["decode-0"] == "booting"
    assert cluster.pdctl("down", "--force").code == 0


def router_says(bench: Bench, *, well: bool, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{bench.ports[2]}/health", timeout=5).close()
            answer = True
        except urllib.error.HTTPError as error:
            error.close()
            answer = False
        if answer is well:
            return
        assert time.monotonic() < deadline, f"the router's health is still {answer}"
        time.sleep(0.1)


def kill_decode(cluster: Cluster) -> None:
    status = cluster.pdctl("status", "--json").json()
    os.kill(next(i["pid"] for i in status["instances"] if i["name"] == "decode-0"), signal.SIGKILL)


def test_a_router_that_saw_decode_die_takes_it_back_in_the_next_up(bench: Bench) -> None:
    cluster = bench.cluster()
    assert cluster.pdctl("up").code == 0
    kill_decode(cluster)
    # With the health checks that pdctl plans, not with the router's own: those take three minutes, and two to undo.
    router_says(bench, well=False, within_s=15)
    again = cluster.pdctl("up")
    assert again.code == 0, again.err
    router_says(bench, well=True, within_s=1)
    assert "which ran before and takes an instance back after 2 good answers in a row, one every 3 s" in again.err


def test_a_router_that_does_not_take_decode_back_is_named_with_what_it_says(bench: Bench) -> None:
    slow = "health-check-interval-secs: 1, health-failure-threshold: 1, health-success-threshold: 1000"
    cluster = bench.cluster(router=slow)
    assert cluster.pdctl("up").code == 0
    kill_decode(cluster)
    router_says(bench, well=False, within_s=10)
    failed = cluster.pdctl("up", "--timeout", "5")
    assert failed.code == 1
    assert "its health check says HTTP 503" in failed.err
    assert "Decode: http://127.0.0.1" in failed.err
    assert "pdctl restart router" in failed.err


def test_an_instance_that_ignores_sigterm_is_killed(bench: Bench) -> None:
    cluster = bench.cluster(decode={"STAND_IN_IGNORE_TERM": "1"})
    assert cluster.pdctl("up").code == 0
    assert cluster.pdctl("down", "--grace", "1").code == 0


def test_a_restart_stops_nothing_that_it_could_not_start_again(bench: Bench) -> None:
    cluster = bench.cluster()
    assert cluster.pdctl("up").code == 0
    before = cluster.pdctl("status", "--json").json()["instances"]
    whole = cluster.file.read_text()
    elsewhere = f"router: {{host: 127.0.0.1, address: 127.0.0.1, port: {bench.ports[2]}}}\n"
    other = whole.partition("router: ")[0].replace("[local]", "[{name: local, address: 127.0.0.1}]") + elsewhere
    cluster.file.write_text(f"{other}ssh: {{port: {free_ports(1)[0]}}}\n")
    result = cluster.pdctl("restart", "decode-0")
    cluster.file.write_text(whole)
    assert result.code == 3, result.err
    assert "nothing was stopped" in result.err
    after = cluster.pdctl("status", "--json").json()["instances"]
    assert [i["pid"] for i in after] == [i["pid"] for i in before]


@pytest.mark.parametrize("words", [["down", "--grace", "60"], ["restart", "decode-0", "--grace", "60"]], ids=" ".join)
def test_ctrl_c_while_instances_stop_says_how_to_see_them(bench: Bench, words: list[str]) -> None:
    cluster = bench.cluster(decode={"STAND_IN_IGNORE_TERM": "1"})
    assert cluster.pdctl("up").code == 0
    run = subprocess.Popen(
        cluster.command(*words), env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stderr is not None
    seen = ""
    while "] stopping " not in seen or "decode-0" not in seen.rpartition("] stopping ")[2]:
        line = run.stderr.readline()
        assert line, seen
        seen += line
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 130
    assert "Traceback" not in err
    assert "pdctl status" in err
    assert "pdctl down" in err


def test_a_second_ctrl_c_ends_the_cleaning_up_and_says_so(bench: Bench) -> None:
    slow = {"STAND_IN_IGNORE_TERM": "1", "STAND_IN_BOOT_S": "60"}
    cluster = bench.cluster(decode=slow)
    run = subprocess.Popen(
        cluster.command("up"), env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stderr is not None
    for wanted in ("decode-0: loading", "stopping what this launch started"):
        while wanted not in (line := run.stderr.readline()):
            assert line, f"no line with {wanted!r}"
        time.sleep(1)
        run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 130
    assert "Traceback" not in err
    assert "interrupted; told to stop, and may still be at it: " in err
    assert "decode-0" in err


def test_an_instance_that_left_the_cluster_file_is_shown_and_ended(bench: Bench) -> None:
    two = bench.cluster(extra="  instances_per_host: 2\n")
    assert two.pdctl("up").code == 0
    one = bench.cluster()
    status = one.pdctl("status", "--json")
    assert status.code == 1
    assert [i["name"] for i in status.json()["instances"] if i["role"] == "unknown"] == ["decode-1"]
    down = one.pdctl("down", "--json")
    assert down.code == 0
    assert "decode-1" in down.json()["stopped"]


def test_secrets_stay_out_of_argv_state_and_output(bench: Bench) -> None:
    cluster = bench.cluster()
    text = cluster.file.read_text()
    cluster.file.write_text(text.replace("env: {PYTHONPATH", "env: {VLLM_API_KEY: {from_env: TEST_KEY}, PYTHONPATH"))
    cluster.env["TEST_KEY"] = "s3cr3t-value"
    dry = cluster.pdctl("up", "--dry-run", "--json")
    result = cluster.pdctl("up")
    assert result.code == 0, result.err
    status = cluster.pdctl("status", "--json")
    home = bench.folder / "home"
    holders = [
        path
        for path in home.rglob("*")
        if path.is_file() and path.name != "env" and b"s3cr3t-value" in path.read_bytes()
    ]
    assert holders == []
    for output in (dry, result, status):
        assert "s3cr3t-value" not in output.out + output.err
    assert not any("s3cr3t-value" in line for line in marked_processes(bench.name))
    for env_file in home.rglob("env"):
        assert env_file.stat().st_mode & 0o077 == 0
