"""From figures and foreign texts to what is drawn. Pure: no Textual, no clock, no state.

Missing is not zero: a figure that was not read, or that cannot be one (NaN, below zero), is ``-``.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from rich.cells import cell_len

from pdctl.watch.snapshot import Percentiles

Tone = Literal["plain", "good", "warn", "bad", "dim", "accent", "title"]
"""What a piece of text means. The theme gives it a colour; glyphs and words say the same without one."""

MISSING = "-"
ELLIPSIS = "…"
BARS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COMBINING_LIMIT = 2


@dataclass(frozen=True)
class Cell:
    """A piece of text and what it means."""

    text: str
    tone: Tone = "plain"


Line = tuple[Cell, ...]
NOTHING = Cell(MISSING, "dim")


def _shown(character: str) -> bool:
    """Whether a terminal shows this character at a width that everybody agrees on, and does nothing else with it."""
    if character < "\x7f":
        return character >= " "
    if 0xFE00 <= ord(character) <= 0xFE0F or 0x1F1E6 <= ord(character) <= 0x1F1FF:
        return False  # variation selectors and halves of flags change the width of their neighbours
    if 0x1F3FB <= ord(character) <= 0x1F3FF:
        return False  # so do skin tones
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Me")


def _escaped(character: str) -> str:
    code = ord(character)
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@lru_cache(maxsize=4096)
def tail(text: str, width: int) -> str:
    """The end of an id that is longer than ``width``: routers begin all of theirs with the same words."""
    return clean(text if len(text) <= width else ELLIPSIS + text[1 - width :])


def model_name(model: str) -> str:
    """The name of a model; of a folder its last part."""
    return clean(model.rstrip("/").rsplit("/", 1)[-1] if model.startswith(("/", "~")) else model)


def clean(text: str, limit: int = 1024) -> str:
    """A foreign text in one line that can do nothing to a terminal or a layout.

    Control characters, invisible ones, and those that turn the direction of writing are written out (``\\x1b``). No
    more than ``limit`` characters are looked at.
    """
    cut = text[:limit]
    if cut.isascii() and cut.isprintable():
        return cut if len(text) <= limit else cut + ELLIPSIS
    pieces = []
    marks = 0
    for character in cut:
        marks = marks + 1 if unicodedata.combining(character) or unicodedata.category(character) == "Mn" else 0
        shown = _shown(character) and marks <= _COMBINING_LIMIT
        pieces.append(character if shown else _escaped(character))
    return "".join(pieces) + (ELLIPSIS if len(text) > limit else "")


@lru_cache(maxsize=8192)
def fit(text: str, width: int) -> str:
    """The text in at most ``width`` columns of a terminal, with ``…`` in place of what does not fit."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return text
    kept = ""
    used = 0
    for character in text:
        used += cell_len(character)
        if used > width - 1:
            break
        kept += character
    return kept + ELLIPSIS


def fit_left(text: str, width: int) -> str:
    """The same, at the right edge of ``width`` columns, as figures stand."""
    fitted = fit(text, width)
    return " " * (width - cell_len(fitted)) + fitted


def fit_right(text: str, width: int) -> str:
    """The same, with room after it."""
    fitted = fit(text, width)
    return fitted + " " * (width - cell_len(fitted))


