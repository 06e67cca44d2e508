"""The cluster file: what is accepted, what is refused, and that each refusal says where and what to do."""

from __future__ import annotations

import os
import re
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from pdctl import spec as spec_module
from pdctl.errors import ClusterFileError, Problem, UsageError
from pdctl.spec import ClusterSpec, HostSpec, RoleSpec, SecretRef, argument_name, load, looks_secret, parse
from pdctl.spec_yaml import MAX_BYTES, MAX_DEPTH

BASE = """\
cluster: qwen3
model: Qwen/Qwen3-32B
accelerator: cuda
fabric: efa
prefill:
  hosts: [p1]
decode:
  hosts: [d1]
router: {host: p1}
"""

FULL = """\
cluster: qwen3
model: Qwen/Qwen3-32B
accelerator: cuda
fabric: efa
transfer: {mode: pull, timeout_s: 12.5, lease_s: 10, extra: {backends: [LIBFABRIC], nested: {a: null}}}
ssh: {user: ubuntu, port: 2222, host_keys: accept-new}
python: /opt/vllm/bin/python
env: {HF_TOKEN: {from_env: MY_TOKEN}, RATE: 1e3, ZEROS: 007, FLAG: True, TEXT: "true"}
prefill:
  hosts:
    - p1
    - name: p2
      address: 10.0.0.2
      devices: [4, 5]
      env: {A: b}
      ssh_user: root
  tensor_parallel: 2
  vllm_args:
    max_num_batched_tokens: 8192
    --enforce-eager: true
    hf-overrides.rope_theta: 1.5
    compilation-config: {level: 3}
    middleware: [a.b, c.d]
decode:
  hosts: [d1, p1]
  env: {PORT: 80}
router: {host: p1, port: 9000, args: {request-timeout-secs: 600}}
aws: {region: us-gov-west-1}
"""


def problems_of(text: str, **environ: str) -> list[Problem]:
    with pytest.raises(ClusterFileError) as caught:
        parse(text, file="c.yaml", environ=environ)
    assert "pydantic" not in str(caught.value)
    return list(caught.value.problems)


def only_problem(text: str, **environ: str) -> Problem:
    problems = problems_of(text, **environ)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def with_lines(*lines: str) -> str:
    """BASE and more top-level lines; the first of them is line 10."""
    return BASE + "\n".join(lines) + "\n"


def in_prefill(*lines: str) -> str:
    """BASE with more keys of prefill; the first of them is line 7."""
    return BASE.replace("  hosts: [p1]\n", "  hosts: [p1]\n" + "".join(f"  {line}\n" for line in lines))


def with_hosts(prefill: str, decode: str = "[d1]", router: str = "p1") -> str:
    text = BASE.replace("[p1]", prefill).replace("[d1]", decode)
    return text.replace("{host: p1}", f"{{host: {router}}}")


