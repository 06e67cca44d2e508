"""FAB0xx: what the KV cache travels over. Pure; the checks are in modules by what they look at."""

from __future__ import annotations

from pdctl.doctor.checks import (
    efa_devices,
    efa_software,
    fabric_environment,
    tcp_fabric,
    ucx_environment,
    verbs_ports,
)
from pdctl.doctor.findings import Check

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (
            *efa_devices.CHECKS,
            *efa_software.CHECKS,
            *fabric_environment.CHECKS,
            *verbs_ports.CHECKS,
            *ucx_environment.CHECKS,
            *tcp_fabric.CHECKS,
        ),
        key=lambda check: check.id,
    )
)
