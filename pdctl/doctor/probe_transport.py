"""On what the bytes of a probe really travelled: judged by UCX's own words and by counters of both hosts. Pure.

UCX names the transport of remote writes in its log (``tcp/eth0``, ``rc_mlx5/mlx5_0:1``); libfabric does not, so with
LIBFABRIC the counters of the EFA devices decide: a native write moves ``rdma_write_bytes`` on the prefill host, an
emulated one ``rdma_read_bytes`` on the decode host or ``send_bytes`` (libfabric's efa provider, ``efa_rdm_rma.c``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ENOUGH = 0.8
"""Share of what was written that a counter must have moved by to be taken for its way."""

_LANE = re.compile(r"\b([a-z][a-z0-9_]*)/[\w.:-]+")
_SHARED_MEMORY = frozenset({"sysv", "posix", "cma", "knem", "xpmem"})


@dataclass(frozen=True)
class Evidence:
    """What is known of one big WRITE.

    Attributes:
        backend: NIXL's.
        moved_bytes: what was written in all.
        lanes: what UCX said on the prefill host (``probe_evidence.Log``).
        prefill: by how much the counters of the prefill host moved.
        decode: the same of the decode host.
    """

    backend: str
    moved_bytes: int
    lanes: Sequence[str]
    prefill: Mapping[str, int]
    decode: Mapping[str, int]


@dataclass(frozen=True)
class Transport:
    """The verdict: ``name`` as in :class:`pdctl.doctor.probe_facts.ProbeResult`, and how that is known."""

    name: str
    evidence: str


def moved(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """By how much counters rose."""
    return {name: value - before.get(name, 0) for name, value in after.items() if value > before.get(name, 0)}


def judge(seen: Evidence) -> Transport:
    """Tell the transport; an empty name if nothing tells it."""
    writes = [lane for lane in seen.lanes if "write" in lane]
    between = [lane for lane in writes if lane.startswith("inter-node")] or [
        lane for lane in writes if lane.startswith("intra-node")
    ]
    by_counters = _by_counters(seen)
    names = list(dict.fromkeys(name for lane in between for name in _LANE.findall(lane.partition(": ")[2])))
    if seen.backend != "UCX" or not names:
        return by_counters
    emulated = any("software emulation" in lane for lane in between)
    said = f"UCX: {'; '.join(between[:3])}"
    text = f"{said}; {by_counters.evidence}" if by_counters.evidence else said
    return Transport(_ucx_name(names, emulated=emulated), text)


def _ucx_name(names: Sequence[str], *, emulated: bool) -> str:
    if set(names) <= _SHARED_MEMORY:
        return "shm"
    # What only copies between a device and its host is not the way between the hosts.
    ways = [name for name in names if name not in ("cuda_copy", "gdr_copy") and name not in _SHARED_MEMORY] or names
    if ways == ["srd"]:
        return "efa emulated" if emulated else "efa"
    name = "+".join(ways)
    return f"{name} emulated" if emulated and "tcp" not in ways else name


def _by_counters(seen: Evidence) -> Transport:
    enough = seen.moved_bytes * _ENOUGH
    ways = (
        ("efa", _sum(seen.prefill, "rdma_write_bytes"), "rdma_write_bytes of the prefill host"),
        ("efa emulated", _sum(seen.decode, "rdma_read_bytes"), "rdma_read_bytes of the decode host"),
        ("efa emulated", _sum(seen.prefill, "send_bytes"), "send_bytes of the prefill host"),
        ("rdma", 4 * _sum(seen.prefill, "port_xmit_data"), "port_xmit_data of the prefill host"),
        (
            "tcp",
            _sent(seen.prefill),
            f"bytes sent by interfaces of the prefill host (most by {_busiest(seen.prefill, 'tx')})",
        ),
    )
    received = _received(seen)
    for name, value, what in ways:
        if seen.moved_bytes and value >= enough:
            return Transport(name, f"{what} rose by {value} for {seen.moved_bytes} written{received}")
    return Transport("", "")


def _received(seen: Evidence) -> str:
    for counter in ("rdma_write_recv_bytes", "recv_bytes"):
        value = _sum(seen.decode, counter)
        if value:
            return f", {counter} of the decode host by {value}"
    name = _busiest(seen.decode, "rx")
    return f", bytes received by {name} of the decode host by {seen.decode[f'net:{name}:rx']}" if name else ""


def _sum(counters: Mapping[str, int], counter: str) -> int:
    return sum(value for name, value in counters.items() if name.startswith("rdma:") and name.endswith(f":{counter}"))


def _busiest(counters: Mapping[str, int], direction: str) -> str:
    """The interface that moved most; empty if there is none."""
    found = {
        name[len("net:") : -len(direction) - 1]: value
        for name, value in counters.items()
        if name.startswith("net:") and name.endswith(f":{direction}")
    }
    return max(found, key=lambda name: found[name]) if found else ""


def _sent(counters: Mapping[str, int]) -> int:
    """All interfaces together: UCX may spread over several."""
    return sum(value for name, value in counters.items() if name.startswith("net:") and name.endswith(":tx"))
