"""The node agent, run for real: as a separate Python through its bootstrap, with real processes, ports and files.

``PDCTL_AGENT_PYTHONS`` (paths, separated by colons) runs everything on other versions of Python than the test's own.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import http.server
import json
import os
import pwd
import resource
import shlex
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdctl.node import agent as agent_module

BOOTSTRAP = (
    'import sys;b=sys.stdin.buffer;s=b.read(int(b.readline()));g={"__name__":"__pdctl_agent__","SOURCE":s};'
    'exec(compile(s,"pdctl-agent","exec"),g);g["main"](b.read())'
)
SOURCE = Path(agent_module.__file__).read_bytes()
PYTHONS = os.environ.get("PDCTL_AGENT_PYTHONS", sys.executable).split(":")

# What the agent starts: a server with a worker process, as vLLM has.
SERVER = r"""
import http.server, json, os, signal, socketserver, sys, time
options = set(sys.argv[2:])
out = os.path.dirname(os.path.abspath(__file__))
worker = os.fork()
if not worker:
    if "escape" in options:
        os.setsid()
    if "stubborn" in options:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)
if "stubborn" in options:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "polite" in options:
    def leave(*_):
        print("leaving", flush=True)
        time.sleep(0.3)  # a second SIGTERM would be seen
        os.kill(worker, signal.SIGTERM)
        os._exit(7)
    signal.signal(signal.SIGTERM, leave)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if "hang" in options:
            time.sleep(60)
        print("GET", self.path, flush=True)
        ready = not os.path.exists(os.path.join(out, "unready"))
        self.send_response(200 if ready else 503)
        self.end_headers()
    def log_message(self, *_):
        pass
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    def server_bind(self):
        socketserver.TCPServer.server_bind(self)
