"""`optimizer.step()`: with closures, within other steps, within backward, and in CUDA graphs."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from math import isnan

from torch.amp import GradScaler
from torch.optim import Optimizer

from mp_agent.probe.optimizers.live_objects import LibraryOptimizer
from mp_agent.probe.optimizers.loop_order import is_left_scaled
from mp_agent.probe.optimizers.parameter_names import has_gradient
from mp_agent.probe.optimizers.roles import Role, WatchedOptimizer
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.step.thread_progress import (
    is_step_within_its_own,
    running_step,
    within_backward,
)
from mp_agent.probe.tracker.context import TrackerContext
from mp_agent.probe.tracker.measuring import GradientMeasuring, StepEnd
from mp_agent.records.steps import Phase

UNGUARDED = "the guard of an optimizer that is not torch's"
ENGINE_BYPASSED = "steps of an engine's optimizer that the engine does not make"


class OptimizerSteps:
    """Follows the steps of optimizers, of which each ends a step of the run or of another model."""

    def __init__(
        self,
        context: TrackerContext,
        measuring: GradientMeasuring,
        step_end: StepEnd,
        graphs: "GraphSteps",
    ) -> None:
        self._context = context
        self._measuring = measuring
        self._step_end = step_end
        self._graphs = graphs
        self.stepped_in_backward = False
        """An optimizer has stepped within the backward under way, which then is a step."""
        self._steps_in_backward = False
        """One has done so before: a step after that backward, without gradients, is none more."""
        self.engine_bypassed = False
        """The optimizer of an engine was stepped, not by the engine."""
        self.paused = False
        """Steps are none of training: torch makes them to fill in empty optimizer state."""
        self._stepped_sequence = 0
        """Step for which the first optimizer was last stepped; a second time, if that broke off."""

    def begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Measure the gradients unless that was done; of a fused optimizer read the skip flag."""
        context, thread = self._context, self._context.thread
        context.registry.roles.never_stepped.stepped.add(optimizer)
        if self._graphs.pending:
            self._graphs.end_replayed()
        released = self._steps_in_backward and isnan(context.step.backward_seconds)
        if self.paused or thread.engine_steps or (released and not has_gradient(optimizer)):
            thread.optimizer_stepped = True
            return
        if within_backward() and not thread.in_closure:
            self._step_in_backward(optimizer)
            return
        if thread.stepping not in (None, id(optimizer)):
            return  # an optimizer within the optimizer
        if thread.stepping is not None and is_step_within_its_own(thread.stepping):
            thread.steps_within += 1
            thread.closure_awaited |= has_closure
            return
        if (watched := context.registry.of(optimizer)) is None:
            return
        if watched.managed:
            self.engine_bypassed = True
            context.note_unsupported(ENGINE_BYPASSED)
            return
        another = not has_closure and not watched.is_of(optimizer)
        if (thread.enclosing and self._is_part_of_enclosing(optimizer, watched)) or (
            another and context.registry.roles.is_outer(optimizer, watched)
        ):
            thread.optimizer_stepped = True
            return
        if another:
            self._follow(optimizer, watched)
        if context.guarded and isinstance(optimizer, LibraryOptimizer):
            context.note_unguarded(UNGUARDED)
        watched.stepped_last = weakref.ref(optimizer)
        if not watched.label:
            sequence = context.boundaries.step.sequence
            if self._stepped_sequence == sequence:
                context.recorder.lost_a_step()
            self._stepped_sequence = sequence
        thread.stepping, thread.optimizer_stepped = id(optimizer), True
        thread.steps_within = 0
        thread.in_closure, thread.closure_awaited = False, has_closure
        fused = hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf")
        if not has_closure and not fused and not context.clipping_is_compiled:
            self._measuring.measure(watched, "optimizer_step", 1.0)
            if thread.scaler is not None:
                watched.use.steps_scaled = left = self._left_scaled(watched, thread.scaler)
                context.order.scaler_bypassed |= left is not None
        elif not has_closure:
            self._measuring.measure_before_step(watched, optimizer)
        elif watched.of_run and not thread.weights.is_set and (plan := watched.plan()) is not None:
            # No backward before the first step knew the optimizer, which may perturb the weights.
            thread.weights.set(plan)

    def _left_scaled(self, watched: WatchedOptimizer, scaler: GradScaler) -> Scalar | None:
        """Return whether the gradients are still multiplied by the scale of the loss: 1 or 0.

        That its tensors were not changed is known of any optimizer, and of the first one as well
        that nothing has changed their numbers behind torch's count, as by `grad.data`.
        """
        thread = self._context.thread
        if thread.scaler_settles or watched.label in thread.unscaled or not watched.use.is_scaled:
            return None
        factor = watched.use.factor if watched.role is Role.FIRST else 1.0
        return is_left_scaled(thread.scale_now.of(scaler._get_scale_async()), factor)

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
        if watched is None:
            return
        watched.searches |= not thread.closure_awaited
        if thread.closure_awaited:
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
        if thread.steps_within:
            thread.steps_within -= 1
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
        watched.follow(optimizer)
        context.renew_learning_rate(watched)

    def _is_part_of_enclosing(self, optimizer: Optimizer, watched: WatchedOptimizer) -> bool:
        """Return whether a step within another one, which has been counted, updates the same.

        The other one may have raised; the same optimizer then begins its own step.
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
        self.stepped_in_backward = self._steps_in_backward = True
        watched = context.registry.first or context.registry.of(optimizer)
        if watched is not None:
            context.note_learning_rate(watched)


_Reference = Callable[[], Optimizer | None]


class CapturedGraphs:
    """Remembers the optimizers whose steps were recorded into each graph; keeps neither alive."""

    def __init__(self) -> None:
        self._capturing: weakref.ref[Hashable] | None = None
        self._stepping: weakref.WeakKeyDictionary[Hashable, list[_Reference]] = (
            weakref.WeakKeyDictionary()
        )

        self._backwards: weakref.WeakSet[Hashable] = weakref.WeakSet()

    def begin(self, graph: Hashable) -> None:
        """Begin to record into `graph`, which so far contains nothing."""
        self._capturing = weakref.ref(graph)
        self._stepping[graph] = []
        self._backwards.discard(graph)

    def end(self) -> None:
        """End the recording."""
        self._capturing = None

    def note_backward(self) -> None:
        """Note a backward during a capture."""
        if self._capturing is not None and (graph := self._capturing()) is not None:
            self._backwards.add(graph)

    def goes_backward(self, graph: Hashable) -> bool:
        """Return whether a replay of `graph` makes gradients."""
        return graph in self._backwards

    def note_step(self, optimizer: object) -> bool:
        """Note a step of an optimizer during a capture; return whether it is known of which."""
        graph = None if self._capturing is None else self._capturing()
        if graph is None or not isinstance(optimizer, Optimizer):
            return False
        self._stepping[graph].append(weakref.ref(optimizer))
        return True

    def steps_of(self, graph: Hashable) -> Sequence[Optimizer] | None:
        """Return the optimizers that step when `graph` is replayed, once for each step.

        None for a graph whose capture was not seen.
        """
        references = self._stepping.get(graph)
        if references is None:
            return None
        return [optimizer for each in references if (optimizer := each()) is not None]


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
        self.pending = 0
        """Steps of the last replay that are yet to be ended."""
        self._unknown_replays = False
        """A graph with unknown contents was replayed since the trainer gave a step's number."""
        self._observed: tuple[int, int] | None = None
        """The last number that the trainer gave, and our number of the step under way then."""

    def capture_begins(self, graph: Hashable) -> None:
        """Begin to note what is captured into `graph`."""
        self._graphs.begin(graph)

    def capture_ended(self) -> None:
        """End the recording of what is captured."""
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
        context.order.gradients_may_change(context.registry.roles.watched)
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
        self.pending = steps

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
        steps, self.pending = self.pending, 0
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
        if not unknown or before is None or self.pending:
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
