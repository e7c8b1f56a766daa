"""What an independent eye sees of a gradient, in float64 and with numpy."""

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tests.agent.gradient_reference import reference_row


def row_of(gradient: torch.Tensor, scale: float = 1.0) -> np.ndarray:
    """Return the columns of the whole tensor, in the order in which the probe writes them."""
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return reference_row(whole.detach().double().cpu().numpy().ravel() / scale)
