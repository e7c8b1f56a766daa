"""Replay a step and name the module whose output, then the operation whose gradient, is NaN."""

from typing import Any

import torch


def watch_outputs(model: torch.nn.Module) -> None:
    """Raise at the first module, in forward order, whose output is not finite."""
    names = {module: name for name, module in model.named_modules()}

    def check(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and not output.isfinite().all():
            kind = type(module).__name__
            raise FloatingPointError(f"{names[module]} ({kind}) put out NaN or Inf")

    for module in names:
        module.register_forward_hook(check)


class Logarithm(torch.nn.Module):
    """Has no value at zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fail for every input that is not positive."""
        return x.clamp(min=0).log()  # log(0)


model = torch.nn.Sequential(torch.nn.Linear(4, 4), Logarithm(), torch.nn.Linear(4, 1))
watch_outputs(model)
try:
    with torch.autograd.set_detect_anomaly(True):  # also names the line of a NaN in backward
        model(torch.randn(64, 4)).sum().backward()
except FloatingPointError as found:
    print(found)
    assert "1 (Logarithm)" in str(found)
