"""The report for programs. docs/doctor.md describes its keys; a change that breaks a reader raises the schema."""

from __future__ import annotations

from typing import Any

from pdctl import __version__
from pdctl.doctor.outcome import Outcome
from pdctl.doctor.summary import summarize

SCHEMA = 1


def report_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON values."""
    context = outcome.context
    probe = context.probe
    return {
        "schema": SCHEMA,
        "pdctl": __version__,
        "cluster": context.spec.cluster,
        "ok": outcome.exit_code == 0,
        "exit_code": outcome.exit_code,
        "summary": vars(summarize(outcome.findings)),
        "hosts": list(context.plan.hosts),
        "not_reached": {
            host: {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
            for host, error in context.unreachable.items()
        },
        "checks": [check.id for check in outcome.checks],
        "findings": [finding.to_json() for finding in outcome.findings],
        "stages": {
            "facts": "",
            "network": "" if context.network is not None else "no check needed it, or no host could be reached",
            "probe": context.probe_skipped,
            "ec2": context.aws_skipped,
        },
        "probe": None
        if probe is None
        else [{key: value for key, value in vars(result).items() if key != "log"} for result in probe.results],
        "unused_ignores": [
            {"id": unused.id, "hosts": list(unused.hosts), "reason": unused.reason, "where": unused.where}
            for unused in outcome.unused_ignores
        ],
        "timings_s": {name: round(value, 3) for name, value in outcome.timings_s.items()},
    }
