"""Facts of the machine it runs on, for ``pdctl doctor``: what ``pdctl/doctor/facts.py`` describes, part by part.

One self-contained file for Python 3.8 or later on Linux, standard library only, without root. Like the node agent it is
sent over the wire and run by a bootstrap (see ``pdctl/node/agent.py``); nothing stays on the node. It reads a request
from standard input and prints one line:

    PDCTL-AGENT-1 {"ok": true, "result": {"schema": 1, "took_s": 0.4, "parts": {...}, "missing": {part: why}}}

Request (every field may be left out):

``cluster``       name of the cluster: tells its own running instances from strangers on a port
``pythons``       interpreters as the plan names them; ``~/`` and ``@HOME@`` at the start mean the login's home folder
``environments``  variables by interpreter, which vLLM will be given there: NIXL is loaded with them, and those of the
                  first interpreter say where the model's cache is
``plugins``       NIXL plugins to load for real: UCX and LIBFABRIC unless given
``peers``         addresses or names of the other hosts: routes to them
``names``         names to resolve
``ports``         ``[{port, address, purpose}]``: bound for a moment, as a server would
``model``         folder, or name on the Hugging Face hub
``revision``      of the model; ``main`` unless given
``ec2``           whether to ask the instance metadata service even if the machine does not look like EC2
``timeouts``      seconds by part; ``default`` for the parts that have no time-out of their own, ``total`` for all

How it keeps from hanging: a forked worker runs each part in a thread of its own, all at once, and sends what it has
through a pipe. The parent waits for each part until its time-out and no longer, prints the answer and ends, whatever
the worker is stuck in (a dead network file system, a driver). Programs run in process groups of their own, which are
killed as a whole. Whatever fails or is late has its reason in ``missing`` and takes nothing else with it. A part that
is late is taken all the same if it comes while others are still waited for. ``missing`` may also have
``interpreter PYTHON``, one of several that was late and is left out of the part, and ``nixl``: an interpreter is known,
but loading NIXL with it did not end in time.

What comes from ``/proc``, ``/sys``, programs and the metadata service is not trusted: everything is bounded in size and
number, and what does not have the expected form is left out.

``environment`` and ``limits`` are those of a command over SSH: sshd runs the login's shell with ``-c``, which is no
login shell. ``/etc/environment``, PAM and (bash) ``~/.bashrc`` count; ``/etc/profile``, ``/etc/profile.d`` and
``~/.profile`` do not. It is also what vLLM gets when ``pdctl up`` starts it, except that the soft limits of locked
memory and open files are raised to the hard ones then.

Names of variables that hold secrets are left out, and of foreign processes only the program's name is told.
"""

from __future__ import annotations

# The C part alone: making the enumerations of `socket` takes longer than most of what is done here.
import _socket as socket
import errno
import functools
import json
import os
import re
import select
import signal
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # Importing typing costs milliseconds on every host.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    Json = dict[str, Any]

SCHEMA = 1
REPLY_PREFIX = "PDCTL-AGENT-1 "

DEFAULT_TIMEOUT_S = 1.5
TOTAL_TIMEOUT_S = 4.0
# Programs that initialise accelerators or network cards take seconds on a machine with many of them.
PART_TIMEOUTS_S = {"nvidia": 3.0, "neuron": 3.0, "efa": 3.0, "interpreters": 3.0}
# A part's own deadline lies this much before the time at which its answer is given up.
MARGIN_S = 0.15

OUTPUT_BYTES = 256 * 1024
PART_BYTES = 8 * 1024 * 1024
CONFIG_BYTES = 1024 * 1024
INDEX_BYTES = 32 * 1024 * 1024
MAX_DEVICES = 256
MAX_PORTS = 16
MAX_GIDS = 256
MAX_COUNTERS = 256
MAX_LISTENERS = 1024
MAX_INTERFACES = 512
MAX_NAMES = 1024
MAX_PLANNED_PORTS = 4096
MAX_PYTHONS = 16
MAX_SHARDS = 4096
MAX_VARIABLES = 200

EFA_FOLDER = "/opt/amazon/efa"
NEURON_FOLDER = "/opt/aws/neuron"
METADATA_ADDRESS = "169.254.169.254"
METADATA_TIMEOUT_S = 1.0
PLUGINS = ("UCX", "LIBFABRIC")

MODULES = frozenset(
    """
    bnxt_re efa efa_nv_peermem ena gdrdrv ib_core ib_ipoib ib_umad ib_uverbs irdma knem mlx4_ib mlx5_core mlx5_ib neuron
    nv_peer_mem nvidia nvidia_drm nvidia_fs nvidia_modeset nvidia_peermem nvidia_uvm qedr rdma_cm rdma_rxe rdma_ucm siw
    xpmem
    """.split()  # noqa: SIM905
)
VARIABLE_PATTERN = re.compile(
    r"(FI|UCX|NIXL|VLLM|NCCL|RDMAV|IBV|MLX5|NEURON|EFA)_\w+|PYTORCH_\w*ALLOC\w*|LD_LIBRARY_PATH|LD_PRELOAD|HF_HOME"
    r"|HF_HUB_CACHE|HF_HUB_OFFLINE|HUGGINGFACE_HUB_CACHE|TRANSFORMERS_CACHE|TRANSFORMERS_OFFLINE|XDG_CACHE_HOME"
    r"|CUDA_VISIBLE_DEVICES|CUDA_HOME|PYTHONPATH|PDCTL_HOME|TMPDIR"
)
SECRET_PATTERN = re.compile(r"TOKEN|SECRET|KEY|PASSW|CREDENTIAL", re.IGNORECASE)
PACKAGE_NAMES = """
    nixl nixl-cu12 nixl-cu13 nixl-rocm torch transformers tokenizers msgspec numpy pyzmq prometheus-client
    huggingface-hub safetensors triton flashinfer-python ray pdctl torch-neuronx neuronx-cc neuronx-distributed
    neuronx-distributed-inference libneuronxla optimum-neuron
""".split()  # noqa: SIM905


class Late(Exception):
    """Something did not answer in time. The message says what, and how long it was waited for.

    ``output`` is what a program had written by then.
    """

    def __init__(self, message: str, output: bytes = b"") -> None:
        super().__init__(message)
        self.output = output


class NotFound(Exception):
    """A file that a part cannot do without is not there."""


# ------------------------------------------------------------------------------------------------------- reading files


def read_text(path: str, limit: int = 64 * 1024) -> str | None:
    """Return the beginning of a small file of ``/proc``, ``/sys`` or ``/etc``; None if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    pieces = []
    try:
        while limit > 0:
            piece = os.read(descriptor, min(limit, 64 * 1024))
            if not piece:
                break
            pieces.append(piece)
            limit -= len(piece)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(pieces).decode("utf-8", "replace")


def read_line(path: str) -> str | None:
    """Return the first line of a file without the space around it; None if it cannot be read."""
    text = read_text(path, 4096)
    return None if text is None else text.partition("\n")[0].strip()


def read_document(path: str, limit: int) -> Any:
    """Parse a JSON file; raises OSError, or ValueError with the reason when it is too big or no JSON."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > limit:
            raise ValueError(f"it has {status.st_size} bytes; more than {limit} are not read")
        text = file.read(limit).decode("utf-8", "replace")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole(text: Any, base: int = 10) -> int | None:
    """Return a whole number that fits into 64 bits, or None."""
    try:
        value = int(text, base) if isinstance(text, str) else int(text)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if -(2**63) <= value < 2**64 else None


def list_folder(path: str, limit: int) -> list[str]:
    """Return names in a folder, sorted, numbers by value, at most so many; empty if it cannot be read."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(
        names, key=lambda name: [(int(w), "") if w.isdecimal() else (-1, w) for w in re.split(r"(\d+)", name)]
    )[:limit]


def clean(value: Any, depth: int = 0) -> Any:
    """Return the value as it can safely be sent: bounded, without lone surrogates, NUL and non-finite numbers."""
    if isinstance(value, str):
        return value[:65536].encode("utf-8", "replace").decode("utf-8", "replace").replace("\0", "?")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else None
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if depth > 30:
        return None
    if isinstance(value, dict):
        items = list(value.items())[:10000]
        return {clean(str(key)): clean(item, depth + 1) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [clean(item, depth + 1) for item in list(value)[:10000]]
    return clean(str(value))


def tail(data: bytes, lines: int = 5, width: int = 300) -> str:
    """Return the last lines of a program's output, printable, for a message."""
    text = data[-8192:].decode("utf-8", "replace")
    kept = [line.strip()[:width] for line in text.splitlines() if line.strip()][-lines:]
    return " | ".join("".join(letter if letter.isprintable() else "?" for letter in line) for line in kept)


def home_folder() -> str:
    """Return the home folder of the login."""
    home = os.environ.get("HOME", "")
    if home.startswith("/"):
        return home
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"


def expand(path: str, home: str) -> str:
    """Return a path with ``~/`` or ``@HOME@`` at its start replaced."""
    for prefix in ("~/", "@HOME@"):
        if path.startswith(prefix):
            return os.path.join(home, path[len(prefix) :].lstrip("/"))
    return home if path == "~" else path


# ---------------------------------------------------------------------------------------------------- running programs


class Ended:
    """How a program ended. ``code`` is its exit status, or minus the number of the signal that ended it."""

    def __init__(self, code: int, stdout: bytes, stderr: bytes) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def text(self) -> str:
        """Its standard output as text."""
        return self.stdout.decode("utf-8", "replace")


