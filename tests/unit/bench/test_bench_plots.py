"""The plots: well-formed, self-contained, alike for the same data, and whatever the labels and figures are."""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdctl.bench import plots
from pdctl.bench.plots import ForestRow, Line, LoadLine, StageBar

ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "<script>alert(1)</script>",
    "]]>",
    "\" onload='x' &amp;",
    "$x_1^2$",
    "_hidden",
    "\x00\x1b[31m\ud800",
    "😀 模型 שלום",
    "x" * 5000,
    "",
]
TIMES = [0.1 + 0.002 * index for index in range(100)]


def cdf(key: str = "k", label: str = "push") -> str:
    return plots.ttft_cdf(key, "TTFT", [Line(label, 0, TIMES), Line("pull", 1, [2 * one for one in TIMES])])


def by_load(key: str = "k", label: str = "push") -> str:
    lines = [LoadLine(label, 0, [0.1, 0.2], [0.2, None]), LoadLine("pull", 1, [0.1, None], [0.3, 0.4])]
    return plots.ttft_by_load(key, "TTFT by load", "requests at once", ["1", "4"], lines)


def bars(key: str = "k", label: str = "push") -> str:
    made = [StageBar(label, {"prefill": 0.2, "transfer": 0.1, label: 0.05}), StageBar("pull", {"rest": 0.4})]
    return plots.stage_bars(key, "stages", made)


def forest(key: str = "k", label: str = "2048+16 x4") -> str:
    rows = [ForestRow(label, 0, 0.81, 0.53, 0.92), ForestRow("b", 1, None, None, None)]
    return plots.ratio_forest(key, "ratio", rows, [("push / pull", 0), (label, 1)])


ALL: list[Callable[..., str]] = [cdf, by_load, bars, forest]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("draw", ALL)
def test_a_drawing_reaches_nothing_outside_and_has_a_title(draw):
    svg = draw()
    root = ElementTree.fromstring(svg)
    assert root.find(f"{SVG}title").text
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == root.find(f"{SVG}title").get("id")
    assert not re.search(r"https?://", svg.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "g", "path", "use", "text", "tspan", "defs", "clipPath", "rect", "pattern"}
    assert all(one.get("href").startswith("#") for one in root.iter(f"{SVG}use"))


@pytest.mark.parametrize("draw", ALL)
def test_ids_are_unique_and_every_reference_leads_to_one(draw):
    both = draw("one") + draw("two")
    ids = re.findall(r' id="([^"]+)"', both)
    assert len(ids) == len(set(ids))
    referred = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', both)
    assert referred
    assert {first or second for first, second in referred} <= set(ids)


@pytest.mark.parametrize("draw", ALL)
def test_the_same_data_give_the_same_drawing_and_others_another(draw):
    assert draw() == draw()
    assert draw(label="another") != draw()


@pytest.mark.parametrize("label", HOSTILE)
@pytest.mark.parametrize("draw", ALL)
def test_labels_are_text_whatever_they_are(draw, label):
    svg = draw(label=label)
    root = ElementTree.fromstring(svg)
    assert not list(root.iter(f"{SVG}script"))
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    assert len(svg) < 100_000
    if label == "<script>alert(1)</script>":
        assert any(label in text for text in texts(svg))
    if label == "_hidden":
        assert any(text.startswith(label) or text.endswith(label) for text in texts(svg))
    assert max(map(len, texts(svg))) < 80


def test_all_colours_of_modes_and_text_are_variables_with_a_colour_to_fall_back_to():
    svg = cdf()
    assert "var(--series-0, #0b62ab)" in svg
    assert "var(--series-1, #c2460b)" in svg
    assert "var(--ink, #1f2329)" in svg
    assert not re.search(r"(?:fill|stroke): #(?:0b62ab|c2460b|1f2329|000000)", svg)


