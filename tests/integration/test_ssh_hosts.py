"""SSH hosts against real servers: what works, and what is said when it does not."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.errors import (
    CommandTimeout,
    HostError,
    HostKeyRejected,
    HostUnreachable,
    LoginFailed,
    NodeError,
    PdctlError,
)
from pdctl.hosts import ssh as ssh_module
from pdctl.hosts.agent import call
from tests.integration.conftest import BED_SIZE, MakeFleet
from tests.testbed.hosts import Testbed
from tests.testbed.sshd import Sshd, fingerprint, free_port, make_key, public_key

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 30

needs_sshd = pytest.mark.sshd
needs_bed = pytest.mark.root


@contextlib.contextmanager
def server(handle) -> Iterator[int]:
    """A TCP server that hands every connection to a function; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            taken.append(connection)
            handle(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
        for connection in taken:
            connection.close()


def is_gone(pid: int) -> bool:
    """Whether a process ends soon, if it has not."""
    for _ in range(250):
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.02)
    return False


def relay_command(port: int) -> str:
    """A ProxyCommand that connects to a port of loopback."""
    code = (
        "import os, socket, sys, threading\n"
        f"s = socket.create_connection(('127.0.0.1', {port}))\n"
        "def up():\n"
        "    while (d := os.read(0, 65536)): s.sendall(d)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while (d := s.recv(65536)): os.write(1, d)\n"
    )
    return shlex.join([sys.executable, "-c", f"exec({code!r})"])


# --- running commands -----------------------------------------------------------------------------------------------


