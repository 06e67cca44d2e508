"""Commands that are talked to while they run, on this machine, and the lines they speak in."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.errors import CommandTimeout, HostError, NodeError
from pdctl.hosts import line_buffer
from pdctl.hosts.conversation import talk
from pdctl.hosts.line_buffer import LineBuffer, LineTooLong, Tail
from pdctl.hosts.local import LocalHost

TIMEOUT_S = 20


def is_gone(pid: int) -> bool:
    """Whether a process ends soon, if it has not."""
    for _ in range(250):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


class TestLines:
    @given(st.lists(st.binary(max_size=9)), st.integers(1, 5))
    def test_however_they_are_cut(self, lines: list[bytes], size: int) -> None:
        lines = [line.replace(b"\n", b"") for line in lines]
        whole = b"".join(line + b"\n" for line in lines) + b"end"
        buffer, found = LineBuffer(), []
        for start in range(0, len(whole), size):
            buffer.feed(whole[start : start + size])
            while (line := buffer.take()) is not None:
                found.append(line)
        assert found == lines
        assert (buffer.rest(), buffer.rest()) == (b"end", None)

    def test_one_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(line_buffer, "LINE_LIMIT_BYTES", 100)
        buffer = LineBuffer()
        buffer.feed(b"x" * 101)
        with pytest.raises(LineTooLong):
            buffer.take()

    @given(st.lists(st.binary(max_size=40)), st.integers(1, 50))
    def test_a_tail(self, pieces: list[bytes], kept: int) -> None:
        tail = Tail(kept)
        for piece in pieces:
            tail.feed(piece)
        assert bytes(tail) == b"".join(pieces)[-kept:]


class TestLocal:
    def test_it_is_talked_to(self) -> None:
        with LocalHost().open(["sh", "-c", "while read a; do echo got $a; done; echo bye >&2"], timeout_s=60) as stream:
            for word in (b"one", b"two"):
                stream.write(word + b"\n", timeout_s=TIMEOUT_S)
                assert stream.read_line(timeout_s=TIMEOUT_S) == b"got " + word

    def test_its_end_is_known(self) -> None:
        with LocalHost().open(["sh", "-c", "echo out; printf rest; echo err >&2; exit 3"], timeout_s=60) as stream:
            assert [stream.read_line(timeout_s=TIMEOUT_S) for _ in range(3)] == [b"out", b"rest", None]
            result = stream.wait(timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stderr) == (3, b"err\n")

    def test_much_is_written_while_it_is_read(self) -> None:
        with LocalHost().open(["cat"], timeout_s=60) as stream:
            lines = [b"%d" % number * 1000 for number in range(500)]
            writer = threading.Thread(target=lambda: stream.write(b"\n".join([*lines, b""]), timeout_s=TIMEOUT_S))
            writer.start()
            assert [stream.read_line(timeout_s=TIMEOUT_S) for _ in lines] == lines
            writer.join(TIMEOUT_S)

    def test_one_that_does_not_read(self) -> None:
        with (
            LocalHost().open(["sleep", "60"], timeout_s=60) as stream,
            pytest.raises(CommandTimeout, match="its input"),
        ):
            stream.write(b"x" * 1_000_000, timeout_s=0.1)

    def test_a_quiet_one_can_be_read_again(self) -> None:
        with LocalHost().open(["sh", "-c", "read a; echo $a"], timeout_s=60) as stream:
            with pytest.raises(CommandTimeout, match=r"said nothing for 0\.05 s"):
                stream.read_line(timeout_s=0.05)
            stream.write(b"now\n", timeout_s=TIMEOUT_S)
            assert stream.read_line(timeout_s=TIMEOUT_S) == b"now"

    def test_closing_ends_it_and_what_it_started(self) -> None:
        stream = LocalHost().open(["sh", "-c", "sleep 60 & echo $!; wait"], timeout_s=60)
        pid = int(stream.read_line(timeout_s=TIMEOUT_S) or b"")
        waiting: list[object] = []
        reader = threading.Thread(target=lambda: waiting.append(stream.read_line(timeout_s=TIMEOUT_S)))
        reader.start()
        stream.close()
        stream.close()
        reader.join(TIMEOUT_S)
        assert waiting == [None]
        assert is_gone(pid)

    def test_closing_the_host_ends_it(self) -> None:
        host = LocalHost()
        stream = host.open(["sh", "-c", "echo $$; exec sleep 60"], timeout_s=60)
        pid = int(stream.read_line(timeout_s=TIMEOUT_S) or b"")
        host.close()
        assert is_gone(pid)
        with pytest.raises(HostError, match="closed"):
            host.open(["true"], timeout_s=1)

    def test_its_lifetime_ends_it_though_nobody_talks_to_it(self) -> None:
        stream = LocalHost().open(["sh", "-c", "echo $$; exec sleep 60"], timeout_s=0.5)
        pid = int(stream.read_line(timeout_s=TIMEOUT_S) or b"")
        assert is_gone(pid)
        assert stream.wait(timeout_s=TIMEOUT_S).exit_code == -signal.SIGKILL
        stream.close()

    def test_a_program_that_is_not_there(self) -> None:
        with LocalHost().open(["/no/such/program"], timeout_s=60) as stream:
            assert stream.read_line(timeout_s=TIMEOUT_S) is None
            result = stream.wait(timeout_s=TIMEOUT_S)
        assert (result.exit_code, result.stderr) == (127, b"/no/such/program: No such file or directory\n")

    def test_one_that_leaves_a_process_with_its_output(self) -> None:
        with LocalHost().open(["sh", "-c", "sleep 60 & echo done"], timeout_s=60) as stream:
            assert stream.read_line(timeout_s=TIMEOUT_S) == b"done"
            assert stream.read_line(timeout_s=TIMEOUT_S) is None

    def test_a_line_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(line_buffer, "LINE_LIMIT_BYTES", 1000)
        with (
            LocalHost().open(["sh", "-c", "yes | tr -d '\\n'"], timeout_s=60) as stream,
            pytest.raises(HostError, match="wrote a line of more"),
        ):
            stream.read_line(timeout_s=TIMEOUT_S)


ECHO = b"""
import json, os, sys
def main(stream):
    print("noise of a login shell", end="")
    for line in iter(stream.readline, b""):
        message = json.loads(line)
        if "exit" in message:
            sys.exit(message["exit"])
        print("PRE " + message.get("raw", json.dumps({"got": message, "pid": os.getpid()})), flush=True)
