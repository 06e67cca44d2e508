"""EC2 asked for real: boto3 over HTTP against moto's server, with a gate before it that refuses, delays and lies."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.ec2.models import ec2_backends
from moto.server import ThreadedMotoServer

from pdctl.doctor.aws import ask_ec2, aws_facts_to_json, iam_policy, read_aws_facts
from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.checks import instances, security_groups
from pdctl.doctor.context import Context
from pdctl.doctor.facts import CloudFacts, HostFacts
from pdctl.doctor.findings import Finding, run_check
from pdctl.plan import ClusterPlan
from tests.support.plans import changed, planned

REGION = "us-east-2"
TIMEOUT_S = 30.0
ACCOUNT = "123456789012"
# Most tests share what boto3 loads: its description of EC2 takes a second. Those about the usual chain do not.
SESSION = boto3.Session(aws_access_key_id="testing", aws_secret_access_key="testing")
ERROR = (
    "<?xml version='1.0' encoding='UTF-8'?><Response><Errors><Error><Code>{code}</Code><Message>{message}</Message>"
    "</Error></Errors><RequestID>00000000-0000-0000-0000-000000000000</RequestID></Response>"
)


class Gate:
    """An HTTP server that hands requests on to moto, unless a rule of the test answers first."""

    def __init__(self, backend: tuple[str, int]) -> None:
        self.asked: list[dict[str, str]] = []
        self.rules: dict[str, Callable[[dict[str, str]], tuple[int, str] | None]] = {}
        gate = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                query = dict(urllib.parse.parse_qsl(body.decode()))
                gate.asked.append(query)
                rule = gate.rules.get(query["Action"])
                answer = rule(query) if rule else None
                if answer is None:
                    query.pop("NextToken", None)
                    forward = http.client.HTTPConnection(*backend, timeout=20)
                    kept = {name: value for name, value in self.headers.items() if name != "Content-Length"}
                    forward.request("POST", "/", urllib.parse.urlencode(query), kept)
                    response = forward.getresponse()
                    answer = response.status, response.read().decode()
                    forward.close()
                self.send_response(answer[0])
                self.send_header("Content-Type", "text/xml")
                self.send_header("Content-Length", str(len(answer[1].encode())))
                self.end_headers()
                self.wfile.write(answer[1].encode())

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def refuse(
        self, action: str, status: int, code: str, message: str = "refused by the test", times: int = 99
    ) -> None:
        """Answer a call with an error, so many times."""
        left = [times]

        def rule(query: dict[str, str]) -> tuple[int, str] | None:
            left[0] -= 1
            return (status, ERROR.format(code=code, message=message)) if left[0] >= 0 else None

        self.rules[action] = rule

    def count(self, action: str) -> int:
        """How often a call was made."""
        return sum(query["Action"] == action for query in self.asked)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def moto() -> Iterator[tuple[str, int]]:
    """moto's server; yields where it listens."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def gate(moto: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gate]:
    """The way to moto, which boto3 takes for the endpoint of AWS; credentials of nobody, no files of the user."""
    front = Gate(moto)
    no_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
    # Of another test nothing may be left.
    with contextlib.closing(http.client.HTTPConnection(*moto, timeout=20)) as connection:
        connection.request("POST", "/moto-api/reset")
        assert connection.getresponse().status == 200
    yield front
    front.close()


