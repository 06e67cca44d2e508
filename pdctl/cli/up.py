"""``pdctl up``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from pdctl.cli.options import DEFAULT_FILE, cluster_file, json_output, load_plan, print_json


@click.command("up", short_help="Launch the cluster and prove that KV travels.")
@cluster_file
@click.option("--dry-run", is_flag=True, help="Print the plan (with --json as JSON) and do nothing.")
@click.option("--apply", is_flag=True, help="Restart instances that run an older plan.")
@click.option("--keep", is_flag=True, help="On failure leave everything as it is, for a look at it.")
@click.option("--no-prove", is_flag=True, help="Leave the proof request out.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 86400),
    default=1800.0,
    show_default=True,
    help="Seconds that the slowest instance may take to boot.",
)
@json_output
def command(
    file: Path, dry_run: bool, apply: bool, keep: bool, no_prove: bool, timeout_s: float, as_json: bool
) -> None:
    """Launch prefill and decode instances and the router, and prove one request end to end.

    Ships the connector, starts the instances side by side, waits for their health, warms up every instance and every
    prefill/decode pair, starts the router, and sends one completion whose answer and transferred bytes are checked.
    Running it again changes nothing. A failed or interrupted launch stops what it had started (not with --keep).
    """
    plan = load_plan(file, require_secrets=not dry_run)
    if dry_run:
        from pdctl.plan_text import plan_text

        if as_json:
            print_json(plan.to_json())
        else:
            click.echo(plan_text(plan))
        return

    from pdctl.cli.launch_output import print_failure, print_interrupted, print_result
    from pdctl.cli.main import INTERRUPTED
    from pdctl.cli.progress import reporting
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.failure import Interrupted, LaunchFailed
    from pdctl.lifecycle.up import UpOptions, up

    options = UpOptions(apply=apply, keep=keep, timeout_s=timeout_s, prove=not no_prove)
    try:
        with Fleet(plan.spec) as fleet, reporting(quiet=as_json) as reporter:
            result = up(plan, fleet, reporter, options)
    except LaunchFailed as error:
        raise click.exceptions.Exit(print_failure(plan, error, as_json=as_json)) from error
    except Interrupted as error:
        print_interrupted(plan, error, as_json=as_json)
        raise click.exceptions.Exit(INTERRUPTED) from error
    raise click.exceptions.Exit(print_result(plan, result, as_json=as_json, file_option=file_words(file)))


def file_words(file: Path) -> str:
    """`` -f FILE`` to put behind a command that is suggested, or nothing when the file is the default one."""
    return "" if str(file) == DEFAULT_FILE else f" -f {shlex.quote(str(file))}"
