"""What a launch that failed tells: which instance, the cause found in its log, what was left and what was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdctl.errors import HostError, PdctlError
from pdctl.lifecycle.diagnose import Diagnosis


@dataclass(frozen=True)
class InstanceFailure:
    """One instance that did not come up.

    Attributes:
        instance: its name.
        host: where it runs.
        summary: one line: what happened.
        diagnoses: causes found in the log, best first; may be empty.
        last_lines: the last meaningful lines of the log.
        error: the error that kept pdctl from the instance, if that was it.
    """

    instance: str
    host: str
    summary: str
    diagnoses: Sequence[Diagnosis] = ()
    last_lines: Sequence[str] = ()
    error: PdctlError | None = None


@dataclass(frozen=True)
class Aftermath:
    """What a failed or interrupted launch left behind. ``stopping``: told to stop, and not looked at since."""

    stopped: tuple[str, ...] = ()
    left_running: tuple[str, ...] = ()
    not_reached: tuple[str, ...] = field(default=())
    stopping: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """One or two sentences for people."""
        parts = []
        if self.stopped:
            parts.append(f"stopped again: {', '.join(self.stopped)}")
        if self.left_running:
            parts.append(f"left running: {', '.join(self.left_running)}")
        if self.not_reached:
            parts.append(f"could not be reached to be stopped: {', '.join(self.not_reached)}")
        if self.stopping:
            parts.append(f"told to stop, and may still be at it: {', '.join(self.stopping)}")
        if not parts:
            return "nothing was left running"
        end = (
            " (pdctl status shows it, pdctl down ends it)"
            if self.left_running or self.not_reached or self.stopping
            else ""
        )
        return "; ".join(parts) + end


class LaunchFailed(PdctlError):
    """A cluster, or a part of it, did not come up."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        failures: Sequence[InstanceFailure] = (),
        aftermath: Aftermath | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.failures = tuple(failures)
        self.aftermath = aftermath

    @property
    def only_hosts(self) -> bool:
        """True if every failure is a host that could not be reached (exit code 3 rather than 1)."""
        return bool(self.failures) and all(isinstance(failure.error, HostError) for failure in self.failures)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a launch, after cleaning up; carries what was left behind."""

    def __init__(self, aftermath: Aftermath) -> None:
        super().__init__()
        self.aftermath = aftermath
