"""What several checks ask of a host's EFA devices and libraries. Pure."""

from __future__ import annotations

from pdctl.doctor.facts import HostFacts, ProviderAnswer, RdmaDevice


def efa_devices(facts: HostFacts) -> tuple[RdmaDevice, ...]:
    """Devices with EFA's driver. The link layer does not tell: old libraries call EFA InfiniBand."""
    return tuple(device for device in (facts.rdma.devices if facts.rdma else ()) if device.driver == "efa")


def other_devices(facts: HostFacts) -> tuple[RdmaDevice, ...]:
    """RDMA devices of another driver, software devices too."""
    return tuple(device for device in (facts.rdma.devices if facts.rdma else ()) if device.driver != "efa")


def answered(answer: ProviderAnswer | None) -> bool:
    """Whether ``fi_info`` came to an end, with devices or without."""
    return answer is not None and answer.exit_code is not None


def has_counter(facts: HostFacts, name: str) -> bool:
    """Whether an EFA device has this counter; drivers show only those that device and driver support."""
    return any(
        name in device.counters or any(name in port.counters for port in device.ports) for device in efa_devices(facts)
    )


def user_space(facts: HostFacts) -> str:
    """Version of libfabric and where its ``fi_info`` is, for evidence."""
    efa = facts.efa
    if efa is None or efa.fi_info_path is None:
        return "no fi_info"
    return f"libfabric {efa.libfabric_version or 'of unknown version'} ({efa.fi_info_path})"
