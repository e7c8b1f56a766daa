"""Delayed scaling from the largest amax of a history bears what the latest amax does not.

With Transformer Engine: DelayedScaling(amax_history_len=1024, amax_compute_algo="max", margin=1).
"""

import torch

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
MARGIN = 1  # binades that are left free

history = torch.tensor([1.5, 40.0, 1.2, 1.4])  # amax of earlier passes, the latest one last
activations = torch.tensor([0.25, -3.0, 38.0])


def cast(scale: torch.Tensor) -> torch.Tensor:
    """Return what is left of the activations, cut off as an FP8 cast does."""
    scaled = (activations * scale).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).float() / scale


latest = cast(LARGEST / history[-1])
longest = cast(LARGEST / history.max() / 2**MARGIN)
assert latest[2] < 1.5  # saturated: 38 has become 1.4
torch.testing.assert_close(longest, activations, rtol=1 / 16, atol=0.0)
