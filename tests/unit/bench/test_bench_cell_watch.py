import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.bench.cell_watch import AGAIN_S, SETTLE_S, CellFacts, CellWatch, Wanted
from pdctl.bench.results import MODES, Mode, Sample, Transfers
from pdctl.plan import ClusterPlan, make_plan
from pdctl.spec import parse

NOW = 1_795_991_934.0
WRITE = 3_670_016
CLUSTER = """
cluster: demo
model: demo
accelerator: cpu
fabric: tcp
transfer: {TRANSFER}
env: {VLLM_CPU_KVCACHE_SPACE: "1"}
prefill: {hosts: [{name: p1, address: 10.0.0.1}], vllm_args: {block-size: 128}}
decode: {hosts: [{name: d1, address: 10.0.0.2}], vllm_args: {block-size: 128}}
router: {host: p1}
"""
TRANSFER = {"push": "mode: push", "pull": "mode: pull", "push-upstream": "mode: push, connector: upstream"}


def plan_for(mode: Mode, more: str = "") -> ClusterPlan:
    text = CLUSTER.replace("TRANSFER", TRANSFER[mode] + more)
    return make_plan(parse(text, file="cluster.yaml", environ={}), environ={}, connector_digest="0" * 64)


class Cluster:
    """A cluster that has served some requests, as its HTTP answers show."""

    def __init__(self, mode: Mode, requests: int = 3) -> None:
        self.mode, self.requests = mode, requests
        self.silent: set[str] = set()
        self.started = {"prefill": 100.0, "decode": 100.0}
        self.first = 0
        self.late = 0
        self.recomputed = 0
        self.failed = 0
        self.routed_more = 0
        self.looks = 0
        # By key; a rank that a request is not lost on has received it.
        self.lost: dict[str, str] = {}
        self.forgets = False

    def read(self, wanted: Sequence[Wanted]) -> list[bytes | None]:
        self.looks += 1
        return [None if self._silent(one) else self._answer(one) for one in wanted]

    def _silent(self, wanted: Wanted) -> bool:
        return wanted.instance.name in self.silent

    def _answer(self, wanted: Wanted) -> bytes:
        role = wanted.instance.role
        if role == "router":
            passed = self.requests + self.routed_more
            return f'vllm_router_pd_requests_total{{route="/v1/completions"}} {passed}\n'.encode()
        if not wanted.url.startswith(wanted.instance.url):
            return self._rank(role, wanted.url)
        return self._vllm(role)

    def _vllm(self, role: str) -> bytes:
        done = self.requests - self.late
        computed = self.recomputed if role == "decode" else 512 * done
        moved = done if role == ("decode" if self.mode == "pull" else "prefill") else 0
        values = {
            "process_start_time_seconds": self.started[role],
            "vllm:request_queue_time_seconds_count": done,
            "vllm:request_queue_time_seconds_sum": 0.2 * done,
            "vllm:request_prefill_time_seconds_count": done,
            "vllm:request_prefill_time_seconds_sum": 0.1 * done,
            "vllm:time_to_first_token_seconds_count": done,
            "vllm:time_to_first_token_seconds_sum": 0.4 * done,
            "vllm:nixl_xfer_time_seconds_count": moved,
            "vllm:nixl_xfer_time_seconds_sum": 0.125 * moved,
            "vllm:nixl_bytes_transferred_count": moved,
            "vllm:nixl_bytes_transferred_sum": WRITE * moved,
            "vllm:nixl_num_failed_transfers_total": self.failed if role == "decode" else 0,
            "vllm:nixl_num_kv_expired_reqs_total": 0,
            'vllm:prompt_tokens_by_source_total{source="local_compute"}': computed,
        }  # fmt: skip
        return "".join(f"{name} {value}\n" for name, value in values.items()).encode()

    def _rank(self, role: str, url: str) -> bytes:
        done = self.requests - self.late
        end = "completed" if role == "prefill" else "received"
        if url.endswith("/metrics"):
            return (
                f'pdctl_transfers_total{{outcome="{end}",side="{role}"}} {done}\n'
                f'pdctl_transfers_total{{outcome="failed",side="{role}"}} {self.failed}\n'
            ).encode()
        path = ("prefilling", "ready", "matched", "posted") if role == "prefill" else ("allocated", "registered")
        stages = {stage: 0.1 * place for place, stage in enumerate((*path, end))}
        entries = [
            {"side": role, "key": f"k{n}", "attempt": n, "outcome": end, "started_unix": NOW + n, "stages": stages}
            for n in range(self.first, done)
        ]
        if role == "decode" and not self.forgets:
            entries += [
                {"side": role, "key": key, "attempt": n, "outcome": outcome, "started_unix": NOW, "stages": {}}
                for n, (key, outcome) in enumerate(self.lost.items())
            ]
        return json.dumps({"state": "recent", "unix": NOW, "transfers": entries}).encode()


