"""Asks the EC2 API about the hosts: read-only, in bounded time, and a refusal is an answer too.

Region and credentials come by the usual chain of boto3, after ``aws: {region, profile}`` of the cluster file. The
calls, and so the permissions, are those of :data:`ACTIONS`.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from pdctl.doctor.aws_errors import explain
from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.aws_file import aws_facts_to_json, instance_facts, plain, read_aws_facts
from pdctl.doctor.aws_hosts import identity, match_hosts
from pdctl.doctor.ec2_shapes import address, interfaces_of, mapping, mappings, read_group, text
from pdctl.doctor.facts import HostFacts
from pdctl.plan import ClusterPlan

__all__ = ["ask_ec2", "aws_facts_to_json", "iam_policy", "match_hosts", "read_aws_facts"]

ACTIONS = (
    "DescribeInstances",
    "DescribeInstanceTypes",
    "DescribeSecurityGroups",
    "DescribeSubnets",
    "DescribePlacementGroups",
    "GetManagedPrefixListEntries",
)
"""Every call that is made."""

ATTEMPTS = 3
FILTER_VALUES = 200
"""Most values of one filter that the EC2 API takes."""


def iam_policy() -> dict[str, Any]:
    """The IAM policy that pdctl needs: all calls read only."""
    statement = {
        "Sid": "PdctlDoctor",
        "Effect": "Allow",
        "Action": [f"ec2:{action}" for action in ACTIONS],
        "Resource": "*",
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


def ask_ec2(
    plan: ClusterPlan, facts: Mapping[str, HostFacts], *, session: Any = None, timeout_s: float = 20.0
) -> AwsFacts:
    """Ask EC2 about every host of the plan. Never raises: what could not be had is in ``refused`` or ``not_found``.

    Args:
        plan: the plan; ``aws`` of its cluster file says region and profile.
        facts: of the hosts: their metadata names instance and region.
        session: a ``boto3.Session`` to use instead of the usual chain.
        timeout_s: after this many seconds what has come is returned, and the rest counts as refused.
    """
    enquiry = _Enquiry(plan, facts, session, timeout_s)
    # A thread, because some waits have no time-out of their own: name resolution, a credential helper, an import.
    thread = threading.Thread(target=enquiry.run, name="pdctl-ec2", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return match_hosts(enquiry.result(), plan, facts)


class _Enquiry:
    """One round of questions. Its threads write, the caller reads a copy when it has waited long enough."""

    def __init__(
        self, plan: ClusterPlan, facts: Mapping[str, HostFacts], session: Any, timeout_s: float
    ) -> None:  # fmt: skip
        self._identities = {host: identity(plan, facts, host) for host in plan.hosts}
        self._spec = plan.spec.aws
        self._session = session
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._facts = AwsFacts(region=self._wanted_region())
        self._unanswered: set[str] = {"DescribeInstances"}

    def result(self) -> AwsFacts:
        """What is known by now."""
        with self._lock:
            facts = copy.deepcopy(self._facts)
            unanswered = sorted(self._unanswered)
        for action in unanswered:
            reason = (
                f"ec2:{action} in {facts.region or 'this region'} gave no answer within {self._timeout_s:g} s; "
                "check the network and a proxy (HTTPS_PROXY)"
            )
            facts.refused.setdefault(action, reason)
        return facts

    def run(self) -> None:
        """Ask for the instances, then for everything they name, at the same time."""
        try:
            client = self._client()
        except Exception as error:  # whatever a credential helper or a configuration file gives rise to
            self._refuse("DescribeInstances", error)
            return
        try:
            self._ask_everything(client)
        finally:
            client.close()

    def _ask_everything(self, client: Any) -> None:
        self._ask_instances(client)
        with self._lock:
            instances = list(self._facts.instances.values())
        interfaces = [one for instance in instances for one in interfaces_of(instance)]
        groups = {group for interface in interfaces for group in interface.groups}
        types = {text(instance.get("InstanceType")) for instance in instances}
        subnets = {interface.subnet_id for interface in interfaces}
        placements = {text(mapping(instance.get("Placement")).get("GroupName")) for instance in instances}
        questions: list[tuple[str, Callable[[], None]]] = [
            ("DescribeSecurityGroups", lambda: self._ask_groups(client, groups)),
            ("DescribeInstanceTypes", lambda: self._ask_types(client, types)),
            ("DescribeSubnets", lambda: self._ask_subnets(client, subnets)),
            ("DescribePlacementGroups", lambda: self._ask_placements(client, placements)),
        ]
        if not instances:
            return
        with self._lock:
            self._unanswered.update(action for action, _ in questions)
        threads = [threading.Thread(target=ask, name=f"pdctl-{action}", daemon=True) for action, ask in questions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._deadline - time.monotonic()))

    # --- where

    def _wanted_region(self) -> str:
        if self._spec is not None and self._spec.region:
            return self._spec.region
        regions = Counter(one.region for one in self._identities.values() if one.region)
        return regions.most_common(1)[0][0] if regions else ""

    def _client(self) -> Any:
        # Late: boto3 takes a third of a second to import, and most runs of pdctl never ask AWS.
        import boto3
        from botocore.config import Config

        session = self._session
        if session is None:
            profile = self._spec.profile if self._spec is not None else None
            session = boto3.Session(profile_name=profile, region_name=self._facts.region or None)
        config = Config(
            connect_timeout=min(5.0, self._timeout_s / 3),
            read_timeout=min(10.0, self._timeout_s / 2),
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            user_agent_extra="pdctl",
        )
        client = session.client("ec2", region_name=self._facts.region or None, config=config)
        with self._lock:
            self._facts = dataclasses.replace(self._facts, region=client.meta.region_name or "")
        return client

    # --- the questions

    def _ask_instances(self, client: Any) -> None:
        action = "DescribeInstances"
        identities = self._identities.values()
        wanted = {one.instance_id for one in identities if one.instance_id}
        self._keep_instances(client, {"instance-id": wanted})
        # Addresses are asked for only where the instance id is not known, and the rarer kinds only if still needed.
        unnamed = [one for one in identities if not one.instance_id]
        values = {value for one in unnamed for value in (*one.planned, *one.own)}
        ipv4 = {value for value in values if isinstance(address(value), IPv4Address)}
        ipv6 = {value for value in values if isinstance(address(value), IPv6Address)}
        self._keep_instances(client, {"private-ip-address": ipv4})
        if self._missing(unnamed):
            # With an asterisk, because a short name is the first part of the whole one.
            names = {f"{value}*" for value in values - ipv4 - ipv6}
            self._keep_instances(client, {"private-dns-name": names})
            self._keep_instances(client, {"ip-address": ipv4})
        if self._missing(unnamed):
            self._keep_instances(client, {"network-interface.addresses.private-ip-address": ipv4})
            self._keep_instances(client, {"network-interface.ipv6-addresses.ipv6-address": ipv6})
        self._answered(action)

    def _missing(self, identities: Iterable[Any]) -> bool:
        with self._lock:
            known = {
                one
                for instance in self._facts.instances.values()
                for interface in interfaces_of(instance)
                for one in (*interface.addresses, *interface.public_addresses)
            }
            refused = "DescribeInstances" in self._facts.refused
        return not refused and any(known.isdisjoint((*one.planned, *one.own)) for one in identities)

    def _keep_instances(self, client: Any, filters: Mapping[str, set[str]]) -> None:
        with self._lock:
            if "DescribeInstances" in self._facts.refused:
                return
        for reservation in self._ask(client, "DescribeInstances", "describe_instances", "Reservations", filters):
            for instance in mappings(reservation.get("Instances")):
                if found := text(instance.get("InstanceId")):
                    with self._lock:
                        self._facts.instances[found] = instance_facts(instance)

    def _ask_types(self, client: Any, names: set[str]) -> None:
        action = "DescribeInstanceTypes"
        # By filter: a type that this region does not know would make the whole call fail if it were named directly.
        for one in self._ask(client, action, "describe_instance_types", "InstanceTypes", {"instance-type": names}):
            self._keep(self._facts.instance_types, one, "InstanceType")
        self._answered(action)

    def _ask_groups(self, client: Any, groups: set[str]) -> None:
        action = "DescribeSecurityGroups"
        lists: set[str] = set()
        for one in self._ask(client, action, "describe_security_groups", "SecurityGroups", {"group-id": groups}):
            self._keep(self._facts.security_groups, one, "GroupId")
            lists.update(rule.prefix_list for rule in read_group(one).rules if rule.prefix_list)
        if lists:
            with self._lock:
                self._unanswered.add("GetManagedPrefixListEntries")
        self._answered(action)
        for prefix_list in sorted(lists):
            self._ask_prefix_list(client, prefix_list)
        self._answered("GetManagedPrefixListEntries")

    def _ask_prefix_list(self, client: Any, prefix_list: str) -> None:
        action, method = "GetManagedPrefixListEntries", "get_managed_prefix_list_entries"
        try:
            entries = list(self._pages(client, method, "Entries", {"PrefixListId": prefix_list}))
        except Exception as error:
            self._refuse(action, error)
            return
        with self._lock:
            self._facts.prefix_lists[prefix_list] = [cidr for one in entries if (cidr := text(one.get("Cidr")))]

    def _ask_subnets(self, client: Any, subnets: set[str]) -> None:
        action = "DescribeSubnets"
        for one in self._ask(client, action, "describe_subnets", "Subnets", {"subnet-id": subnets}):
            self._keep(self._facts.subnets, one, "SubnetId")
        self._answered(action)

    def _ask_placements(self, client: Any, names: set[str]) -> None:
        action = "DescribePlacementGroups"
        for one in self._ask(client, action, "describe_placement_groups", "PlacementGroups", {"group-name": names}):
            self._keep(self._facts.placement_groups, one, "GroupName")
        self._answered(action)

    # --- how

    def _ask(
        self, client: Any, action: str, method: str, key: str, filters: Mapping[str, set[str]]
    ) -> Iterator[Mapping[str, Any]]:
        """Answers of a call with one filter, in portions of its values. Ends early, with the reason, if it fails."""
        for name, values in filters.items():
            ordered = sorted(values - {""})
            for at in range(0, len(ordered), FILTER_VALUES):
                chosen = [{"Name": name, "Values": ordered[at : at + FILTER_VALUES]}]
                try:
                    yield from self._pages(client, method, key, {"Filters": chosen})
                except Exception as error:  # boto3 lets through what a credential helper or an HTTP library raises
                    self._refuse(action, error)
                    return

    def _pages(
        self, client: Any, method: str, key: str, arguments: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:  # fmt: skip
        if client.can_paginate(method):
            pages: Iterable[Any] = client.get_paginator(method).paginate(**arguments)
        else:
            pages = [getattr(client, method)(**arguments)]
        for page in pages:
            yield from mappings(page.get(key))

    def _keep(self, into: dict[str, dict[str, Any]], described: Mapping[str, Any], key: str) -> None:
        if name := text(described.get(key)):
            with self._lock:
                into[name] = plain(described)

    def _answered(self, action: str) -> None:
        with self._lock:
            self._unanswered.discard(action)

    def _refuse(self, action: str, error: Exception) -> None:
        profile = (self._spec.profile or "") if self._spec is not None else ""
        with self._lock:
            region = self._facts.region
            self._facts.refused.setdefault(action, explain(action, error, region=region, profile=profile))
            self._unanswered.discard(action)
