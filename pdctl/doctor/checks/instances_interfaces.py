"""AWS005, AWS006: EFA interfaces attached to the instances, and on which network cards. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pdctl.doctor.checks.ec2_view import Ec2View, each_instance, on_efa
from pdctl.doctor.checks.wording import listing, plural
from pdctl.doctor.ec2_shapes import read_groups, text
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.security_group_rules import has_self_rules

_LAYOUT = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html"


def _attached(view: Ec2View, host: str, instance: Mapping[str, Any]) -> Iterable[Result]:
    count, most = len(view.efa_interfaces(host)), view.most_efa(host)
    if most == 0:
        return  # AWS003 says what there is to say
    if not isinstance(instance.get("NetworkInterfaces"), list):
        yield skipped(host, message="EC2 does not tell the interfaces of the instance")
    elif count and most is None:
        yield skipped(host, message=f"{plural(count, 'EFA interface')}; how many this type takes is unknown")
    elif count == 0 or (most is not None and count < most):
        yield _too_few(view, host, instance, count, most)
    else:
        yield passed(host, message=f"all {count} EFA interfaces are attached")


def _too_few(view: Ec2View, host: str, instance: Mapping[str, Any], count: int, most: int | None) -> Result:
    name = view.type_name(host)
    kinds = Counter(one.kind for one in view.interfaces(host))
    block = instance.get("InstanceLifecycle") == "capacity-block"
    return failed(
        host,
        message=f"{count} of {most if most is not None else 'unknown'} EFA interfaces of {name} are attached"
        + (": there is no EFA at all" if not count else ", so part of the bandwidth is missing"),
        evidence="attached: " + (", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())) or "none"),
        fix="relaunch with one `efa-only` interface on each network card (`--network-interfaces`: card 0 device 0 "
        "`interface`, card 0 device 1 and every further card device 0 `efa-only`); or stop the instance, attach them "
        "and start it again, as the commands do. EFA cannot be attached to a running instance. Stopping loses the "
        "data of instance-store disks and maybe the capacity"
        + (": this instance belongs to a capacity block" if block else ""),
        commands=_attach(view, host, text(instance.get("InstanceId"))),
        severity=Severity.WARNING if count else Severity.ERROR,
    )


def _attach(view: Ec2View, host: str, instance: str) -> tuple[str, ...]:
    """Commands that attach an ``efa-only`` interface to every card that lacks one; none if something is unknown."""
    cards, interfaces = view.efa_cards(host), view.interfaces(host)
    primary = next((one for one in interfaces if one.primary), interfaces[0] if interfaces else None)
    if not cards or primary is None or not instance or not primary.subnet_id:
        return ()
    groups = read_groups(view.aws.security_groups)
    attached = dict.fromkeys(group for one in interfaces for group in one.groups)
    complete = [group for group in attached if group in groups and has_self_rules(groups[group])]
    chosen = complete[:1] or list(primary.groups)
    used: dict[int, set[int]] = {}
    taken = set()
    for one in interfaces:
        used.setdefault(one.card or 0, set()).add(one.device or 0)
        if one.is_efa:
            taken.add(one.card or 0)
    lines = [view.commands.ec2("stop-instances", "--instance-ids", instance)]
    lines.append(view.commands.ec2("wait", "instance-stopped", "--instance-ids", instance))
    for card in cards:
        if card in taken:
            continue
        device = next(number for number in range(len(interfaces) + 1) if number not in used.get(card, ()))
        create = view.commands.ec2(
            "create-network-interface", "--subnet-id", primary.subnet_id, "--groups", *chosen,
            "--interface-type", "efa-only", "--query", "NetworkInterface.NetworkInterfaceId", "--output", "text",
        )  # fmt: skip
        attach = view.commands.ec2(
            "attach-network-interface", "--instance-id", instance,
            "--network-card-index", str(card), "--device-index", str(device),
        )  # fmt: skip
        # The new interface's id is known to the shell alone.
        lines.append(f'{attach} --network-interface-id "$({create})"')
    lines.append(view.commands.ec2("start-instances", "--instance-ids", instance))
    return tuple(lines)


def _cards(view: Ec2View, host: str, instance: Mapping[str, Any]) -> Iterator[Result]:
    del instance
    interfaces, cards = view.efa_interfaces(host), view.efa_cards(host)
    if not interfaces:
        return  # AWS005 says what there is to say
    if cards is None:
        yield skipped(host, message="which network cards of this type take EFA is unknown")
        return
    wrong = sorted({one.card for one in interfaces if one.card is not None and one.card not in cards})
    per_card = Counter(one.card for one in interfaces if one.card is not None)
    crowded = sorted(card for card, count in per_card.items() if count > 1)
    seen = f"EFA on cards {listing(sorted(per_card), 40)}; {view.type_name(host)} takes it on {_ranges(cards)}"
    if wrong:
        yield failed(
            host,
            message=f"network card {listing(wrong)} of {view.type_name(host)} takes no EFA, but has an EFA interface",
            evidence=seen,
            fix=f"put the EFA interfaces on the cards {_ranges(cards)}, one on each",
        )
    elif crowded:
        yield failed(
            host,
            message=f"several EFA interfaces share network card {listing(crowded)}",
            evidence=seen,
            fix=f"put one EFA interface on each of the cards {_ranges(cards)}",
            severity=Severity.WARNING,
        )
    else:
        yield passed(host, message="one EFA interface on each network card in use", evidence=seen)


def _ranges(cards: tuple[int, ...]) -> str:
    whole = cards and cards == tuple(range(cards[0], cards[-1] + 1))
    return f"{cards[0]} to {cards[-1]}" if whole and len(cards) > 1 else listing(cards, 40)


def _example_launch(cards: Iterable[int]) -> str:
    """Words for ``--network-interfaces`` of `aws ec2 run-instances`, for the explain text."""
    first = "NetworkCardIndex=0,DeviceIndex=0,InterfaceType=interface,SubnetId=SUBNET,Groups=GROUP"
    rest = (
        f"NetworkCardIndex={card},DeviceIndex={0 if card else 1},InterfaceType=efa-only,SubnetId=SUBNET,Groups=GROUP"
        for card in cards
    )
    return shlex.join(["--network-interfaces", first, *rest])


CHECKS: tuple[Check, ...] = (
    Check(
        id="AWS005",
        title="All EFA interfaces are attached",
        severity=Severity.ERROR,
        what="Attached interfaces of the types `efa` and `efa-only`, against `MaximumEfaInterfaces` of the instance "
        "type. None is an error, fewer than the most a warning.",
        why="An ordinary launch attaches one ENA interface and no EFA, on any type. NIXL spreads KV over all devices: "
        "with 8 of 16 it has half the bandwidth. On Trainium a number that does not fit the devices makes memory "
        "registration fail.",
        fix=f"Launch with `{_example_launch((0, 1))}`, and so on for every network card. An instance with several "
        "interfaces gets no automatic public IPv4 address: reach it by its private one. Interfaces of an existing "
        "instance can be attached only while it is stopped.",
        run=each_instance(_attached, applies=on_efa),
        sources=(
            _LAYOUT,
            "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/create-efa.html",
            "https://github.com/ai-dynamo/nixl/pull/1994",
        ),
        blocking=True,
    ),
    Check(
        id="AWS006",
        title="EFA interfaces are on the right network cards",
        severity=Severity.ERROR,
        what="The network card of every EFA interface, against `NetworkCards[].InterfaceTypes` of the type: a card "
        "that takes no EFA (card 0 of p6-b300) is an error, two EFA interfaces on one card a warning.",
        why="Such a layout cannot be launched, or two interfaces share the bandwidth of one card.",
        fix="One `efa-only` interface on each card that takes it; on p6-b300 these are the cards 1 to 16.",
        run=each_instance(_cards, applies=on_efa),
        sources=(_LAYOUT,),
    ),
)
