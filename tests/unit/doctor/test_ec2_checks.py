"""What the checks of EC2 say to recorded answers of its API."""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.aws_file import aws_facts_to_json, read_aws_facts
from pdctl.doctor.aws_hosts import match_hosts
from pdctl.doctor.checks import instances, security_groups
from pdctl.doctor.context import Context
from pdctl.doctor.ec2_shapes import read_groups
from pdctl.doctor.findings import Finding, Verdict
from pdctl.doctor.security_group_rules import efa_between
from tests.support.plans import changed, planned
from tests.unit.doctor.ec2_cases import (
    EFA_GROUP,
    answers,
    aws_of,
    bad,
    cluster,
    context,
    findings,
    host,
    instances_of,
    only,
    recorded,
    verdicts,
)

DEFAULT_GROUP = {
    "GroupId": "sg-0abc00000000def01",
    "GroupName": "default",
    "VpcId": "vpc-0abc0000000000001",
    "IpPermissions": [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-0abc00000000def01"}]}],
    "IpPermissionsEgress": [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}],
}
P5EN = {"instance_type": "p5en.48xlarge", "product": "p5en.48xlarge", "region": "us-east-2"}
P1 = {"instance_id": "i-0abc0000000000001", **P5EN}
D1 = {"instance_id": "i-0abc0000000000002", **P5EN}
HOSTS = {"p1": host("p1", **P1), "d1": host("d1", **D1)}


def both(name: str, **values: Any) -> dict[str, Any]:
    """Facts of both hosts, both changed alike."""
    return {"p1": host("p1", **{**P1, **values}), "d1": host("d1", **{**D1, **values})}


def with_group(document: dict[str, Any], *groups: dict[str, Any]) -> dict[str, Any]:
    document["SecurityGroups"] = [*document["SecurityGroups"], *groups]
    return document


def both_groups_attached(document: dict[str, Any]) -> dict[str, Any]:
    for instance in instances_of(document):
        for interface in instance["NetworkInterfaces"]:
            interface["Groups"] = [{"GroupId": "sg-0abc0000000001111"}, {"GroupId": "sg-0abc0000000002222"}]
    return document


# --- the recorded cases


def test_a_good_cluster_passes_every_check() -> None:
    found = findings(context(answers(), HOSTS))

    assert bad(found) == {}
    assert {one.id for one in found} == {
        check.id for check in (*instances.CHECKS, *security_groups.CHECKS) if check.id != "AWS013"
    }


SECURITY_GROUP_CASES = {
    "sg-good": {},
    "sg-good-merged-permission": {},
    "sg-missing-egress-self": {"SG001": "error"},
    "sg-rules-flat-missing-egress-self": {"SG001": "error"},
    "sg-missing-ingress-self": {"SG001": "error", "SG004": "error"},
    "sg-wide-open-cidr": {"SG001": "error", "SG005": "error"},
    "sg-tcp-only-self": {"SG001": "error"},
    "sg-prefix-list-only": {"SG001": "error", "SG004": "skipped"},
    "sg-peered-vpc-reference": {"SG001": "error", "SG004": "error"},
}


@pytest.mark.parametrize("name", SECURITY_GROUP_CASES)
def test_recorded_security_groups(name: str) -> None:
    document = answers(groups=name)

    assert bad(findings(context(document, HOSTS))) == SECURITY_GROUP_CASES[name]


SPLIT_CASES = {
    "sg-split-cross-referenced": {"SG002": "warning"},
    "sg-split-one-way": {"SG001": "error", "SG004": "error"},
    "sg-split-self-only": {"SG001": "error", "SG004": "error"},
}


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_recorded_groups_of_prefill_and_decode(name: str) -> None:
    assert bad(findings(context(answers("describe-instances-split-sg", name)))) == {
        "AWS008": "skipped",
        "AWS014": "skipped",
        **SPLIT_CASES[name],
    }


