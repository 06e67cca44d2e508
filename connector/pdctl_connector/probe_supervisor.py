"""The process that watches over one side of the probe; see `probe`. Loads nothing heavy."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .probe_evidence import Log, silence

PREFIX = "PDCTL-PROBE-1 "
GRACE_S = 4.0
"""How long after its lifetime the kernel ends this process, whatever it does."""

_CHILD = (
    'import sys;b=sys.stdin.buffer;s=b.read(int(b.readline()));g={"__name__":"__pdctl_script__","SOURCE":s};'
    'exec(compile(s,"pdctl-probe","exec"),g);g["child"](b)'
)


def say(event: dict[str, Any]) -> None:
    """Tell the operator."""
    sys.stdout.write(PREFIX + json.dumps(event) + "\n")
    sys.stdout.flush()


def expanded(text: str) -> str:
    """Text of the plan with its placeholders filled in (`pdctl/plan_args.py`)."""
    return text.replace("@HOME@", str(Path.home())).replace("@START_ID@", "probe")


def environment(variables: dict[str, str]) -> dict[str, str]:
    """The child's variables: of this login, of the instance, and those that make NIXL and UCX say what they do."""
    result = {**os.environ, **{name: expanded(value) for name, value in variables.items()}}
    result.pop("UCX_LOG_FILE", None)
    return {**result, "UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y", "NIXL_LOG_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"}


def end_in_words(code: int, stage: str, limit_s: float, message: dict[str, Any]) -> str:
    """Why the child is gone, for people. NIXL connects inside of native code, and waits there for a silent peer."""
    if code == -signal.SIGALRM:
        if stage == "handshake":
            return silence(message["peer"], message["backends"], limit_s)
        return f"it hung in the step `{stage}` and was killed after {limit_s:g} s"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"its process was ended by {name} in the step `{stage}`"
    return f"its process ended with exit status {code} in the step `{stage}`"


def main(stream: BinaryIO, source: bytes) -> NoReturn:
    """Supervise one side of the probe.

    Args:
        stream: messages of the operator.
        source: the script that the child is to run.
    """
    message = json.loads(stream.readline())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, message["lifetime_s"] + GRACE_S)
    python = expanded(message["python"])
    program = shutil.which(python)
    if program is None:
        where = "does not exist on this host, or cannot be run by this login" if "/" in python else "is not in the PATH"
        say({"event": "failed", "stage": "start", "error": f"{python} {where}"})
        say({"event": "ended", "code": 127, "log": [], "lanes": []})
        os._exit(1)
    process = subprocess.Popen(
        [program, "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(message["env"]),
    )
    log = Log()
    logging = threading.Thread(target=_keep_log, args=(process, log), daemon=True)
    logging.start()
    threading.Thread(target=_pass_on, args=(stream, process, source, message), daemon=True).start()
    stage, limit_s, failed = "start", message["lifetime_s"], False
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "stage":
            stage, limit_s = event["stage"], event["limit_s"]
        failed = failed or event["event"] == "failed"
        say({**event, "lanes": log.lanes})
    code = process.wait()
    logging.join(1.0)
    if code != 0 and not failed:
        say({"event": "failed", "stage": stage, "error": end_in_words(code, stage, limit_s, message)})
    say({"event": "ended", "code": code, "log": log.tail(), "lanes": log.lanes})
    os._exit(0)


def _keep_log(process: subprocess.Popen[bytes], log: Log) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        log.feed(line.decode(errors="replace"))


def _pass_on(stream: BinaryIO, process: subprocess.Popen[bytes], source: bytes, message: dict[str, Any]) -> None:
    """Hand the child its source and all messages; kill it when they end."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(b"%d\n%b" % (len(source), source))
        process.stdin.write(json.dumps({**message, "supervisor": os.getpid()}).encode() + b"\n")
        process.stdin.flush()
        for line in iter(stream.readline, b""):
            process.stdin.write(line)
            process.stdin.flush()
    # Either nobody is there any more who wants to know, or the child is gone already.
    process.kill()
