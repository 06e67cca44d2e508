"""Checks of what real WRITEs showed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.doctor.checks.transfer import CHECKS
from pdctl.doctor.facts import CloudFacts, RdmaDevice, RdmaFacts, RdmaPort
from pdctl.doctor.probe_facts import ProbeFacts, ProbeResult
from tests.unit.doctor.builders import (
    ERROR,
    all_pass,
    cluster,
    context,
    everywhere,
    failure,
    findings,
    network,
    probe,
    spoiled,
    verdicts,
)

PAIR = ("p1", "d1")
EFA = cluster(fabric="efa")
IB = cluster(fabric="infiniband")
P5EN = CloudFacts(vendor="Amazon EC2", instance_type="p5en.48xlarge")


def on_efa(given_context: Any = None, **fields: Any) -> Any:
    values = {"backend": "LIBFABRIC", "transport": "efa", "bandwidth_mb_s": 21000.0, **fields}
    return probe(everywhere(given_context or context(EFA), cloud=P5EN), **values)


def test_healthy_clusters_pass() -> None:
    assert all_pass(CHECKS, probe(context())) == {}
    assert all_pass(CHECKS, on_efa()) == {}
    assert all_pass(CHECKS, probe(context(IB), transport="rc_mlx5", bandwidth_mb_s=20000.0)) == {}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_nothing_is_judged_without_a_probe(check: Any) -> None:
    found = findings(CHECKS, check.id, context(EFA, probe_skipped="--no-probe was given"))
    assert [(one.verdict.value, one.message) for one in found] == [("skipped", "not checked: --no-probe was given")]
    silent = findings(CHECKS, check.id, context(EFA))
    assert [one.verdict.value for one in silent] == ["skipped"]


# --- XFER001


def test_figures_are_told() -> None:
    (found,) = findings(CHECKS, "XFER001", probe(context()))
    assert found.message == (
        "a WRITE over tcp arrives: 1.18 GB/s, 210 us per block of 256 KiB (p99 330 us), notification 95 us there and "
        "back"
    )
    (bare,) = findings(CHECKS, "XFER001", context(probe=ProbeFacts((ProbeResult("p1", "d1", True, "done"),))))
    assert bare.message == "a WRITE over an unknown transport arrives: no figures"


@pytest.mark.parametrize(
    "stage", ["start", "import", "backend", "register", "handshake", "write", "verify", "notify", "timeout", "new", ""]
)
def test_each_step_that_fails_has_its_own_advice(stage: str) -> None:
    log = "line one\n\nline two\nline three\nline four\n"
    broken = probe(context(), ok=False, stage=stage, error="NIXL_ERR_BACKEND", log=log)
    found = failure(CHECKS, "XFER001", broken)
    assert (found.hosts, found.severity) == (PAIR, ERROR)
    assert found.evidence == "NIXL_ERR_BACKEND; line two | line three | line four"
    # What failed is not judged further.
    assert (
        set(verdicts(CHECKS, "XFER002", broken).values()) | set(verdicts(CHECKS, "XFER003", broken).values()) == set()
    )


def test_the_advice_differs_by_step() -> None:
    stages = ("import", "backend", "register", "handshake", "write", "verify", "notify", "timeout")
    fixes = {failure(CHECKS, "XFER001", probe(context(), ok=False, stage=stage)).fix for stage in stages}
    assert len(fixes) == len(stages)


def test_pairs_left_out_are_said() -> None:
    data = cluster(prefill={"hosts": ["a1", "a2"]}, decode={"hosts": ["b1"]}, router={"host": "a1"})
    given_context = probe(context(data))
    assert given_context.probe is not None
    first, second = given_context.probe.results
    chosen = dataclasses.replace(given_context, probe=ProbeFacts((first,), (("a2", "b1"),)))
    assert verdicts(CHECKS, "XFER001", chosen) == {("a1", "b1"): "pass", ("a2", "b1"): "skipped"}
    lost = dataclasses.replace(given_context, probe=ProbeFacts((second,)))
    assert verdicts(CHECKS, "XFER001", lost) == {("a2", "b1"): "pass", ("a1", "b1"): "skipped"}


# --- XFER002


@pytest.mark.parametrize(
    ("fabric", "transport", "verdict"),
    [
        ("efa", "efa", "pass"),
        ("efa", "tcp", "error"),
        ("efa", "tcp/ens5", "error"),
        ("efa", "efa emulated", "warning"),
        ("efa", "rc_mlx5", "error"),
        ("efa", "", "skipped"),
        ("infiniband", "rc_mlx5", "pass"),
        ("infiniband", "dc_mlx5/mlx5_0:1", "pass"),
        ("infiniband", "tcp", "error"),
        ("roce", "tcp", "error"),
        ("roce", "rc_verbs", "pass"),
        ("roce", "shm", "warning"),
        ("tcp", "tcp", None),
        ("roce", " ", "skipped"),
        ("roce", "rc_mlx5 emulated", "warning"),
        ("roce", "rc_mlx5+tcp", "warning"),
        ("infiniband", "rdma", "pass"),
    ],
)
def test_what_it_travelled_on(fabric: str, transport: str, verdict: str | None) -> None:
    given_context = probe(context(cluster(fabric=fabric)), transport=transport, backend="UCX")
    assert verdicts(CHECKS, "XFER002", given_context).get(PAIR) == verdict


def test_ucx_on_efa_is_told_what_to_use() -> None:
    found = failure(CHECKS, "XFER002", probe(context(EFA), backend="UCX", transport="tcp"))
    assert "LIBFABRIC" in found.fix
    found = failure(CHECKS, "XFER002", probe(context(EFA), backend="LIBFABRIC", transport="tcp"))
    assert "FI_PROVIDER" in found.fix


# --- XFER003


def rdma(rate_gbps: float, state: str = "ACTIVE") -> RdmaFacts:
    port = RdmaPort(number=1, state=state, rate_gbps=rate_gbps)
    return RdmaFacts(devices=(RdmaDevice(name="mlx5_0", driver="mlx5_core", ports=(port,)),))


@pytest.mark.parametrize(
    ("rate", "bandwidth", "verdict"),
    [
        # 200 Gb/s are 25 GB/s: a quarter is 6.25.
        (200.0, 21000.0, "pass"),
        (200.0, 6300.0, "pass"),
        (200.0, 6200.0, "warning"),
    ],
)
def test_bandwidth_against_the_network_card(rate: float, bandwidth: float, verdict: str) -> None:
    assert verdicts(CHECKS, "XFER003", on_efa(bandwidth_mb_s=bandwidth)) == {PAIR: verdict}
    given_context = everywhere(context(IB), rdma=rdma(rate))
    assert verdicts(CHECKS, "XFER003", probe(given_context, bandwidth_mb_s=bandwidth)) == {PAIR: verdict}


def test_the_slower_host_decides_what_to_expect() -> None:
    given_context = spoiled(everywhere(context(IB), rdma=rdma(400.0)), "d1", rdma=rdma(25.0))
    assert verdicts(CHECKS, "XFER003", probe(given_context, bandwidth_mb_s=2000.0)) == {PAIR: "pass"}
    down = everywhere(context(IB), rdma=rdma(400.0, "DOWN"))
    (found,) = findings(CHECKS, "XFER003", probe(down, bandwidth_mb_s=10.0))
    assert (found.verdict.value, "not known" in found.message) == ("pass", True)


@pytest.mark.parametrize(
    ("speed", "bandwidth", "verdict"),
    [
        (1000, 90.0, "pass"),
        (1000, 20.0, "info"),
        (100000, 900.0, "pass"),
        (100000, 260.0, "pass"),
        (100000, 200.0, "info"),
        (None, 1.0, "pass"),
    ],
)
def test_bandwidth_over_tcp(speed: int | None, bandwidth: float, verdict: str) -> None:
    given_context = context()
    for name, own, other in (("p1", "10.0.0.1", "10.0.0.2"), ("d1", "10.0.0.2", "10.0.0.1")):
        given_context = spoiled(given_context, name, network=network(own, (other,), speed_mbps=speed))
    assert verdicts(CHECKS, "XFER003", probe(given_context, bandwidth_mb_s=bandwidth)) == {PAIR: verdict}


# --- XFER004


def test_another_backend_than_the_instances_will_use() -> None:
    found = failure(CHECKS, "XFER004", on_efa(backend="UCX"))
    assert found.severity == ERROR
    assert "LIBFABRIC" in found.message
    data = cluster(fabric="efa", transfer={"extra": {"backends": ["UCX"]}})
    assert verdicts(CHECKS, "XFER004", on_efa(context(data), backend="UCX")) == {PAIR: "pass"}


def test_pairs_that_differ() -> None:
    data = cluster(prefill={"hosts": ["a1", "a2"]}, decode={"hosts": ["b1"]}, router={"host": "a1"}, fabric="roce")
    given_context = probe(context(data), transport="rc_mlx5")
    assert given_context.probe is not None
    first, second = given_context.probe.results
    mixed = dataclasses.replace(
        given_context, probe=ProbeFacts((first, dataclasses.replace(second, transport="ud_verbs")))
    )
    assert set(verdicts(CHECKS, "XFER004", given_context).values()) == {"pass"}
    assert verdicts(CHECKS, "XFER004", mixed) == {("a1", "b1", "a2"): "warning"}


# --- wild results

numbers = st.one_of(st.none(), st.floats(allow_nan=True), st.integers())


@given(
    ok=st.booleans(),
    stage=st.text(max_size=8),
    backend=st.text(max_size=8),
    transport=st.text(max_size=8),
    block=st.one_of(st.none(), st.integers()),
    figures=st.tuples(numbers, numbers, numbers),
    log=st.text(max_size=20),
    fabric=st.sampled_from(["efa", "tcp", "roce"]),
)
def test_no_result_makes_a_check_fail_itself(
    ok: bool, stage: str, backend: str, transport: str, block: int | None, figures: Any, log: str, fabric: str
) -> None:
    given_context = probe(
        everywhere(context(cluster(fabric=fabric)), cloud=P5EN, rdma=rdma(100.0)),
        ok=ok,
        stage=stage,
        backend=backend,
        transport=transport,
        block_bytes=block,
        block_p50_us=figures[0],
        bandwidth_mb_s=figures[1],
        notification_us=figures[2],
        log=log,
    )
    for check in CHECKS:
        findings(CHECKS, check.id, given_context)
