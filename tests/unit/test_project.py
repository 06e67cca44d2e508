"""The project's own order: versions, imports, targets, and what no file may contain."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from ruamel.yaml import YAML

import pdctl

ROOT = Path(__file__).parent.parent.parent
NOT_OURS = {".git", ".venv", ".demo", "__pycache__", "build", "dist", "node_modules"}


def project_files() -> Iterator[Path]:
    """Every file of the project, without what tools made."""
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            made_by_a_tool = path.name in NOT_OURS or path.name.endswith(("_cache", ".egg-info", ".pyc"))
            if made_by_a_tool or path.name.startswith((".venv", ".hypothesis", ".benchmarks")) or path.is_symlink():
                continue
            if path.is_dir():
                folders.append(path)
            else:
                yield path


def python_files(folder: str) -> list[Path]:
    """The Python files below a folder of the project."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- versions


def test_the_version_is_one_that_packaging_understands() -> None:
    assert str(Version(pdctl.__version__)) == pdctl.__version__


def test_the_changelog_knows_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d{2}-\d{2}$", changelog, re.MULTILINE)
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## ")[0]

    # Between two releases the version is the coming one, which the part of unreleased changes names.
    assert released[:1] == [pdctl.__version__] or pdctl.__version__ in unreleased


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    written = [
        shown(path)
        for path in python_files("pdctl") + python_files("connector")
        if re.search(r"^__version__\s*(?::\s*\w+\s*)?=\s*[\"']", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]

    # The connector travels alone to the nodes, so it may carry a copy; then the copy must be the same.
    assert [name for name in written if name.startswith("pdctl/")] == ["pdctl/__init__.py"]
    assert len(written) <= 2
    for name in written:
        assert f'__version__ = "{pdctl.__version__}"' in (ROOT / name).read_text(encoding="utf-8"), name


# --- pins


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def test_every_constraint_is_a_plain_pin() -> None:
    for line in (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8").splitlines():
        assert not line or line.startswith("#") or re.fullmatch(r"[a-z0-9][a-z0-9-]*==[a-z0-9.+]+", line), line


def declared_requirements() -> list[Requirement]:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [Requirement(text) for text in project["dependencies"] + extras["cpu"] + extras["dev"]]


def test_what_the_project_asks_for_is_pinned_within_its_range() -> None:
    pinned = pins()

    for requirement in declared_requirements():
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in pinned, f"{requirement} has no pin in constraints/cpu.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} against the pin {pinned[name]}"


# --- what no file may contain

FORBIDDEN = {
    "a note of unfinished work": re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"),
    "a conflict marker": re.compile(r"^(?:<{7} |>{7} |={7}$)", re.MULTILINE),
    "the host of a package registry": re.compile(r"\b(?:pypi|files\.pythonhosted|registry\.npmjs|deb\.debian)\.org\b"),
    "a private key": re.compile(r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\n[A-Za-z0-9+/=]{20}"),
    "an AWS access key": re.compile(r"\bAKIA(?!IOSFODNN7EXAMPLE)[A-Z0-9]{16}\b"),
}
# Names the words above in order to forbid them.
EXEMPT = {Path(__file__).resolve()}


def text_files() -> Iterator[tuple[Path, str]]:
    for path in project_files():
        if path.resolve() in EXEMPT:
            continue
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or an archive


def test_no_file_contains_what_it_must_not() -> None:
    found = [
        f"{shown(path)}:{text.count(chr(10), 0, match.start()) + 1}: {what}"
        for path, text in text_files()
        for what, pattern in FORBIDDEN.items()
        for match in pattern.finditer(text)
    ]

    assert not found, "\n".join(found)


def test_no_file_names_the_place_of_this_checkout() -> None:
    # Whoever clones the project has it elsewhere. A checkout in a place with a common name proves nothing.
    if len(ROOT.parts) < 3:
        return
    found = [shown(path) for path, text in text_files() if re.search(re.escape(str(ROOT)) + r"(?![\w.-])", text)]

    assert not found, f"{ROOT} is named in {found}"


def test_text_files_end_with_one_newline_and_have_no_carriage_returns() -> None:
    suffixes = {".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".cfg"}
    data = ROOT / "tests" / "unit" / "data"
    found = []
    for path, text in text_files():
        if path.suffix not in suffixes or data in path.parents or not text:
            continue
        if not text.endswith("\n") or text.endswith("\n\n") or "\r\n" in text:
            found.append(shown(path))

    assert not found


# --- the Makefile and what runs beside it


def makefile_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))


def test_make_help_documents_every_target() -> None:
    done = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory"], check=True, timeout=30, capture_output=True
    )
    documented = dict(line.split(maxsplit=2)[1:] for line in done.stdout.decode().splitlines())

    assert set(documented) == makefile_targets()
    assert all(documented.values())


def test_every_target_is_phony() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)

    assert phony is not None
    assert set(phony.group(1).split()) == makefile_targets()


