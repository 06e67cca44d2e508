"""Ranks and vLLM's API as small HTTP servers: what they answer is data, and how badly can be chosen.

One thread of asyncio serves any number of them, so that hundreds cost little.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pdctl.plan import ClusterPlan

Manner = Literal["healthy", "hung", "garbage", "half", "huge", "slow", "drip", "error", "closing"]
"""``slow`` answers after 1.2 s; ``drip`` sends a byte now and then, for ever; ``huge`` sends until it is hung up on."""

SLOW_S = 1.2
BUCKETS = (0.001, 0.01, 0.1, 1.0, float("inf"))


def record(side: str, key: str, stage: str, **fields: Any) -> dict[str, Any]:
    """A ledger's record, of a second ago unless told otherwise."""
    return {
        "side": side,
        "key": key,
        "attempt": 0,
        "stage": stage,
        "outcome": None,
        "reason": "",
        "request_id": f"{key}-0a0b0c0d",
        "peer": "",
        "started_unix": 1000.0,
        "age_s": 1.0,
        "stage_age_s": 0.5,
        "stages": {stage: 0.5},
        "tokens": 512,
        "blocks": 32,
        "descriptors": 24,
        "bytes": 1572864,
        "writers": 1,
        **fields,
    }


@dataclass
class SimulatedRank:
    """A rank's telemetry.

    Attributes:
        manner: how it answers.
        inflight: its records in flight.
        recent: its ended records, latest first.
        stage_times: observations by ``side/stage`` and upper bound, cumulative.
    """

    instance: str
    rank: int = 0
    engine_id: str = "engine-1"
    pid: int = 0
    manner: Manner = "healthy"
    state: str = "busy"
    loops: int = 0
    bytes: int = 0
    inflight: list[dict[str, Any]] = field(default_factory=list)
    recent: list[dict[str, Any]] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    descriptors: dict[str, int] = field(default_factory=lambda: {"posted": 0, "completed": 0, "failed": 0})
    stage_times: dict[str, dict[float, int]] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    def finish(self, ended: dict[str, Any]) -> None:
        """A transfer ended."""
        self.recent.insert(0, ended)
        del self.recent[1000:]
        name = f"{ended['side']}/{ended['outcome']}"
        self.outcomes[name] = self.outcomes.get(name, 0) + 1

    def restart(self, engine_id: str) -> None:
        """A new process: everything begins again."""
        self.engine_id, self.loops, self.bytes = engine_id, 0, 0
        self.inflight, self.recent, self.outcomes, self.stage_times = [], [], {}, {}

    def answer(self, target: str) -> bytes | None:
        """The body of a GET; None if there is no such thing."""
        path = target.partition("?")[0]
        self.asked[target] = self.asked.get(target, 0) + 1
        if path == "/healthz":
            self.loops += 1
            return json.dumps(self.health()).encode()
        if path == "/transfers":
            query = dict(part.split("=") for part in target.partition("?")[2].split("&"))
            listed = self.recent if query["state"] == "recent" else self.inflight
            body = {"state": query["state"], "unix": 1001.0, "transfers": listed[: int(query["limit"])]}
            return json.dumps(body).encode()
        return self.metrics().encode() if path == "/metrics" else None

    def health(self) -> dict[str, Any]:
        """What ``/healthz`` says."""
        return {
            "writer": {
                "alive": self.state != "dead",
                "state": self.state,
                "op": None,
                "op_age_s": None,
                "heartbeat_age_s": 0.1,
                "loops": self.loops,
                "errors": 0,
                "last_error": None,
            },
            "transfers": {
                "inflight": len(self.inflight),
                "oldest_s": max((one["stage_age_s"] for one in self.inflight), default=0.0),
                "outcomes": self.outcomes,
            },
            "engine_id": self.engine_id,
            "rank": self.rank,
            "pid": self.pid,
            "instance": self.instance,
            "uptime_s": 10.0,
        }

    def metrics(self) -> str:
        """What ``/metrics`` says."""
        lines = [f'pdctl_descriptors_total{{state="{state}"}} {count}.0' for state, count in self.descriptors.items()]
        lines.append(f"pdctl_transfer_bytes_total {self.bytes}.0")
        lines.append('pdctl_notifications_total{direction="sent",kind="REG",result="sent"} 3.0')
        for at, counts in self.stage_times.items():
            side, stage = at.split("/")
            for bound, count in counts.items():
                le = "+Inf" if bound == float("inf") else str(bound)
                lines.append(
                    f'pdctl_transfer_stage_seconds_bucket{{le="{le}",side="{side}",stage="{stage}"}} {count}.0'
                )
        return "# HELP pdctl_descriptors_total x\n" + "\n".join(lines) + "\n"


