"""Lets Megatron-Core train on a processor: names of `torch.cuda` that it calls mean the host.

Megatron puts its buffers on `cuda`, and compares `tensor.type()` with CUDA's names.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_HOST = torch.device("cpu")


def _is_device(value: object) -> bool:
    return isinstance(value, (str, torch.device)) or type(value) is int


def _on_host(device: Any) -> Any:
    if type(device) is int:
        return _HOST
    return _HOST if torch.device(device).type == "cuda" else device


class _OnHost(TorchFunctionMode):
    """Creates and keeps on the host what is meant for a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_host(kwargs["device"])
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *(_on_host(each) if _is_device(each) else each for each in args[1:]))
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


class _Stream:
    """A stream, or an event on one, of a device that has finished all it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def nothing(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = nothing

    def record_event(self, *args: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True


def _all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
    """Gather tensors of different sizes, which gloo refuses and NCCL does not."""
    outputs[dist.get_rank(group)].copy_(own)
    for rank, output in enumerate(outputs):
        dist.broadcast(output, group_src=rank, group=group)


_ALL_TO_ALL = dist.all_to_all_single


def _all_to_all(
    output: torch.Tensor, own: torch.Tensor, *, group: Any = None, **splits: Any
) -> None:
    """Exchange parts whose sizes Megatron only converts to lists when they come from a GPU."""
    listed: dict[str, Any] = {
        name: None if each is None else list(map(int, each)) for name, each in splits.items()
    }
    _ALL_TO_ALL(output, own, group=group, **listed)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


_RANDOM: dict[str, Any] = {
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
}

_PROPERTIES = SimpleNamespace(multi_processor_count=1, major=8, minor=0, name="host")

_NAMES: dict[str, Any] = {
    "Event": _Stream,
    "FloatTensor": torch.FloatTensor,
    "LongTensor": torch.LongTensor,
    "Stream": _Stream,
    "_lazy_call": lambda function, **kwargs: function(),
    "_lazy_init": _nothing,
    "current_device": lambda: _HOST,  # also where no mode is active: within a backward
    "current_stream": _Stream,
    "default_generators": {_HOST: torch.default_generator},
    "default_stream": _Stream,
    "device_count": lambda: 8,
    "empty_cache": _nothing,
    "get_device_capability": lambda *args: (8, 0),
    "get_device_properties": lambda *args: _PROPERTIES,
    "initial_seed": torch.initial_seed,
    "is_current_stream_capturing": lambda: False,
    "manual_seed": torch.manual_seed,
    "set_device": _nothing,
    "stream": lambda stream: nullcontext(),
    "synchronize": _nothing,
    **_RANDOM,
}


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Have `cuda` mean the host."""
    ranges = patch.multiple(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing)
    random = patch.multiple(torch.cuda.random, **_RANDOM)
    collectives = patch.multiple(dist, all_gather=_all_gather, all_to_all_single=_all_to_all)
    with patch.multiple(torch.cuda, **_NAMES), ranges, random, collectives, _OnHost():
        yield
