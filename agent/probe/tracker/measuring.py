"""When gradients are measured, which optimizers' together, and for which step."""

from math import isnan
from threading import get_ident

from torch.optim import Optimizer

from mp_agent.probe.optimizers.watched import Role, WatchedOptimizer
from mp_agent.probe.placement import world_size
from mp_agent.probe.scalars import Scalar, reciprocal, scalar_of, snapshot_of
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.step_end import StepEnd
from mp_agent.probe.tracker.succession import Succession
from mp_agent.records.columns import GRADIENT_FACTOR, GRADIENTS_REPLACED, LOSS_FACTOR
from mp_agent.records.steps import Phase

_UNHELD_AT_STEP = 64
"""By which all optimizers that train the run's model have been made."""
OWN_GRADIENTS = "the loss of steps whose gradients the script itself puts together"


class GradientMeasuring:
    """Hands gradients to the recorder, once per step and optimizer unless a backward follows."""

    def __init__(self, context: TrackerContext, succession: Succession, step_end: StepEnd) -> None:
        self._context = context
        self._succession = succession
        self._step_end = step_end
        self._gradients_change = False
        """The script was found to change gradients in place between backward and step."""

    def measure(self, watched: WatchedOptimizer, point: str, inverse_scale: Scalar) -> None:
        """Measure gradients as they stand, unless those that stand were measured before.

        point: where in the step, for the run's facts. inverse_scale: 1 / the factor by which the
        gradients are still multiplied.
        """
        self._measure(watched, point, inverse_scale)
        if not self._context.trains_other_model:
            self._context.parts.optimizer_begins()

    def _measure(self, watched: WatchedOptimizer, point: str, inverse_scale: Scalar) -> None:
        context = self._context
        context.enter_phase(Phase.OPTIMIZER)
        context.registry.roles.confirm(watched)
        if watched.role is Role.SEPARATE and self._succession.is_due(watched):
            self._succession.hand_over(watched)
        step = context.boundaries.of(watched)
        if watched.label in step.measured or watched.label in step.settled:
            return
        if context.boundaries.is_published(step):
            step = context.step
        context.connection.ensure()
        if watched.of_run and step is context.step:
            self._begin_measuring_run(watched)
        scaled = [
            (each, inverse_scale if each is watched else context.inverse_scale(each))
            for each in context.registry.together(watched)
        ]
        context.thread.measures.update(each.label for each, _ in scaled)
        if watched.of_run:
            self._note_changed_gradients(point)
            self._note_factors(step, point)
        context.recorder.measure(step, scaled, point)

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
        scale = scalar_of(getattr(optimizer, "grad_scale", None))
        skipped = snapshot_of(getattr(optimizer, "found_inf", None))
        inverse_scale = 1.0 if scale is None else reciprocal(scale)
        if not self._context.clipping_is_compiled:
            self.measure(watched, "optimizer_step", inverse_scale)
        elif isnan(self._context.boundaries.of(watched).backward_seconds):
            self._context.note_unsupported("the norm before clipping, which is compiled")
            self.measure(watched, "after_clipping", inverse_scale)
        if skipped is not None:
            self._step_end.note_skip(watched, skipped)

    def _begin_measuring_run(self, watched: WatchedOptimizer) -> None:
        """Publish the step before, and record what is known as the run's gradients are used."""
        context = self._context
        if context.run_thread is None:
            # Else the backward of another thread would outdate what is measured here.
            context.run_thread = get_ident()
        self._step_end.publish(context.boundaries.close_ended())
        first = context.registry.first or watched
        context.step.drop_cleared_loss(first.is_cleared_by)
        context.note_learning_rate(first)
        if not first.managed:
            context.note_trainer_step(first, context.step.sequence)
        if context.step.sequence == _UNHELD_AT_STEP and (
            found := context.registry.unheld_gradients()
        ):
            context.note_unsupported(f"gradients that no optimizer holds: {found}")

    def _note_factors(self, step: OpenStep, point: str) -> None:
        """Record by what gradients were multiplied since backward, and the loss before it.

        Not where a scaler does that, whose scale is known.
        """
        thread, plan = self._context.thread, self._context.marked_plan()
        scaled = thread.scaler is not None or point not in ("clip", "optimizer_step")
        if plan is None or scaled:
            return
        if (changes := thread.trace.changes(plan, step.sequence)) is not None:
            step.scalars[GRADIENT_FACTOR], step.scalars[GRADIENTS_REPLACED] = changes
        if thread.trace.loss_factor is not None:
            step.scalars[LOSS_FACTOR] = thread.trace.loss_factor

    def _note_changed_gradients(self, point: str) -> None:
        """Report gradients that were clipped, or otherwise changed, by means that call no hook.

        On several ranks the change may be the script's own reduction, which is no reason to.
        """
        context = self._context
        gradients, step = context.thread.gradients, context.step
        if self._has_other_gradients(step, point):
            step.drop_loss()
            context.note_unsupported(OWN_GRADIENTS)
        measures_late = point in ("clip", "optimizer_step") and world_size() == 1
        if measures_late and not self._gradients_change and gradients.moved:
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
        alone = all(each.role is not Role.SEPARATE for each in context.registry.known)
        return alone and step.makes_gradients and step.makes_none
