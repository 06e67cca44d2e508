"""Percentiles and ratios against distributions whose answer is known."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.bench import statistics
from pdctl.bench.statistics import Ratio, is_thin, percentiles, ratio, ratios, round_ratio

ROUNDS, REQUESTS = 4, 25

Lists = list[list[float]]


def lognormal(
    random: np.random.Generator, *, median: float = 1.0, spread: float = 0.4, rounds: int = ROUNDS, n: int = REQUESTS
) -> Lists:
    return [(median * random.lognormal(0, spread, n)).tolist() for _ in range(rounds)]


class TestPercentiles:
    def test_are_numpys_linear_ones(self) -> None:
        found = percentiles([4.0, 1.0, 3.0, 2.0])
        assert found is not None
        assert (found.p50, found.mean, found.count) == (2.5, 2.5, 4)
        assert found.p90 == pytest.approx(3.7)
        assert found.p99 == pytest.approx(3.97)

    def test_of_nothing_are_none(self) -> None:
        assert percentiles([]) is None
        assert percentiles([math.nan, math.inf]) is None

    def test_leave_out_what_is_not_finite(self) -> None:
        found = percentiles([1.0, math.inf, math.nan])
        assert found is not None
        assert (found.p99, found.count) == (1.0, 1)

    @given(st.lists(st.floats()))
    def test_never_raise(self, values: list[float]) -> None:
        percentiles(values)

    def test_thin_ones_are_known(self) -> None:
        assert is_thin("p99", 99)
        assert not is_thin("p99", 100)
        assert is_thin("p90", 9)
        assert not is_thin("p90", 10)
        assert not is_thin("p50", 1)


class TestDraws:
    """The bootstrap's own statistics are those that numpy gives for the values that were drawn."""

    @pytest.mark.parametrize("statistic", ["p50", "p90", "p99", "mean"])
    def test_equal_numpys_of_the_drawn_values(self, statistic: statistics.Statistic) -> None:
        random = np.random.default_rng(5)
        rounds = [[random.lognormal(0, 1, random.integers(1, 5)).tolist() for _ in range(n)] for n in (3, 1, 6)]
        side = statistics._Side.of(rounds, random)
        drawn = side.draw_rounds(40, random)
        made = side.draw(drawn, (statistic,), np.random.default_rng(8))[statistic]
        counts = side._counts(drawn, np.random.default_rng(8))
        requests = [request for one in rounds for request in one]
        share = {"p50": 50, "p90": 90, "p99": 99}.get(statistic)
        for row, got in zip(counts, made, strict=True):
            values = [value for number, request in zip(row, requests, strict=True) for value in request * int(number)]
            expected = np.mean(values) if share is None else np.percentile(values, share)
            assert got == pytest.approx(expected)

    def test_take_as_many_requests_as_the_drawn_rounds_have(self) -> None:
        random = np.random.default_rng(1)
        side = statistics._Side.of([[[1.0]] * 2, [[2.0]] * 5], random)
        counts = side._counts(np.asarray([[0, 0], [1, 1], [0, 1]]), random)
        assert counts[:, :2].sum(axis=1).tolist() == [4, 0, 2]
        assert counts[:, 2:].sum(axis=1).tolist() == [0, 10, 5]


