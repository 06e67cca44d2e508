"""The poller with real scripts on this machine, against ranks that are simulated."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.errors import HostUnreachable
from pdctl.hosts.agent import script_source
from pdctl.hosts.base import Host
from pdctl.hosts.conversation import talk
from pdctl.hosts.fleet import Fleet
from pdctl.hosts.local import LocalHost
from pdctl.plan import ClusterPlan
from pdctl.watch.poll_host import PREFIX, HostWatch, delay_s
from pdctl.watch.poll_request import host_request
from pdctl.watch.poller import Poller
from pdctl.watch.snapshot import RankView, Snapshot
from tests.support.plans import changed, planned
from tests.support.ranks import Servers, record, serve_plan

PATIENCE_S = 30.0
HERE = {"name": "local", "address": "127.0.0.1"}


def free_ports(count: int) -> int:
    """The first of some ports in a row that are free."""
    for first in range(21000, 32000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def local_plan(ranks: int = 1) -> ClusterPlan:
    first = free_ports(2 * ranks + 60)
    side = {"hosts": [HERE], "tensor_parallel": ranks}
    return planned(
        changed(
            accelerator="cpu",
            prefill={**side, "port": first, "telemetry_port": first + 20, "side_channel_port": first + 50},
            decode={
                **side,
                "tensor_parallel": 1,
                "port": first + 1,
                "telemetry_port": first + 40,
                "side_channel_port": first + 51,
            },
            router={"host": "local", "address": "127.0.0.1", "port": first + 2, "metrics_port": first + 3},
        )
    )


@pytest.fixture
def servers() -> Iterator[Servers]:
    with Servers() as running:
        yield running


def until(poller: Poller, holds: Callable[[Snapshot], Any]) -> Snapshot:
    """Poll until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        snapshot = poller.poll()
        if holds(snapshot):
            return snapshot
        assert time.monotonic() < deadline, snapshot
        time.sleep(0.05)


def rank_of(snapshot: Snapshot, instance: str, number: int = 0) -> RankView:
    found = snapshot.instance(instance)
    assert found is not None
    return found.ranks[number]


def test_a_cluster_is_seen_whole_at_the_first_poll(servers: Servers) -> None:
    plan = local_plan()
    ranks, _ = serve_plan(servers, plan)
    ranks["decode-0", 0].inflight = [record("decode", "k", "registered", peer="prefill-0-engine")]
    ranks["prefill-0", 0].inflight = [record("prefill", "k", "posted")]
    ranks["prefill-0", 0].finish(record("prefill", "before", "posted", outcome="completed"))
    with Fleet(plan.spec) as fleet, Poller(plan, fleet, interval_s=0.2) as poller:
        snapshot = poller.poll()
    assert snapshot.poll_errors == 0
    assert [one.healthy for one in snapshot.instances] == [True] * 3
    assert [one.process for one in snapshot.instances] == ["absent"] * 3
    assert [(one.key, len(one.prefill), len(one.decode)) for one in snapshot.transfers] == [
        ("k", 1, 1),
        ("before", 1, 0),
    ]
    assert (snapshot.tick, snapshot.hosts[0].error) == (0, "")


def test_the_hosts_take_another_pace(servers: Servers) -> None:
    plan = local_plan()
    serve_plan(servers, plan)
    with Fleet(plan.spec) as fleet, Poller(plan, fleet, interval_s=600.0) as poller:
        first = rank_of(poller.poll(), "prefill-0").loops
        poller.set_interval(0.2)
        assert first is not None
        until(poller, lambda snapshot: (rank_of(snapshot, "prefill-0").loops or 0) >= first + 3)


