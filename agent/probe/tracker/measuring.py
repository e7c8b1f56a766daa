"""Measures gradients when a step, clipping or a loss scaler is about to change them."""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from math import inf, isnan, nan
from threading import get_ident

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.probe.isolation import Shield
from mp_agent.probe.optimizers.roles import Role, WatchedOptimizer
from mp_agent.probe.placement import world_size
from mp_agent.probe.scalars import Scalar, add, reciprocal, scalar_of, snapshot_of
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.thread_progress import within_backward
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.records.columns import (
    ANOTHER_MODEL,
    CLIPPED_APART,
    CLIPPED_BY_SHARD,
    CLIPS_NOTHING,
    GRADIENT_FACTOR,
    GRADIENTS_REPLACED,
    LATE_CLIPPING,
    LOSS_FACTOR,
)
from mp_agent.records.steps import OTHER_GRADIENTS, Phase

_MADE_ONLY_NOW = "made only now"


class StepEnd:
    """Ends steps, and has the recorder publish those that are complete.

    on_step: called after each step of the run; its failure is contained.
    """

    def __init__(
        self, context: TrackerContext, shield: Shield, on_step: Callable[[], None]
    ) -> None:
        self._context = context
        self._shield = shield
        self.after_step: Callable[[], None] = partial(
            shield.contain, "looking after the run", on_step
        )

    def publish(self, steps: Iterable[OpenStep], *, relabelled: bool = False) -> None:
        """Publish complete steps, in order; `relabelled` ones are as of the optimizers now."""
        for step in steps:
            self._context.recorder.publish(step, relabelled=relabelled)

    def begin_next_pass(self) -> None:
        """Publish the step before once the pass that is over has shown which optimizers made it."""
        context = self._context
        if context.registry.roles.begin_pass():
            self.publish(context.boundaries.close_ended())
        context.boundaries.begin_pass()

    def flush(self) -> None:
        """Publish what was observed of the step under way."""
        context = self._context
        context.registry.roles.begin_pass()
        self.publish(context.boundaries.close_ended())
        context.recorder.flush(context.step)

    def note_skip(self, watched: WatchedOptimizer, skipped: Scalar) -> None:
        """Record that a scaler skipped a step: of any part of the run's model it is the run's."""
        watched.scalars["skipped"] = skipped
        step = self._context.boundaries.of(watched)
        if watched.of_run:
            step.scalars["skipped"] = add(step.scalars.get("skipped"), skipped)
        else:
            step.forget_if(skipped, watched.label)

    def finish(self, watched: WatchedOptimizer) -> None:
        """End the step of one optimizer, and with it that of the run if it is of the run."""
        context = self._context
        if not context.trains_other_model:
            context.parts.optimizer_ended()
        roles = context.registry.roles
        context.thread.unscaled.add(watched.label)
        if watched.role is Role.CANDIDATE:
            roles.confirm(watched)
        step = context.boundaries.of(watched)
        ends_step = step is context.boundaries.step
        skipped = watched.scalars.get("skipped")
        not_stepped = isinstance(skipped, float) and skipped > 0.0  # a flag on a device stays there
        context.order.stepped(watched, roles.watched, step.scalars, skipped=not_stepped)
        if roles.never_stepped.waiting and watched.role is Role.FIRST:
            roles.never_stepped.run_stepped(step.scalars)
        if context.loaded.unmatched and watched.role is Role.FIRST:
            context.loaded.stepped(watched.plan(), step.scalars)
        if context.trainer_step.may_lose_state and watched.role is Role.FIRST:
            context.note_lost_state(watched)
        if isinstance(rate := step.scalars.get("learning_rate"), float) and rate == 0.0:
            watched.note_rate_0(step.scalars)
        context.instruments.optimizer_stepped(step, watched)
        awaited = roles.awaited
        if watched.role is Role.FIRST and not watched.stepped_in_pass:
            awaited |= self._made_only_now()
        roles.stepped(watched)
        if not watched.of_run:
            if (rate := watched.learning_rate()) is not None:
                watched.scalars["learning_rate"] = rate
            self.publish(context.boundaries.other_ended(watched))
        elif ends_step:
            for complete in self._end_run(watched.label, awaited):
                context.recorder.publish(complete)
            self._begin_next(step)
        else:
            self.publish(context.boundaries.joint_ended(watched.label))
        watched.scalars.clear()

    def _made_only_now(self) -> set[str]:
        """Return a label that no optimizer has where others may be made to step in this pass.

        Their gradients are a part of the step that the first one ends.
        """
        return {_MADE_ONLY_NOW} if self._context.registry.awaits_more() else set()

    def finish_run(self, label: str) -> None:
        """End the step under way: the optimizer `label` of the run has stepped."""
        ended = self._context.boundaries.step
        self.publish(self._end_run(label))
        self._begin_next(ended)

    def _end_run(self, label: str, awaited: Collection[str] = ()) -> Sequence[OpenStep]:
        """Record the end of the step under way; return the steps that are complete with that."""
        context = self._context
        ended = context.boundaries.step
        context.run_thread = get_ident()
        context.thread.weights.forget()
        ended.scalars.setdefault("skipped", 0.0)
        if context.registry.begins_another_model():
            ended.scalars[ANOTHER_MODEL] = 1.0
            if (first := context.registry.first) is not None:
                ended.keep_loss_of_successor(first.backwards_at_most())
        context.recorder.end(ended, self._shield.pop_seconds())
        return context.boundaries.run_ended(label, awaited)

    def _begin_next(self, ended: OpenStep) -> None:
        """Begin the step after one of the run that has ended."""
        context = self._context
        context.recorder.begin_forward(ended)
        context.phases.training(Phase.FORWARD, context.boundaries.step.sequence)
        self.after_step()
        context.parts.step_begins()


