"""Which sizes `pdctl bench fabric` writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.fabric_plan import (
    DEFAULT_BLOCK_SIZES,
    DEFAULT_DESCRIPTORS,
    MOST_POINTS,
    Shape,
    make_shapes,
    parse_block_sizes,
    parse_descriptors,
)

LIMIT = 256 << 20


def test_sizes_are_read() -> None:
    assert parse_block_sizes("16K, 1m,64KiB,4MB,model,65536,8") == (
        16384,
        1 << 20,
        65536,
        4 << 20,
        None,
        8,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty place"),
        ("16K,,1M", "empty place"),
        ("12", "multiple of 8"),
        ("0", "8 bytes at least"),
        ("64T", "no size"),
        ("-8", "no size"),
        ("1.5M", "no size"),
        ("٨", "no size"),
    ],
)
def test_what_is_no_size_is_said(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_block_sizes(text)


@pytest.mark.parametrize("text", ["", "0", "65537", "1,x", "٣", "1e3", "-1"])
def test_what_is_no_number_of_descriptors_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"descriptors|empty place"):
        parse_descriptors(text)


def test_descriptors_are_read_once_each() -> None:
    assert parse_descriptors("1,16, 256,16") == (1, 16, 256)


def test_the_defaults_fit_but_for_none() -> None:
    shapes, too_large = make_shapes(
        parse_block_sizes(DEFAULT_BLOCK_SIZES), parse_descriptors(DEFAULT_DESCRIPTORS), 32768, LIMIT
    )
    assert len(shapes) == 18
    assert not too_large
    assert max(shape.size for shape in shapes) == LIMIT


def test_the_model_s_own_size_is_measured_once() -> None:
    shapes, _ = make_shapes((None, 65536), (1, 8), 65536, LIMIT)
    assert shapes == [Shape(65536, 1), Shape(65536, 8)]


def test_what_is_too_large_is_left_out_and_named() -> None:
    shapes, too_large = make_shapes((4 << 20,), (64, 65), 65536, LIMIT)
    assert shapes == [Shape(4 << 20, 64)]
    assert too_large == [Shape(4 << 20, 65)]
    with pytest.raises(ValueError, match="larger than 256 MiB"):
        make_shapes((1 << 30,), (1,), 65536, LIMIT)


def test_too_many_points_are_refused() -> None:
    with pytest.raises(ValueError, match=f"{MOST_POINTS} can be measured"):
        make_shapes([8 * number for number in range(1, 102)], (1, 2), 65536, LIMIT)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_block_sizes, parse_descriptors):
        try:
            values = parse(text)
        except ValueError:
            continue
        assert values
        assert all(value is None or value >= 1 for value in values)
