"""What a real cluster of one prefill and one decode showed in push mode; see tests/unit/data/bench/README.md."""

from pathlib import Path

import pytest

from pdctl.bench.cell_watch import recomputed_tokens
from pdctl.bench.counters import Counters, Scrape, gain, read_scrape, role_counters, routed
from pdctl.bench.results import Sample
from pdctl.bench.stages import stage_times
from pdctl.bench.transfer_records import TransferRecord, join, read_records

DATA = Path(__file__).parents[1] / "data" / "bench"


def counted(name: str) -> Scrape | None:
    """Everything since the start of that instance."""
    return gain([(name, {}, read_scrape((DATA / f"push-{name}.prom").read_bytes()))]).increments


def ledger(name: str) -> list[TransferRecord]:
    records = read_records((DATA / f"push-{name}.json").read_bytes(), name)
    assert records is not None
    return records


@pytest.fixture
def counters() -> Counters:
    return Counters(
        role_counters(counted("prefill")), role_counters(counted("decode")), routed=routed(counted("router"))
    )


def test_vllms_metrics_have_the_names_that_are_read(counters: Counters) -> None:
    prefill, decode = counters.prefill, counters.decode
    for total in (
        prefill.queue,
        prefill.prefill,
        prefill.first_token,
        decode.queue,
        decode.prefill,
        decode.first_token,
    ):
        assert total is not None
        assert total.count == (59 if total in (prefill.queue, prefill.prefill, prefill.first_token) else 57)
    assert prefill.transfer is not None
    assert prefill.transfer.mean == pytest.approx(0.0084, abs=1e-4)
    assert prefill.bytes is not None
    assert (prefill.bytes.count, prefill.bytes.sum) == (54, 193_462_272)
    assert (prefill.failed, prefill.expired, counters.routed) == (0, 0, 55)


def test_decode_computes_nothing_of_a_prompt_that_came_whole(counters: Counters) -> None:
    assert counters.decode.prompt_tokens == {
        # Of what was sent to decode alone; the 54 requests with a transfer have none.
        "local_compute": 113,
        "local_cache_hit": 0,
        "external_kv_transfer": 46_475,
    }
    assert recomputed_tokens(counters) == 113


def test_the_ledgers_of_both_sides_tell_the_stages(counters: Counters) -> None:
    prefill, decode = ledger("prefill"), ledger("decode")
    transfers = join(prefill, decode)
    assert len(transfers) == 3
    samples = [
        Sample(
            started_unix=one.prefill.started_unix - 0.01,
            ttft_s=one.decode.ended_unix + 0.06 - (one.prefill.started_unix - 0.01),
            latency_s=9.0,
        )
        for one in transfers
    ]
    found = stage_times("push", samples, prefill, decode, counters)
    assert found.seconds == pytest.approx(
        {
            "route": 0.01,
            "prefill queue": 0.8999,
            "prefill": 0.7950,
            "match": 0.00002,
            "post": 0.0062,
            "transfer": 0.0030,
            "notify": 0.0012,
            "first decode step": 0.0251,
            "rest": 0.0349,
        },
        abs=1e-4,
    )
    assert found.beside == pytest.approx({"registration": 0.00003, "decode wait": 1.0293}, abs=1e-4)
    assert [note for note in found.notes if "finished" not in note] == []
