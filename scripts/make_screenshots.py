"""Make the pictures of `pdctl watch` in the documents from recordings of real runs (`pdctl watch --record FILE`).

    python scripts/make_screenshots.py RECORDING NAME [--at N] [--size 120x40] [--keys tab,enter] [--out FOLDER]

Writes docs/images/watch-NAME.svg: the recording's snapshot N (from 0; -1, the last, if not given), as the dashboard
shows it after these keys were pressed. All snapshots up to it are played first, so that alerts and sparklines are those
of the run. The same recording always gives the same picture.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pdctl.errors import PdctlError, UsageError
from pdctl.watch.book import Watchdog
from pdctl.watch.recording import read_recording
from pdctl.watch.settings import WatchSettings
from pdctl.watch.tui.app import make_dashboard
from pdctl.watch.tui.source import Frame, SourceClosed

_LONGEST = 400


class Silent:
    """A source that gives nothing: the frames are handed to the dashboard directly."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def next(self) -> Frame:
        """Wait for the end."""
        self._closed.wait()
        raise SourceClosed

    def close(self) -> None:
        """End."""
        self._closed.set()


def frames_of(recording: Path, at: int) -> list[Frame]:
    """What the dashboard saw up to that snapshot, as the watchdog judges it."""
    snapshots = list(read_recording(recording))
    if not snapshots or not -len(snapshots) <= at < len(snapshots):
        raise UsageError(f"{recording} has {len(snapshots)} snapshots, and no number {at}")
    watchdog = Watchdog(WatchSettings())
    frames = []
    for snapshot in snapshots[: at % len(snapshots) + 1]:
        alerts, events = watchdog.look(snapshot)
        frames.append(Frame(snapshot, tuple(alerts), tuple(events)))
    return frames


async def draw(frames: list[Frame], size: tuple[int, int], keys: list[str]) -> str:
    """The SVG of the last frame."""
    app = make_dashboard(Silent(), read_only=False, clock=lambda: 0.0)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        for frame in frames:
            app.take(frame)
        await pilot.pause()
        await pilot.press(*keys)
        await pilot.pause(0.2)
        return app.export_screenshot(title="pdctl watch")


def size_of(text: str) -> tuple[int, int]:
    """``120x40`` -> (120, 40)."""
    match = re.fullmatch(r"(\d{2,3})x(\d{2,3})", text)
    if not match or max(int(match[1]), int(match[2])) > _LONGEST:
        raise argparse.ArgumentTypeError("a size is such as 120x40")
    return int(match[1]), int(match[2])


def name_of(text: str) -> str:
    """A name that is fit for a file."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", text):
        raise argparse.ArgumentTypeError("a name has small letters, digits and hyphens")
    return text


def main() -> int:
    """Write one picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("name", type=name_of)
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--size", type=size_of, default=(120, 40))
    parser.add_argument("--keys", default="", help="with commas between them, as Textual names them: tab,enter")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "images")
    options = parser.parse_args()
    try:
        frames = frames_of(options.recording, options.at)
    except PdctlError as error:
        print(f"make_screenshots: {error.message}", file=sys.stderr)
        return error.exit_code
    svg = asyncio.run(draw(frames, options.size, [key for key in options.keys.split(",") if key]))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"watch-{options.name}.svg"
    path.write_text(svg, encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
