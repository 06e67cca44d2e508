"""FAB026 and 027: what the environment tells UCX to use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from pdctl.doctor.checks.instance_facts import backends_of, environment_of
from pdctl.doctor.checks.per_host import RDMA_FABRICS, each_host, not_reached, on_fabric
from pdctl.doctor.checks.wording import listing
from pdctl.doctor.context import Context
from pdctl.doctor.facts import HostFacts, RdmaFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.plan import InstancePlan

# Names of UCX's own transports and of its groups of them that go through an RDMA device.
_RDMA_TRANSPORTS = (
    "all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x", "ud_verbs",
    "ud_mlx5", "srd", "gga", "gga_mlx5",
)  # fmt: skip
# Transports with which UCX can send active messages between hosts, which it needs besides the RDMA itself.
_MESSAGE_TRANSPORTS = (
    "all", "ib", "rc", "rc_x", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "srd",
    "tcp",
)  # fmt: skip


def named_ports(variables: Mapping[str, tuple[str, str]]) -> frozenset[str]:
    """RDMA ports and interfaces that UCX_NET_DEVICES names one by one; empty if it allows all or uses patterns."""
    names = [name.strip() for name in variables.get("UCX_NET_DEVICES", ("", ""))[0].split(",") if name.strip()]
    if any(name == "all" or name.startswith("^") or "*" in name for name in names):
        return frozenset()
    return frozenset(names)


def _uses_ucx(context: Context) -> bool:
    return any(_ucx_instances(context, host) for host in context.vllm_hosts)


def _ucx_instances(context: Context, host: str) -> list[InstancePlan]:
    return [one for one in context.instances_on(host) if one.role != "router" and "UCX" in backends_of(one)]


def _devices(context: Context, facts: HostFacts, rdma: RdmaFacts) -> Iterable[Result]:
    host = facts.host
    instances = _ucx_instances(context, host)
    if not instances:
        return
    known = {device.name for device in rdma.devices}
    known |= {f"{device.name}:{port.number}" for device in rdma.devices for port in device.ports}
    known |= {interface.name for interface in facts.network.interfaces} if facts.network is not None else set()
    absent: dict[str, str] = {}
    unset = []
    for instance in instances:
        value, origin = environment_of(facts, instance).get("UCX_NET_DEVICES", ("", ""))
        if not value.strip():
            unset.append(instance.name)
            continue
        for name in (part.strip() for part in value.lstrip("^").split(",")):
            if name and name != "all" and not any(fnmatchcase(one, name) for one in known):
                absent[name] = origin
    layers = sorted({port.link_layer for device in rdma.devices for port in device.ports if port.link_layer})
    if absent:
        yield failed(
            host,
            message=f"UCX_NET_DEVICES names what is not on this host: {listing(absent)}",
            evidence=f"from {listing(dict.fromkeys(absent.values()))}; the host has "
            f"{listing(sorted(known), 12) or 'none'}",
            fix="name devices of this host (`ibdev2netdev`, `rdma link`); a host can have its own `env` in the "
            "cluster file",
        )
    elif unset and context.spec.fabric in RDMA_FABRICS and len(layers) > 1:
        yield failed(
            host,
            severity=Severity.WARNING,
            message="RDMA devices of several networks, and UCX_NET_DEVICES does not say which to use",
            evidence=f"link layers: {listing(layers)}",
            fix="set UCX_NET_DEVICES in `env` to the ports of this fabric, such as mlx5_0:1,mlx5_1:1",
        )
    else:
        yield passed(host, message="UCX's devices are there" if not unset else "UCX may choose its devices by itself")


def _transports(context: Context) -> Iterator[Result]:
    if not on_fabric("infiniband", "roce")(context):
        return
    for host in context.vllm_hosts:
        facts = context.facts.get(host) or HostFacts(host)
        verdicts = [
            verdict
            for instance in _ucx_instances(context, host)
            if (verdict := _judge_transports(environment_of(facts, instance).get("UCX_TLS", ("", ""))))
        ]
        if verdicts:
            verdict = min(verdicts, key=lambda one: one[0] is not Severity.ERROR)
            yield failed(
                host,
                severity=verdict[0],
                message=verdict[1],
                evidence=verdict[2],
                fix="leave UCX_TLS to pdctl, which sets ^tcp: everything but TCP, so that a missing device is an error",
            )
        elif host not in context.facts:
            yield not_reached(host)
        elif facts.environment is None and not all("UCX_TLS" in one.env for one in _ucx_instances(context, host)):
            yield skipped(host, message=f"not checked: {facts.why_missing('environment')}")
        else:
            yield passed(host, message="UCX uses RDMA and not TCP")


def _judge_transports(setting: tuple[str, str]) -> tuple[Severity, str, str] | None:
    value, origin = setting
    names = {name.strip().lower() for name in value.lstrip("^").split(",") if name.strip()}
    seen = f"UCX_TLS={value} from {origin}" if value else "UCX_TLS is not set"
    if value.startswith("^"):
        if names & {"ib", "all"}:
            return Severity.ERROR, "UCX_TLS forbids RDMA", seen
        tcp = "tcp" not in names
    elif not names or "all" in names:
        tcp = True
    elif not names & set(_RDMA_TRANSPORTS):
        return Severity.ERROR, "UCX_TLS allows no RDMA transport", seen
    elif not names & set(_MESSAGE_TRANSPORTS):
        return Severity.ERROR, "UCX_TLS leaves UCX no transport for its own messages between hosts", seen
    else:
        tcp = "tcp" in names
    if tcp:
        return Severity.WARNING, "UCX may fall back to TCP without a word", seen
    return None


_UCX_FAQ = "https://openucx.readthedocs.io/en/master/faq.html"

CHECKS: tuple[Check, ...] = (
    Check(
        id="FAB026",
        title="UCX's devices exist on the host",
        severity=Severity.ERROR,
        what="Each name in UCX_NET_DEVICES (cluster file or login environment) is an RDMA port or a network interface "
        "of the host. On a host with RDMA devices of several networks it should be set.",
        why="UCX leaves unknown names out and then has no device, or picks the wrong network: transfers hang for "
        "minutes.",
        fix="Name the ports per host: `env` of the host in the cluster file.",
        run=each_host("rdma", _devices, applies=_uses_ucx),
        sources=("https://github.com/sgl-project/sglang/pull/28737", _UCX_FAQ),
        blocking=True,
    ),
    Check(
        id="FAB027",
        title="UCX uses RDMA and not TCP",
        severity=Severity.ERROR,
        what="On InfiniBand and RoCE: UCX_TLS lets no TCP in (a warning), and allows RDMA and a transport for UCX's "
        "own messages (else an error). pdctl sets ^tcp unless the cluster file says otherwise.",
        why="With TCP allowed, UCX uses it without a word when RDMA cannot be used. With a list such as rc_verbs,self "
        "it finds no transport for its messages and fails.",
        fix="Remove UCX_TLS from `env`.",
        run=_transports,
        sources=(_UCX_FAQ, "https://github.com/ai-dynamo/dynamo/pull/1314"),
    ),
)
