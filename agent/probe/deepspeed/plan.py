"""The measurement plan of a DeepSpeed engine: layers by the model's own names, and shares."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mp_agent.probe.deepspeed.gradients import Found, Keeper, Part, keeper_of, trained_by
from mp_agent.probe.deepspeed.limits import unsupported_by
from mp_agent.probe.optimizers.lookup.parameter_names import NamedParameter, name_parameters
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.placement import Reducers, declarations, this_rank
from mp_agent.probe.placement.axes import Grid, PlacementAxis, Spread
from mp_agent.records.schema import Layer, Share

UNKNOWN_LAYOUT = "gradients as this version of DeepSpeed keeps them"

_LAYOUT_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)

_NOTHING = Keeper(split=False, parts=(), gradients=lambda optimizer: {})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnginePlan(MeasurementPlan):
    """The layers of an engine's model on this rank. Keeps nothing of the engine alive.

    held: `id` of the parameter of each layer. find: gradients that the optimizer has now.
    """

    held: tuple[int, ...]
    split: bool
    owner: "weakref.ref[Any]"
    """The engine's optimizer, DeepSpeed's own."""
    find: Callable[[Any], Found]

    def fits(self, optimizer: object) -> bool:
        """Return True: the groups of the optimizer that is stepped come and go with each step."""
        return True

    def gradients(self, note_unsupported: Callable[[str], None]) -> list[torch.Tensor | None]:
        """Return the gradients [L] of this rank's partition; none, and a note, if not found."""
        try:
            found = self.find(self.owner())
        except _LAYOUT_ERRORS:
            note_unsupported(UNKNOWN_LAYOUT)
            found = {}
        gradients = [found.get(identity) for identity in self.held]
        return [None if each is None or not each.numel() else each for each in gradients]

    def weights(self) -> list[torch.Tensor]:
        """Return the whole weights where every rank keeps them; ZeRO gathers its own again."""
        owner = self.owner()
        if self.split or owner is None or not self.held:
            return []
        return [parameter.detach() for parameter in trained_by(owner)]


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


def make_engine_plan(engine: Any, label: str) -> MeasurementPlan:
    """Return what to measure; no layers, but the reason, where that is not known to be right."""
    stage = int(engine.zero_optimization_stage())
    reason = unsupported_by(engine)
    keeper, shares = _NOTHING, []
    if not reason:
        try:
            keeper = keeper_of(engine.optimizer, engine)
            shares = [_share(part, stage, split=keeper.split) for part in keeper.parts]
        except _LAYOUT_ERRORS:
            keeper, shares, reason = _NOTHING, [], UNKNOWN_LAYOUT
    share_of = {id(p.parameter): share for p, share in zip(keeper.parts, shares, strict=True)}
    elements = {id(part.parameter): part.elements for part in keeper.parts}
    named = name_parameters((part.parameter for part in keeper.parts), engine.module, {})
    return _assembled(
        engine,
        label,
        keeper,
        named=named,
        shares=[share_of[id(each.parameter)] for each in named],
        elements=[elements[id(each.parameter)] for each in named],
        strategy=f"deepspeed_zero{stage}",
        unsupported=(reason,) if reason else (),
    )


def _assembled(
    engine: Any,
    label: str,
    keeper: Keeper,
    *,
    named: Sequence[NamedParameter],
    shares: Sequence[Share],
    elements: Sequence[int],
    strategy: str,
    unsupported: tuple[str, ...],
) -> EnginePlan:
    marked = [_of_optimizer(share, label) for share in shares]
    distinct = tuple(dict.fromkeys(marked))
    rows = tuple(tuple(i for i, own in enumerate(marked) if own == share) for share in distinct)
    device = _device(engine)
    return EnginePlan(
        label=label,
        joint=False,
        signature=(),
        waiting=(),
        declared=declarations.generation,
        identities=frozenset(map(id, nn.Module.parameters(engine.module))),
        slots=(),
        plain=False,
        layers=tuple(
            Layer(name=each.name, share=distinct.index(share), elements=count)
            for each, share, count in zip(named, marked, elements, strict=True)
        ),
        places=tuple(range(len(named))),
        shares=distinct,
        rows_of_share=rows,
        device=device,
        compute_dtype=_compute_dtype(engine.module),
        strategy=strategy,
        reducers=EngineReducers(engine, keeper),
        unsupported=unsupported,
        held=tuple(id(each.parameter) for each in named),
        owner=weakref.ref(engine.optimizer),
        split=keeper.split,
        find=keeper.gradients,
    )


def _share(part: Part, stage: int, *, split: bool) -> Share:
    ranks = tuple(dist.get_process_group_ranks(part.group or dist.group.WORLD))
    spread = Spread.SPLIT if split else Spread.COPIED
    return (
        Grid(this_rank()).crossed_by(PlacementAxis(spread, ranks, f"deepspeed_zero{stage}")).share()
    )


def _of_optimizer(share: Share, label: str) -> Share:
    return share if not label else replace(share, optimizer=label)


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
