"""The measurement plan of one of Megatron's optimizers: layers by the model's names, and shares."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from mp_agent.probe.megatron.gradients import (
    GradientPart,
    Hold,
    finder,
    leaves_of,
    masters_of,
    model_parameters,
    parts_of,
)
from mp_agent.probe.megatron.names import chunks_of, named_by_chunks
from mp_agent.probe.megatron.placement import BucketGroups, axes_of, share_of, strategy_of
from mp_agent.probe.optimizers.engine_plan import (
    LAYOUT_ERRORS,
    EngineLayer,
    EnginePlan,
    make_engine_plan,
)
from mp_agent.probe.optimizers.lookup import live_objects
from mp_agent.probe.placement import Reducers, megatron

UNKNOWN_LAYOUT = "gradients as this version of Megatron-Core keeps them"
FULLY_SHARDED = "Megatron-Core's own FSDP"


class _Measured(NamedTuple):
    """The parts of which this rank shares the gradients, and where they lie."""

    parts: list[GradientPart]
    layers: list[EngineLayer]
    chunks: list[nn.Module]
    masters: list[torch.Tensor]
    strategy: str
    announced: bool
    """Whether Megatron's wrapper reduces the gradients of all parts."""


class DataParallelReducers(Reducers):
    """Megatron's wrapper reduces gradients where all ranks have them; of slices it is not asked."""

    def __init__(self, *, copied: bool) -> None:
        self._copied = copied
        super().__init__((), ())

    def reduced(self) -> bool | None:
        """Return whether replicas step with the same gradients; None where there are none."""
        return True if self._copied else None


def make_plan(optimizer: Any, label: str) -> EnginePlan:
    """Return what to measure; no layers, but the reason, where that is not known to be right."""
    reason = _unsupported_by(optimizer)
    strategy = "megatron_fsdp" if reason == FULLY_SHARDED else "none"
    measured = _Measured([], [], [], [], strategy, announced=False)
    if not reason:
        try:
            measured = _measured(optimizer)
        except LAYOUT_ERRORS:
            reason = UNKNOWN_LAYOUT
    parameters = [part.parameter for part in measured.parts]
    return make_engine_plan(
        measured.layers,
        label=label,
        owner=optimizer,
        find=finder(measured.parts),
        whole=_whole,
        identities=set(map(id, parameters)),
        device=parameters[0].device if parameters else torch.device("cpu"),
        compute_dtype=_most_common_dtype(parameters),
        strategy=measured.strategy,
        reducers=DataParallelReducers(
            copied=bool(parameters) and all(part.hold is Hold.COPIED for part in measured.parts)
        ),
        unsupported=reason,
        unknown_layout=UNKNOWN_LAYOUT,
        masters=measured.masters,
        announces_reduction=measured.announced,
        root=next(iter(measured.chunks), None),
    )


def _unsupported_by(optimizer: Any) -> str:
    """Return why an optimizer's gradients are left out; empty when they are measured."""
    configs = (getattr(leaf, "ddp_config", None) for leaf in leaves_of(optimizer))
    if any(getattr(config, "use_megatron_fsdp", False) for config in configs):
        return FULLY_SHARDED
    return ""


def _measured(optimizer: Any) -> _Measured:
    """Return the parts to measure; a tensor that another stage counts (`shared`) is none."""
    parts = [part for part in parts_of(optimizer) if not megatron.is_shared_copy(part.parameter)]
    modules = live_objects.walk(young=False).modules
    parameters = [part.parameter for part in parts]
    chunks = chunks_of(parameters, modules)
    buckets = BucketGroups(modules)
    axes = {id(part.parameter): axes_of(part, buckets) for part in parts}
    held = {id(part.parameter): part for part in parts}
    named = named_by_chunks(parameters, chunks)
    layers = [
        EngineLayer(each, part.elements, share_of(part, axes[id(each.parameter)]))
        for each in named
        for part in (held[id(each.parameter)],)
    ]
    strategy = strategy_of((axis for own in axes.values() for axis in own), parameters)
    announced = all(map(buckets.reducing, parameters))
    return _Measured(parts, layers, chunks, list(masters_of(optimizer)), strategy, announced)


def _whole(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that no rank gathers from others after a step."""
    if getattr(optimizer, "dp_cp_params_list", None):
        return
    for leaf in leaves_of(optimizer):
        if not hasattr(leaf, "model_float16_groups"):
            yield from model_parameters(leaf)


def _most_common_dtype(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    elements: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        elements[parameter.dtype] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else torch.float32
