import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.counters import Total, gain, outcomes, read_scrape, role_counters, routed

START = 1_795_991_870.0


def metrics(
    requests: int, *, queue_s: float = 0.5, engine: int = 0, start: float | None = START, computed: int = 0
) -> bytes:
    """What a vLLM instance shows after so many requests that queued for so long each."""
    at = f'engine="{engine}",model_name="demo"'
    lines = [
        f"vllm:request_queue_time_seconds_sum{{{at}}} {requests * queue_s}",
        f"vllm:request_queue_time_seconds_count{{{at}}} {float(requests)}",
        f'vllm:request_queue_time_seconds_bucket{{{at},le="0.3"}} 0.0',
        f"vllm:nixl_num_failed_transfers_total{{{at}}} 1.0",
        f'vllm:prompt_tokens_by_source_total{{{at},source="local_compute"}} {float(computed)}',
        f'vllm:prompt_tokens_by_source_total{{{at},source="external_kv_transfer"}} {512.0 * requests}',
    ]
    if start is not None:
        lines.append(f"process_start_time_seconds {start}")
    return "\n".join(lines).encode() + b"\n"


def test_what_came_between_is_summed_over_instances_and_engines() -> None:
    first = metrics(2, queue_s=1.0) + metrics(1, queue_s=3.0, engine=1, start=None)
    later = metrics(5, queue_s=1.0) + metrics(2, queue_s=3.0, engine=1, start=None)
    found = gain(
        [
            ("decode-0", read_scrape(first), read_scrape(later)),
            ("decode-1", read_scrape(metrics(0)), read_scrape(metrics(4, queue_s=2.0, computed=7))),
        ]
    )
    assert found.trouble == ()
    role = role_counters(found.increments)
    assert role.queue == Total(3 + 1 + 4, 3.0 + 3.0 + 8.0)
    assert role.queue.mean == 14 / 8
    assert role.prompt_tokens == {"local_compute": 7, "external_kv_transfer": 8 * 512}
    assert role.failed == 0


def test_a_metric_that_nobody_shows_is_not_zero() -> None:
    role = role_counters(gain([("decode-0", read_scrape(metrics(0)), read_scrape(metrics(1)))]).increments)
    assert role.expired is None
    assert role.transfer is None
    assert "local_cache_hit" not in role.prompt_tokens


def test_nothing_observed_has_no_mean() -> None:
    role = role_counters(gain([("decode-0", read_scrape(metrics(3)), read_scrape(metrics(3)))]).increments)
    assert role.queue == Total(0, 0.0)
    assert role.queue.mean is None


def test_a_label_that_appears_later_counted_from_zero() -> None:
    scrape = read_scrape(b'vllm_router_pd_requests_total{route="/v1/completions"} 5\n')
    found = gain([("router", read_scrape(b"something 1\n"), scrape)])
    assert routed(found.increments) == 5
    assert routed(gain([("router", {}, {})]).increments) is None


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (metrics(5), metrics(2), "was restarted during the cell"),
        # It has counted more than the one before by now, and still is another.
        (metrics(5), metrics(9, start=START + 40), "was restarted during the cell"),
        (metrics(5, start=None), metrics(4, start=None), "was restarted during the cell"),
        (metrics(5), None, "did not answer after the cell"),
        (None, metrics(5), "did not answer before the cell"),
        (metrics(5), b"<html>busy</html>", "without the metrics it had before"),
    ],
)
def test_one_lost_instance_leaves_its_role_unknown(before: bytes | None, after: bytes | None, says: str) -> None:
    well = ("decode-0", read_scrape(metrics(0)), read_scrape(metrics(3)))
    found = gain([well, ("decode-1", read_scrape(before), read_scrape(after))])
    assert found.increments is None
    [said] = found.trouble
    assert said.startswith("decode-1 ")
    assert says in said
    assert role_counters(found.increments).queue is None
    assert outcomes(found.increments) is routed(found.increments) is None


def test_a_restarted_rank_is_seen_by_its_outcomes() -> None:
    def rank(completed: int) -> bytes:
        return f'pdctl_transfers_total{{outcome="completed",side="prefill"}} {completed}\n'.encode()

    known = gain([("rank", read_scrape(rank(3)), read_scrape(rank(7)))])
    assert outcomes(known.increments) == {("prefill", "completed"): 4}
    assert "restarted" in gain([("rank", read_scrape(rank(3)), read_scrape(rank(1)))]).trouble[0]


def test_values_that_no_counter_has_are_left_out() -> None:
    names = ("vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_kv_expired_reqs_total", "pdctl_transfers_total")
    text = "".join(f"{name} {value}\n" for name, value in zip(names, ("NaN", "-4", "+Inf"), strict=True)).encode()
    assert read_scrape(text) == {}
    assert read_scrape(None) is None


_LINES = st.sampled_from([*metrics(3).decode().splitlines(), *metrics(1, start=START + 9).decode().splitlines()])
_WILD = st.lists(
    st.one_of(_LINES, st.builds(lambda line, cut: line[:cut], _LINES, st.integers(0, 60)), st.text(max_size=30)),
    max_size=12,
).map(lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass"))


@given(_WILD | st.binary(max_size=60) | st.none(), _WILD | st.binary(max_size=60) | st.none())
def test_garbage_is_never_more_than_missing(before: bytes | None, after: bytes | None) -> None:
    role = role_counters(gain([("decode-0", read_scrape(before), read_scrape(after))]).increments)
    for total in (role.queue, role.prefill, role.first_token, role.transfer, role.bytes):
        assert total is None or (total.count >= 0 and total.sum >= 0 and math.isfinite(total.sum))
