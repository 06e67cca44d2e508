"""The writer's thread: it beats, survives, wakes, postpones, hands out once, and ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pdctl_connector import wire
from pdctl_connector import writer as writer_module
from pdctl_connector.decode_side import Settled
from pdctl_connector.step import Ended, GivenUp, Peer, Prefilling, Ready, Receive, Step
from pdctl_connector.writer import Writer

PEER = Peer("P", "p", 1, 1)
DONE = wire.encode(wire.Done("k", 0, 0, 1, 1))
HEARTBEAT = wire.encode(wire.Heartbeat(["k"]))


class Side:
    """Both sides at once: notes what it is asked, and raises where the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.errors: dict[str, Exception] = {}
        self.in_flight = False
        self.expecting = False
        self.sent: list[str] = []
        self.settled: list[Settled] = []
        self.fenced: list[str] = []
        self.heard = threading.Event()

    def _note(self, name: str, argument: Any) -> None:
        self.calls.append((name, argument))
        if name != "tick":
            self.heard.set()
        if name in self.errors:
            raise self.errors[name]

    def named(self, *names: str) -> list[Any]:
        return [argument for name, argument in self.calls if name in names]

    def on_prefilling(self, event: Prefilling, now: float) -> None:
        self._note("prefilling", event.request_id)

    def on_ready(self, event: Ready, now: float) -> None:
        self._note("ready", event.request_id)

    def on_ended(self, event: Ended, now: float) -> None:
        self._note("ended", event.request_id)

    def on_receive(self, event: Receive, now: float) -> None:
        self._note("receive", event.request_id)

    def on_given_up(self, event: GivenUp, now: float) -> None:
        self._note("given_up", event.request_id)

    def on_waiting(self, waiting: dict[str, Peer]) -> None:
        self._note("waiting", waiting)

    def on_message(self, message: wire.Message, now: float) -> str:
        self._note("message", message)
        return "accepted"

    def tick(self, now: float) -> None:
        self._note("tick", now)

    def postpone(self, seconds: float) -> None:
        self._note("postpone", seconds)

    def shut_down(self, now: float) -> None:
        self._note("shut_down", now)

    def take_sent(self) -> list[str]:
        self._note("tick", "take")
        taken, self.sent = self.sent, []
        return taken

    def take_settled(self) -> list[Settled]:
        taken, self.settled = self.settled, []
        return taken

    def take_fenced(self) -> list[str]:
        taken, self.fenced = self.fenced, []
        return taken


class Link:
    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.errors: dict[str, Exception] = {}

    def notifications(self) -> list[bytes]:
        if "notifications" in self.errors:
            raise self.errors["notifications"]
        return self.batches.pop(0) if self.batches else []

    def housekeeping(self, now: float) -> None:
        if "housekeeping" in self.errors:
            raise self.errors["housekeeping"]


