import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.transfer_records import RECORDS_LIMIT, TRANSFERS_LIMIT, join, read_records

PATHS = {
    "prefill": ("prefilling", "ready", "matched", "posted", "completed"),
    "decode": ("allocated", "registered", "received"),
}


def entry(side: str, key: str = "k", *, started: float = 100.0, step: float = 0.1, **changes: Any) -> dict[str, Any]:
    path = PATHS[side]
    stages = {stage: place * step for place, stage in enumerate(path)}
    return {
        "side": side, "key": key, "attempt": 1, "stage": path[-2], "outcome": path[-1], "started_unix": started,
        "stages": stages, **changes,
    }  # fmt: skip


def answer(*entries: Any) -> bytes:
    return json.dumps({"state": "recent", "unix": 1.0, "transfers": entries}).encode()


def records(*entries: Any, rank: str = "rank 0") -> list[Any]:
    found = read_records(answer(*entries), rank)
    assert found is not None
    return found


def test_both_sides_are_joined_by_key_in_the_order_of_prefill() -> None:
    prefill = records(entry("prefill", "b", started=20), entry("prefill", "a", started=30), entry("prefill", "alone"))
    decode = records(entry("decode", "a"), entry("decode", "b"), entry("decode", "other"))
    assert [transfer.prefill.key for transfer in join(prefill, decode)] == ["b", "a"]


def test_of_all_ranks_the_last_one_counts() -> None:
    slow = records(entry("prefill", step=0.5), rank="rank 1")
    fast = records(entry("prefill", step=0.1), rank="rank 0")
    decode = records(entry("decode"), rank="rank 0") + records(entry("decode", step=2.0), rank="rank 3")
    for prefill in (slow + fast, fast + slow):
        [transfer] = join(prefill, decode)
        assert transfer.prefill.rank == "rank 1"
        assert transfer.prefill.spent("posted", "completed") == pytest.approx(0.5)
        assert transfer.decode.ended_unix == pytest.approx(104.0)


def test_what_was_there_before_the_cell_is_left_out_whatever_the_clocks_say() -> None:
    old = records(entry("prefill", "old", started=900.0))
    new = records(entry("prefill", "new", started=50.0))
    decode = records(entry("decode", "old"), entry("decode", "new"))
    known = {record.identity for record in old}
    assert [transfer.prefill.key for transfer in join(old + new, decode, known)] == ["new"]


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "failed"},
        {"outcome": None},
        {"side": "router"},
        {"side": []},
        {"key": ""},
        {"key": "x" * 257},
        {"key": 3},
        {"attempt": "1"},
        {"started_unix": None},
        {"started_unix": -1},
        {"started_unix": 10**400},
        {"started_unix": math.nan},
        {"stages": []},
        {"stages": {"prefilling": 0.0}},
        {"stages": dict.fromkeys(PATHS["prefill"], True)},
        {"stages": dict(zip(PATHS["prefill"], (0.0, 0.2, 0.1, 0.3, 0.4), strict=True))},
        {"stages": dict(zip(PATHS["prefill"], (0.0, 0.1, 0.2, 0.3, math.inf), strict=True))},
    ],
)
def test_a_record_that_is_not_whole_is_left_out(change: dict[str, Any]) -> None:
    assert len(records(entry("prefill"), {**entry("prefill"), **change})) == 1


@pytest.mark.parametrize("body", [None, b"", b"[]", b"null", b'{"transfers": 3}', b"<html>", b"[" * 100_000])
def test_no_ledger_is_not_an_empty_one(body: bytes | None) -> None:
    assert read_records(body, "rank 0") is None


def test_what_is_read_is_bounded() -> None:
    assert len(records(*[entry("decode", str(number)) for number in range(RECORDS_LIMIT + 5)])) == RECORDS_LIMIT
    assert read_records(b" " * (TRANSFERS_LIMIT + 1), "rank 0") is None


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_CHANGES = st.dictionaries(st.sampled_from([*entry("prefill")]), _VALUES, max_size=3)
_ENTRIES = st.builds(lambda side, change: {**entry(side), **change}, st.sampled_from([*PATHS]), _CHANGES) | _VALUES


@given(st.lists(_ENTRIES, max_size=6))
def test_wild_records_never_raise_and_stay_in_order(entries: list[Any]) -> None:
    found = records(*entries)
    for transfer in join([r for r in found if r.side == "prefill"], [r for r in found if r.side == "decode"]):
        assert transfer.prefill.spent("ready", "completed") >= 0
        assert transfer.decode.spent("allocated", "received") >= 0


@given(st.binary(max_size=200))
def test_garbage_never_raises(body: bytes) -> None:
    read_records(body, "rank 0")
