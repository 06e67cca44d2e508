"""What a rank shows of itself over HTTP, and that it goes on showing it when the rest is stuck."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pdctl_connector import telemetry as telemetry_module
from pdctl_connector import wire
from pdctl_connector.decode_side import DecodeSide
from pdctl_connector.ledger import OUTCOMES, STAGES, Ledger
from pdctl_connector.nixl_guard import NixlGuard
from pdctl_connector.prefill_side import PrefillSide
from pdctl_connector.settings import Settings
from pdctl_connector.step import Prefilling, Step
from pdctl_connector.telemetry import BUCKETS, RECORDS_LIMIT, StageTimes, Telemetry
from pdctl_connector.version import __version__
from pdctl_connector.writer import Writer
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

HOST = "127.0.0.1"

# The table that pdctl, its dashboards and its rules are written against: name, type, labels.
METRICS = {
    "pdctl_writer_alive": ("gauge", set()),
    "pdctl_writer_heartbeat_age_seconds": ("gauge", set()),
    "pdctl_writer_op_age_seconds": ("gauge", {"op"}),
    "pdctl_writer_loops_total": ("counter", set()),
    "pdctl_writer_errors_total": ("counter", set()),
    "pdctl_transfers_inflight": ("gauge", {"side", "stage"}),
    "pdctl_transfer_oldest_seconds": ("gauge", {"side", "stage"}),
    "pdctl_transfers_total": ("counter", {"side", "outcome"}),
    "pdctl_transfer_stage_seconds": ("histogram", {"side", "stage"}),
    "pdctl_descriptors_total": ("counter", {"state"}),
    "pdctl_transfer_bytes_total": ("counter", set()),
    "pdctl_notifications_total": ("counter", {"kind", "direction", "result"}),
    "pdctl_handshakes_total": ("counter", {"result"}),
}


class Agent:
    """NIXL, that can get stuck."""

    def __init__(self) -> None:
        self.inbox: list[bytes] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.entered = threading.Event()

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.entered.set()
        assert self.go_on.wait(30)
        messages, self.inbox = self.inbox, []
        return {"peer": messages} if messages else {}


class Transport:
    """Neither side reaches anybody."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: {"writers": (0, 1), "refusal": "", "send": False, "tell": False}.get(name, "connecting")


class Rank:
    """A writer that runs, with telemetry, and NIXL behind its guard."""

    def __init__(self, *, host: str = HOST, **settings: Any) -> None:
        port = free_port()
        self.settings = Settings(telemetry_host=host, telemetry_port=port, **settings)
        self.agent = Agent()
        guard: Any = NixlGuard(self.agent)
        self.guard = guard
        self.telemetry = Telemetry(role="kv_producer", engine_id="engine-7", rank=0, settings=self.settings)
        self.ledger = Ledger(observer=self.telemetry.observe_stage)
        prefill = PrefillSide(Transport(), self.ledger, lease_s=30, parked_s=60)
        decode = DecodeSide(
            Transport(), self.ledger, engine_id="e", host="h", port=1, tp_size=1, tp_rank=0, timeout_s=30
        )
        rank = self

        class Link:
            def notifications(self) -> list[bytes]:
                return [data for batch in rank.guard.get_new_notifs().values() for data in batch]

            def housekeeping(self, now: float) -> None:
                pass

        self.writer = Writer(prefill, decode, Link())
        self.telemetry.attach(self.writer, self.ledger, guard)
        self.telemetry.serve()

    def end(self) -> None:
        self.agent.go_on.set()
        if self.writer.alive:
            assert self.writer.stop(10)
        self.telemetry.close()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{HOST}:{self.settings.telemetry_port}{path}", timeout=10) as answer:
            body = answer.read()
            return json.loads(body) if answer.headers["Content-Type"] == "application/json" else body.decode()

    def status(self, path: str) -> int:
        try:
            self.get(path)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def until(self, state: str) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while True:
            writer: dict[str, Any] = self.get("/healthz")["writer"]
            if writer["state"] == state:
                return writer
            assert time.monotonic() < deadline, writer
            time.sleep(0.01)

    def samples(self) -> dict[str, Metric]:
        return {family.name: family for family in text_string_to_metric_families(self.get("/metrics"))}

    def value(self, name: str, **labels: str) -> float:
        for family in self.samples().values():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        raise AssertionError(f"no {name} {labels}")


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank(cluster="qwen", instance="prefill-0")
    yield made
    made.end()


