"""``pdctl bench show``, ``report`` and ``gate``, and the comparison of two files: what needs results and no cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdctl.cli.bench_options import REPORT, RESULTS
from pdctl.cli.options import json_output, print_json
from pdctl.errors import UsageError

if TYPE_CHECKING:
    from pdctl.bench.results import Results

_RESULTS = click.argument("results", type=click.Path(path_type=Path), metavar="RESULTS")
_ALLOW = click.option("--allow-different", is_flag=True, help="Go on although model, versions, flags or hosts differ.")


def read(path: Path) -> tuple[Path, Results]:
    """Read a ``results.json``, or the one in a folder; and say which file it was.

    Raises:
        UsageError: there is none, or it makes no sense.
    """
    from pdctl.bench.results import read_results

    file = path / RESULTS if path.is_dir() else path
    return file, read_results(file)


@click.command("show", short_help="Print results again.")
@_RESULTS
@json_output
def show(results: Path, as_json: bool) -> None:
    """Print what was measured: RESULTS is a results.json, or its folder.

    Exit code 1 if the results are invalid or partial.
    """
    from pdctl.cli.bench_output import exit_code, show_results

    _, measured = read(results)
    show_results(measured, as_json=as_json)
    raise click.exceptions.Exit(exit_code(measured))


@click.command("report", short_help="Write results as one HTML page.")
@_RESULTS
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to; default: report.html beside the results.",
)
def report(results: Path, output: Path | None) -> None:
    """Write the HTML report of a results.json anew. It needs no network to be read."""
    from pdctl.cli.bench_output import write_report

    file, measured = read(results)
    if not measured.runs:
        raise UsageError(f"{file}: nothing was measured", hint="there is nothing to report")
    page = output or file.with_name(REPORT)
    write_report(measured, page)
    click.echo(str(page))


@click.command("gate", short_help="Fail if results are slower than a baseline.")
@_RESULTS
@click.option(
    "--baseline",
    required=True,
    type=click.Path(path_type=Path),
    metavar="RESULTS",
    help="What it is set against.",
)
@click.option(
    "--max-regression",
    default="5%",
    show_default=True,
    metavar="SHARE",
    help="How much slower a figure may be: 5% or 0.05.",
)
@_ALLOW
@json_output
def gate(results: Path, baseline: Path, max_regression: str, allow_different: bool, as_json: bool) -> None:
    """Exit with 1 if RESULTS are slower than the baseline allows; for CI.

    A figure fails if it rose by more than --max-regression and the 95 % interval of its ratio shows that it rose at
    all. Requests that fail more often, wrong answers, missing cells and partial results fail too.
    """
    from pdctl.bench.comparable import check_comparable
    from pdctl.bench.gate import judge, parse_share
    from pdctl.bench.summary_json import gate_to_json
    from pdctl.cli.bench_output import console
    from pdctl.cli.bench_tables import GateView

    share = parse_share(max_regression)
    old_file, old = read(baseline)
    new_file, new = read(results)
    allowed = check_comparable([(old_file, old), (new_file, new)], allow=allow_different)
    outcome = judge(old, new, max_regression=share)
    if as_json:
        print_json({**gate_to_json(outcome), "differences": list(allowed)})
    else:
        console().print(GateView(outcome))
        for text in allowed:
            click.echo(f"note: {text}")
    raise click.exceptions.Exit(0 if outcome.passed else 1)


def compare_files(files: Sequence[Path], *, allow_different: bool, as_json: bool) -> int:
    """Print the second file set against the first. Returns the exit code.

    Raises:
        UsageError: there are not two, or they are not comparable.
    """
    from pdctl.bench.comparable import check_comparable
    from pdctl.bench.two_files import summarise_two
    from pdctl.cli.bench_output import exit_code, show_summary

    if len(files) != 2:
        raise UsageError(f"{len(files)} files were given", hint="give two: the baseline, then what is set against it")
    (old_file, old), (new_file, new) = (read(path) for path in files)
    allowed = check_comparable([(old_file, old), (new_file, new)], allow=allow_different)
    for text in allowed:
        click.echo(f"warning: {text}", err=True)
    show_summary(summarise_two(old, new, (str(old_file), str(new_file))), as_json=as_json)
    return max(exit_code(old), exit_code(new))