@dataclass
class SimulatedApi:
    """vLLM's API, or the router's, as far as a watcher asks it."""

    manner: Manner = "healthy"
    status: int = 200
    running: int = 1
    waiting: int = 0
    ended: int = 0
    routed: int = 0
    ttft: dict[float, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))

    def answer(self, target: str) -> bytes | None:
        """The body of a GET."""
        if target == "/health":
            return b"" if self.status == 200 else None
        if target != "/metrics":
            return None
        model = 'engine="0",model_name="m"'
        lines = [
            f"vllm:num_requests_running{{{model}}} {self.running}.0",
            f"vllm:num_requests_waiting{{{model}}} {self.waiting}.0",
            f"vllm:kv_cache_usage_perc{{{model}}} 0.25",
            f'vllm:request_success_total{{{model},finished_reason="stop"}} {self.ended}.0',
            f'vllm:request_success_total{{{model},finished_reason="length"}} 0.0',
            f"vllm_router_pd_requests_total{{}} {self.routed}",
        ]
        for bound, count in self.ttft.items():
            le = "+Inf" if bound == float("inf") else str(bound)
            lines.append(f'vllm:time_to_first_token_seconds_bucket{{{model},le="{le}"}} {count}.0')
        return ("\n".join(lines) + "\n").encode()


class Servers:
    """Serves simulated ranks and APIs on loopback. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="simulated ranks", daemon=True)
        self._servers: list[asyncio.AbstractServer] = []

    def __enter__(self) -> Servers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def serve(self, answering: SimulatedRank | SimulatedApi, port: int, address: str = "127.0.0.1") -> None:
        """Serve one."""

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await _talk(answering, reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        async def start() -> None:
            self._servers.append(await asyncio.start_server(talk, address, port))

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(10)


async def _talk(
    answering: SimulatedRank | SimulatedApi, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    request = await reader.readuntil(b"\r\n\r\n")
    manner = answering.manner
    if manner == "hung":
        await asyncio.sleep(3600)
    elif manner == "closing":
        return
    elif manner == "slow":
        await asyncio.sleep(SLOW_S)
    elif manner == "drip":
        while True:
            writer.write(b"H")
            await writer.drain()
            await asyncio.sleep(0.2)
    elif manner == "garbage":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[[[[{{{{\xff")
        return
    elif manner == "huge":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 100_000)
            await writer.drain()
        return
    body = answering.answer(request.split()[1].decode())
    if manner == "half" and body is not None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body) + 100, body[: len(body) // 2]))
        return
    status = b"500 No" if manner == "error" else b"200 OK" if body is not None else b"503 Unwell"
    body = body or b""
    # In chunks, as vLLM's metrics come.
    writer.write(b"HTTP/1.1 %b\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" % status)
    if body:
        writer.write(b"%x\r\n%b\r\n" % (len(body), body))
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def serve_plan(
    servers: Servers, plan: ClusterPlan, make: Callable[[str, int], SimulatedRank] = SimulatedRank
) -> tuple[dict[tuple[str, int], SimulatedRank], dict[str, SimulatedApi]]:
    """Serve everything that a plan has."""
    ranks: dict[tuple[str, int], SimulatedRank] = {}
    apis: dict[str, SimulatedApi] = {}
    for instance in plan.instances:
        apis[instance.name] = api = SimulatedApi()
        for use in instance.ports:
            if use.purpose in ("API", "metrics"):
                servers.serve(api, use.port)
        for number, port in enumerate(instance.telemetry_ports):
            rank = ranks[instance.name, number] = make(instance.name, number)
            rank.engine_id = f"{instance.name}-engine"
            servers.serve(rank, port)
    return ranks, apis
