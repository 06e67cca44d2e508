"""Draining: what the router lists, what an instance has left, and the order of things."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.errors import PdctlError, UsageError
from pdctl.lifecycle import drain as module
from pdctl.lifecycle.drain import drain, read_workers, what_is_left
from pdctl.lifecycle.status import ClusterStatus, InstanceStatus
from pdctl.plan import ClusterPlan, make_plan
from pdctl.spec import parse

FILE = """
cluster: two-by-two
model: m
accelerator: cpu
fabric: tcp
prefill: {hosts: [h1]}
decode: {hosts: [h2, h3]}
router: {host: h1}
"""
IDLE = InstanceStatus(
    "decode-0", "decode", "h2", "", "ready", "", requests_running=0, requests_waiting=0, transfers_inflight=0
)


class Router:
    """Answers as vllm-router 0.1.17 does, and the instances' status beside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan = make_plan(parse(FILE, file="c.yaml", environ={}), environ={}, connector_digest="0" * 64)
        self.urls = {one.url: one.role for one in (*self.plan.prefill, *self.plan.decode)}
        self.asked: list[str] = []
        self.deaf = False
        self.others = "ready"
        self.statuses = [IDLE]
        monkeypatch.setattr(module, "_ask_router", self.ask)
        monkeypatch.setattr(module, "status", self.status)
        monkeypatch.setattr(module, "_PAUSE_S", 0.0)

    def ask(self, plan: ClusterPlan, fleet: Any, method: str, path: str) -> str:
        self.asked.append(f"{method} {path}")
        if method == "POST" and not self.deaf:
            self.urls = {url: role for url, role in self.urls.items() if module.urllib.parse.quote(url, "") not in path}
        return json.dumps({"workers": [{"url": url, "worker_type": role} for url, role in self.urls.items()]})

    def status(self, plan: ClusterPlan, fleet: Any) -> ClusterStatus:
        if not any(asked.startswith("POST") for asked in self.asked):
            others = [one for one in plan.instances if one.role != "router"]
            return ClusterStatus("c", tuple(replace(IDLE, name=one.name, state=self.others) for one in others), {})
        seen = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return ClusterStatus("c", (seen,), {})

    def drain(self, name: str, **more: Any) -> module.Drained:
        instance = next(one for one in self.plan.instances if one.name == name)
        return drain(self.plan, None, instance, **more)  # type: ignore[arg-type]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    return Router(monkeypatch)


def test_an_instance_is_taken_out_and_waited_for(router: Router) -> None:
    router.statuses = [replace(IDLE, requests_running=2), replace(IDLE, transfers_inflight=1), IDLE]
    said: list[str] = []
    done = router.drain("decode-0", say=said.append)
    assert done.empty
    assert "had nothing left to do" in done.words
    assert "pdctl restart router" in done.words
    assert len(router.urls) == 2
    assert len(router.statuses) == 1
    assert said == ["taking decode-0 out of the router", "waiting until decode-0 has nothing left to do"]


def test_waiting_is_bounded_and_what_is_left_is_said(router: Router) -> None:
    router.statuses = [replace(IDLE, requests_running=2, transfers_inflight=None)]
    done = router.drain("decode-0", timeout_s=0.0)
    assert not done.empty
    assert "2 running requests, unknown transfers in flight" in done.words


def test_the_last_of_a_role_stays(router: Router) -> None:
    with pytest.raises(PdctlError, match="last prefill"):
        router.drain("prefill-0")
    router.drain("decode-0")
    with pytest.raises(PdctlError, match="last decode"):
        router.drain("decode-1")
    assert sum(asked.startswith("POST") for asked in router.asked) == 1


@pytest.mark.parametrize("state", ["exited", "unhealthy", "booting", "unreachable"])
def test_the_last_that_is_well_stays_whoever_else_is_listed(router: Router, state: str) -> None:
    router.others = state
    with pytest.raises(PdctlError, match=f"last decode instance that serves .decode-1 is {state}"):
        router.drain("decode-0")
    assert router.asked == ["GET /workers"]


def test_one_that_is_out_already_is_only_waited_for(router: Router) -> None:
    router.drain("decode-0")
    router.asked.clear()
    assert router.drain("decode-0").empty
    assert router.asked == ["GET /workers"]


def test_a_router_that_says_yes_and_does_nothing_is_found_out(router: Router) -> None:
    router.deaf = True
    with pytest.raises(PdctlError, match="still lists"):
        router.drain("decode-0")


def test_the_router_itself_is_no_instance_to_drain(router: Router) -> None:
    with pytest.raises(UsageError):
        router.drain("router")


def test_an_instance_that_has_ended_has_nothing_left() -> None:
    assert what_is_left(replace(IDLE, state="exited", requests_running=None)) == ""
    assert what_is_left(replace(IDLE, state="unreachable", requests_running=None)) == "unknown running requests"


@given(st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_what_is_no_list_of_workers_is_refused(body: str) -> None:
    with pytest.raises(PdctlError, match="no workers"):
        read_workers(body)
