#!/usr/bin/env python3
"""The demo behind `make demo`: one prefill, one decode and a router on this machine, without any accelerator.

    .venv/bin/python scripts/demo.py up        # start it, send one request, show the status
    .venv/bin/python scripts/demo.py down      # stop it
    python3 scripts/demo.py assert-stopped     # exit code 1 while it runs (for `make clean`)

It does what a person would do with `pdctl` by hand, and says each command, so that the next step is to type them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".demo"
CLUSTER_FILE = DEMO / "cluster.yaml"
MODEL = DEMO / "model"
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")

# Two instances of about 3 GB, the router, and room for the rest of the machine.
MEMORY_WANTED_BYTES = 7 * 1024**3
UP_TIMEOUT_S = 1200.0
COMMAND_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0
INTERRUPT_GRACE_S = 90.0
PROMPT = "The prefill instance reads the prompt, and the decode instance"


class DemoError(Exception):
    """The demo cannot go on; the message is for the person who ran it."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Endpoint:
    """Where the router answers, and under which name it serves the model."""

    url: str
    model: str


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


def program() -> Path:
    """The pdctl beside this interpreter. Raises DemoError when it is not installed."""
    path = Path(sys.executable).parent / "pdctl"
    if not path.exists():
        raise DemoError(f"{path} is missing; run `make demo`, which installs it")
    return path


def pdctl(*arguments: str, timeout_s: float, check: bool = True) -> int:
    """Run pdctl of this environment with its output on the screen; returns its exit code.

    Raises DemoError when it fails (with `check`) or takes longer than `timeout_s` seconds.
    """
    say(f"\n$ pdctl {shlex.join(arguments)}")
    child = subprocess.Popen([str(program()), *arguments])
    try:
        exit_code = child.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        child.terminate()
        raise DemoError(f"pdctl {arguments[0]} did not end within {timeout_s:.0f} s") from error
    except KeyboardInterrupt:
        # Ctrl-C reached pdctl too, which now tells what it leaves behind; subprocess.run would kill it at once.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(INTERRUPT_GRACE_S)
        raise
    if check and exit_code != 0:
        raise DemoError(f"pdctl {arguments[0]} ended with exit code {exit_code}", exit_code=exit_code)
    return exit_code


