"""Recorded host keys: reading known_hosts files, judging the key that a host shows, recording a new one.

The format is that of sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT". Keys are compared as the bytes of their public part, so no
key has to be understood here. ``@cert-authority`` lines are not used: pdctl checks plain host keys only.
"""

from __future__ import annotations

import base64
import binascii
import enum
import fnmatch
import hashlib
import hmac
import os
import re
import shlex
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdctl.errors import HostKeyRejected

DEFAULT_PORT = 22

# Which signature algorithms a recorded key type can prove itself with (RFC 8332 for RSA).
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file."""

    marker: str
    names: str
    key_type: str
    key: bytes
    file: str
    line: int

    @property
    def where(self) -> str:
        """``file:line``, for people."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class KnownAs:
    """Under which name a host's key is recorded, and where.

    Attributes:
        name: the host name that SSH connects to, or its HostKeyAlias.
        port: port of sshd; part of the recorded name unless it is 22 or an alias is used.
        is_alias: ``name`` is a HostKeyAlias.
        user_files: UserKnownHostsFile; new keys go to the first.
        global_files: GlobalKnownHostsFile.
        hashed: HashKnownHosts: write names as hashes.
    """

    name: str
    port: int = DEFAULT_PORT
    is_alias: bool = False
    user_files: tuple[str, ...] = ()
    global_files: tuple[str, ...] = ()
    hashed: bool = False

    @property
    def recorded_name(self) -> str:
        """As it is written in a known_hosts file: ``name`` or ``[name]:port``."""
        name = self.name.lower()
        return name if self.is_alias or self.port == DEFAULT_PORT else f"[{name}]:{self.port}"

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are read, in order."""
        return (*self.user_files, *self.global_files)


class Verdict(enum.Enum):
    """What the records say of a key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    OTHER_TYPE = "other type"
    REVOKED = "revoked"


@dataclass(frozen=True)
class Judgement:
    """A verdict, and the lines that it rests on. ``authorities`` are ``@cert-authority`` lines that name the host."""

    verdict: Verdict
    lines: tuple[KnownKey, ...] = ()
    authorities: tuple[KnownKey, ...] = ()


def parse(text: str, file: str) -> list[KnownKey]:
    """Read the text of a known_hosts file. Lines that make no sense are skipped, as ssh does."""
    known = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0).lower() if fields[0].startswith("@") else ""
        if len(fields) < 3:
            continue
        names, key_type, encoded = fields[:3]
        try:
            key = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            continue
        if _type_of(key) == key_type.encode():
            known.append(KnownKey(marker.lstrip("@"), names, key_type, key, file, number))
    return known


def _type_of(key: bytes) -> bytes:
    # A public key starts with its type as a string: 4 bytes of length, then the text (RFC 4253, 6.6).
    if len(key) < 4:
        return b""
    (length,) = struct.unpack(">I", key[:4])
    return key[4 : 4 + length]


def names_match(names: str, name: str) -> bool:
    """Whether the first field of a line means ``name`` (in lower case): a list of patterns, or one hashed name."""
    if names.startswith("|"):
        return _hash_matches(names, name)
    matched = False
    for pattern in names.lower().split(","):
        if pattern.startswith("!"):
            if _pattern_matches(pattern[1:], name):
                return False
        elif _pattern_matches(pattern, name):
            matched = True
    return matched


def _pattern_matches(pattern: str, name: str) -> bool:
    # Only * and ? are special in SSH's patterns; the brackets of "[name]:port" are not.
    return pattern == name or (
        ("*" in pattern or "?" in pattern) and fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))
    )


def _hash_matches(names: str, name: str) -> bool:
    parts = names.split("|")
    if len(parts) != 4 or parts[1] != "1":
        return False
    try:
        salt, wanted = base64.b64decode(parts[2]), base64.b64decode(parts[3])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), wanted)


