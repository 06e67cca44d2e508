"""How many problems there are: what hosts have in common counts once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdctl.doctor.findings import Finding, Severity, Verdict

Problem = tuple[str, Severity, str]


@dataclass(frozen=True)
class Summary:
    """Counts of a run.

    Attributes:
        errors: different failures of severity error; the same message for several hosts is one.
        warnings: the same for warnings.
        infos: the same for infos.
        passed: checks that were made for every host and found nothing wrong.
        skipped: checks that could not be made for at least one host.
        ignored: different failures that the cluster file ignores.
    """

    errors: int = 0
    warnings: int = 0
    infos: int = 0
    passed: int = 0
    skipped: int = 0
    ignored: int = 0


def summarize(findings: Iterable[Finding]) -> Summary:
    """Count findings."""
    failed: set[Problem] = set()
    ignored: set[Problem] = set()
    by_check: dict[str, set[Verdict]] = {}
    for finding in findings:
        by_check.setdefault(finding.id, set()).add(finding.verdict)
        if finding.verdict is Verdict.FAIL:
            (ignored if finding.ignored else failed).add((finding.id, finding.severity, finding.message))
    verdicts = by_check.values()
    return Summary(
        errors=sum(severity is Severity.ERROR for _, severity, _ in failed),
        warnings=sum(severity is Severity.WARNING for _, severity, _ in failed),
        infos=sum(severity is Severity.INFO for _, severity, _ in failed),
        passed=sum(seen == {Verdict.PASS} for seen in verdicts),
        skipped=sum(Verdict.SKIPPED in seen for seen in verdicts),
        ignored=len(ignored),
    )
