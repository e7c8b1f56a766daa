"""Which parameters the optimizers' steps change.

A few elements of some parameters are kept for some steps, and then compared. What has a gradient, a
learning rate and a step in between has changed by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mp_agent.probe import accelerator
from mp_agent.probe.isolation import TensorRef
from mp_agent.probe.optimizers.plan import (
    LayerSlot,
    MeasurementPlan,
    few_elements,
    lies_like,
)
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.roles import WatchedOptimizer
from mp_agent.probe.recording.parameter_census import Looks, NamesOnTheWay, as_scalar
from mp_agent.probe.recording.run_facts import ObservedTraits
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import ROUNDED_RATIO, ROUNDING_LOSS, UNCHANGED_PARAMETERS
from mp_agent.records.schema import UNCHANGED

PARAMETERS_AT_FIRST = 128
PARAMETERS_AT_MOST = 24
"""Looked at per optimizer at later looks; other ones each time."""
_ELEMENTS_AT_LEAST = 8
"""With fewer that were to change, chance may bring all of them back to where they were."""
_TINY = 1e-300
_EXPECTED_AT_LEAST = 8.0
"""Of fewer elements none may change by chance, with stochastic rounding too."""
_UPDATES_ADDED = 2.0
"""What the updates of nine steps add up to, at least, in sizes of one: Adam's average of gradients
that are noise is a quarter of one of them, and its sign lasts for about as long. Momentum does not
divide by the length of what it averages."""
_SPACINGS = 4.0
"""Size of an update, in spacings of the weight's format, that rounding cannot hide."""


