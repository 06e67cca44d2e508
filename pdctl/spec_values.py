"""What single values of a cluster file may be, and what is said about those that may not.

Each reader function takes a value as it is in the file, returns what the models hold, or raises :class:`Misfit` with
messages for people. The annotated types at the end hand them to pydantic.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict

from pdctl.spec_yaml import Expanded, KeyPath, Unusable, describe, quoted, resolve_plain

MAX_DEVICE = 1023
"""Highest number of a device on a host."""
MAX_SECONDS = 86400.0
"""Longest time-out, a day: more is a slip, and very large numbers overflow the clocks they end up in."""

Scalar: TypeAlias = str | int | float | bool
ArgumentValue: TypeAlias = Scalar | list[Scalar] | dict[str, Any]

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOST_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,252}")
_ARGUMENT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*(?:\.[A-Za-z0-9_.-]+)?")
_ONE_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-.*)?\}", re.DOTALL)
# Endings of the words between underscores: HF_TOKEN and HFTOKEN are secrets, MAX_TOKENS and TOKENIZERS_PARALLELISM not.
_SECRET_WORD = re.compile(r"(?:TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY)\d*")
_SECRET_PAIR = re.compile(r"(?:^|_)(?:API|PRIVATE|SECRET|ACCESS|ENCRYPTION)_KEY\d*(?:_|$)")
# Names that point to a file with a secret hold none themselves.
_NAMES_A_FILE = re.compile(r"_(?:FILE|PATH|DIR|FOLDER)$|^GOOGLE_APPLICATION_CREDENTIALS$")
_SECRET_ARGUMENTS = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}


@dataclass(frozen=True)
class Finding:
    """One thing wrong at ``path`` below the value that a reader function was given."""

    path: KeyPath
    message: str
    hint: str = ""


class Misfit(ValueError):
    """What a reader function raises: everything wrong with one value. Empty if it was reported before."""

    def __init__(self, *findings: Finding) -> None:
        self.findings = findings
        super().__init__("; ".join(finding.message for finding in findings) or "unusable")


def misfit(expected: str, value: Any, hint: str = "") -> Misfit:
    """Make the usual :class:`Misfit`: what was expected, and what was found."""
    if isinstance(value, Unusable):
        return Misfit()
    return Misfit(Finding((), f"expected {expected}, found {describe(value)}", hint))


def quote_hint(value: Any) -> str:
    """Hint for a number or switch where a text is wanted; YAML tells them apart by the quotes."""
    return "quote it if it is meant as text" if isinstance(value, (bool, int, float)) else ""


def nearest(word: str, choices: Sequence[str]) -> str:
    """The choice that ``word`` may be a slip for; empty if none is near."""
    # The comparison is quadratic: nobody mistypes a key into something much longer.
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6) if len(word) <= 60 else []
    return near[0] if near else ""


def _unquoted(value: Any) -> Any:
    """An unquoted ``${PORT}`` is read like what it expands to."""
    return resolve_plain(str(value)) if isinstance(value, Expanded) and value.plain else value


def whole_number(minimum: int, maximum: int) -> BeforeValidator:
    """A whole number within bounds, both included."""
    expected = f"a whole number >= {minimum} and <= {maximum}"

    def read(value: Any) -> int:
        number = _unquoted(value)
        if not isinstance(number, int) or isinstance(number, bool) or not minimum <= number <= maximum:
            raise misfit(expected, value)
        return number

    return BeforeValidator(read)


def _read_seconds(value: Any) -> float:
    number = _unquoted(value)
    if isinstance(number, (int, float)) and not isinstance(number, bool) and 0 < number <= MAX_SECONDS:
        return float(number)
    raise misfit(f"a number of seconds > 0 and <= {MAX_SECONDS:.0f}", value)


def one_of(*choices: str) -> BeforeValidator:
    """One of a few texts, with a suggestion for a slip."""

    def read(value: Any) -> str:
        if isinstance(value, str) and str(value) in choices:
            return str(value)
        near = nearest(str(value).lower(), choices) if isinstance(value, str) else ""
        raise misfit("one of " + ", ".join(choices), value, f"did you mean `{near}`?" if near else "")

    return BeforeValidator(read)


def text_like(
    expected: str, pattern: str = r"[^-\s].*", advise: Callable[[str], str] = lambda _: ""
) -> BeforeValidator:
    """A text in one line that matches ``pattern`` whole; ``advise`` gives a hint for one that does not."""
    compiled = re.compile(pattern)

    def read(value: Any) -> str:
        # isprintable: no line breaks and no control characters.
        if isinstance(value, str) and compiled.fullmatch(value) and value.isprintable() and value == value.strip():
            return str(value)
        if isinstance(value, (bool, int, float)):
            raise misfit(expected, value, quote_hint(value))
        # An expanded text is not repeated in advice: it may be a secret.
        raise misfit(expected, value, advise(value) if type(value) is str else "")

    return BeforeValidator(read)


def _advise_host(value: str) -> str:
    user, at, _ = value.partition("@")
    if at and user:
        return f"give the login by itself, as `ssh_user: {user}`" if HOST_NAME.fullmatch(user) else ""
    if ":" in value:
        return "give a port as `ssh_port`, and an IPv6 address as `address`"
    return ""


def _advise_cluster(value: str) -> str:
    fitting = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")[:40].strip("-")
    return f"for example `{fitting}`" if re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", fitting) else ""


def _advise_policy(value: str) -> str:
    fitting = value.lower().replace("-", "_")
    return f"did you mean `{fitting}`?" if re.fullmatch(r"[a-z][a-z0-9_]*", fitting) else ""


def _advise_region(value: str) -> str:
    return f"`{value}` looks like a zone; its region is `{value[:-1]}`" if re.fullmatch(r".*\d[a-z]", value) else ""


def _advise_check(value: str) -> str:
    fitting = re.sub(r"[\s_-]+", "", value).upper()
    return f"did you mean `{fitting}`?" if re.fullmatch(r"[A-Z]{2,5}[0-9]{3}", fitting) else ""


def _read_address(value: Any) -> str:
    expected = "an IP address or a DNS name that the other hosts can connect to"
    if not isinstance(value, str):
        raise misfit(expected, value)
    text = str(value)
    if text.startswith("[") and text.endswith("]"):
        raise misfit(expected, value, "write an IPv6 address without brackets")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        if HOST_NAME.fullmatch(text) and not re.fullmatch(r"[0-9.]+", text):
            return text
        hint = "leave the port out; it is given as `port`" if re.fullmatch(r"[^:]+:\d+", text) else ""
        raise misfit(expected, value, hint) from None
    if "%" in text:
        raise misfit(expected, value, "a link-local address with a zone does not reach other hosts")
    if address.is_unspecified:
        raise misfit(expected, value, "name the address of one interface")
    return text


def entries(what: str, minimum: int, maximum: int) -> BeforeValidator:
    """A list with a bounded number of entries, which are read by themselves."""

    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            example = str(value) if type(value) is str and HOST_NAME.fullmatch(value) else ""
            raise misfit(f"a list of {what}", value, f"write [{example}]" if example else "")
        if not minimum <= len(value) <= maximum:
            message = f"expected {minimum} to {maximum} {what}, found {len(value)}"
            raise Misfit(Finding((), message))
        return list(value)

    return BeforeValidator(read)


def _read_devices(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise misfit("a list of device numbers, such as [0, 1]", value)
    if not value:
        raise misfit("at least one device number", value, "leave `devices` out to let pdctl choose")
    findings: list[Finding] = []
    first: dict[int, int] = {}
    for index, entry in enumerate(value):
        number = _unquoted(entry)
        if isinstance(entry, Unusable):
            continue
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_DEVICE:
            message = f"expected a device number from 0 to {MAX_DEVICE}, found {describe(entry)}"
            findings.append(Finding((index,), message))
        elif number in first:
            findings.append(Finding((index,), f"device {number} is in the list twice"))
        else:
            first[number] = index
    if findings or len(first) != len(value):
        raise Misfit(*findings)
    return list(first)


def _read_environment(value: Any) -> dict[str, Any]:
    """Environment of processes: names to texts or :class:`SecretRef`."""
    if not isinstance(value, Mapping):
        raise misfit("a mapping of environment variables (`NAME: value` lines)", value)
    findings: list[Finding] = []
    environment: dict[str, Any] = {}
    for name, entry in value.items():
        unfit = _variable_name_problem(name)
        if unfit is not None:
            findings.append(Finding((str(name),), *unfit))
        elif isinstance(entry, SecretRef):
            environment[name] = entry
        elif isinstance(entry, Mapping):
            _read_secret_reference(name, entry, environment, findings)
        elif looks_secret(name) and not isinstance(entry, (list, tuple)):
            findings.append(Finding((name,), *_secret_in_the_open(name, entry)))
        elif isinstance(entry, bool):
            environment[name] = "true" if entry else "false"
        elif isinstance(entry, (str, int, float)):
            environment[name] = str(entry)
        elif not isinstance(entry, Unusable):
            hint = 'write "" for an empty value' if entry is None else ""
            message = f"expected a text, a number or {{from_env: NAME}}, found {describe(entry)}"
            findings.append(Finding((name,), message, hint))
    if findings or len(environment) != len(value):
        raise Misfit(*findings)
    return environment


def _variable_name_problem(name: Any) -> tuple[str, str] | None:
    """Message and hint if ``name`` cannot be set by a cluster file."""
    if not isinstance(name, str) or not _VARIABLE_NAME.fullmatch(name):
        expected = "letters, digits and underscores, not starting with a digit"
        return f"{describe(name)} is no name of an environment variable; expected {expected}", ""
    if name.upper().startswith("PDCTL_"):
        return "names that start with PDCTL_ are pdctl's own and cannot be set in a cluster file", "remove it"
    return None


def _read_secret_reference(
    name: str, entry: Mapping[Any, Any], environment: dict[str, Any], findings: list[Finding]
) -> None:
    source = entry.get("from_env")
    if set(entry) != {"from_env"}:
        message = f"expected a value or {{from_env: NAME}}, found a mapping with {_key_list(entry)}"
        findings.append(Finding((name,), message))
    elif isinstance(source, Expanded):
        # What it expands to may be the secret itself, which would then be shown as a variable's name.
        hint = f"write {{from_env: {_variable_of(source) or name}}}"
        findings.append(Finding((name, "from_env"), "expected the name of a variable, without $", hint))
    elif isinstance(source, str) and _VARIABLE_NAME.fullmatch(source):
        environment[name] = SecretRef(from_env=source)
    elif not isinstance(source, Unusable):
        # No quoting what is there: somebody may have put the secret itself.
        message = "expected the name of an environment variable (letters, digits, underscores)"
        findings.append(Finding((name, "from_env"), message, f"for example {{from_env: {name}}}"))


def _key_list(entry: Mapping[Any, Any]) -> str:
    return "the keys " + ", ".join(quoted(str(key)) for key in list(entry)[:5]) if entry else "no keys"


def _secret_in_the_open(name: str, entry: Any) -> tuple[str, str]:
    variable = (_variable_of(entry) if isinstance(entry, Expanded) else "") or name
    message = "this looks like a secret, and a value in the file ends up in plans and process lists"
    return message, f"write {name}: {{from_env: {variable}}} and set {variable} where you run pdctl"


def _variable_of(value: Expanded) -> str:
    match = _ONE_VARIABLE.fullmatch(value.source)
    return match[1] if match else ""


def looks_secret(name: str) -> bool:
    """Tell whether an environment variable or option of this name holds a secret (a token, password, key)."""
    upper = name.upper().replace("-", "_")
    if _NAMES_A_FILE.search(upper):
        return False
    words = upper.split("_")
    return bool(_SECRET_PAIR.search(upper)) or any(_ends_in_secret(word) for word in words)


def _ends_in_secret(word: str) -> bool:
    return any(_SECRET_WORD.fullmatch(word, start) for start in range(len(word)))


def argument_name(key: str) -> str:
    """Name of an option as pdctl uses it: dashes, no leading dashes.

    What follows a dot (``hf-overrides.rope_theta``) is a key of a nested configuration and keeps its underscores.
    """
    option, dot, nested = key.strip().lstrip("-").partition(".")
    return option.replace("_", "-") + dot + nested


def _arguments(*, mappings: bool) -> BeforeValidator:
    """Options of a program: names to scalars, lists of scalars and, where ``mappings``, JSON objects."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise misfit("a mapping of options (`option: value` lines)", value)
        findings: list[Finding] = []
        arguments: dict[str, Any] = {}
        written: dict[str, str] = {}
        for key, entry in value.items():
            name = argument_name(str(key))
            if not _ARGUMENT_NAME.fullmatch(name):
                hint = "write `option: value`" if re.search(r"[= ]", name) else ""
                findings.append(Finding((str(key),), f"{quoted(str(key))} is no name of an option", hint))
            elif name in written:
                message = f"the same option as `{written[name]}`: both are --{name}"
                findings.append(Finding((str(key),), message, "keep one of the two"))
            elif looks_secret(name):
                findings.append(Finding((str(key),), *_secret_argument(name, vllm=mappings)))
            else:
                written[name] = str(key)
                arguments[name] = _read_argument((str(key),), entry, findings, mappings)
        if findings or _holds_unusable(arguments):
            raise Misfit(*findings)
        return arguments

    return BeforeValidator(read)


