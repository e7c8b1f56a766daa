"""A recommendation as JSON, for programs. docs/recommend.md describes it."""

import json
from dataclasses import asdict
from typing import Any

from mp_agent.advice.report.model import Recommendation
from mp_agent.compare.report.document import plain

FORMAT = "mp_agent recommendation"
VERSION = 1
"""Rises when a key changes its meaning or goes; keys may be added without it."""


def as_json(recommendation: Recommendation) -> str:
    """Return the recommendation as JSON; a number that is not finite is null."""
    return json.dumps(as_dict(recommendation), indent=2, ensure_ascii=True, allow_nan=False)


def as_dict(recommendation: Recommendation) -> dict[str, Any]:
    """Return the recommendation as plain values, with the code."""
    document = plain(asdict(recommendation))
    for name in ("memory_fp32", "memory_planned"):
        document[name]["total_bytes"] = getattr(recommendation, name).total_bytes
    return {
        "format": FORMAT,
        "version": VERSION,
        **document,
        "plan": recommendation.plan.as_dict(),
        "code": recommendation.code(),
    }
