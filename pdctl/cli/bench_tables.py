"""A summary as text for a terminal or a pipe: rich renderables that fit the width they are given.

Every text that came from a cluster is shown without anything that a terminal would act on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pdctl.bench.gate import GateLine, GateOutcome
from pdctl.bench.results import STAGES, StageTimes, Transfers
from pdctl.bench.statistics import Percentiles, Ratio, is_thin
from pdctl.bench.summary import RATES, CellSummary, Comparison, ModeSummary, Summary
from pdctl.bench.summary_json import gate_to_json, summary_to_json
from pdctl.spec_yaml import printable

WIDE = 120
"""Columns from which modes are rows and their comparisons stand beside each other."""

_DIM = "dim"
_BAD = "bold red"
_WARNING = "bold yellow"
_TITLES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "e2e",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
}
_SHOWN = (("ttft", "p50"), ("ttft", "p90"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"))
_LAST = (("e2e", "p50"),)
_MOST_DIFFERENCES = 3
_TEXT_WIDTH = 200
_NAME_WIDTH = 12
_RATIO_WIDTH = 18
_LARGE = 1e9
_PAIR_WIDTH = 56
"""A ratio with its interval, and the longest verdict."""

Row = tuple[str, Callable[[ModeSummary], Text]]


class SummaryView:
    """All of a summary. Prints itself to any console: ``Console().print(SummaryView(summary))``."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        banners = list(_banners(self._summary))
        yield from banners
        yield from _legend(self._summary)
        if not self._summary.cells:
            yield Text("nothing was measured", style=_WARNING)
        for cell in self._summary.cells:
            yield from _cell(cell, width=options.max_width)
        yield from banners


class GateView:
    """What the gate says: its figures, its problems, and the verdict last."""

    def __init__(self, outcome: GateOutcome) -> None:
        self._outcome = outcome

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        outcome = self._outcome
        cells = dict.fromkeys((line.cell, line.mode) for line in outcome.lines)
        for cell, mode in cells:
            yield Text(f"{cell.name}, {mode}", style="bold")
            yield _gate_table([line for line in outcome.lines if (line.cell, line.mode) == (cell, mode)])
        for note in outcome.notes:
            yield _line(f"note: {note}", _DIM)
        for problem in outcome.problems:
            yield _line(f"FAILED: {problem}", _BAD)
        failed = sum(not line.passed for line in outcome.lines)
        if outcome.passed:
            yield Text(f"passed: none of {len(outcome.lines)} figures is worse than allowed", style="green")
        else:
            yield Text(
                f"FAILED: {failed} of {len(outcome.lines)} figures, {len(outcome.problems)} other problems", style=_BAD
            )


def _banners(summary: Summary) -> Iterator[RenderableType]:
    if summary.invalid_because:
        yield _banner("INVALID", f"{summary.invalid_because}. Do not use these figures.", "red")
    if summary.incomplete_because:
        yield _banner("PARTIAL", f"not all that was asked for was measured: {summary.incomplete_because}", "yellow")


def _banner(title: str, text: str, colour: str) -> RenderableType:
    return Panel(
        Text.assemble((f"{title}: ", f"bold {colour}"), _safe(text)), box=box.HEAVY, border_style=colour, padding=(0, 1)
    )


def _legend(summary: Summary) -> Iterator[RenderableType]:
    labels = {mode.mode: mode.label for cell in summary.cells for mode in cell.modes}
    for mode in summary.modes:
        if labels.get(mode, mode) != mode:
            yield Text.assemble((_safe(mode), "bold"), f" is {_safe(labels[mode])}")
    if labels:
        thin = any(
            is_thin(statistic, made.count)
            for cell in summary.cells
            for mode in cell.modes
            for figure, statistic in _SHOWN
            if (made := mode.figures.get(figure))
        )
        yield Text(
            "Times in ms. Ratios with their 95 % interval; below 1, the first of the two is lower."
            + (" ~ stands before a percentile of too few values." if thin else ""),
            style=_DIM,
        )


def _cell(cell: CellSummary, *, width: int) -> Iterator[RenderableType]:
    yield Text("")
    yield Text(cell.cell.name, style="bold underline")
    yield _figures(cell, wide=width >= WIDE)
    for mode in cell.modes:
        yield from _trouble(mode)
    yield from _comparisons(cell, width=width)
    yield from _stages(cell.modes)
    yield from _counted(cell.modes)


# Figures.


def _figures(cell: CellSummary, *, wide: bool) -> Table:
    rows: list[Row] = [
        *((f"{_TITLES[figure]} {statistic}", _time(figure, statistic)) for figure, statistic in (*_SHOWN, *_LAST)),
        ("tokens/s", lambda mode: _number(mode.output_tokens_per_s)),
        ("requests/s", lambda mode: _number(mode.requests_per_s)),
        (
            "requests",
            lambda mode: Text(str(mode.requests)) if mode.complete else Text(f"{mode.requests} (partial)", _WARNING),
        ),
        ("errors", lambda mode: Text(str(mode.failed), style=_BAD if mode.failed else "")),
    ]
    return _grid(rows, cell.modes, across=wide)


