"""One page that says what a bench has found: words first, then plots, then every figure, then how it was measured.

It holds everything it shows, asks no network, and runs no script. All text of the results is untrusted: model names,
errors and answers come from servers, and whoever opens the page must not run them.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from pdctl.bench import plots
from pdctl.bench.results import MODE_WORDS, MODES, STAGES, Cell, Results, Transfers
from pdctl.bench.statistics import Percentiles, Ratio, is_thin
from pdctl.bench.summary import NO_DIFFERENCE, CellSummary, Comparison, ModeSummary, Summary
from pdctl.errors import PdctlError

_LONGEST_TEXT = 2000
_LONGEST_NAME = 200
_LARGE = 1e12
_HEADLINE = ("ttft", "tpot")
_MOST_DIFFERENCES = 20
_MOST_TROUBLE = 10
_FIGURE_WORDS: Mapping[str, str] = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "end-to-end latency",
    "requests_per_s": "requests per second",
    "output_tokens_per_s": "output tokens per second",
}


@dataclass(frozen=True)
class Plot:
    """A drawing and what it says in words.

    Attributes:
        svg: the drawing.
        caption: under it.
    """

    svg: Markup
    caption: str


@dataclass(frozen=True)
class RatioTable:
    """Comparisons side by side.

    Attributes:
        pairs: heads of the columns: the modes compared.
        rows: name of the row and, by pair, the comparison; None if there is none.
    """

    pairs: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Comparison | None, ...]], ...]


@dataclass(frozen=True)
class Finding:
    """What came out of comparing the modes in the median of one figure.

    Attributes:
        figure: in words.
        sentences: one per pair of modes, over all loads.
        table: one row per load.
    """

    figure: str
    sentences: tuple[str, ...]
    table: RatioTable


def html_report(results: Results, summary: Summary) -> str:
    """The page. The same results and summary give the same page.

    Args:
        results: as measured; of two files, the candidate, whose settings and hosts are shown. Distributions are drawn
            of columns that are a mode of these results, so there are none of two files.
        summary: what :func:`pdctl.bench.summary.summarise` or :func:`pdctl.bench.two_files.summarise_two` made of them.

    Raises:
        PdctlError: the template is not installed, or matplotlib cannot be used.
    """
    colours = _Colours(summary)
    invalid = summary.invalid_because
    findings = [] if invalid else list(_findings(summary))
    return _template().render(
        results=results,
        summary=summary,
        findings=findings,
        plain_figures=[] if invalid or findings else list(_plain_figures(summary)),
        differences=results.differences[:_MOST_DIFFERENCES],
        difference_count=len(results.differences),
        answers=_answers(summary),
        overview=_overview(summary, colours),
        by_load=list(_by_load(summary, colours)),
        cells=[_cell(results, cell, index, colours, told=not invalid) for index, cell in enumerate(summary.cells)],
        when=_when(results.created_unix),
        lasted=_lasted(results),
        mode_words=MODE_WORDS,
        palette=plots.VARIABLES,
        most_trouble=_MOST_TROUBLE,
    )


class _Colours:
    """The same colour, dash and marker for the same mode in every plot."""

    def __init__(self, summary: Summary) -> None:
        self._modes: dict[str, int] = {}
        self._pairs: dict[tuple[str, str], int] = {}
        for cell in summary.cells:
            for mode in cell.modes:
                self._modes.setdefault(mode.mode, len(self._modes))
            for comparison in cell.comparisons:
                self._pairs.setdefault((comparison.mode, comparison.against), len(self._pairs))

    def of(self, mode: ModeSummary) -> int:
        return self._modes[mode.mode]

    @property
    def pairs(self) -> Mapping[tuple[str, str], int]:
        return self._pairs


# Words


def _findings(summary: Summary) -> Iterator[Finding]:
    for figure in _HEADLINE:
        found: dict[tuple[str, str], list[tuple[Comparison, Cell]]] = {}
        for cell in summary.cells:
            for one in _medians(cell, figure):
                found.setdefault((one.mode, one.against), []).append((one, cell.cell))
        if not any(one.ratio for pair in found.values() for one, _ in pair):
            continue
        yield Finding(
            figure=_FIGURE_WORDS[figure],
            sentences=tuple(
                _overall([one for one, _ in pair]) if len(pair) > 1 else _sentence(*pair[0]) for pair in found.values()
            ),
            table=_ratio_table([(cell.cell.name, _medians(cell, figure)) for cell in summary.cells]),
        )


def _ratio_table(rows: Sequence[tuple[str, Sequence[Comparison]]]) -> RatioTable:
    pairs = dict.fromkeys((one.mode, one.against) for _, row in rows for one in row)
    return RatioTable(
        pairs=tuple(f"{mode} / {against}" for mode, against in pairs),
        rows=tuple(
            (name, tuple(next((one for one in row if (one.mode, one.against) == pair), None) for pair in pairs))
            for name, row in rows
        ),
    )


def _comparison_rows(cell: CellSummary) -> list[tuple[str, list[Comparison]]]:
    """By figure and statistic, all pairs; with a star where so few requests say little about a percentile."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for one in cell.comparisons:
        found.setdefault((one.figure, one.statistic), []).append(one)
    return [
        (
            _FIGURE_WORDS.get(figure, figure)
            + ("" if statistic == "mean" else f" {statistic}")
            + ("*" if any(one.thin for one in row) else ""),
            row,
        )
        for (figure, statistic), row in found.items()
    ]


