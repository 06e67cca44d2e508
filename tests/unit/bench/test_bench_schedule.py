"""The order of turns, the seeds, and the time that is left."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.results import MODES, Cell, Settings
from pdctl.bench.schedule import Remaining, Turn, rest_of, seed_of, turns

SMALL = Cell(512, 16, concurrency=1)
LARGE = Cell(4096, 16, concurrency=1)


def test_modes_take_turns_there_and_back() -> None:
    order = turns(("pull", "push"), 4)
    assert [turn.mode for turn in order] == ["pull", "push", "push", "pull", "pull", "push", "push", "pull"]
    assert [turn.round for turn in order] == [1, 1, 2, 2, 3, 3, 4, 4]
    # The last of a round goes on as the first of the next.
    assert [turn.relaunch for turn in order] == [True, True, False, True, False, True, False, True]


@given(st.integers(1, 3), st.integers(1, 12))
def test_every_mode_has_one_turn_in_every_round(modes: int, rounds: int) -> None:
    order = turns(MODES[:modes], rounds)
    for number in range(1, rounds + 1):
        assert sorted(turn.mode for turn in order if turn.round == number) == sorted(MODES[:modes])
    assert order[0].relaunch
    for before, after in pairwise(order):
        assert after.relaunch == (before.mode != after.mode)


def test_prompts_are_the_same_for_all_modes_and_never_come_twice() -> None:
    seeds = [seed_of(7, number, cell) for number in (1, 2) for cell in (SMALL, LARGE)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(7, 1, SMALL) == seed_of(7, 1, Cell(512, 16, concurrency=1))
    assert seed_of(7, 1, SMALL) != seed_of(8, 1, SMALL)


def test_the_time_that_is_left() -> None:
    settings = Settings(("pull", "push"), (SMALL, LARGE), rounds=2)
    remaining = Remaining(settings)
    order = turns(settings.modes, settings.rounds)
    everything = list(rest_of(order, settings.cells, 0, 0))
    assert remaining.seconds(everything) is None
    remaining.launched(60.0)
    remaining.measured(SMALL, 10.0)
    remaining.measured(LARGE, 30.0)
    remaining.measured(LARGE, 50.0)
    # Four turns of 10 + 40 s; the first has its cluster, the third keeps that of the second.
    assert remaining.seconds(everything) == pytest.approx(4 * 50 + 2 * 60)
    assert remaining.seconds(list(rest_of(order, settings.cells, 3, 1))) == pytest.approx(40)


def test_a_cell_that_was_not_seen_costs_its_share() -> None:
    remaining = Remaining(Settings(("push",), (SMALL, LARGE)))
    remaining.measured(SMALL, 10.0)
    guess = remaining.seconds([(Turn(1, "push", relaunch=False), (LARGE,))])
    assert guess is not None
    assert 20 < guess < 100
