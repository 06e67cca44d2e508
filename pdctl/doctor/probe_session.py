"""Two hosts of a probe and the talk with both, from loading NIXL until it is connected, and at the end.

What is measured between them is decided by those who use it: ``probe.py`` and ``probe_sweep.py``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdctl.doctor.probe_plan import LIMITS_S, BlockShape, new_seed, side_request
from pdctl.doctor.probe_script import PREFIX
from pdctl.errors import CommandTimeout, HostError, PdctlError
from pdctl.hosts.base import Deadline
from pdctl.hosts.conversation import Conversation, talk
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan, InstancePlan

WRITER, TARGET = "writer", "target"
SEND_S = 10.0
"""How long a host may take to accept a message."""
_START_S = 30.0
"""How long a host may take until its first word, besides the limit of that step."""
_SLACK_S = 6.0
"""How much longer than a step's own limit its end is waited for: the host ends it by itself, and explains it."""
_LAST_WORDS_S = 2.0
_LOG_LINES = 25
_OF_WRITER = ("latency", "batch", "notified")
"""Events that only one side sends; the others are kept by side."""


class ProbeFailed(Exception):
    """A probe cannot go on.

    Args:
        stage: the one it ended in.
        error: why, for people.
        unreachable: whether a host could not be reached or logged in to.
    """

    def __init__(self, stage: str, error: str, *, unreachable: bool = False) -> None:
        super().__init__(error)
        self.stage = stage
        self.unreachable = unreachable


@dataclass
class Side:
    """One host of a pair, and what it said.

    Attributes:
        role: ``writer`` or ``target``.
        host: name.
        request: what it was asked to be.
        stage: the step it is in.
        ended: whether its process has.
        log: the last lines of it.
        lanes: what UCX said of its transports.
    """

    role: str
    host: str
    request: dict[str, Any]
    stage: str = "start"
    ended: bool = False
    log: list[str] = field(default_factory=list)
    lanes: list[str] = field(default_factory=list)


