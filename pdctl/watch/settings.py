"""Every threshold of the watchdog, with its reason. The manual of the watchdog's settings is this file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pdctl.spec import ClusterSpec


@dataclass(frozen=True)
class WatchSettings:
    """What counts as wrong, and for how long. Times are seconds.

    Attributes:
        stall_after_s: no stage of a transfer counts as stalled before this (``transfer.stall_after_s``).
        interval_s: expected time between two snapshots. If they really come further apart, that is what counts.
        timeout_s: when the connector itself gives a transfer up (``transfer.timeout_s``).
        lease_s: how long prefill keeps blocks that nobody has come for (``transfer.lease_s``).
        mode: ``push`` or ``pull``. With pull there is no ledger, and only rules on engines and hosts find anything.
        load_failure_policy: what decode does after a failed transfer, ``fail`` or ``recompute``.
        p99_factor: a stage is stalled after this many times its recent 99th percentile: ten times what the slowest
            hundredth needs is no queue any more.
        stall_limit_s: no threshold of a stage is above this, whatever the percentile is: one transfer that took 20 s
            must not silence the alarm for the next minute. None: half of ``timeout_s``, so that the alarm comes before
            the connector's own time-out; never below ``stall_after_s``.
        connect_after_s: the same as ``stall_after_s`` for stages in which engines connect: the first handshake and
            UCX's lazy connection of a pair were seen to take 4 to 7 s.
        slow_prefill_after_s: the least time without any progress of an engine after which its queue is called slow.
            One large prompt may take several seconds in which nothing else moves.
        answer_after_s: how long one side may not know what the other has ended. Messages take milliseconds; decode
            asks again after 5 s. None: ``stall_after_s``, at most 10 s, since the watchdog keeps no longer history.
        stale_intervals: a reading older than this many intervals is no evidence for what a transfer does now.
        writer_stuck_after_s: a writer beats at least twice a second. None: ``stall_after_s``; a process of an
            overloaded host was seen to wait for a CPU for seconds.
        lease_margin_s: added to ``lease_s`` before blocks count as held too long: leases are renewed and reaped in
            rounds.
        fabric_baseline_bytes_per_s: what to compare with where the prefill host keeps no baseline of ``pdctl doctor``
            (`HostView.baselines`); None: bandwidth is not judged there.
        slow_fabric_share: below this share of the baseline the fabric is slow. A quarter: traffic of neighbours and
            small blocks cost up to half, a fall-back from RDMA to TCP costs nine tenths.
        slow_fabric_least_bytes: smaller transfers are dominated by latency and say nothing about bandwidth.
        slow_fabric_least_count: so many transfers are needed before bandwidth is judged.
        slow_post_after_s: median time from match to post above which preparing descriptors is slow.
        slow_post_growth: or the newest third of recent transfers takes so many times what the oldest third took.
        slow_post_least_count: so many transfers are needed before post times are judged; handshakes of the first ones
            must not decide.
        expired_least_count: so many leases must have expired within the window, so that one client that went away is
            no alarm.
        expired_share: and they must be this share of what ended.
        late_least_count: so many messages that the receiver no longer knows are harmless repetitions.
        late_share: and they must be this share of the transfers that ended.
        pair_failures: so many transfers of a pair must have failed, and none succeeded, for the pair to be broken.
        window_s: counters are compared over this long.
        trust_ended_ages: take a host's wall clock for how long ago a transfer ended. It may have been set meanwhile, so
            a watch that sees it end itself does not; a single look has nothing else.
        open_ticks: a symptom opens an alert when it is seen in so many snapshots in a row. 1 for a single look.
        close_ticks: an alert closes when its symptom is gone in so many snapshots in a row.
        flap_window_s: an alert that comes back within this long after it closed is flapping.
        flap_hold_s: a flapping alert must be gone for this long before it closes; doubled each time, up to 8 times.
        blind_hold_s: an alert whose side cannot be read is kept open for this long: not seen is not healed.
        update_every_s: an open alert tells of new folded symptoms no more often than this.
    """

    stall_after_s: float = 5.0
    interval_s: float = 1.0
    timeout_s: float = 30.0
    lease_s: float = 30.0
    mode: Literal["push", "pull"] = "push"
    load_failure_policy: Literal["fail", "recompute"] = "fail"
    p99_factor: float = 10.0
    stall_limit_s: float | None = None
    connect_after_s: float = 10.0
    slow_prefill_after_s: float = 15.0
    answer_after_s: float | None = None
    stale_intervals: float = 3.0
    writer_stuck_after_s: float | None = None
    lease_margin_s: float = 5.0
    fabric_baseline_bytes_per_s: float | None = None
    slow_fabric_share: float = 0.25
    slow_fabric_least_bytes: int = 8 * 2**20
    slow_fabric_least_count: int = 5
    slow_post_after_s: float = 0.5
    slow_post_growth: float = 4.0
    slow_post_least_count: int = 21
    expired_least_count: int = 3
    expired_share: float = 0.05
    late_least_count: int = 5
    late_share: float = 0.05
    pair_failures: int = 3
    window_s: float = 60.0
    trust_ended_ages: bool = False
    open_ticks: int = 2
    close_ticks: int = 2
    flap_window_s: float = 120.0
    flap_hold_s: float = 15.0
    blind_hold_s: float = 60.0
    update_every_s: float = 15.0

    @property
    def stall_cap_s(self) -> float:
        """No threshold of a stage is above this."""
        limit = self.timeout_s / 2 if self.stall_limit_s is None else self.stall_limit_s
        return max(self.stall_after_s, limit)

    @property
    def answer_s(self) -> float:
        """How long one side may not know what the other has ended."""
        return min(self.stall_after_s if self.answer_after_s is None else self.answer_after_s, 10.0)

    @property
    def stuck_s(self) -> float:
        """Without a beat for so long a writer is stuck."""
        return self.stall_after_s if self.writer_stuck_after_s is None else self.writer_stuck_after_s

    def for_one_look(self) -> WatchSettings:
        """The same for a single look, where nothing can be seen twice."""
        return replace(self, open_ticks=1, trust_ended_ages=True)


def settings_from_spec(spec: ClusterSpec) -> WatchSettings:
    """What the cluster file says about transfers, as thresholds."""
    transfer = spec.transfer
    return WatchSettings(
        stall_after_s=transfer.stall_after_s,
        timeout_s=transfer.timeout_s,
        lease_s=float(transfer.lease_s),
        mode=transfer.mode,
        load_failure_policy=transfer.load_failure_policy,
    )
