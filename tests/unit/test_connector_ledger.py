"""The transfer ledger: what it allows, what it counts, and that it stays small and consistent under threads."""

from __future__ import annotations

import json
import logging
import threading
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pdctl_connector.ledger import ALLOWED, FIRST_STAGES, OUTCOMES, REASON_LIMIT, STAGES, Ledger


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def observed() -> list[tuple[str, str, float]]:
    return []


@pytest.fixture
def ledger(clock: Clock, observed: list[tuple[str, str, float]]) -> Ledger:
    return Ledger(
        inflight_limit=5,
        recent_limit=3,
        observer=lambda side, stage, seconds: observed.append((side, stage, seconds)),
        clock=clock,
        wall_clock=lambda: 1_800_000_000.0,
    )


PATHS = [
    ("decode", ["allocated", "registered", "received"]),
    ("decode", ["allocated", "registered", "failed"]),
    ("decode", ["allocated", "registered", "timed_out"]),
    ("decode", ["allocated", "registered", "aborted"]),
    ("decode", ["allocated", "failed"]),
    ("decode", ["allocated", "timed_out"]),
    ("decode", ["allocated", "aborted"]),
    ("prefill", ["prefilling", "ready", "matched", "posted", "completed"]),
    ("prefill", ["ready", "matched", "posted", "failed"]),
    ("prefill", ["ready", "matched", "completed"]),
    ("prefill", ["prefilling", "ready", "expired"]),
    ("prefill", ["prefilling", "cancelled"]),
]


@pytest.mark.parametrize(("side", "path"), PATHS, ids=[" ".join(path) for _, path in PATHS])
def test_a_legal_path(ledger: Ledger, clock: Clock, observed: list[Any], side: Any, path: list[Any]) -> None:
    assert ledger.open(side, "key", 0, path[0], request_id="r-1", tokens=9) == "moved"
    for step, stage in enumerate(path[1:], start=1):
        clock.now += step
        assert ledger.advance(side, "key", 0, stage, reason="because") == "moved"
    assert ledger.inflight() == []
    (record,) = ledger.recent()
    assert record["outcome"] == path[-1]
    assert record["reason"] == "because"
    assert list(record["stages"]) == path
    # The n-th stage was left n seconds after it was entered.
    assert record["stages"] == {name: step * (step + 1) / 2 for step, name in enumerate(path)}
    assert observed == [(side, name, step + 1.0) for step, name in enumerate(path[:-1])]
    assert ledger.counts().outcomes[side, path[-1]] == 1
    assert ledger.stage(side, "key", 0) == path[-1]


@pytest.mark.parametrize(
    ("side", "path", "then"),
    [
        ("decode", ["allocated"], "received"),
        ("decode", ["allocated", "registered"], "allocated"),
        ("decode", ["allocated"], "posted"),
        ("decode", ["allocated"], "expired"),
        ("prefill", ["prefilling"], "posted"),
        ("prefill", ["prefilling"], "completed"),
        ("prefill", ["prefilling", "ready", "matched", "posted"], "expired"),  # a lease never ends a posted WRITE
        ("prefill", ["prefilling"], "received"),
        ("prefill", ["prefilling"], "no-such-stage"),
        ("decode", ["allocated", "registered", "received"], "failed"),  # ended is ended
    ],
)
def test_an_illegal_move_changes_nothing_but_its_counter(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, side: Any, path: list[Any], then: Any
) -> None:
    ledger.open(side, "key", 0, path[0])
    for stage in path[1:]:
        ledger.advance(side, "key", 0, stage)
    before = ledger.inflight(), ledger.recent(), ledger.counts()._replace(illegal={})
    for _ in range(3):
        assert ledger.advance(side, "key", 0, then, reason="late") == "illegal"
    assert (ledger.inflight(), ledger.recent(), ledger.counts()._replace(illegal={})) == before
    assert sum(ledger.counts().illegal.values()) == 3
    assert len(caplog.records) == 1  # once per kind of move, not per move
    assert caplog.records[0].levelno == logging.WARNING


def test_names_that_do_not_exist_cannot_fill_the_counters(ledger: Ledger) -> None:
    ledger.open("decode", "key", 0, "allocated")
    for number in range(100):
        assert ledger.advance("decode", "key", 0, f"stage-{number}") == "illegal"  # type: ignore[arg-type]
        assert ledger.open(f"side-{number}", "key", 0, "allocated") == "illegal"  # type: ignore[arg-type]
        assert ledger.advance(f"side-{number}", "key", 0, "ready") == "unknown"  # type: ignore[arg-type]
    assert len(ledger.counts().illegal) <= 2
    assert sum(ledger.counts().illegal.values()) == 200


