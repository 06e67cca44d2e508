"""What the real router can be told about its workers while it runs: pdctl's drain is made for exactly this.

If a test here fails with a newer vllm-router, `pdctl/lifecycle/drain.py` and docs/watch.md have something to learn.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pdctl.lifecycle.drain import read_workers
from tests.integration.test_launch_stand_in import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


class Worker(ThreadingHTTPServer):
    """Answers every request with its own port; as slowly as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.slow_s = 0.0
        self.busy = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Worker

    def answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.busy.set()
        time.sleep(self.server.slow_s)
        choice = {"index": 0, "text": self.server.url}
        self.answer({"id": "x", "choices": [choice], "kv_transfer_params": {"do_remote_prefill": True}})

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


class Router:
    def __init__(self, python: str, log: Path) -> None:
        self.prefill, self.decode = [Worker(), Worker()], [Worker(), Worker()]
        port, metrics = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        words = [python, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--vllm-pd-disaggregation", "--policy", "round_robin", "--prometheus-port", str(metrics)]
        for role, workers in (("--prefill", self.prefill), ("--decode", self.decode)):
            for worker in workers:
                words += [role, worker.url]
        with log.open("w") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while self.ask("GET", "/workers")[0] != 200:
            assert time.monotonic() < deadline, log.read_text()
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.2)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def complete(self) -> str:
        status, text = self.ask("POST", "/v1/completions", {"model": "m", "prompt": "a b", "max_tokens": 2})
        return json.loads(text)["choices"][0]["text"] if status == 200 else f"{status}: {text}"

    def remove(self, url: str) -> tuple[int, str]:
        return self.ask("POST", f"/remove_worker?url={urllib.parse.quote(url, safe='')}")

    def workers(self) -> set[tuple[str, str]]:
        return set(read_workers(self.ask("GET", "/workers")[1]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        for worker in (*self.prefill, *self.decode):
            worker.shutdown()
            worker.server_close()


@pytest.fixture
def router(runtime: str, tmp_path: Path) -> Iterator[Router]:
    made = Router(runtime, tmp_path / "router.log")
    yield made
    made.close()


def test_a_worker_is_taken_out_its_requests_end_and_it_cannot_be_added_again(router: Router) -> None:
    everyone = {(one.url, "prefill") for one in router.prefill} | {(one.url, "decode") for one in router.decode}
    assert router.workers() == everyone
    leaving, staying = router.decode
    leaving.slow_s = 3.0
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(router.complete())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert leaving.busy.wait(20)
    assert router.remove(leaving.url)[0] == 200
    assert router.workers() == everyone - {(leaving.url, "decode")}
    assert {router.complete() for _ in range(4)} == {staying.url}
    for thread in threads:
        thread.join(30)
    # The request that it had went on to its end.
    assert sorted(answers) == sorted([leaving.url, staying.url])

    # A worker that was never there is removed just as well, so the answer alone proves nothing.
    assert router.remove("http://127.0.0.1:9")[0] == 200
    added = router.ask("POST", f"/add_worker?url={urllib.parse.quote(leaving.url, safe='')}&worker_type=decode")
    assert (added[0], "add_decode_server" in added[1]) == (400, True)
    added = router.ask("POST", "/workers", {"url": leaving.url, "worker_type": "decode"})
    assert (added[0], "add_decode_server" in added[1]) == (400, True)

    # It lets the last one go too, and then serves nobody: pdctl refuses that.
    assert router.remove(staying.url)[0] == 200
    assert router.complete().startswith("503")
