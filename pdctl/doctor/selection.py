"""Which checks run: ``--only`` and ``--skip``. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from pdctl.doctor.findings import Check
from pdctl.doctor.registry import AREAS
from pdctl.errors import UsageError


def select(checks: Sequence[Check], *, only: Iterable[str] = (), skip: Iterable[str] = ()) -> tuple[Check, ...]:
    """The checks that are in ``only`` (all if that is empty) and not in ``skip``.

    Args:
        checks: all there are.
        only: ids and areas, several in one text with commas between.
        skip: the same.

    Raises:
        UsageError: a name is neither an id nor an area, or nothing is left.
    """
    wanted = _names(only, checks, "--only")
    unwanted = _names(skip, checks, "--skip")
    chosen = tuple(check for check in checks if (not wanted or _is_in(check, wanted)) and not _is_in(check, unwanted))
    if not chosen:
        raise UsageError("no check is left", hint="--skip leaves out all that --only names")
    return chosen


def find_check(checks: Sequence[Check], name: str) -> Check:
    """The check of that id.

    Raises:
        UsageError: there is none.
    """
    wanted = name.strip().upper()
    for check in checks:
        if check.id == wanted:
            return check
    raise UsageError(f"there is no check {name!r}", hint=_suggestion(wanted, [check.id for check in checks]))


def _names(texts: Iterable[str], checks: Sequence[Check], option: str) -> set[str]:
    known = [*AREAS, *(check.id for check in checks)]
    names = {name.strip().upper() for text in texts for name in text.split(",") if name.strip()}
    for name in sorted(names):
        if name not in known:
            raise UsageError(f"{option}: {name!r} is neither a check nor an area", hint=_suggestion(name, known))
    return names


def _is_in(check: Check, names: set[str]) -> bool:
    return check.id in names or check.area in names


def _suggestion(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    all_of_them = f"areas are {', '.join(AREAS)}; `pdctl doctor list` shows every check"
    return f"did you mean {near[0]}?" if near else all_of_them