server = Server(("127.0.0.1", int(sys.argv[1])), Handler)
report = {"pid": os.getpid(), "worker": worker, "environ": dict(os.environ), "argv": sys.argv,
          "session": os.getsid(0), "stdin": os.readlink("/proc/self/fd/0"),
          "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))}
import resource
report["nofile"] = resource.getrlimit(resource.RLIMIT_NOFILE)
with open(os.path.join(out, "report.tmp"), "w") as file:
    json.dump(report, file)
os.rename(os.path.join(out, "report.tmp"), os.path.join(out, "report.json"))
print("serving", flush=True)
server.serve_forever()
"""


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 20) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"still not after {timeout_s} s: {what}")


def alive(pid: int) -> bool:
    process = agent_module.read_process(pid)
    return process is not None and process.alive


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Node:
    """A login on a machine: a home folder, and a way to run the agent there."""

    def __init__(self, home: Path, python: str) -> None:
        self.home = home
        self.python = python
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C"}

    def spawn(self, request: dict[str, Any], **kwargs: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [self.python, "-I", "-S", "-c", BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environ,
            **kwargs,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"%d\n" % len(SOURCE) + SOURCE + json.dumps(request).encode())
            process.stdin.close()
        process.stdin = None
        return process

    def reply(self, request: dict[str, Any], timeout_s: float = 60) -> dict[str, Any]:
        with self.spawn(request) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        assert errors == b"", errors.decode()
        assert process.returncode == 0
        assert output.startswith(b"PDCTL-AGENT-1 {")
        assert output.endswith(b"}\n")
        assert output.count(b"\n") == 1
        reply: dict[str, Any] = json.loads(output[len(b"PDCTL-AGENT-1 ") :])
        return reply

    def call(self, command: str, **fields: Any) -> dict[str, Any]:
        reply = self.reply({"command": command, **fields})
        assert reply["ok"], reply["error"]["message"]
        result: dict[str, Any] = reply["result"]
        return result

    def fail(self, command: str, **fields: Any) -> dict[str, Any]:
        reply = self.reply({"command": command, **fields})
        assert not reply["ok"], reply
        error: dict[str, Any] = reply["error"]
        assert error["code"] != "internal", error["message"]
        assert error["message"]
        return error


class Dummy:
    """An instance of the dummy server on a node."""

    def __init__(self, node: Node, *options: str, name: str = "prefill-0") -> None:
        self.node = node
        self.name = name
        self.port = free_port()
        self.work = node.home / f"work-{name}"
        self.work.mkdir(exist_ok=True)
        (self.work / "server.py").write_text(SERVER)
        self.argv = [sys.executable, str(self.work / "server.py"), str(self.port), *options]
        self.env: dict[str, str] = {}
        self.secret_env: dict[str, str] = {}
        self.digest = "d1"

    @property
    def folder(self) -> Path:
        return self.node.home / ".pdctl" / "c" / self.name

    def request(self, **changes: Any) -> dict[str, Any]:
        request = {
            "command": "start",
            "cluster": "c",
            "instance": self.name,
            "argv": self.argv,
            "env": self.env,
            "secret_env": self.secret_env,
            "launch_script": "#!/bin/sh\nset -eu\n. ./env\nexec " + shlex.join(self.argv) + "\n",
            "digest": self.digest,
            "ports": [{"port": self.port, "purpose": "http", "address": "127.0.0.1"}],
            "restart_changed": False,
        }
        return {**request, **changes}

    def start(self, **changes: Any) -> dict[str, Any]:
        """Start it and wait until it serves; returns the record."""
        (self.work / "report.json").unlink(missing_ok=True)
        result = self.node.call(**self.request(**changes))
        assert result["action"] == "started"
        state: dict[str, Any] = result["state"]
        wait_for(lambda: (self.work / "report.json").exists() or not alive(state["pid"]), "the dummy server serves")
        assert alive(state["pid"]), (self.folder / "vllm.log").read_text()
        return state

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.work / "report.json").read_text())
        return report

    def stop(self, grace_s: float = 20, kill_grace_s: float = 20) -> dict[str, Any]:
        return self.node.call("stop", cluster="c", instance=self.name, grace_s=grace_s, kill_grace_s=kill_grace_s)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.node.call("status", cluster="c", instances=[self.name])["instances"][self.name]
        return status

    def edit_state(self, **changes: Any) -> None:
        path = self.folder / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(params=PYTHONS)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, request.param)
    yield node
    # Whatever a failed test left behind, known by the folder that is in its environment.
    mine = [p for p in agent_module.scan_processes().values() if p.folder.startswith(str(tmp_path) + "/")]
    for process in mine:
        agent_module.send_signal(process, signal.SIGKILL)


@pytest.fixture
def foreign() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with pdctl, in a session of its own, and must survive."""
    process = subprocess.Popen(["sleep", "120"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


# ------------------------------------------------------------------------------------------------------- life cycle


def test_whole_life(node: Node) -> None:
    dummy = Dummy(node, "polite")
    state = dummy.start()
    report = dummy.report()
    assert state["pid"] == report["pid"] == report["session"]
    assert state["argv"] == dummy.argv
    assert state["digest"] == "d1"
    assert len(state["start_id"]) == 12
    assert report["stdin"] == "/dev/null"
    assert set(report["descriptors"]) <= {0, 1, 2, 3, 4}  # its own socket, and the listing itself
    assert report["environ"]["PDCTL_MARKER"] == f"c/prefill-0/{state['start_id']}"
    assert report["environ"]["PDCTL_START_ID"] == state["start_id"]
    assert report["environ"]["SPT_NOENV"] == "1"

    status = dummy.status()
    assert status["process"] == "running"
    assert (status["pid"], status["create_time"]) == (state["pid"], state["create_time"])
    assert {entry["pid"] for entry in status["processes"]} == {report["pid"], report["worker"]}
    assert status["rss_bytes"] > 1_000_000
    assert status["uptime_s"] >= 0
    assert status["exit"] is None
    assert status["log_tail"] == "serving\n"

    assert dummy.node.call(**dummy.request())["action"] == "already-running"
    supervisor = agent_module.read_argv(state["supervisor_pid"])
    assert supervisor[-4:-2] == ["pdctl-supervisor", "c/prefill-0"]

    stopped = dummy.stop()
    assert (stopped["action"], stopped["signal"], stopped["leftover"]) == ("stopped", "SIGTERM", [])
    assert not alive(report["pid"])
    assert not alive(report["worker"])
    assert not alive(state["supervisor_pid"])
    status = dummy.status()
    assert status["process"] == "absent"
    assert status["processes"] == []
    assert (status["exit"]["code"], status["exit"]["signal"]) == (7, None)
    assert status["log_tail"] == "serving\nleaving\n"
    assert dummy.stop()["action"] == "not-running"

    purged = node.call("purge", cluster="c", instance="prefill-0")
    assert purged["kept"] == ["vllm.log"]
    assert sorted(path.name for path in dummy.folder.iterdir()) == ["vllm.log"]
    assert node.call("purge", cluster="c", instance="prefill-0") == {"removed": [], "kept": ["vllm.log"]}
    assert dummy.start()["start_id"] != state["start_id"]


def test_limits_are_raised(node: Node) -> None:
    dummy = Dummy(node)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    try:
        dummy.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert dummy.report()["nofile"] == [before[1], before[1]]


def test_modes_are_private(node: Node) -> None:
    dummy = Dummy(node)
    dummy.start()
    modes = {path.name: path.stat().st_mode & 0o777 for path in dummy.folder.iterdir()}
    assert modes["env"] == 0o600
    assert modes["launch.sh"] == 0o700
    assert all(mode & 0o077 == 0 for mode in modes.values())
    assert dummy.folder.stat().st_mode & 0o777 == 0o700
    assert not [name for name in modes if name.endswith(".tmp")]


def test_secrets_stay_in_the_env_file_and_the_process(node: Node) -> None:
    dummy = Dummy(node)
    dummy.secret_env = {"HF_TOKEN": "hunter2-very-secret"}
    dummy.start()
    assert dummy.report()["environ"]["HF_TOKEN"] == "hunter2-very-secret"
    answers = [
        node.reply(dummy.request()),
        node.reply(dummy.request(digest="other")),
        node.reply({"command": "status", "cluster": "c", "instances": None}),
        node.reply({**dummy.request(), "cluster": "../x"}),
    ]
    assert "hunter2" not in json.dumps(answers)
    assert "HF_TOKEN" in answers[0]["result"]["state"]["secret_names"]
    holding = [path.name for path in dummy.folder.iterdir() if b"hunter2" in path.read_bytes()]
    assert holding == ["env"]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            assert not any("hunter2" in word for word in agent_module.read_argv(int(entry.name)))


def test_values_and_arguments_arrive_unchanged(node: Node) -> None:
    odd = [
        "it's",
        'say "x"',
        "a\nb\n",
        "$(touch pwned) `id` $HOME",
        "\\",
        "",
        " ",
        "*",
        "ünï→",
        "-n",
        "a;b&c|d",
        "\t\r",
    ]
    dummy = Dummy(node)
    dummy.argv += odd
    dummy.env = {f"ODD_{index}": value for index, value in enumerate(odd)}
    dummy.start()
    report = dummy.report()
    assert report["argv"][2:] == odd
    assert {key: value for key, value in report["environ"].items() if key.startswith("ODD_")} == dummy.env
    assert not list(node.home.rglob("pwned"))
    dummy.stop()
    # And so they do when a person runs the script by hand.
    (dummy.work / "report.json").unlink()
    by_hand = subprocess.Popen(["./launch.sh"], cwd=dummy.folder, env={"PATH": os.environ["PATH"]}, stdout=-3)
    try:
        wait_for((dummy.work / "report.json").exists, "the script run by hand serves")
        assert dummy.report()["environ"].items() >= dummy.env.items()
        assert dummy.stop(grace_s=5)["action"] == "stopped"
    finally:
        by_hand.kill()
        by_hand.wait()


def test_placeholders_are_filled_at_each_start(node: Node) -> None:
    dummy = Dummy(node)
    dummy.argv += ["--id=engine-@START_ID@", "--cache=@HOME@/cache"]
    dummy.env = {"ENGINE": "e-@START_ID@", "PYTHONPATH": "@HOME@/.pdctl/connector/abc"}
    dummy.secret_env = {"SECRET": "@HOME@"}
    seen = set()
    for _ in range(2):
        state = dummy.start()
        report = dummy.report()
        assert report["argv"][-2:] == [f"--id=engine-{state['start_id']}", f"--cache={node.home}/cache"]
        assert report["environ"]["ENGINE"] == f"e-{state['start_id']}"
        assert report["environ"]["PYTHONPATH"] == f"{node.home}/.pdctl/connector/abc"
        assert report["environ"]["SECRET"] == "@HOME@"
        seen.add(state["start_id"])
        dummy.stop()
    assert len(seen) == 2


def test_home_from_the_user_database(node: Node) -> None:
    del node.environ["HOME"]
    node.environ["PDCTL_HOME"] = str(node.home / "elsewhere")
    dummy = Dummy(node)
    dummy.argv.append("--x=@HOME@/y")
    result = node.call(**dummy.request())
    assert result["state"]["argv"][-1] == f"--x={pwd.getpwuid(os.getuid()).pw_dir}/y"
    assert (node.home / "elsewhere" / "c" / "prefill-0" / "state.json").exists()


def test_changed_digest_is_reported_and_restarted_only_when_asked(node: Node) -> None:
    dummy = Dummy(node)
    first = dummy.start()
    result = node.call(**dummy.request(digest="d2"))
    assert result["action"] == "changed"
    assert result["state"]["digest"] == "d1"
    assert alive(first["pid"])
    second = dummy.start(digest="d2", restart_changed=True, grace_s=10)
    assert second["pid"] != first["pid"]
    assert not alive(first["pid"])
    assert dummy.status()["digest"] == "d2"


def test_a_lost_record_is_no_reason_to_start_twice(node: Node) -> None:
    dummy = Dummy(node)
    first = dummy.start()
    (dummy.folder / "state.json").unlink()
    assert node.call(**dummy.request())["action"] == "changed"
    status = dummy.status()
    assert (status["process"], status["pid"], status["digest"]) == ("running", first["pid"], None)
    assert dummy.stop()["action"] == "stopped"
    assert not alive(first["pid"])


def test_a_lost_folder_is_found_by_the_marker(node: Node) -> None:
    dummy = Dummy(node)
    first = dummy.start()
    shutil.rmtree(dummy.folder)
    unknown = node.call("status", cluster="c", instances=["decode-0"])["unknown"]
    assert unknown["prefill-0"]["process"] == "running"
    assert dummy.stop()["action"] == "stopped"
    assert not alive(first["pid"])


def test_same_cluster_of_another_home_is_foreign(node: Node, tmp_path: Path) -> None:
    dummy = Dummy(node)
    dummy.start()
    other = Node(tmp_path / "other", node.python)
    other.home.mkdir()
    assert other.call("status", cluster="c", instances=["prefill-0"])["instances"]["prefill-0"]["process"] == "absent"
    assert other.call("stop", cluster="c", instance="prefill-0")["action"] == "not-running"
    assert dummy.status()["process"] == "running"


def test_logs_rotate_at_each_start(node: Node) -> None:
    dummy = Dummy(node)
    for number in range(5):
        dummy.start(launch_script=f"#!/bin/sh\necho start {number}\nexec {shlex.join(dummy.argv)}\n")
        dummy.stop()
    logs = {path.name: path.read_text().splitlines()[0] for path in dummy.folder.glob("vllm.log*")}
    assert logs == {
        "vllm.log": "start 4",
        "vllm.log.1": "start 3",
        "vllm.log.2": "start 2",
        "vllm.log.3": "start 1",
    }


# ---------------------------------------------------------------------------------------------- ends and leftovers


def test_crash_is_recorded(node: Node) -> None:
    dummy = Dummy(node)
    node.call(**dummy.request(launch_script="#!/bin/sh\necho boom >&2\nexit 3\n"))
    status = wait_for(lambda: (s := dummy.status())["process"] == "exited" and s, "the crash is seen")
    assert (status["exit"]["code"], status["exit"]["signal"]) == (3, None)
    assert status["log_tail"] == "boom\n"
    # Starting again needs no stop in between.
    dummy.start()


def test_kill_is_recorded_with_the_signal_and_workers_are_cleaned_up(node: Node) -> None:
    dummy = Dummy(node, "escape")
    first = dummy.start()
    worker = dummy.report()["worker"]
    os.kill(first["pid"], signal.SIGKILL)
    status = wait_for(lambda: (s := dummy.status())["process"] == "exited" and s, "the kill is seen")
    assert status["exit"]["signal"] == "SIGKILL"
    assert [entry["pid"] for entry in status["processes"]] == [worker]
    second = dummy.start(grace_s=5)
    assert not alive(worker)
    os.kill(second["pid"], signal.SIGKILL)
    worker = dummy.report()["worker"]
    assert alive(worker)
    assert dummy.stop()["action"] == "stopped"
    assert not alive(worker)


def test_stubborn_processes_are_killed(node: Node) -> None:
    dummy = Dummy(node, "stubborn", "escape")
    state = dummy.start()
    worker = dummy.report()["worker"]
    assert os.getsid(worker) == worker
    stopped = dummy.stop(grace_s=0.5)
    assert (stopped["action"], stopped["signal"]) == ("stopped", "SIGKILL")
    assert stopped["took_s"] >= 0.5
    assert not alive(state["pid"])
    assert not alive(worker)
    assert dummy.status()["exit"]["signal"] == "SIGKILL"


def test_polite_main_with_an_escaped_stubborn_worker(node: Node) -> None:
    dummy = Dummy(node, "escape", "polite")
    state = dummy.start()
    worker = dummy.report()["worker"]
    os.kill(worker, signal.SIGSTOP)
    assert dummy.stop(grace_s=30)["signal"] == "SIGTERM"
    assert not alive(state["pid"])
    assert not alive(worker)


@pytest.mark.parametrize("options", [(), ("stubborn",)])
def test_stopped_processes_are_ended(node: Node, options: tuple[str, ...]) -> None:
    dummy = Dummy(node, *options)
    state = dummy.start()
    worker = dummy.report()["worker"]
    for pid in (state["pid"], worker):
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: {entry["state"] for entry in dummy.status()["processes"]} == {"T"}, "both are stopped")
    assert dummy.status()["process"] == "running"
    stopped = dummy.stop(grace_s=30 if not options else 0.3)
    assert stopped["signal"] == ("SIGKILL" if options else "SIGTERM")
    assert not alive(state["pid"])
    assert not alive(worker)


def test_supervisor_killed_changes_nothing_for_the_instance(node: Node) -> None:
    dummy = Dummy(node)
    state = dummy.start()
    os.kill(state["supervisor_pid"], signal.SIGKILL)
    wait_for(lambda: not alive(state["supervisor_pid"]), "the supervisor is gone")
    assert dummy.status()["process"] == "running"
    assert node.call(**dummy.request())["action"] == "already-running"
    os.kill(state["pid"], signal.SIGKILL)
    status = wait_for(lambda: (s := dummy.status())["process"] == "exited" and s, "the end is seen")
    assert status["exit"] is None


def test_stopped_supervisor_does_not_stay_behind(node: Node) -> None:
    dummy = Dummy(node)
    state = dummy.start()
    os.kill(state["supervisor_pid"], signal.SIGSTOP)
    assert dummy.stop()["action"] == "stopped"
    assert not alive(state["supervisor_pid"])
    assert dummy.status()["exit"]["signal"] == "SIGTERM"


@pytest.mark.parametrize("doctored", ["create time", "boot"])
def test_recycled_pid_is_never_touched(node: Node, foreign: subprocess.Popen[bytes], doctored: str) -> None:
    dummy = Dummy(node)
    dummy.start()
    dummy.stop()
    real = agent_module.read_process(foreign.pid)
    assert real is not None
    record = {
        "pid": real.pid,
        "create_time": real.create_time - (doctored == "create time"),
        "boot_id": agent_module.boot_id() if doctored == "create time" else "another-boot",
        "supervisor_pid": real.pid,
        "supervisor_create_time": real.create_time - 1,
        "start_id": "0123456789ab",
        "digest": "d1",
    }
    (dummy.folder / "state.json").write_text(json.dumps(record))
    (dummy.folder / "exit.json").unlink()
    assert dummy.status()["process"] == "exited"
    assert dummy.status()["processes"] == []
    assert dummy.stop(grace_s=0.2, kill_grace_s=0.2)["action"] == "not-running"
    assert foreign.poll() is None
    assert dummy.status()["process"] == "absent"
    (dummy.folder / "state.json").write_text(json.dumps(record))
    dummy.start()
    assert foreign.poll() is None


def test_caller_killed_right_after_the_start(node: Node) -> None:
    dummy = Dummy(node)
    with node.spawn(dummy.request(), start_new_session=True) as process:
        assert process.stdout is not None
        reply = json.loads(process.stdout.readline()[len("PDCTL-AGENT-1 ") :])
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        # The channel closes with the agent: nothing else holds its output open.
        process.communicate(timeout=20)
    state = reply["result"]["state"]
    wait_for((dummy.work / "report.json").exists, "the instance serves")
    assert dummy.status()["process"] == "running"
    os.kill(state["supervisor_pid"], signal.SIGHUP)
    time.sleep(0.1)
    assert alive(state["supervisor_pid"])


def test_agent_killed_at_any_moment_of_a_start(node: Node) -> None:
    dummy = Dummy(node)
    began = time.monotonic()
    node.call(**dummy.request())
    whole = time.monotonic() - began
    dummy.stop()
    for step in range(7):
        with node.spawn(dummy.request(), start_new_session=True) as process:
            time.sleep(whole * (0.3 + step * 0.1))
            process.kill()
            process.communicate(timeout=20)
        # Either nothing runs, or one instance that is on record; in both cases the next start is a plain one.
        result = wait_for(
            lambda: (r := node.reply(dummy.request()))["ok"] and r["result"], "a start works after an interrupted one"
        )
        assert result["action"] in ("started", "already-running")
        status = dummy.status()
        assert status["process"] == "running"
        leaders = [p for p in agent_module.scan_processes().values() if p.marker.startswith("c/prefill-0/")]
        mine = [p for p in leaders if p.folder == str(dummy.folder) and p.pid == p.session]
        assert [p.pid for p in mine] == [result["state"]["pid"]]
        dummy.stop(grace_s=5)


def test_starts_at_once_give_one_instance(node: Node) -> None:
    dummy = Dummy(node)
    for _ in range(4):
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(lambda _: node.call(**dummy.request()), range(3)))
        assert sorted(result["action"] for result in results) == ["already-running", "already-running", "started"]
        assert len({result["state"]["start_id"] for result in results}) == 1
        dummy.stop(grace_s=5)


def test_stops_at_once(node: Node) -> None:
    dummy = Dummy(node)
    dummy.start()
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: dummy.stop(), range(3)))
    assert sorted(result["action"] for result in results) == ["not-running", "not-running", "stopped"]


