"""Readings in, views out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.watch.poll_request import WANTED, host_request
from pdctl.watch.poll_state import ClusterState
from pdctl.watch.snapshot import Snapshot
from tests.support.plans import changed, planned

PLAN = planned(changed(prefill={"hosts": ["p1"], "tensor_parallel": 2}))
HEALTH: dict[str, Any] = {
    "engine_id": "e1",
    "pid": 7,
    "uptime_s": 5.0,
    "state": "busy",
    "beat_age_s": 0.1,
    "op": "",
    "op_age_s": None,
    "loops": 9,
    "errors": 0,
    "last_error": "",
    "inflight": 1,
    "oldest_s": 0.5,
    "outcomes": {"prefill/completed": 3},
}
FIELDS = ["prefill", "k", 0, "posted", "", "", 2.0, 1.0, {"posted": 1.0}, 77.0, 2.0, "k-1", "", 1, 2, 3, 4]


class Watched:
    """A state and its clock."""

    def __init__(self, **arguments: Any) -> None:
        self.state = ClusterState(PLAN, interval_s=1.0, window_s=60.0, **arguments)
        self.now = 100.0

    def hear(self, host: str, *readings: list[Any], at: float | None = None) -> None:
        self.state.heard(host, {"tick": 0, "at": self.now if at is None else at, "readings": list(readings)}, self.now)

    def look(self) -> Snapshot:
        return self.state.snapshot(at=self.now, unix=0.0, tick=0)

    def prefill(self):
        found = self.look().instance("prefill-0")
        assert found is not None
        return found

    def host(self, name: str = "p1"):
        return next(host for host in self.look().hosts if host.name == name)


def rank_reading(**fields: Any) -> list[Any]:
    return ["rank", "prefill-0", 0, 0.0, {**HEALTH, **fields}, ""]


def process(word: str, created: str = "boot/1", **fields: Any) -> list[Any]:
    return ["process", "prefill-0", -1, 0.0, {"process": word, "pid": 5, "created": created, **fields}, ""]


def metrics(**samples: float) -> list[Any]:
    return ["metrics", "prefill-0", -1, 0.0, {f"vllm:{name}": value for name, value in samples.items()}, ""]


def test_nothing_was_read_yet() -> None:
    snapshot = Watched().look()
    instance = snapshot.instances[0]
    assert (instance.process, instance.healthy, instance.age_s, instance.requests_running) == (None, None, None, None)
    assert (instance.ranks[0].age_s, instance.ranks[0].inflight, instance.rss_bytes) == (None, None, None)
    assert (snapshot.request_rate, snapshot.ttft, snapshot.hosts[0].sent_bytes_per_s) == (None, None, None)
    assert snapshot.poll_errors > 0


def test_a_reading_keeps_its_age_and_its_error_names_who() -> None:
    watched = Watched()
    watched.hear("p1", rank_reading())
    watched.now += 1
    watched.hear("p1", ["rank", "prefill-0", 0, 0.0, None, "no answer within 2 s"])
    watched.now += 1
    rank = watched.prefill().ranks[0]
    assert (rank.age_s, rank.inflight, rank.error) == (2.0, 1, "prefill-0 rank 0: no answer within 2 s")


def test_a_late_answer_has_its_age() -> None:
    watched = Watched()
    watched.hear("p1", ["rank", "prefill-0", 0, 1.5, HEALTH, ""])
    assert watched.prefill().ranks[0].age_s == 1.5


def test_a_host_that_is_lost() -> None:
    watched = Watched()
    watched.hear("p1", rank_reading(), ["health", "prefill-0", -1, 0.0, 200, ""], metrics(num_requests_running=4))
    assert watched.prefill().healthy is True
    watched.now += 5
    watched.state.lost("p1", "p1: connection refused")
    instance = watched.prefill()
    assert (instance.healthy, instance.requests_running, instance.age_s) == (None, 4, 5.0)
    assert instance.error == "prefill-0: its host gives nothing: p1: connection refused"
    assert instance.ranks[0].error == "prefill-0 rank 0: its host gives nothing: p1: connection refused"
    assert watched.host().error == "p1: connection refused"
    watched.hear("p1")
    assert watched.host().error == ""


def test_a_host_that_says_nothing() -> None:
    watched = Watched()
    watched.hear("p1", rank_reading())
    watched.now += 2
    assert watched.host().error == ""
    watched.now += 5
    assert watched.host().error == "p1: nothing was heard of it for 7 s"


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_health(status: int, healthy: bool) -> None:
    watched = Watched()
    watched.hear("p1", ["health", "prefill-0", -1, 0.0, status, ""])
    assert watched.prefill().healthy is healthy
    watched.hear("p1", ["health", "prefill-0", -1, 0.0, None, "no answer within 2 s"])
    assert (watched.prefill().healthy, watched.prefill().health_error) == (None, "prefill-0: no answer within 2 s")


def test_a_restart_is_counted_once_whoever_tells_first() -> None:
    watched = Watched()
    watched.hear("p1", rank_reading(), process("running"))
    watched.hear("p1", process("running", "boot/2"))
    assert watched.prefill().restarts == 1
    watched.hear("p1", rank_reading(engine_id="e2"), ["rank", "prefill-0", 1, 0.0, {**HEALTH, "engine_id": "e2"}, ""])
    assert watched.prefill().restarts == 1
    watched.hear("p1", rank_reading(engine_id="e3"))
    watched.hear("p1", process("running", "other-boot/2"))
    assert watched.prefill().restarts == 2


def test_transfers_of_a_process_that_is_gone_are_gone() -> None:
    watched = Watched()
    watched.hear("p1", rank_reading(), ["inflight", "prefill-0", 0, 0.0, {"records": [FIELDS], "unlisted": 2}, ""])
    snapshot = watched.look()
    assert ([one.key for one in snapshot.transfers], snapshot.dropped) == (["k"], 2)
    watched.hear("p1", rank_reading(engine_id="e2"))
    assert (watched.look().transfers, watched.look().dropped) == ((), 0)


def test_a_silent_rank_keeps_its_transfers_for_a_while() -> None:
    watched = Watched()
    watched.hear("p1", rank_reading(), ["inflight", "prefill-0", 0, 0.0, {"records": [FIELDS], "unlisted": 0}, ""])
    watched.now += 30
    assert watched.look().transfers[0].prefill[0].stage_age_s == 31.0
    watched.now += 600
    assert watched.look().transfers == ()


def test_rates_by_the_hosts_clock() -> None:
    watched = Watched()
    for at, ended in ((5.0, 100), (7.0, 110)):
        watched.hear("p1", metrics(request_success_total=ended), at=at)
        # However late the line comes.
        watched.now += 0.1
    assert watched.prefill().request_rate == 5.0


def test_a_counter_that_begins_again_has_no_rate() -> None:
    watched = Watched()
    watched.hear("p1", metrics(request_success_total=100), at=1.0)
    watched.hear("p1", metrics(request_success_total=3), at=2.0)
    assert watched.prefill().request_rate is None
    watched.hear("p1", metrics(request_success_total=8), at=3.0)
    assert watched.prefill().request_rate == 5.0


def test_a_new_connection_has_no_rate_at_first() -> None:
    watched = Watched()
    watched.hear("p1", metrics(request_success_total=100), at=1.0)
    watched.state.connected("p1")
    watched.hear("p1", metrics(request_success_total=900), at=2.0)
    assert watched.prefill().request_rate is None


def test_an_old_rate_is_none_though_totals_stay() -> None:
    watched = Watched()
    for at, size in ((1.0, 10), (2.0, 20)):
        watched.hear("p1", ["rank-metrics", "prefill-0", 0, 0.0, {"pdctl_transfer_bytes_total": size}, ""], at=at)
    assert watched.prefill().ranks[0].bytes_per_s == 10.0
    watched.now += 11
    assert (watched.prefill().ranks[0].bytes_per_s, watched.prefill().ranks[0].posted_bytes) == (None, 20)


def test_percentiles_of_the_cluster_are_decodes() -> None:
    watched = Watched()
    name = "time_to_first_token_seconds_bucket"
    for host, instance in (("p1", "prefill-0"), ("d1", "decode-0")):
        for at, count in ((1.0, 0), (2.0, 10)):
            samples = {f"vllm:{name}|0.1": count, f"vllm:{name}|+Inf": count}
            watched.hear(host, ["metrics", instance, -1, 0.0, samples, ""], at=at)
    snapshot = watched.look()
    assert snapshot.ttft is not None
    assert snapshot.ttft.count == 10
    assert [one.ttft.count for one in snapshot.instances if one.ttft is not None] == [10, 10]


def test_stages_of_all_ranks() -> None:
    watched = Watched()
    name = "pdctl_transfer_stage_seconds_bucket|prefill|posted"
    for rank in range(2):
        for at, count in ((1.0, 0), (2.0, 100)):
            watched.hear("p1", ["rank-metrics", "prefill-0", rank, 0.0, {f"{name}|0.1": count}, ""], at=at)
    assert watched.look().stage_p99_s == {"prefill/posted": pytest.approx(0.099)}


def test_the_end_of_an_instance_is_explained() -> None:
    asked: list[tuple[str, int | None, int | None]] = []

    def diagnose(log: str, code: int | None, signal: int | None) -> str:
        asked.append((log, code, signal))
        return "out of memory"

    watched = Watched(diagnose=diagnose)
    watched.hear("p1", process("running"))
    assert watched.prefill().diagnosis == ""
    watched.hear("p1", process("exited", exit_code=None, exit_signal=9, log="the end"))
    # The log is told a few times only.
    watched.hear("p1", process("exited", exit_code=None, exit_signal=9))
    assert [watched.prefill().diagnosis for _ in range(3)] == ["out of memory"] * 3
    assert asked == [("the end", None, 9)]
    watched.hear("p1", process("running", "boot/2"))
    assert watched.prefill().diagnosis == ""


def test_without_a_diagnosis_its_exit_status() -> None:
    watched = Watched()
    watched.hear("p1", process("exited", exit_code=3, exit_signal=None, log="token=secret"))
    assert watched.prefill().diagnosis == "exit status 3"


def test_the_host() -> None:
    watched = Watched()
    value = {"sent": 100, "received": 10, "load": 0.5, "memory_available_bytes": 7, "interfaces": ["eth0"]}
    for at in (1.0, 3.0):
        watched.hear("p1", ["host", "", -1, 0.0, {**value, "sent": int(100 * at)}, ""], at=at)
        devices = {"devices": {"rdmap0": {"tx_bytes": 1000 * int(at)}}}
        watched.hear("p1", ["rdma", "", -1, 0.0, devices, ""], at=at)
    host = watched.host()
    assert (host.sent_bytes_per_s, host.received_bytes_per_s, host.load) == (100.0, 0.0, 0.5)
    assert dict(host.rdma["rdmap0"]) == {"tx_bytes": 1000.0}
    assert dict(host.baselines) == {}


def test_baselines_that_are_no_figures_are_passed_over() -> None:
    watched = Watched()
    given = {"d1": 2e9, "d2": "fast", "d3": -1, "d4": None, "d5": True}
    watched.hear("p1", ["host", "", -1, 0.0, {"load": 0.5, "baselines": given}, ""], at=1.0)
    assert dict(watched.host().baselines) == {"d1": 2e9}
    watched.hear("p1", ["host", "", -1, 0.0, {"load": 0.5, "baselines": ["d1"]}, ""], at=2.0)
    assert dict(watched.host().baselines) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
KINDS = ["rank", "inflight", "ended", "ended-trouble", "rank-metrics", "health", "metrics", "process", "host", "rdma"]
READINGS = st.tuples(
    st.sampled_from(KINDS) | st.text(max_size=3),
    st.sampled_from(["prefill-0", "decode-0", "", "nobody"]),
    st.integers(-1, 3) | JSON,
    st.floats(0, 5) | JSON,
    JSON,
    st.sampled_from(["", "trouble"]) | JSON,
).map(list)


@given(st.lists(READINGS | JSON, max_size=8), st.floats(0, 100) | JSON)
def test_no_line_ends_the_watch(readings: list[Any], at: Any) -> None:
    watched = Watched()
    watched.hear("p1", *readings, at=at)
    watched.look()
    watched.hear("p1", rank_reading())
    assert watched.prefill().ranks[0].inflight == 1


def test_the_request() -> None:
    request = host_request(PLAN, "p1", interval_s=1.0)
    assert [one["name"] for one in request["instances"]] == ["prefill-0", "router"]
    assert [rank["rank"] for rank in request["instances"][0]["ranks"]] == [0, 1]
    assert request["instances"][1]["metrics_port"] != request["instances"][1]["port"]
    assert request["metrics"] is WANTED
    assert host_request(PLAN, "d1", interval_s=1.0)["instances"][0]["name"] == "decode-0"
