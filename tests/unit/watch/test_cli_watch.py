"""``pdctl watch`` with a poller that is scripted, and everything else as it is."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

import pdctl.cli.watch
import pdctl.watch.book
import pdctl.watch.poller
import pdctl.watch.tui.app
from pdctl.cli.main import cli
from pdctl.cli.watch import _exporting, _notes, _Pace
from pdctl.cli.watch_actions import ClusterActions
from pdctl.hosts.fleet import Fleet
from pdctl.watch.alerts import Severity
from pdctl.watch.recording import Recorder
from pdctl.watch.sinks import Sinks
from pdctl.watch.snapshot import HostView
from tests.unit.watch.frames import NOTE, SNAPSHOT, STALL, ScriptedPoller, ScriptedWatchdog, alert, snapshots

FILE = """\
cluster: qwen3
model: m
accelerator: cpu
fabric: tcp
prefill: {hosts: [h1]}
decode: {hosts: [h2]}
router: {host: h1}
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["watch", *words])


class Always:
    """Finds the same alerts in every snapshot."""

    def __init__(self, *alerts) -> None:
        self.alerts = list(alerts)

    def look(self, snapshot):
        return self.alerts, []


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    path = tmp_path / "incident.jsonl"
    with Recorder(path) as recorder:
        for snapshot in snapshots(8):
            recorder.write(snapshot, ())
    return str(path)


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch):
    def install(made, snapshot=SNAPSHOT) -> list[ScriptedPoller]:
        pollers: list[ScriptedPoller] = []

        class Poller(ScriptedPoller):
            def __init__(self, *args, **more) -> None:
                super().__init__()
                pollers.append(self)

            def poll(self):
                return replace(snapshot, tick=super().poll().tick)

        monkeypatch.setattr(pdctl.watch.poller, "Poller", Poller)
        monkeypatch.setattr(pdctl.watch.book, "Watchdog", lambda settings: made)
        return pollers

    return install


DEAD_HOST = replace(SNAPSHOT, hosts=(HostView("h1", 0.1), HostView("h2", error="h2: timed out")))


@pytest.mark.parametrize(
    ("alerts", "snapshot", "code"),
    [
        ([], SNAPSHOT, 0),
        ([alert(NOTE)], SNAPSHOT, 0),
        ([alert(replace(STALL, severity=Severity.WARNING))], SNAPSHOT, 1),
        ([alert()], SNAPSHOT, 1),
        ([alert()], DEAD_HOST, 3),
    ],
)
def test_once_polls_twice_and_ends_with_the_code_of_the_worst(file, watchdog, alerts, snapshot, code) -> None:
    pollers = watchdog(Always(*alerts), snapshot)
    result = run("-f", file, "--once", "--json", "--interval", "0.1")
    assert result.exit_code == code, result.output
    shown = json.loads(result.stdout)
    assert (shown["exit_code"], len(shown["alerts"])) == (code, len(alerts))
    assert (pollers[0].polls, pollers[0].closed.is_set()) == (2, True)


def test_once_for_people_and_a_filter(file, watchdog) -> None:
    watchdog(Always(alert(), alert(NOTE)))
    result = run("-f", file, "--once", "--interval", "0.1", "--skip", "write-stalled")
    assert result.exit_code == 0
    assert "T002" not in result.stdout
    assert "INFO E005 watch-degraded" in result.stdout


def test_once_gives_what_it_found_to_the_hook(file, watchdog, tmp_path: Path) -> None:
    watchdog(Always(alert()))
    out = tmp_path / "out"
    result = run("-f", file, "--once", "--interval", "0.1", "--on-alert", f"tee {out}")
    assert result.exit_code == 1
    assert json.loads(out.read_text())["alert"]["code"] == "T002"


class Interrupting(ScriptedWatchdog):
    """Ctrl-C, a little after the alert has closed."""

    def look(self, snapshot):
        if snapshot.tick == 6:
            raise KeyboardInterrupt
        return super().look(snapshot)


def test_headless_prints_lines_and_leaves_nothing_when_interrupted(file, watchdog, tmp_path: Path) -> None:
    pollers = watchdog(Interrupting())
    record = tmp_path / "r.jsonl.gz"
    result = run("-f", file, "--json", "--interval", "0.1", "--record", str(record), "--exporter", "0")
    assert result.exception is not None
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["event"], line["alert"]["code"]) for line in lines] == [("opened", "T002"), ("closed", "T002")]
    assert "watching qwen3: 3 instances on 2 hosts, every 0.1 s; metrics on http://127.0.0.1:" in result.stderr
    assert pollers[0].closed.is_set()
    names = [thread.name for thread in threading.enumerate()]
    assert not {"watch", "exporter"} & set(names)
    again = run("--replay", str(record), "--json")
    assert again.exit_code in (0, 1)


def test_a_replay_gives_the_same_events_each_time(recording, watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdctl.watch.book, "Watchdog", lambda settings: ScriptedWatchdog())
    first, second = run("--replay", recording, "--json"), run("--replay", recording, "--json")
    assert first.exit_code == 1, first.output
    assert first.stdout == second.stdout
    assert [json.loads(line)["event"] for line in first.stdout.splitlines()] == ["opened", "closed"]
    part = run("--replay", recording, "--json", "--from", "0:03", "--to", "00:00:05.5")
    assert [json.loads(line)["event"] for line in part.stdout.splitlines()] == ["closed"]


