"""What the scheduler side remembers of requests, and tells the workers with each engine step. No vLLM, no thread.

Of vLLM's objects only what is read here is needed: see `Request`, `Blocks` and `BlockPool`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from . import wire
from .step import BlockIds, Ended, GivenUp, Peer, Prefilling, Ready, Receive, Step

logger = logging.getLogger("vllm.pdctl_connector.bookkeeping")

WAITING_AGAIN_S: Final = 5.0
"""Requests that wait for blocks are told to the workers again after so long, though they have not changed."""
ATTEMPTS: Final = 2**31
"""Attempt numbers start again from 0 after so many."""
WITH_KV: Final = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Ends of a prefill request that leave its KV complete."""
LOAD_FAILED: Final = "FINISHED_ERROR"
"""How vLLM ends a request whose transfer failed: the workers know that it is over, since they said so."""


class Request(Protocol):
    """What is read of vLLM's request."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    prompt_token_ids: list[int] | None
    status: Any


class Blocks(Protocol):
    """What is read of vLLM's ``KVCacheBlocks``: all blocks of a request, by group, in the order of its tokens."""

    blocks: Sequence[Sequence[Any]]

    def get_block_ids(self) -> Sequence[list[int]]:
        """The ids of all."""

    def get_unhashed_block_ids_all_groups(self) -> Sequence[list[int]]:
        """The ids of those that the prefix cache did not have."""


class BlockPool(Protocol):
    """What is used of vLLM's pool of KV blocks."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """Count one more user of each block."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Count one user less; a block without users may be used for anything."""


@dataclass(frozen=True)
class Geometry:
    """The KV cache, as far as block ids are concerned.

    Attributes:
        block_sizes: tokens in a logical block, for each group that is transferred.
        hybrid: some group is cut to its tail (a sliding window, a state): not every block of the prompt is there.
        blocks: logical blocks there are.
        clip: upstream's choice of the groups and blocks that are transferred, of all that a request has.
    """

    block_sizes: tuple[int, ...]
    hybrid: bool
    blocks: int
    clip: Callable[[Any], Sequence[list[int]]]

    @property
    def by_index(self) -> bool:
        """Whether the two sides align blocks by their index in the prompt; else by their end."""
        return len(self.block_sizes) == 1 and not self.hybrid


