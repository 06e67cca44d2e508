"""What every kind of host offers, and the settings of reaching them. Imports nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

OUTPUT_LIMIT_BYTES = 64 * 1024 * 1024
"""Most output of one command, standard output and standard error together. More is a mistake, and would fill memory."""

LINE_LIMIT_BYTES = 4 * 1024 * 1024
"""Longest line of a command that is talked to."""

STDERR_KEPT_BYTES = 64 * 1024
"""How much of the standard error of a command that is talked to is kept: its end."""

SETTLE_S = 2.0
"""How long output is still waited for after a command ended, in case a process it left behind holds its pipes open."""


@dataclass(frozen=True)
class CommandResult:
    """How a command on a host ended.

    Attributes:
        argv: the command.
        exit_code: its exit status, 127 if there is no such program. Negative if a signal ended it: the signal's number
            on the local host, -1 over SSH (which number it was is not passed on).
        stdout: all of its standard output.
        stderr: all of its standard error.
        duration_s: from asking the host to run it until its end was known.
    """

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes
    duration_s: float


class Stream(Protocol):
    """A running command that is talked to. One thread may write while another reads. Leaving its context ends it."""

    def __enter__(self) -> Stream: ...

    def __exit__(self, *_: object) -> None: ...

    def write(self, data: bytes, *, timeout_s: float) -> None:
        """Hand it bytes on its standard input. That it does not read any more is no error: its end will show.

        Raises:
            CommandTimeout: it did not take them in time.
            HostError: the connection broke.
        """

    def read_line(self, *, timeout_s: float) -> bytes | None:
        """The next line of its standard output, without the line break; None when its output is over.

        Raises:
            CommandTimeout: there was none in time. The command goes on, and can be read again.
            HostError: the connection broke, or the line is longer than :data:`LINE_LIMIT_BYTES`.
        """

    def wait(self, *, timeout_s: float) -> CommandResult:
        """How it ended, once its output is over. The result has the last part of its standard error, and no output.

        Raises:
            CommandTimeout: it did not end in time.
            HostError: the connection broke.
        """

    def close(self) -> None:
        """End it: its standard input ends, and it is sent a signal. Its end is not waited for; again is fine.

        A command that is to end for sure ends when its input does: sshd passes no signals on to those of root's logins.
        """


class Host(Protocol):
    """A machine that commands run on. Safe to use from several threads at once."""

    @property
    def name(self) -> str:
        """Its name in the cluster file."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        """Run a command in the login's home folder and wait for its end. A non-zero exit status is no exception.

        Args:
            argv: program and arguments; nothing in it is expanded by a shell.
            stdin: bytes for its standard input, which ends after them.
            timeout_s: how long it may take. Connecting, if it comes to that, is bounded separately.

        Raises:
            CommandTimeout: it did not end in time. It was sent a signal to end.
            HostError: the host cannot be reached, does not trust this login or is not trusted, or the connection broke.
        """

    def open(self, argv: Sequence[str], *, timeout_s: float) -> Stream:
        """Start a command as :meth:`run` does, to be talked to while it runs. Close it afterwards.

        Args:
            argv: program and arguments; nothing in it is expanded by a shell.
            timeout_s: how long it may live at most, however it is talked to.

        Raises:
            HostError: as :meth:`run`.
        """

    def forward(self, remote_address: str, remote_port: int) -> AbstractContextManager[int]:
        """Yield a port of 127.0.0.1 on this machine that leads to an address and port as the host sees them.

        Raises:
            HostError: the host cannot be reached. That nothing listens there shows when the port is used.
        """

    def close(self) -> None:
        """End commands that still run, and the connection. The host may not be used any more."""


@dataclass(frozen=True)
class SshSettings:
    """How all hosts are reached. None: as the SSH configuration says.

    Attributes:
        user: login name.
        port: port of sshd.
        identity_file: private key to offer first.
        config_file: instead of ``~/.ssh/config`` and ``/etc/ssh/ssh_config``.
        accept_new_keys: record the key of a host that none is known of. A changed key is refused all the same.
        connect_timeout_s: bound of everything up to a usable connection: name, TCP, jump hosts, key exchange, login.
        max_parallel: most hosts worked on at once.
    """

    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    config_file: str | None = None
    accept_new_keys: bool = False
    connect_timeout_s: float | None = None
    max_parallel: int = 32


@dataclass(frozen=True)
class Login:
    """What is particular to one host; wins over :class:`SshSettings`."""

    user: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class FleetSettings:
    """All that a fleet needs to know: the hosts by name, in order, and how they are reached."""

    logins: Mapping[str, Login]
    ssh: SshSettings = field(default_factory=SshSettings)


class Deadline:
    """A point in time that something must be done by. Times are seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Time left, never less than zero."""
        return max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s <= 0.0


def is_local(name: str) -> bool:
    """Whether a host name means this machine, without SSH."""
    return name in {"local", "localhost"}
