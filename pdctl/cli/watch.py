"""``pdctl watch``."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from pdctl.cli.options import cluster_file, load_plan, print_json

if TYPE_CHECKING:
    from types import FrameType

    from pdctl.plan import ClusterPlan
    from pdctl.watch.acting import ActingSettings, Action
    from pdctl.watch.settings import WatchSettings
    from pdctl.watch.sinks import Sinks
    from pdctl.watch.snapshot import Snapshot
    from pdctl.watch.sources import CodeFilter, Listener, RecordedSource
    from pdctl.watch.tui.source import Actions, Frame, SnapshotSource

_SINKS_CLOSE_S = 5.0
_NOTES_LIMIT = 100
_WEBHOOK_VARIABLE = "PDCTL_WEBHOOK"
_SECRET_VARIABLE = "PDCTL_WEBHOOK_SECRET"  # noqa: S105 - the name, not the secret
_REPLAY_ONLY = ("from_s", "to_s", "speed")
_ACTING = ("on_stall", "on_stall_limit", "on_stall_cool_down_s", "on_stall_dry_run")
_NOT_IN_REPLAY = ("once", "exporter", "record", "interval_s", *_ACTING)
_NOT_ONCE = ("exporter", "heartbeat_s", "record", *_ACTING)


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int] | None:
    from pdctl.watch.exporter_server import parse_address

    try:
        return None if value is None else parse_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _offset(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        numbers = [float(part) for part in value.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or not all(0 <= number < 1e9 for number in numbers):
        message = f"{value!r} is neither seconds (90.5) nor MM:SS or HH:MM:SS, from the beginning"
        raise click.BadParameter(message, ctx, param)
    seconds = 0.0
    for number in numbers:
        seconds = seconds * 60 + number
    return seconds


def _complete_code(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion of codes; of the last one of a comma list."""
    del ctx, param
    from pdctl.watch.rules.codes import CODES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{code}" for code in sorted(CODES) if code.startswith(last.upper())]


@dataclass(frozen=True)
class _Wishes:
    """What the command line asks for, apart from where the frames come from."""

    headless: bool
    as_json: bool
    read_only: bool
    heartbeat_s: float
    exporter: tuple[str, int] | None
    wanted: CodeFilter
    make_sinks: Callable[[Callable[[str], None]], Sinks]
    acting: ActingSettings | None = None


