"""docs/doctor.md says something about every option, key and permission."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pdctl.cli.doctor import command
from pdctl.doctor.aws import iam_policy
from pdctl.doctor.report_json import report_json
from tests.support.outcomes import finding, outcome_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
FIRST_CELLS = " ".join(row.split("|")[1] for row in PAGE.splitlines() if row.startswith("|"))
OPTIONS = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_row(name: str) -> None:
    assert f"`{name}`" in FIRST_CELLS


def test_no_option_is_described_that_is_not_there() -> None:
    others = {"--skip-doctor"}
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) - set(OPTIONS) == others


def test_every_key_of_the_json_has_a_row() -> None:
    value = report_json(outcome_of([finding("HOST003", "fail", "p1")]))
    keys = [*value, *value["findings"][0]]
    assert [key for key in keys if f"`{key}`" not in FIRST_CELLS] == []
    assert [key for key in value["summary"] if f"`{key}`" not in PAGE] == []


def test_the_policy_is_the_one_that_is_needed() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert json.loads(block) == iam_policy()