def samples(count: int) -> list[Sample]:
    return [Sample(started_unix=NOW + number - 0.01, ttft_s=0.9, latency_s=1.0) for number in range(3, 3 + count)]


def measured(
    cluster: Cluster,
    change: Callable[[Cluster], None],
    *,
    sent: int = 4,
    more: str = "",
    plan: ClusterPlan | None = None,
) -> CellFacts:
    """A cell of four requests, in which ``change`` happens."""
    moments = itertools.count(0.0, 0.1)
    watch = CellWatch(
        plan or plan_for(cluster.mode, more),
        cluster.read,
        cluster.mode,
        clock=lambda: next(moments),
        sleep=lambda _: setattr(cluster, "late", max(0, cluster.late - 1)),
    )
    watch.begin()
    cluster.requests += sent
    change(cluster)
    return watch.end(samples(sent))


def nothing(_: Cluster) -> None:
    """Nothing happens."""


@pytest.mark.parametrize("mode", MODES)
def test_a_cell_is_what_came_between(mode: Mode) -> None:
    facts = measured(Cluster(mode), nothing)
    assert facts.trouble == ()
    assert facts.transfers == Transfers(
        completed=4,
        failed=0,
        expired=0,
        bytes=4 * WRITE,
        seconds=4 * 0.125,
        recomputed_requests=0,
        recomputed_tokens=0,
    )
    assert facts.stages is not None
    assert facts.stages.requests == 4
    assert ("match" in facts.stages.seconds) == (mode == "push")
    assert sum(facts.stages.seconds.values()) == pytest.approx(0.9)


def test_only_push_asks_ranks_and_all_at_once() -> None:
    asked: dict[Mode, list[str]] = {}

    def read(wanted: Sequence[Wanted]) -> list[bytes | None]:
        asked[mode] = [f"{one.instance.name} {one.url.split('/', 3)[3]}" for one in wanted]
        return [None] * len(wanted)

    for mode in MODES:
        CellWatch(plan_for(mode), read, mode).begin()
    assert asked["pull"] == asked["push-upstream"] == ["prefill-0 metrics", "decode-0 metrics", "router metrics"]
    assert asked["push"] == [
        *asked["pull"],
        "prefill-0 metrics",
        "decode-0 metrics",
        "prefill-0 transfers?state=recent&limit=1000",
        "decode-0 transfers?state=recent&limit=1000",
    ]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_counted_a_moment_later_is_waited_for(mode: Mode) -> None:
    cluster = Cluster(mode)
    facts = measured(cluster, lambda it: setattr(it, "late", 2))
    assert (facts.transfers.completed, facts.trouble) == (4, ())
    # Twice before, since nothing changed; at the end until all is counted.
    assert cluster.looks == 2 + 3


def test_waiting_ends() -> None:
    cluster = Cluster("push")
    facts = measured(cluster, lambda it: setattr(it, "late", 1000) or setattr(it, "requests", 1007))
    assert cluster.looks <= 2 + SETTLE_S / AGAIN_S
    assert facts.stages is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_restart_leaves_the_cell_without_stages(mode: Mode, role: str) -> None:
    facts = measured(Cluster(mode), lambda it: it.started.update({role: 150.0}))
    assert facts.stages is None
    assert any(f"{role}-0 was restarted during the cell" in said for said in facts.trouble)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router"])
def test_silence_is_told_and_is_not_zero(mode: Mode, name: str) -> None:
    facts = measured(Cluster(mode), lambda it: it.silent.add(name))
    assert any(name in said for said in facts.trouble)
    if name == "router":
        assert facts.stages is not None
        return
    assert facts.stages is None
    if mode == "push":
        assert facts.transfers.completed is facts.transfers.failed is None
        assert any("ledger of" in said for said in facts.trouble)
    if name == "decode-0":
        assert facts.transfers.recomputed_tokens is None


def test_requests_of_others_are_told() -> None:
    facts = measured(Cluster("push"), lambda it: setattr(it, "routed_more", 2))
    assert facts.trouble == ("the router passed on 6 requests, and the cell sent 4: something else used the cluster",)


def test_recomputed_requests_are_those_whose_transfer_failed() -> None:
    def fail(cluster: Cluster) -> None:
        cluster.recomputed, cluster.failed = 1024, 2

    facts = measured(Cluster("push"), fail, more=", load_failure_policy: recompute")
    assert (facts.transfers.recomputed_requests, facts.transfers.recomputed_tokens) == (2, 1024)
    assert facts.transfers.failed == 2
    # Where failed transfers fail their request, something else made decode compute these.
    facts = measured(Cluster("push"), fail)
    assert (facts.transfers.recomputed_requests, facts.transfers.recomputed_tokens) == (None, 1024)
    facts = measured(Cluster("pull"), fail)
    assert (facts.transfers.recomputed_requests, facts.transfers.recomputed_tokens) == (None, 1024)