@pytest.mark.parametrize(("side", "stage"), [("decode", "registered"), ("prefill", "matched"), ("decode", "ready")])
def test_a_record_cannot_begin_in_the_middle(ledger: Ledger, side: Any, stage: Any) -> None:
    assert ledger.open(side, "key", 0, stage) == "illegal"
    assert ledger.inflight() == []


def test_repeating_is_harmless(ledger: Ledger, clock: Clock) -> None:
    ledger.open("decode", "key", 0, "allocated")
    ledger.advance("decode", "key", 0, "registered")
    before = ledger.inflight()
    assert ledger.open("decode", "key", 0, "allocated") == "repeated"
    assert ledger.advance("decode", "key", 0, "registered") == "repeated"
    assert ledger.inflight() == before
    ledger.advance("decode", "key", 0, "received")
    assert ledger.advance("decode", "key", 0, "received") == "repeated"
    assert ledger.counts().repeated == 3
    assert ledger.counts().outcomes["decode", "received"] == 1


def test_attempts_and_sides_are_apart(ledger: Ledger) -> None:
    ledger.open("decode", "key", 0, "allocated")
    ledger.open("decode", "key", 1, "allocated")
    ledger.open("prefill", "key", 0, "prefilling")
    ledger.advance("decode", "key", 0, "aborted")
    assert ledger.stage("decode", "key", 0) == "aborted"
    assert ledger.stage("decode", "key", 1) == "allocated"
    assert ledger.stage("prefill", "key", 0) == "prefilling"
    assert [record["attempt"] for record in ledger.inflight(side="decode")] == [1]
    assert [record["side"] for record in ledger.inflight(side="prefill")] == ["prefill"]


def test_a_key_may_come_again_after_it_ended(ledger: Ledger) -> None:
    for outcome in ("failed", "received"):
        assert ledger.open("decode", "key", 0, "allocated") == "moved"
        ledger.advance("decode", "key", 0, "registered")
        ledger.advance("decode", "key", 0, outcome)  # type: ignore[arg-type]
    assert [record["outcome"] for record in ledger.recent()] == ["received", "failed"]
    # When the older one leaves the ring, the newer one is still found.
    for number in range(2):
        ledger.open("decode", f"other-{number}", 0, "allocated")
        ledger.advance("decode", f"other-{number}", 0, "aborted")
    assert ledger.stage("decode", "key", 0) == "received"


