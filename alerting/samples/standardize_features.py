"""Standardize each feature by itself, so that no slice is lost next to a larger one."""

import torch

torch.manual_seed(0)
features = torch.randn(1000, 2) * torch.tensor([50_000.0, 1.0])


def range_ratio(tensor: torch.Tensor) -> float:
    """Return the largest range of a column divided by the smallest."""
    ranges = tensor.amax(dim=0) - tensor.amin(dim=0)
    return float(ranges.max() / ranges.min())


assert range_ratio(features) > 1e4
mean, deviation = features.mean(dim=0), features.std(dim=0)
standardized = (features - mean) / deviation.clamp(min=1e-6)
assert range_ratio(standardized) < 10
