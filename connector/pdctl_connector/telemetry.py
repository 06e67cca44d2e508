"""A rank's telemetry over HTTP: is the writer alive, what is every transfer doing, and the counters.

See docs/connector.md for every endpoint and metric. Served by threads of its own and read from plain attributes, so
that it answers while the engine, or the writer itself, is stuck. Bound to loopback unless told otherwise.
"""

from __future__ import annotations

import bisect
import json
import logging
import os
import socket
import socketserver
import threading
import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .ledger import STAGES, Ledger
from .nixl_guard import NixlGuard
from .settings import Settings
from .version import __version__
from .writer import Writer

logger = logging.getLogger("vllm.pdctl_connector.telemetry")

STUCK_S: Final = 2.0
"""Without a beat for so long the writer is stuck; it beats at least twice a second."""
RECORDS_LIMIT: Final = 1000
REQUEST_S: Final = 10.0
CLIENTS_LIMIT: Final = 32
"""Requests at a time; more are hung up on."""
BUCKETS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


class StageTimes:
    """How long transfers were in each stage.

    Not prometheus_client's own histogram: with PROMETHEUS_MULTIPROC_DIR, which vLLM sets for several API servers, that
    one writes into files, and appears in vLLM's metrics.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Per stage: how many fell into each bucket, the last one for all beyond; and the sum of seconds.
        self._counts = {(side, stage): [0] * (len(BUCKETS) + 1) for side, stages in STAGES.items() for stage in stages}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def observe(self, side: Any, stage: Any, seconds: float) -> None:
        """Count one."""
        with self._lock:
            self._counts[side, stage][bisect.bisect_left(BUCKETS, seconds)] += 1
            self._sums[side, stage] += seconds

    def family(self, name: str, documentation: str) -> Metric:
        """As a Prometheus histogram, every stage of both sides in it."""
        family = HistogramMetricFamily(name, documentation, labels=["side", "stage"])
        with self._lock:
            copied = [(at, list(counts), self._sums[at]) for at, counts in self._counts.items()]
        bounds = [*map(floatToGoString, BUCKETS), "+Inf"]
        for at, counts, total in copied:
            family.add_metric(list(at), list(zip(bounds, accumulate(counts), strict=True)), total)
        return family


class Telemetry(Collector):
    """What one rank shows of itself.

    Args:
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        engine_id: of this engine.
        rank: within the instance; also the offset of the port.
        settings: host and port, names.
    """

    def __init__(self, *, role: str, engine_id: str, rank: int, settings: Settings) -> None:
        self._role, self._engine_id, self._rank, self._settings = role, engine_id, rank, settings
        self._begun = time.monotonic()
        self._writer: Writer | None = None
        self._ledger: Ledger | None = None
        self._guard: NixlGuard | None = None
        self._server: ThreadingHTTPServer | None = None
        self._lock = threading.Lock()
        self._sent: Tally[tuple[str, str]] = Tally()
        self._handshakes: Tally[str] = Tally({"ready": 0, "failed": 0})
        self._stages = StageTimes()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._logged_at = float("-inf")

    def attach(self, writer: Writer, ledger: Ledger, guard: NixlGuard) -> None:
        """Say what to show."""
        self._writer, self._ledger, self._guard = writer, ledger, guard

    @property
    def port(self) -> int | None:
        """The port that is served; None if none is."""
        return None if self._server is None else int(self._server.server_address[1])

    # Told by the connector; each takes microseconds.

    def observe_stage(self, side: str, stage: str, seconds: float) -> None:
        """A transfer left a stage."""
        self._stages.observe(side, stage, seconds)

    def count_sent(self, kind: str, sent: bool) -> None:
        """A message was sent, or could not be."""
        with self._lock:
            self._sent[kind, "sent" if sent else "failed"] += 1

    def count_handshake(self, result: str) -> None:
        """A handshake ended: ``ready`` or ``failed``."""
        with self._lock:
            self._handshakes[result] += 1

    # Shown.

    def health(self) -> dict[str, Any]:
        """The writer's state: ``idle``, ``busy``, ``stuck`` (no beat for a while) or ``dead``."""
        writer, operation = self._writer, self._guard.operation if self._guard is not None else None
        age = writer.beat_age_s if writer is not None else None
        if writer is None or not writer.alive:
            state = "dead"
        elif age is not None and age > STUCK_S:
            state = "stuck"
        else:
            state = "busy" if _busy(writer) else "idle"
        return {
            "writer": {
                "alive": bool(writer is not None and writer.alive),
                "state": state,
                "op": operation[0] if operation else None,
                "op_age_s": round(time.monotonic() - operation[1], 3) if operation else None,
                "heartbeat_age_s": None if age is None else round(age, 3),
                "loops": writer.loops if writer is not None else 0,
                "errors": writer.errors if writer is not None else 0,
                "last_error": writer.last_error if writer is not None else None,
            },
            "transfers": self._summary(),
            "role": self._role,
            "engine_id": self._engine_id,
            "rank": self._rank,
            "pid": os.getpid(),
            "cluster": self._settings.cluster,
            "instance": self._settings.instance,
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._begun, 3),
        }

    def _summary(self) -> dict[str, Any]:
        if self._ledger is None:
            return {"inflight": 0, "oldest_s": 0.0, "outcomes": {}}
        counts = self._ledger.counts()
        return {
            "inflight": sum(counts.inflight.values()),
            "oldest_s": round(max(counts.oldest_s.values(), default=0.0), 3),
            "outcomes": {f"{side}/{outcome}": number for (side, outcome), number in sorted(counts.outcomes.items())},
        }

    def transfers(self, state: str, limit: int) -> dict[str, Any]:
        """The ledger's records, ``inflight`` (oldest first) or ``recent`` (latest first)."""
        listed: list[dict[str, Any]] = []
        if self._ledger is not None:
            listed = self._ledger.inflight(limit=limit) if state == "inflight" else self._ledger.recent(limit=limit)
        return {"state": state, "unix": round(time.time(), 6), "transfers": listed}

    def metrics(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Everything, read at the moment of the scrape."""
        yield from self._collect_writer()
        yield from self._collect_ledger()
        yield self._stages.family("pdctl_transfer_stage_seconds", "Seconds that transfers spent in a stage.")

    def _collect_writer(self) -> Iterator[Metric]:
        writer = self._writer
        yield GaugeMetricFamily(
            "pdctl_writer_alive", "1 while the writer thread runs.", value=float(writer is not None and writer.alive)
        )
        if writer is None:
            return
        yield GaugeMetricFamily(
            "pdctl_writer_heartbeat_age_seconds", "Seconds since the writer's last beat.", value=writer.beat_age_s
        )
        operation = self._guard.operation if self._guard is not None else None
        ages = GaugeMetricFamily(
            "pdctl_writer_op_age_seconds", "Seconds that the present NIXL operation runs.", labels=["op"]
        )
        if operation is not None:
            ages.add_metric([operation[0]], time.monotonic() - operation[1])
        yield ages
        yield CounterMetricFamily("pdctl_writer_loops", "Rounds of the writer.", value=writer.loops)
        yield CounterMetricFamily("pdctl_writer_errors", "Exceptions that the writer survived.", value=writer.errors)
        notifications = CounterMetricFamily(
            "pdctl_notifications", "Notifications.", labels=["kind", "direction", "result"]
        )
        for (kind, result), number in sorted(writer.outcomes().items()):
            notifications.add_metric([kind, "received", result], number)
        with self._lock:
            sent, handshakes = dict(self._sent), dict(self._handshakes)
        for (kind, result), number in sorted(sent.items()):
            notifications.add_metric([kind, "sent", result], number)
        yield notifications
        shaken = CounterMetricFamily("pdctl_handshakes", "Handshakes with other engines.", labels=["result"])
        for result, number in sorted(handshakes.items()):
            shaken.add_metric([result], number)
        yield shaken

    def _collect_ledger(self) -> Iterator[Metric]:
        if self._ledger is None:
            return
        counts = self._ledger.counts()
        inflight = GaugeMetricFamily("pdctl_transfers_inflight", "Transfers in flight.", labels=["side", "stage"])
        for (side, stage), number in counts.inflight.items():
            inflight.add_metric([side, stage], number)
        yield inflight
        oldest = GaugeMetricFamily(
            "pdctl_transfer_oldest_seconds", "Age in its stage of the oldest transfer there.", labels=["side", "stage"]
        )
        for (side, stage), seconds in counts.oldest_s.items():
            oldest.add_metric([side, stage], seconds)
        yield oldest
        ended = CounterMetricFamily("pdctl_transfers", "Ended transfers.", labels=["side", "outcome"])
        for (side, outcome), number in sorted(counts.outcomes.items()):
            ended.add_metric([side, outcome], number)
        yield ended
        if self._writer is not None:
            written = self._writer.prefill.written
            descriptors = CounterMetricFamily("pdctl_descriptors", "NIXL descriptors of WRITEs.", labels=["state"])
            for state in ("posted", "completed", "failed"):
                descriptors.add_metric([state], written[state])
            yield descriptors
            yield CounterMetricFamily("pdctl_transfer_bytes", "Bytes of completed WRITEs.", value=written["bytes"])

    # Serving.

    def serve(self) -> None:
        """Serve in the background. A port that is taken is logged: transfers matter more than telemetry."""
        if not self._settings.telemetry_port:
            return
        port = self._settings.telemetry_port + self._rank
        telemetry = self

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S
            server_version = f"pdctl/{__version__}"
            sys_version = ""

            def do_GET(self) -> None:
                status, kind, body = telemetry.respond_or_fail(self.path)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        try:
            self._server = _server(self._settings.telemetry_host, port, Handler)
        except (OSError, OverflowError) as error:
            logger.error(
                "no telemetry of rank %d: cannot listen on %s port %d: %s; pdctl will not see its transfers",
                self._rank, self._settings.telemetry_host, port, error,
            )  # fmt: skip
            return
        # The interval is how long closing may take; requests are taken at once.
        serve = partial(self._server.serve_forever, poll_interval=0.1)
        threading.Thread(target=serve, name="pdctl-telemetry", daemon=True).start()

    def respond_or_fail(self, target: str) -> tuple[int, str, bytes]:
        """As `respond`; a bug is a 500, and logged once a minute at most."""
        try:
            return self.respond(target)
        except Exception:
            now = time.monotonic()
            if now - self._logged_at > 60:
                self._logged_at = now
                logger.exception("telemetry: %s failed", target.split("?")[0][:100])
            return 500, "text/plain", b"internal error, see the log of this instance\n"

    def respond(self, target: str) -> tuple[int, str, bytes]:
        """Answer a GET: status, content type, body."""
        try:
            parts = urlsplit(target)
            query = parse_qs(parts.query)
        except ValueError:
            return 400, "text/plain", b"this is no address\n"
        if parts.path == "/healthz":
            return 200, "application/json", json.dumps(self.health()).encode()
        if parts.path == "/transfers":
            state = query.get("state", ["inflight"])[0]
            if state not in ("inflight", "recent"):
                return 400, "text/plain", b"state is inflight or recent\n"
            try:
                limit = int(query.get("limit", ["100"])[0])
            except ValueError:
                return 400, "text/plain", b"limit is a number\n"
            limit = min(max(limit, 0), RECORDS_LIMIT)
            return 200, "application/json", json.dumps(self.transfers(state, limit)).encode()
        if parts.path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, self.metrics()
        return 404, "text/plain", b"/healthz /transfers /metrics\n"

    def close(self) -> None:
        """Stop serving."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def _busy(writer: Writer) -> bool:
    # It looks through tables that the writer changes meanwhile; that they change says enough.
    try:
        return writer.busy
    except RuntimeError:
        return True


def _server(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    free = threading.BoundedSemaphore(CLIENTS_LIMIT)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
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
