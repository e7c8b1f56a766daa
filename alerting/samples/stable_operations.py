"""Operations that leave FP16's range, and the forms that do not."""

import torch
from torch.nn import functional as F

logits = torch.tensor([[30.0, -30.0]])
targets = torch.tensor([[0.0, 1.0]])

# The sigmoid rounds to exactly 0 and 1, whose logarithm is infinite; the fused form never does.
loss = F.binary_cross_entropy_with_logits(logits, targets)
assert loss.isfinite()

# A sum of many terms passes 65504 in FP16; so do exp, pow and variances. Leave autocast for them.
with torch.autocast("cpu", dtype=torch.float16):
    hidden = torch.nn.Linear(2, 70_000)(logits)
    with torch.autocast("cpu", enabled=False):
        total = hidden.float().square().sum()
        weights = hidden.float().softmax(dim=-1)
assert total.isfinite() and weights.dtype == torch.float32
