"""What a scrape of every rank's telemetry once a second costs in time per output token. Needs root.

    python benchmarks/scrape.py [--rounds 20]

One prefill and one decode on two hosts of tests/testbed/hosts.sh. Rounds with and without a scraper (`/metrics`,
`/healthz` and `/transfers` of both ranks, each once a second) take turns. Prints the ratio of the medians, with a 95 %
interval by bootstrap over the rounds, and how much of a core an idle rank takes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "connector")]

import benchmarks.connectors as connectors  # noqa: E402  # found by the line above
from tests.testbed.hosts import Testbed  # noqa: E402

_SCRAPE = (
    "while :; do for path in metrics healthz transfers; do "
    "curl -s -m 2 -o /dev/null 127.0.0.1:$1/$path; done; sleep 1; done"
)


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of processes until now."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    Path("/proc/sys/kernel/sched_autogroup_enabled").write_text("0")
    testbed = Testbed(Path("/tmp/pd-testbed-bench"), bridge="pdtb0", net="10.84.0", prefix="b")
    testbed.up(2)
    with tempfile.TemporaryDirectory() as folder:
        pair = connectors.Pair(testbed, "pdctl", 0, ROOT / ".demo" / "model", Path(folder))
        try:
            pair.up()
            connectors.calibrate(pair)
            for _ in range(4):
                pair.routed(connectors.prompt_of(512))
            workers = [
                pid for pid in pair.processes if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Worker")
            ]
            # While prefill holds blocks of a request, vLLM's engine loop goes on stepping.
            while connectors.in_flight(testbed, 8400):
                time.sleep(1)
            before, seconds = cpu_seconds(workers), 10.0
            time.sleep(seconds)
            used = (cpu_seconds(workers) - before) / seconds
            print(f"idle pair: {100 * used:.1f} % of a core by {len(workers)} workers together, over {seconds:.0f} s")
            rounds: dict[bool, list[list[float]]] = {False: [], True: []}
            for number in range(options.rounds):
                for scraped in (False, True) if number % 2 else (True, False):
                    scrapers = [
                        subprocess.Popen(
                            ["ip", "netns", "exec", testbed.name(host), "sh", "-c", _SCRAPE, "scrape", str(port)],
                            start_new_session=True,
                        )
                        for host, port in ((1, 8400), (2, 8600))
                        if scraped
                    ]
                    answers = [pair.routed(connectors.prompt_of(512)) for _ in range(6)]
                    for scraper in scrapers:
                        os.killpg(scraper.pid, 15)
                        scraper.wait()
                    rounds[scraped].append([1000 * answer.per_token for answer in answers])
            for scraped, values in rounds.items():
                flat = np.concatenate(values)
                print(f"{'with' if scraped else 'without'} scrape: TPOT median {np.median(flat):.2f} ms, n={len(flat)}")
            middle, low, high = connectors.ratio(rounds[True], rounds[False])
            print(f"with / without: {middle:.3f} [{low:.3f}, {high:.3f}]")
        finally:
            pair.down()
            testbed.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
