"""`pdctl restart`: replace single instances while the rest goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdctl.errors import HostError, PdctlError
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.failure import Aftermath, Interrupted, LaunchFailed
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

    With ``options.only``, which then names these instances, nothing else is started, waited for or checked.

    Raises:
        HostError: a host could not be reached; nothing was stopped, since it could not be started again.
        PdctlError: an instance could not be stopped; those that were stopped are started again.
        LaunchFailed, Interrupted: as for ``up``; Interrupted also while instances are being stopped.
    """
    nodes = Nodes(plan, fleet)
    hosts = tuple(dict.fromkeys(i.host for i in instances)) if options.only else plan.hosts
    _reach_all(nodes, hosts, fleet, reporter)
    names = tuple(instance.name for instance in instances)
    reporter.step(f"stopping {', '.join(names)}")
    try:
        aftermath = stop_instances(nodes, fleet, [Target(i.name, i.host) for i in instances], grace_s=options.grace_s)
    except KeyboardInterrupt:
        raise Interrupted(Aftermath(stopping=names)) from None
    if aftermath.left_running or aftermath.not_reached:
        raise _half_stopped(plan, fleet, reporter, options, aftermath)
    try:
        return up(plan, fleet, reporter, options)
    except LaunchFailed:
        raise
    except PdctlError as error:
        # Before anything was started: nobody else says that something is down now.
        error.message = f"{', '.join(names)} stopped, and not started again: {error.message}"
        error.hint = f"pdctl up starts what is down{f'. {error.hint}' if error.hint else ''}"
        raise


def _half_stopped(
    plan: ClusterPlan, fleet: Fleet, reporter: Reporter, options: UpOptions, aftermath: Aftermath
) -> PdctlError:
    """Start again what was stopped beside an instance that would not stop. Returns the error that tells of both."""
    stayed = []
    if aftermath.left_running:
        stayed.append(f"could not stop {', '.join(aftermath.left_running)}")
    if aftermath.not_reached:
        stayed.append(f"could not be reached to be stopped: {', '.join(aftermath.not_reached)}")
    message = f"cannot restart: {'; '.join(stayed)}"
    hint = "pdctl status shows what runs"
    if not aftermath.stopped:
        return PdctlError(message, hint=f"nothing was started; {hint}")
    stopped = ", ".join(aftermath.stopped)
    try:
        up(plan, fleet, reporter, replace(options, only=aftermath.stopped, keep=True, prove=False))
    except PdctlError as error:
        after = error.aftermath if isinstance(error, LaunchFailed) else None
        left = f"; {after.words}" if after is not None else ""
        return PdctlError(f"{message}; {stopped} stopped, and did not come up again: {error.message}{left}", hint=hint)
    return PdctlError(f"{message}; {stopped} stopped, and was started again", hint=hint)


def _reach_all(nodes: Nodes, hosts: Sequence[str], fleet: Fleet, reporter: Reporter) -> None:
    """What is stopped is started again by ``up``, which starts nothing while one of these hosts cannot be reached."""
    count = len(hosts)
    reporter.step(f"reaching {count} host{'' if count == 1 else 's'}")
    results = fleet.map(lambda host: nodes.status(host.name, []), list(hosts), timeout_s=_REACH_S)
    errors = [result for result in results.values() if isinstance(result, PdctlError)]
    if not errors:
        return
    message = "; ".join(error.message for error in errors)
    hint = "nothing was stopped; an instance is started only while every host that pdctl up needs can be reached"
    if errors[0].hint:
        hint += f". {errors[0].hint}"
    if all(isinstance(error, HostError) for error in errors):
        raise HostError("cannot restart", message, hint=hint)
    raise PdctlError(f"cannot restart: {message}", hint=hint)
