"""Accelerator devices of the instances that share a machine. Pure.

How many devices a machine has is not known here: the doctor compares it with the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pdctl.errors import Problem
from pdctl.plan_seats import Seat, host_of, role_of
from pdctl.spec import ClusterSpec


def assign_devices(spec: ClusterSpec, seats: Sequence[Seat], problems: list[Problem]) -> dict[str, tuple[int, ...]]:
    """Give every instance as many devices as it has ranks.

    ``devices`` of a host or role is the pool that its instances draw from. Without one, an instance takes the lowest
    consecutive numbers that are free on the machine, prefill before decode. No device goes to two instances.

    Returns:
        device numbers by instance name; empty tuples on CPUs.
    """
    if spec.accelerator == "cpu":
        for seat in seats:
            _, key = _pool(spec, seat)
            problem = spec.problem(
                key or seat.role, "a cluster with `accelerator: cpu` has no devices to choose from", "remove `devices`"
            )
            if key and problem not in problems:
                problems.append(problem)
        return {seat.name: () for seat in seats}
    owners: dict[str, dict[int, Seat]] = {}
    devices: dict[str, tuple[int, ...]] = {}
    pooled = [(seat, *_pool(spec, seat)) for seat in seats]
    reported: set[str] = set()
    # Small pools first: a large one can still give from its rest.
    for seat, pool, key in sorted(pooled, key=lambda entry: len(entry[1] or ())):
        if pool is None:
            continue
        taken = owners.setdefault(seat.machine, {})
        chosen = [device for device in pool if device not in taken][: seat.layout.ranks]
        if len(chosen) < seat.layout.ranks and key not in reported:
            reported.add(key)
            problems.append(spec.problem(key, _shortage(spec, seat, pool, taken, key), "add devices, or use fewer"))
        taken.update(dict.fromkeys(chosen, seat))
        devices[seat.name] = tuple(chosen)
    for seat, pool, _ in pooled:
        if pool is None:
            taken = owners.setdefault(seat.machine, {})
            first = _first_free(taken, seat.layout.ranks)
            devices[seat.name] = tuple(range(first, first + seat.layout.ranks))
            taken.update(dict.fromkeys(devices[seat.name], seat))
    return devices


def device_list(devices: Iterable[int]) -> str:
    """Write device numbers as vLLM's platforms read them: ``0,1,2``."""
    return ",".join(str(device) for device in devices)


def device_ranges(devices: Iterable[int]) -> str:
    """Write device numbers short: ``0-3,6``. The Neuron runtime reads this form in ``NEURON_RT_VISIBLE_CORES``."""
    ranges: list[list[int]] = []
    for device in devices:
        if ranges and device == ranges[-1][1] + 1:
            ranges[-1][1] = device
        else:
            ranges.append([device, device])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _pool(spec: ClusterSpec, seat: Seat) -> tuple[list[int] | None, str]:
    own = host_of(spec, seat).devices
    if own is not None:
        return own, f"{seat.host_key}.devices"
    pool = role_of(spec, seat.role).devices
    return pool, "" if pool is None else f"{seat.role}.devices"


def _shortage(spec: ClusterSpec, seat: Seat, pool: Sequence[int], taken: Mapping[int, Seat], key: str) -> str:
    needed = f"{seat.name} needs {seat.layout.ranks} device{'' if seat.layout.ranks == 1 else 's'}"
    users = {taken[device].name: taken[device] for device in pool if device in taken}
    if not users:
        return f"{needed}, and this list has {len(pool)}"
    free = sum(1 for device in pool if device not in taken)
    others = {_pool(spec, user)[1] for user in users.values()} - {key}
    elsewhere = "".join(f", given by `{other}` in line {spec.line(other)}" for other in sorted(others))
    return f"{needed}, and of this list {free or 'none'} are left: {', '.join(users)} took the others{elsewhere}"


def _first_free(taken: Mapping[int, Seat], count: int) -> int:
    first = 0
    while any(device in taken for device in range(first, first + count)):
        first = max(device for device in range(first, first + count) if device in taken) + 1
    return first
