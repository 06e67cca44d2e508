"""What is told of a bench: figures by cell and mode, and how the modes compare. Pure.

Tables, the HTML report, the gate and ``--json`` all read these types, whether they come from one file
(:func:`summarise`) or from two (:func:`pdctl.bench.two_files.summarise_two`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pdctl.bench.results import (
    COUNT_LIMIT,
    MODE_WORDS,
    SECONDS_LIMIT,
    STAGES,
    AnswerCheck,
    Cell,
    CellRun,
    Mode,
    Results,
    StageTimes,
    Transfers,
    sample_figure,
)
from pdctl.bench.statistics import (
    DRAWS,
    Percentiles,
    Ratio,
    Rounds,
    Statistic,
    is_thin,
    percentiles,
    ratios,
    round_ratio,
)

FIGURES: tuple[str, ...] = ("ttft", "tpot", "itl", "e2e")
"""Times of a request: to the first token, per token after it, between two tokens, to the last one."""

RATES: tuple[str, ...] = ("requests_per_s", "output_tokens_per_s")
"""What a cell was served in a second. Higher is better; of everything else, lower is."""

COMPARED: tuple[tuple[str, Statistic], ...] = (
    ("ttft", "p50"),
    ("ttft", "p90"),
    ("ttft", "p99"),
    ("tpot", "p50"),
    ("tpot", "p90"),
    ("tpot", "p99"),
    ("itl", "p50"),
    ("itl", "p99"),
    ("e2e", "p50"),
    ("e2e", "p99"),
    ("requests_per_s", "mean"),
    ("output_tokens_per_s", "mean"),
)
"""Every figure and statistic that modes are compared in."""

NO_DIFFERENCE = "no difference beyond the noise"
NOT_MEASURED = "not measured"
TOO_FEW = "too few to tell"

_MOST_REASONS = 5
_REASON_WIDTH = 120
_MOST_TROUBLE = 20

_T = TypeVar("_T", int, float)


@dataclass(frozen=True)
class ModeSummary:
    """One cell in one mode, over its rounds.

    Attributes:
        mode: the column: the mode's name, unique in its summary. Of two files, with the file's name.
        label: the column in words.
        rounds: measured.
        requests: sent and counted, with those that failed.
        failed: not answered in full.
        errors: how many by reason (a line), the most frequent first; what is rare is put together.
        figures: times in seconds by name in :data:`FIGURES`; without those that nothing was measured of. Of all runs,
            and so marked by ``complete``; ratios are of complete runs alone.
        requests_per_s: answered, over the time of all complete runs; None if there are none, or no time passed.
        output_tokens_per_s: of what was answered, likewise.
        stages: mean over requests; None if it could not be told.
        transfers: sums; None only in what no run counted.
        answers: sums; None if none was asked for.
        complete: False if a round was cut short, lost an instance, or is missing.
        trouble: what went wrong beside single requests, by round.
    """

    mode: str
    label: str
    rounds: int
    requests: int
    failed: int
    errors: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, Percentiles] = field(default_factory=dict)
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    stages: StageTimes | None = None
    transfers: Transfers = field(default_factory=Transfers)
    answers: AnswerCheck | None = None
    complete: bool = True
    trouble: tuple[str, ...] = ()

    @property
    def error_share(self) -> float | None:
        """Failed of all requests; None if there were none."""
        return self.failed / self.requests if self.requests else None


@dataclass(frozen=True)
class Comparison:
    """A figure of one mode divided by that of another.

    Attributes:
        mode: above the line (a :attr:`ModeSummary.mode`).
        against: below the line.
        figure: in :data:`FIGURES` or :data:`RATES`.
        statistic: of the figure; ``mean`` (over rounds) for rates.
        ratio: with its interval; None if it cannot be told.
        samples: values on the side with fewer; rounds for rates.
        thin: so few values that this percentile says little.
    """

    mode: str
    against: str
    figure: str
    statistic: Statistic
    ratio: Ratio | None
    samples: int = 0
    thin: bool = False

    @property
    def sign(self) -> int:
        """-1 if the interval shows that ``mode`` is lower, 1 if higher, 0 if it shows neither."""
        if self.ratio is None:
            return 0
        if self.ratio.high < 1 and self.ratio.value < 1:
            return -1
        return 1 if self.ratio.low > 1 and self.ratio.value > 1 else 0

    @property
    def better(self) -> bool | None:
        """Whether ``mode`` is the better one; None if the interval does not show it."""
        if not self.sign:
            return None
        return (self.sign > 0) == (self.figure in RATES)

    @property
    def verdict(self) -> str:
        """In words, never more than the interval shows: ``12 % lower``, ``no difference beyond the noise``."""
        if self.ratio is None:
            return TOO_FEW if self.samples else NOT_MEASURED
        if not self.sign:
            return NO_DIFFERENCE
        if self.ratio.value >= 3:
            return f"{self.ratio.value:.3g} times as high"
        percent = abs(self.ratio.value - 1) * 100
        amount = f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %" if percent >= 0.1 else "less than 0.1 %"
        return f"{amount} {'higher' if self.sign > 0 else 'lower'}"


@dataclass(frozen=True)
class CellSummary:
    """One load.

    Attributes:
        cell: which.
        modes: those that were measured, in the order of :attr:`Summary.modes`.
        comparisons: by pair of modes, in the order of :data:`COMPARED`.
    """

    cell: Cell
    modes: tuple[ModeSummary, ...]
    comparisons: tuple[Comparison, ...] = ()

    def of(self, mode: str) -> ModeSummary | None:
        """The summary of a mode; None if the cell was not measured in it."""
        return next((one for one in self.modes if one.mode == mode), None)


@dataclass(frozen=True)
class Summary:
    """A whole bench.

    Attributes:
        cells: all that were measured.
        modes: all columns.
        invalid_because: why the figures must not be used; empty if they may.
        incomplete_because: why not all of what was asked for is there; empty if it is.
    """

    cells: tuple[CellSummary, ...]
    modes: tuple[str, ...]
    invalid_because: str = ""
    incomplete_because: str = ""


def summarise(results: Results, *, draws: int = DRAWS) -> Summary:
    """Figures of every cell and mode, and every later mode divided by every earlier one (``pull,push``: push / pull).

    Args:
        results: what was measured.
        draws: of the bootstrap.
    """
    return Summary(
        cells=tuple(_summarise_cell(results, cell, draws) for cell in results.cells),
        modes=results.modes,
        invalid_because=results.invalid_because,
        incomplete_because=incomplete_because(results),
    )


def incomplete_because(results: Results) -> str:
    """Why results are not all that was asked for; empty if they are."""
    if not results.complete:
        return results.incomplete_because or "the bench did not come to its end"
    partial = [run for run in results.runs if not run.complete]
    if not partial:
        return ""
    first = partial[0]
    why = f": {first.trouble[0]}" if first.trouble else ""
    many = f", first of {len(partial)}" if len(partial) > 1 else ""
    return f"{first.mode}, {first.cell.name}, round {first.round} is partial{many}{why}"


def _summarise_cell(results: Results, cell: Cell, draws: int) -> CellSummary:
    runs = {mode: found for mode in results.modes if (found := results.of(cell, mode))}
    measured = list(runs)
    comparisons = [
        comparison
        for place, against in enumerate(measured)
        for mode in measured[place + 1 :]
        for comparison in compare_runs(
            (mode, runs[mode]), (against, runs[against]), seed=results.settings.seed, draws=draws
        )
    ]
    modes = [summarise_mode(found, mode=mode, rounds=results.settings.rounds) for mode, found in runs.items()]
    return CellSummary(cell, tuple(modes), tuple(comparisons))


def summarise_mode(
    runs: Sequence[CellRun], *, mode: Mode, rounds: int, column: str = "", label: str = ""
) -> ModeSummary:
    """One cell in one mode.

    Args:
        runs: by round.
        mode: which.
        rounds: that were asked for.
        column: another name of the column than the mode's.
        label: the column in other words than the mode's.
    """
    samples = [sample for run in runs for sample in run.samples]
    good = [sample for run in runs for sample in run.good]
    errors = Counter(_reason(sample.error) for sample in samples if not sample.ok)
    figures = {
        figure: percentiles(value for sample in good for value in sample_figure(sample, figure)) for figure in FIGURES
    }
    whole = complete_runs(runs)
    duration = sum(run.duration_s for run in whole)
    served = [sample for run in whole for sample in run.good]
    measured = len({run.round for run in runs})
    return ModeSummary(
        mode=column or mode,
        label=label or MODE_WORDS[mode],
        rounds=measured,
        requests=len(samples),
        failed=len(samples) - len(good),
        errors=_most_frequent(errors),
        figures={figure: made for figure, made in figures.items() if made is not None},
        requests_per_s=_per_second(len(served), duration),
        output_tokens_per_s=_per_second(sum(sample.output_tokens for sample in served), duration),
        stages=_stages(runs),
        transfers=_transfers([run.transfers for run in runs]),
        answers=_answers([run.answers for run in runs if run.answers is not None]),
        complete=measured >= rounds and all(run.complete for run in runs),
        trouble=_trouble(runs),
    )


def complete_runs(runs: Iterable[CellRun]) -> list[CellRun]:
    """Those whose times may be compared: of a run that was cut short the slow requests are missing."""
    return [run for run in runs if run.complete]


def compare_runs(
    mine: tuple[str, Sequence[CellRun]],
    other: tuple[str, Sequence[CellRun]],
    *,
    seed: int,
    draws: int = DRAWS,
    compared: Sequence[tuple[str, Statistic]] = COMPARED,
    paired: bool = True,
) -> list[Comparison]:
    """``mine / other`` in every figure, over complete runs alone.

    Args:
        mine: name of the column, and its runs of one cell.
        other: likewise.
        seed: of the bootstrap.
        draws: of the bootstrap.
        compared: figures and statistics; those in :data:`RATES` go by ``mean``.
        paired: whether the rounds of both took turns. Then only rounds that both have are compared.
    """
    left, right = (_by_round(complete_runs(runs)) for _, runs in (mine, other))
    if paired:
        common = left.keys() & right.keys()
        left = {number: runs for number, runs in left.items() if number in common}
        right = {number: runs for number, runs in right.items() if number in common}
    made: dict[tuple[str, Statistic], tuple[Ratio | None, int]] = {}
    for figure in dict.fromkeys(figure for figure, _ in compared):
        statistics = [statistic for one, statistic in compared if one == figure]
        if figure in RATES:
            above, below = _rates(left, figure), _rates(right, figure)
            found = dict.fromkeys(statistics, round_ratio(above, below, paired=paired and len(above) == len(below)))
            samples = min(len(above), len(below))
        else:
            ours, theirs = _values(left, figure), _values(right, figure)
            found = ratios(ours, theirs, statistics=statistics, seed=seed, draws=draws, paired=paired)
            samples = min(_count(ours), _count(theirs))
        made.update({(figure, statistic): (value, samples) for statistic, value in found.items()})
    return [
        Comparison(mine[0], other[0], figure, statistic, value, samples, is_thin(statistic, samples))
        for (figure, statistic) in compared
        for value, samples in [made[figure, statistic]]
    ]


def _by_round(runs: Iterable[CellRun]) -> dict[int, list[CellRun]]:
    found: dict[int, list[CellRun]] = {}
    for run in sorted(runs, key=lambda run: run.round):
        found.setdefault(run.round, []).append(run)
    return found


def _values(rounds: Mapping[int, Sequence[CellRun]], figure: str) -> Rounds:
    return [[sample_figure(sample, figure) for run in runs for sample in run.good] for runs in rounds.values()]


def _count(rounds: Rounds) -> int:
    return sum(len(request) for one in rounds for request in one)


def _rates(rounds: Mapping[int, Sequence[CellRun]], figure: str) -> list[float]:
    found = []
    for runs in rounds.values():
        amount = sum(
            len(run.good) if figure == "requests_per_s" else sum(sample.output_tokens for sample in run.good)
            for run in runs
        )
        rate = _per_second(amount, sum(run.duration_s for run in runs))
        if rate is not None:
            found.append(rate)
    return found


def _per_second(amount: int, seconds: float) -> float | None:
    """None if no run took time, or so little that it is no rate."""
    rate = amount / seconds if seconds else math.inf
    return rate if math.isfinite(rate) else None


def _reason(error: str) -> str:
    line = next((line.strip() for line in error.splitlines() if line.strip()), "no token came")
    return line if len(line) <= _REASON_WIDTH else line[: _REASON_WIDTH - 3] + "..."


def _most_frequent(errors: Counter[str]) -> dict[str, int]:
    if len(errors) <= _MOST_REASONS:
        return dict(errors.most_common())
    shown = dict(errors.most_common(_MOST_REASONS - 1))
    rest = sum(errors.values()) - sum(shown.values())
    other = f"{len(errors) - len(shown)} other reasons"
    return {**shown, other: shown.get(other, 0) + rest}


def _trouble(runs: Sequence[CellRun]) -> tuple[str, ...]:
    rounds: dict[str, list[int]] = {}
    for run in runs:
        for text in dict.fromkeys(run.trouble):
            rounds.setdefault(text, []).append(run.round)
    found = [
        f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: {text}"
        for text, numbers in rounds.items()
    ]
    if len(found) <= _MOST_TROUBLE:
        return tuple(found)
    return (*found[: _MOST_TROUBLE - 1], f"and {len(found) - _MOST_TROUBLE + 1} more")


def _stages(runs: Sequence[CellRun]) -> StageTimes | None:
    """Means over requests. A stage that some round could not tell apart is part of ``rest`` in all of them."""
    known = [run.stages for run in runs if run.stages is not None and run.stages.requests]
    if not known:
        return None
    requests = sum(one.requests for one in known)
    seconds: dict[str, float] = {}
    folded: list[str] = []
    names = dict.fromkeys([*STAGES, *(name for one in known for name in one.seconds)])
    for name in names:
        having = [one for one in known if name in one.seconds]
        total = sum(one.seconds[name] * (one.requests / requests) for one in having)
        if not having:
            continue
        if name != "rest" and len(having) < len(known):
            folded.append(name)
        into = "rest" if name in folded else name
        seconds[into] = max(-SECONDS_LIMIT, min(SECONDS_LIMIT, seconds.get(into, 0.0) + total))
    # Where ``rest`` was first made by a stage before it, it still stands last.
    if "rest" in seconds:
        seconds["rest"] = seconds.pop("rest")
    notes = dict.fromkeys(note for one in known for note in one.notes)
    if folded:
        notes[f"{', '.join(folded)}: not told apart in every round, so part of rest"] = None
    if len(known) < len(runs):
        notes[f"stages are known of {len(known)} of {len(runs)} rounds"] = None
    return StageTimes(seconds, _beside(known), min(requests, COUNT_LIMIT), tuple(notes))


def _beside(known: Sequence[StageTimes]) -> dict[str, float]:
    found = {}
    for name in dict.fromkeys(name for one in known for name in one.beside):
        having = [one for one in known if name in one.beside]
        requests = sum(one.requests for one in having)
        mean = sum(one.beside[name] * (one.requests / requests) for one in having)
        found[name] = max(-SECONDS_LIMIT, min(SECONDS_LIMIT, mean))
    return found


def _transfers(counted: Sequence[Transfers]) -> Transfers:
    # How many requests is not known of all rounds, if it is not of one that computed something again.
    unknown = any(one.recomputed_tokens and one.recomputed_requests is None for one in counted)
    return Transfers(
        completed=_sum(one.completed for one in counted),
        failed=_sum(one.failed for one in counted),
        expired=_sum(one.expired for one in counted),
        bytes=_sum(one.bytes for one in counted),
        seconds=_sum(one.seconds for one in counted),
        recomputed_requests=None if unknown else _sum(one.recomputed_requests for one in counted),
        recomputed_tokens=_sum(one.recomputed_tokens for one in counted),
    )


def _sum(values: Iterable[_T | None]) -> _T | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    total = sum(known[1:], known[0])
    # Sums of absurd figures are as absurd as the largest one.
    return min(total, type(total)(SECONDS_LIMIT if isinstance(total, float) else COUNT_LIMIT))


def _answers(checks: Sequence[AnswerCheck]) -> AnswerCheck | None:
    if not checks:
        return None
    errors = Counter(one.error for one in checks if one.error)
    return AnswerCheck(
        compared=_count_of(one.compared for one in checks),
        equal=_count_of(one.equal for one in checks),
        unstable=_count_of(one.unstable for one in checks),
        different=tuple(difference for one in checks for difference in one.different),
        error="; ".join(f"{text} (in {count} rounds)" if count > 1 else text for text, count in errors.items()),
        asked=_count_of(one.wanted for one in checks),
    )


def _count_of(counts: Iterable[int]) -> int:
    return min(sum(counts), COUNT_LIMIT)
