"""What the scheduler tells the workers with each engine step, and what they tell back. Plain data, pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

BlockIds = tuple[list[int], ...]
"""Logical block ids, one list per KV-cache group."""


@dataclass(frozen=True)
class Prefilling:
    """Prefill: a request for another engine is in a batch for the first time."""

    request_id: str
    key: str
    tokens: int


@dataclass(frozen=True)
class Ready:
    """Prefill: its blocks are finished and held.

    Attributes:
        block_ids: the blocks of the whole prompt; no more, whatever the request computed.
        tokens: prompt tokens.
        token_hash: `wire.token_hash` of the prompt; empty without token ids.
    """

    request_id: str
    key: str
    block_ids: BlockIds
    tokens: int
    token_hash: bytes


@dataclass(frozen=True)
class Ended:
    """Prefill: the request ended without KV to give; ``reason`` is one of `wire.FAIL_REASONS`."""

    request_id: str
    key: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Peer:
    """A prefill engine as the decode request's parameters name it."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int = 1


@dataclass(frozen=True)
class Receive:
    """Decode: blocks are set aside for a prompt that a prefill engine computes.

    Attributes:
        block_ids: blocks to fill, per group; all empty when the whole prompt is here already.
        first_block: index in the prompt of the first of them, per group.
    """

    request_id: str
    key: str
    attempt: int
    peer: Peer
    block_ids: BlockIds
    first_block: tuple[int, ...]
    tokens: int
    token_hash: bytes


@dataclass(frozen=True)
class GivenUp:
    """Decode: the request is gone (aborted by its client). ``peer`` and ``key`` are for one that never got blocks."""

    request_id: str
    key: str
    attempt: int
    peer: Peer


@dataclass
class Step:
    """Everything new since the last engine step."""

    prefilling: list[Prefilling] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    receive: list[Receive] = field(default_factory=list)
    given_up: list[GivenUp] = field(default_factory=list)
    waiting: dict[str, Peer] = field(default_factory=dict)
    """Decode: keys of requests that still wait for blocks here, so that prefill keeps theirs."""

    def __bool__(self) -> bool:
        return any((self.prefilling, self.ready, self.ended, self.receive, self.given_up, self.waiting))
