"""What the checks of EC2 instances share: each host's instance, and why one is not known. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.aws_hosts import match_hosts
from pdctl.doctor.checks.instance_facts import instance_type_name
from pdctl.doctor.context import Context
from pdctl.doctor.ec2_shapes import Interface, interfaces_of, mapping, mappings, number, text
from pdctl.doctor.facts import CloudFacts
from pdctl.doctor.findings import CheckFunction, Result, skipped
from pdctl.doctor.instance_table import InstanceType, lookup
from pdctl.doctor.security_group_rules import AwsCommands


def concerns_ec2(context: Context) -> bool:
    """Whether checks of EC2 have anything to say about this cluster."""
    on_ec2 = any(one.cloud is not None and one.cloud.is_ec2 for one in context.facts.values())
    return context.spec.fabric == "efa" or context.aws is not None or context.spec.aws is not None or on_ec2


def on_efa(context: Context) -> bool:
    """Whether checks of EFA have anything to say about this cluster."""
    return context.spec.fabric == "efa"


@dataclass(frozen=True)
class Ec2View:
    """The answers of EC2, by host."""

    context: Context

    @cached_property
    def aws(self) -> AwsFacts:
        """The answers with every host's instance. Empty if EC2 was not asked."""
        aws = self.context.aws
        if aws is None:
            return AwsFacts()
        # Recorded answers of the AWS CLI are by instance id until someone looks for the hosts.
        known = all(host in aws.instances or host in aws.not_found for host in self.context.plan.hosts)
        return aws if known else match_hosts(aws, self.context.plan, self.context.facts)

    @cached_property
    def commands(self) -> AwsCommands:
        """Writes commands for the region and profile that were asked."""
        spec = self.context.spec.aws
        return AwsCommands(self.aws.region, (spec.profile or "") if spec is not None else "")

    def instance(self, host: str) -> Mapping[str, Any] | None:
        """Description of a host's instance; None if it is not known."""
        return self.aws.instances.get(host)

    def why_not(self, *hosts: str, action: str = "DescribeInstances") -> str:
        """Why something of these hosts is not known; ``action`` is the call that should have told it."""
        if self.context.aws is None:
            return f"EC2 was not asked: {self.context.aws_skipped or 'no reason was recorded'}"
        for name in ("DescribeInstances", action):
            if name in self.aws.refused:
                return self.aws.refused[name]
        for host in hosts:
            if host not in self.aws.instances:
                return self.aws.not_found.get(host, "EC2 told nothing about this host")
        return f"the answer of {action} does not tell"

    @cached_property
    def _interfaces(self) -> dict[str, tuple[Interface, ...]]:
        # Read once: checks of pairs ask for the same host again and again.
        return {
            host: tuple(one for one in interfaces_of(instance) if one.attached)
            for host, instance in self.aws.instances.items()
        }

    @cached_property
    def _efa_interfaces(self) -> dict[str, tuple[Interface, ...]]:
        return {host: tuple(one for one in all_ if one.is_efa) for host, all_ in self._interfaces.items()}

    def interfaces(self, host: str) -> tuple[Interface, ...]:
        """Attached interfaces of a host's instance; none if it is not known."""
        return self._interfaces.get(host, ())

    def efa_interfaces(self, host: str) -> tuple[Interface, ...]:
        """Those of them that carry EFA."""
        return self._efa_interfaces.get(host, ())

    # --- instance type

    def type_name(self, host: str) -> str:
        """Instance type by the API, else by the host itself; empty if unknown."""
        told = text((self.instance(host) or {}).get("InstanceType"))
        facts = self.context.facts.get(host)
        return told or (instance_type_name(facts) if facts is not None else None) or ""

    def type_row(self, host: str) -> InstanceType | None:
        """What the table knows of that type."""
        return lookup(self.type_name(host))

    def most_efa(self, host: str) -> int | None:
        """How many EFA interfaces the type takes, by the API, else by the table; None if unknown."""
        described = self.aws.instance_types.get(self.type_name(host))
        if described is not None:
            network = mapping(described.get("NetworkInfo"))
            if network.get("EfaSupported") is False:
                return 0
            most = number(mapping(network.get("EfaInfo")).get("MaximumEfaInterfaces"))
            if most is not None:
                return most
        row = self.type_row(host)
        return row.efa_interfaces if row is not None else None

    def efa_cards(self, host: str) -> tuple[int, ...] | None:
        """Network cards of the type that take EFA, by the API, else by the table; None if unknown."""
        described = self.aws.instance_types.get(self.type_name(host))
        cards = list(mappings(mapping(mapping(described).get("NetworkInfo")).get("NetworkCards")))
        kinds = {
            index: [text(kind) for kind in card["InterfaceTypes"]]
            for card in cards
            if (index := number(card.get("NetworkCardIndex"))) is not None
            and isinstance(card.get("InterfaceTypes"), list)
        }
        if cards and len(kinds) == len(cards):
            return tuple(index for index, names in sorted(kinds.items()) if {"efa", "efa-only"} & set(names))
        row = self.type_row(host)
        if row is None or row.network_cards is None or not row.efa_interfaces:
            return None
        return tuple(index for index in range(row.network_cards) if index not in row.cards_without_efa)

    # --- where

    def cloud(self, host: str) -> CloudFacts | None:
        """What the host knows itself."""
        facts = self.context.facts.get(host)
        return facts.cloud if facts is not None else None

    def vpcs(self, host: str) -> tuple[str, ...]:
        """VPCs of the interfaces that carry KV, else of the instance, else by the host's own metadata."""
        interfaces = self.efa_interfaces(host) if on_efa(self.context) else ()
        found = [one.vpc_id for one in interfaces] or [text((self.instance(host) or {}).get("VpcId"))]
        if not any(found) and (cloud := self.cloud(host)) is not None:
            found = [one.vpc_id for one in cloud.interfaces]
        return tuple(dict.fromkeys(one for one in found if one))

    def subnets(self, host: str) -> tuple[str, ...]:
        """Subnets of the interfaces that carry KV, else of the instance, else by the host's own metadata."""
        interfaces = self.efa_interfaces(host) if on_efa(self.context) else ()
        found = [one.subnet_id for one in interfaces] or [text((self.instance(host) or {}).get("SubnetId"))]
        if not any(found) and (cloud := self.cloud(host)) is not None:
            found = [one.subnet_id for one in cloud.interfaces]
        return tuple(dict.fromkeys(one for one in found if one))

    def zone_id(self, host: str) -> str:
        """Id of the Availability Zone. Ids are the same for all accounts, names are not."""
        instance = self.instance(host) or {}
        told = text(mapping(instance.get("Placement")).get("AvailabilityZoneId"))
        subnet = self.aws.subnets.get(text(instance.get("SubnetId")), {})
        cloud = self.cloud(host)
        return told or text(subnet.get("AvailabilityZoneId")) or (cloud.zone_id if cloud is not None else None) or ""

    def zone_name(self, host: str) -> str:
        """Name of the Availability Zone as the account that was asked calls it."""
        told = text(mapping((self.instance(host) or {}).get("Placement")).get("AvailabilityZone"))
        cloud = self.cloud(host)
        return told or (cloud.zone if cloud is not None else None) or ""


InstanceJudge = Callable[[Ec2View, str, Mapping[str, Any]], Iterable[Result]]
"""Looks at one host's instance as EC2 describes it."""


def each_instance(judge: InstanceJudge, *, applies: Callable[[Context], bool] = concerns_ec2) -> CheckFunction:
    """Make a check's function of a judgement of one instance. A host without one gives *skipped* with the reason."""

    def run(context: Context) -> Iterator[Result]:
        if not applies(context):
            return
        view = Ec2View(context)
        if context.aws is None:
            yield skipped(message=view.why_not())
            return
        for host in context.vllm_hosts:
            instance = view.instance(host)
            if instance is None:
                yield skipped(host, message=f"not checked: {view.why_not(host)}")
            else:
                yield from judge(view, host, instance)

    return run


def pairs_apart(context: Context) -> Iterator[tuple[str, str]]:
    """Each pair of a prefill and a decode host that are two hosts."""
    return ((prefill, decode) for prefill, decode in context.pairs() if prefill != decode)
