"""The machine that pdctl runs on, as a host like any other.

Commands are run with :mod:`subprocess`. invoke's ``run`` is no choice: it feeds standard input one byte at a time with
a pause after each, and always goes through a shell.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pdctl.errors import CommandTimeout, HostError
from pdctl.hosts.base import OUTPUT_LIMIT_BYTES, SETTLE_S, CommandResult, Deadline
from pdctl.hosts.forwarding import forwarded
from pdctl.hosts.local_stream import LocalStream

NOT_FOUND = 127
"""Exit status of a command that does not exist, as a shell has it."""

NOT_EXECUTABLE = 126
"""Exit status of a command that may not be run, as a shell has it."""

_PIECE_BYTES = 64 * 1024
# How soon the end of a process is noticed whose output stays open.
_WAIT_S = 0.2
_CONNECT_TIMEOUT_S = 10.0
# Addresses that a server which listens on them can be reached from at 127.0.0.1.
_LOOPBACK = {"127.0.0.1", "localhost", "0.0.0.0"}  # noqa: S104


class LocalHost:
    """This machine."""

    def __init__(self, name: str = "local") -> None:
        self.name = name
        self._running: set[subprocess.Popen[bytes]] = set()
        self._streams: set[LocalStream] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        """See :meth:`pdctl.hosts.base.Host.run`. Past the time-out, the whole process group is killed."""
        started = time.monotonic()
        deadline = Deadline(timeout_s)
        try:
            process = self._start(argv)
        except OSError as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            message = f"{argv[0]}: {error.strerror}\n".encode()
            return CommandResult(tuple(argv), code, b"", message, time.monotonic() - started)
        try:
            with _Pipes(process, stdin) as pipes:
                stdout, stderr = pipes.talk(deadline)
            process.wait(deadline.remaining_s)
        except (subprocess.TimeoutExpired, _DeadlinePassed):
            raise CommandTimeout(
                self.name,
                f"`{argv[0]}` did not end within {timeout_s:g} s",
                hint="this machine may be overloaded, or the command wait for something (a hanging file system?)",
            ) from None
        except _OutputTooLarge:
            raise HostError(
                self.name, f"`{argv[0]}` wrote more than {OUTPUT_LIMIT_BYTES >> 20} MiB, and was ended"
            ) from None
        finally:
            _kill(process)
            process.wait()
            with self._lock:
                self._running.discard(process)
        if self._closed and process.returncode == -signal.SIGKILL:
            raise HostError(self.name, f"`{argv[0]}` was ended because the host was closed")
        return CommandResult(tuple(argv), process.returncode, stdout, stderr, time.monotonic() - started)

    def open(self, argv: Sequence[str], *, timeout_s: float) -> LocalStream:
        """See :meth:`pdctl.hosts.base.Host.open`. Past the time-out, the whole process group is killed.

        A program that does not exist or cannot be run is one that ends at once, with the exit status of a shell.
        """
        try:
            process = self._start(argv)
        except OSError as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            message = f"{argv[0]}: {error.strerror}"
            process = self._start(["/bin/sh", "-c", 'echo "$1" >&2; exit "$2"', "sh", message, str(code)])

        def forget() -> None:
            with self._lock:
                self._running.discard(process)
                self._streams.discard(stream)

        stream = LocalStream(self.name, tuple(argv), process, Deadline(timeout_s), forget)
        with self._lock:
            self._streams.add(stream)
        return stream

    @contextmanager
    def forward(self, remote_address: str, remote_port: int) -> Iterator[int]:
        """See :meth:`pdctl.hosts.base.Host.forward`. A loopback address needs no relay: the port itself is yielded."""
        if remote_address in _LOOPBACK:
            yield remote_port
            return

        def dial() -> socket.socket:
            stream = socket.create_connection((remote_address, remote_port), _CONNECT_TIMEOUT_S)
            stream.settimeout(None)
            return stream

        with forwarded(dial) as port:
            yield port

    def close(self) -> None:
        """Kill the commands that still run."""
        with self._lock:
            self._closed = True
            running = list(self._running)
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        for process in running:
            _kill(process)

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        home = Path.home()
        with self._lock:
            if self._closed:
                raise HostError(self.name, "the host was closed")
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Where an SSH login starts.
                cwd=home if home.is_dir() else "/",
                # A group of its own to kill, out of reach of the terminal's Ctrl-C: who asked for it decides.
                start_new_session=True,
            )
            self._running.add(process)
        return process


class _DeadlinePassed(Exception):
    """The command did not end in time."""


class _OutputTooLarge(Exception):
    """The command wrote more than is allowed."""


class _Pipes:
    """The three pipes of a process: feeds its standard input and reads both outputs until they end."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._streams = (process.stdin, process.stdout, process.stderr)
        self._input = process.stdin.fileno()
        self._unsent = memoryview(stdin)
        self._outputs: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
        self._room = OUTPUT_LIMIT_BYTES
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Pipes:
        for descriptor in (self._input, *self._outputs):
            os.set_blocking(descriptor, False)
            self._selector.register(
                descriptor, selectors.EVENT_WRITE if descriptor == self._input else selectors.EVENT_READ
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for stream in self._streams:
            stream.close()

    def talk(self, deadline: Deadline) -> tuple[bytes, bytes]:
        """Standard output and standard error."""
        quiet_since = time.monotonic()
        while any(descriptor in self._selector.get_map() for descriptor in self._outputs):
            if deadline.passed:
                raise _DeadlinePassed
            ready = self._selector.select(min(_WAIT_S, deadline.remaining_s))
            if ready:
                quiet_since = time.monotonic()
            elif self._process.poll() is not None and time.monotonic() - quiet_since > SETTLE_S:
                # It ended and left a process behind that keeps its output open.
                break
            for key, _ in ready:
                if key.fd == self._input:
                    self._feed()
                else:
                    self._read(key.fd)
        stdout, stderr = (b"".join(pieces) for pieces in self._outputs.values())
        return stdout, stderr

    def _feed(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._input, self._unsent[:_PIECE_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:
            # It does not read on; that is its business.
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._selector.unregister(self._input)
            self._streams[0].close()

    def _read(self, descriptor: int) -> None:
        piece = os.read(descriptor, _PIECE_BYTES)
        if not piece:
            self._selector.unregister(descriptor)
            return
        self._room -= len(piece)
        if self._room < 0:
            raise _OutputTooLarge
        self._outputs[descriptor].append(piece)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Only while it is not reaped: until then its number cannot belong to anybody else.
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
