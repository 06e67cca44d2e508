"""The cluster file: its models, and reading it with every problem told at once, by line.

What a single value may be is said by the reader functions of spec_values.py, named in the annotations of the models.
Rules that span several keys are at the end of this module. docs/cluster-file.md describes every key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from pdctl.errors import ClusterFileError, Problem, UsageError
from pdctl.spec_values import (
    MAX_SECONDS,
    Address,
    ArgumentValue,
    CheckId,
    ClusterName,
    Devices,
    Environment,
    EnvValue,
    FilePath,
    Finding,
    HostName,
    JsonMapping,
    Misfit,
    ModelName,
    PolicyName,
    Port,
    ProfileName,
    Python,
    Reason,
    Region,
    RouterArguments,
    Scalar,
    Seconds,
    SecretRef,
    UserName,
    VllmArguments,
    argument_name,
    entries,
    looks_secret,
    misfit,
    nearest,
    one_of,
    quote_hint,
    whole_number,
)
from pdctl.spec_yaml import MAX_BYTES, Document, KeyPath, Unusable, describe, dotted, quoted, read_document

__all__ = [
    "ROLES",
    "ArgumentValue",
    "AwsSpec",
    "ClusterSpec",
    "DoctorSpec",
    "EnvValue",
    "HostSpec",
    "IgnoreSpec",
    "Role",
    "RoleSpec",
    "RouterSpec",
    "Scalar",
    "SecretRef",
    "SshSpec",
    "TransferSpec",
    "argument_name",
    "is_local",
    "load",
    "looks_secret",
    "parse",
]

MAX_HOSTS = 512
"""Most hosts of one role."""
MAX_PARALLEL = 1024
"""Largest tensor_parallel and data_parallel."""
MAX_INSTANCES_PER_HOST = 64
"""Most instances of one role on a host."""
MAX_IGNORED = 256
"""Most entries of the doctor's ignore list."""
MAX_PROBLEMS = 200
"""Most problems listed; a file with more is most likely not a cluster file."""

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

_LOCAL_NAMES = frozenset({"local", "localhost"})


# --- models ------------------------------------------------------------------------------------------------------


class _Section(BaseModel):
    """A mapping of the file. A key with nothing behind it counts as not given, if it may be left out."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        fields = cls.model_fields
        return {k: v for k, v in value.items() if v is not None or k not in fields or fields[k].is_required()}


class TransferSpec(_Section):
    """How the KV cache travels. ``extra`` goes to the connector as more of ``kv_connector_extra_config``.

    ``connector: upstream`` takes vLLM's own push connector, to compare with: no telemetry, no ledger, none of its
    faults mended. Pull mode always uses vLLM's own.
    """

    mode: Annotated[Literal["push", "pull"], one_of("push", "pull")] = "push"
    connector: Annotated[Literal["pdctl", "upstream"], one_of("pdctl", "upstream")] = "pdctl"
    timeout_s: Seconds = 30.0
    stall_after_s: Seconds = 5.0
    lease_s: Annotated[int, whole_number(1, int(MAX_SECONDS))] = 30
    load_failure_policy: Annotated[Literal["fail", "recompute"], one_of("fail", "recompute")] = "fail"
    extra: JsonMapping = Field(default_factory=dict)

    @property
    def own_connector(self) -> bool:
        """Whether pdctl's connector moves the KV cache, so that its ranks have telemetry and a ledger."""
        return self.mode == "push" and self.connector == "pdctl"


class SshSpec(_Section):
    """How hosts are reached; what is not given comes from ``~/.ssh/config``."""

    user: UserName | None = None
    port: Port | None = None
    identity_file: FilePath | None = None
    config_file: FilePath | None = None
    host_keys: Annotated[Literal["strict", "accept-new"], one_of("strict", "accept-new")] = "strict"
    connect_timeout_s: Seconds = 10.0
    command_timeout_s: Seconds = 60.0
    max_parallel: Annotated[int, whole_number(1, MAX_HOSTS)] = 32


class HostSpec(_Section):
    """A host of a role. In the file a plain name stands for ``{name: NAME}``."""

    name: HostName
    address: Address | None = None
    python: Python | None = None
    devices: Devices | None = None
    env: Environment = Field(default_factory=dict)
    port: Port | None = None
    side_channel_port: Port | None = None
    telemetry_port: Port | None = None
    ssh_user: UserName | None = None
    ssh_port: Port | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, (Mapping, HostSpec)):
            return value
        raise misfit("a host name, or a mapping with `name`", value, quote_hint(value))

    @property
    def is_local(self) -> bool:
        """Whether this is the machine that pdctl runs on, reached without SSH."""
        return is_local(self.name)


