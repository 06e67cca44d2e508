"""What the SSH configuration says about a host: where to connect, by way of which jump hosts, with which keys.

paramiko evaluates ``Host`` and ``Match``. It knows no ``Include``, and takes criteria that it does not know for true;
both are put right here, on the text, before it sees it. ``docs/ssh.md`` lists what is honoured.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from paramiko.config import SSHConfig, SSHConfigDict
from paramiko.ssh_exception import ConfigParseError, CouldNotCanonicalize

from pdctl.errors import UsageError
from pdctl.hosts.base import Login, SshSettings
from pdctl.hosts.known_hosts import DEFAULT_PORT, KnownAs

CONFIG_VARIABLE = "PDCTL_SSH_CONFIG"
"""Environment variable that names a configuration file; wins over the cluster file's ``ssh.config_file``."""

DEFAULT_CONNECT_TIMEOUT_S = 10.0
SYSTEM_FOLDER = "/etc/ssh"
MAX_INCLUDE_DEPTH = 16
MAX_JUMP_HOSTS = 8

# The form of a line, as paramiko reads it.
_LINE = re.compile(r"(\w+)(?:\s*=\s*|\s+)(.+)")
# Criteria of Match that paramiko evaluates. It would take any other for true.
_CRITERIA = {"all", "canonical", "final", "host", "originalhost", "user", "localuser", "exec"}
_CRITERIA_WITHOUT_VALUE = {"all", "canonical", "final"}
# A pattern list that matches no host.
_NEVER = "Host !*"
_LISTS_OF_FILES = {"userknownhostsfile", "globalknownhostsfile"}
_SPECIAL, _ESCAPED = re.compile(r"([\s\"'\\])"), r"\\\1"
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class Hop:
    """One SSH server on the way to a host, the host itself being the last.

    Attributes:
        name: as the user named it.
        address: host name or IP address to connect to.
        port: port of sshd.
        user: login name.
        identity_files: private keys to offer, in order; empty: the usual ones of ``~/.ssh``.
        identities_only: offer nothing from the agent but these.
        identity_agent: socket of the agent; None: there is none.
        known_as: where its host key is recorded.
        proxy_command: a command whose input and output lead to it, or None.
        family: ``any``, ``inet`` or ``inet6``.
    """

    name: str
    address: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    identities_only: bool
    identity_agent: str | None
    known_as: KnownAs
    proxy_command: str | None = None
    family: str = "any"


Route: TypeAlias = tuple[Hop, ...]
"""The servers to go through, the host itself last."""


@dataclass(frozen=True)
class Destination:
    """How to reach a host. ``connect_timeout_s`` bounds the whole way."""

    route: Route
    connect_timeout_s: float

    @property
    def hop(self) -> Hop:
        """The host itself."""
        return self.route[-1]


