"""The proof: one completion through the router whose KV cache is shown to have travelled, with the right answer.

Judging is pure. Three things must hold, because each alone can be had from a broken cluster: the text is that of the
prefill instance alone; decode counts the prompt as received (vLLM falls back to computing it again without a word);
and the side that owns the NIXL handles (prefill in push mode, decode in pull mode) moved at least the prompt's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdctl.lifecycle.completions import Completion
from pdctl.prometheus_text import read_samples, total

METRIC_NAMES = (
    "vllm:nixl_bytes_transferred_sum",
    "vllm:nixl_bytes_transferred_count",
    "vllm:prompt_tokens_by_source_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_failed_notifications_total",
    "vllm:cache_config_info",
)

# Two runs of the same prompt in bfloat16 differ by up to 0.6 in log-probability with another batch or prefix-cache
# state and no fault at all (measured); damaged KV differs by more.
LOGPROB_TOLERANCE = 1.0


@dataclass(frozen=True)
class Counters:
    """What an instance's ``/metrics`` says about KV transfer. None: the metric is not there."""

    nixl_bytes: float | None
    nixl_transfers: float | None
    received_tokens: float | None
    recomputed_tokens: float | None
    block_size: int | None
    bytes_per_block: float | None


def read_counters(metrics_text: str) -> Counters:
    """Read the counters of one instance from its ``/metrics``."""
    samples = read_samples(metrics_text, METRIC_NAMES)
    config: Mapping[str, str] = next((s.labels for s in samples if s.name == "vllm:cache_config_info"), {})
    memory, blocks = _number(config.get("kv_cache_memory_bytes")), _number(config.get("num_gpu_blocks"))
    if _number(config.get("num_gpu_blocks_override")):
        # Then the number of blocks is the user's, and does not fill the memory.
        memory = None
    size = _number(config.get("block_size"))
    source = "vllm:prompt_tokens_by_source_total"
    return Counters(
        nixl_bytes=total(samples, "vllm:nixl_bytes_transferred_sum"),
        nixl_transfers=total(samples, "vllm:nixl_bytes_transferred_count"),
        received_tokens=total(samples, source, source="external_kv_transfer"),
        recomputed_tokens=total(samples, source, source="local_compute"),
        block_size=int(size) if size else None,
        bytes_per_block=memory / blocks if memory and blocks else None,
    )


@dataclass(frozen=True)
class Evidence:
    """The counters of one role before and after the proof request: instance name to counters."""

    before: Mapping[str, Counters]
    after: Mapping[str, Counters]

    def growth(self, name: str, counter: str) -> float | None:
        """How far a counter of an instance rose; None if it cannot be known."""
        start, end = getattr(self.before.get(name), counter, None), getattr(self.after.get(name), counter, None)
        return None if start is None or end is None else float(end) - float(start)

    def total_growth(self, counter: str) -> float | None:
        """The same over all instances that have the counter."""
        values = [value for name in self.after if (value := self.growth(name, counter)) is not None]
        return sum(values) if values else None


@dataclass(frozen=True)
class Verdict:
    """The outcome. ``failures`` empty means proven; ``unchecked`` lists what could not be judged, and why."""

    failures: tuple[str, ...]
    unchecked: tuple[str, ...]
    facts: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def proven(self) -> bool:
        """True if nothing speaks against the transfer."""
        return not self.failures


