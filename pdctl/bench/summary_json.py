"""A summary and a gate's verdict for programs: plain values, stable keys, seconds, None for what is missing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pdctl.bench.gate import GateOutcome
from pdctl.bench.results import AnswerCheck, Cell, StageTimes
from pdctl.bench.statistics import Ratio
from pdctl.bench.summary import FIGURES, CellSummary, Comparison, ModeSummary, Summary


def summary_to_json(summary: Summary) -> dict[str, Any]:
    """The whole summary. ``valid`` and ``complete`` stand first: figures mean nothing without them."""
    return {
        "valid": not summary.invalid_because,
        "invalid_because": summary.invalid_because,
        "complete": not summary.incomplete_because,
        "incomplete_because": summary.incomplete_because,
        "modes": list(summary.modes),
        "cells": [_cell_summary(one) for one in summary.cells],
    }


def gate_to_json(outcome: GateOutcome) -> dict[str, Any]:
    """What the gate says."""
    return {
        "passed": outcome.passed,
        "problems": list(outcome.problems),
        "notes": list(outcome.notes),
        "figures": [
            {
                "cell": _cell(line.cell),
                "mode": line.mode,
                "figure": line.figure,
                "statistic": line.statistic,
                "ratio": _ratio(line.ratio),
                "passed": line.passed,
                "words": line.words,
            }
            for line in outcome.lines
        ],
    }


def _cell_summary(one: CellSummary) -> dict[str, Any]:
    return {
        "cell": _cell(one.cell),
        "modes": [_mode(mode) for mode in one.modes],
        "comparisons": [_comparison(comparison) for comparison in one.comparisons],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "name": cell.name,
        "prompt_tokens": cell.prompt_tokens,
        "output_tokens": cell.output_tokens,
        "concurrency": cell.concurrency,
        "rate": cell.rate,
        "prefix_hit": cell.prefix_hit,
    }


def _mode(mode: ModeSummary) -> dict[str, Any]:
    figures = {figure: mode.figures.get(figure) for figure in FIGURES}
    return {
        "mode": mode.mode,
        "label": mode.label,
        "rounds": mode.rounds,
        "requests": mode.requests,
        "failed": mode.failed,
        "errors": dict(mode.errors),
        "figures_s": {figure: None if made is None else asdict(made) for figure, made in figures.items()},
        "requests_per_s": mode.requests_per_s,
        "output_tokens_per_s": mode.output_tokens_per_s,
        "stages": None if mode.stages is None else _stages(mode.stages),
        "transfers": {
            "completed": mode.transfers.completed,
            "failed": mode.transfers.failed,
            "expired": mode.transfers.expired,
            "bytes": mode.transfers.bytes,
            "seconds": mode.transfers.seconds,
            "recomputed_requests": mode.transfers.recomputed_requests,
            "recomputed_tokens": mode.transfers.recomputed_tokens,
        },
        "answers": None if mode.answers is None else _answers(mode.answers),
        "complete": mode.complete,
        "trouble": list(mode.trouble),
    }


def _stages(stages: StageTimes) -> dict[str, Any]:
    return {
        "seconds": dict(stages.seconds),
        "beside": dict(stages.beside),
        "requests": stages.requests,
        "notes": list(stages.notes),
    }


def _answers(answers: AnswerCheck) -> dict[str, Any]:
    return {
        "asked": answers.wanted,
        "compared": answers.compared,
        "equal": answers.equal,
        "unstable": answers.unstable,
        "different": [
            {"request": one.request, "at": one.at, "got": one.got, "expected": one.expected}
            for one in answers.different
        ],
        "error": answers.error,
    }


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "mode": one.mode,
        "against": one.against,
        "figure": one.figure,
        "statistic": one.statistic,
        "ratio": _ratio(one.ratio),
        "samples": one.samples,
        "thin": one.thin,
        "better": one.better,
        "verdict": one.verdict,
    }


def _ratio(ratio: Ratio | None) -> dict[str, float] | None:
    return None if ratio is None else {"value": ratio.value, "low": ratio.low, "high": ratio.high}
