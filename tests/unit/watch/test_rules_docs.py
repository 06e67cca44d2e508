"""docs/alerts.md has every code, and nothing that the code does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdctl.watch.rules import CODES
from pdctl.watch.settings import WatchSettings

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "alerts.md").read_text(encoding="utf-8")
SECTIONS = {
    match[1]: (match[2], match[3]) for match in re.finditer(r"^## `(\w+)` (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}


def test_every_code_has_a_section_under_its_name() -> None:
    assert {code: name for code, (name, _) in SECTIONS.items()} == {code: one.name for code, one in CODES.items()}


@pytest.mark.parametrize("code", CODES)
def test_each_section_is_complete(code: str) -> None:
    text = SECTIONS[code][1]
    for part in (r"\*\*Means:\*\* ", r"\*\*[PD][^*]* sees?:\*\* ", r"\*\*Usual causes:\*\* ", r"\*\*Next steps:\*\* "):
        assert re.search(part, text), part


def test_the_figures_are_those_of_the_settings() -> None:
    defaults = WatchSettings()
    for words in (
        f"{defaults.p99_factor:.0f} x the recent",
        f"cluster file is {defaults.stall_after_s:.0f} s",
        f"at least {defaults.connect_after_s:.0f} s",
        f"at least {defaults.slow_prefill_after_s:.0f} s",
        f"gone for {defaults.flap_hold_s:.0f} s",
    ):
        assert words in PAGE.replace("\n", " "), words
    assert {defaults.stale_intervals, defaults.open_ticks, defaults.close_ticks} == {3.0, 2}
    assert (defaults.flap_window_s, defaults.window_s, defaults.blind_hold_s) == (120.0, 60.0, 60.0)


def test_no_line_is_too_long() -> None:
    assert [line for line in PAGE.splitlines() if len(line) > 135] == []
