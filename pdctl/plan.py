"""The plan: what a cluster file comes to, one entry for each process. Pure and printable.

The parts: :mod:`~pdctl.plan_seats` (which instances, where), :mod:`~pdctl.plan_ports`, :mod:`~pdctl.plan_devices`,
:mod:`~pdctl.plan_args` (command lines), :mod:`~pdctl.plan_compat` (prefill against decode), :mod:`~pdctl.plan_env`,
:mod:`~pdctl.plan_script`. docs/plan.md says what is set and why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pdctl.errors import ClusterFileError, Problem
from pdctl.plan_args import (
    check_arguments,
    check_transfer,
    listen_address,
    router_argv,
    router_metrics_host,
    telemetry_host,
    vllm_argv,
)
from pdctl.plan_compat import check_compatibility
from pdctl.plan_devices import assign_devices
from pdctl.plan_env import Environment, check_environment, router_environment, vllm_environment
from pdctl.plan_ports import Ports, assign_ports
from pdctl.plan_script import launch_script
from pdctl.plan_seats import RouterSeat, Seat, host_of, place, role_of
from pdctl.spec import ROLES, ClusterSpec, Role

MASK = "***"
"""What is shown instead of a secret."""


@dataclass(frozen=True)
class PortUse:
    """A TCP port that an instance will listen on.

    Attributes:
        port: its number.
        purpose: ``API``, ``side channel``, ``telemetry`` or ``metrics``.
        address: the address it is bound to.
    """

    port: int
    purpose: str
    address: str


@dataclass(frozen=True)
class InstancePlan:
    """One process to be started: a vLLM instance or the router.

    Attributes:
        name: ``prefill-0``, ``decode-1``, ``router``.
        role: what it is.
        index: the number in its name; 0 for the router.
        host: SSH name of the host it runs on.
        address: where others reach it on the data plane: an IP address or a DNS name.
        port: of its HTTP API.
        side_channel_ports: one for each data-parallel engine; none for the router.
        telemetry_ports: one for each rank; none for the router and in pull mode.
        devices: device numbers; none on CPUs and for the router.
        argv: the command, with placeholders.
        env: variables, with placeholders.
        secret_env: variables that must not be shown or stored; a secret that was not required may be missing.
        launch_script: text of ``launch.sh``, with placeholders.
        digest: sha256 hex over everything here but the values of secrets.
        ports: every port it listens on.
    """

    name: str
    role: Literal["prefill", "decode", "router"]
    index: int
    host: str
    address: str
    port: int
    side_channel_ports: tuple[int, ...]
    telemetry_ports: tuple[int, ...]
    devices: tuple[int, ...]
    argv: tuple[str, ...]
    env: dict[str, str]
    secret_env: dict[str, str] = field(repr=False)
    secret_names: tuple[str, ...]
    launch_script: str = field(repr=False)
    ports: tuple[PortUse, ...]
    digest: str

    @property
    def url(self) -> str:
        """Base URL of its HTTP API."""
        return http_url(self.address, self.port)

    def to_json(self) -> dict[str, Any]:
        """The instance as JSON values, secrets masked."""
        return {
            "name": self.name,
            "role": self.role,
            "index": self.index,
            "host": self.host,
            "address": self.address,
            "url": self.url,
            "ports": [{"port": use.port, "purpose": use.purpose, "address": use.address} for use in self.ports],
            "devices": list(self.devices),
            "argv": list(self.argv),
            "env": dict(sorted({**self.env, **dict.fromkeys(self.secret_names, MASK)}.items())),
            "launch_script": self.launch_script,
            "digest": self.digest,
        }


@dataclass(frozen=True)
class ClusterPlan:
    """Everything that is to run.

    Attributes:
        spec: the cluster file it came from.
        instances: prefill, then decode, then the router.
    """

    spec: ClusterSpec
    instances: tuple[InstancePlan, ...]

    @property
    def prefill(self) -> tuple[InstancePlan, ...]:
        """The prefill instances."""
        return tuple(instance for instance in self.instances if instance.role == "prefill")

    @property
    def decode(self) -> tuple[InstancePlan, ...]:
        """The decode instances."""
        return tuple(instance for instance in self.instances if instance.role == "decode")

    @property
    def router(self) -> InstancePlan:
        """The router."""
        return self.instances[-1]

    @property
    def hosts(self) -> tuple[str, ...]:
        """SSH names of all hosts, each once, in the order of the instances."""
        return tuple(dict.fromkeys(instance.host for instance in self.instances))

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values with stable keys, secrets masked."""
        return {
            "cluster": self.spec.cluster,
            "model": self.spec.model,
            "accelerator": self.spec.accelerator,
            "fabric": self.spec.fabric,
            "mode": self.spec.transfer.mode,
            "connector": "pdctl" if self.spec.transfer.own_connector else "upstream",
            "hosts": list(self.hosts),
            "instances": [instance.to_json() for instance in self.instances],
        }


