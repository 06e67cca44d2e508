"""What several checks ask of a host's EFA devices and libraries. Pure."""

from __future__ import annotations

import re

from pdctl.doctor.facts import EfaFacts, HostFacts, ProviderAnswer, RdmaDevice

AMAZON = "/opt/amazon/efa/"
"""Where the EFA installer puts its libfabric."""
USE_INSTALLERS = "mend FAB006 first: the EFA installer's libfabric is installed, but another one comes before it"


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


def distribution_instead(efa: EfaFacts) -> bool:
    """Whether another libfabric comes first although the EFA installer's is there: the order is wrong, no version."""
    path = efa.fi_info_path
    return path is not None and not path.startswith(AMAZON) and efa.installer_version is not None


def get_installer(facts: HostFacts, version: str = "latest") -> tuple[str, ...]:
    """The command that installs EFA's software; none for a container, whose image must have it.

    Args:
        facts: of the host that needs it.
        version: of the installer; what does not look like one gets no command.
    """
    inside = facts.system is not None and facts.system.container
    if inside or not re.fullmatch(r"latest|[0-9]{1,4}(\.[0-9]{1,4}){1,3}", version):
        return ()
    archive = f"aws-efa-installer-{version}.tar.gz"
    return (
        f"curl -fsSO https://efa-installer.amazonaws.com/{archive} && tar -xf {archive} && cd aws-efa-installer && "
        "sudo ./efa_installer.sh -y",
    )


def user_space(facts: HostFacts) -> str:
    """Version of libfabric and where its ``fi_info`` is, for evidence."""
    efa = facts.efa
    if efa is None or efa.fi_info_path is None:
        return "no fi_info"
    return f"libfabric {efa.libfabric_version or 'of unknown version'} ({efa.fi_info_path})"
