"""Everything that the checks may look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pdctl.doctor.aws_facts import AwsFacts
from pdctl.doctor.facts import HostFacts
from pdctl.doctor.network_facts import NetworkFacts
from pdctl.doctor.probe_facts import ProbeFacts
from pdctl.errors import PdctlError
from pdctl.plan import ClusterPlan, InstancePlan
from pdctl.spec import ClusterSpec


@dataclass(frozen=True)
class Context:
    """Facts of all hosts, the cluster file, and what the network, the probe and AWS said.

    Attributes:
        plan: the plan; its ``spec`` is the cluster file.
        facts: by host name; a host that could not be reached is not in it.
        unreachable: why a host has no facts, by host name.
        network: ports really opened between the hosts; None if that was not tried.
        probe: NIXL WRITEs really made; None if that was not tried.
        aws: answers of the EC2 API; None if it was not asked.
        probe_skipped: why there is no probe, in words; empty if there is one.
        aws_skipped: why EC2 was not asked, in words; empty if it was.
    """

    plan: ClusterPlan
    facts: Mapping[str, HostFacts]
    unreachable: Mapping[str, PdctlError] = field(default_factory=dict)
    network: NetworkFacts | None = None
    probe: ProbeFacts | None = None
    aws: AwsFacts | None = None
    probe_skipped: str = ""
    aws_skipped: str = ""

    @property
    def spec(self) -> ClusterSpec:
        """The cluster file."""
        return self.plan.spec

    @property
    def vllm_hosts(self) -> tuple[str, ...]:
        """Names of the hosts that run prefill or decode, in order, each once."""
        return tuple(dict.fromkeys(instance.host for instance in (*self.plan.prefill, *self.plan.decode)))

    def instances_on(self, host: str) -> tuple[InstancePlan, ...]:
        """The instances planned for a host, the router too."""
        return tuple(instance for instance in self.plan.instances if instance.host == host)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Each pair of a prefill host and a decode host between which KV travels, once."""
        seen = set()
        for prefill in self.plan.prefill:
            for decode in self.plan.decode:
                if (prefill.host, decode.host) not in seen:
                    seen.add((prefill.host, decode.host))
                    yield prefill.host, decode.host