class TestAccepted:
    def test_the_smallest_file_has_the_documented_defaults(self):
        spec = parse(BASE, file="c.yaml", environ={})
        assert spec.python == "python3"
        assert spec.env == {}
        assert spec.aws is None
        assert (spec.transfer.mode, spec.transfer.timeout_s, spec.transfer.stall_after_s) == ("push", 30, 5)
        assert (spec.transfer.lease_s, spec.transfer.load_failure_policy, spec.transfer.extra) == (30, "fail", {})
        assert (spec.ssh.host_keys, spec.ssh.connect_timeout_s, spec.ssh.command_timeout_s) == ("strict", 10, 60)
        assert spec.ssh.max_parallel == 32
        assert spec.prefill.hosts == [HostSpec(name="p1")]
        assert (spec.prefill.tensor_parallel, spec.prefill.data_parallel, spec.prefill.instances_per_host) == (1, 1, 1)
        assert (spec.router.host, spec.router.port, spec.router.policy) == ("p1", 8000, "round_robin")

    def test_a_full_file(self):
        spec = parse(FULL, file="c.yaml", environ={})
        assert spec.transfer.extra == {"backends": ["LIBFABRIC"], "nested": {"a": None}}
        assert spec.prefill.hosts[1].devices == [4, 5]
        assert spec.prefill.hosts[1].env == {"A": "b"}
        assert spec.prefill.vllm_args == {
            "max-num-batched-tokens": 8192,
            "enforce-eager": True,
            "hf-overrides.rope_theta": 1.5,
            "compilation-config": {"level": 3},
            "middleware": ["a.b", "c.d"],
        }
        assert spec.aws is not None
        assert spec.aws.region == "us-gov-west-1"

    def test_env_values_stay_as_they_are_written(self):
        spec = parse(FULL, file="c.yaml", environ={})
        assert spec.env == {
            "HF_TOKEN": SecretRef(from_env="MY_TOKEN"),
            "RATE": "1e3",
            "ZEROS": "007",
            "FLAG": "True",
            "TEXT": "true",
        }
        assert spec.decode.env == {"PORT": "80"}

    def test_the_secret_is_not_looked_up_when_reading(self):
        spec = parse(FULL, file="c.yaml", environ={"MY_TOKEN": "hf_very_secret"})
        assert "hf_very_secret" not in repr(spec)

    def test_keys_with_nothing_behind_them_count_as_not_given(self):
        spec = parse(with_lines("ssh:", "env:", "aws:", "transfer: {timeout_s: }"), file="c.yaml", environ={})
        assert spec.env == {}
        assert spec.aws is None
        assert spec.transfer.timeout_s == 30

    def test_local_and_localhost_are_local(self):
        spec = parse(with_hosts("[local]", "[localhost]", "local"), file="c.yaml", environ={})
        assert spec.prefill.hosts[0].is_local
        assert spec.decode.hosts[0].is_local

    def test_models_are_frozen(self):
        spec = parse(BASE, file="c.yaml", environ={})
        with pytest.raises(ValidationError):
            spec.model = "other"

    def test_models_can_be_made_directly(self):
        role = RoleSpec(hosts=[HostSpec(name="p1")], env={"A": "b", "T": SecretRef(from_env="X")})
        assert role.env["T"] == SecretRef(from_env="X")

    def test_anchors_and_merge_keys(self):
        text = in_prefill("vllm_args: &args {a: 1, b: 2}").replace(
            "  hosts: [d1]\n", "  hosts: [d1]\n  vllm_args: {<<: *args, b: 3}\n"
        )
        spec = parse(text, file="c.yaml", environ={})
        assert spec.decode.vllm_args == {"b": 3, "a": 1}

    def test_a_merge_key_may_list_several_and_the_first_wins(self):
        text = in_prefill("vllm_args: &x {a: 1}", "env: &y {a: 2, b: c}").replace(
            "  hosts: [d1]\n", "  hosts: [d1]\n  env: {<<: [*x, *y]}\n"
        )
        assert parse(text, file="c.yaml", environ={}).decode.env == {"a": "1", "b": "c"}

    def test_ipv6_address(self):
        spec = parse(with_hosts("[{name: p1, address: 'fd00::1'}]"), file="c.yaml", environ={})
        assert spec.prefill.hosts[0].address == "fd00::1"

    def test_windows_line_ends_and_byte_order_mark(self, tmp_path: Path):
        path = tmp_path / "c.yaml"
        path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
        assert load(path, {}) == parse(BASE, file=str(path), environ={})


class TestLines:
    def test_lines_of_keys_and_entries(self):
        spec = parse(FULL, file="dir/c.yaml", environ={})
        assert spec.file == "dir/c.yaml"
        assert spec.line("cluster") == 1
        assert spec.line("prefill") == 9
        assert spec.line("prefill.hosts[0]") == 11
        assert spec.line("prefill.hosts[1].address") == 13
        assert spec.line("decode.hosts[1]") == 25

    def test_the_nearest_parent_stands_in(self):
        spec = parse(FULL, file="c.yaml", environ={})
        assert spec.line("prefill.hosts[0].address") == 11
        assert spec.line("prefill.port") == 9
        assert spec.line("nothing.such") is None
        assert spec.line("") is None

    def test_options_are_found_under_their_normalised_name_too(self):
        spec = parse(FULL, file="c.yaml", environ={})
        assert spec.line("prefill.vllm_args.max-num-batched-tokens") == 19
        assert spec.line("prefill.vllm_args.max_num_batched_tokens") == 19
        assert spec.line("prefill.vllm_args.compilation-config.level") == 22

    def test_problem(self):
        spec = parse(FULL, file="c.yaml", environ={})
        assert spec.problem("router.port", "is taken", "choose another") == Problem(
            "c.yaml", 27, "router.port", "is taken", "choose another"
        )


class TestAllAtOnce:
    def test_every_problem_is_reported_in_the_order_of_lines(self):
        text = (
            BASE.replace("efa", "efaa")
            .replace("cuda", "cude")
            .replace("[d1]", "d1")
            .replace("model: Qwen/Qwen3-32B\n", "")
        )
        text += "env: {A: '${MISSING}'}\nextra_key: 1\ncluster: again\n"
        found = [(problem.line, problem.key) for problem in problems_of(text)]
        assert found == [
            (None, "model"),
            (2, "accelerator"),
            (3, "fabric"),
            (7, "decode.hosts"),
            (9, "env.A"),
            (10, "extra_key"),
            (11, "cluster"),
        ]

    def test_the_error_text_has_file_line_and_key(self):
        problem = only_problem(BASE.replace("cuda", "cude"))
        assert str(problem).startswith("c.yaml:3: accelerator: expected one of cuda, neuron, cpu, found the text")
        assert problem.hint == "did you mean `cuda`?"

    def test_a_file_of_nonsense_gives_a_list_that_ends(self):
        problems = problems_of("".join(f"k{number}: v\n" for number in range(1000)))
        assert len(problems) == spec_module.MAX_PROBLEMS + 1


