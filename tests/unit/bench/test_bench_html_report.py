"""The page: well-formed, closed in itself, honest in its words, and deaf to what results may hold."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

from pdctl.bench import html_report as page_module
from pdctl.bench.html_report import html_report
from pdctl.bench.results import AnswerCheck, Cell, Difference, Results, Transfers
from pdctl.bench.statistics import Ratio
from pdctl.bench.summary import Comparison, summarise
from pdctl.bench.two_files import summarise_two
from tests.support.bench_results import CELLS, make_results

VOID = {"meta", "br", "hr", "img", "link", "input", "col", "base", "embed", "source", "area", "track", "wbr"}
HOSTILE = [
    "<script>alert(1)</script>",
    "</bdi></main>]]><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)\' {{ 7*7 }} {% raw %}',
    "\x00\x1b[31m\ud83d 😀",
    "\u202eelpmaxe שלום",
    "https://example.org/a.js",
    "x" * 30_000,
]
WRONG = Difference(request=3, got="the red fox", expected="the blue fox", at=4)


class Page(HTMLParser):
    """What a browser would find: tags that are closed in order, attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(results: Results) -> str:
    return html_report(results, summarise(results, draws=200))


def check(text: str) -> Page:
    """What holds for every page."""
    page = Page(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name == "xmlns" or not re.search(r"(?:https?:)?//|javascript:|data:", value), (tag, name, value)
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert len(page.ids) == len(set(page.ids))
    assert "Undefined" not in page.text
    return page


@cache
def whole() -> tuple[Results, str]:
    results = make_results()
    return results, report(results)


@cache
def small() -> str:
    return report(tiny(cells=CELLS[3:4], requests=10, speeds={"pull": 1.0, "push": 0.6}))


def tiny(**more) -> Results:
    return make_results(**({"modes": ("pull", "push"), "cells": CELLS[:1], "rounds": 2, "requests": 6} | more))


@pytest.mark.slow
def test_a_whole_comparison_is_one_small_page_with_every_plot():
    results, text = whole()
    page = check(text)
    assert len(text) < 1_000_000
    # Two of ratios, three of load, and two per cell.
    assert text.count("<svg") == 2 + 3 + 2 * len(results.cells)
    assert text.count("<figcaption>") == text.count("<svg")
    assert "INVALID" not in page.text
    assert "PARTIAL" not in page.text
    assert "Of 288 answers compared with what prefill alone gives, 288 are the same." in page.text
    for word in (
        "node-a",
        "decode-0",
        "vllm 0.32.0",
        "--max-model-len",
        "pdctl bench compare -f lab.yaml",
        "pdctl load 1",
    ):
        assert word in page.text
    assert re.search(r"Push's median TTFT is lower than pull's in 6 of 6 loads \(by \d+ % to \d+ %\)\.", page.text)


def test_the_same_results_give_the_same_page():
    assert report(tiny()) == report(tiny())
    assert report(tiny(seed=8)) != report(tiny())


def test_one_load_is_told_in_a_sentence_with_its_interval():
    page = check(small())
    sentence = r"Push's TTFT is \d+ % lower than pull's at 2048\+16 tokens x4 \(0\.\d\d \[0\.\d\d, [01]\.\d\d\]\)"
    assert re.search(sentence, page.text)


def test_what_does_not_differ_is_called_noise():
    page = check(report(tiny(speeds={"pull": 1.0, "push": 1.0})))
    assert "No difference beyond the noise between push's and pull's TTFT at 512+16 tokens x1 (" in page.text


def comparison(value: float | None, low: float = 0.0, high: float = 0.0) -> Comparison:
    return Comparison("push", "pull", "ttft", "p50", Ratio(value, low, high) if value is not None else None, 100)


LOWER, HIGHER, SAME, UNKNOWN = (
    comparison(0.8, 0.7, 0.9),
    comparison(1.2, 1.1, 1.3),
    comparison(1.0, 0.9, 1.1),
    comparison(None),
)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([LOWER, LOWER], "Push's median TTFT is lower than pull's in 2 of 2 loads (by 20 %)."),
        (
            [LOWER, HIGHER, SAME],
            "Push's median TTFT is lower than pull's in 1 of 3 loads (by 20 %) and higher than pull's in 1 of 3 loads "
            "(by 20 %). In 1 there is no difference beyond the noise.",
        ),
        ([SAME, SAME], "Push's median TTFT shows no difference beyond the noise from pull's in any of 2 loads."),
        (
            [LOWER, UNKNOWN],
            "Push's median TTFT is lower than pull's in 1 of 2 loads (by 20 %). 1 of 2 could not be compared.",
        ),
        (
            [SAME, UNKNOWN],
            "Push's median TTFT shows no difference beyond the noise from pull's in 1 of 2 loads. "
            "1 of 2 could not be compared.",
        ),
        ([UNKNOWN, UNKNOWN], "Push's median TTFT could not be compared with pull's in any of 2 loads."),
    ],
)
def test_the_headline_counts_every_load_whichever_way_it_went(found, words):
    assert page_module._overall(found) == words