def no_credentials(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make this machine one without any configuration of AWS."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION",
                 "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_EC2", "AWS_WEB_IDENTITY_TOKEN_FILE",
                 "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Cloud:
    """A VPC of moto with a prefill and a decode instance, one EFA interface each."""

    def __init__(self, moto: tuple[str, int], region: str = REGION) -> None:
        self.ec2 = SESSION.client("ec2", region_name=region, endpoint_url=f"http://{moto[0]}:{moto[1]}")
        self.region = region
        self.vpc = self.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        self.subnet = self.ec2.create_subnet(VpcId=self.vpc, CidrBlock="10.0.16.0/20")["Subnet"]["SubnetId"]
        self.ids: dict[str, str] = {}

    def group(self, name: str, *, own: bool = False) -> str:
        """A security group, as AWS makes it (everything may go out), or with the two rules for EFA."""
        made: str = self.ec2.create_security_group(GroupName=name, Description=name, VpcId=self.vpc)["GroupId"]
        if own:
            self.allow_in(made, made)
            self.allow_out(made, made)
        return made

    def allow_in(self, group: str, peer: str) -> None:
        """All traffic from a group."""
        self.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[everything(peer)])

    def allow_out(self, group: str, peer: str) -> None:
        """All traffic to a group."""
        self.ec2.authorize_security_group_egress(GroupId=group, IpPermissions=[everything(peer)])

    def launch(self, name: str, address: str, group: str) -> None:
        """An instance with one ordinary and one EFA interface."""
        cards = [
            {"DeviceIndex": 0, "NetworkCardIndex": 0, "SubnetId": self.subnet, "Groups": [group],
             "PrivateIpAddress": address},
            {"DeviceIndex": 1, "NetworkCardIndex": 0, "SubnetId": self.subnet, "Groups": [group]},
        ]  # fmt: skip
        made = self.ec2.run_instances(ImageId="ami-12c6146b", InstanceType="p5.4xlarge", MinCount=1, MaxCount=1,
                                      NetworkInterfaces=cards)["Instances"][0]  # fmt: skip
        self.ids[name] = made["InstanceId"]
        # moto knows no other type of interface than the ordinary one.
        backend: Any = ec2_backends[ACCOUNT][self.region]
        for interface in made["NetworkInterfaces"]:
            if interface["Attachment"]["DeviceIndex"] == 1:
                backend.enis[interface["NetworkInterfaceId"]].interface_type = "efa"

    def facts(self, *, region: str = "") -> dict[str, HostFacts]:
        """What the hosts know of themselves."""
        return {
            name: HostFacts(
                name,
                cloud=CloudFacts(
                    vendor="Amazon EC2",
                    product="p5.4xlarge",
                    instance_type="p5.4xlarge",
                    instance_id=instance,
                    region=region or self.region,
                ),
            )
            for name, instance in self.ids.items()
        }


def everything(peer: str) -> dict[str, Any]:
    return {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": peer}]}


@pytest.fixture
def cloud(gate: Gate, moto: tuple[str, int]) -> Iterator[Cloud]:
    """A cloud without instances."""
    made = Cloud(moto)
    yield made
    made.ec2.close()


def pair(cloud: Cloud, prefill: str, decode: str) -> None:
    cloud.launch("p1", "10.0.16.11", prefill)
    cloud.launch("d1", "10.0.16.12", decode)


def plan_of(**sections: Any) -> ClusterPlan:
    hosts = {"prefill": {"hosts": [{"name": "p1", "address": "10.0.16.11"}]},
             "decode": {"hosts": [{"name": "d1", "address": "10.0.16.12"}]}}  # fmt: skip
    return planned(changed(**{"fabric": "efa", **hosts, **sections}))


def judged(plan: ClusterPlan, facts: dict[str, HostFacts], aws: AwsFacts) -> dict[str, str]:
    """The worst answer of each check that is no pass."""
    order = ["pass", "skipped", "info", "warning", "error"]
    worst: dict[str, str] = {}
    for one in findings(plan, facts, aws):
        word = one.severity.value if one.verdict.value == "fail" else one.verdict.value
        worst[one.id] = max(worst.get(one.id, "pass"), word, key=order.index)
    return {check: word for check, word in worst.items() if word != "pass"}


def findings(plan: ClusterPlan, facts: dict[str, HostFacts], aws: AwsFacts) -> list[Finding]:
    seen = Context(plan, facts, aws=aws)
    return [finding for check in (*instances.CHECKS, *security_groups.CHECKS) for finding in run_check(check, seen)]


# moto has no placement groups, so its instances are in none.
USUAL = {"AWS012": "warning"}


def test_a_good_cluster(gate: Gate, cloud: Cloud) -> None:
    group = cloud.group("pd-efa", own=True)
    pair(cloud, group, group)
    plan, facts = plan_of(), cloud.facts()

    aws = ask_ec2(plan, facts, timeout_s=TIMEOUT_S)

    assert aws.refused == {}
    assert aws.not_found == {}
    assert aws.region == REGION
    assert {name: one["InstanceId"] for name, one in aws.instances.items()} == cloud.ids
    assert judged(plan, facts, aws) == USUAL
    assert read_aws_facts(json.dumps(aws_facts_to_json(aws)), "again.json") == aws
    # Nothing else was asked than the policy allows.
    (statement,) = iam_policy()["Statement"]
    assert {f"ec2:{query['Action']}" for query in gate.asked} <= set(statement["Action"])


def test_hosts_are_found_by_address_without_metadata(cloud: Cloud) -> None:
    group = cloud.group("pd-efa", own=True)
    pair(cloud, group, group)

    aws = ask_ec2(plan_of(aws={"region": REGION}), {}, session=SESSION, timeout_s=TIMEOUT_S)

    assert {name: one["InstanceId"] for name, one in aws.instances.items()} == cloud.ids


def test_prefill_and_decode_in_groups_of_their_own(cloud: Cloud) -> None:
    prefill, decode = cloud.group("prefill", own=True), cloud.group("decode", own=True)
    pair(cloud, prefill, decode)
    plan, facts = plan_of(), cloud.facts()

    aws = ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)

    assert judged(plan, facts, aws) == {**USUAL, "SG001": "error", "SG004": "error"}
    for one, other in ((prefill, decode), (decode, prefill)):
        cloud.allow_in(one, other)
        cloud.allow_out(one, other)
    assert judged(plan, facts, ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)) == {
        **USUAL,
        "SG002": "warning",
    }


