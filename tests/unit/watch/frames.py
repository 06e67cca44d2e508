"""Small snapshots, alerts and frames for tests of what is made of them."""

from __future__ import annotations

import threading
from dataclasses import replace

from pdctl.watch.alerts import Alert, AlertEvent, Severity, Symptom
from pdctl.watch.snapshot import HostView, InstanceView, Percentiles, RankView, SideRecord, Snapshot, TransferView
from pdctl.watch.tui.source import Frame

RANK = RankView(
    rank=0,
    age_s=0.2,
    engine_id="engine-p",
    pid=11,
    uptime_s=60.0,
    writer="busy",
    heartbeat_age_s=0.1,
    operation="transfer",
    operation_age_s=0.004,
    loops=100,
    errors=0,
    inflight=1,
    oldest_s=0.5,
    outcomes={"prefill/completed": 7, "prefill/failed": 0},
    posted_bytes=4096,
    descriptors={"posted": 24, "completed": 24, "failed": 0},
    notifications={"REG/received/accepted": 8},
    stages_inflight={"prefill/posted": 1, "prefill/ready": 0},
    stages_oldest_s={"prefill/posted": 0.5, "prefill/ready": 0.0},
)
PREFILL = InstanceView(
    name="prefill-0",
    role="prefill",
    host="h1",
    url="http://10.0.0.1:8100",
    process="running",
    process_age_s=0.2,
    pid=10,
    rss_bytes=1000,
    cpu_cores=0.5,
    healthy=True,
    age_s=0.2,
    requests_running=2,
    requests_waiting=3,
    kv_use=0.25,
    request_rate=1.5,
    ttft=Percentiles(0.1, 0.9, 10),
    failed_loads=0,
    ranks=(RANK,),
)
DECODE = replace(PREFILL, name="decode-0", role="decode", host="h2", ranks=(replace(RANK, engine_id="engine-d"),))
RECORD = SideRecord(
    instance="prefill-0",
    rank=0,
    attempt=0,
    stage="posted",
    outcome="",
    reason="",
    age_s=8.0,
    stage_age_s=7.2,
    stages={"prefilling": 0.0, "posted": 0.8},
    started_unix=1_795_000_000.0,
    reading_age_s=0.2,
)
SNAPSHOT = Snapshot(
    at=100.0,
    unix=1_795_000_000.0,
    tick=5,
    cluster="qwen3",
    model="m",
    mode="push",
    instances=(PREFILL, DECODE),
    hosts=(HostView("h1", age_s=0.2, sent_bytes_per_s=10.0), HostView("h2", age_s=0.2)),
    transfers=(TransferView("key-1", prefill=(RECORD,)),),
    request_rate=1.5,
    stage_p99_s={"prefill/posted": 0.038},
    poll_s=0.05,
)
STALL = Symptom(
    code="T002",
    name="write-stalled",
    severity=Severity.CRITICAL,
    subject="prefill-0 -> decode-0",
    instances=("prefill-0", "decode-0"),
    host="",
    message="key-1: P posted 24 descriptors 7.2 s ago; the recent p99 is 38 ms",
    next_step="pdctl doctor --only XFER",
    key="key-1",
)
NOTE = replace(STALL, code="E005", name="watch-degraded", severity=Severity.INFO, subject="watch", instances=())


def alert(symptom: Symptom = STALL, **more: object) -> Alert:
    return replace(Alert(symptom, opened_unix=SNAPSHOT.unix - 2, duration_s=2.0), **more)


def frame(*alerts: Alert, kind: str = "opened", snapshot: Snapshot = SNAPSHOT) -> Frame:
    return Frame(snapshot, alerts, tuple(AlertEvent(kind, one) for one in alerts))


def snapshots(count: int, *, every_s: float = 1.0) -> list[Snapshot]:
    return [
        replace(SNAPSHOT, at=100.0 + every_s * index, unix=SNAPSHOT.unix + every_s * index, tick=index)
        for index in range(count)
    ]


class ScriptedWatchdog:
    """An alert opens at one tick and closes at another; it also tells how many snapshots it has looked at."""

    def __init__(self, opens: int = 2, closes: int = 4) -> None:
        self.opens, self.closes, self.looks = opens, closes, 0

    def look(self, snapshot: Snapshot) -> tuple[list[Alert], list[AlertEvent]]:
        self.looks += 1
        tick = snapshot.tick
        here = alert(duration_s=float(tick - self.opens))
        events = []
        if tick == self.opens:
            events.append(AlertEvent("opened", here))
        if tick == self.closes:
            events.append(AlertEvent("closed", replace(here, open=False)))
        return [here] if self.opens <= tick < self.closes else [], events


class ScriptedPoller:
    """Gives snapshots with rising ticks; one of the polls may hang until it is closed, or raise."""

    def __init__(self, *, hang_at: int = -1, raise_at: int = -1) -> None:
        self.hang_at, self.raise_at = hang_at, raise_at
        self.polls = 0
        self.closed = threading.Event()

    def poll(self) -> Snapshot:
        tick = self.polls
        self.polls += 1
        if tick == self.hang_at:
            self.closed.wait(30)
        if tick == self.raise_at:
            raise ZeroDivisionError("a bug")
        return replace(SNAPSHOT, at=100.0 + tick, tick=tick)

    def set_interval(self, interval_s: float) -> None:
        self.interval_s = interval_s

    def close(self) -> None:
        self.closed.set()
