"""What all tests share: those that need something of the machine skip without it, and in CI a skip is a failure."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Generator
from typing import TypeVar

import pytest

pytest_plugins = ["pytester"]

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

# Debian keeps these where a normal login's PATH does not look.
SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
# Program -> Debian package that has it.
SYSTEM_PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "nft": "nftables"}
# What a marker promises to a test.
NEEDED_PROGRAMS = {"sshd": ("sshd", "ssh"), "root": ("ip", "nft")}


def in_ci() -> bool:
    """Whether this is a CI run, where every test must really run."""
    return os.environ.get("CI", "").strip().lower() in ("1", "true", "yes")


@functools.cache
def missing_programs() -> tuple[str, ...]:
    """Those of `SYSTEM_PROGRAMS` that this machine lacks."""
    return tuple(name for name in SYSTEM_PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None)


@functools.cache
def may_make_namespaces() -> bool:
    """Whether this login may make network namespaces (root in a container often may not)."""
    try:
        done = subprocess.run(["unshare", "--net", "true"], check=False, timeout=10, capture_output=True)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return os.geteuid() == 0 and done.returncode == 0


def reason_to_skip(markers: set[str]) -> str:
    """Why a test with these markers cannot run on this machine; empty when it can."""
    for marker, programs in NEEDED_PROGRAMS.items():
        lacking = [name for name in programs if name in missing_programs()]
        if marker in markers and lacking:
            packages = " ".join(sorted({SYSTEM_PROGRAMS[name] for name in lacking}))
            return f"needs {', '.join(lacking)} (Debian: apt-get install {packages})"
    if "root" in markers and not may_make_namespaces():
        return "needs root with the right to make network namespaces"
    if "e2e" in markers and importlib.util.find_spec("vllm") is None:
        return "needs the CPU run time: run it with `make test`"
    return ""


def fail_if_skipped(report: Report) -> Report:
    """Turn a skip into a failure. An expected failure (xfail) is reported as skipped too, and stays what it is."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"in CI a skipped test is a failure: {reason}"
    return report


def pytest_report_header() -> list[str]:
    """Say before the tests what will be skipped for want of a program."""
    missing = missing_programs()
    if not missing:
        return []
    packages = " ".join(sorted({SYSTEM_PROGRAMS[name] for name in missing}))
    return [
        f"missing on this machine: {', '.join(missing)}; tests that need them are skipped (apt-get install {packages})"
    ]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run."""
    reason = reason_to_skip({marker.name for marker in item.iter_markers()})
    if reason:
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that was skipped has failed."""
    report = yield
    return fail_if_skipped(report) if in_ci() else report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In CI a module that skips itself has failed."""
    report = yield
    return fail_if_skipped(report) if in_ci() else report
