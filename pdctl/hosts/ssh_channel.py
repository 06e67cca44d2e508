"""One command over one SSH channel: standard input, both outputs and the end of it, within a deadline.

fabric's and invoke's own ``run`` feeds standard input one byte at a time with a pause after each, which takes minutes
for what pdctl sends. Here input goes out in large pieces while output is read, so neither side waits for the other.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from paramiko.channel import Channel
from paramiko.common import cMSG_CHANNEL_REQUEST
from paramiko.message import Message
from paramiko.ssh_exception import SSHException

from pdctl.hosts.base import SETTLE_S, Deadline

KILLED = -1
"""Exit code of a command that a signal ended: paramiko does not pass on which."""

PIECE_BYTES = 32 * 1024
# Upper bounds of waits that something else ends earlier; they only decide how soon a deadline is noticed.
SEND_WAIT_S = 0.05
READ_WAIT_S = 0.5
# How much later than the deadline a channel, and then its whole connection, is closed by force.
_GRACE_S = 1.0


class OutputTooLarge(Exception):
    """The command wrote more than is allowed."""


class DeadlinePassed(Exception):
    """The command did not end in time."""


class ConnectionLost(Exception):
    """The connection broke off while the command ran."""


class CommandRefused(Exception):
    """The server did not start the command."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit status (:data:`KILLED` after a signal) and outputs."""

    exit_code: int
    stdout: bytes
    stderr: bytes


def exchange(channel: Channel, command: str, stdin: bytes, deadline: Deadline, output_limit: int) -> Outcome:
    """Run a command on a fresh session channel. The channel is closed afterwards.

    Args:
        channel: a session channel on which nothing was asked for yet.
        command: command line for the login shell.
        stdin: bytes for its standard input, which ends after them.
        deadline: when it must have ended. It is sent SIGTERM then.
        output_limit: most bytes of standard output and standard error together.

    Raises:
        CommandRefused: it was not started.
        DeadlinePassed, OutputTooLarge, ConnectionLost: it may have been started, and may have done its work.
    """
    finished = threading.Event()
    enforcer = threading.Thread(target=enforce, args=(channel, deadline, finished), name="deadline", daemon=True)
    enforcer.start()
    try:
        conversation = _Conversation(channel, start(channel, command, deadline), deadline, output_limit)
        conversation.send(stdin)
        conversation.read_all()
        return conversation.outcome()
    except (DeadlinePassed, OutputTooLarge):
        terminate(channel)
        raise
    finally:
        finished.set()
        with suppress(SSHException, EOFError, OSError):
            channel.close()


def enforce(channel: Channel, deadline: Deadline, finished: threading.Event) -> None:
    """End an exchange that hangs where it cannot look at the clock: a request without answer, a blocked connection."""
    if finished.wait(deadline.remaining_s + _GRACE_S):
        return
    # Closing sends a message, which may block too.
    threading.Thread(target=channel.close, name="close channel", daemon=True).start()
    if not finished.wait(_GRACE_S):
        channel.get_transport().close()


def terminate(channel: Channel) -> None:
    """Ask the server to end the command (RFC 4254, 6.9): without a terminal it would outlive its channel."""
    message = Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("signal")
    message.add_boolean(False)
    message.add_string("TERM")
    with suppress(SSHException, EOFError, OSError):
        # paramiko has no public way to send a signal.
        channel.get_transport()._send_user_message(message)  # type: ignore[attr-defined]


class News(threading.Event):
    """Set when output arrives or ends. Emptying one of the two buffers must not hide news of the other."""

    def clear(self) -> None:
        """Called by a buffer that was emptied: ignored."""

    def forget(self) -> None:
        """Wait for further news."""
        super().clear()


def start(channel: Channel, command: str, deadline: Deadline) -> News:
    """Start a command on a fresh session channel.

    Returns:
        what is set when it writes something, or ends.

    Raises:
        CommandRefused: it was not started.
        DeadlinePassed, ConnectionLost: it may have been started.
    """
    channel.settimeout(SEND_WAIT_S)
    try:
        channel.exec_command(command)
    except (SSHException, EOFError, OSError) as error:
        if deadline.passed:
            raise DeadlinePassed from None
        if not channel.get_transport().is_active():
            # The request may have arrived.
            raise ConnectionLost(str(error)) from None
        raise CommandRefused(str(error)) from None
    news = News()
    channel.in_buffer.set_event(news)
    channel.in_stderr_buffer.set_event(news)
    return news


class _Conversation:
    def __init__(self, channel: Channel, news: News, deadline: Deadline, output_limit: int) -> None:
        self._channel = channel
        self._news = news
        self._deadline = deadline
        self._room = output_limit
        self._stdout: list[bytes] = []
        self._stderr: list[bytes] = []

    def send(self, stdin: bytes) -> None:
        position = 0
        while position < len(stdin):
            self._check_deadline()
            try:
                sent = self._channel.send(stdin[position : position + PIECE_BYTES])
            except TimeoutError:
                # The command does not read for now: it may be waiting for its output to be read.
                self._drain()
                continue
            except (SSHException, EOFError, OSError):
                sent = 0
            self._drain()
            if sent == 0:
                # It ended without reading everything, or the connection is gone: what was read will tell.
                return
            position += sent
        with suppress(SSHException, EOFError, OSError):
            self._channel.shutdown_write()

    def read_all(self) -> None:
        quiet_since = time.monotonic()
        while True:
            self._check_deadline()
            self._news.forget()
            over = self._channel.eof_received or self._channel.closed
            if self._drain():
                quiet_since = time.monotonic()
            elif over:
                return
            elif self._channel.exit_status_ready() and time.monotonic() - quiet_since > SETTLE_S:
                # It ended and left a process behind that keeps its output open.
                return
            else:
                self._news.wait(min(READ_WAIT_S, self._deadline.remaining_s))

    def outcome(self) -> Outcome:
        if not self._channel.status_event.wait(self._deadline.remaining_s):
            raise DeadlinePassed
        code = self._channel.exit_status
        if code < 0:
            # Closed without an exit status. A server announces the end of output first; a broken connection does not.
            if not self._channel.eof_received or not self._channel.get_transport().is_active():
                self._check_deadline()
                raise ConnectionLost
            code = KILLED
        return Outcome(code, b"".join(self._stdout), b"".join(self._stderr))

    def _check_deadline(self) -> None:
        if self._deadline.passed:
            raise DeadlinePassed

    def _drain(self) -> bool:
        """Take what has arrived; False if nothing has."""
        some = False
        while self._channel.recv_ready():
            self._keep(self._stdout, self._channel.recv(PIECE_BYTES))
            some = True
        while self._channel.recv_stderr_ready():
            self._keep(self._stderr, self._channel.recv_stderr(PIECE_BYTES))
            some = True
        return some

    def _keep(self, pieces: list[bytes], piece: bytes) -> None:
        self._room -= len(piece)
        if self._room < 0:
            raise OutputTooLarge
        pieces.append(piece)
