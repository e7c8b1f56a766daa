"""A report as JSON, for programs. docs/compare.md describes it."""

import json
from dataclasses import asdict
from enum import Enum
from math import isfinite
from typing import Any

from mp_agent.compare.report.model import PrecisionReport

FORMAT = "mp_agent precision comparison"
VERSION = 1
"""Rises when a key changes its meaning or goes; keys may be added without it."""


def as_json(report: PrecisionReport) -> str:
    """Return the report as JSON; a number that is not finite is null."""
    return json.dumps(as_dict(report), indent=2, ensure_ascii=True, allow_nan=False)


def as_dict(report: PrecisionReport) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "passed": list(report.passed),
        **plain(asdict(report)),
    }


def plain(value: Any) -> Any:
    """Return a value as JSON has it: enumerations by value, null for what is not finite."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
