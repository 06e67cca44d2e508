"""pdctl's connector against vLLM's own for push and pull, interleaved on one machine. Needs root, and 6 GB per pair.

    python benchmarks/connectors.py [--rounds 12] [--modes pdctl,upstream,pull] [--out FILE.json]

Starts one cluster per connector (1 prefill, 1 decode, router) on two hosts of tests/testbed/hosts.sh, and stops all
processes (SIGSTOP) of those that are not being measured, so that the connectors take turns within seconds and a
machine that drifts is the same for all. Every cell of a round is measured with every connector before the next cell.

* `router`: time to first token (TTFT) and per output token (TPOT) of streamed requests through the router.
* `legs`: both legs sent by the client; how long after prefill's answer decode's first token comes. Pull mode cannot
  send decode's leg before prefill's answer, so that its figure is the whole transfer.

Prints medians and the ratio pdctl / other with a 95 % interval by bootstrap over rounds. Prompts are new each time.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "connector")]

from tests.testbed.hosts import Testbed  # noqa: E402  # found by the line above

MODEL = "demo"
OUTPUT_TOKENS = 16
PYTHON = os.environ.get("PDCTL_RUNTIME_PYTHON", sys.executable)
TRANSFER = {"pdctl": "{mode: push}", "upstream": "{mode: push, connector: upstream}", "pull": "{mode: pull}"}
# Requests of one measurement: (way, prompt tokens, concurrency) -> how many.
CELLS = {
    ("router", 512, 1): 4,
    ("router", 512, 4): 8,
    ("router", 2048, 1): 3,
    ("router", 2048, 4): 4,
    ("router", 4096, 1): 2,
    ("router", 4096, 4): 4,
    ("legs", 512, 4): 4,
    ("legs", 2048, 1): 2,
    ("legs", 2048, 4): 4,
    ("legs", 4096, 4): 4,
}


@dataclass
class Answer:
    """Times of one request in seconds from its start; ``prefill`` is when prefill's answer was complete."""

    first: float
    last: float
    tokens: int
    text: str
    prefill: float = 0.0

    @property
    def per_token(self) -> float:
        return (self.last - self.first) / max(1, self.tokens - 1)


