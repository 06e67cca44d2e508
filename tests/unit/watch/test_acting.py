"""Whether ``--on-stall`` acts, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.watch.acting import (
    AFTERMATH_S,
    HOUR_S,
    LASTING_S,
    PATIENCE_S,
    ActingSettings,
    Action,
    ActionEvent,
    Decider,
    Decision,
    Fold,
    action_json,
    action_words,
)
from pdctl.watch.alerts import Alert
from pdctl.watch.book import Watchdog
from pdctl.watch.rules import CODES
from pdctl.watch.settings import WatchSettings
from pdctl.watch.snapshot import InstanceView, Snapshot
from tests.unit.watch.frames import DECODE, PREFILL, RANK, RECORD, SNAPSHOT, TransferView

LONG = 1000.0


def cluster(prefills: int = 1, decodes: int = 1, **changes: InstanceView) -> Snapshot:
    made = [replace(PREFILL, name=f"prefill-{n}") for n in range(prefills)]
    made += [replace(DECODE, name=f"decode-{n}") for n in range(decodes)]
    made.append(InstanceView("router", "router", "h1", "http://r", process="running", healthy=True))
    return replace(
        SNAPSHOT, instances=tuple(changes.get(one.name.replace("-", "_"), one) for one in made), transfers=()
    )


def alert(code: str, *instances: str, lasted_s: float = LONG, more: int = 0, opened: float = 1.0) -> Alert:
    subject = ">".join(instances) if code[0] == "T" else f"{instances[0]}/rank 0"
    symptom = CODES[code].symptom(subject, f"{code} of {subject}", "", instances=instances)
    return Alert(symptom, opened, lasted_s, folded=(symptom,) * more, present_s=lasted_s)


def at(snapshot: Snapshot, seconds: float) -> Snapshot:
    """The same picture at another time of both clocks."""
    return replace(snapshot, at=seconds, unix=SNAPSHOT.unix - SNAPSHOT.at + seconds)


def decide(
    action: Action, snapshot: Snapshot, *alerts: Alert, decider: Decider | None = None
) -> tuple[tuple[str, ...] | None, list[ActionEvent]]:
    made = decider or Decider(ActingSettings(action))
    decision, events = made.decide(snapshot, alerts)
    assert [event.outcome for event in events] == (["begun"] if decision else ["refused"] * len(events))
    return (decision.instances if decision else None), events


@pytest.mark.parametrize("code", ["T005", "T006", "T007", "T008", "T009", "T010", "T012", "T014", "T016"])
def test_what_a_restart_does_not_cure_is_left_alone(code: str) -> None:
    assert decide("restart-pair", cluster(), alert(code, "prefill-0", "decode-0")) == (None, [])


@pytest.mark.parametrize("code", ["E001", "E002", "E003", "E004", "E005", "W004"])
def test_nor_is_what_is_no_stall(code: str) -> None:
    assert decide("restart-writer-side", cluster(), alert(code, "prefill-0")) == (None, [])


@pytest.mark.parametrize("code", ["W001", "W002", "W003"])
def test_a_writer_is_restarted_once_its_alert_has_lasted(code: str) -> None:
    early = alert(code, "decode-0", lasted_s=PATIENCE_S[code] - 0.1)
    assert decide("restart-writer-side", cluster(), early) == (None, [])
    assert decide("restart-writer-side", cluster(), replace(early, present_s=PATIENCE_S[code]))[0] == ("decode-0",)


def test_an_alert_that_is_not_seen_now_is_no_reason() -> None:
    assert decide("restart-pair", cluster(), replace(alert("W001", "prefill-0"), unseen_s=1.0)) == (None, [])


@pytest.mark.parametrize("code", ["T001", "T002", "T003", "T004"])
def test_one_lost_transfer_is_too_little_several_or_a_lasting_alert_are_enough(code: str) -> None:
    def of(lasted_s: float, more: int) -> tuple[str, ...] | None:
        stalled = alert(code, "prefill-0", "decode-0", lasted_s=lasted_s, more=more)
        return decide("restart-pair", cluster(), stalled)[0]

    assert of(LASTING_S - 1, 0) is None
    assert of(LASTING_S - 1, 1) is None
    assert of(PATIENCE_S[code] - 1, 9) is None
    assert of(PATIENCE_S[code], 2) == ("prefill-0", "decode-0")
    assert of(LASTING_S, 0) == ("prefill-0", "decode-0")


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("restart-pair", ("prefill-0", "decode-0")),
        ("restart-writer-side", ("prefill-0",)),
        ("drain", ("prefill-0",)),
    ],
)
def test_the_instances_of_each_action(action: Action, expected: tuple[str, ...]) -> None:
    assert decide(action, cluster(2, 2), alert("T002", "prefill-0", "decode-0"))[0] == expected


def test_a_stuck_writer_and_the_one_other_end_of_its_transfers_are_the_pair() -> None:
    stuck = alert("W002", "prefill-1")

    def folded(*decodes: str) -> Alert:
        return replace(stuck, folded=tuple(alert("T002", "prefill-1", one).symptom for one in decodes))

    assert decide("restart-pair", cluster(2, 2), folded("decode-0"))[0] == ("prefill-1", "decode-0")
    assert decide("restart-pair", cluster(2, 2), folded("decode-0", "decode-1"))[0] == ("prefill-1",)
    assert decide("restart-pair", cluster(2, 2), stuck)[0] == ("prefill-1",)


def test_what_several_pairs_have_in_common_is_at_fault() -> None:
    reader = [alert("T002", f"prefill-{n}", "decode-1") for n in range(3)]
    assert decide("restart-pair", cluster(3, 3), *reader)[0] == ("decode-1",)
    assert decide("drain", cluster(3, 3), *reader)[0] == ("decode-1",)
    instances, (event,) = decide("restart-writer-side", cluster(3, 3), *reader)
    assert instances is None
    assert "decode-1 in common" in event.detail
    writer = [alert("T002", "prefill-1", f"decode-{n}") for n in range(3)]
    for action in ("restart-pair", "restart-writer-side", "drain"):
        assert decide(action, cluster(3, 3), *writer)[0] == ("prefill-1",)  # type: ignore[arg-type]


def test_a_fault_of_the_whole_cluster_is_told_once_and_not_acted_upon() -> None:
    wide = [alert("T002", "prefill-0", "decode-0"), alert("T002", "prefill-1", "decode-1")]
    decider = Decider(ActingSettings("restart-pair"))
    instances, (event,) = decide("restart-pair", cluster(2, 2), *wide, decider=decider)
    assert instances is None
    assert "whole cluster" in event.detail
    assert decide("restart-pair", cluster(2, 2), *wide, decider=decider) == (None, [])
    # The same alert that opened anew is told of anew.
    again = [replace(one, opened_unix=99.0) for one in wide]
    assert len(decide("restart-pair", cluster(2, 2), *again, decider=decider)[1]) == 1


def test_nothing_is_taken_out_beside_one_that_is_out_already() -> None:
    down = replace(PREFILL, name="prefill-1", process="exited", healthy=None)
    instances, (event,) = decide("restart-writer-side", cluster(2, 2, prefill_1=down), alert("W001", "prefill-0"))
    assert instances is None
    assert event.instances == ("prefill-0",)
    assert "prefill-0, prefill-1" in event.detail
    both = [alert("W001", "prefill-0"), alert("W001", "prefill-1")]
    assert decide("restart-writer-side", cluster(2, 2), *both)[0] is None
    gone = alert("E003", "prefill-1")
    assert decide("restart-writer-side", cluster(2, 2), alert("W001", "prefill-0"), gone)[0] is None
    # Nor beside one of the other role: no restart could be proven.
    for gone in (alert("E001", "decode-1"), alert("E003", "decode-1")):
        instances, (event,) = decide("restart-pair", cluster(2, 2), alert("W001", "prefill-0"), gone)
        assert instances is None
        assert event.detail == "decode-1 is out: first see to that (pdctl up)"


@pytest.mark.parametrize(
    ("process", "healthy", "others_healthy", "acts"),
    [
        ("running", True, True, True),
        ("exited", None, True, False),
        ("running", False, True, False),
        # It may miss the very instance that is to be restarted.
        ("running", False, None, True),
    ],
)
def test_nothing_is_done_while_the_router_is_out(
    process: str, healthy: bool | None, others_healthy: bool | None, acts: bool
) -> None:
    router = InstanceView("router", "router", "h1", "http://r", process=process, healthy=healthy)  # type: ignore[arg-type]
    seen = cluster(router=router, prefill_0=replace(PREFILL, healthy=others_healthy))
    instances, events = decide("restart-writer-side", seen, alert("W001", "prefill-0"))
    assert bool(instances) is acts
    assert acts or "the router is out" in events[0].detail


@pytest.mark.parametrize(("age_s", "acts"), [(299.0, False), (301.0, True), (-5.0, False)])
def test_what_was_started_within_the_cool_down_is_left_alone(age_s: float, acts: bool) -> None:
    seen = cluster(prefill_0=replace(PREFILL, started_unix=SNAPSHOT.unix - age_s))
    instances, events = decide("restart-writer-side", seen, alert("W001", "prefill-0"))
    assert bool(instances) is acts
    assert acts or "by this watch or by somebody else" in events[0].detail


def test_a_symptom_that_comes_and_goes_is_no_reason_however_long_its_alert_is_open() -> None:
    blips = replace(alert("W002", "prefill-0"), present_s=PATIENCE_S["W002"] - 1)
    assert decide("restart-writer-side", cluster(), blips) == (None, [])
    stalled = replace(alert("T002", "prefill-0", "decode-0"), present_s=LASTING_S - 1)
    assert decide("restart-pair", cluster(), stalled) == (None, [])


def test_a_writer_that_hangs_for_seconds_in_every_minute_is_never_restarted() -> None:
    watchdog, decider = Watchdog(WatchSettings()), Decider(ActingSettings("restart-writer-side"))
    longest_s = 0.0
    for second in range(400):
        age_s = 0.1 if second % 55 < 47 else second % 55 - 47 + 0.1
        ranks = (replace(RANK, heartbeat_age_s=age_s),)
        seen = replace(SNAPSHOT, transfers=(), instances=(replace(PREFILL, ranks=ranks), DECODE), tick=second)
        alerts, _ = watchdog.look(at(seen, 1000.0 + second))
        assert decider.decide(at(seen, 1000.0 + second), alerts) == (None, [])
        longest_s = max([longest_s, *(one.duration_s for one in alerts)])
    assert longest_s > 2 * PATIENCE_S["W002"], "its alert is held open from one time to the next"


@pytest.mark.parametrize(
    ("steps_s", "unix_s", "interval_s"),
    [
        ([1, 1, 1, 600], [1, 1, 1, 600], 1.0),
        # The monotonic clock stood still, as in a suspended machine.
        ([1, 1, 1, 1], [1, 1, 1, 600], 1.0),
        ([10, 10, 10, 31], [10, 10, 10, 31], 10.0),
    ],
)
def test_after_a_gap_what_was_seen_before_it_counts_no_more(
    steps_s: list[float], unix_s: list[float], interval_s: float
) -> None:
    decider = Decider(ActingSettings("restart-writer-side", interval_s=interval_s))
    now, unix = 1000.0, SNAPSHOT.unix
    stuck = alert("W002", "prefill-0")
    for step_s, step_unix_s in zip(steps_s, unix_s, strict=True):
        early = replace(stuck, present_s=1.0)
        assert decider.decide(replace(cluster(), at=now, unix=unix), [early]) == (None, [])
        now, unix = now + step_s, unix + step_unix_s
    assert decider.decide(replace(cluster(), at=now, unix=unix), [stuck]) == (None, [])
    ripe_at = now + PATIENCE_S["W002"]
    while now < ripe_at - 1:
        now, unix = now + 1, unix + 1
        assert decider.decide(replace(cluster(), at=now, unix=unix), [stuck])[0] is None
    assert decider.decide(replace(cluster(), at=now + 1, unix=unix + 1), [stuck])[0] is not None


def test_a_slow_pace_is_no_gap() -> None:
    decider = Decider(ActingSettings("restart-writer-side"))
    decider.set_interval(30.0)
    decider.decide(at(cluster(), 1000.0), [])
    assert decider.decide(at(cluster(), 1060.0), [alert("W002", "prefill-0")])[0] is not None


def test_an_alert_that_has_another_cure_holds_up_no_other() -> None:
    seen = cluster(2, 2, decode_0=replace(DECODE, stopped=("gdb 1",)))
    instances, events = Decider(ActingSettings("restart-writer-side")).decide(
        seen, [alert("W003", "decode-0"), alert("W002", "prefill-1")]
    )
    assert instances is not None
    assert instances.instances == ("prefill-1",)
    assert [(event.outcome, event.because.code) for event in events] == [("refused", "W003"), ("begun", "W002")]
    # What is out beside it still counts.
    both = [alert("W003", "prefill-0"), alert("W002", "prefill-1")]
    stopped = cluster(2, 2, prefill_0=replace(PREFILL, stopped=("gdb 1",)))
    assert decide("restart-writer-side", stopped, *both)[0] is None


def test_a_stall_beside_a_stuck_writer_is_another_fault() -> None:
    found = [alert("W001", "prefill-0"), alert("T002", "prefill-1", "decode-1")]
    assert decide("restart-writer-side", cluster(2, 2), *found)[0] is None


def test_instances_that_fail_with_everybody() -> None:
    assert decide("restart-pair", cluster(2, 2), alert("T015", "decode-1"))[0] == ("decode-1",)
    assert decide("restart-writer-side", cluster(2, 2), alert("T015", "prefill-1"))[0] == ("prefill-1",)
    assert decide("restart-writer-side", cluster(2, 2), alert("T015", "decode-1"))[0] is None
    two = [alert("T015", "prefill-0"), alert("T015", "prefill-1")]
    assert decide("restart-pair", cluster(2, 2), *two)[0] is None


def test_a_rank_that_somebody_has_stopped_is_not_restarted() -> None:
    for change, words in (
        ({"stopped": ("VLLM::Worker 77",)}, "kill -CONT"),
        ({"ranks": (replace(RANK, process="stopped"),)}, "kill -CONT"),
        ({"ranks": (replace(RANK, process="zombie"),)}, "pdctl up"),
        ({"process": None}, "not known"),
    ):
        seen = cluster(prefill_0=replace(PREFILL, **change))  # type: ignore[arg-type]
        instances, (event,) = decide("restart-writer-side", seen, alert("W003", "prefill-0"))
        assert instances is None
        assert words in event.detail


def test_of_a_pair_the_one_that_works_with_nobody_is_drained() -> None:
    done = RECORD.__class__(**{**vars(RECORD), "outcome": "completed", "instance": "prefill-0"})
    got = RECORD.__class__(**{**vars(RECORD), "outcome": "received", "instance": "decode-1"})
    seen = replace(cluster(2, 2), transfers=(TransferView("k", (done,), (got,)),))
    assert decide("drain", seen, alert("T002", "prefill-0", "decode-0"))[0] == ("decode-0",)


def test_the_last_of_its_role_is_not_drained() -> None:
    instances, (event,) = decide("drain", cluster(1, 2), alert("W002", "prefill-0"))
    assert instances is None
    assert "last prefill" in event.detail


def test_what_was_drained_counts_as_out() -> None:
    decider = Decider(ActingSettings("drain", limit=9, cool_down_s=0, interval_s=100.0))
    assert decide("drain", cluster(3, 3), alert("W002", "prefill-0"), decider=decider)[0] == ("prefill-0",)
    decider.ended(SNAPSHOT.at, succeeded=True)
    later = at(cluster(3, 3), SNAPSHOT.at + AFTERMATH_S + 1)
    instances, (event,) = decide("drain", later, alert("W002", "prefill-1"), decider=decider)
    assert instances is None
    assert "prefill-0, prefill-1" in event.detail
    # Out of the router is out of the router: once is enough.
    instances, (event,) = decide("drain", later, alert("W002", "prefill-0", opened=7.0), decider=decider)
    assert instances is None
    assert "prefill-0 is out of the router already" in event.detail


@pytest.mark.parametrize("who", ["prefill_0", "router"])
@pytest.mark.parametrize("change", [{"pid": 77}, {"started_unix": 5.0}])
def test_another_router_or_another_process_is_drained_anew(who: str, change: dict[str, Any]) -> None:
    router = InstanceView("router", "router", "h1", "http://r", process="running", healthy=True)
    whole = {"prefill_0": PREFILL, "router": router}
    seen = {name: replace(one, pid=5, started_unix=3.0) for name, one in whole.items()}
    decider = Decider(ActingSettings("drain", limit=9, cool_down_s=0, interval_s=100))
    assert decide("drain", cluster(3, 3, **seen), alert("W002", "prefill-0"), decider=decider)[0]
    decider.ended(SNAPSHOT.at, succeeded=True)
    # Nobody says what they are: they may be the same.
    unknown = {name: replace(one, pid=None, started_unix=None) for name, one in seen.items()}
    now = SNAPSHOT.at + 100
    assert not decide("drain", at(cluster(3, 3, **unknown), now), alert("W002", "prefill-0"), decider=decider)[0]
    seen[who] = replace(seen[who], **change)
    found = alert("W002", "prefill-0", opened=8.0)
    assert decide("drain", at(cluster(3, 3, **seen), now + 1), found, decider=decider)[0] == ("prefill-0",)


def test_a_dry_run_says_what_it_would_do_and_counts_it() -> None:
    decider = Decider(ActingSettings("restart-pair", dry_run=True))
    stalled = alert("T002", "prefill-0", "decode-0")
    decision, (event,) = decider.decide(cluster(), [stalled])
    assert (decision, event.outcome, event.instances) == (None, "dry-run", ("prefill-0", "decode-0"))
    decider.set_interval(AFTERMATH_S)
    later = at(cluster(), SNAPSHOT.at + AFTERMATH_S + 1)
    decision, (event,) = decider.decide(later, [stalled])
    assert (decision, event.outcome) == (None, "refused")
    assert "left alone" in event.detail


Step = tuple[float, bool, int, bool]


@given(
    steps=st.lists(
        st.tuples(st.floats(0.1, 900), st.booleans(), st.integers(0, 5), st.booleans()), min_size=1, max_size=60
    ),
    limit=st.integers(1, 4),
    cool_down_s=st.floats(0, 2000),
    action=st.sampled_from(["restart-pair", "restart-writer-side", "drain"]),
)
def test_never_more_than_the_limit_nor_too_soon_nor_two_at_once(
    steps: Sequence[Step], limit: int, cool_down_s: float, action: Action
) -> None:
    decider = Decider(ActingSettings(action, limit=limit, cool_down_s=cool_down_s, interval_s=1000.0))
    now, running = 0.0, None
    begun: list[float] = []
    ended: dict[str, float] = {}
    for gap_s, ends, which, succeeded in steps:
        now += gap_s
        if running is not None and ends:
            decider.ended(now, succeeded=succeeded)
            ended.update(dict.fromkeys(running.instances, now))
            running = None
        one = f"prefill-{which % 3}" if which < 3 else f"decode-{which % 3}"
        found = alert("W001", one, opened=now)
        decision, events = decider.decide(at(cluster(4, 4), now), [found])
        if decision is None:
            assert all(event.outcome == "refused" for event in events)
            continue
        assert isinstance(decision, Decision)
        assert running is None
        assert len({name.split("-")[0] for name in decision.instances}) == len(decision.instances)
        assert all(now - ended.get(name, float("-inf")) >= cool_down_s for name in decision.instances)
        running = decision
        begun.append(now)
        assert sum(now - at < HOUR_S for at in begun) <= limit


def test_what_an_action_causes_is_folded_until_its_time_is_over() -> None:
    fold = Fold()
    covered = frozenset({"prefill-0"})
    down, other = alert("E001", "prefill-0"), alert("E001", "decode-0")
    assert not fold.opened(down, covered)
    assert fold.opened(other, covered)
    assert (fold.tells(down), fold.tells(other)) == (False, True)
    assert fold.surfacing([down, other], covered) == []
    assert fold.take() == (("E001", "prefill-0/rank 0"),)
    # It is still there when nothing is done any more: then it is news.
    assert fold.surfacing([down, other], frozenset()) == [down]
    assert fold.tells(down)
    assert fold.closed(down)
    assert not fold.opened(down, covered)
    assert not fold.closed(down)
    assert fold.tells(down)
    # It was told by itself after all, and is no part of an action any more; nor of the next one.
    assert fold.take() == (("E001", "prefill-0/rank 0"),)
    assert fold.opened(alert("E004", "decode-0"), covered)
    assert not fold.opened(alert("E004", "prefill-0"), covered)
    assert fold.surfacing([alert("E004", "prefill-0")], frozenset()) != []
    assert fold.take() == ()
    assert not fold.opened(alert("E002", "prefill-0"), covered)
    fold.begin()
    assert fold.take() == ()
    # What is about the other end as well, or is no consequence of a restart, is told.
    assert fold.opened(alert("T002", "prefill-0", "decode-0"), covered)


def test_of_the_router_only_its_health_check_is_part_of_an_action() -> None:
    fold, covered, routers = Fold(), frozenset({"prefill-0"}), frozenset({"router"})
    unwell = alert("E001", "router")
    assert not fold.opened(unwell, covered, routers)
    assert fold.opened(alert("E002", "router"), covered, routers)
    # Its process has ended meanwhile.
    assert fold.surfacing([unwell], covered, frozenset()) == [unwell]
    assert Fold().opened(unwell, covered, frozenset())


def test_the_words_and_the_json_of_an_action() -> None:
    _, (event,) = decide("restart-pair", cluster(), alert("T002", "prefill-0", "decode-0"))
    done = replace(event, outcome="done", took_s=12.34567, detail="ready\x1b[2J", folded=(("E001", "prefill-0"),))
    assert action_json(done, SNAPSHOT) == {
        "schema": 1,
        "kind": "action",
        "event": "action",
        "at": action_json(done, SNAPSHOT)["at"],
        "unix": SNAPSHOT.unix,
        "cluster": SNAPSHOT.cluster,
        "action": "restart-pair",
        "instances": ["prefill-0", "decode-0"],
        "because": {
            "code": "T002",
            "subject": "prefill-0>decode-0",
            "evidence": "T002 of prefill-0>decode-0",
        },
        "outcome": "done",
        "detail": "ready\x1b[2J",
        "took_s": 12.346,
        "folded": [{"code": "E001", "subject": "prefill-0"}],
    }
    line = action_words(done)
    assert line.startswith("ACTION restart-pair of prefill-0, decode-0 done after 12.3 s: ready")
    assert "\x1b" not in line
