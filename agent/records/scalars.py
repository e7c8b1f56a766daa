"""How the single numbers of a step become the step columns of its record."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan

import numpy as np

from mp_agent.records.columns import STEP_COLUMN_NAMES
from mp_agent.records.steps import FloatArray


def step_values(
    scalars: Mapping[str, float], columns: Sequence[str] = STEP_COLUMN_NAMES
) -> FloatArray:
    """Return [S], in the order of `columns`, of what was observed, by column name.

    What was not observed, and what is not finite, becomes NaN; a non-finite loss sets its flag.
    """
    values = {name: value for name, value in scalars.items() if isfinite(value)}
    if "loss" in scalars:
        values["loss_nonfinite"] = float(not isfinite(scalars["loss"]))
    if "skipped" in scalars:
        values["skipped"] = float(scalars["skipped"] > 0)
    return np.array([values.get(name, nan) for name in columns])
