"""`pdctl doctor` against real SSH servers in network namespaces."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Run
from tests.testbed.hosts import Testbed

pytestmark = [pytest.mark.root, pytest.mark.sshd, pytest.mark.timeout(180)]

PORT = 8200
HAS_NIXL = importlib.util.find_spec("nixl") is not None

Write = Callable[..., Cluster]


@pytest.fixture
def cluster(bed: Testbed, tmp_path: Path) -> Write:
    """Writes a cluster file: prefill on the first host, decode on the second, and the router on the first."""

    def write(
        *, prefill: int = 1, decode: tuple[int, ...] = (2,), python: str = sys.executable, extra: str = ""
    ) -> Cluster:
        def host(number: int) -> str:
            return f"{{name: {bed.name(number)}, address: {bed.address(number)}}}"

        file = tmp_path / "cluster.yaml"
        file.write_text(
            f"cluster: doctor-test\nmodel: {tmp_path}\naccelerator: cpu\nfabric: tcp\npython: {sys.executable}\n"
            f"prefill: {{hosts: [{host(prefill)}]}}\n"
            f"decode: {{hosts: [{', '.join(map(host, decode))}], python: {python}, port: {PORT}}}\n"
            f"router: {{host: {bed.name(prefill)}}}\n{extra}"
        )
        return Cluster(file, {"PDCTL_SSH_CONFIG": str(bed.ssh_config)})

    return write


def errors(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Failed findings of severity error, by check."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in run.json()["findings"]:
        if one["verdict"] == "fail" and one["severity"] == "error":
            found.setdefault(one["id"], []).append(one)
    return found


def processes(bed: Testbed, number: int) -> list[str]:
    """Command lines of pdctl's scripts that run on a host."""
    lines = bed.call("exec", bed.name(number), "ps", "-eo", "args").splitlines()
    return [line for line in lines if "-I -S -c" in line]


