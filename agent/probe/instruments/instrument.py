"""What is measured besides the gradients that an optimizer uses: a protocol of events.

Next to it, what needs no more than the first forward of a step: when it begins, and a digest of the
batch. Steps are looked at in pairs of neighbours, with one hook on the model that is gone after its
first forward. The digest stays on the device of the batch, and goes the way of a loss from there.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, Concatenate, Literal, ParamSpec
from zlib import crc32

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.accelerator import DeviceConstants, on_one_device
from mp_agent.probe.isolation import Contain
from mp_agent.probe.optimizers.plan import MeasurementPlan
from mp_agent.probe.optimizers.roles import WatchedOptimizer
from mp_agent.probe.scalars import Scalar, scalar_of
from mp_agent.probe.step.data import Loaders, Seeds
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.probe.step.phases import StepParts
from mp_agent.records.columns import (
    BATCH_DIGEST,
    BATCH_INTERVAL_STEPS,
    BATCH_KEPT,
    BATCH_LOADED,
    BATCH_ROWS,
    EPOCH_REPEATED,
    LOADED_BY_WORKERS,
    SEED_REPEATED,
)

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

    __slots__ = ("_called", "_run")

    def __init__(self, run: Run, called: Callable[..., None]) -> None:
        """Call `called` with what the module gets, and its named arguments if registered so."""
        self._run, self._called = run, called

    def __call__(self, module: object, *inputs: object) -> None:
        """Report a forward with gradients."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return
        if torch.is_grad_enabled():
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


_TENSORS = 4
_ELEMENTS = 256
"""Elements of each tensor that the digest is of."""
_ALONG = 16
"""The most of them along any dimension but the last."""
_BYTES_AT_MOST = 16
_WEIGHTS = tuple(
    2654435761 * (2 * place + 1) % 2**31 for place in range(_TENSORS * _ELEMENTS * _BYTES_AT_MOST)
)
_DIGEST_BITS = 2**32 - 1


class Repetitions(Instrument):
    """Notes in a step what it repeats of earlier ones: their random numbers, or their batches."""

    subject = "repetitions"
    begins = "once used"

    def __init__(self, loaders: Loaders, seeds: Seeds) -> None:
        self._loaders = loaders
        self._seeds = seeds

    def backward_begins(self, step: OpenStep) -> None:
        """Add to the step what its batch, and the random numbers until now, repeat."""
        if self._loaders.backward_begins():
            step.scalars[EPOCH_REPEATED] = 1.0
        if self._seeds.backward_begins(step.sequence):
            step.scalars[SEED_REPEATED] = 1.0


class Batches(Instrument):
    """Has a hook on the model from one backward to the first forward of the next step, if due."""

    subject = "batches"

    def __init__(
        self,
        run: Run,
        in_training: Callable[[], bool],
        loaders: Loaders,
        model: Callable[[], nn.Module | None],
        sequence: Callable[[], int],
    ) -> None:
        """model: returns the run's. sequence: returns the number of the step under way."""
        self._hook = PreForwardHook(run, self._forward_begins)
        self._in_training = in_training
        self._loaders = loaders
        self._model = model
        self._sequence = sequence
        self._constants = DeviceConstants()
        self._handle: RemovableHandle | None = None
        self._awaited = 0
        """Number of the step whose forward is awaited."""
        self._found: dict[str, Scalar] = {}
        self._before: weakref.ref[torch.Tensor] | None = None
        """The first tensor of the step before."""
        self._delivered_before = 0

    def end(self, step: OpenStep) -> None:
        """Add to the step what was found in its first forward; await that of the next one.

        A backward before its forward, such as a discriminator's, changes nothing.
        """
        if self._found:
            step.scalars.update(self._found)
            self._found = {}
        still_awaited = self._awaited == step.sequence and self._handle is not None
        if self._awaited > step.sequence or still_awaited:
            return
        self.close()
        self._awaited = step.sequence + 1
        if self._awaited % BATCH_INTERVAL_STEPS not in (0, 1):
            return
        model = self._model()
        if model is not None and not isinstance(model, torch.jit.ScriptModule):
            self._handle = nn.Module.register_forward_pre_hook(
                model, self._hook, prepend=True, with_kwargs=True
            )

    def close(self) -> None:
        """Remove the hook."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _forward_begins(self, inputs: object, named: object) -> None:
        due = self._handle is not None and self._sequence() == self._awaited
        if not due or not self._in_training():
            return
        self.close()
        tensors = list(islice(_tensors((inputs, named)), _TENSORS))
        if not tensors:
            return
        digest = self._digest(tensors)
        if digest is not None:
            self._found[BATCH_DIGEST] = digest
        first = next((each for each in tensors if each.dim()), None)
        if first is not None:
            self._found[BATCH_ROWS] = float(first.shape[0])
        self._note_origin(tensors[0] if tensors[0]._base is None else tensors[0]._base)

    def _note_origin(self, memory: torch.Tensor) -> None:
        """Note whether this is the memory of the step before, and whether a loader delivered."""
        delivered = self._loaders.delivered
        if self._awaited % BATCH_INTERVAL_STEPS and self._before is not None:
            self._found[BATCH_KEPT] = float(self._before() is memory)
            if delivered:
                new = delivered > self._delivered_before
                of_workers = new and self._loaders.from_workers
                self._found[BATCH_LOADED] = LOADED_BY_WORKERS if of_workers else float(new)
        self._before, self._delivered_before = weakref.ref(memory), delivered

    def _digest(self, tensors: Sequence[torch.Tensor]) -> Scalar | None:
        parts = [_some_of(each.detach()) for each in tensors]
        digest = crc32(repr([tuple(each.shape) for each in tensors]).encode())
        if all(accelerator.is_on_host(part.device) for part in parts):
            for part in parts:
                digest = crc32(part.view(torch.uint8).numpy().data, digest)
            return float(digest)
        bits_N = torch.cat(on_one_device([_bits(part) for part in parts]))
        weights_N = self._constants.on(bits_N.device, _WEIGHTS)[: bits_N.numel()]
        return scalar_of(((bits_N * weights_N).sum() + digest) & _DIGEST_BITS)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield plain tensors, with any elements, among what a module gets."""
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if plain and value.numel() and accelerator.is_supported(value.device):
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of elements [N], evenly spread: of the batch first, and none at the border."""
    left = _ELEMENTS
    places: list[slice] = []
    for size in tensor.shape:
        kept = min(size, left if len(places) == tensor.dim() - 1 else min(left, _ALONG))
        stride = -(-size // kept)
        places.append(slice(stride // 2, None, stride))
        left = max(1, left // kept)
    return tensor[tuple(places)].resolve_conj().resolve_neg().contiguous().reshape(-1)


def _bits(part: torch.Tensor) -> torch.Tensor:
    """Return the elements [N] as int64, floating point ones by their bits."""
    if part.is_floating_point() or part.is_complex():
        return part.view(torch.uint8).to(torch.int64)
    return part.to(torch.int64)
