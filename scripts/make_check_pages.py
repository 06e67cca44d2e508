"""Write docs/checks: a page for each check of `pdctl doctor`, and their index, out of the checks themselves.

python scripts/make_check_pages.py            write what changed, remove pages of checks that are gone
python scripts/make_check_pages.py --check    change nothing; say which page is missing, stale or too many
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "checks"

# The checkout's own package, also without an installation.
sys.path.insert(0, str(ROOT))

from pdctl.doctor.explain import index, page  # noqa: E402
from pdctl.doctor.registry import all_checks  # noqa: E402


def wanted_pages() -> dict[str, str]:
    """Name and text of every page."""
    checks = all_checks()
    return {"README.md": index(checks), **{f"{check.id}.md": page(check) for check in checks}}


def differences(folder: Path, wanted: dict[str, str]) -> list[str]:
    """What is wrong with the pages in a folder, in words; empty if nothing is."""
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    missing = [f"{name} is missing" for name in wanted if name not in present]
    stale = [f"{name} is stale" for name, text in wanted.items() if present.get(name, text) != text]
    return [*missing, *stale, *(f"{name} is the page of no check" for name in present if name not in wanted)]


def write(folder: Path, wanted: dict[str, str]) -> None:
    """Make the pages in a folder what they should be."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description="Make the pages of docs/checks.")
    parser.add_argument("--check", action="store_true", help="only say what is wrong with them")
    wanted = wanted_pages()
    found = differences(FOLDER, wanted)
    if parser.parse_args().check:
        print("\n".join(found) if found else f"docs/checks is as it should be ({len(wanted)} pages)")
        return 1 if found else 0
    write(FOLDER, wanted)
    print(f"docs/checks: {len(wanted)} pages, {len(found)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
