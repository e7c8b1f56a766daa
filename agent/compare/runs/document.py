"""The comparison of two runs as JSON. docs/compare.md describes it."""

import json
from dataclasses import asdict

from mp_agent.compare.report.document import plain
from mp_agent.compare.runs.divergence import RunComparison
from mp_agent.compare.runs.text import verdict

FORMAT = "mp_agent run comparison"
VERSION = 1
"""Rises when a key changes its meaning or goes; keys may be added without it."""


def runs_as_json(comparison: RunComparison) -> str:
    """Return the comparison as JSON; a number that is not finite is null."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "verdict": verdict(comparison),
        "runs": [
            {"name": run.name, "source": run.source, "steps": len(run.steps)}
            for run in (comparison.first, comparison.second)
        ],
        "departures": [asdict(one) for one in comparison.departures],
        "layers": [asdict(one) for one in comparison.layers],
        "limits": dict(comparison.limits),
        "step": list(comparison.steps),
        "differences": {name: list(values) for name, values in comparison.differences.items()},
        "notes": list(comparison.notes),
    }
    return json.dumps(plain(document), indent=2, ensure_ascii=True, allow_nan=False)
