"""Commands on this machine."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from pdctl.errors import CommandTimeout, HostError
from pdctl.hosts import local
from pdctl.hosts.local import LocalHost

TIMEOUT_S = 20


def is_gone(pid: int) -> bool:
    """Whether a process ends soon, if it has not."""
    for _ in range(250):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


class TestRun:
    def test_exit_status_and_both_outputs(self) -> None:
        result = LocalHost().run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
        assert result.argv == ("sh", "-c", "echo out; echo err >&2; exit 3")

    def test_it_starts_in_the_home_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        assert LocalHost().run(["pwd"], timeout_s=TIMEOUT_S).stdout.decode().strip() == str(tmp_path)

    def test_no_shell(self) -> None:
        assert LocalHost().run(["echo", "$HOME", "*"], timeout_s=TIMEOUT_S).stdout == b"$HOME *\n"

    def test_a_signal(self) -> None:
        assert LocalHost().run(["sh", "-c", "kill -9 $$"], timeout_s=TIMEOUT_S).exit_code == -9

    def test_programs_that_cannot_be_run(self, tmp_path: Path) -> None:
        result = LocalHost().run(["no-such-program"], timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stderr) == (127, b"no-such-program: No such file or directory\n")
        assert LocalHost().run([str(tmp_path)], timeout_s=TIMEOUT_S).exit_code == 126

    def test_much_in_both_directions_at_once(self) -> None:
        data = os.urandom(1 << 20) * 10
        assert LocalHost().run(["cat"], stdin=data, timeout_s=60).stdout == data

    def test_input_that_nobody_reads_is_no_failure(self) -> None:
        result = LocalHost().run(["sh", "-c", "echo early"], stdin=b"x" * 5_000_000, timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stdout) == (0, b"early\n")

    def test_input_ends(self) -> None:
        assert LocalHost().run(["cat"], timeout_s=TIMEOUT_S).stdout == b""

    def test_output_that_stays_open_is_not_waited_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "SETTLE_S", 0.1)
        result = LocalHost().run(["sh", "-c", f"sleep 60 & echo $! >{tmp_path}/pid; echo done"], timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stdout) == (0, b"done\n")
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    def test_too_much_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "OUTPUT_LIMIT_BYTES", 1 << 20)
        with pytest.raises(HostError, match="more than 1 MiB"):
            LocalHost().run(["cat", "/dev/zero"], timeout_s=TIMEOUT_S)

    def test_past_the_time_out_the_whole_group_is_killed(self, tmp_path: Path) -> None:
        script = f"sleep 60 & echo $! >{tmp_path}/child; echo $$ >{tmp_path}/parent; trap '' TERM; wait"
        started = time.monotonic()
        with pytest.raises(CommandTimeout, match=r"local: `sh` did not end within 0\.5 s"):
            LocalHost().run(["sh", "-c", script], timeout_s=0.5)
        assert time.monotonic() - started < 10
        assert is_gone(int((tmp_path / "child").read_text()))
        assert is_gone(int((tmp_path / "parent").read_text()))

    def test_what_it_left_in_the_background_lives_on(self, tmp_path: Path) -> None:
        LocalHost().run(["sh", "-c", f"sleep 60 >/dev/null 2>&1 & echo $! >{tmp_path}/pid"], timeout_s=TIMEOUT_S)
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
        os.kill(pid, signal.SIGKILL)


def test_closing_ends_what_runs() -> None:
    host = LocalHost()
    threading.Timer(0.2, host.close).start()
    with pytest.raises(HostError, match="was closed"):
        host.run(["sleep", "60"], timeout_s=60)
    with pytest.raises(HostError, match="was closed"):
        host.run(["true"], timeout_s=TIMEOUT_S)


class TestForward:
    def test_loopback_needs_no_relay(self) -> None:
        with LocalHost().forward("127.0.0.1", 1234) as port:
            assert port == 1234

    def test_another_address_of_this_machine(self) -> None:
        with socket.create_server(("127.0.0.2", 0)) as listener:

            def echo() -> None:
                connection, _ = listener.accept()
                with connection:
                    while piece := connection.recv(4096):
                        connection.sendall(piece)

            thread = threading.Thread(target=echo, daemon=True)
            thread.start()
            with (
                LocalHost().forward("127.0.0.2", listener.getsockname()[1]) as port,
                socket.create_connection(("127.0.0.1", port), timeout=10) as stream,
            ):
                data = os.urandom(300_000)
                sender = threading.Thread(target=lambda: (stream.sendall(data), stream.shutdown(socket.SHUT_WR)))
                sender.start()
                received = b"".join(iter(lambda: stream.recv(65536), b""))
                sender.join(10)
            thread.join(10)
        assert received == data

    def test_nothing_listens_there(self) -> None:
        with socket.create_server(("127.0.0.2", 0)) as listener:
            unused = listener.getsockname()[1]
        with (
            LocalHost().forward("127.0.0.2", unused) as port,
            socket.create_connection(("127.0.0.1", port), timeout=10) as stream,
        ):
            stream.settimeout(10)
            assert stream.recv(1) == b""

    def test_open_connections_end_with_it(self) -> None:
        with socket.create_server(("127.0.0.2", 0)) as listener:
            with LocalHost().forward("127.0.0.2", listener.getsockname()[1]) as port:
                stream = socket.create_connection(("127.0.0.1", port), timeout=10)
                far, _ = listener.accept()
            with stream, far:
                stream.settimeout(10)
                far.settimeout(10)
                assert stream.recv(1) == b""
                assert far.recv(1) == b""
