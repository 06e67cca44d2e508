import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.counters import Counters, RoleCounters, Total
from pdctl.bench.results import MODES, STAGES, Mode, Sample, StageTimes
from pdctl.bench.stages import stage_times
from pdctl.bench.transfer_records import TransferRecord

NOW = 1_795_991_934.0
TTFT = 1.0


def sample(number: int = 0, *, ttft: float | None = TTFT, error: str = "") -> Sample:
    return Sample(started_unix=NOW + number, ttft_s=ttft, latency_s=2.0, error=error)


def prefill(number: int = 0, *, route: float = 0.02, computed: float = 0.5, transfer: float = 0.03) -> TransferRecord:
    moments = (0.0, computed, computed + 0.001, computed + 0.006, computed + 0.006 + transfer)
    path = ("prefilling", "ready", "matched", "posted", "completed")
    return TransferRecord(
        "prefill-0 rank 0", "prefill", f"k{number}", 0, NOW + number + route, dict(zip(path, moments, strict=True))
    )


def decode(number: int = 0, *, began: float = 0.1, received: float = 0.558) -> TransferRecord:
    """Received by default 2 ms after prefill saw the WRITE complete: 0.02 + 0.536 + 0.002."""
    stages = {"allocated": 0.0, "registered": 0.004, "received": received - began}
    return TransferRecord("decode-0 rank 0", "decode", f"k{number}", number, NOW + number + began, stages)


def counters(
    requests: int,
    *,
    queue: float = 0.2,
    decode_queue: float = 0.4,
    step: float = 0.05,
    moved: float = 0.03,
    ranks: int = 1,
) -> Counters:
    def total(seconds: float, times: int = 1) -> Total:
        return Total(requests * times, requests * times * seconds)

    moving = total(moved, ranks)
    return Counters(
        RoleCounters(queue=total(queue), prefill=total(0.3), transfer=moving),
        RoleCounters(queue=total(decode_queue), prefill=total(step), transfer=moving),
    )


def told(mode: Mode, count: int = 2, counted: Counters | None = None, **changes: Any) -> StageTimes:
    found = stage_times(
        mode,
        [sample(number) for number in range(count)],
        [prefill(number, **changes) for number in range(count)],
        [decode(number) for number in range(count)],
        counted or counters(count),
    )
    assert math.fsum(found.seconds.values()) == pytest.approx(TTFT, abs=1e-9)
    assert list(found.seconds) == [stage for stage in STAGES if stage in found.seconds]
    return found


def test_push_tells_every_stage_but_decode_queue() -> None:
    found = told("push")
    assert found.seconds == pytest.approx(
        {
            "route": 0.02,
            "prefill queue": 0.2,
            "prefill": 0.3,
            "match": 0.001,
            "post": 0.005,
            "transfer": 0.03,
            "notify": 0.002,
            "first decode step": 0.05,
            "rest": 0.392,
        },
        abs=1e-6,
    )
    assert found.beside == pytest.approx({"registration": 0.004, "decode wait": 0.458})
    assert (found.requests, found.notes) == (2, ())


def test_the_queue_is_never_longer_than_the_time_it_is_a_part_of() -> None:
    found = told("push", counted=counters(2, queue=7.0))
    assert (found.seconds["prefill queue"], found.seconds["prefill"]) == (pytest.approx(0.5), pytest.approx(0.0))


def test_without_prefills_queue_time_it_stays_in_prefill() -> None:
    found = told("push", counted=replace(counters(2), prefill=RoleCounters()))
    assert found.seconds["prefill"] == pytest.approx(0.5)
    assert "prefill queue" not in found.seconds
    assert found.notes == ("prefill's queue time is not known: it is part of prefill",)


def test_prefill_that_looks_late_by_less_than_a_millisecond_is_no_clock() -> None:
    # Decode was told 0.5 ms before prefill looked: the WRITE took so much less.
    found = told("push", transfer=0.0325)
    assert found.seconds["notify"] == 0
    assert found.seconds["transfer"] == pytest.approx(0.032, abs=1e-6)
    assert found.notes == ()


