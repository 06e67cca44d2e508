"""Made-up results of a bench, with the shape and the spread of real ones. The same seed gives the same results."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from pdctl.bench.results import (
    AnswerCheck,
    Cell,
    CellRun,
    Difference,
    Environment,
    InstanceFacts,
    Mode,
    Results,
    Sample,
    Settings,
    StageTimes,
    Transfers,
)

STARTED = 1_780_000_000.0
CELLS: tuple[Cell, ...] = tuple(
    Cell(prompt_tokens=prompt, output_tokens=16, concurrency=concurrency)
    for prompt in (512, 2048, 4096)
    for concurrency in (1, 4)
)
SPEEDS: Mapping[Mode, float] = {"pull": 1.0, "push": 0.81, "push-upstream": 0.97}
"""Median TTFT of each mode beside pull's."""

_SHARES: Mapping[str, Mapping[str, float]] = {
    "push": {
        "route": 0.02,
        "prefill queue": 0.05,
        "prefill": 0.6,
        "match": 0.01,
        "post": 0.02,
        "transfer": 0.12,
        "notify": 0.03,
        "decode queue": 0.02,
        "first decode step": 0.08,
        "rest": 0.05,
    },
    "pull": {"route": 0.02, "prefill queue": 0.05, "prefill": 0.5, "transfer": 0.25, "rest": 0.18},
    "push-upstream": {"route": 0.02, "prefill queue": 0.05, "prefill": 0.55, "rest": 0.38},
}


def make_results(
    *,
    modes: Sequence[Mode] = ("pull", "push-upstream", "push"),
    cells: Sequence[Cell] = CELLS,
    rounds: int = 4,
    requests: int = 25,
    speeds: Mapping[Mode, float] = SPEEDS,
    stages: bool = True,
    answers: int = 4,
    wrong: Sequence[Difference] = (),
    error_every: int = 0,
    error: str = "HTTP 500: the engine is gone",
    complete: bool = True,
    incomplete_because: str = "",
    trouble: tuple[str, ...] = (),
    model: str = "Qwen/Qwen3-0.6B",
    cluster: str = "lab",
    seed: int = 7,
) -> Results:
    """Results of a comparison (or, with one mode, of a run).

    Args:
        modes: in the order of the settings.
        cells: all loads.
        rounds: of each mode.
        requests: of each cell, mode and round.
        speeds: by mode, its median times beside those of pull.
        stages: whether stages were told apart.
        answers: compared per run; 0 for none.
        wrong: answers of the first run that differ.
        error_every: every so many requests one fails; 0 for none.
        error: with this.
        complete: whether all was measured.
        incomplete_because: why not.
        trouble: of every run.
        model: its name.
        cluster: its name.
        seed: of the samples.
    """
    source = random.Random(seed)
    runs: list[CellRun] = []
    clock = STARTED
    for number in range(1, rounds + 1):
        # A B B A: what drifts hits all modes alike.
        for mode in modes if number % 2 else tuple(reversed(modes)):
            for cell in cells:
                run = _run(source, mode, number, cell, requests, speeds[mode], clock, error_every, error)
                clock += run.duration_s
                first = not runs
                runs.append(
                    CellRun(
                        mode=mode,
                        round=number,
                        cell=cell,
                        duration_s=run.duration_s,
                        samples=run.samples,
                        stages=_stages(mode, run) if stages else None,
                        transfers=_transfers(mode, cell, requests),
                        answers=_answers(answers, tuple(wrong) if first else ()),
                        trouble=trouble,
                    )
                )
    return Results(
        schema=1,
        kind="compare" if len(modes) > 1 else "run",
        cluster=cluster,
        created_unix=STARTED,
        command=f"pdctl bench compare -f {cluster}.yaml --modes {','.join(modes)} --rounds {rounds}",
        settings=Settings(
            modes=tuple(modes),
            cells=tuple(cells),
            rounds=rounds,
            requests=requests * rounds,
            seed=seed,
            answers=answers,
        ),
        environment=make_environment(model),
        runs=tuple(runs),
        complete=complete,
        incomplete_because=incomplete_because,
        ended_unix=clock,
    )


def make_environment(model: str = "Qwen/Qwen3-0.6B") -> Environment:
    """One prefill and one decode instance, and a router."""
    versions = {"vllm": "0.32.0", "nixl": "1.5.1", "torch": "2.11.0", "python": "3.12.8"}
    env = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    flags = ("--max-model-len", "8192", "--gpu-memory-utilization", "0.85")
    return Environment(
        model=model,
        accelerator="cpu",
        fabric="tcp",
        instances=(
            InstanceFacts("prefill-0", "prefill", "node-a", flags, versions, env),
            InstanceFacts("decode-0", "decode", "node-b", flags, versions, env),
            InstanceFacts("router", "router", "node-a", ("--policy", "round_robin"), {"vllm-router": "0.1.17"}),
        ),
        pdctl="0.6.0",
        generator="pdctl load 1",
        generator_host="node-a",
        transfer={"timeout_s": "30", "load_failure_policy": "fail"},
    )


def _run(
    source: random.Random,
    mode: Mode,
    number: int,
    cell: Cell,
    requests: int,
    speed: float,
    clock: float,
    error_every: int,
    error: str,
) -> CellRun:
    load = cell.concurrency or max(1.0, cell.rate or 1.0)
    middle = 0.0002 * cell.prompt_tokens * load**0.5 * speed
    gap = 0.02 * load**0.25
    samples = []
    for index in range(requests):
        started = clock + index * middle / load
        if error_every and index % error_every == error_every - 1:
            samples.append(Sample(started, None, 0.5, (), cell.prompt_tokens, 0, error))
            continue
        ttft = middle * source.lognormvariate(0, 0.25)
        gaps = tuple(gap * source.lognormvariate(0, 0.2) for _ in range(cell.output_tokens - 1))
        samples.append(Sample(started, ttft, ttft + sum(gaps), gaps, cell.prompt_tokens, cell.output_tokens))
    duration = sum(sample.latency_s for sample in samples) / load
    return CellRun(mode=mode, round=number, cell=cell, duration_s=duration, samples=tuple(samples))


def _stages(mode: Mode, run: CellRun) -> StageTimes | None:
    times = [sample.ttft_s for sample in run.good if sample.ttft_s is not None]
    if not times:
        return None
    mean = sum(times) / len(times)
    beside = {"registration": 0.02 * mean, "decode wait": 0.7 * mean} if mode == "push" else {}
    return StageTimes({name: share * mean for name, share in _SHARES[mode].items()}, beside, len(times))


def _transfers(mode: Mode, cell: Cell, requests: int) -> Transfers:
    if mode == "push-upstream":
        return Transfers(recomputed_requests=0, recomputed_tokens=0)
    return Transfers(
        completed=requests,
        failed=0,
        expired=0,
        bytes=requests * cell.prompt_tokens * 114_688,
        seconds=requests * cell.prompt_tokens * 114_688 / 2.5e9,
        recomputed_requests=1 if mode == "pull" else 0,
        recomputed_tokens=cell.prompt_tokens if mode == "pull" else 0,
    )


def _answers(compared: int, wrong: tuple[Difference, ...]) -> AnswerCheck | None:
    if not compared:
        return None
    return AnswerCheck(compared=compared, equal=max(0, compared - len(wrong)), different=wrong)


__all__ = ["CELLS", "SPEEDS", "STARTED", "make_environment", "make_results"]
