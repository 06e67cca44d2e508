"""Rules on single transfers: the pair of stages, not the age of one side, names the fault. At most one for each."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.watch.alerts import Symptom
from pdctl.watch.rules.codes import CODES
from pdctl.watch.rules.evidence import Evidence, count, pairs_of, seconds, short_key, size
from pdctl.watch.snapshot import SideRecord, TransferView
from pdctl.watch.wording import plain

_PREFILL_STAGES = ("prefilling", "ready", "matched", "posted")
_FAILED = ("failed", "expired", "cancelled")


def judge_transfers(evidence: Evidence) -> Iterator[Symptom]:
    """T001 to T005, T008, T010 and T012."""
    for transfer, prefill, decode in pairs_of(evidence.now.transfers, evidence):
        symptom = _judge(evidence, transfer, prefill, decode)
        if symptom is not None:
            yield symptom


def _judge(evidence: Evidence, transfer: TransferView, prefill: str, decode: str) -> Symptom | None:
    if not transfer.in_flight:
        return _contradiction(transfer, prefill, decode)
    waiting = max((one for one in transfer.decode if not one.outcome), key=lambda one: one.stage_age_s, default=None)
    flying = [one for one in transfer.prefill if not one.outcome]
    judged = flying if waiting is None else [waiting, *flying]
    if not all(evidence.fresh(one.reading_age_s) for one in judged):
        return None
    case = _Case(evidence, transfer, prefill, decode)
    if waiting is not None and waiting.stage == "allocated":
        return case.decode_does_not_connect(waiting)
    if flying:
        behind = min(flying, key=lambda one: (_place(one.stage), -one.stage_age_s))
        if behind.stage == "ready":
            return case.unmatched(behind, waiting) if waiting is not None else case.nobody_came(behind)
        if behind.stage == "matched":
            return case.prefill_does_not_connect(behind)
        if behind.stage == "posted":
            return case.write_does_not_end(behind, waiting)
        return None
    if waiting is None:
        return None
    return case.answer_lost(waiting) if transfer.prefill else case.no_record(waiting)


def _place(stage: str) -> int:
    return _PREFILL_STAGES.index(stage) if stage in _PREFILL_STAGES else len(_PREFILL_STAGES)


def _contradiction(transfer: TransferView, prefill: str, decode: str) -> Symptom | None:
    if not transfer.decode or any(one.outcome != "received" for one in transfer.decode):
        return None
    # A key may have been tried before: a rank contradicts only if none of its records is complete.
    complete = {(one.instance, one.rank) for one in transfer.prefill if one.outcome == "completed"}
    against = next(
        (one for one in transfer.prefill if one.outcome in _FAILED and (one.instance, one.rank) not in complete), None
    )
    if against is None:
        return None
    reason = f" ({plain(against.reason, 160)})" if against.reason else ""
    return CODES["T010"].symptom(
        transfer.key,
        f"{decode or 'decode'} took transfer {short_key(transfer.key)} as received, but {against.instance} rank "
        f"{against.rank} ended it as {against.outcome}{reason}: the text of this answer may be wrong",
        f"Do not trust this answer. Keep both logs (pdctl capture {decode or prefill}) and report it: the connector "
        "must never do this",
        instances=_names(prefill, decode),
        key=transfer.key,
    )


def _names(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name)


class _Case:
    """One transfer in flight."""

    def __init__(self, evidence: Evidence, transfer: TransferView, prefill: str, decode: str) -> None:
        self.evidence, self.transfer, self.prefill, self.decode = evidence, transfer, prefill, decode
        self.label = f"transfer {short_key(transfer.key)}"

    def _symptom(self, code: str, message: str, next_step: str, host: str = "") -> Symptom:
        return CODES[code].symptom(
            self.transfer.key,
            f"{self.label}: {message}",
            next_step,
            instances=_names(self.prefill, self.decode),
            host=host,
            key=self.transfer.key,
        )

    def _usual(self, side: str, stage: str) -> str:
        p99 = self.evidence.p99_s(side, stage)
        limit = self.evidence.threshold_s(side, stage)
        return f"the recent p99 is {seconds(p99)}" if p99 is not None else f"expected within {seconds(limit)}"

    def _link(self) -> str:
        hosts = [self.evidence.host_of(self.prefill), self.evidence.host_of(self.decode)]
        if not all(hosts):
            return "Run pdctl doctor --only XFER"
        if hosts[0] == hosts[1]:
            return f"Both are on {hosts[0]}. Run pdctl doctor --only XFER"
        return f"Link {hosts[0]}-{hosts[1]}? Run pdctl doctor --only XFER"

    def _waits(self, waiting: SideRecord | None) -> str:
        if waiting is not None:
            return f"; {self.evidence.who(waiting)} has waited for {seconds(waiting.stage_age_s)}"
        ended = next((one for one in self.transfer.decode if one.outcome), None)
        if ended is not None:
            fenced = "" if ended.outcome == "received" else ", its blocks may be in quarantine"
            return f"; {self.evidence.who(ended)} has ended it as {ended.outcome}{fenced}"
        return "; decode has no record of it"

    def write_does_not_end(self, posted: SideRecord, waiting: SideRecord | None) -> Symptom | None:
        held = self.evidence.held_s(posted)
        limit = self.evidence.threshold_s("prefill", "posted")
        if held < limit:
            return None
        # A link that is full completes other WRITEs, in order; that is a queue, up to a point.
        queues = (posted.instance, posted.peer) in self.evidence.moving and not self.evidence.overtaken(posted)
        if queues and held < 4 * limit:
            return None
        return self._symptom(
            "T002",
            f"{self.evidence.who(posted)} posted {count(posted.descriptors, 'descriptor')} ({size(posted.bytes)}) "
            f"{seconds(posted.stage_age_s)} ago, NIXL still in progress; {self._usual('prefill', 'posted')}"
            f"{self._waits(waiting)}",
            self._link(),
        )

    def prefill_does_not_connect(self, matched: SideRecord) -> Symptom | None:
        held = self.evidence.held_s(matched)
        limit = self.evidence.threshold_s("prefill", "matched", self.evidence.settings.connect_after_s)
        if held < limit:
            return None
        if (matched.instance, matched.peer) in self.evidence.moving and held < 4 * limit:
            return None
        return self._symptom(
            "T008",
            f"{self.evidence.who(matched)} has had the blocks and the registration for {seconds(matched.stage_age_s)} "
            f"and could not post the WRITE: it is not connected to {self.decode or 'decode'}; "
            f"{self._usual('prefill', 'matched')}",
            f"Is the side channel of {self.decode or 'decode'} reachable from {self.prefill}? Run pdctl doctor --only "
            f"NET,XFER; pdctl logs {self.prefill}",
        )

    def decode_does_not_connect(self, waiting: SideRecord) -> Symptom | None:
        held = self.evidence.held_s(waiting)
        limit = self.evidence.threshold_s("decode", "allocated", self.evidence.settings.connect_after_s)
        if held < limit:
            return None
        return self._symptom(
            "T008",
            f"{self.evidence.who(waiting)} has had blocks for {seconds(waiting.stage_age_s)} and could not register: "
            f"it is not connected to {self.prefill or 'its prefill engine'}{self._gone(waiting)}; "
            f"{self._usual('decode', 'allocated')}",
            f"Is the side channel of {self.prefill or 'prefill'} reachable from {self.decode}? Run pdctl doctor --only "
            f"NET,XFER; pdctl logs {self.decode}",
        )

    def _gone(self, waiting: SideRecord) -> str:
        if not waiting.peer or waiting.peer in self.evidence.engines:
            return ""
        if self.prefill:
            return f" (engine {plain(waiting.peer, 60)} is gone, {self.prefill} runs another one now)"
        return f" (engine {plain(waiting.peer, 60)} is none of this cluster now)"

    def unmatched(self, ready: SideRecord, waiting: SideRecord) -> Symptom | None:
        limit = self.evidence.threshold_s("prefill", "ready")
        if min(self.evidence.held_s(ready), self.evidence.held_s(waiting)) < limit:
            return None
        return self._symptom(
            "T001",
            f"{self.evidence.who(waiting)} registered {seconds(waiting.stage_age_s)} ago and "
            f"{self.evidence.who(ready)} has had its blocks ready for {seconds(ready.stage_age_s)}, but they have not "
            f"matched; {self._usual('prefill', 'ready')}",
            f"The registration was lost or is refused: look for the request in pdctl logs {self.prefill} and at "
            f"pdctl_notifications_total there; decode registers again every 5 s. {self._link()}",
        )

    def no_record(self, waiting: SideRecord) -> Symptom | None:
        known = [self.prefill] if self.prefill else [one.name for one in self.evidence.of_role("prefill")]
        # A record that is not there proves nothing where not all could be read.
        if not known or not all(self.evidence.readable(name) for name in known):
            return None
        limit = self.evidence.threshold_s("decode", "registered")
        if self.evidence.held_s(waiting) < limit:
            return None
        return self._symptom(
            "T001",
            f"{self.evidence.who(waiting)} registered {seconds(waiting.stage_age_s)} ago, and "
            f"{self.prefill or 'no prefill instance'} has {'no' if self.prefill else 'a'} record of the request"
            f"{self._gone(waiting)}; {self._usual('decode', 'registered')}",
            f"Did the request reach prefill at all? Look for it in pdctl logs router and pdctl logs "
            f"{self.prefill or 'prefill-0'}",
        )

    def nobody_came(self, ready: SideRecord) -> Symptom | None:
        held, settings = self.evidence.held_s(ready), self.evidence.settings
        beyond_lease = held >= settings.lease_s + settings.lease_margin_s
        if held < self.evidence.threshold_s("prefill", "ready"):
            return None
        decodes = [one for one in self.evidence.of_role("decode") if not self.decode or one.name == self.decode]
        if not all(self.evidence.readable(one.name) for one in decodes):
            return None
        for decode in decodes:
            # Requests that wait for room have no record yet, and their leases are renewed: a queue, while it moves.
            if decode.requests_waiting and self.evidence.advances(decode.name, settings.slow_prefill_after_s):
                return None
        if beyond_lease:
            return self._symptom(
                "T012",
                f"{self.evidence.who(ready)} has held {count(ready.blocks, 'block')} for {seconds(ready.stage_age_s)}, "
                f"beyond the lease of {seconds(settings.lease_s)}, and no decode instance waits for them",
                f"Does KV use of {self.prefill} rise? Look for the request in pdctl logs {self.prefill}; a restart of "
                f"{self.prefill} frees the blocks",
                self.evidence.host_of(self.prefill),
            )
        if self.transfer.decode:
            return None
        return self._symptom(
            "T005",
            f"{self.evidence.who(ready)} has had the blocks ready for {seconds(ready.stage_age_s)}, and no decode "
            f"instance has a record of the request; {self._usual('prefill', 'ready')}. The lease ends after "
            f"{seconds(settings.lease_s)}",
            "Did the router send the request to decode, or has the client left? Look at pdctl logs router and at the "
            "decode instances' queues",
        )

    def answer_lost(self, waiting: SideRecord) -> Symptom | None:
        if self.evidence.known_ended_s(self.transfer, waiting) < self.evidence.settings.answer_s:
            return None
        failed = next((one for one in self.transfer.prefill if one.outcome != "completed"), None)
        since = f"{self.evidence.who(waiting)} still waits, {seconds(waiting.stage_age_s)} after it registered"
        if failed is None:
            writer = self.transfer.prefill[0]
            return self._symptom(
                "T003",
                f"{writer.instance} has written all {size(sum(one.bytes for one in self.transfer.prefill))} and "
                f"completed, but {since}: the completion never came",
                f"Decode asks again every 5 s, so messages to {self.prefill} or back are lost. {self._link()}; look at "
                f"pdctl_notifications_total of both",
            )
        reason = f" ({plain(failed.reason, 160)})" if failed.reason else ""
        return self._symptom(
            "T004",
            f"{self.evidence.who(failed)} ended it as {failed.outcome}{reason}, but {since}: it was never told",
            f"The request ends after transfer.timeout_s ({seconds(self.evidence.settings.timeout_s)}). {self._link()}; "
            f"pdctl logs {self.prefill}",
        )
