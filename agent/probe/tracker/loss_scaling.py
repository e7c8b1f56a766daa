"""GradScaler: it divides gradients by the loss scale, and skips steps."""

from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.measuring import GradientMeasuring
from mp_agent.probe.tracker.step_end import StepEnd


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

    def step_begins(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Watch whether the optimizer will be stepped."""
        context, thread = self._context, self._context.thread
        if thread.engine_steps or not isinstance(optimizer, Optimizer):
            return
        thread.scaler_steps = context.registry.of(optimizer)
        if thread.scaler_steps is not None:
            thread.scaler_steps.scaled = True
            context.note_loss_scale(scaler, thread.scaler_steps)
            thread.optimizer_stepped = False

    def lets_step(self) -> None:
        """Leave the end of the step to the optimizer, which steps once the scaler has returned."""
        self._context.thread.scaler_steps = None

    def step_ended(self, optimizer: Optimizer) -> None:
        """End the step: skipped, if the optimizer was not stepped."""
        thread = self._context.thread
        watched, thread.scaler_steps = thread.scaler_steps, None
        if watched is not None and watched is self._context.registry.of(optimizer):
            if not thread.optimizer_stepped:
                self._step_end.note_skip(watched, 1.0)
            self._step_end.finish(watched)
