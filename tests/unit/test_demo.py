"""scripts/demo.py: what it decides, without a cluster."""

from __future__ import annotations

import http.server
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    return module


def write_cluster(folder: Path, router: str = "{host: local}", arguments: str = "{}") -> Path:
    file = folder / "cluster.yaml"
    file.write_text(
        "cluster: demo\nmodel: /m\naccelerator: cpu\nfabric: tcp\nprefill: {hosts: [local]}\n"
        f"decode: {{hosts: [local], vllm_args: {arguments}}}\nrouter: {router}\n"
    )
    return file


@pytest.mark.parametrize(
    ("router", "arguments", "url", "model"),
    [
        ("{host: local}", "{}", "http://127.0.0.1:8000", "/m"),
        (
            "{host: local, port: 9000, address: 10.0.0.1}",
            "{served-model-name: [tiny, alias]}",
            "http://10.0.0.1:9000",
            "tiny",
        ),
    ],
)
def test_where_the_demo_answers(
    demo: ModuleType, tmp_path: Path, router: str, arguments: str, url: str, model: str
) -> None:
    assert demo.endpoint(write_cluster(tmp_path, router, arguments)) == demo.Endpoint(url, model)


@pytest.fixture
def in_folder(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's files in a folder of the test."""
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    monkeypatch.setattr(demo, "CLUSTER_FILE", tmp_path / "cluster.yaml")
    monkeypatch.setattr(demo, "MODEL", tmp_path / "a model")
    pdctl = tmp_path / "pdctl"
    pdctl.write_text(f'#!/bin/sh\nexec {sys.executable} -m pdctl "$@"\n')
    pdctl.chmod(0o755)
    monkeypatch.setattr(demo, "program", lambda: pdctl)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_the_cluster_file_comes_from_the_preset_and_has_this_machines_model(demo: ModuleType, in_folder: Path) -> None:
    from pdctl.spec import load

    demo.write_cluster_file()

    spec = load(in_folder / "cluster.yaml", {})
    assert spec.model == str(in_folder / "a model")
    assert spec.python == sys.executable
    assert all(host.is_local for host in spec.prefill.hosts + spec.decode.hosts)


def test_an_edited_cluster_file_is_kept(demo: ModuleType, in_folder: Path) -> None:
    (in_folder / "cluster.yaml").write_text("# mine\n")

    demo.write_cluster_file()

    assert (in_folder / "cluster.yaml").read_text() == "# mine\n"


def test_a_failing_init_is_told_and_leaves_no_file(demo: ModuleType, in_folder: Path) -> None:
    (in_folder / "pdctl").write_text("#!/bin/sh\necho 'no preset local' >&2\nexit 2\n")

    with pytest.raises(demo.DemoError, match="no preset local") as caught:
        demo.write_cluster_file()

    assert caught.value.exit_code == 2
    assert not (in_folder / "cluster.yaml").exists()


def test_the_exit_code_of_pdctl_is_handed_on(demo: ModuleType, in_folder: Path) -> None:
    (in_folder / "pdctl").write_text("#!/bin/sh\nexit 3\n")

    with pytest.raises(demo.DemoError) as caught:
        demo.pdctl("up", timeout_s=30)

    assert caught.value.exit_code == 3
    assert demo.pdctl("status", timeout_s=30, check=False) == 3


def test_autogroup_is_turned_off_and_told(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = tmp_path / "sched_autogroup_enabled"
    setting.write_text("1\n")

    demo.turn_autogroup_off(setting)
    demo.turn_autogroup_off(setting)

    assert setting.read_text().strip() == "0"
    assert capsys.readouterr().out.count("turned kernel.sched_autogroup_enabled off") == 1


def test_autogroup_that_may_not_be_changed_says_how(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = tmp_path / "sched_autogroup_enabled"
    setting.write_text("1\n")

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)

    demo.turn_autogroup_off(setting)

    assert "sudo sysctl kernel.sched_autogroup_enabled=0" in capsys.readouterr().out


def test_a_kernel_without_autogroup_is_fine(demo: ModuleType, tmp_path: Path) -> None:
    demo.turn_autogroup_off(tmp_path / "missing")


@pytest.fixture
def router() -> Iterator[tuple[str, list[dict[str, object]]]]:
    requests: list[dict[str, object]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            broken = body["model"] == "broken"
            answer = {"choices": [{"text": " noise"}], "usage": {"completion_tokens": 16}}
            payload = b"no decode instance" if broken else json.dumps(answer).encode()
            self.send_response(503 if broken else 200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_completion_is_sent_past_any_proxy(
    demo: ModuleType, router: tuple[str, list[dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, requests = router
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    assert demo.complete(demo.Endpoint(url, "tiny"), timeout_s=10) == " noise"
    assert requests == [demo.completion_body("tiny")]


def test_a_refused_completion_shows_the_answer(demo: ModuleType, router: tuple[str, list[dict[str, object]]]) -> None:
    with pytest.raises(demo.DemoError, match="503: no decode instance"):
        demo.complete(demo.Endpoint(router[0], "broken"), timeout_s=10)


@pytest.mark.parametrize(
    ("argv", "belongs"),
    [
        (["/x/.venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/x/.demo/model"], True),
        (["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/x/.demo/model"], True),
        (["/x/.venv/bin/python", "-m", "vllm_router.launch_router", "--port", "8000"], True),
        (["/x/.venv/bin/python", "-m", "pytest"], False),
        (["/y/.venv/bin/python", "-m", "vllm_router.launch_router"], False),
        (["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/x/.demo-other/model"], False),
        (["vim", "/x/.demo/cluster.yaml"], False),
        ([], False),
    ],
)
def test_which_processes_are_the_demo(demo: ModuleType, argv: list[str], belongs: bool) -> None:
    assert demo.belongs_to_demo(argv, Path("/x/.demo"), Path("/x/.venv")) is belongs


def test_running_processes_are_found_in_proc(demo: ModuleType, tmp_path: Path) -> None:
    for number, argv in {"12": ["/x/python", "--model", "/x/.demo/model"], "13": ["sh"], "self": ["python"]}.items():
        (tmp_path / number).mkdir()
        (tmp_path / number / "cmdline").write_bytes(b"\0".join(word.encode() for word in argv) + b"\0")
    (tmp_path / "14").mkdir()  # ended between listing and reading

    assert demo.running(Path("/x/.demo"), Path("/x/.venv"), proc=tmp_path) == [12]
