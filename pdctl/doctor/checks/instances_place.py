"""AWS009 to AWS012: VPC, Availability Zone, subnet and placement group of prefill and decode. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdctl.doctor.checks.ec2_view import Ec2View, concerns_ec2, on_efa, pairs_apart
from pdctl.doctor.checks.wording import listing
from pdctl.doctor.context import Context
from pdctl.doctor.ec2_shapes import mapping, text
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.instance_table import SOURCE


def _same_vpc(context: Context) -> Iterator[Result]:
    if not concerns_ec2(context):
        return
    view, efa = Ec2View(context), on_efa(context)
    for prefill, decode in pairs_apart(context):
        one, other = view.vpcs(prefill), view.vpcs(decode)
        if not one or not other:
            unknown = prefill if not one else decode
            yield skipped(prefill, decode, message=f"the VPC is unknown: {view.why_not(unknown)}")
        elif set(one) == set(other) and len(set(one)) == 1:
            yield passed(prefill, decode, message="one VPC", evidence=one[0])
        else:
            yield failed(
                prefill,
                decode,
                message="different VPCs: EFA cannot leave its VPC, peering does not help"
                if efa
                else "different VPCs: KV travels through peering or a gateway",
                evidence=f"prefill in {', '.join(one)}; decode in {', '.join(other)}",
                fix="launch prefill and decode in one VPC" + ("" if efa else ", if the detour matters"),
                severity=Severity.ERROR if efa else Severity.INFO,
            )


def _same_zone(context: Context) -> Iterator[Result]:
    if not concerns_ec2(context):
        return
    view, efa = Ec2View(context), on_efa(context)
    for prefill, decode in pairs_apart(context):
        ids = view.zone_id(prefill), view.zone_id(decode)
        # Within one account names tell as much; both must be of the same sort.
        one, other = ids if all(ids) else (view.zone_name(prefill), view.zone_name(decode))
        if not one or not other:
            unknown = prefill if not one else decode
            yield skipped(prefill, decode, message=f"the Availability Zone is unknown: {view.why_not(unknown)}")
        elif one == other:
            yield passed(prefill, decode, message="one Availability Zone", evidence=one)
        else:
            yield failed(
                prefill,
                decode,
                message="different Availability Zones: EFA traffic cannot cross them"
                if efa
                else "different Availability Zones: higher latency, and the traffic is charged",
                evidence=f"prefill in {one}; decode in {other}",
                fix="launch prefill and decode in subnets of one Availability Zone (compare its id, names differ "
                "between accounts)" + ("" if efa else ", if that matters"),
                severity=Severity.ERROR if efa else Severity.INFO,
            )


def _same_subnet(context: Context) -> Iterator[Result]:
    if not on_efa(context):
        return
    view = Ec2View(context)
    for prefill, decode in pairs_apart(context):
        one, other = view.subnets(prefill), view.subnets(decode)
        if not one or not other:
            unknown = prefill if not one else decode
            yield skipped(prefill, decode, message=f"the subnet is unknown: {view.why_not(unknown)}")
        elif set(one) == set(other) and len(set(one)) == 1:
            yield passed(prefill, decode, message="one subnet", evidence=one[0])
        elif view.zone_id(prefill) and view.zone_id(prefill) == view.zone_id(decode):
            yield failed(
                prefill,
                decode,
                message="EFA interfaces in different subnets of one Availability Zone, which AWS allows today",
                evidence=f"prefill in {', '.join(one)}; decode in {', '.join(other)}",
                fix="nothing, as long as the WRITE of the area XFER works; else put all into one subnet",
            )
        # In different zones the subnets differ of necessity: AWS010 says what there is to say.


def _placement(context: Context) -> Iterator[Result]:
    if not on_efa(context) or len(context.vllm_hosts) < 2:
        return
    view = Ec2View(context)
    if context.aws is None:
        yield skipped(message=view.why_not())
        return
    clusters: dict[str, list[str]] = {}
    for host in context.vllm_hosts:
        instance = view.instance(host)
        if instance is None:
            yield skipped(host, message=f"not checked: {view.why_not(host)}")
            continue
        name = text(mapping(instance.get("Placement")).get("GroupName"))
        strategy = text(view.aws.placement_groups.get(name, {}).get("Strategy"))
        if not name:
            yield _ungrouped(host, text(instance.get("InstanceLifecycle")) == "capacity-block")
        elif not strategy:
            reason = view.why_not(host, action="DescribePlacementGroups")
            yield skipped(host, message=f"the strategy of placement group {name} is unknown: {reason}")
        elif strategy != "cluster":
            yield failed(
                host,
                message=f"placement group {name} has the strategy {strategy}, which keeps instances apart",
                fix="launch prefill and decode into one placement group with the strategy `cluster`",
            )
        else:
            clusters.setdefault(name, []).append(host)
    if len(clusters) == 1:
        name, hosts = next(iter(clusters.items()))
        yield passed(*hosts, message=f"in placement group {name}", evidence="strategy cluster")
    elif clusters:
        yield failed(
            *(host for hosts in clusters.values() for host in hosts),
            message=f"the hosts are in {len(clusters)} different placement groups, which may be far from each other",
            evidence="; ".join(f"{name}: {listing(hosts)}" for name, hosts in clusters.items()),
            fix="launch prefill and decode into one placement group with the strategy `cluster`",
        )


def _ungrouped(host: str, capacity_block: bool) -> Result:
    if capacity_block:
        return passed(host, message="a capacity block stands close together without a placement group")
    return failed(
        host,
        message="in no placement group: the hosts may be far from each other",
        fix="launch prefill and decode into one placement group with the strategy `cluster`; it is advice, EFA works "
        "without",
    )


_GROUPS = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-groups.html"

CHECKS: tuple[Check, ...] = (
    Check(
        id="AWS009",
        title="Prefill and decode are in one VPC",
        severity=Severity.ERROR,
        what="The VPC of the EFA interfaces (of the instance where there are none), by the API or the host's "
        "metadata. An error on EFA, for information elsewhere.",
        why="EFA traffic is not routed: it does not leave a VPC, and peering or a transit gateway does not carry it.",
        fix="Launch prefill and decode in one VPC.",
        run=_same_vpc,
        sources=(SOURCE,),
        blocking=True,
    ),
    Check(
        id="AWS010",
        title="Prefill and decode are in one Availability Zone",
        severity=Severity.ERROR,
        what="The id of the Availability Zone (`use2-az2`), by the API or the host's metadata; names only if ids are "
        "not known, because `us-east-2a` means another zone in another account. An error on EFA, for information "
        "elsewhere.",
        why="EFA traffic cannot cross Availability Zones. TCP can, with more latency and at a price per gigabyte.",
        fix="Launch prefill and decode in subnets of one Availability Zone.",
        run=_same_zone,
        sources=(
            SOURCE,
            "https://docs.aws.amazon.com/ram/latest/userguide/working-with-az-ids.html",
            "https://github.com/aws-samples/aws-deep-learning-ami-ubuntu-dcv-desktop/issues/25",
        ),
        blocking=True,
    ),
    Check(
        id="AWS011",
        title="EFA interfaces are in one subnet",
        severity=Severity.INFO,
        what="The subnets of the EFA interfaces of prefill and decode. Different subnets of one Availability Zone are "
        "for information only.",
        why="AWS used to ask for one subnet, and today asks for one Availability Zone and VPC. If nothing else "
        "explains a handshake that fails, this may.",
        fix="Nothing, as long as the real WRITE of the area XFER works; else one subnet.",
        run=_same_subnet,
        sources=(SOURCE, "https://github.com/ofiwg/libfabric/blob/main/prov/efa/src/efa_strerror.c"),
    ),
    Check(
        id="AWS012",
        title="The hosts share a cluster placement group",
        severity=Severity.WARNING,
        what="The placement group of each instance and its strategy. None, `spread`, `partition`, or several groups "
        "are a warning. Instances of a capacity block stand close together anyway.",
        why="A cluster placement group keeps the network path short. EFA works without one, with more latency.",
        fix="Launch prefill and decode into one placement group with the strategy `cluster`.",
        run=_placement,
        sources=(_GROUPS, "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html"),
    ),
)
