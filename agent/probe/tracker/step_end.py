"""The end of a step: what is known of it only then, and its way to the recorder."""

from collections.abc import Callable, Collection, Iterable
from threading import get_ident

from mp_agent.probe.isolation.guard import Guard
from mp_agent.probe.optimizers.watched import WatchedOptimizer
from mp_agent.probe.scalars import Scalar, add, snapshot_of
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.records.steps import Phase


class StepEnd:
    """Ends steps, and has the recorder publish those that are complete.

    on_step: called after each step of the run.
    """

    def __init__(self, context: TrackerContext, guard: Guard, on_step: Callable[[], None]) -> None:
        self._context = context
        self._guard = guard
        self._on_step = on_step

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
        context.thread.unscaled.add(watched.label)
        context.registry.roles.confirm(watched)
        step = context.boundaries.of(watched)
        ends_step = step is context.step
        context.recorder.measure_updates(step, watched)
        awaited = context.registry.roles.awaited
        context.registry.roles.stepped(watched)
        if not watched.of_run:
            if (rate := snapshot_of(watched.learning_rate())) is not None:
                watched.scalars["learning_rate"] = rate
            self.publish(context.boundaries.other_ended(watched))
        elif ends_step:
            self.finish_run(watched.label, awaited)
        else:
            self.publish(context.boundaries.joint_ended(watched.label))
        watched.scalars.clear()

    def finish_run(self, label: str, awaited: Collection[str] = ()) -> None:
        """End the step under way: the optimizer `label` of the run has stepped."""
        context = self._context
        context.run_thread = get_ident()
        context.thread.weights.forget()
        context.step.scalars.setdefault("skipped", 0.0)
        context.recorder.end(context.step, context.parts, self._guard.pop_seconds())
        ended = context.step
        self.publish(context.boundaries.run_ended(label, awaited))
        context.recorder.begin_forward(ended)
        context.enter_phase(Phase.FORWARD)
        self.after_step()
        context.parts.step_begins()

    def after_step(self) -> None:
        """Do what is due after each step of the run; its failure is contained."""
        self._guard.contain("looking after the run", self._on_step)
