"""The command `pdctl bench fabric`, with hosts that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pdctl.bench.fabric import read_fabric
from pdctl.bench.results import write_results
from pdctl.cli.bench_fabric import command
from pdctl.doctor.facts import HostFacts, InterpreterFacts, PlannedPort
from pdctl.doctor.probe_sweep import Listener, MeasuredPoint, SweepPoint, SweepResult
from pdctl.errors import HostUnreachable, PdctlError
from tests.support.bench_results import make_results
from tests.support.plans import as_yaml, changed, planned

DATA = changed(prefill={"hosts": ["p1", "p2"]}, decode={"hosts": ["d1", "d2"]}, python="/opt/python")
PLAN = planned(DATA)
Outcome = Callable[[tuple[str, str], Sequence[SweepPoint]], SweepResult]


def measured(pair: tuple[str, str], points: Sequence[SweepPoint], **more: Any) -> SweepResult:
    values: dict[str, Any] = {
        "points": tuple(
            MeasuredPoint(point, 20, 1e-5 + point.size / 1e9, 1e-2 + point.size / 1e9, 1e-6, "tcp", "UCX: tcp/eth0")
            for point in points
        ),
        "left_out": (),
        "ok": True,
        "stage": "done",
        "error": "",
        "unreachable": False,
        "interrupted": False,
        "backend": "UCX",
        "memory": "cuda",
        "notification_s": 6e-5,
        "notes": (),
        "log": "p1 (writer): line 1\np1 (writer): line 2",
    }
    return SweepResult(pair, **{**values, **more})


class Hosts:
    """What the hosts do in a test."""

    def __init__(self) -> None:
        self.unreachable: dict[str, PdctlError] = {}
        self.facts = {
            name: HostFacts(
                name,
                interpreters=(
                    InterpreterFacts(python="/opt/python", ok=True, version="3.12.4", packages={"nixl": "1.5.1"}),
                ),
            )
            for name in PLAN.hosts
        }
        self.outcome: Outcome = measured
        self.asked: list[tuple[tuple[str, str], Sequence[SweepPoint], int, float]] = []

    def collect(self, *_: object, **__: object) -> tuple[dict[str, HostFacts], dict[str, PdctlError]]:
        return {name: one for name, one in self.facts.items() if name not in self.unreachable}, self.unreachable

    def sweep(
        self,
        fleet: object,
        plan: object,
        pair: tuple[str, str],
        points: Sequence[SweepPoint],
        *,
        repeats: int,
        timeout_s: float,
        listener: Listener,
    ) -> SweepResult:
        self.asked.append((pair, points, repeats, timeout_s))
        result = self.outcome(pair, points)
        listener.stage("connected")
        for number, one in enumerate(result.points, 1):
            listener.point(number, one)
        return result


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = Hosts()
    monkeypatch.setattr("pdctl.doctor.collect.collect", made.collect)
    monkeypatch.setattr("pdctl.doctor.probe_sweep.sweep", made.sweep)
    return made


@pytest.fixture
def call(hosts: Hosts, tmp_path: Path) -> Callable[..., Result]:
    (tmp_path / "cluster.yaml").write_text(as_yaml(DATA))

    def run(*words: str) -> Result:
        return CliRunner().invoke(command, ["-f", str(tmp_path / "cluster.yaml"), *words])

    return run


def test_all_pairs_are_measured_with_the_defaults(call: Callable[..., Result], hosts: Hosts) -> None:
    result = call()
    assert result.exit_code == 0, result.output
    assert [pair for pair, *_ in hosts.asked] == [("p1", "d1"), ("p2", "d2"), ("p1", "d2"), ("p2", "d1")]
    _, points, repeats, timeout_s = hosts.asked[0]
    # The model is not on these hosts: its blocks are those of a common one, and 64 KiB is measured once.
    assert len(points) == 15
    assert (repeats, timeout_s) == (20, 300)
    assert "p1 -> d2 (tcp, UCX, cuda memory), GB/s" in result.stdout
    assert "a common model's, because this model's layout is not known" in result.stdout
    assert "fastest: 1 GB/s" in result.stdout
    assert "pair 4 of 4: p2 -> d1" in result.stderr
    assert "p1 -> d1: 64 x 4 MiB (15 of 15: 268 ms, 1 GB/s)" in result.stderr
    assert "PARTIAL" not in result.stdout


def test_chosen_pairs_and_sizes(call: Callable[..., Result], hosts: Hosts, tmp_path: Path) -> None:
    out = tmp_path / "fabric.json"
    words = [
        "--pair",
        "p2:d1",
        "--block-sizes",
        "16K,4M",
        "--descriptors",
        "1,256",
        "--repeats",
        "5",
        "--timeout",
        "60",
    ]
    result = call(*words, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert hosts.asked == [
        (("p2", "d1"), [SweepPoint(16384, 1), SweepPoint(16384, 256), SweepPoint(4 << 20, 1)], 5, 60)
    ]
    assert "left out: 4 MiB x256: more than 256 MiB in one WRITE" in result.stdout
    kept = read_fabric(out)
    assert kept.complete
    assert kept.command.startswith("pdctl bench fabric --file ")
    assert "--pair p2:d1 --block-sizes 16384,4194304 --descriptors 1,256 --repeats 5" in kept.command
    assert [(one.host, one.versions) for one in kept.hosts] == [
        ("p2", {"python": "3.12.4", "nixl": "1.5.1"}),
        ("d1", {"python": "3.12.4", "nixl": "1.5.1"}),
    ]
    assert kept.pairs[0].model_block is None
    assert f"wrote {out}" in result.stderr


def test_json_is_all_there_is_on_stdout(call: Callable[..., Result]) -> None:
    result = call("--json", "--pairs", "1")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert (value["kind"], value["schema"], len(value["pairs"])) == ("fabric", 1, 1)
    assert "comparison" not in value
    assert value["points"][0]["direction"] == "prefill-to-decode"
    assert value["beside_cluster"] is None


def test_transfers_of_a_bench_are_set_against_it(call: Callable[..., Result], tmp_path: Path) -> None:
    write_results(tmp_path / "results.json", make_results())
    result = call("--pairs", "1", "--results", str(tmp_path / "results.json"))
    assert result.exit_code == 0, result.output
    assert "push, 2048+16 x4: your transfers reach " in result.stdout
    assert "care: the bench had model" in result.stdout
    value = json.loads(call("--json", "--pairs", "1", "--results", str(tmp_path / "results.json")).stdout)
    assert any("of the fabric" in line for line in value["comparison"])


def test_a_pair_that_fails_does_not_stop_the_others(call: Callable[..., Result], hosts: Hosts) -> None:
    def outcome(pair: tuple[str, str], points: Sequence[SweepPoint]) -> SweepResult:
        if pair == ("p1", "d1"):
            return measured(pair, points[:2], ok=False, stage="write", error="p1: WRITE 3 was not complete")
        return measured(pair, points)

    hosts.outcome = outcome
    result = call("--pairs", "2")
    assert result.exit_code == 1
    assert "failed: p1 -> d1: p1: WRITE 3 was not complete (step: write)" in result.stdout
    assert "PARTIAL: p1 -> d1 failed" in result.stdout
    assert "p2 -> d2 (tcp, UCX, cuda memory)" in result.stdout
    assert "p1 (writer): line 2" in result.stderr


def test_a_host_that_is_not_reached(call: Callable[..., Result], hosts: Hosts) -> None:
    hosts.unreachable["d1"] = HostUnreachable("d1", "nothing answers at port 22", hint="is it up?")
    result = call()
    assert result.exit_code == 3
    assert [pair for pair, *_ in hosts.asked] == [("p1", "d2"), ("p2", "d2")]
    assert "warning: d1: nothing answers at port 22 (hint: is it up?)" in result.stderr
    assert "PARTIAL: d1: nothing answers at port 22" in result.stdout
    # It is nobody's concern when it is not in a pair.
    assert call("--pair", "p1:d2").exit_code == 0


def test_a_host_that_is_lost_on_the_way(call: Callable[..., Result], hosts: Hosts) -> None:
    hosts.outcome = lambda pair, _: measured(pair, (), ok=False, stage="start", error="d1: gone", unreachable=True)
    assert call("--pairs", "1").exit_code == 3


def test_ctrl_c_keeps_what_was_measured(call: Callable[..., Result], hosts: Hosts, tmp_path: Path) -> None:
    hosts.outcome = lambda pair, points: measured(pair, points[:3], interrupted=True)
    out = tmp_path / "fabric.json"
    result = call("--out", str(out))
    assert result.exit_code == 130
    assert len(hosts.asked) == 1
    assert "PARTIAL: interrupted" in result.stdout
    kept = read_fabric(out)
    assert (len(kept.points), kept.complete, kept.incomplete_because) == (3, False, "interrupted")


def test_points_that_were_left_out_make_it_partial(call: Callable[..., Result], hosts: Hosts) -> None:
    hosts.outcome = lambda pair, points: measured(pair, points[:-1], left_out=((points[-1], "no time is left"),))
    result = call("--pairs", "1")
    assert result.exit_code == 0
    assert "left out: 4 MiB x64: no time is left" in result.stdout
    assert "PARTIAL: 1 point of p1 -> d1 left out" in result.stdout


def test_a_running_cluster_is_named(call: Callable[..., Result], hosts: Hosts) -> None:
    one = PLAN.prefill[0]
    ports = tuple(
        PlannedPort(port=use.port, address=use.address, purpose=use.purpose, free=False, ours=True) for use in one.ports
    )
    known = hosts.facts[one.host]
    hosts.facts[one.host] = HostFacts(one.host, interpreters=known.interpreters, ports=ports)
    result = call("--pairs", "1")
    assert "the cluster is running (1 instance): figures share the fabric with it" in result.stderr
    assert "ran meanwhile and shared the fabric: 1" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pairs", "1", "--pair", "p1:d1"], "exclude each other"),
        (["--block-sizes", "12"], "multiple of 8"),
        (["--descriptors", "0"], "no number of descriptors"),
        (["--out", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    ],
)
def test_usage(call: Callable[..., Result], hosts: Hosts, words: list[str], said: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not hosts.asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pair", "p1"], "two hosts belong there"),
        (["--pair", "p1:p2"], "no decode host 'p2'"),
        (["--pair", "d1:d2"], "no prefill host 'd1'"),
        (["--results", "/no/such/results.json"], "No such file"),
        (["--block-sizes", "512M", "--pairs", "1"], "larger than 256 MiB"),
    ],
)
def test_errors_for_people(call: Callable[..., Result], hosts: Hosts, words: list[str], said: str) -> None:
    result = call(*words)
    assert isinstance(result.exception, PdctlError)
    assert result.exception.exit_code == 2
    assert said in str(result.exception)
    assert not hosts.asked
