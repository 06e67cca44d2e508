"""Which EC2 instance each host of the cluster file is. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.ec2_shapes import address, instance_addresses, text
from pdctl.doctor.facts import HostFacts
from pdctl.plan import ClusterPlan
from pdctl.spec import is_local


@dataclass(frozen=True)
class Identity:
    """What is known of a host that can name its instance.

    Attributes:
        instance_id: by its own metadata; empty if it did not tell.
        region: by its own metadata; empty if it did not tell.
        planned: addresses and names by which the cluster file knows it, most trusted first.
        own: further addresses on its interfaces.
    """

    instance_id: str = ""
    region: str = ""
    planned: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


def identity(plan: ClusterPlan, facts: Mapping[str, HostFacts], host: str) -> Identity:
    """What is known of a host."""
    known = facts.get(host)
    cloud = known.cloud if known is not None else None
    planned = [instance.address for instance in plan.instances if instance.host == host]
    if not is_local(host):
        planned.append(host)
    planned += [one for name in planned for one in _resolved(facts, name)]
    network = known.network if known is not None else None
    own = [
        one.partition("/")[0] for interface in (network.interfaces if network else ()) for one in interface.addresses
    ]
    return Identity(
        (cloud.instance_id or "") if cloud else "",
        (cloud.region or "") if cloud else "",
        _useful(planned),
        tuple(one for one in _useful(own) if one not in planned),
    )


def _resolved(facts: Mapping[str, HostFacts], name: str) -> Iterable[str]:
    for known in facts.values():
        if known.network is not None and name in known.network.resolved:
            yield from known.network.resolved[name]


def _useful(values: Iterable[str]) -> tuple[str, ...]:
    """Names in lower case, and addresses, without those that every machine has."""
    kept = []
    for value in values:
        one = address(value)
        if one is None or not (one.is_loopback or one.is_link_local or one.is_unspecified):
            kept.append(value.lower() if one is None else str(one))
    return tuple(dict.fromkeys(kept))


def match_hosts(aws: AwsFacts, plan: ClusterPlan, facts: Mapping[str, HostFacts]) -> AwsFacts:
    """Find each host's instance.

    An instance that is already known by the name of a host stays with it. The others are found by instance id, by the
    address or DNS name in the plan, and then by any address of the host.

    Returns:
        the answers with ``instances`` by host name, and the reason in ``not_found`` for every host without one
        (unless the call itself was refused, which ``refused`` says).
    """
    by_id = {text(one.get("InstanceId")) or key: one for key, one in aws.instances.items()}
    known = {instance: instance_addresses(one) for instance, one in by_id.items()}
    instances: dict[str, dict[str, Any]] = {}
    not_found: dict[str, str] = {}
    for host in plan.hosts:
        if host in aws.instances:
            instances[host] = aws.instances[host]
            continue
        wanted = identity(plan, facts, host)
        found = _find(wanted, by_id, known)
        if len(found) == 1:
            instances[host] = by_id[found[0]]
        elif "DescribeInstances" not in aws.refused:
            not_found[host] = aws.not_found.get(host) or _why(wanted, found, aws.region)
    return dataclasses.replace(aws, instances=instances, not_found=not_found)


def _find(wanted: Identity, by_id: Mapping[str, Any], known: Mapping[str, frozenset[str]]) -> list[str]:
    if wanted.instance_id:
        return [wanted.instance_id] if wanted.instance_id in by_id else []
    found: list[str] = []
    for values in (wanted.planned, wanted.own):
        # A short host name stands for the first part of a private DNS name.
        starts = tuple(f"{value}." for value in values if address(value) is None)
        found = [
            instance
            for instance, names in known.items()
            if any(value in names for value in values) or any(name.startswith(starts) for name in names if starts)
        ]
        if found:
            break
    return found


def _why(wanted: Identity, found: list[str], region: str) -> str:
    where = f"in {region}" if region else "among the instances that were given"
    if len(found) > 1:
        names = ", ".join(sorted(found)[:3])
        return f"{len(found)} instances {where} have its address ({names}); set `address` of the host"
    if wanted.region and region and wanted.region != region:
        return f"its metadata says region {wanted.region}, but {region} was asked: set `aws.region` to {wanted.region}"
    if wanted.instance_id:
        return f"there is no instance {wanted.instance_id} {where}: another account (`aws.profile`) or region?"
    if wanted.planned or wanted.own:
        names = ", ".join((*wanted.planned, *wanted.own)[:4])
        return f"no instance {where} has one of its addresses ({names}): another account (`aws.profile`) or region?"
    return "neither instance metadata nor an address tells which instance it is: set `address` of the host"
