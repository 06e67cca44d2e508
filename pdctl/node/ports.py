"""Opens planned ports on one host for real, and connects to those of other hosts.

One self-contained script for Python 3.8 or later on Linux, standard library only, no root. It is sent to the host and
talked to in lines of JSON; ``pdctl/hosts/conversation.py`` has the framing. Requests and answers, in this order:

    {"do": "listen", "listeners": [{"id", "address", "port", "ours"}], "nonce": "...", "lifetime_s": 30}
    PDCTL-PORTS-1 {"listeners": {id: {"port": 5600} or {"error": "in-use", "detail": "..."}}}
    {"do": "connect", "attempts": [{"id", "address", "port", "nonce", "mtu"}], "timeout_s": 3}
    PDCTL-PORTS-1 {"attempts": {id: {"outcome", "detail", "connect_ms", "mtu": {...} or null}}, "took_s": 0.1}

It ends, and closes its ports, when its standard input ends or ``lifetime_s`` is over, whatever else happens.

A listener says ``PDCTL-PORT-1 <nonce>`` to whoever connects, so that somebody else's answer is recognized. An attempt
without a nonce (a port that an instance of the cluster holds already, ``ours``) only connects. Port 0 takes a free one.

The path's MTU: TCP segments of the full size are sent one at a time with *don't fragment* and must be acknowledged by
the listener. So it is known that packets of that size arrive. If they do not (and no router says that they are too
large), connections with smaller segments are tried until one gets its data through. What is not known: whether larger
packets than the interface's MTU would pass.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import threading
import time

# Loading `typing` takes as long as making all connections of a host.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    Json = dict[str, Any]

PREFIX = "PDCTL-PORTS-1 "
GREETING = "PDCTL-PORT-1 "
# Threads at most: each attempt is one that mostly waits.
AT_ONCE = 128
BACKLOG = 512
# The greeting of a listener, and the acknowledgement of a few segments, take one round trip.
ANSWER_S = 1.5
SEGMENTS = 4
SEGMENTS_S = 1.0
# Sizes of packets that are tried when those of the interface do not get through: 1500 and what tunnels leave of it;
# 1280 is the least that IPv6 allows.
SMALLER_MTUS = (1500, 1400, 1280)
LONGEST_LINE = 64 * 1024

# Not in Python's socket module.
IP_MTU_DISCOVER, IP_MTU, IP_PMTUDISC_DO = 10, 14, 2
IPV6_MTU_DISCOVER, IPV6_MTU = 23, 24
SIOCGIFMTU, SIOCGIFCONF = 0x8921, 0x8912
TCPI_OPT_TIMESTAMPS = 1


# ----------------------------------------------------------------------------------------------------------- listening


def bind_error(error: OSError, port: int) -> Json:
    """Name a failure to listen, for programs and for people."""
    names = {
        errno.EADDRINUSE: ("in-use", f"another process holds port {port}"),
        errno.EACCES: ("not-allowed", f"this login may not listen on port {port}"),
        errno.EADDRNOTAVAIL: ("not-local", "the address is none of this host"),
    }
    code, detail = names.get(error.errno or 0, ("failed", error.strerror or str(error)))
    return {"error": code, "detail": detail}


def listen(address: str, port: int) -> socket.socket:
    """Listen as a server of vLLM would.

    Raises:
        OSError: that is not possible.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def serve(listener: socket.socket, nonce: str) -> None:
    """Answer connections until the process ends."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.05)
            continue
        threading.Thread(target=answer, args=(connection, nonce), daemon=True).start()


def answer(connection: socket.socket, nonce: str) -> None:
    """Greet whoever connected, and acknowledge the data that is announced."""
    with connection, contextlib.suppress(OSError, ValueError):
        connection.settimeout(ANSWER_S * 2)
        connection.sendall((GREETING + nonce + "\n").encode())
        announced = read_line(connection)
        missing = int(announced or b"0")
        while missing > 0:
            piece = connection.recv(min(missing, LONGEST_LINE))
            if not piece:
                return
            missing -= len(piece)
        if announced:
            connection.sendall(announced + b"\n")


def read_line(connection: socket.socket) -> bytes:
    """Read up to a line break, byte by byte: the lines are short, and what follows is not to be taken."""
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece or len(line) > 200:
            return b""
        line += piece
    return line[:-1]


def open_listeners(request: Json) -> Json:
    """Listen on all that are asked for."""
    results: Json = {}
    for wanted in request["listeners"]:
        if wanted.get("ours"):
            results[wanted["id"]] = {"port": wanted["port"]}
            continue
        try:
            listener = listen(wanted["address"], wanted["port"])
        except socket.gaierror as error:
            results[wanted["id"]] = {"error": "no-address", "detail": f"the address does not resolve: {error.strerror}"}
        except OSError as error:
            results[wanted["id"]] = bind_error(error, wanted["port"])
        else:
            results[wanted["id"]] = {"port": listener.getsockname()[1]}
            threading.Thread(target=serve, args=(listener, request["nonce"]), daemon=True).start()
    return results


# ---------------------------------------------------------------------------------------------------------- connecting


class Attempt:
    """One connection to make."""

    def __init__(self, id: str, address: str, port: int, nonce: str | None, mtu: bool) -> None:
        self.id = id
        self.address = address
        self.port = port
        self.nonce = nonce
        self.mtu = mtu


def outcome(name: str, detail: str = "", connect_ms: float | None = None, mtu: Json | None = None) -> Json:
    """Shape a result."""
    return {"outcome": name, "detail": detail, "connect_ms": connect_ms, "mtu": mtu}


RESET = "the connection was taken and then reset: something rejects it on the way"


def connect_error(error: OSError, timeout_s: float) -> Json:
    """Name a failure to connect."""
    if isinstance(error, socket.timeout) or error.errno == errno.ETIMEDOUT:
        return outcome("timeout", f"no answer within {timeout_s:g} s: something drops the packets")
    if isinstance(error, socket.gaierror):
        return outcome("unreachable", f"the address does not resolve here: {error.strerror}")
    if error.errno == errno.ECONNREFUSED:
        return outcome(
            "refused", "the connection was refused, though the host listens: something rejects it on the way"
        )
    if error.errno == errno.ECONNRESET:
        # It came before this side saw that the connection was there.
        return outcome("refused", RESET)
    return outcome("unreachable", error.strerror or str(error))


def open_connection(address: str, port: int, deadline: float, mtu: int = 0) -> socket.socket:
    """Connect, with *don't fragment* on all packets; ``mtu`` limits their size.

    Raises:
        OSError: no connection by then.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            if family == socket.AF_INET6:
                connection.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IP_PMTUDISC_DO)
            else:
                connection.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        if mtu:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mtu - headers(family))
        connection.connect(where)
    except BaseException:
        connection.close()
        raise
    return connection


