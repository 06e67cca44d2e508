"""``pdctl watch`` beside the programs that it is used with: tmux, and Prometheus' own checker of its files."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.integration.test_launch_stand_in import Bench, bench  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(120)

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "watch"


def needs(program: str, package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program} (Debian's {package})")


@needs("promtool", "prometheus")
@pytest.mark.parametrize(("what", "file"), [("rules", "prometheus-rules.yaml"), ("config", "prometheus-scrape.yaml")])
def test_prometheus_takes_the_templates(what: str, file: str) -> None:
    done = subprocess.run(
        ["promtool", "check", what, str(TEMPLATES / file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@needs("promtool", "prometheus")
def test_the_checker_would_notice(tmp_path: Path) -> None:
    rules = (TEMPLATES / "prometheus-rules.yaml").read_text().replace("expr: ", "expr: ((", 1)
    (tmp_path / "rules.yaml").write_text(rules)
    done = subprocess.run(["promtool", "check", "rules", str(tmp_path / "rules.yaml")], capture_output=True, timeout=60)
    assert done.returncode != 0


class Tmux:
    """A tmux server of its own with one window, and a program in it."""

    def __init__(self, folder: Path, cluster: Cluster, *words: str) -> None:
        self.socket, self.code = folder / "tmux", folder / "code"
        command = f"{shlex.join(cluster.command('watch', *words))}; echo $? > {shlex.quote(str(self.code))}"
        self.call("new-session", "-d", "-x", "120", "-y", "40", command, env=cluster.environment())

    def call(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self.socket), "-f", os.devnull, "-u", *words],
            env={**(env or os.environ), "TERM": "xterm-256color"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def until(self, seen: Callable[[str], bool]) -> str:
        end = time.monotonic() + 60
        while not seen(screen := self.call("capture-pane", "-p")):
            assert time.monotonic() < end, screen
            time.sleep(0.1)
        return screen


@pytest.fixture
def tmux(bench: Bench, tmp_path: Path) -> Iterator[Tmux]:  # noqa: F811
    cluster = bench.cluster()
    assert cluster.pdctl("up").code == 0
    made = Tmux(tmp_path, cluster, "--interval", "0.2")
    yield made
    subprocess.run(["tmux", "-S", str(made.socket), "kill-server"], capture_output=True, timeout=30, check=False)


@needs("tmux", "tmux")
def test_it_is_drawn_in_tmux_follows_its_size_and_ends_by_q(tmux: Tmux) -> None:
    screen = tmux.until(lambda text: "prefill-0" in text and "decode-0" in text and "LIVE" in text)
    assert "PREFILL" in screen
    tmux.call("resize-window", "-x", "80", "-y", "24")
    tmux.until(lambda text: len(text.splitlines()) <= 24 and "decode-0" in text)
    tmux.call("send-keys", "q")
    end = time.monotonic() + 30
    while not tmux.code.exists():
        assert time.monotonic() < end, "it did not end"
        time.sleep(0.1)
    assert tmux.code.read_text().strip() == "0"
