"""An analysis as JSON, for programs. docs/flight-record.md describes it."""

from typing import Any

from mp_agent.flight.postmortem.analysis import Analysis
from mp_agent.flight.postmortem.case import headroom_bits
from mp_agent.flight.postmortem.diagnosis import Diagnosis
from mp_agent.records.flight import RankLog
from mp_agent.records.merged import MergedStep
from mp_agent.report.document import picked, written

_NANOSECONDS = 1e9


def as_json(analysis: Analysis) -> str:
    """Return the analysis as JSON."""
    return written(as_dict(analysis))


def as_dict(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis as plain values."""
    evidence, identity = analysis.evidence, analysis.evidence.identity
    first, steps = analysis.first_bad, analysis.history.steps
    return {
        "format": "mp_agent postmortem",
        "version": 1,
        "source": str(evidence.source),
        "reasons": list(evidence.reasons),
        "run": {
            "name": identity.run,
            **picked(identity, "attempt", "world_size"),
            "end": analysis.end.name.lower(),
            "last_step": steps[-1].step if steps else None,
            "last_step_unix_seconds": analysis.ended_unix_seconds,
            "versions": dict(evidence.versions),
            "facts": dict(evidence.facts),
        },
        "first_bad": None if first is None else {**_place(first), "cause": first.cause.name},
        "findings": [_finding(finding) for finding in analysis.findings],
        "remedies": [
            picked(remedy, "condition", "remedies", "confirm", "why")
            for remedy in analysis.remedies
        ],
        "moves": [
            picked(move, "name", "long_before", "just_before", "at", "moved")
            for move in analysis.moves
        ],
        "steps": [_step(step) for step in steps],
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
            picked(
                condition, "name", "severity", "since_step", "ended_step", "value", "description"
            )
            for condition in evidence.conditions
        ],
        "not_measured": [name for name, _ in analysis.not_measured],
        "notes": list(evidence.notes),
    }


def _place(found: Diagnosis) -> dict[str, Any]:
    return picked(found, "step", "sequence", "rank", "layer", "phase")


def _finding(finding: Diagnosis) -> dict[str, Any]:
    return {
        "cause": finding.cause.name,
        "title": finding.cause.title,
        **picked(finding, "likelihood", "score", "follows"),
        "alerts": list(finding.alerts),
        **_place(finding),
        "for": [picked(argument, "text", "weight") for argument in finding.arguments_for],
        "against": [picked(argument, "text", "weight") for argument in finding.arguments_against],
    }


def _step(step: MergedStep) -> dict[str, Any]:
    return {
        **picked(step, "step", "sequence", "time_unix_seconds"),
        "loss": step.get("loss"),
        "loss_nonfinite_ranks": list(step.nonfinite_loss_ranks),
        "local_grad_nonfinite_ranks": list(step.nonfinite_gradient_ranks),
        "grad_norm": step.grad_norm,
        "grad_norm_counts": step.gradients_judged,
        "grad_abs_max": step.get("abs_max"),
        "grad_nonfinite_elements": step.gradient_nonfinite_elements,
        "loss_scale": step.loss_scale,
        "headroom_bits": headroom_bits(step),
        **picked(step, "skipped", "clip_coefficient"),
        "learning_rate": step.get("learning_rate"),
        "step_seconds": step.get("step_seconds"),
        "missing_ranks": list(step.missing_ranks),
    }


def _rank(log: RankLog) -> dict[str, Any]:
    identity, state = log.identity, log.state
    return {
        **picked(identity, "rank", "node_rank", "host"),
        "end": log.end.name.lower(),
        "phase": state.phase_name,
        "phase_unix_seconds": state.phase_unix_ns / _NANOSECONDS,
        **picked(state, "started_sequence", "committed_sequence", "probe_errors"),
        "records_dropped": state.records_dropped,
    }
