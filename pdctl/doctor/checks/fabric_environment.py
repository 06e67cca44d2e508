"""FAB011 to 013 and 015: variables and options that decide what libfabric and NIXL do on EFA. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pdctl.doctor.checks.collected import collect
from pdctl.doctor.checks.efa_facts import efa_devices
from pdctl.doctor.checks.instance_facts import backends_of, environment_of, instance_type, ranks_of
from pdctl.doctor.checks.per_host import hosts_by_value, not_reached, on_fabric
from pdctl.doctor.checks.versions import at_least
from pdctl.doctor.checks.wording import listing
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.plan import InstancePlan

PEERS_MOST = 256
"""Peers of one NIXL LIBFABRIC agent: it numbers them with 8 bits."""

_EFA = on_fabric("efa")
_OFF = frozenset({"0", "no", "false", "off", "n", "f"})
_REMOVED = ("FI_EFA_MTU_SIZE", "FI_EFA_TX_IOV_LIMIT", "FI_EFA_RX_IOV_LIMIT")
_FORK = ("FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE", "IBV_FORK_SAFE")
_NO_EFFECT = {
    "NIXL_BACKEND": "NIXL's backend is chosen by `transfer.extra.backends`",
    "VLLM_NIXL_KVCACHE_BACKEND": "NIXL's backend is chosen by `transfer.extra.backends`",
    "TRTLLM_NIXL_KVCACHE_BACKEND": "it belongs to TensorRT-LLM",
    "SGLANG_DISAGGREGATION_NIXL_BACKEND": "it belongs to SGLang",
}


@dataclass(frozen=True)
class _Trouble:
    """One variable with a value that does harm.

    Attributes:
        setting: ``NAME=value``.
        what: what it does.
        origin: where it comes from.
    """

    setting: str
    what: str
    origin: str


_Variables = Mapping[str, tuple[str, str]]
_Rules = Callable[[Context, HostFacts, _Variables], Iterator[_Trouble]]


def _is_on(variables: _Variables, name: str) -> bool:
    value = variables.get(name, ("", ""))[0].strip().lower()
    return bool(value) and value not in _OFF


def _trouble(variables: _Variables, name: str, what: str) -> _Trouble:
    value, origin = variables[name]
    return _Trouble(f"{name}={value}", what, origin)


def _harmful(context: Context, facts: HostFacts, variables: _Variables) -> Iterator[_Trouble]:
    """Settings with which processes abort, or with which EFA is not used or not natively."""
    for name in _REMOVED:
        if name in variables:
            yield _trouble(variables, name, "was removed from libfabric, which aborts when it is set")
    row = instance_type(facts)
    direct = variables.get("FI_EFA_USE_DEVICE_RDMA", ("", ""))[0].strip().lower()
    if direct in _OFF:
        yield _trouble(variables, "FI_EFA_USE_DEVICE_RDMA", "switches RDMA off, all writes are emulated")
    elif direct and row is not None and row.rdma_read is False:
        yield _trouble(variables, "FI_EFA_USE_DEVICE_RDMA", f"aborts the process, because {row.name} has no RDMA")
    forks = [name for name in _FORK if _is_on(variables, name)]
    if _is_on(variables, "FI_EFA_USE_HUGE_PAGE") and forks:
        yield _trouble(variables, "FI_EFA_USE_HUGE_PAGE", f"aborts the process together with {listing(forks)}")
    if context.spec.accelerator != "cpu" and _is_on(variables, "FI_HMEM_DISABLE_P2P"):
        yield _trouble(variables, "FI_HMEM_DISABLE_P2P", "keeps EFA from accelerator memory")
    provider = variables.get("FI_PROVIDER", ("", ""))[0].strip().lower()
    if provider and not _allows_efa(provider):
        yield _trouble(variables, "FI_PROVIDER", "leaves EFA out")
    interfaces = variables.get("FI_EFA_IFACE", ("", ""))[0]
    known = {device.name for device in efa_devices(facts)}
    named = {name.strip() for name in interfaces.split(",") if name.strip() and name.strip() != "all"}
    if named and known and not named <= known:
        missing = listing(sorted(named - known))
        yield _trouble(variables, "FI_EFA_IFACE", f"names devices that are not there ({missing}), so EFA is not used")


def _allows_efa(provider: str) -> bool:
    names = {name.strip() for name in provider.lstrip("^").split(",")}
    return ("efa" not in names) if provider.startswith("^") else ("efa" in names)


def _doubtful(context: Context, facts: HostFacts, variables: _Variables) -> Iterator[_Trouble]:
    """Settings that do nothing, or that only sometimes do harm."""
    del context
    provider = variables.get("FI_PROVIDER", ("", "pdctl sets it unless the cluster file does"))
    if provider[0].strip().lower().strip(",") != "efa" and (not provider[0] or _allows_efa(provider[0].lower())):
        setting = f"FI_PROVIDER={provider[0]}" if provider[0] else "FI_PROVIDER without a value"
        yield _Trouble(setting, "lets libfabric take TCP without a word when there is no EFA device", provider[1])
    for name, why in _NO_EFFECT.items():
        if name in variables:
            yield _trouble(variables, name, f"does nothing in vLLM ({why})")
    kernel = facts.system.kernel if facts.system is not None else None
    for name in _FORK:
        if _is_on(variables, name) and not _is_on(variables, "FI_EFA_USE_HUGE_PAGE") and at_least(kernel, "5.15"):
            yield _trouble(variables, name, "is not needed from Linux 5.15 on, and can break registrations there")


def _judge(rules: _Rules, message: str, fix: str) -> Callable[[Context], Iterator[Result]]:
    """A check that looks at the environment of each host's instances by some rules."""

    def run(context: Context) -> Iterator[Result]:
        if not _EFA(context):
            return
        for host in context.vllm_hosts:
            # The plan is known even where the host is not: what it sets wrongly is wrong in any case.
            facts = context.facts.get(host) or HostFacts(host)
            found: dict[_Trouble, list[str]] = {}
            for instance in context.instances_on(host):
                if instance.role != "router":
                    for trouble in rules(context, facts, environment_of(facts, instance)):
                        found.setdefault(trouble, []).append(instance.name)
            if found:
                texts = sorted({f"{trouble.setting} {trouble.what}" for trouble in found})
                places: dict[tuple[str, str], list[str]] = {}
                for trouble, on in found.items():
                    places.setdefault((listing(on), trouble.origin), []).append(trouble.setting)
                origins = (f"{on}: {listing(all_)} from {origin}" for (on, origin), all_ in places.items())
                yield failed(
                    host,
                    message=f"{message}: {'; '.join(texts)}",
                    evidence="; ".join(origins),
                    fix=fix,
                )
            elif host not in context.facts:
                yield not_reached(host)
            elif facts.environment is None:
                yield skipped(host, message=f"not checked: {facts.why_missing('environment')}")
            else:
                yield passed(host, message="nothing harmful is set")

    return run


