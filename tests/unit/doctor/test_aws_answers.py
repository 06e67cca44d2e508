"""Recorded answers of EC2, which instance a host is, what a refusal means, and the table of instance types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.doctor.aws import ACTIONS, iam_policy
from pdctl.doctor.aws_errors import MAX_MESSAGE, explain, policy_line
from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.aws_file import CLI_KEYS, aws_facts_to_json, read_aws_facts
from pdctl.doctor.aws_hosts import match_hosts
from pdctl.doctor.facts import HostFacts, InterfaceFacts, NetworkView
from pdctl.doctor.instance_table import INSTANCE_TYPES, InstanceType, lookup
from pdctl.errors import UsageError
from tests.support.plans import changed, planned
from tests.unit.doctor.ec2_cases import answers, aws_of, host, instances_of, recorded

# Time limits of single examples fail on a busy machine, and say nothing about the code.
UNHURRIED = settings(deadline=None)


# --- the table


def test_names_match_exactly() -> None:
    assert lookup("p5") is None
    assert lookup("p5en.48xlarge") != lookup("p5.48xlarge")
    assert lookup("trn2u.48xlarge") != lookup("trn2.48xlarge")


def test_an_override_is_taken_first() -> None:
    own = InstanceType("p4d.24xlarge", 8, "A100", None, 4, 400, True, True, True, 3, "measured here")

    assert lookup("p4d.24xlarge", {"p4d.24xlarge": own}) is own
    assert lookup("p5.48xlarge", {"p4d.24xlarge": own}) == INSTANCE_TYPES["p5.48xlarge"]


def test_the_table_agrees_with_the_recorded_api() -> None:
    compared = 0
    for described in recorded("describe-instance-types")["InstanceTypes"]:
        row = lookup(described["InstanceType"])
        assert row is not None
        network = described["NetworkInfo"]
        assert row.efa_interfaces == network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0), row.name
        assert row.network_cards == network["MaximumNetworkCards"], row.name
        if network["EfaSupported"]:
            without = [
                card["NetworkCardIndex"] for card in network["NetworkCards"] if "efa" not in card["InterfaceTypes"]
            ]
            assert row.cards_without_efa == tuple(without)
        for gpu in described.get("GpuInfo", {}).get("Gpus", []):
            assert (row.accelerators, row.accelerator_name) == (gpu["Count"], gpu["Name"])
            assert row.accelerator_memory_bytes == gpu["MemoryInfo"]["SizeInMiB"] * 2**20
        compared += 1
    assert compared >= 6


def test_the_rows_make_sense() -> None:
    for name, row in INSTANCE_TYPES.items():
        assert row.name == name
        assert not row.rdma_write or row.rdma_read, name
        assert row.efa_interfaces or not row.rdma_write, name
        assert row.network_cards is None or row.efa_interfaces <= row.network_cards, name
        assert bool(row.accelerators) is bool(row.accelerator_name), name


# --- recorded answers


def test_outputs_of_the_cli_one_after_the_other() -> None:
    names = ("describe-instances-good", "sg-good", "describe-subnets", "describe-placement-groups")
    text = "\n".join(json.dumps(recorded(name), indent=2) for name in names)

    facts = read_aws_facts(text, "all.json")

    assert facts.region == "us-east-2"
    assert set(facts.instances) == {"i-0abc0000000000001", "i-0abc0000000000002"}
    assert set(facts.security_groups) == {"sg-0abc000000000efa1"}
    assert facts.refused == {}


def test_only_what_checks_need_is_kept_of_an_instance() -> None:
    (facts,) = list(aws_of(answers()).instances.values())[:1]

    assert "Tags" not in facts
    assert {"InstanceId", "InstanceType", "NetworkInterfaces", "Placement"} <= set(facts)


def test_calls_that_are_not_in_the_file_count_as_refused() -> None:
    facts = aws_of(recorded("describe-instances-good"))

    assert facts.refused == {
        "DescribeSecurityGroups": "`SecurityGroups` (aws ec2 describe-security-groups) is not in aws.json"
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "aws.json: the file is empty"),
        (" \n", "aws.json: the file is empty"),
        ('{"schema": 1,\n "region" "x"}', "aws.json:2:11: not JSON"),
        ("[]", "aws.json:1: a JSON object was expected, not list"),
        ('{"Reservations": []}\n7', "aws.json:2: a JSON object was expected, not int"),
        ("{}", "aws.json: has neither `schema` nor one of `Reservations` (aws ec2 describe-instances)"),
        ('{"Reservations": []}', "aws.json: `Reservations` has no instances"),
        ('{"Reservations": {}}', "aws.json: `Reservations` should be a list"),
        ('{"SecurityGroups": [{}, 7]}', "aws.json: `SecurityGroups[1]` should be an object"),
        ('{"SecurityGroups": [], "NextToken": "more"}', "aws.json: an answer is not complete"),
        ('{"schema": 2}', "aws.json: `schema` is 2; this pdctl reads 1"),
        ('{"schema": 1} {"schema": 1}', "aws.json: more than one document"),
        ('{"schema": 1, "instances": []}', "aws.json: `instances` should be an object"),
        ('{"schema": 1, "security_groups": {"sg-1": 7}}', "aws.json: `security_groups.sg-1` should be an object"),
        ('{"schema": 1, "prefix_lists": {"pl-1": [7]}}', "aws.json: `prefix_lists.pl-1` should be a list of strings"),
        ('{"schema": 1, "refused": {"X": 7}}', "aws.json: `refused.X` should be a string"),
        ('{"schema": 1, "region": 7}', "aws.json: `region` should be a string"),
        ("[" * 100_000, "aws.json:1: nested too deeply"),
    ],
)
def test_a_bad_file_is_a_usage_error_that_says_where(content: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_aws_facts(content, "aws.json")

    assert caught.value.message.startswith(said)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*CLI_KEYS, "schema", "instances", "Instances", "InstanceId", "Cidrs"]), inner
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*CLI_KEYS, "schema", "instances", "prefix_lists", "region"]), JSON))
@UNHURRIED
def test_any_json_is_read_or_refused(document: dict[str, Any]) -> None:
    try:
        facts = read_aws_facts(json.dumps(document), "aws.json")
    except UsageError:
        return  # says what is wrong: see the cases above
    assert read_aws_facts(json.dumps(aws_facts_to_json(facts)), "again.json") == facts


# --- which instance a host is


def plan_of(prefill: dict[str, Any], decode: dict[str, Any]) -> Any:
    return planned(changed(fabric="efa", prefill={"hosts": [prefill]}, decode={"hosts": [decode]},
                           router={"host": prefill["name"]}))  # fmt: skip


def interfaces(*addresses: str) -> NetworkView:
    return NetworkView(interfaces=(InterfaceFacts(name="ens5", mtu=9001, up=True, addresses=addresses),))


def found_ids(aws: AwsFacts) -> dict[str, str]:
    return {name: one["InstanceId"] for name, one in aws.instances.items()}


BOTH = {"p1": "i-0abc0000000000001", "d1": "i-0abc0000000000002"}


@pytest.mark.parametrize(
    ("prefill", "decode", "facts"),
    [
        # by the address in the cluster file
        ({"name": "p1", "address": "10.0.16.11"}, {"name": "d1", "address": "10.0.16.12"}, {}),
        # by the instance id of the metadata
        ({"name": "p1"}, {"name": "d1"},
         {"p1": host("p1", instance_id="i-0abc0000000000001"), "d1": host("d1", instance_id="i-0abc0000000000002")}),
        # by an address on an interface
        ({"name": "p1"}, {"name": "d1"},
         {"p1": HostFacts("p1", network=interfaces("127.0.0.1/8", "10.0.16.11/20")),
          "d1": HostFacts("d1", network=interfaces("fe80::1/64", "10.0.16.12/20"))}),
        # by what a name resolves to on another host
        ({"name": "p1"}, {"name": "d1"},
         {"p1": HostFacts("p1", network=NetworkView(resolved={"p1": ("10.0.16.11",), "d1": ("10.0.16.12",)}))}),
    ],
)  # fmt: skip
def test_hosts_find_their_instances(prefill: Any, decode: Any, facts: dict[str, HostFacts]) -> None:
    matched = match_hosts(aws_of(answers()), plan_of(prefill, decode), facts)

    assert found_ids(matched) == BOTH
    assert matched.not_found == {}
    assert match_hosts(matched, plan_of(prefill, decode), {}) == matched


def test_hosts_find_their_instances_by_the_short_private_name() -> None:
    document = answers()
    for instance in instances_of(document):
        name = instance["PrivateIpAddress"].replace(".", "-")
        instance["PrivateDnsName"] = f"ip-{name}.us-east-2.compute.internal"
    plan = plan_of({"name": "ip-10-0-16-11"}, {"name": "ip-10-0-16-12.us-east-2.compute.internal"})

    assert set(found_ids(match_hosts(aws_of(document), plan, {})).values()) == set(BOTH.values())


def test_two_instances_with_one_address_are_not_guessed() -> None:
    document = answers()
    for instance in instances_of(document):
        instance["PrivateIpAddress"] = "10.0.16.11"
        instance["NetworkInterfaces"] = []
    plan = plan_of({"name": "p1", "address": "10.0.16.11"}, {"name": "d1", "address": "10.0.16.12"})

    matched = match_hosts(aws_of(document), plan, {})

    assert matched.instances == {}
    assert matched.not_found["p1"].startswith("2 instances in us-east-2 have its address (i-0abc0000000000001,")
    assert matched.not_found["d1"].startswith("no instance in us-east-2 has one of its addresses (10.0.16.12, d1)")


def test_the_metadata_is_believed_before_any_address() -> None:
    plan = plan_of({"name": "p1", "address": "10.0.16.11"}, {"name": "d1", "address": "10.0.16.12"})
    facts = {"p1": host("p1", instance_id="i-0ffff000000000000")}

    matched = match_hosts(aws_of(answers()), plan, facts)

    assert found_ids(matched) == {"d1": BOTH["d1"]}
    assert "no instance i-0ffff000000000000 in us-east-2" in matched.not_found["p1"]


def test_a_refused_call_is_no_missing_instance() -> None:
    plan = plan_of({"name": "p1"}, {"name": "d1"})

    assert match_hosts(AwsFacts("us-east-2", refused={"DescribeInstances": "x"}), plan, {}).not_found == {}


# --- what a refusal means


class Refused(Exception):
    def __init__(self, code: str, message: str = "words of AWS") -> None:
        super().__init__(message)
        self.response = {"Error": {"Code": code, "Message": message}}


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("UnauthorizedOperation", 'add to their IAM policy: {"Effect": "Allow", "Action": "ec2:DescribeSubnets"'),
        ("AccessDenied", "may not call ec2:DescribeSubnets"),
        ("ExpiredToken", "have expired"),
        ("RequestExpired", "have expired"),
        ("AuthFailure", "does not accept these credentials in us-east-2"),
        ("RequestLimitExceeded", "limits the rate"),
        ("InvalidInstanceID.NotFound", "probably the wrong region; us-east-2 was asked"),
        ("InternalError", "a fault of its own"),
        ("SomethingNew", "ec2:DescribeSubnets failed: SomethingNew: words of AWS"),
    ],
)
def test_codes_of_aws_in_words(code: str, wanted: str) -> None:
    assert wanted in explain("DescribeSubnets", Refused(code), region="us-east-2")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("NoCredentialsError", "no AWS credentials were found"),
        ("PartialCredentialsError", "no AWS credentials were found"),
        ("ProfileNotFound", "the AWS profile 'lab' is not configured"),
        ("NoRegionError", "set `aws.region`"),
        ("EndpointConnectionError", "does not answer"),
        ("ConnectTimeoutError", "does not answer"),
        ("SSOTokenLoadError", "the AWS login has ended"),
        ("UnauthorizedSSOTokenError", "the AWS login has ended"),
        ("TokenRetrievalError", "the AWS login has ended"),
        ("CredentialRetrievalError", "could not be fetched"),
        ("SSLError", "the connection to the EC2 API failed"),
    ],
)
def test_failures_of_botocore_in_words(name: str, wanted: str) -> None:
    from botocore import exceptions

    kind: Any = getattr(exceptions, name)
    values = {"provider": "sso", "profile": "lab", "endpoint_url": "https://ec2", "error_msg": "x", "error": "x",
              "cred_var": "x", "profile_name": "lab"}  # fmt: skip

    assert wanted in explain("DescribeInstances", kind(**values), region="us-east-2", profile="lab")


def test_anything_else_is_named() -> None:
    assert (
        explain("DescribeInstances", OSError("disk on fire"), region="") == "asking AWS failed: OSError: disk on fire"
    )


def test_a_message_of_kilobytes_is_cut() -> None:
    assert len(explain("DescribeInstances", Refused("Odd", "x" * 9000), region="")) < MAX_MESSAGE + 100


def test_the_policy_names_every_call() -> None:
    (statement,) = iam_policy()["Statement"]

    assert statement["Action"] == [f"ec2:{action}" for action in ACTIONS]
    assert all(action.startswith(("Describe", "Get")) for action in ACTIONS)
    assert json.loads(policy_line("DescribeSubnets"))["Action"] == "ec2:DescribeSubnets"


@pytest.mark.slow
def test_the_cli_keys_are_those_of_botocore() -> None:
    # The text of the module promises them; a wrong one would be noticed by nobody.
    from botocore.loaders import Loader

    model = Loader().load_service_model("ec2", "service-2")
    for key, command in CLI_KEYS.items():
        operation = "".join(word.capitalize() for word in command.split("-"))
        output = model["operations"][operation]["output"]["shape"]
        assert key in model["shapes"][output]["members"], command
