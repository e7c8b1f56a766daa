"""Metrics of watched tensors."""

from collections.abc import Callable, Mapping
from math import ceil, isfinite, sqrt

from mp_agent.catalog.metric import Metric, Reading, counter, gauge, info
from mp_agent.records.columns import TENSOR_EXPONENTS, exponent_column
from mp_agent.records.tensor_collections import index_of, ratio_of
from mp_agent.records.views import RunView

Row = Mapping[str, float]


def mean(row: Row) -> float | None:
    """Return the mean of the finite elements."""
    finite = row.get("elements", 0.0) - row.get("nonfinite_elements", 0.0)
    return row["sum"] / finite if finite and "sum" in row else None


def norm(row: Row) -> float | None:
    """Return the L2 norm of the finite elements."""
    return sqrt(row["sum_squares"]) if "sum_squares" in row else None


def dynamic_range(row: Row) -> float | None:
    """Return the largest magnitude divided by the smallest that is not zero."""
    if "abs_max" not in row or "abs_min" not in row:
        return None
    found = row["abs_max"] / row["abs_min"]
    return found if isfinite(found) else None


def dynamic_range_p01(row: Row) -> float | None:
    """Return a bound on the largest magnitude divided by the first percentile of the non-zero ones.

    The percentile is the smallest magnitude that at least one in a hundred do not exceed. What is
    returned is never above the true ratio and at least half of it where the percentile is from
    2^-64 to below 2^31; otherwise it may be smaller. None where all elements are zero.
    """
    counts = [row.get(exponent_column(exponent), 0.0) for exponent in TENSOR_EXPONENTS]
    rank, so_far = ceil(sum(counts) / 100.0), 0.0
    if not rank or "abs_max" not in row:
        return None
    largest = row["abs_max"]
    for exponent, count in zip(TENSOR_EXPONENTS, counts, strict=True):
        so_far += count
        if so_far >= rank and exponent != TENSOR_EXPONENTS[-1]:
            found = largest / min(2.0 ** (exponent + 1), largest)
            return found if isfinite(found) else None
    return 1.0


def swallowed_share(row: Row) -> float | None:
    """Return the share of the sum of magnitudes that a running sum in the dtype does not get."""
    total = row.get("abs_sum", 0.0)
    return row["swallowed_sum"] / total if total and "swallowed_sum" in row else None


def swallowed_share_of_reduction(row: Row) -> float | None:
    """Return the same where the script sums the elements in their dtype."""
    return swallowed_share(row) if row.get("reduction") else None


def slice_imbalance(row: Row) -> float | None:
    """Return the largest range of a slice divided by the smallest that is not zero."""
    return ratio_of(row["range_ratio"]) if "range_ratio" in row else None


def worst_slice(row: Row) -> int | None:
    """Return the index of the slice whose range is farthest from the usual one."""
    return index_of(row["range_ratio"]) if "range_ratio" in row else None


def _gauge(name: str, unit: str, text: str, read: Callable[[Row], float | None]) -> Metric:
    def read_run(run: RunView) -> Reading:
        return {(tensor,): read(row) for tensor, row in run.tensors.columns.items()}

    return gauge(
        f"mp_agent.tensor.{name}",
        unit,
        labels=("tensor",),
        help=text,
        read=read_run,
    )


def _most_imbalanced(run: RunView) -> Reading:
    found = {
        name: ratio for name, row in run.tensors.columns.items() if (ratio := slice_imbalance(row))
    }
    if not found:
        return None
    tensor = max(found, key=found.__getitem__)
    return {(tensor, str(worst_slice(run.tensors.columns[tensor]))): 1.0}


