"""Where the time to first token of a cell went. Pure.

Means, over the cell's answered requests; they add up to the mean time to first token. Mean differences of moments are
taken over the same requests, so that they are differences of means.

* ``push`` (pdctl's connector): the ledgers of both sides follow each transfer. ``route`` and ``notify`` are between two
  machines' clocks, everything else is within one. What vLLM's histograms add: how prefill's time splits into queueing
  and computing, and decode's first step.
* ``pull`` and ``push-upstream`` (vLLM's connectors): nothing follows a single transfer, and all figures are means of
  vLLM's histograms over what each role counted.

vLLM 0.32 records a request as scheduled only when its KV is there (vllm/v1/core/sched/scheduler.py: one that waits for
KV leaves ``schedule`` before ``EngineCoreEventType.SCHEDULED``), so that on decode the queue time holds the transfer,
and the prefill time is the one step that makes the first token.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean

from pdctl.bench.counters import Counters, RoleCounters, Total
from pdctl.bench.results import STAGES, Mode, Sample, StageTimes
from pdctl.bench.transfer_records import Identity, Transfer, TransferRecord, join

CLOCK_SLACK_S = 0.001
"""A time between two hosts may be negative by so much: clocks are no better, and prefill sees its WRITE complete up to
0.5 ms after decode was told, since that message travels with the WRITE."""

# What is not believed if the stages come to more than the whole, in turn, and why.
_GIVEN_UP = (
    (
        ("route", "notify"),
        "route and notify are in rest: with them, the stages take longer than the time to first token. Do the clocks "
        "of the hosts agree?",
    ),
    (STAGES, "the stages take longer than the time to first token: they are of other requests, too; all is in rest"),
)
# What is cut first if stages of several sources come to a little more than the whole.
_CUT_FIRST = ("first decode step", "notify", "route", "decode queue", "transfer", "prefill queue", "prefill")

_PULL_NOTE = (
    "vLLM's pull connector has no ledger: route, the way of prefill's answer to decode, and posting cannot be told "
    "apart and are in rest; decode queue holds what decode's queue time has beside the transfer"
)
_UPSTREAM_NOTE = (
    "vLLM's push connector has no ledger: route, match, posting and notify cannot be told apart and are in rest; "
    "decode waits for KV while prefill computes"
)


def stage_times(
    mode: Mode,
    samples: Sequence[Sample],
    prefill_records: Iterable[TransferRecord],
    decode_records: Iterable[TransferRecord],
    counters: Counters,
    known: Collection[Identity] = (),
) -> StageTimes:
    """Tell where the time to first token went.

    Args:
        mode: how KV was transferred.
        samples: the cell's requests.
        prefill_records: of the ledgers of all prefill ranks; only looked at in mode ``push``.
        decode_records: likewise of decode.
        counters: what the instances counted over the cell.
        known: records that were there before the cell.

    Returns:
        mean seconds by stage, which add up to the mean time to first token of the answered requests. What cannot be
        told, or cannot be true, is part of ``rest``, and the notes say why. Without an answered request there are none.
    """
    good = sorted((sample for sample in samples if sample.ok), key=lambda sample: sample.started_unix)
    firsts = [sample.ttft_s for sample in good if sample.ttft_s is not None]
    if not firsts:
        return StageTimes({}, notes=("no request was answered",))
    whole = fmean(firsts)
    notes: list[str] = []
    beside: dict[str, float] = {}
    if mode == "push":
        transfers = join(prefill_records, decode_records, known)
        chosen = _as_many_as_answered(transfers, samples, good, notes)
        stages, beside = _from_ledgers(chosen, good, counters, notes)
        requests = len(chosen)
    elif mode == "pull":
        stages, requests = _from_pull(counters, notes), len(good)
    else:
        stages, beside = _from_upstream_push(counters, notes)
        requests = len(good)
    _note_counts(counters, len(samples), notes, ledgers=mode == "push")
    return StageTimes(_complete(whole, stages, notes), beside, requests, tuple(notes))


def _as_many_as_answered(
    transfers: Sequence[Transfer], samples: Sequence[Sample], good: Sequence[Sample], notes: list[str]
) -> Sequence[Transfer]:
    """The transfers of the answered requests. Clients do not know the keys, so that only the order can tell."""
    if len(transfers) <= len(good):
        if 0 < len(transfers) < len(good):
            notes.append(
                f"the ledgers know {len(transfers)} of {len(good)} answered requests: stages are means over those, and "
                "route is in rest"
            )
        return transfers
    if len(transfers) == len(samples):
        notes.append(
            f"KV arrived for {len(transfers)} requests, {len(good)} of which were answered: which ones is told by "
            "their order"
        )
        in_order = sorted(samples, key=lambda sample: sample.started_unix)
        return [transfer for transfer, sample in zip(transfers, in_order, strict=True) if sample.ok]
    notes.append(
        f"the ledgers have {len(transfers)} transfers, the cell {len(good)} answered requests: the last so many are "
        "taken; did something else use the cluster?"
    )
    return transfers[-len(good) :]


def _from_ledgers(
    transfers: Sequence[Transfer], good: Sequence[Sample], counters: Counters, notes: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    stages: dict[str, float] = {}
    beside: dict[str, float] = {}
    if not transfers:
        notes.append("the ledgers have no finished transfer of this cell: its stages cannot be told apart")
        _add(stages, "first decode step", counters.decode.prefill)
        return stages, beside

    def prefill(first: str, last: str) -> float:
        return fmean(transfer.prefill.spent(first, last) for transfer in transfers)

    def decode(first: str, last: str) -> float:
        return fmean(transfer.decode.spent(first, last) for transfer in transfers)

    route: float | None = None
    if len(transfers) == len(good):
        # In pairs, since seconds since 1970 have few digits left for the difference of their means.
        route = fmean(
            transfer.prefill.started_unix - sample.started_unix
            for transfer, sample in zip(transfers, good, strict=True)
        )
    notify = fmean(transfer.decode.ended_unix - transfer.prefill.ended_unix for transfer in transfers)
    computed = prefill("prefilling", "ready")
    queue = counters.prefill.queue
    if queue is None or queue.mean is None:
        notes.append("prefill's queue time is not known: it is part of prefill")
    else:
        stages["prefill queue"] = min(queue.mean, computed)
    stages["prefill"] = computed - stages.get("prefill queue", 0.0)
    stages["match"] = prefill("ready", "matched")
    stages["post"] = prefill("matched", "posted")
    stages["transfer"] = prefill("posted", "completed")
    if _clocks_agree(route, notify, notes):
        if route is not None:
            stages["route"] = max(0.0, route)
        stages["notify"] = max(0.0, notify)
        # Decode was told before prefill looked: then the transfer was over earlier, too.
        stages["transfer"] = max(0.0, stages["transfer"] + min(0.0, notify))
    _add(stages, "first decode step", counters.decode.prefill)
    beside["registration"] = decode("allocated", "registered")
    beside["decode wait"] = decode("allocated", "received")
    return stages, beside


def _clocks_agree(route: float | None, notify: float, notes: list[str]) -> bool:
    for name, seconds, between in (
        ("route", route, "the load generator's and prefill's"),
        ("notify", notify, "prefill's and decode's"),
    ):
        if seconds is not None and seconds < -CLOCK_SLACK_S:
            notes.append(
                f"the clocks of hosts disagree: {name} would take {1000 * seconds:.1f} ms by {between}; route and "
                "notify are in rest. Synchronize the clocks (chrony)"
            )
            return False
    return True


def _from_pull(counters: Counters, notes: list[str]) -> dict[str, float]:
    notes.append(_PULL_NOTE)
    stages: dict[str, float] = {}
    _add(stages, "prefill queue", counters.prefill.queue)
    _add(stages, "prefill", counters.prefill.prefill)
    transfer = _per_request(counters.decode, counters.decode)
    waited = None if counters.decode.queue is None else counters.decode.queue.mean
    if waited is not None and transfer is not None:
        # Within it: the request is in decode's queue from its coming until its KV is there.
        stages["transfer"] = min(transfer, waited)
        stages["decode queue"] = waited - stages["transfer"]
    elif waited is not None:
        notes.append("decode's NIXL counted no transfer: it is part of decode queue")
        stages["decode queue"] = waited
    _add(stages, "first decode step", counters.decode.prefill)
    return stages


def _from_upstream_push(counters: Counters, notes: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    notes.append(_UPSTREAM_NOTE)
    stages: dict[str, float] = {}
    beside: dict[str, float] = {}
    _add(stages, "prefill queue", counters.prefill.queue)
    _add(stages, "prefill", counters.prefill.prefill)
    transfer = _per_request(counters.prefill, counters.decode)
    if transfer is not None:
        stages["transfer"] = transfer
    _add(stages, "first decode step", counters.decode.prefill)
    _add(beside, "decode wait", counters.decode.queue)
    return stages, beside


def _per_request(moving: RoleCounters, decode: RoleCounters) -> float | None:
    """Seconds of NIXL per request of decode. Ranks of one request move its KV at the same time: then, of one rank."""
    transfer, requests = moving.transfer, decode.queue
    if transfer is None or not transfer.count or requests is None or not requests.count:
        return None
    # A request whose whole prompt was in decode's cache has no transfer, and counts with none.
    return transfer.sum / max(transfer.count, requests.count)


def _add(to: dict[str, float], stage: str, total: Total | None) -> None:
    mean = None if total is None else total.mean
    if mean is not None:
        to[stage] = mean


def _note_counts(counters: Counters, sent: int, notes: list[str], *, ledgers: bool) -> None:
    for role, counted in (("prefill", counters.prefill.queue), ("decode", counters.decode.queue)):
        if counted is None:
            if ledgers and role == "prefill":
                # They know its time without it.
                continue
            notes.append(f"what {role} counted is not known: its figures are in rest")
        elif counted.count != sent:
            notes.append(
                f"{role} finished {counted.count} requests, and the cell sent {sent}: its means are over those"
            )


def _complete(whole: float, stages: dict[str, float], notes: list[str]) -> dict[str, float]:
    """The stages in order and what is left, which is never negative."""
    for gone, why in _GIVEN_UP:
        if math.fsum(stages.values()) > whole + CLOCK_SLACK_S and any(stage in gone for stage in stages):
            stages = {stage: seconds for stage, seconds in stages.items() if stage not in gone}
            notes.append(why)
    excess = math.fsum(stages.values()) - whole
    for stage in _CUT_FIRST:
        if excess > 0 and stage in stages:
            cut = min(excess, stages[stage])
            stages[stage] -= cut
            excess -= cut
    told = {stage: stages[stage] for stage in STAGES if stage in stages}
    told["rest"] = max(0.0, whole - math.fsum(told.values()))
    return told