def test_busy(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    dummy = Dummy(node)
    dummy.start()
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", SOURCE.replace(b"LOCK_WAIT_S = 10.0", b"LOCK_WAIT_S = 0.2"))
    with agent_module.instance_lock(str(dummy.folder), "test", 0):
        error = node.fail(**dummy.request())
        assert error["code"] == "busy"
        assert f"test, pid {os.getpid()}" in error["message"]
        assert node.fail("stop", cluster="c", instance="prefill-0", grace_s=0)["code"] == "busy"
    assert dummy.status()["process"] == "running"


def test_purge_of_a_running_instance_is_refused(node: Node) -> None:
    dummy = Dummy(node)
    state = dummy.start()
    assert node.fail("purge", cluster="c", instance="prefill-0")["code"] == "busy"
    assert alive(state["pid"])
    assert node.call("purge", cluster="c", instance="never-there") == {"removed": [], "kept": []}


# ------------------------------------------------------------------------------------------------- starts that fail


def test_port_in_use_names_the_holder(node: Node) -> None:
    dummy = Dummy(node)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", dummy.port))
        listener.listen()
        error = node.fail(**dummy.request())
    assert error["code"] == "port-in-use"
    assert str(dummy.port) in error["message"]
    assert f"pid {os.getpid()}" in error["message"]
    assert error["details"]["holders"][0]["pid"] == os.getpid()
    assert dummy.status()["process"] == "absent"
    assert not (dummy.folder / "env").exists()
    dummy.start()


def test_port_in_use_by_another_instance(node: Node) -> None:
    first, second = Dummy(node), Dummy(node, name="decode-0")
    first.start()
    error = node.fail(**second.request(ports=[{"port": first.port, "purpose": "side channel", "address": "0.0.0.0"}]))
    assert error["code"] == "port-in-use"
    assert "pdctl instance c/prefill-0" in error["message"]
    assert "side channel" in error["message"]


@pytest.mark.root
def test_port_held_by_a_process_that_cannot_be_seen(node: Node) -> None:
    dummy = Dummy(node)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", dummy.port))
        listener.listen()
        # A process tree of its own hides all other processes, as another user's are hidden; the ports are the same.
        process = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", node.python, "-I", "-S", "-c", BOOTSTRAP],
            input=b"%d\n" % len(SOURCE) + SOURCE + json.dumps(dummy.request()).encode(),
            env=node.environ,
            capture_output=True,
        )
    error = json.loads(process.stdout[len("PDCTL-AGENT-1 ") :])["error"]
    assert error["code"] == "port-in-use"
    assert "a process of user root (not visible to this login)" in error["message"]


