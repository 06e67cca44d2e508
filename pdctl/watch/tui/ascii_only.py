"""For a terminal that shows no UTF-8: every sign of the dashboard, Textual's own among them, becomes one of ASCII."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from pdctl.watch.tui.format import BARS, ELLIPSIS

SIGNS: Mapping[str, str] = {
    "●": "*",
    "▲": "!",
    "✖": "X",
    "○": "o",
    "·": ".",
    "▸": ">",
    "▼": "v",
    "✓": "+",
    "‖": "=",
    "■": "#",
    "≥": ">",
    "▕": "|",
    "▏": "|",
    "→": ">",
    "←": "<",
    "↑": "^",
    "↓": "v",
    ELLIPSIS: "~",
    **dict(zip(BARS, "__..--=#", strict=True)),
    **dict.fromkeys("▎▍▌▋▊▉", "="),
    **dict.fromkeys("─━═▔▁▄▀", "-"),
    **dict.fromkeys("│┃║▐▌", "|"),
}
"""One column each, as before. What is not here becomes a question mark in each of its columns."""


def shows_unicode(encoding: str | None) -> bool:
    """Whether an output of this encoding can show the dashboard's signs."""
    try:
        "".join(SIGNS).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@lru_cache(maxsize=8192)
def as_ascii(text: str) -> str:
    """The text in ASCII, as many columns wide as before."""
    if text.isascii():
        return text
    return "".join(one if one.isascii() else SIGNS.get(one, "?" * cell_len(one)) for one in text)


class AsciiOnly(LineFilter):
    """Goes over all that is drawn."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The same segments in ASCII; control codes are left as they are."""
        del background
        return [segment if segment.control else Segment(as_ascii(segment.text), segment.style) for segment in segments]
