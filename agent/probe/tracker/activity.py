"""What training does between steps: it evaluates, and saves checkpoints."""

import weakref

from torch import nn

from mp_agent.probe.tracker.context import TrackerContext


class ActivityTracking:
    """Sets the phase between an optimizer's step and the next backward."""

    def __init__(self, context: TrackerContext) -> None:
        self._context = context

    @property
    def between_steps(self) -> bool:
        """Whether training has begun and neither a backward nor an optimizer is running."""
        return self._context.phases.between_steps

    def mode_changed(self, module: nn.Module, training: bool) -> None:
        """Treat the evaluation mode of the model that is trained as evaluation."""
        first = self._context.registry.first
        plan = None if first is None else first.plan()
        if plan is None or self._context.trains_other_model:
            return
        if plan.identities <= {id(each) for each in nn.Module.parameters(module)}:
            evaluated = weakref.ref(module)

            def is_over() -> bool:  # Lightning sets the attribute, and calls nothing
                found = evaluated()
                return found is None or found.training

            self._context.phases.evaluation("mode", not training, is_over)

    def evaluation(self, sign: str, begins: bool) -> None:
        """Treat a stretch without gradients, between two steps, as evaluation."""
        if not self._context.trains_other_model:
            self._context.phases.evaluation(sign, begins)

    def saving(self, begins: bool) -> None:
        """Enter or leave the checkpoint phase, if the thread that trains saves."""
        if not self._context.trains_other_model:
            self._context.phases.saving(begins)