def test_the_missing_outbound_rule_and_its_command(cloud: Cloud) -> None:
    group = cloud.group("pd-efa")
    cloud.allow_in(group, group)
    pair(cloud, group, group)
    plan, facts = plan_of(), cloud.facts()

    found = findings(plan, facts, ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S))

    (blocked,) = [one for one in found if one.id == "SG001"]
    assert blocked.message == f"security groups block EFA: {group} has no outbound rule for all traffic to itself"
    assert blocked.commands == (
        f"aws ec2 authorize-security-group-egress --group-id {group} --ip-permissions "
        f"'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group}}}]' --region {REGION}",
    )
    cloud.allow_out(group, group)
    assert judged(plan, facts, ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)) == USUAL


@pytest.mark.parametrize("world", [{"IpRanges": [{"CidrIp": "0.0.0.0/0"}]}, {"Ipv6Ranges": [{"CidrIpv6": "::/0"}]}])
def test_ports_open_to_the_world(cloud: Cloud, world: dict[str, Any]) -> None:
    group = cloud.group("pd-efa", own=True)
    permission = {"IpProtocol": "tcp", "FromPort": 5000, "ToPort": 5999, **world}
    cloud.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[permission])
    pair(cloud, group, group)
    plan, facts = plan_of(), cloud.facts()

    aws = ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)

    assert judged(plan, facts, aws) == {**USUAL, "SG005": "error"}
    messages = {one.message for one in findings(plan, facts, aws) if one.id == "SG005"}
    assert messages == {
        "open to the whole internet: TCP 5600 (side channel)", "open to the whole internet: TCP 5700 (side channel)"
    }  # fmt: skip


def test_prefix_lists_are_read(cloud: Cloud) -> None:
    group = cloud.group("pd-efa")
    entries = [{"Cidr": "10.0.0.0/16", "Description": "inside"}]
    made = cloud.ec2.create_managed_prefix_list(
        PrefixListName="inside", MaxEntries=2, AddressFamily="IPv4", Entries=entries
    )["PrefixList"]["PrefixListId"]
    permission = {"IpProtocol": "-1", "PrefixListIds": [{"PrefixListId": made}]}
    cloud.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[permission])
    pair(cloud, group, group)
    plan, facts = plan_of(), cloud.facts()

    aws = ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)

    assert aws.prefix_lists == {made: ["10.0.0.0/16"]}
    # Enough for TCP, and nothing for EFA.
    assert judged(plan, facts, aws) == {**USUAL, "SG001": "error"}


