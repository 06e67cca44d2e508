"""The node agent: starts, stops and observes the instances of a cluster on the machine it runs on.

One self-contained file for Python 3.8 or later on Linux, standard library only. It is never installed on a node:
each call sends it over the wire and runs it as ``python3 -I -S -c BOOTSTRAP`` where BOOTSTRAP is

    import sys;b=sys.stdin.buffer;s=b.read(int(b.readline()));g={"__name__":"__pdctl_agent__","SOURCE":s};exec(compile(s,"pdctl-agent","exec"),g);g["main"](b.read())

Standard input is the length of this file in bytes and a newline, this file, then the request: a JSON object with
``command`` and the fields of that command, until end of file. So nothing of a request is ever in an argv. The answer
is one line on standard output:

    PDCTL-AGENT-1 {"ok": true, "result": {...}}
    PDCTL-AGENT-1 {"ok": false, "error": {"code": "...", "message": "...", "hint": "...", "details": {...}}}

Folder of an instance, ``~/.pdctl/<cluster>/<instance>/`` (0700; ``PDCTL_HOME`` replaces ``~/.pdctl``):

``state.json``     what was started: pid, create time, boot id, argv, digest, start id, ports. No secret. Gone after a stop
``env``            0600, all variables including secrets, as ``export NAME='value'`` lines for sh. The supervisor passes the
                   same variables directly; the file is there so that a person can run ``launch.sh`` by hand
``launch.sh``      0700, ends in an ``exec`` of the server; it may source ``./env``, its working folder is this folder
``supervisor.py``  this file again; it starts ``launch.sh``, waits for it and writes ``exit.json``
``exit.json``      ``{code, signal, at, start_id}``
``vllm.log``       output of the instance; rotated at each start, ``.1`` to ``.3`` are kept
``gate``           made by the command ``open``; the router waits for it before it opens its port
``lock``           flock of whoever changes the instance

A process belongs to an instance when its initial environment holds ``PDCTL_MARKER=<cluster>/<instance>/<start id>`` and
``PDCTL_INSTANCE_FOLDER=<this folder>``, or when it is in the session of the instance's main process. A process is
known by pid *and* create time (field 22 of ``/proc/PID/stat``, clock ticks since boot), so a recycled pid is never
taken for an instance, and never signalled.

Units: every ``*_s`` is seconds, ``*_at`` and ``at`` are seconds since 1970, ``create_time`` is clock ticks since boot.
"""  # noqa: E501

from __future__ import annotations

import base64
import binascii
import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import sys
import time
import traceback
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, NoReturn, Optional, Set, Tuple

REPLY_PREFIX = "PDCTL-AGENT-1 "
LOG_NAME = "vllm.log"
GATE_NAME = "gate"
LOGS_KEPT = 3
LOCK_WAIT_S = 10.0
# The supervisor only starts Python, writes one small file and forks; more than this means a machine in trouble.
SUPERVISOR_TIMEOUT_S = 30.0
OBSERVE_INTERVAL_S = 0.15
OBSERVE_LOG_BYTES = 64 * 1024
HEALTH_TIMEOUT_S = 2.0
HEALTH_INTERVAL_S = 0.3
HTTP_BODY_LIMIT = 4 * 1024 * 1024
HTTP_MAX_REQUESTS = 4096
HTTP_MAX_IN_FLIGHT = 64
SHIP_MAX_FILES = 1000
SHIP_MAX_BYTES = 32 * 1024 * 1024
STALE_SHIPMENT_S = 3600.0

NAME_PATTERN = re.compile(r"[a-z][a-z0-9-]{0,62}")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What shlex.quote() leaves unquoted: @HOME@ is replaced inside a script that was quoted before the home was known.
SHELL_SAFE_PATTERN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
# Clusters live beside it in ~/.pdctl.
CONNECTOR_FOLDER = "connector"

Json = Dict[str, Any]


