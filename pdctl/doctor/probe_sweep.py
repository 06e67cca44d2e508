"""Many NIXL WRITEs of different sizes between two hosts, in one session of the probe: for ``pdctl bench fabric``.

What runs on the hosts is described in ``connector/pdctl_connector/probe_sweep.py``. Unlike the doctor's probe it
keeps no baseline, and pairs are to be measured one after another: side by side they share what lies between the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdctl.doctor import probe_transport
from pdctl.doctor.probe_plan import LIMITS_S, BlockShape, Pair
from pdctl.doctor.probe_script import probe_source
from pdctl.doctor.probe_session import ProbeFailed, ProbeSession
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan

POINT_BYTES = 256 << 20
"""Largest WRITE of a sweep: so much memory is registered on both hosts, or less where that is not free."""

_UNIT = 1 << 20
"""The memory that both hosts have is known in pieces of so many bytes."""
_SLOWEST_S = 5.0
"""A point is left out if one WRITE would take longer, judged by those before it."""
_RESERVE_S = 5.0
"""A point is left out if so much time, beside that of its WRITEs, is not left."""


@dataclass(frozen=True)
class SweepPoint:
    """One WRITE: ``descriptors`` of ``block_bytes`` each; a multiple of 8."""

    block_bytes: int
    descriptors: int

    @property
    def size(self) -> int:
        """Bytes of the WRITE."""
        return self.block_bytes * self.descriptors


@dataclass(frozen=True)
class MeasuredPoint:
    """What WRITEs of one point took, each until the writer saw it complete.

    Attributes:
        point: what was written.
        writes: how many were timed; one more was made before them.
        p50_s: median, seconds.
        p99_s: 99th percentile; of few WRITEs that is the slowest.
        min_s: the fastest.
        transport: as in :class:`pdctl.doctor.probe_facts.ProbeResult`.
        transport_evidence: how that is known.
    """

    point: SweepPoint
    writes: int
    p50_s: float
    p99_s: float
    min_s: float
    transport: str
    transport_evidence: str


@dataclass(frozen=True)
class SweepResult:
    """What one pair showed.

    Attributes:
        pair: prefill host, decode host.
        points: in the order measured. Every byte of them arrived as it was sent.
        left_out: points that were not measured, and why.
        ok: whether no step failed. Points may still be missing: left out, or interrupted.
        stage: ``done``, or the step that failed, as in :class:`pdctl.doctor.probe_facts.ProbeResult`.
        error: in words; empty when ok.
        unreachable: whether it failed because a host could not be reached or logged in to.
        interrupted: whether it was ended by Ctrl-C.
        backend: NIXL backend in use; empty if it never came to that.
        memory: ``cuda`` or ``host``: what was written from and to; empty if unknown.
        notification_s: round trip of a notification, median; None if not measured.
        notes: of both hosts, such as memory that is not free.
        log: the last lines of both, for evidence.
    """

    pair: Pair
    points: tuple[MeasuredPoint, ...]
    left_out: tuple[tuple[SweepPoint, str], ...]
    ok: bool
    stage: str
    error: str
    unreachable: bool
    interrupted: bool
    backend: str
    memory: str
    notification_s: float | None
    notes: tuple[str, ...]
    log: str


class Listener(Protocol):
    """Hears how a sweep goes on."""

    def stage(self, stage: str) -> None:
        """A step has begun that is no point."""

    def point(self, number: int, measured: MeasuredPoint) -> None:
        """The point of this number, from 1, was measured."""


def sweep(
    fleet: Fleet,
    plan: ClusterPlan,
    pair: Pair,
    points: Sequence[SweepPoint],
    *,
    repeats: int,
    timeout_s: float,
    listener: Listener,
) -> SweepResult:
    """Write every point from a prefill host into a decode host's memory and verify what arrived. Smaller ones first.

    Ctrl-C ends it early; what was measured by then is in the result, as after a failure.

    Args:
        fleet: the hosts.
        plan: what the instances would be started with; the first of each host is taken.
        pair: one host of each role.
        points: none larger than :data:`POINT_BYTES`.
        repeats: most WRITEs that are timed of each; fewer where they take long.
        timeout_s: how long all may take.
        listener: told of progress, in this thread.

    Raises:
        PdctlError: the probe is not part of this installation. What goes wrong on hosts is in the result.
    """
    writer = next(one for one in plan.prefill if one.host == pair[0])
    target = next(one for one in plan.decode if one.host == pair[1])
    largest = max(point.size for point in points)
    session = ProbeSession(
        fleet,
        plan,
        writer,
        target,
        BlockShape(1, _UNIT, known=True),
        probe_source(),
        timeout_s,
        memory_bytes=-(-largest // _UNIT) * _UNIT,
    )
    return _Sweep(session, pair, repeats, listener).run(
        sorted(points, key=lambda point: (point.size, point.block_bytes))
    )


class _Sweep:
    def __init__(self, session: ProbeSession, pair: Pair, repeats: int, listener: Listener) -> None:
        self._session = session
        self._pair = pair
        self._repeats = repeats
        self._listener = listener
        self._measured: list[MeasuredPoint] = []
        self._left_out: list[tuple[SweepPoint, str]] = []
        self._counters: dict[str, int] | None = None

    def run(self, points: Sequence[SweepPoint]) -> SweepResult:
        failed: ProbeFailed | None = None
        interrupted = False
        try:
            try:
                self._measure(points)
            except ProbeFailed as error:
                failed = error
            except KeyboardInterrupt:
                interrupted = True
            return self._result(failed, interrupted=interrupted, log=self._session.last_words())
        finally:
            self._session.close()

    def _measure(self, points: Sequence[SweepPoint]) -> None:
        session = self._session
        self._listener.stage("starting NIXL on both hosts")
        session.listen()
        session.connect()
        self._listener.stage("connected")
        session.ask(session.writer, {"do": "notify"}, "notified", LIMITS_S["notify"])
        room = _UNIT * min(session.events[f"{role} ready"]["blocks"] for role in ("writer", "target"))
        for number, point in enumerate(points, 1):
            reason = self._why_not(point, room)
            if reason:
                self._left_out.append((point, reason))
                continue
            self._measured.append(self._write(number, point))
            self._listener.point(number, self._measured[-1])

    def _why_not(self, point: SweepPoint, room: int) -> str:
        if point.size > room:
            return f"both hosts have room for {room >> 20} MiB only"
        fastest = max((one.point.size / one.p50_s for one in self._measured), default=None)
        expected_s = point.size / fastest if fastest else 0.0
        if expected_s > _SLOWEST_S:
            return f"one WRITE would take about {expected_s:.0f} s"
        # Two WRITEs at least; they are no faster than those of smaller points.
        if self._session.deadline.remaining_s < _RESERVE_S + 3 * expected_s:
            return "no time is left (--timeout)"
        return ""

    def _write(self, number: int, point: SweepPoint) -> MeasuredPoint:
        session = self._session
        what = {"number": number, "block_bytes": point.block_bytes, "descriptors": point.descriptors}
        made = session.ask(
            session.writer,
            {"do": "point", **what, "repeats": self._repeats},
            "point",
            LIMITS_S["write"],
            f"point {number}",
        )
        limit_s = LIMITS_S["notify"] + 2 * LIMITS_S["verify"]
        verify = {"do": "verify-point", **what, "notifications": made["writes"]}
        verified = session.ask(session.target, verify, "verified", limit_s, note=f"verified {number}")
        transport = self._transport(point, made, verified["counters"])
        return MeasuredPoint(
            point,
            writes=made["writes"] - 1,
            p50_s=made["p50_s"],
            p99_s=made["p99_s"],
            min_s=made["min_s"],
            transport=transport.name,
            transport_evidence=transport.evidence,
        )

    def _transport(
        self, point: SweepPoint, made: dict[str, Any], counters: dict[str, int]
    ) -> probe_transport.Transport:
        # What the target had counted before is known from its second point on.
        before, self._counters = self._counters, counters
        return probe_transport.judge(
            probe_transport.Evidence(
                backend=made["backend"],
                moved_bytes=point.size * made["writes"],
                lanes=self._session.writer.lanes,
                prefill=probe_transport.moved(made["before"], made["after"]),
                decode={} if before is None else probe_transport.moved(before, counters),
            )
        )

    def _result(self, failed: ProbeFailed | None, *, interrupted: bool, log: str) -> SweepResult:
        events = self._session.events
        ready = [events[key] for key in ("writer ready", "target ready") if key in events]
        kinds = {event["memory"] for event in ready}
        notified = events.get("notified")
        return SweepResult(
            self._pair,
            tuple(self._measured),
            tuple(self._left_out),
            ok=failed is None,
            stage=failed.stage if failed else "done",
            error=str(failed) if failed else "",
            unreachable=failed is not None and failed.unreachable,
            interrupted=interrupted,
            backend=ready[0]["backend"] if ready else "",
            memory="host" if "host" in kinds else next(iter(kinds), ""),
            notification_s=notified["p50_us"] / 1e6 if notified else None,
            notes=tuple(dict.fromkeys(note for event in ready for note in event.get("notes", ()))),
            log=log,
        )
