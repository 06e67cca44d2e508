"""Opening SSH connections: the way to the server, key exchange, host key, login; all within one time-out.

A connection is a :class:`fabric.Connection`, told everything: its own reading of the SSH configuration is switched off
because it visits the hosts of a ProxyJump in reverse order, opens a connection to a jump host for every host behind it
(which a jump host's MaxStartups then cuts off), trusts unknown host keys, and bounds only a part of the waiting.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from fabric import Config, Connection
from paramiko.channel import Channel
from paramiko.client import MissingHostKeyPolicy, SSHClient
from paramiko.config import SSHConfig
from paramiko.pkey import PKey
from paramiko.ssh_exception import ChannelException, IncompatiblePeer, SSHException
from paramiko.transport import Transport

from pdctl.errors import HostError, HostUnreachable, PdctlError
from pdctl.hosts.base import Deadline
from pdctl.hosts.identities import Identities, KeyFiles, PublicKeyLogin
from pdctl.hosts.known_hosts import HostKeyChecker, order_algorithms
from pdctl.hosts.shared import Shared
from pdctl.hosts.ssh_config import Destination, Hop, Route
from pdctl.hosts.ssh_link import Link, is_refusal

KEEPALIVE_S = 15
"""How often an idle connection says something, so that firewalls in between do not forget it."""

DEAD_PEER_S = 30
"""How long sent bytes may stay unanswered by the other side's kernel until the connection counts as lost."""

# paramiko logs every lost connection; where no logging is set up, Python would print that to the terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_PROXY_END_S = 1.0
_PROHIBITED = 1  # SSH_OPEN_ADMINISTRATIVELY_PROHIBITED of RFC 4254, 5.1
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}


