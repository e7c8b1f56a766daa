"""How the single numbers of a step become the step columns of its record."""

from collections.abc import Mapping
from math import isfinite, nan

import numpy as np

from mp_agent.records.columns import STEP_COLUMN_NAMES
from mp_agent.records.steps import FloatArray

_COLUMN = {name: index for index, name in enumerate(STEP_COLUMN_NAMES)}


def step_values(scalars: Mapping[str, float]) -> FloatArray:
    """Return [S], in the order of `STEP_COLUMNS`, of what was observed, by column name.

    What was not observed, and what is not finite, becomes NaN; a non-finite loss sets its flag.
    """
    values = [nan] * len(STEP_COLUMN_NAMES)
    for name, value in scalars.items():
        if isfinite(value):
            values[_COLUMN[name]] = value
    if "loss" in scalars:
        values[_COLUMN["loss_nonfinite"]] = float(not isfinite(scalars["loss"]))
    if "skipped" in scalars:
        values[_COLUMN["skipped"]] = float(scalars["skipped"] > 0)
    return np.array(values)
