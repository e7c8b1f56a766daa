"""Run and rank scope: which part of a step takes its time."""

from collections.abc import Mapping

from mp_agent.catalog.metric import Kind, Metric, Reading, Scope
from mp_agent.records.merged import StepTransition

STEP_PARTS = ("data", "forward", "backward", "optimizer", "other")
"""Values of the label `part`; the columns are `<part>_seconds`."""

_MEANING = (
    "data (loading, and what else the loop does from the end of the last step or pass to the "
    "model's forward), forward (including the loss), backward, optimizer (unscaling and clipping "
    "included), and other, which is the rest: evaluation, checkpoints, the probe. By the host's "
    "clock: on a GPU these are the times at which the host launches work, and waits for it. "
    "Without data and forward where the model's forward is not seen: other contains them."
)


def _of_run(change: StepTransition) -> Reading:
    return {(part,): change.step.get(f"{part}_seconds") for part in STEP_PARTS}


def _of_rank(values: Mapping[str, float]) -> Reading:
    return {(part,): values.get(f"{part}_seconds") for part in STEP_PARTS}


STEP_PART_METRICS = (
    Metric(
        name="mp_agent.step.part",
        unit="s",
        kind=Kind.COUNTER,
        scope=Scope.RUN,
        labels=("part",),
        help="Time of the parts of steps, each on the rank that takes longest for it: the parts "
        f"may add up to more than the step. They are {_MEANING}",
        count=_of_run,
        appears_when_counted=True,
    ),
)

RANK_STEP_PART_METRICS = (
    Metric(
        name="mp_agent.rank.step.part",
        unit="s",
        kind=Kind.COUNTER,
        scope=Scope.RANK,
        labels=("part",),
        help="Time of the parts of the rank's steps, which add up to its steps: "
        f"{_MEANING} A rank that waits for another one in a collective spends that time in the "
        "part that contains the collective, as a rule backward.",
        count=_of_rank,
        appears_when_counted=True,
    ),
)
