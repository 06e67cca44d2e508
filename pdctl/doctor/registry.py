"""All checks, in the order of the report."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from pdctl.doctor.context import Context
from pdctl.doctor.findings import Check, Finding, run_check

# Titles of the areas, in the order of the report.
AREAS = {
    "SSH": "Reach and login",
    "HOST": "Operating system",
    "ACC": "Accelerators",
    "FAB": "EFA and RDMA",
    "AWS": "Instances and placement",
    "SG": "Security groups",
    "SW": "Software",
    "MOD": "Model and parallel layout",
    "NET": "Network between the hosts",
    "XFER": "NIXL WRITE between the hosts",
}
_MODULES = (
    "reach",
    "host",
    "accelerators",
    "fabric",
    "instances",
    "security_groups",
    "software",
    "model",
    "network",
    "transfer",
)


def all_checks() -> tuple[Check, ...]:
    """Every check, by area in the order of :data:`AREAS`, then by id."""
    checks: list[Check] = []
    for name in _MODULES:
        checks.extend(importlib.import_module(f"pdctl.doctor.checks.{name}").CHECKS)
    order = list(AREAS)
    return tuple(sorted(checks, key=lambda check: (order.index(check.area), check.id)))


def run_checks(context: Context, checks: tuple[Check, ...]) -> Iterator[Finding]:
    """Run checks over the facts, in their order."""
    for check in checks:
        yield from run_check(check, context)
