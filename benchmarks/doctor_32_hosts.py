"""How long collecting the doctor's facts from 32 SSH hosts takes, connecting included. Needs root.

    python benchmarks/doctor_32_hosts.py [--hosts 32] [--runs 5] [--python PYTHON] [--pyinfra PYTHON] [--shell-startup]

Makes the hosts with tests/testbed/hosts.sh (a real sshd each, all on this machine, which real ones do not share), plans
a cluster of half prefill and half decode hosts on them, and collects the facts of all. Every run is a process of its
own, as a command of pdctl is. `--python` is the interpreter that the plan names: with one that has NIXL, every host
loads NIXL and its plugins for real. `--pyinfra` is a Python that has pyinfra, which then collects comparable facts from
the same hosts in turn with pdctl; without it, the one that runs this. Removes everything.

What a login shell's start-up files cost is not pdctl's: bash reads an empty ~/.bashrc on the hosts, unless
--shell-startup is given.
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
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "connector")]

from tests.testbed.hosts import Testbed  # noqa: E402  # found by the line above

RUN_TIMEOUT_S = 120


def cluster_file(bed: Testbed, hosts: int, python: str) -> str:
    entries = [f"{{name: {bed.name(n)}, address: {bed.address(n)}}}" for n in range(1, hosts + 1)]
    half = max(1, hosts // 2)
    return (
        f"cluster: bench-doctor\nmodel: /no/such/model\naccelerator: cpu\nfabric: tcp\npython: {python}\n"
        f"ssh: {{config_file: {bed.ssh_config}, max_parallel: {hosts}}}\n"
        f"prefill: {{hosts: [{', '.join(entries[:half])}]}}\n"
        f"decode: {{hosts: [{', '.join(entries[half:] or entries[:1])}]}}\n"
        f"router: {{host: {bed.name(1)}, port: 8000}}\n"
    )


def one_run(file: str) -> None:
    """One run: prints the seconds from planning to having every fact."""
    started = time.perf_counter()
    from pdctl.doctor.collect import collect
    from pdctl.hosts.fleet import Fleet
    from pdctl.plan import make_plan
    from pdctl.spec import load

    spec = load(Path(file), os.environ)
    plan = make_plan(spec, environ=os.environ, connector_digest="0" * 64, require_secrets=False)
    with Fleet(spec) as fleet:
        facts, unreachable = collect(fleet, plan, timeout_s=60)
        took_s = time.perf_counter() - started
    if unreachable:
        raise SystemExit("\n".join(str(error) for error in unreachable.values()))
    late = sorted({name for one in facts.values() for name in one.missing})
    slowest_s = max(one.took_s or 0.0 for one in facts.values())
    print(json.dumps({"took_s": took_s, "cpu_s": sum(os.times()[:2]), "slowest_host_s": slowest_s, "missing": late}))


def timed(argv: list[str]) -> tuple[float, dict[str, object]]:
    started = time.perf_counter()
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=RUN_TIMEOUT_S)
    return time.perf_counter() - started, json.loads(done.stdout.splitlines()[-1])


def has_pyinfra(python: str) -> bool:
    try:
        command = [python, "-c", "import pyinfra"]
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    except OSError:
        return False


def measure(bed: Testbed, options: argparse.Namespace) -> None:
    file = bed.folder / "bench-doctor.yaml"
    file.write_text(cluster_file(bed, options.hosts, options.python))
    names = bed.names(options.hosts)
    pyinfra = [
        options.pyinfra,
        str(Path(__file__).with_name("pyinfra_facts.py")),
        str(bed.ssh_config),
        str(bed.known_hosts),
        options.python,
        *names,
    ]
    compare = has_pyinfra(options.pyinfra)
    ours: list[tuple[float, dict[str, object]]] = []
    theirs: list[tuple[float, dict[str, object]]] = []
    for _ in range(options.runs):
        ours.append(timed([sys.executable, __file__, "--one-run", str(file)]))
        if compare:
            theirs.append(timed(pyinfra))
    show("collecting facts of all hosts, connecting included", [run["took_s"] for _, run in ours])
    show("the whole process, start of Python included", [whole for whole, _ in ours])
    show("CPU time of the process", [run["cpu_s"] for _, run in ours])
    show("the script on the slowest host", [run["slowest_host_s"] for _, run in ours])
    print(f"not collected on some host: {sorted({name for _, run in ours for name in run['missing']}) or 'nothing'}")
    if not compare:
        print("pyinfra not installed")
        return
    show(
        f"pyinfra: {theirs[0][1]['facts']} facts of {theirs[0][1]['hosts']} hosts", [run["took_s"] for _, run in theirs]
    )
    show("pyinfra: the whole process", [whole for whole, _ in theirs])


def show(what: str, seconds: list) -> None:
    print(
        f"{what:50} min {min(seconds):5.2f} s   median {statistics.median(seconds):5.2f} s   max {max(seconds):5.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--python", default="/usr/bin/python3", help="interpreter that the plan names")
    parser.add_argument("--pyinfra", default=sys.executable, help="a Python that has pyinfra")
    parser.add_argument("--shell-startup", action="store_true", help="keep ~/.bashrc as it is")
    parser.add_argument("--one-run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_run:
        one_run(options.one_run)
        return
    bed = Testbed.for_tests()
    try:
        bed.up(options.hosts)
        if not options.shell_startup:
            bed.hide_shell_startup(options.hosts)
        print(
            f"{options.hosts} hosts, {options.runs} runs, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
            f"load {os.getloadavg()[0]:.1f}, interpreter {options.python}, "
            f"shell start-up files {'kept' if options.shell_startup else 'hidden'}"
        )
        measure(bed, options)
    finally:
        bed.down()


if __name__ == "__main__":
    main()
