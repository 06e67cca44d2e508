"""Comparing version numbers of drivers, libraries and kernels, whose endings are anything. Pure."""

from __future__ import annotations

import re

# The numbers at the start; endings such as "g", "amzn1.0" or "-1021-aws" count for nothing.
_NUMBERS = re.compile(r"\s*v?([0-9]{1,9}(?:\.[0-9]{1,9})*)")


def numbers(version: str | None) -> tuple[int, ...] | None:
    """``(2, 6, 0)`` of ``2.6.0amzn1.0``; None if it does not start with a number."""
    match = _NUMBERS.match(version or "")
    return tuple(map(int, match[1].split("."))) if match else None


def at_least(version: str | None, minimum: str) -> bool | None:
    """Whether a version is this one or newer; None if that cannot be told."""
    have, want = numbers(version), numbers(minimum)
    if have is None or want is None:
        return None
    length = max(len(have), len(want))
    return have + (0,) * (length - len(have)) >= want + (0,) * (length - len(want))
