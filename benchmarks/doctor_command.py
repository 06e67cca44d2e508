"""How long whole `pdctl doctor --no-probe` processes take over SSH, connecting and checks included. Needs root.

    python benchmarks/doctor_command.py [--hosts 2 32] [--runs 5] [--python PYTHON] [--shell-startup]

Makes the hosts with tests/testbed/hosts.sh (a real sshd each, all on this machine), half prefill and half decode.
`--python` is the interpreter that the cluster file names; with one that has NIXL, every host loads it for real. bash
reads an empty ~/.bashrc on the hosts, unless --shell-startup is given: what it costs is not pdctl's.
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
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--shell-startup", action="store_true", help="keep ~/.bashrc as it is")
    options = parser.parse_args()
    model = ROOT / ".demo" / "model"
    for count in options.hosts:
        testbed = Testbed(Path("/tmp/pd-testbed-bench"), bridge="pdtq0", net="10.85.0", prefix="q")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "cluster.yaml"
            entries = [f"{{name: {testbed.name(n)}, address: {testbed.address(n)}}}" for n in range(1, count + 1)]
            half = count // 2
            file.write_text(
                f"cluster: bench-doctor\nmodel: {model}\naccelerator: cpu\nfabric: tcp\npython: {options.python}\n"
                f"prefill: {{hosts: [{', '.join(entries[:half])}], vllm_args: {{max-model-len: 2048}}}}\n"
                f"decode: {{hosts: [{', '.join(entries[half:])}], vllm_args: {{max-model-len: 2048}}}}\n"
                f"router: {{host: {testbed.name(1)}, port: 8000}}\n"
            )
            environ = {
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'connector'}",
                "PDCTL_SSH_CONFIG": str(testbed.ssh_config),
                "PDCTL_FILE": str(file),
            }
            testbed.up(count)
            try:
                if not options.shell_startup:
                    testbed.hide_shell_startup(count)
                took = []
                for _ in range(options.runs + 1):
                    begin = time.monotonic()
                    done = subprocess.run(
                        [sys.executable, "-m", "pdctl", "doctor", "--no-probe"],
                        env=environ,
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    took.append(time.monotonic() - begin)
                    if done.returncode not in (0, 1):
                        sys.exit(done.stdout + done.stderr)
                # The first one writes the bytecode.
                took = took[1:]
                print(f"{count} hosts: median {statistics.median(took):.2f} s, max {max(took):.2f} s, n={len(took)}")
                print(done.stdout.strip().splitlines()[-1], flush=True)
            finally:
                testbed.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
