"""Records of the connector's ledgers, read from ``/transfers`` and joined by key. Pure.

docs/protocol.md names the fields and stages.

What ranks answer is checked before anything is made of it: a record that makes no sense is left out, never repaired.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

RECORDS_LIMIT = 1000
"""Ended records that a rank keeps, and answers at most."""

TRANSFERS_LIMIT = 8 << 20
"""Most bytes of an answer that are read: 1000 records have under 2 MB, even with the longest keys."""

_KEY_LIMIT = 256
_PATHS = {
    "prefill": ("prefilling", "ready", "matched", "posted", "completed"),
    "decode": ("allocated", "registered", "received"),
}
# Seconds since 1970, and seconds in a stage, beyond which a record is nonsense.
_UNIX_LIMIT = 1e11
_AGE_LIMIT = 1e7

Identity = tuple[str, str, str, int, float]
"""Which record it is: rank, side, key, attempt, beginning. A restarted rank may use a key and attempt again."""


@dataclass(frozen=True)
class TransferRecord:
    """A transfer that went its whole way, as one rank of one side saw it.

    Attributes:
        rank: which rank wrote it, for telling records apart.
        side: ``prefill`` or ``decode``.
        key: names the transfer on both sides.
        attempt: of decode; see docs/protocol.md.
        started_unix: when it began, in seconds since 1970 by the clock of its host.
        stages: when each stage began, and the outcome at the end, in seconds after the beginning.
    """

    rank: str
    side: str
    key: str
    attempt: int
    started_unix: float
    stages: Mapping[str, float]

    @property
    def identity(self) -> Identity:
        """What tells it from any other record."""
        return self.rank, self.side, self.key, self.attempt, self.started_unix

    @property
    def ended_unix(self) -> float:
        """When it ended, by the clock of its host."""
        return self.started_unix + self.stages[_PATHS[self.side][-1]]

    def spent(self, first: str, last: str) -> float:
        """Seconds from the beginning of one stage to the beginning of another."""
        return self.stages[last] - self.stages[first]


@dataclass(frozen=True)
class Transfer:
    """What both sides know of one transfer: of all ranks the one that was done last, since decode waits for all."""

    prefill: TransferRecord
    decode: TransferRecord


def read_records(body: bytes | None, rank: str) -> list[TransferRecord] | None:
    """Read an answer of ``/transfers?state=recent``.

    Args:
        body: what was answered; None if nothing was.
        rank: who answered.

    Returns:
        the transfers that went their whole way; None if there was no answer, or one without records.
    """
    if body is None or len(body) > TRANSFERS_LIMIT:
        return None
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    listed = answer.get("transfers") if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        return None
    records = (_record(entry, rank) for entry in listed[:RECORDS_LIMIT])
    return [record for record in records if record is not None]


def join(
    prefill: Iterable[TransferRecord], decode: Iterable[TransferRecord], known: Collection[Identity] = ()
) -> list[Transfer]:
    """Join what both sides know, by key, in the order in which prefill began.

    Args:
        prefill: records of all ranks of all prefill instances.
        decode: likewise of decode.
        known: records that were there before the cell, and are none of it. Clocks of hosts are not compared for that.
    """
    sides = [_last_of_each_key(records, known) for records in (prefill, decode)]
    joined = [Transfer(record, sides[1][key]) for key, record in sides[0].items() if key in sides[1]]
    return sorted(joined, key=lambda transfer: (transfer.prefill.started_unix, transfer.prefill.key))


def _last_of_each_key(records: Iterable[TransferRecord], known: Collection[Identity]) -> dict[str, TransferRecord]:
    last: dict[str, TransferRecord] = {}
    for record in records:
        if record.identity in known:
            continue
        other = last.get(record.key)
        if other is None or other.ended_unix < record.ended_unix:
            last[record.key] = record
    return last


def _record(entry: Any, rank: str) -> TransferRecord | None:
    if not isinstance(entry, dict):
        return None
    side, key, attempt, stages = (entry.get(name) for name in ("side", "key", "attempt", "stages"))
    if not isinstance(side, str) or side not in _PATHS or not isinstance(stages, dict):
        return None
    if not isinstance(key, str) or not 0 < len(key) <= _KEY_LIMIT or not isinstance(attempt, int):
        return None
    started = _number(entry.get("started_unix"), _UNIX_LIMIT)
    path = _PATHS[side]
    times = [_number(stages.get(stage), _AGE_LIMIT) for stage in path]
    checked = [time for time in times if time is not None]
    # Whole, and in order: one that failed, or needed no WRITE, says nothing about where the time goes.
    if started is None or entry.get("outcome") != path[-1] or len(checked) < len(path) or checked != sorted(checked):
        return None
    return TransferRecord(rank, side, key, attempt, started, dict(zip(path, checked, strict=True)))


def _number(value: Any, limit: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Compared before it is made a float: an int of JSON may be too large for one.
    return float(value) if 0 <= value <= limit and math.isfinite(value) else None
