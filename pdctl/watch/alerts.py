"""Alerts: what a rule found, and how it lives on. Pure data; ``rules.py`` finds, ``book.py`` opens and closes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Severity(str, Enum):
    """How bad. The exit code of ``pdctl watch --once`` is 1 from ``warning`` on."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Symptom:
    """What a rule sees in the snapshots now.

    Attributes:
        code: of DESIGN.md section 6, such as ``T002``.
        name: such as ``write-stalled``.
        severity: how bad.
        subject: what it is about, stable while it lasts: ``prefill-0``, ``prefill-0/rank 1``, or a transfer's key.
        instances: the instances that it is about, prefill first.
        host: where its cause is looked for; empty if that is no single host.
        message: what is wrong, with the figures, in one sentence.
        next_step: what to do or to look at.
        key: of the transfer, if it is about one.
    """

    code: str
    name: str
    severity: Severity
    subject: str
    instances: tuple[str, ...]
    host: str
    message: str
    next_step: str
    key: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        """The same symptom at another tick has the same."""
        return self.code, self.subject


@dataclass(frozen=True)
class Alert:
    """A symptom over time.

    Attributes:
        symptom: as last seen.
        opened_unix: when it opened.
        duration_s: how long it has lasted, by the monotonic clock.
        open: False once it is over.
        folded: symptoms that have the same cause and are not shown by themselves.
        unseen_s: since its symptom was last seen; 0 if it is there in this snapshot.
        present_s: for how long its symptom has been seen without a break; less than ``duration_s`` after one.
    """

    symptom: Symptom
    opened_unix: float
    duration_s: float
    open: bool = True
    folded: tuple[Symptom, ...] = ()
    unseen_s: float = 0.0
    present_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Stable keys, for JSON lines, hooks and webhooks."""
        symptom = self.symptom
        return {
            "code": symptom.code,
            "name": symptom.name,
            "severity": symptom.severity.value,
            "subject": symptom.subject,
            "instances": list(symptom.instances),
            "host": symptom.host,
            "key": symptom.key,
            "message": symptom.message,
            "next_step": symptom.next_step,
            "opened_unix": self.opened_unix,
            "duration_s": self.duration_s,
            "open": self.open,
            "folded": [{"code": one.code, "subject": one.subject, "message": one.message} for one in self.folded],
        }


@dataclass(frozen=True)
class AlertEvent:
    """A change that sinks hear of: ``opened``, ``updated`` (severity or folded symptoms changed) or ``closed``."""

    kind: str
    alert: Alert
