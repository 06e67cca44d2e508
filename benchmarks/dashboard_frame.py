"""What a frame of `pdctl watch` costs: 64 instances and 500 transfers, drawn headless, with every age changed.

Three kinds of frames:

    steady    the same transfers, one second older; figures of every instance differ
    churn     each second all 500 transfers are others
    idle      nothing but the clock differs

For each: CPU milliseconds of this process from taking the frame until everything is drawn and the event loop is idle
again, for a terminal of 200x60. The cost of an idle event loop over the same time is measured before, and given beside.

    python benchmarks/dashboard_frame.py [--frames 30] [--instances 64] [--transfers 500] [--limit-ms 50]

Ends with 1 if the median of a kind is over the limit. The 99th percentile is given too; on a machine that does other
work it says more of that work.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pdctl.watch.alerts import Alert, Severity, Symptom
from pdctl.watch.snapshot import HostView, InstanceView, Percentiles, RankView, SideRecord, Snapshot, TransferView
from pdctl.watch.tui.app import Dashboard, make_dashboard
from pdctl.watch.tui.source import Frame, SourceClosed

SIZE = (200, 60)
RANKS = 8


class Silent:
    """A source that gives nothing: the benchmark hands over the frames itself."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def next(self) -> Frame:
        self._closed.wait()
        raise SourceClosed

    def close(self) -> None:
        self._closed.set()


def make_instance(name: str, chance: random.Random) -> InstanceView:
    ranks = tuple(
        RankView(
            number,
            age_s=chance.random(),
            engine_id=f"{name}-engine",
            pid=1000 + number,
            writer=chance.choice(["idle", "busy"]),
            heartbeat_age_s=chance.random() / 10,
            inflight=chance.randrange(9),
            oldest_s=chance.random(),
            posted_bytes=chance.randrange(10**12),
            bytes_per_s=chance.random() * 1e9,
        )
        for number in range(RANKS)
    )
    return InstanceView(
        name,
        name.partition("-")[0],
        f"host-{name}",
        "http://10.0.0.1:8100",
        process="running",
        process_age_s=2.0,
        healthy=True,
        age_s=chance.random(),
        requests_running=chance.randrange(200),
        requests_waiting=chance.randrange(50),
        kv_use=chance.random(),
        ranks=ranks,
    )


def make_transfer(number: int, age_s: float, names: list[str]) -> TransferView:
    def record(instance: str, stage: str, stages: dict[str, float]) -> SideRecord:
        return SideRecord(
            instance, 0, 1, stage, "", "", age_s, age_s - 0.05, stages, 1.795e9, 0.4, descriptors=24, bytes=1_572_864
        )

    half = len(names) // 2
    prefill = record(names[number % half], "posted", {"ready": 0.0, "matched": 0.04, "posted": 0.05})
    decode = record(names[half + number % half], "registered", {"allocated": 0.0, "registered": 0.05})
    return TransferView(f"cmpl-{number:08d}", (prefill,), (decode,))


def frames(kind: str, instances: int, transfers: int) -> Iterator[Frame]:
    chance = random.Random(1)
    half = instances // 2
    names = [f"prefill-{number}" for number in range(half)] + [f"decode-{number}" for number in range(half)]
    steady = tuple(make_instance(name, chance) for name in names)
    hosts = tuple(HostView(f"host-{name}", 1.0) for name in names)
    tick = 0
    while True:
        tick += 1
        first = tick * transfers if kind == "churn" else 0
        age = 0.0 if kind == "idle" else tick * 1.01
        moving = [make_transfer(first + n, age + 0.06 + (transfers - n) / 100, names) for n in range(transfers)]
        shown = steady if kind == "idle" else tuple(make_instance(name, chance) for name in names)
        symptom = Symptom(
            "T002",
            "write-stalled",
            Severity.CRITICAL,
            moving[0].key,
            (names[0],),
            "h",
            "stalled",
            "look",
            moving[0].key,
        )
        latency = Percentiles(0.1 + tick / 1000, 0.9, 100)
        snapshot = Snapshot(
            1000.0 + tick,
            1.795e9 + tick,
            tick,
            "c",
            "m",
            "push",
            shown,
            hosts,
            tuple(moving),
            0,
            99.0,
            latency,
            latency,
        )
        yield Frame(snapshot, (Alert(symptom, 1.795e9, float(tick)),))


async def settle(app: Dashboard) -> None:
    """Until everything that was asked for has been drawn: three rounds of refresh callbacks."""
    for _ in range(3):
        drawn = asyncio.Event()
        app.call_after_refresh(drawn.set)
        await drawn.wait()


async def measure(kind: str, arguments: argparse.Namespace) -> tuple[list[float], float, float]:
    app = make_dashboard(Silent(), read_only=True)
    source = frames(kind, arguments.instances, arguments.transfers)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        for _ in range(3):  # fills caches and tables
            app.take(next(source))
            await settle(app)
        began = time.process_time()
        for _ in range(10):
            await settle(app)
        idle_ms = (time.process_time() - began) * 100
        spent: list[float] = []
        cells = [app.table(pane).lines_drawn for pane in ("prefill", "decode", "transfers", "alerts")]
        for _ in range(arguments.frames):
            frame = next(source)
            began = time.process_time()
            app.take(frame)
            await settle(app)
            spent.append((time.process_time() - began) * 1000)
        after = [app.table(pane).lines_drawn for pane in ("prefill", "decode", "transfers", "alerts")]
    return spent, idle_ms, (sum(after) - sum(cells)) / arguments.frames


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=30)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--transfers", type=int, default=500)
    parser.add_argument("--limit-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    over = False
    print(f"{arguments.instances} instances, {arguments.transfers} transfers, {SIZE[0]}x{SIZE[1]}")
    for kind in ("steady", "churn", "idle"):
        spent, idle_ms, cells = asyncio.run(measure(kind, arguments))
        ordered = sorted(spent)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        over = over or statistics.median(spent) > arguments.limit_ms
        print(
            f"{kind:<7} median {statistics.median(spent):6.1f} ms   p99 {p99:6.1f} ms   "
            f"lines drawn {cells:7.0f}   (an idle loop: {idle_ms:.1f} ms)"
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
