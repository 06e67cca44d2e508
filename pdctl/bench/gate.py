"""Whether a bench is as good as an earlier one: ``pdctl bench gate``. Pure.

A figure fails only if it rose by more than was allowed *and* its interval shows that it rose at all. A difference
inside the noise is no regression, and is said. What cannot be judged does not pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdctl.bench.results import Cell, Mode, Results
from pdctl.bench.statistics import DRAWS, Ratio, Statistic
from pdctl.bench.summary import (
    Comparison,
    ModeSummary,
    compare_runs,
    complete_runs,
    incomplete_because,
    summarise_mode,
)
from pdctl.errors import UsageError

GATED: tuple[tuple[str, Statistic], ...] = (
    ("ttft", "p50"),
    ("ttft", "p90"),
    ("tpot", "p50"),
    ("tpot", "p90"),
    ("e2e", "p50"),
)
"""What is judged by default. A p99 of the usual 100 requests hangs on one of them."""

MAX_REGRESSION = 0.05


@dataclass(frozen=True)
class GateLine:
    """One figure of one cell and mode.

    Attributes:
        cell: the load.
        mode: which.
        figure: ``ttft``, ``tpot``, ``itl`` or ``e2e``.
        statistic: of the figure.
        ratio: candidate / baseline; None if it cannot be told.
        passed: whether it may stay so.
        words: what was found, with the reason.
    """

    cell: Cell
    mode: Mode
    figure: str
    statistic: Statistic
    ratio: Ratio | None
    passed: bool
    words: str


@dataclass(frozen=True)
class GateOutcome:
    """What the gate says.

    Attributes:
        passed: whether the candidate is good enough.
        lines: every figure.
        problems: why it fails beside its figures: errors, wrong answers, what is missing.
        notes: what is worth knowing and fails nothing.
    """

    passed: bool
    lines: tuple[GateLine, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


def judge(
    baseline: Results,
    candidate: Results,
    *,
    max_regression: float = MAX_REGRESSION,
    figures: Sequence[tuple[str, Statistic]] = GATED,
    draws: int = DRAWS,
) -> GateOutcome:
    """Set a candidate against a baseline, cell by cell and mode by mode.

    Whether the two may be compared at all is :func:`pdctl.bench.comparable.check_comparable`'s to say.

    Args:
        baseline: how it was.
        candidate: how it is.
        max_regression: share by which a time may rise, as a fraction (0.05).
        figures: what is judged: times alone, lower is better.
        draws: of the bootstrap.

    Raises:
        UsageError: the baseline is invalid, or holds nothing to compare with.
    """
    if baseline.invalid_because:
        raise UsageError(
            f"the baseline is invalid: {baseline.invalid_because}", hint="give a baseline whose answers were right"
        )
    if not any(run.good for run in complete_runs(baseline.runs)):
        raise UsageError(
            "the baseline has no request that was answered in a complete run", hint="measure the baseline again"
        )
    problems, notes = _whole(baseline, candidate)
    lines: list[GateLine] = []
    for cell in baseline.cells:
        for mode in baseline.modes:
            measured = baseline.of(cell, mode), candidate.of(cell, mode)
            before, after = (complete_runs(runs) for runs in measured)
            if not measured[0]:
                continue
            if not after:
                partial = "only partial in" if measured[1] else "not measured in"
                problems.append(f"{cell.name}, {mode}: {partial} the candidate")
                continue
            if not before:
                notes.append(f"{cell.name}, {mode}: only partial in the baseline, so not judged")
                continue
            old = summarise_mode(before, mode=mode, rounds=baseline.settings.rounds)
            new = summarise_mode(after, mode=mode, rounds=candidate.settings.rounds)
            # Errors and answers of a run that was cut short count all the same.
            whole = summarise_mode(measured[1], mode=mode, rounds=candidate.settings.rounds)
            problems += [f"{cell.name}, {mode}: {text}" for text in _beside_time(old, whole)]
            if whole.answers is not None and whole.answers.error and whole.answers.compared:
                check = whole.answers
                notes.append(
                    f"{cell.name}, {mode}: {check.compared} of {check.wanted} answers compared in the candidate; "
                    f"{check.error}"
                )
            comparisons = compare_runs(
                (mode, after),
                (mode, before),
                seed=candidate.settings.seed,
                draws=draws,
                compared=figures,
                paired=False,
            )
            for comparison in comparisons:
                if comparison.figure in old.figures:
                    lines.append(_line(cell, mode, comparison, max_regression, comparison.figure in new.figures))
                else:
                    notes.append(f"{cell.name}, {mode}: {_name(comparison)} is not in the baseline, so not judged")
    passed = not problems and all(line.passed for line in lines)
    return GateOutcome(passed, tuple(lines), tuple(problems), tuple(notes))


def parse_share(text: str) -> float:
    """A share as the user writes it: ``5%`` or ``0.05``.

    Raises:
        UsageError: it is none, is negative, or is 1 or more without a per cent sign (``5`` would be five times).
    """
    plain = text.strip()
    percent = plain.endswith("%")
    try:
        value = float(plain.removesuffix("%").strip())
    except ValueError:
        value = math.nan
    hint = "write it as 5% or 0.05"
    if not math.isfinite(value) or "_" in plain:
        raise UsageError(f"{text!r} is no share", hint=hint)
    if value < 0:
        raise UsageError(f"{text!r} is below zero", hint=hint)
    if not percent and value >= 1:
        raise UsageError(f"{text!r} could be a percentage or a factor", hint=f"write {plain}% or a number below 1")
    return value / 100 if percent else value


def _whole(baseline: Results, candidate: Results) -> tuple[list[str], list[str]]:
    problems, notes = [], []
    if candidate.invalid_because:
        problems.append(f"the candidate is invalid: {candidate.invalid_because}")
    if reason := incomplete_because(candidate):
        problems.append(f"the candidate is incomplete: {reason}")
    if reason := incomplete_because(baseline):
        notes.append(f"the baseline is incomplete, and only what it has is judged: {reason}")
    known = {(run.cell, run.mode) for run in baseline.runs}
    extra = dict.fromkeys((run.cell, run.mode) for run in candidate.runs if (run.cell, run.mode) not in known)
    notes += [f"{cell.name}, {mode}: not in the baseline, so not judged" for cell, mode in extra]
    return problems, [*_single(baseline, candidate), *notes]


def _single(baseline: Results, candidate: Results) -> list[str]:
    """What intervals do not cover, where a side has but one round of something."""
    found = []
    for name, results in (("baseline", baseline), ("candidate", candidate)):
        rounds: dict[tuple[Cell, Mode], set[int]] = {}
        for run in complete_runs(results.runs):
            rounds.setdefault((run.cell, run.mode), set()).add(run.round)
        single = [key for key, numbers in rounds.items() if len(numbers) == 1]
        if single:
            of = (
                ""
                if len(single) == len(rounds)
                else " of " + "; ".join(f"{cell.name}, {mode}" for cell, mode in single)
            )
            found.append(
                f"the {name} has a single round{of}: the intervals cover nothing of what changes from one round to the "
                "next, such as other load on the hosts"
            )
    return found


def _beside_time(old: ModeSummary, new: ModeSummary) -> list[str]:
    found = []
    before, after = old.error_share, new.error_share
    if after is None:
        found.append("no request was made")
    elif after > (before or 0.0):
        why = next(iter(new.errors), "")
        found.append(
            f"{new.failed} of {new.requests} requests failed, before {old.failed} of {old.requests} (mostly: {why})"
        )
    if old.answers is not None and old.answers.compared and not (new.answers is not None and new.answers.compared):
        why = new.answers.error if new.answers is not None and new.answers.error else "none was asked for"
        found.append(f"no answer was compared with that of prefill alone: {why}")
    return found


def _line(cell: Cell, mode: Mode, comparison: Comparison, allowed: float, measured: bool) -> GateLine:
    passed, words = _judged(comparison, allowed, measured)
    if comparison.thin and comparison.samples:
        words += f" (only {comparison.samples} values: says little)"
    return GateLine(cell, mode, comparison.figure, comparison.statistic, comparison.ratio, passed, words)


def _judged(comparison: Comparison, allowed: float, measured: bool) -> tuple[bool, str]:
    ratio = comparison.ratio
    if not measured:
        return False, "not measured in the candidate"
    if ratio is None:
        return False, "too few values to judge"
    limit = 1 + allowed
    if ratio.value <= limit:
        return True, comparison.verdict
    if ratio.low <= 1:
        return True, f"above {limit:.4g}, but inside the noise: no regression that is shown"
    return False, f"{comparison.verdict}: more than {allowed * 100:.4g} % is not allowed"


def _name(comparison: Comparison) -> str:
    return f"{comparison.figure} {comparison.statistic}"
