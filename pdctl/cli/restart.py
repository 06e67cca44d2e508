"""``pdctl restart``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdctl.cli.launch_output import boot_timeout, launch
from pdctl.cli.options import cluster_file, complete_instance, file_words, find_instance, json_output, load_plan

if TYPE_CHECKING:
    from pdctl.cli.progress import Display
    from pdctl.hosts.fleet import Fleet


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
@boot_timeout
@json_output
def command(
    names: tuple[str, ...], role: str | None, file: Path, grace_s: float, timeout_s: float, as_json: bool
) -> None:
    """Restart the instances NAMES (prefill-0, decode-1, router, ...), or all of a --role, with the present plan.

    The rest goes on. The restarted instances are warmed up, and one request is proven at the end, as with `pdctl up`.
    """
    from pdctl.lifecycle.restart import restart
    from pdctl.lifecycle.up import UpOptions, UpResult

    if bool(names) == bool(role):
        raise click.UsageError("name one or more instances, or give --role")
    plan = load_plan(file, require_secrets=True)
    instances = (
        [instance for instance in plan.instances if instance.role == role]
        if role
        else [find_instance(plan, name) for name in dict.fromkeys(names)]
    )
    options = UpOptions(timeout_s=timeout_s, grace_s=grace_s)

    def work(fleet: Fleet, display: Display) -> UpResult:
        return restart(plan, fleet, display, instances, options)

    raise click.exceptions.Exit(launch(plan, work, as_json=as_json, file_option=file_words(file)))
