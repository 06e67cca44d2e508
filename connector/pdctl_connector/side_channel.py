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

    A port that cannot be bound is logged and ends this at once: vLLM waits for ``ready`` without a limit, so that is
    set all the same, as the last thing.

    Args:
        encoded: handshake payload by (pipeline rank, tensor rank). vLLM 0.33 may change it while this runs.
        ready: set when the socket is bound, or cannot be.
        stop: ends the loop.
        host: address to bind.
        port: port to bind.
    """
    context = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as listener:
            listener.setsockopt(zmq.RCVTIMEO, RECEIVE_MS)
            listener.setsockopt(zmq.LINGER, 0)
            listener.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            listener.setsockopt(zmq.IPV6, ":" in host)
            try:
                listener.bind(_address(host, port))
            except zmq.ZMQError as error:
                # In the words that pdctl's diagnosis looks for, as upstream's traceback has them.
                logger.error("the side channel cannot listen on %s port %d: ZMQError: %s", host, port, error)
                return
            ready.set()
            _answer_all(listener, encoded, stop)
    finally:
        context.destroy(linger=0)
        ready.set()


def _answer_all(listener: zmq.Socket[bytes], encoded: dict[tuple[int, int], bytes], stop: threading.Event) -> None:
    bad = 0
    while not stop.is_set():
        try:
            frames = listener.recv_multipart()
        except zmq.Again:
            continue
        except zmq.ZMQError as error:
            # Not seen so far: whatever it is, later handshakes may work, and this must not take a core meanwhile.
            logger.warning("side channel: %s", error)
            stop.wait(RECEIVE_MS / 1000)
            continue
        try:
            identity, answer = _answer(frames, encoded)
            # The other side estimates the difference of the clocks with it.
            listener.send_multipart([identity, b"", answer, msgspec.msgpack.encode(time.perf_counter())])
        except Exception as error:
            bad += 1
            if bad in (1, 10, 100) or bad % 1000 == 0:
                logger.warning("side channel: dropped %d bad requests; the latest: %s", bad, error)


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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
            asker.setsockopt(zmq.IPV6, ":" in host)
            asker.connect(_address(host, port))
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