def test_both_tables_are_bounded(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    verdicts = [ledger.open("decode", f"key-{number}", 0, "allocated") for number in range(8)]
    assert verdicts == ["moved"] * 5 + ["full"] * 3
    assert ledger.counts().full == 3
    assert len(caplog.records) == 1
    assert ledger.advance("decode", "key-7", 0, "registered") == "unknown"
    for number in range(5):
        ledger.advance("decode", f"key-{number}", 0, "aborted")
    assert [record["key"] for record in ledger.recent()] == ["key-4", "key-3", "key-2"]
    assert ledger.stage("decode", "key-0", 0) is None
    assert ledger.counts().outcomes["decode", "aborted"] == 5
    assert ledger.open("decode", "key-9", 0, "allocated") == "moved"


def test_counts_and_ages(ledger: Ledger, clock: Clock) -> None:
    ledger.open("prefill", "old", 0, "ready")
    clock.now += 4
    ledger.open("prefill", "young", 0, "ready")
    clock.now += 1
    counts = ledger.counts()
    assert counts.inflight["prefill", "ready"] == 2
    assert counts.inflight["prefill", "posted"] == 0
    assert counts.oldest_s["prefill", "ready"] == 5
    assert counts.oldest_s["prefill", "posted"] == 0
    ledger.advance("prefill", "old", 0, "matched")
    assert ledger.counts().oldest_s["prefill", "ready"] == 1
    assert ledger.counts().oldest_s["prefill", "matched"] == 0
    clock.now += 2
    old, young = ledger.inflight()
    assert (old["age_s"], old["stage_age_s"]) == (7, 2)
    assert (young["age_s"], young["stage_age_s"]) == (3, 3)
    assert ledger.inflight(limit=1) == [old]


def test_notes_add_up_and_the_record_is_json(ledger: Ledger) -> None:
    ledger.open("prefill", "key", 2, "prefilling", request_id="r-1", tokens=33)
    ledger.note("prefill", "key", 2, blocks=2, descriptors=8, bytes=4096)
    ledger.note("prefill", "key", 2, blocks=1, descriptors=4, bytes=2048, writers=2)
    ledger.advance("prefill", "key", 2, "ready", peer="engine-d")
    assert ledger.note("prefill", "key", 3, blocks=1) == "unknown"
    (record,) = json.loads(json.dumps(ledger.inflight()))
    assert record == {
        "side": "prefill",
        "key": "key",
        "attempt": 2,
        "stage": "ready",
        "outcome": None,
        "reason": "",
        "request_id": "r-1",
        "peer": "engine-d",
        "started_unix": 1_800_000_000.0,
        "age_s": 0.0,
        "stage_age_s": 0.0,
        "stages": {"prefilling": 0.0, "ready": 0.0},
        "tokens": 33,
        "blocks": 3,
        "descriptors": 12,
        "bytes": 6144,
        "writers": 2,
    }


def test_a_reason_is_cut(ledger: Ledger) -> None:
    ledger.open("decode", "key", 0, "allocated")
    ledger.advance("decode", "key", 0, "failed", reason="x" * 10_000)
    assert len(ledger.recent()[0]["reason"]) == REASON_LIMIT


def test_an_observer_that_raises_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    def observer(side: str, stage: str, seconds: float) -> None:
        raise RuntimeError("no histogram")

    ledger = Ledger(observer=observer)
    ledger.open("decode", "key", 0, "allocated")
    assert ledger.advance("decode", "key", 0, "registered") == "moved"
    assert ledger.advance("decode", "key", 0, "received") == "moved"
    assert ledger.counts().observer_errors == 2
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_an_observer_may_ask_the_ledger() -> None:
    seen: list[int] = []
    ledger = Ledger(observer=lambda *_: seen.append(ledger.counts().inflight["decode", "registered"]))
    ledger.open("decode", "key", 0, "allocated")
    ledger.advance("decode", "key", 0, "registered")
    assert seen == [1]


@pytest.mark.slow
def test_ten_thousand_in_flight_take_less_than_20_mb() -> None:
    ledger = Ledger(inflight_limit=10_000)
    tracemalloc.start()
    try:
        for number in range(10_000):
            # As long as the ids that vllm-router makes.
            key = f"cmpl-___prefill_addr_10.0.0.1:8000___decode_addr_10.0.0.2:8000_{number:032x}-0"
            ledger.open("prefill", key, 0, "prefilling", request_id=f"{key}-0123abcd", peer=f"{number:032x}")
            for stage in STAGES["prefill"][1:]:
                assert ledger.advance("prefill", key, 0, stage) == "moved"
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ledger.inflight()) == 10_000
    assert size < 20_000_000


def test_threads_do_not_lose_or_tear_records() -> None:
    stages: Counter[tuple[str, str]] = Counter()
    stages_lock = threading.Lock()

    def observer(side: str, stage: str, seconds: float) -> None:
        assert seconds >= 0
        with stages_lock:
            stages[side, stage] += 1

    ledger = Ledger(inflight_limit=100, recent_limit=50, observer=observer)
    errors: list[BaseException] = []
    stop = threading.Event()

    def work(number: int) -> None:
        try:
            for round_ in range(200):
                key = f"{number}-{round_}"
                assert ledger.open("prefill", key, 0, "prefilling") == "moved"
                for stage in ("ready", "matched", "posted", "completed"):
                    assert ledger.advance("prefill", key, 0, stage) == "moved"  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    def watch() -> None:
        try:
            while not stop.is_set():
                for record in ledger.inflight() + ledger.recent():
                    # Every record is seen whole: it has the time of the place it is at.
                    assert (record["outcome"] or record["stage"]) == list(record["stages"])[-1]
                assert sum(ledger.counts().inflight.values()) <= 4
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (*workers, watcher):
        thread.start()
    for thread in workers:
        thread.join(timeout=60)
    stop.set()
    watcher.join(timeout=60)
    assert errors == []
    assert not any(thread.is_alive() for thread in (*workers, watcher))
    assert ledger.counts().outcomes["prefill", "completed"] == 800
    assert stages == {("prefill", stage): 800 for stage in STAGES["prefill"]}
    assert len(ledger.recent()) == 50


