"""What the dashboard is given: where its frames come from, and what it may do. No Textual here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pdctl.watch.acting import ActionEvent
from pdctl.watch.alerts import Alert, AlertEvent
from pdctl.watch.snapshot import Snapshot


@dataclass(frozen=True)
class ReplayPosition:
    """Where a replay stands.

    Attributes:
        index: of the snapshot shown, from 0.
        count: how many snapshots the recording has.
        playing: whether it goes on by itself.
        speed: 1.0 is the pace of the recording.
    """

    index: int
    count: int
    playing: bool
    speed: float = 1.0


@dataclass(frozen=True)
class Frame:
    """All that one picture is made of.

    Attributes:
        snapshot: of the cluster.
        alerts: open ones, as of this snapshot.
        events: what changed since the frame before.
        replay: None for a live source.
        actions: what ``--on-stall`` did, or refused, since the frame before.
        acting: what it does now, in words; empty without it.
    """

    snapshot: Snapshot
    alerts: tuple[Alert, ...] = ()
    events: tuple[AlertEvent, ...] = ()
    replay: ReplayPosition | None = None
    actions: tuple[ActionEvent, ...] = ()
    acting: str = ""


class SourceClosed(Exception):
    """There will be no further frame: the source was closed, or has no more."""


class SnapshotSource(Protocol):
    """Where frames come from. ``next`` is called from one thread of its own, everything else from the dashboard's."""

    def next(self) -> Frame:
        """Wait for the next frame and give it.

        Raises:
            SourceClosed: there will be none.
            Exception: anything else is shown, and ``next`` is called again a little later.
        """

    def close(self) -> None:
        """Let go of everything. A ``next`` that waits ends soon, with SourceClosed. May be called twice."""


@runtime_checkable
class ReplaySource(Protocol):
    """A source with a past and a future. After each of these calls ``next`` gives the new position without delay."""

    def step(self, count: int) -> None:
        """Go on by so many snapshots, back if negative, and no further than the ends. Stops playing."""

    def seek(self, index: int) -> None:
        """Go to that snapshot; -1 is the last. Stops playing."""

    def set_playing(self, playing: bool) -> None:
        """Let it go on by itself, or stop it."""

    def set_speed(self, speed: float) -> None:
        """How many times as fast as it was recorded it plays."""


@runtime_checkable
class PacedSource(Protocol):
    """A source whose pace can be changed."""

    @property
    def interval_s(self) -> float:
        """Seconds from one poll to the next."""

    def set_interval(self, interval_s: float) -> None:
        """Poll at another pace from now on."""


class Actions(Protocol):
    """What a person may have done to the cluster from here. Each call blocks, in a thread of its own.

    All raise PdctlError for what can be explained.
    """

    def restart(self, instance: str) -> str:
        """Restart that instance and say in a sentence how it went."""

    def drain(self, instance: str) -> str:
        """Take that instance out of the router's hands and say in a sentence how it went."""

    def logs(self, instance: str) -> str:
        """The last lines of that instance's log."""

    def doctor_pair(self, prefill: str, decode: str) -> str:
        """Check the way from one instance to the other, and give the report as text."""
