"""The transfer ledger: what every KV transfer of this rank is doing, and since when.

One record per transfer and side. A record moves forward through its side's stages and ends in an outcome; a move that
the table does not allow changes nothing, is counted and is logged once per kind. The ledger only watches: nothing of
the transfer itself depends on it, and no call of it raises because of what it is told.

Every call takes one lock for some microseconds; listings take it for a few records at a time. Times are monotonic
seconds of this process, so between hosts only the differences and ``started_unix`` mean anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

logger = logging.getLogger("vllm.pdctl_connector.ledger")

Side = Literal["decode", "prefill"]
Stage = Literal["allocated", "registered", "prefilling", "ready", "matched", "posted"]
Outcome = Literal["received", "completed", "failed", "timed_out", "aborted", "expired", "cancelled"]
Observer = Callable[[Side, Stage, float], None]
"""Called with the seconds a record spent in a stage when it leaves that stage, outside the lock."""

STAGES: Final[Mapping[Side, tuple[Stage, ...]]] = {
    "decode": ("allocated", "registered"),
    "prefill": ("prefilling", "ready", "matched", "posted"),
}
"""The stages of each side, in order."""

OUTCOMES: Final[Mapping[Side, tuple[Outcome, ...]]] = {
    "decode": ("received", "failed", "timed_out", "aborted"),
    "prefill": ("completed", "failed", "expired", "cancelled"),
}
"""The outcomes of each side."""

ALLOWED: Final[Mapping[tuple[Side, Stage], frozenset[Stage | Outcome]]] = {
    ("decode", "allocated"): frozenset({"registered", "failed", "timed_out", "aborted"}),
    ("decode", "registered"): frozenset({"received", "failed", "timed_out", "aborted"}),
    ("prefill", "prefilling"): frozenset({"ready", "failed", "expired", "cancelled"}),
    ("prefill", "ready"): frozenset({"matched", "failed", "expired", "cancelled"}),
    # Completed without a WRITE: decode had the whole prompt already.
    ("prefill", "matched"): frozenset({"posted", "completed", "failed", "expired", "cancelled"}),
    # Not expired: a lease never ends a WRITE that is posted, since its source blocks are still being read.
    ("prefill", "posted"): frozenset({"completed", "failed", "cancelled"}),
}
"""Where a record may go from each stage."""

FIRST_STAGES: Final[Mapping[Side, frozenset[Stage]]] = {
    "decode": frozenset({"allocated"}),
    # Ready at once: a request that was prefilled within one step.
    "prefill": frozenset({"prefilling", "ready"}),
}
"""Where a record may begin."""

Verdict = Literal["moved", "repeated", "illegal", "unknown", "full"]
"""What became of a call: done; already so; not allowed from there; no such record; no room for another record."""

REASON_LIMIT: Final = 256
_LISTED_PER_LOCK: Final = 32


class Record:
    """One transfer, seen from one side. Changed by the ledger alone, under its lock."""

    __slots__ = (
        "attempt",
        "blocks",
        "bytes",
        "descriptors",
        "key",
        "outcome",
        "peer",
        "reason",
        "request_id",
        "side",
        "stage",
        "started_unix",
        "times",
        "tokens",
        "writers",
    )

    def __init__(self, side: Side, key: str, attempt: int, stage: Stage, now: float, started_unix: float) -> None:
        self.side = side
        self.key = key
        self.attempt = attempt
        self.stage = stage
        self.outcome: Outcome | None = None
        self.reason = ""
        self.request_id = ""
        self.peer = ""
        self.started_unix = started_unix
        self.times: dict[str, float] = {stage: now}
        self.tokens = self.blocks = self.descriptors = self.bytes = self.writers = 0

    def as_dict(self, now: float) -> dict[str, Any]:
        """The record for JSON; see docs/protocol.md."""
        moments = list(self.times.values())
        until = moments[-1] if self.outcome else now
        return {
            "side": self.side,
            "key": self.key,
            "attempt": self.attempt,
            "stage": self.stage,
            "outcome": self.outcome,
            "reason": self.reason,
            "request_id": self.request_id,
            "peer": self.peer,
            "started_unix": round(self.started_unix, 6),
            "age_s": round(until - moments[0], 6),
            "stage_age_s": round(until - self.times[self.stage], 6),
            "stages": {name: round(moment - moments[0], 6) for name, moment in self.times.items()},
            "tokens": self.tokens,
            "blocks": self.blocks,
            "descriptors": self.descriptors,
            "bytes": self.bytes,
            "writers": self.writers,
        }


class Counts(NamedTuple):
    """Totals since start, and what is in flight now. Keys of the mappings are named in each field's comment."""

    inflight: dict[tuple[Side, Stage], int]  # every stage of both sides, zeros included
    oldest_s: dict[tuple[Side, Stage], float]  # seconds in the stage of the record that is longest in it; 0 if none is
    outcomes: dict[tuple[Side, Outcome], int]  # every outcome of both sides, zeros included
    illegal: dict[tuple[str, str, str], int]  # side, from, to
    repeated: int
    unknown: int
    full: int
    observer_errors: int


