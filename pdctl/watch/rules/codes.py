"""Every code of the watchdog: its name, how bad it is, how an alert of it lives. docs/alerts.md has a section each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pdctl.watch.alerts import Severity, Symptom

Scope = Literal["transfer", "rank", "instance", "pair", "host", "watch"]


@dataclass(frozen=True)
class Code:
    """One code.

    Attributes:
        code: stable, such as ``T002``.
        name: stable, such as ``write-stalled``.
        severity: how bad, unless the rule says otherwise.
        scope: what a symptom of it is about. Alerts on transfers are one for each pair of instances.
        certain: one snapshot is enough to open: the fact is stated, not concluded from times.
        hold_s: seconds that an alert of it stays open after its last sign. Not 0 for what is an event and not a state.
        cause: it explains symptoms of its instances, which are folded into its alert.
        meaning: one line.
    """

    code: str
    name: str
    severity: Severity
    scope: Scope
    meaning: str
    certain: bool = False
    hold_s: float = 0.0
    cause: bool = False

    def symptom(
        self,
        subject: str,
        message: str,
        next_step: str,
        *,
        instances: tuple[str, ...] = (),
        host: str = "",
        key: str = "",
        severity: Severity | None = None,
    ) -> Symptom:
        """A symptom with this code."""
        return Symptom(
            code=self.code,
            name=self.name,
            severity=self.severity if severity is None else severity,
            subject=subject,
            instances=instances,
            host=host,
            message=message,
            next_step=next_step,
            key=key,
        )


_CRITICAL, _WARNING, _INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO

# In this order: what comes first explains what comes later, and heads the list of alerts of equal severity.
ALL: Final[tuple[Code, ...]] = (
    Code("E003", "host-unreachable", _CRITICAL, "host", "A host does not answer", cause=True),
    Code("E001", "engine-down", _CRITICAL, "instance", "An instance has ended, or its health check fails", cause=True),
    Code("W001", "writer-dead", _CRITICAL, "rank", "The process lives, its writer thread does not", True, cause=True),
    Code("W003", "rank-silent", _CRITICAL, "rank", "A rank's telemetry does not answer", cause=True),
    Code("W002", "writer-stuck", _CRITICAL, "rank", "The writer thread does not beat", cause=True),
    Code("T010", "sides-disagree", _CRITICAL, "transfer", "Decode took as received what prefill did not complete"),
    Code("T015", "pair-broken", _CRITICAL, "pair", "Every transfer between two instances fails", cause=True),
    Code("T002", "write-stalled", _CRITICAL, "transfer", "A WRITE is in progress without completing"),
    Code("T008", "connect-stalled", _CRITICAL, "transfer", "Two engines do not get connected"),
    Code("T001", "registration-lost", _CRITICAL, "transfer", "Decode's registration never met prefill's blocks"),
    Code("T003", "completion-lost", _CRITICAL, "transfer", "Prefill has written, decode does not know"),
    Code("T004", "failure-untold", _CRITICAL, "transfer", "Prefill has given up, decode does not know"),
    Code("E002", "restarted", _WARNING, "instance", "A new process or engine since the last poll", True, hold_s=30.0),
    Code("T012", "blocks-held", _WARNING, "transfer", "Prefill holds blocks beyond their lease"),
    Code("T005", "decode-absent", _WARNING, "transfer", "Prefill is ready, and no decode instance came"),
    Code("T009", "load-failed", _WARNING, "instance", "Transfers to a decode instance failed", hold_s=30.0),
    Code("T013", "leases-expire", _WARNING, "instance", "Many requests are never fetched from prefill", hold_s=30.0),
    Code("T011", "late-messages", _WARNING, "instance", "Messages come after their transfer is over", hold_s=30.0),
    Code("T016", "messages-refused", _WARNING, "instance", "Messages come that are not understood", hold_s=30.0),
    Code("W004", "writer-errors", _WARNING, "rank", "The writer survives exceptions", hold_s=30.0),
    Code("T006", "slow-prefill", _WARNING, "instance", "Requests wait for prefill, and nothing moves there"),
    Code("T007", "slow-fabric", _WARNING, "pair", "WRITEs are far slower than the fabric was measured"),
    Code("T014", "slow-post", _WARNING, "instance", "Preparing WRITEs takes long, or ever longer"),
    Code("E004", "metrics-silent", _WARNING, "instance", "The engine is healthy, its metrics cannot be read"),
    Code("E005", "watch-degraded", _INFO, "watch", "The watch itself does not see everything in time"),
)  # fmt: skip

CODES: Final[dict[str, Code]] = {one.code: one for one in ALL}
PRECEDENCE: Final[dict[str, int]] = {one.code: place for place, one in enumerate(ALL)}
