"""Proving who we are to an SSH server: key files and the agent's keys, in a sensible order.

Passphrases are never asked for: pdctl talks to many hosts at once, and may have no terminal. An encrypted key is used
through the agent.
"""

from __future__ import annotations

import base64
import binascii
import copy
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentKey, AgentSSH
from paramiko.auth_strategy import AuthResult, AuthSource, AuthStrategy, InMemoryPrivateKey, SourceResult
from paramiko.config import SSHConfig
from paramiko.pkey import PKey, UnknownKeyType
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType, SSHException
from paramiko.transport import Transport

from pdctl.errors import HostUnreachable, LoginFailed
from pdctl.hosts.base import Deadline
from pdctl.hosts.ssh_config import Hop

# The order of ssh. The sk- kinds need a device that only an agent talks to.
DEFAULT_FILES = ("id_rsa", "id_ecdsa", "id_ed25519")
AGENT_TIMEOUT_S = 10.0

_NEW_FORMAT = b"-----BEGIN OPENSSH PRIVATE KEY-----"
_NEW_FORMAT_MAGIC = b"openssh-key-v1\x00"


@dataclass(frozen=True)
class KeyFile:
    """A private key file as far as it could be read.

    Attributes:
        path: the file.
        keys: what can be offered from it: with its certificate and without. Empty if ``trouble`` is set.
        public: public half in binary, to find the key in an agent; empty if it cannot be told.
        trouble: why the file itself is of no use.
        advice: what to do about that.
    """

    path: str
    keys: tuple[PKey, ...] = ()
    public: bytes = b""
    trouble: str = ""
    advice: str = ""


class KeyFiles:
    """Private key files, each read once. Safe to use from several threads."""

    def __init__(self) -> None:
        self._read: dict[str, KeyFile] = {}
        self._lock = threading.Lock()

    def read(self, path: str) -> KeyFile:
        """Read a file; trouble with it is part of the answer, not an exception."""
        with self._lock:
            if path not in self._read:
                self._read[path] = read_key_file(path)
            return self._read[path]


def read_key_file(path: str) -> KeyFile:
    """Read a private key, and its certificate (``PATH-cert.pub``) if there is one."""
    public = _public_half(Path(f"{path}.pub"))
    try:
        status = Path(path).stat()
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return KeyFile(path, public=public, trouble="does not exist")
    except OSError as error:
        return KeyFile(path, public=public, trouble=f"cannot be read: {error.strerror}")
    if status.st_uid == os.getuid() and status.st_mode & 0o077:
        # The same rule as ssh's, which ignores such a key too.
        mode = f"{status.st_mode & 0o777:04o}"
        return KeyFile(path, (), public, f"can be read by others (mode {mode}) and is ignored", f"chmod 600 {path}")
    encrypted, embedded = _inspect(content)
    public = embedded or public
    if encrypted:
        return KeyFile(path, (), public, "has a passphrase, and is not in the agent", f"ssh-add {path}")
    try:
        key = PKey.from_path(path)
    except (ValueError, TypeError, IndexError, OSError, SSHException, UnknownKeyType, UnsupportedAlgorithm) as error:
        return KeyFile(path, (), public, f"holds no private key that can be used ({error})")
    keys = [key]
    if key.public_blob is not None:
        plain = copy.copy(key)
        plain.public_blob = None
        keys.append(plain)
    return KeyFile(path, tuple(keys), key.asbytes())


def _public_half(path: Path) -> bytes:
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
        return base64.b64decode(words[1], validate=True)
    except (OSError, IndexError, ValueError, binascii.Error):
        return b""


def _inspect(content: bytes) -> tuple[bool, bytes]:
    """Whether a private key is encrypted, and its public half if that can be read all the same."""
    stripped = content.strip()
    if not stripped.startswith(_NEW_FORMAT):
        return b"ENCRYPTED" in content, b""
    try:
        body = base64.b64decode(b"".join(stripped.splitlines()[1:-1]))
        if not body.startswith(_NEW_FORMAT_MAGIC):
            return False, b""
        # PROTOCOL.key of OpenSSH: cipher, key derivation and its options as strings, number of keys, public key.
        rest = body[len(_NEW_FORMAT_MAGIC) :]
        cipher, rest = _string(rest)
        _, rest = _string(rest)
        _, rest = _string(rest)
        public, _ = _string(rest[4:])
    except (ValueError, struct.error):
        return False, b""
    return cipher != b"none", public


