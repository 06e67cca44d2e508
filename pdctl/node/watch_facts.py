"""Looks at the instances of a cluster on this node, again and again, and prints one line of JSON a tick.

Sent to a node over SSH and run from memory (see ``pdctl/hosts/conversation.py``); standard library only, Python 3.8 or
later, Linux. It asks the ranks' telemetry, vLLM and the router over HTTP on the node itself, and reads ``/proc`` and
``/sys``; so a node costs its watcher one connection and one line a second, however many ranks it has.

Standard input: one line of JSON, the request (``pdctl/watch/poll_request.py``), then a line now and then as a sign of
life. Without one for `PATIENCE_S`, or when its input ends, or when nobody takes its output, it ends: a watcher that
died leaves nothing behind.

Why ``/proc`` and not psutil: on Linux psutil reads the same files, a node has it only by chance (this runs in any
Python of 3.8 or later, not in vLLM's), and two ways to one number would be two to test. One pass over ``/proc`` finds
all processes of all instances by their marker, every few ticks (`slow_pace` of the request).

A line is `PREFIX` and ``{"tick", "at", "readings": [[kind, instance, rank, age_s, value, error], ...]}``, with the
readings that are new since the last line. Each has its own deadline and is made by a thread that waits for nobody else:
what is late comes with a later line, and its age.
"""

from __future__ import annotations

import array
import collections
import fcntl
import http.client
import io
import json
import math
import os
import re
import socket
import struct
import sys
import threading
import time
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

PREFIX = "PDCTL-WATCH-1 "
PATIENCE_S = 30.0

LINE_LIMIT = 3 * 1024 * 1024
# Of an answer; telemetry's longest list has 1000 records of about 700 bytes.
HEALTH_LIMIT = 64 * 1024
TRANSFERS_LIMIT = 2 * 1024 * 1024
METRICS_LIMIT = 8 * 1024 * 1024
RECORDS = 1000
# Of the ended transfers that a first look finds, in which most are of no interest any more.
FIRST_ENDED = 100
SAMPLES = 4096
NAMES = 64
LOG_TAIL = 16 * 1024
# What a tick waits for its readings, as a share of the interval.
TICK_SHARE = 0.5

# The counters of RDMA devices that say how a transfer does; EFA's first, then those of InfiniBand and RoCE.
RDMA_COUNTERS = frozenset([
    "tx_bytes", "rx_bytes", "tx_pkts", "rx_pkts", "rx_drops", "send_bytes", "recv_bytes", "rdma_write_bytes",
    "rdma_write_recv_bytes", "rdma_write_wr_err", "rdma_read_bytes", "rdma_read_resp_bytes", "rdma_read_wr_err",
    "retrans_bytes", "retrans_pkts", "retrans_timeout_events", "unresponsive_remote_events",
    "impaired_remote_conn_events", "port_xmit_data", "port_rcv_data", "port_xmit_wait", "port_rcv_errors",
    "port_xmit_discards", "symbol_error", "link_downed", "out_of_sequence", "packet_seq_err",
    "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans", "np_cnp_sent", "rp_cnp_handled",
])  # fmt: skip
# Counted in units of four bytes.
RDMA_WORDS = {"port_xmit_data": "tx_bytes", "port_rcv_data": "rx_bytes"}

Json = Dict[str, Any]


class Trouble(Exception):
    """A reading gave nothing; the message says why."""


# ------------------------------------------------------------------------------------------------------------- values


def text(value: Any, limit: int = 256) -> str:
    """Return a text, cut; empty for anything else."""
    return value[:limit] if isinstance(value, str) else ""


def number(value: Any) -> Optional[float]:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None


