"""``pdctl doctor``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from pdctl.cli.options import cluster_file, file_words, json_output, load_plan, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdctl.doctor.findings import Check
    from pdctl.doctor.outcome import Outcome
    from pdctl.doctor.run import Options

_MAX_FILE_BYTES = 256 << 20
# With a replay nothing is collected, so what steers the collecting would be without effect.
_NOT_WITH_FACTS = ("file", "probe", "probe_pairs", "timeout_s")
_WITH_SUBCOMMANDS = ("as_json",)


def _complete_check(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion of ids, and of areas for ``--only`` and ``--skip``; of the last name of a comma list."""
    del ctx
    from pdctl.doctor.registry import AREAS, all_checks

    before, comma, last = incomplete.rpartition(",")
    names = [*(AREAS if param.param_type_name == "option" else ()), *(check.id for check in all_checks())]
    return [f"{before}{comma}{name}" for name in names if name.startswith(last.upper())]


@click.group("doctor", invoke_without_command=True, short_help="Find what would break the cluster.")
@cluster_file
@json_output
@click.option(
    "--only", multiple=True, metavar="ID,AREA", shell_complete=_complete_check, help="Run these checks alone."
)
@click.option(
    "--skip", multiple=True, metavar="ID,AREA", shell_complete=_complete_check, help="Leave these checks out."
)
@click.option(
    "--probe/--no-probe",
    default=None,
    help="Write over NIXL between the hosts for real. Without either: when NIXL can be imported there.",
)
@click.option("--probe-pairs", type=click.IntRange(1, 4096), help="Most pairs of prefill and decode hosts to probe.")
@click.option("--verbose", "-v", is_flag=True, help="Show passed checks one by one, and everything that was seen.")
@click.option("--fix-commands", is_flag=True, help="Print the commands that mend what was found, and nothing else.")
@click.option("--junit", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report as JUnit XML.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write everything that was collected, without names and addresses, for a bug report.",
)
@click.option(
    "--facts",
    "facts_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Judge what --bundle wrote, instead of asking any host.",
)
@click.option(
    "--aws-facts",
    "aws_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Recorded answers of the EC2 API (docs/doctor.md says how to record them), instead of asking it.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 3600),
    help="Seconds for each stage: facts of a host, ports, EC2, one NIXL write.  [default: 15, 30, 20, 120]",
)
@click.pass_context
def command(
    ctx: click.Context,
    file: Path,
    as_json: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    probe: bool | None,
    probe_pairs: int | None,
    verbose: bool,
    fix_commands: bool,
    junit: Path | None,
    bundle: Path | None,
    facts_file: Path | None,
    aws_file: Path | None,
    timeout_s: float | None,
) -> None:
    """Find what would break a cluster before it is launched, and say what to change. Changes nothing itself.

    Looks at every host, the ports between them, the EC2 API where there is one, and writes over NIXL from prefill into
    decode's memory. Each check has an id; `pdctl doctor explain ID` tells all about it.

    Exit code: 0 no errors (there may be warnings), 1 errors, 2 usage, 3 a host could not be reached.
    """
    if ctx.invoked_subcommand is not None:
        _refuse(ctx, lambda name: name not in _WITH_SUBCOMMANDS, f"is not for `pdctl doctor {ctx.invoked_subcommand}`")
        return
    if as_json and fix_commands:
        raise click.UsageError("--json has the commands already: leave --fix-commands out")

    from pdctl.doctor.aws_file import read_aws_facts
    from pdctl.doctor.registry import all_checks
    from pdctl.doctor.run import Options
    from pdctl.doctor.selection import select

    known = all_checks()
    aws = None if aws_file is None else read_aws_facts(_read(aws_file), str(aws_file))
    options = Options(
        select(known, only=only, skip=skip),
        probe=probe,
        probe_pairs=probe_pairs,
        timeout_s=timeout_s,
        aws=aws,
    )
    if facts_file is not None:
        _refuse(ctx, lambda name: name in _NOT_WITH_FACTS, "has no effect with --facts, which asks no host")
        outcome = _replay(facts_file, options, known)
    else:
        outcome = _examine(file, options, known, quiet=as_json or fix_commands)
    if bundle is not None:
        _write_bundle(outcome, bundle)
    if junit is not None:
        _write_junit(outcome, junit)
    suggested = file_words(file) if facts_file is None else f" --facts {shlex.quote(str(facts_file))}"
    _print(outcome, as_json=as_json, fix_commands=fix_commands, verbose=verbose, file_option=suggested)
    ctx.exit(outcome.exit_code)


@command.command("explain", short_help="What a check is about.")
@click.argument("check", metavar="ID", shell_complete=_complete_check)
def explain(check: str) -> None:
    """Tell what the check ID looks at, why it matters, and how to mend what it finds."""
    from pdctl.cli.styled import echo_lines, output_width
    from pdctl.doctor.explain import explain as explain_check
    from pdctl.doctor.registry import all_checks
    from pdctl.doctor.selection import find_check

    echo_lines(explain_check(find_check(all_checks(), check), width=output_width()))


