"""The layers of the run at one sampled step: what the merge of all nodes' tables comes to."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mp_agent.records.steps import FloatArray
from mp_agent.records.views import LayerView


@dataclass(frozen=True, slots=True, eq=False)
class MergedLayers:
    """The layers of the run at one sampled step, in module order.

    values: [L, C] finite. sound: [L] whether all of the layer's numbers could be represented.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    values: FloatArray
    sound: npt.NDArray[np.bool_]
    complete: bool
    """Whether every shard of every tensor was present."""
    optimizers: tuple[str, ...] = ()
    """Which optimizer steps each layer; none: the first one all of them."""
    retired: frozenset[str] = frozenset()
    """Names that stand for no layer any more: several layers turned out to be called so."""

    def judged_of(self, judged: Collection[str]) -> "MergedLayers":
        """Return the table with only the norms that count whose optimizer's step is `judged`."""
        if not self.optimizers:
            return self
        counts = np.array([optimizer in judged for optimizer in self.optimizers], dtype=np.bool_)
        return replace(self, sound=self.sound & counts)

    def views(self, *, step_judged: bool) -> tuple[LayerView, ...]:
        """Return one view per layer; norms count only where those of the step do."""
        judged = (self.sound & (step_judged and self.complete)).tolist()
        return tuple(
            LayerView(name=name, values=dict(zip(self.columns, row, strict=True)), judged=counts)
            for name, row, counts in zip(self.names, self.values.tolist(), judged, strict=True)
        )

    def nonfinite_nearest_output(self) -> str:
        """Return the last layer, in module order, with a NaN or Inf element; "" if there is none.

        Backward runs from the output, so that is where a value born in backward began.
        """
        indices = [self.columns.index(name) for name in ("nan_elements", "inf_elements")]
        found = np.flatnonzero(self.values[:, indices].sum(axis=1))
        return self.names[found[-1]] if found.size else ""
