"""Alerts over time: symptoms that last open one, it is updated while they do, and closes with its duration.

One fault is one alert. A cause (a host that is gone, a dead writer) takes the symptoms that it explains into its own
alert, and symptoms of many transfers between the same two instances are one alert with the others folded in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pdctl.watch.alerts import Alert, AlertEvent, Severity, Symptom
from pdctl.watch.rules import CODES, PRECEDENCE, find_symptoms
from pdctl.watch.settings import WatchSettings
from pdctl.watch.snapshot import Snapshot

Identity = tuple[str, str]

FOLDED_LIMIT: Final = 256
"""No more symptoms are kept in one alert; the message tells how many there are."""
_COMPLETE_SNAPSHOTS: Final = 3
_RECENT_LIMIT: Final = 64
_OLD_SNAPSHOTS: Final = 6
_CLOSED_LIMIT: Final = 1024
_FLAPS_COUNTED: Final = 4
_ORDER: Final = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
# Never hidden in another alert: a possibly wrong answer is nobody's mere symptom, and a watch that is late is its own.
_NEVER_FOLDED: Final = frozenset({"T010", "E005"})
# What a rank, or a pair, explains. A host or an instance that is gone explains everything of its own.
_EXPLAINED_BY_RANK: Final = frozenset(code for code in CODES if code[0] == "T") | {"W004", "E004"}
_EXPLAINED_BY_PAIR: Final = frozenset({"T001", "T002", "T003", "T004", "T005", "T008", "T009", "T012", "T013"})


@dataclass
class _Open:
    """An alert that is open."""

    symptom: Symptom
    opened_at: float
    opened_unix: float
    seen_at: float
    hold_s: float
    # Since when it has been seen without a break; an alert is held open through breaks.
    seen_since: float
    clean_ticks: int = 0
    folded: tuple[Symptom, ...] = ()
    # Alerts that it took in; they count until it closes, since what it hides cannot be seen to heal.
    taken: dict[Identity, Symptom] = field(default_factory=dict)
    told_at: float = 0.0
    told: frozenset[Identity] = frozenset()
    told_severity: Severity = Severity.INFO

    def alert(self, now: float, *, is_open: bool = True) -> Alert:
        lasted, unseen = max(0.0, now - self.opened_at), max(0.0, now - self.seen_at)
        present = max(0.0, self.seen_at - self.seen_since)
        return Alert(self.symptom, self.opened_unix, lasted, is_open, self.folded, unseen, present)


class History:
    """The last snapshots, thinned so that they stay small: what is older has fewer transfers, or none.

    Args:
        settings: how far back rules look.
    """

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings
        self._old: list[Snapshot] = []
        self._recent: list[Snapshot] = []

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """Oldest first."""
        return [*self._old, *self._recent]

    def add(self, snapshot: Snapshot) -> None:
        """Take the next snapshot."""
        self._recent.append(snapshot)
        if len(self._recent) > _COMPLETE_SNAPSHOTS:
            place = len(self._recent) - _COMPLETE_SNAPSHOTS - 1
            former = self._recent[place]
            flying = tuple(transfer for transfer in former.transfers if transfer.in_flight)
            self._recent[place] = replace(former, transfers=flying)
        interval = max(self._settings.interval_s, snapshot.at - self._recent[-2].at if len(self._recent) > 1 else 0.0)
        since = snapshot.at - (self._settings.answer_s + 4 * interval + 1.0)
        while len(self._recent) > _RECENT_LIMIT or (
            len(self._recent) > _COMPLETE_SNAPSHOTS + 1 and self._recent[0].at < since
        ):
            self._retire(self._recent.pop(0))
        reach = max(self._settings.window_s, 2 * interval)
        while self._old and (len(self._old) > _OLD_SNAPSHOTS + 1 or self._old[0].at < snapshot.at - reach):
            self._old.pop(0)

    def _retire(self, snapshot: Snapshot) -> None:
        if not self._old or snapshot.at - self._old[-1].at >= self._settings.window_s / _OLD_SNAPSHOTS:
            self._old.append(replace(snapshot, transfers=()))


class Watchdog:
    """Looks at one snapshot after another and keeps the book of alerts. Memory is bounded; not for several threads.

    Args:
        settings: thresholds and patience.
    """

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings
        self._begin()

    def _begin(self) -> None:
        self._history = History(self._settings)
        self._pending: dict[Identity, int] = {}
        self._open: dict[Identity, _Open] = {}
        # When an alert closed last, and how often it has come back.
        self._closed: OrderedDict[Identity, tuple[float, int]] = OrderedDict()
        self._last: Snapshot | None = None
        self._interval_s = self._settings.interval_s

    def look(self, snapshot: Snapshot) -> tuple[list[Alert], list[AlertEvent]]:
        """Judge the next snapshot.

        A snapshot that is older than the one before it (a recording that was wound back) begins a new book.

        Returns:
            The alerts that are open now, worst first; and what changed since the last look: what opened, then what was
            updated, then what closed. Each alert opens before it is updated or closed, and closes once.
        """
        events: list[AlertEvent] = []
        if self._last is not None and snapshot.at < self._last.at:
            at = self._last.at
            events += [AlertEvent("closed", one.alert(at, is_open=False)) for one in self._open.values()]
            self._begin()
        elif self._last is not None:
            # The pace may have been changed since.
            self._interval_s = max(self._settings.interval_s, snapshot.at - self._last.at)
        self._last = snapshot
        self._history.add(snapshot)
        groups = _grouped(find_symptoms(self._history.snapshots, self._settings), self._open)
        causes = self._causes(groups)
        explained = self._fold(groups, causes)
        opened = self._see(groups, snapshot)
        closed = self._miss(groups, causes, snapshot)
        for identity, cause in causes.items():
            self._take_in(identity, cause, explained.get(identity, ()))
        # What opened is told as it is after folding.
        events += [AlertEvent("opened", self._open[identity].alert(snapshot.at)) for identity in opened]
        events += self._updates(set(opened), snapshot.at)
        return self.alerts(), events + closed

    def alerts(self) -> list[Alert]:
        """The alerts that are open, worst first."""
        now = self._last.at if self._last is not None else 0.0
        ordered = sorted(
            self._open.items(),
            key=lambda item: (
                _ORDER[item[1].symptom.severity],
                PRECEDENCE.get(item[0][0], len(PRECEDENCE)),
                item[1].opened_at,
                item[0],
            ),
        )
        return [one.alert(now) for _, one in ordered]

    def _needed(self, code: str) -> int:
        return 1 if CODES[code].certain else self._settings.open_ticks

    def _causes(self, groups: dict[Identity, list[Symptom]]) -> dict[Identity, Symptom]:
        """Causes that are open, or open now, and are not explained by another; first things first."""
        found: dict[Identity, Symptom] = {}
        for identity, one in self._open.items():
            # One that is kept open only since it flaps explains nothing now.
            if CODES[identity[0]].cause and one.clean_ticks < self._settings.close_ticks:
                found[identity] = one.symptom
        for identity, symptoms in groups.items():
            code = identity[0]
            if CODES[code].cause and (identity in found or self._pending.get(identity, 0) + 1 >= self._needed(code)):
                found[identity] = symptoms[0]
        heads: dict[Identity, Symptom] = {}
        for identity, symptom in sorted(found.items(), key=lambda item: (PRECEDENCE[item[0][0]], item[0][1])):
            if not any(_explains(cause, symptom) for cause in heads.values()):
                heads[identity] = symptom
        return heads

    def _fold(
        self, groups: dict[Identity, list[Symptom]], causes: dict[Identity, Symptom]
    ) -> dict[Identity, list[Symptom]]:
        """For each cause the symptoms that it explains; their groups are taken out of ``groups``."""
        explained: dict[Identity, list[Symptom]] = {}
        for identity in list(groups):
            if identity in causes:
                continue
            symptom = groups[identity][0]
            cause = next((one for one, by in causes.items() if _explains(by, symptom)), None)
            if cause is not None:
                explained.setdefault(cause, []).extend(groups.pop(identity))
                self._pending.pop(identity, None)
        return explained

    def _see(self, groups: dict[Identity, list[Symptom]], snapshot: Snapshot) -> list[Identity]:
        """Count, open and renew what is seen now. Returns what opened."""
        opened: list[Identity] = []
        pending: dict[Identity, int] = {}
        for identity, symptoms in groups.items():
            one = self._open.get(identity)
            if one is None:
                pending[identity] = self._pending.get(identity, 0) + 1
                if pending[identity] < self._needed(identity[0]):
                    continue
                del pending[identity]
                one = self._open[identity] = self._opening(identity, symptoms[0], snapshot)
                opened.append(identity)
            one.symptom = _headline(symptoms, identity)
            one.folded = tuple(symptoms[1 : 1 + FOLDED_LIMIT])
            if one.clean_ticks:
                one.seen_since = snapshot.at
            one.seen_at = snapshot.at
            one.clean_ticks = 0
        # What was not seen now begins anew: ticks count in a row.
        self._pending = pending
        return sorted(opened, key=lambda identity: PRECEDENCE[identity[0]])

    def _opening(self, identity: Identity, symptom: Symptom, snapshot: Snapshot) -> _Open:
        closed_at, flaps = self._closed.get(identity, (float("-inf"), 0))
        hold = CODES[identity[0]].hold_s
        if snapshot.at - closed_at <= self._settings.flap_window_s:
            flaps = min(flaps + 1, _FLAPS_COUNTED)
            hold = max(hold, self._settings.flap_hold_s * 2.0 ** (flaps - 1))
        else:
            flaps = 0
        self._closed[identity] = (closed_at, flaps)
        return _Open(symptom, snapshot.at, snapshot.unix, snapshot.at, hold, snapshot.at, told_at=snapshot.at)

    def _miss(
        self, groups: dict[Identity, list[Symptom]], causes: dict[Identity, Symptom], snapshot: Snapshot
    ) -> list[AlertEvent]:
        """Close what is over, and what became part of another alert."""
        events: list[AlertEvent] = []
        for identity, one in list(self._open.items()):
            if identity in groups:
                continue
            if identity not in causes:
                taker = next((name for name, by in causes.items() if _explains(by, one.symptom)), None)
                if taker is not None and taker in self._open:
                    self._open[taker].taken[identity] = one.symptom
                    events.append(self._close(identity, snapshot, heals=False))
                    continue
            if self._blind(one, snapshot):
                continue
            one.clean_ticks += 1
            if one.clean_ticks >= self._settings.close_ticks and snapshot.at - one.seen_at >= one.hold_s:
                events.append(self._close(identity, snapshot, heals=True))
        return events

    def _blind(self, one: _Open, snapshot: Snapshot) -> bool:
        """Whether a side of it cannot be read, so that nobody knows whether it is over."""
        if snapshot.at - one.seen_at > self._settings.blind_hold_s or one.symptom.code[0] == "E":
            return False
        limit = max(self._settings.stale_intervals, 1.5) * self._interval_s
        for name in one.symptom.instances:
            instance = snapshot.instance(name)
            if instance is not None and any(rank.age_s is None or rank.age_s > limit for rank in instance.ranks):
                return True
        return False

    def _close(self, identity: Identity, snapshot: Snapshot, *, heals: bool) -> AlertEvent:
        one = self._open.pop(identity)
        flaps = self._closed.get(identity, (0.0, 0))[1]
        if heals:
            self._closed[identity] = (snapshot.at, flaps)
            self._closed.move_to_end(identity)
        else:
            self._closed.pop(identity, None)
        while len(self._closed) > _CLOSED_LIMIT:
            self._closed.popitem(last=False)
        return AlertEvent("closed", one.alert(snapshot.at, is_open=False))

    def _take_in(self, identity: Identity, cause: Symptom, explained: Sequence[Symptom]) -> None:
        one = self._open.get(identity)
        if one is None:
            return
        folded = {symptom.identity: symptom for symptom in one.taken.values()}
        folded.update((symptom.identity, symptom) for symptom in explained)
        folded.pop(cause.identity, None)
        one.folded = tuple(folded.values())[:FOLDED_LIMIT]

    def _updates(self, opened: set[Identity], now: float) -> list[AlertEvent]:
        events = []
        for identity, one in self._open.items():
            folded = frozenset(symptom.identity for symptom in one.folded)
            if identity not in opened:
                worse = one.symptom.severity is not one.told_severity
                more = bool(folded - one.told) and now - one.told_at >= self._settings.update_every_s
                if not worse and not more:
                    continue
                events.append(AlertEvent("updated", one.alert(now)))
            one.told, one.told_at, one.told_severity = folded, now, one.symptom.severity
        return events


def _grouped(symptoms: Iterable[Symptom], open_alerts: dict[Identity, _Open]) -> dict[Identity, list[Symptom]]:
    """Symptoms by the alert that they belong to, the one to show first."""
    groups: dict[Identity, list[Symptom]] = {}
    for symptom in symptoms:
        groups.setdefault(_identity(symptom), []).append(symptom)
    for identity, found in groups.items():
        one = open_alerts.get(identity)
        # The transfer that is shown stays the one that is shown.
        if one is not None and one.symptom.key:
            found.sort(key=lambda symptom, key=one.symptom.key: symptom.key != key)  # type: ignore[misc]
    return groups


def _identity(symptom: Symptom) -> Identity:
    if CODES[symptom.code].scope == "transfer":
        return symptom.code, ">".join(symptom.instances) or symptom.key
    return symptom.identity


def _headline(symptoms: Sequence[Symptom], identity: Identity) -> Symptom:
    """What is shown of an alert. Its subject stays the same while transfers come and go."""
    head, more = symptoms[0], len(symptoms) - 1
    message = f"{head.message} (and {more} more like it)" if more else head.message
    worst = min((one.severity for one in symptoms), key=_ORDER.__getitem__)
    return replace(head, subject=identity[1], message=message, severity=worst)


def _explains(cause: Symptom, symptom: Symptom) -> bool:
    """Whether ``symptom`` is there because of ``cause``."""
    if symptom.code in _NEVER_FOLDED:
        return False
    if symptom.code == cause.code:
        # All ranks of an instance stand for each of them.
        return symptom.subject.startswith(f"{cause.subject}/")
    if PRECEDENCE[symptom.code] <= PRECEDENCE[cause.code]:
        return False
    shared = set(cause.instances) & set(symptom.instances)
    if symptom.code == "E002" and cause.code != "E003":
        # That it came back, and as another process, is news of its own.
        return False
    if cause.code == "E003":
        return bool(shared) or (bool(cause.host) and symptom.host == cause.host)
    if cause.code == "E001":
        return bool(shared)
    if cause.code == "T015":
        # Of a pair, both; of an instance alone, it.
        whole = set(cause.instances) <= set(symptom.instances) or len(symptom.instances) == 1
        return symptom.code in _EXPLAINED_BY_PAIR and bool(shared) and whole
    return symptom.code in _EXPLAINED_BY_RANK and bool(shared)
