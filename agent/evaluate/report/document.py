"""An evaluation as JSON, for programs. docs/recommend.md describes it."""

import json
from dataclasses import asdict

from mp_agent.compare.report.document import plain
from mp_agent.evaluate.report.model import PlanEvaluation

FORMAT = "mp_agent precision evaluation"
VERSION = 1
"""Rises when a key changes its meaning or goes; keys may be added without it."""


def as_json(evaluation: PlanEvaluation) -> str:
    """Return the evaluation as JSON; a number that is not finite is null."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        **plain(asdict(evaluation)),
        "plan": evaluation.plan.as_dict(),
        "memory_saved_ratio": evaluation.memory_saved_ratio,
        "skipped_steps": evaluation.planned.skipped_steps,
        "missed": list(evaluation.missed),
    }
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False)
