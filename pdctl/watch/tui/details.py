"""Everything that is known of one instance, transfer or alert, as lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdctl.watch.alerts import Alert
from pdctl.watch.snapshot import HostView, InstanceView, RankView, SideRecord, TransferView
from pdctl.watch.tui import format as show
from pdctl.watch.tui import states
from pdctl.watch.tui.format import NOTHING, Cell, Line, Tone
from pdctl.watch.tui.source import Frame

_LABEL = 17
_RECORD_LIMIT = 16
_STAGE_LIMIT = 12
_TEXT_LIMIT = 2000
_CLOCK_SLACK_S = 5.0
_STAGE_WIDTH = 11
_TIME_WIDTH = 8
EMPTY: Line = ()


def heading(text: str) -> Line:
    """A line that begins a part."""
    return (Cell(text, "title"),)


def fact(label: str, *cells: Cell) -> Line:
    """A label and what is known."""
    return (Cell(f"  {label:<{_LABEL}}", "dim"), *cells)


def _word(text: str, tone: Tone = "plain") -> Cell:
    return Cell(show.clean(text, _TEXT_LIMIT), tone) if text else NOTHING


def _figure(text: str) -> Cell:
    return NOTHING if text == show.MISSING else Cell(text)


def _age(age_s: float | None, limit: float = states.METRICS_STALE_S) -> Cell:
    if age_s is None:
        return Cell("  never read", "dim")
    old = states.is_stale(age_s, "", limit)
    return Cell(f"  {show.stale(age_s)}" if old else f"  read {show.seconds(age_s)} ago", "warn" if old else "dim")


def _rank_lines(rank: RankView) -> list[Line]:
    writer = states.writer_cell([rank])
    first: list[Cell] = [Cell(f"  rank {rank.rank:<3} ", "title"), writer]
    if rank.operation:
        first.append(
            Cell(f"  in {show.clean(rank.operation, 64)} for {show.seconds(rank.operation_age_s)}", writer.tone)
        )
    first.append(_age(rank.age_s))
    lines: list[Line] = [tuple(first)]
    if rank.error:
        lines.append(fact("  no answer", _word(rank.error, "warn")))
    lines.append(fact("  engine id, pid", _word(rank.engine_id), Cell(f"  {show.count(rank.pid)}")))
    lines.append(
        fact(
            "  in flight",
            _figure(show.count(rank.inflight)),
            Cell(
                f"  oldest {show.seconds(rank.oldest_s if rank.inflight else None)}"
                f"  {show.megabytes_per_s(rank.bytes_per_s)} MB/s"
            ),
            Cell(f"  written {show.amount(rank.posted_bytes)}", "dim"),
        )
    )
    totals = {**rank.outcomes, **{f"descriptors {name}": number for name, number in rank.descriptors.items()}}
    shown = [f"{show.clean(name, 48)} {show.count(number)}" for name, number in list(totals.items())[:24] if number]
    if shown:
        lines.append(fact("  totals", Cell(", ".join(shown))))
    if rank.errors:
        lines.append(
            fact("  errors survived", Cell(show.count(rank.errors), "warn"), Cell("  "), _word(rank.last_error))
        )
    return lines


def _host_lines(host: HostView) -> list[Line]:
    lines = [
        heading("host"),
        fact("name", _word(host.name), _age(host.age_s, states.PROCESS_STALE_S)),
        fact(
            "network",
            Cell(
                f"out {show.megabytes_per_s(host.sent_bytes_per_s)} MB/s"
                f"  in {show.megabytes_per_s(host.received_bytes_per_s)} MB/s"
            ),
        ),
        fact("load per core", _figure(show.per_second(host.load))),
        fact("memory free", _figure(show.amount(host.memory_available_bytes))),
    ]
    if host.error:
        lines.insert(2, fact("no answer", _word(host.error, "warn")))
    for device, counters in list(host.rdma.items())[:8]:
        shown = ", ".join(
            f"{show.clean(name, 48)} {show.per_second(rate)}/s" for name, rate in list(counters.items())[:8]
        )
        lines.append(fact(show.clean(device, 16), Cell(shown) if shown else NOTHING))
    return lines


def instance_lines(instance: InstanceView, frame: Frame) -> list[Line]:
    """All facts of an instance, its alerts first."""
    lines: list[Line] = [(Cell(show.clean(instance.name), "title"), Cell(f"  {show.clean(instance.url)}", "dim"))]
    for alert in frame.alerts:
        if instance.name in alert.symptom.instances:
            lines.extend(_alert_summary(alert))
    if instance.diagnosis:
        lines.append(fact("why it ended", _word(instance.diagnosis, "bad")))
    lines += [
        fact(
            "process",
            states.process_cell(instance),
            Cell(f"  pid {show.count(instance.pid)}"),
            _age(instance.process_age_s, states.PROCESS_STALE_S),
        ),
        fact("restarts", Cell(f"{show.count(instance.restarts)} since the watch began")),
        fact("memory, cores", Cell(f"{show.amount(instance.rss_bytes)}  {show.per_second(instance.cpu_cores)}")),
        fact("engine", states.engine_cell(instance), _age(instance.age_s)),
    ]
    for label, text in (("health check", instance.health_error), ("no metrics", instance.error)):
        if text:
            lines.append(fact(label, _word(text, "warn")))
    lines += [
        fact(
            "requests",
            Cell(
                f"{show.count(instance.requests_running)} running  {show.count(instance.requests_waiting)} waiting"
                f"  {show.per_second(instance.request_rate)}/s"
            ),
        ),
        fact("KV in use", _figure(show.share(instance.kv_use))),
        fact("TTFT", Cell(show.percentiles(instance.ttft))),
        fact("TPOT", Cell(show.percentiles(instance.tpot))),
        fact("failed KV loads", _figure(show.count(instance.failed_loads))),
    ]
    if instance.ranks:
        lines.append(heading("ranks"))
        for rank in instance.ranks[:_RECORD_LIMIT]:
            lines.extend(_rank_lines(rank))
        if len(instance.ranks) > _RECORD_LIMIT:
            lines.append((Cell(f"  and {len(instance.ranks) - _RECORD_LIMIT} more ranks", "dim"),))
    host = next((one for one in frame.snapshot.hosts if one.name == instance.host), None)
    lines.extend(_host_lines(host) if host else [fact("host", _word(instance.host))])
    return lines


def _alert_summary(alert: Alert) -> list[Line]:
    symptom = alert.symptom
    severity = states.severity_cell(symptom.severity)
    return [
        (
            Cell(f"{severity.text} {show.clean(symptom.code)} {show.clean(symptom.name)}", severity.tone),
            Cell(f"  for {show.whole_seconds(alert.duration_s)}", "dim"),
        ),
        (Cell("  "), _word(symptom.message)),
        (Cell("  next: ", "accent"), _word(symptom.next_step)),
    ]


def alert_lines(alert: Alert) -> list[Line]:
    """What is wrong, what to do, and what has the same cause."""
    symptom = alert.symptom
    lines = [
        *_alert_summary(alert),
        fact("subject", _word(symptom.subject)),
        fact("instances", _word(", ".join(symptom.instances))),
        fact("host", _word(symptom.host)),
        fact("opened", Cell(show.clock_time(alert.opened_unix))),
    ]
    if symptom.key:
        lines.append(fact("transfer", _word(symptom.key)))
    if alert.folded:
        lines.append(heading(f"{len(alert.folded)} more with the same cause"))
        for one in alert.folded[:100]:
            words = f"  {show.clean(one.code)} {show.clean(one.subject)}: "
            lines.append((Cell(words, states.SEVERITIES[one.severity]), _word(one.message)))
    return lines


def clock_shift(records: Sequence[SideRecord]) -> tuple[float, bool]:
    """The first moment of all, by the hosts' clocks, and whether these can be laid side by side.

    Two sides of one transfer overlap. If the clocks say otherwise, they are not set alike.
    """
    starts = [record.started_unix for record in records]
    if not starts or not all(math.isfinite(start) for start in starts):
        return 0.0, False
    longest = max((show.figure(record.age_s) or 0.0 for record in records), default=0.0)
    return min(starts), max(starts) - min(starts) <= longest + _CLOCK_SLACK_S


def _spans(record: SideRecord) -> list[tuple[str, float, float, bool]]:
    """(stage, begin, end, whether it goes on) of each stage of a record, from its own beginning."""
    moments = [
        (name, at) for name, at in record.stages.items() if show.figure(at) is not None and name != record.outcome
    ]
    moments.sort(key=lambda moment: moment[1])
    moments = moments[:_STAGE_LIMIT]
    if not moments:
        return []
    end = max(show.figure(record.age_s) or 0.0, moments[-1][1])
    ends = [at for _, at in moments[1:]] + [end]
    spans = []
    for index, ((name, begin), finish) in enumerate(zip(moments, ends, strict=True)):
        spans.append((name, begin, finish, index == len(moments) - 1 and not record.outcome))
    return spans


def _record_lines(record: SideRecord, shift: float, total: float, width: int) -> list[Line]:
    side = f"{show.clean(record.instance)} rank {record.rank}"
    lines: list[Line] = [
        (
            Cell(f"  {side} ", "title"),
            states.stage_cell([record]),
            Cell(
                f"  {show.amount(record.bytes)}, {show.count(record.descriptors)} descriptors,"
                f" {show.count(record.tokens)} tokens",
                "dim",
            ),
        )
    ]
    if states.is_stale(record.reading_age_s, ""):
        lines.append((Cell(f"    {show.stale(record.reading_age_s)}", "warn"),))
    bar_width = max(8, width - 4 - _STAGE_WIDTH - _TIME_WIDTH - 4)
    for stage, begin, end, goes_on in _spans(record):
        tone: Tone = "accent" if goes_on else "bad" if record.outcome in states.FAILED_OUTCOMES else "good"
        lines.append(
            (
                Cell(f"    {show.fit(show.clean(stage), _STAGE_WIDTH):<{_STAGE_WIDTH}}"),
                Cell(f"{show.seconds(end - begin):>{_TIME_WIDTH}}{'…' if goes_on else ' '}"),
                Cell("▕", "dim"),
                Cell(show.span_bar(begin + shift, end + shift, total, bar_width), tone),
                Cell("▏", "dim"),
            )
        )
    if record.reason:
        lines.append((Cell("    "), _word(record.reason, "bad" if record.outcome in states.FAILED_OUTCOMES else "dim")))
    return lines


def transfer_lines(transfer: TransferView, frame: Frame, width: int) -> list[Line]:
    """Both sides of a transfer on one axis of time, each stage as a bar with its length."""
    lines: list[Line] = [(Cell(show.clean(transfer.key), "title"),)]
    for alert in frame.alerts:
        if transfer.key in (alert.symptom.key, *(one.key for one in alert.folded)):
            lines.extend(_alert_summary(alert))
    records = (*transfer.decode, *transfer.prefill)
    first, alike = clock_shift(records)
    totals = []
    for record in records:
        shift = record.started_unix - first if alike else 0.0
        totals += [end + shift for _, _, end, _ in _spans(record)]
    total = max(totals, default=0.0)
    for name, side in (("decode", transfer.decode), ("prefill", transfer.prefill)):
        lines.append(heading(name))
        if not side:
            lines.append((Cell("  no record: this side does not know the transfer, or no longer", "warn"),))
        for record in side[:_RECORD_LIMIT]:
            lines.extend(_record_lines(record, record.started_unix - first if alike else 0.0, total, width))
        if len(side) > _RECORD_LIMIT:
            lines.append((Cell(f"  and {len(side) - _RECORD_LIMIT} more ranks", "dim"),))
    if records and not alike:
        lines.append((Cell("  The hosts' clocks differ: each side is drawn from its own beginning.", "dim"),))
    requests = dict.fromkeys(record.request_id for record in records if record.request_id)
    if requests:
        lines.append(fact("request ids", _word(", ".join(requests))))
    return lines