def test_a_replay_without_alerts_is_fine_and_never_calls_the_webhook_of_the_environment(recording, monkeypatch) -> None:
    monkeypatch.setenv("PDCTL_WEBHOOK", "not even an url")
    result = run("--replay", recording, "--heartbeat", "1", "--only", "W")
    assert result.exit_code == 0, result.output


def test_notes_that_nobody_reads_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def echo(line: str, *, err: bool) -> None:
        said.append(line)
        raise BrokenPipeError

    monkeypatch.setattr(pdctl.cli.watch.click, "echo", echo)
    with _notes(headless=True) as notes:
        notes("one")
    with _notes(headless=False) as notes:
        notes("two")
        assert len(said) == 1
        # The dashboard has left the screen: what is waited for is said at once.
        notes.release()
        assert len(said) == 2
        notes("three")
        assert len(said) == 3
    assert len(said) == 3


def test_what_is_kept_is_said_as_soon_as_the_dashboard_has_left_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    handlers = []

    class Dashboard:
        return_code = 0

        def __init__(self, *args, **more) -> None:
            pass

        def run(self) -> None:
            handlers.extend(signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP))
            notes("a hook failed")
            assert said == []

    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    monkeypatch.setattr(pdctl.watch.tui.app, "Dashboard", Dashboard)
    monkeypatch.setattr(pdctl.cli.watch.click, "echo", lambda line, *, err: said.append(line))
    with _notes(headless=False) as notes:
        assert pdctl.cli.watch._dashboard(None, SimpleNamespace(read_only=False), None, notes) == 0
        assert [line.partition(" ")[2] for line in said] == ["a hook failed"]
        notes("waiting until it can be left")
        assert len(said) == 2
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)] == before
    assert handlers[0] is handlers[1] is not before[0]


def test_what_a_person_has_begun_is_waited_for_while_hosts_are_connected(file, watchdog, monkeypatch) -> None:
    pollers, ends = watchdog(Interrupting()), []
    closes = Fleet.close
    monkeypatch.setattr(
        ClusterActions, "close", lambda self, note: ends.append(f"actions {pollers[0].closed.is_set()}")
    )
    monkeypatch.setattr(Fleet, "close", lambda self: (ends.append("fleet"), closes(self))[1])
    run("-f", file, "--interval", "0.1")
    assert ends == ["actions False", "fleet"]


def test_the_health_of_the_exporter_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, told = _Pace(1.0), []
    pace.listeners.append(told.append)
    now_s = [0.0]
    monkeypatch.setattr(pdctl.cli.watch, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with _exporting(("127.0.0.1", 0), pace, Sinks([])) as (_, where):
        url = where.rpartition(" ")[2].replace("/metrics", "/healthz")

        def answer() -> int:
            try:
                with urllib.request.urlopen(url, timeout=10) as response:
                    return response.status
            except urllib.error.HTTPError as error:
                error.close()
                return error.code

        assert answer() == 200
        now_s[0] = 100.0
        assert answer() == 503
        pace(30.0)
        assert answer() == 200
    assert told == [30.0]


@pytest.mark.parametrize("more", [[], ["--on-stall-dry-run"]])
def test_secrets_are_missed_at_the_start_and_not_at_the_incident(file, watchdog, more: list[str]) -> None:
    pollers = watchdog(Interrupting())
    path = Path(file)
    path.write_text(FILE + "env: {VLLM_API_KEY: {from_env: PDCTL_TEST_UNSET}}\n")
    result = run("-f", file, "--interval", "0.1", "--on-stall", "restart-pair", *more)
    assert getattr(result.exception, "exit_code", None) == 2
    assert "PDCTL_TEST_UNSET" in str(result.exception)
    assert pollers == []
    # Watching, and draining, start nothing.
    for words in ([], ["--on-stall", "drain"]):
        run("-f", file, "--interval", "0.1", *words)
        assert pollers.pop().polls > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--once", "--exporter", "9109"], "--exporter has no effect with --once"),
        (["--once", "--heartbeat", "5"], "--heartbeat has no effect with --once"),
        (["--from", "3"], "--from is for --replay"),
        (["--speed", "3"], "--speed is for --replay"),
        (["--replay", "x", "--record", "y"], "--record has no effect with --replay"),
        (["--replay", "x", "--from", "soon"], "neither seconds"),
        (["--exporter", "here"], "is no ADDR:PORT"),
        (["--webhook-secret-env", "X"], "is for --webhook"),
    ],
)
def test_options_that_do_not_go_together(file, words: list[str], message: str) -> None:
    result = run("-f", file, *words)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "T999"], "there is no alert 'T999'"),
        (["--only", "T", "--skip", "T"], "no alert is left"),
        (["--webhook", "https://u:p@h/"], "user name or password"),
        (["--webhook", "http://h/", "--webhook-secret-env", "PDCTL_TEST_UNSET"], "PDCTL_TEST_UNSET is not set"),
        (["--on-alert", "'"], "--on-alert"),
        (["--replay", "/no-such-folder/it"], "/no-such-folder/it"),
    ],
)
def test_errors_of_the_command_line_come_before_any_host_is_asked(file, words: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["watch", "-f", file, *words])
    assert result.exception is not None
    assert getattr(result.exception, "exit_code", None) == 2
    assert message in str(result.exception)
