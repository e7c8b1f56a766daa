"""Backward: it begins a pass, adds its loss, makes gradients, and outdates what was measured."""

from collections.abc import Sequence
from math import isnan
from threading import get_ident
from time import perf_counter

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.probe.optimizers.loop_order import any_of
from mp_agent.probe.optimizers.parameter_names import optimizer_parameters
from mp_agent.probe.optimizers.roles import FewWeights
from mp_agent.probe.scalars import Scalar, reciprocal, snapshot_of
from mp_agent.probe.step.loss_graph import (
    LOOK_INTERVAL_STEPS,
    fp32_share,
    has_fp16_products,
    is_scaled,
    mistakes_of,
)
from mp_agent.probe.step.thread_progress import loss_of, within_backward
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.measuring import GradientMeasuring, StepEnd
from mp_agent.probe.tracker.optimizer_steps import OptimizerSteps
from mp_agent.records.columns import AUTOCAST_FP32_SHARE, FP16_WITHOUT_LOSS_SCALE
from mp_agent.records.steps import NEVER_STEPPED, UNUSED_GRADIENTS_AT_MOST, Phase


class LossTracking:
    """Adds up the unscaled losses whose gradients accumulate in the open step."""

    def __init__(self, context: TrackerContext) -> None:
        self._context = context

    def scaled(self, scaler: GradScaler, outputs: object, scaled: object) -> None:
        """Remember the loss as it was before; the backward that follows sees it scaled."""
        context = self._context
        context.thread.scaler = scaler
        context.thread.unscaled.clear()
        context.thread.scaler_settles = False
        context.thread.scaled_losses.note(outputs, scaled)
        context.thread.schedule_scales = context.thread.in_schedule
        if not context.trains_other_model:
            context.traits.scaler_name = type(scaler).__name__

    def announced_by_engine(self, loss: Scalar) -> None:
        """Keep the loss before the engine scales it; the backward that follows sees it scaled."""
        self._context.thread.announced_loss = loss

    def scaled_by_engine(self, loss: Scalar, scaled: object) -> None:
        """Remember the loss as it was before."""
        self._context.thread.scaled_losses.note(loss, scaled)

    def divided(self, parts: int) -> None:
        """Count the loss of the current backward as one of `parts`, as its gradients are."""
        if not self._context.trains_other_model:
            self._context.step.divide_last_loss(parts)

    def multiplied(self, factor: object) -> None:
        """Let the loss be that of which the gradients are the gradients after the product."""
        scalar = snapshot_of(factor)
        if scalar is not None and not self._context.trains_other_model:
            self._context.step.multiply(scalar)

    def schedule_runs(self, begins: bool) -> None:
        """Leave the losses of a pipeline's micro-batches to their schedule while it runs."""
        thread = self._context.thread
        thread.in_schedule, thread.schedule_scales = begins, False

    def schedule_ended(self, loss: Scalar) -> None:
        """Add the loss of one run of a schedule, unscaled."""
        thread = self._context.thread
        if thread.schedule_scales:
            loss = loss * self._inverse_scale()
        if not self._context.trains_other_model:
            self._context.step.add_loss(loss)

    def add_from_backward(self, roots: object, seeds: object) -> None:
        """Add the loss that the current backward starts from."""
        thread = self._context.thread
        loss, thread.announced_loss = thread.announced_loss, None
        if thread.in_schedule:
            return
        raw = loss is None and thread.scaler is None and not thread.scaled_losses.knows(roots)
        if loss is None:
            loss = loss_of(roots, seeds, thread.scaled_losses, self._inverse_scale())
        if loss is not None:
            self._context.step.add_loss(loss, raw=raw)

    def _inverse_scale(self) -> Scalar:
        """Return 1 / the scale of the GradScaler that has scaled a loss of this thread last."""
        thread = self._context.thread
        scaler = thread.scaler
        scale = None if scaler is None else thread.scale_now.of(scaler._get_scale_async())
        return 1.0 if scale is None else reciprocal(scale)


UNKNOWN_OPTIMIZER = "training without an optimizer that mp_agent knows"

_EARLY_BACKWARDS_AT_MOST = 20
"""Backwards without an optimizer by which a process trains with one that is not known."""
_ACCUMULATED_AT_MOST = 2048
"""Backwards before any optimizer steps by which none is expected to, although nothing is cleared:
twice those of a large batch."""
_DOUBTFUL_BACKWARDS = (_EARLY_BACKWARDS_AT_MOST, UNUSED_GRADIENTS_AT_MOST, _ACCUMULATED_AT_MOST)