class Connector:
    """Opens connections of one fleet. Jump hosts are connected to once, and shared. Safe to use from several threads.

    Args:
        checker: decides on host keys; the same for jump hosts.
        environ: environment variables for proxy commands.
        home: home folder of the user.
    """

    def __init__(self, checker: HostKeyChecker, *, environ: Mapping[str, str], home: Path) -> None:
        self._checker = checker
        self._environ = environ
        self._home = home
        self._key_files = KeyFiles()
        self._gateways: dict[Route, Shared[Link]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def connect(self, destination: Destination) -> Link:
        """Connect to a host, by way of its jump hosts.

        Raises:
            HostError: one of its kinds; the message names the jump host if that is where it failed.
        """
        return self._connect(destination.route, Deadline(destination.connect_timeout_s))

    def close(self) -> None:
        """Close the connections to jump hosts."""
        with self._lock:
            self._closed = True
            gateways = list(self._gateways.values())
        for gateway in gateways:
            gateway.close()

    def _connect(self, route: Route, deadline: Deadline) -> Link:
        hop = route[-1]
        stream: Any
        way: _ProxyCommand | None = None
        if len(route) > 1:
            stream = self._through(route[:-1], hop, deadline)
        elif hop.proxy_command is not None:
            way = _ProxyCommand(hop, self._environ)
            stream = way.stream
        else:
            stream = open_socket(hop, deadline)
        try:
            return self._log_in(hop, stream, deadline, way)
        except PdctlError as error:
            if way is not None and isinstance(error, HostUnreachable):
                raise way.explain(error) from None
            raise

    def _through(self, route: Route, hop: Hop, deadline: Deadline) -> Channel:
        gateway = route[-1]
        with self._lock:
            if self._closed:
                raise HostError(hop.name, "its connection was closed")
            shared = self._gateways.setdefault(route, Shared(lambda link: link.is_alive))
        try:
            link = shared.get(lambda: self._connect(route, deadline), deadline)
        except HostError as error:
            # Several hosts may have waited for this one: each gets its own.
            failure = type(error)(hop.name, f"jump host {error.message}", hint=error.hint)
            raise failure from None
        if link is None:
            raise HostUnreachable(hop.name, f"jump host {gateway.name}: no connection within {deadline.timeout_s:g} s")
        answer = Deadline(max(deadline.remaining_s, 0.1))
        try:
            return link.transport.open_channel(
                "direct-tcpip", (hop.address, hop.port), ("127.0.0.1", 0), timeout=answer.timeout_s
            )
        except (SSHException, EOFError, OSError) as error:
            if is_refusal(error, link.transport, answer):
                raise _not_forwarded(hop, gateway, error) from None
            if not link.is_alive:
                raise HostUnreachable(
                    hop.name, f"the connection to its jump host {gateway.name} was lost: {_words(error)}"
                ) from None
            raise HostUnreachable(
                hop.name,
                f"jump host {gateway.name} could not connect to {hop.address} port {hop.port} within "
                f"{deadline.timeout_s:g} s",
                hint=_HINT_NO_ANSWER,
            ) from None

    def _log_in(self, hop: Hop, stream: Any, deadline: Deadline, way: _ProxyCommand | None) -> Link:
        transports: list[Transport] = []

        def make_transport(sock: Any, **options: Any) -> Transport:
            transport = Transport(sock, **options)
            security = transport.get_security_options()
            security.key_types = order_algorithms(self._checker.algorithms(hop.known_as), tuple(security.key_types))
            # Of no public name, and 15 s otherwise, however little time is left.
            transport.handshake_timeout = deadline.remaining_s
            transports.append(transport)
            return transport

        login = PublicKeyLogin(hop, Identities(hop, self._key_files, self._home), deadline)
        remaining_s = max(deadline.remaining_s, 0.1)
        connection = Connection(
            hop.address,
            user=hop.user,
            port=hop.port,
            # Reads nothing: neither fabric's settings nor the SSH configuration. One for each connection, because
            # fabric changes it while it is used, and then another thread finds it empty.
            config=Config(lazy=True, ssh_config=SSHConfig()),
            gateway=False,
            forward_agent=False,
            connect_kwargs={
                "sock": stream,
                "timeout": remaining_s,
                "banner_timeout": remaining_s,
                "auth_timeout": remaining_s,
                "transport_factory": make_transport,
                "auth_strategy": login,
            },
        )
        connection.client.set_missing_host_key_policy(_Policy(hop, self._checker))
        try:
            connection.open()
            transport = transports[0]
            transport.set_keepalive(KEEPALIVE_S)
        except BaseException as error:
            connection.client.close()
            stream.close()
            if isinstance(error, (SSHException, EOFError, OSError)):
                raise _explain(error, hop, transports[0] if transports else None, deadline) from None
            raise
        return Link(transport, [connection, *([way] if way is not None else [])])


class _Policy(MissingHostKeyPolicy):
    """Hands every host key to the checker: the client is given no known keys of its own."""

    def __init__(self, hop: Hop, checker: HostKeyChecker) -> None:
        self._hop = hop
        self._checker = checker

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:  # noqa: ARG002
        self._checker.check(self._hop.name, self._hop.known_as, key.get_name(), key.asbytes())


def open_socket(hop: Hop, deadline: Deadline) -> socket.socket:
    """A TCP connection to a server; all addresses of its name are tried.

    Raises:
        HostUnreachable: the name has no address, or none answers.
    """
    addresses = _resolve(hop, deadline)
    failures: list[tuple[str, OSError]] = []
    for number, (family, address) in enumerate(addresses):
        stream = socket.socket(family, socket.SOCK_STREAM)
        try:
            # An address that swallows packets must leave time for the next one.
            stream.settimeout(max(deadline.remaining_s / (len(addresses) - number), 0.1))
            stream.connect(address)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_S * 1000)
        except OSError as error:
            stream.close()
            failures.append((str(address[0]), error))
        except BaseException:
            stream.close()
            raise
        else:
            return stream
    raise _not_connected(hop, failures, deadline)


