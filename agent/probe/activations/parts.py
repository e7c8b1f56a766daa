"""The tensors that a module's inputs or its output consist of."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor


def tensors_in(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output, or in the inputs, of a module; sharded ones as they are."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        parts: Sequence[object] = ()
        if isinstance(value, dict):
            parts = list(value.values())
        elif isinstance(value, list | tuple):
            parts = value
        for part in parts:
            yield from tensors_in(part, depth - 1)


def local_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors; of sharded ones the local part."""
    for tensor in tensors:
        yield tensor.to_local() if isinstance(tensor, DTensor) else tensor
