"""--bundle takes names, addresses and ids out, keeps what checks look at, and --facts reads it back."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.bundle import make_bundle, read_bundle
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, facts_to_json, read_facts
from pdctl.doctor.network_facts import NetworkFacts, PathMtu, Reach
from pdctl.doctor.probe_facts import ProbeFacts, ProbeResult
from pdctl.doctor.redaction import Names, Redactor
from pdctl.doctor.registry import all_checks, run_checks
from pdctl.errors import HostKeyRejected, HostUnreachable, PdctlError, UsageError
from tests.support.plans import changed, planned
from tests.unit.doctor import recorded_cases

GPU = "GPU-5a3b6b5c-1111-2222-3333-444455556666"
FINGERPRINT = "SHA256:" + "a" * 43
KEY = b"the same every time"


def facts_of(host: str, address: str, *, user: str = "alice", hostname: str = "", home: str = "") -> HostFacts:
    home = home or f"/home/{user}"
    document = {
        "schema": 1,
        "took_s": 0.4,
        "parts": {
            "system": {
                "hostname": hostname or f"{host}.lab.example.com",
                "kernel": "6.8.0-1021-aws",
                "machine": "x86_64",
                "os": "Ubuntu 22.04",
                "cpus": 192,
                "user": user,
                "uid": 1000,
                "python": "3.10.12",
                "machine_id": f"id-of-{host}",
            },
            "disks": [{"purpose": "home", "path": home, "total_bytes": 10, "free_bytes": 5}],
            "rdma": {
                "devices": [
                    {
                        "name": "rdmap0s6",
                        "driver": "efa",
                        "ports": [
                            {
                                "number": 1,
                                "state": "ACTIVE",
                                "gids": [{"index": 0, "gid": "fe80:0000:0000:0000:0a12:34ff:fe56:789a"}],
                            }
                        ],
                    }
                ]
            },
            "nvidia": {"present": True, "gpus": [{"index": 0, "name": "H200", "uuid": GPU}]},
            "cloud": {
                "vendor": "Amazon EC2",
                "instance_id": "i-0123456789abcdef0",
                "instance_type": "p5en.48xlarge",
                "interfaces": [
                    {
                        "mac": "06:ab:cd:ef:01:23",
                        "interface_id": "eni-0123456789abcdef0",
                        "security_groups": ["sg-0fedcba987654321f"],
                        "vpc_id": "vpc-0aaaabbbbccccdddd",
                        "addresses": [address],
                    }
                ],
            },
            "interpreters": [
                {"python": "@HOME@/secretproject/bin/python", "ok": True, "path": f"{home}/secretproject/bin/python"}
            ],
            "network": {
                "interfaces": [{"name": "eth0", "mtu": 9001, "up": True, "addresses": [f"{address}/24"]}],
                "listeners": [{"address": address, "port": 8100, "process": f"python of {user}"}],
                "resolved": {host: [address], f"{host}.lab.example.com": [address]},
            },
            "environment": {"FI_PROVIDER": "efa", "PROJECT": "apollo", "VLLM_HOST_IP": address},
        },
        "missing": {"efa": f"cannot read {home}/x on {host}"},
    }  # fmt: skip
    return read_facts(host, document, clock_offset_s=0.25, clock_error_s=0.01)


def context_of(**more: Any) -> Context:
    data = changed(
        cluster="apollo-serving",
        prefill={"hosts": [{"name": "trainbox", "address": "10.1.2.3", "env": {"PROJECT": "apollo"}}]},
        decode={"hosts": [{"name": "decodebox", "ssh_user": "bobby"}], "python": "~/secretproject/bin/python"},
        router={"host": "trainbox"},
        ssh={"user": "carol", "identity_file": "~/.ssh/apollo.pem"},
        doctor={"ignore": [{"id": "HOST003", "hosts": ["trainbox"], "reason": "because of carol"}]},
    )
    plan = planned(data)
    return Context(
        plan,
        {"trainbox": facts_of("trainbox", "10.1.2.3"), "decodebox": facts_of("decodebox", "10.1.2.4")},
        **more,
    )


def bundle_of(context: Context, **more: Any) -> dict[str, Any]:
    return json.loads(json.dumps(make_bundle(context, key=KEY, **more)))


class TestRedaction:
    def test_nothing_that_names_anybody_is_left(self) -> None:
        context = context_of(
            unreachable={
                "decodebox": HostKeyRejected(
                    "decodebox", f"{FINGERPRINT} in /home/operator/.ssh/known_hosts", hint="ask dave on laptop7"
                )
            },
            network=NetworkFacts(
                (Reach("trainbox", "decodebox", "10.1.2.4", 5700, "side channel", "timeout", "no answer of 10.1.2.4"),),
                (PathMtu("trainbox", "decodebox", "10.1.2.4", 9001, 1500),),
            ),
            probe=ProbeFacts((ProbeResult("trainbox", "decodebox", False, "write", error="lost 10.1.2.3:45"),)),
            aws=AwsFacts(
                region="us-east-2",
                instances={"trainbox": {"InstanceId": "i-0123456789abcdef0", "Tags": [{"Value": "zeus"}]}},
                security_groups={"sg-0fedcba987654321f": {"Description": "group of zeus", "OwnerId": "123456789012"}},
                placement_groups={"zeus-pg": {"GroupName": "zeus-pg", "Strategy": "cluster"}},
                refused={"DescribeSubnets": "arn:aws:sts::123456789012:assumed-role/zeus/carol is not authorized"},
            ),
        )  # fmt: skip
        text = json.dumps(make_bundle(context, users=["dave"], hosts=["laptop7"]))
        for original in (
            "trainbox", "decodebox", "lab.example.com", "alice", "bobby", "carol", "dave", "laptop7", "operator",
            "apollo", "secretproject", "zeus", "10.1.2.3", "10.1.2.4", "i-0123456789abcdef0", "eni-0123", "sg-0fedcba",
            "vpc-0aaaa", "06:ab:cd", "34ff:fe56", "5a3b6b5c", "123456789012", "aaaaaaaa", "id-of",
        ):  # fmt: skip
            assert original not in text, original

    def test_what_checks_look_at_stays(self) -> None:
        bundle = bundle_of(context_of())
        first, second = (entry["facts"]["parts"] for entry in bundle["hosts"].values())
        addresses = [
            ipaddress.ip_interface(part["network"]["interfaces"][0]["addresses"][0]) for part in (first, second)
        ]
        assert addresses[0].network == addresses[1].network
        assert addresses[0] != addresses[1]
        assert all(address.is_private for address in addresses)
        assert first["system"]["machine_id"] != second["system"]["machine_id"]
        assert first["system"]["kernel"] == "6.8.0-1021-aws"
        assert first["cloud"]["instance_type"] == "p5en.48xlarge"
        assert first["cloud"]["instance_id"] == "i-00000000000000001"
        gid = ipaddress.IPv6Address(first["rdma"]["devices"][0]["ports"][0]["gids"][0]["gid"])
        assert gid.is_link_local
        assert first["environment"]["FI_PROVIDER"] == "efa"
        assert first["environment"]["PROJECT"] == "redacted"

    def test_one_thing_has_one_alias_everywhere(self) -> None:
        bundle = bundle_of(context_of())
        (prefill,) = bundle["cluster_file"]["prefill"]["hosts"]
        assert list(bundle["hosts"]) == ["h1", "h2"]
        assert prefill["name"] == "h1"
        parts = bundle["hosts"]["h1"]["facts"]["parts"]
        assert parts["network"]["resolved"]["h1"] == [prefill["address"]]
        assert parts["environment"]["VLLM_HOST_IP"] == prefill["address"]
        python = bundle["cluster_file"]["decode"]["python"]
        assert python == "~/path1"
        assert parts["interpreters"][0]["python"] == "@HOME@/path1"
        assert parts["interpreters"][0]["path"].endswith("/path1")

    def test_hosts_that_are_called_like_aliases(self) -> None:
        plan = planned(changed(prefill={"hosts": ["h2"]}, decode={"hosts": ["h1"]}, router={"host": "h2"}))
        bundle = bundle_of(Context(plan, {"h2": facts_of("h2", "10.0.0.1"), "h1": facts_of("h1", "10.0.0.2")}))
        assert list(bundle["hosts"]) == ["hx1", "hx2"]

    @pytest.mark.parametrize("name", ["open", "tcp", "efa", "name", "host", "ok", "message"])
    def test_hosts_that_are_called_like_words_of_the_facts(self, name: str) -> None:
        plan = planned(changed(prefill={"hosts": [name]}, router={"host": name}))
        network = NetworkFacts((Reach(name, "d1", "10.0.0.2", 1, "side channel", "open"),))
        context = Context(plan, {name: facts_of(name, "10.0.0.1"), "d1": facts_of("d1", "10.0.0.2")}, network=network)
        again = read_bundle(json.dumps(make_bundle(context)), "b.json")
        assert again.network is not None
        assert (again.network.reaches[0].source, again.network.reaches[0].outcome) == ("h1", "open")
        assert list(again.facts) == ["h1", "h2"]
        assert again.facts["h1"].missing.keys() == context.facts[name].missing.keys()

    def test_addresses_that_mean_the_same_everywhere_stay(self) -> None:
        redactor = Redactor(Names(()), "", key=KEY)
        for text in (
            "0.0.0.0/0",
            "::/0",
            "127.0.0.1",
            "::1",
            "0.0.0.0",
            "10.0.0.0/8",
            "fe80::/10",
            "169.254.169.254",
            "[::]:80",
        ):
            assert redactor.text(text) == text

    def test_what_only_looks_like_an_address(self) -> None:
        redactor = Redactor(Names(()), "", key=KEY)
        for text in (
            "12:34:56",
            "0000:00:1e.0",
            "std::vector",
            "nixl::agent",
            "1.2.3.4.5",
            "v1.2.3.4rc1",
            "2.9.0+cu128",
        ):
            assert redactor.text(text) == text
        assert redactor.value({"driver_version": "2.21.37.0"}) == {"driver_version": "2.21.37.0"}

    def test_networks_hold_the_addresses_that_they_held(self) -> None:
        redactor = Redactor(Names(()), "", key=KEY)
        network = ipaddress.ip_network(redactor.text("10.20.0.0/16"))
        assert ipaddress.ip_address(redactor.text("10.20.7.9")) in network
        assert ipaddress.ip_address(redactor.text("10.21.7.9")) not in network


word = st.from_regex(r"[a-z][a-z0-9]{6,9}", fullmatch=True)
address = st.one_of(
    st.ip_addresses(v=4, network="11.0.0.0/8"),
    st.ip_addresses(v=4, network="10.0.0.0/8"),
    st.ip_addresses(v=4, network="192.168.7.0/24"),
    st.ip_addresses(v=6, network="fd00::/8"),
    st.ip_addresses(v=6, network="2600::/12"),
).map(str)
aws_id = st.from_regex(r"(i|eni|vpc|subnet|sg|pl|eni-attach)-[0-9a-f]{17}", fullmatch=True)
# What may stand around a name or an address in a message.
AROUND = ("{}", "no answer of {}", "{}: refused", "({})", "a={},b", "{}:8100", "[{}]", "x\n{}\ny", "to {}.", "'{}'")


@dataclasses.dataclass(frozen=True)
class Originals:
    """Things that must not be found in a bundle."""

    hosts: list[str]
    users: list[str]
    below_home: list[str]
    values: list[str]
    addresses: list[str]
    ids: list[str]

    @property
    def homes(self) -> list[str]:
        return [f"/home/{user}/{path}/x" for user, path in zip(self.users, self.below_home, strict=True)]

    @property
    def all(self) -> list[str]:
        return [*self.hosts, *self.users, *self.below_home, *self.values, *self.addresses, *self.ids]


@st.composite
def originals(draw: st.DrawFn) -> Originals:
    words = draw(st.lists(word, min_size=8, max_size=8, unique=True))
    return Originals(
        hosts=words[:2],
        users=words[2:4],
        below_home=words[4:6],
        values=words[6:],
        addresses=draw(st.lists(address, min_size=2, max_size=8, unique=True)),
        ids=draw(st.lists(aws_id, min_size=1, max_size=3, unique=True)),
    )


def context_with(secret: Originals, texts: Iterator[str]) -> Context:
    """A context with these things wherever a person, a host or a program may have put them."""
    first, second = secret.hosts
    plan = planned(changed(prefill={"hosts": [first]}, decode={"hosts": [second]}, router={"host": first}))
    facts = {}
    for position, host in enumerate(secret.hosts):
        user, home, own = secret.users[position], secret.homes[position], secret.addresses[position]
        made = facts_to_json(facts_of(host, own, user=user, hostname=f"{host}.internal"))
        made["missing"]["clock"] = next(texts)
        made["parts"]["environment"] = {"PROJECT": secret.values[position], "FI_PROVIDER": next(texts)}
        made["parts"]["cloud"]["instance_id"] = secret.ids[0]
        made["parts"]["model"] = {"found": "folder", "path": home, "error": next(texts)}
        made["parts"]["network"]["resolved"][next(texts)] = [own]
        facts[host] = read_facts(host, made)
    gone: dict[str, PdctlError] = {second: HostUnreachable(second, next(texts), hint=next(texts))}
    probe = ProbeFacts((ProbeResult(first, second, False, "write", error=next(texts), log=next(texts)),))
    return Context(plan, facts, gone, probe=probe, aws_skipped=next(texts))


OWN_WORDS = json.dumps(make_bundle(context_of(), key=KEY))


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(originals(), st.randoms(use_true_random=False))
def test_no_original_survives(secret: Originals, random: Random) -> None:
    # A name that is a word of every bundle proves nothing.
    assume(not any(original in OWN_WORDS for original in secret.all))
    shown = [*secret.hosts, *secret.users, *secret.addresses, *secret.ids, *secret.homes]
    texts = (random.choice(AROUND).format(random.choice(shown)) for _ in itertools.count())
    text = json.dumps(make_bundle(context_with(secret, texts), users=secret.users))
    assert [one for one in secret.all if re.search(rf"(?<![0-9a-z.]){re.escape(one)}(?![0-9a-z])", text)] == []
    # Another letter follows if a name of the run looks like one of ours.
    assert re.fullmatch("hx*1 hx*2", " ".join(read_bundle(text, "b.json").facts))


def answers(context: Context) -> Counter[tuple[str, str, str, tuple[str, ...]]]:
    """What all checks say, without the words."""
    found = run_checks(context, all_checks())
    return Counter((one.id, one.verdict.value, one.severity.value, one.hosts) for one in found)


@pytest.mark.parametrize("name", recorded_cases.names())
def test_a_replay_judges_like_the_run(name: str) -> None:
    context = recorded_cases.read_case(name).context
    again = read_bundle(json.dumps(make_bundle(context)), "b.json")
    aliases = dict(zip(context.plan.hosts, again.plan.hosts, strict=True))
    expected = Counter(
        {(id, verdict, severity, tuple(aliases[host] for host in hosts)): count
         for (id, verdict, severity, hosts), count in answers(context).items()}
    )  # fmt: skip
    assert answers(again) == expected


class TestReading:
    def test_what_was_written_is_read_back(self) -> None:
        gone = {"decodebox": HostUnreachable("decodebox", "nothing answers", hint="boot it")}
        context = context_of(unreachable=gone, probe_skipped="no NIXL on trainbox")
        text = json.dumps(make_bundle(context, key=KEY))
        again = read_bundle(text, "b.json")
        assert again.plan.hosts == ("h1", "h2")
        error = again.unreachable["h2"]
        assert isinstance(error, HostUnreachable)
        assert (error.message, error.hint) == ("h2: nothing answers", "boot it")
        assert again.facts["h1"].clock_offset_s == 0.25
        assert again.probe_skipped == "no NIXL on h1"
        # Redacting once more finds nothing but aliases, and gives them the same names.
        twice = json.loads(json.dumps(make_bundle(again, key=KEY)))
        assert twice["hosts"].keys() == again.facts.keys() or list(twice["hosts"]) == ["hx1", "hx2"]

    def test_any_text_of_a_cluster_file(self) -> None:
        arguments = {"chat-template": "a$b \u00e9 \U0001f600 \n 'q' \"w\" \\ # c: d"}
        context = Context(planned(changed(prefill={"vllm_args": arguments}, decode={"vllm_args": arguments})), {})
        again = read_bundle(json.dumps(make_bundle(context)), "b.json")
        assert again.spec.prefill.vllm_args == arguments

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("", "is not JSON"),
            ("[]", "holds no facts"),
            ("{}", "holds no facts"),
            ('{"kind": "pdctl doctor facts", "schema": 9}', "schema 9"),
            ('{"kind": "pdctl doctor facts", "schema": 1}', "is damaged"),
            ('{"kind": "pdctl doctor facts", "schema": 1, "cluster_file": {}, "hosts": 1}', "cluster"),
            ("[" * 100_000, "b.json"),
        ],
    )
    def test_other_files_are_refused_in_words(self, content: str, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            read_bundle(content, "b.json")

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_a_mangled_file_never_crashes(self, data: st.DataObject) -> None:
        bundle = make_bundle(context_of(aws=AwsFacts(instances={"trainbox": {}})), key=KEY)
        value: Any = bundle
        while isinstance(value, (dict, list)) and value:
            key = data.draw(st.sampled_from(list(value) if isinstance(value, dict) else list(range(len(value)))))
            if data.draw(st.booleans()) or not isinstance(value[key], (dict, list)):
                value[key] = data.draw(st.sampled_from([None, 1, "x", [], {}, [1], {"x": 1}, True, 1e308]))
                break
            value = value[key]
        with contextlib.suppress(UsageError):
            read_bundle(json.dumps(bundle), "b.json")