def nothing_left(bed: Testbed, *numbers: int) -> list[str]:
    """What is still there after a while in which everything should have ended."""
    deadline = time.monotonic() + 15
    while (left := [line for number in numbers for line in processes(bed, number)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@contextmanager
def listener(bed: Testbed, number: int, port: int) -> Iterator[None]:
    """Somebody else's server on a port of a host."""
    server_code = f"s = socket.create_server(('0.0.0.0', {port})); print('up', flush=True); time.sleep(600)"
    code = f"import socket, time; {server_code}"
    pid = bed.folder.joinpath(bed.name(number), "pid").read_text().split()[0]
    with subprocess.Popen(
        ["nsenter", "-t", pid, "-m", "-u", "-i", "-n", "-p", "--", sys.executable, "-c", code], stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"up\n"
            yield
        finally:
            subprocess.run(["pkill", "-KILL", "-P", str(server.pid)], check=False)
            server.kill()


def test_a_good_run(bed: Testbed, cluster: Write) -> None:
    run = cluster().pdctl("doctor", "--only", "SSH,NET,HOST014", "--json")
    assert run.code == 0, run.out
    value = run.json()
    assert errors(run) == {}
    reached = [one for one in value["findings"] if one["id"] == "NET009"]
    assert {one["verdict"] for one in reached} == {"pass"}
    assert {tuple(one["hosts"]) for one in reached} >= {(bed.name(1), bed.name(2))}
    assert value["stages"]["network"] == ""
    assert nothing_left(bed, 1, 2) == []


def test_the_report_of_a_whole_run(bed: Testbed, cluster: Write) -> None:
    run = cluster().pdctl("doctor")
    assert run.code in (0, 1)
    lines = run.out.splitlines()
    assert lines[0].startswith("cluster doctor-test  1 prefill host, 1 decode host")
    for title in ("Reach and login", "Operating system", "Software", "Model and parallel layout", "NIXL WRITE"):
        assert any(line.startswith(title) for line in lines), title
    assert "\x1b" not in run.out + run.err
    assert "bug of pdctl" not in run.out


@pytest.mark.skipif(not HAS_NIXL, reason="needs NIXL: run it with `make test`")
def test_a_real_write_over_nixl(bed: Testbed, cluster: Write) -> None:
    run = cluster().pdctl("doctor", "--only", "XFER", "--json")
    assert run.code == 0, run.out
    (result,) = run.json()["probe"]
    assert (result["prefill"], result["decode"], result["ok"]) == (bed.name(1), bed.name(2), True)
    assert result["bandwidth_mb_s"] > 0
    assert nothing_left(bed, 1, 2) == []


def test_no_write_without_nixl_and_the_report_says_why(bed: Testbed, cluster: Write) -> None:
    run = cluster(python="/no/such/python").pdctl("doctor", "--only", "XFER", "--json")
    assert run.code == 0
    assert "NIXL cannot be imported on any" in run.json()["stages"]["probe"]
    assert {one["verdict"] for one in run.json()["findings"]} == {"skipped"}


def test_a_cut_link(bed: Testbed, cluster: Write) -> None:
    bed.call("cut", bed.name(1), bed.name(2))
    try:
        made = cluster()
        run = made.pdctl("doctor", "--only", "SSH,NET", "--json")
        assert run.code == 1
        found = errors(run)
        assert set(found) == {"NET009"}
        assert {tuple(one["hosts"]) for one in found["NET009"]} == {(bed.name(1), bed.name(2))}
        text = made.pdctl("doctor", "--only", "NET009")
        assert "✗ error NET009" in text.out or "x error NET009" in text.out
        assert bed.name(2) in text.out
        assert "next: pdctl doctor explain NET009" in text.out
    finally:
        bed.call("heal", bed.name(1), bed.name(2))


def test_a_port_that_is_taken(bed: Testbed, cluster: Write) -> None:
    with listener(bed, 2, PORT):
        run = cluster().pdctl("doctor", "--only", "NET001", "--json")
    assert run.code == 1
    (failure,) = errors(run)["NET001"]
    assert failure["hosts"] == [bed.name(2)]
    assert str(PORT) in failure["message"] + failure["evidence"]
    assert failure["fix"]


def test_a_host_without_the_interpreter(bed: Testbed, cluster: Write) -> None:
    run = cluster(python="/no/such/python").pdctl("doctor", "--only", "SSH,SW001,SW002", "--json")
    assert run.code == 1
    found = errors(run)
    assert [one["hosts"] for one in found["SW001"]] == [[bed.name(2)]]
    assert "/no/such/python" in json.dumps(found["SW001"])


def test_a_host_that_is_off(bed: Testbed, cluster: Write) -> None:
    bed.call("off", bed.name(3))
    made = cluster(decode=(2, 3), extra="ssh: {connect_timeout_s: 3}\n")
    run = made.pdctl("doctor", "--only", "SSH,HOST014,NET", "--json")
    assert run.code == 3
    value = run.json()
    assert list(value["not_reached"]) == [bed.name(3)]
    assert [one["hosts"] for one in errors(run)["SSH001"]] == [[bed.name(3)]]
    # The others are judged all the same, and nothing of the dead one passes.
    passed = {tuple(one["hosts"]) for one in value["findings"] if one["verdict"] == "pass" and one["id"] == "HOST014"}
    assert passed == {(bed.name(1),), (bed.name(2),)}
    ignore = f"doctor: {{ignore: [{{id: SSH001, hosts: [{bed.name(3)}], reason: being repaired}}]}}\n"
    again = cluster(decode=(2, 3), extra=f"ssh: {{connect_timeout_s: 3}}\n{ignore}")
    assert again.pdctl("doctor", "--only", "SSH").code == 0


def test_up_stops_at_a_host_that_is_off(bed: Testbed, cluster: Write) -> None:
    bed.call("off", bed.name(3))
    run = cluster(decode=(3,), extra="ssh: {connect_timeout_s: 3}\n").pdctl("up")
    assert run.code == 3
    assert "SSH001" in run.err
    assert "nothing was started" in run.err


def test_the_bundle_of_real_hosts_names_nothing_and_replays(bed: Testbed, cluster: Write, tmp_path: Path) -> None:
    made = cluster()
    file = tmp_path / "bundle.json"
    first = made.pdctl("doctor", "--skip", "XFER", "--bundle", str(file), "--json")
    text = file.read_text()
    for name in (bed.name(1), bed.name(2), bed.address(1), bed.address(2), "doctor-test"):
        assert f'"{name}' not in text, name
    made.env.pop("PDCTL_SSH_CONFIG")
    again = made.pdctl("doctor", "--skip", "XFER", "--facts", str(file), "--json")
    assert again.code == first.code
    verdicts = [
        [(one["id"], one["verdict"], one["severity"]) for one in run.json()["findings"]] for run in (first, again)
    ]
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.5, 1.0, 1.6, 2.5])
def test_ctrl_c_at_any_moment_leaves_nothing(bed: Testbed, cluster: Write, seconds: float) -> None:
    made = cluster()
    run = subprocess.Popen(
        made.command("doctor"), env=made.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stderr is not None
    assert "collecting facts of 2 hosts" in run.stderr.readline()
    time.sleep(seconds)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert "Traceback" not in err
    # 0 and 1: it was through already. Python ends by the signal itself, which shells show as 130 as well, when it came
    # while a dataclass was being made.
    assert run.returncode in (0, 1, 130, -signal.SIGINT), err
    assert nothing_left(bed, 1, 2) == []
