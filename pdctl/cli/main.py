"""The ``pdctl`` command. Imports a command's module only when that command runs, so that ``--help`` is instant."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import click

from pdctl import __version__
from pdctl.errors import PdctlError

_COMMANDS = {
    "init": "Write a commented cluster file from a preset.",
    "doctor": "Find what would break the cluster, before it is launched.",
    "up": "Launch prefill, decode and router; wait, warm up, prove one request.",
    "status": "One look at every instance.",
    "watch": "Watch transfers live; name what stalls, and why.",
    "capture": "Keep the evidence of a stall in an archive.",
    "logs": "Show an instance's log.",
    "restart": "Restart single instances while the rest goes on.",
    "down": "Take the cluster down and show that nothing is left.",
    "completion": "Print the shell completion script for bash, zsh or fish.",
}

INTERRUPTED = 130


class _LateGroup(click.Group):
    """A group that knows its commands' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"pdctl.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and name not in _COMMANDS and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, _COMMANDS, n=1)
            raise click.UsageError(f"no command {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LateGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="pdctl")
def cli() -> None:
    """Check, launch, watch and measure a prefill/decode-disaggregated vLLM cluster.

    The KV cache travels from prefill to decode in push mode over NIXL. Start with:

    \b
        pdctl init --preset ssh-tcp      write cluster.yaml, then edit it
        pdctl doctor                     find what would break it
        pdctl up                         launch it and prove that KV travels
        pdctl status                     look at it
        pdctl watch                      watch it, and see what stalls and why
        pdctl down                       end it

    Exit codes: 0 fine, 1 errors, unhealthy or failed, 2 usage or bad cluster file, 3 a host could not be reached,
    130 interrupted.
    """


def print_error(error: PdctlError) -> None:
    """Print an error for people on stderr: what is wrong, and a ``hint:`` line."""
    head, _, rest = error.message.partition("\n")
    click.echo(f"{click.style('error:', fg='red', bold=True)} {head}" + (f"\n{rest}" if rest else ""), err=True)
    if error.hint:
        click.echo(f"{click.style('hint:', fg='cyan')} {error.hint}", err=True)


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    del signal_number, frame
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: run the command line and turn its outcome into an exit code."""
    # A supervisor's SIGTERM deserves the same clean-up as Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = cli.main(prog_name="pdctl", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        code = INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except PdctlError as error:
        print_error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`pdctl logs | head`): end quietly, also when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
