"""Prometheus metrics of a whole cluster, from the newest frame of the watch (docs/watch.md lists them).

Missing is absent, never 0: what the last poll could not read has no sample in the scrape, and
``pdctl_reading_age_seconds`` says since when.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdctl import __version__
from pdctl.watch.alerts import Severity
from pdctl.watch.headless import unreachable
from pdctl.watch.snapshot import HostView, InstanceView, Percentiles, RankView, Snapshot
from pdctl.watch.tui.source import Frame

LABEL_LIMIT = 128
"""Characters of a label's value; what ranks say of themselves is not trusted to be short."""
VALUES_LIMIT = 64
"""Samples of one metric for one rank or host, such as kinds of notifications."""

_RANK = ("cluster", "instance", "role", "rank")
_INSTANCE = ("cluster", "instance", "role", "host")
_HOST = ("cluster", "host")
_PROCESS_UP = {"running": 1.0, "stopped": 0.0, "zombie": 0.0, "exited": 0.0, "absent": 0.0}

# name: (type, labels, help)
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "pdctl_alert": ("gauge", ("cluster", "code", "name", "instance", "severity"), "open alerts about an instance"),
    "pdctl_alerts_open": ("gauge", ("cluster", "severity"), "open alerts, each counted once"),
    "pdctl_alert_events": ("counter", ("cluster", "code", "event"), "alerts that opened, changed or closed"),
    "pdctl_instance_up": ("gauge", _INSTANCE, "1 if the instance's process runs and its health check answers"),
    "pdctl_instance_process": ("gauge", (*_INSTANCE, "state"), "1 for the state of its main process"),
    "pdctl_instance_restarts": ("counter", _INSTANCE, "restarts seen since the watch began"),
    "pdctl_instance_memory_bytes": ("gauge", _INSTANCE, "resident memory of all its processes"),
    "pdctl_instance_cpu_cores": ("gauge", _INSTANCE, "cores that its processes used"),
    "pdctl_instance_requests_running": ("gauge", _INSTANCE, "requests in its batch"),
    "pdctl_instance_requests_waiting": ("gauge", _INSTANCE, "requests in its queue"),
    "pdctl_instance_kv_use_ratio": ("gauge", _INSTANCE, "share of its KV blocks in use"),
    "pdctl_instance_requests_per_second": ("gauge", _INSTANCE, "requests finished"),
    "pdctl_instance_failed_loads": ("counter", _INSTANCE, "KV loads that failed, by vLLM's own count"),
    "pdctl_instance_ttft_seconds": ("gauge", (*_INSTANCE, "quantile"), "recent time to first token"),
    "pdctl_instance_tpot_seconds": ("gauge", (*_INSTANCE, "quantile"), "recent time per output token"),
    "pdctl_rank_up": ("gauge", _RANK, "1 if the rank's telemetry answered the last poll"),
    "pdctl_reading_age_seconds": ("gauge", _RANK, "age of the rank's last answer"),
    "pdctl_writer_alive": ("gauge", _RANK, "1 while the writer thread runs"),
    "pdctl_writer_state": ("gauge", (*_RANK, "state"), "1 for the state of the writer"),
    "pdctl_writer_heartbeat_age_seconds": ("gauge", _RANK, "seconds since the writer's last beat"),
    "pdctl_writer_op_age_seconds": ("gauge", (*_RANK, "op"), "seconds that the present NIXL call runs"),
    "pdctl_writer_loops": ("counter", _RANK, "rounds of the writer"),
    "pdctl_writer_errors": ("counter", _RANK, "exceptions that the writer survived"),
    "pdctl_transfers_inflight": ("gauge", (*_RANK, "side", "stage"), "transfers in flight"),
    "pdctl_transfer_oldest_seconds": ("gauge", (*_RANK, "side", "stage"), "age of the oldest transfer in the stage"),
    "pdctl_transfers": ("counter", (*_RANK, "side", "outcome"), "transfers that ended"),
    "pdctl_descriptors": ("counter", (*_RANK, "state"), "NIXL descriptors of WRITEs"),
    "pdctl_transfer_bytes": ("counter", _RANK, "bytes of WRITEs"),
    "pdctl_notifications": ("counter", (*_RANK, "kind", "direction", "result"), "messages between ranks"),
    "pdctl_transfer_stage_p99_seconds": ("gauge", ("cluster", "side", "stage"), "recent 99th percentile, all ranks"),
    "pdctl_host_up": ("gauge", _HOST, "1 if the host answered the last poll"),
    "pdctl_host_sent_bytes_per_second": ("gauge", _HOST, "of the interface of the data plane"),
    "pdctl_host_received_bytes_per_second": ("gauge", _HOST, "of the interface of the data plane"),
    "pdctl_host_rdma_per_second": ("gauge", (*_HOST, "device", "counter"), "rates of hardware counters"),
    "pdctl_host_load_per_core": ("gauge", _HOST, "load of one minute"),
    "pdctl_host_memory_available_bytes": ("gauge", _HOST, "memory that is available"),
    "pdctl_requests_per_second": ("gauge", ("cluster",), "requests finished, as the router's clients see it"),
    "pdctl_ttft_seconds": ("gauge", ("cluster", "quantile"), "recent time to first token"),
    "pdctl_tpot_seconds": ("gauge", ("cluster", "quantile"), "recent time per output token"),
    "pdctl_watch_build_info": ("gauge", ("version",), "1"),
    "pdctl_watch_polls": ("counter", ("cluster",), "polls since the watch began"),
    "pdctl_watch_poll_seconds": ("gauge", ("cluster",), "how long the last poll took"),
    "pdctl_watch_poll_errors": ("counter", ("cluster",), "readings that failed"),
    "pdctl_watch_last_poll_timestamp_seconds": ("gauge", ("cluster",), "when the last poll ended"),
    "pdctl_watch_age_seconds": ("gauge", ("cluster",), "since the last poll ended"),
    "pdctl_watch_transfers_dropped": ("gauge", ("cluster",), "transfers in flight beyond what a snapshot holds"),
    "pdctl_watch_actions": ("counter", ("cluster", "action", "outcome"), "what --on-stall did, or refused"),
    "pdctl_watch_sink_events": ("counter", ("sink", "result"), "alerts given to hooks and webhooks"),
}
"""Every metric, as Prometheus' client names it: a counter is exported with ``_total`` behind its name."""