class Succession:
    """Lets the run go on with the optimizer that has succeeded its first one."""

    def __init__(self, context: TrackerContext, step_end: StepEnd) -> None:
        self._context = context
        self._step_end = step_end

    def is_due(self, watched: WatchedOptimizer) -> bool:
        """Return whether an optimizer trains on where those of the run have ceased to.

        Trainings side by side, each in a separate thread, do not take each other's place.
        """
        context = self._context
        returns = context.registry.returns(watched)
        overtaken = returns or context.boundaries.is_overtaken_by(
            watched.label, lambda: context.registry.trains_the_model(watched)
        )
        if not overtaken:
            return False
        return not context.trains_other_model or all(
            thread.ident != context.run_thread for thread in threading.enumerate()
        )

    def hand_over(self, watched: WatchedOptimizer) -> None:
        """Count the steps of `watched` as the run's from now on."""
        context, label = self._context, watched.label
        if context.registry.returns(watched):
            context.boundaries.note_turn()
        labels = context.registry.make_first(watched)
        context.run_thread = get_ident()
        # Published before the trainer's step number is that of the new optimizer.
        self._step_end.publish(context.boundaries.close_ended())
        made_one = context.boundaries.has_lone_step(label)
        context.note_trainer_step(watched, context.step.sequence + made_one)
        self._step_end.publish(context.boundaries.restart_with(label, labels), relabelled=True)
        if made_one:
            self._step_end.after_step()