class Rig:
    def __init__(self) -> None:
        self.prefill, self.decode, self.link = Side(), Side(), Link()
        self.writer = Writer(self.prefill, self.decode, self.link)  # type: ignore[arg-type]

    def until(self, condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
        """Wait until it holds; fails when it never does."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.002)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.prefill.in_flight = False
    assert made.writer.stop(10)


def full_step() -> Step:
    return Step(
        prefilling=[Prefilling("P-new", "a", 1), Prefilling("P-short", "b", 1)],
        ready=[Ready("P-ready", "c", ([1],), 1, b"")],
        ended=[Ended("P-old", "a", "aborted"), Ended("P-short", "b", "aborted")],
        receive=[
            Receive("D-new", "a", 1, PEER, ([1],), (0,), 1, b""),
            Receive("D-short", "b", 0, PEER, ([2],), (0,), 1, b""),
        ],
        given_up=[GivenUp("D-old", "a", 0, PEER), GivenUp("D-short", "b", 0, PEER)],
        waiting={"w": PEER},
    )


def test_it_beats_while_idle(rig: Rig) -> None:
    """F19: a parked writer looked just like one that is stuck in NIXL."""
    assert not rig.writer.alive
    rig.writer.start()
    assert rig.writer.alive
    ages = []
    for _ in range(20):
        time.sleep(0.02)
        ages.append(rig.writer.beat_age_s)
    # The median: this machine may be busy with something else now and then.
    assert sorted(ages)[10] < 0.5
    assert rig.writer.loops > 2
    assert not rig.writer.busy


def test_it_does_not_spin_while_idle(rig: Rig) -> None:
    """F39: at most one round each 20 ms."""
    rig.writer.start()
    began, before = time.monotonic(), rig.writer.loops
    time.sleep(0.3)
    assert rig.writer.loops - before <= (time.monotonic() - began) / writer_module.IDLE_S + 2


@pytest.mark.parametrize(("state", "pause"), [("expecting", "EXPECTING_S"), ("in_flight", "IN_FLIGHT_S")])
def test_it_looks_more_often_when_something_is_expected(rig: Rig, state: str, pause: str) -> None:
    """F20: the message of a WRITE leaves when we poll."""
    setattr(rig.prefill, state, True)
    rig.writer.start()
    rig.until(lambda: rig.writer.loops > 100)
    began, before = time.monotonic(), rig.writer.loops
    time.sleep(0.1)
    assert rig.writer.loops - before <= (time.monotonic() - began) / getattr(writer_module, pause) + 2
    if state == "in_flight":
        assert rig.writer.busy


def test_a_stuck_call_shows_in_the_age_of_the_beat(rig: Rig) -> None:
    """F19, W002."""
    release = threading.Event()
    rig.link.housekeeping = lambda now: release.wait(10)  # type: ignore[method-assign, assignment, return-value]
    rig.writer.start()
    rig.until(lambda: rig.writer.beat_age_s > 0.1)
    assert rig.writer.alive
    release.set()
    rig.until(lambda: rig.writer.loops > 3)


def test_work_wakes_it_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "IDLE_S", 60.0)
    rig.writer.start()
    rig.until(lambda: rig.writer.loops == 1)
    for number in range(3):
        rig.prefill.heard.clear()
        rig.writer.hand_over(Step(ready=[Ready(f"P{number}", "k", ([1],), 1, b"")]))
        assert rig.prefill.heard.wait(10)
    assert rig.prefill.named("ready") == ["P0", "P1", "P2"]


def test_the_order_within_a_step(rig: Rig) -> None:
    """F12: what ended makes room for the next try of its key, in the same step; what came and went begins first."""
    rig.writer.hand_over(full_step())
    rig.writer.round(1.0)
    taken = [call for call in rig.prefill.calls if call[0] != "tick"]
    assert taken == [
        ("ended", "P-old"),
        ("prefilling", "P-new"),
        ("prefilling", "P-short"),
        ("ended", "P-short"),
        ("ready", "P-ready"),
    ]
    taken = [call for call in rig.decode.calls if call[0] != "tick"]
    assert taken == [
        ("given_up", "D-old"),
        ("receive", "D-new"),
        ("receive", "D-short"),
        ("given_up", "D-short"),
        ("waiting", {"w": PEER}),
    ]


def test_messages_come_before_deadlines(rig: Rig) -> None:
    """F45."""
    rig.link.batches = [[DONE, HEARTBEAT]]
    rig.writer.round(1.0)
    assert [name for name, _ in rig.decode.calls][:2] == ["message", "tick"]
    assert [name for name, _ in rig.prefill.calls][:2] == ["message", "tick"]


PARTS = [
    ("prefill", "prefilling"),
    ("prefill", "ready"),
    ("prefill", "ended"),
    ("prefill", "message"),
    ("prefill", "tick"),
    ("decode", "receive"),
    ("decode", "given_up"),
    ("decode", "waiting"),
    ("decode", "message"),
    ("decode", "tick"),
    ("link", "notifications"),
    ("link", "housekeeping"),
]


@pytest.mark.parametrize(("owner", "part"), PARTS)
def test_an_exception_in_any_part_is_survived(
    rig: Rig, owner: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F17, F18: counted, logged once with its traceback; everything else of the round is done, and the loop goes on."""
    getattr(rig, owner).errors[part] = KeyError("simulated")
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            rig.link.batches = [[DONE, HEARTBEAT]]
            rig.writer.hand_over(full_step())
            assert rig.writer.round(1.0 + number)
    assert rig.writer.errors >= 3
    assert "simulated" in str(rig.writer.last_error)
    logged = [record for record in caplog.records if record.exc_info]
    assert 1 <= len(logged) <= 2, "once, or once for each of the two things that a side's error spoils"
    assert rig.prefill.named("ready") == ["P-ready"] * 3
    assert rig.decode.named("receive") == ["D-new", "D-short"] * 3
    if part != "notifications":
        assert len(rig.decode.named("message")) == len(rig.prefill.named("message")) == 3
    assert len([now for now in rig.decode.named("tick") if now != "take"]) == 3
    getattr(rig, owner).errors.clear()
    rig.writer.start()
    before = rig.writer.errors
    rig.until(lambda: rig.writer.loops > 3)
    assert rig.writer.errors == before


def test_another_kind_of_error_is_logged_too(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for error in (KeyError("a"), KeyError("b"), ValueError("c"), KeyError("d")):
            rig.link.errors["housekeeping"] = error
            rig.writer.round(1.0)
    assert len(caplog.records) == 2
    assert rig.writer.errors == 4


def test_a_bad_notification_does_not_lose_its_siblings(rig: Rig) -> None:
    """F17: the queue of NIXL is emptied by reading it."""
    bad = wire.PREFIX + bytes((wire.WIRE_VERSION,)) + b"D\xc1"  # a byte that msgpack never uses
    newer = wire.PREFIX + bytes((wire.WIRE_VERSION + 1,)) + b"D"
    rig.link.batches = [[bad, DONE, b"HEARTBEAT:upstream", HEARTBEAT, newer, b"", DONE]]
    rig.decode.errors["message"] = KeyError("a bug")
    rig.writer.round(1.0)
    assert len(rig.decode.named("message")) == 2
    assert len(rig.prefill.named("message")) == 1
    assert rig.writer.errors == 2
    assert rig.writer.outcomes() == {
        ("DONE", "malformed"): 1,
        ("?", "foreign"): 2,
        ("?", "version"): 1,
        ("HB", "accepted"): 1,
    }


def test_each_message_goes_to_its_side(rig: Rig) -> None:
    to_prefill = [
        wire.Register("k", 0, "D", "r", "d", 1, 1, 0, [[1]], [0], 1, b""),
        wire.RegisterZero("k", 0, "D", "r"),
        wire.Cancel("k", 0, "D", "d", 1, 1),
        wire.Heartbeat(["k"]),
    ]
    to_decode = [
        wire.Done("k", 0, 0, 1, 1),
        wire.Failed("k", 0, 0, 1, "aborted"),
        wire.CancelAck("k", 0, 0, 1, "cancelled"),
        wire.Alive("k", 0, "ready"),
    ]
    rig.link.batches = [[wire.encode(message) for message in (*to_decode, *to_prefill)]]
    rig.writer.round(1.0)
    assert rig.prefill.named("message") == to_prefill
    assert rig.decode.named("message") == to_decode


def test_results_are_taken_once(rig: Rig) -> None:
    assert rig.writer.take() == ([], [], [])
    done = Settled("D1", ok=True, fenced=True)
    rig.prefill.sent, rig.decode.settled, rig.decode.fenced = ["P1"], [done], ["D0"]
    rig.writer.round(1.0)
    rig.prefill.sent = ["P2"]
    rig.writer.round(1.1)
    assert rig.writer.take() == (["P1", "P2"], [done], ["D0"])
    assert rig.writer.take() == ([], [], [])


def test_results_are_not_lost_between_threads(rig: Rig) -> None:
    total = 500
    numbers = iter(range(total))

    def sent() -> list[str]:
        number = next(numbers, None)
        return [] if number is None else [str(number)]

    rig.prefill.take_sent = sent  # type: ignore[method-assign]
    rig.prefill.in_flight = True
    rig.writer.start()
    taken: list[str] = []

    def all_taken() -> bool:
        taken.extend(rig.writer.take()[0])
        return len(taken) >= total

    rig.until(all_taken)
    assert taken == [str(number) for number in range(total)]


def test_a_process_that_was_stopped_postpones_deadlines(rig: Rig) -> None:
    """F45: before the messages are read and before any deadline is judged; a short pause does not count."""
    rig.writer.round(100.0)
    rig.writer.round(100.0 + writer_module.STOPPED_S)
    assert rig.prefill.named("postpone") == []
    for side in (rig.prefill, rig.decode):
        side.calls.clear()
    rig.link.batches = [[DONE, HEARTBEAT]]
    rig.prefill.errors["postpone"] = KeyError("even so, decode is told")
    rig.writer.round(150.0)
    for side in (rig.prefill, rig.decode):
        assert [name for name, _ in side.calls][:3] == ["postpone", "message", "tick"]
        assert side.named("postpone") == [50.0 - writer_module.STOPPED_S]
    rig.writer.round(150.1)
    assert len(rig.prefill.named("postpone")) == 1


def test_stop_tells_both_sides_and_drains(rig: Rig) -> None:
    """F42: WRITEs in flight are followed to their end, and what they free is still handed out."""
    rig.prefill.in_flight = True
    rig.writer.start()
    rig.until(lambda: rig.writer.loops > 1)
    assert not rig.writer.stop(0.1), "bounded, though the WRITE does not end"
    assert rig.writer.alive
    rig.until(lambda: rig.decode.named("shut_down") != [])
    rig.prefill.sent = ["P1"]
    rig.prefill.in_flight = False
    assert rig.writer.stop(10)
    assert not rig.writer.alive
    assert len(rig.prefill.named("shut_down")) == len(rig.decode.named("shut_down")) == 1
    assert rig.writer.take()[0] == ["P1"]
    assert rig.writer.stop(0.1), "again is fine"


def test_what_the_end_settles_is_handed_out(rig: Rig) -> None:
    def shut_down(now: float) -> None:
        rig.prefill.sent = ["P1"]

    rig.prefill.shut_down = shut_down  # type: ignore[method-assign]
    rig.writer.start()
    assert rig.writer.stop(10)
    assert rig.writer.take()[0] == ["P1"]


def test_stop_wakes_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "IDLE_S", 60.0)
    rig.writer.start()
    rig.until(lambda: rig.writer.loops == 1)
    assert rig.writer.stop(10)


def test_stop_before_start(rig: Rig) -> None:
    assert rig.writer.stop(1)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_error_at_the_end_does_not_keep_it_alive(rig: Rig, side: str) -> None:
    getattr(rig, side).errors["shut_down"] = KeyError("simulated")
    rig.writer.start()
    assert rig.writer.stop(10)
    assert rig.writer.errors == 1
    assert len(rig.decode.named("shut_down")) == len(rig.prefill.named("shut_down")) == 1