class RoleSpec(_Section):
    """The prefill or the decode instances. Ports are the first of each kind on a host."""

    hosts: Annotated[list[HostSpec], entries("hosts", 1, MAX_HOSTS)]
    tensor_parallel: Annotated[int, whole_number(1, MAX_PARALLEL)] = 1
    data_parallel: Annotated[int, whole_number(1, MAX_PARALLEL)] = 1
    instances_per_host: Annotated[int, whole_number(1, MAX_INSTANCES_PER_HOST)] = 1
    devices: Devices | None = None
    vllm_args: VllmArguments = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)
    python: Python | None = None
    port: Port | None = None
    side_channel_port: Port | None = None
    telemetry_port: Port | None = None


class RouterSpec(_Section):
    """The vllm-router process that clients talk to."""

    host: HostName
    address: Address | None = None
    port: Port = 8000
    python: Python | None = None
    policy: PolicyName = "round_robin"
    args: RouterArguments = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)
    metrics_port: Port | None = None


class AwsSpec(_Section):
    """Turns the checks through the AWS API on."""

    region: Region | None = None
    profile: ProfileName | None = None


class IgnoreSpec(_Section):
    """A finding of ``pdctl doctor`` that does not count: of one check, on some hosts (or all), for a reason."""

    id: CheckId
    hosts: Annotated[list[HostName], entries("hosts", 1, 2 * MAX_HOSTS)] | None = None
    reason: Reason


class DoctorSpec(_Section):
    """What ``pdctl doctor`` leaves out of account."""

    ignore: Annotated[list[IgnoreSpec], entries("ignored checks", 0, MAX_IGNORED)] = Field(default_factory=list)


class ClusterSpec(_Section):
    """A whole cluster file. Made by :func:`load` and :func:`parse`; knows the lines its keys came from."""

    cluster: ClusterName
    model: ModelName
    accelerator: Annotated[Literal["cuda", "neuron", "cpu"], one_of("cuda", "neuron", "cpu")]
    fabric: Annotated[Literal["efa", "infiniband", "roce", "tcp"], one_of("efa", "infiniband", "roce", "tcp")]
    transfer: TransferSpec = Field(default_factory=TransferSpec)
    ssh: SshSpec = Field(default_factory=SshSpec)
    python: Python = "python3"
    env: Environment = Field(default_factory=dict)
    prefill: RoleSpec
    decode: RoleSpec
    router: RouterSpec
    aws: AwsSpec | None = None
    doctor: DoctorSpec = Field(default_factory=DoctorSpec)

    _file: str = PrivateAttr(default="")
    _lines: dict[str, int] = PrivateAttr(default_factory=dict)

    @property
    def file(self) -> str:
        """The cluster file as the user named it; empty for a spec that was not read from a file."""
        return self._file

    def line(self, key: str) -> int | None:
        """1-based line of a key such as ``prefill.hosts[1].address``, or of its nearest parent in the file."""
        while key:
            if key in self._lines:
                return self._lines[key]
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return None

    def problem(self, key: str, message: str, hint: str = "") -> Problem:
        """Make a :class:`Problem` at a key, for what only shows once a plan is made."""
        return Problem(self._file, self.line(key), key, message, hint)


def is_local(name: str) -> bool:
    """Tell whether a host name means the machine that pdctl runs on."""
    return name in _LOCAL_NAMES


# --- reading a file ----------------------------------------------------------------------------------------------


