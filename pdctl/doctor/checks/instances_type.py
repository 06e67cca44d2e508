"""AWS003, AWS004, AWS007: what the instance types can do on EFA, and with each other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pdctl.doctor.checks.ec2_view import Ec2View, on_efa, pairs_apart
from pdctl.doctor.context import Context
from pdctl.doctor.findings import Check, CheckFunction, Result, Severity, failed, passed, skipped
from pdctl.doctor.instance_table import SOURCE, TABLE_DATE, InstanceType

_WITH_WRITE = "p5, p5e, p5en, p6-b200, p6-b300, trn1.32xlarge, trn1n or trn2"
# The two that may or may not understand each other: the documentation says "the same kind".
_KIN = frozenset({"p4d.24xlarge", "p4de.24xlarge"})


def _each_type(judge: Callable[[Ec2View, str, str], Iterable[Result]]) -> CheckFunction:
    def run(context: Context) -> Iterator[Result]:
        if not on_efa(context):
            return
        view = Ec2View(context)
        for host in context.vllm_hosts:
            name = view.type_name(host)
            if name:
                yield from judge(view, host, name)
            else:
                facts = context.facts.get(host)
                own = facts.why_missing("cloud") if facts is not None and facts.cloud is None else ""
                reason = view.why_not(host) + (f"; the host itself: {own}" if own else "")
                yield skipped(host, message=f"the instance type is unknown: {reason}")

    return run


def _supports_efa(view: Ec2View, host: str, name: str) -> Iterable[Result]:
    most = view.most_efa(host)
    if most is None:
        yield skipped(
            host,
            message=f"whether {name} has EFA is unknown: it is not in pdctl's table of {TABLE_DATE}, and "
            + view.why_not(host, action="DescribeInstanceTypes"),
        )
    elif most:
        yield passed(host, message=f"{name} has EFA", evidence=f"up to {most} EFA interfaces")
    else:
        yield failed(
            host,
            message=f"{name} has no EFA",
            evidence="EfaSupported is false, or the type is listed without EFA",
            fix=f"take a type with EFA and RDMA WRITE ({_WITH_WRITE}), or set `fabric: tcp` in the cluster file",
        )


def _writes(view: Ec2View, host: str, name: str) -> Iterable[Result]:
    row = view.type_row(host)
    if view.most_efa(host) == 0:
        return  # AWS003 says what there is to say
    if row is None:
        yield skipped(
            host,
            message=f"whether {name} has RDMA WRITE is unknown: it is not in pdctl's table of {TABLE_DATE}",
            fix="trust what the host says: `fi_info -p efa -f efa-direct -t FI_EP_RDM -c FI_RMA` lists devices only "
            "where READ and WRITE both exist",
        )
        return
    push = view.context.spec.transfer.mode == "push"
    seen = f"table of {TABLE_DATE}: RDMA READ {_yes(row.rdma_read)}, RDMA WRITE {_yes(row.rdma_write)}"
    needed = row.rdma_write if push else row.rdma_read
    if needed:
        yield passed(host, message=f"{name} has RDMA {'WRITE' if push else 'READ'}", evidence=seen)
    elif needed is None:
        yield skipped(host, message=f"no source says whether {name} has RDMA {'WRITE' if push else 'READ'}")
    elif push:
        yield _no_write(host, row, seen)
    else:
        yield failed(
            host,
            message=f"{name} has no RDMA READ: pulling KV is emulated with messages",
            evidence=seen,
            fix=f"take a type with RDMA ({_WITH_WRITE}, p4d), or `fabric: tcp`",
            severity=Severity.WARNING,
        )


def _no_write(host: str, row: InstanceType, seen: str) -> Result:
    if row.rdma_read is False:
        return failed(
            host,
            message=f"{row.name} has neither RDMA READ nor WRITE: push mode would copy all KV through the host",
            evidence=seen,
            fix=f"take a type with RDMA WRITE ({_WITH_WRITE}), or set `fabric: tcp`",
        )
    return failed(
        host,
        message=f"{row.name} has no RDMA WRITE: libfabric emulates push by READs of the decode side, with more CPU "
        "and less bandwidth",
        evidence=seen,
        fix="use `transfer: {mode: pull}`, which is native here, or take a type with RDMA WRITE "
        f"({_WITH_WRITE}); it works as it is, slower",
        severity=Severity.WARNING,
    )


def _yes(value: bool | None) -> str:
    return "unknown" if value is None else "yes" if value else "no"


def _same_kind(context: Context) -> Iterator[Result]:
    if not on_efa(context):
        return
    view = Ec2View(context)
    for prefill, decode in pairs_apart(context):
        one, other = view.type_name(prefill), view.type_name(decode)
        if not one or not other:
            unknown = prefill if not one else decode
            yield skipped(prefill, decode, message=f"an instance type is unknown: {view.why_not(unknown)}")
        elif one == other:
            yield passed(prefill, decode, message=f"both are {one}")
        else:
            yield _different(view, prefill, decode)


def _different(view: Ec2View, prefill: str, decode: str) -> Result:
    one, other = view.type_name(prefill), view.type_name(decode)
    closed = [row.name for host in (prefill, decode) if (row := view.type_row(host)) is not None and row.own_kind_only]
    if closed and {one, other} != _KIN:
        return failed(
            prefill,
            decode,
            message=f"{closed[0]} talks EFA to instances of its own type only; here {one} and {other} are paired",
            fix="take one instance type for prefill and decode",
        )
    counts = [view.most_efa(host) for host in (prefill, decode)]
    if closed:
        uncertain = "AWS does not say whether their EFA devices talk to each other"
    else:
        devices = f"{_count(counts[0])} and {_count(counts[1])}"
        uncertain = f"NIXL has to map {devices} EFA devices onto each other"
    return failed(
        prefill,
        decode,
        message=f"prefill is {one} and decode {other}: {uncertain}",
        fix="take one instance type for both, or trust the real WRITE of the area XFER and nothing else",
        severity=Severity.WARNING,
    )


def _count(value: int | None) -> str:
    return "unknown" if value is None else str(value)


CHECKS: tuple[Check, ...] = (
    Check(
        id="AWS003",
        title="The instance type has EFA",
        severity=Severity.ERROR,
        what="`EfaSupported` of the type by the EC2 API, else pdctl's table. The type comes from the API, else from "
        "the host's metadata or DMI.",
        why="Without EFA libfabric offers TCP, and NIXL takes it without a word: KV crawls.",
        fix=f"Take a type with EFA ({_WITH_WRITE}), or `fabric: tcp`. Small sizes of a family often lack EFA: inf2, "
        "trn1.2xlarge, and g5, g6, g6e below 8xlarge have none.",
        run=_each_type(_supports_efa),
        sources=(SOURCE,),
        blocking=True,
    ),
    Check(
        id="AWS004",
        title="The instance type has RDMA WRITE",
        severity=Severity.ERROR,
        what=f"pdctl's table of {TABLE_DATE}, taken from the EC2 User Guide: no API tells it. In push mode WRITE is "
        "looked at, in pull mode READ. READ without WRITE (p4d, p4de) is a warning, neither (g5, g4dn, p3dn) an error; "
        "a type that the table lacks is skipped, and the host's own fi_info decides.",
        why="Push mode writes KV into decode's memory. Where the device cannot write, libfabric emulates it: on p4d "
        "the target reads instead, driven by its CPU; on g5 all KV is copied through host memory.",
        fix=f"Take {_WITH_WRITE}, or pull mode where there is READ.",
        run=_each_type(_writes),
        sources=(
            SOURCE,
            "https://github.com/ofiwg/libfabric/blob/main/man/fi_efa.7.md",
            "https://github.com/ai-dynamo/nixl/pull/817",
        ),
    ),
    Check(
        id="AWS007",
        title="Instance types of prefill and decode fit together",
        severity=Severity.ERROR,
        what="The types of each pair of hosts. p4d, p4de and dl1 talk EFA to their own type alone: with another one "
        "that is an error. Other different types are a warning, and so are p4d with p4de, of which AWS says nothing.",
        why="Between types that do not understand each other the connection is never made and requests hang. Between "
        "others the number of devices differs (p5 32, p5en 16, p6-b200 8), and NIXL must map them.",
        fix="Take one instance type for prefill and decode.",
        run=_same_kind,
        sources=(SOURCE, "https://github.com/ai-dynamo/nixl/issues/1161"),
        blocking=True,
    ),
)