def test_ci_runs_what_people_run() -> None:
    script = ROOT / ".ci" / "run"

    assert script.stat().st_mode & 0o111
    text = script.read_text(encoding="utf-8")
    assert "export CI=true" in text
    assert set(re.findall(r"\bmake ([a-z-]+)$", text, re.MULTILINE)) >= {"lint", "test"}
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


def test_documents_name_only_targets_that_exist() -> None:
    targets = makefile_targets()
    found = [
        f"{path.name}: make {word}"
        for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for word in re.findall(r"`make ([a-z][a-z-]*)", path.read_text(encoding="utf-8"))
        if word not in targets
    ]

    assert not found


def test_the_hooks_are_readable_and_use_the_projects_own_tools() -> None:
    hooks = YAML(typ="safe").load(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]

    assert {hook["id"] for hook in hooks} >= {"ruff-format", "ruff-check", "mypy"}
    assert all(hook["language"] == "system" for hook in hooks)


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")

    assert "Apache License\n" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


# --- imports


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, wherever in the file, relative and by name in a string too.

    ``from pdctl import plan`` may import the module ``pdctl.plan``, so each name is given with its module in front.
    """
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            module = (parent + (node.module or "")).rstrip(".")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


# Runs under the interpreter of a vLLM instance, and imports vLLM's load generator when it is asked for a load.
LATE_IMPORTS = {"pdctl/node/load.py": {"vllm", "aiohttp"}}


def imports_at_once(path: Path) -> set[str]:
    """What a file imports when it is loaded: all but what stands inside of functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in ast.walk(node)
    }
    statements = [node for node in ast.walk(tree) if node not in inside]
    return {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names} | {
        node.module or "" for node in statements if isinstance(node, ast.ImportFrom)
    }


def may_import(path: Path, module: str) -> bool:
    root = module.split(".")[0]
    at_once = {name.split(".")[0] for name in imports_at_once(path)}
    return root in LATE_IMPORTS.get(shown(path), ()) and root not in at_once


def forbidden_imports(folder: str, roots: set[str]) -> list[str]:
    return [
        f"{shown(path)}:{line}: {module}"
        for path in python_files(folder)
        for line, module in imported_modules(path)
        if module.split(".")[0] in roots and not may_import(path, module)
    ]


def test_the_operators_side_never_imports_what_only_nodes_have() -> None:
    assert forbidden_imports("pdctl", {"vllm", "torch", "nixl", "nixl_cu12", "nixl_cu13", "pdctl_connector"}) == []


def test_the_connector_never_imports_the_operators_side() -> None:
    assert forbidden_imports("connector", {"pdctl", "click", "rich", "fabric", "pydantic"}) == []


# docs/architecture.md: cli -> {doctor, lifecycle, watch, bench} -> {plan, hosts} -> spec. Arrows go one way, and parts
# of one layer do not import each other. A module that is not named here (errors, prometheus_text) stands below them
# all: everything may import it, and it imports none of them.
LAYERS = {
    "cli": 4,
    "doctor": 3,
    "lifecycle": 3,
    "watch": 3,
    "bench": 3,
    "plan": 2,
    "hosts": 2,
    "presets": 2,
    "spec": 1,
}
LOWEST = 0


def area_of(module: str) -> str:
    """``pdctl.hosts.ssh`` -> ``hosts``; ``plan_ports`` is a part of ``plan``."""
    name = [*module.split("."), ""][1]
    family = name.split("_")[0]
    return family if family in LAYERS else name


