"""The script that opens planned ports: its parts, on loopback."""

from __future__ import annotations

import ast
import io
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdctl.node import ports
from pdctl.node.ports import Attempt

NONCE = "c0ffee"


@contextmanager
def listening(serve=None) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            taken.append(connection)
            if serve is not None:
                serve(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)
    for connection in taken:
        connection.close()


def attempt(port: int, nonce: str | None = NONCE, *, mtu: bool = False, timeout_s: float = 5) -> dict:
    return ports.attempt(Attempt("x", "127.0.0.1", port, nonce, mtu), timeout_s)


class TestListening:
    def test_it_greets_and_acknowledges(self) -> None:
        opened = ports.open_listeners(
            {"listeners": [{"id": "a", "address": "127.0.0.1", "port": 0, "ours": False}], "nonce": NONCE}
        )
        found = attempt(opened["a"]["port"], mtu=True)
        assert (found["outcome"], found["detail"]) == ("open", "")
        assert found["connect_ms"] >= 0
        assert found["mtu"]["detail"] == ""
        assert 576 <= found["mtu"]["path_mtu"] <= found["mtu"]["interface_mtu"] + 1

    def test_why_it_cannot(self) -> None:
        with listening() as taken:
            wanted = [
                {"id": "taken", "address": "127.0.0.1", "port": taken, "ours": False},
                {"id": "ours", "address": "127.0.0.1", "port": taken, "ours": True},
                {"id": "far", "address": "192.0.2.1", "port": 0, "ours": False},
                {"id": "nowhere", "address": "no-such-host.invalid", "port": 0, "ours": False},
            ]
            opened = ports.open_listeners({"listeners": wanted, "nonce": NONCE})
        assert opened["taken"] == {"error": "in-use", "detail": f"another process holds port {taken}"}
        assert opened["ours"] == {"port": taken}
        assert opened["far"]["error"] == "not-local"
        assert opened["nowhere"]["error"] == "no-address"

    def test_junk_does_not_end_it(self) -> None:
        listener = ports.listen("127.0.0.1", 0)
        threading.Thread(target=ports.serve, args=(listener, NONCE), daemon=True).start()
        port = listener.getsockname()[1]
        for junk in (b"", b"\n", b"minus one\n", b"-5\n", b"9" * 300):
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(junk)
        assert attempt(port)["outcome"] == "open"


class TestConnecting:
    def test_nobody_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        assert attempt(port)["outcome"] == "refused"

    def test_a_held_port_is_only_connected_to(self) -> None:
        with listening() as port:
            assert attempt(port, None)["outcome"] == "open"

    @pytest.mark.parametrize(
        ("said", "detail"),
        [
            (b"HTTP/1.1 400 Bad Request\r\n", "something else answered there"),
            (b"PDCTL-PORT-1 another\n", "another host of this cluster answered at this address"),
            (b"\xff" * 400, "something else answered there"),
        ],
    )
    def test_somebody_else_answers(self, said: bytes, detail: str) -> None:
        with listening(lambda connection: connection.sendall(said)) as port:
            found = attempt(port)
        assert (found["outcome"], found["detail"]) == ("wrong-peer", detail)

    def test_somebody_takes_the_connection_and_is_silent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ports, "ANSWER_S", 0.05)
        with listening() as port:
            found = attempt(port)
        assert found["outcome"] == "wrong-peer"
        assert "never saw it" in found["detail"]

    def test_a_reset(self) -> None:
        def reset(connection: socket.socket) -> None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

        with listening(reset) as port:
            found = attempt(port)
        assert (found["outcome"], "reset" in found["detail"]) == ("refused", True)

    def test_errors_in_words(self) -> None:
        assert ports.connect_error(TimeoutError(), 3)["outcome"] == "timeout"
        assert "3 s" in ports.connect_error(TimeoutError(), 3)["detail"]
        assert ports.connect_error(ConnectionResetError(104, "Connection reset by peer"), 3)["outcome"] == "refused"
        assert ports.connect_error(OSError(113, "No route to host"), 3)["detail"] == "No route to host"
        assert ports.connect_error(socket.gaierror(-2, "Name or service not known"), 3)["outcome"] == "unreachable"

    def test_many_side_by_side(self) -> None:
        listener = ports.listen("127.0.0.1", 0)
        threading.Thread(target=ports.serve, args=(listener, NONCE), daemon=True).start()
        port = listener.getsockname()[1]
        wanted = [Attempt(str(number), "127.0.0.1", port, NONCE, False) for number in range(300)]
        results = ports.run_attempts(wanted, 10)
        assert {one["outcome"] for one in results.values()} == {"open"}
        assert len(results) == 300
        assert ports.run_attempts([], 1) == {}


class TestSizes:
    """A listener that swallows large segments stands for a path that does."""

    def serve(self, limit: int):
        def one(connection: socket.socket) -> None:
            def work() -> None:
                connection.sendall((ports.GREETING + NONCE + "\n").encode())
                try:
                    line = ports.read_line(connection)
                    if int(line) // ports.SEGMENTS > limit:
                        return
                    missing = int(line)
                    while missing:
                        missing -= len(connection.recv(missing))
                    connection.sendall(line + b"\n")
                except (OSError, ValueError):
                    return

            threading.Thread(target=work, daemon=True).start()

        return one

    def test_the_largest_size_that_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ports, "SEGMENTS_S", 0.3)
        with listening(self.serve(1400)) as port:
            found = attempt(port, mtu=True)["mtu"]
        assert found["path_mtu"] == 1400
        assert found["interface_mtu"] > 1400
        assert "do not arrive, and no router says so; those of 1400 bytes do" in found["detail"]

    def test_none_passes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ports, "SEGMENTS_S", 0.1)
        with listening(self.serve(10)) as port:
            found = attempt(port, mtu=True)["mtu"]
        assert found["path_mtu"] is None
        assert "no smaller size was found that does" in found["detail"]

    def test_the_interface_of_an_address(self) -> None:
        assert ports.interface_of("127.0.0.1", socket.AF_INET) == "lo"
        assert ports.interface_of("192.0.2.77", socket.AF_INET) == ""


def test_the_conversation_ends_with_its_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(ports.os, "_exit", codes.append)
    monkeypatch.setattr(ports.signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(ports.signal, "signal", lambda *_: None)
    listen = {"do": "listen", "listeners": [], "nonce": NONCE, "lifetime_s": 9}
    connect = {"do": "connect", "attempts": [], "timeout_s": 1}
    ports.main(io.BytesIO(b"".join(json.dumps(one).encode() + b"\n" for one in (listen, connect))))
    said = [json.loads(line[len(ports.PREFIX) :]) for line in capsys.readouterr().out.splitlines()]
    assert [next(iter(one)) for one in said] == ["listeners", "attempts"]
    assert codes == [0]


def test_it_is_written_for_python_3_8() -> None:
    ast.parse(Path(ports.__file__).read_text(), feature_version=(3, 8))
