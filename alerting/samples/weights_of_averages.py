"""Change the weights of averages: of Adam's moments, and of batch normalization's statistics."""

import torch

model = torch.nn.Sequential(
    torch.nn.Linear(8, 8),
    # The weight of the newest batch: 1 - 0.99 where TensorFlow has 0.99.
    torch.nn.BatchNorm1d(8, momentum=0.01),
    torch.nn.Linear(8, 1),
)
# The decay of the mean first, then that of the mean square.
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.999))

# From a checkpoint on, second moments that follow the gradients sooner.
for group in optimizer.param_groups:
    first, _ = group["betas"]
    group["betas"] = (first, 0.95)  # an average over 20 steps instead of 1000

model(torch.randn(4, 8)).sum().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
optimizer.step()
assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
