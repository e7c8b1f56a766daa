"""Megatron-Core: its optimizers as they step, what is measured of them, and its schedules' losses.

A schedule divides each loss by the number of micro-batches, may free it before its backward, and
multiplies it by the loss scale just before. So its value is taken as the forward pass returns it.

Ranks that reduce a gradient together are those of the bucket that the wrapper has put it in. Ranks
that split a tensor are those of the optimizer's tensor parallel group, and for experts those that
Megatron's `parallel_state` names; it also answers where a model has no wrapper of Megatron's. A
parameter that no attribute marks as split is the same on all ranks of the tensor parallel group.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mp_agent.probe.engines.megatron_gradients import (
    BegunReductions,
    GradientPart,
    Hold,
    chunks_of,
    finder,
    leaves_of,
    masters_of,
    model_parameters,
    named_by_chunks,
    parts_of,
    torch_optimizers,
)
from mp_agent.probe.optimizers import live_objects
from mp_agent.probe.optimizers.engine import (
    LAYOUT_ERRORS,
    EngineLayer,
    EnginePlan,
    EngineResult,
    EngineStep,
    make_engine_plan,
)
from mp_agent.probe.placement import Reducers, megatron, survey, this_rank
from mp_agent.probe.placement.axes import Grid, PlacementAxis, Spread
from mp_agent.probe.scalars import Scalar, scalar_of, snapshot_of
from mp_agent.records.schema import Share


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


class OptimizerReader:
    """Implements `optimizers.engine.OwningEngine` for a `MegatronOptimizer`, held weakly."""

    def __init__(self, optimizer: Any, begun: BegunReductions | None = None) -> None:
        """Read nothing yet. begun: the reductions since the last step, where they are followed."""
        self._optimizer = weakref.ref(optimizer)
        self._begun = begun
        self.result: object = None
        """What its `step` has returned: success, norm before clipping, number of zeros."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The first optimizer that is stepped within it."""
        return next(iter(torch_optimizers(self._optimizer())), None)

    @property
    def scaler_name(self) -> str:
        """Megatron's own scaler; empty without one."""
        scaler = self._scaler()
        return "" if scaler is None else type(scaler).__name__

    def make_plan(self, label: str) -> EnginePlan:
        """Return what to measure of the optimizer's model."""
        return make_plan(self._optimizer(), label, self._begun)

    def begin(self) -> EngineStep:
        """Return the loss scale in force, by which the gradients are multiplied."""
        scale = self._scale()
        return EngineStep(loss_scale=scale, gradient_scale=scale, completed=None)

    def end(self) -> EngineResult:
        """Return whether the step was skipped, and the clipping that it did."""
        success, norm = _outcome(self.result)
        limit = getattr(getattr(self._optimizer(), "config", None), "clip_grad", None)
        clips = norm is not None and isinstance(limit, int | float) and limit > 0
        return EngineResult(
            skipped=None if success is None else not success,
            clip_max_norm=float(limit) if clips and limit else None,
            norm=norm,
        )

    def _scaler(self) -> Any:
        scalers = (getattr(leaf, "grad_scaler", None) for leaf in leaves_of(self._optimizer()))
        return next((scaler for scaler in scalers if scaler is not None), None)

    def _scale(self) -> Scalar | None:
        scaler = self._scaler()
        return None if scaler is None else snapshot_of(scaler.scale)


def _outcome(result: object) -> tuple[bool | None, Scalar | None]:
    """Return success and norm of what `step` returned; None for what is not known."""
    if isinstance(result, bool):
        return result, None
    if not isinstance(result, tuple) or len(result) < 2:
        return None, None
    success, norm = result[:2]
    return bool(success) if isinstance(success, bool | int) else None, scalar_of(norm)