@pytest.mark.parametrize(
    ("shift", "which"), [(-0.05, "route would take -30.0 ms"), (0.05, "notify would take -48.0 ms")]
)
def test_clocks_that_disagree_take_no_part(shift: float, which: str) -> None:
    found = told("push", route=0.02 + shift)
    assert "route" not in found.seconds
    assert "notify" not in found.seconds
    assert found.seconds["rest"] == pytest.approx(0.392 + 0.022)
    assert which in found.notes[0]
    assert "chrony" in found.notes[0]


def test_a_clock_that_is_ahead_on_both_hosts_is_seen_by_the_sum() -> None:
    found = stage_times("push", [sample()], [prefill(route=3.02)], [decode(began=3.1, received=3.558)], counters(1))
    assert "route" not in found.seconds
    assert found.seconds["prefill"] == pytest.approx(0.3)
    assert "Do the clocks of the hosts agree?" in found.notes[0]


def test_stages_of_other_requests_are_given_up() -> None:
    found = told("push", computed=30.0)
    assert found.seconds == {"rest": TTFT}
    assert "other requests" in found.notes[-1]


def test_a_little_too_much_is_cut_from_what_another_source_says() -> None:
    found = told("push", counted=counters(2, step=0.05 + 0.3925))
    assert found.seconds["first decode step"] == pytest.approx(0.442, abs=1e-6)
    assert found.seconds["rest"] == pytest.approx(0.0, abs=1e-6)
    assert found.notes == ()


def test_requests_without_records_leave_route_untold() -> None:
    found = stage_times(
        "push", [sample(n) for n in range(3)], [prefill(n) for n in range(1, 3)], [decode(2)], counters(3)
    )
    assert found.requests == 1
    assert "route" not in found.seconds
    assert found.seconds["notify"] == pytest.approx(0.002, abs=1e-6)
    assert "1 of 3 answered requests" in found.notes[0]


def test_transfers_of_failed_requests_are_left_out_by_their_order() -> None:
    samples = [sample(0), sample(1, ttft=None, error="500"), sample(2)]
    records = [prefill(0), prefill(1, computed=9.0), prefill(2)]
    found = stage_times("push", samples, records, [decode(n) for n in (0, 2)] + [decode(1)], counters(3))
    assert found.requests == 2
    assert found.seconds["prefill"] == pytest.approx(0.3)
    assert "2 of which were answered" in found.notes[0]


def test_records_from_before_the_cell_are_none_of_it() -> None:
    old = prefill(0, computed=9.0)
    found = stage_times("push", [sample(1)], [old, prefill(1)], [decode(0), decode(1)], counters(1), {old.identity})
    assert (found.requests, found.notes) == (1, ())
    assert found.seconds["prefill"] == pytest.approx(0.3)


def test_more_transfers_than_requests_are_told() -> None:
    found = stage_times("push", [sample(1)], [prefill(0), prefill(1)], [decode(0), decode(1)], counters(1))
    assert found.requests == 1
    assert found.seconds["route"] == pytest.approx(0.02, abs=1e-6)
    assert "did something else use the cluster?" in found.notes[0]


def test_push_without_ledgers_has_what_vllm_counts() -> None:
    found = stage_times("push", [sample()], [], [], counters(1))
    assert found.seconds == pytest.approx({"first decode step": 0.05, "rest": 0.95})
    assert "no finished transfer" in found.notes[0]


def test_pull_transfers_while_the_request_is_in_decodes_queue() -> None:
    found = told("pull")
    assert found.seconds == pytest.approx(
        {
            "prefill queue": 0.2,
            "prefill": 0.3,
            "transfer": 0.03,
            "decode queue": 0.37,
            "first decode step": 0.05,
            "rest": 0.05,
        }
    )
    assert "cannot be told apart" in found.notes[0]
    assert len(found.notes) == 1


