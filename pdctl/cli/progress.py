"""Progress on stderr: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pdctl.cli.console import ProgressConsole
from pdctl.lifecycle.reporter import Reporter, SilentReporter

_REPEAT_S = 30.0


class Display(Reporter, Protocol):
    """A reporter that also shows how far the present stage is."""

    def detail(self, text: str) -> None:
        """How far the present stage is; replaces what was said of it before."""


class _SilentDisplay(SilentReporter):
    def detail(self, text: str) -> None:
        """Drop it."""


class LineReporter:
    """One line per change, with the time since the start; for logs and pipes. Repeats a long phase every 30 s."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, float]] = {}

    def _line(self, text: str) -> None:
        # Of `pdctl up 2>&1 | head` the launch goes on: half of one, left running, is worse than one nobody looks at.
        with self._lock, suppress(BrokenPipeError):
            click.echo(f"[{time.monotonic() - self._begin:6.1f} s] {text}", err=True)

    def step(self, text: str) -> None:
        """Print the stage."""
        self._line(text)

    def detail(self, text: str) -> None:
        """Drop it: a log has no use for every single step."""

    def progress(self, instance: str, phase: str, detail: str, elapsed_s: float) -> None:
        """Print the phase if it is new, or old enough to be said again."""
        with self._lock:
            last, said = self._last.get(instance, ("", 0.0))
            if last == phase and elapsed_s - said < _REPEAT_S:
                return
            self._last[instance] = (phase, elapsed_s)
        self._line(f"  {instance}: {phase}{f' ({detail})' if detail else ''}")

    def note(self, text: str) -> None:
        """Print it."""
        self._line(text)

    def warning(self, text: str) -> None:
        """Print it, marked."""
        self._line(f"warning: {text}")


class LiveReporter:
    """The steps so far with their times, and a row per instance that moves.

    Args:
        console: where.
        keep_steps: whether finished steps stay on the screen.
    """

    def __init__(self, console: Console, *, keep_steps: bool = True) -> None:
        self._console = console
        self._keep_steps = keep_steps
        self._lock = threading.Lock()
        self._step = ""
        self._detail = ""
        self._step_begin = time.monotonic()
        self._rows: dict[str, tuple[str, str, float, float]] = {}
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=True)

    def start(self) -> None:
        """Take the lower part of the terminal."""
        self._live.start()

    def stop(self) -> None:
        """Give it back, leaving the finished steps."""
        self._finish_step()
        self._live.stop()

    def _finish_step(self) -> None:
        with self._lock:
            step, took = self._step, time.monotonic() - self._step_begin
            self._step = self._detail = ""
        if step and self._keep_steps:
            self._console.print(Text.assemble(("  ", ""), step, (f"  {took:.1f} s", "dim")))

    def _render(self) -> RenderableType:
        with self._lock:
            parts: list[RenderableType] = []
            if self._step:
                took = time.monotonic() - self._step_begin
                detail = f"  {self._detail}" if self._detail else ""
                self._spinner.update(text=Text.assemble(self._step, (f"{detail}  {took:.0f} s", "dim")))
                parts.append(self._spinner)
            if self._rows:
                table = Table.grid(padding=(0, 2))
                for name, (phase, detail, elapsed, at) in sorted(self._rows.items()):
                    still = phase in ("ready", "failed")
                    seconds = elapsed if still else elapsed + time.monotonic() - at
                    style = {"ready": "green", "failed": "red"}.get(phase, "yellow")
                    glyph = {"ready": "✓", "failed": "✗"}.get(phase, "·")
                    table.add_row(f"  {glyph}", name, Text(phase, style=style), f"{seconds:.0f} s", Text(detail, "dim"))
                parts.append(table)
            return Group(*parts)

    def step(self, text: str) -> None:
        """Finish the step before and begin this one."""
        self._finish_step()
        with self._lock:
            self._step, self._step_begin = text, time.monotonic()

    def detail(self, text: str) -> None:
        """Show it behind the step."""
        with self._lock:
            self._detail = text

    def progress(self, instance: str, phase: str, detail: str, elapsed_s: float) -> None:
        """Update the instance's row."""
        with self._lock:
            self._rows[instance] = (phase, detail, elapsed_s, time.monotonic())

    def note(self, text: str) -> None:
        """Print above the live part."""
        self._console.print(Text(text))

    def warning(self, text: str) -> None:
        """Print above the live part, marked."""
        self._console.print(Text.assemble(("! ", "yellow bold"), text))


@contextmanager
def reporting(*, quiet: bool, keep_steps: bool = True) -> Iterator[Display]:
    """The reporter that fits: nothing when ``quiet``, live on a terminal, lines elsewhere.

    Args:
        quiet: whether to show nothing at all.
        keep_steps: whether a terminal goes on showing finished steps.
    """
    if quiet:
        yield _SilentDisplay()
        return
    if not sys.stderr.isatty():
        yield LineReporter()
        return
    live = LiveReporter(ProgressConsole(stderr=True, highlight=False), keep_steps=keep_steps)
    live.start()
    try:
        yield live
    finally:
        live.stop()
