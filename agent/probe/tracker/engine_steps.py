"""Steps of a framework's engine (DeepSpeed, Megatron-Core), which unscales, clips and skips."""

from math import isnan

from mp_agent.probe.optimizers.engine import Engine, OwningEngine
from mp_agent.probe.scalars import reciprocal
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.measuring import GradientMeasuring
from mp_agent.probe.tracker.optimizer_steps import UNGUARDED
from mp_agent.probe.tracker.step_end import StepEnd


class EngineSteps:
    """Measures before an engine steps, and records what became of the step."""

    def __init__(
        self, context: TrackerContext, measuring: GradientMeasuring, step_end: StepEnd
    ) -> None:
        self._context = context
        self._measuring = measuring
        self._step_end = step_end

    def begins(self, engine: Engine) -> None:
        """Measure the gradients before the engine unscales and clips them."""
        context, thread = self._context, self._context.thread
        if (watched := context.registry.managed_by(engine)) is None:
            if engine.optimizer is None:
                context.note_unsupported("an engine without parameters to train on this rank")
            return
        attached_late = context.step.sequence == 1
        if watched.of_run and isnan(context.step.backward_seconds) and not attached_late:
            context.note_unsupported("the loss of backwards that an engine runs by other means")
        if context.guarded and not isinstance(engine, OwningEngine):
            context.note_unguarded(UNGUARDED)
        thread.engine_steps, thread.optimizer_stepped = True, False
        before = engine.begin()
        if watched.of_run:
            if before.loss_scale is not None:
                context.step.scalars["loss_scale"] = before.loss_scale
                context.traits.scaler_name = engine.scaler_name
            if before.completed is None:
                context.note_trainer_step(watched, context.step.sequence)
            else:
                context.trainer_step.completed_by_engine(before.completed, context.step.sequence)
                context.update_trainer_lead()
        scale = before.gradient_scale
        inverse_scale = 1.0 if scale is None else reciprocal(scale)
        if watched.of_run and scale is not None:
            context.step.unscale_raw_loss(inverse_scale)
        self._measuring.measure(watched, "engine_step", inverse_scale)

    def raised(self) -> None:
        """Give the step up."""
        self._context.thread.engine_steps = False

    def ended(self, engine: Engine) -> None:
        """End the step with its outcome: skipped or not, and how it was clipped."""
        context, thread = self._context, self._context.thread
        if not thread.engine_steps:
            return
        thread.engine_steps = False
        if (watched := context.registry.managed_by(engine)) is None:
            return
        result = engine.end()
        skipped = not thread.optimizer_stepped if result.skipped is None else result.skipped
        step = context.boundaries.of(watched)
        if not watched.of_run:
            step.forget_if(float(skipped), watched.label)
        else:
            step.scalars["skipped"] = float(skipped)
            own = step.norm(watched.label)
            if result.clip_max_norm is not None and own is not None and not skipped:
                norm = own if result.norm is None else result.norm
                step.scalars.update(clip_max_norm=result.clip_max_norm, clip_norm=norm)
        self._step_end.finish(watched)
