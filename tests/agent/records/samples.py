"""Conditions and their events, given by what matters in them."""

from typing import Any

from mp_agent.records.conditions import ActiveCondition, StoredConditionEvent


def make_condition(**changes: Any) -> ActiveCondition:
    facts: dict[str, Any] = {
        "name": "MpAgentGradientExplosion",
        "severity": "critical",
        "run": "llama",
        "since_step": 7,
        "since_unix_seconds": 1.5,
        "value": 2000.0,
        "summary": "Gradients are exploding.",
        "description": "The norm was ünusual.",
        "remedy": "Clip.",
    }
    return ActiveCondition(**{**facts, **changes})


def make_event(state: str = "firing", **changes: Any) -> StoredConditionEvent:
    """Return what is reported of a condition, with these changes."""
    return StoredConditionEvent(
        state=state, condition=make_condition(**changes), step=8, time_unix_seconds=2.0
    )
