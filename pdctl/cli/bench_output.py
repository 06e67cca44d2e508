"""Runs a bench session, keeps its results, and shows them."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pdctl.cli.bench_options import REPORT, RESULTS, command_line
from pdctl.cli.options import print_json

if TYPE_CHECKING:
    from pdctl.bench.results import Environment, Results, Settings
    from pdctl.bench.session import Launcher, Outcome
    from pdctl.bench.summary import Summary
    from pdctl.cli.console import OutputConsole
    from pdctl.cli.progress import Display
    from pdctl.plan import ClusterPlan


@dataclass(frozen=True)
class Measured:
    """A session that has ended, and where its results are."""

    outcome: Outcome
    folder: Path

    def show(self, *, as_json: bool) -> int:
        """Print tables or JSON, and what went wrong. Returns the exit code."""
        from pdctl.cli.main import INTERRUPTED, print_error

        results = self.outcome.results
        show_results(results, as_json=as_json, folder=self.folder if results.runs else None)
        if self.outcome.error is not None:
            print_error(self.outcome.error)
            return max(1, self.outcome.error.exit_code)
        if self.outcome.interrupted:
            kept = f"; what was measured is in {self.folder}" if results.runs else ""
            click.echo(f"interrupted{kept}", err=True)
            return INTERRUPTED
        return exit_code(results)


def exit_code(results: Results) -> int:
    """0, or 1 if the results are not to be relied on."""
    return 1 if results.invalid_because or not results.complete else 0


def measure(
    kind: Literal["run", "compare"],
    plan: ClusterPlan,
    settings: Settings,
    environment: Environment,
    launcher: Launcher,
    folder: Path,
    display: Display,
) -> Measured:
    """Measure everything, writing the results after every cell, and the report at the end."""
    from pdctl.bench.results import Results, write_results
    from pdctl.bench.session import Session

    results = Results(1, kind, plan.spec.cluster, time.time(), command_line(), settings, environment)
    outcome = Session(results, launcher, lambda kept: write_results(folder / RESULTS, kept), display).run()
    if outcome.results.runs:
        display.step("writing the report")
        write_report(outcome.results, folder / REPORT)
    else:
        # Nothing was measured, so there is nothing to find there.
        with contextlib.suppress(OSError):
            (folder / RESULTS).unlink()
            folder.rmdir()
    return Measured(outcome, folder)


def write_report(results: Results, path: Path) -> None:
    """Write the HTML page.

    Raises:
        UsageError: it cannot be written.
    """
    from pdctl.bench.documents import whole_file
    from pdctl.bench.html_report import html_report
    from pdctl.bench.summary import summarise

    page = html_report(results, summarise(results))
    with whole_file(path) as stream:
        stream.write(page.encode())


def show_results(results: Results, *, as_json: bool, folder: Path | None = None) -> None:
    """Print results as tables, or as JSON."""
    from pdctl.bench.summary import summarise

    if not results.runs and not as_json:
        click.echo("nothing was measured", err=True)
        return
    show_summary(summarise(results), as_json=as_json, folder=folder)


def show_summary(summary: Summary, *, as_json: bool, folder: Path | None = None) -> None:
    """Print a summary as tables, or as JSON."""
    from pdctl.bench.summary_json import summary_to_json
    from pdctl.cli.bench_tables import SummaryView

    where = {} if folder is None else {"results": str(folder / RESULTS), "report": str(folder / REPORT)}
    if as_json:
        print_json({**summary_to_json(summary), **where})
        return
    console().print(SummaryView(summary))
    for name, path in where.items():
        click.echo(f"{name}: {path}")


def console() -> OutputConsole:
    """Standard output for tables: as wide as the terminal, without colours where there is none."""
    import sys

    from pdctl.cli.console import OutputConsole
    from pdctl.cli.styled import USUAL_WIDTH

    width = None if sys.stdout.isatty() else USUAL_WIDTH
    return OutputConsole(width=width, highlight=False, no_color=bool(os.environ.get("NO_COLOR")))
