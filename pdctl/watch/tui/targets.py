"""What a selected row stands for: which instance, which pair, which row a typed name means. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdctl.watch.alerts import Alert
from pdctl.watch.snapshot import InstanceView, TransferView
from pdctl.watch.tui.place import PaneName
from pdctl.watch.tui.rows import Row, alert_key
from pdctl.watch.tui.source import Frame

Subject = InstanceView | TransferView | Alert


def subject_of(frame: Frame, pane: PaneName, key: str) -> Subject | None:
    """What the row of that key is about, in this frame."""
    if pane == "alerts":
        return next((alert for alert in frame.alerts if alert_key(alert) == key), None)
    if pane == "transfers":
        return next((transfer for transfer in frame.snapshot.transfers if transfer.key == key), None)
    return frame.snapshot.instance(key)


def instances_of(subject: Subject) -> list[str]:
    """The instances that it is about, prefill's first."""
    if isinstance(subject, InstanceView):
        return [subject.name]
    if isinstance(subject, TransferView):
        return list(dict.fromkeys(record.instance for record in (*subject.prefill, *subject.decode)))
    return list(subject.symptom.instances)


def instance_of(subject: Subject, frame: Frame) -> InstanceView | None:
    """The one instance to look at first."""
    found = (frame.snapshot.instance(name) for name in instances_of(subject))
    return next((instance for instance in found if instance is not None), None)


def pair_of(subject: Subject, frame: Frame) -> tuple[str, str] | None:
    """A prefill and a decode instance to check the way between.

    A side that the subject does not name is taken from an alert that names the other one, else the first of the plan.
    """
    roles: Mapping[str, str] = {one.name: one.role for one in frame.snapshot.instances}

    def first(names: Sequence[str], role: str) -> str | None:
        return next((name for name in names if roles.get(name) == role), None)

    named = instances_of(subject)
    prefill, decode = first(named, "prefill"), first(named, "decode")
    for alert in frame.alerts:
        about = alert.symptom.instances
        if prefill in about or decode in about:
            prefill, decode = prefill or first(about, "prefill"), decode or first(about, "decode")
    prefill, decode = prefill or first(list(roles), "prefill"), decode or first(list(roles), "decode")
    return (prefill, decode) if prefill and decode else None


def find(name: str, rows: Mapping[PaneName, Sequence[Row]], alerts: Sequence[Alert]) -> tuple[PaneName, str] | None:
    """The row that a typed name means: an instance, an alert's code or name, a transfer's key or how that begins."""
    wanted = name.strip().lower()
    if not wanted:
        return None
    for pane in ("prefill", "decode"):
        for row in rows.get(pane, ()):
            if row.key.lower() == wanted:
                return pane, row.key
    for alert in alerts:
        if wanted in (alert.symptom.code.lower(), alert.symptom.name.lower()):
            return "alerts", alert_key(alert)
    transfers = rows.get("transfers", ())
    exact = [row.key for row in transfers if row.key.lower() == wanted]
    begun = [row.key for row in transfers if row.key.lower().startswith(wanted)]
    for keys in (exact, begun):
        if keys:
            return "transfers", keys[0]
    return None
