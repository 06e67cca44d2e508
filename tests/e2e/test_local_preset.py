"""The `local` preset, as `make demo` runs it, and the proof that the equality tests can fail."""

from __future__ import annotations

import secrets
import urllib.error

import pytest

from tests.e2e.cluster import Cluster, complete, marked_processes, post

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def up(local_cluster: Cluster):
    result = local_cluster.pdctl("up", "--json", timeout=400)
    try:
        assert result.code == 0, result.err
        yield result.json()
    finally:
        local_cluster.pdctl("down", "--force", timeout=120)


def test_the_preset_comes_up_and_is_proven(up: dict) -> None:
    assert up["proof"]["proven"]
    assert up["proof"]["facts"]["answer"] == "equal text"
    assert up["timings_s"]["total"] > 0


def test_one_letter_early_in_the_prompt_changes_the_answer(up: dict) -> None:
    base = up["instances"][0]["url"]
    tail = " window garden letter morning" * 40
    answers = {complete(base, f"{letter}{tail}", model=up["model"]) for letter in "abcdefgh"}
    assert len(answers) >= 7


def test_a_foreign_kv_cache_is_refused(up: dict) -> None:
    """Decode asks for the KV cache of another prompt under the same id: it must not get it."""
    prefill, decode = up["instances"][0]["url"], up["instances"][1]["url"]
    ours, other = (f"{letter} river stone window garden" * 30 for letter in "xy")
    alone = complete(prefill, ours, model=up["model"])

    def pair(prefill_prompt: str) -> str:
        headers = {"X-Request-Id": f"damage-{secrets.token_hex(8)}"}
        body = {"model": up["model"], "max_tokens": 1, "temperature": 0}
        leg = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = post(
            f"{prefill}/v1/completions", {**body, "prompt": prefill_prompt, "kv_transfer_params": leg}, headers=headers
        )
        second = {**body, "max_tokens": 12, "prompt": ours, "kv_transfer_params": answer["kv_transfer_params"]}
        return str(post(f"{decode}/v1/completions", second, headers=headers)["choices"][0]["text"])

    with pytest.raises(urllib.error.HTTPError) as refused:
        pair(other)
    assert refused.value.code == 500
    assert pair(ours) == alone


def test_down_leaves_nothing(up: dict, local_cluster: Cluster) -> None:
    assert local_cluster.pdctl("down", timeout=120).code == 0
    assert marked_processes("e2e-local") == []
