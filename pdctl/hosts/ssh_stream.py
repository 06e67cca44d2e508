"""A command over one SSH channel that is talked to while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from paramiko.channel import Channel
from paramiko.ssh_exception import SSHException

from pdctl.hosts.base import CommandResult, Deadline
from pdctl.hosts.line_buffer import LineBuffer, LineTooLong, Tail
from pdctl.hosts.ssh_channel import (
    KILLED,
    PIECE_BYTES,
    READ_WAIT_S,
    ConnectionLost,
    DeadlinePassed,
    News,
    enforce,
    terminate,
)


class QuietTooLong(Exception):
    """Nothing came in time; the argument is that time in seconds. The command runs on."""


class SshStream:
    """See :class:`pdctl.hosts.base.Stream`.

    Args:
        argv: the command, for its result.
        channel: a channel on which it was started.
        news: set when output arrives or ends.
        deadline: when it must have ended. The channel is closed by force then.
        explained: a context that says in words what is raised inside.
        release: hands the channel back.
    """

    def __init__(
        self,
        argv: tuple[str, ...],
        channel: Channel,
        news: News,
        deadline: Deadline,
        explained: Callable[[], AbstractContextManager[None]],
        release: Callable[[], None],
    ) -> None:
        self._argv = argv
        self._channel = channel
        self._news = news
        self._deadline = deadline
        self._explained = explained
        self._release = release
        self._lines = LineBuffer()
        self._stderr = Tail()
        self._started = time.monotonic()
        self._reading = threading.Lock()
        self._closing = threading.Lock()
        self._finished = threading.Event()
        threading.Thread(target=enforce, args=(channel, deadline, self._finished), name="deadline", daemon=True).start()

    def __enter__(self) -> SshStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes, *, timeout_s: float) -> None:
        """See :meth:`pdctl.hosts.base.Stream.write`."""
        patience = Deadline(timeout_s)
        position = 0
        with self._explained():
            while position < len(data):
                self._check(patience)
                try:
                    sent = self._channel.send(data[position : position + PIECE_BYTES])
                except TimeoutError:
                    # It does not read for now.
                    continue
                except (SSHException, EOFError, OSError):
                    sent = 0
                if sent == 0:
                    self._check_connection()
                    return
                position += sent

    def read_line(self, *, timeout_s: float) -> bytes | None:
        """See :meth:`pdctl.hosts.base.Stream.read_line`."""
        patience = Deadline(timeout_s)
        with self._reading, self._explained():
            while True:
                self._news.forget()
                over = self._channel.eof_received or self._channel.closed
                try:
                    some = self._drain()
                    line = self._lines.take()
                except LineTooLong:
                    self.close()
                    raise
                if line is not None:
                    return line
                if over and not some:
                    self._check_connection()
                    return self._lines.rest()
                if not some:
                    self._check(patience)
                    self._news.wait(min(READ_WAIT_S, patience.remaining_s, self._deadline.remaining_s))

    def wait(self, *, timeout_s: float) -> CommandResult:
        """See :meth:`pdctl.hosts.base.Stream.wait`."""
        with self._reading, self._explained():
            if not self._channel.status_event.wait(min(timeout_s, self._deadline.remaining_s)):
                raise QuietTooLong(timeout_s)
            self._drain()
            self._check_connection()
            code = self._channel.exit_status
            duration_s = time.monotonic() - self._started
            return CommandResult(self._argv, KILLED if code < 0 else code, b"", bytes(self._stderr), duration_s)

    def close(self) -> None:
        """See :meth:`pdctl.hosts.base.Stream.close`."""
        with self._closing:
            if self._finished.is_set():
                return
            self._finished.set()
        if not self._channel.exit_status_ready():
            terminate(self._channel)
        with suppress(SSHException, EOFError, OSError):
            self._channel.shutdown_write()
        self._release()

    def _check(self, patience: Deadline) -> None:
        if self._deadline.passed:
            raise DeadlinePassed
        if patience.passed:
            raise QuietTooLong(patience.timeout_s)

    def _check_connection(self) -> None:
        """A server announces the end of output before it closes the channel; a broken connection does not."""
        if self._finished.is_set() or self._channel.eof_received:
            return
        if self._deadline.passed:
            raise DeadlinePassed
        raise ConnectionLost

    def _drain(self) -> bool:
        some = False
        while self._channel.recv_ready():
            self._lines.feed(self._channel.recv(PIECE_BYTES))
            some = True
        while self._channel.recv_stderr_ready():
            self._stderr.feed(self._channel.recv_stderr(PIECE_BYTES))
        return some
