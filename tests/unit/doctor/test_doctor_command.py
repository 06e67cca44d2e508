"""The command line of the doctor: options, files, exit codes. Facts come from collectors that a test makes up."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from pdctl.cli.main import cli
from pdctl.doctor import run
from pdctl.doctor.facts import HostFacts, read_facts
from pdctl.doctor.network_facts import NetworkFacts
from pdctl.doctor.registry import all_checks
from pdctl.errors import HostUnreachable, PdctlError

FILE = """\
cluster: small
model: /models/m
accelerator: cpu
fabric: tcp
prefill: {hosts: [p1]}
decode: {hosts: [d1]}
router: {host: p1}
"""
GOOD = {
    "system": {
        "hostname": "x",
        "kernel": "6.8.0",
        "machine": "x86_64",
        "os": "Debian GNU/Linux 12",
        "cpus": 16,
        "user": "alice",
        "uid": 1000,
        "python": "3.11.2",
    },
    "limits": {"memlock_soft_bytes": None, "memlock_hard_bytes": None, "nofile_soft": 1048576, "nofile_hard": 1048576},
    "disks": [{"purpose": "home", "path": "/home/alice", "total_bytes": 10**12, "free_bytes": 5 * 10**11}],
    "clock": {"time_s": 1.0, "synchronized": True},
}


def facts_of(host: str, **parts: Any) -> HostFacts:
    system = {**GOOD["system"], "machine_id": host}  # type: ignore[dict-item]
    return read_facts(host, {"schema": 1, "parts": {**GOOD, "system": system, **parts}}, clock_offset_s=0.0)


def few_files(host: str) -> HostFacts:
    return facts_of(host, limits={**GOOD["limits"], "nofile_soft": 1024, "nofile_hard": 1024})  # type: ignore[dict-item]


def old_python(host: str) -> HostFacts:
    return facts_of(host, system={**GOOD["system"], "python": "3.7.1", "machine_id": host})  # type: ignore[dict-item]


Doctor = Callable[..., Result]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs `pdctl doctor` in a folder with a cluster file."""
    (tmp_path / "cluster.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)

    def invoke(
        *words: str,
        facts: Mapping[str, HostFacts] | None = None,
        gone: Mapping[str, PdctlError] | None = None,
        collect: Any = None,
        **environ: str,
    ) -> Result:
        known = {"p1": facts_of("p1"), "d1": facts_of("d1")} if facts is None else dict(facts)

        def collected(*_: Any, on_done: Any, **__: Any) -> Any:
            return known, dict(gone or {})

        monkeypatch.setattr(run, "collect", collect or collected)
        monkeypatch.setattr(run, "check_network", lambda *_, **__: NetworkFacts())
        return CliRunner().invoke(cli, ["doctor", *words], env=environ)

    return invoke


def code_of(result: Result) -> int:
    """What `main` would exit with."""
    if isinstance(result.exception, PdctlError):
        return result.exception.exit_code
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code


ONLY = ("--only", "SSH,HOST002,HOST014")


class TestExitCodes:
    def test_good(self, doctor: Doctor) -> None:
        result = doctor(*ONLY)
        assert code_of(result) == 0, result.output
        assert result.stdout.splitlines()[-1].startswith("7 passed")

    def test_warnings_are_no_failure(self, doctor: Doctor) -> None:
        result = doctor(*ONLY, facts={"p1": few_files("p1"), "d1": facts_of("d1")})
        assert code_of(result) == 0
        assert "! warning HOST002" in result.stdout
        assert "1 warning" in result.stdout

    def test_errors(self, doctor: Doctor) -> None:
        result = doctor(*ONLY, facts={"p1": facts_of("p1"), "d1": old_python("d1")})
        assert code_of(result) == 1
        assert "next: pdctl doctor explain HOST014" in result.stdout

    def test_an_unreachable_host_wins_over_errors(self, doctor: Doctor) -> None:
        gone = {"d1": HostUnreachable("d1", "nothing answers on port 22")}
        result = doctor(*ONLY, facts={"p1": old_python("p1")}, gone=gone)
        assert code_of(result) == 3
        assert "nothing answers on port 22" in result.stdout

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--only", "HOST999"], "HOST999"),
            (["--skip", "FOO"], "FOO"),
            (["--only", "HOST", "--skip", "HOST"], "no check is left"),
            (["-f", "missing.yaml"], "missing.yaml"),
            (["--facts", "missing.json"], "missing.json"),
            (["--aws-facts", "missing.json"], "missing.json"),
            (["--aws-facts", "cluster.yaml"], "not JSON"),
            (["--json", "--fix-commands"], "--fix-commands"),
            (["--timeout", "0"], "--timeout"),
            (["--probe-pairs", "0"], "--probe-pairs"),
            (["explain", "HOST"], "HOST"),
            (["explain", "HOTS003"], "HOTS003"),
            (["--only", "HOST", "list"], "--only is not for `pdctl doctor list`"),
            (["lsit"], "lsit"),
            (["--junit", "missing/j.xml", *ONLY], "missing"),
            (["--bundle", "missing/b.json", *ONLY], "missing"),
        ],
    )
    def test_usage(self, doctor: Doctor, words: list[str], said: str) -> None:
        result = doctor(*words)
        assert code_of(result) == 2, result.output
        assert said in result.output + str(result.exception)

    def test_ctrl_c(self, doctor: Doctor, tmp_path: Path) -> None:
        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        result = doctor("--bundle", "b.json", "--junit", "j.xml", collect=interrupted)
        assert isinstance(result.exception, (KeyboardInterrupt, SystemExit))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml"]