def _medians(cell: CellSummary, figure: str) -> list[Comparison]:
    return [one for one in cell.comparisons if (one.figure, one.statistic) == (figure, "p50")]


def _overall(found: Sequence[Comparison]) -> str:
    """All loads in a sentence, whichever way they went: none is picked out."""
    one = found[0]
    subject = f"{_name(one.mode)}'s median {_FIGURE_WORDS[one.figure]}"
    groups: dict[str, list[float]] = {"lower": [], "higher": []}
    same = missing = 0
    for comparison in found:
        if comparison.ratio is None:
            missing += 1
        elif comparison.sign:
            groups["lower" if comparison.sign < 0 else "higher"].append(abs(comparison.ratio.value - 1) * 100)
        else:
            same += 1
    against, loads = f"{_name(one.against, first=False)}'s", len(found)
    said = [
        f"{word} than {against} in {len(changes)} of {loads} loads (by {_span(changes)})"
        for word, changes in groups.items()
        if changes
    ]
    if said:
        told = [f"{subject} is {' and '.join(said)}."]
        told += [f"In {same} there is {NO_DIFFERENCE}."] if same else []
    elif same:
        told = [f"{subject} shows {NO_DIFFERENCE} from {against} in {_of(same, loads)} loads."]
    else:
        return f"{subject} could not be compared with {against} in any of {loads} loads."
    told += [f"{missing} of {loads} could not be compared."] if missing else []
    return " ".join(told)


def _of(some: int, whole: int) -> str:
    return f"any of {whole}" if some == whole else f"{some} of {whole}"


def _sentence(one: Comparison, cell: Cell) -> str:
    mine, other, figure = f"{_name(one.mode)}'s", f"{_name(one.against, first=False)}'s", _FIGURE_WORDS[one.figure]
    where = f"at {_load_words(cell)}"
    if one.ratio is None:
        return f"{mine} and {other} {figure} {where}: {one.verdict}"
    if not one.sign:
        words = NO_DIFFERENCE[:1].upper() + NO_DIFFERENCE[1:]
        return f"{words} between {_name(one.mode, first=False)}'s and {other} {figure} {where} ({_ratio(one.ratio)})"
    as_or_than = "than" if one.verdict.endswith(("lower", "higher")) else "as"
    return f"{mine} {figure} is {one.verdict} {as_or_than} {other} {where} ({_ratio(one.ratio)})"


def _span(changes: Sequence[float]) -> str:
    least, most = (f"{end:.0f} %" if end >= 1 else f"{end:.1f} %" for end in (min(changes), max(changes)))
    return least if least == most else f"{least} to {most}"


def _plain_figures(summary: Summary) -> Iterator[str]:
    for cell in summary.cells:
        for mode in cell.modes:
            ttft, tpot = mode.figures.get("ttft"), mode.figures.get("tpot")
            label = mode.label if mode.complete else f"{mode.label} (partial)"
            if ttft is None:
                yield f"{label}: nothing was answered at {_load_words(cell.cell)}"
                continue
            rest = f", TPOT {_ms(tpot.p50)} ms" if tpot else ""
            yield f"{label}: median TTFT {_ms(ttft.p50)} ms{rest} at {_load_words(cell.cell)}"


