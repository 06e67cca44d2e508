"""Parts of the SSH host that need no server."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from paramiko.message import Message

from pdctl.hosts import ssh_channel
from pdctl.hosts.base import Deadline
from pdctl.hosts.identities import KeyFiles, read_key_file
from pdctl.hosts.shared import Shared


class Thing:
    def __init__(self) -> None:
        self.good = True
        self.closed = False

    def close(self) -> None:
        self.closed = True


class TestShared:
    def shared(self) -> Shared[Thing]:
        return Shared(lambda thing: thing.good)

    def at_once(self, count: int, action) -> list[object]:
        results: list[object] = [None] * count

        def one(number: int) -> None:
            try:
                results[number] = action()
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results

    def test_made_once_for_all(self) -> None:
        made: list[Thing] = []

        def make() -> Thing:
            time.sleep(0.05)
            made.append(Thing())
            return made[-1]

        shared = self.shared()
        results = self.at_once(8, lambda: shared.get(make, Deadline(20)))
        assert len(made) == 1
        assert results == made * 8

    def test_a_failure_is_shared_by_those_who_waited_and_not_kept(self) -> None:
        attempts: list[int] = []
        waiting = threading.Barrier(4)

        def make() -> Thing:
            attempts.append(1)
            time.sleep(0.3)
            raise OSError("no")

        def action() -> Thing | None:
            waiting.wait(10)
            return shared.get(make, Deadline(20))

        shared = self.shared()
        results = self.at_once(4, action)
        assert [str(result) for result in results] == ["no"] * 4
        assert len(attempts) == 1
        assert shared.get(Thing, Deadline(1)) is not None

    def test_waiting_is_bounded(self) -> None:
        release = threading.Event()

        def make() -> Thing:
            release.wait(20)
            return Thing()

        shared = self.shared()
        maker = threading.Thread(target=lambda: shared.get(make, Deadline(20)))
        maker.start()
        try:
            while shared._current is None:
                time.sleep(0.01)
            assert shared.peek() is None
            assert shared.get(Thing, Deadline(0.05)) is None
        finally:
            release.set()
            maker.join(20)
        assert shared.peek() is not None

    def test_one_that_went_bad_is_made_anew(self) -> None:
        shared = self.shared()
        first = shared.get(Thing, Deadline(1))
        assert first is not None
        first.good = False
        assert shared.peek() is None
        assert shared.get(Thing, Deadline(1)) is not first

    def test_only_the_current_one_is_discarded(self) -> None:
        shared = self.shared()
        first = shared.get(Thing, Deadline(1))
        assert first is not None
        assert shared.discard(first)
        second = shared.get(Thing, Deadline(1))
        assert not shared.discard(first)
        assert shared.peek() is second

    def test_one_that_is_ready_after_closing_is_closed(self) -> None:
        shared = self.shared()

        def make() -> Thing:
            shared.close()
            return Thing()

        thing = shared.get(make, Deadline(1))
        assert thing is not None
        assert thing.closed


def test_a_command_out_of_time_is_sent_a_signal() -> None:
    sent: list[Message] = []

    class Transport:
        def _send_user_message(self, message: Message) -> None:
            sent.append(message)

    class Channel:
        remote_chanid = 7

        def get_transport(self) -> Transport:
            return Transport()

    ssh_channel.terminate(Channel())
    message = Message(sent[0].asbytes())
    # RFC 4254, 6.9: SSH_MSG_CHANNEL_REQUEST (98), recipient, "signal", no reply wanted, name without SIG.
    assert message.get_byte() == b"\x62"
    assert message.get_int() == 7
    assert message.get_text() == "signal"
    assert message.get_boolean() is False
    assert message.get_text() == "TERM"


class TestKeyFiles:
    def write(self, file: Path, passphrase: bytes = b"", *, pem: bool = False) -> bytes:
        """Write a key and return its public half."""
        key = ed25519.Ed25519PrivateKey.generate()
        algorithm = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        format_ = serialization.PrivateFormat.PKCS8 if pem else serialization.PrivateFormat.OpenSSH
        file.write_bytes(key.private_bytes(serialization.Encoding.PEM, format_, algorithm))
        file.chmod(0o600)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        Path(f"{file}.pub").write_bytes(public + b" comment\n")
        return public

    def test_one_that_can_be_used(self, tmp_path: Path) -> None:
        self.write(tmp_path / "key")
        found = read_key_file(str(tmp_path / "key"))
        assert len(found.keys) == 1
        assert found.public == found.keys[0].asbytes()
        assert found.trouble == ""

    def test_with_a_passphrase_the_public_half_is_known_all_the_same(self, tmp_path: Path) -> None:
        self.write(tmp_path / "key", b"secret")
        with_file = read_key_file(str(tmp_path / "key"))
        (tmp_path / "key.pub").unlink()
        without_file = read_key_file(str(tmp_path / "key"))
        assert with_file.public == without_file.public != b""
        assert with_file.keys == ()
        assert "passphrase" in with_file.trouble
        assert with_file.advice == f"ssh-add {tmp_path}/key"

    def test_an_older_format_with_a_passphrase(self, tmp_path: Path) -> None:
        self.write(tmp_path / "key", b"secret", pem=True)
        found = read_key_file(str(tmp_path / "key"))
        assert "passphrase" in found.trouble
        assert found.public

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"text",
            b"\xff" * 100,
            b"-----BEGIN OPENSSH PRIVATE KEY-----\n-----END OPENSSH PRIVATE KEY-----\n",
            b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n-----END OPENSSH PRIVATE KEY-----\n",
            b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA/w==\n-----END OPENSSH PRIVATE KEY-----\n",
            b"-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----\n",
        ],
    )
    def test_files_that_are_no_keys(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "key"
        file.write_bytes(content)
        file.chmod(0o600)
        found = read_key_file(str(file))
        assert found.keys == ()
        assert found.trouble != ""

    def test_one_that_is_missing(self, tmp_path: Path) -> None:
        assert read_key_file(str(tmp_path / "none")).trouble == "does not exist"
        assert "cannot be read" in read_key_file(str(tmp_path)).trouble

    def test_files_are_read_once(self, tmp_path: Path) -> None:
        self.write(tmp_path / "key")
        files = KeyFiles()
        first = files.read(str(tmp_path / "key"))
        os.unlink(tmp_path / "key")  # noqa: PTH108
        assert files.read(str(tmp_path / "key")) is first
