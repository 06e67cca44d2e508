"""Whether two results may be set against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdctl.bench.comparable import check_comparable, differences
from pdctl.bench.results import Environment, InstanceFacts, Results
from pdctl.errors import UsageError
from tests.support.bench_results import CELLS, make_results

BASE = make_results(modes=("push",), cells=CELLS[:1], requests=2, rounds=1)


def with_environment(**changes: object) -> Results:
    return replace(BASE, environment=replace(BASE.environment, **changes))


def with_instance(change: Callable[[InstanceFacts], InstanceFacts]) -> Results:
    first, *others = BASE.environment.instances
    return with_environment(instances=(change(first), *others))


def test_equal_ones_are_comparable() -> None:
    assert differences(BASE, make_results(modes=("push",), cells=CELLS[:1], requests=2, rounds=1)) == []


def test_modes_and_seed_may_differ() -> None:
    other = make_results(modes=("pull",), cells=CELLS[:1], requests=2, rounds=1, seed=9, answers=0)
    assert differences(BASE, other) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model", "model: Qwen/Qwen3-0.6B, other new"),
        ("accelerator", "accelerator: cpu, other new"),
        ("fabric", "fabric: tcp, other new"),
        ("pdctl", "pdctl: 0.6.0, other new"),
        ("generator", "load generator: pdctl load 1, other new"),
        ("generator_host", "host of the load generator: node-a, other new"),
    ],
)
def test_each_fact_is_named_with_both_values(name: str, words: str) -> None:
    assert differences(BASE, with_environment(**{name: "new"})) == [words]


def test_every_field_of_the_environment_is_looked_at() -> None:
    assert set(Environment.__dataclass_fields__) == {
        *("model", "accelerator", "fabric", "instances", "pdctl", "generator", "generator_host", "transfer")
    }
    assert set(InstanceFacts.__dataclass_fields__) == {"name", "role", "host", "flags", "versions", "env"}


@pytest.mark.parametrize(
    ("mine", "its", "words"),
    [
        ({"A": "1"}, {"A": "2"}, "A{}: 1, other 2"),
        ({"A": "1", "B": "x"}, {"B": "x"}, "A{}: 1, other not set"),
        ({}, {"A": ""}, "A{}: not set, other empty"),
    ],
)
def test_environment_variables_and_transfer_settings_are_compared(
    mine: dict[str, str], its: dict[str, str], words: str
) -> None:
    def of(values: dict[str, str]) -> Results:
        return with_instance(lambda one: replace(one, env=values))

    assert differences(of(mine), of(its)) == [f"environment variable {words.format(' of prefill-0')}"]
    assert differences(of(mine), of(mine)) == []
    one, other = with_environment(transfer=mine), with_environment(transfer=its)
    assert differences(one, other) == [f"transfer setting {words.format('')}"]


HOSTILE = "\x1b[2J\r\u202e\nfake: passed" + "y" * 5000


def test_a_hostile_file_reaches_no_terminal() -> None:
    hostile = InstanceFacts(HOSTILE, HOSTILE, HOSTILE, (HOSTILE,), {HOSTILE: HOSTILE}, {HOSTILE: HOSTILE})
    other = with_environment(
        **dict.fromkeys(("model", "accelerator", "fabric", "pdctl", "generator", "generator_host"), HOSTILE),
        instances=(hostile,),
        transfer={HOSTILE: HOSTILE},
    )
    changed = with_instance(lambda one: replace(one, host=HOSTILE, role=HOSTILE, flags=(HOSTILE,), env={"A": HOSTILE}))
    for results in (other, changed):
        for texts in (differences(BASE, results), check_comparable([("a", BASE), (HOSTILE, results)], allow=True)):
            assert texts
            assert all(text.isprintable() for text in texts)
            assert any("fake: passed" in text for text in texts)
        assert max(map(len, differences(BASE, results))) < 1000
        with pytest.raises(UsageError) as caught:
            check_comparable([(HOSTILE, BASE), ("b.json", results)])
        assert all(line.isprintable() for line in caught.value.message.splitlines())


def test_an_error_names_so_many_differences_that_it_can_be_read() -> None:
    other = with_environment(transfer={f"s{number}": "x" for number in range(2000)})
    with pytest.raises(UsageError) as caught:
        check_comparable([("a.json", BASE), ("b.json", other)])
    lines = caught.value.message.splitlines()
    assert len(lines) == 52
    # Two settings of the first are gone, too.
    assert lines[-1] == "  b.json: and 1952 more"


def test_a_missing_value_is_said() -> None:
    assert differences(BASE, with_environment(generator="")) == ["load generator: pdctl load 1, other nothing"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: replace(one, host="node-z"), "host of prefill-0: node-a, other node-z"),
        (
            lambda one: replace(one, flags=("--max-model-len", "4096", "--gpu-memory-utilization", "0.85")),
            "flags of prefill-0: --max-model-len 8192, other --max-model-len 4096",
        ),
        (
            lambda one: replace(one, flags=(*one.flags, "--enforce-eager")),
            "flags of prefill-0: nothing, other --enforce-eager",
        ),
        (
            lambda one: replace(one, flags=(*one.flags[2:], *one.flags[:2])),
            "flags of prefill-0: the same ones, in another order or number",
        ),
        (
            lambda one: replace(one, versions={**one.versions, "vllm": "0.33.0"}),
            "vllm of prefill: 0.32.0, other 0.33.0",
        ),
        (lambda one: replace(one, versions={}), "nixl of prefill: 1.5.1, other nothing"),
    ],
)
def test_instances_are_compared(change: Callable[[InstanceFacts], InstanceFacts], words: str) -> None:
    assert words in differences(BASE, with_instance(change))


def test_an_instance_that_one_lacks() -> None:
    fewer = with_environment(instances=BASE.environment.instances[1:])
    assert "prefill-0 is only in the first file" in differences(BASE, fewer)
    assert "prefill-0 is only in the other file" in differences(fewer, BASE)


def test_settings_of_the_load_are_compared() -> None:
    other = make_results(modes=("push",), cells=CELLS[:2], requests=3, rounds=2)
    found = differences(BASE, replace(other, settings=replace(other.settings, warmup=9)))
    assert found == [
        "requests of a cell: 2, other 6",
        "rounds: 1, other 2",
        "warm-up requests: 4, other 9",
        "cells: nothing, other 512+16 x4 (what only one has)",
    ]


def test_check_names_all_and_the_way_out() -> None:
    files = [("a.json", BASE), ("b.json", with_environment(model="m")), ("c.json", with_environment(fabric="efa"))]
    with pytest.raises(UsageError) as caught:
        check_comparable(files)
    assert "b.json: model: Qwen/Qwen3-0.6B, other m" in caught.value.message
    assert "c.json: fabric: tcp, other efa" in caught.value.message
    assert "--allow-different" in caught.value.hint
    assert len(check_comparable(files, allow=True)) == 2
    assert check_comparable(files[:1]) == []
    assert check_comparable([]) == []
