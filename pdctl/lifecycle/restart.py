"""`pdctl restart`: replace single instances while the rest goes on."""

from __future__ import annotations

from collections.abc import Sequence

from pdctl.errors import PdctlError
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.nodes import Nodes
from pdctl.lifecycle.reporter import Reporter
from pdctl.lifecycle.stop import Target, stop_instances
from pdctl.lifecycle.up import UpOptions, UpResult, up
from pdctl.plan import ClusterPlan, InstancePlan


def restart(
    plan: ClusterPlan,
    fleet: Fleet,
    reporter: Reporter,
    instances: Sequence[InstancePlan],
    options: UpOptions,
) -> UpResult:
    """Stop the instances, then bring the cluster up again: what still runs is left as it is.

    Raises:
        PdctlError: an instance could not be stopped; nothing was started.
        LaunchFailed, Interrupted: as for ``up``.
    """
    reporter.step(f"stopping {', '.join(instance.name for instance in instances)}")
    aftermath = stop_instances(
        Nodes(plan, fleet), fleet, [Target(i.name, i.host) for i in instances], grace_s=options.grace_s
    )
    if aftermath.left_running or aftermath.not_reached:
        raise PdctlError(
            f"cannot restart: {aftermath.words}",
            hint="nothing was started; pdctl status shows what runs",
        )
    return up(plan, fleet, reporter, options)
