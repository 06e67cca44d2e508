"""The proof request: send it, gather the evidence, and let ``proof`` judge."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdctl.errors import PdctlError
from pdctl.hosts.fleet import Fleet
from pdctl.lifecycle.completions import completion_request, read_completion, unique_prompt
from pdctl.lifecycle.failure import LaunchFailed
from pdctl.lifecycle.nodes import HttpRequest, Nodes
from pdctl.lifecycle.proof import Counters, Evidence, Verdict, judge_answer, judge_transfer, merge, read_counters
from pdctl.lifecycle.reporter import Reporter
from pdctl.plan import ClusterPlan, InstancePlan

_PROOF_WORDS = 100
_PROOF_TOKENS = 16
_PROOF_REQUEST_S = 120.0
# vLLM publishes its transfer metrics with the next engine step after the transfer.
_METRICS_SETTLE_S = 6.0
_METRICS_PAUSE_S = 0.2


def prove(nodes: Nodes, fleet: Fleet, plan: ClusterPlan, reporter: Reporter) -> Verdict:
    """Send one completion through the router and judge it: answer, received tokens, bytes moved.

    Raises:
        LaunchFailed: the request itself failed.
        HostError, NodeError: a host or its agent failed.
    """
    reporter.step("proving: one completion through the router, compared with prefill alone")
    exact = is_float32(plan)
    engines = (*plan.prefill, *plan.decode)
    before = _counters(nodes, fleet, engines)
    prompt = unique_prompt(_PROOF_WORDS)

    def ask(instance: InstancePlan) -> tuple[str, HttpRequest]:
        return instance.host, completion_request(
            plan,
            instance,
            prompt,
            max_tokens=_PROOF_TOKENS,
            timeout_s=_PROOF_REQUEST_S,
            logprobs=None if exact else 5,
        )

    answers = []
    for instance in (plan.router, plan.prefill[0]):
        host, request = ask(instance)
        [response] = nodes.http(host, [request])
        try:
            answers.append(read_completion(response))
        except ValueError as error:
            raise LaunchFailed(
                f"the proof request to {instance.name} failed: {error}", hint=f"pdctl logs {instance.name}"
            ) from error
    routed, alone = answers
    deadline = time.monotonic() + _METRICS_SETTLE_S
    while True:
        after = _counters(nodes, fleet, engines)
        transfer = judge_transfer(
            plan.spec.transfer.mode,
            routed.prompt_tokens,
            _evidence(plan.prefill, before, after),
            _evidence(plan.decode, before, after),
        )
        if transfer.proven or time.monotonic() > deadline:
            return merge([transfer, judge_answer(routed, alone, exact=exact)])
        time.sleep(_METRICS_PAUSE_S)


def is_float32(plan: ClusterPlan) -> bool:
    """True if both roles compute in float32, where equal prompts give equal text, bit for bit."""
    return all(
        str(role.vllm_args.get("dtype")) in ("float32", "float") for role in (plan.spec.prefill, plan.spec.decode)
    )


def _counters(nodes: Nodes, fleet: Fleet, engines: Sequence[InstancePlan]) -> dict[str, Counters]:
    by_host: dict[str, list[InstancePlan]] = {}
    for engine in engines:
        by_host.setdefault(engine.host, []).append(engine)

    def read(host: str) -> dict[str, Counters]:
        requests = [HttpRequest("GET", f"{engine.url}/metrics", timeout_s=10) for engine in by_host[host]]
        responses = nodes.http(host, requests, parallel=True)
        return {
            engine.name: read_counters(response.body)
            for engine, response in zip(by_host[host], responses, strict=True)
            if response.ok
        }

    counters: dict[str, Counters] = {}
    for result in fleet.map(lambda host: read(host.name), list(by_host), timeout_s=60).values():
        if isinstance(result, PdctlError):
            raise result
        counters.update(result)
    return counters


def _evidence(role: Sequence[InstancePlan], before: dict[str, Counters], after: dict[str, Counters]) -> Evidence:
    names = [instance.name for instance in role]
    return Evidence(
        {name: before[name] for name in names if name in before},
        {name: after[name] for name in names if name in after},
    )
