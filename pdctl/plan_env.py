"""Environment of the instances: what pdctl sets, what the user sets, and secrets apart from both. Pure.

Facts about NIXL, UCX and libfabric variables: docs/plan.md gives the reasons for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdctl.errors import Problem
from pdctl.plan_args import HOME
from pdctl.plan_devices import device_list, device_ranges
from pdctl.plan_ports import Ports
from pdctl.plan_seats import Seat, argument, host_of, role_of
from pdctl.spec import ROLES, ClusterSpec, EnvValue, SecretRef

Layers = Sequence[tuple[str, Mapping[str, EnvValue]]]
"""Environments of the cluster file with the key of each; later ones win."""


@dataclass(frozen=True)
class Environment:
    """Variables of one instance; no name is in both.

    Attributes:
        plain: names and values that may be shown.
        secret: names and values that may not. A secret that could not be found is left out.
        secret_names: names of all secrets, found or not.
    """

    plain: dict[str, str]
    secret: dict[str, str] = field(repr=False)
    secret_names: tuple[str, ...]


_OTHER_KEY = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": ("pdctl sets this for each instance", "use `address` of the host"),
    "VLLM_NIXL_SIDE_CHANNEL_PORT": ("pdctl sets this for each instance", "use `side_channel_port`"),
    # vLLM takes ports from here upwards, and would meet those of the plan.
    "VLLM_PORT": ("vLLM would take ports that the plan gives to others", "remove it: vLLM then takes any free ones"),
    **dict.fromkeys(
        ("VLLM_DP_SIZE", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT"),
        ("pdctl starts all data-parallel ranks of an instance together", "use `data_parallel`"),
    ),
}
_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "neuron": "NEURON_RT_VISIBLE_CORES"}
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def layers_of(spec: ClusterSpec, seat: Seat) -> Layers:
    """The environments that an instance gets from the cluster file: global, of its role, of its host."""
    return (
        ("env", spec.env),
        (f"{seat.role}.env", role_of(spec, seat.role).env),
        (f"{seat.host_key}.env", host_of(spec, seat).env),
    )


def router_layers(spec: ClusterSpec) -> Layers:
    """The environments that the router gets from the cluster file."""
    return (("env", spec.env), ("router.env", spec.router.env))


def _all_layers(spec: ClusterSpec) -> Layers:
    layers: list[tuple[str, Mapping[str, EnvValue]]] = [*router_layers(spec)]
    for role in ROLES:
        section = role_of(spec, role)
        layers.append((f"{role}.env", section.env))
        layers.extend((f"{role}.hosts[{index}].env", host.env) for index, host in enumerate(section.hosts))
    return layers


def check_environment(
    spec: ClusterSpec, environ: Mapping[str, str], problems: list[Problem], *, require_secrets: bool
) -> None:
    """Report variables that the user cannot set, and secrets that cannot be found in ``environ``."""
    refused = dict(_OTHER_KEY)
    visible = _VISIBLE_DEVICES.get(spec.accelerator)
    if visible is not None:
        refused[visible] = ("pdctl sets this for each instance", "use `devices`")
    for layer, variables in _all_layers(spec):
        for name, value in variables.items():
            key = f"{layer}.{name}"
            if name in refused and layer != "router.env":
                problems.append(spec.problem(key, *refused[name]))
            elif name == "PYTHONPATH" and isinstance(value, SecretRef):
                message = "PYTHONPATH cannot be a secret, because pdctl adds a folder to it"
                problems.append(spec.problem(key, message, "write the value, or ${NAME}"))
            elif isinstance(value, SecretRef):
                if require_secrets:
                    _check_secret(spec, key, value, environ, problems)
            elif name in _ALLOCATOR and spec.accelerator == "cuda":
                _check_allocator(spec, key, value, problems)


def _check_secret(
    spec: ClusterSpec, key: str, value: SecretRef, environ: Mapping[str, str], problems: list[Problem]
) -> None:
    found = environ.get(value.from_env)
    if not found:
        state = "is empty" if found == "" else "is not set"
        hint = f"set it where you run pdctl: export {value.from_env}=..."
        problems.append(spec.problem(key, f"the environment variable {value.from_env} {state}", hint))
    elif any("\ud800" <= character <= "\udfff" for character in found):
        problems.append(spec.problem(key, f"the environment variable {value.from_env} is no valid UTF-8"))


def _check_allocator(spec: ClusterSpec, key: str, value: str, problems: list[Problem]) -> None:
    """CUDA memory that is remapped loses its RDMA registration (``_verify_kv_transfer_compat``, vLLM 0.32)."""
    if "expandable_segments:true" not in value.replace(" ", "").lower():
        return
    switches = ("enable-sleep-mode", "enable-cumem-allocator")
    if not all(any(argument(role_of(spec, role).vllm_args, name) is True for name in switches) for role in ROLES):
        message = "expandable segments move KV blocks away from the memory that is registered for transfers"
        problems.append(spec.problem(key, message, "remove expandable_segments:True"))


def vllm_environment(
    spec: ClusterSpec,
    seat: Seat,
    ports: Ports,
    devices: Sequence[int],
    environ: Mapping[str, str],
    *,
    connector_digest: str,
    shares_machine: bool,
) -> Environment:
    """Environment of a prefill or decode instance.

    Args:
        spec: the cluster file.
        seat: the instance.
        ports: its ports.
        devices: its devices.
        environ: where secrets are looked up.
        connector_digest: names the folder of the connector on the node.
        shares_machine: whether other instances run on the same machine.
    """
    own = _defaults(spec, shares_machine=shares_machine)
    fixed = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": seat.address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.side_channel[0]),
    }
    if spec.accelerator == "cuda":
        fixed["CUDA_VISIBLE_DEVICES"] = device_list(devices)
    elif spec.accelerator == "neuron":
        fixed["NEURON_RT_VISIBLE_CORES"] = device_ranges(devices)
    connector = f"{HOME}/.pdctl/connector/{connector_digest}" if spec.transfer.own_connector else ""
    return _merge(own, layers_of(spec, seat), environ, fixed, python_path=connector)


def router_environment(spec: ClusterSpec, environ: Mapping[str, str]) -> Environment:
    """Environment of the router."""
    return _merge(_PYTHON, router_layers(spec), environ)


# Lines of the log are there when they are written, and a crash in native code leaves a Python traceback.
_PYTHON = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def _defaults(spec: ClusterSpec, *, shares_machine: bool) -> dict[str, str]:
    """What pdctl sets unless the user sets it."""
    variables = {**_PYTHON, **_FABRIC[spec.fabric](spec)}
    if spec.accelerator != "neuron":
        # NIXL moves the state of Mamba layers in this layout only. vLLM chooses it by itself on CPUs, but by the names
        # of its own connectors; models without such layers never look.
        variables["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    if spec.accelerator == "cpu" and shares_machine:
        # Bound automatically, every instance would bind its threads to the same cores.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables


def _tcp(spec: ClusterSpec) -> dict[str, str]:
    # Nothing but TCP between hosts and on one host alike, so that what is measured is what the file says. UCX needs
    # cuda_copy to get at GPU memory.
    return {"UCX_TLS": "tcp,cuda_copy" if spec.accelerator == "cuda" else "tcp"}


def _rdma(spec: ClusterSpec) -> dict[str, str]:
    del spec
    # UCX falls back to TCP without a word; without TCP it fails and says so. All else is left to UCX: a positive list
    # would have to name its auxiliary transports as well.
    return {"UCX_TLS": "^tcp"}


def _efa(spec: ClusterSpec) -> dict[str, str]:
    del spec
    # NIXL's LIBFABRIC plugin takes TCP when it finds no EFA device; with this it fails and says so. Not set on
    # purpose: FI_EFA_USE_DEVICE_RDMA (on by default where the device can; =1 aborts where it cannot) and
    # FI_EFA_FORK_SAFE (not needed from Linux 5.15 on).
    return {"FI_PROVIDER": "efa"}


_FABRIC: dict[str, Callable[[ClusterSpec], dict[str, str]]] = {
    "tcp": _tcp,
    "infiniband": _rdma,
    "roce": _rdma,
    "efa": _efa,
}


def _merge(
    own: Mapping[str, str],
    layers: Iterable[tuple[str, Mapping[str, EnvValue]]],
    environ: Mapping[str, str],
    fixed: Mapping[str, str] | None = None,
    *,
    python_path: str = "",
) -> Environment:
    """Put variables together; ``fixed`` win over the layers, those over ``own``; ``python_path`` goes first."""
    values: dict[str, EnvValue] = {**own}
    for _, variables in layers:
        values.update(variables)
    values.update(fixed or {})
    plain = {name: value for name, value in values.items() if not isinstance(value, SecretRef)}
    if python_path:
        plain["PYTHONPATH"] = ":".join(filter(None, (python_path, plain.get("PYTHONPATH", ""))))
    references = {name: value.from_env for name, value in sorted(values.items()) if isinstance(value, SecretRef)}
    secret = {name: environ[source] for name, source in references.items() if environ.get(source)}
    return Environment(dict(sorted(plain.items())), secret, tuple(references))
