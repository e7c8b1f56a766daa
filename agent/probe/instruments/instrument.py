"""What is measured besides the gradients that an optimizer uses: a protocol of events.

Next to it, what needs no more than to see forward passes begin: when that of a step does, and in
which mode the model passes through an evaluation.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Concatenate, Literal, ParamSpec

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mp_agent.probe.isolation import Contain
from mp_agent.probe.optimizers.model_mode import ModelMode
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.roles import WatchedOptimizer
from mp_agent.probe.scalars import Scalar
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.phases import StepParts

P = ParamSpec("P")

ScaledOptimizer = tuple[WatchedOptimizer, Scalar]
"""An optimizer, and 1 / the factor by which its gradients are still multiplied."""


class Instrument:
    """Measures what a step is not read of at its end: in its passes, before and after an update.

    The methods are events, in the order in which they occur in a step. One that is not overridden
    is not called; each call is contained by itself.
    """

    subject: str
    """What it measures, for the log of failures."""
    begins: Literal["at once", "with ranks", "once used"] = "at once"
    """From when on it is on: with several ranks in the run, or once the script has used it."""

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the layers, by family; the same object while they are the same."""
        return {}

    def step_begins(self, model: nn.Module | None) -> None:
        """Prepare for the passes of the next step, sampled or not."""

    def begin(self, model: nn.Module | None) -> None:
        """Prepare the model for its next forward pass: that of a sampled step."""

    def end(self, step: OpenStep) -> None:
        """Leave the model as it was; add what is known of its forward pass to the step."""

    def backward_begins(self, step: OpenStep) -> None:
        """Prepare for a backward of the run."""

    def reduction_begins(self, gradients: Sequence[torch.Tensor]) -> None:
        """Measure the rank's own gradients, which are about to be reduced."""

    def backward_ended(self, step: OpenStep) -> None:
        """Add to the step what was measured in the backward pass after that."""

    def gradients_cleared(self) -> None:
        """Forget what was measured of gradients of the run that no step will use."""

    def measuring_begins(self, step: OpenStep, scaled: Sequence[ScaledOptimizer]) -> None:
        """Prepare for the gradients of these optimizers to be measured."""

    def gradients_measured(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Measure what an update will change: these plans' gradients were measured."""

    def gradients_left_out(self, step: OpenStep, plans: Sequence[MeasurementPlan]) -> None:
        """Look at what must not wait for the next step of which these gradients are measured."""

    def optimizer_stepped(self, step: OpenStep, watched: WatchedOptimizer) -> None:
        """Measure what an optimizer did that has stepped or was skipped."""

    def finish(self, step: OpenStep) -> None:
        """Add to the step, which is about to end, what was measured in both passes."""

    def step_timed(self, step: OpenStep, step_seconds: float) -> None:
        """Add to the step what depends on how long it took."""

    def close(self) -> None:
        """Leave the model as it was."""


class Instruments:
    """Those that are on, in the order of their families in a record.

    An event is called as a method of this; without an instrument that it concerns it does nothing.
    """

    def __init__(
        self,
        contain: Contain,
        model: Callable[[], nn.Module | None],
        instruments: Iterable[Instrument],
    ) -> None:
        """model: returns the run's. instruments: in their order, some to be on later."""
        self._contain = contain
        self._model = model
        self._known = tuple(instruments)
        self._on = {each for each in self._known if each.begins == "at once"}
        self._ranks = False
        self._listen()

    def use(self, instrument: Instrument) -> None:
        """Have an instrument on from now on."""
        if instrument not in self._on:
            self._on.add(instrument)
            self._listen()

    def have_ranks(self) -> None:
        """Have on from now on what compares ranks."""
        if not self._ranks:
            self._ranks = True
            self._on.update(each for each in self._known if each.begins == "with ranks")
            self._listen()

    def layers(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of all layers of the run's model, by family."""
        families: dict[str, tuple[str, ...]] = {}
        for instrument in self._with_layers:
            families.update(instrument.layers(self._model()))
        return families

    def _listen(self) -> None:
        on = [each for each in self._known if each in self._on]
        self._with_layers = [each for each in on if type(each).layers is not Instrument.layers]
        self.step_begins = self._all(Instrument.step_begins)
        self.begin = self._all(Instrument.begin)
        self.end = self._all(Instrument.end)
        self.backward_begins = self._all(Instrument.backward_begins)
        self.reduction_begins = self._all(Instrument.reduction_begins)
        self.backward_ended = self._all(Instrument.backward_ended)
        self.gradients_cleared = self._all(Instrument.gradients_cleared)
        self.measuring_begins = self._all(Instrument.measuring_begins)
        self.gradients_measured = self._all(Instrument.gradients_measured)
        self.gradients_left_out = self._all(Instrument.gradients_left_out)
        self.optimizer_stepped = self._all(Instrument.optimizer_stepped)
        self.finish = self._all(Instrument.finish)
        self.step_timed = self._all(Instrument.step_timed)
        self.close = self._all(Instrument.close)

    def _all(self, event: Callable[Concatenate[Any, P], None]) -> Callable[P, None]:
        """Return what calls a method of all instruments that override it."""
        name = event.__name__
        methods = [
            (f"measuring {each.subject} ({name.replace('_', ' ')})", getattr(each, name))
            for each in self._known
            if each in self._on and getattr(type(each), name) is not event
        ]
        if not methods:
            return _nothing

        def call_all(*args: P.args, **kwargs: P.kwargs) -> None:
            for kind, method in methods:
                self._contain(kind, method, *args, **kwargs)

        return call_all


def _nothing(*_: object, **__: object) -> None:
    """Do nothing: no instrument has to."""


Run = Callable[..., None]
"""`Shield.run`: a kind of failure, a function, and its arguments."""


class PreForwardHook:
    """A pre-hook; a copy of the module, pickled or deep, has one that does nothing instead.

    Where `torch.compile` traces it, it leaves nothing in the graph, and is not called.
    """

    __slots__ = ("_called", "_run", "_with_gradients")

    def __init__(
        self, run: Run, called: Callable[..., None], *, with_gradients: bool = True
    ) -> None:
        """Call `called` with what the module gets, and its named arguments if registered so."""
        self._run, self._called, self._with_gradients = run, called, with_gradients

    def __call__(self, module: object, *inputs: object) -> None:
        """Report a forward with gradients, or one without."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return
        if torch.is_grad_enabled() is self._with_gradients:
            self._run("forward", self._called, *inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the standard library alone: what is saved must load where mp_agent is not installed.
        return getattr, (nullcontext(), "__exit__")


class ForwardStart(Instrument):
    """Keeps one hook on the model, none on what it contains: a compiled model runs it, too."""

    subject = "the parts of a step"

    def __init__(self, run: Run, parts: StepParts) -> None:
        self._hook = PreForwardHook(run, self._begins)
        self._parts = parts
        self._model: weakref.ref[nn.Module] | None = None
        self._handle: RemovableHandle | None = None

    def step_begins(self, model: nn.Module | None) -> None:
        """Have the hook on this model, if it is not; of a scripted one no forward is seen."""
        if self._model is not None and self._model() is model and self._handle is not None:
            return
        self.close()
        if model is None or isinstance(model, torch.jit.ScriptModule):
            return
        self._model = weakref.ref(model)
        self._handle = nn.Module.register_forward_pre_hook(model, self._hook, prepend=True)

    def step_timed(self, step: OpenStep, step_seconds: float) -> None:
        """Add how long the parts of the step took."""
        step.scalars.update(self._parts.known(step_seconds))

    def close(self) -> None:
        """Remove the hook."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _begins(self, inputs: object) -> None:
        self._parts.forward_begins()


_PASSES_OF_EVALUATION = 4


class Evaluations(Instrument):
    """Sees the mode of the model in an evaluation, with one hook on it for the first passes."""

    subject = "evaluations"

    def __init__(
        self,
        run: Run,
        model: Callable[[], nn.Module | None],
        mode: Callable[[], ModelMode | None],
        sequence: Callable[[], int],
    ) -> None:
        """Ask these for the run's model, its mode, and the number of the step under way."""
        self._hook = PreForwardHook(run, self._passes_through, with_gradients=False)
        self._model = model
        self._mode = mode
        self._sequence = sequence
        self._handle: RemovableHandle | None = None
        self._passes = 0

    def begin_evaluation(self) -> None:
        """Count passes without gradients from now on, unless they are a part of training."""
        mode, model = self._mode(), self._model()
        if mode is None or model is None or isinstance(model, torch.jit.ScriptModule):
            return
        if mode.evaluation_begins(self._sequence()):
            self.close()
            self._handle = nn.Module.register_forward_pre_hook(model, self._hook, prepend=True)

    def end(self, step: OpenStep) -> None:
        """Count no more: a backward begins."""
        if self._handle is not None:
            self.close()

    def close(self) -> None:
        """Remove the hook."""
        handle, self._handle, self._passes = self._handle, None, 0
        if handle is not None:
            handle.remove()

    def _passes_through(self, inputs: object) -> None:
        self._passes += 1
        if self._passes >= _PASSES_OF_EVALUATION:
            self.close()
            if (mode := self._mode()) is not None:
                mode.evaluated()
