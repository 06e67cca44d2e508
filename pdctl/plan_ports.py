"""Ports of the instances: what the cluster file sets is kept, the rest is derived without a clash. Pure.

Ports vLLM opens beside these come from the operating system: with all data-parallel engines on one host the engines
are reached over IPC sockets, the data-parallel group picks free ports, and ``--master-port`` and
``--data-parallel-rpc-port`` are not used (vLLM 0.32: ``launch_core_engines``, ``handshake_local_only``; the
multiprocess executor meets in a file).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdctl.errors import Problem
from pdctl.plan_seats import RouterSeat, Seat, host_of, role_of
from pdctl.spec import ClusterSpec

MAX_PORT = 65535

API_BASE = {"prefill": 8100, "decode": 8200}
SIDE_CHANNEL_BASE = {"prefill": 5600, "decode": 5700}
TELEMETRY_BASE = {"prefill": 18100, "decode": 18200}
ROUTER_METRICS_BASE = 29000
"""First ports tried for what the cluster file leaves open. All lie below Linux's ephemeral range (from 32768)."""


@dataclass(frozen=True)
class Ports:
    """Ports of one prefill or decode instance.

    Attributes:
        api: the OpenAI-compatible HTTP server; also health and Prometheus metrics of vLLM.
        side_channel: one for each data-parallel engine: the NIXL handshake listener binds
            ``VLLM_NIXL_SIDE_CHANNEL_PORT + data_parallel_index`` (vLLM 0.32, ``nixl/base_scheduler.py``). One listener
            serves all tensor- and pipeline-parallel ranks of its engine.
        telemetry: one for each rank of the instance (data-parallel index x world size + rank); push mode only.
    """

    api: int
    side_channel: tuple[int, ...]
    telemetry: tuple[int, ...]


@dataclass(frozen=True)
class _Kind:
    """A sort of port: how it is set in the cluster file, and where derived ones start."""

    field: str
    purpose: str
    base: dict[str, int]

    def count(self, seat: Seat) -> int:
        return {"port": 1, "side_channel_port": seat.layout.data, "telemetry_port": seat.layout.ranks}[self.field]


_API = _Kind("port", "API port", API_BASE)
_SIDE_CHANNEL = _Kind("side_channel_port", "side channel", SIDE_CHANNEL_BASE)
_TELEMETRY = _Kind("telemetry_port", "telemetry", TELEMETRY_BASE)


@dataclass(frozen=True)
class _Claim:
    first: int
    count: int
    what: str
    key: str

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def __str__(self) -> str:
        return str(self.first) if self.count == 1 else f"{self.first}-{self.last}"


@dataclass
class _Book:
    """Ports taken on one machine, whatever address they are bound to: a plan reuses none of them."""

    claims: list[_Claim] = field(default_factory=list)

    def overlapping(self, claim: _Claim) -> _Claim | None:
        return next((c for c in self.claims if c.first <= claim.last and claim.first <= c.last), None)

    def first_free(self, base: int, count: int) -> int | None:
        first = base
        for claim in sorted(self.claims, key=lambda c: c.first):
            if claim.last < first:
                continue
            if claim.first > first + count - 1:
                break
            first = claim.last + 1
        return first if first + count - 1 <= MAX_PORT else None


def assign_ports(
    spec: ClusterSpec, seats: Sequence[Seat], router: RouterSeat, problems: list[Problem]
) -> tuple[dict[str, Ports], int]:
    """Give every instance its ports.

    Base ports of a role or host count up over the instances of a machine that use them. Derived ports depend on
    nothing but the instances of the same machine, so that a change elsewhere does not move them.

    Returns:
        ports by instance name, and the router's metrics port. Meaningless if a problem was added.
    """
    kinds = [_API, _SIDE_CHANNEL, *([_TELEMETRY] if spec.transfer.own_connector else [])]
    assignment = _Assignment(spec, problems)
    assignment.fix(router.machine, _Claim(spec.router.port, 1, "the port of the router", "router.port"))
    metrics = spec.router.metrics_port
    if metrics is not None:
        claim = _Claim(metrics, 1, "the metrics port of the router", "router.metrics_port")
        assignment.fix(router.machine, claim)
    first: dict[tuple[str, str], int] = {}
    for kind in kinds:
        for seat in seats:
            base, key = _given(spec, seat, kind)
            if base is not None:
                first[seat.name, kind.field] = assignment.fix_next(seat, kind, base, key)
    for kind in kinds:
        for seat in seats:
            if (seat.name, kind.field) not in first:
                first[seat.name, kind.field] = assignment.derive(seat, kind)
    if metrics is None:
        metrics = assignment.free(router.machine, ROUTER_METRICS_BASE, 1, "the metrics port of the router", "router")
    return {seat.name: _ports(seat, first, kinds) for seat in seats}, metrics