class TestIgnoring:
    def test_an_ignored_error_is_shown_and_does_not_count(self, doctor: Doctor, tmp_path: Path) -> None:
        ignore = "doctor: {ignore: [{id: HOST014, hosts: [d1], reason: replaced on Friday}]}\n"
        (tmp_path / "cluster.yaml").write_text(FILE + ignore)
        result = doctor(*ONLY, facts={"p1": facts_of("p1"), "d1": old_python("d1")})
        assert code_of(result) == 0
        assert "ignored HOST014 on d1" in result.stdout
        assert "replaced on Friday" in result.stdout

    def test_an_unknown_id_has_its_line_and_a_suggestion(self, doctor: Doctor, tmp_path: Path) -> None:
        (tmp_path / "cluster.yaml").write_text(FILE + "doctor:\n  ignore:\n    - {id: HOST099, reason: r}\n")
        result = doctor(*ONLY)
        assert code_of(result) == 2
        assert "cluster.yaml:10" in str(result.exception)
        assert "did you mean `HOST0" in str(result.exception)

    def test_an_entry_that_matches_nothing_is_mentioned(self, doctor: Doctor, tmp_path: Path) -> None:
        (tmp_path / "cluster.yaml").write_text(FILE + "doctor: {ignore: [{id: HOST014, reason: r}]}\n")
        result = doctor(*ONLY)
        assert code_of(result) == 0
        assert "cluster.yaml:8: HOST014 is ignored, and nothing of it was found" in result.stdout


class TestOutput:
    def test_json_is_all_there_is_on_stdout(self, doctor: Doctor) -> None:
        result = doctor(*ONLY, "--json", facts={"p1": few_files("p1"), "d1": facts_of("d1")})
        value = json.loads(result.stdout)
        assert (value["ok"], value["summary"]["warnings"]) == (True, 1)
        assert value["checks"] == ["SSH001", "SSH002", "SSH003", "SSH004", "SSH005", "HOST002", "HOST014"]
        assert result.stderr == ""

    def test_progress_goes_to_stderr(self, doctor: Doctor) -> None:
        result = doctor(*ONLY)
        assert "collecting facts of 2 hosts" in result.stderr
        assert "collecting facts" not in result.stdout

    def test_no_colour_where_there_is_no_terminal(self, doctor: Doctor) -> None:
        assert "\x1b" not in doctor(*ONLY, facts={"p1": old_python("p1"), "d1": facts_of("d1")}).output

    def test_fix_commands_alone(self, doctor: Doctor) -> None:
        result = doctor(*ONLY, "--fix-commands", facts={"p1": few_files("p1"), "d1": few_files("d1")})
        comment, *commands = result.stdout.splitlines()
        assert comment.startswith("# HOST002 on p1, d1: ")
        assert len(commands) == 1
        assert "nofile" in commands[0]
        assert result.stderr == ""

    def test_no_commands(self, doctor: Doctor) -> None:
        result = doctor(*ONLY, "--fix-commands")
        assert result.stdout == ""
        assert "nothing that a command would mend" in result.stderr

    def test_verbose(self, doctor: Doctor) -> None:
        assert "passed HOST014: Python is new enough" in doctor(*ONLY, "--verbose").stdout

    def test_junit(self, doctor: Doctor, tmp_path: Path) -> None:
        doctor(*ONLY, "--junit", "j.xml", facts={"p1": facts_of("p1"), "d1": old_python("d1")})
        root = ElementTree.parse(tmp_path / "j.xml").getroot()
        assert [suite.get("name", "").split(":")[0] for suite in root] == ["SSH", "HOST"]
        assert root.get("failures") == "1"

    def test_what_a_host_reports_need_not_be_valid_unicode(self, doctor: Doctor, tmp_path: Path) -> None:
        facts = facts_of("d1", system={**GOOD["system"], "python": "3.7\ud800", "machine_id": "d1"})  # type: ignore[dict-item]
        words = ("--junit", "j.xml", "--bundle", "b.json")
        for more in ((), ("--json",), ("--fix-commands",)):
            result = doctor(*words, *more, facts={"p1": facts_of("p1"), "d1": facts})
            assert code_of(result) in (0, 1), result.exception
        json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))


