"""The load generator with the real `vllm bench serve`, against a stand-in for the cluster."""

from __future__ import annotations

import itertools
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.bench.generator import Load, LoadGenerator
from pdctl.bench.results import Cell, Sample
from pdctl.errors import NodeError
from pdctl.hosts.local import LocalHost
from tests.support.completions_server import Completions, completions

pytestmark = pytest.mark.e2e

KEY = "sk-very-secret"


def count_words(prompt: str) -> int:
    """Tokens of a prompt of words, each of which is one token."""
    return len(prompt.split(" "))


@pytest.fixture(scope="module")
def generator(runtime: str) -> Iterator[LoadGenerator]:
    with LoadGenerator(LocalHost(), runtime, env={"OPENAI_API_KEY": KEY}) as made:
        yield made


@pytest.fixture
def server() -> Iterator[Completions]:
    with completions(Completions(count_words, key=KEY)) as state:
        yield state


def load(server: Completions, model: Path, **changed: object) -> Load:
    cell = Cell(
        prompt_tokens=changed.pop("prompt_tokens", 64),  # type: ignore[arg-type]
        output_tokens=changed.pop("output_tokens", 5),  # type: ignore[arg-type]
        concurrency=changed.pop("concurrency", 4),  # type: ignore[arg-type]
        rate=changed.pop("rate", None),  # type: ignore[arg-type]
        prefix_hit=changed.pop("prefix_hit", 0),  # type: ignore[arg-type]
    )
    fields: dict[str, object] = {"requests": 20, "seed": 3, "request_timeout_s": 20.0, **changed}
    return Load(cell=cell, url=server.url, model="demo", tokenizer=str(model), **fields)  # type: ignore[arg-type]


def run(generator: LoadGenerator, job: Load) -> list[Sample]:
    samples: list[Sample] = []
    generator.load(job, samples.append)
    return samples


def prompts(server: Completions) -> list[str]:
    return [body["prompt"] for body in server.asked]


def test_a_load(generator: LoadGenerator, server: Completions, demo_model: Path) -> None:
    server.token_s = 0.01
    samples: list[Sample] = []
    duration = generator.load(load(server, demo_model), samples.append)
    assert generator.name == "vllm bench serve"
    assert generator.version
    assert [sample.error for sample in samples] == [""] * 20
    assert {(sample.prompt_tokens, sample.output_tokens) for sample in samples} == {(64, 5)}
    assert all(sample.ok and sample.ttft_s and sample.latency_s >= sample.ttft_s + 0.03 for sample in samples)
    assert all(len(sample.itl_s) == 4 for sample in samples)
    begun = min(sample.started_unix for sample in samples)
    ended = max(sample.started_unix + sample.latency_s for sample in samples)
    assert duration == pytest.approx(ended - begun, abs=0.05)
    assert server.most_at_once == 4
    assert {(body["temperature"], body["ignore_eos"], body["stream"]) for body in server.asked} == {(0.0, True, True)}