class TestKeys:
    @pytest.mark.parametrize(
        ("text", "key", "hint"),
        [
            (with_lines("modle: x"), "modle", "did you mean `model`?"),
            (in_prefill("tensor-parallel: 2"), "prefill.tensor-parallel", "did you mean `tensor_parallel`?"),
            (in_prefill("tensor_parallel_size: 2"), "prefill.tensor_parallel_size", "did you mean `tensor_parallel`?"),
            (in_prefill("max-num-seqs: 2"), "prefill.max-num-seqs", "options of vLLM belong under `vllm_args`"),
            (
                with_lines("tensor_parallel: 2"),
                "tensor_parallel",
                "`tensor_parallel` belongs under `prefill` or `decode`",
            ),
            (with_hosts("[{name: p1, addres: x}]"), "prefill.hosts[0].addres", "did you mean `address`?"),
            (with_lines("transfer: {stall_after: 3}"), "transfer.stall_after", "did you mean `stall_after_s`?"),
        ],
    )
    def test_unknown_keys_get_a_suggestion(self, text: str, key: str, hint: str):
        problem = only_problem(text)
        assert (problem.key, problem.hint) == (key, hint)
        assert problem.message.startswith("unknown key; allowed here: ")

    def test_an_unknown_key_is_told_even_with_an_unusable_value(self):
        assert {p.key for p in problems_of(with_lines("nope: ${MISSING}"))} == {"nope"}
        assert len(problems_of(with_lines("nope: ${MISSING}"))) == 2

    @pytest.mark.parametrize("key", ["cluster", "model", "accelerator", "fabric", "prefill", "decode", "router"])
    def test_required_keys(self, key: str):
        text = re.sub(rf"^{key}:.*\n(?:  .*\n)*", "", BASE, flags=re.MULTILINE)
        problem = only_problem(text)
        assert (problem.key, problem.message) == (key, "this key is missing")
        assert problem.hint

    def test_a_required_key_inside(self):
        problem = only_problem(BASE.replace("  hosts: [p1]", "  tensor_parallel: 1"))
        assert (problem.line, problem.key, problem.message) == (5, "prefill.hosts", "this key is missing")

    def test_duplicate_keys_name_both_lines(self):
        problem = only_problem(in_prefill("hosts: [p2]"))
        assert (problem.line, problem.key) == (7, "prefill.hosts")
        assert problem.message == "this key is there twice; it was first given in line 6"

    @pytest.mark.parametrize("line", ["? [a, b]\n: 1", "? {a: b}\n: 1", ": 1", '"": 1'])
    def test_keys_that_are_no_text(self, line: str):
        assert only_problem(with_lines(line)).line == 10


