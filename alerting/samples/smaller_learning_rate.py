"""Go back to the last good checkpoint, a tenth of the learning rate, and a new warm-up."""

from typing import Any

import torch

WARM_UP_STEPS = 200


def rewind(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]
) -> None:
    """Restore weights and optimizer state, and lower every learning rate tenfold."""
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] /= 10
        group["initial_lr"] = group["lr"]  # what the scheduler starts from


model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
rewind(model, optimizer, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
warm_up = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS)
)

optimizer.step()
warm_up.step()
assert abs(optimizer.param_groups[0]["lr"] - 3e-5 * 2 / WARM_UP_STEPS) < 1e-9