def attempt(wanted: Attempt, timeout_s: float) -> Json:
    """Make one connection, see who answers, and how large packets may be."""
    started = time.monotonic()
    deadline = started + timeout_s
    try:
        connection = open_connection(wanted.address, wanted.port, deadline)
    except OSError as error:
        return connect_error(error, timeout_s)
    took_ms = (time.monotonic() - started) * 1000
    with connection:
        if wanted.nonce is None:
            return outcome("open", "", took_ms)
        try:
            connection.settimeout(max(0.05, min(ANSWER_S, deadline - time.monotonic())))
            said = read_line(connection)
        except socket.timeout:
            return outcome("wrong-peer", "the connection was taken, but the listener of the planned host never saw it")
        except OSError:
            return outcome("refused", RESET)
        if said != (GREETING + wanted.nonce).encode():
            if said.startswith(GREETING.encode()):
                return outcome("wrong-peer", "another host of this cluster answered at this address")
            return outcome("wrong-peer", "something else answered there")
        mtu = measure(wanted, connection) if wanted.mtu else None
    return outcome("open", "", took_ms, mtu)


def run_attempts(attempts: list[Attempt], timeout_s: float) -> Json:
    """Make all connections side by side."""
    results: Json = {}
    waiting = iter(attempts)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                wanted = next(waiting, None)
            if wanted is None:
                return
            try:
                results[wanted.id] = attempt(wanted, timeout_s)
            except Exception as error:
                results[wanted.id] = outcome("not-tried", f"the attempt failed: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(attempts)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ------------------------------------------------------------------------------------------------------ size of packets


def headers(family: int) -> int:
    """Bytes of IP and TCP headers without options."""
    return 60 if family == socket.AF_INET6 else 40


class Segments:
    """What the kernel knows of a connection's packets, in bytes: data of the largest segment, and its whole packet."""

    def __init__(self, data: int, packet: int) -> None:
        self.data = data
        self.packet = packet


def segments(connection: socket.socket) -> Segments:
    """Read TCP_INFO: option bits are byte 5, the segment size for sending is at byte 16 (linux/tcp.h)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    data = struct.unpack_from("=I", info, 16)[0]
    options = 12 if info[5] & TCPI_OPT_TIMESTAMPS else 0
    return Segments(data, data + options + headers(connection.family))


def passes(connection: socket.socket) -> bool:
    """Send segments of the full size, each a packet of its own, and wait until the listener has all."""
    size = segments(connection).data
    announced = b"%d" % (SEGMENTS * size)
    try:
        connection.settimeout(SEGMENTS_S)
        connection.sendall(announced + b"\n")
        for _ in range(SEGMENTS):
            connection.sendall(b"\0" * size)
        return read_line(connection) == announced
    except OSError:
        return False


def passing_size(wanted: Attempt, mtu: int) -> int | None:
    """Size of the packets that get through on a new connection, or None. ``mtu`` limits them; 0 for no limit."""
    try:
        with open_connection(wanted.address, wanted.port, time.monotonic() + SEGMENTS_S, mtu) as connection:
            read_line(connection)
            return segments(connection).packet if passes(connection) else None
    except OSError:
        return None


def measure(wanted: Attempt, connection: socket.socket) -> Json:
    """Find out how large packets may be on the way to a listener."""
    interface = interface_mtu(connection)
    tried = segments(connection).packet
    if passes(connection):
        # A router that said that they are too large made them smaller meanwhile.
        return {"interface_mtu": interface, "path_mtu": segments(connection).packet, "detail": ""}
    lost = f"packets of {tried} bytes do not arrive, and no router says so"
    for mtu in SMALLER_MTUS:
        size = passing_size(wanted, mtu) if mtu < tried else None
        if size is None:
            continue
        # Not the size may have been in the way, but a moment's trouble.
        whole = passing_size(wanted, 0)
        if whole is not None:
            return {"interface_mtu": interface, "path_mtu": whole, "detail": ""}
        return {"interface_mtu": interface, "path_mtu": size, "detail": f"{lost}; those of {size} bytes do"}
    return {"interface_mtu": interface, "path_mtu": None, "detail": f"{lost}; no smaller size was found that does"}


def interface_mtu(connection: socket.socket) -> int | None:
    """MTU of the interface that has the connection's own address; of the route if that is not found."""
    with contextlib.suppress(OSError, ValueError):
        name = interface_of(connection.getsockname()[0], connection.family)
        if name:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                request = fcntl.ioctl(any_socket, SIOCGIFMTU, struct.pack("16si12x", name.encode(), 0))
            return int(struct.unpack("16si12x", request)[1])
    with contextlib.suppress(OSError):
        if connection.family == socket.AF_INET6:
            return connection.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU)
        return connection.getsockopt(socket.IPPROTO_IP, IP_MTU)
    return None


