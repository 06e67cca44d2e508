"""What comes out of a run, and how it is judged once everything is collected. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdctl.doctor.context import Context
from pdctl.doctor.findings import Check, Finding, Severity, Verdict
from pdctl.doctor.ignore import Unused, apply_ignore_list, unused_entries
from pdctl.doctor.registry import run_checks
from pdctl.errors import HostError


@dataclass(frozen=True)
class Outcome:
    """What came out of a run.

    Attributes:
        context: everything that was collected.
        checks: the checks that ran.
        findings: what they said, with the ignore list applied.
        unused_ignores: entries of the ignore list that matched nothing.
        timings_s: seconds per stage, and ``total``.
    """

    context: Context
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    unused_ignores: tuple[Unused, ...] = ()
    timings_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that fail the command."""
        return tuple(f for f in self.findings if counts(f) and f.severity is Severity.ERROR)

    @property
    def not_reached(self) -> tuple[str, ...]:
        """Hosts that could not be reached, without those for which that is ignored."""
        excused = {host for f in self.findings if f.area == "SSH" and f.ignored for host in f.hosts}
        excused -= {host for f in self.errors if f.area == "SSH" for host in f.hosts}
        unreachable = self.context.unreachable.items()
        return tuple(host for host, error in unreachable if isinstance(error, HostError) and host not in excused)

    @property
    def exit_code(self) -> int:
        """0: passed, perhaps with warnings; 1: errors; 3: a host could not be reached."""
        if self.not_reached:
            return HostError.exit_code
        return 1 if self.errors else 0


def counts(finding: Finding) -> bool:
    """Whether a finding is a failure that is not ignored."""
    return finding.verdict is Verdict.FAIL and not finding.ignored


def judge(context: Context, checks: tuple[Check, ...], timings_s: Mapping[str, float] | None = None) -> Outcome:
    """Run the checks over what was collected: the pure half of :func:`examine`."""
    findings = apply_ignore_list(run_checks(context, checks), context.spec.doctor.ignore)
    unused = unused_entries(context.plan, findings, checks)
    return Outcome(context, checks, findings, unused, timings_s or {})


def count(number: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
