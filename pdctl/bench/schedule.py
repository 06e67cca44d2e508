"""In which order cells are measured, with which prompts, and how long it will take. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdctl.bench.results import Cell, Mode, Settings


@dataclass(frozen=True)
class Turn:
    """One mode has the cluster, and measures every cell once.

    Attributes:
        round: from 1.
        mode: whose turn it is.
        relaunch: whether the cluster must be launched anew for it.
    """

    round: int
    mode: Mode
    relaunch: bool


def turns(modes: Sequence[Mode], rounds: int) -> list[Turn]:
    """All turns: A B, B A, A B, ... so that what drifts meets all modes alike, with as few launches as that allows.

    The last mode of a round is the first of the next and keeps its cluster.
    """
    order: list[Turn] = []
    for number in range(1, rounds + 1):
        for mode in modes if number % 2 else tuple(reversed(modes)):
            order.append(Turn(number, mode, relaunch=not order or order[-1].mode != mode))
    return order


def seed_of(seed: int, round_number: int, cell: Cell) -> int:
    """Seed of the prompts of a cell in a round: the same for every mode, and another one for each cell and round.

    So no prompt comes twice in a mode, whether its cluster was launched anew in between or not.
    """
    words = f"{seed}/{round_number}/{cell}"
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big") >> 1


@dataclass
class Remaining:
    """How long the rest will take, from what was seen.

    Attributes:
        settings: all that is to be measured.
    """

    settings: Settings
    _cells: dict[Cell, list[float]] = field(default_factory=dict)
    _launches: list[float] = field(default_factory=list)

    def measured(self, cell: Cell, seconds: float) -> None:
        """A cell, with its warm-up and all that belongs to it, took so long."""
        self._cells.setdefault(cell, []).append(seconds)

    def launched(self, seconds: float) -> None:
        """A launch took so long."""
        self._launches.append(seconds)

    def seconds(self, todo: Sequence[tuple[Turn, Sequence[Cell]]]) -> float | None:
        """How long the rest takes; None while nothing is known.

        A cell that was not seen is taken to cost its share of tokens of those that were.

        Args:
            todo: turns that are still to come, each with the cells that it still has to measure.
        """
        if not self._cells:
            return None
        seen = {cell: sum(times) / len(times) for cell, times in self._cells.items()}
        rate = sum(seen.values()) / sum(_work(cell) for cell in seen)
        launch = sum(self._launches) / len(self._launches) if self._launches else 0.0
        total = 0.0
        for turn, cells in todo:
            total += launch if turn.relaunch else 0.0
            total += sum(seen.get(cell, rate * _work(cell)) for cell in cells)
        return total


def _work(cell: Cell) -> float:
    # A token of output costs a step of its own; how many of a prompt are as much is a guess that soon is replaced.
    return (cell.prompt_tokens / 64 + cell.output_tokens) / math.sqrt(cell.concurrency or 1)


def rest_of(
    order: Sequence[Turn], cells: Sequence[Cell], turn: int, cell: int
) -> Iterator[tuple[Turn, Sequence[Cell]]]:
    """What is to come when the ``cell``-th cell of the ``turn``-th turn (both from 0) is about to be measured."""
    now = order[turn]
    yield Turn(now.round, now.mode, relaunch=False), cells[cell:]
    for later in order[turn + 1 :]:
        yield later, cells
