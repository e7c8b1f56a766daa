"""Give outputs and targets one shape: (B, 1) against (B) compares each output with all targets."""

import torch

model = torch.nn.Linear(4, 1)
inputs, targets = torch.randn(8, 4), torch.arange(8.0)
outputs = model(inputs)

assert (outputs - targets).shape == (8, 8)  # every output with every target
difference = outputs.squeeze(-1) - targets
assert difference.shape == targets.shape

loss = torch.nn.functional.mse_loss(outputs.squeeze(-1), targets)
torch.testing.assert_close(loss, difference.square().mean())
