"""From a frame to the rows of each table: texts to draw, values to sort by, words to filter by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from pdctl.watch.alerts import Alert
from pdctl.watch.snapshot import InstanceView, RankView, SideRecord, Snapshot, TransferView
from pdctl.watch.tui import format as show
from pdctl.watch.tui import states
from pdctl.watch.tui.format import NOTHING, Cell
from pdctl.watch.tui.place import Column, PaneName
from pdctl.watch.tui.source import Frame

SPARK_WIDTH = 12
SPARK_SECONDS = 60.0
_HISTORY_LIMIT = 600

SortValue = float | str | None

INSTANCE_COLUMNS = (
    Column("name", "instance", 10, 0),
    Column("process", "process", 9, 1),
    Column("engine", "engine", 11, 3),
    Column("queue", "run/wait", 8, 4, right=True),
    Column("kv", "KV", 4, 5, right=True),
    Column("writer", "writer, beat", 14, 2),
    Column("flight", "flight", 6, 6, right=True),
    Column("oldest", "oldest", 6, 7, right=True),
    Column("rate", "MB/s", 6, 8, right=True),
    Column("spark", "last 60 s", SPARK_WIDTH, 9),
    Column("error", "last error", 14, 10, grows=True),
)
_KEY_WIDTH = 18
TRANSFER_COLUMNS = (
    Column("key", "transfer", _KEY_WIDTH, 0),
    Column("prefill", "prefill", 10, 4),
    Column("p_stage", "its stage", 12, 1),
    Column("decode", "decode", 10, 5),
    Column("d_stage", "its stage", 12, 2),
    Column("age", "age", 6, 3, right=True),
    Column("in_stage", "in stage", 8, 7, right=True),
    Column("bytes", "bytes", 8, 6, right=True),
    Column("descriptors", "done/posted", 11, 8, right=True),
    Column("problem", "problem", 12, 9, grows=True),
)
ALERT_COLUMNS = (
    Column("severity", "severity", 10, 0),
    Column("code", "code", 5, 1),
    Column("name", "what", 18, 5),
    Column("subject", "subject", 16, 2),
    Column("lasted", "for", 6, 3, right=True),
    Column("folded", "+", 4, 6, right=True),
    Column("message", "message", 28, 4, grows=True),
)
COLUMNS: Mapping[PaneName, tuple[Column, ...]] = {
    "prefill": INSTANCE_COLUMNS,
    "decode": INSTANCE_COLUMNS,
    "transfers": TRANSFER_COLUMNS,
    "alerts": ALERT_COLUMNS,
}


@dataclass(frozen=True)
class Drawn:
    """What a row looks like.

    Attributes:
        cells: what is drawn, by column.
        values: what is sorted by, by column; None sorts last.
        words: what the filter looks in, in small letters.
    """

    cells: Mapping[str, Cell]
    values: Mapping[str, SortValue]
    words: str


class Row:
    """One row of a table. It is formatted when somebody looks at it: of hundreds of rows few are in view.

    Args:
        key: the same thing in the next frame has the same.
        faulty: whether it is shown with "faults only".
        make: formats it.
    """

    def __init__(self, key: str, faulty: bool, make: Callable[[], Drawn]) -> None:
        self.key = key
        self.faulty = faulty
        self._make = make

    @cached_property
    def _drawn(self) -> Drawn:
        return self._make()

    @property
    def cells(self) -> Mapping[str, Cell]:
        """What is drawn, by column."""
        return self._drawn.cells

    @property
    def values(self) -> Mapping[str, SortValue]:
        """What is sorted by, by column; None sorts last."""
        return self._drawn.values

    @property
    def words(self) -> str:
        """What the filter looks in, in small letters."""
        return self._drawn.words


class RateHistory:
    """Bytes per second of each instance over the last minute, by the snapshots' own clock."""

    def __init__(self) -> None:
        self._points: dict[str, deque[tuple[float, float | None]]] = {}
        self._at: float | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Take in a snapshot. After a step back in a replay, what came later is forgotten."""
        if self._at is not None and snapshot.at <= self._at:
            for points in self._points.values():
                while points and points[-1][0] >= snapshot.at:
                    points.pop()
        self._at = snapshot.at
        names = {instance.name for instance in snapshot.instances}
        self._points = {name: points for name, points in self._points.items() if name in names}
        for instance in snapshot.instances:
            points = self._points.setdefault(instance.name, deque(maxlen=_HISTORY_LIMIT))
            points.append((snapshot.at, known_sum(rank.bytes_per_s for rank in fresh(instance.ranks))))
            while points and points[0][0] < snapshot.at - SPARK_SECONDS:
                points.popleft()

    def bars(self, name: str) -> str:
        """The sparkline of that instance, the newest at the right; of each bar the largest reading in it."""
        if self._at is None:
            return ""
        buckets: list[float | None] = [None] * SPARK_WIDTH
        for at, value in self._points.get(name, ()):
            if value is None:
                continue
            index = SPARK_WIDTH - 1 - int((self._at - at) / SPARK_SECONDS * SPARK_WIDTH)
            if 0 <= index < SPARK_WIDTH:
                before = buckets[index]
                buckets[index] = value if before is None else max(before, value)
        return show.sparkline(buckets)


@dataclass
class Order:
    """How a table is sorted: by urgency if no column is named."""

    column: str = ""
    reverse: bool = False


@dataclass
class View:
    """What of the rows a person wants to see."""

    filter: str = ""
    faults_only: bool = False
    orders: dict[PaneName, Order] = field(default_factory=dict)


def known_sum(values: Iterable[float | None]) -> float | None:
    """The sum of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def fresh(ranks: Sequence[RankView]) -> list[RankView]:
    """The ranks whose reading is of now."""
    return [rank for rank in ranks if rank.age_s is not None and not states.is_stale(rank.age_s, rank.error)]


