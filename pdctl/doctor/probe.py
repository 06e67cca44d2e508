"""Makes real NIXL WRITEs between prefill and decode hosts and collects what they showed.

What runs on the hosts, and how it is talked to, is described in ``connector/pdctl_connector/probe.py``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pdctl.doctor import probe_transport
from pdctl.doctor.facts import HostFacts
from pdctl.doctor.probe_facts import ProbeFacts, ProbeResult
from pdctl.doctor.probe_plan import LIMITS_S, Pair, block_shape, choose_pairs
from pdctl.doctor.probe_script import probe_source
from pdctl.doctor.probe_session import SEND_S, ProbeFailed, ProbeSession
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan

PARALLEL = 16
"""Most pairs that are probed at once; no host is in two of them."""
OnDone = Callable[[str, ProbeResult], None]


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


class _PairProbe(ProbeSession):
    """One WRITE between two hosts, from start to end."""

    def run(self) -> ProbeResult:
        """The result, whatever happens."""
        try:
            self.listen()
            try:
                measured = self._measure()
                self._keep(measured)
                result = ProbeResult(**measured, ok=True, stage="done")
            except ProbeFailed as failed:
                result = ProbeResult(**self._measured(), ok=False, stage=failed.stage, error=str(failed))
            return replace(result, log=self.last_words())
        finally:
            self.close()

    def _measure(self) -> dict[str, Any]:
        """Everything from loading NIXL to the last notification.

        Raises:
            ProbeFailed: a step failed.
        """
        self.connect()
        writer, target = self.writer, self.target
        for phase, notifications in (("latency", "writes"), ("batch", "rounds")):
            made = self.ask(writer, {"do": phase}, phase, LIMITS_S["write"])
            verify = {
                "do": "verify",
                "phase": phase,
                "notifications": made[notifications],
                "blocks": made.get("blocks"),
            }
            self.ask(target, verify, "verified", LIMITS_S["notify"] + LIMITS_S["verify"], note=f"verified {phase}")
        self.ask(writer, {"do": "notify"}, "notified", LIMITS_S["notify"])
        return self._measured()

    def _measured(self) -> dict[str, Any]:
        """What is known by now, as fields of the result."""
        ready, peer_ready = self.events.get("writer ready", {}), self.events.get("target ready", {})
        latency, batch = self.events.get("latency", {}), self.events.get("batch", {})
        seconds, notified = batch.get("seconds"), self.events.get("notified", {})
        transport = self._transport(batch) if batch else probe_transport.Transport("", "")
        kinds = {event["memory"] for event in (ready, peer_ready) if event}
        notes = dict.fromkeys(note for event in (ready, peer_ready, batch) for note in event.get("notes", ()))
        evidence = "; ".join(filter(None, (transport.evidence, *notes)))
        return {
            "prefill": self.writer.host,
            "decode": self.target.host,
            "backend": batch.get("backend") or ready.get("backend", ""),
            "transport": transport.name,
            "transport_evidence": evidence,
            "memory": "host" if "host" in kinds else next(iter(kinds), ""),
            "block_bytes": latency.get("block_bytes", self.shape.block_bytes),
            "block_p50_us": latency.get("p50_us"),
            "block_p99_us": latency.get("p99_us"),
            "batch_bytes": batch.get("bytes"),
            "bandwidth_mb_s": batch["bytes"] / seconds / 1e6 if seconds else None,
            "notification_us": notified.get("p50_us"),
        }

    def _transport(self, batch: Mapping[str, Any]) -> probe_transport.Transport:
        before = self.events.get("verified latency", {}).get("counters", {})
        after = self.events.get("verified batch", {}).get("counters", {})
        return probe_transport.judge(
            probe_transport.Evidence(
                backend=batch["backend"],
                moved_bytes=batch["bytes"] * batch["rounds"],
                lanes=self.writer.lanes,
                prefill=probe_transport.moved(batch["before"], batch["after"]),
                decode=probe_transport.moved(before, after),
            )
        )

    def _keep(self, measured: Mapping[str, Any]) -> None:
        """Have both hosts keep the baseline. That one cannot is told in its log, and no failure of the probe."""
        record = {"schema": 1, **{name: value for name, value in measured.items() if name != "transport_evidence"}}
        for side in (self.writer, self.target):
            stored = self.ask(side, {"do": "store", "record": record}, "stored", SEND_S)
            if stored["error"]:
                side.log.append(f"the baseline was not kept: {stored['error']}")
