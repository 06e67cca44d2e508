"""Drive a real cluster through the ``pdctl`` command line, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNTIME_PYTHON = os.environ.get("PDCTL_RUNTIME_PYTHON", sys.executable)
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Run:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Cluster:
    """One cluster file, and the command line on it."""

    file: Path
    env: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "pdctl", *words]

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "connector")])
        return {**os.environ, "PYTHONPATH": path, "PDCTL_FILE": str(self.file), **self.env}

    def pdctl(self, *words: str, timeout: float = 240) -> Run:
        done = subprocess.run(
            self.command(*words), env=self.environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
        print(f"$ pdctl {' '.join(words)}\n{done.stdout}{done.stderr}")
        return Run(done.returncode, done.stdout, done.stderr)


def post(url: str, body: dict[str, Any], *, timeout: float = 120, headers: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        # It holds the connection; left to the garbage collector it would warn in the middle of another test.
        error.close()
        raise


def complete(base: str, prompt: str, *, model: str, max_tokens: int = 12, **more: Any) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
    return str(post(f"{base}/v1/completions", body)["choices"][0]["text"])


def complete_all(base: str, prompts: list[str], *, model: str, at_once: int) -> list[str]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: complete(base, prompt, model=model), prompts))


def metric(base: str, name: str, **labels: str) -> float:
    """Sum of a metric over its samples that carry the labels; 0 if there is none."""
    from pdctl.prometheus_text import read_samples, total

    with urllib.request.urlopen(f"{base}/metrics", timeout=10) as response:
        return total(read_samples(response.read().decode(), [name]), name, **labels) or 0.0


def marked_processes(cluster: str) -> list[str]:
    """Command lines of processes on this machine (all its test hosts included) that belong to a cluster."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            if (
                f"PDCTL_MARKER={cluster}/".encode() in environ
                and b"Z" not in (entry / "stat").read_bytes().split()[2:3]
            ):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
