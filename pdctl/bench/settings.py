"""What to measure: profiles, lists of lengths and loads, and the cells they make. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from pdctl.bench.results import MODES, Cell, Mode, Settings
from pdctl.errors import UsageError

MOST_CELLS = 64
"""More than anybody waits for; a list too many is a slip."""

_EXAMPLES = {"--concurrency": "1,4", "--output-tokens": "128"}
_LONGEST_TOKENS = 10_000_000
_MOST_AT_ONCE = 10_000


@dataclass(frozen=True)
class Profile:
    """A named set of loads.

    Attributes:
        about: one line for people.
        prompt_tokens, output_tokens: lengths.
        concurrency: requests at once.
        requests: of each cell and mode.
    """

    about: str
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    concurrency: tuple[int, ...]
    requests: int


PROFILES: dict[str, Profile] = {
    "quick": Profile("a few minutes: is it worth a closer look?", (1024,), (64,), (1, 4), 32),
    "chat": Profile("turns of a conversation", (512, 2048), (256,), (1, 8, 32), 200),
    "long-prompt": Profile("documents: where the KV cache is large", (4096, 16384), (128,), (1, 4), 100),
    "prefill-only": Profile("one token out: time to first token alone", (512, 2048, 8192), (1,), (1, 4), 100),
}
DEFAULT_PROFILE = "quick"


def make_cells(
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    concurrency: Sequence[int],
    rates: Sequence[float],
    prefix_hits: Sequence[int],
) -> tuple[Cell, ...]:
    """Every combination, loads innermost.

    Args:
        prompt_tokens, output_tokens: lengths.
        concurrency: loads given by how many requests run at once.
        rates: loads given by requests per second.
        prefix_hits: shares of the prompt that were seen before, in percent.

    Raises:
        UsageError: there are none, or too many.
    """
    loads: list[tuple[int | None, float | None]] = [*((c, None) for c in concurrency), *((None, r) for r in rates)]
    cells = tuple(
        dict.fromkeys(
            Cell(prompt, output, concurrency=at_once, rate=rate, prefix_hit=hit)
            for hit, prompt, output, (at_once, rate) in product(prefix_hits, prompt_tokens, output_tokens, loads)
        )
    )
    if not cells:
        raise UsageError("nothing to measure: give --concurrency or --rate", hint="for example --concurrency 1,4")
    if len(cells) > MOST_CELLS:
        raise UsageError(
            f"these lists make {len(cells)} cells, more than {MOST_CELLS}", hint="shorten a list, or run it in parts"
        )
    return cells


def parse_counts(text: str, option: str, *, most: int = _LONGEST_TOKENS) -> tuple[int, ...]:
    """Read ``512,2048`` or ``512,2k``; ``k`` is 1024.

    Raises:
        UsageError: it is no list of whole numbers from 1.
    """
    return tuple(dict.fromkeys(_count(part, option, most) for part in _parts(text, option)))


def parse_concurrency(text: str) -> tuple[int, ...]:
    """Read the list of ``--concurrency``; raises as :func:`parse_counts`."""
    return parse_counts(text, "--concurrency", most=_MOST_AT_ONCE)


def parse_rates(text: str) -> tuple[float, ...]:
    """Read ``0.5,2``: requests per second.

    Raises:
        UsageError: it is no list of numbers above zero.
    """
    rates = []
    for part in _parts(text, "--rate"):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not 0 < rate < math.inf:
            raise UsageError(f"--rate: {part!r} is no number of requests per second", hint="for example --rate 0.5,2")
        rates.append(rate)
    return tuple(dict.fromkeys(rates))


def parse_prefix_hits(text: str) -> tuple[int, ...]:
    """Read ``0,50,100``: percent.

    Raises:
        UsageError: it is no list of whole numbers from 0 to 100.
    """
    hits = []
    for part in _parts(text, "--prefix-hit"):
        if not (part.isascii() and part.isdecimal() and int(part[:9]) <= 100):
            raise UsageError(f"--prefix-hit: {part!r} is no share from 0 to 100", hint="for example --prefix-hit 0,50")
        hits.append(int(part))
    return tuple(dict.fromkeys(hits))


def parse_modes(text: str) -> tuple[Mode, ...]:
    """Read ``pull,push``: at least two different modes.

    Raises:
        UsageError: one is unknown, twice there, or alone.
    """
    import difflib

    modes: list[Mode] = []
    for part in _parts(text, "--modes"):
        known = next((mode for mode in MODES if mode == part), None)
        if known is None:
            near = difflib.get_close_matches(part, MODES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(MODES)}"
            raise UsageError(f"--modes: there is no mode {part!r}", hint=hint)
        if known in modes:
            raise UsageError(f"--modes: {part} is named twice", hint="name each mode once; --rounds repeats them")
        modes.append(known)
    if len(modes) < 2:
        raise UsageError("--modes: comparing takes at least two modes", hint="for example --modes pull,push")
    return tuple(modes)


def requests_per_round(settings: Settings) -> int:
    """Measured requests of a cell in one round: a cell has at least as many as asked for."""
    return -(-settings.requests // settings.rounds)


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{option}: {text!r} has an empty place", hint="separate values by one comma")
    return parts


def _count(part: str, option: str, most: int) -> int:
    digits, factor = (part[:-1], 1024) if part[-1] in "kK" else (part, 1)
    value = int(digits) * factor if digits.isascii() and digits.isdecimal() and len(digits) < 10 else 0
    if not 1 <= value <= most:
        raise UsageError(
            f"{option}: {part!r} is no whole number from 1 to {most}",
            hint=f"for example {option} {_EXAMPLES.get(option, '512,2048')}",
        )
    return value
