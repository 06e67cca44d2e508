import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.lifecycle.nodes import HttpResponse
from pdctl.lifecycle.ranks import judge_ledgers, read_health, read_records, worst


def answer(body: object, status: int = 200) -> HttpResponse:
    return HttpResponse(status, body if isinstance(body, str) else json.dumps(body), 0.0, None)


def health(state: str, **more: object) -> HttpResponse:
    writer = {"alive": True, "state": state, "op": None, "heartbeat_age_s": 0.1, "loops": 3, **more}
    return answer({"writer": writer, "transfers": {"inflight": 2, "oldest_s": 1.5}})


def test_a_beating_writer_is_well() -> None:
    rank = read_health(3, health("busy"))
    assert rank.well
    assert (rank.rank, rank.state, rank.inflight, rank.oldest_s, rank.trouble) == (3, "busy", 2, 1.5, "")


def test_a_stuck_writer_says_where_and_since_when() -> None:
    rank = read_health(0, health("stuck", op="transfer", heartbeat_age_s=12.3, last_error="prefill: boom"))
    assert not rank.well
    assert rank.trouble == (
        "the writer of rank 0 is stuck in NIXL's transfer, last beat 12.3 s ago; its last error: prefill: boom"
    )


def test_no_answer_is_silent_and_says_why() -> None:
    rank = read_health(1, HttpResponse(None, "", 0.0, "refused: connection refused"))
    assert (rank.state, rank.well) == ("silent", False)
    assert "refused" in rank.trouble


@pytest.mark.parametrize("body", ["", "[]", "null", '{"writer": 3}', '{"writer": {"state": 1}}', "<html>"])
def test_nonsense_is_silent(body: str) -> None:
    assert read_health(0, answer(body)).state == "silent"


def test_the_worst_rank_is_shown() -> None:
    ranks = [read_health(0, health("idle")), read_health(1, health("dead")), read_health(2, health("stuck"))]
    found = worst(ranks)
    assert found is not None
    assert found.state == "dead"
    assert worst([]) is None


def record(side: str, **changes: object) -> dict[str, object]:
    stages = {
        "decode": ("allocated", "registered", "received"),
        "prefill": ("prefilling", "ready", "matched", "posted", "completed"),
    }[side]
    return {"key": "k", "tokens": 300, "outcome": stages[-1], "stages": dict.fromkeys(stages, 0.1), **changes}


def test_a_whole_way_in_both_ledgers_is_proof() -> None:
    assert judge_ledgers([record("prefill")], [record("decode")], 300) == []


@pytest.mark.parametrize(
    ("prefill", "decode", "missing"),
    [
        ([], [record("decode")], "prefill's ledger has no completed"),
        ([record("prefill")], [], "decode's ledger has no received"),
        ([record("prefill")], [record("decode", tokens=299)], "of 300 tokens"),
        ([record("prefill", key="other")], [record("decode")], "with the key that decode received"),
        ([record("prefill", outcome="failed")], [record("decode")], "no completed"),
        ([record("prefill", stages={"ready": 0.0, "completed": 1.0})], [record("decode")], "lacks matched, posted"),
    ],
)
def test_each_gap_is_named(prefill: list, decode: list, missing: str) -> None:
    [said] = judge_ledgers(prefill, decode, 300)
    assert missing in said


@given(st.text(max_size=200))
def test_any_answer_is_survived(body: str) -> None:
    read_health(0, answer(body))
    read_records([answer(body)])


@pytest.mark.slow
@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda c: st.lists(c) | st.dictionaries(st.text(), c))
)
def test_any_json_is_survived(value: object) -> None:
    read_health(0, answer(value))
    judge_ledgers(read_records([answer({"transfers": value})]), read_records([answer(value)]), 5)