@click.command("watch", short_help="Watch transfers; name what stalls, and why.")
@cluster_file
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds from one poll to the next.",
)
@click.option("--read-only", is_flag=True, help="No restart or drain from the dashboard.")
@click.option("--headless", is_flag=True, help="No dashboard, but a line for each alert. So too without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout instead of text; implies --headless.")
@click.option("--once", is_flag=True, help="Look once (two polls), print what is wrong, and end.")
@click.option(
    "--heartbeat",
    "heartbeat_s",
    type=click.FloatRange(1, 86400),
    metavar="SECONDS",
    help="Headless: also a line with a few figures every so often.",
)
@click.option(
    "--record", type=click.Path(path_type=Path, dir_okay=False), help="Also write every poll to FILE (.gz: packed)."
)
@click.option(
    "--replay", type=click.Path(path_type=Path, dir_okay=False), help="Play what --record wrote. No host is asked."
)
@click.option(
    "--from", "from_s", metavar="TIME", callback=_offset, help="Replay: begin here (seconds, MM:SS or HH:MM:SS)."
)
@click.option("--to", "to_s", metavar="TIME", callback=_offset, help="Replay: end here.")
@click.option(
    "--speed",
    type=click.FloatRange(0, 1000),
    help="Replay: times as fast as recorded; 0: no pauses.  [default: 1; headless: 0]",
)
@click.option(
    "--exporter",
    metavar="ADDR:PORT",
    callback=_address,
    help="Serve Prometheus metrics of the whole cluster; a port alone binds 127.0.0.1.",
)
@click.option(
    "--on-alert",
    metavar="CMD",
    help="Run CMD (without a shell) when an alert opens, changes or closes; it gets JSON on stdin.",
)
@click.option(
    "--webhook",
    metavar="URL",
    envvar=_WEBHOOK_VARIABLE,
    help="POST the same JSON to URL (also from the environment variable PDCTL_WEBHOOK).",
)
@click.option(
    "--webhook-secret-env",
    metavar="NAME",
    help="Sign these requests with the secret in this variable (PDCTL_WEBHOOK_SECRET, if that is set).",
)
@click.option(
    "--on-stall",
    type=click.Choice(["restart-pair", "restart-writer-side", "drain"]),
    help="Act when a stall lasts that a restart cures; see docs/watch.md. Without it a watch only tells.",
)
@click.option(
    "--on-stall-limit",
    type=click.IntRange(1, 60),
    default=2,
    show_default=True,
    help="Most actions within an hour, for the whole cluster.",
)
@click.option(
    "--on-stall-cool-down",
    "on_stall_cool_down_s",
    type=click.FloatRange(0, 86400),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Leave an instance alone for so long after an action, and after its start.",
)
@click.option("--on-stall-dry-run", is_flag=True, help="Tell what --on-stall would do, and do nothing.")
@click.option("--only", multiple=True, metavar="CODES", shell_complete=_complete_code, help="Only these alerts.")
@click.option("--skip", multiple=True, metavar="CODES", shell_complete=_complete_code, help="Not these alerts.")
@click.pass_context
def command(
    ctx: click.Context,
    file: Path,
    interval_s: float,
    read_only: bool,
    headless: bool,
    as_json: bool,
    once: bool,
    heartbeat_s: float | None,
    record: Path | None,
    replay: Path | None,
    from_s: float | None,
    to_s: float | None,
    speed: float | None,
    exporter: tuple[str, int] | None,
    on_alert: str | None,
    webhook: str | None,
    webhook_secret_env: str | None,
    on_stall: Action | None,
    on_stall_limit: int,
    on_stall_cool_down_s: float,
    on_stall_dry_run: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
) -> None:
    """Watch every instance, writer thread and transfer, and name what stalls: which transfer, which side, why.

    On a terminal this is a dashboard; elsewhere, or with --headless, alerts are printed as lines. Codes of alerts are
    those of docs/alerts.md: T002, write-stalled, or T for all of transfers.

    \b
        pdctl watch                                              the dashboard; ? shows its keys
        pdctl watch --once || echo trouble                       for scripts
        pdctl watch --headless --exporter 127.0.0.1:9109         for a supervisor and Prometheus
        pdctl watch --on-stall restart-writer-side               also act, within limits
        pdctl watch --replay incident.jsonl.gz --from 2:30       look at an incident again

    Exit codes: 0 when it is left by q or ends by itself; with --once and headless --replay 1 if there was a warning or
    worse; --once 3 if a host did not answer; 130 when interrupted, by SIGTERM too.
    """
    from pdctl.watch.acting import ActingSettings
    from pdctl.watch.selection import select_codes

    headless = headless or as_json or once or not (sys.stdout.isatty() and sys.stdin.isatty())
    if replay is not None:
        _refuse(ctx, _NOT_IN_REPLAY, "has no effect with --replay")
        if ctx.get_parameter_source("webhook") is not ParameterSource.COMMANDLINE:
            # Nobody is to be woken by an old incident because a variable is set.
            webhook = webhook_secret_env = None
    else:
        _refuse(ctx, _REPLAY_ONLY, "is for --replay")
    if once:
        _refuse(ctx, _NOT_ONCE, "has no effect with --once")
    if on_stall is None:
        _refuse(ctx, _ACTING, "is for --on-stall")
    elif read_only:
        raise click.UsageError("--on-stall acts, and --read-only forbids that: give one of them")
    if webhook_secret_env is not None and webhook is None:
        raise click.UsageError("--webhook-secret-env is for --webhook")
    wishes = _Wishes(
        headless=headless,
        as_json=as_json,
        read_only=read_only,
        heartbeat_s=heartbeat_s or 0.0,
        exporter=exporter,
        wanted=select_codes(only, skip),
        make_sinks=_sink_maker(on_alert, webhook, webhook_secret_env),
        acting=None
        if on_stall is None
        else ActingSettings(on_stall, on_stall_limit, on_stall_cool_down_s, on_stall_dry_run, interval_s),
    )
    if replay is not None:
        given = ctx.get_parameter_source("file") is not ParameterSource.DEFAULT
        code = _replay(replay, file if given else None, from_s or 0.0, to_s, speed, wishes)
    elif once:
        code = _once(load_plan(file), interval_s, wishes)
    else:
        # A secret that is missing is to be found now, not at the incident.
        restarts = on_stall is not None and on_stall != "drain"
        code = _live(load_plan(file, require_secrets=restarts), file, interval_s, record, wishes)
    ctx.exit(code)


