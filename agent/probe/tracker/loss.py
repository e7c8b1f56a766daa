"""The loss of the open step: from backward, from loss scaling, from an engine or the user."""

from torch.amp import GradScaler

from mp_agent.probe.scalars import Scalar, reciprocal, snapshot_of
from mp_agent.probe.step.backward_loss import loss_of
from mp_agent.probe.tracker.context import TrackerContext


class LossTracking:
    """Adds up the unscaled losses whose gradients accumulate in the open step."""

    def __init__(self, context: TrackerContext) -> None:
        self._context = context

    def scaled(self, scaler: GradScaler, outputs: object, scaled: object) -> None:
        """Remember the loss as it was before; the backward that follows sees it scaled."""
        context = self._context
        context.thread.scaler = scaler
        context.thread.unscaled.clear()
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
