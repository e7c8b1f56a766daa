"""Sum 16-bit terms in FP32: added up in FP16, most of them are lost."""

import torch

losses = torch.full((8192,), 1.0, dtype=torch.float16)

# Each addition is rounded to FP16: at 2048 the next number is 2050, and 1 more changes nothing.
total = torch.zeros((), dtype=torch.float16)
for loss in losses:
    total += loss
assert total == 2048

# The same terms in FP32; torch.mean(dtype=...) does likewise.
assert losses.sum(dtype=torch.float32) == 8192
assert losses.mean(dtype=torch.float32) == 1
