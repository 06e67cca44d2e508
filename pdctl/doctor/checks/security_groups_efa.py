"""SG001 to SG003: whether EFA traffic passes between prefill and decode. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pdctl.doctor.checks.ec2_view import Ec2View, on_efa, pairs_apart
from pdctl.doctor.checks.wording import listing, plural
from pdctl.doctor.context import Context
from pdctl.doctor.ec2_shapes import Interface
from pdctl.doctor.findings import Check, CheckFunction, Result, Severity, failed, passed, skipped
from pdctl.doctor.security_group_rules import EfaAnswer, Evaluator, MissingRule

SOURCES = (
    "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html",
    "https://github.com/open-mpi/ompi/issues/6795",
    "https://github.com/gardener/gardener-extension-provider-aws/issues/1832",
)


@dataclass(frozen=True)
class _Pair:
    """What is to be said about EFA between two hosts, from all pairs of their interfaces."""

    answers: tuple[EfaAnswer, ...]
    missing: tuple[MissingRule, ...]
    unreadable: tuple[str, ...]

    @property
    def blocked(self) -> bool:
        # A group that could not be read may hold the missing rule.
        return any(not answer.reachable and not answer.unreadable for answer in self.answers)

    @property
    def documented(self) -> bool:
        return all(answer.documented for answer in self.answers)


@dataclass(frozen=True)
class _Efa:
    """EFA interfaces and their groups, by host."""

    view: Ec2View

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator.of(self.view.aws)

    @cached_property
    def _known(self) -> dict[str, tuple[Interface, ...]]:
        return {host: self.view.efa_interfaces(host) for host in self.view.context.vllm_hosts}

    @cached_property
    def _sets(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Distinct sets of groups of the EFA interfaces: 32 interfaces seldom have more than one."""
        return {
            host: tuple(dict.fromkeys(tuple(sorted(one.groups)) for one in interfaces))
            for host, interfaces in self._known.items()
        }

    @cached_property
    def misplaced(self) -> dict[str, tuple[tuple[Interface, ...], str]]:
        """By host: its EFA interfaces that lack a group made for EFA which is in use here, and that group."""
        found = {}
        for host, interfaces in self._known.items():
            outside = tuple(one for one in interfaces if not list(self.evaluator.efa_groups(one.groups)))
            group = self._group_in_use(host, outside) if outside else ""
            if group:
                found[host] = (outside, group)
        return found

    @cached_property
    def _made_for_efa(self) -> dict[str, str]:
        """By VPC: the first group that is made for EFA and in use on an EFA interface."""
        found: dict[str, str] = {}
        for interfaces in self._known.values():
            for one in interfaces:
                for group in self.evaluator.efa_groups(one.groups):
                    found.setdefault(one.vpc_id, group)
        return found

    def _group_in_use(self, host: str, outside: Sequence[Interface]) -> str:
        own = (group for one in self.view.interfaces(host) for group in one.groups)
        return next(self.evaluator.efa_groups(own), "") or self._made_for_efa.get(outside[0].vpc_id, "")

    def interfaces(self, host: str) -> tuple[Interface, ...]:
        return self._known[host]

    def groups(self, host: str) -> str:
        """Groups of a host's EFA interfaces, in words."""
        return listing(dict.fromkeys(group for some in self._sets[host] for group in some))

    def why_not(self, host: str) -> str:
        """Why nothing can be said about a host; empty if something can."""
        if self.view.instance(host) is None:
            return self.view.why_not(host)
        if "DescribeSecurityGroups" in self.view.aws.refused and not self.evaluator.groups:
            return self.view.why_not(host, action="DescribeSecurityGroups")
        return "" if self._known[host] else "the instance has no EFA interface (see AWS005)"

    def pair(self, prefill: str, decode: str) -> _Pair:
        answers = tuple(
            self.evaluator.efa(one, other) for one in self._sets[prefill] for other in self._sets[decode]
        )  # fmt: skip
        certain = [answer for answer in answers if not answer.unreadable]
        wanted = [answer for answer in certain if not answer.reachable] or certain
        return _Pair(
            answers,
            tuple(dict.fromkeys(rule for answer in wanted for rule in answer.missing)),
            tuple(dict.fromkeys(group for answer in answers for group in answer.unreadable)),
        )