def _total(ranks: Sequence[RankView], pick: Callable[[RankView], float | None], text: Callable[[float], str]) -> Cell:
    """A sum over ranks. ``≥`` if some did not say; dim if none of it is of now."""
    live = fresh(ranks)
    value = known_sum(pick(rank) for rank in live)
    if value is not None:
        partial = any(pick(rank) is None for rank in live) or len(live) < len(ranks)
        return Cell(("≥" if partial else "") + text(value))
    old = known_sum(pick(rank) for rank in ranks)
    return NOTHING if old is None else Cell(text(old), "dim")


def _faulty_names(alerts: Sequence[Alert]) -> tuple[set[str], dict[str, Alert]]:
    """Instances that alerts are about, and the alert of each transfer that has one."""
    names: set[str] = set()
    transfers: dict[str, Alert] = {}
    for alert in alerts:
        for symptom in (alert.symptom, *alert.folded):
            names.update(symptom.instances)
            if symptom.key:
                transfers.setdefault(symptom.key, alert)
    return names, transfers


def _instance_row(instance: InstanceView, history: RateHistory, alerted: bool) -> Row:
    troubled = any(
        cell.tone in ("bad", "warn")
        for cell in (states.process_cell(instance), states.engine_cell(instance), states.writer_cell(instance.ranks))
    )
    # The bars are of now: later the history is another.
    bars = history.bars(instance.name)
    return Row(instance.name, alerted or troubled, partial(_draw_instance, instance, bars))


def _draw_instance(instance: InstanceView, bars: str) -> Drawn:
    old = states.is_stale(instance.age_s, instance.error)
    waiting, running = instance.requests_waiting, instance.requests_running
    ranks = instance.ranks
    live = fresh(ranks)
    queue = f"{show.count(running)}/{show.count(waiting)}"
    # Of nothing in flight there is no oldest, whatever a rank says.
    oldest = max(
        (rank.oldest_s for rank in (live or ranks) if rank.oldest_s is not None and rank.inflight), default=None
    )
    kv = show.figure(instance.kv_use)
    last_error = next((text for rank in ranks for text in (rank.error, rank.last_error) if text), "")
    error = instance.diagnosis or instance.health_error or instance.error or last_error
    process, engine, writer = (
        states.process_cell(instance),
        states.engine_cell(instance),
        states.writer_cell(ranks),
    )
    # Only prefill writes; that decode writes nothing is no figure.
    writes = instance.role != "decode"
    rate = _total(ranks, lambda rank: rank.bytes_per_s, show.megabytes_per_s) if writes else NOTHING
    flight = _total(ranks, lambda rank: rank.inflight, show.count)
    cells = {
        "name": Cell(show.clean(instance.name), "title"),
        "process": process,
        "engine": engine,
        "queue": Cell(queue, "dim" if old or running is waiting is None else "plain"),
        "kv": Cell(show.share(kv), "dim" if old or kv is None else "warn" if kv >= 0.95 else "plain"),
        "writer": writer,
        "flight": flight,
        "oldest": Cell(show.seconds(oldest), "dim" if oldest is None or not live else "plain"),
        "rate": rate,
        "spark": Cell(bars if writes else "", "accent" if live else "dim"),
        "error": Cell(show.clean(error, 256), "bad" if instance.diagnosis else "warn") if error else NOTHING,
    }
    values: dict[str, SortValue] = {
        "name": instance.name,
        "process": process.text,
        "engine": engine.text,
        "queue": known_sum((running, waiting)),
        "kv": kv,
        "writer": max((rank.heartbeat_age_s for rank in ranks if rank.heartbeat_age_s is not None), default=None),
        "flight": known_sum(rank.inflight for rank in ranks),
        "oldest": oldest,
        "rate": known_sum(rank.bytes_per_s for rank in ranks),
        "error": error or None,
    }
    words = " ".join((instance.name, instance.host, process.text, engine.text, writer.text, error))
    return Drawn(cells, values, words.lower())


