"""Completes a step of which rows of other nodes are missing by what the ranks have reduced."""

from dataclasses import replace

from mp_agent.records.columns import GRADIENTS
from mp_agent.records.merged import MergedStep
from mp_agent.records.reduction.global_statistics import GlobalStatistics


def completed(step: MergedStep, found: GlobalStatistics) -> MergedStep:
    """Return the step with the columns and gradients that all ranks have reduced.

    Only where ranks are missing from it, and none from the reduction: nothing is counted twice.
    What is not reduced stays that of the ranks that are there: other families, comparisons of
    replicas, the parts of several optimizers.
    """
    everyone = found.present_ranks == found.world_size == step.world_size
    if not everyone or not step.missing_ranks:
        return step
    families = {name: own for name, own in step.families.items() if name != GRADIENTS.name}
    if found.gradients:
        families[GRADIENTS.name] = found.gradients
    complete = step.complete - {GRADIENTS.name}
    return replace(
        step,
        step=found.step,
        columns=found.columns,
        families=families,
        complete=complete | {GRADIENTS.name} if found.complete else complete,
        present_ranks=frozenset(range(step.world_size)),
    )
