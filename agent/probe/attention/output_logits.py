"""A row of statistics of the logits of one loss, for a few of its rows."""

from collections.abc import Sequence
from math import nan

import torch

from mp_agent.probe.attention.picks import spread, widened

ROWS_AT_MOST = 32


def logits_row(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, offset: int = 0
) -> torch.Tensor | None:
    """Return float64 [C], the columns of `LOGITS`, on the device of `logits`; None without any.

    logits [K], [N, K] or [N, K, d1, ...], target of classes (without the K) or probabilities (with
    it): as `cross_entropy` takes them. Rows whose target is `ignore_index` do not count. offset:
    which rows are looked at. The log-sum-exp is computed in at least 32 bits.
    """
    if not logits.numel():
        return None
    rows = logits.movedim(1, -1) if logits.dim() > 1 else logits.unsqueeze(0)
    classes = None if target.is_floating_point() else target.reshape(rows.shape[:-1])
    picked = _picked(rows.shape[:-1], offset)
    few_RK = widened(rows[picked]).reshape(-1, rows.shape[-1])
    counted_R = torch.ones_like(few_RK[:, 0], dtype=torch.bool)
    if classes is not None:
        counted_R = classes[picked].reshape(-1) != ignore_index
    sums_R = few_RK.logsumexp(dim=1).double()
    judged_R = counted_R & sums_R.isfinite()
    none = ~judged_R.any()
    seen_RK = few_RK.isfinite() & counted_R.unsqueeze(1)
    largest = few_RK.double().masked_fill(~seen_RK, -torch.inf).amax()
    return torch.stack(
        [
            counted_R.sum().double(),
            (counted_R & ~judged_R).sum().double(),
            largest.masked_fill(~seen_RK.any(), nan),
            sums_R.masked_fill(~judged_R, -torch.inf).amax().masked_fill(none, nan),
            sums_R.masked_fill(~judged_R, torch.inf).amin().masked_fill(none, nan),
            sums_R.masked_fill(~judged_R, 0.0).sum(),
        ]
    )


def _picked(counts: Sequence[int], offset: int) -> tuple[slice, ...]:
    """Return which of the rows, by the dimensions that count them."""
    left, at_most = ROWS_AT_MOST, []
    for count in counts:
        at_most.append(left)
        left = max(1, left // min(count, left))
    return spread(counts, at_most, offset)