class GradientMeasuring:
    """Hands gradients to the recorder, once per step and optimizer unless a backward follows."""

    def __init__(self, context: TrackerContext, succession: Succession, step_end: StepEnd) -> None:
        self._context = context
        self._succession = succession
        self._step_end = step_end
        self._gradients_change = False
        """The script was found to change gradients in place between backward and step."""

    def measure(self, watched: WatchedOptimizer, point: str, inverse_scale: Scalar) -> None:
        """Measure gradients as they are, unless the present ones were measured before.

        point: where in the step, for the run's facts. inverse_scale: 1 / the factor by which the
        gradients are still multiplied.
        """
        context = self._context
        if not context.trains_other_model:
            context.phases.training(Phase.OPTIMIZER, context.boundaries.step.sequence)
        if watched.role is Role.CANDIDATE:
            context.registry.roles.confirm(watched)
        if watched.role is Role.SEPARATE and self._succession.is_due(watched):
            self._succession.hand_over(watched)
        step = context.boundaries.of(watched)
        if watched.label not in step.measured and watched.label not in step.settled:
            under_way = context.boundaries.step
            if step is not under_way and context.boundaries.is_published(step):
                step = under_way
            if not context.connection.connected:
                context.connection.ensure()
            if watched.of_run and step is under_way:
                self._begin_measuring_run(watched, step)
            scaled = [
                (each, inverse_scale if each is watched else context.inverse_scale(each))
                for each in context.registry.together(watched)
                # A step may have changed the gradients that were measured before it.
                if each is watched or each.label not in step.stepped
            ]
            context.thread.measures.update(each.label for each, _ in scaled)
            if watched.of_run:
                self._note_changed_gradients(point)
                self._note_factors(step, point)
            context.recorder.measure(step, scaled, point)
        elif watched.of_run:
            context.renew_learning_rate(watched)
        if not context.trains_other_model:
            context.parts.optimizer_begins()

    def measure_for_good(self, watched: WatchedOptimizer) -> None:
        """Measure gradients after which others will follow, that were taken at other weights."""
        context = self._context
        context.step.weights_moved = True
        self.measure(watched, "optimizer_step", context.inverse_scale(watched))
        settled = context.boundaries.of(watched).settled
        settled.update(each.label for each in context.registry.together(watched))

    def measure_before_step(self, watched: WatchedOptimizer, optimizer: Optimizer) -> None:
        """Measure as `optimizer` begins to step; of a fused one note whether it will skip."""
        # GradScaler leaves these two to optimizers that unscale, and skip, by themselves.
        found = getattr(optimizer, "grad_scale", None)
        scale = None if found is None else scalar_of(found)
        found = getattr(optimizer, "found_inf", None)
        skipped = None if found is None else snapshot_of(found)
        inverse_scale = 1.0 if scale is None else reciprocal(scale)
        if not self._context.clipping_is_compiled:
            self.measure(watched, "optimizer_step", inverse_scale)
        elif isnan(self._context.boundaries.of(watched).backward_seconds):
            self._context.note_unsupported("the norm before clipping, which is compiled")
            self.measure(watched, "after_clipping", inverse_scale)
        if skipped is not None:
            self._step_end.note_skip(watched, skipped)

    def _begin_measuring_run(self, watched: WatchedOptimizer, step: OpenStep) -> None:
        """Publish the step before `step`, and record what is known as its gradients are used."""
        context = self._context
        if context.run_thread is None:
            # Else the backward of another thread would outdate what is measured here.
            context.run_thread = get_ident()
        if ended := context.boundaries.close_ended():
            self._step_end.publish(ended)
        first = watched if watched.role is Role.FIRST else context.registry.first or watched
        if step.cleared_by is not None:
            step.drop_cleared_loss(first.is_cleared_by)
        context.note_learning_rate(first)
        if not first.managed:
            context.note_trainer_step(first, step.sequence)

    def _note_factors(self, step: OpenStep, point: str) -> None:
        """Record by what gradients were multiplied since backward, and the loss before it.

        Not where a scaler does that, whose scale is known.
        """
        thread = self._context.thread
        if point not in ("clip", "optimizer_step"):
            return
        trace = thread.trace
        if trace.is_idle(step.sequence) or (plan := self._context.marked_plan()) is None:
            return
        changes = trace.changes(plan, step.sequence)
        if thread.scaler is not None:
            if changes is not None and (first := self._context.registry.first) is not None:
                first.use.factor = changes[0]
            return
        if changes is not None:
            step.scalars[GRADIENT_FACTOR], step.scalars[GRADIENTS_REPLACED] = changes
        if trace.loss_factor is not None:
            step.scalars[LOSS_FACTOR] = trace.loss_factor

    def _note_changed_gradients(self, point: str) -> None:
        """Report gradients that were clipped, or otherwise changed, by means that call no hook.

        On several ranks the change may be the script's own reduction, which is no reason to.
        """
        context = self._context
        gradients, step = context.thread.gradients, context.boundaries.step
        if self._has_other_gradients(step, point):
            step.drop_loss()
            context.note_unsupported(OTHER_GRADIENTS)
        if context.order.discarded and gradients.moved:
            context.order.script_changes_gradients()
        measures_late = point in ("clip", "optimizer_step") and not self._gradients_change
        if measures_late and gradients.moved and world_size() == 1:
            self._gradients_change = True
            context.note_unsupported("gradients before the script itself changed them")
        gradients.forget()  # what changes them from now on is announced by a hook

    def _has_other_gradients(self, step: OpenStep, point: str) -> bool:
        """Return whether the losses of a step are not those that its gradients are of.

        Either gradients were cleared, and others than those of the last backward are there instead
        (the projected ones of PCGrad); or one backward made gradients of the model and another one
        only of what it is to continue from (GradCache), or of the head alone (a loss in chunks).
        """
        context = self._context
        if step.loss_observed or not step.losses:
            return False
        if step.loss_discarded and (plan := context.marked_plan()) is not None:
            gradients = context.thread.gradients
            changed = point in ("clip", "optimizer_step") and gradients.moved
            if changed or gradients.replaced_in(plan):
                return True
        if step.loss_repeats or (step.makes_parts and step.loss_is_unread):
            return True
        if not (step.makes_gradients and step.makes_none):
            return False
        return all(each.role is not Role.SEPARATE for each in context.registry.known)