@pytest.mark.parametrize("obstacle", ["home", "cluster", "instance"])
def test_file_in_the_place_of_a_folder(node: Node, obstacle: str) -> None:
    dummy = Dummy(node)
    path = {"home": dummy.folder.parents[1], "cluster": dummy.folder.parent, "instance": dummy.folder}[obstacle]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way")
    error = node.fail(**dummy.request())
    assert error["code"] == "not-writable"
    assert str(path) in error["message"]
    assert path.read_text() == "in the way"
    assert node.call("status", cluster="c", instances=None)["instances"] == {}
    if obstacle == "home":
        assert node.fail("ship", digest=DIGEST, files=encode(FILES))["code"] == "not-writable"


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


SOURCE_PAGES = -(-len(SOURCE) // 4096)


@pytest.mark.root
@pytest.mark.parametrize(
    ("pages", "file"),
    [
        (1, "env"),
        (3, "supervisor.py"),
        # Lock, env, launch.sh and supervisor.py fit: it is the supervisor that finds out, with the new process waiting.
        (3 + SOURCE_PAGES, "state.json"),
    ],
)
def test_disk_full(node: Node, pages: int, file: str) -> None:
    dummy = Dummy(node)
    with mounted(node.home / ".pdctl", f"size={pages * 4096}"):
        error = node.fail(**dummy.request())
        assert error["code"] == "disk-full", error
        assert str(dummy.folder / file) in error["message"]
        assert dummy.status()["process"] == "absent"
        assert not list(dummy.folder.glob("*.tmp"))
        assert not (dummy.folder / "state.json").exists()
        assert [p for p in agent_module.scan_processes().values() if p.folder == str(dummy.folder)] == []
        subprocess.run(["mount", "-o", "remount,size=4m", str(node.home / ".pdctl")], check=True)
        dummy.start()
        dummy.stop()


@pytest.mark.root
def test_disk_full_while_shipping(node: Node) -> None:
    with mounted(node.home / ".pdctl", f"size={3 * 4096}"):
        assert node.fail("ship", digest=DIGEST, files=encode(FILES))["code"] == "disk-full"
        assert list((node.home / ".pdctl" / "connector").iterdir()) == []


@pytest.mark.root
def test_read_only(node: Node) -> None:
    dummy = Dummy(node)
    with mounted(node.home / ".pdctl", "size=1m,ro"):
        error = node.fail(**dummy.request())
        assert error["code"] == "not-writable"
        assert os.strerror(errno.EROFS) in error["message"]
        assert node.fail("ship", digest=DIGEST, files=encode(FILES))["code"] == "not-writable"


def test_missing_python(node: Node) -> None:
    dummy = Dummy(node)
    error = node.fail(**dummy.request(argv=["/opt/no/python", "-m", "x"]))
    assert error["code"] == "no-python"
    assert "/opt/no/python" in error["message"]


def test_missing_interpreter_of_the_script(node: Node) -> None:
    dummy = Dummy(node)
    error = node.fail(**dummy.request(launch_script="#!/opt/no/bash\nexit 0\n"))
    assert error["code"] == "start-failed"
    assert "launch.sh" in error["message"]
    assert dummy.status()["process"] == "absent"
    assert not (dummy.folder / "state.json").exists()


def test_script_without_interpreter_line(node: Node) -> None:
    dummy = Dummy(node)
    dummy.start(launch_script="exec " + shlex.join(dummy.argv) + "\n")


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": "../c"},
        {"cluster": "connector"},
        {"instance": "a/b"},
        {"instance": ".."},
        {"argv": []},
        {"argv": "python"},
        {"env": {"A=B": "x"}},
        {"launch_script": None},
        {"ports": [{"port": 0}]},
        {"ports": [5]},
    ],
)
def test_bad_starts_change_nothing(node: Node, changes: dict[str, Any]) -> None:
    assert node.fail(**Dummy(node).request(**changes))["code"] == "bad-request"
    assert not (node.home / ".pdctl").exists()


