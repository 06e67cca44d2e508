"""Whether a stall is acted upon, and on which instances (``--on-stall``). Pure; ``acting_thread.py`` does it.

To act is the exception: a restart fails every request of an instance. So an alert must be of a kind that a restart
cures, must have lasted, and must be seen in this very snapshot; and then limits, cool-downs and the state of the others
must allow it. Whatever is not done is said once, with its reason.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pdctl.watch.alerts import Alert
from pdctl.watch.snapshot import InstanceView, Snapshot
from pdctl.watch.wording import plain, timestamp

Action = Literal["restart-pair", "restart-writer-side", "drain"]
Outcome = Literal["begun", "done", "failed", "refused", "dry-run"]
ACTIONS: Final[tuple[Action, ...]] = ("restart-pair", "restart-writer-side", "drain")
OUTCOMES: Final[tuple[Outcome, ...]] = ("begun", "done", "failed", "refused", "dry-run")

PATIENCE_S: Final = {
    "W001": 5.0,
    "W002": 15.0,
    "W003": 30.0,
    "T001": 20.0,
    "T002": 20.0,
    "T003": 20.0,
    "T004": 20.0,
    "T015": 30.0,
}
"""Codes that are acted upon, and for how long they must have been seen without a break. A dead writer does not come
back; a stuck one may, and a rank that is silent may only be short of a CPU. Not here: what a restart does not cure (the
network and its speed: T007, T008; load: T006, T012 to T014; a client or router: T005; a process that has ended: E001,
which ``pdctl up`` starts).
"""
REPEATED: Final = 3
"""So many transfers of a pair must stall at once..."""
LASTING_S: Final = 60.0
"""...or it has been seen for this long: single transfers end by ``transfer.timeout_s``, so others have followed."""
HOUR_S: Final = 3600.0
AFTERMATH_S: Final = 45.0
"""So long after an action the alerts that it causes belong to it."""
GAP_S: Final = 5.0
"""Snapshots further apart than this, and than three intervals, have a gap between them: what was seen before it (the
watch was stopped, or its machine slept) says nothing about now. So has one whose clocks disagree by more."""
CAUSED: Final = frozenset({"E001", "E002", "E004", "W001", "W002", "W003"})
"""Alerts that a restart itself causes."""
_SINGLE: Final = frozenset({"T001", "T002", "T003", "T004"})
_ENGINES: Final = ("prefill", "decode")
_KEPT: Final = 256


@dataclass(frozen=True)
class ActingSettings:
    """What ``--on-stall`` and the options beside it say.

    Attributes:
        action: what to do.
        limit: no more actions than this within any hour, for the whole cluster.
        cool_down_s: an instance is left alone for this long after an action on it, and after its start.
        dry_run: say what would be done, and do nothing. Limits count as if it had been done.
        interval_s: from one snapshot to the next.
    """

    action: Action
    limit: int = 2
    cool_down_s: float = 300.0
    dry_run: bool = False
    interval_s: float = 1.0


@dataclass(frozen=True)
class Because:
    """The alert behind an action.

    Attributes:
        code: of the alert.
        evidence: its message.
        subject: what it is about.
    """

    code: str
    evidence: str
    subject: str


@dataclass(frozen=True)
class Decision:
    """Do this now."""

    action: Action
    instances: tuple[str, ...]
    because: Because


@dataclass(frozen=True)
class ActionEvent:
    """What was done, or not, and why. One is told when an action begins and one when it ends.

    Attributes:
        action: what ``--on-stall`` asked for.
        instances: what it was done to; of a refusal, what it would have been done to, if that is known.
        because: the alert behind it.
        outcome: how it went so far.
        detail: in words: how it ended, why it failed or was refused.
        took_s: of an action that has ended, in seconds.
        folded: codes and subjects of alerts that came and went with it, and were not told by themselves.
    """

    action: Action
    instances: tuple[str, ...]
    because: Because
    outcome: Outcome
    detail: str = ""
    took_s: float | None = None
    folded: tuple[tuple[str, str], ...] = ()


def action_json(event: ActionEvent, snapshot: Snapshot) -> dict[str, Any]:
    """One line of JSON; the first keys are those of an alert's line."""
    return {
        "schema": 1,
        "kind": "action",
        "event": "action",
        "at": timestamp(snapshot.unix),
        "unix": snapshot.unix,
        "cluster": snapshot.cluster,
        "action": event.action,
        "instances": list(event.instances),
        "because": {
            "code": event.because.code,
            "subject": event.because.subject,
            "evidence": event.because.evidence,
        },
        "outcome": event.outcome,
        "detail": event.detail,
        "took_s": None if event.took_s is None else round(event.took_s, 3),
        "folded": [{"code": code, "subject": subject} for code, subject in event.folded],
    }


