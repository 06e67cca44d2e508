"""``pdctl restart``."""

from __future__ import annotations

from pathlib import Path

import click

from pdctl.cli.options import cluster_file, complete_instance, find_instance, json_output, load_plan


@click.command("restart", short_help="Restart single instances.")
@click.argument("names", nargs=-1, shell_complete=complete_instance)
@click.option("--role", type=click.Choice(["prefill", "decode", "router"]), help="Restart every instance of a role.")
@cluster_file
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0, 3600),
    default=20.0,
    show_default=True,
    help="Seconds that an instance may take to end.",
)
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
    names: tuple[str, ...], role: str | None, file: Path, grace_s: float, timeout_s: float, as_json: bool
) -> None:
    """Restart the instances NAMES (prefill-0, decode-1, router, ...), or all of a --role, with the present plan.

    The rest goes on. The restarted instances are warmed up, and one request is proven at the end, as with `pdctl up`.
    """
    from pdctl.cli.launch_output import print_failure, print_interrupted, print_result
    from pdctl.cli.main import INTERRUPTED
    from pdctl.cli.progress import reporting
    from pdctl.cli.up import file_words
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.failure import Interrupted, LaunchFailed
    from pdctl.lifecycle.restart import restart
    from pdctl.lifecycle.up import UpOptions

    if bool(names) == bool(role):
        raise click.UsageError("name one or more instances, or give --role")
    plan = load_plan(file, require_secrets=True)
    instances = (
        [instance for instance in plan.instances if instance.role == role]
        if role
        else [find_instance(plan, name) for name in dict.fromkeys(names)]
    )
    options = UpOptions(timeout_s=timeout_s, grace_s=grace_s)
    try:
        with Fleet(plan.spec) as fleet, reporting(quiet=as_json) as reporter:
            result = restart(plan, fleet, reporter, instances, options)
    except LaunchFailed as error:
        raise click.exceptions.Exit(print_failure(plan, error, as_json=as_json)) from error
    except Interrupted as error:
        print_interrupted(plan, error, as_json=as_json)
        raise click.exceptions.Exit(INTERRUPTED) from error
    raise click.exceptions.Exit(print_result(plan, result, as_json=as_json, file_option=file_words(file)))
