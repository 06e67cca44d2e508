"""What is known of a cluster between two snapshots: readings come in, views go out. Pure but for what it remembers.

Readings come from the hosts in the form of ``pdctl/node/watch_facts.py``. Moments are seconds of the poller's monotonic
clock, but those that rates are made of: they are the host's, so that a line that travels slowly changes no rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pdctl.plan import ClusterPlan, InstancePlan
from pdctl.watch import poll_request as wanted
from pdctl.watch.poll_counters import Histogram, Rate, Window
from pdctl.watch.poll_join import RankLedger, join, unlisted
from pdctl.watch.poll_records import EndedRecords, Record, read_record
from pdctl.watch.snapshot import HostView, InstanceView, Process, RankView, Snapshot

Diagnose = Callable[[str, "int | None", "int | None"], str]
"""From the end of a log, exit status and signal to what it means, in words."""

KEPT_S = 600.0
"""How long a rank that does not answer keeps its transfers in flight."""

_AWAY = "its host gives nothing: "
_GAP_S = 30.0
_STALE_RATE_S = 10.0
# Beyond every counter; what is larger, infinite or no number at all is nonsense.
_MOST = 2.0**64
_PROCESSES = ("running", "stopped", "zombie", "exited", "absent")


@dataclass
class _Reading:
    """The last good reading of a kind, and why the one after it failed."""

    value: Any = None
    at: float | None = None
    error: str = ""

    def take(self, value: Any, at: float, error: str) -> bool:
        """Take a reading; whether it was good."""
        self.error = error
        if error:
            return False
        self.value, self.at = value, at
        return True

    def age_s(self, now: float) -> float | None:
        return None if self.at is None else max(0.0, now - self.at)


@dataclass
class _Rank:
    number: int
    health: _Reading = field(default_factory=_Reading)
    metrics: _Reading = field(default_factory=_Reading)
    ledger: _Reading = field(default_factory=_Reading)
    ended_error: str = ""
    records: list[Record] = field(default_factory=list)
    unlisted: int = 0
    engine_id: str = ""
    changes: int = 0
    process: str = ""
    bytes: Rate = field(default_factory=lambda: Rate(_GAP_S))
    stages: dict[str, Histogram] = field(default_factory=dict)


class _Instance:
    def __init__(self, plan: InstancePlan, window_s: float) -> None:
        self.plan = plan
        count = len(plan.telemetry_ports)
        self.ranks = [_Rank(number) for number in range(count)]
        self.process = _Reading()
        self.identity = ""
        self.started_unix: float | None = None
        self.changes = 0
        self.health = _Reading()
        self.metrics = _Reading()
        self.requests = Rate(_GAP_S)
        self.histograms = {name: Histogram(window_s) for name in (wanted.TTFT, wanted.TPOT)}
        self.windows = {name: Window(window_s) for name in (wanted.TTFT, wanted.TPOT)}
        self.diagnosed: tuple[Any, str] | None = None
        self.log = ""

    @property
    def restarts(self) -> int:
        """A restart changes the process, and the engine id of every rank, once each."""
        return max([self.changes, *(rank.changes for rank in self.ranks)])


class _Host:
    def __init__(self, name: str) -> None:
        self.name = name
        self.figures = _Reading()
        self.error = "not reached yet"
        self.heard_at: float | None = None
        self.sent = Rate(_GAP_S)
        self.received = Rate(_GAP_S)
        self.rdma_at: float | None = None
        self.rdma: dict[str, dict[str, Rate]] = {}


class ClusterState:
    """See the module. Not safe for several threads: `Poller` has a lock around it.

    Args:
        plan: the cluster.
        interval_s: seconds between lines of a host.
        window_s: how far back percentiles reach.
        diagnose: explains an end of an instance; without it there is its exit status alone.
    """

    def __init__(
        self, plan: ClusterPlan, *, interval_s: float, window_s: float, diagnose: Diagnose | None = None
    ) -> None:
        self._plan = plan
        self._window_s = window_s
        self._silent_s = max(3.0, 3 * interval_s)
        self._diagnose = diagnose
        self._instances = {instance.name: _Instance(instance, window_s) for instance in plan.instances}
        self._hosts = {name: _Host(name) for name in plan.hosts}
        self._ended = EndedRecords()
        self._stages: dict[str, Window] = {}
        self._cluster = {name: Window(window_s) for name in (wanted.TTFT, wanted.TPOT)}

    def set_interval(self, interval_s: float) -> None:
        """Lines come at another pace from now on."""
        self._silent_s = max(3.0, 3 * interval_s)

    # What comes in.

    def lost(self, host: str, error: str) -> None:
        """A host cannot be reached any more, or not yet."""
        self._hosts[host].error = error

    def connected(self, host: str) -> None:
        """A host is reached anew. What it counts may have begun again, so that rates begin again too."""
        one = self._hosts[host]
        one.sent.forget()
        one.received.forget()
        one.rdma.clear()
        for instance in self._instances.values():
            if instance.plan.host == host:
                _forget_rates(instance)

    def heard(self, host: str, message: Mapping[str, Any], now: float) -> None:
        """Take a line of a host. What makes no sense is its error, and changes nothing."""
        one = self._hosts[host]
        one.heard_at, one.error = now, ""
        at, readings = _number(message.get("at")), message.get("readings")
        if at is None or not isinstance(readings, list):
            one.error = f"{host}: what the watch script says makes no sense: {str(message)[:200]}"
            return
        for reading in readings:
            try:
                kind, instance, rank, age, value, error = reading
                age = max(0.0, _finite(age))
                error = str(error or "")
                value = None if error else checked(str(kind), value)
                self._take(one, str(kind), str(instance), int(rank), value, error, now - age, at - age, now)
            except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as problem:
                # Beyond what the script checks; a snapshot is no place to end at.
                one.error = f"{host}: a reading makes no sense ({problem!r}): {str(reading)[:200]}"

    def is_waiting(self, host: str) -> bool:
        """Whether a reading of this host has neither come nor failed yet."""
        readings = [self._hosts[host].figures]
        for instance in self._instances.values():
            if instance.plan.host == host:
                readings += [instance.health, instance.metrics, instance.process]
                readings += [rank.health for rank in instance.ranks]
        return any(reading.at is None and not reading.error for reading in readings)

    def _take(
        self,
        host: _Host,
        kind: str,
        name: str,
        number: int,
        value: Any,
        error: str,
        at: float,
        there: float,
        now: float,
    ) -> None:
        if kind == "host":
            _take_host(host, value, at, there, error)
            return
        if kind == "rdma":
            host.rdma_at = at
            _take_rdma(host, value, there)
            return
        instance = self._instances[name]
        if instance.plan.host != host.name:
            raise ValueError(f"{name} is not on this host")
        if number < 0:
            self._take_instance(instance, kind, value, error, at, there, now)
            return
        rank = instance.ranks[number]
        error = f"{name} rank {number}: {error}" if error else ""
        if kind == "rank":
            if rank.health.take(value, at, error):
                _take_engine(rank, str(value["engine_id"]))
        elif kind == "inflight":
            records = [] if error else [self._record(fields, name, rank, at) for fields in value["records"]]
            if rank.ledger.take(value, at, error):
                rank.records, rank.unlisted = records, value["unlisted"]
                # The list itself is kept as records alone.
                rank.ledger.value = None
        elif kind == "ended":
            for fields in value:
                self._ended.add(self._record(fields, name, rank, at))
        elif kind == "ended-trouble":
            rank.ended_error = error
        elif kind == "rank-metrics" and rank.metrics.take(value, at, error):
            self._take_rank_metrics(rank, value, there, now)

    @staticmethod
    def _record(fields: Any, instance: str, rank: _Rank, at: float) -> Record:
        return read_record(fields, instance=instance, rank=rank.number, engine_id=rank.engine_id, read_at=at)

    def _take_instance(
        self, instance: _Instance, kind: str, value: Any, error: str, at: float, there: float, now: float
    ) -> None:
        name = instance.plan.name
        if kind == "health":
            instance.health.take(value, at, f"{name}: {error}" if error else "")
        elif kind == "metrics" and instance.metrics.take(value, at, f"{name}: {error}" if error else ""):
            router = instance.plan.role == "router"
            ended = next((value[one] for one in wanted.ROUTED if one in value), None)
            instance.requests.read(there, ended if router else value.get(wanted.REQUESTS_ENDED))
            for metric, histogram in instance.histograms.items():
                increments = histogram.read(there, _buckets(value, metric).get("", {}))
                instance.windows[metric].add(now, increments)
                if instance.plan.role == "decode":
                    # The client's first token is decode's: prefill's goes to nobody.
                    self._cluster[metric].add(now, increments)
        elif kind == "process" and instance.process.take(value, at, error):
            self._take_process(instance, value)

    @staticmethod
    def _take_process(instance: _Instance, value: Mapping[str, Any]) -> None:
        identity = str(value.get("created") or "")
        if identity and identity != instance.identity:
            if instance.identity:
                instance.changes += 1
                _forget_rates(instance)
            instance.identity, instance.started_unix, instance.log, instance.diagnosed = identity, None, "", None
        if instance.started_unix is None and value.get("started_unix") is not None:
            instance.started_unix = float(value["started_unix"])
        instance.log = str(value.get("log") or instance.log)
        words = value.get("ranks") or {}
        for rank in instance.ranks:
            rank.process = str(words.get(str(rank.number), ""))

    def _take_rank_metrics(self, rank: _Rank, value: Mapping[str, float], there: float, now: float) -> None:
        rank.bytes.read(there, value.get(wanted.POSTED_BYTES))
        for labels, cumulative in _buckets(value, wanted.STAGE_SECONDS).items():
            stage = labels.replace("|", "/")
            histogram = rank.stages.setdefault(stage, Histogram(self._window_s))
            self._stages.setdefault(stage, Window(self._window_s)).add(now, histogram.read(there, cumulative))

    # What goes out.

    def snapshot(self, *, at: float, unix: float, tick: int) -> Snapshot:
        """Everything at one moment."""
        hosts = tuple(self._host_view(host, at) for host in self._hosts.values())
        trouble = {host.name: host.error for host in hosts}
        instances = tuple(self._instance_view(one, trouble[one.plan.host], at) for one in self._instances.values())
        ledgers = [
            RankLedger(name, rank.number, rank.records, rank.unlisted)
            for name, instance in self._instances.items()
            for rank in instance.ranks
            if rank.ledger.at is not None and at - rank.ledger.at < KEPT_S
        ]
        self._ended.trim({record.key for ledger in ledgers for record in ledger.records})
        engines = {rank.engine_id for instance in self._instances.values() for rank in instance.ranks}
        transfers, beyond = join(ledgers, self._ended, now=at, engines=engines)
        roles = {name: instance.plan.role for name, instance in self._instances.items()}
        spec = self._plan.spec
        return Snapshot(
            at=at,
            unix=unix,
            tick=tick,
            cluster=spec.cluster,
            model=spec.model,
            mode=spec.transfer.mode,
            instances=instances,
            hosts=hosts,
            transfers=transfers,
            dropped=beyond + unlisted(ledgers, cast("dict[str, str]", roles)),
            request_rate=self._request_rate(instances, at),
            ttft=self._cluster[wanted.TTFT].percentiles(at),
            tpot=self._cluster[wanted.TPOT].percentiles(at),
            stage_p99_s={
                stage: found.p99
                for stage, window in sorted(self._stages.items())
                if (found := window.percentiles(at)) is not None
            },
            poll_errors=sum(bool(host.error) for host in hosts)
            + sum(
                bool(one.error) + (one.healthy is None) + sum(bool(rank.error) for rank in one.ranks)
                for one in instances
            ),
        )

    def _request_rate(self, instances: tuple[InstanceView, ...], at: float) -> float | None:
        router = self._instances[self._plan.router.name]
        if router.metrics.value is None or any(name in router.metrics.value for name in wanted.ROUTED):
            return _fresh(router.requests.value, router.metrics, at)
        # A router that counts under names of its own: what decode finished.
        rates = [one.request_rate for one in instances if one.role == "decode" and one.request_rate is not None]
        return sum(rates) if rates else None

    def _host_view(self, host: _Host, at: float) -> HostView:
        error = host.error or host.figures.error
        if not error and host.heard_at is not None and at - host.heard_at > self._silent_s:
            error = f"{host.name}: nothing was heard of it for {at - host.heard_at:.0f} s"
        figures = host.figures.value or {}
        fresh_rdma = host.rdma_at is not None and at - host.rdma_at < 2 * _STALE_RATE_S
        return HostView(
            name=host.name,
            age_s=host.figures.age_s(at),
            error=error,
            sent_bytes_per_s=_fresh(host.sent.value, host.figures, at),
            received_bytes_per_s=_fresh(host.received.value, host.figures, at),
            rdma={
                device: {name: rate.value for name, rate in counters.items() if rate.value is not None}
                for device, counters in host.rdma.items()
            }
            if fresh_rdma
            else {},
            load=_number(figures.get("load")),
            memory_available_bytes=_whole(figures.get("memory_available_bytes")),
            baselines=_baselines(figures.get("baselines")),
        )

    def _instance_view(self, instance: _Instance, trouble: str, at: float) -> InstanceView:
        plan, process = instance.plan, instance.process.value or {}
        metrics = instance.metrics.value or {}
        away = f"{plan.name}: {_AWAY}{trouble}" if trouble else ""
        healthy, health_error = self._health(instance, away)
        word = process.get("process")
        fresh = _fresh(1.0, instance.process, at) is not None
        return InstanceView(
            name=plan.name,
            role=plan.role,
            host=plan.host,
            url=plan.url,
            process=cast("Process", word) if word in _PROCESSES else None,
            process_age_s=instance.process.age_s(at),
            pid=_whole(process.get("pid")) if word in ("running", "stopped", "zombie") else None,
            started_unix=instance.started_unix,
            restarts=instance.restarts,
            rss_bytes=_whole(process.get("rss_bytes")),
            cpu_cores=_number(process.get("cpu_cores")) if fresh else None,
            healthy=healthy,
            health_error=health_error,
            age_s=instance.metrics.age_s(at),
            error=away or instance.metrics.error,
            requests_running=_rounded(metrics.get(wanted.REQUESTS_RUNNING)),
            requests_waiting=_rounded(metrics.get(wanted.REQUESTS_WAITING)),
            kv_use=_number(metrics.get(wanted.KV_USE)),
            request_rate=_fresh(instance.requests.value, instance.metrics, at),
            ttft=instance.windows[wanted.TTFT].percentiles(at),
            tpot=instance.windows[wanted.TPOT].percentiles(at),
            failed_loads=_rounded(metrics.get(wanted.FAILED_TRANSFERS)),
            ranks=tuple(self._rank_view(instance, rank, trouble, at) for rank in instance.ranks),
            diagnosis=self._diagnosis(instance),
            stopped=tuple(str(one) for one in process.get("stopped") or ()),
        )

    @staticmethod
    def _health(instance: _Instance, away: str) -> tuple[bool | None, str]:
        if away or instance.health.error or instance.health.at is None:
            return None, away or instance.health.error or f"{instance.plan.name}: not asked yet"
        status = int(instance.health.value)
        return (True, "") if status == 200 else (False, f"{instance.plan.name}: its health check answers HTTP {status}")

    @staticmethod
    def _rank_view(instance: _Instance, rank: _Rank, trouble: str, at: float) -> RankView:
        health, metrics = rank.health.value or {}, rank.metrics.value or {}
        own = rank.health.error or rank.ledger.error or rank.ended_error or rank.metrics.error
        word = "" if trouble else rank.process
        return RankView(
            rank=rank.number,
            age_s=rank.health.age_s(at),
            error=f"{instance.plan.name} rank {rank.number}: {_AWAY}{trouble}" if trouble else own,
            engine_id=rank.engine_id,
            pid=_whole(health.get("pid")),
            uptime_s=_number(health.get("uptime_s")),
            writer=str(health.get("state") or ""),
            heartbeat_age_s=_number(health.get("beat_age_s")),
            operation=str(health.get("op") or ""),
            operation_age_s=_number(health.get("op_age_s")),
            loops=_whole(health.get("loops")),
            errors=_whole(health.get("errors")),
            last_error=str(health.get("last_error") or ""),
            inflight=_whole(health.get("inflight")),
            oldest_s=_number(health.get("oldest_s")),
            outcomes=health.get("outcomes") or {},
            posted_bytes=_rounded(metrics.get(wanted.POSTED_BYTES)),
            bytes_per_s=_fresh(rank.bytes.value, rank.metrics, at),
            descriptors=_labelled(metrics, wanted.DESCRIPTORS),
            notifications=_labelled(metrics, wanted.NOTIFICATIONS),
            stages_inflight=_labelled(metrics, wanted.INFLIGHT),
            stages_oldest_s=_by_labels(metrics, wanted.OLDEST),
            process=cast("Process", word) if word in _PROCESSES else None,
            unlisted=rank.unlisted,
        )

    def _diagnosis(self, instance: _Instance) -> str:
        process = instance.process.value or {}
        if process.get("process") != "exited":
            return ""
        code, signal = _whole(process.get("exit_code")), _whole(process.get("exit_signal"))
        what = (instance.identity, code, signal, len(instance.log))
        if instance.diagnosed is None or instance.diagnosed[0] != what:
            if self._diagnose is not None:
                words = self._diagnose(instance.log, code, signal)
            elif signal is not None:
                words = f"ended by signal {signal}"
            else:
                words = "its process is gone" if code is None else f"exit status {code}"
            instance.diagnosed = (what, words)
        return instance.diagnosed[1]


def checked(kind: str, value: Any) -> Any:
    """A reading's value with the types that the rest relies on.

    Raises:
        TypeError: it has another shape.
        ValueError: the same.
    """
    if kind in ("metrics", "rank-metrics"):
        return {str(name): _finite(count) for name, count in value.items()}
    if kind == "rdma":
        devices = _mapping(value)["devices"].items()
        return {
            str(device): {str(name): _finite(count) for name, count in _mapping(counters).items()}
            for device, counters in devices
        }
    if kind == "inflight":
        return {"records": _list(value["records"]), "unlisted": max(0, int(value["unlisted"]))}
    if kind == "ended":
        return _list(value)
    if kind == "health":
        return int(value)
    if kind == "rank":
        outcomes = {str(name): int(count) for name, count in _mapping(value["outcomes"]).items()}
        return {**_mapping(value), "outcomes": outcomes}
    if kind == "process":
        ranks, stopped = _mapping(value.get("ranks") or {}), _list(value.get("stopped") or [])
        return {**_mapping(value), "ranks": ranks, "stopped": stopped}
    return _mapping(value) if kind == "host" else value


def _baselines(value: Any) -> dict[str, float]:
    """Those of a host's baselines that are figures."""
    if not isinstance(value, dict):
        return {}
    read = {str(name): _number(figure) for name, figure in value.items()}
    return {name: figure for name, figure in read.items() if figure is not None and figure > 0}


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("no mapping")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("no list")
    return value


