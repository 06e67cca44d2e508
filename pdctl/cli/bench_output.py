"""Runs a bench session, keeps its results, and shows them."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pdctl.cli.bench_options import REPORT, RESULTS, command_line
from pdctl.cli.options import print_json
from pdctl.errors import PdctlError

if TYPE_CHECKING:
    from pdctl.bench.results import Environment, Results, Settings
    from pdctl.bench.session import Launcher, Outcome
    from pdctl.bench.summary import Summary
    from pdctl.cli.console import OutputConsole
    from pdctl.cli.progress import Display
    from pdctl.plan import ClusterPlan


@dataclass(frozen=True)
class Measured:
    """A session that has ended, where its results are, and how the cluster was left if not as before."""

    outcome: Outcome
    folder: Path
    left: str = ""

    def show(self, *, as_json: bool) -> int:
        """Write the report, print tables or JSON, and what went wrong. Returns the exit code."""
        from pdctl.bench.summary import summarise
        from pdctl.cli.main import INTERRUPTED, print_error
        from pdctl.lifecycle.failure import LaunchFailed

        results, error = self.outcome.results, self.outcome.error
        summary = summarise(results)
        report = self._write_report(summary) if results.runs else None
        if as_json:
            told = {
                "error": error and error.message,
                "interrupted": self.outcome.interrupted,
                "cluster_left": self.left,
            }
            show_summary(summary, as_json=True, folder=self.folder if results.runs else None, report=report, **told)
        elif results.runs:
            show_summary(summary, as_json=False, folder=self.folder, report=report)
        else:
            click.echo("nothing was measured", err=True)
        if error is not None and not isinstance(error, LaunchFailed):
            print_error(error)
        if self.left:
            click.echo(f"warning: {self.left}", err=True)
        if isinstance(error, LaunchFailed) and error.only_hosts:
            return 3
        if error is not None:
            return max(1, error.exit_code)
        if self.outcome.interrupted:
            kept = f"; what was measured is in {self.folder}" if results.runs else ""
            click.echo(f"interrupted{kept}", err=True)
            return INTERRUPTED
        return 1 if self.left else exit_code(results)

    def _write_report(self, summary: Summary) -> Path | None:
        """Write the page; a page that cannot be written is no reason to lose the tables."""
        path = self.folder / REPORT
        try:
            write_report(self.outcome.results, path, summary)
        except PdctlError as error:
            click.echo(f"warning: no report: {error.message}", err=True)
            return None
        return path


def print_launch_failure(plan: ClusterPlan, error: PdctlError | None) -> None:
    """Print why a launch failed, with causes and the ends of logs; nothing if none did."""
    from pdctl.cli.launch_output import print_failure
    from pdctl.lifecycle.failure import LaunchFailed

    if isinstance(error, LaunchFailed):
        print_failure(plan, error, as_json=False)


def exit_code(results: Results) -> int:
    """0, or 1 if the results are not to be relied on."""
    from pdctl.bench.summary import incomplete_because

    return 1 if results.invalid_because or incomplete_because(results) else 0


def measure(
    kind: Literal["run", "compare"],
    plan: ClusterPlan,
    settings: Settings,
    environment: Environment,
    launcher: Launcher,
    folder: Path,
    display: Display,
) -> Measured:
    """Measure everything, writing the results after every cell."""
    from pdctl.bench.results import Results, write_results
    from pdctl.bench.session import Session

    results = Results(1, kind, plan.spec.cluster, time.time(), command_line(), settings, environment)
    outcome = Session(results, launcher, lambda kept: write_results(folder / RESULTS, kept), display).run()
    if not outcome.results.runs:
        # Nothing was measured, so there is nothing to find there.
        with contextlib.suppress(OSError):
            (folder / RESULTS).unlink(missing_ok=True)
            folder.rmdir()
    return Measured(outcome, folder)


def write_report(results: Results, path: Path, summary: Summary | None = None) -> None:
    """Write the HTML page.

    Args:
        results: what it shows.
        path: where to.
        summary: of the results, if it was made already.

    Raises:
        PdctlError: it cannot be made or written.
    """
    from pdctl.atomic_file import write_atomically
    from pdctl.bench.html_report import html_report
    from pdctl.bench.summary import summarise

    page = html_report(results, summary or summarise(results))
    write_atomically(path, page.encode(), mode=0o600)


def show_results(results: Results, *, as_json: bool) -> None:
    """Print results as tables, or as JSON."""
    from pdctl.bench.summary import summarise

    show_summary(summarise(results), as_json=as_json)


def show_summary(
    summary: Summary, *, as_json: bool, folder: Path | None = None, report: Path | None = None, **more: Any
) -> None:
    """Print a summary as tables, or as JSON.

    Args:
        summary: what to print.
        as_json: as JSON.
        folder: where the results are.
        report: where the page is.
        more: further keys of the JSON.
    """
    from pdctl.bench.summary_json import summary_to_json
    from pdctl.cli.bench_tables import SummaryView

    where = {} if folder is None else {"results": str(folder / RESULTS)}
    if report is not None:
        where["report"] = str(report)
    if as_json:
        print_json({**summary_to_json(summary), **where, **more})
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
