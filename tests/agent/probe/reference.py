"""What an independent eye sees of a gradient, in float64 and with numpy."""

import numpy as np
import torch
from torch.distributed.tensor import DTensor


def row_of(gradient: torch.Tensor, scale: float = 1.0) -> np.ndarray:
    """sum of squares, largest magnitude, zeros, NaN, Inf, elements; of the whole tensor."""
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    values = whole.detach().double().cpu().numpy().ravel() / scale
    finite = values[np.isfinite(values)]
    return np.array(
        [
            np.sum(finite * finite),
            np.max(np.abs(finite), initial=0.0),
            np.sum(values == 0),
            np.sum(np.isnan(values)),
            np.sum(np.isinf(values)),
            values.size,
        ],
        dtype=np.float64,
    )
