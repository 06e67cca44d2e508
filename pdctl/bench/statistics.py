"""Percentiles, and how sure a ratio of two of them is. Pure; the same input and seed give the same output.

Two modes are measured in turn, in rounds. What disturbs a machine disturbs whole rounds, so requests alone would make
an interval too narrow: the bootstrap here draws rounds first and requests inside them second ("hierarchical
bootstrap").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

Statistic = Literal["p50", "p90", "p99", "mean"]
Rounds = Sequence[Sequence[Sequence[float]]]
"""Values by round and, inside a round, by request: values of one request are no independent ones."""

DRAWS = 2000
"""Bootstrap draws: enough for the ends of a 95 % interval."""

MOST_VALUES = 4_000
"""Values of a side that the bootstrap works on. Of more, a part is drawn (see :func:`ratios`)."""

_BLOCK = 2_000_000
"""Numbers that are in memory at once, about."""

_SHARES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_FEWEST: Mapping[str, int] = {"p90": 10, "p99": 100}
_LOW, _HIGH = 2.5, 97.5

# Student's t, 97.5 %, for 1 to 30 degrees of freedom.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

_T = TypeVar("_T")
_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Percentiles:
    """A distribution in short, in the unit of its values.

    Attributes:
        p50: the median.
        p90: 90 % of the values are below.
        p99: 99 % of the values are below.
        mean: the arithmetic mean.
        count: how many values.
    """

    p50: float
    p90: float
    p99: float
    mean: float
    count: int


@dataclass(frozen=True)
class Ratio:
    """One statistic divided by another, with its 95 % interval.

    Attributes:
        value: the ratio of what was measured.
        low: lower end.
        high: upper end.
    """

    value: float
    low: float
    high: float


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Percentiles by linear interpolation (numpy's default); None without values. What is not finite is left out."""
    known = _finite(values)
    if not known:
        return None
    with np.errstate(all="ignore"):
        p50, p90, p99 = (float(value) for value in np.percentile(known, [50, 90, 99]))
        return Percentiles(p50, p90, p99, float(np.mean(known)), len(known))


def is_thin(statistic: str, count: int) -> bool:
    """Whether so few values say little about this percentile: p90 of fewer than 10, p99 of fewer than 100."""
    return count < _FEWEST.get(statistic, 0)


def ratio(
    mine: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    *,
    statistic: Statistic,
    seed: int,
    draws: int = DRAWS,
    paired: bool = True,
) -> Ratio | None:
    """The ratio ``mine / other`` of a statistic over all values, one value per request.

    See :func:`ratios` for how, for the arguments, and for what the interval does not cover.

    Args:
        mine: values by round.
        other: likewise.
        statistic: what is compared.
        seed: of the draws.
        draws: how many.
        paired: whether the rounds of both sides were measured close in time.
    """
    made = ratios(_alone(mine), _alone(other), statistics=(statistic,), seed=seed, draws=draws, paired=paired)
    return made[statistic]