class TestBundle:
    def test_it_is_private_and_replays_to_the_same_findings(self, doctor: Doctor, tmp_path: Path) -> None:
        os.umask(os.umask(0o077))
        facts = {"p1": few_files("p1"), "d1": old_python("d1")}
        first = doctor("--json", "--bundle", "b.json", facts=facts)
        path = tmp_path / "b.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "alice" not in path.read_text()
        assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []

        def forbidden(*_: Any, **__: Any) -> Any:
            raise AssertionError("a replay asks nobody")

        again = doctor("--json", "--facts", "b.json", collect=forbidden)
        assert code_of(again) == code_of(first) == 1
        names = {"p1": "h1", "d1": "h2"}
        before, after = json.loads(first.stdout)["findings"], json.loads(again.stdout)["findings"]
        assert [(f["id"], f["verdict"], f["severity"]) for f in after] == [
            (f["id"], f["verdict"], f["severity"]) for f in before
        ]
        assert [f["hosts"] for f in after] == [[names[host] for host in f["hosts"]] for f in before]

    def test_an_older_file_is_replaced_as_a_whole(self, doctor: Doctor, tmp_path: Path) -> None:
        path = tmp_path / "b.json"
        path.write_text("x" * 10**6)
        path.chmod(0o644)
        doctor(*ONLY, "--bundle", "b.json")
        assert json.loads(path.read_text())["kind"] == "pdctl doctor facts"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    @pytest.mark.parametrize("words", [["-f", "cluster.yaml"], ["--probe"], ["--timeout", "5"], ["--probe-pairs", "1"]])
    def test_options_without_effect_are_refused(self, doctor: Doctor, words: list[str]) -> None:
        doctor(*ONLY, "--bundle", "b.json")
        result = doctor("--facts", "b.json", *words)
        assert code_of(result) == 2
        assert "no effect with --facts" in result.output

    def test_next_steps_name_the_same_facts(self, doctor: Doctor, tmp_path: Path) -> None:
        doctor(*ONLY, "--bundle", "a b.json", facts={"p1": few_files("p1"), "d1": old_python("d1")})
        result = doctor("--facts", "a b.json", *ONLY)
        assert "pdctl doctor --facts 'a b.json' --fix-commands" in result.stdout


class TestWords:
    def test_explain(self, doctor: Doctor) -> None:
        text = doctor("explain", "host002").stdout
        assert text.startswith("HOST002: Enough files may be open")
        for heading in ("What is checked", "Why it matters", "How to fix it"):
            assert heading in text

    def test_explain_suggests(self, doctor: Doctor) -> None:
        error = doctor("explain", "HOTS002").exception
        assert isinstance(error, PdctlError)
        assert error.hint == "did you mean HOST002?"

    def test_list(self, doctor: Doctor) -> None:
        text = doctor("list").stdout
        for check in all_checks():
            assert check.id in text
            assert check.title in text

    @pytest.mark.parametrize("words", [["list", "--json"], ["--json", "list"]])
    def test_list_for_programs(self, doctor: Doctor, words: list[str]) -> None:
        listed = json.loads(doctor(*words).stdout)
        assert [one["id"] for one in listed] == [check.id for check in all_checks()]
        assert listed[0].keys() == {
            "id", "area", "area_title", "title", "severity", "blocking", "what", "why", "fix", "sources",
        }  # fmt: skip

    def test_these_need_no_cluster_file(self, doctor: Doctor, tmp_path: Path) -> None:
        (tmp_path / "cluster.yaml").unlink()
        assert code_of(doctor("list")) == code_of(doctor("explain", "SG001")) == 0

    def test_completion(self, doctor: Doctor) -> None:
        def completed(*words: str) -> list[str]:
            line = " ".join(("pdctl", "doctor", *words))
            environ = {"_PDCTL_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) + 1)}
            result = CliRunner().invoke(cli, prog_name="pdctl", env=environ)
            return [entry.split(",", 1)[1] for entry in result.stdout.splitlines()]

        assert "SG001" in completed("explain", "SG")
        assert "HOST" not in completed("explain", "HOST")
        assert {"HOST", "HOST001"} <= set(completed("--only", "HOS"))
