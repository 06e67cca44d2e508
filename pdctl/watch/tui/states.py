"""The words, glyphs and tones for what is known of an instance, a rank and a transfer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdctl.watch.alerts import Severity
from pdctl.watch.snapshot import InstanceView, RankView, SideRecord, Snapshot
from pdctl.watch.tui import format as show
from pdctl.watch.tui.format import NOTHING, Cell, Tone

METRICS_STALE_S = 4.0
"""Metrics and ranks are read once a second; an older figure is called stale."""
PROCESS_STALE_S = 30.0
"""Process facts are read at a slower pace."""

GLYPHS: Mapping[Tone, str] = {"good": "●", "warn": "▲", "bad": "✖", "dim": "○", "plain": "·"}
SEVERITIES: Mapping[Severity, Tone] = {Severity.CRITICAL: "bad", Severity.WARNING: "warn", Severity.INFO: "plain"}
FAILED_OUTCOMES = frozenset({"failed", "timed_out", "expired"})
_OUTCOME_TONES: Mapping[str, Tone] = {"received": "good", "completed": "good", "aborted": "dim", "cancelled": "dim"}
_WRITER_TONES: Mapping[str, Tone] = {"idle": "good", "busy": "good", "stuck": "bad", "dead": "bad"}
_WRITER_ORDER = {"dead": 0, "stuck": 1}


def glyphed(tone: Tone, text: str) -> Cell:
    """The text with the glyph of its tone before it."""
    return Cell(f"{GLYPHS.get(tone, '·')} {text}", tone)


def is_stale(age_s: float | None, error: str, limit: float = METRICS_STALE_S) -> bool:
    """Whether a reading that once was there is no longer of now."""
    return age_s is not None and (age_s > limit or (bool(error) and age_s > limit / 2))


def process_cell(instance: InstanceView) -> Cell:
    """What the main process of an instance does."""
    word = instance.process
    if word is None:
        return Cell("? unknown", "dim")
    if is_stale(instance.process_age_s, "", PROCESS_STALE_S):
        return Cell(f"○ {show.stale(instance.process_age_s)}", "dim")
    tones: Mapping[str, Tone] = {"running": "good", "absent": "dim"}
    return glyphed(tones.get(word, "bad"), show.clean(word))


def engine_cell(instance: InstanceView) -> Cell:
    """Whether the engine answers, and whether what it said is still of now."""
    if instance.healthy is False:
        return glyphed("bad", "failing")
    if is_stale(instance.age_s, instance.error):
        return Cell(f"○ {show.stale(instance.age_s)}", "dim")
    if instance.healthy:
        return glyphed("good", "healthy")
    return Cell("? no word", "dim") if instance.health_error else NOTHING


def _rank_urgency(rank: RankView) -> tuple[int, int, float]:
    stale = rank.age_s is None or is_stale(rank.age_s, rank.error)
    return _WRITER_ORDER.get(rank.writer, 2), 0 if stale else 1, -(rank.heartbeat_age_s or 0.0)


def writer_cell(ranks: Sequence[RankView]) -> Cell:
    """The writer that is worst off among the ranks, with the age of its last beat."""
    if not ranks:
        return NOTHING
    rank = min(ranks, key=_rank_urgency)
    which = "" if len(ranks) == 1 else f" r{rank.rank}"
    if rank.age_s is None:
        return Cell(f"? silent{which}", "warn" if rank.error else "dim")
    if is_stale(rank.age_s, rank.error):
        return Cell(f"○ {show.stale(rank.age_s)}{which}", "dim")
    tone = _WRITER_TONES.get(rank.writer, "dim")
    if tone == "good":
        which = ""
    return glyphed(tone, f"{show.clean(rank.writer, 16) or '?'} {show.seconds(rank.heartbeat_age_s)}{which}")


def stage_cell(records: Sequence[SideRecord]) -> Cell:
    """Where one side is: of several ranks, the one that has been longest in its stage, and how many are as far back."""
    if not records:
        return Cell("no record", "dim")
    flying = [record for record in records if not record.outcome]
    if flying:
        slowest = max(flying, key=lambda record: record.stage_age_s)
        part = f" {len(flying)}/{len(records)}" if len(records) > 1 else ""
        return Cell(f"▸ {show.clean(slowest.stage, 32)}{part}", "accent")
    ended = min(records, key=lambda record: 0 if record.outcome in FAILED_OUTCOMES else 1)
    tone: Tone = "bad" if ended.outcome in FAILED_OUTCOMES else _OUTCOME_TONES.get(ended.outcome, "plain")
    glyph = {"bad": "✖", "good": "✓"}.get(tone, "○")
    return Cell(f"{glyph} {show.clean(ended.outcome, 32).replace('_', ' ')}", tone)


def severity_cell(severity: Severity) -> Cell:
    """Glyph and word of a severity."""
    return glyphed(SEVERITIES[severity], severity.value)


def health_cell(snapshot: Snapshot | None, severities: Sequence[Severity]) -> Cell:
    """The cluster in one word."""
    if snapshot is None:
        return Cell("○ waiting", "dim")
    if not snapshot.instances:
        return Cell("○ empty", "dim")
    engines = [one for one in snapshot.instances if one.role != "router"]
    if engines and all(one.process in ("stopped", "zombie", "exited", "absent") for one in engines):
        return glyphed("bad", "down")
    if Severity.CRITICAL in severities:
        return glyphed("bad", "critical")
    if Severity.WARNING in severities:
        return glyphed("warn", "degraded")
    if any(one.process is None or one.healthy is None for one in engines):
        return Cell("? unknown", "dim")
    return glyphed("good", "healthy")
