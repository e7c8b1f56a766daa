"""What the detectors say: conditions in force, and their coming and going."""

from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCondition:
    """A condition in force, with what its detector knows it by."""

    active: ActiveCondition
    labels: dict[str, str]
    told: bool
    """Whether its event went out; a milder severity of what is in force is kept back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionMemory:
    """What of a run's conditions must survive the node agent."""

    fired: list[tuple[str, str, int]] = field(default_factory=list)
    """Condition, severity, and how often it began."""
    known: list[KnownCondition] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What `mp_agent.on_condition` callbacks are given. Empty strings for what nothing names."""

    state: str
    """firing when the condition began to hold, resolved when it ceased to."""
    name: str
    """Of the alert, such as `MpAgentGradientExplosion`."""
    severity: str
    """critical, warning or info."""
    run: str
    step: int
    """The run's last step when this was found."""
    since_step: int
    """Step since which the condition holds."""
    rank: str
    layer: str
    phase: str
    value: float
    """What the condition was judged by, when it began."""
    summary: str
    """What goes wrong, in one fixed sentence."""
    description: str
    """What happened to this run."""
    remedy: str


def condition_of(event: ConditionEvent) -> Condition:
    """Return an event as callbacks are given it."""
    active = event.condition
    return Condition(
        state=event.state,
        name=active.name,
        severity=active.severity,
        run=active.run,
        step=event.step,
        since_step=active.since_step,
        rank=active.rank,
        layer=active.layer,
        phase=active.phase,
        value=active.value,
        summary=active.summary,
        description=active.description,
        remedy=active.remedy,
    )
