"""Facts come from other machines: whatever is in the document, reading it and judging it never raises."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, read_facts
from pdctl.doctor.findings import Check
from pdctl.doctor.registry import all_checks, run_checks
from tests.support.plans import planned
from tests.unit.doctor import recorded_cases

PAIRS = (("p5en", "p5en-good"), ("p5en", "p4d-good"), ("trn2", "trn2-good"), ("cpu", "cpu-good"), ("roce", "roce-good"))
PLANS = {
    name: planned(cluster)
    for name, cluster in json.loads((recorded_cases.BASES / "clusters.json").read_text(encoding="utf-8")).items()
}
DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]

INTEGERS = st.integers() | st.sampled_from([0, -1, 2**31, 2**63, -(2**63), 10**400])
STRINGS = st.text(max_size=20) | st.sampled_from(
    ["", "\0", "\ud800", "0", "-1", "1e999", "nan", "9" * 40, "٣", "2.6", "a.b", "10.0.16.11", "::1/129", "fe80::1%x"]
)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats() | STRINGS
VALUES = st.one_of(
    SCALARS,
    st.just(DEEP),
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
)


def alike(value: Any) -> st.SearchStrategy[Any]:
    """Other values of the same type, which the models take, so that they reach the checks."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return INTEGERS
    if isinstance(value, float):
        return st.floats()
    return STRINGS if isinstance(value, str) else VALUES


@st.composite
def mangled(draw: st.DrawFn, document: dict[str, Any]) -> Any:
    """A document with a few places removed or replaced, most of them deep inside."""
    for _ in range(draw(st.integers(0, 8))):
        inner: Any = document
        for _ in range(draw(st.integers(1, 7))):
            holder = inner
            key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
            inner = holder[key]
            if not isinstance(inner, (dict, list)) or not inner or inner is DEEP:
                break
        how = draw(st.sampled_from(["remove", "anything", "alike", "alike"]))
        if how == "remove":
            del holder[key]
        else:
            holder[key] = draw(VALUES if how == "anything" else alike(inner))
        if not document:
            break
    return draw(VALUES) if draw(st.integers(0, 30)) == 0 else document


def judged(cluster: str, facts: dict[str, HostFacts], checks: tuple[Check, ...] | None = None) -> list[str]:
    """Words of the checks that failed by themselves."""
    findings = run_checks(Context(PLANS[cluster], facts), all_checks() if checks is None else checks)
    return [f"{one.id}: {one.message}\n{one.evidence}" for one in findings if "bug of pdctl" in one.message]


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "base"), PAIRS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_no_check_fails_by_itself(cluster, base, data):
    facts = {}
    for host in data.draw(st.sampled_from([("p1", "d1"), ("p1",), ("d1",)])):
        document = data.draw(mangled(recorded_cases.base_facts(base, host, PLANS[cluster])))
        offset, error = data.draw(st.tuples(st.none() | st.floats(), st.none() | st.floats()))
        facts[host] = read_facts(host, document, clock_offset_s=offset, clock_error_s=error)
    assert judged(cluster, facts) == []


@pytest.mark.parametrize("cluster", sorted(PLANS))
@pytest.mark.parametrize(
    "document", [None, [], {}, {"schema": 1}, {"schema": 1, "parts": {"rdma": DEEP}}, {"schema": 2}]
)
def test_nothing_collected(cluster, document):
    """Without facts nothing passes that looks at a host."""
    facts = {host: read_facts(host, document) for host in ("p1", "d1")}
    assert judged(cluster, facts) == []
    checks = tuple(check for check in all_checks() if check.area in ("HOST", "ACC", "FAB"))
    passed = [one for one in run_checks(Context(PLANS[cluster], facts), checks) if one.verdict.value == "pass"]
    # What the cluster file alone decides.
    assert {one.id for one in passed} <= {"FAB013", "FAB016", "FAB027"}


def test_a_check_that_fails_is_noticed():
    def broken(context):
        raise RuntimeError("on purpose")

    assert judged("cpu", {}, (replace(all_checks()[0], run=broken),))
