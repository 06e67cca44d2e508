"""On what a probe's bytes travelled."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pdctl.doctor.probe_transport import Evidence, Transport, judge, moved

SIZE = 256_000_000
MUCH = SIZE + 1000


def judged(
    *lanes: str, backend: str = "UCX", prefill: Mapping[str, int] | None = None, decode: Mapping[str, int] | None = None
) -> Transport:
    return judge(Evidence(backend, SIZE, lanes, prefill or {}, decode or {}))


@pytest.mark.parametrize(
    ("lanes", "name"),
    [
        (["inter-node write 0..inf: zero-copy, tcp/eth0"], "tcp"),
        (["self write 0..inf: zero-copy, tcp/lo", "inter-node write 0..inf: zero-copy, rc_mlx5/mlx5_0:1"], "rc_mlx5"),
        (["inter-node write 0..inf: zero-copy, 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"], "rc_mlx5"),
        (
            ["inter-node write 0..100: short, dc_mlx5/mlx5_0:1", "inter-node write 101..inf: zero-copy, tcp/eth0"],
            "dc_mlx5+tcp",
        ),
        (["intra-node write 0..inf: zero-copy, cma/memory"], "shm"),
        (["intra-node write 0..8: short, sysv/memory", "intra-node write 9..inf: copy, posix/memory"], "shm"),
        (["inter-node write 0..inf: software emulation, srd/rdmap0s6:1"], "efa emulated"),
        (["inter-node write 0..inf: zero-copy, srd/rdmap0s6:1"], "efa"),
        (["inter-node write 0..inf: software emulation, ud_mlx5/mlx5_0:1"], "ud_mlx5 emulated"),
        (["inter-node write 0..inf: software emulation, tcp/eth0"], "tcp"),
        (["inter-node write 0..inf: zero-copy, cuda_copy/cuda and tcp/eth0"], "tcp"),
        (["intra-node write 0..inf: zero-copy, cuda_ipc/cuda"], "cuda_ipc"),
    ],
)
def test_ucx_says_it_itself(lanes: list[str], name: str) -> None:
    found = judged(*lanes)
    assert found.name == name
    assert lanes[-1].split(": ")[1] in found.evidence


def test_its_words_are_backed_by_counters() -> None:
    found = judged(
        "inter-node write 0..inf: zero-copy, tcp/eth0",
        prefill={"net:eth0:tx": MUCH, "net:lo:tx": 10},
        decode={"net:eth0:rx": MUCH},
    )
    assert found.name == "tcp"
    assert f"interfaces of the prefill host (most by eth0) rose by {MUCH + 10} for {SIZE} written" in found.evidence
    assert f"bytes received by eth0 of the decode host by {MUCH}" in found.evidence


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("efa", {"rdma:a:rdma_write_bytes": SIZE // 2, "rdma:b:rdma_write_bytes": SIZE // 2}, {}),
        ("efa emulated", {"rdma:a:tx_bytes": MUCH}, {"rdma:a:rdma_read_bytes": MUCH}),
        ("efa emulated", {"rdma:a:send_bytes": MUCH}, {"rdma:a:recv_bytes": MUCH}),
        ("tcp", {"net:eth0:tx": MUCH, "rdma:a:send_bytes": 4000}, {"net:eth0:rx": MUCH}),
        ("tcp", {"net:eth0:tx": SIZE // 2, "net:eth1:tx": SIZE // 2}, {}),
        ("rdma", {"rdma:mlx5_0:port_xmit_data": SIZE // 4}, {}),
        ("", {"net:eth0:tx": SIZE // 3}, {"rdma:a:rdma_read_bytes": 12}),
        ("", {}, {}),
    ],
)
def test_libfabric_is_known_by_counters(name: str, prefill: Mapping[str, int], decode: Mapping[str, int]) -> None:
    found = judged(backend="LIBFABRIC", prefill=prefill, decode=decode)
    assert found.name == name
    assert bool(found.evidence) == bool(name)


def test_without_a_word_of_ucx_counters_tell_it() -> None:
    assert judged("self write 0..inf: zero-copy, tcp/lo", prefill={"net:eth0:tx": MUCH}).name == "tcp"


def test_by_how_much_counters_rose() -> None:
    assert moved({"a": 1, "b": 2, "d": 9}, {"a": 4, "b": 2, "c": 3, "d": 1}) == {"a": 3, "c": 3}
