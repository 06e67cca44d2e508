"""The dashboard of ``pdctl watch`` on a real terminal: the program is started, draws, is left, and cleans up."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster
from tests.integration.test_launch_stand_in import Bench, bench  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(120)

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
SHOW_CURSOR = b"\x1b[?25h"


class Terminal:
    """A pseudo-terminal with a program in it."""

    def __init__(self, cluster: Cluster, *words: str, columns: int = 120, lines: int = 40) -> None:
        self.master, self.slave = pty.openpty()
        self.size(columns, lines)
        self.settings = termios.tcgetattr(self.slave)
        self.output = b""
        self.process = subprocess.Popen(
            cluster.command("watch", *words),
            env={**cluster.environment(), "TERM": "xterm-256color"},
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
        )

    def size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, *texts: bytes, timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not all(text in self.output for text in texts):
            left = end - time.monotonic()
            assert left > 0, f"{texts} did not come: {self.output[-3000:]!r}"
            if select.select([self.master], [], [], min(left, 0.2))[0]:
                self.output += os.read(self.master, 1 << 16)

    def write(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait(self) -> int:
        end = time.monotonic() + 30
        while (code := self.process.poll()) is None:
            assert time.monotonic() < end, "it did not end"
            if select.select([self.master], [], [], 0.1)[0]:
                self.output += os.read(self.master, 1 << 16)
        while select.select([self.master], [], [], 0)[0]:
            self.output += os.read(self.master, 1 << 16)
        return code

    def assert_restored(self) -> None:
        assert self.output.rindex(LEAVE) > self.output.rindex(ENTER)
        assert self.output.rindex(SHOW_CURSOR) > self.output.rindex(ENTER)
        assert termios.tcgetattr(self.slave) == self.settings
        assert b"Traceback" not in self.output

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(bench: Bench) -> Iterator[Terminal]:  # noqa: F811
    cluster = bench.cluster()
    assert cluster.pdctl("up").code == 0
    made = Terminal(cluster, "--interval", "0.2")
    yield made
    made.close()


def test_it_draws_the_cluster_and_q_restores_the_terminal(terminal: Terminal) -> None:
    terminal.read_until(ENTER, b"prefill-0", b"decode-0")
    terminal.size(80, 24)
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.write(b"q")
    assert terminal.wait() == 0
    terminal.assert_restored()


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_signal_restores_the_terminal_too(terminal: Terminal, number: signal.Signals) -> None:
    terminal.read_until(ENTER, b"prefill-0")
    terminal.process.send_signal(number)
    assert terminal.wait() == 130
    terminal.assert_restored()