class Programs:
    """Runs programs in process groups of their own and tells the parent of this process which groups there are."""

    def __init__(self, tell: Callable[[Json], None]) -> None:
        self._tell = tell

    def run(self, argv: list[str], deadline: float, environment: dict[str, str] | None = None) -> Ended:
        """Run a program until its end or the deadline (``time.monotonic``), when its whole group is killed.

        Raises Late when it did not end in time, OSError when it cannot be started.
        """
        begin = time.monotonic()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        streams = {out_read: bytearray(), err_read: bytearray()}
        try:
            try:
                pid = os.posix_spawn(
                    argv[0],
                    argv,
                    dict(os.environ) if environment is None else environment,
                    file_actions=[(os.POSIX_SPAWN_DUP2, out_write, 1), (os.POSIX_SPAWN_DUP2, err_write, 2)],
                    setpgroup=0,
                    setsigdef=[signal.SIGPIPE],
                )
            finally:
                os.close(out_write)
                os.close(err_write)
            self._tell({"group": pid})
            try:
                code = self._wait(pid, streams, deadline)
            finally:
                self._tell({"ended": pid})
        finally:
            os.close(out_read)
            os.close(err_read)
        if code is None:
            shown = os.path.basename(argv[0])
            message = f"{shown} did not end within {time.monotonic() - begin:.1f} s{self._said(streams[err_read])}"
            raise Late(message, bytes(streams[out_read]))
        return Ended(code, bytes(streams[out_read]), bytes(streams[err_read]))

    @staticmethod
    def _said(output: bytearray) -> str:
        said = tail(bytes(output), 2)
        return f" (its last words: {said})" if said else ""

    @staticmethod
    def _wait(pid: int, streams: dict[int, bytearray], deadline: float) -> int | None:
        """Collect output until the program has ended; None, with its group killed, when it does not in time."""
        poll = select.poll()
        for descriptor in streams:
            poll.register(descriptor, select.POLLIN)
        open_ones = set(streams)
        ended_at = 0.0
        pause = 0.001
        while True:
            now = time.monotonic()
            if not ended_at and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                ended_at = now
            # A process that it left behind may hold the pipes open.
            if ended_at and (not open_ones or now > ended_at + 0.2):
                kill_group(pid)
                return exit_code(os.waitpid(pid, 0)[1])
            if now >= deadline:
                break
            if not open_ones:
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
                continue
            for descriptor, _ in poll.poll(min(50.0, (deadline - now) * 1000)):
                piece = os.read(descriptor, 65536)
                if not piece:
                    poll.unregister(descriptor)
                    open_ones.discard(descriptor)
                elif len(streams[descriptor]) < OUTPUT_BYTES:
                    streams[descriptor] += piece
        kill_group(pid)
        # One that hangs in the kernel does not even notice a KILL: it is not waited for.
        for _ in range(20):
            if os.waitpid(pid, os.WNOHANG)[0]:
                break
            time.sleep(0.005)
        return None


def exit_code(status: int) -> int:
    """Return the exit status of a wait status, or minus the number of the signal."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def kill_group(group: int) -> None:
    """Kill a process group that may be gone."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def find_program(name: str, folders: Iterable[str] = (), path: str | None = None) -> str | None:
    """Return the full path of a program, from the given folders first, then from PATH and the system's folders."""
    if "/" in name:
        return name if is_program(name) else None
    search = os.environ.get("PATH", "") if path is None else path
    for folder in [*folders, *search.split(os.pathsep), "/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin"]:
        if folder.startswith("/") and is_program(os.path.join(folder, name)):
            return os.path.join(folder, name)
    return None


def is_program(path: str) -> bool:
    """Tell whether a path is a file that this login may run."""
    return os.path.isfile(path) and os.access(path, os.X_OK)


# --------------------------------------------------------------------------------------- parsers: the operating system


def parse_pairs(text: str, separator: str = "=") -> dict[str, str]:
    """Parse lines of ``NAME=value``, such as os-release(5); quotes around a value are taken off."""
    pairs = {}
    for line in text.splitlines():
        name, found, value = line.strip().partition(separator)
        if found and not name.startswith("#"):
            pairs[name.strip()] = value.strip().strip("\"'")
    return pairs


def parse_limits(text: str) -> Json:
    """Parse ``/proc/PID/limits``: soft and hard limit of locked memory (bytes) and open files; None is unlimited.

    Raises ValueError when one of the two is not there.
    """
    limits: Json = {}
    for title, key in (("Max locked memory", "memlock_{}_bytes"), ("Max open files", "nofile_{}")):
        match = re.search(rf"^{title}\s+(unlimited|\d+)\s+(unlimited|\d+)\b", text, re.MULTILINE)
        if match is None:
            raise ValueError(f"/proc/self/limits has no line for {title!r}")
        for side, value in zip(("soft", "hard"), match.groups()):  # noqa: B905
            limits[key.format(side)] = None if value == "unlimited" else whole(value)
    return limits


