"""Rates and percentiles out of counters that may begin again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.watch.poll_counters import SLOTS, Histogram, Rate, Window, quantile

INF = math.inf
counts = st.integers(0, 10**9)


class TestRate:
    def test_between_two_readings(self) -> None:
        rate = Rate()
        assert [rate.read(10.0, 100), rate.read(12.0, 150)] == [None, 25.0]

    def test_a_reset_has_no_rate_and_the_next_reading_has(self) -> None:
        rate = Rate()
        rate.read(0.0, 100)
        assert [rate.read(1.0, 3), rate.read(2.0, 7)] == [None, 4.0]

    def test_a_gap_has_no_rate(self) -> None:
        rate = Rate(gap_s=5.0)
        rate.read(0.0, 1)
        assert [rate.read(6.0, 100), rate.read(7.0, 101)] == [None, 1.0]

    def test_a_missing_reading_is_not_zero(self) -> None:
        rate = Rate()
        rate.read(0.0, 5)
        assert [rate.read(1.0, None), rate.read(2.0, 50), rate.read(3.0, 51)] == [None, None, 1.0]

    @given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.none() | counts)))
    def test_never_negative_whatever_comes(self, readings: list[tuple[float, int | None]]) -> None:
        rate = Rate()
        for at, count in readings:
            value = rate.read(at, count)
            assert value is None or value >= 0


class TestHistogram:
    def test_a_first_reading_says_nothing_of_now(self) -> None:
        assert Histogram(60).read(0.0, {0.1: 3, INF: 9}) == {}

    def test_increments_by_bucket(self) -> None:
        histogram = Histogram(60)
        histogram.read(0.0, {0.1: 3, 1.0: 5, INF: 9})
        assert histogram.read(1.0, {0.1: 4, 1.0: 8, INF: 12}) == {0.1: 1, 1.0: 2, INF: 0}

    def test_after_a_reset_all_is_new(self) -> None:
        histogram = Histogram(60)
        histogram.read(0.0, {0.1: 30, INF: 90})
        assert histogram.read(1.0, {0.1: 1, INF: 3}) == {0.1: 1, INF: 2}

    def test_what_happened_in_a_gap_is_left_out(self) -> None:
        histogram = Histogram(60)
        histogram.read(0.0, {INF: 1})
        assert histogram.read(61.0, {INF: 1000}) == {}

    @given(st.lists(st.dictionaries(st.sampled_from([0.1, 1.0, INF]), counts), max_size=6))
    def test_no_increment_is_negative(self, readings: list[dict[float, float]]) -> None:
        histogram = Histogram(60)
        for at, reading in enumerate(readings):
            assert all(value >= 0 for value in histogram.read(float(at), reading).values())


class TestWindow:
    def test_what_is_old_leaves_it(self) -> None:
        window = Window(60.0)
        window.add(0.0, {0.1: 10})
        window.add(50.0, {1.0: 2})
        assert sum(window.counts(50.0).values()) == 12
        assert window.counts(62.0) == {1.0: 2}
        assert window.percentiles(200.0) is None

    def test_its_size_is_bounded(self) -> None:
        window = Window(60.0)
        for second in range(10_000):
            window.add(float(second), {0.1: 1})
        assert len(window._slots) == SLOTS
        assert 55 <= sum(window.counts(9999.0).values()) <= 60

    def test_percentiles(self) -> None:
        window = Window(60.0)
        window.add(1.0, {0.1: 98, 1.0: 2, INF: 0})
        found = window.percentiles(1.0)
        assert found is not None
        assert (found.count, found.p50, found.p99) == (100, pytest.approx(0.1 * 50 / 98), pytest.approx(0.55))


class TestQuantile:
    def test_nothing_observed(self) -> None:
        assert quantile({0.1: 0, INF: 0}, 0.5) is None

    def test_beyond_the_last_bound_it_is_that_bound(self) -> None:
        assert quantile({0.1: 1, 10.0: 0, INF: 99}, 0.99) == 10.0

    @given(
        st.dictionaries(st.sampled_from([0.001, 0.01, 0.1, 1.0, 10.0]), counts, min_size=1),
        st.floats(0, 1),
        st.floats(0, 1),
    )
    def test_it_grows_with_the_share_and_stays_in_range(self, buckets: dict[float, float], a: float, b: float) -> None:
        low, high = quantile(buckets, min(a, b)), quantile(buckets, max(a, b))
        if sum(buckets.values()) == 0:
            assert (low, high) == (None, None)
        else:
            assert low is not None
            assert high is not None
            assert 0 <= low <= high * (1 + 1e-9)
            assert high <= max(bound for bound, count in buckets.items() if count) * (1 + 1e-9)
