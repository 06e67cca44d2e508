from hypothesis import given
from hypothesis import strategies as st

from pdctl.prometheus_text import read_samples, total

TEXT = """\
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a\\"b"} 2.0
vllm:num_requests_running{engine="1",model_name="x"} 3.0
vllm:num_requests_running_other{engine="0"} 99
vllm:bytes_sum 1.5e6
vllm:broken{engine="0" 7
vllm:bytes_total nonsense
"""


def test_only_the_wanted_samples_are_read() -> None:
    samples = read_samples(TEXT, ["vllm:num_requests_running", "vllm:bytes_sum"])
    assert total(samples, "vllm:num_requests_running") == 5
    assert total(samples, "vllm:num_requests_running", engine="1") == 3
    assert total(samples, "vllm:bytes_sum") == 1.5e6
    assert samples[0].labels["model_name"] == 'a"b'


def test_a_missing_metric_is_none_and_not_zero() -> None:
    assert total(read_samples(TEXT, ["vllm:absent"]), "vllm:absent") is None


def test_malformed_lines_are_left_out() -> None:
    assert read_samples(TEXT, ["vllm:broken", "vllm:bytes_total"]) == []


@given(st.text(max_size=300), st.sampled_from(["", "m", "m{", 'm{a="']))
def test_any_text_is_survived(tail: str, head: str) -> None:
    read_samples(head + tail, ["m"])