TENSOR_SWALLOWED = _gauge(
    "swallowed",
    "1",
    "Share of the sum of a watched tensor's magnitudes that is lost if its elements are "
    "summed one after the other in its own dtype: terms smaller than half the spacing of "
    "that format at the sum so far leave it as it is. torch.sum accumulates in FP32 and "
    "loses less. Absent for integers.",
    swallowed_share,
)
TENSOR_REDUCTION_SWALLOWED = _gauge(
    "reduction.swallowed",
    "1",
    "Share of the sum of magnitudes that is lost if the elements are summed in their own "
    "dtype, of tensors that are watched with reduction=True: the script says that it sums "
    "them so.",
    swallowed_share_of_reduction,
)
TENSOR_SLICE_IMBALANCE = _gauge(
    "slice.imbalance",
    "{factor}",
    "Largest range of a slice of a watched tensor along the watched dimension, from its "
    "smallest to its largest finite element, divided by the smallest that is not zero; on "
    "the rank and call where that is largest.",
    slice_imbalance,
)
TENSOR_SUSTAINED_STEPS = gauge(
    "mp_agent.tensor.sustained.steps",
    "{step}",
    labels=("tensor", "limit"),
    thresholds=("reduction_swallowed", "dimension_imbalance"),
    help="Steps from the first to the last of the latest consecutive samples of a watched tensor "
    "that were beyond the threshold named by `limit`; 0 if the last sample was not.",
    read=lambda run: {
        (tensor, limit): float(steps)
        for limit, own in run.tensors.sustained_steps.items()
        for tensor, steps in own.items()
    },
)
IMBALANCED_TENSOR = info(
    "mp_agent.imbalanced_tensor.info",
    labels=("tensor", "slice"),
    help="The watched tensor whose slices differ most in range, and its worst slice.",
    read=_most_imbalanced,
)

TENSOR_METRICS = (
    _gauge(
        "abs_max",
        "{value}",
        "Largest finite magnitude in a tensor that the script gives to mp_agent.watch_tensor, of "
        "all ranks and calls of the last sampled step that had it.",
        lambda row: row.get("abs_max"),
    ),
    _gauge(
        "abs_min",
        "{value}",
        "Smallest magnitude among the finite elements of a watched tensor that are not zero.",
        lambda row: row.get("abs_min"),
    ),
    _gauge(
        "dynamic_range",
        "{factor}",
        "Largest magnitude in a watched tensor divided by the smallest that is not zero. FP16 "
        "spans 1e12 with its subnormal numbers, 1e9 without; nearly every large tensor is "
        "above 1e4.",
        dynamic_range,
    ),
    _gauge(
        "dynamic_range.p01",
        "{factor}",
        "Largest magnitude in a watched tensor divided by the first percentile of those that "
        "are not zero, so that a few tiny elements do not decide. From counts per power of "
        "two: at most the true ratio, and at least half of it.",
        dynamic_range_p01,
    ),
    _gauge("mean", "{value}", "Mean of the finite elements of a watched tensor.", mean),
    _gauge("norm", "{norm}", "L2 norm of the finite elements of a watched tensor.", norm),
    _gauge(
        "elements",
        "{element}",
        "Number of elements of a watched tensor.",
        lambda row: row.get("elements"),
    ),
    _gauge(
        "nonfinite.elements",
        "{element}",
        "Elements of a watched tensor that are NaN or Inf.",
        lambda row: row.get("nonfinite_elements"),
    ),
    TENSOR_SWALLOWED,
    TENSOR_REDUCTION_SWALLOWED,
    TENSOR_SLICE_IMBALANCE,
    TENSOR_SUSTAINED_STEPS,
    _gauge(
        "worst_slice",
        "{index}",
        "Index, from 0, of the slice of a watched tensor whose range is farthest from the "
        "geometric mean of all there.",
        worst_slice,
    ),
    IMBALANCED_TENSOR,
    gauge(
        "mp_agent.tensors.watched",
        "{tensor}",
        help="Names of watched tensors that were measured; the first 64 have series.",
        read=lambda run: float(run.tensors.names) if run.tensors.names else None,
    ),
    counter(
        "mp_agent.tensor.unmeasured.calls",
        "{call}",
        help="Calls of mp_agent.watch_tensor on sampled steps that gave nothing to measure: no "
        "tensor with numbers, no name, or one name or call too many. "
        "mp_agent_unsupported_info says which.",
        count=lambda change: change.step.get("unmeasured_tensors"),
    ),
)
