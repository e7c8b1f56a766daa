"""What is measured of an optimizer: its layers, their shares, and where its gradients lie."""

import hashlib
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mp_agent.probe.isolation import TensorRef, has_memory
from mp_agent.probe.optimizers.live_objects import LibraryOptimizer, LiveObjects
from mp_agent.probe.optimizers.parameter_names import (
    NamedParameter,
    computing_dtype,
    named_parameters,
    optimizer_parameters,
    outside_modules,
    sources_of,
    strip_wrappers,
)
from mp_agent.probe.placement import ParameterPlacement, Reducers, Survey, declarations
from mp_agent.records.schema import Layer, Share
from mp_agent.ring.interruptions import pass_on

PARTIAL_GRADIENT = "gradients with a partial placement"

_FLAT_NAME = "_flat_param"


@dataclass(frozen=True, slots=True)
class LayerSlot:
    """One layer: a parameter, or the part of FSDP1's flat parameter that is one's local shard."""

    name: str
    parameter: torch.Tensor
    part: slice | None = None

    @property
    def elements(self) -> int:
        """Elements on this rank."""
        if self.part is not None:
            return int(self.part.stop - self.part.start)
        return local_of(self.parameter.detach()).numel()

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's gradient as it is now, of the part alone."""
        gradient = self.parameter.grad
        if gradient is None or self.part is None:
            return gradient
        return gradient[self.part] if self.part.stop > self.part.start else None


def slots_of(named: NamedParameter) -> Iterator[LayerSlot]:
    """Yield the layers of a parameter: several if it is flat, without the padding between them.

    A flat parameter says of each of its tensors where its local shard lies (`_ShardParamInfo`).
    """
    parameter = named.parameter
    if not getattr(parameter, "_is_flat_param", False):
        yield LayerSlot(named.name, parameter)
        return
    flat: torch.Tensor = parameter
    prefix = named.name.removesuffix(_FLAT_NAME)
    if prefix == named.name:
        prefix = f"{named.name}."
    for name, shard in zip(flat._fqns, flat._shard_param_infos, strict=True):  # type: ignore[attr-defined]
        start = shard.offset_in_shard if shard.in_shard else 0
        length = shard.numel_in_shard if shard.in_shard else 0
        yield LayerSlot(strip_wrappers(f"{prefix}{name}"), parameter, slice(start, start + length))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; called without autograd, so `to_local` is a look-up."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def counting_changes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors for which torch counts what changes a tensor in place.

    FSDP2 adds to this rank's part of a gradient, which does not count for the whole, and what is
    done to the whole does not count for the part.
    """
    return (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,)


def change_count(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, as torch counts it."""
    return sum(each._version for each in counting_changes(tensor))


_FEW = 32


