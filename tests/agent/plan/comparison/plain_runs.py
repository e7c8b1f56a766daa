"""The same step run the plain way, one precision after the other, everything kept: a reference."""

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import nn


def plain_run(model: nn.Module, batch: Any, loss: Any, name: str) -> dict[str, list[torch.Tensor]]:
    """Return the outputs of every module's calls, and the parameters' gradients (`grad:…`).

    name: of a candidate that torch itself computes, or `fp32`.
    """
    copied = deepcopy(model)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name.removesuffix("-autocast"))
    pure = dtype is not None and not name.endswith("-autocast")
    if dtype is not None and pure:
        copied = copied.to(dtype)
        batch = _cast(batch, dtype)
    found: dict[str, list[torch.Tensor]] = {}

    def keep(key: str) -> Any:
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            value = outputs
            while isinstance(value, tuple | list):
                value = value[0]
            if isinstance(value, torch.Tensor):
                found.setdefault(key, []).append(value.detach().clone())

        return hook

    for key, module in copied.named_modules():
        module.register_forward_hook(keep(key))
    state = torch.get_rng_state()
    with nullcontext() if pure or dtype is None else torch.autocast("cpu", dtype):
        value = copied(**batch).loss if loss is None else loss(copied(batch[0]), batch[1])
    value.backward()
    torch.set_rng_state(state)
    for key, parameter in copied.named_parameters():
        if parameter.grad is not None:
            found[f"grad:{key}"] = [parameter.grad]
    return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return tuple(_cast(item, dtype) for item in value)


def relative(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """Return ‖candidate − reference‖₂ / ‖reference‖₂ in float64."""
    a, b = reference.double(), candidate.double()
    return float((b - a).norm() / a.norm()) if a.norm() else float((b - a).norm())
