"""From the log of an instance and the way it ended to the cause, in words that help."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdctl.lifecycle.causes import CAUSES, CONTEXT, Cause, Sign, Weight, fill, names
from pdctl.lifecycle.log_lines import LogLine, last_lines, read_lines, redact, shorten

__all__ = ["Diagnosis", "diagnose", "last_lines", "redact"]

_MAX_EVIDENCE = 4
_MAX_VALUE = 240

# Lines of a sample that say where it is from.
_SAMPLE_NOTE = re.compile(r"\A# (?:recorded|composed)\b[^\r\n]{0,400}[\r\n]{1,2}")

# What vLLM says of one of its processes: "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)",
# "Process ApiServer_0 (PID: 7) died with exit code -9", "Failed core proc(s): {'EngineCore_DP0': -4}".
_DIED = (
    (
        "died",
        re.compile(r"\b(?P<process>[\w.-]{1,60})(?: \(PID: \d+\))? died .{0,40}exit code:? (?P<code>-?\d{1,3})\b"),
    ),
    ("Failed core proc", re.compile(r"Failed core proc\(s\): \{'(?P<process>[\w.-]{1,60})': (?P<code>-\d{1,3})")),
)

_ENGINE_DIED = re.compile(
    r"EngineCore failed to start|EngineCore encountered a fatal error|EngineCore encountered an issue"
    r"|WorkerProc failed to start|WorkerProc hit an exception|Engine core initialization failed|EngineDeadError"
    r"|died unexpectedly|Engine process failed to start"
)
# Where the traceback of the process that really failed begins.
_ROOT_BEGINS = re.compile(
    r"WorkerProc failed to start|WorkerProc hit an exception|EngineCore failed to start|fatal error"
)
_SHUTDOWN = "[shutdown] API server: shutdown triggered"
# The engine says so, whether or not the worker could write a traceback of its own. At run time the exit code is often
# not known yet when vLLM reports it ("exit code: None").
_WORKER_GONE = re.compile(r"WorkerProc initialization failed|Worker proc (?P<process>[\w.-]{1,60}) died unexpectedly")
# Errors that only repeat that something else failed.
_ECHO = re.compile(
    r"Engine core initialization failed|[Ss]ee (?:the )?(?:stack trace|root cause)|WorkerProc initialization failed"
    r"|EngineDeadError|Engine process failed to start|Frontend process failed"
    r"|Worker failed with error|Executor failed\."
    r"|^(?:SystemExit|KeyboardInterrupt|asyncio\.exceptions\.CancelledError|CancelledError)\b"
)
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Za-z_]\w{0,60}(?:Error|Exception|Exit|Again|Timeout|UnsupportedVllm)(?:: .*)?$"
)
# pydantic ends its messages with the type and the whole input.
_PYDANTIC_INPUT = re.compile(r" ?\[type=\w{1,60}, input_")
_CHAIN = ("The above exception was the direct cause", "During handling of the above exception")


@dataclass(frozen=True)
class Diagnosis:
    """A cause found.

    Attributes:
        id: stable short word; ``docs/failures.md`` explains each.
        cause: one sentence: what happened.
        fix: what to do about it.
        evidence: the lines of the log that show it (redacted, cut); empty when the exit alone shows it.
    """

    id: str
    cause: str
    fix: str
    evidence: list[str] = field(default_factory=list)


@dataclass
class _Found:
    """What is known of one cause while the log is read."""

    cause: Cause
    first_line: int
    values: dict[str, str] = field(default_factory=dict)
    evidence: list[str] = field(default_factory=list)
    bodies: set[str] = field(default_factory=set)

    def add(self, line: LogLine, values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value and name not in self.values:
                self.values[name] = _PYDANTIC_INPUT.split(value, maxsplit=1)[0].strip()[:_MAX_VALUE]
        # The same error of several ranks, or printed once more by the process above, is one piece of evidence.
        echo = line.body in self.bodies or (self.evidence and _ECHO.search(line.body))
        if not echo and len(self.evidence) < _MAX_EVIDENCE:
            self.evidence.append(shorten(redact(line.text)))
        self.bodies.add(line.body)


def diagnose(log_text: str, exit_code: int | None, exit_signal: int | None) -> list[Diagnosis]:
    """Return the causes that the log and the exit show, most likely first.

    Args:
        log_text: the log, or its end.
        exit_code: exit code of the instance, or None if it runs or was ended by a signal.
        exit_signal: number of the signal that ended the instance, or None.

    Returns:
        an empty list when nothing is wrong, or nothing is known.
    """
    lines = list(read_lines(_SAMPLE_NOTE.sub("", log_text, count=1)))
    found: dict[str, _Found] = {}
    context: dict[str, str] = {}
    for number, line in enumerate(lines):
        _read_context(line, context)
        _read_signs(number, lines, found)
        _read_deaths(number, line, found)
    _read_exit(len(lines), exit_code, exit_signal, found)
    if not any(item.cause.weight is Weight.FATAL for item in found.values()):
        _read_exceptions(lines, exit_code, found)
    kept = [item for item in found.values() if not any(other in found for other in item.cause.unless_ids)]
    kept.sort(key=lambda item: (item.cause.weight, item.first_line))
    return [_explain(item, context) for item in kept]


_SIGNS: tuple[tuple[Cause, Sign], ...] = tuple((cause, sign) for cause in CAUSES for sign in cause.signs)
_LOUD_SIGNS = tuple((cause, sign) for cause, sign in _SIGNS if sign.any_level)
_BY_SIGNAL = {number: cause for cause in CAUSES for number in cause.signals}
_BY_EXIT_CODE = {code: cause for cause in CAUSES for code in cause.exit_codes}
_BY_ID = {cause.id: cause for cause in CAUSES}


def _read_context(line: LogLine, context: dict[str, str]) -> None:
    for name, needle, pattern in CONTEXT:
        if needle in line.body and (match := pattern.search(line.body)):
            context[name] = match[1]


def _read_signs(number: int, lines: Sequence[LogLine], found: dict[str, _Found]) -> None:
    line = lines[number]
    if line.body.startswith("raise "):
        return  # a line of source code in a traceback; the error itself follows
    for cause, sign in _LOUD_SIGNS if line.harmless else _SIGNS:
        if sign.needle not in line.body:
            continue
        text = " ".join(part.body for part in lines[number : number + 1 + sign.follow])
        match = sign.pattern.search(text)
        if match is None or (sign.unless is not None and sign.unless.search(text)):
            continue
        found.setdefault(cause.id, _Found(cause, number)).add(line, match.groupdict())


def _read_deaths(number: int, line: LogLine, found: dict[str, _Found]) -> None:
    for needle, pattern in _DIED:
        if needle not in line.body or line.harmless or not (match := pattern.search(line.body)):
            continue
        code = int(match["code"])
        cause = _BY_SIGNAL.get(-code if code < 0 else code - 128)
        # vLLM ends its own processes with SIGTERM (and SIGKILL, which it does not report) when another one failed.
        if cause is None or cause.id == "terminated":
            continue
        item = found.setdefault(cause.id, _Found(cause, number))
        item.add(line, {"process": match["process"], "signal": _signal_name(-code if code < 0 else code - 128)})


def _read_exit(number: int, exit_code: int | None, exit_signal: int | None, found: dict[str, _Found]) -> None:
    """Add what the exit alone shows. It comes last: an earlier error in the log explains more."""
    if exit_signal is None and exit_code is not None and exit_code > 128:
        exit_signal = exit_code - 128  # as a shell reports it
    cause = _BY_SIGNAL.get(exit_signal) if exit_signal is not None else _BY_EXIT_CODE.get(exit_code or 0)
    if cause is None:
        return
    item = found.setdefault(cause.id, _Found(cause, number))
    if exit_signal is not None:
        item.values.setdefault("signal", _signal_name(exit_signal))


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_exceptions(lines: Sequence[LogLine], exit_code: int | None, found: dict[str, _Found]) -> None:
    """Add the general cause: the exception which came first, not its echoes."""
    died = _engine_death(lines)
    if died is None and exit_code in (None, 0):
        return  # a traceback in a process that lives on, or ended well, is not why it ended
    root = _root_exception(lines, died)
    number = died if root is None else root
    if number is None or any(lines[number].body in item.bodies for item in found.values()):
        return
    if died is None:
        cause = _BY_ID["python-error"]
    elif root is None and any(_WORKER_GONE.search(line.body) for line in lines):
        cause = _BY_ID["worker-vanished"]
    else:
        cause = _BY_ID["engine-died"]
    item = _Found(cause, number)
    gone = _WORKER_GONE.search(lines[number].body)
    item.add(
        lines[number],
        {
            "error": "" if root is None else redact(_whole_message(lines, root)),
            "process": gone["process"] if gone else "",
        },
    )
    found[cause.id] = item


def _engine_death(lines: Sequence[LogLine]) -> int | None:
    for number, line in enumerate(lines):
        if _SHUTDOWN in line.body:
            return None  # requests that are cut off by a stop report a dead engine, too
        if not line.harmless and _ENGINE_DIED.search(line.body):
            return number
    return None


def _whole_message(lines: Sequence[LogLine], number: int) -> str:
    text = lines[number].body
    if text.endswith(":") or "validation error" in text:
        # pydantic, and some of vLLM's own texts, go on in the next lines
        return " ".join([text, *(line.body for line in lines[number + 1 : number + 3])])
    return text


def _root_exception(lines: Sequence[LogLine], died: int | None) -> int | None:
    exceptions = [
        number
        for number, line in enumerate(lines)
        if not line.harmless and _EXCEPTION.match(line.body) and not _ECHO.search(line.body)
    ]
    if not exceptions:
        return None
    if died is None:
        return _first_of_chain(lines, exceptions)
    begin = next((n for n, line in enumerate(lines) if not line.harmless and _ROOT_BEGINS.search(line.body)), died)
    return next((number for number in exceptions if number >= begin), exceptions[-1])


def _first_of_chain(lines: Sequence[LogLine], exceptions: Sequence[int]) -> int:
    """Return the last exception, or the one that it was raised for (a chain of any length)."""
    chosen = exceptions[-1]
    for earlier in reversed(exceptions[:-1]):
        between = lines[earlier + 1 : chosen]
        if not any(line.body.startswith(_CHAIN) for line in between[:8]):
            break
        chosen = earlier
    return chosen


def _explain(item: _Found, context: Mapping[str, str]) -> Diagnosis:
    values = {**context, **item.values}
    if "port" not in values and "configured_port" in values:
        values["port"] = values["configured_port"]
    known = {name: redact(value) for name, value in values.items()}
    cause = next((text for text in item.cause.texts if names(text) <= known.keys()), item.cause.texts[-1])
    return Diagnosis(item.cause.id, fill(cause, known), fill(item.cause.fix, known), item.evidence)