@pytest.mark.parametrize("action", ["DescribeSecurityGroups", "DescribeInstances", "DescribeInstanceTypes"])
def test_a_call_that_is_not_allowed(gate: Gate, cloud: Cloud, action: str) -> None:
    group = cloud.group("pd-efa", own=True)
    pair(cloud, group, group)
    gate.refuse(action, 403, "UnauthorizedOperation", f"You are not authorized to perform: ec2:{action}")
    plan, facts = plan_of(), cloud.facts()

    aws = ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)

    assert list(aws.refused) == [action]
    assert f'{{"Effect": "Allow", "Action": "ec2:{action}", "Resource": "*"}}' in aws.refused[action]
    assert gate.count(action) == 1
    verdicts = judged(plan, facts, aws)
    assert "error" not in verdicts.values()
    assert verdicts["AWS001"] == "skipped"
    assert verdicts.get("SG001", "pass") == ("pass" if action == "DescribeInstanceTypes" else "skipped")


def test_a_call_that_is_throttled_once_is_made_again(gate: Gate, cloud: Cloud) -> None:
    group = cloud.group("pd-efa", own=True)
    pair(cloud, group, group)
    gate.refuse("DescribeSecurityGroups", 503, "RequestLimitExceeded", times=1)
    plan, facts = plan_of(), cloud.facts()

    aws = ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)

    assert aws.refused == {}
    assert gate.count("DescribeSecurityGroups") == 2
    assert judged(plan, facts, aws) == USUAL


def test_a_call_that_stays_throttled_is_given_up(gate: Gate, cloud: Cloud) -> None:
    group = cloud.group("pd-efa", own=True)
    pair(cloud, group, group)
    gate.refuse("DescribeSecurityGroups", 503, "RequestLimitExceeded")
    plan, facts = plan_of(), cloud.facts()

    aws = ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)

    assert "refused three attempts (RequestLimitExceeded)" in aws.refused["DescribeSecurityGroups"]
    assert gate.count("DescribeSecurityGroups") == 3
    assert judged(plan, facts, aws)["SG001"] == "skipped"


def test_answers_in_pages_are_read_to_the_end(gate: Gate, cloud: Cloud) -> None:
    group = cloud.group("pd-efa", own=True)
    pair(cloud, group, group)
    page = (
        "<DescribeSecurityGroupsResponse xmlns='http://ec2.amazonaws.com/doc/2016-11-15/'><requestId>x</requestId>"
        "<securityGroupInfo/><nextToken>more</nextToken></DescribeSecurityGroupsResponse>"
    )
    gate.rules["DescribeSecurityGroups"] = lambda query: None if query.get("NextToken") else (200, page)
    plan, facts = plan_of(), cloud.facts()

    aws = ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)

    assert list(aws.security_groups) == [group]


def test_the_wrong_region_is_said(cloud: Cloud) -> None:
    group = cloud.group("pd-efa", own=True)
    pair(cloud, group, group)
    plan, facts = plan_of(aws={"region": "us-west-2"}), cloud.facts()

    aws = ask_ec2(plan, facts, session=SESSION, timeout_s=TIMEOUT_S)

    assert aws.instances == {}
    said = "its metadata says region us-east-2, but us-west-2 was asked: set `aws.region` to us-east-2"
    assert aws.not_found == {"p1": said, "d1": said}
    verdicts = judged(plan, facts, aws)
    assert verdicts["AWS014"] == "warning"
    assert verdicts["AWS002"] == "skipped"
    assert verdicts["SG001"] == "skipped"


def test_an_error_about_the_region_is_said(gate: Gate, cloud: Cloud) -> None:
    gate.refuse("DescribeInstances", 400, "InvalidInstanceID.NotFound", "The instance IDs do not exist")
    pair(cloud, cloud.group("a"), cloud.group("b"))

    aws = ask_ec2(plan_of(), cloud.facts(), session=SESSION, timeout_s=TIMEOUT_S)

    assert "probably the wrong region; us-east-2 was asked" in aws.refused["DescribeInstances"]


def test_the_region_of_most_hosts_is_asked(cloud: Cloud) -> None:
    pair(cloud, cloud.group("a"), cloud.group("b"))
    facts = cloud.facts()
    facts["d1"] = cloud.facts(region="eu-west-1")["d1"]

    assert ask_ec2(plan_of(), {"d1": facts["d1"]}, session=SESSION, timeout_s=TIMEOUT_S).region == "eu-west-1"
    assert ask_ec2(plan_of(aws={"region": REGION}), facts, session=SESSION, timeout_s=TIMEOUT_S).region == REGION


