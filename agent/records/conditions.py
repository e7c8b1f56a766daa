"""What the detectors say: conditions in force, and their coming and going."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveCondition:
    """A condition that a run has now, at one severity. Empty strings for what nothing names."""

    name: str
    """Of the alert, such as `MpAgentGradientExplosion`."""
    severity: str
    """critical, warning or info."""
    run: str
    since_step: int
    since_unix_seconds: float
    value: float
    """Of the condition's first signal, when it began."""
    summary: str
    description: str
    remedy: str
    rank: str = ""
    layer: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionEvent:
    """A condition began to hold (`firing`), or ceased to (`resolved`)."""

    state: str
    """firing or resolved."""
    condition: ActiveCondition
    step: int
    time_unix_seconds: float
