"""``pdctl status``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdctl.cli.options import cluster_file, json_output, load_plan, print_json

if TYPE_CHECKING:
    from pdctl.lifecycle.status import ClusterStatus, InstanceStatus

_GLYPHS = {
    "ready": ("✓", "green"),
    "booting": ("…", "yellow"),
    "unhealthy": ("✗", "red"),
    "exited": ("✗", "red"),
    "absent": ("–", "dim"),
    "unreachable": ("?", "red"),
}


@click.command("status", short_help="One look at every instance.")
@cluster_file
@json_output
def command(file: Path, as_json: bool) -> None:
    """Look once at every instance: its process, its health, its load.

    Works when hosts are down, and says which. Exit code: 0 all ready, 1 something is not, 3 a host could not be asked.
    """
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.status import status

    plan = load_plan(file)
    with Fleet(plan.spec) as fleet:
        result = status(plan, fleet)
    if as_json:
        print_json(
            {
                "cluster": result.cluster,
                "healthy": result.healthy,
                "instances": [asdict(instance) for instance in result.instances],
                "unreachable": dict(result.unreachable),
            }
        )
    else:
        _print_table(result)
    raise click.exceptions.Exit(result.exit_code)


def _print_table(result: ClusterStatus) -> None:
    from rich.table import Table
    from rich.text import Text

    from pdctl.cli.console import OutputConsole

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("INSTANCE", "HOST", "STATE", "UP", "MEMORY", "REQUESTS", "KV USE", "WRITER", "IN FLIGHT", "DETAIL"):
        table.add_column(title, justify="right" if title in ("UP", "MEMORY", "KV USE") else "left", overflow="fold")
    for instance in result.instances:
        glyph, style = _GLYPHS.get(instance.state, ("?", "red"))
        table.add_row(
            instance.name,
            instance.host,
            Text(f"{glyph} {instance.state}", style=style),
            _duration(instance.uptime_s),
            _size(instance.rss_bytes),
            _load(instance),
            "" if instance.kv_cache_usage is None else f"{100 * instance.kv_cache_usage:.0f} %",
            _writer(instance),
            _transfers(instance),
            _detail(instance),
        )
    console = OutputConsole(highlight=False)
    if not console.is_terminal:
        console = OutputConsole(highlight=False, width=200, no_color=True)
    console.print(table)
    for host, reason in result.unreachable.items():
        click.echo(f"unreachable: {reason if reason.startswith(host) else f'{host}: {reason}'}", err=True)
    ready = sum(1 for instance in result.instances if instance.state == "ready" and instance.role != "unknown")
    planned = sum(1 for instance in result.instances if instance.role != "unknown")
    click.echo(f"\ncluster {result.cluster}: {ready} of {planned} instances ready")


def _detail(instance: InstanceStatus) -> str:
    parts = [instance.detail] if instance.detail else []
    if instance.plan_changed:
        parts.append("runs an older plan (pdctl up --apply)")
    if not parts and instance.state == "ready":
        parts.append(instance.url)
    return "; ".join(parts)


def _writer(instance: InstanceStatus) -> str:
    if instance.writer is None:
        return ""
    beat = "" if instance.heartbeat_age_s is None else f", beat {instance.heartbeat_age_s:.1f} s ago"
    return f"{instance.writer}{beat}"


def _transfers(instance: InstanceStatus) -> str:
    if instance.transfers_inflight is None:
        return ""
    if not instance.transfers_inflight or instance.oldest_transfer_s is None:
        return str(instance.transfers_inflight)
    return f"{instance.transfers_inflight}, oldest {instance.oldest_transfer_s:.1f} s"


def _load(instance: InstanceStatus) -> str:
    if instance.requests_running is None:
        return ""
    return f"{instance.requests_running} running, {instance.requests_waiting or 0} waiting"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.1f} GiB"
