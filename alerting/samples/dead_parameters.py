"""After a backward pass, list the parameters that learn nothing, and why."""

import torch


def dead_parameters(model: torch.nn.Module, smallest: float = 1e-10) -> dict[str, str]:
    """Return the name of each parameter without a usable gradient, with the reason."""
    dead = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            dead[name] = "frozen: requires_grad is False"
        elif parameter.grad is None:
            dead[name] = "no gradient: unused in forward, or behind detach() or no_grad()"
        elif parameter.grad.abs().max() < smallest:
            dead[name] = f"gradient below {smallest:g}: saturated, underflowing, or zeroed"
    return dead


class Branches(torch.nn.Module):
    """Two branches, one of them cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.detached = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the branches."""
        output: torch.Tensor = self.used(x) + self.detached(x).detach()
        return output


model = Branches()
model(torch.randn(8, 4)).sum().backward()
for name, reason in dead_parameters(model).items():
    print(f"{name}: {reason}")
assert set(dead_parameters(model)) == {"detached.weight", "detached.bias"}
