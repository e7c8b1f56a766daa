"""Sends what the host computed to a device without waiting for it."""

from typing import Any

import numpy.typing as npt
import torch


def send(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a copy of the array on `device`.

    By way of pinned memory on CUDA, since other copies wait for the device; torch keeps that
    memory until the copy is made, and gives it to a later one.
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)