def test_a_ratio_never_looks_as_if_it_touched_one_when_it_does_not():
    assert page_module._ratio(Ratio(0.81, 0.53, 0.92)) == "0.81 [0.53, 0.92]"
    assert page_module._ratio(Ratio(0.87, 0.75, 0.998)) == "0.870 [0.750, 0.998]"
    assert page_module._ratio(Ratio(0.87, 0.75, 0.9997)) == "0.8700 [0.7500, 0.9997]"
    assert page_module._ratio(Ratio(0.9, 0.8, 1.003)) == "0.90 [0.80, 1.00]"
    assert page_module._ratio(None) == "–"


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_text_is_shown_and_does_nothing(hostile):
    bad = Difference(request=1, got=hostile, expected=hostile + "!", at=0)
    results = tiny(
        model=hostile,
        cluster=hostile,
        error=hostile,
        error_every=3,
        wrong=[bad],
        trouble=(hostile,),
        incomplete_because=hostile,
        complete=False,
    )
    instances = tuple(
        replace(one, name=hostile, host=hostile, flags=(hostile,), versions={hostile: hostile}, env={hostile: hostile})
        for one in results.environment.instances
    )
    environment = replace(
        results.environment, instances=instances, generator=hostile, fabric=hostile, transfer={hostile: hostile}
    )
    runs = tuple(
        replace(run, stages=replace(run.stages, notes=(hostile,), seconds={**run.stages.seconds, hostile: 0.01}))
        for run in results.runs
        if run.stages
    )
    results = replace(results, environment=environment, command=hostile, runs=runs)
    text = report(results)
    page = check(text)
    assert len(text) < 400_000
    assert "\x00" not in text
    assert "\x1b" not in text
    text.encode()
    if len(hostile) < 100 and "\x00" not in hostile:
        assert " ".join(hostile.split()) in page.text


def test_wrong_answers_are_the_first_thing_said_and_no_speed_is_praised():
    page = check(report(tiny(wrong=[WRONG, WRONG])))
    text = page.text
    assert text.index("INVALID") < text.index("What it says")
    assert text.rindex("INVALID") > text.index("How it was measured")
    assert "must not be used" in text
    assert "the red fox" in text
    assert "the blue fox" in text
    assert "Nothing: answers are wrong" in text
    assert " % lower than" not in text


def test_many_wrong_answers_are_counted_and_some_shown():
    page = check(report(tiny(wrong=[WRONG] * 50, answers=60)))
    assert "50 did not:" in page.text
    assert "30 more are in results.json." in page.text


def test_a_partial_result_says_so_and_why():
    page = check(report(tiny(complete=False, incomplete_because="decode-0 on node-b ended (exit code 137)")))
    assert page.text.count("PARTIAL") == 2
    assert "decode-0 on node-b ended (exit code 137)" in page.text
    assert "INVALID" not in page.text


@pytest.mark.parametrize("complete", [True, False])
def test_nothing_measured_is_a_page_too(complete):
    results = replace(make_results(rounds=1, requests=1), runs=(), complete=complete)
    page = check(report(results))
    assert "Nothing was measured." in page.text
    assert ("PARTIAL" in page.text) is not complete


def test_one_mode_without_stages_has_no_comparison_and_says_its_figures():
    text = report(tiny(modes=("push",), stages=False, answers=0))
    page = check(text)
    assert text.count("<svg") == 1
    assert re.search(
        r"push \(pdctl's connector\): median TTFT [\d.]+ ms, TPOT [\d.]+ ms at 512\+16 tokens x1", page.text
    )
    assert "No answers were compared" in page.text
    assert "95 % interval], and in words" not in page.text


