"""Opens the planned ports between the hosts for real, and sends packets of the full size between them.

Each host runs one script (``pdctl/node/ports.py``), which opens all its ports, waits until all hosts have theirs, and
then makes all its connections side by side: one start and two messages for each host, however many pairs there are.
"""

from __future__ import annotations

import functools
import importlib.resources
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdctl.doctor.facts import HostFacts
from pdctl.doctor.network_facts import NetworkFacts, PathMtu, Reach
from pdctl.doctor.network_plan import Attempt, NetworkPlan, plan_network
from pdctl.errors import NodeError, PdctlError
from pdctl.hosts.base import Deadline, Host
from pdctl.hosts.conversation import Conversation, talk
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan

CONNECT_TIMEOUT_S = 3.0
"""How long a connection may take: time for a lost packet to be sent again."""
_MTU_S = 6.0
"""How much longer a host may take when packets of the full size do not arrive, and smaller ones are tried."""
_LISTEN_S = 10.0
"""How long a host may take to open its ports, connecting to it included."""
_WHAT = "the script that opens ports"
_PREFIX = b"PDCTL-PORTS-1 "


def check_network(
    fleet: Fleet,
    plan: ClusterPlan,
    facts: Mapping[str, HostFacts],
    *,
    timeout_s: float,
    on_done: Callable[[str], None] | None = None,
) -> NetworkFacts:
    """Connect to the planned ports as the instances will, from prefill to decode, back, and from the router.

    Args:
        fleet: the hosts.
        plan: the plan.
        facts: of the hosts that could be reached; another host's ports are ``not-tried``.
        timeout_s: how long all may take.
        on_done: called in this thread with each host's name as soon as it is through.
    """
    network = plan_network(plan, facts)
    hosts = [host for host in network.hosts if host in facts]
    conversations = _Conversations(network, timeout_s, plan)
    deadline = Deadline(timeout_s)
    try:
        opened = fleet.map(conversations.listen, hosts, timeout_s=max(1.0, min(_LISTEN_S, 0.5 * timeout_s)))
        listening = {name: answer for name, answer in opened.items() if not isinstance(answer, PdctlError)}
        ports = _Ports(network, conversations.nonces, listening, opened)

        def connect(host: Host) -> dict[str, Any]:
            return conversations.connect(host, ports.requests(host.name), deadline.remaining_s)

        def done(name: str, _: object) -> None:
            if on_done is not None:
                on_done(name)

        connected = fleet.map(connect, listening, timeout_s=max(1.0, deadline.remaining_s), on_done=done)
    finally:
        conversations.close()
    if on_done is not None:
        for name in facts:
            if name not in connected:
                on_done(name)
    return _facts_of(network, ports, connected)


@functools.cache
def ports_source() -> bytes:
    """Source of the script, from the installed package."""
    return importlib.resources.files("pdctl.node").joinpath("ports.py").read_bytes()