def whole(value: Any) -> Optional[int]:
    """Return a whole number of 64 bits, or None."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        return None
    return value


def parse_whole(digits: str) -> Any:
    """Read a whole number of JSON; one of absurd length, which would take long, is none."""
    return int(digits) if len(digits) <= 20 else None


def read_json(body: bytes) -> Json:
    """Read a JSON object. Raises Trouble."""
    try:
        value = json.loads(body.decode("utf-8"), parse_int=parse_whole)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Trouble("answers nonsense: {!r}".format(body[:80].decode("utf-8", "replace")))
    return value


def read_health(body: bytes, instance: str, rank: int) -> Json:
    """Read ``/healthz`` of a rank. Raises Trouble, also if another one answers."""
    answer = read_json(body)
    writer, transfers = answer.get("writer"), answer.get("transfers")
    if not isinstance(writer, dict) or not isinstance(transfers, dict) or not text(writer.get("state")):
        raise Trouble("answers nonsense: {!r}".format(body[:80].decode("utf-8", "replace")))
    named, numbered = text(answer.get("instance")), whole(answer.get("rank"))
    if (named and named != instance) or (numbered is not None and numbered != rank):
        raise Trouble("its telemetry port is answered by rank {} of {}".format(numbered, named or "another instance"))
    outcomes = transfers.get("outcomes")
    return {
        "engine_id": text(answer.get("engine_id")),
        "pid": whole(answer.get("pid")),
        "uptime_s": number(answer.get("uptime_s")),
        "state": text(writer.get("state"), 32),
        "beat_age_s": number(writer.get("heartbeat_age_s")),
        "op": text(writer.get("op")),
        "op_age_s": number(writer.get("op_age_s")),
        "loops": whole(writer.get("loops")),
        "errors": whole(writer.get("errors")),
        "last_error": text(writer.get("last_error"), 1024),
        "inflight": whole(transfers.get("inflight")),
        "oldest_s": number(transfers.get("oldest_s")),
        "outcomes": {
            text(name, 64): count
            for name, count in (list(outcomes.items())[:NAMES] if isinstance(outcomes, dict) else [])
            if whole(count) is not None
        },
    }


def read_record(record: Any, unix: Optional[float]) -> Optional[List[Any]]:
    """Read one record of a ledger; None if it is none. The fields are those of ``pdctl/watch/poll_records.py``."""
    if not isinstance(record, dict) or not text(record.get("key")) or not text(record.get("stage")):
        return None
    side, age, stage_age = record.get("side"), number(record.get("age_s")), number(record.get("stage_age_s"))
    started, stages = number(record.get("started_unix")), record.get("stages")
    if side not in ("prefill", "decode") or age is None or stage_age is None:
        return None
    # How long ago it began, both times by this host's clock.
    begun = age if started is None or unix is None else max(age, unix - started)
    return [
        side,
        text(record.get("key")),
        whole(record.get("attempt")) or 0,
        text(record.get("stage"), 32),
        text(record.get("outcome"), 32),
        text(record.get("reason")),
        age,
        stage_age,
        {
            text(name, 32): value
            for name, value in (list(stages.items())[:16] if isinstance(stages, dict) else [])
            if number(value) is not None
        },
        started or 0.0,
        begun,
        text(record.get("request_id")),
        text(record.get("peer")),
        whole(record.get("tokens")) or 0,
        whole(record.get("blocks")) or 0,
        whole(record.get("descriptors")) or 0,
        whole(record.get("bytes")) or 0,
    ]


def read_transfers(body: bytes) -> List[List[Any]]:
    """Read the records of ``/transfers``. Raises Trouble."""
    answer = read_json(body)
    listed = answer.get("transfers")
    if not isinstance(listed, list):
        raise Trouble("answers nonsense: {!r}".format(body[:80].decode("utf-8", "replace")))
    unix = number(answer.get("unix"))
    records = [read_record(record, unix) for record in listed[:RECORDS]]
    return [record for record in records if record is not None]


LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_metrics(body: bytes, wanted: Json) -> Dict[str, float]:
    """Read samples of a Prometheus exposition.

    Args:
        body: the exposition.
        wanted: name of a sample -> ``[fold, label, ...]``. Samples that agree in these labels become one, as ``fold``
            says: ``sum`` or ``max``.

    Returns:
        ``name|label's value|...`` -> value.
    """
    samples: Dict[str, float] = {}
    for line in body.decode("utf-8", "replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        rule = wanted.get(name)
        if rule is None:
            continue
        rest = line[len(name) :]
        labels: Dict[str, str] = {}
        if rest.startswith("{"):
            inside, closing, rest = rest.rpartition("}")
            if not closing:
                continue
            labels = {match.group(1): match.group(2) for match in LABEL.finditer(inside)}
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if not math.isfinite(value):
            continue
        key = "|".join([name] + [labels.get(label, "")[:64] for label in rule[1:]])
        if key not in samples:
            if len(samples) < SAMPLES:
                samples[key] = value
        elif rule[0] == "max":
            samples[key] = max(samples[key], value)
        else:
            samples[key] += value
    return samples


# --------------------------------------------------------------------------------------------------------------- HTTP


class Bounded(io.RawIOBase):
    """What a socket receives, with a limit of time and of bytes for all of it. Looks like a socket to http.client."""

    def __init__(self, connection: socket.socket, deadline: float, limit: int) -> None:
        self._connection, self._deadline, self._room = connection, deadline, limit

    def makefile(self, mode: str) -> Any:
        """Return the file that http.client reads."""
        del mode
        return io.BufferedReader(self, 64 * 1024)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive some bytes. Raises socket.timeout, Trouble."""
        self._connection.settimeout(remaining(self._deadline))
        count = self._connection.recv_into(buffer)
        self._room -= count
        if self._room < 0:
            raise Trouble("answers with too much")
        return count


