"""What a run remembers beside its main numbers: other optimizers, and how replicas compare."""

from collections.abc import Mapping

from mp_agent.records.merged import MergedStep
from mp_agent.records.views import DivergenceView, OptimizerView


def follow_optimizers(
    known: Mapping[str, OptimizerView], step: MergedStep
) -> dict[str, OptimizerView]:
    """Return the optimizers after a step; each keeps its last step whose norms count.

    Those that the ranks hold no more are left out.
    """
    views = {name: view for name, view in known.items() if name in step.optimizers_held}
    for name, own in step.optimizers.items():
        before = views[name].judged if name in views else None
        views[name] = OptimizerView(last=own, judged=own if own.judged else before)
    return views


def follow_replicas(
    known: Mapping[str, DivergenceView], step: MergedStep
) -> dict[str, DivergenceView]:
    """Return the last comparison of each kind after a step."""
    views = dict(known)
    for kind, found in step.replicas.items():
        views[kind] = DivergenceView(
            agree=found.agree, step=step.step, minority_ranks=found.minority_ranks
        )
    return views
