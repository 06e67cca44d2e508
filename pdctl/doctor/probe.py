"""Makes real NIXL WRITEs between prefill and decode hosts and collects what they showed.

What runs on the hosts, and how it is talked to, is described in ``connector/pdctl_connector/probe.py``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pdctl.doctor import probe_transport
from pdctl.doctor.facts import HostFacts
from pdctl.doctor.probe_facts import ProbeFacts, ProbeResult
from pdctl.doctor.probe_plan import LIMITS_S, BlockShape, Pair, block_shape, choose_pairs, new_seed, side_request
from pdctl.doctor.probe_script import PREFIX, probe_source
from pdctl.errors import CommandTimeout, PdctlError
from pdctl.hosts.base import Deadline
from pdctl.hosts.conversation import Conversation, talk
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan, InstancePlan

PARALLEL = 16
"""Most pairs that are probed at once; no host is in two of them."""
OnDone = Callable[[str, ProbeResult], None]

WRITER, TARGET = "writer", "target"
_START_S = 30.0
"""How long a host may take until its first word, besides the limit of that step."""
_SLACK_S = 6.0
"""How much longer than a step's own limit its end is waited for: the host ends it by itself, and explains it."""
_LAST_WORDS_S = 2.0
_SEND_S = 10.0
_LOG_LINES = 25


def probe(
    fleet: Fleet,
    plan: ClusterPlan,
    facts: Mapping[str, HostFacts],
    *,
    pairs: int | None,
    timeout_s: float,
    on_done: OnDone | None = None,
) -> ProbeFacts:
    """Write from prefill hosts into memory of decode hosts, over NIXL.

    A host takes part in one probe at a time; pairs without a common host are probed side by side.

    Args:
        fleet: the hosts.
        plan: what the instances would be started with.
        facts: of the hosts that could be reached; pairs with another host are not probed.
        pairs: most pairs; None: all if there are few, else so many that every host is in one.
        timeout_s: how long one pair may take.
        on_done: called in this thread with the pair in words and its result, as soon as it is known.

    Raises:
        PdctlError: the probe is not part of this installation. What goes wrong on hosts is in the results.
    """
    source = probe_source()
    writers = {instance.host: instance for instance in reversed(plan.prefill)}
    targets = {instance.host: instance for instance in reversed(plan.decode)}
    choice = choose_pairs(
        [instance.host for instance in plan.prefill], [instance.host for instance in plan.decode], facts, pairs
    )

    def start(pair: Pair) -> _PairProbe:
        shape = block_shape(plan.spec, "prefill", facts[pair[0]])
        if not shape.known:
            shape = block_shape(plan.spec, "decode", facts[pair[1]])
        return _PairProbe(fleet, plan, writers[pair[0]], targets[pair[1]], shape, source, timeout_s)

    results = _run_all(choice.probed, start, on_done)
    return ProbeFacts(tuple(results[pair] for pair in choice.probed), choice.left_out)


def _run_all(
    pairs: tuple[Pair, ...], start: Callable[[Pair], _PairProbe], on_done: OnDone | None
) -> dict[Pair, ProbeResult]:
    """Probe all pairs, in threads that are daemons: a hung one must not keep the program from ending."""
    waiting = list(pairs)
    running: dict[Pair, _PairProbe] = {}
    results: dict[Pair, ProbeResult] = {}
    finished: queue.SimpleQueue[tuple[Pair, ProbeResult | BaseException]] = queue.SimpleQueue()

    def work(pair: Pair, one: _PairProbe) -> None:
        try:
            finished.put((pair, one.run()))
        except BaseException as error:  # handed to the thread that waits
            finished.put((pair, error))

    try:
        while waiting or running:
            busy = {host for pair in running for host in pair}
            for pair in list(waiting):
                if len(running) < PARALLEL and not busy & set(pair):
                    waiting.remove(pair)
                    busy |= set(pair)
                    running[pair] = start(pair)
                    threading.Thread(target=work, args=(pair, running[pair]), name="probe", daemon=True).start()
            pair, result = finished.get()
            del running[pair]
            if isinstance(result, BaseException):
                raise result
            results[pair] = result
            if on_done is not None:
                on_done(f"{pair[0]} -> {pair[1]}", result)
    finally:
        # After Ctrl-C: the hosts end their processes when nobody talks to them any more.
        for one in running.values():
            one.close()
    return results


class _Failed(Exception):
    """A probe cannot go on: the stage it ended in, and why."""

    def __init__(self, stage: str, error: str) -> None:
        super().__init__(error)
        self.stage = stage


@dataclass
class _Side:
    """One host of a pair, and the thread that listens to it."""

    role: str
    host: str
    request: dict[str, Any]
    stage: str = "start"
    ended: bool = False
    log: list[str] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)


