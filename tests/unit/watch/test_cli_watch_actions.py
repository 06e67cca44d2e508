"""What a watch does to a cluster: what it refuses, in which order it works, and how it is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdctl.cli import options as cli_options
from pdctl.cli.watch_actions import ClusterActions, refuse_other_plan
from pdctl.errors import PdctlError
from pdctl.lifecycle import nodes as nodes_module
from pdctl.lifecycle import restart as restart_module
from pdctl.lifecycle.failure import Aftermath, LaunchFailed
from pdctl.lifecycle.up import InstanceResult, UpOptions, UpResult
from pdctl.plan import ClusterPlan, make_plan
from pdctl.spec import parse
from pdctl.watch.acting import Because, Decision
from pdctl.watch.acting_thread import Progress

FILE = """
cluster: two
model: m
accelerator: cpu
fabric: tcp
prefill: {{hosts: [h1], vllm_args: {{seed: {seed}}}}}
decode: {{hosts: [{decode}]}}
router: {{host: h1}}
"""


def planned(seed: int = 1, decode: str = "h2") -> ClusterPlan:
    text = FILE.format(seed=seed, decode=decode)
    return make_plan(parse(text, file="c.yaml", environ={}), environ={}, connector_digest="0" * 64)


PLAN = planned()
PAIR = Decision("restart-pair", ("prefill-0", "decode-0"), Because("T002", "it stalls", "prefill-0>decode-0"))


class Cluster:
    """Stands for the life cycle; remembers what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = PLAN
        self.runs = {
            one.name: SimpleNamespace(process="running", digest=one.digest, uptime_s=5000.0) for one in PLAN.instances
        }
        self.restarts: list[tuple[list[str], UpOptions]] = []
        self.meanwhile: Callable[[Any], None] = lambda reporter: None
        self.error: PdctlError | None = None
        monkeypatch.setattr(cli_options, "load_plan", lambda file, *, require_secrets: self.now)
        monkeypatch.setattr(nodes_module, "Nodes", lambda plan, fleet: self)
        monkeypatch.setattr(restart_module, "restart", self.restart)

    def status(self, host: str, names: list[str]) -> Any:
        return SimpleNamespace(known={name: self.runs[name] for name in names})

    def restart(self, plan: Any, fleet: Any, reporter: Any, instances: Any, options: UpOptions) -> UpResult:
        self.restarts.append(([one.name for one in instances], options))
        reporter.step("stopping")
        self.meanwhile(reporter)
        if self.error is not None:
            raise self.error
        return UpResult(tuple(InstanceResult(one, "started", 12.0) for one in instances), None, "m", unproven="")

    def actions(self, **more: Any) -> ClusterActions:
        return ClusterActions(PLAN, Path("c.yaml"), None, read_only=False, **more)  # type: ignore[arg-type]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_a_pair_is_restarted_one_after_the_other_and_proven_as_a_whole(cluster: Cluster) -> None:
    words = cluster.actions().act(PAIR, Progress())
    assert words.startswith("prefill-0 was restarted, and is ready after 12 s; decode-0 was restarted")
    assert cluster.restarts == [
        (["prefill-0"], UpOptions(keep=True, only=("prefill-0",), prove=False)),
        (["decode-0"], UpOptions(keep=True, only=("decode-0",), prove=True)),
    ]


def test_the_other_half_is_not_begun_when_the_watch_ends(cluster: Cluster) -> None:
    progress = Progress()

    def meanwhile(reporter: Any) -> None:
        reporter.progress("prefill-0", "loading", "", 1.0)
        assert progress.wait_safe(0.01)

    cluster.meanwhile = meanwhile
    assert "decode-0 was left as it is" in cluster.actions().act(PAIR, progress)
    assert len(cluster.restarts) == 1


def test_what_failed_tells_what_it_left(cluster: Cluster) -> None:
    cluster.error = LaunchFailed("no proof", hint="look", aftermath=Aftermath(left_running=("prefill-0",)))
    with pytest.raises(PdctlError, match="no proof; left running: prefill-0"):
        cluster.actions().act(PAIR, Progress())
    assert len(cluster.restarts) == 1


@pytest.mark.parametrize("now", [planned(seed=2), planned(decode="h3")])
def test_edits_that_nobody_has_applied_are_not_applied_by_the_watch(cluster: Cluster, now: ClusterPlan) -> None:
    cluster.now = now
    with pytest.raises(PdctlError, match="the cluster file has changed since the watch began"):
        cluster.actions().act(PAIR, Progress())
    assert cluster.restarts == []
    # A person asks for the present plan.
    cluster.actions().restart("prefill-0")
    assert len(cluster.restarts) == 1
    refuse_other_plan(PLAN, planned())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"process": "exited"}, "decode-0 does not run now"),
        ({"digest": "other"}, "decode-0 runs another plan than the cluster file"),
        ({"uptime_s": 299.0}, "decode-0 was started 299 s ago"),
    ],
)
def test_what_somebody_else_is_at_is_left_alone(cluster: Cluster, change: dict[str, Any], words: str) -> None:
    vars(cluster.runs["decode-0"]).update(change)
    with pytest.raises(PdctlError, match=words):
        cluster.actions(cool_down_s=300.0).act(PAIR, Progress())
    assert cluster.restarts == []


def test_leaving_waits_for_a_restart_that_a_person_has_begun(cluster: Cluster) -> None:
    begun, go_on, notes = threading.Event(), threading.Event(), list[str]()

    def meanwhile(reporter: Any) -> None:
        begun.set()
        assert go_on.wait(30)

    cluster.meanwhile = meanwhile
    actions = cluster.actions()
    person = threading.Thread(target=actions.restart, args=("prefill-0",), daemon=True)
    person.start()
    assert begun.wait(30)
    actions.close(notes.append, 0.01)
    assert notes[0].startswith("restart of prefill-0 is under way (stopping)")
    assert "hangs (stopping): pdctl status" in notes[1]
    threading.Timer(0.2, go_on.set).start()
    actions.close(notes.append, 30)
    assert notes[-1].startswith("restart of prefill-0 done: prefill-0 was restarted")
    person.join(30)
    with pytest.raises(PdctlError, match="the watch is ending"):
        actions.restart("prefill-0")


def test_leaving_says_nothing_when_nothing_is_done(cluster: Cluster) -> None:
    notes: list[str] = []
    actions = cluster.actions()
    actions.restart("prefill-0")
    actions.close(notes.append)
    assert notes == []
