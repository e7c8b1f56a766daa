"""An epsilon that the optimizer's state can hold, and that is below its second moments."""

import torch


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a format."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


assert torch.tensor(1e-8, dtype=torch.float16) == 0  # below 5.96e-8, FP16's smallest

model = torch.nn.Linear(8, 1).half()
epsilon = max(1e-8, 2 * smallest(next(model.parameters()).dtype))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=epsilon)
assert torch.tensor(optimizer.param_groups[0]["eps"], dtype=torch.float16) > 0