def _holds_shards(watched: WatchedOptimizer) -> bool:
    plan = watched.plan()
    return plan is not None and any(share.shard_count > 1 for share in plan.shares)


def _is_same(norm: Scalar, own: Scalar | None) -> Scalar:
    """Return whether a norm is that of the rank's own shards, 1 or 0, on its device."""
    if isinstance(norm, torch.Tensor) and isinstance(own, torch.Tensor):
        return ((norm - own).double().abs() <= _OF_FLOAT32 * own).double()
    if isinstance(norm, float) and isinstance(own, float):
        return float(abs(norm - own) <= _OF_FLOAT32 * own)
    return 0.0


_OF_FLOAT32 = 1e-3
"""Relative difference of a norm in FP32, or of the norm of norms in BF16, from one in FP64."""
_CLIPPED_APART = 4
"""Parameters of which each was clipped by its own norm from which on it is no exception."""


class ClippingTracking:
    """Follows torch's clipping functions."""

    def __init__(self, context: TrackerContext, measuring: GradientMeasuring) -> None:
        self._context = context
        self._measuring = measuring
        self._reaches = False
        """The call under way was given a parameter that has a gradient."""
        self._given = 0
        """Parameters that it was given."""
        self._apart: tuple[int, float] = 0, 0.0
        """Number of a step, and its calls so far if each was given one parameter, else NaN."""

    def begins(self, parameters: list[torch.Tensor]) -> None:
        """Measure the gradients before they are clipped; they may still be scaled."""
        context = self._context
        self._reaches = any(each.grad is not None for each in parameters)
        self._given = len(parameters)
        holding = context.registry.holding(parameters)
        clipped = [watched for watched in holding if not watched.managed]
        context.thread.clips_late = context.order.clips(clipped)
        if context.thread.clips_late:
            return
        for watched in clipped:
            self._measuring.measure(watched, "clip", context.inverse_scale(watched))
        context.thread.clipped = [
            watched
            for watched in clipped
            if watched.label not in context.boundaries.of(watched).settled
        ]

    def norm_known(
        self, max_norm: object, total_norm: object, *, of_all_ranks: bool = False
    ) -> None:
        """Record the limit and the norm of the clipping under way, as far as it has any.

        of_all_ranks: whether the norm is known to be that of all ranks' shards together.
        """
        limit, norm = snapshot_of(max_norm), snapshot_of(total_norm)
        thread, scalars = self._context.thread, self._context.step.scalars
        if not (isinstance(limit, float) and limit == inf):  # that only asks for the norm
            scalars[CLIPS_NOTHING] = 0.0 if self._reaches else scalars.get(CLIPS_NOTHING, 1.0)
            if thread.clips_late:
                scalars[LATE_CLIPPING] = 1.0
            elif norm is not None:
                self._note_apart(scalars)
        if thread.clips_late:
            return
        if limit is None or norm is None:
            return
        clipped: list[WatchedOptimizer] = thread.clipped
        of_run = [watched for watched in clipped if watched.role is not Role.SEPARATE]
        if of_run:
            step = self._context.boundaries.of(of_run[0])
            step.add_clipping({watched.label for watched in of_run}, limit, norm)
            if not of_all_ranks and len(of_run) == 1 and _holds_shards(of_run[0]):
                scalars[CLIPPED_BY_SHARD] = _is_same(norm, step.norm(of_run[0].label))
        else:
            for watched in clipped:
                watched.scalars.update(clip_max_norm=limit, clip_norm=norm)

    def _note_apart(self, scalars: dict[str, Scalar]) -> None:
        """Count norms of single parameters; not those of hooks, each of which has but one.

        Nor those of an optimizer's own step, as in BERT's Adam: it is defined so.
        """
        sequence, apart = self._context.step.sequence, self._apart
        calls = apart[1] if apart[0] == sequence else 0.0
        by_design = within_backward() or self._context.thread.stepping is not None
        alone = self._given == 1 and not by_design
        self._apart = sequence, calls + 1.0 if alone else nan
        scalars[CLIPPED_APART] = float(self._apart[1] >= _CLIPPED_APART)

    def compiled(self) -> None:
        """Measure after every backward from now on, since compiled clipping calls no hook."""
        context = self._context
        context.clipping_is_compiled = True
        context.note_unsupported("limit and coefficient of clipping, which is compiled")
        context.traits.measuring_point = "backward"


