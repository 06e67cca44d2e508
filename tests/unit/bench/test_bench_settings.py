"""What the command line asks for becomes cells, or a clear error."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench import settings as reading
from pdctl.bench.results import MODES, Cell, Settings
from pdctl.errors import UsageError


def test_lists_are_read() -> None:
    assert reading.parse_counts("512, 2k,512", "--prompt-tokens") == (512, 2048)
    assert reading.parse_rates("0.5,2") == (0.5, 2.0)
    assert reading.parse_prefix_hits("0,50,100") == (0, 50, 100)
    assert reading.parse_modes("pull, push") == ("pull", "push")


@pytest.mark.parametrize(
    ("call", "text", "said"),
    [
        (lambda t: reading.parse_counts(t, "--prompt-tokens"), "512,,2", "empty place"),
        (lambda t: reading.parse_counts(t, "--prompt-tokens"), "0", "'0' is no whole number"),
        (lambda t: reading.parse_counts(t, "--prompt-tokens"), "k", "'k' is no whole number"),
        (lambda t: reading.parse_counts(t, "--prompt-tokens"), "٣", "is no whole number"),
        (reading.parse_concurrency, "20000", "from 1 to 10000"),
        (reading.parse_rates, "inf", "'inf' is no number of requests per second"),
        (reading.parse_rates, "-1", "'-1' is no number"),
        (reading.parse_prefix_hits, "101", "'101' is no share"),
        (reading.parse_prefix_hits, "0.5", "'0.5' is no share"),
        (reading.parse_modes, "push", "at least two"),
        (reading.parse_modes, "push,push", "named twice"),
        (reading.parse_modes, "pull,pussh", "no mode 'pussh'"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        call(text)  # type: ignore[operator]
    assert caught.value.hint


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(UsageError) as caught:
        reading.parse_modes("pull,push-upsteam")
    assert caught.value.hint == "did you mean push-upstream?"


def test_cells_are_all_combinations_loads_innermost() -> None:
    cells = reading.make_cells((512, 2048), (16,), (1, 4), (2.0,), (0,))
    assert [cell.name for cell in cells] == [
        "512+16 x1", "512+16 x4", "512+16 2/s", "2048+16 x1", "2048+16 x4", "2048+16 2/s",
    ]  # fmt: skip
    assert reading.make_cells((8,), (1,), (1,), (), (50,)) == (Cell(8, 1, concurrency=1, prefix_hit=50),)


def test_no_cell_and_too_many_cells_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        reading.make_cells((8,), (1,), (), (), (0,))
    with pytest.raises(UsageError, match="make 100 cells"):
        reading.make_cells(tuple(range(1, 101)), (1,), (1,), (), (0,))


def test_every_profile_makes_cells() -> None:
    for profile in reading.PROFILES.values():
        assert reading.make_cells(profile.prompt_tokens, profile.output_tokens, profile.concurrency, (), (0,))
        assert profile.about
    assert reading.DEFAULT_PROFILE in reading.PROFILES


@given(st.integers(1, 1000), st.integers(1, 100))
def test_a_cell_has_at_least_as_many_requests_as_asked_for(requests: int, rounds: int) -> None:
    each = reading.requests_per_round(Settings(MODES, (Cell(1, 1, concurrency=1),), rounds=rounds, requests=requests))
    assert requests <= each * rounds < requests + rounds


@given(st.text(max_size=20))
def test_wild_text_gives_values_or_a_usage_error(text: str) -> None:
    for call in (reading.parse_concurrency, reading.parse_rates, reading.parse_prefix_hits, reading.parse_modes):
        with contextlib.suppress(UsageError):
            assert call(text)
