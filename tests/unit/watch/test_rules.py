"""Rules: what they must see, and what they must not take for a fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_cases import P99, TWO_PAIRS, done, engine, instance, rank, ranked, record, snapshot, transfer

from pdctl.spec import parse
from pdctl.watch.alerts import Severity, Symptom
from pdctl.watch.book import Watchdog
from pdctl.watch.rules import CODES, RULES, find_symptoms
from pdctl.watch.rules.evidence import Evidence, seconds, size
from pdctl.watch.settings import WatchSettings, settings_from_spec
from pdctl.watch.snapshot import HostView, InstanceView, RankView, SideRecord, Snapshot, TransferView

DEFAULTS = WatchSettings()


def found(*history: Snapshot, **changes: Any) -> list[Symptom]:
    return find_symptoms(history, replace(DEFAULTS, **changes))


def codes(*history: Snapshot, **changes: Any) -> list[str]:
    return [symptom.code for symptom in found(*history, **changes)]


def stuck(held: float, **changes: Any) -> TransferView:
    return transfer("key-1", record("prefill-0", "posted", held, **changes), record("decode-0", "registered", held))


class TestThresholds:
    def test_nothing_before_stall_after(self) -> None:
        assert codes(snapshot(1, [stuck(4.9)])) == []
        assert codes(snapshot(1, [stuck(5.1)])) == ["T002"]
        assert codes(snapshot(1, [stuck(5.1)]), stall_after_s=8.0) == []

    def test_ten_times_the_percentile(self) -> None:
        usual = {**P99, "prefill/posted": 0.9}
        assert codes(snapshot(1, [stuck(8.9)], stage_p99_s=usual)) == []
        assert codes(snapshot(1, [stuck(9.1)], stage_p99_s=usual)) == ["T002"]

    def test_one_slow_outlier_does_not_silence_it(self) -> None:
        outlier = {**P99, "prefill/posted": 40.0}
        assert codes(snapshot(1, [stuck(14.9)], stage_p99_s=outlier)) == []
        assert codes(snapshot(1, [stuck(15.1)], stage_p99_s=outlier)) == ["T002"]

    def test_the_cap_is_never_below_stall_after(self) -> None:
        assert replace(DEFAULTS, stall_after_s=60.0).stall_cap_s == 60.0

    def test_without_a_percentile_the_message_says_what_was_expected(self) -> None:
        [symptom] = found(snapshot(1, [stuck(7.2)], stage_p99_s={}))
        assert "expected within 5.0 s" in symptom.message


class TestMessages:
    def test_evidence_and_next_step(self) -> None:
        [symptom] = found(snapshot(1, [stuck(7.2)]))
        assert (
            "prefill-0 posted 24 descriptors (1.5 MiB) 7.2 s ago, NIXL still in progress; the recent p99 is 38 ms"
            in symptom.message
        )
        assert symptom.next_step == "Link p1-d1? Run pdctl doctor --only XFER"
        assert symptom.instances == ("prefill-0", "decode-0")
        assert symptom.key == "key-1"

    def test_text_of_other_machines_is_made_plain(self) -> None:
        bad = "evil\x1b[2J\nkey" + "x" * 500
        [symptom] = found(
            snapshot(1, [transfer(bad, record("prefill-0", "posted", 9.0), record("decode-0", "registered", 9.0))])
        )
        assert symptom.message.isprintable()
        assert len(symptom.message) < 400

    @pytest.mark.parametrize(
        ("value", "told"), [(0.038, "38 ms"), (7.21, "7.2 s"), (240.0, "4 min"), (-0.1, "0 ms"), (0.0, "0 ms")]
    )
    def test_seconds(self, value: float, told: str) -> None:
        assert seconds(value) == told

    @pytest.mark.parametrize(("value", "told"), [(0, "0 B"), (1.5 * 2**20, "1.5 MiB"), (2**50, "1024.0 TiB")])
    def test_size(self, value: float, told: str) -> None:
        assert size(value) == told


class TestReadingsOfDifferentMoments:
    def test_what_decode_has_received_since_is_no_stall(self) -> None:
        one = transfer(
            "key-1",
            record("prefill-0", "posted", 5.5, reading_age_s=1.9),
            record("decode-0", "registered", 4.0, "received"),
        )
        assert codes(snapshot(1, [one])) == []

    def test_an_old_reading_counts_with_what_it_saw(self) -> None:
        # It was 4.2 s in its stage when it was read; what happened since nobody knows.
        assert codes(snapshot(1, [stuck(6.4, reading_age_s=2.2)])) == []
        assert codes(snapshot(1, [stuck(7.4, reading_age_s=2.2)])) == ["T002"]

    def test_stale_readings_say_nothing(self) -> None:
        assert codes(snapshot(1, [stuck(60.0, reading_age_s=3.1)])) == []

    def test_a_slower_pace_is_no_staleness(self) -> None:
        history = [replace(snapshot(tick), at=100.0 + 10 * tick) for tick in range(3)]
        assert codes(*history, replace(snapshot(3, [stuck(60.0, reading_age_s=9.0)]), at=130.0)) == ["T002"]

    def test_completion_that_has_just_come_is_not_lost(self) -> None:
        one = transfer(
            "key-1", record("prefill-0", "posted", 0.03, "completed"), record("decode-0", "registered", 30.0)
        )
        assert codes(snapshot(1, [stuck(4.0)]), snapshot(2, [one])) == []
        history = [snapshot(tick, [one]) for tick in range(7)]
        assert codes(*history[:5]) == []
        assert codes(*history) == ["T003"]

    def test_a_single_look_takes_the_ledgers_word_for_when_it_ended(self) -> None:
        def look(ended_s: float | None, outcome: str = "completed", waited_s: float = 30.0) -> list[str]:
            over = replace(record("prefill-0", "posted", 0.03, outcome), ended_s=ended_s)
            one = transfer("key-1", over, record("decode-0", "registered", waited_s))
            return codes(snapshot(1, [one]), **vars(WatchSettings().for_one_look()))

        assert look(30.0) == ["T003"]
        assert look(30.0, "failed") == ["T004"]
        # Neither what has just ended, nor what decode has just begun to wait for again, nor what is not known.
        assert look(3.0) == look(None) == look(30.0, waited_s=3.0) == []

    def test_a_new_attempt_of_decode_waits_anew(self) -> None:
        def at(tick: int, attempt: int) -> Snapshot:
            return snapshot(
                tick,
                [
                    transfer(
                        "key-1",
                        record("prefill-0", "posted", 0.03, "completed"),
                        record("decode-0", "registered", 1.0, attempt=attempt),
                    )
                ],
            )

        assert codes(*(at(tick, 1) for tick in range(5)), *(at(tick, 2) for tick in range(5, 8))) == []

    def test_no_record_is_no_evidence_where_not_all_was_read(self) -> None:
        waiting = [transfer("key-1", record("decode-0", "registered", 20.0))]
        assert codes(snapshot(1, waiting)) == ["T001"]
        assert codes(snapshot(1, waiting, [ranked("prefill-0", unlisted=1)])) == ["E005"]
        assert codes(snapshot(1, waiting, [ranked("prefill-0", age_s=3.5)])) == ["W003"]
        assert codes(snapshot(1, waiting, [ranked("prefill-0", age_s=None)])) == []

    def test_an_engine_that_is_gone_is_named(self) -> None:
        waiting = [transfer("key-1", record("decode-0", "registered", 20.0, peer=engine("prefill-0", 7)))]
        [symptom] = found(snapshot(1, waiting))
        assert symptom.code == "T001"
        assert engine("prefill-0", 7) in symptom.message


class TestQueuesAreNoStalls:
    def history(self, key: str = "first", **changes: Any) -> tuple[Snapshot, Snapshot]:
        before = transfer(key, record("prefill-0", "posted", 6.0), record("decode-0", "registered", 6.0))
        after = transfer(
            key, record("prefill-0", "posted", 7.0, "completed", **changes), record("decode-0", "registered", 7.0)
        )
        return snapshot(1, [before, stuck(5.5)]), snapshot(2, [stuck(6.5), after])

    def test_a_full_link_completes_others(self) -> None:
        first, second = self.history()
        assert codes(first) == ["T002", "T002"]
        assert codes(first, second) == []

    def test_but_not_for_ever(self) -> None:
        first, second = self.history()
        longer = replace(second, transfers=(stuck(20.5), *second.transfers[1:]))
        assert codes(first, longer) == ["T002"]

    def test_one_that_was_overtaken_is_stuck(self) -> None:
        assert codes(*self.history(started_unix=1_795_000_002.0)) == ["T002"]

    def test_small_ones_overtake_on_a_shared_link(self) -> None:
        assert codes(*self.history(started_unix=1_795_000_002.0, bytes=1024)) == []

    def test_progress_of_another_pair_is_none(self) -> None:
        assert codes(*self.history(peer=engine("decode-1"))) == ["T002"]

    def slow(self, tick: int, **changes: Any) -> Snapshot:
        waiting = transfer(
            "key-1", record("prefill-0", "prefilling", 20.0 + tick), record("decode-0", "registered", 20.0 + tick)
        )
        return snapshot(tick, [waiting], [ranked("prefill-0", **changes)])

    def test_slow_prefill_if_nothing_moves(self) -> None:
        history = [self.slow(tick) for tick in range(12)]
        [symptom] = found(*history)
        assert (symptom.code, symptom.severity) == ("T006", Severity.WARNING)

    def test_a_long_queue_that_moves(self) -> None:
        history = [self.slow(tick, outcomes={"prefill/completed": tick // 4}) for tick in range(12)]
        assert codes(*history) == []

    def test_nothing_is_said_before_it_was_watched_for_a_while(self) -> None:
        assert codes(*(self.slow(tick) for tick in range(4))) == []

    def test_decode_without_room(self) -> None:
        ready = [transfer("key-1", record("prefill-0", "ready", 40.0))]
        full = [
            instance("decode-0", requests_waiting=4, ranks=(rank("decode-0", outcomes={"decode/received": tick}),))
            for tick in range(3)
        ]
        assert codes(*(snapshot(tick, ready, [full[tick]]) for tick in range(3))) == []
        assert codes(*(snapshot(tick, ready, [full[0]]) for tick in range(3))) == ["T012"]
        assert codes(snapshot(0, [transfer("key-1", record("prefill-0", "ready", 20.0))])) == ["T005"]


class TestTransfersOfManyRanks:
    def two_ranks(self, first: str, second: str, decode: str = "") -> list[str]:
        def one(number: int, outcome: str) -> SideRecord:
            return record("prefill-0", "posted", 9.0, outcome, rank=number)

        parts = [one(0, first), one(1, second)]
        parts += [record("decode-0", "registered", 9.0, decode, rank=number) for number in (0, 1)]
        return codes(*(snapshot(tick, [transfer("key-1", *parts)]) for tick in range(8)))

    def test_the_rank_that_is_behind_counts(self) -> None:
        assert self.two_ranks("completed", "") == ["T002"]

    def test_one_failed_rank_is_a_failure(self) -> None:
        assert self.two_ranks("completed", "failed") == ["T004"]

    def test_all_complete(self) -> None:
        assert self.two_ranks("completed", "completed") == ["T003"]
        assert self.two_ranks("completed", "completed", "received") == []

    def test_received_of_a_failed_rank(self) -> None:
        assert self.two_ranks("completed", "cancelled", "received") == ["T010"]

    def test_a_former_try_is_no_contradiction(self) -> None:
        parts = [record("prefill-0", "posted", 9.0, one) for one in ("failed", "completed")]
        assert codes(snapshot(1, [transfer("key-1", *parts, record("decode-0", "registered", 1.0, "received"))])) == []


class TestEngines:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"process": "exited", "diagnosis": "CUDA out of memory"}, ["has ended", "CUDA out of memory"]),
            ({"process": "zombie"}, ["zombie"]),
            ({"process": "absent"}, ["not started"]),
            ({"process": "stopped", "healthy": None, "health_error": "timed out"}, ["stopped by a signal"]),
            ({"healthy": False, "health_error": "HTTP 503"}, ["HTTP 503"]),
        ],
    )
    def test_down(self, changes: dict[str, Any], words: Sequence[str]) -> None:
        [symptom] = found(snapshot(1, changed=[instance("decode-0", **changes)]))
        assert symptom.code == "E001"
        assert all(word in symptom.message for word in words)

    def test_what_was_never_started_is_started_by_up(self) -> None:
        [symptom] = found(snapshot(1, changed=[instance("decode-0", process="absent")]))
        assert "it is not started" in symptom.message
        assert symptom.next_step.startswith("pdctl up")

    def test_starting_is_a_warning(self) -> None:
        young = instance("decode-0", healthy=None, health_error="refused", ranks=(RankView(0, error="refused"),))
        [symptom] = found(snapshot(1, changed=[young]))
        assert (symptom.code, symptom.severity) == ("E001", Severity.WARNING)

    def test_not_asked_is_not_down(self) -> None:
        assert codes(snapshot(1, changed=[instance("decode-0", healthy=None, process=None)])) == []

    @pytest.mark.parametrize("process", ["running", "stopped", "zombie", "exited"])
    def test_a_silent_rank_tells_of_its_process(self, process: Any) -> None:
        silent = ranked("prefill-0", age_s=6.0, error="timed out", process=process)
        [symptom] = found(snapshot(1, changed=[silent]))
        assert symptom.code == "W003"
        assert {"exited": "gone"}.get(process, process) in symptom.message
        assert "4711" in symptom.message

    def test_of_an_unknown_rank_process_the_main_one_is_told_as_such(self) -> None:
        [symptom] = found(snapshot(1, changed=[ranked("prefill-0", age_s=6.0, error="timed out")]))
        assert "main process 4700 is running" in symptom.message

    def test_all_ranks_are_one_symptom_and_some_are_each_one(self) -> None:
        dead = tuple(rank("prefill-0", number, writer="dead") for number in range(4))
        assert [one.subject for one in found(snapshot(1, changed=[instance("prefill-0", ranks=dead)]))] == ["prefill-0"]
        some = (*dead[:2], rank("prefill-0", 2), rank("prefill-0", 3))
        assert [one.subject for one in found(snapshot(1, changed=[instance("prefill-0", ranks=some)]))] == [
            "prefill-0/rank 0",
            "prefill-0/rank 1",
        ]

    def test_a_stuck_writer_outside_of_nixl(self) -> None:
        [symptom] = found(snapshot(1, changed=[ranked("prefill-0", writer="stuck", heartbeat_age_s=8.0)]))
        assert "outside of NIXL" in symptom.message
        assert codes(snapshot(1, changed=[ranked("prefill-0", writer="stuck", heartbeat_age_s=3.0)])) == []

    def test_one_lost_poll_is_nothing(self) -> None:
        assert codes(snapshot(1, changed=[ranked("prefill-0", age_s=1.3, error="timed out")])) == []

    def test_new_engine_under_the_same_process(self) -> None:
        other = ranked("decode-0", engine_id=engine("decode-0", 2))
        assert codes(snapshot(1), snapshot(2, changed=[other])) == ["E002"]
        assert codes(snapshot(1, changed=[ranked("decode-0", engine_id="")]), snapshot(2, changed=[other])) == []


class TestHosts:
    def test_a_host_whose_instances_answer_is_reachable(self) -> None:
        host = HostView("d1", age_s=60.0, error="d1: /proc/net/dev: no such file")
        assert codes(snapshot(1, hosts=[host])) == []
        silent = instance("decode-0", process_age_s=9.0, age_s=9.0, ranks=(rank("decode-0", age_s=9.0),))
        [symptom] = [one for one in found(snapshot(1, changed=[silent], hosts=[host])) if one.code == "E003"]
        assert "d1 cannot be reached (/proc/net/dev: no such file)" in symptom.message

    def test_a_ledger_that_cannot_be_read_for_long(self) -> None:
        sick = ranked("prefill-0", error="prefill-0 rank 0: transfers: timed out")
        history = [snapshot(tick, changed=[sick]) for tick in range(6)]
        assert codes(*history[:5]) == []
        [symptom] = found(*history)
        assert symptom.code == "E004"
        assert "(transfers: timed out)" in symptom.message


class TestCounters:
    def errors(self, *values: int | None, second_engine: bool = False) -> list[str]:
        return codes(
            *(
                snapshot(
                    tick,
                    changed=[
                        ranked(
                            "prefill-0",
                            errors=value,
                            engine_id=engine("prefill-0", 2 if second_engine and tick else 1),
                        )
                    ],
                )
                for tick, value in enumerate(values)
            )
        )

    def test_growth(self) -> None:
        assert self.errors(3, 4) == ["W004"]
        assert self.errors(3, 3) == []

    def test_what_was_there_before_the_watch_is_none(self) -> None:
        assert self.errors(7) == []

    def test_missing_is_not_zero(self) -> None:
        assert self.errors(None, 4) == []
        assert self.errors(4, None) == []

    def test_reset(self) -> None:
        assert self.errors(9, 0) == []
        assert self.errors(9, 2) == ["W004"]
        assert self.errors(9, 9, second_engine=True) == ["E002", "W004"]

    def test_failed_loads_without_failed_transfers(self) -> None:
        one, two = (snapshot(n, changed=[instance("decode-0", failed_loads=n)]) for n in (1, 2))
        [symptom] = found(one, two)
        assert symptom.code == "T009"
        assert "the ledger has no failed transfer" in symptom.message

    def test_hidden_failures_are_pointed_out(self) -> None:
        one, two = (snapshot(n, changed=[ranked("decode-0", outcomes={"decode/failed": n})]) for n in (1, 2))
        assert "HTTP 200" in found(one, two)[0].message
        assert "HTTP 200" in found(one, two, load_failure_policy="recompute")[0].message

    def test_a_few_repeated_messages_are_harmless(self) -> None:
        def late(number: int) -> Snapshot:
            return snapshot(number, changed=[ranked("decode-0", notifications={"DONE/received/unknown": number})])

        assert codes(late(1), late(5)) == []
        assert codes(late(1), late(6)) == ["T011"]


class TestPairs:
    def failed(self, number: int, prefill: str, decode: str, peer: str = "") -> TransferView:
        return transfer(
            f"bad-{prefill}-{decode}-{number}",
            record(prefill, "posted", 3.0, "failed", peer=engine(decode)),
            record(decode, "registered", 3.4, "failed", peer=peer or engine(prefill)),
        )

    def test_an_instance_that_fails_with_all_is_one_symptom(self) -> None:
        bad = [self.failed(n, "prefill-0", decode) for n in range(3) for decode in ("decode-0", "decode-1")]
        [symptom] = found(snapshot(1, bad, names=TWO_PAIRS))
        assert (symptom.code, symptom.subject) == ("T015", "prefill-0")

    def test_a_success_is_enough(self) -> None:
        bad = [self.failed(n, "prefill-0", "decode-0") for n in range(5)]
        assert codes(snapshot(1, bad)) == ["T015"]
        assert codes(snapshot(1, [*bad, done("good")])) == []

    def test_failures_with_a_former_engine_are_over(self) -> None:
        bad = [self.failed(n, "prefill-0", "decode-0", engine("prefill-0", 9)) for n in range(5)]
        assert codes(snapshot(1, bad)) == []


def test_a_pair_is_compared_with_what_the_doctor_measured_between_its_hosts() -> None:
    stages = {"prefilling": 0.0, "ready": 0.4, "matched": 0.41, "posted": 0.411, "completed": 4.411}
    slow = [snapshot(tick, [done(f"w-{n}", bytes=64 * 2**20, stages=stages) for n in range(6)]) for tick in range(4)]
    hosts = {one.name: one.host for one in slow[0].instances}

    def told(baselines: dict[str, float]) -> list[str]:
        history = [
            replace(one, hosts=tuple(
                replace(host, baselines=baselines) if host.name == hosts["prefill-0"] else host for host in one.hosts
            ))
            for one in slow
        ]  # fmt: skip
        return [symptom.message for symptom in found(*history) if symptom.code == "T007"]

    assert told({}) == []
    (message,) = told({hosts["decode-0"]: 10e9})
    assert "that pdctl doctor measured" in message
    assert told({hosts["decode-0"]: 1e6}) == []
    assert told({"elsewhere": 10e9}) == []


def test_a_single_look_is_enough_when_asked() -> None:
    one = snapshot(0, [stuck(9.0)], [instance("router", healthy=False, health_error="HTTP 500")])
    alerts, events = Watchdog(DEFAULTS.for_one_look()).look(one)
    assert [alert.symptom.code for alert in alerts] == ["E001", "T002"]
    assert len(events) == 2
    assert Watchdog(DEFAULTS).look(one) == ([], [])


def test_pull_mode_without_ranks_is_judged_by_engines_alone() -> None:
    plain = [instance(name, ranks=()) for name in ("prefill-0", "decode-0")]
    assert codes(snapshot(0, changed=plain), snapshot(1, changed=plain), mode="pull") == []


def test_every_code_has_one_rule() -> None:
    listed = [code for rule in RULES for code in rule.codes]
    assert sorted(listed) == sorted(CODES)


def test_settings_come_from_the_cluster_file() -> None:
    spec = parse(
        "cluster: qwen3\nmodel: m\naccelerator: cpu\nfabric: tcp\nprefill: {hosts: [p1]}\ndecode: {hosts: [d1]}\n"
        "router: {host: p1}\n"
        "transfer: {stall_after_s: 7, timeout_s: 60, lease_s: 40, load_failure_policy: recompute}\n",
        file="c.yaml",
        environ={},
    )
    made = settings_from_spec(spec)
    assert made == WatchSettings(stall_after_s=7, timeout_s=60, lease_s=40, load_failure_policy="recompute")
    assert (made.stall_cap_s, made.answer_s, made.stuck_s) == (30.0, 7.0, 7.0)


def test_every_setting_is_explained() -> None:
    text = WatchSettings.__doc__ or ""
    assert [name for name in WatchSettings.__dataclass_fields__ if f"        {name}: " not in text] == []


# Whatever comes: no rule raises.

NUMBERS = st.one_of(st.none(), st.floats(), st.floats(0, 100))
TIMES = st.one_of(st.floats(0, 100), st.floats())
COUNTS = st.one_of(st.none(), st.integers(-5, 10**12))
NAMES = st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1", "router", "other", ""])
TEXT = st.text(max_size=6)
TOTALS = st.dictionaries(
    st.sampled_from(["prefill/expired", "decode/failed", "prefill/completed", "DONE/received/unknown", "x"]),
    st.integers(-3, 100),
    max_size=3,
)
RANKS = st.builds(
    RankView, rank=st.integers(-1, 3), age_s=NUMBERS, error=TEXT, engine_id=st.sampled_from(["", "e1", "e2"]),
    writer=st.sampled_from(["", "idle", "stuck", "dead", "?"]), heartbeat_age_s=NUMBERS, operation=TEXT,
    operation_age_s=NUMBERS, errors=COUNTS, outcomes=TOTALS, bytes_per_s=NUMBERS, notifications=TOTALS,
    process=st.sampled_from([None, "running", "stopped", "exited"]),
)  # fmt: skip
INSTANCES = st.builds(
    InstanceView, name=NAMES, role=st.sampled_from(["prefill", "decode", "router", "?"]),
    host=st.sampled_from(["p1", "d1", ""]), url=TEXT, process=st.sampled_from([None, "running", "stopped", "zombie"]),
    process_age_s=NUMBERS, pid=COUNTS, restarts=st.integers(0, 2), healthy=st.sampled_from([None, True, False]),
    health_error=TEXT, age_s=NUMBERS, error=TEXT, requests_running=COUNTS, requests_waiting=COUNTS,
    failed_loads=COUNTS, ranks=st.lists(RANKS, max_size=2).map(tuple), diagnosis=TEXT,
)  # fmt: skip
STAGE = st.sampled_from(["allocated", "registered", "prefilling", "ready", "matched", "posted", "other"])
RECORDS = st.builds(
    SideRecord, instance=NAMES, rank=st.integers(0, 2), attempt=st.integers(0, 2), stage=STAGE,
    outcome=st.sampled_from(["", "received", "completed", "failed", "expired", "timed_out", "?"]), reason=TEXT,
    age_s=TIMES, stage_age_s=TIMES,
    stages=st.dictionaries(st.one_of(STAGE, st.just("completed")), TIMES, max_size=4), started_unix=TIMES,
    reading_age_s=st.one_of(st.just(0.1), TIMES), peer=st.sampled_from(["", "e1", "e2", "e3"]),
    blocks=st.integers(-1, 5), descriptors=st.integers(-1, 5), bytes=st.integers(-1, 2**40),
)  # fmt: skip
TRANSFERS = st.builds(
    TransferView, key=st.sampled_from(["a", "b", ""]),
    prefill=st.lists(RECORDS, max_size=2).map(tuple), decode=st.lists(RECORDS, max_size=2).map(tuple),
)  # fmt: skip
SNAPSHOTS = st.builds(
    Snapshot, at=st.floats(0, 1000), unix=st.floats(0, 1e9), tick=st.integers(0, 9), cluster=TEXT, model=TEXT,
    mode=st.just("push"), instances=st.lists(INSTANCES, max_size=3).map(tuple),
    hosts=st.lists(st.builds(HostView, name=st.sampled_from(["p1", "d1"]), age_s=NUMBERS, error=TEXT), max_size=2).map(
        tuple
    ),
    transfers=st.lists(TRANSFERS, max_size=4).map(tuple), dropped=st.integers(0, 2),
    stage_p99_s=st.dictionaries(st.sampled_from(["prefill/posted", "decode/registered"]), TIMES, max_size=2),
    poll_s=TIMES,
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SNAPSHOTS, min_size=1, max_size=4))
def test_no_snapshot_makes_a_rule_raise(history: list[Snapshot]) -> None:
    eager = replace(
        DEFAULTS, fabric_baseline_bytes_per_s=1e9, slow_fabric_least_count=1, slow_post_least_count=3, pair_failures=1
    )
    symptoms = find_symptoms(history, eager)
    assert {symptom.code for symptom in symptoms} <= set(CODES)
    watchdog = Watchdog(eager)
    for one in history:
        watchdog.look(one)


def test_the_interval_is_the_one_that_really_is() -> None:
    history = [replace(snapshot(tick), at=5.0 * tick) for tick in range(4)]
    assert Evidence(history, DEFAULTS).interval_s == 5.0
    assert math.isclose(Evidence(history[:1], DEFAULTS).interval_s, 1.0)
