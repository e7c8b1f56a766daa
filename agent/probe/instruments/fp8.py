"""Which layers compute in FP8, when their operands are measured, and their part of a step."""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from math import nan

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mp_agent.probe import accelerator
from mp_agent.probe.instruments.activation_modules import (
    ForwardHook,
    GradientHook,
    Run,
    is_compiled,
)
from mp_agent.probe.instruments.fp8_operands import (
    Operand,
    backward_row,
    backward_scale,
    forward_row,
    has_delayed_scaling,
    operand_row,
    usable,
)
from mp_agent.probe.instruments.instrument import Instrument
from mp_agent.probe.optimizers.parameter_names import strip_wrappers
from mp_agent.probe.statistics.pieces import folded, keep_row
from mp_agent.probe.step.open_step import OpenStep
from mp_agent.records.columns import FP8

COMPILED = "FP8 operands of compiled modules"


class Fp8Layers:
    """The layers of a tree that FP8 may multiply, under unique names. Keeps none alive.

    Those are `nn.Linear` with its subclasses, torchao's `Float8Linear` among them, and modules
    with delayed scaling. names: [M], in the order of the tree. not_covered: what it has besides.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        found = list(_found(root))
        self.names = tuple(name for name, _, compiled in found if not compiled)
        self.not_covered = (COMPILED,) if any(compiled for *_, compiled in found) else ()
        self._modules = tuple(weakref.ref(module) for _, module, compiled in found if not compiled)

    def is_of(self, root: nn.Module) -> bool:
        """Return whether they were found in the tree of `root`."""
        return self._root() is root

    def module(self, place: int) -> nn.Module | None:
        """Return the module at a place among the names; None if it no longer exists."""
        return self._modules[place]()

    @property
    def alive(self) -> Iterator[tuple[int, nn.Module]]:
        """The modules that still exist, with their places among the names."""
        for place, reference in enumerate(self._modules):
            if (module := reference()) is not None:
                yield place, module


def fp8_library(root: nn.Module | None) -> str:
    """Return which library casts layers of a model to FP8; "" for none, joined for several."""
    modules = [] if root is None else list(root.modules())
    found = {
        "torchao": any(map(_is_torchao, modules)),
        "transformer_engine": any(map(has_delayed_scaling, modules)),
    }
    return "+".join(name for name, there in found.items() if there)


def _is_torchao(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Float8Linear" and kind.__module__.partition(".")[0] == "torchao"


def _casts_whole_tensors(module: nn.Module) -> bool:
    """Return whether a layer casts input and weight to FP8, each by its own amax."""
    config = getattr(module, "config", None)
    casts = [getattr(config, f"cast_config_{operand}", None) for operand in ("input", "weight")]
    granularities = [str(getattr(cast, "scaling_granularity", "")).lower() for cast in casts]
    return _is_torchao(module) and all("tensorwise" in each for each in granularities)


def _found(root: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield a unique name without wrapper prefixes, the module, and whether hooks never run."""
    taken: set[str] = set()
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module, bool]] = [("", root, False)]
    while waiting:
        path, module, compiled = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        compiled = compiled or is_compiled(module) or isinstance(module, torch.jit.ScriptModule)
        children = [(key, each) for key, each in module._modules.items() if each is not None]
        for key, child in reversed(children):
            waiting.append((f"{path}.{key}" if path else key, child, compiled))
        if not isinstance(module, nn.Linear) and not has_delayed_scaling(module):
            continue
        name = strip_wrappers(path) or type(module).__name__
        while name in taken:
            name = f"{name}'"
        taken.add(name)
        yield name, module, compiled


