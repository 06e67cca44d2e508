"""The dashboard on a terminal that shows no UTF-8."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.geometry import Size

from pdctl.watch.tui.app import Dashboard
from pdctl.watch.tui.ascii_only import SIGNS, as_ascii, shows_unicode
from tests.unit.watch.tui import made_frames as made


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", True), ("UTF-8", True), ("iso-8859-1", False), ("ascii", False), (None, False), ("no-such", False)],
)
def test_what_an_encoding_can_show(encoding: str | None, shown: bool) -> None:
    assert shows_unicode(encoding) is shown


@given(st.text())
def test_ascii_is_as_wide_as_the_text_was(text: str) -> None:
    told = as_ascii(text)
    assert told.isascii()
    assert cell_len(told) == cell_len(text) or not text.isprintable()


def test_signs_that_mean_something_else_stay_apart() -> None:
    assert len({SIGNS[one] for one in "●▲✖○"}) == 4


def screen(encoding: str) -> str:
    app = Dashboard(made.Scripted([made.frame(1)]), read_only=False, actions=made.Acting(), encoding=encoding)

    async def run() -> str:
        async with app.run_test(size=(100, 30)) as pilot:
            deadline = asyncio.get_running_loop().time() + 20
            while not app.frames_drawn and asyncio.get_running_loop().time() < deadline:
                await pilot.pause(0.01)
            await pilot.press("question_mark")
            await pilot.pause()
            strips = app.screen._compositor.render_strips(Size(100, 30))
            return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    return asyncio.run(run())


def test_the_whole_screen_is_ascii_where_it_must_be() -> None:
    told = screen("iso-8859-1")
    assert told.isascii()
    assert "prefill-0" in told or "restart the instance" in told
    assert not screen("utf-8").isascii()
