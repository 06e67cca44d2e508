"""Serves a registry over HTTP to a few scrapers at a time, and says whether the watch is alive."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from pdctl.errors import UsageError

CLIENTS_LIMIT = 8
REQUEST_S = 10.0
# The format that every Prometheus reads.
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def parse_address(text: str) -> tuple[str, int]:
    """``ADDR:PORT``, ``:PORT`` or ``PORT`` (both on 127.0.0.1), ``[IPV6]:PORT``.

    Raises:
        ValueError: it is none of these.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"write an IPv6 address in brackets: [{host}]:{port}")
    if not (port.isascii() and port.isdigit() and 0 <= int(port) <= 65535):
        raise ValueError(f"{text!r} is no ADDR:PORT, such as 127.0.0.1:9109")
    return host or "127.0.0.1", int(port)


class ExporterServer:
    """``GET /metrics`` for Prometheus, ``GET /healthz`` (200 or 503) for a supervisor.

    Args:
        registry: what is served.
        host: address to bind.
        port: 0 for any free one.
        healthy: whether the watch still polls.

    Raises:
        UsageError: the address cannot be bound.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, *, healthy: Callable[[], bool]) -> None:
        try:
            self._server = _server(host, port, _handler(registry, healthy))
        except (OSError, OverflowError) as error:
            shown = f"[{host}]" if ":" in host else host
            raise UsageError(
                f"cannot serve metrics on {shown}:{port}: {getattr(error, 'strerror', None) or error}",
                hint="another watch may run there: choose another --exporter ADDR:PORT",
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="exporter", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is served."""
        return int(self._server.socket.getsockname()[1])

    def close(self) -> None:
        """Stop serving; a scrape that runs is not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)


def _handler(registry: CollectorRegistry, healthy: Callable[[], bool]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S
        server_version = "pdctl"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, generate_latest(registry), _CONTENT_TYPE)
            elif path == "/healthz":
                fine = healthy()
                self._answer(200 if fine else 503, b"ok\n" if fine else b"no poll has ended lately\n", "text/plain")
            else:
                self._answer(404, b"there is /metrics and /healthz\n", "text/plain")

        def _answer(self, status: int, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    return Handler


def _server(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    free = threading.BoundedSemaphore(CLIENTS_LIMIT)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = CLIENTS_LIMIT
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            # Not HTTPServer's, which asks the name service for the host's full name, and may wait for that.
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = host, port

        def process_request(self, request: Any, client_address: Any) -> None:
            if not free.acquire(blocking=False):
                self.shutdown_request(request)
                return
            try:
                super().process_request(request, client_address)
            except BaseException:
                free.release()
                raise

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                free.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            # A client that hung up; its business alone.
            del request, client_address

    return Server((host, port), handler)
