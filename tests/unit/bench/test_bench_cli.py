"""The bench's commands on files and wishes: what needs no cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pdctl.bench.results import MODES, Cell, Environment, Mode, Sample, Settings, read_results, write_results
from pdctl.bench.session import Outcome
from pdctl.cli.bench_cluster import (
    check_planned_lengths,
    environment_of,
    flags_of,
    generator_instance,
    mode_of,
    plan_in,
    transfer_of,
)
from pdctl.cli.bench_compare import _restore
from pdctl.cli.bench_options import LoadWishes, make_settings, results_folder
from pdctl.cli.bench_output import Measured, measure
from pdctl.cli.main import cli
from pdctl.errors import PdctlError, UsageError
from tests.support.bench_results import make_results
from tests.support.plans import BASE, changed, planned

NOTHING = LoadWishes(None, None, None, None, None, "0", None, 4, 0, 4, 300.0, None, None)


@pytest.fixture(scope="module")
def results_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "results.json"
    made = make_results(modes=("pull", "push"), cells=(Cell(512, 16, concurrency=1),), rounds=2, requests=6)
    write_results(path, made)
    return path


def twice(sample: Sample) -> Sample:
    """A sample that took twice as long."""
    return replace(sample, ttft_s=2 * (sample.ttft_s or 0), latency_s=2 * sample.latency_s)


def call(*words: str) -> tuple[int, str]:
    """Exit code and standard output."""
    done = CliRunner().invoke(cli, ["bench", *words], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return int(done.return_value or 0), done.stdout


# --- what is asked for


def test_a_profile_and_what_replaces_parts_of_it() -> None:
    assert make_settings(NOTHING, ("push",), 1).cells == (
        Cell(1024, 64, concurrency=1),
        Cell(1024, 64, concurrency=4),
    )
    wishes = replace(NOTHING, profile="chat", prompt_tokens="1k", concurrency="2", requests=7)
    made = make_settings(wishes, ("pull", "push"), 3)
    assert made.cells == (Cell(1024, 256, concurrency=2),)
    assert (made.requests, made.rounds, made.modes) == (7, 3, ("pull", "push"))


def test_rates_alone_replace_the_profiles_concurrency() -> None:
    assert [cell.load for cell in make_settings(replace(NOTHING, rate="0.5,2"), ("push",), 1).cells] == ["0.5/s", "2/s"]
    both = replace(NOTHING, rate="2", concurrency="3")
    assert [cell.load for cell in make_settings(both, ("push",), 1).cells] == ["x3", "2/s"]


def test_an_unknown_profile_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no profile 'quik'") as caught:
        make_settings(replace(NOTHING, profile="quik"), ("push",), 1)
    assert caught.value.hint == "did you mean quick?"


def test_results_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(BASE)
    monkeypatch.chdir(tmp_path)
    made = results_folder(NOTHING, plan)
    assert made.name.startswith(f"pdctl-bench-{plan.spec.cluster}-")
    assert made.stat().st_mode & 0o777 == 0o700
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UsageError, match="has results already"):
        results_folder(replace(NOTHING, out=tmp_path), plan)
    with pytest.raises(UsageError, match="cannot write into"):
        results_folder(replace(NOTHING, out=tmp_path / "results.json" / "x"), plan)


def test_comparing_asks_before_it_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdctl.cli import bench_compare

    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UsageError, match=r"launches the cluster .* 5 times, and nobody is there to be asked"):
        bench_compare._ask(planned(BASE), 5, ran=True, yes=False)
    bench_compare._ask(planned(BASE), 5, ran=True, yes=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "a.json", "b.json", "c.json"), "3 files were given"),
        (("compare", "a.json"), "1 files were given"),
        (("compare", "--allow-different"), "is for files"),
        (("show", "none.json"), "cannot read none.json"),
        (("gate", "none.json", "--baseline", "none.json", "--max-regression", "x"), "x"),
    ],
)
def test_wrong_command_lines(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call(*words)


def test_every_command_has_a_help() -> None:
    for name in ("run", "compare", "show", "report", "gate", "fabric"):
        assert CliRunner().invoke(cli, ["bench", name, "--help"]).exit_code == 0
    listed = CliRunner().invoke(cli, ["bench", "--help"]).stdout
    assert all(name in listed for name in ("run", "compare", "show", "report", "gate", "fabric"))


# --- results that are there


def test_results_are_shown_as_tables_and_as_json(results_file: Path) -> None:
    code, text = call("show", str(results_file))
    assert code == 0
    assert "TTFT p50" in text
    code, text = call("show", str(results_file.parent), "--json")
    assert json.loads(text)["modes"] == ["pull", "push"]


def test_partial_results_are_no_success(results_file: Path, tmp_path: Path) -> None:
    part = replace(read_results(results_file), complete=False, incomplete_because="interrupted")
    write_results(tmp_path / "results.json", part)
    code, text = call("show", str(tmp_path))
    assert code == 1
    assert "PARTIAL" in text
    assert call("gate", str(tmp_path), "--baseline", str(results_file))[0] == 1


def test_a_report_stands_beside_its_results(results_file: Path, tmp_path: Path) -> None:
    code, text = call("report", str(results_file), "-o", str(tmp_path / "page.html"))
    assert (code, text.strip()) == (0, str(tmp_path / "page.html"))
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_a_gate_passes_and_fails(results_file: Path, tmp_path: Path) -> None:
    assert call("gate", str(results_file), "--baseline", str(results_file))[0] == 0
    results = read_results(results_file)
    slower = replace(results, runs=tuple(replace(run, samples=tuple(map(twice, run.samples))) for run in results.runs))
    write_results(tmp_path / "results.json", slower)
    code, text = call("gate", str(tmp_path), "--baseline", str(results_file))
    assert code == 1
    assert "FAIL" in text
    code, text = call("gate", str(tmp_path), "--baseline", str(results_file), "--json")
    assert code == 1
    assert not json.loads(text)["passed"]


def test_two_files_are_compared_unless_they_differ(results_file: Path, tmp_path: Path) -> None:
    results = read_results(results_file)
    code, text = call("compare", str(results_file), str(results_file), "--json")
    assert code == 0
    assert json.loads(text)["cells"]
    write_results(tmp_path / "results.json", replace(results, environment=replace(results.environment, model="other")))
    with pytest.raises(UsageError, match="not comparable"):
        call("compare", str(results_file), str(tmp_path))
    assert call("compare", str(results_file), str(tmp_path), "--allow-different")[0] == 0


# --- the cluster


def test_the_plan_in_another_mode_differs_in_the_connector_alone() -> None:
    plan = planned(BASE)
    assert mode_of(plan) == "push"
    for mode in MODES:
        other = plan_in(plan, mode)
        assert mode_of(other) == mode
        assert [list(flags_of(one.argv)) for one in other.instances] == [
            list(flags_of(one.argv)) for one in plan.instances
        ]
    assert mode_of(plan) == "push"


def test_flags_leave_out_the_program_and_what_the_mode_decides() -> None:
    words = ("python", "-m", "vllm", "--kv-transfer-config", "{}", "--port", "1")
    assert list(flags_of(words)) == ["-m", "vllm", "--port", "1"]


def test_the_load_is_made_where_vllm_is() -> None:
    plan = planned(BASE)
    hosts = [one.host for one in (*plan.prefill, *plan.decode)]
    assert generator_instance(plan, None).host in hosts
    assert generator_instance(plan, plan.decode[0].host).host == plan.decode[0].host
    with pytest.raises(UsageError, match="no vLLM instance is planned on 'nowhere'"):
        generator_instance(plan, "nowhere")


# --- a session


class Display:
    def step(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...

    def progress(self, instance: str, phase: str, detail: str, elapsed_s: float) -> None: ...


class NoLaunch:
    @contextmanager
    def run_in(self, mode: Mode) -> Iterator[Any]:
        raise PdctlError("prefill-0 did not come up", hint="look at its log")
        yield


def test_a_bench_that_measured_nothing_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    settings = Settings(("push",), (Cell(8, 1, concurrency=1),))
    environment = Environment("m", "cpu", "tcp", (), "0")
    measured = measure("run", planned(BASE), settings, environment, NoLaunch(), folder, Display())
    assert not folder.exists()
    assert measured.show(as_json=False) == 1
    said = capsys.readouterr()
    assert "prefill-0 did not come up" in said.err
    assert "nothing was measured" in said.err
    assert "results.json" not in said.out


def test_a_report_that_cannot_be_written_takes_no_figures_and_a_cluster_left_otherwise_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], results_file: Path
) -> None:
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "x").touch()
    outcome = Outcome(read_results(results_file))
    assert Measured(outcome, tmp_path, left="it runs in mode pull").show(as_json=False) == 1
    said = capsys.readouterr()
    assert "TTFT p50" in said.out
    assert "report: " not in said.out
    assert "no report: cannot write" in said.err
    assert "it runs in mode pull" in said.err
    assert Measured(outcome, tmp_path, left="it runs in mode pull").show(as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["cluster_left"] == "it runs in mode pull"
    assert Measured(outcome, tmp_path).show(as_json=True) == 0
    assert Measured(replace(outcome, interrupted=True), tmp_path).show(as_json=True) == 130


def test_too_long_prompts_are_refused_by_the_cluster_file_alone() -> None:
    settings = Settings(("push",), (Cell(4090, 16, concurrency=1),))
    check_planned_lengths(planned(BASE), settings)
    roles = {"prefill": {"vllm_args": {"max-model-len": 8192}}, "decode": {"vllm_args": {"max-model-len": 4096}}}
    with pytest.raises(UsageError, match="4090 prompt and 16 output tokens are more than the 4096 that decode takes"):
        check_planned_lengths(planned(changed(**roles)), settings)


def test_what_the_cluster_file_sets_is_on_record_without_secrets() -> None:
    env = {"NCCL_DEBUG": "WARN", "HF_TOKEN": {"from_env": "TEST_TOKEN"}}
    plan = planned(changed(env=env, decode={"env": {"UCX_TLS": "rc"}}))
    assert environment_of(plan, plan.prefill[0]) == {"NCCL_DEBUG": "WARN"}
    assert environment_of(plan, plan.decode[0]) == {"NCCL_DEBUG": "WARN", "UCX_TLS": "rc"}
    assert transfer_of(plan)["lease_s"] == "30"
    assert "mode" not in transfer_of(plan)


class Launcher:
    """What restoring needs of the launcher."""

    def __init__(self, running: Mode | None, *, healthy: bool = True, touched: bool = True) -> None:
        self.running, self.touched, self.display = running, touched, Display()
        self._healthy = healthy
        self.did: list[str] = []
        self.trouble: BaseException | None = None

    def healthy(self) -> bool:
        return self._healthy

    def launch(self, mode: Mode) -> None:
        self.did.append(f"launch {mode}")
        if self.trouble:
            raise self.trouble

    def take_down(self) -> None:
        self.did.append("down")
        if self.trouble:
            raise self.trouble


@pytest.mark.parametrize(
    ("launcher", "ran", "doubtful", "did"),
    [
        (Launcher(None, touched=False), True, True, []),
        (Launcher("push"), True, False, []),
        (Launcher("pull"), True, False, ["launch push"]),
        (Launcher(None), True, True, ["launch push"]),
        (Launcher("push", healthy=False), True, True, ["launch push"]),
        (Launcher("push"), True, True, []),
        (Launcher("push"), False, False, ["down"]),
        (Launcher(None), False, True, ["down"]),
    ],
)
def test_the_cluster_is_left_as_it_was(launcher: Any, ran: bool, doubtful: bool, did: list[str]) -> None:
    assert _restore(planned(BASE), launcher, ran=ran, doubtful=doubtful, file_option=" -f c.yaml") == ""
    assert launcher.did == did


@pytest.mark.parametrize(
    ("trouble", "said"),
    [(KeyboardInterrupt(), "pdctl down -f c.yaml and pdctl up -f c.yaml"), (PdctlError("no boot"), "no boot")],
)
def test_a_cluster_that_is_not_left_as_it_was_is_told(trouble: BaseException, said: str) -> None:
    launcher: Any = Launcher("pull")
    launcher.trouble = trouble
    assert said in _restore(planned(BASE), launcher, ran=True, doubtful=False, file_option=" -f c.yaml")


def test_click_sees_the_group() -> None:
    command = cli.get_command(click.Context(cli), "bench")
    assert isinstance(command, click.Group)