class WeightChanges:
    """Compares a few elements of the run's parameters from look to look."""

    def __init__(self, registry: OptimizerRegistry, traits: ObservedTraits) -> None:
        self.looks = Looks()
        self._registry = registry
        self._samples: list[_Sample] = []
        self._taken = 0
        self._names = NamesOnTheWay(traits, UNCHANGED)

    def compare(self, step: OpenStep) -> None:
        """Add to a step how many of those that were kept last have not changed."""
        self._names.note()
        if self._samples:
            self.looks.begin()
            samples, self._samples = self._samples, []
            self._add_verdicts(step, samples)
            self.looks.end(step.sequence)

    def _add_verdicts(self, step: OpenStep, samples: Sequence["_Sample"]) -> None:
        found = [(each, each.verdict()) for each in samples if each.is_due and each.is_there()]
        if not found:
            return
        device = found[0][1].unchanged_T.device
        together = torch.cat([verdict.unchanged_T.to(device) for _, verdict in found])
        step.scalars[UNCHANGED_PARAMETERS] = as_scalar(together.sum())
        rounded, all_16, *weighed = torch.stack(
            [verdict.of_16_bits_C.to(device) for _, verdict in found]
        ).sum(dim=0)
        step.scalars[ROUNDED_RATIO] = as_scalar(rounded / all_16)  # NaN, absent, without any
        step.scalars[ROUNDING_LOSS] = as_scalar(_rounding_loss(*weighed))
        names = [name for sample, _ in found for name in sample.names]
        self._names.send(names, together)

    def sample(self, step: OpenStep, plans: Sequence[tuple[MeasurementPlan, Scalar]]) -> None:
        """Keep elements of the parameters whose gradients were measured, to compare them soon."""
        self.looks.begin()
        watched = {each.label: each for each in self._registry.known if not each.managed}
        for plan, inverse_scale in plans:
            if plan.of_run and plan.view is None and plan.label in watched:
                sample = _sample(step, plan, watched[plan.label], inverse_scale, self._taken)
                if sample is not None:
                    self._samples.append(sample)
        self._taken += 1
        self.looks.end(step.sequence, soon=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Verdict:
    """unchanged_T: whether each parameter is as it was though it was to change, on its device.

    of_16_bits_C: of the elements in at most 16 bits that were to change by however little, those
    that did not, and all of them; then those that did, and how many were to, had rounding lost
    nothing, each times its share, and the latter times the squares of the shares.
    """

    unchanged_T: torch.Tensor
    of_16_bits_C: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Element:
    """Where a few elements of a parameter are. Does not keep it alive."""

    parameter: TensorRef
    part: slice | None

    def now(self) -> torch.Tensor | None:
        """Return them as they are; None of a parameter that is gone."""
        parameter = self.parameter()
        return None if parameter is None else few_elements(parameter.detach(), self.part)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """N elements of T parameters of one optimizer before it stepped.

    stepped: the same elements of the optimizer's own tensors, where the script copies these to the
    model: how much they have changed is what the model's were to. of_TN: which elements are of
    which parameter. sizes_N: how much the step was to change each, at least; 0 for those without
    gradient. spacings_N: the spacing of its format there. added_N: how many such sizes the updates
    of nine steps add up to, at least; 0 for those that are stepped in more than 16 bits. share_N:
    how many elements of its parameter each represents.
    """

    step: OpenStep
    watched: WatchedOptimizer
    in_pass: int
    names: Sequence[str]
    elements: Sequence[_Element]
    weights_N: torch.Tensor
    stepped: tuple[Sequence[_Element], torch.Tensor] | None
    sizes_N: torch.Tensor
    spacings_N: torch.Tensor
    added_N: torch.Tensor
    share_N: torch.Tensor
    of_TN: torch.Tensor

    @property
    def is_due(self) -> bool:
        """Whether the optimizer has stepped since, and the script was not to skip that."""
        guarded = self.step.scalars.get("guard_skip_update", 0.0)
        skipped = self.step.scalars.get("skipped", 0.0)
        moved = self.watched.stepped_in_pass != self.in_pass
        moved &= not self.watched.searches
        return moved and not guarded and (isinstance(skipped, torch.Tensor) or not skipped)

    def is_there(self) -> bool:
        """Return whether all parameters still exist, as they were."""
        pairs = [(self.elements, self.weights_N)]
        pairs += [] if self.stepped is None else [self.stepped]
        for elements, before_N in pairs:
            now = [each.now() for each in elements]
            if sum(0 if one is None else one.numel() for one in now) != before_N.numel():
                return False
        return True

    def verdict(self) -> _Verdict:
        """Return what has changed since."""
        now_N = _now(self.elements)
        sizes_N = self.sizes_N * _coefficient(self.step.scalars)
        if self.stepped is not None:
            elements, before_N = self.stepped
            # A copy that has moved by one spacing rounds to another number.
            sizes_N = _SPACINGS * (_now(elements) - before_N).abs()
        skipped = self.step.scalars.get("skipped", 0.0)
        if isinstance(skipped, torch.Tensor):
            sizes_N = sizes_N * (skipped.to(sizes_N.device, non_blocking=True) == 0)
        same_N = now_N == self.weights_N
        due_TN = self.of_TN & (sizes_N >= _SPACINGS * self.spacings_N) & (sizes_N > 0)
        magnitudes_N = self.weights_N.abs()
        # What a script clamps, or sets to zero, stays at that number.
        high_T = magnitudes_N.where(due_TN, -torch.inf).amax(dim=1)
        low_T = magnitudes_N.where(due_TN, torch.inf).amin(dim=1)
        enough_T = due_TN.sum(dim=1) >= _ELEMENTS_AT_LEAST
        kept_T = (same_N | ~due_TN).all(dim=1)
        active_N = (self.added_N > 0.0) & (sizes_N > 0)
        expected_N = (self.added_N * sizes_N / self.spacings_N).clamp(max=1.0).where(active_N, 0.0)
        counted = (
            (active_N & same_N).sum(),
            active_N.sum(),
            (self.share_N * (active_N & ~same_N)).sum(),
            (self.share_N * expected_N).sum(),
            (self.share_N.square() * expected_N).sum(),
        )
        return _Verdict(
            unchanged_T=kept_T & enough_T & (high_T > low_T),
            of_16_bits_C=torch.stack([each.double() for each in counted]),
        )


def _rounding_loss(
    changed: torch.Tensor, expected: torch.Tensor, squares: torch.Tensor
) -> torch.Tensor:
    """Return the share of what was to change that did not; NaN where too little was to.

    Elements represent different numbers of others: Kish's effective size of such a sample.
    """
    share = (1.0 - changed / expected).clamp(min=0.0)
    return share.where(expected.square() / squares >= _EXPECTED_AT_LEAST, nan)


def _now(elements: Sequence[_Element]) -> torch.Tensor:
    return _joined([one for each in elements if (one := each.now()) is not None])


def _coefficient(scalars: dict[str, Scalar]) -> Scalar:
    """Return by what clipping multiplied the gradients of a step."""
    limit, norm = scalars.get("clip_max_norm"), scalars.get("clip_norm")
    if limit is None or norm is None:
        return 1.0
    ratio = torch.as_tensor(limit / (norm + 1e-6)).clamp(max=1.0)
    return scalar_of(ratio) or 0.0 if accelerator.is_on_host(ratio.device) else ratio


def _sample(
    step: OpenStep,
    plan: MeasurementPlan,
    watched: WatchedOptimizer,
    inverse_scale: Scalar,
    number: int,
) -> _Sample | None:
    """Return elements of some parameters that have gradients, other ones for each `number`."""
    optimizer = watched.optimizer
    if optimizer is None:
        return None
    groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    models = _models(plan)
    at_most = PARAMETERS_AT_MOST if number else PARAMETERS_AT_FIRST
    # Neighbors, of which there are matrices and biases: every other slot may be one of these alone.
    start = number * at_most % (len(plan.slots) or 1)
    parts: list[_Part] = []
    for slot in [*plan.slots[start:], *plan.slots[:start]][:at_most]:
        group = groups.get(id(slot.parameter), {})
        state = optimizer.state.get(slot.parameter, {})
        part = _part(slot, group, state, models.get(id(slot.parameter)))
        if part is not None and part.weights.device == plan.device:
            parts.append(part)
    if not parts:
        return None
    weights_N = _joined([each.weights for each in parts])
    device = weights_N.device
    lengths = torch.tensor([each.weights.numel() for each in parts], device="cpu")
    indices = torch.arange(len(parts), device="cpu")
    of_TN = indices.repeat_interleave(lengths) == indices[:, None]
    numbers_TC = torch.tensor([each.numbers for each in parts], dtype=torch.float64, device="cpu")
    numbers_CN = accelerator.sent(numbers_TC.repeat_interleave(lengths, dim=0).T, device)
    rates_N, epsilons_N, precisions_N, smallest_N, added_N, share_N = numbers_CN
    for place, part in enumerate(parts):
        if isinstance(part.rate, torch.Tensor):
            rates_N = rates_N.where(~accelerator.sent(of_TN[place], device), part.rate.double())
    return _Sample(
        step=step,
        watched=watched,
        in_pass=watched.stepped_in_pass,
        names=[each.name for each in parts],
        elements=[each.element for each in parts],
        weights_N=weights_N,
        stepped=_stepped(parts),
        sizes_N=_sizes(parts, rates_N, epsilons_N, inverse_scale),
        spacings_N=(weights_N.abs() * precisions_N).maximum(smallest_N),
        added_N=added_N,
        share_N=share_N,
        of_TN=accelerator.sent(of_TN, device),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some elements of a parameter, and the numbers by which it is about to be stepped.

    own, own_weights: the same of the optimizer's tensor, where that is a copy. added, share: as of
    a sample.
    """

    name: str
    element: _Element
    own: _Element
    weights: torch.Tensor
    own_weights: torch.Tensor
    gradient: torch.Tensor
    second_moment: torch.Tensor | None
    rate: Scalar
    epsilon: float
    """Of an update by the gradient divided by its usual size; -1 of others."""
    added: float
    share: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """Rate, epsilon, relative spacing and smallest number of the format, `added`, `share`."""
        info = torch.finfo(self.weights.dtype)
        rate = nan if isinstance(self.rate, torch.Tensor) else self.rate
        return rate, self.epsilon, info.eps, info.tiny, self.added, self.share


def _part(slot: LayerSlot, group: Any, state: Any, model: torch.Tensor | None) -> _Part | None:
    """Return some elements of a layer; None of tensors of other kinds, and without a rate."""
    parameter, gradient = slot.parameter, slot.parameter.grad
    rate = scalar_of(group.get("lr"))
    if gradient is None or rate is None or (isinstance(rate, float) and rate <= 0.0):
        return None
    if isinstance(gradient, DTensor) and not lies_like(gradient, parameter):
        return None
    shown = parameter if model is None else model
    found = [few_elements(each.detach(), slot.part) for each in (shown, parameter, gradient)]
    weights, own, slope = found
    if weights is None or own is None or slope is None:
        return None
    if not slope.shape == weights.shape == own.shape or not weights.is_floating_point():
        return None
    if not weights.numel():  # the shard of a rank that holds none
        return None
    moment = state.get("exp_avg_sq")
    moment = few_elements(moment, slot.part) if isinstance(moment, torch.Tensor) else None
    if moment is not None and (moment.shape != slope.shape or moment.device != slope.device):
        moment = None
    epsilon = group.get("eps", 0.0) if "betas" in group else -1.0
    factor = group.get("d", 1.0)  # of Prodigy and D-Adaptation
    return _Part(
        name=slot.name,
        element=_Element(TensorRef(shown), slot.part),
        own=_Element(TensorRef(parameter), slot.part),
        weights=weights,
        own_weights=own,
        gradient=slope,
        second_moment=moment,
        rate=rate * factor if isinstance(factor, float) else rate,
        epsilon=float(epsilon) if isinstance(epsilon, float | int) else 0.0,
        added=_updates_added(group) if model is None and weights.element_size() <= 2 else 0.0,
        share=_elements(shown, slot.part) / weights.numel(),
    )


def _elements(parameter: torch.Tensor, part: slice | None) -> int:
    return parameter.numel() if part is None else part.stop - part.start


def _updates_added(group: Any) -> float:
    momentum = group.get("momentum", 0.0)
    known = isinstance(momentum, float | int) and 0.0 <= momentum < 1.0
    return _UPDATES_ADDED / (1.0 - momentum) if known else _UPDATES_ADDED


def _stepped(parts: Sequence[_Part]) -> tuple[Sequence[_Element], torch.Tensor] | None:
    """Return the elements that an optimizer steps, as they are, if the model's are others."""
    if all(part.own.parameter() is part.element.parameter() for part in parts):
        return None
    return [part.own for part in parts], _joined([part.own_weights for part in parts])


def _models(plan: MeasurementPlan) -> dict[int, torch.Tensor]:
    """Return the model's parameters that an optimizer's own tensors are copied to, by `id`."""
    sources = [source() for source in plan.used_sources]
    if [None if each is None else each.shape for each in sources] != [c.shape for c in plan.copies]:
        return {}
    pairs = zip(plan.copies, sources, strict=True)
    return {id(copy): source for copy, source in pairs if source is not None}


def _sizes(
    parts: Sequence[_Part], rates_N: torch.Tensor, epsilons_N: torch.Tensor, inverse_scale: Scalar
) -> torch.Tensor:
    """Return [N] how much each element is to change, at least; 0 without gradient."""
    gradients_N = _joined([each.gradient for each in parts]).abs()
    if isinstance(inverse_scale, torch.Tensor):
        inverse_scale = accelerator.sent(inverse_scale, gradients_N.device)
    gradients_N = gradients_N * inverse_scale
    if any(each.epsilon >= 0.0 for each in parts):
        squares = [
            each.gradient.square() if each.second_moment is None else each.second_moment
            for each in parts
        ]
        roots_N = _joined(squares).sqrt() + epsilons_N
        relative_N = (gradients_N / roots_N.clamp(min=_TINY)).clamp(max=1.0)
        gradients_N = gradients_N.where(epsilons_N < 0.0, relative_N)
    sizes_N = gradients_N * rates_N
    return sizes_N.where(sizes_N.isfinite(), 0.0)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [N]: copies of all elements, as float64."""
    if len({each.dtype for each in parts}) > 1:
        return torch.cat([each.double() for each in parts])
    return torch.cat(list(parts)).double()