def test_rules_spread_over_two_attached_groups_are_a_warning() -> None:
    document = both_groups_attached(answers(groups="sg-two-attached-union"))

    found = findings(context(document, HOSTS))

    assert bad(found) == {"SG002": "warning"}
    assert only(found, "SG002").commands == (
        "aws ec2 authorize-security-group-egress --group-id sg-0abc0000000001111 --ip-permissions "
        "'IpProtocol=-1,UserIdGroupPairs=[{GroupId=sg-0abc0000000001111}]' --region us-east-2",
    )


def test_an_ordinary_launch_has_no_efa() -> None:
    found = findings(context(answers("describe-instances-ena-only")))

    assert verdicts(found)["AWS005"] == "error"
    assert {verdicts(found)[check] for check in ("SG001", "SG002", "SG003")} == {"skipped"}
    finding = next(one for one in found if one.id == "AWS005")
    assert finding.message == "0 of 16 EFA interfaces of p5en.48xlarge are attached: there is no EFA at all"
    attach = [shlex.split(line) for line in finding.commands if "attach-network-interface" in line]
    places = [(words[words.index("--network-card-index") + 1], words[words.index("--device-index") + 1])
              for words in attach]  # fmt: skip
    assert places == [("0", "1"), *((str(card), "0") for card in range(1, 16))]
    assert finding.commands[0].startswith("aws ec2 stop-instances --instance-ids i-0abc0000000000003")
    assert all(EFA_GROUP in line for line in finding.commands if "create-network-interface" in line)


def test_efa_interfaces_in_the_default_group() -> None:
    document = with_group(answers("describe-instances-efa-enis-other-sg"), DEFAULT_GROUP)

    found = findings(context(document))

    assert bad(found) == {"AWS008": "skipped", "AWS014": "skipped", "SG001": "error", "SG003": "error"}
    finding = next(one for one in found if one.id == "SG003")
    assert finding.message == (
        f"16 of 16 EFA interfaces lack {EFA_GROUP}, the group that lets EFA pass; "
        "they are in sg-0abc00000000def01 (default)"
    )
    assert len(finding.commands) == 16
    words = shlex.split(finding.commands[0])
    assert words[2] == "modify-network-interface-attribute"
    assert words[words.index("--groups") + 1 :][:2] == ["sg-0abc00000000def01", EFA_GROUP]
    blocked = only(found, "SG001")
    assert blocked.commands == ()
    assert "SG003" in blocked.fix


def test_efa_interfaces_in_a_group_that_could_not_be_read() -> None:
    found = findings(context(answers("describe-instances-efa-enis-other-sg")))

    # The group on the primary interface is fine; the other may be too, so this is no certainty.
    assert verdicts(found)["SG001"] == "skipped"
    assert verdicts(found)["SG002"] == "skipped"
    assert verdicts(found)["SG003"] == "warning"
    assert "could not be read" in next(one for one in found if one.id == "SG003").evidence


def test_one_efa_interface_in_another_group() -> None:
    document = with_group(answers(), DEFAULT_GROUP)
    instances_of(document)[1]["NetworkInterfaces"][5]["Groups"] = [
        {"GroupId": "sg-0abc00000000def01", "GroupName": "default"}
    ]

    found = findings(context(document, HOSTS))

    assert bad(found) == {"SG001": "error", "SG003": "error"}
    (finding,) = [one for one in found if one.id == "SG003" and one.verdict is Verdict.FAIL]
    assert finding.hosts == ("d1",)
    assert finding.message.startswith("1 of 16 EFA interfaces lack")
    assert finding.evidence == "cards 4"


def test_availability_zones_apart() -> None:
    document = answers("describe-instances-cross-az")

    found = findings(context(document))

    assert verdicts(found)["AWS010"] == "error"
    assert only(found, "AWS010").evidence == "prefill in use2-az2; decode in use2-az3"
    assert "AWS011" not in verdicts(found)


