"""One step of the run, merged over its ranks by the ranks themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalStatistics:
    """What every rank knows of a step of the run: the numbers of the node agents' merge.

    columns: of the step as a whole (`loss`, `loss_scale`, `skipped`, …). gradients: `sum_squares`,
    `abs_max`, `abs_min`, `elements`, `zero_elements`, `nan_elements`, `inf_elements`. What no rank
    observed is absent; all values are finite.
    """

    sequence: int
    """Steps since the probe attached, from 1."""
    step: int
    """The trainer's own step where a rank knows it, else `sequence`."""
    world_size: int
    present_ranks: int
    """Ranks that had measured the step when it was reduced."""
    columns: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    complete: bool = False
    """Whether every shard of every tensor is in `gradients`."""

    @property
    def grad_norm(self) -> float | None:
        """L2 norm over the finite elements of all gradients; None when none were measured."""
        squares = self.gradients.get("sum_squares")
        return None if squares is None else sqrt(squares)

    @property
    def loss(self) -> float | None:
        """Mean over the ranks; None when no rank's was finite."""
        return self.columns.get("loss")

    @property
    def nonfinite_elements(self) -> float:
        """NaN and Inf gradient elements together."""
        # Brings NumPy, which `import mp_agent` does without.
        from mp_agent.records.columns import GRADIENTS

        return GRADIENTS.nonfinite_elements(self.gradients)
