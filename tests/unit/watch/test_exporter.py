from __future__ import annotations

import http.client
import re
import socket
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdctl.errors import UsageError
from pdctl.watch.acting import ActionEvent, Because
from pdctl.watch.exporter import LABEL_LIMIT, METRICS, VALUES_LIMIT, ClusterCollector, exported_names, make_registry
from pdctl.watch.exporter_server import CLIENTS_LIMIT, ExporterServer, parse_address
from pdctl.watch.snapshot import HostView, Percentiles
from tests.unit.watch.frames import DECODE, NOTE, PREFILL, RANK, SNAPSHOT, alert, frame

RANK_LABELS = {"cluster": "qwen3", "instance": "prefill-0", "role": "prefill", "rank": "0"}


def scrape(*frames, **more) -> list:
    collector = ClusterCollector(**more)
    for one in frames:
        collector.update(one)
    text = generate_latest(make_registry(collector)).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def values(samples, name: str, /, **labels: str) -> list[float]:
    return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]


def with_rank(rank, **more):
    return frame(snapshot=replace(SNAPSHOT, instances=(replace(PREFILL, ranks=(rank,)),), **more))


def test_a_scrape_has_the_metrics_of_ranks_with_their_labels() -> None:
    samples = scrape(frame(alert(), alert(NOTE)))
    assert values(samples, "pdctl_writer_alive", **RANK_LABELS) == [1]
    assert values(samples, "pdctl_writer_op_age_seconds", **RANK_LABELS, op="transfer") == [0.004]
    stage = {**RANK_LABELS, "side": "prefill", "stage": "posted"}
    assert values(samples, "pdctl_transfers_inflight", **stage) == [1]
    assert values(samples, "pdctl_transfer_oldest_seconds", **stage) == [0.5]
    assert values(samples, "pdctl_transfers_total", **RANK_LABELS, side="prefill", outcome="completed") == [7]
    assert values(samples, "pdctl_descriptors_total", **RANK_LABELS, state="posted") == [24]
    assert values(samples, "pdctl_transfer_bytes_total", **RANK_LABELS) == [4096]
    accepted = {"kind": "REG", "direction": "received", "result": "accepted"}
    assert values(samples, "pdctl_notifications_total", **RANK_LABELS, **accepted) == [8]
    assert values(samples, "pdctl_transfer_stage_p99_seconds", side="prefill", stage="posted") == [0.038]
    assert values(samples, "pdctl_instance_ttft_seconds", instance="prefill-0", quantile="0.99") == [0.9]
    assert values(samples, "pdctl_host_sent_bytes_per_second", host="h1") == [10]
    assert values(samples, "pdctl_watch_build_info") == [1]


def test_an_alert_has_a_series_for_each_instance_and_is_counted_once() -> None:
    samples = scrape(frame(alert(), alert(), alert(NOTE)))
    labels = {"code": "T002", "name": "write-stalled", "severity": "critical", "cluster": "qwen3"}
    assert values(samples, "pdctl_alert", **labels, instance="prefill-0") == [2]
    assert values(samples, "pdctl_alert", **labels, instance="decode-0") == [2]
    assert values(samples, "pdctl_alert", code="E005", instance="", severity="info") == [1]
    assert values(samples, "pdctl_alerts_open", severity="critical") == [2]
    assert values(samples, "pdctl_alerts_open", severity="warning") == [0]
    assert values(samples, "pdctl_alert_events_total", code="T002", event="opened") == [2]


def test_before_the_first_poll_there_is_nothing_of_the_cluster() -> None:
    assert {sample.name for sample in scrape()} == {"pdctl_watch_build_info"}


def test_what_was_not_read_is_absent_and_never_zero() -> None:
    silent = replace(RANK, error="timed out", age_s=12.0)
    samples = scrape(with_rank(silent))
    assert values(samples, "pdctl_rank_up", **RANK_LABELS) == [0]
    assert values(samples, "pdctl_reading_age_seconds", **RANK_LABELS) == [12]
    about_rank = {s.name for s in samples if RANK_LABELS.items() <= s.labels.items()}
    assert about_rank == {"pdctl_rank_up", "pdctl_reading_age_seconds"}
    never = scrape(with_rank(replace(RANK, age_s=None, error="refused")))
    assert values(never, "pdctl_reading_age_seconds") == []
    unsaid = scrape(with_rank(replace(RANK, writer="", operation="", posted_bytes=None, stages_inflight={})))
    names = {s.name for s in unsaid}
    assert not names & {
        "pdctl_writer_alive", "pdctl_writer_state", "pdctl_transfers_inflight", "pdctl_writer_op_age_seconds",
        "pdctl_transfer_bytes_total",
    }  # fmt: skip


def test_a_dead_writer_is_zero() -> None:
    assert values(scrape(with_rank(replace(RANK, writer="dead"))), "pdctl_writer_alive") == [0]


@pytest.mark.parametrize(
    ("changes", "up"),
    [
        ({}, [1]),
        ({"healthy": False}, [0]),
        ({"process": "exited", "healthy": None}, [0]),
        ({"process": "stopped"}, [0]),
        ({"healthy": None}, []),
        ({"process": None, "healthy": True}, [1]),
    ],
)
def test_an_instance_is_up_down_or_unknown(changes: dict, up: list[float]) -> None:
    snapshot = replace(SNAPSHOT, instances=(replace(PREFILL, **changes),))
    assert values(scrape(frame(snapshot=snapshot)), "pdctl_instance_up") == up