def _grid(rows: Sequence[Row], modes: Sequence[ModeSummary], *, across: bool) -> Table:
    """Rows by mode; or, ``across``, modes by row."""
    table = _table()
    table.add_column("", overflow="fold")
    if across:
        for title, _ in rows:
            table.add_column(title, justify="right", overflow="fold")
        for mode in modes:
            table.add_row(_safe_text(mode.mode), *(made(mode) for _, made in rows))
        return table
    for mode in modes:
        table.add_column(_safe_text(mode.mode), justify="right", overflow="fold")
    for title, made in rows:
        table.add_row(title, *(made(mode) for mode in modes))
    return table


def _time(figure: str, statistic: str) -> Callable[[ModeSummary], Text]:
    def made(mode: ModeSummary) -> Text:
        known = mode.figures.get(figure)
        if known is None:
            return _missing()
        thin = "~" if is_thin(statistic, known.count) else ""
        return Text(f"{thin}{_ms(_of(known, statistic))}")

    return made


def _of(known: Percentiles, statistic: str) -> float:
    return {"p50": known.p50, "p90": known.p90, "p99": known.p99}.get(statistic, known.mean)


def _trouble(mode: ModeSummary) -> Iterator[Text]:
    for reason, count in mode.errors.items():
        yield _line(f"  {mode.mode}: {count} x {reason}", "red")
    for text in mode.trouble:
        yield _line(f"  {mode.mode}: {text}", "yellow")


# Comparisons.


