"""Rows, details and the top bar: from frames to texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from pdctl.watch.alerts import Severity
from pdctl.watch.snapshot import InstanceView, RankView, SideRecord, Snapshot, TransferView
from pdctl.watch.tui import details, targets
from pdctl.watch.tui.format import Line
from pdctl.watch.tui.place import PANES
from pdctl.watch.tui.rows import Order, RateHistory, Row, View, chosen_rows, make_rows
from pdctl.watch.tui.source import Frame, ReplayPosition
from pdctl.watch.tui.summary import Status, top_lines
from tests.unit.watch.tui import made_frames as made
from tests.unit.watch.tui.test_tui_format import HOSTILE, WILD


def plain(lines: list[Line]) -> str:
    return "\n".join("".join(cell.text for cell in line) for line in lines)


def rows_of(frame: Frame) -> dict[str, dict[str, Row]]:
    return {pane: {row.key: row for row in rows} for pane, rows in make_rows(frame, RateHistory()).items()}


def with_instance(name: str, **changes: object) -> Frame:
    frame = made.frame(1)
    instances = tuple(
        replace(one, **changes) if one.name == name else one  # type: ignore[arg-type]
        for one in frame.snapshot.instances
    )
    return Frame(replace(frame.snapshot, instances=instances), frame.alerts)


def cell_of(frame: Frame, column: str, name: str = "prefill-0") -> tuple[str, str]:
    cell = rows_of(frame)["prefill"][name].cells[column]
    return cell.text, cell.tone


def test_a_missing_reading_is_never_zero() -> None:
    blank = InstanceView("prefill-0", "prefill", "h1", "http://h1", ranks=(RankView(0),))
    frame = Frame(replace(made.frame(1).snapshot, instances=(blank,)))

    cells = rows_of(frame)["prefill"]["prefill-0"].cells
    assert not any("0" in cell.text for key, cell in cells.items() if key != "name")
    assert cells["queue"].text == "-/-"
    assert {cells[key].text for key in ("kv", "flight", "oldest", "rate", "engine")} == {"-"}


def test_a_stale_writer_says_so_and_its_figures_are_dim() -> None:
    frame = with_instance("prefill-0", ranks=(made.rank(0, age_s=7.2, inflight=3, oldest_s=2.0),))

    assert cell_of(frame, "writer") == ("○ stale 7 s", "dim")
    assert cell_of(frame, "flight") == ("3", "dim")
    assert cell_of(frame, "oldest") == ("2.0 s", "dim")


def test_stale_metrics_are_dim() -> None:
    frame = with_instance("prefill-0", age_s=12.0)

    assert cell_of(frame, "engine") == ("○ stale 12 s", "dim")
    assert cell_of(frame, "queue")[1] == "dim"
    assert cell_of(frame, "kv")[1] == "dim"


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (made.rank(0, writer="stuck", heartbeat_age_s=12.0), ("✖ stuck 12 s", "bad")),
        (made.rank(0, writer="dead", heartbeat_age_s=70.0), ("✖ dead 1m10s", "bad")),
        (made.rank(0, writer="idle", heartbeat_age_s=0.2), ("● idle 200 ms", "good")),
        (RankView(0, error="timed out"), ("? silent", "warn")),
        (RankView(0), ("? silent", "dim")),
    ],
)
def test_the_writer_in_words(rank: RankView, expected: tuple[str, str]) -> None:
    assert cell_of(with_instance("prefill-0", ranks=(rank,)), "writer") == expected


def test_of_several_ranks_the_worst_writer_is_named() -> None:
    ranks = (made.rank(0), made.rank(1, writer="stuck", heartbeat_age_s=12.0), made.rank(2, age_s=9.0))

    assert cell_of(with_instance("prefill-0", ranks=ranks), "writer") == ("✖ stuck 12 s r1", "bad")


def test_a_sum_over_ranks_of_which_some_are_silent_is_marked() -> None:
    ranks = (made.rank(0, inflight=2), made.rank(1, age_s=None, inflight=None))

    assert cell_of(with_instance("prefill-0", ranks=ranks), "flight") == ("≥2", "plain")


def test_the_sparkline_is_of_the_last_minute_and_forgets_what_a_replay_steps_back_from() -> None:
    history = RateHistory()
    for tick in range(0, 90, 5):
        history.add(made.frame(1, tick=tick).snapshot)
    assert history.bars("prefill-0") == "█" * 12
    history.add(made.frame(1, tick=40).snapshot)

    assert history.bars("prefill-0").strip() == "████"
    assert history.bars("nobody").strip() == ""


def test_transfers_with_an_alert_come_first_then_those_in_flight() -> None:
    frame = made.stalled_frame(1)
    snapshot = replace(frame.snapshot, transfers=frame.snapshot.transfers[::-1])

    keys = [row.key for row in make_rows(Frame(snapshot, frame.alerts), RateHistory())["transfers"]]
    assert keys[0] == "cmpl-stalled"
    assert keys[-1] == "cmpl-000003"


def test_a_stalled_transfer_in_a_row() -> None:
    cells = rows_of(made.stalled_frame(1))["transfers"]["cmpl-stalled"].cells

    assert (cells["p_stage"].text, cells["d_stage"].text) == ("▸ posted", "▸ registered")
    assert (cells["bytes"].text, cells["descriptors"].text) == ("1.5 MiB", "0/24")
    assert cells["problem"].text == "✖ T002 write-stalled"


def test_a_side_without_a_record_says_so() -> None:
    transfer = replace(made.stalled_transfer(), prefill=())
    frame = Frame(replace(made.frame(1).snapshot, transfers=(transfer,)))

    assert rows_of(frame)["transfers"]["cmpl-stalled"].cells["p_stage"].text == "no record"
    assert "no record" in plain(details.transfer_lines(transfer, frame, 80))


def test_filter_faults_and_order() -> None:
    rows = make_rows(made.stalled_frame(3), RateHistory())["prefill"]

    assert [row.key for row in chosen_rows(rows, View("fill-1"), "prefill")] == ["prefill-1"]
    assert [row.key for row in chosen_rows(rows, View("!fill-1"), "prefill")] == ["prefill-0", "prefill-2"]
    assert [row.key for row in chosen_rows(rows, View(faults_only=True), "prefill")] == ["prefill-0"]
    by_rate = View(orders={"prefill": Order("rate", reverse=True)})
    assert next(row.key for row in chosen_rows(rows, by_rate, "prefill")) == "prefill-2"


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_missing_sorts_last_in_both_directions(reverse: bool) -> None:
    frame = with_instance("router", kv_use=None)
    rows = make_rows(frame, RateHistory())["decode"]

    chosen = chosen_rows(rows, View(orders={"decode": Order("kv", reverse)}), "decode")
    assert chosen[-1].key == "router"


def test_the_timeline_names_each_stage_with_its_time() -> None:
    frame = made.stalled_frame(1)
    text = plain(details.transfer_lines(made.stalled_transfer(), frame, 80))

    for words in ("prefilling   210 ms", "matched      3.0 ms", "posted        7.2 s…", "registered    7.4 s…"):
        assert words in text
    assert "next: Look at the link h1-h2" in text


def test_clocks_that_differ_are_not_laid_side_by_side() -> None:
    transfer = made.stalled_transfer()
    late = replace(transfer, prefill=(replace(transfer.prefill[0], started_unix=made.UNIX + 3600),))

    assert "clocks differ" in plain(details.transfer_lines(late, made.frame(1), 80))
    assert "clocks differ" not in plain(details.transfer_lines(transfer, made.frame(1), 80))


def test_alert_details_show_what_is_folded() -> None:
    text = plain(details.alert_lines(made.down_frame(2).alerts[0]))

    assert "4 more with the same cause" in text
    assert "W003 decode-1/rank 0" in text


@pytest.mark.parametrize(
    ("frame", "status", "words"),
    [
        (None, Status(), ["○ waiting", "- req/s"]),
        (made.frame(0), Status(), ["○ empty"]),
        (made.frame(1), Status(), ["● healthy", "▸ LIVE", "12.3 req/s", "TTFT p50 120 ms p99 340 ms"]),
        (made.stalled_frame(1), Status(), ["✖ critical", "✖ 1 critical", "▲ 1 warning"]),
        (made.down_frame(), Status(), ["✖ down", "- req/s", "9 readings failed"]),
        (made.frame(1), Status(age_s=7.0, overdue=True), ["stale 7 s"]),
        (made.frame(1), Status(paused=True, age_s=7.0), ["PAUSED 7 s"]),
        (replace(made.frame(1), replay=ReplayPosition(4, 90, False)), Status(), ["REPLAY 5/90"]),
        (made.frame(1), Status(source_error="no route", retry_s=4), ["✖ no new data: no route (trying again in 4 s)"]),
    ],
)
def test_the_top_bar(frame: Frame | None, status: Status, words: list[str]) -> None:
    text = plain(top_lines(frame, status, 120))

    for word in words:
        assert word in text


def test_unread_instances_are_not_called_healthy() -> None:
    assert "? unknown" in plain(top_lines(with_instance("prefill-0", healthy=None), Status(), 120))


def test_the_pair_of_an_instance_is_the_one_that_an_alert_names() -> None:
    frame = made.stalled_frame(3)
    linked = Frame(frame.snapshot, (made.alert(instances=("prefill-2", "decode-1")),))
    subject = linked.snapshot.instance("decode-1")

    assert subject is not None
    assert targets.pair_of(subject, linked) == ("prefill-2", "decode-1")
    assert targets.pair_of(subject, replace(linked, alerts=())) == ("prefill-0", "decode-1")
    assert targets.pair_of(made.stalled_transfer(), frame) == ("prefill-0", "decode-0")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PREFILL-1", ("prefill", "prefill-1")),
        ("t002", ("alerts", "T002\ncmpl-stalled")),
        ("cmpl-st", ("transfers", "cmpl-stalled")),
        ("nobody", None),
        ("", None),
    ],
)
def test_what_a_typed_name_means(name: str, expected: tuple[str, str] | None) -> None:
    frame = made.stalled_frame(2)

    assert targets.find(name, make_rows(frame, RateHistory()), frame.alerts) == expected


# --- any snapshot renders

WILD_FLOAT = st.one_of(st.floats(), st.floats(0, 1e4))
RANKS = st.builds(
    RankView,
    rank=st.integers(0, 9),
    age_s=WILD,
    error=HOSTILE,
    engine_id=HOSTILE,
    writer=st.one_of(HOSTILE, st.sampled_from(["idle", "dead", "stuck"])),
    heartbeat_age_s=WILD,
    operation=HOSTILE,
    inflight=st.one_of(st.none(), st.integers(0, 10**30)),
    oldest_s=WILD,
    bytes_per_s=WILD,
    outcomes=st.dictionaries(HOSTILE, st.integers(0, 10**20), max_size=3),
)
INSTANCES = st.builds(
    InstanceView,
    name=HOSTILE,
    role=st.sampled_from(["prefill", "decode", "router"]),
    host=HOSTILE,
    url=HOSTILE,
    process=st.sampled_from([None, "running", "stopped", "zombie", "exited", "absent"]),
    process_age_s=WILD,
    healthy=st.sampled_from([None, True, False]),
    health_error=HOSTILE,
    age_s=WILD,
    error=HOSTILE,
    requests_running=st.one_of(st.none(), st.integers(-5, 10**30)),
    kv_use=WILD,
    ranks=st.lists(RANKS, max_size=3).map(tuple),
    diagnosis=HOSTILE,
)
RECORDS = st.builds(
    SideRecord,
    instance=HOSTILE,
    rank=st.integers(0, 9),
    attempt=st.just(1),
    stage=HOSTILE,
    outcome=st.one_of(HOSTILE, st.sampled_from(["", "failed", "completed"])),
    reason=HOSTILE,
    age_s=WILD_FLOAT,
    stage_age_s=WILD_FLOAT,
    stages=st.dictionaries(HOSTILE, WILD_FLOAT, max_size=5),
    started_unix=WILD_FLOAT,
    reading_age_s=WILD_FLOAT,
    bytes=st.integers(0, 10**40),
    descriptors=st.integers(0, 10**40),
)
TRANSFERS = st.builds(
    TransferView,
    key=HOSTILE,
    prefill=st.lists(RECORDS, max_size=2).map(tuple),
    decode=st.lists(RECORDS, max_size=2).map(tuple),
)
SNAPSHOTS = st.builds(
    Snapshot,
    at=st.floats(0, 1e9),
    unix=WILD_FLOAT,
    tick=st.integers(0, 9),
    cluster=HOSTILE,
    model=HOSTILE,
    mode=HOSTILE,
    instances=st.lists(INSTANCES, max_size=4).map(tuple),
    hosts=st.just(()),
    transfers=st.lists(TRANSFERS, max_size=4).map(tuple),
    request_rate=WILD,
)


def assert_harmless(text: str) -> None:
    assert not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 for letter in text), repr(text)


@settings(max_examples=30, deadline=None)
@given(SNAPSHOTS, HOSTILE, st.sampled_from(Severity), st.integers(1, 250))
def test_any_snapshot_can_be_shown(snapshot: Snapshot, text: str, severity: Severity, width: int) -> None:
    alert = made.alert(severity=severity, message=text, next_step=text, subject=text, host=text, key=text)
    frame = Frame(snapshot, (alert,))
    history = RateHistory()
    history.add(snapshot)
    made_rows = make_rows(frame, history)

    for pane in PANES:
        for row in made_rows[pane]:
            for cell in row.cells.values():
                assert_harmless(cell.text)
        for column in next((tuple(row.values) for row in made_rows[pane]), ()):
            chosen_rows(made_rows[pane], View(orders={pane: Order(column)}), pane)
    lines = [*details.alert_lines(alert), *top_lines(frame, Status(source_error=text), width)]
    for instance in snapshot.instances:
        lines += details.instance_lines(instance, frame)
    for transfer in snapshot.transfers:
        lines += details.transfer_lines(transfer, frame, width)
    for line in lines:
        for cell in line:
            assert_harmless(cell.text)


@settings(max_examples=30, deadline=None)
@given(SNAPSHOTS, st.integers(1, 250))
def test_the_top_bar_is_never_wider_than_the_screen(snapshot: Snapshot, width: int) -> None:
    for line in top_lines(Frame(snapshot), Status(source_error="x" * 300, read_only=True, view="界" * 90), width):
        assert sum(cell_len(cell.text) for cell in line) <= width


def test_a_transfer_that_has_ended_is_never_stale() -> None:
    done = made.transfer(3, "prefill-0", "decode-0")
    flying = made.transfer(0, "prefill-0", "decode-0")
    old = [
        replace(
            one,
            prefill=tuple(replace(record, reading_age_s=60.0) for record in one.prefill),
            decode=tuple(replace(record, reading_age_s=60.0) for record in one.decode),
        )
        for one in (done, flying)
    ]
    rows = rows_of(Frame(replace(made.frame(1).snapshot, transfers=tuple(old))))["transfers"]
    assert rows[done.key].cells["problem"].text == "-"
    assert rows[flying.key].cells["problem"].text == "stale 1m00s"


def test_long_ids_of_a_router_are_told_apart_by_their_end() -> None:
    keys = ["cmpl-___prefill_addr_10.0.0.1:8100___" + end for end in ("aaaa", "bbbb")]
    transfers = tuple(replace(made.transfer(0, "prefill-0", "decode-0"), key=key) for key in keys)
    rows = rows_of(Frame(replace(made.frame(1).snapshot, transfers=transfers)))["transfers"]
    shown = [rows[key].cells["key"].text for key in keys]
    assert [text[-4:] for text in shown] == ["aaaa", "bbbb"]
    assert {len(text) for text in shown} == {18}


def test_decode_writes_nothing_so_it_has_no_rate() -> None:
    cells = rows_of(made.frame(1))["decode"]["decode-0"].cells
    assert (cells["rate"].text, cells["spark"].text) == ("-", "")