class SshConfig:
    """The SSH configuration, read once. Safe to use from several threads.

    Args:
        settings: what the cluster file says; it wins, for hosts but not for jump hosts, as options of ssh do.
        environ: environment variables.
        home: home folder of the user.

    Raises:
        UsageError: the configuration cannot be read.
    """

    def __init__(self, settings: SshSettings, *, environ: Mapping[str, str], home: Path) -> None:
        self._settings = settings
        self._environ = environ
        self._home = home
        self.given_file = environ.get(CONFIG_VARIABLE) or settings.config_file
        self._text = self._read()
        self._parsed: dict[tuple[str | None, int | None], SSHConfig] = {}
        self._lock = threading.Lock()

    def destination(self, name: str, login: Login) -> Destination:
        """How to reach the host of that name.

        Raises:
            UsageError: the configuration makes no sense for this host.
        """
        user = login.user or self._settings.user
        port = login.port or self._settings.port
        hop, options = self._hop(name, user, port)
        if self._settings.identity_file is not None:
            given = self._expand(self._settings.identity_file, name, hop)
            hop = replace(hop, identity_files=(given, *(file for file in hop.identity_files if file != given)))
        route = (*self._jump_hosts(hop, options, (name,)), hop)
        return Destination(route, self._settings.connect_timeout_s or _seconds(options) or DEFAULT_CONNECT_TIMEOUT_S)

    def _read(self) -> str:
        if self.given_file is not None:
            file = Path(self.given_file).expanduser()
            if not file.is_file():
                source = f"the environment variable {CONFIG_VARIABLE}"
                raise UsageError(
                    f"the SSH configuration file {file} does not exist",
                    hint=f"it was named by {source if self._environ.get(CONFIG_VARIABLE) else '`ssh.config_file`'}",
                )
            return "\n".join(_Expander(self._home / ".ssh", self._home).read(file))
        lines: list[str] = []
        for file, folder in (
            (self._home / ".ssh" / "config", self._home / ".ssh"),
            (Path(SYSTEM_FOLDER, "ssh_config"), Path(SYSTEM_FOLDER)),
        ):
            if file.is_file():
                lines += ["Host *", *_Expander(folder, self._home).read(file)]
        return "\n".join(lines)

    def _lookup(self, name: str, user: str | None, port: int | None) -> SSHConfigDict:
        with self._lock:
            if (user, port) not in self._parsed:
                # The first value found counts: what is given comes first.
                given = [f"User {user}"] if user else []
                given += [f"Port {port}"] if port else []
                try:
                    self._parsed[user, port] = SSHConfig.from_text("\n".join(["Host *", *given, "Host *", self._text]))
                except ConfigParseError as error:
                    raise UsageError(f"the SSH configuration cannot be read: {error}") from None
            parsed = self._parsed[user, port]
        try:
            return parsed.lookup(name)
        except CouldNotCanonicalize:
            raise UsageError(
                f"{name}: the SSH configuration wants this name to be canonical, and found no domain for it",
                hint="see CanonicalDomains in the SSH configuration",
            ) from None
        except (KeyError, OSError, ValueError, ConfigParseError) as error:
            raise UsageError(f"{name}: the SSH configuration cannot be applied to it: {error!r}") from None

    def _hop(self, name: str, user: str | None, port: int | None) -> tuple[Hop, SSHConfigDict]:
        options = self._lookup(name, user, port)
        number = options.get("port", str(DEFAULT_PORT))
        if not number.isdecimal() or not 0 < int(number) < 65536:
            raise UsageError(f"{name}: the SSH configuration gives it the port {number!r}")
        hop = Hop(
            name=name,
            address=options["hostname"],
            port=int(number),
            user=options.get("user") or _login_name(),
            identity_files=(),
            identities_only=_is_yes(options, "identitiesonly"),
            identity_agent=None,
            known_as=KnownAs(options["hostname"]),
            proxy_command=_proxy_command(options),
            family=options.get("addressfamily", "any").lower(),
        )
        ssh_folder = self._home / ".ssh"
        alias = options.get("hostkeyalias")
        return (
            replace(
                hop,
                identity_files=tuple(
                    self._expand(file, name, hop) for file in options.get("identityfile", []) if file.lower() != "none"
                ),
                identity_agent=self._agent(options.get("identityagent"), name, hop),
                known_as=KnownAs(
                    name=alias or hop.address,
                    port=hop.port,
                    is_alias=alias is not None,
                    user_files=self._files(
                        options.get("userknownhostsfile"),
                        name,
                        hop,
                        (f"{ssh_folder}/known_hosts", f"{ssh_folder}/known_hosts2"),
                    ),
                    global_files=self._files(
                        options.get("globalknownhostsfile"),
                        name,
                        hop,
                        (f"{SYSTEM_FOLDER}/ssh_known_hosts", f"{SYSTEM_FOLDER}/ssh_known_hosts2"),
                    ),
                    hashed=_is_yes(options, "hashknownhosts"),
                ),
            ),
            options,
        )

    def _agent(self, value: str | None, name: str, hop: Hop) -> str | None:
        if value is None or value == "SSH_AUTH_SOCK":
            return self._environ.get("SSH_AUTH_SOCK") or None
        if value.lower() == "none":
            return None
        if value.startswith("$") and not value.startswith("${"):
            return self._environ.get(value[1:]) or None
        return self._expand(value, name, hop)

    def _files(self, value: str | None, name: str, hop: Hop, default: tuple[str, ...]) -> tuple[str, ...]:
        if value is None:
            return default
        try:
            files = shlex.split(value)
        except ValueError as error:
            raise UsageError(
                f"{name}: the SSH configuration has a list of files that cannot be read: {error}"
            ) from None
        if [file.lower() for file in files] == ["none"]:
            return ()
        return tuple(self._expand(file, name, hop) for file in files)

    def _expand(self, value: str, name: str, hop: Hop) -> str:
        """Replace ``~``, ``${VARIABLE}`` and those tokens of ssh_config(5) that make sense in a path."""
        text = _VARIABLE.sub(lambda found: self._environ.get(found[1], ""), value)
        tokens = {
            "%": "%",
            "d": str(self._home),
            "h": hop.address,
            "k": hop.known_as.name,
            "n": name,
            "p": str(hop.port),
            "r": hop.user,
            "u": _login_name() if "%u" in text else "",
        }
        text = re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), text)
        if text == "~" or text.startswith("~/"):
            return str(self._home) + text[1:]
        return str(Path(text).expanduser()) if text.startswith("~") else text

    def _jump_hosts(self, hop: Hop, options: SSHConfigDict, via: tuple[str, ...]) -> Route:
        if hop.proxy_command is not None:
            return ()
        value = options.get("proxyjump") or "none"
        if value.lower() == "none" or "proxycommand" in _first_proxy(options):
            return ()
        if len(via) > MAX_JUMP_HOSTS:
            raise UsageError(f"{via[0]}: ProxyJump leads in a circle: {' -> '.join(via)}")
        jumps = [_jump(text, via[0]) for text in value.split(",")]
        first, options_of_first = self._hop(*jumps[0])
        if (first.address, first.port) == (hop.address, hop.port):
            # `Host *` with a ProxyJump is meant for all hosts but the jump host.
            return ()
        # Only the first is reached as its own entry says; for the others, the way is given (as with `ssh -J`).
        others = (replace(self._hop(*jump)[0], proxy_command=None) for jump in jumps[1:])
        return (*self._jump_hosts(first, options_of_first, (*via, first.name)), first, *others)