def remaining(deadline: float) -> float:
    """Return the seconds left. Raises socket.timeout when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise socket.timeout()
    return left


def get(address: str, port: int, path: str, timeout_s: float, limit: int) -> Tuple[int, bytes]:
    """Make a GET and return status and body. Everything together takes ``timeout_s`` at most. Raises Trouble."""
    deadline = time.monotonic() + timeout_s
    shown = "[{}]".format(address) if ":" in address else address
    request = "GET {} HTTP/1.1\r\nHost: {}:{}\r\nUser-Agent: pdctl-watch\r\nConnection: close\r\n\r\n"
    try:
        connection = socket.create_connection((address, port), remaining(deadline))
        try:
            connection.sendall(request.format(path, shown, port).encode("ascii"))
            # It asks no more of a socket than makefile().
            response = http.client.HTTPResponse(Bounded(connection, deadline, limit), method="GET")  # type: ignore
            response.begin()
            # Not read(), which takes what a length claims for granted.
            pieces = []
            while True:
                piece = response.read(256 * 1024)
                if not piece:
                    break
                pieces.append(piece)
            body = b"".join(pieces)
            if response.length:
                raise Trouble("answers by half: {} bytes are missing".format(response.length))
            return response.status, body
        finally:
            connection.close()
    except socket.timeout:
        raise Trouble("no answer within {:g} s".format(timeout_s)) from None
    except ConnectionRefusedError:
        raise Trouble("nothing listens on port {}".format(port)) from None
    except http.client.IncompleteRead:
        raise Trouble("answers by half") from None
    except http.client.HTTPException as error:
        raise Trouble("does not answer in HTTP ({})".format(type(error).__name__)) from None
    except (OSError, ValueError) as error:
        raise Trouble("cannot be asked: {}".format(text(getattr(error, "strerror", "")) or repr(error)[:200])) from None


def fetch(address: str, port: int, path: str, timeout_s: float, limit: int) -> bytes:
    """As `get`, for a body with status 200."""
    status, body = get(address, port, path, timeout_s, limit)
    if status != 200:
        raise Trouble("answers {} with HTTP {}".format(path.partition("?")[0], status))
    return body


# -------------------------------------------------------------------------------------------------------------- board


class Board:
    """Where readings are left until the next line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: Dict[Tuple[str, str, int], Tuple[float, Any, str]] = {}
        self._ended: Dict[Tuple[str, int], Deque[Any]] = {}

    def post(self, kind: str, instance: str, rank: int, value: Any, error: str = "") -> None:
        """Leave a reading; it takes the place of one that was not printed yet."""
        with self._lock:
            self._new[kind, instance, rank] = (time.monotonic(), value, error)

    def post_ended(self, instance: str, rank: int, records: List[Any]) -> None:
        """Leave ended transfers, oldest first, each of which is printed once."""
        with self._lock:
            self._ended.setdefault((instance, rank), collections.deque(maxlen=RECORDS)).extend(records)

    def take(self) -> Tuple[float, List[List[Any]]]:
        """Return the time, by which ages count, and what is new; forget it."""
        with self._lock:
            new, self._new = self._new, {}
            ended, self._ended = self._ended, {}
        now = time.monotonic()
        readings = [
            [kind, instance, rank, round(now - at, 4), value, error]
            for (kind, instance, rank), (at, value, error) in new.items()
        ]
        readings += [["ended", instance, rank, 0.0, list(found), ""] for (instance, rank), found in ended.items()]
        return round(now, 4), readings