def _load_words(cell: Cell) -> str:
    hits = f", {cell.prefix_hit} % prefix hits" if cell.prefix_hit else ""
    return f"{cell.prompt_tokens}+{cell.output_tokens} tokens {cell.load}{hits}"


def _cell_heading(cell: Cell) -> str:
    if cell.concurrency is not None:
        load = "one request at a time" if cell.concurrency == 1 else f"{cell.concurrency} requests at once"
    else:
        load = f"{cell.rate or 0:g} requests per second"
    hits = f", {cell.prefix_hit} % prefix hits" if cell.prefix_hit else ""
    return f"Prompts of {cell.prompt_tokens} tokens, answers of {cell.output_tokens}, {load}{hits}"


def _name(mode: str, *, first: bool = True) -> str:
    """``Push`` where a sentence begins. Columns of two files are named after them, and a file's name stays as it is."""
    return mode[:1].upper() + mode[1:] if first and mode in MODES else mode


def _answers(summary: Summary) -> str:
    """How many answers were held against those of prefill alone, in a sentence."""
    checks = [mode.answers for cell in summary.cells for mode in cell.modes if mode.answers is not None]
    compared, wanted = sum(check.compared for check in checks), sum(check.wanted for check in checks)
    errors = [check.error for check in checks if check.error]
    if not compared:
        return (
            f"No answers could be compared: {errors[0]}" if errors else "No answers were compared with prefill's own."
        )
    equal, unstable = sum(check.equal for check in checks), sum(check.unstable for check in checks)
    rest = f", {unstable} cannot be judged (prefill alone gives two answers)" if unstable else ""
    told = f"Of {compared} answers compared with what prefill alone gives, {equal} are the same{rest}."
    return f"{told} {compared} of {wanted} were compared: {'; '.join(dict.fromkeys(errors))}." if errors else told


# Plots


def _overview(summary: Summary, colours: _Colours) -> list[Plot]:
    made = []
    for figure in _HEADLINE:
        rows = [
            plots.ForestRow(
                label=cell.cell.name,
                style=colours.pairs[one.mode, one.against],
                value=one.ratio.value if one.ratio else None,
                low=one.ratio.low if one.ratio else None,
                high=one.ratio.high if one.ratio else None,
            )
            for cell in summary.cells
            for one in _medians(cell, figure)
        ]
        if not any(row.value is not None for row in rows):
            continue
        words = _FIGURE_WORDS[figure]
        caption = (
            f"Ratio of the median {words}, with its 95 % interval, per load and comparison. Left of the line at 1 the "
            "first named mode is faster. An interval that touches the line shows no difference."
        )
        names = [(f"{mode} / {against}", style) for (mode, against), style in colours.pairs.items()]
        svg = plots.ratio_forest(f"ratio-{figure}", f"Ratio of the median {words}", rows, names)
        made.append(_plot(svg, caption))
    return made


def _by_load(summary: Summary, colours: _Colours) -> Iterator[Plot]:
    groups: dict[tuple[int, int, int, bool], list[CellSummary]] = {}
    for one in summary.cells:
        cell = one.cell
        key = (cell.prompt_tokens, cell.output_tokens, cell.prefix_hit, cell.concurrency is not None)
        groups.setdefault(key, []).append(one)
    for index, ((prompt, output, hits, closed), cells) in enumerate(groups.items()):
        cells = sorted(cells, key=lambda one: (one.cell.concurrency or 0, one.cell.rate or 0.0))
        if len(cells) < 2:
            continue
        lines = []
        for name in summary.modes:
            found = [one.of(name) for one in cells]
            known = next((mode for mode in found if mode), None)
            if known is None:
                continue
            label, style = known.label, colours.of(known)
            figures = [mode.figures.get("ttft") if mode else None for mode in found]
            p50 = [one.p50 if one else None for one in figures]
            p90 = [one.p90 if one else None for one in figures]
            lines.append(plots.LoadLine(label, style, p50, p90))
        if not any(value is not None for line in lines for value in line.p50):
            continue
        axis = "requests at once" if closed else "requests per second"
        loads = [str(one.cell.concurrency) if closed else f"{one.cell.rate or 0:g}" for one in cells]
        of = f"prompts of {prompt} tokens, answers of {output}" + (f", {hits} % prefix hits" if hits else "")
        svg = plots.ttft_by_load(f"load-{index}", f"TTFT by {axis}, {of}", axis, loads, lines)
        yield _plot(svg, f"TTFT in milliseconds by {axis}: median and 90th percentile, {of}.")


