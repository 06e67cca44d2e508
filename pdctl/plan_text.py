"""A plan as plain text for people. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from pdctl.plan import MASK, ClusterPlan, InstancePlan
from pdctl.plan_devices import device_ranges
from pdctl.spec_yaml import printable


def plan_text(plan: ClusterPlan) -> str:
    """Write a plan as lines of text, secrets masked, without a newline at the end.

    The commands can be copied into a shell on the host, where ``@START_ID@`` and ``@HOME@`` would be filled in.
    """
    spec = plan.spec
    hosts, instances = _count(len(plan.hosts), "host"), _count(len(plan.instances), "process", "processes")
    lines = [
        f"cluster {spec.cluster}: {spec.model}",
        f"{spec.transfer.mode} mode over {spec.fabric}, accelerator {spec.accelerator}, {instances} on {hosts}",
    ]
    for instance in plan.instances:
        lines += ["", *_instance_lines(instance)]
    return "\n".join(printable(line) for line in lines)


def _instance_lines(instance: InstancePlan) -> Iterator[str]:
    yield f"{instance.name} on {instance.host}: {instance.url}"
    yield f"  ports        {'; '.join(_port_groups(instance))}"
    if instance.devices:
        yield f"  devices      {device_ranges(instance.devices)}"
    yield f"  digest       {instance.digest}"
    variables = {**{name: shlex.quote(value) for name, value in instance.env.items()}}
    variables.update(dict.fromkeys(instance.secret_names, MASK))
    label = "environment"
    for name, value in sorted(variables.items()):
        yield f"  {label:<12} {name}={value}"
        label = ""
    yield f"  command      {shlex.join(instance.argv)}"


def _port_groups(instance: InstancePlan) -> Iterator[str]:
    """``API 8100 at 10.0.0.1``: consecutive ports of one purpose as a range."""
    by_use: dict[tuple[str, str], list[int]] = {}
    for use in instance.ports:
        by_use.setdefault((use.purpose, use.address), []).append(use.port)
    for (purpose, address), ports in by_use.items():
        yield f"{purpose} {device_ranges(ports)} at {address}"


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
