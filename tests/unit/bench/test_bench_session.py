"""A session over a stand-in cluster: the order of things, and what is kept when something goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from pdctl.bench.cell_watch import CellFacts
from pdctl.bench.results import (
    AnswerCheck,
    Cell,
    Difference,
    Environment,
    Mode,
    Results,
    Sample,
    Settings,
    StageTimes,
    Transfers,
)
from pdctl.bench.session import Session, duration_words
from pdctl.errors import PdctlError

SMALL, LARGE = Cell(512, 16, concurrency=1), Cell(2048, 16, concurrency=4)


def good(number: int) -> Sample:
    return Sample(100.0 + number, 0.1, 0.3, (0.1, 0.1), 512, 3)


@dataclass
class Stand:
    """Launcher, cluster, generator and watch in one; ``trouble`` is called before each load with its number."""

    trouble: Callable[[int], None] = lambda number: None
    sample: Callable[[int], Sample] = good
    after: Callable[[str], None] = lambda moment: None
    told: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    log: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    loads: int = 0

    @contextmanager
    def run_in(self, mode: Mode) -> Iterator[Stand]:
        self.log.append(f"launch {mode}")
        try:
            yield self
        finally:
            self.log.append(f"leave {mode}")

    def watch(self) -> Stand:
        return self

    def generator(self) -> Stand:
        return self

    def begin(self) -> None:
        self.log.append("begin")

    def end(self, samples: Sequence[Sample]) -> CellFacts:
        self.log.append(f"end {len(samples)}")
        self.after("end")
        return CellFacts(
            StageTimes({"rest": 0.1}, requests=len(samples)),
            Transfers(completed=len(samples)),
            self.told,
            bool(self.told),
        )

    def load(
        self,
        cell: Cell,
        *,
        requests: int,
        seed: int,
        measured: bool,
        keep: int,
        on_sample: Callable[[Sample], None],
    ) -> float:
        self.log.append(f"{'load' if measured else 'warm'} {cell.name} {requests} keep {keep}")
        self.seeds.append(seed)
        self.loads += 1
        for number in reversed(range(requests)):
            on_sample(self.sample(number))
            self.trouble(self.loads)
        return 2.0

    def answers(self, cell: Cell) -> AnswerCheck:
        self.log.append("answers")
        self.after("answers")
        return AnswerCheck(2, 2 - len(self.differences), different=self.differences)


class Quiet:
    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, text: str) -> None:
        self.said.append(text)

    def detail(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.said.append(text)

    def warning(self, text: str) -> None:
        self.said.append(f"warning: {text}")


def blank(settings: Settings) -> Results:
    return Results(1, "compare", "c", 1.0, "pdctl bench", settings, Environment("m", "cpu", "tcp", (), "0"))


def session(stand: Stand, settings: Settings, progress: Quiet | None = None) -> tuple[Session, list[Results]]:
    kept: list[Results] = []
    return Session(blank(settings), stand, kept.append, progress or Quiet()), kept


def test_modes_take_turns_and_all_is_kept() -> None:
    stand, progress = Stand(), Quiet()
    settings = Settings(("pull", "push"), (SMALL, LARGE), rounds=2, requests=10, warmup=3, answers=2)
    one, kept = session(stand, settings, progress)
    outcome = one.run()
    assert [line for line in stand.log if line.startswith(("launch", "leave"))] == [
        "launch pull", "leave pull", "launch push", "leave push", "launch pull", "leave pull",
    ]  # fmt: skip
    # Warm-up first, outside of what is watched; answers last.
    assert stand.log[1:6] == ["warm 512+16 x1 3 keep 0", "begin", "load 512+16 x1 5 keep 2", "end 5", "answers"]
    results = outcome.results
    assert results.complete
    assert not outcome.interrupted
    assert [(run.mode, run.round, run.cell) for run in results.runs] == [
        (mode, number, cell)
        for number, mode in ((1, "pull"), (1, "push"), (2, "push"), (2, "pull"))
        for cell in (SMALL, LARGE)
    ]
    assert [len(run.samples) for run in results.runs] == [5] * 8
    assert [sample.started_unix for sample in results.runs[0].samples] == [100, 101, 102, 103, 104]
    # After each cell, and at the end.
    assert [len(one.runs) for one in kept] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert not any(one.complete for one in kept[:-1])
    # The same prompts for both modes, and new ones in each round and cell.
    assert len(set(stand.seeds)) == 4
    assert any("about" in text and "left" in text for text in progress.said)


def test_an_interrupt_keeps_what_was_measured_and_lets_go_of_the_cluster() -> None:
    def trouble(load: int) -> None:
        if load == 3:
            raise KeyboardInterrupt

    stand = Stand(trouble)
    one, kept = session(stand, Settings(("push",), (SMALL, LARGE), requests=4, warmup=0, answers=0, rounds=2))
    outcome = one.run()
    assert outcome.interrupted
    assert stand.log[-1] == "leave push"
    assert [(run.round, len(run.samples), run.complete) for run in outcome.results.runs] == [
        (1, 2, True), (1, 2, True), (2, 1, False),
    ]  # fmt: skip
    assert outcome.results.incomplete_because == "interrupted"
    assert not outcome.results.complete
    assert kept[-1] == outcome.results


def test_an_interrupt_before_the_first_answer_keeps_no_empty_cell() -> None:
    stand = Stand(sample=lambda number: (_ for _ in ()).throw(KeyboardInterrupt))
    one, kept = session(stand, Settings(("push",), (SMALL,), warmup=0))
    assert one.run().results.runs == ()
    assert kept[-1].incomplete_because == "interrupted"


def test_a_generator_that_gives_up_ends_it_with_its_reason() -> None:
    def trouble(load: int) -> None:
        if load == 2:
            raise PdctlError("h1: nothing for 300 s\nmore", hint="look")

    one, _ = session(Stand(trouble), Settings(("push",), (SMALL, LARGE), requests=4, warmup=0))
    outcome = one.run()
    assert outcome.error is not None
    assert outcome.results.incomplete_because == "h1: nothing for 300 s"
    assert outcome.results.runs[-1].trouble == ("h1: nothing for 300 s",)
    assert not outcome.results.runs[-1].complete


def test_a_cell_of_which_most_requests_fail_ends_it() -> None:
    bad = replace(good(0), ttft_s=None, error="HTTP 500\nlong")
    stand = Stand(sample=lambda number: bad if number else good(number))
    one, kept = session(stand, Settings(("push",), (SMALL, LARGE), requests=4, warmup=0, answers=2))
    outcome = one.run()
    assert outcome.error is not None
    assert "3 of 4 requests failed (push, 512+16 x1, round 1); most often: HTTP 500" in outcome.error.message
    assert "answers" not in stand.log
    assert [len(run.samples) for run in kept[-1].runs] == [4]
    assert not kept[-1].runs[0].complete


@pytest.mark.parametrize("moment", ["end", "answers"])
@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), PdctlError("h1: the connection broke")])
def test_a_cell_whose_load_has_ended_is_kept_whatever_comes_then(moment: str, trouble: BaseException) -> None:
    def after(now: str) -> None:
        if now == moment:
            raise trouble

    one, kept = session(Stand(after=after), Settings(("push",), (SMALL, LARGE), requests=4, warmup=0, answers=2))
    outcome = one.run()
    assert outcome.interrupted == isinstance(trouble, KeyboardInterrupt)
    (run,) = kept[-1].runs
    assert (len(run.good), run.duration_s) == (4, 2.0)
    assert run.trouble == (outcome.results.incomplete_because,)
    assert run.answers is None if moment == "end" else (run.answers and run.answers.error)


def test_an_instance_that_is_lost_makes_its_cell_and_all_partial_and_the_rest_goes_on() -> None:
    stand, progress = Stand(told=("decode-1 did not answer after the cell",)), Quiet()
    one, _ = session(stand, Settings(("push",), (SMALL, LARGE), requests=4, warmup=0), progress)
    outcome = one.run()
    assert outcome.error is None
    assert [run.complete for run in outcome.results.runs] == [False, False]
    assert not outcome.results.complete
    assert outcome.results.incomplete_because == "decode-1 did not answer after the cell"
    assert "warning: push, 512+16 x1: decode-1 did not answer after the cell" in progress.said


def test_results_that_cannot_be_written_end_it_and_leave_the_cluster_in_good_order() -> None:
    def keep(results: Results) -> None:
        raise PdctlError("cannot write results.json: No space left on device")

    stand, progress = Stand(), Quiet()
    settings = Settings(("push",), (SMALL, LARGE), requests=4, warmup=0)
    outcome = Session(blank(settings), stand, keep, progress).run()
    assert outcome.error is not None
    assert stand.log[-1] == "leave push"
    assert len(outcome.results.runs) == 1
    assert not outcome.results.complete
    assert any("could not be written" in text for text in progress.said)


def test_a_load_that_is_cut_short_lasted_as_long_as_its_requests() -> None:
    def trouble(load: int) -> None:
        raise PdctlError("silence")

    one, _ = session(Stand(trouble), Settings(("push",), (SMALL,), requests=4, warmup=0))
    (run,) = one.run().results.runs
    assert run.duration_s == pytest.approx(0.3)


def test_half_of_the_requests_may_fail() -> None:
    bad = replace(good(0), ttft_s=None, error="HTTP 500")
    one, _ = session(
        Stand(sample=lambda number: bad if number % 2 else good(number)),
        Settings(("push",), (SMALL,), requests=4, warmup=0),
    )
    assert one.run().results.complete


def test_a_wrong_answer_is_told_at_once_and_makes_all_invalid() -> None:
    progress = Quiet()
    stand = Stand(differences=(Difference(0, "a", "b", 3),))
    one, _ = session(stand, Settings(("push",), (SMALL,), requests=2, warmup=0, answers=2), progress)
    results = one.run().results
    assert results.complete
    assert results.invalid_because == "1 answer differs from what prefill alone answers (mode push)"
    assert any("INVALID" in text for text in progress.said)


def test_a_launch_that_fails_leaves_what_was_measured_before() -> None:
    class Failing(Stand):
        @contextmanager
        def run_in(self, mode: Mode) -> Iterator[Stand]:
            if mode == "push":
                raise PdctlError("decode-0 did not come up")
            with super().run_in(mode) as stand:
                yield stand

    one, _ = session(Failing(), Settings(("pull", "push"), (SMALL,), requests=2, warmup=0, rounds=2))
    outcome = one.run()
    assert [run.mode for run in outcome.results.runs] == ["pull"]
    assert outcome.results.incomplete_because == "decode-0 did not come up"


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.2, "3 s"), (89, "89 s"), (90, "2 min"), (5300, "88 min"), (7500, "2 h 5 min")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration_words(seconds) == words
