"""One immutable picture of a cluster per tick. Dashboard, exporter, rules and recordings read only this.

Missing is not zero: a figure that was not read is None, and whatever was read carries its age. Times are seconds, and
ages are seconds before `Snapshot.at`; they come from monotonic clocks (the poller's own, or a rank's for its records),
so that a clock that jumps changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Side = Literal["prefill", "decode"]
Process = Literal["running", "stopped", "zombie", "exited", "absent"]
"""Of an instance's main process: ``stopped`` by a signal or a debugger; ``absent``: never started or cleaned up."""


@dataclass(frozen=True)
class Percentiles:
    """Of what ended since the oldest snapshot of the window, in seconds. ``count`` is how many that were."""

    p50: float
    p99: float
    count: int


@dataclass(frozen=True)
class RankView:
    """One rank's writer and totals.

    Attributes:
        rank: within the instance.
        age_s: how old this reading is; None if the rank has never answered.
        error: why the last poll gave nothing; empty if it did. The figures are then those of ``age_s`` ago.
        engine_id: vLLM's engine id there.
        pid: of the rank's process.
        process: state of that process, if the host told; else the instance's main process is what is known.
        uptime_s: of its telemetry.
        writer: ``idle``, ``busy``, ``stuck`` or ``dead``, by its own words.
        heartbeat_age_s: since the writer's last beat, at the time of the reading.
        operation: the NIXL operation it is in, and since when.
        loops: rounds of the writer since its start.
        errors: exceptions it survived.
        inflight: transfers in flight.
        oldest_s: how long the oldest of them is in its stage.
        outcomes: totals since start by ``side/outcome``, such as ``decode/received``.
        posted_bytes: bytes WRITTEN since start.
        bytes_per_s: since the last reading; None after a restart or a gap.
        descriptors: totals by ``posted``, ``completed``, ``failed``.
        notifications: totals by ``kind/direction/result``.
        unlisted: transfers in flight beyond those that it listed. While there are any, that a transfer has no record
            of this rank says nothing.
        stages_inflight: transfers in flight by ``side/stage``; of its metrics, which are read less often.
        stages_oldest_s: how long the oldest of each is in its stage.
    """

    rank: int
    age_s: float | None = None
    error: str = ""
    engine_id: str = ""
    pid: int | None = None
    uptime_s: float | None = None
    writer: str = ""
    heartbeat_age_s: float | None = None
    operation: str = ""
    operation_age_s: float | None = None
    loops: int | None = None
    errors: int | None = None
    last_error: str = ""
    inflight: int | None = None
    oldest_s: float | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)
    posted_bytes: int | None = None
    bytes_per_s: float | None = None
    descriptors: Mapping[str, int] = field(default_factory=dict)
    notifications: Mapping[str, int] = field(default_factory=dict)
    process: Process | None = None
    unlisted: int = 0
    stages_inflight: Mapping[str, int] = field(default_factory=dict)
    stages_oldest_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class InstanceView:
    """One instance of the plan.

    Attributes:
        name: such as ``prefill-0``; ``router``.
        role: ``prefill``, ``decode`` or ``router``.
        host: its host.
        url: its API.
        process: None if the host could not say.
        process_age_s: how old that is; None if it was never read.
        pid: of its main process.
        started_unix: when that process was made; another value is a restart.
        restarts: how often process or engine id changed since the watch began.
        rss_bytes: of all its processes.
        cpu_cores: cores that they used since the last reading.
        healthy: whether its health check answers; None if it was not asked or did not answer.
        health_error: what it said, or why it did not answer.
        age_s: how old the metrics are; None if they were never read.
        error: why the last poll of its metrics gave nothing; empty if it did.
        requests_running: in its batch.
        requests_waiting: in its queue.
        kv_use: share of KV blocks in use, 0 to 1.
        request_rate: requests finished per second since the last reading.
        ttft: time to first token.
        tpot: time per output token.
        failed_loads: KV loads that failed since start (vLLM's own counter), if it says.
        ranks: its ranks; none for the router and where pdctl's connector is not in use.
        diagnosis: what its log says about its end, once it has ended; empty otherwise.
        stopped: those of its processes that are stopped, by name and pid.
    """

    name: str
    role: str
    host: str
    url: str
    process: Process | None = None
    process_age_s: float | None = None
    pid: int | None = None
    started_unix: float | None = None
    restarts: int = 0
    rss_bytes: int | None = None
    cpu_cores: float | None = None
    healthy: bool | None = None
    health_error: str = ""
    age_s: float | None = None
    error: str = ""
    requests_running: int | None = None
    requests_waiting: int | None = None
    kv_use: float | None = None
    request_rate: float | None = None
    ttft: Percentiles | None = None
    tpot: Percentiles | None = None
    failed_loads: int | None = None
    ranks: tuple[RankView, ...] = ()
    diagnosis: str = ""
    stopped: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostView:
    """One host: whether it answers, and what its network cards count.

    Attributes:
        name: in the cluster file.
        age_s: how old the reading is; None if there was none.
        error: why the last poll gave nothing; empty if it did.
        sent_bytes_per_s: of the interface that carries the data-plane address.
        received_bytes_per_s: the same.
        rdma: per device, rates per second of counters that matter (``rdma_write_bytes``, ``retrans_timeout_events``).
        load: of one minute, per core.
        memory_available_bytes: of the host.
        baselines: what `pdctl doctor` measured from here with NIXL, in bytes per second by the decode host's name.
    """

    name: str
    age_s: float | None = None
    error: str = ""
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    rdma: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    load: float | None = None
    memory_available_bytes: int | None = None
    baselines: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SideRecord:
    """What one rank's ledger says of a transfer (docs/protocol.md), as of ``reading_age_s`` before the snapshot.

    Attributes:
        instance: whose ledger.
        rank: of that instance.
        stage: the last stage reached.
        outcome: how it ended; empty while in flight.
        reason: why, if it failed.
        age_s: since its first stage; of an ended one, how long it took.
        stage_age_s: since it reached its stage, at the time of the snapshot.
        stages: seconds from its first stage to each stage.
        peer: engine id of the other side.
        ended_s: since it ended, by its host's clock alone; None in flight, or if that is not known.
    """

    instance: str
    rank: int
    attempt: int
    stage: str
    outcome: str
    reason: str
    age_s: float
    stage_age_s: float
    stages: Mapping[str, float]
    started_unix: float
    reading_age_s: float
    request_id: str = ""
    peer: str = ""
    tokens: int = 0
    blocks: int = 0
    descriptors: int = 0
    bytes: int = 0
    ended_s: float | None = None


