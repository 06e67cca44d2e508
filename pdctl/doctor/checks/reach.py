"""SSH0xx: the hosts are reached, report their facts, and are the machines that the cluster file takes them for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from pdctl.doctor.checks.per_host import not_reached
from pdctl.doctor.checks.wording import listing
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.errors import CommandTimeout, HostKeyRejected, HostUnreachable, LoginFailed, NodeError, PdctlError
from pdctl.plan import InstancePlan
from pdctl.spec import is_local

SLOW_S = 20.0
"""The script needs 1 to 3 s on a healthy host; each of its probes has a time-out of its own."""


def _reason(host: str, error: PdctlError) -> str:
    """Text of an error without the host's name, which the report gives already."""
    return error.message.removeprefix(f"{host}: ")


def _stage(kind: type[PdctlError], message: str, fix: str) -> Callable[[Context], Iterator[Result]]:
    """A check of one stage of getting in: which error belongs to it, and what that means.

    Stages follow each other, so a host that failed an earlier one was not tried at the later ones.
    """
    order: tuple[type[PdctlError], ...] = (HostUnreachable, HostKeyRejected, LoginFailed)

    def run(context: Context) -> Iterator[Result]:
        for host in context.plan.hosts:
            if is_local(host):
                continue
            error = context.unreachable.get(host)
            if isinstance(error, kind):
                yield failed(host, message=message, evidence=_reason(host, error), fix=error.hint or fix)
            elif isinstance(error, order[: order.index(kind)]):
                yield skipped(host, message="not checked: an earlier step of the login failed")
            elif error is None and host not in context.facts:
                yield skipped(host, message="not checked: the host was not asked")
            else:
                yield passed(host, message="as it should be")

    return run


def _facts_reported(context: Context) -> Iterator[Result]:
    for host in context.plan.hosts:
        facts = context.facts.get(host)
        error = context.unreachable.get(host)
        if facts is not None:
            yield _document(facts)
        elif isinstance(error, (HostUnreachable, HostKeyRejected, LoginFailed)):
            yield skipped(host, message="not checked: pdctl could not log in")
        elif error is None:
            yield skipped(host, message="not checked: the host was not asked")
        elif isinstance(error, CommandTimeout):
            yield failed(
                host,
                message="the host took too long to report its facts",
                evidence=_reason(host, error),
                fix="log in and see what is slow there (a network file system that hangs, an overloaded machine: "
                "`uptime`, `df`); if the machine is only slow, raise `ssh.command_timeout_s` in the cluster file",
            )
        else:
            fix = "run `sh -c 'command -v python3; python3 --version'` on the host over SSH and look at what it says"
            what = f" ({error.code})" if isinstance(error, NodeError) else ""
            yield failed(
                host,
                message=f"the host was reached, but did not report its facts{what}",
                evidence=_reason(host, error),
                fix=error.hint or fix,
            )


def _document(facts: HostFacts) -> Result:
    host = facts.host
    parts = ("system", "limits", "memory", "disks", "network", "rdma", "interpreters", "environment")
    if all(getattr(facts, part) is None for part in parts):
        return failed(
            host,
            message="nothing in the host's report can be used",
            evidence=facts.why_missing("system"),
            fix="run pdctl of one version only, and look at what the login shell's start-up files write or change",
        )
    if facts.took_s is not None and facts.took_s > SLOW_S:
        return failed(
            host,
            severity=Severity.WARNING,
            message=f"the host took more than {SLOW_S:g} s to report its facts",
            evidence=f"the script ran {facts.took_s:.1f} s",
            fix="see what is slow there before launching: `uptime`, `df`, `nvidia-smi`",
        )
    return passed(host, message="facts reported", evidence="" if facts.took_s is None else f"in {facts.took_s:.1f} s")


def _one_machine(context: Context) -> Iterator[Result]:
    known: dict[str, list[str]] = {}
    for host in context.plan.hosts:
        facts = context.facts.get(host)
        if facts is None:
            yield not_reached(host)
        elif facts.system is None:
            yield skipped(host, message=f"not checked: {facts.why_missing('system')}")
        elif not facts.system.machine_id:
            yield skipped(host, message="not checked: the host has no machine id (/etc/machine-id)")
        else:
            known.setdefault(facts.system.machine_id, []).append(host)
    for hosts in known.values():
        if len(hosts) == 1:
            yield passed(hosts[0], message="a machine of its own")
        for first, second in combinations(hosts, 2):
            yield _judge_twice(context, first, second)


