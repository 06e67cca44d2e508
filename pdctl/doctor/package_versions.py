"""Which versions of packages the connector works with, and the parts of a version number. Pure.

The figures are copies: those of the connector (``pdctl_connector.compat``, which this side never imports) and of the
dependencies in ``pyproject.toml``. A test compares them.
"""

from __future__ import annotations

import re

SUPPORTED_VLLM = ("0.32", "0.33")
"""Release lines of vLLM that the push connector is written for."""
VLLM_RANGE = ">=0.32,<0.34"
"""The same for pip."""
WANTED_NIXL = "1.5.1"
"""Oldest NIXL that the connector is tested with."""
WANTED_ROUTER = "0.1.17"
"""Oldest vllm-router that dispatches push mode (it reads ``transfer_mode`` of prefill's answers)."""


def release_line(version: str) -> str:
    """Major and minor number, ``0.33`` of ``0.33.1.dev3+g1234567``; empty if there are none."""
    match = re.match(r"\s*v?([0-9]{1,9}\.[0-9]{1,9})", version)
    return match[1] if match else ""


def public_part(version: str) -> str:
    """A version without what says how it was built: ``2.13.0`` of ``2.13.0+cu129``."""
    return version.partition("+")[0].strip()


def local_part(version: str) -> str:
    """What a version says of how it was built: ``cu129`` of ``2.13.0+cu129``; empty if nothing."""
    return version.partition("+")[2].strip()
