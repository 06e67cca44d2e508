"""A real sshd on loopback, started by whoever runs the tests; root is not needed.

It lets in the login that runs the tests, by key only. Its configuration can be changed and it be restarted, on the same
port.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.testbed.hosts import SYSTEM_PATH

START_TIMEOUT_S = 20


def free_port() -> int:
    """A port of loopback that nothing listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def make_key(file: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """Make a key pair."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", file.name, "-f", str(file)], check=True, timeout=60
    )
    return file


def public_key(file: Path) -> str:
    """`type key` of a key pair, without the comment."""
    return " ".join(Path(f"{file}.pub").read_text().split()[:2])


def fingerprint(file: Path) -> str:
    """`SHA256:...` of a key pair, as OpenSSH computes it."""
    done = subprocess.run(["ssh-keygen", "-lf", f"{file}.pub"], check=True, capture_output=True, text=True, timeout=20)
    return done.stdout.split()[1]


@dataclass
class Sshd:
    """The server, its keys, and a client configuration that knows it as `box`.

    Attributes:
        folder: where all files of it are.
        options: more lines for sshd_config.
        client_options: more lines for the client's configuration.
        host_keys: private host keys that it shows.
    """

    folder: Path
    options: list[str] = field(default_factory=list)
    client_options: list[str] = field(default_factory=list)
    host_keys: list[Path] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    user: str = field(default_factory=getpass.getuser)
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.identity = make_key(self.folder / "client")
        shutil.copy(f"{self.identity}.pub", self.folder / "authorized_keys")
        if not self.host_keys:
            self.host_keys = [make_key(self.folder / "host_ed25519")]
        self.record(*self.host_keys)

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def known_hosts(self) -> Path:
        """The client's known_hosts file."""
        return self.folder / "known_hosts"

    @property
    def log(self) -> str:
        """What sshd has logged since it was first started."""
        return (self.folder / "sshd.log").read_text(errors="replace")

    @property
    def logins(self) -> int:
        """How many logins there were."""
        return self.log.count("Accepted publickey")

    @property
    def ssh_config(self) -> Path:
        """The client's configuration, written anew."""
        file = self.folder / "ssh_config"
        lines = [
            *self.client_options,
            "Host box",
            "HostName 127.0.0.1",
            f"Port {self.port}",
            f"User {self.user}",
            f"IdentityFile {self.identity}",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.known_hosts}",
            "GlobalKnownHostsFile none",
        ]
        file.write_text("\n".join(lines) + "\n")
        return file

    def record(self, *keys: Path) -> None:
        """Make these the only host keys that the client knows."""
        self.known_hosts.write_text("".join(f"[127.0.0.1]:{self.port} {public_key(key)}\n" for key in keys))

    def start(self) -> None:
        """Start it and wait until it listens."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        config = self.folder / "sshd_config"
        lines = [
            # The first value of a key counts.
            *self.options,
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            *(f"HostKey {key}" for key in self.host_keys),
            f"PidFile {self.folder}/sshd.pid",
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "MaxStartups 100",
            "PrintMotd no",
            "LogLevel VERBOSE",
        ]
        config.write_text("\n".join(lines) + "\n")
        program = shutil.which("sshd", path=SYSTEM_PATH)
        assert program is not None
        # sshd starts itself again for each connection, and insists on an absolute path for that.
        self._process = subprocess.Popen(
            [program, "-D", "-f", str(config), "-E", str(self.folder / "sshd.log")],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"sshd ended: {self.log}")
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise AssertionError(f"sshd does not listen: {self.log}")

    def stop(self) -> None:
        """End it, and every connection to it."""
        if self._process is not None:
            self.drop_connections()
            self._process.terminate()
            self._process.wait(timeout=20)
            self._process = None

    def restart(self) -> None:
        """End it and start it again, with the configuration as it is now."""
        self.stop()
        self.start()

    def drop_connections(self) -> int:
        """Kill what serves the connections, as if they broke; returns how many processes that were."""
        assert self._process is not None
        children = _children(self._process.pid)
        for pid in [grandchild for child in children for grandchild in _children(child)] + children:
            # Only what belongs to sshd: commands of a session are left to notice by themselves.
            name = Path(f"/proc/{pid}/comm")
            try:
                if name.read_text().startswith("sshd"):
                    os.kill(pid, signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return len(children)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
