"""What both sides know of the same transfer, put together. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pdctl.watch.poll_records import EndedRecords, Record
from pdctl.watch.snapshot import SideRecord, TransferView

INFLIGHT_SHOWN = 500
ENDED_SHOWN = 200


@dataclass(frozen=True)
class RankLedger:
    """What is in flight at one rank, as last read.

    Attributes:
        instance: its name.
        rank: within the instance.
        records: in flight there.
        unlisted: how many more were.
    """

    instance: str
    rank: int
    records: Sequence[Record] = ()
    unlisted: int = 0


def join(
    ledgers: Iterable[RankLedger],
    ended: EndedRecords,
    *,
    now: float,
    engines: Collection[str] = (),
    inflight_limit: int = INFLIGHT_SHOWN,
    ended_limit: int = ENDED_SHOWN,
) -> tuple[tuple[TransferView, ...], int]:
    """Join records by key.

    Args:
        ledgers: of all ranks of both sides.
        ended: the ended records that are kept.
        now: the time of the snapshot; ages of what is in flight are advanced to it.
        engines: engine ids of all ranks that answer.
        inflight_limit: most transfers in flight in the result, the oldest.
        ended_limit: most others, the latest.

    Returns:
        the transfers, in flight first, oldest first, then ended ones, latest first; and how many more are in flight.
    """
    inflight: dict[str, list[Record]] = {}
    for ledger in ledgers:
        for record in ledger.records:
            # A list that could not be read again may still have what is known to have ended.
            if not any(_same(record, other) for other in ended.of(record.key)):
                inflight.setdefault(record.key, []).append(record)
    oldest_first = sorted(inflight, key=lambda key: (min(record.begun_at for record in inflight[key]), key))
    views = [view(key, [*inflight[key], *ended.of(key)], now, engines) for key in oldest_first[:inflight_limit]]
    # The latest attempt may be over though an earlier one is not; then it is shown among the others.
    shown = [one for one in views if one.in_flight]
    over = [one for one in views if not one.in_flight]
    for key in ended.latest_first():
        if len(over) >= ended_limit:
            break
        if key not in inflight:
            over.append(view(key, ended.of(key), now, engines))
    return (*shown, *over[:ended_limit]), len(oldest_first) - len(oldest_first[:inflight_limit])


def unlisted(ledgers: Iterable[RankLedger], role_of: dict[str, str]) -> int:
    """How many transfers in flight no rank listed: of the side with more, ranks of one instance sharing theirs."""
    by_instance: dict[str, int] = {}
    for ledger in ledgers:
        by_instance[ledger.instance] = max(by_instance.get(ledger.instance, 0), ledger.unlisted)
    by_role: dict[str, int] = {}
    for instance, count in by_instance.items():
        role = role_of.get(instance, "")
        by_role[role] = by_role.get(role, 0) + count
    return max(by_role.values(), default=0)


def view(key: str, records: Collection[Record], now: float, engines: Collection[str] = ()) -> TransferView:
    """One transfer out of all records of its key; the other arguments are those of `join`."""
    decode = _latest_attempt([record for record in records if record.side == "decode"])
    prefill = _answering([record for record in records if record.side == "prefill"], decode, engines)
    return TransferView(
        key=key,
        prefill=tuple(side_record(record, now) for record in prefill),
        decode=tuple(side_record(record, now) for record in decode),
    )


def side_record(record: Record, now: float) -> SideRecord:
    """A record at the time of the snapshot; one that has ended does not age."""
    since = max(0.0, now - record.read_at)
    more = 0.0 if record.outcome else since
    return SideRecord(
        instance=record.instance,
        rank=record.rank,
        attempt=record.attempt,
        stage=record.stage,
        outcome=record.outcome,
        reason=record.reason,
        age_s=record.age_s + more,
        stage_age_s=record.stage_age_s + more,
        stages=record.stages,
        started_unix=record.started_unix,
        reading_age_s=since,
        request_id=record.request_id,
        peer=record.peer,
        tokens=record.tokens,
        blocks=record.blocks,
        descriptors=record.descriptors,
        bytes=record.bytes,
        ended_s=max(0.0, now - record.begun_at - record.age_s) if record.outcome else None,
    )


def _same(record: Record, other: Record) -> bool:
    return (record.identity, record.instance, record.rank) == (other.identity, other.instance, other.rank)


def _latest_attempt(records: Sequence[Record]) -> list[Record]:
    """Attempts are counted by each decode instance for itself, so the latest is the one that began last."""
    if not records:
        return []
    last = max(records, key=lambda record: (record.begun_at, record.attempt))
    chosen = [
        record
        for record in records
        if (record.instance, record.engine_id, record.attempt) == (last.instance, last.engine_id, last.attempt)
    ]
    return _one_each(chosen)


def _answering(records: Sequence[Record], decode: Sequence[Record], engines: Collection[str]) -> list[Record]:
    """The records of the prefill engine that decode waits for, or of the last one if there is nothing to go by.

    A router that tries again may have sent the same request to another prefill instance before.
    """
    wanted = {record.peer for record in decode if record.peer}
    if wanted:
        matched = [record for record in records if record.engine_id in wanted]
        if not matched and wanted.isdisjoint(engines):
            # It waits for an engine that no rank that answers is. Prefill's records may name decode's all the same.
            asking = {record.engine_id for record in decode if record.engine_id}
            matched = [record for record in records if record.peer in asking]
        return _one_each(matched)
    if not records:
        return []
    last = max(records, key=lambda record: (not record.outcome, record.begun_at))
    return _one_each([record for record in records if record.instance == last.instance])


def _one_each(records: Iterable[Record]) -> list[Record]:
    """One record of each rank: one in flight if there is any, and the last that began."""
    chosen: dict[tuple[str, int], Record] = {}
    for record in records:
        place = (record.instance, record.rank)
        known = chosen.get(place)
        if known is None or (not known.outcome, known.begun_at) < (not record.outcome, record.begun_at):
            chosen[place] = record
    return [chosen[place] for place in sorted(chosen)]
