"""Errors for people: each says what is wrong, where, and what to do about it.

The command line prints these without a traceback and ends with :attr:`PdctlError.exit_code`. Any other exception is a
bug of pdctl and is shown as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class PdctlError(Exception):
    """Base of every error that pdctl explains to its user.

    Args:
        message: one sentence: what is wrong, and where.
        hint: what to do about it; empty when there is nothing useful to say.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PdctlError):
    """The command line or an input file is wrong; nothing was done."""

    exit_code: ClassVar[int] = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a cluster file.

    Attributes:
        file: the file as the user named it.
        line: 1-based line, or None when the problem belongs to no line.
        key: dotted path of the key, such as ``prefill.hosts[1].address``; empty for the whole file.
        message: what was found and what is allowed.
        hint: a suggestion, such as a near spelling; may be empty.
    """

    file: str
    line: int | None
    key: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        key = f" {self.key}:" if self.key else ""
        hint = f"\n    hint: {self.hint}" if self.hint else ""
        return f"{where}:{key} {self.message}{hint}"


class ClusterFileError(UsageError):
    """The cluster file, or the plan that follows from it, cannot be used. Carries every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "the cluster file has a problem" if count == 1 else f"the cluster file has {count} problems"
        super().__init__(head + ":\n  " + "\n  ".join(str(problem).replace("\n", "\n  ") for problem in self.problems))


class HostError(PdctlError):
    """A host could not be reached, logged in to, or trusted."""

    exit_code: ClassVar[int] = 3

    def __init__(self, host: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{host}: {message}", hint=hint)
        self.host = host


class HostUnreachable(HostError):
    """Name does not resolve, the connection is refused, or nothing answers in time."""


class HostKeyRejected(HostError):
    """The host's key is unknown, or is not the one on record."""


class LoginFailed(HostError):
    """The host answers, but no key or agent identity was accepted."""


class CommandTimeout(HostError):
    """A command on the host did not end within its time-out (the connection itself works)."""


class NodeError(PdctlError):
    """The host works, but what pdctl asked of it there failed.

    Args:
        host: name of the host.
        code: stable short word for programs, such as ``port-in-use`` or ``disk-full``.
    """

    def __init__(self, host: str, code: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{host}: {message}", hint=hint)
        self.host = host
        self.code = code