def hash_name(name: str, salt: bytes) -> str:
    """A name as HashKnownHosts writes it; ``salt`` has 20 bytes."""
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def fingerprint(key: bytes) -> str:
    """``SHA256:...`` of a public key, as ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


class KnownKeys:
    """The lines of some known_hosts files, for quick look-up of one host among many."""

    def __init__(self, keys: Iterable[KnownKey]) -> None:
        self._plain: dict[str, list[KnownKey]] = {}
        self._others: list[KnownKey] = []
        for key in keys:
            self.add(key)

    def add(self, key: KnownKey) -> None:
        """Add a line."""
        if re.search(r"[*?!|]", key.names):
            self._others.append(key)
        else:
            for name in key.names.lower().split(","):
                self._plain.setdefault(name, []).append(key)

    def named(self, name: str) -> list[KnownKey]:
        """All lines that mean ``name``."""
        return [*self._plain.get(name, ()), *(key for key in self._others if names_match(key.names, name))]

    def judge(self, known_as: KnownAs, key_type: str, key: bytes) -> Judgement:
        """Judge the key that a host shows. ``key_type`` is the type of the key (``ssh-rsa`` for every RSA key)."""
        lines = self.named(known_as.recorded_name)
        without_port = []
        if known_as.recorded_name != known_as.name.lower():
            # As ssh does: a line without the port vouches for a key, but speaks against none.
            without_port = self.named(known_as.name.lower())
        revoked = [line for line in (*lines, *without_port) if line.marker == "revoked" and line.key == key]
        if revoked:
            return Judgement(Verdict.REVOKED, tuple(revoked))
        plain = [line for line in lines if not line.marker]
        authorities = tuple(line for line in (*lines, *without_port) if line.marker == "cert-authority")
        for line in (*plain, *(line for line in without_port if not line.marker)):
            if line.key == key:
                return Judgement(Verdict.KNOWN, (line,))
        same_type = tuple(line for line in plain if line.key_type == key_type)
        if same_type:
            return Judgement(Verdict.CHANGED, same_type)
        return Judgement(Verdict.OTHER_TYPE if plain else Verdict.UNKNOWN, tuple(plain), authorities)

    def algorithms(self, known_as: KnownAs) -> list[str]:
        """Host key algorithms that a recorded key of this host can be proven with.

        They must be asked for first: a host that shows a key of another type than the recorded one could not be told
        from an impostor. (ssh orders its HostKeyAlgorithms the same way.)
        """
        lines = self.named(known_as.recorded_name) or self.named(known_as.name.lower())
        types = dict.fromkeys(line.key_type for line in lines if not line.marker)
        return [algorithm for key_type in types for algorithm in _ALGORITHMS.get(key_type, (key_type,))]


class HostKeyChecker:
    """Decides on the keys that hosts and jump hosts show. Files are read once. Safe to use from several threads.

    Args:
        accept_new: record the key of a host that no key is known of, instead of refusing it.
        config_file: a configuration file that was given instead of the usual ones, for advice to the user.
    """

    def __init__(self, *, accept_new: bool = False, config_file: str | None = None) -> None:
        self._accept_new = accept_new
        self._config_file = config_file
        self._loaded: dict[tuple[str, ...], KnownKeys] = {}
        self._lock = threading.Lock()

    def algorithms(self, known_as: KnownAs) -> list[str]:
        """Host key algorithms to ask for first; see :meth:`KnownKeys.algorithms`."""
        with self._lock:
            return self._keys(known_as.files).algorithms(known_as)

    def check(self, host: str, known_as: KnownAs, key_type: str, key: bytes) -> None:
        """Return if the key may be trusted.

        Args:
            host: name of the host for messages, as the user gave it to SSH.
            known_as: under which name its key is recorded, and where.
            key_type: type of the key, ``ssh-rsa`` for RSA.
            key: its public part, in SSH's binary form.

        Raises:
            HostKeyRejected: the key is unknown, is not the recorded one, or was revoked.
        """
        with self._lock:
            keys = self._keys(known_as.files)
            judgement = keys.judge(known_as, key_type, key)
            if judgement.verdict is Verdict.KNOWN:
                return
            if judgement.verdict is Verdict.UNKNOWN and self._accept_new:
                self._record(host, known_as, key_type, key)
                return
        raise HostKeyRejected(
            host,
            _complaint(judgement, known_as, key_type, key),
            hint=_advice(host, judgement, known_as, key_type, self._config_file),
        )

    def _keys(self, files: tuple[str, ...]) -> KnownKeys:
        if files not in self._loaded:
            self._loaded[files] = KnownKeys(key for file in files for key in _read(file))
        return self._loaded[files]

    def _record(self, host: str, known_as: KnownAs, key_type: str, key: bytes) -> None:
        if not known_as.user_files:
            raise HostKeyRejected(
                host,
                f"its {key_type} key {fingerprint(key)} is new, and there is no file to record it in",
                hint="UserKnownHostsFile is `none` in the SSH configuration: name a file there",
            )
        file = known_as.user_files[0]
        try:
            added = append(file, known_as, key_type, key)
        except OSError as error:
            raise HostKeyRejected(
                host,
                f"its {key_type} key {fingerprint(key)} is new, and cannot be recorded in {file}: {error.strerror}",
                hint="make that file writable, or record the key by hand",
            ) from None
        for files, keys in self._loaded.items():
            if file in files:
                keys.add(added)


def _read(file: str) -> list[KnownKey]:
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        # ssh takes a missing or unreadable file for an empty one. No key gets trusted by that.
        return []
    return parse(text, file)


def append(file: str, known_as: KnownAs, key_type: str, key: bytes) -> KnownKey:
    """Add a key to a known_hosts file, which is made (0600, its folder 0700) if it is missing.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(file)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = known_as.recorded_name
    names = hash_name(name, os.urandom(20)) if known_as.hashed else name
    line = f"{names} {key_type} {base64.b64encode(key).decode()}\n".encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as stream:
        before = stream.read() or b""
        # One write, so that two programs that add a line at once do not mix theirs.
        stream.write(line if not before or before.endswith(b"\n") else b"\n" + line)
    return KnownKey("", names, key_type, key, file, len(before.splitlines()) + 1)


