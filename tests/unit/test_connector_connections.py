"""Connections to other engines: tries, pauses, replacement, and when an engine is certainly gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from pdctl_connector import connections
from pdctl_connector.connections import Address, Connections
from pdctl_connector.side_channel import Presence

A = Address("engine-a", "10.0.0.1", 5600, 1, 1, full=False)
A_FULL = dataclasses.replace(A, full=True)
# The same place after a restart.
B = dataclasses.replace(A, engine_id="engine-b")
C = dataclasses.replace(A, engine_id="engine-c", host="10.0.0.2")
PATIENCE_S = 30.0
UNUSED_S = 3600.0


class World:
    """Stands in for NIXL, for the other threads and for the two sides; work runs when the test says so."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.work: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.asked: list[Address] = []
        self.fails: Exception | None = None
        self.adopted: list[str] = []
        self.held: set[str] = set()
        self.in_use: set[str] = set()
        self.releasable = True
        self.answer: Presence = "same"
        self.looked = 0
        self.told: list[tuple[str, str]] = []
        self.connections = Connections(self, self, patience_s=PATIENCE_S, unused_s=UNUSED_S, clock=lambda: self.now)

    # As a transport.

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.work.append((work, future))
        return future

    def handshake(self, address: Address) -> str:
        self.asked.append(address)
        if self.fails is not None:
            raise self.fails
        return "agents"

    def adopt(self, engine_id: str, result: Any) -> None:
        assert result == "agents"
        assert engine_id not in self.held, "state of a former connection is still there"
        self.held.add(engine_id)

    def release(self, engine_id: str) -> bool:
        assert engine_id not in self.in_use
        if self.releasable:
            self.held.discard(engine_id)
        return self.releasable

    def busy(self) -> set[str]:
        return set(self.in_use)

    def presence(self, host: str, port: int, engine_id: str, timeout_s: float) -> Presence:
        self.looked += 1
        return self.answer

    # As a listener.

    def connected(self, engine_id: str) -> None:
        self.told.append(("connected", engine_id))

    def not_connected(self, engine_id: str, detail: str, now: float) -> None:
        self.told.append(("not connected", engine_id))

    def broke(self, engine_id: str, detail: str, now: float) -> None:
        self.told.append(("broke", engine_id))

    def replaced(self, engine_id: str, detail: str, now: float) -> None:
        self.told.append(("replaced", engine_id))

    # For tests.

    @property
    def handshakes(self) -> int:
        """How many are under way."""
        return sum(getattr(work, "func", None) == self.handshake for work, _ in self.work)

    @property
    def looks(self) -> int:
        """How many looks at side channels are under way."""
        return len(self.work) - self.handshakes

    def run(self, seconds: float = 0.01) -> None:
        """The other threads do their work, then the writer takes it in."""
        work, self.work = self.work, []
        for function, future in work:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.connections.tick(self.now)

    def connect(self, address: Address = A) -> None:
        assert self.connections.state(address) == "connecting"
        self.run()
        assert self.connections.state(address) == "ready"


class RemoteDisconnect(Exception):
    pass


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_question_begins_one_handshake(world: World) -> None:
    for _ in range(3):
        assert world.connections.state(A) == "connecting"
    assert world.handshakes == 1
    world.run()
    assert world.connections.state(A) == "ready"
    assert world.asked == [A]
    assert world.told == [("connected", "engine-a")]
    assert world.held == {"engine-a"}


def test_failed_tries_pause_for_longer_and_longer_and_are_told(world: World) -> None:
    world.fails = TimeoutError("no answer")
    pauses = []
    for _ in range(8):
        assert world.connections.state(A) == "connecting"
        world.run()
        begun = world.now
        while world.connections.state(A) == "failed":
            world.wait(0.05)
        pauses.append(world.now - begun)
        world.run()
        while world.connections.state(A) == "failed":
            world.wait(0.05)
    assert pauses == sorted(pauses)
    assert pauses[0] < 1
    assert connections.BACKOFF_LAST_S - 1 < pauses[-1] < connections.BACKOFF_LAST_S + 1
    assert set(world.told) == {("not connected", "engine-a")}
    assert "TimeoutError: no answer" in world.connections.why("engine-a") or world.connections.state(A) == "connecting"