class BucketGroups:
    """The group of buckets in which each parameter's gradient is reduced, by Megatron's wrapper."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._by_parameter: dict[int, Any] = {}
        for module in modules:
            groups = vars(module).get("param_to_bucket_group")
            if isinstance(groups, dict):
                self._by_parameter.update((id(each), group) for each, group in groups.items())

    def reducing(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the ranks that reduce a gradient together; none where they are not known."""
        group = self._by_parameter.get(id(parameter))
        for name in ("intra_distributed_optimizer_instance_group", "data_parallel_group"):
            if (found := getattr(group, name, None)) is not None:
                return ranks_of(found)
        return ()

    def reduced_apart(self, parts: Iterable[GradientPart]) -> list[Any]:
        """Return the groups in which several ranks get slices of these parts' gradients."""
        sliced = [part.parameter for part in parts if part.hold is Hold.SLICED]
        found = {
            id(group): group
            for each in sliced
            if len(self.reducing(each)) > 1
            for group in (self._by_parameter.get(id(each)),)
        }
        return [*found.values()]

    def instances(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the ranks that hold the same slice, of several distributed optimizers."""
        group = self._by_parameter.get(id(parameter))
        return ranks_of(getattr(group, "inter_distributed_optimizer_instance_group", None))


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group; none for None."""
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def axes_of(part: GradientPart, buckets: BucketGroups) -> list[PlacementAxis]:
    """Return the axes of a part; those along which there is one rank are left out."""
    found = [_tensor_axis(part), *_reduction_axes(part, buckets)]
    return [axis for axis in found if axis is not None and len(axis.ranks) > 1]


def share_of(part: GradientPart, axes: Sequence[PlacementAxis]) -> Share:
    """Return this rank's share of a parameter of which it steps a part."""
    parameter = part.parameter
    if isinstance(parameter, DTensor):
        return survey.grid_of(parameter, this_rank(), fsdp=True).share()
    grid = Grid(this_rank())
    for axis in axes:
        grid = grid.crossed_by(axis)
    return grid.share()


def strategy_of(axes: Iterable[PlacementAxis], parameters: Iterable[torch.Tensor]) -> str:
    """Return what splits and copies the model, such as dp+tp or pp+zero1; none for one rank.

    dp: copies. zero1, layer_wise: parts of the optimizer. pp, cp, ep: stages, contexts, experts.
    """
    kinds = {axis.source for axis in axes} | set(_model_parallel())
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        kinds.add("fsdp2")
    return "+".join(sorted(kinds)) or "none"


def _tensor_axis(part: GradientPart) -> PlacementAxis | None:
    parameter: Any = part.parameter
    if megatron.is_expert(parameter):
        ranks = megatron.expert_shards()
    elif hasattr(part.leaf, "tp_group"):
        ranks = ranks_of(part.leaf.tp_group)
    else:
        ranks = megatron.dense_shards()
    if not megatron.is_tensor_parallel(parameter):
        return PlacementAxis(Spread.COPIED, ranks, "tp") if ranks else None
    dimension = getattr(parameter, "partition_dim", -1)
    known = isinstance(dimension, int) and dimension >= 0
    return PlacementAxis(Spread.SPLIT, ranks, "tp", str(dimension) if known else "")


def _reduction_axes(part: GradientPart, buckets: BucketGroups) -> Iterator[PlacementAxis]:
    """Yield the axes along which gradients are reduced."""
    parameter, hold = part.parameter, part.hold
    if isinstance(parameter, DTensor):
        return
    ranks = buckets.reducing(parameter) or megatron.copies(parameter)
    if hold is Hold.COPIED:
        yield PlacementAxis(Spread.COPIED, ranks, hold.value)
        return
    yield PlacementAxis(Spread.SPLIT, ranks, hold.value, "0")
    yield PlacementAxis(Spread.COPIED, buckets.instances(parameter), Hold.COPIED.value)


_SIZES: Mapping[str, str] = {
    "pp": "get_pipeline_model_parallel_world_size",
    "cp": "get_context_parallel_world_size",
    "ep": "get_expert_model_parallel_world_size",
}


def _model_parallel() -> Iterator[str]:
    """Yield the kinds of model parallelism that Megatron's global groups have several ranks of."""
    groups = sys.modules.get("megatron.core.parallel_state")
    for kind, name in _SIZES.items():
        try:
            several = getattr(groups, name)() > 1
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):
            continue  # not initialised
        if several:
            yield kind


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
    apart: list[Any]
    """The groups of buckets of which each rank steps a slice."""


class DataParallelReducers(Reducers):
    """Megatron's wrapper reduces gradients where all ranks have them, which these show.

    Slices show nothing: of them is known whether a reduction has begun since the last step.
    """

    def __init__(
        self, *, copied: bool, apart: Iterable[Any] = (), begun: BegunReductions | None = None
    ) -> None:
        """Keep none of them alive. apart: the groups of buckets whose slices ranks step."""
        self._copied = copied
        self._apart = [weakref.ref(group) for group in apart]
        self._begun = begun
        super().__init__((), ())
        self.any = copied or bool(self._apart)

    def reduced(self) -> bool | None:
        """Return whether ranks step with what they have reduced; None where that is not known."""
        if self._copied:
            return True
        alive = [group for ref in self._apart if (group := ref()) is not None]
        return None if self._begun is None or self._begun.have_all(alive) else False


def make_plan(optimizer: Any, label: str, begun: BegunReductions | None = None) -> EnginePlan:
    """Return what to measure; no layers, but the reason, where that is not known to be right."""
    reason = _unsupported_by(optimizer)
    strategy = "megatron_fsdp" if reason == FULLY_SHARDED else "none"
    measured = _Measured([], [], [], [], strategy, announced=False, apart=[])
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
            copied=bool(parameters) and all(part.hold is Hold.COPIED for part in measured.parts),
            apart=measured.apart,
            begun=begun,
        ),
        data_ranks=megatron.data_ranks(),
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
    masters, apart = list(masters_of(optimizer)), buckets.reduced_apart(parts)
    return _Measured(parts, layers, chunks, masters, strategy, announced, apart)


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