class BackwardTracking:
    """Follows outermost backwards, and gradients that are cleared between them."""

    def __init__(
        self,
        context: TrackerContext,
        losses: LossTracking,
        measuring: GradientMeasuring,
        optimizer_steps: OptimizerSteps,
        step_end: StepEnd,
    ) -> None:
        self._context = context
        self._losses = losses
        self._measuring = measuring
        self._optimizer_steps = optimizer_steps
        self._step_end = step_end
        self._unused_gradients = 0
        """How often gradients were cleared before any optimizer stepped."""
        self._losses_before = 0
        """Losses of the step before the backward under way."""
        self._early_backwards = 0
        """Backwards before any optimizer was known."""
        self._doubtful = False
        """There were so many of these that an optimizer is to be searched for."""
        self._early_weights = FewWeights(())
        """Those of the optimizers that were found then, as they were after so many."""
        self._looked_at = 0
        """The last step on which the graph of the loss was looked at."""
        self._found: dict[str, Scalar] = {}
        """What was wrong in it, by column."""

    def begins(self, roots: object, seeds: object, inputs: Sequence[torch.Tensor] | None) -> None:
        """Add the loss to the step; what was measured so far is outdated."""
        context = self._context
        self._connect()
        thread = context.thread
        context.traits.backward_threads.add(get_ident())
        thread.in_backward = True
        thread.closure_made_gradients = thread.in_closure
        if not thread.in_closure:
            self._optimizer_steps.end_enclosing()
        thread.scaler_steps = None  # left over from a step that raised
        thread.backward_scaled = thread.scaler is not None and thread.scaled_losses.knows(roots)
        other_model = context.trains_other_model
        if not other_model:
            context.enter_phase(Phase.BACKWARD)
            context.parts.backward_begins()
            self._step_end.begin_next_pass()
        if inputs is not None and not self._reaches(inputs):
            context.order.gradients_may_change(context.registry.roles.watched)
            return
        context.boundaries.gradients_change(thread.measures if other_model else None)
        if not other_model:
            self._begin_pass(roots, seeds)
        thread.scaled_losses.clear()

    def ended(self, *, raised: bool = False) -> None:
        """Enter the forward phase; measure now where clipping could not be seen.

        A rank whose backward raised stands in it until it trains on: it may be about to end.
        """
        context, thread = self._context, self._context.thread
        thread.in_backward = False
        if self._doubtful:
            self._search_optimizer()
        if context.trains_other_model:
            return
        context.parts.backward_ended(within_step=thread.in_closure)
        known = context.registry.roles.watched
        context.order.backward_ended(
            known, in_closure=thread.in_closure, scaled=thread.backward_scaled
        )
        context.instruments.backward_ended(context.step)
        if (plan := context.marked_plan()) is not None:
            thread.gradients.backward_ended(plan)
            thread.trace.backward_ended(
                plan, context.step.sequence, made_any=thread.gradients.touched
            )
            if thread.gradients.touched:
                context.boundaries.reaches_run()
            elif context.step.losses > self._losses_before:
                context.step.note_other_model()
            if context.step.losses > self._losses_before:
                gradients, keeps = thread.gradients, plan.reducers.reduced() is False
                # FSDP2 keeps elsewhere the gradients that it does not reduce.
                context.step.note_backward(
                    gradients.touched_places, makes_none=gradients.untouched and not keeps
                )
        elif context.step.losses > self._losses_before:
            context.step.note_other_model()
        if raised:
            context.phases.training_raised()
        else:
            context.enter_phase(Phase.FORWARD)
        if self._optimizer_steps.stepped_in_backward:
            self._optimizer_steps.stepped_in_backward = False
            # Without it, gradients that no one looked at would count as missing.
            context.step.scalars.setdefault("gradients_measured", 0.0)
            self._step_end.finish_run("")
        elif context.clipping_is_compiled:
            for watched in context.registry.known:
                self._measuring.measure(watched, "backward", context.inverse_scale(watched))

    def gradients_cleared(self, owner: Optimizer | nn.Module) -> None:
        """Distinguish discarded gradients from those of a first pass, and keep the latter.

        Where the weights have been changed since backward, though no optimizer has stepped, the
        next backward is taken at other weights and gives no other step (SAM).
        """
        context = self._context
        step, first = context.step, context.registry.first
        context.registry.gradients_cleared(owner)
        if isnan(step.backward_seconds) or context.trains_other_model or within_backward():
            return
        if first is None or step.sequence == 1:
            self._unused_gradients += 1
            if self._unused_gradients == UNUSED_GRADIENTS_AT_MOST:
                expects = bool(context.registry.expected_to_step())
                waiting = context.registry.roles.never_stepped.waiting
                expects &= not any(each.weights.have_changed for each in waiting)
                context.note_unsupported(NEVER_STEPPED if expects else UNKNOWN_OPTIMIZER)
        if first is None:
            if not step.gradients_kept:
                step.note_cleared(owner)
            return
        if not first.is_cleared_by(owner):
            if not first.alive and not step.gradients_kept:
                step.note_cleared(owner)
            return
        first.use.clearing()
        if context.thread.weights.moved:
            self._measuring.measure_for_good(first)
        context.instruments.gradients_cleared()
        if not step.gradients_kept:
            step.loss_outdated = True
            step.loss_discarded |= step.losses > 0

    def gradients_kept(self) -> None:
        """Keep the loss so far although gradients will be cleared: they are kept elsewhere."""
        if not self._context.trains_other_model:
            self._context.step.gradients_kept = True
            self._context.order.gradients_kept()

    def micro_batch_begins(self, per_step: int, *, last: bool) -> None:
        """Count the backwards that a framework adds up itself."""
        self._context.order.micro_batch_begins(per_step, last=last)

    def _connect(self) -> None:
        """Open the ring; of an optimizer that is not known, at the latest after many backwards."""
        context = self._context
        if context.registry.first is None:
            self._early_backwards += 1
            context.awaits_optimizer &= self._early_backwards < _EARLY_BACKWARDS_AT_MOST
            self._doubtful = self._early_backwards in _DOUBTFUL_BACKWARDS
        if not context.awaits_optimizer or context.registry.knows_any:
            context.connection.ensure()

    def _search_optimizer(self) -> None:
        """Say so where there is none for the gradients that are there, or one that never steps.

        One whose weights change although it never steps has hooks that do it in backward (LOMO).
        """
        self._doubtful = False
        context, count = self._context, self._early_backwards
        expected = context.registry.expected_to_step()
        if count == _EARLY_BACKWARDS_AT_MOST:
            held = (parameter for each in expected for parameter in optimizer_parameters(each))
            self._early_weights = FewWeights([each for each in held if each.requires_grad])
        if (not expected and context.registry.trains_any()) or self._early_weights.have_changed:
            context.note_unsupported(UNKNOWN_OPTIMIZER)
        elif expected and count == _ACCUMULATED_AT_MOST:
            context.note_unsupported(NEVER_STEPPED)

    def _reaches(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether any of `inputs` may be one of the first optimizer's parameters."""
        plans = self._context.registry.plans_of_run()
        return not plans or any(plan.holds(each) for plan in plans for each in inputs)

    def _begin_pass(self, roots: object, seeds: object) -> None:
        context, thread = self._context, self._context.thread
        context.step.backward_seconds = perf_counter()
        context.instruments.end(context.step)
        context.order.backward_begins(context.registry.roles.watched, context.step.sequence)
        if context.step.sequence % LOOK_INTERVAL_STEPS == 0:
            self._look_at_graph(roots, seeds)
        if context.loaded.unmatched:
            context.loaded.backward_begins()
        if self._found:
            context.step.scalars.update(self._found)
        first = context.registry.first
        if not thread.in_closure and first is not None and (plan := first.plan()) is not None:
            thread.weights.set(plan)
        if (plan := context.marked_plan()) is not None:
            thread.gradients.backward_begins(plan)
            thread.trace.backward_begins(roots, context.step.sequence)
        context.instruments.backward_begins(context.step)
        self._losses_before = 0 if context.step.loss_outdated else context.step.losses
        self._losses.add_from_backward(roots, seeds)

    def _look_at_graph(self, roots: object, seeds: object) -> None:
        """Note what the graph of a loss shows of how it was computed; what is wrong stays so.

        And whether a schedule has set betas in the wrong order. Another backward of the step, which
        has a loss of its own, adds to what is found.
        """
        context, thread = self._context, self._context.thread
        step = context.step
        if self._looked_at != step.sequence:
            self._looked_at, self._found = step.sequence, {}
            for watched in context.registry.known:
                watched.has_swapped_betas()
        autocast = thread.autocast_step == step.sequence
        mistakes = {
            **mistakes_of(roots, scaled=thread.backward_scaled, autocast=autocast),
            **context.targets.mistakes_of(roots),
        }
        for column, flag in mistakes.items():
            found = any_of((self._found.get(column), flag))
            self._found |= {} if found is None else {column: found}
        if not autocast:
            return
        if AUTOCAST_FP32_SHARE not in step.scalars and (share := fp32_share(roots)) is not None:
            step.scalars[AUTOCAST_FP32_SHARE] = share
        scaled = seeds is not None or thread.announced_loss is not None or is_scaled(roots)
        if not scaled and has_fp16_products(roots):
            self._found[FP16_WITHOUT_LOSS_SCALE] = 1.0
