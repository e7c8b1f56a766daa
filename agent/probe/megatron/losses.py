"""The losses that Megatron's schedules run backwards from.

A schedule divides each loss by the number of micro-batches, may free it before its backward, and
multiplies it by the loss scale just before. So its value is taken as the forward pass returns it.
"""

import weakref
from typing import Any

import torch

from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of


class ScheduledLosses:
    """Losses between the forward pass that made them and their backward, a few of a pipeline."""

    def __init__(self) -> None:
        self._losses: dict[int, tuple[weakref.ref[torch.Tensor], Scalar]] = {}

    def made(self, output: object) -> None:
        """Note what a forward pass has returned: a loss, or the output of an earlier stage."""
        tensor = first_of(output)
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
            return
        self._losses = {key: each for key, each in self._losses.items() if each[0]() is not None}
        if (loss := snapshot_of(tensor)) is not None:
            self._losses[id(tensor)] = weakref.ref(tensor), loss

    def taken(self, output: object, gradient: object) -> Scalar | None:
        """Return the loss that a backward is about to start from; None of an earlier stage.

        gradient: of the output, which has one on an earlier stage.
        """
        tensor = first_of(output)
        found = self._losses.pop(id(tensor), None)
        if first_of(gradient) is not None or not getattr(tensor, "requires_grad", False):
            return None
        if found is not None and found[0]() is tensor:
            return found[1]
        return scalar_of(tensor)


def first_of(value: Any) -> object:
    """Return the first of a list, or what is none."""
    if isinstance(value, list):
        return value[0] if value else None
    return value


def multiplied_by(wrapper: Any, factor: object) -> object:
    """Return by what a step's loss is to be multiplied where its gradients are by `factor`.

    With a loss per token, gradients are summed over the ranks that reduce them and then divided by
    the tokens of all; the run's loss is the mean over these ranks.
    """
    if not getattr(getattr(wrapper, "config", None), "calculate_per_token_loss", False):
        return factor
    scalar, group = scalar_of(factor), getattr(wrapper, "dp_cp_group", None)
    if scalar is None or group is None:
        return factor
    return scalar * torch.distributed.get_world_size(group)