def _complaint(judgement: Judgement, known_as: KnownAs, key_type: str, key: bytes) -> str:
    shown = f"{key_type} key {fingerprint(key)}"
    name = known_as.recorded_name
    lines = ", ".join(f"{line.where} ({line.key_type} {fingerprint(line.key)})" for line in judgement.lines)
    if judgement.verdict is Verdict.REVOKED:
        return f"THE HOST KEY WAS REVOKED: the {shown} that it shows is marked @revoked in {lines}"
    if judgement.verdict is Verdict.CHANGED:
        return (
            f"THE HOST KEY HAS CHANGED: it shows the {shown}, but recorded for {name} is {lines}. "
            "Somebody may be reading along, or the host was installed anew"
        )
    if judgement.verdict is Verdict.OTHER_TYPE:
        return (
            f"THE HOST KEY IS NOT THE RECORDED ONE: it shows the {shown}, and offers no key of the recorded type; "
            f"recorded for {name} is {lines}. Somebody may be reading along, or the host's keys were made anew"
        )
    note = ""
    if judgement.authorities:
        where = ", ".join(line.where for line in judgement.authorities)
        note = f" (the @cert-authority of {where} is not used: pdctl does not check host certificates)"
    files = ", ".join(known_as.files) or "no file at all"
    return f"its host key is unknown: it shows the {shown}, and {name} is in none of {files}{note}"


def _advice(host: str, judgement: Judgement, known_as: KnownAs, key_type: str, config_file: str | None) -> str:
    own_key = f"`ssh-keygen -lf /etc/ssh/ssh_host_{_short(key_type)}_key.pub` on the host's own console"
    if judgement.verdict is Verdict.REVOKED:
        return "do not use this host until it has a new key"
    if judgement.verdict in (Verdict.CHANGED, Verdict.OTHER_TYPE):
        files = sorted({line.file for line in judgement.lines})
        remove = " and ".join(shlex.join(["ssh-keygen", "-R", known_as.recorded_name, "-f", file]) for file in files)
        return f"compare the fingerprint with {own_key}; only if it is right, remove the old key: `{remove}`"
    port = [] if known_as.port == DEFAULT_PORT else ["-p", str(known_as.port)]
    log_in = shlex.join(["ssh", *(["-F", config_file] if config_file else []), *port, host])
    record = ""
    if not known_as.is_alias and known_as.user_files:
        scan = shlex.join(["ssh-keyscan", *port, "-t", _short(key_type), known_as.name])
        record = f" or `{scan} >> {shlex.quote(known_as.user_files[0])}`"
    return (
        f"compare the fingerprint with {own_key}, then record the key: `{log_in}` once by hand,{record}; "
        "`ssh: {host_keys: accept-new}` in the cluster file records the keys of new hosts unseen"
    )


def _short(key_type: str) -> str:
    """``ed25519`` for ``ssh-ed25519``: as file names of host keys and ``ssh-keyscan -t`` have it."""
    return "ecdsa" if key_type.startswith("ecdsa") else key_type.removeprefix("ssh-")


def order_algorithms(preferred: Sequence[str], offered: Sequence[str]) -> tuple[str, ...]:
    """``offered`` with those that are in ``preferred`` first, in that order."""
    first = [name for name in preferred if name in offered]
    return (*first, *(name for name in offered if name not in first))