@command.command("list", short_help="Every check.")
@json_output
@click.pass_context
def list_checks(ctx: click.Context, as_json: bool) -> None:
    """List every check with its id, how bad a failure is, and what should hold."""
    from pdctl.cli.styled import echo_lines
    from pdctl.doctor.registry import AREAS, all_checks
    from pdctl.doctor.styled_text import Line, Span

    checks = all_checks()
    if as_json or (ctx.parent is not None and ctx.parent.params.get("as_json")):
        print_json([{**_described(check), "area_title": AREAS[check.area]} for check in checks])
        return
    lines: list[Line] = []
    for area, title in AREAS.items():
        own = [check for check in checks if check.area == area]
        if own:
            lines += [(Span(title, "title"), Span(f"  {area}", "dim"))]
        for check in own:
            blocking = "  (also before `pdctl up`)" if check.blocking else ""
            severity = check.severity.value
            lines.append(
                (Span(f"  {check.id:<8} "), Span(f"{severity:<8} ", severity), Span(check.title), Span(blocking, "dim"))
            )
    echo_lines(lines)


def _described(check: Check) -> dict[str, object]:
    return {
        "id": check.id,
        "area": check.area,
        "title": check.title,
        "severity": check.severity.value,
        "blocking": check.blocking,
        "what": check.what,
        "why": check.why,
        "fix": check.fix,
        "sources": list(check.sources),
    }


def _refuse(ctx: click.Context, unfit: Callable[[str], bool], reason: str) -> None:
    """Refuse options that would be without effect."""
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if unfit(name) and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} {reason}")


def _read(path: Path) -> str:
    from pdctl.errors import UsageError

    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no UTF-8 text") from None


def _examine(file: Path, options: Options, known: tuple[Check, ...], *, quiet: bool) -> Outcome:
    from pdctl.cli.progress import reporting
    from pdctl.doctor.ignore import check_ignore_list
    from pdctl.doctor.run import examine
    from pdctl.hosts.fleet import Fleet

    plan = load_plan(file)
    check_ignore_list(plan, known)
    with Fleet(plan.spec) as fleet, reporting(quiet=quiet, keep_steps=False) as display:
        return examine(plan, fleet, display, options)


def _replay(file: Path, options: Options, known: tuple[Check, ...]) -> Outcome:
    from dataclasses import replace

    from pdctl.doctor.aws_hosts import match_hosts
    from pdctl.doctor.bundle import read_bundle
    from pdctl.doctor.ignore import check_ignore_list
    from pdctl.doctor.outcome import judge

    context = read_bundle(_read(file), str(file))
    check_ignore_list(context.plan, known)
    if options.aws is not None:
        context = replace(context, aws=match_hosts(options.aws, context.plan, context.facts), aws_skipped="")
    return judge(context, options.checks)


def _write_bundle(outcome: Outcome, path: Path) -> None:
    import json
    import socket

    from pdctl.atomic_file import write_atomically
    from pdctl.doctor.bundle import make_bundle

    machine = socket.gethostname()
    names = {machine, machine.partition(".")[0]} - {"", "localhost"}
    bundle = make_bundle(outcome.context, users=_own_logins(), hosts=sorted(names))
    text = json.dumps(bundle, indent=1, ensure_ascii=False) + "\n"
    # What is no valid Unicode (a host may report anything) becomes the escape that JSON has for it.
    write_atomically(path, text.encode("utf-8", "backslashreplace"), mode=0o600)
    click.echo(f"wrote {path}: look through it before you share it", err=True)


def _own_logins() -> list[str]:
    import getpass

    try:
        return [getpass.getuser()]
    except (KeyError, OSError, ImportError):
        return []  # a user id without a name


def _write_junit(outcome: Outcome, path: Path) -> None:
    from pdctl.atomic_file import write_atomically
    from pdctl.doctor.junit import junit

    write_atomically(path, junit(outcome), mode=0o644)


def _print(outcome: Outcome, *, as_json: bool, fix_commands: bool, verbose: bool, file_option: str) -> None:
    from pdctl.cli.styled import echo_lines, output_glyphs, output_width
    from pdctl.doctor import report
    from pdctl.doctor.report_json import report_json
    from pdctl.doctor.styled_text import Span

    if as_json:
        print_json(report_json(outcome))
    elif fix_commands:
        lines = report.fix_commands(outcome, glyphs=output_glyphs())
        echo_lines((Span(line),) for line in lines)
        if not lines:
            click.echo("there is nothing that a command would mend", err=True)
    else:
        style = report.Style(output_width(), output_glyphs(), verbose=verbose, file_option=file_option)
        echo_lines(report.report(outcome, style))
