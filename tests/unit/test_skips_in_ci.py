"""The hooks of tests/conftest.py, tried on small test files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"

SKIPPING = """
import pytest

def test_runs():
    pass

def test_skips_inside():
    pytest.skip("no such device")

@pytest.mark.skipif(True, reason="by condition")
def test_skips_by_mark():
    pass

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_failure():
    assert False

@pytest.fixture
def device():
    pytest.skip("by fixture")

def test_skips_in_fixture(device):
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers =\n    root:\n    sshd:\n    e2e:\n")
    return pytester


def run(project: pytest.Pytester, *options: str) -> pytest.RunResult:
    # The plugin of Textual's snapshots expects an outer session of its own, and fails at the end of one in a process.
    return project.runpytest_inprocess("-p", "no:textual-snapshot", *options)


def test_on_a_laptop_skips_are_skips(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    project.makepyfile(SKIPPING)

    run(project).assert_outcomes(passed=1, skipped=3, xfailed=1)


def test_in_ci_every_kind_of_skip_fails_and_says_its_reason(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    project.makepyfile(SKIPPING)

    result = run(project)

    # A skip in a fixture or by a mark happens in the set-up phase, which pytest counts as an error.
    result.assert_outcomes(passed=1, failed=1, errors=2, xfailed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    for reason in ("no such device", "by condition", "by fixture"):
        result.stdout.fnmatch_lines([f"*in CI a skipped test is a failure: *{reason}*"])


def test_in_ci_a_module_that_skips_itself_fails(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    project.makepyfile("import pytest\npytest.importorskip('surely_not_installed')\ndef test_one(): pass\n")

    result = run(project)

    result.assert_outcomes(errors=1)
    assert result.ret != 0


def test_a_marker_without_its_programs_skips_and_names_the_package(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    source = CONFTEST.read_text(encoding="utf-8")
    project.makeconftest(source + "\ndef missing_programs():\n    return ('sshd', 'nft')\n")
    tests = "@pytest.mark.sshd\ndef test_one(): pass\n@pytest.mark.root\ndef test_two(): pass\ndef test_three(): pass\n"
    project.makepyfile("import pytest\n" + tests)

    result = run(project, "-rs")

    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "missing on this machine: sshd, nft;*",
            "*needs sshd (Debian: apt-get install openssh-server)*",
            "*needs nft (Debian: apt-get install nftables)*",
        ]
    )
