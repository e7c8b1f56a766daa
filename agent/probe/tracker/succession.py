"""When another optimizer trains on where those of the run have ceased to, and takes their place."""

import threading
from threading import get_ident

from mp_agent.probe.optimizers.watched import WatchedOptimizer
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.step_end import StepEnd


class Succession:
    """Lets the run go on with the optimizer that has succeeded its first one."""

    def __init__(self, context: TrackerContext, step_end: StepEnd) -> None:
        self._context = context
        self._step_end = step_end

    def is_due(self, watched: WatchedOptimizer) -> bool:
        """Return whether an optimizer trains on where those of the run have ceased to.

        Trainings side by side, each in a thread of its own, do not take each other's place.
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
