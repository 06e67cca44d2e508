"""Frames made by hand for the tests of the dashboard. The same arguments always give the same frame."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from dataclasses import replace

from pdctl.watch.alerts import Alert, Severity, Symptom
from pdctl.watch.snapshot import (
    HostView,
    InstanceView,
    Percentiles,
    RankView,
    SideRecord,
    Snapshot,
    TransferView,
)
from pdctl.watch.tui.source import Frame, ReplayPosition, SourceClosed

UNIX = 1_795_000_000.0


def rank(number: int = 0, *, seed: int = 0, **changes: object) -> RankView:
    made = RankView(
        rank=number,
        age_s=0.3,
        engine_id=f"engine-{seed}",
        pid=4000 + seed,
        uptime_s=5400.0,
        writer="busy" if seed % 3 else "idle",
        heartbeat_age_s=0.004 + 0.01 * seed,
        loops=100_000 + seed,
        errors=0,
        inflight=seed % 5,
        oldest_s=0.02 * (seed % 5),
        outcomes={"prefill/completed": 1200 + seed, "prefill/failed": 0},
        posted_bytes=10_000_000_000 + seed,
        bytes_per_s=25e6 * (1 + seed % 7),
        descriptors={"posted": 28_000, "completed": 28_000, "failed": 0},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def instance(name: str, *, seed: int = 0, rank_count: int = 1, **changes: object) -> InstanceView:
    role = name.partition("-")[0]
    made = InstanceView(
        name=name,
        role=role,
        host=f"h{seed + 1}",
        url=f"http://10.0.0.{seed % 250 + 1}:8100",
        process="running",
        process_age_s=3.0,
        pid=4000 + seed,
        started_unix=UNIX - 5400,
        rss_bytes=30_000_000_000 + seed,
        cpu_cores=1.5 + seed % 3,
        healthy=True,
        age_s=0.4,
        requests_running=3 + seed % 9,
        requests_waiting=seed % 4,
        kv_use=0.1 + 0.07 * (seed % 12),
        request_rate=2.5 + seed % 4,
        ttft=Percentiles(0.12, 0.34, 50),
        tpot=Percentiles(0.011, 0.038, 500),
        failed_loads=0,
        ranks=tuple(rank(number, seed=seed + number) for number in range(rank_count)) if role != "router" else (),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def record(where: str, stage: str, stages: dict[str, float], **changes: object) -> SideRecord:
    made = SideRecord(
        instance=where,
        rank=0,
        attempt=1,
        stage=stage,
        outcome="",
        reason="",
        age_s=max(stages.values(), default=0.0) + 0.01,
        stage_age_s=0.01,
        stages=stages,
        started_unix=UNIX - 1,
        reading_age_s=0.3,
        request_id=f"req-{where}",
        tokens=2048,
        blocks=128,
        descriptors=24 if "posted" in stages else 0,
        bytes=1_572_864 if "posted" in stages else 0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def transfer(number: int, prefill: str, decode: str) -> TransferView:
    """One of four kinds, by its number: posted, matched, waiting for prefill, done."""
    key = f"cmpl-{number:06d}"
    spent = 0.05 + 0.01 * (number % 20)
    waits = record(
        decode, "registered", {"allocated": 0.0, "registered": 0.002}, age_s=spent + 0.05, stage_age_s=spent + 0.048
    )
    kind = number % 4
    if kind == 0:
        writes = record(
            prefill,
            "posted",
            {"prefilling": 0.0, "ready": 0.03, "matched": 0.031, "posted": 0.034},
            age_s=spent + 0.04,
            stage_age_s=spent,
            started_unix=UNIX - 0.99,
        )
        return TransferView(key, (writes,), (waits,))
    if kind == 1:
        writes = record(prefill, "matched", {"prefilling": 0.0, "ready": 0.03, "matched": 0.031}, stage_age_s=spent)
        return TransferView(key, (writes,), (waits,))
    if kind == 2:
        writes = record(prefill, "prefilling", {"prefilling": 0.0}, age_s=spent, stage_age_s=spent)
        return TransferView(key, (writes,), (waits,))
    done = {"prefilling": 0.0, "ready": 0.03, "matched": 0.031, "posted": 0.034, "completed": 0.072}
    writes = record(prefill, "posted", done, outcome="completed", age_s=0.072, stage_age_s=0.038)
    got = record(
        decode,
        "registered",
        {"allocated": 0.0, "registered": 0.002, "received": 0.08},
        outcome="received",
        age_s=0.08,
        stage_age_s=0.078,
    )
    return TransferView(key, (writes,), (got,))


def frame(pairs: int = 1, *, transfers: int | None = None, ranks: int = 1, tick: int = 7, **changes: object) -> Frame:
    """A cluster that is well: so many prefill and so many decode instances, and a router."""
    names = [f"prefill-{number}" for number in range(pairs)] + [f"decode-{number}" for number in range(pairs)]
    instances = [instance(name, seed=seed, rank_count=ranks) for seed, name in enumerate(names)]
    if pairs:
        instances.append(instance("router", seed=2 * pairs))
    number = transfers if transfers is not None else 6 * pairs
    moved = sorted(
        (transfer(one, f"prefill-{one % pairs}", f"decode-{one % pairs}") for one in range(number)),
        key=lambda one: (not one.in_flight, -one.age_s),
    )
    made = Snapshot(
        at=1000.0 + tick,
        unix=UNIX + tick,
        tick=tick,
        cluster="qwen3",
        model="Qwen/Qwen3-32B",
        mode="push",
        instances=tuple(instances),
        hosts=tuple(
            HostView(f"h{seed + 1}", 3.0, "", 180e6, 42e6, {}, 0.3, 400_000_000_000) for seed in range(len(instances))
        ),
        transfers=tuple(moved),
        request_rate=12.3 * pairs if pairs else None,
        ttft=Percentiles(0.12, 0.34, 100) if pairs else None,
        tpot=Percentiles(0.011, 0.038, 1000) if pairs else None,
        poll_s=0.09,
    )
    return Frame(replace(made, **changes))  # type: ignore[arg-type]


def alert(code: str = "T002", severity: Severity = Severity.CRITICAL, **changes: object) -> Alert:
    symptom = Symptom(
        code=code,
        name="write-stalled",
        severity=severity,
        subject="cmpl-stalled",
        instances=("prefill-0", "decode-0"),
        host="h1",
        message="prefill-0 posted 24 descriptors (1.5 MiB) 7.2 s ago, NIXL still in progress; the recent p99 is 38 ms.",
        next_step="Look at the link h1-h2: pdctl doctor --only XFER",
        key="cmpl-stalled",
    )
    return Alert(replace(symptom, **changes), UNIX - 2, 9.0)  # type: ignore[arg-type]


def stalled_transfer() -> TransferView:
    return TransferView(
        "cmpl-stalled",
        (
            record(
                "prefill-0",
                "posted",
                {"prefilling": 0.0, "ready": 0.21, "matched": 0.214, "posted": 0.217},
                age_s=7.417,
                stage_age_s=7.2,
                started_unix=UNIX - 7.4,
            ),
        ),
        (
            record(
                "decode-0",
                "registered",
                {"allocated": 0.0, "registered": 0.004},
                age_s=7.45,
                stage_age_s=7.446,
                started_unix=UNIX - 7.45,
            ),
        ),
    )


def stalled_frame(pairs: int = 1) -> Frame:
    """One transfer stands still, with its alert, and one rank is no longer read."""
    well = frame(pairs)
    changed = list(well.snapshot.instances)
    first = changed[0]
    changed[0] = replace(first, ranks=(rank(0, writer="busy", heartbeat_age_s=0.1, inflight=1, oldest_s=7.2),))
    last = pairs
    changed[last] = replace(
        changed[last], ranks=(rank(0, seed=1, age_s=7.0, error="no answer within 0.8 s"),), requests_waiting=9
    )
    snapshot = replace(
        well.snapshot, instances=tuple(changed), transfers=(stalled_transfer(), *well.snapshot.transfers)
    )
    silent = alert(
        "W003",
        Severity.WARNING,
        name="rank-silent",
        subject="decode-0/rank 0",
        instances=("decode-0",),
        key="",
        message="The telemetry of decode-0 rank 0 has not answered for 7.0 s; its process runs.",
    )
    return Frame(snapshot, (alert(), silent))


def down_frame(pairs: int = 4) -> Frame:
    """Nothing runs any more."""
    gone = []
    for one in frame(pairs).snapshot.instances:
        dead = instance(
            one.name,
            process="exited",
            process_age_s=2.0,
            pid=None,
            healthy=None,
            health_error="connection refused",
            age_s=None,
            error="connection refused",
            requests_running=None,
            requests_waiting=None,
            kv_use=None,
            request_rate=None,
            ttft=None,
            tpot=None,
            rss_bytes=None,
            cpu_cores=None,
            failed_loads=None,
            ranks=() if one.role == "router" else (RankView(0, error="connection refused"),),
            diagnosis="CUDA out of memory: lower gpu-memory-utilization" if one.name == "prefill-0" else "",
        )
        gone.append(dead)
    snapshot = replace(
        frame(pairs).snapshot,
        instances=tuple(gone),
        transfers=(),
        request_rate=None,
        ttft=None,
        tpot=None,
        poll_errors=9,
    )
    folded = tuple(
        alert(
            "W003", name="rank-silent", subject=f"{one.name}/rank 0", key="", message="telemetry does not answer"
        ).symptom
        for one in gone[:-1]
    )
    down = alert(
        "E001",
        name="engine-down",
        subject="prefill-0",
        key="",
        instances=("prefill-0",),
        message="prefill-0 has exited: CUDA out of memory.",
        next_step="pdctl logs prefill-0",
    )
    return Frame(snapshot, (replace(down, folded=folded),))


class Scripted:
    """A source that a test feeds: frames, errors to raise, and no more after ``close``."""

    def __init__(self, items: Iterable[Frame | Exception] = ()) -> None:
        self._queue: queue.Queue[Frame | Exception | None] = queue.Queue()
        self.closed = threading.Event()
        for item in items:
            self.give(item)

    def give(self, item: Frame | Exception) -> None:
        self._queue.put(item)

    def next(self) -> Frame:
        item = self._queue.get(timeout=60)
        if item is None:
            raise SourceClosed
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self.closed.set()
        self._queue.put(None)


class Replaying(Scripted):
    """A replay of some snapshots, by hand."""

    def __init__(self, frames: list[Frame]) -> None:
        super().__init__()
        self.frames = frames
        self.position = ReplayPosition(0, len(frames), False)
        self._tell()

    def _tell(self, **changes: object) -> None:
        self.position = replace(self.position, **changes)  # type: ignore[arg-type]
        self.give(replace(self.frames[self.position.index], replay=self.position))

    def step(self, count: int) -> None:
        self._tell(index=max(0, min(len(self.frames) - 1, self.position.index + count)), playing=False)

    def seek(self, index: int) -> None:
        self._tell(index=index % len(self.frames), playing=False)

    def set_playing(self, playing: bool) -> None:
        self._tell(playing=playing)

    def set_speed(self, speed: float) -> None:
        self._tell(speed=speed)


class Acting:
    """Remembers what it was asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def restart(self, instance: str) -> str:
        self.calls.append(("restart", instance))
        return "took 31 s"

    def drain(self, instance: str) -> str:
        self.calls.append(("drain", instance))
        return "the router has no way to it any more"

    def logs(self, instance: str) -> str:
        self.calls.append(("logs", instance))
        return f"INFO {instance} line one\nERROR [red]not markup[/red] \x1b[31mescape\n"

    def doctor_pair(self, prefill: str, decode: str) -> str:
        self.calls.append(("doctor", prefill, decode))
        return f"XFER001 pass {prefill} -> {decode}"


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
