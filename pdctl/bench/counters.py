"""What the instances counted while a cell was measured: two readings of their metrics, and what came between. Pure.

A counter that went down, or a process that began anew, means a restart: what was counted before it is lost, so nothing
is said of that role, and the reader is told. *Missing is not zero*: a metric that nobody shows is None.

Names and meaning of vLLM's metrics: vllm/v1/metrics/loggers.py and .../kv_connector/v1/nixl/stats.py of vLLM 0.32.
Those of pdctl's connector: docs/connector.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdctl.prometheus_text import read_samples

METRICS_LIMIT = 16 << 20
"""Most bytes of an exposition that are looked at. vLLM's has some 60 kB for each engine."""

PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""Where vLLM says that prompt tokens came from."""

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels, in order."""

Scrape = Mapping[Series, float]
"""What one process showed, of the metrics that are read here."""

_PROCESS_START = "process_start_time_seconds"
_QUEUE = "vllm:request_queue_time_seconds"
_PREFILL = "vllm:request_prefill_time_seconds"
_FIRST = "vllm:time_to_first_token_seconds"
_TRANSFER = "vllm:nixl_xfer_time_seconds"
_BYTES = "vllm:nixl_bytes_transferred"
_HISTOGRAMS = (_QUEUE, _PREFILL, _FIRST, _TRANSFER, _BYTES)
_FAILED = "vllm:nixl_num_failed_transfers_total"
_EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_TRANSFERS = "pdctl_transfers_total"
_ROUTED = "vllm_router_pd_requests_total"
_NAMES = frozenset(
    {
        _PROCESS_START,
        *(f"{name}_{part}" for name in _HISTOGRAMS for part in ("sum", "count")),
        _FAILED,
        _EXPIRED,
        _PROMPT_TOKENS,
        _TRANSFERS,
        _ROUTED,
    }
)


@dataclass(frozen=True)
class Total:
    """What a histogram gained: how many observations, and their sum."""

    count: int
    sum: float

    @property
    def mean(self) -> float | None:
        """Mean of the observations; None if there was none."""
        return self.sum / self.count if self.count else None


@dataclass(frozen=True)
class RoleCounters:
    """What the vLLM instances of one role counted during a cell, together. None: not known.

    Attributes:
        queue: seconds from a request's coming to its being scheduled, by request that ended. On decode it ends only
            when the KV is there, since a request that waits for KV is not scheduled before.
        prefill: seconds from being scheduled to the first token, by request that ended.
        first_token: seconds from a request's coming to its first token, by first token.
        transfer: seconds of NIXL transfers, from being posted to being seen complete; one for each rank of a request.
        bytes: of the same transfers.
        failed: transfers, handshakes and notifications that failed.
        expired: requests whose KV was given up since nobody came for it.
        prompt_tokens: by source, see :data:`PROMPT_SOURCES`. A prompt whose KV was transferred whole counts as such
            with all its tokens, although decode computes the last one again.
    """

    queue: Total | None = None
    prefill: Total | None = None
    first_token: Total | None = None
    transfer: Total | None = None
    bytes: Total | None = None
    failed: int | None = None
    expired: int | None = None
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Counters:
    """What all instances counted during a cell.

    Attributes:
        prefill: the prefill instances.
        decode: the decode instances.
        outcomes: transfers that ended in the ledgers of pdctl's connector, over all ranks, by side and outcome; None if
            not known.
        routed: requests that the router passed on; None if not known.
    """

    prefill: RoleCounters = field(default_factory=RoleCounters)
    decode: RoleCounters = field(default_factory=RoleCounters)
    outcomes: Mapping[tuple[str, str], int] | None = None
    routed: int | None = None


@dataclass(frozen=True)
class Gain:
    """What processes counted between two readings.

    Attributes:
        increments: by series; None if that is not known of all of them.
        trouble: why not, one sentence for each process.
    """

    increments: Scrape | None
    trouble: tuple[str, ...] = ()


