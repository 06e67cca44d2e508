"""What the probe writes, and what the target makes of it. Pure; NumPy is loaded by what needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    Words = np.ndarray[Any, np.dtype[np.uint64]]

FILL = 0xA5A5A5A5A5A5A5A5
"""What the target's memory holds where nothing was written."""
WORD = 8
BAD_SHOWN = 8


class Layout(NamedTuple):
    """Where the pieces of blocks lie: for each layer a region of blocks.

    Attributes:
        layers: how many.
        piece_bytes: what a block has in one layer; a multiple of 8.
        stride: blocks that a region has room for.
    """

    layers: int
    piece_bytes: int
    stride: int

    def offset(self, layer: int, block: int) -> int:
        """Where a piece starts, from the beginning of the memory."""
        return (layer * self.stride + block) * self.piece_bytes

    def numbers(self, blocks: Sequence[int]) -> list[int]:
        """Numbers of the descriptors of blocks: all layers of the first, of the next, and so on."""
        return [layer * self.stride + block for block in blocks for layer in range(self.layers)]

    def numbers_by_layer(self, blocks: Sequence[int]) -> list[int]:
        """The same layer by layer, so that neighbours in memory are neighbours in the list."""
        return [layer * self.stride + block for layer in range(self.layers) for block in blocks]


def blocks_that_fit(room_bytes: int, layers: int, piece_bytes: int) -> int:
    """How many blocks a memory holds; at least one, which may be too much for it."""
    return max(1, room_bytes // (layers * piece_bytes))


def scattered(blocks: int) -> list[int]:
    """For each local block the remote one, scattered: no two neighbours stay neighbours, if there are enough."""
    step = max(1, int(blocks * 0.618)) | 1
    while _common(step, blocks) != 1:
        step += 2
    return [(number * step + blocks // 3) % blocks for number in range(blocks)]


def shifted(blocks: int) -> list[int]:
    """For each local block the remote one, in two runs of neighbours."""
    return [(number + blocks // 2 + 1) % blocks for number in range(blocks)]


def _common(first: int, second: int) -> int:
    while second:
        first, second = second, first % second
    return first


def sources(mapping: Sequence[int], written: int) -> list[int]:
    """For each remote block the local one whose content it must hold, -1 for none, after the first WRITEs."""
    result = [-1] * len(mapping)
    for number in range(min(written, len(mapping))):
        result[mapping[number]] = number
    return result


def _mixed(values: Words) -> Words:
    """Another 64-bit number for each (splitmix64): no two the same."""
    import numpy as np

    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed


class Pattern:
    """Content of all pieces: a noise of one piece, changed by a key that no two pieces share.

    Args:
        seed: of this probe.
        layers: layers of a block.
        piece_bytes: see `Layout`.
    """

    def __init__(self, seed: int, layers: int, piece_bytes: int) -> None:
        import numpy as np

        self._layers = layers
        self._start = np.uint64(seed % 2**64)
        words = np.arange(1, piece_bytes // WORD + 1, dtype=np.uint64)
        self._noise = _mixed(words * np.uint64(0x9E3779B97F4A7C15) ^ np.array([self._start]))

    def _keys(self, layer: int, blocks: Words) -> Words:
        import numpy as np

        # Addition wraps around, as it should; an array does so without a warning.
        pieces = blocks * np.uint64(self._layers) + np.uint64(layer)
        return _mixed(pieces + np.array([self._start], dtype=np.uint64))

    def pieces(self, layer: int, blocks: Sequence[int]) -> Words:
        """Content of blocks in one layer: a row each."""
        import numpy as np

        keys = self._keys(layer, np.asarray(blocks, dtype=np.uint64))
        pieces: Words = keys[:, None] ^ self._noise[None, :]
        return pieces

    def belongs_to(self, piece: Words, layers: int, blocks: int) -> tuple[int, int] | None:
        """Layer and block whose content this is; None if it is nobody's."""
        import numpy as np

        key = piece ^ self._noise
        if not (key == key[0]).all():
            return None
        for layer in range(layers):
            found = np.flatnonzero(self._keys(layer, np.arange(blocks, dtype=np.uint64)) == key[0])
            if len(found):
                return layer, int(found[0])
        return None


class Findings:
    """What is wrong in the target's memory. Fed layer by layer, as the device's memory has to be copied to look at it.

    Args:
        pattern: what was written.
        layers: of a block.
        expected: for each block the local block whose content it must hold, -1 for none.
    """

    def __init__(self, pattern: Pattern, layers: int, expected: Sequence[int]) -> None:
        self._pattern = pattern
        self._layers = layers
        self._expected = expected
        self.checked = 0
        self.bad: dict[str, int] = {}
        self.examples: list[str] = []

    def look(self, layer: int, found: Words) -> None:
        """Compare one layer: `found` has a row for each block."""
        import numpy as np

        written = [block for block, source in enumerate(self._expected) if source >= 0]
        others = [block for block, source in enumerate(self._expected) if source < 0]
        self.checked += len(written)
        if written:
            wanted = self._pattern.pieces(layer, [self._expected[block] for block in written])
            wrong = np.flatnonzero((found[written] != wanted).any(axis=1))
            for index in wrong:
                block = written[int(index)]
                self._add(layer, block, *self._kind(found[block], wanted[int(index)]))
        if others:
            for index in np.flatnonzero((found[others] != np.uint64(FILL)).any(axis=1)):
                self._add(layer, others[int(index)], "stray", "was overwritten though nothing was sent to it")

    def _kind(self, found: Words, wanted: Words) -> tuple[str, str]:
        import numpy as np

        if (found == np.uint64(FILL)).all():
            return "missing", "holds nothing of what was sent to it"
        owner = self._pattern.belongs_to(found, self._layers, len(self._expected))
        if owner is not None:
            return "swapped", f"holds what was meant for another place (layer {owner[0]} of local block {owner[1]})"
        differ = int((found != wanted).sum())
        return "damaged", f"differs in {differ * WORD} of {len(found) * WORD} bytes"

    def _add(self, layer: int, block: int, kind: str, text: str) -> None:
        self.bad[kind] = self.bad.get(kind, 0) + 1
        if len(self.examples) < BAD_SHOWN:
            self.examples.append(f"layer {layer} of block {block} {text}")

    def summary(self) -> str:
        """In words; empty if all is well."""
        if not self.bad:
            return ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.bad.items()))
        return f"{sum(self.bad.values())} of {self.checked} pieces are wrong ({kinds}): {'; '.join(self.examples)}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1))]
