"""How many bytes a selection of prepared NIXL descriptors covers, whatever vLLM put into them.

vLLM prepares one descriptor for each block of each memory region, and then names them by number. Their sizes differ
with the cache's kind, the tensor-parallel ratio and the vLLM release, so they are read where they are handed to NIXL
rather than computed a second time.
"""

from __future__ import annotations

import bisect
import itertools
from typing import Any

Runs = tuple[tuple[int, int], ...]
"""Descriptors by number: up to which number (exclusive) they have which size in bytes."""


def runs_of(descriptors: Any) -> Runs:
    """The sizes in a descriptor list.

    Args:
        descriptors: what NIXL's ``get_xfer_descs`` and ``prep_xfer_dlist`` take: rows of (address, bytes, device), or
            of (address, bytes, device, stride, count) that stand for ``count`` descriptors; tuples or a numpy array.
    """
    runs: list[tuple[int, int]] = []
    end = 0
    if hasattr(descriptors, "shape"):
        sizes = descriptors[:, 1]
        starts = [0, *((sizes[1:] != sizes[:-1]).nonzero()[0] + 1).tolist()]
        for start, stop in itertools.pairwise([*starts, len(descriptors)]):
            strided = descriptors.shape[1] == 5
            end += int(descriptors[start:stop, 4].sum()) if strided else stop - start
            runs.append((end, int(sizes[start])))
    else:
        for size, rows in itertools.groupby(descriptors, key=lambda row: row[1]):
            end += sum(row[4] if len(row) == 5 else 1 for row in rows)
            runs.append((end, int(size)))
    return tuple(runs)


def total(runs: Runs, numbers: Any) -> int:
    """Bytes of the descriptors with these numbers (a list, or a numpy array).

    Raises:
        ValueError: a number is beyond the list.
    """
    last = runs[-1][0] if runs else 0
    if not len(numbers):
        return 0
    if int(max(numbers) if isinstance(numbers, (list, tuple)) else numbers.max()) >= last:
        raise ValueError(f"a number is beyond the {last} prepared descriptors")
    if len(runs) == 1:
        return len(numbers) * runs[0][1]
    ends, sizes = zip(*runs, strict=True)
    if isinstance(numbers, (list, tuple)):
        return sum(sizes[bisect.bisect_right(ends, number)] for number in numbers)
    # There is numpy where there are arrays of it. A hundred thousand numbers take a few milliseconds.
    import numpy

    return int(numpy.asarray(sizes)[numpy.asarray(ends).searchsorted(numbers, side="right")].sum())
