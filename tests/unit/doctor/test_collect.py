"""Collecting facts, the operator's side: what is asked for, clocks, and which host has none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.doctor.collect import collect, request_for, timed_facts
from pdctl.doctor.facts import HostFacts
from pdctl.errors import CommandTimeout, HostUnreachable, NodeError, PdctlError
from pdctl.hosts.base import CommandResult
from tests.support.plans import SECRET, changed, planned

PLAN = planned(
    changed(
        fabric="efa",
        env={"HF_TOKEN": {"from_env": "TEST_TOKEN"}, "HF_HOME": "/data/hf"},
        python="/opt/vllm/bin/python",
        prefill={
            "hosts": [{"name": "p1", "address": "10.0.0.1"}, {"name": "p2", "address": "p2.data.example"}],
            "vllm_args": {"revision": "abc"},
        },
        decode={
            "hosts": [{"name": "d1", "address": "10.0.0.3"}],
            "python": "~/venv/bin/python",
            "vllm_args": {"revision": "abc"},
        },
        router={"host": "p1", "port": 8000, "python": "/opt/router/bin/python"},
    )
)


def test_the_request_of_a_host() -> None:
    request = request_for(PLAN, "p1")
    assert request["cluster"] == "qwen3"
    assert request["pythons"] == ["/opt/vllm/bin/python", "/opt/router/bin/python"]
    assert request["environments"]["/opt/vllm/bin/python"]["HF_HOME"] == "/data/hf"
    assert request["environments"]["/opt/vllm/bin/python"]["FI_PROVIDER"] == "efa"
    assert request["peers"] == ["p2.data.example", "10.0.0.3"]
    assert request["names"] == ["p2.data.example"]
    assert (request["model"], request["revision"], request["ec2"]) == ("Qwen/Qwen3-32B", "abc", True)
    wanted = [
        {"port": use.port, "address": use.address, "purpose": use.purpose}
        for instance in PLAN.instances
        if instance.host == "p1"
        for use in instance.ports
    ]
    assert request["ports"] == wanted
    assert {entry["purpose"] for entry in wanted} >= {"API", "side channel", "metrics"}


def test_the_home_folder_is_left_to_the_host() -> None:
    request = request_for(PLAN, "d1")
    assert request["pythons"] == ["@HOME@/venv/bin/python"] == [PLAN.decode[0].argv[0]]
    assert request_for(planned(changed()), "d1")["revision"] == "main"


def test_plugins_are_those_of_the_plan_first() -> None:
    assert request_for(PLAN, "p1")["plugins"] == ["UCX", "LIBFABRIC"]
    other = planned(changed(transfer={"extra": {"backends": ["MOONCAKE", "LIBFABRIC"]}}))
    assert request_for(other, "p1")["plugins"] == ["MOONCAKE", "LIBFABRIC", "UCX"]


def test_no_secret_travels() -> None:
    for host in PLAN.hosts:
        assert SECRET not in json.dumps(request_for(PLAN, host))


DOCUMENT: dict[str, Any] = {"schema": 1, "took_s": 0.4, "parts": {"clock": {"time_s": 1000.0}}, "missing": {}}


def test_the_clock_is_compared_in_the_middle() -> None:
    # Sent at 998.0, back at 1000.0: the host's middle should be 999.0, and is 1000.0.
    facts = timed_facts("p1", DOCUMENT, 998.0, 2.0)
    assert facts.clock_offset_s == pytest.approx(1.0)
    assert facts.clock_error_s == pytest.approx(0.8)
    assert timed_facts("p1", {"schema": 1, "parts": {}}, 998.0, 2.0).clock_offset_s is None


@given(
    skew=st.floats(-1e5, 1e5),
    out=st.floats(0, 20),
    took=st.floats(0, 5),
    back=st.floats(0, 20),
)
def test_the_true_offset_is_always_within_the_error(skew: float, out: float, took: float, back: float) -> None:
    begin = 1.8e9
    middle = begin + out + took / 2 + skew
    document = {"schema": 1, "took_s": took, "parts": {"clock": {"time_s": middle}}}
    facts = timed_facts("p1", document, begin, out + took + back)
    assert facts.clock_offset_s is not None
    assert facts.clock_error_s is not None
    assert abs(facts.clock_offset_s - skew) <= facts.clock_error_s + 1e-5


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
PARTS = st.sampled_from(["system", "clock", "rdma", "disks", "interpreters", "environment", "model", "network", "x"])


@settings(deadline=None)
@given(
    st.one_of(
        JSON,
        st.fixed_dictionaries(
            {"schema": st.just(1), "parts": st.dictionaries(PARTS, JSON), "missing": JSON, "took_s": JSON}
        ),
    )
)
def test_a_mangled_document_never_fails(document: object) -> None:
    facts = timed_facts("p1", document, 1000.0, 1.0)
    assert isinstance(facts, HostFacts)
    assert facts.why_missing("rdma")


class FakeHost:
    """A host that answers with a document, or raises."""

    def __init__(self, name: str, answer: object) -> None:
        self.name = name
        self.answer = answer
        self.request: dict[str, Any] = {}
        self.argv: tuple[str, ...] = ()

    def run(self, argv: Iterable[str], *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        self.argv = tuple(argv)
        length, _, rest = stdin.partition(b"\n")
        self.request = json.loads(rest[int(length) :])
        if isinstance(self.answer, PdctlError):
            raise self.answer
        if isinstance(self.answer, dict) and self.answer.get("parts", {}).get("clock"):
            self.answer["parts"]["clock"]["time_s"] = time.time()
        line = json.dumps({"ok": True, "result": self.answer}) if self.answer is not None else "no Python here"
        return CommandResult(self.argv, 0, b"PDCTL-AGENT-1 " * bool(self.answer) + line.encode(), b"", 0.1)


class FakeFleet:
    """Runs the function for each host, one after the other."""

    def __init__(self, hosts: list[FakeHost]) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.timeout_s = 0.0

    def map(
        self,
        function: Callable[[FakeHost], object],
        names: Iterable[str],
        *,
        timeout_s: float,
        on_done: Callable[[str, object], None] | None = None,
    ) -> dict[str, object]:
        self.timeout_s = timeout_s
        results: dict[str, object] = {}
        for name in names:
            try:
                results[name] = function(self.hosts[name])
            except PdctlError as error:
                results[name] = error
            if on_done is not None:
                on_done(name, results[name])
        return results


def test_hosts_with_and_without_facts() -> None:
    good = FakeHost("p1", json.loads(json.dumps(DOCUMENT)))
    fleet = FakeFleet([good, FakeHost("p2", HostUnreachable("p2", "no answer")), FakeHost("d1", None)])
    seen: list[str] = []
    facts, unreachable = collect(fleet, PLAN, timeout_s=10, on_done=lambda name, _: seen.append(name))  # type: ignore[arg-type]
    assert list(facts) == ["p1"]
    assert facts["p1"].took_s == 0.4
    assert facts["p1"].clock_offset_s == pytest.approx(0, abs=5)
    assert isinstance(unreachable["p2"], HostUnreachable)
    assert isinstance(unreachable["d1"], NodeError)
    assert seen == ["p1", "p2", "d1"]
    assert good.request["timeouts"] == {"total": 4.0}
    assert "/opt/vllm/bin/python" in good.argv
    # Connecting comes on top of it.
    assert fleet.timeout_s > 10


def test_a_short_time_out_is_passed_on() -> None:
    host = FakeHost("p1", json.loads(json.dumps(DOCUMENT)))
    others = [FakeHost(name, CommandTimeout(name, "late")) for name in ("p2", "d1")]
    collect(FakeFleet([host, *others]), PLAN, timeout_s=2)  # type: ignore[arg-type]
    assert host.request["timeouts"]["total"] < 2
