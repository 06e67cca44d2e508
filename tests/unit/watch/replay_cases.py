"""Incidents made by hand, one for each code of the watchdog: a snapshot a second, and the events that must follow.

``python tests/unit/watch/replay_cases.py`` (with the repository on PYTHONPATH) writes them to ``replays/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdctl.watch.recording import Recorder
from pdctl.watch.settings import WatchSettings
from pdctl.watch.snapshot import HostView, InstanceView, RankView, SideRecord, Snapshot, TransferView

REPLAYS = Path(__file__).with_name("replays")
MIB = 2**20
P99 = {
    "prefill/prefilling": 0.4,
    "prefill/ready": 0.02,
    "prefill/matched": 0.005,
    "prefill/posted": 0.038,
    "decode/allocated": 0.01,
    "decode/registered": 0.45,
}
HOSTS = {"prefill-0": "p1", "prefill-1": "p2", "decode-0": "d1", "decode-1": "d2", "router": "r1"}


def engine(name: str, start: int = 1) -> str:
    return f"qwen3-{name}-start{start}"


def rank(name: str, number: int = 0, **changes: Any) -> RankView:
    values: dict[str, Any] = {
        "age_s": 0.2,
        "engine_id": engine(name),
        "pid": 4711 + number,
        "uptime_s": 500.0,
        "writer": "busy",
        "heartbeat_age_s": 0.01,
        "loops": 1000,
        "errors": 0,
        "inflight": 0,
        "oldest_s": 0.0,
        "outcomes": {"prefill/completed": 100} if name.startswith("prefill") else {"decode/received": 100},
        "posted_bytes": 100 * MIB,
    }
    return RankView(number, **{**values, **changes})


def instance(name: str, **changes: Any) -> InstanceView:
    role = name.split("-")[0]
    values: dict[str, Any] = {
        "process": "running",
        "process_age_s": 1.0,
        "pid": 4700,
        "healthy": True,
        "age_s": 0.2,
        "requests_running": 1,
        "requests_waiting": 0,
        "failed_loads": 0 if role == "decode" else None,
        "ranks": (rank(name),) if role != "router" else (),
    }
    return InstanceView(name, role, HOSTS[name], f"http://{HOSTS[name]}:8000", **{**values, **changes})


def ranked(name: str, **changes: Any) -> InstanceView:
    """An instance whose only rank has these values."""
    return instance(name, ranks=(rank(name, **changes),))


ONE_PAIR = ("prefill-0", "decode-0", "router")
TWO_PAIRS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "router")


def snapshot(
    tick: int,
    transfers: Iterable[TransferView] = (),
    changed: Iterable[InstanceView] = (),
    hosts: Iterable[HostView] = (),
    names: Iterable[str] = ONE_PAIR,
    **changes: Any,
) -> Snapshot:
    names = tuple(names)
    by_name = {one.name: one for one in changed}
    by_host = {one.name: one for one in hosts}
    values: dict[str, Any] = {"stage_p99_s": P99, "poll_s": 0.05}
    return Snapshot(
        at=100.0 + tick,
        unix=1_795_000_000.0 + tick,
        tick=tick,
        cluster="qwen3",
        model="Qwen/Qwen3-32B",
        mode="push",
        instances=tuple(by_name.get(name) or instance(name) for name in names),
        hosts=tuple(by_host.get(HOSTS[name]) or HostView(HOSTS[name], age_s=0.2) for name in names),
        transfers=tuple(transfers),
        **{**values, **changes},
    )


_STAGES = {"decode": ("allocated", "registered"), "prefill": ("prefilling", "ready", "matched", "posted")}


def record(
    name: str,
    stage: str,
    stage_age_s: float,
    outcome: str = "",
    *,
    peer: str = "",
    begun: float = 0.3,
    stages: dict[str, float] | None = None,
    **changes: Any,
) -> SideRecord:
    """A record that is ``stage_age_s`` in its stage, which it reached ``begun`` seconds after it began."""
    side = name.split("-")[0]
    passed = _STAGES[side][: _STAGES[side].index(stage) + 1]
    times = {one: begun * place / max(len(passed) - 1, 1) for place, one in enumerate(passed)}
    if outcome:
        times[outcome] = times[stage] + stage_age_s
    values: dict[str, Any] = {
        "rank": 0,
        "attempt": 1 if side == "decode" else 0,
        "reason": "",
        "age_s": times[stage] + stage_age_s,
        "started_unix": 1_795_000_000.0,
        "reading_age_s": 0.2,
        "peer": peer or engine("decode-0" if side == "prefill" else "prefill-0"),
        "tokens": 512,
        "blocks": 4,
        "descriptors": 24 if stage == "posted" else 0,
        "bytes": int(1.5 * MIB) if stage == "posted" else 0,
    }
    return SideRecord(
        instance=name, stage=stage, outcome=outcome, stage_age_s=stage_age_s, stages=stages or times,
        **{**values, **changes},
    )  # fmt: skip


def transfer(key: str, *records: SideRecord) -> TransferView:
    return TransferView(
        key,
        tuple(one for one in records if one.instance.startswith("prefill")),
        tuple(one for one in records if one.instance.startswith("decode")),
    )


def done(key: str, **changes: Any) -> TransferView:
    return transfer(
        key,
        record("prefill-0", "posted", 0.03, "completed", **changes),
        record("decode-0", "registered", 0.4, "received"),
    )


@dataclass(frozen=True)
class Case:
    """One incident.

    Attributes:
        name: of its files.
        codes: that it is there for.
        ticks: how many snapshots.
        make: the snapshot of a tick.
        events: what must follow, as ``TICK KIND CODE SUBJECT SEVERITY``.
        settings: other than the defaults.
    """

    name: str
    codes: tuple[str, ...]
    ticks: int
    make: Callable[[int], Snapshot]
    events: tuple[str, ...]
    settings: WatchSettings = field(default_factory=WatchSettings)

    @property
    def path(self) -> Path:
        """Of its recording; long ones are compressed."""
        return REPLAYS / f"{self.name}.jsonl{'.gz' if self.ticks > 18 else ''}"

    @property
    def events_path(self) -> Path:
        return REPLAYS / f"{self.name}.events"

    def snapshots(self) -> list[Snapshot]:
        return [self.make(tick) for tick in range(self.ticks)]


def between(tick: int, first: int, last: int) -> bool:
    return first <= tick <= last


def stalled(code: str, name: str, make: Callable[[float], TransferView], *, first: int = 8, ticks: int = 22) -> Case:
    """A transfer that stands still from tick 2 on, and goes on at tick 16."""

    def at(tick: int) -> Snapshot:
        return snapshot(tick, [make(tick - 2.0)] if between(tick, 2, 15) else [])

    severity = "warning" if code in ("T005", "T012") else "critical"
    subject = "prefill-0>decode-0"
    return Case(
        f"{code}-{name}",
        (code,),
        ticks,
        at,
        (f"{first} opened {code} {subject} {severity}", f"17 closed {code} {subject} {severity}"),
    )


def _with(tick: int, first: int, last: int, *changed: InstanceView) -> Snapshot:
    return snapshot(tick, changed=changed if between(tick, first, last) else ())


def _silent(name: str, tick: int, **changes: Any) -> InstanceView:
    return ranked(name, age_s=tick - 2 + 0.2, error="timed out after 1 s", **changes)


def _blocks_held(tick: int) -> Snapshot:
    # Decode gave it up at once, and the lease of 30 s did not end it; T005 is not said, since decode came.
    parts = [
        transfer("held", record("prefill-0", "ready", tick + 30.0), record("decode-0", "allocated", 0.1, "aborted"))
    ]
    return snapshot(tick, parts if tick < 12 else [])


def _restarted(tick: int) -> Snapshot:
    if tick < 4:
        return snapshot(tick)
    new = rank("decode-0", engine_id=engine("decode-0", 2), uptime_s=1.0, outcomes={"decode/received": 0})
    return snapshot(tick, changed=[instance("decode-0", ranks=(new,), pid=9000, restarts=1)])


def _slow_prefill(tick: int) -> Snapshot:
    busy = instance("prefill-0", requests_running=2, requests_waiting=7)
    waiting = [
        transfer(
            f"queued-{number}",
            record("prefill-0", "prefilling", tick + 1.0, request_id=f"queued-{number}"),
            record("decode-0", "registered", tick + 0.9),
        )
        for number in range(9)
    ]
    return snapshot(tick, waiting if tick < 24 else [done("queued-0")], [busy])


def _slow_fabric(tick: int) -> Snapshot:
    took = 4.0 if between(tick, 3, 12) else 0.01
    ended = [done(f"w-{number}", bytes=64 * MIB, stages=_took(posted=took)) for number in range(6)]
    return snapshot(tick, ended)


def _took(*, matched: float = 0.001, posted: float = 0.03) -> dict[str, float]:
    return {
        "prefilling": 0.0, "ready": 0.4, "matched": 0.41, "posted": 0.41 + matched,
        "completed": 0.41 + matched + posted,
    }  # fmt: skip


def _slow_post(tick: int) -> Snapshot:
    slow = between(tick, 3, 12)
    # Latest first: the newest third takes fifty times what the oldest did.
    ended = [done(f"w-{number}", stages=_took(matched=0.1 if slow and number < 8 else 0.002)) for number in range(24)]
    return snapshot(tick, ended)


def _load_failed(tick: int) -> Snapshot:
    failed = 3 if tick >= 5 else 0
    totals = {"decode/received": 100, "decode/failed": failed, "decode/timed_out": 0}
    decode = instance("decode-0", ranks=(rank("decode-0", outcomes=totals),), failed_loads=failed)
    # The window goes on, and then the counter is as it was.
    return snapshot(tick, changed=[decode])


def _leases_expire(tick: int) -> Snapshot:
    expired = min(max(tick - 3, 0), 6)
    totals = {"prefill/completed": 100 + tick, "prefill/expired": expired}
    return snapshot(tick, changed=[ranked("prefill-0", outcomes=totals)])


def _late(tick: int) -> Snapshot:
    expired = [
        transfer(
            f"late-{number}",
            record("prefill-0", "ready", 30.0, "expired", reason="no registration within 30 s"),
            record("decode-0", "registered", 0.01, "failed", reason="expired: no registration within 30 s"),
        )
        for number in range(2)
    ]
    return snapshot(tick, expired if between(tick, 3, 12) else [])


def _refused(tick: int) -> Snapshot:
    return snapshot(tick, changed=[ranked("prefill-0", notifications={"REG/received/version": 4 if tick >= 3 else 0})])


def _writer_errors(tick: int) -> Snapshot:
    return snapshot(
        tick, changed=[ranked("prefill-0", errors=2 if tick >= 3 else 0, last_error="KeyError: 'qwen3-decode-0'")]
    )


def _pair_broken(tick: int) -> Snapshot:
    if not between(tick, 3, 12):
        return snapshot(tick, names=TWO_PAIRS)
    failed = [
        transfer(
            f"bad-{number}",
            record("prefill-0", "posted", 3.0, "failed", peer=engine("decode-1"), reason="REMOTE_DISCONNECT"),
            record("decode-1", "registered", 3.4, "failed", reason="transfer: REMOTE_DISCONNECT"),
        )
        for number in range(4)
    ]
    other = transfer(
        "good-1",
        record("prefill-1", "posted", 0.03, "completed", peer=engine("decode-1")),
        record("decode-1", "registered", 0.4, "received", peer=engine("prefill-1")),
    )
    return snapshot(tick, [*failed, done("good-0"), other], names=TWO_PAIRS)


def _host_unreachable(tick: int) -> Snapshot:
    """The host of decode-0 goes away with forty transfers to it: one alert."""
    flying = [
        transfer(
            f"many-{number}",
            record("prefill-0", "posted", tick - 2.0),
            record("decode-0", "registered", tick - 2.0, reading_age_s=max(0.2, tick - 4.0)),
        )
        for number in range(40)
    ]
    if not between(tick, 4, 20):
        return snapshot(tick, flying if between(tick, 2, 3) else [])
    gone = HostView("d1", age_s=tick - 4 + 1.0, error="no route to host")
    silent = instance(
        "decode-0",
        process_age_s=tick - 4 + 3.0,
        age_s=tick - 4 + 2.0,
        healthy=None,
        health_error="no route to host",
        ranks=(rank("decode-0", age_s=tick - 4 + 1.0, error="no route to host"),),
    )
    return snapshot(tick, flying, [silent], [gone])


def _engine_down(tick: int) -> Snapshot:
    """prefill-0 is killed with twelve transfers waiting for it: one alert; then it is started again."""
    waiting = [transfer(f"w-{number}", record("decode-0", "registered", tick - 4.0)) for number in range(12)]
    if tick < 5:
        return snapshot(tick)
    if tick > 14:
        return snapshot(
            tick, changed=[instance("prefill-0", ranks=(rank("prefill-0", engine_id=engine("prefill-0", 2)),), pid=9)]
        )
    dead = instance(
        "prefill-0",
        process="exited",
        healthy=False,
        health_error="connection refused",
        ranks=(rank("prefill-0", age_s=tick - 5 + 0.9, error="connection refused"),),
        diagnosis="out of memory: the kernel killed it",
    )
    return snapshot(tick, waiting, [dead])


def _saturated(tick: int) -> Snapshot:
    """Sixty requests queue for up to a minute, the link is full, everything moves: nothing to say."""
    completed = 100 + 3 * tick
    prefill = instance(
        "prefill-0",
        requests_running=8,
        requests_waiting=50,
        ranks=(rank("prefill-0", inflight=60, outcomes={"prefill/completed": completed}),),
    )
    decode = instance(
        "decode-0",
        requests_running=16,
        requests_waiting=20,
        ranks=(rank("decode-0", inflight=60, outcomes={"decode/received": completed}),),
    )
    flying = [
        transfer(
            f"queue-{number}",
            record("prefill-0", "prefilling", 0.8 * number + (tick % 3)),
            record("decode-0", "registered", 0.8 * number + (tick % 3)),
        )
        for number in range(50, 0, -1)
    ]
    # The link is full: a WRITE takes 8 s here and 3 s lately, one after another.
    for number in range(3 * tick, 3 * tick + 24):
        held = 8.0 - (number / 3 - tick)
        posted = {"bytes": 512 * MIB, "started_unix": 1_795_000_000.0 + number / 3}
        flying.append(
            transfer(
                f"write-{number}",
                record("prefill-0", "posted", held, **posted),
                record("decode-0", "registered", held),
            )
        )
    ended = [
        transfer(
            f"write-{number}",
            record("prefill-0", "posted", 8.0, "completed", bytes=512 * MIB, started_unix=1_795_000_000.0 + number / 3),
            record("decode-0", "registered", 8.0, "received"),
        )
        for number in range(3 * tick - 1, 3 * tick - 11, -1)
    ]
    # Decode has no room: these have no record there yet.
    flying += [transfer(f"ready-{number}", record("prefill-0", "ready", 12.0 + number)) for number in range(5)]
    between_polls = transfer(
        f"between-{tick}",
        record("prefill-0", "posted", 6.0, reading_age_s=1.9),
        record("decode-0", "registered", 6.0, "received"),
    )
    return snapshot(
        tick, [*flying, between_polls, *ended], [prefill, decode], stage_p99_s={**P99, "prefill/posted": 0.3}
    )


def _flapping(tick: int) -> Snapshot:
    ill = tick % 6 < 3 and tick < 60
    return _with(tick, 0, 100, instance("decode-0", healthy=not ill, health_error="HTTP 503" if ill else ""))


def _completion_lost(held: float) -> TransferView:
    return transfer(
        "key-1", record("prefill-0", "posted", 0.03, "completed"), record("decode-0", "registered", held + 0.4)
    )


def _failure_untold(held: float) -> TransferView:
    return transfer(
        "key-1",
        record("prefill-0", "posted", 0.03, "failed", reason="REMOTE_DISCONNECT"),
        record("decode-0", "registered", held + 0.4),
    )


def _cases() -> list[Case]:
    dead = ranked("prefill-0", writer="dead", last_error="AssertionError: handle", heartbeat_age_s=9.0)
    return [
        Case("W001-writer-dead", ("W001",), 14, lambda tick: _with(tick, 3, 8, dead),
             ("3 opened W001 prefill-0 critical", "10 closed W001 prefill-0 critical")),
        Case("W002-writer-stuck", ("W002",), 22, lambda tick: _with(tick, 3, 14, ranked(
            "prefill-0", writer="stuck", operation="transfer", operation_age_s=tick - 3.0, heartbeat_age_s=tick - 3.0)),
             ("9 opened W002 prefill-0 critical", "16 closed W002 prefill-0 critical")),
        Case("W003-rank-silent", ("W003",), 22, lambda tick: _with(tick, 2, 14, _silent(
            "prefill-0", tick, process="stopped")),
             ("6 opened W003 prefill-0 critical", "16 closed W003 prefill-0 critical")),
        Case("W004-writer-errors", ("W004",), 110, _writer_errors,
             ("4 opened W004 prefill-0 warning", "90 closed W004 prefill-0 warning")),
        stalled("T001", "registration-lost", lambda held: transfer(
            "key-1", record("prefill-0", "ready", held), record("decode-0", "registered", held + 0.4))),
        stalled("T001", "no-record", lambda held: transfer("key-1", record("decode-0", "registered", held))),
        stalled("T002", "write-stalled", lambda held: transfer(
            "key-1", record("prefill-0", "posted", held), record("decode-0", "registered", held + 0.4))),
        stalled("T003", "completion-lost", _completion_lost),
        stalled("T004", "failure-untold", _failure_untold),
        stalled("T005", "decode-absent", lambda held: transfer("key-1", record("prefill-0", "ready", held))),
        Case("T006-slow-prefill", ("T006",), 30, _slow_prefill,
             ("15 opened T006 prefill-0 warning", "25 closed T006 prefill-0 warning")),
        Case("T007-slow-fabric", ("T007",), 20, _slow_fabric,
             ("4 opened T007 prefill-0>decode-0 warning", "14 closed T007 prefill-0>decode-0 warning"),
             WatchSettings(fabric_baseline_bytes_per_s=10e9)),
        stalled("T008", "connect-stalled", lambda held: transfer(
            "key-1", record("prefill-0", "matched", held), record("decode-0", "registered", held + 0.4)), first=13),
        stalled("T008", "decode-does-not-connect", lambda held: transfer(
            "key-1", record("decode-0", "allocated", held)), first=13),
        Case("T009-load-failed", ("T009",), 110, _load_failed,
             ("6 opened T009 decode-0 warning", "90 closed T009 decode-0 warning"),
             WatchSettings(load_failure_policy="recompute")),
        Case("T010-sides-disagree", ("T010",), 14, lambda tick: snapshot(tick, [transfer(
            "key-1", record("prefill-0", "posted", 2.0, "failed", reason="BACKEND"),
            record("decode-0", "registered", 2.1, "received"))] if between(tick, 3, 8) else []),
             ("4 opened T010 prefill-0>decode-0 critical", "10 closed T010 prefill-0>decode-0 critical")),
        Case("T011-late-messages", ("T011",), 50, _late,
             ("4 opened T011 decode-0 warning", "42 closed T011 decode-0 warning")),
        Case("T012-blocks-held", ("T012",), 18, _blocks_held,
             ("6 opened T012 prefill-0>decode-0 warning", "13 closed T012 prefill-0>decode-0 warning")),
        Case("T013-leases-expire", ("T013",), 120, _leases_expire,
             ("7 opened T013 prefill-0 warning", "90 closed T013 prefill-0 warning")),
        Case("T014-slow-post", ("T014",), 20, _slow_post,
             ("4 opened T014 prefill-0 warning", "14 closed T014 prefill-0 warning")),
        Case("T015-pair-broken", ("T015",), 20, _pair_broken,
             ("4 opened T015 prefill-0>decode-1 critical", "14 closed T015 prefill-0>decode-1 critical")),
        Case("T016-messages-refused", ("T016",), 110, _refused,
             ("4 opened T016 prefill-0 warning", "90 closed T016 prefill-0 warning")),
        Case("E001-engine-down", ("E001", "E002"), 50, _engine_down,
             ("6 opened E001 prefill-0 critical", "15 opened E002 prefill-0 warning",
              "16 closed E001 prefill-0 critical", "45 closed E002 prefill-0 warning")),
        Case("E002-restarted", ("E002",), 40, _restarted,
             ("4 opened E002 decode-0 warning", "34 closed E002 decode-0 warning")),
        Case("E003-host-unreachable", ("E003",), 26, _host_unreachable,
             ("8 opened E003 d1 critical", "22 closed E003 d1 critical")),
        Case("E004-metrics-silent", ("E004",), 14, lambda tick: _with(tick, 3, 8, instance(
            "decode-0", age_s=tick, error="HTTP 500")),
             ("5 opened E004 decode-0 warning", "10 closed E004 decode-0 warning")),
        Case("E005-watch-degraded", ("E005",), 14, lambda tick: _with(
            tick, 3, 8, ranked("prefill-0", unlisted=300)),
             ("4 opened E005 watch info", "10 closed E005 watch info")),
        Case("clean-saturated", (), 60, _saturated, ()),
        Case("flapping-health", ("E001",), 100, _flapping,
             ("1 opened E001 decode-0 critical", "4 closed E001 decode-0 critical",
              "7 opened E001 decode-0 critical", "71 closed E001 decode-0 critical")),
    ]  # fmt: skip


CASES = _cases()


def write_recording(case: Case, path: Path) -> None:
    """The case as a recording without events: those are what the test is about."""
    with Recorder(path) as recorder:
        for one in case.snapshots():
            recorder.write(one)


def main() -> None:
    for path in REPLAYS.glob("*.*"):
        if path.suffix in (".jsonl", ".gz", ".events"):
            path.unlink()
    for case in CASES:
        write_recording(case, case.path)
        case.path.chmod(0o644)
        case.events_path.write_text("".join(f"{line}\n" for line in case.events), encoding="utf-8")


if __name__ == "__main__":
    main()
