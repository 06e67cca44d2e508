"""A script that is sent to a host and talked to there, in lines of JSON.

Like the node agent it is never installed. Standard input is its length and a newline, its source, then one JSON object
a line; the end of input tells it to end. It answers in lines of a prefix of its own and JSON, so that what login
shells print is skipped. See :func:`talk`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdctl.errors import CommandTimeout, NodeError
from pdctl.hosts.agent import no_reply, python_argv
from pdctl.hosts.base import Deadline, Host, Stream

_BOOTSTRAP = (
    'import sys;b=sys.stdin.buffer;s=b.read(int(b.readline()));g={"__name__":"__pdctl_script__","SOURCE":s};'
    'exec(compile(s,"pdctl-script","exec"),g);g["main"](b)'
)

_END_S = 2.0
# What a line is cut to when it is shown.
_SHOWN = 300
_STDERR_LINES = 4


class Conversation:
    """Talks to a script. A context manager: leaving it ends the script. One thread may send while another receives."""

    def __init__(self, host: Host, stream: Stream, prefix: bytes, pythons: Sequence[str], what: str) -> None:
        self.host = host.name
        self._stream = stream
        self._prefix = prefix
        self._pythons = pythons
        self._what = what

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Mapping[str, Any], *, timeout_s: float) -> None:
        """Send one message. One that has ended does not make this fail.

        Raises:
            HostError: the connection broke, or the script does not take it in time.
        """
        self._stream.write(json.dumps(message).encode() + b"\n", timeout_s=timeout_s)

    def receive(self, *, timeout_s: float) -> dict[str, Any]:
        """The script's next message.

        Raises:
            HostError: the connection broke, or there was none in time (:class:`CommandTimeout`).
            NodeError: the script ended, or wrote what makes no sense.
        """
        patience = Deadline(timeout_s)
        while True:
            try:
                line = self._stream.read_line(timeout_s=patience.remaining_s)
            except CommandTimeout:
                message = f"{self._what} said nothing for {timeout_s:g} s"
                raise CommandTimeout(self.host, message, hint="the host may be overloaded") from None
            if line is None:
                raise self._ended()
            # A login shell's noise may not have ended its line.
            _, found, text = line.partition(self._prefix)
            if found:
                return self._read(text)

    def ask(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Send a message and return the next one that comes; raises as both."""
        self.send(message, timeout_s=timeout_s)
        return self.receive(timeout_s=timeout_s)

    def close(self) -> None:
        """End the script. Its end is not waited for; again is fine."""
        self._stream.close()

    def _ended(self) -> NodeError:
        result = self._stream.wait(timeout_s=_END_S)
        # What a traceback says is in its last line.
        end = b"\n".join(result.stderr.rstrip().split(b"\n")[-_STDERR_LINES:])
        return no_reply(self.host, replace(result, stderr=end), self._pythons, what=self._what)

    def _read(self, text: bytes) -> dict[str, Any]:
        try:
            value = json.loads(text)
            if isinstance(value, dict):
                return value
        except ValueError:
            pass
        shown = text[:_SHOWN].decode(errors="replace")
        raise NodeError(
            self.host,
            "bad-reply",
            f"what {self._what} says makes no sense: {shown!r}",
            hint="something on the host may have cut or changed its output: look at its login shell's start-up files",
        )


def talk(
    host: Host,
    source: bytes,
    *,
    prefix: bytes,
    what: str,
    lifetime_s: float,
    send_timeout_s: float,
    pythons: Sequence[str] = ("python3",),
) -> Conversation:
    """Start a script on a host.

    Args:
        host: where.
        source: text of the script; it defines ``main(stream)``, which is called with its binary standard input.
        prefix: what its answers start with.
        what: the script in words, for errors.
        lifetime_s: how long it may live at most.
        send_timeout_s: how long the host may take its source.
        pythons: interpreters to try after the system's own, see :func:`pdctl.hosts.agent.call`.

    Raises:
        HostError: the host cannot be reached.
    """
    stream = host.open(python_argv(_BOOTSTRAP, pythons), timeout_s=lifetime_s)
    try:
        stream.write(b"%d\n%b" % (len(source), source), timeout_s=send_timeout_s)
    except BaseException:
        stream.close()
        raise
    return Conversation(host, stream, prefix, pythons, what)
