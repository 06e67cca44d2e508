"""What ``up`` and ``restart`` have in common: an option, the frame of a launch, and what is printed of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pdctl.cli.main import print_error
from pdctl.cli.options import print_json

if TYPE_CHECKING:
    from pdctl.cli.progress import Display
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.failure import Interrupted, LaunchFailed
    from pdctl.lifecycle.up import UpResult
    from pdctl.plan import ClusterPlan

F = TypeVar("F", bound=Callable[..., Any])


def boot_timeout(function: F) -> F:
    """``--timeout``: how long instances may take to boot."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(1, 86400),
        default=1800.0,
        show_default=True,
        help="Seconds that the slowest instance may take to boot.",
    )(function)


def launch(plan: ClusterPlan, work: Callable[[Fleet, Display], UpResult], *, as_json: bool, file_option: str) -> int:
    """Connect to the hosts, show progress, do the work, and print what came of it.

    Args:
        plan: what is launched.
        work: launches it.
        as_json: whether to print JSON, and no progress.
        file_option: `` -f FILE``, for the commands that are suggested.

    Returns:
        the exit code.
    """
    from pdctl.cli.main import INTERRUPTED
    from pdctl.cli.preflight import PreflightFailed, print_preflight_failure
    from pdctl.cli.progress import reporting
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.failure import Interrupted, LaunchFailed

    try:
        with Fleet(plan.spec) as fleet, reporting(quiet=as_json) as display:
            result = work(fleet, display)
    except PreflightFailed as error:
        return print_preflight_failure(plan, error.outcome, as_json=as_json, file_option=file_option)
    except LaunchFailed as error:
        return print_failure(plan, error, as_json=as_json)
    except Interrupted as error:
        print_interrupted(plan, error, as_json=as_json)
        return INTERRUPTED
    return print_result(plan, result, as_json=as_json, file_option=file_option)


def print_result(plan: ClusterPlan, result: UpResult, *, as_json: bool, file_option: str) -> int:
    """Print a launch that went well (or left changed instances alone). Returns the exit code."""
    code = 1 if result.changed else 0
    if as_json:
        print_json({"ok": code == 0, **_as_dict(plan, result)})
        return code
    if result.verdict is not None:
        _print_proof(result)
    if not result.started and not result.changed:
        click.echo("everything was running already; nothing was changed")
    click.echo(f"\ncluster {plan.spec.cluster} is up: {plan.router.url}")
    click.echo(f"  {_curl(plan, result.model)}")
    click.echo("\nnext:")
    for words, meaning in (
        (f"pdctl status{file_option}", "one look at every instance"),
        (f"pdctl logs decode-0 -f{file_option.replace(' -f ', ' --file ')}", "follow a log"),
        (f"pdctl down{file_option}", "end it"),
    ):
        click.echo(f"  {words:<48} {meaning}")
    if result.changed:
        click.echo(
            f"\n{', '.join(result.changed)} run an older plan than the cluster file asks for: pdctl up --apply "
            "restarts them",
            err=True,
        )
    return code


def print_failure(plan: ClusterPlan, error: LaunchFailed, *, as_json: bool) -> int:
    """Print a launch that failed: each instance with its cause and last log lines. Returns the exit code."""
    code = 3 if error.only_hosts else 1
    if as_json:
        print_json({"ok": False, "cluster": plan.spec.cluster, "error": _failure_dict(error)})
    print_error(error)
    for failure in error.failures:
        click.echo(f"\n{failure.instance} on {failure.host}: {failure.summary}", err=True)
        for diagnosis in failure.diagnoses[:3]:
            click.echo(f"  cause ({diagnosis.id}): {diagnosis.cause}\n    fix: {diagnosis.fix}", err=True)
        if failure.last_lines:
            click.echo("  last lines of its log:", err=True)
            for line in failure.last_lines:
                click.echo(f"    | {line}", err=True)
    if error.aftermath is not None:
        click.echo(f"\n{error.aftermath.words}", err=True)
    return code


def print_interrupted(plan: ClusterPlan, error: Interrupted, *, as_json: bool) -> None:
    """Print what an interrupted launch left behind."""
    if as_json:
        print_json({"ok": False, "cluster": plan.spec.cluster, "interrupted": True, "aftermath": error.aftermath.words})
    click.echo(f"interrupted; {error.aftermath.words}", err=True)


def _print_proof(result: UpResult) -> None:
    assert result.verdict is not None
    facts = result.verdict.facts
    moved = (
        f"{float(facts['nixl_bytes']):,.0f} bytes over NIXL" if "nixl_bytes" in facts else "an unknown number of bytes"
    )
    wanted = f" (expected {float(facts['expected_bytes']):,.0f})" if "expected_bytes" in facts else ""
    click.echo(
        f"proof: {facts['prompt_tokens']} prompt tokens, {moved}{wanted}, decode received "
        f"{float(facts.get('received_tokens', 0)):,.0f} of them; answer: {facts.get('answer', 'not judged')}"
    )
    for text in result.verdict.unchecked:
        click.echo(f"  not checked: {text}")


def _curl(plan: ClusterPlan, model: str) -> str:
    words = ["curl", "-s", f"{plan.router.url}/v1/completions", "-H", "Content-Type: application/json"]
    # The name of the variable is left for the shell that runs it: the key itself is never printed.
    secured = "VLLM_API_KEY" in plan.prefill[0].secret_env
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if secured else ""
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 16})
    return f"{shlex.join(words)}{key} -d {shlex.quote(body)}"


def _as_dict(plan: ClusterPlan, result: UpResult) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "cluster": plan.spec.cluster,
        "endpoint": plan.router.url,
        "model": result.model,
        "instances": [
            {
                "name": entry.plan.name,
                "role": entry.plan.role,
                "host": entry.plan.host,
                "url": entry.plan.url,
                "action": entry.action,
                "ready_after_s": None if entry.ready_after_s is None else round(entry.ready_after_s, 3),
            }
            for entry in result.instances
        ],
        "proof": None
        if verdict is None
        else {"proven": verdict.proven, "facts": dict(verdict.facts), "unchecked": list(verdict.unchecked)},
        "timings_s": result.timings,
    }


def _failure_dict(error: LaunchFailed) -> dict[str, Any]:
    return {
        "message": error.message,
        "hint": error.hint,
        "failures": [
            {
                "instance": failure.instance,
                "host": failure.host,
                "summary": failure.summary,
                "causes": [{"id": d.id, "cause": d.cause, "fix": d.fix} for d in failure.diagnoses],
                "last_lines": list(failure.last_lines),
            }
            for failure in error.failures
        ],
        "aftermath": error.aftermath.words if error.aftermath else None,
    }
