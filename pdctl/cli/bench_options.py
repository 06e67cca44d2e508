"""Options that ``bench run`` and ``bench compare`` share, and what they make: settings, and a folder for results."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pdctl.errors import UsageError

if TYPE_CHECKING:
    from pdctl.bench.results import Mode, Settings
    from pdctl.plan import ClusterPlan

F = TypeVar("F", bound=Callable[..., Any])

RESULTS = "results.json"
REPORT = "report.html"
MOST_ROUNDS = 100


def load_options(function: F) -> F:
    """All options that say which load to make, and where results go."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def _complete_profile(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del ctx, param
    from pdctl.bench.settings import PROFILES

    return [name for name in PROFILES if name.startswith(incomplete)]


_OPTIONS = (
    click.option(
        "--profile",
        metavar="NAME",
        shell_complete=_complete_profile,
        help="Lengths and loads in one word: quick (the default), chat, long-prompt, prefill-only. "
        "The options below replace parts of it.",
    ),
    click.option("--prompt-tokens", metavar="LIST", help="Tokens of a prompt, such as 512,2048 or 512,2k."),
    click.option("--output-tokens", metavar="LIST", help="Tokens of an answer."),
    click.option("--concurrency", metavar="LIST", help="How many requests at once, such as 1,4."),
    click.option("--rate", metavar="LIST", help="Requests per second, at random gaps, such as 0.5,2."),
    click.option(
        "--prefix-hit",
        metavar="LIST",
        default="0",
        show_default=True,
        help="Percent of each prompt that earlier prompts began with: 0,50,100.",
    ),
    click.option("--requests", type=click.IntRange(1, 1_000_000), help="Requests of each cell and mode."),
    click.option(
        "--warmup",
        type=click.IntRange(0, 100_000),
        default=4,
        show_default=True,
        help="Requests before each cell that are not counted.",
    ),
    click.option(
        "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of prompts and gaps."
    ),
    click.option(
        "--answers",
        type=click.IntRange(0, 1000),
        default=4,
        show_default=True,
        help="Answers of each cell and round that are compared with what prefill alone answers; 0: none.",
    ),
    click.option(
        "--request-timeout",
        "request_timeout_s",
        type=click.FloatRange(1, 86400),
        default=300.0,
        show_default=True,
        help="Seconds without any answer after which the load is given up.",
    ),
    click.option(
        "--generator-host",
        metavar="HOST",
        help="Host of the cluster that makes the load; default: the router's, or the first one with vLLM.",
    ),
    click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Folder for results.json and report.html; default: a new one that carries cluster and time.",
    ),
)


@dataclass(frozen=True)
class LoadWishes:
    """The values of :func:`load_options`."""

    profile: str | None
    prompt_tokens: str | None
    output_tokens: str | None
    concurrency: str | None
    rate: str | None
    prefix_hit: str
    requests: int | None
    warmup: int
    seed: int
    answers: int
    request_timeout_s: float
    generator_host: str | None
    out: Path | None


def make_settings(wishes: LoadWishes, modes: tuple[Mode, ...], rounds: int) -> Settings:
    """What is to be measured.

    Raises:
        UsageError: a list or a name makes no sense.
    """
    import difflib

    from pdctl.bench import settings as reading
    from pdctl.bench.results import Settings

    name = wishes.profile or reading.DEFAULT_PROFILE
    if name not in reading.PROFILES:
        near = difflib.get_close_matches(name, reading.PROFILES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(reading.PROFILES)}"
        raise UsageError(f"there is no profile {name!r}", hint=hint)
    profile = reading.PROFILES[name]

    def counts(text: str | None, option: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
        return otherwise if text is None else reading.parse_counts(text, option)

    rates = () if wishes.rate is None else reading.parse_rates(wishes.rate)
    if wishes.concurrency is not None:
        concurrency = reading.parse_concurrency(wishes.concurrency)
    else:
        # Whoever asks for rates alone wants no other loads.
        concurrency = () if rates else profile.concurrency
    cells = reading.make_cells(
        counts(wishes.prompt_tokens, "--prompt-tokens", profile.prompt_tokens),
        counts(wishes.output_tokens, "--output-tokens", profile.output_tokens),
        concurrency,
        rates,
        reading.parse_prefix_hits(wishes.prefix_hit),
    )
    return Settings(
        modes=modes,
        cells=cells,
        rounds=rounds,
        requests=wishes.requests or profile.requests,
        warmup=wishes.warmup,
        seed=wishes.seed,
        answers=wishes.answers,
    )


def results_folder(wishes: LoadWishes, plan: ClusterPlan) -> Path:
    """Make the folder for results, for its owner alone.

    Raises:
        UsageError: it cannot be made or written, or has results already.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = wishes.out or Path(f"pdctl-bench-{plan.spec.cluster}-{stamp}")
    if (folder / RESULTS).exists():
        raise UsageError(f"{folder} has results already", hint="give another --out; results are never overwritten")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".{RESULTS}.writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror or error}", hint="give another --out") from None
    return folder


def command_line() -> str:
    """What the user typed. No option of ``bench`` takes a secret."""
    return shlex.join(["pdctl", *sys.argv[1:]])