def make_plan(
    spec: ClusterSpec, *, environ: Mapping[str, str], connector_digest: str, require_secrets: bool = True
) -> ClusterPlan:
    """Plan a cluster.

    Args:
        spec: the cluster file.
        environ: where secrets (``{from_env: NAME}``) are looked up.
        connector_digest: names the connector's files, as the node agent's ``ship`` does.
        require_secrets: whether a missing secret is a problem. Only starting an instance needs them: whoever looks at
            a cluster or stops it may not have them. The digests are the same either way.

    Raises:
        ClusterFileError: with every problem that stands in the way of a plan.
    """
    problems: list[Problem] = []
    _check_paths(spec, problems)
    check_arguments(spec, problems)
    check_transfer(spec, problems)
    check_compatibility(spec, problems)
    check_environment(spec, environ, problems, require_secrets=require_secrets)
    seats, router = place(spec, problems)
    ports, metrics = assign_ports(spec, seats, router, problems)
    devices = assign_devices(spec, seats, problems)
    if problems:
        raise ClusterFileError(sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0))

    neighbours: dict[str, int] = {}
    for seat in seats:
        neighbours[seat.machine] = neighbours.get(seat.machine, 0) + 1
    instances = []
    for seat in seats:
        environment = vllm_environment(
            spec,
            seat,
            ports[seat.name],
            devices[seat.name],
            environ,
            connector_digest=connector_digest,
            shares_machine=neighbours[seat.machine] > 1,
        )
        instances.append(_vllm_instance(spec, seat, ports[seat.name], devices[seat.name], environment))
    urls: dict[Role, list[str]] = {
        role: [instance.url for instance in instances if instance.role == role] for role in ROLES
    }
    instances.append(_router_instance(spec, router, urls, metrics, router_environment(spec, environ)))
    return ClusterPlan(spec, tuple(instances))


def http_url(address: str, port: int) -> str:
    """Base URL of a plain HTTP server; an IPv6 address is put in brackets."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _check_paths(spec: ClusterSpec, problems: list[Problem]) -> None:
    """Report paths that would mean something else where they are used."""
    pythons = [("python", spec.python), ("router.python", spec.router.python)]
    for role in ROLES:
        pythons.append((f"{role}.python", role_of(spec, role).python))
        pythons += [(f"{role}.hosts[{n}].python", host.python) for n, host in enumerate(role_of(spec, role).hosts)]
    for key, python in pythons:
        if python is not None and "/" in python and not python.startswith(("/", "~/")):
            message = f"{python!r} would be looked for in the folder of each instance"
            problems.append(spec.problem(key, message, "give the full path, or one that starts with ~/"))
    if spec.model.startswith("~"):
        message = "vLLM does not expand `~`, and would take this for a name on the Hugging Face hub"
        problems.append(spec.problem("model", message, "give the full path of the folder"))


def _vllm_instance(
    spec: ClusterSpec, seat: Seat, ports: Ports, devices: Sequence[int], environment: Environment
) -> InstancePlan:
    python = host_of(spec, seat).python or role_of(spec, seat.role).python or spec.python
    uses = [PortUse(ports.api, "API", listen_address(spec, seat))]
    uses += [PortUse(port, "side channel", seat.address) for port in ports.side_channel]
    uses += [PortUse(port, "telemetry", telemetry_host(spec)) for port in ports.telemetry]
    return _instance(
        spec,
        name=seat.name,
        role=seat.role,
        index=seat.index,
        host=seat.host,
        address=seat.address,
        port=ports.api,
        side_channel_ports=ports.side_channel,
        telemetry_ports=ports.telemetry,
        devices=tuple(devices),
        argv=vllm_argv(spec, seat, ports, python),
        environment=environment,
        ports=tuple(uses),
    )


def _router_instance(
    spec: ClusterSpec, seat: RouterSeat, urls: Mapping[Role, Sequence[str]], metrics: int, environment: Environment
) -> InstancePlan:
    return _instance(
        spec,
        name="router",
        role="router",
        index=0,
        host=seat.host,
        address=seat.address,
        port=spec.router.port,
        side_channel_ports=(),
        telemetry_ports=(),
        devices=(),
        argv=tuple(router_argv(spec, seat, urls, metrics)),
        environment=environment,
        ports=(PortUse(spec.router.port, "API", seat.address), PortUse(metrics, "metrics", router_metrics_host(spec))),
    )


def _instance(
    spec: ClusterSpec,
    *,
    name: str,
    role: Literal["prefill", "decode", "router"],
    index: int,
    host: str,
    address: str,
    port: int,
    side_channel_ports: tuple[int, ...],
    telemetry_ports: tuple[int, ...],
    devices: tuple[int, ...],
    argv: tuple[str, ...],
    environment: Environment,
    ports: tuple[PortUse, ...],
) -> InstancePlan:
    script = launch_script(cluster=spec.cluster, instance=name, argv=argv)
    covered = {
        "cluster": spec.cluster,
        "name": name,
        "role": role,
        "host": host,
        "address": address,
        "ports": [[use.port, use.purpose, use.address] for use in ports],
        "devices": devices,
        "argv": argv,
        "env": environment.plain,
        "secret_names": environment.secret_names,
        "launch_script": script,
    }
    canonical = json.dumps(covered, sort_keys=True, separators=(",", ":"))
    return InstancePlan(
        name=name,
        role=role,
        index=index,
        host=host,
        address=address,
        port=port,
        side_channel_ports=side_channel_ports,
        telemetry_ports=telemetry_ports,
        devices=devices,
        argv=argv,
        env=environment.plain,
        secret_env=environment.secret,
        secret_names=environment.secret_names,
        launch_script=script,
        ports=ports,
        digest=hashlib.sha256(canonical.encode()).hexdigest(),
    )