@needs_sshd
class TestRun:
    def test_exit_status_and_both_outputs(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        result = host.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
        assert host.run(["no-such-program-at-all"], timeout_s=TIMEOUT_S).exit_code == 127
        assert host.run(["sh", "-c", "kill -9 $$"], timeout_s=TIMEOUT_S).exit_code < 0

    def test_argv_arrives_unchanged(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        words = ["a b", "", "$HOME", "`id`", "'", '"', "*", "\\", "new\nline", "-n", "ü"]
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        result = host.run(["printf", "%s\\0", *words], timeout_s=TIMEOUT_S)
        assert result.stdout.decode().split("\0")[:-1] == words

    def test_much_in_both_directions_at_once(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        data = os.urandom(1 << 20) * 20
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        result = host.run(["cat"], stdin=data, timeout_s=120)
        assert result.exit_code == 0
        assert result.stdout == data

    def test_input_that_nobody_reads_is_no_failure(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        result = host.run(["sh", "-c", "echo early"], stdin=b"x" * 8_000_000, timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stdout) == (0, b"early\n")

    def test_output_that_stays_open_is_not_waited_for(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        pid = tmp_path / "pid"
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        started = time.monotonic()
        result = host.run(["sh", "-c", f"sleep 60 & echo $! >{pid}; echo done"], timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stdout) == (0, b"done\n")
        assert time.monotonic() - started < TIMEOUT_S
        os.kill(int(pid.read_text()), signal.SIGKILL)

    def test_too_much_output_ends_the_command(
        self, sshd: Sshd, fleet_of: MakeFleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ssh_module, "OUTPUT_LIMIT_BYTES", 1 << 20)
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        with pytest.raises(HostError, match="more than 1 MiB"):
            host.run(["cat", "/dev/zero"], timeout_s=TIMEOUT_S)
        assert host.run(["true"], timeout_s=TIMEOUT_S).exit_code == 0

    @pytest.mark.parametrize("stdin", [b"", b"x" * 20_000_000], ids=["quiet", "not reading"])
    def test_a_command_that_takes_too_long(self, sshd: Sshd, fleet_of: MakeFleet, stdin: bytes) -> None:
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        host.run(["true"], timeout_s=TIMEOUT_S)
        started = time.monotonic()
        with pytest.raises(CommandTimeout, match=r"box: `sleep` did not end within 0\.5 s"):
            host.run(["sleep", "20"], stdin=stdin, timeout_s=0.5)
        assert time.monotonic() - started < 10
        # The connection is as good as before.
        assert host.run(["true"], timeout_s=TIMEOUT_S).exit_code == 0
        assert sshd.logins == 1

    def test_a_command_out_of_time_is_ended_on_the_host(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        with pytest.raises(CommandTimeout):
            host.run(["sh", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 60"], timeout_s=2)
        pid = int((tmp_path / "pid").read_text())
        ended = is_gone(pid)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        # sshd passes signals on to the processes of every login but root's.
        assert ended or os.geteuid() == 0

    def test_a_login_that_may_run_nothing(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.options = ["MaxSessions 0"]
        sshd.restart()
        with pytest.raises(HostError, match="refused to open a session") as caught:
            fleet_of(["box"], sshd.ssh_config).host("box").run(["true"], timeout_s=TIMEOUT_S)
        assert "MaxSessions" in caught.value.hint


# --- one connection -------------------------------------------------------------------------------------------------


@needs_sshd
class TestConnection:
    def run_many(self, host, count: int) -> list[object]:
        results: list[object] = [None] * count

        def one(number: int) -> None:
            try:
                results[number] = host.run(["echo", str(number)], timeout_s=60).stdout
            except PdctlError as error:
                results[number] = error

        threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        return results

    @pytest.mark.parametrize("limit", [10, 2, 1])
    def test_many_commands_share_one_connection(self, sshd: Sshd, fleet_of: MakeFleet, limit: int) -> None:
        sshd.options = [f"MaxSessions {limit}"]
        sshd.restart()
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        assert self.run_many(host, 12) == [b"%d\n" % number for number in range(12)]
        assert self.run_many(host, 3) == [b"%d\n" % number for number in range(3)]
        assert sshd.logins == 1

    def test_a_connection_that_died_idle_is_replaced(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        host.run(["true"], timeout_s=TIMEOUT_S)
        assert sshd.drop_connections() > 0
        assert host.run(["echo", "again"], timeout_s=TIMEOUT_S).stdout == b"again\n"
        assert sshd.logins == 2

    def test_a_command_is_not_run_again_when_the_connection_breaks(
        self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path
    ) -> None:
        marks = tmp_path / "marks"
        host = fleet_of(["box"], sshd.ssh_config).host("box")

        def drop_when_it_runs() -> None:
            while not marks.exists():
                time.sleep(0.02)
            sshd.drop_connections()

        dropper = threading.Thread(target=drop_when_it_runs, daemon=True)
        dropper.start()
        with pytest.raises(HostUnreachable, match=r"lost while `sh` ran.*unknown"):
            host.run(["sh", "-c", f"echo ran >>{marks}; sleep 3"], timeout_s=TIMEOUT_S)
        dropper.join(5)
        assert marks.read_text() == "ran\n"
        assert host.run(["true"], timeout_s=TIMEOUT_S).exit_code == 0

    def test_closing_ends_what_runs(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        fleet = fleet_of(["box"], sshd.ssh_config)
        host = fleet.host("box")
        host.run(["true"], timeout_s=TIMEOUT_S)
        threading.Timer(0.3, fleet.close).start()
        started = time.monotonic()
        with pytest.raises(HostError, match="was closed while"):
            host.run(["sleep", "20"], timeout_s=TIMEOUT_S)
        assert time.monotonic() - started < 10
        with pytest.raises(HostError, match="was closed"):
            host.run(["true"], timeout_s=TIMEOUT_S)


# --- host keys ------------------------------------------------------------------------------------------------------


@needs_sshd
class TestHostKeys:
    def refused(self, fleet_of: MakeFleet, sshd: Sshd, **settings: object) -> HostKeyRejected:
        with pytest.raises(HostKeyRejected) as caught:
            fleet_of(["box"], sshd.ssh_config, **settings).host("box").run(["true"], timeout_s=TIMEOUT_S)
        assert sshd.logins == 0
        return caught.value

    def accepted(self, fleet_of: MakeFleet, sshd: Sshd, **settings: object) -> None:
        result = fleet_of(["box"], sshd.ssh_config, **settings).host("box").run(["true"], timeout_s=TIMEOUT_S)
        assert result.exit_code == 0

    def test_unknown(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.known_hosts.unlink()
        # An invitation that ssh would follow.
        sshd.client_options = ["StrictHostKeyChecking no"]
        error = self.refused(fleet_of, sshd)
        assert fingerprint(sshd.host_keys[0]) in error.message
        assert f"`ssh-keyscan -p {sshd.port} -t ed25519 127.0.0.1 >> {sshd.known_hosts}`" in error.hint
        assert f"ssh -F {sshd.folder}/ssh_config -p {sshd.port} box" in error.hint
        assert not sshd.known_hosts.exists()

    def test_the_advice_for_an_unknown_key_works(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.known_hosts.unlink()
        command = re.search(r"`(ssh-keyscan [^`]*)`", self.refused(fleet_of, sshd).hint)
        assert command is not None
        subprocess.run(["sh", "-c", command[1]], check=True, timeout=30, stderr=subprocess.DEVNULL)
        self.accepted(fleet_of, sshd)

    def test_changed(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        other = make_key(tmp_path / "other")
        sshd.record(other)
        sshd.known_hosts.write_text("# a comment\n\n" + sshd.known_hosts.read_text())
        error = self.refused(fleet_of, sshd)
        assert "THE HOST KEY HAS CHANGED" in error.message
        assert f"{sshd.known_hosts}:3" in error.message
        assert fingerprint(other) in error.message
        assert fingerprint(sshd.host_keys[0]) in error.message

    def test_the_advice_for_a_changed_key_works(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        sshd.record(make_key(tmp_path / "other"))
        command = re.search(r"`(ssh-keygen -R [^`]*)`", self.refused(fleet_of, sshd).hint)
        assert command is not None
        subprocess.run(["sh", "-c", command[1]], check=True, timeout=30, capture_output=True)
        assert "unknown" in self.refused(fleet_of, sshd).message

    def test_revoked(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        line = sshd.known_hosts.read_text()
        sshd.known_hosts.write_text(line + f"@revoked * {public_key(sshd.host_keys[0])}\n")
        assert "REVOKED" in self.refused(fleet_of, sshd, accept_new_keys=True).message

    def test_certificate_authorities_are_not_used(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.known_hosts.write_text(f"@cert-authority * {public_key(sshd.host_keys[0])}\n")
        assert f"@cert-authority of {sshd.known_hosts}:1" in self.refused(fleet_of, sshd).message

    def test_hashed_names(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        subprocess.run(
            ["ssh-keygen", "-q", "-H", "-f", str(sshd.known_hosts)], check=True, timeout=30, capture_output=True
        )
        assert sshd.known_hosts.read_text().startswith("|1|")
        self.accepted(fleet_of, sshd)

    def test_a_second_file_and_an_alias(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        second = tmp_path / "second file"
        second.write_text(f"the-box {public_key(sshd.host_keys[0])}\n")
        sshd.known_hosts.unlink()
        sshd.client_options = [f'UserKnownHostsFile {sshd.known_hosts} "{second}"', "HostKeyAlias the-box"]
        self.accepted(fleet_of, sshd)

    @pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
    def test_the_recorded_kind_of_key_is_asked_for(
        self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path, kind: str
    ) -> None:
        sshd.host_keys = [make_key(tmp_path / f"host_{name}", name) for name in ("rsa", "ecdsa", "ed25519")]
        sshd.restart()
        sshd.record(next(key for key in sshd.host_keys if key.name.endswith(kind)))
        self.accepted(fleet_of, sshd)

    def test_another_kind_than_the_recorded_one_is_refused(
        self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path
    ) -> None:
        sshd.host_keys = [make_key(tmp_path / "host_rsa", "rsa")]
        sshd.restart()
        error = self.refused(fleet_of, sshd, accept_new_keys=True)
        assert "NOT THE RECORDED ONE" in error.message
        assert f"{sshd.known_hosts}:1" in error.message

    @pytest.mark.parametrize("hashed", ["yes", "no"])
    def test_accept_new_records_once_and_refuses_a_change(
        self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path, hashed: str
    ) -> None:
        file = tmp_path / "new folder" / "known_hosts"
        sshd.client_options = [f'UserKnownHostsFile "{file}"', f"HashKnownHosts {hashed}"]
        self.accepted(fleet_of, sshd, accept_new_keys=True)
        recorded = file.read_text()
        assert public_key(sshd.host_keys[0]) in recorded
        assert ("127.0.0.1" in recorded) == (hashed == "no")
        assert file.stat().st_mode & 0o777 == 0o600
        self.accepted(fleet_of, sshd, accept_new_keys=True)
        self.accepted(fleet_of, sshd)
        assert file.read_text() == recorded
        # ssh itself is content with what was written.
        subprocess.run(
            ["ssh", "-F", str(sshd.ssh_config), "-o", "StrictHostKeyChecking=yes", "box", "true"],
            check=True,
            timeout=30,
            capture_output=True,
        )
        sshd.host_keys = [make_key(tmp_path / "new_key")]
        sshd.restart()
        with pytest.raises(HostKeyRejected, match="HAS CHANGED"):
            fleet_of(["box"], sshd.ssh_config, accept_new_keys=True).host("box").run(["true"], timeout_s=TIMEOUT_S)
        assert file.read_text() == recorded


# --- login ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def agent(tmp_path: Path, fleet_of: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real agent, found as usual; yields its socket."""
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    try:
        for _ in range(500):
            if path.exists():
                break
            time.sleep(0.02)
        yield path
    finally:
        process.terminate()
        process.wait(10)


def add_to_agent(file: Path) -> None:
    subprocess.run(["ssh-add", "-q", str(file)], check=True, timeout=20, capture_output=True)


def encrypt(file: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(file)], check=True, timeout=20)


@needs_sshd
class TestLogin:
    def failed(self, fleet_of: MakeFleet, sshd: Sshd, **settings: object) -> LoginFailed:
        with pytest.raises(LoginFailed) as caught:
            fleet_of(["box"], sshd.ssh_config, **settings).host("box").run(["true"], timeout_s=TIMEOUT_S)
        return caught.value

    def succeeds(self, fleet_of: MakeFleet, sshd: Sshd, **settings: object) -> None:
        result = fleet_of(["box"], sshd.ssh_config, **settings).host("box").run(["true"], timeout_s=TIMEOUT_S)
        assert result.exit_code == 0

    def test_a_wrong_key(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        sshd.identity = make_key(tmp_path / "wrong")
        error = self.failed(fleet_of, sshd)
        assert f"the login as {sshd.user} was refused; offered: {sshd.identity}" in error.message
        assert "authorized_keys" in error.hint

    def test_no_key_at_all(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        sshd.identity = tmp_path / "missing"
        error = self.failed(fleet_of, sshd)
        assert f"{sshd.identity} does not exist" in error.message
        assert "there is no agent" in error.message or "IdentityFile" in error.hint

    def test_a_key_with_a_passphrase_needs_an_agent(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        encrypt(sshd.identity)
        error = self.failed(fleet_of, sshd)
        assert f"{sshd.identity} has a passphrase" in error.message
        assert f"`ssh-add {sshd.identity}`" in error.hint

    def test_a_key_with_a_passphrase_in_the_agent(self, sshd: Sshd, fleet_of: MakeFleet, agent: Path) -> None:
        add_to_agent(sshd.identity)
        encrypt(sshd.identity)
        Path(f"{sshd.identity}.pub").unlink()
        self.succeeds(fleet_of, sshd)

    def test_only_the_named_key_of_a_full_agent_is_offered(
        self, sshd: Sshd, fleet_of: MakeFleet, agent: Path, tmp_path: Path
    ) -> None:
        for number in range(8):
            add_to_agent(make_key(tmp_path / f"other{number}"))
        add_to_agent(sshd.identity)
        encrypt(sshd.identity)
        # Without IdentitiesOnly, too: the named key comes first.
        sshd.client_options = ["IdentitiesOnly no"]
        self.succeeds(fleet_of, sshd)

    def test_a_server_that_hangs_up_after_too_many_keys(
        self, sshd: Sshd, fleet_of: MakeFleet, agent: Path, tmp_path: Path
    ) -> None:
        for number in range(8):
            add_to_agent(make_key(tmp_path / f"other{number}"))
        sshd.identity = make_key(tmp_path / "wrong")
        sshd.client_options = ["IdentitiesOnly no"]
        assert "MaxAuthTries" in self.failed(fleet_of, sshd).hint

    def test_a_certificate_beside_the_key(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        authority = make_key(tmp_path / "authority")
        subprocess.run(
            ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", sshd.user, f"{sshd.identity}.pub"],
            check=True,
            timeout=20,
        )
        (sshd.folder / "authorized_keys").write_text(f"cert-authority {public_key(authority)}\n")
        self.succeeds(fleet_of, sshd)

    @pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
    def test_kinds_of_keys(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path, kind: str) -> None:
        sshd.identity = make_key(tmp_path / "other", kind)
        (sshd.folder / "authorized_keys").write_text(public_key(sshd.identity) + "\n")
        self.succeeds(fleet_of, sshd)

    def test_a_key_that_others_can_read_is_ignored(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.identity.chmod(0o644)
        error = self.failed(fleet_of, sshd)
        assert "mode 0644" in error.message
        assert f"`chmod 600 {sshd.identity}`" in error.hint

    def test_the_cluster_file_wins_over_the_configuration(
        self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path
    ) -> None:
        right, user, port = sshd.identity, sshd.user, sshd.port
        sshd.identity, sshd.user, sshd.port = make_key(tmp_path / "wrong"), "nobody", free_port()
        config = sshd.ssh_config
        host = fleet_of(["box"], config, identity_file=str(right), user=user, port=port).host("box")
        assert host.run(["true"], timeout_s=TIMEOUT_S).exit_code == 0

    def test_no_key_is_taken(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.options = ["PubkeyAuthentication no", "PasswordAuthentication yes"]
        sshd.restart()
        assert "takes no keys" in self.failed(fleet_of, sshd).message


# --- not reached ----------------------------------------------------------------------------------------------------


@needs_sshd
class TestUnreachable:
    def fails(self, fleet_of: MakeFleet, sshd: Sshd, **settings: object) -> HostUnreachable:
        started = time.monotonic()
        with pytest.raises(HostUnreachable) as caught:
            fleet_of(["box"], sshd.ssh_config, **settings).host("box").run(["true"], timeout_s=TIMEOUT_S)
        assert time.monotonic() - started < 12
        return caught.value

    def test_nothing_listens(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.port = free_port()
        error = self.fails(fleet_of, sshd)
        assert f"port {sshd.port} of 127.0.0.1 refuses connections" in error.message
        assert error.host == "box"

    def test_a_name_without_address(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.client_options = ["Host box", "HostName box.invalid"]
        assert "box.invalid" in self.fails(fleet_of, sshd, connect_timeout_s=5.0).message

    def test_a_server_that_says_nothing(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        with server(lambda connection: None) as port:
            sshd.port = port
            assert "sent no SSH greeting within 1 s" in self.fails(fleet_of, sshd, connect_timeout_s=1.0).message

    def test_a_server_that_greets_and_hangs(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        with server(lambda connection: connection.sendall(b"SSH-2.0-Hanging_1\r\n")) as port:
            sshd.port = port
            message = self.fails(fleet_of, sshd, connect_timeout_s=1.0).message
        assert "key exchange" in message
        assert "Hanging_1" in message

    def test_a_server_that_hangs_up(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        with server(lambda connection: connection.close()) as port:
            sshd.port = port
            assert "closed it without an SSH greeting" in self.fails(fleet_of, sshd).message

    def test_something_that_is_no_ssh_server(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        with server(lambda connection: connection.sendall(b"220 mail\r\n" * 101)) as port:
            sshd.port = port
            assert "is no SSH server" in self.fails(fleet_of, sshd).message

    def test_a_server_from_another_time(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.options = ["KexAlgorithms diffie-hellman-group1-sha1"]
        sshd.restart()
        assert "no algorithm in common" in self.fails(fleet_of, sshd).message

    def test_a_stopped_server_under_a_command(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        """A peer that is there and answers nothing at all, on a connection that worked."""
        host = fleet_of(["box"], sshd.ssh_config, connect_timeout_s=1.0).host("box")
        host.run(["true"], timeout_s=TIMEOUT_S)
        stopped = [
            int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and self.serves(entry, sshd)
        ]
        assert stopped
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(HostError):
                host.run(["true"], timeout_s=2)
            assert time.monotonic() - started < 15
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert host.run(["true"], timeout_s=TIMEOUT_S).exit_code == 0

    def serves(self, process: Path, sshd: Sshd) -> bool:
        """Whether a process is the server or serves one of its connections."""
        try:
            if not (process / "comm").read_text().startswith("sshd"):
                return False
            pid = int(process.name)
            for _ in range(3):
                if pid == sshd.pid:
                    return True
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
        return False


@needs_sshd
class TestProxyCommand:
    def test_leads_to_the_host(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.client_options = ["Host box", f"ProxyCommand {relay_command(sshd.port)}", "HostName somewhere.invalid"]
        sshd.known_hosts.write_text(f"[somewhere.invalid]:{sshd.port} {public_key(sshd.host_keys[0])}\n")
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        data = os.urandom(3_000_000)
        assert host.run(["cat"], stdin=data, timeout_s=60).stdout == data

    def test_one_that_fails_is_quoted(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.client_options = ["Host box", "ProxyCommand echo the bastion is closed >&2; exit 1"]
        with pytest.raises(HostUnreachable, match="ProxyCommand failed: the bastion is closed"):
            fleet_of(["box"], sshd.ssh_config).host("box").run(["true"], timeout_s=TIMEOUT_S)

    def test_one_that_hangs_is_ended(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        pid = tmp_path / "pid"
        sshd.client_options = ["Host box", f"ProxyCommand sh -c 'echo $$ >{pid}; exec sleep 300'"]
        with pytest.raises(HostUnreachable, match="no SSH greeting within 1 s"):
            fleet_of(["box"], sshd.ssh_config, connect_timeout_s=1.0).host("box").run(["true"], timeout_s=TIMEOUT_S)
        assert is_gone(int(pid.read_text()))


# --- forwarding -----------------------------------------------------------------------------------------------------


@needs_sshd
class TestForward:
    def test_http_by_way_of_the_host(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        body = os.urandom(2_000_000)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        try:
            host = fleet_of(["box"], sshd.ssh_config).host("box")
            with host.forward("127.0.0.1", web.server_address[1]) as port:
                assert port != web.server_address[1]
                for _ in range(3):
                    assert self.get(port) == body
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=5)
        finally:
            web.shutdown()
            web.server_close()

    def get(self, port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stream:
            stream.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: stream.recv(65536), b""))
        return answer.partition(b"\r\n\r\n")[2]

    def test_nothing_listens_there(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        with (
            host.forward("127.0.0.1", free_port()) as port,
            socket.create_connection(("127.0.0.1", port), timeout=20) as stream,
        ):
            stream.settimeout(20)
            assert stream.recv(1) == b""

    def test_a_host_that_cannot_be_reached(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.port = free_port()
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        with pytest.raises(HostUnreachable), host.forward("127.0.0.1", 1):
            pytest.fail("not reached")


# --- the node agent -------------------------------------------------------------------------------------------------


@needs_sshd
class TestAgent:
    def test_a_call(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        reply = call(host, "status", {"cluster": "no-such", "instances": []}, timeout_s=TIMEOUT_S)
        assert reply["instances"] == {}

    def test_an_error_of_the_agent(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        with pytest.raises(NodeError, match="box: unknown command 'dance'") as caught:
            call(fleet_of(["box"], sshd.ssh_config).host("box"), "dance", {}, timeout_s=TIMEOUT_S)
        assert caught.value.code == "bad-request"

    def test_a_login_shell_that_talks(self, sshd: Sshd, fleet_of: MakeFleet, tmp_path: Path) -> None:
        shell = tmp_path / "shell"
        shell.write_text('#!/bin/sh\nprintf "Welcome!\\nPDCTL-AGENT"\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n')
        shell.chmod(0o755)
        sshd.options = [f"ForceCommand {shell}"]
        sshd.restart()
        host = fleet_of(["box"], sshd.ssh_config).host("box")
        assert call(host, "status", {"cluster": "no-such", "instances": []}, timeout_s=TIMEOUT_S)["instances"] == {}

    def test_a_login_that_is_disabled(self, sshd: Sshd, fleet_of: MakeFleet) -> None:
        sshd.options = ["ForceCommand echo This account is currently not available.; exit 1"]
        sshd.restart()
        with pytest.raises(NodeError, match="This account is currently not available") as caught:
            call(fleet_of(["box"], sshd.ssh_config).host("box"), "status", {}, timeout_s=TIMEOUT_S)
        assert caught.value.code == "bad-reply"


# --- many hosts -----------------------------------------------------------------------------------------------------


@needs_bed
class TestBed:
    def test_one_dead_host_of_many(self, bed: Testbed, fleet_of: MakeFleet) -> None:
        names = bed.names(BED_SIZE)
        dead = names[3]
        bed.call("cut", "root", dead)
        told: list[str] = []
        started = time.monotonic()
        results = fleet_of(names, bed.ssh_config, connect_timeout_s=3.0).map(
            lambda host: host.run(["hostname"], timeout_s=60).stdout.decode().strip(),
            names,
            timeout_s=90,
            on_done=lambda name, _: told.append(name),
        )
        assert time.monotonic() - started < 60
        assert list(results) == names
        failure = results.pop(dead)
        assert results == {name: name for name in names if name != dead}
        assert isinstance(failure, HostUnreachable)
        assert f"{dead}: port 22 of {bed.address(4)} did not answer within 3 s" in str(failure)
        assert sorted(told) == sorted(names)

    def test_a_host_that_is_off_and_comes_back(self, bed: Testbed, fleet_of: MakeFleet) -> None:
        name = bed.name(1)
        host = fleet_of([name], bed.ssh_config, connect_timeout_s=3.0).host(name)
        host.run(["true"], timeout_s=TIMEOUT_S)
        bed.call("off", name)
        with pytest.raises(HostUnreachable):
            host.run(["true"], timeout_s=TIMEOUT_S)
        bed.up(BED_SIZE)
        assert host.run(["hostname"], timeout_s=TIMEOUT_S).stdout.decode() == f"{name}\n"

    def test_a_host_that_vanishes_silently_under_an_idle_connection(self, bed: Testbed, fleet_of: MakeFleet) -> None:
        name = bed.name(1)
        host = fleet_of([name], bed.ssh_config, connect_timeout_s=2.0).host(name)
        host.run(["true"], timeout_s=TIMEOUT_S)
        bed.call("cut", "root", name)
        started = time.monotonic()
        with pytest.raises(HostUnreachable, match="did not answer within 2 s"):
            host.run(["true"], timeout_s=20)
        assert time.monotonic() - started < 18
        bed.call("heal", "root", name)
        assert host.run(["true"], timeout_s=TIMEOUT_S).exit_code == 0

    def logins(self, bed: Testbed, name: str) -> int:
        return (bed.folder / name / "sshd.log").read_text().count("Accepted publickey")

    def jump_config(self, bed: Testbed, tmp_path: Path, *lines: str) -> Path:
        config = tmp_path / "config"
        config.write_text("\n".join([*lines, "Match all", f"Include {bed.ssh_config}"]) + "\n")
        return config

    def test_hosts_behind_one_jump_host(self, bed: Testbed, fleet_of: MakeFleet, tmp_path: Path) -> None:
        jump, *others = bed.names(BED_SIZE)
        for name in others:
            bed.call("cut", "root", name)
        config = self.jump_config(bed, tmp_path, f"Host * !{jump}", f"ProxyJump {jump}")
        before = self.logins(bed, jump)
        results = fleet_of([jump, *others], config).map(
            lambda host: host.run(["hostname"], timeout_s=60).stdout.decode().strip(), others, timeout_s=90
        )
        assert results == {name: name for name in others}
        assert self.logins(bed, jump) == before + 1

    def test_a_chain_of_jump_hosts_is_visited_in_order(self, bed: Testbed, fleet_of: MakeFleet, tmp_path: Path) -> None:
        first, second, target = bed.names(3)
        bed.call("cut", "root", second)
        bed.call("cut", "root", target)
        bed.call("cut", first, target)
        try:
            config = self.jump_config(bed, tmp_path, f"Host {target}", f"ProxyJump {first},{second}")
            host = fleet_of([target], config).host(target)
            assert host.run(["hostname"], timeout_s=TIMEOUT_S).stdout.decode() == f"{target}\n"
        finally:
            bed.call("heal", first, target)

    def test_a_jump_host_with_an_unknown_key_is_refused(
        self, bed: Testbed, fleet_of: MakeFleet, tmp_path: Path
    ) -> None:
        jump, target = bed.names(2)
        known = tmp_path / "known_hosts"
        lines = bed.known_hosts.read_text().splitlines(keepends=True)
        known.write_text("".join(line for line in lines if not line.startswith(f"{jump},")))
        config = self.jump_config(
            bed, tmp_path, f"Host {target}", f"ProxyJump {jump}", "Host *", f"UserKnownHostsFile {known}"
        )
        before = self.logins(bed, target)
        with pytest.raises(HostKeyRejected, match=f"^{target}: jump host {jump}: its host key is unknown"):
            fleet_of([target], config).host(target).run(["true"], timeout_s=TIMEOUT_S)
        assert self.logins(bed, target) == before

    def test_a_jump_host_that_cannot_reach_the_host(self, bed: Testbed, fleet_of: MakeFleet, tmp_path: Path) -> None:
        jump, target = bed.names(2)
        config = self.jump_config(bed, tmp_path, f"Host {target}", f"ProxyJump {jump}", "Port 2")
        with pytest.raises(HostUnreachable, match=f"jump host {jump} cannot connect to port 2 of"):
            fleet_of([target], config).host(target).run(["true"], timeout_s=TIMEOUT_S)


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


def test_interrupting_a_fan_out_ends_at_once(tmp_path: Path) -> None:
    """Also with a thread that hangs for good, and a local command that would go on."""
    pid = tmp_path / "pid"
    program = textwrap.dedent(
        f"""
        import threading
        from pdctl.hosts.base import FleetSettings, Login
        from pdctl.hosts.fleet import Fleet

        def work(host):
            if host.name == "local":
                host.run(["sh", "-c", "echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 300"], timeout_s=300)
            threading.Event().wait()

        with Fleet(FleetSettings({{"local": Login(), "localhost": Login()}})) as fleet:
            fleet.map(work, ["local", "localhost"], timeout_s=300)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        for _ in range(1500):
            if pid.exists():
                break
            time.sleep(0.02)
        started = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - started < 10
        assert process.returncode != 0
        assert b"KeyboardInterrupt" in errors
        assert is_gone(int(pid.read_text()))
    finally:
        process.kill()
        process.wait()


@needs_sshd
def test_interrupting_a_fan_out_over_ssh(sshd: Sshd, fleet_of: MakeFleet) -> None:
    program = textwrap.dedent(
        f"""
        from pdctl.hosts.base import FleetSettings, Login, SshSettings
        from pdctl.hosts.fleet import Fleet

        def work(host):
            host.run(["true"], timeout_s=60)
            print("connected", flush=True)
            host.run(["sleep", "30"], timeout_s=60)

        ssh = SshSettings(config_file={str(sshd.ssh_config)!r})
        with Fleet(FleetSettings({{"box": Login()}}, ssh)) as fleet:
            fleet.map(work, ["box"], timeout_s=300)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert b"KeyboardInterrupt" in errors
    finally:
        process.kill()
        process.wait()
