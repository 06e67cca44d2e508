"""The requests that pdctl itself sends to a cluster: plain completions and the two legs of a P/D pair. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdctl.lifecycle.nodes import HttpRequest, HttpResponse
from pdctl.plan import ClusterPlan, InstancePlan

# Words that any tokenizer splits into at least one token each, so that lengths can be bounded without one.
_WORDS = ("river", "stone", "window", "garden", "letter", "morning", "paper", "signal", "winter", "yellow")


@dataclass(frozen=True)
class Completion:
    """What matters of a completion.

    Attributes:
        text: the generated text.
        prompt_tokens: tokens of the prompt.
        kv_transfer_params: what a prefill instance says about the KV cache it keeps; None from others.
        tokens: generated tokens, if log-probabilities were asked for.
        logprobs: log-probability of each of them.
        top: the most likely tokens at each position with their log-probability.
    """

    text: str
    prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[Mapping[str, float], ...] = ()


def served_model(plan: ClusterPlan, instance: InstancePlan) -> str:
    """The name that requests must carry: ``served-model-name`` of the instance's role if set, else the model."""
    role = plan.spec.decode if instance.role == "decode" else plan.spec.prefill
    name = role.vllm_args.get("served-model-name")
    if isinstance(name, (list, tuple)):
        name = name[0] if name else None
    return str(name) if name else plan.spec.model


def unique_prompt(words: int) -> str:
    """A prompt of ``words`` words whose first one never occurred before, so that no prefix cache can answer it."""
    return " ".join([f"note-{secrets.token_hex(8)}:", *(_WORDS[index % len(_WORDS)] for index in range(words))])


def authorization(plan: ClusterPlan, instance: InstancePlan) -> dict[str, str]:
    """Headers that an instance or the router wants of a request, if it wants any: the cluster's API key."""
    api_key = instance.secret_env.get("VLLM_API_KEY") or plan.prefill[0].secret_env.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def completion_request(
    plan: ClusterPlan,
    instance: InstancePlan,
    prompt: str,
    *,
    max_tokens: int,
    timeout_s: float,
    logprobs: int | None = None,
    kv_transfer_params: Mapping[str, Any] | None = None,
    request_id: str | None = None,
) -> HttpRequest:
    """A completion at temperature 0. ``instance`` may be the router: it serves the prefill role's model name."""
    body: dict[str, Any] = {
        "model": served_model(plan, instance),
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    if logprobs is not None:
        body["logprobs"] = logprobs
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = dict(kv_transfer_params)
    headers = authorization(plan, instance)
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    return HttpRequest("POST", f"{instance.url}/v1/completions", json=body, headers=headers, timeout_s=timeout_s)


def prefill_leg(
    plan: ClusterPlan, prefill: InstancePlan, prompt: str, request_id: str, timeout_s: float
) -> HttpRequest:
    """The prefill half of a disaggregated request, as a router sends it."""
    return completion_request(
        plan,
        prefill,
        prompt,
        max_tokens=1,
        timeout_s=timeout_s,
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
        request_id=request_id,
    )


def decode_leg(
    plan: ClusterPlan,
    decode: InstancePlan,
    prompt: str,
    request_id: str,
    kv_transfer_params: Mapping[str, Any],
    timeout_s: float,
) -> HttpRequest:
    """The decode half, with what the prefill instance answered."""
    return completion_request(
        plan,
        decode,
        prompt,
        max_tokens=2,
        timeout_s=timeout_s,
        kv_transfer_params=kv_transfer_params,
        request_id=request_id,
    )


def read_completion(response: HttpResponse) -> Completion:
    """Read a completion.

    Raises:
        ValueError: the answer is not a good one; the message says why.
    """
    if not response.ok:
        raise ValueError(response.trouble)
    try:
        body = json.loads(response.body)
        choice = body["choices"][0]
        details = choice.get("logprobs") or {}
        return Completion(
            text=str(choice["text"]),
            prompt_tokens=int(body["usage"]["prompt_tokens"]),
            kv_transfer_params=body.get("kv_transfer_params"),
            tokens=tuple(details.get("tokens") or ()),
            logprobs=tuple(float(value) for value in details.get("token_logprobs") or () if value is not None),
            top=tuple(details.get("top_logprobs") or ()),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not an answer of vLLM ({error!r}): {' '.join(response.body.split())[:200]}") from error
