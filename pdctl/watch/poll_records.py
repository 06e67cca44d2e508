"""Records of ranks' ledgers as they are read, and the ended ones that are kept. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ENDED_KEYS = 1000
"""Transfers of which ended records are kept, beside those that are in flight on a side."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record, as one rank told it.

    Attributes:
        instance: whose ledger.
        rank: of that instance.
        engine_id: of that rank when it was read.
        read_at: when it was read. This and all other moments are seconds of the poller's monotonic clock.
        begun_at: when the record began; of an ended one by the host's wall clock, so only good for an order.

    The others are those of docs/protocol.md.
    """

    instance: str
    rank: int
    engine_id: str
    read_at: float
    begun_at: float
    side: str
    key: str
    attempt: int
    stage: str
    outcome: str
    reason: str
    age_s: float
    stage_age_s: float
    stages: Mapping[str, float]
    started_unix: float
    request_id: str
    peer: str
    tokens: int
    blocks: int
    descriptors: int
    bytes: int

    @property
    def identity(self) -> tuple[str, str, int, float]:
        """What no other record of that rank shares."""
        return self.side, self.key, self.attempt, self.started_unix


def read_record(fields: Any, *, instance: str, rank: int, engine_id: str, read_at: float) -> Record:
    """Make a record of the list that ``pdctl/node/watch_facts.py`` sends, in the order of its ``read_record``.

    Raises:
        ValueError: it is none.
        TypeError: the same.
    """
    side, key, attempt, stage, outcome, reason, age, stage_age, stages, started, begun = fields[:11]
    request_id, peer, tokens, blocks, descriptors, size = fields[11:]
    if side not in ("prefill", "decode") or not isinstance(stages, dict):
        raise ValueError(f"no record: {str(fields)[:200]}")
    return Record(
        instance=instance,
        rank=rank,
        engine_id=engine_id,
        read_at=read_at,
        begun_at=read_at - float(begun),
        side=side,
        key=str(key),
        attempt=int(attempt),
        stage=str(stage),
        outcome=str(outcome),
        reason=str(reason),
        age_s=float(age),
        stage_age_s=float(stage_age),
        stages={str(name): float(value) for name, value in stages.items()},
        started_unix=float(started),
        request_id=str(request_id),
        peer=str(peer),
        tokens=int(tokens),
        blocks=int(blocks),
        descriptors=int(descriptors),
        bytes=int(size),
    )


class EndedRecords:
    """The records of transfers that ended, by key; the last that each rank had of a key."""

    def __init__(self, limit: int = ENDED_KEYS) -> None:
        self._limit = limit
        self._by_key: OrderedDict[str, dict[tuple[str, str, int], Record]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, record: Record) -> None:
        """Take a record; its key is the latest then."""
        records = self._by_key.setdefault(record.key, {})
        place = (record.side, record.instance, record.rank)
        known = records.get(place)
        if known is None or known.begun_at <= record.begun_at or known.identity == record.identity:
            records[place] = record
        self._by_key.move_to_end(record.key)

    def of(self, key: str) -> Collection[Record]:
        """What is known of a key."""
        return self._by_key.get(key, {}).values()

    def latest_first(self) -> Iterable[str]:
        """All keys."""
        return reversed(self._by_key)

    def trim(self, needed: Collection[str]) -> None:
        """Forget the oldest keys beyond the limit, but none of those ``needed`` (one side still waits for them)."""
        excess = len(self._by_key) - self._limit
        if excess <= 0:
            return
        for key in [key for key in self._by_key if key not in needed][:excess]:
            del self._by_key[key]