class LossScalingTracking:
    """Follows `scaler.unscale_` and `scaler.step` of enabled scalers."""

    def __init__(
        self, context: TrackerContext, measuring: GradientMeasuring, step_end: StepEnd
    ) -> None:
        self._context = context
        self._measuring = measuring
        self._step_end = step_end

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Measure the gradients, which are as the optimizer will see them."""
        context = self._context
        if context.thread.engine_steps:
            return
        if (watched := context.registry.of(optimizer)) is not None:
            watched.scaled = True
            context.note_loss_scale(scaler, watched)
            context.thread.unscaled.add(watched.label)
            self._measuring.measure(watched, "unscale", 1.0)
        else:
            context.thread.scaler_settles = True

    def step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Watch whether the optimizer will be stepped."""
        context, thread = self._context, self._context.thread
        thread.scaler_settles = True
        if thread.engine_steps or not isinstance(optimizer, Optimizer):
            return
        context.registry.roles.never_stepped.stepped.add(optimizer)
        thread.scaler_steps = context.registry.of(optimizer)
        if thread.scaler_steps is not None:
            thread.scaler_steps.scaled = True
            context.note_loss_scale(scaler, thread.scaler_steps)
            context.renew_learning_rate(thread.scaler_steps)
            thread.optimizer_stepped = False

    def lets_step(self) -> None:
        """Leave the end of the step to the optimizer, which steps once the scaler has returned."""
        self._context.thread.scaler_steps = None

    def step_ended(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """End the step: skipped, if the optimizer was not stepped."""
        thread = self._context.thread
        watched, thread.scaler_steps = thread.scaler_steps, None
        if watched is not None and watched is self._context.registry.of(optimizer):
            thread.scaler_settles = False
            if not thread.optimizer_stepped:
                self._step_end.note_skip(watched, 1.0)
            self._step_end.finish(watched)