def _differences(variables: Mapping[str, _Variables]) -> Iterator[str]:
    """Variables that both ends of a connection must agree on, with their values, where they do not."""
    name = "FI_EFA_USE_UNSOLICITED_WRITE_RECV"
    values = {instance: one.get(name, ("unset", ""))[0] for instance, one in variables.items()}
    if len(set(values.values())) > 1:
        yield f"{name}: {hosts_by_value(values)}"


def _same_everywhere(context: Context) -> Iterator[Result]:
    if not _EFA(context):
        return
    collected = collect(context, context.vllm_hosts, "environment", lambda facts: facts.environment)
    yield from collected.skipped
    variables: dict[str, _Variables] = {
        instance.name: environment_of(context.facts[host], instance)
        for host in collected.found
        for instance in context.instances_on(host)
        if instance.role != "router"
    }
    differences = list(_differences(variables))
    if differences:
        yield failed(
            message="a setting of libfabric differs between instances, and both ends must agree on it",
            evidence=listing(differences),
            fix="set it in the top `env` of the cluster file (it goes before the logins' environments), or remove it "
            "everywhere: from `env` and from the logins' environments (~/.profile, /etc/environment)",
        )
    elif variables:
        yield passed(message="prefill and decode agree")


def _backends(context: Context) -> Iterator[Result]:
    if not _EFA(context):
        return
    wrong: dict[str, list[str]] = {}
    for instance in (*context.plan.prefill, *context.plan.decode):
        if "LIBFABRIC" not in backends_of(instance):
            wrong.setdefault(listing(backends_of(instance)), []).append(instance.name)
    if wrong:
        yield failed(
            message="NIXL is told to use another backend than LIBFABRIC on EFA",
            evidence="; ".join(f"{backends}: {listing(names)}" for backends, names in wrong.items()),
            fix="set `transfer: {extra: {backends: [LIBFABRIC]}}` in the cluster file, or leave `backends` out; no "
            "variable of the environment chooses it",
        )
    else:
        yield passed(message="NIXL's backend is LIBFABRIC")


