"""Clear once per step, accumulate, clip what the step will use, and step."""

import torch

MICRO_BATCHES = 4
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(3):
    optimizer.zero_grad()
    for _ in range(MICRO_BATCHES):
        loss = model(torch.randn(4, 8)).square().mean()
        (loss / MICRO_BATCHES).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    print(f"step {step}: norm before clipping {norm:.3g}")
