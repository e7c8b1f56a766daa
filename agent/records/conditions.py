"""Conditions that hold for a run, and the events with which they begin and end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveCondition:
    """A condition that holds now, at one severity. Strings are empty where nothing is known."""

    name: str
    """Name of the alert, such as `MpAgentGradientExplosion`."""
    severity: str
    """critical, warning or info."""
    run: str
    since_step: int
    since_unix_seconds: float
    value: float
    """Value of the condition's first signal when it began."""
    summary: str
    description: str
    remedy: str
    rank: str = ""
    layer: str = ""
    phase: str = ""
    ended_step: int = 0
    """Last step of the run when it had ended; 0 while it holds."""
    postmortem: str = ""
    """What the node agent's post-mortem found to be the cause, or why there is none; empty until
    then, and of conditions that are not critical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConditionEvent:
    """The event as it is stored and sent between node agents; callbacks get a `ConditionEvent`."""

    state: str
    """firing, explained (its post-mortem is there) or resolved."""
    condition: ActiveCondition
    step: int
    time_unix_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCondition:
    """An active condition, with the labels by which its detector identifies it."""

    active: ActiveCondition
    labels: dict[str, str]
    notified: bool
    """Whether its event was sent; a milder severity of an active condition is held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One condition of a run that was played again, for one value of its labels."""

    name: str
    severity: str
    """The worst severity."""
    labels: Mapping[str, str]
    first_step: int
    """Step on which it began to hold."""
    fired_step: int
    """Step after which it was first reported, at any severity."""
    last_step: int
    """Step on which it last held; the run's last one where it still did."""
    fired_point: int
    """Index of the point of the log, or the step of the record, of `fired_step`."""
    duration_seconds: float
    """Total seconds that it held, by the times of the log."""
    times: int
    ongoing: bool
    """Whether it held at the end of the log."""
    value: float
    """Value at the step at which it was first reported at its worst severity."""
    value_step: int
    summary: str
    description: str
    """Description at that step."""
    spans: Sequence[tuple[int, int]] = ()
    """First and last step of each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionMemory:
    """State of a run's conditions that a successor of the node agent needs."""

    fired: list[tuple[str, str, int]] = field(default_factory=list)
    """(condition, severity, number of times that it began)."""
    known: list[KnownCondition] = field(default_factory=list)
    past: list[ActiveCondition] = field(default_factory=list)
    """The last of those that ended, one for each condition and severity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionEvent:
    """Passed to callbacks of `mp_agent.on_condition`: a condition began, or ended.

    Strings are empty where nothing is known.
    """

    state: str
    """firing when the condition began to hold, resolved when it ceased to; in between `explained`,
    once the post-mortem of a critical condition is there."""
    name: str
    """Name of the alert, such as `MpAgentGradientExplosion`."""
    severity: str
    """critical, warning or info."""
    run: str
    step: int
    """Last step of the run when the condition was judged."""
    since_step: int
    """Step since which the condition holds."""
    rank: str
    layer: str
    phase: str
    value: float
    """Value of the condition's first signal when it began."""
    summary: str
    """What goes wrong; of a critical condition also since which step, whether the weights are
    damaged, and what to do now."""
    description: str
    """What happened to this run."""
    remedy: str
    postmortem: str = ""
    """First line of the node agent's post-mortem of a critical condition: the cause that it found,
    or why there is none. Empty until the event `explained`."""


def condition_event(event: StoredConditionEvent) -> ConditionEvent:
    """Return the event that callbacks get for a stored one."""
    active = event.condition
    return ConditionEvent(
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
        postmortem=active.postmortem,
    )
