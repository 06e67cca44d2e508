"""What the probe writes, and that the target finds whatever is wrong with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdctl_connector.probe_content import (
    FILL,
    Findings,
    Layout,
    Pattern,
    blocks_that_fit,
    percentile,
    scattered,
    shifted,
    sources,
)

LAYERS, PIECE, BLOCKS, SEED = 3, 64, 7, 20240917


def memory(expected: list[int], *, seed: int = SEED) -> np.ndarray:
    """The target's memory as it should be: layers, blocks, words."""
    pattern = Pattern(seed, LAYERS, PIECE)
    whole = np.full((LAYERS, len(expected), PIECE // 8), FILL, dtype=np.uint64)
    for layer in range(LAYERS):
        for block, source in enumerate(expected):
            if source >= 0:
                whole[layer, block] = pattern.pieces(layer, [source])[0]
    return whole


def look(found: np.ndarray, expected: list[int]) -> Findings:
    findings = Findings(Pattern(SEED, LAYERS, PIECE), LAYERS, expected)
    for layer in range(LAYERS):
        findings.look(layer, found[layer])
    return findings


EXPECTED = sources(scattered(BLOCKS), BLOCKS)


def test_what_arrived_as_it_was_sent_is_fine() -> None:
    findings = look(memory(EXPECTED), EXPECTED)
    assert (findings.bad, findings.checked, findings.summary()) == ({}, LAYERS * BLOCKS, "")


def test_a_missing_piece() -> None:
    found = memory(EXPECTED)
    found[1, 4] = FILL
    findings = look(found, EXPECTED)
    assert findings.bad == {"missing": 1}
    assert findings.summary() == (
        f"1 of {LAYERS * BLOCKS} pieces are wrong (1 missing): layer 1 of block 4 holds nothing of what was sent to it"
    )


def test_two_blocks_that_were_swapped() -> None:
    found = memory(EXPECTED)
    found[:, [2, 5]] = found[:, [5, 2]]
    findings = look(found, EXPECTED)
    assert findings.bad == {"swapped": 2 * LAYERS}
    assert f"layer 0 of block 2 holds what was meant for another place (layer 0 of local block {EXPECTED[5]})" in (
        findings.summary()
    )


def test_two_layers_that_were_swapped() -> None:
    found = memory(EXPECTED)
    found[[0, 2], 3] = found[[2, 0], 3]
    assert look(found, EXPECTED).bad == {"swapped": 2}


def test_one_byte_is_enough() -> None:
    found = memory(EXPECTED)
    found.view(np.uint8)[2, 6, PIECE - 1] ^= 1
    findings = look(found, EXPECTED)
    assert findings.bad == {"damaged": 1}
    assert "layer 2 of block 6 differs in 8 of 64 bytes" in findings.summary()


def test_words_that_changed_places() -> None:
    found = memory(EXPECTED)
    found[0, 0, [1, 2]] = found[0, 0, [2, 1]]
    assert look(found, EXPECTED).bad == {"damaged": 1}


def test_content_of_an_earlier_probe() -> None:
    assert look(memory(EXPECTED, seed=SEED + 1), EXPECTED).bad == {"damaged": LAYERS * BLOCKS}


def test_a_block_that_nobody_wrote_to_must_stay_as_it_was() -> None:
    expected = sources(scattered(BLOCKS), 4)
    free = expected.index(-1)
    found = memory(expected)
    assert look(found, expected).bad == {}
    found[1, free, 0] = 0
    findings = look(found, expected)
    assert findings.bad == {"stray": 1}
    assert findings.checked == 4 * LAYERS


def test_many_are_counted_and_few_are_shown() -> None:
    findings = look(np.full((LAYERS, BLOCKS, PIECE // 8), FILL, dtype=np.uint64), EXPECTED)
    assert findings.bad == {"missing": LAYERS * BLOCKS}
    assert findings.summary().count("holds nothing") == 8


@given(st.integers(0, 2**63), st.integers(1, 40), st.integers(1, 5))
def test_no_two_pieces_are_alike(seed: int, blocks: int, layers: int) -> None:
    pattern = Pattern(seed, layers, PIECE)
    rows = np.concatenate([pattern.pieces(layer, range(blocks)) for layer in range(layers)])
    assert len(np.unique(rows)) == rows.size
    assert pattern.belongs_to(rows[-1], layers, blocks) == (layers - 1, blocks - 1)
    assert FILL not in rows


@given(st.integers(1, 3000), st.sampled_from([scattered, shifted]))
def test_every_block_goes_to_a_place_of_its_own(blocks: int, mapping) -> None:
    assert sorted(mapping(blocks)) == list(range(blocks))


def test_the_two_ways_differ_and_scatter_or_keep_neighbours() -> None:
    first, second = scattered(200), shifted(200)
    assert not any(one == other for one, other in zip(first, range(200), strict=True)) or first != second
    assert all(abs(first[number + 1] - first[number]) != 1 for number in range(199))
    assert sum(second[number + 1] - second[number] != 1 for number in range(199)) == 1


@given(st.integers(1, 50), st.integers(0, 60))
def test_who_wrote_what(blocks: int, written: int) -> None:
    mapping = scattered(blocks)
    expected = sources(mapping, written)
    assert sum(source >= 0 for source in expected) == min(blocks, written)
    assert all(mapping[source] == block for block, source in enumerate(expected) if source >= 0)


def test_where_pieces_lie() -> None:
    layout = Layout(layers=2, piece_bytes=16, stride=10)
    assert layout.offset(1, 3) == 13 * 16
    assert layout.numbers([3, 4]) == [3, 13, 4, 14]
    assert layout.numbers_by_layer([3, 4]) == [3, 4, 13, 14]


@pytest.mark.parametrize(("room", "blocks"), [(0, 1), (1000, 1), (6400, 5), (6399, 4)])
def test_blocks_that_fit(room: int, blocks: int) -> None:
    assert blocks_that_fit(room, 10, 128) == blocks


@pytest.mark.parametrize(("share", "value"), [(0.5, 100), (0.99, 198), (1.0, 200), (0.0, 1)])
def test_percentiles(share: float, value: int) -> None:
    assert percentile([float(number) for number in range(200, 0, -1)], share) == value
    assert percentile([3.0], share) == 3.0