class Pair:
    """One running cluster."""

    def __init__(self, testbed: Testbed, mode: str, number: int, model: Path, folder: Path) -> None:
        self.mode = mode
        base = 8000 + 1000 * number
        self.cluster = f"bench-{mode}"
        self.file = folder / f"{mode}.yaml"
        self.prefill, self.decode, self.router = (
            (testbed.address(1), base + 100),
            (testbed.address(2), base + 200),
            (testbed.address(1), base),
        )
        options = "enforce-eager: true, dtype: float32, max-model-len: 8192, served-model-name: demo"
        self.file.write_text(
            f"cluster: {self.cluster}\nmodel: {model}\naccelerator: cpu\nfabric: tcp\npython: {PYTHON}\n"
            f"transfer: {TRANSFER[mode]}\n"
            'env: {VLLM_CPU_KVCACHE_SPACE: "1", VLLM_CPU_OMP_THREADS_BIND: nobind, OMP_NUM_THREADS: "1"}\n'
            f"prefill: {{hosts: [{{name: {testbed.name(1)}, address: {testbed.address(1)}}}], port: {base + 100}, "
            f"side_channel_port: {base + 300}, telemetry_port: {base + 400}, vllm_args: {{{options}}}}}\n"
            f"decode: {{hosts: [{{name: {testbed.name(2)}, address: {testbed.address(2)}}}], port: {base + 200}, "
            f"side_channel_port: {base + 500}, telemetry_port: {base + 600}, vllm_args: {{{options}}}}}\n"
            f"router: {{host: {testbed.name(1)}, port: {base}, metrics_port: {base + 700}}}\n"
        )
        self.environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'connector'}",
            "PDCTL_SSH_CONFIG": str(testbed.ssh_config),
            "PDCTL_FILE": str(self.file),
        }
        self.processes: list[int] = []
        self.parameters: dict[str, Any] = {}

    def pdctl(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "pdctl", *words], env=self.environ, check=True, timeout=400)

    def up(self) -> None:
        self.pdctl("up")
        marker = f"PDCTL_MARKER={self.cluster}/".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and marker in (entry / "environ").read_bytes():
                    self.processes.append(int(entry.name))
        answer = self.post(self.prefill, self.body("warm up", 1) | {"kv_transfer_params": _PREFILL}, "warm")
        self.parameters = json.loads(answer)["kv_transfer_params"]

    def signal(self, number: int) -> None:
        for pid in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def down(self) -> None:
        self.signal(signal.SIGCONT)
        self.pdctl("down")

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.signal(signal.SIGCONT)
        try:
            # One request that is not counted: connections and caches wake up too.
            self.routed(prompt_of(64))
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def body(self, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    def post(self, to: tuple[str, int], body: dict[str, Any], request_id: str) -> bytes:
        connection = http.client.HTTPConnection(*to, timeout=120)
        with contextlib.closing(connection):
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(body),
                {"Content-Type": "application/json", "X-Request-Id": request_id},
            )
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise RuntimeError(f"{self.mode}: {response.status} {text[:200]!r}")
            return text

    def stream(self, to: tuple[str, int], body: dict[str, Any], request_id: str, begin: float) -> Answer:
        connection = http.client.HTTPConnection(*to, timeout=120)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
            connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{self.mode}: {response.status} {response.read()[:200]!r}")
            times: list[float] = []
            text = ""
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if event.get("choices"):
                    times.append(time.monotonic() - begin)
                    text += event["choices"][0]["text"]
            return Answer(times[0], times[-1], OUTPUT_TOKENS, text)

    def routed(self, prompt: str) -> Answer:
        begin = time.monotonic()
        return self.stream(self.router, self.body(prompt, OUTPUT_TOKENS), uuid.uuid4().hex, begin)

    def legs(self, prompt: str) -> Answer:
        """Both legs by the client: at once in push mode, one after the other in pull mode."""
        request_id = uuid.uuid4().hex
        begin = time.monotonic()
        prefill_done = [0.0]

        def prefill() -> dict[str, Any]:
            answer = self.post(self.prefill, self.body(prompt, 1) | {"kv_transfer_params": _PREFILL}, request_id)
            prefill_done[0] = time.monotonic() - begin
            return dict(json.loads(answer)["kv_transfer_params"])

        decode = self.body(prompt, OUTPUT_TOKENS)
        if self.mode == "pull":
            decode["kv_transfer_params"] = prefill()
            answer = self.stream(self.decode, decode, request_id, begin)
        else:
            thread = threading.Thread(target=prefill)
            thread.start()
            names = ("remote_engine_id", "remote_host", "remote_port", "tp_size")
            decode["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_request_id": request_id,
                **{name: self.parameters[name] for name in names if name in self.parameters},
            }
            answer = self.stream(self.decode, decode, request_id, begin)
            thread.join()
        answer.prefill = prefill_done[0]
        return answer


_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
_WORDS = ("prefill", "decode", "block", "router", "writer", "window", "signal", "letter", "garden", "stone")
_chooser = random.Random()
_tokens_per_word = [1.0]


def prompt_of(tokens: int) -> str:
    """A new prompt of about so many tokens that shares no block with another."""
    count = max(1, round((tokens - 8) / _tokens_per_word[0]))
    return f"{_chooser.randrange(10**9)} " + " ".join(_chooser.choices(_WORDS, k=count))


def calibrate(pair: Pair) -> None:
    """Find out how many tokens a word is."""
    text = " ".join(_WORDS * 50)
    connection = http.client.HTTPConnection(*pair.prefill, timeout=30)
    connection.request(
        "POST", "/tokenize", json.dumps({"model": MODEL, "prompt": text}), {"Content-Type": "application/json"}
    )
    count = json.loads(connection.getresponse().read())["count"]
    connection.close()
    _tokens_per_word[0] = count / (50 * len(_WORDS))


def in_flight(testbed: Testbed, port: int) -> int:
    """Transfers that prefill's rank has in flight, those included that wait for decode."""
    text = testbed.call("exec", testbed.name(1), "curl", "-s", "-m", "5", f"http://127.0.0.1:{port}/healthz")
    return int(json.loads(text)["transfers"]["inflight"])


@dataclass
class Samples:
    """Answers by cell, mode and round."""

    answers: dict[tuple[tuple[str, int, int], str], list[list[Answer]]] = field(default_factory=dict)

    def add(self, cell: tuple[str, int, int], mode: str, answers: list[Answer]) -> None:
        self.answers.setdefault((cell, mode), []).append(answers)

    def rounds(self, cell: tuple[str, int, int], mode: str, figure: str) -> list[list[float]]:
        """A figure in milliseconds, by round."""
        read = {
            "ttft": lambda a: a.first,
            "tpot": lambda a: a.per_token,
            "gap": lambda a: a.first - a.prefill,
        }[figure]
        return [[1000 * read(answer) for answer in answers] for answers in self.answers.get((cell, mode), [])]


