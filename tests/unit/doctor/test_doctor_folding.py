from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdctl.doctor.folding import fold_grid, fold_names, fold_pairs, ranges


def test_few_names_stay_as_they_are() -> None:
    assert fold_names(["p1", "p2", "p3"]) == "p1, p2, p3"
    assert fold_names(["p1", "p1"]) == "p1"


def test_many_names_are_a_range_with_their_number() -> None:
    assert fold_names([f"p{n}" for n in range(1, 13)]) == "12 hosts (p1-p12)"
    assert fold_names(["p1", "p2", "p3", "p4", "d1", "p6", "p7", "p8"]) == "8 hosts (p1-p4, d1, p6-p8)"


def test_two_neighbours_make_no_range() -> None:
    assert ranges(["p1", "p2", "d1"]) == ["p1", "p2", "d1"]


def test_names_of_another_spelling_make_no_range() -> None:
    assert ranges(["n1", "n02", "n3", "n4"]) == ["n1", "n02", "n3", "n4"]
    assert ranges(["n08", "n09", "n10"]) == ["n08", "n09", "n10"]
    assert ranges(["n01", "n02", "n03"]) == ["n01-n03"]


def test_very_many_names_are_counted() -> None:
    names = [f"host-{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    assert fold_names(names).endswith("host-p and 10 more)")
    assert fold_names(["x", *[f"p{n}" for n in range(1, 10)], "y"], most=1) == "11 hosts (x and 10 more)"


@given(st.lists(st.from_regex(r"[a-z]{1,2}[0-9]{0,2}", fullmatch=True), max_size=40, unique=True))
def test_ranges_lose_and_invent_nothing(names: list[str]) -> None:
    unfolded = []
    for part in ranges(names):
        low, dash, high = part.partition("-")
        if not dash:
            unfolded.append(part)
            continue
        digits = len(low.lstrip("abcdefghijklmnopqrstuvwxyz"))
        stem = low[: len(low) - digits]
        first, last = int(low[-digits:]), int(high[len(stem) :])
        padding = len(low) - len(stem) if low[len(stem)] == "0" else 0
        unfolded += [f"{stem}{number:0{padding}d}" for number in range(first, last + 1)]
    assert sorted(unfolded) == sorted(names)


def test_pairs_by_source() -> None:
    pairs = [("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2"), ("p3", "d1")]
    assert fold_pairs(pairs, arrow="->") == "p1, p2 -> d1, d2; p3 -> d1"


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("stuvwxyz")), st.sampled_from([0, 1, 2]), min_size=1
    )
)
def test_a_folded_table_says_what_the_cells_say(cells: dict[tuple[str, str], int]) -> None:
    rows, columns, grid = fold_grid(cells)
    unfolded = {
        (source, target): grid[row][column]
        for row, column in itertools.product(range(len(rows)), range(len(columns)))
        for source, target in itertools.product(rows[row], columns[column])
        if grid[row][column] is not None
    }
    assert unfolded == cells
