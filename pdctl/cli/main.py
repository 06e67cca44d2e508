"""The ``pdctl`` command. Imports a command's module only when that command runs, so that ``--help`` is instant."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO

import click

from pdctl import __version__
from pdctl.cli.late_group import LateGroup
from pdctl.errors import PdctlError

_COMMANDS = {
    "init": "Write a commented cluster file from a preset.",
    "doctor": "Find what would break the cluster, before it is launched.",
    "up": "Launch prefill, decode and router; wait, warm up, prove one request.",
    "status": "One look at every instance.",
    "watch": "Watch transfers live; name what stalls, and why.",
    "bench": "Measure TTFT and TPOT of push against pull, and where the time goes.",
    "capture": "Keep the evidence of a stall in an archive.",
    "logs": "Show an instance's log.",
    "restart": "Restart single instances while the rest goes on.",
    "down": "Take the cluster down and show that nothing is left.",
    "completion": "Print the shell completion script for bash, zsh or fish.",
}

INTERRUPTED = 130
READER_GONE = 128 + signal.SIGPIPE
"""What a shell reports of a program that SIGPIPE ended: of `pdctl doctor | head -1` nobody has seen the verdict."""


class _ReaderGone(Exception):
    """Nobody reads our output any more."""


def _reader_is_gone() -> bool:
    """Whether it was our output that broke: other broken pipes (a connection, a hook's input) are no reader's doing."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextlib.contextmanager
def _noticing_a_gone_reader() -> Iterator[None]:
    """Take a broken pipe of our output before click does, which makes exit code 1 of it: findings, here."""
    try:
        yield
    except BrokenPipeError as error:
        if _reader_is_gone():
            raise _ReaderGone from error
        raise RuntimeError("a pipe or connection of pdctl's own broke, and nobody expected it") from error


def _flush() -> None:
    """Write what is buffered, here rather than at the interpreter's exit, where a broken pipe makes noise."""
    if sys.stderr is not None and not sys.stderr.closed:
        try:
            sys.stderr.flush()
        except BrokenPipeError:
            # Progress that nobody looks at changes nothing about the outcome.
            _write_nowhere(sys.stderr)
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def _write_nowhere(*streams: TextIO) -> None:
    """Let what is still buffered go to /dev/null when Python flushes at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())


class _Pdctl(LateGroup):
    """All commands, and how they end when the reader of their output is gone."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        # Prints the help.
        with _noticing_a_gone_reader():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _noticing_a_gone_reader():
            return super().invoke(ctx)


@click.group(
    cls=_Pdctl,
    late={name: (f"pdctl.cli.{name}", text) for name, text in _COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
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
        pdctl bench run                  measure how fast it answers
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
    # A supervisor's SIGTERM and a terminal that is gone deserve the same clean-up as Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    # Ignored under nohup, and then it stays so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        try:
            code = _run()
        finally:
            _flush()
    except (_ReaderGone, BrokenPipeError):
        _write_nowhere(sys.stdout, sys.stderr)
        code = READER_GONE
    sys.exit(code)


def _run() -> int:
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
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
