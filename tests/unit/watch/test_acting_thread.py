"""``--on-stall`` beside the polling thread: it never waits there, tells what was done, and leaves at a safe point."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from pdctl.errors import PdctlError
from pdctl.watch.acting import ActingSettings, Decision
from pdctl.watch.acting_thread import ActingThread, Progress
from pdctl.watch.alerts import Alert, AlertEvent
from pdctl.watch.rules import CODES
from pdctl.watch.snapshot import InstanceView
from pdctl.watch.tui.source import Frame
from tests.unit.watch.frames import SNAPSHOT


def alert(code: str, instance: str = "prefill-0") -> Alert:
    return Alert(
        CODES[code].symptom(instance, f"{code} there", "", instances=(instance,)), SNAPSHOT.unix, 100.0, present_s=100.0
    )


def frame(at: float, *alerts: Alert, events: tuple[AlertEvent, ...] = ()) -> Frame:
    router = InstanceView("router", "router", "h1", "http://r", process="running", healthy=True)
    unix = SNAPSHOT.unix - SNAPSHOT.at + at
    return Frame(replace(SNAPSHOT, at=at, unix=unix, instances=(*SNAPSHOT.instances, router)), alerts, events)


class Restarts:
    """Stands for a restart: goes on, safe or not, when it is told to."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.go_on = threading.Event()
        self.error: Exception | None = None
        self.safe_at_once = False

    def __call__(self, decision: Decision, progress: Progress) -> str:
        self.decisions.append(decision)
        progress.at("stopping prefill-0")
        if self.safe_at_once:
            progress.safe()
        assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        return "prefill-0 was restarted"


@pytest.fixture
def restarts() -> Iterator[Restarts]:
    made = Restarts()
    yield made
    made.go_on.set()


def make(restarts: Restarts, notes: list[str] | None = None, **changes: object) -> ActingThread:
    settings = replace(ActingSettings("restart-writer-side"), **changes)  # type: ignore[arg-type]
    return ActingThread(settings, restarts, note=(notes if notes is not None else []).append)


def until(act: Callable[[], Frame]) -> Frame:
    deadline = time.monotonic() + 20
    while not (given := act()).actions:
        assert time.monotonic() < deadline, "it never ended"
        time.sleep(0.01)
    return given


def test_an_action_begins_ends_and_is_told_while_frames_go_on(restarts: Restarts) -> None:
    acting = make(restarts)
    begun = acting(frame(100, alert("W001")))
    assert [event.outcome for event in begun.actions] == ["begun"]
    for at in range(101, 110):
        given = acting(frame(at, alert("W001")))
        assert given.actions == ()
        assert given.acting.startswith("restart-writer-side of prefill-0 for")
    restarts.go_on.set()
    (done,) = until(lambda: acting(frame(110))).actions
    assert (done.outcome, done.detail, done.instances) == ("done", "prefill-0 was restarted", ("prefill-0",))
    assert done.took_s is not None
    assert len(restarts.decisions) == 1
    assert "1 of 2 this hour" in acting(frame(111)).acting


@pytest.mark.parametrize("error", [PdctlError("it did not come up", hint="look"), ZeroDivisionError("a bug")])
def test_what_fails_is_told_and_the_watch_goes_on(restarts: Restarts, error: Exception) -> None:
    acting, restarts.error = make(restarts), error
    acting(frame(100, alert("W001")))
    restarts.go_on.set()
    (failed,) = until(lambda: acting(frame(101))).actions
    assert failed.outcome == "failed"
    assert str(error) in failed.detail
    assert acting(frame(102)).snapshot.at == 102


def test_alerts_of_the_restart_are_part_of_it(restarts: Restarts) -> None:
    acting = make(restarts)
    acting(frame(100, alert("W001")))
    down, other, router = alert("E001"), alert("E001", "decode-0"), alert("E001", "router")
    opened = tuple(AlertEvent("opened", one) for one in (down, other, router))
    given = acting(frame(101, down, other, router, events=opened))
    assert ([event.alert for event in given.events], given.alerts) == ([other], (other,))
    restarts.go_on.set()
    (done,) = until(lambda: acting(frame(102, down, other))).actions
    assert done.folded == (("E001", "prefill-0"), ("E001", "router"))
    # Its time is over, and it is still down.
    given = acting(frame(200, down, other))
    assert ([event.alert for event in given.events], given.alerts) == ([down], (down, other))