@pytest.mark.parametrize("mode", ["pull", "push-upstream"])
def test_ranks_move_kv_at_the_same_time(mode: Mode) -> None:
    assert told(mode, counted=counters(2, ranks=8)).seconds["transfer"] == pytest.approx(0.03)


def test_a_request_without_transfer_counts_with_none() -> None:
    counted = counters(2)
    counted = replace(counted, decode=replace(counted.decode, transfer=Total(1, 0.03)))
    assert told("pull", counted=counted).seconds["transfer"] == pytest.approx(0.015)


def test_upstream_push_waits_beside_prefill() -> None:
    found = told("push-upstream")
    assert found.seconds == pytest.approx(
        {"prefill queue": 0.2, "prefill": 0.3, "transfer": 0.03, "first decode step": 0.05, "rest": 0.42}
    )
    assert found.beside == pytest.approx({"decode wait": 0.4})


@pytest.mark.parametrize("mode", ["pull", "push-upstream"])
def test_what_was_not_counted_is_rest_and_said(mode: Mode) -> None:
    found = stage_times(mode, [sample()], [], [], Counters())
    assert found.seconds == {"rest": TTFT}
    assert [note for note in found.notes if "not known" in note] == [
        "what prefill counted is not known: its figures are in rest",
        "what decode counted is not known: its figures are in rest",
    ]


def test_other_load_is_told() -> None:
    assert (
        "decode finished 5 requests, and the cell sent 2: its means are over those"
        in told("pull", counted=counters(5)).notes
    )


@pytest.mark.parametrize("mode", MODES)
def test_no_answered_request_has_no_stages(mode: Mode) -> None:
    found = stage_times(mode, [sample(ttft=None, error="refused")], [], [], Counters())
    assert (found.seconds, found.requests, found.notes) == ({}, 0, ("no request was answered",))


_SECONDS = st.floats(0, 1e6)
_SHORT = st.floats(0, 3)


@st.composite
def _totals(draw: st.DrawFn) -> Total | None:
    count = draw(st.integers(0, 9))
    return draw(st.none() | st.builds(Total, st.just(count), _SHORT | _SECONDS))


_ROLES = st.builds(RoleCounters, queue=_totals(), prefill=_totals(), transfer=_totals())
_SAMPLES = st.lists(
    st.builds(
        lambda number, ttft, bad: sample(number, ttft=ttft, error="x" if bad else ""),
        st.integers(0, 5),
        _SHORT | _SECONDS,
        st.booleans(),
    ),
    max_size=5,
)
_PREFILLS = st.lists(
    st.builds(
        lambda number, route, computed, transfer: prefill(number, route=route, computed=computed, transfer=transfer),
        st.integers(0, 5), st.floats(-1e6, 1e6), _SHORT | _SECONDS, _SHORT,
    ),
    max_size=7,
)  # fmt: skip
_DECODES = st.lists(
    st.builds(lambda number, began: decode(number, began=began, received=began + 0.5), st.integers(0, 5), _SHORT),
    max_size=7,
)


@given(st.sampled_from(MODES), _SAMPLES, _PREFILLS, _DECODES, _ROLES, _ROLES)
def test_the_stages_always_add_up_and_none_is_negative(
    mode: Mode,
    samples: list[Sample],
    prefills: list[TransferRecord],
    decodes: list[TransferRecord],
    at_prefill: RoleCounters,
    at_decode: RoleCounters,
) -> None:
    found = stage_times(mode, samples, prefills, decodes, Counters(at_prefill, at_decode))
    firsts = [one.ttft_s for one in samples if one.ok and one.ttft_s is not None]
    if not firsts:
        assert found.seconds == {}
        return
    assert set(found.seconds) <= set(STAGES)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    mean = math.fsum(firsts) / len(firsts)
    assert math.fsum(found.seconds.values()) == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert found.requests <= len(firsts)