class Fp8Sampling:
    """Measures operands of layers from `begin` to `take`.

    Inputs and weights are measured in the forward pass, until `forward_ended`; gradients of the
    outputs of that pass in its backward pass. What runs while `is_training` says no, such as an
    evaluation, is left out, and so are calls of a layer in another mode than that of the step
    before.
    """

    def __init__(self, run: Run, is_training: Callable[[], bool]) -> None:
        self.called = False
        """Whether any call in training was seen since `begin`."""
        self.streams: set[Hashable] = set()
        """Streams of the device on which anything was measured."""
        self._run = run
        self._is_training = is_training
        self._handles: list[RemovableHandle] = []
        self._layers: Fp8Layers | None = None
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._modes: dict[int, bool] = {}
        """By place, whether a layer was in training mode at `begin`."""
        self._scales: dict[int, torch.Tensor] = {}
        """Scales with which the backward pass casts gradients, by place."""
        self._sample = 0

    def begin(self, layers: Fp8Layers) -> None:
        """Put hooks on the layers; what was measured before is forgotten."""
        self.close()
        self._layers, self._modes, self.called = layers, {}, False
        for place, module in layers.alive:
            self._modes[place] = module.training
            hook = ForwardHook(self._run, "FP8 operands", self._add_call, place)
            # Before the hook with which FSDP2 takes the whole weight away again.
            self._handles.append(module.register_forward_hook(hook, prepend=True))

    def forward_ended(self) -> None:
        """Remove the hooks from the layers."""
        while self._handles:
            self._handles.pop().remove()

    def close(self) -> None:
        """Remove the hooks, and forget what was measured."""
        self.forward_ended()
        # Hooks of gradients go with the graph; those of an earlier sample measure nothing.
        self._sample += 1
        self._layers, self._rows, self._scales, self.streams = None, {}, {}, set()

    def take(self, *, one_pass: bool) -> torch.Tensor | None:
        """Return float64 [M, C], NaN for layers that were not called; None if none was.

        one_pass: whether no other backward pass has followed, so that the amax of gradients is
        that of the pass whose scales were kept.
        """
        for place, scale_N in self._scales.items() if one_pass else ():
            module = self._module(place)
            row = None if module is None else backward_row(module, scale_N)
            if row is not None:
                self._keep(place, row)
        rows, streams = self._rows, self.streams
        count = 0 if self._layers is None else len(self._layers.names)
        self.close()
        self.streams = streams
        if not rows:
            return None
        found = [folded(FP8, accelerator.on_one_device(each)) for each in rows.values()]
        one_each = dict(zip(rows, accelerator.on_one_device(found), strict=True))
        device = next(iter(one_each.values())).device
        absent = torch.full((len(FP8.names),), nan, dtype=torch.float64, device=device)
        return torch.stack([one_each.get(place, absent) for place in range(count)])

    def _add_call(self, place: int, inputs: object, output: object) -> None:
        module = self._module(place)
        if module is None or not self._is_training() or module.training != self._modes[place]:
            return
        self.called = True
        if has_delayed_scaling(module):
            row, scale_N = forward_row(module), backward_scale(module)
            if row is not None:
                self._keep(place, row)
            if scale_N is not None:
                self._scales[place] = scale_N
            return
        is_cast = _casts_whole_tensors(module)
        if isinstance(inputs, tuple) and inputs:
            self._add(place, "input", inputs[0], is_cast=is_cast)
        self._add(place, "weight", module._parameters.get("weight"), is_cast=is_cast)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            key = self._sample, place
            hook = GradientHook(self._run, "FP8 operands", self._add_gradient, key)
            register: Callable[[object], RemovableHandle] = output.register_hook
            register(hook)

    def _module(self, place: int) -> nn.Module | None:
        return None if self._layers is None else self._layers.module(place)

    def _add_gradient(self, key: tuple[int, int], gradient: object) -> None:
        sample, place = key
        if sample == self._sample:
            self._add(place, "gradient", gradient)

    def _add(self, place: int, operand: Operand, value: object, *, is_cast: bool = False) -> None:
        tensor = usable(value)
        if tensor is not None:
            self._keep(place, operand_row(tensor, operand, is_cast=is_cast))

    def _keep(self, place: int, row: torch.Tensor) -> None:
        keep_row(FP8, self._rows.setdefault(place, []), row)
        if not accelerator.is_on_host(row.device):
            self.streams.add(accelerator.current_stream(row.device))


_NONE: Mapping[str, tuple[str, ...]] = {}


class StepFp8(Instrument):
    """The operands of linear layers, in the first forward and backward pass of sampled steps."""

    subject = "FP8 operands"

    def __init__(self, sampling: Fp8Sampling, note_unsupported: Callable[[str], None]) -> None:
        self._sampling = sampling
        self._note_unsupported = note_unsupported
        self._found: Fp8Layers | None = None
        self._layers = _NONE
        self._begun = False
        self._passes = 0

    def layers(self, model: nn.Module | None) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the layers, by family; the same object while they are the same."""
        if model is not None and (self._found is None or not self._found.is_of(model)):
            self._look_at(model)
        return self._layers

    def begin(self, model: nn.Module | None) -> None:
        """Put hooks on the layers for the next forward pass."""
        self._begun, self._passes = False, 0
        if model is None:
            return
        found = self._look_at(model)  # scripts add, wrap and replace modules
        for feature in found.not_covered:
            self._note_unsupported(feature)
        if found.names:
            self._sampling.begin(found)
            self._begun = True

    def end(self, step: OpenStep) -> None:
        """Remove the hooks from the layers; outputs keep theirs for the backward pass.

        Of a backward before any call, such as a discriminator's, both wait for the next one.
        """
        if not self._sampling.called:
            return
        self._passes += 1
        self._sampling.forward_ended()

    def finish(self, step: OpenStep) -> None:
        """Add to the step what was measured."""
        if not self._begun:
            return
        self._begun = False
        rows_MC = self._sampling.take(one_pass=self._passes == 1)
        if rows_MC is not None:
            step.own_rows[FP8.name] = rows_MC
            step.streams.update(self._sampling.streams)

    def close(self) -> None:
        """Remove the hooks."""
        self._begun = False
        self._sampling.close()

    def _look_at(self, model: nn.Module) -> Fp8Layers:
        found = self._found = Fp8Layers(model)
        names = {FP8.name: found.names} if found.names else _NONE
        self._layers = self._layers if names == self._layers else names
        return found