class ProbeSession:
    """A prefill host that can write into a decode host's memory over NIXL. For one thread, but for :meth:`close`.

    Args:
        fleet: the hosts.
        plan: what the instances would be started with.
        prefill: writes.
        decode: is written to.
        shape: of a block.
        source: the script (:func:`pdctl.doctor.probe_script.probe_source`).
        timeout_s: how long all may take.
        memory_bytes: so much memory is registered on both hosts, or less if there is little; None: as the doctor does.
    """

    def __init__(
        self,
        fleet: Fleet,
        plan: ClusterPlan,
        prefill: InstancePlan,
        decode: InstancePlan,
        shape: BlockShape,
        source: bytes,
        timeout_s: float,
        memory_bytes: int | None = None,
    ) -> None:
        self._fleet = fleet
        self._source = source
        self.shape = shape
        self.deadline = Deadline(timeout_s)
        seed = new_seed()
        sizes = {} if memory_bytes is None else {"batch_bytes": memory_bytes}
        self._sides = {
            role: Side(
                role,
                instance.host,
                {**side_request(plan, instance, peer.host, shape, seed=seed, lifetime_s=timeout_s), **sizes},
            )
            for role, instance, peer in ((WRITER, prefill, decode), (TARGET, decode, prefill))
        }
        self.writer, self.target = self._sides[WRITER], self._sides[TARGET]
        self._news: queue.SimpleQueue[tuple[Side, dict[str, Any] | PdctlError]] = queue.SimpleQueue()
        self.events: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._conversations: dict[str, Conversation] = {}
        self._closed = False

    def listen(self) -> None:
        """Start the process on both hosts, each with a thread that listens to it."""
        for side in self._sides.values():
            threading.Thread(target=self._listen, args=(side,), name=f"probe {side.host}", daemon=True).start()

    def close(self) -> None:
        """End the processes on both hosts."""
        with self._lock:
            self._closed = True
            conversations = list(self._conversations.values())
        for conversation in conversations:
            conversation.close()

    # --- listening, one thread for each host --------------------------------------------------------------------------

    def _listen(self, side: Side) -> None:
        try:
            conversation = talk(
                self._fleet.host(side.host),
                self._source,
                prefix=PREFIX,
                what="the NIXL probe",
                lifetime_s=self.deadline.timeout_s + _SLACK_S,
                send_timeout_s=SEND_S,
                pythons=(side.request["python"],),
            )
            with self._lock:
                self._conversations[side.role] = conversation
                closed = self._closed
            if closed:
                conversation.close()
                return
            conversation.send(side.request, timeout_s=SEND_S)
            while True:
                event = conversation.receive(timeout_s=self.deadline.remaining_s + _SLACK_S)
                self._news.put((side, event))
                if event.get("event") == "ended":
                    return
        except PdctlError as error:
            self._news.put((side, error))

    # --- the steps, all in one thread ---------------------------------------------------------------------------------

    def connect(self) -> None:
        """Wait until both have loaded NIXL and registered memory, and connect them.

        Raises:
            ProbeFailed: a step failed.
        """
        writer, target = self.writer, self.target
        start_s = _START_S + sum(LIMITS_S[stage] for stage in ("import", "backend", "register"))
        ready = {side.role: self.expect(side, "ready", start_s) for side in (target, writer)}
        if ready[WRITER]["backend"] != ready[TARGET]["backend"]:
            error = f"NIXL uses {ready[WRITER]['backend']} on prefill and {ready[TARGET]['backend']} on decode"
            raise ProbeFailed("backend", error)
        # First the target: it answers the writer from then on.
        self.ask(target, {"do": "connect", "peer": ready[WRITER]}, "connected", LIMITS_S["handshake"])
        self.ask(writer, {"do": "connect", "peer": ready[TARGET]}, "connected", LIMITS_S["handshake"])

    def ask(self, side: Side, message: Mapping[str, Any], event: str, limit_s: float, note: str = "") -> dict[str, Any]:
        """Send a message to one side and wait for the event that answers it, kept as ``note`` if that is given.

        Raises:
            ProbeFailed: a side failed, or it took too long.
        """
        self._send(side, message)
        return self.expect(side, event, limit_s, note)

    def _send(self, side: Side, message: Mapping[str, Any]) -> None:
        try:
            self._conversations[side.role].send(message, timeout_s=SEND_S)
        except PdctlError as error:
            raise ProbeFailed(side.stage, str(error), unreachable=_is_unreachable(error)) from error

    def expect(self, side: Side, event: str, limit_s: float, note: str = "") -> dict[str, Any]:
        """Wait for an event of one side, kept as ``note`` if that is given; a failure of either ends the waiting.

        Raises:
            ProbeFailed: a side failed, or it took too long.
        """
        key = note or (_key(side, event))
        patience = Deadline(min(limit_s + _SLACK_S, self.deadline.remaining_s))
        while key not in self.events:
            try:
                self._take(*self._news.get(timeout=max(0.001, patience.remaining_s)), event, note)
            except queue.Empty:
                raise self._too_long(side, patience.timeout_s) from None
        return self.events[key]

    def _take(self, side: Side, news: dict[str, Any] | PdctlError, awaited: str, note: str) -> None:
        if isinstance(news, CommandTimeout):
            raise ProbeFailed("timeout", f"{news} (in the step `{side.stage}`)")
        if isinstance(news, PdctlError):
            raise ProbeFailed(
                side.stage, f"{news}{f'; {news.hint}' if news.hint else ''}", unreachable=_is_unreachable(news)
            )
        kind = str(news.get("event"))
        side.lanes = news.get("lanes", side.lanes)
        if kind == "stage":
            side.stage = news["stage"]
        elif kind == "failed":
            raise ProbeFailed(news["stage"], f"{side.host}: {news['error']}")
        elif kind == "ended":
            self._take_end(side, news)
            raise ProbeFailed(side.stage, f"{side.host}: the probe ended by itself in the step `{side.stage}`")
        else:
            self.events[note if note and kind == awaited else _key(side, kind)] = news

    def _too_long(self, side: Side, waited_s: float) -> ProbeFailed:
        if self.deadline.passed:
            took = f"the probe took longer than {self.deadline.timeout_s:g} s in all"
            return ProbeFailed("timeout", f"{took}; it was waiting for {side.host} in the step `{side.stage}`")
        return ProbeFailed("timeout", f"{side.host} said nothing for {waited_s:.0f} s in the step `{side.stage}`")

    # --- the end ------------------------------------------------------------------------------------------------------

    def last_words(self) -> str:
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
        parts = [(f"{side.host} ({side.role})", side.log[-_LOG_LINES:]) for side in (self.writer, self.target)]
        return "\n".join(f"{name}: {line}" for name, lines in parts for line in lines)

    def _take_end(self, side: Side, news: Mapping[str, Any]) -> None:
        side.ended = True
        side.log = [*news.get("log", ()), *side.log]
        side.lanes = news.get("lanes", side.lanes)


def _key(side: Side, event: str) -> str:
    return event if event in _OF_WRITER else f"{side.role} {event}"


def _is_unreachable(error: PdctlError) -> bool:
    return isinstance(error, HostError) and not isinstance(error, CommandTimeout)
