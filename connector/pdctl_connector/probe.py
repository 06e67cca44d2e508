"""A real NIXL WRITE between two hosts, as the KV cache travels: what `pdctl doctor` makes before a cluster is launched.

One self-contained script that is sent to both hosts and talked to in lines of JSON (`pdctl/hosts/conversation.py` has
the framing); nothing of this package is imported, nor vLLM. On each host run two processes:

* The supervisor (`main`), by any Python 3.8 or later. It starts the other one, passes lines both ways, keeps the log,
  and ends with it. When its own standard input ends (the operator is gone, or pressed Ctrl-C), it kills the other one.
* The child (`child`), by the Python of the vLLM instance and with its variables. It alone loads NIXL. The kernel kills
  it when the supervisor dies, when a step takes longer than its limit (an alarm, so also inside of native code), and at
  the end of the lifetime. What it had open goes with it.

The two hosts say nothing to each other but over NIXL: agent metadata and the order of steps are relayed by the
operator, who has a channel to both hosts anyway. So the probe needs no port of its own, no listener that could be left
behind, and a firewall shows exactly where it will hurt: in NIXL's own connection, whose ports UCX chooses.

Messages to a host, each answered by one event (besides `stage` events, and `failed` at any time):

    {"do": "start", "role": "target" | "writer", ...see `Request`...}    ready: metadata, backend, memory, address
    {"do": "connect", "peer": <the other's ready>}                        connected
    {"do": "latency"}                                       (writer)      latency: p50_us, p99_us, writes
    {"do": "verify", "phase": "latency" | "batch", "notifications": n}    verified: bad, summary   (target)
    {"do": "batch"}                                         (writer)      batch: bytes, seconds, rounds, counters
    {"do": "notify"}                                        (writer)      notified: p50_us
    {"do": "store", "record": {...}}                                      stored
    {"do": "end"}                                                         ended: exit code, log, UCX's lanes

What is written is laid out as vLLM does it: for each layer a region of blocks, one descriptor per layer and block. The
content depends on seed, layer, block and position, so a block that is missing, swapped, written twice or damaged is
found; both sides compute it, and the target compares every byte, which is stronger than a hash of each block. The
first phase scatters blocks as a used cache does; the second moves all in one WRITE with neighbours kept together, as a
long prompt in a fresh cache. The target looks when it has NIXL's notification of a WRITE, not before and not later,
for that is what the decode side of vLLM relies on.

The baseline that is kept for `pdctl watch`, on both hosts: `~/.pdctl/probe/to-<decode host>.json` on the prefill host
and `~/.pdctl/probe/from-<prefill host>.json` on the decode host (`PDCTL_HOME` replaces `~/.pdctl`), mode 0600:

    {"schema": 1, "at": seconds since 1970, "prefill": host, "decode": host, "backend": "UCX", "transport": "tcp",
     "memory": "host", "block_bytes": n, "block_p50_us": x, "block_p99_us": x, "batch_bytes": n, "bandwidth_mb_s": x,
     "notification_us": x}

Only a probe that went well is kept. Times are microseconds, bandwidth is 10**6 bytes per second.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import json
import mmap
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    Words = np.ndarray[Any, np.dtype[np.uint64]]

PREFIX = "PDCTL-PROBE-1 "
FILL = 0xA5A5A5A5A5A5A5A5
"""What the target's memory holds where nothing was written."""
WORD = 8
NOTIFICATIONS = 50
"""How many notifications go there and back."""
ROUNDS, ROUNDS_S = 3, 1.0
"""The batch is written so often, as long as that takes no longer."""
BAD_SHOWN = 8
HARD_GRACE_S = 2.0
"""How long after its limit a step is killed that did not notice by itself."""
RELEASE_S = 5.0
IDLE_S = 0.0002
LOG_LINES, LOG_WIDTH = 60, 400
# A share of the memory that is available; the target needs it once, and a part of it again to compare.
HOST_SHARE, DEVICE_SHARE = 4, 2

_CHILD = (
    'import sys;b=sys.stdin.buffer;s=b.read(int(b.readline()));g={"__name__":"__pdctl_script__","SOURCE":s};'
    'exec(compile(s,"pdctl-probe","exec"),g);g["child"](b)'
)


