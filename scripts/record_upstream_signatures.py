"""Record what the connector relies on of a vLLM release, by reading its source: nothing of it is imported or run.

The records (``tests/unit/data/upstream_signatures_<release line>.json``) let the unit tests check
``pdctl_connector.compat`` against every supported release without vLLM. Make them again after a change of ``compat.py``
and one more for a new release:

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl 'vllm/*.py' -d /tmp/vllm-0.33
    python scripts/record_upstream_signatures.py /tmp/vllm-0.33

The folder is the one that contains ``vllm/``, so an installed vLLM's ``site-packages`` works as well.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "connector"))

from pdctl_connector import compat  # noqa: E402

METADATA_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata"


class Source:
    """The modules of one vLLM source tree, parsed when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = functools.cache(self._module)

    def _module(self, name: str) -> ast.Module | None:
        path = self.folder.joinpath(*name.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return ast.parse(candidate.read_text(encoding="utf-8"), str(candidate))
        return None

    def constant(self, module: str, name: str) -> Any:
        """The literal value a module gives to a name; None when it gives none."""
        tree = self.module(module)
        for target, value in _assignments(tree.body if tree else []):
            if isinstance(target, ast.Name) and target.id == name and isinstance(value, ast.Constant):
                return value.value
        return None

    def classes(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        """A class and its bases, nearest first. Bases from outside the tree are left out."""
        tree = self.module(module)
        if tree is None:
            return
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield node
                for base in node.bases:
                    if isinstance(base, ast.Name):
                        yield from self.classes(module, base.id)
                return
        for imported in ast.walk(tree):
            if isinstance(imported, ast.ImportFrom) and imported.module and imported.level == 0:
                for alias in imported.names:
                    if (alias.asname or alias.name) == name:
                        yield from self.classes(imported.module, alias.name)
                        return


def record(folder: Path) -> dict[str, Any]:
    """Everything `compat.RELIED_ON` names, as found under a folder that contains ``vllm/``."""
    source = Source(folder)
    return {
        "vllm": source.constant("vllm._version", "__version__"),
        "nixl_connector_version": source.constant(METADATA_MODULE, "NIXL_CONNECTOR_VERSION"),
        "classes": {upstream.name: record_class(source, upstream) for upstream in compat.RELIED_ON},
    }


def record_class(source: Source, upstream: compat.UpstreamClass) -> dict[str, Any]:
    """One class: what is missing is recorded as null or left out, and fails the tests by its name."""
    line = list(source.classes(upstream.module, upstream.name))
    methods = {name: method(line, name) for name in sorted({*upstream.called, *upstream.overridden})}
    assigned = {name for cls in line for function in _functions(cls, "__init__") for name in _self_attributes(function)}
    constants = {}
    for name in upstream.constants:
        values = [value for cls in line for target, value in _assignments(cls.body) if _name(target) == name]
        constants[name] = values[0].value if values and isinstance(values[0], ast.Constant) else None
    return {
        "module": upstream.module,
        "methods": methods,
        "attributes": sorted(set(upstream.attributes) & assigned),
        "constants": constants,
    }


def method(line: list[ast.ClassDef], name: str) -> dict[str, str] | None:
    """A method's parameters without ``self``, and those without a default, as words. Knows dataclass constructors."""
    for cls in line:
        for function in _functions(cls, name):
            return _parameters(function)
        if name == "__init__" and any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
            fields = [
                node for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            ]
            return {
                "parameters": " ".join(_name(node.target) for node in fields),
                "required": " ".join(_name(node.target) for node in fields if node.value is None),
            }
    return None


def _parameters(function: ast.FunctionDef) -> dict[str, str]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = positional[: len(positional) - len(arguments.defaults)]
    names = [argument.arg for argument in positional]
    required = [argument.arg for argument in without_default]
    if not any(_name(decorator) == "staticmethod" for decorator in function.decorator_list):
        names, required = names[1:], required[1:]
    if arguments.vararg:
        names.append(arguments.vararg.arg)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        names.append(argument.arg)
        if default is None:
            required.append(argument.arg)
    if arguments.kwarg:
        names.append(arguments.kwarg.arg)
    return {"parameters": " ".join(names), "required": " ".join(required)}


def _functions(cls: ast.ClassDef, name: str) -> Iterator[ast.FunctionDef]:
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield node


def _assignments(body: list[ast.stmt]) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield target, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def _self_attributes(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _name(node.value) == "self":
            yield node.attr


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def main() -> int:
    """Write the record of one vLLM source tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder that contains vllm/")
    parser.add_argument("--output", type=Path, help="default: tests/unit/data/upstream_signatures_<release line>.json")
    arguments = parser.parse_args()
    recorded = record(arguments.folder)
    if not recorded["vllm"]:
        parser.error(f"no vllm/_version.py with a version under {arguments.folder}")
    line = compat.release_line(recorded["vllm"])
    output = arguments.output or REPOSITORY / "tests" / "unit" / "data" / f"upstream_signatures_{line}.json"
    output.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"vLLM {recorded['vllm']}: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
