"""A backtest as JSON, for programs. docs/backtest.md describes it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from mp_agent.backtest.compare import Difference
from mp_agent.backtest.results import Failure, RunResult

FORMAT = "mp_agent backtest"
VERSION = 1
"""Rises when a key changes its meaning or goes; keys may be added without it."""


def as_json(
    runs: Sequence[RunResult],
    failures: Sequence[Failure],
    *,
    settings: Sequence[str] = (),
    compared: Sequence[str] = (),
    found: Sequence[Difference] | None = None,
) -> str:
    """Return the backtest as JSON; a number that is not finite is null.

    settings, compared: what was set. found: the differences, where two settings were compared.
    """
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "set": list(settings),
        "runs": [_run(run) for run in runs],
        "failures": [asdict(failure) for failure in failures],
    }
    if found is not None:
        document["compare"] = list(compared)
        document["differences"] = [asdict(difference) for difference in found]
    return json.dumps(_finite(document), indent=2, ensure_ascii=True, allow_nan=False)


def _run(run: RunResult) -> dict[str, Any]:
    content = asdict(run)
    content.pop("curves")
    return {**content, "worst": run.worst}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
