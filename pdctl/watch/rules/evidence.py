"""What rules ask of the last snapshots: who is who, how old a reading is, what moved, what grew. Pure.

Two readings of one transfer are of different moments. A duration is therefore judged by what was true when it was
read, and nothing is concluded from a reading that is too old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import median

from pdctl.watch.settings import WatchSettings
from pdctl.watch.snapshot import InstanceView, RankView, SideRecord, Snapshot, TransferView
from pdctl.watch.wording import plain

_KEY_SHOWN = 32
_MINIMUM_STALE_S = 2.0


class Evidence:
    """The snapshots up to now, with answers to what several rules ask.

    Args:
        history: at least one snapshot, the latest last. Older ones may lack transfers that had ended.
        settings: thresholds.
    """

    def __init__(self, history: Sequence[Snapshot], settings: WatchSettings) -> None:
        self.history = history
        self.now = history[-1]
        self.settings = settings

    @cached_property
    def interval_s(self) -> float:
        """Between two snapshots: as set, or as it is if that is more."""
        recent = [snapshot.at for snapshot in self.history[-4:]]
        gaps = [later - earlier for earlier, later in pairwise(recent)]
        return max(self.settings.interval_s, median(gaps)) if gaps else self.settings.interval_s

    @property
    def stale_s(self) -> float:
        """A reading older than this says nothing about now."""
        return max(self.settings.stale_intervals * self.interval_s, _MINIMUM_STALE_S)

    def fresh(self, age_s: float | None) -> bool:
        """Whether a reading of that age says something about now."""
        return age_s is not None and age_s <= self.stale_s

    # Who is who.

    @cached_property
    def owners(self) -> dict[str, str]:
        """Engine id -> instance, of all engines that were seen; the present ones win."""
        found: dict[str, str] = {}
        for snapshot in (self.history[0], self.now):
            for instance in snapshot.instances:
                found.update({rank.engine_id: instance.name for rank in instance.ranks if rank.engine_id})
        return found

    @cached_property
    def engines(self) -> frozenset[str]:
        """Ids of the engines that run now."""
        return frozenset(r.engine_id for instance in self.now.instances for r in instance.ranks if r.engine_id)

    @cached_property
    def instances(self) -> dict[str, InstanceView]:
        """By name."""
        return {instance.name: instance for instance in self.now.instances}

    def host_of(self, name: str) -> str:
        """The host of an instance; empty if there is no such instance."""
        instance = self.instances.get(name)
        return instance.host if instance else ""

    def of_role(self, role: str) -> list[InstanceView]:
        """Instances of a role."""
        return [instance for instance in self.now.instances if instance.role == role]

    def readable(self, name: str) -> bool:
        """Whether every rank of an instance was read lately and listed all: what is not there does not exist."""
        ranks = self.instances[name].ranks if name in self.instances else ()
        return bool(ranks) and all(self.fresh(one.age_s) and not one.unlisted for one in ranks)

    def who(self, record: SideRecord) -> str:
        """How a rank is called: with its number if there are several."""
        instance = self.instances.get(record.instance)
        return f"{record.instance} rank {record.rank}" if instance and len(instance.ranks) > 1 else record.instance

    # Times.

    def held_s(self, record: SideRecord) -> float:
        """How long a record is in its stage, for certain."""
        if record.reading_age_s <= 1.5 * self.interval_s:
            return record.stage_age_s
        return record.stage_age_s - record.reading_age_s

    def p99_s(self, side: str, stage: str) -> float | None:
        """The recent 99th percentile of a stage."""
        return self.now.stage_p99_s.get(f"{side}/{stage}")

    def threshold_s(self, side: str, stage: str, least_s: float | None = None) -> float:
        """How long a transfer may be in a stage."""
        least = self.settings.stall_after_s if least_s is None else max(least_s, self.settings.stall_after_s)
        p99 = self.p99_s(side, stage) or 0.0
        return max(least, min(self.settings.p99_factor * p99, self.settings.stall_cap_s))

    # What moved.

    @cached_property
    def moving(self) -> frozenset[tuple[str, str]]:
        """(prefill instance, peer engine) between which a transfer completed that was seen in flight lately."""
        since = self.now.at - max(3 * self.interval_s, 3.0)
        flying: set[tuple[str, str, int]] = set()
        for snapshot in reversed(self.history[:-1]):
            if snapshot.at < since:
                break
            flying.update(
                (transfer.key, one.instance, one.rank)
                for transfer in snapshot.transfers
                for one in transfer.prefill
                if not one.outcome
            )
        return frozenset(
            (record.instance, record.peer)
            for transfer in self.now.transfers
            for record in transfer.prefill
            if record.outcome == "completed" and (transfer.key, record.instance, record.rank) in flying
        )

    @cached_property
    def _completed(self) -> dict[tuple[str, int, str], list[tuple[float, int]]]:
        found: dict[tuple[str, int, str], list[tuple[float, int]]] = {}
        for transfer in self.now.transfers:
            for record in transfer.prefill:
                if record.outcome == "completed" and "posted" in record.stages:
                    posted = record.started_unix + record.stages["posted"]
                    found.setdefault((record.instance, record.rank, record.peer), []).append((posted, record.bytes))
        return found

    def overtaken(self, record: SideRecord) -> bool:
        """Whether a WRITE of at least its size that was posted later to the same engine has completed.

        The two times are of one host's clock, so it need not be right.
        """
        if "posted" not in record.stages:
            return False
        posted = record.started_unix + record.stages["posted"]
        others = self._completed.get((record.instance, record.rank, record.peer), ())
        return any(at > posted + 1.0 and size >= record.bytes for at, size in others)

    def advances(self, name: str, within_s: float) -> bool:
        """Whether an instance did anything within that time: ended a transfer, or changed its batch."""
        present = self.instances.get(name)
        if present is None:
            return False
        for snapshot in reversed(self.history[:-1]):
            if self.now.at - snapshot.at > within_s:
                break
            former = snapshot.instance(name)
            if former is not None and _progress(former) != _progress(present):
                return True
        return False

    def watched_s(self) -> float:
        """How far back the history reaches."""
        return self.now.at - self.history[0].at

    def known_ended_s(self, transfer: TransferView, waiting: SideRecord) -> float:
        """For how long the waiting side has certainly not known that the other has ended all of it; 0 if not at all."""
        since: float | None = None
        for snapshot in reversed(self.history):
            seen = next((one for one in snapshot.transfers if one.key == transfer.key), None)
            if seen is None or not seen.prefill or any(not record.outcome for record in seen.prefill):
                break
            if not any(one.attempt == waiting.attempt and not one.outcome for one in seen.decode):
                break
            since = snapshot.at - max(record.reading_age_s for record in seen.prefill)
        if since is None:
            return 0.0
        known = max(0.0, self.now.at - waiting.reading_age_s - since)
        return max(known, self._told_ended_s(transfer, waiting)) if self.settings.trust_ended_ages else known

    @staticmethod
    def _told_ended_s(transfer: TransferView, waiting: SideRecord) -> float:
        """The same by what ledgers tell of times before the first snapshot: as of the older of the readings."""
        ended = [-1.0 if one.ended_s is None else one.ended_s - one.reading_age_s for one in transfer.prefill]
        waited = waiting.stage_age_s - waiting.reading_age_s
        return max(0.0, min(*ended, waited) - waiting.reading_age_s)

    # What grew.

    @cached_property
    def _baseline(self) -> tuple[Snapshot, dict[tuple[str, int], RankView]]:
        since = self.now.at - max(self.settings.window_s, 1.5 * self.interval_s)
        snapshot = next((one for one in self.history if one.at >= since), self.now)
        return snapshot, {(one.name, rank.rank): rank for one in snapshot.instances for rank in one.ranks}

    @property
    def window_s(self) -> float:
        """Over how long growth is told."""
        return self.now.at - self._baseline[0].at

    def growth(self, instance: InstanceView, rank: RankView, read: Callable[[RankView], int | None]) -> int:
        """How much a counter of a rank grew over the window; 0 if not known. A new engine's began at 0."""
        value = read(rank)
        if value is None or not self.window_s:
            return 0
        former = self._baseline[1].get((instance.name, rank.rank))
        if former is None:
            return 0
        if former.engine_id and rank.engine_id and former.engine_id != rank.engine_id:
            return max(0, value)
        before = read(former)
        if before is None:
            return 0
        # A counter that went down was reset: what it shows has come since.
        return value - before if value >= before else max(0, value)

    def most_growth(self, instance: InstanceView, read: Callable[[RankView], int | None]) -> int:
        """Of the rank where it is most: each rank counts the same requests."""
        return max((self.growth(instance, rank, read) for rank in instance.ranks), default=0)

    def counter_growth(self, name: str, read: Callable[[InstanceView], int | None]) -> int | None:
        """The same of a counter of the instance; None if it is not known."""
        present, former = self.instances.get(name), self._baseline[0].instance(name)
        if present is None or former is None or not self.window_s:
            return None
        value, before = read(present), read(former)
        if value is None or before is None:
            return None
        return value - before if value >= before else max(0, value)