def action_words(event: ActionEvent) -> str:
    """The same in one line for people."""
    on = f" of {', '.join(event.instances)}" if event.instances else ""
    took = f" after {event.took_s:.1f} s" if event.took_s is not None else ""
    detail = f": {event.detail}" if event.detail else ""
    because = f" (because of {event.because.code} {event.because.subject}: {event.because.evidence})"
    return plain(f"ACTION {event.action}{on} {event.outcome}{took}{detail}{because}", 4000)


@dataclass(frozen=True)
class _No:
    """Why nothing is done. ``kind`` stays the same while the figures in ``why`` change."""

    kind: str
    why: str
    instances: tuple[str, ...] = ()


# A pid, and when that process was made; what is not known is None.
_Process = tuple[int | None, float | None]


@dataclass
class _State:
    begun: deque[float] = field(default_factory=deque)
    ended: dict[str, float] = field(default_factory=dict)
    # What was taken out of the router, and which processes it and the router were: others bring it back.
    drained: dict[str, tuple[_Process, _Process]] = field(default_factory=dict)
    running: Decision | None = None
    running_processes: dict[str, tuple[_Process, _Process]] = field(default_factory=dict)


class Decider:
    """Decides at every snapshot. Remembers what was done; for one thread.

    Args:
        settings: what is allowed.
    """

    def __init__(self, settings: ActingSettings) -> None:
        self.settings = settings
        self._state = _State()
        # Refusals that were told: (code, subject, kind) -> when the alert opened.
        self._told: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._interval_s = settings.interval_s
        # Clocks of the last snapshot, and since when snapshots have come without a gap.
        self._last: tuple[float, float] | None = None
        self._awake_since = float("-inf")

    @property
    def running(self) -> Decision | None:
        """What is under way."""
        return self._state.running

    def set_interval(self, interval_s: float) -> None:
        """Snapshots come at another pace from now on."""
        self._interval_s = interval_s

    def spent(self, now: float) -> int:
        """How many actions began within the hour before ``now``."""
        return sum(1 for at in self._state.begun if now - at < HOUR_S)

    def covered(self, now: float) -> frozenset[str]:
        """Instances whose trouble is ours: being restarted, or restarted just now."""
        recent = {name for name, at in self._state.ended.items() if 0 <= now - at < AFTERMATH_S}
        return frozenset(recent | set(self._state.running.instances if self._state.running else ()))

    def decide(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> tuple[Decision | None, list[ActionEvent]]:
        """What to do about the alerts that are open in this snapshot; at most one thing, and none while one is done.

        Returns:
            what is to be done now (call :meth:`ended` when it is over), and the events to tell.
        """
        now, covered = snapshot.at, self.covered(snapshot.at)
        self._notice_gap(snapshot)
        self._forget_drained(snapshot)
        if self._state.running is not None:
            return None, []
        # What is about an instance that we have just touched is its aftermath, and no reason to touch another.
        found = [a for a in alerts if a.symptom.code in PATIENCE_S and not covered & set(a.symptom.instances)]
        ripe = [alert for alert in found if _ripe(alert, now - self._awake_since)]
        told: list[ActionEvent] = []
        curable: list[Alert] = []
        for alert in ripe:
            # One that has another cure holds up none of the others.
            hung = _not_hung(alert, snapshot)
            if hung is None:
                curable.append(alert)
            else:
                told += self._refused(alert, _because(alert), hung)
        if not curable:
            return None, told
        lead = curable[0]
        because = _because(lead)
        choice = self._targets(lead, curable, snapshot)
        if isinstance(choice, _No):
            return None, told + self._refused(lead, because, choice)
        no = self._forbidden(choice, ripe, snapshot, alerts)
        if no is not None:
            return None, told + self._refused(lead, because, no)
        decision = Decision(self.settings.action, choice, because)
        while self._state.begun and now - self._state.begun[0] >= HOUR_S:
            self._state.begun.popleft()
        self._state.begun.append(now)
        if self.settings.dry_run:
            self._finish(choice, now)
            dry = ActionEvent(decision.action, choice, because, "dry-run", "nothing was done: a dry run")
            return None, [*told, dry]
        self._state.running = decision
        router = next((one for one in snapshot.instances if one.role == "router"), None)
        self._state.running_processes = {
            name: (_process(snapshot.instance(name)), _process(router)) for name in decision.instances
        }
        return decision, [*told, ActionEvent(decision.action, choice, because, "begun")]

    def ended(self, now: float, *, succeeded: bool) -> None:
        """What was decided is over; its cool-down begins, however it went."""
        decision, self._state.running = self._state.running, None
        if decision is not None:
            self._finish(decision.instances, now)
            if decision.action == "drain" and succeeded:
                self._state.drained.update(self._state.running_processes)

    def _notice_gap(self, snapshot: Snapshot) -> None:
        """What was seen before a gap counts no more."""
        last, self._last = self._last, (snapshot.at, snapshot.unix)
        if last is None:
            return
        passed_s = snapshot.at - last[0]
        # A monotonic clock may stand still while the machine sleeps.
        apart_s = abs((snapshot.unix - last[1]) - passed_s)
        if passed_s > max(GAP_S, 3 * self._interval_s) or passed_s < 0 or apart_s > GAP_S:
            self._awake_since = snapshot.at

    def _forget_drained(self, snapshot: Snapshot) -> None:
        """A new router takes every instance in again, and so whatever comes back as another process is in service."""
        router = next((one for one in snapshot.instances if one.role == "router"), None)
        for name, (own, router_then) in list(self._state.drained.items()):
            if _another(own, _process(snapshot.instance(name))) or _another(router_then, _process(router)):
                del self._state.drained[name]

    def _finish(self, instances: Iterable[str], now: float) -> None:
        self._state.ended.update(dict.fromkeys(instances, now))

    def _refused(self, lead: Alert, because: Because, no: _No) -> list[ActionEvent]:
        """Each reason is told once for an alert, not at every poll."""
        place = (because.code, because.subject, no.kind)
        if self._told.get(place) == lead.opened_unix:
            return []
        self._told[place] = lead.opened_unix
        self._told.move_to_end(place)
        while len(self._told) > _KEPT:
            self._told.popitem(last=False)
        return [ActionEvent(self.settings.action, no.instances, because, "refused", no.why)]

    def _targets(self, lead: Alert, ripe: Sequence[Alert], snapshot: Snapshot) -> tuple[str, ...] | _No:
        """Which instances the action is for."""
        roles = {one.name: one.role for one in snapshot.instances}
        action = self.settings.action
        if lead.symptom.code[0] == "W":
            own = next((name for name in lead.symptom.instances if roles.get(name) in _ENGINES), None)
            if own is None:
                return _No("nobody", "the alert names no prefill or decode instance")
            partners = {name for one in lead.folded for name in one.instances if roles.get(name) in _ENGINES}
            others = sorted(name for name in partners if roles[name] != roles[own])
            # With several partners it is this instance, and not a pair.
            pair = (own, *others) if action == "restart-pair" and len(others) == 1 else (own,)
            return _ordered(pair, roles)
        pairs = [alert.symptom.instances for alert in ripe if alert.symptom.code[0] == "T"]
        prefills = sorted({name for pair in pairs for name in pair if roles.get(name) == "prefill"})
        decodes = sorted({name for pair in pairs for name in pair if roles.get(name) == "decode"})
        if len(prefills) != 1 and len(decodes) != 1:
            names = ", ".join([*prefills, *decodes]) or "none that is known"
            return _No("wide", f"several pairs stall ({names}): no restart cures a fault of the whole cluster")
        if len(decodes) != 1:
            # Alone, or with several decode instances: it is what they have in common.
            return (prefills[0],)
        if len(prefills) != 1:
            if action == "restart-writer-side":
                why = f"what stalls has {decodes[0]} in common, which does not write; see --on-stall restart-pair"
                return _No("reader", why, (decodes[0],))
            return (decodes[0],)
        if action == "restart-pair":
            return (prefills[0], decodes[0])
        if action == "restart-writer-side":
            return (prefills[0],)
        return (_at_fault(prefills[0], decodes[0], snapshot),)

    def _forbidden(
        self, targets: tuple[str, ...], ripe: Sequence[Alert], snapshot: Snapshot, alerts: Sequence[Alert]
    ) -> _No | None:
        """Why it may not be done now; None if it may."""
        now, settings = snapshot.at, self.settings
        roles = {one.name: one.role for one in snapshot.instances}
        stuck = [one for one in ripe if one.symptom.code[0] == "W"]
        # Beside a stuck writer whatever else stalls is another fault: what it explains is folded into its alert.
        stalled = {name for one in (ripe if stuck else ()) for name in one.symptom.instances}
        down = {one.name for one in snapshot.instances if _is_out(one)}
        down |= {name for one in alerts if one.symptom.code in ("E001", "E003") for name in one.symptom.instances}
        out = down | stalled | set(self._state.drained) | set(targets)
        for role in ("prefill", "decode"):
            gone = sorted(name for name in out if roles.get(name) == role)
            if len(gone) > 1:
                why = f"more than one {role} instance would be out ({', '.join(gone)}): "
                return _No("wide", why + "no restart cures a fault of the whole cluster", targets)
        others = sorted(name for name in down if name not in targets and roles.get(name) in _ENGINES)
        if others:
            why = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} out: first see to that (pdctl up)"
            return _No("out", why, targets)
        if _router_is_out(snapshot, alerts):
            return _No("router", "the router is out: first see to that (pdctl up)", targets)
        drained = [name for name in targets if name in self._state.drained]
        if drained:
            why = f"{', '.join(drained)} is out of the router already; pdctl restart router takes it in again"
            return _No("drained", why, targets)
        if settings.action == "drain":
            (target,) = targets
            left = [one.name for one in snapshot.instances if one.role == roles.get(target) and one.name not in out]
            if not left:
                return _No("last", f"{target} is the last {roles.get(target, '')} instance that serves", targets)
        for name in targets:
            since = now - self._state.ended.get(name, float("-inf"))
            if since < settings.cool_down_s:
                why = f"{name} was acted upon {since:.0f} s ago and is left alone for {settings.cool_down_s:.0f} s"
                return _No("cool-down", f"{why}; it did not help, so look at it", targets)
            one = snapshot.instance(name)
            # By its host's clock: one that is ahead makes it look younger, which is no harm.
            age_s = float("inf") if one is None or one.started_unix is None else snapshot.unix - one.started_unix
            if age_s < settings.cool_down_s:
                why = f"{name} was started {max(age_s, 0.0):.0f} s ago, by this watch or by somebody else, and is left "
                return _No("young", f"{why}alone for {settings.cool_down_s:.0f} s", targets)
        if self.spent(now) >= settings.limit:
            why = f"{self.spent(now)} actions within the last hour, of at most {settings.limit} (--on-stall-limit)"
            return _No("limit", why, targets)
        return None


