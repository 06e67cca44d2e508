"""What the probe needs of the host it runs on: memory, limits, a life bound to another process, the baseline's file."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import re
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Words = np.ndarray[Any, np.dtype[np.uint64]]

from .probe_content import FILL


class Memory:
    """Memory of this host or of its first visible GPU, page aligned.

    Args:
        device: whether it is to be the GPU's.
        size: in bytes.
    """

    def __init__(self, *, device: bool, size: int) -> None:
        self.size = size
        self.kind = "cuda" if device else "host"
        self._torch = importlib.import_module("torch") if device else None
        if self._torch is not None:
            self._tensor = self._torch.empty(size, dtype=self._torch.uint8, device="cuda:0")
            self.address = int(self._tensor.data_ptr())
        else:
            import numpy as np

            self._map = mmap.mmap(-1, size)
            self._bytes = np.frombuffer(self._map, dtype=np.uint8)
            self.address = int(self._bytes.ctypes.data)

    @property
    def nixl_kind(self) -> str:
        """NIXL's name for this kind."""
        return "VRAM" if self.kind == "cuda" else "DRAM"

    def put(self, offset: int, words: Words) -> None:
        """Copy content into it."""
        import numpy as np

        content = np.ascontiguousarray(words).view(np.uint8).reshape(-1)
        if self._torch is None:
            self._bytes[offset : offset + len(content)] = content
        else:
            self._tensor[offset : offset + len(content)].copy_(self._torch.from_numpy(content))
            self._torch.cuda.synchronize()

    def get(self, offset: int, size: int) -> Words:
        """Look at content of it."""
        import numpy as np

        if self._torch is None:
            return self._bytes[offset : offset + size].view(np.uint64)
        return np.asarray(self._tensor[offset : offset + size].cpu().numpy()).view(np.uint64)

    def fill(self, size: int | None = None) -> None:
        """Put `FILL` everywhere, or into the first bytes alone."""
        if self._torch is None:
            self._bytes[:size] = FILL & 0xFF
        else:
            self._tensor[:size].fill_(FILL & 0xFF)
            self._torch.cuda.synchronize()


def available_bytes() -> int:
    """Memory that this host has left, within the limit of its control group."""
    available = 1 << 62
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            available = min(available, max(0, int((group / limit).read_text()) - int((group / used).read_text())))
    return available


def cuda_free_bytes() -> int:
    """Memory that is free on the first visible GPU."""
    return int(importlib.import_module("torch").cuda.mem_get_info(0)[0])


def cuda_works() -> tuple[bool, str]:
    """Whether PyTorch has a GPU here, and why not."""
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            return False, "torch.cuda.is_available() is false"
        torch.zeros(1, device="cuda:0")
    except Exception as error:
        return False, describe(error)
    return True, ""


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def raise_memory_lock() -> None:
    """Let this process register as much as the login may, as vLLM's instances do."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def store_baseline(direction: str, peer: str, record: dict[str, Any]) -> str:
    """Write the baseline as a whole or not at all; its path.

    Raises:
        OSError: that is not possible.
    """
    home = os.environ.get("PDCTL_HOME")
    folder = (Path(home) if home else Path.home() / ".pdctl") / "probe"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{direction}-{re.sub('[^A-Za-z0-9_.-]', '_', peer)}.json"
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return str(path)
