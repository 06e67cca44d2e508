"""Read single metrics out of a Prometheus exposition, cheaply.

prometheus-client's parser is pure Python and slow on vLLM's thousands of histogram buckets, so lines of other metrics
are dropped before it sees them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Sample:
    """One sample: full name (with ``_total``, ``_sum`` and the like), labels, value."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_samples(text: str, names: Collection[str]) -> list[Sample]:
    """Read the samples whose full name is in ``names``; anything malformed among them is left out."""
    wanted = set(names)
    samples: list[Sample] = []
    for line in text.splitlines():
        if line.split("{", 1)[0].split(" ", 1)[0] not in wanted:
            continue
        try:
            for family in text_string_to_metric_families(line + "\n"):
                samples.extend(Sample(s.name, dict(s.labels), float(s.value)) for s in family.samples)
        except ValueError:
            continue
    return samples


def total(samples: Collection[Sample], name: str, **labels: str) -> float | None:
    """Sum of the samples of ``name`` that carry all of ``labels``; None (not 0) if there is none."""
    values = [
        s.value for s in samples if s.name == name and all(s.labels.get(key) == value for key, value in labels.items())
    ]
    return sum(values) if values else None
