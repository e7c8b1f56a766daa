"""Compares batches: a digest of what the model's first forward of a step gets, on some steps.

Steps are looked at in pairs of neighbours, with one hook on the model that is gone after its first
forward. The digest stays on the device of the batch, and goes the way of a loss from there.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants, on_one_device
from mp_agent.probe.instruments.instrument import ForwardHook, Instrument, Run
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import (
    BATCH_DIGEST,
    BATCH_INTERVAL_STEPS,
    BATCH_KEPT,
    BATCH_LOADED,
    BATCH_ROWS,
)
from mp_agent.ring.interruptions import pass_on

_TENSORS = 4
_ELEMENTS = 256
"""Elements of each tensor that the digest is of."""
_ALONG = 16
"""The most of them along any dimension but the last."""
_BYTES_AT_MOST = 16
_WEIGHTS = tuple(
    2654435761 * (2 * place + 1) % 2**31 for place in range(_TENSORS * _ELEMENTS * _BYTES_AT_MOST)
)
_DIGEST_BITS = 2**32 - 1


class Loaders:
    """What data loaders have delivered to train on, those with more than one batch."""

    def __init__(self) -> None:
        self._several: weakref.WeakKeyDictionary[object, bool] = weakref.WeakKeyDictionary()
        """By sampler, whether it makes more than one batch."""
        self.delivered = 0
        """Batches of such loaders."""

    def loads(self, iterator: Any) -> None:
        """Count a batch of an iterator over a loader."""
        sampler = iterator._index_sampler
        if sampler not in self._several:
            self._several[sampler] = _has_several(sampler)
        self.delivered += self._several[sampler]


def _has_several(sampler: Any) -> bool:
    try:
        return len(sampler) > 1
    except Exception as error:  # that of a stream has no length
        pass_on(error)
        return True


class Batches(Instrument):
    """Keeps a hook on the model until the first forward of a step that is looked at."""

    subject = "batches"

    def __init__(self, run: Run, in_training: Callable[[], bool], loaders: Loaders) -> None:
        self._hook = ForwardHook(run, self._forward_begins)
        self._in_training = in_training
        self._loaders = loaders
        self._constants = DeviceConstants()
        self._handle: RemovableHandle | None = None
        self._sequence = 0
        """Number of the step whose forward is awaited."""
        self._found: dict[str, Scalar] = {}
        self._before: weakref.ref[torch.Tensor] | None = None
        """The first tensor of the step before."""
        self._delivered_before = 0

    def step_begins(self, model: nn.Module | None) -> None:
        """Await the first forward of a step that is looked at."""
        self.close()
        due = self._sequence % BATCH_INTERVAL_STEPS in (0, 1)
        if not due or model is None or isinstance(model, torch.jit.ScriptModule):
            return
        self._handle = nn.Module.register_forward_pre_hook(
            model, self._hook, prepend=True, with_kwargs=True
        )

    def finish(self, step: OpenStep) -> None:
        """Add to the step what was found."""
        self._sequence = step.sequence + 1
        if self._found:
            step.scalars.update(self._found)
            self._found = {}

    def close(self) -> None:
        """Remove the hook."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _forward_begins(self, inputs: object, named: object) -> None:
        if self._handle is None or not self._in_training():
            return
        self.close()
        tensors = list(islice(_tensors((inputs, named)), _TENSORS))
        if not tensors:
            return
        digest = self._digest(tensors)
        if digest is not None:
            self._found[BATCH_DIGEST] = digest
        first = next((each for each in tensors if each.dim()), None)
        if first is not None:
            self._found[BATCH_ROWS] = float(first.shape[0])
        self._note_origin(tensors[0] if tensors[0]._base is None else tensors[0]._base)

    def _note_origin(self, memory: torch.Tensor) -> None:
        """Note whether this is the memory of the step before, and whether a loader delivered."""
        delivered = self._loaders.delivered
        if self._sequence % BATCH_INTERVAL_STEPS and self._before is not None:
            self._found[BATCH_KEPT] = float(self._before() is memory)
            if delivered:
                self._found[BATCH_LOADED] = float(delivered > self._delivered_before)
        self._before, self._delivered_before = weakref.ref(memory), delivered

    def _digest(self, tensors: Sequence[torch.Tensor]) -> Scalar | None:
        parts = [_some_of(each.detach()) for each in tensors]
        digest = crc32(repr([tuple(each.shape) for each in tensors]).encode())
        if all(accelerator.is_on_host(part.device) for part in parts):
            for part in parts:
                digest = crc32(part.view(torch.uint8).numpy(), digest)
            return float(digest)
        bits_N = torch.cat(on_one_device([_bits(part) for part in parts]))
        weights_N = self._constants.on(bits_N.device, _WEIGHTS)[: bits_N.numel()]
        return scalar_of(((bits_N * weights_N).sum() + digest) & _DIGEST_BITS)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield plain tensors, with any elements, among what a module gets."""
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if plain and value.numel() and accelerator.is_supported(value.device):
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of elements [N], evenly spread: of the batch first, and none at the border."""
    left, places = _ELEMENTS, []
    for size in tensor.shape:
        kept = min(size, left if len(places) == tensor.dim() - 1 else min(left, _ALONG))
        stride = -(-size // kept)
        places.append(slice(stride // 2, None, stride))
        left = max(1, left // kept)
    return tensor[tuple(places)].contiguous().reshape(-1)


def _bits(part: torch.Tensor) -> torch.Tensor:
    """Return the elements [N] as int64, floating point ones by their bits."""
    if part.is_floating_point() or part.is_complex():
        return part.view(torch.uint8).to(torch.int64)
    return part.to(torch.int64)
