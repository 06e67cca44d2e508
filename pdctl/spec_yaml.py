"""YAML of a cluster file to plain values: line numbers, ``${VAR}`` expansion, and bounds against runaway input.

The parser's events are read directly, because a loader that builds objects keeps no lines for plain values, stops at
the first duplicate key, and follows tags. Scalars follow the YAML 1.2 core schema: ``yes`` and ``on`` are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from pdctl.errors import ClusterFileError, Problem

MAX_BYTES = 1 << 20
"""Largest cluster file read, in bytes; 512 hosts with ten keys each need a tenth of it."""
MAX_DEPTH = 32
"""Deepest nesting of lists and mappings."""
MAX_VALUES = 100_000
"""Most values after aliases and merge keys are expanded (a few short lines of aliases can stand for billions)."""
MAX_EXPANDED_CHARACTERS = 1 << 20
"""Most characters that ``${VAR}`` may bring in, over the whole file."""

KeyPath = tuple[str | int, ...]
"""Where a value is: ``("prefill", "hosts", 1, "address")``."""

_VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<braced>[^}$]*)\}|(?P<open>\{)|(?P<bare>[A-Za-z_][A-Za-z0-9_]*))")
_BRACED = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-.*)?", re.DOTALL)

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_REAL = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NOT_A_NUMBER = re.compile(r"\.(?:nan|NaN|NAN)")
_LONG_ESCAPE = re.compile(r"\\U([0-9a-fA-F]{8})")
# Python refuses to convert longer decimal texts (sys.int_info.default_max_str_digits is 4300).
_MAX_DIGITS = 4000
_SHOWN_CHARACTERS = 60


class Expanded(str):
    """A text that ``${VAR}`` was expanded in. Messages show ``source``, never the value: it may be a secret.

    Attributes:
        source: the text as written in the file.
        plain: whether it was written without quotes, so that it may stand for a number.
    """

    __slots__ = ("plain", "source")
    source: str
    plain: bool

    def __new__(cls, value: str, source: str, *, plain: bool) -> Expanded:
        """Make one; see the attributes."""
        text = super().__new__(cls, value)
        text.source = source
        text.plain = plain
        return text


@dataclass(frozen=True)
class Unusable:
    """Stands for a value whose problem has been reported already."""


@dataclass(frozen=True)
class Document:
    """A cluster file as plain values.

    Attributes:
        data: the top-level mapping.
        lines: 1-based line of every key and list entry; ``()`` is the top level.
        problems: what was found wrong on the way; the values concerned are :class:`Unusable` or left out.
    """

    data: dict[str, Any]
    lines: dict[KeyPath, int]
    problems: tuple[Problem, ...]


def read_document(
    text: str, *, file: str, environ: Mapping[str, str], keeps_text: Callable[[KeyPath], bool]
) -> Document:
    """Read a YAML text.

    Args:
        text: the whole file.
        file: its name for messages.
        environ: where ``${VAR}`` is looked up.
        keeps_text: tells whether the scalar at a path stays the text that was written (``1e3`` stays ``1e3``).

    Raises:
        ClusterFileError: nothing useful can be read: a syntax error, a bound exceeded, or no mapping at the top.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ClusterFileError([Problem(file, None, "", f"larger than {MAX_BYTES >> 20} MiB: this is no cluster file")])
    root = _compose(text, file)
    if root is None or (isinstance(root, _Scalar) and root.plain and _NULL.fullmatch(root.value)):
        hint = "write one with `pdctl init`"
        raise ClusterFileError([Problem(file, None, "", "the file is empty (or has only comments)", hint)])
    if isinstance(root, _Refused):
        raise ClusterFileError([Problem(file, root.line, "", root.message, root.hint)])
    if not isinstance(root, _Mapping):
        found = "a list" if isinstance(root, _Sequence) else "a single value"
        message = f"expected `key: value` lines at the top level, found {found}"
        raise ClusterFileError([Problem(file, root.line, "", message, "a file starts like `cluster: my-cluster`")])
    return _Converter(file, environ, keeps_text).convert(root)


