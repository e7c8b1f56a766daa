"""Find the modules whose outputs come near FP16's largest number, and run those in FP32."""

import torch

FP16_MAX = torch.finfo(torch.float16).max


class InFloat32(torch.nn.Module):
    """Runs a module outside autocast."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the module in FP32, whatever the caller's autocast says."""
        with torch.autocast(x.device.type, enabled=False):
            output: torch.Tensor = self.module(x.float())
        return output


def largest_outputs(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, float]:
    """Return the largest output magnitude of each leaf module in an FP32 forward pass."""
    largest: dict[str, float] = {}
    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda _, __, output, name=name: largest.update(
                    {name: float(output.detach().abs().max())}
                )
            )
    with torch.no_grad():
        model(batch)
    return largest


large = torch.nn.Linear(8, 8)
large.weight.data *= 1e6
model = torch.nn.Sequential(torch.nn.Linear(8, 8), large)
for name, value in largest_outputs(model, torch.randn(4, 8)).items():
    if value > FP16_MAX / 2:
        model[int(name)] = InFloat32(model[int(name)])

with torch.autocast("cpu", dtype=torch.float16):
    assert model(torch.randn(4, 8)).isfinite().all()
