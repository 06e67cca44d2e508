"""Many WRITEs of different sizes in one session of the probe: what `pdctl bench fabric` makes.

The memory is registered once, and so large that the largest point fits. A point is a number of descriptors, all of one
size, that lie side by side on both hosts. The order on the target differs from that on the writer, so that NIXL, which
joins descriptors that are neighbours on both sides, has as many to write as were asked for. Messages beside those of
`probe`, with the same fields in both: `number` (of the point), `block_bytes` (of a descriptor, a multiple of 8),
`descriptors`:

    {"do": "point", ..., "repeats": n}  (writer)      point: writes, p50_s, p99_s, min_s, backend, before, after
    {"do": "verify-point", ..., "notifications": n}   (target)      verified: checked, counters

The first WRITE of a point sets up what UCX sets up late; it is made and verified, but not timed. Content differs from
point to point by the size of descriptors, and the target's memory is cleared after each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from . import probe_content as content
from . import probe_evidence as evidence
from .probe import Failure, Probe
from .probe import child as probe_child
from .probe_content import WORD, Findings, Layout, Pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from .probe_host import Memory

POINT_S = 2.0
"""A point has no more WRITEs when those so far took as long, if only one is timed."""
CHUNK_BYTES = 16 << 20
"""So much content is made or compared at once."""
MOST_REPEATS = 10_000


class Point(NamedTuple):
    """One WRITE, made several times.

    Attributes:
        number: of the point in the sweep; part of its notifications.
        block_bytes: bytes of each descriptor, a multiple of 8.
        descriptors: how many of them.
    """

    number: int
    block_bytes: int
    descriptors: int

    @classmethod
    def read(cls, message: dict[str, Any]) -> Point:
        """From a message, which has more in it.

        Raises:
            ValueError: it makes no sense.
        """
        point = cls(*(int(message[name]) for name in cls._fields))
        if point.block_bytes < WORD or point.block_bytes % WORD or point.descriptors < 1:
            raise ValueError(f"no point that can be written: {point}")
        return point

    @property
    def size(self) -> int:
        """Bytes of the WRITE."""
        return self.block_bytes * self.descriptors

    @property
    def phase(self) -> str:
        """What its notifications say."""
        return f"point-{self.number}"

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.descriptors} descriptors of {self.block_bytes} bytes"

    def mapping(self) -> list[int]:
        """For each local descriptor the remote one; no two neighbours follow one another on both sides."""
        if self.descriptors < 4:
            return list(reversed(range(self.descriptors)))
        return content.scattered(self.descriptors)

    def chunks(self) -> Iterator[range]:
        """The descriptors, few enough at once."""
        step = max(1, CHUNK_BYTES // self.block_bytes)
        for first in range(0, self.descriptors, step):
            yield range(first, min(first + step, self.descriptors))


def put_content(memory: Memory, pattern: Pattern, point: Point) -> None:
    """Make the content of a point on the writer."""
    for chunk in point.chunks():
        memory.put(chunk.start * point.block_bytes, pattern.pieces(0, chunk))


def wrong_content(memory: Memory, pattern: Pattern, point: Point) -> str:
    """What is wrong on the target, in words; empty if every byte is as it was sent."""
    expected = content.sources(point.mapping(), point.descriptors)
    for chunk in point.chunks():
        found = memory.get(chunk.start * point.block_bytes, len(chunk) * point.block_bytes).reshape(len(chunk), -1)
        if (found != pattern.pieces(0, [expected[number] for number in chunk])).any():
            findings = Findings(pattern, 1, expected)
            findings.look(0, memory.get(0, point.size).reshape(point.descriptors, -1))
            return findings.summary()
    return ""


class SweepProbe(Probe):
    """One side of the probe, which can also write points."""

    def _commands(self) -> dict[str, Callable[[dict[str, Any]], None]]:
        return {**super()._commands(), "point": self._write_point, "verify-point": self._verify_point}

    def _point(self, message: dict[str, Any]) -> Point:
        point = Point.read(message)
        for layout in (self._layout, self._theirs):
            room = layout.layers * layout.piece_bytes * layout.stride
            if point.size > room:
                raise ValueError(f"{point.text} do not fit into {room} registered bytes")
        return point

    def _write_point(self, message: dict[str, Any]) -> None:
        repeats = min(int(message["repeats"]), MOST_REPEATS)
        times: list[float] = []
        with self.step("write"):
            point = self._point(message)
            put_content(self._memory_or_fail(), Pattern(self.request.seed, 1, point.block_bytes), point)
            layout = Layout(1, point.block_bytes, point.descriptors)
            lists = self._prepare(layout, layout)
            self._lists += lists
            local, remote = list(range(point.descriptors)), point.mapping()
            before = evidence.read_counters()
            while len(times) < 2 or (len(times) <= repeats and sum(times) < POINT_S):
                what = f"WRITE {len(times) + 1} of {point.text}"
                times.append(self._write(local, remote, f"pdctl {point.phase} {len(times)}", what, lists))
            after = evidence.read_counters()
            for one in lists:
                self._agent.release_dlist_handle(one)
            del self._lists[-len(lists) :]
        self._say(
            {
                "event": "point",
                "number": point.number,
                "writes": len(times),
                "p50_s": content.percentile(times[1:], 0.5),
                "p99_s": content.percentile(times[1:], 0.99),
                "min_s": min(times[1:]),
                "backend": self._backend,
                "before": before,
                "after": after,
            }
        )

    def _verify_point(self, message: dict[str, Any]) -> None:
        with self.step("verify"):
            point = self._point(message)
        self._await_notifications(point.phase, message["notifications"])
        del self._seen[point.phase]
        counters = evidence.read_counters()
        with self.step("verify"):
            memory = self._memory_or_fail()
            wrong = wrong_content(memory, Pattern(self.request.seed, 1, point.block_bytes), point)
            if wrong:
                raise Failure("verify", f"{point.text}: {wrong}")
            memory.fill(point.size)
        self._say({"event": "verified", "number": point.number, "checked": point.descriptors, "counters": counters})


def child(stream: BinaryIO) -> NoReturn:
    """One side of the probe, in the process that loads NIXL."""
    probe_child(stream, SweepProbe)
