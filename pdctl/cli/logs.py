"""``pdctl logs``."""

from __future__ import annotations

from pathlib import Path

import click

from pdctl.cli.options import cluster_file_long, complete_instance, find_instance, load_plan


@click.command("logs", short_help="Show an instance's log.")
@click.argument("name", shell_complete=complete_instance)
@cluster_file_long
@click.option(
    "-n", "--lines", type=click.IntRange(0, 100_000), default=50, show_default=True, help="Lines from the end."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, until Ctrl-C.")
def command(name: str, file: Path, lines: int, follow: bool) -> None:
    """Show the end of the log of instance NAME (prefill-0, decode-0, router, ...), and with --follow what comes."""
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.logs import read_log
    from pdctl.lifecycle.nodes import Nodes

    plan = load_plan(file)
    instance = find_instance(plan, name)
    with Fleet(plan.spec) as fleet:
        for text in read_log(Nodes(plan, fleet), instance.host, name, lines=lines, follow=follow):
            click.echo(text, nl=not text.endswith("\n") and not follow)
