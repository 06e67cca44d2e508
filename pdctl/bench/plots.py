"""The plots of a report: data in, one SVG text out. Pure but for the fonts that matplotlib reads.

Text stays text, in the reader's own sans-serif: paths would be larger and could be neither searched nor copied. Space
is set aside for DejaVu Sans, which is wider than what browsers take, so that nothing is cut. Colours are CSS variables
with a colour to fall back to, so that one drawing serves light and dark pages and still stands alone.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from pdctl.bench.results import STAGES
from pdctl.errors import PdctlError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAGE = "#1f2329", "#59636f", "#d5dae0", "#fffffe"
"""Text and axes; what is less important; grid lines; the page behind."""

SERIES_COLOURS: tuple[str, ...] = ("#0b62ab", "#c2460b", "#6f42a1", "#2f7d32")
"""One per mode, in the order of the settings. They differ in lightness too, and dash and marker repeat them."""

VARIABLES: Mapping[str, str] = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAGE: "--page",
    **{colour: f"--series-{index}" for index, colour in enumerate(SERIES_COLOURS)},
}
"""Which variable of the page's CSS stands in for a colour."""

_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (5, 2, 1, 2)), (0, (1, 1.5)))
_MARKERS = ("o", "s", "^", "D")
_UPPER_DASH: Any = (0, (2, 2))
"""Of the higher of two percentiles."""

# Work is plain, waiting has slanted strokes, what nobody could tell apart upright ones. All are mid tones, which show
# on white and on black. (Dots would be a quarter of a megabyte: a pattern holds each as a path.)
_STAGE_LOOKS: Mapping[str, tuple[str, str]] = {
    "route": ("#8a8f98", ""),
    "prefill queue": ("#5aa2dd", "////"),
    "prefill": ("#2b7bbd", ""),
    "match": ("#c9a227", "\\\\\\\\"),
    "post": ("#e0a030", "xxxx"),
    "transfer": ("#d9622b", ""),
    "notify": ("#e58f6a", "////"),
    "decode queue": ("#a98bd0", "////"),
    "first decode step": ("#8058b0", ""),
    "rest": ("#9aa3ad", "||"),
}
_OTHER_LOOK = ("#6f8f72", "++++")

_WIDTH = 5.2
"""Inches of every plot: two beside each other on a desk, and still readable when one is shrunk to a phone."""

_MOST_POINTS = 400
_MOST_MILLISECONDS = 1e12
_LONGEST_LABEL = 48
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_SVG = "{http://www.w3.org/2000/svg}"
_DRAWING = threading.Lock()


@dataclass(frozen=True)
class Line:
    """One line of a distribution.

    Attributes:
        label: what it is of.
        style: which colour, dash and marker; the same for the same mode in every plot.
        values: seconds, in any order.
    """

    label: str
    style: int
    values: Sequence[float]


@dataclass(frozen=True)
class LoadLine:
    """Two percentiles of a mode over rising load.

    Attributes:
        label: the mode.
        style: as in :class:`Line`.
        p50: seconds, one per load; None where it was not measured.
        p90: likewise.
    """

    label: str
    style: int
    p50: Sequence[float | None]
    p90: Sequence[float | None]


@dataclass(frozen=True)
class StageBar:
    """Where the mean time to first token of a mode went.

    Attributes:
        label: the mode.
        seconds: by stage; only what is above 0 is drawn.
    """

    label: str
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class ForestRow:
    """A ratio with its interval.

    Attributes:
        label: what of, such as the cell.
        style: as in :class:`Line`; rows of the same style make the same comparison.
        value: the ratio; None draws an empty row.
        low: lower end of its interval.
        high: upper end.
    """

    label: str
    style: int
    value: float | None
    low: float | None
    high: float | None


