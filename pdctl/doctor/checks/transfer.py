"""Real NIXL WRITEs between the hosts: whether they work, what they travelled on, and how fast. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdctl.doctor.context import Context
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.instance_table import lookup
from pdctl.doctor.probe_facts import ProbeFacts, ProbeResult
from pdctl.doctor.role_options import backends

_TCP = ("tcp", "sockets")
_ONE_HOST = ("shm", "cma", "sysv", "posix", "self", "cuda_ipc", "knem", "xpmem")
"""What UCX calls ways that do not leave a host."""


@dataclass(frozen=True)
class _Stage:
    """A step of the probe: what failed, and what to do."""

    text: str
    fix: str


_STAGES = {
    "start": _Stage(
        "the probe could not be started", "see the evidence: the Python of the cluster file must run (SW001)"
    ),
    "import": _Stage("NIXL cannot be imported", "see SW005: NIXL, or a library that it needs, is missing"),
    "backend": _Stage(
        "NIXL cannot make its backend",
        "see SW008 for its plugin, and FAB for the devices; on efa the plugin ends when libfabric finds no EFA device",
    ),
    "register": _Stage(
        "memory cannot be registered",
        "check the limit of locked memory (`ulimit -l` must be unlimited), and for GPU memory the peer memory module "
        "or dmabuf; accelerator memory needs a free device",
    ),
    "handshake": _Stage(
        "the two sides do not find each other",
        "check NET for the ports; on efa the security group must let all traffic in from itself and out to itself "
        "(SG), and both sides need the same NIXL and libfabric",
    ),
    "write": _Stage(
        "the WRITE fails",
        "on efa: security group rules by group id in both directions (SG), one availability zone, an instance type "
        "with RDMA WRITE; on InfiniBand and RoCE: ports up, the right GID, the same MTU (FAB)",
    ),
    "verify": _Stage(
        "the bytes that arrived are not those that were sent",
        "do not serve over this path. Look for mixed versions of NIXL, libfabric and the driver, and report it to NIXL",
    ),
    "notify": _Stage(
        "the bytes arrive, but not the notification",
        "the same NIXL is needed on both sides; a notification that is lost leaves decode waiting",
    ),
    "timeout": _Stage(
        "the WRITE does not complete in time",
        "packets are lost without an error: security group (SG) on efa, else firewall, MTU (NET010), or a GID that is "
        "not routed (FAB)",
    ),
}


def _results(context: Context) -> tuple[ProbeResult, ...]:
    return context.probe.results if context.probe is not None else ()


def _no_probe(context: Context) -> Iterator[Result]:
    """The finding of every check here when nothing was probed."""
    if context.probe is None:
        reason = context.probe_skipped or "no WRITE was made in this run"
        yield skipped(message=f"not checked: {reason}")


def _figures(one: ProbeResult) -> str:
    """Bandwidth and latency, for people."""
    parts = []
    if one.bandwidth_mb_s is not None:
        parts.append(f"{one.bandwidth_mb_s / 1000:.2f} GB/s")
    if one.block_p50_us is not None:
        block = f" of {one.block_bytes / 1024:.0f} KiB" if one.block_bytes else ""
        tail = f" (p99 {one.block_p99_us:.0f} us)" if one.block_p99_us is not None else ""
        parts.append(f"{one.block_p50_us:.0f} us per block{block}{tail}")
    if one.notification_us is not None:
        parts.append(f"notification {one.notification_us:.0f} us there and back")
    return ", ".join(parts) or "no figures"


def _last_lines(one: ProbeResult) -> str:
    lines = [line.strip() for line in one.log.splitlines() if line.strip()]
    return " | ".join(lines[-3:])


# --- XFER001


def _write_works(context: Context) -> Iterator[Result]:
    yield from _no_probe(context)
    if context.probe is None:
        return
    for one in context.probe.results:
        if one.ok:
            way = one.transport or one.backend or "an unknown transport"
            memory = f" from {one.memory} memory" if one.memory else ""
            yield passed(
                one.prefill,
                one.decode,
                message=f"a WRITE over {way} arrives: {_figures(one)}",
                evidence=f"{one.backend}{memory}; {one.transport_evidence}".strip("; "),
            )
            continue
        stage = _STAGES.get(
            one.stage, _Stage(f"the probe failed at {one.stage or 'an unknown step'}", "see the evidence")
        )
        evidence = "; ".join(part for part in (one.error, _last_lines(one)) if part)
        yield failed(one.prefill, one.decode, message=f"no WRITE: {stage.text}", evidence=evidence, fix=stage.fix)
    yield from _left_out(context, context.probe)


def _left_out(context: Context, probe: ProbeFacts) -> Iterator[Result]:
    done = {(one.prefill, one.decode) for one in probe.results}
    for pair in dict.fromkeys((*probe.not_probed, *context.pairs())):
        if pair in done:
            continue
        if pair in probe.not_probed:
            yield skipped(*pair, message="not probed: only some of the pairs were chosen (--probe-pairs)")
        else:
            yield skipped(*pair, message="not probed: a host of the pair told no facts, or runs no NIXL")


# --- XFER002


def _transport_is_fabric(context: Context) -> Iterator[Result]:
    fabric = context.spec.fabric
    if fabric == "tcp":
        return
    yield from _no_probe(context)
    for one in _results(context):
        if not one.ok or one.prefill == one.decode:
            continue
        transport = one.transport.lower().strip()
        evidence = (
            one.transport_evidence or f"backend {one.backend or 'unknown'}, transport {one.transport or 'unknown'}"
        )
        if not transport:
            yield skipped(
                one.prefill, one.decode, message="what the WRITE travelled on is not known", evidence=evidence
            )
        elif set(_words(transport)) <= set(_TCP):
            yield failed(
                one.prefill,
                one.decode,
                message=f"the WRITE went over TCP, although the fabric is {fabric}: 10 to 100 times slower",
                evidence=evidence,
                fix=_over_tcp(context, one),
            )
        elif "emulated" in transport:
            yield failed(
                one.prefill,
                one.decode,
                message=f"the WRITE was emulated ({one.transport}), without RDMA WRITE of the device: slower, more CPU",
                evidence=evidence,
                fix=_emulated(fabric),
                severity=Severity.WARNING,
            )
        elif fabric == "efa" and "efa" not in transport:
            yield failed(
                one.prefill,
                one.decode,
                message=f"the WRITE went over {one.transport}, although the fabric is efa",
                evidence=evidence,
                fix=_over_tcp(context, one),
            )
        elif set(_words(transport)) & set(_TCP):
            yield failed(
                one.prefill,
                one.decode,
                message=f"a part of the WRITE went over TCP ({one.transport}), although the fabric is {fabric}",
                evidence=evidence,
                fix=_over_tcp(context, one),
                severity=Severity.WARNING,
            )
        elif _words(transport)[0] in _ONE_HOST:
            yield failed(
                one.prefill,
                one.decode,
                message=f"the WRITE never left the machine ({one.transport}): the two hosts are one",
                evidence=evidence,
                fix="check the names and addresses in the cluster file",
                severity=Severity.WARNING,
            )
        else:
            yield passed(one.prefill, one.decode, message=f"the WRITE went over {one.transport}", evidence=evidence)


def _words(transport: str) -> list[str]:
    return transport.replace("/", " ").replace(",", " ").replace("+", " ").split() or [""]


def _emulated(fabric: str) -> str:
    if fabric == "efa":
        return (
            "use an instance type with RDMA WRITE (p5, p5e, p5en, p6, trn1, trn2; not p4d), the same EFA driver and "
            "libfabric on both sides, and do not set FI_EFA_USE_DEVICE_RDMA=0"
        )
    return (
        "see ACC for peer memory or dmabuf, without which GPU memory is copied through the host, and `ucx_info -d` for "
        "a transport with RDMA (rc or dc)"
    )


def _over_tcp(context: Context, one: ProbeResult) -> str:
    if context.spec.fabric == "efa":
        if one.backend and one.backend != "LIBFABRIC":
            return "use LIBFABRIC: `transfer: {extra: {backends: [LIBFABRIC]}}`, as pdctl does by itself on efa"
        return "see FAB: libfabric offers no EFA device here. Leave FI_PROVIDER=efa set, with which this fails at start"
    return (
        "see FAB for ports and GIDs, and whether UCX has RDMA (`ucx_info -d` must list rc or dc transports); "
        "UCX_TLS=^tcp, which pdctl sets, makes this an error at start"
    )


# --- XFER003


_LOW = 0.25
"""Below this share of what one network card can do a bandwidth is called low: a probe is one process on one device."""
_TCP_ENOUGH_MB_S = 1000.0
"""What one TCP connection brings at the least on fast networks; more is not expected of it."""


def _bandwidth(context: Context) -> Iterator[Result]:
    yield from _no_probe(context)
    for one in _results(context):
        if not one.ok or one.bandwidth_mb_s is None:
            continue
        expected = _expected(context, one)
        if expected is None:
            yield passed(
                one.prefill,
                one.decode,
                message=f"{_figures(one)}; what to expect here is not known",
                evidence=one.transport_evidence,
            )
            continue
        rate, source, severity = expected
        evidence = f"{source}: {rate / 1000:.2f} GB/s; batch of {(one.batch_bytes or 0) / 10**6:.0f} MB"
        if one.bandwidth_mb_s < _LOW * rate:
            yield failed(
                one.prefill,
                one.decode,
                message=(
                    f"WRITE brings {one.bandwidth_mb_s / 1000:.2f} GB/s, less than {_LOW:.0%} of what one card can do "
                    f"({rate / 1000:.2f} GB/s)"
                ),
                evidence=evidence,
                fix=(
                    "look for traffic of others, a wrong interface (NET005), an MTU of 1500, a GPU far from its "
                    "network card (`nvidia-smi topo -m`), or emulation (XFER002); probe again when the hosts are idle"
                ),
                severity=severity,
            )
        else:
            yield passed(one.prefill, one.decode, message=_figures(one), evidence=evidence)


def _expected(context: Context, one: ProbeResult) -> tuple[float, str, Severity] | None:
    """What one network card of the slower host can do, in MB/s; where that is from; how bad less of it is."""
    if one.prefill == one.decode:
        return None
    rates = [_rate(context, host) for host in (one.prefill, one.decode)]
    known = [rate for rate in rates if rate is not None]
    if not known:
        return None
    rate, source = min(known)
    if context.spec.fabric == "tcp":
        # One connection does not fill a fast network, so this is no fault.
        return min(rate, _TCP_ENOUGH_MB_S), source, Severity.INFO
    return rate, source, Severity.WARNING


def _rate(context: Context, host: str) -> tuple[float, str] | None:
    facts = context.facts.get(host)
    if facts is None:
        return None
    if context.spec.fabric == "efa":
        type_name = facts.cloud.instance_type or facts.cloud.product if facts.cloud is not None else ""
        known = lookup(type_name) if type_name else None
        if known is None or not known.efa_interfaces or not known.gbps:
            return None
        return known.gbps / known.efa_interfaces * 125.0, f"one EFA of {type_name}"
    if context.spec.fabric in ("infiniband", "roce"):
        devices = facts.rdma.devices if facts.rdma is not None else ()
        ports = [port for device in devices for port in device.ports if port.state == "ACTIVE" and port.rate_gbps]
        # The slowest: which one is taken is not known, and on-board cards are slower than those for the fabric.
        rate = min((port.rate_gbps for port in ports if port.rate_gbps), default=None)
        return None if rate is None else (rate * 125.0, f"slowest active RDMA port of {host}")
    return _line_speed(context, host)


def _line_speed(context: Context, host: str) -> tuple[float, str] | None:
    facts = context.facts.get(host)
    if facts is None or facts.network is None:
        return None
    used = {route.interface for route in facts.network.routes if route.interface and not route.error}
    speeds = {one.name: one.speed_mbps for one in facts.network.interfaces if one.name in used and one.speed_mbps}
    if not speeds:
        return None
    name, speed = min(speeds.items(), key=lambda item: item[1])
    return speed / 8.0, f"{name} of {host}"


# --- XFER004


def _all_alike(context: Context) -> Iterator[Result]:
    yield from _no_probe(context)
    results = [one for one in _results(context) if one.ok and one.prefill != one.decode]
    if not results:
        return
    expected = backends(context.spec)
    other = [one for one in results if one.backend and one.backend not in expected]
    for one in other:
        yield failed(
            one.prefill,
            one.decode,
            message=f"the WRITE used NIXL's backend {one.backend}, but the instances will use {' or '.join(expected)}",
            evidence=one.transport_evidence,
            fix="see SW008: the plugin for the backend of this cluster has to load on both hosts",
        )
    ways = {f"{one.backend} over {one.transport}" for one in results if one.backend and one.transport}
    if len(ways) > 1:
        hosts = dict.fromkeys(host for one in results for host in (one.prefill, one.decode))
        yield failed(
            *hosts,
            message="not all pairs use the same transport: some transfers will be slower than others",
            evidence="; ".join(sorted(ways)),
            fix="compare the hosts' RDMA devices, NIXL and UCX or libfabric (FAB, SW)",
            severity=Severity.WARNING,
        )
    elif ways and not other:
        hosts = dict.fromkeys(host for one in results for host in (one.prefill, one.decode))
        yield passed(*hosts, message="all probed pairs use the same backend and transport", evidence=next(iter(ways)))


CHECKS: tuple[Check, ...] = (
    Check(
        id="XFER001",
        title="A NIXL WRITE arrives",
        severity=Severity.ERROR,
        what=(
            "For each pair of a prefill and a decode host (or as many as --probe-pairs says) NIXL registers memory on "
            "both, writes blocks as large as this model's KV blocks, checks every byte, and sends a notification."
        ),
        why="It is what push mode does for each request. If it fails here, every request fails or hangs.",
        fix="By the step that failed: the finding says where to look.",
        run=_write_works,
        sources=("https://github.com/ai-dynamo/nixl",),
    ),
    Check(
        id="XFER002",
        title="The WRITE travels on the fabric",
        severity=Severity.ERROR,
        what=(
            "On efa, infiniband and roce: what the bytes really travelled on, by counters of the devices and by NIXL's "
            "log. TCP is an error. On efa a WRITE that libfabric emulates is a warning."
        ),
        why=(
            "Both LIBFABRIC and UCX fall back to TCP without an error: everything works, and the first token takes "
            "seconds instead of milliseconds."
        ),
        fix="Make the RDMA devices usable (area FAB), and leave FI_PROVIDER=efa or UCX_TLS=^tcp as pdctl sets them.",
        run=_transport_is_fabric,
        sources=(
            "https://github.com/ai-dynamo/nixl/issues/909",
            "https://github.com/ai-dynamo/dynamo/issues/4185",
        ),
    ),
    Check(
        id="XFER003",
        title="WRITE is as fast as the network",
        severity=Severity.WARNING,
        what=(
            f"The bandwidth of a large batch is at least {_LOW:.0%} of one network card of the slower host (one EFA of "
            "the instance type, the slowest active RDMA port, the interface's speed). Over TCP no more than "
            f"{_TCP_ENOUGH_MB_S / 1000:g} GB/s is expected, and less is only an info."
        ),
        why="The KV cache of a long prompt is gigabytes; the first token waits for it.",
        fix="Look for other traffic, a small MTU, a wrong interface, a GPU far from its network card.",
        run=_bandwidth,
    ),
    Check(
        id="XFER004",
        title="All pairs use the same backend and transport",
        severity=Severity.ERROR,
        what="The backend of the probe is the one that the instances will use, and all pairs use the same transport.",
        why="Two sides with different backends do not understand each other; a slower pair slows its requests.",
        fix="Set up the hosts alike.",
        run=_all_alike,
        sources=("https://github.com/ai-dynamo/nixl/issues/1161",),
    ),
)
