"""A loss that keeps the load of experts even, and router logits small."""

import torch
from torch.nn import functional as F

TOKENS, EXPERTS, CHOSEN = 64, 8, 2

logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)  # of the router, in FP32
loss = torch.tensor(2.0)  # of the task

probabilities = logits.softmax(dim=-1)
chosen = logits.topk(CHOSEN, dim=-1).indices
share_of_tokens = F.one_hot(chosen, EXPERTS).sum(dim=1).float().mean(dim=0) / CHOSEN
balance = EXPERTS * (share_of_tokens * probabilities.mean(dim=0)).sum()  # 1 where it is even
z_loss = logits.logsumexp(dim=-1).square().mean()

total = loss + 0.01 * balance + 0.001 * z_loss
torch.autograd.backward(total)
assert logits.grad is not None and bool(logits.grad.any())