def ratios(
    mine: Rounds,
    other: Rounds,
    *,
    statistics: Sequence[Statistic],
    seed: int,
    draws: int = DRAWS,
    paired: bool = True,
) -> dict[Statistic, Ratio | None]:
    """Ratios ``mine / other`` of statistics over all values, each with a 95 % percentile interval by bootstrap.

    Each draw takes rounds with replacement, one fewer than there are (which makes up for how few they are), and then as
    many requests as each drawn round has, with replacement, with all their values. Values that are not finite are left
    out, and so are rounds in which a paired side has none.

    With one round only requests are drawn. Then the interval says how sure the ratio is *in that round*; it does not
    cover what changes from one round to the next (other load, another placement, a warmer machine). In simulations
    with rounds of 25 requests and a mode whose rounds vary half as much as its requests, four rounds cover the true
    ratio in 91 to 96 of 100 cases, two in 80 to 86. Where rounds differ by nothing but their requests, the interval is
    wider than it need be (99 of 100). Requests of one round that hold each other up are drawn as if they did not.

    A side with more than :data:`MOST_VALUES` values keeps of each request as many as fit, drawn with the seed, and of
    yet more requests as many of each round as fit. The ratio itself is that of all values.

    Args:
        mine: values by round and request.
        other: likewise.
        statistics: what is compared.
        seed: of the draws.
        draws: how many.
        paired: whether ``mine[i]`` and ``other[i]`` were measured close in time: then the same rounds are drawn on both
            sides, and what hit both in a round cancels out.

    Returns:
        the ratio by statistic. None where a side has fewer than two requests with values, or is (nearly) always zero.

    Raises:
        ValueError: the rounds are paired and not equally many.
    """
    ours, theirs = _known(mine), _known(other)
    if paired:
        pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[0] and pair[1]]
        ours, theirs = [one for one, _ in pairs], [one for _, one in pairs]
    else:
        ours, theirs = [one for one in ours if one], [one for one in theirs if one]
    if sum(map(len, ours)) < 2 or sum(map(len, theirs)) < 2:
        return dict.fromkeys(statistics)
    random = np.random.default_rng(seed % 2**64)
    with np.errstate(all="ignore"):
        whole = {one: _statistic(ours, one) / _statistic(theirs, one) for one in statistics}
        left, right = _Side.of(ours, random), _Side.of(theirs, random)
        parts: dict[Statistic, list[_Floats]] = {one: [] for one in statistics}
        for number in _blocks(draws, max(left.breadth, right.breadth)):
            rounds = left.draw_rounds(number, random)
            above = left.draw(rounds, statistics, random)
            below = right.draw(rounds if paired else right.draw_rounds(number, random), statistics, random)
            for one in statistics:
                parts[one].append(above[one] / below[one])
        return {one: _interval(float(whole[one]), np.concatenate(parts[one])) for one in statistics}


def round_ratio(mine: Sequence[float], other: Sequence[float], *, paired: bool = True) -> Ratio | None:
    """The ratio ``mine / other`` of a figure that a round has once, such as its throughput: geometric mean over rounds.

    Its 95 % interval is Student's, on logarithms: a bootstrap of as few values as there are rounds would be far too
    narrow. Paired rounds are compared one by one; of others, the fewer rounds give the degrees of freedom.

    Args:
        mine: one value per round.
        other: likewise.
        paired: whether ``mine[i]`` and ``other[i]`` were measured close in time.

    Returns:
        the ratio; None with fewer than two rounds, or with a value that is not above zero.

    Raises:
        ValueError: the rounds are paired and not equally many.
    """
    if paired and len(mine) != len(other):
        raise ValueError(f"{len(mine)} rounds are paired with {len(other)}")
    fewest = min(len(mine), len(other))
    if fewest < 2 or not all(math.isfinite(value) and value > 0 for value in (*mine, *other)):
        return None
    ours, theirs = np.log(np.asarray(mine, dtype=float)), np.log(np.asarray(other, dtype=float))
    middle = float(ours.mean() - theirs.mean())
    if paired:
        spread = float(np.std(ours - theirs, ddof=1)) / math.sqrt(fewest)
    else:
        spread = math.sqrt(float(np.var(ours, ddof=1)) / len(mine) + float(np.var(theirs, ddof=1)) / len(other))
    freedom = fewest - 1
    margin = spread * (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom)
    with np.errstate(all="ignore"):
        low, value, high = (float(end) for end in np.exp([middle - margin, middle, middle + margin]))
    return Ratio(value, low, high) if math.isfinite(high) and value > 0 else None