def _peers(context: Context) -> Iterator[Result]:
    if not _EFA(context):
        return
    worst = 0
    for own, others in ((context.plan.prefill, context.plan.decode), (context.plan.decode, context.plan.prefill)):
        smallest = min((_tensor(instance) for instance in own), default=1)
        # A rank talks to one rank of every engine of the other side, or to several if that side splits finer.
        worst = max(worst, sum(_engines(one) * max(1, _tensor(one) // smallest) for one in others))
    if worst > PEERS_MOST:
        yield failed(
            message=f"a rank would have {worst} peers; NIXL's LIBFABRIC backend has room for {PEERS_MOST}",
            evidence=f"{len(context.plan.prefill)} prefill and {len(context.plan.decode)} decode instances",
            fix="split the cluster into several, each with a router of its own",
        )
    else:
        yield passed(message="few enough peers for NIXL's LIBFABRIC backend", evidence=f"{worst} of {PEERS_MOST}")


def _engines(instance: InstancePlan) -> int:
    return len(instance.side_channel_ports) or 1


def _tensor(instance: InstancePlan) -> int:
    """Tensor-parallel ranks of one engine, pipeline stages included."""
    return max(1, ranks_of(instance) // _engines(instance))


_LIBFABRIC_EFA = "https://github.com/ofiwg/libfabric/blob/main/man/fi_efa.7.md"
_ENVIRONMENT = "The environment of each instance: the login's on the host, and the cluster file's on top of it."

CHECKS: tuple[Check, ...] = (
    Check(
        id="FAB011",
        title="No variable breaks EFA",
        severity=Severity.ERROR,
        what=f"{_ENVIRONMENT} Harmful: FI_EFA_MTU_SIZE, FI_EFA_TX_IOV_LIMIT, FI_EFA_RX_IOV_LIMIT (removed, libfabric "
        "aborts); FI_EFA_USE_DEVICE_RDMA off, or on where there is no RDMA; FI_EFA_USE_HUGE_PAGE together with a "
        "FORK_SAFE variable; FI_HMEM_DISABLE_P2P with accelerators; FI_PROVIDER without efa; FI_EFA_IFACE with names "
        "that are not there.",
        why="The process aborts when NIXL starts, or KV moves by emulation or not over EFA at all. Device names change "
        "when the installer's rdma-core comes in, so an old FI_EFA_IFACE hides all devices.",
        fix="Remove the variable where it comes from (the report names the place), or override it in `env`.",
        run=_judge(
            _harmful,
            "the environment breaks EFA",
            "remove it where it comes from, or give it another value in `env` of the cluster file",
        ),
        sources=(_LIBFABRIC_EFA,),
        blocking=True,
    ),
    Check(
        id="FAB012",
        title="No variable is misleading",
        severity=Severity.WARNING,
        what=f"{_ENVIRONMENT} FI_PROVIDER must be efa; NIXL_BACKEND and its like do nothing in vLLM; FORK_SAFE "
        "variables are not needed from Linux 5.15 on.",
        why="NIXL's LIBFABRIC backend takes TCP by itself when libfabric offers no EFA device, with a line at level "
        "INFO only; FI_PROVIDER=efa turns that into an error.",
        fix="`FI_PROVIDER: efa` in `env`; remove what does nothing.",
        run=_judge(
            _doubtful,
            "variables mislead",
            "set FI_PROVIDER: efa in `env` if it is named here, and remove the other variables where they come from",
        ),
        sources=(
            _LIBFABRIC_EFA,
            "https://github.com/vllm-project/vllm/issues/41814",
            "https://github.com/ai-dynamo/nixl/blob/main/src/plugins/libfabric/README.md",
        ),
    ),
    Check(
        id="FAB013",
        title="NIXL uses its LIBFABRIC backend on EFA",
        severity=Severity.ERROR,
        what="`backends` in the kv_connector_extra_config of every instance. pdctl sets [LIBFABRIC] on `fabric: efa` "
        "unless the cluster file says otherwise.",
        why="vLLM takes UCX unless told otherwise, and UCX emulates RDMA in software on EFA: seconds for the first "
        "token where LIBFABRIC takes tenths.",
        fix="`transfer: {extra: {backends: [LIBFABRIC]}}`.",
        run=_backends,
        sources=(
            "https://github.com/ai-dynamo/nixl/issues/909",
            "https://github.com/openucx/ucx/issues/10950",
            "https://github.com/ai-dynamo/dynamo/issues/4185",
            "https://github.com/vllm-project/vllm/issues/41814",
        ),
    ),
    Check(
        id="FAB015",
        title="Both ends agree on libfabric's settings",
        severity=Severity.ERROR,
        what="FI_EFA_USE_UNSOLICITED_WRITE_RECV has one value (or none) in the environments of all instances.",
        why="The two ends of a connection must agree on it; else it breaks, or notifications are lost.",
        fix="Set it in the top `env`, or nowhere: neither in an `env` nor in a login's environment.",
        run=_same_everywhere,
        sources=(_LIBFABRIC_EFA, "https://github.com/ai-dynamo/nixl/pull/1123"),
    ),
    Check(
        id="FAB016",
        title="Few enough peers",
        severity=Severity.ERROR,
        what=f"How many ranks of the other side a rank connects to: at most {PEERS_MOST} with NIXL's LIBFABRIC "
        "backend, which numbers its peers with 8 bits.",
        why="Handshakes with further peers fail.",
        fix="Several smaller clusters.",
        run=_peers,
        sources=("https://github.com/ai-dynamo/nixl/blob/main/src/utils/libfabric/libfabric_rail.cpp",),
    ),
)
