"""What an instance of the plan will meet on its host: its environment, its options, whether it runs already. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdctl.doctor.facts import HostFacts
from pdctl.doctor.instance_table import InstanceType, lookup
from pdctl.plan import InstancePlan

PLAN = "the cluster file (`env`), or pdctl's own default"
LOGIN = "the login environment of the host (~/.profile, /etc/environment, /etc/profile.d)"


def environment_of(facts: HostFacts, instance: InstancePlan) -> dict[str, tuple[str, str]]:
    """The variables that a process of the instance sees, as far as they are known: value and where it comes from.

    The node agent starts instances with the environment of the login, and the plan's variables on top of it.
    """
    variables = {name: (value, LOGIN) for name, value in (facts.environment or {}).items()}
    # The value of a secret is nobody's business; that it hides the login's one is.
    for name in instance.secret_names:
        variables.pop(name, None)
    variables.update({name: (value, PLAN) for name, value in instance.env.items()})
    return variables


def argument_of(instance: InstancePlan, option: str) -> str | None:
    """Value of a command-line option (name without dashes); None if it is not given or has no value."""
    flag = f"--{option}"
    for position, word in enumerate(instance.argv):
        if word == flag and position + 1 < len(instance.argv):
            return instance.argv[position + 1]
        if word.startswith(f"{flag}="):
            return word[len(flag) + 1 :]
    return None


def ranks_of(instance: InstancePlan) -> int:
    """Workers of a vLLM instance; 0 for the router."""
    if instance.role == "router":
        return 0
    ranks = len(instance.devices) or len(instance.telemetry_ports)
    if ranks:
        return ranks
    # In pull mode on CPUs the plan has neither.
    ranks = 1
    for option in ("tensor-parallel-size", "data-parallel-size", "pipeline-parallel-size"):
        value = argument_of(instance, option) or "1"
        ranks *= int(value) if value.isascii() and value.isdigit() and len(value) < 6 else 1
    return ranks


def transfer_config(instance: InstancePlan) -> Mapping[str, Any]:
    """``--kv-transfer-config`` of an instance; empty for the router."""
    try:
        value = json.loads(argument_of(instance, "kv-transfer-config") or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def backends_of(instance: InstancePlan) -> tuple[str, ...]:
    """NIXL backends that an instance asks for. vLLM takes UCX unless told otherwise."""
    extra = transfer_config(instance).get("kv_connector_extra_config")
    named = extra.get("backends") if isinstance(extra, dict) else None
    return tuple(map(str, named)) if isinstance(named, list) and named else ("UCX",)


def is_running(facts: HostFacts, instance: InstancePlan) -> bool:
    """Whether this instance of this cluster runs on the host now: one of its ports is held by itself."""
    own = {use.port for use in instance.ports}
    return any(port.ours and port.port in own for port in facts.ports or ())


def instance_type_name(facts: HostFacts) -> str | None:
    """EC2 instance type by metadata or DMI; None on other machines."""
    cloud = facts.cloud
    if cloud is None:
        return None
    return cloud.instance_type or (cloud.product if cloud.is_ec2 and cloud.product else None)


def instance_type(facts: HostFacts) -> InstanceType | None:
    """What is known of the host's EC2 instance type; None if it is none or not in the table."""
    name = instance_type_name(facts)
    return lookup(name) if name else None