def test_of_a_host_that_is_gone_the_last_figures_are_not_repeated() -> None:
    snapshot = replace(
        SNAPSHOT,
        instances=(replace(PREFILL, error="timed out", healthy=None), DECODE),
        hosts=(HostView("h1", age_s=30.0, error="timed out", load=0.5), HostView("h2", age_s=0.1, load=0.25)),
    )
    samples = scrape(frame(snapshot=snapshot))
    assert values(samples, "pdctl_host_up", host="h1") == [0]
    assert values(samples, "pdctl_host_load_per_core") == [0.25]
    gone = {s.name for s in samples if s.labels.get("instance") == "prefill-0" and "rank" not in s.labels}
    assert gone == {"pdctl_instance_restarts_total"}


def test_labels_from_outside_are_bounded_and_escaped() -> None:
    many = {f"K{number:04}/sent/ok": 1 for number in range(500)}
    evil = 'a"b\\c\nd\ud800' + "z" * 1000
    other = evil[:LABEL_LIMIT] + "different"
    odd = replace(RANK, writer=evil, notifications={**many, "no-slashes": 1}, outcomes={evil: 3, f"x/{evil}": 4})
    samples = scrape(with_rank(odd, stage_p99_s={f"prefill/{evil}": 1.0, f"prefill/{other}": 2.0}))
    assert len(values(samples, "pdctl_notifications_total")) == VALUES_LIMIT
    assert values(samples, "pdctl_transfers_total") == [4]
    for sample in samples:
        assert all(len(value) <= LABEL_LIMIT for value in sample.labels.values())
    (state,) = [s.labels["state"] for s in samples if s.name == "pdctl_writer_state"]
    assert state.startswith('a"b\\c\nd?zz')
    assert len({tuple(s.labels.items()) for s in samples if s.name == "pdctl_transfer_stage_p99_seconds"}) == len(
        values(samples, "pdctl_transfer_stage_p99_seconds")
    )


def test_percentiles_of_nothing_are_absent() -> None:
    snapshot = replace(SNAPSHOT, ttft=Percentiles(0.0, 0.0, 0), tpot=Percentiles(0.1, 0.2, 3))
    samples = scrape(frame(snapshot=snapshot))
    assert values(samples, "pdctl_ttft_seconds") == []
    assert values(samples, "pdctl_tpot_seconds", quantile="0.5") == [0.1]


def test_polls_errors_ages_and_sinks_are_counted() -> None:
    now = [10.0]
    failing = frame(snapshot=replace(SNAPSHOT, poll_errors=2))
    collector = ClusterCollector(clock=lambda: now[0], sink_counts=lambda: {"webhook": {"delivered": 3, "dropped": 1}})
    assert collector.age_s is None
    for _ in range(3):
        collector.update(failing)
    now[0] = 14.5
    text = generate_latest(make_registry(collector)).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert values(samples, "pdctl_watch_polls_total") == [3]
    assert values(samples, "pdctl_watch_poll_errors_total") == [6]
    assert values(samples, "pdctl_watch_age_seconds") == [4.5]
    assert values(samples, "pdctl_watch_sink_events_total", sink="webhook", result="dropped") == [1]
    assert collector.age_s == 4.5


def test_only_metrics_of_the_list_are_exported_and_all_can_be() -> None:
    full = replace(
        SNAPSHOT,
        ttft=Percentiles(1, 2, 3),
        tpot=Percentiles(1, 2, 3),
        instances=(replace(PREFILL, tpot=Percentiles(1, 2, 3)),),
        hosts=(HostView("h1", 0.1, "", 1.0, 2.0, {"efa0": {"rdma_write_bytes": 5.0}}, 0.5, 10),),
    )
    acted = ActionEvent("drain", ("prefill-0",), Because("W002", "stuck", "prefill-0"), "refused")
    shown = replace(frame(alert(), snapshot=full), actions=(acted,))
    samples = scrape(shown, shown, sink_counts=lambda: {"on-alert": {"failed": 1}})
    assert {s.name for s in samples} == exported_names()
    assert values(samples, "pdctl_watch_actions_total", action="drain", outcome="refused") == [2]
    assert all(re.fullmatch(r"pdctl_[a-z0-9_]+", name) for name in METRICS)


# --- the server


@pytest.fixture
def server():
    fine = [True]
    made = ExporterServer(make_registry(ClusterCollector()), "127.0.0.1", 0, healthy=lambda: fine[0])
    made.fine = fine
    yield made
    made.close()


def get(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type", ""), response.read().decode()
    finally:
        connection.close()


def test_metrics_health_and_nothing_else_are_served(server) -> None:
    status, kind, body = get(server.port, "/metrics?x=1")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "pdctl_watch_build_info" in body
    assert get(server.port, "/healthz")[0] == 200
    server.fine[0] = False
    assert get(server.port, "/healthz")[0] == 503
    assert get(server.port, "/etc/passwd")[0] == 404
    assert get(server.port, "/metrics", "POST")[0] == 501


def test_idle_connections_are_limited_and_do_not_hold_up_the_end(server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(CLIENTS_LIMIT)]
    try:
        # Those that were accepted hold all places; the next one is hung up on.
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as late:
            assert late.recv(1) == b""
        server.close()
    finally:
        for one in idle:
            one.close()


def test_a_taken_port_is_an_error_with_a_hint(server) -> None:
    with pytest.raises(UsageError, match=f"127.0.0.1:{server.port}") as error:
        ExporterServer(make_registry(ClusterCollector()), "127.0.0.1", server.port, healthy=lambda: True)
    assert "--exporter" in error.value.hint


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9109", ("127.0.0.1", 9109)),
        (":9109", ("127.0.0.1", 9109)),
        ("0.0.0.0:9109", ("0.0.0.0", 9109)),
        ("[::1]:0", ("::1", 0)),
        ("host:1", ("host", 1)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "1:99999", "::1:80", "host:-1", "host:²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)