@dataclass(frozen=True)
class TransferView:
    """What both sides know of one transfer. A side that has no record of it has none here.

    Attributes:
        key: what both sides and the router call it.
        prefill: records of prefill's ranks.
        decode: records of decode's ranks, of the latest attempt.
    """

    key: str
    prefill: tuple[SideRecord, ...] = ()
    decode: tuple[SideRecord, ...] = ()

    @property
    def in_flight(self) -> bool:
        """Whether a rank of either side still has it in flight."""
        return any(not record.outcome for record in (*self.prefill, *self.decode))

    @property
    def age_s(self) -> float:
        """Since the first sign of it, or how long it took."""
        return max((record.age_s for record in (*self.prefill, *self.decode)), default=0.0)


@dataclass(frozen=True)
class Snapshot:
    """Everything at one tick.

    Attributes:
        at: seconds of the poller's monotonic clock.
        unix: wall clock of the watching machine, for people and recordings; never used to compute.
        tick: count from 0.
        transfers: in flight first, oldest first; then those that ended lately, latest first; bounded.
        dropped: how many more were in flight than fit.
        request_rate: of the whole cluster, per second, as the router's clients see it.
        ttft: of the cluster.
        tpot: of the cluster.
        stage_p99_s: recent 99th percentile of each ``side/stage``, over all ranks.
        poll_s: how long this poll took; ``poll_errors`` how many readings failed in it.
    """

    at: float
    unix: float
    tick: int
    cluster: str
    model: str
    mode: str
    instances: tuple[InstanceView, ...]
    hosts: tuple[HostView, ...]
    transfers: tuple[TransferView, ...] = ()
    dropped: int = 0
    request_rate: float | None = None
    ttft: Percentiles | None = None
    tpot: Percentiles | None = None
    stage_p99_s: Mapping[str, float] = field(default_factory=dict)
    poll_s: float = 0.0
    poll_errors: int = 0

    def instance(self, name: str) -> InstanceView | None:
        """The instance of that name."""
        return next((one for one in self.instances if one.name == name), None)