def test_the_aftermath_of_one_action_is_no_part_of_the_next(restarts: Restarts) -> None:
    acting = make(restarts, cool_down_s=0.0, interval_s=100.0)
    restarts.go_on.set()
    acting(frame(100, alert("W001")))
    assert until(lambda: acting(frame(101))).actions[0].outcome == "done"
    late = alert("E004")
    assert acting(frame(102, events=(AlertEvent("opened", late),))).events == ()
    acting(frame(103, events=(AlertEvent("closed", late),)))
    acting(frame(200, alert("W001", "decode-0")))
    (done,) = until(lambda: acting(frame(201))).actions
    assert (done.instances, done.folded) == (("decode-0",), ())


def test_a_router_that_ends_during_an_action_is_told(restarts: Restarts) -> None:
    acting = make(restarts)
    acting(frame(100, alert("W001")))
    unwell = alert("E001", "router")
    assert acting(frame(101, unwell, events=(AlertEvent("opened", unwell),))).alerts == ()
    crashed = frame(102, unwell)
    instances = tuple(
        replace(one, process="exited") if one.role == "router" else one for one in crashed.snapshot.instances
    )
    given = acting(replace(crashed, snapshot=replace(crashed.snapshot, instances=instances)))
    assert [event.alert for event in given.events] == [unwell]


def test_a_dry_run_does_nothing_and_hides_nothing(restarts: Restarts) -> None:
    acting = make(restarts, dry_run=True)
    (event,) = acting(frame(100, alert("W001"))).actions
    assert (event.outcome, restarts.decisions) == ("dry-run", [])
    down = alert("E001")
    assert acting(frame(101, down, events=(AlertEvent("opened", down),))).alerts == (down,)


def test_leaving_waits_until_the_cluster_comes_to_a_good_end_by_itself(restarts: Restarts) -> None:
    notes: list[str] = []
    acting = make(restarts, notes)
    acting(frame(100, alert("W001")))
    deadline = time.monotonic() + 20
    while not restarts.decisions and time.monotonic() < deadline:
        time.sleep(0.01)
    acting.close(0.05)
    assert "is under way" in notes[0]
    assert "hangs (stopping prefill-0): pdctl status" in notes[1]
    # Nothing is begun any more.
    restarts.go_on.set()
    until(lambda: acting(frame(101)))
    assert acting(frame(1000, alert("W001", "decode-0"))).actions == ()


def test_leaving_a_restart_that_boots_says_so(restarts: Restarts) -> None:
    notes: list[str] = []
    restarts.safe_at_once = True
    acting = make(restarts, notes)
    acting(frame(100, alert("W001")))
    acting.close(20)
    assert "goes on by itself, unproven" in notes[-1]


def test_notes_that_nobody_reads_do_not_end_the_waiting(restarts: Restarts) -> None:
    def note(text: str) -> None:
        raise BrokenPipeError(text)

    acting = ActingThread(ActingSettings("restart-writer-side"), restarts, note=note)
    acting(frame(100, alert("W001")))
    threading.Timer(0.3, restarts.go_on.set).start()
    acting.close(20)
    assert restarts.go_on.is_set()


def test_leaving_begins_no_other_part() -> None:
    progress = Progress()
    assert progress.go_on()
    progress.safe()
    assert progress.go_on()
    assert not progress.wait_safe(0.01), "its second part is not safe yet"
    progress.safe()
    assert progress.wait_safe(0.01)
    assert not progress.go_on()
    assert progress.wait_safe(0.01)


def test_leaving_when_nothing_is_done_says_nothing(restarts: Restarts) -> None:
    notes: list[str] = []
    make(restarts, notes).close()
    assert notes == []
