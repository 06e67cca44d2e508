"""Facts of healthy hosts for a cluster file, and ways to spoil them one at a time."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from pdctl.doctor.context import Context
from pdctl.doctor.facts import (
    GpuFacts,
    HostFacts,
    InterfaceFacts,
    InterpreterFacts,
    KernelSettings,
    MemoryFacts,
    ModelFacts,
    NetworkView,
    NixlFacts,
    NvidiaFacts,
    PlannedPort,
    RouteFacts,
)
from pdctl.doctor.findings import Check, Finding, Severity, Verdict, run_check
from pdctl.doctor.network_facts import NetworkFacts, PathMtu, Reach
from pdctl.doctor.probe_facts import ProbeFacts, ProbeResult
from pdctl.plan import ClusterPlan
from tests.support.plans import changed, planned

GIB = 2**30

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_scaling": None,
    "transformers_version": "4.51.0",
}
"""config.json of Qwen/Qwen3-32B, what matters of it."""
WEIGHTS = 65_524_246_528
"""Bytes of its weights."""

PACKAGES = {
    "vllm": "0.32.0",
    "nixl": "1.5.1",
    "nixl-cu12": "1.5.1",
    "torch": "2.13.0+cu129",
    "transformers": "5.5.0",
    "msgspec": "0.23.0",
    "prometheus-client": "0.24.0",
    "vllm-router": "0.1.17",
}


def cluster(**sections: Any) -> dict[str, Any]:
    """A cluster file as values: one prefill host p1, one decode host d1, IP addresses; sections are added to."""
    data = changed(
        python="/opt/vllm/bin/python",
        prefill={"hosts": [{"name": "p1", "address": "10.0.0.1"}]},
        decode={"hosts": [{"name": "d1", "address": "10.0.0.2"}]},
    )
    for name, value in sections.items():
        data[name] = {**data[name], **value} if isinstance(data.get(name), dict) else value
    return data


def nixl(**fields: Any) -> NixlFacts:
    """NIXL as it should be."""
    values: dict[str, Any] = {
        "version": "1.5.1",
        "plugins": ("UCX", "LIBFABRIC"),
        "libfabric_path": "/opt/amazon/efa/lib/libfabric.so.1",
    }
    return NixlFacts(**{**values, **fields})


def interpreter(python: str = "/opt/vllm/bin/python", **fields: Any) -> InterpreterFacts:
    """A Python as it should be; ``packages`` are added to the usual ones, None takes one away."""
    packages = {**PACKAGES, **fields.pop("packages", {})}
    values: dict[str, Any] = {
        "python": python,
        "ok": True,
        "path": python,
        "version": "3.12.4",
        "packages": {name: version for name, version in packages.items() if version is not None},
        "nixl": nixl(),
    }
    return InterpreterFacts(**{**values, **fields})


def model(**fields: Any) -> ModelFacts:
    """The model as it should be; ``config`` is added to the usual one."""
    values: dict[str, Any] = {
        "found": "cache",
        "path": "/home/u/.cache/huggingface/hub/models--Qwen--Qwen3-32B/snapshots/9216db5",
        "revision": "9216db5",
        "config": {**CONFIG, **fields.pop("config", {})},
        "weights_bytes": WEIGHTS,
        "weights_complete": True,
    }
    return ModelFacts(**{**values, **fields})


def gpus(memory_bytes: int = 143771 * 2**20, name: str = "NVIDIA H200", count: int = 8, **fields: Any) -> NvidiaFacts:
    """A host with GPUs."""
    found = tuple(GpuFacts(index=index, name=name, memory_bytes=memory_bytes) for index in range(count))
    return NvidiaFacts(**{"present": True, "driver_version": "580.95.05", "gpus": found, **fields})


def network(address: str, peers: tuple[str, ...], *, mtu: int = 9001, speed_mbps: int | None = None) -> NetworkView:
    """A host with one interface and a route by it to each peer."""
    return NetworkView(
        interfaces=(
            InterfaceFacts(name="lo", mtu=65536, up=True, addresses=("127.0.0.1/8",)),
            InterfaceFacts(name="ens5", mtu=mtu, up=True, addresses=(f"{address}/24",), speed_mbps=speed_mbps),
        ),
        routes=tuple(RouteFacts(address=peer, interface="ens5", source=address, mtu=mtu) for peer in peers),
    )


def host(plan: ClusterPlan, name: str) -> HostFacts:
    """Facts of a healthy host of a plan."""
    instances = [instance for instance in plan.instances if instance.host == name]
    addresses = [instance.address for instance in plan.instances]
    own = instances[0].address
    peers = tuple(dict.fromkeys(address for address in addresses if address != own))
    return HostFacts(
        host=name,
        interpreters=tuple(interpreter(python) for python in dict.fromkeys(one.argv[0] for one in instances)),
        model=model(),
        nvidia=gpus() if plan.spec.accelerator == "cuda" else NvidiaFacts(present=False),
        memory=MemoryFacts(total_bytes=2048 * GIB, available_bytes=2000 * GIB),
        kernel=KernelSettings(ip_local_port_range=(32768, 60999)),
        network=network(own, peers),
        ports=tuple(
            PlannedPort(port=use.port, address=use.address, purpose=use.purpose, free=True)
            for one in instances
            for use in one.ports
        ),
        environment={},
    )


def context(data: dict[str, Any] | None = None, **fields: Any) -> Context:
    """A healthy cluster."""
    plan, facts = _healthy(json.dumps(data or cluster(), sort_keys=True))
    return Context(plan, facts, **fields)


@functools.lru_cache(maxsize=512)
def _healthy(data: str) -> tuple[ClusterPlan, Mapping[str, HostFacts]]:
    """Everything in it is frozen, so it can be shared; making it anew for each test takes long."""
    plan = planned(json.loads(data))
    return plan, {name: host(plan, name) for name in plan.hosts}


def spoiled(given: Context, name: str, **parts: Any) -> Context:
    """The same with other parts of one host's facts."""
    facts = {**given.facts, name: dataclasses.replace(given.facts[name], **parts)}
    return dataclasses.replace(given, facts=facts)


