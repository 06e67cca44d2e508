"""What a bench has measured: the file ``results.json``, and the types that everything in ``bench`` speaks in.

Times are seconds, sizes bytes. Every request is kept as it was measured; tables and plots are made from these alone, so
that a file can be reported, compared and gated again without the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from pdctl.atomic_file import write_atomically
from pdctl.bench.documents import read_document

SCHEMA = 1
"""Version of ``results.json``. A file of another version is refused."""

RESULTS_LIMIT = 1 << 30
"""Most bytes of a results file that is read."""

Mode = Literal["push", "pull", "push-upstream"]
MODES: tuple[Mode, ...] = ("push", "pull", "push-upstream")
MODE_WORDS: Mapping[str, str] = {
    "push": "push (pdctl's connector)",
    "pull": "pull (vLLM's connector)",
    "push-upstream": "push (vLLM's connector)",
}

_CONFIG = ConfigDict(extra="ignore", ser_json_inf_nan="constants")
COUNT_LIMIT = 2**63 - 1
"""Largest count of a file. Python's integers know no end, and one beyond a float's would end every division."""

SECONDS_LIMIT = 1e18
"""Most seconds of a duration, longer than the world is old: their sums and products stay far from a float's end."""

Count = Annotated[int, Field(ge=0, le=COUNT_LIMIT)]
Positive = Annotated[int, Field(gt=0, le=COUNT_LIMIT)]
Duration = Annotated[float, Field(ge=0, le=SECONDS_LIMIT, allow_inf_nan=False)]
Shift = Annotated[float, Field(ge=-SECONDS_LIMIT, le=SECONDS_LIMIT, allow_inf_nan=False)]
"""Seconds that clocks which disagree can make negative."""

Figure = Annotated[float, Field(allow_inf_nan=False)]


@checked(frozen=True, config=_CONFIG)
class Cell:
    """One kind of load. Either ``concurrency`` or ``rate`` is given.

    Attributes:
        prompt_tokens: tokens of each prompt.
        output_tokens: tokens of each answer; the end of text is ignored.
        concurrency: so many requests at once, each followed by the next; None when the load is given by its rate.
        rate: requests per second, with random (Poisson) gaps; None when it is given by its concurrency.
        prefix_hit: share of each prompt, in percent, that earlier prompts of the same cell and round began with.
    """

    prompt_tokens: Positive
    output_tokens: Positive
    concurrency: Positive | None = None
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    prefix_hit: Annotated[int, Field(ge=0, le=100)] = 0

    @property
    def load(self) -> str:
        """How hard: ``x4`` or ``2/s``."""
        return f"x{self.concurrency}" if self.concurrency is not None else f"{self.rate or 0:g}/s"

    @property
    def name(self) -> str:
        """For tables: ``2048+16 x4``, and the prefix hits if there are any."""
        hits = f" {self.prefix_hit}% hits" if self.prefix_hit else ""
        return f"{self.prompt_tokens}+{self.output_tokens} {self.load}{hits}"


