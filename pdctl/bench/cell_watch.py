"""Asks the instances around a cell: what they count and record before it, and after it.

How they are asked is the caller's; nothing here fails because one of them does not answer. That is told instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdctl.bench.counters import Counters, Gain, Scrape, Total, gain, outcomes, read_scrape, role_counters, routed
from pdctl.bench.results import COUNT_LIMIT, SECONDS_LIMIT, Mode, Sample, StageTimes, Transfers
from pdctl.bench.stages import stage_times
from pdctl.bench.transfer_records import (
    RECORDS_LIMIT,
    TRANSFERS_LIMIT,
    Identity,
    TransferRecord,
    join,
    read_records,
)
from pdctl.plan import ClusterPlan, InstancePlan, http_url

SETTLE_S = 2.0
"""How long to ask again until the instances have counted what the clients saw: an engine counts a request after its
answer, and what the ranks count of transfers with the engine's next step."""

AGAIN_S = 0.25
"""Seconds between two such looks."""

_LOST = ("failed", "timed_out")
"""Outcomes on the decode side after which decode computes a prompt itself, if it may. Of what was aborted nobody waits
for an answer."""

_MOST_COUNTED = float(2**53)
"""Beyond it a counter is no count any more. What is read is kept below, so that sums and rates stay figures."""


@dataclass(frozen=True)
class Wanted:
    """A GET to be made on an instance's host.

    Attributes:
        instance: whose host.
        url: what to get.
    """

    instance: InstancePlan
    url: str


Read = Callable[[Sequence[Wanted]], Sequence[bytes | None]]
"""Gets all of them at the same time, in bounded time and with bounded bodies; the bodies in the same order. None: no
answer, or one that is no 200. It raises nothing."""


@dataclass(frozen=True)
class CellFacts:
    """What the instances say of a cell.

    Attributes:
        stages: where the time to first token went; None if no request was answered, or an instance was restarted or did
            not answer.
        transfers: what was transferred; a figure that is not known is None.
        trouble: what is wrong, for people.
        lost: whether an instance was restarted or did not answer, so that what it counted is not known. False if
            ``trouble`` holds mere notes.
    """

    stages: StageTimes | None
    transfers: Transfers
    trouble: tuple[str, ...] = ()
    lost: bool = False


@dataclass(frozen=True)
class _Source:
    """One URL of the cluster, and how it is called for people."""

    wanted: Wanted
    name: str


_Lost = tuple[str, str, str]
"""Key, attempt and beginning of a transfer that decode's side lost. Its key is the same on all ranks."""


@dataclass(frozen=True)
class _Look:
    """One reading of everything, in the order of the sources; None where nothing answered."""

    metrics: Sequence[Scrape | None]
    ranks: Sequence[Scrape | None]
    records: Sequence[list[TransferRecord] | None]
    lost: Sequence[frozenset[_Lost]]


@dataclass(frozen=True)
class _Seen:
    """What came between two looks.

    Attributes:
        counters: what was counted.
        prefill: records of the prefill ranks.
        decode: likewise.
        known: records from before.
        trouble: what could not be read.
        untold: the part of it without which there are no stages.
        unknown: whether some instance's counters are not known.
        lost_requests: requests of decode whose KV did not come, over all instances, each counted once; None if not
            known.
    """

    counters: Counters
    prefill: Sequence[TransferRecord]
    decode: Sequence[TransferRecord]
    known: frozenset[Identity]
    trouble: tuple[str, ...]
    untold: tuple[str, ...]
    unknown: bool
    lost_requests: int | None