def few_elements(tensor: torch.Tensor, part: slice | None = None) -> torch.Tensor | None:
    """Return some elements from the middle of this rank's part; None of tensors of other kinds."""
    local = local_of(tensor)
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
        return None
    if not has_memory(local):
        return None
    if part is not None:
        if local.dim() != 1 or part.stop > local.numel():
            return None
        local = local[part]
    while local.dim() > 1 and local.numel() > _FEW and local.shape[0] > 1:
        local = local[local.shape[0] // 2]
    flat = local.reshape(-1)
    start = max(0, (flat.numel() - _FEW) // 2)
    return flat[start : start + _FEW]


def lies_like(gradient: DTensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient is laid out as its parameter: then it is shared out alike.

    Not so a gradient that autograd left partial, as those of replicated norms under sequence
    parallelism: its sum over ranks has not been taken, and no statistic of a part means much.
    """
    return isinstance(parameter, DTensor) and gradient.placements == parameter.placements


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasurementPlan:
    """The layers of one optimizer on this rank. Made once, and again when its groups change.

    label: of the optimizer, as in `Share`.
    of_run: whether the gradients are the run's, or a part of them.
    identities: `id` of each parameter of the optimizer; they live as long as the plan.
    slots: [L], in the order of `layers`. plain: every one is a whole parameter that lies here.
    rows_of_share: per share the rows [N] of its layers.
    """

    label: str
    of_run: bool
    signature: tuple[tuple[int, ...], ...]
    declared: int
    """Generation of the declarations that were known when the plan was made."""
    identities: frozenset[int]
    waiting: tuple[torch.Tensor, ...]
    """Parameters that hold no numbers yet: lazy ones, and those on the meta device."""
    frozen: tuple[torch.Tensor, ...] = ()
    """Parameters that are not trained, and are no layers; the digest of the weights covers them."""
    copies: tuple[torch.Tensor, ...] = ()
    """Parameters of the optimizer that are in no module: FP32 copies, which the script makes."""
    sources: tuple[TensorRef, ...] = ()
    """The parameters of the model that these are copies of; none where that is not known."""
    slots: tuple[LayerSlot, ...]
    plain: bool
    layers: tuple[Layer, ...]
    places: tuple[int, ...]
    """[L], ascending: where each layer is in the model."""
    shares: tuple[Share, ...]
    rows_of_share: tuple[tuple[int, ...], ...]
    device: torch.device
    compute_dtype: torch.dtype
    """Dtype of FSDP2's policy, else of most parameters of the model; autocast may override it."""
    strategy: str
    reducers: Reducers
    unsupported: tuple[str, ...]
    data_ranks: frozenset[int] = frozenset()
    """Ranks that train on data of their own, this one among them; empty where that is unknown."""
    zero_epsilons: tuple[tuple[str, str], ...] = ()
    """Class of the optimizer and epsilon, where the state's format rounds that to zero."""
    view: weakref.ref[LibraryOptimizer] | None = None
    """View of another library's optimizer, which may be called with gradients."""

    @property
    def used_sources(self) -> tuple[TensorRef, ...]:
        """The sources, if the script makes gradients of its copies of theirs."""
        return self.sources if any(each.grad is not None for each in self.copies) else ()

    @property
    def first_collective_in_backward(self) -> bool:
        """Whether ranks first wait for each other in backward; sharded ones do so in forward."""
        return not any(share.shard_count > 1 for share in self.shares)

    def fits(self, optimizer: Optimizer, *, whole: bool = False) -> bool:
        """Return whether the optimizer's groups are still those that the plan was made of.

        whole: not by the first and the last parameter of each alone, but by all of them.
        """
        groups = [group["params"] for group in optimizer.param_groups]
        return (
            self.signature == tuple([(id(p), len(p), *map(id, (*p[:1], *p[-1:]))) for p in groups])
            and self.declared == declarations.generation
            and all(map(_holds_nothing, self.waiting))
            and all(map(is_frozen, self.frozen))
            and not (whole and any([not self.identities.issuperset(map(id, g)) for g in groups]))
        )

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether `parameter` is one of the optimizer's."""
        return id(parameter) in self.identities

    def gradients(self, note_unsupported: Callable[[str], None]) -> list[torch.Tensor | None]:
        """Return the local gradients [L] as they are now; None where there is none to count."""
        view = None if self.view is None else self.view()
        if view is not None and view.given is not None:
            return [view.given.get(id(slot.parameter)) for slot in self.slots]
        if self.plain:
            return [slot.parameter.grad for slot in self.slots]
        found = [slot.gradient() for slot in self.slots]
        for row, gradient in enumerate(found):
            if isinstance(gradient, DTensor):
                counts = lies_like(gradient, self.slots[row].parameter)
                found[row] = gradient.to_local() if counts else None
                if not counts:
                    note_unsupported(PARTIAL_GRADIENT)
        return found

    def parameter_formats(self) -> Counter[torch.dtype]:
        """Return how many elements of each format the parameters have."""
        return elements_by_format(slot.parameter for slot in self.slots)

    def master_formats(self) -> Counter[torch.dtype]:
        """Return how many elements of each format the tensors have that parameters are copies of.

        None where the optimizer steps the parameters themselves.
        """
        return Counter()

    def gradient_formats(self) -> Counter[torch.dtype]:
        """Return how many elements of each format the gradients have as they are now."""
        return elements_by_format(slot.parameter.grad for slot in self.slots)

    def weights(self) -> list[torch.Tensor]:
        """Return the local part of each parameter, once: of the layers, then of frozen ones."""
        parameters = {id(slot.parameter): slot.parameter for slot in self.slots}
        parameters.update((id(parameter), parameter) for parameter in self.frozen)
        return [local_of(parameter.detach()) for parameter in parameters.values()]

    def by_share(self, gradients: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor]]:
        """Return gradients [L] as one list per share, absent ones left out."""
        if len(self.shares) == 1:
            return [[gradient for gradient in gradients if gradient is not None]]
        return [
            [gradient for row in rows if (gradient := gradients[row]) is not None]
            for rows in self.rows_of_share
        ]


def make_plan(
    optimizer: Optimizer,
    live: LiveObjects,
    root: nn.Module | None,
    ranks_in_run: int,
    label: str,
    *,
    joint: bool = False,
) -> MeasurementPlan:
    """Return what to measure of `optimizer`. Enters no collective."""
    survey = Survey(live.modules, root, ranks_in_run)
    parameters = tuple(optimizer_parameters(optimizer))
    waiting = tuple(filter(_holds_nothing, parameters))
    device = _main_device(parameters)
    measured: list[tuple[LayerSlot, ParameterPlacement, int]] = []
    unsupported: dict[str, None] = dict.fromkeys(["parameters without numbers"] if waiting else ())
    identities = frozenset(map(id, parameters))
    copies = outside_modules(parameters, root, live.modules)
    sources = sources_of(copies, live.modules, identities)
    named_all = named_parameters(optimizer, root, live.modules, sources)
    frozen = _never_trained(optimizer, [named.parameter for named in named_all])
    for named in named_all:
        if id(named.parameter) in frozen:
            continue
        if _holds_nothing(named.parameter):
            continue
        if named.parameter.device != device:
            unsupported["parameters on several devices"] = None
            continue
        try:
            verdict = survey.placement_of(named.name, named.parameter)
            slots = [] if verdict.share is None else list(slots_of(named))
            shown = [slot.elements for slot in slots]
        except Exception as error:
            pass_on(error)
            unsupported[f"parameters of type {type(named.parameter).__name__}"] = None
            continue
        if verdict.unsupported:
            unsupported[verdict.unsupported] = None
        elif shown:
            measured += [(slot, verdict, named.place) for slot in slots]
    shares_of_layers = _named_shares(
        [slot for slot, _, _ in measured],
        [verdict for _, verdict, _ in measured],
        [
            LayerSlot(each.name, each.parameter)
            for each in named_all
            if id(each.parameter) in frozen
        ],
        label,
        joint=joint,
    )
    shares = tuple(dict.fromkeys(shares_of_layers))
    rows_of_share = tuple(
        tuple(row for row, own in enumerate(shares_of_layers) if own == share) for share in shares
    )
    return MeasurementPlan(
        label=label,
        of_run=joint or not label,
        signature=signature_of(optimizer),
        waiting=waiting,
        frozen=tuple(each for each in frozen.values() if each.device == device),
        declared=declarations.generation,
        identities=identities,
        copies=tuple(copies) if sources else (),
        sources=tuple(map(TensorRef, sources)),
        slots=tuple(slot for slot, _, _ in measured),
        plain=all(
            slot.part is None and not isinstance(slot.parameter, DTensor) for slot, _, _ in measured
        ),
        layers=tuple(
            Layer(name=slot.name, share=shares.index(share), elements=slot.elements)
            for (slot, _, _), share in zip(measured, shares_of_layers, strict=True)
        ),
        places=tuple(place for _, _, place in measured),
        shares=shares,
        rows_of_share=rows_of_share,
        device=device,
        compute_dtype=fsdp_dtype(live.modules)
        or (computing_dtype(sources, live.modules) if _are_most(copies, parameters) else None)
        or _most_common_dtype(optimizer),
        strategy=_strategy(verdict for _, verdict, _ in measured),
        reducers=Reducers(live.modules, identities),
        unsupported=tuple(unsupported),
        data_ranks=max((v.data_ranks for _, v, _ in measured), key=len, default=frozenset()),
        zero_epsilons=zero_epsilons(optimizer),
        view=weakref.ref(optimizer) if isinstance(optimizer, LibraryOptimizer) else None,
    )


TENSORS_JUDGED_ALONE = 64
"""Of tensors that nothing explains: beyond so many, those whose names differ in numbers alone are
judged together, as the same matrices of all blocks; beyond so many of these, all are."""


def _named_shares(
    slots: Sequence[LayerSlot],
    verdicts: Sequence[ParameterPlacement],
    frozen: Sequence[LayerSlot],
    label: str,
    *,
    joint: bool,
) -> list[Share]:
    """Return the share of each layer, marked with its optimizer.

    Groups of which ranks are assumed to hold copies are named by their tensor and its shape, and
    those of which other ranks than a wrapper's may hold copies by their tensor: ranks that hold
    other ones (another pipeline stage) hold no copies. What is frozen here may be trained
    elsewhere, under the same name.
    """
    judged = [
        verdict.elsewhere or bool(verdict.share and verdict.share.assumed) for verdict in verdicts
    ]
    held = [slot for slot, own in zip(slots, judged, strict=True) if own]
    name_judged = _naming([slot.name for slot in (*held, *frozen)])
    names: dict[str, list[str]] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for slot in (*held, *frozen):
        name = name_judged(slot.name)
        names.setdefault(name, []).append(slot.name)
        shapes.setdefault(name, []).append(tuple(slot.parameter.shape))
    shares = []
    for slot, verdict in zip(slots, verdicts, strict=True):
        if verdict.share is None:
            continue
        group, name = verdict.share.group, name_judged(slot.name)
        if verdict.share.assumed:
            group = f"{group} {_digest(shapes[name])} {name}"
        elif verdict.elsewhere:
            group = f"{group} {_digest(names[name])} {name}"
        shares.append(replace(verdict.share, group=group, optimizer=label, joint=joint))
    return shares


def _digest(held: Sequence[object]) -> str:
    return hashlib.sha256(repr(sorted(map(repr, held))).encode()).hexdigest()[:8]


def _naming(names: Sequence[str]) -> Callable[[str], str]:
    """Return what gives the name under which what ranks hold of a layer is judged."""
    if len(names) <= TENSORS_JUDGED_ALONE:
        return str
    if len(set(map(_without_numbers, names))) <= TENSORS_JUDGED_ALONE:
        return _without_numbers
    return lambda name: "*"


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _strategy(verdicts: Iterable[ParameterPlacement]) -> str:
    """Return what splits and copies the model, such as ddp or fsdp2+tp; none, mixed if only partly.

    The parameters that nothing splits or copies decide between the last two.
    """
    kinds = {verdict.sources for verdict in verdicts}
    sources = sorted(frozenset().union(*kinds))
    if not sources:
        return "none"
    return "mixed" if frozenset() in kinds else "+".join(sources)


def fsdp_dtype(modules: Iterable[nn.Module]) -> torch.dtype | None:
    """Return the dtype in which FSDP2 computes, as far as its internals show."""
    for module in modules:
        if not issubclass(type(module), FSDPModule):
            continue  # others may answer to every name
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        dtype = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


_ROUNDS_TO_ZERO = 2.0**-25
"""The largest number that FP16 rounds to zero."""


def zero_epsilons(optimizer: Optimizer) -> tuple[tuple[str, str], ...]:
    """Return class and epsilon of groups of torch's optimizers that divide by a state in FP16.

    Their state takes the format of the parameters. Fused kernels add epsilon in FP32, and what
    optimizers of other libraries do is not known.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return ()
    found: dict[tuple[str, str], None] = {}
    for group in optimizer.param_groups:
        epsilon = group.get("eps")
        in_fp16 = any(each.dtype is torch.float16 for each in group["params"])
        is_zero = isinstance(epsilon, float) and epsilon <= _ROUNDS_TO_ZERO
        if in_fp16 and is_zero and not group.get("fused"):
            found[type(optimizer).__name__, f"{epsilon:g}"] = None
    return tuple(found)


def _most_common_dtype(optimizer: Optimizer) -> torch.dtype:
    elements: Counter[torch.dtype] = Counter()
    for parameter in optimizer_parameters(optimizer):
        if not is_lazy(parameter):
            elements[parameter.dtype] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else torch.float32


def _main_device(parameters: Iterable[torch.Tensor]) -> torch.device:
    """Return the device that holds most elements: a scalar on the host decides nothing."""
    elements: Counter[torch.device] = Counter()
    for parameter in parameters:
        if not _holds_nothing(parameter):
            elements[parameter.device] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else torch.device("cpu")


def elements_by_format(tensors: Iterable[torch.Tensor | None]) -> Counter[torch.dtype]:
    """Return how many elements of each format some tensors have; None has none."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor is not None:
            elements[tensor.dtype] += tensor.numel()
    return elements


def _holds_nothing(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has no numbers yet."""
    return is_lazy(parameter) or parameter.device.type == "meta"


def _are_most(some: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> bool:
    return 2 * sum(each.numel() for each in some) > sum(
        each.numel() for each in of if not is_lazy(each)
    )


def _never_trained(
    optimizer: Optimizer, parameters: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the frozen parameters, by `id`; not those that were trained, as their state shows.

    What is frozen and unfrozen by turns, layer by layer, so makes no other plan each time. An
    optimizer that holds nothing else is measured as if it were trained.
    """
    state = getattr(optimizer, "state", {})
    frozen = {id(each): each for each in parameters if is_frozen(each) and each not in state}
    return frozen if len(frozen) < len(parameters) else {}


def is_frozen(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is not trained; a script's own copies may have gradients set."""
    return not parameter.requires_grad and parameter.grad is None


def signature_of(optimizer: Optimizer) -> tuple[tuple[int, ...], ...]:
    """Return what changes when the optimizer's groups do, or the first or last of their parameters.

    Scripts that prune and add rows give each group a new parameter in the same list.
    """
    held = [group["params"] for group in optimizer.param_groups]
    return tuple([(id(each), len(each), *map(id, (*each[:1], *each[-1:]))) for each in held])
