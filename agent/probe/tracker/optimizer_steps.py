"""`optimizer.step()`: with closures, within other steps, and within backward."""

from torch.optim import Optimizer

from mp_agent.probe.optimizers.library_optimizer import LibraryOptimizer
from mp_agent.probe.optimizers.watched import WatchedOptimizer
from mp_agent.probe.scalars import snapshot_of
from mp_agent.probe.step.running_step import running_step
from mp_agent.probe.step.thread_progress import within_backward
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.measuring import GradientMeasuring
from mp_agent.probe.tracker.step_end import StepEnd

UNGUARDED = "the guard of an optimizer that is not torch's"


class OptimizerSteps:
    """Follows the steps of optimizers, of which each ends a step of the run or of another model."""

    def __init__(
        self, context: TrackerContext, measuring: GradientMeasuring, step_end: StepEnd
    ) -> None:
        self._context = context
        self._measuring = measuring
        self._step_end = step_end
        self.stepped_in_backward = False
        """An optimizer has stepped within the backward under way, which then is a step."""
        self.paused = False
        """Steps are none of training: torch makes them to fill in empty optimizer state."""
        self._stepped_sequence = 0
        """Step for which the first optimizer was last stepped; a second time, if that broke off."""

    def begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Measure the gradients unless that was done; of a fused optimizer read the skip flag."""
        context, thread = self._context, self._context.thread
        if self.paused or thread.engine_steps:
            thread.optimizer_stepped = True
            return
        if within_backward() and not thread.in_closure:
            self._step_in_backward(optimizer)
            return
        if thread.stepping not in (None, id(optimizer)):
            return  # an optimizer within the optimizer
        if (watched := context.registry.of(optimizer)) is None or watched.managed:
            return
        if self._is_part_of_enclosing(optimizer, watched) or (
            not has_closure and context.registry.roles.is_outer(optimizer, watched)
        ):
            thread.optimizer_stepped = True
            return
        if not has_closure:
            self._follow(optimizer, watched)
        if context.guarded and isinstance(optimizer, LibraryOptimizer):
            context.note_unguarded(UNGUARDED)
        if not watched.label:
            if self._stepped_sequence == context.step.sequence:
                context.recorder.lost_a_step()
            self._stepped_sequence = context.step.sequence
        thread.stepping, thread.optimizer_stepped = id(optimizer), True
        thread.in_closure, thread.closure_awaited = False, has_closure
        if not has_closure:
            self._measuring.measure_before_step(watched, optimizer)
        elif watched.of_run and not thread.weights.is_set and (plan := watched.plan()) is not None:
            # No backward before the first step knew the optimizer, which may perturb the weights.
            thread.weights.set(plan)

    def closure_begins(self, optimizer: Optimizer) -> None:
        """Expect backwards within the optimizer's step."""
        thread = self._context.thread
        thread.in_closure = thread.stepping == id(optimizer)
        thread.closure_made_gradients = False

    def closure_returned(self, optimizer: Optimizer) -> None:
        """Measure the gradients when the closure returns for the first time in this step.

        Without a backward in it they are those of the loop, which Lightning steps by hand so.
        """
        thread = self._context.thread
        if thread.stepping != id(optimizer):
            return
        thread.in_closure = False
        watched = self._context.registry.of(optimizer)
        if thread.closure_awaited and watched is not None:
            thread.closure_awaited = False
            if thread.closure_made_gradients:
                self._measuring.measure_for_good(watched)
            else:
                self._measuring.measure_before_step(watched, optimizer)

    def closure_raised(self, optimizer: Optimizer) -> None:
        """Give the step up: the next backward is that of a new attempt."""
        context, thread = self._context, self._context.thread
        if thread.stepping != id(optimizer):
            return
        thread.in_closure = False
        if (watched := context.registry.of(optimizer)) is not None:
            settled = context.boundaries.of(watched).settled
            settled.difference_update(each.label for each in context.registry.together(watched))
            context.step.loss_outdated |= watched.of_run
            if not watched.label:
                self._stepped_sequence = 0
            thread.weights.forget()

    def ended(self, optimizer: Optimizer) -> None:
        """End the step, unless the scaler will."""
        context, thread = self._context, self._context.thread
        if thread.enclosing is not None and thread.enclosing[0] == id(optimizer):
            thread.enclosing = None
            thread.weights.forget()
            if not context.trains_other_model:
                context.step.loss_outdated = context.step.losses > 0
        if thread.stepping != id(optimizer):
            return
        thread.stepping, thread.in_closure = None, False
        watched = context.registry.of(optimizer)
        if watched is None:
            return
        if thread.closure_awaited:  # it was never called
            thread.closure_awaited = False
            self._measuring.measure_before_step(watched, optimizer)
        if watched is not thread.scaler_steps:
            watched.scaled = False
            self._step_end.finish(watched)

    def end_enclosing(self) -> None:
        """End the step that runs a backward, by a hook of the script's or of its own accord.

        What follows within it may be whole steps of other optimizers. A step that is no longer
        running has raised, and was none.
        """
        context, thread = self._context, self._context.thread
        identity, thread.stepping = thread.stepping, None
        if identity is None or thread.closure_awaited:
            return
        if (optimizer := running_step(identity)) is None:
            return
        watched = context.registry.of(optimizer)
        if watched is None or not context.registry.roles.has_new_gradients(watched):
            return  # it makes the gradients that it will use by itself
        if watched is not thread.scaler_steps:
            watched.scaled = False
        thread.enclosing = identity, watched
        self._step_end.finish(watched)

    def _follow(self, optimizer: Optimizer, watched: WatchedOptimizer) -> None:
        """Watch `optimizer` in the place of one that holds the same and has never stepped.

        Clipping shows gradients before it is known which optimizer they are for: it is the one
        that steps with them, not one that steps between passes (the outer one of DiLoCo).
        """
        context = self._context
        if watched.is_of(optimizer) or watched.stepped_in_pass:
            return
        if not context.registry.roles.has_new_gradients(watched):
            return
        rate, scalars = snapshot_of(watched.learning_rate()), context.step.scalars
        watched.follow(optimizer)
        if not watched.label and isinstance(rate, float) and scalars.get("learning_rate") == rate:
            del scalars["learning_rate"]  # the script has not given another one
            context.note_learning_rate(watched)

    def _is_part_of_enclosing(self, optimizer: Optimizer, watched: WatchedOptimizer) -> bool:
        """Return whether a step within another one, which has been counted, updates the same.

        The other one may have raised; the same optimizer then begins a step of its own.
        """
        thread = self._context.thread
        if thread.enclosing is None:
            return False
        if thread.enclosing[0] == id(optimizer) or running_step(thread.enclosing[0]) is None:
            thread.enclosing = None
            return False
        return thread.enclosing[1] is watched

    def _step_in_backward(self, optimizer: Optimizer) -> None:
        """Count the backward as a step: there is no moment at which all gradients exist."""
        context = self._context
        context.note_unsupported("optimizer step within backward")
        self.stepped_in_backward = True
        watched = context.registry.first or context.registry.of(optimizer)
        if watched is not None:
            context.note_learning_rate(watched)
