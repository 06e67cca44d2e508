"""Reads the recorded cases of ``cases/``: facts of all hosts of a cluster, and what the checks must say to them.

test_cases.py tells how a case is written.
"""

from __future__ import annotations

import copy
import ipaddress
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdctl import errors
from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.aws_hosts import match_hosts
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, read_facts
from pdctl.doctor.findings import Finding, Verdict
from pdctl.doctor.registry import AREAS
from pdctl.errors import PdctlError
from pdctl.plan import ClusterPlan
from tests.support.plans import planned
from tests.unit.doctor.ec2_cases import answers, aws_of

FOLDER = Path(__file__).parent / "cases"
BASES = FOLDER / "bases"
KEYS = frozenset({"title", "source", "cluster", "hosts", "unreachable", "aws", "areas", "expect", "says"})

Answer = tuple[str, str, tuple[str, ...]]
"""Id, severity of a failure or ``skipped``, hosts."""


@dataclass(frozen=True)
class RecordedCase:
    """One case.

    Attributes:
        context: what the checks see.
        areas: those that are compared.
        expect: every finding of these areas that does not pass.
        says: words that message, evidence or fix of a check's findings must hold, by id.
    """

    context: Context
    areas: tuple[str, ...]
    expect: frozenset[Answer]
    says: Mapping[str, tuple[str, ...]]


def names() -> list[str]:
    """Names of all cases."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_case(name: str) -> RecordedCase:
    """One case, put together."""
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    case: dict[str, Any] = json.loads(text)
    unknown = set(case) - KEYS
    assert not unknown, f"{name}: unknown keys {sorted(unknown)}"
    plan = _plan(case["cluster"])
    facts = {host: _facts(host, entry, plan) for host, entry in case.get("hosts", {}).items()}
    unreachable = {host: _error(host, words) for host, words in case.get("unreachable", {}).items()}
    assert set(facts) | set(unreachable) <= set(plan.hosts), f"{name}: hosts that the cluster does not have"
    areas = tuple(case.get("areas", AREAS))
    assert set(areas) <= set(AREAS), f"{name}: unknown areas"
    return RecordedCase(
        Context(plan, facts, unreachable, aws=_aws(case.get("aws"), plan, facts), aws_skipped="not part of this case"),
        areas,
        frozenset(answer for line in case["expect"] for answer in _expected(line)),
        {check: tuple(words) for check, words in case.get("says", {}).items()},
    )


def answered(findings: Iterable[Finding]) -> frozenset[Answer]:
    """What findings come to, those that pass left out."""
    return frozenset(
        (one.id, "skipped" if one.verdict is Verdict.SKIPPED else one.severity.value, one.hosts)
        for one in findings
        if one.verdict is not Verdict.PASS
    )


def merged(value: Any, change: Any) -> Any:
    """A JSON merge patch (RFC 7396) with more: an object over a list changes items by index (``*``: all), and the
    text ``@NULL@`` stands for a null that stays."""
    if not isinstance(change, dict):
        return None if change == "@NULL@" else change
    if isinstance(value, list):
        items = dict(enumerate(value))
        for key, patch in change.items():
            for index in list(items) if key == "*" else [int(key)]:
                if patch is None:
                    del items[index]
                else:
                    items[index] = merged(items[index], patch)
        return list(items.values())
    result = dict(value) if isinstance(value, dict) else {}
    for key, patch in change.items():
        if patch is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), patch)
    return result


def base_facts(name: str, host: str, plan: ClusterPlan) -> dict[str, Any]:
    """Facts of ``bases/``, with what belongs to one host put in: its name, its address, the Python of the plan."""
    address = next(instance.address for instance in plan.instances if instance.host == host)
    text = (BASES / f"{name}.json").read_text(encoding="utf-8")
    mapped = ":".join(f"{number:04x}" for number in (0, 0, 0, 0, 0, 0xFFFF, *_halves(address)))
    for mark, value in (
        ("HOST", host),
        ("INSTANCE", f"i-0abc{1 + plan.hosts.index(host):013}"),
        ("ADDRESS", address),
        ("PYTHON", plan.spec.python),
        ("GID", mapped),
    ):
        text = text.replace(f"@{mark}@", value)
    document: dict[str, Any] = json.loads(text)
    parts = document["parts"]
    parts["ports"] = [
        {"port": use.port, "address": use.address, "purpose": use.purpose, "free": True}
        for instance in plan.instances
        if instance.host == host
        for use in instance.ports
    ]
    interface = next(one for one in parts["network"]["interfaces"] if one["addresses"][0].startswith(f"{address}/"))
    peers = {instance.address for instance in plan.instances} - {address}
    parts["network"]["routes"] = [
        {"address": peer, "interface": interface["name"], "source": address, "mtu": interface["mtu"]}
        for peer in sorted(peers)
    ]
    return document


def _halves(address: str) -> tuple[int, int]:
    return divmod(int(ipaddress.IPv4Address(address)), 0x10000)


def _plan(cluster: Any) -> ClusterPlan:
    known: dict[str, Any] = json.loads((BASES / "clusters.json").read_text(encoding="utf-8"))
    if isinstance(cluster, str):
        cluster = {"base": cluster}
    if "base" in cluster:
        cluster = merged(copy.deepcopy(known[cluster["base"]]), cluster.get("change", {}))
    return planned(cluster)


def _facts(host: str, entry: Any, plan: ClusterPlan) -> HostFacts:
    if isinstance(entry, str):
        entry = {"base": entry}
    unknown = set(entry) - {"base", "change", "missing", "clock"}
    assert not unknown, f"{host}: unknown keys {sorted(unknown)}"
    document = base_facts(entry["base"], host, plan)
    document["parts"] = merged(document["parts"], entry.get("change", {}))
    for part, reason in entry.get("missing", {}).items():
        document["parts"].pop(part)
        document["missing"][part] = reason
    offset, error = entry.get("clock", (0.004, 0.01))
    facts = read_facts(host, document, clock_offset_s=offset, clock_error_s=error)
    # A change that does not have the shape of the facts would silently become "not collected".
    assert set(facts.missing) == set(entry.get("missing", {})), facts.missing
    return facts


def _error(host: str, words: list[str]) -> PdctlError:
    kind, message, hint = words
    if kind == "NodeError":
        return errors.NodeError(host, "bad-reply", message, hint=hint)
    error: PdctlError = getattr(errors, kind)(host, message, hint=hint)
    return error


def _aws(named: Mapping[str, str] | None, plan: ClusterPlan, facts: Mapping[str, HostFacts]) -> AwsFacts | None:
    return None if named is None else match_hosts(aws_of(answers(**named)), plan, facts)


def _expected(line: str) -> list[Answer]:
    check, verdict, *hosts = line.split()
    assert verdict in ("error", "warning", "info", "skipped"), line
    return [(check, verdict, tuple(host.split("+"))) for host in hosts] or [(check, verdict, ())]
