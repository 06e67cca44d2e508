"""What a host is asked to look at: the request of ``pdctl/node/watch_facts.py``. Pure."""

from __future__ import annotations

from typing import Any

from pdctl.plan import ClusterPlan, InstancePlan

READING_TIMEOUT_S = 2.0
"""Deadline of each reading on the node. A healthy answer takes milliseconds."""

METRICS_PACE = 2
"""Ticks between readings of ``/metrics``: making that text takes time in the process that is watched."""

SLOW_S = 5.0
"""Seconds between looks at what takes many small reads: all processes, RDMA counters."""

REQUESTS_RUNNING = "vllm:num_requests_running"
REQUESTS_WAITING = "vllm:num_requests_waiting"
KV_USE = "vllm:kv_cache_usage_perc"
REQUESTS_ENDED = "vllm:request_success_total"
TTFT = "vllm:time_to_first_token_seconds_bucket"
TPOT = "vllm:request_time_per_output_token_seconds_bucket"
FAILED_TRANSFERS = "vllm:nixl_num_failed_transfers_total"
DESCRIPTORS = "pdctl_descriptors_total"
POSTED_BYTES = "pdctl_transfer_bytes_total"
NOTIFICATIONS = "pdctl_notifications_total"
INFLIGHT = "pdctl_transfers_inflight"
OLDEST = "pdctl_transfer_oldest_seconds"
STAGE_SECONDS = "pdctl_transfer_stage_seconds_bucket"
ROUTED = ("vllm_router_pd_requests_total", "vllm_router_requests_total")
"""The router's counts of requests; the first that it has is taken."""

WANTED: dict[str, dict[str, list[str]]] = {
    "vllm": {
        REQUESTS_RUNNING: ["sum"],
        REQUESTS_WAITING: ["sum"],
        KV_USE: ["max"],
        REQUESTS_ENDED: ["sum"],
        TTFT: ["sum", "le"],
        TPOT: ["sum", "le"],
        FAILED_TRANSFERS: ["sum"],
    },
    "router": {name: ["sum"] for name in ROUTED},
    "rank": {
        DESCRIPTORS: ["sum", "state"],
        POSTED_BYTES: ["sum"],
        NOTIFICATIONS: ["sum", "kind", "direction", "result"],
        INFLIGHT: ["sum", "side", "stage"],
        OLDEST: ["max", "side", "stage"],
        STAGE_SECONDS: ["sum", "side", "stage", "le"],
    },
}
"""Samples to read: how those of several engines become one, and the labels that are kept."""

# Bound to all addresses, a server is reached at loopback.
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def host_request(plan: ClusterPlan, host: str, *, interval_s: float) -> dict[str, Any]:
    """The request for one host.

    Args:
        plan: the cluster.
        host: whose instances are looked at.
        interval_s: seconds between lines.
    """
    instances = [instance for instance in plan.instances if instance.host == host]
    return {
        "interval_s": interval_s,
        "timeout_s": READING_TIMEOUT_S,
        "metrics_pace": METRICS_PACE,
        "slow_pace": max(1, round(SLOW_S / interval_s)),
        "cluster": plan.spec.cluster,
        "addresses": list(dict.fromkeys(instance.address for instance in instances)),
        "instances": [_instance(instance) for instance in instances],
        "metrics": WANTED,
    }


def _instance(instance: InstancePlan) -> dict[str, Any]:
    telemetry = [use for use in instance.ports if use.purpose == "telemetry"]
    own = next((use for use in instance.ports if use.purpose == "metrics"), None)
    return {
        "name": instance.name,
        "role": instance.role,
        "address": instance.address,
        "port": instance.port,
        "metrics_address": instance.address if own is None else _reachable(own.address),
        "metrics_port": instance.port if own is None else own.port,
        "ranks": [
            {"rank": rank, "address": _reachable(use.address), "port": use.port} for rank, use in enumerate(telemetry)
        ],
    }


def _reachable(address: str) -> str:
    return _ANY.get(address, address)
