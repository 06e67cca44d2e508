"""The script that makes load on a node: what of it needs no vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import random
import string
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pdctl.hosts.base import LINE_LIMIT_BYTES
from pdctl.node import load as script


class Tokenizer:
    """A word is one token with a space before it, and one token a letter at the beginning of a text."""

    def __init__(self, words: int = 300, special: int = 0) -> None:
        draw = random.Random(1)
        self.words = sorted({"".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 5))) for _ in range(words)})
        self.vocab_size = len(self.words) + 3
        self.all_special_ids = [0]
        self.special = special

    def num_special_tokens_to_add(self) -> int:
        return self.special

    def decode(self, tokens: list[int]) -> str:
        (token,) = tokens
        return {0: "<end>", 1: "!", 2: "\ufffd"}.get(token) or f" {self.words[token - 3]}"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        first, *others = text.split(" ")
        return [1] * (len(first) + len(others))


def common(texts: list[list[str]]) -> int:
    """How many words they all begin with."""
    return next((place for place, words in enumerate(zip(*texts, strict=False)) if len(set(words)) > 1), len(texts[0]))


def order(**changed: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": 100,
        "output_tokens": 5,
        "concurrency": 2,
        "rate": None,
        "prefix_hit": 0,
        "requests": 40,
        "seed": 0,
        "measured": True,
        "keep": 0,
        "request_timeout_s": 5.0,
        **changed,
    }


class TestPrompts:
    @pytest.mark.parametrize("special", [0, 1])
    @pytest.mark.parametrize("tokens", [2, 16, 100])
    def test_they_have_the_length(self, special: int, tokens: int) -> None:
        tokenizer = Tokenizer(special=special)
        for prompt in script.Prompts(tokenizer).make(order(prompt_tokens=tokens)):
            assert len(tokenizer.encode(prompt, add_special_tokens=False)) == tokens - special

    def test_they_are_fixed_and_never_begin_alike(self) -> None:
        prompts = script.Prompts(Tokenizer())
        assert prompts.make(order()) == prompts.make(order())
        changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"measured": False}, {"concurrency": 4}, {"output_tokens": 6}]
        made = [prompt for change in changes for prompt in prompts.make(order(**change))]
        assert len({" ".join(prompt.split(" ")[:8]) for prompt in made}) == len(made)

    @pytest.mark.parametrize(("hit", "tokens", "shared"), [(50, 100, 50), (100, 100, 84), (100, 16, 0), (25, 100, 25)])
    def test_they_share_as_much_as_was_asked_for(self, hit: int, tokens: int, shared: int) -> None:
        prompts = script.Prompts(Tokenizer())
        warm_up = prompts.make(order(prompt_tokens=tokens, prefix_hit=hit, measured=False, requests=2))
        words = [p.split(" ") for p in warm_up + prompts.make(order(prompt_tokens=tokens, prefix_hit=hit))]
        assert common(words) == shared
        assert len({tuple(each[shared:]) for each in words}) == 42
        other = prompts.make(order(prompt_tokens=tokens, prefix_hit=hit, seed=9))[0].split(" ")
        assert common([words[0], other]) < 8

    def test_what_has_no_words(self) -> None:
        with pytest.raises(script.Trouble, match=r"only .* tokens of the tokenizer are words"):
            script.Prompts(Tokenizer(words=5))

    def test_a_prompt_too_short(self) -> None:
        with pytest.raises(script.Trouble, match="no room"):
            script.Prompts(Tokenizer(special=1)).make(order(prompt_tokens=1))


class TestFailures:
    @pytest.mark.parametrize(
        ("chunk", "said"),
        [
            (b'data: {"choices": [{"text": "error"}]}\n\n', ""),
            (b'data: {"error": {"message": "no\\nKV"}}\n\ndata: [DONE]\n\n', "no KV"),
            (b'data: {"error": "plain"}\n\n', "plain"),
            (b'data: {"error": {"code": 5}}', '{"error": {"code": 5}}'),
            (b'data: {"error" \xff broken', '{"error" \ufffd broken'),
        ],
    )
    def test_in_a_stream(self, chunk: bytes, said: str) -> None:
        assert script.streamed_error(chunk) == said

    def test_deep_nesting(self) -> None:
        assert len(script.one_line(script.error_text("[" * 100_000))) <= script.MAX_ERROR

    @pytest.mark.parametrize(
        ("output", "refused", "said"),
        [
            ({"success": True, "output_tokens": 5}, "", ""),
            ({"success": True, "output_tokens": 4}, "", "answered with 4 tokens instead of 5"),
            ({"success": True, "output_tokens": 0}, "", "the stream ended before its end: no usage came"),
            (
                {"success": False, "error": "Traceback:\n  File\nOSError: [Errno 5] gone\n"},
                "",
                "OSError: [Errno 5] gone",
            ),
            ({"success": False, "error": ""}, "", "it failed without a reason"),
            ({"success": False, "error": "Bad Gateway"}, "HTTP 502 Bad Gateway", "HTTP 502 Bad Gateway"),
        ],
    )
    def test_of_a_request(self, output: dict[str, Any], refused: str, said: str) -> None:
        seen = script.Seen(None)
        seen.refused = refused
        assert script.why_failed(SimpleNamespace(**output), seen, 5) == said


def test_kept_answers_are_spread() -> None:
    load = script.Load(order(keep=4), None, None, None)  # type: ignore[arg-type]
    load.answers = {place: (f"prompt {place}", "text") for place in range(100) if place != 12}
    assert [place for place, _, _ in load.kept()] == [13, 38, 62, 87]
    load.answers = {3: ("p", "t")}
    assert load.kept() == [(3, "p", "t")]
    load.answers = {}
    assert load.kept() == []


@pytest.mark.parametrize(
    ("kept", "concurrency", "count"),
    [(4, 1, 4), (4, 4, 4), (4, 7, 7), (3, 64, 64), (4, 500, 64), (100, 4, 100), (0, 8, 0)],
)
def test_a_batch_is_as_large_as_the_loads(kept: int, concurrency: int, count: int) -> None:
    places = script.batch(kept, concurrency)
    assert len(places) == count
    assert [number for number, counts in places if counts] == list(range(kept))
    assert {number for number, _ in places} == set(range(kept))


class Asked:
    """Stands for a prefill instance: says to each prompt how many it was asked at the time."""

    def __init__(self) -> None:
        self.now = 0
        self.most: list[int] = []
        self.asked: list[str] = []

    async def complete(self, session: Any, order: Any, prompt: str) -> tuple[str | None, str]:
        self.now += 1
        self.asked.append(prompt)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.most.append(self.now)
        self.now -= 1
        return (None, "HTTP 500") if prompt == "p3" and len(self.asked) > 5 else (f"{prompt} answered", "")


class Session:
    def __init__(self, **_: Any) -> None:
        pass

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("concurrency", "together"), [(1, 4), (10, 10), (1000, 64)])
def test_answers_are_asked_alone_and_in_a_batch(
    monkeypatch: pytest.MonkeyPatch, concurrency: int, together: int
) -> None:
    prefill = Asked()
    monkeypatch.setattr(script, "complete", prefill.complete)
    monkeypatch.setattr(script, "check_reachable", lambda url: None)
    monkeypatch.setitem(
        sys.modules, "aiohttp", SimpleNamespace(ClientTimeout=lambda total: None, ClientSession=Session)
    )
    said: list[dict[str, Any]] = []
    worker = script.Worker(SimpleNamespace(say=said.append))  # type: ignore[arg-type]
    worker._kept = [(10 * number, f"p{number}", "got") for number in range(4)]
    order = {"url": "http://10.0.0.7:8000", "request_timeout_s": 5.0, "concurrency": concurrency}
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    asyncio.run(worker._answers(order))
    assert prefill.most[:4] == [1] * 4
    assert max(prefill.most) == together
    assert len(prefill.asked) == 4 + together
    assert [one["is"] for one in said] == ["answer"] * 4 + ["answered"]
    assert [one["request"] for one in said[:4]] == [0, 10, 20, 30]
    assert [one["alone"] for one in said[:4]] == [f"p{number} answered" for number in range(4)]
    assert [one["among"] for one in said[:4]] == ["p0 answered", "p1 answered", "p2 answered", None]
    assert [one["error"] for one in said[:4]] == ["", "", "", "HTTP 500"]


def test_it_speaks_in_order_and_in_short_lines() -> None:
    ear, mouth = os.pipe()
    voice = script.Voice(mouth)
    gaps = [0.1234567] * 2000
    for index in range(300):
        voice.say({"is": "sample", "sample": {"index": index, "itl_s": gaps}})
    voice.say({"is": "done"})
    voice.say({"is": "failed"})
    seen: list[Any] = []
    with os.fdopen(ear, "rb") as stream:
        for line in stream:
            assert len(line) < LINE_LIMIT_BYTES / 4
            message = json.loads(line[len(script.PREFIX) :])
            seen += [item["index"] for item in message["samples"]] if message["is"] == "samples" else [message["is"]]
            if seen[-1] == "failed":
                break
    os.close(mouth)
    assert seen == [*range(300), "done", "failed"]


def test_no_proxy_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("NO_PROXY", "x")
    script.bypass_proxy("http://10.0.0.7:8000")
    script.bypass_proxy("http://10.0.0.7:8000")
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,10.0.0.7"
