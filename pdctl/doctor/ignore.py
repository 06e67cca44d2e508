"""The ignore list of the cluster file: findings that are shown, and do not count."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from pdctl.doctor.findings import Check, Finding, Verdict
from pdctl.errors import ClusterFileError, Problem
from pdctl.plan import ClusterPlan
from pdctl.spec import IgnoreSpec


@dataclass(frozen=True)
class Unused:
    """An entry of the ignore list that matched nothing.

    Attributes:
        id: the check that it names.
        hosts: the hosts that it names; none for all.
        reason: why it is there.
        where: file and line, such as ``cluster.yaml:31``; the file alone if the line is unknown.
    """

    id: str
    hosts: tuple[str, ...]
    reason: str
    where: str


def check_ignore_list(plan: ClusterPlan, checks: Iterable[Check]) -> None:
    """Look for ids that no check has, and hosts that are not in the cluster file.

    Raises:
        ClusterFileError: with all of them, each with its line and a near spelling.
    """
    ids = [check.id for check in checks]
    problems: list[Problem] = []
    for number, entry in enumerate(plan.spec.doctor.ignore):
        key = f"doctor.ignore[{number}]"
        if entry.id not in ids:
            hint = _suggestion(entry.id, ids, "see `pdctl doctor list`")
            problems.append(plan.spec.problem(f"{key}.id", f"there is no check {entry.id}", hint))
        for position, host in enumerate(entry.hosts or ()):
            if host not in plan.hosts:
                message = f"there is no host {host} in this cluster"
                hint = _suggestion(host, plan.hosts, f"it has: {', '.join(plan.hosts[:8])}")
                problems.append(plan.spec.problem(f"{key}.hosts[{position}]", message, hint))
    if problems:
        raise ClusterFileError(problems)


def apply_ignore_list(findings: Iterable[Finding], ignored: Sequence[IgnoreSpec]) -> tuple[Finding, ...]:
    """Give each failed finding that an entry matches the reason of that entry (the first one's, if several do)."""
    return tuple(_with_reason(finding, ignored) for finding in findings)


def unused_entries(plan: ClusterPlan, findings: Collection[Finding], checks: Iterable[Check]) -> tuple[Unused, ...]:
    """Entries that matched nothing, though their check ran. One that was skipped proves nothing about its entry.

    Args:
        plan: whose cluster file has the list.
        findings: what the checks said.
        checks: those that ran.
    """
    ran = {check.id for check in checks}
    unused = []
    for number, entry in enumerate(plan.spec.doctor.ignore):
        concerned = [finding for finding in findings if finding.id == entry.id and _is_about(finding, entry)]
        if entry.id not in ran or any(finding.verdict is not Verdict.PASS for finding in concerned):
            continue
        line = plan.spec.line(f"doctor.ignore[{number}]")
        where = plan.spec.file if line is None else f"{plan.spec.file}:{line}"
        unused.append(Unused(entry.id, tuple(entry.hosts or ()), entry.reason, where))
    return tuple(unused)


def _with_reason(finding: Finding, ignored: Sequence[IgnoreSpec]) -> Finding:
    if finding.verdict is not Verdict.FAIL:
        return finding
    entry = next((entry for entry in ignored if entry.id == finding.id and _is_about(finding, entry)), None)
    return finding if entry is None else replace(finding, ignored=entry.reason)


def _is_about(finding: Finding, entry: IgnoreSpec) -> bool:
    return entry.hosts is None or any(host in entry.hosts for host in finding.hosts)


def _suggestion(word: str, choices: Sequence[str], where: str) -> str:
    near = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean `{near[0]}`?" if near else where
