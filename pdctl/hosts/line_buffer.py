"""Output of a running command that is taken line by line, and the end of its standard error."""

from __future__ import annotations

from pdctl.hosts.base import LINE_LIMIT_BYTES, STDERR_KEPT_BYTES


class LineTooLong(Exception):
    """A line is longer than :data:`~pdctl.hosts.base.LINE_LIMIT_BYTES`."""


class LineBuffer:
    """Bytes in, lines out."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._searched = 0

    def feed(self, piece: bytes) -> None:
        """Add what has arrived."""
        self._bytes += piece

    def take(self) -> bytes | None:
        """The next whole line without its line break, or None.

        Raises:
            LineTooLong: there is none, and too much for one.
        """
        end = self._bytes.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._bytes)
            if self._searched > LINE_LIMIT_BYTES:
                raise LineTooLong
            return None
        line = bytes(self._bytes[:end])
        del self._bytes[: end + 1]
        self._searched = 0
        return line

    def rest(self) -> bytes | None:
        """What is left when no more will come: a line whose break is missing, or None."""
        rest = bytes(self._bytes)
        self._bytes.clear()
        self._searched = 0
        return rest or None


class Tail:
    """The end of an output."""

    def __init__(self, kept: int = STDERR_KEPT_BYTES) -> None:
        self._kept = kept
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> None:
        """Add what has arrived."""
        self._bytes += piece
        if len(self._bytes) > 2 * self._kept:
            del self._bytes[: -self._kept]

    def __bytes__(self) -> bytes:
        return bytes(self._bytes[-self._kept :])
