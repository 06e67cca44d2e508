"""Calls of the node agent: what is sent, and what is made of the answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.errors import NodeError
from pdctl.hosts import agent
from pdctl.hosts.agent import agent_source, call, find_reply
from pdctl.hosts.base import CommandResult
from pdctl.hosts.local import LocalHost

OK = b'PDCTL-AGENT-1 {"ok": true, "result": {"a": 1}}\n'


class Recorder:
    """A host that answers everything with the same result."""

    name = "box"

    def __init__(self, stdout: bytes = OK, stderr: bytes = b"", exit_code: int = 0) -> None:
        self.answer = (exit_code, stdout, stderr)
        self.argv: tuple[str, ...] = ()
        self.stdin = b""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        self.argv, self.stdin = tuple(argv), stdin
        return CommandResult(tuple(argv), *self.answer, duration_s=0.0)


def failed(**answer: object) -> NodeError:
    with pytest.raises(NodeError) as caught:
        call(Recorder(**answer), "status", {}, timeout_s=1)
    return caught.value


def test_the_request_travels_in_standard_input_alone() -> None:
    host = Recorder()
    assert call(host, "start", {"secret_env": {"TOKEN": "hidden"}, "command": "other"}, timeout_s=1) == {"a": 1}
    assert "hidden" not in " ".join(host.argv)
    length, _, rest = host.stdin.partition(b"\n")
    source, request = rest[: int(length)], rest[int(length) :]
    assert source == agent_source()
    assert b"PDCTL-AGENT-1" in source
    assert json.loads(request) == {"secret_env": {"TOKEN": "hidden"}, "command": "start"}


class TestReplies:
    def test_an_error_of_the_agent(self) -> None:
        error = {"code": "disk-full", "message": "no room", "hint": "make some", "details": {}}
        found = failed(stdout=b"PDCTL-AGENT-1 " + json.dumps({"ok": False, "error": error}).encode() + b"\n")
        assert (found.code, str(found), found.hint) == ("disk-full", "box: no room", "make some")

    @pytest.mark.parametrize(
        "line",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'"text"',
            b"{}",
            b'{"ok": true}',
            b'{"ok": true, "result": []}',
            b'{"ok": false}',
            b'{"ok": false, "error": "x"}',
            b'{"ok": false, "error": {}}',
            b"\xff\xfe",
        ],
    )
    def test_answers_without_sense(self, line: bytes) -> None:
        found = failed(stdout=b"PDCTL-AGENT-1 " + line + b"\n")
        assert found.code == "bad-reply"

    @given(st.binary())
    def test_any_answer_is_read_or_explained(self, line: bytes) -> None:
        for stdout in (line, b"PDCTL-AGENT-1 " + line):
            error: NodeError | None = None
            try:
                call(Recorder(stdout=stdout), "status", {}, timeout_s=1)
            except NodeError as caught:
                error = caught
            assert error is None or all(letter.isprintable() for letter in error.message)

    @pytest.mark.parametrize("noise", [b"", b"Welcome!\n", b"no line break", b"a\r\nb\n", b"PDCTL-AGENT-2\n\n"])
    def test_noise_before_is_skipped(self, noise: bytes) -> None:
        assert call(Recorder(stdout=noise + OK), "status", {}, timeout_s=1) == {"a": 1}

    def test_an_answer_may_quote_an_answer(self) -> None:
        text = json.dumps({"ok": True, "result": {"log": "PDCTL-AGENT-1 {}\nPDCTL-AGENT-1 {}"}}).encode()
        assert find_reply(b"x\nPDCTL-AGENT-1 " + text + b"\n") == text
        assert find_reply(b"x PDCTL-AGENT-1 " + text + b"\n") == text

    def test_no_answer_quotes_what_was_said(self) -> None:
        found = failed(stdout=b"This account is disabled.\n" * 9, stderr=b"\x1b[31mbad\n", exit_code=1)
        assert found.code == "bad-reply"
        assert "exit status 1" in found.message
        assert found.message.count("This account is disabled.") == 5
        assert "\x1b" not in found.message

    def test_a_killed_agent(self) -> None:
        found = failed(stdout=b"", exit_code=-1)
        assert "a signal ended it" in found.message
        assert "out of memory" in found.hint

    def test_no_shell(self) -> None:
        assert "`sh`" in failed(stdout=b"", stderr=b"sh: not found", exit_code=127).hint


class TestPythons:
    """The search for a Python, for real, on this machine."""

    def ask(self, monkeypatch: pytest.MonkeyPatch, *pythons: str, system: tuple[str, ...] = ()) -> dict:
        monkeypatch.setattr(agent, "_SYSTEM_PYTHONS", system)
        return call(LocalHost(), "status", {"cluster": "none", "instances": []}, timeout_s=60, pythons=pythons)

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("HOME", str(tmp_path))
        return tmp_path

    def script(self, file: Path, text: str) -> str:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {file.name} >>{file.parent}/used\n{text}\n")
        file.chmod(0o755)
        return str(file)

    def test_those_that_are_missing_too_old_or_broken_are_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = self.script(tmp_path / "old", "exit 93")
        wrapper = self.script(tmp_path / "wrapper", "echo not installed >&2; exit 127")
        last = self.script(tmp_path / "last", "exit 5")
        reply = self.ask(monkeypatch, "/no/such/python", old, wrapper, sys.executable, last)
        assert reply["instances"] == {}
        assert (tmp_path / "used").read_text().split() == ["old", "wrapper"]

    @pytest.mark.parametrize("prefix", ["~", "@HOME@"])
    def test_the_home_folder_of_the_node(self, home: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
        self.script(home / "my venv" / "python", f'exec "{sys.executable}" "$@"')
        assert self.ask(monkeypatch, f"{prefix}/my venv/python")["instances"] == {}

    def test_the_systems_own_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        own = self.script(tmp_path / "own", f'exec "{sys.executable}" "$@"')
        other = self.script(tmp_path / "other", f'exec "{sys.executable}" "$@"')
        self.ask(monkeypatch, other, system=(own,))
        assert (tmp_path / "used").read_text().split() == ["own"]

    def test_none_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        old = self.script(tmp_path / "old", "exit 93")
        with pytest.raises(NodeError) as caught:
            self.ask(monkeypatch, "no-such-python", old)
        assert caught.value.code == "no-python"
        assert f"tried: no-such-python, {old}" in caught.value.message
        assert "`python:`" in caught.value.hint

    def test_the_guard_is_understood_by_old_pythons(self) -> None:
        # No syntax that Python 2 or 3.6 would choke on before the version is looked at.
        guard = agent._GUARD.rstrip(";")
        assert guard == "import sys;sys.version_info<(3, 8)and sys.exit(93)"
        compile(guard, "guard", "exec")
