"""Warm-up: one ordinary completion per instance, then one transfer per prefill/decode pair.

Both matter. On CPUs with AMX an instance whose first forward ever is the decode of a transferred request dies with
SIGILL (vLLM 0.32), and the first transfer of a pair pays for the handshake and NIXL's lazy connections: seconds, on a
loaded machine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from pdctl.errors import NodeError
from pdctl.lifecycle.completions import (
    completion_request,
    decode_leg,
    prefill_leg,
    read_completion,
    unique_prompt,
)
from pdctl.lifecycle.nodes import Nodes
from pdctl.plan import ClusterPlan, InstancePlan

# The first completion may compile kernels; generous, because giving up here throws a whole boot away.
_FIRST_COMPLETION_S = 300.0
_PAIR_LEG_S = 60.0
_WARMUP_WORDS = 24


def warm_instance(nodes: Nodes, plan: ClusterPlan, instance: InstancePlan, *, logprobs: bool) -> float:
    """Send one ordinary completion to an instance. Returns how long it took, in seconds.

    Args:
        nodes: the cluster's nodes.
        plan: the plan.
        instance: the instance, which must be ready.
        logprobs: also ask for log-probabilities (the first such request may compile code for seconds; only worth it
            when the proof will ask for them too).

    Raises:
        NodeError: code ``warm-up-failed``.
    """
    request = completion_request(
        plan,
        instance,
        unique_prompt(_WARMUP_WORDS),
        max_tokens=2,
        timeout_s=_FIRST_COMPLETION_S,
        logprobs=1 if logprobs else None,
    )
    [response] = nodes.http(instance.host, [request])
    try:
        read_completion(response)
    except ValueError as error:
        raise NodeError(
            instance.host,
            "warm-up-failed",
            f"{instance.name} is up, but its first completion failed: {error}",
            hint=f"look at its log: pdctl logs {instance.name}",
        ) from error
    return response.duration_s


def warm_pair(nodes: Nodes, plan: ClusterPlan, prefill: InstancePlan, decode: InstancePlan) -> float:
    """Send one request over a prefill/decode pair without the router. Returns the decode leg's time, in seconds.

    Raises:
        NodeError: code ``pair-failed``, naming the leg that failed.
    """
    prompt = unique_prompt(_WARMUP_WORDS)
    request_id = f"pdctl-warmup-{secrets.token_hex(8)}"
    [answer] = nodes.http(prefill.host, [prefill_leg(plan, prefill, prompt, request_id, _PAIR_LEG_S)])
    try:
        params = read_completion(answer).kv_transfer_params
    except ValueError as error:
        raise NodeError(prefill.host, "pair-failed", f"{prefill.name} failed the prefill leg: {error}") from error
    if not params:
        raise NodeError(
            prefill.host,
            "pair-failed",
            f"{prefill.name} answered the prefill leg without kv_transfer_params: its KV connector is not at work",
            hint=f"look for the connector in its log: pdctl logs {prefill.name}",
        )
    [answer] = nodes.http(decode.host, [decode_leg(plan, decode, prompt, request_id, params, _PAIR_LEG_S)])
    try:
        read_completion(answer)
    except ValueError as error:
        side_channel = f"{params.get('remote_host')}:{params.get('remote_port')}"
        raise NodeError(
            decode.host,
            "pair-failed",
            f"{decode.name} got no KV cache from {prefill.name}: {error}",
            hint=f"can {decode.host} reach the side channel of {prefill.name} ({side_channel}), and {prefill.host} "
            f"that of {decode.name} ({decode.address}:{decode.side_channel_ports[0]})? Both directions are needed",
        ) from error
    return answer.duration_s


def in_rounds(
    prefill: Sequence[InstancePlan], decode: Sequence[InstancePlan]
) -> list[list[tuple[InstancePlan, InstancePlan]]]:
    """All pairs, in rounds in which no instance occurs twice, so that a round can run at once."""
    longer = max(len(prefill), len(decode))
    rounds = []
    for shift in range(longer):
        pairs = [
            (prefill[i], decode[(i + shift) % longer])
            for i in range(len(prefill))
            if (i + shift) % longer < len(decode)
        ]
        if pairs:
            rounds.append(pairs)
    return rounds
