"""What is compared of a run: numbers of its steps, and the gradient norms of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mp_agent.flight.postmortem.history import RunHistory
from mp_agent.records.merged import MergedStep

QUANTITIES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "grad_abs_max": "largest gradient",
    "learning_rate": "learning rate",
}
"""What is compared at equal steps, by the name that JSON has."""

MARKS = {
    "loss_nonfinite": "loss NaN or Inf",
    "gradients_nonfinite": "gradients NaN or Inf",
    "skipped": "step skipped",
}
"""What only one of the runs may have at a step."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step: quantities that were observed, and marks."""

    values: Mapping[str, float]
    marks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeries:
    """A run by the trainer's number of its steps; of a step that was trained twice, the later."""

    name: str
    source: str
    steps: Mapping[int, RunStep]
    layers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Gradient norms by layer at sampled steps; NaN where a layer has NaN or Inf."""
    facts: Mapping[str, str] = field(default_factory=dict)
    scraped_steps: float = 0.0
    """Steps from one scrape to the next, where only those that a scrape saw are there; else 0."""


def series_of_history(
    name: str, source: str, history: RunHistory, facts: Mapping[str, str]
) -> RunSeries:
    """Return the series of a run whose ranks have been merged."""
    numbers = {step.sequence: step.step for step in history.steps}
    layers = {}
    for table in history.tables:
        if table.sequence in numbers and table.complete:
            norms = table.column("sum_squares").clip(min=0.0) ** 0.5
            norms[table.nonfinite > 0] = float("nan")
            layers[numbers[table.sequence]] = dict(zip(table.names, norms.tolist(), strict=True))
    return RunSeries(
        name=name,
        source=source,
        steps={step.step: _step(step) for step in history.steps},
        layers=layers,
        facts=facts,
    )


def _step(step: MergedStep) -> RunStep:
    judged = step.gradients_judged
    observed = {
        "loss": step.get("loss"),
        "grad_norm": step.grad_norm if judged else None,
        "grad_abs_max": step.get("abs_max") if judged else None,
        "learning_rate": step.get("learning_rate"),
    }
    marks = {
        "loss_nonfinite": step.flag("loss_nonfinite"),
        "gradients_nonfinite": step.gradient_nonfinite_elements > 0,
        "skipped": step.skipped,
    }
    return RunStep(
        {name: value for name, value in observed.items() if value is not None},
        frozenset(name for name, holds in marks.items() if holds),
    )
