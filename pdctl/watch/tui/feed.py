"""The thread that waits for frames, so that the screen never does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pdctl.errors import PdctlError
from pdctl.watch.tui.source import Frame, SnapshotSource, SourceClosed

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 10.0


def explain(error: BaseException) -> str:
    """An error in one line: our own say it well, others are named by their type."""
    if isinstance(error, PdctlError):
        return f"{error.message}  ({error.hint})" if error.hint else error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Feed:
    """Asks a source for frames until it is stopped, and goes on after errors, more and more slowly.

    The three callbacks run in the feed's thread.

    Args:
        source: asked again and again; closed by :meth:`stop`.
        on_frame: gets each frame.
        on_error: gets what went wrong, and the seconds until the next attempt.
        on_end: there will be no more.
    """

    def __init__(
        self,
        source: SnapshotSource,
        *,
        on_frame: Callable[[Frame], None],
        on_error: Callable[[str, float], None],
        on_end: Callable[[], None],
    ) -> None:
        self._source = source
        self._on_frame = on_frame
        self._on_error = on_error
        self._on_end = on_end
        self._stopped = threading.Event()
        # A source that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="pdctl-watch-feed", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, wait_s: float = 2.0) -> None:
        """End, and wait a little for it."""
        self._stopped.set()
        try:
            self._source.close()
        except Exception:
            # The screen goes away now: there is nobody left to tell but the log.
            logger.exception("the source of the dashboard could not be closed")
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stopped.is_set():
            try:
                frame = self._source.next()
            except SourceClosed:
                if not self._stopped.is_set():
                    self._on_end()
                return
            except Exception as error:
                if self._stopped.is_set():
                    return
                logger.warning("no frame from the source", exc_info=True)
                self._on_error(explain(error), retry_s)
                self._stopped.wait(retry_s)
                retry_s = min(retry_s * 2, LONGEST_RETRY_S)
            else:
                retry_s = FIRST_RETRY_S
                if not self._stopped.is_set():
                    self._on_frame(frame)
