"""The load generator's side that stays here, against scripts that fail in each way; and judging answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench import generator as module
from pdctl.bench.generator import Answer, Load, LoadGenerator, difference, judge
from pdctl.bench.results import Cell, Sample
from pdctl.errors import HostError, NodeError
from pdctl.hosts.local import LocalHost

CELL = Cell(prompt_tokens=64, output_tokens=5, concurrency=2)
JOB = Load(cell=CELL, requests=3, seed=0, url="http://127.0.0.1:1/", model="demo", tokenizer="~/model", keep=2)

# `take` reads an order, `tell` answers.
HEAD = """\
import json, os, sys, time
def tell(**message):
    print("PDCTL-LOAD-1 " + json.dumps(message), flush=True)
def sample(index, **changed):
    return {"index": index, "started_unix": 1.5, "ttft_s": 0.1, "latency_s": 0.3, "itl_s": [0.1, 0.1],
            "prompt_tokens": 64, "output_tokens": 3, "error": "", **changed}
def main(stream):
    def take():
        line = stream.readline()
        if not line:
            sys.exit(0)
        return json.loads(line)
    start = take()
    PID = os.getpid()
"""
READY = 'tell(**{"is": "ready", "generator": "vllm bench serve", "version": "0.32", "python": "p"})\n'

Make = Callable[..., LoadGenerator]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """A generator that runs some lines after its start."""

    def made(lines: str, *, ready: bool = True, **options: float) -> LoadGenerator:
        body = (READY if ready else "") + lines
        source = HEAD + "".join(f"    {line}\n" for line in body.splitlines())
        monkeypatch.setattr(module, "script_source", lambda name: source.encode())
        return LoadGenerator(LocalHost(), "python3", env={"OPENAI_API_KEY": "sk"}, **options)  # type: ignore[arg-type]

    return made


def is_gone(pid: int) -> bool:
    for _ in range(250):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_load(make: Make) -> None:
    with make(
        'job = take(); tell(**{"is": "begun", "unix": 1})\n'
        'tell(**{"is": "samples", "samples": [sample(0), sample(1, ttft_s=None, error="HTTP 503")]})\n'
        'assert start["env"] == {"OPENAI_API_KEY": "sk"}, start\n'
        'assert (job["prompt_tokens"], job["concurrency"], job["rate"], job["keep"]) == (64, 2, None, 2), job\n'
        'assert job["url"] == "http://127.0.0.1:1", job\n'
        'tell(**{"is": "samples", "samples": [sample(2)]})\n'
        'tell(**{"is": "done", "duration_s": 2.5, "stopped": False})\n'
        "take()"
    ) as generator:
        samples: list[Sample] = []
        assert generator.load(JOB, samples.append) == 2.5
        assert (generator.name, generator.version) == ("vllm bench serve", "0.32")
    assert [sample.error for sample in samples] == ["", "HTTP 503", ""]
    assert samples[0].itl_s == (0.1, 0.1)


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        (
            'sys.stderr.write("Segmentation fault\\n"); os._exit(139)',
            "generator-ended",
            "exit status 139.*Segmentation",
        ),
        ("os.kill(PID, 9)", "generator-ended", "exit status 137"),
        ('print("PDCTL-LOAD-1 {nonsense", flush=True); take()', "bad-reply", "makes no sense.*nonsense"),
        ('tell(**{"is": "samples", "samples": [{"index": 1}]}); take()', "bad-reply", "makes no sense"),
        ('tell(**{"is": "samples", "samples": [sample(0, latency_s=-1)]}); take()', "bad-reply", "makes no sense"),
        ('tell(**{"is": "samples", "samples": [sample(0, itl_s=5)]}); take()', "bad-reply", "makes no sense"),
        ('tell(**{"is": "samples", "samples": 7}); take()', "bad-reply", "makes no sense"),
        ('tell(**{"is": "done", "duration_s": float("nan")}); take()', "bad-reply", "no duration"),
        ('tell(**{"is": "done"}); take()', "bad-reply", "makes no sense"),
        ('tell(**{"is": "answered"}); take()', "bad-reply", "'samples' was due"),
    ],
)
def test_one_that_breaks_is_closed(make: Make, lines: str, code: str, said: str) -> None:
    with make("take()\n" + lines) as generator:
        with pytest.raises(NodeError, match=said) as error:
            generator.load(JOB, lambda sample: None)
        assert error.value.code == code
        assert generator.closed
        with pytest.raises(NodeError, match="has ended"):
            generator.load(JOB, lambda sample: None)


def test_a_line_without_end(make: Make) -> None:
    with make('take(); print("x" * (5 << 20), flush=True); take()') as generator:
        with pytest.raises(HostError, match="line of more than"):
            generator.load(JOB, lambda sample: None)
        assert generator.closed


def test_silence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLACK_S", 0.0)
    with make("take(); take()") as generator:
        job = Load(CELL, 3, 0, "http://x", "demo", "t", request_timeout_s=0.2)
        with pytest.raises(NodeError, match=r"said nothing for 0\.2 s") as error:
            generator.load(job, lambda sample: None)
        assert error.value.code == "silent"
        assert generator.closed


def test_how_long_silence_may_be() -> None:
    slow = Load(Cell(prompt_tokens=1, output_tokens=1, rate=0.1), 3, 0, "u", "m", "t", request_timeout_s=30)
    assert slow.silence_s >= 30 + 20 / 0.1
    assert JOB.silence_s < 400


def test_a_failed_load_leaves_it_ready(make: Make) -> None:
    fails = 'take(); tell(**{"is": "failed", "code": "no-tokenizer", "reason": "no such folder", "hint": "look"})\n'
    with make(fails + 'take(); tell(**{"is": "done", "duration_s": 1})\ntake()') as generator:
        with pytest.raises(NodeError, match="local: no such folder") as error:
            generator.load(JOB, lambda sample: None)
        assert (error.value.code, error.value.hint) == ("no-tokenizer", "look")
        assert generator.load(JOB, lambda sample: None) == 1


@pytest.mark.parametrize("code", ["no-vllm", "a word of the future"])
def test_one_that_does_not_start(make: Make, code: str) -> None:
    with pytest.raises(NodeError, match="no vllm there") as error:
        make(f'tell(**{{"is": "failed", "code": "{code}", "reason": "no vllm there"}}); take()', ready=False)
    assert error.value.code == (code if code == "no-vllm" else "failed")


def test_one_that_starts_too_slowly(make: Make) -> None:
    with pytest.raises(NodeError, match="said nothing") as error:
        make("take()", ready=False, start_timeout_s=0.2)
    assert "importing vLLM" in error.value.hint


STOPPABLE = (
    'take(); tell(**{"is": "samples", "samples": [sample(PID), sample(1)]})\n'
    'assert take() == {"do": "stop"}; tell(**{"is": "samples", "samples": [sample(2)]})\n'
    'tell(**{"is": "done", "duration_s": 1, "stopped": True})\ntake()'
)


def test_an_interrupt_keeps_what_has_ended(make: Make) -> None:
    samples: list[Sample] = []

    def interrupt(sample: Sample) -> None:
        samples.append(sample)
        if len(samples) == 2:
            raise KeyboardInterrupt

    with make(STOPPABLE) as generator:
        with pytest.raises(KeyboardInterrupt):
            generator.load(JOB, interrupt)
        assert not generator.closed
    assert len(samples) == 3


def test_an_interrupt_ends_one_that_does_not_stop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STOP_S", 0.2)
    samples: list[Sample] = []

    def interrupt(sample: Sample) -> None:
        samples.append(sample)
        raise KeyboardInterrupt

    with make(
        'take(); tell(**{"is": "samples", "samples": [sample(0, started_unix=PID)]}); take()\ntake()'
    ) as generator:
        with pytest.raises(KeyboardInterrupt):
            generator.load(JOB, interrupt)
        assert generator.closed
        assert is_gone(int(samples[0].started_unix))


def test_it_is_stopped_from_elsewhere(make: Make) -> None:
    with make(STOPPABLE) as generator:
        samples: list[Sample] = []

        def stop(sample: Sample) -> None:
            samples.append(sample)
            if len(samples) == 2:
                generator.stop()

        assert generator.load(JOB, stop) == 1
        assert len(samples) == 3


class TestAnswers:
    def test_they_are_asked_for(self, make: Make) -> None:
        item = '{"is": "answer", "request": 4, "got": "a", "alone": "a", "among": "a", "error": ""}'
        with make(f'order = take(); tell(**{item}); tell(**{{"is": "answered"}})\ntake()') as generator:
            check = generator.answers("http://p", model="demo", output_tokens=5, concurrency=2)
            assert (check.compared, check.equal, check.error, check.asked) == (1, 1, "", 1)

    def test_that_it_cannot_be_asked_is_no_difference(self, make: Make) -> None:
        with make('take(); tell(**{"is": "failed", "code": "unreachable", "reason": "refused"})\ntake()') as generator:
            check = generator.answers("http://p", model="demo", output_tokens=5, concurrency=2)
            assert (check.compared, check.error) == (0, "0 of 0 could not be asked again: refused")
            assert not generator.closed

    def test_it_tells_of_how_many_none_could_be_asked(self, make: Make) -> None:
        with make(
            'take(); tell(**{"is": "done", "duration_s": 1, "stopped": False, "kept": 1})\n'
            'take(); tell(**{"is": "failed", "code": "unreachable", "reason": "refused"})\ntake()'
        ) as generator:
            generator.load(JOB, lambda sample: None)
            check = generator.answers("http://p", model="demo", output_tokens=5, concurrency=2)
            # Two were to be kept, but one had an answer.
            assert (check.asked, check.error) == (1, "1 of 1 could not be asked again: refused")

    @pytest.mark.parametrize("field", ['"request": -1', '"got": 5', '"alone": []', '"error": None'])
    def test_one_that_makes_no_sense(self, make: Make, field: str) -> None:
        fields = '"is": "answer", "request": 4, "got": "a", "alone": "a", "among": "a", "error": ""'
        with make(f"take(); tell(**{{{fields}, {field}}})\ntake()") as generator:
            with pytest.raises(NodeError, match="makes no sense"):
                generator.answers("http://p", model="demo", output_tokens=5, concurrency=2)
            assert generator.closed

    @pytest.mark.parametrize(
        ("got", "alone", "among", "verdict"),
        [
            ("a", "a", "a", "equal"),
            ("a", "a", "b", "equal"),
            ("a", "a", None, "equal"),
            ("b", "a", "b", "unstable"),
            ("c", "a", "b", "unstable"),
            ("the fox ran", "the fox sat", "the fox ate", "unstable"),
            ("the fox", "the fox sat", "the fox ate", "different"),
            ("the fix sat", "the fox sat", "the fox ate", "different"),
            ("garbage", "the fox sat", "the fox ate", "different"),
            ("", "the fox sat", "the fox ate", "different"),
            ("the fox sat down", "the fox sat", "the fox sat up", "unstable"),
            ("the fix", "the fox sat", "the fox sat up", "different"),
            ("b", "a", "a", "different"),
            ("b", "a", None, "not compared"),
            ("b", None, "b", "not compared"),
            ("b", None, None, "not compared"),
        ],
    )
    def test_judging(self, got: str, alone: str | None, among: str | None, verdict: str) -> None:
        check = judge([Answer(7, got, alone, among, "" if alone and among else "HTTP 500")])
        counts = {"equal": check.equal, "unstable": check.unstable, "different": len(check.different)}
        assert {name for name, count in counts.items() if count} == {verdict} - {"not compared"}
        assert check.compared == sum(counts.values())
        assert check.asked == 1
        missing = "1 of 1 could not be asked again: HTTP 500"
        assert check.error == (missing if verdict == "not compared" else "")

    def test_what_is_not_compared_is_counted_and_told(self) -> None:
        good = Answer(0, "a", "a", "a")
        lost = [
            Answer(1, "b", "a", None, "HTTP 500"),
            Answer(2, "b", None, "b", "HTTP 500"),
            Answer(3, "b", None, None),
        ]
        check = judge([good, *lost[:1]])
        assert (check.asked, check.compared, check.equal) == (2, 1, 1)
        assert check.error == "1 of 2 could not be asked again: HTTP 500"
        assert judge([good, *lost]).error == "3 of 4 could not be asked again: HTTP 500 (and 1 other reason)"
        assert judge(lost[2:]).error == "1 of 1 could not be asked again: no reason was given"

    def test_nothing_to_judge(self) -> None:
        assert judge([]).error

    @given(st.text(max_size=400), st.text(max_size=300), st.text(max_size=300))
    def test_a_difference_is_shown_where_it_begins(self, same: str, one: str, other: str) -> None:
        got, expected = same + "x" + one, same + "y" + other
        made = difference(3, got, expected)
        assert (made.at, len(made.got) <= 200, len(made.expected) <= 200) == (len(same), True, True)
        assert made.got != made.expected
        assert made.got in got
        assert difference(3, same, same + "y").at == len(same)
