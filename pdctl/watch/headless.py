"""What a watch without a screen says: lines of text for people, or of JSON for programs (docs/watch.md). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pdctl.watch.alerts import Alert, AlertEvent, Severity
from pdctl.watch.snapshot import InstanceView, RankView, Snapshot
from pdctl.watch.tui.source import Frame
from pdctl.watch.wording import plain, timestamp

SCHEMA = 1
_RANKING = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}
_KEYS_OF_INSTANCE = ("name", "role", "host", "process", "healthy", "restarts", "requests_running", "requests_waiting")


def worst(alerts: Iterable[Alert]) -> Severity | None:
    """The worst severity; None without alerts."""
    return max((alert.symptom.severity for alert in alerts), key=_RANKING.__getitem__, default=None)


def exit_code(alerts: Iterable[Alert], snapshot: Snapshot | None = None) -> int:
    """0 for nothing or notes, 1 from a warning on, and 3 if a host did not answer (which explains the alerts)."""
    if snapshot is not None and unreachable(snapshot):
        return 3
    severity = worst(alerts)
    return 1 if severity is not None and _RANKING[severity] >= _RANKING[Severity.WARNING] else 0


def unreachable(snapshot: Snapshot) -> dict[str, str]:
    """Hosts that the last poll had no answer from, with the reason."""
    return {host.name: plain(host.error) for host in snapshot.hosts if host.error}


def event_json(event: AlertEvent, snapshot: Snapshot) -> dict[str, Any]:
    """One line of JSON, and what hooks and webhooks are given."""
    return {
        "schema": SCHEMA,
        "kind": "alert",
        "event": event.kind,
        "at": timestamp(snapshot.unix),
        "unix": snapshot.unix,
        "cluster": snapshot.cluster,
        "alert": event.alert.to_json(),
    }


def heartbeat_json(frame: Frame) -> dict[str, Any]:
    """A sign of life, with the state of the cluster in a few figures. What is not known is null."""
    snapshot = frame.snapshot
    return {
        "schema": SCHEMA,
        "kind": "heartbeat",
        "at": timestamp(snapshot.unix),
        "unix": snapshot.unix,
        "cluster": snapshot.cluster,
        "tick": snapshot.tick,
        "alerts": _by_severity(frame.alerts),
        "instances_healthy": sum(instance.healthy is True for instance in snapshot.instances),
        "instances": len(snapshot.instances),
        "hosts_unreachable": sorted(unreachable(snapshot)),
        "transfers_in_flight": _in_flight(snapshot),
        "request_rate": snapshot.request_rate,
        "poll_s": round(snapshot.poll_s, 6),
        "poll_errors": snapshot.poll_errors,
    }


def once_json(frame: Frame) -> dict[str, Any]:
    """What ``--once --json`` prints."""
    snapshot = frame.snapshot
    severity = worst(frame.alerts)
    return {
        "schema": SCHEMA,
        "kind": "look",
        "at": timestamp(snapshot.unix),
        "unix": snapshot.unix,
        "cluster": snapshot.cluster,
        "exit_code": exit_code(frame.alerts, snapshot),
        "worst": None if severity is None else severity.value,
        "alerts": [alert.to_json() for alert in frame.alerts],
        "unreachable": unreachable(snapshot),
        "instances": [_instance_json(instance) for instance in snapshot.instances],
        "transfers_in_flight": _in_flight(snapshot),
        "request_rate": snapshot.request_rate,
        "poll_s": round(snapshot.poll_s, 6),
        "poll_errors": snapshot.poll_errors,
    }


def event_lines(event: AlertEvent, snapshot: Snapshot) -> list[str]:
    """The same for people: what, where and since when, then what to do."""
    alert = event.alert
    lasted = f" after {alert.duration_s:.1f} s" if event.kind == "closed" else ""
    lines = [f"{timestamp(snapshot.unix)} {event.kind}{lasted}: {_headline(alert)}"]
    if event.kind != "closed":
        lines += _details(alert)
    return lines


def heartbeat_line(frame: Frame) -> str:
    """A sign of life for people."""
    snapshot = frame.snapshot
    healthy = sum(instance.healthy is True for instance in snapshot.instances)
    in_flight = _in_flight(snapshot)
    parts = [
        f"{healthy} of {len(snapshot.instances)} instances healthy",
        _alert_words(frame.alerts),
        f"{'unknown' if in_flight is None else in_flight} transfers in flight",
        f"poll {snapshot.poll_s:.2f} s",
    ]
    if snapshot.request_rate is not None:
        parts.insert(2, f"{snapshot.request_rate:.1f} requests/s")
    if snapshot.poll_errors:
        parts.append(f"{snapshot.poll_errors} readings failed")
    return f"{timestamp(snapshot.unix)} watching {plain(snapshot.cluster)}: {', '.join(parts)}"


def once_lines(frame: Frame) -> list[str]:
    """What ``--once`` prints for people."""
    snapshot = frame.snapshot
    lines: list[str] = []
    for alert in sorted(frame.alerts, key=lambda one: -_RANKING[one.symptom.severity]):
        lines += [_headline(alert), *_details(alert)]
    lines += [f"unreachable: {name}: {reason}" for name, reason in unreachable(snapshot).items()]
    return [*lines, heartbeat_line(frame)]


def _headline(alert: Alert) -> str:
    symptom = alert.symptom
    return plain(
        f"{symptom.severity.value.upper()} {symptom.code} {symptom.name} {symptom.subject}: {symptom.message}", 4000
    )


def _details(alert: Alert) -> list[str]:
    symptom = alert.symptom
    lines = [f"    next: {plain(symptom.next_step)}"] if symptom.next_step else []
    if alert.folded:
        counts = Counter(one.code for one in alert.folded)
        said = ", ".join(f"{plain(code)} x {count}" for code, count in sorted(counts.items()))
        lines.append(f"    {len(alert.folded)} more with the same cause: {said}")
    return lines


def _by_severity(alerts: Iterable[Alert]) -> dict[str, int]:
    counts = Counter(alert.symptom.severity for alert in alerts)
    return {severity.value: counts[severity] for severity in Severity}


def _alert_words(alerts: Iterable[Alert]) -> str:
    counts = {name: count for name, count in _by_severity(alerts).items() if count}
    return "no alerts" if not counts else ", ".join(f"{count} {name}" for name, count in counts.items())


def _in_flight(snapshot: Snapshot) -> int | None:
    if all(rank.age_s is None for instance in snapshot.instances for rank in instance.ranks):
        return None  # nobody said
    return snapshot.dropped + sum(transfer.in_flight for transfer in snapshot.transfers)


def _instance_json(instance: InstanceView) -> dict[str, Any]:
    return {
        **{key: getattr(instance, key) for key in _KEYS_OF_INSTANCE},
        "error": plain(instance.error or instance.health_error),
        "reading_age_s": instance.age_s,
        "ranks": [_rank_json(rank) for rank in instance.ranks],
    }


def _rank_json(rank: RankView) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "writer": rank.writer or None,
        "heartbeat_age_s": rank.heartbeat_age_s,
        "inflight": rank.inflight,
        "oldest_s": rank.oldest_s,
        "reading_age_s": rank.age_s,
        "error": plain(rank.error),
    }
