"""Rules on what many transfers show together: queues, bandwidth, failures, messages, pairs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median

from pdctl.watch.alerts import Symptom
from pdctl.watch.rules.codes import CODES
from pdctl.watch.rules.evidence import Evidence, count, listed, outcome, pairs_of, seconds, size
from pdctl.watch.snapshot import InstanceView, RankView, SideRecord, TransferView
from pdctl.watch.wording import plain

_REFUSED = ("malformed", "invalid", "version", "kind", "oversized")
_LATE = ("unknown", "expired", "late")


def slow_prefill(evidence: Evidence) -> Iterator[Symptom]:
    """T006: requests wait for prefill and nothing moves there. A long queue that moves is no stall."""
    least = max(evidence.settings.slow_prefill_after_s, evidence.settings.stall_after_s)
    limit = evidence.threshold_s("prefill", "prefilling", least)
    held: dict[str, list[SideRecord]] = defaultdict(list)
    entered: set[str] = set()
    for transfer in evidence.now.transfers:
        for record in transfer.prefill:
            if record.stage == "prefilling" and not record.outcome and evidence.fresh(record.reading_age_s):
                held[record.instance].append(record)
            elif _since_ready(record) < limit:
                entered.add(record.instance)
    for name, records in held.items():
        oldest = max(records, key=evidence.held_s)
        # A batch that has not changed for less than the limit may be one large prompt.
        if evidence.held_s(oldest) < limit or name in entered or evidence.watched_s() < min(limit, 10.0):
            continue
        if evidence.advances(name, limit):
            continue
        instance = evidence.instances.get(name)
        queue = (
            f"; running {_figure(instance.requests_running)}, waiting {_figure(instance.requests_waiting)}"
            if instance
            else ""
        )
        stopped = f"; stopped by a signal: {plain(listed(instance.stopped))}" if instance and instance.stopped else ""
        keys = {record.request_id or str(number) for number, record in enumerate(records)}
        yield CODES["T006"].symptom(
            name,
            f"{name} prefills for {seconds(oldest.stage_age_s)} without ending any request "
            f"({count(len(keys), 'request')} there{queue}); expected a change within {seconds(limit)}{stopped}",
            f"Not a transfer fault. A very large prompt, or an engine that hangs in a forward pass: pdctl logs {name}",
            instances=(name,),
            host=evidence.host_of(name),
        )


def _since_ready(record: SideRecord) -> float:
    """Seconds since the prompt was finished, as far as the record tells; an ended one is one that ended lately."""
    if record.outcome or "ready" not in record.stages:
        return float("inf")
    return record.age_s - record.stages["ready"]


def _figure(value: int | None) -> str:
    return "not known" if value is None else str(value)


def slow_fabric(evidence: Evidence) -> Iterator[Symptom]:
    """T007: bandwidth of completed WRITEs far below the baseline."""
    settings = evidence.settings
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for transfer, prefill, decode in pairs_of(evidence.now.transfers, evidence):
        for record in transfer.prefill:
            took = record.stages.get("completed", 0.0) - record.stages.get("posted", 0.0)
            if record.outcome == "completed" and record.bytes >= settings.slow_fabric_least_bytes and took > 0:
                rates[prefill, decode].append(record.bytes / took)
    for (prefill, decode), found in rates.items():
        baseline = _baseline(evidence, prefill, decode)
        if not baseline:
            continue
        limit = baseline * settings.slow_fabric_share
        # WRITEs share the fabric: the best of them, and what the rank moves in all, tell more than the usual one.
        together = max((rank.bytes_per_s or 0.0 for rank in _ranks(evidence, prefill)), default=0.0)
        if len(found) < settings.slow_fabric_least_count or max(*found, together) >= limit:
            continue
        yield CODES["T007"].symptom(
            f"{prefill}>{decode}",
            f"{prefill} writes to {decode} at {size(max(found))}/s at best ({count(len(found), 'WRITE')} of "
            f"{size(settings.slow_fabric_least_bytes)} and more), below {settings.slow_fabric_share:.0%} of the "
            f"{size(baseline)}/s that pdctl doctor measured",
            "Has NIXL fallen back to TCP, or is the link shared or damaged? Run pdctl doctor --only FAB,XFER",
            instances=tuple(name for name in (prefill, decode) if name),
        )


def _baseline(evidence: Evidence, prefill: str, decode: str) -> float | None:
    """What the doctor measured from the one host to the other; kept on the prefill host by its probe."""
    writer, reader = evidence.instances.get(prefill), evidence.instances.get(decode)
    if writer is not None and reader is not None:
        for host in evidence.now.hosts:
            if host.name == writer.host and reader.host in host.baselines:
                return host.baselines[reader.host]
    return evidence.settings.fabric_baseline_bytes_per_s


def _ranks(evidence: Evidence, name: str) -> tuple[RankView, ...]:
    instance = evidence.instances.get(name)
    return instance.ranks if instance else ()


def load_failed(evidence: Evidence) -> Iterator[Symptom]:
    """T009: transfers to a decode instance failed; what its clients got."""
    for instance in evidence.of_role("decode"):
        failed = evidence.most_growth(instance, outcome("decode/failed"))
        timed_out = evidence.most_growth(instance, outcome("decode/timed_out"))
        loads = evidence.counter_growth(instance.name, lambda one: one.failed_loads)
        ended = failed + timed_out
        if not ended and not loads:
            continue
        if evidence.settings.load_failure_policy == "recompute":
            got = "the prompts were computed again on decode, and the clients got HTTP 200, late"
        else:
            got = "their clients got an error"
            if ended and loads == 0:
                got += (
                    ", unless it was hidden: vLLM's own counter of failed loads did not move, so check that no answer "
                    "with HTTP 200 (possibly wrong text) was given"
                )
        told = f"{count(ended, 'transfer')} failed, {timed_out} of them without any progress" if ended else (
            f"vLLM counted {count(loads or 0, 'failed load')}, and the ledger has no failed transfer"
        )  # fmt: skip
        yield CODES["T009"].symptom(
            instance.name,
            f"{instance.name}: {told}, within {seconds(evidence.window_s)}; {got}{_reasons(evidence, instance)}",
            f"pdctl logs {instance.name} names each with its reason; if all are of one prefill instance, look there",
            instances=(*_only_peer(evidence, instance), instance.name),
        )


def _failed_records(evidence: Evidence, instance: InstanceView) -> Iterator[SideRecord]:
    for transfer in evidence.now.transfers:
        for record in transfer.decode:
            if record.instance == instance.name and record.outcome in ("failed", "timed_out"):
                yield record


def _only_peer(evidence: Evidence, instance: InstanceView) -> tuple[str, ...]:
    """The prefill instance of all failed transfers, if it is one: its own fault then explains these."""
    peers = {evidence.owners.get(record.peer, "") for record in _failed_records(evidence, instance)}
    return tuple(peers) if len(peers) == 1 and "" not in peers else ()


def _reasons(evidence: Evidence, instance: InstanceView) -> str:
    reasons = Counter(plain(record.reason, 120) for record in _failed_records(evidence, instance) if record.reason)
    return f". Most often: {reasons.most_common(1)[0][0]}" if reasons else ""


def late_messages(evidence: Evidence) -> Iterator[Symptom]:
    """T011: registrations after the lease, answers after decode has given up."""
    too_late = Counter(
        name
        for transfer in evidence.now.transfers
        for name in {
            one.instance for one in transfer.decode if one.outcome == "failed" and one.reason.startswith("expired")
        }
    )
    for instance in evidence.now.instances:
        if not instance.ranks:
            continue
        late = max((_messages(evidence, instance, rank, _LATE) for rank in instance.ranks), default=0)
        expired = too_late[instance.name]
        # Some are harmless: messages are sent again when an answer is late.
        ended = evidence.most_growth(instance, lambda rank: sum(rank.outcomes.values()) if rank.outcomes else None)
        many = late >= max(evidence.settings.late_least_count, evidence.settings.late_share * ended)
        if not expired and not many:
            continue
        told = []
        if expired:
            told.append(f"{count(expired, 'registration')} came after prefill's lease had expired")
        if many:
            told.append(f"{count(late, 'message')} came for transfers it no longer knows")
        yield CODES["T011"].symptom(
            instance.name,
            f"{instance.name}: {' and '.join(told)}, within {seconds(evidence.window_s)}",
            f"Decode is admitted later than transfer.lease_s ({seconds(evidence.settings.lease_s)}) allows, or "
            "messages are slow: look at decode's queue, or set a longer lease_s",
            instances=(instance.name,),
        )


def messages_refused(evidence: Evidence) -> Iterator[Symptom]:
    """T016: messages that are not understood."""
    for instance in evidence.now.instances:
        refused = max((_messages(evidence, instance, rank, _REFUSED) for rank in instance.ranks), default=0)
        if not refused:
            continue
        kinds = listed(
            name.rsplit("/", 1)[-1]
            for rank in instance.ranks
            for name in sorted(rank.notifications)
            if rank.notifications[name] and name.rsplit("/", 1)[-1] in _REFUSED
        )
        yield CODES["T016"].symptom(
            instance.name,
            f"{instance.name} refused {count(refused, 'message')} within {seconds(evidence.window_s)} ({plain(kinds)})",
            "'version' means another release of the connector on the other side: pdctl up --apply on all hosts. Others "
            "mean that something else sends to this engine's NIXL agent or side channel",
            instances=(instance.name,),
        )


def _messages(evidence: Evidence, instance: InstanceView, rank: RankView, results: tuple[str, ...]) -> int:
    def read(one: RankView) -> int | None:
        if not one.notifications:
            return None
        return sum(
            number
            for name, number in one.notifications.items()
            if "/received/" in name and name.rsplit("/", 1)[-1] in results and not name.startswith("ALIVE/")
        )

    return evidence.growth(instance, rank, read)


def leases_expire(evidence: Evidence) -> Iterator[Symptom]:
    """T013: a good share of what prefill computes is never fetched."""
    settings = evidence.settings
    for instance in evidence.of_role("prefill"):
        expired = evidence.most_growth(instance, outcome("prefill/expired"))
        completed = evidence.most_growth(instance, outcome("prefill/completed"))
        if expired < settings.expired_least_count or expired < settings.expired_share * (expired + completed):
            continue
        yield CODES["T013"].symptom(
            instance.name,
            f"{instance.name}: the lease of {count(expired, 'request')} expired within {seconds(evidence.window_s)}, "
            f"while {completed} were completed; each was computed for nothing",
            "Does the router send requests to decode that prefill has, and is decode full? Look at the decode "
            f"instances' queues; transfer.lease_s is {seconds(settings.lease_s)}",
            instances=(instance.name,),
        )


def slow_post(evidence: Evidence) -> Iterator[Symptom]:
    """T014: the time from match to post is long, or grows, as with blocks that are more and more scattered."""
    settings = evidence.settings
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for transfer in evidence.now.transfers:
        for record in transfer.prefill:
            if record.outcome == "completed" and {"matched", "posted"} <= record.stages.keys():
                took = record.stages["posted"] - record.stages["matched"]
                times[record.instance].append((took, took / max(record.descriptors, 1)))
    for name, found in times.items():
        if len(found) < settings.slow_post_least_count:
            continue
        third = len(found) // 3
        usual = median(took for took, _ in found)
        # Ended ones come latest first. By descriptor, since longer prompts have more.
        newest, oldest = median(each for _, each in found[:third]), median(each for _, each in found[-third:])
        newest_s, oldest_s = median(took for took, _ in found[:third]), median(took for took, _ in found[-third:])
        grows = newest > settings.slow_post_growth * oldest and newest_s > settings.slow_post_after_s / 10
        if usual < settings.slow_post_after_s and not grows:
            continue
        if grows:
            what = (
                f"takes ever longer from match to post: {seconds(oldest_s)} to {seconds(newest_s)} over the last "
                f"{len(found)} transfers, and {newest / max(oldest, 1e-9):.0f} times as long for each descriptor"
            )
        else:
            what = (
                f"takes {seconds(usual)} (median) from match to post, expected under "
                f"{seconds(settings.slow_post_after_s)}"
            )
        yield CODES["T014"].symptom(
            name,
            f"{name} {what}",
            f"Blocks are scattered into many descriptors, or the writer lacks CPU: look at pdctl_descriptors_total and "
            f"at the load of {evidence.host_of(name) or 'its host'}; larger --block-size makes fewer descriptors",
            instances=(name,),
            host=evidence.host_of(name),
        )


def pair_broken(evidence: Evidence) -> Iterator[Symptom]:
    """T015: every transfer between two instances fails."""
    good: Counter[tuple[str, str]] = Counter()
    bad: Counter[tuple[str, str]] = Counter()
    for transfer, prefill, decode in pairs_of(evidence.now.transfers, evidence):
        if any(one.peer and one.peer not in evidence.engines for one in (*transfer.prefill, *transfer.decode)):
            # With an engine that is gone: what failed with it says nothing about the present one.
            continue
        verdict = _verdict(transfer)
        if verdict is not None and prefill and decode:
            (good if verdict else bad)[prefill, decode] += 1
    broken = sorted(p for p, number in bad.items() if number >= evidence.settings.pair_failures and not good[p])
    # An instance that serves nobody is one fault, not one for each that it should serve.
    alone: set[tuple[str, str]] = set()
    for side in (0, 1):
        other = 1 - side
        for name in dict.fromkeys(pair[side] for pair in broken):
            pairs = [pair for pair in broken if pair[side] == name and pair not in alone]
            if len(pairs) < 2 or any(pair[side] == name for pair in good if good[pair]):
                continue
            alone.update(pairs)
            yield _broken(evidence, name, "all", pairs, sum(bad[pair] for pair in pairs), [one[other] for one in pairs])
    for pair in broken:
        if pair not in alone:
            yield _broken(evidence, f"{pair[0]}>{pair[1]}", "", [pair], bad[pair], [], _others(good, pair))


def _verdict(transfer: TransferView) -> bool | None:
    """Whether a transfer succeeded; None if it has not ended, or was given up by its client."""
    outcomes = {one.outcome for one in (*transfer.decode, *transfer.prefill)}
    if transfer.in_flight or not transfer.decode:
        return None
    if outcomes & {"failed", "timed_out"}:
        return False
    return True if {one.outcome for one in transfer.decode} == {"received"} else None


def _others(good: Counter[tuple[str, str]], pair: tuple[str, str]) -> str:
    prefill = sum(number for one, number in good.items() if one[0] == pair[0])
    decode = sum(number for one, number in good.items() if one[1] == pair[1])
    if prefill and decode:
        return "; both succeed with others, so it is what is between these two"
    if prefill or decode:
        return f"; {pair[0] if prefill else pair[1]} succeeds with others, so look at {pair[1] if prefill else pair[0]}"
    return ""


def _broken(
    evidence: Evidence,
    subject: str,
    extent: str,
    pairs: list[tuple[str, str]],
    failures: int,
    peers: list[str],
    others: str = "",
) -> Symptom:
    router = next((one for one in evidence.now.instances if one.role == "router"), None)
    told = "; the router is up and still sends requests there" if router is not None and router.healthy else ""
    if extent:
        what = f"all {failures} transfers of {subject} with {listed(peers)} failed lately"
        instances: tuple[str, ...] = (subject,)
        step = f"pdctl logs {subject}; run pdctl doctor --only NET,XFER"
    else:
        (prefill, decode) = pairs[0]
        what = f"all {failures} transfers from {prefill} to {decode} failed lately, none succeeded{others}"
        instances = (prefill, decode)
        hosts = f"{evidence.host_of(prefill)}-{evidence.host_of(decode)}"
        step = f"Link {hosts}? Run pdctl doctor --only NET,XFER; pdctl logs {decode} has the reasons"
    return CODES["T015"].symptom(
        subject, what + told, step, instances=instances, host=evidence.host_of(subject) if extent else ""
    )
