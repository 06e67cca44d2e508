"""Commands over SSH that are talked to while they run, against a real server."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from pdctl.errors import CommandTimeout, HostError, HostUnreachable
from pdctl.hosts.conversation import talk
from pdctl.hosts.ssh import SshHost
from tests.integration.conftest import MakeFleet
from tests.testbed.hosts import Testbed
from tests.testbed.sshd import Sshd

TIMEOUT_S = 30
LIFETIME_S = 60


def is_gone(pid: int) -> bool:
    """Whether a process ends soon, if it has not."""
    for _ in range(250):
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def box(sshd: Sshd, fleet_of: MakeFleet) -> SshHost:
    host = fleet_of(["box"], sshd.ssh_config).host("box")
    assert isinstance(host, SshHost)
    return host


@pytest.mark.sshd
class TestStreams:
    def test_it_is_talked_to(self, box: SshHost) -> None:
        with box.open(["sh", "-c", "while read a; do echo got $a; done; echo bye >&2"], timeout_s=LIFETIME_S) as stream:
            for word in (b"one", b"two"):
                stream.write(word + b"\n", timeout_s=TIMEOUT_S)
                assert stream.read_line(timeout_s=TIMEOUT_S) == b"got " + word

    def test_its_end_is_known(self, box: SshHost) -> None:
        command = ["sh", "-c", "echo out; printf rest; echo err >&2; exit 3"]
        with box.open(command, timeout_s=LIFETIME_S) as stream:
            assert [stream.read_line(timeout_s=TIMEOUT_S) for _ in range(3)] == [b"out", b"rest", None]
            result = stream.wait(timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stderr) == (3, b"err\n")
        assert result.argv == tuple(command)

    def test_much_is_written_while_it_is_read(self, box: SshHost) -> None:
        lines = [b"%d" % number * 2000 for number in range(2000)]
        with box.open(["cat"], timeout_s=LIFETIME_S) as stream:
            whole = b"\n".join([*lines, b""])
            writer = threading.Thread(target=lambda: stream.write(whole, timeout_s=TIMEOUT_S))
            writer.start()
            assert [stream.read_line(timeout_s=TIMEOUT_S) for _ in lines] == lines
            writer.join(TIMEOUT_S)

    def test_time_outs(self, box: SshHost) -> None:
        with box.open(["sleep", "60"], timeout_s=LIFETIME_S) as stream:
            with pytest.raises(CommandTimeout, match=r"box: `sleep` said nothing for 0\.05 s"):
                stream.read_line(timeout_s=0.05)
            with pytest.raises(CommandTimeout, match="said nothing"):
                stream.wait(timeout_s=0.05)
            with pytest.raises(CommandTimeout):
                stream.write(b"x" * 20_000_000, timeout_s=0.3)

    def test_its_lifetime_ends_it(self, box: SshHost) -> None:
        with (
            box.open(["sleep", "60"], timeout_s=0.5) as stream,
            pytest.raises(CommandTimeout, match=r"`sleep` did not end within 0\.5 s"),
        ):
            stream.read_line(timeout_s=TIMEOUT_S)

    def test_closing_ends_it_and_wakes_the_reader(self, box: SshHost) -> None:
        # One that reads: sshd passes signals on to the processes of every login but root's.
        stream = box.open(["sh", "-c", "echo $$; exec cat"], timeout_s=LIFETIME_S)
        pid = int(stream.read_line(timeout_s=TIMEOUT_S) or b"")
        waiting: list[object] = []
        reader = threading.Thread(target=lambda: waiting.append(stream.read_line(timeout_s=TIMEOUT_S)))
        reader.start()
        stream.close()
        stream.close()
        reader.join(TIMEOUT_S)
        assert waiting == [None]
        assert is_gone(pid)

    def test_its_sessions_are_given_back(self, box: SshHost) -> None:
        for _ in range(20):
            with box.open(["cat"], timeout_s=LIFETIME_S) as stream:
                stream.write(b"a\n", timeout_s=TIMEOUT_S)
                assert stream.read_line(timeout_s=TIMEOUT_S) == b"a"
        assert box.run(["true"], timeout_s=TIMEOUT_S).exit_code == 0

    def test_closing_the_host_ends_it(self, box: SshHost) -> None:
        stream = box.open(["sh", "-c", "echo $$; cat"], timeout_s=LIFETIME_S)
        pid = int(stream.read_line(timeout_s=TIMEOUT_S) or b"")
        box.close()
        with pytest.raises(HostError, match="its connection was closed"):
            stream.read_line(timeout_s=TIMEOUT_S)
        stream.close()
        assert is_gone(pid)

    def test_the_server_goes_away(self, box: SshHost, sshd: Sshd) -> None:
        with box.open(["cat"], timeout_s=LIFETIME_S) as stream:
            stream.write(b"a\n", timeout_s=TIMEOUT_S)
            assert stream.read_line(timeout_s=TIMEOUT_S) == b"a"
            sshd.stop()
            with pytest.raises(HostUnreachable, match="the connection was lost while `cat` ran"):
                stream.read_line(timeout_s=TIMEOUT_S)

    def test_no_such_program(self, box: SshHost) -> None:
        with box.open(["/no/such/program"], timeout_s=LIFETIME_S) as stream:
            assert stream.read_line(timeout_s=TIMEOUT_S) is None
            assert stream.wait(timeout_s=TIMEOUT_S).exit_code == 127

    def test_a_script(self, box: SshHost) -> None:
        source = (
            b"import sys\ndef main(stream):\n    for line in stream: print('X ' + line.decode(), end='', flush=True)\n"
        )
        with talk(
            box,
            source,
            prefix=b"X ",
            what="the script",
            lifetime_s=LIFETIME_S,
            send_timeout_s=TIMEOUT_S,
            pythons=(sys.executable,),
        ) as conversation:
            for number in range(3):
                assert conversation.ask({"number": number}, timeout_s=TIMEOUT_S) == {"number": number}


@pytest.mark.root
def test_a_link_that_is_cut_is_noticed_in_time(bed: Testbed, fleet_of: MakeFleet) -> None:
    name = bed.name(1)
    host = fleet_of([name], bed.ssh_config).host(name)
    with host.open(["cat"], timeout_s=3) as stream:
        stream.write(b"a\n", timeout_s=TIMEOUT_S)
        assert stream.read_line(timeout_s=TIMEOUT_S) == b"a"
        bed.call("cut", "root", name)
        started = time.monotonic()
        with pytest.raises(CommandTimeout):
            stream.read_line(timeout_s=TIMEOUT_S)
    assert time.monotonic() - started < 20
