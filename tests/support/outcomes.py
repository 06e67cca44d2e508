"""Outcomes of the doctor out of findings that a test makes up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdctl.doctor.context import Context
from pdctl.doctor.findings import Check, Finding, Severity, Verdict, skipped
from pdctl.doctor.ignore import apply_ignore_list, unused_entries
from pdctl.doctor.outcome import Outcome
from pdctl.errors import PdctlError
from pdctl.plan import ClusterPlan
from tests.support.plans import BASE, planned

TITLES = {
    "SSH001": "every host can be reached",
    "HOST003": "memory may be locked without limit",
    "FAB003": "the EFA devices of the instance type are all there",
    "SG001": "the security group lets itself in",
    "SW002": "vLLM is the same everywhere",
    "NET002": "prefill reaches the side channel of decode",
    "XFER001": "a NIXL WRITE arrives whole",
}


def check(name: str, run: Any = lambda _: (), **more: Any) -> Check:
    """A check with texts enough to be explained."""
    texts = {"what": f"What {name} looks at.", "why": f"Why {name} matters.", "fix": f"How to mend {name}."}
    severity = more.pop("severity", Severity.ERROR)
    return Check(name, _title(name), severity, **texts, run=run, **more)


def finding(name: str, verdict: str, *hosts: str, message: str = "as it should be", **more: Any) -> Finding:
    """One finding. ``verdict`` is pass, fail or skipped."""
    severity = Severity(more.pop("severity", "error"))
    commands = tuple(more.pop("commands", ()))
    return Finding(name, _title(name), severity, Verdict(verdict), hosts, message, commands=commands, **more)


def _title(name: str) -> str:
    return TITLES.get(name, f"title of {name}")


def outcome_of(
    findings: Iterable[Finding],
    *,
    plan: ClusterPlan | None = None,
    unreachable: Mapping[str, PdctlError] | None = None,
    checks: Iterable[str] = (),
    **context: Any,
) -> Outcome:
    """An outcome, with the ignore list of the plan applied."""
    plan = plan or planned(BASE)
    found = tuple(findings)
    names = dict.fromkeys([*(one.id for one in found), *checks])
    ran = tuple(check(name) for name in names)
    judged = apply_ignore_list(found, plan.spec.doctor.ignore)
    return Outcome(
        Context(plan, {}, unreachable or {}, **context), ran, judged, unused_entries(plan, judged, ran), {"total": 1.84}
    )


def skip_all(context: Context) -> Any:
    """A check's function that skips every host."""
    return [skipped(host, message="not checked: no facts here") for host in context.plan.hosts]
