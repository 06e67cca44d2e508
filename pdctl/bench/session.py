"""Measures: launches the cluster in each mode, has every cell loaded in turn, and keeps what was seen.

What was measured is written after every cell, so that nothing that ends a bench takes more than the present cell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from pdctl.bench.cell_watch import CellFacts
from pdctl.bench.results import AnswerCheck, Cell, CellRun, Mode, Results, Sample
from pdctl.bench.schedule import Remaining, Turn, rest_of, seed_of, turns
from pdctl.bench.settings import requests_per_round
from pdctl.errors import PdctlError

_MOST_FAILED = 0.5
"""Share of failed requests of a cell from which on going on makes no sense."""


class Watch(Protocol):
    """Looks at what the instances say of a cell."""

    def begin(self) -> None:
        """Remember how everything stands."""

    def end(self, samples: Sequence[Sample]) -> CellFacts:
        """What has changed since."""


class Generator(Protocol):
    """Makes the load."""

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
        """Send requests until all are answered. Returns the seconds it took.

        Args:
            cell: what each is like, and how many at once or how often.
            requests: how many.
            seed: of the prompts and gaps.
            measured: False for the warm-up, whose prompts are others with the same shared prefix.
            keep: how many prompts and answers to keep for :meth:`answers`, spread over all.
            on_sample: called for each request when it ends.

        Raises:
            PdctlError: there cannot be any load.
        """

    def answers(self, cell: Cell) -> AnswerCheck:
        """Ask a prefill instance alone for what was kept of the last load, and compare."""


class Cluster(Protocol):
    """The cluster in one mode."""

    def watch(self) -> Watch:
        """Look at a cell from now on."""

    def generator(self) -> Generator:
        """What makes the load for it."""


class Launcher(Protocol):
    """Runs the cluster in one mode or another."""

    def run_in(self, mode: Mode) -> AbstractContextManager[Cluster]:
        """Have it run in a mode; leaving the context lets go of the generator, and the cluster runs on.

        Raises:
            PdctlError: it does not come up.
        """


class Progress(Protocol):
    """Shows how far it is."""

    def step(self, text: str) -> None:
        """A new stage has begun."""

    def detail(self, text: str) -> None:
        """How far the stage is."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def warning(self, text: str) -> None:
        """Something to look at, though it goes on."""


@dataclass(frozen=True)
class Outcome:
    """How a session ended.

    Attributes:
        results: all that was measured.
        interrupted: whether Ctrl-C ended it.
        error: what ended it before its time; None if nothing did.
    """

    results: Results
    interrupted: bool = False
    error: PdctlError | None = None


