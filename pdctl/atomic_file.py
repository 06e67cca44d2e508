"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from pdctl.errors import UsageError


def write_atomically(path: Path, content: bytes, *, mode: int) -> None:
    """Write a file; what was there before stays until the new content is complete.

    Args:
        path: the file.
        content: all of it.
        mode: its permissions, before the umask takes its share.

    Raises:
        UsageError: it cannot be written there.
    """
    try:
        # Beside the file: renaming works only within one file system. mkstemp makes files that only their user reads.
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(mode & ~_umask())
        Path(name).replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    finally:
        # Gone already if all went well; left behind by an error or Ctrl-C otherwise.
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