class _PairProbe:
    """One WRITE between two hosts, from start to end."""

    def __init__(
        self,
        fleet: Fleet,
        plan: ClusterPlan,
        prefill: InstancePlan,
        decode: InstancePlan,
        shape: BlockShape,
        source: bytes,
        timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._source = source
        self._shape = shape
        self._deadline = Deadline(timeout_s)
        seed = new_seed()
        self._sides = {
            role: _Side(
                role,
                instance.host,
                side_request(plan, instance, peer.host, shape, seed=seed, lifetime_s=timeout_s),
            )
            for role, instance, peer in ((WRITER, prefill, decode), (TARGET, decode, prefill))
        }
        self._writer, self._target = self._sides[WRITER], self._sides[TARGET]
        self._news: queue.SimpleQueue[tuple[_Side, dict[str, Any] | PdctlError]] = queue.SimpleQueue()
        self._events: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._conversations: dict[str, Conversation] = {}
        self._closed = False

    def run(self) -> ProbeResult:
        """The result, whatever happens."""
        try:
            for side in self._sides.values():
                threading.Thread(target=self._listen, args=(side,), name=f"probe {side.host}", daemon=True).start()
            try:
                measured = self._measure()
                self._keep(measured)
                result = ProbeResult(**measured, ok=True, stage="done")
            except _Failed as failed:
                result = ProbeResult(**self._measured(), ok=False, stage=failed.stage, error=str(failed))
            return replace(result, log=self._last_words())
        finally:
            self.close()

    def close(self) -> None:
        """End the processes on both hosts."""
        with self._lock:
            self._closed = True
            conversations = list(self._conversations.values())
        for conversation in conversations:
            conversation.close()

    # --- listening, one thread for each host --------------------------------------------------------------------------

    def _listen(self, side: _Side) -> None:
        try:
            conversation = talk(
                self._fleet.host(side.host),
                self._source,
                prefix=PREFIX,
                what="the NIXL probe",
                lifetime_s=self._deadline.timeout_s + _SLACK_S,
                send_timeout_s=_SEND_S,
                pythons=(side.request["python"],),
            )
            with self._lock:
                self._conversations[side.role] = conversation
                closed = self._closed
            if closed:
                conversation.close()
                return
            conversation.send(side.request, timeout_s=_SEND_S)
            while True:
                event = conversation.receive(timeout_s=self._deadline.remaining_s + _SLACK_S)
                self._news.put((side, event))
                if event.get("event") == "ended":
                    return
        except PdctlError as error:
            self._news.put((side, error))

    # --- the steps, all in one thread ---------------------------------------------------------------------------------

    def _measure(self) -> dict[str, Any]:
        """Everything from loading NIXL to the last notification.

        Raises:
            _Failed: a step failed.
        """
        writer, target = self._writer, self._target
        start_s = _START_S + sum(LIMITS_S[stage] for stage in ("import", "backend", "register"))
        ready = {side.role: self._expect(side, "ready", start_s) for side in (target, writer)}
        if ready[WRITER]["backend"] != ready[TARGET]["backend"]:
            error = f"NIXL uses {ready[WRITER]['backend']} on prefill and {ready[TARGET]['backend']} on decode"
            raise _Failed("backend", error)
        # First the target: it answers the writer from then on.
        self._ask(target, {"do": "connect", "peer": ready[WRITER]}, "connected", LIMITS_S["handshake"])
        self._ask(writer, {"do": "connect", "peer": ready[TARGET]}, "connected", LIMITS_S["handshake"])
        for phase, notifications in (("latency", "writes"), ("batch", "rounds")):
            made = self._ask(writer, {"do": phase}, phase, LIMITS_S["write"])
            verify = {
                "do": "verify",
                "phase": phase,
                "notifications": made[notifications],
                "blocks": made.get("blocks"),
            }
            self._ask(target, verify, "verified", LIMITS_S["notify"] + LIMITS_S["verify"], note=f"verified {phase}")
        self._ask(writer, {"do": "notify"}, "notified", LIMITS_S["notify"])
        return self._measured()

    def _measured(self) -> dict[str, Any]:
        """What is known by now, as fields of the result."""
        ready, peer_ready = self._events.get("writer ready", {}), self._events.get("target ready", {})
        latency, batch = self._events.get("latency", {}), self._events.get("batch", {})
        seconds, notified = batch.get("seconds"), self._events.get("notified", {})
        transport = self._transport(batch) if batch else probe_transport.Transport("", "")
        kinds = {event["memory"] for event in (ready, peer_ready) if event}
        notes = dict.fromkeys(note for event in (ready, peer_ready, batch) for note in event.get("notes", ()))
        evidence = "; ".join(filter(None, (transport.evidence, *notes)))
        return {
            "prefill": self._writer.host,
            "decode": self._target.host,
            "backend": batch.get("backend") or ready.get("backend", ""),
            "transport": transport.name,
            "transport_evidence": evidence,
            "memory": "host" if "host" in kinds else next(iter(kinds), ""),
            "block_bytes": latency.get("block_bytes", self._shape.block_bytes),
            "block_p50_us": latency.get("p50_us"),
            "block_p99_us": latency.get("p99_us"),
            "batch_bytes": batch.get("bytes"),
            "bandwidth_mb_s": batch["bytes"] / seconds / 1e6 if seconds else None,
            "notification_us": notified.get("p50_us"),
        }

    def _transport(self, batch: Mapping[str, Any]) -> probe_transport.Transport:
        before = self._events.get("verified latency", {}).get("counters", {})
        after = self._events.get("verified batch", {}).get("counters", {})
        return probe_transport.judge(
            probe_transport.Evidence(
                backend=batch["backend"],
                moved_bytes=batch["bytes"] * batch["rounds"],
                lanes=self._writer.lanes,
                prefill=probe_transport.moved(batch["before"], batch["after"]),
                decode=probe_transport.moved(before, after),
            )
        )

    def _keep(self, measured: Mapping[str, Any]) -> None:
        """Have both hosts keep the baseline. That one cannot is told in its log, and no failure of the probe."""
        record = {"schema": 1, **{name: value for name, value in measured.items() if name != "transport_evidence"}}
        for side in (self._writer, self._target):
            stored = self._ask(side, {"do": "store", "record": record}, "stored", _SEND_S)
            if stored["error"]:
                side.log.append(f"the baseline was not kept: {stored['error']}")

    def _ask(
        self, side: _Side, message: Mapping[str, Any], event: str, limit_s: float, note: str = ""
    ) -> dict[str, Any]:
        self._send(side, message)
        return self._expect(side, event, limit_s, note)

    def _send(self, side: _Side, message: Mapping[str, Any]) -> None:
        try:
            self._conversations[side.role].send(message, timeout_s=_SEND_S)
        except PdctlError as error:
            raise _Failed(side.stage, str(error)) from error

    def _expect(self, side: _Side, event: str, limit_s: float, note: str = "") -> dict[str, Any]:
        """Wait for an event of one side; a failure of either ends the waiting.

        Raises:
            _Failed: a side failed, or it took too long.
        """
        key = note or (event if event in ("latency", "batch", "notified") else f"{side.role} {event}")
        patience = Deadline(min(limit_s + _SLACK_S, self._deadline.remaining_s))
        while key not in self._events:
            try:
                self._take(*self._news.get(timeout=max(0.001, patience.remaining_s)), note)
            except queue.Empty:
                raise self._too_long(side, patience.timeout_s) from None
        return self._events[key]

    def _take(self, side: _Side, news: dict[str, Any] | PdctlError, note: str) -> None:
        if isinstance(news, CommandTimeout):
            raise _Failed("timeout", f"{news} (in the step `{side.stage}`)")
        if isinstance(news, PdctlError):
            raise _Failed(side.stage, f"{news}{f'; {news.hint}' if news.hint else ''}")
        kind = str(news.get("event"))
        side.lanes = news.get("lanes", side.lanes)
        if kind == "stage":
            side.stage = news["stage"]
        elif kind == "failed":
            raise _Failed(news["stage"], f"{side.host}: {news['error']}")
        elif kind == "ended":
            self._take_end(side, news)
            raise _Failed(side.stage, f"{side.host}: the probe ended by itself in the step `{side.stage}`")
        else:
            key = kind if kind in ("latency", "batch", "notified") else f"{side.role} {kind}"
            self._events[note if note and kind == "verified" else key] = news

    def _too_long(self, side: _Side, waited_s: float) -> _Failed:
        if self._deadline.passed:
            took = f"the probe took longer than {self._deadline.timeout_s:g} s in all"
            return _Failed("timeout", f"{took}; it was waiting for {side.host} in the step `{side.stage}`")
        return _Failed("timeout", f"{side.host} said nothing for {waited_s:.0f} s in the step `{side.stage}`")

    # --- the end ------------------------------------------------------------------------------------------------------

    def _last_words(self) -> str:
        """Tell both sides to end, and wait a little for their logs."""
        patience = Deadline(_LAST_WORDS_S)
        for role, conversation in list(self._conversations.items()):
            try:
                conversation.send({"do": "end"}, timeout_s=patience.remaining_s)
            except PdctlError:
                self._sides[role].ended = True
        while not patience.passed and not all(side.ended for side in self._sides.values()):
            try:
                side, news = self._news.get(timeout=max(0.001, patience.remaining_s))
            except queue.Empty:
                break
            if isinstance(news, PdctlError):
                side.ended = True
            elif news.get("event") == "ended":
                self._take_end(side, news)
        parts = [(f"{side.host} ({side.role})", side.log[-_LOG_LINES:]) for side in (self._writer, self._target)]
        return "\n".join(f"{name}: {line}" for name, lines in parts for line in lines)

    def _take_end(self, side: _Side, news: Mapping[str, Any]) -> None:
        side.ended = True
        side.log = [*news.get("log", ()), *side.log]
        side.lanes = news.get("lanes", side.lanes)