def test_a_narrow_spread_is_linear_and_a_wide_one_logarithmic():
    narrow = plots.ttft_cdf("k", "t", [Line("push", 0, [0.1, 0.15, 0.2])])
    assert "0" in texts(narrow)[:3]
    wide = plots.ttft_cdf("k", "t", [Line("push", 0, [0.01, 0.1, 1.0])])
    assert {"10", "100", "1,000"} <= set(texts(wide))


def test_a_distribution_begins_at_none_and_ends_at_all_and_keeps_its_tail():
    values = sorted([*TIMES * 50, 99.0])
    shown, shares = plots._steps(values)
    assert len(shown) <= 401
    assert (shown[0], shares[0]) == (values[0], 0)
    assert (shown[-1], shares[-1]) == (99.0, 100)
    assert shares == sorted(shares)


def test_stages_are_numbered_in_their_order_and_the_widest_say_their_number():
    svg = bars(label="push")
    assert [text for text in texts(svg) if text in ("1 prefill", "2 transfer", "3 rest", "4 push")] == [
        "1 prefill",
        "2 transfer",
        "3 rest",
        "4 push",
    ]
    assert {"1", "2", "3"} <= set(texts(svg))


def test_a_stage_below_zero_is_not_drawn():
    svg = plots.stage_bars("k", "t", [StageBar("push", {"prefill": 0.2, "match": -0.1})])
    assert not [text for text in texts(svg) if "match" in text]


def test_a_ratio_is_drawn_left_of_the_line_if_it_is_below_one():
    for ratio, left in ((0.8, True), (1.25, False)):
        svg = plots.ratio_forest("k", "t", [ForestRow("a", 0, ratio, ratio, ratio)], [("push / pull", 0)])
        root = ElementTree.fromstring(svg)
        # The marker below the legend, and the heavy line at 1.
        marks = [one for one in root.iter(f"{SVG}use") if "--series-0" in one.get("style", "")]
        mark = max(marks, key=lambda one: float(one.get("y")))
        line = next(one for one in root.iter(f"{SVG}path") if "stroke-width: 1.2" in one.get("style", ""))
        assert (float(mark.get("x")) < float(line.get("d").split()[1])) is left


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    values=st.lists(st.floats(min_value=0, allow_infinity=False, allow_nan=False), min_size=0, max_size=6),
    label=st.text(max_size=30),
)
def test_no_time_and_no_label_ends_a_drawing(values, label):
    some: list[float | None] = [*values[:2], None, None][:2]
    for svg in (
        plots.ttft_cdf("k", label, [Line(label, 5, values)]),
        plots.ttft_by_load("k", label, label, ["1", label], [LoadLine(label, 0, some, some)]),
        plots.stage_bars("k", label, [StageBar(label, {label: one}) for one in values]),
    ):
        ElementTree.fromstring(svg)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.lists(st.floats(), min_size=3, max_size=3))
def test_no_ratio_ends_a_drawing(ends):
    ElementTree.fromstring(plots.ratio_forest("k", "t", [ForestRow("a", 0, *ends)], [("b / a", 0)]))


def test_the_settings_of_matplotlib_and_its_logger_are_as_before():
    import matplotlib

    before = dict(matplotlib.rcParams)
    level = logging.getLogger("matplotlib").level
    cdf()
    assert dict(matplotlib.rcParams) == before
    assert logging.getLogger("matplotlib").level == level


@pytest.mark.slow
def test_a_home_that_cannot_be_written_says_nothing_and_pyplot_is_never_loaded(tmp_path):
    code = (
        "import sys\n"
        "import pdctl.bench.plots as plots\n"
        "assert 'matplotlib' not in sys.modules, 'imported before it is needed'\n"
        "svg = plots.ttft_cdf('k', 't', [plots.Line('push \\u6a21 \\U0001f600', 0, [0.1, 0.2])])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "print(svg[:4])\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MPL", "XDG"))}
    environ |= {"HOME": "/proc/nowhere", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "<svg\n", "")


def test_not_a_number_of_a_ratio_is_at_the_edge():
    assert plots._drawable(math.nan) == 1 / 64
    assert plots._drawable(math.inf) == 64