def _cell(results: Results, one: CellSummary, index: int, colours: _Colours, *, told: bool) -> dict[str, Any]:
    """What the template needs for a cell; with what it says in words unless that must not be used."""
    return {
        "sentences": [_sentence(comparison, one.cell) for comparison in _medians(one, "ttft")] if told else [],
        "heading": _cell_heading(one.cell),
        "name": one.cell.name,
        "summary": one,
        "comparisons": _ratio_table(_comparison_rows(one)),
        "plots": [*_cdf(results, one, index, colours), *_stage_plot(one, index)],
        "stages": _stage_rows(one),
        "stage_notes": [(mode.label, note) for mode in one.modes if mode.stages for note in mode.stages.notes],
        "thin": any(
            is_thin(name, figure.count)
            for mode in one.modes
            for figure in mode.figures.values()
            for name in ("p90", "p99")
        ),
    }


def _cdf(results: Results, one: CellSummary, index: int, colours: _Colours) -> Iterator[Plot]:
    lines = []
    for mode in one.modes:
        runs = (run for run in results.runs if run.mode == mode.mode and run.cell == one.cell)
        values = [sample.ttft_s for run in runs for sample in run.good if sample.ttft_s is not None]
        if values:
            lines.append(plots.Line(mode.label, colours.of(mode), values))
    if lines:
        svg = plots.ttft_cdf(f"cdf-{index}", f"Distribution of TTFT, {one.cell.name}", lines)
        yield _plot(
            svg, "Share of requests whose first token was there after so many milliseconds. Further left is faster."
        )


def _stage_plot(one: CellSummary, index: int) -> Iterator[Plot]:
    bars = [plots.StageBar(mode.label, mode.stages.seconds) for mode in one.modes if mode.stages]
    if any(value > 0 for bar in bars for value in bar.seconds.values()):
        svg = plots.stage_bars(f"stages-{index}", f"Where the mean TTFT went, {one.cell.name}", bars)
        caption = "Where the mean TTFT went, in milliseconds. What a mode cannot tell apart is part of its rest."
        if any(value < 0 for bar in bars for value in bar.seconds.values()):
            caption += " A stage below zero (see the table) is not drawn: clocks disagree."
        yield _plot(svg, caption)


def _stage_rows(one: CellSummary) -> list[tuple[str, list[tuple[float | None, float | None]]]]:
    """By stage: seconds and share of TTFT per mode."""
    known = [mode.stages.seconds if mode.stages else {} for mode in one.modes]
    names = [name for name in STAGES if any(name in seconds for seconds in known)]
    names += sorted({name for seconds in known for name in seconds} - set(STAGES))
    totals = [sum(seconds.values()) for seconds in known]
    rows: list[tuple[str, list[tuple[float | None, float | None]]]] = []
    for name in names:
        values = [seconds.get(name) for seconds in known]
        shares = [
            value / total if value is not None and total > 0 else None
            for value, total in zip(values, totals, strict=True)
        ]
        rows.append((name, list(zip(values, shares, strict=True))))
    for name in sorted({name for mode in one.modes if mode.stages for name in mode.stages.beside}):
        beside = [mode.stages.beside.get(name) if mode.stages else None for mode in one.modes]
        rows.append((f"beside: {name}", [(value, None) for value in beside]))
    return rows


def _plot(svg: str, caption: str) -> Plot:
    # The plots escape every label themselves, by an XML writer.
    return Plot(Markup(svg), caption)  # noqa: S704


# Figures