def test_zone_names_are_no_proof_where_ids_are_known() -> None:
    document = answers()
    instances_of(document)[1]["Placement"]["AvailabilityZoneId"] = "use2-az1"

    assert verdicts(findings(context(document, HOSTS)))["AWS010"] == "error"


def test_p4d_with_p5en() -> None:
    found = findings(context(answers("describe-instances-mixed-p4d-p5")))

    assert verdicts(found)["AWS004"] == "warning"
    assert verdicts(found)["AWS007"] == "error"
    assert only(found, "AWS007").message == (
        "p4d.24xlarge talks EFA to instances of its own type only; here p4d.24xlarge and p5en.48xlarge are paired"
    )
    (emulated,) = [one for one in found if one.id == "AWS004" and one.verdict is Verdict.FAIL]
    assert emulated.hosts == ("p1",)
    assert "pull" in emulated.fix


# --- the fixes fix


@pytest.mark.parametrize(
    "name", ["sg-missing-egress-self", "sg-missing-ingress-self", "sg-wide-open-cidr", "sg-tcp-only-self",
             "sg-prefix-list-only", "sg-peered-vpc-reference"]
)  # fmt: skip
def test_the_printed_commands_make_efa_pass(name: str) -> None:
    document = answers(groups=name)
    for line in only(findings(context(document, HOSTS)), "SG001").commands:
        obey(document, line)

    groups = read_groups(aws_of(document).security_groups)
    assert efa_between((EFA_GROUP,), (EFA_GROUP,), groups).documented
    assert verdicts(findings(context(document, HOSTS)))["SG001"] == "pass"


@pytest.mark.parametrize("name", ["sg-split-one-way", "sg-split-self-only"])
def test_the_printed_commands_connect_two_groups(name: str) -> None:
    document = answers("describe-instances-split-sg", name)
    for finding in findings(context(document)):
        for line in finding.commands:
            obey(document, line)

    assert bad(findings(context(document))) == {"AWS008": "skipped", "AWS014": "skipped", "SG002": "warning"}


def obey(document: dict[str, Any], line: str) -> None:
    """Do to recorded answers what an authorize command does to a security group."""
    words = shlex.split(line)
    assert words[:2] == ["aws", "ec2"]
    way = {"authorize-security-group-egress": "IpPermissionsEgress",
           "authorize-security-group-ingress": "IpPermissions"}[words[2]]  # fmt: skip
    shorthand = words[words.index("--ip-permissions") + 1]
    head, _, pair = shorthand.partition(",UserIdGroupPairs=[{GroupId=")
    fields = dict(part.split("=", 1) for part in head.split(","))
    permission: dict[str, Any] = {"IpProtocol": fields["IpProtocol"], "UserIdGroupPairs": [{"GroupId": pair[:-2]}]}
    for key in ("FromPort", "ToPort"):
        if key in fields:
            permission[key] = int(fields[key])
    group = next(one for one in document["SecurityGroups"] if one["GroupId"] == words[words.index("--group-id") + 1])
    group[way].append(permission)


# --- what cannot be known is skipped, never passed


def test_without_answers_every_check_says_why() -> None:
    seen = dataclasses.replace(context(answers()), aws=None, aws_skipped="no credentials on this machine")

    found = findings(seen)

    assert set(verdicts(found).values()) == {"skipped"}
    by_type = {"AWS003", "AWS004", "AWS007", "AWS009", "AWS010", "AWS011"}
    for one in found:
        assert "no credentials on this machine" in one.message or one.id == "AWS014", one
    assert by_type <= set(verdicts(found))


def test_without_answers_the_hosts_own_metadata_still_tells_something() -> None:
    facts = both("", zone_id="use2-az2", zone="us-east-2b")

    found = findings(dataclasses.replace(context(answers(), facts), aws=None, aws_skipped="off"))

    assert {check for check, word in verdicts(found).items() if word == "pass"} == {
        "AWS003", "AWS004", "AWS007", "AWS010", "AWS014"
    }  # fmt: skip


