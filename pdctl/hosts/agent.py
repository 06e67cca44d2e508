"""Calls of the node agent: sends its source and a request to a host in one command, and reads the answer.

The agent is never installed. What it is sent and answers is described in ``pdctl/node/agent.py``. The other scripts of
``pdctl/node`` are called the same way.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdctl.errors import NodeError
from pdctl.hosts.base import CommandResult, Host

REPLY_PREFIX = b"PDCTL-AGENT-1 "
OLDEST_PYTHON = (3, 8)

BOOTSTRAP = (
    'import sys;b=sys.stdin.buffer;s=b.read(int(b.readline()));g={"__name__":"__pdctl_agent__","SOURCE":s};'
    'exec(compile(s,"pdctl-agent","exec"),g);g["main"](b.read())'
)

_TOO_OLD = 93
_NO_PYTHON = 94
# Before anything is read from standard input, so that another Python can be tried.
_GUARD = f"import sys;sys.version_info<{OLDEST_PYTHON}and sys.exit({_TOO_OLD});"

# The system's own Python first: the first `python3` of a PATH may be a wrapper (pyenv, conda) that takes longer to
# start than the agent takes to answer. A program that is missing, cannot be run (126, 127) or does not know the
# options (2, of Python 2) is passed over.
_SYSTEM_PYTHONS = ("/usr/bin/python3", "python3")

# Words of the node's own: @HOME@ and ~ are known only there. Everything else comes as arguments, so nothing is quoted.
_SCRIPT = (
    "code=$1; shift; "
    "for python; do case $python in "
    '"~/"*) python=$HOME/${python#"~/"};; "@HOME@"*) python=$HOME${python#"@HOME@"};; esac; '
    'command -v "$python" >/dev/null 2>&1 || continue; '
    '"$python" -I -S -c "$code"; status=$?; '
    f'case $status in 2|{_TOO_OLD}|126|127) ;; *) exit "$status";; esac; '
    f"done; exit {_NO_PYTHON}"
)


def call(
    host: Host,
    command: str,
    request: Mapping[str, Any],
    *,
    timeout_s: float,
    pythons: Sequence[str] = ("python3",),
    script: str = "agent",
) -> dict[str, Any]:
    """Run one command of the node agent on a host. Nothing of the request is in any argv.

    Args:
        host: where.
        command: name of the agent's command.
        request: its fields, without ``command``.
        timeout_s: how long it may take on the host.
        pythons: interpreters to try after the system's own, in order: a path, a name, or a path that starts with
            ``~/`` or ``@HOME@``.
        script: which script of ``pdctl/node`` to send instead of the agent.

    Returns:
        the ``result`` of the answer.

    Raises:
        HostError: the host cannot be reached, or did not answer in time.
        NodeError: the agent answered with an error; or code ``no-python``, or ``bad-reply`` if it did not answer.
    """
    source = script_source(script)
    payload = json.dumps({**request, "command": command}).encode()
    result = host.run(
        python_argv(BOOTSTRAP, pythons),
        stdin=b"%d\n%b%b" % (len(source), source, payload),
        timeout_s=timeout_s,
    )
    line = find_reply(result.stdout)
    if line is None:
        raise no_reply(host.name, result, pythons)
    try:
        reply = json.loads(line)
        if reply["ok"]:
            answer = reply["result"]
            if isinstance(answer, dict):
                return answer
            raise TypeError("its result is no mapping")
        error = reply["error"]
        failure = NodeError(host.name, str(error["code"]), str(error["message"]), hint=str(error.get("hint") or ""))
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise NodeError(
            host.name,
            "bad-reply",
            f"the node agent's answer makes no sense ({problem!r}): {_first_lines(line)}",
            hint="something on the host may have cut or changed its output: look at its login shell's start-up files",
        ) from None
    raise failure


def python_argv(code: str, pythons: Sequence[str]) -> list[str]:
    """A command that runs Python code with the first interpreter of a host that is recent enough.

    Args:
        code: one line, for ``-c``; run with ``-I -S``.
        pythons: interpreters to try after the system's own, see :func:`call`.
    """
    return ["sh", "-c", _SCRIPT, "pdctl", _GUARD + code, *_candidates(pythons)]


def _candidates(pythons: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*_SYSTEM_PYTHONS, *pythons)))


def agent_source() -> bytes:
    """Source of the agent, from the installed package."""
    return script_source("agent")


@functools.cache
def script_source(script: str) -> bytes:
    """Source of a script of ``pdctl/node``, from the installed package."""
    return importlib.resources.files("pdctl.node").joinpath(f"{script}.py").read_bytes()


def find_reply(stdout: bytes) -> bytes | None:
    """The JSON of the answer in what a command wrote, or None. What login shells print before it is skipped."""
    lines = stdout.split(b"\n")
    for line in lines:
        if line.startswith(REPLY_PREFIX):
            return line[len(REPLY_PREFIX) :].strip()
    for line in lines:
        # Noise that did not end its line. (JSON holds no line breaks, so this is not text inside an answer.)
        _, found, rest = line.partition(REPLY_PREFIX)
        if found:
            return rest.strip()
    return None


def no_reply(host: str, result: CommandResult, pythons: Sequence[str], *, what: str = "the node agent") -> NodeError:
    """Say why a command made by :func:`python_argv` ended without an answer.

    Args:
        host: its name.
        result: how it ended.
        pythons: as given to :func:`python_argv`.
        what: the script, in words.
    """
    said = "; ".join(
        f"{name}: {text}"
        for name, text in (("stderr", _first_lines(result.stderr)), ("stdout", _first_lines(result.stdout)))
        if text
    )
    if result.exit_code == _NO_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return NodeError(
            host,
            "no-python",
            f"no Python {wanted} or later was found; tried: {', '.join(_candidates(pythons))}"
            + (f" ({said})" if said else ""),
            hint="install python3 on the host, or name one with `python:` in the cluster file",
        )
    end = "a signal ended it" if result.exit_code < 0 else f"exit status {result.exit_code}"
    if result.exit_code == 127:
        hint = "the login shell there does not find `sh`: is it a real shell, with /bin in its PATH?"
    elif result.exit_code < 0 or result.exit_code == 137:
        hint = "is the host out of memory? Its kernel log (`dmesg`) says so"
    else:
        hint = "try by hand: `ssh HOST python3 -c pass`; the login shell there may be disabled, or ask something"
    return NodeError(host, "bad-reply", f"{what} gave no answer ({end}){f': {said}' if said else ''}", hint=hint)


def _first_lines(output: bytes, lines: int = 5, width: int = 300) -> str:
    text = output[:8192].decode(errors="replace")
    kept = [line.strip()[:width] for line in text.splitlines() if line.strip()][:lines]
    return " | ".join("".join(letter if letter.isprintable() else "?" for letter in line) for line in kept)
