"""Layers with a state of the same shape as Transformer Engine's, which needs a GPU to run.

What it does to that state is written down here after its source: a forward pass writes amax into
row 0 of `amax_history`; at the end of its autocast region the history is rolled, so that row 0
becomes the last row, the new scale is the largest number divided by the largest amax, and row 0 is
cleared. The backward pass does likewise with the state of gradients.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

E4M3_MAX, E5M2_MAX = 448.0, 57344.0


def state(tensors: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(
        scale=torch.ones(tensors),
        scale_inv=torch.ones(tensors),
        amax_history=torch.zeros(length, tensors),
    )


def record(state: Any, *amax: float) -> None:
    state.amax_history[0] = torch.tensor(amax)


def update(state: Any, largest: float, algorithm: str = "max") -> None:
    """As `_update_amax_history` and `_default_sf_compute` do; any other algorithm is the latest."""
    history = state.amax_history
    amax = history.max(dim=0).values if algorithm == "max" else history[0].clone()
    state.amax_history.copy_(torch.roll(state.amax_history, -1, 0))
    state.amax_history[0].fill_(0.0)
    new = torch.where((amax > 0.0) & amax.isfinite(), largest / amax, state.scale)
    state.scale.copy_(new)


class ScaledLinear(nn.Module):
    """A linear layer that computes in FP32, and keeps the state of one that casts."""

    def __init__(self, size: int = 4, length: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size))
        self.fp8_meta: dict[str, Any] = {
            "fp8_max_fwd": E4M3_MAX,
            "fp8_max_bwd": E5M2_MAX,
            "scaling_fwd": state(3, length),
            "scaling_bwd": state(2, length),
        }

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        amax = [float(each.detach().abs().max()) for each in (inputs, self.weight)]
        record(self.fp8_meta["scaling_fwd"], *amax, 0.0)
        outputs = nn.functional.linear(inputs, self.weight)
        if outputs.requires_grad:
            outputs.register_hook(self._backward)
        return outputs

    def _backward(self, gradient: torch.Tensor) -> None:
        scaling = self.fp8_meta["scaling_bwd"]
        record(scaling, float(gradient.abs().max()), 0.0)
        update(scaling, E5M2_MAX)

    def leave_autocast(self) -> None:
        update(self.fp8_meta["scaling_fwd"], E4M3_MAX)
