"""How long `pdctl status` takes for 32 SSH hosts, each with a running instance (a stand-in for vLLM). Needs root.

    python benchmarks/status_32_hosts.py [--hosts 32] [--runs 5] [--shell-startup]

Makes the hosts with tests/testbed/hosts.sh (a real sshd each, all on this machine), starts a cluster of half prefill
and
half decode instances on them, and times whole `pdctl status --json` processes, connecting included. Removes everything.
What a login shell's start-up files cost is not pdctl's: bash reads an empty ~/.bashrc on the hosts, unless
--shell-startup is given.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "connector")]

from tests.testbed.hosts import Testbed  # noqa: E402  # found by the line above


def main() -> int:
    """Run the benchmark and print the times in seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shell-startup", action="store_true", help="keep ~/.bashrc as it is")
    options = parser.parse_args()
    testbed = Testbed(Path("/tmp/pd-testbed-bench"), bridge="pdtq0", net="10.81.0", prefix="q")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        entries = [f"{{name: {testbed.name(n)}, address: {testbed.address(n)}}}" for n in range(1, options.hosts + 1)]
        half = options.hosts // 2
        stand_in = ROOT / "tests" / "support" / "stand_in"
        file.write_text(
            f"cluster: bench-status\nmodel: {folder}\naccelerator: cpu\nfabric: tcp\npython: /usr/bin/python3\n"
            f"env: {{PYTHONPATH: {stand_in}}}\n"
            f"prefill: {{hosts: [{', '.join(entries[:half])}], vllm_args: {{dtype: float32}}}}\n"
            f"decode: {{hosts: [{', '.join(entries[half:])}], vllm_args: {{dtype: float32}}}}\n"
            f"router: {{host: {testbed.name(1)}, port: 8000}}\n"
        )
        environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'connector'}",
            "PDCTL_SSH_CONFIG": str(testbed.ssh_config),
            "PDCTL_FILE": str(file),
        }

        def pdctl(*words: str) -> tuple[int, float]:
            begin = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "pdctl", *words], env=environ, capture_output=True, text=True, check=False
            )
            if done.returncode not in (0, 1):
                print(done.stderr, file=sys.stderr)
            return done.returncode, time.monotonic() - begin

        testbed.up(options.hosts)
        try:
            if not options.shell_startup:
                testbed.hide_shell_startup(options.hosts)
            code, seconds = pdctl("up", "--keep", "--no-prove", "--json")
            print(f"pdctl up of {options.hosts} stand-ins: exit code {code}, {seconds:.2f} s")
            times = []
            for _ in range(options.runs):
                code, seconds = pdctl("status", "--json")
                times.append(seconds)
                print(f"pdctl status: exit code {code}, {seconds:.2f} s")
            print(f"status of {options.hosts} hosts: median {statistics.median(times):.2f} s, max {max(times):.2f} s")
            pdctl("down", "--force")
        finally:
            testbed.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