def test_a_try_after_the_pause_may_succeed_even_at_another_address(world: World) -> None:
    world.fails = TimeoutError("no answer")
    world.connections.state(A)
    world.run()
    assert world.connections.state(A) == "failed"
    assert world.connections.why("engine-a") == "TimeoutError: no answer"
    world.fails = None
    world.wait(connections.BACKOFF_FIRST_S)
    moved = dataclasses.replace(A, port=5700)
    assert world.connections.state(moved) == "connecting"
    world.run()
    assert world.connections.state(moved) == "ready"
    assert world.asked[-1] == moved


def test_why_without_any_try(world: World) -> None:
    assert world.connections.why("engine-x") == "never connected"


# --- breaking ---------------------------------------------------------------------------------------------------------


def test_a_broken_connection_counts_as_coming_back_and_is_made_anew(world: World) -> None:
    world.connect()
    world.connections.broke("engine-a", RemoteDisconnect("reset"))
    assert world.told[-1] == ("broke", "engine-a")
    assert world.connections.why("engine-a") == "RemoteDisconnect: reset"
    assert world.connections.state(A) == "connecting"
    assert not world.handshakes, "not before its pause"
    world.wait(connections.BACKOFF_FIRST_S)
    assert world.held == set()
    assert world.connections.state(A) == "connecting"
    world.run()
    assert world.connections.state(A) == "ready"


def test_it_is_told_once_that_a_connection_broke(world: World) -> None:
    world.connect()
    for _ in range(3):
        world.connections.broke("engine-a", RemoteDisconnect())
    world.connections.broke("engine-x", RemoteDisconnect())
    assert world.told.count(("broke", "engine-a")) == 1


def test_nothing_is_released_while_a_write_is_in_flight(world: World) -> None:
    world.connect(A_FULL)
    world.in_use = {"engine-a"}
    world.connections.broke("engine-a", RemoteDisconnect())
    world.wait(5)
    assert world.connections.state(A_FULL) == "connecting"
    assert world.held == {"engine-a"}
    assert not world.handshakes
    world.in_use = set()
    world.wait(0.01)
    assert world.held == set()
    assert world.connections.state(A_FULL) == "connecting"
    assert world.handshakes == 1


def test_a_release_that_cannot_be_done_now_is_tried_again(world: World) -> None:
    world.connect()
    world.releasable = False
    world.connections.broke("engine-a", RemoteDisconnect())
    world.wait(1)
    assert world.connections.state(A) == "connecting"
    assert not world.handshakes
    world.releasable = True
    assert world.connections.state(A) == "connecting"
    assert world.handshakes == 1


def test_patience_with_a_broken_connection_ends(world: World) -> None:
    world.connect()
    world.in_use = {"engine-a"}
    world.connections.broke("engine-a", RemoteDisconnect())
    world.wait(PATIENCE_S - 1)
    assert world.connections.state(A) == "connecting"
    world.wait(2)
    assert world.connections.state(A) == "failed"
    world.in_use = set()
    assert world.connections.state(A) == "failed", "while the try is under way"
    world.run()
    assert world.connections.state(A) == "ready"


def test_requests_for_a_process_that_ended_do_not_wait_for_a_handshake(world: World) -> None:
    world.connect()
    world.answer = "refused"
    world.connections.broke("engine-a", RemoteDisconnect("reset"))
    assert world.looks == 1
    world.run(0.001)
    for _ in range(20):
        assert world.connections.state(A) == "failed"
        world.wait(0.3)
    # It came back, as the same engine.
    world.answer = "same"
    deadline = world.now + 2 * connections.BACKOFF_LAST_S
    while world.connections.state(A) != "ready":
        world.run(0.1)
        assert world.now < deadline