def _first_proxy(options: SSHConfigDict) -> str:
    # ProxyJump and ProxyCommand compete: the one that is found first counts. A dict keeps that order.
    return next((key for key in options if key in ("proxyjump", "proxycommand")), "")


def _proxy_command(options: SSHConfigDict) -> str | None:
    command: str | None = options.get("proxycommand")
    return command if _first_proxy(options) == "proxycommand" else None


def _jump(text: str, host: str) -> tuple[str, str | None, int | None]:
    """Take ``[user@]host[:port]`` or ``ssh://[user@]host[:port]`` apart: name, user, port."""
    found = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>[^@/]+)@)?(?P<host>\[[^\]]+\]|[^:@/\[\]]+)(?::(?P<port>\d+))?/?", text.strip()
    )
    if found is None:
        raise UsageError(f"{host}: the SSH configuration has a ProxyJump that cannot be read: {text.strip()!r}")
    port = found["port"]
    return found["host"].strip("[]"), found["user"], int(port) if port else None


def _is_yes(options: SSHConfigDict, key: str) -> bool:
    return str(options.get(key, "no")).lower() in ("yes", "true")


def _seconds(options: SSHConfigDict) -> float | None:
    value = str(options.get("connecttimeout", ""))
    return float(value) if value.isdecimal() and int(value) > 0 else None


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        raise UsageError(
            "cannot tell the name of the current login", hint="set the environment variable USER, or `ssh.user`"
        ) from None


class _Expander:
    """Reads a configuration file with its Include lines replaced by what they name."""

    def __init__(self, folder: Path, home: Path) -> None:
        self._folder = folder
        self._home = home

    def read(self, file: Path) -> list[str]:
        return list(self._lines(file, "", 0))

    def _lines(self, file: Path, enclosing: str, depth: int) -> Iterator[str]:
        """Lines of a file. ``enclosing`` are criteria of Match that hold for all of it; empty: none."""
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"the SSH configuration file {file} cannot be read: {error.strerror}") from None
        header = f"Match {enclosing}" if enclosing else "Host *"
        criteria = enclosing
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line)
            try:
                if found is None:
                    raise ValueError("no keyword with a value")
                keyword, value = found[1].lower(), found[2]
                if keyword in ("host", "match"):
                    criteria = _both(enclosing, _criteria(keyword, value))
                    header = line if keyword == "host" and not enclosing else f"Match {criteria}"
                    if not _is_known(criteria):
                        header = criteria = _NEVER
                    yield header
                elif keyword == "include":
                    if criteria != _NEVER:
                        yield from self._included(value, criteria, file, depth)
                        yield header
                elif keyword in _LISTS_OF_FILES:
                    # paramiko would take off the first and the last quote, whatever is between.
                    yield f"{keyword} {' '.join(re.sub(_SPECIAL, _ESCAPED, word) for word in shlex.split(value))}"
                else:
                    yield line
            except ValueError as error:
                raise UsageError(
                    f"{file}:{number}: this line of the SSH configuration cannot be read: {error}"
                ) from None

    def _included(self, value: str, criteria: str, file: Path, depth: int) -> Iterator[str]:
        if depth >= MAX_INCLUDE_DEPTH:
            raise UsageError(f"{file}: Include is nested more than {MAX_INCLUDE_DEPTH} deep")
        for pattern in shlex.split(value):
            path = pattern
            if path.startswith("~/"):
                path = str(self._home) + path[1:]
            for name in sorted(glob.glob(os.path.join(self._folder, path))):  # noqa: PTH118, PTH207
                if Path(name).is_file():
                    yield from self._lines(Path(name), criteria, depth + 1)


def _criteria(keyword: str, value: str) -> str:
    """Criteria of Match that say the same as a Host or Match line."""
    if keyword == "match":
        return value
    patterns = ",".join(shlex.split(value))
    return "" if patterns == "*" else f"originalhost {shlex.quote(patterns)}"


def _both(outer: str, inner: str) -> str:
    # "all" holds anyway, and must stand alone.
    parts = [part for part in (outer, inner) if part and part.split() != ["all"]]
    return " ".join(parts) or "all"


def _is_known(criteria: str) -> bool:
    words = iter(shlex.split(criteria))
    for word in words:
        name = word.lstrip("!").lower()
        if name not in _CRITERIA:
            return False
        if name not in _CRITERIA_WITHOUT_VALUE and next(words, None) is None:
            raise ValueError(f"{word} without a value")
    return True