def _refuse(ctx: click.Context, names: tuple[str, ...], reason: str) -> None:
    for parameter in ctx.command.params:
        if parameter.name in names and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} {reason}")


def _sink_maker(
    on_alert: str | None, webhook: str | None, secret_env: str | None
) -> Callable[[Callable[[str], None]], Sinks]:
    """Check what the command line says of sinks now, and make them, with their threads, later."""
    import os

    from pdctl.errors import UsageError
    from pdctl.watch.hook import CommandHook, parse_command
    from pdctl.watch.sinks import QueuedSink, Sinks
    from pdctl.watch.webhook import Webhook, check_url

    argv = None if on_alert is None else parse_command(on_alert)
    url = None if webhook is None else check_url(webhook)
    if url is not None and secret_env is None and os.environ.get(_SECRET_VARIABLE):
        secret_env = _SECRET_VARIABLE
    secret = b""
    if secret_env is not None:
        secret = os.environ.get(secret_env, "").encode("utf-8", "surrogateescape")
        if not secret:
            raise UsageError(
                f"--webhook-secret-env: the environment variable {secret_env} is not set, or empty",
                hint="name a variable that holds the secret, not the secret itself",
            )

    def make(note: Callable[[str], None]) -> Sinks:
        sinks = []
        if argv is not None:
            hide = (_WEBHOOK_VARIABLE, _SECRET_VARIABLE, *([secret_env] if secret_env else []))
            sinks.append(QueuedSink(CommandHook(argv, note=note, hide=hide), note=note, parallel=2))
        if url is not None:
            sinks.append(QueuedSink(Webhook(url, note=note, secret=secret), note=note))
        return Sinks(sinks)

    return make


# --- where frames come from


def _live(plan: ClusterPlan, file: Path, interval_s: float, record: Path | None, wishes: _Wishes) -> int:
    from pdctl.cli.watch_actions import ClusterActions
    from pdctl.hosts.fleet import Fleet
    from pdctl.watch.acting_thread import ActingThread
    from pdctl.watch.book import Watchdog
    from pdctl.watch.poller import Poller
    from pdctl.watch.settings import settings_from_spec
    from pdctl.watch.sources import LiveSource

    settings = replace(settings_from_spec(plan.spec), interval_s=interval_s)
    with ExitStack() as stack:
        notes = stack.enter_context(_notes(wishes.headless))
        fleet = stack.enter_context(Fleet(plan.spec))
        listeners: list[Listener] = []
        if record is not None:
            listeners.append(stack.enter_context(_recording(record, notes)))
        sinks = stack.enter_context(_closing_sinks(wishes.make_sinks(notes)))
        where, pace = "", _Pace(interval_s)
        if wishes.exporter is not None:
            update, where = stack.enter_context(_exporting(wishes.exporter, pace, sinks))
            listeners.append(update)
        listeners.append(sinks)
        poller = Poller(plan, fleet, interval_s=interval_s, diagnose=_diagnose)
        cool_down_s = 0.0 if wishes.acting is None else wishes.acting.cool_down_s
        actions = ClusterActions(plan, file, fleet, read_only=wishes.read_only, cool_down_s=cool_down_s)
        acting = None if wishes.acting is None else ActingThread(wishes.acting, actions.act, note=notes)
        pace.listeners.append(poller.set_interval)
        source = LiveSource(
            poller,
            Watchdog(settings),
            interval_s=interval_s,
            listeners=listeners,
            wanted=wishes.wanted,
            act=acting,
            on_interval=pace,
        )
        stack.callback(source.close)
        # Before the hosts' connections are closed, which a restart that is under way still needs.
        stack.callback(actions.close, notes)
        if acting is not None:
            pace.listeners.append(acting.set_interval)
            stack.callback(acting.close)
        if wishes.headless:
            hosts = len(plan.hosts)
            click.echo(
                f"watching {plan.spec.cluster}: {len(plan.instances)} instances on {hosts} host{'s'[: hosts != 1]}, "
                f"every {interval_s:g} s{where}",
                err=True,
            )
            _print_frames(source, wishes)
            return 0
        return _dashboard(source, wishes, actions, notes)