class _Side:
    """What is drawn from on one side.

    Attributes:
        breadth: numbers that one draw takes.
    """

    def __init__(self, values: _Floats, request_of: _Ints, sizes: _Ints) -> None:
        """Take the values, the request that each belongs to (counted over all rounds), and the requests per round."""
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._request_of = request_of[order]
        self._sizes = sizes
        self._starts = np.cumsum(sizes) - sizes
        self._requests = int(sizes.sum())
        self._sums = np.bincount(request_of, weights=values, minlength=self._requests)
        self._lengths = np.bincount(request_of, minlength=self._requests)
        self.breadth = max(len(values), self._requests)

    @classmethod
    def of(cls, rounds: list[list[list[float]]], random: np.random.Generator) -> _Side:
        rounds = _fewer(rounds, random)
        requests = [request for one in rounds for request in one]
        values = np.asarray([value for request in requests for value in request], dtype=float)
        request_of = np.repeat(np.arange(len(requests)), [len(request) for request in requests])
        return cls(values, request_of, np.asarray([len(one) for one in rounds], dtype=np.int64))

    def draw_rounds(self, draws: int, random: np.random.Generator) -> _Ints:
        """Rounds by draw: one fewer than there are, unless there is but one.

        As many as there are would vary too little, by (n - 1) / n, which is much for few rounds (J. N. K. Rao and
        C. F. J. Wu, "Resampling inference with complex survey data", 1988).
        """
        count = len(self._sizes)
        return random.integers(0, count, (draws, max(1, count - 1)))

    def draw(
        self, rounds: _Ints, statistics: Sequence[Statistic], random: np.random.Generator
    ) -> dict[Statistic, _Floats]:
        """Each statistic of each draw, whose rounds are given."""
        counts = self._counts(rounds, random)
        made: dict[Statistic, _Floats] = {}
        if set(statistics) - {"mean"}:
            # How often each value was drawn, summed up in ascending order. The rows are put one behind the other in one
            # ascending array, so that one search finds the places of all of them.
            summed = np.cumsum(np.take(counts, self._request_of, axis=1), axis=1)
            totals = summed[:, -1]
            offsets = np.arange(len(totals)) * (int(totals.max()) + 1)
            ascending = (summed + offsets[:, None]).ravel()
            rows = np.arange(len(totals)) * summed.shape[1]
            for one in set(statistics) - {"mean"}:
                place = (totals - 1) * _SHARES[one]
                before = np.floor(place).astype(np.int64)
                after = np.minimum(before + 1, totals - 1)
                low = self._values[np.searchsorted(ascending, before + offsets, side="right") - rows]
                high = self._values[np.searchsorted(ascending, after + offsets, side="right") - rows]
                made[one] = low + (high - low) * (place - before)
        if "mean" in statistics:
            made["mean"] = (counts @ self._sums) / (counts @ self._lengths)
        return made

    def _counts(self, rounds: _Ints, random: np.random.Generator) -> _Ints:
        """How often each request is in each draw."""
        sizes = self._sizes[rounds]
        each = sizes.ravel()
        picked = np.repeat(self._starts[rounds].ravel(), each) + random.integers(0, np.repeat(each, each))
        draw = np.repeat(np.arange(len(rounds)), sizes.sum(axis=1))
        flat = np.bincount(draw * self._requests + picked, minlength=len(rounds) * self._requests)
        return flat.reshape(len(rounds), self._requests)


def _alone(rounds: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    return [[[value] for value in one] for one in rounds]


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _known(rounds: Rounds) -> list[list[list[float]]]:
    """Requests that have values, by round."""
    return [[known for request in one if (known := _finite(request))] for one in rounds]


def _statistic(rounds: list[list[list[float]]], statistic: Statistic) -> np.float64:
    values = np.asarray([value for one in rounds for request in one for value in request], dtype=float)
    made: np.float64 = np.mean(values) if statistic == "mean" else np.percentile(values, _SHARES[statistic] * 100)
    return made


def _fewer(rounds: list[list[list[float]]], random: np.random.Generator) -> list[list[list[float]]]:
    """At most about :data:`MOST_VALUES` values; as they are if they are no more."""
    requests = sum(map(len, rounds))
    if sum(len(request) for one in rounds for request in one) <= MOST_VALUES:
        return rounds
    if requests > MOST_VALUES:
        share = MOST_VALUES / requests
        rounds = [_some(one, max(1, int(len(one) * share)), random) for one in rounds]
    most = max(1, MOST_VALUES // requests)
    return [[_some(request, most, random) for request in one] for one in rounds]


def _some(items: list[_T], most: int, random: np.random.Generator) -> list[_T]:
    if len(items) <= most:
        return items
    return [items[place] for place in random.choice(len(items), most, replace=False)]


def _blocks(draws: int, breadth: int) -> Iterator[int]:
    """How many draws are made at once."""
    size = max(1, _BLOCK // breadth)
    for start in range(0, draws, size):
        yield min(size, draws - start)


def _interval(value: float, drawn: _Floats) -> Ratio | None:
    # Nothing over nothing says nothing; something over nothing is beyond every end.
    known = drawn[~np.isnan(drawn)]
    if not len(known):
        return None
    low, high = (float(end) for end in np.percentile(known, [_LOW, _HIGH]))
    return Ratio(value, low, high) if all(map(math.isfinite, (value, low, high))) else None
