"""The values of a run that were observed last, and those of the last step that counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mp_agent.node.accounting.tracker import AccountContext, Tracker
from mp_agent.records.merged import MergedStep
from mp_agent.records.views import DivergenceView, OptimizerView


@dataclass(slots=True, kw_only=True)
class LatestStep(Tracker):
    """The last step, the last one whose norms count, and the last finite loss and learning rate."""

    every_step: ClassVar[bool] = True

    last: MergedStep | None = None
    judged: MergedStep | None = None
    loss: float | None = None
    learning_rate: float | None = None

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step."""
        self.last = step
        self.loss = _newer(step.get("loss"), self.loss)
        self.learning_rate = _newer(step.get("learning_rate"), self.learning_rate)
        if step.gradients_judged:
            self.judged = step

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        """Return the values as they are."""
        return {
            "last": self.last,
            "judged": self.judged,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "coverage": self.last.coverage if self.last else 1.0,
            "missing_ranks": self.last.missing_ranks if self.last else (),
        }


@dataclass(slots=True, kw_only=True)
class OptimizerTracker(Tracker):
    """The optimizers, where there are several; each keeps its last step whose norms count."""

    views: dict[str, OptimizerView] = field(default_factory=dict)

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step; optimizers that no rank holds any more are dropped."""
        views = {name: view for name, view in self.views.items() if name in step.optimizers_held}
        for name, own in step.optimizers.items():
            before = views[name].judged if name in views else None
            views[name] = OptimizerView(last=own, judged=own if own.judged else before)
        self.views = views

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        """Return them by name."""
        return {"optimizers": self.views}


@dataclass(slots=True, kw_only=True)
class ReplicaTracker(Tracker):
    """The last comparison of replicas, of each kind."""

    views: dict[str, DivergenceView] = field(default_factory=dict)

    def observe(self, step: MergedStep, context: AccountContext) -> None:
        """Add a closed step."""
        found = {
            kind: DivergenceView(agree=own.agree, step=step.step, minority_ranks=own.minority_ranks)
            for kind, own in step.replicas.items()
        }
        self.views = {**self.views, **found}

    def view(self, context: AccountContext, time_unix_seconds: float) -> Mapping[str, Any]:
        """Return them by kind."""
        return {"replicas": self.views}


def _newer(value: float | None, kept: float | None) -> float | None:
    return kept if value is None else value
