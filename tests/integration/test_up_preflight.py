"""`pdctl up` makes the doctor's blocking checks first; on this machine, with stand-ins for vLLM and the router."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, marked_processes
from tests.integration.test_launch_stand_in import Bench

pytestmark = pytest.mark.timeout(120)

# What the doctor misses where stand-ins take the place of vLLM, NIXL, the router and a model.
MISSED = ("MOD002", "SW002", "SW005", "SW013")


@pytest.fixture
def bench(tmp_path: Path):
    made = Bench(tmp_path)
    yield made
    if (tmp_path / "cluster.yaml").exists():
        made.cluster().pdctl("down", "--force")
    assert marked_processes(made.name) == []


def judged(bench: Bench, ignored: tuple[str, ...]) -> Cluster:
    """The bench's cluster with an ignore list, launched with the doctor."""
    made = bench.cluster()
    entries = ", ".join(f"{{id: {name}, reason: stand-ins take its place}}" for name in ignored)
    made.file.write_text(made.file.read_text() + f"doctor: {{ignore: [{entries}]}}\n")
    return Cluster(made.file, made.env)


def test_an_error_stops_up_before_anything_is_started(bench: Bench) -> None:
    result = judged(bench, MISSED[1:]).pdctl("up")
    assert result.code == 1
    assert "MOD002" in result.err
    assert "SW002" not in result.err
    assert "nothing was started" in result.err
    assert "--skip-doctor" in result.err
    assert result.out == ""
    assert not (bench.folder / "home").exists()


def test_the_error_for_programs(bench: Bench) -> None:
    result = judged(bench, MISSED[1:]).pdctl("up", "--json")
    assert result.code == 1
    value = result.json()
    assert value["ok"] is False
    assert [one["id"] for one in value["doctor"]["findings"] if one["verdict"] == "fail" and not one["ignored"]][
        -1:
    ] == ["MOD002"]
    assert set(value["doctor"]["stages"]) == {"facts", "network", "probe", "ec2"}


def test_skip_doctor_launches_all_the_same(bench: Bench) -> None:
    assert judged(bench, ()).pdctl("up", "--skip-doctor", "--json").code == 0


def test_a_second_up_does_not_take_its_own_ports_for_taken(bench: Bench) -> None:
    cluster = judged(bench, MISSED)
    first = cluster.pdctl("up", "--json")
    assert first.code == 0, first.out
    second = cluster.pdctl("up", "--json")
    assert second.code == 0, second.out
    assert {one["action"] for one in second.json()["instances"]} == {"already-running"}
    # The doctor itself, too: it looks at a cluster that runs.
    doctor = cluster.pdctl("doctor", "--only", "NET001", "--json")
    assert doctor.code == 0, doctor.out


def test_a_port_that_somebody_else_has_is_found_before_the_launch(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", bench.ports[1])):
        result = judged(bench, MISSED).pdctl("up", "--json")
    assert result.code == 1
    (failure,) = [
        one for one in result.json()["doctor"]["findings"] if one["verdict"] == "fail" and not one["ignored"]
        and one["severity"] == "error"
    ]  # fmt: skip
    assert failure["id"] == "NET001"
    assert str(bench.ports[1]) in json.dumps(failure)


def test_an_unknown_id_in_the_ignore_list_is_a_usage_error(bench: Bench) -> None:
    result = judged(bench, ("MOD099",)).pdctl("up")
    assert result.code == 2
    assert "doctor.ignore[0].id" in result.err


@pytest.mark.parametrize("seconds", [0.3, 0.6, 0.9])
def test_ctrl_c_during_the_checks(bench: Bench, seconds: float) -> None:
    cluster = judged(bench, MISSED[1:])
    run = subprocess.Popen(
        cluster.command("up", "--json"),
        env=cluster.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert "Traceback" not in err
    # 1: the checks were through already. -2, which a shell calls 130 as well: Python ends itself so if the interrupt
    # came while a dataclass was being made of text (its exec() remembers an interrupt that was handled since).
    assert run.returncode in (1, 130, -signal.SIGINT), err
