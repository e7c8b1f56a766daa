"""A step, as far as the hooks have seen it, and as it is written."""

import time
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, isfinite, nan

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from mp_agent.probe.accelerator import DeviceTimer
from mp_agent.probe.scalars import Scalar, add, scalar_of, tighter
from mp_agent.records.columns import GRADIENT_COLUMN_NAMES, GRADIENT_POSITIONS, GRADIENTS
from mp_agent.records.steps import FloatArray, StepRecord, step_values

_OF_FLOAT32 = 1e-5
"""Relative error of a sum of losses in float32."""
_SUM_SQUARES = GRADIENT_POSITIONS["sum_squares"]


@dataclass(slots=True)
class SampledRows:
    """One family of columns on a sampled step, per optimizer, by label.

    totals: per share [G, C]. rows: per layer [L, C].
    """

    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """What is known of a step. Scalars are floats, or 0-dim tensors left on their device.

    scalars: step columns by name; `loss` is the sum over the backwards that made the gradients.
    totals: per optimizer, by label, gradient columns per share [G, C]; none until measured, or
    when there was no gradient.
    rows: the same per layer [L, C], when this step's layers were looked at.
    """

    sequence: int
    begun_seconds: float
    """`time.perf_counter()` at the end of the step before; NaN on the first."""
    scalars: dict[str, Scalar] = field(default_factory=dict)
    losses: int = 0
    last_loss: Scalar | None = None
    loss_before_last: Scalar | None = None
    backward_seconds: float = nan
    """`time.perf_counter()` at the beginning of the last backward."""
    loss_observed: bool = False
    """`observe(loss=…)` was called: its loss stands, whatever backward sees."""
    rate_observed: bool = False
    """`observe(lr=…)` was called: its rate stands, whatever the optimizer says."""
    loss_outdated: bool = False
    """Another optimizer has used the gradients, or they were cleared: if another backward follows,
    the loss so far is not this step's."""
    weights_moved: bool = False
    """Gradients were measured after the script moved the weights for another backward."""
    gradients_kept: bool = False
    """An engine has the gradients of the backwards so far, whatever is cleared."""
    loss_discarded: bool = False
    """A loss was left out since its gradients were cleared; the script may have kept them."""
    makes_gradients: bool = False
    """A backward that a loss was counted of has made gradients of the run."""
    makes_none: bool = False
    """Another one has made none of them."""
    touched_places: frozenset[int] = frozenset()
    """Places of the parameters whose gradients the last backward that made any has made."""
    makes_parts: bool = False
    """One has made gradients of none of the parameters that the one before it made some of."""
    loss_repeats: bool = False
    """A loss was the sum of the two or more before it, whose gradients its own continue."""
    cleared_by: weakref.ref[Optimizer | nn.Module] | None = None
    """What last cleared its gradients while the run's optimizers were not known yet."""
    losses_before: int | None = None
    """Losses before that, or before a backward of another model followed one of the run's."""
    loss_since: Scalar | None = None
    """The sum of those since."""
    raw_loss: Scalar = 0.0
    """The part of the loss of which it is not known what it was before it was scaled."""
    factor: Scalar = 1.0
    """Factor by which an engine has multiplied the gradients since they were reduced."""
    measured: set[str] = field(default_factory=set)
    """Optimizers whose present gradients were looked at; a backward empties this."""
    settled: set[str] = field(default_factory=set)
    """Optimizers whose gradients were looked at for good: later ones are taken at other weights."""
    stepped: set[str] = field(default_factory=set)
    """Optimizers that have stepped."""
    clipped: set[str] = field(default_factory=set)
    """Optimizers whose present gradients were clipped."""
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    sampled: dict[str, SampledRows] = field(default_factory=dict)
    """Families other than the gradients that were measured, by name."""
    own_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    """Rows [M, C] of a family's own layers, by family that is not of parameters."""
    unread_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """Per optimizer, 1 / the factor by which its statistics are still multiplied, on a device."""
    timers: list[DeviceTimer] = field(default_factory=list)
    """Timers of the device, around what was measured there."""
    streams: set[Hashable] = field(default_factory=set)
    """Streams of the device on which gradients were measured."""

    def worth_reporting(self, labels_of_run: Collection[str]) -> bool:
        """Whether the step should be known of although it does not end.

        Micro-batches left over at the end of an epoch are no step, nor is what the optimizers of
        other models do after the last one. Gradients of the run that were looked at were about to
        be used, and a loss that is not finite may be why training stops.
        """
        loss = self.scalars.get("loss")
        looked_at = not self.totals.keys().isdisjoint(labels_of_run)
        return looked_at or (isinstance(loss, float) and not isfinite(loss))

    @property
    def loss_is_unread(self) -> bool:
        """Whether the loss is on a device: it is not known yet whether it is finite."""
        return isinstance(self.scalars.get("loss"), torch.Tensor)

    def add_loss(self, loss: Scalar, *, raw: bool = False) -> None:
        """Add what one backward started from, unless the step's loss is known already.

        The sum is the loss that the accumulated gradients are the gradients of. raw: it may have
        been scaled, and no scaler that did so is known.
        """
        if self.loss_observed or "" in self.settled:
            return
        if self.loss_outdated:
            self.scalars.pop("loss", None)
            self.losses, self.loss_outdated, self.raw_loss = 0, False, 0.0
            self.makes_gradients = self.makes_none = self.makes_parts = self.loss_repeats = False
            self.touched_places = frozenset()
            self.cleared_by = self.losses_before = self.loss_since = None
        self.gradients_kept = False
        if raw:
            self.raw_loss = add(self.raw_loss, loss)
        self.loss_before_last, self.last_loss = self.scalars.get("loss"), loss
        if self.losses > 1 and _is_same(loss, self.loss_before_last):
            self.loss_repeats = True
        self.scalars["loss"] = add(self.loss_before_last, loss)
        if self.losses_before is not None:
            self.loss_since = add(self.loss_since, loss)
        self.losses += 1

    def note_backward(self, places: frozenset[int], *, makes_none: bool) -> None:
        """Note of which parameters the backward of a loss that was added has made gradients."""
        self.makes_none |= makes_none
        if places:
            self.makes_gradients = True
            self.makes_parts |= bool(self.touched_places) and places.isdisjoint(self.touched_places)
            self.touched_places = places

    def note_cleared(self, owner: Optimizer | nn.Module) -> None:
        """Remember that `owner` clears its gradients, which may be those of the run."""
        self.cleared_by = weakref.ref(owner)
        self.losses_before, self.loss_since = self.losses, None

    def drop_cleared_loss(self, clears_run: Callable[[Optimizer | nn.Module], bool]) -> None:
        """Leave out the loss of gradients that were cleared, now that it is known whose."""
        owner = None if self.cleared_by is None else self.cleared_by()
        self.cleared_by = None
        if owner is not None and clears_run(owner):
            self._drop_losses_before()
        self.losses_before = None

    def note_other_model(self) -> None:
        """Note that the loss that was added last is of none of the run's gradients."""
        if self.makes_gradients and self.losses_before is None:
            self.losses_before, self.loss_since = self.losses - 1, self.last_loss

    def keep_loss_of_successor(self, backwards: int) -> None:
        """Leave out the losses of the model before; have none where its own are not known.

        backwards: how many have made the successor's gradients, at most.
        """
        if self.cleared_by is None:
            self._drop_losses_before()
        if self.losses > backwards and not self.loss_observed:
            self.drop_loss()

    def _drop_losses_before(self) -> None:
        before, loss = self.losses_before, self.loss_since
        if before is not None and loss is not None and not self.loss_observed:
            self.scalars["loss"], self.losses = loss, self.losses - before
        self.losses_before = None

    def drop_loss(self) -> None:
        """Have no loss: the gradients are not those of the losses that were counted.

        One that is not finite stays: it is so whatever became of the gradients.
        """
        loss = self.scalars.get("loss")
        if isinstance(loss, float) and not isfinite(loss):
            return
        self.scalars.pop("loss", None)
        self.losses, self.last_loss = 0, None

    def divide_last_loss(self, parts: int) -> None:
        """Let the loss that was added last count for one of `parts` parts."""
        if self.last_loss is not None and not self.loss_observed:
            self.scalars["loss"] = add(self.loss_before_last, self.last_loss / parts)
            self.last_loss = None

    def multiply(self, factor: Scalar) -> None:
        """Multiply the loss, as all gradients of the step are."""
        self.factor, self.raw_loss = self.factor * factor, self.raw_loss * factor
        loss = self.scalars.get("loss")
        if loss is not None and not self.loss_observed:
            self.scalars["loss"] = loss * factor

    def unscale_raw_loss(self, inverse_scale: Scalar) -> None:
        """Multiply the raw part of the loss, as an engine is about to multiply the gradients."""
        loss = self.scalars.get("loss")
        if loss is not None and not self.loss_observed:
            self.scalars["loss"] = loss - self.raw_loss + self.raw_loss * inverse_scale

    def note_reduction(self, reduced: bool | None) -> None:
        """Note whether an optimizer's gradients were reduced over replicas, where that is known."""
        if reduced is not None:
            before = self.scalars.get("gradients_reduced", 1.0)
            self.scalars["gradients_reduced"] = float(reduced and before == 1.0)

    def add_clipping(self, labels: Collection[str], limit: Scalar, norm: Scalar) -> None:
        """Note that gradients of `labels` were clipped; of several clippings the tighter counts."""
        before = self.scalars.get("clip_max_norm"), self.scalars.get("clip_norm")
        other_part = bool(self.clipped) and self.clipped.isdisjoint(labels)
        if other_part and before[0] is not None and before[1] is not None:
            limit, norm = tighter((before[0], before[1]), (limit, norm))
        self.clipped.update(labels)
        self.scalars.update(clip_max_norm=limit, clip_norm=norm)

    def forget_if(self, skipped: Scalar, label: str) -> None:
        """Let go of what was measured of an optimizer whose step was skipped: it was no step.

        A flag on a device is not read: what it stands for becomes NaN there.
        """
        of_families = [p for own in self.sampled.values() for p in (own.totals, own.rows)]
        for parts in (self.totals, self.rows, *of_families):
            if label not in parts:
                continue
            if isinstance(skipped, torch.Tensor):
                parts[label] = parts[label].masked_fill(skipped != 0, nan)
            elif skipped:
                del parts[label]

    def norm(self, label: str) -> Scalar | None:
        """Return the norm of what this rank measured of an optimizer; None when it did not."""
        totals_GC = self.totals.get(label)
        return None if totals_GC is None else scalar_of(totals_GC[:, _SUM_SQUARES].sum().sqrt())

    def observe_loss(self, loss: Scalar) -> None:
        """Let `loss` stand for the whole step."""
        self.scalars["loss"], self.losses, self.loss_observed = loss, 1, True


