"""Without a GradScaler nothing skips a non-finite update; this does, and counts how often."""

import torch


def finite_gradients(parameters: list[torch.nn.Parameter]) -> bool:
    """Return whether every gradient is finite. Waits for the device once."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    return bool(torch.stack(norms).isfinite().all())


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
skipped = 0

for factor in (1.0, float("inf")):
    (model(torch.randn(8, 4)) * factor).sum().backward()
    if finite_gradients(list(model.parameters())):
        optimizer.step()
    else:
        skipped += 1
    optimizer.zero_grad()

assert skipped == 1
assert all(p.isfinite().all() for p in model.parameters())