class CellWatch:
    """Looks at the instances before and after a cell.

    Args:
        plan: the cluster.
        read: asks the instances.
        mode: how KV is transferred; only ``push`` has ledgers.
        clock: monotonic seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        read: Read,
        mode: Mode,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._mode, self._read, self._clock, self._sleep = mode, read, clock, sleep
        self._recomputes = plan.spec.transfer.load_failure_policy == "recompute"
        self._metrics = [
            *(_Source(Wanted(each, f"{each.url}/metrics"), each.name) for each in (*plan.prefill, *plan.decode)),
            *_sources(plan.router, "metrics", "/metrics"),
        ]
        ranked = (*plan.prefill, *plan.decode) if mode == "push" else ()
        self._ranks = [source for each in ranked for source in _sources(each, "telemetry", "/metrics")]
        path = f"/transfers?state=recent&limit={RECORDS_LIMIT}"
        self._records = [source for each in ranked for source in _sources(each, "telemetry", path)]
        self._before: _Look | None = None

    def begin(self) -> None:
        """Look just before the first request of the cell that counts. Raises nothing.

        What the warm-up's last requests did is counted a moment after their answers, so it looks until nothing changes
        any more, for :data:`SETTLE_S` at most.
        """
        until = self._clock() + SETTLE_S
        look = self._look()
        while self._clock() + AGAIN_S <= until:
            self._sleep(AGAIN_S)
            before, look = look, self._look()
            if (before.metrics, before.ranks) == (look.metrics, look.ranks):
                break
        self._before = look

    def end(self, samples: Sequence[Sample]) -> CellFacts:
        """Look after the last answer, again for :data:`SETTLE_S` until the counts fit. Raises nothing.

        Args:
            samples: the requests of the cell.
        """
        before = self._before
        if before is None:
            return CellFacts(None, Transfers(), ("the instances were not looked at before the cell",))
        answered = sum(sample.ok for sample in samples)
        until = self._clock() + SETTLE_S
        while True:
            seen = self._compare(before, self._look())
            if self._fits(seen, answered) or self._clock() + AGAIN_S > until:
                break
            self._sleep(AGAIN_S)
        stages = None
        if answered and not seen.untold:
            stages = stage_times(self._mode, samples, seen.prefill, seen.decode, seen.counters, seen.known)
        trouble = seen.trouble
        if (seen.counters.routed or 0) > len(samples):
            trouble += (
                f"the router passed on {seen.counters.routed} requests, and the cell sent {len(samples)}: something "
                "else used the cluster",
            )
        return CellFacts(stages, self._transfers(seen), trouble, seen.unknown)

    def _look(self) -> _Look:
        sources = [*self._metrics, *self._ranks, *self._records]
        bodies = list(self._read([source.wanted for source in sources]))
        # A caller that answers less than it was asked leaves the rest without an answer.
        bodies += [None] * (len(sources) - len(bodies))
        first, second = len(self._metrics), len(self._metrics) + len(self._ranks)
        return _Look(
            [_scrape(body) for body in bodies[:first]],
            [_scrape(body) for body in bodies[first:second]],
            [
                read_records(body, source.name)
                for body, source in zip(bodies[second : len(sources)], self._records, strict=True)
            ],
            [_lost(body) for body in bodies[second : len(sources)]],
        )

    def _compare(self, before: _Look, after: _Look) -> _Seen:
        prefill, decode, router = (
            _gain(self._metrics, before.metrics, after.metrics, role) for role in ("prefill", "decode", "router")
        )
        writers, readers = (_gain(self._ranks, before.ranks, after.ranks, role) for role in ("prefill", "decode"))
        records: dict[str, list[TransferRecord]] = {"prefill": [], "decode": []}
        known: set[Identity] = set()
        unread: list[str] = []
        for source, early, late in zip(self._records, before.records, after.records, strict=True):
            if early is None or late is None:
                unread.append(f"the ledger of {source.name} could not be read: its transfers are not known")
                continue
            known.update(record.identity for record in early)
            records[source.wanted.instance.role] += late
        ended = None
        if writers.increments is not None and readers.increments is not None:
            # Each rank shows the outcomes of both sides; those of the other side are zero.
            of_ranks = [outcomes(each.increments) or {} for each in (writers, readers)]
            ended = {at: sum(each.get(at, 0) for each in of_ranks) for at in {*of_ranks[0], *of_ranks[1]}} or None
        untold = (*prefill.trouble, *decode.trouble, *unread)
        uncounted = (*prefill.trouble, *decode.trouble, *router.trouble, *writers.trouble, *readers.trouble)
        return _Seen(
            Counters(
                role_counters(prefill.increments), role_counters(decode.increments), ended, routed(router.increments)
            ),
            records["prefill"],
            records["decode"],
            frozenset(known),
            (*untold, *router.trouble, *writers.trouble, *readers.trouble),
            untold,
            bool(uncounted),
            self._lost_requests(before, after),
        )

    def _lost_requests(self, before: _Look, after: _Look) -> int | None:
        """Requests of decode whose KV did not come.

        Each rank counts such a request, and usually all do, since they have the same cause. The ledgers name them, but
        only the last :data:`RECORDS_LIMIT` of all; a rank's counter forgets none, but of a request that only another
        rank lost, it knows nothing. Both are at most what there is, so the larger one is taken.
        """
        found = 0
        for name in dict.fromkeys(s.wanted.instance.name for s in self._ranks if s.wanted.instance.role == "decode"):
            counted: list[int] = []
            keys: set[str] = set()
            for place, source in enumerate(self._ranks):
                if source.wanted.instance.name != name:
                    continue
                gained = gain([(source.name, before.ranks[place], after.ranks[place])]).increments
                ended = outcomes(gained)
                if ended is None:
                    return None
                counted.append(sum(ended.get(("decode", outcome), 0) for outcome in _LOST))
                # Ledgers are in the order of the ranks.
                keys |= {key for key, _, _ in after.lost[place] - before.lost[place]}
            found += max(*counted, len(keys)) if counted else 0
        return found

    def _fits(self, seen: _Seen, answered: int) -> bool:
        """Whether the instances have counted what the clients saw. One that was silent may answer a moment later."""
        if seen.untold:
            return False
        counters = seen.counters
        finished = [counters.prefill.queue, counters.decode.queue]
        if self._mode == "push":
            joined = len(join(seen.prefill, seen.decode, seen.known))
            enough = joined >= min(answered, RECORDS_LIMIT)
        else:
            moving = counters.decode if self._mode == "pull" else counters.prefill
            finished.append(moving.transfer)
            enough = True
        return enough and all(total is None or total.count >= answered for total in finished)

    def _transfers(self, seen: _Seen) -> Transfers:
        counters = seen.counters
        # NIXL's own time: in push mode posting does a part of the work, so that the ledger's `posted` is too short.
        moving = counters.decode if self._mode == "pull" else counters.prefill
        completed = moving.transfer.count if moving.transfer else None
        failed, expired = moving.failed, counters.prefill.expired
        ended = counters.outcomes
        if self._mode == "push":
            completed = failed = expired = None
            if ended is not None:
                completed = ended.get(("prefill", "completed"), 0)
                expired = ended.get(("prefill", "expired"), 0)
                # Both sides know of most failures; a side may be alone with one that it could not tell.
                failed = max(
                    ended.get(("prefill", "failed"), 0),
                    ended.get(("decode", "failed"), 0) + ended.get(("decode", "timed_out"), 0),
                )
        tokens = recomputed_tokens(counters)
        return Transfers(
            completed=completed,
            failed=failed,
            expired=expired,
            bytes=_rounded(moving.bytes),
            seconds=None if moving.transfer is None else min(moving.transfer.sum, SECONDS_LIMIT),
            recomputed_requests=self._recomputed_requests(tokens, seen.lost_requests),
            recomputed_tokens=tokens,
        )

    def _recomputed_requests(self, tokens: int | None, lost: int | None) -> int | None:
        if tokens is None or not tokens:
            return tokens
        if self._mode != "push" or lost is None or not self._recomputes:
            # vLLM counts tokens alone. Its histogram of computed tokens is of no use: in pull mode, decode shows
            # prefill's cache hits there (remote_prefill_cached_tokens in vllm/v1/engine/output_processor.py).
            return None
        return lost or None


def recomputed_tokens(counters: Counters) -> int | None:
    """Prompt tokens that decode computed although their KV should have been transferred; None if not known.

    vLLM counts a prompt whose KV came whole as ``external_kv_transfer`` with all its tokens, so that ``local_compute``
    is what decode computed instead. Models with states (Mamba) leave decode the last token of every prompt: exactly one
    token for each request is therefore none. Together with tokens that were recomputed, these last ones are counted, as
    they cannot be told apart. Not counted by vLLM: what follows the part of a prompt that decode had in its own cache,
    if the transfer of the rest failed, and what was computed again after a preemption.
    """
    tokens = counters.decode.prompt_tokens.get("local_compute")
    first = counters.decode.first_token
    if tokens is None or first is None:
        return None
    return 0 if tokens == first.count else tokens


def _sources(instance: InstancePlan, purpose: str, path: str) -> list[_Source]:
    uses = [use for use in instance.ports if use.purpose == purpose]
    names = [instance.name] if instance.role == "router" else [f"{instance.name} rank {n}" for n in range(len(uses))]
    return [
        _Source(Wanted(instance, f"{http_url(use.address, use.port)}{path}"), name)
        for use, name in zip(uses, names, strict=False)
    ]


def _gain(
    sources: Sequence[_Source], before: Sequence[Scrape | None], after: Sequence[Scrape | None], role: str
) -> Gain:
    readings = zip(sources, before, after, strict=True)
    return gain((source.name, early, late) for source, early, late in readings if source.wanted.instance.role == role)


def _rounded(total: Total | None) -> int | None:
    return None if total is None else min(round(total.sum), COUNT_LIMIT)


def _scrape(body: bytes | None) -> Scrape | None:
    scrape = read_scrape(body)
    return None if scrape is None else {at: min(value, _MOST_COUNTED) for at, value in scrape.items()}


def _lost(body: bytes | None) -> frozenset[_Lost]:
    """Transfers of an answer of ``/transfers`` that decode's side lost; none if it makes no sense."""
    if body is None or len(body) > TRANSFERS_LIMIT or not any(f'"{outcome}"'.encode() in body for outcome in _LOST):
        return frozenset()
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return frozenset()
    listed = answer.get("transfers") if isinstance(answer, dict) else None
    return frozenset(
        (str(entry.get("key")), str(entry.get("attempt")), str(entry.get("started_unix")))
        for entry in (listed[:RECORDS_LIMIT] if isinstance(listed, list) else ())
        if isinstance(entry, dict) and entry.get("side") == "decode" and entry.get("outcome") in _LOST
    )