class TestValues:
    @pytest.mark.parametrize(
        ("value", "found"),
        [
            ("eight", 'found the text "eight"'),
            ('"8"', 'found the text "8"'),
            ("0", "found the number 0"),
            ("-1", "found the number -1"),
            ("1025", "found the number 1025"),
            ("1.0", "found the number 1.0"),
            ("true", "found true"),
            ("[8]", "found a list"),
            ("{}", "found an empty mapping"),
            (".inf", "found the number .inf"),
            ("1" * 50, "found the number with more than 30 digits"),
            ("1_000", 'found the text "1_000"'),
        ],
    )
    def test_whole_numbers(self, value: str, found: str):
        problem = only_problem(in_prefill(f"tensor_parallel: {value}"))
        assert problem.line == 7
        assert problem.message == f"expected a whole number >= 1 and <= 1024, {found}"

    @pytest.mark.parametrize(
        ("key", "largest"),
        [("data_parallel", 1024), ("instances_per_host", 64), ("port", 65535), ("telemetry_port", 65535)],
    )
    def test_bounds(self, key: str, largest: int):
        assert getattr(parse(in_prefill(f"{key}: {largest}"), file="c", environ={}).prefill, key) == largest
        assert only_problem(in_prefill(f"{key}: {largest + 1}")).key == f"prefill.{key}"
        assert only_problem(in_prefill(f"{key}: 0")).key == f"prefill.{key}"

    @pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan", "90000", "soon", "true", "1e400"])
    def test_time_outs(self, value: str):
        problem = only_problem(with_lines(f"transfer: {{timeout_s: {value}}}"))
        assert (problem.line, problem.key) == (10, "transfer.timeout_s")
        assert problem.message.startswith("expected a number of seconds > 0 and <= 86400, found")

    def test_hosts_are_bounded(self):
        names = ", ".join(f"h{number}" for number in range(513))
        assert "expected 1 to 512 hosts, found 513" in only_problem(with_hosts(f"[{names}]")).message
        assert "found 0" in only_problem(with_hosts("[]")).message

    def test_hosts_must_be_a_list(self):
        problem = only_problem(with_hosts("p1"))
        assert problem.message == 'expected a list of hosts, found the text "p1"'
        assert problem.hint == "write [p1]"

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("-oProxyCommand=x", ""),
            ("ubuntu@p1", "give the login by itself, as `ssh_user: ubuntu`"),
            ("'p1:22'", "give a port as `ssh_port`, and an IPv6 address as `address`"),
            ("p1/x", ""),
            ("'p 1'", ""),
            ("''", ""),
            ('"p1\\n"', ""),
            ("ä", ""),
        ],
    )
    def test_host_names(self, name: str, hint: str):
        problem = only_problem(with_hosts(f"[p1, {name}]"))
        assert (problem.key, problem.hint) == ("prefill.hosts[1]", hint)

    @pytest.mark.parametrize(
        "address",
        ["0.0.0.0", "'::'", "'[::1]'", "'fe80::1%eth0'", "10.0.0", "10.0.0.256", "'10.0.0.1:80'", "-x", "a b", "5"],
    )
    def test_addresses(self, address: str):
        problem = only_problem(with_hosts(f"[{{name: p1, address: {address}}}]"))
        assert problem.key == "prefill.hosts[0].address"

    @pytest.mark.parametrize("name", ["Qwen", "a", "a_b", "-a", "a-", "1a", "a" * 41, "a/b", "..", "7", "'a\n'"])
    def test_cluster_names(self, name: str):
        assert only_problem(BASE.replace("cluster: qwen3", f"cluster: {name}")).key == "cluster"

    @pytest.mark.parametrize(
        ("devices", "key"), [("[0, 0]", "[1]"), ("[-1]", "[0]"), ("[a]", "[0]"), ("[]", ""), ("3", "")]
    )
    def test_devices(self, devices: str, key: str):
        assert only_problem(in_prefill(f"devices: {devices}")).key == "prefill.devices" + key

    @pytest.mark.parametrize("value", ["5", "true", "''", "' x'", "-x", '"a\\nb"', '"a\\eb"'])
    def test_texts(self, value: str):
        assert only_problem(BASE.replace("Qwen/Qwen3-32B", value)).key == "model"

    def test_sections_must_be_mappings(self):
        problem = only_problem(with_lines("ssh: ubuntu"))
        assert problem.message.startswith("expected a mapping with the keys user, port,")
        assert problem.message.endswith('found the text "ubuntu"')

    def test_a_zone_is_no_region(self):
        assert only_problem(with_lines("aws: {region: us-east-2a}")).hint.endswith("its region is `us-east-2`")

    def test_long_and_unprintable_values_are_shown_tamed(self):
        problem = only_problem(BASE.replace("cluster: qwen3", 'cluster: "\\e[31m' + "x" * 500 + '"'))
        assert "\x1b" not in str(problem)
        assert len(problem.message) < 250


class TestHosts:
    def test_a_host_twice_in_a_role(self):
        problem = only_problem(with_hosts("[p1, {name: p1, port: 9}]"))
        assert (problem.key, problem.line) == ("prefill.hosts[1]", 6)
        assert "twice" in problem.message

    def test_local_and_localhost_are_the_same_host(self):
        assert "twice" in only_problem(with_hosts("[local, localhost]", "[local]", "local")).message

    def test_a_host_in_both_roles(self):
        assert parse(with_hosts("[p1]", "[p1]"), file="c", environ={}).decode.hosts[0].name == "p1"

    def test_a_host_in_both_roles_has_one_login(self):
        problem = only_problem(with_hosts("[p1]", "[{name: p1, ssh_user: root}]"))
        assert problem.key == "decode.hosts[0]"
        assert "ssh_user" in problem.message

    @pytest.mark.parametrize(
        ("prefill", "decode", "router"),
        [("[local]", "[d1]", "local"), ("[d1]", "[local]", "d1"), ("[local]", "[local]", "r1")],
    )
    def test_local_needs_an_address_among_other_machines(self, prefill: str, decode: str, router: str):
        problems = problems_of(with_hosts(prefill, decode, router))
        assert all("needs an address" in problem.message for problem in problems)

    def test_local_with_an_address_may_mix(self):
        spec = parse(with_hosts("[{name: local, address: 10.0.0.1}]", "[d1]", "local"), file="c", environ={})
        assert spec.prefill.hosts[0].address == "10.0.0.1"

    def test_the_rules_speak_up_beside_other_problems(self):
        text = with_hosts("[p1, p1]").replace("cuda", "cude")
        assert [problem.key for problem in problems_of(text)] == ["accelerator", "prefill.hosts[1]"]


