"""What both sides know of a transfer, put together."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdctl.watch.poll_join import RankLedger, join, unlisted
from pdctl.watch.poll_records import EndedRecords, Record

NOW = 1000.0


def made(side: str, key: str = "k", **fields: Any) -> Record:
    """A record; in flight and read just now unless told otherwise."""
    instance = f"{side}-0"
    return Record(
        **{
            "instance": instance,
            "rank": 0,
            "engine_id": f"engine-{fields.get('instance', instance)}",
            "read_at": NOW,
            "begun_at": NOW - 5,
            "side": side,
            "key": key,
            "attempt": 0,
            "stage": "registered" if side == "decode" else "posted",
            "outcome": "",
            "reason": "",
            "age_s": 5.0,
            "stage_age_s": 4.0,
            "stages": {},
            "started_unix": 77.0,
            "request_id": "",
            "peer": "",
            "tokens": 1,
            "blocks": 1,
            "descriptors": 1,
            "bytes": 1,
            **fields,
        }
    )


def joined(*records: Record, now: float = NOW, engines: tuple[str, ...] = (), **limits: int):
    """Join records: those with an outcome are ended ones."""
    ended = EndedRecords()
    ledgers: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        if record.outcome:
            ended.add(record)
        else:
            ledgers.setdefault((record.instance, record.rank), []).append(record)
    return join(
        [RankLedger(*place, tuple(held)) for place, held in ledgers.items()], ended, now=now, engines=engines, **limits
    )


def test_both_sides_of_a_key() -> None:
    (view,), dropped = joined(made("decode", peer="engine-prefill-0"), made("prefill"))
    assert [(one.instance, one.stage) for one in (*view.prefill, *view.decode)] == [
        ("prefill-0", "posted"),
        ("decode-0", "registered"),
    ]
    assert dropped == 0


def test_one_side_has_no_record() -> None:
    (view,), _ = joined(made("decode", peer="engine-prefill-0"), engines=("engine-prefill-0",))
    assert (view.prefill, len(view.decode)) == ((), 1)


def test_ages_are_those_of_the_snapshot() -> None:
    (view,), _ = joined(made("decode", read_at=NOW - 3), now=NOW)
    one = view.decode[0]
    assert (one.age_s, one.stage_age_s, one.reading_age_s) == (8.0, 7.0, 3.0)


def test_what_has_ended_does_not_age() -> None:
    (view,), _ = joined(made("prefill", outcome="completed", read_at=NOW - 3))
    assert (view.prefill[0].age_s, view.prefill[0].reading_age_s) == (5.0, 3.0)
    assert not view.in_flight


def test_prefill_has_ended_and_decode_waits() -> None:
    (view,), _ = joined(made("decode", peer="engine-prefill-0"), made("prefill", outcome="completed"))
    assert view.in_flight
    assert (view.prefill[0].outcome, view.decode[0].outcome) == ("completed", "")


def test_the_latest_attempt_of_decode() -> None:
    records = [
        made("decode", attempt=4, begun_at=NOW - 9, outcome="failed"),
        made("decode", attempt=7, begun_at=NOW - 2),
    ]
    (view,), _ = joined(*records)
    assert [one.attempt for one in view.decode] == [7]


def test_an_older_attempt_that_is_in_quarantine_hides_no_later_one() -> None:
    records = [
        made("decode", attempt=7, outcome="received", begun_at=NOW - 2),
        made("decode", attempt=4, begun_at=NOW - 9),
    ]
    (view,), _ = joined(*records)
    assert [(one.attempt, one.outcome) for one in view.decode] == [(7, "received")]


def test_another_decode_instance_took_over() -> None:
    records = [
        made("decode", attempt=90, begun_at=NOW - 9),
        made("decode", instance="decode-1", attempt=1, begun_at=NOW - 1),
    ]
    (view,), _ = joined(*records)
    assert [one.instance for one in view.decode] == ["decode-1"]


def test_the_prefill_engine_that_decode_waits_for() -> None:
    records = [
        made("decode", peer="engine-prefill-1"),
        made("prefill", begun_at=NOW - 1, peer="engine-decode-0"),
        made("prefill", instance="prefill-1"),
    ]
    engines = ("engine-prefill-0", "engine-prefill-1", "engine-decode-0")
    (view,), _ = joined(*records, engines=engines)
    assert [one.instance for one in view.prefill] == ["prefill-1"]
    # The registration was lost there: an earlier try at another instance must not hide that.
    (view,), _ = joined(*records[:2], engines=engines)
    assert view.prefill == ()


def test_prefill_was_restarted_since() -> None:
    record = made("prefill", engine_id="old", peer="engine-decode-0", outcome="failed")
    (view,), _ = joined(made("decode", peer="old"), record, engines=("new", "engine-decode-0"))
    assert [one.outcome for one in view.prefill] == ["failed"]


def test_decode_is_absent() -> None:
    records = [made("prefill", begun_at=NOW - 9, outcome="cancelled"), made("prefill", instance="prefill-1")]
    (view,), _ = joined(*records)
    assert ([one.instance for one in view.prefill], view.decode) == (["prefill-1"], ())


def test_every_rank_has_its_own_record() -> None:
    records = [made("prefill", rank=rank) for rank in (2, 0, 1)] + [made("decode", rank=rank) for rank in range(2)]
    (view,), _ = joined(*records)
    assert ([one.rank for one in view.prefill], [one.rank for one in view.decode]) == ([0, 1, 2], [0, 1])


def test_a_list_that_could_not_be_read_again_does_not_hide_an_end() -> None:
    (view,), _ = joined(made("prefill", read_at=NOW - 60), made("prefill", outcome="completed"))
    assert not view.in_flight
    # The same key and attempt once more is another transfer.
    (view,), _ = joined(made("prefill", started_unix=99.0), made("prefill", outcome="completed"))
    assert view.in_flight


def test_order_and_limits() -> None:
    waiting = [made("decode", key=f"w{n}", begun_at=NOW - n) for n in range(10)]
    over = [made("decode", key=f"e{n}", outcome="received") for n in range(10)]
    views, dropped = joined(*waiting, *over, inflight_limit=3, ended_limit=2)
    assert [view.key for view in views] == ["w9", "w8", "w7", "e9", "e8"]
    assert dropped == 7


def test_what_no_rank_listed() -> None:
    ledgers = [
        RankLedger("prefill-0", 0, (), 5),
        RankLedger("prefill-0", 1, (), 7),
        RankLedger("prefill-1", 0, (), 1),
        RankLedger("decode-0", 0, (), 3),
    ]
    assert unlisted(ledgers, {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}) == 8


def test_ended_records_are_bounded_but_for_what_is_needed() -> None:
    ended = EndedRecords(limit=10)
    for number in range(100):
        ended.add(made("prefill", key=f"k{number}", outcome="completed"))
        ended.trim({"k3"})
    assert len(ended) <= 11
    assert ended.of("k3")
    assert next(iter(ended.latest_first())) == "k99"


RECORDS = st.lists(
    st.builds(
        made,
        st.sampled_from(["prefill", "decode"]),
        st.sampled_from(["a", "b", "c"]),
        rank=st.integers(0, 2),
        attempt=st.integers(0, 3),
        instance=st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1"]),
        outcome=st.sampled_from(["", "", "failed"]),
        begun_at=st.floats(0, NOW),
        peer=st.sampled_from(["", "engine-prefill-0", "engine-decode-0"]),
    ),
    max_size=20,
)


@given(RECORDS, st.integers(0, 4), st.integers(0, 4))
def test_whatever_the_ledgers_say(records: list[Record], inflight_limit: int, ended_limit: int) -> None:
    views, dropped = joined(*records, inflight_limit=inflight_limit, ended_limit=ended_limit)
    keys = [view.key for view in views]
    assert len(set(keys)) == len(keys) <= inflight_limit + ended_limit
    assert dropped >= 0
    order = [view.in_flight for view in views]
    assert order == sorted(order, reverse=True)
    for view in views:
        places = [(one.instance, one.rank) for one in view.decode]
        assert len(set(places)) == len(places)
        assert len({(one.instance, one.attempt) for one in view.decode}) <= 1