@pytest.mark.parametrize("command", ["stop", "log", "purge", "status", "observe"])
def test_names_are_checked_by_every_command(node: Node, command: str) -> None:
    fields: dict[str, Any] = {"cluster": "c", "instance": "../../etc"}
    if command == "status":
        fields = {"cluster": "c", "instances": ["../../etc"]}
    if command == "observe":
        fields = {"cluster": "c", "instances": {"../../etc": {}}}
    assert node.fail(command, **fields)["code"] == "bad-request"
    assert node.fail(command, **{**fields, "cluster": "/etc"})["code"] == "bad-request"


def test_unknown_command(node: Node) -> None:
    error = node.fail("reboot")
    assert error["code"] == "bad-request"
    assert "status" in error["message"]


# ---------------------------------------------------------------------------------------------------------- status


def test_status_shows_instances_that_nobody_asked_for(node: Node) -> None:
    first, second = Dummy(node), Dummy(node, name="decode-0")
    first.start()
    second.start()
    second.stop()
    result = node.call("status", cluster="c", instances=["prefill-0", "router"])
    assert {name: entry["process"] for name, entry in result["instances"].items()} == {
        "prefill-0": "running",
        "router": "absent",
    }
    assert {name: entry["process"] for name, entry in result["unknown"].items()} == {"decode-0": "absent"}
    result = node.call("status", cluster="c", instances=None)
    assert sorted(result["instances"]) == ["decode-0", "prefill-0"]
    assert result["unknown"] == {}
    assert node.call("status", cluster="other", instances=None)["instances"] == {}