class Failure(Exception):
    """A step that failed; `stage` is its name, the message is for people."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


# ----------------------------------------------------------------------------------------------- what is written (pure)


class Layout(NamedTuple):
    """Where the pieces of blocks lie: for each layer a region of blocks.

    Attributes:
        layers: how many.
        piece_bytes: what a block has in one layer; a multiple of 8.
        stride: blocks that a region has room for.
    """

    layers: int
    piece_bytes: int
    stride: int

    def offset(self, layer: int, block: int) -> int:
        """Where a piece starts, from the beginning of the memory."""
        return (layer * self.stride + block) * self.piece_bytes

    def numbers(self, blocks: Sequence[int]) -> list[int]:
        """Numbers of the descriptors of blocks: all layers of the first, of the next, and so on."""
        return [layer * self.stride + block for block in blocks for layer in range(self.layers)]

    def numbers_by_layer(self, blocks: Sequence[int]) -> list[int]:
        """The same layer by layer, so that neighbours in memory are neighbours in the list."""
        return [layer * self.stride + block for layer in range(self.layers) for block in blocks]


def blocks_that_fit(room_bytes: int, layers: int, piece_bytes: int) -> int:
    """How many blocks a memory holds; at least one, which may be too much for it."""
    return max(1, room_bytes // (layers * piece_bytes))


def scattered(blocks: int) -> list[int]:
    """For each local block the remote one, scattered: no two neighbours stay neighbours, if there are enough."""
    step = max(1, int(blocks * 0.618)) | 1
    while _common(step, blocks) != 1:
        step += 2
    return [(number * step + blocks // 3) % blocks for number in range(blocks)]


def shifted(blocks: int) -> list[int]:
    """For each local block the remote one, in two runs of neighbours."""
    return [(number + blocks // 2 + 1) % blocks for number in range(blocks)]


def _common(first: int, second: int) -> int:
    while second:
        first, second = second, first % second
    return first


def sources(mapping: Sequence[int], written: int) -> list[int]:
    """For each remote block the local one whose content it must hold, -1 for none, after the first WRITEs."""
    result = [-1] * len(mapping)
    for number in range(min(written, len(mapping))):
        result[mapping[number]] = number
    return result


def _mixed(values: Words) -> Words:
    """Another 64-bit number for each (splitmix64): no two the same."""
    import numpy as np

    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Pattern:
    """Content of all pieces: a noise of one piece, changed by a key that no two pieces share.

    Args:
        seed: of this probe.
        layers: layers of a block.
        piece_bytes: see `Layout`.
    """

    def __init__(self, seed: int, layers: int, piece_bytes: int) -> None:
        import numpy as np

        self._layers = layers
        self._start = np.uint64(seed % 2**64)
        words = np.arange(1, piece_bytes // WORD + 1, dtype=np.uint64)
        self._noise = _mixed(words * np.uint64(0x9E3779B97F4A7C15) ^ np.array([self._start]))

    def _keys(self, layer: int, blocks: Words) -> Words:
        import numpy as np

        # Addition wraps around, as it should; an array does so without a warning.
        pieces = blocks * np.uint64(self._layers) + np.uint64(layer)
        return _mixed(pieces + np.array([self._start], dtype=np.uint64))

    def pieces(self, layer: int, blocks: Sequence[int]) -> Words:
        """Content of blocks in one layer: a row each."""
        import numpy as np

        keys = self._keys(layer, np.asarray(blocks, dtype=np.uint64))
        return keys[:, None] ^ self._noise[None, :]

    def belongs_to(self, piece: Words, layers: int, blocks: int) -> tuple[int, int] | None:
        """Layer and block whose content this is; None if it is nobody's."""
        import numpy as np

        key = piece ^ self._noise
        if not (key == key[0]).all():
            return None
        for layer in range(layers):
            found = np.flatnonzero(self._keys(layer, np.arange(blocks, dtype=np.uint64)) == key[0])
            if len(found):
                return layer, int(found[0])
        return None


class Findings:
    """What is wrong in the target's memory. Fed layer by layer, as the device's memory has to be copied to look at it.

    Args:
        pattern: what was written.
        layers: of a block.
        expected: for each block the local block whose content it must hold, -1 for none.
    """

    def __init__(self, pattern: Pattern, layers: int, expected: Sequence[int]) -> None:
        self._pattern = pattern
        self._layers = layers
        self._expected = expected
        self.checked = 0
        self.bad: dict[str, int] = {}
        self.examples: list[str] = []

    def look(self, layer: int, found: Words) -> None:
        """Compare one layer: `found` has a row for each block."""
        import numpy as np

        written = [block for block, source in enumerate(self._expected) if source >= 0]
        others = [block for block, source in enumerate(self._expected) if source < 0]
        self.checked += len(written)
        if written:
            wanted = self._pattern.pieces(layer, [self._expected[block] for block in written])
            wrong = np.flatnonzero((found[written] != wanted).any(axis=1))
            for index in wrong:
                block = written[int(index)]
                self._add(layer, block, *self._kind(found[block], wanted[int(index)]))
        if others:
            for index in np.flatnonzero((found[others] != np.uint64(FILL)).any(axis=1)):
                self._add(layer, others[int(index)], "stray", "was overwritten though nothing was sent to it")

    def _kind(self, found: Words, wanted: Words) -> tuple[str, str]:
        import numpy as np

        if (found == np.uint64(FILL)).all():
            return "missing", "holds nothing of what was sent to it"
        owner = self._pattern.belongs_to(found, self._layers, len(self._expected))
        if owner is not None:
            return "swapped", f"holds what was meant for another place (layer {owner[0]} of local block {owner[1]})"
        differ = int((found != wanted).sum())
        return "damaged", f"differs in {differ * WORD} of {len(found) * WORD} bytes"

    def _add(self, layer: int, block: int, kind: str, text: str) -> None:
        self.bad[kind] = self.bad.get(kind, 0) + 1
        if len(self.examples) < BAD_SHOWN:
            self.examples.append(f"layer {layer} of block {block} {text}")

    def summary(self) -> str:
        """In words; empty if all is well."""
        if not self.bad:
            return ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.bad.items()))
        return f"{sum(self.bad.values())} of {self.checked} pieces are wrong ({kinds}): {'; '.join(self.examples)}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1))]