def _replay(
    path: Path, file: Path | None, from_s: float, to_s: float | None, speed: float | None, wishes: _Wishes
) -> int:
    from pdctl.errors import UsageError
    from pdctl.watch.book import Watchdog
    from pdctl.watch.recording import read_recording
    from pdctl.watch.sources import RecordedSource

    settings = _replay_settings(file)

    def read() -> Iterator[Snapshot]:
        return read_recording(path)

    with ExitStack() as stack:
        notes = stack.enter_context(_notes(wishes.headless))
        sinks = stack.enter_context(_closing_sinks(wishes.make_sinks(notes)))
        try:
            source: RecordedSource = RecordedSource(
                read,
                lambda: Watchdog(settings),
                from_s=from_s,
                to_s=to_s,
                speed=(0.0 if wishes.headless else 1.0) if speed is None else speed,
                stop_at_end=wishes.headless,
                listeners=(sinks,),
                wanted=wishes.wanted,
            )
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
        stack.callback(source.close)
        return _print_frames(source, wishes) if wishes.headless else _dashboard(source, wishes, None, notes)


def _replay_settings(file: Path | None) -> WatchSettings:
    from pdctl.watch.settings import WatchSettings, settings_from_spec

    return WatchSettings() if file is None else settings_from_spec(load_plan(file).spec)


def _once(plan: ClusterPlan, interval_s: float, wishes: _Wishes) -> int:
    from pdctl.hosts.fleet import Fleet
    from pdctl.watch.book import Watchdog
    from pdctl.watch.headless import exit_code, once_json, once_lines
    from pdctl.watch.poller import Poller
    from pdctl.watch.settings import settings_from_spec
    from pdctl.watch.sources import make_frame

    settings = replace(settings_from_spec(plan.spec).for_one_look(), interval_s=interval_s, close_ticks=1)
    watchdog = Watchdog(settings)
    with ExitStack() as stack:
        notes = stack.enter_context(_notes(headless=True))
        fleet = stack.enter_context(Fleet(plan.spec))
        sinks = stack.enter_context(_closing_sinks(wishes.make_sinks(notes)))
        poller = Poller(plan, fleet, interval_s=interval_s, diagnose=_diagnose)
        stack.callback(poller.close)
        # The first poll waits for the hosts to be connected to; the second has rates.
        make_frame(poller.poll(), watchdog, wishes.wanted)
        time.sleep(interval_s)
        frame = make_frame(poller.poll(), watchdog, wishes.wanted)
        sinks(_opened_now(frame))
        if wishes.as_json:
            print_json(once_json(frame))
        else:
            for line in once_lines(frame):
                click.echo(line)
        return exit_code(frame.alerts, frame.snapshot)


def _diagnose(log: str, exit_code: int | None, exit_signal: int | None) -> str:
    """What the log of an instance that has ended says, in words. Passed in: areas do not import each other."""
    from pdctl.lifecycle.diagnose import diagnose

    found = diagnose(log, exit_code, exit_signal)
    return f"{found[0].cause} ({found[0].fix})" if found else ""


def _opened_now(frame: Frame) -> Frame:
    """What a single look found, as events."""
    from pdctl.watch.alerts import AlertEvent

    return replace(frame, events=tuple(AlertEvent("opened", alert) for alert in frame.alerts))


# --- what becomes of them


def _print_frames(source: SnapshotSource, wishes: _Wishes) -> int:
    """Print lines until the source ends. Returns 1 if there was a warning or worse."""
    from pdctl.watch import headless
    from pdctl.watch.acting import action_json, action_words
    from pdctl.watch.tui.source import SourceClosed
    from pdctl.watch.wording import timestamp

    code = 0
    beat_due = time.monotonic() + wishes.heartbeat_s
    while True:
        try:
            frame = source.next()
        except SourceClosed:
            return code
        for event in frame.events:
            code = max(code, headless.exit_code([event.alert]))
            if wishes.as_json:
                click.echo(json.dumps(headless.event_json(event, frame.snapshot)))
            else:
                for line in headless.event_lines(event, frame.snapshot):
                    click.echo(_encodable(line))
        for action in frame.actions:
            if wishes.as_json:
                click.echo(json.dumps(action_json(action, frame.snapshot)))
            else:
                click.echo(_encodable(f"{timestamp(frame.snapshot.unix)} {action_words(action)}"))
        if wishes.heartbeat_s and time.monotonic() >= beat_due - 0.05:
            # Frames come now and then, not at once; late beats are not made up for.
            beat_due = max(beat_due, time.monotonic() - 1.0) + wishes.heartbeat_s
            if wishes.as_json:
                click.echo(json.dumps(headless.heartbeat_json(frame)))
            else:
                click.echo(_encodable(headless.heartbeat_line(frame)))


