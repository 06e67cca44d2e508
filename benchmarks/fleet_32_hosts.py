"""How long one call of the node agent on 32 SSH hosts takes, connecting included.

Brings up hosts with tests/testbed/hosts.sh (needs root, see there), asks the agent of every host for the state of a
cluster that does not exist, and takes the hosts down. Every run is a process of its own, as a command of pdctl is: what
it loads and connects to is not there from the run before. All hosts share this machine's CPUs, which real ones do not.

    python benchmarks/fleet_32_hosts.py [--hosts 32] [--runs 5] [--shell-startup]

A login shell's start-up files run before every command of SSH. They are hidden from the hosts (bash reads an empty
~/.bashrc) because their cost is not pdctl's; `--shell-startup` leaves them in.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from pdctl.hosts.agent import call  # noqa: E402
from pdctl.hosts.base import FleetSettings, Host, Login, SshSettings  # noqa: E402
from pdctl.hosts.fleet import Fleet  # noqa: E402
from tests.testbed.hosts import Testbed  # noqa: E402

RUN_TIMEOUT_S = 120


def ask(host: Host) -> dict[str, object]:
    return call(host, "status", {"cluster": "no-such-cluster", "instances": []}, timeout_s=60)


def fan_out(config: str, names: list[str]) -> None:
    """One run: prints the seconds from making the fleet to having every answer."""
    settings = FleetSettings(
        {name: Login() for name in names}, SshSettings(config_file=config, max_parallel=len(names))
    )
    started = time.perf_counter()
    with Fleet(settings) as fleet:
        results = fleet.map(ask, names, timeout_s=60)
        took_s = time.perf_counter() - started
    for name, result in results.items():
        if not isinstance(result, dict) or result.get("instances") != {}:
            raise SystemExit(f"{name}: {result}")
    print(json.dumps({"took_s": took_s, "cpu_s": sum(os.times()[:2])}))


def measure(bed: Testbed, hosts: int, runs: int) -> None:
    names = bed.names(hosts)
    whole: list[float] = []
    inner: list[dict[str, float]] = []
    for _ in range(runs):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, __file__, "--one-run", str(bed.ssh_config), *names],
            check=True,
            stdout=subprocess.PIPE,
            timeout=RUN_TIMEOUT_S,
        )
        whole.append(time.perf_counter() - started)
        inner.append(json.loads(done.stdout))
    show("one agent call on all hosts, connecting included", [run["took_s"] for run in inner])
    show("the whole process, start of Python included", whole)
    show("CPU time of the process", [run["cpu_s"] for run in inner])


def show(what: str, seconds: list[float]) -> None:
    print(
        f"{what:50} min {min(seconds):5.2f} s   median {statistics.median(seconds):5.2f} s   max {max(seconds):5.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shell-startup", action="store_true", help="keep ~/.bashrc as it is")
    parser.add_argument("--one-run", nargs="+", metavar=("CONFIG", "HOST"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_run:
        fan_out(options.one_run[0], options.one_run[1:])
        return
    bed = Testbed.for_tests()
    try:
        bed.up(options.hosts)
        if not options.shell_startup:
            bed.hide_shell_startup(options.hosts)
        print(
            f"{options.hosts} hosts, {options.runs} runs, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
            f"load {os.getloadavg()[0]:.1f}, shell start-up files {'kept' if options.shell_startup else 'hidden'}"
        )
        measure(bed, options.hosts, options.runs)
    finally:
        bed.down()


if __name__ == "__main__":
    main()
