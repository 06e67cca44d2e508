"""Polls a cluster: one script on every host looks at what is there, and a snapshot is what has come in so far.

See :mod:`~pdctl.watch.poll_host` (connections), :mod:`~pdctl.watch.poll_state` (readings to views),
:mod:`~pdctl.watch.poll_join` (transfers), and ``pdctl/node/watch_facts.py`` (the script).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from pdctl.hosts.fleet import Fleet
from pdctl.plan import ClusterPlan
from pdctl.watch.poll_host import HostWatch
from pdctl.watch.poll_request import READING_TIMEOUT_S, host_request
from pdctl.watch.poll_state import ClusterState, Diagnose
from pdctl.watch.snapshot import Snapshot

FIRST_WAIT_S = 15.0
"""How long the first poll waits for hosts that are still being connected to. Later ones wait for nothing."""

_CLOSE_S = 2.0


class Poller:
    """Watches all instances of a plan. A context manager: leaving it ends what runs on the hosts.

    Args:
        plan: the cluster.
        fleet: its hosts. Stays open.
        interval_s: how often each host looks at its instances.
        window_s: how far back percentiles reach.
        clock: monotonic seconds.
        diagnose: explains the end of an instance, from the end of its log, its exit status and its signal; without it
            there is the exit status alone.
        first_wait_s: see :data:`FIRST_WAIT_S`.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        fleet: Fleet,
        *,
        interval_s: float = 1.0,
        window_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        diagnose: Diagnose | None = None,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._first_wait_s = first_wait_s
        self._state = ClusterState(plan, interval_s=interval_s, window_s=window_s, diagnose=diagnose)
        self._changed = threading.Condition()
        self._lines = dict.fromkeys(plan.hosts, 0)
        # After a first line, how many more it takes until the readings with the longest deadline are over.
        self._whole = 1 + round(READING_TIMEOUT_S / interval_s)
        self._failed: set[str] = set()
        self._tick = 0
        slots = threading.BoundedSemaphore(plan.spec.ssh.max_parallel)
        pythons = _pythons(plan)
        self._hosts = [
            HostWatch(name, fleet.host, host_request(plan, name, interval_s=interval_s), pythons[name], self, slots)
            for name in plan.hosts
        ]

    def __enter__(self) -> Poller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def poll(self) -> Snapshot:
        """What is known now. Takes milliseconds, but the first time, and never raises for what hosts do."""
        if self._tick == 0:
            self._begin()
        started = time.monotonic()
        with self._changed:
            snapshot = self._state.snapshot(at=self._clock(), unix=time.time(), tick=self._tick)
        self._tick += 1
        return replace(snapshot, poll_s=time.monotonic() - started)

    def set_interval(self, interval_s: float) -> None:
        """Have every host look at its instances at another pace from now on."""
        with self._changed:
            self._state.set_interval(interval_s)
        for host in self._hosts:
            host.ask(host_request(self._plan, host.name, interval_s=interval_s))

    def close(self) -> None:
        """End what runs on the hosts, and the connections' threads. Takes a bounded time; again is fine."""
        for host in self._hosts:
            host.close()
        until = time.monotonic() + _CLOSE_S
        if self._tick:
            for host in self._hosts:
                host.join(max(0.0, until - time.monotonic()))

    def connected(self, host: str) -> None:
        """See :class:`~pdctl.watch.poll_host.Sink`."""
        with self._changed:
            self._state.connected(host)

    def heard(self, host: str, message: Mapping[str, Any]) -> None:
        """See :class:`~pdctl.watch.poll_host.Sink`."""
        with self._changed:
            self._state.heard(host, message, self._clock())
            self._lines[host] += 1
            self._changed.notify_all()

    def lost(self, host: str, error: str) -> None:
        """See :class:`~pdctl.watch.poll_host.Sink`."""
        with self._changed:
            self._state.lost(host, error)
            self._failed.add(host)
            self._changed.notify_all()

    def _begin(self) -> None:
        for host in self._hosts:
            host.start()
        until = time.monotonic() + self._first_wait_s
        with self._changed:
            while not self._is_whole():
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def _is_whole(self) -> bool:
        """Whether every host has said all that it is going to say at first, or cannot be reached."""
        for name, lines in self._lines.items():
            if name not in self._failed and (lines == 0 or (lines < self._whole and self._state.is_waiting(name))):
                return False
        return True


def _pythons(plan: ClusterPlan) -> dict[str, tuple[str, ...]]:
    """Interpreters to try on each host: those that its instances run with, where the path is known here."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(plan.hosts, ("python3",))
    for instance in plan.instances:
        known = found[instance.host]
        if instance.argv and instance.argv[0] not in known and not instance.argv[0].startswith("@"):
            found[instance.host] = (*known, instance.argv[0])
    return found