def ttft_cdf(key: str, title: str, lines: Sequence[Line]) -> str:
    """The share of requests whose first token was there after so many milliseconds.

    Args:
        key: makes the ids of this drawing unique in its page.
        title: what a screen reader says.
        lines: one per mode; empty ones are left out.

    Raises:
        PdctlError: matplotlib cannot be used here.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        drawn = [(line, sorted(_milliseconds(value) for value in line.values)) for line in lines if line.values]
        for line, values in drawn:
            shown, shares = _steps(values)
            dash, colour = _DASHES[line.style % len(_DASHES)], _series(line.style)
            axes.plot(shown, shares, drawstyle="steps-post", color=colour, linestyle=dash, linewidth=1.8)
        _time_scale(axes, "x", [value for _, values in drawn for value in values])
        axes.set_xlabel("TTFT (ms)")
        axes.set_ylabel("requests (%)")
        axes.set_ylim(0, 102)
        axes.set_yticks([0, 25, 50, 75, 90, 100])
        _legend(figure, [line.label for line, _ in drawn], axes.get_lines())

    return _svg(key, title, 3.3, draw)


def ttft_by_load(key: str, title: str, axis: str, loads: Sequence[str], lines: Sequence[LoadLine]) -> str:
    """Median and 90th percentile of TTFT over load, a pair of lines per mode.

    Args:
        key: makes the ids of this drawing unique in its page.
        title: what a screen reader says.
        axis: what the loads are, with their unit.
        loads: rising, as they are to be written.
        lines: one per mode.

    Raises:
        PdctlError: matplotlib cannot be used here.
    """

    def draw(figure: Figure) -> None:
        from matplotlib.lines import Line2D

        axes = figure.subplots()
        places = list(range(len(loads)))
        everything: list[float] = []
        for line in lines:
            for values, dash in ((line.p50, "-"), (line.p90, _UPPER_DASH)):
                shown = [math.nan if value is None else _milliseconds(value) for value in values]
                everything += [value for value in shown if not math.isnan(value)]
                look = _look(line.style) | {"linestyle": dash}
                axes.plot(places, shown, **look, markerfacecolor=look["color"] if dash == "-" else PAGE)
        axes.set_xticks(places, [_clean(load) for load in loads])
        axes.set_xlim(-0.3, max(len(loads) - 0.7, 0.3))
        axes.set_xlabel(_clean(axis))
        axes.set_ylabel("TTFT (ms)")
        _time_scale(axes, "y", everything)
        modes = [Line2D([], [], **_look(line.style)) for line in lines]
        both = [Line2D([], [], color=MUTED, linewidth=1.8, linestyle=dash) for dash in ("-", _UPPER_DASH)]
        _legend(figure, [*(line.label for line in lines), "p50", "p90"], [*modes, *both], 2)

    return _svg(key, title, 3.3, draw)


def stage_bars(key: str, title: str, bars: Sequence[StageBar]) -> str:
    """Where the mean TTFT went: one bar per mode, its stages stacked in order and numbered as in the legend.

    Args:
        key: makes the ids of this drawing unique in its page.
        title: what a screen reader says.
        bars: one per mode, the first on top.

    Raises:
        PdctlError: matplotlib cannot be used here.
    """
    names = [name for name in STAGES if any(bar.seconds.get(name, 0) > 0 for bar in bars)]
    names += sorted({name for bar in bars for name, value in bar.seconds.items() if value > 0} - set(STAGES))[:10]
    widths = [[_milliseconds(max(0.0, bar.seconds.get(name, 0.0))) for name in names] for bar in bars]
    longest = max((sum(row) for row in widths), default=0.0)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        patches: dict[int, Any] = {}
        for place, row in enumerate(widths):
            start = 0.0
            for index, width in enumerate(row):
                if width <= 0:
                    continue
                colour, hatch = _STAGE_LOOKS.get(names[index], _OTHER_LOOK)
                look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": PAGE, "linewidth": 0.8}
                patches.setdefault(index, axes.barh(place, width, 0.62, left=start, **look)[0])
                # A narrower part has no room for a number; the table has its figure.
                if width >= 0.05 * longest:
                    box = {"boxstyle": "round,pad=0.15", "facecolor": PAGE, "edgecolor": "none"}
                    axes.text(start + width / 2, place, str(index + 1), ha="center", va="center", size=9, bbox=box)
                start += width
        # In two lines, a name leaves the bars more room.
        axes.set_yticks(range(len(bars)), [_clean(bar.label).replace(" (", "\n(", 1) for bar in bars])
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_xlim(0, longest * 1.03 or 1)
        axes.set_xlabel("mean TTFT (ms)")
        axes.xaxis.set_major_formatter(_plain)
        axes.grid(visible=False, axis="y")
        shown = sorted(patches)
        _legend(figure, [f"{index + 1} {_clean(names[index])}" for index in shown], [patches[i] for i in shown], 3)

    return _svg(key, title, 1.15 + 0.5 * len(bars) + 0.2 * math.ceil(len(names) / 3), draw)


def ratio_forest(key: str, title: str, rows: Sequence[ForestRow], comparisons: Sequence[tuple[str, int]]) -> str:
    """Ratios with their intervals beside the line where nothing differs, on a logarithmic scale.

    Args:
        key: makes the ids of this drawing unique in its page.
        title: what a screen reader says.
        rows: from top to bottom.
        comparisons: name and style of each comparison, for the legend.

    Raises:
        PdctlError: matplotlib cannot be used here.
    """
    places: list[float] = []
    groups: list[tuple[str, tuple[float, float]]] = []
    for row in rows:
        # Rows of the same label stand together, and are labelled once.
        fresh = not groups or groups[-1][0] != row.label
        place = (places[-1] + (1.7 if fresh else 1)) if places else 0.0
        places.append(place)
        if fresh:
            groups.append((row.label, (place, place)))
        else:
            groups[-1] = (row.label, (groups[-1][1][0], place))
    drawn = [row for row in rows if row.value is not None]
    ends = [_drawable(end) for row in drawn for end in (row.value, row.low, row.high) if end is not None]
    least, most = min([*ends, 0.9]) / 1.08, max([*ends, 1.1]) * 1.08

    def draw(figure: Figure) -> None:
        from matplotlib.lines import Line2D

        axes = figure.subplots()
        axes.set_xscale("log")
        axes.axvline(1, color=INK, linewidth=1.2)
        for place, row in zip(places, rows, strict=True):
            if row.value is None:
                continue
            if row.low is not None and row.high is not None:
                axes.plot(
                    [_drawable(row.low), _drawable(row.high)], [place] * 2, color=_series(row.style), linewidth=1.8
                )
            axes.plot([_drawable(row.value)], [place], **_look(row.style))
        axes.set_yticks([sum(ends) / 2 for _, ends in groups], [_clean(label) for label, _ in groups])
        axes.set_ylim(max(places, default=0) + 0.7, -0.7)
        axes.set_xlim(least, most)
        _ratio_ticks(axes, least, most)
        axes.set_xlabel("ratio (left of 1: lower)")
        axes.grid(visible=False, axis="y")
        _legend(figure, [name for name, _ in comparisons], [Line2D([], [], **_look(style)) for _, style in comparisons])

    return _svg(key, title, 1.15 + 0.24 * (max(places, default=0) + 1) + 0.2 * len(comparisons), draw)


def without_controls(text: str) -> str:
    """Text with every character that neither XML nor HTML can hold shown as one that says so."""
    return _NOT_XML.sub("\ufffd", text)


def _steps(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Points of a cumulative distribution from sorted values: few enough that a page stays small."""
    count = len(values)
    if count <= _MOST_POINTS:
        places = range(count)
    else:
        # Both ends are kept: the tail is what is looked for.
        places = sorted({round(step * (count - 1) / (_MOST_POINTS - 1)) for step in range(_MOST_POINTS)})  # type: ignore[assignment]
    return [values[0], *(values[place] for place in places)], [0.0, *(100 * (place + 1) / count for place in places)]