# ------------------------------------------------------------------------------------------------------------ the log


class Log:
    """The child's output: its last lines, and what UCX says about the way of remote writes. Pure.

    UCX (`UCX_PROTO_INFO=y`) writes a table for each operation; those of `remote memory write` name the transports:

        | w inter-node cfg#1                                       |
        | remote memory write by ucp_put* from host memory to host |
        +--------+-------------+-----------------------------------+
        | 0..inf | zero-copy   | tcp/eth0                          |

    and a line for each connection: `... inter-node cfg#1 rma_am(tcp/eth0) amo_am(tcp/eth0) am(tcp/eth0)`.
    """

    _UCX = re.compile(r"^\[[\d.]+\] \[[^\]]*\] *(?:\S+:\d+ +UCX +(\S+) +)?(.*)$")
    _LANES = re.compile(r"((?:inter-node|intra-node|self)\S*) cfg#\d+ +(.*\w\(.+)")

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.lanes: list[str] = []
        self._title: list[str] = []
        self._in_rows = False

    def feed(self, line: str) -> None:
        """Take one line."""
        match = self._UCX.match(line)
        text = (match.group(2) if match else line).strip()
        if match and text[:1] in ("+", "|"):
            self._table(text)
            return
        if match and (lanes := self._LANES.search(text)):
            self._lane(f"{lanes.group(1)}: {' '.join(lanes.group(2).split())}")
        elif text:
            self.lines.append(line.rstrip()[:LOG_WIDTH])
            # The start tells versions, the end what went wrong.
            if len(self.lines) > 2 * LOG_LINES:
                del self.lines[LOG_LINES // 3 : -LOG_LINES]

    def tail(self) -> list[str]:
        """The last lines."""
        return self.lines[-LOG_LINES:]

    def _table(self, text: str) -> None:
        if text.startswith("+"):
            if self._in_rows and self._title:
                # The line above the rows, or below them: the next title is another table's.
                self._in_rows = text.count("+") > 2 and self._in_rows
            return
        cells = [cell.strip() for cell in text.strip("|").split("|")]
        if len(cells) == 1:
            if self._in_rows:
                self._title, self._in_rows = [], False
            self._title.append(cells[0])
            return
        self._in_rows = True
        if len(cells) >= 3 and cells[0] != "Range" and any("remote memory write" in line for line in self._title):
            where = next((word for word in self._title[0].split() if word.endswith(("-node", "self"))), "")
            self._lane(f"{where} write {cells[0]}: {cells[1]}, {cells[2]}")

    def _lane(self, lane: str) -> None:
        if lane not in self.lanes and len(self.lanes) < 50:
            self.lanes.append(lane)


# ---------------------------------------------------------------------------------------------------------- counters

_COUNTED = re.compile(r"(tx|rx|send|recv|rdma_\w+)_bytes|port_(xmit|rcv)_data")


def read_counters(proc: str = "/proc", sys_folder: str = "/sys") -> dict[str, int]:
    """Bytes that went through this host's interfaces and RDMA devices so far.

    `net:<interface>:tx` and `:rx` from /proc/net/dev (this network namespace); `rdma:<device>:<counter>` from
    /sys/class/infiniband, all ports added up. `port_xmit_data` counts words of four bytes.
    """
    counters: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"{proc}/net/dev", encoding="ascii") as lines:
        for line in lines:
            name, colon, numbers = line.partition(":")
            if colon:
                fields = numbers.split()
                counters[f"net:{name.strip()}:rx"] = int(fields[0])
                counters[f"net:{name.strip()}:tx"] = int(fields[8])
    for path in glob.glob(f"{sys_folder}/class/infiniband/*/**/*counters/*", recursive=True) + glob.glob(
        f"{sys_folder}/class/infiniband/*/hw_counters/*"
    ):
        counter = os.path.basename(path)
        if _COUNTED.fullmatch(counter):
            device = path[len(f"{sys_folder}/class/infiniband/") :].partition("/")[0]
            with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
                key = f"rdma:{device}:{counter}"
                counters[key] = counters.get(key, 0) + int(file.read())
    return counters