class Ledger:
    """The records of one rank. Safe for any number of threads.

    Args:
        inflight_limit: no more records than this are in flight; further transfers are counted, not recorded.
        recent_limit: how many ended records are kept.
        observer: receives the time spent in each stage; what it raises is counted and logged once.
        clock: monotonic seconds.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        *,
        inflight_limit: int = 10_000,
        recent_limit: int = 1_000,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._inflight_limit = inflight_limit
        self._observer = observer
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._inflight: dict[tuple[Side, str, int], Record] = {}
        # The same records by stage, in order of arrival there, so that the first is the oldest.
        self._by_stage: dict[tuple[Side, Stage], dict[tuple[Side, str, int], Record]] = {
            (side, stage): {} for side, stages in STAGES.items() for stage in stages
        }
        self._recent: deque[Record] = deque()
        self._recent_limit = recent_limit
        self._recent_by_id: dict[tuple[Side, str, int], Record] = {}
        self._outcomes: Counter[tuple[Side, Outcome]] = Counter(
            {(side, outcome): 0 for side, outcomes in OUTCOMES.items() for outcome in outcomes}
        )
        self._illegal: Counter[tuple[str, str, str]] = Counter()
        self._totals: Counter[str] = Counter()

    def open(
        self, side: Side, key: str, attempt: int, stage: Stage, *, request_id: str = "", peer: str = "", tokens: int = 0
    ) -> Verdict:
        """Begin a record. An ended record with the same identity stays in the recent ones, and a new one begins.

        Args:
            side: which side of the transfer this process is.
            key: what both sides and the router call the transfer (`wire.transfer_key`).
            attempt: the decode side's count of its tries for this key.
            stage: one of `FIRST_STAGES`.
            request_id: vLLM's own id of the request here.
            peer: the other side's engine id, if it is known already.
            tokens: prompt tokens to transfer.
        """
        identity = (side, key, attempt)
        with self._lock:
            if identity in self._inflight:
                self._totals["repeated"] += 1
                return "repeated"
            if stage not in FIRST_STAGES.get(side, ()):
                return self._refuse(side, "", stage)
            if len(self._inflight) >= self._inflight_limit:
                if not self._totals["full"]:
                    logger.warning(
                        "transfer ledger: %d transfers in flight, no more are recorded", self._inflight_limit
                    )
                self._totals["full"] += 1
                return "full"
            record = Record(side, key, attempt, stage, self._clock(), self._wall_clock())
            record.request_id = request_id
            record.peer = peer
            record.tokens = tokens
            self._inflight[identity] = self._by_stage[side, stage][identity] = record
        return "moved"

    def advance(
        self, side: Side, key: str, attempt: int, stage: Stage | Outcome, *, reason: str = "", peer: str = ""
    ) -> Verdict:
        """Move a record to a later stage, or end it with an outcome.

        Args:
            side: as in `open`.
            key: as in `open`.
            attempt: as in `open`.
            stage: where to; see `ALLOWED`.
            reason: why it ended so, for people; cut at `REASON_LIMIT` characters.
            peer: the other side's engine id, if it became known now.
        """
        identity = (side, key, attempt)
        with self._lock:
            record = self._inflight.get(identity)
            if record is None:
                return self._not_in_flight(identity, stage)
            left = record.stage
            if stage == left:
                self._totals["repeated"] += 1
                return "repeated"
            if stage not in ALLOWED[side, left]:
                return self._refuse(side, left, stage)
            now = self._clock()
            spent = now - record.times[left]
            record.times[stage] = now
            if peer:
                record.peer = peer
            del self._by_stage[side, left][identity]
            if (side, stage) in self._by_stage:
                record.stage = stage  # type: ignore[assignment]  # a stage, since it is a key of _by_stage
                self._by_stage[side, record.stage][identity] = record
            else:
                record.reason = reason[:REASON_LIMIT]
                self._end(identity, record, stage)  # type: ignore[arg-type]  # an outcome, since it is no stage
        self._observe(side, left, spent)
        return "moved"

    def note(
        self,
        side: Side,
        key: str,
        attempt: int,
        *,
        blocks: int = 0,
        descriptors: int = 0,
        bytes: int = 0,
        writers: int | None = None,
    ) -> Verdict:
        """Add to a record's counts of blocks, descriptors and bytes, or set its number of writers. Moves nothing."""
        with self._lock:
            record = self._inflight.get((side, key, attempt))
            if record is None:
                self._totals["unknown"] += 1
                return "unknown"
            record.blocks += blocks
            record.descriptors += descriptors
            record.bytes += bytes
            if writers is not None:
                record.writers = writers
        return "moved"

    def stage(self, side: Side, key: str, attempt: int) -> Stage | Outcome | None:
        """Where a record is: its stage, its outcome if it is one of the recent ones, or None."""
        identity = (side, key, attempt)
        with self._lock:
            record = self._inflight.get(identity) or self._recent_by_id.get(identity)
            return None if record is None else record.outcome or record.stage

    def inflight(self, *, side: Side | None = None, limit: int | None = None) -> list[dict[str, Any]]:
        """The records in flight, oldest first. One that ends while they are listed shows its outcome."""
        with self._lock:
            records = list(self._inflight.values())
        return self._listed(records, side, limit)

    def recent(self, *, side: Side | None = None, limit: int | None = None) -> list[dict[str, Any]]:
        """The ended records that are still kept, latest first."""
        with self._lock:
            records = list(self._recent)
        return self._listed(records[::-1], side, limit)

    def counts(self) -> Counts:
        """Totals and gauges; does not walk the records."""
        with self._lock:
            now = self._clock()
            oldest = {}
            for at, records in self._by_stage.items():
                first = next(iter(records.values()), None)
                oldest[at] = now - first.times[at[1]] if first else 0.0
            return Counts(
                inflight={at: len(records) for at, records in self._by_stage.items()},
                oldest_s=oldest,
                outcomes=dict(self._outcomes),
                illegal=dict(self._illegal),
                repeated=self._totals["repeated"],
                unknown=self._totals["unknown"],
                full=self._totals["full"],
                observer_errors=self._totals["observer_errors"],
            )

    def _not_in_flight(self, identity: tuple[Side, str, int], stage: Stage | Outcome) -> Verdict:
        ended = self._recent_by_id.get(identity)
        if ended is None or ended.outcome is None:
            self._totals["unknown"] += 1
            return "unknown"
        if stage == ended.outcome:
            self._totals["repeated"] += 1
            return "repeated"
        return self._refuse(identity[0], ended.outcome, stage)

    def _end(self, identity: tuple[Side, str, int], record: Record, outcome: Outcome) -> None:
        record.outcome = outcome
        self._outcomes[record.side, outcome] += 1
        del self._inflight[identity]
        self._recent.append(record)
        self._recent_by_id[identity] = record
        while len(self._recent) > self._recent_limit:
            gone = self._recent.popleft()
            gone_identity = (gone.side, gone.key, gone.attempt)
            # A later record of the same identity may have taken its place.
            if self._recent_by_id.get(gone_identity) is gone:
                del self._recent_by_id[gone_identity]

    def _refuse(self, side: str, left: str, stage: str) -> Verdict:
        # A name that does not exist must not make the counter grow without bound.
        move = (side, left, stage) if (side, stage) in _KNOWN else ("?", left, "?")
        if move not in self._illegal:
            logger.warning("transfer ledger: no move from %s to %s on the %s side", left or "the start", stage, side)
        self._illegal[move] += 1
        return "illegal"

    def _listed(self, records: list[Record], side: Side | None, limit: int | None) -> list[dict[str, Any]]:
        # A record's side never changes, so this needs no lock.
        chosen = [record for record in records if side is None or record.side == side][:limit]
        listed: list[dict[str, Any]] = []
        for start in range(0, len(chosen), _LISTED_PER_LOCK):
            with self._lock:
                now = self._clock()
                listed += [record.as_dict(now) for record in chosen[start : start + _LISTED_PER_LOCK]]
        return listed

    def _observe(self, side: Side, stage: Stage, seconds: float) -> None:
        if self._observer is None:
            return
        try:
            self._observer(side, stage, seconds)
        except Exception:
            with self._lock:
                self._totals["observer_errors"] += 1
                first = self._totals["observer_errors"] == 1
            if first:
                logger.exception("transfer ledger: the observer of stage times failed (logged once)")


_KNOWN: Final = frozenset((side, name) for side in STAGES for name in (*STAGES[side], *OUTCOMES[side]))
