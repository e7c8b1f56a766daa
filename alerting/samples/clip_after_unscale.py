"""Clip between `unscale_` and `step`: before it, the limit would apply to scaled gradients."""

import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
inputs, targets = torch.randn(4, 8), torch.full((4, 1), 1e4)

with torch.autocast("cpu", dtype=torch.float16):
    loss = (model(inputs).float() - targets).square().mean()
scaler.scale(loss / 1e4).backward()
scaler.unscale_(optimizer)
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()

print(f"norm before clipping: {norm:.3g}")