def _judge_twice(context: Context, first: str, second: str) -> Result:
    clashes: list[str] = []
    for one in context.instances_on(first):
        for other in context.instances_on(second):
            clashes += _clashes(one, other)
    evidence = "the same machine id, boot and network"
    if clashes:
        return failed(
            first,
            second,
            message="two host names are one machine, and what is planned for them collides there",
            evidence=f"{evidence}; both want {listing(clashes)}",
            fix="name the machine once and use `instances_per_host`, or give the second name other ports and "
            "`devices`; if two machines were meant, correct the address behind one of the names",
        )
    return failed(
        first,
        second,
        severity=Severity.WARNING,
        message="two host names are one machine",
        evidence=evidence,
        fix="if two machines were meant, correct the address behind one of the names; if it is on purpose, name the "
        "machine once, so that pdctl keeps ports, devices and CPU cores apart",
    )


def _clashes(one: InstancePlan, other: InstancePlan) -> Iterator[str]:
    for mine in one.ports:
        for theirs in other.ports:
            wild = {mine.address, theirs.address} & {"0.0.0.0", "::", "", "*"}  # noqa: S104
            if mine.port == theirs.port and (wild or mine.address == theirs.address):
                yield f"port {mine.port} ({one.name} {mine.purpose}, {other.name} {theirs.purpose})"
    for device in sorted(set(one.devices) & set(other.devices)):
        yield f"device {device} ({one.name}, {other.name})"


_SSH_PAGE = "https://man.openbsd.org/ssh_config"

CHECKS: tuple[Check, ...] = (
    Check(
        id="SSH001",
        title="The host answers SSH",
        severity=Severity.ERROR,
        what="Whether a connection to each host's SSH port came about within `ssh.connect_timeout_s` (10 s unless "
        "set), through the jump hosts of ~/.ssh/config.",
        why="pdctl does everything over SSH: a host that does not answer can neither be checked nor launched.",
        fix="Try `ssh HOST true`. Check that the machine runs, the name resolves, the port is right (`ssh.port`), the "
        "security group or firewall lets port 22 in from here, and the VPN or jump host is up.",
        run=_stage(
            HostUnreachable,
            "the host cannot be reached by SSH",
            "try `ssh HOST true`; check that the machine runs, and its name, port, firewall and jump host",
        ),
        sources=(_SSH_PAGE,),
        blocking=True,
    ),
    Check(
        id="SSH002",
        title="The host's key is trusted",
        severity=Severity.ERROR,
        what="Whether the key that the host shows is the one in known_hosts. With `ssh.host_keys: accept-new` an "
        "unknown key is taken, a changed one never.",
        why="A wrong key means another machine (often a new instance at an old address), or somebody in between.",
        fix="For a machine that was replaced: `ssh-keygen -R HOST`, then `ssh HOST` and compare the fingerprint with "
        "the one that the machine's console shows. For new machines: `ssh.host_keys: accept-new`.",
        run=_stage(
            HostKeyRejected,
            "the host's key is not trusted",
            "compare the key's fingerprint with the machine's console, then `ssh-keygen -R HOST` and `ssh HOST`",
        ),
        sources=("https://man.openbsd.org/sshd#SSH_KNOWN_HOSTS_FILE_FORMAT",),
        blocking=True,
    ),
    Check(
        id="SSH003",
        title="The login is accepted",
        severity=Severity.ERROR,
        what="Whether the host accepts the user (`ssh.user`) with a key of the agent or an identity file.",
        why="Without a login nothing can be checked or launched there.",
        fix="Try `ssh -v USER@HOST true`: is it the right user (ubuntu, ec2-user), is the key loaded (`ssh-add -l`), "
        "and is its public half in ~/.ssh/authorized_keys there?",
        run=_stage(
            LoginFailed,
            "the host accepted no key of yours",
            "check `ssh.user`, `ssh-add -l` and the host's ~/.ssh/authorized_keys",
        ),
        sources=(_SSH_PAGE,),
        blocking=True,
    ),
    Check(
        id="SSH004",
        title="The host reports its facts",
        severity=Severity.ERROR,
        what="Whether the script that collects the facts ran and its answer can be read. It needs Python 3.8 or newer "
        f"and no root. Running longer than {SLOW_S:g} s is a warning.",
        why="All other checks look at these facts; what could not be collected is skipped, not passed. A script that "
        "is slow points to a host that hangs: a dead network mount, a driver that does not answer.",
        fix="Read the evidence. Without a Python: install one, or name it with `python` in the cluster file. Too slow: "
        "look at the load and at mounts that hang.",
        run=_facts_reported,
        blocking=True,
    ),
    Check(
        id="SSH005",
        title="Every host name is a machine of its own",
        severity=Severity.ERROR,
        what="Hosts whose machine id, boot id and network namespace are the same are one machine. An error if planned "
        "ports or devices collide there, else a warning.",
        why="pdctl keeps instances of one *name* apart (ports, devices, cores). Two names of one machine are planned "
        "as two machines: the second instance finds its port or GPU taken, or both share what was meant for one.",
        fix="Name each machine once; `instances_per_host` puts several instances on it.",
        run=_one_machine,
        sources=("https://www.freedesktop.org/software/systemd/man/latest/machine-id.html",),
        blocking=True,
    ),
)