class TestRatio:
    def test_is_that_of_all_values(self) -> None:
        mine, other = [[1.0, 2.0], [3.0, 9.0]], [[2.0, 2.0], [2.0, 2.0]]
        found = ratio(mine, other, statistic="p50", seed=1)
        assert found is not None
        assert found.value == 1.25
        mean = ratio(mine, other, statistic="mean", seed=1)
        assert mean is not None
        assert mean.value == 1.875

    def test_is_the_same_for_the_same_seed(self) -> None:
        random = np.random.default_rng(2)
        mine, other = lognormal(random), lognormal(random)
        first = ratio(mine, other, statistic="p90", seed=3)
        assert first == ratio(mine, other, statistic="p90", seed=3)
        assert first != ratio(mine, other, statistic="p90", seed=4)
        assert ratio(mine, other, statistic="p90", seed=-3) is not None

    @pytest.mark.slow
    def test_a_shift_of_30_percent_is_found(self) -> None:
        random = np.random.default_rng(3)
        missed = 0
        for seed in range(20):
            found = ratio(lognormal(random, median=0.7), lognormal(random), statistic="p50", seed=seed, draws=500)
            assert found is not None
            missed += found.high >= 1
        assert missed <= 1

    @pytest.mark.slow
    def test_equal_distributions_are_no_difference(self) -> None:
        random = np.random.default_rng(4)
        claimed = 0
        for seed in range(100):
            found = ratio(lognormal(random), lognormal(random), statistic="p50", seed=seed, draws=500)
            assert found is not None
            claimed += not found.low <= 1 <= found.high
        assert claimed <= 5

    @pytest.mark.slow
    @pytest.mark.parametrize("statistic", ["p50", "p90", "mean"])
    def test_the_interval_covers_the_true_ratio_as_often_as_it_says(self, statistic: statistics.Statistic) -> None:
        # Rounds drift for both modes together (0.3), and each mode has its own good and bad rounds (0.12).
        assert 0.88 <= self._covered(statistic, drift=0.3, own=0.12) <= 0.99

    @pytest.mark.slow
    def test_rounds_that_differ_much_are_covered_nearly_as_often(self) -> None:
        assert self._covered("mean", drift=0.3, own=0.2) >= 0.8

    @pytest.mark.slow
    def test_rounds_that_are_all_alike_are_covered_too(self) -> None:
        assert self._covered("p50", drift=0.0, own=0.0) >= 0.95

    @pytest.mark.slow
    def test_one_round_does_not_cover_what_rounds_do(self) -> None:
        assert self._covered("p50", drift=0.0, own=0.0, rounds=1) >= 0.88
        assert self._covered("p50", drift=0.0, own=0.2, rounds=1) < 0.7

    @staticmethod
    def _covered(statistic: statistics.Statistic, *, drift: float, own: float, rounds: int = ROUNDS) -> float:
        random = np.random.default_rng(6)
        true, tries, covered = 0.8, 200, 0
        for seed in range(tries):
            together = random.normal(0, drift, rounds)

            def side(median: float, together: np.ndarray = together) -> Lists:
                middles = median * np.exp(together + random.normal(0, own, rounds))
                return [(middle * random.lognormal(0, 0.4, REQUESTS)).tolist() for middle in middles]

            found = ratio(side(true), side(1.0), statistic=statistic, seed=seed, draws=400)
            assert found is not None
            covered += found.low <= true <= found.high
        return covered / tries

    def test_paired_rounds_cancel_what_hits_both(self) -> None:
        random = np.random.default_rng(9)
        slow = (1.0, 5.0, 2.0, 9.0)
        mine = [[middle * 0.8 * random.lognormal(0, 0.05) for _ in range(25)] for middle in slow]
        other = [[middle * random.lognormal(0, 0.05) for _ in range(25)] for middle in slow]
        paired = ratio(mine, other, statistic="mean", seed=1)
        apart = ratio(mine, other, statistic="mean", seed=1, paired=False)
        assert paired is not None
        assert apart is not None
        assert paired.high - paired.low < 0.1
        assert apart.high - apart.low > 0.5

    def test_values_of_one_request_are_not_independent(self) -> None:
        random = np.random.default_rng(10)
        middles = random.lognormal(0, 0.5, (2, 3, 20))
        mine, other = ([[[middle] * 50 for middle in one] for one in side.tolist()] for side in middles)
        grouped = ratios(mine, other, statistics=("p50",), seed=1)["p50"]
        flat = ratio(
            *([[value for request in one for value in request] for one in side] for side in (mine, other)),
            statistic="p50",
            seed=1,
        )
        assert grouped is not None
        assert flat is not None
        assert grouped.high - grouped.low > 1.3 * (flat.high - flat.low)

    @pytest.mark.parametrize(
        ("mine", "other"),
        [
            ([], []),
            ([[]], [[1.0, 2.0]]),
            ([[1.0, 2.0]], [[]]),
            ([[1.0]], [[2.0]]),
            ([[math.nan, math.inf]], [[1.0, 2.0]]),
            ([[1.0, 2.0]], [[0.0, 0.0]]),
            ([[0.0, 0.0]], [[0.0, 0.0]]),
            ([[1.0, 2.0], []], [[], [1.0, 2.0]]),
        ],
    )
    def test_is_none_where_nothing_can_be_told(self, mine: Lists, other: Lists) -> None:
        assert ratio(mine, other, statistic="p50", seed=1, draws=50) is None

    def test_rounds_that_one_side_lacks_are_left_out(self) -> None:
        found = ratio([[1.0, 1.0], [9.0]], [[2.0, 2.0], []], statistic="p50", seed=1)
        assert found == Ratio(0.5, 0.5, 0.5)

    def test_paired_rounds_must_be_equally_many(self) -> None:
        with pytest.raises(ValueError):
            ratio([[1.0]], [[1.0], [2.0]], statistic="p50", seed=1)
        assert ratio([[1.0, 1.0]], [[1.0], [2.0]], statistic="p50", seed=1, paired=False) is not None

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 4).flatmap(
            lambda n: st.tuples(*[st.lists(st.lists(st.floats(), max_size=6), min_size=n, max_size=n)] * 2)
        ),
        st.sampled_from(["p50", "p90", "p99", "mean"]),
        st.booleans(),
    )
    def test_never_raises_and_is_finite(
        self, sides: tuple[Lists, Lists], statistic: statistics.Statistic, paired: bool
    ) -> None:
        found = ratio(*sides, statistic=statistic, seed=1, draws=20, paired=paired)
        if found is not None:
            assert all(map(math.isfinite, (found.value, found.low, found.high)))
            assert found.low <= found.high

    @pytest.mark.slow
    def test_many_values_need_bounded_memory(self) -> None:
        random = np.random.default_rng(11)
        mine: Lists = random.lognormal(0, 0.3, (2, 15_000)).tolist()
        tracemalloc.start()
        found = ratio(mine, mine, statistic="p99", seed=1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found is not None
        assert found.value == 1
        assert found.low < 1 < found.high
        # All draws of all values at once would be 480 MB, and more for their sums.
        assert peak < 150e6

    def test_a_part_of_many_values_is_drawn_from_every_request(self) -> None:
        random = np.random.default_rng(12)
        rounds = [[[float(number)] * 1000 for number in range(10)] for _ in range(2)]
        fewer = statistics._fewer(rounds, random)
        assert [len(one) for one in fewer] == [10, 10]
        assert {len(request) for one in fewer for request in one} == {statistics.MOST_VALUES // 20}
        assert fewer[0][3][0] == 3.0

    @pytest.mark.slow
    def test_54_ratios_of_100_requests_take_seconds(self) -> None:
        random = np.random.default_rng(13)
        began = time.process_time()
        for seed in range(54):
            ratio(lognormal(random), lognormal(random), statistic="p50", seed=seed)
        assert time.process_time() - began < 20


class TestRoundRatio:
    def test_covers_the_true_ratio_with_four_rounds(self) -> None:
        assert 0.92 <= self._covered(lambda drift: drift, paired=True) <= 0.98
        assert self._covered(lambda drift: np.zeros_like(drift), paired=False) >= 0.92

    @staticmethod
    def _covered(together: Callable[[np.ndarray], np.ndarray], *, paired: bool) -> float:
        random = np.random.default_rng(14)
        covered = 0
        for _ in range(400):
            drift = together(random.normal(0, 0.5, 4))
            mine, other = (np.exp(drift + random.normal(middle, 0.1, 4)).tolist() for middle in (math.log(0.9), 0.0))
            found = round_ratio(mine, other, paired=paired)
            assert found is not None
            covered += found.low <= 0.9 <= found.high
        return covered / 400

    def test_is_the_geometric_mean(self) -> None:
        found = round_ratio([2.0, 8.0], [1.0, 1.0])
        assert found is not None
        assert found.value == pytest.approx(4)
        assert found.low < 1 < found.high

    def test_needs_two_rounds_and_values_above_zero(self) -> None:
        assert round_ratio([1.0], [1.0]) is None
        assert round_ratio([], []) is None
        assert round_ratio([1.0, 0.0], [1.0, 1.0]) is None
        assert round_ratio([1.0, math.inf], [1.0, 1.0]) is None

    def test_many_rounds_have_their_quantile_too(self) -> None:
        values = [1.0, 1.1] * 20
        found = round_ratio(values, list(reversed(values)))
        assert found is not None
        assert found.low < 1 < found.high

    def test_paired_rounds_must_be_equally_many(self) -> None:
        with pytest.raises(ValueError):
            round_ratio([1.0], [1.0, 2.0])

    @given(st.lists(st.floats(), max_size=5), st.lists(st.floats(), max_size=5))
    def test_never_raises(self, mine: list[float], other: list[float]) -> None:
        round_ratio(mine, other, paired=False)