def expected_bytes(prompt_tokens: int, counters: Counters) -> float | None:
    """Bytes of KV cache that a prompt fills: whole blocks. None if the instance does not tell its cache geometry."""
    if counters.block_size is None or counters.bytes_per_block is None:
        return None
    return -(-prompt_tokens // counters.block_size) * counters.bytes_per_block


def judge_transfer(mode: str, prompt_tokens: int, prefill: Evidence, decode: Evidence) -> Verdict:
    """Did the prompt's KV cache travel? Other traffic may only add to the counters, so growth is a lower bound."""
    failures: list[str] = []
    unchecked: list[str] = []
    facts: dict[str, float | int | str] = {"prompt_tokens": prompt_tokens}
    received = decode.total_growth("received_tokens")
    # The last prompt token is always computed on decode: its logits give the first token.
    if received is None:
        unchecked.append("decode does not export vllm:prompt_tokens_by_source_total: received tokens not compared")
    else:
        facts["received_tokens"] = received
        if received < prompt_tokens - 1:
            recomputed = decode.total_growth("recomputed_tokens")
            failures.append(
                f"decode received the KV cache of {received:.0f} of {prompt_tokens} prompt tokens and computed "
                f"{'an unknown number' if recomputed is None else f'{recomputed:.0f}'} itself: "
                "it silently prefilled instead of taking the transfer"
            )
    mover_name, mover = ("prefill", prefill) if mode == "push" else ("decode", decode)
    moved = mover.total_growth("nixl_bytes")
    wanted = next((b for c in mover.after.values() if (b := expected_bytes(prompt_tokens, c)) is not None), None)
    if moved is None:
        failures.append(f"{mover_name} does not export vllm:nixl_bytes_transferred: the KV connector is not at work")
    else:
        facts["nixl_bytes"] = moved
        if moved <= 0:
            failures.append(f"{mover_name} moved no byte over NIXL for the proof request")
        elif wanted is None:
            unchecked.append("the size of a KV block is not exported here: bytes moved compared with 0 only")
        else:
            facts["expected_bytes"] = wanted
            if moved < wanted:
                failures.append(f"{mover_name} moved {moved:,.0f} bytes over NIXL, expected at least {wanted:,.0f}")
    return Verdict(tuple(failures), tuple(unchecked), facts)


def judge_answer(routed: Completion, alone: Completion, *, exact: bool) -> Verdict:
    """Is the answer through the router that of prefill alone?

    Args:
        routed: the completion through the router.
        alone: the same prompt on a prefill instance alone.
        exact: demand the same text (float32); else compare log-probabilities up to the first different token, where
            the other token must have been nearly as likely.
    """
    if exact:
        if routed.text == alone.text:
            return Verdict((), (), {"answer": "equal text"})
        return Verdict(
            (f"the answer is wrong: {routed.text!r} through the router, {alone.text!r} from prefill alone",), ()
        )
    if not routed.logprobs or not alone.logprobs:
        if routed.text == alone.text:
            return Verdict((), ("no log-probabilities in the answers: texts compared only",), {"answer": "equal text"})
        return Verdict((), ("no log-probabilities in the answers, and texts differ: answer not judged",))
    worst = 0.0
    for position, (ours, theirs) in enumerate(zip(routed.tokens, alone.tokens, strict=False)):
        if ours != theirs:
            top = alone.top[position] if position < len(alone.top) else {}
            if ours not in top:
                return Verdict((_unlikely(position, ours, theirs),), ())
            gap = abs(alone.logprobs[position] - top[ours])
            worst = max(worst, gap)
            if gap > LOGPROB_TOLERANCE:
                return Verdict((_unlikely(position, ours, theirs),), ())
            break
        worst = max(worst, abs(routed.logprobs[position] - alone.logprobs[position]))
    if worst > LOGPROB_TOLERANCE:
        return Verdict(
            (
                f"the answer's log-probabilities differ by {worst:.2f} from those of prefill alone "
                f"(tolerance {LOGPROB_TOLERANCE}): the KV cache that arrived is not the one that was sent",
            ),
            (),
        )
    return Verdict((), (), {"answer": "log-probabilities agree", "largest_difference": round(worst, 4)})


def merge(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict out of several."""
    facts: dict[str, float | int | str] = {}
    for verdict in verdicts:
        facts.update(verdict.facts)
    return Verdict(
        tuple(failure for verdict in verdicts for failure in verdict.failures),
        tuple(text for verdict in verdicts for text in verdict.unchecked),
        facts,
    )


def _unlikely(position: int, ours: str, theirs: str) -> str:
    return (
        f"token {position + 1} of the answer is {ours!r} through the router and {theirs!r} from prefill alone, where "
        f"{ours!r} was not nearly as likely: the KV cache that arrived is not the one that was sent"
    )


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value and value > 0 else None
