"""``pdctl up``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdctl.cli.launch_output import boot_timeout, launch
from pdctl.cli.options import cluster_file, file_words, json_output, load_plan, print_json

if TYPE_CHECKING:
    from pdctl.cli.progress import Display
    from pdctl.hosts.fleet import Fleet


@click.command("up", short_help="Launch the cluster and prove that KV travels.")
@cluster_file
@click.option("--dry-run", is_flag=True, help="Print the plan (with --json as JSON) and do nothing.")
@click.option("--apply", is_flag=True, help="Restart instances that run an older plan.")
@click.option("--keep", is_flag=True, help="On failure leave everything as it is, for a look at it.")
@click.option("--no-prove", is_flag=True, help="Leave the proof request out.")
@click.option("--skip-doctor", is_flag=True, help="Launch without the checks that `pdctl doctor` calls blocking.")
@boot_timeout
@json_output
def command(
    file: Path,
    dry_run: bool,
    apply: bool,
    keep: bool,
    no_prove: bool,
    skip_doctor: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Launch prefill and decode instances and the router, and prove one request end to end.

    First makes the checks of `pdctl doctor` without which nothing would work; starts nothing if one of them fails.
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

    from pdctl.cli.preflight import preflight
    from pdctl.lifecycle.failure import Aftermath, Interrupted
    from pdctl.lifecycle.up import UpOptions, UpResult, up

    options = UpOptions(apply=apply, keep=keep, timeout_s=timeout_s, prove=not no_prove)

    def work(fleet: Fleet, display: Display) -> UpResult:
        if not skip_doctor:
            try:
                preflight(plan, fleet, display)
            except KeyboardInterrupt:
                raise Interrupted(Aftermath()) from None
        return up(plan, fleet, display, options)

    raise click.exceptions.Exit(launch(plan, work, as_json=as_json, file_option=file_words(file)))
