"""Take an instance out of the router, and wait until it has nothing left to do.

vllm-router 0.1.17 forgets a worker at once on ``POST /remove_worker?url=URL``, also with ``--vllm-pd-disaggregation``:
new requests go to the others, those that the worker has go on to their end. It says "Successfully removed" of a worker
that it never had as well, so that its list is read before and after. It cannot take one in again while it runs:
``/add_worker`` and ``POST /workers`` answer 400 "PD router requires specific add_prefill_server or add_decode_server
methods", which no route reaches. A restart of the router brings every instance back. All of this was tried;
tests/e2e/test_router_workers.py notices a router that does otherwise.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pdctl.errors import PdctlError, UsageError
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.nodes import HttpRequest, Nodes
from pdctl.lifecycle.status import InstanceStatus, status
from pdctl.plan import ClusterPlan, InstancePlan

BACK = "pdctl restart router takes it in again"
_ROUTER_S = 10.0
_PAUSE_S = 1.0


def _silent(text: str) -> None:
    del text


@dataclass(frozen=True)
class Drained:
    """An instance that gets no new requests.

    Attributes:
        name: of the instance.
        empty: whether it was seen to have nothing left: no request running or waiting, no transfer in flight.
        left: what it had left when last seen, in words; what could not be read is called unknown.
        took_s: seconds until then.
    """

    name: str
    empty: bool
    left: str
    took_s: float

    @property
    def words(self) -> str:
        """A sentence for people."""
        if self.empty:
            return f"{self.name} is out of the router and had nothing left to do after {self.took_s:.0f} s; {BACK}"
        return f"{self.name} is out of the router, but after {self.took_s:.0f} s it still has {self.left}; {BACK}"


def drain(
    plan: ClusterPlan,
    fleet: Fleet,
    instance: InstancePlan,
    *,
    timeout_s: float = 120.0,
    say: Callable[[str], None] = _silent,
) -> Drained:
    """Take an instance out of the router and wait, for at most ``timeout_s``, until it is empty.

    Raises:
        UsageError: the instance is the router itself.
        PdctlError: no other of its role that the router has is well, or the router does not do it.
        HostError: the router's host cannot be reached.
    """
    if instance.role == "router":
        raise UsageError("the router cannot be drained: it is what takes others out")
    say(f"taking {instance.name} out of the router")
    workers = router_workers(plan, fleet)
    urls = [url for url, role in workers if role == instance.role]
    if instance.url in urls:
        if len(urls) == 1:
            raise PdctlError(
                f"{instance.name} is the last {instance.role} instance that the router has: no request would be served",
                hint="pdctl down ends the cluster",
            )
        _refuse_if_no_other_is_well(plan, fleet, instance, urls)
        quoted = urllib.parse.quote(instance.url, safe="")
        _ask_router(plan, fleet, "POST", f"/remove_worker?url={quoted}")
        if (instance.url, instance.role) in router_workers(plan, fleet):
            raise PdctlError(f"the router still lists {instance.name} after removing it", hint="pdctl logs router")
    say(f"waiting until {instance.name} has nothing left to do")
    begin = time.monotonic()
    small = replace(plan, instances=(instance, plan.router))
    while True:
        left = what_is_left(next(one for one in status(small, fleet).instances if one.name == instance.name))
        took_s = time.monotonic() - begin
        if not left or took_s >= timeout_s:
            return Drained(instance.name, not left, left, took_s)
        time.sleep(_PAUSE_S)


def _refuse_if_no_other_is_well(plan: ClusterPlan, fleet: Fleet, instance: InstancePlan, urls: list[str]) -> None:
    """The router lists workers that are down as well: to be listed is not to serve."""
    others = [one for one in plan.instances if one.role == instance.role and one.url in urls and one != instance]
    seen = {one.name: one for one in status(replace(plan, instances=(*others, plan.router)), fleet).instances}
    if any(seen[one.name].state == "ready" for one in others if one.name in seen):
        return
    states = ", ".join(f"{one.name} is {seen[one.name].state}" for one in others if one.name in seen)
    raise PdctlError(
        f"{instance.name} is the last {instance.role} instance that serves ({states or 'the others are not known'}): "
        "no request would be served",
        hint="pdctl up starts what is down",
    )


def what_is_left(seen: InstanceStatus) -> str:
    """What an instance still has to do, in words; empty if it is known to have nothing. Pure."""
    if seen.state in ("exited", "absent"):
        return ""
    figures = {
        "running requests": seen.requests_running,
        "waiting requests": seen.requests_waiting,
        "transfers in flight": seen.transfers_inflight,
    }
    parts = [f"{'unknown' if count is None else count} {what}" for what, count in figures.items() if count != 0]
    return ", ".join(parts)


def router_workers(plan: ClusterPlan, fleet: Fleet) -> list[tuple[str, str]]:
    """URL and role of each instance that the router knows now, as it lists them.

    Raises:
        PdctlError: the router does not answer, or with something else.
    """
    return read_workers(_ask_router(plan, fleet, "GET", "/workers"))


def read_workers(body: str) -> list[tuple[str, str]]:
    """Read the answer to ``GET /workers``. Pure.

    Raises:
        PdctlError: it is none.
    """
    try:
        listed: Any = json.loads(body)["workers"]
        found = [(str(one["url"]).rstrip("/"), str(one["worker_type"])) for one in listed]
    except (ValueError, TypeError, LookupError, RecursionError):
        raise PdctlError(
            f"the router lists no workers that pdctl understands: {' '.join(body.split())[:120]!r}",
            hint="drain was made for vllm-router 0.1.17",
        ) from None
    return found


def _ask_router(plan: ClusterPlan, fleet: Fleet, method: str, path: str) -> str:
    router = plan.router
    request = HttpRequest(method, f"{router.url}{path}", timeout_s=_ROUTER_S)
    (answer,) = Nodes(plan, fleet).http(router.host, [request])
    if not answer.ok:
        raise PdctlError(
            f"the router does not do {method} {path.partition('?')[0]}: {answer.trouble}",
            hint="pdctl status; drain was made for vllm-router 0.1.17",
        )
    return answer.body