class Worker(threading.Thread):
    """Makes readings, once a tick; one that takes longer misses ticks."""

    def __init__(self, work: Callable[[], None], pace: int, idle: threading.Condition) -> None:
        threading.Thread.__init__(self, daemon=True)
        self._work, self._pace, self._idle = work, pace, idle
        self._go = threading.Event()
        self.busy = False

    def tick(self, count: int) -> bool:
        """Begin, if it is its turn and it is not at work; return whether it began."""
        if self.busy or count % self._pace:
            return False
        self.busy = True
        self._go.set()
        return True

    def run(self) -> None:
        """Work whenever there is a tick."""
        while True:
            self._go.wait()
            self._go.clear()
            try:
                self._work()
            except Exception as error:  # A reading that is not foreseen must not end all later ones.
                sys.stderr.write("{!r}\n".format(error)[:500])
            with self._idle:
                self.busy = False
                self._idle.notify()


# ---------------------------------------------------------------------------------------------------------- HTTP work


class RankWork:
    """What one rank's telemetry says."""

    def __init__(self, request: Json, instance: str, rank: Json, board: Board, processes: "Processes") -> None:
        self._request, self._instance, self._board, self._processes = request, instance, board, processes
        self._rank: int = rank["rank"]
        self._at = (rank["address"], rank["port"])
        self._timeout: float = request["timeout_s"]
        self._looks = 0
        self._listed = 0
        self._engine: Any = None
        self._ended_total: Optional[int] = None
        self._sent: "collections.OrderedDict[Any, None]" = collections.OrderedDict()

    def __call__(self) -> None:
        """Read health, then what it says is worth reading."""
        name, rank = self._instance, self._rank
        due = self._looks % self._request["metrics_pace"] == 0
        self._looks += 1
        try:
            health = read_health(self._fetch("/healthz", HEALTH_LIMIT), name, rank)
        except Trouble as trouble:
            self._board.post("rank", name, rank, None, str(trouble))
            return
        self._board.post("rank", name, rank, health)
        self._processes.rank_seen(name, rank, health["pid"])
        if (health["engine_id"], health["pid"]) != self._engine:
            self._engine = (health["engine_id"], health["pid"])
            self._ended_total = None
            self._sent.clear()
        for kind, work in (("inflight", self._inflight), ("ended-trouble", self._ended)):
            try:
                work(health)
            except Trouble as trouble:
                self._board.post(kind, name, rank, None, str(trouble))
            else:
                if kind == "ended-trouble":
                    self._board.post(kind, name, rank, None)
        if due:
            try:
                body = self._fetch("/metrics", METRICS_LIMIT)
                self._board.post("rank-metrics", name, rank, read_metrics(body, self._request["metrics"]["rank"]))
            except Trouble as trouble:
                self._board.post("rank-metrics", name, rank, None, str(trouble))

    def _fetch(self, path: str, limit: int) -> bytes:
        return fetch(self._at[0], self._at[1], path, self._timeout, limit)

    def _inflight(self, health: Json) -> None:
        count = health["inflight"]
        records: List[Any] = []
        if count != 0:
            path = "/transfers?state=inflight&limit={}".format(RECORDS)
            # One that ended while the list was made is among the ended ones, then or later.
            records = [record for record in read_transfers(self._fetch(path, TRANSFERS_LIMIT)) if not record[4]]
        unlisted = max(0, (count or 0) - RECORDS)
        self._board.post("inflight", self._instance, self._rank, {"records": records, "unlisted": unlisted})

    def _ended(self, health: Json) -> None:
        total = sum(health["outcomes"].values())
        before, first = self._ended_total, self._ended_total is None
        new = RECORDS if before is None else total - before
        if new == 0:
            return
        limit = min(RECORDS, max(new, 0) + 16)
        records = read_transfers(self._fetch("/transfers?state=recent&limit={}".format(limit), TRANSFERS_LIMIT))
        fresh = []
        for index, record in enumerate(records):
            identity = (record[0], record[1], record[2], record[9])
            if identity in self._sent:
                continue
            self._sent[identity] = None
            if not first or index < FIRST_ENDED or record[4] not in ("received", "completed"):
                fresh.append(record)
        while len(self._sent) > 2 * RECORDS:
            self._sent.popitem(last=False)
        self._ended_total = total
        if fresh:
            self._board.post_ended(self._instance, self._rank, fresh[::-1])