def test_status_asks_running_instances_over_http(node: Node) -> None:
    first, second = Dummy(node), Dummy(node, name="decode-0")
    first.start()
    requests = {
        name: [{"method": "GET", "url": f"http://127.0.0.1:{dummy.port}{path}", "timeout_s": 5} for path in paths]
        for name, dummy, paths in (("prefill-0", first, ("/health", "/other")), ("decode-0", second, ("/health",)))
    }
    result = node.call("status", cluster="c", instances=["prefill-0", "decode-0"], http=requests)
    assert [answer["status"] for answer in result["http"]["prefill-0"]] == [200, 200]
    assert "decode-0" not in result["http"]


def test_only_the_launch_that_started_an_instance_cleans_it_up(node: Node) -> None:
    dummy = Dummy(node)
    dummy.start(launch_id="ours")
    stop = {"cluster": "c", "instance": "prefill-0", "grace_s": 10, "kill_grace_s": 10}
    assert node.call("stop", **stop, only_launch_id="theirs")["action"] == "not-running"
    assert dummy.status()["process"] == "running"
    assert node.call("stop", **stop, only_launch_id="ours")["action"] == "stopped"
    assert node.call("stop", **stop, only_launch_id="ours")["action"] == "not-running"


def test_the_gate_is_closed_again_by_a_start(node: Node) -> None:
    dummy = Dummy(node)
    assert node.fail("open", cluster="c", instance="prefill-0")["code"] == "not-found"
    dummy.start()
    node.call("open", cluster="c", instance="prefill-0")
    assert (dummy.folder / "gate").exists()
    dummy.stop()
    dummy.start()
    assert not (dummy.folder / "gate").exists()


# --------------------------------------------------------------------------------------------------------- observe


def observe(node: Node, timeout_s: float = 20, **instances: dict[str, Any]) -> dict[str, Any]:
    return node.call(
        "observe",
        cluster="c",
        instances={name.replace("_", "-"): known for name, known in instances.items()},
        timeout_s=timeout_s,
    )


def test_observe_from_start_to_crash(node: Node) -> None:
    dummy = Dummy(node)
    (dummy.work / "unready").touch()
    state = dummy.start()
    url = f"http://127.0.0.1:{dummy.port}/health"
    known: dict[str, Any] = {"offset": 0, "ready": False, "http": url}
    seen = ""
    ready = False
    (dummy.work / "unready").unlink()
    while not ready:
        result = observe(node, prefill_0=known)["instances"]["prefill-0"]
        assert result["process"] == "running"
        seen += result["log"]
        ready = result["ready"]
        known.update(offset=result["offset"], inode=result["inode"])
    assert "serving\n" in seen
    known["ready"] = True

    # Nothing new: it waits for its time-out. Something new: it does not.
    quiet = node.call("log", cluster="c", instance="prefill-0", offset=known["offset"])
    known["offset"] = quiet["offset"]
    began = time.monotonic()
    assert observe(node, 0.7, prefill_0=known)["changed"] == []
    assert time.monotonic() - began >= 0.7
    with node.spawn({"command": "observe", "cluster": "c", "instances": {"prefill-0": known}, "timeout_s": 60}) as call:
        time.sleep(0.3)
        assert call.poll() is None
        os.kill(state["pid"], signal.SIGKILL)
        output, _ = call.communicate(timeout=30)
    result = json.loads(output[len("PDCTL-AGENT-1 ") :])["result"]
    assert result["changed"] == ["prefill-0"]
    assert result["instances"]["prefill-0"]["process"] == "exited"
    assert result["instances"]["prefill-0"]["exit"]["signal"] == "SIGKILL"
    assert not result["instances"]["prefill-0"]["ready"]
    known["process"] = "exited"
    assert observe(node, 0.1, prefill_0=known)["changed"] == []


