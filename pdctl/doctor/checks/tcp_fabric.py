"""FAB030: TCP as a fabric. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pdctl.doctor.checks.per_host import all_of, each_host, on_fabric, with_accelerator
from pdctl.doctor.checks.wording import listing
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, RdmaFacts
from pdctl.doctor.findings import Check, Result, Severity, failed


def _trying(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    active = [
        device.name
        for device in rdma.devices
        if device.driver and any(port.state.upper() == "ACTIVE" for port in device.ports)
    ]
    unused = f"RDMA devices that are not used: {listing(active)}" if active else "no RDMA device here"
    yield failed(
        facts.host,
        message="push over TCP is for trying: KV is copied through the host's memory and the kernel",
        evidence=f"accelerator: {context.spec.accelerator}; {unused}",
        fix="set `fabric` to what the host has (efa, infiniband, roce)"
        if active
        else "nothing, if trying is what you do",
    )


CHECKS: tuple[Check, ...] = (
    Check(
        id="FAB030",
        title="A fabric faster than TCP",
        severity=Severity.INFO,
        what="Clusters with accelerators on `fabric: tcp`.",
        why="Over TCP push works and is right, at tens of MB/s to a few GB/s per connection, against tens of GB/s by "
        "RDMA; the time to the first token of long prompts is mostly transfer.",
        fix="`fabric: efa`, `infiniband` or `roce` where the hosts have it.",
        run=each_host("rdma", _trying, applies=all_of(on_fabric("tcp"), with_accelerator("cuda", "neuron"))),
    ),
)