def load(path: Path, environ: Mapping[str, str]) -> ClusterSpec:
    """Read a cluster file.

    Args:
        path: the file; messages name it as it is given here.
        environ: where ``${VAR}`` is looked up; ``{from_env: NAME}`` is not looked up here.

    Raises:
        ClusterFileError: with every problem of the file.
        UsageError: there is no such file, or it cannot be read.
    """
    hint = "write one with `pdctl init`"
    try:
        with path.open("rb") as stream:
            # Not the size that the file system tells: the path may be a pipe or a device.
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"there is no cluster file {path}", hint=hint) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder, not a cluster file", hint=hint) from None
    except PermissionError:
        message = f"no permission to read the cluster file {path}"
        raise UsageError(message, hint=f"let your user read it, or {hint}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"the cluster file {str(path)!r} cannot be read: {reason}", hint=hint) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(content) <= MAX_BYTES:
            line = content.count(b"\n", 0, error.start) + 1
            message = (
                f"this is no UTF-8 text (byte 0x{content[error.start]:02x}, column {_column(content, error.start)})"
            )
            problem = Problem(str(path), line, "", message, "save the file as UTF-8")
            raise ClusterFileError([problem]) from None
        # The cut may be in the middle of a character; parse() says that the file is too large.
        text = content.decode("latin-1")
    return parse(text, file=str(path), environ=environ)


def _column(content: bytes, offset: int) -> int:
    return offset - content.rfind(b"\n", 0, offset)


def parse(text: str, *, file: str, environ: Mapping[str, str]) -> ClusterSpec:
    """Read the text of a cluster file; ``file`` is its name in messages.

    Raises:
        ClusterFileError: with every problem of the text.
    """
    document = read_document(text, file=file, environ=environ, keeps_text=_is_environment_value)
    problems = list(document.problems)
    spec: ClusterSpec | None = None
    try:
        spec = ClusterSpec.model_validate(document.data)
    except ValidationError as error:
        problems.extend(islice(_translate(error, document, file), MAX_PROBLEMS))
    for finding in (*_repeated_hosts(document.data), *_local_among_others(document.data)):
        problems.append(_located(finding, document, file))
    if problems or spec is None:
        raise ClusterFileError(_arranged(problems, file))
    spec._file = file
    spec._lines.update(_lines_by_name(document))
    return spec


def _is_environment_value(path: KeyPath) -> bool:
    """Whether a scalar is a variable's value, whose text counts: ``1e3`` must not become ``1000.0``."""
    if len(path) == 2:
        return path[0] == "env"
    if len(path) == 3:
        return path[0] in (*ROLES, "router") and path[1] == "env"
    return len(path) == 5 and path[0] in ROLES and path[1] == "hosts" and path[3] == "env"


def _lines_by_name(document: Document) -> Iterator[tuple[str, int]]:
    for path, line in document.lines.items():
        yield dotted(path), line
        if len(path) >= 3 and path[1] in ("vllm_args", "args"):
            # Also under the name that the models use for an option.
            yield dotted((*path[:2], argument_name(str(path[2])), *path[3:])), line


def _arranged(problems: Sequence[Problem], file: str) -> list[Problem]:
    unique = sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0)
    if len(unique) >= MAX_PROBLEMS:
        rest = Problem(file, None, "", f"there may be more problems; the list ends after {MAX_PROBLEMS}")
        return [*unique[:MAX_PROBLEMS], rest]
    return unique


def _translate(error: ValidationError, document: Document, file: str) -> Iterator[Problem]:
    """What pydantic found, in our words."""
    for detail in error.errors(include_url=False):
        value = detail["input"]
        path: KeyPath = detail["loc"]
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Misfit):
            for finding in cause.findings:
                below = Finding((*path, *finding.path), finding.message, finding.hint)
                yield _located(below, document, file)
        elif detail["type"] == "extra_forbidden":
            yield _located(Finding(path, *_unknown_key(path)), document, file)
        elif isinstance(value, Unusable):
            continue
        elif detail["type"] == "missing":
            yield _located(Finding(path, "this key is missing", _example(path)), document, file)
        elif detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
            expected = f"expected a mapping with the keys {', '.join(_keys_of(path))}"
            yield _located(Finding(path, f"{expected}, found {describe(value)}"), document, file)
        else:
            yield _located(Finding(path, f"cannot be {describe(value)}"), document, file)


def _located(finding: Finding, document: Document, file: str) -> Problem:
    """Give a finding its line, and the key as the user wrote it (a host may be a plain name)."""
    path = finding.path
    if path not in document.lines and path[-1:] == ("name",) and isinstance(_at(document.data, path[:-1]), str):
        path = path[:-1]
    known = path
    while known and known not in document.lines:
        known = known[:-1]
    return Problem(file, document.lines[known] if known else None, dotted(path), finding.message, finding.hint)


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


_MODELS: dict[tuple[str, ...], type[_Section]] = {
    (): ClusterSpec,
    ("transfer",): TransferSpec,
    ("ssh",): SshSpec,
    ("prefill",): RoleSpec,
    ("decode",): RoleSpec,
    ("prefill", "hosts"): HostSpec,
    ("decode", "hosts"): HostSpec,
    ("router",): RouterSpec,
    ("aws",): AwsSpec,
    ("doctor",): DoctorSpec,
    ("doctor", "ignore"): IgnoreSpec,
}

