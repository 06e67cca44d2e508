"""The file of results: what is written comes back, and what is no such file is told."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdctl.atomic_file import write_atomically
from pdctl.bench import results as module
from pdctl.bench.results import (
    AnswerCheck,
    Cell,
    CellRun,
    Difference,
    Environment,
    InstanceFacts,
    Results,
    Sample,
    Settings,
    StageTimes,
    Transfers,
    by_round,
    read_results,
    to_json,
    write_results,
)
from pdctl.errors import UsageError

CELL = Cell(512, 16, concurrency=4)
OTHER = Cell(512, 16, rate=0.5, prefix_hit=50)


def make(*runs: CellRun) -> Results:
    instance = InstanceFacts("prefill-0", "prefill", "h1", ("--block-size", "16"), {"vllm": "0.32.0"})
    environment = Environment("m", "cpu", "tcp", (instance,), "0.1", "vllm bench serve 0.32.0", "h1")
    return Results(
        1, "compare", "c", 5.5, "pdctl bench compare", Settings(("pull", "push"), (CELL, OTHER), 2), environment, runs
    )


def run(mode: str, number: int, cell: Cell = CELL, **more: object) -> CellRun:
    samples = (Sample(1.0, 0.25, 1.25, (0.5, 0.5), 512, 3), Sample(2.0, None, 0.5, error="HTTP 500"))
    return CellRun(mode, number, cell, 2.0, samples, **more)  # type: ignore[arg-type]


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    full = make(
        run(
            "push", 1, stages=StageTimes({"prefill": 0.2}, {"registration": 0.01}, 1, ("a note",)),
            transfers=Transfers(completed=1, bytes=2**40, seconds=0.1), trouble=("x",), complete=False,
            answers=AnswerCheck(1, 0, 0, (Difference(0, "<b>", "é", 2),)),
        ),
        run("pull", 1, OTHER),
    )  # fmt: skip
    path = tmp_path / "results.json"
    write_results(path, full)
    assert read_results(path) == full
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_bytes()) == to_json(full)
    assert [one.name for one in tmp_path.iterdir()] == ["results.json"]


def test_figures_of_a_sample() -> None:
    results = make(run("push", 2), run("push", 1), run("pull", 1))
    assert [one.round for one in results.of(CELL, "push")] == [1, 2]
    assert results.of(OTHER, "push") == []
    assert results.modes == ("pull", "push")
    assert results.cells == (CELL,)
    runs = results.of(CELL, "push")
    assert by_round(runs, "ttft") == [[0.25], [0.25]]
    assert by_round(runs, "tpot") == [[0.5], [0.5]]
    assert by_round(runs, "itl") == [[0.5, 0.5]] * 2
    assert by_round(runs, "e2e") == [[1.25]] * 2
    assert Sample(1.0, 0.25, 0.25, (), 512, 1).tpot_s is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no result of a bench"),
        ('{"runs": []}', "is no result of a bench"),
        ('{"schema": 2, "runs": []}', "schema 2, and this pdctl reads schema 1"),
        ('{"schema": 1, "runs": []}', "Field required"),
    ],
)
def test_another_file_is_refused_in_words(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_results(path)


def test_a_wrong_value_is_named_with_its_place(tmp_path: Path) -> None:
    data = to_json(make(run("push", 1)))
    data["runs"][0]["samples"][0]["latency_s"] = -1
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=r"runs\.0\.samples\.0\.latency_s: .*greater than or equal to 0"):
        read_results(path)


BAD = "\x1b]0;owned\x07\n\u202e" + "k" * 9000


@pytest.mark.parametrize(
    "data",
    [
        {"schema": BAD, "runs": []},
        {"schema": [BAD], "runs": []},
        {"schema": 1, "runs": [], "settings": {"modes": [BAD]}},
        {**to_json(make()), "environment": {**to_json(make())["environment"], "transfer": {BAD: 5}}},
        {**to_json(make()), "kind": BAD},
    ],
)
def test_an_error_shows_nothing_raw(tmp_path: Path, data: dict[str, object]) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError) as caught:
        read_results(path)
    said = caught.value.message
    assert said.isprintable()
    assert len(said) < 600 + len(str(path))


@pytest.mark.parametrize("count", [2**63, 10**400, 10**4000])
def test_counts_have_an_end(tmp_path: Path, count: int) -> None:
    data = to_json(make(run("push", 1)))
    path = tmp_path / "results.json"
    for place in ("completed", "bytes", "recomputed_tokens", "seconds"):
        data["runs"][0]["transfers"] = {place: count * 10 if place == "seconds" else count}
        path.write_text(json.dumps(data))
        with pytest.raises(UsageError, match=f"transfers.{place}"):
            read_results(path)
    data = to_json(make(run("push", 1)))
    data["settings"]["cells"][0]["prompt_tokens"] = count
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="prompt_tokens"):
        read_results(path)


def test_what_a_later_version_adds_is_ignored(tmp_path: Path) -> None:
    data = to_json(make(run("push", 1)))
    data["runs"][0]["weather"] = "rain"
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data))
    assert read_results(path) == make(run("push", 1))


def test_missing_and_huge_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_results(tmp_path / "none.json")
    write_results(tmp_path / "a.json", make())
    monkeypatch.setattr(module, "RESULTS_LIMIT", 10)
    with pytest.raises(UsageError, match="larger than any"):
        read_results(tmp_path / "a.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, make())
    with pytest.raises(TypeError):
        write_atomically(path, "this is no bytes", mode=0o600)  # type: ignore[arg-type]
    assert read_results(path) == make()
    assert [one.name for one in tmp_path.iterdir()] == ["results.json"]
    with pytest.raises(UsageError, match="cannot write"):
        write_results(tmp_path / "none" / "results.json", make())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["kind", "settings", "environment", "runs", "complete", "created_unix"]), JSON)
def test_wild_values_give_results_or_a_usage_error(tmp_path: Path, key: str, value: object) -> None:
    data = {**to_json(make(run("push", 1))), key: value}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data))
    with contextlib.suppress(UsageError):
        assert isinstance(read_results(path), Results)