def _descriptors(records: Sequence[SideRecord]) -> Cell:
    posted = sum(record.descriptors for record in records)
    if not records or (not posted and not any("posted" in record.stages for record in records)):
        return NOTHING
    done = sum(record.descriptors for record in records if record.outcome == "completed")
    return Cell(f"{show.count(done)}/{show.count(posted)}")


def _names(records: Sequence[SideRecord]) -> str:
    return ",".join(dict.fromkeys(record.instance for record in records))


def _transfer_row(transfer: TransferView, alert: Alert | None) -> Row:
    failed = any(record.outcome in states.FAILED_OUTCOMES for record in (*transfer.prefill, *transfer.decode))
    return Row(transfer.key, alert is not None or failed, partial(_draw_transfer, transfer, alert))


def _draw_transfer(transfer: TransferView, alert: Alert | None) -> Drawn:
    prefill, decode = transfer.prefill, transfer.decode
    records = (*prefill, *decode)
    flying = [record for record in records if not record.outcome]
    in_stage = max((record.stage_age_s for record in flying), default=None)
    bytes_written = max(sum(record.bytes for record in prefill), sum(record.bytes for record in decode))
    failed = any(record.outcome in states.FAILED_OUTCOMES for record in records)
    # What has ended does not change any more, however long ago it was read.
    old = bool(flying) and all(record.reading_age_s > states.METRICS_STALE_S for record in flying)
    if alert is not None:
        symptom = alert.symptom
        tone = states.SEVERITIES[symptom.severity]
        problem = states.glyphed(tone, f"{show.clean(symptom.code)} {show.clean(symptom.name)}")
    else:
        reason = next((record.reason for record in records if record.reason), "")
        problem = Cell(show.clean(reason, 256), "bad" if failed else "dim") if reason else NOTHING
    if old:
        age = max(record.reading_age_s for record in flying)
        problem = Cell(f"{problem.text} ({show.stale(age)})" if problem != NOTHING else show.stale(age), problem.tone)
    p_stage, d_stage = states.stage_cell(prefill), states.stage_cell(decode)
    in_flight = bool(flying)
    age_s = transfer.age_s if records else None
    cells = {
        "key": Cell(show.tail(transfer.key, _KEY_WIDTH), "title" if in_flight else "dim"),
        "prefill": Cell(show.clean(_names(prefill)) or show.MISSING),
        "p_stage": Cell(p_stage.text, "dim") if old else p_stage,
        "decode": Cell(show.clean(_names(decode)) or show.MISSING),
        "d_stage": Cell(d_stage.text, "dim") if old else d_stage,
        "age": Cell(show.seconds(age_s), "dim" if old or not in_flight else "plain"),
        "in_stage": Cell(show.seconds(in_stage), "dim" if old or in_stage is None else "plain"),
        "bytes": Cell(show.amount(bytes_written)) if bytes_written else NOTHING,
        "descriptors": _descriptors(prefill),
        "problem": problem,
    }
    values: dict[str, SortValue] = {
        "key": transfer.key,
        "prefill": _names(prefill) or None,
        "p_stage": p_stage.text,
        "decode": _names(decode) or None,
        "d_stage": d_stage.text,
        "age": age_s,
        "in_stage": in_stage,
        "bytes": bytes_written or None,
        "descriptors": sum(record.descriptors for record in prefill) or None,
        "problem": problem.text if problem != NOTHING else None,
    }
    words = " ".join((transfer.key, _names(prefill), _names(decode), p_stage.text, d_stage.text, problem.text))
    return Drawn(cells, values, words.lower())