def _resolve(hop: Hop, deadline: Deadline) -> list[tuple[int, tuple[Any, ...]]]:
    family = _FAMILIES.get(hop.family, socket.AF_UNSPEC)
    answers: queue.SimpleQueue[list[Any] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask(flags: int) -> list[Any]:
        return socket.getaddrinfo(hop.address, hop.port, family, socket.SOCK_STREAM, 0, flags)

    def ask_and_tell() -> None:
        try:
            answers.put(ask(0))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    try:
        found = ask(socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        # A resolver can take far longer than we want to wait, and cannot be interrupted.
        threading.Thread(target=ask_and_tell, name=f"resolve {hop.address}", daemon=True).start()
        try:
            answer = answers.get(timeout=deadline.remaining_s)
        except queue.Empty:
            raise HostUnreachable(
                hop.name,
                f"its name {hop.address} was not resolved within {deadline.timeout_s:g} s",
                hint="is the name server of this machine reachable?",
            ) from None
        if isinstance(answer, BaseException):
            words = answer.strerror if isinstance(answer, OSError) else str(answer)
            raise HostUnreachable(
                hop.name,
                f"its name {hop.address} does not resolve: {words}",
                hint="check the spelling, or give it a HostName in ~/.ssh/config",
            ) from None
        found = answer
    return list(dict.fromkeys((int(entry[0]), entry[4]) for entry in found))


_HINT_NO_ANSWER = (
    "is the host up, the address right, and does a firewall or security group let the port of sshd through from here?"
)


def _not_connected(hop: Hop, failures: list[tuple[str, OSError]], deadline: Deadline) -> HostUnreachable:
    where = f"port {hop.port} of {hop.address}"
    others = {address for address, _ in failures} - {hop.address}
    if others:
        where += f" ({', '.join(sorted(others))})"
    errors = [error for _, error in failures]
    if any(isinstance(error, ConnectionRefusedError) for error in errors):
        return HostUnreachable(
            hop.name,
            f"{where} refuses connections",
            hint="the host answers, but no sshd listens there: is sshd running, and the port right?",
        )
    if any(error.errno in _UNREACHABLE for error in errors):
        words = next(error.strerror for error in errors if error.errno in _UNREACHABLE)
        return HostUnreachable(
            hop.name,
            f"there is no way to {where}: {words}",
            hint="is the host up, and on a network that this one knows?",
        )
    if all(isinstance(error, TimeoutError) for error in errors):
        return HostUnreachable(
            hop.name, f"{where} did not answer within {deadline.timeout_s:g} s", hint=_HINT_NO_ANSWER
        )
    return HostUnreachable(hop.name, f"{where} cannot be connected to: {'; '.join(map(_words, errors))}")


def _not_forwarded(hop: Hop, gateway: Hop, error: Exception) -> HostUnreachable:
    where = f"port {hop.port} of {hop.address}"
    if isinstance(error, ChannelException) and error.code == _PROHIBITED:
        return HostUnreachable(
            hop.name,
            f"jump host {gateway.name} does not allow connections to {where}",
            hint="its sshd_config forbids it: AllowTcpForwarding, PermitOpen, or the key's options in authorized_keys",
        )
    words = error.text if isinstance(error, ChannelException) else str(error)
    return HostUnreachable(
        hop.name,
        f"jump host {gateway.name} cannot connect to {where}: {words}",
        hint="the name and address must be right as the jump host sees them",
    )


def _explain(error: Exception, hop: Hop, transport: Transport | None, deadline: Deadline) -> HostError:
    """Say for people why a key exchange or login broke off."""
    where = f"port {hop.port} of {hop.address}"
    limit = f"within {deadline.timeout_s:g} s"
    words = _words(error)
    banner = transport.remote_version if transport is not None else ""
    if banner and not banner.startswith("SSH-"):
        banner = ""
    if "Indecipherable" in words:
        return HostUnreachable(
            hop.name, f"what listens at {where} is no SSH server: {words}", hint="is the port right (`ssh_port`)?"
        )
    if isinstance(error, IncompatiblePeer):
        return HostUnreachable(
            hop.name,
            f"its SSH server ({banner}) has no algorithm in common with pdctl: {words}",
            hint="an old server: update it, or enable an Ed25519 or RSA-SHA2 host key and Curve25519 there",
        )
    if deadline.passed:
        if not banner:
            return HostUnreachable(
                hop.name,
                f"{where} accepts connections, but sent no SSH greeting {limit}",
                hint="the host may be overloaded or hanging, or something else than sshd listens there",
            )
        return HostUnreachable(
            hop.name,
            f"the key exchange with its SSH server ({banner}) did not end {limit}",
            hint="the host may be overloaded, or large packets are lost on the way (MTU)",
        )
    if not banner:
        return HostUnreachable(
            hop.name,
            f"{where} accepted the connection and closed it without an SSH greeting",
            hint="sshd turns connections away when there are too many (MaxStartups), or by address (fail2ban)",
        )
    return HostUnreachable(hop.name, f"the connection to its SSH server ({banner}) broke off: {words}")


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


class _ProxyCommand:
    """A ProxyCommand, and a socket that is both its input and its output.

    paramiko's own class reads the pipes of the process with select(), which fails with many open files.
    """

    def __init__(self, hop: Hop, environ: Mapping[str, str]) -> None:
        self._hop = hop
        self._said = ""
        self.stream, theirs = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the thread that waits for the process
        with theirs:
            # As ssh does: a shell that replaces itself by the command.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {hop.proxy_command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                env=dict(environ),
                start_new_session=True,
            )
        self._waiter = threading.Thread(target=self._wait, args=(errors,), name=f"proxy {hop.name}", daemon=True)
        self._waiter.start()

    def explain(self, error: HostUnreachable) -> HostUnreachable:
        """Add what the command said to an error."""
        self.close()
        self._waiter.join(_PROXY_END_S)
        if not self._said:
            return error
        return HostUnreachable(
            self._hop.name, f"its ProxyCommand failed: {self._said}", hint=f"the command is `{self._hop.proxy_command}`"
        )

    def close(self) -> None:
        """End the command."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def _wait(self, errors: IO[bytes]) -> None:
        with errors:
            self._process.wait()
            errors.seek(0)
            self._said = " | ".join(errors.read(2000).decode(errors="replace").split("\n")).strip(" |")