def test_a_cluster_without_ec2_hears_nothing() -> None:
    plan = planned(changed())

    assert findings(Context(plan, {"p1": dataclasses.replace(HOSTS["p1"], cloud=None)})) == []


def test_groups_that_may_not_be_read_give_skipped() -> None:
    document = answers()
    del document["SecurityGroups"]
    aws = dataclasses.replace(aws_of(document), refused={"DescribeSecurityGroups": "these keys may not: add a policy"})
    seen = dataclasses.replace(context(answers()), aws=aws)

    found = findings(seen)

    for check in ("SG001", "SG002", "SG003", "SG004", "SG005"):
        assert verdicts(found)[check] == "skipped"
        assert any("these keys may not" in one.message for one in found if one.id == check), check
    assert verdicts(found)["AWS001"] == "skipped"
    assert verdicts(found)["AWS005"] == "pass"


def test_one_unreadable_group_beside_a_good_one_gives_skipped() -> None:
    document = answers()
    for instance in instances_of(document):
        for interface in instance["NetworkInterfaces"]:
            interface["Groups"].append({"GroupId": "sg-0000000000000000f", "GroupName": "shared"})

    found = findings(context(document, HOSTS))

    assert verdicts(found)["SG001"] == "skipped"
    assert verdicts(found)["SG005"] == "skipped"
    assert "sg-0000000000000000f" in only(found, "SG001").message


def test_a_host_without_an_instance_is_skipped_with_the_reason() -> None:
    document = answers()
    plan = cluster(document)
    seen = Context(plan, {"p1": host("p1", **{**P1, "region": "eu-west-1", "instance_id": "i-0aaaaaaaaaaaaaaaa"})},
                   aws=aws_of(document))  # fmt: skip

    found = findings(seen)

    (running,) = [one for one in found if one.id == "AWS002" and one.hosts == ("p1",)]
    assert running.verdict is Verdict.SKIPPED
    assert "its metadata says region eu-west-1, but us-east-2 was asked" in running.message
    assert verdicts(found)["SG001"] == "skipped"


@pytest.mark.parametrize("drop", ["InstanceTypes", "Subnets", "PlacementGroups"])
def test_answers_without_a_call_still_judge_the_rest(drop: str) -> None:
    document = answers()
    del document[drop]

    assert bad(findings(context(document, HOSTS))) == ({"AWS012": "skipped"} if drop == "PlacementGroups" else {})


# --- single checks


def test_an_instance_that_is_stopped() -> None:
    document = answers()
    instances_of(document)[0]["State"] = {"Code": 80, "Name": "stopped"}

    found = findings(context(document, HOSTS, aws={"profile": "lab"}))

    (stopped,) = [one for one in found if one.id == "AWS002" and one.verdict is Verdict.FAIL]
    assert stopped.commands == (
        "aws ec2 start-instances --instance-ids i-0abc0000000000001 --region us-east-2 --profile lab",
    )


def test_fewer_efa_interfaces_than_the_type_takes() -> None:
    document = answers()
    del instances_of(document)[0]["NetworkInterfaces"][-1]

    found = findings(context(document, HOSTS))

    assert bad(found) == {"AWS005": "warning"}
    (few,) = [one for one in found if one.id == "AWS005" and one.verdict is Verdict.FAIL]
    assert few.message.startswith("15 of 16 EFA interfaces of p5en.48xlarge are attached")
    assert [line for line in few.commands if "--network-card-index 15 --device-index 0" in line]
    assert len(few.commands) == 4


def test_interfaces_that_are_being_detached_do_not_count() -> None:
    document = answers()
    instances_of(document)[0]["NetworkInterfaces"][-1]["Attachment"]["Status"] = "detaching"

    assert verdicts(findings(context(document, HOSTS)))["AWS005"] == "warning"