@checked(frozen=True, config=_CONFIG)
class Sample:
    """One request, as its client saw it.

    Attributes:
        started_unix: when it was sent, by the clock of the machine that made the load.
        ttft_s: until the first token; None if there was none.
        latency_s: until the last token, or until it failed.
        itl_s: gaps between tokens, in order.
        prompt_tokens: as the server counted them.
        output_tokens: as the server counted them.
        error: why it failed; empty if it did not.
    """

    started_unix: Figure
    ttft_s: Duration | None
    latency_s: Duration
    itl_s: tuple[Duration, ...] = ()
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was answered in full."""
        return not self.error and self.ttft_s is not None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return max(0.0, self.latency_s - self.ttft_s) / (self.output_tokens - 1)


STAGES: tuple[str, ...] = (
    "route",
    "prefill queue",
    "prefill",
    "match",
    "post",
    "transfer",
    "notify",
    "decode queue",
    "first decode step",
    "rest",
)
"""Where the time to first token goes, in order: they add up to its mean. Not every mode can tell all of them apart."""


@checked(frozen=True, config=_CONFIG)
class StageTimes:
    """Where the time to first token of a cell went: means over its requests.

    Attributes:
        seconds: by name in :data:`STAGES`; what could not be told apart is missing, and is part of ``rest``.
        beside: what ran at the same time as prefill and is in no sum: ``registration``, ``decode wait``.
        requests: over how many requests.
        notes: what a reader must know, such as clocks that disagree.
    """

    seconds: dict[str, Shift]
    beside: dict[str, Shift] = Field(default_factory=dict)
    requests: Count = 0
    notes: tuple[str, ...] = ()


@checked(frozen=True, config=_CONFIG)
class Transfers:
    """What the instances counted during a cell. None: not counted in this mode.

    Attributes:
        completed: transfers that ended well.
        failed: transfers that did not.
        expired: leases of prefill that ended without a transfer.
        bytes: moved.
        seconds: in which they were moved: the sum over transfers, as NIXL or the ledger measured each.
        recomputed_requests: requests whose KV decode computed itself although it should have been transferred.
        recomputed_tokens: prompt tokens that decode computed itself, without the last one of each request, which it
            always computes.
    """

    completed: Count | None = None
    failed: Count | None = None
    expired: Count | None = None
    bytes: Count | None = None
    seconds: Duration | None = None
    recomputed_requests: Count | None = None
    recomputed_tokens: Count | None = None


@checked(frozen=True, config=_CONFIG)
class Difference:
    """An answer that is not the one that prefill alone gives.

    Attributes:
        request: its place in the cell's requests.
        got: what the cluster answered, from shortly before the first difference; cut.
        expected: what prefill answered alone, likewise.
        at: characters that are the same before.
    """

    request: Count
    got: str
    expected: str
    at: Count


@checked(frozen=True, config=_CONFIG)
class AnswerCheck:
    """A sample of a cell's answers beside what prefill alone answers to the same prompts, at temperature 0.

    Attributes:
        compared: how many could be set against prefill's.
        equal: how many were the same.
        unstable: how many cannot be judged: prefill alone gave two answers to the same prompt, alone and among others,
            and up to where these part, the cluster's is the same.
        different: the rest. Any makes the whole bench invalid.
        error: how many could not be compared, and why; empty if all could.
        asked: how many were to be asked again; 0 in files that do not tell.
    """

    compared: Count = 0
    equal: Count = 0
    unstable: Count = 0
    different: tuple[Difference, ...] = ()
    error: str = ""
    asked: Count = 0

    @property
    def wanted(self) -> int:
        """How many there were to compare."""
        return max(self.asked, self.compared)


@checked(frozen=True, config=_CONFIG)
class CellRun:
    """One cell, measured once in one mode.

    Attributes:
        mode: which.
        round: from 1.
        cell: the load.
        duration_s: from the first request to the last answer.
        samples: every request but the warm-up, in the order of sending.
        stages: where the time to first token went; None if it could not be told.
        transfers: counters over the cell.
        answers: the comparison; None if none was asked for.
        complete: False if it was cut short, or an instance was lost. Its times may be shown, and are in no ratio.
        trouble: what went wrong beside single requests, such as an instance that ended.
    """

    mode: Mode
    round: Positive
    cell: Cell
    duration_s: Duration
    samples: tuple[Sample, ...]
    stages: StageTimes | None = None
    transfers: Transfers = field(default_factory=Transfers)
    answers: AnswerCheck | None = None
    complete: bool = True
    trouble: tuple[str, ...] = ()

    @property
    def good(self) -> list[Sample]:
        """The requests that were answered."""
        return [sample for sample in self.samples if sample.ok]


@checked(frozen=True, config=_CONFIG)
class InstanceFacts:
    """One instance as it was launched.

    Attributes:
        name: ``prefill-0``.
        role: ``prefill``, ``decode`` or ``router``.
        host: SSH name.
        flags: its arguments without the program, paths of the user's home, secrets, and what the mode decides.
        versions: by package: vllm, nixl, torch, python.
        env: environment variables that were set for it, without secrets.
    """

    name: str
    role: str
    host: str
    flags: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)


@checked(frozen=True, config=_CONFIG)
class Environment:
    """What the figures hold for. Two results are comparable if these are equal.

    Attributes:
        model: as in the cluster file.
        accelerator: cuda, neuron or cpu.
        fabric: efa, infiniband, roce or tcp.
        instances: all of them, router last.
        pdctl: version of pdctl.
        generator: name and version of what made the load.
        generator_host: where it ran.
        transfer: how KV was transferred, as set in the cluster file: timeout_s, lease_s, load_failure_policy, and extra
            as JSON.
    """

    model: str
    accelerator: str
    fabric: str
    instances: tuple[InstanceFacts, ...]
    pdctl: str
    generator: str = ""
    generator_host: str = ""
    transfer: dict[str, str] = Field(default_factory=dict)


@checked(frozen=True, config=_CONFIG)
class Settings:
    """What the user asked for.

    Attributes:
        modes: in the order given; the first is what the others are compared with.
        cells: all loads.
        rounds: how often every mode has its turn.
        requests: measured requests of each cell and mode, over all rounds together.
        warmup: requests sent before each cell and not counted.
        seed: of prompts, gaps and bootstrap.
        answers: answers compared per cell, mode and round; 0 for none.
    """

    modes: tuple[Mode, ...]
    cells: tuple[Cell, ...]
    rounds: Positive = 1
    requests: Positive = 100
    warmup: Count = 4
    seed: int = 0
    answers: Count = 4


@checked(frozen=True, config=_CONFIG)
class Results:
    """Everything that one ``pdctl bench run`` or ``compare`` has measured.

    Attributes:
        schema: :data:`SCHEMA`.
        kind: ``run`` or ``compare``.
        cluster: its name.
        created_unix: when it began.
        command: the command line, without secrets.
        settings: what was asked for.
        environment: what it ran on.
        runs: in the order measured.
        complete: False if not all that was asked for was measured.
        incomplete_because: why; empty if it is complete.
        ended_unix: when the last run was written.
    """

    schema: Literal[1]
    kind: Literal["run", "compare"]
    cluster: str
    created_unix: Figure
    command: str
    settings: Settings
    environment: Environment
    runs: tuple[CellRun, ...] = ()
    complete: bool = False
    incomplete_because: str = ""
    ended_unix: Figure = 0.0

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that have runs, in the order of the settings."""
        measured = {run.mode for run in self.runs}
        return tuple(mode for mode in self.settings.modes if mode in measured)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The cells that have runs, in the order of the settings."""
        measured = {run.cell for run in self.runs}
        return tuple(cell for cell in self.settings.cells if cell in measured)

    def of(self, cell: Cell, mode: Mode) -> list[CellRun]:
        """The runs of a cell in a mode, by round."""
        return sorted((run for run in self.runs if run.cell == cell and run.mode == mode), key=lambda run: run.round)

    @property
    def differences(self) -> list[tuple[CellRun, Difference]]:
        """Every wrong answer."""
        return [(run, one) for run in self.runs if run.answers for one in run.answers.different]

    @property
    def invalid_because(self) -> str:
        """Why these figures must not be used; empty if they may."""
        wrong = self.differences
        if not wrong:
            return ""
        modes = ", ".join(dict.fromkeys(run.mode for run, _ in wrong))
        differ = "1 answer differs" if len(wrong) == 1 else f"{len(wrong)} answers differ"
        return f"{differ} from what prefill alone answers (mode {modes})"


_ADAPTER: TypeAdapter[Results] = TypeAdapter(Results)


def to_json(results: Results) -> dict[str, Any]:
    """Plain values with stable keys."""
    made = _ADAPTER.dump_python(results, mode="json")
    assert isinstance(made, dict)
    return made


def read_results(path: Path) -> Results:
    """Read a ``results.json``.

    Raises:
        UsageError: it cannot be read, is none, or is of a version that this pdctl does not know.
    """
    return read_document(
        path,
        _ADAPTER,
        limit=RESULTS_LIMIT,
        schema=SCHEMA,
        is_one=lambda data: "schema" in data and "runs" in data,
        what="result of a bench",
        hint="give the results.json of pdctl bench",
    )


def write_results(path: Path, results: Results) -> None:
    """Write a ``results.json``, whole or not at all; readable by its owner alone.

    Raises:
        UsageError: it cannot be written.
    """
    write_atomically(path, _ADAPTER.dump_json(results, indent=1) + b"\n", mode=0o600)


def by_round(runs: Sequence[CellRun], figure: str) -> list[list[float]]:
    """A figure of every good request, by round.

    Args:
        runs: of one cell and mode.
        figure: ``ttft``, ``tpot``, ``itl`` (every gap) or ``e2e``; seconds.
    """
    return [[value for sample in run.good for value in sample_figure(sample, figure)] for run in runs]


def sample_figure(sample: Sample, figure: str) -> list[float]:
    """One figure of a request: one value, or many (``itl``), or none if it has none."""
    if figure == "itl":
        return list(sample.itl_s)
    value = {"ttft": sample.ttft_s, "tpot": sample.tpot_s, "e2e": sample.latency_s}[figure]
    return [] if value is None else [value]


__all__ = [
    "COUNT_LIMIT",
    "MODES",
    "MODE_WORDS",
    "SCHEMA",
    "SECONDS_LIMIT",
    "STAGES",
    "AnswerCheck",
    "Cell",
    "CellRun",
    "Difference",
    "Environment",
    "InstanceFacts",
    "Mode",
    "Results",
    "Sample",
    "Settings",
    "StageTimes",
    "Transfers",
    "by_round",
    "read_results",
    "sample_figure",
    "to_json",
    "write_results",
]
