"""How soon a router that is running notices that an instance is back: read from its command line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RouterHealth:
    """The health checks of a vllm-router; its own settings of 0.1.17 where the command line says nothing.

    Attributes:
        interval_s: seconds between two checks of an instance.
        successes: good answers in a row until an instance counts as well again.
        timeout_s: seconds that one check may take.
    """

    interval_s: float = 60.0
    successes: int = 2
    timeout_s: float = 5.0

    @property
    def notices_within_s(self) -> float:
        """Seconds until an instance that is back counts as well: its answers, after a check that has just begun."""
        return self.interval_s * (self.successes + 1) + self.timeout_s

    @property
    def words(self) -> str:
        """For people: what the router does before it calls itself healthy."""
        answers = "1 good answer" if self.successes == 1 else f"{self.successes} good answers in a row"
        return f"takes an instance back after {answers}, one every {self.interval_s:g} s"


def router_health(argv: Sequence[str]) -> RouterHealth:
    """Read the health settings from a router's command line; what cannot be read is as if it were not there."""
    own = RouterHealth()
    return RouterHealth(
        interval_s=_number(argv, "--health-check-interval-secs", own.interval_s),
        successes=int(_number(argv, "--health-success-threshold", own.successes)),
        timeout_s=_number(argv, "--health-check-timeout-secs", own.timeout_s),
    )


def _number(argv: Sequence[str], option: str, default: float) -> float:
    # Of an option that is given twice the last one counts, as in argparse.
    for position in range(len(argv) - 1, -1, -1):
        name, joined, value = argv[position].partition("=")
        if name == option:
            text = value if joined else "".join(argv[position + 1 : position + 2])
            return float(text) if text.isascii() and text.isdigit() and 0 < len(text) < 8 else default
    return default
