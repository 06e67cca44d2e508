from dataclasses import replace

import pytest

from pdctl.lifecycle.completions import Completion
from pdctl.lifecycle.proof import Counters, Evidence, expected_bytes, judge_answer, judge_transfer, merge, read_counters

IDLE = Counters(
    nixl_bytes=0.0,
    nixl_transfers=0.0,
    received_tokens=0.0,
    recomputed_tokens=0.0,
    block_size=128,
    bytes_per_block=524288.0,
)

METRICS = """\
vllm:nixl_bytes_transferred_sum{engine="0",model_name="demo"} 6.291456e+06
vllm:nixl_bytes_transferred_count{engine="0",model_name="demo"} 4.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="local_compute"} 2004.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="external_kv_transfer"} 7.0
vllm:cache_config_info{block_size="128",engine="0",kv_cache_memory_bytes="1073741824",num_gpu_blocks="2048"} 1.0
"""


def evidence(**growth: float) -> Evidence:
    return Evidence({"x-0": IDLE}, {"x-0": replace(IDLE, **growth)})


def test_counters_are_read_from_vllm_metrics() -> None:
    counters = read_counters(METRICS)
    assert counters.nixl_bytes == 6291456
    assert counters.received_tokens == 7
    assert counters.recomputed_tokens == 2004
    assert counters.bytes_per_block == 524288
    overridden = METRICS.replace('num_gpu_blocks="2048"', 'num_gpu_blocks="200",num_gpu_blocks_override="200"')
    assert read_counters(overridden).bytes_per_block is None
    assert read_counters("") == Counters(None, None, None, None, None, None)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (128, 1), (129, 2), (378, 3)])
def test_expected_bytes_are_whole_blocks(tokens: int, blocks: int) -> None:
    assert expected_bytes(tokens, IDLE) == blocks * 524288


def test_a_real_push_is_proven() -> None:
    verdict = judge_transfer("push", 378, evidence(nixl_bytes=1572864), evidence(received_tokens=377))
    assert verdict.proven
    assert verdict.unchecked == ()
    assert verdict.facts["expected_bytes"] == 1572864


def test_a_silent_local_prefill_is_a_failure_and_said_as_such() -> None:
    verdict = judge_transfer("push", 378, evidence(), evidence(received_tokens=0, recomputed_tokens=378))
    assert "silently prefilled" in verdict.failures[0]
    assert any("moved no byte" in failure for failure in verdict.failures)


def test_too_few_bytes_are_a_failure() -> None:
    verdict = judge_transfer("push", 378, evidence(nixl_bytes=524288), evidence(received_tokens=377))
    assert "expected at least 1,572,864" in verdict.failures[0]


def test_in_pull_mode_decode_owns_the_handles() -> None:
    assert judge_transfer("pull", 200, evidence(), evidence(received_tokens=199, nixl_bytes=2 * 524288)).proven
    assert not judge_transfer("pull", 200, evidence(nixl_bytes=2 * 524288), evidence(received_tokens=199)).proven


def test_unknown_geometry_is_said_and_not_passed_over() -> None:
    bare = replace(IDLE, bytes_per_block=None)
    prefill = Evidence({"p": bare}, {"p": replace(bare, nixl_bytes=10.0)})
    verdict = judge_transfer("push", 100, prefill, evidence(received_tokens=99))
    assert verdict.proven
    assert "not exported" in verdict.unchecked[0]


def test_no_connector_metrics_at_all_is_a_failure() -> None:
    nothing = Counters(None, None, None, None, None, None)
    verdict = judge_transfer("push", 100, Evidence({"p": nothing}, {"p": nothing}), Evidence({}, {}))
    assert not verdict.proven


def completion(tokens: list[str], logprobs: list[float], top: list[dict[str, float]] | None = None) -> Completion:
    return Completion("".join(tokens), 10, None, tuple(tokens), tuple(logprobs), tuple(top or ()))


def test_exact_comparison_wants_the_same_text() -> None:
    assert judge_answer(completion(["a"], []), completion(["a"], []), exact=True).proven
    verdict = judge_answer(completion(["a"], []), completion(["b"], []), exact=True)
    assert "'a' through the router, 'b' from prefill alone" in verdict.failures[0]


def test_close_log_probabilities_agree() -> None:
    verdict = judge_answer(completion(["a", "b"], [-0.1, -0.5]), completion(["a", "b"], [-0.2, -0.1]), exact=False)
    assert verdict.proven
    assert verdict.facts["largest_difference"] == 0.4


def test_a_near_tie_may_flip_but_an_unlikely_token_may_not() -> None:
    alone = completion(["a", "b"], [-0.1, -0.7], [{"a": -0.1}, {"b": -0.7, "c": -0.9}])
    assert judge_answer(completion(["a", "c"], [-0.1, -0.6]), alone, exact=False).proven
    assert not judge_answer(completion(["a", "z"], [-0.1, -0.6]), alone, exact=False).proven
    far = completion(["a", "b"], [-0.1, -0.1], [{"a": -0.1}, {"b": -0.1, "c": -4.0}])
    assert not judge_answer(completion(["a", "c"], [-0.1, -0.6]), far, exact=False).proven


def test_same_tokens_with_far_log_probabilities_are_wrong() -> None:
    verdict = judge_answer(completion(["a"], [-3.0]), completion(["a"], [-0.1]), exact=False)
    assert "2.90" in verdict.failures[0]


def test_answers_that_cannot_be_judged_are_said_to_be() -> None:
    assert judge_answer(completion(["a"], []), completion(["b"], []), exact=False).unchecked


def test_merge_keeps_everything() -> None:
    left = judge_transfer("push", 378, evidence(), evidence())
    right = judge_answer(completion(["a"], []), completion(["b"], []), exact=True)
    assert len(merge([left, right]).failures) == len(left.failures) + 1
