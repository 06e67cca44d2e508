"""The report as JUnit XML, for systems that show test results. Pure."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from pdctl.doctor.findings import Finding, Severity, Verdict
from pdctl.doctor.outcome import Outcome, counts
from pdctl.doctor.registry import AREAS

# What XML 1.0 allows (https://www.w3.org/TR/xml/#charsets). The rest cannot be written, not even as a reference.
_NOT_ALLOWED = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(outcome: Outcome) -> bytes:
    """One test suite for each area, one test case for each finding.

    Errors are failures; warnings and infos pass, with their words in ``system-out``, as they do for the exit code.
    """
    root = ElementTree.Element("testsuites", name=f"pdctl doctor {outcome.context.spec.cluster}")
    total = outcome.timings_s.get("total")
    if total is not None:
        root.set("time", f"{total:.3f}")
    sums = {"tests": 0, "failures": 0, "skipped": 0}
    for area, title in AREAS.items():
        findings = [finding for finding in outcome.findings if finding.area == area]
        if not findings:
            continue
        numbers = {
            "tests": len(findings),
            "failures": sum(_fails(finding) for finding in findings),
            "skipped": sum(_is_skipped(finding) for finding in findings),
        }
        for key, number in numbers.items():
            sums[key] += number
        attributes = {"name": f"{area}: {title}", "errors": "0", **{key: str(n) for key, n in numbers.items()}}
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        for finding in findings:
            _case(suite, finding)
    for key, number in sums.items():
        root.set(key, str(number))
    root.set("errors", "0")
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _case(suite: ElementTree.Element, finding: Finding) -> None:
    where = f" [{', '.join(finding.hosts)}]" if finding.hosts else ""
    name = _safe(f"{finding.id} {finding.title}{where}")
    # Some readers cannot do without a time.
    attributes = {"classname": f"pdctl.doctor.{finding.area}", "name": name, "time": "0"}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    if _is_skipped(finding):
        reason = f"ignored ({finding.ignored}): {finding.message}" if finding.ignored else finding.message
        ElementTree.SubElement(case, "skipped", message=_safe(reason))
    elif _fails(finding):
        failure = ElementTree.SubElement(case, "failure", message=_safe(finding.message), type=finding.severity.value)
        failure.text = _safe(_details(finding))
    elif counts(finding):
        words = ElementTree.SubElement(case, "system-out")
        words.text = _safe(f"{finding.severity.value}: {finding.message}\n{_details(finding)}")


def _fails(finding: Finding) -> bool:
    return counts(finding) and finding.severity is Severity.ERROR


def _is_skipped(finding: Finding) -> bool:
    return finding.verdict is Verdict.SKIPPED or bool(finding.ignored)


def _details(finding: Finding) -> str:
    parts = [
        f"seen: {finding.evidence}" if finding.evidence else "",
        f"fix: {finding.fix}" if finding.fix else "",
        *(f"$ {command}" for command in finding.commands),
    ]
    return "\n".join(part for part in parts if part)


def _safe(text: str) -> str:
    return _NOT_ALLOWED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