class HealthWork:
    """Whether an API says that it is well."""

    def __init__(self, request: Json, instance: Json, board: Board) -> None:
        self._timeout: float = request["timeout_s"]
        self._name: str = instance["name"]
        self._at = (instance["address"], instance["port"])
        self._board = board

    def __call__(self) -> None:
        """Read ``/health``."""
        try:
            status, _ = get(self._at[0], self._at[1], "/health", self._timeout, HEALTH_LIMIT)
        except Trouble as trouble:
            self._board.post("health", self._name, -1, None, str(trouble))
        else:
            self._board.post("health", self._name, -1, status)


class MetricsWork:
    """What vLLM or the router counts."""

    def __init__(self, request: Json, instance: Json, board: Board) -> None:
        self._timeout: float = request["timeout_s"]
        self._name: str = instance["name"]
        self._at = (instance["metrics_address"], instance["metrics_port"])
        self._wanted: Json = request["metrics"]["router" if instance["role"] == "router" else "vllm"]
        self._board = board

    def __call__(self) -> None:
        """Read ``/metrics``."""
        try:
            body = fetch(self._at[0], self._at[1], "/metrics", self._timeout, METRICS_LIMIT)
            self._board.post("metrics", self._name, -1, read_metrics(body, self._wanted))
        except Trouble as trouble:
            self._board.post("metrics", self._name, -1, None, str(trouble))


# ---------------------------------------------------------------------------------------------------------- processes


class Stat:
    """One process of ``/proc``."""

    __slots__ = ("created", "group", "name", "pid", "rss_pages", "session", "state", "threads", "ticks")

    def __init__(self, line: str) -> None:
        opening, closing = line.index("("), line.rindex(")")
        fields = line[closing + 1 :].split()
        self.pid = int(line[:opening])
        self.name = line[opening + 1 : closing]
        self.state = fields[0]
        self.group, self.session = int(fields[2]), int(fields[3])
        self.ticks = int(fields[11]) + int(fields[12])
        self.threads = int(fields[17])
        self.created = int(fields[19])
        self.rss_pages = int(fields[21])

    @property
    def word(self) -> str:
        """The state in one word. A dead first thread whose other threads still run is no zombie."""
        if self.state in "Tt":
            return "stopped"
        if self.state in "XxZ" and self.threads <= 1:
            return "zombie"
        return "running"


def read_process(pid: int) -> Optional[Stat]:
    """Read a process; None if it is gone."""
    try:
        with open("/proc/{}/stat".format(pid), "rb") as file:
            return Stat(file.read().decode("utf-8", "replace"))
    except (OSError, ValueError, IndexError):
        return None