def _secret_argument(name: str, *, vllm: bool) -> tuple[str, str]:
    message = f"--{name} is a secret, and every user of a host can read command lines"
    if not vllm:
        return message, "leave it out; a secret is given by `env`, as {from_env: NAME}"
    variable = _SECRET_ARGUMENTS.get(name)
    if variable is None:
        return message, "give it by `env`, as {from_env: NAME}, if vLLM reads it from there"
    return message, f"write it under `env` instead, as {variable}: {{from_env: {variable}}}"


def _read_argument(path: KeyPath, entry: Any, findings: list[Finding], mappings: bool) -> Any:
    value = _unquoted(entry)
    if isinstance(value, Expanded):
        return str(value)
    if isinstance(value, (str, bool, Unusable)):
        return value
    if isinstance(value, (int, float)):
        return _read_finite(path, value, findings)
    if isinstance(value, (list, tuple)) and value:
        return [_read_list_entry((*path, index), item, findings) for index, item in enumerate(value)]
    if isinstance(value, Mapping) and mappings:
        return _read_json(path, value, findings)
    expected = "a text, a number, true or false, a list of these" + (", or a mapping" if mappings else "")
    hint = "an option without a value is written `option: true`" if value is None else ""
    findings.append(Finding(path, f"expected {expected}, found {describe(entry)}", hint))
    return None