def of_type(name: str, document: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    document = document or answers()
    for instance in instances_of(document):
        instance["InstanceType"] = name
    return document, both("", instance_type=name, product=name)


@pytest.mark.parametrize(
    ("name", "mode", "wanted"),
    [
        ("p5en.48xlarge", "push", "pass"),
        ("trn2.48xlarge", "push", "pass"),
        ("p4d.24xlarge", "push", "warning"),
        ("p4d.24xlarge", "pull", "pass"),
        ("g5.48xlarge", "push", "error"),
        ("g5.48xlarge", "pull", "warning"),
        ("c7gn.16xlarge", "push", "warning"),
        ("p9.48xlarge", "push", "skipped"),
        ("p5.48xlarge2", "push", "skipped"),
        ("dl1.24xlarge", "pull", "skipped"),
    ],
)
def test_rdma_write_by_the_table(name: str, mode: str, wanted: str) -> None:
    document, facts = of_type(name)

    found = findings(context(document, facts, transfer={"mode": mode}))

    assert verdicts(found)["AWS004"] == wanted


@pytest.mark.parametrize("name", ["inf2.48xlarge", "trn1.2xlarge", "g6.xlarge"])
def test_types_without_efa(name: str) -> None:
    document, facts = of_type(name)

    found = findings(context(document, facts))

    assert verdicts(found)["AWS003"] == "error"
    assert not {"AWS004", "AWS005"} & set(verdicts(found))


def test_the_api_is_believed_about_types_that_the_table_lacks() -> None:
    document, facts = of_type("x99.48xlarge")
    (known,) = [one for one in document["InstanceTypes"] if one["InstanceType"] == "p5en.48xlarge"]
    document["InstanceTypes"].append({**known, "InstanceType": "x99.48xlarge"})

    found = findings(context(document, facts))

    assert bad(found) == {"AWS004": "skipped"}


@pytest.mark.parametrize(
    ("prefill", "decode", "wanted"),
    [
        ("p4d.24xlarge", "p4d.24xlarge", "pass"),
        ("p4d.24xlarge", "p4de.24xlarge", "warning"),
        ("p5.48xlarge", "p4de.24xlarge", "error"),
        ("p5.48xlarge", "p5en.48xlarge", "warning"),
        ("dl1.24xlarge", "p5.48xlarge", "error"),
    ],
)
def test_types_of_a_pair(prefill: str, decode: str, wanted: str) -> None:
    document = answers()
    for instance, name in zip(instances_of(document), (prefill, decode), strict=True):
        instance["InstanceType"] = name

    assert verdicts(findings(context(document)))["AWS007"] == wanted


def test_efa_on_a_card_that_takes_none() -> None:
    document, facts = of_type("p6-b300.48xlarge")

    found = findings(context(document, facts))

    (wrong, _) = [one for one in found if one.id == "AWS006"]
    assert wrong.severity.value == "error"
    assert wrong.message == "network card 0 of p6-b300.48xlarge takes no EFA, but has an EFA interface"
    assert wrong.fix.startswith("put the EFA interfaces on the cards 1 to 16")


def test_two_efa_interfaces_on_one_card() -> None:
    document = answers()
    instances_of(document)[0]["NetworkInterfaces"][-1]["Attachment"]["NetworkCardIndex"] = 14

    assert bad(findings(context(document, HOSTS))) == {"AWS006": "warning"}


def test_api_and_host_disagree_about_the_type() -> None:
    facts = {**HOSTS, "p1": host("p1", **{**P1, "product": "p5.48xlarge"})}

    found = findings(context(answers(), facts))

    assert bad(found) == {"AWS008": "warning"}
    (finding,) = [one for one in found if one.id == "AWS008" and one.verdict is Verdict.FAIL]
    assert finding.evidence == "the EC2 API: p5en.48xlarge; instance metadata: p5en.48xlarge; DMI: p5.48xlarge"


def test_different_vpcs() -> None:
    document = answers()
    instance = instances_of(document)[1]
    instance["VpcId"] = "vpc-9"
    for interface in instance["NetworkInterfaces"]:
        interface["VpcId"] = "vpc-9"

    assert verdicts(findings(context(document, HOSTS)))["AWS009"] == "error"
    on_tcp = findings(context(document, HOSTS, fabric="tcp"))
    assert verdicts(on_tcp)["AWS009"] == "info"


def test_subnets_apart_in_one_zone_are_for_information() -> None:
    document = answers()
    instance = instances_of(document)[1]
    for interface in instance["NetworkInterfaces"]:
        interface["SubnetId"] = "subnet-9"

    assert bad(findings(context(document, HOSTS))) == {"AWS011": "info"}


@pytest.mark.parametrize(
    ("placement", "lifecycle", "wanted"),
    [
        ({"GroupName": "pd-cluster-pg"}, None, "pass"),
        ({"GroupName": "web-spread"}, None, "warning"),
        ({"GroupName": "nobody-knows"}, None, "skipped"),
        ({}, None, "warning"),
        ({}, "capacity-block", "pass"),
    ],
)
def test_placement_groups(placement: dict[str, str], lifecycle: str | None, wanted: str) -> None:
    document = answers()
    for instance in instances_of(document):
        instance["Placement"] = {"AvailabilityZoneId": "use2-az2", **placement}
        if lifecycle:
            instance["InstanceLifecycle"] = lifecycle

    assert verdicts(findings(context(document, HOSTS)))["AWS012"] == wanted


def test_two_cluster_placement_groups() -> None:
    document = answers()
    document["PlacementGroups"].append({"GroupName": "other", "Strategy": "cluster"})
    instances_of(document)[1]["Placement"]["GroupName"] = "other"

    found = findings(context(document, HOSTS))

    assert bad(found) == {"AWS012": "warning"}
    assert only(found, "AWS012").evidence == "pd-cluster-pg: p1; other: d1"


@pytest.mark.parametrize(
    ("container", "hops", "endpoint", "wanted"),
    [("docker", 1, "enabled", "info"), ("docker", 2, "enabled", "pass"), (None, 1, "enabled", None),
     ("docker", 2, "disabled", "info")],
)  # fmt: skip
def test_metadata_from_a_container(container: str | None, hops: int, endpoint: str, wanted: str | None) -> None:
    document = answers()
    instances_of(document)[0]["MetadataOptions"] = {"HttpPutResponseHopLimit": hops, "HttpEndpoint": endpoint}
    facts = {**HOSTS, "p1": host("p1", container=container, **P1)}

    found = [one for one in findings(context(document, facts)) if one.id == "AWS013"]

    assert verdicts(found).get("AWS013") == wanted
    if wanted == "info":
        assert "--http-put-response-hop-limit 2" in found[0].commands[0]


def test_hosts_in_several_regions() -> None:
    facts = {**HOSTS, "d1": host("d1", **{**D1, "region": "us-west-2"})}

    found = findings(context(answers(), facts))

    assert only(found, "AWS014").severity.value == "error"
    assert only(found, "AWS014").evidence == "us-east-2: p1; us-west-2: d1"


def test_another_region_than_the_cluster_file_says() -> None:
    found = findings(context(answers(), HOSTS, aws={"region": "us-west-2"}))

    assert verdicts(found)["AWS014"] == "warning"
    assert "`aws.region` is us-west-2, but the hosts are in us-east-2" in only(found, "AWS014").message


# --- TCP


def tcp_only(*permissions: dict[str, Any], egress: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Answers with one group that has these inbound rules, for a cluster on TCP."""
    document = answers()
    group = document["SecurityGroups"][0]
    group["IpPermissions"] = list(permissions)
    if egress is not None:
        group["IpPermissionsEgress"] = egress
    return document


def allow(first: int, last: int, cidr: str, protocol: str = "tcp") -> dict[str, Any]:
    return {"IpProtocol": protocol, "FromPort": first, "ToPort": last, "IpRanges": [{"CidrIp": cidr}]}


def test_on_tcp_only_what_concerns_tcp_is_judged() -> None:
    found = findings(context(answers(), HOSTS, fabric="tcp"))

    assert bad(found) == {}
    assert set(verdicts(found)) == {"AWS001", "AWS002", "AWS008", "AWS009", "AWS010", "AWS014", "SG004", "SG005"}


def test_ports_blocked_between_the_hosts() -> None:
    document = tcp_only(allow(22, 22, "10.0.0.0/16"), allow(5600, 5603, "10.0.16.0/24"))
    layout = {"fabric": "tcp", "prefill": {"hosts": [{"name": "p1", "address": "10.0.16.11"}], "data_parallel": 6}}

    found = [one for one in findings(context(document, HOSTS, **layout)) if one.id == "SG004"]

    assert [(one.hosts, one.message) for one in found if one.verdict is Verdict.FAIL] == [
        (("p1", "d1"), "security groups block TCP from the decode host to the prefill host: 5604 (side channel), "
         "5605 (side channel)"),
        (("p1", "d1"), "security groups block TCP from the prefill host to the decode host: 5700 (side channel)"),
        (("d1",), "security groups block TCP from the router's host to the decode host: 8200 (API)"),
    ]  # fmt: skip
    assert found[0].commands == (
        f"aws ec2 authorize-security-group-ingress --group-id {EFA_GROUP} --ip-permissions "
        f"'IpProtocol=tcp,FromPort=5604,ToPort=5605,UserIdGroupPairs=[{{GroupId={EFA_GROUP}}}]' --region us-east-2",
    )


def test_nothing_gets_out() -> None:
    document = tcp_only(allow(0, 65535, "10.0.0.0/8"), egress=[allow(443, 443, "0.0.0.0/0")])

    found = findings(context(document, HOSTS, fabric="tcp"))

    assert verdicts(found)["SG004"] == "error"
    assert all("authorize-security-group-egress" in line for one in found if one.id == "SG004" for line in one.commands)


def test_a_prefix_list_can_let_tcp_pass() -> None:
    document = tcp_only({"IpProtocol": "-1", "PrefixListIds": [{"PrefixListId": "pl-1"}]})

    unread = findings(context(document, HOSTS, fabric="tcp"))
    read = findings(context({**document, "PrefixLists": [{"PrefixListId": "pl-1", "Cidrs": ["10.0.0.0/8"]}]}, HOSTS,
                            fabric="tcp"))  # fmt: skip

    assert verdicts(unread)["SG004"] == "skipped"
    assert verdicts(read)["SG004"] == "pass"


def test_the_router_elsewhere_must_reach_the_apis() -> None:
    document = tcp_only(allow(5600, 5700, "10.0.0.0/16"))
    router = {"router": {"host": "local", "address": "10.0.16.99"}}

    found = [one for one in findings(context(document, HOSTS, fabric="tcp", **router)) if one.id == "SG004"]

    assert {one.verdict for one in found if one.hosts in (("p1",), ("d1",))} == {Verdict.SKIPPED}
    assert {one.verdict for one in found if one.hosts == ("p1", "d1")} == {Verdict.PASS}


def exposed(found: list[Finding], name: str) -> list[Finding]:
    return [one for one in found if one.id == "SG005" and one.verdict is Verdict.FAIL and one.hosts == (name,)]


def test_planned_ports_open_to_the_world() -> None:
    document = tcp_only(allow(5000, 9000, "0.0.0.0/0"))
    instances_of(document)[0]["NetworkInterfaces"][0]["Association"] = {"PublicIp": "198.51.100.7"}

    found = findings(context(document, HOSTS, fabric="tcp"))

    inner, outer = exposed(found, "p1")
    assert (inner.severity.value, outer.severity.value) == ("error", "warning")
    assert inner.message == "open to the whole internet: TCP 8100 (API), 5600 (side channel)"
    assert outer.message == "open to the whole internet: TCP 8000 (router API)"
    assert "public address: 198.51.100.7" in inner.evidence
    # What only this rule let through is allowed between the groups before the rule goes.
    assert [shlex.split(line)[2] for line in inner.commands] == [
        "authorize-security-group-ingress", "revoke-security-group-ingress"
    ]  # fmt: skip
    assert "FromPort=5000,ToPort=9000,IpRanges=[{CidrIp=0.0.0.0/0}]" in inner.commands[-1]


def test_a_rule_that_lets_ssh_in_is_not_revoked_by_a_command() -> None:
    document = tcp_only({"IpProtocol": "-1", "Ipv6Ranges": [{"CidrIpv6": "::/0"}]})

    found = findings(context(document, HOSTS, fabric="tcp"))

    for one in exposed(found, "p1"):
        assert not [line for line in one.commands if "revoke" in line]
        assert "SSH (port 22)" in one.fix


def test_ports_on_loopback_are_not_exposed() -> None:
    document = tcp_only(allow(18100, 29000, "0.0.0.0/0"), allow(5000, 9000, "10.0.0.0/8"))

    assert verdicts(findings(context(document, HOSTS, fabric="tcp")))["SG005"] == "pass"


# --- robustness


def test_our_own_form_gives_the_same_findings() -> None:
    seen = context(answers("describe-instances-split-sg", "sg-split-one-way"))
    assert seen.aws is not None

    again = read_aws_facts(json.dumps(aws_facts_to_json(seen.aws)), "facts.json")

    assert again == seen.aws
    assert findings(dataclasses.replace(seen, aws=again)) == findings(seen)


def mangled(value: Any, chance: random.Random) -> Any:
    """The same value with some parts left out or replaced by nonsense."""
    if chance.randrange(25) == 0:
        return chance.choice([None, True, 7, -1, "x", "", [], {}, [[]], [None], {"": 0}])
    if isinstance(value, dict):
        return {key: mangled(one, chance) for key, one in value.items() if chance.randrange(25)}
    if isinstance(value, list):
        return [mangled(one, chance) for one in value[:3]]
    return value


@given(seed=st.integers(0, 2**32), host_known=st.booleans())
@settings(deadline=None)
def test_mangled_answers_never_crash_a_check(seed: int, host_known: bool) -> None:
    # Drawn from a seed: hypothesis takes long to draw thousands of values one by one.
    chance = random.Random(seed)
    broken = {part: mangled_part(one, chance) for part, one in GOOD_ANSWERS.items() if isinstance(one, dict)}

    found = findings(
        Context(SPLIT_PLAN, {"p1": HOSTS["p1"]} if host_known else {}, aws=AwsFacts("us-east-2", **broken))
    )

    assert not [one.evidence for one in found if "a bug of pdctl" in one.message]


def mangled_part(part: dict[str, Any], chance: random.Random) -> dict[str, dict[str, Any]]:
    changed_part = {key: mangled(one, chance) for key, one in part.items()}
    return {key: one for key, one in changed_part.items() if isinstance(one, dict)}


SPLIT_PLAN = cluster(recorded("describe-instances-split-sg"))
GOOD_ANSWERS = aws_facts_to_json(
    match_hosts(aws_of(answers("describe-instances-split-sg", "sg-split-one-way")), SPLIT_PLAN, {})
)


def test_every_check_is_explained() -> None:
    for check in (*instances.CHECKS, *security_groups.CHECKS):
        assert all(text.endswith(".") for text in (check.what, check.why, check.fix))
        assert check.sources
