"""The side channel: handshakes, whatever else arrives, and who answers at an address."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from pdctl_connector import side_channel

from pdctl.lifecycle.diagnose import diagnose

HOST = "127.0.0.1"
ENGINE = "engine-a"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at ``stop`` often, so that tests end soon."""
    monkeypatch.setattr(side_channel, "RECEIVE_MS", 20)


def payload(engine_id: str, **more: Any) -> bytes:
    """A handshake payload as upstream encodes it, with less inside."""
    metadata = msgspec.msgpack.encode({"engine_id": engine_id, "num_blocks": 7})
    return msgspec.msgpack.encode({"compatibility_hash": "h", "agent_metadata_bytes": metadata, **more})


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


class Served:
    def __init__(self, encoded: dict[tuple[int, int], bytes]) -> None:
        self.encoded = encoded
        self.port = free_port()
        self.stop = threading.Event()
        self.ready = threading.Event()
        self.thread = threading.Thread(
            target=side_channel.serve, args=(encoded, self.ready, self.stop, HOST, self.port), daemon=True
        )
        self.thread.start()
        assert self.ready.wait(10)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served({(0, 0): payload(ENGINE), (1, 3): payload(ENGINE, rank=3)})
    yield server
    server.end()


@contextmanager
def asker(port: int, kind: int = zmq.REQ, timeout_ms: int = 5000) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    try:
        with context.socket(kind) as sock:
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.RCVTIMEO, timeout_ms)
            sock.connect(f"tcp://{HOST}:{port}")
            yield sock
    finally:
        context.destroy(linger=0)


def handshake(port: int, pp_rank: int = 0, tp_rank: int = 0) -> list[bytes]:
    """What upstream's ``_nixl_handshake`` sends and receives."""
    with asker(port) as sock:
        sock.send(msgspec.msgpack.encode((b"get_meta_msg", pp_rank, tp_rank)))
        return sock.recv_multipart()


def test_a_handshake_gets_the_rank_it_asks_for_and_the_clock(served: Served) -> None:
    before = time.perf_counter()
    answer = handshake(served.port, 1, 3)
    assert answer[0] == served.encoded[1, 3]
    assert before <= msgspec.msgpack.decode(answer[1]) <= time.perf_counter()
    assert len(answer) == 2


def test_one_connection_may_ask_for_several_ranks(served: Served) -> None:
    with asker(served.port) as sock:
        for rank in served.encoded:
            sock.send(msgspec.msgpack.encode((b"get_meta_msg", *rank)))
            assert sock.recv_multipart()[0] == served.encoded[rank]


def test_a_payload_that_changes_is_served_as_it_is_now(served: Served) -> None:
    served.encoded[0, 0] = payload("engine-b")
    assert side_channel.engine_in(handshake(served.port)[0]) == "engine-b"


GARBAGE: dict[str, list[bytes]] = {
    "no frames to speak of": [b""],
    "one frame": [b"garbage"],
    "no delimiter": [b"x", msgspec.msgpack.encode((b"get_meta_msg", 0, 0))],
    "too many frames": [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 0)), b"more"],
    "not msgpack": [b"", b"\xc1\xff\x00"],
    "a truncated array": [b"", b"\x93\xc4"],
    "another type": [b"", msgspec.msgpack.encode({"a": 1})],
    "another word": [b"", msgspec.msgpack.encode((b"get_all", 0, 0))],
    "text for bytes": [b"", msgspec.msgpack.encode(("get_meta_msg", "0", 0))],
    "an unknown rank": [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 9))],
    "a negative rank": [b"", msgspec.msgpack.encode((b"get_meta_msg", -1, 0))],
    "a huge rank": [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 2**63))],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_gets_no_answer_and_the_next_handshake_works(served: Served, frames: list[bytes]) -> None:
    with asker(served.port, zmq.DEALER, 5000) as sock:
        sock.send_multipart(frames)
        # The same connection: answers come in order, so the first one is for the good request.
        sock.send_multipart([b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 0))])
        assert sock.recv_multipart()[1] == served.encoded[0, 0]
    assert handshake(served.port)[0] == served.encoded[0, 0]


def test_an_oversized_request_costs_its_connection_and_nothing_else(served: Served) -> None:
    with asker(served.port, zmq.DEALER) as sock:
        sock.send_multipart([b"", b"x" * (side_channel.MAX_REQUEST_BYTES + 1)])
        assert handshake(served.port)[0] == served.encoded[0, 0]
    with socket.create_connection((HOST, served.port), timeout=5) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(4096))
        assert handshake(served.port)[0] == served.encoded[0, 0]


def test_a_flood_of_garbage_is_a_few_lines_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="vllm")
    with asker(served.port, zmq.DEALER) as sock:
        for _ in range(150):
            sock.send_multipart([b"", b"garbage"])
        sock.send_multipart([b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 0))])
        sock.recv_multipart()
    assert [record.args[0] for record in caplog.records] == [1, 10, 100]


def test_stop_ends_it_and_frees_the_port(served: Served) -> None:
    served.end()
    with socket.create_server((HOST, served.port)):
        pass


def test_a_taken_port_is_told_and_does_not_hang_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server((HOST, 0)) as taken:
        ready = threading.Event()
        port = taken.getsockname()[1]
        side_channel.serve({}, ready, threading.Event(), HOST, port)
    assert ready.is_set()
    assert f"cannot listen on {HOST} port {port}" in caplog.text
    log = f"(Worker pid=7) ERROR 11-29 18:31:25 [side_channel.py:59] {caplog.messages[0]}\n"
    assert [found.id for found in diagnose(log, exit_code=1, exit_signal=None)] == ["side-channel-port-in-use"]


# --- who is there -----------------------------------------------------------------------------------------------------


def test_the_engine_itself_or_another_one(served: Served) -> None:
    assert side_channel.presence(HOST, served.port, ENGINE, 5) == "same"
    assert side_channel.presence(HOST, served.port, "engine-b", 5) == "replaced"


def test_a_closed_port_is_refused() -> None:
    assert side_channel.presence(HOST, free_port(), ENGINE, 5) == "refused"


def test_something_that_does_not_answer_is_silent_within_bounds() -> None:
    # It listens and never accepts, like a stopped process.
    with socket.create_server((HOST, 0)) as listener:
        begun = time.monotonic()
        assert side_channel.presence(HOST, listener.getsockname()[1], ENGINE, 0.2) == "silent"
        assert time.monotonic() - begun < 10


def test_another_program_on_the_port_is_silent() -> None:
    with socket.create_server((HOST, 0)) as listener:

        def serve_http() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                    connection.close()
            except OSError:
                return

        threading.Thread(target=serve_http, daemon=True).start()
        assert side_channel.presence(HOST, listener.getsockname()[1], ENGINE, 0.3) == "silent"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_name_that_does_not_resolve_is_silent() -> None:
    assert side_channel.presence("no-such-host.invalid", 5600, ENGINE, 0.2) == "silent"


def test_an_answer_without_an_engine_id_is_silent() -> None:
    server = Served({(0, 0): b"\xc0"})
    try:
        assert side_channel.presence(HOST, server.port, ENGINE, 5) == "silent"
    finally:
        server.end()


@pytest.mark.parametrize(
    "data",
    [
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode({"agent_metadata_bytes": "text"}),
        msgspec.msgpack.encode({"agent_metadata_bytes": msgspec.msgpack.encode([1])}),
        msgspec.msgpack.encode({"agent_metadata_bytes": msgspec.msgpack.encode({"engine_id": 7})}),
    ],
)
def test_a_payload_without_an_engine_id_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="no engine id"):
        side_channel.engine_in(data)