@pytest.mark.slow
def test_ranks_that_misbehave_hold_up_nobody(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdctl.watch.poll_request.READING_TIMEOUT_S", 0.8)
    manners: list[Any] = ["healthy", "hung", "garbage", "half", "huge", "slow", "drip", "error"]
    plan = local_plan(len(manners))
    ranks, apis = serve_plan(servers, plan)
    for number, manner in enumerate(manners):
        ranks["prefill-0", number].manner = manner
    apis["decode-0"].manner = "hung"
    with Fleet(plan.spec) as fleet, Poller(plan, fleet, interval_s=0.2) as poller:
        poller.poll()

        def healthy(snapshot: Snapshot) -> bool:
            return (rank_of(snapshot, "prefill-0").loops or 0) >= 10

        snapshot = until(poller, healthy)
        age = rank_of(snapshot, "prefill-0").age_s
        assert age is not None
        assert age < 5
        for number, words in enumerate(
            ["", "no answer within", "nonsense", "by half", "too much", "no answer within", "", "HTTP 500"]
        ):
            error = rank_of(snapshot, "prefill-0", number).error
            assert words in error
            assert bool(error) == (number > 0)
            if error:
                assert error.startswith(f"prefill-0 rank {number}: ")
                assert rank_of(snapshot, "prefill-0", number).age_s is None
        decode = snapshot.instance("decode-0")
        assert decode is not None
        assert (decode.healthy, decode.age_s, decode.requests_running) == (None, None, None)
        assert decode.error.startswith("decode-0: no answer within")
        assert snapshot.hosts[0].error == ""
        # It heals, and is asked again.
        ranks["prefill-0", 1].manner = "healthy"
        until(poller, lambda snapshot: not rank_of(snapshot, "prefill-0", 1).error)


@pytest.mark.slow
def test_a_restart_begins_counters_again(servers: Servers) -> None:
    plan = local_plan()
    ranks, apis = serve_plan(servers, plan)
    rank, router = ranks["prefill-0", 0], apis["router"]
    rank.bytes, router.routed = 10**9, 500
    rank.inflight = [record("prefill", "k", "ready")]
    seen: list[float] = []
    with Fleet(plan.spec) as fleet, Poller(plan, fleet, interval_s=0.1) as poller:
        until(poller, lambda snapshot: rank_of(snapshot, "prefill-0").bytes_per_s is not None)
        rank.restart("another-engine")
        router.routed = 0

        def again(snapshot: Snapshot) -> bool:
            seen.extend(x for x in (rank_of(snapshot, "prefill-0").bytes_per_s, snapshot.request_rate) if x is not None)
            rank.bytes += 1000
            router.routed += 1
            restarted = snapshot.instance("prefill-0")
            return restarted is not None and restarted.restarts == 1 and (snapshot.request_rate or 0) > 0

        snapshot = until(poller, again)
        assert snapshot.transfers == ()
        assert rank_of(snapshot, "prefill-0").engine_id == "another-engine"
    assert min(seen) >= 0


@pytest.mark.slow
def test_ended_transfers_come_once_and_stay(servers: Servers) -> None:
    plan = local_plan()
    ranks, _ = serve_plan(servers, plan)
    rank = ranks["prefill-0", 0]
    with Fleet(plan.spec) as fleet, Poller(plan, fleet, interval_s=0.1) as poller:
        poller.poll()
        for number in range(20):
            rank.finish(record("prefill", f"k{number}", "posted", outcome="completed"))
            time.sleep(0.02)
        until(poller, lambda snapshot: {one.key for one in snapshot.transfers} == {f"k{n}" for n in range(20)})
        listed = sum(count for target, count in rank.asked.items() if "recent" in target)
        until(poller, lambda snapshot: rank.loops > 40)
        # Nothing ended meanwhile, so that nothing was asked for.
        assert sum(count for target, count in rank.asked.items() if "recent" in target) == listed
        assert not any("inflight" in target for target in rank.asked)


def test_a_host_that_cannot_be_reached_is_an_error_of_its_own(servers: Servers) -> None:
    plan = local_plan()
    ranks, _ = serve_plan(servers, plan)
    del ranks

    class Away(Fleet):
        def host(self, name: str) -> Host:
            raise HostUnreachable(name, "connection refused")

    with Away(plan.spec) as fleet, Poller(plan, fleet) as poller:
        snapshot = poller.poll()
    assert snapshot.hosts[0].error == "local: connection refused"
    assert {one.healthy for one in snapshot.instances} == {None}
    assert snapshot.instances[0].error == "prefill-0: its host gives nothing: local: connection refused"


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def script_pids() -> set[int]:
    """Scripts that this process started; other tests may run beside it."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and b"pdctl-script" in (folder / "cmdline").read_bytes():
                pid = parent = int(folder.name)
                while parent not in (0, 1, os.getpid()):
                    parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    found.add(pid)
        except OSError:
            continue
    return found


def test_closing_ends_the_script(servers: Servers) -> None:
    plan = local_plan()
    serve_plan(servers, plan)
    before = script_pids()
    with Fleet(plan.spec) as fleet, Poller(plan, fleet, interval_s=0.2) as poller:
        poller.poll()
        started = script_pids() - before
        assert started
        poller.close()
        poller.close()
        assert all(is_gone(pid) for pid in started)


@pytest.mark.parametrize("how", ["input ends", "nobody listens", "nobody reads"])
@pytest.mark.slow
def test_the_script_does_not_outlive_its_watcher(how: str) -> None:
    plan = local_plan()
    source = script_source("watch_facts").replace(b"PATIENCE_S = 30.0", b"PATIENCE_S = 1.0")
    request = host_request(plan, "local", interval_s=0.05)
    if how == "nobody reads":
        # Lines that fill the pipe soon.
        source = source.replace(b'"tick": tick, "at": at,', b'"tick": tick, "at": at, "filler": "x" * 50000,', 1)
    before = script_pids()
    with talk(LocalHost(), source, prefix=PREFIX, what="it", lifetime_s=60, send_timeout_s=10) as conversation:
        conversation.send(request, timeout_s=10)
        conversation.receive(timeout_s=PATIENCE_S)
        started = script_pids() - before
        assert started
        if how == "input ends":
            stdin = conversation._stream._process.stdin  # type: ignore[attr-defined]
            stdin.close()
        deadline = time.monotonic() + PATIENCE_S
        while how == "nobody reads" and time.monotonic() < deadline and script_pids() & started:
            conversation.send({}, timeout_s=10)
            time.sleep(0.1)
        assert all(is_gone(pid) for pid in started)


class TestReconnecting:
    def test_delays(self) -> None:
        assert [delay_s(n, 0.5) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
        assert (delay_s(1, 0.0), delay_s(1, 1.0), delay_s(10**9, 1.0)) == (0.75, 1.25, 37.5)

    def test_a_script_that_dies_is_started_again(self) -> None:
        plan = local_plan()
        heard = threading.Semaphore(0)
        told: list[str] = []

        class Sink:
            def connected(self, host: str) -> None:
                told.append("connected")

            def heard(self, host: str, message: Any) -> None:
                heard.release()

            def lost(self, host: str, error: str) -> None:
                told.append(error)

        host = LocalHost()
        request = host_request(plan, "local", interval_s=0.05)
        slots = threading.Semaphore(1)
        before = script_pids()
        watch = HostWatch("local", lambda name: host, request, (), Sink(), slots, delay=lambda failures, chance: 0.01)
        watch.start()
        try:
            assert heard.acquire(timeout=PATIENCE_S)
            for stream in list(host._streams):
                os.killpg(stream._process.pid, signal.SIGKILL)
            deadline = time.monotonic() + PATIENCE_S
            while "connected" not in told[1:]:
                assert time.monotonic() < deadline, told
                heard.acquire(timeout=0.1)
        finally:
            watch.close()
            watch.join(PATIENCE_S)
            host.close()
        assert "the watch script gave no answer (a signal ended it)" in told[1]
        assert all(is_gone(pid) for pid in script_pids() - before)

    def test_a_host_that_never_comes_is_tried_again_and_closing_ends_that(self) -> None:
        tries = threading.Semaphore(0)
        told: list[str] = []

        class Sink:
            def connected(self, host: str) -> None: ...

            def heard(self, host: str, message: Any) -> None: ...

            def lost(self, host: str, error: str) -> None:
                told.append(error)

        def find(name: str) -> Host:
            tries.release()
            if len(told) % 2:
                raise ZeroDivisionError
            raise HostUnreachable(name, "no route")

        watch = HostWatch("h", find, {}, (), Sink(), threading.Semaphore(1), delay=lambda failures, chance: 0.01)
        watch.start()
        for _ in range(4):
            assert tries.acquire(timeout=PATIENCE_S)
        watch.close()
        watch.join(PATIENCE_S)
        assert told[0] == "h: no route"
        assert "a bug of pdctl" in told[1]
