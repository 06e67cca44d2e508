"""What the dashboard may do to the cluster: other areas' work, behind the protocol that the dashboard knows."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from pdctl.errors import PdctlError, UsageError
from pdctl.watch.acting_thread import CLOSE_S, Progress, leave

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdctl.hosts.fleet import Fleet
    from pdctl.plan import ClusterPlan, InstancePlan
    from pdctl.watch.acting import Decision

_LOG_LINES = 200


class ClusterActions:
    """Actions on a cluster. Each call blocks, and is made from a thread of its own.

    Args:
        plan: as it was when the watch began.
        file: the cluster file, read again for a restart, which needs its secrets.
        fleet: the hosts.
        read_only: refuse what changes anything, whatever the dashboard allows.
        cool_down_s: what :meth:`act` is to restart must have run for this long, whoever started it.
    """

    def __init__(
        self, plan: ClusterPlan, file: Path, fleet: Fleet, *, read_only: bool, cool_down_s: float = 0.0
    ) -> None:
        self._plan = plan
        self._file = file
        self._fleet = fleet
        self._read_only = read_only
        self._cool_down_s = cool_down_s
        self._changing = threading.Lock()
        self._closed = False
        # What a person has begun: in words, and how far it is. An automatic action is its thread's business.
        self._begun: tuple[str, Progress] | None = None
        self._ended = ""

    def restart(self, instance: str) -> str:
        """Restart an instance with the present plan, warm it up and prove a request if the others allow it.

        Raises:
            PdctlError: it did not come up, or another restart is running. What has been started goes on.
        """
        return self._for_person(f"restart of {instance}", lambda progress: self._restart_now(instance, progress))

    def drain(self, instance: str) -> str:
        """Take an instance out of the router and wait, for two minutes at most, until it has nothing left to do.

        Raises:
            PdctlError: it is the last of its role, the router does not do it, or something else is being changed.
        """
        return self._for_person(f"drain of {instance}", lambda progress: self._drain(instance, progress))

    def close(self, note: Callable[[str], None], timeout_s: float = CLOSE_S) -> None:
        """Begin nothing more, and wait until what a person has begun can be left alone. Says what state it is in."""
        self._closed = True
        begun = self._begun
        if begun is not None:
            what, progress = begun
            leave(what, progress, note, timeout_s=timeout_s, result=self._how_it_ended)

    def act(self, decision: Decision, progress: Progress) -> str:
        """Do what ``--on-stall`` decided; for :class:`~pdctl.watch.acting_thread.ActingThread`.

        Raises:
            PdctlError: it did not work, or a person is changing something from the dashboard.
        """
        if decision.action == "drain":
            return self._change(lambda: "; ".join(self._drain(one, progress) for one in decision.instances))
        return self._change(lambda: self._restart_as_watched(decision.instances, progress))

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

    def _for_person(self, what: str, work: Callable[[Progress], str]) -> str:
        def tracked() -> str:
            progress = Progress()
            self._ended, self._begun = "", (what, progress)
            try:
                if self._closed:
                    raise PdctlError("the watch is ending; nothing was begun")
                words = work(progress)
                self._ended = f"done: {words}"
                return words
            except Exception as error:
                self._ended = f"failed: {error}"
                raise
            finally:
                progress.safe()
                if not self._closed:
                    self._begun = None

        return self._change(tracked)

    def _how_it_ended(self) -> str:
        # Its thread writes this just before it says that it is safe to leave, if it has ended.
        return self._ended

    def _change(self, work: Callable[[], str]) -> str:
        self._refuse_if_read_only()
        if not self._changing.acquire(blocking=False):
            raise PdctlError("another restart or drain is running", hint="wait for its end")
        try:
            return work()
        finally:
            self._changing.release()

    def _drain(self, name: str, progress: Progress) -> str:
        from pdctl.lifecycle.drain import drain

        # The router's part is one request; waiting for the rest changes nothing.
        progress.safe()
        return drain(self._plan, self._fleet, self._instance(self._plan, name), say=progress.at).words

    def _restart_now(self, name: str, progress: Progress) -> str:
        """Restart it as the cluster file is now: a person has asked for it, as with ``pdctl restart``."""
        from pdctl.cli.options import load_plan

        return self._restart(load_plan(self._file, require_secrets=True), name, progress, prove=True)

    def _restart_as_watched(self, names: Sequence[str], progress: Progress) -> str:
        """Restart them one after the other, if that changes nothing but their age."""
        from pdctl.cli.options import load_plan

        plan = load_plan(self._file, require_secrets=True)
        refuse_other_plan(self._plan, plan)
        self._refuse_others_work(plan, names)
        told: list[str] = []
        for name in names:
            if told and not progress.go_on():
                return "; ".join([*told, f"{name} was left as it is, since the watch ends"])
            # Of a pair only the whole can be proven.
            told.append(self._restart(plan, name, progress, prove=name == names[-1]))
        return "; ".join(told)

    def _refuse_others_work(self, plan: ClusterPlan, names: Sequence[str]) -> None:
        """Leave alone what runs an older plan, or what somebody (a person, another watch) has just (re)started."""
        from pdctl.lifecycle.nodes import Nodes

        nodes = Nodes(plan, self._fleet)
        for name in names:
            planned = self._instance(plan, name)
            runs = nodes.status(planned.host, [name]).known[name]
            if runs.process != "running":
                raise PdctlError(
                    f"{name} does not run now: somebody has stopped it, or is restarting it; nothing was done",
                    hint="pdctl status; pdctl up starts it",
                )
            if runs.digest != planned.digest:
                raise PdctlError(
                    f"{name} runs another plan than the cluster file, which a restart would apply; nothing was done",
                    hint=f"pdctl restart {name} applies it",
                )
            if runs.uptime_s is not None and runs.uptime_s < self._cool_down_s:
                raise PdctlError(
                    f"{name} was started {runs.uptime_s:.0f} s ago, and is left alone for {self._cool_down_s:.0f} s; "
                    "nothing was done",
                    hint="is there another watch that acts?",
                )

    def _restart(self, plan: ClusterPlan, name: str, progress: Progress, *, prove: bool) -> str:
        from pdctl.lifecycle.failure import LaunchFailed
        from pdctl.lifecycle.restart import restart
        from pdctl.lifecycle.up import UpOptions

        # Kept: what has come up is not stopped again because something else has failed.
        options = UpOptions(keep=True, only=(name,), prove=prove)
        try:
            result = restart(plan, self._fleet, _Tells(progress), [self._instance(plan, name)], options)
        except LaunchFailed as error:
            left = f"; {error.aftermath.words}" if error.aftermath is not None else ""
            raise PdctlError(f"{error.message}{left}", hint=error.hint) from error
        times = [one.ready_after_s for one in result.instances if one.plan.name == name and one.ready_after_s]
        took = f" after {max(times):.0f} s" if times else ""
        unproven = f"; not proven by a request: {result.unproven}" if result.unproven else ""
        return f"{name} was restarted, and is ready{took}{unproven}"

    def _refuse_if_read_only(self) -> None:
        if self._read_only:
            raise UsageError("this watch was started with --read-only")

    @staticmethod
    def _instance(plan: ClusterPlan, name: str) -> InstancePlan:
        for instance in plan.instances:
            if instance.name == name:
                return instance
        raise UsageError(f"there is no instance {name!r} in the cluster file")


def refuse_other_plan(watched: ClusterPlan, now: ClusterPlan) -> None:
    """Refuse to apply edits of the cluster file that nobody has applied. Pure.

    Raises:
        PdctlError: the plan is another than the one that is watched.
    """
    before = {one.name: (one.host, one.digest) for one in watched.instances}
    after = {one.name: (one.host, one.digest) for one in now.instances}
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed or watched.hosts != now.hosts:
        raise PdctlError(
            f"the cluster file has changed since the watch began ({', '.join(changed) or 'its hosts'}), and a restart "
            "would apply that; nothing was done",
            hint="apply it (pdctl up --apply), then start the watch again",
        )


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
