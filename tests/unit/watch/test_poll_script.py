"""The script that looks at a node: its parsers, and its HTTP client against servers that misbehave."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.node import watch_facts as script
from pdctl.watch.poll_records import read_record
from pdctl.watch.poll_request import WANTED
from tests.support.ranks import Servers, SimulatedRank, record


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[SimulatedRank, int]]:
    rank, port = SimulatedRank("prefill-0"), free_port()
    with Servers() as servers:
        servers.serve(rank, port)
        yield rank, port


class TestGet:
    def test_a_body_in_chunks(self, served: tuple[SimulatedRank, int]) -> None:
        rank, port = served
        rank.manner = "healthy"
        assert script.read_health(script.fetch("127.0.0.1", port, "/healthz", 5, 10_000), "prefill-0", 0)["loops"] > 0

    @pytest.mark.parametrize(
        ("manner", "words"),
        [
            ("hung", "no answer within 0.3 s"),
            ("drip", "no answer within 0.3 s|does not answer in HTTP"),
            ("huge", "answers with too much"),
            ("half", "answers by half"),
            ("closing", "does not answer in HTTP|cannot be asked"),
            ("error", "answers /healthz with HTTP 500"),
        ],
    )
    def test_one_that_misbehaves(self, served: tuple[SimulatedRank, int], manner: Any, words: str) -> None:
        rank, port = served
        rank.manner = manner
        timeout = 0.3 if manner in ("hung", "drip") else 10
        with pytest.raises(script.Trouble, match=words):
            script.fetch("127.0.0.1", port, "/healthz", timeout, 64 * 1024)

    def test_nobody_listens(self) -> None:
        with pytest.raises(script.Trouble, match="nothing listens on port"):
            script.get("127.0.0.1", free_port(), "/", 5, 100)


class TestHealth:
    def test_garbage(self) -> None:
        for body in (b"", b"[1]", b"\xff", b"[" * 100_000, b"{}", b'{"writer": {}, "transfers": 3}', b"1" * 60_000):
            with pytest.raises(script.Trouble, match="nonsense"):
                script.read_health(body, "prefill-0", 0)

    def test_another_one_answers(self) -> None:
        body = json.dumps(SimulatedRank("decode-3", rank=2).health()).encode()
        with pytest.raises(script.Trouble, match="its telemetry port is answered by rank 2 of decode-3"):
            script.read_health(body, "prefill-0", 0)

    def test_numbers_that_are_none(self) -> None:
        health = SimulatedRank("prefill-0").health()
        health["pid"], health["uptime_s"] = True, math.nan
        health["transfers"]["inflight"] = 10**30
        found = script.read_health(json.dumps(health).encode(), "prefill-0", 0)
        assert (found["pid"], found["uptime_s"], found["inflight"]) == (None, None, None)


class TestRecords:
    def test_the_poller_reads_what_the_script_writes(self) -> None:
        body = {"unix": 1001.5, "transfers": [record("decode", "k", "registered", peer="p", bytes=9), 3, {}]}
        (fields,) = script.read_transfers(json.dumps(body).encode())
        found = read_record(fields, instance="decode-0", rank=1, engine_id="e", read_at=50.0)
        assert (found.side, found.key, found.peer, found.bytes, found.outcome) == ("decode", "k", "p", 9, "")
        # By the host's own clock it began 1.5 s ago.
        assert found.begun_at == 48.5

    @given(st.dictionaries(st.sampled_from(list(record("decode", "k", "s"))), st.none() | st.text() | st.integers()))
    def test_whatever_a_record_has(self, odd: dict[str, Any]) -> None:
        fields = script.read_record({**record("decode", "k", "registered"), **odd}, 1001.0)
        if fields is not None:
            line = json.loads(json.dumps(fields))
            read_record(line, instance="decode-0", rank=0, engine_id="", read_at=0.0)


class TestMetrics:
    def test_samples(self) -> None:
        text = (
            "# TYPE a counter\n"
            'vllm:num_requests_running{engine="0",model_name="a}b \\" c"} 2.0\n'
            'vllm:num_requests_running{engine="1"} 3\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.25\n'
            'vllm:time_to_first_token_seconds_bucket{le="+Inf",engine="0"} 7 1700000000\n'
            "vllm:num_requests_waiting{half\nvllm:num_requests_waiting NaN\nvllm:num_requests_waiting_total 9\n"
        )
        assert script.read_metrics(text.encode(), WANTED["vllm"]) == {
            "vllm:num_requests_running": 5.0,
            "vllm:kv_cache_usage_perc": 0.5,
            "vllm:time_to_first_token_seconds_bucket|+Inf": 7.0,
        }

    def test_their_number_is_bounded(self) -> None:
        text = "".join(f'pdctl_notifications_total{{kind="{n}"}} 1\n' for n in range(10_000))
        assert len(script.read_metrics(text.encode(), WANTED["rank"])) == script.SAMPLES

    @given(st.text())
    def test_any_text(self, text: str) -> None:
        script.read_metrics(("pdctl_descriptors_total" + text).encode(errors="replace"), WANTED["rank"])


class TestLine:
    def test_one_that_is_too_long_is_cut_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(script, "LINE_LIMIT", 30_000)
        fields = script.read_record(record("decode", "k", "registered"), None)
        readings = [["inflight", "decode-0", 0, 0.0, {"records": [fields] * 500, "unlisted": 3}, ""]]
        line = script.as_line(1, 2.0, readings)
        assert len(line) < 30_000 + 100
        value = json.loads(line[len(script.PREFIX) :])["readings"][0][4]
        assert (len(value["records"]), value["unlisted"]) == (200, 303)

    def test_nothing_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(script, "LINE_LIMIT", 10)
        (reading,) = json.loads(script.as_line(1, 2.0, [["health", "x", -1, 0.0, 200, ""]])[len(script.PREFIX) :])[
            "readings"
        ]
        assert reading[0] == "host"
        assert "its readings are more than" in reading[5]


class TestHost:
    def test_interfaces(self) -> None:
        assert script.ipv4_addresses().get("127.0.0.1") == "lo"
        listing = "00000000000000000000000000000001 01 80 10 80       lo\nnonsense\n"
        assert script.ipv6_addresses(listing) == {"::1": "lo"}

    def test_bytes(self) -> None:
        listing = "Inter-| x\n face | y\n    lo: 5 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n  eth0:nonsense\n"
        assert script.interface_bytes(listing) == {"lo": (5, 7)}

    def test_rdma_counters(self, tmp_path: Path) -> None:
        port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
        for folder, name, value in (
            (port / "counters", "port_xmit_data", "25"),
            (port / "hw_counters", "out_of_sequence", "3"),
            (port / "hw_counters", "lifespan", "10"),
            (tmp_path / "sys/class/infiniband/rdmap0/hw_counters", "rdma_write_bytes", "77"),
            (tmp_path / "sys/class/infiniband/rdmap0/ports/1/hw_counters", "rdma_write_bytes", "N/A"),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(value + "\n")
        assert script.read_rdma(str(tmp_path)) == {
            "mlx5_0": {"tx_bytes": 100, "out_of_sequence": 3},
            "rdmap0": {"rdma_write_bytes": 77},
        }

    def test_the_doctors_baselines(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PDCTL_HOME", raising=False)
        folder = tmp_path / ".pdctl" / "probe"
        assert script.read_baselines(str(tmp_path)) == {}
        folder.mkdir(parents=True)
        (folder / "to-d1.json").write_text(json.dumps({"decode": "d1", "bandwidth_mb_s": 1500.5}))
        (folder / "to-d2.json").write_text("{nonsense")
        (folder / "to-d3.json").write_text(json.dumps({"decode": "d3", "bandwidth_mb_s": None}))
        (folder / "from-p1.json").write_text(json.dumps({"decode": "p1", "bandwidth_mb_s": 1.0}))
        assert script.read_baselines(str(tmp_path)) == {"d1": 1500.5e6}
        monkeypatch.setenv("PDCTL_HOME", str(tmp_path / "elsewhere"))
        assert script.read_baselines(str(tmp_path)) == {}


class TestProcesses:
    def make(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **state: Any) -> script.Processes:
        monkeypatch.setenv("PDCTL_HOME", str(tmp_path))
        folder = tmp_path / "c" / "prefill-0"
        folder.mkdir(parents=True)
        if state:
            (folder / "state.json").write_text(json.dumps(state))
            (folder / "vllm.log").write_text("the last words\n")
            (folder / "exit.json").write_text(json.dumps({"start_id": "s", "code": None, "signal": 9}))
        return script.Processes({"cluster": "c", "instances": [{"name": "prefill-0"}]}, script.Board())

    def look(self, processes: script.Processes) -> dict[str, Any]:
        processes.look()
        (reading,) = processes._board.take()[1]
        assert reading[:3] == ["process", "prefill-0", -1]
        value: dict[str, Any] = reading[4]
        return value

    def test_absent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.look(self.make(tmp_path, monkeypatch)) == {"process": "absent", "ranks": {}}

    def test_running(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        own = script.read_process(os.getpid())
        assert own is not None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state = {"pid": own.pid, "create_time": own.created, "boot_id": boot, "start_id": "s"}
        processes = self.make(tmp_path, monkeypatch, **state)
        processes.rank_seen("prefill-0", 3, own.pid)
        processes.rank_seen("prefill-0", 4, 2**30)
        found = self.look(processes)
        assert (found["process"], found["pid"], found["ranks"]) == ("running", own.pid, {"3": "running"})
        assert abs(found["started_unix"] - (time.time() - time.monotonic() + own.created / 100)) < 3600
        assert self.look(processes)["started_unix"] == found["started_unix"]

    @pytest.mark.parametrize("boot", ["same", "another"])
    def test_exited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: str) -> None:
        own = script.read_process(os.getpid())
        assert own is not None
        here = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The pid is in use, but by a process that was made at another time, or of another boot.
        created = own.created + (boot == "same")
        state = {"pid": own.pid, "create_time": created, "boot_id": here if boot == "same" else "b", "start_id": "s"}
        processes = self.make(tmp_path, monkeypatch, **state)
        found = [self.look(processes) for _ in range(5)]
        assert [(one["process"], one["exit_signal"]) for one in found] == [("exited", 9)] * 5
        assert ["log" in one for one in found] == [True, True, True, False, False]

    def test_states(self) -> None:
        def stat(state: str, threads: int = 1) -> script.Stat:
            return script.Stat(f"7 (a) b) {state} 1 7 7 0 -1 0 0 0 0 0 5 6 0 0 20 0 {threads} 0 99 4096 12 0")

        words = [stat(state).word for state in "RSDTtZX"]
        assert words == ["running"] * 3 + ["stopped"] * 2 + ["zombie"] * 2
        assert (stat("Z", threads=3).word, stat("R").created, stat("R").ticks) == ("running", 99, 11)
