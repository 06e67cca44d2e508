"""Addresses of the plan against the interfaces of a host. Pure; what makes no sense counts as absent."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from pdctl.doctor.facts import InterfaceFacts, NetworkView

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_address(text: str) -> Address | None:
    """An IP address, with or without a prefix length or zone; None if it is none."""
    try:
        return ipaddress.ip_address(text.partition("/")[0].partition("%")[0].strip())
    except ValueError:
        return None


def interface_addresses(interface: InterfaceFacts) -> Iterator[Address]:
    """The addresses of one interface."""
    for text in interface.addresses:
        address = parse_address(text)
        if address is not None:
            yield address


def local_addresses(network: NetworkView) -> frozenset[Address]:
    """All addresses of a host but loopback and link-local ones, which tell nothing apart."""
    found = (address for interface in network.interfaces for address in interface_addresses(interface))
    return frozenset(address for address in found if not address.is_loopback and not address.is_link_local)


def planned_addresses(planned: str, network: NetworkView) -> tuple[Address, ...]:
    """What an address of the plan means on a host: itself, or what the name resolves to there; may be empty."""
    address = parse_address(planned)
    if address is not None:
        return (address,)
    return tuple(_parsed(network.resolved.get(planned, ())))


def _parsed(texts: Iterable[str]) -> Iterator[Address]:
    for text in texts:
        address = parse_address(text)
        if address is not None:
            yield address
