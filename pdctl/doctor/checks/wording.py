"""Figures and lists as they are written in findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable

KIB, MIB, GIB = 2**10, 2**20, 2**30

_UNITS = (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))


def size(count: int | None) -> str:
    """Bytes with a unit, at most one decimal: ``64 KiB``, ``1.5 GiB``. None is ``unlimited``."""
    if count is None:
        return "unlimited"
    for unit, factor in _UNITS:
        if abs(count) >= factor:
            # Whole numbers only: a figure from outside may be too large for a float.
            tenths = abs(count) * 10 // factor
            sign = "-" if count < 0 else ""
            return f"{sign}{tenths // 10}.{tenths % 10} {unit}" if tenths % 10 else f"{sign}{tenths // 10} {unit}"
    return f"{count} bytes"


def listing(names: Iterable[object], limit: int = 8) -> str:
    """Names with commas; a long list is cut and says how many more there are."""
    given = [str(name) for name in names]
    more = len(given) - limit
    return ", ".join(given) if more <= 0 else f"{', '.join(given[:limit])}, and {more} more"


def plural(count: int, one: str, many: str = "") -> str:
    """``1 device``, ``2 devices``."""
    return f"{count} {one if count == 1 else many or one + 's'}"
