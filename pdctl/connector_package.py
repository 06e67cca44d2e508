"""The connector's source files as they are shipped to nodes, and the digest that names them there."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from pdctl.errors import PdctlError

_PACKAGE = "pdctl_connector"


def connector_files() -> dict[str, bytes]:
    """Read the connector's Python files: relative path (``pdctl_connector/...``) to content.

    The package is located, never imported: importing it needs vLLM.

    Raises:
        PdctlError: the installation lacks the package.
    """
    folder = _package_folder()
    return {
        f"{_PACKAGE}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*.py"))
        if "__pycache__" not in path.parts
    }


def connector_digest(files: Mapping[str, bytes]) -> str:
    """Name a set of files by its content: sha256 hex over path, NUL, length, NUL, content of each, in path order."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = files[path]
        digest.update(path.encode() + b"\0" + str(len(content)).encode() + b"\0" + content)
    return digest.hexdigest()


def _package_folder() -> Path:
    found = importlib.util.find_spec(_PACKAGE)
    if found is not None and found.origin is not None:
        return Path(found.origin).parent
    in_source_tree = Path(__file__).resolve().parents[1] / "connector" / _PACKAGE
    if in_source_tree.is_dir():
        return in_source_tree
    raise PdctlError(
        "the package pdctl_connector is not installed", hint="reinstall pdctl: pip install --force-reinstall pdctl"
    )
