"""JSON files that are read with care."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from pdctl.errors import UsageError
from pdctl.spec_yaml import printable

T = TypeVar("T")

_SHOWN = 60
"""Characters of a key or value that a message shows: whatever a file holds, its error is a line."""


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
            f"{path} has schema {_shown(data.get('schema'))}, and this pdctl reads schema {schema}",
            hint="read it with the version of pdctl that wrote it",
        )
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(_cut(str(part)) for part in first["loc"])
        said = _cut(first["msg"], 4 * _SHOWN)
        raise UsageError(f"{path}: {where}: {said}", hint="the file was changed or cut") from None


def _shown(value: Any) -> str:
    """A value of the file: as it is if it is short and plain, else its kind."""
    if isinstance(value, str):
        return _cut(repr(value[:_SHOWN]))
    if value is None or isinstance(value, bool | int | float):
        return _cut(repr(value))
    return "a list" if isinstance(value, list) else "an object"


def _cut(text: str, most: int = _SHOWN) -> str:
    return printable(text if len(text) <= most else f"{text[: most - 3]}...")
