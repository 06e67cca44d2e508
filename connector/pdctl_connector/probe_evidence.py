"""On what a WRITE travelled: UCX's own words, counters of interfaces and devices, libraries in use."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LOG_LINES, LOG_WIDTH = 60, 400


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

    _NOISE = re.compile(r"\] (Discovered \w+ plugin|Loading static plugin): ")

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
        elif text and not self._NOISE.search(text):
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


def silence(peer: str, backends: Sequence[str], limit_s: float) -> str:
    """That the other host did not answer over NIXL, for people."""
    text = f"NIXL got no answer from {peer} within {limit_s:g} s"
    if "UCX" in backends:
        text += " (UCX takes free TCP ports, not those of the plan): does a firewall or security group drop packets?"
    elif "LIBFABRIC" in backends:
        text += ": do the security groups of both hosts allow all traffic from and to each other?"
    return text


_COUNTED = re.compile(r"(tx|rx|send|recv|rdma_\w+)_bytes|port_(xmit|rcv)_data")


def read_counters(proc: Path = Path("/proc"), devices: Path = Path("/sys/class/infiniband")) -> dict[str, int]:
    """Bytes that went through this host's interfaces and RDMA devices so far.

    `net:<interface>:tx` and `:rx` from /proc/net/dev (this network namespace); `rdma:<device>:<counter>` from
    /sys/class/infiniband, all ports added up. `port_xmit_data` counts words of four bytes.
    """
    counters: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "net/dev").read_text().splitlines():
            name, colon, numbers = line.partition(":")
            if colon:
                fields = numbers.split()
                counters[f"net:{name.strip()}:rx"] = int(fields[0])
                counters[f"net:{name.strip()}:tx"] = int(fields[8])
    for pattern in ("*/hw_counters/*", "*/ports/*/hw_counters/*", "*/ports/*/counters/*"):
        for path in devices.glob(pattern):
            if _COUNTED.fullmatch(path.name):
                key = f"rdma:{path.relative_to(devices).parts[0]}:{path.name}"
                with contextlib.suppress(OSError, ValueError):
                    counters[key] = counters.get(key, 0) + int(path.read_text())
    return counters


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Paths of NIXL's plugins, of libfabric and of UCX's transports in this process."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError):
        for line in maps.read_text(errors="replace").splitlines():
            _, slash, path = line.partition("/")
            if re.search(r"(^|/)lib(plugin_\w+|fabric|uct_\w+|ucp)[-.][^/]*$", path):
                found[slash + path] = None
    return list(found)
