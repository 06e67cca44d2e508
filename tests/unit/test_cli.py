import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdctl.cli.main import _COMMANDS, cli

FILE = """\
cluster: small
model: m
accelerator: cpu
fabric: tcp
env: {HF_TOKEN: {from_env: PDCTL_TEST_TOKEN}}
prefill: {hosts: [a]}
decode: {hosts: [d]}
router: {host: a}
"""


def pdctl(*words: str, folder: Path, stdout: int = subprocess.PIPE, **environ: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    path = f"{root}:{root / 'connector'}"
    return subprocess.run(
        [sys.executable, "-m", "pdctl", *words],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": path, **environ},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_every_command_has_a_help_that_says_more_than_its_line(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert len(result.output) > 150


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv=['pdctl','--help']\n"
        "from pdctl.cli.main import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "heavy = {'pydantic','paramiko','fabric','rich','jinja2','ruamel','prometheus_client'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [["--help"], ["up", "--help"], ["up", "--dry-run"], ["up", "--dry-run", "--json"], ["status"], ["status", "--json"],
     ["doctor", "explain", "HOST003"], ["doctor", "--only", "HOST003"], ["completion", "bash"]],
    ids=" ".join,
)  # fmt: skip
def test_a_reader_that_is_gone_ends_it_quietly(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        FILE.replace("[a]", "[local]").replace("[d]", "[local]").replace("a}", "local}")
    )
    reads, writes = os.pipe()
    os.close(reads)
    try:
        result = pdctl(*words, folder=tmp_path, stdout=writes, PDCTL_TEST_TOKEN="x", PDCTL_HOME=str(tmp_path / "home"))
    finally:
        os.close(writes)
    assert [line for line in result.stderr.splitlines() if not line.startswith("[ ")] == []
    # What a shell says of a program that SIGPIPE ended; neither "fine" nor "findings".
    assert result.returncode == 141


def test_a_broken_pipe_that_is_not_the_reader_is_a_bug(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv=['pdctl','init']\n"
        "import pdctl.cli.init, pdctl.cli.main\n"
        "def broken(**_): raise BrokenPipeError\n"
        "pdctl.cli.init.command.callback = broken\n"
        "pdctl.cli.main.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "nobody expected it" in done.stderr


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    result = pdctl("status", folder=tmp_path)
    assert result.returncode == 2
    assert "cluster.yaml" in result.stderr
    assert "pdctl init" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bad_file_names_file_line_and_key(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE.replace("prefill:", "prefil:"))
    result = pdctl("up", folder=tmp_path, PDCTL_TEST_TOKEN="t")
    assert result.returncode == 2
    assert "cluster.yaml:6" in result.stderr
    assert "prefill" in result.stderr


def test_dry_run_prints_the_plan_without_secrets_and_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    text = pdctl("up", "--dry-run", folder=tmp_path, PDCTL_TEST_TOKEN="very-secret")
    assert text.returncode == 0, text.stderr
    assert "prefill-0 on a" in text.stdout
    data = pdctl("up", "--dry-run", "--json", folder=tmp_path, PDCTL_TEST_TOKEN="very-secret")
    assert [instance["name"] for instance in json.loads(data.stdout)["instances"]] == [
        "prefill-0",
        "decode-0",
        "router",
    ]
    assert "very-secret" not in text.stdout + data.stdout


def test_a_missing_secret_stops_up_but_not_logs(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    up = pdctl("up", folder=tmp_path)
    assert up.returncode == 2
    assert "PDCTL_TEST_TOKEN" in up.stderr
    logs = pdctl("logs", "nobody", folder=tmp_path)
    assert logs.returncode == 2
    assert "prefill-0, decode-0, router" in logs.stderr


def test_names_are_suggested(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    assert "did you mean 'status'" in pdctl("statsu", folder=tmp_path).stderr
    assert "did you mean 'decode-0'" in pdctl("logs", "decod-0", folder=tmp_path).stderr


def test_restart_wants_names_or_a_role(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    for words in (("restart",), ("restart", "decode-0", "--role", "decode")):
        assert pdctl(*words, folder=tmp_path).returncode == 2


def test_init_never_overwrites_unasked(tmp_path: Path) -> None:
    assert pdctl("init", "--preset", "local", folder=tmp_path).returncode == 0
    before = (tmp_path / "cluster.yaml").read_text()
    again = pdctl("init", "--preset", "2p2d", folder=tmp_path)
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert (tmp_path / "cluster.yaml").read_text() == before
    assert pdctl("init", "--preset", "2p2d", "--force", folder=tmp_path).returncode == 0


def test_init_names_the_presets(tmp_path: Path) -> None:
    assert "ssh-tcp" in pdctl("init", "--list", folder=tmp_path).stdout
    wrong = pdctl("init", "--preset", "p5", folder=tmp_path)
    assert wrong.returncode == 2
    assert "p5en-efa" in wrong.stderr


@pytest.mark.parametrize(("shell", "sign"), [("bash", "complete"), ("zsh", "compdef"), ("fish", "complete")])
def test_completion_scripts(tmp_path: Path, shell: str, sign: str) -> None:
    result = pdctl("completion", shell, folder=tmp_path)
    assert result.returncode == 0
    assert sign in result.stdout
    assert "_PDCTL_COMPLETE" in result.stdout


def test_completion_of_instance_names(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    result = pdctl(
        folder=tmp_path, _PDCTL_COMPLETE="bash_complete", COMP_WORDS="pdctl logs d", COMP_CWORD="2"
    )  # fmt: skip
    assert result.stdout.split(",")[-1].strip() == "decode-0"
