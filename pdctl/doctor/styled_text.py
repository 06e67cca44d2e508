"""Lines of a report with the meaning of their parts, for a terminal to colour. Pure: no escape sequences here."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdctl.spec_yaml import printable


@dataclass(frozen=True)
class Span:
    """A piece of a line. ``style`` is ``""``, ``title``, ``error``, ``warning``, ``info``, ``pass`` or ``dim``."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


@dataclass(frozen=True)
class Glyphs:
    """The signs of a report. What a terminal cannot show is replaced by :data:`ASCII`."""

    passed: str
    warning: str
    error: str
    info: str
    skipped: str
    arrow: str
    dot: str
    ellipsis: str


UNICODE = Glyphs(passed="✓", warning="!", error="✗", info="i", skipped="–", arrow="→", dot="·", ellipsis="…")
ASCII = Glyphs(passed="+", warning="!", error="x", info="i", skipped="-", arrow="->", dot="|", ellipsis="...")


def glyphs_for(encoding: str | None) -> Glyphs:
    """The signs that an output of this encoding can show."""
    try:
        "".join(vars(UNICODE).values()).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def plain_text(lines: Iterable[Line]) -> str:
    """The lines without their styles, each ended."""
    return "".join("".join(span.text for span in line).rstrip() + "\n" for line in lines)


def clean(text: str) -> list[str]:
    """The lines of a text that came from elsewhere, with nothing in them that a terminal would act on."""
    return [printable(line.replace("\t", "  ").rstrip()) for line in text.splitlines() if line.strip()]


def one_line(text: str) -> str:
    """A text that came from elsewhere, in one harmless line."""
    return " ".join(line.strip() for line in clean(text))


def paragraph(text: str, *, width: int, first: str = "", rest: str | None = None) -> Iterator[str]:
    """Wrap a text: ``first`` stands before its first line, ``rest`` before the others (as many blanks, if not given).

    Words longer than a line (paths, addresses) stay whole, so that they can be copied.
    """
    indent = " " * len(first) if rest is None else rest
    begin = first
    for line in clean(text) or [""]:
        yield from textwrap.wrap(
            line,
            width=max(width, len(indent) + 20),
            initial_indent=begin,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [begin.rstrip()]
        begin = indent