def test_expired_credentials(gate: Gate, cloud: Cloud) -> None:
    gate.refuse("DescribeInstances", 400, "RequestExpired", "Request has expired.")
    pair(cloud, cloud.group("a"), cloud.group("b"))

    aws = ask_ec2(plan_of(), cloud.facts(), session=SESSION, timeout_s=TIMEOUT_S)

    assert "have expired" in aws.refused["DescribeInstances"]


def test_no_credentials(gate: Gate, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair(cloud, cloud.group("a"), cloud.group("b"))
    no_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", gate.url)

    aws = ask_ec2(plan_of(), cloud.facts(), timeout_s=TIMEOUT_S)

    assert list(aws.refused) == ["DescribeInstances"]
    assert "no AWS credentials were found" in aws.refused["DescribeInstances"]
    assert gate.asked == []


def test_a_profile_that_does_not_exist(gate: Gate) -> None:
    aws = ask_ec2(plan_of(aws={"region": REGION, "profile": "lab"}), {}, timeout_s=TIMEOUT_S)

    assert "the AWS profile 'lab' is not configured" in aws.refused["DescribeInstances"]


def test_a_profile_of_the_cluster_file_is_taken(
    gate: Gate, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair(cloud, cloud.group("a"), cloud.group("b"))
    no_credentials(monkeypatch, tmp_path)
    (tmp_path / "config").write_text(
        "[profile lab]\naws_access_key_id = a\naws_secret_access_key = b\n"
        f"region = {REGION}\nendpoint_url = {gate.url}\n",
        encoding="utf-8",
    )

    aws = ask_ec2(plan_of(aws={"profile": "lab"}), {}, timeout_s=TIMEOUT_S)

    assert aws.region == REGION
    assert set(aws.instances) == {"p1", "d1"}


def test_no_region_at_all(gate: Gate) -> None:
    aws = ask_ec2(plan_of(), {}, timeout_s=TIMEOUT_S)

    assert "set `aws.region`" in aws.refused["DescribeInstances"]


def test_an_endpoint_that_refuses_connections(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")

    aws = ask_ec2(plan_of(aws={"region": REGION}), {}, session=SESSION, timeout_s=TIMEOUT_S)

    assert "the EC2 API of us-east-2 does not answer" in aws.refused["DescribeInstances"]


def test_an_endpoint_that_never_answers_is_given_up(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()

        aws = ask_ec2(plan_of(aws={"region": REGION}), {}, session=SESSION, timeout_s=1.5)

        assert time.monotonic() - begin < 15
    assert "gave no answer within 1.5 s" in aws.refused["DescribeInstances"]


def test_one_call_that_hangs_does_not_hide_the_others(gate: Gate, cloud: Cloud) -> None:
    group = cloud.group("pd-efa", own=True)
    pair(cloud, group, group)
    plan, facts = plan_of(), cloud.facts()
    released = threading.Event()

    def hang(query: dict[str, str]) -> None:
        released.wait(60)

    gate.rules["DescribeSubnets"] = hang
    try:
        aws = ask_ec2(plan, facts, session=SESSION, timeout_s=10)
    finally:
        released.set()

    assert list(aws.refused) == ["DescribeSubnets"]
    assert list(aws.security_groups) == [group]
    assert judged(plan, facts, aws)["AWS001"] == "skipped"
    assert "SG001" not in judged(plan, facts, aws)


def test_an_answer_that_is_not_ec2s(gate: Gate, cloud: Cloud) -> None:
    pair(cloud, cloud.group("a"), cloud.group("b"))
    gate.rules["DescribeInstances"] = lambda query: (200, "<html>please log in to the guest network</html")

    aws = ask_ec2(plan_of(), cloud.facts(), session=SESSION, timeout_s=TIMEOUT_S)

    assert "what answered is not the EC2 API" in aws.refused["DescribeInstances"]


def test_a_session_of_the_caller_is_used(gate: Gate, cloud: Cloud) -> None:
    pair(cloud, cloud.group("a"), cloud.group("b"))
    session = boto3.Session(aws_access_key_id="mine", aws_secret_access_key="x", region_name=REGION)

    aws = ask_ec2(plan_of(), {}, session=session, timeout_s=TIMEOUT_S)

    assert set(aws.instances) == {"p1", "d1"}
