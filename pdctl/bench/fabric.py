"""What the fabric between hosts can do: the results of ``pdctl bench fabric`` and their file. Pure.

Times are seconds, sizes bytes, speeds bytes per second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from pdctl.atomic_file import write_atomically
from pdctl.bench.documents import read_document
from pdctl.bench.results import Count, Figure

SCHEMA: Literal[1] = 1
"""Version of the file. One of another version is refused."""
FILE_LIMIT = 64 << 20
"""Most bytes of a file that is read."""

_CONFIG = ConfigDict(extra="ignore", ser_json_inf_nan="constants")
_Positive = Annotated[int, Field(gt=0)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@checked(frozen=True, config=_CONFIG)
class ModelBlock:
    """One KV block of the model on one rank, as it is written: a descriptor for each layer.

    Attributes:
        layers: of the model.
        piece_bytes: of one layer.
        known: False if the model's layout is not known and that of a common model is taken.
    """

    layers: _Positive
    piece_bytes: _Positive
    known: bool


@checked(frozen=True, config=_CONFIG)
class FabricPoint:
    """WRITEs of one size between two hosts, each timed until the writer saw it complete; every byte was verified.

    Attributes:
        prefill: host that writes.
        decode: host that is written to.
        direction: the only one there is so far: prefill writes into decode's memory, as in push mode.
        block_bytes: of each descriptor.
        descriptors: of each WRITE.
        writes: how many were timed.
        p50_s: median.
        p99_s: 99th percentile; of few WRITEs that is the slowest.
        min_s: the fastest.
        transport: what the bytes travelled on, as far as it can be told; empty if it cannot.
    """

    prefill: str
    decode: str
    block_bytes: _Positive
    descriptors: _Positive
    writes: _Positive
    p50_s: _Seconds
    p99_s: _Seconds
    min_s: _Seconds
    transport: str = ""
    direction: Literal["prefill-to-decode"] = "prefill-to-decode"

    @property
    def pair(self) -> str:
        """For people: ``p1 -> d1``."""
        return f"{self.prefill} -> {self.decode}"

    @property
    def bytes(self) -> int:
        """Of each WRITE."""
        return self.block_bytes * self.descriptors

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the median WRITE."""
        return self.bytes / self.p50_s


@checked(frozen=True, config=_CONFIG)
class LeftOut:
    """A point that was not measured, and why."""

    block_bytes: _Positive
    descriptors: _Positive
    because: str


@checked(frozen=True, config=_CONFIG)
class FabricPair:
    """What holds for all points of two hosts.

    Attributes:
        prefill: host that writes.
        decode: host that is written to.
        error: why not all was measured; empty if no step failed.
        stage: the step that failed; ``done`` if none did.
        unreachable: whether it failed because a host could not be reached.
        backend: NIXL's; empty if it never came to that.
        memory: ``cuda`` or ``host``; empty if unknown.
        transport: of the largest point.
        transport_evidence: how the transport is known.
        notification_s: round trip of a NIXL notification, median; None if not measured.
        model_block: one KV block; None if it was not asked for.
        left_out: points that were not measured.
        notes: what a reader must know.
    """

    prefill: str
    decode: str
    error: str = ""
    stage: str = "done"
    unreachable: bool = False
    backend: str = ""
    memory: str = ""
    transport: str = ""
    transport_evidence: str = ""
    notification_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    model_block: ModelBlock | None = None
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For people: ``p1 -> d1``."""
        return f"{self.prefill} -> {self.decode}"


@checked(frozen=True, config=_CONFIG)
class HostVersions:
    """Versions on one host, by package (python, nixl, vllm, torch); what is not known is missing."""

    host: str
    versions: dict[str, str] = Field(default_factory=dict)


@checked(frozen=True, config=_CONFIG)
class FabricResults:
    """Everything that one ``pdctl bench fabric`` has measured.

    Attributes:
        schema: :data:`SCHEMA`.
        kind: always ``fabric``.
        cluster: its name.
        model: as in the cluster file.
        accelerator: cuda, neuron or cpu.
        fabric: efa, infiniband, roce or tcp, as in the cluster file.
        created_unix: when it began.
        ended_unix: when it ended.
        command: the command line.
        pdctl: version of pdctl.
        repeats: most WRITEs that were timed of each point.
        hosts: versions by host.
        pairs: in the order measured.
        points: of all pairs, in the order measured.
        beside_cluster: instances that ran meanwhile and shared the fabric; None if that is not known.
        complete: False if not all pairs and points that were asked for were measured.
        incomplete_because: why; empty if it is complete.
    """

    schema: Literal[1]
    kind: Literal["fabric"]
    cluster: str
    model: str
    accelerator: str
    fabric: str
    created_unix: Figure
    command: str
    pdctl: str
    repeats: _Positive
    ended_unix: Figure = 0.0
    hosts: tuple[HostVersions, ...] = ()
    pairs: tuple[FabricPair, ...] = ()
    points: tuple[FabricPoint, ...] = ()
    beside_cluster: Count | None = None
    complete: bool = False
    incomplete_because: str = ""

    def of(self, pair: FabricPair) -> list[FabricPoint]:
        """The points of a pair."""
        return [point for point in self.points if (point.prefill, point.decode) == (pair.prefill, pair.decode)]


_ADAPTER: TypeAdapter[FabricResults] = TypeAdapter(FabricResults)


def fabric_json(results: FabricResults) -> dict[str, Any]:
    """Plain values with stable keys; each point also has ``bytes`` and ``bandwidth`` (bytes per second)."""
    made = _ADAPTER.dump_python(results, mode="json")
    assert isinstance(made, dict)
    for point, plain in zip(results.points, made["points"], strict=True):
        plain |= {"bytes": point.bytes, "bandwidth": point.bandwidth}
    return made


def write_fabric(path: Path, results: FabricResults) -> None:
    """Write the results to a file, whole or not at all; readable by its owner alone.

    Raises:
        UsageError: it cannot be written.
    """
    write_atomically(path, json.dumps(fabric_json(results), indent=1).encode() + b"\n", mode=0o600)


def read_fabric(path: Path) -> FabricResults:
    """Read what ``pdctl bench fabric --out`` wrote.

    Raises:
        UsageError: it cannot be read, is something else, or is of a version that this pdctl does not know.
    """
    return read_document(
        path,
        _ADAPTER,
        limit=FILE_LIMIT,
        schema=SCHEMA,
        is_one=lambda data: data.get("kind") == "fabric",
        what="result of pdctl bench fabric",
        hint="give a file that pdctl bench fabric --out wrote",
    )


def size_text(size: float) -> str:
    """Bytes for people: ``64 KiB``, ``1.5 MiB``, ``12 B``."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= step:
            return f"{size / step:.4g} {unit}"
    return f"{size:.4g} B"


def speed_text(bytes_per_s: float) -> str:
    """Bytes per second in GB/s (10**9), with three digits that count."""
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s < 1e12 else f"{bytes_per_s / 1e9:.0f} GB/s"


def time_text(seconds: float) -> str:
    """A short time for people: ``74 us``, ``1.25 ms``, ``2.1 s``."""
    for unit, step in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= step:
            return f"{seconds / step:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
