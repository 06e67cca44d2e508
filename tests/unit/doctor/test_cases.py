"""Recorded clusters, and exactly what the checks say to them.

To add a case put a file ``cases/NAME.json``:

* ``title``: one sentence; ``source``: where the situation comes from (a report, a sample).
* ``cluster``: name of one of ``bases/clusters.json``, or ``{"base": NAME, "change": {...}}``, or a whole cluster file
  as an object.
* ``hosts``: by host name, the name of a document of ``bases/``, or ``{"base": NAME, "change": {...}}``. ``change`` is a
  JSON merge patch of the document's parts (null removes, ``"@NULL@"`` is a null that stays); over a list, an object
  changes items by index, ``"*"`` all of them. ``"missing": {"rdma": "why"}`` takes a part out; ``"clock": [offset,
  error]`` in seconds.
* ``unreachable``: by host name, ``[error class, message, hint]``.
* ``aws``: ``{"instances": ..., "groups": ...}``, names of the answers in ``aws/`` without ``aws-``.
* ``areas``: which areas are compared; all if left out.
* ``expect``: every finding of these areas that does not pass: ``"FAB003 warning p1 d1"`` for one finding on p1 and one
  on d1, ``"XFER001 error p1+d1"`` for a finding about a pair, without host names for the whole cluster. The word is
  the severity of a failure, or ``skipped``.
* ``says``: words that must be found in message, evidence, fix or commands of a check's findings: the reader is to be
  able to mend it with the report alone.

The documents in ``bases/`` hold the values of the raw samples in ``samples/`` (and of the other recorded samples of the
project), read by the parsers of ``pdctl/node/facts.py``; limits, disks, the network, the interpreters, the model and
the mlx5 devices are written by hand. In them, ``@HOST@``, ``@INSTANCE@``, ``@ADDRESS@``, ``@PYTHON@`` and ``@GID@``
stand for the host's name, its EC2 instance id, its data-plane address, the Python of the cluster file, and the address
as a GID; planned ports and routes are filled in.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdctl.doctor.findings import Finding
from pdctl.doctor.registry import all_checks, run_checks
from pdctl.node import facts as node_facts
from tests.unit.doctor import recorded_cases

SAMPLES = Path(__file__).parent / "samples"


def findings_of(case: recorded_cases.RecordedCase) -> list[Finding]:
    checks = tuple(check for check in all_checks() if check.area in case.areas)
    return list(run_checks(case.context, checks))


@pytest.mark.parametrize("name", recorded_cases.names())
def test_case(name):
    case = recorded_cases.read_case(name)
    findings = findings_of(case)
    got = recorded_cases.answered(findings)
    shown = {(one.id, one.hosts): f"{one.message} | {one.evidence}" for one in findings}
    unexpected = [f"{answer} {shown[answer[0], answer[2]]}" for answer in sorted(got - case.expect)]
    assert (unexpected, sorted(case.expect - got)) == ([], [])


@pytest.mark.parametrize("name", recorded_cases.names())
def test_what_is_said(name):
    """What fails says what to do, and the same trouble in the same words on every host, so that it can be folded."""
    case = recorded_cases.read_case(name)
    findings = findings_of(case)
    for one in findings:
        assert "bug of pdctl" not in one.message, one.evidence
        assert one.message
        if recorded_cases.answered([one]) and one.verdict.value == "fail":
            assert one.fix, one
            assert not any(f"{host}:" in one.message for host in one.hosts), one.message
    for check, words in case.says.items():
        text = " ".join(
            f"{one.message} {one.evidence} {one.fix} {one.commands}"
            for one in findings
            if one.id == check and one.verdict.value != "pass"
        )
        for word in words:
            assert word in text, f"{check} does not say {word!r}: {text}"


def test_every_check_fails_somewhere():
    """A check that no recorded case makes fail may never fail at all. The other areas have tests of their own."""
    failing = {
        answer[0]
        for name in recorded_cases.names()
        for answer in recorded_cases.read_case(name).expect
        if answer[1] != "skipped"
    }
    mine = {check.id for check in all_checks() if check.area in ("SSH", "HOST", "ACC", "FAB")}
    assert mine - failing == set()


def test_a_wrong_expectation_is_noticed():
    case = recorded_cases.read_case("p4d")
    got = recorded_cases.answered(findings_of(case))
    assert got - {answer for answer in got if answer[0] == "FAB003"} != case.expect


def test_merge_patch():
    document = {"a": [{"x": 1}, {"x": 2}], "b": {"c": 1, "d": 2}}
    change = {"a": {"*": {"y": 0}, "1": {"x": 9}}, "b": {"c": None}, "e": [1]}
    wanted = {"a": [{"x": 1, "y": 0}, {"x": 9, "y": 0}], "b": {"d": 2}, "e": [1]}
    assert recorded_cases.merged(document, change) == wanted
    assert recorded_cases.merged([1, 2, 3], {"0": None}) == [2, 3]


def test_bases_hold_what_the_samples_say():
    """The documents were read from samples by these parsers; they must not drift apart."""
    p5en = json.loads((recorded_cases.BASES / "p5en-good.json").read_text())["parts"]
    trn2 = json.loads((recorded_cases.BASES / "trn2-good.json").read_text())["parts"]
    domains, fabrics = node_facts.parse_fi_info((SAMPLES / "fi_info-efa-rdm-p5en-good.txt").read_text())
    assert (p5en["efa"]["rdm"]["domains"], p5en["efa"]["rdm"]["fabrics"]) == (domains, fabrics)
    domains, fabrics = node_facts.parse_fi_info((SAMPLES / "fi_info-efa-direct-rma-p5en-good.txt").read_text())
    assert (p5en["efa"]["direct_rma"]["domains"], p5en["efa"]["direct_rma"]["fabrics"]) == (domains, fabrics)
    assert [device["name"] for device in p5en["rdma"]["devices"]] == domains
    gpus, _ = node_facts.parse_gpus((SAMPLES / "nvidia-smi-query-gpu-h200.csv").read_text())
    assert [gpu["uuid"] for gpu in p5en["nvidia"]["gpus"]] == [gpu["uuid"] for gpu in gpus]
    assert trn2["neuron"]["devices"] == node_facts.parse_neuron_ls(
        (SAMPLES / "neuron-ls-trn2-48xlarge.json").read_text()
    )
    meminfo = node_facts.parse_meminfo((SAMPLES / "meminfo-hugepages-efa-config.txt").read_text())
    assert {key: p5en["memory"][key] for key in meminfo} == meminfo
