"""Posts alerts to an URL: signed if there is a secret, tried again when that can help, in bounded time."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from pdctl import __version__
from pdctl.errors import UsageError
from pdctl.watch.sinks import Note
from pdctl.watch.wording import plain

ATTEMPTS = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
ATTEMPT_S = 10.0
_REDIRECTS = 3
_TRY_AGAIN = frozenset((408, 425, 429))
_KEEPS_METHOD = frozenset((307, 308))

SIGNATURE_HEADER = "X-Pdctl-Signature"
TIMESTAMP_HEADER = "X-Pdctl-Timestamp"
DELIVERY_HEADER = "X-Pdctl-Delivery"


def check_url(url: str) -> str:
    """The URL, if alerts can be posted to it.

    Raises:
        UsageError: it is not http or https, has no host, or carries a password.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"--webhook: {error}") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError("--webhook wants an URL such as https://alerts.example.com/pdctl")
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "--webhook: an URL with a user name or password would be seen by everyone who lists processes",
            hint="sign the requests instead: --webhook-secret-env NAME",
        )
    return url


def sign(secret: bytes, timestamp: str, body: bytes) -> str:
    """``sha256=HEX``: the HMAC-SHA256 over the timestamp, a dot, and the body."""
    return "sha256=" + hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class _Answer:
    """Of one attempt: a status, or why there is none."""

    status: int | None
    error: str = ""
    retry_after_s: float | None = None
    location: str = ""

    @property
    def words(self) -> str:
        return self.error or f"status {self.status}"


class Webhook:
    """Posts one event after the other.

    Args:
        url: where; its path may be a secret too, so only its host is ever logged.
        note: told what went wrong.
        secret: signs the requests; empty for none.
        attempt_s: how long one attempt may take, from the connection to the status.
        first_pause_s: before the second attempt; doubles with each one.
        clock: wall clock, for the timestamp that is signed.
    """

    name = "webhook"

    def __init__(
        self,
        url: str,
        *,
        note: Note,
        secret: bytes = b"",
        attempt_s: float = ATTEMPT_S,
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = check_url(url)
        self._shown = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}/..."
        self._note = note
        self._secret = secret
        self._attempt_s = attempt_s
        self._first_pause_s = first_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._killed = False

    def deliver(self, event: Mapping[str, Any], stop: threading.Event) -> str:
        """Post it, at most five times."""
        body = json.dumps(event).encode()
        # The same at every attempt, so that a receiver can drop what it has already.
        delivery = uuid.uuid4().hex
        answer = _Answer(None, "not tried")
        for attempt in range(ATTEMPTS):
            if attempt and stop.wait(self._pause_s(attempt, answer)):
                break
            answer = self._post(body, delivery)
            if answer.status is not None and 200 <= answer.status < 300:
                return "delivered"
            if answer.status is not None and answer.status < 500 and answer.status not in _TRY_AGAIN:
                break
        self._note(f"webhook {self._shown}: not delivered: {plain(answer.words, 300)}")
        return "failed"

    def kill(self) -> None:
        """Break the connection that is open."""
        with self._lock:
            self._killed = True
            if self._attempt is not None:
                self._attempt.abort()

    def _pause_s(self, attempt: int, answer: _Answer) -> float:
        pause_s: float = self._first_pause_s * 2 ** (attempt - 1) * random.uniform(0.8, 1.2)  # noqa: S311 - no secret
        return min(max(pause_s, answer.retry_after_s or 0.0), LONGEST_PAUSE_S)

    def _post(self, body: bytes, delivery: str) -> _Answer:
        timestamp = str(int(self._clock()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"pdctl/{__version__}",
            TIMESTAMP_HEADER: timestamp,
            DELIVERY_HEADER: delivery,
        }
        if self._secret:
            headers[SIGNATURE_HEADER] = sign(self._secret, timestamp, body)
        url = self._url
        answer = _Answer(None, "not tried")
        for _ in range(_REDIRECTS + 1):
            answer = self._attempt_once(url, body, headers)
            if answer.status is None or not 300 <= answer.status < 400:
                return answer
            target = urljoin(url, answer.location)
            if not answer.location or answer.status not in _KEEPS_METHOD:
                return _Answer(answer.status, f"status {answer.status}, a redirect that is not followed")
            if _origin(urlsplit(target)) != _origin(urlsplit(url)):
                return _Answer(answer.status, f"status {answer.status}, a redirect to another host is not followed")
            url = target
        return _Answer(answer.status, "too many redirects")

    def _attempt_once(self, url: str, body: bytes, headers: dict[str, str]) -> _Answer:
        attempt = _Attempt(self._attempt_s)
        with self._lock:
            if self._killed:
                return _Answer(None, "the watch ends")
            self._attempt = attempt
        try:
            return attempt.post(url, body, headers)
        finally:
            with self._lock:
                self._attempt = None


class _Attempt:
    """One request, whose connection is broken when its time is over: time-outs of sockets are for one read each, and
    a server that sends a byte now and then would go on for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False

    def post(self, url: str, body: bytes, headers: dict[str, str]) -> _Answer:
        request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - checked by check_url
        timer = threading.Timer(self._timeout_s, self.abort)
        timer.daemon = True
        timer.start()
        try:
            opener = urllib.request.build_opener(_PlainHandler(self), _SecureHandler(self), _NoRedirects())
            # The body of the answer is of no interest, and is not read.
            with opener.open(request, timeout=self._timeout_s) as response:
                return _Answer(int(response.status))
        except urllib.error.HTTPError as error:
            with error:
                return _Answer(
                    error.code,
                    retry_after_s=_seconds(error.headers.get("Retry-After")),
                    location=str(error.headers.get("Location") or ""),
                )
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._aborted:
                return _Answer(None, f"no answer within {self._timeout_s:g} s")
            reason = getattr(error, "reason", None) or error
            return _Answer(None, str(reason) or type(error).__name__)
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Break the connection, now or as soon as it is made."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def connected(self, connection: socket.socket) -> None:
        """Note the socket."""
        with self._lock:
            self._socket = connection
            aborted = self._aborted
        if aborted:
            raise TimeoutError("out of time")


class _NotedSocket(http.client.HTTPConnection):
    attempt: _Attempt

    def connect(self) -> None:
        super().connect()
        self.attempt.connected(self.sock)


class _NotedSecureSocket(http.client.HTTPSConnection):
    attempt: _Attempt

    def connect(self) -> None:
        super().connect()
        self.attempt.connected(self.sock)


class _PlainHandler(urllib.request.HTTPHandler):
    def __init__(self, attempt: _Attempt) -> None:
        super().__init__()
        self._attempt = attempt

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        def connection(host: str, **options: Any) -> http.client.HTTPConnection:
            made = _NotedSocket(host, **options)
            made.attempt = self._attempt
            return made

        return self.do_open(connection, req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self, attempt: _Attempt) -> None:
        super().__init__()
        self._attempt = attempt

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        def connection(host: str, **options: Any) -> http.client.HTTPConnection:
            made = _NotedSecureSocket(host, **options)
            made.attempt = self._attempt
            return made

        return self.do_open(connection, req)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect comes back as an HTTPError: where it may lead is decided above."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        del req, fp, code, msg, headers, newurl


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 6 else None
