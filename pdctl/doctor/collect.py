"""Facts of all hosts of a plan: one call of ``pdctl/node/facts.py`` for each, all at once."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from typing import Any

from pdctl.doctor.facts import HostFacts, read_facts
from pdctl.errors import PdctlError
from pdctl.hosts.agent import call
from pdctl.hosts.base import Host
from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan, InstancePlan
from pdctl.plan_seats import argument, role_of

NODE_TIMEOUT_S = 4.0
"""How long the script may take on a host; it answers with what it has by then."""

_PLUGINS = ("UCX", "LIBFABRIC")


def collect(
    fleet: Fleet,
    plan: ClusterPlan,
    *,
    timeout_s: float = 10,
    on_done: Callable[[str, HostFacts | PdctlError], None] | None = None,
) -> tuple[dict[str, HostFacts], dict[str, PdctlError]]:
    """Collect the facts of all hosts.

    Args:
        fleet: the hosts.
        plan: what is to run on them.
        timeout_s: how long each host may take once it is connected.
        on_done: called in this thread for each host as soon as its facts, or the reason for having none, are known.

    Returns:
        the facts by host, and by host why there are none: it cannot be reached or logged in to (a ``HostError``), or
        it answers but cannot run the script (a ``NodeError``).
    """

    def ask(host: Host) -> HostFacts:
        request = {**request_for(plan, host.name), "timeouts": {"total": min(NODE_TIMEOUT_S, 0.8 * timeout_s)}}
        begin, begin_monotonic = time.time(), time.monotonic()
        document = call(
            host, "collect", request, timeout_s=timeout_s, pythons=("python3", *request["pythons"]), script="facts"
        )
        return timed_facts(host.name, document, begin, time.monotonic() - begin_monotonic)

    # Connecting has its own bound, and says better what is wrong with a host that is down.
    results = fleet.map(ask, plan.hosts, timeout_s=timeout_s + plan.spec.ssh.connect_timeout_s + 1, on_done=on_done)
    facts: dict[str, HostFacts] = {}
    unreachable: dict[str, PdctlError] = {}
    for name, result in results.items():
        if isinstance(result, PdctlError):
            unreachable[name] = result
        else:
            facts[name] = result
    return facts, unreachable


def timed_facts(host: str, document: object, begin_s: float, round_trip_s: float) -> HostFacts:
    """Read a host's document and compare its clock with the operator's.

    The host's clock was read when the script began and is told for the middle of its run, which lies somewhere in the
    round trip; what connecting, starting Python and the network took is the error.

    Args:
        host: its name in the cluster file.
        document: the script's result.
        begin_s: the operator's clock when the call began, seconds since the epoch.
        round_trip_s: how long the call took.
    """
    facts = read_facts(host, document)
    if facts.clock is None:
        return facts
    offset = facts.clock.time_s - (begin_s + round_trip_s / 2)
    error = max(0.0, round_trip_s - (facts.took_s or 0.0)) / 2
    return read_facts(host, document, clock_offset_s=offset, clock_error_s=error)


def request_for(plan: ClusterPlan, host: str) -> dict[str, Any]:
    """What the script on a host is asked for; see ``pdctl/node/facts.py``. Pure, and without secrets."""
    here = [instance for instance in plan.instances if instance.host == host]
    elsewhere = [instance for instance in plan.instances if instance.host != host]
    peers = tuple(dict.fromkeys(instance.address for instance in elsewhere))
    names = tuple(dict.fromkeys(instance.address for instance in plan.instances if not _is_ip(instance.address)))
    # vLLM's first, because the model is looked for with the variables of the first one.
    pythons = tuple(dict.fromkeys(instance.argv[0] for instance in sorted(here, key=_router_last)))
    environments: dict[str, dict[str, str]] = {}
    for instance in sorted(here, key=_router_last):
        environments.setdefault(instance.argv[0], instance.env)
    return {
        "cluster": plan.spec.cluster,
        "pythons": list(pythons),
        "environments": environments,
        "plugins": list(_plugins(plan)),
        "peers": list(peers),
        "names": list(names),
        "ports": [
            {"port": use.port, "address": use.address, "purpose": use.purpose}
            for instance in here
            for use in instance.ports
        ],
        "model": plan.spec.model,
        "revision": _revision(plan, here),
        "ec2": plan.spec.aws is not None or plan.spec.fabric == "efa",
    }


def _router_last(instance: InstancePlan) -> bool:
    return instance.role == "router"


def _plugins(plan: ClusterPlan) -> tuple[str, ...]:
    backends = plan.spec.transfer.extra.get("backends")
    named = [name for name in backends if isinstance(name, str)] if isinstance(backends, list) else []
    return tuple(dict.fromkeys((*named, *_PLUGINS)))


def _revision(plan: ClusterPlan, here: list[InstancePlan]) -> str:
    for instance in here:
        if instance.role != "router":
            value = argument(role_of(plan.spec, instance.role).vllm_args, "revision")
            if isinstance(value, str) and value:
                return value
    return "main"


def _is_ip(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
