"""Which alerts are told: ``--only`` and ``--skip``. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from pdctl.errors import UsageError
from pdctl.watch.rules.codes import CODES


def select_codes(only: Iterable[str], skip: Iterable[str]) -> Callable[[str], bool]:
    """Whether an alert of a code is wanted.

    Args:
        only: codes (``T002``), their names (``write-stalled``) or first letters (``T``), several in one text with
            commas between; none: all.
        skip: the same, of what is left out.

    Raises:
        UsageError: there is no such code, or nothing is left.
    """
    wanted = _codes(only, "--only") or set(CODES)
    chosen = wanted - _codes(skip, "--skip")
    if not chosen:
        raise UsageError("no alert is left", hint="--skip leaves out all that --only names")
    if chosen == set(CODES):
        return lambda code: True  # noqa: ARG005 - also what this version does not know, of a recording
    return chosen.__contains__


def _codes(texts: Iterable[str], option: str) -> set[str]:
    letters = sorted({code[0] for code in CODES})
    by_name = {entry.name: code for code, entry in CODES.items()}
    found: set[str] = set()
    for name in (part.strip() for text in texts for part in text.split(",")):
        upper = name.upper()
        if upper in letters:
            found |= {code for code in CODES if code.startswith(upper)}
        elif upper in CODES:
            found.add(upper)
        elif name.lower() in by_name:
            found.add(by_name[name.lower()])
        elif name:
            near = difflib.get_close_matches(name, [*by_name, *CODES], n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(CODES))}"
            raise UsageError(f"{option}: there is no alert {name!r}", hint=hint)
    return found
