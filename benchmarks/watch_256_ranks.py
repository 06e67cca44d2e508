"""What watching 256 ranks once a second costs the machine that watches.

    python benchmarks/watch_256_ranks.py [--ranks 256] [--ranks-per-host 8] [--minutes 1] [--inflight 2] [--record FILE]

Simulated ranks and APIs are served by a process of their own, and the scripts of the hosts are processes on this
machine as well; what is measured is the process of the poller alone. Each transfer is in flight at all ranks of a
prefill and of a decode instance, and some end every second. Prints cores used and resident memory over time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "connector")]

from pdctl.hosts.base import Host  # noqa: E402  # found by the line above
from pdctl.hosts.fleet import Fleet  # noqa: E402
from pdctl.hosts.local import LocalHost  # noqa: E402
from pdctl.plan import ClusterPlan  # noqa: E402
from pdctl.watch.poller import Poller  # noqa: E402
from pdctl.watch.recording import Recorder  # noqa: E402
from tests.support.plans import changed, planned  # noqa: E402
from tests.support.ranks import Servers, record, serve_plan  # noqa: E402

# Where nothing else listens; sides a good way apart.
FIRST_PORT = 21000


class LocalFleet(Fleet):
    """Every host is this machine."""

    def host(self, name: str) -> Host:
        return LocalHost(name)


def make_plan(ranks: int, per_host: int) -> ClusterPlan:
    """Half prefill and half decode, one instance a host, each with ports of its own."""
    hosts = [
        {
            "name": f"h{n}",
            "address": "127.0.0.1",
            "port": FIRST_PORT + n,
            "telemetry_port": FIRST_PORT + 2000 + n * per_host,
            "side_channel_port": FIRST_PORT + 8000 + n,
        }
        for n in range(ranks // per_host)
    ]
    half = len(hosts) // 2
    side = {"tensor_parallel": per_host}
    return planned(
        changed(
            accelerator="cpu",
            prefill={**side, "hosts": hosts[:half]},
            decode={**side, "hosts": hosts[half:]},
            router={"host": "h0", "address": "127.0.0.1", "port": FIRST_PORT + 1000, "metrics_port": FIRST_PORT + 1001},
        )
    )


def serve(plan: ClusterPlan, inflight: int) -> None:
    """Serve everything, and let transfers come and go, until standard input ends."""
    with Servers() as servers:
        ranks, _ = serve_plan(servers, plan)
        for rank in ranks.values():
            for side in ("prefill", "decode"):
                for stage in ("ready", "matched", "posted"):
                    rank.stage_times[f"{side}/{stage}"] = {10.0**n: 0 for n in range(-9, 8)}
        print("ready", flush=True)
        count = 0
        while True:
            count += 1
            for (instance, number), rank in ranks.items():
                side = instance.partition("-")[0]
                stage, outcome = ("posted", "completed") if side == "prefill" else ("registered", "received")
                # Ranks of one instance share transfers, as tensor-parallel ones do.
                name = f"{instance.partition('-')[2]}-{count}"
                for ended in rank.inflight:
                    rank.finish({**ended, "outcome": outcome, "started_unix": float(count)})
                rank.inflight = [record(side, f"{name}-{n}", stage) for n in range(inflight)]
                rank.bytes += 10_000_000
                for times in rank.stage_times.values():
                    for bound in times:
                        times[bound] += number % 3
            time.sleep(1.0)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--ranks-per-host", type=int, default=8)
    parser.add_argument("--inflight", type=int, default=2, help="transfers in flight at each rank")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--record", type=Path, help="write every snapshot there, as `pdctl watch --record` does")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    plan = make_plan(options.ranks, options.ranks_per_host)
    if options.serve:
        serve(plan, options.inflight)
        return 0
    simulation = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--serve"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        assert simulation.stdout is not None
        simulation.stdout.readline()
        with ExitStack() as stack:
            fleet = stack.enter_context(LocalFleet(plan.spec))
            poller = stack.enter_context(Poller(plan, fleet))
            recorder = stack.enter_context(Recorder(options.record)) if options.record else None
            measure(poller, options.minutes * 60, recorder)
    finally:
        simulation.kill()
        simulation.wait()
    return 0


def measure(poller: Poller, seconds: float, recorder: Recorder | None) -> None:
    """Poll once a second and print what that costs."""
    own = psutil.Process()
    began = time.monotonic()
    first = poller.poll()
    print(f"first poll: {time.monotonic() - began:.1f} s, {first.poll_errors} readings missing")
    time.sleep(5)
    begun, used, reported = time.monotonic(), sum(own.cpu_times()[:2]), time.monotonic()
    polls: list[float] = []
    due = begun
    while time.monotonic() - begun < seconds:
        snapshot = poller.poll()
        polls.append(snapshot.poll_s)
        if recorder is not None:
            recorder.write(snapshot)
        now = time.monotonic()
        if now - reported >= 10:
            reported = now
            ages = [rank.age_s for one in snapshot.instances for rank in one.ranks if rank.age_s is not None]
            cores = (sum(own.cpu_times()[:2]) - used) / (now - begun)
            print(
                f"{now - begun:6.0f} s  {cores:5.3f} cores  {own.memory_info().rss / 2**20:6.1f} MiB  "
                f"{len(ages)} ranks, oldest reading {max(ages, default=0):.1f} s, {snapshot.poll_errors} errors, "
                f"{len(snapshot.transfers)} transfers",
                flush=True,
            )
        due += 1.0
        time.sleep(max(0.0, due - time.monotonic()))
    polls.sort()
    print(f"making a snapshot: median {polls[len(polls) // 2] * 1000:.1f} ms, longest {polls[-1] * 1000:.1f} ms")


if __name__ == "__main__":
    sys.exit(main())