def test_requests_that_all_failed_leave_no_plot_and_no_zero():
    text = report(tiny(error_every=1, stages=False))
    page = check(text)
    assert "<svg" not in text
    assert "nothing was answered at 512+16 tokens x1" in page.text
    assert "12× HTTP 500" in page.text
    assert not re.search(r"\b0\.0+\b.{0,3}ms", page.text)


def test_what_was_not_counted_is_a_dash():
    results = tiny(modes=("push",))
    none = replace(results, runs=tuple(replace(run, transfers=Transfers()) for run in results.runs))
    row = r"push \(pdctl's connector\) – – – – – – 8 of 8"
    assert re.search(row, check(report(none)).text)
    assert not re.search(row, check(report(results)).text)


def test_what_was_computed_again_is_told_by_tokens():
    results = tiny(modes=("push",), stages=False)
    counted = Transfers(completed=3, recomputed_tokens=2048)
    lost = replace(results, runs=tuple(replace(run, transfers=counted) for run in results.runs))
    text = report(lost)
    check(text)
    assert '<td class="worse">4,096 tokens (requests not known)</td>' in text
    assert page_module._recomputed(Transfers(recomputed_tokens=2, recomputed_requests=1)) == "2 tokens (1 request)"
    assert page_module._recomputed(Transfers(recomputed_tokens=0, recomputed_requests=0)) == "0"


def test_answers_that_were_not_compared_are_told():
    results = tiny(modes=("push",), stages=False)
    some = AnswerCheck(3, 3, error="1 of 4 could not be asked again: HTTP 500", asked=4)
    page = check(report(replace(results, runs=tuple(replace(run, answers=some) for run in results.runs))))
    assert "6 of 6 (2 not compared)" in page.text
    assert page.text.count("6 of 8 answers compared; 1 of 4 could not be asked again: HTTP 500 (in 2 rounds)") == 1
    assert "6 of 8 were compared: 1 of 4" in page.text


def test_environment_variables_and_transfer_settings_are_among_the_details():
    page = check(report(tiny(modes=("push",), stages=False)))
    assert "VLLM_CPU_KVCACHE_SPACE=4" in page.text
    assert "timeout_s=30" in page.text


def test_rates_and_prefix_hits_are_told():
    cells = [Cell(1024, 64, rate=rate, prefix_hit=50) for rate in (2.0, 0.5)]
    text = report(tiny(cells=cells))
    page = check(text)
    assert "Prompts of 1024 tokens, answers of 64, 0.5 requests per second, 50 % prefix hits" in page.text
    # The loads rise, whatever their order in the settings.
    drawing = text[text.index("load-0-title") :]
    assert drawing.index(">0.5<") < drawing.index(">2<")


def test_a_stage_below_zero_is_in_the_table_and_its_absence_in_the_plot_is_told():
    results = tiny()
    runs = tuple(
        replace(run, stages=replace(run.stages, seconds={"prefill": 0.2, "match": -0.01}))
        for run in results.runs
        if run.stages
    )
    page = check(report(replace(results, runs=runs)))
    assert "clocks disagree" in page.text
    assert "-10.0" in page.text


def test_two_files_are_told_apart_by_their_names():
    one, other = tiny(), tiny(seed=8, speeds={"pull": 1.0, "push": 0.5})
    summary = summarise_two(one, other, ("before.json", "after.json"), draws=200)
    page = check(html_report(other, summary))
    assert "push, after.json" in page.text
    assert "push, before.json" in page.text


def test_an_absurd_clock_is_no_error():
    for moment in (1e300, -1e300):
        assert "at an unknown time" in check(report(replace(tiny(modes=("push",)), created_unix=moment))).text


def test_both_schemes_define_every_colour_of_the_plots():
    text = small()
    style = text[text.index("<style>") : text.index("</style>")]
    used = set(re.findall(r"var\((--[a-z0-9-]+)", text))
    light, dark = style.split("prefers-color-scheme: dark", 1)
    assert {name for name in used if f"{name}:" not in light} == set()
    assert {name for name in used if f"{name}:" not in dark} == set()
