from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import pytest

from pdctl.errors import HostUnreachable
from pdctl.lifecycle import logs
from pdctl.lifecycle.nodes import LogPart, Nodes

GONE = HostUnreachable("p1", "no route to host")


class FakeNodes:
    """Answers with what is next in the list; raises it if it is an error."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers: Iterator[str | Exception] = iter(answers)

    def log(self, host: str, name: str, **more: Any) -> LogPart:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return LogPart(text=answer, offset=0, inode=None)


def test_a_host_that_is_away_while_its_log_is_followed_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_RETRY_PAUSE_S", 0)
    nodes = cast(Nodes, FakeNodes("one\n", GONE, GONE, GONE, "", "two\n", GONE, "three\n"))
    said = list(islice(logs.read_log(nodes, "p1", "prefill-0", lines=5, follow=True), 7))
    gone = "\n--- p1: no route to host; waiting for the host\n"
    assert said == ["one\n", gone, "--- p1 is back\n", "two\n", gone, "--- p1 is back\n", "three\n"]


def test_a_host_that_is_away_at_the_first_look_is_an_error() -> None:
    with pytest.raises(HostUnreachable):
        list(logs.read_log(cast(Nodes, FakeNodes(GONE)), "p1", "prefill-0", lines=5, follow=True))
