"""Which instances there are, on which host each runs, and which hosts are one machine. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdctl.errors import Problem
from pdctl.spec import ROLES, ClusterSpec, HostSpec, Role, RoleSpec, is_local

MAX_RANKS = 1024
"""Most ranks (processes with an accelerator or CPU part of their own) that a plan puts on one machine."""

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Layout:
    """Into how many ranks an instance splits its model.

    Attributes:
        tensor: ``--tensor-parallel-size``.
        data: ``--data-parallel-size``; each of these is an engine of its own inside the instance.
        pipeline: ``--pipeline-parallel-size``.
        prefill_context: ``--prefill-context-parallel-size``.
    """

    tensor: int
    data: int
    pipeline: int
    prefill_context: int

    @property
    def ranks(self) -> int:
        """Workers of the instance, so also devices it needs.

        vLLM's world size is tensor x pipeline x prefill-context parallel, per data-parallel engine
        (``ParallelConfig.__post_init__``, vLLM 0.32).
        """
        return self.tensor * self.data * self.pipeline * self.prefill_context


@dataclass(frozen=True)
class Seat:
    """One prefill or decode instance and its place.

    Attributes:
        name: ``prefill-0``, numbered over the hosts of its role in file order.
        role: ``prefill`` or ``decode``.
        index: the number in the name.
        host: SSH name of the host.
        host_index: position of the host in ``<role>.hosts``.
        machine: the same for all instances and routers that share a machine.
        address: where the others reach it on the data plane: an IP address or a DNS name.
        layout: its ranks.
    """

    name: str
    role: Role
    index: int
    host: str
    host_index: int
    machine: str
    address: str
    layout: Layout

    @property
    def host_key(self) -> str:
        """Key of the host in the cluster file."""
        return f"{self.role}.hosts[{self.host_index}]"


@dataclass(frozen=True)
class RouterSeat:
    """Where the router runs."""

    host: str
    machine: str
    address: str
    python: str


def role_of(spec: ClusterSpec, role: Role) -> RoleSpec:
    """Section of a role."""
    return spec.prefill if role == "prefill" else spec.decode


def host_of(spec: ClusterSpec, seat: Seat) -> HostSpec:
    """Entry of the host that an instance runs on."""
    return role_of(spec, seat.role).hosts[seat.host_index]


def argument(arguments: Mapping[str, Any], name: str) -> Any:
    """Value of a vLLM option, given as ``name`` or as its negative ``no-name``; None if it is not given."""
    if name in arguments:
        return arguments[name]
    if isinstance(arguments.get(f"no-{name}"), bool):
        return not arguments[f"no-{name}"]
    return None


def place(spec: ClusterSpec, problems: list[Problem]) -> tuple[list[Seat], RouterSeat]:
    """Number the instances and find out which of them share a machine.

    Hosts share a machine when they have the same name (``local`` and ``localhost`` are one) or the same data-plane
    address. Too many ranks on one machine are reported, and then no seats are returned.
    """
    machines = _Machines()
    for role in ROLES:
        for host in role_of(spec, role).hosts:
            machines.join(host.name, _address(host.name, host.address))
    router_address = _router_address(spec)
    machines.join(spec.router.host, router_address)

    seats: list[Seat] = []
    total: dict[str, int] = {}
    crowded: dict[str, str] = {}
    for role in ROLES:
        section = role_of(spec, role)
        layout = _layout(spec, role, problems)
        for host_index, host in enumerate(section.hosts):
            machine = machines.of(host.name)
            total[machine] = total.get(machine, 0) + layout.ranks * section.instances_per_host
            if total[machine] > MAX_RANKS:
                crowded.setdefault(machine, f"{role}.hosts[{host_index}]")
                continue
            for _ in range(section.instances_per_host):
                index = seats[-1].index + 1 if seats and seats[-1].role == role else 0
                address = _address(host.name, host.address)
                seats.append(Seat(f"{role}-{index}", role, index, host.name, host_index, machine, address, layout))
    for machine, key in list(crowded.items())[:1]:
        problems.append(
            spec.problem(
                key,
                f"{total[machine]} ranks would run on this machine; a plan puts at most {MAX_RANKS} on one",
                "check tensor_parallel, data_parallel and instances_per_host; hosts of one address are one machine",
            )
        )
    router = RouterSeat(spec.router.host, machines.of(spec.router.host), router_address, _router_python(spec))
    return ([] if crowded else seats), router


def _layout(spec: ClusterSpec, role: Role, problems: list[Problem]) -> Layout:
    section = role_of(spec, role)
    sizes = {}
    for name in ("pipeline-parallel-size", "prefill-context-parallel-size"):
        value = section.vllm_args.get(name, 1)
        try:
            size = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else 0
        except ValueError:
            size = 0
        if not 1 <= size <= MAX_RANKS:
            message = f"expected a whole number from 1 to {MAX_RANKS}"
            problems.append(spec.problem(f"{role}.vllm_args.{name}", message))
            size = 1
        sizes[name] = size
    return Layout(
        tensor=section.tensor_parallel,
        data=section.data_parallel,
        pipeline=sizes["pipeline-parallel-size"],
        prefill_context=sizes["prefill-context-parallel-size"],
    )


def _address(name: str, given: str | None) -> str:
    if given is not None:
        return given
    return _LOOPBACK if is_local(name) else name


def _entries_named(spec: ClusterSpec, name: str) -> Iterator[HostSpec]:
    for role in ROLES:
        for host in role_of(spec, role).hosts:
            if host.name == name or (is_local(host.name) and is_local(name)):
                yield host


def _router_address(spec: ClusterSpec) -> str:
    given = spec.router.address
    if given is None:
        given = next((host.address for host in _entries_named(spec, spec.router.host) if host.address), None)
    return _address(spec.router.host, given)


def _router_python(spec: ClusterSpec) -> str:
    if spec.router.python is not None:
        return spec.router.python
    return next((host.python for host in _entries_named(spec, spec.router.host) if host.python), spec.python)


class _Machines:
    """Groups of host names that are one machine (a union-find over names and addresses)."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def join(self, name: str, address: str) -> None:
        """Record that the host of this name has this address."""
        self._parent[self._root(_name_key(name))] = self._root(f"address {address.lower()}")

    def of(self, name: str) -> str:
        """Identity of the machine of a host."""
        return self._root(_name_key(name))

    def _root(self, key: str) -> str:
        root = key
        while self._parent.setdefault(root, root) != root:
            root = self._parent[root]
        while self._parent[key] != root:
            self._parent[key], key = root, self._parent[key]
        return root


def _name_key(name: str) -> str:
    return "name local" if is_local(name) else f"name {name}"
