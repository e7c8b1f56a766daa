"""Tensors that torch has no operations for: uncommon dtypes, subclasses, freed memory."""

import sys
from collections.abc import Callable
from typing import ParamSpec

import torch

from mp_agent.probe import accelerator
from mp_agent.ring.interruptions import interruption_in

P = ParamSpec("P")


def computed(
    function: Callable[P, torch.Tensor], *args: P.args, **kwargs: P.kwargs
) -> torch.Tensor | None:
    """Return the plain tensor that `function` returns; None where torch lacks what that takes.

    What a device has failed in earlier, memory that has run out, and what interrupts the function
    from outside are raised.
    """
    handled_before = sys.exc_info()[1]
    try:
        found = function(*args, **kwargs)
    except Exception as error:
        foreign = any(_computes_by_itself(each) for each in args)
        if not foreign and not isinstance(error, TypeError | RuntimeError):
            raise
        if accelerator.is_sticky_error(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        if interruption_in(error, handled_before) is not None:
            raise
        return None
    return found if type(found) is torch.Tensor else None


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a strided tensor are there: not where its storage was freed.

    FSDP does so to parameters that it has gathered. Torch reads freed memory, which ends the
    process. Of a subclass that computes by itself the memory is its own affair.
    """
    if _computes_by_itself(tensor):
        return True
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    elements = tensor.storage_offset() + last + 1 if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() >= elements * tensor.element_size()


def _computes_by_itself(value: object) -> bool:
    """Return whether operations on a tensor are code of its own class."""
    if not isinstance(value, torch.Tensor):
        return False
    return type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
