"""A summary as text: what is in it, that it fits, and that nothing of a cluster's text reaches the terminal raw."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from pdctl.bench.gate import judge
from pdctl.bench.results import (
    COUNT_LIMIT,
    SECONDS_LIMIT,
    AnswerCheck,
    Difference,
    Results,
    Sample,
    StageTimes,
    Transfers,
)
from pdctl.bench.summary import summarise
from pdctl.bench.two_files import summarise_two
from pdctl.cli.bench_tables import GateView, SummaryView, gate_to_json, summary_to_json
from tests.support.bench_results import CELLS, make_results

HOSTILE = "\x1b[31mred\x07 [bold]x[/bold] \u202e\u2028" + "y" * 900


def shown(view: RenderableType, width: int, *, colour: bool = False) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False, no_color=not colour, force_terminal=colour).print(view)
    return stream.getvalue()


def view(results: Results) -> SummaryView:
    return SummaryView(summarise(results, draws=100))


@pytest.mark.parametrize("width", [40, 80, 119, 120, 160, 240])
def test_fits_the_width(width: int) -> None:
    results = make_results(cells=CELLS[:2], error_every=9, trouble=("x" * 300,), complete=False)
    for line in shown(view(results), width).splitlines():
        assert cell_len(line) <= width


def test_narrow_has_figures_as_rows() -> None:
    text = shown(view(make_results(cells=CELLS[:1])), 80)
    lines = [line.split() for line in text.splitlines()]
    assert ["pull", "push-upstream", "push"] in lines
    for name in ("TTFT p50", "TTFT p90", "TTFT p99", "TPOT p50", "TPOT p99", "ITL p99", "e2e p50"):
        assert any(line[:2] == name.split() and len(line) == 5 for line in lines), name
    assert ["requests", "100", "100", "100"] in lines
    assert ["errors", "0", "0", "0"] in lines
    assert any(line[0:1] == ["tokens/s"] and len(line) == 4 for line in lines)
    for pair in ("push-upstream / pull", "push / pull", "push / push-upstream"):
        assert pair in text.splitlines()
    assert "push-upstream is push (vLLM's connector)" in text


def test_wide_has_modes_as_rows_and_pairs_beside_each_other() -> None:
    text = shown(view(make_results(cells=CELLS[:1])), 160)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    heading = "TTFT p50 TTFT p90 TTFT p99 TPOT p50 TPOT p99 ITL p99 e2e p50 tokens/s requests/s requests errors"
    assert heading in lines
    assert any("push-upstream / pull push / pull" in line for line in lines)
    assert any(line.startswith("push-upstream ") and line.endswith(" 100 0") for line in lines)


def test_ratios_stand_with_interval_and_words() -> None:
    results = make_results(modes=("pull", "push"), cells=CELLS[1:2], speeds={"pull": 1.0, "push": 0.6})
    summary = summarise(results, draws=200)
    first = summary.cells[0].comparisons[0]
    assert first.ratio is not None
    text = shown(SummaryView(summary), 80)
    ratio = f"{first.ratio.value:.2f} [{first.ratio.low:.2f}, {first.ratio.high:.2f}]"
    assert f"TTFT p50    {ratio}" in text
    assert f"{first.verdict}" in text
    assert first.verdict.endswith("% lower")


def test_an_end_is_never_rounded_onto_one() -> None:
    from pdctl.cli.bench_tables import _end

    assert [_end(value) for value in (0.75, 0.9987, 1.0, 1.0003, 0.99999999)] == [
        "0.75",
        "0.999",
        "1.00",
        "1.0003",
        "1.00",
    ]


def test_thin_percentiles_are_marked_and_explained() -> None:
    text = shown(view(make_results(modes=("push",), cells=CELLS[:1], rounds=1, requests=20)), 80)
    assert "~ stands before a percentile of too few values" in text
    assert any(line.startswith("TTFT p99  ") and "~" in line for line in text.splitlines())
    assert not any(line.startswith("TTFT p90") and "~" in line for line in text.splitlines())
    full = shown(view(make_results(modes=("push",), cells=CELLS[:1])), 80)
    assert "~" not in full


def test_stages_have_means_shares_and_what_ran_beside() -> None:
    text = shown(view(make_results(cells=CELLS[:1])), 80)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "mean TTFT by stage pull push-upstream push" in lines
    assert any(line.startswith("prefill ") and "(50 %)" in line and "(60 %)" in line for line in lines)
    assert any(line.startswith("match - - ") for line in lines)
    assert any(line.startswith("sum ") for line in lines)
    assert any(line.startswith("(registration) - - ") for line in lines)
    assert "In brackets" in text
    assert "by stage" not in shown(view(make_results(cells=CELLS[:1], stages=False)), 80)


def test_transfers_and_answers_are_told() -> None:
    text = " ".join(shown(view(make_results(cells=CELLS[:1])), 160).split())
    assert (
        "push: transfers 100 completed, 0 failed, 0 expired, 5.87 GB, 2.5 GB/s while moving, nothing computed again"
        in text
    )
    assert "pull: transfers 100 completed" in text
    assert "2,048 tokens computed again by decode, of 4 requests" in text
    assert "push-upstream: transfers not counted, nothing computed again by decode" in text
    assert "push: answers 16 of 16 equal to what prefill alone gives" in text


@pytest.mark.parametrize(
    ("requests", "tokens", "words"),
    [
        (None, 4096, "4,096 tokens computed again by decode, requests not known"),
        (1, 4096, "4,096 tokens computed again by decode, of 1 request"),
        (2, None, "an unknown number of tokens computed again by decode, of 2 requests"),
        (0, 0, "nothing computed again by decode"),
        (None, 0, "nothing computed again by decode"),
    ],
)
def test_what_was_computed_again_is_told_by_tokens(requests: int | None, tokens: int | None, words: str) -> None:
    results = make_results(modes=("push",), cells=CELLS[:1], rounds=1)
    counted = Transfers(recomputed_requests=requests, recomputed_tokens=tokens)
    results = replace(results, runs=tuple(replace(run, transfers=counted) for run in results.runs))
    assert words in " ".join(shown(view(results), 160).split())
    loud = [line for line in shown(view(results), 160, colour=True).splitlines() if "computed again" in line]
    assert any("\x1b[1;33m" in line for line in loud) == bool(requests or tokens)


def test_answers_that_were_not_compared_are_told() -> None:
    check = AnswerCheck(3, 3, error="1 of 4 could not be asked again: HTTP 500", asked=4)
    results = make_results(modes=("push",), cells=CELLS[:1], rounds=1)
    results = replace(results, runs=tuple(replace(run, answers=check) for run in results.runs))
    text = " ".join(shown(view(results), 160).split())
    assert "3 of 4 compared; 1 of 4 could not be asked again: HTTP 500" in text
    assert summary_to_json(summarise(results, draws=20))["cells"][0]["modes"][0]["answers"]["asked"] == 4


def test_a_partial_run_is_marked() -> None:
    results = make_results(modes=("push",), cells=CELLS[:1], rounds=2)
    results = replace(results, complete=True, runs=tuple(replace(run, complete=run.round == 1) for run in results.runs))
    text = shown(view(results), 80)
    assert "50 (partial)" in text
    assert "PARTIAL" in text


@pytest.mark.parametrize("value", [5e-324, 1e-9, 1e12, SECONDS_LIMIT])
def test_absurd_figures_are_shown_all_the_same(value: float) -> None:
    sample = Sample(1e300, value, value, (value,), COUNT_LIMIT, COUNT_LIMIT)
    counted = Transfers(*[COUNT_LIMIT] * 4, value, COUNT_LIMIT, COUNT_LIMIT)
    stages = StageTimes({"prefill": value, "rest": -value}, {"registration": value}, COUNT_LIMIT)
    results = make_results(modes=("pull", "push"), cells=CELLS[:1], rounds=2, requests=2)
    runs = [
        replace(run, samples=(sample, replace(sample, ttft_s=0.0)), duration_s=value, transfers=counted, stages=stages)
        for run in results.runs
    ]
    mixed = [*results.runs[:1], *runs[1:]]
    for made in (runs, mixed):
        summary = summarise(replace(results, runs=tuple(made)), draws=20)
        text = shown(SummaryView(summary), 160)
        assert max(map(cell_len, text.splitlines())) <= 160
        assert "nan" not in text
        json.dumps(summary_to_json(summary), allow_nan=False)


def test_what_was_not_counted_is_not_zero() -> None:
    results = make_results(modes=("push",), cells=CELLS[:1], answers=0)
    results = replace(results, runs=tuple(replace(run, transfers=Transfers()) for run in results.runs))
    text = shown(view(results), 80)
    assert "transfers" not in text
    assert "answers" not in text


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_invalid_and_partial_stand_first_and_last(width: int, encoding: str) -> None:
    results = make_results(
        cells=CELLS[:1],
        wrong=[Difference(3, "got this", "not that", 9)],
        complete=False,
        incomplete_because="interrupted",
    )
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=width, highlight=False).print(view(results))
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    lines = stream.buffer.getvalue().decode(encoding).splitlines()
    for part in (lines[:8], lines[-8:]):
        assert any("INVALID" in line for line in part)
        assert any("PARTIAL" in line for line in part)
        assert any("interrupted" in line for line in part)
    text = "\n".join(lines)
    assert "1 WRONG" in text
    assert "got 'got this', not 'not that'" in text


def test_a_fine_result_has_no_banner() -> None:
    text = shown(view(make_results(cells=CELLS[:1])), 80)
    assert "INVALID" not in text
    assert "PARTIAL" not in text


def test_nothing_measured_is_said() -> None:
    results = replace(make_results(cells=CELLS[:1]), runs=(), complete=False)
    text = shown(view(results), 80)
    assert "nothing was measured" in text
    assert "PARTIAL" in text


def test_a_cell_in_which_all_failed() -> None:
    text = shown(view(make_results(modes=("pull", "push"), cells=CELLS[:1], error_every=1)), 80)
    assert "not measured" in text
    assert "100 x HTTP 500: the engine is gone" in text


@pytest.mark.parametrize("width", [80, 160])
def test_hostile_text_stays_text(width: int) -> None:
    results = make_results(
        modes=("pull", "push"),
        cells=CELLS[:1],
        error_every=5,
        error=HOSTILE,
        trouble=(HOSTILE,),
        wrong=[Difference(0, HOSTILE, HOSTILE, 0)],
        complete=False,
        incomplete_because=HOSTILE,
    )
    results = replace(
        results,
        runs=tuple(
            replace(run, stages=replace(run.stages, notes=(HOSTILE,)) if run.stages else None) for run in results.runs
        ),
    )
    names = (f"{HOSTILE}.json", "b.json")
    for text in (
        shown(view(results), width),
        shown(SummaryView(summarise_two(results, results, names, draws=20)), width),
    ):
        assert not set(text) & {"\x1b", "\x07", "\u202e", "\u2028"}
        assert "[bold]x[/bold]" in text
        assert all(cell_len(line) <= width for line in text.splitlines())


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    made = view(make_results(modes=("pull", "push"), cells=CELLS[:1], speeds={"pull": 1.0, "push": 0.5}))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in shown(made, 80, colour=True)
    assert "\x1b" not in shown(made, 80)


def test_json_has_stable_keys_and_missing_is_null() -> None:
    results = make_results(modes=("pull", "push"), cells=CELLS[:1], stages=False, answers=0)
    made = summary_to_json(summarise(results, draws=50))
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert list(made) == ["valid", "invalid_because", "complete", "incomplete_because", "modes", "cells"]
    assert made["valid"] is True
    cell = made["cells"][0]
    assert cell["cell"]["name"] == "512+16 x1"
    mode = cell["modes"][0]
    assert (mode["stages"], mode["answers"]) == (None, None)
    assert set(mode["figures_s"]) == {"ttft", "tpot", "itl", "e2e"}
    assert set(mode["figures_s"]["ttft"]) == {"p50", "p90", "p99", "mean", "count"}
    assert set(cell["comparisons"][0]) == {
        *("mode", "against", "figure", "statistic", "ratio", "samples", "thin", "better", "verdict")
    }
    failed = summary_to_json(summarise(make_results(modes=("push",), cells=CELLS[:1], error_every=1), draws=50))
    assert failed["cells"][0]["modes"][0]["figures_s"]["ttft"] is None


def test_json_of_wrong_answers_and_stages() -> None:
    made = summary_to_json(
        summarise(make_results(modes=("push",), cells=CELLS[:1], wrong=[Difference(1, "a", "b", 2)]), draws=20)
    )
    assert made["valid"] is False
    mode = made["cells"][0]["modes"][0]
    assert mode["answers"]["different"] == [{"request": 1, "at": 2, "got": "a", "expected": "b"}]
    assert mode["stages"]["requests"] == 100


@pytest.mark.parametrize("width", [80, 160])
def test_the_gate_ends_with_its_verdict(width: int) -> None:
    old = make_results(modes=("push",), cells=CELLS[:1])
    slow = make_results(modes=("push",), cells=CELLS[:1], speeds={"push": 2.0}, seed=3, error_every=20)
    outcome = judge(old, slow, draws=100)
    text = shown(GateView(outcome), width)
    assert "512+16 x1, push" in text
    assert "FAILED  TTFT p50" in text
    assert "FAILED: 512+16 x1, push: 4 of 100 requests failed" in text
    assert text.splitlines()[-1].startswith("FAILED: ")
    fine = judge(old, old, draws=100)
    assert shown(GateView(fine), width).splitlines()[-1] == "passed: none of 5 figures is worse than allowed"
    made = gate_to_json(outcome)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["passed"] is False
    assert made["figures"][0]["figure"] == "ttft"
