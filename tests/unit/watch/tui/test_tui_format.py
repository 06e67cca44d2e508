"""Figures and foreign texts on their way to the screen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from pdctl.watch.snapshot import Percentiles
from pdctl.watch.tui import format as show

WILD = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-(2**80), 2**80))
HOSTILE = st.text(
    alphabet=st.one_of(
        st.characters(),
        st.sampled_from(list("\x00\x1b\x07\r\n\t\x7f\x9b\u202e\u2066\u200b\u200d\ufe0f\u0301界é שلَ[]\\🇩👍🏽\ud800")),
    ),
    max_size=80,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (math.nan, "-"),
        (-1.0, "-"),
        (0.0, "0.0 ms"),
        (0.0381, "38 ms"),
        (0.9999, "1.0 s"),
        (7.24, "7.2 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (7500, "2h05m"),
        (3 * 86400 + 4 * 3600, "3d04h"),
        (1e300, ">9999d"),
    ],
)
def test_seconds(value: float | None, expected: str) -> None:
    assert show.seconds(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1_572_864, "1.5 MiB"),
        (373 * 2**30, "373 GiB"),
        (2**200, ">999999 EiB"),
    ],
)
def test_amount(value: int | None, expected: str) -> None:
    assert show.amount(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "-"), (0, "0"), (20_000, "0.02"), (12_500_000, "12.5"), (1.234e9, "1234")]
)
def test_megabytes_per_s(value: float | None, expected: str) -> None:
    assert show.megabytes_per_s(value) == expected


def test_missing_is_not_zero_in_a_sparkline() -> None:
    assert show.sparkline([None, 0.0, 5.0, 10.0]) == " ▁▅█"
    assert show.sparkline([0.0, 0.0]) == "▁▁"
    assert show.sparkline([]) == ""


def test_percentiles_of_nothing_are_missing() -> None:
    assert show.percentiles(None) == show.percentiles(Percentiles(0.0, 0.0, 0)) == "p50 - p99 -"
    assert show.percentiles(Percentiles(0.12, 1.34, 3)) == "p50 120 ms p99 1.3 s"


def test_stale_says_how_old() -> None:
    assert show.stale(7.2) == "stale 7 s"
    assert show.stale(None) == "stale -"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\u202eevil", "\\u202eevil"),
        ("[red]x[/red]", "[red]x[/red]"),
        ("界 ש", "界 ש"),
        ("e" + "\u0301" * 5, "e\u0301\u0301\\u0301\\u0301\\u0301"),
        ("\ud800", "\\ud800"),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert show.clean(text) == expected


def test_clean_is_bounded() -> None:
    assert len(show.clean("\x00" * 10_000_000, 100)) < 500


@given(HOSTILE)
def test_no_text_keeps_what_a_terminal_would_act_on(text: str) -> None:
    cleaned = show.clean(text)

    assert not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 for letter in cleaned)
    assert not any(letter in cleaned for letter in "\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u200e\u200f\u200d\ufeff")
    cleaned.encode("utf-8")


@given(HOSTILE, st.integers(0, 40))
def test_a_fitted_text_is_never_wider_than_its_column(text: str, width: int) -> None:
    cleaned = show.clean(text)

    assert cell_len(show.fit(cleaned, width)) <= width
    assert cell_len(show.fit_left(cleaned, width)) == width
    assert cell_len(show.fit_right(cleaned, width)) == width


@given(WILD)
def test_every_figure_can_be_shown_in_a_narrow_column(value: float | None) -> None:
    for formatter in (show.seconds, show.whole_seconds, show.amount, show.megabytes_per_s, show.per_second, show.count):
        text = formatter(value)
        assert 0 < len(text) <= 12
        assert text.isascii()
    missing = value is None or not math.isfinite(value) or value < 0
    assert (show.seconds(value) == "-") is missing
    assert (show.share(value) == "-") is missing


@given(st.lists(WILD, max_size=70))
def test_a_sparkline_has_one_bar_for_each_value(values: list[float | None]) -> None:
    bars = show.sparkline(values)

    assert len(bars) == len(values)
    for bar, value in zip(bars, values, strict=True):
        assert (bar == " ") is (show.figure(value) is None)


@given(st.floats(), st.floats(), st.floats(), st.integers(0, 100))
def test_a_bar_always_fills_its_line(start: float, end: float, total: float, width: int) -> None:
    assert cell_len(show.span_bar(start, end, total, width)) == width


@given(st.floats(0, 100), st.floats(0, 100))
def test_a_bar_is_always_to_be_seen(start: float, length: float) -> None:
    assert show.span_bar(start, start + length, 200.0, 40).strip()


@given(st.floats())
def test_any_time_of_day_can_be_shown(unix: float) -> None:
    assert len(show.clock_time(unix)) in (1, 9)