class _Conversations:
    """The scripts on all hosts. Those that are started too late are ended at once."""

    def __init__(self, network: NetworkPlan, timeout_s: float, plan: ClusterPlan) -> None:
        self._network = network
        self._timeout_s = timeout_s
        self._python = plan.spec.python
        self._lock = threading.Lock()
        self._open: dict[str, Conversation] = {}
        self._closed = False
        self.nonces = {host: secrets.token_hex(12) for host in network.hosts}

    def listen(self, host: Host) -> dict[str, Any]:
        """Start the script on a host and have it open its ports; what came of each."""
        listeners = [
            {"id": one.id, "address": one.bind, "port": one.port, "ours": one.ours}
            for one in self._network.listeners
            if one.host == host.name
        ]
        conversation = talk(
            host,
            ports_source(),
            prefix=_PREFIX,
            what=_WHAT,
            lifetime_s=self._timeout_s + 5,
            send_timeout_s=_LISTEN_S,
            pythons=(self._python,),
        )
        with self._lock:
            self._open[host.name] = conversation
            closed = self._closed
        if closed:
            conversation.close()
        request = {
            "do": "listen",
            "listeners": listeners,
            "nonce": self.nonces[host.name],
            "lifetime_s": self._timeout_s + 5,
        }
        answer = conversation.ask(request, timeout_s=_LISTEN_S)
        return _checked(host.name, answer, "listeners")

    def connect(self, host: Host, attempts: list[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        """Have a host make its connections; what came of each."""
        if not attempts:
            return {}
        request = {"do": "connect", "attempts": attempts, "timeout_s": min(CONNECT_TIMEOUT_S, max(0.5, timeout_s))}
        patience_s = min(timeout_s, CONNECT_TIMEOUT_S + _MTU_S + _LISTEN_S)
        answer = self._open[host.name].ask(request, timeout_s=patience_s)
        return _checked(host.name, answer, "attempts")

    def close(self) -> None:
        """End all scripts, which closes their ports."""
        with self._lock:
            self._closed = True
            conversations = list(self._open.values())
        for conversation in conversations:
            conversation.close()


def _checked(host: str, answer: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = answer.get(key)
    if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
        raise NodeError(host, "bad-reply", f"{_WHAT} gave an answer that makes no sense")
    return value


@dataclass(frozen=True)
class _Ports:
    """What the hosts opened. ``listening``: by host, then by listener; ``opened``: errors too."""

    network: NetworkPlan
    nonces: Mapping[str, str]
    listening: Mapping[str, Mapping[str, Mapping[str, Any]]]
    opened: Mapping[str, object]

    def result(self, attempt: Attempt) -> Mapping[str, Any] | None:
        """What came of opening the port that an attempt is for; None if the host did not say."""
        return self.listening.get(attempt.listener.host, {}).get(attempt.listener.id)

    def port(self, attempt: Attempt) -> int | None:
        """The port to connect to; None if it is not open."""
        port = (self.result(attempt) or {}).get("port")
        return port if isinstance(port, int) else None

    def requests(self, source: str) -> list[dict[str, Any]]:
        """What a host is to connect to."""
        return [
            {
                "id": attempt.id,
                "address": attempt.listener.address,
                "port": port,
                "nonce": None if attempt.listener.ours else self.nonces[attempt.listener.host],
                "mtu": attempt.mtu,
            }
            for attempt in self.network.attempts
            if attempt.source == source and (port := self.port(attempt)) is not None
        ]

    def why_closed(self, attempt: Attempt) -> tuple[str, str]:
        """Outcome and detail of an attempt that could not be made because its port is not open."""
        result = self.result(attempt)
        if result is not None:
            return "no-listener", str(result.get("detail", ""))
        return "not-tried", self._why_no_answer(attempt.listener.host)

    def why_silent(self, source: str) -> str:
        """Why a host made no attempts."""
        return self._why_no_answer(source)

    def _why_no_answer(self, host: str) -> str:
        error = self.opened.get(host)
        return str(error) if isinstance(error, PdctlError) else f"{host}: nothing could be run there"


def _facts_of(network: NetworkPlan, ports: _Ports, connected: Mapping[str, object]) -> NetworkFacts:
    reaches, mtus = [], []
    for attempt in network.attempts:
        listener = attempt.listener
        port = ports.port(attempt)
        answers = connected.get(attempt.source)
        answer = answers.get(attempt.id) if isinstance(answers, dict) else None
        connect_ms = None
        if port is None:
            outcome, detail = ports.why_closed(attempt)
        elif answer is None:
            outcome = "not-tried"
            detail = str(answers) if isinstance(answers, PdctlError) else ports.why_silent(attempt.source)
        else:
            outcome, detail = str(answer.get("outcome")), str(answer.get("detail", ""))
            given = answer.get("connect_ms")
            connect_ms = float(given) if isinstance(given, (int, float)) else None
            if attempt.mtu and isinstance(answer.get("mtu"), dict):
                mtus.append(_mtu(attempt, answer["mtu"]))
        reaches.append(
            Reach(
                attempt.source,
                listener.host,
                listener.address,
                port if port is not None else listener.port,
                listener.purpose,
                outcome,
                detail,
                connect_ms,
            )
        )
    return NetworkFacts(tuple(reaches), tuple(mtus))


def _mtu(attempt: Attempt, found: Mapping[str, Any]) -> PathMtu:
    interface, path = found.get("interface_mtu"), found.get("path_mtu")
    return PathMtu(
        attempt.source,
        attempt.listener.host,
        attempt.listener.address,
        interface if isinstance(interface, int) else None,
        path if isinstance(path, int) else None,
        str(found.get("detail", "")),
    )