def _string(data: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack(">I", data[:4])
    return data[4 : 4 + length], data[4 + length :]


class _Agent(AgentSSH):
    """A connection to the agent that listens at ``path``."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(AGENT_TIMEOUT_S)
            self._socket.connect(path)
            # Lists the keys. paramiko's own class does the same, for the agent of SSH_AUTH_SOCK alone.
            self._connect(self._socket)  # type: ignore[attr-defined]  # missing in the stubs
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class Identity:
    """A key to offer, and what to call it in messages."""

    label: str
    key: PKey


class Identities:
    """The keys to offer to one server, in order. Notes down what could not be used, and what might help.

    A key file that is named comes first, whether it is read from the file or found in the agent; then what else the
    agent has, unless IdentitiesOnly forbids; then the usual files of ``~/.ssh`` if none was named. So the agent is
    talked to only when it is needed, and a well-filled one does not use up the attempts that a server allows.
    """

    def __init__(self, hop: Hop, files: KeyFiles, home: Path) -> None:
        self._hop = hop
        self._files = files
        self._home = home
        self._agent: _Agent | None = None
        self._agent_asked = False
        self.notes: list[str] = []
        self.advice: list[str] = []

    def __iter__(self) -> Iterator[Identity]:
        offered: set[bytes] = set()
        for path in self._hop.identity_files:
            yield from self._from_file(path, offered, named=True)
        if not (self._hop.identities_only and self._hop.identity_files):
            for key in self._agent_keys():
                if key.asbytes() not in offered:
                    yield Identity(_agent_label(key), key)
        if not self._hop.identity_files:
            for name in DEFAULT_FILES:
                yield from self._from_file(str(self._home / ".ssh" / name), offered, named=False)

    def close(self) -> None:
        """Hang up on the agent."""
        if self._agent is not None:
            self._agent.close()

    def _from_file(self, path: str, offered: set[bytes], *, named: bool) -> Iterator[Identity]:
        file = self._files.read(path)
        if file.keys:
            offered.add(file.public)
            for key in file.keys:
                yield Identity(f"{path} with its certificate" if key.public_blob else path, key)
            return
        for key in self._agent_keys() if file.public else ():
            if key.asbytes() == file.public:
                offered.add(file.public)
                if named:
                    yield Identity(_agent_label(key), key)
                return
        if named or file.trouble != "does not exist":
            self.notes.append(f"{path} {file.trouble}")
            self.advice += [file.advice] if file.advice else []

    def _agent_keys(self) -> tuple[AgentKey, ...]:
        path = self._hop.identity_agent
        if self._agent is None and not self._agent_asked and path is not None:
            self._agent_asked = True
            try:
                self._agent = _Agent(path)
                if not self._agent.get_keys():
                    self.notes.append("the agent holds no keys")
            except (OSError, SSHException) as error:
                self.notes.append(f"the agent at {path} does not answer: {error}")
        elif path is None and not self._agent_asked:
            self._agent_asked = True
            self.notes.append("there is no agent (SSH_AUTH_SOCK is not set)")
        return self._agent.get_keys() if self._agent is not None else ()


def _agent_label(key: AgentKey) -> str:
    return f"{key.comment or key.get_name()} of the agent"


class PublicKeyLogin(AuthStrategy):
    """Offers identities one after the other until one is accepted, within a deadline.

    Raises (from :meth:`authenticate`):
        LoginFailed: none was accepted; says which were tried, and why others were not.
        HostUnreachable: there was no time left, or the connection was lost.
    """

    def __init__(self, hop: Hop, identities: Identities, deadline: Deadline) -> None:
        super().__init__(ssh_config=SSHConfig())
        self._hop = hop
        self._identities = identities
        self._deadline = deadline

    def get_sources(self) -> Iterator[AuthSource]:
        """The identities in paramiko's terms; unused, as :meth:`authenticate` needs to know what each is called."""
        return (InMemoryPrivateKey(self._hop.user, identity.key) for identity in self._identities)

    def authenticate(self, transport: Transport) -> AuthResult:
        """Log in."""
        try:
            return self._authenticate(transport)
        finally:
            self._identities.close()

    def _authenticate(self, transport: Transport) -> AuthResult:
        tried: list[str] = []
        for identity in self._identities:
            if self._deadline.passed:
                raise self._too_slow()
            tried.append(identity.label)
            transport.auth_timeout = self._deadline.remaining_s
            source = InMemoryPrivateKey(self._hop.user, identity.key)
            try:
                missing = source.authenticate(transport)
            except BadAuthenticationType as error:
                raise self._failed(
                    f"the server takes no keys for {self._hop.user}, only: {', '.join(error.allowed_types)}",
                    ["pdctl logs in by key only: enable PubkeyAuthentication in the server's sshd_config"],
                ) from None
            except (SSHException, EOFError, OSError) as error:
                if self._deadline.passed:
                    raise self._too_slow() from None
                if not transport.is_active():
                    raise self._hung_up(tried) from None
                if not isinstance(error, AuthenticationException):
                    self._identities.notes.append(f"{identity.label} cannot be used: {error}")
                continue
            if missing:
                raise self._failed(
                    f"the server accepts {identity.label} and wants {' or '.join(missing)} on top",
                    ["pdctl cannot answer questions: allow this login with a key alone"],
                )
            result = AuthResult(self)
            result.append(SourceResult(source, missing))
            return result
        raise self._refused(tried)

    def _too_slow(self) -> HostUnreachable:
        return HostUnreachable(
            self._hop.name,
            f"the login as {self._hop.user} did not end within {self._deadline.timeout_s:g} s",
            hint="the host may be overloaded, or its name service slow (UseDNS in sshd_config); "
            "`ssh: {connect_timeout_s: ...}` gives it more time",
        )

    def _hung_up(self, tried: list[str]) -> LoginFailed:
        return self._failed(
            f"the server hung up during the login as {self._hop.user}, after {_listed(tried)}",
            ["if these are too many keys for it (MaxAuthTries), name the right one with `ssh: {identity_file: ...}`"],
        )

    def _refused(self, tried: list[str]) -> LoginFailed:
        user = self._hop.user
        if not tried:
            return self._failed(
                f"there is no key to log in as {user} with", ["ssh-add a key, or name one: IdentityFile"]
            )
        return self._failed(
            f"the login as {user} was refused; offered: {_listed(tried)}",
            [f"is {user} the right login, and one of these keys in its ~/.ssh/authorized_keys there?"],
        )

    def _failed(self, message: str, advice: list[str]) -> LoginFailed:
        notes = f" ({'; '.join(self._identities.notes)})" if self._identities.notes else ""
        commands = [f"`{command}`" for command in self._identities.advice]
        return LoginFailed(self._hop.name, message + notes, hint="; ".join([*commands, *advice]))


def _listed(labels: list[str]) -> str:
    shown = labels[:6]
    more = f" and {len(labels) - len(shown)} more" if len(labels) > len(shown) else ""
    return ", ".join(shown) + more
