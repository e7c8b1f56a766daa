"""Run scope: whether replicas of the same tensors agree, bit for bit."""

from collections.abc import Sequence

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.merged import StepTransition
from mp_agent.records.views import RunView

_KINDS = ("gradients", "weights", "state")
_NAMED_AT_MOST = 8


def _diverged(run: RunView) -> Reading:
    return {(kind,): float(not found.agree) for kind, found in run.replicas.items()}


def _diverging_steps(change: StepTransition) -> Reading:
    return {(kind,): float(not found.agree) for kind, found in change.step.replicas.items()}


def _divergent_ranks(run: RunView) -> Reading:
    return {
        (
            kind,
            str(found.step),
            ",".join(map(str, found.minority_ranks)),
            _names(found.tensors),
        ): 1.0
        for kind, found in run.replicas.items()
        if not found.agree
    }


def _names(tensors: Sequence[str]) -> str:
    """Return the names of some tensors, and how many more there are."""
    more = len(tensors) - _NAMED_AT_MOST
    return ",".join(tensors[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _unexplained(run: RunView) -> Reading:
    found = run.replicas.get("state")
    return {} if found is None else {(): float(len(found.unjudged))}


def _local_state(run: RunView) -> Reading:
    found = run.replicas.get("state")
    if found is None:
        return {}
    named = {"by design": found.local, "unknown": found.unjudged}
    return {(why, _names(tensors)): 1.0 for why, tensors in named.items() if tensors}


REPLICA_METRICS = (
    Metric(
        name="mp_agent.replica.divergence",
        unit="",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        labels=("kind",),
        help="1 if ranks that must have the same gradients, or weights, differed when they were "
        "last compared, else 0; absent if there was nothing to compare. Weights are compared "
        "before the update; state is what else a checkpoint holds: frozen parameters, buffers.",
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
        labels=("kind", "step", "ranks", "tensors"),
        help="The step on which ranks last differed, the ranks that differ from the majority (none "
        "if there is no majority), and the tensors that differ, as far as they are known.",
        read=_divergent_ranks,
    ),
    Metric(
        name="mp_agent.replica.unreduced.steps",
        unit="{step}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        thresholds=("unreduced_steps",),
        help="Consecutive steps that ranks which hold copies of one model have made with "
        "gradients that no collective reduced, once no periodic averaging of the weights explains "
        "it; else 0.",
        read=lambda run: float(run.unreduced_steps),
    ),
    Metric(
        name="mp_agent.replica.unexplained.tensors",
        unit="{tensor}",
        kind=Kind.GAUGE,
        scope=Scope.RUN,
        help="Frozen parameters and buffers of which a checkpoint would hold one rank's alone: "
        "they differ between ranks that train the same weights, are not local by design, and were "
        "never seen equal; absent if there was nothing to compare.",
        read=_unexplained,
    ),
    Metric(
        name="mp_agent.local_state.info",
        unit="",
        kind=Kind.INFO,
        scope=Scope.RUN,
        labels=("why", "tensors"),
        help="Frozen parameters and buffers that differ between ranks which train the same "
        "weights: by design, as statistics of BatchNorm do, or for an unknown reason.",
        read=_local_state,
    ),
)