def read_scrape(body: bytes | None) -> Scrape | None:
    """Read an exposition.

    Args:
        body: what was answered; None if nothing was.

    Returns:
        the metrics that are known here; None if there was no answer. Lines that make no sense are left out.
    """
    if body is None:
        return None
    scrape: dict[Series, float] = {}
    for sample in read_samples(body[:METRICS_LIMIT].decode("utf-8", "replace"), _NAMES):
        if math.isfinite(sample.value) and sample.value >= 0:
            scrape[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return scrape


def gain(processes: Iterable[tuple[str, Scrape | None, Scrape | None]]) -> Gain:
    """What some processes counted together.

    Args:
        processes: name for people, reading before, reading after.
    """
    increments: dict[Series, float] = {}
    trouble: list[str] = []
    for name, before, after in processes:
        problem = _problem(name, before, after)
        if problem:
            trouble.append(problem)
        elif before is not None and after is not None:
            for series, value in after.items():
                # One that was not shown before had counted nothing: labels appear when they are first used.
                increments[series] = increments.get(series, 0.0) + value - before.get(series, 0.0)
    return Gain(None if trouble else increments, tuple(trouble))


def role_counters(increments: Scrape | None) -> RoleCounters:
    """Read what the vLLM instances of one role gained."""
    if increments is None:
        return RoleCounters()
    tokens = {
        source: round(value)
        for source in PROMPT_SOURCES
        if (value := _sum(increments, _PROMPT_TOKENS, source=source)) is not None
    }
    return RoleCounters(
        queue=_total(increments, _QUEUE),
        prefill=_total(increments, _PREFILL),
        first_token=_total(increments, _FIRST),
        transfer=_total(increments, _TRANSFER),
        bytes=_total(increments, _BYTES),
        failed=_count(increments, _FAILED),
        expired=_count(increments, _EXPIRED),
        prompt_tokens=tokens,
    )


def outcomes(increments: Scrape | None) -> Mapping[tuple[str, str], int] | None:
    """Read how many transfers ended in the ledgers of pdctl's connector, by side and outcome; None if not known."""
    found: dict[tuple[str, str], int] = {}
    for (name, labels), value in (increments or {}).items():
        if name == _TRANSFERS:
            named = dict(labels)
            at = named.get("side", ""), named.get("outcome", "")
            found[at] = found.get(at, 0) + round(value)
    return found or None


def routed(increments: Scrape | None) -> int | None:
    """Read how many completions the router passed on; None if not known.

    It counts every route, and the generator asks once per load how long the server thinks a prompt is (``/tokenize``).
    """
    if increments is None:
        return None
    return _count(
        {at: value for at, value in increments.items() if dict(at[1]).get("route", "").endswith("completions")}, _ROUTED
    )


def _problem(name: str, before: Scrape | None, after: Scrape | None) -> str:
    if before is None or after is None:
        when = "before" if before is None else "after"
        return f"{name} did not answer {when} the cell: what it counted is not known"
    if before and not after:
        return f"{name} answered after the cell without the metrics it had before: what it counted is not known"
    start = (_PROCESS_START, ())
    # A gauge: it tells a restart even if the new process has counted more by now.
    began_anew = start in before and start in after and abs(before[start] - after[start]) > 1
    # A series that is gone is one that went down: an instance shows what it has counted until it ends.
    lost = [at for at, value in before.items() if at[0] != _PROCESS_START and after.get(at, 0.0) < value]
    if began_anew or lost:
        return f"{name} was restarted during the cell: its counters began again, and what it counted is not known"
    return ""


def _sum(increments: Scrape, name: str, **labels: str) -> float | None:
    wanted = labels.items()
    values = [
        value for (found, having), value in increments.items() if found == name and wanted <= dict(having).items()
    ]
    return max(0.0, sum(values)) if values else None


def _count(increments: Scrape, name: str) -> int | None:
    value = _sum(increments, name)
    return None if value is None else round(value)


def _total(increments: Scrape, name: str) -> Total | None:
    count, seconds = _count(increments, f"{name}_count"), _sum(increments, f"{name}_sum")
    return None if count is None or seconds is None else Total(count, seconds)
