"""A restart of some instances: what is started again when not all of them stop, and what others do to it."""

from __future__ import annotations

from typing import Any

import pytest

from pdctl.errors import HostUnreachable, PdctlError
from pdctl.lifecycle import restart as module
from pdctl.lifecycle.failure import Aftermath, InstanceFailure, LaunchFailed
from pdctl.lifecycle.reporter import SilentReporter
from pdctl.lifecycle.restart import restart
from pdctl.lifecycle.up import UpOptions, UpResult
from pdctl.plan import make_plan
from pdctl.spec import parse

FILE = """
cluster: two
model: m
accelerator: cpu
fabric: tcp
prefill: {hosts: [h1]}
decode: {hosts: [h2]}
router: {host: h3}
"""


class Lifecycle:
    """What stopping comes to, and what ``up`` was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan = make_plan(parse(FILE, file="c.yaml", environ={}), environ={}, connector_digest="0" * 64)
        self.stopped = Aftermath()
        self.ups: list[UpOptions] = []
        self.hosts: list[str] = []
        self.error: PdctlError | None = None
        monkeypatch.setattr(module, "stop_instances", lambda *args, **more: self.stopped)
        monkeypatch.setattr(module, "up", self.up)

    def up(self, plan: Any, fleet: Any, reporter: Any, options: UpOptions) -> UpResult:
        self.ups.append(options)
        if self.error is not None:
            raise self.error
        return UpResult((), None, "m")

    def map(self, work: Any, hosts: list[str], *, timeout_s: float) -> dict[str, Any]:
        self.hosts += hosts
        return {}

    def restart(self, options: UpOptions) -> UpResult:
        return restart(self.plan, self, SilentReporter(), self.plan.instances[:2], options)  # type: ignore[arg-type]


@pytest.fixture
def lifecycle(monkeypatch: pytest.MonkeyPatch) -> Lifecycle:
    return Lifecycle(monkeypatch)


@pytest.mark.parametrize(
    ("aftermath", "words"),
    [
        (Aftermath(("prefill-0",), ("decode-0",)), "could not stop decode-0"),
        (Aftermath(("prefill-0",), (), ("decode-0",)), "could not be reached to be stopped: decode-0"),
    ],
)
def test_what_was_stopped_beside_one_that_would_not_stop_is_started_again(
    lifecycle: Lifecycle, aftermath: Aftermath, words: str
) -> None:
    lifecycle.stopped = aftermath
    with pytest.raises(PdctlError, match=f"cannot restart: {words}; prefill-0 stopped, and was started again"):
        lifecycle.restart(UpOptions(timeout_s=7.0))
    assert lifecycle.ups == [UpOptions(timeout_s=7.0, only=("prefill-0",), keep=True, prove=False)]


def test_and_if_it_does_not_come_up_that_is_told(lifecycle: Lifecycle) -> None:
    lifecycle.stopped = Aftermath(("prefill-0",), ("decode-0",))
    failure = InstanceFailure("prefill-0", "h1", "exit code 1")
    lifecycle.error = LaunchFailed("no luck", failures=[failure], aftermath=Aftermath(left_running=("prefill-0",)))
    with pytest.raises(PdctlError, match="prefill-0 stopped, and did not come up again: no luck; left running: pref"):
        lifecycle.restart(UpOptions())


def test_nothing_is_started_if_nothing_was_stopped(lifecycle: Lifecycle) -> None:
    lifecycle.stopped = Aftermath((), ("prefill-0", "decode-0"))
    with pytest.raises(PdctlError) as told:
        lifecycle.restart(UpOptions())
    assert "nothing was started" in told.value.hint
    assert lifecycle.ups == []


def test_a_host_that_is_lost_after_the_stop_is_told_with_what_is_down(lifecycle: Lifecycle) -> None:
    lifecycle.stopped = Aftermath(("decode-0", "prefill-0"))
    lifecycle.error = HostUnreachable("h2", "timed out")
    with pytest.raises(HostUnreachable) as told:
        lifecycle.restart(UpOptions())
    assert told.value.message.startswith("prefill-0, decode-0 stopped, and not started again: ")
    assert told.value.hint.startswith("pdctl up starts what is down")


def test_only_hosts_of_what_is_restarted_are_needed(lifecycle: Lifecycle) -> None:
    lifecycle.restart(UpOptions(only=("prefill-0", "decode-0")))
    assert lifecycle.hosts == ["h1", "h2"]
    lifecycle.hosts.clear()
    lifecycle.restart(UpOptions())
    assert lifecycle.hosts == ["h1", "h2", "h3"]
