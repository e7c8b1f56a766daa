"""Divides statistics by a loss scale that was not known yet when they were computed."""

from collections.abc import Sequence
from math import isnan

import numpy as np

from mp_agent.probe.statistics.table import bounded_array
from mp_agent.records.columns import GRADIENT_COLUMNS
from mp_agent.records.steps import FloatArray


def unscaled(
    table_NC: FloatArray, inverse_scales: Sequence[float], rows_of_each: Sequence[slice]
) -> FloatArray:
    """Return the table with some ranges of rows unscaled, each by a scale of its own.

    A scale that is NaN leaves its rows as they are.
    """
    result_NC = np.array(table_NC)
    for inverse_scale, rows in zip(inverse_scales, rows_of_each, strict=True):
        if isnan(inverse_scale):
            continue
        for place, column in enumerate(GRADIENT_COLUMNS):
            for _ in range(column.unscaling.value):
                result_NC[rows, place] = bounded_array(result_NC[rows, place] * inverse_scale)
    return result_NC
