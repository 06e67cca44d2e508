"""The presets of `pdctl init`: cluster files with comments, as templates.

A preset is itself a cluster file that can be read: what a user is likely to change is written ``${name:-example}``, the
same form in which a cluster file takes variables. Rendering replaces each by the value given, or by the example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdctl.errors import PdctlError, UsageError
from pdctl.spec_values import nearest
from pdctl.spec_yaml import resolve_plain

# Lower-case names only: ${HOME} in a comment or a value is the user's own variable.
_PLACEHOLDER = re.compile(r"\$\{(?P<name>[a-z][a-z0-9_]*):-(?P<example>[^}$]*)\}")
_PLAIN = re.compile(r"[A-Za-z0-9_/.][A-Za-z0-9_/.@+-]*")
_SUFFIX = ".yaml"


def preset_names() -> list[str]:
    """Names of all presets, sorted.

    Raises:
        PdctlError: the installation lacks the templates.
    """
    names = (entry.name for entry in _folder().iterdir())
    return sorted(name[: -len(_SUFFIX)] for name in names if name.endswith(_SUFFIX))


def preset_values(name: str) -> dict[str, str]:
    """What can be set in a preset: names to the examples that stand there otherwise, in the order of the file.

    Raises:
        UsageError: there is no such preset.
    """
    return {match["name"]: match["example"] for match in _PLACEHOLDER.finditer(_read(name))}


def preset_text(name: str, values: Mapping[str, str]) -> str:
    """Render a preset as the text of a cluster file.

    Args:
        name: one of :func:`preset_names`.
        values: values for names of :func:`preset_values`; the others keep their examples. They are quoted as YAML needs
            it, and a ``$`` in them stays a dollar.

    Raises:
        UsageError: there is no such preset, a value has no place in it, or cannot be written there.
    """
    template = _read(name)
    examples = preset_values(name)
    for given, value in values.items():
        if given not in examples:
            raise UsageError(
                f"the preset {name} has nothing called {given!r} to set", hint=_choices(given, examples, "it has")
            )
        if not value.isprintable():
            raise UsageError(f"the value for {given} must be one line without control characters")
        if _is_number(examples[given]) and not _is_number(value):
            raise UsageError(f"the value for {given} must be a number, as in {given}={examples[given]}")

    def fill(match: re.Match[str]) -> str:
        value = values.get(match["name"])
        return match["example"] if value is None else _written(value, number=_is_number(match["example"]))

    return _PLACEHOLDER.sub(fill, template)


def _is_number(text: str) -> bool:
    value = resolve_plain(text)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _written(value: str, *, number: bool) -> str:
    """A value as YAML that reads back as the same text (or number)."""
    if number or (_PLAIN.fullmatch(value) and isinstance(resolve_plain(value), str)):
        return value
    return json.dumps(value, ensure_ascii=False).replace("$", "$$")


def _choices(given: str, choices: Iterable[str], have: str) -> str:
    near = nearest(given, list(choices))
    return f"did you mean {near}?" if near else f"{have}: {', '.join(choices)}"


def _read(name: str) -> str:
    names = preset_names()
    if name not in names:
        raise UsageError(f"there is no preset {name!r}", hint=_choices(name, names, "there are"))
    return (_folder() / (name + _SUFFIX)).read_text(encoding="utf-8")


def _folder() -> Path:
    package = Path(__file__).resolve().parent
    # A wheel has the templates inside the package, a source tree beside it.
    for folder in (package / "templates" / "presets", package.parent / "templates" / "presets"):
        if folder.is_dir():
            return folder
    hint = "reinstall pdctl: pip install --force-reinstall pdctl"
    raise PdctlError("the presets of pdctl are not installed", hint=hint)