class TestIgnoredChecks:
    def test_an_entry(self):
        first, second = "{id: SG003, hosts: [p1], reason: a jump host}", "{id: HOST004, reason: r}"
        entry = f"doctor:\n  ignore:\n    - {first}\n    - {second}\n"
        spec = parse(BASE + entry, file="c.yaml", environ={})
        assert [(one.id, one.hosts, one.reason) for one in spec.doctor.ignore] == [
            ("SG003", ["p1"], "a jump host"),
            ("HOST004", None, "r"),
        ]
        assert spec.line("doctor.ignore[1].id") == BASE.count("\n") + 4

    def test_nothing_is_ignored_unless_it_is_asked_for(self):
        assert parse(BASE + "doctor:\n", file="c.yaml", environ={}).doctor.ignore == []

    @pytest.mark.parametrize("reason", ["", ", reason: ''", ", reason: ' '", ", reason: "])
    def test_the_reason_is_required(self, reason: str):
        problem = only_problem(BASE + f"doctor:\n  ignore: [{{id: SG003{reason}}}]\n")
        assert problem.key == "doctor.ignore[0].reason"
        assert problem.line == BASE.count("\n") + 2

    def test_a_slip_in_an_id(self):
        problem = only_problem(BASE + "doctor: {ignore: [{id: sg-003, reason: r}]}\n")
        assert (problem.key, problem.hint) == ("doctor.ignore[0].id", "did you mean `SG003`?")

    def test_an_unknown_key(self):
        problem = only_problem(BASE + "doctor: {ignore: [{id: SG003, reason: r, host: p1}]}\n")
        assert (problem.key, problem.hint) == ("doctor.ignore[0].host", "did you mean `hosts`?")


class TestExpansion:
    def test_variables_defaults_and_dollars(self):
        text = with_lines("env: {A: '${X}-${Y:-y}-${EMPTY:-e}-$$-$5-${EMPTY}', $X: b}").replace(", $X: b", "")
        spec = parse(text, file="c", environ={"X": "x", "EMPTY": ""})
        assert spec.env["A"] == "x-y-e-$-$5-"

    def test_keys_are_not_expanded(self):
        problem = only_problem(with_lines("env: {'${X}': b}"), X="A")
        assert "no name of an environment variable" in problem.message

    def test_what_a_variable_brings_is_not_expanded_again(self):
        spec = parse(with_lines("env: {A: '${X}'}"), file="c", environ={"X": "${Y} $$ $Z"})
        assert spec.env["A"] == "${Y} $$ $Z"

    def test_without_quotes_the_result_may_be_a_number(self):
        text = BASE.replace(
            "{host: p1}", "\n  host: p1\n  port: ${PORT}\n  args:\n    x: '${N}'\n    y: ${N}\n    z:\n    - ${N}"
        )
        spec = parse(text, file="c", environ={"PORT": "9000", "N": "7"})
        assert spec.router.port == 9000
        assert spec.router.args == {"x": "7", "y": 7, "z": [7]}

    def test_inside_brackets_it_needs_quotes(self):
        problem = only_problem(BASE.replace("{host: p1}", "{host: p1, port: ${PORT}}"), PORT="9000")
        assert problem.line == 9
        assert "needs quotes" in problem.hint

    def test_with_quotes_it_stays_text(self):
        text = BASE.replace("{host: p1}", "{host: p1, port: '${PORT}'}")
        assert only_problem(text, PORT="9000").key == "router.port"

    def test_an_unset_variable_is_told_with_its_line(self):
        problem = only_problem(in_prefill("tensor_parallel: ${TP}"))
        assert (problem.line, problem.key) == (7, "prefill.tensor_parallel")
        assert "TP is not set" in problem.message

    @pytest.mark.parametrize("value", ["${", "${}", "${1}", "${A-b}", "${A:-${B}}", "${A b}", "$HOME", "${A:-$$}"])
    def test_other_forms_are_refused(self, value: str):
        problems = problems_of(with_lines(f"env: {{X: '{value}'}}"), A="a", B="b", HOME="/h")
        assert {problem.key for problem in problems} == {"env.X"}

    def test_values_of_variables_are_not_shown(self):
        text = BASE.replace("cuda", "${A}").replace("[p1]", "['${A}']").replace("qwen3", "${A}", 1)
        shown = "\n".join(str(problem) for problem in problems_of(text, A="sesame open"))
        assert "sesame" not in shown
        assert "${A}" in shown

    def test_variables_cannot_blow_up(self):
        text = with_lines("env: {A: '" + "${X}" * 2000 + "'}")
        assert "expand to more than" in only_problem(text, X="x" * 1000).message

    @pytest.mark.parametrize("value", ["a\0b", "a\udcffb"])
    def test_what_no_process_can_take(self, value: str):
        problem = only_problem(with_lines("env: {A: '${X}'}"), X=value)
        assert "expands to a text that holds" in problem.message


