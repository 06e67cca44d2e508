"""Faults that tests ask for, on an agent that keeps count."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pdctl_connector import faults, wire
from pdctl_connector.nixl_guard import NixlGuard


class Agent:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_notif(self, name: str, data: bytes) -> str:
        self.sent.append(data)
        return "sent"

    def check_xfer_state(self, handle: int) -> str:
        return "PROC"


class BackendError(Exception):
    pass


class DisconnectError(Exception):
    pass


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = ModuleType("nixl._bindings")
    bindings.nixlBackendError, bindings.nixlRemoteDisconnectError = BackendError, DisconnectError
    package = ModuleType("nixl")
    package._bindings = bindings
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._bindings", bindings)


def guarded(text: str) -> tuple[Any, Agent]:
    agent = Agent()
    return NixlGuard(agent, fault=faults.Faults(text)), agent


@pytest.mark.parametrize(("action", "error"), [("raise", BackendError), ("disconnect", DisconnectError)])
def test_the_nth_call_fails_and_no_other(action: str, error: type[Exception]) -> None:
    guard, _ = guarded(f"check_xfer_state:2:{action}")
    assert guard.check_xfer_state(1) == "PROC"
    with pytest.raises(error, match="on purpose"):
        guard.check_xfer_state(1)
    assert guard.check_xfer_state(1) == "PROC"
    assert guard.operation is None


def test_a_star_is_every_call_and_return_is_an_answer() -> None:
    guard, _ = guarded("check_xfer_state:*:return=ERR")
    assert [guard.check_xfer_state(1) for _ in range(3)] == ["ERR"] * 3
    assert guard.send_notif("p", b"") == "sent"


def test_sleep_waits_and_then_does_it() -> None:
    guard, agent = guarded("send_notif:1:sleep=0.05")
    begun = time.monotonic()
    guard.send_notif("p", b"1")
    assert time.monotonic() - begun >= 0.05
    assert agent.sent == [b"1"]


def test_reverse_sends_the_blocks_in_the_wrong_order() -> None:
    sent: list[object] = []
    fault = faults.Faults("make_prepped_xfer:*:reverse")
    args = ("WRITE", "local", [3, 4, 5], "remote", [7, 8, 9])
    fault("make_prepped_xfer", args, lambda *other: sent.append(other or args))
    assert sent == [("WRITE", "local", [5, 4, 3], "remote", [7, 8, 9])]


def test_notifications_are_told_apart_by_kind() -> None:
    guard, agent = guarded("send_notif/ALIVE:*:drop,send_notif/HB:1:twice")
    alive = wire.encode(wire.Alive(key="k", attempt=0, stage="ready"))
    heartbeat = wire.encode(wire.Heartbeat(["k"]))
    assert guard.send_notif("p", alive) is None
    guard.send_notif("p", heartbeat)
    guard.send_notif("p", heartbeat)
    guard.send_notif("p", b"HB:of another connector")
    guard.send_notif("p", b"PDCTL:\x01")
    assert agent.sent == [heartbeat] * 3 + [b"HB:of another connector", b"PDCTL:\x01"]


def test_a_file_is_read_again_at_every_call(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    guard, _ = guarded(f"@{path}")
    assert guard.check_xfer_state(1) == "PROC"
    path.write_text("check_xfer_state:*:return=ERR\n")
    assert guard.check_xfer_state(1) == "ERR"
    path.unlink()
    assert guard.check_xfer_state(1) == "PROC"


@pytest.mark.parametrize("text", ["transfer", "transfer:1", "transfer:0:raise", "transfer:1:boom", "transfer:1:sleep"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"PDCTL_FAULTS: '.*' is no fault"):
        faults.Faults(text)


def test_the_environment_asks_for_faults_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert faults.from_environment() is None
    assert not caplog.records
    monkeypatch.setenv(faults.VARIABLE, "transfer:1:raise")
    assert faults.from_environment() is not None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
