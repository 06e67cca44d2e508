"""`pdctl restart`: replace single instances while the rest goes on."""

from __future__ import annotations

from collections.abc import Sequence

from pdctl.errors import HostError, PdctlError
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.failure import Aftermath, Interrupted
from pdctl.lifecycle.nodes import Nodes
from pdctl.lifecycle.reporter import Reporter
from pdctl.lifecycle.stop import Target, stop_instances
from pdctl.lifecycle.up import UpOptions, UpResult, up
from pdctl.plan import ClusterPlan, InstancePlan

_REACH_S = 90.0


def restart(
    plan: ClusterPlan,
    fleet: Fleet,
    reporter: Reporter,
    instances: Sequence[InstancePlan],
    options: UpOptions,
) -> UpResult:
    """Stop the instances, then bring the cluster up again: what still runs is left as it is.

    Raises:
        HostError: a host could not be reached; nothing was stopped, since it could not be started again.
        PdctlError: an instance could not be stopped; nothing was started.
        LaunchFailed, Interrupted: as for ``up``; Interrupted also while instances are being stopped.
    """
    nodes = Nodes(plan, fleet)
    _reach_all(nodes, plan, fleet, reporter)
    names = tuple(instance.name for instance in instances)
    reporter.step(f"stopping {', '.join(names)}")
    try:
        aftermath = stop_instances(nodes, fleet, [Target(i.name, i.host) for i in instances], grace_s=options.grace_s)
    except KeyboardInterrupt:
        raise Interrupted(Aftermath(stopping=names)) from None
    if aftermath.left_running or aftermath.not_reached:
        raise PdctlError(
            f"cannot restart: {aftermath.words}",
            hint="nothing was started; pdctl status shows what runs",
        )
    return up(plan, fleet, reporter, options)


def _reach_all(nodes: Nodes, plan: ClusterPlan, fleet: Fleet, reporter: Reporter) -> None:
    """What is stopped is started again by ``up``, which starts nothing while a host of the plan cannot be reached."""
    count = len(plan.hosts)
    reporter.step(f"reaching {count} host{'' if count == 1 else 's'}")
    results = fleet.map(lambda host: nodes.status(host.name, []), list(plan.hosts), timeout_s=_REACH_S)
    errors = [result for result in results.values() if isinstance(result, PdctlError)]
    if not errors:
        return
    message = "; ".join(error.message for error in errors)
    hint = "nothing was stopped; an instance is started only while every host of the cluster file can be reached"
    if errors[0].hint:
        hint += f". {errors[0].hint}"
    if all(isinstance(error, HostError) for error in errors):
        raise HostError("cannot restart", message, hint=hint)
    raise PdctlError(f"cannot restart: {message}", hint=hint)
