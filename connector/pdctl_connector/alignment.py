"""Which of prefill's blocks belong to those that decode asks for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .step import BlockIds


def align(
    block_ids: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    first_block: Sequence[int],
    *,
    by_index: bool,
) -> BlockIds:
    """The blocks to read on the prefill side, group by group.

    Args:
        block_ids: what prefill has.
        wanted: what decode asks for.
        first_block: index in the prompt of the first block asked for.
        by_index: both sides count blocks of the prompt alike (one group of full attention), and the index decides.
            Otherwise (sliding windows, states) both are cut to their tail and align at their end, as upstream does, and
            a shorter list is left to upstream, which knows what is a pair.

    Raises:
        ValueError: the two do not fit.
    """
    if len(block_ids) != len(wanted):
        raise ValueError(f"{len(block_ids)} cache groups here, {len(wanted)} in the registration")
    local: list[list[int]] = []
    for group, asked, first in zip(block_ids, wanted, first_block, strict=True):
        if not asked:
            # Not group[-0:], which is everything.
            local.append([])
        elif by_index:
            here = list(group[first : first + len(asked)])
            if len(here) != len(asked):
                raise ValueError(f"{len(asked)} blocks from number {first} are asked for, {len(group)} are here")
            local.append(here)
        else:
            local.append(list(group[-len(asked) :]))
    return tuple(local)
