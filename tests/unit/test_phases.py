"""How far an instance has come, from recorded logs and from wild ones."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.lifecycle.phases import LogReader, Phase, phase

LOGS = Path(__file__).parent / "data" / "logs"


def read(name: str) -> str:
    with (LOGS / name).open(encoding="utf-8", newline="") as file:
        return file.read()


def steps(text: str, size: int = 1) -> list[tuple[str, str]]:
    """Every phase and detail seen when the log comes in pieces of ``size`` characters."""
    reader, seen = LogReader(), []
    for start in range(0, len(text), size):
        reader.feed(text[start : start + size])
        now = (reader.phase.value, reader.detail)
        if not seen or seen[-1] != now:
            seen.append(now)
    return seen


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_recorded_boot_goes_through_its_phases(size):
    seen = steps(read("good-boot.log"), size)
    assert [name for name, _ in seen] == sorted((name for name, _ in seen), key=lambda name: Phase(name).position)
    assert seen[-1] == ("ready", "")
    if size < 4096:
        assert ("starting", "Qwen3ForCausalLM") in seen
        assert ("loading", "weights 1/1") in seen
        assert ("profiling", "KV cache 262,144 tokens") in seen
        assert ("serving", "http://10.0.0.11:8161") in seen
        assert any(name == "warming" and detail.startswith("engine up in ") for name, detail in seen)


def test_boot_on_gpus_shows_weights_compilation_and_graphs():
    seen = steps(read("good-boot--gpu.log"))
    for expected in [
        ("loading", "weights 0/2"),
        ("loading", "weights 2/2"),
        ("loading", "weights loaded, 14.99 GiB"),
        ("profiling", "compiled in 14.59 s"),
        ("profiling", "KV cache 51.21 GiB"),
        ("profiling", "KV cache 131,072 tokens"),
        ("capturing", "CUDA graphs 12/35"),
        ("capturing", "CUDA graphs 35/35"),
        ("warming", "engine up in 33.22 s"),
        ("ready", ""),
    ]:
        assert expected in seen


def test_a_progress_bar_counts_before_its_line_ends_but_not_when_torn():
    reader = LogReader()
    bar = "\rCapturing CUDA graphs (decode, FULL):  34%|###4      | 12/35 [00:01<00:02,  9.81it/s]"
    reader.feed(bar[: bar.index("2/35")])
    assert reader.phase is Phase.STARTING
    reader.feed("2/3")
    assert reader.phase is Phase.STARTING
    reader.feed("5 [00:01")
    assert (reader.phase, reader.detail) == (Phase.CAPTURING, "CUDA graphs 12/35")


def test_phase_never_goes_back():
    reader = LogReader()
    reader.feed("INFO:     Application startup complete.\n")
    reader.feed("(Worker pid=1) INFO 11-29 16:31:47 [x.py:1] Starting to load model /models/demo...\n")
    assert reader.phase is Phase.READY


def arguments(pid: int) -> str:
    return f"(APIServer pid={pid}) INFO 11-29 16:31:12 [api_utils.py:286] non-default args: {{'port': 8101}}\n"


def test_a_new_server_process_starts_over_and_the_same_one_does_not():
    reader = LogReader()
    reader.feed(arguments(7) + "INFO:     Application startup complete.\n")
    reader.feed(arguments(7))
    assert reader.phase is Phase.READY
    reader.feed(arguments(8))
    assert (reader.phase, reader.detail) == (Phase.STARTING, "")


def test_words_of_a_prompt_are_no_restart():
    reader = LogReader()
    reader.feed(arguments(7) + "INFO:     Application startup complete.\n")
    reader.feed("(APIServer pid=7) INFO 11-29 16:31:12 [logger.py:45] Received request: prompt: '" + arguments(9))
    assert reader.phase is Phase.READY


@pytest.mark.parametrize(
    "line",
    [
        '(APIServer pid=5052) INFO:     10.0.0.1:44278 - "GET /health HTTP/1.1" 200 OK',
        'INFO:     10.0.0.1:44278 - "POST /v1/completions HTTP/1.1" 200 OK',
        "(APIServer pid=5) INFO 11-29 16:32:14 [loggers.py:335] Engine 000: Avg prompt throughput: 200.4 tokens/s",
    ],
)
def test_the_end_of_a_long_log_is_enough_to_be_ready(line):
    assert phase(f"ut off in the middle\n{line}\n") == (Phase.READY, "")


def test_router():
    log = (
        "\x1b[2m2026-11-29 16:35:09\x1b[0m \x1b[32m INFO\x1b[0m \x1b[2mvllm_router_rs::routers::http::router\x1b[0m"
        "\x1b[2m:\x1b[0m \x1b[2msrc/routers/http/router.rs\x1b[0m\x1b[2m:\x1b[0m\x1b[2m1021:\x1b[0m Waiting for 2 "
        "unique hosts (representing 2 workers) to become healthy (timeout: 600s)\n"
    )
    assert phase(log) == (Phase.STARTING, "waiting for 2 worker hosts")
    log += (
        "\x1b[2m2026-11-29 16:35:09\x1b[0m \x1b[32m INFO\x1b[0m \x1b[2mvllm_router_rs::server\x1b[0m\x1b[2m:\x1b[0m "
        "\x1b[2msrc/server.rs\x1b[0m\x1b[2m:\x1b[0m\x1b[2m1270:\x1b[0m Starting server on 10.0.0.11:8000\n"
    )
    assert phase(log)[0] is Phase.READY


def test_colours_garbage_and_endless_lines():
    reader = LogReader()
    reader.feed("\x00\xff\ufffd" * 100_000)
    reader.feed("\n\x1b[32mINFO\x1b[0m: Application \x1b[1mstartup\x1b[0m complete.\n")
    assert reader.phase is Phase.READY
    assert len(reader._rest) == 0
    reader.feed("x" * 3_000_000)
    assert len(reader._rest) <= 4096


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(1, 50), max_size=5))
def test_arbitrary_text_never_crashes_and_never_goes_back(text, cuts):
    reader, last, start = LogReader(), Phase.STARTING, 0
    for cut in [*cuts, len(text)]:
        now = reader.feed(text[start : start + cut])
        start += cut
        assert now.position >= last.position or "non-default args" in text
        last = now


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 6000), max_size=30))
def test_the_pieces_do_not_matter(cuts):
    text = read("good-boot--gpu.log")
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    reader = LogReader()
    for start, end in pairwise(places):
        reader.feed(text[start:end])
    assert (reader.phase, reader.detail) == phase(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    [
        "oading x: 1%",
        "Capturing CUDA graphs 1% 1/1 ",
        "Fetching 1 files:  1%",
        "\x1b[",
        "\x1b]",
        "\r",
        "INFO: a HTTP/1.1",
        "Starting vLLM Starting server on vllm_router_rs::server",
        "(APIServer pid=1) INFO 1 [a:1] non-default args: ",
    ],
)
@pytest.mark.parametrize("end", ["", "\n"])
def test_pathological_text_stays_fast(unit, end):
    text = ((unit * (4000 // len(unit))) + end) * 250
    begin = time.process_time()
    phase(text[:1_000_000])
    assert time.process_time() - begin < 15  # a pattern that backtracks takes minutes
