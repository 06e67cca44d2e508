"""The report for people. Pure: lines with styles, which the command line colours or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pdctl.doctor.findings import Finding, Severity, Verdict
from pdctl.doctor.folding import fold_grid, fold_names, fold_pairs, ranges
from pdctl.doctor.outcome import Outcome, count, counts
from pdctl.doctor.probe_facts import ProbeResult
from pdctl.doctor.registry import AREAS
from pdctl.doctor.styled_text import UNICODE, Glyphs, Line, Span, clean, one_line, paragraph
from pdctl.doctor.summary import Summary, summarize
from pdctl.spec_yaml import printable

_FEW_PAIRS = 4
"""More pairs than this are shown as a table."""
_WIDEST_CELL = len("x skipped")
_MOST_EVIDENCES = 3
_MOST_EVIDENCE_LINES = 6
_MOST_COMMANDS = 3
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.INFO)


@dataclass(frozen=True)
class Style:
    """How the report looks.

    Attributes:
        width: columns to wrap at. Commands and names that are longer stay whole.
        glyphs: the signs to use.
        only_failures: whether what passed or was skipped is left out.
        verbose: whether passed checks are shown one by one, and evidence and commands in full.
        file_option: `` -f FILE``, for the commands that are suggested; empty for the default file.
    """

    width: int = 80
    glyphs: Glyphs = field(default=UNICODE)
    verbose: bool = False
    only_failures: bool = False
    file_option: str = ""


def report(outcome: Outcome, style: Style) -> list[Line]:
    """The whole report: areas in their order, then what else is worth a word, the counts, and what to do next."""
    return list(_Report(outcome, style).lines())


class _Report:
    def __init__(self, outcome: Outcome, style: Style) -> None:
        self.outcome, self.style, self.glyphs = outcome, style, style.glyphs
        self.summary = summarize(outcome.findings)

    def lines(self) -> Iterator[Line]:
        yield from self._head()
        for area, title in AREAS.items():
            findings = [finding for finding in self.outcome.findings if finding.area == area]
            if self.style.only_failures:
                findings = [finding for finding in findings if counts(finding)]
            if findings:
                yield ()
                yield Span(title, "title"), Span(f"  {area}", "dim")
                yield from self._area(findings)
                if area == "XFER":
                    yield from self._measured()
        yield from self._notes()
        yield ()
        yield self._counts()
        yield from self._next()

    def _head(self) -> Iterator[Line]:
        spec = self.outcome.context.spec
        hosts = f"{count(len(spec.prefill.hosts), 'prefill host')}, {count(len(spec.decode.hosts), 'decode host')}"
        yield (Span(f"cluster {spec.cluster}", "title"), Span(f"  {hosts}, fabric {spec.fabric}, {spec.transfer.mode}"))

    # One area.

    def _area(self, findings: Sequence[Finding]) -> Iterator[Line]:
        failures = [finding for finding in findings if counts(finding)]
        for severity in _ORDER:
            ids = dict.fromkeys(finding.id for finding in failures if finding.severity is severity)
            for check in ids:
                own = [finding for finding in failures if finding.id == check and finding.severity is severity]
                yield from self._failed(own, [finding for finding in findings if finding.id == check])
        yield from self._skipped([finding for finding in findings if finding.verdict is Verdict.SKIPPED])
        yield from self._ignored([finding for finding in findings if finding.ignored])
        open_ = {Verdict.FAIL} if self.style.verbose else {Verdict.FAIL, Verdict.SKIPPED}
        not_all = {finding.id for finding in findings if finding.verdict in open_}
        yield from self._passed([f for f in findings if f.verdict is Verdict.PASS and f.id not in not_all])

    def _failed(self, failures: Sequence[Finding], whole_check: Sequence[Finding]) -> Iterator[Line]:
        alike: dict[tuple[str, str], list[Finding]] = {}
        for finding in failures:
            alike.setdefault((finding.message, finding.fix), []).append(finding)
        groups = list(alike.items())
        for position, ((message, fix), group) in enumerate(groups):
            yield from self._trouble(group, message)
            if position == 0:
                # What is the matter comes first: a title says what should hold, and read alone sounds like good news.
                yield from self._text(group[0].title, indent=8, first="      expected: ", style="dim")
                yield from self._table(whole_check)
            yield from self._evidence(group)
            if position + 1 == len(groups) or groups[position + 1][0][1] != fix:
                # Told once, for all messages above that have the same.
                same = [finding for (_, other), part in groups for finding in part if other == fix]
                yield from self._fix(fix, same, whose="" if len(same) == len(group) else f" ({self._where(same)})")

    def _trouble(self, group: Sequence[Finding], message: str) -> Iterator[Line]:
        sign = f"  {self._glyph(group[0])} {group[0].severity.value} "
        where = self._where(group)
        about = f"{sign}{group[0].id}{f' on {where}' if where else ''}: "
        begin, *more = paragraph(message, width=self.style.width, first=about, rest="      ")
        yield Span(sign, group[0].severity.value), Span(begin[len(sign) :], "title")
        yield from ((Span(line, "title"),) for line in more)

    def _fix(self, fix: str, findings: Sequence[Finding], *, whose: str) -> Iterator[Line]:
        if fix:
            yield from self._text(fix, indent=8, first=f"      fix{whose}: ")
        commands = list(dict.fromkeys(command for finding in findings for command in finding.commands))
        shown = commands if self.style.verbose else commands[:_MOST_COMMANDS]
        for command in shown:
            # Never wrapped: it is there to be copied.
            for number, line in enumerate(command.splitlines() or [""]):
                yield (Span(f"        {'$' if number == 0 else ' '} "), Span(one_line(line), "command"))
        if len(shown) < len(commands):
            more = f"{len(commands) - len(shown)} more: pdctl doctor{self.style.file_option} --fix-commands"
            yield (Span(f"          {self.glyphs.ellipsis} {more}", "dim"),)

    def _evidence(self, group: Sequence[Finding]) -> Iterator[Line]:
        seen: dict[str, list[Finding]] = {}
        for finding in group:
            if finding.evidence.strip():
                seen.setdefault(finding.evidence, []).append(finding)
        shown = list(seen.items()) if self.style.verbose else list(seen.items())[:_MOST_EVIDENCES]
        for text, findings in shown:
            where = "" if len(findings) == len(group) else f" ({self._where(findings)})"
            lines = clean(text)
            limit = len(lines) if self.style.verbose else _MOST_EVIDENCE_LINES
            if len(lines) == 1:
                yield from self._text(lines[0], indent=8, first=f"      seen{where}: ", style="dim")
                continue
            yield (Span(f"      seen{where}:", "dim"),)
            for line in lines[:limit]:
                yield from self._text(line, indent=8, first="        ", style="dim")
            if len(lines) > limit:
                yield (Span(f"        {self.glyphs.ellipsis} {len(lines) - limit} more lines (--verbose)", "dim"),)
        if len(shown) < len(seen):
            others = sum(len(findings) for findings in list(seen.values())[len(shown) :])
            yield (Span(f"      seen: {self.glyphs.ellipsis} on {others} more (--verbose)", "dim"),)

    def _skipped(self, findings: Sequence[Finding]) -> Iterator[Line]:
        by_check: dict[tuple[str, str, str], list[Finding]] = {}
        for finding in findings:
            by_check.setdefault((finding.id, finding.message, finding.fix), []).append(finding)
        alike: dict[tuple[str, str, str], list[Finding]] = {}
        for (_, message, fix), group in by_check.items():
            alike.setdefault((self._where(group), message, fix), []).append(group[0])
        for (where, message, fix), group in alike.items():
            sign = f"  {self.glyphs.skipped} skipped "
            checks = ", ".join(ranges([finding.id for finding in group]))
            text = _about(f"{checks} on {where}" if where else checks, message)
            yield from self._text(text, indent=6, first=sign, style="skipped")
            if fix:
                yield from self._text(fix, indent=8, first="      fix: ", style="skipped")
            if self.style.verbose:
                yield from self._evidence(group)

    def _ignored(self, findings: Sequence[Finding]) -> Iterator[Line]:
        alike: dict[tuple[str, str, str], list[Finding]] = {}
        for finding in findings:
            alike.setdefault((finding.id, finding.message, finding.ignored), []).append(finding)
        for (check, message, reason), group in alike.items():
            sign = f"  {self.glyphs.skipped} ignored "
            where = self._where(group)
            text = f"{_about(f'{check} on {where}' if where else check, message)} (reason: {reason})"
            yield from self._text(text, indent=6, first=sign, style="skipped")

    def _passed(self, findings: Sequence[Finding]) -> Iterator[Line]:
        checks = list(dict.fromkeys(finding.id for finding in findings))
        if not checks:
            return
        if not self.style.verbose:
            yield Span(f"  {self.glyphs.passed} ", "pass"), Span(f"{count(len(checks), 'check')} passed")
            return
        for check in checks:
            own = [finding for finding in findings if finding.id == check]
            yield (Span(f"  {self.glyphs.passed} passed ", "pass"), Span(f"{check}: {one_line(own[0].title)}"))
            alike: dict[str, list[Finding]] = {}
            for finding in own:
                alike.setdefault(finding.message, []).append(finding)
            for message, group in alike.items():
                yield from self._text(_about(self._where(group), message), indent=6, style="dim")

    def _table(self, findings: Sequence[Finding]) -> Iterator[Line]:
        """Prefill hosts as rows, decode hosts as columns, those that are alike put together."""
        cells: dict[tuple[str, str], Finding] = {}
        for finding in findings:
            if len(finding.hosts) != 2:
                return
            pair = (finding.hosts[0], finding.hosts[1])
            if pair not in cells or _badness(finding) > _badness(cells[pair]):
                cells[pair] = finding
        if len(cells) <= _FEW_PAIRS:
            return
        rows, columns, grid = fold_grid({pair: self._cell(finding) for pair, finding in cells.items()})
        names = [_label(row) for row in rows]
        titles = [_label(column) for column in columns]
        left = max(map(len, names)) + 6
        widths = [max(len(title), _WIDEST_CELL) + 2 for title in titles]
        for block in _blocks(widths, max(self.style.width - left, 20)):
            heading = "".join(titles[position].ljust(widths[position]) for position in block)
            yield Span(" " * left + "  " + heading.rstrip(), "dim"), Span("")
            for name, row in zip(names, grid, strict=True):
                spans = [Span(f"      {name}".ljust(left + 2), "dim")]
                for position in block:
                    text, style = row[position] or ("", "")
                    spans.append(Span(text.ljust(widths[position]), style))
                yield tuple(spans)

    def _cell(self, finding: Finding) -> tuple[str, str]:
        if finding.verdict is Verdict.PASS:
            return f"{self.glyphs.passed} ok", "pass"
        if counts(finding):
            return f"{self._glyph(finding)} {finding.severity.value}", finding.severity.value
        return f"{self.glyphs.skipped} {'ignored' if finding.ignored else 'skipped'}", "dim"

    # What stands outside the areas.

    def _measured(self) -> Iterator[Line]:
        probe = self.outcome.context.probe
        results = [result for result in probe.results if result.ok] if probe else []
        alike: dict[tuple[str, str, str], list[ProbeResult]] = {}
        for result in results:
            alike.setdefault((result.backend, result.transport, result.memory), []).append(result)
        for (backend, transport, memory), group in alike.items():
            pairs = fold_pairs(((result.prefill, result.decode) for result in group), arrow=self.glyphs.arrow)
            over = f"{backend or 'NIXL'} over {transport or 'an unknown transport'}"
            figures = [
                over,
                f"{memory or 'unknown'} memory",
                _range("batch", [r.bandwidth_mb_s for r in group], "MB/s"),
                _range("one block p50", [r.block_p50_us for r in group], "us"),
                _range("p99", [r.block_p99_us for r in group], "us"),
                _range("notification", [r.notification_us for r in group], "us"),
            ]
            yield from self._text(f"{pairs}: {', '.join(filter(None, figures))}", indent=6, first="    ", style="dim")

    def _notes(self) -> Iterator[Line]:
        notes = []
        told = {host for finding in self.outcome.errors if finding.area == "SSH" for host in finding.hosts}
        for host, error in self.outcome.context.unreachable.items():
            if host in self.outcome.not_reached and host not in told:
                hint = f" ({error.hint})" if error.hint else ""
                notes.append(f"not reached: {error.message}{hint}")
        # `pdctl up` makes only some of the checks: what it did not find says nothing.
        for unused in () if self.style.only_failures else self.outcome.unused_ignores:
            hosts = f" for {fold_names(unused.hosts)}" if unused.hosts else ""
            notes.append(f"{unused.where}: {unused.id}{hosts} is ignored, and nothing of it was found: take it out?")
        if notes:
            yield ()
        for note in notes:
            yield from self._text(note, indent=2, first=f"{self.glyphs.warning} ", style="warning")

    def _counts(self) -> Line:
        took = self.outcome.timings_s.get("total")
        text = counts_text(self.summary) + (f" {self.glyphs.dot} {took:.1f} s" if took is not None else "")
        style = "error" if self.outcome.exit_code else "warning" if self.summary.warnings else "pass"
        return (Span(text, style),)

    def _next(self) -> Iterator[Line]:
        troubles = [f for f in self.outcome.findings if counts(f) and f.severity is not Severity.INFO]
        first = next(iter(self.outcome.errors or troubles), None)
        if first is None:
            return
        command = f"pdctl doctor{self.style.file_option}"
        words = [(f"pdctl doctor explain {first.id}", "what it means, why it matters, how to mend it")]
        commands = {line for finding in self.outcome.findings if counts(finding) for line in finding.commands}
        if commands:
            words.append((f"{command} --fix-commands", f"only the commands ({len(commands)}), to copy"))
        left = min(max(len(word) for word, _ in words), 46)
        for number, (word, meaning) in enumerate(words):
            begin = "next: " if number == 0 else "      "
            yield Span(begin), Span(f"{word.ljust(left)}  ", "command"), Span(meaning, "dim")

    # Pieces.

    def _text(self, text: str, *, indent: int, first: str | None = None, style: str = "") -> Iterator[Line]:
        begin = " " * indent if first is None else first
        for line in paragraph(text, width=self.style.width, first=begin, rest=" " * indent):
            yield (Span(line, style),)

    def _where(self, findings: Sequence[Finding]) -> str:
        hosts = [finding.hosts for finding in findings]
        if all(len(some) == 2 for some in hosts):
            return fold_pairs([(some[0], some[1]) for some in hosts], arrow=self.glyphs.arrow)
        return fold_names(name for some in hosts for name in some)

    def _glyph(self, finding: Finding) -> str:
        glyphs = {Severity.ERROR: self.glyphs.error, Severity.WARNING: self.glyphs.warning}
        return glyphs.get(finding.severity, self.glyphs.info)


def counts_text(summary: Summary) -> str:
    """``2 errors, 1 warning, 31 passed, 4 skipped``."""
    parts = [
        (summary.errors, count(summary.errors, "error")),
        (summary.warnings, count(summary.warnings, "warning")),
        (summary.infos, count(summary.infos, "info")),
        (1, f"{summary.passed} passed"),
        (summary.skipped, f"{summary.skipped} skipped"),
        (summary.ignored, f"{summary.ignored} ignored"),
    ]
    return ", ".join(text for number, text in parts if number)


def fix_commands(outcome: Outcome, *, glyphs: Glyphs = UNICODE) -> list[str]:
    """The commands that mend what failed, in the order of the report, each once, each after a comment line.

    The comment says what the command is for and about which hosts the finding is; commands that are for the same stand
    below one comment.
    """
    reasons: dict[str, dict[tuple[str, str], list[Finding]]] = {}
    for finding in outcome.findings:
        for command in finding.commands if counts(finding) else ():
            reasons.setdefault(command, {}).setdefault((finding.id, finding.message), []).append(finding)
    shown = _Report(outcome, Style(glyphs=glyphs))
    lines: list[str] = []
    before: list[str] = []
    for command, causes in reasons.items():
        comments = []
        for (check, message), findings in causes.items():
            where = shown._where(findings)
            # In one line whatever the message is: what follows a line break would be run.
            comments.append(one_line(f"# {check}{f' on {where}' if where else ''}: {' '.join(clean(message))}"))
        if comments != before:
            lines += comments
        before = comments
        lines += [printable(line) for line in command.splitlines()]
    return lines


def _label(names: Sequence[str]) -> str:
    """Names of like rows of a table. The odd ones are few; what they are odd against need not be spelt out."""
    parts = ranges(names)
    return ", ".join(parts) if len(parts) <= 2 else f"{len(names)} others"


def _about(where: str, message: str) -> str:
    return f"{where}: {message}" if where else message


def _badness(finding: Finding) -> int:
    if finding.verdict is Verdict.PASS:
        return 0
    if not counts(finding):
        return 1
    return 2 + _ORDER[::-1].index(finding.severity)


def _blocks(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Positions of columns that fit beside each other, at least one at a time."""
    block: list[int] = []
    used = 0
    for position, width in enumerate(widths):
        if block and used + width > room:
            yield block
            block, used = [], 0
        block.append(position)
        used += width
    if block:
        yield block


def _range(name: str, values: Iterable[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = _number(min(known)), _number(max(known))
    return f"{name} {low} {unit}" if low == high else f"{name} {low} to {high} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
