"""A model of which all sums are exact in FP32, and one module leaves the range of FP16."""

import torch
from torch import nn


class Square(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * inputs


Batch = tuple[torch.Tensor, torch.Tensor]


def make_model() -> tuple[nn.Module, Batch, nn.Module]:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Square(), nn.Linear(8, 4, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = torch.arange(parameter.numel()).reshape(parameter.shape)
            parameter.copy_((numbers * 5 % 16 - 7) / 4)
    inputs = (torch.arange(64).reshape(8, 8) * 3 % 32 - 15).float()
    return model, (inputs, torch.zeros(8, 4)), nn.MSELoss()
