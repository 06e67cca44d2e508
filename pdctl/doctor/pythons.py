"""The Pythons that the plan starts, and what the hosts reported of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdctl.doctor.checks.per_host import not_reached
from pdctl.doctor.context import Context
from pdctl.doctor.facts import InterpreterFacts
from pdctl.doctor.findings import Result, skipped
from pdctl.plan import InstancePlan
from pdctl.plan_args import HOME
from pdctl.plan_seats import role_of
from pdctl.spec import ROLES, ClusterSpec


@dataclass(frozen=True)
class PlannedPython:
    """One Python on one host.

    Attributes:
        host: SSH name of the host.
        python: as the cluster file writes it.
        roles: what it is for: ``prefill``, ``decode``, ``router``.
        key: the key of the cluster file that says so.
        where: that key with its file and line, for people.
        facts: what the host reported; None if it did not.
        unknown: why there are no facts.
    """

    host: str
    python: str
    roles: tuple[str, ...]
    key: str
    where: str
    facts: InterpreterFacts | None
    unknown: Result | None

    @property
    def works(self) -> bool:
        """Whether the host could run it."""
        return self.facts is not None and self.facts.ok


def planned_pythons(context: Context, *roles: str) -> Iterator[PlannedPython]:
    """Every Python of the plan, once for each host, in the order of the plan.

    Args:
        context: plan and facts.
        roles: only those of these roles; none means all.
    """
    users: dict[tuple[str, str], list[InstancePlan]] = {}
    for instance in context.plan.instances:
        if not roles or instance.role in roles:
            users.setdefault((instance.host, instance.argv[0]), []).append(instance)
    for (host, program), instances in users.items():
        key = python_key(context.spec, instances[0])
        python = _written(program)
        facts, unknown = _facts(context, host, program)
        yield PlannedPython(
            host,
            python,
            tuple(dict.fromkeys(instance.role for instance in instances)),
            key,
            where(context.spec, key),
            facts,
            unknown,
        )


def python_key(spec: ClusterSpec, instance: InstancePlan) -> str:
    """Key of the cluster file that names the Python of an instance."""
    if instance.role == "router":
        if spec.router.python is not None:
            return "router.python"
        roles = ROLES
    else:
        roles = (instance.role,)  # type: ignore[assignment]
    for role in roles:
        for number, entry in enumerate(role_of(spec, role).hosts):
            if entry.name == instance.host and entry.python is not None:
                return f"{role}.hosts[{number}].python"
    if instance.role != "router" and role_of(spec, instance.role).python is not None:
        return f"{instance.role}.python"
    return "python"


def where(spec: ClusterSpec, key: str) -> str:
    """A key of the cluster file with file and line: ```prefill.python` (cluster.yaml:12)``."""
    line = spec.line(key)
    if line is None:
        return f"`{key}` ({spec.file or 'the cluster file'} does not give it)"
    return f"`{key}` ({spec.file or 'the cluster file'}:{line})"


def _written(program: str) -> str:
    return f"~/{program[len(HOME) + 1 :]}" if program.startswith(f"{HOME}/") else program


def _facts(context: Context, host: str, program: str) -> tuple[InterpreterFacts | None, Result | None]:
    reported = context.facts.get(host)
    if reported is None:
        return None, not_reached(host)
    if reported.interpreters is None:
        return None, skipped(host, message=f"not checked: {reported.why_missing('interpreters')}")
    for name in (program, _written(program)):
        found = reported.interpreter(name)
        if found is not None:
            return found, None
    return None, skipped(host, message=f"not checked: the host told nothing of the Python {_written(program)}")
