"""Two results beside each other: ``pdctl bench compare A.json B.json``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from pdctl.bench.results import MODE_WORDS, Cell, CellRun, Mode, Results
from pdctl.bench.statistics import DRAWS
from pdctl.bench.summary import CellSummary, Summary, compare_runs, incomplete_because, summarise_mode


def summarise_two(baseline: Results, candidate: Results, names: tuple[str, str], *, draws: int = DRAWS) -> Summary:
    """Both files in one summary: every mode of each is a column, and the candidate is divided by the baseline.

    A mode is compared with the same mode of the other file. If the files have no mode in common, every mode of the
    candidate is compared with every mode of the baseline. The rounds of two files did not take turns, so what changed
    on the hosts in between is in the ratio, and in no interval. Runs that are not complete are in no ratio.

    Args:
        baseline: below the line.
        candidate: above the line.
        names: of the files, in this order.
        draws: of the bootstrap.
    """
    files = list(zip(_short(names), (baseline, candidate), strict=True))
    shared = set(baseline.modes) & set(candidate.modes)
    pairs = [
        (mode, against)
        for mode in candidate.modes
        for against in baseline.modes
        if (mode == against if shared else True)
    ]
    cells = dict.fromkeys([*baseline.cells, *candidate.cells])
    return Summary(
        cells=tuple(_cell(cell, files, pairs, draws) for cell in cells),
        modes=tuple(_column(mode, name) for name, results in files for mode in results.modes),
        invalid_because=_reasons([(name, results.invalid_because) for name, results in files]),
        incomplete_because=_reasons([(name, incomplete_because(results)) for name, results in files]),
    )


def _cell(
    cell: Cell, files: Sequence[tuple[str, Results]], pairs: Sequence[tuple[Mode, Mode]], draws: int
) -> CellSummary:
    (below, baseline), (above, candidate) = files
    modes = [
        summarise_mode(
            runs,
            mode=mode,
            rounds=results.settings.rounds,
            column=_column(mode, name),
            label=f"{MODE_WORDS[mode]}, {name}",
        )
        for name, results in files
        for mode in results.modes
        if (runs := results.of(cell, mode))
    ]
    comparisons = [
        comparison
        for mode, against in pairs
        if (mine := candidate.of(cell, mode)) and (other := baseline.of(cell, against))
        for comparison in compare_runs(
            _named(mode, above, mine),
            _named(against, below, other),
            seed=candidate.settings.seed,
            draws=draws,
            paired=False,
        )
    ]
    return CellSummary(cell, tuple(modes), tuple(comparisons))


def _named(mode: Mode, name: str, runs: Sequence[CellRun]) -> tuple[str, Sequence[CellRun]]:
    return _column(mode, name), runs


def _column(mode: str, name: str) -> str:
    return f"{mode}, {name}"


def _short(names: tuple[str, str]) -> tuple[str, str]:
    """Names that tell the files apart: of their last parts as few as needed."""
    parts = [PurePath(name).parts or (name,) for name in names]
    for count in range(1, max(map(len, parts)) + 1):
        first, second = (str(PurePath(*one[-count:])) for one in parts)
        if first != second:
            return first, second
    return f"{names[0]} (1)", f"{names[1]} (2)"


def _reasons(reasons: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)
