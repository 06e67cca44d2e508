"""An open SSH connection, and how many sessions it carries at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from paramiko.channel import Channel
from paramiko.ssh_exception import ChannelException, SSHException
from paramiko.transport import Transport

from pdctl.hosts.base import Deadline
from pdctl.hosts.shared import Closable

SESSIONS = 8
"""Most sessions at once: sshd's MaxSessions is 10 unless set, and somebody else may share the limit."""

# How long a server may take to count a session that ended as ended, and how often it is asked.
_FREED_S = 10.0
_RETRY_S = 0.05


class NoSessionFree(Exception):
    """All sessions of the connection stayed in use until the deadline."""


class SessionRefused(Exception):
    """The server does not open a session, though the connection carries none."""


def is_refusal(error: Exception, transport: Transport, answer: Deadline) -> bool:
    """Whether opening a channel failed because the server said no.

    paramiko keeps the reason in one place for all channels, where another thread may take it away; what is left then is
    an exception that a lost connection or a time-out raises as well.
    """
    return isinstance(error, ChannelException) or (transport.is_active() and not answer.passed)


class Link:
    """A connection that is logged in. Safe to use from several threads.

    Args:
        transport: the open connection.
        belongings: what else is to be closed with it.
    """

    def __init__(self, transport: Transport, belongings: Sequence[Closable]) -> None:
        self.transport = transport
        self._belongings = belongings
        self._limit = SESSIONS
        self._active = 0
        self._retired = False
        self._carried = False
        self._changed = threading.Condition()

    @property
    def is_alive(self) -> bool:
        """Whether nothing speaks against using it. A peer that vanished silently shows only when it is used."""
        return self.transport.is_active()

    @property
    def is_idle(self) -> bool:
        """Whether no session is open."""
        return self._active == 0

    def open_session(self, deadline: Deadline, *, answer_timeout_s: float) -> Channel:
        """Open a session channel, waiting for a free one. Hand it back with :meth:`release`.

        Args:
            deadline: how long to wait for a session to become free.
            answer_timeout_s: how long the server may take to open one.

        Raises:
            NoSessionFree: none became free.
            SessionRefused: the server refused to open a session.
            SSHException, EOFError, OSError: no answer, or the connection broke. Nothing was run.
        """
        patience: Deadline | None = None
        while True:
            with self._changed:
                while self._active >= self._limit:
                    if not self._changed.wait(deadline.remaining_s):
                        raise NoSessionFree
                self._active += 1
            answer = Deadline(max(min(answer_timeout_s, deadline.remaining_s), 0.1))
            try:
                channel = self.transport.open_session(timeout=answer.timeout_s)
            except BaseException as error:
                self._leave()
                if not isinstance(error, SSHException) or not is_refusal(error, self.transport, answer):
                    raise
                patience = patience or Deadline(_FREED_S)
                self._be_content(error, patience, deadline)
            else:
                self._carried = True
                return channel

    def release(self, channel: Channel) -> None:
        """Hand a session back."""
        with suppress(SSHException, EOFError, OSError):
            channel.close()
        self._leave()

    def retire(self) -> None:
        """Close the connection as soon as no session uses it any more."""
        with self._changed:
            self._retired = True
            close = self._active == 0
        if close:
            self.close()

    def close(self) -> None:
        """Close the connection now, with all that runs over it."""
        for closable in (self.transport, *self._belongings):
            with suppress(SSHException, EOFError, OSError):
                closable.close()

    def _be_content(self, refusal: SSHException, patience: Deadline, deadline: Deadline) -> None:
        """The server's limit is lower than ours: use no more sessions than are open now, and wait for one of those."""
        with self._changed:
            self._limit = max(self._active, 1)
            is_idle = self._active == 0
        if is_idle:
            # It may not have noticed yet that our last session ended.
            if not self._carried or patience.passed:
                raise SessionRefused(str(refusal)) from None
            time.sleep(_RETRY_S)
        if deadline.passed:
            raise NoSessionFree from None

    def _leave(self) -> None:
        with self._changed:
            self._active -= 1
            self._changed.notify()
            close = self._retired and self._active == 0
        if close:
            self.close()
