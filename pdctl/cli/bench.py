"""``pdctl bench``: the group. Imports a command's module only when that command runs."""

from __future__ import annotations

import click

from pdctl.cli.late_group import LateGroup

_COMMANDS = {
    "run": ("pdctl.cli.bench_run", "Load the running cluster, and tell how fast it answers."),
    "compare": ("pdctl.cli.bench_compare", "Measure transfer modes side by side; or compare results."),
    "show": ("pdctl.cli.bench_files:show", "Print results again."),
    "report": ("pdctl.cli.bench_files:report", "Write results as one HTML page."),
    "gate": ("pdctl.cli.bench_files:gate", "Fail if results are slower than a baseline."),
    "fabric": ("pdctl.cli.bench_fabric", "What the network itself can do, by block size."),
}


@click.group("bench", cls=LateGroup, late=_COMMANDS, short_help="Measure TTFT and TPOT, and where the time goes.")
def command() -> None:
    """Measure time to first token (TTFT) and per output token (TPOT) on your own cluster, and where the time goes.

    \b
        pdctl bench run                          the running cluster, as it is
        pdctl bench compare --modes pull,push    both modes in turns, with intervals of their ratio
        pdctl bench gate RESULTS --baseline OLD  for CI: exit code 1 if it became slower

    Results are kept in a folder: results.json with every request, and report.html.
    """