_EXAMPLES = {
    "cluster": "for example `cluster: my-cluster`",
    "model": "for example `model: Qwen/Qwen3-32B`",
    "accelerator": "one of cuda, neuron, cpu",
    "fabric": "one of efa, infiniband, roce, tcp",
    "prefill": "for example `prefill: {hosts: [p1]}`",
    "decode": "for example `decode: {hosts: [d1]}`",
    "router": "for example `router: {host: p1, port: 8000}`",
    "hosts": "for example `hosts: [p1, p2]`",
    "host": "for example `host: p1`",
    "name": "for example `{name: p1, address: 10.0.0.1}`",
    "id": "for example `{id: HOST004, reason: the disk is grown tomorrow}`; `pdctl doctor list` shows the ids",
    "reason": "say why the finding does not count here, for the next reader",
}


def _example(path: KeyPath) -> str:
    return _EXAMPLES.get(str(path[-1]), "")


def _keys_of(path: KeyPath) -> list[str]:
    model = _MODELS.get(tuple(part for part in path if isinstance(part, str)))
    return list(model.model_fields) if model else []


def _unknown_key(path: KeyPath) -> tuple[str, str]:
    """Message and hint for a key that does not exist where it is."""
    key = str(path[-1])
    allowed = _keys_of(path[:-1])
    message = f"unknown key; allowed here: {', '.join(allowed)}"
    near = nearest(key.lower().replace("-", "_"), allowed)
    if near:
        return message, f"did you mean `{near}`?"
    name = key.replace("-", "_")
    elsewhere = [".".join(section) for section, model in _MODELS.items() if name in model.model_fields]
    if elsewhere:
        where = " or ".join(f"`{section}`" if section else "the top level" for section in elsewhere)
        return message, f"`{name}` belongs under {where}"
    if path[0] in ROLES and len(path) == 2:
        return message, "options of vLLM belong under `vllm_args`"
    return message, ""


# --- rules over several keys -------------------------------------------------------------------------------------
# They look at the plain values, so that they speak up even where the models do not fit yet.


def _hosts_of(data: Mapping[str, Any], role: str) -> Iterator[tuple[KeyPath, str, Any]]:
    """Path, name and entry of every host of a role whose name can be read."""
    hosts = _at(data, (role, "hosts"))
    for index, entry in enumerate(hosts if isinstance(hosts, list) else ()):
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        if isinstance(name, str):
            yield (role, "hosts", index), str(name), entry


def _repeated_hosts(data: Mapping[str, Any]) -> Iterator[Finding]:
    """The same host twice in one role, or with different logins in two."""
    logins: dict[str, tuple[KeyPath, Any]] = {}
    for role in ROLES:
        first: dict[str, KeyPath] = {}
        for path, name, entry in _hosts_of(data, role):
            machine = "local" if is_local(name) else name
            if machine in first:
                message = f"the host {quoted(name)} is in {role} twice; it is also {dotted(first[machine])}"
                yield Finding(path, message, "use `instances_per_host` for more instances on a host")
                continue
            first[machine] = path
            login = (
                (_at(entry, ("ssh_user",)), _at(entry, ("ssh_port",))) if isinstance(entry, Mapping) else (None, None)
            )
            other_path, other = logins.setdefault(machine, (path, login))
            if other != login:
                message = f"the host {quoted(name)} has another ssh_user or ssh_port than as {dotted(other_path)}"
                yield Finding(path, message, "give the same in both places")


def _local_among_others(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Without an address, ``local`` is 127.0.0.1, which other machines cannot connect to."""
    hosts = [host for role in ROLES for host in _hosts_of(data, role)]
    router = _at(data, ("router", "host"))
    names = [name for _, name, _ in hosts] + ([str(router)] if isinstance(router, str) else [])
    remote = next((name for name in names if not is_local(name)), None)
    if remote is None:
        return
    for path, name, entry in hosts:
        if is_local(name) and (not isinstance(entry, Mapping) or entry.get("address") is None):
            message = f"{name} needs an address here, because {quoted(remote)} is another machine and must reach it"
            yield Finding(path, message, f"write {{name: {name}, address: ADDRESS}}")