class Bookkeeping:
    """Both roles: requests that come, get blocks and end, and the blocks that may not be used meanwhile.

    Args:
        geometry: the KV cache.
        waiting_share: of the blocks, how many requests that wait for a transfer may hold together.
        randomized: whether vLLM appends a random suffix to request ids here.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        waiting_share: float,
        randomized: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.geometry = geometry
        self.quarantine = Quarantine()
        self._waiting_share = waiting_share
        self._randomized = randomized
        self._clock = clock
        self._step = Step()
        # Decode: requests that wait for blocks, and those that wait for a transfer with the blocks that it fills.
        self._waiting: dict[str, tuple[str, Peer]] = {}
        self._waiting_told = 0.0
        self._waiting_changed = False
        self._receiving: dict[str, tuple[Receive, list[Any]]] = {}
        self._attempt = -1
        # Prefill: finished requests whose blocks the writer holds.
        self._sending: set[str] = set()

    def key_of(self, request: Request) -> str:
        """What both sides and the router call a request."""
        return wire.transfer_key(request.request_id, request.kv_transfer_params, randomized=self._randomized)

    @property
    def pending(self) -> bool:
        """True while the engine must go on stepping: the results of the writer reach it with a step alone."""
        return bool(self._sending or self._receiving or self._step or self._waiting_changed or self.quarantine)

    # --- decode ------------------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """A request was queued. One that will want KV asks prefill to keep it; one for another engine is announced."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode"):
            # Now, not when it gets blocks: decode is to hear that it is known, however long the queue is here. vLLM
            # announces a request once; what gets blocks again after a preemption is known already.
            self._step.prefilling.append(
                Prefilling(request.request_id, self.key_of(request), request.num_prompt_tokens)
            )
        if not params.get("do_remote_prefill"):
            return
        peer = peer_in(params)
        if peer is None:
            # Upstream would end in a KeyError in the engine; to compute the prompt here is always right.
            logger.warning("request %s names no prefill engine: its prompt is computed here", request.request_id)
            params["do_remote_prefill"] = False
            return
        self._waiting[request.request_id] = (self.key_of(request), peer)
        self._waiting_changed = True

    def has_room_for(self, tokens: int) -> bool:
        """Whether a request may get blocks for so many tokens to be received. One at a time always may."""
        if not self._receiving:
            return True
        held = sum(_count(receive.block_ids) for receive, _ in self._receiving.values())
        wanted = sum(-(-tokens // size) for size in self.geometry.block_sizes)
        return held + wanted <= self._waiting_share * self.geometry.blocks

    def allocated(self, request: Request, blocks: Blocks, tokens: int, external: int) -> BlockIds | None:
        """A request got its blocks.

        Args:
            request: which.
            blocks: all its blocks.
            tokens: how many leading tokens of the prompt decode takes from prefill or has.
            external: how many of those are to be received; none if the prefix cache has them.

        Returns:
            the blocks to be filled; None if nothing is to be received.
        """
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return None
        key, peer = self._waiting.pop(request.request_id, (self.key_of(request), peer_in(params)))
        self._waiting_changed = True
        # vLLM asks again after a preemption or a failed transfer: then the prompt is computed here.
        params["do_remote_prefill"] = False
        if peer is None:
            return None
        wanted: BlockIds = tuple([] for _ in self.geometry.block_sizes)
        first = tuple(0 for _ in wanted)
        if external > 0:
            wanted, first = self._to_fill(blocks, tokens, external)
        receive = Receive(
            request_id=request.request_id,
            key=key,
            attempt=self._next_attempt(),
            peer=peer,
            block_ids=wanted,
            first_block=first,
            tokens=tokens,
            token_hash=_hash(request, tokens),
        )
        self._step.receive.append(receive)
        if external <= 0:
            # Told all the same: prefill need not keep its blocks.
            return None
        ids = {block_id for group in wanted for block_id in group}
        held = [block for group in blocks.blocks for block in group if not block.is_null and block.block_id in ids]
        self._receiving[request.request_id] = (receive, held)
        return wanted

    def _to_fill(self, blocks: Blocks, tokens: int, external: int) -> tuple[BlockIds, tuple[int, ...]]:
        """The logical blocks that prefill is to fill, and the index in the prompt of the first one, per group."""
        if self.geometry.by_index:
            size = self.geometry.block_sizes[0]
            first, last = (tokens - external) // size, -(-tokens // size)
            (group,) = self.geometry.clip(blocks.get_block_ids())
            return (list(group[first:last]),), (first,)
        clipped = self.geometry.clip(blocks.get_unhashed_block_ids_all_groups())
        return tuple(list(group) for group in clipped), tuple(0 for _ in clipped)

    # --- prefill -----------------------------------------------------------------------------------------------------

    # --- both --------------------------------------------------------------------------------------------------------

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> bool:
        """A request ended here.

        Prefill with KV: its blocks are kept for the writer. Prefill without, or decode before its KV is there: the
        other side is told.

        Returns:
            whether the blocks are kept, until `results` names the request as sent.
        """
        params = request.kv_transfer_params
        if not params:
            return False
        if waiting := self._waiting.pop(request.request_id, None):
            # It never got blocks here.
            self._waiting_changed = True
            params["do_remote_prefill"] = False
            key, peer = waiting
            self._step.given_up.append(GivenUp(request.request_id, key, self._next_attempt(), peer))
            return False
        if entry := self._receiving.get(request.request_id):
            receive, _ = entry
            if request.status.name != LOAD_FAILED:
                self._step.given_up.append(GivenUp(request.request_id, receive.key, receive.attempt, receive.peer))
            return False
        if not params.get("do_remote_decode"):
            return False
        return self._prefilled(request, block_ids)

    def _prefilled(self, request: Request, block_ids: Sequence[Sequence[int]]) -> bool:
        key, tokens = self.key_of(request), request.num_prompt_tokens
        reason, detail = "", ""
        if request.status.name not in WITH_KV:
            reason, detail = "aborted", str(request.status.name).lower()
        elif not any(len(group) for group in block_ids):
            reason, detail = "aborted", "no blocks"
        elif self.geometry.hybrid and request.num_computed_tokens > tokens:
            # A window or a state moves on with every token, so that of the prompt's end is gone.
            beyond = request.num_computed_tokens - tokens
            reason, detail = "mismatch", f"prefill went {beyond} tokens beyond the prompt; give its leg max_tokens=1"
        if reason:
            self._step.ended.append(Ended(request.request_id, key, reason, detail))
            return False
        self._sending.add(request.request_id)
        self._step.ready.append(
            Ready(request.request_id, key, self._to_offer(block_ids, tokens), tokens, _hash(request, tokens))
        )
        return True

    def _to_offer(self, block_ids: Sequence[Sequence[int]], tokens: int) -> BlockIds:
        """The blocks of the prompt. What a longer answer computed beyond it is not asked for."""
        clipped = self.geometry.clip(tuple(list(group) for group in block_ids))
        if self.geometry.hybrid:
            return tuple(list(group) for group in clipped)
        return tuple(
            list(group[: -(-tokens // size)]) for group, size in zip(clipped, self.geometry.block_sizes, strict=True)
        )

    # --- steps -------------------------------------------------------------------------------------------------------

    def take_step(self) -> Step | None:
        """What the workers are to be told now; None for nothing."""
        now = self._clock()
        again = self._waiting and now - self._waiting_told > WAITING_AGAIN_S
        if not (self._step or self._waiting_changed or again):
            return None
        step, self._step = self._step, Step()
        step.waiting = dict(self._waiting.values())
        self._waiting_told, self._waiting_changed = now, False
        return step

    def results(
        self,
        *,
        received: Iterable[str],
        sent: Iterable[str],
        unfenced: Mapping[str, int],
        fenced: Mapping[str, int],
        pool: BlockPool | None,
    ) -> None:
        """What the workers say. Call before vLLM frees the blocks of requests that are received (or failed) or sent.

        Args:
            received: requests that all ranks have settled, well or not.
            sent: requests whose blocks all ranks have given up.
            unfenced: request -> how many more ranks have settled it without knowing that no WRITE touches its blocks.
            fenced: request -> how many more of those ranks know it now.
            pool: where the blocks are from.
        """
        self.quarantine.note(unfenced, fenced)
        for request_id in received:
            entry = self._receiving.pop(request_id, None)
            self.quarantine.settled(request_id, entry[1] if entry else [], pool)
        self.quarantine.release(pool)
        self._sending.difference_update(sent)

    def _next_attempt(self) -> int:
        # One count for all keys: a count per key would have to be forgotten some time, and its numbers come twice.
        self._attempt = (self._attempt + 1) % ATTEMPTS
        return self._attempt


@dataclass
class _Kept:
    blocks: list[Any] = field(default_factory=list)
    ranks: int = 0


class Quarantine:
    """Blocks that a late WRITE may touch: settled requests of which some ranks have no fence yet."""

    def __init__(self) -> None:
        self._unfenced: dict[str, int] = {}
        self._fenced: dict[str, int] = {}
        self._kept: dict[str, _Kept] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def note(self, unfenced: Mapping[str, int], fenced: Mapping[str, int]) -> None:
        """Ranks without a fence, and ranks that got theirs. Both may come before all ranks have settled the request."""
        for request_id, ranks in unfenced.items():
            self._unfenced[request_id] = self._unfenced.get(request_id, 0) + ranks
        for request_id, ranks in fenced.items():
            if request_id in self._unfenced or request_id in self._kept:
                self._fenced[request_id] = self._fenced.get(request_id, 0) + ranks

    def settled(self, request_id: str, blocks: list[Any], pool: BlockPool | None) -> None:
        """All ranks have settled a request; vLLM is about to free its blocks. Those that are not fenced stay in use."""
        ranks = self._unfenced.pop(request_id, 0)
        if not ranks or not blocks:
            if request_id not in self._kept:
                self._fenced.pop(request_id, None)
            return
        if pool is None:
            logger.error("no block pool: blocks of %s cannot be kept out of use", request_id)
            return
        pool.touch(blocks)
        # Another request may have had the same id: with ids of the client's, without a random suffix.
        kept = self._kept.setdefault(request_id, _Kept())
        kept.blocks += blocks
        kept.ranks += ranks
        logger.warning("%d blocks of %s stay out of use until prefill answers", len(blocks), request_id)

    def release(self, pool: BlockPool | None) -> None:
        """Give back the blocks of requests that are fenced on every rank."""
        for request_id in [name for name in self._fenced if name in self._kept]:
            kept = self._kept[request_id]
            if self._fenced[request_id] < kept.ranks or pool is None:
                continue
            del self._kept[request_id], self._fenced[request_id]
            pool.free_blocks(kept.blocks)
            logger.info("%d blocks of %s may be used again", len(kept.blocks), request_id)


def peer_in(params: Mapping[str, Any]) -> Peer | None:
    """The prefill engine that a request's parameters name; None if they do not."""
    try:
        peer = Peer(
            engine_id=str(params["remote_engine_id"] or ""),
            host=str(params["remote_host"] or ""),
            port=int(params["remote_port"]),
            tp_size=int(params["tp_size"]),
            pp_size=int(params.get("pp_size") or 1),
        )
    except (KeyError, TypeError, ValueError):
        return None
    usable = peer.engine_id and peer.host and 0 < peer.port <= 65535 and peer.tp_size > 0 and peer.pp_size > 0
    return peer if usable else None


def _hash(request: Request, tokens: int) -> bytes:
    return wire.token_hash(request.prompt_token_ids[:tokens]) if request.prompt_token_ids else b""


def _count(block_ids: BlockIds) -> int:
    return sum(len(group) for group in block_ids)