def test_a_flapping_connection_pauses_longer_and_a_healthy_one_starts_afresh(world: World) -> None:
    def pause_after_breaking() -> float:
        world.connections.broke("engine-a", RemoteDisconnect())
        begun = world.now
        while not world.handshakes:
            world.connections.state(A)
            world.wait(0.05)
        world.run()
        assert world.connections.state(A) == "ready"
        return world.now - begun

    world.connect()
    first, second = pause_after_breaking(), pause_after_breaking()
    assert second > 1.5 * first
    world.wait(connections.HEALTHY_S + 1)
    assert pause_after_breaking() == pytest.approx(first, abs=0.2)


# --- two kinds --------------------------------------------------------------------------------------------------------


def test_a_connection_for_messages_is_made_anew_for_writes(world: World) -> None:
    world.connect(A)
    assert world.connections.state(A_FULL) == "connecting"
    world.run()
    assert world.connections.state(A_FULL) == "ready"
    assert world.connections.state(A) == "ready"
    assert [address.full for address in world.asked] == [False, True]


def test_a_connection_for_messages_in_use_is_never_taken_for_one_for_writes(world: World) -> None:
    world.connect(A)
    world.in_use = {"engine-a"}
    assert world.connections.state(A_FULL) == "connecting"
    assert world.connections.state(A) == "ready"
    world.in_use = set()
    assert world.connections.state(A_FULL) == "connecting"
    world.run()
    assert world.connections.state(A_FULL) == "ready"


# --- replaced and gone ------------------------------------------------------------------------------------------------


def test_another_engine_on_the_same_address_replaces_the_former(world: World) -> None:
    world.connect(A)
    world.connect(C)
    world.connect(B)
    assert world.told[-1] == ("replaced", "engine-a")
    assert world.connections.gone("engine-a")
    assert not world.connections.gone("engine-b")
    assert not world.connections.gone("engine-c")
    assert world.connections.state(A) == "failed"
    world.wait(0.01)
    assert world.held == {"engine-b", "engine-c"}


def test_an_engine_that_was_broken_before_it_was_replaced_is_gone(world: World) -> None:
    world.connect(A)
    world.connections.broke("engine-a", RemoteDisconnect())
    world.connect(B)
    assert world.connections.gone("engine-a")
    assert ("replaced", "engine-a") not in world.told, "it was told already that it broke"


def looks(world: World, engine_id: str = "engine-a") -> bool:
    """Ask until a look has been taken in."""
    before = world.looked
    for _ in range(10):
        if world.connections.gone(engine_id):
            return True
        world.run(connections.PROBE_S / 2)
        if world.looked > before and world.connections.gone(engine_id):
            return True
    return False


def test_a_closed_port_alone_is_no_proof(world: World) -> None:
    world.connect(A)
    world.answer = "refused"
    assert not looks(world)


def test_a_lost_connection_alone_is_no_proof(world: World) -> None:
    world.connect(A)
    for answer in ("same", "silent"):
        world.answer = answer
        world.connections.broke("engine-a", RemoteDisconnect())
        assert not looks(world)


def test_a_lost_connection_and_a_closed_port_together_are(world: World) -> None:
    world.connect(A)
    world.answer = "refused"
    world.connections.broke("engine-a", RemoteDisconnect())
    assert looks(world)


def test_that_stays_so_over_failed_tries(world: World) -> None:
    world.connect(A)
    world.connections.broke("engine-a", RemoteDisconnect())
    world.fails = TimeoutError()
    world.answer = "refused"
    for _ in range(5):
        world.connections.state(A)
        world.run(1)
    assert looks(world)


