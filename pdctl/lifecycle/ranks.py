"""What the connector's ranks say of themselves over HTTP: the writer's life signs, and the ledger. Reading is pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.lifecycle.nodes import HttpRequest, HttpResponse
from pdctl.plan import InstancePlan, http_url

_TIMEOUT_S = 4.0
# The writer beats at least twice a second; beyond this it is late.
BEAT_LIMIT_S = 2.0


@dataclass(frozen=True)
class RankHealth:
    """One rank's writer.

    Attributes:
        rank: within the instance.
        state: ``idle``, ``busy``, ``stuck``, ``dead``, or ``silent`` (its telemetry does not answer).
        heartbeat_age_s: seconds since its last beat; None if not known.
        operation: the NIXL operation it is in.
        inflight: transfers in flight.
        oldest_s: how long the oldest of them is in its stage.
        trouble: why it is not well, for people; empty if it is.
    """

    rank: int
    state: str
    heartbeat_age_s: float | None = None
    operation: str | None = None
    inflight: int | None = None
    oldest_s: float | None = None
    trouble: str = ""

    @property
    def well(self) -> bool:
        """True if the writer lives and beats."""
        return self.state in ("idle", "busy")


def telemetry_requests(instance: InstancePlan, path: str) -> list[HttpRequest]:
    """A GET of ``path`` at every rank of an instance, to be made on its host."""
    return [
        HttpRequest("GET", f"{http_url(use.address, use.port)}{path}", timeout_s=_TIMEOUT_S)
        for use in instance.ports
        if use.purpose == "telemetry"
    ]


def has_telemetry(instance: InstancePlan) -> bool:
    """Only ranks of pdctl's connector serve telemetry, and only they have a port for it."""
    return instance.role != "router" and bool(instance.telemetry_ports)


def read_health(rank: int, response: HttpResponse) -> RankHealth:
    """Read an answer of ``/healthz``."""
    if not response.ok:
        return RankHealth(
            rank, "silent", trouble=f"rank {rank} does not answer on its telemetry port: {response.trouble}"
        )
    try:
        body = json.loads(response.body)
        writer, transfers = body["writer"], body.get("transfers") or {}
        state = str(writer["state"])
        age = writer["heartbeat_age_s"]
        operation = writer.get("op")
        return RankHealth(
            rank=rank,
            state=state,
            heartbeat_age_s=None if age is None else float(age),
            operation=operation,
            inflight=transfers.get("inflight"),
            oldest_s=transfers.get("oldest_s"),
            trouble=_trouble(rank, state, age, operation, writer.get("last_error")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return RankHealth(rank, "silent", trouble=f"rank {rank} answers nonsense on its telemetry port ({error!r})")


def worst(ranks: Sequence[RankHealth]) -> RankHealth | None:
    """The rank to look at first."""
    order = ("dead", "stuck", "silent", "busy", "idle")
    return min(ranks, key=lambda health: order.index(health.state) if health.state in order else 2, default=None)


def read_records(responses: Iterable[HttpResponse]) -> list[Mapping[str, Any]]:
    """The ledger records in answers of ``/transfers``; an answer that makes no sense has none."""
    records: list[Mapping[str, Any]] = []
    for response in responses:
        if not response.ok:
            continue
        try:
            found = json.loads(response.body)["transfers"]
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(found, list):
            records.extend(record for record in found if isinstance(record, dict))
    return records


def judge_ledgers(
    prefill: Sequence[Mapping[str, Any]], decode: Sequence[Mapping[str, Any]], prompt_tokens: int
) -> list[str]:
    """What is missing in the two ledgers for a request of ``prompt_tokens`` tokens; empty if nothing is."""
    received = [r for r in decode if r.get("outcome") == "received" and r.get("tokens") == prompt_tokens]
    if not received:
        return [f"decode's ledger has no received transfer of {prompt_tokens} tokens"]
    keys = {r.get("key") for r in received}
    completed = [r for r in prefill if r.get("key") in keys and r.get("outcome") == "completed"]
    if not completed:
        return ["prefill's ledger has no completed transfer with the key that decode received"]
    for side, record, stages in (
        ("decode", received[0], ("registered", "received")),
        ("prefill", completed[0], ("ready", "matched", "posted", "completed")),
    ):
        missing = [stage for stage in stages if stage not in (record.get("stages") or {})]
        if missing:
            return [f"{side}'s ledger lacks {', '.join(missing)} for transfer {record.get('key')}"]
    return []


def _trouble(rank: int, state: str, age: float | None, operation: str | None, error: str | None) -> str:
    if state in ("idle", "busy"):
        return ""
    where = f" in NIXL's {operation}" if operation else ""
    beat = f", last beat {age:.1f} s ago" if age is not None else ""
    why = f"; its last error: {error}" if error else ""
    return f"the writer of rank {rank} is {state}{where}{beat}{why}"