# ------------------------------------------------------------------------------------------------------------- memory


class Memory:
    """Memory of this host or of its first visible GPU, page aligned.

    Args:
        device: whether it is to be the GPU's.
        size: in bytes.
    """

    def __init__(self, *, device: bool, size: int) -> None:
        self.size = size
        self.kind = "cuda" if device else "host"
        self._torch = importlib.import_module("torch") if device else None
        if self._torch is not None:
            self._tensor = self._torch.empty(size, dtype=self._torch.uint8, device="cuda:0")
            self.address = int(self._tensor.data_ptr())
        else:
            import numpy as np

            self._map = mmap.mmap(-1, size)
            self._bytes = np.frombuffer(self._map, dtype=np.uint8)
            self.address = int(self._bytes.ctypes.data)

    @property
    def nixl_kind(self) -> str:
        """NIXL's name for this kind."""
        return "VRAM" if self.kind == "cuda" else "DRAM"

    def put(self, offset: int, words: Words) -> None:
        """Copy content into it."""
        import numpy as np

        content = np.ascontiguousarray(words).view(np.uint8).reshape(-1)
        if self._torch is None:
            self._bytes[offset : offset + len(content)] = content
        else:
            self._tensor[offset : offset + len(content)].copy_(self._torch.from_numpy(content))
            self._torch.cuda.synchronize()

    def get(self, offset: int, size: int) -> Words:
        """Look at content of it."""
        import numpy as np

        if self._torch is None:
            return self._bytes[offset : offset + size].view(np.uint64)
        return np.asarray(self._tensor[offset : offset + size].cpu().numpy()).view(np.uint64)

    def fill(self) -> None:
        """Put `FILL` everywhere."""
        if self._torch is None:
            self._bytes[:] = FILL & 0xFF
        else:
            self._tensor.fill_(FILL & 0xFF)
            self._torch.cuda.synchronize()


def available_bytes() -> int:
    """Memory that this host has left, within the limit of its control group."""
    available = 1 << 62
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        available = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with (
            contextlib.suppress(OSError, ValueError),
            open(limit, encoding="ascii") as most,
            open(used, encoding="ascii") as now,
        ):
            available = min(available, max(0, int(most.read()) - int(now.read())))
    return available


# ---------------------------------------------------------------------------------------------------------- the child


class Request(NamedTuple):
    """What a host is asked to be.

    Attributes:
        role: `target` or `writer`.
        peer: name of the other host.
        agent: name of the NIXL agent; the other one's differs.
        backends: NIXL backends, as the instance would ask for them.
        threads: `num_threads` of UCX, as the instance would have it.
        progress_thread: whether NIXL drives progress itself.
        accelerator: of the cluster file: `cuda`, `neuron` or `cpu`.
        layers: of the model, on one rank.
        piece_bytes: bytes of one block in one layer.
        batch_bytes: size of the batch.
        writes: WRITEs of one block, without the first.
        seed: of the content.
        limits: seconds that each step may take, by its name.
        lifetime_s: seconds that all may take.
    """

    role: str
    peer: str
    agent: str
    backends: list[str]
    threads: int
    progress_thread: bool
    accelerator: str
    layers: int
    piece_bytes: int
    batch_bytes: int
    writes: int
    seed: int
    limits: dict[str, float]
    lifetime_s: float

    @classmethod
    def read(cls, message: dict[str, Any]) -> Request:
        """From a message, which has more in it."""
        return cls(**{name: message[name] for name in cls._fields})


class Lines:
    """Messages that arrive on standard input. The process ends when they do."""

    def __init__(self, stream: BinaryIO) -> None:
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stream = stream
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in iter(self._stream.readline, b""):
            self._queue.put(json.loads(line))
        os._exit(1)

    def poll(self) -> dict[str, Any] | None:
        """The next one, or None."""
        with contextlib.suppress(queue.Empty):
            return self._queue.get_nowait()
        return None

    def wait(self) -> dict[str, Any]:
        """The next one; how long that takes is limited by the lifetime alone."""
        return self._queue.get()


