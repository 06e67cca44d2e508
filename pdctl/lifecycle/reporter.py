"""How long work tells what it is doing, without knowing who listens (a terminal, a log, a test)."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives progress. Called from several threads; implementations lock where they must."""

    def step(self, text: str) -> None:
        """A new stage of the whole command has begun."""

    def progress(self, instance: str, phase: str, detail: str, elapsed_s: float) -> None:
        """An instance is in ``phase`` (with a short ``detail``), ``elapsed_s`` seconds after it was started."""

    def note(self, text: str) -> None:
        """Something worth a line, and no more."""

    def warning(self, text: str) -> None:
        """Something the user should look at, though the work goes on."""


class SilentReporter:
    """Drops everything: for ``--json`` and for tests that only look at results."""

    def step(self, text: str) -> None:
        """Drop it."""

    def progress(self, instance: str, phase: str, detail: str, elapsed_s: float) -> None:
        """Drop it."""

    def note(self, text: str) -> None:
        """Drop it."""

    def warning(self, text: str) -> None:
        """Drop it."""
