"""`pdctl bench` on a real cluster: both modes are launched in turns, loaded, and compared; answers are equal.

One comparison for the whole file; it launches the cluster twice.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pdctl.bench.results import Cell, Results, read_results
from tests.e2e.cluster import Cluster, Run, marked_processes

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]

REQUESTS = 6
CELLS = (Cell(384, 8, concurrency=1), Cell(384, 8, concurrency=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench") / "out"


@pytest.fixture(scope="module")
def compared(ssh_cluster: Cluster, folder: Path) -> Run:
    try:
        return ssh_cluster.pdctl(
            "bench", "compare", "--modes", "pull,push", "--rounds", "1", "--requests", str(REQUESTS), "--warmup", "2",
            "--prompt-tokens", "384", "--output-tokens", "8", "--concurrency", "1,3", "--answers", "3", "--yes",
            "--out", str(folder), "--json", timeout=500,
        )  # fmt: skip
    finally:
        ssh_cluster.pdctl("down", "--force", timeout=120)


@pytest.fixture(scope="module")
def results(compared: Run, folder: Path) -> Results:
    assert compared.code == 0, compared.err
    return read_results(folder / "results.json")


def test_every_request_of_both_modes_was_answered(results: Results) -> None:
    assert results.complete
    assert results.invalid_because == ""
    assert [(run.mode, run.cell) for run in results.runs] == [(m, c) for m in ("pull", "push") for c in CELLS]
    for run in results.runs:
        assert len(run.good) == len(run.samples) == REQUESTS, [sample.error for sample in run.samples]
        assert run.trouble == ()
        for sample in run.samples:
            assert (sample.prompt_tokens, sample.output_tokens) == (384, 8)
            assert len(sample.itl_s) == 7
            assert 0 < (sample.ttft_s or 0) < sample.latency_s


def test_answers_are_those_of_prefill_alone(results: Results) -> None:
    for run in results.runs:
        assert run.answers is not None
        assert (run.answers.compared, run.answers.error, run.answers.different) == (3, "", ())


def test_the_kv_cache_travelled_and_nothing_was_computed_again(results: Results) -> None:
    for run in results.runs:
        assert run.transfers.completed == REQUESTS, run.transfers
        assert run.transfers.failed == 0
        assert run.transfers.bytes
        assert run.transfers.recomputed_tokens == 0


def test_stages_add_up_to_the_time_to_first_token(results: Results) -> None:
    for run in results.runs:
        assert run.stages is not None
        mean = sum(sample.ttft_s or 0 for sample in run.good) / REQUESTS
        assert sum(run.stages.seconds.values()) == pytest.approx(mean)
        assert run.stages.seconds["prefill"] > 0
        # What only ledgers can tell apart.
        assert ("match" in run.stages.seconds) == (run.mode == "push"), run.stages


def test_what_ran_is_on_record(results: Results, ssh_cluster: Cluster) -> None:
    environment = results.environment
    assert [one.name for one in environment.instances] == ["prefill-0", "decode-0", "router"]
    prefill = environment.instances[0]
    assert prefill.versions["nixl"]
    assert any(name.startswith("vllm") for name in prefill.versions)
    assert "--kv-transfer-config" not in prefill.flags
    assert "--enforce-eager" in prefill.flags
    assert environment.generator.startswith("vllm bench serve ")


def test_the_report_is_one_page_that_stands_alone(results: Results, folder: Path) -> None:
    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.outside: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.outside += [
                f"{tag} {value}"
                for name, value in attrs
                if name in ("src", "href") and not (value or "").startswith("#")
            ]

    page = (folder / "report.html").read_text()
    reader = Reader()
    reader.feed(page)
    assert reader.outside == []
    assert page.count("<svg") >= 3
    assert "INVALID" not in page
    assert {one.name for one in folder.iterdir()} == {"results.json", "report.html"}


def test_the_output_is_json_with_a_ratio_for_each_cell(compared: Run, results: Results) -> None:
    told: dict[str, Any] = json.loads(compared.out)
    assert told["valid"]
    assert told["complete"]
    assert told["modes"] == ["pull", "push"]
    for cell in told["cells"]:
        ttft = next(one for one in cell["comparisons"] if (one["figure"], one["statistic"]) == ("ttft", "p50"))
        assert (ttft["mode"], ttft["against"]) == ("push", "pull")
        assert ttft["ratio"]["low"] <= ttft["ratio"]["high"]


def test_a_gate_against_itself_passes_and_shown_again_is_the_same(
    folder: Path, ssh_cluster: Cluster, results: Results
) -> None:
    gate = ssh_cluster.pdctl("bench", "gate", str(folder), "--baseline", str(folder))
    assert gate.code == 0, gate.out
    shown = ssh_cluster.pdctl("bench", "show", str(folder), "--json")
    assert shown.code == 0
    assert {key: value for key, value in json.loads(shown.out).items() if key in ("modes", "valid")} == {
        "modes": ["pull", "push"],
        "valid": True,
    }


def test_the_cluster_is_down_as_it_was_before(compared: Run) -> None:
    assert marked_processes("e2e-ssh") == []