def test_a_look_from_before_the_loss_does_not_count(world: World) -> None:
    world.connect(A)
    world.answer = "refused"
    assert not looks(world)
    world.answer = "same"
    world.connections.broke("engine-a", RemoteDisconnect())
    assert not world.connections.gone("engine-a")


def test_a_connection_that_came_back_forgets_that_it_was_lost(world: World) -> None:
    world.connect(A)
    world.answer = "refused"
    world.connections.broke("engine-a", RemoteDisconnect())
    world.run(connections.BACKOFF_FIRST_S)
    assert world.connections.gone("engine-a")
    assert world.connections.state(A) == "failed"
    world.run()
    assert world.connections.state(A) == "ready"
    assert not world.connections.gone("engine-a")


def test_another_engine_found_by_looking_is_told(world: World) -> None:
    """A host that was switched off does not close its connections: NIXL sees nothing."""
    world.connect(A)
    world.answer = "replaced"
    assert looks(world)
    assert ("replaced", "engine-a") in world.told
    assert world.connections.state(A) == "failed"


def test_looking_is_bounded(world: World) -> None:
    world.connect(A)
    for _ in range(100):
        world.connections.gone("engine-a")
        world.run(0.1)
    assert world.looked <= 100 * 0.11 / connections.PROBE_S + 2


def test_one_look_at_a_time(world: World) -> None:
    world.connect(A)
    for _ in range(10):
        world.connections.gone("engine-a")
        world.wait(connections.PROBE_S + 1)
    assert world.looks == 1


def test_a_look_that_fails_proves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.connect(A)
    world.connections.broke("engine-a", RemoteDisconnect())

    def explode(*_: Any) -> Presence:
        raise OSError("too many open files")

    monkeypatch.setattr(world, "presence", explode)
    world.connections.gone("engine-a")
    world.run()
    assert not world.connections.gone("engine-a")
    monkeypatch.undo()
    world.answer = "refused"
    world.now += connections.PROBE_S
    assert looks(world)


def test_a_cancelled_look_or_handshake_is_a_failed_one(world: World) -> None:
    world.connections.state(C)
    world.work.pop()[1].cancel()
    world.wait(0.01)
    assert world.connections.state(C) == "failed"
    world.connect(A)
    world.connections.gone("engine-a")
    world.work.pop()[1].cancel()
    assert not world.connections.gone("engine-a")


def test_an_unknown_engine_is_not_gone(world: World) -> None:
    assert not world.connections.gone("engine-x")


# --- forgetting -------------------------------------------------------------------------------------------------------


def test_unused_connections_are_dropped_and_used_ones_kept(world: World) -> None:
    world.connect(A)
    world.connect(C)
    for _ in range(10):
        world.wait(UNUSED_S / 9)
        assert world.connections.state(C) == "ready"
    assert world.held == {"engine-c"}
    world.connect(A)


def test_an_unused_connection_with_something_in_flight_is_kept(world: World) -> None:
    world.connect(A)
    world.in_use = {"engine-a"}
    world.wait(2 * UNUSED_S)
    assert world.held == {"engine-a"}


def test_engines_without_a_connection_are_forgotten(world: World) -> None:
    world.fails = TimeoutError()
    for number in range(50):
        world.connections.state(dataclasses.replace(A, engine_id=f"engine-{number}"))
    world.run()
    assert world.connections.why("engine-7") == "TimeoutError: "
    world.wait(connections.FORGET_S + 1)
    assert world.connections.why("engine-7") == "never connected"


def test_a_replaced_engine_is_forgotten_and_leaves_nothing(world: World) -> None:
    for number in range(20):
        world.connect(dataclasses.replace(A, engine_id=f"engine-{number}"))
        world.wait(1)
    assert world.held == {"engine-19"}
    for _ in range(3):
        world.wait(connections.FORGET_S / 2)
        assert world.connections.state(dataclasses.replace(A, engine_id="engine-19")) == "ready"
    assert world.connections.why("engine-7") == "never connected"