# --- /healthz ---------------------------------------------------------------------------------------------------------


def test_health_has_this_shape(rank: Rank) -> None:
    rank.writer.start()
    rank.until("idle")
    health = rank.get("/healthz")
    writer = health.pop("writer")
    assert writer.pop("alive") is True
    assert writer.pop("state") == "idle"
    assert writer.pop("op") in (None, "get_new_notifs")
    assert isinstance(writer.pop("op_age_s"), float | None)
    assert 0 <= writer.pop("heartbeat_age_s") < 10
    assert writer.pop("loops") > 0
    assert writer == {"errors": 0, "last_error": None}
    transfers = health.pop("transfers")
    assert transfers["inflight"] == 0
    assert transfers["oldest_s"] == 0.0
    assert set(transfers["outcomes"]) == {f"{side}/{name}" for side, names in OUTCOMES.items() for name in names}
    assert health.pop("uptime_s") >= 0
    assert health.pop("pid") > 0
    assert health == {
        "role": "kv_producer",
        "engine_id": "engine-7",
        "rank": 0,
        "version": __version__,
        "cluster": "qwen",
        "instance": "prefill-0",
    }


def test_idle_busy_stuck_and_dead_are_four_answers(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.get("/healthz")["writer"]["state"] == "dead"
    assert rank.get("/healthz")["writer"]["alive"] is False
    rank.writer.start()
    rank.until("idle")

    rank.ledger.open("prefill", "k", 0, "prefilling")
    monkeypatch.setattr(Writer, "busy", property(lambda self: True))
    rank.until("busy")
    monkeypatch.undo()

    monkeypatch.setattr(telemetry_module, "STUCK_S", 0.2)
    rank.agent.go_on.clear()
    writer = rank.until("stuck")
    assert writer["alive"] is True
    assert writer["op"] == "get_new_notifs"
    assert writer["op_age_s"] >= 0.1
    assert writer["heartbeat_age_s"] >= 0.2
    assert rank.value("pdctl_writer_op_age_seconds", op="get_new_notifs") >= 0.2
    assert rank.value("pdctl_writer_heartbeat_age_seconds") >= 0.2
    rank.agent.go_on.set()
    monkeypatch.setattr(telemetry_module, "STUCK_S", 60.0)
    rank.until("idle")

    assert rank.writer.stop(10)
    writer = rank.until("dead")
    assert writer["alive"] is False
    assert rank.value("pdctl_writer_alive") == 0


def test_an_error_of_the_writer_is_shown(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(now: float) -> None:
        raise ZeroDivisionError("at once")

    monkeypatch.setattr(rank.writer.decode, "tick", explode)
    rank.writer.start()
    rank.until("idle")
    writer = rank.get("/healthz")["writer"]
    assert writer["errors"] > 0
    assert writer["last_error"] == "decode: ZeroDivisionError: at once"
    assert rank.value("pdctl_writer_errors_total") > 0


def test_tables_that_change_while_they_are_looked_through_mean_busy(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(self: Writer) -> bool:
        raise RuntimeError("dictionary changed size during iteration")

    rank.writer.start()
    monkeypatch.setattr(Writer, "busy", property(changed))
    rank.until("busy")


# --- what is shown while the rest is stuck ----------------------------------------------------------------------------


def test_everything_answers_while_the_writer_is_stuck_in_nixl(rank: Rank) -> None:
    rank.agent.go_on.clear()
    rank.writer.start()
    assert rank.agent.entered.wait(10)
    rank.ledger.open("prefill", "k", 0, "prefilling")
    for _ in range(3):
        assert rank.get("/healthz")["transfers"]["inflight"] == 1
        assert len(rank.get("/transfers")["transfers"]) == 1
        assert rank.value("pdctl_transfers_inflight", side="prefill", stage="prefilling") == 1


def test_everything_answers_while_locks_are_held(rank: Rank) -> None:
    """NIXL's, as by a handshake that takes its time, and that of the results for the engine."""
    rank.writer.start()
    rank.until("idle")
    with rank.guard._lock, rank.writer._lock:
        assert rank.get("/healthz")["writer"]["alive"] is True
        assert rank.get("/transfers?state=recent")["transfers"] == []
        assert "pdctl_writer_alive 1.0" in rank.get("/metrics")


def test_a_client_that_says_nothing_does_not_keep_others_out(rank: Rank) -> None:
    with socket.create_connection((HOST, rank.settings.telemetry_port)):
        assert rank.status("/healthz") == 200


def test_too_many_clients_are_hung_up_on_and_then_it_goes_on(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    address = (HOST, rank.settings.telemetry_port)
    silent = [socket.create_connection(address) for _ in range(telemetry_module.CLIENTS_LIMIT)]
    try:
        with socket.create_connection(address) as one_more:
            one_more.settimeout(10)
            assert one_more.recv(1) == b""
    finally:
        for connection in silent:
            connection.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            assert rank.status("/healthz") == 200
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


# --- /transfers -------------------------------------------------------------------------------------------------------


def test_transfers_in_flight_are_the_oldest_first_and_recent_ones_the_latest_first(rank: Rank) -> None:
    for key in ("a", "b", "c"):
        rank.ledger.open("prefill", key, 0, "prefilling", request_id=f"cmpl-{key}", peer="engine-d", tokens=40)
    for key in ("a", "b"):
        rank.ledger.advance("prefill", key, 0, "cancelled", reason="the client left")
    shown = rank.get("/transfers")
    assert set(shown) == {"state", "unix", "transfers"}
    assert shown["state"] == "inflight"
    assert abs(shown["unix"] - time.time()) < 60
    assert [record["key"] for record in shown["transfers"]] == ["c"]
    assert [record["key"] for record in rank.get("/transfers?state=inflight")["transfers"]] == ["c"]
    recent = rank.get("/transfers?state=recent")
    assert recent["state"] == "recent"
    assert [record["key"] for record in recent["transfers"]] == ["b", "a"]
    record = recent["transfers"][0]
    assert record["outcome"] == "cancelled"
    assert record["reason"] == "the client left"
    assert set(record) == {
        "side", "key", "attempt", "stage", "outcome", "reason", "request_id", "peer", "started_unix", "age_s",
        "stage_age_s", "stages", "tokens", "blocks", "descriptors", "bytes", "writers",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "count"), [("limit=2", 2), ("limit=0", 0), ("limit=-5", 0), ("limit=99999999", 5), ("limit=", 5)]
)
def test_limit(rank: Rank, query: str, count: int) -> None:
    for number in range(5):
        rank.ledger.open("prefill", f"k{number}", 0, "ready")
    assert len(rank.get(f"/transfers?{query}")["transfers"]) == count


def test_no_more_than_so_many_records_at_once(rank: Rank) -> None:
    for number in range(RECORDS_LIMIT + 5):
        rank.ledger.open("prefill", f"k{number}", 0, "ready")
    assert len(rank.get("/transfers")["transfers"]) == 100
    assert len(rank.get("/transfers?limit=1000000")["transfers"]) == RECORDS_LIMIT


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/transfers?state=lost", 400),
        ("/transfers?limit=many", 400),
        ("/transfers?limit=1e3", 400),
        ("/transfers?limit=" + "9" * 5000, 400),
        ("//[", 400),
        ("/", 404),
        ("/healthz/more", 404),
        ("/METRICS", 404),
        ("/healthz?x=1&&&=%zz", 200),
        ("/transfers?state=recent&state=lost", 200),
    ],
)
def test_bad_queries(rank: Rank, caplog: pytest.LogCaptureFixture, path: str, status: int) -> None:
    got, kind, body = rank.telemetry.respond_or_fail(path)
    assert got == status
    assert body
    assert (kind == "text/plain") == (status != 200)
    assert not caplog.records
    if not path.startswith("//"):
        assert rank.status(path) == status


def test_other_methods_and_nonsense_leave_it_alive(rank: Rank) -> None:
    for data in (
        b"POST /healthz HTTP/1.0\r\n\r\n",
        b"\x00\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection((HOST, rank.settings.telemetry_port)) as connection:
            connection.settimeout(10)
            connection.sendall(data)
            assert b"200" not in connection.recv(100)
    assert rank.status("/healthz") == 200


def test_a_bug_is_a_500_and_logged_once(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Ledger, "counts", lambda self: 1 / 0)
    for _ in range(3):
        assert rank.status("/healthz") == 500
    assert rank.status("/transfers") == 200
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "/healthz failed" in caplog.text


# --- /metrics ---------------------------------------------------------------------------------------------------------


def busy_rank(rank: Rank) -> None:
    """Something of everything happened."""
    rank.telemetry.count_sent("REG", True)
    rank.telemetry.count_sent("HB", False)
    rank.telemetry.count_handshake("ready")
    rank.agent.inbox += [wire.encode(wire.Heartbeat(["k"])), b"PDCTL:\x01?", b"of another connector"]
    rank.writer.hand_over(Step(prefilling=[Prefilling("cmpl-1-0123abcd", "cmpl-1", 40)]))
    rank.writer.start()
    deadline = time.monotonic() + 20
    while len(rank.writer.outcomes()) < 3 or not rank.ledger.counts().inflight["prefill", "prefilling"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank.writer.prefill.written.update(posted=7, completed=5, failed=2, bytes=4096)


def test_every_metric_of_the_table_appears_with_its_type_and_labels(rank: Rank) -> None:
    busy_rank(rank)
    rank.agent.go_on.clear()
    deadline = time.monotonic() + 20
    while rank.guard.operation is None:
        assert time.monotonic() < deadline
    families = rank.samples()
    for name, (kind, labels) in METRICS.items():
        family = families.get(name.removesuffix("_total"))
        assert family is not None, name
        assert family.type == kind, name
        assert family.documentation.endswith("."), name
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, sample
            if kind == "counter":
                assert sample.name == name
    shown = {name + ("_total" if family.type == "counter" else "") for name, family in families.items()}
    assert shown == set(METRICS)


def test_the_counts_are_those_that_happened(rank: Rank) -> None:
    busy_rank(rank)
    value = rank.value
    assert value("pdctl_writer_alive") == 1
    assert value("pdctl_writer_loops_total") > 0
    assert value("pdctl_notifications_total", kind="REG", direction="sent", result="sent") == 1
    assert value("pdctl_notifications_total", kind="HB", direction="sent", result="failed") == 1
    assert value("pdctl_notifications_total", kind="HB", direction="received", result="accepted") == 1
    assert value("pdctl_notifications_total", kind="?", direction="received", result="kind") == 1
    assert value("pdctl_notifications_total", kind="?", direction="received", result="foreign") == 1
    assert value("pdctl_handshakes_total", result="ready") == 1
    assert value("pdctl_handshakes_total", result="failed") == 0
    assert value("pdctl_transfers_inflight", side="prefill", stage="prefilling") == 1
    assert value("pdctl_transfer_oldest_seconds", side="prefill", stage="prefilling") > 0
    assert value("pdctl_transfers_total", side="decode", outcome="received") == 0
    assert [value("pdctl_descriptors_total", state=state) for state in ("posted", "completed", "failed")] == [7, 5, 2]
    assert value("pdctl_transfer_bytes_total") == 4096


def test_times_in_a_stage_are_a_histogram_of_every_stage(rank: Rank) -> None:
    for seconds in (0.0004, 0.0005, 0.02, 1000.0):
        rank.telemetry.observe_stage("decode", "registered", seconds)
    name = "pdctl_transfer_stage_seconds"
    family = rank.samples()[name]
    assert {(s.labels["side"], s.labels["stage"]) for s in family.samples} == {
        (side, stage) for side, stages in STAGES.items() for stage in stages
    }
    at = {"side": "decode", "stage": "registered"}
    assert rank.value(f"{name}_count", **at) == 4
    assert rank.value(f"{name}_sum", **at) == pytest.approx(1000.0209)
    assert rank.value(f"{name}_bucket", **at, le="0.0005") == 2
    assert rank.value(f"{name}_bucket", **at, le="0.025") == 3
    assert rank.value(f"{name}_bucket", **at, le=str(BUCKETS[-1])) == 3
    assert rank.value(f"{name}_bucket", **at, le="+Inf") == 4
    assert rank.value(f"{name}_count", side="prefill", stage="posted") == 0


def test_the_ledger_feeds_the_histogram(rank: Rank) -> None:
    rank.ledger.open("prefill", "k", 0, "prefilling")
    rank.ledger.advance("prefill", "k", 0, "ready")
    assert rank.value("pdctl_transfer_stage_seconds_count", side="prefill", stage="prefilling") == 1


def test_times_may_be_counted_by_many_threads() -> None:
    times = StageTimes()
    threads = [
        threading.Thread(target=lambda: [times.observe("prefill", "ready", 0.01) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    counts = [s.value for s in times.family("x", "X.").samples if s.name == "x_count" and s.labels["stage"] == "ready"]
    assert counts == [2000]


def test_nothing_is_written_into_vllms_own_metrics(tmp_path: Path) -> None:
    """With several API servers vLLM sets PROMETHEUS_MULTIPROC_DIR, and shows what any process writes there."""
    code = (
        "from pdctl_connector.telemetry import Telemetry; from pdctl_connector.settings import Settings\n"
        "t = Telemetry(role='kv_both', engine_id='e', rank=0, settings=Settings())\n"
        "t.observe_stage('decode', 'registered', 0.1); t.count_sent('REG', True); assert b'registered' in t.metrics()"
    )
    folder = str(Path(telemetry_module.__file__).parents[1])
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": folder}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_before_anything_is_attached_it_answers_too() -> None:
    telemetry = Telemetry(role="", engine_id="e", rank=3, settings=Settings())
    health = json.loads(telemetry.respond("/healthz")[2])
    assert health["writer"]["state"] == "dead"
    assert health["writer"]["heartbeat_age_s"] is None
    assert health["rank"] == 3
    assert json.loads(telemetry.respond("/transfers")[2])["transfers"] == []
    assert b"pdctl_writer_alive 0.0" in telemetry.metrics()


# --- where it listens -------------------------------------------------------------------------------------------------


def test_it_listens_on_loopback_alone(rank: Rank) -> None:
    server = rank.telemetry._server
    assert server is not None
    assert server.socket.getsockname() == (HOST, rank.settings.telemetry_port)
    assert rank.telemetry.port == rank.settings.telemetry_port


def test_a_rank_adds_its_number_to_the_port() -> None:
    base = free_port()
    settings = Settings(telemetry_port=base - 3)
    telemetry = Telemetry(role="", engine_id="e", rank=3, settings=settings)
    telemetry.serve()
    try:
        assert telemetry.port == base
    finally:
        telemetry.close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_ipv6_works_where_the_machine_has_it() -> None:
    settings = Settings(telemetry_host="::1", telemetry_port=free_port())
    telemetry = Telemetry(role="", engine_id="e", rank=0, settings=settings)
    telemetry.serve()
    try:
        assert (telemetry.port is not None) == has_ipv6()
        if telemetry.port is not None:
            with urllib.request.urlopen(f"http://[::1]:{telemetry.port}/healthz", timeout=10) as answer:
                assert answer.status == 200
    finally:
        telemetry.close()


@pytest.mark.parametrize("case", ["taken", "beyond the last port", "no such address"])
def test_a_port_that_cannot_be_had_is_told_and_costs_no_transfer(case: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = {"taken": taken.getsockname()[1], "beyond the last port": 65535}.get(case, free_port())
        host = "192.0.2.1" if case == "no such address" else HOST
        rank = 1 if case == "beyond the last port" else 0
        telemetry = Telemetry(
            role="", engine_id="e", rank=rank, settings=Settings(telemetry_host=host, telemetry_port=port)
        )
        telemetry.serve()
    assert telemetry.port is None
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert f"cannot listen on {host} port {port + rank}" in caplog.text
    telemetry.close()


def test_no_port_means_no_server(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(role="", engine_id="e", rank=2, settings=Settings())
    telemetry.serve()
    assert telemetry.port is None
    telemetry.close()
    assert not caplog.records


def test_closing_frees_the_port(rank: Rank) -> None:
    rank.telemetry.close()
    rank.telemetry.close()
    with socket.create_server((HOST, rank.settings.telemetry_port)):
        pass
