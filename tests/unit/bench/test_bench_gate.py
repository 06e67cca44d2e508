"""When a candidate is as good as its baseline, and when not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.gate import GATED, GateOutcome, judge, parse_share
from pdctl.bench.results import AnswerCheck, CellRun, Difference, Mode, Results, Sample
from pdctl.errors import UsageError
from tests.support.bench_results import CELLS, make_results

WRONG = AnswerCheck(4, 3, 0, (Difference(0, "a", "b", 0),))


def made(
    speed: float = 1.0, *, seed: int = 7, cells: int = 1, modes: tuple[Mode, ...] = ("push",), every: int = 0
) -> Results:
    return make_results(
        modes=modes,
        cells=CELLS[:cells],
        speeds=dict.fromkeys(("push", "pull"), speed),
        seed=seed,
        error_every=every,
        error="HTTP 500",
    )


def changed(results: Results, change: Callable[[CellRun], CellRun]) -> Results:
    return replace(results, runs=tuple(map(change, results.runs)))


def gate(baseline: Results, candidate: Results, share: float = 0.05) -> GateOutcome:
    return judge(baseline, candidate, max_regression=share, draws=300)


def test_the_same_again_passes() -> None:
    outcome = gate(made(), made(seed=8))
    assert outcome.passed
    assert outcome.problems == ()
    assert [(line.figure, line.statistic) for line in outcome.lines] == list(GATED)


def test_a_regression_fails_and_says_how_much() -> None:
    outcome = gate(made(), made(1.5, seed=8))
    assert not outcome.passed
    failed = {line.figure for line in outcome.lines if not line.passed}
    assert "ttft" in failed
    assert "tpot" not in failed
    assert outcome.lines[0].words.endswith("higher: more than 5 % is not allowed")


def test_an_improvement_passes() -> None:
    outcome = gate(made(), made(0.5, seed=8))
    assert outcome.passed
    assert "lower" in outcome.lines[0].words


def test_a_regression_that_is_allowed_passes() -> None:
    assert gate(made(), made(1.3, seed=8), 0.9).passed


def test_a_difference_inside_the_noise_is_no_regression_and_is_said() -> None:
    samples = [0.1, 0.9, 0.1, 0.9]
    slower = [0.3, 0.9, 0.3, 1.1]

    def of(values: list[float]) -> Callable[[CellRun], CellRun]:
        return lambda run: replace(run, samples=tuple(Sample(0.0, value, value + 1, (1.0,), 1, 2) for value in values))

    outcome = gate(changed(made(), of(samples)), changed(made(), of(slower)))
    line = next(line for line in outcome.lines if (line.figure, line.statistic) == ("ttft", "p50"))
    assert line.ratio is not None
    assert line.ratio.value > 1.05
    assert line.ratio.low <= 1
    assert line.passed
    assert "inside the noise" in line.words


def test_more_errors_fail() -> None:
    outcome = gate(made(), made(seed=8, every=25))
    assert not outcome.passed
    assert outcome.problems == ("512+16 x1, push: 4 of 100 requests failed, before 0 of 100 (mostly: HTTP 500)",)
    assert gate(made(every=25), made(seed=8, every=25)).passed
    assert gate(made(every=10), made(seed=8, every=25)).passed


def test_wrong_answers_fail() -> None:
    outcome = gate(made(), changed(made(seed=8), lambda run: replace(run, answers=WRONG)))
    assert not outcome.passed
    assert any("invalid" in problem for problem in outcome.problems)


def test_answers_that_were_not_compared_fail_if_they_were_before() -> None:
    unknown = AnswerCheck(error="prefill is gone")
    outcome = gate(made(), changed(made(seed=8), lambda run: replace(run, answers=unknown)))
    assert outcome.problems == (
        "512+16 x1, push: no answer was compared with that of prefill alone: prefill is gone (in 4 rounds)",
    )
    assert not gate(made(), changed(made(seed=8), lambda run: replace(run, answers=None))).passed
    assert gate(changed(made(), lambda run: replace(run, answers=None)), made(seed=8)).passed


def test_answers_that_were_compared_in_part_are_noted() -> None:
    some = AnswerCheck(3, 3, error="1 of 4 could not be asked again: HTTP 500", asked=4)
    outcome = gate(made(), changed(made(seed=8), lambda run: replace(run, answers=some)))
    assert outcome.passed
    assert outcome.notes == (
        "512+16 x1, push: 12 of 16 answers compared in the candidate; 1 of 4 could not be asked again: HTTP 500 "
        "(in 4 rounds)",
    )


def test_a_single_round_is_noted() -> None:
    single = make_results(modes=("push",), cells=CELLS[:1], rounds=1, requests=40, speeds={"push": 1.0})
    assert gate(made(), made(seed=8)).notes == ()
    (note,) = gate(single, made()).notes
    assert note.startswith("the baseline has a single round: the intervals cover nothing of what changes")
    notes = gate(single, single).notes
    assert [note.split(" has ")[0] for note in notes] == ["the baseline", "the candidate"]
    # One round of a cell that was cut short leaves that cell with one.
    both = make_results(modes=("push",), cells=CELLS[:2], rounds=2, speeds={"push": 1.0})
    cut = changed(both, lambda run: replace(run, complete=run.round == 1 or run.cell != CELLS[1]))
    assert any(
        note.startswith("the baseline has a single round of 512+16 x4, push: ") for note in gate(cut, both).notes
    )


def slowed(run: CellRun) -> CellRun:
    samples = tuple(replace(one, ttft_s=(one.ttft_s or 0) * 9, latency_s=one.latency_s * 9) for one in run.samples)
    return replace(run, samples=samples, complete=False, trouble=("decode-0 was restarted",))


def test_runs_that_were_cut_short_are_not_judged() -> None:
    first = lambda run: slowed(run) if run.round == 1 else run  # noqa: E731
    outcome = gate(made(), changed(made(), first))
    # Were it in the figures, they would have risen.
    assert all(line.passed and line.ratio and line.ratio.value < 1.05 for line in outcome.lines)
    assert outcome.problems == (
        "the candidate is incomplete: push, 512+16 x1, round 1 is partial: decode-0 was restarted",
    )
    outcome = gate(changed(made(), first), made(seed=8))
    assert outcome.passed
    assert all(line.ratio and line.ratio.value > 0.8 for line in outcome.lines)
    outcome = gate(made(), replace(changed(made(), slowed), complete=True))
    assert "512+16 x1, push: only partial in the candidate" in outcome.problems
    assert outcome.lines == ()
    two = made(cells=2)
    outcome = gate(changed(two, lambda run: slowed(run) if run.cell == CELLS[0] else run), two)
    assert "512+16 x1, push: only partial in the baseline, so not judged" in outcome.notes
    assert {line.cell for line in outcome.lines} == {CELLS[1]}
    with pytest.raises(UsageError, match="no request that was answered in a complete run"):
        gate(changed(made(), slowed), made())


def test_errors_of_a_run_that_was_cut_short_count() -> None:
    candidate = changed(
        made(seed=8), lambda run: replace(made(every=2).runs[0], complete=False) if run.round == 1 else run
    )
    assert any("requests failed, before 0 of 100" in text for text in gate(made(), candidate).problems)


def test_an_incomplete_candidate_fails() -> None:
    outcome = gate(made(), replace(made(seed=8), complete=False, incomplete_because="interrupted"))
    assert outcome.problems == ("the candidate is incomplete: interrupted",)
    assert not outcome.passed


def test_an_incomplete_baseline_is_noted() -> None:
    outcome = gate(replace(made(), complete=False), made(seed=8))
    assert outcome.passed
    assert "the baseline is incomplete" in outcome.notes[0]


def test_what_is_missing_fails_and_what_is_new_is_noted() -> None:
    outcome = gate(made(cells=2), made(seed=8))
    assert outcome.problems == ("512+16 x4, push: not measured in the candidate",)
    assert not outcome.passed
    assert gate(made(modes=("push", "pull")), made(seed=8)).problems == (
        "512+16 x1, pull: not measured in the candidate",
    )
    more = gate(made(), made(seed=8, cells=2))
    assert more.passed
    assert more.notes == ("512+16 x4, push: not in the baseline, so not judged",)


def test_a_figure_that_the_candidate_lacks_fails() -> None:
    def short(run: CellRun) -> CellRun:
        return replace(run, samples=tuple(replace(one, output_tokens=1) for one in run.samples))

    outcome = gate(made(), changed(made(seed=8), short))
    lacking = [line for line in outcome.lines if line.figure == "tpot"]
    assert {line.words for line in lacking} == {"not measured in the candidate"}
    assert not any(line.passed for line in lacking)
    turned = gate(changed(made(), short), made(seed=8))
    assert turned.passed
    assert "tpot p50 is not in the baseline" in turned.notes[0]


def test_too_few_to_judge_does_not_pass() -> None:
    def one(run: CellRun) -> CellRun:
        return replace(run, samples=run.samples[: 1 if run.round == 1 else 0])

    outcome = gate(made(), changed(made(seed=8), one))
    assert not outcome.passed
    assert outcome.lines[0].words == "too few values to judge"


def test_a_thin_percentile_is_said() -> None:
    few = make_results(modes=("push",), cells=CELLS[:1], rounds=2, requests=3)
    line = gate(few, few).lines[1]
    assert (line.statistic, line.passed) == ("p90", True)
    assert line.words.endswith("(only 6 values: says little)")


def test_an_unusable_baseline_is_the_users_error() -> None:
    with pytest.raises(UsageError, match="baseline is invalid"):
        gate(changed(made(), lambda run: replace(run, answers=WRONG)), made())
    with pytest.raises(UsageError, match="no request that was answered"):
        gate(replace(made(), runs=()), made())
    with pytest.raises(UsageError, match="no request that was answered"):
        gate(made(every=1), made())


def test_an_empty_candidate_fails() -> None:
    assert not gate(made(), replace(made(), runs=())).passed


@pytest.mark.parametrize(
    ("text", "share"), [("5%", 0.05), (" 5 % ", 0.05), ("0.05", 0.05), ("0", 0.0), ("150%", 1.5), ("0.5%", 0.005)]
)
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "five", "nan", "inf%", "-1%", "-0.1", "5", "1", "5%%", "1_0%", "5 % x"])
def test_wrong_shares_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_share(text)
    assert caught.value.hint


@given(st.text(max_size=8))
def test_any_text_is_a_share_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_share(text) >= 0