def two_ranks() -> ClusterPlan:
    text = CLUSTER.replace("TRANSFER", "mode: push, load_failure_policy: recompute")
    text = text.replace("vllm_args: {block", "tensor_parallel: 2, vllm_args: {block")
    return make_plan(parse(text, file="cluster.yaml", environ={}), environ={}, connector_digest="0" * 64)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_request_that_all_ranks_lost_is_one(forgets: bool) -> None:
    plan = two_ranks()
    assert len(plan.decode[0].telemetry_ports) == 2

    def fail(cluster: Cluster) -> None:
        cluster.recomputed, cluster.failed, cluster.forgets = 1024, 2, forgets
        cluster.lost = {"x1": "failed", "x2": "failed"}

    facts = measured(Cluster("push"), fail, plan=plan)
    assert (facts.transfers.recomputed_requests, facts.transfers.recomputed_tokens) == (2, 1024)


def test_requests_that_different_ranks_lost_are_told_by_their_keys() -> None:
    def fail(cluster: Cluster) -> None:
        # Each rank counts one, and the ledgers of both together name three.
        cluster.recomputed, cluster.failed = 1024, 1
        cluster.lost = {"x1": "failed", "x2": "timed_out", "x3": "failed"}

    facts = measured(Cluster("push"), fail, plan=two_ranks())
    assert facts.transfers.recomputed_requests == 3


def test_what_was_lost_before_the_cell_is_not_counted() -> None:
    cluster = Cluster("push")
    cluster.lost = {"old": "failed"}

    def fail(it: Cluster) -> None:
        it.recomputed, it.failed, it.lost = 512, 1, {**it.lost, "new": "failed"}

    facts = measured(cluster, fail, more=", load_failure_policy: recompute")
    assert facts.transfers.recomputed_requests == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_instance_is_told_from_a_note(mode: Mode) -> None:
    assert not measured(Cluster(mode), nothing).lost
    facts = measured(Cluster(mode), lambda it: setattr(it, "routed_more", 2))
    assert (facts.lost, len(facts.trouble)) == (False, 1)
    assert measured(Cluster(mode), lambda it: it.started.update(decode=150.0)).lost
    for name in ("prefill-0", "decode-0", "router"):
        assert measured(Cluster(mode), lambda it, name=name: it.silent.add(name)).lost  # type: ignore[misc]


def test_absurd_counters_are_no_exception() -> None:
    def absurd(it: Cluster) -> None:
        it.requests, it.failed, it.recomputed = 10**300, 10**300, 10**300

    facts = measured(Cluster("pull"), absurd)
    assert facts.transfers.completed is not None


def test_the_last_token_of_each_request_is_not_recomputed() -> None:
    assert measured(Cluster("pull"), lambda it: setattr(it, "recomputed", 4)).transfers.recomputed_tokens == 0
    assert measured(Cluster("pull"), lambda it: setattr(it, "recomputed", 3)).transfers.recomputed_tokens == 3


def test_a_cell_without_answers_has_no_stages() -> None:
    watch = CellWatch(plan_for("push"), Cluster("push").read, "push", sleep=lambda _: None)
    watch.begin()
    failed = [replace(one, error="503", ttft_s=None) for one in samples(2)]
    assert watch.end(failed).stages is None


def test_what_the_warm_up_did_is_not_counted_though_it_is_told_late() -> None:
    cluster = Cluster("push")
    cluster.late, cluster.routed_more = 2, -1

    def sleep(_: float) -> None:
        cluster.late, cluster.routed_more = max(0, cluster.late - 1), 0

    watch = CellWatch(plan_for("push"), cluster.read, "push", clock=itertools.count(0.0, 0.1).__next__, sleep=sleep)
    watch.begin()
    assert cluster.looks == 4
    cluster.requests += 4
    facts = watch.end(samples(4))
    assert (facts.transfers.completed, facts.trouble) == (4, ())


def test_an_end_without_a_beginning_is_told() -> None:
    facts = CellWatch(plan_for("pull"), Cluster("pull").read, "pull").end(samples(1))
    assert facts == CellFacts(None, Transfers(), ("the instances were not looked at before the cell",))


_BODIES: st.SearchStrategy[Any] = st.lists(
    st.none()
    | st.binary(max_size=40)
    | st.sampled_from([Cluster("push")._vllm("decode"), Cluster("push")._rank("prefill", "x/transfers")]),
    max_size=9,
)


@settings(max_examples=40)
@given(st.sampled_from(MODES), _BODIES, _BODIES)
def test_garbage_is_trouble_and_never_an_exception(mode: Mode, first: Any, then: Any) -> None:
    answers = [first]
    moments = itertools.count(0.0, 0.7)
    watch = CellWatch(_PLANS[mode], lambda _: answers[-1], mode, clock=lambda: next(moments), sleep=lambda _: None)
    watch.begin()
    answers.append(then)
    facts = watch.end(samples(2))
    assert facts.stages is not None or facts.trouble


_PLANS = {mode: plan_for(mode) for mode in MODES}