def _milliseconds(seconds: float) -> float:
    """Clamped: a clock that went mad must not end the report."""
    return min(seconds * 1000, _MOST_MILLISECONDS)


def _drawable(ratio: float) -> float:
    """A ratio that has a place on a logarithmic scale."""
    return ratio if math.isfinite(ratio) and 1 / 64 < ratio < 64 else (64 if ratio > 1 else 1 / 64)


def _series(style: int) -> str:
    return SERIES_COLOURS[style % len(SERIES_COLOURS)]


def _look(style: int) -> dict[str, Any]:
    """Colour and marker of a mode."""
    return {"color": _series(style), "marker": _MARKERS[style % len(_MARKERS)], "markersize": 5.5, "linewidth": 1.8}


def _clean(label: str) -> str:
    """A label that XML can hold and that leaves room for the plot."""
    kept = " ".join(without_controls(label).split())
    return kept if len(kept) <= _LONGEST_LABEL else kept[: _LONGEST_LABEL - 1] + "…"


def _plain(value: float, _: object = None) -> str:
    """Numbers of an axis, never as powers of ten unless they are absurd."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:g}"


def _time_scale(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Linear from zero, or logarithmic where a linear scale would press most of the values into a corner."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    least, most = min(values, default=0.0), max(values, default=0.0)
    if least > 0 and most / least > 20:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if most / least < 1000 else (1,), numticks=12))
        axis.set_minor_formatter(NullFormatter())
    else:
        (axes.set_xlim if which == "x" else axes.set_ylim)(0, most * 1.05 or 1)
    axis.set_major_formatter(_plain)


def _ratio_ticks(axes: Axes, least: float, most: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    narrow = (0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2)
    fine = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2)
    coarse = (1 / 64, 1 / 16, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 10, 16, 64)
    ticks = coarse if most / least > 4 else fine if most / least > 1.5 else narrow
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if least <= tick <= most]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _legend(figure: Figure, labels: Sequence[str], handles: Sequence[Any], columns: int = 1) -> None:
    if not labels:
        return
    # Names that begin with _ are not shown by matplotlib: the texts are put in afterwards.
    numbers = [str(index) for index in range(len(labels))]
    legend = figure.legend(handles, numbers, loc="outside upper left", ncols=columns)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(_clean(label))


def _settings(salt: str) -> dict[str, Any]:
    return {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10.0,
        "axes.labelsize": 10.0,
        "xtick.labelsize": 9.5,
        "ytick.labelsize": 9.5,
        "legend.fontsize": 9.5,
        "legend.frameon": False,
        "legend.handlelength": 2.6,
        "legend.borderpad": 0.0,
        "legend.labelspacing": 0.3,
        "legend.columnspacing": 1.2,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.unicode_minus": False,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "hatch.linewidth": 0.8,
        "path.simplify": False,
    }


def _svg(key: str, title: str, height: float, draw: Callable[[Figure], None]) -> str:
    """Draw on a canvas of its own and give the SVG, made fit to stand in a page."""
    # The settings of matplotlib are global while they hold: one drawing at a time.
    with _DRAWING, _quiet():
        try:
            import matplotlib
            from matplotlib.backends.backend_svg import FigureCanvasSVG
            from matplotlib.figure import Figure
        except (ImportError, OSError) as error:
            hint = "reinstall pdctl, or set MPLCONFIGDIR to a folder that can be written"
            raise PdctlError(f"the plots cannot be drawn: matplotlib does not start: {error}", hint=hint) from None
        with matplotlib.rc_context():
            # Whatever the user's own matplotlibrc says, the report is the same.
            matplotlib.rcdefaults()
            # Its types name every setting there is, and change with every version.
            settings: Any = matplotlib.rcParams
            settings.update(_settings(key))
            figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="none")
            canvas: Any = FigureCanvasSVG(figure)
            draw(figure)
            out = io.BytesIO()
            canvas.print_svg(out, metadata={"Date": None, "Creator": None})
    return _for_page(out.getvalue(), key, title)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No word of matplotlib's: of a home that cannot be written, of fonts, of characters that a font lacks.

    None of it changes the drawing: it makes a temporary folder, and the browser brings the characters.
    """
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _for_page(svg: bytes, key: str, title: str) -> str:
    """Unique ids, colours as variables, a title, and none of what would reach beyond the drawing."""
    # Our own output, not somebody's: there are no entities in it to expand.
    root = ElementTree.fromstring(svg)  # noqa: S314
    for unwanted in ("metadata", "defs"):
        for child in root.findall(_SVG + unwanted):
            # The first defs holds a style for every element of the page. Others hold shapes that are used.
            if unwanted == "metadata" or child.find(_SVG + "style") is not None:
                root.remove(child)
    used = {name for element in root.iter() for name in _references(element)}
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        attributes = dict(element.attrib)
        element.attrib.clear()
        for name, value in attributes.items():
            if name == "id":
                if value in used:
                    element.set("id", f"{key}-{value}")
            elif name.endswith("}href"):
                element.set("href", f"#{key}-{value.removeprefix('#')}")
            else:
                element.set(name, _COLOUR.sub(_variable, _REFERENCE.sub(rf"url(#{key}-\1)", value)))
        if "style" in element.attrib:
            element.set("style", element.attrib["style"].replace("'DejaVu Sans'", "system-ui, sans-serif"))
        # Line breaks between elements are a tenth of the size; those around words are none.
        if element.tag != "text" and not (element.text or "").strip():
            element.text = None
        element.tail = None
    size = root.get("viewBox", "0 0 1 1").split()
    root.attrib.clear()
    for name, value in {
        "xmlns": "http://www.w3.org/2000/svg",
        "class": "plot",
        "viewBox": " ".join(size),
        "width": f"{float(size[2]) * 4 / 3:.0f}",
        "height": f"{float(size[3]) * 4 / 3:.0f}",
        "style": "stroke-linejoin: round; stroke-linecap: butt",
        "role": "img",
        "aria-labelledby": f"{key}-title",
    }.items():
        root.set(name, value)
    head = ElementTree.Element("title", {"id": f"{key}-title"})
    head.text = " ".join(without_controls(title).split())
    root.insert(0, head)
    return ElementTree.tostring(root, encoding="unicode")


def _references(element: ElementTree.Element) -> list[str]:
    found = []
    for name, value in element.attrib.items():
        found += _REFERENCE.findall(value)
        if name.endswith("}href"):
            found.append(value.removeprefix("#"))
    return found


def _variable(match: re.Match[str]) -> str:
    colour = match.group()
    return f"var({VARIABLES[colour]}, {colour})" if colour in VARIABLES else colour


__all__ = [
    "SERIES_COLOURS",
    "VARIABLES",
    "ForestRow",
    "Line",
    "LoadLine",
    "StageBar",
    "ratio_forest",
    "stage_bars",
    "ttft_by_load",
    "ttft_cdf",
    "without_controls",
]