def test_prompts_have_the_length_that_the_tokenizer_counts(
    generator: LoadGenerator, server: Completions, demo_model: Path, runtime: str
) -> None:
    for tokens in (1, 17, 512, 4096):
        run(generator, load(server, demo_model, prompt_tokens=tokens, requests=3))
    code = (
        "import sys; from tokenizers import Tokenizer; t = Tokenizer.from_file(sys.argv[1])\n"
        "for line in sys.stdin: print(len(t.encode(line.rstrip(chr(10))).ids))"
    )
    done = subprocess.run(
        [runtime, "-c", code, str(demo_model / "tokenizer.json")],
        input="\n".join(prompts(server)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Counter(done.stdout.split()) == {"1": 3, "17": 3, "512": 3, "4096": 3}


def test_prompts_are_the_same_for_a_seed_and_never_begin_alike_otherwise(
    generator: LoadGenerator, server: Completions, demo_model: Path
) -> None:
    run(generator, load(server, demo_model, requests=100, concurrency=None, rate=1000))
    first = prompts(server)
    server.asked.clear()
    run(generator, load(server, demo_model, requests=100, concurrency=None, rate=1000))
    assert sorted(prompts(server)) == sorted(first)
    for changed in ({"seed": 4}, {"concurrency": 1}, {"measured": False}, {"output_tokens": 6}):
        run(generator, load(server, demo_model, requests=50, **{"concurrency": 8, **changed}))
    beginnings = {" ".join(prompt.split(" ")[:16]) for prompt in prompts(server)}
    assert len(beginnings) == 100 + 4 * 50


@pytest.mark.parametrize(("hit", "shared"), [(50, 32), (100, 48)])
def test_shared_prefixes(
    generator: LoadGenerator, server: Completions, demo_model: Path, hit: int, shared: int
) -> None:
    run(generator, load(server, demo_model, requests=4, measured=False, prefix_hit=hit))
    run(generator, load(server, demo_model, prefix_hit=hit))
    words = [prompt.split(" ") for prompt in prompts(server)]
    assert len(words) == 24
    assert len({tuple(each[:shared]) for each in words}) == 1
    assert len({tuple(each[shared:]) for each in words}) == 24


def test_a_rate(generator: LoadGenerator, server: Completions, demo_model: Path) -> None:
    samples: list[Sample] = []
    duration = generator.load(load(server, demo_model, concurrency=None, rate=40), samples.append)
    gaps = [b.started_unix - a.started_unix for a, b in itertools.pairwise(samples)]
    assert duration < 5
    assert max(gaps) > 3 * sorted(gaps)[len(gaps) // 4]


def test_each_failure_says_why(generator: LoadGenerator, server: Completions, demo_model: Path) -> None:
    server.fail = {1: "busy", 3: "cut", 5: "error", 7: "short", 9: "hang"}
    samples = run(generator, load(server, demo_model, request_timeout_s=1.5))
    assert len(samples) == 20
    errors = sorted(sample.error for sample in samples if sample.error)
    assert errors == [
        "HTTP 503 Service Unavailable: no healthy prefill instance",
        "answered with 4 tokens instead of 5",
        "no full answer within 1.5 s",
        "the stream ended before its end: no usage came",
        "the stream said: the KV cache did not come",
    ]
    hung = next(sample for sample in samples if sample.error.startswith("no full"))
    assert hung.latency_s == pytest.approx(1.5, abs=1.0)
    assert (hung.ttft_s, hung.prompt_tokens) == (None, 0)


def test_answers(generator: LoadGenerator, server: Completions, demo_model: Path) -> None:
    server.wrong = set(range(20))
    server.fail = {0: "busy"}
    run(generator, load(server, demo_model, keep=3, cache_salt="abc"))
    assert {body.get("cache_salt") for body in server.asked} == {"abc"}
    server.asked.clear()
    server.wrong, server.fail, server.token_s = set(), {}, 0.01
    check = generator.answers(server.url, model="demo", output_tokens=5, concurrency=3)
    assert (check.compared, check.equal, check.unstable, len(check.different)) == (3, 0, 0, 3)
    assert len({one.request for one in check.different}) == 3
    assert len(server.asked) == 6
    assert len({body["cache_salt"] for body in server.asked}) == 6

    run(generator, load(server, demo_model, keep=3))
    # After 26 requests come those that are asked alone, then those among others.
    server.wrong = {27}
    check = generator.answers(server.url, model="demo", output_tokens=5, concurrency=3)
    assert (check.compared, check.equal, check.unstable, len(check.different)) == (3, 2, 1, 0)

    server.key = "another"
    check = generator.answers(server.url, model="demo", output_tokens=5, concurrency=3)
    assert (check.compared, check.asked) == (0, 3)
    assert check.error == "3 of 3 could not be asked again: HTTP 401 Unauthorized: no key"


def test_what_cannot_be_made(generator: LoadGenerator, server: Completions, demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"the tokenizer .* cannot be loaded") as no_tokenizer:
        run(generator, load(server, tmp_path))
    assert no_tokenizer.value.code == "no-tokenizer"
    nobody = Completions(count_words, url="http://127.0.0.1:1")
    with pytest.raises(NodeError, match=r"nothing can be asked at http://127\.0\.0\.1:1: .*refused") as refused:
        run(generator, load(nobody, demo_model))
    assert refused.value.code == "unreachable"
    # It goes on.
    assert len(run(generator, load(server, demo_model))) == 20


class Interrupted(BaseException):
    """As KeyboardInterrupt, which ends pytest."""


def test_an_interrupted_load_keeps_what_has_ended(
    generator: LoadGenerator, server: Completions, demo_model: Path
) -> None:
    server.token_s = 0.05
    samples: list[Sample] = []

    def interrupt(sample: Sample) -> None:
        samples.append(sample)
        if len(samples) == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        generator.load(load(server, demo_model, requests=500), interrupt)
    assert 3 <= len(samples) < 100
    assert not generator.closed
    server.token_s = 0
    asked = len(server.asked)
    assert asked < 150
    assert len(run(generator, load(server, demo_model))) == 20
    assert len(server.asked) == asked + 20


def test_a_load_that_is_stopped(generator: LoadGenerator, server: Completions, demo_model: Path) -> None:
    server.token_s = 0.05
    samples: list[Sample] = []

    def stop(sample: Sample) -> None:
        samples.append(sample)
        generator.stop()

    assert 0 < generator.load(load(server, demo_model, requests=500), stop) < 10
    assert 1 <= len(samples) < 100


def test_the_key_is_in_no_argv(generator: LoadGenerator) -> None:
    processes = [
        path.read_bytes()
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.parent.exists() and b"pdctl-load" in path.read_bytes()
    ]
    assert processes
    assert not any(KEY.encode() in line for line in processes)


def test_a_python_without_vllm(runtime: str) -> None:
    with pytest.raises(NodeError, match=r"vLLM cannot be imported with .*No module named 'vllm'") as error:
        LoadGenerator(LocalHost(), "/usr/bin/python3")
    assert error.value.code == "no-vllm"
