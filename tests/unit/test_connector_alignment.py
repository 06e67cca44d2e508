"""Which blocks are read for those that are asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdctl_connector.alignment import align

HERE = [10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [(0, 5, HERE), (0, 2, [10, 11]), (2, 2, [12, 13]), (4, 1, [14]), (2, 3, [12, 13, 14])],
)
def test_the_index_decides(first: int, count: int, expected: list[int]) -> None:
    assert align([HERE], [list(range(count))], [first], by_index=True) == (expected,)


@pytest.mark.parametrize(("first", "count"), [(0, 6), (4, 2), (5, 1), (99, 1)])
def test_what_is_not_here_is_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match=rf"{count} blocks from number {first} are asked for, 5 are here"):
        align([HERE], [list(range(count))], [first], by_index=True)


def test_tails_align_at_their_end() -> None:
    assert align([HERE, [7, 8]], [[1, 2], [3]], [0, 0], by_index=False) == ([13, 14], [8])


def test_one_group_with_a_window_aligns_at_its_end_too() -> None:
    assert align([HERE], [[1, 2]], [0], by_index=False) == ([13, 14],)


@pytest.mark.parametrize("by_index", [True, False])
def test_a_group_that_needs_nothing_gets_nothing(by_index: bool) -> None:
    assert align([HERE], [[]], [3], by_index=by_index) == ([],)


def test_a_shorter_tail_is_left_to_upstream() -> None:
    assert align([[1]], [[5, 6]], [0], by_index=False) == ([1],)


@pytest.mark.parametrize("by_index", [True, False])
def test_another_number_of_groups_is_refused(by_index: bool) -> None:
    with pytest.raises(ValueError, match="1 cache groups here, 2 in the registration"):
        align([HERE], [[1], [2]], [0, 0], by_index=by_index)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 60))
def test_a_pair_is_the_same_block_of_the_prompt(blocks: int, hit: int, beyond: int) -> None:
    """Whatever prefix hit decode has, and however many blocks prefill has beyond the prompt."""
    hit = min(hit, blocks - 1)
    prefill = [1000 + index for index in range(blocks + beyond)]
    decode = [2000 + index for index in range(hit, blocks)]
    (local,) = align([prefill], [decode], [hit], by_index=True)
    assert [block - 1000 for block in local] == [block - 2000 for block in decode]
