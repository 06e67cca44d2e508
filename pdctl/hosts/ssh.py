"""Hosts that are reached over SSH."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from paramiko.channel import Channel
from paramiko.ssh_exception import SSHException

from pdctl.errors import CommandTimeout, HostError, HostUnreachable
from pdctl.hosts.base import LINE_LIMIT_BYTES, OUTPUT_LIMIT_BYTES, CommandResult, Deadline, Login, SshSettings
from pdctl.hosts.forwarding import forwarded
from pdctl.hosts.known_hosts import HostKeyChecker
from pdctl.hosts.line_buffer import LineTooLong
from pdctl.hosts.shared import Shared
from pdctl.hosts.ssh_channel import CommandRefused, ConnectionLost, DeadlinePassed, OutputTooLarge, exchange, start
from pdctl.hosts.ssh_config import Destination, SshConfig
from pdctl.hosts.ssh_connect import Connector
from pdctl.hosts.ssh_link import Link, NoSessionFree, SessionRefused
from pdctl.hosts.ssh_stream import QuietTooLong, SshStream

_REUSED_ANSWER_S = 5.0
"""How long a server may take to answer on a connection that was idle, until it is taken for dead."""


class SshHost:
    """A host behind SSH. It is connected to when it is first used, once; commands run over it side by side."""

    def __init__(self, name: str, destination: Destination, connector: Connector) -> None:
        self.name = name
        self._destination = destination
        self._connector = connector
        self._link: Shared[Link] = Shared(lambda link: link.is_alive)
        self._closed = threading.Event()

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        """See :meth:`pdctl.hosts.base.Host.run`. The login shell only splits the quoted argv into words.

        A connection that was idle and turns out dead is replaced, once. A command that may have started is never run
        again.
        """
        started = time.monotonic()
        program = argv[0]
        link, channel, deadline = self._session(program, timeout_s)
        try:
            with self._explained(program, timeout_s):
                outcome = exchange(channel, shlex.join(argv), stdin, deadline, OUTPUT_LIMIT_BYTES)
        finally:
            link.release(channel)
        duration_s = time.monotonic() - started
        return CommandResult(tuple(argv), outcome.exit_code, outcome.stdout, outcome.stderr, duration_s)

    def open(self, argv: Sequence[str], *, timeout_s: float) -> SshStream:
        """See :meth:`pdctl.hosts.base.Host.open`."""
        program = argv[0]
        link, channel, deadline = self._session(program, timeout_s)
        try:
            with self._explained(program, timeout_s):
                news = start(channel, shlex.join(argv), deadline)
        except BaseException:
            link.release(channel)
            raise
        return SshStream(
            tuple(argv),
            channel,
            news,
            deadline,
            lambda: self._explained(program, timeout_s),
            lambda: link.release(channel),
        )

    @contextmanager
    def forward(self, remote_address: str, remote_port: int) -> Iterator[int]:
        """See :meth:`pdctl.hosts.base.Host.forward`."""
        self._connected()

        def dial() -> Channel:
            link = self._connected()
            return link.transport.open_channel(
                "direct-tcpip",
                (remote_address, remote_port),
                ("127.0.0.1", 0),
                timeout=self._destination.connect_timeout_s,
            )

        with forwarded(dial) as port:
            yield port

    def close(self) -> None:
        """Close the connection; commands that still run over it end with an error."""
        self._closed.set()
        self._link.close()

    def _connected(self) -> Link:
        if self._closed.is_set():
            raise HostError(self.name, "its connection was closed")
        timeout_s = self._destination.connect_timeout_s
        # A little more for those who wait for another thread's attempt, so that they get its explanation.
        link = self._link.get(lambda: self._connector.connect(self._destination), Deadline(timeout_s + 2))
        if link is None:
            raise HostUnreachable(self.name, f"no connection within {timeout_s:g} s")
        return link

    def _session(self, program: str, timeout_s: float) -> tuple[Link, Channel, Deadline]:
        reused = self._link.peek()
        if reused is not None:
            deadline = Deadline(timeout_s)
            # One that others are using just now is no more dead than they are.
            answer_timeout_s = min(_REUSED_ANSWER_S, timeout_s) if reused.is_idle else timeout_s
            try:
                return reused, reused.open_session(deadline, answer_timeout_s=answer_timeout_s), deadline
            except NoSessionFree:
                raise self._too_long(program, timeout_s) from None
            except SessionRefused as error:
                raise self._no_session(error) from None
            except (SSHException, EOFError, OSError):
                # Nothing was asked of the host yet, so nothing can happen twice.
                if self._link.discard(reused):
                    reused.retire()
        link = self._connected()
        deadline = Deadline(timeout_s)
        try:
            return link, link.open_session(deadline, answer_timeout_s=timeout_s), deadline
        except NoSessionFree:
            raise self._too_long(program, timeout_s) from None
        except SessionRefused as error:
            raise self._no_session(error) from None
        except (SSHException, EOFError, OSError) as error:
            if deadline.passed:
                raise self._too_long(program, timeout_s) from None
            raise HostUnreachable(
                self.name, f"the connection was lost before `{program}` was started: {error or type(error).__name__}"
            ) from None

    @contextmanager
    def _explained(self, program: str, timeout_s: float) -> Iterator[None]:
        """Say in words what went wrong with a command."""
        try:
            yield
        except DeadlinePassed:
            raise self._too_long(program, timeout_s) from None
        except QuietTooLong as error:
            raise CommandTimeout(
                self.name, f"`{program}` said nothing for {error.args[0]:g} s", hint="the host may be overloaded"
            ) from None
        except OutputTooLarge:
            raise HostError(
                self.name, f"`{program}` wrote more than {OUTPUT_LIMIT_BYTES >> 20} MiB, and was ended"
            ) from None
        except LineTooLong:
            raise HostError(
                self.name, f"`{program}` wrote a line of more than {LINE_LIMIT_BYTES >> 20} MiB, and was ended"
            ) from None
        except ConnectionLost:
            if self._closed.is_set():
                raise HostError(self.name, f"its connection was closed while `{program}` ran") from None
            raise HostUnreachable(
                self.name,
                f"the connection was lost while `{program}` ran; whether it did its work is unknown",
                hint="did the host or its sshd restart, or the network break? Look at the host, then try again",
            ) from None
        except CommandRefused as error:
            raise HostError(
                self.name,
                f"its SSH server did not run `{program}`: {error}",
                hint="the login may be limited to file transfer or forwarding (ForceCommand), or its shell missing",
            ) from None

    def _too_long(self, program: str, timeout_s: float) -> CommandTimeout:
        return CommandTimeout(
            self.name,
            f"`{program}` did not end within {timeout_s:g} s",
            hint="the host may be overloaded, or the command wait for something (a hanging file system?)",
        )

    def _no_session(self, error: SessionRefused) -> HostError:
        return HostError(
            self.name,
            f"its SSH server refused to open a session: {error}",
            hint="MaxSessions in its sshd_config may be 0, or the login allowed to forward ports only",
        )


class SshAccess:
    """What the SSH hosts of a fleet share: configuration, host keys, identities, jump hosts. Each is read once.

    Raises:
        UsageError: the SSH configuration cannot be read.
    """

    def __init__(self, settings: SshSettings, *, environ: Mapping[str, str], home: Path) -> None:
        self._config = SshConfig(settings, environ=environ, home=home)
        checker = HostKeyChecker(accept_new=settings.accept_new_keys, config_file=self._config.given_file)
        self._connector = Connector(checker, environ=environ, home=home)

    def host(self, name: str, login: Login) -> SshHost:
        """The host of that name; not connected yet.

        Raises:
            UsageError: the SSH configuration makes no sense for this host.
        """
        return SshHost(name, self._config.destination(name, login), self._connector)

    def close(self) -> None:
        """Close connections to jump hosts."""
        self._connector.close()
