"""State in FP32, which holds an epsilon of 1e-8; or an epsilon that FP16 holds."""

import torch

assert torch.tensor(1e-8, dtype=torch.float16) == 0  # below 5.96e-8, FP16's smallest

model = torch.nn.Linear(8, 1)  # FP32 weights give FP32 state; autocast computes in 16 bits
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
assert torch.tensor(optimizer.param_groups[0]["eps"]) > 0

model = torch.nn.Linear(8, 1).half()  # only where memory allows no FP32 weights
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
assert torch.tensor(optimizer.param_groups[0]["eps"], dtype=torch.float16) > 0