def _unreadable(view: Ec2View, groups: Iterable[str]) -> str:
    refused = view.aws.refused.get("DescribeSecurityGroups", "EC2 told nothing about it (another owner?)")
    return f"security group {listing(groups)} could not be read: {refused}"


def _each_pair(judge: Callable[[_Efa, str, str, _Pair], Iterable[Result]]) -> CheckFunction:
    """A check's function out of a judgement of one pair of hosts; a pair that EC2 tells nothing of is skipped."""

    def run(context: Context) -> Iterator[Result]:
        if not on_efa(context):
            return
        view = Ec2View(context)
        if context.aws is None:
            yield skipped(message=view.why_not())
            return
        efa = _Efa(view)
        for prefill, decode in pairs_apart(context):
            reason = efa.why_not(prefill) or efa.why_not(decode)
            if reason:
                yield skipped(prefill, decode, message=f"not checked: {reason}")
            else:
                yield from judge(efa, prefill, decode, efa.pair(prefill, decode))

    return run


def _passes(efa: _Efa, prefill: str, decode: str, pair: _Pair) -> Iterator[Result]:
    if pair.blocked:
        yield _blocked(efa, prefill, decode, pair)
    elif pair.unreadable:
        yield skipped(prefill, decode, message=_unreadable(efa.view, pair.unreadable))
    else:
        lacking = dict.fromkeys(group for answer in pair.answers for group in answer.without_self_rules)
        yield passed(
            prefill,
            decode,
            message="EFA traffic passes between all EFA interfaces",
            evidence=f"{listing(lacking)} has no such rules itself: fine here, but HyperPod's own health check "
            "wants them in every group"
            if lacking
            else "",
        )


def _blocked(efa: _Efa, prefill: str, decode: str, pair: _Pair) -> Result:
    moved = [host for host in (prefill, decode) if host in efa.misplaced]
    rules = "; ".join(str(rule) for rule in pair.missing)
    seen = f"prefill in {efa.groups(prefill)}, decode in {efa.groups(decode)}"
    found = "; ".join(dict.fromkeys(rule.found for rule in pair.missing if rule.found))
    return failed(
        prefill,
        decode,
        message=f"security groups block EFA: {rules or 'the interfaces have no security group'}",
        evidence=f"{seen}; {found}" if found else seen,
        fix="put the EFA interfaces into the group that is made for it: see SG003"
        if moved
        else "add the missing rules; they take effect at once. Addresses (0.0.0.0/0) never cover EFA"
        + ("" if _share(pair) else ". Better, as AWS documents it: one group for all EFA interfaces"),
        commands=() if moved else tuple(efa.view.commands.authorize(rule.rule) for rule in pair.missing),
    )


def _share(pair: _Pair) -> bool:
    return all(rule.rule.group == rule.rule.peer_group for rule in pair.missing)


def _documented(efa: _Efa, prefill: str, decode: str, pair: _Pair) -> Iterator[Result]:
    if pair.blocked:
        return  # SG001 says what there is to say
    if pair.unreadable:
        yield skipped(prefill, decode, message=_unreadable(efa.view, pair.unreadable))
    elif pair.documented:
        yield passed(prefill, decode, message="one group lets all traffic to and from itself through")
    else:
        yield failed(
            prefill,
            decode,
            message="the rules for EFA are spread over several groups: it should pass, but AWS documents one group "
            "that lets all traffic to and from itself through",
            evidence="; ".join(str(rule) for rule in pair.missing) or "no group is common to both sides",
            fix="put all EFA interfaces into one group with an inbound and an outbound rule for all traffic that "
            "name the group itself; or trust the real WRITE of the area XFER",
            commands=tuple(efa.view.commands.authorize(rule.rule) for rule in pair.missing),
        )


