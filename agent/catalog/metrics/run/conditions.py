"""Run scope: the conditions that the node agent's own detectors find."""

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.views import RunView


def _active(run: RunView) -> Reading:
    found = {(condition.name, condition.severity) for condition in run.conditions}
    return {pair: float(pair in found) for pair in run.conditions_fired}


def _since_step(run: RunView) -> Reading:
    steps: dict[tuple[str, ...], float | None] = {}
    for condition in sorted(run.conditions, key=lambda found: found.since_step):
        steps.setdefault((condition.name, condition.severity), float(condition.since_step))
    return steps


CONDITION_METRICS = (
    Metric(
        name="mp_agent.condition.active",
        unit="",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        labels=("condition", "severity"),
        help="1 while the node agent detects the condition in the run, else 0.",
        read=_active,
    ),
    Metric(
        name="mp_agent.condition.since_step",
        unit="{step}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        labels=("condition", "severity"),
        help="Step at which the condition started; absent while it is not active.",
        read=_since_step,
    ),
    Metric(
        name="mp_agent.condition.fired",
        unit="{condition}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        labels=("condition", "severity"),
        help="Number of times that the condition started.",
        read=lambda run: {pair: float(count) for pair, count in run.conditions_fired.items()},
    ),
)
