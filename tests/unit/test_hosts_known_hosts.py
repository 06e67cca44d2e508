"""Reading and judging recorded host keys."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.errors import HostKeyRejected
from pdctl.hosts import known_hosts
from pdctl.hosts.known_hosts import (
    HostKeyChecker,
    KnownAs,
    KnownKeys,
    Verdict,
    append,
    fingerprint,
    hash_name,
    names_match,
    order_algorithms,
    parse,
)


def make_key(kind: str = "ssh-ed25519", body: bytes = b"\0\0\0\x04body") -> bytes:
    return struct.pack(">I", len(kind)) + kind.encode() + body


def line(names: str, key: bytes, kind: str = "ssh-ed25519", marker: str = "") -> str:
    return f"{marker} {names} {kind} {base64.b64encode(key).decode()} a comment\n".lstrip()


FIRST, SECOND = make_key(body=b"first"), make_key(body=b"second")
RSA = make_key("ssh-rsa", b"rsa")


def judge(text: str, known_as: KnownAs, key: bytes = FIRST, kind: str = "ssh-ed25519") -> Verdict:
    return KnownKeys(parse(text, "file")).judge(known_as, kind, key).verdict


class TestParse:
    def test_lines_are_counted_as_an_editor_does(self) -> None:
        keys = parse("# comment\n\n" + line("a,b", FIRST) + "  \n" + line("c", SECOND), "known_hosts")
        assert [(key.names, key.where) for key in keys] == [("a,b", "known_hosts:3"), ("c", "known_hosts:5")]

    @pytest.mark.parametrize(
        "text",
        [
            "host ssh-ed25519\n",
            "host ssh-ed25519 !!!\n",
            "@revoked\n",
            "host ssh-rsa " + base64.b64encode(FIRST).decode(),
            "host ssh-ed25519 AAAA\n",
        ],
    )
    def test_lines_without_sense_are_skipped(self, text: str) -> None:
        assert len(parse(text + "\n" + line("other", FIRST), "file")) == 1

    @given(st.text())
    def test_never_fails(self, text: str) -> None:
        keys = KnownKeys(parse(text, "file"))
        keys.judge(KnownAs("host", 2222), "ssh-ed25519", FIRST)

    @given(st.lists(st.sampled_from([*"|1a*?![]:,=", "host", "@revoked", " "]), max_size=12).map("".join))
    def test_never_fails_on_names(self, names: str) -> None:
        KnownKeys(parse(line(names or "x", FIRST), "file")).judge(KnownAs("host", 2222), "ssh-ed25519", FIRST)


class TestNames:
    @pytest.mark.parametrize(
        ("names", "name", "matches"),
        [
            ("host", "host", True),
            ("HOST", "host", True),
            ("a,host,b", "host", True),
            ("hos", "host", False),
            ("h?st", "host", True),
            ("*.example.org", "a.example.org", True),
            ("*.example.org", "example.org", False),
            ("*,!host", "host", False),
            ("!host,*", "host", False),
            ("!host", "other", False),
            ("[host]:2222", "[host]:2222", True),
            ("[host]:*", "[host]:2222", True),
            ("[host]:22?2", "[host]:2222", True),
            ("h[o]st", "host", False),
            ("[h]ost*", "host", False),
            (hash_name("host", b"s" * 20), "host", True),
            (hash_name("host", b"s" * 20), "other", False),
            ("|2|x|y", "host", False),
            ("|1|not base64|y", "host", False),
        ],
    )
    def test_match(self, names: str, name: str, matches: bool) -> None:
        assert names_match(names, name) is matches

    def test_a_hash_as_openssh_writes_it(self) -> None:
        # ssh-keygen -H of a line for "example.org".
        assert names_match("|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg=", "192.168.1.61")

    def test_the_port_is_part_of_the_recorded_name(self) -> None:
        assert KnownAs("Host").recorded_name == "host"
        assert KnownAs("host", 2222).recorded_name == "[host]:2222"
        assert KnownAs("alias", 2222, is_alias=True).recorded_name == "alias"


class TestJudge:
    def test_known_and_unknown(self) -> None:
        assert judge(line("host", FIRST), KnownAs("host")) is Verdict.KNOWN
        assert judge(line("other", FIRST), KnownAs("host")) is Verdict.UNKNOWN

    def test_one_of_several_keys_is_enough(self) -> None:
        assert judge(line("host", SECOND) + line("host", FIRST), KnownAs("host")) is Verdict.KNOWN

    def test_changed(self) -> None:
        assert judge(line("host", SECOND), KnownAs("host")) is Verdict.CHANGED

    def test_a_key_of_another_kind_only(self) -> None:
        assert judge(line("host", RSA, "ssh-rsa"), KnownAs("host")) is Verdict.OTHER_TYPE

    def test_revoked_wins_over_known(self) -> None:
        text = line("host", FIRST) + line("*", FIRST, marker="@revoked")
        assert judge(text, KnownAs("host")) is Verdict.REVOKED

    def test_a_revoked_key_says_nothing_of_others(self) -> None:
        assert judge(line("host", SECOND, marker="@revoked"), KnownAs("host")) is Verdict.UNKNOWN

    def test_an_authority_is_no_host_key(self) -> None:
        text = line("host", FIRST, marker="@cert-authority")
        judgement = KnownKeys(parse(text, "file")).judge(KnownAs("host"), "ssh-ed25519", FIRST)
        assert judgement.verdict is Verdict.UNKNOWN
        assert [key.line for key in judgement.authorities] == [1]

    def test_a_line_without_the_port_vouches_for_its_key_but_speaks_against_none(self) -> None:
        assert judge(line("host", FIRST), KnownAs("host", 2222)) is Verdict.KNOWN
        assert judge(line("host", SECOND), KnownAs("host", 2222)) is Verdict.UNKNOWN
        assert judge(line("[host]:2222", FIRST), KnownAs("host")) is Verdict.UNKNOWN

    def test_algorithms_of_the_recorded_keys(self) -> None:
        keys = KnownKeys(parse(line("host", RSA, "ssh-rsa") + line("h*", FIRST), "file"))
        assert keys.algorithms(KnownAs("host")) == ["rsa-sha2-512", "rsa-sha2-256", "ssh-ed25519"]
        assert keys.algorithms(KnownAs("other")) == []

    def test_order_of_algorithms(self) -> None:
        assert order_algorithms(["c", "x", "b"], ["a", "b", "c"]) == ("c", "b", "a")


class TestAppend:
    def test_a_file_without_a_last_line_break(self, tmp_path: Path) -> None:
        file = tmp_path / "known_hosts"
        file.write_text(line("other", SECOND).rstrip("\n"))
        added = append(str(file), KnownAs("host"), "ssh-ed25519", FIRST)
        assert added.line == 2
        assert [key.names for key in parse(file.read_text(), "file")] == ["other", "host"]

    def test_a_new_file_is_private(self, tmp_path: Path) -> None:
        file = tmp_path / ".ssh" / "known_hosts"
        append(str(file), KnownAs("host", 2222, hashed=True), "ssh-ed25519", FIRST)
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert "host" not in file.read_text()
        assert judge(file.read_text(), KnownAs("host", 2222)) is Verdict.KNOWN


class TestChecker:
    def test_a_key_that_cannot_be_recorded(self, tmp_path: Path) -> None:
        checker = HostKeyChecker(accept_new=True)
        with pytest.raises(HostKeyRejected, match="cannot be recorded in"):
            checker.check("host", KnownAs("host", user_files=(str(tmp_path),)), "ssh-ed25519", FIRST)
        with pytest.raises(HostKeyRejected, match="no file to record it in"):
            checker.check("host", KnownAs("host"), "ssh-ed25519", FIRST)

    def test_files_are_read_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "known_hosts"
        file.write_text(line("host", FIRST))
        read: list[str] = []
        original = known_hosts._read
        monkeypatch.setattr(known_hosts, "_read", lambda name: read.append(name) or original(name))
        checker = HostKeyChecker()
        for _ in range(3):
            checker.check("host", KnownAs("host", user_files=(str(file), "/none")), "ssh-ed25519", FIRST)
        assert read == [str(file), "/none"]

    def test_a_new_key_is_known_from_then_on(self, tmp_path: Path) -> None:
        file = tmp_path / "known_hosts"
        known_as = KnownAs("host", user_files=(str(file),))
        checker = HostKeyChecker(accept_new=True)
        for _ in range(2):
            checker.check("host", known_as, "ssh-ed25519", FIRST)
        assert len(file.read_text().splitlines()) == 1
        with pytest.raises(HostKeyRejected, match="HAS CHANGED") as caught:
            checker.check("host", known_as, "ssh-ed25519", SECOND)
        assert f"{file}:1" in caught.value.message
        assert fingerprint(FIRST) in caught.value.message
        with pytest.raises(HostKeyRejected, match="NOT THE RECORDED ONE"):
            checker.check("host", known_as, "ssh-rsa", RSA)
