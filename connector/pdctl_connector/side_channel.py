"""The side channel: the ZeroMQ socket over which engines show each other their NIXL memory. Ours survives bad input."""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any, Final, Literal

import msgspec
import zmq

logger = logging.getLogger("vllm.pdctl_connector.side_channel")

Presence = Literal["same", "replaced", "refused", "silent"]
"""What answers on an engine's side channel: itself, another engine, nothing (the port is closed), or no answer."""

GET_METADATA: Final = b"get_meta_msg"
MAX_REQUEST_BYTES: Final = 1024
RECEIVE_MS: Final = 500


def serve(
    encoded: dict[tuple[int, int], bytes],
    ready: threading.Event,
    stop: threading.Event,
    host: str,
    port: int,
) -> None:
    """Answer handshakes until ``stop``. A request that makes no sense is dropped and counted, never fatal.

    Args:
        encoded: handshake payload by (pipeline rank, tensor rank).
        ready: set when the socket is bound.
        stop: ends the loop.
        host: address to bind.
        port: port to bind.
    """
    context = zmq.Context()
    bad = 0
    try:
        with context.socket(zmq.ROUTER) as listener:
            listener.setsockopt(zmq.RCVTIMEO, RECEIVE_MS)
            listener.setsockopt(zmq.LINGER, 0)
            listener.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            if ":" in host:
                listener.setsockopt(zmq.IPV6, 1)
            listener.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            ready.set()
            while not stop.is_set():
                try:
                    frames = listener.recv_multipart()
                except zmq.Again:
                    continue
                try:
                    identity, answer = _answer(frames, encoded)
                    listener.send_multipart([identity, b"", answer, msgspec.msgpack.encode(time.perf_counter())])
                except Exception as error:
                    bad += 1
                    if bad in (1, 10, 100) or bad % 1000 == 0:
                        logger.warning("side channel: dropped %d bad requests; the latest: %s", bad, error)
    finally:
        context.destroy(linger=0)


def _answer(frames: list[bytes], encoded: dict[tuple[int, int], bytes]) -> tuple[bytes, bytes]:
    if len(frames) != 3 or frames[1] != b"":
        raise ValueError(f"{len(frames)} frames")
    request = msgspec.msgpack.decode(frames[2], type=tuple[bytes, int, int])
    if request[0] != GET_METADATA:
        raise ValueError("not a handshake request")
    payload = encoded.get((request[1], request[2]))
    if payload is None:
        raise ValueError(f"no rank {request[1:]}")
    return frames[0], payload


def presence(host: str, port: int, engine_id: str, timeout_s: float) -> Presence:
    """Ask who answers on a side channel. Waits at most about twice ``timeout_s``; never raises."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
    context = zmq.Context()
    try:
        with context.socket(zmq.REQ) as asker:
            asker.setsockopt(zmq.LINGER, 0)
            asker.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
            asker.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
            if ":" in host:
                asker.setsockopt(zmq.IPV6, 1)
            asker.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            asker.send(msgspec.msgpack.encode((GET_METADATA, 0, 0)))
            frames = asker.recv_multipart()
            return "same" if engine_in(frames[0]) == engine_id else "replaced"
    except Exception:
        return "silent"
    finally:
        context.destroy(linger=0)


def engine_in(payload: bytes) -> str:
    """The engine id inside a handshake payload.

    Raises:
        ValueError: there is none.
    """
    outer: Any = msgspec.msgpack.decode(payload)
    inner = outer.get("agent_metadata_bytes") if isinstance(outer, dict) else None
    metadata = msgspec.msgpack.decode(inner) if isinstance(inner, bytes) else None
    engine = metadata.get("engine_id") if isinstance(metadata, dict) else None
    if not isinstance(engine, str):
        raise ValueError("no engine id in the handshake payload")
    return engine
