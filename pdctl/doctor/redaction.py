"""Takes names, addresses and ids out of values, the same way wherever they are. Pure.

Each thing gets an alias that stays the same within one :class:`Redactor` and says nothing about the original. Aliases
keep what checks look at: addresses of one subnet stay in one subnet, private ones stay private, ids keep their kind
(``sg-...``), and a name that resolves goes on resolving.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdctl.spec import is_local, looks_secret

REDACTED = "redacted"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Logins that images come with: they name nobody.
_USUAL_USERS = _words("root ubuntu ec2-user admin centos debian rocky nobody user")
# Words of the facts themselves. A host that is called so is renamed where hosts stand, and not in running text.
_COMMON = _words("""
    active amazon api aws backend bash cache channel container cpu cuda decode default docker done down ec2 efa error
    eth0 ethernet fabric false folder gpu handshake head hf_cache home host hosts http import in-use infiniband init
    ipv4 ipv6 kubernetes libfabric linux lo local localhost lxc memory metrics name network neuron nixl no no-listener
    node none not-allowed not-local not-tried notify nvidia open podman port prefill probe pull push python python3
    rank refused register roce root router server shm side ssh start tcp telemetry timeout tmp torch true ucx udp
    unreachable up user verify vllm write wrong-peer worker
    """)
# Variables whose values are settings of public software. All others may hold anything.
_SAFE_VARIABLES = re.compile(
    r"(?:FI|UCX|NIXL|NCCL|VLLM|OMP|NEURON|CUDA|EFA|RDMAV|MLX5|IBV)_[A-Z0-9_]+|PYTORCH_[A-Z0-9_]*ALLOC[A-Z0-9_]*"
    r"|HF_HOME|HF_HUB_(?:OFFLINE|CACHE)|TRANSFORMERS_OFFLINE|LD_LIBRARY_PATH"
)
_LONGEST_VALUE = 512

# Leaves of the EC2 API's answers whose values are words of the API. All other texts are replaced.
_SAFE_EC2 = _words("""
    Architecture AvailabilityZone AvailabilityZoneId BandwidthWeighting BootMode CapacityReservationPreference
    Code EndpointType EnaSupport FromPort HttpEndpoint HttpTokens Hypervisor InstanceLifecycle InstanceType
    InterfaceType IpProtocol Market MarketType Monitoring Name NetworkPerformance Platform PlatformDetails
    RootDeviceType State Status Strategy Tenancy ToPort UsageOperation VirtualizationType region Region
    """)

_HOME = r"(?:/home/|/Users/)[^/\s:'\",;]+|/root(?![\w.-])|(?:~|@HOME@)(?=/)"
_STRUCTURES = re.compile(
    rf"""
    (?P<path>(?<![\w/~.-])(?:{_HOME})(?:/[^\s:'",;)\]}}]*)?)
    |(?P<arn>\barn:aws[a-z-]*:[^\s"']+)
    |(?P<fingerprint>\bSHA256:[A-Za-z0-9+/]{{43}})
    |(?P<uuid>\b[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{12}}\b)
    |(?P<id>\b[a-z]{{1,12}}(?:-[a-z]{{2,12}})?-(?:[0-9a-f]{{17}}|[0-9a-f]{{8}})\b)
    |(?P<mac>(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{{2}}:){{5}}[0-9A-Fa-f]{{2}}(?![0-9A-Fa-f:]))
    |(?P<dashed>\bip-\d{{1,3}}-\d{{1,3}}-\d{{1,3}}-\d{{1,3}}(?![\d-]))
    |(?P<v6>(?<![0-9A-Za-z:.])(?=[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:)[0-9A-Fa-f:]{{3,}}(?![0-9A-Za-z])(?P<bits6>/\d{{1,3}})?)
    |(?P<v4>(?<![0-9A-Za-z.])(?:\d{{1,3}}\.){{3}}\d{{1,3}}(?![0-9A-Za-z]|\.\d)(?P<bits4>/\d{{1,2}})?)
    """,
    re.VERBOSE,
)
_ACCOUNT = re.compile(r"(?<!\d)\d{12}(?!\d)")
_VERSION_KEY = re.compile(r"(?:^|_)version$|^(?:kernel|python|os)$")
# Mappings whose keys are names, addresses or ids.
_KEYED_BY_NAMES = _words(
    "hosts unreachable resolved instances security_groups subnets placement_groups prefix_lists not_found refused"
)
_HOST_KEYS = _words("name host hosts source target prefill decode hostname not_probed")
_DROPPED = _words("ssh_user ssh_port profile identity_file config_file")
_OPAQUE_KEYS = frozenset(("machine_id", "reason"))


@dataclass(frozen=True)
class Names:
    """What is known to be a name.

    Attributes:
        hosts: names of hosts and DNS names, those of the cluster file first.
        users: login names.
        cluster: name of the cluster.
        homes: home folders that are not where homes usually are.
    """

    hosts: tuple[str, ...]
    users: tuple[str, ...] = ()
    cluster: str = ""
    homes: tuple[str, ...] = ()


class Redactor:
    """Replaces what identifies people, machines and accounts by aliases.

    Args:
        names: what is a name, which cannot be told from the text alone.
        texts: everything that will be redacted, as text, so that no alias is by chance the original of another thing.
        key: decides the aliases of addresses; random unless given (by tests).
    """

    def __init__(self, names: Names, texts: str, *, key: bytes | None = None) -> None:
        self._addresses = _address_map(texts, key)
        self._paths: dict[str, str] = {}
        self._numbered: dict[tuple[str, str], str] = {}
        originals = {name.lower() for name in (*names.hosts, *names.users, names.cluster)}
        self._hosts = self._aliases([name for name in names.hosts if not is_local(name)], "h", originals)
        users = [user for user in names.users if user not in _USUAL_USERS]
        self._users = self._aliases(users, "user", originals)
        self._cluster = self._aliases([names.cluster] if names.cluster else [], "cluster", originals)
        self._homes = tuple(sorted((home for home in names.homes if len(home) > 1), key=len, reverse=True))
        self._tokens = {**self._users, **self._cluster, **self._hosts}
        self._pattern = _token_pattern(self._tokens)

    def _aliases(self, names: Iterable[str], prefix: str, originals: set[str]) -> dict[str, str]:
        while any(re.fullmatch(rf"{prefix}\d+", original) for original in originals):
            prefix += "x"
        aliases: dict[str, str] = {}
        for name in names:
            if name.lower() not in aliases:
                address = _address(name)
                aliases[name.lower()] = (
                    f"{prefix}{len(aliases) + 1}" if address is None else str(self._addresses[address])
                )
        return aliases

    def host(self, name: str) -> str:
        """The alias of a host's name; other texts are treated by :meth:`text`."""
        return self._hosts.get(name.lower()) or self.text(name)

    def cluster(self, name: str) -> str:
        """The alias of the cluster's name."""
        return self._cluster.get(name.lower(), name)

    def text(self, text: str) -> str:
        """A text with everything replaced that is known by its shape or as a name."""
        home = self._home_of(text)
        if home is not None and "\n" not in text:
            return self._path(text)
        # Structures first, cut out of the text, so that no name is looked for inside an alias.
        parts: list[str] = []
        end = 0
        for match in _STRUCTURES.finditer(text):
            parts += [self._replace_names(text[end : match.start()]), self._structure(match)]
            end = match.end()
        return "".join([*parts, self._replace_names(text[end:])])

    def value(self, value: Any, key: str = "", *, ec2: bool = False) -> Any:
        """A JSON value with every text in it redacted.

        Args:
            value: what :func:`json.loads` may return.
            key: the key that it stands under.
            ec2: whether this is an answer of the EC2 API, where texts may be names that people gave.
        """
        if isinstance(value, str):
            return self._ec2_leaf(value, key) if ec2 else self._leaf(value, key)
        if isinstance(value, Mapping):
            if key in ("env", "environment"):
                return {str(name): self._variable(str(name), entry) for name, entry in value.items()}
            if key in _KEYED_BY_NAMES:
                # What stands under a name is told by the mapping: {"resolved": {NAME: [ADDRESS]}}.
                return {
                    self._name(str(name), ec2=ec2): self.value(
                        entry, "" if isinstance(entry, Mapping) else key, ec2=ec2
                    )
                    for name, entry in value.items()
                }
            return {
                str(name): self.value(entry, str(name), ec2=ec2)
                for name, entry in value.items()
                if name not in _DROPPED
            }
        if isinstance(value, (list, tuple)):
            return [self.value(entry, "" if isinstance(entry, Mapping) else key, ec2=ec2) for entry in value]
        return value

    def _leaf(self, text: str, key: str) -> str:
        if key in _HOST_KEYS and text.lower() in self._hosts:
            return self._hosts[text.lower()]
        if key == "cluster":
            return self.cluster(text)
        if key in _OPAQUE_KEYS:
            return self._number("text", text)
        if _VERSION_KEY.search(key) and not self._home_of(text):
            # Four numbers with dots between them are a version here.
            return self._replace_names(text)
        shown = self.text(text)
        # Twelve digits: elsewhere they are a number of bytes as well.
        return _ACCOUNT.sub(lambda match: self._number("account", match[0]), shown) if key == "refused" else shown

    def _ec2_leaf(self, text: str, key: str) -> str:
        match = _STRUCTURES.fullmatch(text)
        if match is not None:
            return self._structure(match)
        if text == "default" or key in _SAFE_EC2:
            return text
        return self._number("text", text)

    def _name(self, name: str, *, ec2: bool) -> str:
        if name.lower() in self._hosts:
            return self._hosts[name.lower()]
        return self._ec2_leaf(name, "") if ec2 else self.text(name)

    def _variable(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)  # {from_env: NAME}: a name, not a value
        text = str(value)
        safe = _SAFE_VARIABLES.fullmatch(name) and not looks_secret(name) and len(text) <= _LONGEST_VALUE
        return self.text(text) if safe else REDACTED

    def _replace_names(self, text: str) -> str:
        for home in self._homes:
            text = re.sub(
                rf"(?<![\w/.-]){re.escape(home)}(?:/[^\s:'\",;)\]}}]*)?(?![\w-])", lambda m: self._path(m[0]), text
            )
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._tokens[match[0].lower()], text)

    def _structure(self, match: re.Match[str]) -> str:
        text = match[0]
        kind = match.lastgroup or ""
        if match["path"] is not None:
            return self._path(text)
        if match["v4"] is not None or match["v6"] is not None:
            return self._shown_address(text)
        if kind == "dashed":
            address = _address(text[3:].replace("-", "."))
            return text if address is None else "ip-" + str(self._addresses[address]).replace(".", "-")
        if kind == "fingerprint":
            return f"SHA256:{REDACTED}"
        if kind == "id":
            prefix, _, digits = text.rpartition("-")
            return self._number(prefix, text, form=f"{prefix}-{{:0{len(digits)}x}}")
        forms = {"uuid": "00000000-0000-0000-0000-{:012x}", "mac": "02:00:00:{}", "arn": "arn:aws:" + REDACTED + "-{}"}
        if kind == "mac":
            number = int(self._number("mac", text.lower(), form="{}"))
            return "02:00:00:" + ":".join(f"{byte:02x}" for byte in number.to_bytes(3, "big"))
        return self._number(kind, text.lower(), form=forms[kind])

    def _shown_address(self, text: str) -> str:
        shown, slash, bits = text.partition("/")
        address, rest = _begins_with_address(shown)
        if address is None:
            return self._replace_names(text)
        if rest:
            return str(self._addresses[address]) + self._replace_names(text[len(shown) - len(rest) :])
        if slash and int(bits) <= address.max_prefixlen:
            network = ipaddress.ip_network(f"{address}/{bits}", strict=False)
            if network.network_address == address and network.prefixlen < address.max_prefixlen:
                return f"{self._addresses.network(network)}{slash}{bits}"
        alias = self._addresses[address]
        # GIDs are written in full.
        exploded = isinstance(alias, ipaddress.IPv6Address) and len(shown) == 39
        return (alias.exploded if exploded else str(alias)) + slash + bits

    def _home_of(self, text: str) -> str | None:
        if re.match(rf"(?:{_HOME})(?:/|$)", text):
            return text
        return next((home for home in self._homes if text == home or text.startswith(f"{home}/")), None)

    def _path(self, path: str) -> str:
        """An alias of a path under a home: the home's alias, and a number for all that is below it."""
        if path not in self._paths:
            match = re.match(rf"(?:{_HOME})", path)
            home = match[0] if match else next(home for home in self._homes if path.startswith(home))
            below = path[len(home) :].strip("/")
            if home in ("/root", "~", "@HOME@"):
                shown = home
            elif match:
                folder, _, user = home.rpartition("/")
                shown = f"{folder}/{self._users.get(user.lower()) or self._number('user', user, form='login{}')}"
            else:
                shown = self._number("home", home, form="/home/home{}")
            self._paths[path] = shown + (f"/{self._number('path', below)}" if below else "")
        return self._paths[path]

    def _number(self, kind: str, original: str, *, form: str = "") -> str:
        if (kind, original) not in self._numbered:
            number = 1 + sum(1 for known, _ in self._numbered if known == kind)
            self._numbered[kind, original] = (form or f"{kind}{{}}").format(number)
        return self._numbered[kind, original]


def _token_pattern(tokens: Mapping[str, str]) -> re.Pattern[str] | None:
    words = [
        token
        for token in tokens
        if len(token) > 1 and token not in _COMMON and any(letter.isalpha() for letter in token)
    ]
    if not words:
        return None
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.compile(rf"(?<![A-Za-z0-9])(?:{longest_first})(?![A-Za-z0-9])", re.IGNORECASE)


# --- addresses ---------------------------------------------------------------------------------------------------

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Mean the same on every machine, and are kept.
_KEPT = tuple(
    ipaddress.ip_network(text)
    for text in ("0.0.0.0/8", "127.0.0.0/8", "169.254.169.254/32", "224.0.0.0/3", "::/127", "ff00::/8")
)
# Their first bits are kept, because checks tell these kinds of addresses apart.
_KINDS = tuple(
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10", "fe80::/64", "fc00::/7"
    )
)  # fmt: skip
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")


class _AddressMap:
    """A keyed permutation of addresses that keeps common prefixes common: each bit is flipped or not, depending on the
    key and the bits before it.
    """

    def __init__(self, key: bytes, *, keep_kinds: bool) -> None:
        self._key = key
        self._keep_kinds = keep_kinds
        self._known: dict[_Address, _Address] = {}

    def __getitem__(self, address: _Address) -> _Address:
        if address not in self._known:
            self._known[address] = self._map(address, address.max_prefixlen)
        return self._known[address]

    def network(self, network: _Network) -> _Address:
        """The first address of the network that the addresses in this one come to be in."""
        return self._map(network.network_address, network.prefixlen)

    def _map(self, address: _Address, bits: int) -> _Address:
        if _is_kept(address):
            return address
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            return ipaddress.IPv6Address(int(_MAPPED.network_address) | int(self[address.ipv4_mapped]))
        width = address.max_prefixlen
        kept_bits = 0
        if self._keep_kinds:
            kinds = (kind.prefixlen for kind in _KINDS if kind.version == address.version and address in kind)
            kept_bits = next(kinds, width // 8 if width == 128 else 8)
        number = int(address)
        result = number
        for position in range(kept_bits, bits):
            before = number >> (width - position)
            digest = hashlib.blake2b(b"%d %d %d" % (width, position, before), key=self._key, digest_size=1).digest()
            result ^= (digest[0] & 1) << (width - 1 - position)
        return type(address)(result)


def _address_map(texts: str, key: bytes | None) -> _AddressMap:
    """A map whose results are none of the addresses that occur."""
    found = set()
    for match in _STRUCTURES.finditer(texts):
        text = match["v4"] or match["v6"]
        address = _begins_with_address(text.partition("/")[0])[0] if text else None
        if address is None and match["dashed"]:
            address = _address(match["dashed"][3:].replace("-", "."))
        if address is not None and not _is_kept(address):
            found.add(address)
    attempt = 0
    while True:
        seed = secrets.token_bytes(32) if key is None else hashlib.sha256(key + b"%d" % attempt).digest()
        # Small private ranges that are nearly used up leave no free aliases of their kind.
        addresses = _AddressMap(seed, keep_kinds=attempt < 64)
        if not any(addresses[address] in found for address in found):
            return addresses
        attempt += 1


def _is_kept(address: _Address) -> bool:
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any((inner or address) in kept for kept in _KEPT if kept.version == (inner or address).version)


def _begins_with_address(text: str) -> tuple[_Address | None, str]:
    """The longest address that a text begins with, and what comes after it: a colon may belong to the sentence."""
    ends = range(len(text), 1, -1) if ":" in text else (len(text),)
    for end in ends:
        address = _address(text[:end])
        if address is not None:
            return address, text[end:]
    return None, text


def _address(text: str) -> _Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