"""


def talking():
    return talk(LocalHost(), ECHO, prefix=b"PRE ", what="the echo", lifetime_s=60, send_timeout_s=TIMEOUT_S)


class TestConversation:
    def test_messages_both_ways(self) -> None:
        with talking() as conversation:
            for number in range(3):
                answer = conversation.ask({"number": number}, timeout_s=TIMEOUT_S)
                assert answer["got"] == {"number": number}
            pid = answer["pid"]
        assert is_gone(pid)

    def test_it_ends_by_itself(self) -> None:
        with talking() as conversation:
            with pytest.raises(NodeError, match=r"local: the echo gave no answer \(exit status 7\)"):
                conversation.ask({"exit": 7}, timeout_s=TIMEOUT_S)
            # What is sent to nobody is no error, its end is.
            conversation.send({}, timeout_s=TIMEOUT_S)

    @pytest.mark.parametrize("raw", ["[1, 2]", "{half", ""])
    def test_nonsense(self, raw: str) -> None:
        with talking() as conversation, pytest.raises(NodeError, match="makes no sense") as caught:
            conversation.ask({"raw": raw}, timeout_s=TIMEOUT_S)
        assert caught.value.code == "bad-reply"

    def test_silence(self) -> None:
        with talking() as conversation:
            with pytest.raises(CommandTimeout, match=r"the echo said nothing for 0\.05 s"):
                conversation.receive(timeout_s=0.05)
            assert conversation.ask({}, timeout_s=TIMEOUT_S)["got"] == {}

    def test_its_source_does_not_compile(self) -> None:
        source = b"def main(stream:\n"
        with (
            talk(
                LocalHost(), source, prefix=b"PRE ", what="the echo", lifetime_s=60, send_timeout_s=TIMEOUT_S
            ) as conversation,
            pytest.raises(NodeError, match="SyntaxError"),
        ):
            conversation.receive(timeout_s=TIMEOUT_S)

    def test_no_python(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from pdctl.hosts import agent

        monkeypatch.setattr(agent, "_SYSTEM_PYTHONS", ("/no/such/python",))
        with (
            talk(
                LocalHost(),
                ECHO,
                prefix=b"PRE ",
                what="the echo",
                lifetime_s=60,
                send_timeout_s=TIMEOUT_S,
                pythons=("/nor/this",),
            ) as conversation,
            pytest.raises(NodeError) as caught,
        ):
            conversation.receive(timeout_s=TIMEOUT_S)
        assert caught.value.code == "no-python"
        assert "/no/such/python, /nor/this" in str(caught.value)
