"""A log as lines that can be judged and shown: no escapes, no progress bars, bounded length, nothing secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Longer lines are cut. The longest useful ones (a configuration, an explanation of NCCL) fit.
MAX_LINE = 4096
_SHOWN = 300

_LINE_END = re.compile(r"[\r\n]+")
_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]{0,64}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

# "(EngineCore_DP0 pid=68) ERROR 02-06 16:34:06 [core.py:97] text"; a process of a process repeats the first part.
_VLLM = re.compile(
    r"^(?:\([\w.:-]{1,60}(?: [\w=.-]{1,40}){0,4}\) ?){0,4}"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]{1,160}\] ?)?)?"
)
# "2026-11-29 16:31:49 NIXL INFO    _api.py:405 text"
_NIXL = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d NIXL (?P<level>[A-Z]{4,8}) {1,5}\S{1,60} ")
# "I1120 09:21:02.110034    1410 libfabric_topology.cpp:135] text" (the C++ side of NIXL)
_GLOG = re.compile(r"^(?P<letter>[IWEF])\d{4} \d\d:\d\d:\d\d\.\d{1,9} {1,12}\d{1,9} [\w./-]{1,80}:\d{1,6}\] ")
# "2026-11-29 16:35:08  INFO vllm_router_rs::server: src/server.rs:1025: text"
_ROUTER = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d {1,4}(?P<level>TRACE|DEBUG|INFO|WARN|ERROR) ")
_UVICORN = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):\s")
_PYTHON_WARNING = re.compile(r"^\S{1,400}:\d{1,7}: \w{0,60}Warning: ")
_LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}

_BAR = re.compile(
    r"^(?P<what>.{0,120}?): {0,4}\d{1,3}%[^/\[]{0,120}?\d{1,9}(?:\.\d+)?[kMGT]?/\d{1,9}(?:\.\d+)?[kMGT]? \["
)
_NOISE = re.compile(
    r"^(?:"
    r"[ \t^~]*$"  # the carets of a traceback
    r"| {10,}\[(?:--|model_tag)"  # the usage text of argparse
    r"|usage: \S+ \[-h\]"
    r"|nanobind: | - (?:leaked|\.\.\. skipped)"  # leak reports when an interpreter ends
    r"|See https://nanobind\.readthedocs\.io"
    r"|  warnings\.warn\("
    r"|\S{1,400}resource_tracker\.py:\d+: UserWarning"
    r"|(?:\([^)]{1,60}\) )?INFO: {1,8}\S{1,80} - \"GET /(?:health|metrics|ping|version)\b"
    r"|.{0,120}\[launcher\.py:\d+\] (?:Route: |Available routes)"
    r")"
)


@dataclass(frozen=True)
class LogLine:
    """One line of a log.

    Attributes:
        text: the line without terminal escapes, cut to a bounded length.
        body: the text without the process, level, time and source that loggers put before it.
        level: ``DEBUG``, ``INFO``, ``WARNING``, ``ERROR``, ``CRITICAL``, or empty for a line of no logger, such as a
            line of a bare traceback.
    """

    text: str
    body: str
    level: str

    @property
    def harmless(self) -> bool:
        """True for what a logger wrote below the level of an error."""
        return self.level in ("TRACE", "DEBUG", "INFO", "WARNING")


def strip_ansi(text: str) -> str:
    """Return ``text`` without terminal escape sequences (colours, titles, cursor movements)."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def read_lines(log_text: str) -> Iterator[LogLine]:
    """Yield the lines of a log that are not blank."""
    for raw in _LINE_END.split(log_text):
        text = _CONTROL.sub("", strip_ansi(raw[: MAX_LINE + 1]))
        if not text or text.isspace():
            continue
        yield _parse(text[:MAX_LINE].rstrip())


def _parse(text: str) -> LogLine:
    found = _VLLM.match(text)
    level, rest = (found["level"] or "", text[found.end() :]) if found else ("", text)
    if not level:
        for pattern in (_NIXL, _GLOG, _ROUTER, _UVICORN, _PYTHON_WARNING):
            if other := pattern.match(rest):
                groups = other.groupdict()
                level = groups.get("level") or _LETTERS.get(groups.get("letter") or "", "WARNING")
                level = "WARNING" if level == "WARN" else level
                rest = rest[other.end() :]
                break
    return LogLine(text, rest.strip(), level)


def last_lines(log_text: str, count: int) -> list[str]:
    """Return the last ``count`` lines that tell something: redacted, cut, of a progress bar only its last position."""
    lines: list[str] = []
    bar = ""
    for line in read_lines(log_text):
        if _NOISE.match(line.text):
            continue
        found = _BAR.match(line.text)
        what = found["what"] if found else ""
        if what and what == bar and lines:
            lines[-1] = line.text
        else:
            lines.append(line.text)
        bar = what
    return [shorten(redact(text)) for text in (lines[-count:] if count > 0 else [])]


def shorten(text: str, limit: int = _SHOWN) -> str:
    """Cut ``text`` to ``limit`` characters, keeping more of its beginning than of its end."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail - 3].rstrip()} ... {text[-tail + 2 :].lstrip()}"


_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:[^-]|-(?!-)){0,20000}(?:-----END [A-Z ]{0,40}-----)?"),
        "***",
    ),
    # user:password@host, or token@host, in an address
    (re.compile(r"(?<=://)[^\s/@'\"]{1,300}@"), "***@"),
    (re.compile(r"\bhf_[A-Za-z0-9]{6,}"), "hf_***"),
    (re.compile(r"(?i)\b(Bearer|Basic) {1,4}[A-Za-z0-9._~+/=-]{6,}"), r"\1 ***"),
    (re.compile(r"\b(AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}"), r"\1***"),
    (re.compile(r"(?i)\b(X-Amz-(?:Signature|Credential|Security-Token))=[^&\s'\"]{1,4000}"), r"\1=***"),
    (re.compile(r"\b(?:ghp|gho|ghs|ghu|github_pat|glpat|xox[abp])[_-][A-Za-z0-9_-]{16,}"), "***"),
    (re.compile(r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}"), "sk-***"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.?[A-Za-z0-9_-]*"), "***"),
    # NAME=value and 'name': 'value'. "max_tokens", "eos_token" and the like are no secrets.
    (
        re.compile(
            r"(?i)(api[_-]?key|secret(?:[_-]?(?:access[_-]?)?key)?|password|passwd|access[_-]?key(?:[_-]?id)?"
            r"|(?:auth|access|session|security|hf|hub|refresh|bearer|api)[_-]?token)"
            r"(['\"]?\s{0,3}(?:=|:|=>)\s{0,3}[\[({'\"]{0,3})(?!None\b|null\b|\*)[^\s,;'\"\])}&]{3,}"
        ),
        r"\1\2***",
    ),
)


def redact(text: str) -> str:
    """Mask what looks like a secret: tokens, keys, passwords in addresses, ``Authorization`` values."""
    for pattern, masked in _SECRETS:
        text = pattern.sub(masked, text)
    return text
