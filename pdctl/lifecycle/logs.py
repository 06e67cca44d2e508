"""`pdctl logs`: the end of an instance's log, and what is added to it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pdctl.errors import HostError
from pdctl.lifecycle.nodes import Nodes

_POLL_S = 10.0
_RETRY_PAUSE_S = 2.0


def read_log(nodes: Nodes, host: str, name: str, *, lines: int, follow: bool) -> Iterator[str]:
    """Yield pieces of the log: its last ``lines``, then, with ``follow``, whatever is written, for ever.

    While following, a host that goes away is waited for; the text goes on where it stopped, also over a restart of
    the instance (which begins a new log).

    Raises:
        HostError: the host cannot be reached at the first look.
        NodeError: the instance has no log there.
    """
    part = nodes.log(host, name, lines=lines, offset=None, inode=None, wait_s=0)
    yield part.text
    lost = False
    while follow:
        try:
            part = nodes.log(host, name, lines=lines, offset=part.offset, inode=part.inode, wait_s=_POLL_S)
        except HostError as error:
            if not lost:
                # Once for each time that it is gone, which may be hours.
                yield f"\n--- {error.message}; waiting for the host\n"
            lost = True
            time.sleep(_RETRY_PAUSE_S)
            continue
        if lost:
            yield f"--- {host} is back\n"
        lost = False
        if part.text:
            yield part.text