def _right_groups(context: Context) -> Iterator[Result]:
    if not on_efa(context):
        return
    view = Ec2View(context)
    if context.aws is None:
        yield skipped(message=view.why_not())
        return
    efa = _Efa(view)
    for host in context.vllm_hosts:
        reason = efa.why_not(host)
        interfaces = efa.interfaces(host)
        unread = [group for one in interfaces for group in one.groups if group not in efa.evaluator.groups]
        if reason:
            yield skipped(host, message=f"not checked: {reason}")
        elif host in efa.misplaced:
            yield _outside(view, host, *efa.misplaced[host], total=len(interfaces))
        elif unread:
            yield skipped(host, message=_unreadable(view, dict.fromkeys(unread)))
        elif all(list(efa.evaluator.efa_groups(one.groups)) for one in interfaces):
            yield passed(host, message="every EFA interface is in a group made for EFA")
        # Else no group here is made for EFA, and SG001 and SG002 say what to do about that.


def _outside(view: Ec2View, host: str, outside: tuple[Interface, ...], group: str, *, total: int) -> Result:
    names = {group: name for one in outside for group, name in zip(one.groups, one.group_names, strict=False)}
    unread = [name for name in names if name not in view.aws.security_groups]
    shown = listing(f"{name} ({said})" if said else name for name, said in names.items()) or "no group"
    cards = listing((one.card if one.card is not None else "?" for one in outside), 40)
    return failed(
        host,
        message=f"{len(outside)} of {plural(total, 'EFA interface')} lack {group}, the group that lets EFA pass; they "
        f"are in {shown}",
        evidence=f"cards {cards}" + (f"; {_unreadable(view, unread)}" if unread else ""),
        fix=f"add {group} to these interfaces; it takes effect at once, without a restart",
        commands=tuple(view.commands.set_groups(one.id, dict.fromkeys((*one.groups, group))) for one in outside),
        # A group that nobody could read may let EFA pass as well.
        severity=Severity.WARNING if unread else Severity.ERROR,
    )


CHECKS: tuple[Check, ...] = (
    Check(
        id="SG001",
        title="Security groups let EFA pass",
        severity=Severity.ERROR,
        what="For each pair of a prefill and a decode host, and every EFA interface of both: an outbound and an "
        "inbound rule, on each side, for all protocols, that names a group of the other side. The rules of all groups "
        "of an interface add up. Rules for addresses (0.0.0.0/0, ::/0, prefix lists), for tcp or udp alone, and for "
        "groups of another VPC do not count. A group that cannot be read gives skipped. Network ACLs are not judged.",
        why="EFA packets have no IP addresses, so only a rule that names a group covers them. The commonest fault is "
        "the missing outbound rule: TCP works, devices are ACTIVE, and the first transfer hangs until a time-out "
        "(libfabric: unreachable remote, error 4126; NIXL: handshake not received after 60 s).",
        fix="One group for all EFA interfaces, with two rules of type All traffic whose source and destination are the "
        "group itself; `pdctl doctor --fix-commands` prints them. An outbound rule for 0.0.0.0/0 may stay. In CDK, "
        "`allowAllOutbound: true` drops explicit outbound rules.",
        run=_each_pair(_passes),
        sources=(*SOURCES, "https://github.com/aws/aws-parallelcluster/issues/3590"),
        blocking=True,
    ),
    Check(
        id="SG002",
        title="The rules for EFA have the form that AWS documents",
        severity=Severity.WARNING,
        what="Where EFA passes: whether one group, on both sides, holds both rules that name the group itself. Rules "
        "spread over two groups, or two groups that name each other, are a warning.",
        why="Cross references work as group references do, but AWS documents and supports the one form alone, and "
        "whoever tidies up one of the groups breaks the cluster.",
        fix="Put all EFA interfaces into one group that lets all traffic to and from itself through.",
        run=_each_pair(_documented),
        sources=SOURCES,
    ),
    Check(
        id="SG003",
        title="Every EFA interface has the group for EFA",
        severity=Severity.ERROR,
        what="Where a group made for EFA is in use on the host or on its peers: whether all EFA interfaces of the host "
        "have it. The group shown for an instance is that of its primary interface only.",
        why="`efa-only` interfaces that were added later often have the group `default`, which lacks the outbound "
        "rule. Everything looks right in the console, and EFA is blocked on those cards.",
        fix="`aws ec2 modify-network-interface-attribute --network-interface-id ENI --groups ...` with all groups that "
        "the interface should have; no restart is needed.",
        run=_right_groups,
        sources=(*SOURCES, "https://github.com/awslabs/awsome-distributed-ai/pull/259"),
    ),
)