def _is_same(loss: Scalar, total: Scalar | None) -> bool:
    """Return whether two losses are the same but for rounding; what is on a device is not read."""
    if not isinstance(loss, float) or not isinstance(total, float):
        return False
    # Infinite losses are equal, too, and are not to be left out.
    return loss != 0 and isfinite(loss) and isclose(loss, total, rel_tol=_OF_FLOAT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRows:
    """How many rows of a schema are of one optimizer: per share, and per layer."""

    label: str
    shares: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadScale:
    """1 / the factor by which statistics on the host are multiplied, itself on a device.

    totals_rows, layer_rows: which rows of `totals_GC` and `rows_LC` are.
    """

    inverse_scale: torch.Tensor
    totals_rows: slice
    layer_rows: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """A step as far as it was seen, on its way to the ring; scalars may still be on a device.

    totals_GC, rows_LC: of all optimizers, NaN for those that were not measured.
    sampled: the same pairs of other families, by name.
    only_if_nonfinite: the step will not end, and is recorded only if its loss is not finite.
    """

    sequence: int
    step: int
    time_unix_ns: int
    scalars: Mapping[str, Scalar]
    shares: int
    totals_GC: torch.Tensor | None
    rows_LC: torch.Tensor | None
    sampled: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    own_rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Rows [M, C] of a family's own layers, by family that is not of parameters."""
    unread_scales: Sequence[UnreadScale] = ()
    streams: Collection[Hashable] = ()
    timers: Sequence[DeviceTimer] = ()
    only_if_nonfinite: bool = False


def observed_step(
    step: OpenStep,
    trainer_lead: int,
    optimizers: Sequence[OptimizerRows],
    *,
    only_if_nonfinite: bool = False,
) -> ObservedStep:
    """Return the step as it is now, `trainer_lead` ahead in the trainer's own count.

    Its rows are in the order of the optimizers.
    """
    shares = {each.label: each.shares for each in optimizers}
    layers = {each.label: each.layers for each in optimizers}
    return ObservedStep(
        sequence=step.sequence,
        step=step.sequence + trainer_lead,
        time_unix_ns=time.time_ns(),
        scalars=dict(step.scalars),
        shares=sum(shares.values()),
        totals_GC=_joined(step.totals, shares),
        rows_LC=_joined(step.rows, layers) if step.rows else None,
        sampled=_sampled(step, shares, layers) if step.sampled else {},
        own_rows=dict(step.own_rows),
        unread_scales=[
            UnreadScale(
                inverse_scale=step.unread_scales[label],
                totals_rows=_range_of(label, shares),
                layer_rows=_range_of(label, layers),
            )
            for label in shares
            if label in step.unread_scales
        ],
        streams=tuple(step.streams),
        timers=tuple(step.timers),
        only_if_nonfinite=only_if_nonfinite,
    )


def _sampled(
    step: OpenStep, shares: Mapping[str, int], layers: Mapping[str, int]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the totals and the rows of each family that has both."""
    found = {}
    for name, sampled in step.sampled.items():
        totals_GC, rows_LC = _joined(sampled.totals, shares), _joined(sampled.rows, layers)
        if totals_GC is not None and rows_LC is not None:
            found[name] = totals_GC, rows_LC
    return found


def _range_of(label: str, rows: Mapping[str, int]) -> slice:
    """Return where the rows of `label` are among those of all."""
    begin = 0
    for other, count in rows.items():
        if other == label:
            return slice(begin, begin + count)
        begin += count
    return slice(0, 0)


def _joined(parts: Mapping[str, torch.Tensor], rows: Mapping[str, int]) -> torch.Tensor | None:
    """Return the parts below each other, each with its number of `rows`; None when there is none.

    A part of another size is of parameters that have changed since, and left out.
    """
    if not parts:
        return None
    usable = {label: parts[label] for label in rows if label in parts}
    usable = {label: part for label, part in usable.items() if part.shape[0] == rows[label]}
    if not usable:
        return None
    if len(rows) == 1:
        return next(iter(usable.values()))
    like = next(iter(usable.values()))
    return torch.cat(
        [
            usable[label] if label in usable else like.new_full((count, like.shape[1]), nan)
            for label, count in rows.items()
        ]
    )


def record_of(
    step: ObservedStep,
    scalars: Mapping[str, float],
    totals_GC: FloatArray | None,
    sampled: Mapping[str, FloatArray] | None = None,
    *,
    columns: Sequence[str],
) -> StepRecord:
    """Return the record of `step`, given its scalars and totals on the host.

    sampled: the totals of other families, by name. columns: the step columns of the schema.
    """
    if totals_GC is None:
        totals_GC = np.full((step.shares, len(GRADIENT_COLUMN_NAMES)), nan)
    return StepRecord(
        sequence=step.sequence,
        step=step.step,
        time_unix_ns=step.time_unix_ns,
        values=step_values(scalars, columns),
        families={GRADIENTS.name: totals_GC, **(sampled or {})},
    )
