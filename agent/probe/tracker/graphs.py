"""Steps that are replayed from a CUDA graph, which calls no other hook."""

from collections.abc import Hashable, Sequence

from torch.optim import Optimizer

from mp_agent.probe.step.captured_graphs import CapturedGraphs
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.step_end import StepEnd
from mp_agent.records.steps import Phase

UNMEASURED = "gradients of steps in CUDA graphs"
UNSEEN = "loss, activations and times of backwards in CUDA graphs"


class GraphSteps:
    """Counts the steps in replayed graphs; their gradients are not measured.

    A replayed step ends when the next one begins, or when training goes on otherwise, so that a
    loss that `observe()` is given after the replay is the loss of that step. Of a graph that was
    captured before the probe attached, `observe(step=…)` shows when a step has ended.
    """

    def __init__(self, context: TrackerContext, step_end: StepEnd) -> None:
        self._context = context
        self._step_end = step_end
        self._graphs = CapturedGraphs()
        self._pending = 0
        """Steps of the last replay that are yet to be ended."""
        self._unknown_replays = False
        """A graph with unknown contents was replayed since the trainer gave a step's number."""
        self._observed: tuple[int, int] | None = None
        """The last number that the trainer gave, and our number of the step under way then."""

    def capture_begins(self, graph: Hashable) -> None:
        """Begin to note what is captured into `graph`."""
        self._graphs.begin(graph)

    def capture_ended(self) -> None:
        """End it."""
        self._graphs.end()

    def captured_step(self, optimizer: object) -> None:
        """Note that a step of `optimizer` is being captured. Called during the capture."""
        self._graphs.note_step(optimizer)

    def captured_backward(self) -> None:
        """Note that a backward is being captured. Called during the capture."""
        self._graphs.note_backward()

    def replayed(self, graph: Hashable) -> None:
        """End the step replayed before, and begin those that `graph` contains."""
        context = self._context
        context.recorder.collect()
        stepping = self._graphs.steps_of(graph)
        if stepping is None:
            self._unknown_replays = True
            return
        steps = self._steps_of_run(stepping)
        if steps == 0:
            if self._graphs.goes_backward(graph):
                self._begin_pass()
            return
        self.end_replayed()
        context.connection.ensure()
        context.note_unsupported(UNMEASURED)
        context.enter_phase(Phase.FORWARD)
        self._pending = steps

    def _begin_pass(self) -> None:
        """Expect gradients that were not looked at: those of a backward that calls no hook."""
        context = self._context
        if context.trains_other_model:
            return
        self.end_replayed()
        context.connection.ensure()
        context.note_unsupported(UNSEEN)
        self._step_end.begin_next_pass()
        context.boundaries.gradients_change()
        context.enter_phase(Phase.FORWARD)

    def end_replayed(self) -> None:
        """End the steps of the last replay, if that is yet to be done."""
        steps, self._pending = self._pending, 0
        for _ in range(steps):
            self._end_step()

    def observed(self, step: int) -> None:
        """Use the trainer's number: a greater one, after a replay alone, means that a step ended.

        Called before the number is used for the step under way.
        """
        context = self._context
        sequence = context.step.sequence
        before, self._observed = self._observed, (step, sequence)
        unknown, self._unknown_replays = self._unknown_replays, False
        if not unknown or before is None or self._pending:
            return
        if step > before[0] and sequence == before[1] and context.registry.first is not None:
            context.note_unsupported(UNMEASURED)
            self._end_step()
            self._observed = step, context.step.sequence

    def _steps_of_run(self, stepping: Sequence[Optimizer]) -> int:
        """Return how many steps of the run these steps of optimizers make, on any thread."""
        found = [self._context.registry.of(optimizer) for optimizer in stepping]
        first = self._context.registry.first
        return sum(watched is not None and watched is first for watched in found)

    def _end_step(self) -> None:
        context = self._context
        if (first := context.registry.first) is None:
            return
        context.step.scalars["gradients_measured"] = 0.0
        context.note_learning_rate(first)
        context.note_trainer_step(first, context.step.sequence)
        self._step_end.finish_run(first.label)