def _finite(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise TypeError("no number")
    return number


def _take_engine(rank: _Rank, engine_id: str) -> None:
    if rank.engine_id and engine_id != rank.engine_id:
        rank.changes += 1
        # They were in flight in a process that is gone.
        rank.records, rank.unlisted = [], 0
        rank.bytes.forget()
    rank.engine_id = engine_id


def _forget_rates(instance: _Instance) -> None:
    instance.requests.forget()
    for rank in instance.ranks:
        rank.bytes.forget()


def _take_host(host: _Host, value: Any, at: float, there: float, error: str) -> None:
    if not host.figures.take(value, at, f"{host.name}: {error}" if error else ""):
        return
    host.sent.read(there, _number(value["sent"]))
    host.received.read(there, _number(value["received"]))


def _take_rdma(host: _Host, devices: Mapping[str, Mapping[str, Any]], there: float) -> None:
    for device in host.rdma.keys() - devices.keys():
        del host.rdma[device]
    for device, counters in devices.items():
        rates = host.rdma.setdefault(str(device), {})
        for name, count in counters.items():
            rates.setdefault(str(name), Rate(_GAP_S)).read(there, _number(count))


def _buckets(samples: Mapping[str, float], metric: str) -> dict[str, dict[float, float]]:
    """Cumulative buckets by the values of all labels but ``le``, which comes last."""
    found: dict[str, dict[float, float]] = {}
    for key, value in samples.items():
        if key.startswith(metric + "|"):
            labels, _, bound = key[len(metric) :].rpartition("|")
            found.setdefault(labels[1:], {})[float(bound)] = value
    return found


def _labelled(samples: Mapping[str, float], metric: str) -> dict[str, int]:
    return {key: round(value) for key, value in _by_labels(samples, metric).items()}


def _by_labels(samples: Mapping[str, float], metric: str) -> dict[str, float]:
    start = metric + "|"
    return {key[len(start) :].replace("|", "/"): value for key, value in samples.items() if key.startswith(start)}


def _fresh(value: float | None, reading: _Reading, at: float) -> float | None:
    """A rate of a while ago says nothing of now."""
    return None if reading.at is None or at - reading.at > _STALE_RATE_S else value


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST <= value <= _MOST:
        return None
    return float(value)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and -_MOST <= value <= _MOST else None


def _rounded(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else round(number)
