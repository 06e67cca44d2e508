"""Styled lines on a terminal, or plain ones elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any

import click

from pdctl.doctor.styled_text import Glyphs, Line, glyphs_for

_STYLES: dict[str, dict[str, Any]] = {
    "title": {"bold": True},
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow", "bold": True},
    "info": {"fg": "cyan"},
    "pass": {"fg": "green"},
    "skipped": {"dim": True},
    "dim": {"dim": True},
    "command": {"fg": "cyan"},
}
USUAL_WIDTH = 80
"""Columns where there is no terminal."""
_WIDEST = 120
"""Longer lines of text are hard to read."""


def output_width(*, err: bool = False) -> int:
    """Columns to wrap at: the terminal's, or 80 where there is none."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        return USUAL_WIDTH
    return min(shutil.get_terminal_size((USUAL_WIDTH, 24)).columns, _WIDEST)


def output_glyphs(*, err: bool = False) -> Glyphs:
    """The signs that the output can show."""
    return glyphs_for(getattr(sys.stderr if err else sys.stdout, "encoding", None))


def echo_lines(lines: Iterable[Line], *, err: bool = False) -> None:
    """Print lines: with colours on a terminal (unless NO_COLOR or a dumb terminal forbids it)."""
    # None lets click find out whether the output is a terminal.
    color = False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    for line in lines:
        text = "".join(click.style(span.text, **_STYLES[span.style]) if span.style else span.text for span in line)
        # What the output cannot show becomes a question mark, not an exception.
        click.echo(text.encode(encoding, "replace").decode(encoding).rstrip(" "), err=err, color=color)