def _ports(seat: Seat, first: dict[tuple[str, str], int], kinds: Iterable[_Kind]) -> Ports:
    ranges = {kind.field: range(first[seat.name, kind.field], first[seat.name, kind.field] + kind.count(seat))
              for kind in kinds}  # fmt: skip
    return Ports(
        api=ranges["port"][0],
        side_channel=tuple(ranges["side_channel_port"]),
        telemetry=tuple(ranges.get("telemetry_port", ())),
    )


def _given(spec: ClusterSpec, seat: Seat, kind: _Kind) -> tuple[int | None, str]:
    """Base port that the file sets for an instance, and by which key."""
    own: int | None = getattr(host_of(spec, seat), kind.field)
    if own is not None:
        return own, f"{seat.host_key}.{kind.field}"
    base: int | None = getattr(role_of(spec, seat.role), kind.field)
    return base, f"{seat.role}.{kind.field}"


class _Assignment:
    def __init__(self, spec: ClusterSpec, problems: list[Problem]) -> None:
        self._spec = spec
        self._problems = problems
        self._books: dict[str, _Book] = {}
        self._next: dict[tuple[str, str], int] = {}
        self._reported: set[frozenset[str]] = set()

    def fix_next(self, seat: Seat, kind: _Kind, base: int, key: str) -> int:
        """The next ports of a base port that the file sets."""
        first = self._next.get((seat.machine, key), base)
        count = kind.count(seat)
        self._next[seat.machine, key] = first + count
        self.fix(seat.machine, _Claim(first, count, f"the {kind.purpose} of {seat.name}", key))
        return first

    def fix(self, machine: str, claim: _Claim) -> None:
        """Take exactly these ports."""
        book = self._books.setdefault(machine, _Book())
        if claim.last > MAX_PORT:
            message = f"{claim.what} would need port {claim.last}; the largest port is {MAX_PORT}"
            self._report(claim.key, claim.key, message, "choose a lower base port")
        elif (other := book.overlapping(claim)) is not None:
            line = self._spec.line(other.key)
            where = f"`{other.key}`" + ("" if line is None else f" in line {line}")
            ports = "port" if claim.count == 1 else "ports"
            message = f"{claim.what} would be {ports} {claim}, but {other.what} is {other} by {where}"
            hint = "choose another, or leave it out: pdctl then takes free ones"
            self._report(claim.key, other.key, message, hint if claim.key != "router.port" else "choose another")
        book.claims.append(claim)

    def derive(self, seat: Seat, kind: _Kind) -> int:
        """The first free ports from the default base of a kind on."""
        what = f"the {kind.purpose} of {seat.name}"
        return self.free(seat.machine, kind.base[seat.role], kind.count(seat), what, f"{seat.role}.{kind.field}")

    def free(self, machine: str, base: int, count: int, what: str, key: str) -> int:
        """Take the first ``count`` consecutive free ports from ``base`` on."""
        book = self._books.setdefault(machine, _Book())
        first = book.first_free(base, count)
        if first is None:
            ports = "free port is" if count == 1 else f"{count} consecutive free ports are"
            self._report(key, key, f"no {ports} left from {base} on for {what}", "set the base ports yourself")
            return base
        book.claims.append(_Claim(first, count, what, key))
        return first

    def _report(self, key: str, other_key: str, message: str, hint: str) -> None:
        # The same two keys clash on every host of a role: once is enough.
        if (pair := frozenset((key, other_key))) not in self._reported:
            self._reported.add(pair)
            self._problems.append(self._spec.problem(key, message, hint))
