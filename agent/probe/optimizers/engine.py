"""Engines that step with their own gradients: their interface, and plans of what they hold.

The interface to a framework that steps optimizers itself, with its own gradients.
Such an engine hands the optimizer flat parts of master weights, clips and unscales in between, and
skips steps. It is asked, through this interface, before and after each step of its own.

The measurement plan of an engine's model, whose gradients are kept apart from its parameters.
An engine keeps the gradients, or this rank's parts of them, in its own buffers. It says which
part of which parameter this rank steps, and finds the gradients each time that they are measured.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.optimizers.parameter_names import NamedParameter, unheld_gradients
from mp_agent.probe.optimizers.plan import MeasurementPlan, elements_by_format, local_of
from mp_agent.probe.placement import Reducers, declarations
from mp_agent.probe.scalars import Scalar
from mp_agent.records.schema import Layer, Share


class Engine(Protocol):
    """An engine that is about to step, or has stepped. No method enters a collective."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that it steps; None when it has none."""

    @property
    def scaler_name(self) -> str:
        """The class that scales the loss; empty when nothing does."""

    def begin(self) -> "EngineStep":
        """Return what is known before a step."""

    def end(self) -> "EngineResult":
        """Return what became of the step."""


@runtime_checkable
class OwningEngine(Engine, Protocol):
    """An engine that keeps its own gradients, and makes the plan of them."""

    def make_plan(self, label: str) -> MeasurementPlan:
        """Return what to measure, under the names of the model's own parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """What is known of an engine's step before it.

    loss_scale: of its scaler; None where none is in use.
    gradient_scale: by which the gradients are still scaled; None where they are not.
    completed: steps before this one, by the engine's own count; None where it has none.
    """

    loss_scale: Scalar | None
    gradient_scale: Scalar | None
    completed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """What became of an engine's step.

    skipped: None where only a missing step of the optimizer shows it.
    clip_max_norm: None where gradients are not clipped.
    norm: of the unscaled gradients of the whole model; None where each rank's own is enough.
    """

    skipped: bool | None
    clip_max_norm: float | None
    norm: Scalar | None


Found: TypeAlias = Mapping[int, torch.Tensor]
"""Gradients by the `id` of the parameter of which they are."""

LAYOUT_ERRORS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading an engine raises that is built otherwise than the releases that are known."""


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """A parameter of an engine's model, and the part of it that this rank steps.

    elements: of that part; 0 where other ranks hold the whole parameter.
    """

    named: NamedParameter
    elements: int
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnginePlan(MeasurementPlan):
    """The layers of an engine's model on this rank. Keeps nothing of the engine alive.

    held: `id` of the parameter of each layer. find: gradients that the owner has now. whole: the
    parameters that every rank keeps whole, none where the engine gathers them after each step.
    """

    held: tuple[int, ...]
    owner: "weakref.ref[Any]"
    """What the engine keeps its gradients in: a separate optimizer."""
    find: Callable[[Any], Found]
    whole: Callable[[Any], Iterable[torch.Tensor]]
    unknown_layout: str
    """How to call what is not measured where the gradients are not found."""
    elements_of_formats: Counter[torch.dtype]
    """Elements of the model's parameters, by their format."""
    elements_of_masters: Counter[torch.dtype]
    """Elements of the tensors that are stepped in their place, by their format."""
    announces_reduction: bool
    """Whether the engine announces each rank's own gradients before they are reduced."""
    root: "weakref.ref[nn.Module] | None"
    """The outermost module of the model; None where nothing is measured in its forward pass."""

    def fits(self, optimizer: object, *, whole: bool = False) -> bool:
        """Return True: the groups of the optimizer that is stepped come and go with each step."""
        return True

    def gradients(self, note_unsupported: Callable[[str], None]) -> list[torch.Tensor | None]:
        """Return the gradients [L] of this rank's parts; none, and a note, if not found."""
        try:
            found = self.find(self.owner())
        except LAYOUT_ERRORS:
            note_unsupported(self.unknown_layout)
            found = {}
        gradients = [found.get(identity) for identity in self.held]
        return [None if each is None or not each.numel() else each for each in gradients]

    def weights(self) -> list[torch.Tensor]:
        """Return the weights that every rank keeps whole, and this rank's parts of DTensors."""
        owner = self.owner()
        if owner is None or not self.held:
            return []
        return [local_of(parameter.detach()) for parameter in self.whole(owner)]

    def parameter_formats(self) -> Counter[torch.dtype]:
        """Return how many elements of each format the model's parameters have."""
        return self.elements_of_formats

    def master_formats(self) -> Counter[torch.dtype]:
        """Return how many elements of each format the masters on this rank have."""
        return self.elements_of_masters

    def gradient_formats(self) -> Counter[torch.dtype]:
        """Return how many elements of each format the gradients have as they are now."""
        return elements_by_format(self.gradients(_ignore))


def make_engine_plan(
    layers: Sequence[EngineLayer],
    *,
    label: str,
    owner: object,
    find: Callable[[Any], Found],
    whole: Callable[[Any], Iterable[torch.Tensor]],
    identities: Collection[int],
    device: torch.device,
    compute_dtype: torch.dtype,
    strategy: str,
    reducers: Reducers,
    data_ranks: Collection[int],
    unsupported: str,
    unknown_layout: str,
    masters: Iterable[torch.Tensor] = (),
    announces_reduction: bool = False,
    root: nn.Module | None = None,
) -> EnginePlan:
    """Return the plan of an engine whose optimizer is called `label`.

    unsupported: why there are no layers; empty where there are. For the others see `EnginePlan`.
    """
    shares = [_of_optimizer(layer.share, label) for layer in layers]
    distinct = tuple(dict.fromkeys(shares))
    rows = tuple(tuple(i for i, own in enumerate(shares) if own == share) for share in distinct)
    return EnginePlan(
        label=label,
        of_run=not label,
        signature=(),
        waiting=(),
        declared=declarations.generation,
        identities=frozenset(identities),
        slots=(),
        plain=False,
        layers=tuple(
            Layer(name=each.named.name, share=distinct.index(share), elements=each.elements)
            for each, share in zip(layers, shares, strict=True)
        ),
        places=tuple(range(len(layers))),
        shares=distinct,
        rows_of_share=rows,
        device=device,
        compute_dtype=compute_dtype,
        strategy=strategy,
        reducers=reducers,
        data_ranks=frozenset(data_ranks),
        unsupported=(unsupported,) if unsupported else (),
        held=tuple(id(each.named.parameter) for each in layers),
        owner=weakref.ref(owner),
        find=find,
        whole=whole,
        unknown_layout=unknown_layout,
        elements_of_formats=elements_by_format(each.named.parameter for each in layers),
        elements_of_masters=elements_by_format(masters),
        announces_reduction=announces_reduction,
        root=None if root is None else weakref.ref(root),
    )


def unheld_by_engines(plans: Sequence[MeasurementPlan]) -> list[tuple[str, nn.Parameter]]:
    """Return parameters of the engines' models that have gradients and that none of them steps.

    None where an engine is not measured: what it steps is not known.
    """
    if not all(isinstance(plan, EnginePlan) and plan.held for plan in plans):
        return []
    engines = [plan for plan in plans if isinstance(plan, EnginePlan)]
    held = {identity for plan in engines for identity in plan.held}
    roots = [None if plan.root is None else plan.root() for plan in engines]
    first = roots[0] if roots else None
    return unheld_gradients([root for root in roots if root is not None], held, first)


def _of_optimizer(share: Share, label: str) -> Share:
    return share if not label else replace(share, optimizer=label)


def _ignore(feature: str) -> None:
    pass
