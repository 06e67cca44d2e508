"""The blocking checks of the doctor, before ``pdctl up`` starts anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pdctl.cli.progress import Display
    from pdctl.doctor.outcome import Outcome
    from pdctl.hosts.fleet import Fleet
    from pdctl.plan import ClusterPlan

_MESSAGE = "the cluster would not work on these hosts; nothing was started"


class PreflightFailed(Exception):
    """A blocking check failed, or a host could not be reached. Carries what was found."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def preflight(plan: ClusterPlan, fleet: Fleet, display: Display) -> None:
    """Run the blocking checks over the connections that the launch goes on to use. No NIXL WRITE, no EC2 API.

    Raises:
        PreflightFailed: there are errors.
        ClusterFileError: the ignore list names a check or a host that does not exist.
    """
    from pdctl.doctor.findings import Severity
    from pdctl.doctor.folding import fold_names
    from pdctl.doctor.ignore import check_ignore_list
    from pdctl.doctor.outcome import counts
    from pdctl.doctor.registry import all_checks
    from pdctl.doctor.run import Options, examine

    checks = all_checks()
    check_ignore_list(plan, checks)
    blocking = tuple(check for check in checks if check.blocking)
    outcome = examine(plan, fleet, display, Options(blocking, probe=False, ec2=False))
    if outcome.exit_code:
        raise PreflightFailed(outcome)
    warnings: dict[tuple[str, str], list[str]] = {}
    for finding in outcome.findings:
        if counts(finding) and finding.severity is Severity.WARNING:
            warnings.setdefault((finding.id, finding.message), []).extend(finding.hosts)
    for (check, message), hosts in warnings.items():
        where = f" on {fold_names(hosts)}" if hosts else ""
        display.warning(f"{check}{where}: {message}")


def print_preflight_failure(plan: ClusterPlan, outcome: Outcome, *, as_json: bool, file_option: str) -> int:
    """Print why nothing was launched. Returns the exit code."""
    from pdctl.cli.options import print_json
    from pdctl.cli.styled import echo_lines, output_glyphs, output_width
    from pdctl.doctor.report import Style, report
    from pdctl.doctor.report_json import report_json

    hint = f"pdctl doctor{file_option} makes all checks; pdctl up{file_option} --skip-doctor launches all the same"
    if as_json:
        error: dict[str, Any] = {"message": _MESSAGE, "hint": hint, "failures": [], "aftermath": None}
        print_json({"ok": False, "cluster": plan.spec.cluster, "error": error, "doctor": report_json(outcome)})
    style = Style(output_width(err=True), output_glyphs(err=True), only_failures=True, file_option=file_option)
    echo_lines(report(outcome, style), err=True)
    click.echo(f"\n{click.style('error:', fg='red', bold=True)} {_MESSAGE}", err=True)
    click.echo(f"{click.style('hint:', fg='cyan')} {hint}", err=True)
    return outcome.exit_code
