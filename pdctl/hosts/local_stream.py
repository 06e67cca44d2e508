"""A command on this machine that is talked to while it runs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from pdctl.errors import CommandTimeout, HostError
from pdctl.hosts.base import LINE_LIMIT_BYTES, CommandResult, Deadline
from pdctl.hosts.line_buffer import LineBuffer, LineTooLong, Tail

_PIECE_BYTES = 64 * 1024
# How soon it is noticed that another thread closed the stream, or that the process ended and its output stays open.
_WAIT_S = 0.2


class LocalStream:
    """See :class:`pdctl.hosts.base.Stream`.

    Args:
        host: name of this machine in the cluster file.
        argv: the command, for its result.
        process: started in a session of its own, with three pipes.
        deadline: when it must have ended. It is killed then, also while nobody talks to it.
        forget: called when it was ended.
    """

    def __init__(
        self,
        host: str,
        argv: tuple[str, ...],
        process: subprocess.Popen[bytes],
        deadline: Deadline,
        forget: Callable[[], None],
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._host = host
        self._argv = argv
        self._process = process
        self._deadline = deadline
        self._forget = forget
        self._pipes = (process.stdin, process.stdout, process.stderr)
        self._input, self._output, self._errors = (pipe.fileno() for pipe in self._pipes)
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._open_outputs = {self._output, self._errors}
        self._lines = LineBuffer()
        self._stderr = Tail()
        self._started = time.monotonic()
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._closing = threading.Lock()
        self._finished = threading.Event()
        threading.Thread(target=self._enforce, name="deadline", daemon=True).start()

    def __enter__(self) -> LocalStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes, *, timeout_s: float) -> None:
        """See :meth:`pdctl.hosts.base.Stream.write`."""
        patience = Deadline(timeout_s)
        unsent = memoryview(data)
        with self._writing:
            while unsent and not self._finished.is_set():
                try:
                    unsent = unsent[os.write(self._input, unsent[:_PIECE_BYTES]) :]
                except BlockingIOError:
                    self._check(patience, "did not take its input")
                    select.select([], [self._input], [], min(_WAIT_S, patience.remaining_s))
                except OSError:
                    # It does not read on; its end will tell.
                    return

    def read_line(self, *, timeout_s: float) -> bytes | None:
        """See :meth:`pdctl.hosts.base.Stream.read_line`."""
        patience = Deadline(timeout_s)
        with self._reading:
            while True:
                line = self._take()
                if line is not None:
                    return line
                if self._output not in self._open_outputs or self._finished.is_set():
                    return self._lines.rest()
                gone = self._process.poll() is not None
                if not self._drain(min(_WAIT_S, patience.remaining_s)):
                    if gone:
                        # It left a process behind that keeps its output open.
                        return self._lines.rest()
                    self._check(patience, "said nothing")

    def wait(self, *, timeout_s: float) -> CommandResult:
        """See :meth:`pdctl.hosts.base.Stream.wait`."""
        try:
            code = self._process.wait(min(timeout_s, self._deadline.remaining_s))
        except subprocess.TimeoutExpired:
            raise CommandTimeout(
                self._host,
                f"`{self._argv[0]}` did not end within {timeout_s:g} s",
                hint="this machine may be overloaded",
            ) from None
        with self._reading:
            while not self._finished.is_set() and self._drain(0):
                pass
            return CommandResult(self._argv, code, b"", bytes(self._stderr), time.monotonic() - self._started)

    def close(self) -> None:
        """See :meth:`pdctl.hosts.base.Stream.close`. The whole process group is killed."""
        with self._closing:
            if self._finished.is_set():
                return
            self._kill()
            self._process.wait()
            self._finished.set()
        # A thread in here may be using the pipes; it leaves soon.
        with self._writing, self._reading:
            for pipe in self._pipes:
                with suppress(OSError):
                    pipe.close()
        self._forget()

    def _take(self) -> bytes | None:
        try:
            return self._lines.take()
        except LineTooLong:
            self._kill()
            raise HostError(
                self._host, f"`{self._argv[0]}` wrote a line of more than {LINE_LIMIT_BYTES >> 20} MiB, and was ended"
            ) from None

    def _drain(self, wait_s: float) -> bool:
        """Read what there is; False if there was nothing in time."""
        if not self._open_outputs:
            return False
        ready, _, _ = select.select(list(self._open_outputs), [], [], wait_s)
        for descriptor in ready:
            piece = os.read(descriptor, _PIECE_BYTES)
            if not piece:
                self._open_outputs.discard(descriptor)
            elif descriptor == self._output:
                self._lines.feed(piece)
            else:
                self._stderr.feed(piece)
        return bool(ready)

    def _check(self, patience: Deadline, what: str) -> None:
        if self._deadline.passed:
            raise CommandTimeout(self._host, f"`{self._argv[0]}` did not end within {self._deadline.timeout_s:g} s")
        if patience.passed:
            raise CommandTimeout(
                self._host,
                f"`{self._argv[0]}` {what} for {patience.timeout_s:g} s",
                hint="this machine may be overloaded",
            )

    def _kill(self) -> None:
        # Only while it is not reaped: until then its number cannot belong to anybody else.
        if self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _enforce(self) -> None:
        if not self._finished.wait(self._deadline.remaining_s):
            self._kill()
