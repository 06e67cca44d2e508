"""A port of this machine that leads somewhere else: accepts connections and relays what passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

_PIECE_BYTES = 64 * 1024


class Stream(Protocol):
    """The far end: a socket, or what behaves like one."""

    def recv(self, size: int, /) -> bytes:
        """Read some bytes; none at the end."""

    def sendall(self, data: bytes, /) -> object:
        """Send all bytes."""

    def shutdown(self, how: int, /) -> object:
        """End one direction, as sockets do."""

    def close(self) -> object:
        """End both directions."""


@contextmanager
def forwarded(dial: Callable[[], Stream]) -> Iterator[int]:
    """Listen on a free port of 127.0.0.1 and yield its number.

    Args:
        dial: opens a connection to the far end; called once for each one accepted. If it raises, the accepted
            connection is closed, as if the far end had refused it.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    relays = _Relays()
    acceptor = threading.Thread(target=_accept, args=(listener, dial, relays), name="forward", daemon=True)
    acceptor.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        # shutdown() wakes accept(); close() alone does not.
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        relays.close()


class _Relays:
    """Connections that are open, so that they end with the forwarding."""

    def __init__(self) -> None:
        self._open: set[Stream] = set()
        self._closed = False
        self._lock = threading.Lock()

    def add(self, stream: Stream) -> None:
        with self._lock:
            if not self._closed:
                self._open.add(stream)
                return
        _close(stream)

    def remove(self, stream: Stream) -> None:
        with self._lock:
            self._open.discard(stream)
        _close(stream)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._open)
            self._open.clear()
        for stream in streams:
            # A thread may be waiting in recv() of a socket: closing it does not wake that up.
            _end(stream, socket.SHUT_RDWR)
            _close(stream)


def _accept(listener: socket.socket, dial: Callable[[], Stream], relays: _Relays) -> None:
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        relays.add(near)
        threading.Thread(target=_relay, args=(near, dial, relays), name="forward", daemon=True).start()


def _relay(near: socket.socket, dial: Callable[[], Stream], relays: _Relays) -> None:
    try:
        far = dial()
    except Exception:
        # Whoever connected sees a closed connection; there is nobody else to tell.
        relays.remove(near)
        return
    relays.add(far)
    back = threading.Thread(target=_pump, args=(far, near), name="forward", daemon=True)
    back.start()
    _pump(near, far)
    back.join()
    relays.remove(near)
    relays.remove(far)


def _pump(source: Stream, target: Stream) -> None:
    """Pass on bytes until the source ends, and then its end."""
    try:
        while piece := source.recv(_PIECE_BYTES):
            target.sendall(piece)
    except (OSError, EOFError):
        # The connection broke: neither direction goes on.
        _end(source, socket.SHUT_RDWR)
        _end(target, socket.SHUT_RDWR)
    else:
        _end(target, socket.SHUT_WR)


def _end(stream: Stream, how: int) -> None:
    with suppress(OSError, EOFError):
        stream.shutdown(how)


def _close(stream: Stream) -> None:
    with suppress(OSError, EOFError):
        stream.close()
