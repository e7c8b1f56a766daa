"""Call the model within autocast; its linear layers then compute in BF16."""

import torch

model = torch.nn.Linear(8, 1)
inputs = torch.randn(4, 8)

with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
    outputs = model(inputs)
    loss = outputs.float().square().mean()
loss.backward()

print(f"outputs in {outputs.dtype}")
