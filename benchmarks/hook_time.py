"""Time that pdctl's connector takes on the engine's main thread, per step, with many transfers in flight. Needs root.

    python benchmarks/hook_time.py [--in-flight 64] [--seconds 60]

One prefill and one decode on two hosts of tests/testbed/hosts.sh. The link is slow, so that transfers stay in flight;
clients keep as many requests going. Prints p50, p99 and the maximum of the microseconds per step, of the wall clock
(with what other threads and processes take away) and of this thread's CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "connector")]

import benchmarks.connectors as connectors  # noqa: E402  # found by the line above
from tests.testbed.hosts import Testbed  # noqa: E402


def read(file: Path, skip: int) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Wall and CPU microseconds per step, by the hook that ends it."""
    lines = file.read_text().splitlines() if file.exists() else []
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines[skip:]:
        name, wall, cpu = line.split()
        found.setdefault(name, []).append((float(wall), float(cpu)))
    return found, len(lines)


def show(title: str, found: dict[str, list[tuple[float, float]]]) -> None:
    """Print a line for each hook."""
    for name, pairs in sorted(found.items()):
        for what, values in (("wall", sorted(p[0] for p in pairs)), ("cpu", sorted(p[1] for p in pairs))):
            p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
            print(
                f"{title:28} {name:22} {what:4} p50 {statistics.median(values):7.1f} us  p99 {p99:7.1f} us  "
                f"max {values[-1]:8.1f} us  n={len(values)}"
            )


def main() -> int:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rate", default="20mbit")
    options = parser.parse_args()
    Path("/proc/sys/kernel/sched_autogroup_enabled").write_text("0")
    folder = Path(f"/tmp/pdctl-hooks-{os.getpid()}")
    folder.mkdir()
    model = ROOT / ".demo" / "model"
    testbed = Testbed(Path("/tmp/pd-testbed-bench"), bridge="pdtb0", net="10.84.0", prefix="b")
    testbed.up(2)
    pair = connectors.Pair(testbed, "pdctl", 0, model, folder)
    files = {"prefill": folder / "prefill.times", "decode": folder / "decode.times"}
    text = pair.file.read_text()
    for role, file in files.items():
        python = folder / f"python-{role}"
        python.write_text(
            f"#!/bin/sh\nexport HOOK_TIMES={file} PYTHONPATH={ROOT}/benchmarks/timed_hooks:$PYTHONPATH\n"
            f'exec {connectors.PYTHON} "$@"\n'
        )
        python.chmod(0o755)
        text = text.replace(f"{role}: {{", f"{role}: {{python: {python}, ")
    pair.file.write_text(text)
    stop = threading.Event()
    try:
        pair.up()
        connectors.calibrate(pair)

        def client() -> None:
            while not stop.is_set():
                with contextlib.suppress(Exception):
                    pair.legs(connectors.prompt_of(options.tokens))

        threads = [threading.Thread(target=client, daemon=True) for _ in range(options.in_flight)]
        before = {role: read(file, 0)[1] for role, file in files.items()}
        testbed.call("slow", testbed.name(1), options.rate)
        for thread in threads:
            thread.start()
        end = time.monotonic() + options.seconds
        counts = []
        while time.monotonic() < end:
            time.sleep(2)
            counts.append(connectors.in_flight(testbed, 8400))
        print(f"transfers in flight on prefill: median {statistics.median(counts):.0f}, most {max(counts)}")
        for role, file in files.items():
            show(role, read(file, before[role])[0])
    finally:
        stop.set()
        testbed.call("fast", testbed.name(1))
        pair.down()
        testbed.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
