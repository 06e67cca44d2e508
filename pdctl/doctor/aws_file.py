"""Recorded answers of the EC2 API: ``--aws-facts FILE``. Pure.

Two forms are read. The first is our own, as ``pdctl doctor --bundle`` keeps it (see :func:`aws_facts_to_json`)::

    {"schema": 1, "region": "us-east-2", "instances": {"p1": {...}}, "security_groups": {"sg-...": {...}}, ...}

The second are outputs of the AWS CLI, as one JSON object with the keys of :data:`CLI_KEYS`, or simply one after the
other in one file::

    (aws ec2 describe-instances; aws ec2 describe-security-groups; aws ec2 describe-subnets) > facts.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.ec2_shapes import groups_of_flat_rules, mapping, mappings, text
from pdctl.errors import UsageError

SCHEMA = 1

CLI_KEYS = {
    "Reservations": "describe-instances",
    "InstanceTypes": "describe-instance-types",
    "SecurityGroups": "describe-security-groups",
    "SecurityGroupRules": "describe-security-group-rules",
    "Subnets": "describe-subnets",
    "PlacementGroups": "describe-placement-groups",
    "PrefixLists": "describe-prefix-lists",
}
"""Keys of the second form, with the command of the AWS CLI whose output has them."""

_KEPT = frozenset(
    {
        "CapacityBlockId", "InstanceId", "InstanceLifecycle", "InstanceType", "Ipv6Address", "MetadataOptions",
        "NetworkInterfaces", "Placement", "PrivateDnsName", "PrivateIpAddress", "PublicDnsName", "PublicIpAddress",
        "SecurityGroups", "State", "SubnetId", "VpcId",
    }
)  # fmt: skip

# "us-east-2b" -> "us-east-2", "us-west-2-lax-1a" -> "us-west-2", "us-gov-west-1a" -> "us-gov-west-1"
_REGION = re.compile(r"[a-z]{2}(?:-[a-z]+){1,2}-\d+")


def instance_facts(described: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an instance's description that checks look at. Tags, for instance, are nobody's business here."""
    return {key: plain(value) for key, value in described.items() if key in _KEPT}


