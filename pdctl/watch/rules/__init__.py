"""What is wrong, concluded from the last snapshots. Every rule is pure: (snapshots, settings) -> symptoms.

A rule sees the latest snapshot last. It states facts that hold now; that they must hold for some snapshots before
anybody is told, and when they are over, is `pdctl.watch.book`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pdctl.watch.alerts import Symptom
from pdctl.watch.rules import engines, traffic, transfers
from pdctl.watch.rules.codes import CODES, PRECEDENCE, Code
from pdctl.watch.rules.evidence import Evidence
from pdctl.watch.settings import WatchSettings
from pdctl.watch.snapshot import Snapshot

__all__ = ["CODES", "PRECEDENCE", "RULES", "Code", "Rule", "find_symptoms"]


@dataclass(frozen=True)
class Rule:
    """One rule and the codes it may find."""

    codes: tuple[str, ...]
    judge: Callable[[Evidence], Iterator[Symptom]]

    def __call__(self, history: Sequence[Snapshot], settings: WatchSettings) -> Iterator[Symptom]:
        """The symptoms in the latest of the snapshots."""
        return self.judge(Evidence(history, settings))


RULES: Final[tuple[Rule, ...]] = (
    Rule(("E003",), engines.host_unreachable),
    Rule(("E001",), engines.engine_down),
    Rule(("E002",), engines.restarted),
    Rule(("E004",), engines.metrics_silent),
    Rule(("E005",), engines.watch_degraded),
    Rule(("W001",), engines.writer_dead),
    Rule(("W002",), engines.writer_stuck),
    Rule(("W003",), engines.rank_silent),
    Rule(("W004",), engines.writer_errors),
    Rule(("T001", "T002", "T003", "T004", "T005", "T008", "T010", "T012"), transfers.judge_transfers),
    Rule(("T006",), traffic.slow_prefill),
    Rule(("T007",), traffic.slow_fabric),
    Rule(("T009",), traffic.load_failed),
    Rule(("T011",), traffic.late_messages),
    Rule(("T013",), traffic.leases_expire),
    Rule(("T014",), traffic.slow_post),
    Rule(("T015",), traffic.pair_broken),
    Rule(("T016",), traffic.messages_refused),
)


def find_symptoms(history: Sequence[Snapshot], settings: WatchSettings) -> list[Symptom]:
    """All symptoms in the latest snapshot.

    Args:
        history: at least one snapshot, the latest last.
        settings: thresholds.
    """
    evidence = Evidence(history, settings)
    return [symptom for rule in RULES for symptom in rule.judge(evidence)]
