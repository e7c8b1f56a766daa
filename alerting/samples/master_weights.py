"""Step FP32 weights and compute in BF16: small updates add up instead of being rounded away."""

import torch

weight = torch.ones(1000, dtype=torch.bfloat16)
assert torch.equal(weight - 1e-3, weight)  # lost: half the spacing of BF16 below 1 is 2e-3

model = torch.nn.Linear(8, 1)  # stays in FP32: no .bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
before = model.weight.detach().clone()
with torch.autocast("cpu", torch.bfloat16):
    loss = model(torch.randn(4, 8)).float().pow(2).mean()
loss.backward()
optimizer.step()
assert not torch.equal(model.weight, before)
