"""What the EC2 API said. Pure data in the API's own shapes; ``aws.py`` asks, ``--aws-facts`` reads it from a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AwsFacts:
    """Answers of the EC2 API, in the shapes of boto3 (untrusted: any key may be missing).

    Attributes:
        region: the region that was asked.
        instances: description of each host's instance (``describe_instances``), by host name of the cluster file.
        instance_types: by type name (``describe_instance_types``).
        security_groups: by group id (``describe_security_groups``).
        subnets: by subnet id.
        placement_groups: by group name.
        prefix_lists: entries (CIDRs) by prefix list id.
        refused: why a call gave nothing, by API action (``DescribeSecurityGroups``): a missing permission, throttling,
            expired keys; in words, with what to do.
        not_found: why a host has no instance here, by host name.
    """

    region: str = ""
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    instance_types: dict[str, dict[str, Any]] = field(default_factory=dict)
    security_groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    subnets: dict[str, dict[str, Any]] = field(default_factory=dict)
    placement_groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    prefix_lists: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    not_found: dict[str, str] = field(default_factory=dict)
