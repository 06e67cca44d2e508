"""A cluster to break on purpose: two hosts, real vLLM, NIXL over UCX TCP, the router; legs as single calls."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Cluster, complete, complete_all, metric
from tests.testbed.hosts import Testbed

MODEL = "demo"
TIMEOUT_S = 8.0
LEASE_S = 5
MARGIN_S = 5.0
WORDS = ["prefill", "decode", "block", "router", "writer", "window", "signal", "letter", "garden", "stone"]
PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False}


def text_of(words: int, seed: object) -> str:
    chooser = random.Random(str(seed))
    return f"{seed}: " + " ".join(chooser.choices(WORDS, k=words))


class Faulty:
    """The cluster under test, with the legs of a disaggregated request as single calls."""

    def __init__(self, cluster: Cluster, testbed: Testbed, folder: Path) -> None:
        self.cluster, self.testbed, self.folder = cluster, testbed, folder
        self.prefill = f"http://{testbed.address(1)}:8100"
        self.decode = f"http://{testbed.address(2)}:8200"
        self.router = f"http://{testbed.address(1)}:8000"
        self.serial = random.SystemRandom().randrange(10**9)

    @contextmanager
    def failing(self, number: int, faults: str) -> Iterator[None]:
        """NIXL operations of an instance fail on purpose; see pdctl_connector/faults.py."""
        file = self.folder / f"faults-{number}"
        file.write_text(faults)
        try:
            yield
        finally:
            file.unlink()

    def legs(self, prompt: str, name: str) -> tuple[int, str, float]:
        """Both legs of a request at once; the answer of decode's."""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self.prefill_leg, prompt, name)
            answer = self.decode_leg(prompt, name)
            other.result()
        return answer

    def fresh(self, words: int = 60) -> str:
        self.serial += 1
        return text_of(words, self.serial)

    def ask(
        self, base: str, prompt: str, *, request_id: str | None = None, leave_after: float | None = None, **body: Any
    ) -> tuple[int, str, float]:
        """One completion: (status, text or error, seconds). Status 0: we left, or were cut off."""
        host, _, port = base.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S + 60)
        begin = time.monotonic()
        headers = {"Content-Type": "application/json", **({"X-Request-Id": request_id} if request_id else {})}
        whole = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
        try:
            connection.request("POST", "/v1/completions", json.dumps(whole), headers)
            if leave_after is not None:
                time.sleep(leave_after)
                return 0, "left", time.monotonic() - begin
            response = connection.getresponse()
            answer = response.read().decode()
            if response.status == 200:
                return 200, json.loads(answer)["choices"][0]["text"], time.monotonic() - begin
            return response.status, answer, time.monotonic() - begin
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error), time.monotonic() - begin
        finally:
            connection.close()

    def decode_params(self) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.health(1)["engine_id"],
            "remote_host": self.testbed.address(1),
            "remote_port": 5600,
            "remote_request_id": "unused",
            "tp_size": 1,
        }

    def prefill_leg(self, prompt: str, request_id: str, **more: Any) -> tuple[int, str, float]:
        more = {"max_tokens": 1, **more}
        return self.ask(self.prefill, prompt, request_id=request_id, kv_transfer_params=PREFILL_LEG, **more)

    def decode_leg(self, prompt: str, request_id: str, **more: Any) -> tuple[int, str, float]:
        params = more.pop("params", None) or self.decode_params()
        return self.ask(self.decode, prompt, request_id=request_id, kv_transfer_params=params, **more)

    def alone(self, prompt: str) -> str:
        return complete(self.prefill, prompt, model=MODEL, max_tokens=8)

    def health(self, number: int) -> dict[str, Any]:
        port = {1: 18100, 2: 18200}[number]
        out = self.testbed.call("exec", self.testbed.name(number), "curl", "-s", "-m", "5", f"127.0.0.1:{port}/healthz")
        return json.loads(out)

    def posted(self) -> bool:
        """True while a WRITE is in flight."""
        url = "127.0.0.1:18100/transfers?state=inflight"
        out = json.loads(self.testbed.call("exec", self.testbed.name(1), "curl", "-s", "-m", "5", url))
        return any(record["stage"] == "posted" for record in out["transfers"])

    def outcomes(self, number: int) -> dict[str, int]:
        return self.health(number)["transfers"]["outcomes"]

    def worker(self, number: int) -> int:
        """Pid of the vLLM worker on a host, as the machine itself sees it."""
        name = {1: "prefill-0", 2: "decode-0"}[number]
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "comm").read_text().startswith("VLLM::Worker"):
                    environ = (entry / "environ").read_bytes()
                    if f"PDCTL_MARKER=e2e-faults/{name}/".encode() in environ:
                        return int(entry.name)
            except OSError:
                continue
        raise AssertionError(f"no worker of {name}")

    def kill_instance(self, number: int) -> None:
        name = {1: "prefill-0", 2: "decode-0"}[number]
        marker = f"PDCTL_MARKER=e2e-faults/{name}/".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and marker in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue

    def router_misses_one(self, within_s: float = 30.0) -> None:
        """Wait until the router's own health checks have noticed that an instance is gone."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                urllib.request.urlopen(f"{self.router}/health", timeout=5).close()
            except urllib.error.HTTPError as error:
                error.close()
                return
            assert time.monotonic() < deadline, "the router still calls itself healthy"
            time.sleep(0.3)

    def calm(self, within_s: float = 20.0) -> None:
        """Nothing in flight, nothing held, writers alive: on both sides, within some seconds."""
        deadline = time.monotonic() + within_s
        while True:
            state = {
                "inflight": [self.health(n)["transfers"]["inflight"] for n in (1, 2)],
                "kv": [metric(base, "vllm:kv_cache_usage_perc") for base in (self.prefill, self.decode)],
                "waiting": [metric(base, "vllm:num_requests_waiting") for base in (self.prefill, self.decode)],
                "writer": [self.health(n)["writer"]["state"] for n in (1, 2)],
            }
            if (
                state["inflight"] == [0, 0]
                and state["kv"] == [0, 0]
                and state["waiting"] == [0, 0]
                and set(state["writer"]) <= {"idle", "busy"}
            ):
                return
            assert time.monotonic() < deadline, state
            time.sleep(0.3)

    def works(self, count: int = 20) -> None:
        """The next requests are right."""
        prompts = [self.fresh(40) for _ in range(count)]
        routed = complete_all(self.router, prompts, model=MODEL, at_once=5)
        assert routed == complete_all(self.prefill, prompts, model=MODEL, at_once=5)