class Probe:
    """One side of the probe. Everything here is in one thread."""

    def __init__(self, request: Request, lines: Lines, say: Callable[[dict[str, Any]], None]) -> None:
        self.request = request
        self.stage = "start"
        self._lines = lines
        self._say = say
        self._ends_at = time.monotonic() + request.lifetime_s
        self._deadline = self._ends_at
        self._agent: Any = None
        self._peer = ""
        self._memory: Memory | None = None
        self._registered: Any = None
        self._lists: list[Any] = []
        self._handles: list[Any] = []
        self._seen: dict[str, set[str]] = {"latency": set(), "batch": set(), "pong": set()}
        self._pattern: Pattern | None = None
        self._layout = Layout(request.layers, request.piece_bytes, 1)
        self._theirs = self._layout
        self._blocks = 1
        self._notes: list[str] = []

    # --- steps --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, stage: str) -> Iterator[None]:
        """One step with its limit. Whatever is raised inside becomes a `Failure` of this step."""
        limit = min(self.request.limits[stage], max(0.1, self._ends_at - time.monotonic()))
        self.stage = stage
        self._say({"event": "stage", "stage": stage, "limit_s": limit})
        self._deadline = time.monotonic() + limit
        # For what hangs inside native code: its default action ends the process.
        signal.setitimer(signal.ITIMER_REAL, limit + HARD_GRACE_S)
        try:
            yield
        except Failure:
            raise
        except Exception as error:
            raise Failure(stage, describe(error)) from error
        finally:
            signal.setitimer(signal.ITIMER_REAL, max(0.1, self._ends_at - time.monotonic()))

    @property
    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    def run(self) -> None:
        """Do what is asked for until the end.

        Raises:
            Failure: a step failed.
        """
        with self.step("import"):
            nixl = self._import()
        with self.step("backend"):
            self._make_agent(nixl)
        with self.step("register"):
            self._register()
        self._say(
            {
                "event": "ready",
                "agent": self.request.agent,
                "metadata": self._metadata(),
                "backend": ",".join(self._agent.backends),
                "memory": self._memory_or_fail().kind,
                "notes": self._notes,
                "address": self._memory_or_fail().address,
                "blocks": self._layout.stride,
            }
        )
        do = {
            "connect": self._connect,
            "latency": self._write_blocks,
            "batch": self._write_batch,
            "notify": self._ping,
            "verify": self._verify,
            "store": self._store,
        }
        while True:
            message = self._next_message()
            if message["do"] == "end":
                return
            do[message["do"]](message)

    def _next_message(self) -> dict[str, Any]:
        """Wait for a message. A target that is connected drives NIXL meanwhile, for over TCP nobody else does."""
        if self.request.role == "writer" or not self._peer:
            return self._lines.wait()
        while True:
            busy = self._pump()
            message = self._lines.poll()
            if message is not None:
                return message
            if not busy:
                time.sleep(IDLE_S)

    # --- getting ready ------------------------------------------------------------------------------------------------

    def _import(self) -> Any:
        # vLLM sets this before it loads NIXL (`nixl_utils.py`, 0.32): UCX else keeps registrations without end.
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
        try:
            return importlib.import_module("nixl._api")
        except ImportError as error:
            raise Failure("import", f"this Python ({sys.executable}) cannot import NIXL: {error}") from error

    def _make_agent(self, nixl: Any) -> None:
        """As vLLM does (`nixl/base_worker.py`, 0.32): threads for UCX alone, else the list of backends."""
        wanted = self.request.backends
        options: dict[str, Any] = {"enable_prog_thread": self.request.progress_thread}
        if any(name != "UCX" for name in wanted):
            options["backends"] = wanted
        else:
            options["num_threads"] = self.request.threads
        self._agent = nixl.nixl_agent(self.request.agent, nixl.nixl_agent_config(**options))
        missing = [name for name in wanted if name not in self._agent.backends]
        if missing:
            # NIXL itself only warns, and goes on without.
            there = ", ".join(self._agent.get_plugin_list()) or "none"
            raise Failure("backend", f"NIXL has no usable plugin {', '.join(missing)} on this host; it has: {there}")

    def _register(self) -> None:
        request = self.request
        device = False
        if request.accelerator == "cuda":
            device, why = cuda_works()
            if not device:
                self._notes.append(f"host memory, because PyTorch has no GPU here: {why}")
        elif request.accelerator == "neuron":
            self._notes.append("host memory, because the probe cannot allocate memory of Neuron devices")
        available = cuda_free_bytes() // DEVICE_SHARE if device else available_bytes() // HOST_SHARE
        room = min(request.batch_bytes, available)
        blocks = blocks_that_fit(room, request.layers, request.piece_bytes)
        if room < request.batch_bytes:
            self._notes.append(f"a batch of only {room >> 20} MiB, for more memory is not free")
        self._layout = Layout(request.layers, request.piece_bytes, blocks)
        size = blocks * request.layers * request.piece_bytes
        memory = self._memory = Memory(device=device, size=size)
        self._pattern = Pattern(request.seed, request.layers, request.piece_bytes)
        if request.role == "target":
            memory.fill()
        else:
            for layer in range(request.layers):
                memory.put(self._layout.offset(layer, 0), self._pattern.pieces(layer, range(blocks)))
        descriptors = self._agent.get_reg_descs([(memory.address, size, 0, "")], memory.nixl_kind)
        self._registered = self._agent.register_memory(descriptors, backends=list(self._agent.backends))

    def _metadata(self) -> str:
        import base64

        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def _memory_or_fail(self) -> Memory:
        if self._memory is None:
            raise Failure(self.stage, "no memory is registered yet")
        return self._memory

    # --- the way to the other side ------------------------------------------------------------------------------------

    def _connect(self, message: dict[str, Any]) -> None:
        import base64

        peer = message["peer"]
        with self.step("handshake"):
            started = time.monotonic()
            name = self._agent.add_remote_agent(base64.b64decode(peer["metadata"]))
            self._peer = name.decode() if isinstance(name, bytes) else str(name)
            self._blocks = min(self._layout.stride, peer["blocks"])
            self._theirs = Layout(self._layout.layers, self._layout.piece_bytes, peer["blocks"])
            if self.request.role == "writer":
                self._prepare(peer)
                if self._round_trip("hello") is None:
                    raise Failure("handshake", self._silence())
            self._say({"event": "connected", "took_s": time.monotonic() - started, "libraries": loaded_libraries()})

    def _silence(self) -> str:
        limit = self.request.limits["handshake"]
        where = "choose free TCP ports themselves, beside those of the plan" if "UCX" in self._agent.backends else ""
        more = (
            f": UCX connections {where}. Does a firewall or security group between the hosts drop them?"
            if where
            else ""
        )
        return f"{self.request.peer} did not answer a NIXL notification within {limit:g} s{more}"

    def _prepare(self, peer: dict[str, Any]) -> None:
        import numpy as np

        memory = self._memory_or_fail()
        kinds = {"cuda": "VRAM", "host": "DRAM"}
        for name, layout, address, kind in (
            ("", self._layout, memory.address, memory.nixl_kind),
            (self._peer, self._theirs, peer["address"], kinds[peer["memory"]]),
        ):
            pieces = np.arange(layout.layers * layout.stride, dtype=np.uint64)
            rows = np.zeros((len(pieces), 3), dtype=np.uint64)
            rows[:, 0] = pieces * np.uint64(layout.piece_bytes) + np.array([address], dtype=np.uint64)
            rows[:, 1] = layout.piece_bytes
            self._lists.append(self._agent.prep_xfer_dlist(name, self._agent.get_xfer_descs(rows, kind)))

    def _pump(self) -> bool:
        """Take notifications, and answer those that want it. Whether there were any."""
        arrived = self._agent.get_new_notifs()
        for messages in arrived.values():
            for raw in messages:
                # "pdctl <phase> <number>"
                _, phase, number = (raw if isinstance(raw, bytes) else raw.encode()).decode(errors="replace").split(" ")
                if phase == "ping":
                    self._agent.send_notif(self._peer, f"pdctl pong {number}".encode())
                else:
                    self._seen.setdefault(phase, set()).add(number)
        return bool(arrived)

    def _round_trip(self, number: str) -> float | None:
        """Seconds until a notification was answered; None if it was not before the step's limit."""
        started = time.perf_counter()
        self._agent.send_notif(self._peer, f"pdctl ping {number}".encode())
        while number not in self._seen["pong"]:
            if self._late:
                return None
            self._pump()
        return time.perf_counter() - started

    def _ping(self, message: dict[str, Any]) -> None:
        del message
        with self.step("notify"):
            times = []
            for number in range(NOTIFICATIONS):
                took = self._round_trip(str(number))
                if took is None:
                    raise Failure("notify", f"notification {number + 1} of {NOTIFICATIONS} was not answered in time")
                times.append(took)
            self._say({"event": "notified", "p50_us": percentile(times, 0.5) * 1e6})

    # --- WRITEs -------------------------------------------------------------------------------------------------------

    def _write(self, local: list[int], remote: list[int], notification: str, what: str) -> float:
        """Make one WRITE and see it complete; its seconds."""
        agent = self._agent
        mine, theirs = self._lists
        handle = agent.make_prepped_xfer("WRITE", mine, local, theirs, remote, notification.encode())
        self._handles.append(handle)
        started = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            if self._late:
                limit = self.request.limits["write"]
                raise Failure("write", f"{what} was not complete within {limit:g} s: is the link up, the host alive?")
            state = agent.check_xfer_state(handle)
        took = time.perf_counter() - started
        if state != "DONE":
            raise Failure("write", f"{what} ended in an error (NIXL says {state})")
        self._backend = agent.query_xfer_backend(handle)
        agent.release_xfer_handle(handle)
        self._handles.remove(handle)
        return took

    def _write_blocks(self, message: dict[str, Any]) -> None:
        del message
        mapping = scattered(self._blocks)
        times = []
        with self.step("write"):
            for number in range(self.request.writes + 1):
                block = number % self._blocks
                local, remote = self._layout.numbers([block]), self._theirs.numbers([mapping[block]])
                what = f"WRITE {number + 1} of {self.request.writes + 1}, of one block,"
                times.append(self._write(local, remote, f"pdctl latency {number}", what))
        # The first one sets up what UCX sets up late.
        self._say(
            {
                "event": "latency",
                "writes": len(times),
                "first_us": times[0] * 1e6,
                "p50_us": percentile(times[1:], 0.5) * 1e6,
                "p99_us": percentile(times[1:], 0.99) * 1e6,
                "block_bytes": self._layout.layers * self._layout.piece_bytes,
            }
        )

    def _write_batch(self, message: dict[str, Any]) -> None:
        del message
        mapping = shifted(self._blocks)
        size = self._blocks * self._layout.layers * self._layout.piece_bytes
        with self.step("write"):
            local, remote = (
                layout.numbers_by_layer(blocks)
                for layout, blocks in ((self._layout, range(self._blocks)), (self._theirs, mapping))
            )
            before = read_counters()
            times: list[float] = []
            while not times or (len(times) < ROUNDS and sum(times) < ROUNDS_S):
                what = f"the WRITE of {size >> 20} MiB"
                times.append(self._write(local, remote, f"pdctl batch {len(times)}", what))
            after = read_counters()
        self._say(
            {
                "event": "batch",
                "bytes": size,
                "rounds": len(times),
                "seconds": percentile(times, 0.5),
                "backend": self._backend,
                "before": before,
                "after": after,
            }
        )

    # --- the target ---------------------------------------------------------------------------------------------------

    def _verify(self, message: dict[str, Any]) -> None:
        phase, wanted = message["phase"], message["notifications"]
        with self.step("notify"):
            while len(self._seen[phase]) < wanted:
                if self._late:
                    count = len(self._seen[phase])
                    raise Failure("notify", f"only {count} of {wanted} notifications of complete WRITEs arrived")
                self._pump()
        after = read_counters()
        with self.step("verify"):
            memory = self._memory_or_fail()
            mapping = scattered(self._blocks) if phase == "latency" else shifted(self._blocks)
            expected = sources(mapping, wanted if phase == "latency" else self._blocks)
            findings = Findings(self._pattern_or_fail(), self._layout.layers, expected)
            for layer in range(self._layout.layers):
                region = memory.get(self._layout.offset(layer, 0), self._blocks * self._layout.piece_bytes)
                findings.look(layer, region.reshape(self._blocks, -1))
            if findings.bad:
                raise Failure("verify", findings.summary())
            memory.fill()
        self._say({"event": "verified", "phase": phase, "checked": findings.checked, "counters": after})

    def _pattern_or_fail(self) -> Pattern:
        if self._pattern is None:
            raise Failure(self.stage, "no memory is registered yet")
        return self._pattern

    # --- the end ------------------------------------------------------------------------------------------------------

    def _store(self, message: dict[str, Any]) -> None:
        direction = "to" if self.request.role == "writer" else "from"
        try:
            path = store_baseline(direction, self.request.peer, {**message["record"], "at": time.time()})
            self._say({"event": "stored", "path": path, "error": ""})
        except OSError as error:
            self._say({"event": "stored", "path": "", "error": f"{error.filename}: {error.strerror}"})

    def release(self) -> None:
        """Give everything back to NIXL, as far as it takes it. Bounded by an alarm."""
        signal.setitimer(signal.ITIMER_REAL, RELEASE_S)
        agent = self._agent
        if agent is None:
            return
        for handle in self._handles:
            _quietly(agent.release_xfer_handle, handle)
        for one in self._lists:
            _quietly(agent.release_dlist_handle, one)
        if self._registered is not None:
            _quietly(agent.deregister_memory, self._registered)
        if self._peer:
            _quietly(agent.remove_remote_agent, self._peer)
        self._agent = None


