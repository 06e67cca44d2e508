"""The proof request: send it, gather the evidence, and let ``proof`` judge."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.errors import PdctlError
from pdctl.hosts.base import Host
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.completions import Completion, completion_request, read_completion, unique_prompt
from pdctl.lifecycle.failure import LaunchFailed
from pdctl.lifecycle.nodes import HttpRequest, HttpResponse, Nodes
from pdctl.lifecycle.proof import Counters, Evidence, Verdict, judge_answer, judge_transfer, merge, read_counters
from pdctl.lifecycle.ranks import judge_ledgers, read_records, telemetry_requests
from pdctl.lifecycle.reporter import Reporter
from pdctl.plan import ClusterPlan, InstancePlan

_PROOF_WORDS = 100
_PROOF_TOKENS = 16
_PROOF_REQUEST_S = 120.0
# vLLM publishes its transfer metrics with the next engine step after the transfer.
_METRICS_SETTLE_S = 6.0
_METRICS_PAUSE_S = 0.2
# Enough to find the proof request among others' traffic of the same seconds.
_RECENT = 200


def prove(nodes: Nodes, fleet: Fleet, plan: ClusterPlan, reporter: Reporter) -> Verdict:
    """Send one completion through the router and judge it: answer, received tokens, bytes moved.

    Raises:
        LaunchFailed: the request itself failed.
        HostError, NodeError: a host or its agent failed.
    """
    reporter.step("proving: one completion through the router, compared with prefill alone")
    exact = is_float32(plan)
    before = _look(nodes, fleet, plan).counters
    routed, alone = _ask(nodes, plan, exact=exact)
    deadline = time.monotonic() + _METRICS_SETTLE_S
    while True:
        look = _look(nodes, fleet, plan)
        verdicts = [
            judge_transfer(
                plan.spec.transfer.mode,
                routed.prompt_tokens,
                _evidence(plan.prefill, before, look.counters),
                _evidence(plan.decode, before, look.counters),
            )
        ]
        if plan.spec.transfer.own_connector:
            missing = judge_ledgers(look.records["prefill"], look.records["decode"], routed.prompt_tokens)
            verdicts.append(Verdict(tuple(missing), ()))
        if all(verdict.proven for verdict in verdicts) or time.monotonic() > deadline:
            return merge([*verdicts, judge_answer(routed, alone, exact=exact)])
        time.sleep(_METRICS_PAUSE_S)


def is_float32(plan: ClusterPlan) -> bool:
    """True if both roles compute in float32, where equal prompts give equal text, bit for bit."""
    return all(
        str(role.vllm_args.get("dtype")) in ("float32", "float") for role in (plan.spec.prefill, plan.spec.decode)
    )


@dataclass(frozen=True)
class _Look:
    """One look at every engine: counters by instance, and the latest ended transfers by role."""

    counters: Mapping[str, Counters]
    records: Mapping[str, Sequence[Mapping[str, Any]]]


def _ask(nodes: Nodes, plan: ClusterPlan, *, exact: bool) -> tuple[Completion, Completion]:
    """The same prompt through the router, and then to prefill alone."""
    prompt = unique_prompt(_PROOF_WORDS)
    askings = [
        (
            instance,
            completion_request(
                plan,
                instance,
                prompt,
                max_tokens=_PROOF_TOKENS,
                timeout_s=_PROOF_REQUEST_S,
                logprobs=None if exact else 5,
            ),
        )
        for instance in (plan.router, plan.prefill[0])
    ]
    if plan.router.host == plan.prefill[0].host:
        responses = nodes.http(plan.router.host, [request for _, request in askings])
    else:
        responses = [nodes.http(instance.host, [request])[0] for instance, request in askings]
    answers = []
    for (instance, _), response in zip(askings, responses, strict=True):
        try:
            answers.append(read_completion(response))
        except ValueError as error:
            raise LaunchFailed(
                f"the proof request to {instance.name} failed: {error}", hint=f"pdctl logs {instance.name}"
            ) from error
    return answers[0], answers[1]


def _look(nodes: Nodes, fleet: Fleet, plan: ClusterPlan) -> _Look:
    by_host: dict[str, list[InstancePlan]] = {}
    for engine in (*plan.prefill, *plan.decode):
        by_host.setdefault(engine.host, []).append(engine)
    telemetry = plan.spec.transfer.own_connector
    counters: dict[str, Counters] = {}
    records: dict[str, list[Mapping[str, Any]]] = {"prefill": [], "decode": []}

    def read(host: Host) -> list[tuple[InstancePlan, list[HttpResponse]]]:
        wanted = [
            (
                engine,
                [
                    HttpRequest("GET", f"{engine.url}/metrics", timeout_s=10),
                    *(telemetry_requests(engine, f"/transfers?state=recent&limit={_RECENT}") if telemetry else ()),
                ],
            )
            for engine in by_host[host.name]
        ]
        responses = iter(nodes.http(host.name, [r for _, requests in wanted for r in requests], parallel=True))
        return [(engine, [next(responses) for _ in requests]) for engine, requests in wanted]

    for result in fleet.map(read, list(by_host), timeout_s=60).values():
        if isinstance(result, PdctlError):
            raise result
        for engine, (metrics, *transfers) in result:
            if metrics.ok:
                counters[engine.name] = read_counters(metrics.body)
            records[engine.role].extend(read_records(transfers))
    return _Look(counters, records)


def _evidence(role: Sequence[InstancePlan], before: Mapping[str, Counters], after: Mapping[str, Counters]) -> Evidence:
    names = [instance.name for instance in role]
    return Evidence(
        {name: before[name] for name in names if name in before},
        {name: after[name] for name in names if name in after},
    )
