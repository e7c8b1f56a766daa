"""Run scope: whether replicas of the same tensors agree, bit for bit."""

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import RunView

_KINDS = ("gradients", "weights")


def _diverged(run: RunView) -> Reading:
    return {(kind,): float(not found.agree) for kind, found in run.replicas.items()}


def _diverging_steps(change: StepTransition) -> Reading:
    return {(kind,): float(not found.agree) for kind, found in change.step.replicas.items()}


def _divergent_ranks(run: RunView) -> Reading:
    return {
        (kind, str(found.step), ",".join(map(str, found.minority_ranks))): 1.0
        for kind, found in run.replicas.items()
        if not found.agree
    }


REPLICA_METRICS = (
    Metric(
        name="mp_agent.replica.divergence",
        unit="",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        labels=("kind",),
        help="1 if ranks that must have the same gradients, or weights, differed when they were "
        "last compared, else 0; absent if there was nothing to compare.",
        read=_diverged,
    ),
    Metric(
        name="mp_agent.replica.divergence.steps",
        unit="{step}",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        labels=("kind",),
        label_values=lambda thresholds: tuple((kind,) for kind in _KINDS),
        help="Steps on which such ranks were compared and differed.",
        count=_diverging_steps,
    ),
    Metric(
        name="mp_agent.divergent_ranks.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("kind", "step", "ranks"),
        help="The step on which ranks last differed, and the ranks that differ from the "
        "majority; no ranks if there is no majority.",
        read=_divergent_ranks,
    ),
)