def _quietly(function: Callable[[Any], Any], argument: Any) -> None:
    try:
        function(argument)
    except Exception as error:
        sys.stderr.write(f"probe: while cleaning up: {describe(error)}\n")


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def cuda_works() -> tuple[bool, str]:
    """Whether PyTorch has a GPU here, and why not."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return False, "torch.cuda.is_available() is false"
        torch.zeros(1, device="cuda:0")
    except Exception as error:
        return False, describe(error)
    return True, ""


def cuda_free_bytes() -> int:
    """Memory that is free on the first visible GPU."""
    return int(importlib.import_module("torch").cuda.mem_get_info(0)[0])


def loaded_libraries() -> list[str]:
    """Paths of NIXL's plugins, of libfabric and of UCX's transports in this process."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            path = line.rstrip("\n").partition("/")[2]
            if re.search(r"/lib(plugin_\w+|fabric|uct_\w+|ucp)[-.][^/]*$", "/" + path):
                found["/" + path] = None
    return list(found)


def store_baseline(direction: str, peer: str, record: dict[str, Any]) -> str:
    """Write the baseline as a whole or not at all; its path.

    Raises:
        OSError: that is not possible.
    """
    home = os.environ.get("PDCTL_HOME") or os.path.join(os.path.expanduser("~"), ".pdctl")
    folder = os.path.join(home, "probe")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, f"{direction}-{re.sub('[^A-Za-z0-9_.-]', '_', peer)}.json")
    temporary = f"{path}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def raise_memory_lock() -> None:
    """Let this process register as much as the login may, as vLLM's instances do."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def child(stream: BinaryIO) -> NoReturn:
    """One side of the probe, in the process that loads NIXL."""
    message = json.loads(stream.readline())
    die_with(message["supervisor"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, message["lifetime_s"])
    # UCX writes its log to standard output, which is for messages here.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(event: dict[str, Any]) -> None:
        messages.write(json.dumps(event) + "\n")
        messages.flush()

    raise_memory_lock()
    probe = Probe(Request.read(message), Lines(stream), say)
    code = 0
    try:
        probe.run()
    except Failure as failure:
        say({"event": "failed", "stage": failure.stage, "error": str(failure)})
        code = 1
    except Exception as error:
        say({"event": "failed", "stage": probe.stage, "error": describe(error)})
        code = 1
    probe.release()
    # Native threads and destructors are not waited for.
    sys.stderr.flush()
    os._exit(code)


# ------------------------------------------------------------------------------------------------------ the supervisor


def say(event: dict[str, Any]) -> None:
    """Tell the operator."""
    sys.stdout.write(PREFIX + json.dumps(event) + "\n")
    sys.stdout.flush()


def home_folder() -> str:
    """The login's home folder."""
    return os.path.expanduser("~")


