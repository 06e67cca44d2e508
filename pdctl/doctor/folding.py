"""Many hosts in few words: ``12 hosts (p1-p12)``, and pairs of them in few rows and columns. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

FEW = 3
"""Up to so many names are written out as they are."""
MOST_NAMES = 16
"""After so many names (or ranges of names) the rest is only counted."""

_NUMBERED = re.compile(r"(.*?)(\d+)", re.DOTALL)


def fold_names(names: Iterable[str], *, most: int = MOST_NAMES) -> str:
    """``p1, p2`` for few names, else with their number, consecutive ones as a range: ``12 hosts (p1-p12)``."""
    distinct = list(dict.fromkeys(names))
    if len(distinct) <= FEW:
        return ", ".join(distinct)
    parts = ranges(distinct)
    shown = ", ".join(parts[:most])
    # A range counts as one part: say how many names are left, not how many parts.
    left = sum(_size(part, distinct) for part in parts[most:])
    return f"{len(distinct)} hosts ({shown}{f' and {left} more' if left else ''})"


def ranges(names: Sequence[str]) -> list[str]:
    """Names with runs of three or more consecutive numbers put together: ``p1-p12``. Keeps the order of the first."""
    stems: dict[tuple[str, int], dict[int, str]] = {}
    first: dict[str, int] = {name: position for position, name in enumerate(names)}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match and len(match[2]) <= 9:
            # `n01` and `n1` are different names; only names written alike make a range.
            padded = len(match[2]) if match[2].startswith("0") else 0
            stems.setdefault((match[1], padded), {})[int(match[2])] = name
    folded: dict[str, str] = {}
    swallowed: set[str] = set()
    for numbered in stems.values():
        for run in _runs(sorted(numbered)):
            if len(run) >= 3:
                members = [numbered[number] for number in run]
                head = min(members, key=first.__getitem__)
                folded[head] = f"{members[0]}-{members[-1]}"
                swallowed.update(member for member in members if member != head)
    return [folded.get(name, name) for name in names if name not in swallowed]


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _size(part: str, names: Sequence[str]) -> int:
    if part in names:
        return 1
    for position, letter in enumerate(part):
        if letter == "-" and part[:position] in names and part[position + 1 :] in names:
            low, high = _NUMBERED.fullmatch(part[:position]), _NUMBERED.fullmatch(part[position + 1 :])
            if low and high:
                return int(high[2]) - int(low[2]) + 1
    return 1


def fold_pairs(pairs: Iterable[tuple[str, str]], *, arrow: str) -> str:
    """``p1-p3 -> d1, d2; p4 -> d1``: sources with the same targets together."""
    targets: dict[str, dict[str, None]] = {}
    for source, target in pairs:
        targets.setdefault(source, {})[target] = None
    alike: dict[tuple[str, ...], list[str]] = {}
    for source, found in targets.items():
        alike.setdefault(tuple(found), []).append(source)
    return "; ".join(
        f"{', '.join(ranges(sources)[:MOST_NAMES])} {arrow} {', '.join(ranges(found)[:MOST_NAMES])}"
        for found, sources in alike.items()
    )


def fold_grid(cells: Mapping[tuple[str, str], T]) -> tuple[list[list[str]], list[list[str]], list[list[T | None]]]:
    """Rows and columns of a table of pairs, those that are alike put together.

    Args:
        cells: what is known, by source and target.

    Returns:
        names of each row, names of each column, and the cells: None where nothing is known.
    """
    sources = list(dict.fromkeys(source for source, _ in cells))
    targets = list(dict.fromkeys(target for _, target in cells))
    rows: dict[tuple[T | None, ...], list[str]] = {}
    for source in sources:
        rows.setdefault(tuple(cells.get((source, target)) for target in targets), []).append(source)
    columns: dict[tuple[T | None, ...], list[str]] = {}
    for position, target in enumerate(targets):
        columns.setdefault(tuple(row[position] for row in rows), []).append(target)
    return list(rows.values()), list(columns.values()), [list(row) for row in zip(*columns, strict=True)]
