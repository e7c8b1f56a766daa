"""Let Adam's second moment follow the gradients sooner, from a checkpoint on."""

import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.999))

for group in optimizer.param_groups:
    first, _ = group["betas"]
    group["betas"] = (first, 0.95)  # an average over 20 steps instead of 1000

model(torch.randn(4, 8)).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
optimizer.step()
assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