class Fold:
    """Takes the alerts that an action causes out of the frames, so that they are told with the action alone.

    An alert that is still open when the action's time is over is told then, as opened.
    """

    def __init__(self) -> None:
        self._hidden: set[tuple[str, str]] = set()
        self._seen: list[tuple[str, str]] = []

    def take(self) -> tuple[tuple[str, str], ...]:
        """What was folded since the last call."""
        seen, self._seen = tuple(dict.fromkeys(self._seen)), []
        return seen[:_KEPT]

    def begin(self) -> None:
        """An action begins: what the aftermath of the one before it hid is not of this one."""
        self._seen.clear()

    def hides(self, alert: Alert, covered: frozenset[str], routers: frozenset[str] = frozenset()) -> bool:
        """Whether an alert is one that an action causes.

        Args:
            alert: it.
            covered: the action's instances.
            routers: those whose process runs: their health check fails while they miss an instance, and that is all
                that an action does to them.
        """
        about = set(alert.symptom.instances)
        if alert.symptom.code == "E001" and about <= covered | routers:
            return bool(about)
        return alert.symptom.code in CAUSED and bool(about) and about <= covered

    def opened(self, alert: Alert, covered: frozenset[str], routers: frozenset[str] = frozenset()) -> bool:
        """An alert has opened: whether to tell."""
        if not self.hides(alert, covered, routers):
            return True
        self._hidden.add(_identity(alert))
        self._seen.append(_identity(alert))
        return False

    def tells(self, alert: Alert) -> bool:
        """An open alert: whether it is shown, or was never told of."""
        return _identity(alert) not in self._hidden

    def closed(self, alert: Alert) -> bool:
        """An alert has closed: whether to tell."""
        known = self.tells(alert)
        self._hidden.discard(_identity(alert))
        return known

    def surfacing(
        self, alerts: Sequence[Alert], covered: frozenset[str], routers: frozenset[str] = frozenset()
    ) -> list[Alert]:
        """Alerts that were hidden and are not an action's any more: they are told now."""
        back = [alert for alert in alerts if not self.tells(alert) and not self.hides(alert, covered, routers)]
        told = {_identity(alert) for alert in back}
        self._hidden -= told
        self._seen = [identity for identity in self._seen if identity not in told]
        return back