def alert_key(alert: Alert) -> str:
    """Of its row."""
    return "\n".join(alert.symptom.identity)


def _draw_alert(alert: Alert) -> Drawn:
    symptom = alert.symptom
    severity = states.severity_cell(symptom.severity)
    cells = {
        "severity": severity,
        "code": Cell(show.clean(symptom.code), "title"),
        "name": Cell(show.clean(symptom.name)),
        "subject": Cell(show.clean(symptom.subject), severity.tone),
        "lasted": Cell(show.whole_seconds(alert.duration_s)),
        "folded": Cell(f"+{len(alert.folded)}", "accent") if alert.folded else Cell(""),
        "message": Cell(show.clean(symptom.message)),
    }
    values: dict[str, SortValue] = {
        "severity": _rank_of(alert),
        "code": symptom.code,
        "name": symptom.name,
        "subject": symptom.subject,
        "lasted": alert.duration_s,
        "folded": len(alert.folded),
        "message": symptom.message,
    }
    parts = (symptom.code, symptom.name, symptom.subject, symptom.host, symptom.message, *symptom.instances)
    return Drawn(cells, values, " ".join((severity.text, *parts)).lower())


def _rank_of(alert: Alert) -> int:
    return list(states.SEVERITIES).index(alert.symptom.severity)


def make_rows(frame: Frame, history: RateHistory) -> dict[PaneName, list[Row]]:
    """The rows of every table in the order they are shown unless a person asks for another.

    Instances as planned; transfers with an alert first, then those in flight, oldest first; alerts by severity.
    The router stands among decode's rows: clients meet it on that side of the cluster.
    """
    snapshot = frame.snapshot
    names, by_key = _faulty_names(frame.alerts)
    made: dict[PaneName, list[Row]] = {"prefill": [], "decode": []}
    for instance in snapshot.instances:
        row = _instance_row(instance, history, instance.name in names)
        made["prefill" if instance.role == "prefill" else "decode"].append(row)
    seen: dict[str, Row] = {}
    urgency: dict[str, tuple[bool, bool]] = {}
    for transfer in snapshot.transfers:
        alert = by_key.get(transfer.key)
        seen[transfer.key] = _transfer_row(transfer, alert)
        urgency[transfer.key] = (alert is None, not transfer.in_flight)
    made["transfers"] = sorted(seen.values(), key=lambda row: urgency[row.key])
    alerts = sorted(frame.alerts, key=lambda alert: (_rank_of(alert), -alert.duration_s))
    made["alerts"] = list(
        {alert_key(alert): Row(alert_key(alert), True, partial(_draw_alert, alert)) for alert in alerts}.values()
    )
    return made


def chosen_rows(rows: Sequence[Row], view: View, pane: PaneName) -> list[Row]:
    """What of the rows is shown, in the order that is asked for. ``!word`` in the filter means without that word."""
    wanted = view.filter.strip().lower()
    without = wanted.startswith("!")
    wanted = wanted[1:].strip() if without else wanted
    chosen = [row for row in rows if not wanted or (wanted in row.words) is not without]
    if view.faults_only:
        chosen = [row for row in chosen if row.faulty]
    order = view.orders.get(pane)
    if order is None or not order.column:
        return list(reversed(chosen)) if order is not None and order.reverse else chosen

    def value(row: Row) -> tuple[int, float, str]:
        found = row.values.get(order.column)
        return (1, 0.0, found.lower()) if isinstance(found, str) else (0, show.figure(found) or 0.0, "")

    known = [row for row in chosen if row.values.get(order.column) is not None]
    unknown = [row for row in chosen if row.values.get(order.column) is None]
    return sorted(known, key=value, reverse=order.reverse) + unknown


def sortable(columns: Sequence[Column]) -> tuple[str, ...]:
    """The keys of the columns that can be sorted by, first the order of urgency."""
    return ("", *(column.key for column in columns if column.key != "spark"))
