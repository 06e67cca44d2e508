"""What the dashboard may do to the cluster: other areas' work, behind the protocol that the dashboard knows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from pdctl.errors import PdctlError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdctl.hosts.fleet import Fleet
    from pdctl.plan import ClusterPlan, InstancePlan
    from pdctl.watch.acting import Decision
    from pdctl.watch.acting_thread import Progress

_LOG_LINES = 200


class ClusterActions:
    """Actions on a cluster. Each call blocks, and is made from a thread of its own.

    Args:
        plan: as it was when the watch began.
        file: the cluster file, read again for a restart, which needs its secrets.
        fleet: the hosts.
        read_only: refuse what changes anything, whatever the dashboard allows.
    """

    def __init__(self, plan: ClusterPlan, file: Path, fleet: Fleet, *, read_only: bool) -> None:
        self._plan = plan
        self._file = file
        self._fleet = fleet
        self._read_only = read_only
        self._changing = threading.Lock()

    def restart(self, instance: str) -> str:
        """Restart an instance with the present plan, warm it up and prove a request, as ``pdctl restart`` does.

        Raises:
            PdctlError: it did not come up, or another restart is running.
        """
        return self._change(lambda: self._restart([instance]))

    def drain(self, instance: str) -> str:
        """Take an instance out of the router and wait, for two minutes at most, until it has nothing left to do.

        Raises:
            PdctlError: it is the last of its role, the router does not do it, or something else is being changed.
        """
        return self._change(lambda: self._drain(instance))

    def act(self, decision: Decision, progress: Progress) -> str:
        """Do what ``--on-stall`` decided; for :class:`~pdctl.watch.acting_thread.ActingThread`.

        Raises:
            PdctlError: it did not work, or a person is changing something from the dashboard.
        """
        if decision.action == "drain":
            # The router's part is one request; waiting for the rest changes nothing.
            progress.safe()
            return self._change(lambda: "; ".join(self._drain(one, progress) for one in decision.instances))
        return self._change(lambda: self._restart(decision.instances, progress))

    def logs(self, instance: str) -> str:
        """The last 200 lines of an instance's log.

        Raises:
            PdctlError: the host does not answer, or there is no log.
        """
        from pdctl.lifecycle.logs import read_log
        from pdctl.lifecycle.nodes import Nodes

        planned = self._instance(self._plan, instance)
        nodes = Nodes(self._plan, self._fleet)
        return "".join(read_log(nodes, planned.host, instance, lines=_LOG_LINES, follow=False))

    def doctor_pair(self, prefill: str, decode: str) -> str:
        """The doctor's report about the way between two instances: their network, and a real write over NIXL.

        Raises:
            PdctlError: the doctor could not work.
        """
        from dataclasses import replace

        from pdctl.doctor.registry import all_checks
        from pdctl.doctor.report import Style, report
        from pdctl.doctor.run import Options, examine
        from pdctl.doctor.selection import select
        from pdctl.doctor.styled_text import glyphs_for

        pair = (self._instance(self._plan, prefill), self._instance(self._plan, decode))
        plan = replace(self._plan, instances=(*pair, self._plan.router))
        checks = select(all_checks(), only=("SSH,NET,FAB,XFER",))
        outcome = examine(plan, self._fleet, _NoProgress(), Options(checks, ec2=False))
        lines = report(outcome, Style(100, glyphs_for("utf-8")))
        return "\n".join("".join(span.text for span in line).rstrip() for line in lines)

    def _change(self, work: Callable[[], str]) -> str:
        self._refuse_if_read_only()
        if not self._changing.acquire(blocking=False):
            raise PdctlError("another restart or drain is running", hint="wait for its end")
        try:
            return work()
        finally:
            self._changing.release()

    def _drain(self, name: str, progress: Progress | None = None) -> str:
        from pdctl.lifecycle.drain import drain

        instance = self._instance(self._plan, name)
        if progress is None:
            return drain(self._plan, self._fleet, instance).words
        return drain(self._plan, self._fleet, instance, say=progress.at).words

    def _restart(self, names: Sequence[str], progress: Progress | None = None) -> str:
        from pdctl.cli.options import load_plan
        from pdctl.lifecycle.reporter import SilentReporter
        from pdctl.lifecycle.restart import restart
        from pdctl.lifecycle.up import UpOptions

        plan = load_plan(self._file, require_secrets=True)
        reporter = SilentReporter() if progress is None else _Tells(progress)
        result = restart(plan, self._fleet, reporter, [self._instance(plan, name) for name in names], UpOptions())
        times = [one.ready_after_s for one in result.instances if one.plan.name in names and one.ready_after_s]
        took = f" after {max(times):.0f} s" if times else ""
        changed = f"; {', '.join(result.changed)} run an older plan than the cluster file" if result.changed else ""
        are = "was restarted, and is" if len(names) == 1 else "were restarted, and are"
        return f"{' and '.join(names)} {are} ready{took}{changed}"

    def _refuse_if_read_only(self) -> None:
        if self._read_only:
            raise UsageError("this watch was started with --read-only")

    @staticmethod
    def _instance(plan: ClusterPlan, name: str) -> InstancePlan:
        for instance in plan.instances:
            if instance.name == name:
                return instance
        raise UsageError(f"there is no instance {name!r} in the cluster file")


class _Tells:
    """A reporter of a restart that tells how far it is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def step(self, text: str) -> None:
        """A step begins."""
        self._progress.at(text)

    def progress(self, instance: str, phase: str, detail: str, elapsed_s: float) -> None:
        """An instance boots. Only what has been started is followed, so that all of it now comes up by itself."""
        del detail
        self._progress.at(f"{instance} is {phase} for {elapsed_s:.0f} s")
        self._progress.safe()

    def note(self, text: str) -> None:
        """Drop it."""

    def warning(self, text: str) -> None:
        """Drop it."""


class _NoProgress:
    def step(self, text: str) -> None:
        """Drop it."""

    def detail(self, text: str) -> None:
        """Drop it."""