def figure(value: float | None) -> float | None:
    """The value if it can be a measurement: finite and not below zero."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def seconds(value: float | None) -> str:
    """``38 ms``, ``7.2 s``, ``42 s``, ``3m05s``, ``2h05m``, ``3d04h``."""
    known = figure(value)
    if known is None:
        return MISSING
    if known < 0.00995:
        return f"{known * 1000:.1f} ms"
    if known < 0.9995:
        return f"{known * 1000:.0f} ms"
    if known < 9.95:
        return f"{known:.1f} s"
    if known < 59.5:
        return f"{known:.0f} s"
    whole = round(min(known, 1e12))
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    days = whole // 86400
    return f"{days}d{whole % 86400 // 3600:02d}h" if days <= 9999 else ">9999d"


def whole_seconds(value: float | None) -> str:
    """An age: ``7 s``, ``3m05s``; ``-`` if unknown."""
    known = figure(value)
    if known is None:
        return MISSING
    return f"{known:.0f} s" if known < 59.5 else seconds(known)


def stale(age_s: float | None) -> str:
    """``stale 7 s``."""
    return f"stale {whole_seconds(age_s)}"


def amount(value: float | None) -> str:
    """Bytes: ``1.5 MiB``."""
    known = figure(value)
    if known is None:
        return MISSING
    size = float(known)
    for unit in _UNITS:
        if size < 1023.5 or unit == _UNITS[-1]:
            break
        size /= 1024
    if size >= 1e6:
        return f">999999 {unit}"
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"


def megabytes_per_s(value: float | None) -> str:
    """A rate in 10^6 bytes per second without its unit: ``0.02``, ``12.5``, ``1234``."""
    known = figure(value)
    if known is None:
        return MISSING
    mega = known / 1e6
    if mega >= 1e7:
        return ">9999999"
    if mega == 0:
        return "0"
    return f"{mega:.2f}" if mega < 9.995 else f"{mega:.1f}" if mega < 99.95 else f"{mega:.0f}"


def per_second(value: float | None) -> str:
    """Requests per second: ``12.3``."""
    known = figure(value)
    if known is None:
        return MISSING
    if known >= 1e7:
        return ">9999999"
    return f"{known:.1f}" if known < 99.95 else f"{known:.0f}"


def count(value: float | None) -> str:
    """A whole number."""
    known = figure(value)
    return MISSING if known is None else f"{known:.0f}" if known < 1e9 else f"{known:.1e}"


def share(value: float | None) -> str:
    """0.834 -> ``83 %``."""
    known = figure(value)
    return MISSING if known is None else f"{min(known, 9.99) * 100:.0f} %"


def percentiles(value: Percentiles | None) -> str:
    """``p50 120 ms p99 1.3 s``."""
    known = value if value is not None and value.count > 0 else None
    return f"p50 {seconds(known.p50 if known else None)} p99 {seconds(known.p99 if known else None)}"


def clock_time(unix: float) -> str:
    """``12:03:44Z``, of UTC."""
    if not math.isfinite(unix) or not 0 <= unix < 1e13:
        return MISSING
    whole = int(unix) % 86400
    return f"{whole // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}Z"


def sparkline(values: Sequence[float | None]) -> str:
    """One bar for each value, as high as its part of the largest. A missing value is a gap, zero the lowest bar."""
    known = [figure(value) for value in values]
    top = max((value for value in known if value is not None), default=0.0)
    bars = []
    for value in known:
        if value is None:
            bars.append(" ")
        else:
            bars.append(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] if top > 0 else BARS[0])
    return "".join(bars)


def span_bar(start: float, end: float, total: float, width: int) -> str:
    """A bar from ``start`` to ``end`` of ``total`` on a line of ``width`` columns; one eighth of a column at least."""
    if width <= 0:
        return ""
    if not (math.isfinite(start) and math.isfinite(end) and math.isfinite(total)) or total <= 0:
        return " " * width
    steps = width * 8
    # Limits before rounding: the quotient of two floats may be infinite.
    first = round(max(0.0, min(steps - 1.0, start / total * steps)))
    # A bar begins at a column's edge: terminals have no glyphs for the right part of a column.
    first -= first % 8
    last = max(first + 1, round(max(0.0, min(float(steps), end / total * steps))))
    full, rest = divmod(last - first, 8)
    bar = "█" * full + (_EIGHTHS[rest] if rest else "")
    return (" " * (first // 8) + bar).ljust(width)


def worst(tones: Iterable[Tone]) -> Tone:
    """The worst of some tones; ``plain`` of none."""
    order: tuple[Tone, ...] = ("bad", "warn", "dim", "good", "plain")
    found = set(tones)
    return next((tone for tone in order if tone in found), "plain")