def plain(value: Any) -> Any:
    """A value of boto3 as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.isoformat() if isinstance(value, datetime) else value


def aws_facts_to_json(aws: AwsFacts) -> dict[str, Any]:
    """The answers as JSON values; :func:`read_aws_facts` reads them back."""
    return {"schema": SCHEMA, **plain(asdict(aws))}


def read_aws_facts(content: str, file: str) -> AwsFacts:
    """Read recorded answers.

    Of the second form ``instances`` are by instance id: :func:`pdctl.doctor.aws_hosts.match_hosts` finds the hosts.

    Args:
        content: of the file.
        file: its name, for messages.

    Raises:
        UsageError: the file has neither form; says where.
    """
    documents = _documents(content, file)
    if any("schema" in one for one in documents):
        if len(documents) > 1:
            raise UsageError(f"{file}: more than one document, and one of them has `schema`")
        return _own_form(documents[0], file)
    return _cli_form(documents, file)


def _documents(content: str, file: str) -> list[dict[str, Any]]:
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    at = 0
    while at < len(content):
        if content[at] in " \t\r\n\ufeff":
            at += 1
            continue
        line = content.count("\n", 0, at) + 1
        try:
            document, at = decoder.raw_decode(content, at)
        except json.JSONDecodeError as error:
            hint = "write the file with `pdctl doctor --bundle`, or with `aws ec2 describe-... --output json`"
            raise UsageError(f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}", hint=hint) from None
        except RecursionError:
            raise UsageError(f"{file}:{line}: nested too deeply") from None
        if not isinstance(document, dict):
            raise UsageError(f"{file}:{line}: a JSON object was expected, not {type(document).__name__}")
        found.append(document)
    if not found:
        raise UsageError(f"{file}: the file is empty")
    return found


def _own_form(document: Mapping[str, Any], file: str) -> AwsFacts:
    if document["schema"] != SCHEMA:
        raise UsageError(f"{file}: `schema` is {document['schema']!r}; this pdctl reads {SCHEMA}")
    values: dict[str, Any] = {}
    structures = ("instances", "instance_types", "security_groups", "subnets", "placement_groups")
    for key in structures:
        values[key] = _object(document, key, file, lambda one: isinstance(one, dict), "an object")
    for key in ("refused", "not_found"):
        values[key] = _object(document, key, file, lambda one: isinstance(one, str), "a string")
    values["prefix_lists"] = _object(document, "prefix_lists", file, _strings, "a list of strings")
    region = document.get("region", "")
    if not isinstance(region, str):
        raise UsageError(f"{file}: `region` should be a string")
    return AwsFacts(region, **values)


def _object(
    document: Mapping[str, Any], key: str, file: str, fits: Callable[[Any], bool], what: str
) -> dict[str, Any]:  # fmt: skip
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{file}: `{key}` should be an object")
    for name, one in value.items():
        if not fits(one):
            raise UsageError(f"{file}: `{key}.{name}` should be {what}")
    return value


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _cli_form(documents: list[dict[str, Any]], file: str) -> AwsFacts:
    lists: dict[str, list[Any]] = {}
    for document in documents:
        if document.get("NextToken"):
            hint = "record it again without --no-paginate and --max-items"
            raise UsageError(f"{file}: an answer is not complete (it has `NextToken`)", hint=hint)
        for key in CLI_KEYS:
            if key in document:
                lists.setdefault(key, []).extend(_list(document, key, file))
    if not lists:
        keys = ", ".join(f"`{key}` (aws ec2 {command})" for key, command in CLI_KEYS.items())
        raise UsageError(f"{file}: has neither `schema` nor one of {keys}")
    instances = {
        text(one.get("InstanceId")): instance_facts(one)
        for reservation in lists.get("Reservations", ())
        for one in mappings(reservation.get("Instances"))
    }
    if "Reservations" in lists and not instances:
        raise UsageError(f"{file}: `Reservations` has no instances")
    # The flat rules are the same truth in another form; what describes whole groups says more.
    groups: dict[str, Any] = groups_of_flat_rules(lists.get("SecurityGroupRules", ()))
    groups.update(_by(lists.get("SecurityGroups", ()), "GroupId"))
    prefix_lists = {
        text(one.get("PrefixListId")): [cidr for cidr in one.get("Cidrs") or () if isinstance(cidr, str)]
        for one in lists.get("PrefixLists", ())
        if isinstance(one.get("Cidrs"), (list, type(None)))
    }
    return AwsFacts(
        region=_region(instances),
        instances=instances,
        instance_types=_by(lists.get("InstanceTypes", ()), "InstanceType"),
        security_groups=groups,
        subnets=_by(lists.get("Subnets", ()), "SubnetId"),
        placement_groups=_by(lists.get("PlacementGroups", ()), "GroupName"),
        prefix_lists=prefix_lists,
        refused={
            action: f"`{key}` (aws ec2 {CLI_KEYS[key]}) is not in {file}"
            for key, action in (
                ("Reservations", "DescribeInstances"),
                ("SecurityGroups", "DescribeSecurityGroups"),
            )
            if key not in lists and not (key == "SecurityGroups" and "SecurityGroupRules" in lists)
        },
    )


def _list(document: Mapping[str, Any], key: str, file: str) -> list[dict[str, Any]]:
    value = document[key]
    if not isinstance(value, list):
        raise UsageError(f"{file}: `{key}` should be a list")
    for number, one in enumerate(value):
        if not isinstance(one, dict):
            raise UsageError(f"{file}: `{key}[{number}]` should be an object")
    return value


def _by(described: Any, key: str) -> dict[str, dict[str, Any]]:
    return {text(one.get(key)): dict(one) for one in described if text(one.get(key))}


def _region(instances: Mapping[str, Mapping[str, Any]]) -> str:
    zones = (text(mapping(one.get("Placement")).get("AvailabilityZone")) for one in instances.values())
    found = [match.group() for zone in zones if (match := _REGION.match(zone))]
    return max(set(found), key=found.count) if found else ""
