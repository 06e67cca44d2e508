"""What a check is about, in words: for ``pdctl doctor explain`` and for the pages of docs/checks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdctl.doctor.findings import Check
from pdctl.doctor.registry import AREAS
from pdctl.doctor.styled_text import Line, Span, paragraph

GENERATED = "<!-- Made by scripts/make_check_pages.py from the check itself; change it there. -->"

_SEVERITIES = {
    "error": "an error: the cluster would not work, would not be safe, or would be far from full speed",
    "warning": "a warning: worth a look, and no reason to stop",
    "info": "an information",
}


def explain(check: Check, *, width: int = 80) -> list[Line]:
    """The text of one check, wrapped."""
    lines: list[Line] = [(Span(line, "title"),) for line in paragraph(f"{check.id}: {check.title}", width=width)]
    lines += [(Span(line, "dim"),) for line in paragraph(f"{_kind(check)}.", width=width)]
    for heading, text in _sections(check):
        lines += [(), (Span(heading, "title"),)]
        for part in _paragraphs(text):
            lines += [(Span(line),) for line in paragraph(part, width=width, first="  ", rest="  ")]
    if check.sources:
        lines += [(), (Span("Sources", "title"),)]
        lines += [(Span(f"  {source}"),) for source in check.sources]
    return lines


def page(check: Check) -> str:
    """The page of one check, in Markdown."""
    parts = [GENERATED, f"# {check.id}: {check.title}", f"{_kind(check)}."]
    for heading, text in _sections(check):
        parts += [f"## {heading}", *_paragraphs(text)]
    if check.sources:
        parts += ["## Sources", "\n".join(f"* {_link(source)}" for source in check.sources)]
    parts.append("[All checks](README.md)")
    return "\n\n".join(parts) + "\n"


def index(checks: Iterable[Check]) -> str:
    """The page that lists all checks, in Markdown."""
    own = tuple(checks)
    parts = [
        GENERATED,
        "# Checks of `pdctl doctor`",
        "Ids are stable. *Blocking* checks are also made by `pdctl up`, before it starts anything. "
        "See [doctor](../doctor.md) for the command.",
    ]
    for area, title in AREAS.items():
        rows = [
            f"| [{check.id}]({check.id}.md) | {_cell(check.title)} | {check.severity.value} "
            f"| {'blocking' if check.blocking else ''} |"
            for check in own
            if check.area == area
        ]
        if rows:
            head = ["| id | what should hold | if not | |", "|---|---|---|---|"]
            parts += [f"## {title} (`{area}`)", "\n".join([*head, *rows])]
    return "\n\n".join(parts) + "\n"


def _kind(check: Check) -> str:
    blocking = "; `pdctl up` checks it before it starts anything" if check.blocking else ""
    return f"{AREAS[check.area]}. A failure is {_SEVERITIES[check.severity.value]}{blocking}"


def _sections(check: Check) -> Iterator[tuple[str, str]]:
    yield "What is checked", check.what
    yield "Why it matters", check.why
    yield "How to fix it", check.fix


def _paragraphs(text: str) -> list[str]:
    """Paragraphs are divided by blank lines; a line break within one is only a line break of the source."""
    return [" ".join(part.split()) for part in text.strip().split("\n\n") if part.strip()]


def _link(source: str) -> str:
    return f"<{source}>" if source.startswith(("http://", "https://")) and " " not in source else source


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
