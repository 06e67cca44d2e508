"""rich's console with manners of ours towards a reader that goes away (`pdctl status | head -1`)."""

from __future__ import annotations

import sys

from rich.console import Console


class OutputConsole(Console):
    """What a command prints on stdout. rich would end the process with exit code 1, which means findings here."""

    def on_broken_pipe(self) -> None:
        """Leave it to :func:`pdctl.cli.main.main`, as with everything else that is printed.

        Raises:
            BrokenPipeError: the one that is being handled.
        """
        error = sys.exc_info()[1]
        assert error is not None, "rich calls this while it handles the error"
        raise error


class ProgressConsole(Console):
    """Progress on stderr. rich would end the process in the middle of a launch, and leave half of it running."""

    def on_broken_pipe(self) -> None:
        """Go on without progress: nobody looks at it."""
        self.quiet = True