def _identity(alert: Alert) -> tuple[str, str]:
    return alert.symptom.code, alert.symptom.subject


def _because(alert: Alert) -> Because:
    return Because(alert.symptom.code, alert.symptom.message, alert.symptom.subject)


def _ripe(alert: Alert, awake_s: float) -> bool:
    """Whether an alert has been seen for long without a break, is seen now, and is more than one lost message."""
    code = alert.symptom.code
    seen_s = min(alert.present_s, awake_s)
    if alert.unseen_s > 0 or not alert.open or seen_s < PATIENCE_S[code]:
        return False
    if code not in _SINGLE or seen_s >= LASTING_S:
        return True
    return 1 + sum(one.code == code for one in alert.folded) >= REPEATED


def _not_hung(lead: Alert, snapshot: Snapshot) -> _No | None:
    """W003 has other cures where the process is not hung: whoever stopped it, or a start if it is gone."""
    if lead.symptom.code != "W003":
        return None
    for name in lead.symptom.instances:
        one = snapshot.instance(name)
        if one is None or one.process is None:
            return _No("unknown", f"the state of {name}'s processes is not known", (name,))
        states = {one.process, *(rank.process for rank in one.ranks if rank.process is not None)}
        if one.stopped or "stopped" in states:
            which = ", ".join(one.stopped) or name
            return _No("stopped", f"{which} was stopped on purpose, or by a debugger: kill -CONT goes on", (name,))
        if states != {"running"}:
            gone = ", ".join(sorted(states - {"running"}))
            return _No("ended", f"a process of {name} is {gone}: pdctl up starts it", (name,))
    return None


