"""`hosts.sh` from Python: several hosts on one machine, each with its own sshd. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).with_name("hosts.sh")
# Debian keeps sshd, ip and nft where a normal login's PATH does not look.
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


class TestbedError(Exception):
    """`hosts.sh` failed; the message is what it said."""

    __test__ = False


@dataclass(frozen=True)
class Testbed:
    """One test bed. The names must differ from those of any other that is up at the same time.

    Attributes:
        folder: keys, configurations and logs; removed by `down`.
        bridge: name of the bridge, at most 9 characters.
        net: the first three bytes of its /24.
        prefix: hosts are called `<prefix>1`, `<prefix>2`, ...
    """

    __test__ = False

    folder: Path
    bridge: str
    net: str
    prefix: str
    environ: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def for_tests(cls) -> Testbed:
        """A test bed of its own, also for each process of pytest-xdist.

        `PDCTL_TEST_BED_*` change its names where two test runs share a machine.
        """
        setting = os.environ.get
        # "gw0" is the first; none is the only one.
        worker = setting("PYTEST_XDIST_WORKER", "")
        number = int(worker.removeprefix("gw")) + 1 if worker else 0
        return cls(
            folder=Path(setting("PDCTL_TEST_BED_DIR", "/tmp/pd-testbed-pytest") + (f"-{number}" if number else "")),
            bridge=setting("PDCTL_TEST_BED_BRIDGE", "pdtp") + str(number),
            net=f"{setting('PDCTL_TEST_BED_NET', '10.79')}.{number}",
            prefix=setting("PDCTL_TEST_BED_PREFIX", "t") + (f"{number}x" if number else ""),
        )

    def name(self, number: int) -> str:
        """Name of a host, counted from 1."""
        return f"{self.prefix}{number}"

    def names(self, count: int) -> list[str]:
        """Names of the first hosts."""
        return [self.name(number) for number in range(1, count + 1)]

    def address(self, number: int) -> str:
        """IPv4 address of a host, counted from 1."""
        return f"{self.net}.{10 + number}"

    @property
    def ssh_config(self) -> Path:
        """Configuration that knows all hosts."""
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        """Host keys of all hosts."""
        return self.folder / "known_hosts"

    @property
    def identity(self) -> Path:
        """Private key that all hosts accept."""
        return self.folder / "client"

    def up(self, count: int) -> None:
        """Make hosts, or boot those that are off."""
        self.call("up", str(count), timeout_s=120 + 2 * count)

    def hide_shell_startup(self, count: int) -> None:
        """Give bash an empty ~/.bashrc on the first hosts, in the mount namespace of each; the file itself stays."""
        startup = Path.home() / ".bashrc"
        if startup.exists():
            for name in self.names(count):
                self.call("exec", name, "mount", "--bind", "/dev/null", str(startup))

    def down(self) -> None:
        """End and remove everything."""
        self.call("down", timeout_s=300)

    def call(self, *words: str, timeout_s: float = 60) -> str:
        """Run a command of `hosts.sh` and return what it wrote."""
        if shutil.which("bash") is None:
            raise TestbedError("bash not found")
        environ = {
            **os.environ,
            "PATH": SYSTEM_PATH,
            "PD_TESTBED_DIR": str(self.folder),
            "PD_TESTBED_BRIDGE": self.bridge,
            "PD_TESTBED_NET": self.net,
            "PD_TESTBED_PREFIX": self.prefix,
            **self.environ,
        }
        # Into files, not pipes: what it starts lives on and would hold a pipe open.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                ["bash", str(SCRIPT), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                timeout=timeout_s,
                check=False,
            )
            output.seek(0)
            said = output.read().decode(errors="replace")
        if done.returncode != 0:
            raise TestbedError(f"hosts.sh {' '.join(words)} (exit status {done.returncode}): {said.strip()}")
        return said