def _encodable(line: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return line.encode(encoding, "replace").decode(encoding)


def _dashboard(source: SnapshotSource, wishes: _Wishes, actions: Actions | None, notes: _Notes) -> int:
    import asyncio

    from pdctl.cli.main import INTERRUPTED
    from pdctl.watch.tui.app import Dashboard

    app = Dashboard(source, read_only=wishes.read_only, actions=actions, encoding=sys.stdout.encoding)

    def leave(signal_number: int, frame: FrameType | None) -> None:
        # Not an exception in the middle of whatever runs: the application ends itself, and restores the terminal.
        del signal_number, frame
        try:
            asyncio.get_running_loop().call_soon_threadsafe(partial(app.exit, return_code=INTERRUPTED))
        except RuntimeError:
            raise KeyboardInterrupt from None

    # Of a terminal that is closed; it stays ignored under nohup.
    ends = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, leave) for one in ends}
    try:
        app.run()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        # What is still waited for is said while it is waited for.
        notes.release()
    return app.return_code or 0


class _Pace:
    """How often is polled, for all who need to know; it can be changed from the dashboard."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.listeners: list[Callable[[float], None]] = []

    def __call__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        for listener in self.listeners:
            listener(interval_s)


class _Notes:
    """Says on stderr what went wrong beside the watch: at once, or when the dashboard has left the screen.

    Nobody reading stderr any more (``2>&1 | tee``, and Ctrl-C) ends nothing: least of all a restart that is under way.
    """

    def __init__(self, *, at_once: bool) -> None:
        self._lock = threading.Lock()
        self._at_once = at_once
        self._kept: list[str] = []

    def __call__(self, text: str) -> None:
        from pdctl.watch.wording import plain, timestamp

        line = f"{timestamp(time.time())} {plain(text, 4000)}"
        with self._lock:
            if self._at_once:
                self._say(line)
            elif len(self._kept) < _NOTES_LIMIT:
                self._kept.append(line)

    def release(self) -> None:
        """Say what was kept, and from now on everything at once."""
        with self._lock:
            self._at_once = True
            kept, self._kept = self._kept, []
            for line in kept:
                self._say(line)

    @staticmethod
    def _say(line: str) -> None:
        with suppress(OSError, ValueError):
            click.echo(line, err=True)


@contextmanager
def _notes(headless: bool) -> Iterator[_Notes]:
    """Where sinks and actions say what went wrong."""
    notes = _Notes(at_once=headless)
    try:
        yield notes
    finally:
        notes.release()


@contextmanager
def _closing_sinks(sinks: Sinks) -> Iterator[Sinks]:
    try:
        yield sinks
    finally:
        sinks.close(_SINKS_CLOSE_S)


@contextmanager
def _exporting(address: tuple[str, int], pace: _Pace, sinks: Sinks) -> Iterator[tuple[Listener, str]]:
    """Serve metrics. Gives what takes the frames, and words that say where they are served."""
    from pdctl.watch.exporter import ClusterCollector, make_registry
    from pdctl.watch.exporter_server import ExporterServer

    collector = ClusterCollector(sink_counts=sinks.counts)
    began = time.monotonic()

    def healthy() -> bool:
        age_s = collector.age_s
        return (time.monotonic() - began if age_s is None else age_s) < max(10 * pace.interval_s, 30.0)

    host, port = address
    server = ExporterServer(make_registry(collector), host, port, healthy=healthy)
    try:
        shown = f"[{host}]" if ":" in host else host
        yield collector.update, f"; metrics on http://{shown}:{server.port}/metrics"
    finally:
        server.close()


@contextmanager
def _recording(path: Path, note: Callable[[str], None]) -> Iterator[Listener]:
    """Record every frame. A full disk ends the recording, not the watch."""
    from pdctl.errors import PdctlError
    from pdctl.watch.recording import Recorder

    recorder = Recorder(path)
    failed = False

    def write(frame: Frame) -> None:
        nonlocal failed
        if failed:
            return
        try:
            recorder.write(frame.snapshot, frame.events)
        except PdctlError as error:
            failed = True
            note(f"--record: {error.message}; recording has ended, the watch goes on")

    try:
        yield write
    finally:
        try:
            recorder.close()
        except PdctlError as error:
            if not failed:
                note(f"--record: {error.message}")
