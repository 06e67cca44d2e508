"""Which sizes ``pdctl bench fabric`` writes: what the user named, as points. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MOST_POINTS = 200
MOST_DESCRIPTORS = 65536
"""In one WRITE; vLLM makes fewer, even for the longest prompts."""
MODEL = "model"
"""Among block sizes: what one layer has of the model's own KV block."""
DEFAULT_BLOCK_SIZES = "model,16K,64K,256K,1M,4M"
DEFAULT_DESCRIPTORS = "1,8,64"

_WORD = 8
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,12})\s*(?:([KMG])(?:i?B)?|B)?", re.IGNORECASE)


@dataclass(frozen=True)
class Shape:
    """One WRITE: so many descriptors of so many bytes."""

    block_bytes: int
    descriptors: int

    @property
    def size(self) -> int:
        """Bytes of the WRITE."""
        return self.block_bytes * self.descriptors


def parse_block_sizes(text: str) -> tuple[int | None, ...]:
    """Read ``model,16K,1M``: bytes, each once, in order; None for the model's own.

    Raises:
        ValueError: for people: it is no such list.
    """
    sizes: list[int | None] = []
    for word in _words(text):
        if word.lower() == MODEL:
            sizes.append(None)
            continue
        match = _SIZE.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no size; write 65536, 64K or 1M (1024 to the K), or {MODEL}")
        size = int(match[1]) * _UNITS[(match[2] or "").upper()]
        if size < _WORD or size % _WORD:
            raise ValueError(f"{word!r}: a block has 8 bytes at least, and a multiple of 8")
        sizes.append(size)
    return tuple(dict.fromkeys(sizes))


def parse_descriptors(text: str) -> tuple[int, ...]:
    """Read ``1,16,256``: numbers of descriptors, each once, in order.

    Raises:
        ValueError: for people: it is no such list.
    """
    counts = []
    for word in _words(text):
        # Digits of other scripts are no numbers here; `int` would take them.
        if not re.fullmatch(r"[0-9]{1,9}", word) or not 1 <= int(word) <= MOST_DESCRIPTORS:
            raise ValueError(f"{word!r} is no number of descriptors; it can be 1 to {MOST_DESCRIPTORS}")
        counts.append(int(word))
    return tuple(dict.fromkeys(counts))


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError("an empty place in the list; write the values with one comma between two")
    return words


def make_shapes(
    sizes: Sequence[int | None], counts: Sequence[int], own_bytes: int, limit_bytes: int
) -> tuple[list[Shape], list[Shape]]:
    """Every size with every number of descriptors, each once; and those that are larger than the limit.

    Args:
        sizes: bytes of a block; None for the model's.
        counts: of descriptors.
        own_bytes: what one layer has of the model's block.
        limit_bytes: largest WRITE.

    Raises:
        ValueError: for people: there are too many, or all are too large.
    """
    shapes = list(
        dict.fromkeys(Shape(own_bytes if size is None else size, count) for size in sizes for count in counts)
    )
    if len(shapes) > MOST_POINTS:
        raise ValueError(f"{len(shapes)} points are too many; {MOST_POINTS} can be measured at once")
    fit = [shape for shape in shapes if shape.size <= limit_bytes]
    if not fit:
        raise ValueError(
            f"every point is larger than {limit_bytes >> 20} MiB; name smaller blocks or fewer descriptors"
        )
    return fit, [shape for shape in shapes if shape.size > limit_bytes]
