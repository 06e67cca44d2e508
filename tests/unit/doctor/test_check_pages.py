"""Every check can be explained, and docs/checks has its page as it is now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from pdctl.doctor.explain import explain, page
from pdctl.doctor.findings import Check
from pdctl.doctor.registry import AREAS, all_checks
from pdctl.doctor.styled_text import plain_text

ROOT = Path(__file__).resolve().parents[3]
CHECKS = all_checks()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_check_pages", ROOT / "scripts" / "make_check_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_those_of_the_checks(script: ModuleType) -> None:
    found = script.differences(script.FOLDER, script.wanted_pages())
    assert not found, "run `make docs`:\n" + "\n".join(found)


def test_missing_stale_and_superfluous_pages_are_seen(script: ModuleType, tmp_path: Path) -> None:
    wanted = {"A.md": "a\n", "B.md": "b\n"}
    script.write(tmp_path, wanted)
    assert script.differences(tmp_path, wanted) == []
    (tmp_path / "A.md").write_text("old\n")
    (tmp_path / "B.md").unlink()
    (tmp_path / "C.md").write_text("c\n")
    assert script.differences(tmp_path, wanted) == ["B.md is missing", "A.md is stale", "C.md is the page of no check"]
    script.write(tmp_path, wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A.md", "B.md"]


def test_ids_are_unique_and_well_formed() -> None:
    ids = [check.id for check in CHECKS]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[A-Z]{2,5}\d{3}", name) for name in ids)
    assert {check.area for check in CHECKS} == set(AREAS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_every_check_says_what_why_and_how_to_fix_it(check: Check) -> None:
    for text in (check.title, check.what, check.why, check.fix):
        assert text.strip()
    assert len(check.what) > 30, "what: too short to explain anything"
    assert len(check.why) > 20, "why: too short to explain anything"
    assert len(check.fix) > 10, "fix: too short to help anybody"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_the_explanation_has_everything_and_fits_the_terminal(check: Check) -> None:
    text = plain_text(explain(check, width=80))
    words = " ".join(text.split())
    for part in (check.title, check.what, check.why, check.fix, *check.sources):
        assert " ".join(part.split()) in words
    own = [line for line in text.splitlines() if line[2:] not in check.sources]
    # A long word (an address, a path) stays whole.
    assert [line for line in own if len(line) > 80 and len(line.split()) > 1] == []


def test_a_page_can_be_rendered_and_found() -> None:
    for check in CHECKS:
        text = page(check)
        assert text.count("\n# ") == 1
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
