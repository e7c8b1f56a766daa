"""What a sum that is kept in the dtype of its terms loses; on an accelerator without waiting."""

import torch


class RunningSum:
    """A sum of terms, one after the other, rounded to `dtype` after each.

    Each addition is judged by itself: the sum of the terms before, exact to float64 and rounded
    once, plus the term. Terms that leave it as it is are lost, and so are all after it has left the
    range of the dtype.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._total = torch.zeros(1, dtype=torch.float64, device=device)

    def lost(self, terms_N: torch.Tensor) -> torch.Tensor:
        """Add terms, float64 and finite; return the sum of the lost magnitudes, 0-dim."""
        exact_N = terms_N.cumsum(0) + self._total
        before_N = torch.cat((self._total, exact_N[:-1]))
        self._total = exact_N[-1:]
        kept_N = before_N.to(self._dtype).double()
        after_N = (kept_N + terms_N).to(self._dtype).double()
        lost_N = (after_N == kept_N) | ~kept_N.isfinite()
        return terms_N.abs().masked_fill(~lost_N, 0.0).sum()