def shown(path: Path) -> str:
    """A path as a person in the current folder would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def make_model() -> None:
    """Make the tiny model; nothing happens when it is there."""
    script = ROOT / "scripts" / "make_demo_model.py"
    done = subprocess.run([sys.executable, str(script), str(MODEL)], check=False, timeout=COMMAND_TIMEOUT_S)
    if done.returncode != 0:
        raise DemoError("the demo's model could not be made")


def preset_text() -> str:
    """What `pdctl init` writes for this machine, with the demo's model and Python. Raises DemoError."""
    arguments = ["init", "--preset", "local", "-o", "-"]
    for key, value in {"cluster": "demo", "model": str(MODEL), "python": sys.executable}.items():
        arguments += ["--set", f"{key}={value}"]
    say(f"\n$ pdctl {shlex.join(arguments)} > {shown(CLUSTER_FILE)}")
    try:
        done = subprocess.run(
            [str(program()), *arguments], check=False, timeout=COMMAND_TIMEOUT_S, capture_output=True, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DemoError(f"pdctl init failed: {error}") from error
    if done.returncode != 0:
        raise DemoError(f"pdctl init failed: {done.stderr.strip()}", exit_code=done.returncode)
    return done.stdout


def write_cluster_file() -> None:
    """Write the cluster file from the preset, with this checkout's model and Python; an existing one is kept."""
    if CLUSTER_FILE.exists():
        say(f"cluster file: {shown(CLUSTER_FILE)} (kept; remove it to start from the preset again)")
        return
    DEMO.mkdir(exist_ok=True)
    text = preset_text()
    draft = CLUSTER_FILE.with_suffix(".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(CLUSTER_FILE)


def turn_autogroup_off(path: Path = AUTOGROUP) -> None:
    """Turn the kernel's sched_autogroup off where it is on and this login may.

    NIXL's progress threads never sleep. With autogroup on, one login's busy threads were seen to keep other ready
    processes off the CPU for up to 16 s, and requests hung for no other reason. It helps processes started later only.
    """
    try:
        if path.read_text(encoding="ascii").strip() != "1":
            return
    except OSError:
        return  # this kernel has no such setting
    try:
        path.write_text("0\n", encoding="ascii")
    except OSError:
        say(
            "note: kernel.sched_autogroup_enabled is 1; with few cores requests may then hang for seconds.\n"
            "      To turn it off (before the demo starts): sudo sysctl kernel.sched_autogroup_enabled=0"
        )
        return
    say(
        "turned kernel.sched_autogroup_enabled off until the next boot: with it on, NIXL's busy threads can keep\n"
        "other processes waiting for seconds (back on: sysctl kernel.sched_autogroup_enabled=1)"
    )


def warn_of_little_memory(path: Path = Path("/proc/meminfo")) -> None:
    """Say so when the machine has less free memory than two instances take."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return
    if available < MEMORY_WANTED_BYTES:
        say(
            f"note: {available / 1024**3:.1f} GiB of memory are available; the demo takes about"
            f" {MEMORY_WANTED_BYTES / 1024**3:.0f} GiB"
        )


def endpoint(file: Path = CLUSTER_FILE) -> Endpoint:
    """Where the cluster of this file answers, and the name under which it serves its model."""
    from pdctl.spec import load

    spec = load(file, os.environ)
    options = {name.lstrip("-").replace("_", "-"): value for name, value in spec.decode.vllm_args.items()}
    served = options.get("served-model-name", spec.model)
    if isinstance(served, (list, tuple)):
        served = served[0]
    return Endpoint(url=f"http://{spec.router.address or '127.0.0.1'}:{spec.router.port}", model=str(served))


def completion_body(model: str) -> dict[str, Any]:
    """The request that the demo sends. `ignore_eos`: a random model may end at once, which would show nothing."""
    return {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def complete(target: Endpoint, timeout_s: float = REQUEST_TIMEOUT_S) -> str:
    """Send one completion and return its text. Raises DemoError."""
    body = json.dumps(completion_body(target.model))
    url = f"{target.url}/v1/completions"
    say(f"\n$ curl {url} -H 'Content-Type: application/json' \\\n    -d {shlex.quote(body)}")
    request = urllib.request.Request(url, data=body.encode(), headers={"Content-Type": "application/json"})
    # A proxy of the environment must not get a request for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            answer = json.load(response)
        text = answer["choices"][0]["text"]
        tokens = (answer.get("usage") or {}).get("completion_tokens")
    except urllib.error.HTTPError as error:
        told = error.read(2000).decode(errors="replace")
        raise DemoError(f"{url} answered {error.code}: {told}") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DemoError(f"no usable answer from {url} within {timeout_s:.0f} s: {error!r}") from error
    say(f"{text!r}  ({tokens} tokens)")
    return str(text)


def up() -> None:
    """Start the demo, send a request, show the status, and say what to try next."""
    make_model()
    turn_autogroup_off()
    warn_of_little_memory()
    write_cluster_file()
    file = shown(CLUSTER_FILE)
    try:
        pdctl("up", "-f", file, timeout_s=UP_TIMEOUT_S)
        complete(endpoint())
    except DemoError as error:
        command = shown(program())
        raise DemoError(
            f"{error}\n  look: {command} status -f {file}\n        {command} logs prefill-0 --file {file}\n"
            "  stop: make demo-down",
            exit_code=error.exit_code,
        ) from error
    say(
        "(The model has random weights, so the text is noise. What counts: decode wrote it from the KV cache that\n"
        " prefill pushed to it.)"
    )
    pdctl("status", "-f", file, timeout_s=COMMAND_TIMEOUT_S, check=False)
    command = shown(program())
    say(
        f"""
It runs. What to try next:
  {command} logs decode-0 --file {file}
  {command} up -f {file}         again: changes nothing
  {command} restart prefill-0 -f {file}
  make demo-down"""
    )


def down() -> None:
    """Stop the demo; fine when it does not run."""
    if not CLUSTER_FILE.exists():
        say(f"nothing to stop: there is no {shown(CLUSTER_FILE)}")
        return
    pdctl("down", "-f", shown(CLUSTER_FILE), timeout_s=COMMAND_TIMEOUT_S)


def belongs_to_demo(argv: Sequence[str], demo: Path, venv: Path) -> bool:
    """Whether a process with this argv is part of the demo: it serves the demo's model, or is a router of `venv`."""
    if not argv or "python" not in Path(argv[0]).name:
        return False
    serves = any(word == str(demo / "model") or word.startswith(f"{demo}{os.sep}") for word in argv[1:])
    router = argv[0].startswith(f"{venv}{os.sep}") and any("vllm" in word for word in argv[1:])
    return serves or router


def running(demo: Path, venv: Path, proc: Path = Path("/proc")) -> list[int]:
    """The process ids of the demo on this machine."""
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended, or belongs to another login
        if belongs_to_demo([word for word in argv if word], demo, venv):
            found.append(int(entry.name))
    return sorted(found)


def assert_stopped() -> None:
    """Raise DemoError while the demo runs."""
    venv = Path(os.path.abspath(ROOT / os.path.expanduser(os.environ.get("PDCTL_VENV") or ".venv")))
    found = running(DEMO, venv)
    if found:
        listed = ", ".join(str(number) for number in found[:8])
        raise DemoError(f"the demo is running (process {listed}); stop it first: make demo-down")


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    actions = {"up": up, "down": down, "assert-stopped": assert_stopped}
    parser.add_argument("action", choices=sorted(actions))
    action = actions[parser.parse_args(list(arguments)).action]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        action()
    except DemoError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("demo: interrupted; `make demo` goes on from here, `make demo-down` stops it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
