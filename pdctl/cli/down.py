"""``pdctl down``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pdctl.cli.options import cluster_file, file_words, json_output, load_plan, print_json


@click.command("down", short_help="Take the cluster down.")
@cluster_file
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0, 3600),
    default=30.0,
    show_default=True,
    help="Seconds that running requests, and then each instance, may take to end.",
)
@click.option("--force", is_flag=True, help="Do not wait for anything: SIGKILL follows SIGTERM at once.")
@json_output
def command(file: Path, grace_s: float, force: bool, as_json: bool) -> None:
    """Take the cluster down and show that nothing is left.

    Stops the router, lets running requests end (at most --grace seconds), stops the instances with every process they
    made, also those that the cluster file does not name any more, and looks again. Running it twice is fine.
    """
    from pdctl.cli.main import INTERRUPTED
    from pdctl.cli.progress import reporting
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.down import down

    plan = load_plan(file)
    try:
        with Fleet(plan.spec) as fleet, reporting(quiet=as_json) as reporter:
            result = down(plan, fleet, reporter, grace_s=grace_s, force=force)
    except KeyboardInterrupt:
        file_option = file_words(file)
        if as_json:
            print_json({"cluster": plan.spec.cluster, "ok": False, "interrupted": True})
        click.echo(
            "interrupted; instances that were told to stop go on doing so, others may run on: "
            f"pdctl status{file_option} shows them, pdctl down{file_option} ends them",
            err=True,
        )
        raise click.exceptions.Exit(INTERRUPTED) from None
    if as_json:
        print_json({"cluster": plan.spec.cluster, "ok": result.exit_code == 0, **asdict(result)})
    else:
        if result.stopped:
            click.echo(f"stopped: {', '.join(result.stopped)}")
        if result.cut_off:
            click.echo(f"requests that were still running after {grace_s:.0f} s and were cut off: {result.cut_off}")
        for name, reason in result.left.items():
            click.echo(f"LEFT: {name}: {reason}", err=True)
        for host, reason in result.unreachable.items():
            click.echo(f"UNREACHABLE: {reason if reason.startswith(host) else f'{host}: {reason}'}", err=True)
        if result.exit_code == 0:
            click.echo(f"cluster {plan.spec.cluster} is down; no process of it is left")
    raise click.exceptions.Exit(result.exit_code)