def _comparisons(cell: CellSummary, *, width: int) -> Iterator[RenderableType]:
    pairs = list(dict.fromkeys((one.mode, one.against) for one in cell.comparisons))
    rows = list(dict.fromkeys((one.figure, one.statistic) for one in cell.comparisons))
    found = {(one.mode, one.against, one.figure, one.statistic): one for one in cell.comparisons}
    beside = max(1, (width - _NAME_WIDTH) // _PAIR_WIDTH)
    for start in range(0, len(pairs), beside):
        group = pairs[start : start + beside]
        titles = [f"{mode} / {against}" for mode, against in group]
        yield Text("")
        # One pair has its title above the table, where long names of files have room.
        if len(group) == 1:
            yield _line(titles[0], "bold")
        table = _table(header=len(group) > 1)
        table.add_column("", no_wrap=True)
        for title in titles:
            table.add_column(_safe_text(title), overflow="fold", min_width=_RATIO_WIDTH)
            table.add_column("", overflow="fold")
        for figure, statistic in rows:
            name = _TITLES[figure] if figure in RATES else f"{_TITLES[figure]} {statistic}"
            cells: list[Text] = []
            for pair in group:
                cells += _compared(found.get((*pair, figure, statistic)))
            table.add_row(name, *cells)
        yield table


def _compared(one: Comparison | None) -> tuple[Text, Text]:
    if one is None:
        return _missing(), Text("")
    style = {True: "green", False: "red", None: _DIM}[one.better]
    return _ratio(one.ratio, thin=one.thin), Text(one.verdict, style=style)


def _ratio(ratio: Ratio | None, *, thin: bool) -> Text:
    if ratio is None:
        return _missing()
    value = f"{ratio.value:.2f}" if ratio.value < _LARGE else f"{ratio.value:.3g}"
    return Text(f"{'~' if thin else ''}{value} [{_end(ratio.low)}, {_end(ratio.high)}]")


def _end(value: float) -> str:
    """An end of an interval: never rounded to the 1 that it is beside, which is what the verdict hangs on."""
    if value >= _LARGE:
        return f"{value:.3g}"
    texts = [f"{value:.{digits}f}" for digits in (2, 3, 4)]
    return texts[0] if value == 1 else next((text for text in texts if float(text) != 1), texts[0])


# Stages.


def _stages(modes: Sequence[ModeSummary]) -> Iterator[RenderableType]:
    known = [(mode, mode.stages) for mode in modes if mode.stages is not None]
    if not known:
        return
    table = _table()
    table.add_column("mean TTFT by stage", no_wrap=True)
    for mode, _ in known:
        table.add_column(_safe_text(mode.mode), justify="right", overflow="fold")
    names = dict.fromkeys(name for _, stages in known for name in stages.seconds)
    for name in [*(one for one in STAGES if one in names), *(one for one in names if one not in STAGES)]:
        table.add_row(_safe_text(name), *(_stage(stages, name) for _, stages in known))
    table.add_row("sum", *(Text(_ms(sum(stages.seconds.values())), style="bold") for _, stages in known))
    for name in dict.fromkeys(name for _, stages in known for name in stages.beside):
        cells = [_beside(stages.beside.get(name)) for _, stages in known]
        table.add_row(Text(f"({_safe(name)})", style=_DIM), *cells)
    yield Text("")
    yield table
    if any(stages.beside for _, stages in known):
        yield Text("  In brackets: ran at the same time as prefill, and is in no sum.", style=_DIM)
    for mode, stages in known:
        for note in stages.notes:
            yield _line(f"  {mode.mode}: {note}", _DIM)


def _stage(stages: StageTimes, name: str) -> Text:
    seconds = stages.seconds.get(name)
    if seconds is None:
        return _missing()
    whole = sum(stages.seconds.values())
    return Text(f"{_ms(seconds)} {f'({seconds / whole * 100:.0f} %)' if whole > 0 else '':>6}".rstrip())


def _beside(seconds: float | None) -> Text:
    return _missing() if seconds is None else Text(_ms(seconds), style=_DIM)


# Transfers and answers.


def _counted(modes: Sequence[ModeSummary]) -> Iterator[RenderableType]:
    lines = [(mode, text) for mode in modes for text in (_transfers(mode), _answers(mode)) if text is not None]
    if lines:
        yield Text("")
    for mode, text in lines:
        yield Text.assemble((_safe(mode.mode), "bold"), ": ", text)
        yield from _differences(mode) if text.plain.startswith("answers") else ()


def _transfers(mode: ModeSummary) -> Text | None:
    counted = mode.transfers
    if counted == Transfers():
        return None
    parts: list[Text] = []
    if counted.completed is None and counted.failed is None:
        parts.append(Text("not counted"))
    if counted.completed is not None:
        parts.append(Text(f"{counted.completed:,} completed"))
    for number, name in ((counted.failed, "failed"), (counted.expired, "expired")):
        if number is not None:
            parts.append(Text(f"{number:,} {name}", style=_BAD if number else ""))
    if counted.bytes is not None:
        parts.append(Text(_size(counted.bytes)))
        speed = counted.bytes / counted.seconds / 1e9 if counted.seconds else math.inf
        if math.isfinite(speed):
            parts.append(Text(f"{speed:.3g} GB/s while moving"))
    parts += _recomputed(counted)
    return Text.assemble("transfers ", Text(", ").join(parts))


def _recomputed(counted: Transfers) -> Iterator[Text]:
    """What decode computed although its KV should have come. Its tokens tell that there is some, whoever lost it."""
    tokens, requests = counted.recomputed_tokens, counted.recomputed_requests
    if tokens is None and requests is None:
        return
    if not tokens and not requests:
        yield Text("nothing computed again by decode")
        return
    amount = "an unknown number of tokens" if tokens is None else f"{tokens:,} tokens"
    whose = "requests not known" if requests is None else f"of {requests:,} request{'' if requests == 1 else 's'}"
    yield Text(f"{amount} computed again by decode, {whose}", style=_WARNING)


def _answers(mode: ModeSummary) -> Text | None:
    answers = mode.answers
    if answers is None:
        return None
    if answers.error and not answers.compared:
        return Text(f"answers not compared: {_safe(answers.error)}", style=_BAD)
    text = Text(f"answers {answers.equal} of {answers.compared} equal to what prefill alone gives")
    if answers.unstable:
        text.append(f", {answers.unstable} cannot be judged (prefill alone gave two answers)")
    if answers.different:
        text.append(f", {len(answers.different)} WRONG", style=_BAD)
    if answers.error:
        text.append(f"; {answers.compared} of {answers.wanted} compared; {_safe(answers.error)}", style=_WARNING)
    return text


def _differences(mode: ModeSummary) -> Iterator[Text]:
    different = mode.answers.different if mode.answers is not None else ()
    for one in different[:_MOST_DIFFERENCES]:
        yield _line(f"  request {one.request}, from character {one.at}: got {one.got!r}, not {one.expected!r}", "red")
    if len(different) > _MOST_DIFFERENCES:
        yield Text(f"  and {len(different) - _MOST_DIFFERENCES} more", style="red")


# The gate.


def _gate_table(lines: Iterable[GateLine]) -> Table:
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("candidate / baseline", no_wrap=True)
    table.add_column("", overflow="fold")
    for line in lines:
        table.add_row(
            Text("ok", style="green") if line.passed else Text("FAILED", style=_BAD),
            f"{_TITLES[line.figure]} {line.statistic}",
            _ratio(line.ratio, thin=False),
            _safe_text(line.words),
        )
    return table


# Pieces.


def _table(*, header: bool = True) -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1), show_header=header)


def _safe(text: str) -> str:
    """In one harmless line."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _TEXT_WIDTH else f"{line[: _TEXT_WIDTH - 3]}..."


def _safe_text(text: str) -> Text:
    return Text(_safe(text))


def _line(text: str, style: str) -> Text:
    indent = text[: len(text) - len(text.lstrip(" "))]
    return Text(indent + _safe(text), style=style)


def _missing() -> Text:
    return Text("-", style=_DIM)


def _ms(seconds: float) -> str:
    return _figure(seconds * 1000)


def _number(value: float | None) -> Text:
    return _missing() if value is None else Text(_figure(value))


def _figure(value: float) -> str:
    """Three digits or all before the point, unless it is absurd."""
    size = abs(value)
    if size >= _LARGE:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _size(amount: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount} B"


__all__ = ["WIDE", "GateView", "SummaryView", "gate_to_json", "summary_to_json"]