def test_observe_becomes_ready_although_the_log_has_news_all_the_time(node: Node) -> None:
    dummy = Dummy(node)
    dummy.start()
    known: dict[str, Any] = {"offset": 0, "ready": False, "http": f"http://127.0.0.1:{dummy.port}/health"}
    for _ in range(20):
        with (dummy.folder / "vllm.log").open("a") as log:
            log.write("news\n")
        result = observe(node, prefill_0=known)["instances"]["prefill-0"]
        if result["ready"]:
            return
        known["offset"] = result["offset"]
    raise AssertionError("20 looks and never ready")


def test_observe_hung_server_delays_nobody(node: Node) -> None:
    hung, fine = Dummy(node, "hang"), Dummy(node, name="decode-0")
    hung.start()
    fine.start()
    size = len((hung.folder / "vllm.log").read_bytes())
    result = observe(
        node,
        prefill_0={"offset": size, "ready": False, "http": f"http://127.0.0.1:{hung.port}/health"},
        decode_0={"offset": size, "ready": False, "http": f"http://127.0.0.1:{fine.port}/health"},
    )
    assert result["changed"] == ["decode-0"]
    assert result["instances"]["decode-0"]["ready"]
    assert not result["instances"]["prefill-0"]["ready"]


def test_observe_long_log_and_rotation(node: Node) -> None:
    dummy = Dummy(node)
    dummy.start()
    with (dummy.folder / "vllm.log").open("a") as log:
        log.write("".join(f"line {number:06d}\n" for number in range(20_000)))
    first = observe(node, prefill_0={"offset": 0})["instances"]["prefill-0"]
    assert first["log"].endswith("line 019999\n")
    assert first["log"].startswith("line ")
    assert len(first["log"]) <= 64 * 1024
    assert first["skipped"] + len(first["log"]) == first["offset"] == (dummy.folder / "vllm.log").stat().st_size
    dummy.stop()
    dummy.start()
    again = observe(node, prefill_0={"offset": first["offset"], "inode": first["inode"]})["instances"]["prefill-0"]
    assert again["rotated"]
    assert again["log"] == "serving\n"


def test_observe_absent_instance(node: Node) -> None:
    result = observe(node, prefill_0={"offset": 0, "ready": False, "http": None})
    assert result["changed"] == ["prefill-0"]
    assert result["instances"]["prefill-0"]["process"] == "absent"
    assert observe(node, 0.1, prefill_0={"process": "absent"})["changed"] == []


# ------------------------------------------------------------------------------------------------------------- log


def test_log_tail_and_follow(node: Node) -> None:
    dummy = Dummy(node)
    dummy.start()
    path = dummy.folder / "vllm.log"
    with path.open("a") as log:
        log.write("".join(f"line {number}\n" for number in range(100)))
    tail = node.call("log", cluster="c", instance="prefill-0", offset=None, lines=2)
    assert tail["text"] == "line 98\nline 99\n"
    assert tail["offset"] == tail["size"] == path.stat().st_size
    assert tail["inode"] == path.stat().st_ino
    follow = {"command": "log", "cluster": "c", "instance": "prefill-0", "offset": tail["offset"], "wait_s": 30}
    with node.spawn(follow) as call:
        time.sleep(0.2)
        with path.open("a") as log:
            log.write("more\n")
        output, _ = call.communicate(timeout=30)
    assert json.loads(output[len("PDCTL-AGENT-1 ") :])["result"]["text"] == "more\n"
    assert node.call("log", cluster="c", instance="prefill-0", offset=0, max_bytes=16)["offset"] == 16
    assert node.fail("log", cluster="c", instance="decode-9")["code"] == "not-found"