def _at_fault(prefill: str, decode: str, snapshot: Snapshot) -> str:
    """Of a pair that stalls, the one that does not succeed with others; the writer if nothing tells."""
    done = [t for t in snapshot.transfers if not t.in_flight and t.decode and t.prefill]
    good = [(t.prefill[0].instance, t.decode[0].instance) for t in done if t.decode[0].outcome == "received"]
    prefill_works = any(one == prefill and other != decode for one, other in good)
    decode_works = any(other == decode and one != prefill for one, other in good)
    return decode if prefill_works and not decode_works else prefill


def _is_out(one: InstanceView) -> bool:
    return one.healthy is False or one.process in ("exited", "absent", "zombie")


def _router_is_out(snapshot: Snapshot, alerts: Sequence[Alert]) -> bool:
    """Whether the router does not serve. That it misses an engine which does not answer is no fault of its own."""
    unreachable = {name for one in alerts if one.symptom.code == "E003" for name in one.symptom.instances}
    engines_well = all(one.healthy is True for one in snapshot.instances if one.role in _ENGINES)
    for one in snapshot.instances:
        if one.role == "router":
            ended = one.process not in (None, "running")
            return ended or one.name in unreachable or (one.healthy is False and engines_well)
    return False


def _process(one: InstanceView | None) -> _Process:
    return (None, None) if one is None else (one.pid, one.started_unix)


def _another(then: _Process, now: _Process) -> bool:
    """Whether it is surely another process."""
    return any(a is not None and b is not None and a != b for a, b in zip(then, now, strict=True))


def _ordered(names: tuple[str, ...], roles: dict[str, str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (roles[name] != "prefill", name)))