def expanded(text: str) -> str:
    """Text of the plan with its placeholders filled in (`pdctl/plan_args.py`)."""
    return text.replace("@HOME@", home_folder()).replace("@START_ID@", "probe")


def environment(variables: dict[str, str]) -> dict[str, str]:
    """The child's variables: of this login, of the instance, and those that make NIXL and UCX say what they do."""
    result = {**os.environ, **{name: expanded(value) for name, value in variables.items()}}
    result.pop("UCX_LOG_FILE", None)
    return {**result, "UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "NIXL_LOG_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"}


def end_in_words(code: int, stage: str, limit_s: float) -> str:
    """Why the child is gone, for people."""
    if code == -signal.SIGALRM:
        return f"it hung in the step `{stage}` and was killed after {limit_s:g} s"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"its process was ended by {name} in the step `{stage}`"
    return f"its process ended with exit status {code} in the step `{stage}`"


def main(stream: BinaryIO) -> NoReturn:
    """Supervise one side of the probe."""
    message = json.loads(stream.readline())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, message["lifetime_s"] + 2 * HARD_GRACE_S)
    python = expanded(message["python"])
    if python.startswith("~/"):
        python = home_folder() + python[1:]
    program = shutil.which(python)
    if program is None:
        where = "does not exist on this host, or cannot be run by this login" if "/" in python else "is not in the PATH"
        say({"event": "failed", "stage": "start", "error": f"{python} {where}"})
        say({"event": "ended", "code": 127, "log": [], "lanes": []})
        os._exit(1)
    process = subprocess.Popen(
        [program, "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(message["env"]),
    )
    log = Log()
    logging = threading.Thread(target=_keep_log, args=(process, log), daemon=True)
    logging.start()
    threading.Thread(target=_pass_on, args=(stream, process, message), daemon=True).start()
    stage, limit_s, failed = "start", message["lifetime_s"], False
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "stage":
            stage, limit_s = event["stage"], event["limit_s"]
        failed = failed or event["event"] == "failed"
        say(event)
    code = process.wait()
    logging.join(1.0)
    if code != 0 and not failed:
        say({"event": "failed", "stage": stage, "error": end_in_words(code, stage, limit_s)})
    say({"event": "ended", "code": code, "log": log.tail(), "lanes": log.lanes})
    os._exit(0)


def _keep_log(process: subprocess.Popen[bytes], log: Log) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        log.feed(line.decode(errors="replace"))


def _pass_on(stream: BinaryIO, process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    """Hand the child its source and all messages; kill it when they end."""
    source: bytes = globals()["SOURCE"]
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(b"%d\n%b" % (len(source), source))
        process.stdin.write(json.dumps({**message, "supervisor": os.getpid()}).encode() + b"\n")
        process.stdin.flush()
        for line in iter(stream.readline, b""):
            process.stdin.write(line)
            process.stdin.flush()
    # Either nobody is there any more who wants to know, or the child is gone already.
    process.kill()