def resolve_plain(text: str) -> Any:
    """Value of an unquoted scalar: None, bool, int, float or str (YAML 1.2 core schema)."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if len(text) > _MAX_DIGITS:
        return text
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEXADECIMAL.fullmatch(text):
        return int(text[2:], 16)
    if _REAL.fullmatch(text):
        return float(text)
    infinite = _INFINITE.fullmatch(text)
    if infinite:
        return float(infinite[1] + "inf")
    if _NOT_A_NUMBER.fullmatch(text):
        return float("nan")
    return text


def describe(value: Any) -> str:
    """Say for people what a value is, in a few words, without what ``${VAR}`` brought in."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        shown = _number(value)
        return f"the number {shown}"
    if isinstance(value, Expanded):
        return f"what the text {quoted(value.source)} expands to"
    if isinstance(value, str):
        return f"the text {quoted(value)}" if value else "an empty text"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    return f"a value of type {type(value).__name__}"


def quoted(text: str) -> str:
    """Quote a text for a message: shortened, and with nothing in it that a terminal would act on."""
    if len(text) > _SHOWN_CHARACTERS:
        text = text[: _SHOWN_CHARACTERS - 3] + "..."
    return printable(json.dumps(text, ensure_ascii=False))


def printable(text: str) -> str:
    r"""Replace what is not printable (control characters, lone surrogates) by ``\uXXXX``."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def dotted(path: KeyPath) -> str:
    """Key path as it is shown: ``prefill.hosts[1].address``."""
    shown = ""
    for part in path:
        if isinstance(part, int):
            shown += f"[{part}]"
        else:
            name = part if len(part) <= _SHOWN_CHARACTERS else part[: _SHOWN_CHARACTERS - 3] + "..."
            shown += ("." if shown else "") + printable(name)
    return shown


def _number(value: int | float) -> str:
    if isinstance(value, float):
        special = {float("inf"): ".inf", float("-inf"): "-.inf"}
        return ".nan" if value != value else special.get(value, repr(value))
    return str(value) if abs(value) < 10**30 else "with more than 30 digits"


@dataclass(eq=False)
class _Scalar:
    line: int
    value: str
    plain: bool


@dataclass(eq=False)
class _Sequence:
    line: int
    entries: list[_Node] = field(default_factory=list)


@dataclass(eq=False)
class _Mapping:
    line: int
    pairs: list[tuple[_Node, _Node]] = field(default_factory=list)


@dataclass(eq=False)
class _Refused:
    """A value written with a tag, or an alias to nothing; ``message`` says what is wrong with it."""

    line: int
    message: str
    hint: str


_Node = _Scalar | _Sequence | _Mapping | _Refused


class _Composer:
    """Builds nodes out of parser events with a stack of its own, so depth is bounded by us and not by recursion."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.root: _Node | None = None
        self.open: list[tuple[_Sequence | _Mapping, str | None, _Node | None]] = []
        self.pending_keys: list[_Node | None] = []
        self.anchors: dict[str, _Node] = {}
        self.documents = 0

    @property
    def open_line(self) -> int | None:
        """Line of the innermost list or mapping that has begun and not ended."""
        return self.open[-1][0].line if self.open else None

    def feed(self, event: Any) -> None:
        """Take one parser event."""
        line = event.start_mark.line + 1
        if isinstance(event, DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                hint = "remove the `---` line, or keep the second cluster in a file of its own"
                self._stop(line, "a second document starts here; a cluster file holds one", hint)
        elif isinstance(event, AliasEvent):
            missing = _Refused(
                line, f"the alias *{printable(event.anchor)} stands for nothing", "an anchor (&) must come before it"
            )
            self._place(self.anchors.get(event.anchor, missing))
        elif isinstance(event, ScalarEvent):
            node: _Node = _Scalar(line, event.value, plain=bool(event.implicit[0]))
            self._finish(node, event.anchor, self._refusal(event, line))
        elif isinstance(event, (SequenceStartEvent, MappingStartEvent)):
            if len(self.open) >= MAX_DEPTH:
                self._stop(line, f"nested more than {MAX_DEPTH} levels deep", "")
            made = _Sequence(line) if isinstance(event, SequenceStartEvent) else _Mapping(line)
            self.open.append((made, event.anchor, self._refusal(event, line)))
            self.pending_keys.append(None)
        elif isinstance(event, (SequenceEndEvent, MappingEndEvent)):
            closed, anchor, refusal = self.open.pop()
            self.pending_keys.pop()
            self._finish(closed, anchor, refusal)

    def _finish(self, node: _Node, anchor: str | None, refusal: _Node | None) -> None:
        if anchor is not None:
            # Known only from here on, so no anchor can hold itself.
            self.anchors[anchor] = node
        self._place(node if refusal is None else refusal)

    def _place(self, node: _Node) -> None:
        if not self.open:
            self.root = node
            return
        holder = self.open[-1][0]
        if isinstance(holder, _Sequence):
            holder.entries.append(node)
            return
        key = self.pending_keys[-1]
        if key is None:
            self.pending_keys[-1] = node
        else:
            holder.pairs.append((key, node))
            self.pending_keys[-1] = None

    def _refusal(self, event: Any, line: int) -> _Refused | None:
        if event.tag is None:
            return None
        tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
        message = f"the tag {quoted(tag)} is not allowed; a cluster file holds plain values"
        return _Refused(line, message, "leave the tag out; quote a value that must stay text")

    def _stop(self, line: int, message: str, hint: str) -> None:
        raise ClusterFileError([Problem(self.file, line, "", message, hint)])


def _compose(text: str, file: str) -> _Node | None:
    composer = _Composer(file)
    reader = YAML(typ="safe", pure=True)
    try:
        for event in reader.parse(text):
            composer.feed(event)
    except YAMLError as error:
        raise ClusterFileError([_syntax_problem(error, text, file, composer.open_line)]) from error
    except (ValueError, OverflowError) as error:
        # ruamel hands a numeric escape such as "\UFFFFFFFF" to chr() unchecked.
        beyond = next((m for m in _LONG_ESCAPE.finditer(text) if int(m[1], 16) > 0x10FFFF), None)
        line = None if beyond is None else text.count("\n", 0, beyond.start()) + 1
        raise ClusterFileError([Problem(file, line, "", "a \\U escape in this text names no character")]) from error
    return composer.root


def _syntax_problem(error: YAMLError, text: str, file: str, open_line: int | None) -> Problem:
    """One message for people out of the parser's several lines.

    ``open_line`` is that of the innermost list or mapping that had begun.
    """
    if isinstance(error, ReaderError):
        position = error.position if isinstance(error.position, int) else 0
        line = text.count("\n", 0, position) + 1
        character = error.character if isinstance(error.character, int) else ord(str(error.character)[:1] or "\0")
        message = f"the character U+{character:04X} is not allowed in YAML"
        return Problem(file, line, "", message, "remove it; it may have come with a copied text")
    if not isinstance(error, MarkedYAMLError):
        return Problem(file, None, "", "this is no valid YAML: " + quoted(str(error)))
    mark = error.problem_mark or error.context_mark
    line_number: int | None = None if mark is None else mark.line + 1
    what = printable(" ".join(str(error.problem or "cannot be read").split()))
    context = printable(" ".join(str(error.context or "").split()))
    # Something left open is noticed where the file ends; what people look for is where it was opened.
    if error.context_mark is not None and "end of stream" in what:
        line_number = error.context_mark.line + 1
    elif open_line is not None and "<stream end>" in what:
        line_number = open_line
    line_text = _line_at(text, line_number)
    if "\\t" in what or line_text.lstrip(" ").startswith("\t"):
        return Problem(file, line_number, "", "there is a tab in the indentation", "indent with spaces only")
    while_what = f" ({context})" if context and "next token" not in context else ""
    hint = _syntax_hint(what, context, line_text)
    return Problem(file, line_number, "", f"this is no valid YAML: {what}{while_what}", hint)


def _syntax_hint(what: str, context: str, line: str) -> str:
    if "mapping values are not allowed" in what:
        return 'check the indentation, and quote a value that has ": " in it'
    if "<block end>" in what or "could not find expected ':'" in what:
        return "check the indentation: keys of one level start in the same column, and each is followed by a colon"
    if "quoted scalar" in context:
        return "close the quote"
    if "flow" in context and "${" in line and "stream end" not in what:
        return 'inside [] and {} a variable needs quotes ("${VAR}"); for a number, give the key a line of its own'
    if "flow" in context:
        return "close the bracket, and separate entries by commas"
    if "cannot start any token" in what:
        return "quote the value"
    return ""


def _line_at(text: str, line_number: int | None) -> str:
    if line_number is None:
        return ""
    lines = text.splitlines()
    return lines[line_number - 1] if 0 < line_number <= len(lines) else ""


class _Converter:
    """Nodes to plain values; collects problems instead of stopping, but for the bound on aliases."""

    def __init__(self, file: str, environ: Mapping[str, str], keeps_text: Callable[[KeyPath], bool]) -> None:
        self.file = file
        self.environ = environ
        self.keeps_text = keeps_text
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self.values = 0
        self.expanded_characters = 0

    def convert(self, root: _Mapping) -> Document:
        self.lines[()] = root.line
        return Document(self._mapping(root, ()), self.lines, tuple(self.problems))

    def _report(self, path: KeyPath, line: int, message: str, hint: str = "") -> None:
        self.problems.append(Problem(self.file, line, dotted(path), message, hint))

    def _count(self, line: int) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            message = f"the file makes more than {MAX_VALUES} values, counting what aliases and merge keys (<<) repeat"
            raise ClusterFileError([*self.problems, Problem(self.file, line, "", message)])

    def _value(self, node: _Node, path: KeyPath, line: int) -> Any:
        self._count(node.line)
        if len(path) > MAX_DEPTH:
            self._report(path[:4], line, f"nested more than {MAX_DEPTH} levels deep by aliases")
            return Unusable()
        if isinstance(node, _Refused):
            self._report(path, node.line, node.message, node.hint)
            return Unusable()
        if isinstance(node, _Mapping):
            return self._mapping(node, path)
        if isinstance(node, _Sequence):
            return list(self._entries(node, path))
        return self._scalar(node, path, line)

    def _entries(self, node: _Sequence, path: KeyPath) -> Iterator[Any]:
        for index, entry in enumerate(node.entries):
            entry_path = (*path, index)
            self.lines[entry_path] = entry.line
            yield self._value(entry, entry_path, entry.line)

    def _mapping(self, node: _Mapping, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, line, value in self._pairs(node, path, 0):
            value_path = (*path, key)
            self.lines[value_path] = line
            values[key] = self._value(value, value_path, line)
        return values

    def _pairs(self, node: _Mapping, path: KeyPath, depth: int) -> list[tuple[str, int, _Node]]:
        """Keys of a mapping in order, its own before those it merges."""
        own: dict[str, tuple[int, _Node]] = {}
        merged: tuple[int, _Node] | None = None
        for key_node, value in node.pairs:
            self._count(key_node.line)
            key = self._key(key_node, path)
            if key is None:
                continue
            is_merge = key == "<<" and isinstance(key_node, _Scalar) and key_node.plain
            first = merged[0] if is_merge and merged else own[key][0] if key in own else None
            if first is not None:
                message = f"this key is there twice; it was first given in line {first}"
                self._report((*path, key), key_node.line, message, "keep one of the two")
            elif is_merge:
                merged = (key_node.line, value)
            else:
                own[key] = (key_node.line, value)
        pairs = [(key, line, value) for key, (line, value) in own.items()]
        if merged is not None:
            taken = set(own)
            for key, line, value in self._merged_pairs(*merged, path, depth):
                if key not in taken:
                    taken.add(key)
                    pairs.append((key, line, value))
        return pairs

    def _merged_pairs(self, line: int, node: _Node, path: KeyPath, depth: int) -> Iterator[tuple[str, int, _Node]]:
        for source in node.entries if isinstance(node, _Sequence) else [node]:
            if isinstance(source, _Refused):
                self._report((*path, "<<"), source.line, source.message, source.hint)
            elif isinstance(source, _Mapping) and depth < MAX_DEPTH:
                yield from self._pairs(source, path, depth + 1)
            else:
                message = "a merge key takes an alias of a mapping (`<<: *name`) or a list of such"
                self._report((*path, "<<"), line, message)

    def _key(self, node: _Node, path: KeyPath) -> str | None:
        if isinstance(node, _Refused):
            self._report(path, node.line, node.message, node.hint)
            return None
        if not isinstance(node, _Scalar):
            self._report(path, node.line, "a key must be a simple text, not a list or mapping")
            return None
        if not node.value:
            self._report(path, node.line, "there is a value without a key", "write `key: value`")
            return None
        unfit = _unfit_character(node.value)
        if unfit:
            self._report((*path, node.value), node.line, f"the key holds {unfit}")
            return None
        return node.value

    def _scalar(self, node: _Scalar, path: KeyPath, line: int) -> Any:
        value = self._expand(node.value, path, line)
        if value is None:
            return Unusable()
        if value == node.value:
            unfit = _unfit_character(node.value)
            if unfit:
                self._report(path, line, f"the text holds {unfit}")
                return Unusable()
            if not node.plain or (self.keeps_text(path) and not _NULL.fullmatch(node.value)):
                return node.value
            return resolve_plain(node.value)
        unfit = _unfit_character(value)
        if unfit:
            self._report(path, line, f"{quoted(node.value)} expands to a text that holds {unfit}")
            return Unusable()
        return Expanded(value, node.value, plain=node.plain)

    def _expand(self, text: str, path: KeyPath, line: int) -> str | None:
        """Expand ``${VAR}``, ``${VAR:-default}`` and ``$$``; None if a problem was reported."""
        parts: list[str] = []
        end = 0
        usable = True
        for match in _VARIABLE.finditer(text):
            parts.append(text[end : match.start()])
            end = match.end()
            if match["dollar"]:
                parts.append("$")
                continue
            value = self._variable(match, path, line)
            if value is None:
                usable = False
                continue
            self.expanded_characters += len(value)
            if self.expanded_characters > MAX_EXPANDED_CHARACTERS:
                message = f"the variables of this file expand to more than {MAX_EXPANDED_CHARACTERS} characters"
                raise ClusterFileError([*self.problems, Problem(self.file, line, dotted(path), message)])
            parts.append(value)
        return "".join([*parts, text[end:]]) if usable else None

    def _variable(self, match: re.Match[str], path: KeyPath, line: int) -> str | None:
        literal = "a literal dollar is written $$"
        if match["bare"]:
            name = match["bare"]
            message = f"found ${name}; a variable is written ${{{name}}}"
            self._report(path, line, message, f"write ${{{name}}} to have it replaced, or $${name} to keep it as it is")
            return None
        parts = None if match["open"] else _BRACED.fullmatch(match["braced"])
        if parts is None:
            allowed = "${NAME} or ${NAME:-default} with no $ inside"
            message = f"{quoted(match[0])} cannot be expanded; expected {allowed}"
            self._report(path, line, message, literal)
            return None
        name, default = parts["name"], parts["default"]
        value = self.environ.get(name)
        if value:
            return value
        if default is not None:
            return default[2:]
        if value is None:
            hint = f"set it (export {name}=...), or give a default: ${{{name}:-default}}"
            self._report(path, line, f"the environment variable {name} is not set", hint)
        return value


def _unfit_character(text: str) -> str:
    """What no argument, environment value or file can carry; empty if there is nothing of it."""
    if "\0" in text:
        return "a NUL character"
    if any("\ud800" <= c <= "\udfff" for c in text):
        return "something that is no valid UTF-8"
    return ""