class Session:
    """One ``bench run`` or ``bench compare``.

    Args:
        results: without runs: what is to be measured.
        launcher: runs the cluster.
        keep: called with all results after every cell; must not fail for long.
        progress: is told how far it is.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        results: Results,
        launcher: Launcher,
        keep: Callable[[Results], None],
        progress: Progress,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._results = results
        self._settings = results.settings
        self._launcher = launcher
        self._keep = keep
        self._progress = progress
        self._clock = clock
        self._order = turns(results.settings.modes, results.settings.rounds)
        self._remaining = Remaining(results.settings)

    def run(self) -> Outcome:
        """Measure everything. Ctrl-C and trouble end it; what was measured is kept, and marked as partial."""
        try:
            self._run()
        except KeyboardInterrupt:
            return Outcome(self._ended("interrupted"), interrupted=True)
        except PdctlError as error:
            return Outcome(self._ended(_reason(error)), error=error)
        return Outcome(self._ended(""))

    def _run(self) -> None:
        place = 0
        while place < len(self._order):
            # Turns of one mode that follow each other share a cluster and a generator.
            end = place + 1
            while end < len(self._order) and not self._order[end].relaunch:
                end += 1
            begin = self._clock()
            mode = self._order[place].mode
            self._progress.step(f"{self._where(place)}: launching")
            with self._launcher.run_in(mode) as cluster:
                self._remaining.launched(self._clock() - begin)
                for number in range(place, end):
                    self._turn(number, cluster)
            place = end

    def _turn(self, number: int, cluster: Cluster) -> None:
        turn = self._order[number]
        generator = cluster.generator()
        for index, cell in enumerate(self._settings.cells):
            rest = self._remaining.seconds(list(rest_of(self._order, self._settings.cells, number, index)))
            left = f", about {duration_words(rest)} left" if rest is not None else ""
            self._progress.step(f"{self._where(number)}: {cell.name}{left}")
            begin = self._clock()
            self._cell(turn, cell, cluster, generator)
            self._remaining.measured(cell, self._clock() - begin)

    def _where(self, number: int) -> str:
        turn = self._order[number]
        return f"round {turn.round} of {self._settings.rounds}, {turn.mode}"

    def _cell(self, turn: Turn, cell: Cell, cluster: Cluster, generator: Generator) -> None:
        settings = self._settings
        requests = requests_per_round(settings)
        seed = seed_of(settings.seed, turn.round, cell)
        if settings.warmup:
            self._progress.detail("warm-up")
            generator.load(cell, requests=settings.warmup, seed=seed, measured=False, keep=0, on_sample=_forget)
        samples: list[Sample] = []
        failed = 0

        def on_sample(sample: Sample) -> None:
            nonlocal failed
            samples.append(sample)
            failed += not sample.ok
            trouble = f", {failed} failed" if failed else ""
            self._progress.detail(f"{len(samples)} of {requests} requests{trouble}")

        watch = cluster.watch()
        watch.begin()
        run = CellRun(turn.mode, turn.round, cell, 0.0, (), complete=False)
        try:
            took = generator.load(
                cell, requests=requests, seed=seed, measured=True, keep=settings.answers, on_sample=on_sample
            )
            run = replace(run, samples=_in_order(samples), duration_s=took, complete=True)
            facts = watch.end(samples)
            run = replace(
                run,
                stages=facts.stages,
                transfers=facts.transfers,
                trouble=facts.trouble,
                complete=not facts.lost,
            )
            if failed > _MOST_FAILED * len(samples):
                # Nothing more is asked of a cluster that may be dead.
                run = replace(run, complete=False)
                raise _most_failed(turn, cell, run)
            if settings.answers:
                self._progress.detail("comparing answers with prefill alone")
                run = replace(run, answers=AnswerCheck(error="they were not compared to the end"))
                run = replace(run, answers=generator.answers(cell))
        except (KeyboardInterrupt, PdctlError) as error:
            if not run.samples:
                # In the middle of the load.
                run = replace(run, samples=_in_order(samples), duration_s=_span_s(samples))
            if run.samples:
                run = replace(run, trouble=(*run.trouble, _reason(error)))
                self._add(run)
            raise
        self._add(run)
        self._warn(run)

    def _warn(self, run: CellRun) -> None:
        where = f"{run.mode}, {run.cell.name}"
        for text in run.trouble:
            self._progress.warning(f"{where}: {text}")
        answers = run.answers
        if answers is not None and answers.different:
            count, of = len(answers.different), answers.compared
            self._progress.warning(
                f"{where}: {count} of {of} answers {'differs' if count == 1 else 'differ'} from what prefill alone "
                "answers: this bench is INVALID"
            )
        if answers is not None and answers.error:
            self._progress.warning(f"{where}: not all answers were compared: {answers.error}")

    def _add(self, run: CellRun) -> None:
        self._results = replace(self._results, runs=(*self._results.runs, run), ended_unix=time.time())
        self._keep(self._results)

    def _ended(self, because: str) -> Results:
        partial = [run for run in self._results.runs if not run.complete]
        if not because and partial:
            because = "; ".join(partial[0].trouble) or "a cell was cut short"
        self._results = replace(self._results, complete=not because, incomplete_because=because, ended_unix=time.time())
        try:
            self._keep(self._results)
        except PdctlError as error:
            # What was kept last stays; the cluster must still be brought back to how it was.
            self._progress.warning(f"the results could not be written: {error.message}")
            self._results = replace(
                self._results, complete=False, incomplete_because=because or f"not written: {error.message}"
            )
        return self._results


def _reason(error: BaseException) -> str:
    return error.message.partition("\n")[0] if isinstance(error, PdctlError) else "interrupted"


def _span_s(samples: Sequence[Sample]) -> float:
    """From the first request to the last answer."""
    ends = [sample.started_unix + sample.latency_s for sample in samples]
    return max(0.0, max(ends) - min(sample.started_unix for sample in samples)) if ends else 0.0


def _forget(sample: Sample) -> None:
    del sample


def _in_order(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    return tuple(sorted(samples, key=lambda sample: sample.started_unix))


def _most_failed(turn: Turn, cell: Cell, run: CellRun) -> PdctlError:
    reasons = [sample.error for sample in run.samples if sample.error]
    common = max(set(reasons), key=reasons.count) if reasons else "no reason given"
    failed = len(run.samples) - len(run.good)
    return PdctlError(
        f"{failed} of {len(run.samples)} requests failed ({turn.mode}, {cell.name}, round {turn.round}); most often: "
        f"{common.splitlines()[0][:300] if common else common}",
        hint="pdctl status shows what runs, pdctl logs INSTANCE why one does not",
    )


def duration_words(seconds: float) -> str:
    """``40 s``, ``12 min`` or ``2 h 5 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