def exported_names() -> set[str]:
    """The names as they stand in a scrape and in queries."""
    return {f"{name}_total" if kind == "counter" else name for name, (kind, _, _) in METRICS.items()}


SinkCounts = Callable[[], Mapping[str, Mapping[str, int]]]


class ClusterCollector(Collector):
    """Makes metrics of the newest frame when it is scraped.

    Args:
        sink_counts: per sink, how many alerts came to which end.
        clock: monotonic seconds.
    """

    def __init__(self, *, sink_counts: SinkCounts | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink_counts = sink_counts
        self._clock = clock
        self._lock = threading.Lock()
        self._frame: Frame | None = None
        self._at = 0.0
        self._polls = 0
        self._errors = 0
        self._events: Counter[tuple[str, str]] = Counter()
        self._actions: Counter[tuple[str, str]] = Counter()

    def update(self, frame: Frame) -> None:
        """Take the next frame. Every frame must be given, since their events are counted."""
        with self._lock:
            self._frame = frame
            self._at = self._clock()
            self._polls += 1
            self._errors += frame.snapshot.poll_errors
            self._events.update((event.alert.symptom.code, event.kind) for event in frame.events)
            self._actions.update((event.action, event.outcome) for event in frame.actions)

    @property
    def age_s(self) -> float | None:
        """Since the last frame; None if there was none."""
        with self._lock:
            return None if self._frame is None else self._clock() - self._at

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at each scrape."""
        samples = _Samples()
        samples.add("pdctl_watch_build_info", 1, __version__)
        for sink, counts in (self._sink_counts() if self._sink_counts is not None else {}).items():
            for result, count in counts.items():
                samples.add("pdctl_watch_sink_events", count, sink, result)
        with self._lock:
            frame, polls, errors, events = self._frame, self._polls, self._errors, dict(self._events)
            actions = dict(self._actions)
            age_s = self._clock() - self._at
        if frame is not None:
            cluster = frame.snapshot.cluster
            samples.add("pdctl_watch_polls", polls, cluster)
            samples.add("pdctl_watch_poll_errors", errors, cluster)
            samples.add("pdctl_watch_age_seconds", age_s, cluster)
            for (code, kind), count in events.items():
                samples.add("pdctl_alert_events", count, cluster, code, kind)
            for (action, outcome), count in actions.items():
                samples.add("pdctl_watch_actions", count, cluster, action, outcome)
            _add_snapshot(samples, frame.snapshot)
            _add_alerts(samples, frame)
        return samples.families()

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that the registry need not collect when it takes this in."""
        return ()


def make_registry(collector: ClusterCollector) -> CollectorRegistry:
    """A registry of its own: nothing of this process is exported beside the cluster."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


class _Samples:
    """Families in the order of METRICS, made when they get a first sample."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = {}

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Take a sample; None is missing, and leaves it out."""
        if value is not None:
            # Cut short, two values may have become one: a scrape must not name a series twice.
            self._values.setdefault(name, {})[tuple(_label(label) for label in labels)] = float(value)

    def add_many(self, name: str, values: Mapping[str, float], *labels: str, parts: int = 1) -> None:
        """Take a sample for each key, split at ``/`` into ``parts`` labels; bounded."""
        for key, value in sorted(values.items())[:VALUES_LIMIT]:
            split = key.split("/", parts - 1)
            if len(split) == parts:
                self.add(name, value, *labels, *split)

    def add_percentiles(self, name: str, percentiles: Percentiles | None, *labels: str) -> None:
        if percentiles is not None and percentiles.count:
            self.add(name, percentiles.p50, *labels, "0.5")
            self.add(name, percentiles.p99, *labels, "0.99")

    def families(self) -> Iterator[Metric]:
        for name, (kind, labels, text) in METRICS.items():
            if name not in self._values:
                continue
            family = (
                CounterMetricFamily(name, text, labels=labels)
                if kind == "counter"
                else GaugeMetricFamily(name, text, labels=labels)
            )
            for values, value in self._values[name].items():
                family.add_metric(values, value)
            yield family


def _label(text: str) -> str:
    """A label's value: bounded, and of characters that UTF-8 has. (Quotes and line breaks are escaped later.)"""
    return text[:LABEL_LIMIT].encode("utf-8", "replace").decode()


def _add_snapshot(samples: _Samples, snapshot: Snapshot) -> None:
    cluster = snapshot.cluster
    samples.add("pdctl_watch_poll_seconds", snapshot.poll_s, cluster)
    samples.add("pdctl_watch_last_poll_timestamp_seconds", snapshot.unix, cluster)
    samples.add("pdctl_watch_transfers_dropped", snapshot.dropped, cluster)
    samples.add("pdctl_requests_per_second", snapshot.request_rate, cluster)
    samples.add_percentiles("pdctl_ttft_seconds", snapshot.ttft, cluster)
    samples.add_percentiles("pdctl_tpot_seconds", snapshot.tpot, cluster)
    samples.add_many("pdctl_transfer_stage_p99_seconds", snapshot.stage_p99_s, cluster, parts=2)
    dead = unreachable(snapshot)
    for instance in snapshot.instances:
        _add_instance(samples, cluster, instance, host_answers=instance.host not in dead)
    for host in snapshot.hosts:
        _add_host(samples, cluster, host)


def _add_instance(samples: _Samples, cluster: str, instance: InstanceView, *, host_answers: bool) -> None:
    labels = (cluster, instance.name, instance.role, instance.host)
    samples.add("pdctl_instance_up", _up(instance, host_answers=host_answers), *labels)
    samples.add("pdctl_instance_restarts", instance.restarts, *labels)
    if host_answers and instance.process is not None:
        samples.add("pdctl_instance_process", 1, *labels, instance.process)
        samples.add("pdctl_instance_memory_bytes", instance.rss_bytes, *labels)
        samples.add("pdctl_instance_cpu_cores", instance.cpu_cores, *labels)
    if not instance.error and instance.age_s is not None:
        samples.add("pdctl_instance_requests_running", instance.requests_running, *labels)
        samples.add("pdctl_instance_requests_waiting", instance.requests_waiting, *labels)
        samples.add("pdctl_instance_kv_use_ratio", instance.kv_use, *labels)
        samples.add("pdctl_instance_requests_per_second", instance.request_rate, *labels)
        samples.add("pdctl_instance_failed_loads", instance.failed_loads, *labels)
        samples.add_percentiles("pdctl_instance_ttft_seconds", instance.ttft, *labels)
        samples.add_percentiles("pdctl_instance_tpot_seconds", instance.tpot, *labels)
    for rank in instance.ranks:
        _add_rank(samples, (cluster, instance.name, instance.role, str(rank.rank)), rank)


def _up(instance: InstanceView, *, host_answers: bool) -> float | None:
    """Down as soon as one thing says so; up only if something says so; else unknown."""
    process = _PROCESS_UP.get(instance.process) if instance.process is not None and host_answers else None
    if process == 0.0 or instance.healthy is False:
        return 0.0
    return 1.0 if instance.healthy else None


def _add_rank(samples: _Samples, labels: Sequence[str], rank: RankView) -> None:
    answered = not rank.error and rank.age_s is not None
    if answered or rank.error:
        samples.add("pdctl_rank_up", float(answered), *labels)
    samples.add("pdctl_reading_age_seconds", rank.age_s, *labels)
    if not answered:
        return
    if rank.writer:
        samples.add("pdctl_writer_alive", float(rank.writer != "dead"), *labels)
        samples.add("pdctl_writer_state", 1, *labels, rank.writer)
    samples.add("pdctl_writer_heartbeat_age_seconds", rank.heartbeat_age_s, *labels)
    if rank.operation:
        samples.add("pdctl_writer_op_age_seconds", rank.operation_age_s, *labels, rank.operation)
    samples.add("pdctl_writer_loops", rank.loops, *labels)
    samples.add("pdctl_writer_errors", rank.errors, *labels)
    samples.add_many("pdctl_transfers_inflight", rank.stages_inflight, *labels, parts=2)
    samples.add_many("pdctl_transfer_oldest_seconds", rank.stages_oldest_s, *labels, parts=2)
    samples.add_many("pdctl_transfers", rank.outcomes, *labels, parts=2)
    samples.add_many("pdctl_descriptors", rank.descriptors, *labels)
    samples.add("pdctl_transfer_bytes", rank.posted_bytes, *labels)
    samples.add_many("pdctl_notifications", rank.notifications, *labels, parts=3)


def _add_host(samples: _Samples, cluster: str, host: HostView) -> None:
    answered = not host.error and host.age_s is not None
    if answered or host.error:
        samples.add("pdctl_host_up", float(answered), cluster, host.name)
    if not answered:
        return
    samples.add("pdctl_host_sent_bytes_per_second", host.sent_bytes_per_s, cluster, host.name)
    samples.add("pdctl_host_received_bytes_per_second", host.received_bytes_per_s, cluster, host.name)
    samples.add("pdctl_host_load_per_core", host.load, cluster, host.name)
    samples.add("pdctl_host_memory_available_bytes", host.memory_available_bytes, cluster, host.name)
    for device, counters in sorted(host.rdma.items())[:VALUES_LIMIT]:
        samples.add_many("pdctl_host_rdma_per_second", counters, cluster, host.name, device)


def _add_alerts(samples: _Samples, frame: Frame) -> None:
    cluster = frame.snapshot.cluster
    about: Counter[tuple[str, str, str, str]] = Counter()
    severities: Counter[Severity] = Counter()
    for alert in frame.alerts:
        symptom = alert.symptom
        severities[symptom.severity] += 1
        # An alert about no instance, such as a host's, has an empty label: Prometheus takes that for none.
        for instance in symptom.instances or ("",):
            about[symptom.code, symptom.name, instance, symptom.severity.value] += 1
    for (code, name, instance, severity), count in about.items():
        samples.add("pdctl_alert", count, cluster, code, name, instance, severity)
    for one in Severity:
        samples.add("pdctl_alerts_open", severities[one], cluster, one.value)
