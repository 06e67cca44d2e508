"""From a log to the cause: every cause has a recorded or composed sample, and a good boot has none."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.lifecycle.causes import CAUSES, Weight, fill, names
from pdctl.lifecycle.diagnose import Diagnosis, diagnose, last_lines, redact

LOGS = Path(__file__).parent / "data" / "logs"
PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
SAMPLES = sorted(path.stem for path in LOGS.glob("*.log"))
FAILURES = [name for name in SAMPLES if not name.startswith("good-boot")]
GOOD = [name for name in SAMPLES if name.startswith("good-boot")]


def sample(name: str) -> tuple[str, int | None, int | None]:
    """The log and how the instance ended, as the first line of the sample says."""
    with (LOGS / f"{name}.log").open(encoding="utf-8", newline="") as file:
        text = file.read()
    note = text.split("\n", 1)[0]
    assert re.match(r"# (recorded with vLLM [\d.]+|composed from source: \S.*?)(, (exit code|signal) \d+)?$", note), (
        note
    )
    code, signal = re.search(r"exit code (\d+)$", note), re.search(r"signal (\d+)$", note)
    return text, int(code[1]) if code else None, int(signal[1]) if signal else None


def best(name: str) -> Diagnosis:
    return diagnose(*sample(name))[0]


# --- the samples


@pytest.mark.parametrize("name", FAILURES)
def test_sample_gives_its_cause_first(name):
    found = best(name)
    assert found.id == name.split("--")[0]
    assert "unknown" not in found.cause
    assert "{" not in found.cause
    assert found.fix
    assert found.evidence or found.id in ("host-out-of-memory", "terminated")


@pytest.mark.parametrize("name", FAILURES)
def test_fatal_cause_stands_alone_or_with_its_consequences(name):
    found = diagnose(*sample(name))
    assert len(found) <= 2, [item.id for item in found]


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("code", [None, 0, 1])
def test_good_boot_gives_no_diagnosis(name, code):
    assert diagnose(sample(name)[0], code, None) == []


def test_every_cause_has_a_sample():
    missing = {cause.id for cause in CAUSES} - {name.split("--")[0] for name in FAILURES}
    assert missing == set()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("port-in-use", ["port 8161 "]),
        ("side-channel-port-in-use", ["5661", "10.0.0.11"]),
        ("address-not-local", ["10.99.0.5"]),
        ("address-not-local--side-channel", ["10.99.0.5", "5661"]),
        ("model-not-found", ["/models/not-there"]),
        ("hub-unreachable", ["some-org/not-there"]),
        ("gated-model", ["meta-llama/Llama-3.2-1B-Instruct"]),
        ("unknown-argument", ["--max-nmu-seqs"]),
        ("invalid-argument", ["--dtype", "float33"]),
        ("invalid-argument--json", ["--kv-transfer-config", "Invalid JSON"]),
        ("kv-cache-too-small", ["400000", "1.53 GiB", "1.0 GiB"]),
        ("max-model-len", ["400000", "8192"]),
        ("device-out-of-memory", ["786.00 MiB", "140.75 MiB", "79.11 GiB"]),
        ("device-memory-taken", ["10.21 GiB", "79.11 GiB", "72.78 GiB"]),
        ("driver-too-old", ["12080"]),
        ("too-few-devices", ["8 devices", "offers 4"]),
        ("handshake-incompatible", ["bfa8231f0f8c", "0c1d22e9b7aa"]),
        ("unsupported-vllm", ["0.29.1"]),
        ("port-in-use--router", ["port 8163 "]),
        ("side-channel-unreachable", ["10.0.0.11:5999"]),
        ("side-channel-unreachable--libfabric", ["decode-0"]),
        ("stale-engine-id", ["prefill-0-old", "decode-0"]),
        ("workers-not-healthy", ["http://10.0.0.11:8991"]),
        ("tensor-parallel", ["3 devices", "(8)"]),
        ("unknown-argument--router", ["--prefll"]),
        ("libfabric-missing--library", ["libfabric.so.1"]),
        ("interpreter-missing", ["/opt/vllm/bin/python"]),
        ("engine-died", ["expected 8 KV heads, found 7"]),
        ("python-error", ["KeyError: 'rope_scaling'"]),
    ],
)
def test_cause_names_the_values(name, words):
    cause = best(name).cause
    for word in words:
        assert word in cause


def test_fix_names_the_values():
    assert "262016" in best("kv-cache-too-small").fix
    assert ":8161" in best("port-in-use").fix


def test_the_comment_of_a_sample_is_ignored():
    assert diagnose("# recorded: CUDA out of memory, No such file\nall is well\n", None, None) == []


# --- order and exclusions


def test_the_workers_error_is_preferred_to_its_echo():
    found = best("engine-died")
    assert "AssertionError" in found.evidence[0]
    assert "Engine core initialization failed" not in found.cause


def test_earlier_fatal_error_comes_before_the_kill():
    log = sample("device-out-of-memory")[0]
    assert [item.id for item in diagnose(log, None, 9)] == ["device-out-of-memory", "host-out-of-memory"]


def test_kill_comes_before_an_error_that_does_not_end_a_process():
    log = sample("handshake-incompatible")[0]
    assert [item.id for item in diagnose(log, None, 9)] == ["host-out-of-memory", "handshake-incompatible"]


def test_error_in_a_living_process_is_not_general():
    log = "Traceback (most recent call last):\nValueError: a request was wrong\n"
    assert diagnose(log, None, None) == []
    assert [item.id for item in diagnose(log, 1, None)] == ["python-error"]


def test_requests_cut_off_by_a_stop_are_no_dead_engine():
    stop = "(APIServer pid=1) INFO 11-29 17:17:29 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
    echo = "(APIServer pid=1) ERROR 11-29 17:17:29 [x.py:9] vllm.v1.engine.exceptions.EngineDeadError: see above\n"
    assert diagnose(stop + echo, None, None) == []
    assert [item.id for item in diagnose(echo + stop, None, None)] == ["engine-died"]


def test_warnings_of_loggers_are_no_cause():
    line = "(APIServer pid=1) WARNING 11-29 16:31:12 [system_utils.py:255] OSError: [Errno 24] Too many open files\n"
    assert diagnose(line, 1, None) == []
    assert diagnose(line.replace("WARNING", "ERROR"), 1, None)[0].id == "too-many-open-files"


def test_words_in_a_logged_prompt_are_no_cause():
    line = (
        "(APIServer pid=1) INFO 11-29 16:31:12 [logger.py:45] Received request: prompt: 'No CUDA GPUs are available'\n"
    )
    assert diagnose(line, 1, None) == []


def test_evidence_is_not_repeated_for_every_rank():
    line = "(Worker_TP{} pid=9) ERROR 11-29 16:32:07 [x.py:1063] RuntimeError: No CUDA GPUs are available\n"
    found = diagnose("".join(line.format(rank) for rank in range(8)), 1, None)
    assert len(found) == 1
    assert len(found[0].evidence) == 1


@pytest.mark.parametrize(
    ("code", "signal", "expected"),
    [
        (None, 9, "host-out-of-memory"),
        (137, None, "host-out-of-memory"),
        (None, 4, "illegal-instruction"),
        (132, None, "illegal-instruction"),
        (None, 7, "shared-memory"),
        (None, 11, "native-crash"),
        (134, None, "native-crash"),
        (None, 15, "terminated"),
        (127, None, "interpreter-missing"),
        (126, None, "permission-denied"),
    ],
)
def test_the_exit_alone(code, signal, expected):
    found = diagnose("", code, signal)
    assert [item.id for item in found] == [expected]
    assert found[0].evidence == []


@pytest.mark.parametrize(("code", "signal"), [(None, None), (0, None), (1, None), (None, 34), (200, None), (255, None)])
def test_nothing_is_known(code, signal):
    assert diagnose("", code, signal) == []


def test_death_of_a_worker_in_the_log():
    log = (
        "(EngineCore pid=1) ERROR 11-29 16:33:20 [x.py:3] Worker proc VllmWorker-3 died unexpectedly (exit code: {})\n"
    )
    assert "VllmWorker-3 was killed" in diagnose(log.format(-9), 1, None)[0].cause
    assert diagnose(log.format(-4), 1, None)[0].id == "illegal-instruction"
    found = diagnose(log.format("None"), 0, None)[0]
    assert found.id == "worker-vanished"
    assert "VllmWorker-3" in found.cause


# --- the table and its page


def test_the_table_is_sound():
    ids = [cause.id for cause in CAUSES]
    assert len(ids) == len(set(ids))
    for cause in CAUSES:
        assert re.fullmatch(r"[a-z][a-z-]{2,40}", cause.id)
        assert set(cause.unless_ids) <= set(ids), cause.id
        known = {group for sign in cause.signs for group in sign.pattern.groupindex}
        known |= {"process", "signal", "error", "configured_port", "configured_host", "configured_model"}
        for text in (*cause.texts, cause.fix):
            assert names(text) <= known | {"port", "path"}, cause.id
            assert "{" not in fill(text, {}).replace("{HF_TOKEN: {from_env: HF_TOKEN}}", "").replace(
                "env: {", ""
            ).replace("vllm_args: {", "")
        assert fill(cause.fix, {}).endswith("."), cause.id
        assert "unknown" not in fill(cause.fix, {}), cause.id


def test_the_page_explains_every_cause():
    parts = re.split(r"^## `([a-z-]+)`$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert parts[1::2] == [cause.id for cause in CAUSES]
    for cause, text in zip(CAUSES, parts[2::2], strict=True):
        for label in ("Seen", "Why", "Fix"):
            assert re.search(rf"^\*\*{label}:\*\* \S.+\.$", text, flags=re.M), (cause.id, label)
        assert f"**Fix:** {fill(cause.fix, {})}\n" in text, cause.id


def test_notes_never_hide_an_error():
    assert max(cause.weight for cause in CAUSES if cause.signals and cause.id != "terminated") is Weight.FATAL


# --- last lines


def test_last_lines_are_the_ones_that_tell_something():
    lines = last_lines(sample("unknown-argument")[0], 3)
    assert lines[-1] == "api_server.py: error: unrecognized arguments: --max-nmu-seqs"
    assert not any("[--" in line for line in lines)


def test_last_lines_collapse_progress_bars_and_drop_colours():
    bar = "".join(
        f"\rLoading safetensors checkpoint shards: {n:3}% Completed | {n}/100 [00:01<00:02]" for n in range(101)
    )
    assert last_lines(f"\x1b[31mfirst\x1b[0m\n{bar}\n\n   \nlast\x00\n", 9) == [
        "first",
        "Loading safetensors checkpoint shards: 100% Completed | 100/100 [00:01<00:02]",
        "last",
    ]


def test_last_lines_cut_long_ones_and_count():
    lines = last_lines("a\nb\n" + "x" * 100_000 + "\n", 2)
    assert lines[0] == "b"
    assert len(lines[1]) <= 300
    assert last_lines("a\nb\n", 0) == []
    assert last_lines("", 5) == []


def test_last_lines_skip_health_checks():
    log = 'important\n(APIServer pid=1) INFO:     10.0.0.1:4 - "GET /health HTTP/1.1" 200 OK\n'
    assert last_lines(log, 1) == ["important"]


def test_evidence_and_last_lines_hide_secrets():
    log = "OSError: [Errno 28] No space left on device: '/x' HF_TOKEN=hf_abcdefghijklmnop\n"
    assert "abcdefgh" not in diagnose(log, 1, None)[0].evidence[0]
    assert "abcdefgh" not in last_lines(log, 1)[0]


# --- redact


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("token hf_abcdefghijklmnopqrstuvwxyz012345 used", "abcdefghij"),
        ("Authorization: Bearer abc.def-ghi_jkl", "abc.def"),
        ("authorization: basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("key AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrXUtn"),
        ("AWS_SESSION_TOKEN=FwoGZXIvYXdzEBYaD", "FwoGZX"),
        ("https://user:pass@proxy.example:3128/", "user:pass"),
        ("https://s3-token@host/x", "s3-token"),
        ("'api_key': ['s3cr3t-value'], 'port': 1", "s3cr3t"),
        ('"password": "hunter2!"', "hunter2"),
        ("?X-Amz-Signature=0123456789abcdef&x=1", "0123456789abcdef"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ", "0123456789"),
        ("sk-proj-0123456789abcdefghij", "0123456789"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\n-----END OPENSSH PRIVATE KEY-----", "b3BlbnNz"),
    ],
)
def test_redact_masks(text, secret):
    assert secret in text
    masked = redact(text)
    assert secret not in masked
    assert "***" in masked
    assert redact(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 128, eos_token='</s>', num_tokens=4096",
        "KV cache size: 262,144 tokens",
        "http://10.0.0.11:8100/v1/completions user@host",
        "'api_key': None, 'hf_token': None",
        "tcp://10.0.0.11:5600",
        "risk-management-of-large-systems",
        "tokenizer='/models/demo'",
    ],
)
def test_redact_leaves_the_rest(text):
    assert redact(text) == text


# --- wild input


@settings(deadline=None)
@given(st.text(), st.none() | st.integers(-1000, 1000), st.none() | st.integers(-10, 100))
def test_arbitrary_text_never_crashes(text, code, signal):
    for item in diagnose(text, code, signal):
        assert item.cause
        assert item.fix
        assert all(len(line) <= 300 for line in item.evidence)
    assert all(len(line) <= 300 for line in last_lines(text, 10))
    redact(text)


FRAGMENTS = [
    *sorted({sign.needle for cause in CAUSES for sign in cause.signs}),
    "(Worker pid=1) ERROR 11-29 16:31:12 [x.py:1] ",
    "INFO: ",
    "'",
    ": ",
    "\n",
    "/",
    "{port}",
    "{",
    "}",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=30).map("".join), st.integers(0, 255))
def test_pieces_of_real_lines_never_crash(text, code):
    for item in diagnose(text, code, None):
        assert item.cause
        assert item.fix


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    [
        "a",
        " ",
        "a.",
        "\x1b[",
        "\r",
        "'",
        "://a:",
        "secret=",
        "api_key: ",
        "hf_token eyJ",
        "(a b) ",
        "/dev/shm failed No space left on device ",
        "NCCL WARN NCCL error: ",
        "NIXL transfer failure: handshake ",
        "1% 1/1 [",
        "Permission denied PermissionError: ",
        "workers timeout hosts healthy ",
        "trust_remote_code=True setting ",
        "VLLM_CPU_KVCACHE_SPACE ",
        "RLIMIT_MEMLOCK ",
        "-----BEGIN PRIVATE KEY-----",
        "a.A",
        "Error",
    ],
)
@pytest.mark.parametrize("end", ["", "\n"])
def test_pathological_text_stays_fast(unit, end):
    text = (unit * (4000 // len(unit)) + end) * 500
    begin = time.process_time()
    diagnose(text, 1, None)
    last_lines(text, 20)
    redact(text[:200_000])
    assert time.process_time() - begin < 30  # a pattern that backtracks takes minutes
