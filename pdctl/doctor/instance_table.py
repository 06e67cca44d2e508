"""What EC2 instance types can do on EFA. No AWS API says which types have RDMA read and write, so this is a table.

As of 2026-10. RDMA columns and Nitro version: the table of the EC2 User Guide,
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html (supported types). Accelerators, EFA interfaces and
bandwidth: ``DescribeInstanceTypes``. Where a figure has another source, the row's note says so.

A type that is not here is unknown, which is no verdict: the node itself decides then. Names match exactly: ``p5`` is
not ``p5en``, and the newer card alone does not give RDMA write (hpc7g, c7gn).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TABLE_DATE = "2026-10"
SOURCE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html"

_MIB = 2**20
_GIB = 2**30


@dataclass(frozen=True)
class InstanceType:
    """One EC2 instance type. None means that no source says it.

    Attributes:
        name: exact, such as ``p5en.48xlarge``.
        accelerators: GPUs or Neuron devices.
        accelerator_name: such as ``H200``; empty if it has none.
        accelerator_memory_bytes: of each accelerator.
        efa_interfaces: how many EFA interfaces can be attached; 0 for a type without EFA.
        gbps: bandwidth of all its network cards together (their sum by the API is wrong for some types).
        rdma_read: whether its EFA devices do RDMA READ.
        rdma_write: whether they do RDMA WRITE, which push mode needs.
        gpu_direct: whether EFA reads and writes the accelerators' memory directly.
        nitro: version of the Nitro card.
        note: what a reader should know; may be empty.
        network_cards: how many.
        cards_without_efa: indexes of network cards that take ordinary interfaces only.
        own_kind_only: whether its EFA talks to instances of the same type alone (EC2 User Guide, limitations).
    """

    name: str
    accelerators: int
    accelerator_name: str
    accelerator_memory_bytes: int | None
    efa_interfaces: int
    gbps: int
    rdma_read: bool | None
    rdma_write: bool | None
    gpu_direct: bool | None
    nitro: int | None
    note: str
    network_cards: int | None = None
    cards_without_efa: tuple[int, ...] = ()
    own_kind_only: bool = False


def lookup(name: str, overrides: Mapping[str, InstanceType] | None = None) -> InstanceType | None:
    """What is known of an instance type.

    Args:
        name: as the EC2 API and the instance metadata name it.
        overrides: types that are to be taken instead of the table's, by name.

    Returns:
        None for a type that the table does not have.
    """
    if overrides is not None and name in overrides:
        return overrides[name]
    return INSTANCE_TYPES.get(name)


_EMULATED = "RDMA READ but no RDMA WRITE: libfabric emulates writes with reads by the other side, slower"
_NO_RDMA = "neither RDMA READ nor RDMA WRITE: writes travel as messages, accelerator memory is copied through the host"
_NO_EFA = "no EFA at all"
_NO_GPU_DIRECT = "no direct path between EFA and GPU memory is to be expected"


def _p6() -> list[InstanceType]:
    return [
        InstanceType(
            "p6-b300.48xlarge", 8, "B300", 275040 * _MIB, 16, 6400, True, True, True, 6,
            "network card 0 takes no EFA: the 16 EFA interfaces are on the cards 1 to 16", 17, (0,),
        ),
        InstanceType("p6-b200.48xlarge", 8, "B200", 183359 * _MIB, 8, 3200, True, True, True, 6, "", 8),
        InstanceType(
            "p6e-gb200.36xlarge", 4, "GB200", None, 8, 1600, True, True, True, 5,
            "arm64, about 185 GB per GPU; number of interfaces from a copy of AWS's table, the API data lacks it", 17,
        ),
    ]  # fmt: skip


def _p5_p4() -> list[InstanceType]:
    return [
        InstanceType("p5en.48xlarge", 8, "H200", 144384 * _MIB, 16, 3200, True, True, True, 5, "", 16),
        InstanceType("p5e.48xlarge", 8, "H200", 144384 * _MIB, 32, 3200, True, True, True, 4, "", 32),
        InstanceType("p5.48xlarge", 8, "H100", 81920 * _MIB, 32, 3200, True, True, True, 4, "", 32),
        InstanceType(
            "p5.4xlarge", 1, "H100", 81920 * _MIB, 1, 100, True, True, None, 4,
            "a direct path between EFA and GPU memory is not promised", 1,
        ),
        InstanceType(
            "p4de.24xlarge", 8, "A100", 81920 * _MIB, 4, 400, True, False, True, 3, _EMULATED, 4, own_kind_only=True
        ),
        InstanceType(
            "p4d.24xlarge", 8, "A100", 40960 * _MIB, 4, 400, True, False, True, 3, _EMULATED, 4, own_kind_only=True
        ),
        InstanceType("p3dn.24xlarge", 8, "V100", 32768 * _MIB, 1, 100, False, False, None, 3, _NO_RDMA, 1),
    ]  # fmt: skip


def _neuron() -> list[InstanceType]:
    # The API says 512 GiB for each Trainium2 device, and nothing for trn2u: AWS's own pages say 96 GiB.
    trainium2 = 96 * _GIB
    return [
        InstanceType("trn2.48xlarge", 16, "Trainium2", trainium2, 16, 3200, True, True, True, 5, "", 16),
        InstanceType("trn2u.48xlarge", 16, "Trainium2", trainium2, 16, 3200, True, True, True, 5, "", 16),
        InstanceType(
            "trn2.3xlarge", 1, "Trainium2", trainium2, 1, 200, True, True, False, 5,
            "NIXL cannot register device memory here (https://github.com/ai-dynamo/nixl/pull/1994)", 1,
        ),
        InstanceType("trn1n.32xlarge", 16, "Trainium", 32768 * _MIB, 16, 1600, True, True, True, 4, "", 16),
        InstanceType("trn1.32xlarge", 16, "Trainium", 32768 * _MIB, 8, 800, True, True, True, 4, "", 8),
        InstanceType("trn1.2xlarge", 1, "Trainium", 32768 * _MIB, 0, 12, False, False, False, None, _NO_EFA, 1),
        InstanceType("inf2.48xlarge", 12, "Inferentia2", 32768 * _MIB, 0, 100, False, False, False, None, _NO_EFA, 1),
        InstanceType("inf2.24xlarge", 6, "Inferentia2", 32768 * _MIB, 0, 50, False, False, False, None, _NO_EFA, 1),
        InstanceType("inf2.8xlarge", 1, "Inferentia2", 32768 * _MIB, 0, 25, False, False, False, None, _NO_EFA, 1),
        InstanceType("inf2.xlarge", 1, "Inferentia2", 32768 * _MIB, 0, 15, False, False, False, None, _NO_EFA, 1),
        InstanceType("inf1.24xlarge", 16, "Inferentia", 8192 * _MIB, 1, 100, False, False, None, 3, _NO_RDMA, 1),
    ]  # fmt: skip


def _graphics() -> list[InstanceType]:
    """Sizes of the G families: name, accelerators, EFA interfaces (as many as network cards), Gbit/s."""
    rows: list[InstanceType] = []
    for size, gpus, cards, gbps in (("8", 1, 1, 100), ("12", 2, 1, 400), ("24", 4, 2, 800), ("48", 8, 4, 1600)):
        direct = size != "8"
        note = "" if direct else _NO_GPU_DIRECT
        name = f"g7e.{size}xlarge"
        rows.append(
            InstanceType(name, gpus, "RTX PRO 6000", 98304 * _MIB, cards, gbps, True, True, direct, 6, note, cards)
        )
    for size, gpus, cards, gbps in (("8", 1, 1, 100), ("12", 2, 1, 175), ("24", 4, 1, 350), ("48", 8, 2, 700)):
        name = f"g7.{size}xlarge"
        rows.append(InstanceType(name, gpus, "RTX PRO 4500", 32768 * _MIB, cards, gbps, True, True, None, 6, "", cards))
    for size, gpus, cards, gbps in (
        ("8", 1, 1, 25), ("12", 4, 1, 100), ("16", 1, 1, 35), ("24", 4, 2, 200), ("48", 8, 4, 400)
    ):  # fmt: skip
        name = f"g6e.{size}xlarge"
        rows.append(
            InstanceType(name, gpus, "L40S", 45776 * _MIB, cards, gbps, True, True, False, 4, _NO_GPU_DIRECT, cards)
        )
    for name, gpus, gbps in (
        ("g6.8xlarge", 1, 25), ("g6.12xlarge", 4, 40), ("g6.16xlarge", 1, 25), ("g6.24xlarge", 4, 50),
        ("g6.48xlarge", 8, 100), ("gr6.8xlarge", 1, 25),
    ):  # fmt: skip
        rows.append(InstanceType(name, gpus, "L4", 22888 * _MIB, 1, gbps, True, True, False, 4, _NO_GPU_DIRECT, 1))
    for name, gpus, gbps in (
        ("g5.8xlarge", 1, 25), ("g5.12xlarge", 4, 40), ("g5.16xlarge", 1, 25), ("g5.24xlarge", 4, 50),
        ("g5.48xlarge", 8, 100),
    ):  # fmt: skip
        rows.append(InstanceType(name, gpus, "A10G", 22888 * _MIB, 1, gbps, False, False, False, 3, _NO_RDMA, 1))
    for name, gpus, gbps in (
        ("g4dn.8xlarge", 1, 50), ("g4dn.12xlarge", 4, 50), ("g4dn.16xlarge", 1, 50), ("g4dn.metal", 8, 100),
    ):  # fmt: skip
        note = f"{_NO_RDMA}; GPU memory registers on some sizes and then fails (libfabric PR 8452)"
        rows.append(InstanceType(name, gpus, "T4", 16384 * _MIB, 1, gbps, False, False, None, 3, note, 1))
    small = (("g6e", "L40S", 45776, (("xlarge", 20), ("2xlarge", 20), ("4xlarge", 20))),
             ("g6", "L4", 22888, (("xlarge", 10), ("2xlarge", 10), ("4xlarge", 25))),
             ("g5", "A10G", 22888, (("xlarge", 10), ("2xlarge", 10), ("4xlarge", 25))))  # fmt: skip
    for family, gpu, mib, sizes in small:
        for size, gbps in sizes:
            name = f"{family}.{size}"
            rows.append(InstanceType(name, 1, gpu, mib * _MIB, 0, gbps, False, False, False, None, _NO_EFA, 1))
    return rows


def _others() -> list[InstanceType]:
    rows = [
        InstanceType(
            "dl1.24xlarge", 8, "Gaudi", None, 4, 400, None, False, None, 3,
            "named in the EC2 User Guide's limitations, no longer in its table", 4, own_kind_only=True,
        ),
        InstanceType("dl2q.24xlarge", 8, "AI100", 16000 * _MIB, 1, 100, False, False, None, 3, _NO_RDMA, 1),
        InstanceType("vt1.24xlarge", 0, "", None, 1, 25, False, False, None, 3, _NO_RDMA, 1),
        InstanceType("c7gn.16xlarge", 0, "", None, 1, 200, True, False, None, 5, _EMULATED, 1),
        InstanceType("hpc6id.32xlarge", 0, "", None, 2, 200, True, True, None, 4, "", 2),
        InstanceType("hpc6a.48xlarge", 0, "", None, 1, 100, True, True, None, 4, "", 1),
    ]  # fmt: skip
    for size in ("4xlarge", "8xlarge", "16xlarge"):
        rows.append(InstanceType(f"hpc7g.{size}", 0, "", None, 1, 200, True, False, None, 5, _EMULATED, 1))
    for size in ("12xlarge", "24xlarge", "48xlarge", "96xlarge"):
        rows.append(InstanceType(f"hpc7a.{size}", 0, "", None, 2, 300, True, True, None, 4, "", 2))
    return rows


INSTANCE_TYPES: Mapping[str, InstanceType] = {
    row.name: row for row in (*_p6(), *_p5_p4(), *_neuron(), *_graphics(), *_others())
}
"""By exact name."""
