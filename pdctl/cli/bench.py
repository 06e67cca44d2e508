"""``pdctl bench``: the group. Imports a command's module only when that command runs."""

from __future__ import annotations

import importlib

import click

_COMMANDS = {
    "run": ("bench_run", "Load the running cluster, and tell how fast it answers."),
    "compare": ("bench_compare", "Measure transfer modes side by side; or compare results."),
    "show": ("bench_files:show", "Print results again."),
    "report": ("bench_files:report", "Write results as one HTML page."),
    "gate": ("bench_files:gate", "Fail if results are slower than a baseline."),
    "fabric": ("bench_fabric", "What the network itself can do, by block size."),
}


class _LateGroup(click.Group):
    """A group that knows its commands' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"pdctl.cli.{module}"), name or "command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group("bench", cls=_LateGroup, short_help="Measure TTFT and TPOT, and where the time goes.")
def command() -> None:
    """Measure time to first token (TTFT) and per output token (TPOT) on your own cluster, and where the time goes.

    \b
        pdctl bench run                          the running cluster, as it is
        pdctl bench compare --modes pull,push    both modes in turns, with intervals of their ratio
        pdctl bench gate RESULTS --baseline OLD  for CI: exit code 1 if it became slower

    Results are kept in a folder: results.json with every request, and report.html.
    """