SIDES = st.sampled_from(["decode", "prefill"])
KEYS = st.sampled_from(["a", "b", "c"])
ATTEMPTS = st.integers(0, 1)
NAMES = st.sampled_from(sorted({name for side in STAGES for name in (*STAGES[side], *OUTCOMES[side])} | {"nonsense"}))


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of calls, against a model of plain dicts."""

    INFLIGHT, RECENT = 4, 3

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.observed: list[tuple[str, str, float]] = []
        self.ledger = Ledger(
            inflight_limit=self.INFLIGHT,
            recent_limit=self.RECENT,
            observer=lambda *times: self.observed.append(times),
            clock=self.clock,
        )
        self.inflight: dict[tuple[str, str, int], list[tuple[str, float]]] = {}
        self.recent: list[tuple[tuple[str, str, int], list[tuple[str, float]]]] = []
        self.ended: Counter[tuple[str, str]] = Counter()
        self.verdicts: Counter[str] = Counter()
        self.left: list[tuple[str, str, float]] = []

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(side=SIDES, key=KEYS, attempt=ATTEMPTS, stage=NAMES)
    def open(self, side: Any, key: str, attempt: int, stage: Any) -> None:
        identity = (side, key, attempt)
        if identity in self.inflight:
            expected = "repeated"
        elif stage not in FIRST_STAGES[side]:
            expected = "illegal"
        elif len(self.inflight) == self.INFLIGHT:
            expected = "full"
        else:
            expected = "moved"
            self.inflight[identity] = [(stage, self.clock.now)]
        self.verdicts[expected] += 1
        assert self.ledger.open(side, key, attempt, stage) == expected

    @rule(side=SIDES, key=KEYS, attempt=ATTEMPTS, stage=NAMES)
    def advance(self, side: Any, key: str, attempt: int, stage: Any) -> None:
        identity = (side, key, attempt)
        path = self.inflight.get(identity)
        if path is None:
            outcomes = [path[-1][0] for ended, path in self.recent if ended == identity]
            expected = "unknown" if not outcomes else "repeated" if outcomes[-1] == stage else "illegal"
        elif path[-1][0] == stage:
            expected = "repeated"
        elif stage in ALLOWED[side, path[-1][0]]:  # type: ignore[index]
            expected = "moved"
            self.left.append((side, path[-1][0], self.clock.now - path[-1][1]))
            path.append((stage, self.clock.now))
            if stage in OUTCOMES[side]:
                self.recent = [*self.recent, (identity, self.inflight.pop(identity))][-self.RECENT :]
                self.ended[side, stage] += 1
        else:
            expected = "illegal"
        self.verdicts[expected] += 1
        assert self.ledger.advance(side, key, attempt, stage) == expected

    @precondition(lambda self: self.inflight)
    @rule(data=st.data())
    def advance_as_allowed(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(sorted(self.inflight)))
        at = (identity[0], self.inflight[identity][-1][0])
        self.advance(*identity, stage=data.draw(st.sampled_from(sorted(ALLOWED[at]))))  # type: ignore[index]

    @invariant()
    def records_are_those_of_the_model(self) -> None:
        shown = {(r["side"], r["key"], r["attempt"]): list(r["stages"]) for r in self.ledger.inflight()}
        assert shown == {identity: [name for name, _ in path] for identity, path in self.inflight.items()}
        recent = [((r["side"], r["key"], r["attempt"]), list(r["stages"])) for r in self.ledger.recent()]
        assert recent == [(identity, [name for name, _ in path]) for identity, path in reversed(self.recent)]

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        counts = self.ledger.counts()
        at = Counter((side, path[-1][0]) for (side, _, _), path in self.inflight.items())
        assert {place: count for place, count in counts.inflight.items() if count} == at
        assert {place: count for place, count in counts.outcomes.items() if count} == self.ended
        for place, oldest in counts.oldest_s.items():
            entered = [path[-1][1] for (side, _, _), path in self.inflight.items() if (side, path[-1][0]) == place]
            assert oldest == (self.clock.now - min(entered) if entered else 0)
        assert (counts.repeated, counts.unknown, counts.full, sum(counts.illegal.values())) == tuple(
            self.verdicts[verdict] for verdict in ("repeated", "unknown", "full", "illegal")
        )
        assert self.observed == self.left


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
