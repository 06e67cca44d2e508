"""Colours. Every tone also has a glyph or a word, so that nothing is said by colour alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from rich.style import Style
from rich.text import Text
from textual.theme import Theme

from pdctl.watch.tui.format import Line, Tone

THEME = Theme(
    name="pdctl",
    primary="#5fafd7",
    secondary="#87afaf",
    accent="#5fd7d7",
    foreground="#d0d0d0",
    background="#121212",
    surface="#1c1c1c",
    panel="#262626",
    success="#87d787",
    warning="#ffd75f",
    error="#ff6f6f",
    dark=True,
)
TONES: Mapping[Tone, str] = {
    "plain": "",
    "good": "#87d787",
    "warn": "#ffd75f",
    "bad": "bold #ff6f6f",
    "dim": "#8a8a8a",
    "accent": "#5fd7d7",
    "title": "bold",
}


@cache
def tone_style(tone: Tone) -> Style:
    """The style of a tone."""
    return Style.parse(TONES[tone])


def as_text(lines: Iterable[Line]) -> Text:
    """Some lines. Their texts are taken as they are: no markup."""
    text = Text(end="")
    for number, line in enumerate(lines):
        if number:
            text.append("\n")
        for cell in line:
            text.append(cell.text, TONES[cell.tone] or None)
    return text
