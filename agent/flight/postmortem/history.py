"""The steps and layers of a run, merged over its ranks by the code of the live agent."""

from dataclasses import dataclass

import numpy as np

from mp_agent.records.merged import MergedStep
from mp_agent.records.steps import FloatArray
from mp_agent.records.views import FirstNonfinite


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSample:
    """All layers at one sampled step, in module order: values [L, C], finite."""

    sequence: int
    names: tuple[str, ...]
    columns: tuple[str, ...]
    values: FloatArray
    complete: bool
    """Whether every shard of every tensor was present."""

    def column(self, name: str) -> FloatArray:
        """Return one column [L]; zeros when the probe did not measure it."""
        if name not in self.columns:
            return np.zeros(len(self.names))
        column: FloatArray = self.values[:, self.columns.index(name)]
        return column

    @property
    def nonfinite(self) -> FloatArray:
        """NaN and Inf elements per layer [L]."""
        elements: FloatArray = self.column("nan_elements") + self.column("inf_elements")
        return elements


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunHistory:
    """Steps and tables ascend; tables may precede the first step kept."""

    steps: tuple[MergedStep, ...]
    tables: tuple[LayerSample, ...] = ()
    first_nonfinite: FirstNonfinite | None = None
    """Where the latest incident began, as the live agent reports it."""
    first_nonfinite_sequence: int = 0