def outcome(name: str) -> Callable[[RankView], int | None]:
    """Reads a total such as ``decode/failed``; None if the rank has told none at all."""
    return lambda rank: rank.outcomes.get(name, 0) if rank.outcomes else None


def _progress(instance: InstanceView) -> tuple[object, ...]:
    return (
        instance.requests_running,
        tuple((rank.rank, tuple(sorted(rank.outcomes.items())), rank.posted_bytes) for rank in instance.ranks),
    )


# Wording.


def seconds(value: float) -> str:
    """For people: ``38 ms``, ``7.2 s``, ``4 min``."""
    if value < 1.0:
        return f"{max(value, 0.0) * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def size(value: float) -> str:
    """For people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count(number: int, what: str) -> str:
    """``1 transfer``, ``3 transfers``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def without_name(text: str, *names: str) -> str:
    """An error without the name that it begins with, since the sentence has it; safe for a terminal, and bounded."""
    for name in names:
        text = text.removeprefix(f"{name}: ")
    return plain(text, 200)


def short_key(key: str) -> str:
    """The end of a key, which tells requests of one router apart."""
    shown = plain(key, 300)
    return shown if len(shown) <= _KEY_SHOWN else "…" + shown[-_KEY_SHOWN:]


def listed(names: Iterable[str], limit: int = 4) -> str:
    """Names for a sentence; the rest as a number."""
    found = list(dict.fromkeys(names))
    return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")


def pairs_of(transfers: Iterable[TransferView], evidence: Evidence) -> Iterator[tuple[TransferView, str, str]]:
    """Transfers with the instances of both sides; empty where a side is not known."""
    for transfer in transfers:
        prefill = transfer.prefill[0].instance if transfer.prefill else ""
        decode = transfer.decode[0].instance if transfer.decode else ""
        if not prefill and transfer.decode:
            prefill = evidence.owners.get(transfer.decode[0].peer, "")
        if not decode and transfer.prefill:
            decode = evidence.owners.get(transfer.prefill[0].peer, "")
        yield transfer, prefill, decode
