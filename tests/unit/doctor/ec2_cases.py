"""Clusters on EC2 for the tests: recorded answers of the API, put together, and what the checks say to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.aws_file import read_aws_facts
from pdctl.doctor.aws_hosts import match_hosts
from pdctl.doctor.checks import instances, security_groups
from pdctl.doctor.context import Context
from pdctl.doctor.facts import CloudFacts, HostFacts, SystemFacts
from pdctl.doctor.findings import Finding, run_check
from pdctl.plan import ClusterPlan
from tests.support.plans import changed, planned

FOLDER = Path(__file__).parent / "aws"
EFA_GROUP = "sg-0abc000000000efa1"


def recorded(name: str) -> dict[str, Any]:
    """One recorded answer."""
    document: dict[str, Any] = json.loads((FOLDER / f"aws-{name}.json").read_text(encoding="utf-8"))
    return document


def answers(instances: str = "describe-instances-good", groups: str = "sg-good") -> dict[str, Any]:
    """Outputs of the AWS CLI for a whole cluster, in one object."""
    whole: dict[str, Any] = {}
    others = ("describe-instance-types", "describe-subnets", "describe-placement-groups")
    for name in (instances, groups, *others):
        whole.update(recorded(name))
    return whole


def instances_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The instances of an answer, to be changed in place."""
    return [one for reservation in document["Reservations"] for one in reservation["Instances"]]


def aws_of(document: Mapping[str, Any]) -> AwsFacts:
    """The answers as ``--aws-facts`` reads them."""
    return read_aws_facts(json.dumps(document), "aws.json")


def cluster(document: Mapping[str, Any], **sections: Any) -> ClusterPlan:
    """A plan for the instances of the answers: the first is p1, the second d1, matched by their addresses."""
    addresses = [one["PrivateIpAddress"] for one in instances_of(dict(document))]
    prefill, decode = (addresses * 2)[:2]
    return planned(
        changed(
            **{
                "fabric": "efa",
                "prefill": {"hosts": [{"name": "p1", "address": prefill}]},
                "decode": {"hosts": [{"name": "d1", "address": decode}]},
                **sections,
            }
        )
    )


def context(document: Mapping[str, Any], facts: Mapping[str, HostFacts] | None = None, **sections: Any) -> Context:
    """What the checks look at."""
    plan = cluster(document, **sections)
    return Context(plan, facts or {}, aws=match_hosts(aws_of(document), plan, facts or {}))


def findings(seen: Context) -> list[Finding]:
    """What all checks of EC2 say."""
    return [finding for check in (*instances.CHECKS, *security_groups.CHECKS) for finding in run_check(check, seen)]


def verdicts(found: list[Finding]) -> dict[str, str]:
    """The worst answer of each check: ``error``, ``warning``, ``info``, ``skipped`` or ``pass``."""
    order = ["pass", "skipped", "info", "warning", "error"]
    worst: dict[str, str] = {}
    for one in found:
        word = one.severity.value if one.verdict.value == "fail" else one.verdict.value
        worst[one.id] = max(worst.get(one.id, "pass"), word, key=order.index)
    return worst


def bad(found: list[Finding]) -> dict[str, str]:
    """Verdicts that are no pass."""
    return {check: word for check, word in verdicts(found).items() if word != "pass"}


def only(found: list[Finding], check: str) -> Finding:
    """The one finding of a check."""
    (one,) = [finding for finding in found if finding.id == check]
    return one


def host(name: str, *, container: str | None = None, **cloud: Any) -> HostFacts:
    """Facts of a host with the metadata of an EC2 instance."""
    system = SystemFacts(
        hostname=name,
        kernel="6.8.0-1021-aws",
        machine="x86_64",
        os="Ubuntu 24.04",
        cpus=192,
        user="ubuntu",
        uid=1000,
        python="3.12.3",
        container=container,
    )
    values = {"vendor": "Amazon EC2", **cloud}
    return HostFacts(name, system=system, cloud=CloudFacts(**values))
