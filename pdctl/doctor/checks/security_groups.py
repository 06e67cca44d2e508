"""SG0xx: what the security groups of the instances let through, and to whom. Pure."""

from __future__ import annotations

from pdctl.doctor.checks import security_groups_efa, security_groups_tcp
from pdctl.doctor.findings import Check

CHECKS: tuple[Check, ...] = (*security_groups_efa.CHECKS, *security_groups_tcp.CHECKS)
