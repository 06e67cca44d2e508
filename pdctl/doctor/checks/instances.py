"""AWS0xx: the EC2 instances, what their types can do, and where they stand. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pdctl.doctor.checks import instances_interfaces, instances_place, instances_type
from pdctl.doctor.checks.ec2_view import Ec2View, concerns_ec2, each_instance
from pdctl.doctor.checks.wording import listing, plural
from pdctl.doctor.context import Context
from pdctl.doctor.ec2_shapes import mapping, number, state_of, text
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped

CONTAINER_HOP_LIMIT = 2
"""What AWS advises where containers need the metadata: one hop more than the host itself."""


def _asked(context: Context) -> Iterator[Result]:
    if not concerns_ec2(context):
        return
    view = Ec2View(context)
    if context.aws is None:
        yield skipped(message=view.why_not())
        return
    for action, reason in sorted(view.aws.refused.items()):
        yield skipped(message=f"{action}: {reason}")
    if "DescribeInstances" not in view.aws.refused:
        # The shape of an account is nobody's business in a report: figures only.
        yield passed(
            message=f"EC2 told of {plural(len(view.aws.instances), 'host')} in {view.aws.region or 'recorded answers'}",
            evidence=f"{plural(len(view.aws.security_groups), 'security group')}, "
            f"{plural(len(view.aws.instance_types), 'instance type')}, {plural(len(view.aws.subnets), 'subnet')}",
        )


def _running(view: Ec2View, host: str, instance: Mapping[str, Any]) -> Iterable[Result]:
    state, name = state_of(instance), text(instance.get("InstanceId"))
    if state == "running":
        yield passed(host, message="the instance runs", evidence=name)
    elif not state:
        yield skipped(host, message="EC2 does not tell the state of the instance", evidence=name)
    else:
        stopped = state in ("stopped", "stopping")
        yield failed(
            host,
            message=f"the instance is {state}, not running",
            evidence=name,
            fix="start it" if stopped else "launch another, or take the host out of the cluster file",
            commands=(view.commands.ec2("start-instances", "--instance-ids", name),) if stopped and name else (),
        )


def _same_type(view: Ec2View, host: str, instance: Mapping[str, Any]) -> Iterable[Result]:
    told = {"the EC2 API": text(instance.get("InstanceType"))}
    cloud = view.cloud(host)
    if cloud is None:
        facts = view.context.facts.get(host)
        reason = facts.why_missing("cloud") if facts is not None else "the host reported no facts (see the area SSH)"
        yield skipped(host, message=f"not checked: {reason}")
        return
    told["instance metadata"] = cloud.instance_type or ""
    told["DMI"] = cloud.product if cloud.vendor == "Amazon EC2" else ""
    known = {source: name for source, name in told.items() if name}
    seen = "; ".join(f"{source}: {name}" for source, name in known.items())
    if len(known) < 2:
        yield skipped(host, message="only one source tells the instance type", evidence=seen)
    elif len(set(known.values())) == 1:
        yield passed(host, message="EC2 and the host agree on the instance type", evidence=seen)
    else:
        yield failed(
            host,
            message="EC2 and the host name different instance types: this may be another instance than the host",
            evidence=seen,
            fix="set `address` of the host to its private address, and check `aws.profile` and `aws.region`",
        )


def _metadata(view: Ec2View, host: str, instance: Mapping[str, Any]) -> Iterable[Result]:
    facts = view.context.facts.get(host)
    container = facts.system.container if facts is not None and facts.system is not None else None
    error = facts.cloud.metadata_error if facts is not None and facts.cloud is not None else ""
    if not container and not error:
        return
    options = mapping(instance.get("MetadataOptions"))
    hops, name = number(options.get("HttpPutResponseHopLimit")), text(instance.get("InstanceId"))
    off = options.get("HttpEndpoint") == "disabled"
    seen = f"HttpEndpoint {options.get('HttpEndpoint')}, HttpPutResponseHopLimit {hops}"
    if not off and hops is None:
        yield skipped(host, message="EC2 does not tell the metadata options of the instance")
    elif off or (container and hops is not None and hops < CONTAINER_HOP_LIMIT):
        yield failed(
            host,
            message="instance metadata is turned off"
            if off
            else f"a container cannot reach instance metadata: the hop limit is {hops}, a container needs "
            f"{CONTAINER_HOP_LIMIT}",
            evidence=f"{seen}; {error}" if error else seen,
            fix="raise the hop limit (no restart needed), or leave it: pdctl then knows less about the host itself",
            commands=(
                view.commands.ec2(
                    "modify-instance-metadata-options", "--instance-id", name,
                    "--http-endpoint", "enabled", "--http-put-response-hop-limit", str(CONTAINER_HOP_LIMIT),
                ),
            )
            if name
            else (),
        )  # fmt: skip
    else:
        yield passed(host, message="instance metadata is open to this host", evidence=seen)


def _region(context: Context) -> Iterator[Result]:
    if not concerns_ec2(context):
        return
    regions: dict[str, list[str]] = {}
    for host in context.vllm_hosts:
        cloud = Ec2View(context).cloud(host)
        if cloud is not None and cloud.region:
            regions.setdefault(cloud.region, []).append(host)
    seen = "; ".join(f"{region}: {listing(hosts)}" for region, hosts in sorted(regions.items()))
    wanted = context.spec.aws.region if context.spec.aws is not None else None
    if not regions:
        yield skipped(message="no host could tell its region (instance metadata)")
    elif len(regions) > 1:
        efa = context.spec.fabric == "efa"
        yield failed(
            message=f"the hosts are in {len(regions)} regions; "
            + ("EFA does not leave an Availability Zone" if efa else "KV would travel between regions"),
            evidence=seen,
            fix="take hosts of one region; EC2 is asked in one region only",
            severity=Severity.ERROR if efa else Severity.WARNING,
        )
    elif wanted and wanted not in regions:
        yield failed(
            message=f"`aws.region` is {wanted}, but the hosts are in {next(iter(regions))}",
            evidence=seen,
            fix=f"set `aws.region` to {next(iter(regions))} in the cluster file",
            severity=Severity.WARNING,
        )
    else:
        yield passed(message=f"all hosts are in {next(iter(regions))}", evidence=seen)


_IMDS = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-options.html"

_OWN: tuple[Check, ...] = (
    Check(
        id="AWS001",
        title="EC2 answers",
        severity=Severity.WARNING,
        what="Whether the EC2 API could be asked about the hosts, and which of its calls were refused. A refused call "
        "is no failure: the checks that need its answer are skipped.",
        why="Security groups, attached EFA interfaces and placement are known to the API alone. Without it the "
        "commonest fault of EFA clusters, a missing security group rule, stays unseen until transfers hang.",
        fix="Log in to AWS on the machine that runs pdctl, set `aws: {region, profile}` in the cluster file, and give "
        "the identity the read-only IAM policy of docs/doctor.md. Without credentials: `--aws-facts FILE`.",
        run=_asked,
        sources=("https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/iam-policies-for-amazon-ec2.html",),
    ),
    Check(
        id="AWS002",
        title="The instance runs",
        severity=Severity.ERROR,
        what="The state of each host's instance by the EC2 API. The host is matched by the instance id of its "
        "metadata, else by its address or DNS name; one that cannot be matched is skipped, with the reason.",
        why="An instance that is stopped or shutting down takes its prefill or decode engine along.",
        fix="Start the instance, or take the host out of the cluster file. If the wrong instance was matched: "
        "`address` of the host, `aws.region`, `aws.profile`.",
        run=each_instance(_running),
        sources=("https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstances.html",),
    ),
    Check(
        id="AWS008",
        title="API and host name the same instance type",
        severity=Severity.WARNING,
        what="The instance type by the EC2 API, by instance metadata and by DMI (`/sys/class/dmi/id/product_name`).",
        why="If they differ, pdctl looks at another instance than the host, and its verdicts about security groups and "
        "interfaces are about that one.",
        fix="Set `address` of the host to its private address; check `aws.profile` and `aws.region`.",
        run=each_instance(_same_type),
        sources=("https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html",),
    ),
    Check(
        id="AWS013",
        title="Instance metadata can be reached",
        severity=Severity.INFO,
        what="`HttpEndpoint` and `HttpPutResponseHopLimit` of the instance, where the host is a container or could "
        f"not read its metadata. A container behind a bridge needs a hop limit of {CONTAINER_HOP_LIMIT}.",
        why="With a hop limit of 1 the token request of a container gets no answer at all, so the host cannot tell "
        "its instance, region and interfaces. Nothing else breaks.",
        fix="`aws ec2 modify-instance-metadata-options --http-put-response-hop-limit 2`; no restart is needed.",
        run=each_instance(_metadata),
        sources=(_IMDS, "https://github.com/DataDog/datadog-agent/issues/55269"),
    ),
    Check(
        id="AWS014",
        title="One region, the one of the cluster file",
        severity=Severity.ERROR,
        what="The region of each host by its metadata, against each other and against `aws.region`. Several regions "
        "are an error on EFA and a warning elsewhere; another region than `aws.region` is a warning.",
        why="EFA does not leave an Availability Zone. In the wrong region the API knows none of the instances, and "
        "says so as if they did not exist (`InvalidInstanceID.NotFound`).",
        fix="Correct `aws.region`, or take hosts of one region.",
        run=_region,
        sources=("https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html",),
    ),
)

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (*_OWN, *instances_type.CHECKS, *instances_interfaces.CHECKS, *instances_place.CHECKS),
        key=lambda check: check.id,
    )
)