def wrong_arrow(importer: str, imported: str) -> bool:
    """Whether an import goes against the layers."""
    source, destination = area_of(importer), area_of(imported)
    # The entry points hand over to the command line; the package itself holds nothing but the version.
    if source in (destination, "__main__", "__init__") or destination in ("", "__version__"):
        return False
    lowest_both = source not in LAYERS and destination not in LAYERS
    return not lowest_both and LAYERS.get(source, LOWEST) <= LAYERS.get(destination, LOWEST)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_imports_go_one_way() -> None:
    found = [
        f"{shown(path)}:{line}: {module}"
        for path in python_files("pdctl")
        for line, module in imported_modules(path)
        if module.split(".")[0] == "pdctl" and wrong_arrow(module_name(path), module)
    ]

    assert not found, "against docs/architecture.md:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("importer", "imported", "wrong"),
    [
        ("pdctl.cli.up", "pdctl.lifecycle.up", False),
        ("pdctl.cli.up", "pdctl.spec.load", False),
        ("pdctl.lifecycle.up", "pdctl.plan.make_plan", False),
        ("pdctl.lifecycle.up", "pdctl.lifecycle.warmup", False),
        ("pdctl.lifecycle.up", "pdctl.prometheus_text.total", False),
        ("pdctl.plan", "pdctl.plan_ports.ports", False),
        ("pdctl.plan", "pdctl.__version__", False),
        ("pdctl.spec", "pdctl.errors.Problem", False),
        ("pdctl.lifecycle.up", "pdctl.cli.main", True),
        ("pdctl.lifecycle.up", "pdctl.doctor.checks", True),
        ("pdctl.doctor.checks", "pdctl.lifecycle", True),
        ("pdctl.spec", "pdctl.plan.make_plan", True),
        ("pdctl.plan", "pdctl.hosts.base", True),
        ("pdctl.hosts.fleet", "pdctl.plan", True),
        ("pdctl.errors", "pdctl.spec", True),
        ("pdctl.prometheus_text", "pdctl.lifecycle.status", True),
    ],
)
def test_the_rule_of_arrows_itself(importer: str, imported: str, wrong: bool) -> None:
    assert wrong_arrow(importer, imported) is wrong


def test_only_the_command_line_knows_terminals() -> None:
    found = [
        found
        for folder in ("lifecycle", "hosts", "doctor", "bench")
        if (ROOT / "pdctl" / folder).is_dir()
        for found in forbidden_imports(f"pdctl/{folder}", {"click", "rich", "textual"})
    ]

    assert not found


# --- what runs on nodes


def node_files() -> list[Path]:
    return python_files("pdctl/node")


def test_the_node_agent_is_readable_for_python_38() -> None:
    for path in node_files():
        ast.parse(path.read_text(encoding="utf-8"), filename=shown(path), feature_version=(3, 8))


def test_the_node_agent_uses_the_standard_library_of_python_38() -> None:
    newer = {"zoneinfo", "graphlib", "tomllib"}
    found = [
        f"{shown(path)}:{line}: {module}"
        for path in node_files()
        for line, module in imported_modules(path)
        if (module.split(".")[0] not in sys.stdlib_module_names or module.split(".")[0] in newer)
        and not may_import(path, module)
    ]

    assert not found


def test_the_node_agent_calls_nothing_that_python_38_lacks() -> None:
    newer = {"removeprefix", "removesuffix", "bit_count", "is_relative_to", "to_thread", "pairwise", "cancel_futures"}
    found = []
    for path in node_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in newer:
                found.append(f"{shown(path)}:{node.lineno}: {node.attr}")
            strict_zip = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "zip" and node.keywords
            if strict_zip:
                found.append(f"{shown(path)}:{node.lineno}: zip(strict=...)")

    assert not found


def test_the_node_agent_is_shipped_and_never_imported() -> None:
    found = [
        f"{shown(path)}:{line}: {module}"
        for path in python_files("pdctl")
        if path.parent.name != "node"
        for line, module in imported_modules(path)
        if module.startswith("pdctl.node")
    ]

    assert not found