def parse_meminfo(text: str) -> Json:
    """Parse ``/proc/meminfo``; raises ValueError without its two main lines. Sizes in bytes."""
    values: dict[str, int] = {}
    for match in re.finditer(r"^(\w+):\s+(\d{1,18})(?: (kB))?\s*$", text, re.MULTILINE):
        values[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    if "MemTotal" not in values:
        raise ValueError("/proc/meminfo has no line MemTotal")
    return {
        "total_bytes": values["MemTotal"],
        "available_bytes": values.get("MemAvailable", values.get("MemFree", 0)),
        "hugepages_total": values.get("HugePages_Total", 0),
        "hugepages_free": values.get("HugePages_Free", 0),
        "hugepage_bytes": values.get("Hugepagesize", 0),
    }


def memory_groups(text: str) -> tuple[str | None, str | None]:
    """Return the paths of the memory control group from ``/proc/self/cgroup``: version 2, version 1."""
    second = first = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A path with .. lies outside what this container sees.
        if not path.startswith("/") or ".." in path.split("/"):
            continue
        if number == "0" and not controllers:
            second = path
        elif "memory" in controllers.split(","):
            first = path
    return second, first


def memory_limit(root: str, text: str) -> int | None:
    """Return the tightest limit of the memory control groups above a process, in bytes; None if there is none.

    ``root`` is the folder that holds ``sys``, ``text`` that of ``/proc/self/cgroup``.
    """
    second, first = memory_groups(text)
    limits = []
    for path, mount, name in (
        (second, "sys/fs/cgroup", "memory.max"),
        (first, "sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    ):
        while path is not None:
            value = whole(read_line(os.path.join(root, mount, path.lstrip("/"), name)) or "")
            # Version 1 says "none" with a number close to 2**63.
            if value is not None and 0 < value < 2**60:
                limits.append(value)
            path = None if path == "/" else os.path.dirname(path)
    return min(limits, default=None)


def find_container(root: str, environment: dict[str, str]) -> str | None:
    """Say what kind of container this is, or None. ``root`` is ``/`` but in tests."""
    if "KUBERNETES_SERVICE_HOST" in environment or os.path.isdir(os.path.join(root, "var/run/secrets/kubernetes.io")):
        return "kubernetes"
    groups = read_text(os.path.join(root, "proc/1/cgroup")) or ""
    if "kubepods" in groups:
        return "kubernetes"
    if os.path.exists(os.path.join(root, ".dockerenv")):
        return "docker"
    if os.path.exists(os.path.join(root, "run/.containerenv")):
        return "podman"
    named = read_line(os.path.join(root, "run/systemd/container")) or environment.get("container", "")
    for word in ("docker", "podman", "lxc"):
        if word in named or f"/{word}" in groups:
            return word
    return re.sub(r"[^A-Za-z0-9_.-]", "?", named)[:40] or None


def parse_timex(data: bytes) -> bool | None:
    """Tell from a ``struct timex`` (adjtimex(2)) whether the clock is synchronised; None if it is cut short."""
    # modes, four longs, then status. STA_UNSYNC is 0x40.
    layout = struct.Struct("@Illlli")
    if len(data) < layout.size:
        return None
    return not layout.unpack_from(data)[5] & 0x40


def safe_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that matter to the transfer, without secrets; logins inside addresses are masked."""
    chosen = {}
    for name in sorted(environment):
        if VARIABLE_PATTERN.fullmatch(name) and not SECRET_PATTERN.search(name):
            chosen[name] = re.sub(r"://[^/@\s]+@", "://***@", environment[name][:4096])
    return dict(list(chosen.items())[:MAX_VARIABLES])


# ----------------------------------------------------------------------------------------------- parsers: RDMA and EFA


def read_counters(folder: str) -> dict[str, int]:
    """Read a ``hw_counters`` folder."""
    counters = {}
    for name in list_folder(folder, MAX_COUNTERS):
        value = whole(read_line(os.path.join(folder, name)) or "")
        if value is not None and name != "lifespan":
            counters[name] = value
    return counters


def read_gids(port: str) -> list[Json]:
    """Read the GIDs of a port that are in use."""
    gids = []
    unused = 0
    for index in range(MAX_GIDS):
        gid = read_line(f"{port}/gids/{index}")
        if gid is None or not gid.strip("0:"):
            unused += 1
            # The tables of some cards have 256 entries, the used ones first; each takes three files to read.
            if gid is None or unused > 16:
                break
            continue
        gids.append(
            {
                "index": index,
                "gid": gid[:64],
                "type": (read_line(f"{port}/gid_attrs/types/{index}") or "")[:40],
                "netdev": (read_line(f"{port}/gid_attrs/ndevs/{index}") or "")[:40],
            }
        )
    return gids


def parse_rate(text: str) -> float | None:
    """Parse ``200 Gb/sec (4X HDR)``."""
    match = re.match(r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*Gb/sec", text)
    return float(match[1]) if match else None


def read_port(folder: str, number: int, netdev: str) -> Json:
    """Read ``/sys/class/infiniband/DEVICE/ports/N``."""

    def word(name: str) -> str:
        # "4: ACTIVE"
        return (read_line(f"{folder}/{name}") or "").rpartition(":")[2].strip()[:40]

    gids = read_gids(folder)
    return {
        "number": number,
        "state": word("state"),
        "phys_state": word("phys_state"),
        "link_layer": (read_line(f"{folder}/link_layer") or "")[:40],
        "rate_gbps": parse_rate(read_line(f"{folder}/rate") or ""),
        "lid": whole(read_line(f"{folder}/lid") or "", 0),
        "sm_lid": whole(read_line(f"{folder}/sm_lid") or "", 0),
        "gids": gids,
        "netdev": netdev or next((gid["netdev"] for gid in gids if gid["netdev"]), ""),
        "counters": read_counters(f"{folder}/hw_counters"),
    }


def verbs_devices(root: str) -> dict[str, str]:
    """Return the name of the character device by RDMA device: ``{"rdmap86s0": "uverbs0"}``."""
    folder = os.path.join(root, "sys/class/infiniband_verbs")
    devices = {}
    for name in list_folder(folder, MAX_DEVICES):
        owner = read_line(os.path.join(folder, name, "ibdev"))
        if owner and name.startswith("uverbs"):
            devices[owner] = name
    return devices


def try_open(path: str) -> str:
    """Open a device for reading and writing, and close it; return why that fails, or nothing."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def read_rdma_device(root: str, name: str, verbs: str) -> Json:
    """Read one device of ``/sys/class/infiniband``."""
    folder = os.path.join(root, "sys/class/infiniband", name)
    try:
        driver: str | None = os.path.basename(os.readlink(f"{folder}/device/driver"))
    except OSError:
        driver = None
    interfaces: dict[int, str] = {}
    for interface in list_folder(f"{folder}/device/net", 16):
        port = whole(read_line(f"{folder}/device/net/{interface}/dev_port") or "0") or 0
        interfaces.setdefault(port + 1, interface)
    ports = [
        read_port(f"{folder}/ports/{number}", int(number), interfaces.get(int(number), ""))
        for number in list_folder(f"{folder}/ports", MAX_PORTS)
        if number.isdecimal()
    ]
    path = f"/dev/infiniband/{verbs}" if verbs else ""
    problem = try_open(os.path.join(root, path.lstrip("/"))) if path else ""
    return {
        "name": name,
        "driver": driver,
        "vendor": (read_line(f"{folder}/device/vendor") or "")[:16],
        "device": (read_line(f"{folder}/device/device") or "")[:16],
        "numa_node": whole(read_line(f"{folder}/device/numa_node") or ""),
        "peer_memory": read_line(f"{folder}/device/p2p"),
        "verbs_path": path,
        "verbs_open": not problem if path else None,
        "verbs_error": problem,
        "ports": ports,
        "counters": read_counters(f"{folder}/hw_counters"),
    }


def read_rdma(root: str) -> Json:
    """Read all RDMA devices. ``root`` is ``/`` but in tests; raises NotFound without ``/sys``."""
    if not os.path.isdir(os.path.join(root, "sys/class")):
        raise NotFound("/sys is not mounted here, so RDMA devices cannot be seen")
    verbs = verbs_devices(root)
    names = list_folder(os.path.join(root, "sys/class/infiniband"), MAX_DEVICES)
    return {"devices": [read_rdma_device(root, name, verbs.get(name, "")) for name in names]}


def parse_fi_info(text: str) -> tuple[list[str], list[str]]:
    """Parse ``fi_info``: distinct device names (without ``-rdm`` and ``-dgrm``), distinct fabrics; in their order."""
    domains: dict[str, None] = {}
    fabrics: dict[str, None] = {}
    for line in text.splitlines():
        name, _, value = line.strip().partition(":")
        value = value.strip()
        if name == "domain" and value and len(domains) < MAX_DEVICES:
            domains[re.sub(r"-(rdm|dgrm)$", "", value)[:100]] = None
        elif name == "fabric" and value and len(fabrics) < MAX_DEVICES:
            fabrics[value[:100]] = None
    return list(domains), list(fabrics)


def parse_libfabric_version(text: str) -> str | None:
    """Parse ``fi_info --version``."""
    match = re.search(r"^libfabric:\s*(\S{1,60})\s*$", text, re.MULTILINE)
    return match[1] if match else None


def parse_installed_packages(text: str) -> tuple[str | None, list[str]]:
    """Parse ``/opt/amazon/efa_installed_packages``: the installer's version and its packages."""
    match = re.search(r"EFA installer version:\s*(\S{1,40})", text)
    words = [word[:100] for line in text.splitlines() if not line.startswith("#") for word in line.split()]
    return (match[1] if match else None), words[:100]


# ----------------------------------------------------------------------------------------------- parsers: accelerators

GPU_COLUMNS = ("index", "name", "uuid", "pci.bus_id", "driver_version", "memory.total", "memory.used")


def parse_gpus(text: str, columns: Iterable[str] = GPU_COLUMNS) -> tuple[list[Json], str | None]:
    """Parse ``nvidia-smi --query-gpu=... --format=csv``: GPUs, and the driver's version.

    With or without header (which then names the columns) and units. Lines that do not fit are left out.
    """
    names = list(columns)
    gpus = []
    driver = None
    for line in text.splitlines()[: MAX_DEVICES + 1]:
        cells = [cell.strip() for cell in line.split(",")]
        if cells[0] == "index":
            names = [cell.partition(" [")[0] for cell in cells]
            continue
        row = dict(zip(names, cells))  # noqa: B905
        index = whole(row.get("index"))
        if index is None or not row.get("name"):
            continue
        driver = driver or row.get("driver_version")
        gpus.append(
            {
                "index": index,
                "name": row["name"][:100],
                "uuid": row.get("uuid", "")[:60],
                "pci": row.get("pci.bus_id", "")[:40],
                "memory_bytes": mebibytes(row.get("memory.total", "")),
                "memory_used_bytes": mebibytes(row.get("memory.used", "")),
            }
        )
    return gpus, driver


def mebibytes(text: str) -> int | None:
    """Return bytes of ``143771 MiB`` or ``143771``; None of ``[N/A]``."""
    match = re.fullmatch(r"(\d{1,12})(?: MiB)?", text)
    return int(match[1]) * 1024 * 1024 if match else None


def parse_driver_version(text: str) -> tuple[str | None, str | None]:
    """Parse ``/proc/driver/nvidia/version``: the driver's version, and ``open`` or ``proprietary``."""
    match = re.search(r"^NVRM version:\s*(.*)$", text, re.MULTILINE)
    if match is None:
        return None, None
    version = re.search(r"\s(\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)\s", match[1] + " ")
    return (version[1] if version else None), "open" if "Open" in match[1] else "proprietary"


def parse_unit(text: str) -> str | None:
    """Parse ``systemctl show -p LoadState,ActiveState``: the active state; None if there is no such unit."""
    unit = parse_pairs(text)
    return unit.get("ActiveState") or None if unit.get("LoadState") == "loaded" else None


def parse_neuron_ls(text: str) -> list[Json]:
    """Parse ``neuron-ls --json-output``; raises ValueError when it is no JSON list."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(document, list):
        raise ValueError("its JSON is no list")
    devices = []
    for entry in document[:MAX_DEVICES]:
        index = whole(entry.get("neuron_device")) if isinstance(entry, dict) else None
        if index is not None:
            processes = entry.get("neuron_processes")
            devices.append(
                {
                    "index": index,
                    "cores": whole(entry.get("nc_count")) or 0,
                    "memory_bytes": whole(entry.get("memory_size")),
                    "processes": len(processes) if isinstance(processes, list) else 0,
                }
            )
    return devices


# ---------------------------------------------------------------------------------------------------- parsers: network


class TcpSocket:
    """A line of ``/proc/net/tcp`` or ``tcp6``."""

    def __init__(self, address: str, port: int, listening: bool, user: int, inode: int) -> None:
        self.address = address
        self.port = port
        self.listening = listening
        self.user = user
        self.inode = inode


def parse_address(text: str) -> str:
    """Return an address of ``/proc/net/tcp`` (32-bit words as the machine keeps them) as people write it."""
    if len(text) not in (8, 32):
        raise ValueError("no address")
    data = b"".join(int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def parse_sockets(text: str) -> list[TcpSocket]:
    """Parse ``/proc/net/tcp`` or ``tcp6``; lines that do not fit are left out."""
    sockets = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        try:
            address, _, port = fields[1].partition(":")
            user, inode = int(fields[7]), int(fields[9])
            if 0 <= int(port, 16) <= 65535 and user >= 0:
                sockets.append(TcpSocket(parse_address(address), int(port, 16), fields[3] == "0A", user, inode))
        except (IndexError, ValueError, OverflowError, OSError):
            continue
    return sockets


def netlink_messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Split what a netlink socket gave (netlink(7)): type and payload of each message, as far as they are whole."""
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        if length < 16 or at + length > len(data):
            return
        yield kind, data[at + 16 : at + length]
        at += (length + 3) & ~3


def netlink_attributes(data: bytes) -> dict[int, bytes]:
    """Split the attributes of a message: value by type, as far as they are whole."""
    attributes = {}
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4 or at + length > len(data):
            break
        attributes[kind & 0x3FFF] = data[at + 4 : at + length]
        at += (length + 3) & ~3
    return attributes


def netlink_number(value: bytes | None) -> int | None:
    """Return an attribute that is a 32-bit number."""
    return struct.unpack("=I", value)[0] if value is not None and len(value) == 4 else None


def netlink_address(family: int, value: bytes | None) -> str:
    """Return an attribute that is an address; empty if it is none."""
    if value is None or (family, len(value)) not in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
        return ""
    return socket.inet_ntop(family, value)


NEW_LINK, GET_LINK, NEW_ADDRESS, GET_ADDRESS, NEW_ROUTE, GET_ROUTE = 16, 18, 20, 22, 24, 26
NETLINK_ERROR, NETLINK_DONE = 2, 3


def parse_links(data: bytes) -> dict[int, Json]:
    """Parse RTM_NEWLINK messages (rtnetlink(7)): name, MTU and whether it is up, by index."""
    links: dict[int, Json] = {}
    for kind, payload in netlink_messages(data):
        if kind != NEW_LINK or len(payload) < 16 or len(links) >= MAX_INTERFACES:
            continue
        index, flags = struct.unpack_from("=iI", payload, 4)
        attributes = netlink_attributes(payload[16:])
        name = attributes.get(3, b"").rstrip(b"\0").decode("utf-8", "replace")
        # IFF_UP and IFF_RUNNING
        if name:
            links[index] = {"name": name, "mtu": netlink_number(attributes.get(4)) or 0, "up": flags & 0x41 == 0x41}
    return links


def parse_addresses(data: bytes) -> dict[int, list[str]]:
    """Parse RTM_NEWADDR messages: addresses in CIDR form by index of the interface."""
    found: dict[int, list[str]] = {}
    for kind, payload in netlink_messages(data):
        if kind != NEW_ADDRESS or len(payload) < 8:
            continue
        family, prefix = struct.unpack_from("=BB", payload)
        attributes = netlink_attributes(payload[8:])
        # The local end of a point-to-point link is in IFA_LOCAL, IFA_ADDRESS is the other end.
        address = netlink_address(family, attributes.get(2) or attributes.get(1))
        addresses = found.setdefault(struct.unpack_from("=I", payload, 4)[0], [])
        if address and len(addresses) < MAX_NAMES:
            addresses.append(f"{address}/{prefix}")
    return found


def parse_route(data: bytes) -> Json:
    """Parse the answer to RTM_GETROUTE: ``{index, source, mtu}`` (the MTU if the route has its own), or ``{error}``."""
    for kind, payload in netlink_messages(data):
        if kind == NETLINK_ERROR and len(payload) >= 4:
            number = -struct.unpack_from("=i", payload)[0]
            if number:
                return {"error": os.strerror(number) if 0 < number < 4096 else f"error {number}"}
        elif kind == NEW_ROUTE and len(payload) >= 12:
            attributes = netlink_attributes(payload[12:])
            return {
                "index": netlink_number(attributes.get(4)),
                "source": netlink_address(payload[0], attributes.get(7)),
                "mtu": netlink_number(netlink_attributes(attributes.get(8, b"")).get(2)),
            }
    return {"error": "the kernel's answer cannot be read"}


class Netlink:
    """Questions to the kernel about links, addresses and routes, without a program."""

    def __init__(self, deadline: float) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self._socket.settimeout(max(0.05, deadline - time.monotonic()))
        self._socket.bind((0, 0))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def ask(self, kind: int, body: bytes, *, dump: bool) -> bytes:
        """Send one request and return the raw messages of the answer."""
        # NLM_F_REQUEST, and NLM_F_DUMP for all entries of a table.
        flags = 0x301 if dump else 0x001
        self._socket.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
        answer = b""
        while len(answer) < PART_BYTES:
            piece = self._socket.recv(65536)
            answer += piece
            kinds = [kind for kind, _ in netlink_messages(piece)]
            if not dump or not kinds or NETLINK_DONE in kinds or NETLINK_ERROR in kinds:
                break
        return answer

    def links(self) -> dict[int, Json]:
        """Return all interfaces by index."""
        return parse_links(self.ask(GET_LINK, struct.pack("=BxHiII", 0, 0, 0, 0, 0), dump=True))

    def addresses(self) -> dict[int, list[str]]:
        """Return all addresses by interface."""
        return parse_addresses(self.ask(GET_ADDRESS, struct.pack("=BBBBI", 0, 0, 0, 0, 0), dump=True))

    def route(self, address: str) -> Json:
        """Return how the kernel would send to an address; see :func:`parse_route`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        packed = socket.inet_pton(family, address.partition("%")[0])
        body = struct.pack("=BBBBBBBBI", family, len(packed) * 8, 0, 0, 0, 0, 0, 0, 0)
        body += struct.pack("=HH", 4 + len(packed), 1) + packed
        return parse_route(self.ask(GET_ROUTE, body, dump=False))


def program_words(argv: list[str]) -> str:
    """Return what a process runs, such as ``python3 -m http.server``, without arguments: they may hold secrets."""
    if not argv or not argv[0].strip():
        return ""
    # Some processes write a sentence over their argv ("nginx: master process").
    name = os.path.basename(argv[0].split()[0]).rstrip(":")[:60]
    if not re.match(r"(python|pypy|node|ruby|perl|java|bash|sh$)", name):
        return name
    for index, word in enumerate(argv[1:], 1):
        if word == "-m" and index + 1 < len(argv):
            return f"{name} -m {argv[index + 1][:100]}"
        if word == "-c":
            return f"{name} -c"
        if not word.startswith("-"):
            return f"{name} {os.path.basename(word)[:100]}"
    return name


def parse_marker(environment: bytes) -> str:
    """Return ``<cluster>/<instance>`` of the node agent's marker in ``/proc/PID/environ``; empty if it has none."""
    for entry in environment.split(b"\0"):
        if entry.startswith(b"PDCTL_MARKER="):
            return entry[len(b"PDCTL_MARKER=") :].decode("utf-8", "replace").rpartition("/")[0][:200]
    return ""


def parse_session(text: str) -> tuple[int, int]:
    """Return session and create time of ``/proc/PID/stat``; zeros when it is cut short."""
    fields = text[text.rfind(")") + 1 :].split()
    if len(fields) < 20:
        return 0, 0
    return whole(fields[3]) or 0, whole(fields[19]) or 0


# -------------------------------------------------------------------------------------------- parsers: NIXL and models


def parse_ldd(text: str) -> tuple[dict[str, str], list[str]]:
    """Parse ``ldd``: paths by library name, and the libraries that are not found."""
    found = {}
    missing = []
    for line in text.splitlines()[:2000]:
        match = re.match(r"\s*(\S+) => (not found|\S+)", line)
        if match and match[2] == "not found":
            missing.append(match[1][:200])
        elif match:
            found[match[1]] = match[2][:1000]
    return found, missing


def parse_steps(text: str) -> list[Json]:
    """Return the lines that :data:`INTERPRETER_PROBE` wrote, among whatever else is in its output."""
    steps = []
    for line in text.splitlines():
        _, found, rest = line.partition("PDCTL-STEP ")
        if found:
            try:
                step = json.loads(rest)
            except (ValueError, RecursionError):
                continue
            if isinstance(step, dict):
                steps.append(step)
    return steps


def strings(value: Any, limit: int = MAX_NAMES) -> list[str]:
    """Return the strings of a list from outside."""
    return [item for item in value if isinstance(item, str)][:limit] if isinstance(value, list) else []


def string_map(value: Any) -> dict[str, str]:
    """Return the strings of an object from outside."""
    items = value.items() if isinstance(value, dict) else ()
    return {name: item for name, item in items if isinstance(name, str) and isinstance(item, str)}


def router_problem(steps: list[Json]) -> str:
    """Why the vllm-router of this Python cannot route prefill and decode; empty if it can, or was not found."""
    said = next((step.get("problem") for step in steps if step.get("step") == "router"), "")
    return said[:400] if isinstance(said, str) else ""


def judge_nixl(steps: list[Json], wanted: list[str], ended: str) -> Json | None:
    """Make the facts of NIXL of the steps of :data:`INTERPRETER_PROBE`; None when NIXL was not come to.

    ``ended`` says how the process ended, if it did not end by itself.
    """
    by_name = {str(step.get("step")): step for step in steps}
    packages = string_map(by_name.get("packages", {}).get("packages"))
    version = packages.get("nixl") or next(
        (packages[name] for name in sorted(packages) if name.startswith("nixl-")), None
    )
    if "nixl" not in by_name and not ended:
        return None
    loaded = [str(step.get("plugin")) for step in steps if step.get("step") == "loaded"]
    failed = {str(step.get("plugin")): str(step.get("error")) for step in steps if step.get("step") == "failed"}
    error = str(by_name.get("nixl", {}).get("error") or "")
    if ended and "end" not in by_name:
        begun = [str(step.get("plugin")) for step in steps if step.get("step") == "loading"]
        open_ones = [name for name in begun if name not in loaded and name not in failed]
        if "nixl" not in by_name:
            error = f"loading NIXL ended the process: {ended}"
        for name in open_ones:
            failed[name] = f"loading it ended the process: {ended}"
        if open_ones:
            for name in wanted:
                if name not in loaded and name not in failed:
                    failed[name] = f"not tried, because loading {open_ones[0]} ended the process"
    return {
        "version": version,
        "plugins": loaded,
        "failed": failed,
        "missing_libraries": {},
        "libfabric_path": str(by_name.get("end", {}).get("libfabric") or ""),
        "error": error,
    }


def hub_folder(environment: dict[str, str], home: str) -> str:
    """Return the folder of the Hugging Face cache, as ``huggingface_hub`` finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(name):
            return expand(environment[name], home)
    base = environment.get("HF_HOME") or os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return os.path.join(expand(base, home), "hub")


# Endings of files of weights and the file that names them all, as vLLM prefers them.
WEIGHTS = (
    (".safetensors", "model.safetensors.index.json"),
    (".bin", "pytorch_model.bin.index.json"),
    (".pth", ""),
    (".gguf", ""),
)


def weigh(folder: str) -> tuple[int | None, bool | None, str]:
    """Return size of the weights in a folder (bytes), whether they are complete, and what is wrong with them.

    Complete means: every file that the index names is there and is not empty, or there is a file of weights and no
    index. Symbolic links, as in the cache, count as what they lead to.
    """
    names = list_folder(folder, 100000)
    for ending, index_name in WEIGHTS:
        files = [
            name for name in names if name.endswith(ending) and (ending != ".bin" or name.startswith("pytorch_model"))
        ]
        # Mistral's own format beside the usual one would be counted twice.
        usual = [name for name in files if not name.startswith("consolidated")]
        wanted = usual or files
        problem = ""
        if index_name in names:
            try:
                document = read_document(os.path.join(folder, index_name), INDEX_BYTES)
                shards = document.get("weight_map") if isinstance(document, dict) else None
                if not isinstance(shards, dict):
                    raise ValueError("it has no weight_map")
                named = {str(shard) for shard in shards.values()}
                # Names with a slash would lead out of the folder.
                wanted = sorted(shard for shard in named if "/" not in shard and shard not in ("", ".", ".."))[
                    :MAX_SHARDS
                ]
            except (OSError, ValueError) as error:
                return None, None, f"{index_name} cannot be read: {error}"
        if not wanted:
            continue
        size = 0
        lacking = []
        for name in wanted:
            try:
                status = os.stat(os.path.join(folder, name))
            except OSError:
                status = None
            if status is None or not stat.S_ISREG(status.st_mode) or not status.st_size:
                lacking.append(name)
            else:
                size += status.st_size
        if lacking:
            problem = f"{len(lacking)} of {len(wanted)} files of weights are missing or empty: {', '.join(lacking[:3])}"
        return size, not lacking, problem
    return 0, False, "there are no weights (*.safetensors, pytorch_model*.bin, *.pth, *.gguf)"


def read_model(folder: str, found: str, revision: str) -> Json:
    """Read a model's folder."""
    facts: Json = {"found": found, "path": folder, "revision": revision, "config": {}}
    problems = []
    try:
        config = read_document(os.path.join(folder, "config.json"), CONFIG_BYTES)
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
        facts["config"] = config
    except (OSError, ValueError) as error:
        problems.append(f"config.json cannot be read: {getattr(error, 'strerror', None) or error}")
    facts["weights_bytes"], facts["weights_complete"], problem = weigh(folder)
    facts["error"] = "; ".join([*problems, *([problem] if problem else [])])
    return facts


def find_model(model: str, revision: str, environment: dict[str, str], home: str) -> Json:
    """Find a model as vLLM would: a folder of that path, else the Hugging Face cache."""
    folder = expand(model, home)
    if os.path.isabs(folder):
        if os.path.isdir(folder):
            return read_model(folder, "folder", "")
        return {"found": "no", "path": folder, "error": "there is no such folder"}
    hub = hub_folder(environment, home)
    cached = os.path.join(hub, "models--" + model.replace("/", "--"))
    if not re.fullmatch(r"[\w.-]{1,200}(/[\w.-]{1,200})?", model) or ".." in model:
        return {"found": "no", "path": "", "error": "this is no folder and no name on the Hugging Face hub"}
    if not os.path.isdir(cached):
        return {"found": "no", "path": cached, "error": f"it is not in the cache {hub}"}
    commit = read_line(os.path.join(cached, "refs", revision)) if ".." not in revision else None
    commit = commit or revision
    snapshot = os.path.join(cached, "snapshots", commit)
    if not re.fullmatch(r"[\w.-]{1,200}", commit) or not os.path.isdir(snapshot):
        return {"found": "no", "path": cached, "error": f"the cache has no snapshot of revision {revision!r}"}
    return read_model(snapshot, "cache", commit)


# ------------------------------------------------------------------------------------------ parsers: instance metadata

INTERFACE_FIELDS = {
    "device-number": "device_number",
    "interface-id": "interface_id",
    "security-group-ids": "security_groups",
    "subnet-id": "subnet_id",
    "vpc-id": "vpc_id",
    "local-ipv4s": "addresses",
    "network-card-index": "network_card",
}


def read_metadata(get: Callable[[str], str | None]) -> Json:
    """Read the instance's identity and interfaces. ``get`` returns an item below ``meta-data/``, or None."""
    facts: Json = {
        "instance_id": get("instance-id"),
        "instance_type": get("instance-type"),
        "region": get("placement/region"),
        "zone": get("placement/availability-zone"),
        "zone_id": get("placement/availability-zone-id"),
        "interfaces": [],
    }
    macs = [mac.strip("/") for mac in (get("network/interfaces/macs/") or "").split()]
    for mac in [mac for mac in macs if re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", mac)][:MAX_DEVICES]:
        interface: Json = {"mac": mac}
        for item, key in INTERFACE_FIELDS.items():
            value = get(f"network/interfaces/macs/{mac}/{item}")
            if value is None and item == "network-card-index":
                # Documented with the longer name; Amazon's own network scripts read the shorter one.
                value = get(f"network/interfaces/macs/{mac}/network-card")
            if value is None:
                continue
            if key in ("device_number", "network_card"):
                interface[key] = whole(value)
            elif key in ("security_groups", "addresses"):
                interface[key] = value.split()[:100]
            else:
                interface[key] = value
        facts["interfaces"].append(interface)
    return facts


class Metadata:
    """The instance metadata service, version 2, over one connection. Proxies are not used for it."""

    def __init__(self, deadline: float, address: str = METADATA_ADDRESS) -> None:
        import http.client

        self._deadline = deadline
        self._connection = http.client.HTTPConnection(address, timeout=self._left())
        self._errors = (OSError, http.client.HTTPException)
        self._token = ""
        self.problem = ""

    def _left(self) -> float:
        return max(0.05, min(METADATA_TIMEOUT_S, self._deadline - time.monotonic()))

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if self._connection.sock is not None:
            self._connection.sock.settimeout(self._left())
        self._connection.request(method, path, headers=headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read(65536).decode("utf-8", "replace")

    def open(self) -> bool:
        """Get a token; ``problem`` says why there is none."""
        try:
            status, token = self._request("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        except self._errors as error:
            if "timed out" in str(error):
                self.problem = (
                    "the instance metadata service does not answer in this network namespace "
                    "(in a container: the instance's metadata hop limit is probably 1)"
                )
            else:
                self.problem = f"the instance metadata service cannot be reached: {error}"
            return False
        if status != 200 or not re.fullmatch(r"[\x21-\x7e]{1,4096}", token):
            disabled = "; it is disabled for this instance" if status == 403 else ""
            self.problem = f"the instance metadata service gives no token (HTTP status {status}{disabled})"
            return False
        self._token = token
        return True

    def get(self, item: str) -> str | None:
        """Return one item, or None; the first thing that goes wrong is kept in ``problem``."""
        if self.problem:
            return None
        if time.monotonic() >= self._deadline:
            self.problem = f"the instance metadata service is slow: nothing was read from {item!r} on"
            return None
        try:
            status, text = self._request("GET", f"/latest/meta-data/{item}", {"X-aws-ec2-metadata-token": self._token})
        except self._errors as error:
            self.problem = f"the instance metadata service failed at {item!r}: {error}"
            return None
        return text.strip()[:4096] if status == 200 else None


# ---------------------------------------------------------------------------------------- run by the cluster's Pythons

# Without json, re and importlib.util, each of which takes Python as long to load as to start.
INTERPRETER_PROBE = r'''
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import os
from _json import encode_basestring_ascii as quoted
def plain(value):
    if isinstance(value, dict):
        return "{%s}" % ", ".join("%s: %s" % (quoted(name), plain(item)) for name, item in value.items())
    if isinstance(value, list):
        return "[%s]" % ", ".join(plain(item) for item in value)
    return quoted(value)
def say(step, **fields):
    os.write(1, ("\nPDCTL-STEP " + plain(dict(fields, step=step)) + "\n").encode())
wanted, plugins = sys.argv[1].split(","), sys.argv[2].split(",")
version = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 8):
    say("packages", version=version, packages={})
    say("end")
    sys.exit()

def written_version(folder, name):
    for file in ("METADATA", "PKG-INFO", ""):
        try:
            with open(os.path.join(folder, name, file) if file else os.path.join(folder, name), "rb") as text:
                for line in text.read(65536).splitlines():
                    if line.startswith(b"Version:"):
                        return line[8:].strip().decode("ascii", "replace")
        except OSError:
            pass
    return ""

packages = {}
for folder in sys.path:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        continue
    for name in names:
        stem, _, ending = name.rpartition(".")
        if ending not in ("dist-info", "egg-info") or stem.startswith("~"):
            continue
        distribution, _, number = stem.partition("-")
        distribution = distribution.replace("_", "-").replace(".", "-").lower()
        if distribution in packages or not (distribution in wanted or distribution.startswith("vllm")):
            continue
        number = number if number and ending == "dist-info" else written_version(folder, name)
        if number:
            packages[distribution] = number
say("packages", version=version, packages=packages)

def find(name):
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec

def router_problem():
    # Another project has a distribution and a package of the same names. What is wanted is an option of the command
    # line; importing it would take more than a second.
    spec = find("vllm_router")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    if not folders:
        return "its package vllm_router cannot be found"
    for folder in folders:
        if os.path.isfile(os.path.join(folder, "launch_router.py")):
            try:
                with open(os.path.join(folder, "router_args.py"), "rb") as text:
                    if b"vllm-pd-disaggregation" in text.read(1048576):
                        return ""
            except OSError as error:
                return "its options cannot be read: %s" % error
            return "it has no option --vllm-pd-disaggregation"
    return "it has no module vllm_router.launch_router"

if "vllm-router" in packages:
    say("router", problem=router_problem())

def cuda_of_torch():
    torch = find("torch")
    try:
        with open(os.path.join(os.path.dirname(torch.origin), "version.py")) as text:
            for line in text.read(65536).splitlines():
                # cuda: Optional[str] = '12.8'
                if line.startswith("cuda") and "=" in line:
                    major = line.partition("=")[2].strip(" '\"").partition(".")[0]
                    return major if major.isdigit() else ""
    except (OSError, AttributeError, TypeError):
        pass
    return ""

def nixl_package():
    # The package of NIXL's wheels that fits this torch, as the package `nixl` chooses it, but without importing torch.
    major = cuda_of_torch()
    for package in (*(["nixl_cu" + major] if major else ["nixl_cu13", "nixl_cu12", "nixl_rocm"]), "nixl"):
        spec = find(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for file in sorted(os.listdir(folder)):
                if file.startswith("_bindings.") and file.endswith(".so"):
                    return package, folder, os.path.join(folder, file)
    if major and find("nixl"):
        raise ImportError("torch here is built for CUDA %s, and nixl-cu%s is not installed" % (major, major))
    raise ImportError("NIXL is not installed")

def load():
    import importlib.machinery
    name, folder, file = nixl_package()
    # The native module alone: the Python around it would import numpy. Nothing here may open a port or patch memory
    # functions, which takes UCX half a second.
    for variable in list(os.environ):
        if variable.startswith("NIXL_TELEMETRY"):
            del os.environ[variable]
    os.environ["UCX_MEM_MMAP_HOOK_MODE"] = os.environ["UCX_MEM_CUDA_HOOK_MODE"] = "none"
    loader = importlib.machinery.ExtensionFileLoader(name + "._bindings", file)
    spec = importlib.machinery.ModuleSpec(name + "._bindings", loader, origin=file)
    bindings = loader.create_module(spec)
    bindings.__spec__ = spec
    loader.exec_module(bindings)
    try:
        config = bindings.nixlAgentConfig()
    except TypeError:
        # Before NIXL 1.0: without a thread of its own.
        config = bindings.nixlAgentConfig(False)
    agent = bindings.nixlAgent("pdctl-doctor", config)
    return folder, agent, list(agent.getAvailPlugins())

def plugin_file(folder, plugin):
    site, package = os.path.split(folder)
    # In the order in which NIXL looks; the wheels have its plugins twice.
    for place in (os.environ.get("NIXL_PLUGIN_DIR"), os.path.join(site, "." + package + ".mesonpy.libs", "plugins"),
                  os.path.join(site, package + ".libs", "nixl")):
        file = os.path.join(place, "libplugin_%s.so" % plugin) if place else ""
        if file and os.path.isfile(file):
            return file
    return ""

def mapped(part):
    with open("/proc/self/maps") as maps:
        for line in maps:
            file = line.rstrip("\n").partition("/")[2]
            if part in os.path.basename(file):
                return "/" + file
    return ""

def preload():
    """Load the CUDA run time of the wheels, which in vLLM's process torch has loaded before NIXL's plugins need it."""
    loaded = []
    for folder in sys.path:
        try:
            parts = os.listdir(os.path.join(folder, "nvidia"))
        except OSError:
            continue
        for part in sorted(parts):
            try:
                names = os.listdir(os.path.join(folder, "nvidia", part, "lib"))
            except OSError:
                continue
            for name in names:
                if name.startswith("libcudart.so."):
                    import ctypes
                    try:
                        ctypes.CDLL(os.path.join(folder, "nvidia", part, "lib", name), ctypes.RTLD_GLOBAL)
                        loaded.append(name)
                    except OSError:
                        pass
    return loaded

folder, agent, available, loaded = None, None, [], []
try:
    folder, agent, available = load()
    loaded = preload()
    say("nixl", available=available)
except Exception as error:
    say("nixl", error="%s (%s)" % (error, error.__cause__) if error.__cause__ else str(error) or repr(error))
for plugin in plugins if agent is not None else ():
    say("loading", plugin=plugin)
    if plugin not in available:
        say("failed", plugin=plugin, error="this NIXL has no such plugin", file="")
        continue
    try:
        agent.getPluginParams(plugin)
        say("loaded", plugin=plugin)
    except Exception as error:
        # NIXL's own error does not say why; the loader does.
        reason, file = "NIXL cannot load it: %s" % (str(error) or repr(error)), plugin_file(folder, plugin)
        if file:
            import ctypes
            try:
                ctypes.CDLL(file)
            except OSError as problem:
                reason = str(problem)
        say("failed", plugin=plugin, error=reason, file=file)
ucx = mapped("libucp")
say("end", preloaded=loaded, libfabric=mapped("libfabric.so"), loader=mapped("ld-linux"),
    ucx_modules=os.path.join(os.path.dirname(ucx), "ucx") if ucx else "")
sys.stdout.flush()
# The destructors of native libraries have hung before, and nothing here needs them.
os._exit(0)
'''


# ----------------------------------------------------------------------------------------------------------- the parts


class Job:
    """What one part works with: the request, its own deadline, and what the parts share."""

    def __init__(self, request: Json, deadline: float, shared: Shared, note: Callable[[str, str], None]) -> None:
        self.request = request
        self.deadline = deadline
        self.shared = shared
        # Enters a reason into `missing` under another name than the part's.
        self.note = note

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def run(self, argv: list[str], environment: dict[str, str] | None = None) -> Ended:
        """Run a program until the deadline; see :meth:`Programs.run`."""
        return self.shared.programs.run(argv, self.deadline, environment)

    def together(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run functions in threads; return what each returned, or the exception it raised, or Late."""
        import threading

        results: dict[str, Any] = {}

        def work(name: str) -> None:
            try:
                results[name] = functions[name]()
            except Exception as error:
                results[name] = error

        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            # Programs end at the deadline; a little more, so that what they said is not lost.
            thread.join(self.left_s + MARGIN_S / 2)
        return {name: results.get(name, Late("it did not end in time")) for name in functions}


class Shared:
    """What several parts need: programs, names, sockets and their owners."""

    def __init__(self, request: Json, programs: Programs) -> None:
        import threading

        self.programs = programs
        self._request = request
        self._lock = threading.Lock()
        self._names: dict[str, Any] = {}
        self._sockets: list[TcpSocket] | None = None
        self._owners: dict[int, int] = {}
        self._new_event = threading.Event
        self._new_thread = threading.Thread

    def resolve(self, name: str, deadline: float) -> list[str]:
        """Return the addresses of a name; raises OSError, or Late. A name is looked up once, in a thread of its own."""
        if is_address(name):
            return [name]
        with self._lock:
            known = self._names.get(name)
            if known is None:
                known = self._names[name] = {"event": self._new_event()}
                self._new_thread(target=self._look_up, args=(name, known), daemon=True).start()
        begin = time.monotonic()
        if not known["event"].wait(max(0.0, deadline - begin)):
            raise Late(f"the name {name} was not resolved within {time.monotonic() - begin:.1f} s")
        if "error" in known:
            raise known["error"]
        addresses: list[str] = known["addresses"]
        return addresses

    @staticmethod
    def _look_up(name: str, entry: Json) -> None:
        try:
            # As bytes: a string would be put through a codec that is slow to load, and that refuses what DNS does not.
            found = socket.getaddrinfo(
                name.encode("idna" if not name.isascii() else "ascii"), None, 0, socket.SOCK_STREAM
            )
            entry["addresses"] = list(dict.fromkeys(str(item[4][0]) for item in found))[:64]
        except (OSError, UnicodeError) as error:
            entry["error"] = error if isinstance(error, OSError) else OSError(f"{name!r} is no name of a host")
        finally:
            entry["event"].set()

    def sockets(self, deadline: float) -> list[TcpSocket]:
        """Return all TCP sockets, with the owners of those that matter looked up; see :meth:`owner`."""
        with self._lock:
            if self._sockets is None:
                found = []
                for table in ("tcp", "tcp6"):
                    found += parse_sockets(read_text(f"/proc/net/{table}", PART_BYTES) or "")
                planned = {entry["port"] for entry in planned_ports(self._request)}
                self._owners = find_owners(
                    {entry.inode for entry in found if entry.listening or entry.port in planned}, deadline
                )
                self._sockets = found
            return self._sockets

    def owner(self, entry: TcpSocket) -> int | None:
        """Return the process that has a socket, if this login may see it."""
        return self._owners.get(entry.inode)


def is_address(text: str) -> bool:
    """Tell whether this is an IP address, and no name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text.partition("%")[0])
        except (OSError, ValueError):
            continue
        return True
    return False


def find_owners(inodes: set[int], deadline: float) -> dict[int, int]:
    """Return the process of each socket, as far as this login may see it and the time suffices."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes if inode}
    owners: dict[int, int] = {}
    for entry in os.listdir("/proc") if wanted else ():
        if len(owners) == len(wanted) or time.monotonic() >= deadline:
            break
        if not entry.isdecimal():
            continue
        try:
            descriptors = os.listdir(f"/proc/{entry}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                inode = wanted.get(os.readlink(f"/proc/{entry}/fd/{descriptor}"))
            except OSError:
                continue
            if inode is not None:
                owners.setdefault(inode, int(entry))
    return owners


def describe_process(pid: int) -> str:
    """Return the program that a process runs; empty when it is gone or may not be seen."""
    return program_words((read_text(f"/proc/{pid}/cmdline", 8192) or "").rstrip("\0").split("\0"))


def part_system() -> Json:
    """The operating system and this login."""
    import hashlib

    machine = os.uname()
    release = parse_pairs(read_text("/etc/os-release") or read_text("/usr/lib/os-release") or "")
    boot = re.search(r"^btime (\d{1,12})$", read_text("/proc/stat", PART_BYTES) or "", re.MULTILINE)
    # The machine id alone is the same on all copies of an image, so the id of this boot is in it too.
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = ""
    ids = [read_line("/etc/machine-id") or "", read_line("/proc/sys/kernel/random/boot_id") or ""]
    identity = hashlib.sha256("/".join([*ids, namespace]).encode()).hexdigest()[:32] if any(ids) else None
    return {
        "hostname": machine.nodename,
        "kernel": machine.release,
        "machine": machine.machine,
        "os": release.get("PRETTY_NAME") or release.get("NAME") or machine.sysname,
        "cpus": len(os.sched_getaffinity(0)),
        "user": user_name(os.getuid()),
        "uid": os.getuid(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "container": find_container("/", dict(os.environ)),
        "boot_time_s": float(boot[1]) if boot else None,
        "machine_id": identity,
    }


def user_name(user: int) -> str:
    """Return the name of a user id, or the id as text."""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except (KeyError, OverflowError):
        return str(user)


def part_limits() -> Json:
    """Limits of this process, which are those of what the login starts."""
    text = read_text("/proc/self/limits")
    if text is None:
        raise NotFound("/proc/self/limits cannot be read")
    return parse_limits(text)


def part_memory() -> Json:
    """Memory, huge pages, control group, shared memory."""
    text = read_text("/proc/meminfo")
    if text is None:
        raise NotFound("/proc/meminfo cannot be read")
    facts = parse_meminfo(text)
    facts["cgroup_limit_bytes"] = memory_limit("/", read_text("/proc/self/cgroup") or "")
    try:
        status = os.statvfs("/dev/shm")
        facts["shm_total_bytes"] = status.f_blocks * status.f_frsize
        facts["shm_free_bytes"] = status.f_bavail * status.f_frsize
    except OSError:
        facts["shm_total_bytes"] = facts["shm_free_bytes"] = None
    return facts


def part_disks(job: Job) -> list[Json]:
    """File systems that matter."""
    home = home_folder()
    places = (
        ("home", home),
        ("hf_cache", hub_folder(planned_environment(job.request), home)),
        ("tmp", os.environ.get("TMPDIR") or "/tmp"),
    )
    disks = []
    for purpose, path in places:
        existing = path
        while not os.path.isdir(existing) and existing not in ("/", ""):
            existing = os.path.dirname(existing)
        status = os.statvfs(existing or "/")
        disks.append(
            {
                "purpose": purpose,
                "path": path,
                "total_bytes": status.f_blocks * status.f_frsize,
                "free_bytes": status.f_bavail * status.f_frsize,
                "writable": os.access(existing or "/", os.W_OK | os.X_OK),
            }
        )
    return disks


def part_clock() -> Json:
    """Whether the clock is synchronised; the time itself is put in at the end."""
    try:
        import ctypes

        buffer = ctypes.create_string_buffer(512)
        # With `modes` 0 it only reads.
        if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
            return {"synchronized": None}
        return {"synchronized": parse_timex(buffer.raw)}
    except (ImportError, OSError, AttributeError):
        return {"synchronized": None}


def part_kernel() -> Json:
    """Kernel settings."""
    ports = [whole(word) for word in (read_line("/proc/sys/net/ipv4/ip_local_port_range") or "").split()]
    return {
        "sched_autogroup_enabled": whole(read_line("/proc/sys/kernel/sched_autogroup_enabled")),
        "ptrace_scope": whole(read_line("/proc/sys/kernel/yama/ptrace_scope")),
        "ip_local_port_range": ports if len(ports) == 2 and None not in ports else None,
        "ip_unprivileged_port_start": whole(read_line("/proc/sys/net/ipv4/ip_unprivileged_port_start")),
    }


def part_rdma() -> Json:
    """RDMA devices."""
    return read_rdma("/")


def part_efa(job: Job) -> Json:
    """EFA driver, installer and what libfabric finds."""
    installer, packages = parse_installed_packages(read_text("/opt/amazon/efa_installed_packages") or "")
    program = find_program("fi_info", [f"{EFA_FOLDER}/bin"])
    facts: Json = {
        "driver_version": read_line("/sys/module/efa/version"),
        "driver_loaded": os.path.isdir("/sys/module/efa"),
        "installer_version": installer,
        "installed_packages": packages,
        "fi_info_path": program,
        "libfabric_version": None,
    }
    if program is None:
        return facts
    # Its warnings say why a device is left out.
    environment = {**os.environ, "FI_LOG_LEVEL": "warn", "FI_LOG_PROV": "efa,core"}
    endpoint = [program, "-p", "efa", "-t", "FI_EP_RDM"]
    questions = {
        "version": [program, "--version"],
        "rdm": endpoint,
        "direct_rma": [program, "-p", "efa", "-f", "efa-direct", "-t", "FI_EP_RDM", "-c", "FI_RMA"],
        "device_memory": [*endpoint, "-c", "FI_HMEM"],
    }
    answers = job.together({name: functools.partial(job.run, argv, environment) for name, argv in questions.items()})
    version = answers.pop("version")
    if isinstance(version, Ended):
        facts["libfabric_version"] = parse_libfabric_version(version.text)
    for name, answer in answers.items():
        facts[name] = provider_answer(answer)
    return facts


def provider_answer(answer: Any) -> Json:
    """Make the facts of one call of ``fi_info``."""
    if not isinstance(answer, Ended):
        return {"exit_code": None, "error": str(answer)}
    domains, fabrics = parse_fi_info(answer.text)
    error = "" if answer.code == 0 else tail(answer.stderr)
    return {"exit_code": answer.code, "domains": domains, "fabrics": fabrics, "error": error}


def part_nvidia(job: Job) -> Json:
    """NVIDIA GPUs, driver, fabric manager, topology."""
    version, module = parse_driver_version(read_text("/proc/driver/nvidia/version") or "")
    program = find_program("nvidia-smi")
    facts: Json = {
        "present": version is not None or program is not None or os.path.exists("/dev/nvidiactl"),
        "driver_version": version,
        "kernel_module": module,
        "gpus": [],
        "error": "",
        "fabric_manager": None,
        "topology": "",
    }
    if program is None:
        if facts["present"]:
            facts["error"] = "there is an NVIDIA driver, but no nvidia-smi in PATH"
        return facts
    query = [program, f"--query-gpu={','.join(GPU_COLUMNS)}", "--format=csv,noheader,nounits"]
    calls = {
        "query": functools.partial(job.run, query),
        "topology": functools.partial(job.run, [program, "topo", "-m"]),
    }
    systemctl = find_program("systemctl")
    if systemctl is not None and os.path.isdir("/run/systemd/system"):
        unit = [systemctl, "show", "-p", "LoadState,ActiveState", "nvidia-fabricmanager"]
        calls["unit"] = functools.partial(job.run, unit)
    answers = job.together(calls)
    answer = answers["query"]
    if not isinstance(answer, Ended):
        raise answer
    facts["gpus"], driver = parse_gpus(answer.text)
    facts["driver_version"] = driver or version
    if answer.code != 0 or not facts["gpus"]:
        facts["error"] = tail(answer.stderr + b"\n" + answer.stdout) or f"nvidia-smi ended with status {answer.code}"
    if isinstance(answers["topology"], Ended) and answers["topology"].code == 0:
        facts["topology"] = answers["topology"].text[:65536]
    if isinstance(answers.get("unit"), Ended):
        facts["fabric_manager"] = parse_unit(answers["unit"].text)
    return facts


def part_neuron(job: Job) -> Json:
    """Neuron devices, driver and run time."""
    program = find_program("neuron-ls", [f"{NEURON_FOLDER}/bin"])
    nodes = [name for name in os.listdir("/dev") if re.fullmatch(r"neuron\d+", name)]
    facts: Json = {"present": bool(nodes) or program is not None, "devices": [], "error": ""}
    facts["driver_version"] = read_line("/sys/module/neuron/version")
    if not facts["present"]:
        return facts
    code = (
        "import ctypes,sys\n"
        "for n in sys.argv[1:]:\n"
        " try: ctypes.CDLL(n); sys.exit(0)\n"
        " except OSError: pass\n"
        "sys.exit(1)"
    )
    library = [sys.executable, "-I", "-S", "-c", code, "libnrt.so.1", f"{NEURON_FOLDER}/lib/libnrt.so.1"]
    calls = {"library": functools.partial(job.run, library)}
    if program is not None:
        calls["list"] = functools.partial(job.run, [program, "--json-output"])
    answers = job.together(calls)
    if isinstance(answers["library"], Ended):
        facts["runtime_library"] = answers["library"].code == 0
    answer = answers.get("list")
    if answer is None:
        facts["error"] = "there are /dev/neuron* devices, but no neuron-ls"
    elif not isinstance(answer, Ended):
        raise answer
    elif answer.code != 0:
        facts["error"] = tail(answer.stderr) or f"neuron-ls ended with status {answer.code}"
    else:
        try:
            facts["devices"] = parse_neuron_ls(answer.text)
        except ValueError as error:
            facts["error"] = f"neuron-ls wrote something unexpected: {error}"
    return facts


def part_modules() -> Json:
    """Kernel modules of interest, and GDRCopy."""
    text = read_text("/proc/modules", 1024 * 1024) or ""
    loaded = [name for name in (line.partition(" ")[0] for line in text.splitlines()) if name in MODULES]
    exists = os.path.exists("/dev/gdrdrv")
    return {
        "loaded": sorted(loaded),
        "gdrdrv_exists": exists,
        "gdrdrv_open": exists and not try_open("/dev/gdrdrv"),
    }


def part_cloud(job: Job) -> Json:
    """Where the machine runs."""
    vendor = read_line("/sys/class/dmi/id/sys_vendor") or ""
    facts: Json = {"vendor": vendor, "product": read_line("/sys/class/dmi/id/product_name") or ""}
    on_ec2 = vendor == "Amazon EC2" or (read_line("/sys/hypervisor/uuid") or "").startswith("ec2")
    if not on_ec2 and job.request.get("ec2") is not True:
        facts["metadata_error"] = "not asked: the firmware does not say that this is an EC2 instance"
        return facts
    if vendor == "Amazon EC2":
        tag = read_line("/sys/class/dmi/id/board_asset_tag") or ""
        facts["instance_id"] = tag if re.fullmatch(r"i-[0-9a-f]{8,32}", tag) else None
        facts["instance_type"] = facts["product"] or None
    metadata = Metadata(job.deadline)
    if metadata.open():
        facts.update({name: value for name, value in read_metadata(metadata.get).items() if value is not None})
    facts["metadata_error"] = metadata.problem
    return facts


def part_environment() -> dict[str, str]:
    """Variables of this login that matter."""
    return safe_variables(dict(os.environ))


def planned_environment(request: Json, python: str = "") -> dict[str, str]:
    """Return what an interpreter's environment (the first one's unless named) will be: the login's, then the plan's."""
    given = request.get("environments")
    environments = given if isinstance(given, dict) else {}
    if not python:
        python = next(iter(strings(request.get("pythons"))), "")
    environment = dict(os.environ)
    home = home_folder()
    for name, value in string_map(environments.get(python)).items():
        if re.fullmatch(r"[A-Za-z_]\w*", name) and "\0" not in value:
            environment[name] = value.replace("@HOME@", home)
    return environment


def part_interpreters(job: Job) -> list[Json]:
    """The Pythons that the plan names, and NIXL in each."""
    pythons = list(dict.fromkeys(strings(job.request.get("pythons"), MAX_PYTHONS)))
    plugins = list(dict.fromkeys(strings(job.request.get("plugins"), 16))) or list(PLUGINS)
    answers = job.together({python: functools.partial(look_at_python, job, python, plugins) for python in pythons})
    facts = []
    late: list[BaseException] = []
    for python, answer in answers.items():
        if isinstance(answer, Late):
            # Neither good nor bad: it is left out, and the others stand.
            late.append(answer)
            job.note(f"interpreter {python}", str(answer))
        elif isinstance(answer, Exception):
            facts.append({"python": python, "ok": False, "error": str(answer) or repr(answer)})
        else:
            facts.append(answer)
    if late and not facts:
        raise late[0]
    return facts


def look_at_python(job: Job, python: str, plugins: list[str]) -> Json:
    """Run one interpreter and load NIXL with it."""
    environment = planned_environment(job.request, python)
    path = find_program(expand(python, home_folder()), path=environment.get("PATH"))
    if path is None:
        wanted = expand(python, home_folder())
        if "/" not in wanted:
            error = f"there is no program {wanted} in PATH"
        elif os.path.exists(wanted):
            error = f"{wanted} cannot be run by this login"
        else:
            error = f"there is no file {wanted}" + (
                "" if not os.path.islink(wanted) else " (a symbolic link leads nowhere)"
            )
        return {"python": python, "ok": False, "path": wanted, "error": error}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    argv = [path, "-c", INTERPRETER_PROBE, ",".join(PACKAGE_NAMES), ",".join(plugins)]
    late: Late | None = None
    try:
        ended = job.run(argv, environment)
    except Late as error:
        late, ended = error, Ended(0, error.output, b"")
    steps = parse_steps(ended.text)
    first = next((step for step in steps if step.get("step") == "packages"), None)
    facts: Json = {"python": python, "ok": first is not None, "path": path}
    if first is None:
        if late is not None:
            raise late
        facts["error"] = tail(ended.stderr or ended.stdout) or f"{path} {describe_end(ended.code)}"
        return facts
    facts["version"] = str(first.get("version"))
    facts["packages"] = string_map(first.get("packages"))
    facts["router_problem"] = router_problem(steps)
    finished = any(step.get("step") == "end" for step in steps)
    if late is not None and not finished:
        plugin = next((step.get("plugin") for step in reversed(steps) if step.get("step") == "loading"), None)
        job.note("nixl", f"loading {f'the NIXL plugin {plugin}' if plugin else 'NIXL'} with {python}: {late}")
        return facts
    said = tail(ended.stderr, 2)
    how = "" if finished else describe_end(ended.code) + (f": {said}" if said else "")
    facts["nixl"] = judge_nixl(steps, plugins, how)
    if facts["nixl"] is not None:
        find_libraries(job, steps, environment, facts["nixl"])
    return facts


def describe_end(code: int) -> str:
    """Say how a process ended."""
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended with status {code}"


# The modules of UCX that RDMA needs. UCX goes on without one that cannot be loaded, over TCP.
UCX_MODULES = ("libuct_ib.so", "libuct_ib_efa.so", "libuct_ib_mlx5.so")


def find_libraries(job: Job, steps: list[Json], environment: dict[str, str], nixl: Json) -> None:
    """Ask the loader which libraries are lacking, and put that into the facts.

    Of plugins that could not be loaded and, where there are RDMA devices, of the modules of UCX for them.
    """
    end = next((step for step in steps if step.get("step") == "end"), {})
    loader, preloaded = str(end.get("loader") or ""), strings(end.get("preloaded"))
    files = [step["file"] for step in steps if step.get("step") == "failed" and isinstance(step.get("file"), str)]
    modules = str(end.get("ucx_modules") or "")
    if modules and list_folder("/sys/class/infiniband", 1):
        names = list_folder(modules, 1000)
        files += [
            f"{modules}/{name}" for name in names if name.endswith(".0") and name[: name.find(".so") + 3] in UCX_MODULES
        ]
    # What ldd does, without the shell script around it. (`--list` of the loader stops at the first one.)
    program = loader if is_program(loader) else find_program("ldd")
    for file in files:
        if program is None or not file.startswith("/"):
            continue
        try:
            answer = job.run([program, file], {**environment, "LD_TRACE_LOADED_OBJECTS": "1"})
        except (Late, OSError):
            # The plugin's own error stays, and names the first one.
            continue
        found, missing = parse_ldd(answer.text)
        missing = [name for name in missing if name not in preloaded]
        if missing:
            nixl["missing_libraries"][os.path.basename(file)] = missing
        if not nixl["libfabric_path"]:
            nixl["libfabric_path"] = next((found[name] for name in found if name.startswith("libfabric.so")), "")


def part_network(job: Job) -> Json:
    """Interfaces, listeners, routes, names."""
    netlink = Netlink(job.deadline)
    try:
        links = netlink.links()
        addresses = netlink.addresses()
        routes = [find_route(job, netlink, links, peer) for peer in dict.fromkeys(strings(job.request.get("peers")))]
    finally:
        netlink.close()
    interfaces = []
    for index, link in links.items():
        speed = whole(read_line(f"/sys/class/net/{link['name']}/speed"))
        known = read_line(f"/sys/class/net/{link['name']}/ifindex") == str(index)
        interfaces.append(
            {
                **link,
                "addresses": addresses.get(index, []),
                # -1, or 2**32 - 1 on old kernels: unknown.
                "speed_mbps": speed if known and speed is not None and 0 < speed < 2**31 else None,
            }
        )
    listeners: dict[tuple[str, int], Json] = {}
    for entry in job.shared.sockets(job.deadline - 0.2):
        if entry.listening and len(listeners) < MAX_LISTENERS:
            pid = job.shared.owner(entry)
            listeners.setdefault(
                (entry.address, entry.port),
                {
                    "address": entry.address,
                    "port": entry.port,
                    "process": describe_process(pid) if pid else "",
                    "pid": pid,
                },
            )
    resolved: dict[str, list[str]] = {}
    for name in dict.fromkeys(strings(job.request.get("names"))):
        try:
            resolved[name] = job.shared.resolve(name, job.deadline)
        except OSError:
            resolved[name] = []
    return {
        "interfaces": interfaces,
        "listeners": list(listeners.values()),
        "routes": routes,
        "resolved": resolved,
    }


def find_route(job: Job, netlink: Netlink, links: dict[int, Json], peer: str) -> Json:
    """Ask for the route to a peer's address or name."""
    try:
        address = job.shared.resolve(peer, job.deadline)[0]
        route = netlink.route(address)
    except Late as error:
        return {"address": peer, "error": str(error)}
    except (OSError, IndexError, UnicodeError) as error:
        return {"address": peer, "error": getattr(error, "strerror", None) or str(error)}
    if "error" in route:
        return {"address": peer, "error": route["error"]}
    link = links.get(route["index"] or 0, {})
    return {
        "address": peer,
        "interface": link.get("name", ""),
        "source": route["source"],
        "mtu": route["mtu"] or link.get("mtu") or None,
    }


def planned_ports(request: Json) -> list[Json]:
    """Read ``ports`` of the request."""
    given = request.get("ports")
    ports = []
    for entry in given[:MAX_PLANNED_PORTS] if isinstance(given, list) else ():
        port = entry.get("port") if isinstance(entry, dict) else None
        if isinstance(port, int) and 0 < port < 65536:
            address, purpose = entry.get("address"), entry.get("purpose")
            ports.append(
                {
                    "port": port,
                    "address": address if isinstance(address, str) and address else "0.0.0.0",
                    "purpose": purpose if isinstance(purpose, str) else "",
                }
            )
    return ports


def try_bind(address: str, port: int) -> str:
    """Bind and listen as a server would; return ``in-use``, ``not-allowed``, ``not-local``, other words, or nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0)
    try:
        # Connections that are over but not forgotten (TIME_WAIT) do not matter to a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        probe.listen(1)
    except OSError as error:
        words = {
            errno.EADDRINUSE: "in-use",
            errno.EADDRNOTAVAIL: "not-local",
            errno.EACCES: "not-allowed",
            errno.EPERM: "not-allowed",
        }
        return words.get(error.errno or 0) or str(error.strerror or error)
    finally:
        probe.close()
    return ""


class OwnInstances:
    """Tells the running instances of the cluster from other processes.

    A process is one if its environment has the agent's marker, or if it is in the session of an instance's main process
    on record: processes that write a title over their argv may write over their environment too.
    """

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster if re.fullmatch(r"[a-z][a-z0-9-]{0,62}", cluster) else ""
        self._sessions: dict[tuple[int, int], str] = {}
        if not self._cluster:
            return
        home = os.environ.get("PDCTL_HOME") or os.path.join(home_folder(), ".pdctl")
        folder = os.path.join(home, self._cluster)
        for name in list_folder(folder, 4096):
            try:
                state = read_document(os.path.join(folder, name, "state.json"), CONFIG_BYTES)
            except (OSError, ValueError):
                continue
            if isinstance(state, dict) and state.get("boot_id") == read_line("/proc/sys/kernel/random/boot_id"):
                pid, created = whole(state.get("pid")), whole(state.get("create_time"))
                if pid and created:
                    self._sessions[pid, created] = f"{self._cluster}/{name}"

    def find(self, pid: int) -> str:
        """Return ``<cluster>/<instance>`` that a process belongs to; empty if to none that can be told."""
        try:
            same = os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
        except OSError:
            return ""
        if not same:
            # In a container, whose paths and names may well be the same.
            return ""
        marker = parse_marker((read_text(f"/proc/{pid}/environ", 1024 * 1024) or "").encode())
        if marker:
            return marker
        session, _ = parse_session(read_text(f"/proc/{pid}/stat", 8192) or "")
        _, created = parse_session(read_text(f"/proc/{session}/stat", 8192) or "")
        return self._sessions.get((session, created), "")


def part_ports(job: Job) -> list[Json]:
    """The planned ports, each bound for a moment."""
    planned = planned_ports(job.request)
    cluster = job.request.get("cluster")
    instances: OwnInstances | None = None
    for entry in planned:
        try:
            entry["error"] = try_bind(job.shared.resolve(entry["address"], job.deadline)[0], entry["port"])
        except Late as error:
            entry["error"] = str(error)
        except (OSError, IndexError):
            entry["error"] = "not-local"
        entry["free"] = not entry["error"]
        if entry["error"] == "in-use":
            instances = instances or OwnInstances(cluster if isinstance(cluster, str) else "")
            entry["holder"], entry["ours"] = find_holder(job, entry["port"], instances, str(cluster))
    return planned


def find_holder(job: Job, port: int, instances: OwnInstances, cluster: str) -> tuple[str, bool]:
    """Say who has a port, as far as this login may see it, and whether it is an instance of this cluster."""
    sockets = [entry for entry in job.shared.sockets(job.deadline - 0.2) if entry.port == port]
    # A listening socket first: its accepted connections have the same local port.
    sockets.sort(key=lambda entry: not entry.listening)
    for entry in sockets:
        pid = job.shared.owner(entry)
        if pid:
            instance = instances.find(pid)
            named = f"pdctl instance {instance}, " if instance else ""
            return f"{named}pid {pid}: {describe_process(pid)}", bool(instance) and instance.startswith(cluster + "/")
    if sockets:
        return f"a process of user {user_name(sockets[0].user)} (not visible to this login)", False
    return "", False


def part_model(job: Job) -> Json | None:
    """The model as this host has it."""
    model, revision = job.request.get("model"), job.request.get("revision")
    if not isinstance(model, str) or not model:
        raise NotFound("the request names no model")
    if not isinstance(revision, str) or not revision:
        revision = "main"
    return find_model(model, revision, planned_environment(job.request), home_folder())


PARTS: dict[str, Callable[[Job], Any]] = {
    "system": lambda _: part_system(),
    "limits": lambda _: part_limits(),
    "memory": lambda _: part_memory(),
    "disks": part_disks,
    "clock": lambda _: part_clock(),
    "kernel": lambda _: part_kernel(),
    "rdma": lambda _: part_rdma(),
    "efa": part_efa,
    "nvidia": part_nvidia,
    "neuron": part_neuron,
    "modules": lambda _: part_modules(),
    "cloud": part_cloud,
    "interpreters": part_interpreters,
    "network": part_network,
    "ports": part_ports,
    "model": part_model,
    "environment": lambda _: part_environment(),
}


# ----------------------------------------------------------------------------------------------- worker and its parent


def time_limits(request: Json) -> dict[str, float]:
    """Return the time-out of each part and of ``total``, in seconds."""
    given = request.get("timeouts")
    timeouts: Json = given if isinstance(given, dict) else {}

    def limit(name: str, default: float) -> float:
        value = timeouts.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 3600:
            return default
        return float(value)

    total = limit("total", TOTAL_TIMEOUT_S)
    default = limit("default", DEFAULT_TIMEOUT_S)
    limits = {part: min(total, limit(part, PART_TIMEOUTS_S.get(part, default))) for part in PARTS}
    limits["total"] = total
    return limits


def work(request: Json, limits: dict[str, float], begin: float, pipe: int) -> None:
    """Run all parts in threads and write a JSON line for each to the pipe. Runs in a process of its own."""
    import threading

    lock = threading.Lock()

    def tell(message: Json) -> None:
        view = memoryview(json.dumps(message).encode("ascii") + b"\n")
        with lock:
            while view:
                view = view[os.write(pipe, view) :]

    shared = Shared(request, Programs(tell))

    def note(name: str, reason: str) -> None:
        tell({"part": name, "missing": clean(reason)})

    def run(part: str) -> None:
        try:
            value = clean(PARTS[part](Job(request, begin + limits[part] - MARGIN_S, shared, note)))
            tell({"part": part, "value": value})
        except (Late, NotFound) as error:
            note(part, str(error))
        except Exception as error:
            # One part must not take the others with it, whatever is wrong with it.
            note(part, f"reading it failed: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(part,), daemon=True) for part in PARTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, begin + limits["total"] + 0.5 - time.monotonic()))


def start_worker(request: Json, limits: dict[str, float], begin: float) -> tuple[int, int]:
    """Fork the worker; return its pid and the pipe that it writes to."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    try:
        os.close(read_end)
        # It may outlive the parent, which must not keep the connection open that the answer went over.
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.setsid()
        work(request, limits, begin, write_end)
    finally:
        os._exit(0)


def collect(request: Json) -> Json:
    """Collect the facts; takes no longer than the total time-out and a moment."""
    begin, wall = time.monotonic(), time.time()
    limits = time_limits(request)
    pid, pipe = start_worker(request, limits, begin)
    parts: Json = {}
    missing: dict[str, str] = {}
    groups: set[int] = set()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    buffer = b""
    ended = False
    while not ended:
        waiting = [limits[part] for part in PARTS if part not in parts and part not in missing]
        left = begin + max(waiting, default=0.0) - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000 + 1):
            break
        piece = os.read(pipe, 1 << 20)
        ended = not piece
        lines = (buffer + piece).split(b"\n")
        buffer = lines.pop()
        for line in lines:
            take(json.loads(line), parts, missing, groups)
    for part in PARTS:
        if part not in parts and part not in missing:
            missing[part] = (
                "the process that reads the facts was killed (is the host out of memory?)"
                if ended
                else f"it was not known within {limits[part]:g} s"
            )
    os.close(pipe)
    for group in [pid, *groups]:
        kill_group(group)
    took = time.monotonic() - begin
    clock = parts.setdefault("clock", {"synchronized": None})
    missing.pop("clock", None)
    clock["time_s"] = wall + took / 2
    return {"schema": SCHEMA, "took_s": round(took, 4), "parts": parts, "missing": missing}


def take(message: Json, parts: Json, missing: dict[str, str], groups: set[int]) -> None:
    """Enter one message of the worker."""
    if "group" in message:
        groups.add(message["group"])
    elif "ended" in message:
        groups.discard(message["ended"])
    elif "missing" in message:
        missing[message["part"]] = message["missing"]
    else:
        parts[message["part"]] = message["value"]


def answer(request: bytes) -> Json:
    """Run one request and return the answer; never raises."""
    try:
        fields = json.loads(request.decode("utf-8", "replace"))
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        message = f"the request cannot be read: {error}"
        return {"ok": False, "error": {"code": "bad-request", "message": message, "hint": "", "details": {}}}
    try:
        return {"ok": True, "result": collect(fields)}
    except Exception as error:
        message = f"collecting facts failed: {type(error).__name__}: {error}"
        return {"ok": False, "error": {"code": "internal", "message": message, "hint": "", "details": {}}}


def main(request: bytes) -> None:
    """Run one request and print the answer line."""
    line = REPLY_PREFIX + json.dumps(answer(request)) + "\n"
    try:
        sys.stdout.buffer.write(line.encode("ascii"))
        sys.stdout.buffer.flush()
    except OSError:
        # The caller has gone away.
        return
