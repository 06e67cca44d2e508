"""The lock around NIXL: one call at a time, seen from outside, with our messages on our WRITEs."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from pdctl_connector import descriptor_sizes
from pdctl_connector.nixl_guard import NixlGuard


class Agent:
    """Records what is called, and how many calls ran at once."""

    name = "agent-7"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.running = 0
        self.most = 0
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.next_handle = 0

    def slow(self) -> str:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.002)
        self.running -= 1
        return "done"

    def stuck(self) -> None:
        self.entered.set()
        assert self.go_on.wait(10)

    def nested(self, guard: Any) -> Any:
        return guard.slow(), guard.operation

    def fail(self) -> None:
        raise KeyError("of NIXL")

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> int:
        self.calls.append(("make", args, kwargs))
        self.next_handle += 1
        return self.next_handle

    def transfer(self, handle: int) -> str:
        if handle == 2:
            raise RuntimeError("not posted")
        return "PROC"

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        return ("nixl list", len(descs))

    def prep_xfer_dlist(self, name: str, descs: Any, mem_type: str | None = None) -> str:
        self.calls.append(("prep", (name, descs), {}))
        return f"list {len(self.calls)}"

    def release_dlist_handle(self, handle: Any) -> None:
        raise RuntimeError("not found")

    remove_remote_agent = release_dlist_handle


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def guard(agent: Agent) -> Any:
    return NixlGuard(agent)


def test_one_call_at_a_time(agent: Agent, guard: Any) -> None:
    threads = [threading.Thread(target=lambda: [guard.slow() for _ in range(5)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert agent.most == 1
    assert guard.operation is None


def test_the_running_operation_is_seen_from_another_thread(agent: Agent, guard: Any) -> None:
    thread = threading.Thread(target=guard.stuck)
    begun = time.monotonic()
    thread.start()
    assert agent.entered.wait(10)
    name, since = guard.operation
    assert name == "stuck"
    assert begun <= since <= time.monotonic()
    agent.go_on.set()
    thread.join(10)
    assert guard.operation is None


def test_a_call_inside_a_call_is_allowed_and_shown(agent: Agent, guard: Any) -> None:
    result, operation = guard.nested(guard)
    assert result == "done"
    assert operation[0] == "nested"
    assert guard.operation is None


def test_what_the_agent_raises_is_raised_and_the_lock_is_free_again(guard: Any) -> None:
    for _ in range(2):
        with pytest.raises(KeyError, match="of NIXL"):
            guard.fail()
    assert guard.operation is None
    assert guard.slow() == "done"


def test_attributes_pass_through(agent: Agent, guard: Any) -> None:
    assert guard.name == "agent-7"
    assert guard.agent is agent
    agent.name = "renamed"
    assert guard.name == "renamed"
    with pytest.raises(AttributeError):
        guard.no_such_method()
    with pytest.raises(AttributeError):
        guard.__no_such_protocol__()


def test_a_guard_without_its_agent_does_not_recurse() -> None:
    with pytest.raises(AttributeError):
        getattr(NixlGuard.__new__(NixlGuard), "check_xfer_state")  # noqa: B009


def test_a_fault_gets_the_operation_and_may_answer_for_it(agent: Agent) -> None:
    seen: list[tuple[str, tuple[Any, ...]]] = []

    def fault(name: str, args: tuple[Any, ...], run: Any) -> Any:
        seen.append((name, args))
        return ["instead", run()]

    guard: Any = NixlGuard(agent, fault=fault)
    assert guard.slow() == ["instead", "done"]
    assert guard.make_prepped_xfer("WRITE", "l", [1], "r", [2]) == ["instead", 1]
    assert seen == [("slow", ()), ("make_prepped_xfer", ("WRITE", "l", [1], "r", [2]))]


# --- messages ---------------------------------------------------------------------------------------------------------


def test_our_message_replaces_upstreams_inside_and_only_there(agent: Agent, guard: Any) -> None:
    guard.make_prepped_xfer("WRITE", "l", [0], "r", [0], notif_msg=b"theirs")
    with guard.message(lambda size: b"ours %d" % size):
        guard.make_prepped_xfer("WRITE", "l", [0], "r", [0], notif_msg=b"theirs")
    guard.make_prepped_xfer("WRITE", "l", [0], "r", [0], notif_msg=b"theirs")
    assert [kwargs["notif_msg"] for _, _, kwargs in agent.calls] == [b"theirs", b"ours 0", b"theirs"]


def test_our_message_is_that_threads_alone(agent: Agent, guard: Any) -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        assert inside.wait(10)
        guard.make_prepped_xfer("WRITE", "l", [1, 2], "r", [1, 2], notif_msg=b"theirs")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with guard.message(lambda size: b"ours") as made:
        inside.set()
        assert done.wait(10)
    thread.join(10)
    assert made == []
    assert agent.calls[0][2]["notif_msg"] == b"theirs"


def test_writes_made_inside_are_known_even_after_an_exception(guard: Any) -> None:
    def fail_at_the_second(made: list[Any]) -> None:
        for numbers in ([1, 2, 3], [4]):
            guard.transfer(guard.make_prepped_xfer("WRITE", "l", numbers, "r", numbers))

    with guard.message(lambda size: b"") as made, pytest.raises(RuntimeError, match="not posted"):
        fail_at_the_second(made)
    assert [(write.handle, write.descriptors, write.posted) for write in made] == [(1, 3, True), (2, 1, False)]
    with guard.message(lambda size: b"") as later:
        pass
    assert later == []


# --- bytes ------------------------------------------------------------------------------------------------------------

ROWS = [(0, 100, 0), (100, 100, 0), (200, 30, 0), (230, 30, 0), (260, 100, 0)]
STRIDED = [(0, 100, 0, 128, 2), (500, 30, 0, 30, 2), (900, 100, 0, 100, 1)]


@pytest.mark.parametrize("array", [False, True], ids=["tuples", "numpy"])
@pytest.mark.parametrize("rows", [ROWS, STRIDED], ids=["plain", "strided"])
def test_bytes_of_descriptors(rows: list[tuple[int, ...]], array: bool) -> None:
    descriptors = np.array(rows, dtype=np.uint64) if array else rows
    runs = descriptor_sizes.runs_of(descriptors)
    assert runs == ((2, 100), (4, 30), (5, 100))
    for numbers, size in (([], 0), ([0], 100), ([4, 0, 2], 230), ([0, 1, 2, 3, 4], 360)):
        assert descriptor_sizes.total(runs, np.array(numbers, dtype=np.int64) if array else numbers) == size
    with pytest.raises(ValueError, match="beyond"):
        descriptor_sizes.total(runs, np.array([5]) if array else [5])


def test_equal_neighbours_are_one_run() -> None:
    assert descriptor_sizes.runs_of(np.array([(n * 64, 64, 0) for n in range(1000)])) == ((1000, 64),)
    assert descriptor_sizes.runs_of(np.array([(0, 64, 0, 64, 10), (9999, 64, 0, 64, 5)])) == ((15, 64),)
    assert descriptor_sizes.runs_of([]) == ()
    assert descriptor_sizes.total((), []) == 0


def prepare(guard: Any, name: str, *, rows: list[tuple[int, ...]], release: str) -> Any:
    if release == "0.32":
        return guard.prep_xfer_dlist(name, guard.get_xfer_descs(np.array(rows), "DRAM"))
    return guard.prep_xfer_dlist(name, np.array(rows), mem_type="DRAM")


@pytest.mark.parametrize(("release", "rows"), [("0.32", ROWS), ("0.33", STRIDED)])
def test_the_message_is_told_the_bytes_of_its_write(guard: Any, release: str, rows: list[tuple[int, ...]]) -> None:
    local = prepare(guard, "NIXL_INIT_AGENT", rows=rows, release=release)
    remote = prepare(guard, "peer", rows=[(0, 7, 0), (7, 7, 0)], release="0.32")
    with guard.message(lambda size: b"%d" % size) as made:
        guard.make_prepped_xfer("WRITE", local, np.array([0, 2]), remote, np.array([0, 1]))
        # Sizes that are not known, or do not fit, are no reason to fail a transfer.
        guard.make_prepped_xfer("WRITE", local, np.array([99]), remote, np.array([0]))
        guard.make_prepped_xfer("WRITE", remote, np.array([0]), local, np.array([0]))
    assert [write.bytes for write in made] == [130, 0, 0]
    assert [call[2]["notif_msg"] for call in guard.agent.calls if call[0] == "make"] == [b"130", b"0", b"0"]
    guard.release_dlist_handle(local)
    with guard.message(lambda size: b"%d" % size) as made:
        guard.make_prepped_xfer("WRITE", local, np.array([0]), remote, np.array([0]))
    assert made[0].bytes == 0


def test_a_descriptor_list_of_an_unknown_form_is_used_all_the_same(
    guard: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert guard.prep_xfer_dlist("NIXL_INIT_AGENT", object()) == "list 1"
    assert "bytes of transfers are unknown" in caplog.text


def test_releasing_what_is_gone_is_no_error(guard: Any) -> None:
    guard.release_dlist_handle("a list")
    guard.remove_remote_agent("a peer")
    assert guard.operation is None
