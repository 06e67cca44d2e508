"""All hosts of a cluster: one by one, or many at once."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from pdctl.errors import CommandTimeout, PdctlError, UsageError
from pdctl.hosts.base import Deadline, FleetSettings, Host, Login, SshSettings, is_local
from pdctl.hosts.local import LocalHost
from pdctl.hosts.shared import Closable

if TYPE_CHECKING:
    from types import TracebackType

    from pdctl.hosts.ssh import SshAccess
    from pdctl.spec import ClusterSpec

T = TypeVar("T")

_CLOSE_S = 2.0
"""How long closing connections may take; what is not closed by then ends with the process."""


class Fleet:
    """The hosts of a cluster. A context manager: leaving it closes every connection.

    Args:
        spec: the cluster file, or settings alone.
        environ: environment variables; those of this process unless given.

    Safe to use from several threads.
    """

    def __init__(self, spec: ClusterSpec | FleetSettings, *, environ: Mapping[str, str] | None = None) -> None:
        self._settings = spec if isinstance(spec, FleetSettings) else settings_from_spec(spec)
        self._environ = os.environ if environ is None else environ
        self._hosts: dict[str, Host] = {}
        self._access: SshAccess | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all hosts, in the order of the cluster file."""
        return tuple(self._settings.logins)

    def host(self, name: str) -> Host:
        """The host of that name, always the same. It is connected to when it is first used.

        Raises:
            UsageError: there is no such host, or the SSH configuration cannot be used for it.
        """
        with self._lock:
            if self._closed:
                raise UsageError(f"{name}: the connections to the hosts were closed")
            if name not in self._hosts:
                self._hosts[name] = self._make(name)
            return self._hosts[name]

    def map(
        self,
        function: Callable[[Host], T],
        names: Iterable[str],
        *,
        timeout_s: float,
        on_done: Callable[[str, T | PdctlError], None] | None = None,
    ) -> dict[str, T | PdctlError]:
        """Run a function for many hosts at once.

        Args:
            function: called with each host, in a thread of its own.
            names: the hosts; results come in this order.
            timeout_s: how long each host may take, counted from its start. A host past it gives a
                :class:`CommandTimeout`, even if its thread hangs, and the others go on.
            on_done: called in this thread for each host as soon as its result is known.

        Returns:
            per host what the function returned, or the :class:`PdctlError` that it raised.

        Raises:
            BaseException: an exception of the function that is no PdctlError; the other hosts are not waited for.
        """
        call: _FanOut[T] = _FanOut(self, function, timeout_s)
        return call.run(list(dict.fromkeys(names)), self._settings.ssh.max_parallel, on_done)

    def close(self) -> None:
        """Close every connection, and end local commands. Takes a bounded time; closing again is fine."""
        with self._lock:
            self._closed = True
            closables: list[Closable] = [*self._hosts.values(), *([self._access] if self._access is not None else [])]
            self._hosts = {}
            self._access = None

        def close_all() -> None:
            for closable in closables:
                with suppress(OSError, EOFError):
                    closable.close()

        # Closing says good-bye over connections that may be stuck.
        thread = threading.Thread(target=close_all, name="close hosts", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _make(self, name: str) -> Host:
        if name not in self._settings.logins:
            raise UsageError(f"there is no host {name} in the cluster file", hint=f"it has: {', '.join(self.names)}")
        if is_local(name):
            return LocalHost(name)
        if self._access is None:
            # Loading the SSH libraries takes a good part of a second.
            from pdctl.hosts.ssh import SshAccess

            self._access = SshAccess(self._settings.ssh, environ=self._environ, home=Path.home())
        return self._access.host(name, self._settings.logins[name])


class _FanOut(Generic[T]):
    """One call of a function for many hosts.

    Threads are daemons of our own: a ThreadPoolExecutor waits for its threads when the interpreter exits, so one hung
    host would hang the whole program then, and after Ctrl-C.
    """

    def __init__(self, fleet: Fleet, function: Callable[[Host], T], timeout_s: float) -> None:
        self._fleet = fleet
        self._function = function
        self._timeout_s = timeout_s
        self._results: queue.SimpleQueue[tuple[str, T | PdctlError | _Bug]] = queue.SimpleQueue()

    def run(
        self, names: list[str], at_once: int, on_done: Callable[[str, T | PdctlError], None] | None
    ) -> dict[str, T | PdctlError]:
        waiting = deque(names)
        running: dict[str, Deadline] = {}
        done: dict[str, T | PdctlError] = {}
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.popleft()
                running[name] = Deadline(self._timeout_s)
                threading.Thread(target=self._work, args=(name,), name=f"host {name}", daemon=True).start()
            for name, result in self._next(running):
                del running[name]
                done[name] = result
                if on_done is not None:
                    on_done(name, result)
        return {name: done[name] for name in names}

    def _next(self, running: Mapping[str, Deadline]) -> list[tuple[str, T | PdctlError]]:
        """The next result, or the hosts that are out of time."""
        try:
            name, result = self._results.get(timeout=min(deadline.remaining_s for deadline in running.values()))
        except queue.Empty:
            return [(name, self._too_long(name)) for name, deadline in running.items() if deadline.passed]
        if name not in running:
            # Given up already.
            return []
        if isinstance(result, _Bug):
            raise result.error
        return [(name, result)]

    def _work(self, name: str) -> None:
        try:
            self._results.put((name, self._function(self._fleet.host(name))))
        except PdctlError as error:
            self._results.put((name, error))
        except BaseException as error:
            self._results.put((name, _Bug(error)))

    def _too_long(self, name: str) -> CommandTimeout:
        return CommandTimeout(
            name,
            f"no result within {self._timeout_s:g} s",
            hint="the host or the network to it may be overloaded; the other hosts were not held up by it",
        )


class _Bug:
    """An exception that is nobody's to explain; raised where the results are waited for."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def settings_from_spec(spec: ClusterSpec) -> FleetSettings:
    """What a cluster file says about reaching its hosts. Relative paths in it start at its folder."""
    logins: dict[str, Login] = {}
    for host in (*spec.prefill.hosts, *spec.decode.hosts):
        known = logins.get(host.name, Login())
        logins[host.name] = Login(user=known.user or host.ssh_user, port=known.port or host.ssh_port)
    logins.setdefault(spec.router.host, Login())
    folder = Path(spec.file).parent
    given = spec.ssh.model_fields_set
    return FleetSettings(
        logins=logins,
        ssh=SshSettings(
            user=spec.ssh.user,
            port=spec.ssh.port,
            identity_file=_from_folder(spec.ssh.identity_file, folder),
            config_file=_from_folder(spec.ssh.config_file, folder),
            accept_new_keys=spec.ssh.host_keys == "accept-new",
            # What is not in the file leaves the choice to ConnectTimeout of the SSH configuration.
            connect_timeout_s=spec.ssh.connect_timeout_s if "connect_timeout_s" in given else None,
            max_parallel=spec.ssh.max_parallel,
        ),
    )


def _from_folder(path: str | None, folder: Path) -> str | None:
    # A ~ or % is expanded later, where host and login are known.
    if path is None or path.startswith(("~", "%", "$")):
        return path
    return str(folder / path)
