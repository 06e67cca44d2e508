"""JSON files that are written whole or not at all, and read with care."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from pdctl.errors import UsageError

T = TypeVar("T")


def read_document(
    path: Path,
    adapter: TypeAdapter[T],
    *,
    limit: int,
    schema: int,
    is_one: Callable[[Mapping[str, Any]], bool],
    what: str,
    hint: str,
) -> T:
    """Read a JSON file that carries the version of its schema.

    Args:
        path: the file.
        adapter: checks it, and makes values of it.
        limit: most bytes that are read.
        schema: the version that is known.
        is_one: whether an object is such a document, of any version.
        what: the document in words.
        hint: where to find one.

    Raises:
        UsageError: it cannot be read, is something else, or is of a version that this pdctl does not know.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}", hint=hint) from None
    if len(content) > limit:
        raise UsageError(f"{path} is larger than any {what}", hint=hint)
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}", hint=hint) from None
    if not isinstance(data, dict) or not is_one(data):
        raise UsageError(f"{path} is no {what}", hint=hint)
    if data.get("schema") != schema:
        raise UsageError(
            f"{path} has schema {data.get('schema')!r}, and this pdctl reads schema {schema}",
            hint="read it with the version of pdctl that wrote it",
        )
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where}: {first['msg']}", hint="the file was changed or cut") from None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """A binary file that takes its place only when all of it is written (mode 0600).

    Raises:
        UsageError: it cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()