def measure(pair: Pair, cell: tuple[str, int, int]) -> list[Answer]:
    way, tokens, at_once = cell
    send = pair.routed if way == "router" else pair.legs
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def client(count: int) -> None:
        try:
            for _ in range(count):
                answers.append(send(prompt_of(tokens)))
        except BaseException as error:  # told below, in the main thread
            errors.append(error)

    threads = [threading.Thread(target=client, args=(CELLS[cell] // at_once,)) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers


def ratio(ours: list[list[float]], other: list[list[float]], seed: int = 0) -> tuple[float, float, float]:
    """Median of ours / median of the other, and its 95 % interval by bootstrap over rounds."""
    chooser = np.random.default_rng(seed)
    count = min(len(ours), len(other))

    def one(picked: Any) -> float:
        return float(
            np.median(np.concatenate([ours[n] for n in picked])) / np.median(np.concatenate([other[n] for n in picked]))
        )

    draws = [one(chooser.integers(0, count, count)) for _ in range(2000)]
    return one(range(count)), float(np.percentile(draws, 2.5)), float(np.percentile(draws, 97.5))


def report(samples: Samples, modes: list[str]) -> None:
    for figure in ("ttft", "tpot", "gap"):
        print(f"\n{figure} in ms: median (p90)")
        for cell in CELLS:
            if (figure == "gap") != (cell[0] == "legs"):
                continue
            rounds = {mode: samples.rounds(cell, mode, figure) for mode in modes}
            if not all(rounds.values()):
                continue
            words = []
            for mode in modes:
                values = np.concatenate(rounds[mode])
                words.append(f"{mode} {np.median(values):7.1f} ({np.percentile(values, 90):7.1f}) n={len(values)}")
            for mode in modes[1:]:
                middle, low, high = ratio(rounds[modes[0]], rounds[mode])
                words.append(f"/{mode} {middle:.2f} [{low:.2f}, {high:.2f}]")
            print(f"{cell[0]:6} {cell[1]:5} x{cell[2]}  " + "  ".join(words), flush=True)


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=60, help="begin no round after so long")
    parser.add_argument("--modes", default="pdctl,upstream,pull", help="the first is compared with the others")
    parser.add_argument("--model", type=Path, default=ROOT / ".demo" / "model")
    parser.add_argument("--out", type=Path, help="write all samples there")
    options = parser.parse_args()
    modes = options.modes.split(",")
    Path("/proc/sys/kernel/sched_autogroup_enabled").write_text("0")
    subprocess.run([PYTHON, str(ROOT / "scripts" / "make_demo_model.py"), str(options.model)], check=True)
    folder = Path(f"/tmp/pdctl-bench-{os.getpid()}")
    folder.mkdir()
    testbed = Testbed(Path("/tmp/pd-testbed-bench"), bridge="pdtb0", net="10.84.0", prefix="b")
    testbed.up(2)
    samples = Samples()
    pairs: list[Pair] = []
    try:
        for number, mode in enumerate(modes):
            pair = Pair(testbed, mode, number, options.model, folder)
            pairs.append(pair)
            pair.up()
            if number == 0:
                calibrate(pair)
            pair.signal(signal.SIGSTOP)
        end = time.monotonic() + 60 * options.minutes
        orders = list(itertools.permutations(pairs))
        for number in range(options.rounds):
            if time.monotonic() > end:
                break
            for place, cell in enumerate(CELLS):
                for pair in orders[(number + place) % len(orders)]:
                    with pair.awake():
                        samples.add(cell, pair.mode, measure(pair, cell))
            print(f"round {number + 1}", flush=True)
            if options.out:
                keyed = {
                    f"{way} {tokens} x{at_once} {mode}": [[vars(a) for a in answers] for answers in rounds]
                    for ((way, tokens, at_once), mode), rounds in samples.answers.items()
                }
                options.out.write_text(json.dumps(keyed))
    except KeyboardInterrupt:
        print("interrupted: what was measured until now")
    finally:
        for pair in pairs:
            with contextlib.suppress(subprocess.SubprocessError):
                pair.down()
        testbed.down()
    report(samples, modes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