class AgentError(Exception):
    """What the caller is told instead of a result.

    Args:
        code: stable short word for programs.
        message: what is wrong and where.
        hint: what to do about it, or empty.
        details: more for programs; goes into the answer as it is.
    """

    def __init__(self, code: str, message: str, hint: str = "", details: Optional[Json] = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.details = details or {}

    def to_json(self) -> Json:
        """Return the ``error`` object of an answer."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "details": self.details}


def bad_request(message: str) -> AgentError:
    """Return the error for a request that the caller should not have sent."""
    return AgentError("bad-request", message)


# ---------------------------------------------------------------------------------------------- reading a request

_REQUIRED: Any = object()


class Request:
    """Typed access to a request; a missing or wrong field raises ``bad-request`` naming the field, never its value."""

    def __init__(self, fields: Any, where: str = "") -> None:
        if not isinstance(fields, dict):
            raise bad_request(f"{where or 'the request'} must be a JSON object")
        self.fields: Json = fields
        self.where = where + "." if where else ""

    def _get(self, key: str, default: Any, check: Callable[[Any], bool], wanted: str) -> Any:
        value = self.fields.get(key)
        if value is None:
            if default is _REQUIRED:
                raise bad_request(f"field {self.where}{key} is missing")
            return default
        if not check(value):
            raise bad_request(f"field {self.where}{key} must be {wanted}")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a string (or the default)."""
        return self._get(key, default, is_text, "a string without NUL")

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        return bool(self._get(key, default, lambda value: isinstance(value, bool), "true or false"))

    def number(self, key: str, default: Any = _REQUIRED, *, maximum: float = 1e9) -> float:
        """Return a number between 0 and ``maximum``."""
        return float(
            self._get(
                key,
                default,
                lambda value: is_number(value) and 0 <= value <= maximum,
                f"a number from 0 to {maximum:g}",
            )
        )

    def offset(self, key: str) -> Optional[int]:
        """Return a byte offset or inode number, or None."""
        value = self._get(
            key,
            None,
            lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
            "a whole number or null",
        )
        return None if value is None else int(value)

    def name(self, key: str) -> str:
        """Return the name of a cluster or instance: it becomes part of a path."""
        return checked_name(self.text(key), self.where + key)

    def texts(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a list of strings (or the default)."""
        return self._get(
            key,
            default,
            lambda value: isinstance(value, list) and all(is_text(item) for item in value),
            "a list of strings without NUL",
        )

    def variables(self, key: str) -> Dict[str, str]:
        """Return environment variables; empty when absent."""
        values: Dict[str, str] = self._get(
            key,
            {},
            lambda value: isinstance(value, dict) and all(is_text(item) for item in value.values()),
            "an object of strings without NUL",
        )
        for name in values:
            if not VARIABLE_PATTERN.fullmatch(name):
                raise bad_request(f"field {self.where}{key}: {name!r} is no name for an environment variable")
        return dict(values)

    def items(self, key: str, default: Any = _REQUIRED) -> List[Any]:
        """Return a list of anything."""
        values: List[Any] = self._get(key, default, lambda value: isinstance(value, list), "a list")
        return values

    def mapping(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return an object (or the default)."""
        return self._get(key, default, lambda value: isinstance(value, dict), "an object")


def is_text(value: Any) -> bool:
    """Tell whether a JSON value can be an argument, a variable or a path: a string without NUL or lone surrogates."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: Any) -> bool:
    """Tell whether a JSON value is a finite number (JSON as Python reads it also knows NaN and infinities)."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value == value and abs(value) != float("inf"))


def checked_name(name: str, field: str) -> str:
    """Return the name, or raise ``bad-request`` when it cannot safely be part of a path."""
    if not NAME_PATTERN.fullmatch(name):
        raise bad_request(f"field {field}: {name!r} is no name; allowed are a-z, 0-9 and -, starting with a letter")
    if name == CONNECTOR_FOLDER and field == "cluster":
        raise bad_request(f"a cluster cannot be named {name!r}: ~/.pdctl/{name} holds the connector")
    return name


# -------------------------------------------------------------------------------------------------- files and paths


def home_folder() -> str:
    """Return the home of the login, from the user database when ``HOME`` is unset or no absolute path."""
    home = os.environ.get("HOME", "")
    if home.startswith("/"):
        return home
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        raise AgentError(
            "not-writable",
            f"HOME is not set and user id {os.getuid()} is in no user database, so there is no home folder",
            "set HOME for logins of that user",
        ) from None


def pdctl_home() -> str:
    """Return ``~/.pdctl``, or ``PDCTL_HOME`` when that is set."""
    return os.path.realpath(os.environ.get("PDCTL_HOME") or os.path.join(home_folder(), ".pdctl"))


def instance_folder(cluster: str, instance: str) -> str:
    """Return the folder of an instance; both names must have been checked."""
    return os.path.join(pdctl_home(), cluster, instance)


def os_error(error: OSError, path: str) -> AgentError:
    """Translate an error of the file system for a path that was to be written."""
    path = str(error.filename or path)
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return AgentError(
            "disk-full", f"cannot write {path}: {reason}", "free space on that file system (or raise the quota)"
        )
    return AgentError(
        "not-writable", f"cannot write {path}: {reason}", "check the owner, the mode and the mount of that path"
    )


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn any OSError inside into ``disk-full`` or ``not-writable`` for the path."""
    try:
        yield
    except OSError as error:
        raise os_error(error, path) from error


def make_private_folder(folder: str) -> None:
    """Make the folder of an instance and those above it up to ``~/.pdctl``, all 0700."""
    with writing(folder):
        os.makedirs(pdctl_home(), mode=0o700, exist_ok=True)
        for path in (os.path.dirname(folder), folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            # A file in the place of the folder, or a foreign owner, is found here and not later.
            os.listdir(path)
            if stat.S_IMODE(os.stat(path).st_mode) != 0o700:
                os.chmod(path, 0o700)


def sync_folder(folder: str) -> None:
    """Make renames inside a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_file(path: str, content: bytes, mode: int) -> None:
    """Write a file as a whole or not at all: temporary name, flush, rename."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with writing(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            try:
                os.fchmod(descriptor, mode)
                view = memoryview(content)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    sync_folder(os.path.dirname(path))


def write_json(path: str, value: Json, mode: int = 0o600) -> None:
    """Write a JSON file as a whole or not at all."""
    write_file(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode)


def read_json(path: str) -> Optional[Json]:
    """Read a JSON object; None when it is missing, unreadable or damaged."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read().decode())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def remove_file(path: str) -> None:
    """Remove a file that may be gone already."""
    with writing(path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def instance_lock(folder: str, command: str, wait_s: float) -> Iterator[int]:
    """Hold the instance's lock; raises ``busy`` when another process holds it for longer than ``wait_s``.

    Yields the descriptor: the supervisor keeps a copy until the instance is on record.
    """
    path = os.path.join(folder, "lock")
    deadline = time.monotonic() + wait_s
    while True:
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A purge may have removed the file between open and flock: such a lock excludes nobody.
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            os.close(descriptor)
            raise os_error(error, path) from error
        holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise AgentError(
                "busy",
                f"another pdctl is working on this instance ({holder or 'unknown'}); lock {path}",
                "wait until it has finished and try again",
            )
        time.sleep(0.05)
    try:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{command}, pid {os.getpid()}".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


# -------------------------------------------------------------------------------------------------------- processes


class Process(NamedTuple):
    """One process as ``/proc`` shows it. ``marker`` and ``folder`` are empty unless it carries ours."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    threads: int
    create_time: int
    cpu_ticks: int
    rss_pages: int
    name: str
    marker: str = ""
    folder: str = ""

    @property
    def alive(self) -> bool:
        """False for a zombie; a dead first thread whose other threads still run is alive."""
        return self.state not in "ZXx" or self.threads > 1

    @property
    def identity(self) -> Tuple[int, int]:
        """Pid and create time: what a recycled pid does not share."""
        return (self.pid, self.create_time)


def parse_stat(text: str) -> Optional[Process]:
    """Parse ``/proc/PID/stat`` (proc(5)); None when it is cut short. The name may hold spaces and parentheses."""
    opening, closing = text.find("("), text.rfind(")")
    fields = text[closing + 1 :].split()
    if opening < 1 or closing < opening or len(fields) < 22:
        return None
    try:
        return Process(
            pid=int(text[:opening]),
            parent=int(fields[1]),
            group=int(fields[2]),
            session=int(fields[3]),
            state=fields[0],
            threads=int(fields[17]),
            create_time=int(fields[19]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            rss_pages=int(fields[21]),
            name=text[opening + 1 : closing],
        )
    except ValueError:
        return None


def parse_environ(data: bytes) -> Tuple[str, str]:
    """Return marker and instance folder from ``/proc/PID/environ``; empty strings when they are not there."""
    marker = folder = ""
    for entry in data.split(b"\0"):
        if entry.startswith(b"PDCTL_MARKER="):
            marker = os.fsdecode(entry[len(b"PDCTL_MARKER=") :])
        elif entry.startswith(b"PDCTL_INSTANCE_FOLDER="):
            folder = os.fsdecode(entry[len(b"PDCTL_INSTANCE_FOLDER=") :])
    return marker, folder


def read_process(pid: int) -> Optional[Process]:
    """Read one process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return parse_stat(file.read().decode("utf-8", "replace"))
    except OSError:
        return None


def read_marker(pid: int) -> Tuple[str, str]:
    """Return marker and folder of a process; empty when it is gone, another user's, or of another container.

    Without the last condition a machine would take the processes inside its containers for its own: their paths and
    cluster names may well be the same.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read()
        if b"PDCTL_MARKER=" not in data:
            return "", ""
        if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return "", ""
    except OSError:
        return "", ""
    return parse_environ(data)


def scan_processes() -> Dict[int, Process]:
    """Read all processes, with the markers of those whose environment may be read. One pass over ``/proc``."""
    processes = {}
    own = os.getpid()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        process = read_process(int(entry))
        if process is None or process.pid == own:
            continue
        marker, folder = read_marker(process.pid)
        processes[process.pid] = process._replace(marker=marker, folder=folder)
    return processes


def read_argv(pid: int) -> List[str]:
    """Return the argv of a process; empty when it is gone or a kernel thread."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode("utf-8", "replace").rstrip("\0 ").split("\0")
    except OSError:
        return []


def boot_id() -> str:
    """Return the id of this boot; empty when the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def send_signal(process: Process, number: int) -> None:
    """Signal a process, unless its pid meanwhile belongs to another one."""
    descriptor = -1
    try:
        # With a pidfd there is no moment between the check and the signal (Python 3.9, Linux 5.3).
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(process.pid)
        current = read_process(process.pid)
        if current is None or current.identity != process.identity:
            return
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, number)
        else:
            os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class Membership:
    """Which processes belong to an instance.

    Marked ones always do. The session of the main process does while that main process is seen (even as a zombie), and
    afterwards as long as some process of the last look is still there: until then the kernel cannot give the number
    of the session to anyone else.
    """

    def __init__(self, marker_prefix: str, folder: str, main: Optional[Tuple[int, int]]) -> None:
        self.marker_prefix = marker_prefix
        self.folder = folder
        self.main = main
        self._witnesses = {main} if main else set()

    def select(self, processes: Dict[int, Process]) -> List[Process]:
        """Return the instance's processes, zombies included; call it with one scan after the other."""
        session = 0
        if self.main and any(pid in processes and processes[pid].create_time == t for pid, t in self._witnesses):
            session = self.main[0]
        found = []
        witnesses = set()
        for process in processes.values():
            in_session = session != 0 and session in (process.session, process.group)
            if in_session:
                witnesses.add(process.identity)
            if in_session or (process.marker.startswith(self.marker_prefix) and process.folder == self.folder):
                found.append(process)
        self._witnesses = witnesses
        return found


class Instance:
    """What the node knows of one instance at one moment."""

    def __init__(self, cluster: str, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.folder = instance_folder(cluster, name)
        self.state = read_state(self.folder)

    @property
    def marker_prefix(self) -> str:
        """The marker without its start id."""
        return f"{self.cluster}/{self.name}/"

    @property
    def main(self) -> Optional[Tuple[int, int]]:
        """Identity of the main process on record; None without a record of this boot."""
        if self.state is None or self.state["boot_id"] != boot_id():
            return None
        return (self.state["pid"], self.state["create_time"])

    @property
    def start_id(self) -> str:
        """Id of the start on record, or empty."""
        return str(self.state["start_id"]) if self.state else ""

    def membership(self) -> Membership:
        """Return a fresh tracker of this instance's processes."""
        return Membership(self.marker_prefix, self.folder, self.main)

    def main_alive(self) -> bool:
        """Tell whether the main process on record runs; one small read."""
        if self.main is None:
            return False
        process = read_process(self.main[0])
        return process is not None and process.identity == self.main and process.alive

    def find_leader(self, members: List[Process]) -> Optional[Process]:
        """Return the running main process: the one on record or, with the record lost, a marked session leader."""
        for process in members:
            if process.alive:
                if process.identity == self.main:
                    return process
                if self.state is None and process.pid == process.session:
                    return process
        return None

    def exit(self, settle_s: float = 0.0) -> Optional[Json]:
        """Return how the start on record ended, or None; waits up to ``settle_s`` for a supervisor that still runs."""
        deadline = time.monotonic() + settle_s
        while True:
            ended = read_json(os.path.join(self.folder, "exit.json"))
            if ended is not None and self.start_id in ("", ended.get("start_id")):
                return {"code": ended.get("code"), "signal": ended.get("signal"), "at": ended.get("at")}
            if time.monotonic() >= deadline or self.supervisor() is None:
                return None
            time.sleep(0.02)

    def supervisor(self) -> Optional[Process]:
        """Return the supervisor of the start on record, if it runs."""
        if self.state is None or self.state["boot_id"] != boot_id():
            return None
        process = read_process(self.state["supervisor_pid"])
        if process is None or not process.alive or process.create_time != self.state["supervisor_create_time"]:
            return None
        return process


def read_state(folder: str) -> Optional[Json]:
    """Read ``state.json``; None when it is missing or not one of ours."""
    state = read_json(os.path.join(folder, "state.json"))
    if state is None:
        return None
    wholes = ("pid", "create_time", "supervisor_pid", "supervisor_create_time")
    texts = ("boot_id", "start_id", "digest")
    if all(isinstance(state.get(key), int) and state[key] > 0 for key in wholes) and all(
        isinstance(state.get(key), str) for key in texts
    ):
        return state
    return None


# ------------------------------------------------------------------------------------------------------------- stop


def end_processes(instance: Instance, grace_s: float, kill_grace_s: float) -> Tuple[Optional[str], List[Process]]:
    """End every process of an instance: SIGTERM, up to ``grace_s``, SIGKILL, up to ``kill_grace_s``.

    Returns the strongest signal that was used (None when nothing ran) and the processes that are still there.
    """
    membership = instance.membership()
    alive = [process for process in membership.select(scan_processes()) if process.alive]
    if not alive:
        return None, []
    # One SIGTERM each, and none to what starts later: servers take a second one as an order to drop their requests,
    # and a clean shutdown may run programs. The group at once, so that a process forked at this moment is not missed.
    used = "SIGTERM"
    group = 0
    if instance.main is not None and instance.main_alive():
        group = instance.main[0]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGTERM)
    for process in alive:
        if not group or process.group != group:
            send_signal(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    quiet = 0
    interval = 0.02
    while True:
        for process in alive:
            if used == "SIGKILL":
                send_signal(process, signal.SIGKILL)
            elif process.state in "Tt":
                send_signal(process, signal.SIGCONT)
        # A process forked during a scan by one that then ends could be missed once, not twice.
        quiet = 0 if alive else quiet + 1
        if quiet >= 2:
            return used, []
        if alive and time.monotonic() >= deadline:
            if used == "SIGKILL":
                return used, alive
            used = "SIGKILL"
            deadline = time.monotonic() + kill_grace_s
            continue
        time.sleep(interval)
        interval = min(interval * 1.5, 0.1)
        alive = [process for process in membership.select(scan_processes()) if process.alive]


def end_supervisor(instance: Instance) -> None:
    """Let the supervisor write ``exit.json``; one that does not end by itself (a stopped one) is killed."""
    deadline = time.monotonic() + 3
    while True:
        supervisor = instance.supervisor()
        if supervisor is None:
            return
        if time.monotonic() >= deadline:
            send_signal(supervisor, signal.SIGKILL)
            return
        if supervisor.state in "Tt":
            send_signal(supervisor, signal.SIGCONT)
        time.sleep(0.02)


def stop_locked(instance: Instance, grace_s: float, kill_grace_s: float) -> Json:
    """End an instance whose lock is held, and forget its record."""
    began = time.monotonic()
    used, left = end_processes(instance, grace_s, kill_grace_s)
    if left:
        names = ", ".join(f"{process.pid} ({process.name}, state {process.state})" for process in left[:10])
        raise AgentError(
            "leftover-processes",
            f"{instance.cluster}/{instance.name}: still there after SIGKILL: {names}",
            "state D means stuck in the kernel (a device or a network file system): see dmesg; it may need a reboot",
            {"leftover": [process.pid for process in left]},
        )
    end_supervisor(instance)
    remove_file(os.path.join(instance.folder, "state.json"))
    return {
        "action": "stopped" if used else "not-running",
        "signal": used,
        "took_s": round(time.monotonic() - began, 3),
        "leftover": [],
    }


def command_stop(request: Request) -> Json:
    """End all processes of an instance; also what a lost main process has left behind."""
    cluster, name = request.name("cluster"), request.name("instance")
    grace_s = request.number("grace_s", 30, maximum=3600)
    kill_grace_s = request.number("kill_grace_s", 10, maximum=3600)
    only: Optional[str] = request.text("only_launch_id", None)
    instance = Instance(cluster, name)
    if not os.path.isdir(instance.folder):
        if only is not None:
            return {"action": "not-running", "signal": None, "took_s": 0.0, "leftover": []}
        # Somebody removed the folder: what still runs is found by its marker, and needs no lock.
        used, left = end_processes(instance, grace_s, kill_grace_s)
        leftover = [process.pid for process in left]
        if left:
            raise AgentError(
                "leftover-processes",
                f"{cluster}/{name}: still there after SIGKILL: {', '.join(map(str, leftover))}",
                "see dmesg; it may need a reboot",
                {"leftover": leftover},
            )
        return {"action": "stopped" if used else "not-running", "signal": used, "took_s": 0.0, "leftover": []}
    # Two stops at once: the second one waits for the first and then finds nothing to do.
    with instance_lock(instance.folder, "stop", max(LOCK_WAIT_S, grace_s)):
        instance = Instance(cluster, name)
        if only is not None and (instance.state or {}).get("launch_id") != only:
            return {"action": "not-running", "signal": None, "took_s": 0.0, "leftover": []}
        return stop_locked(instance, grace_s, kill_grace_s)


# ------------------------------------------------------------------------------------------------------------ ports


class Socket(NamedTuple):
    """A TCP socket of ``/proc/net/tcp`` or ``tcp6``."""

    port: int
    listening: bool
    user: int
    inode: int


def parse_sockets(text: str) -> List[Socket]:
    """Parse ``/proc/net/tcp`` or ``tcp6``: local port, state, owner and inode; lines that do not fit are skipped."""
    sockets = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        try:
            port = int(fields[1].rpartition(":")[2], 16)
            sockets.append(Socket(port, fields[3] == "0A", int(fields[7]), int(fields[9])))
        except (IndexError, ValueError):
            continue
    return sockets


def find_holder(port: int) -> Json:
    """Tell who has a TCP port: ``{pid, argv, user, instance}``; what cannot be seen is None."""
    sockets: List[Socket] = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}", encoding="ascii", errors="replace") as file:
            sockets += [entry for entry in parse_sockets(file.read()) if entry.port == port and entry.inode]
    # A listening socket first: its accepted connections have the same local port.
    sockets.sort(key=lambda entry: not entry.listening)
    wanted = {f"socket:[{entry.inode}]" for entry in sockets if entry.listening == sockets[0].listening}
    holder: Json = {"pid": None, "argv": [], "user": user_name(sockets[0].user) if sockets else None, "instance": None}
    for entry in os.listdir("/proc") if wanted else []:
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{entry}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/fd/{descriptor}") in wanted:
                        holder["pid"] = int(entry)
                        holder["argv"] = read_argv(int(entry))
                        holder["instance"] = read_marker(int(entry))[0].rpartition("/")[0] or None
                        return holder
    return holder


def user_name(user: int) -> str:
    """Return the name of a user id, or the id as text."""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def describe_holder(holder: Json) -> str:
    """Say in words who holds a port."""
    if holder["pid"] is None:
        if holder["user"] is None:
            return "an unknown process"
        return f"a process of user {holder['user']} (not visible to this login)"
    import shlex

    argv = " ".join(shlex.quote(word) for word in holder["argv"])
    argv = argv[:197] + "..." if len(argv) > 200 else argv
    instance = f"pdctl instance {holder['instance']}, " if holder["instance"] else ""
    return f"{instance}pid {holder['pid']}: {argv}"


class PortRequest(NamedTuple):
    """A port that an instance is about to open."""

    port: int
    purpose: str
    address: str


def parse_ports(request: Request) -> List[PortRequest]:
    """Read the ``ports`` of a start."""
    ports = []
    for index, item in enumerate(request.items("ports", [])):
        entry = Request(item, f"ports[{index}]")
        number = entry.number("port", maximum=65535)
        if number < 1 or number != int(number):
            raise bad_request(f"field ports[{index}].port must be a whole number from 1 to 65535")
        ports.append(PortRequest(int(number), entry.text("purpose", ""), entry.text("address", "") or "0.0.0.0"))
    return ports


def try_bind(wanted: PortRequest) -> Optional[OSError]:
    """Bind and listen as a server would (with SO_REUSEADDR, so TIME_WAIT does not matter); return why it fails."""
    try:
        candidates = socket.getaddrinfo(wanted.address, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = candidates[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def check_ports(ports: List[PortRequest]) -> None:
    """Raise the error that says which of the ports cannot be opened, and why."""
    taken = []
    holders = []
    for wanted in ports:
        error = try_bind(wanted)
        if error is None:
            continue
        where = f"{wanted.address} port {wanted.port}" + (f" ({wanted.purpose})" if wanted.purpose else "")
        if error.errno == errno.EADDRINUSE:
            holder = find_holder(wanted.port)
            holders.append({"port": wanted.port, "purpose": wanted.purpose, "address": wanted.address, **holder})
            taken.append(f"{where} is held by {describe_holder(holder)}")
        elif isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise AgentError(
                "address-not-local",
                f"cannot listen on {where}: {wanted.address} is no address of this machine",
                "give this host's own data-plane address (see `ip address`)",
            )
        elif error.errno in (errno.EACCES, errno.EPERM):
            raise AgentError(
                "port-not-allowed",
                f"cannot listen on {where}: {error.strerror}",
                "ports below net.ipv4.ip_unprivileged_port_start (1024) need root; choose a higher one",
            )
        else:
            raise AgentError("port-in-use", f"cannot listen on {where}: {error}")
    if taken:
        raise AgentError(
            "port-in-use",
            "; ".join(taken),
            "end that process, or choose other ports in the cluster file",
            {"holders": holders},
        )


# ------------------------------------------------------------------------------------------------------------ start


def quote_for_sh(value: str) -> str:
    """Quote any text for sh, always with quotes."""
    return "'" + value.replace("'", "'\\''") + "'"


def format_env_file(variables: Dict[str, str]) -> str:
    """Return the text of the ``env`` file: sh syntax, one export for each variable."""
    lines = [
        "# Written by pdctl at each start. May hold secrets: keep it private.",
        *(f"export {name}={quote_for_sh(value)}" for name, value in sorted(variables.items())),
    ]
    return "\n".join(lines) + "\n"


class Placeholders:
    """Fills in what only the node knows: ``@START_ID@`` and ``@HOME@``.

    ``@HOME@/.pdctl`` follows ``PDCTL_HOME``, so that it always is the folder which ``ship`` writes to.
    """

    def __init__(self, home: str, pdctl: str, start_id: str) -> None:
        self.home = home
        self.pdctl = pdctl
        self.start_id = start_id

    def fill(self, text: str) -> str:
        """Return the text with all placeholders replaced."""
        if "@HOME@" in text:
            for path in (self.home, self.pdctl):
                if not SHELL_SAFE_PATTERN.fullmatch(path):
                    raise AgentError("bad-request", f"the home folder {path!r} has characters that need quoting in sh")
        text = re.sub(r"@HOME@/\.pdctl(?=[/:'\"\s]|$)", lambda _: self.pdctl, text)
        return text.replace("@HOME@", self.home).replace("@START_ID@", self.start_id)


def rotate_logs(folder: str) -> None:
    """Move ``vllm.log`` to ``.1`` and so on; the oldest is lost. An empty one stays where it is."""
    path = os.path.join(folder, LOG_NAME)
    with writing(path):
        try:
            if os.stat(path).st_size == 0:
                return
        except FileNotFoundError:
            return
        for number in range(LOGS_KEPT, 0, -1):
            source = path if number == 1 else f"{path}.{number - 1}"
            with contextlib.suppress(FileNotFoundError):
                os.replace(source, f"{path}.{number}")


def own_environment() -> Dict[str, str]:
    """Return this process's environment as UTF-8, whatever the locale: the instance gets its variables in UTF-8."""
    return {
        name.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
        for name, value in os.environb.items()
    }


def own_source() -> bytes:
    """Return the text of this file, which the supervisor runs from."""
    source = globals().get("SOURCE")
    if isinstance(source, bytes):
        return source
    with open(__file__, "rb") as file:
        return file.read()


def check_program(argv: List[str]) -> None:
    """Raise ``no-python`` when the program is named by a path that cannot be run.

    One without a slash is left to the launch script, which may set another PATH.
    """
    program = argv[0]
    if not program.startswith("/"):
        return
    if not os.path.isfile(program):
        raise AgentError(
            "no-python", f"{program} does not exist on this host", "set `python` in the cluster file for this host"
        )
    if not os.access(program, os.X_OK):
        raise AgentError("no-python", f"{program} cannot be run by this login", "check its mode")


def command_start(request: Request) -> Json:
    """Start an instance, unless it runs already; returns once ``launch.sh`` was really executed."""
    cluster, name = request.name("cluster"), request.name("instance")
    argv: List[str] = request.texts("argv")
    if not argv:
        raise bad_request("field argv is empty")
    script: str = request.text("launch_script")
    digest: str = request.text("digest")
    plain, secret = request.variables("env"), request.variables("secret_env")
    ports = parse_ports(request)
    restart_changed = request.flag("restart_changed")
    # Names the launch that asked, so that cleaning up after it (``stop`` with ``only_launch_id``) ends nothing else.
    launch_id: Optional[str] = request.text("launch_id", None)
    grace_s = request.number("grace_s", 30, maximum=3600)
    kill_grace_s = request.number("kill_grace_s", 10, maximum=3600)

    folder = instance_folder(cluster, name)
    make_private_folder(folder)
    with instance_lock(folder, "start", LOCK_WAIT_S) as lock:
        instance = Instance(cluster, name)
        members = [process for process in instance.membership().select(scan_processes()) if process.alive]
        if instance.find_leader(members) is not None:
            if instance.state is not None and instance.state["digest"] == digest:
                return {"action": "already-running", "state": instance.state}
            if not restart_changed:
                return {"action": "changed", "state": instance.state}
        start_id = os.urandom(6).hex()
        placeholders = Placeholders(home_folder(), pdctl_home(), start_id)
        argv = [placeholders.fill(word) for word in argv]
        check_program(argv)
        if members:
            # Either a restart, or workers whose main process is gone: they would hold ports and device memory.
            stop_locked(instance, grace_s, kill_grace_s)
        check_ports(ports)

        marker = f"{cluster}/{name}/{start_id}"
        variables = {key: placeholders.fill(value) for key, value in plain.items()}
        variables.update(secret)
        variables.update(
            PDCTL_MARKER=marker,
            PDCTL_INSTANCE_FOLDER=folder,
            PDCTL_START_ID=start_id,
            # vLLM renames its processes: without this, setproctitle writes over the environment and so the marker.
            SPT_NOENV="1",
        )
        for stale in ("state.json", "exit.json", GATE_NAME):
            remove_file(os.path.join(folder, stale))
        write_file(os.path.join(folder, "env"), format_env_file(variables).encode(), 0o600)
        write_file(os.path.join(folder, "launch.sh"), placeholders.fill(script).encode(), 0o700)
        write_file(os.path.join(folder, "supervisor.py"), own_source(), 0o600)
        rotate_logs(folder)
        state = {
            "version": 1,
            "cluster": cluster,
            "instance": name,
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "argv": argv,
            "digest": digest,
            "start_id": start_id,
            "marker": marker,
            "ports": [entry._asdict() for entry in ports],
            "secret_names": sorted(secret),
            "launch_id": launch_id,
        }
        return {"action": "started", "state": run_supervisor(instance, state, {**own_environment(), **variables}, lock)}


def run_supervisor(instance: Instance, state: Json, environment: Dict[str, str], lock: int) -> Json:
    """Start the detached supervisor and wait for its word that the instance is on record and was executed."""
    import subprocess

    if not sys.executable:
        raise AgentError("no-python", "the path of the running Python is unknown, so it cannot be started again")
    folder = instance.folder
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PDCTL_")}
    receive, send = os.pipe()
    try:
        argv = [sys.executable, "-I", "-S", os.path.join(folder, "supervisor.py"), "pdctl-supervisor"]
        argv += [f"{instance.cluster}/{instance.name}", str(send), str(lock)]
        try:
            supervisor = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(send, lock),
                start_new_session=True,
                cwd="/",
                env=clean,
            )
        except OSError as error:
            raise AgentError("start-failed", f"cannot run {sys.executable}: {error}") from error
        os.close(send)
        send = -1
        order = json.dumps({"folder": folder, "state": state, "environment": environment}).encode()
        with contextlib.suppress(OSError):
            supervisor.communicate(order, timeout=SUPERVISOR_TIMEOUT_S)
        answer = b""
        deadline = time.monotonic() + SUPERVISOR_TIMEOUT_S
        while select.select([receive], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(receive, 65536)
            if not piece:
                break
            answer += piece
    except subprocess.TimeoutExpired:
        answer = b""
    finally:
        os.close(receive)
        if send >= 0:
            os.close(send)
    try:
        reply = json.loads(answer.decode())
    except ValueError:
        # Nothing half started may stay behind: neither the supervisor's group nor what it may have begun.
        with contextlib.suppress(OSError):
            os.killpg(supervisor.pid, signal.SIGKILL)
        stop_locked(Instance(instance.cluster, instance.name), 0, 10)
        raise AgentError(
            "start-failed",
            f"the supervisor of {instance.cluster}/{instance.name} ended or hung before it could start the instance",
            f"try by hand: {sys.executable} -I -S -c pass; and see the system's log",
        ) from None
    if "error" in reply:
        failure = reply["error"]
        remove_file(os.path.join(folder, "state.json"))
        raise AgentError(failure["code"], failure["message"], failure["hint"])
    started: Json = reply["state"]
    return started


# ------------------------------------------------------------------------------------------------------- supervisor


def supervise(report: int, lock: int) -> None:
    """Be the supervisor: start ``launch.sh``, put it on record, wait for its end and write ``exit.json``.

    Order on stdin as JSON. The instance is on record before it is executed, and is executed only if it is: at no moment
    does an instance run that nobody knows of, even if this process or the agent is killed.
    """
    order = json.loads(sys.stdin.buffer.read().decode())
    # Second fork: no session leader, so no terminal can ever become ours; the agent has nothing left to wait for.
    if os.fork():
        os._exit(0)
    os.set_inheritable(report, False)
    os.set_inheritable(lock, False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    folder, state, environment = order["folder"], order["state"], order["environment"]
    try:
        pid = launch(folder, state, environment)
        reply = {"state": state}
    except AgentError as error:
        pid = 0
        reply = {"error": error.to_json()}
    except BaseException:
        pid = 0
        reply = {"error": AgentError("internal", traceback.format_exc()).to_json()}
    os.close(lock)
    # The agent may be gone by now; the instance is not its child and goes on.
    with contextlib.suppress(OSError):
        os.write(report, json.dumps(reply).encode())
    os.close(report)
    if not pid:
        return
    del order, environment
    _, status = os.waitpid(pid, 0)
    ended: Json = {"code": None, "signal": None, "at": time.time(), "start_id": state["start_id"]}
    if os.WIFSIGNALED(status):
        ended["signal"] = signal_name(os.WTERMSIG(status))
    else:
        ended["code"] = os.WEXITSTATUS(status)
    # A later start has taken the folder over (this process was stopped for a while): its exit.json is not ours.
    current = read_state(folder)
    if current is None or current["start_id"] == state["start_id"]:
        write_json(os.path.join(folder, "exit.json"), ended)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def launch(folder: str, state: Json, environment: Dict[str, str]) -> int:
    """Fork, record and execute ``launch.sh``; completes ``state`` and returns the pid. Raises AgentError."""
    log_path = os.path.join(folder, LOG_NAME)
    with writing(log_path):
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    go_receive, go_send = os.pipe()
    failed_receive, failed_send = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go_send)
        os.close(failed_receive)
        become_instance(folder, environment, log, go_receive, failed_send)
    for descriptor in (log, go_receive, failed_send):
        os.close(descriptor)
    try:
        child, own = read_process(pid), read_process(os.getpid())
        if child is None or own is None:
            raise AgentError("start-failed", "cannot read /proc, which pdctl needs", "mount /proc on this host")
        state.update(
            pid=pid,
            create_time=child.create_time,
            supervisor_pid=own.pid,
            supervisor_create_time=own.create_time,
            started_at=time.time(),
        )
        write_json(os.path.join(folder, "state.json"), state)
        os.write(go_send, b"g")
    except BaseException:
        # Without the word the child ends by itself.
        os.close(go_send)
        os.close(failed_receive)
        os.waitpid(pid, 0)
        raise
    os.close(go_send)
    reason = b""
    while True:
        # Closed by a successful exec.
        piece = os.read(failed_receive, 4096)
        if not piece:
            break
        reason += piece
    os.close(failed_receive)
    if reason:
        os.waitpid(pid, 0)
        raise AgentError("start-failed", f"cannot run {folder}/launch.sh: {reason.decode('utf-8', 'replace')}")
    return pid


def become_instance(folder: str, environment: Dict[str, str], log: int, go: int, failed: int) -> NoReturn:
    """In the new process: own session, own limits, wait for the word, execute ``launch.sh``. Never returns."""
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        raise_limits()
        if os.read(go, 1) != b"g":
            os._exit(1)
        path = os.path.join(folder, "launch.sh")
        variables = {
            name.encode("utf-8", "surrogateescape"): value.encode("utf-8", "surrogateescape")
            for name, value in environment.items()
        }
        try:
            os.execve(path, [path], variables)
        except OSError as error:
            # No #! line, or a home that is mounted noexec.
            if error.errno not in (errno.ENOEXEC, errno.EACCES):
                raise
            os.execve("/bin/sh", ["/bin/sh", path], variables)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(failed, str(error).encode())
    os._exit(127)


def raise_limits() -> None:
    """Raise the soft limits of open files and locked memory to the hard ones: RDMA registration needs both."""
    import resource

    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (hard, hard))


# ------------------------------------------------------------------------------------------------------------- logs


class LogPiece(NamedTuple):
    """A piece of a log. ``offset`` is where to go on; ``skipped`` bytes before the text were left out."""

    text: str
    offset: int
    size: int
    inode: int
    skipped: int
    rotated: bool

    def to_json(self) -> Json:
        """Return the fields for an answer."""
        return dict(self._asdict())


def read_log(
    path: str,
    offset: Optional[int],
    *,
    limit: int,
    inode: Optional[int] = None,
    lines: Optional[int] = None,
    newest: bool = False,
) -> LogPiece:
    """Read new text of a log.

    Args:
        path: the log; a missing one is empty.
        offset: first byte wanted; None for the end of the log.
        limit: most bytes to read.
        inode: the file that the offset is of; another one, or a file shorter than the offset, is read from its start.
        lines: most lines, counted from the end (only without an offset).
        newest: when more than ``limit`` bytes are new, read the last ones and skip the others (else the first ones).
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; the `with` would hide the OSError of the open
    except OSError:
        return LogPiece("", 0, 0, 0, 0, False)
    with file:
        status = os.fstat(file.fileno())
        size = status.st_size
        rotated = (inode is not None and inode not in (0, status.st_ino)) or (offset is not None and offset > size)
        first = 0 if rotated else offset
        begin = first if first is not None else max(0, size - limit)
        if newest:
            begin = max(begin, size - limit)
        file.seek(begin)
        data = file.read(limit)
    cut = 0
    if begin > 0 and begin != first:
        # In the middle of a line, maybe of a character: begin with the next line.
        newline = data.find(b"\n")
        cut = newline + 1 if newline >= 0 else 0
        while newline < 0 and cut < min(3, len(data)) and data[cut] & 0xC0 == 0x80:
            cut += 1
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data[cut:])
    # The first bytes of a character whose others are not written yet are left for the next call.
    unfinished = len(decoder.getstate()[0])
    if first is None and lines is not None:
        text = last_lines(text, lines)
    skipped = 0 if first is None else begin - first + cut
    return LogPiece(text, begin + len(data) - unfinished, size, status.st_ino, skipped, rotated)


def last_lines(text: str, count: int) -> str:
    """Return the last lines of a text; only a newline ends a line (progress bars are full of carriage returns)."""
    position = len(text) - 1
    for _ in range(count):
        position = text.rfind("\n", 0, max(0, position))
        if position < 0:
            return text
    return text[position + 1 :]


def command_log(request: Request) -> Json:
    """Return a piece of an instance's log; waits up to ``wait_s`` for new bytes after the offset."""
    folder = instance_folder(request.name("cluster"), request.name("instance"))
    offset, inode = request.offset("offset"), request.offset("inode")
    lines = int(request.number("lines", 200, maximum=1e6))
    limit = int(request.number("max_bytes", OBSERVE_LOG_BYTES, maximum=4 * 1024 * 1024))
    deadline = time.monotonic() + request.number("wait_s", 0, maximum=600)
    if limit < 16:
        raise bad_request("field max_bytes must be at least 16")
    if not os.path.isdir(folder):
        raise AgentError("not-found", f"there is no {folder} on this host", "has the instance been started here?")
    while True:
        piece = read_log(os.path.join(folder, LOG_NAME), offset, limit=limit, inode=inode, lines=lines)
        if piece.text or piece.rotated or time.monotonic() >= deadline:
            return piece.to_json()
        time.sleep(0.1)


# ---------------------------------------------------------------------------------------------------------- observe


class Health:
    """Asks one health URL again and again in a thread of its own, so that a hung server delays nobody."""

    def __init__(self, url: str) -> None:
        import threading

        self.url = url
        self.ready = False
        self.answered = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.ready:
            answer = http_request(
                HttpRequest(
                    method="GET", url=self.url, headers={}, body=None, timeout_s=HEALTH_TIMEOUT_S, body_limit=65536
                )
            )
            self.ready = answer["status"] == 200
            self.answered = True
            time.sleep(HEALTH_INTERVAL_S)


class Watched:
    """An instance under observation, and what the caller already knows of it."""

    def __init__(self, cluster: str, name: str, known: Request) -> None:
        self.cluster = cluster
        self.name = name
        self.offset, self.inode = known.offset("offset"), known.offset("inode")
        self.ready = known.flag("ready")
        self.process = known.text("process", "running")
        url = known.text("http", None)
        self.health = Health(url) if url and not self.ready else None

    def look(self) -> Tuple[bool, Json]:
        """Return whether there is news, and the present state."""
        instance = Instance(self.cluster, self.name)
        ended = None
        if instance.state is None:
            process = "absent"
        elif instance.main_alive():
            process = "running"
        else:
            process = "exited"
            # Only at the change: the supervisor writes how it ended within milliseconds.
            ended = instance.exit(settle_s=1.0 if self.process != "exited" else 0.0)
        ready = process == "running" and (self.ready or (self.health is not None and self.health.ready))
        path = os.path.join(instance.folder, LOG_NAME)
        piece = read_log(path, self.offset, limit=OBSERVE_LOG_BYTES, inode=self.inode, newest=True)
        news = (
            process != self.process or (ready and not self.ready) or bool(piece.text or piece.skipped) or piece.rotated
        )
        return news, {
            "process": process,
            "exit": ended,
            "ready": ready,
            "log": piece.text,
            "offset": piece.offset,
            "inode": piece.inode,
            "skipped": piece.skipped,
            "rotated": piece.rotated,
            "start_id": instance.start_id,
        }


def command_observe(request: Request) -> Json:
    """Wait until an instance differs from what the caller knows of it, at most ``timeout_s``.

    Per instance the caller gives ``offset`` and ``inode`` of the log, ``process`` (default ``running``), ``ready`` and
    the URL whose answer 200 means ready (``http``).
    """
    cluster = request.name("cluster")
    deadline = time.monotonic() + request.number("timeout_s", 10, maximum=600)
    watched = []
    for name, known in request.mapping("instances").items():
        checked_name(name, "instances")
        watched.append(Watched(cluster, name, Request(known, f"instances.{name}")))
    # A server that logs its health requests always has news in its log: the health answer must get its chance too.
    patience = min(deadline, time.monotonic() + 0.5)
    while True:
        looks = {entry.name: entry.look() for entry in watched}
        changed = sorted(name for name, (news, _) in looks.items() if news)
        remaining = deadline - time.monotonic()
        asking = any(entry.health is not None and not entry.health.answered for entry in watched)
        if remaining <= 0 or (changed and not (asking and time.monotonic() < patience)):
            return {"instances": {name: found for name, (_, found) in looks.items()}, "changed": changed}
        time.sleep(min(OBSERVE_INTERVAL_S, remaining))


# ----------------------------------------------------------------------------------------------------------- status


def describe_instance(instance: Instance, processes: Dict[int, Process], log_lines: int) -> Json:
    """Return the status of one instance, given one scan of all processes."""
    ticks = os.sysconf("SC_CLK_TCK")
    page = os.sysconf("SC_PAGE_SIZE")
    members = sorted(instance.membership().select(processes), key=lambda process: process.create_time)
    leader = instance.find_leader(members)
    state = instance.state or {}
    if leader is not None:
        process = "running"
    elif instance.state is not None or any(member.alive for member in members):
        process = "exited"
    else:
        process = "absent"
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME) - leader.create_time / ticks if leader else None
    return {
        "process": process,
        "pid": leader.pid if leader else state.get("pid"),
        "create_time": leader.create_time if leader else state.get("create_time"),
        "uptime_s": None if uptime is None else round(max(0.0, uptime), 2),
        "rss_bytes": sum(member.rss_pages for member in members if member.alive) * page,
        "cpu_s": round(sum(member.cpu_ticks for member in members) / ticks, 2),
        "processes": [
            {
                "pid": member.pid,
                "parent": member.parent,
                "name": member.name,
                "state": member.state,
                "create_time": member.create_time,
                "rss_bytes": member.rss_pages * page,
                "cpu_s": round(member.cpu_ticks / ticks, 2),
            }
            for member in members
        ],
        "exit": None if process == "running" else instance.exit(settle_s=0.5 if process == "exited" else 0.0),
        "digest": state.get("digest"),
        "start_id": state.get("start_id"),
        "started_at": state.get("started_at"),
        "argv": state.get("argv", []),
        "ports": state.get("ports", []),
        "host": state.get("host"),
        "log_tail": read_log(os.path.join(instance.folder, LOG_NAME), None, limit=16384, lines=log_lines).text,
    }


def known_instances(cluster: str, processes: Dict[int, Process]) -> List[str]:
    """Return the instances that have a folder on this node, or processes without one."""
    folder = os.path.join(pdctl_home(), cluster)
    names: Set[str] = set()
    with contextlib.suppress(OSError):
        names.update(entry.name for entry in os.scandir(folder) if entry.is_dir())
    for process in processes.values():
        if process.marker.startswith(cluster + "/") and os.path.dirname(process.folder) == folder:
            names.add(os.path.basename(process.folder))
    return sorted(name for name in names if NAME_PATTERN.fullmatch(name))


def command_status(request: Request) -> Json:
    """Describe instances of a cluster (all with ``null``), and name those on this node that were not asked for.

    ``http`` holds requests by instance; those of running instances are made, all at once.

    The memory of an instance is the sum over its processes: pages that they share count more than once.
    """
    cluster = request.name("cluster")
    asked: Optional[List[str]] = request.texts("instances", None)
    log_lines = int(request.number("log_lines", 20, maximum=1000))
    for name in asked or []:
        checked_name(name, "instances")
    questions = {
        checked_name(name, "http"): [parse_http_request(item, index) for index, item in enumerate(items)]
        for name, items in request.mapping("http", {}).items()
    }
    processes = scan_processes()
    present = known_instances(cluster, processes)
    wanted = present if asked is None else asked
    instances = {name: describe_instance(Instance(cluster, name), processes, log_lines) for name in wanted}
    running = [name for name in questions if instances.get(name, {}).get("process") == "running"]
    answers = iter(run_http_requests([q for name in running for q in questions[name]], HTTP_MAX_IN_FLIGHT, False))
    return {
        "instances": instances,
        "http": {name: [next(answers) for _ in questions[name]] for name in running},
        "unknown": {
            name: describe_instance(Instance(cluster, name), processes, 0) for name in present if name not in wanted
        },
        "boot_id": boot_id(),
        "at": time.time(),
    }


# ------------------------------------------------------------------------------------------------------------- HTTP


class HttpRequest(NamedTuple):
    """A request to make from this node."""

    method: str
    url: str
    headers: Dict[str, str]
    body: Optional[bytes]
    timeout_s: float
    body_limit: int = HTTP_BODY_LIMIT


def http_request(request: HttpRequest) -> Json:
    """Make one HTTP request, directly (no proxy) and without following redirects.

    Returns ``{status, headers, body, truncated, duration_s, error}``; ``error`` is None or ``{kind, message}``. What
    arrived before an error is kept.
    """
    import http.client
    import urllib.parse

    began = time.monotonic()
    deadline = began + request.timeout_s
    answer: Json = {"status": None, "headers": {}, "body": "", "truncated": False, "duration_s": 0.0, "error": None}
    body = bytearray()
    connection: Optional[http.client.HTTPConnection] = None
    try:
        parts = urllib.parse.urlsplit(request.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{request.url!r} is no http URL")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=max(0.001, request.timeout_s))
        connection.connect()
        channel = connection.sock
        channel.settimeout(max(0.001, deadline - time.monotonic()))
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request(request.method, target, request.body, {"Connection": "close", **request.headers})
        response = connection.getresponse()
        answer["status"] = response.status
        answer["headers"] = {name.lower(): value for name, value in response.getheaders()}
        # read1() does not count the length down in every version of Python.
        length = response.length
        while length is None or len(body) < length:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise socket.timeout("timed out")
            channel.settimeout(remaining)
            piece = response.read1(65536)
            if not piece:
                break
            body += piece
            if len(body) > request.body_limit:
                answer["truncated"] = True
                del body[request.body_limit :]
                break
        if length is not None and len(body) < length and request.method != "HEAD" and not answer["truncated"]:
            raise http.client.IncompleteRead(b"", length - len(body))
    except Exception as error:
        answer["error"] = {"kind": http_error_kind(error), "message": str(error) or type(error).__name__}
    finally:
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
    answer["body"] = body.decode("utf-8", "replace")
    answer["duration_s"] = round(time.monotonic() - began, 6)
    return answer


def http_error_kind(error: BaseException) -> str:
    """Sort an error of a request: refused, timeout, name, reset, unreachable, tls, protocol, bad-request or other."""
    import http.client

    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "timeout"
    if isinstance(error, socket.gaierror):
        return "name"
    if isinstance(error, (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected)):
        return "reset"
    if isinstance(error, OSError):
        if type(error).__module__ == "ssl":
            return "tls"
        unreachable = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)
        return "unreachable" if error.errno in unreachable else "other"
    if isinstance(error, http.client.InvalidURL):
        return "bad-request"
    if isinstance(error, http.client.HTTPException):
        return "protocol"
    return "bad-request" if isinstance(error, (ValueError, UnicodeError)) else "other"


def parse_http_request(item: Any, index: int) -> HttpRequest:
    """Read one entry of ``requests``."""
    entry = Request(item, f"requests[{index}]")
    headers: Dict[str, str] = entry.mapping("headers", {})
    if not all(is_text(value) for value in headers.values()):
        raise bad_request(f"field requests[{index}].headers must be an object of strings")
    headers = dict(headers)
    body: Optional[bytes] = None
    text = entry.text("body", None)
    if text is not None:
        body = text.encode()
    elif "json" in entry.fields and entry.fields["json"] is not None:
        body = json.dumps(entry.fields["json"]).encode()
        if "content-type" not in {name.lower() for name in headers}:
            headers["Content-Type"] = "application/json"
    return HttpRequest(
        method=entry.text("method", "GET" if body is None else "POST"),
        url=entry.text("url"),
        headers=headers,
        body=body,
        timeout_s=entry.number("timeout_s", 10, maximum=3600),
    )


def run_http_requests(requests: List[HttpRequest], in_flight: int, until_first_error: bool) -> List[Optional[Json]]:
    """Make requests, at most ``in_flight`` at once; the answers are in the order of the requests, None for not made.

    Each has a thread that can be given up: name resolution and a server that sends byte by byte know no time-out.
    """
    import queue
    import threading

    answers: List[Optional[Json]] = [None] * len(requests)
    finished: queue.Queue[Tuple[int, Json]] = queue.Queue()
    deadlines: Dict[int, float] = {}
    following = 0
    stopped = False

    def make(index: int) -> None:
        finished.put((index, http_request(requests[index])))

    while True:
        while not stopped and following < len(requests) and len(deadlines) < in_flight:
            deadlines[following] = time.monotonic() + requests[following].timeout_s + 1
            threading.Thread(target=make, args=(following,), daemon=True).start()
            following += 1
        if not deadlines:
            return answers
        overdue = min(deadlines, key=lambda index: deadlines[index])
        try:
            index, answer = finished.get(timeout=max(0.0, deadlines[overdue] - time.monotonic()))
        except queue.Empty:
            index, timeout_s = overdue, requests[overdue].timeout_s
            answer = {"status": None, "headers": {}, "body": "", "truncated": False, "duration_s": timeout_s + 1}
            answer["error"] = {"kind": "timeout", "message": f"no complete answer within {timeout_s:g} s"}
        if deadlines.pop(index, None) is None:
            continue
        answers[index] = answer
        if until_first_error and (answer["error"] is not None or answer["status"] >= 400):
            stopped = True


def command_http(request: Request) -> Json:
    """Make HTTP requests from this node, one after the other or (``parallel``) all at once."""
    items = request.items("requests")
    if len(items) > HTTP_MAX_REQUESTS:
        raise bad_request(f"field requests has {len(items)} entries; at most {HTTP_MAX_REQUESTS} are allowed")
    requests = [parse_http_request(item, index) for index, item in enumerate(items)]
    in_flight = HTTP_MAX_IN_FLIGHT if request.flag("parallel") else 1
    return {"responses": run_http_requests(requests, in_flight, request.flag("until_first_error"))}


# ------------------------------------------------------------------------------------------------------------- ship


def content_digest(files: Dict[str, bytes]) -> str:
    """Return the digest of a set of files.

    SHA-256 over, for each path in sorted order: the path in UTF-8, NUL, the length of the content in decimal ASCII,
    NUL, the content.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.encode() + b"\0" + str(len(files[path])).encode() + b"\0" + files[path])
    return digest.hexdigest()


def is_cache(path: str) -> bool:
    """Tell whether a path is what Python itself writes beside sources; it is no part of a shipment."""
    return "__pycache__" in path.split("/") or path.endswith(".pyc")


def checked_files(encoded: Json) -> Dict[str, bytes]:
    """Decode the files of a shipment; refuses every path that could leave the folder."""
    if not encoded or len(encoded) > SHIP_MAX_FILES:
        raise bad_request(f"field files must have 1 to {SHIP_MAX_FILES} entries")
    files = {}
    for path, text in encoded.items():
        if not is_text(path) or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise bad_request(f"field files: {path!r} is no relative path inside the folder")
        if is_cache(path):
            raise bad_request(f"field files: {path!r} is a cache file")
        try:
            files[path] = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise bad_request(f"field files: the content of {path!r} is no base64") from None
    if sum(len(content) for content in files.values()) > SHIP_MAX_BYTES:
        raise bad_request(f"field files holds more than {SHIP_MAX_BYTES} bytes")
    return files


def shipment_is_whole(folder: str, digest: str) -> bool:
    """Tell whether a folder holds exactly the files of the digest (apart from Python's caches)."""
    files = {}
    try:
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                path = os.path.join(parent, name)
                relative = os.path.relpath(path, folder)
                if not is_cache(relative):
                    with open(path, "rb") as file:
                        files[relative] = file.read()
    except (OSError, UnicodeError):
        return False
    try:
        return bool(files) and content_digest(files) == digest
    except UnicodeEncodeError:
        return False


def command_ship(request: Request) -> Json:
    """Put a set of files into ``~/.pdctl/connector/<digest>``, whole or not at all; without ``files`` only ask."""
    digest = request.text("digest")
    if not DIGEST_PATTERN.fullmatch(digest):
        raise bad_request("field digest must be 64 hexadecimal digits")
    parent = os.path.join(pdctl_home(), CONNECTOR_FOLDER)
    target = os.path.join(parent, digest)
    encoded = request.mapping("files", None)
    if shipment_is_whole(target, digest):
        return {"present": True, "path": target, "written": False}
    if encoded is None:
        return {"present": False, "path": target, "written": False}
    files = checked_files(encoded)
    found = content_digest(files)
    if found != digest:
        raise bad_request(f"the files have digest {found}, not {digest} as announced")
    with writing(parent):
        os.makedirs(pdctl_home(), mode=0o700, exist_ok=True)
        os.makedirs(parent, mode=0o755, exist_ok=True)
        remove_stale_shipments(parent)
        temporary = os.path.join(parent, f".tmp-{digest[:16]}-{os.getpid()}-{os.urandom(4).hex()}")
        try:
            write_shipment(temporary, files)
            if not shipment_is_whole(temporary, digest):
                raise AgentError("not-writable", f"{temporary} does not read back as it was written", "check the disk")
            move_shipment(temporary, target, digest)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return {"present": True, "path": target, "written": True}


def write_shipment(folder: str, files: Dict[str, bytes]) -> None:
    """Write files below a new folder: 0755 for folders, 0644 for files."""
    os.mkdir(folder, 0o755)
    folders = {folder}
    for path, content in files.items():
        target = os.path.join(folder, path)
        parent = os.path.dirname(target)
        try:
            os.makedirs(parent, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise bad_request(f"field files: {path!r} lies below another file") from None
        while parent not in folders:
            folders.add(parent)
            parent = os.path.dirname(parent)
        if os.path.isdir(target):
            raise bad_request(f"field files: {path!r} is also a folder")
        write_file(target, content, 0o644)
    for path in folders:
        os.chmod(path, 0o755)


def move_shipment(temporary: str, target: str, digest: str) -> None:
    """Rename a complete folder into place; another one who was faster with the same content is fine."""
    for _ in range(5):
        try:
            os.rename(temporary, target)
            sync_folder(os.path.dirname(target))
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if shipment_is_whole(target, digest):
            return
        # Damaged since (edited, or a disk error): out of the way with it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, f"{temporary}.damaged")
            remove_tree(f"{temporary}.damaged")
    raise AgentError("busy", f"others keep changing {target}", "try again")


def remove_tree(path: str) -> None:
    """Remove a folder or file as far as possible."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_stale_shipments(parent: str) -> None:
    """Remove what an interrupted shipment left behind, once it is old enough not to be one in progress."""
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):
            if entry.name.startswith(".tmp-") and time.time() - entry.stat().st_mtime > STALE_SHIPMENT_S:
                remove_tree(entry.path)


# ------------------------------------------------------------------------------------------------------------ purge


def command_open(request: Request) -> Json:
    """Open the gate of an instance that waits for it. Again is fine."""
    cluster, name = request.name("cluster"), request.name("instance")
    folder = instance_folder(cluster, name)
    if not os.path.isdir(folder):
        raise AgentError("not-found", f"{cluster}/{name} was never started here")
    write_file(os.path.join(folder, GATE_NAME), b"", 0o600)
    return {"opened": True}


def command_purge(request: Request) -> Json:
    """Remove what a stopped instance left on the node, except its logs."""
    cluster, name = request.name("cluster"), request.name("instance")
    folder = instance_folder(cluster, name)
    removed: List[str] = []
    kept: List[str] = []
    if not os.path.isdir(folder):
        return {"removed": removed, "kept": kept}
    with instance_lock(folder, "purge", LOCK_WAIT_S):
        instance = Instance(cluster, name)
        alive = [process.pid for process in instance.membership().select(scan_processes()) if process.alive]
        if alive:
            raise AgentError(
                "busy",
                f"{cluster}/{name} still has processes: {', '.join(map(str, alive[:10]))}",
                "stop the instance first",
                {"pids": alive},
            )
        with writing(folder):
            for entry in sorted(os.listdir(folder)):
                path = os.path.join(folder, entry)
                if entry == LOG_NAME or entry.startswith(LOG_NAME + "."):
                    kept.append(entry)
                elif entry != "lock":
                    removed.append(entry)
                    if os.path.isdir(path) and not os.path.islink(path):
                        shutil.rmtree(path)
                    else:
                        os.unlink(path)
            # Last: whoever waits for this lock sees that it is gone and makes a new one.
            os.unlink(os.path.join(folder, "lock"))
            for path in (folder, os.path.dirname(folder)):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
    return {"removed": removed, "kept": kept}


# ------------------------------------------------------------------------------------------------------------- main

COMMANDS: Dict[str, Callable[[Request], Json]] = {
    "ship": command_ship,
    "start": command_start,
    "stop": command_stop,
    "observe": command_observe,
    "status": command_status,
    "log": command_log,
    "http": command_http,
    "open": command_open,
    "purge": command_purge,
}


def answer(request: bytes) -> Json:
    """Run one request and return the answer; never raises."""
    try:
        try:
            fields = json.loads(request.decode())
        except ValueError:
            raise bad_request("the request is no JSON") from None
        parsed = Request(fields)
        command = parsed.text("command")
        if command not in COMMANDS:
            raise bad_request(f"unknown command {command!r}; known are {', '.join(sorted(COMMANDS))}")
        return {"ok": True, "result": COMMANDS[command](parsed)}
    except AgentError as error:
        return {"ok": False, "error": error.to_json()}
    except Exception:
        bug = AgentError("internal", traceback.format_exc(), "this is a bug of pdctl: please report it")
        return {"ok": False, "error": bug.to_json()}


def main(request: bytes) -> None:
    """Run one request and print the answer line."""
    line = REPLY_PREFIX + json.dumps(answer(request)) + "\n"
    # The caller may have gone away; what it asked for is done all the same.
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(line.encode("ascii"))
        sys.stdout.buffer.flush()


if __name__ == "__main__" and len(sys.argv) == 5 and sys.argv[1] == "pdctl-supervisor":
    supervise(int(sys.argv[3]), int(sys.argv[4]))
