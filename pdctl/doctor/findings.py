"""What a check is, and what it says. No input or output here."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdctl.doctor.context import Context


class Severity(str, Enum):
    """How bad a failed check is. Only errors fail the command."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Verdict(str, Enum):
    """What came out of a check. Skipped is neither pass nor fail: the message says why."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Result:
    """One answer of a check's function. Make it with :func:`passed`, :func:`failed` or :func:`skipped`.

    Attributes:
        verdict: pass, fail or skipped.
        hosts: what it is about: one host, two (a pair, the first one prefill), or none (the whole cluster).
        message: one sentence for a person, without the host's name, the same for hosts with the same trouble, so that
            the report can fold them. What differs per host belongs into ``evidence``.
        evidence: what was seen (values, a line of output), for a person who doubts.
        fix: what to do; empty when there is nothing to do.
        commands: exact shell commands that do it, quoted, for ``--fix-commands``.
        severity: when it differs from the check's own.
    """

    verdict: Verdict
    hosts: tuple[str, ...]
    message: str
    evidence: str = ""
    fix: str = ""
    commands: tuple[str, ...] = ()
    severity: Severity | None = None


def passed(*hosts: str, message: str, evidence: str = "") -> Result:
    """A check that is fine for these hosts."""
    return Result(Verdict.PASS, hosts, message, evidence)


def failed(
    *hosts: str,
    message: str,
    fix: str,
    evidence: str = "",
    commands: Iterable[str] = (),
    severity: Severity | None = None,
) -> Result:
    """A check that found something. ``fix`` is what the reader has to do, in words."""
    return Result(Verdict.FAIL, hosts, message, evidence, fix, tuple(commands), severity)


def skipped(*hosts: str, message: str, evidence: str = "", fix: str = "") -> Result:
    """A check that could not be made; the message says why."""
    return Result(Verdict.SKIPPED, hosts, message, evidence, fix)


CheckFunction = Callable[["Context"], Iterable[Result]]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        id: stable, such as ``FAB003``; the letters are its area.
        title: a noun phrase or a short statement of what should hold.
        severity: of a failure, unless the result says otherwise.
        what: explain text: what is looked at, and how it is judged (with figures).
        why: explain text: what breaks without it, as the user would see it.
        fix: explain text: how to mend it, in general.
        run: the pure function: facts in, results out.
        sources: where the facts have their source (addresses of documents or issues); shown by ``doctor explain``.
        blocking: whether ``pdctl up`` runs it first and stops when it fails.
    """

    id: str
    title: str
    severity: Severity
    what: str
    why: str
    fix: str
    run: CheckFunction = field(repr=False, compare=False)
    sources: tuple[str, ...] = ()
    blocking: bool = False

    @property
    def area(self) -> str:
        """``FAB`` of ``FAB003``."""
        return self.id.rstrip("0123456789")


@dataclass(frozen=True)
class Finding:
    """One result, with what the report needs to know of its check.

    Attributes:
        ignored: the reason given in the cluster file for ignoring it; empty if it counts.
    """

    id: str
    title: str
    severity: Severity
    verdict: Verdict
    hosts: tuple[str, ...]
    message: str
    evidence: str = ""
    fix: str = ""
    commands: tuple[str, ...] = ()
    ignored: str = ""

    @property
    def area(self) -> str:
        """``FAB`` of ``FAB003``."""
        return self.id.rstrip("0123456789")

    def to_json(self) -> dict[str, Any]:
        """Stable keys for ``--json``."""
        return {
            "id": self.id,
            "area": self.area,
            "title": self.title,
            "severity": self.severity.value,
            "verdict": self.verdict.value,
            "hosts": list(self.hosts),
            "message": self.message,
            "evidence": self.evidence,
            "fix": self.fix,
            "commands": list(self.commands),
            "ignored": self.ignored,
        }


def run_check(check: Check, context: Context) -> Iterator[Finding]:
    """Run one check. A bug in it becomes a finding that says so, so that the other checks still speak.

    Yields:
        its findings; a check that has nothing to say about this cluster yields none.
    """
    try:
        for result in check.run(context):
            yield Finding(
                check.id,
                check.title,
                result.severity or check.severity,
                result.verdict,
                result.hosts,
                result.message,
                result.evidence,
                result.fix,
                result.commands,
            )
    except Exception as error:
        yield Finding(
            check.id,
            check.title,
            Severity.WARNING,
            Verdict.SKIPPED,
            (),
            f"this check itself failed, which is a bug of pdctl: {type(error).__name__}: {error}",
            evidence=traceback.format_exc(limit=-3),
            fix="please report it with the file that `pdctl doctor --bundle FILE` writes",
        )
