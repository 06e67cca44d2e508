"""One file with everything that was collected, for a bug report: redacted, and enough to replay the run offline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pdctl import __version__
from pdctl.doctor import network_facts, probe_facts
from pdctl.doctor.aws_file import aws_facts_to_json, read_aws_facts
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, facts_to_json, read_facts
from pdctl.doctor.redaction import REDACTED, Names, Redactor
from pdctl.errors import (
    ClusterFileError,
    CommandTimeout,
    HostError,
    HostKeyRejected,
    HostUnreachable,
    LoginFailed,
    NodeError,
    PdctlError,
    UsageError,
)
from pdctl.plan import make_plan
from pdctl.spec import ClusterSpec, parse

SCHEMA = 1
KIND = "pdctl doctor facts"

# Parts of the answers of EC2 that hold sentences.
_WORDS_OF_PDCTL = ("refused", "not_found")
_HOST_ERRORS = {
    kind.__name__: kind for kind in (HostError, HostUnreachable, HostKeyRejected, LoginFailed, CommandTimeout)
}


def make_bundle(
    context: Context,
    *,
    users: Iterable[str] = (),
    hosts: Iterable[str] = (),
    key: bytes | None = None,
) -> dict[str, Any]:
    """Everything that the checks saw, as JSON values, redacted.

    Args:
        context: what was collected.
        users: more login names to take out (of who runs pdctl).
        hosts: more host names to take out (of the machine that pdctl runs on).
        key: decides the aliases of addresses; random unless given (by tests).
    """
    plain = _as_values(context)
    names = _names(context, users, hosts)
    redactor = Redactor(names, json.dumps(plain, ensure_ascii=False), key=key)
    bundle = {name: redactor.value(value, name) for name, value in plain.items() if name != "aws"}
    aws = plain["aws"]
    bundle["aws"] = aws and {
        # What EC2 says of its instance types says nothing of whose they are.
        name: value if name == "instance_types" else redactor.value(value, name, ec2=name not in _WORDS_OF_PDCTL)
        for name, value in aws.items()
    }
    return {"kind": KIND, "schema": SCHEMA, "pdctl": __version__, **bundle}


def read_bundle(content: str, file: str) -> Context:
    """Read what :func:`make_bundle` made. Facts of a host that make no sense become *not collected*.

    Args:
        content: of the file.
        file: its name, for messages.

    Raises:
        UsageError: it is no such file, or of another schema.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}", hint=_HINT) from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise UsageError(f"{file} holds no facts of pdctl doctor", hint=_HINT)
    if document.get("schema") != SCHEMA:
        raise UsageError(f"{file} has schema {document.get('schema')!r}; this pdctl reads {SCHEMA}", hint=_HINT)
    try:
        return _read(document, file)
    except ClusterFileError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{file} is damaged: {type(error).__name__}: {error}", hint=_HINT) from None


_HINT = "`pdctl doctor --bundle FILE` writes such a file"


def _as_values(context: Context) -> dict[str, Any]:
    return {
        "cluster_file": _cluster_file(context.spec),
        "hosts": {
            host: {
                "facts": facts_to_json(facts),
                "clock_offset_s": facts.clock_offset_s,
                "clock_error_s": facts.clock_error_s,
            }
            for host, facts in context.facts.items()
        },
        "unreachable": {
            host: {
                "kind": type(error).__name__,
                "code": getattr(error, "code", ""),
                "message": error.message,
                "hint": error.hint,
            }
            for host, error in context.unreachable.items()
        },
        "network": None if context.network is None else context.network.to_json(),
        "probe": None if context.probe is None else context.probe.to_json(),
        "aws": None if context.aws is None else aws_facts_to_json(context.aws),
        "probe_skipped": context.probe_skipped,
        "aws_skipped": context.aws_skipped,
    }


def _cluster_file(spec: ClusterSpec) -> dict[str, Any]:
    """What the file says, without how its hosts are logged in to."""
    values: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    values.pop("ssh", None)
    for entry in values.get("doctor", {}).get("ignore", ()):
        entry["reason"] = REDACTED
    return values


def _names(context: Context, users: Iterable[str], hosts: Iterable[str]) -> Names:
    spec = context.spec
    entries = (*spec.prefill.hosts, *spec.decode.hosts)
    named = [*context.plan.hosts, *(entry.name for entry in entries)]
    named += [entry.address for entry in entries if entry.address] + [spec.router.address or ""]
    logins = [spec.ssh.user or "", *(entry.ssh_user or "" for entry in entries), *users]
    homes = []
    for facts in context.facts.values():
        if facts.system is not None:
            named += [facts.system.hostname, facts.system.hostname.partition(".")[0]]
            logins.append(facts.system.user)
        named += list(facts.network.resolved) if facts.network is not None else []
        homes += [disk.path for disk in facts.disks or () if disk.purpose == "home"]
    return Names(
        hosts=tuple(dict.fromkeys(name for name in (*named, *hosts) if name)),
        users=tuple(dict.fromkeys(login for login in logins if login)),
        cluster=spec.cluster,
        homes=tuple(dict.fromkeys(home.rstrip("/") for home in homes)),
    )


def _read(document: Mapping[str, Any], file: str) -> Context:
    spec = parse(_as_yaml(document["cluster_file"]), file=file, environ={})
    # Only names of folders depend on the connector's digest.
    plan = make_plan(spec, environ={}, connector_digest="0" * 64, require_secrets=False)
    facts: dict[str, HostFacts] = {}
    for host, entry in document["hosts"].items():
        facts[host] = read_facts(
            host,
            entry["facts"],
            clock_offset_s=_number(entry.get("clock_offset_s")),
            clock_error_s=_number(entry.get("clock_error_s")),
        )
    network, probe, aws = (document.get(name) for name in ("network", "probe", "aws"))
    return Context(
        plan,
        facts,
        {host: _read_error(host, entry) for host, entry in document["unreachable"].items()},
        network=None if network is None else network_facts.from_json(network),
        probe=None if probe is None else probe_facts.from_json(probe),
        aws=None if aws is None else read_aws_facts(json.dumps(aws), file),
        probe_skipped=str(document.get("probe_skipped", "")),
        aws_skipped=str(document.get("aws_skipped", "")),
    )


def _as_yaml(values: Any) -> str:
    """A cluster file of these values: JSON is nearly YAML, but for dollars and surrogate pairs."""
    text = json.dumps(values, ensure_ascii=False).replace("$", "$$")
    return "".join(letter if " " <= letter <= "~" else f"\\U{ord(letter):08x}" for letter in text)


def _read_error(host: str, entry: Mapping[str, Any]) -> PdctlError:
    # The message of such an error begins with the host's name, which its constructor puts there.
    message, hint = str(entry["message"]).removeprefix(f"{host}: "), str(entry.get("hint", ""))
    kind = _HOST_ERRORS.get(str(entry["kind"]))
    if kind is not None:
        return kind(host, message, hint=hint)
    if entry["kind"] == "NodeError":
        return NodeError(host, str(entry.get("code", "")), message, hint=hint)
    return PdctlError(str(entry["message"]), hint=hint)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