def _ms(seconds: float | None) -> str:
    """Milliseconds with three digits or so; a dash where there is no figure."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    value = seconds * 1000
    if not math.isfinite(value) or abs(value) >= _LARGE:
        return f"{value:.3g}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _ratio(ratio: Ratio | None) -> str:
    """``0.81 [0.53, 0.92]``; finer where an end would look like 1 although the interval leaves 1 out."""
    if ratio is None:
        return "–"
    ends = (ratio.low, ratio.high)
    apart = ratio.low > 1 or ratio.high < 1
    if max(abs(ratio.value), *map(abs, ends)) >= _LARGE:
        return f"{ratio.value:.3g} [{ratio.low:.3g}, {ratio.high:.3g}]"
    digits = 2
    while apart and digits < 5 and any(round(end, digits) == 1 for end in ends):
        digits += 1
    return f"{ratio.value:.{digits}f} [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"


def _number(value: float | None, digits: int = 0) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{digits}f}" if abs(value) < 1e15 else f"{value:.3g}"


def _answers_equal(mode: ModeSummary) -> str:
    """``3 of 3``, with how many were not compared."""
    check = mode.answers
    if check is None or not check.wanted:
        return "–"
    missing = check.wanted - check.compared
    told = f"{check.equal} of {check.compared}" if check.compared else "none"
    return f"{told} ({missing} not compared)" if missing else told


def _recomputed(transfers: Transfers) -> str:
    """Tokens that decode computed again, and of how many requests if that is known; the tokens alone tell of it."""
    tokens, requests = transfers.recomputed_tokens, transfers.recomputed_requests
    if tokens is None and requests is None:
        return "–"
    if not tokens and not requests:
        return "0"
    whose = "requests not known" if requests is None else f"{requests:,} request{'' if requests == 1 else 's'}"
    return f"{'?' if tokens is None else f'{tokens:,}'} tokens ({whose})"


def _share(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value * 100:.0f} %"


def _gigabytes(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e9:.3g} GB"


def _speed(transfers: Transfers) -> str:
    """Gigabytes per second of transfer time; what is not counted is not zero."""
    if transfers.bytes is None or not transfers.seconds:
        return "–"
    speed = transfers.bytes / transfers.seconds / 1e9
    return f"{speed:.3g} GB/s" if math.isfinite(speed) else "–"


def _percentile(figures: Mapping[str, Percentiles], figure: str, statistic: str) -> str:
    """One figure in ms; with a star where so few requests say little about it."""
    known = figures.get(figure)
    if known is None:
        return "–"
    return _ms(getattr(known, statistic)) + ("*" if is_thin(statistic, known.count) else "")


def _when(unix: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(unix, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def _lasted(results: Results) -> str:
    seconds = results.ended_unix - results.created_unix
    if not 0 < seconds < 1e8:
        return ""
    return f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def _brief(one: Comparison | None) -> str:
    """A verdict that fits into a table of many."""
    if one is None:
        return ""
    return "within the noise" if one.verdict == NO_DIFFERENCE else one.verdict


def _judged(one: Comparison | None) -> str:
    """The class of a verdict. The words say it too: colour is never alone."""
    return {True: "better", False: "worse", None: "same"}[one.better if one else None]


# Template


def _cut(text: object, most: int = _LONGEST_NAME) -> str:
    whole = str(text)
    return whole if len(whole) <= most else whole[: most - 1] + "…"


def _finalize(value: object) -> object:
    """Whatever the template writes: no control characters, and never more of one text than a page can bear."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _cut(plots.without_controls(value), _LONGEST_TEXT)


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_folder()),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "answers_equal": _answers_equal,
        "brief": _brief,
        "cut": _cut,
        "judged": _judged,
        "gigabytes": _gigabytes,
        "ms": _ms,
        "number": _number,
        "ratio": _ratio,
        "recomputed": _recomputed,
        "share": _share,
        "speed": _speed,
        "percentile": _percentile,
    }
    return environment.get_template("report.html.j2")


def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    # A wheel has the templates inside the package, a source tree beside it.
    for folder in (package / "templates" / "bench", package.parent / "templates" / "bench"):
        if (folder / "report.html.j2").is_file():
            return folder
    hint = "reinstall pdctl: pip install --force-reinstall pdctl"
    raise PdctlError("the template of the bench report is not installed", hint=hint)


__all__ = ["html_report"]