def _read_list_entry(path: KeyPath, entry: Any, findings: list[Finding]) -> Any:
    value = _unquoted(entry)
    if isinstance(value, Expanded):
        return str(value)
    if isinstance(value, (str, bool, Unusable)):
        return value
    if isinstance(value, (int, float)):
        return _read_finite(path, value, findings)
    findings.append(Finding(path, f"expected a text, a number, true or false, found {describe(entry)}"))
    return None


def _read_finite(path: KeyPath, value: int | float, findings: list[Finding]) -> int | float:
    if isinstance(value, float) and not math.isfinite(value):
        findings.append(Finding(path, f"expected a finite number, found {describe(value)}"))
    return value


def _read_json(path: KeyPath, entry: Any, findings: list[Finding]) -> Any:
    """A value that is passed on as JSON: anything but numbers that JSON does not have."""
    value = _unquoted(entry)
    if isinstance(value, Expanded):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _read_json((*path, str(key)), item, findings) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_read_json((*path, index), item, findings) for index, item in enumerate(value)]
    if value is None or isinstance(value, (str, bool, Unusable)):
        return value
    if isinstance(value, (int, float)):
        return _read_finite(path, value, findings)
    findings.append(Finding(path, f"expected a value that JSON has, found {describe(value)}"))
    return None