def interface_of(address: str, family: int) -> str:
    """Name of the interface that has an address; empty if there is none.

    Raises:
        OSError: the kernel does not tell.
    """
    if family == socket.AF_INET6:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        with open("/proc/net/if_inet6", encoding="ascii") as lines:
            return next((line.split()[-1] for line in lines if line.startswith(packed)), "")
    import array

    # struct ifconf and its array of struct ifreq: 16 bytes of name, a sockaddr_in in 24 (64-bit Linux).
    buffer = array.array("B", b"\0" * 40 * 256)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket, SIOCGIFCONF, struct.pack("iL", len(buffer), buffer.buffer_info()[0]))
    entries = buffer.tobytes()[: struct.unpack("iL", found)[0]]
    wanted = socket.inet_aton(address)
    for start in range(0, len(entries), 40):
        if entries[start + 20 : start + 24] == wanted:
            # An alias (eth0:1) has the MTU of its interface.
            return entries[start : start + 16].split(b"\0")[0].decode().partition(":")[0]
    return ""


# ------------------------------------------------------------------------------------------------------------- talking


def say(message: Json) -> None:
    """Write one answer."""
    sys.stdout.write(PREFIX + json.dumps(message) + "\n")
    sys.stdout.flush()


def main(stream: BinaryIO) -> None:
    """Do what the lines of standard input ask for, until it ends."""
    for line in iter(stream.readline, b""):
        request = json.loads(line)
        started = time.monotonic()
        if request["do"] == "listen":
            # The kernel ends this process then, whatever it does.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, request["lifetime_s"])
            say({"listeners": open_listeners(request), "took_s": time.monotonic() - started})
        elif request["do"] == "connect":
            attempts = [Attempt(**wanted) for wanted in request["attempts"]]
            results = run_attempts(attempts, request["timeout_s"])
            say({"attempts": results, "took_s": time.monotonic() - started})
        else:
            break
    # Threads that still answer somebody are not waited for.
    os._exit(0)
