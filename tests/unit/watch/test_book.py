"""The book of alerts: opening, folding, closing, and what flaps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import TWO_PAIRS, instance, rank, ranked, record, snapshot, transfer

from pdctl.watch.alerts import Alert, AlertEvent, Severity
from pdctl.watch.book import FOLDED_LIMIT, History, Watchdog
from pdctl.watch.settings import WatchSettings
from pdctl.watch.snapshot import HostView, InstanceView, Snapshot, TransferView

DEFAULTS = WatchSettings()


def play(snapshots: Iterable[Snapshot], watchdog: Watchdog | None = None) -> tuple[list[Alert], list[str]]:
    """The alerts after the last snapshot, and all events."""
    watchdog = watchdog or Watchdog(DEFAULTS)
    alerts: list[Alert] = []
    told: list[str] = []
    for one in snapshots:
        alerts, events = watchdog.look(one)
        told += [f"{one.tick} {event.kind} {event.alert.symptom.code}" for event in events]
    return alerts, told


def down(name: str = "decode-0", **changes: Any) -> InstanceView:
    return instance(name, healthy=False, health_error="HTTP 503", **changes)


def ill(tick: int, *sick: InstanceView, **changes: Any) -> Snapshot:
    return snapshot(tick, changed=sick, **changes)


def posted(count: int, held: float, first: int = 0, **changes: Any) -> list[TransferView]:
    return [
        transfer(
            f"key-{number}",
            record("prefill-0", "posted", held, **changes),
            record("decode-0", "registered", held, **changes),
        )
        for number in range(first, first + count)
    ]


class TestLife:
    def test_opens_once_and_closes_with_its_duration(self) -> None:
        watchdog = Watchdog(DEFAULTS)
        events: list[AlertEvent] = []
        for tick in range(12):
            _, changes = watchdog.look(ill(tick, *([down()] if 2 <= tick < 8 else [])))
            events += changes
        assert [event.kind for event in events] == ["opened", "closed"]
        opened, closed = (event.alert for event in events)
        assert opened.open
        assert not closed.open
        assert opened.opened_unix == closed.opened_unix == 1_795_000_003.0
        assert closed.duration_s == 6.0

    def test_one_bad_poll_opens_nothing(self) -> None:
        assert play([ill(0), ill(1, down()), ill(2), ill(3, down()), ill(4)])[1] == []

    def test_one_good_poll_closes_nothing(self) -> None:
        _, told = play([ill(0, down()), ill(1, down()), ill(2), ill(3, down()), ill(4)])
        assert told == ["1 opened E001"]

    def test_the_duration_is_of_the_monotonic_clock(self) -> None:
        jumped = [replace(ill(tick, down()), unix=5.0 if tick > 1 else 1e9) for tick in range(5)]
        alerts, _ = play(jumped)
        assert alerts[0].duration_s == 3.0
        assert alerts[0].opened_unix == 1e9

    def test_a_break_ends_for_how_long_it_was_there(self) -> None:
        ticks = [ill(tick, *([] if tick == 4 else [down()])) for tick in range(8)]
        alerts, _ = play(ticks)
        assert (alerts[0].duration_s, alerts[0].present_s) == (6.0, 2.0)
        alerts, _ = play(ticks[:4])
        assert (alerts[0].duration_s, alerts[0].present_s) == (2.0, 2.0)

    def test_worse_is_told(self) -> None:
        starting = instance("decode-0", healthy=False, ranks=(rank("decode-0", age_s=None, error="refused"),))
        _, told = play([ill(0, starting), ill(1, starting), ill(2, down()), ill(3, down())])
        assert told == ["1 opened E001", "2 updated E001"]

    def test_a_recording_wound_back_begins_anew(self) -> None:
        watchdog = Watchdog(DEFAULTS)
        play([ill(5, down()), ill(6, down())], watchdog)
        alerts, told = play([ill(0, down())], watchdog)
        assert (alerts, told) == ([], ["0 closed E001"])

    def test_worst_first(self) -> None:
        sick = [
            down("decode-1"),
            instance("prefill-0", age_s=9.0, error="HTTP 500"),
            ranked("prefill-1", writer="dead"),
        ]
        alerts, _ = play(ill(tick, *sick, names=TWO_PAIRS, poll_s=3.0) for tick in range(3))
        assert [alert.symptom.code for alert in alerts] == ["E001", "W001", "E004", "E005"]


class TestUnseenIsNotHealed:
    def test_a_side_that_cannot_be_read_keeps_the_alert(self) -> None:
        sick = [snapshot(tick, posted(1, 6.0 + tick)) for tick in range(3)]
        blind = [snapshot(tick, [], [ranked("prefill-0", age_s=4.0)]) for tick in range(3, 5)]
        # The second blind look opens W003, which then explains it.
        alerts, told = play([*sick, *blind])
        assert told == ["1 opened T002", "4 opened W003", "4 closed T002"]
        assert [one.code for one in alerts[0].folded] == ["T002"]

    def test_but_not_for_ever(self) -> None:
        partly = instance("prefill-0", ranks=(rank("prefill-0", age_s=None), rank("prefill-0", 1)))
        sick = [snapshot(tick, posted(1, 6.0 + tick), [partly]) for tick in range(3)]
        blind = [snapshot(tick, [], [partly]) for tick in range(3, 90)]
        assert play([*sick, *blind])[1] == ["1 opened T002", "64 closed T002"]


class TestFolding:
    def test_forty_transfers_of_a_pair_are_one_alert(self) -> None:
        alerts, told = play(snapshot(tick, posted(40, 6.0 + tick)) for tick in range(4))
        assert told == ["1 opened T002"]
        [alert] = alerts
        assert alert.symptom.subject == "prefill-0>decode-0"
        assert alert.symptom.message.endswith("(and 39 more like it)")
        assert len(alert.folded) == 39

    def test_its_identity_stays_while_transfers_come_and_go(self) -> None:
        alerts, told = play(snapshot(tick, posted(2, 6.0 + tick, first=tick)) for tick in range(20))
        assert told[0] == "1 opened T002"
        assert {line.split()[1] for line in told[1:]} <= {"updated"}
        assert alerts[0].symptom.subject == "prefill-0>decode-0"

    def test_the_transfer_that_is_shown_stays_shown(self) -> None:
        first = [snapshot(tick, posted(3, 6.0 + tick, first=5)) for tick in range(2)]
        alerts, _ = play([*first, snapshot(2, [*posted(2, 90.0), *posted(3, 8.0, first=5)])])
        assert alerts[0].symptom.key == "key-5"

    def test_a_host_that_goes_takes_in_what_is_open(self) -> None:
        gone = HostView("d1", age_s=5.0, error="no route to host")
        before = [snapshot(tick, posted(40, 6.0 + tick)) for tick in range(3)]
        lost = rank("decode-0", age_s=5.0, error="no route to host")
        silent = instance("decode-0", process_age_s=9.0, age_s=9.0, ranks=(lost,))
        after = [snapshot(tick, posted(40, 9.0, reading_age_s=5.0), [silent], [gone]) for tick in range(3, 7)]
        alerts, told = play([*before, *after])
        assert told == ["1 opened T002", "4 opened E003", "4 closed T002"]
        assert {one.code for one in alerts[0].folded} == {"T002", "W003"}

    def test_symptoms_of_a_dead_writer_never_open(self) -> None:
        alerts, told = play(
            snapshot(tick, posted(40, 4.0 + tick), [ranked("prefill-0", writer="dead")]) for tick in range(6)
        )
        assert told == ["0 opened W001"]
        assert len(alerts[0].folded) == 40

    def test_they_open_by_themselves_when_the_cause_is_over(self) -> None:
        dead = [snapshot(tick, posted(1, 6.0 + tick), [ranked("prefill-0", writer="dead")]) for tick in range(3)]
        alive = [snapshot(tick, posted(1, 6.0 + tick)) for tick in range(3, 8)]
        assert play([*dead, *alive])[1] == ["0 opened W001", "4 closed W001", "6 opened T002"]

    def test_another_instance_is_not_explained(self) -> None:
        other = transfer("key-1", record("prefill-1", "posted", 9.0), record("decode-1", "registered", 9.0))
        alerts, _ = play(snapshot(tick, [other], [down()], names=TWO_PAIRS) for tick in range(3))
        assert [alert.symptom.code for alert in alerts] == ["E001", "T002"]

    def test_wrong_text_is_never_folded(self) -> None:
        wrong = transfer(
            "key-1", record("prefill-0", "posted", 2.0, "failed"), record("decode-0", "registered", 2.1, "received")
        )
        alerts, _ = play(snapshot(tick, [wrong], [down()]) for tick in range(3))
        assert [alert.symptom.code for alert in alerts] == ["E001", "T010"]

    def test_all_ranks_take_in_the_first_ones(self) -> None:
        def dead(count: int) -> InstanceView:
            ranks = (rank("prefill-0", n, writer="dead" if n < count else "idle") for n in range(3))
            return instance("prefill-0", ranks=tuple(ranks))

        alerts, told = play([ill(0, dead(1)), ill(1, dead(3)), ill(2, dead(3))])
        assert told == ["0 opened W001", "1 opened W001", "1 closed W001"]
        assert [alert.symptom.subject for alert in alerts] == ["prefill-0"]

    def test_what_is_folded_is_bounded(self) -> None:
        alerts, _ = play(snapshot(tick, posted(1000, 6.0 + tick)) for tick in range(3))
        assert len(alerts[0].folded) == FOLDED_LIMIT
        assert "999 more" in alerts[0].symptom.message

    def test_more_folded_is_told_now_and_then(self) -> None:
        _, told = play(snapshot(tick, posted(1 + tick, 6.0 + tick)) for tick in range(40))
        assert told == ["1 opened T002", "16 updated T002", "31 updated T002"]


class TestFlapping:
    def test_a_flapping_alert_stays_open(self) -> None:
        _, told = play(ill(tick, *([down()] if tick % 8 < 4 else [])) for tick in range(400))
        assert told == ["1 opened E001", "5 closed E001", "9 opened E001"]

    def test_it_explains_nothing_while_it_is_only_kept_open(self) -> None:
        watchdog = Watchdog(DEFAULTS)
        play((ill(tick, *([down()] if tick % 8 < 4 else [])) for tick in range(12)), watchdog)
        _, told = play((snapshot(tick, posted(1, 6.0 + tick)) for tick in range(12, 18)), watchdog)
        assert told == ["15 opened T002"]

    def test_after_a_quiet_while_it_is_new(self) -> None:
        sick = {*range(4), *range(200, 204), *range(400, 404)}
        _, told = play(ill(tick, *([down()] if tick in sick else [])) for tick in range(420))
        assert [line.split()[1] for line in told] == ["opened", "closed"] * 3


STATES = st.tuples(
    st.booleans(), st.booleans(), st.booleans(), st.integers(0, 3), st.sampled_from([0.2, 0.2, 5.0]), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STATES, min_size=5, max_size=60), st.integers(1, 3), st.integers(1, 3))
def test_events_are_consistent_whatever_flaps(
    states: list[tuple[bool, bool, bool, int, float, bool]], open_ticks: int, close_ticks: int
) -> None:
    watchdog = Watchdog(replace(DEFAULTS, open_ticks=open_ticks, close_ticks=close_ticks))
    shown: set[tuple[str, str]] = set()
    for tick, (dead, sick, lost, flying, age, silent) in enumerate(states):
        changed = [ranked("prefill-0", writer="dead" if dead else "idle", age_s=age, error="x" if age > 1 else "")]
        changed += [down()] if sick else []
        hosts = [HostView("d1", age_s=9.0, error="gone")] if lost else []
        one = snapshot(tick, posted(flying, 7.0), changed, hosts, poll_s=9.0 * silent)
        alerts, events = watchdog.look(one)
        for event in events:
            name = event.alert.symptom.identity
            assert event.kind in ("opened", "updated", "closed")
            assert (name in shown) is (event.kind != "opened")
            assert event.alert.open is (event.kind != "closed")
            assert event.alert.duration_s >= 0
            shown.add(name) if event.kind == "opened" else shown.discard(name) if event.kind == "closed" else None
        assert {alert.symptom.identity for alert in alerts} == shown
        assert len(alerts) == len(shown)
        order = [list(Severity).index(alert.symptom.severity) for alert in alerts]
        assert order == sorted(order)


class TestMemory:
    def test_history_is_bounded_and_thin(self) -> None:
        history = History(DEFAULTS)
        ended = transfer("old", record("prefill-0", "posted", 0.1, "completed"))
        for tick in range(3000):
            history.add(snapshot(tick, [*posted(3, 1.0), ended]))
        kept = history.snapshots
        assert [one.at for one in kept] == sorted(one.at for one in kept)
        assert len(kept) < 30
        assert kept[-1].at - kept[0].at >= 40
        assert len([one for one in kept if ended in one.transfers]) == 3
        assert not kept[0].transfers

    def test_quick_polls_are_bounded_too(self) -> None:
        history = History(replace(DEFAULTS, interval_s=0.1, stall_after_s=300.0))
        for tick in range(5000):
            history.add(replace(snapshot(tick), at=tick / 10))
        assert len(history.snapshots) < 80

    def test_slow_polls_keep_what_they_compare_with(self) -> None:
        history = History(DEFAULTS)
        for tick in range(10):
            history.add(replace(snapshot(tick), at=600.0 * tick))
        assert 2 <= len(history.snapshots) < 10

    def test_what_has_flapped_is_forgotten(self) -> None:
        watchdog = Watchdog(replace(DEFAULTS, flap_window_s=1.0))
        for tick in range(0, 800, 4):
            sick = transfer("key", record(f"prefill-{tick % 2}", "posted", 9.0), record("decode-0", "registered", 9.0))
            watchdog.look(snapshot(tick, [sick], names=TWO_PAIRS))
            watchdog.look(snapshot(tick + 1, [sick], names=TWO_PAIRS))
            watchdog.look(snapshot(tick + 2, names=TWO_PAIRS))
            watchdog.look(snapshot(tick + 3, names=TWO_PAIRS))
        assert len(watchdog._closed) <= 2
        assert not watchdog._pending