class TestSecrets:
    @pytest.mark.parametrize(
        "name",
        [
            *("HF_TOKEN", "hf_token", "HFTOKEN", "TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "DB_PASSWORD"),
            *(
                "PASSWORD1",
                "OPENAI_API_KEY",
                "VLLM_API_KEY",
                "SSH_PRIVATE_KEY",
                "SECRET_2",
                "MY_CREDENTIAL",
                "CREDENTIALS",
            ),
        ],
    )
    @pytest.mark.parametrize("value", ["sesame", "'${SECRET_VALUE}'", "'x${SECRET_VALUE}'", "5", "true"])
    def test_a_plain_secret_is_refused(self, name: str, value: str):
        problem = only_problem(with_lines(f"env: {{{name}: {value}}}"), SECRET_VALUE="sesame")
        assert problem.key == f"env.{name}"
        assert "from_env" in problem.hint
        assert "sesame" not in str(problem)

    def test_the_hint_takes_the_variable_that_was_meant(self):
        problem = only_problem(with_lines("env: {HF_TOKEN: '${MY_TOKEN}'}"), MY_TOKEN="x")
        assert "HF_TOKEN: {from_env: MY_TOKEN}" in problem.hint

    @pytest.mark.parametrize("where", ["prefill.env.T_TOKEN", "prefill.hosts[0].env.T_TOKEN", "router.env.T_TOKEN"])
    def test_everywhere(self, where: str):
        texts = {
            "prefill.env.T_TOKEN": in_prefill("env: {T_TOKEN: x}"),
            "prefill.hosts[0].env.T_TOKEN": with_hosts("[{name: p1, env: {T_TOKEN: x}}]"),
            "router.env.T_TOKEN": BASE.replace("{host: p1}", "{host: p1, env: {T_TOKEN: x}}"),
        }
        assert only_problem(texts[where]).key == where

    @pytest.mark.parametrize(
        "name",
        [
            "TOKENIZERS_PARALLELISM",
            "MAX_TOKENS",
            "HF_TOKEN_PATH",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "KEYBOARD",
            "SECRETARY",
        ],
    )
    def test_names_that_only_look_alike(self, name: str):
        assert not looks_secret(name)
        assert parse(with_lines(f"env: {{{name}: x}}"), file="c", environ={}).env[name] == "x"

    def test_from_env_takes_no_variable(self):
        """Else the secret itself would be shown as the name of a variable that is not set."""
        problem = only_problem(with_lines("env: {T: {from_env: '${HF_TOKEN}'}}"), HF_TOKEN="hf_sesame")
        assert problem.key == "env.T.from_env"
        assert "sesame" not in str(problem)
        assert problem.hint == "write {from_env: HF_TOKEN}"

    @pytest.mark.parametrize("value", ["hf-sesame", "[sesame]", "5", "", "'sesame open'"])
    def test_from_env_wants_a_name_and_does_not_repeat_what_is_there(self, value: str):
        problem = only_problem(with_lines(f"env: {{T: {{from_env: {value}}}}}"))
        assert problem.key == "env.T.from_env"
        assert "sesame" not in str(problem)

    @pytest.mark.parametrize("value", ["{}", "{form_env: A}", "{from_env: A, default: b}"])
    def test_from_env_stands_alone(self, value: str):
        assert only_problem(with_lines(f"env: {{T: {value}}}")).key == "env.T"

    @pytest.mark.parametrize(
        ("key", "variable"),
        [
            ("api-key", "VLLM_API_KEY"),
            ("--api_key", "VLLM_API_KEY"),
            ("hf-token", "HF_TOKEN"),
            ("hf_token", "HF_TOKEN"),
        ],
    )
    def test_secret_options(self, key: str, variable: str):
        problem = only_problem(in_prefill(f"vllm_args: {{{key}: sesame}}"))
        assert f"{variable}: {{from_env: {variable}}}" in problem.hint
        assert "sesame" not in str(problem)

    def test_secret_options_of_the_router(self):
        problem = only_problem(BASE.replace("{host: p1}", "{host: p1, args: {api-key: sesame}}"))
        assert problem.key == "router.args.api-key"
        assert "sesame" not in str(problem)


class TestEnvironment:
    @pytest.mark.parametrize("name", ["1A", "A-B", "A B", "'A=B'", "ä", '"A\\nB"'])
    def test_names(self, name: str):
        assert "no name of an environment variable" in only_problem(with_lines(f"env: {{{name}: x}}")).message

    @pytest.mark.parametrize("name", ["PDCTL_FAULT", "PDCTL_FAULT_WRITE", "PDCTL_X", "pdctl_fault"])
    def test_reserved_names(self, name: str):
        for value in ("x", "{from_env: X}", "[1]"):
            assert "pdctl's own" in only_problem(with_lines(f"env: {{{name}: {value}}}")).message

    def test_line_breaks_in_values_are_fine_and_nul_is_not(self):
        assert parse(with_lines('env: {A: "b\\nc"}'), file="c", environ={}).env["A"] == "b\nc"
        assert "NUL" in only_problem(with_lines('env: {A: "b\\0c"}')).message

    @pytest.mark.parametrize("value", ["", "[1]", "null"])
    def test_values(self, value: str):
        assert only_problem(with_lines(f"env: {{A: {value}}}")).key == "env.A"

    def test_all_problems_of_one_environment(self):
        keys = [p.key for p in problems_of(with_lines("env: {A: [1], 1B: x, C_TOKEN: x, D: }"))]
        assert sorted(keys) == ["env.1B", "env.A", "env.C_TOKEN", "env.D"]


class TestArguments:
    @pytest.mark.parametrize(
        ("written", "name"),
        [
            ("max_num_batched_tokens", "max-num-batched-tokens"),
            ("--max-num-batched-tokens", "max-num-batched-tokens"),
            ("max-num-batched-tokens", "max-num-batched-tokens"),
            ("--hf_overrides.rope_theta", "hf-overrides.rope_theta"),
        ],
    )
    def test_names(self, written: str, name: str):
        assert argument_name(written) == name

    def test_the_same_option_twice(self):
        problem = only_problem(in_prefill("vllm_args:", "  max_num_seqs: 1", "  max-num-seqs: 2"))
        assert (problem.line, problem.key) == (9, "prefill.vllm_args.max-num-seqs")
        assert "the same option as `max_num_seqs`" in problem.message

    @pytest.mark.parametrize("key", ["'max num'", "'--a=b'", "'--'", "1", "'a;b'", "'a\"b'"])
    def test_no_names(self, key: str):
        assert "no name of an option" in only_problem(in_prefill(f"vllm_args: {{{key}: 1}}")).message

    @pytest.mark.parametrize(
        ("value", "key"),
        [("", ""), (".nan", ""), ("[]", ""), ("[[1]]", "[0]"), ("[null]", "[0]"), ("{a: {b: .inf}}", ".a.b")],
    )
    def test_values(self, value: str, key: str):
        assert only_problem(in_prefill(f"vllm_args: {{x: {value}}}")).key == "prefill.vllm_args.x" + key

    def test_the_router_takes_no_mappings(self):
        assert only_problem(BASE.replace("{host: p1}", "{host: p1, args: {x: {a: 1}}}")).key == "router.args.x"


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "line", "part"),
        [
            ("a: 1\n\tb: 2\n", 2, "tab"),
            ("a:\n\t- 1\n", 2, "tab"),
            ("a: 1\nb: [1,\n\n\n", 2, "stream end"),
            ("a: 1\nb: 'x\n\n", 2, "end of stream"),
            ("a: b: c\n", 1, "mapping values"),
            ("a: 1\n b: 2\n", 2, "mapping values"),
            ("a:\n  b: 1\n c: 2\n", 3, "block end"),
            ("a: 1\nb: \x01\n", 2, "U+0001"),
            ('a: 1\nb: "\\UFFFFFFFF"\n', 2, "escape"),
            ("a: @b\n", 1, "cannot start"),
            ("a: 1\n---\nb: 2\n", 2, "second document"),
            ("- a\n", 1, "found a list"),
            ("text\n", 1, "found a single value"),
            ("!x {a: b}\n", 1, "tag"),
            ("%YAML 9.0\n---\na: 1\n", 1, "YAML"),
        ],
    )
    def test_syntax_errors_are_one_message_with_the_line(self, text: str, line: int, part: str):
        problem = only_problem(text)
        assert problem.line == line
        assert part in problem.message
        assert "\n" not in problem.message

    @pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null\n", "~"])
    def test_an_empty_file(self, text: str):
        problem = only_problem(text)
        assert "empty" in problem.message
        assert "pdctl init" in problem.hint

    @pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!x", "!!str", "!!binary", "!!set"])
    def test_tags_are_refused(self, tag: str):
        assert f'"{tag}"' in only_problem(with_lines(f"env: {{A: {tag} b}}")).message

    def test_an_alias_to_nothing(self):
        assert "*x stands for nothing" in only_problem(with_lines("env: *x")).message

    def test_an_anchor_inside_itself(self):
        assert "*x stands for nothing" in only_problem(with_lines("env: &x {A: *x}")).message

    @pytest.mark.parametrize("value", ["5", "[5]", "*x", "null"])
    def test_merge_keys_take_mappings(self, value: str):
        assert only_problem(with_lines(f"env: {{<<: {value}}}")).key == "env.<<"

    def test_aliases_cannot_blow_up(self):
        lines = ["x0: &x0 [a, b, c, d, e, f, g, h, i, j]"]
        lines += [f"x{n}: &x{n} [" + ", ".join([f"*x{n - 1}"] * 10) + "]" for n in range(1, 12)]
        problems = problems_of("\n".join(lines))
        assert any("more than 100000 values" in problem.message for problem in problems)

    def test_merge_keys_cannot_blow_up(self):
        lines = ["x0: &x0 {a: 1}"]
        lines += [f"x{n}: &x{n} {{<<: [" + ", ".join([f"*x{n - 1}"] * 10) + "]}" for n in range(1, 12)]
        problems = problems_of("\n".join(lines))
        assert any("more than 100000 values" in problem.message for problem in problems)

    def test_nesting_is_bounded(self):
        for depth in (MAX_DEPTH + 1, 5000):
            assert "levels deep" in only_problem("a: " + "[" * depth + "]" * depth).message
        assert "levels deep" in only_problem("- " * 5000).message

    def test_nesting_by_aliases_is_bounded(self):
        lines = ["x0: &x0 [a]"] + [f"x{n}: &x{n} [*x{n - 1}]" for n in range(1, MAX_DEPTH + 5)]
        problems = problems_of("\n".join(lines))
        assert any("levels deep by aliases" in problem.message for problem in problems)

    def test_size_is_bounded(self):
        assert "larger than 1 MiB" in only_problem(BASE + "#" * MAX_BYTES).message


