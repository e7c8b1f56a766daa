"""A recorder whose failures cost what it was to record, and not the step's place in the count."""

from collections.abc import Callable, Sequence

from mp_agent.probe.instruments.local_gradients import LocalGradients
from mp_agent.probe.instruments.tensors import WatchedTensors
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.registry import OptimizerRegistry
from mp_agent.probe.optimizers.roles import WatchedOptimizer
from mp_agent.probe.optimizers.run_facts import ObservedTraits
from mp_agent.probe.recording.recorder import StepRecorder
from mp_agent.probe.recording.step_measurement import ForwardPass, ForwardStart
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.phases import StepParts
from mp_agent.settings import Settings

Contain = Callable[..., None]
"""`Guard.contain`: a kind of failure, a function, and its arguments."""


class ContainedRecorder(StepRecorder):
    """Contains each thing that a recorder does by itself.

    Gradients that cannot be measured leave the loss, the loss scale and the steps as they are.
    """

    def __init__(
        self,
        contain: Contain,
        registry: OptimizerRegistry,
        traits: ObservedTraits,
        settings: Settings,
        forward_pass: ForwardPass | None = None,
        tensors: WatchedTensors | None = None,
        forward_start: ForwardStart | None = None,
        local_gradients: LocalGradients | None = None,
    ) -> None:
        super().__init__(
            registry, traits, settings, forward_pass, tensors, forward_start, local_gradients
        )
        self._contain = contain

    def measure(
        self, step: OpenStep, scaled: Sequence[tuple[WatchedOptimizer, Scalar]], point: str
    ) -> None:
        """See `StepRecorder.measure`."""
        labels = [watched.label for watched, _ in scaled if watched.label]
        which = f" of optimizer {labels[0]}" if len(labels) == len(scaled) > 0 else ""
        self._contain(f"measuring gradients{which}", super().measure, step, scaled, point)

    def keep_weights(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """See `StepRecorder.keep_weights`."""
        self._contain("copying weights", super().keep_weights, step, plans)

    def measure_updates(self, step: OpenStep, watched: WatchedOptimizer) -> None:
        """See `StepRecorder.measure_updates`."""
        self._contain("measuring updates of weights", super().measure_updates, step, watched)

    def end(self, step: OpenStep, parts: StepParts, probe_seconds: float) -> None:
        """See `StepRecorder.end`."""
        self._contain("timing a step", super().end, step, parts, probe_seconds)

    def begin_forward(self, after: OpenStep) -> None:
        """See `StepRecorder.begin_forward`."""
        self._contain("preparing a forward pass", super().begin_forward, after)

    def forward_ended(self, step: OpenStep) -> None:
        """See `StepRecorder.forward_ended`."""
        self._contain("measuring a forward pass", super().forward_ended, step)

    def backward_begins(self, step: OpenStep) -> None:
        """See `StepRecorder.backward_begins`."""
        self._contain("preparing for local gradients", super().backward_begins, step)

    def add_local_gradients(self, step: OpenStep) -> None:
        """See `StepRecorder.add_local_gradients`."""
        self._contain("adding local gradients", super().add_local_gradients, step)

    def backward_ended(self, step: OpenStep) -> None:
        """See `StepRecorder.backward_ended`."""
        self._contain("measuring a backward pass", super().backward_ended, step)

    def compare_logprobs(
        self, step: OpenStep, trainer: object, sampler: object, mask: object
    ) -> None:
        """See `StepRecorder.compare_logprobs`."""
        compare = super().compare_logprobs
        self._contain("comparing log-probabilities", compare, step, trainer, sampler, mask)

    def add_tensors(self, step: OpenStep) -> None:
        """See `StepRecorder.add_tensors`."""
        self._contain("adding watched tensors", super().add_tensors, step)

    def publish(self, step: OpenStep, *, relabelled: bool = False) -> None:
        """See `StepRecorder.publish`."""
        self._contain("writing a step", super().publish, step, relabelled=relabelled)

    def collect(self) -> None:
        """See `StepRecorder.collect`."""
        self._contain("publishing what has arrived", super().collect)

    def flush(self, step: OpenStep) -> None:
        """See `StepRecorder.flush`."""
        self._contain("writing the last step", super().flush, step)