def _read_json_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise misfit("a mapping (`key: value` lines)", value)
    findings: list[Finding] = []
    read = cast("dict[str, Any]", _read_json((), value, findings))
    if findings or _holds_unusable(read):
        raise Misfit(*findings)
    return read


def _holds_unusable(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_unusable(item) for item in value.values())
    if isinstance(value, list):
        return any(_holds_unusable(item) for item in value)
    return isinstance(value, Unusable)


Port = Annotated[int, whole_number(1, 65535)]
Seconds = Annotated[float, BeforeValidator(_read_seconds)]
Devices = Annotated[list[int], BeforeValidator(_read_devices)]
Address = Annotated[str, BeforeValidator(_read_address)]
HostName = Annotated[
    str,
    text_like(
        "a host name as SSH knows it: letters, digits, `_`, `.` and `-`, not starting with `-`",
        HOST_NAME.pattern,
        _advise_host,
    ),
]
ClusterName = Annotated[
    str,
    text_like(
        "2 to 40 lower-case letters, digits and dashes, starting with a letter, not ending with a dash",
        r"[a-z][a-z0-9-]{0,38}[a-z0-9]",
        _advise_cluster,
    ),
]
ModelName = Annotated[str, text_like("a model: its name on the Hugging Face hub, or a folder on the hosts")]
PolicyName = Annotated[
    str, text_like("the name of a vllm-router policy, such as round_robin", r"[a-z][a-z0-9_]*", _advise_policy)
]
ProfileName = Annotated[str, text_like("the name of a profile of ~/.aws/config")]
JsonMapping = Annotated[dict[str, Any], BeforeValidator(_read_json_mapping)]
CheckId = Annotated[
    str, text_like("the id of a check, such as HOST004 (see `pdctl doctor list`)", r"[A-Z]{2,5}[0-9]{3}", _advise_check)
]
Reason = Annotated[str, text_like("a reason, in one line", r"\S.*")]
UserName = Annotated[str, text_like("a login name", r"[^-\s@:/][^\s@:/]*")]
FilePath = Annotated[str, text_like("the path of a file, in one line")]
Python = Annotated[str, text_like("a Python interpreter: a path, or a name on the PATH")]
Region = Annotated[
    str, text_like("an AWS region such as us-east-2", r"[a-z]{2,6}(?:-[a-z]+)+-[0-9]{1,2}", _advise_region)
]


class SecretRef(BaseModel):
    """A secret, named by the environment variable that holds it where pdctl runs. The file never has the value."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    from_env: Annotated[str, text_like("the name of an environment variable", _VARIABLE_NAME.pattern)]


EnvValue: TypeAlias = str | SecretRef
Environment = Annotated[dict[str, EnvValue], BeforeValidator(_read_environment)]
VllmArguments = Annotated[dict[str, ArgumentValue], _arguments(mappings=True)]
RouterArguments = Annotated[dict[str, Scalar | list[Scalar]], _arguments(mappings=False)]
