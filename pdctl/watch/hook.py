"""Runs a command for an alert: no shell, the alert as JSON on its standard input, bounded time and output."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from pdctl.errors import UsageError
from pdctl.watch.sinks import Note
from pdctl.watch.wording import plain

TIMEOUT_S = 30.0
OUTPUT_LIMIT = 2000
"""Bytes of a hook's output that are put into the log."""
_SLICE_S = 0.1


def parse_command(text: str) -> list[str]:
    """Split a command as a shell would, without running one: ``$``, ``|`` and ``>`` mean nothing.

    Raises:
        UsageError: it is empty, or a quote is open.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--on-alert {text!r}: {error}") from None
    if not words:
        raise UsageError("--on-alert is empty", hint="name a program and its arguments")
    return words


class CommandHook:
    """Runs one command per event.

    Args:
        argv: the command; nothing of the alert is put into it.
        note: told what went wrong, and what the command printed.
        timeout_s: after that the command and its process group are killed.
        hide: names of environment variables that the command does not get.
    """

    name = "on-alert"

    def __init__(self, argv: list[str], *, note: Note, timeout_s: float = TIMEOUT_S, hide: Iterable[str] = ()) -> None:
        self._argv = argv
        self._note = note
        self._timeout_s = timeout_s
        hidden = set(hide)
        self._environ = {name: value for name, value in os.environ.items() if name not in hidden}
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._killed = False

    def deliver(self, event: Mapping[str, Any], stop: threading.Event) -> str:
        """Run the command. It failed if it could not be started, was killed, or ended with another code than 0."""
        # A file, not a pipe: a command that does not read cannot keep us waiting.
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(event).encode() + b"\n")
            stdin.seek(0)
            try:
                process = subprocess.Popen(
                    self._argv,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=self._environ,
                    start_new_session=True,
                )
            except OSError as error:
                self._note(f"--on-alert {self._argv[0]}: cannot be run: {error.strerror or error}")
                return "failed"
        with self._lock:
            self._running.add(process)
            killed = self._killed
        try:
            if killed:
                _kill(process)
            return self._wait(process, stop)
        finally:
            with self._lock:
                self._running.discard(process)
            # Also what it left behind in its process group.
            _kill(process)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def kill(self) -> None:
        """Kill what runs."""
        with self._lock:
            self._killed = True
            for process in self._running:
                _kill(process)

    def _wait(self, process: subprocess.Popen[bytes], stop: threading.Event) -> str:
        until = time.monotonic() + self._timeout_s
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        os.set_blocking(descriptor, False)
        output, size, at_end = b"", 0, False
        while process.poll() is None and time.monotonic() < until and not stop.is_set():
            if at_end:
                time.sleep(_SLICE_S / 10)
                continue
            chunk = _read(descriptor, _SLICE_S)
            at_end = chunk == b""
            size += len(chunk or b"")
            output += (chunk or b"")[: OUTPUT_LIMIT - len(output)]
        code = process.poll()
        # What was written just before the end; bounded, as something else may go on writing.
        for _ in range(64):
            chunk = None if at_end else _read(descriptor, 0)
            if not chunk:
                break
            size += len(chunk)
            output += chunk[: OUTPUT_LIMIT - len(output)]
        self._tell(code, output, size)
        return "delivered" if code == 0 else "failed"

    def _tell(self, code: int | None, output: bytes, size: int) -> None:
        text = plain(output.decode(errors="replace").strip(), OUTPUT_LIMIT)
        more = f" (and {size - len(output)} bytes more)" if size > len(output) else ""
        said = f": {text}{more}" if text else ""
        if code is None:
            self._note(f"--on-alert {self._argv[0]}: killed, it ran longer than {self._timeout_s:g} s{said}")
        elif code < 0:
            self._note(f"--on-alert {self._argv[0]}: ended by signal {-code}{said}")
        elif code or text:
            self._note(f"--on-alert {self._argv[0]}: exit code {code}{said}")


def _read(descriptor: int, timeout_s: float) -> bytes | None:
    """Up to 64 KiB; empty at the end; None if nothing came in time."""
    readable, _, _ = select.select([descriptor], [], [], timeout_s)
    if not readable:
        return None
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    # It leads its own group, whose id stays taken until we have waited for it.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
