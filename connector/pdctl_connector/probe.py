"""A real NIXL WRITE between two hosts, as the KV cache travels: what `pdctl doctor` makes before a cluster is launched.

The modules `probe*` of this package are sent to both hosts as one script that is talked to in lines of JSON (see
`pdctl/doctor/probe_script.py`). They import nothing else of this package, nor vLLM. On each host run two processes:

* The supervisor (`probe_supervisor`), by any Python 3.8 or later. It starts the other one, passes lines both ways,
  keeps the log, and ends with it. When its own standard input ends (the operator is gone, or pressed Ctrl-C), it kills
  the other one.
* The child (`child` below), by the Python of the vLLM instance and with its variables. It alone loads NIXL. The kernel
  kills it when the supervisor dies, when a step takes longer than its limit (an alarm, so also inside of native code),
  and at the end of the lifetime. What it had open goes with it.

The two hosts say nothing to each other but over NIXL: agent metadata and the order of steps are relayed by the
operator, who has a channel to both hosts anyway. So the probe needs no port of its own, no listener that could be left
behind, and a firewall shows exactly where it would hurt: in NIXL's own connection, whose ports UCX chooses.

Messages to a host, each answered by one event (besides `stage` events, and `failed` at any time):

    {"do": "start", "role": "target" | "writer", ...see `Request`...}    ready: metadata, backend, memory, address
    {"do": "connect", "peer": <the other's ready>}                        connected
    {"do": "latency"}                                       (writer)      latency: p50_us, p99_us, writes
    {"do": "verify", "phase": "latency" | "batch", "notifications": n, "blocks": n}   (target)   verified: counters
    {"do": "batch"}                                   (writer)      batch: bytes, blocks, seconds, rounds, counters
    {"do": "notify"}                                        (writer)      notified: p50_us
    {"do": "store", "record": {...}}                                      stored
    {"do": "point"}, {"do": "verify-point"}                               see `probe_sweep`
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

import base64
import contextlib
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn

from . import probe_content as content
from . import probe_evidence as evidence
from . import probe_host as host
from .probe_content import Layout, Pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOTIFICATIONS = 50
"""How many notifications go there and back."""
ROUNDS, ROUNDS_S = 3, 1.0
"""The batch is written so often, as long as that takes no longer."""
HARD_GRACE_S = 2.0
"""How long after its limit a step is killed that did not notice by itself."""
SLOW_S, SLOW_WRITES = 6.0, 20
"""On a slow network the WRITEs of one block end after so long, if they were so many."""
BATCH_S = 5.0
"""The batch is made smaller if it would take longer, judged by the WRITEs of one block."""
RELEASE_S = 5.0
IDLE_S = 0.0002
# A share of the memory that is available; the target needs it once, and a part of it again to compare.
HOST_SHARE, DEVICE_SHARE = 4, 2


class Failure(Exception):
    """A step that failed; `stage` is its name, the message is for people."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


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
        self._peer_ready: dict[str, Any] = {}
        self._memory: host.Memory | None = None
        self._registered: Any = None
        self._lists: list[Any] = []
        self._handles: list[Any] = []
        self._seen: dict[str, set[str]] = {"latency": set(), "batch": set(), "pong": set()}
        self._pattern: Pattern | None = None
        self._layout = Layout(request.layers, request.piece_bytes, 1)
        self._theirs = self._layout
        self._blocks = 1
        self._block_s = 1.0
        self._backend = ""
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
            raise Failure(stage, host.describe(error)) from error
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
        do = self._commands()
        while True:
            message = self._next_message()
            if message["do"] == "end":
                return
            do[message["do"]](message)

    def _commands(self) -> dict[str, Callable[[dict[str, Any]], None]]:
        """What may be asked for once memory is registered."""
        return {
            "connect": self._connect,
            "latency": self._write_blocks,
            "batch": self._write_batch,
            "notify": self._ping,
            "verify": self._verify,
            "store": self._store,
        }

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
            device, why = host.cuda_works()
            if not device:
                self._notes.append(f"host memory, because PyTorch has no GPU here: {why}")
        elif request.accelerator == "neuron":
            self._notes.append("host memory, because the probe cannot allocate memory of Neuron devices")
        available = host.cuda_free_bytes() // DEVICE_SHARE if device else host.available_bytes() // HOST_SHARE
        room = min(request.batch_bytes, available)
        blocks = content.blocks_that_fit(room, request.layers, request.piece_bytes)
        if room < request.batch_bytes:
            self._notes.append(f"a batch of only {room >> 20} MiB, for more memory is not free")
        self._layout = Layout(request.layers, request.piece_bytes, blocks)
        size = blocks * request.layers * request.piece_bytes
        memory = self._memory = host.Memory(device=device, size=size)
        self._pattern = Pattern(request.seed, request.layers, request.piece_bytes)
        if request.role == "target":
            memory.fill()
        else:
            for layer in range(request.layers):
                memory.put(self._layout.offset(layer, 0), self._pattern.pieces(layer, range(blocks)))
        descriptors = self._agent.get_reg_descs([(memory.address, size, 0, "")], memory.nixl_kind)
        self._registered = self._agent.register_memory(descriptors, backends=list(self._agent.backends))

    def _metadata(self) -> str:
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def _memory_or_fail(self) -> host.Memory:
        if self._memory is None:
            raise Failure(self.stage, "no memory is registered yet")
        return self._memory

    # --- the way to the other side ------------------------------------------------------------------------------------

    def _connect(self, message: dict[str, Any]) -> None:
        peer = message["peer"]
        with self.step("handshake"):
            started = time.monotonic()
            name = self._agent.add_remote_agent(base64.b64decode(peer["metadata"]))
            self._peer = name.decode() if isinstance(name, bytes) else str(name)
            self._blocks = min(self._layout.stride, peer["blocks"])
            self._theirs = Layout(self._layout.layers, self._layout.piece_bytes, peer["blocks"])
            self._peer_ready = peer
            if self.request.role == "writer":
                self._lists += self._prepare(self._layout, self._theirs)
                if self._round_trip("hello") is None:
                    limit_s = self.request.limits["handshake"]
                    raise Failure("handshake", evidence.silence(self.request.peer, self.request.backends, limit_s))
            self._say(
                {"event": "connected", "took_s": time.monotonic() - started, "libraries": evidence.loaded_libraries()}
            )

    def _prepare(self, mine: Layout, theirs: Layout) -> list[Any]:
        """Lists of all descriptors of a layout, of this side's memory and of the other's."""
        import numpy as np

        memory, peer = self._memory_or_fail(), self._peer_ready
        kinds = {"cuda": "VRAM", "host": "DRAM"}
        lists = []
        for name, layout, address, kind in (
            ("", mine, memory.address, memory.nixl_kind),
            (self._peer, theirs, peer["address"], kinds[peer["memory"]]),
        ):
            pieces = np.arange(layout.layers * layout.stride, dtype=np.uint64)
            rows = np.zeros((len(pieces), 3), dtype=np.uint64)
            rows[:, 0] = pieces * np.uint64(layout.piece_bytes) + np.array([address], dtype=np.uint64)
            rows[:, 1] = layout.piece_bytes
            lists.append(self._agent.prep_xfer_dlist(name, self._agent.get_xfer_descs(rows, kind)))
        return lists

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
            self._say({"event": "notified", "p50_us": content.percentile(times, 0.5) * 1e6})

    # --- WRITEs -------------------------------------------------------------------------------------------------------

    def _write(
        self, local: list[int], remote: list[int], notification: str, what: str, lists: list[Any] | None = None
    ) -> float:
        """Make one WRITE, of descriptors in `lists` or in those of the layout, and see it complete; its seconds."""
        agent = self._agent
        mine, theirs = lists or self._lists
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
        mapping = content.scattered(self._blocks)
        times: list[float] = []
        with self.step("write"):
            slow_at = time.monotonic() + SLOW_S
            while len(times) <= self.request.writes and (len(times) < SLOW_WRITES or time.monotonic() < slow_at):
                block = len(times) % self._blocks
                local, remote = self._layout.numbers([block]), self._theirs.numbers([mapping[block]])
                what = f"WRITE {len(times) + 1}, of one block,"
                times.append(self._write(local, remote, f"pdctl latency {len(times)}", what))
        # The first one sets up what UCX sets up late.
        median = content.percentile(times[1:], 0.5)
        self._block_s = median
        self._say(
            {
                "event": "latency",
                "writes": len(times),
                "first_us": times[0] * 1e6,
                "p50_us": median * 1e6,
                "p99_us": content.percentile(times[1:], 0.99) * 1e6,
                "block_bytes": self._layout.layers * self._layout.piece_bytes,
            }
        )

    def _write_batch(self, message: dict[str, Any]) -> None:
        del message
        blocks = max(1, min(self._blocks, int(BATCH_S / self._block_s)))
        mapping = content.shifted(blocks)
        size = blocks * self._layout.layers * self._layout.piece_bytes
        notes = []
        if blocks < self._blocks:
            notes.append(f"a batch of only {size >> 20} MiB, for the network is slow")
        with self.step("write"):
            local, remote = self._layout.numbers_by_layer(range(blocks)), self._theirs.numbers_by_layer(mapping)
            before = evidence.read_counters()
            times: list[float] = []
            while not times or (len(times) < ROUNDS and sum(times) < ROUNDS_S):
                what = f"the WRITE of {size >> 20} MiB"
                times.append(self._write(local, remote, f"pdctl batch {len(times)}", what))
            after = evidence.read_counters()
        self._say(
            {
                "event": "batch",
                "bytes": size,
                "blocks": blocks,
                "rounds": len(times),
                "seconds": content.percentile(times, 0.5),
                "backend": self._backend,
                "before": before,
                "after": after,
                "notes": notes,
            }
        )

    # --- the target ---------------------------------------------------------------------------------------------------

    def _await_notifications(self, phase: str, wanted: int) -> None:
        seen = self._seen.setdefault(phase, set())
        with self.step("notify"):
            while len(seen) < wanted:
                if self._late:
                    raise Failure("notify", f"only {len(seen)} of {wanted} notifications of complete WRITEs arrived")
                self._pump()

    def _verify(self, message: dict[str, Any]) -> None:
        phase, wanted = message["phase"], message["notifications"]
        self._await_notifications(phase, wanted)
        after = evidence.read_counters()
        with self.step("verify"):
            memory = self._memory_or_fail()
            if phase == "latency":
                expected = content.sources(content.scattered(self._blocks), wanted)
            else:
                blocks = message["blocks"]
                expected = content.sources(content.shifted(blocks), blocks) + [-1] * (self._blocks - blocks)
            findings = content.Findings(self._pattern_or_fail(), self._layout.layers, expected)
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
            path = host.store_baseline(direction, self.request.peer, {**message["record"], "at": time.time()})
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
        sys.stderr.write(f"probe: while cleaning up: {host.describe(error)}\n")


def child(
    stream: BinaryIO, make: Callable[[Request, Lines, Callable[[dict[str, Any]], None]], Probe] = Probe
) -> NoReturn:
    """One side of the probe, in the process that loads NIXL.

    Args:
        stream: messages of the operator.
        make: a kind of probe that can do more.
    """
    message = json.loads(stream.readline())
    host.die_with(message["supervisor"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, message["lifetime_s"])
    # UCX writes its log to standard output, which is for messages here.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(event: dict[str, Any]) -> None:
        messages.write(json.dumps(event) + "\n")
        messages.flush()

    host.raise_memory_lock()
    probe = make(Request.read(message), Lines(stream), say)
    code = 0
    try:
        probe.run()
    except Failure as failure:
        say({"event": "failed", "stage": failure.stage, "error": str(failure)})
        code = 1
    except Exception as error:
        say({"event": "failed", "stage": probe.stage, "error": host.describe(error)})
        code = 1
    probe.release()
    # Native threads and destructors are not waited for.
    sys.stderr.flush()
    os._exit(code)