def everywhere(given: Context, **parts: Any) -> Context:
    """The same with other parts of every host's facts."""
    for name in given.facts:
        given = spoiled(given, name, **parts)
    return given


def without(given: Context, part: str, reason: str = "it took too long") -> Context:
    """The same with a part that no host reported."""
    return everywhere(given, **{part: None, "missing": {part: reason}})


def unreachable(given: Context, name: str) -> Context:
    """The same with a host that has no facts."""
    return dataclasses.replace(given, facts={host: facts for host, facts in given.facts.items() if host != name})


def with_network(
    given: Context, outcome: str = "open", *, change: Callable[[Reach], Reach] = lambda one: one
) -> Context:
    """The same with every pair's ports opened, all with one outcome, or changed one by one."""
    reaches = []
    mtus = []
    for first, second in given.pairs():
        for source, target in ((first, second), (second, first)):
            for instance in given.instances_on(target):
                for use in instance.ports:
                    reach = Reach(source, target, instance.address, use.port, use.purpose, outcome)
                    reaches.append(change(reach))
            address = next(one.address for one in given.plan.instances if one.host == target)
            mtus.append(PathMtu(source, target, address, 9001, 9001))
    return dataclasses.replace(given, network=NetworkFacts(tuple(reaches), tuple(mtus)))


def probe(given: Context, **fields: Any) -> Context:
    """The same with every pair probed."""
    values: dict[str, Any] = {
        "ok": True,
        "stage": "done",
        "backend": "UCX",
        "transport": "tcp",
        "transport_evidence": "counters of ens5 moved",
        "memory": "host",
        "block_bytes": 262144,
        "block_p50_us": 210.0,
        "block_p99_us": 330.0,
        "batch_bytes": 256 * 10**6,
        "bandwidth_mb_s": 1180.0,
        "notification_us": 95.0,
    }
    results = tuple(ProbeResult(*pair, **{**values, **fields}) for pair in given.pairs())
    return dataclasses.replace(given, probe=ProbeFacts(results))


def findings(checks: tuple[Check, ...], check_id: str, given: Context) -> list[Finding]:
    """What one check says. A check that fails itself fails the test."""
    check = next(check for check in checks if check.id == check_id)
    found = list(run_check(check, given))
    for one in found:
        assert "bug of pdctl" not in one.message, one.evidence
        assert all(name in given.plan.hosts for name in one.hosts), one
        if one.verdict is Verdict.FAIL:
            assert one.message, one
            assert one.fix, one
    return found


def verdicts(checks: tuple[Check, ...], check_id: str, given: Context) -> dict[tuple[str, ...], str]:
    """Verdict by hosts: ``pass``, ``skipped``, or the severity of a failure; the worst one of several."""
    order = ["pass", "skipped", "info", "warning", "error"]
    worst: dict[tuple[str, ...], str] = {}
    for one in findings(checks, check_id, given):
        word = one.severity.value if one.verdict is Verdict.FAIL else one.verdict.value
        worst[one.hosts] = max(worst.get(one.hosts, "pass"), word, key=order.index)
    return worst


def failure(checks: tuple[Check, ...], check_id: str, given: Context) -> Finding:
    """The only failure of a check."""
    found = [one for one in findings(checks, check_id, given) if one.verdict is Verdict.FAIL]
    assert len(found) == 1, found
    return found[0]


def all_pass(checks: tuple[Check, ...], given: Context) -> Mapping[str, list[Finding]]:
    """Failures and skips by check id; empty when everything is fine."""
    bad: dict[str, list[Finding]] = {}
    for check in checks:
        for one in findings(checks, check.id, given):
            if one.verdict is not Verdict.PASS:
                bad.setdefault(check.id, []).append(one)
    return bad


ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO
