"""The measurement plan of a DeepSpeed engine: layers by the model's own names, and shares."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mp_agent.probe.deepspeed.gradients import Keeper, Part, keeper_of, trained_by
from mp_agent.probe.deepspeed.limits import unsupported_by
from mp_agent.probe.optimizers.engine_plan import (
    LAYOUT_ERRORS,
    EngineLayer,
    EnginePlan,
    make_engine_plan,
)
from mp_agent.probe.optimizers.lookup.parameter_names import name_parameters
from mp_agent.probe.placement import Reducers, this_rank
from mp_agent.probe.placement.axes import Grid, PlacementAxis, Spread
from mp_agent.records.schema import Share

UNKNOWN_LAYOUT = "gradients as this version of DeepSpeed keeps them"

_NOTHING = Keeper(split=False, parts=(), gradients=lambda optimizer: {})


class EngineReducers(Reducers):
    """Whether an engine averages gradients: some optimizers exchange compressed momenta instead."""

    def __init__(self, engine: Any, keeper: Keeper) -> None:
        self._averages = not keeper.split and bool(keeper.parts)
        self._engine = weakref.ref(engine)

    def reduced(self) -> bool | None:
        """Return whether replicas step with the same gradients; None where there are none."""
        if not self._averages:
            return None
        return bool(getattr(self._engine(), "enable_backward_allreduce", True))


def make_plan(engine: Any, label: str) -> EnginePlan:
    """Return what to measure; no layers, but the reason, where that is not known to be right."""
    stage = int(engine.zero_optimization_stage())
    reason = unsupported_by(engine)
    keeper, shares = _NOTHING, []
    if not reason:
        try:
            keeper = keeper_of(engine.optimizer, engine)
            shares = [_share(part, stage, split=keeper.split) for part in keeper.parts]
        except LAYOUT_ERRORS:
            keeper, shares, reason = _NOTHING, [], UNKNOWN_LAYOUT
    held = {id(p.parameter): (p, share) for p, share in zip(keeper.parts, shares, strict=True)}
    named = name_parameters((part.parameter for part in keeper.parts), engine.module, {})
    parts = [(each, *held[id(each.parameter)]) for each in named]
    return make_engine_plan(
        [EngineLayer(each, part.elements, share) for each, part, share in parts],
        label=label,
        owner=engine.optimizer,
        find=keeper.gradients,
        whole=_gathered if keeper.split else trained_by,
        identities=set(map(id, nn.Module.parameters(engine.module))),
        device=_device(engine),
        compute_dtype=_compute_dtype(engine.module),
        strategy=f"deepspeed_zero{stage}",
        reducers=EngineReducers(engine, keeper),
        unsupported=reason,
        unknown_layout=UNKNOWN_LAYOUT,
    )


def _gathered(optimizer: Any) -> Iterable[torch.Tensor]:
    """Return no parameter: ZeRO gathers its own again after each step."""
    return ()


def _share(part: Part, stage: int, *, split: bool) -> Share:
    ranks = tuple(dist.get_process_group_ranks(part.group or dist.group.WORLD))
    spread = Spread.SPLIT if split else Spread.COPIED
    return (
        Grid(this_rank()).crossed_by(PlacementAxis(spread, ranks, f"deepspeed_zero{stage}")).share()
    )


def _device(engine: Any) -> torch.device:
    """Return where the gradients are: with the weights, unless they are offloaded."""
    optimizer = engine.optimizer
    offloaded = getattr(optimizer, "cpu_offload", False) or getattr(
        optimizer, "offload_optimizer", False
    )
    return torch.device("cpu") if offloaded else torch.device(engine.device)


def _compute_dtype(module: nn.Module) -> torch.dtype:
    elements: Counter[torch.dtype] = Counter()
    for parameter in nn.Module.parameters(module):
        elements[parameter.dtype] += int(getattr(parameter, "ds_numel", parameter.numel()))
    return elements.most_common(1)[0][0] if elements else torch.float32
