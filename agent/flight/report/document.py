"""An analysis as JSON, for programs. docs/flight-record.md describes it."""

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from mp_agent.flight.postmortem.analysis import Analysis
from mp_agent.flight.postmortem.case import headroom_bits
from mp_agent.flight.postmortem.diagnosis import NOT_MEASURED, Argument, Diagnosis
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep

FORMAT = "mp_agent postmortem"
VERSION = 1
"""Rises when a key changes its meaning or goes; keys may be added without it."""

_NANOSECONDS = 1e9


def as_json(analysis: Analysis) -> str:
    """Return the analysis as JSON; a number that is not finite is null."""
    return json.dumps(_finite(as_dict(analysis)), indent=2, ensure_ascii=True, allow_nan=False)


def as_dict(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis as plain values."""
    evidence, identity = analysis.evidence, analysis.evidence.identity
    first = analysis.first_bad
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": str(evidence.source),
        "reasons": list(evidence.reasons),
        "run": {
            "name": identity.run,
            "attempt": identity.attempt,
            "world_size": identity.world_size,
            "end": analysis.end.name.lower(),
            "last_step": analysis.history.steps[-1].step if analysis.history.steps else None,
            "last_step_unix_seconds": analysis.ended_unix_seconds,
            "versions": dict(evidence.versions),
            "facts": dict(evidence.facts),
        },
        "first_bad": None
        if first is None
        else {
            "step": first.step,
            "sequence": first.sequence,
            "rank": first.rank,
            "layer": first.layer,
            "phase": first.phase,
            "cause": first.cause.name,
        },
        "findings": [_finding(finding) for finding in analysis.findings],
        "remedies": [
            {
                "condition": remedy.condition,
                "remedies": list(remedy.remedies),
                "confirm": remedy.confirm,
                "why": remedy.why,
            }
            for remedy in analysis.remedies
        ],
        "moves": [
            {
                "name": move.name,
                "long_before": move.long_before,
                "just_before": move.just_before,
                "at": move.at,
                "moved": move.moved,
            }
            for move in analysis.moves
        ],
        "steps": [_step(step) for step in analysis.history.steps],
        "layers": {
            "step": analysis.layers_step,
            "worst": [
                {
                    "name": layer.name,
                    "grad_norm": layer.norm,
                    "grad_abs_max": layer.abs_max,
                    "nonfinite_elements": layer.nonfinite_elements,
                }
                for layer in analysis.layers
            ],
        },
        "ranks": [_rank(log) for log in evidence.ranks],
        "conditions": [
            {
                "name": condition.name,
                "severity": condition.severity,
                "since_step": condition.since_step,
                "value": condition.value,
                "description": condition.description,
            }
            for condition in evidence.conditions
        ],
        "not_measured": [name for name, _ in NOT_MEASURED],
        "notes": list(evidence.notes),
    }


def _finding(finding: Diagnosis) -> dict[str, Any]:
    return {
        "cause": finding.cause.name,
        "title": finding.cause.title,
        "likelihood": finding.likelihood,
        "score": finding.score,
        "follows": finding.follows,
        "step": finding.step,
        "sequence": finding.sequence,
        "rank": finding.rank,
        "layer": finding.layer,
        "phase": finding.phase,
        "for": [_argument(argument) for argument in finding.arguments_for],
        "against": [_argument(argument) for argument in finding.arguments_against],
    }


def _argument(argument: Argument) -> dict[str, Any]:
    return {"text": argument.text, "weight": argument.weight}


def _step(step: MergedStep) -> dict[str, Any]:
    return {
        "step": step.step,
        "sequence": step.sequence,
        "time_unix_seconds": step.time_unix_seconds,
        "loss": step.get("loss"),
        "loss_nonfinite_ranks": list(step.nonfinite_loss_ranks),
        "local_grad_nonfinite_ranks": list(step.nonfinite_gradient_ranks),
        "grad_norm": step.grad_norm,
        "grad_norm_counts": step.gradients_judged,
        "grad_abs_max": step.get("abs_max"),
        "grad_nonfinite_elements": step.gradient_nonfinite_elements,
        "loss_scale": step.loss_scale,
        "headroom_bits": headroom_bits(step),
        "skipped": step.skipped,
        "clip_coefficient": step.clip_coefficient,
        "learning_rate": step.get("learning_rate"),
        "step_seconds": step.get("step_seconds"),
        "missing_ranks": list(step.missing_ranks),
    }


def _rank(log: RankLog) -> dict[str, Any]:
    state = log.state
    return {
        "rank": log.identity.rank,
        "node_rank": log.identity.node_rank,
        "host": log.identity.host,
        "end": log.end.name.lower(),
        "phase": state.phase_name,
        "phase_unix_seconds": state.phase_unix_ns / _NANOSECONDS,
        "started_sequence": state.started_sequence,
        "committed_sequence": state.committed_sequence,
        "probe_errors": state.probe_errors,
        "records_dropped": state.records_dropped,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
