"""Counters that only grow, until they begin again: rates and recent percentiles out of them. Pure.

Times are seconds of whichever monotonic clock the readings carry; the same one for all calls of an object.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from pdctl.watch.snapshot import Percentiles

SLOTS = 12
"""Parts of a window. It is as long as asked for, give or take one of them."""


class Rate:
    """Per-second rate of one counter between its last two readings.

    Args:
        gap_s: readings that are further apart give no rate.
    """

    def __init__(self, gap_s: float = 30.0) -> None:
        self._gap_s = gap_s
        self._last: tuple[float, float] | None = None
        self.value: float | None = None

    def read(self, at: float, count: float | None) -> float | None:
        """Take a reading; the rate since the one before. None for a first one, after a gap, or if it began again."""
        if count is None:
            self.forget()
            return None
        last = self._last
        if last is not None and at <= last[0]:
            # The same reading again.
            return self.value
        self._last = (at, count)
        fits = last is not None and count >= last[1] and at - last[0] <= self._gap_s
        self.value = (count - last[1]) / (at - last[0]) if last is not None and fits else None
        return self.value

    def forget(self) -> None:
        """What was read belongs to another process, another boot, or is too long ago."""
        self._last = self.value = None


class Histogram:
    """Increments of a Prometheus histogram between its readings.

    Args:
        gap_s: what happened between readings that are further apart is left out; it cannot be told when it did.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._last: tuple[float, Mapping[float, float]] | None = None

    def read(self, at: float, cumulative: Mapping[float, float]) -> dict[float, float]:
        """Take a reading (upper bound -> observations up to it); the observations since the last one, by bucket.

        A first reading has no increments. If it began again, all that it has is new.
        """
        last, self._last = self._last, (at, cumulative)
        if last is None or at - last[0] > self._gap_s:
            return {}
        before = last[1]
        if before.keys() != cumulative.keys() or any(cumulative[bound] < before[bound] for bound in cumulative):
            before = {}
        increments: dict[float, float] = {}
        below = 0.0
        for bound in sorted(cumulative):
            since = cumulative[bound] - before.get(bound, 0.0)
            # Bounds of one histogram are not written at one moment, so that a sum may seem to shrink.
            increments[bound] = max(0.0, since - below)
            below = max(below, since)
        return increments

    def forget(self) -> None:
        """The next reading is a first one."""
        self._last = None


class Window:
    """Observations of the last seconds, in buckets.

    Args:
        length_s: how far back it reaches.
    """

    def __init__(self, length_s: float) -> None:
        self._slot_s = length_s / SLOTS
        self._slots: deque[tuple[int, dict[float, float]]] = deque(maxlen=SLOTS)

    def add(self, now: float, increments: Mapping[float, float]) -> None:
        """Add observations by upper bound of their bucket."""
        if not increments:
            return
        number = math.floor(now / self._slot_s)
        if not self._slots or self._slots[-1][0] < number:
            self._slots.append((number, {}))
        slot = self._slots[-1][1]
        for bound, count in increments.items():
            slot[bound] = slot.get(bound, 0.0) + count

    def counts(self, now: float) -> dict[float, float]:
        """Observations by bucket, over the window."""
        oldest = math.floor(now / self._slot_s) - SLOTS + 1
        total: dict[float, float] = {}
        for number, slot in self._slots:
            if number >= oldest:
                for bound, count in slot.items():
                    total[bound] = total.get(bound, 0.0) + count
        return total

    def percentiles(self, now: float) -> Percentiles | None:
        """Median and 99th percentile; None if nothing was observed."""
        counts = self.counts(now)
        count = round(sum(counts.values()))
        median, last = quantile(counts, 0.5), quantile(counts, 0.99)
        if not count or median is None or last is None:
            return None
        return Percentiles(p50=median, p99=last, count=count)


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """A quantile of observations in buckets, by straight lines within one.

    Args:
        counts: observations by upper bound of their bucket; the next lower bound is where a bucket begins.
        share: such as 0.99.

    Returns:
        None if there are no observations. Of a bucket without an upper bound, where it begins.
    """
    total = sum(counts.values())
    if total <= 0:
        return None
    wanted = share * total
    below, lower = 0.0, 0.0
    for bound in sorted(counts):
        count = counts[bound]
        if count > 0 and below + count >= wanted:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * max(0.0, min(1.0, (wanted - below) / count))
        below += count
        if not math.isinf(bound):
            lower = bound
    return lower