# ------------------------------------------------------------------------------------------------------------ HTTP


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/slow":
            time.sleep(1.5)
        if self.path == "/drip":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(40):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            return
        if self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
            return
        if self.path == "/chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
            return
        if self.path == "/keep":
            # Against the request's wish, as some servers do.
            self.close_connection = False
        body = {"/large": b"x" * 5_000_000, "/binary": b"a\xffb"}.get(self.path, b"fine")
        self.send_response({"/missing": 404, "/moved": 302}.get(self.path, 200))
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = json.dumps({"body": body.decode(), "headers": dict(self.headers)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_http_answers(node: Node, web: str) -> None:
    node.environ.update(http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
    requests = [
        {"method": "GET", "url": web + "/"},
        {"method": "POST", "url": web + "/v1", "json": {"a": "ü"}, "headers": {"Authorization": "Bearer x"}},
        {"method": "POST", "url": web + "/v1", "body": "plain"},
        {"method": "GET", "url": web + "/missing"},
        {"method": "GET", "url": web + "/moved"},
        {"method": "GET", "url": web + "/binary"},
        {"method": "GET", "url": web + "/large"},
        {"method": "GET", "url": web + "/chunked"},
        {"method": "GET", "url": web + "/keep", "timeout_s": 3},
    ]
    plain, posted, body, missing, moved, binary, large, chunked, keep = node.call("http", requests=requests)[
        "responses"
    ]
    assert (plain["status"], plain["body"], plain["error"]) == (200, "fine", None)
    assert plain["headers"]["content-length"] == "4"
    assert plain["duration_s"] > 0
    answer = json.loads(posted["body"])
    assert json.loads(answer["body"]) == {"a": "ü"}
    assert answer["headers"]["Content-Type"] == "application/json"
    assert answer["headers"]["Authorization"] == "Bearer x"
    assert json.loads(body["body"])["body"] == "plain"
    assert (missing["status"], missing["error"]) == (404, None)
    assert (moved["status"], moved["headers"]["location"]) == (302, "/elsewhere")
    assert binary["body"] == "a\ufffdb"
    assert (len(large["body"]), large["truncated"], large["error"]) == (4 * 1024 * 1024, True, None)
    assert (chunked["body"], chunked["error"]) == ("abcde", None)
    assert (keep["body"], keep["error"]) == ("fine", None)


def test_http_errors(node: Node, web: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        urls = [
            f"http://127.0.0.1:{free_port()}/",
            f"http://127.0.0.1:{silent.getsockname()[1]}/",
            web + "/drip",
            web + "/short",
            "ftp://127.0.0.1/",
            "http://127.0.0.1:notaport/",
            web.replace("http://", "https://"),
        ]
        requests = [{"method": "GET", "url": url, "timeout_s": 0.5} for url in urls]
        responses = node.call("http", requests=requests, parallel=True)["responses"]
    kinds = [response["error"]["kind"] for response in responses]
    assert kinds == ["refused", "timeout", "timeout", "protocol", "bad-request", "bad-request", "tls"]
    assert responses[2]["status"] == 200
    assert responses[2]["body"].startswith("xx")
    assert responses[3]["body"] == "only this"
    assert all(response["error"]["message"] for response in responses)


def test_http_parallel_really_is(node: Node, web: str) -> None:
    requests = [{"method": "GET", "url": web + "/slow", "timeout_s": 30}] * 30
    responses = node.call("http", requests=requests, parallel=True)["responses"]
    assert [response["status"] for response in responses] == [200] * 30
    # One after the other they would take 45 s in all, so the last one would show it.
    began = time.monotonic()
    node.call("http", requests=requests, parallel=True)
    assert time.monotonic() - began < 30


def test_http_until_first_error(node: Node, web: str) -> None:
    requests = [{"method": "GET", "url": web + path} for path in ("/", "/missing", "/")]
    first, second, third = node.call("http", requests=requests, until_first_error=True)["responses"]
    assert (first["status"], second["status"], third) == (200, 404, None)
    assert None not in node.call("http", requests=requests)["responses"]
    assert node.call("http", requests=[]) == {"responses": []}


# ------------------------------------------------------------------------------------------------------------- ship

FILES = {"pkg/__init__.py": b"", "pkg/a.py": b"x = 1\n", "pkg/deep/b.bin": bytes(range(256)) * 64}
DIGEST = agent_module.content_digest(FILES)


def encode(files: dict[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(content).decode() for path, content in files.items()}


def test_ship(node: Node) -> None:
    folder = node.home / ".pdctl" / "connector" / DIGEST
    assert node.call("ship", digest=DIGEST) == {"present": False, "path": str(folder), "written": False}
    assert not folder.exists()
    assert node.call("ship", digest=DIGEST, files=encode(FILES)) == {
        "present": True,
        "path": str(folder),
        "written": True,
    }
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == FILES
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o644}
    assert {path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")] if path.is_dir()} == {0o755}
    # Python's own caches do not count; a changed file does, and is repaired.
    (folder / "pkg" / "__pycache__").mkdir()
    (folder / "pkg" / "__pycache__" / "a.cpython-312.pyc").write_bytes(b"x")
    assert node.call("ship", digest=DIGEST)["present"]
    (folder / "pkg" / "a.py").write_text("tampered")
    assert not node.call("ship", digest=DIGEST)["present"]
    assert node.call("ship", digest=DIGEST, files=encode(FILES))["written"]
    assert (folder / "pkg" / "a.py").read_bytes() == FILES["pkg/a.py"]
    assert [path.name for path in folder.parent.iterdir()] == [DIGEST]


@pytest.mark.parametrize(
    ("digest", "files"),
    [
        ("0" * 64, FILES),
        ("short", FILES),
        ("../" + "0" * 61, FILES),
        (DIGEST, {}),
        (agent_module.content_digest({"../x": b""}), {"../x": b""}),
        (agent_module.content_digest({"a": b"", "a/b": b""}), {"a": b"", "a/b": b""}),
    ],
)
def test_ship_refuses(node: Node, digest: str, files: dict[str, bytes]) -> None:
    assert node.fail("ship", digest=digest, files=encode(files))["code"] == "bad-request"
    assert not [path for path in node.home.rglob("*") if path.is_file()]


def test_ships_at_once(node: Node) -> None:
    request = {"digest": DIGEST, "files": encode(FILES)}
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: node.call("ship", **request), range(4)))
    assert all(result["present"] for result in results)
    assert [path.name for path in (node.home / ".pdctl" / "connector").iterdir()] == [DIGEST]


def test_ship_killed_in_the_middle(node: Node) -> None:
    files = {f"pkg/f{number}": os.urandom(2000) for number in range(150)}
    digest = agent_module.content_digest(files)
    parent = node.home / ".pdctl" / "connector"
    request = {"command": "ship", "digest": digest, "files": encode(files)}
    for wanted in (1, 60, 140):
        with node.spawn(request) as process:
            while process.poll() is None and sum(len(names) for _, _, names in os.walk(parent)) < wanted:
                time.sleep(0.001)
            process.kill()
            process.communicate()
        if process.returncode == -signal.SIGKILL:
            assert not (parent / digest).exists() or agent_module.shipment_is_whole(str(parent / digest), digest)
        for leftover in parent.glob(".tmp-*"):
            os.utime(leftover, (0, 0))
    assert node.call("ship", digest=digest, files=encode(files))["present"]
    assert agent_module.shipment_is_whole(str(parent / digest), digest)
    assert [path.name for path in parent.iterdir() if path.name != digest and path.stat().st_mtime < 10] == []