def read_file(path: str, limit: int = 64 * 1024) -> Optional[str]:
    """Read a small file; None if that fails."""
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def read_state(path: str) -> Json:
    """Read a JSON file of the node agent; empty if there is none."""
    try:
        value = json.loads(read_file(path, 1024 * 1024) or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_tail(path: str) -> str:
    """Read the end of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL))
            return file.read(LOG_TAIL).decode("utf-8", "replace")
    except OSError:
        return ""


def pdctl_home() -> str:
    """Return the folder of the node agent, as that one finds it."""
    home = os.environ.get("HOME", "")
    if not home.startswith("/"):
        import pwd

        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            home = "/"
    return os.path.realpath(os.environ.get("PDCTL_HOME") or os.path.join(home, ".pdctl"))


class Processes:
    """The processes of the instances."""

    def __init__(self, request: Json, board: Board) -> None:
        self._board = board
        self._folders = {one["name"]: os.path.join(pdctl_home(), request["cluster"], one["name"])
                         for one in request["instances"]}  # fmt: skip
        self._boot = (read_file("/proc/sys/kernel/random/boot_id") or "").strip()
        self._hertz = os.sysconf("SC_CLK_TCK")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._states: Dict[str, Tuple[Any, Json]] = {}
        self._started: Dict[Tuple[int, int], float] = {}
        self._usage: Dict[str, Json] = {}
        self._ticks: Dict[Tuple[int, int], int] = {}
        self._scanned = 0.0
        self._ranks: Dict[Tuple[str, int], Tuple[int, int]] = {}
        self._told: Dict[str, Tuple[Any, int]] = {}
        self._lock = threading.Lock()

    def rank_seen(self, instance: str, rank: int, pid: Optional[int]) -> None:
        """Remember which process a rank that has just answered is."""
        process = read_process(pid) if pid is not None and pid > 0 else None
        with self._lock:
            if process is None:
                # Of another pid namespace, so that nothing can be said of it.
                self._ranks.pop((instance, rank), None)
            else:
                self._ranks[instance, rank] = (process.pid, process.created)

    def look(self) -> None:
        """Post the state of every main process and of the ranks: some small reads."""
        with self._lock:
            ranks = dict(self._ranks)
        for name, folder in self._folders.items():
            found = {str(rank): self._rank_word(identity) for (of, rank), identity in ranks.items() if of == name}
            self._board.post("process", name, -1, dict(self._instance(name, folder), ranks=found))

    def scan(self) -> None:
        """Add up what the processes of each instance use: one pass over ``/proc``."""
        mains = {}
        for name, folder in self._folders.items():
            state = self._state(name, folder)
            if state:
                mains[state["pid"]] = name
        usage: Dict[str, Json] = {
            name: {"rss_bytes": 0, "cpu_cores": None, "stopped": [], "processes": 0} for name in mains.values()
        }
        now = time.monotonic()
        spent: Dict[str, int] = {}
        ticks: Dict[Tuple[int, int], int] = {}
        for entry in os.listdir("/proc") if mains else []:
            process = read_process(int(entry)) if entry.isdigit() else None
            name = (mains.get(process.session) or mains.get(process.group)) if process is not None else None
            if process is None or name is None:
                continue
            one = usage[name]
            one["rss_bytes"] += process.rss_pages * self._page
            one["processes"] += 1
            if process.word == "stopped" and len(one["stopped"]) < 16:
                one["stopped"].append("{} (pid {})".format(process.name[:32], process.pid))
            identity = (process.pid, process.created)
            ticks[identity] = process.ticks
            # One that was made since has used all its ticks since.
            spent[name] = spent.get(name, 0) + max(0, process.ticks - self._ticks.get(identity, 0))
        elapsed = now - self._scanned
        if self._scanned and elapsed > 0:
            for name, used in spent.items():
                usage[name]["cpu_cores"] = round(used / self._hertz / elapsed, 3)
        for one in usage.values():
            one["at"] = now
        self._ticks, self._scanned, self._usage = ticks, now, usage

    def _state(self, name: str, folder: str) -> Json:
        path = os.path.join(folder, "state.json")
        try:
            status = os.stat(path)
        except OSError:
            self._states.pop(name, None)
            return {}
        mark = (status.st_mtime_ns, status.st_ino, status.st_size)
        known = self._states.get(name)
        if known is None or known[0] != mark:
            state = read_state(path)
            good = all((whole(state.get(key)) or 0) > 0 for key in ("pid", "create_time"))
            known = self._states[name] = (mark, state if good else {})
        return known[1]

    def _instance(self, name: str, folder: str) -> Json:
        state = self._state(name, folder)
        if not state:
            return {"process": "absent"}
        pid, created = state["pid"], state["create_time"]
        process = read_process(pid) if state.get("boot_id") == self._boot else None
        found: Json = {"pid": pid, "created": "{}/{}".format(text(state.get("boot_id"), 64), created)}
        if process is None or process.created != created:
            ended = read_state(os.path.join(folder, "exit.json"))
            if text(ended.get("start_id")) != text(state.get("start_id")):
                ended = {}
            found.update(process="exited", exit_code=whole(ended.get("code")), exit_signal=whole(ended.get("signal")))
            # A few times, since a reading may be overtaken by the next; then it is known.
            mark, count = self._told.get(name, (None, 0))
            mine = (found["created"], found["exit_code"], found["exit_signal"])
            count = count + 1 if mark == mine else 1
            self._told[name] = (mine, count)
            if count <= 3:
                found["log"] = read_tail(os.path.join(folder, "vllm.log"))
            return found
        found["process"] = process.word
        found["started_unix"] = self._started_at(pid, created)
        usage = self._usage.get(name)
        if usage is not None:
            found.update({key: value for key, value in usage.items() if key != "at"})
            found["usage_age_s"] = round(time.monotonic() - usage["at"], 3)
        return found

    def _started_at(self, pid: int, created: int) -> float:
        # Computed once: a wall clock that is set would change it, and a change means another process.
        if (pid, created) not in self._started:
            if len(self._started) > 1000:
                self._started.clear()
            uptime = time.clock_gettime(time.CLOCK_BOOTTIME) - created / self._hertz
            self._started[pid, created] = round(time.time() - uptime, 2)
        return self._started[pid, created]

    @staticmethod
    def _rank_word(identity: Tuple[int, int]) -> str:
        process = read_process(identity[0])
        return "exited" if process is None or process.created != identity[1] else process.word


# --------------------------------------------------------------------------------------------------------------- host


def ipv4_addresses() -> Dict[str, str]:
    """Return the interface of every IPv4 address, also of further addresses of one interface."""
    size, entry = 64 * 1024, 40
    entries = array.array("B", bytes(size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # SIOCGIFCONF takes a struct ifconf: a length, and where to write entries of a name (16 bytes) and an address.
        answer = fcntl.ioctl(probe.fileno(), 0x8912, struct.pack("iP", size, entries.buffer_info()[0]))
    written = entries.tobytes()[: struct.unpack("iP", answer)[0]]
    found = {}
    for start in range(0, len(written), entry):
        name = written[start : start + 16].split(b"\0")[0].decode("ascii", "replace")
        found[socket.inet_ntoa(written[start + 20 : start + 24])] = name.partition(":")[0]
    return found


def ipv6_addresses(listing: str) -> Dict[str, str]:
    """Return the interface of every IPv6 address in ``/proc/net/if_inet6``."""
    found = {}
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) == 6 and len(fields[0]) == 32:
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))] = fields[5]
    return found


def interface_bytes(listing: str) -> Dict[str, Tuple[int, int]]:
    """Return bytes received and sent by interface, of ``/proc/net/dev``."""
    found = {}
    for line in listing.splitlines()[2:]:
        name, _, counters = line.partition(":")
        fields = counters.split()
        if len(fields) >= 9 and fields[0].isdigit() and fields[8].isdigit():
            found[name.strip()] = (int(fields[0]), int(fields[8]))
    return found


def read_rdma(root: str = "/") -> Dict[str, Dict[str, int]]:
    """Return the counters in `RDMA_COUNTERS` by device, those of its ports added up."""
    base = os.path.join(root, "sys/class/infiniband")
    devices: Dict[str, Dict[str, int]] = {}
    for device in list_folder(base)[:NAMES]:
        folders = [os.path.join(base, device, "hw_counters")]
        for port in list_folder(os.path.join(base, device, "ports"))[:8]:
            folders += [os.path.join(base, device, "ports", port, kind) for kind in ("hw_counters", "counters")]
        counters: Dict[str, int] = {}
        for folder in folders:
            for name in list_folder(folder):
                value = (read_file(os.path.join(folder, name), 64) or "").strip() if name in RDMA_COUNTERS else ""
                if value.isdigit():
                    shown = RDMA_WORDS.get(name, name)
                    counters[shown] = counters.get(shown, 0) + int(value) * (4 if name in RDMA_WORDS else 1)
        devices[device] = counters
    return devices


def read_baselines(home: str) -> Dict[str, float]:
    """Return what `pdctl doctor` last measured from here, in bytes per second by the decode host's name."""
    folder = os.path.join(os.environ.get("PDCTL_HOME") or os.path.join(home, ".pdctl"), "probe")
    found: Dict[str, float] = {}
    for name in list_folder(folder)[:NAMES]:
        if not (name.startswith("to-") and name.endswith(".json")):
            continue
        try:
            record = json.loads(read_file(os.path.join(folder, name), 8192) or "")
            found[str(record["decode"])[:256]] = float(record["bandwidth_mb_s"]) * 1e6
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return found


def list_folder(path: str) -> List[str]:
    """Return the names in a folder, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


class HostWork:
    """The host's own figures. ``slow`` of them take many small reads."""

    def __init__(self, request: Json, board: Board) -> None:
        self._addresses: List[str] = request["addresses"]
        self._board = board
        self._interfaces: List[str] = []
        self._baselines: Dict[str, float] = {}

    def quick(self) -> None:
        """Post load, memory and bytes of the data-plane interfaces."""
        traffic = interface_bytes(read_file("/proc/net/dev") or "")
        known = [traffic[name] for name in self._interfaces if name in traffic]
        load = (read_file("/proc/loadavg") or "").split()
        memory = re.search(r"^MemAvailable:\s+(\d+) kB", read_file("/proc/meminfo") or "", re.MULTILINE)
        value = {
            "at": time.monotonic(),
            "received": sum(pair[0] for pair in known) if known else None,
            "sent": sum(pair[1] for pair in known) if known else None,
            "interfaces": self._interfaces,
            "load": float(load[0]) / (os.cpu_count() or 1) if load else None,
            "memory_available_bytes": int(memory.group(1)) * 1024 if memory else None,
            "baselines": self._baselines,
        }
        self._board.post("host", "", -1, value)

    def slow(self) -> None:
        """Find the interfaces and the doctor's baselines, which may change, and post RDMA counters."""
        owners = dict(ipv6_addresses(read_file("/proc/net/if_inet6") or ""))
        owners.update(ipv4_addresses())
        found = []
        for address in self._addresses:
            name = owners.get(address)
            if name is None:
                try:
                    answers = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
                except (OSError, UnicodeError):
                    answers = []
                name = next((owners[a[4][0]] for a in answers if a[4][0] in owners), None)
            if name is not None and name not in found:
                found.append(name)
        self._interfaces = found
        self._baselines = read_baselines(os.path.expanduser("~"))
        self._board.post("rdma", "", -1, {"at": time.monotonic(), "devices": read_rdma()})


# --------------------------------------------------------------------------------------------------------------- main


class Life:
    """Ends this process when its watcher is gone."""

    def __init__(self) -> None:
        self._heard = time.monotonic()
        self.writing_since: Optional[float] = None

    def listen(self, stream: Any) -> None:
        """Take signs of life until the input ends."""
        try:
            while stream.readline(4096):
                self._heard = time.monotonic()
        finally:
            os._exit(0)

    def watch(self) -> None:
        """Look whether anybody is still there."""
        while True:
            time.sleep(1.0)
            now, since = time.monotonic(), self.writing_since
            if now - self._heard > PATIENCE_S or (since is not None and now - since > PATIENCE_S):
                os._exit(0)


def as_line(tick: int, at: float, readings: List[List[Any]]) -> bytes:
    """Return a line. Lists of transfers are cut if it would be too long, and say so."""
    for kept in (RECORDS, 200, 40, 0):
        if kept < RECORDS:
            for reading in readings:
                if reading[0] == "inflight" and reading[4] is not None:
                    records = reading[4]["records"]
                    reading[4]["unlisted"] += max(0, len(records) - kept)
                    reading[4]["records"] = records[:kept]
                elif reading[0] == "ended":
                    reading[4] = reading[4][max(0, len(reading[4]) - kept) :]
        line = json.dumps({"tick": tick, "at": at, "readings": readings}, separators=(",", ":"))
        if len(line) <= LINE_LIMIT:
            return (PREFIX + line + "\n").encode("ascii")
    trouble = ["host", "", -1, 0.0, None, "its readings are more than {} MiB".format(LINE_LIMIT >> 20)]
    return (PREFIX + json.dumps({"tick": tick, "at": at, "readings": [trouble]}) + "\n").encode("ascii")


def make_workers(request: Json, board: Board, idle: threading.Condition) -> List[Worker]:
    """Return a worker for everything that is to be read."""
    processes = Processes(request, board)
    host = HostWork(request, board)
    slow: int = request["slow_pace"]

    def look_slowly() -> None:
        processes.scan()
        host.slow()

    def look() -> None:
        processes.look()
        host.quick()

    workers = [Worker(look_slowly, slow, idle), Worker(look, 1, idle)]
    for instance in request["instances"]:
        workers.append(Worker(HealthWork(request, instance, board), 1, idle))
        workers.append(Worker(MetricsWork(request, instance, board), request["metrics_pace"], idle))
        for rank in instance["ranks"]:
            workers.append(Worker(RankWork(request, instance["name"], rank, board, processes), 1, idle))
    return workers


def main(stream: Any) -> None:
    """Read the request, then print a line a tick until the watcher is gone."""
    life = Life()
    request = json.loads(stream.readline())
    for target, arguments in ((life.listen, (stream,)), (life.watch, ())):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    # Most of these threads wait; each needs no more than its calls do.
    threading.stack_size(512 * 1024)
    interval: float = request["interval_s"]
    board, idle = Board(), threading.Condition()
    workers = make_workers(request, board, idle)
    for worker in workers:
        worker.start()
    tick = 0
    due = time.monotonic()
    while True:
        begun = [worker for worker in workers if worker.tick(tick)]
        with idle:
            idle.wait_for(lambda: not any(worker.busy for worker in begun), interval * TICK_SHARE)  # noqa: B023
        at, readings = board.take()
        line = as_line(tick, at, readings)
        life.writing_since = time.monotonic()
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except OSError:
            os._exit(0)
        life.writing_since = None
        tick += 1
        now = time.monotonic()
        # After a pause of the machine it does not make up for the ticks that it missed.
        due = max(due + interval, now)
        time.sleep(due - now)
