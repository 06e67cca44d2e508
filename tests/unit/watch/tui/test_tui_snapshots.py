"""Pictures of the dashboard. After a change that is meant: pytest --snapshot-update, and look at the SVG files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot

from pdctl.watch.tui.app import Dashboard, make_dashboard
from pdctl.watch.tui.source import Frame, ReplayPosition
from tests.unit.watch.tui import made_frames as made

SnapCompare = Callable[..., bool]
pytestmark = pytest.mark.slow


def picture(
    compare: SnapCompare, frame: Frame, size: tuple[int, int], *keys: str, actions: made.Acting | None = None
) -> bool:
    app = make_dashboard(made.Scripted([frame]), read_only=actions is None, actions=actions, clock=made.Clock())

    async def drawn(pilot: Pilot[None]) -> None:
        shown = pilot.app
        assert isinstance(shown, Dashboard)
        for _ in range(500):
            if shown.frames_drawn and shown._boxes:
                break
            await pilot.pause(0.01)
        await pilot.press(*keys)
        await pilot.pause(0.1)

    return compare(app, terminal_size=size, run_before=drawn)


def test_one_instance_80x24(snap_compare: SnapCompare) -> None:
    frame = made.frame(1)
    alone = replace(frame.snapshot, instances=frame.snapshot.instances[:1])

    assert picture(snap_compare, Frame(alone), (80, 24))


def test_stalled_80x24(snap_compare: SnapCompare) -> None:
    assert picture(snap_compare, made.stalled_frame(4), (80, 24))


def test_stalled_without_colour_80x24(snap_compare: SnapCompare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    assert picture(snap_compare, made.stalled_frame(4), (80, 24))


def test_empty_80x24(snap_compare: SnapCompare) -> None:
    assert picture(snap_compare, made.frame(0), (80, 24))


def test_confirm_80x24(snap_compare: SnapCompare) -> None:
    assert picture(snap_compare, made.frame(4), (80, 24), "R", actions=made.Acting())


def test_eight_instances_120x40(snap_compare: SnapCompare) -> None:
    assert picture(snap_compare, made.frame(4), (120, 40))


def test_stalled_with_details_120x40(snap_compare: SnapCompare) -> None:
    assert picture(snap_compare, made.stalled_frame(4), (120, 40), "tab", "tab", "enter")


def test_all_down_120x40(snap_compare: SnapCompare) -> None:
    assert picture(snap_compare, made.down_frame(), (120, 40), "enter")


def test_help_in_a_replay_120x40(snap_compare: SnapCompare) -> None:
    frame = replace(made.frame(4), replay=ReplayPosition(11, 90, False))

    assert picture(snap_compare, frame, (120, 40), "question_mark")


def test_64_instances_200x60(snap_compare: SnapCompare) -> None:
    assert picture(snap_compare, made.frame(32, transfers=200), (200, 60))


def test_stalled_200x60(snap_compare: SnapCompare) -> None:
    assert picture(snap_compare, made.stalled_frame(8), (200, 60), "tab", "tab")