class TestFiles:
    def test_a_file(self, tmp_path: Path):
        path = tmp_path / "c.yaml"
        path.write_text(FULL)
        spec = load(path, {})
        assert isinstance(spec, ClusterSpec)
        assert spec.file == str(path)

    def test_a_missing_file(self, tmp_path: Path):
        with pytest.raises(UsageError, match=r"there is no cluster file .*none\.yaml") as caught:
            load(tmp_path / "none.yaml", {})
        assert "pdctl init" in caught.value.hint

    def test_a_folder(self, tmp_path: Path):
        with pytest.raises(UsageError, match="is a folder"):
            load(tmp_path, {})

    def test_no_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def refuse(*args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(UsageError, match="no permission") as caught:
            load(tmp_path / "c.yaml", {})
        assert "pdctl init" in caught.value.hint

    @pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
    def test_other_failures(self, name: str):
        with pytest.raises(UsageError):
            load(Path(name), {})

    def test_a_loop_of_links(self, tmp_path: Path):
        (tmp_path / "c.yaml").symlink_to(tmp_path / "c.yaml")
        with pytest.raises(UsageError, match="cannot be read"):
            load(tmp_path / "c.yaml", {})

    def test_an_endless_device(self):
        with pytest.raises(ClusterFileError, match="larger than 1 MiB"):
            load(Path("/dev/zero"), {})

    def test_a_pipe(self, tmp_path: Path):
        reader, writer = os.pipe()
        os.write(writer, BASE.encode())
        os.close(writer)
        try:
            assert load(Path(f"/dev/fd/{reader}"), {}).cluster == "qwen3"
        finally:
            os.close(reader)

    def test_other_encodings(self, tmp_path: Path):
        path = tmp_path / "c.yaml"
        path.write_bytes(b"cluster: a1\nmodel: caf\xe9\n")
        with pytest.raises(ClusterFileError) as caught:
            load(path, {})
        (problem,) = caught.value.problems
        assert problem.line == 2
        assert "0xe9, column 11" in problem.message
        path.write_bytes(BASE.encode("utf-16"))
        with pytest.raises(ClusterFileError, match="UTF-8"):
            load(path, {})


# --- the page ---

_PAGE = Path(__file__).parents[2] / "docs" / "cluster-file.md"
_SECTIONS = {
    "ClusterSpec": "Top level",
    "TransferSpec": "transfer",
    "SshSpec": "ssh",
    "RoleSpec": "prefill and decode",
    "HostSpec": "a host",
    "RouterSpec": "router",
    "AwsSpec": "aws",
    "DoctorSpec": "doctor",
    "IgnoreSpec": "an ignored check",
    "SecretRef": "Secrets",
}


def _models() -> dict[str, type[BaseModel]]:
    """Every model that can be reached from ClusterSpec."""
    found: dict[str, type[BaseModel]] = {}
    todo: list[object] = [ClusterSpec]
    while todo:
        item = todo.pop()
        if isinstance(item, type) and issubclass(item, BaseModel) and item.__name__ not in found:
            found[item.__name__] = item
            todo.extend(field.annotation for field in item.model_fields.values())
        todo.extend(typing.get_args(item))
    return found


def _section(title: str) -> str:
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert match, f"docs/cluster-file.md has no section {title!r}"
    return match[1]


def test_every_model_has_a_section():
    assert set(_models()) == set(_SECTIONS)


@pytest.mark.parametrize("model", _SECTIONS)
def test_every_key_is_in_the_page_with_its_default(model: str):
    section = _section(_SECTIONS[model])
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", section, re.MULTILINE))
    fields = _models()[model].model_fields
    assert set(rows) == set(fields)
    for name, field in fields.items():
        if field.is_required():
            assert rows[name] == "required"
        elif field.default_factory is not None:
            assert rows[name] == f"`{[] if field.default_factory is list else {}}`"
        elif field.default is not None:
            default = field.default
            assert rows[name] == f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
        else:
            assert rows[name] != "required"


def test_the_examples_of_the_page_can_be_read():
    blocks = re.findall(r"^```yaml\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        text = block
        if not block.startswith("cluster:"):
            given = set(re.findall(r"^(\w+):", block, re.MULTILINE))
            rest = re.split(r"^(?=\w)", BASE, flags=re.MULTILINE)
            text += "".join(part for part in rest if part.split(":")[0] not in given)
        parse(text, file="docs/cluster-file.md", environ={})
