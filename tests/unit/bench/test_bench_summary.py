"""What is told of results: figures, sums, comparisons, and their words."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from pdctl.bench.results import (
    COUNT_LIMIT,
    SECONDS_LIMIT,
    AnswerCheck,
    Cell,
    CellRun,
    Difference,
    Mode,
    Results,
    Sample,
    StageTimes,
    Transfers,
)
from pdctl.bench.statistics import Ratio, Statistic
from pdctl.bench.summary import COMPARED, NO_DIFFERENCE, Comparison, compare_runs, summarise, summarise_mode
from pdctl.bench.two_files import summarise_two
from tests.support.bench_results import CELLS, make_results

CELL = Cell(512, 4, 1)
OTHER_CELL = Cell(2048, 4, 1)


def sample(ttft: float = 0.1, error: str = "") -> Sample:
    if error:
        return Sample(0.0, None, 1.0, error=error)
    return Sample(0.0, ttft, ttft + 0.3, (0.1, 0.1, 0.1), 512, 4)


def run(mode: Mode = "push", number: int = 1, *samples: Sample, **more: object) -> CellRun:
    return CellRun(mode, number, CELL, 2.0, tuple(samples or [sample()]), **more)  # type: ignore[arg-type]


class TestModeSummary:
    def test_counts_requests_and_reasons(self) -> None:
        errors = ["HTTP 500: gone\nTraceback", "HTTP 500: gone\nother", "time-out", ""]
        samples = [sample(), *(sample(error=error) for error in errors[:3]), Sample(0.0, None, 1.0)]
        made = summarise_mode([run("push", 1, *samples)], mode="push", rounds=1)
        assert (made.requests, made.failed, made.error_share) == (5, 4, 0.8)
        assert dict(made.errors) == {"HTTP 500: gone": 2, "time-out": 1, "no token came": 1}
        assert next(iter(made.errors)) == "HTTP 500: gone"
        assert made.label == "push (pdctl's connector)"

    def test_puts_rare_reasons_together_and_cuts_long_ones(self) -> None:
        samples = [sample(error=f"{number} {'x' * 500}") for number in range(40)]
        errors = summarise_mode([run("push", 1, *samples)], mode="push", rounds=1).errors
        assert len(errors) == 5
        assert errors["36 other reasons"] == 36
        assert max(map(len, errors)) == 120

    def test_divides_totals_by_the_time_of_all_rounds(self) -> None:
        made = summarise_mode([run("push", 1, sample(), sample(error="x")), run("push", 2)], mode="push", rounds=2)
        assert made.requests_per_s == 0.5
        assert made.output_tokens_per_s == 2
        assert made.rounds == 2

    def test_figures_are_those_of_answered_requests(self) -> None:
        made = summarise_mode([run("push", 1, sample(0.1), sample(0.3), sample(error="x"))], mode="push", rounds=1)
        assert made.figures["ttft"].p50 == pytest.approx(0.2)
        assert made.figures["tpot"].mean == pytest.approx(0.1)
        assert made.figures["itl"].count == 6
        assert made.figures["e2e"].count == 2

    def test_nothing_measured_is_not_zero(self) -> None:
        made = summarise_mode([run("push", 1, sample(error="x"))], mode="push", rounds=1)
        assert made.figures == {}
        assert made.requests_per_s == 0
        still = replace(run(), duration_s=0.0)
        assert summarise_mode([still], mode="push", rounds=1).requests_per_s is None

    def test_is_incomplete_if_a_round_is_cut_or_missing(self) -> None:
        assert summarise_mode([run()], mode="push", rounds=1).complete
        assert not summarise_mode([run()], mode="push", rounds=2).complete
        assert not summarise_mode([run(complete=False)], mode="push", rounds=1).complete

    def test_sums_transfers_and_leaves_what_is_not_counted(self) -> None:
        runs = [
            run("push", 1, transfers=Transfers(completed=2, bytes=10)),
            run("push", 2, transfers=Transfers(completed=3, failed=0)),
        ]
        made = summarise_mode(runs, mode="push", rounds=2).transfers
        assert made == Transfers(completed=5, failed=0, bytes=10)
        assert made.expired is None

    def test_sums_answers(self) -> None:
        wrong = Difference(1, "a", "b", 0)
        runs = [
            run("push", 1, answers=AnswerCheck(4, 3, 0, (wrong,))),
            run("push", 2, answers=AnswerCheck(4, 3, 1, error="prefill is gone")),
            run("push", 3),
        ]
        assert summarise_mode(runs, mode="push", rounds=3).answers == AnswerCheck(
            8, 6, 1, (wrong,), "prefill is gone", 8
        )
        assert summarise_mode([run()], mode="push", rounds=1).answers is None

    def test_answers_that_were_not_compared_do_not_vanish(self) -> None:
        check = AnswerCheck(3, 3, error="1 of 4 could not be asked again: HTTP 500", asked=4)
        runs = [run("push", 1, answers=check), run("push", 2, answers=check), run("push", 3, answers=AnswerCheck(4, 4))]
        assert summarise_mode(runs, mode="push", rounds=3).answers == AnswerCheck(
            10, 10, error="1 of 4 could not be asked again: HTTP 500 (in 2 rounds)", asked=12
        )

    def test_requests_are_not_known_if_they_are_not_of_a_round_that_recomputed(self) -> None:
        def summed(*counted: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
            runs = [
                run("push", number, transfers=Transfers(recomputed_requests=requests, recomputed_tokens=tokens))
                for number, (requests, tokens) in enumerate(counted, start=1)
            ]
            made = summarise_mode(runs, mode="push", rounds=2).transfers
            return made.recomputed_requests, made.recomputed_tokens

        assert summed((0, 0), (None, 4096)) == (None, 4096)
        assert summed((1, 512), (2, 1024)) == (3, 1536)
        assert summed((0, 0), (None, None)) == (0, 0)
        assert summed((None, 0), (2, 1024)) == (2, 1024)

    def test_throughput_is_of_complete_runs_alone(self) -> None:
        runs = [run("push", 1), run("push", 2, *[sample()] * 50, complete=False)]
        made = summarise_mode(runs, mode="push", rounds=2)
        assert (made.requests, made.requests_per_s, made.output_tokens_per_s) == (51, 0.5, 2.0)
        assert made.figures["ttft"].count == 51
        assert summarise_mode(runs[1:], mode="push", rounds=2).requests_per_s is None

    def test_the_largest_figures_that_a_file_may_hold_have_sums(self) -> None:
        counted = Transfers(*[COUNT_LIMIT] * 4, SECONDS_LIMIT, COUNT_LIMIT, COUNT_LIMIT)
        stages = StageTimes({"rest": SECONDS_LIMIT, "match": -SECONDS_LIMIT}, {"x": SECONDS_LIMIT}, COUNT_LIMIT)
        other = StageTimes({"rest": SECONDS_LIMIT, "post": SECONDS_LIMIT}, {}, COUNT_LIMIT)
        check = AnswerCheck(*[COUNT_LIMIT] * 3, asked=COUNT_LIMIT)
        huge = Sample(0.0, 0.0, SECONDS_LIMIT, (SECONDS_LIMIT,), COUNT_LIMIT, COUNT_LIMIT)
        runs = [
            run("push", 1, huge, transfers=counted, stages=stages, answers=check),
            run("push", 2, huge, transfers=counted, stages=other, answers=check),
        ]
        made = summarise_mode(runs, mode="push", rounds=2)
        assert made.transfers == counted
        assert made.stages is not None
        assert made.stages.requests == COUNT_LIMIT
        assert made.answers == check
        assert summarise_mode([replace(run(), duration_s=5e-324)], mode="push", rounds=1).requests_per_s is None

    def test_tells_trouble_once_with_its_rounds(self) -> None:
        runs = [run("push", number, trouble=("gone",)) for number in (1, 3)]
        assert summarise_mode(runs, mode="push", rounds=3).trouble == ("rounds 1, 3: gone",)
        many = [run("push", 1, trouble=tuple(map(str, range(99))))]
        trouble = summarise_mode(many, mode="push", rounds=1).trouble
        assert len(trouble) == 20
        assert trouble[-1] == "and 80 more"


class TestStages:
    def test_are_weighted_by_requests(self) -> None:
        runs = [
            run("push", 1, stages=StageTimes({"prefill": 1.0, "rest": 0.5}, {"registration": 1.0}, 3, ("a",))),
            run("push", 2, stages=StageTimes({"prefill": 3.0, "rest": 0.5}, {"registration": 2.0}, 1, ("a",))),
        ]
        made = summarise_mode(runs, mode="push", rounds=2).stages
        assert made == StageTimes({"prefill": 1.5, "rest": 0.5}, {"registration": 1.25}, 4, ("a",))

    def test_what_one_round_lacks_is_part_of_rest_and_said(self) -> None:
        runs = [
            run("push", 1, stages=StageTimes({"prefill": 1.0, "match": 0.4, "rest": 0.2}, {}, 1)),
            run("push", 2, stages=StageTimes({"prefill": 1.0, "rest": 0.6}, {}, 1)),
        ]
        made = summarise_mode(runs, mode="push", rounds=2).stages
        assert made is not None
        assert made.seconds == pytest.approx({"prefill": 1.0, "rest": 0.6})
        assert list(made.seconds) == ["prefill", "rest"]
        assert made.notes == ("match: not told apart in every round, so part of rest",)
        assert sum(made.seconds.values()) == pytest.approx(1.6)

    def test_say_if_a_round_has_none(self) -> None:
        runs = [run("push", 1, stages=StageTimes({"rest": 1.0}, {}, 2)), run("push", 2)]
        made = summarise_mode(runs, mode="push", rounds=2).stages
        assert made is not None
        assert made.seconds == {"rest": 1.0}
        assert made.notes == ("stages are known of 1 of 2 rounds",)
        assert summarise_mode([run()], mode="push", rounds=1).stages is None


class TestWords:
    @pytest.mark.parametrize(
        ("figure", "value", "low", "high", "words", "better"),
        [
            ("ttft", 0.88, 0.8, 0.95, "12 % lower", True),
            ("ttft", 1.08, 1.01, 1.2, "8 % higher", False),
            ("ttft", 0.88, 0.7, 1.01, NO_DIFFERENCE, None),
            ("ttft", 0.5, 0.3, 1.0, NO_DIFFERENCE, None),
            ("ttft", 1.01, 0.8, 0.99, NO_DIFFERENCE, None),
            ("tpot", 0.996, 0.99, 0.999, "0.4 % lower", True),
            ("tpot", 0.9999, 0.9998, 0.99995, "less than 0.1 % lower", True),
            ("itl", 4.5, 4.0, 5.0, "4.5 times as high", False),
            ("requests_per_s", 1.2, 1.1, 1.3, "20 % higher", True),
            ("output_tokens_per_s", 0.9, 0.8, 0.95, "10 % lower", False),
        ],
    )
    def test_never_claim_more_than_the_interval(
        self, figure: str, value: float, low: float, high: float, words: str, better: bool | None
    ) -> None:
        made = Comparison("push", "pull", figure, "p50", Ratio(value, low, high), 100)
        assert made.verdict == words
        assert made.better is better

    def test_of_nothing(self) -> None:
        assert Comparison("push", "pull", "ttft", "p50", None).verdict == "not measured"
        assert Comparison("push", "pull", "ttft", "p50", None, samples=1).verdict == "too few to tell"
        assert Comparison("push", "pull", "ttft", "p50", None).better is None


class TestComparisons:
    def test_every_later_mode_is_divided_by_every_earlier_one(self) -> None:
        summary = summarise(make_results(cells=CELLS[:1]), draws=100)
        pairs = list(dict.fromkeys((one.mode, one.against) for one in summary.cells[0].comparisons))
        assert pairs == [("push-upstream", "pull"), ("push", "pull"), ("push", "push-upstream")]
        figures = [(one.figure, one.statistic) for one in summary.cells[0].comparisons if one.mode == "push-upstream"]
        assert figures == list(COMPARED)
        assert summary.modes == ("pull", "push-upstream", "push")
        assert summary.cells[0].of("push") is summary.cells[0].modes[2]
        assert summary.cells[0].of("other") is None

    def test_finds_the_difference_that_was_made(self) -> None:
        summary = summarise(make_results(modes=("pull", "push"), cells=CELLS[1:2], speeds={"pull": 1, "push": 0.7}))
        first = summary.cells[0].comparisons[0]
        assert (first.figure, first.statistic) == ("ttft", "p50")
        assert first.sign == -1
        assert first.better is True
        assert first.ratio is not None
        assert first.ratio.value == pytest.approx(0.7, abs=0.1)

    def test_equal_modes_are_no_difference(self) -> None:
        summary = summarise(make_results(modes=("pull", "push"), cells=CELLS[1:2], speeds={"pull": 1, "push": 1}))
        words = [one.verdict for one in summary.cells[0].comparisons]
        assert words.count(NO_DIFFERENCE) >= len(words) - 1

    def test_marks_percentiles_of_few(self) -> None:
        summary = summarise(make_results(modes=("pull", "push"), cells=CELLS[:1], rounds=2, requests=4), draws=50)
        thin = {(one.figure, one.statistic) for one in summary.cells[0].comparisons if one.thin}
        assert ("ttft", "p90") in thin
        assert ("ttft", "p99") in thin
        assert ("ttft", "p50") not in thin
        # Of gaps there are 15 for each request.
        assert ("itl", "p99") not in thin

    def test_compares_the_rounds_that_both_have(self) -> None:
        mine = [run("push", number, sample(0.1), sample(0.1)) for number in (1, 2)]
        other = [run("pull", number, sample(ttft), sample(ttft)) for number, ttft in ((2, 0.2), (3, 9.0))]
        made = compare_runs(("push", mine), ("pull", other), seed=1, draws=50, compared=(("ttft", "p50"),))
        assert made == [Comparison("push", "pull", "ttft", "p50", Ratio(0.5, 0.5, 0.5), 2)]

    def test_runs_that_were_cut_short_are_in_no_ratio(self) -> None:
        def runs(mode: Mode, ttft: float) -> list[CellRun]:
            return [run(mode, number, sample(ttft), sample(ttft)) for number in (1, 2, 3)]

        cut = run("push", 3, *[sample(9.0)] * 50, complete=False)
        compared: tuple[tuple[str, Statistic], ...] = (("ttft", "p50"), ("ttft", "p99"), ("requests_per_s", "mean"))
        whole, other = runs("push", 0.1)[:2], runs("pull", 0.2)
        for paired in (True, False):
            made = compare_runs(
                ("push", [*whole, cut]), ("pull", other), seed=1, draws=50, compared=compared, paired=paired
            )
            assert [one.ratio and one.ratio.value for one in made] == [0.5, 0.5, 1.0]
            turned = compare_runs(
                ("pull", other), ("push", [*whole, cut]), seed=1, draws=50, compared=compared, paired=paired
            )
            assert [one.ratio and one.ratio.value for one in turned] == [2.0, 2.0, 1.0]

    def test_no_round_in_common_is_not_measured(self) -> None:
        made = compare_runs(("push", [run("push", 1)]), ("pull", [run("pull", 2)]), seed=1, draws=50)
        assert {one.verdict for one in made} == {"not measured"}

    def test_one_round_has_no_interval_of_throughput(self) -> None:
        made = compare_runs(
            ("push", [run("push")]), ("pull", [run("pull")]), seed=1, compared=(("requests_per_s", "mean"),)
        )
        assert made[0].verdict == "too few to tell"
        assert made[0].samples == 1

    def test_statistics_of_a_figure_do_not_depend_on_which_are_asked_for(self) -> None:
        mine, other = (make_results(modes=("push",), cells=CELLS[:1], seed=seed).runs for seed in (1, 2))
        alone = compare_runs(("a", mine), ("b", other), seed=1, draws=50, compared=(("ttft", "p90"),))
        wanted: tuple[tuple[str, Statistic], ...] = (("ttft", "p50"), ("ttft", "p90"))
        assert alone[0] == compare_runs(("a", mine), ("b", other), seed=1, draws=50, compared=wanted)[1]


class TestSummary:
    def test_of_nothing(self) -> None:
        summary = summarise(replace(make_results(cells=CELLS[:1]), runs=(), complete=False))
        assert summary.cells == ()
        assert summary.modes == ()
        assert summary.incomplete_because == "the bench did not come to its end"

    def test_says_why_it_is_invalid_or_incomplete(self) -> None:
        results = make_results(
            cells=CELLS[:1], wrong=[Difference(0, "a", "b", 0)], complete=False, incomplete_because="interrupted"
        )
        summary = summarise(results, draws=20)
        assert "differ" in summary.invalid_because
        assert summary.incomplete_because == "interrupted"

    def test_a_partial_run_makes_it_partial(self) -> None:
        results = make_results(modes=("push",), cells=CELLS[:1])
        runs = tuple(replace(one, complete=one.round > 2, trouble=("decode-0 was restarted",)) for one in results.runs)
        because = summarise(replace(results, runs=runs), draws=20).incomplete_because
        assert because == "push, 512+16 x1, round 1 is partial, first of 2: decode-0 was restarted"

    def test_is_the_same_each_time(self) -> None:
        results = make_results(cells=CELLS[:1])
        assert summarise(results, draws=100) == summarise(results, draws=100)

    def test_every_request_failed(self) -> None:
        summary = summarise(make_results(modes=("pull", "push"), cells=CELLS[:1], error_every=1), draws=20)
        assert summary.cells[0].modes[0].failed == 100
        assert {one.verdict for one in summary.cells[0].comparisons if one.figure == "ttft"} == {"not measured"}


class TestTwoFiles:
    def pair(self, speed: float = 0.7) -> tuple[Results, Results]:
        old = make_results(modes=("pull", "push"), cells=CELLS[:2])
        new = make_results(modes=("push",), cells=CELLS[1:3], speeds={"push": 0.81 * speed}, seed=3)
        return old, new

    def test_divides_the_candidate_by_the_baseline(self) -> None:
        old, new = self.pair()
        summary = summarise_two(old, new, ("a/old.json", "b/new.json"), draws=200)
        assert summary.modes == ("pull, old.json", "push, old.json", "push, new.json")
        assert [cell.cell for cell in summary.cells] == list(CELLS[:3])
        shared = summary.cells[1]
        assert {(one.mode, one.against) for one in shared.comparisons} == {("push, new.json", "push, old.json")}
        assert shared.comparisons[0].sign == -1
        assert summary.cells[0].comparisons == ()
        assert shared.modes[-1].label == "push (pdctl's connector), new.json"

    def test_files_of_the_same_name_are_told_apart(self) -> None:
        old, new = self.pair()
        names = ("runs/a/results.json", "runs/b/results.json")
        assert summarise_two(old, new, names, draws=20).modes[-1] == "push, b/results.json"
        assert len(set(summarise_two(old, new, ("r.json", "r.json"), draws=20).modes)) == 3

    def test_files_without_a_mode_in_common_are_compared_all_the_same(self) -> None:
        old = make_results(modes=("pull",), cells=CELLS[:1])
        new = make_results(modes=("push",), cells=CELLS[:1], seed=3)
        summary = summarise_two(old, new, ("old", "new"), draws=100)
        assert {(one.mode, one.against) for one in summary.cells[0].comparisons} == {("push, new", "pull, old")}
        assert summary.cells[0].comparisons[0].ratio is not None

    def test_files_of_unlike_rounds(self) -> None:
        old = make_results(modes=("push",), cells=CELLS[:1], rounds=2)
        new = make_results(modes=("push",), cells=CELLS[:1], rounds=3)
        summary = summarise_two(old, new, ("old", "new"), draws=50)
        assert all(one.ratio is not None for one in summary.cells[0].comparisons)

    def test_says_which_file_is_invalid(self) -> None:
        old, new = self.pair()
        wrong = AnswerCheck(1, 0, 0, (Difference(0, "a", "b", 0),))
        new = replace(new, runs=(replace(new.runs[0], answers=wrong), *new.runs[1:]), complete=False)
        summary = summarise_two(old, new, ("old", "new"), draws=20)
        assert summary.invalid_because.startswith("new: 1 answer")
        assert summary.incomplete_because == "new: the bench did not come to its end"


def test_types_are_frozen() -> None:
    summary = summarise(make_results(modes=("push",), cells=CELLS[:1]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.cells = ()  # type: ignore[misc]
